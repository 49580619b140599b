"""Compaction of contiguous layers, and reading layers whose heads have different lengths."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import ArrayView, CacheArray, Host, new_array, to_device
from tikv.errors import DTypeError, ShapeError
from tikv.ops.keep import HeadRows, counts_of, host_kept_indices
from tikv.ops.layouts import Placement, Rows
from tikv.ops.rotate import Rope, check_keys, rotate_rows
from tikv.stores.history import History
from tikv.stores.layers.counts import HeldRows, Layer
from tikv.stores.layers.memory import LayerMemory, copy_rows, width_of
from tikv.stores.layers.merging import MergedRows, checked_merge, refuse_with_rope


class _Choice(NamedTuple):
    """What a layer shall keep: slots in order, (B, H, n) with -1 after a head's last, and the history that results."""

    slots: Host
    in_order: bool  # the layer has not wrapped, so rows can be moved to the front in place
    history: History
    indices: Host  # (B, H, n) into the order of what is held


def compact_layers(
    operation: str,
    memory: LayerMemory,
    layers: Sequence[Layer],
    keeps: Sequence[Any],
    rope: Rope | None,
    one_length: bool = False,
    merge: Any = None,
) -> None:
    """Keep some of the tokens that layers hold, drop the others, and close the gaps; or raise and write nothing.

    Args:
        operation, memory, layers: those of the call; layers in order.
        keeps: what the caller keeps of each layer, as in `KVCacheStore.compact`.
        rope: the rotation of keys to their new indices; None to leave them.
        one_length: whether all heads must keep equally many tokens.
        merge: what is added to kept rows of the only layer, as in `KVCacheStore.compact`; None for nothing.
    """
    if merge is not None:
        refuse_with_rope(operation, rope)
    if rope is not None:
        if memory.rows.k.format is not None:
            raise DTypeError(f"{operation}: keys kept as {memory.rows.k.format} cannot be rotated. Leave rope out.")
        check_keys(layers[0].k, _scales_of_keys(layers[0]), rope, operation)
    choices = [_choose(operation, memory, layer, keep) for layer, keep in zip(layers, keeps, strict=True)]
    for layer, choice in zip(layers, choices, strict=True):
        if one_length:
            require_even(operation, layer, choice.history.counts, "tokens", "or use a tikv.KVCacheStore")
    merged = None if merge is None else _merged(operation, memory, layers[0], choices[0], merge)
    for block in _movable_together(memory, layers, choices):
        if block[0][1].in_order:
            slots = np.concatenate([choice.slots for _, choice in block])
            if (slots != np.where(slots < 0, -1, np.arange(slots.shape[-1]))).any():
                memory.move_in_place(operation, [layer for layer, _ in block], slots, block[0][0].slots)
        else:
            for layer, choice in block:
                _move_through_copy(operation, memory, layer, choice.slots)
    for layer, choice in zip(layers, choices, strict=True):
        history = choice.history
        if rope is not None:
            history = _turn(operation, memory, layer, history, rope)
        memory.recount(layer, history.tokens, history)
    if merged is not None:
        merged.write(layers[0])


def _merged(operation: str, memory: LayerMemory, layer: Layer, choice: _Choice, merge: Any) -> MergedRows | None:
    """The rows that a layer's kept tokens become; raises if they cannot be merged so."""
    held = layer.held_rows()
    lead = memory.batch_size, memory.num_kv_heads
    counts = np.broadcast_to(held.counts, lead)
    checked = checked_merge(operation, merge, choice.indices, counts, memory.runtime)
    if checked is None:
        return None
    shape = (*lead, held.slots.shape[-1])
    rows = [new_array((*shape, row.width), dtypes.float32, memory.runtime, zeroed=True) for row in memory.rows.both]
    if layer.head_lengths is None:
        memory.copy_tokens(operation, layer, rows[0], rows[1])
    else:
        read_by_head(operation, memory, layer, held.slots, rows)
    return MergedRows.of(operation, memory, checked, rows)


def _turn(operation: str, memory: LayerMemory, layer: Layer, history: History, rope: Rope) -> History:
    """Rotate the kept keys, which are in the first slots, to positions from 0 on."""
    index = np.where(history.positions < 0, -1, np.arange(history.tokens))
    if history.tokens:
        k, scale = (
            None if a is None else a.restrided((*a.shape[:2], history.tokens, *a.shape[3:]), a.strides)
            for a in (layer.k, _scales_of_keys(layer))
        )
        assert k is not None
        rotate_rows(memory.runtime, operation, k, scale, history.positions, index, rope)
    return history._replace(positions=index, next_position=history.tokens)


def _scales_of_keys(layer: Layer) -> ArrayView | None:
    """The scales of int8 keys, (batch, heads, slots); if values are groups, the first scale of each row."""
    scale = layer.k_scale
    return None if scale is None else scale.restrided(scale.shape[:3], scale.strides[:3])


def _choose(operation: str, memory: LayerMemory, layer: Layer, keep: Any) -> _Choice:
    """Check what a caller keeps of a layer, and find its slots."""
    held = layer.held_rows()
    index = kept_of(operation, memory, held, keep)
    in_order = bool((held.slots == np.where(held.slots < 0, -1, np.arange(held.slots.shape[-1]))).all())
    return _Choice(_select(held.slots, index), in_order, left_of(layer, held, index), index)


def kept_of(operation: str, memory: LayerMemory, held: HeldRows, keep: Any) -> Host:
    """What a caller keeps of the rows that a layer holds, as indices (B, H, n); -1 after a head's last."""
    lead, most = (memory.batch_size, memory.num_kv_heads), held.slots.shape[-1]
    counts = held.counts if held.slots.shape[:2] == lead else most
    index = host_kept_indices(keep, HeadRows(*lead, most, counts), memory.runtime, operation)
    return np.repeat(index[:, None], lead[1], axis=1) if index.ndim == 2 else index


