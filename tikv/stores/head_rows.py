"""Rows of single heads in the pools of a per-head paged store: appended, a slot for each token and head, and moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, new_array
from tikv.errors import OptionError
from tikv.ops import blocks, checks, paged
from tikv.stores.pool_form import PoolForm


def refuse_per_head(form: PoolForm, operation: str, why: str) -> None:
    """What a per-head store does not do.

    Raises:
        OptionError: it is one.
    """
    if form.per_head:
        raise OptionError(f"{operation}: this store has per_head=True, and {why}. Use a store without it.")


class HeadAppend:
    """The write of rows (T, H, D) by one slot for each token and head: a launch, or one a head.

    The rows of all tokens and heads are those of T * H tokens of one head, if they lie one after the other.

    Raises:
        ShapeError, DTypeError: the rows do not fit the pools.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        operation: str,
        form: PoolForm,
        rows: Sequence[ArrayView],
        pools: Sequence[ArrayView],
    ) -> None:
        tokens, heads = paged.rows_shape(rows[0], rows[1], operation)
        detail = f"rows of {heads} heads, a store of {form.num_kv_heads}"
        checks.extent(heads, form.num_kv_heads, "the number of heads", operation, detail)
        self.heads = heads
        self.together = all(a.strides[0] == heads * a.strides[1] for a in rows)
        index = new_array((tokens * heads,), dtypes.int32, live)
        k, v, slots = self._parts(rows, index)[0]
        arrays = [k, pools[0], v, pools[1], slots, *pools[2:]]
        self.plan = paged.check_write_slots(live, operation, arrays, form.layout, form.format)

    def _parts(self, rows: Sequence[ArrayView], slots: ArrayView) -> list[tuple[ArrayView, ArrayView, ArrayView]]:
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

    def run(self, rows: Sequence[ArrayView], pools: Sequence[ArrayView], slots: ArrayView) -> None:
        """Write rows of the form that was checked; `slots` as `ordered` has them."""
        for k, v, index in self._parts(rows, slots):
            self.plan.run([k, pools[0], v, pools[1], index, *pools[2:]])


def move_rows(
    live: runtime.Runtime, pools: Sequence[ArrayView], src: np.ndarray[Any, Any], dst: np.ndarray[Any, Any]
) -> None:
    """Move the rows of slots to other slots, in all pools of a layer, by way of memory of their own: slots may be both.

    Raises:
        CapacityError: there is no memory. Nothing is moved.
    """
    count = len(src)
    if count == 0:
        return
    there, back = (np.stack(pair, axis=1).astype(np.int32) for pair in ((src, range(count)), (range(count), dst)))
    rows = [_as_rows(a) for a in pools]
    moved = [new_array((count, *a.shape[1:]), a.dtype, live) for a in rows]
    for a, to in zip(rows, moved, strict=True):
        blocks.swap_blocks(a, to, there)
    for a, to in zip(rows, moved, strict=True):
        blocks.swap_blocks(to, a, back)


def _as_rows(pool: ArrayView) -> ArrayView:
    """A pool of one head, or its scales, as (slots, width)."""
    width = pool.shape[-1] if pool.ndim == 4 else 1
    return pool.restrided((pool.shape[0] * max(pool.shape[1:3]), width), (width, 1))
