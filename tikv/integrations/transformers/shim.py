"""The differences between transformers' versions that concern caches. Nothing else in this package asks for a version.

- `get_mask_sizes` is given the cache positions of the new tokens up to 5.3, their number from 5.4 on.
- `lazy_initialization` is given the keys in 4.x, keys and values in 5.x.
- The capacity getter is `get_max_cache_shape`; from 5.13 on `get_max_length`, and later versions drop the old name.
- `crop(n)` with n < 0 drops -n tokens; n > 0 keeps n, and is refused from 5.16 on; 0 keeps nothing, from 5.14 on all.
- Layers that reuse other layers' keys are left out at the end, or are a `DummyLayer` where that class exists.
- From 5.14 on `activate_past_recording` says that the next `crop` may go back beyond a window.
- From 5.19 on `get_layer_types_and_kwargs` gives the window of each layer; before, it is in the configuration's fields.
- Masks are made by `vmap` in 4.x, and only if a caller asks for it in 5.x.
- `generate` prefills by `_prefill` in 5.x, within its loop in 4.x; before 5.24 it calls a cache `past_key_values`.
- `generate` gives a callable `custom_generate` its streamer in 4.x, and not in 5.x, where its frame is read.
- `prepare_inputs_for_generation` looks at `cache_position` on the host in 4.x.
- Configurations declare layers with a state other than keys and values by type in 5.x, and by other fields before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any, NamedTuple

import torch
import transformers
from transformers import cache_utils, masking_utils

from tikv.errors import OptionError

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# Whether prompts always get a mask if the cache's steps may be compiled; newer versions have a keyword for that.
MASKS_PROMPTS_OF_COMPILED = "allow_is_causal_skip" not in inspect.signature(masking_utils.create_causal_mask).parameters

# Whether `vmap` makes masks, which does not work while torch handles an operation on a subclass of its tensors.
MASKS_BY_VMAP = "use_vmap" not in inspect.signature(masking_utils.sdpa_mask).parameters

CROP_IS_RELATIVE = VERSION >= (5, 14)  # the argument counts tokens to remove, as a negative number
CROP_REFUSES_POSITIVE = VERSION >= (5, 16)

MODELS_UPDATE_PAGES = VERSION >= (5, 24)  # and masks are not made in continuous batching

_STATE_FIELDS = (
    "state_size",
    "conv_kernel",
    "conv_L_cache",
    "lru_width",
    "layers_block_type",
    "linear_conv_kernel_dim",
    "rescale_every",
    "attn_layers",
    "inference_state_dtype",
)  # fields of configurations whose layers keep another state than keys and values, in versions that do not say so
_STATE_PREFIXES = ("mamba_", "ssm_")


_ATTENTION_BESIDE_STATE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
_STATE_ALONE = ("linear_attention", "conv")
_INDEXED = ("indexed_attention", "minimax_m3_sparse")


class LayerKind(NamedTuple):
    """What a layer caches.

    Args:
        kind: "full" or "sliding" keys and values, a "state" alone, "none", or transformers' name for something else.
        window: the window of a sliding layer, the current token included.
        state: options of the state that a layer has, alone or beside keys and values; None without a state.
        indexed: whether the layer has keys of an indexer beside those of attention.
    """

    kind: str
    window: int | None = None
    state: dict[str, Any] | None = None
    indexed: bool = False


def layer_kinds(config: Any) -> list[LayerKind]:
    """What each layer of the decoder caches.

    Raises:
        AttributeError: the configuration does not say how many layers there are.
    """
    if VERSION < (5, 19):
        foreign = _foreign_state(config)
        return [_kind(t, w, foreign) for t, w in zip(*_types_and_windows(config), strict=True)]
    types, options = cache_utils.get_layer_types_and_kwargs(config)
    # If the configuration names no types, transformers assumes that all layers have attention, even those with states.
    foreign = None if getattr(config, "layer_types", None) is not None else _foreign_state(config)
    kinds = []
    for layer_type, given in zip(types, options, strict=True):
        state = {name: value for name, value in given.items() if name != "sliding_window"}
        if layer_type in _STATE_ALONE:
            kinds.append(LayerKind("state", state=state))
        elif layer_type in _ATTENTION_BESIDE_STATE:
            beside = _kind(_ATTENTION_BESIDE_STATE[layer_type], given.get("sliding_window"), None)
            kinds.append(beside._replace(state=state))
        else:
            kinds.append(_kind(layer_type, given.get("sliding_window"), foreign))
    return kinds


def decoder_of(config: Any) -> Any:
    """The configuration of the decoder of this model, with as many layers as the decoder has.

    A T5's configuration has the number of the encoder's layers, which transformers uses for both.
    """
    text = config.get_text_config(decoder=True)
    depth = getattr(config, "num_decoder_layers", None)
    if text is config or depth is None or not getattr(config, "is_encoder_decoder", False):
        return text
    if text.num_hidden_layers != depth:
        text.num_hidden_layers = depth  # `get_text_config` returned a copy
    return text


def field(config: Any, name: str) -> Any:
    """A field of a configuration: None if it does not exist, a list of the layers' values if these may differ.

    In versions of transformers with such fields, reading one from the whole configuration raises.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def attention_of(config: Any) -> str | None:
    """The name of a configuration's attention, which each layer needs for each token.

    The public property takes five microseconds, since a configuration looks up its own attributes.
    """
    if torch.compiler.is_dynamo_compiling():
        return config._attn_implementation  # type: ignore[no-any-return]
    try:
        return object.__getattribute__(config, "_attn_implementation_internal")  # type: ignore[no-any-return]
    except AttributeError:  # it only looks like a configuration
        return config._attn_implementation  # type: ignore[no-any-return]


