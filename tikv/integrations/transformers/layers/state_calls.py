"""Calls of a model's modules that keep a state in the cache: the pieces in which they run, and each one's tokens.

A module takes the state from the cache and gives it back after its last token; only the state after that one is known.
So `watch` wraps the `forward` of these classes, once. Of a cache that records states, a call is made in pieces: one
token at a time for the newest tokens, so that the cache sees the state between them. Any other call runs as it is.

Mamba's first form, in Jamba and Zamba, is also called one token at a time if it goes on from a state: transformers'
scan of several tokens begins without one, whatever the cache holds.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import cache_utils

from tikv.errors import OptionError
from tikv.integrations.transformers.names import CACHE

USES = ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")
_BEGINS_WITHOUT_STATE = "mamba_selective_scan"  # a function that modules call for several tokens
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")  # arguments of several texts in one row, which cannot be cut

_is_traced = torch.compiler.is_dynamo_compiling


class StateCall:
    """A call of a module that is running.

    Attributes:
        tokens: how many tokens its present piece has.
        is_first: whether this is the first piece.
        noted: the states whose value before this piece has been recorded, as (layer, number).
        recorded: the tokens of this call whose pieces have been recorded, for each state.
    """

    def __init__(self) -> None:
        self.tokens, self.is_first = 0, True
        self.noted, self.recorded = set[tuple[int, int]](), dict[tuple[int, int], int]()

    def begin(self, tokens: int, is_first: bool) -> None:
        """Go on to a piece."""
        self.tokens, self.is_first = tokens, is_first
        self.noted.clear()

    def note(self, layer: int, number: int) -> bool:
        """Whether a state is used for the first time in this piece, and so is still what it was before."""
        place = layer, number
        if place in self.noted:
            return False
        self.noted.add(place)
        self.recorded[place] = self.recorded.get(place, 0) + self.tokens
        return True


def watch(text: Any, record_states: int) -> bool:
    """From now on, modules of this configuration's models run in pieces where a cache needs that.

    Returns:
        Whether any module is known that keeps its state in a cache.

    Raises:
        OptionError: states are to be recorded, and no module is known that keeps them in a cache.
    """
    watched = [watch_class(cls) for cls in _modules_of(type(text))]
    if record_states and not (any(watched) and hasattr(cache_utils.Cache, USES[0])):
        raise OptionError(
            f"{CACHE}: record_states={record_states} is not possible: no module of {type(text).__name__}'s models "
            f"is known to read its state from the cache with transformers {transformers.__version__}. Leave "
            f"record_states out."
        )
    if record_states:
        let_generate_ask_the_cache()
    return any(watched)


def _modules_of(kind: type) -> list[Any]:
    """The classes of modules in the file of the models with this class of configuration."""
    try:
        file = importlib.import_module(kind.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return []
    return [cls for cls in vars(file).values() if isinstance(cls, type) and issubclass(cls, torch.nn.Module)]


def watch_class(cls: Any) -> bool:
    """Whether modules of this class use states in a cache; if so, their calls run in pieces from now on."""
    names = _names_in(cls)
    if names.isdisjoint(USES):
        return False
    if not hasattr(cls.forward, "tikv_wrapped"):
        cls.forward = _in_pieces(cls.forward, _BEGINS_WITHOUT_STATE in names)
    return True


def _names_in(cls: Any) -> set[str]:
    """The names of attributes and globals in the methods of a class of models."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    methods = [a for base in bases for a in vars(base).values() if callable(a)]
    codes = [getattr(_unwrapped(method), "__code__", None) for method in methods]
    return {name for code in codes if code is not None for name in code.co_names}


def _unwrapped(method: Any) -> Any:
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


def _in_pieces(forward: Callable[..., Any], begins_without_state: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(module: Any, *args: Any, **options: Any) -> Any:
        if _is_traced():
            return forward(module, *args, **options)
        cache = next((a for a in (*options.values(), *args) if hasattr(a, "state_call")), None)
        if cache is None or cache.state_call is not None:
            return forward(module, *args, **options)
        alone = begins_without_state and any(cache.layers[module.layer_idx].has_previous_state.values())
        if not (cache.record_states or alone) or any(options.get(name) is not None for name in _PACKED):
            return forward(module, *args, **options)
        tokens = next(a.shape[1] for a in (*args, *options.values()) if isinstance(a, torch.Tensor))
        first = 1 if alone else max(1, tokens - cache.record_states)
        running = cache.state_call = StateCall()
        try:
            return _joined(list(_results(forward, module, args, options, running, tokens, first)))
        except BaseException:
            cache.undo(running)
            raise
        finally:
            cache.state_call = None

    call.tikv_wrapped = forward  # type: ignore[attr-defined]
    return call


def _results(
    forward: Callable[..., Any], module: Any, args: Any, options: Any, call: StateCall, tokens: int, first: int
) -> Iterator[Any]:
    """What a module returns of its first tokens together, and of each other token alone."""
    for start, end in ((0, first), *((i, i + 1) for i in range(first, tokens))):
        call.begin(end - start, not start)
        yield forward(
            module,
            *(_part(a, start, end, tokens) for a in args),
            **{name: _part(a, start, end, tokens) for name, a in options.items()},
        )


def _part(a: Any, start: int, end: int, tokens: int) -> Any:
    """Tokens start..end of an argument that has an axis of tokens."""
    if isinstance(a, torch.Tensor) and a.ndim > 1 and a.shape[1] == tokens:
        return a[:, start:end]
    return a


def _joined(results: list[Any]) -> Any:
    """The results of all pieces as of one call."""
    if len(results) == 1:
        return results[0]
    if isinstance(results[0], tuple):
        return tuple(_joined([*parts]) for parts in zip(*results, strict=True))
    return None if results[0] is None else torch.cat(results, 1)


_METHOD = "_validate_model_kwargs"  # private, so it may change or go: then assisted decoding is refused as before
_STATEFUL = "_is_stateful"


def let_generate_ask_the_cache() -> None:
    """From now on, `generate` does not refuse assisted decoding of a model with states if its cache records them.

    transformers refuses it by an attribute of the model's class, before it looks at the cache. The method that sees the
    cache before is wrapped, once. For a call with such a cache it sets the attribute of this model to False, and for
    the next call without one it takes that back.
    """
    validate = getattr(transformers.GenerationMixin, _METHOD, None)
    if validate is None or hasattr(validate, "tikv_wrapped"):
        return

    @functools.wraps(validate)
    def asking(model: Any, model_kwargs: Any) -> Any:
        if getattr(model_kwargs.get("cache", model_kwargs.get("past_key_values")), "record_states", 0):
            vars(model)[_STATEFUL] = False
        else:
            vars(model).pop(_STATEFUL, None)
        return validate(model, model_kwargs)

    asking.tikv_wrapped = validate  # type: ignore[attr-defined]
    setattr(transformers.GenerationMixin, _METHOD, asking)
