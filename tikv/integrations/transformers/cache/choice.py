"""The layers that a `TikvCache` makes for those of its model."""

from __future__ import annotations

from typing import Any

from tikv.integrations.transformers.layers.cross import SlidingOrCross, StreamingOrCross
from tikv.integrations.transformers.layers.groups import GroupsLayer
from tikv.integrations.transformers.layers.host import HostLayer
from tikv.integrations.transformers.layers.indexed import IndexedLayer
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.ring import SlidingRing
from tikv.integrations.transformers.layers.streaming import StreamingLayer
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.versions.caches import layer_without_keys
from tikv.integrations.transformers.versions.configurations import LayerKind
from tikv.stores.layers.hosted import Places


def layers_of(
    kinds: list[LayerKind], limit: int | None, storage: Storage, text: Any, crossed: bool, window: int | None,
    sinks: int, places: Places | None,
) -> list[Any]:  # fmt: skip
    """The layers of a cache.

    Args:
        kinds: what each layer of the model caches.
        limit: the most tokens of a layer; None for any number.
        storage: the formats.
        text: the configuration of the decoder.
        crossed: whether the decoder may have an encoder.
        window, sinks: those of full-attention layers; None and 0 if they keep all tokens.
        places: the device's places for copies of full-attention layers in the host's memory; None if all are on it.
    """
    layers = []
    for i, kind in enumerate(kinds):
        if kind.kind == "full" and window is not None:
            layers.append(streaming_layer_of(i, kind, window, sinks, storage, text, crossed))
        elif kind.kind == "full" and places is not None:
            layers.append(HostLayer(i, kind.window, limit, storage, text, places))
        else:
            layers.append(layer_of(i, kind, limit, storage, text, crossed))
    return layers


def layer_of(index: int, kind: LayerKind, limit: int | None, storage: Storage, text: Any, crossed: bool) -> Any:
    """The cache's layer for a layer of the model; `crossed` says that its decoder may have an encoder."""
    if kind.kind == "none":
        return layer_without_keys()
    if storage.quant is not None and kind.kind != "state":
        return GroupsLayer(index, kind.window, limit, storage, text)
    if kind.state is None and not kind.indexed:
        made: Any = TikvLayer
        if kind.window is not None:
            made = SlidingOrCross if crossed else SlidingRing
        return made(index, kind.window, limit, storage, text)
    if kind.state is None:
        return IndexedLayer(index, kind.window, limit, storage, text)
    from tikv.integrations.transformers.layers import states  # needs classes that old versions lack

    if kind.kind == "state":
        return states.StateLayer(index, **kind.state)
    return states.KeysAndState(index, kind.window, limit, storage, text, **kind.state)


def streaming_layer_of(
    index: int, kind: LayerKind, window: int, sinks: int, storage: Storage, text: Any, crossed: bool
) -> Any:
    """The layer of a cache with a window for a full-attention layer; `crossed` is as in `layer_of`."""
    if kind.state is None:
        return (StreamingOrCross if crossed else StreamingLayer)(index, window, sinks, storage, text)
    from tikv.integrations.transformers.layers import states

    return states.StreamingKeysAndState(index, window, sinks, storage, text, **kind.state)


def why_not_compiled(layers: list[Any], text: Any, crossed: bool) -> str:
    """Why steps of a cache whose memory is allocated once cannot be compiled or captured; empty if they can."""
    if crossed:
        return "the model may have an encoder"
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()) or getattr(text, "attention_chunk_size", None):
        return "a layer has chunked attention"
    if any(isinstance(layer, GroupsLayer) for layer in layers):
        return "older tokens become codes in groups, and the host counts which of them did"
    for layer in layers:
        if isinstance(layer, IndexedLayer):
            return "a layer keeps keys of an indexer"
        if hasattr(layer, "why_no_steps") and (why := layer.why_no_steps()):
            return str(why)
    return ""
