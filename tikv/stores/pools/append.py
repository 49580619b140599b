"""Appends to the pages of a layer: rows of several sequences in one launch, split of fused rows included."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tikv import dtypes
from tikv.arrays import ArrayView, Host, describe, new_array, view
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks, paged
from tikv.ops.indices import host_integers
from tikv.ops.plan import PlannedCall
from tikv.ops.write_qkv import fused_call
from tikv.ops.write_qkv_codes import FusedTarget
from tikv.runtime import Runtime
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers.queries import check_heads, rows_first
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.pages import Changing, Pages
from tikv.stores.pools.sequences import AppendStep
from tikv.stores.pools.summaries import LayerPages

Arrays = Sequence[ArrayView]


class PageAppends:
    """The appends to a store's pages: it checks them, keeps their plans and runs them."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._writes: BoundedCache[Any, RowWrite] = BoundedCache()

    def append(self, operation: str, layer: int, given: Arrays, seqs: Any, cu_seqlens: Any, layout: str) -> AppendStep:
        """Append views of K and V to one layer, and return where the tokens went; `PagedKVCacheStore.append`."""
        pages = self.pages
        key = (layer, checks.name(layout, "layout", operation, checks.LAYOUTS), *[a.key for a in given])
        write = self._writes.get(key)
        if write is None:
            check_rows(operation, pages.config, given, layout)
        rows = [rows_first(a, layout) for a in given]
        if write is None:
            write = self._writes.keep(key, self._write(operation, layer, rows))
        step = self._begin(operation, layer, seqs, cu_seqlens, rows[0].shape[0])
        with Changing(pages, step) as change:
            calls = write.calls(rows, pages.tables.slots(step, write.ordered))
            change.copy_shared(calls[0].prepare)
            for call in calls:
                call.run()
            if write.summarized_later is not None:
                write.summarized_later.summarize_filled(operation, step.slots)
        pages.sequences.commit(layer, step)
        return step

    def _write(self, operation: str, layer: int, rows: Arrays) -> RowWrite:
        """The write of new rows of one form; the DTypeError names another store that takes their dtype, if any."""
        own = rows[0].dtype
        try:
            return (HeadWrite if self.pages.config.per_head else RowWrite)(operation, self.pages, layer, rows)
        except DTypeError as error:
            if own is not rows[1].dtype or own not in dtypes.FLOATS:
                raise
            raise DTypeError(f"{error} Or make the store with dtype={own.name!r}.") from None

    def write_qkv(self, operation: str, layer: int, qkv: Any, seqs: Any, cu_seqlens: Any, **options: Any) -> Any:
        """Split, norm, rotate and append fused rows, and return the queries; `PagedKVCacheStore.write_qkv`."""
        pages = self.pages
        _refuse_fused(pages, operation)
        rows = view(qkv, "qkv", operation)
        checks.rank(rows, (2,), "qkv", "(T, (Hq + 2 H) * D)", operation)
        k_pool, v_pool = pages.pools.layers[layer][:2]
        scales: dict[str, Any] = pages.pools.scales[layer]
        step = self._begin(operation, layer, seqs, cu_seqlens, rows.shape[0])
        with Changing(pages, step) as change:
            if options["norm_rope"] is not None and options["rope_positions"] is None:
                options["rope_positions"] = pages.tables.known("positions", step.positions)
            slots = pages.tables.slots(step)
            target = FusedTarget(k_pool, v_pool, slot_mapping=slots, layout=pages.config.layout, **scales)
            call = fused_call(operation, qkv, target, **options)
            change.copy_shared(call.prepare)
            q = call.run()
            summaries = pages.pools.pages[layer]
            if summaries is not None:
                summaries.summarize_filled(operation, step.slots)
        pages.sequences.commit(layer, step)
        return q

    def _begin(self, operation: str, layer: int, seqs: Any, cu_seqlens: Any, rows: int) -> AppendStep:
        """Take blocks for a layer's new tokens; the write happens within `Changing`, and `commit` counts it."""
        return begin_append(self.pages, operation, layer, seqs, cu_seqlens, rows)


def begin_append(
    pages: Pages, operation: str, layer: int, seqs: Any, cu_seqlens: Any, rows: int, part: bool = False
) -> AppendStep:
    """Where the `rows` new rows of the sequences that a caller named go; see `Sequences.begin`."""
    ids = pages.ids(seqs, operation)
    bounds = _cumulated(cu_seqlens, len(ids), rows, operation, pages.runtime)
    return pages.sequences.begin(operation, layer, ids, bounds, rows, part)


def check_rank(operation: str, name: str, rows: ArrayView, layout: str) -> None:
    """Raise ShapeError unless new rows have the layout's axes, without an axis of sequences."""
    axes = "(T, H, D)" if layout == "token_major" else "(H, T, D)"
    checks.rank(rows, (3,), name, f"{axes}, the tokens of all sequences one after the other", operation)


def check_rows(operation: str, config: PoolConfig, given: Arrays, layout: str) -> None:
    """Raise unless new K and V have the axes of the layout and the heads of the store, and the layout exists."""
    checks.option(layout, "layout", operation, checks.LAYOUTS)
    for name, a in zip("kv", given, strict=True):
        check_rank(operation, name, a, layout)
        tokens, heads = rows_first(a, layout).shape[:2]
        check_heads(operation, name, heads, tokens, config.num_kv_heads, f"{name}: {describe(a)}, {layout}", layout)


class RowWrite:
    """The write of rows (T, H, D) of one form by a slot for each token, checked; ShapeError or DTypeError if unfit."""

    ordered: Any = None  # slots are read in the order of tokens

    def __init__(self, operation: str, pages: Pages, layer: int, rows: Arrays) -> None:
        live, config = pages.runtime, pages.config
        self.pools, self.scales = pages.pools.layers[layer], pages.pools.scales[layer]
        index = new_array((self._read(operation, rows),), dtypes.int32, live)
        arrays = self._arrays(*self._parts(rows, index)[0])
        summaries, written = pages.pools.pages[layer], None
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


def _refuse_fused(pages: Pages, operation: str) -> None:
    """Raise unless the fused write supports this store."""
    pages.refuse_per_head(operation, "the fused write has one slot for all heads of a token")
    rows, why = pages.config.rows, ""
    if not rows.alike:
        why = f"needs K and V in one format, and this store is {rows.name}"
    elif rows.formats != (None, None):
        why = f"cannot write codes of {rows.name}"
    elif rows.divided:
        why = "cannot divide by a scale"
    if why:
        raise DTypeError(f"{operation}: the fused write {why}. Write to arrays with tikv.write_qkv and append them.")


def _cumulated(cu_seqlens: Any, count: int, rows: int, operation: str, live: Runtime) -> tuple[int, ...]:
    """The cumulative numbers of tokens, which must agree with the number of rows."""
    if cu_seqlens is None:
        if rows != count:
            wanted = f"[0, {rows}]" if count == 1 else f"[0, ..., {rows}]"
            detail = f"one for each sequence, since cu_seqlens is None; for more, give cu_seqlens={wanted}"
            checks.extent(rows, count, "the number of rows", operation, detail)
        return tuple(range(count + 1))
    bounds = tuple(host_integers(cu_seqlens, "cu_seqlens", operation, live))
    wanted = f"one more than the number of sequences, {count}: 0, then where the rows of each sequence end"
    checks.extent(len(bounds), count + 1, "the length of cu_seqlens", operation, wanted)
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ShapeError(
            f"{operation}: cu_seqlens={list(bounds)} must begin with 0, never fall, and end at most at the "
            f"{rows} rows given."
        )
    return bounds
