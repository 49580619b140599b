"""The form of a pool of pages: how many blocks of how many tokens, of which heads, dtype and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView
from tikv.dtypes import DType
from tikv.errors import CapacityError, OptionError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.layouts import CHUNK_BYTES, POOL_LAYOUTS, Formats
from tikv.stores.storage import (
    BLOCK_BYTES,
    Divisors,
    RowForm,
    divisors_of,
    named_divisors,
    shared_bytes,
    storage_or_format,
)

HostArray: TypeAlias = np.ndarray[Any, Any]


def _row_axes(axes: str) -> str:
    """The axes of a pool, a row's parts last and in order, as layout NHD has them."""
    return "NSHCX" if "X" in axes else "NSHD"


@dataclass(frozen=True)
class PoolForm:
    """What the pools of all layers have in common."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: DType | GroupFormat  # of K
    v_dtype: DType | GroupFormat
    scale_dtype: DType | None  # of int8 and of groups
    layout: str
    per_head: bool = False  # a block holds tokens of one head
    divisors: Divisors = (None, None)  # what all rows of K and of V are divided by

    @classmethod
    def checked(
        cls,
        operation: str,
        live: runtime.Runtime,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any,
        scale_dtype: Any,
        layout: str,
        per_head: bool = False,
        v_dtype: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> PoolForm:
        """The form that a user's arguments mean.

        Raises:
            CapacityError: a layer is larger than a launch on this arch addresses.
            DTypeError, OptionError, PositionError, ShapeError: an argument that is none.
        """
        given = dtype, dtype if v_dtype is None else v_dtype
        (of_k, k_scales), (of_v, v_scales) = (storage_or_format(x, scale_dtype, live, operation) for x in given)
        form = cls(
            checks.integer(num_blocks, "num_blocks", operation, low=1),
            checks.integer(block_size, "block_size", operation, low=1),
            checks.integer(num_kv_heads, "num_kv_heads", operation, low=1),
            checks.integer(head_dim, "head_dim", operation, low=1),
            checks.integer(head_dim if head_dim_v is None else head_dim_v, "head_dim_v", operation, low=1),
            of_k,
            of_v,
            k_scales or v_scales,
            checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS)),
            bool(per_head),
            divisors_of((of_k, of_v), (k_scale, v_scale), num_kv_heads, operation),
        )
        if form.per_head and any(numbers is not None and len(numbers) > 1 for numbers in form.divisors):
            raise OptionError(
                f"{operation}: k_scale or v_scale has a number for each head, and with per_head=True a pool is of one "
                f"head. Use one number for all."
            )
        if form.per_head and form.layout == "VLLM":
            raise OptionError(
                f"{operation}: layout VLLM cuts rows into pieces, which a compaction of single heads does not move. "
                f"Use NHD or HND with per_head=True."
            )
        for name, row in zip(("head_dim", "head_dim_v"), form.rows, strict=True):
            if row.format is None:
                continue
            if form.layout == "VLLM":
                raise OptionError(
                    f"{operation}: layout VLLM cuts rows into pieces, and groups of {row.dtype} lie whole. Use NHD or "
                    f"HND."
                )
            row.format.groups(row.width, name, operation)
        chunk = CHUNK_BYTES // form.rows[0].stored.itemsize
        if "X" in POOL_LAYOUTS[form.layout][0] and form.head_dim % chunk:
            raise ShapeError(
                f"{operation}: head_dim={form.head_dim} is no multiple of the {chunk} {of_k.name} elements of a "
                f"chunk, which layout {form.layout} cuts keys into. Use NHD or HND."
            )
        for row in form.rows:
            if form.bytes_of_rows(row) > form.limit(row, live):
                raise CapacityError(
                    f"{operation}: a layer needs {form.bytes_of_rows(row)} bytes in one piece of memory "
                    f"(num_blocks={form.num_blocks} x block_size={form.block_size} x {form.block_heads} heads); "
                    f"{live.arch} addresses {form.limit(row, live)}. Use fewer blocks, or several stores."
                )
        return form

    @property
    def block_heads(self) -> int:
        """Heads that a block holds."""
        return 1 if self.per_head else self.num_kv_heads

    @property
    def rows(self) -> tuple[RowForm, RowForm]:
        """How rows of K and of V are kept."""
        k, v = self.divisors
        return (
            RowForm(self.dtype, self.head_dim, k is not None),
            RowForm(self.v_dtype, self.head_dim_v, v is not None),
        )

    @property
    def formats(self) -> Formats:
        """The formats of K and of V, of those that are groups of codes."""
        return self.rows[0].format, self.rows[1].format

    @property
    def alike(self) -> bool:
        """Whether K and V are kept in one dtype or format."""
        return self.dtype is self.v_dtype

    @property
    def kept_as(self) -> str:
        """What K and V are kept as, for messages and a `repr`."""
        return self.dtype.name if self.alike else f"{self.dtype.name}|{self.v_dtype.name}"

    def bytes_of_rows(self, row: RowForm) -> int:
        """Bytes of a layer's pool of such rows."""
        return self.num_blocks * self.block_size * self.block_heads * row.nbytes

    @property
    def bytes_of_layer(self) -> int:
        """Bytes of the larger of a layer's two pools."""
        return max(map(self.bytes_of_rows, self.rows))

    def limit(self, row: RowForm, live: runtime.Runtime) -> int:
        """Bytes that one piece of memory may have: a kernel counts 2**31 of them, at worst one element a word."""
        return min(BLOCK_BYTES[live.arch], 2**31 * row.stored.itemsize)

    def layers_together(self, live: runtime.Runtime) -> int:
        """How many layers share one piece of memory."""
        shared = shared_bytes(live)
        return max(1, min(min(self.limit(row, live), shared) // self.bytes_of_rows(row) for row in self.rows))

    def shape(self, stream: int, num_blocks: int) -> tuple[int, ...]:
        """The shape of K's (0) or V's (1) pool of that many blocks."""
        row = self.rows[stream]
        width, chunk = row.stored_width, CHUNK_BYTES // row.stored.itemsize
        extent = {"N": num_blocks, "S": self.block_size, "H": self.block_heads, "D": width, "C": width // chunk}
        return tuple(extent.get(axis, chunk) for axis in POOL_LAYOUTS[self.layout][stream])

    def scale_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of a pool's scales: one a row, or the numbers of a row's groups."""
        return num_blocks, self.block_size, self.block_heads, *self._numbers

    @property
    def _numbers(self) -> tuple[int, ...]:
        """The axis of a row's scales, if it has several; K and V have as many."""
        return () if self.formats == (None, None) else (max(row.numbers for row in self.rows),)

    def names(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """A layer's arrays by name, with the shape of a block in layout NHD, and the dtype."""
        slots = (self.block_size, self.block_heads)
        found: dict[str, tuple[tuple[int, ...], DType]] = {
            name: ((*slots, row.stored_width), row.stored) for name, row in zip("kv", self.rows, strict=True)
        }
        if self.scale_dtype is not None:
            of_slot = (*slots, *self._numbers)
            found |= dict.fromkeys(self.scale_names, (of_slot, self.scale_dtype))
        return found

    @property
    def scale_names(self) -> list[str]:
        """The names of the scales there are."""
        return [name for name, row in zip(("k_scale", "v_scale"), self.rows, strict=True) if row.numbers]

    def scales(self, pools: Sequence[ArrayView]) -> dict[str, ArrayView]:
        """The scales of a layer's arrays by name."""
        return dict(zip(self.scale_names, pools[2:], strict=True))

    def to_rows(self, stream: int, array: HostArray) -> HostArray:
        """Blocks of a pool on the host as layout NHD has them; scales, streams 2 and 3, are so already."""
        if stream > 1:
            return array
        axes = POOL_LAYOUTS[self.layout][stream]
        rows = array.transpose([axes.index(axis) for axis in _row_axes(axes)])
        found: HostArray = rows.reshape(*rows.shape[:3], self.rows[stream].stored_width)
        return found

    def from_rows(self, stream: int, rows: HostArray) -> HostArray:
        """The reverse of `to_rows`."""
        if stream > 1:
            return rows
        axes = POOL_LAYOUTS[self.layout][stream]
        order = _row_axes(axes)
        extent = dict(zip(axes, self.shape(stream, len(rows)), strict=True))
        split = rows.reshape([extent[axis] for axis in order])
        return np.ascontiguousarray(split.transpose([order.index(axis) for axis in axes]))

    def facts(self) -> dict[str, Any]:
        """The arguments that make a store of this form, as JSON has them."""
        apart = {} if self.alike else {"v_dtype": self.v_dtype.name}
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "dtype": self.dtype.name,
            "scale_dtype": (self.scale_dtype or dtypes.float16).name,
            "layout": self.layout,
            **apart,
            **named_divisors(self.divisors),
        }


def in_full(facts: dict[str, Any]) -> dict[str, Any]:
    """`PoolForm.facts` with what they leave unsaid behind them: V is kept as K is, and nothing is divided."""
    return facts | {"v_dtype": facts["dtype"], "k_scale": None, "v_scale": None} | facts
