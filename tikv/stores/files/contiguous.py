"""A contiguous store in a file: its form and counts, which must agree with the file's tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.stores import files
from tikv.stores.files import histories
from tikv.stores.files.tensor_file import Entry
from tikv.stores.history import History
from tikv.stores.layers.counts import Layer

KIND = "KVCacheStore"


def write(
    path: str | os.PathLike[str], form: dict[str, Any], layers: Sequence[tuple[Layer, Sequence[Any]]], operation: str
) -> None:
    """Save the form of a store, and each layer's counts, what compactions left in it, and its filled slots."""
    meta: dict[str, Any] = {"form": form, "counts": [[layer.length, layer.valid_from] for layer, _ in layers]}
    tensors = {
        f"layers.{layer.index}.{name}": a
        for layer, arrays in layers
        for name, a in zip(layer.named, arrays, strict=True)
    }
    history_meta, history_tensors = histories.written([layer for layer, _ in layers])
    files.write(path, KIND, tensors | history_tensors, meta | history_meta, operation)


def read(
    path: str | os.PathLike[str], operation: str
) -> tuple[dict[str, Any], list[list[int]], list[History | None], list[list[np.ndarray[Any, Any]]]]:
    """The arguments of a saved store, and each layer's (length, oldest valid position), history and filled slots."""
    tensors, meta = files.read(path, KIND, operation, _check)
    form, arrays = meta["form"], files.storage(meta["form"])
    by_layer = histories.numbers_of(meta, form["num_layers"])
    slots = sum(layer.slots for layer in layers_of(form, meta["counts"], by_layer))
    row = sum(dtype.itemsize * (width[0] if width else 1) for _, width, dtype in arrays)
    files.require_memory(path, row * form["batch_size"] * form["num_kv_heads"] * slots, operation)
    layer_histories = [histories.read(i, numbers, tensors) for i, numbers in enumerate(by_layer)]
    filled = [[tensors[f"layers.{i}.{name}"] for name, _, _ in arrays] for i in range(form["num_layers"])]
    return form, meta["counts"], layer_histories, filled


def _check(meta: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError if the metadata are impossible or do not fit the tensors."""
    form = meta["form"]
    files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    heads, batch = (files.integer(form[name], name, low=1) for name in ("num_kv_heads", "batch_size"))
    arrays, by_layer = files.storage(form), histories.numbers_of(meta, form["num_layers"])
    for layer, numbers in zip(layers_of(form, meta["counts"], by_layer), by_layer, strict=True):
        for name, width, dtype in arrays:
            files.require_entry(entries, f"layers.{layer.index}.{name}", (batch, heads, layer.filled, *width), dtype)
        histories.check(numbers, layer, (batch, heads), entries)


def layers_of(form: dict[str, Any], counts: Any, history_of: Sequence[Any] = ()) -> list[Layer]:
    """Layers of a file's form with its counts (length, oldest valid position), and without memory.

    KeyError, TypeError or ValueError if they are impossible. In a layer that has a history, each head may have wrapped
    at its own time.
    """
    capacity, sinks = files.integer(form["capacity"], "capacity", low=1), files.integer(form.get("sinks", 0), "sinks")
    number, window = form["num_layers"], form.get("window")
    windows = files.listed(window if type(window) is list else [window] * number, "window", number)
    layers = []
    for i, (slots, numbers) in enumerate(zip(windows, files.listed(counts, "counts", number), strict=True)):
        if slots is not None:
            files.integer(slots, "window", low=sinks + 1, high=capacity)
        layer = Layer(i, capacity, slots, sinks)
        layer.length, layer.valid_from = files.integers(numbers, "counts of a layer", "a count", 2)
        fits = layer.held <= layer.slots or (history_of and history_of[i] is not None)
        if layer.valid_from > layer.length or not fits or (not layer.ring and layer.length > layer.slots):
            raise ValueError(
                f"layer {i} has {layer.length} tokens in {layer.slots} slots, and the oldest is {layer.valid_from}"
            )
        layers.append(layer)
    return layers
