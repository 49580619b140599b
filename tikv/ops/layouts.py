"""Where rows lie: strides of the rows of a cache or a pool, the axes of named layouts, the slot of a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tikv.arrays import ArrayView, describe
from tikv.errors import ShapeError
from tikv.formats import FORMATS, GroupFormat
from tikv.ops import checks

Formats: TypeAlias = tuple[GroupFormat | None, GroupFormat | None]  # of K and of V, None where rows are numbers


def token_and_head_axes(layout: str, name: str, operation: str) -> tuple[int, int]:
    """The axes of tokens and of heads in a layout."""
    return (0, 1) if checks.option(layout, name, operation, checks.LAYOUTS) == "token_major" else (1, 0)


class Scale(NamedTuple):
    """Where the numbers lie by which rows are stored and read: one per row, those of its groups, or one of many rows.

    Attributes:
        array: what holds them.
        sequence, token, head: entries from a sequence, a token (or slot), a head to the next; 0 where they share one.
        first: the entry of the first row.
        block: from a block of a pool to the next, as many slots further on.
    """

    array: ArrayView
    sequence: int = 0
    token: int = 0
    head: int = 0
    first: int = 0
    block: int = 0


class Rows(NamedTuple):
    """Where the rows of K or of V lie in an array: its strides, in elements.

    Attributes:
        array: what holds them.
        sequence, token, head: from a sequence, a token (or slot), a head to the next.
        first: of the first row.
        block: from a block of a pool to the next; `token` then counts within a block.
        inner: (chunk, stride) of a row that lies in pieces of `chunk` elements; (0, 0) for one that does not.
        format: of codes, whose array holds words; None for rows of numbers.
        scale: by which rows that are not numbers are stored and read; None if there are no scales.
        pages: where a write of keys, numbers without scales, keeps summaries of their pages; None for none.
    """

    array: ArrayView
    sequence: int = 0
    token: int = 0
    head: int = 0
    first: int = 0
    block: int = 0
    inner: tuple[int, int] = (0, 0)
    format: GroupFormat | None = None
    scale: Scale | None = None
    pages: WrittenPages | None = None

    def without_owner(self) -> Rows:
        """The same without a hold on the memory of rows and scales."""
        scale = self.scale and self.scale._replace(array=self.scale.array.without_owner())
        return self._replace(array=self.array.without_owner(), scale=scale)

    @property
    def storage(self) -> str:
        """What kernels call the way that rows are stored: the code of the dtype, or the name of the format."""
        return self.format.name if self.format else self.array.dtype.short


class WrittenPages(NamedTuple):
    """Where a write of keys keeps the least and the greatest of each page.

    Attributes:
        page: tokens of a page.
        least: where the summaries lie, with pages for tokens, in an array that has the greatest too.
        distance: elements from the least of a page to the greatest.
        unfinished: summarise pages that are not full, too.
        row_step: rows of the write from a token to the next of the same sequence and head.
    """

    page: int
    least: Rows
    distance: int
    unfinished: bool = True
    row_step: int = 1


class Placement(NamedTuple):
    """Which slot a token goes to at one end (see `kernels.address`).

    Attributes:
        kind: the rule by which it is found.
        page: slots of a page, where there are pages.
        array: what the rule reads. One array serves both ends of a launch.
        pages: of kind "pages" the four that it reads: requests, positions, pages and where each request's pages start.
    """

    kind: str = "linear"
    page: int = 0
    array: ArrayView | None = None
    pages: Sequence[ArrayView] = ()


LINEAR = Placement()


def reduced_position(position: int, sinks: int, ring: int) -> int:
    """The smallest position in the same slot as an absolute one, which fits 32 bits however long the sequence is."""
    return position if ring == 0 or position < sinks else sinks + (position - sinks) % ring


# Axes of K's and V's pool: N blocks, S slots of a block, H heads, D elements; C and X are a row's chunks of 16 bytes.
POOL_LAYOUTS = {"NHD": ("NSHD", "NSHD"), "HND": ("NHSD", "NHSD"), "VLLM": ("NHCSX", "NHDS")}
CHUNK_BYTES = 16


class PoolShape(NamedTuple):
    """What the shape of a pool says: blocks, slots of a block, heads, elements of a row."""

    blocks: int
    page: int
    heads: int
    width: int

    @property
    def slots(self) -> int:
        """Slots of all blocks."""
        return self.blocks * self.page


def pool_axes(pool: ArrayView, layout: str) -> str:
    """The axes of a pool that may be K's or V's: in vLLM's layout the number of axes tells."""
    k, v = POOL_LAYOUTS[layout]
    return k if pool.ndim == len(k) else v


