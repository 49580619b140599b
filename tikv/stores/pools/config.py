"""The configuration of a pool of pages: the number and size of blocks, their heads, dtype and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tikv import dtypes, runtime
from tikv.dtypes import DType
from tikv.errors import CapacityError, OptionError, ShapeError
from tikv.formats import Quant, parse_aging
from tikv.ops import checks
from tikv.ops.layouts import CHUNK_BYTES, POOL_LAYOUTS
from tikv.stores.layers.token_group_form import TokenGroupForm
from tikv.stores.limits import BLOCK_BYTES, shared_bytes
from tikv.stores.row_format import ROWS, RowFormats, check_summarized

HostArray: TypeAlias = np.ndarray[Any, Any]
NOT_OF_GROUPS = {
    "layout": "a block holds whole groups of codes, head by head",
    "per_head": "tokens of all heads become codes together, so all heads must hold the same tokens",
    "page_summaries": "the newest keys are stored outside the blocks",
}
ROW_AXES = "NSHCXD"  # of a pool in layout NHD, a row's parts last and in order


@dataclass(frozen=True)
class PoolConfig:
    """What the pools of all layers have in common: the arguments of a `PagedKVCacheStore`, checked."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    rows: RowFormats
    layout: str
    per_head: bool = False  # whether a block holds tokens of one head only
    page: int | None = None  # tokens per page whose least and greatest keys are kept
    groups: TokenGroupForm | None = None  # if keys are quantised by channel over groups of tokens, see `group_pages`

    @classmethod
    def checked(
        cls,
        operation: str,
        live: runtime.Runtime,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        layout: str,
        per_head: bool = False,
        page_summaries: int | None = None,
        **rows: Any,
    ) -> PoolConfig:
        """The configuration that the arguments ask for, or an error; `rows` are those of `RowFormats.checked`."""
        heads = checks.integer(num_kv_heads, "num_kv_heads", operation, low=1)
        if parse_aging(rows.get("dtype")) is not None:
            form = TokenGroupForm.checked(operation, live, heads, rows)
            asked = {"layout": layout if layout != "NHD" else None, "per_head": per_head or None}
            return cls._of_groups(
                operation, live, form, num_blocks, block_size, asked | {"page_summaries": page_summaries}
            )
        config = cls(
            checks.integer(num_blocks, "num_blocks", operation, low=1),
            checks.integer(block_size, "block_size", operation, low=1),
            heads,
            RowFormats.checked(operation, live, heads, **rows),
            checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS)),
            bool(per_head),
            None if page_summaries is None else checks.integer(page_summaries, "page_summaries", operation, low=1),
        )
        config._check_summaries(operation)
        if config.per_head and any(numbers is not None and len(numbers) > 1 for numbers in config.rows.divisors):
            raise OptionError(
                f"{operation}: k_scale or v_scale has a number for each head, but with per_head=True a pool has "
                "one head. Use one number for all."
            )
        if config.per_head and config.layout == "VLLM":
            raise OptionError(
                f"{operation}: layout VLLM cuts rows into pieces, which a compaction of single heads cannot move. "
                "Use NHD or HND with per_head=True."
            )
        groups = next((row.format for row in config.rows.both if row.format is not None), None)
        if groups is not None and config.layout == "VLLM":
            raise OptionError(
                f"{operation}: layout VLLM cuts rows into pieces, but groups of {groups} must stay whole. Use NHD "
                "or HND."
            )
        keys = config.rows.k
        chunk = CHUNK_BYTES // keys.stored.itemsize
        if "X" in POOL_LAYOUTS[config.layout][0] and keys.width % chunk:
            raise ShapeError(
                f"{operation}: head_dim={keys.width} is not a multiple of the {chunk} {keys.dtype.name} elements of a "
                f"chunk, which layout {config.layout} cuts keys into. Use NHD or HND."
            )
        for needed, limit in config._sizes(live):
            if needed > limit:
                raise CapacityError(
                    f"{operation}: a layer needs {needed} bytes in one piece of memory "
                    f"(num_blocks={config.num_blocks} x block_size={config.block_size} x {config.block_heads} heads); "
                    f"{live.arch} addresses {limit}. Use fewer blocks, or several stores."
                )
        return config

    def _check_summaries(self, operation: str) -> None:
        """Raise OptionError or DTypeError if summaries are asked for of pages or keys that cannot have them."""
        if self.page is None:
            return
        if self.block_size % self.page:
            raise OptionError(
                f"{operation}: page_summaries={self.page} does not divide block_size={self.block_size}, and a page "
                f"may not cross blocks. Use {self.block_size}, or a number that divides it."
            )
        if self.layout == "VLLM":
            raise OptionError(
                f"{operation}: layout VLLM cuts rows into pieces, so its pages cannot be summarised. Use NHD or HND."
            )
        check_summarized(operation, self.rows, self.page)

    @classmethod
    def _of_groups(
        cls, operation: str, live: runtime.Runtime, form: TokenGroupForm, num_blocks: Any, block_size: Any,
        asked: dict[str, Any],
    ) -> PoolConfig:  # fmt: skip
        """The configuration of groups along tokens; raises if anything in `asked` is unsupported with them."""
        for name, value in asked.items():
            if value is not None:
                raise OptionError(
                    f"{operation}: {name}={value!r} with {form.named} is not supported: {NOT_OF_GROUPS[name]}. "
                    f"Leave it out, or use {form.other}."
                )
        blocks = checks.integer(num_blocks, "num_blocks", operation, low=1)
        size, group = checks.integer(block_size, "block_size", operation, low=1), form.quant.group
        if size % group:
            raise OptionError(
                f"{operation}: block_size={size} is not a multiple of the group of {group} tokens, and a group may "
                f"not cross blocks. Use block_size={-(-size // group) * group}."
            )
        for name, (shape, dtype, tokens) in form.codes.arrays().items():
            needed = blocks * form.codes.heads * (size // tokens) * math.prod(shape) * dtype.itemsize
            if needed > BLOCK_BYTES[live.arch]:
                raise CapacityError(
                    f"{operation}: {name} of a layer need {needed} bytes in one piece of memory; {live.arch} addresses "
                    f"{BLOCK_BYTES[live.arch]}. Use fewer blocks, or several stores."
                )
        return cls(blocks, size, form.codes.heads, form.said, "HND", groups=form)

    @property
    def block_heads(self) -> int:
        """Heads that a block holds."""
        return 1 if self.per_head else self.num_kv_heads

    @property
    def bytes_of_layer(self) -> int:
        """Bytes of the larger of a layer's two pools."""
        return self.num_blocks * self.block_size * self.block_heads * max(row.nbytes for row in self.rows.both)

    def _sizes(self, live: runtime.Runtime) -> list[tuple[int, int]]:
        """Bytes of a layer's two pools, and the most that each may have: kernels count 2**31 words or elements."""
        slots, most = self.num_blocks * self.block_size * self.block_heads, BLOCK_BYTES[live.arch]
        return [(slots * row.nbytes, min(most, 2**31 * row.stored.itemsize)) for row in self.rows.both]

    def layers_together(self, live: runtime.Runtime) -> int:
        """How many layers share one piece of memory."""
        if self.groups is not None:
            return 1
        return max(1, min(min(limit, shared_bytes(live)) // needed for needed, limit in self._sizes(live)))

    def shape(self, stream: int, num_blocks: int) -> tuple[int, ...]:
        """The shape of K's (0) or V's (1) pool of that many blocks."""
        row = self.rows.both[stream]
        width, chunk = row.stored_width, CHUNK_BYTES // row.stored.itemsize
        extent = {"N": num_blocks, "S": self.block_size, "H": self.block_heads, "D": width, "C": width // chunk}
        return tuple(extent.get(axis, chunk) for axis in POOL_LAYOUTS[self.layout][stream])

    def block_forms(self) -> list[tuple[tuple[int, ...], DType]]:
        """The shape of a block in the pool and the dtype, for each array of a layer, K's first."""
        if self.groups is not None:
            arrays = self.groups.codes.arrays().values()
            return [((self.num_kv_heads, self.block_size // n, *shape), dtype) for shape, dtype, n in arrays]
        forms = [(self.shape(i, 1)[1:], row.stored) for i, row in enumerate(self.rows.both)]
        return forms + [self.names()[name] for name in self.scale_names]

    def names(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """A layer's arrays by name, with the shape of a block in layout NHD, or of its groups so, and the dtype."""
        if self.groups is not None:
            return self.groups.names(self.block_size)
        slots = (self.block_size, self.block_heads)
        return {name: ((*slots, *row), dtype) for name, (row, dtype) in self.rows.arrays().items()}

    @property
    def scale_names(self) -> list[str]:
        """The names of the scales, if there are any."""
        return [name for name in self.rows.arrays() if name not in ROWS]

    def to_rows(self, stream: int, array: HostArray) -> HostArray:
        """Blocks of a pool on the host in the shapes of `names`; scales, streams 2 and 3, have them already."""
        if self.groups is not None:
            reshaped: HostArray = array.swapaxes(1, 2)
            return reshaped
        if stream > 1:
            return array
        axes = POOL_LAYOUTS[self.layout][stream]
        rows = array.transpose([axes.index(axis) for axis in ROW_AXES if axis in axes])
        reshaped = rows.reshape(*rows.shape[:3], self.rows.both[stream].stored_width)
        return reshaped

    def from_rows(self, stream: int, rows: HostArray) -> HostArray:
        """The reverse of `to_rows`."""
        if self.groups is not None:
            return np.ascontiguousarray(rows.swapaxes(1, 2))
        if stream > 1:
            return rows
        axes = POOL_LAYOUTS[self.layout][stream]
        order = [axis for axis in ROW_AXES if axis in axes]
        extent = dict(zip(axes, self.shape(stream, len(rows)), strict=True))
        split = rows.reshape([extent[axis] for axis in order])
        return np.ascontiguousarray(split.transpose([order.index(axis) for axis in axes]))

    def arguments(self) -> dict[str, Any]:
        """The arguments of a store of this configuration, in JSON's types, except for a `Quant`."""
        rows = self.rows.arguments()
        if not self.scale_names:
            rows["scale_dtype"] = dtypes.float16.name  # unused without scales
        sizes = {name: getattr(self, name) for name in ("num_blocks", "block_size", "num_kv_heads", "layout")}
        if self.page is not None:
            sizes["page_summaries"] = self.page
        if self.groups is not None:
            quant = self.groups.quant
            dtype = quant if isinstance(quant, Quant) else quant.name
            return sizes | rows | {"layout": "NHD", "dtype": dtype}  # as an argument there is no other layout
        return sizes | rows


def in_full(arguments: dict[str, Any]) -> dict[str, Any]:
    """`PoolConfig.arguments` with their defaults filled in: V is stored as K is, and nothing is divided."""
    return arguments | {"v_dtype": arguments["dtype"], "k_scale": None, "v_scale": None} | arguments