def bounded(kinds: list[LayerKind], limit: int | None) -> tuple[list[LayerKind], int | None]:
    """The layers of a cache for `limit` tokens, and the limit that remains: None if all of them slide.

    Sliding layers continue beyond it, as in transformers' own static caches: it only bounds their windows. If there is
    a full layer, which must stop, all of them stop, before a step rather than in the middle of it.
    """
    if limit is None or any(layer.kind not in ("sliding", "state", "none") for layer in kinds):
        return kinds, limit
    return [layer._replace(window=layer.window and min(layer.window, limit)) for layer in kinds], None


@functools.cache
def without_a_cache(kind: Any) -> str | None:
    """Why no model with this class of configuration takes transformers' caches; None if one does or is not known.

    Args:
        kind: the class of a model's configuration, or of its decoder's.
    """
    name = kind.__module__
    if not name.startswith("transformers.models."):
        return None
    try:
        module = importlib.import_module(name.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    models = [cls for cls in vars(module).values() if getattr(cls, "config_class", None) is kind]
    generate = [cls for cls in models if issubclass(cls, transformers.GenerationMixin)]
    for cls in generate:
        supports = getattr(cls, "_supports_default_dynamic_cache", None)
        if inspect.ismethod(supports) and not supports():  # of the class in new versions alone
            return f"{cls.__name__} has a cache of its own kind"
    # Some pass on to the model in them what they do not name.
    if generate and not any(
        {"cache", "past_key_values"} & set(inspect.signature(cls.forward).parameters) for cls in models
    ):
        return f"{generate[0].__name__} takes no cache"
    return None


def _types_and_windows(config: Any) -> tuple[list[str], list[int | None]]:
    sliding = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        one = "sliding_attention" if sliding else "chunked_attention" if chunk else "full_attention"
        types = [one] * config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", None) or 0  # the last layers read what earlier ones cached
    types = list(types)[: len(types) - shared]
    return types, [chunk if t == "chunked_attention" else sliding or chunk for t in types]


def _kind(layer_type: str, window: int | None, foreign: str | None) -> LayerKind:
    if foreign is not None:
        return LayerKind(foreign)
    if layer_type == "full_attention":
        return LayerKind("full")
    if layer_type in _INDEXED:
        return LayerKind("full", indexed=True)
    if layer_type in ("sliding_attention", "chunked_attention"):
        return LayerKind("sliding", window) if window else LayerKind("full")
    return LayerKind("none" if layer_type == "dummy" else layer_type)


def _foreign_state(config: Any) -> str | None:
    """The field that shows that a layer has another state, or None."""
    for name in _STATE_FIELDS:
        value = field(config, name)
        if value is not None and not (name == "conv_kernel" and isinstance(value, (list, tuple))):  # that of an encoder
            return f"state ({name})"
    return next((f"state ({name})" for name in vars(config) if name.startswith(_STATE_PREFIXES)), None)


def layer_without_keys() -> Any:
    """A placeholder for a layer that caches nothing."""
    return cache_utils.DummyLayer()


def query_length(queries: Any) -> int:
    """The number of new tokens, from the argument of `get_mask_sizes`: that number or their positions."""
    return queries if isinstance(queries, int) else int(queries.shape[0])


def said_of_tokens(queries: Any) -> tuple[Any, Any]:
    """The attention_mask (batch, n) and the position_ids that the caller of `get_mask_sizes` has.

    Either is None if the caller has none of this form. transformers passes neither to a cache, and from 5.4 on not even
    the positions that `queries` were before. So they are read from the frames of the mask functions, which call it.
    """
    frame, found = sys._getframe(1), {}
    for _ in range(6):
        if frame.f_globals.get("__name__") == masking_utils.__name__:
            found = frame.f_locals
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    padding, positions = found.get("attention_mask"), found.get("position_ids")
    if not isinstance(queries, int):
        positions = queries[None]
    return tuple(a if isinstance(a, torch.Tensor) and a.ndim == 2 else None for a in (padding, positions))  # type: ignore[return-value]


def tokens_after_crop(n: int, length: int) -> int | None:
    """The length that `crop(n)` leaves in this version of transformers; None if it refuses this n."""
    if n < 0:
        return max(0, length + n)
    if CROP_IS_RELATIVE and n == 0:
        return length
    return None if CROP_REFUSES_POSITIVE else min(n, length)


def call_of_generate() -> dict[str, Any]:
    """What was passed to the `generate` that calls, by name: its streamer, its assistant and ``synced_gpus``.

    New versions give them to their own loops alone.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            names = ("streamer", "assistant_model", "synced_gpus")
            return {name: frame.f_locals[name] for name in names if frame.f_locals.get(name) is not None}
        frame = frame.f_back
    return {}


def usual_loop(
    model: Any, mode: Any, ids: Any, processors: Any, criteria: Any, config: Any, call: dict[str, Any], streamer: Any,
    synced_gpus: bool, kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """What `generate` does in this mode by its own loop.

    Raises:
        OptionError: this version of transformers has no such loop, or keeps it within `generate`.
    """
    from transformers.generation import GenerationMode

    loops = {
        GenerationMode.SAMPLE: "_sample",
        GenerationMode.GREEDY_SEARCH: "_sample",
        GenerationMode.BEAM_SEARCH: "_beam_search",
        GenerationMode.BEAM_SAMPLE: "_beam_search",
        GenerationMode.ASSISTED_GENERATION: "_assisted_decoding",
    }
    loop = getattr(model, loops.get(mode, ""), None)
    names = inspect.signature(loop).parameters if loop is not None else {}
    if loop is None or "candidate_generator" in names:
        raise OptionError(
            f"captured: {mode.value.replace('_', ' ')} is not supported, and this version of transformers has no loop "
            f"for it that another could call. Leave custom_generate out."
        )
    options = {"streamer": streamer, "assistant_model": call.get("assistant_model"), "inputs_tensor": ids}
    return loop(
        ids, logits_processor=processors, stopping_criteria=criteria, generation_config=config,
        synced_gpus=synced_gpus, **{name: option for name, option in options.items() if name in names}, **kwargs,
    )  # fmt: skip


def prompt(model: Any, ids: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The outputs of a prompt as `generate` computes it, without a compiler, and the arguments of the next step."""
    compiles, config.disable_compile = config.disable_compile, True
    try:
        if hasattr(model, "_prefill"):
            outputs = model._prefill(ids, config, kwargs)
        else:
            kwargs = model._get_initial_cache_position(ids.shape[1], ids.device, kwargs)
            if config.prefill_chunk_size is not None:
                kwargs = model._prefill_chunking(ids, config, **kwargs)
            outputs = model(**model.prepare_inputs_for_generation(ids, **kwargs), return_dict=True)
    finally:
        config.disable_compile = compiles
    return outputs, model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)


