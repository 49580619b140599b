"""`rewrite`: new rows take the places of those at some positions, and counts stay as they are."""

from __future__ import annotations

from tikv.arrays import ArrayView, Views
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.runtime.interrupts import Held
from tikv.stores.layers.append import Appends
from tikv.stores.layers.counts import Layer


def rewritten_from(operation: str, layer: Layer, start: int, tokens: int) -> int:
    """The number, among what a layer counts, of the token at position `start`; the next `tokens` are held as rows.

    Raises:
        PositionError: one of them is not held, or a compaction may have dropped some between them.
    """
    start = checks.integer(start, "start", operation)
    first = start - (layer.end - layer.length)
    low = max(layer.valid_from, layer.sinks) if layer.ring else 0
    if layer.history is not None:
        low = max(low, layer.history.tokens)
    whole = layer.history is None and layer.valid_from <= layer.sinks  # nothing was overwritten or dropped
    in_sinks = layer.history is None and first >= 0 and first + tokens <= layer.sinks
    if first + tokens > layer.length or not (in_sinks or first >= (0 if whole else low)):
        oldest = (0 if whole else low) + layer.end - layer.length
        raise PositionError(
            f"{operation}: positions {start} to {start + tokens - 1} of layer {layer.index} cannot be rewritten: it "
            f"has rows for {oldest} to {layer.end - 1}. Newer tokens overwrote those before, or compact() moved them. "
            "Rewrite positions within that range, or append the tokens."
        )
    return first


def rewrite_layer(operation: str, appends: Appends, layer: Layer, first: int, rows: Views, layout: str) -> None:
    """Write new K and V to the places of the tokens from number `first` on, which are held; counts do not change."""
    checked, axes = appends.checked(operation, [layer], rows, layout, False)
    tokens: int = checked[0].shape[1 + axes[0]]
    before = layer.length, layer.valid_from, layer.newest
    back = layer.length - first
    with Held():
        try:
            layer.length = first
            if layer.head_lengths is not None:
                layer.head_lengths.grow(-back)
            appends.append(operation, layer, rows, layout)
        finally:
            grown = layer.length - first
            layer.length, layer.valid_from, layer.newest = before
            if layer.head_lengths is not None:
                layer.head_lengths.grow(back - grown)
    assert grown in (0, tokens), "an append writes all rows or none"


def tokens_of(rows: ArrayView, layout: str) -> int:
    """How many tokens new rows have, whose axes are checked later."""
    return rows.shape[-3 if layout == "token_major" else -2] if rows.ndim > 2 else 0
