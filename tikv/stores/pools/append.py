"""Appends to the pages of a layer: rows of several sequences in one launch, split of fused rows included."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import ArrayView, describe, new_array, view
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks, paged
from tikv.ops.indices import host_integers
from tikv.ops.plan import Call
from tikv.ops.write_qkv import fused_call
from tikv.runtime import Runtime
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers.queries import check_heads, rows_first
from tikv.stores.pools.form import PoolForm
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.sequences import AppendStep

Arrays = Sequence[ArrayView]
Scales = Mapping[str, ArrayView]


class PageAppends:
    """The appends to a store's pages: checked, kept and run."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self._writes: BoundedCache[Any, RowWrite] = BoundedCache()

    def append(self, operation: str, layer: int, given: Arrays, seqs: Any, cu_seqlens: Any, layout: str) -> AppendStep:
        """Append views of K and V to one layer; where the tokens went. `PagedKVCacheStore.append`."""
        pages = self.pages
        pools, scales = pages.pools.layers[layer], pages.pools.scales[layer]
        key = (layer, checks.name(layout, "layout", operation, checks.LAYOUTS), *[a.key for a in given])
        write = self._writes.get(key)
        if write is None:
            _check_rows(operation, pages.form, given, layout)
        rows = [rows_first(a, layout) for a in given]
        if write is None:
            write = self._writes.keep(key, self._write(operation, rows, pools, scales))
        step = self._begin(operation, layer, seqs, cu_seqlens, rows[0].shape[0])
        with pages.changing(step) as change:
            calls = write.calls(rows, pools, scales, pages.tables.slots(step, write.ordered))
            change.copy_shared(calls[0].prepare)
            for call in calls:
                call.run()
        pages.sequences.commit(layer, step)
        return step

    def _write(self, operation: str, rows: Arrays, pools: Arrays, scales: Scales) -> RowWrite:
        """The write of new rows of one form.

        Raises:
            ShapeError, DTypeError: they do not fit the pools; of a dtype that another store takes it says so.
        """
        pages, own = self.pages, rows[0].dtype
        try:
            return (HeadWrite if pages.form.per_head else RowWrite)(
                pages.runtime, operation, pages.form, rows, pools, scales
            )
        except DTypeError as error:
            if own is not rows[1].dtype or own not in dtypes.FLOATS:
                raise
            raise DTypeError(f"{error} Or make the store with dtype={own.name!r}.") from None

    def write_qkv(self, operation: str, layer: int, qkv: Any, seqs: Any, cu_seqlens: Any, **options: Any) -> Any:
        """Split, norm, rotate and append fused rows; the queries. `PagedKVCacheStore.write_qkv`."""
        pages = self.pages
        _refuse_fused(pages, operation)
        rows = view(qkv, "qkv", operation)
        checks.rank(rows, (2,), "qkv", "(T, (Hq + 2 H) * D)", operation)
        k_pool, v_pool = pages.pools.layers[layer][:2]
        scales: dict[str, Any] = pages.pools.scales[layer]
        step = self._begin(operation, layer, seqs, cu_seqlens, rows.shape[0])
        with pages.changing(step) as change:
            if options["norm_rope"] is not None and options["rope_positions"] is None:
                options["rope_positions"] = pages.tables.known("positions", step.positions)
            slots = pages.tables.slots(step)
            call = fused_call(
                operation, qkv, k_pool, v_pool, slot_mapping=slots, layout=pages.form.layout, **scales, **options
            )
            change.copy_shared(call.prepare)
            q = call.run()
        pages.sequences.commit(layer, step)
        return q

    def _begin(self, operation: str, layer: int, seqs: Any, cu_seqlens: Any, rows: int) -> AppendStep:
        """Take blocks for a layer's new tokens; `Pages.changing` is around what is written, `commit` counts it."""
        pages = self.pages
        ids = pages.ids(seqs, operation)
        bounds = _cumulated(cu_seqlens, len(ids), rows, operation, pages.runtime)
        return pages.sequences.begin(operation, layer, ids, bounds, rows)


def check_rank(operation: str, name: str, rows: ArrayView, layout: str) -> None:
    """New rows have the axes of the layout, without one of sequences.

    Raises:
        ShapeError: they have others.
    """
    checks.rank(rows, (3,), name, "(T, H, D)" if layout == "token_major" else "(H, T, D)", operation)


def _check_rows(operation: str, form: PoolForm, given: Arrays, layout: str) -> None:
    """New K and V have the axes of the layout, and the heads of the store.

    Raises:
        ShapeError, OptionError: they have not; or there is no such layout.
    """
    checks.option(layout, "layout", operation, checks.LAYOUTS)
    for name, a in zip("kv", given, strict=True):
        check_rank(operation, name, a, layout)
        tokens, heads = rows_first(a, layout).shape[:2]
        check_heads(operation, name, heads, tokens, form.num_kv_heads, f"{name}: {describe(a)}, {layout}", layout)


