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
    """Save the form of a store, and of each layer its counts, what compactions left, and its filled slots."""
    meta: dict[str, Any] = {"form": form, "counts": [[layer.length, layer.valid_from] for layer, _ in layers]}
    tensors = {
        f"layers.{layer.index}.{name}": a
        for layer, arrays in layers
        for name, a in zip(layer.named, arrays, strict=True)
    }
    histories = [layer.history for layer, _ in layers]
    if any(histories):
        meta["kept"] = [h and [h.tokens, h.end, h.next_position] for h in histories]
        tensors |= {f"layers.{i}.{name}": getattr(h, name) for i, h in enumerate(histories) if h for name in HISTORY}
    files.write(path, KIND, tensors, meta, operation)


def read(
    path: str | os.PathLike[str], operation: str
) -> tuple[dict[str, Any], list[list[int]], list[History | None], list[list[np.ndarray[Any, Any]]]]:
    """The arguments of a saved store; of each layer (length, oldest valid position), its history, and filled slots."""
    tensors, meta = files.read(path, KIND, operation, _check)
    form, arrays = meta["form"], files.storage(meta["form"])
    told = _histories(meta)
    slots = sum(layer.slots for layer in layers_of(form, meta["counts"], told))
    row = sum(dtype.itemsize * (width[0] if width else 1) for _, width, dtype in arrays)
    files.require_memory(path, row * form["batch_size"] * form["num_kv_heads"] * slots, operation)
    histories = [_history(i, numbers, tensors) for i, numbers in enumerate(told)]
    filled = [[tensors[f"layers.{i}.{name}"] for name, _, _ in arrays] for i in range(form["num_layers"])]
    return form, meta["counts"], histories, filled


def _histories(meta: dict[str, Any]) -> list[Any]:
    """Of each layer None, or [tokens left, tokens appended until then, the position that came next]."""
    count = meta["form"]["num_layers"]
    return files.listed(meta.get("kept", [None] * count), "kept", count)


def _history(index: int, numbers: list[int] | None, tensors: dict[str, np.ndarray[Any, Any]]) -> History | None:
    """What a compaction left of a layer; ValueError where it could not have."""
    if numbers is None:
        return None
    found, positions = (np.array(tensors[f"layers.{index}.{name}"]) for name in HISTORY)
    history = History((found >= 0).sum(axis=-1), found, positions, *numbers[1:])
    history.require_sound()
    return history


def _check(meta: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError where the metadata cannot be, or are not those of the tensors."""
    form = meta["form"]
    files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    heads, batch = (files.integer(form[name], name, low=1) for name in ("num_kv_heads", "batch_size"))
    arrays, left = files.storage(form), _histories(meta)
    for layer, history in zip(layers_of(form, meta["counts"], left), left, strict=True):
        for name, width, dtype in arrays:
            files.require_entry(entries, f"layers.{layer.index}.{name}", (batch, heads, layer.filled, *width), dtype)
        if history is not None:
            tokens, _, _ = files.integers(history, "what a layer kept", "a count", 3)
            if tokens > layer.length:
                raise ValueError(f"layer {layer.index} kept {tokens} tokens, and has {layer.length}")
            for name in HISTORY:
                shape = (batch, heads, tokens)
                files.require_entry(entries, f"layers.{layer.index}.{name}", shape, np.dtype(np.int64))


def layers_of(form: dict[str, Any], counts: Any, histories: Sequence[Any] = ()) -> list[Layer]:
    """The layers of a file's form with its counts (length, oldest valid position), and without memory.

    KeyError, TypeError or ValueError where they cannot be. Heads of a layer that has a history may have wrapped each
    by itself.
    """
    capacity, sinks = files.integer(form["capacity"], "capacity", low=1), files.integer(form.get("sinks", 0), "sinks")
    number, window = form["num_layers"], form.get("window")
    windows = files.listed(window if type(window) is list else [window] * number, "window", number)
    found = []
    for i, (slots, numbers) in enumerate(zip(windows, files.listed(counts, "counts", number), strict=True)):
        if slots is not None:
            files.integer(slots, "window", low=sinks + 1, high=capacity)
        layer = Layer(i, capacity, slots, sinks)
        layer.length, layer.valid_from = files.integers(numbers, "counts of a layer", "a count", 2)
        fits = layer.held <= layer.slots or (histories and histories[i] is not None)
        if layer.valid_from > layer.length or not fits or (not layer.ring and layer.length > layer.slots):
            raise ValueError(
                f"layer {i} has {layer.length} tokens in {layer.slots} slots, the oldest is {layer.valid_from}"
            )
        found.append(layer)
    return found
