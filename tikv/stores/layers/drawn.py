"""What a picture of a store shows of a layer: which position lies in which of its slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.stores.layers.counts import Layer


def drawn_states(layer: Layer, heads: int, mass: Host | None) -> list[tuple[Any, ...]]:
    """Of each head that is drawn by itself: its name, and what `picture.Slots` has behind a name.

    All heads are drawn as one where they hold the same tokens and no mass colours them.
    """
    form = (layer.slots, layer.sinks, layer.ring > 0)
    if layer.history is None and mass is None:
        return [("", *form, layer.length, layer.valid_from)]
    held, lens = layer.held_rows(), layer.lengths
    slots, positions = (np.broadcast_to(a[0], (heads, a.shape[2])) for a in (held.slots, held.positions))
    alike = mass is None and (slots == slots[0]).all() and (positions == positions[0]).all()
    found = []
    for h in range(1 if alike else heads):
        there = slots[h] >= 0
        true, weights = np.full(layer.slots, -1), np.zeros(layer.slots)
        true[slots[h][there]] = positions[h][there]
        if mass is not None:
            weights[slots[h][there]] = mass[0, h][there] / max(float(mass[0, h].max(initial=0)), 1e-30)
        length = int(np.broadcast_to(lens[0], heads)[h])
        shown = tuple(weights.tolist()) if mass is not None else ()
        name = "" if alike else f", head {h}"
        found.append((name, *form, length, layer.valid_from, tuple(true.tolist()), shown))
    return found
