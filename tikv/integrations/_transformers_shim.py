"""Where transformers' versions differ in what a cache has to be. Nothing else in this package asks for a version.

- `get_mask_sizes` is given the cache positions of the new tokens up to 5.3, their number from 5.4 on.
- `lazy_initialization` is given the keys in 4.x, keys and values in 5.x.
- The capacity getter is `get_max_cache_shape`; from 5.13 on `get_max_length`, and later the old name goes away.
- `crop(n)` with n < 0 drops -n tokens; n > 0 keeps n, and is refused from 5.16 on; 0 keeps nothing, from 5.14 on all.
- Layers that reuse other layers' keys are left out at the end, or stand as `DummyLayer` where that class exists.
- From 5.14 on `activate_past_recording` says that the next `crop` may go back behind a window.
- From 5.19 on `get_layer_types_and_kwargs` tells the window of each layer; before, it is in the configuration's fields.
- Configurations say which layers hold another state than keys and values by their type in 5.x, by other fields before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from transformers import cache_utils

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

CROP_IS_RELATIVE = VERSION >= (5, 14)  # the argument counts tokens to remove, as a negative number
CROP_REFUSES_POSITIVE = VERSION >= (5, 16)

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


STATES = frozenset({"linear_attention", "conv"})  # layers with a state in place of keys and values


class LayerKind(NamedTuple):
    """What a layer caches: "full", "sliding" with a window (the current token included), "none", or another."""

    kind: str
    window: int | None = None


def layer_kinds(config: Any) -> list[LayerKind]:
    """What each layer of the decoder caches; others than full, sliding, none and `STATES` are refused by name."""
    if VERSION >= (5, 19):
        types, kwargs = cache_utils.get_layer_types_and_kwargs(config)
        windows = [k.get("sliding_window") for k in kwargs]
    else:
        types, windows = _types_and_windows(config)
    served = VERSION >= (5, 19) and STATES.intersection(types) and not STATES.issuperset(types)
    foreign = None if served else _foreign_state(config)
    return [_kind(t, w, foreign) for t, w in zip(types, windows, strict=True)]


def bounded(kinds: list[LayerKind], limit: int | None) -> tuple[list[LayerKind], int | None]:
    """The layers of a cache for `limit` tokens, and the limit that stays: none where all of them slide.

    They go on beyond it, as in transformers' own static caches: it only bounds their windows. With a full layer among
    them, which has to stop, all of them stop, before a step rather than in the middle of it.
    """
    if limit is None or any(kind not in ("sliding", "none") for kind, _ in kinds):
        return kinds, limit
    return [LayerKind(kind, window and min(window, limit)) for kind, window in kinds], None


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
    if layer_type in ("sliding_attention", "chunked_attention"):
        return LayerKind("sliding", window) if window else LayerKind("full")
    return LayerKind("none" if layer_type == "dummy" else layer_type)


def _foreign_state(config: Any) -> str | None:
    """The field that gives away a layer with a state of its own, or None."""
    for name in _STATE_FIELDS:
        if getattr(config, name, None) is not None:
            return f"state ({name})"
    return next((f"state ({name})" for name in vars(config) if name.startswith(_STATE_PREFIXES)), None)


def expands_what_is_cached(config: Any) -> bool:
    """Whether the model may compute keys and values from what `update` returns: from latent vectors, as 5.x caches."""
    return getattr(config, "kv_lora_rank", None) is not None


def state_layer(config: Any, index: int) -> Any:
    """Transformers' own layer for the state of layer `index`."""
    types, kwargs = cache_utils.get_layer_types_and_kwargs(config)
    return cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[types[index]](**kwargs[index])


def layer_without_keys() -> Any:
    """What stands for a layer that caches nothing."""
    return cache_utils.DummyLayer()


def query_length(queries: Any) -> int:
    """The number of new tokens, from the argument of `get_mask_sizes`: that number or their positions."""
    return queries if isinstance(queries, int) else int(queries.shape[0])


def tokens_after_crop(n: int, length: int) -> int | None:
    """The length that `crop(n)` leaves in this version of transformers; None: it refuses this n."""
    if n < 0:
        return max(0, length + n)
    if CROP_IS_RELATIVE and n == 0:
        return length
    return None if CROP_REFUSES_POSITIVE else min(n, length)