def why_no_steps(model: Any) -> str:
    """Why steps of a model cannot be told their position by a tensor; empty if they can."""
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    names = inspect.signature(model.forward).parameters
    return "" if "position_ids" in names else f"{type(model).__name__} takes no position_ids"


def kwargs_of_steps(model: Any, kwargs: dict[str, Any], held: int, more: int) -> dict[str, Any]:
    """The arguments of each of at most `more` steps, of which the first comes after `held` tokens.

    ``position_ids`` and ``cache_position`` are to be increased after each step. The mask covers all steps.
    """
    made = {name: a for name, a in kwargs.items() if name not in ("inputs_embeds", "next_sequence_length")}
    padding, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    device = model.device
    if padding is not None:
        made["attention_mask"] = torch.nn.functional.pad(padding.bool(), (0, more), value=True)
    if positions is not None:
        made["position_ids"] = positions[..., -1:].clone()
    elif padding is not None:
        made["position_ids"] = padding.long().sum(-1, keepdim=True) - 1
    else:
        made["position_ids"] = torch.full((1, 1), held, device=device)
    if "cache_position" in kwargs:
        made["cache_position"] = torch.full((1,), held, device=device)
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if kwargs.get(name) is not None:
            made[name] = kwargs[name][..., -1:].clone()
    return made


def inputs_of_step(model: Any, token: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model for one token of each row, without a look at numbers of the device."""
    if hasattr(model, "_cache_dependant_input_preparation"):  # which compares positions on the host
        return {"input_ids": token, **kwargs}
    return model.prepare_inputs_for_generation(token, **kwargs)  # type: ignore[no-any-return]


def generated(text: Any, scores: Any, logits: Any, cache: Any) -> Any:
    """What `generate` returns with ``return_dict_in_generate``."""
    from transformers.generation import GenerateDecoderOnlyOutput

    name = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
    return GenerateDecoderOnlyOutput(sequences=text, scores=scores, logits=logits, **{name: cache})
