"""What an append to the pages of a layer needs: its checks, where its rows go, and one launch for several sequences."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tikv import dtypes
from tikv.arrays import Array, ArrayView, Host, describe, new_array
from tikv.errors import ShapeError
from tikv.ops import checks, paged
from tikv.ops.indices import host_integers
from tikv.ops.plan import PlannedCall
from tikv.runtime import Runtime
from tikv.stores.layers.queries import check_heads, rows_first
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.sequences import AppendStep
from tikv.stores.pools.summaries import LayerPages

Arrays = Sequence[ArrayView]


def begin_append(
    pages: Pages[Any], operation: str, layer: int, seqs: Array, cu_seqlens: Array, rows: int, part: bool = False
) -> AppendStep:
    """Where the `rows` new rows of the sequences that a caller named go; see `Sequences.begin`.

    It takes blocks for them; the write happens within `Changing`, and `Sequences.commit` counts it.
    """
    ids = pages.ids(seqs, operation)
    bounds = cumulated(cu_seqlens, len(ids), rows, operation, pages.runtime)
    return pages.sequences.begin(operation, layer, ids, bounds, rows, part)


def check_rank(operation: str, name: str, rows: ArrayView, layout: str) -> None:
    """Raise ShapeError unless new rows have the layout's axes, without an axis of sequences."""
    axes = "(T, H, D)" if layout == "token_major" else "(H, T, D)"
    checks.rank(rows, (3,), name, f"{axes}, the tokens of all sequences one after the other", operation)


def check_rows(operation: str, config: PoolConfig, arrays: Arrays, layout: str) -> None:
    """Raise unless new K and V have the axes of the layout and the heads of the store, and the layout exists."""
    checks.option(layout, "layout", operation, checks.LAYOUTS)
    for name, a in zip("kv", arrays, strict=True):
        check_rank(operation, name, a, layout)
        tokens, heads = rows_first(a, layout).shape[:2]
        check_heads(operation, name, heads, tokens, config.num_kv_heads, f"{name}: {describe(a)}, {layout}", layout)


class RowWrite:
    """The write of rows (T, H, D) of one form by a slot for each token, checked; ShapeError or DTypeError if unfit."""

    ordered: Any = None  # slots are read in the order of tokens

    def __init__(self, operation: str, pools: LayerPools, layer: int, rows: Arrays) -> None:
        live, config = pools.runtime, pools.config
        self.pools, self.scales = pools.layers[layer], pools.scales[layer]
        index = new_array((self._read(operation, rows),), dtypes.int32, live)
        arrays = self._arrays(*self._parts(rows, index)[0])
        summaries, written = pools.pages[layer], None
        self.summarized_later: LayerPages | None = None
        if summaries is not None and config.rows.k.is_numbers:
            written = summaries.written(self.row_step)
        else:
            self.summarized_later = summaries
        self.plan = paged.check_write_slots(
            live, operation, arrays, config.layout, config.rows.formats, [*self.scales], written
        )

    @property
    def row_step(self) -> int:
        """How many rows of a launch lead from a token to the next one of the same sequence and head."""
        return 1

    def _read(self, operation: str, rows: Arrays) -> int:
        """How many slots a write reads."""
        return rows[0].shape[0]

    def _parts(self, rows: Arrays, slots: ArrayView) -> list[tuple[ArrayView, ArrayView, ArrayView]]:
        """K, V and slots of each launch."""
        return [(rows[0], rows[1], slots)]

    def _arrays(self, k: ArrayView, v: ArrayView, slots: ArrayView) -> list[ArrayView]:
        return [k, self.pools[0], v, self.pools[1], slots, *self.scales.values()]

    def calls(self, rows: Arrays, slots: ArrayView) -> list[PlannedCall]:
        """The calls that write rows of the checked form; `slots` are in the order of `ordered`."""
        return [PlannedCall(self.plan, self._arrays(*part)) for part in self._parts(rows, slots)]


class HeadWrite(RowWrite):
    """The same with one slot for each token and head: one launch, or one per head.

    If the rows of all tokens and heads are contiguous, they are written as T * H tokens of one head.
    """

    def _read(self, operation: str, rows: Arrays) -> int:
        tokens, self.heads = paged.rows_shape(rows[0], rows[1], operation)
        self.together = all(a.strides[0] == self.heads * a.strides[1] for a in rows)
        return tokens * self.heads

    def _parts(self, rows: Arrays, slots: ArrayView) -> list[tuple[ArrayView, ArrayView, ArrayView]]:
        k, v = rows
        if self.together:
            k, v = (
                a.restrided((a.shape[0] * self.heads, 1, a.shape[2]), (a.strides[1], a.strides[1], 1)) for a in rows
            )
            return [(k, v, slots)]
        n = k.shape[0]
        return [(k.part(1, h, h + 1), v.part(1, h, h + 1), slots.part(0, h * n, h * n + n)) for h in range(self.heads)]

    @property
    def row_step(self) -> int:
        """As in `RowWrite`; if one launch writes all heads, the rows of the others are between two tokens."""
        return self.heads if self.together else 1

    def ordered(self, slots: Host) -> Host:
        """The slots of tokens by head in the order in which the launches read them."""
        return slots if self.together else slots.reshape(-1, self.heads).T.ravel()


def cumulated(cu_seqlens: Array, count: int, rows: int, operation: str, live: Runtime) -> tuple[int, ...]:
    """The cumulative numbers of tokens, which must agree with the number of rows."""
    if cu_seqlens is None:
        if count == 1:
            return 0, rows
        detail = f"one for each sequence, since cu_seqlens is None; for more, give cu_seqlens=[0, ..., {rows}]"
        checks.extent(rows, count, "the number of rows", operation, detail)
        return tuple(range(count + 1))
    bounds = tuple(host_integers(cu_seqlens, "cu_seqlens", operation, live))
    detail = f"one more than the number of sequences, {count}: 0, then where the rows of each sequence end"
    checks.extent(len(bounds), count + 1, "the length of cu_seqlens", operation, detail)
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ShapeError(
            f"{operation}: cu_seqlens={list(bounds)} must begin with 0, never fall, and end at most at the "
            f"{rows} rows given."
        )
    return bounds
