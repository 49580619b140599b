"""A store with groups along tokens in a file: its newest tokens as rows, its codes, and counts that agree with both."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from tikv import runtime
from tikv.formats import Aging, Quant, parse_aging
from tikv.stores import files
from tikv.stores.files import histories
from tikv.stores.files.tensor_file import Entry
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.storage import StoreConfig
from tikv.stores.layers.token_group_form import TokenGroupForm, room_of

KIND, OPERATION = "KVCacheStore of groups along tokens", "KVCacheStore"
NOT_PLACED: Mapping[str, Any] = {}


class SavedLayer(NamedTuple):
    """A layer of a store with groups along tokens, as a file has it.

    Attributes:
        counts: the counts of all its tokens, without memory.
        oldest: the oldest position that was not overwritten in the slots of the newest tokens.
        coded: how many tokens after the sinks became codes.
        arrays: K and V of the newest tokens, then the arrays of codes.
    """

    counts: Layer
    oldest: int
    coded: int
    arrays: list[Any]


def write(
    path: str | os.PathLike[str],
    config: StoreConfig,
    form: TokenGroupForm,
    layers: Sequence[SavedLayer],
    operation: str,
) -> None:
    """Save the form of a store, and each layer's counts and arrays, as `files.write` does."""
    said = form.said
    arguments = {name: getattr(config, name) for name in ("num_layers", "num_kv_heads", "capacity", "batch_size")}
    arguments |= {"head_dim": said.k.width, "head_dim_v": said.v.width, "scale_dtype": said.scale_dtype.name}
    if config.rows.get("v_dtype") is not None:
        arguments["v_dtype"] = str(said.v.dtype)
    if any(config.windows) or config.sinks:
        arguments |= {"window": list(config.windows), "sinks": config.sinks}
    tensors = {
        f"layers.{i}.{name}": a
        for i, layer in enumerate(layers)
        for name, a in zip(form.names_of_arrays, layer.arrays, strict=True)
    }
    meta: dict[str, Any] = {"form": arguments, "quant": written_quant(form.quant)}
    meta["counts"] = [[layer.counts.length, layer.oldest, layer.coded] for layer in layers]
    meta["oldest"] = [layer.counts.valid_from for layer in layers]
    history_meta, history_tensors = histories.written([layer.counts for layer in layers])
    files.write(path, KIND, tensors | history_tensors, meta | history_meta, operation)


def read(
    path: str | os.PathLike[str], live: runtime.Runtime, operation: str, placed: Mapping[str, Any]
) -> tuple[StoreConfig, list[SavedLayer]]:
    """The configuration of a saved store, placed as `placed` asks, and its layers."""
    tensors, meta = files.read(path, KIND, operation, functools.partial(_check, live))
    with files.understanding(path, operation):
        config, form = _form_of(meta, live, placed)
        layers = _layers(meta, config, form)
        for layer, numbers in zip(layers, histories.numbers_of(meta, config.num_layers), strict=True):
            layer.counts.history = histories.read(layer.counts.index, numbers, tensors)
    slots = sum(min(layer.slots, config.capacity) + _slots(config, form) for layer in config.counts())
    files.require_memory(path, int(config.batch_size * config.num_kv_heads * slots * form.slot_bytes), operation)
    return config, [
        layer._replace(arrays=[tensors[f"layers.{i}.{name}"] for name in form.names_of_arrays])
        for i, layer in enumerate(layers)
    ]


def written_quant(quant: Aging) -> Any:
    """A format in JSON's types."""
    return asdict(quant) if isinstance(quant, Quant) else quant.name


def quant_of(written: Any) -> Aging:
    """The reverse of `written_quant`; ValueError or TypeError if it is not what that returns."""
    quant = parse_aging(Quant(**written) if type(written) is dict else written)
    if quant is None:
        raise ValueError(f"all tokens of {written!r} are codes")
    return quant


def _form_of(
    meta: dict[str, Any], live: runtime.Runtime, placed: Mapping[str, Any] = NOT_PLACED
) -> tuple[StoreConfig, TokenGroupForm]:
    quant = quant_of(meta["quant"])
    form = meta["form"]
    for name in ("num_layers", "num_kv_heads", "head_dim", "head_dim_v", "batch_size", "capacity"):
        files.integer(form[name], name, low=1)
    config = StoreConfig.checked(OPERATION, **form, **placed, dtype=quant)
    return config, TokenGroupForm.checked(OPERATION, live, config.num_kv_heads, config.rows)


def _slots(config: StoreConfig, form: TokenGroupForm) -> int:
    """How many slots a layer has for its newest tokens."""
    return form.sinks(OPERATION, config.sinks, any(config.windows)) + form.slots


def _layers(meta: dict[str, Any], config: StoreConfig, form: TokenGroupForm) -> list[SavedLayer]:
    """The counts of a file's layers, without arrays; ValueError if they are impossible."""
    group, slots, layers = form.quant.group, _slots(config, form), []
    sinks = slots - form.slots
    counted = files.listed(meta["counts"], "counts", config.num_layers)
    since = files.integers(meta.get("oldest", [0] * config.num_layers), "oldest", "a position", config.num_layers)
    for layer, numbers, valid_from in zip(config.counts(), counted, since, strict=True):
        length, oldest, coded = files.integers(numbers, "counts of a layer", "a count", 3)
        layer.length, layer.valid_from = length, valid_from
        behind = sinks + coded if coded else 0
        if (
            coded % group
            or not oldest <= max(behind, sinks)
            or max(oldest, behind) > length
            or (not layer.ring and length > config.capacity)
            or length - behind > slots
            or oldest < length - form.slots
            or not valid_from <= length
            or valid_from < length - layer.slots
        ):
            raise ValueError(
                f"layer {layer.index} has {length} tokens, {coded} of them codes, rows from {oldest} on and a window "
                f"from {valid_from} on, which do not fit each other"
            )
        layers.append(SavedLayer(layer, oldest, coded, []))
    return layers


def _check(live: runtime.Runtime, meta: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError if the metadata are impossible or do not fit the tensors."""
    files.integer(meta["form"]["num_layers"], "num_layers", low=1, high=len(entries))
    config, form = _form_of(meta, live)
    lead = config.batch_size, config.num_kv_heads
    by_layer = histories.numbers_of(meta, config.num_layers)
    for layer, numbers in zip(_layers(meta, config, form), by_layer, strict=True):
        histories.check(numbers, layer.counts, lead, entries)
        newest, room = min(layer.counts.length, _slots(config, form)), room_of(layer.counts, form.quant)
        for name, (shape, dtype) in form.filled(lead, newest, min(layer.coded, room)).items():
            files.require_entry(entries, f"layers.{layer.counts.index}.{name}", shape, dtype.numpy)