def pool_shape(pool: ArrayView, axes: str, name: str, operation: str, format: GroupFormat | None = None) -> PoolShape:
    """Read a pool's shape by its axes; of a format of groups it holds words, and rows have as many elements as codes.

    Raises:
        ShapeError: it has other axes, or vLLM's chunks are not of 16 bytes.
    """
    spelled = {"C": "D/x", "X": "x", "S": "bs"}
    shape = f"({', '.join(spelled.get(a, a) for a in axes)})"
    checks.rank(pool, (len(axes),), name, shape, operation)
    extent = dict(zip(axes, pool.shape, strict=True))
    if "X" in extent and extent["X"] != CHUNK_BYTES // pool.dtype.itemsize:
        raise ShapeError(
            f"{operation}: {name} is {describe(pool)}: its last axis x is {extent['X']} where {CHUNK_BYTES} bytes are "
            f"{CHUNK_BYTES // pool.dtype.itemsize} elements. Shape it {shape}."
        )
    width = extent["D"] if "D" in extent else extent["C"] * extent["X"]
    if format is not None:
        width = format.columns(width)
    return PoolShape(extent["N"], extent["S"], extent["H"], width)


def pool_rows(pool: ArrayView, axes: str, format: GroupFormat | None = None) -> Rows:
    """Where the rows of a pool lie."""
    stride = dict(zip(axes, pool.strides, strict=True))
    inner = (0, 0)
    if "X" in stride:
        inner = (pool.shape[axes.index("X")], stride["C"])
    elif axes[-1] != "D":
        inner = (1, stride["D"])
    return Rows(pool, block=stride["N"], token=stride["S"], head=stride["H"], inner=inner, format=format)


def pool_scale(
    scale: ArrayView, shape: PoolShape, name: str, operation: str, format: GroupFormat | None = None
) -> None:
    """The scales of an int8 pool are (N, bs, H), and their slots follow one another.

    Those of a format of groups are (N, bs, H, n), the numbers of a row's groups side by side; as many there may be of
    int8 beside groups, of which the first is in use.

    Raises:
        DTypeError: they have another dtype.
        ShapeError: they have another shape, or gaps between blocks.
    """
    checks.scales(scale, name, format or FORMATS["int8"], operation)
    wanted = (shape.blocks, shape.page, shape.heads)
    slots = scale.shape[:3] if scale.ndim == 4 and scale.shape[3] else scale.shape
    if format is not None:
        checks.rank(scale, (4,), name, "(N, bs, H, n)", operation)
        checks.readable(scale, name, operation)
        n = scale.shape[3]
        needed = format.groups(shape.width, name, operation) * format.numbers
        if n < needed:
            raise ShapeError(f"{operation}: {name} is {describe(scale)}; a row of {format} has {needed} numbers.")
    if slots != wanted:
        raise ShapeError(
            f"{operation}: {name} is {describe(scale)} where (N, bs, H) = {wanted} is needed, one for a slot and head."
        )
    if shape.blocks > 1 and shape.page > 1 and scale.strides[0] != shape.page * scale.strides[1]:
        raise ShapeError(
            f"{operation}: {name} has gaps between its blocks (strides {scale.strides} elements). Pass it contiguous."
        )


def scale_of_slots(scale: ArrayView) -> Scale:
    """The scales of a pool, (N, bs, H), checked by `pool_scale`."""
    return Scale(scale, token=scale_step(scale), head=scale.strides[2], block=scale.strides[0])


def scale_step(scale: ArrayView) -> int:
    """Elements between the scales of neighbouring slots; the stride of an axis of one says nothing."""
    return scale.strides[0] if scale.shape[1] == 1 else scale.strides[1]
