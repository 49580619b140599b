"""A contiguous store in a file: its form and counts, which have to agree with the tensors that are there."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tikv.stores import files
from tikv.stores.layer import Layer
from tikv.stores.tensor_file import Entry

KIND = "KVCacheStore"


def read(
    path: str | os.PathLike[str], operation: str
) -> tuple[dict[str, Any], list[list[int]], list[list[np.ndarray[Any, Any]]]]:
    """The arguments of a saved store, (length, oldest valid position) and the filled slots of each layer.

    Raises:
        CacheFileError: the file is missing, damaged, another, or contradicts itself.
        CacheFileCapacityError: its store is larger than this machine's memory.
    """
    tensors, facts = files.read(path, KIND, operation, _check)
    form = facts["form"]
    names = [name for name, _, _ in files.storage(form)]
    files.require_memory(path, _nbytes(form), operation)
    return form, facts["counts"], [[tensors[f"layers.{i}.{name}"] for name in names] for i in range(form["num_layers"])]


def _check(facts: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError where the facts cannot be, or are not those of the tensors."""
    form = facts["form"]
    count = files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    heads, batch = (files.integer(form[name], name, low=1) for name in ("num_kv_heads", "batch_size"))
    files.integer(form["capacity"], "capacity", low=1)
    arrays = files.storage(form)
    layers = _layers(form)
    for layer, numbers in zip(layers, files.listed(facts["counts"], "counts", count), strict=True):
        length, valid_from = (files.integer(n, "a count") for n in files.listed(numbers, "counts of a layer", 2))
        layer.length, layer.valid_from = length, valid_from
        if valid_from > length or layer.held > layer.slots or (not layer.ring and length > layer.slots):
            raise ValueError(
                f"layer {layer.index} has {length} tokens in {layer.slots} slots, the oldest is {valid_from}"
            )
        for name, width, dtype in arrays:
            files.require_entry(entries, f"layers.{layer.index}.{name}", (batch, heads, layer.filled, *width), dtype)


def _layers(form: dict[str, Any]) -> list[Layer]:
    """The layers of a form, which have no memory yet."""
    capacity, sinks, window = form["capacity"], files.integer(form.get("sinks", 0), "sinks"), form.get("window")
    windows = window if type(window) is list else [window] * form["num_layers"]
    found = []
    for i, slots in enumerate(files.listed(windows, "window", form["num_layers"])):
        if slots is not None:
            files.integer(slots, "window", low=sinks + 1, high=capacity)
        found.append(Layer(i, capacity, slots, sinks))
    return found


def _nbytes(form: dict[str, Any]) -> int:
    """The memory that a store of this form takes."""
    row = sum(dtype.itemsize * (width[0] if width else 1) for _, width, dtype in files.storage(form))
    return int(row * form["batch_size"] * form["num_kv_heads"] * sum(layer.slots for layer in _layers(form)))
