"""Where rows lie: the strides of rows in a cache or a pool, the axes of named layouts, the slot of a position."""

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
    """Where the scales of rows lie: one per row, one (or a scale and bias) per group, or one for many rows.

    Attributes:
        array: the array that holds them.
        sequence, token, head: the step, in entries, from one sequence, token (or slot), or head to the next; 0 where
            they share a scale.
        first: the entry of the first row.
        block: the step from one block of a pool to the next.
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
        array: the array that holds them.
        sequence, token, head: the step from one sequence, token (or slot), or head to the next.
        first: where the first row begins.
        block: the step from one block of a pool to the next; `token` then steps within a block.
        inner: (chunk, stride) of a row that lies in pieces of `chunk` elements; (0, 0) if rows are contiguous.
        format: the format of codes, whose array holds words; None for rows of numbers.
        scale: the scales by which rows are stored and read; None if there are no scales.
        pages: where a write of keys that have no scales keeps summaries of their pages; None if it keeps none.
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
        """The same, without references that keep the memory of rows and scales alive."""
        scale = self.scale and self.scale._replace(array=self.scale.array.without_owner())
        return self._replace(array=self.array.without_owner(), scale=scale)

    @property
    def storage(self) -> str:
        """The kernels' name for how rows are stored: the code of the dtype, or the name of the format."""
        return self.format.name if self.format else self.array.dtype.short


class WrittenPages(NamedTuple):
    """Where a write of keys keeps the least and the greatest keys of each page.

    Attributes:
        page: tokens per page.
        least: where the summaries lie, by page instead of by token; the array holds the greatest too.
        distance: elements from the least of a page to the greatest.
        unfinished: whether to summarise pages that are not full, too.
        row_step: rows of the write between neighbouring tokens of the same sequence and head.
    """

    page: int
    least: Rows
    distance: int
    unfinished: bool = True
    row_step: int = 1


class Placement(NamedTuple):
    """Which slot a token goes to at one end (see `kernels.address`).

    Attributes:
        kind: the rule by which the slot is found.
        page: slots per page, if there are pages.
        array: the array that the rule reads. One array serves both ends of a launch.
        pages: for kind "pages", its four arrays: requests, positions, pages and where each request's pages start.
        position: of the first token.
        limit: slots, or pages of a table, that exist.
        group, step: the steps in `array` from one group to the next, and from one token to the next.
        first: the entry of `array` that the first token of the first group reads.
        sinks, ring: slots that stay, and slots after them that wrap; 0 for none. One end of a launch has them.
        keep: the first token that a ring does not lose.
    """

    kind: str = "linear"
    page: int = 0
    array: ArrayView | None = None
    pages: Sequence[ArrayView] = ()
    position: int = 0
    limit: int = 0
    group: int = 0
    step: int = 0
    first: int = 0
    sinks: int = 0
    ring: int = 0
    keep: int = 0


LINEAR = Placement()


def reduced_position(position: int, sinks: int, ring: int) -> int:
    """The smallest position in the same slot as an absolute one, which fits 32 bits however long the sequence is."""
    return position if ring == 0 or position < sinks else sinks + (position - sinks) % ring


# Axes of the pools of K and V: N blocks, S slots, H heads, D elements; C chunks (16 bytes) of a row, X elements of one.
POOL_LAYOUTS = {"NHD": ("NSHD", "NSHD"), "HND": ("NHSD", "NHSD"), "VLLM": ("NHCSX", "NHDS")}
CHUNK_BYTES = 16


class PoolShape(NamedTuple):
    """What the shape of a pool says: the numbers of blocks, slots per block, heads, and elements per row."""

    blocks: int
    page: int
    heads: int
    width: int

    @property
    def slots(self) -> int:
        """The number of slots in all blocks."""
        return self.blocks * self.page


def pool_axes(pool: ArrayView, layout: str) -> str:
    """The axes of a pool of K or of V: in vLLM's layout the number of axes tells which."""
    k, v = POOL_LAYOUTS[layout]
    return k if pool.ndim == len(k) else v


def pool_shape(pool: ArrayView, axes: str, name: str, operation: str, format: GroupFormat | None = None) -> PoolShape:
    """Read a pool's shape by its axes; in a format of groups it holds words, and an element of a row is a code.

    Raises:
        ShapeError: it has other axes, or vLLM's chunks are not of 16 bytes.
    """
    spelled = {"C": "D/x", "X": "x", "S": "bs"}
    shape = f"({', '.join(spelled.get(a, a) for a in axes)})"
    checks.rank(pool, (len(axes),), name, shape, operation)
    extent = dict(zip(axes, pool.shape, strict=True))
    if "X" in extent and extent["X"] != CHUNK_BYTES // pool.dtype.itemsize:
        raise ShapeError(
            f"{operation}: {name} is {describe(pool)}: its last axis, x, has {extent['X']} elements where "
            f"{CHUNK_BYTES // pool.dtype.itemsize} are needed ({CHUNK_BYTES} bytes). Shape it {shape}."
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
    """Check that the scales of an int8 pool are (N, bs, H), with one stride from each slot to the next.

    In a format of groups they are (N, bs, H, n), the scales and biases of a row's groups side by side. Beside a pool of
    groups, an int8 pool may have n as well, of which only the first is used.

    Raises:
        DTypeError: they have the wrong dtype.
        ShapeError: they have the wrong shape, or gaps between blocks.
    """
    checks.scales(scale, name, format or FORMATS["int8"], operation)
    extents = (shape.blocks, shape.page, shape.heads)
    slots = scale.shape[:3] if scale.ndim == 4 and scale.shape[3] else scale.shape
    if format is not None:
        checks.rank(scale, (4,), name, "(N, bs, H, n)", operation)
        checks.readable(scale, name, operation)
        n = scale.shape[3]
        needed = format.groups(shape.width, name, operation) * format.numbers
        if n < needed:
            raise ShapeError(f"{operation}: {name} is {describe(scale)}; a row of {format} has {needed} numbers.")
    if slots != extents:
        raise ShapeError(
            f"{operation}: {name} is {describe(scale)} where (N, bs, H) = {extents} is needed, one for a slot and head."
        )
    if shape.blocks > 1 and shape.page > 1 and scale.strides[0] != shape.page * scale.strides[1]:
        raise ShapeError(
            f"{operation}: {name} has gaps between its blocks (strides {scale.strides} elements). Pass it contiguous."
        )


def scale_of_slots(scale: ArrayView) -> Scale:
    """The scales of a pool, (N, bs, H), checked by `pool_scale`."""
    return Scale(scale, token=scale_step(scale), head=scale.strides[2], block=scale.strides[0])


def scale_step(scale: ArrayView) -> int:
    """Elements between the scales of neighbouring slots; the stride of an axis of length one means nothing."""
    return scale.strides[0] if scale.shape[1] == 1 else scale.strides[1]
