"""What compactions left in the layers of a contiguous store, in a file: counts as metadata, the rest as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.stores import files
from tikv.stores.files.tensor_file import Entry
from tikv.stores.history import History
from tikv.stores.layers.counts import Layer

NAMES = ("numbers", "positions")  # int64 tensors of each compacted layer


def written(layers: Sequence[Layer]) -> tuple[dict[str, Any], dict[str, Host]]:
    """The metadata and the tensors of a file with these layers; both are empty if no layer was compacted."""
    histories = {layer.index: layer.history for layer in layers}
    if not any(histories.values()):
        return {}, {}
    counts = [h and [h.tokens, h.end, h.next_position] for h in histories.values()]
    return {"kept": counts}, {
        f"layers.{i}.{name}": getattr(h, name) for i, h in histories.items() if h for name in NAMES
    }


def numbers_of(meta: Mapping[str, Any], num_layers: int) -> list[Any]:
    """For each layer None, or [tokens left, tokens appended until then, the position that came next]."""
    return files.listed(meta.get("kept", [None] * num_layers), "kept", num_layers)


def check(numbers: Any, layer: Layer, lead: tuple[int, int], entries: dict[str, Entry]) -> None:
    """Raise TypeError or ValueError if a layer of `lead`, (batch, heads), cannot have kept this, or lacks tensors."""
    if numbers is None:
        return
    tokens, _, _ = files.integers(numbers, "what a layer kept", "a count", 3)
    if tokens > layer.length:
        raise ValueError(f"layer {layer.index} kept {tokens} tokens, and has {layer.length}")
    for name in NAMES:
        files.require_entry(entries, f"layers.{layer.index}.{name}", (*lead, tokens), np.dtype(np.int64))


def read(index: int, numbers: Any, tensors: Mapping[str, Any]) -> History | None:
    """What a compaction left in a layer; ValueError if that is impossible."""
    if numbers is None:
        return None
    token_numbers, positions = (np.array(tensors[f"layers.{index}.{name}"]) for name in NAMES)
    history = History((token_numbers >= 0).sum(axis=-1), token_numbers, positions, *numbers[1:])
    history.require_sound()
    return history
