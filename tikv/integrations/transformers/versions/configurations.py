"""What configurations of models say: which layers cache what, and which attention is set.

- From 5.19 on `get_layer_types_and_kwargs` gives the window of each layer; before, it is in the configuration's fields.
- Layers that reuse other layers' keys are left out at the end, or are a `DummyLayer` where that class exists.
- Configurations declare layers with a state other than keys and values by type in 5.x, and by other fields before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, NamedTuple

import torch
import transformers
from transformers import cache_utils

from tikv.integrations.transformers.versions.installed import VERSION

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
    for layer_type, keywords in zip(types, options, strict=True):
        state = {name: value for name, value in keywords.items() if name != "sliding_window"}
        if layer_type in _STATE_ALONE:
            kinds.append(LayerKind("state", state=state))
        elif layer_type in _ATTENTION_BESIDE_STATE:
            beside = _kind(_ATTENTION_BESIDE_STATE[layer_type], keywords.get("sliding_window"), None)
            kinds.append(beside._replace(state=state))
        else:
            kinds.append(_kind(layer_type, keywords.get("sliding_window"), foreign))
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


def adds_position_bias(config: Any) -> bool:
    """Whether a model adds a bias to each score that follows from the number of its key among those that it is given.

    These are ALiBi and T5's relative positions: what is right only as long as the first key is that of the first token.
    """
    alibi = field(config, "alibi") or getattr(field(config, "attn_config"), "alibi", False)
    relative = field(config, "relative_attention_num_buckets") is not None
    return bool(alibi) or relative or getattr(config, "model_type", "") == "bloom"


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
