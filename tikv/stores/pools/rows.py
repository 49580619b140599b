"""Moving rows between the slots of a pool, for all heads that a block holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView, Host, new_array, to_device
from tikv.ops import blocks
from tikv.ops.compact import bind_in_place
from tikv.ops.layouts import Rows
from tikv.ops.plan import Launch
from tikv.ops.rotate import Rope, check_keys, rotate_rows
from tikv.stores.pools.config import PoolConfig


class Moves(NamedTuple):
    """Rows of a layer: the slots or indices from and to which they move, and their positions before and after."""

    src: Host
    dst: Host
    before: Host
    after: Host

    @property
    def changed(self) -> Host:
        """Which of the rows, (n,) bool, move or are rotated."""
        changed: Host = (self.src != self.dst) | (self.before != self.after)
        return changed


def move_rows(
    live: runtime.Runtime,
    config: PoolConfig,
    pools: Sequence[ArrayView],
    moves: Moves,
    rope: Rope | None = None,
    operation: str = "move_rows",
) -> None:
    """Move rows of a layer's pools through a copy, since a slot may be read and written; if it fails, nothing moves.

    `rope` rotates keys from the positions before to those after.
    """
    count, heads = len(moves.src), config.block_heads
    if count == 0:
        return
    pools, place = [as_rows(pool, config) for pool in pools], np.arange(count * heads)
    moved = [new_array((count * heads, *rows.shape[1:]), rows.dtype, live) for rows in pools]
    for stream, (rows, to) in enumerate(zip(pools, moved, strict=True)):
        blocks.swap_blocks(rows, to, pairs_of(_numbers(config, stream, moves.src), place))
    if rope is not None:
        width = config.rows.k.width
        k, scale = moved[0].restrided((1, heads, count, width), (0, count * width, width, 1)), None
        if config.rows.k.numbers:
            n = moved[2].shape[1]
            scale = moved[2].restrided((1, heads, count), (0, count * n, n))
        before, after = (a.reshape(1, 1, count) for a in (moves.before, moves.after))
        rotate_rows(live, operation, k, scale, before, after, rope)
    for stream, (rows, taken) in enumerate(zip(pools, moved, strict=True)):
        blocks.swap_blocks(taken, rows, pairs_of(place, _numbers(config, stream, moves.dst)))


def move_in_place(
    live: runtime.Runtime,
    operation: str,
    config: PoolConfig,
    pools: Sequence[ArrayView],
    slots: Sequence[tuple[Host, Host]],
) -> list[Launch]:
    """Bind moves of rows from slots to slots, in all pools at once; of each pair a slot is written after it was read.

    The pools are of layers in one piece of memory, and slots (src, dst) of each layer are counted over those of all.
    """
    most, launches = max(len(src) for src, _ in slots), []
    for streams in _read_alike(config, len(pools)) if most else []:
        pairs = np.full((len(slots), config.block_heads, most, 2), -1, np.int32)
        for layer, both in zip(pairs, slots, strict=True):
            for i, end in enumerate(both):
                layer[:, : len(end), i] = _numbers(config, streams[0], end).reshape(config.block_heads, -1)
        index = to_device(pairs.reshape(-1, most, 2), live)
        rows = [as_rows(pools[stream], config) for stream in streams]
        places, widths = [Rows(a, token=a.shape[1]) for a in rows], [a.shape[1] for a in rows]
        shape = len(slots) * config.block_heads, 1, rows[0].shape[0]
        launches.append(bind_in_place(live, operation, places, widths, shape, index, placed=True))
    return launches


def _read_alike(config: PoolConfig, count: int) -> list[list[int]]:
    """Groups of pools, by number, whose rows have the same order; scales may be laid out differently from K and V."""
    if config.layout == "HND" and config.block_heads > 1 and count > 2:
        return [[0, 1], [*range(2, count)]]
    return [[*range(count)]]


def check_turn(config: PoolConfig, pools: Sequence[ArrayView], rope: Rope, operation: str) -> None:
    """Raise if a layer's keys cannot be rotated by `rope`, as `check_keys`."""
    k = as_rows(pools[0], config)
    scale = as_rows(pools[2], config) if config.rows.k.numbers else None
    rows = k.restrided((1, 1, *k.shape), (0, 0, *k.strides))
    scales = None if scale is None else scale.restrided(rows.shape[:3], (0, 0, scale.strides[0]))
    check_keys(rows, scales, rope, operation)


def pairs_of(src: Host, dst: Host) -> Host:
    """(n, 2) int32 for `swap_blocks`: each number to copy from, and one to copy to."""
    return np.stack([src, dst], axis=1).astype(np.int32)


def of_all_heads(heads: int, each: int, parts: Host) -> Host:
    """Numbers of parts, of which a block has so many, where a block has them head by head: of all heads in turn."""
    numbers: Host = (parts // each * heads + np.arange(heads)[:, None]) * each + parts % each
    return numbers.ravel()


def _numbers(config: PoolConfig, stream: int, slots: Host) -> Host:
    """The numbers of rows of `as_rows` that lie in these slots: those of the first head, then those of the next."""
    heads = config.block_heads
    if stream < 2 and config.layout == "HND":
        return of_all_heads(heads, config.block_size, slots)
    return np.ravel(slots * heads + np.arange(heads)[:, None])  # scales have this order in any layout


def rows_of_head(config: PoolConfig, stream: int, slots: Host, head: int) -> Host:
    """The numbers of the rows of one head of a block in these slots, among those of `as_rows`."""
    numbers: Host = _numbers(config, stream, slots).reshape(config.block_heads, -1)[head]
    return numbers


def as_rows(pool: ArrayView, config: PoolConfig) -> ArrayView:
    """A pool, or its scales, as (rows of all slots and heads, width)."""
    width = pool.shape[-1] if pool.ndim == 4 else 1
    return pool.restrided((pool.shape[0] * config.block_size * config.block_heads, width), (width, 1))
