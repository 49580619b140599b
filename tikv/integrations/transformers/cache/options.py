"""The options of a `TikvCache`: which values they take, and for which models and with which other options they work."""

from __future__ import annotations

import operator
from dataclasses import asdict
from typing import Any

import numpy as np

from tikv.arrays.gradients import GradedTokens
from tikv.errors import OptionError
from tikv.formats import Aging, Quant, TileFormat
from tikv.integrations.transformers.layers.groups import GroupsLayer
from tikv.integrations.transformers.layers.host import HostLayer
from tikv.integrations.transformers.layers.indexed import IndexedLayer
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.streaming import StreamingLayer
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.names import CACHE
from tikv.integrations.transformers.versions.configurations import LayerKind, adds_position_bias
from tikv.stores.layers.hosted import Places
from tikv.stores.layers.storage import PLACES


def integer(value: Any, name: str, low: int, instead: str) -> int:
    """The option as an integer of at least `low`; raises OptionError if it is not one."""
    try:
        number = low - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = low - 1
    if number < low:
        raise OptionError(
            f"{CACHE}: {name}={value!r} is not supported. Use an integer of at least {low}, or {instead}."
        )
    return number


def window_and_sinks(
    window: Any, sinks: Any, max_cache_len: Any, kinds: list[LayerKind], text: Any, quant: Aging | None
) -> tuple[int | None, int]:
    """The window, or None without one, and the sinks of full-attention layers.

    `text` is the decoder's configuration, `quant` that of the `Storage`.

    Raises:
        OptionError: they are not valid numbers, max_cache_len is given too, no layer has full attention, or the model
            adds a bias to its scores that depends on positions.
    """
    sinks = integer(sinks, "sinks", 0, "leave it out")
    if window is None:
        if isinstance(quant, TileFormat):
            return None, sinks
        if sinks:
            raise OptionError(f"{CACHE}: sinks={sinks} need a window. Pass window too.")
        return None, 0
    window = integer(window, "window", 1, "None to keep all tokens")
    if sinks >= window:
        raise OptionError(
            f"{CACHE}: sinks={sinks} leave no room for other tokens in window={window}. Use sinks < window."
        )
    if max_cache_len is not None:
        raise OptionError(f"{CACHE}: window={window} bounds the memory already. Leave max_cache_len out.")
    if indexed := [i for i, layer in enumerate(kinds) if layer.indexed]:
        raise OptionError(
            f"{CACHE}: window={window} does not work here: layer {indexed[0]} chooses its keys with an "
            "indexer, which needs all of them. Leave window out."
        )
    if adds_position_bias(text):
        raise OptionError(
            f"{CACHE}: window={window} does not work here: the model adds to each score a bias that depends on the "
            "key's position, and takes the first key that the cache returns for that of the first token. Leave window "
            "out."
        )
    if all(layer.kind != "full" for layer in kinds):
        raise OptionError(
            f"{CACHE}: window={window} would have no effect: no layer of this model has full attention. Leave "
            "window out."
        )
    return window, sinks


def check_groups(quant: Aging, kinds: list[LayerKind], window: Any, place: Any, crossed: bool) -> None:
    """Check that all layers can keep older tokens in groups of codes.

    Raises:
        OptionError: a layer cannot; the message names its kind.
    """
    why = ""
    if window is not None:
        why = f"window={window} overwrites single tokens, but a group can only be dropped as a whole"
    elif place == "host":
        why = "place='host' needs layers whose tokens share no scales"
    elif crossed:
        why = "the model may have an encoder"
    else:
        beside = [
            i for i, kind in enumerate(kinds) if kind.indexed or (kind.state is not None and kind.kind != "state")
        ]
        why = f"layer {beside[0]} keeps more than keys and values" if beside else ""
    if why:
        way = "Use a tikv.Quant of groups along 'head_dim', without sinks and recent"
        raise OptionError(f"{CACHE}: dtype={quant} is not supported: {why}. {way}.")


def places_of(place: Any, resident_layers: Any, kinds: list[LayerKind], window: Any, crossed: bool) -> Places | None:
    """The device's places for copies of layers in the host's memory; None if all layers are on the device.

    Raises:
        OptionError: the place is unknown; or it is "host" and the cache or a layer must be on the device.
    """
    if place not in PLACES:
        raise OptionError(f"{CACHE}: unknown place {place!r}. Use one of {', '.join(map(repr, PLACES))}.")
    count = integer(resident_layers, "resident_layers", 1, "leave it out for 2 layers")
    if place == "device":
        return None
    why = ""
    if window is not None:
        why = f"layers with window={window} are small and stay on the device"
    elif crossed:
        why = "the model may have an encoder, whose tokens all layers read"
    elif all(layer.kind != "full" for layer in kinds):
        why = "no layer of this model has full attention, and sliding layers are small and stay on the device"
    else:
        for i, layer in enumerate(kinds):
            if layer.indexed or (layer.kind == "full" and layer.state is not None):
                beside = "the keys of an indexer" if layer.indexed else "a state"
                why = why or f"layer {i} keeps {beside} in addition to keys and values"
    if why:
        raise OptionError(f"{CACHE}: place='host' is not possible: {why}. Use place='device'.")
    return Places(len(kinds), count)


_WITH_GRADIENT = ("None", "float32", "float16", "bfloat16")  # formats


def let_gradients_flow(grad: Any, layers: list[Any], crossed: bool) -> None:
    """Have the layers of a new cache pass gradients on.

    Raises:
        OptionError: they cannot.
    """
    why = ""
    if grad is not True:
        why = "pass True or False"
    elif crossed:
        why = "the model may have an encoder"
    for i, layer in enumerate(layers):
        if not isinstance(layer, TikvLayer):
            continue
        formats = [format for format in (layer.storage.k, layer.storage.v) if str(format) not in _WITH_GRADIENT]
        if isinstance(layer, (GroupsLayer, HostLayer, IndexedLayer, StreamingLayer)):
            why = why or f"layer {i} is a {type(layer).__name__}, which passes no gradients on"
        elif formats or layer.storage.k_scale is not None or layer.storage.v_scale is not None:
            why = why or f"codes have no gradient. Use dtype=None, one of {', '.join(_WITH_GRADIENT[1:])}, or no scale"
        layer.graded = GradedTokens()
    if why:
        raise OptionError(f"{CACHE}: grad={grad!r} is not possible: {why}.")


def in_words(storage: Storage, v_dtype: Any, scales: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a cache in JSON's types, as its file has them.

    Args:
        storage: the format, as it was understood.
        v_dtype, scales: as they were passed.
        others: the other arguments.
    """
    words: dict[str, Any] = {
        "max_cache_len": others["max_cache_len"],
        "dtype": _quant_in_words(storage.quant) if storage.quant else None if storage.k is None else str(storage.k),
        "v_dtype": None if v_dtype is None or storage.v is None else str(storage.v),
    }
    for name, scale in scales.items():
        words[name] = None if scale is None else np.asarray(scale, np.float64).tolist()
    return words | others


def _quant_in_words(quant: Aging) -> Any:
    return asdict(quant) if isinstance(quant, Quant) else quant.name
