"""A contiguous store in a file: its form and counts, which have to agree with the tensors that are there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.stores import files
from tikv.stores.files.tensor_file import Entry
from tikv.stores.history import History
from tikv.stores.layers.counts import Layer

KIND = "KVCacheStore"
HISTORY = ("numbers", "positions")  # int64, of a layer that was compacted


def write(
    path: str | os.PathLike[str], form: dict[str, Any], layers: Sequence[tuple[Layer, Sequence[Any]]], operation: str
) -> None:
    """Save the form of a store, and of each layer its counts, what compactions left, and its filled slots.

    Raises:
        CacheFileError: as `files.write`.
    """
    facts: dict[str, Any] = {"form": form, "counts": [[layer.length, layer.valid_from] for layer, _ in layers]}
    tensors = {
        f"layers.{layer.index}.{name}": a
        for layer, arrays in layers
        for name, a in zip(layer.named, arrays, strict=True)
    }
    histories = [layer.history for layer, _ in layers]
    if any(history is not None for history in histories):
        facts["kept"] = [h and [h.tokens, h.end, h.next_position] for h in histories]
        for i, history in enumerate(histories):
            if history is not None:
                tensors |= {f"layers.{i}.{name}": getattr(history, name) for name in HISTORY}
    files.write(path, KIND, tensors, facts, operation)


def read(
    path: str | os.PathLike[str], operation: str
) -> tuple[dict[str, Any], list[list[int]], list[History | None], list[list[np.ndarray[Any, Any]]]]:
    """The arguments of a saved store; of each layer (length, oldest valid position), its history, and filled slots.

    Raises:
        CacheFileError: the file is missing, damaged, another, or contradicts itself.
        CacheFileCapacityError: its store is larger than this machine's memory.
    """
    tensors, facts = files.read(path, KIND, operation, _check)
    form = facts["form"]
    names = [name for name, _, _ in files.storage(form)]
    files.require_memory(path, _nbytes(form), operation)
    histories = [_history(i, numbers, tensors) for i, numbers in enumerate(_histories(facts, form))]
    return (
        form,
        facts["counts"],
        histories,
        [[tensors[f"layers.{i}.{name}"] for name in names] for i in range(form["num_layers"])],
    )


def _histories(facts: dict[str, Any], form: dict[str, Any]) -> list[Any]:
    """Of each layer None, or [tokens left, tokens appended until then, the position that came next]."""
    return files.listed(facts.get("kept", [None] * form["num_layers"]), "kept", form["num_layers"])


def _history(index: int, numbers: list[int] | None, tensors: dict[str, np.ndarray[Any, Any]]) -> History | None:
    """What a compaction left of a layer.

    Raises:
        ValueError: it could not have.
    """
    if numbers is None:
        return None
    found, positions = (np.array(tensors[f"layers.{index}.{name}"]) for name in HISTORY)
    history = History((found >= 0).sum(axis=-1), found, positions, *numbers[1:])
    history.require_sound()
    return history


def _check(facts: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError where the facts cannot be, or are not those of the tensors."""
    form = facts["form"]
    count = files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    heads, batch = (files.integer(form[name], name, low=1) for name in ("num_kv_heads", "batch_size"))
    files.integer(form["capacity"], "capacity", low=1)
    arrays = files.storage(form)
    layers = _layers(form)
    left = _histories(facts, form)
    for layer, numbers, history in zip(layers, files.listed(facts["counts"], "counts", count), left, strict=True):
        length, valid_from = (files.integer(n, "a count") for n in files.listed(numbers, "counts of a layer", 2))
        layer.length, layer.valid_from = length, valid_from
        fits = layer.held <= layer.slots or history is not None  # whose heads may have wrapped each by itself
        if valid_from > length or not fits or (not layer.ring and length > layer.slots):
            raise ValueError(
                f"layer {layer.index} has {length} tokens in {layer.slots} slots, the oldest is {valid_from}"
            )
        for name, width, dtype in arrays:
            files.require_entry(entries, f"layers.{layer.index}.{name}", (batch, heads, layer.filled, *width), dtype)
        if history is not None:
            tokens, _, _ = (files.integer(n, "a count") for n in files.listed(history, "what a layer kept", 3))
            if tokens > length:
                raise ValueError(f"layer {layer.index} kept {tokens} tokens, and has {length}")
            for name in HISTORY:
                entry = np.dtype(np.int64)
                files.require_entry(entries, f"layers.{layer.index}.{name}", (batch, heads, tokens), entry)


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