def left_of(layer: Layer, held: HeldRows, index: Host) -> History:
    """What is left of a layer that held these rows, if those at indices (B, H, n) are kept."""
    counts = counts_of(index).astype(np.int64)
    return History(counts, _select(held.numbers, index), _select(held.positions, index), layer.end, layer.next_position)


def require_even(operation: str, layer: Layer, counts: Host, what: str, remedy: str) -> None:
    """Raise ShapeError if the heads of a layer would keep different numbers of something."""
    if counts.size and counts.min() < counts.max():
        raise ShapeError(
            f"{operation}: heads of layer {layer.index} would keep {int(counts.min())} to {int(counts.max())} {what}, "
            f"but all heads have one length here. Keep equally many in each head, {remedy}."
        )


def _select(a: Host, index: Host) -> Host:
    """The entries of (B, H, m) or (1, 1, m) at each head's indices (B, H, n); -1 after a head's last."""
    lead, most = index.shape[:-1], a.shape[-1]
    if most == 0:
        return index.astype(np.int64)
    entries = np.take_along_axis(np.broadcast_to(a, (*lead, most)), np.maximum(index, 0).astype(np.int64), axis=-1)
    return np.where(index < 0, -1, entries)


def _movable_together(
    memory: LayerMemory, layers: Sequence[Layer], choices: Sequence[_Choice]
) -> list[list[tuple[Layer, _Choice]]]:
    """The groups of layers that one launch can move: adjacent in memory, of one form, with equally many kept tokens."""
    block_of = {layer.index: i for i, block in enumerate(memory.blocks) for layer in block}

    def form(pair: tuple[Layer, _Choice]) -> Any:
        layer, choice = pair
        return block_of[layer.index], layer.slots, choice.in_order, choice.slots.shape

    return [list(pairs) for _, pairs in itertools.groupby(zip(layers, choices, strict=True), form)]


def _move_through_copy(operation: str, memory: LayerMemory, layer: Layer, slots: Host) -> None:
    """Move the rows of a ring that has wrapped through a copy, since its first slots may hold newer rows to keep."""
    if slots.size == 0:
        return
    for a in layer.arrays:
        memory.move_slots(copied_slots(operation, memory, a, slots), a, slots.shape[-1])


def copied_slots(operation: str, memory: LayerMemory, a: ArrayView, slots: Host) -> ArrayView:
    """A copy of the rows of (batch, heads, slots[, width]) in slots (B, H, n), where n is not 0; of -1, zeros."""
    to = new_array((*slots.shape, *a.shape[3:]), a.dtype, memory.runtime, zeroed=bool((slots < 0).any()))
    index = to_device(slots.astype(np.int32), memory.runtime)
    _gather_by_head(operation, memory, a.shape[2], index, [_rows_by_head(a)], [to], [width_of(a)])
    return to


def _gather_by_head(
    operation: str,
    memory: LayerMemory,
    limit: int,
    index: ArrayView,
    src: Sequence[Rows],
    to: Sequence[ArrayView],
    widths: Sequence[int],
) -> None:
    """Copy each head's rows at its own indices (batch, H, n) among `limit` slots, one after the other."""
    n, dst = index.shape[-1], [_rows_by_head(a) for a in to]
    copy_rows(
        memory.runtime, operation, src, dst, widths, (memory.batch_size * memory.num_kv_heads, 1, n),
        Placement("slots", array=index, limit=limit, group=n, step=1),
    )  # fmt: skip


def _rows_by_head(a: ArrayView) -> Rows:
    """The rows of a contiguous (batch, heads, slots[, width]) array, where each head is its own sequence."""
    return Rows(a, sequence=a.strides[1], token=a.strides[2])


def tokens_by_head(operation: str, memory: LayerMemory, layer: Layer) -> tuple[CacheArray, CacheArray]:
    """What each head of a layer holds, in temporal order, with zeros after a head's last, as `LayerMemory.tokens`."""
    live, slots = memory.runtime, layer.held_rows().slots
    out = [to_device(np.zeros((*slots.shape, row.width), row.read_dtype.numpy), live) for row in memory.rows.both]
    if slots.size:
        read_by_head(operation, memory, layer, slots, out)
    return CacheArray(out[0], live), CacheArray(out[1], live)


def read_by_head(operation: str, memory: LayerMemory, layer: Layer, slots: Host, out: Sequence[ArrayView]) -> None:
    """Copy the rows in slots (B, H, n) to arrays (B, H, n, width) of any dtype; -1 leaves a row as it is."""
    live = memory.runtime
    index = to_device(slots.astype(np.int32), live)
    rows = zip((layer.k, layer.v), memory.rows.formats, layer.scales_by_head(memory.rows.numbers), strict=True)
    src = [_rows_by_head(a)._replace(format=format, scale=scale) for a, format, scale in rows]
    _gather_by_head(operation, memory, layer.slots, index, src, out, memory.rows.widths)
    live.synchronize()  # the launch reads an index that only this call keeps alive


def split_by_layer(keep: Any, layers: int, operation: str) -> list[Any]:
    """What is kept of each layer, from an array or list with one entry per layer; ShapeError for another number."""
    count = len(keep) if hasattr(keep, "__len__") else 0
    if count != layers:
        raise ShapeError(f"{operation}: keep has {count} entries for num_layers={layers}. Give one per layer.")
    return [keep[i] for i in range(layers)]
