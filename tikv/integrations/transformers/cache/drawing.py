"""A picture of the layers of a `TikvCache`: which position is in which slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.stores import picture


def drawn(title: str, layers: Sequence[Any]) -> str:
    """The SVG text; of a left-padded batch, the first text is drawn."""
    return picture.layers(title, ((layer.index, _state(layer)) for layer in layers if layer.store is not None))


def _state(layer: Any) -> tuple[str, tuple[Any, ...]]:
    """Which row is drawn, and the other arguments of `picture.Slots`."""
    slots = layer.slot_map
    start, row = (slots.starts[0], ", text 0") if slots.starts else (0, "")
    wraps = slots.ring > 0
    capacity = slots.sinks + slots.ring if wraps else max(layer.store.capacity, slots.used)
    positions = np.atleast_2d(slots.positions())[0]
    length = slots.end - start if wraps else int((positions >= 0).sum())
    true = (*positions.tolist(), *[-1] * (capacity - len(positions)))
    is_plain = not start and (wraps or true[:length] == tuple(range(length)))
    return row, (capacity, slots.sinks, wraps, length, max(0, slots.first - start), () if is_plain else true)
