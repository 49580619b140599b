"""The keywords that models pass to their attention function, and which function honours each."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tikv.errors import OptionError
from tikv.integrations.transformers.names import ATTENTION_CALL

ATTEND = "each way in which `attend` computes"
CHOSEN = "`chosen_keys`, where few are read, else the mask, of which it becomes a part"
MASK = "the mask, of which it becomes a part"
MODEL = "the model's own function, the one of attention 'eager'"
NOTHING = "nothing: it changes no score, or only says what the mask says too"

# All keywords of transformers' attention functions, 4.56 to 5.24, and of models' calls of them. Any other keyword is
# left to the model's own function.
KEYWORDS: dict[str, str] = {
    "scaling": ATTEND,
    "dropout": ATTEND,
    "softcap": ATTEND,
    "s_aux": ATTEND,  # logits of learned sinks, (heads,)
    "is_causal": ATTEND,
    "position_bias": MASK,
    "indices": CHOSEN,  # the keys that an indexer chose for each query, where attention is not named "eager" or "sdpa"
    "block_indices": CHOSEN,  # blocks of them
    "sinks": MODEL,  # sink logits for each query
    "head_mask": MODEL,
    "output_attentions": MODEL,  # if it is true
    "sliding_window": NOTHING,  # this and those below are for kernels that make their own masks
    "cu_seq_lens_q": NOTHING,
    "cu_seq_lens_k": NOTHING,
    "max_length_q": NOTHING,
    "max_length_k": NOTHING,
    "seq_idx": NOTHING,
    "position_ids": NOTHING,
    "cache_position": NOTHING,
    "deterministic": NOTHING,
    "kernel_options": NOTHING,
    "use_cache": NOTHING,
    "output_hidden_states": NOTHING,
    "output_router_logits": NOTHING,
    "return_dict": NOTHING,
    "num_items_in_batch": NOTHING,
}
HEARD = frozenset(name for name, by in KEYWORDS.items() if by in (ATTEND, NOTHING))


def said(keywords: Mapping[str, Any]) -> list[str]:
    """The given keywords that change scores or are unknown."""
    names = [name for name, value in keywords.items() if value is not None and name not in HEARD]
    if "output_attentions" in names and not keywords["output_attentions"]:
        names.remove("output_attentions")
    return names


_declared: set[Any] = set()  # classes of attention modules and of configurations


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_declared(kind: Any) -> None:
    """Check that the model of this class of attention modules declares that its attention can be replaced.

    Raises:
        OptionError: it declares neither sdpa nor another attention, so that its masks are for its own function only.
    """
    if kind not in _declared:
        _check_models_of(kind.__module__)
        _declared.add(kind)


def check_configured(config: Any) -> None:
    """Check that the model of a configuration, if it was loaded, declares that its attention can be replaced.

    Raises:
        OptionError: as `check_declared`.
    """
    kind = type(config)
    if kind not in _declared and (module := kind.__module__.replace("configuration_", "modeling_")) in sys.modules:
        _check_models_of(module)
        _declared.add(kind)


def _check_models_of(module_name: str) -> None:
    models: list[Any] = [
        model
        for model in vars(sys.modules.get(module_name, object)).values()
        if isinstance(model, type) and issubclass(model, PreTrainedModel) and model.__module__ == module_name
    ]
    if not models or any(model._supports_sdpa or model._supports_attention_backend for model in models):
        return
    raise OptionError(
        f"{ATTENTION_CALL}: {models[0].__name__} supports only its own attention (_supports_sdpa and "
        f'_supports_attention_backend are False). Call model.set_attn_implementation("eager").'
    )


_eager: dict[Any, Callable[..., Any] | None] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _find_own_function(kind: Any) -> None:
    """Put into `_eager` the function that modules of this class would call under the name "eager", or None."""
    if kind in _eager:
        return
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    names = [name for name in getattr(code, "co_names", ()) if name.endswith("eager_attention_forward")]
    _eager[kind] = getattr(forward, "__globals__", {}).get(names[0]) if names else None


def by_own_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    names: Sequence[str],
    keywords: Mapping[str, Any],
) -> tuple[Any, Any]:
    """The result of the model's own function for keywords that only it knows, called with a mask that it takes.

    Raises:
        OptionError: the module has no such function.
    """
    kind: Any = type(module)
    _find_own_function(kind)
    function = _eager[kind]
    if function is None:
        raise OptionError(
            f"{ATTENTION_CALL}: {kind.__name__} passes {', '.join(names)}, which only an attention function of its own "
            f'would understand, and it has none. Call model.set_attn_implementation("eager").'
        )
    if mask is None:
        mask = torch.zeros((query.shape[2], key.shape[2]), dtype=query.dtype, device=query.device)
    out, weights = function(module, query, key, value, added(mask, query), **keywords)
    return out, weights


def causal_mask(query: torch.Tensor, key: Any) -> Any:
    """(T, n) bool: queries belong to the newest keys, and each sees the keys up to its own."""
    shape = query.shape[2], key.shape[2]
    return torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])


def added(mask: Any, like: Any) -> Any:
    """An additive mask with the dtype of `like`; where a bool mask hides keys, it has the least number."""
    if mask.dtype is not torch.bool:
        return mask
    least = torch.finfo(like.dtype).min
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(~mask, least)


def joined(
    module: Any, query: torch.Tensor, key: Any, mask: Any, said: Sequence[str], keywords: Mapping[str, Any]
) -> Any:
    """The mask combined with what keywords add to the scores.

    Args:
        module: the attention module.
        query, key: as in `attend`.
        mask: bool or additive, of up to four axes, with causality included; or None.
        said: the given keywords that change scores.
        keywords: all given keywords.

    Raises:
        OptionError: blocks of keys were chosen by a module that does not declare their size.
    """
    if "block_indices" in said:
        indexer: Any = getattr(module, "indexer", None)
        if not hasattr(indexer, "build_block_mask"):
            raise OptionError(
                f"{ATTENTION_CALL}: {type(module).__name__} chose blocks of keys (block_indices), but has no "
                f'indexer.build_block_mask to make a mask of them. Call model.set_attn_implementation("eager").'
            )
        positions = keywords.get("position_ids")
        tokens, held = query.shape[2], key.shape[2]
        if positions is None:
            positions = torch.arange(held - tokens, held, device=query.device)
        positions = positions.expand(query.shape[0], tokens)
        blocks = keywords["block_indices"]
        mask = indexer.build_block_mask(blocks, mask, held, query.dtype, query.device, positions)
    if "indices" in said:
        selected = _mask_of(keywords["indices"], key.shape[2])
        if mask is None:
            mask = selected
        else:
            mask = mask & selected if mask.dtype is torch.bool else mask.masked_fill(~selected, float("-inf"))
    if "position_bias" in said:
        bias = keywords["position_bias"].to(query.dtype)
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.where(mask, bias, float("-inf"))
        else:
            mask = bias if mask is None else bias + mask
    return mask


def _mask_of(indices: torch.Tensor, held: int) -> Any:
    """(batch, 1, T, held) bool: True for keys whose numbers are in `indices`, (batch, T, k); -1 stands for no key."""
    numbers = indices.long()
    numbers = torch.where((numbers >= 0) & (numbers < held), numbers, held)
    selected = torch.zeros((*indices.shape[:2], held + 1), dtype=torch.bool, device=indices.device)
    return selected.scatter(-1, numbers, True)[:, None, :, :held]