class RowWrite:
    """The write of rows (T, H, D) of one form by a slot for each token, checked.

    Raises:
        ShapeError, DTypeError: the rows do not fit the pools.
    """

    ordered: Any = None  # slots are read in the order of tokens

    def __init__(
        self, live: Runtime, operation: str, form: PoolForm, rows: Arrays, pools: Arrays, scales: Scales
    ) -> None:
        index = new_array(rows[0].shape[:1], dtypes.int32, live)
        self.plan = self._checked(live, operation, form, (*rows, index), pools, scales)

    @staticmethod
    def _checked(
        live: Runtime, operation: str, form: PoolForm, rows: Arrays, pools: Arrays, scales: Scales
    ) -> paged.WriteSlotsPlan:
        k, v, index = rows
        arrays = [k, pools[0], v, pools[1], index, *scales.values()]
        return paged.check_write_slots(live, operation, arrays, form.layout, form.formats, [*scales])

    def calls(self, rows: Arrays, pools: Arrays, scales: Scales, slots: ArrayView) -> list[Call]:
        """What writes rows of the form that was checked."""
        return [Call(self.plan, [rows[0], pools[0], rows[1], pools[1], slots, *scales.values()])]


class HeadWrite(RowWrite):
    """The same by one slot for each token and head: a launch, or one a head.

    The rows of all tokens and heads are those of T * H tokens of one head, if they lie one after the other.
    """

    def __init__(
        self, live: Runtime, operation: str, form: PoolForm, rows: Arrays, pools: Arrays, scales: Scales
    ) -> None:
        tokens, heads = paged.rows_shape(rows[0], rows[1], operation)
        self.heads = heads
        self.together = all(a.strides[0] == heads * a.strides[1] for a in rows)
        index = new_array((tokens * heads,), dtypes.int32, live)
        self.plan = self._checked(live, operation, form, self._parts(rows, index)[0], pools, scales)

    def _parts(self, rows: Arrays, slots: ArrayView) -> list[tuple[ArrayView, ArrayView, ArrayView]]:
        """K, V and slots of each launch."""
        k, v = rows
        if self.together:
            flat = [
                a.restrided((a.shape[0] * self.heads, 1, a.shape[2]), (a.strides[1], a.strides[1], 1)) for a in rows
            ]
            return [(flat[0], flat[1], slots)]
        tokens = k.shape[0]
        return [
            (k.part(1, h, h + 1), v.part(1, h, h + 1), slots.part(0, h * tokens, (h + 1) * tokens))
            for h in range(self.heads)
        ]

    def ordered(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The slots of tokens by head in the order in which the launches read them."""
        return slots if self.together else slots.reshape(-1, self.heads).T.ravel()

    def calls(self, rows: Arrays, pools: Arrays, scales: Scales, slots: ArrayView) -> list[Call]:
        """As `RowWrite.calls`; `slots` as `ordered` has them."""
        parts = self._parts(rows, slots)
        return [call for k, v, index in parts for call in super(HeadWrite, self).calls((k, v), pools, scales, index)]


def _refuse_fused(pages: Pages, operation: str) -> None:
    """What the fused write does not make.

    Raises:
        OptionError, DTypeError: the store keeps that.
    """
    pages.refuse_per_head(operation, "the fused write has one slot for all heads of a token")
    rows, why = pages.form.rows, ""
    if not rows.alike:
        why = f"keeps K and V alike, and this store is {rows.name}"
    elif rows.formats != (None, None):
        why = f"makes no codes of {rows.name}"
    elif rows.divided:
        why = "divides by no scale"
    if why:
        raise DTypeError(f"{operation}: the fused write {why}. Write to arrays with tikv.write_qkv and append them.")


def _cumulated(cu_seqlens: Any, count: int, rows: int, operation: str, live: Runtime) -> tuple[int, ...]:
    """The cumulated numbers of tokens, which agree with the rows there are."""
    if cu_seqlens is None:
        if rows != count:
            wanted = f"[0, {rows}]" if count == 1 else f"[0, ..., {rows}]"
            detail = f"one for each sequence, as cu_seqlens is None; for more give cu_seqlens={wanted}"
            checks.extent(rows, count, "the number of rows", operation, detail)
        return tuple(range(count + 1))
    bounds = tuple(host_integers(cu_seqlens, "cu_seqlens", operation, live))
    checks.extent(len(bounds), count + 1, "the length of cu_seqlens", operation, f"{count} sequences")
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ShapeError(
            f"{operation}: cu_seqlens={list(bounds)} must begin with 0, never fall, and end at most at the "
            f"{rows} rows given."
        )
    return bounds
