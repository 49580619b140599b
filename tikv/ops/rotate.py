"""`rotate`, which moves keys to other positions, and `Rope`, the rotation that encodes positions in keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, Host, Views, as_numpy, describe, read_host, runtime_of, to_device, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import format_of
from tikv.ops import checks
from tikv.ops.indices import view_indices
from tikv.ops.layouts import Rows
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantized_arrays import Quantized
from tikv.ops.row_copy import SERIAL_BYTES, alignment, strides_in_words, unaligned
from tikv.runtime.cache import BoundedCache

ROTATE = "rotate"  # the name under which a runtime keeps tables
TABLES = "rotate: tables"
MOST_ANGLES = 1 << 22  # from the least to the largest difference of positions, since each one between is looked up
UNITS = (4, 2, 1)  # neighbouring elements that a GPU thread takes from each half of a head
TOGETHER = (2, 1)  # rows of one position that a GPU thread rotates: 2 reach 0.96 of memcpy on an H200, and 4 no more
CACHED_TURNS = 4  # for calls with the same positions as an earlier call, as each layer of a model makes
CACHED_BYTES = 1 << 23  # the most for each of these, of which its positions may take an eighth
CACHED_TABLES = 4  # models' rotations whose tables of cosines and sines are cached
TABLE_BYTES = 1 << 25  # the most for one table: 65,536 differences of positions, for heads of 128
SPARSE = 4  # the most rows in a table for each difference that was asked for
_ROTATED = (*dtypes.QUANTIZABLE, *dtypes.FLOATS8, dtypes.int8)


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of a model's keys: pair ``i`` of a row at position ``p`` is rotated by ``p * inv_freq[i]``.

    Args:
        inv_freq: (D_r / 2,) numbers, as the model uses them after any scaling of its own. The first D_r elements of a
            row are rotated, the others are not.
        interleaved: pairs are (2i, 2i + 1) rather than (i, i + D_r / 2).

    Raises:
        ShapeError, OptionError: ``inv_freq`` is not a list of finite numbers.

    Examples:
        >>> import tikv
        >>> tikv.Rope([1.0, 0.01]).rope_dim
        4
    """

    inv_freq: Array
    interleaved: bool = False

    def __post_init__(self) -> None:
        frequencies = self.inv_freq
        if hasattr(frequencies, "detach"):
            frequencies = frequencies.detach().cpu().to(float).numpy() if hasattr(frequencies, "cpu") else frequencies
        try:
            inv_freq = np.array(frequencies, np.float64)
        except (TypeError, ValueError) as error:
            reason = str(error).rstrip(".")
            raise OptionError(f"Rope: inv_freq is not a list of numbers: {reason}. Pass (D_r / 2,) of them.") from None
        if inv_freq.ndim != 1 or inv_freq.size == 0:
            raise ShapeError(
                f"Rope: inv_freq has shape {inv_freq.shape} where (D_r / 2,) is needed, one number per pair."
            )
        if not np.isfinite(inv_freq).all():
            raise OptionError("Rope: inv_freq has numbers that are not finite. Pass the model's frequencies.")
        object.__setattr__(self, "inv_freq", inv_freq)

    @property
    def rope_dim(self) -> int:
        """Elements of a row that are rotated."""
        return 2 * int(self.inv_freq.size)


def rotate(k: Array, from_positions: Array, to_positions: Array, rope: Rope, *, scale: Array | None = None) -> Array:
    """Rotate keys from one position to another, in place, in one launch.

    Args:
        k: (B, H, S, D) float32, float16, bfloat16, 8-bit floats, or int8 with ``scale``; any strides with a contiguous
            last axis.
        from_positions, to_positions: the keys' positions before and after, (B, H, S), (B, S) or (S,) int32 or int64. A
            row stays as it is if one of its positions is negative, or if both are equal.
        rope: the model's rotation.
        scale: (B, H, S) float16 or float32, for int8 keys: written too.

    Returns:
        ``k``.

    Raises:
        ShapeError, DTypeError, OptionError: the arrays do not agree; the rotation is wider than the head.
        PositionError: a row moves by 4,194,304 positions or more, or the moves of two rows differ by as much.

    Exactness: cosines and sines of the difference of positions are computed in float64 and rounded to float32; products
        and sums are float32, rounded one by one, and the result is rounded once to the keys' dtype. An int8 row is
        first multiplied by its scale, then quantised by the rule of `tikv.quantize`, with a new scale. 8-bit floats
        saturate; a scale that all rows of a head share has no effect, since it multiplies both sides of the rotation.
    Cost: each row that moves is read and written once; int8 is read twice. The host reads the positions in the shape
        that they have: those of (S,) once for all heads. It makes a table with a row for each difference, and keeps it:
        differences within the range of earlier calls need no new cosines. If the positions are those of one of the last
        calls, the host does not wait for the device.
    Source: kvpress's ``key_rerotation_press`` and llama.cpp's K-shift.

    Examples:
        >>> import numpy as np, tikv
        >>> k = np.array([[[[1.0, 0.0]]]], np.float32)
        >>> [round(float(x), 3) for x in tikv.rotate(k, [3], [1], tikv.Rope([0.5])).flat]
        [0.54, -0.841]
    """
    operation = "rotate"
    live = runtime_of(k)
    if isinstance(k, Quantized):
        raise DTypeError(
            f"{operation}: k holds codes of {k.format}, and rotated keys would have to be quantised again, with "
            "other scales. To accept that loss, use tikv.dequantize, rotate the result, and use tikv.quantize."
        )
    rows = view(k, "k", operation)
    checks.on_device([("k", rows)], live, operation)
    checks.rank(rows, (4,), "k", "(B, H, S, D)", operation)
    checks.writable(rows, "k", operation)
    scales = None
    if scale is not None:
        scales = view(scale, "scale", operation)
        checks.on_device([("scale", scales)], live, operation)
        checks.writable(scales, "scale", operation)
    check_keys(rows, scales, rope, operation)
    places = [
        _positions(values, name, rows.shape, live, operation)
        for name, values in (("from_positions", from_positions), ("to_positions", to_positions))
    ]
    rotate_rows(live, operation, rows, scales, places[0], places[1], rope)
    return k


def check_keys(k: ArrayView, scale: ArrayView | None, rope: Rope, operation: str) -> None:
    """Check that this rotation can be applied to the keys.

    Raises:
        ShapeError, DTypeError, OptionError: they cannot.
    """
    if not isinstance(rope, Rope):
        raise OptionError(f"{operation}: rope is {rope!r}. Pass a tikv.Rope.")
    if k.dtype not in _ROTATED:
        names = ", ".join(x.name for x in _ROTATED)
        raise DTypeError(f"{operation}: k is {describe(k)}. Keys to rotate must be one of {names}.")
    if rope.rope_dim > k.shape[-1]:
        raise ShapeError(f"{operation}: the rotation of {rope.rope_dim} elements is wider than k, {describe(k)}.")
    row = format_of(k.dtype)
    if (row is not None and row.finds_scales) != (scale is not None):
        raise DTypeError(
            f"{operation}: k is {describe(k)}; int8 keys need scale, and keys of other dtypes take no scale."
        )
    if scale is not None and row is not None and (scale.shape != k.shape[:3] or scale.dtype not in row.scale_dtypes):
        raise ShapeError(f"{operation}: scale is {describe(scale)} where float16 or float32 {k.shape[:3]} is needed.")


def _positions(values: Any, name: str, shape: Sequence[int], live: runtime.Runtime, operation: str) -> Host:
    """Positions on the host, as (B, H, S), (B, 1, S) or (1, 1, S), whichever was given.

    Raises:
        ShapeError, DTypeError: they are not valid.
    """
    array = view_indices(values, name, operation)
    checks.indices(array, name, operation)
    batch, heads, rows = shape[:3]
    if array.shape not in ((rows,), (batch, rows), (batch, heads, rows)):
        raise ShapeError(
            f"{operation}: {name} is {describe(array)} where ({rows},), ({batch}, {rows}) or ({batch}, {heads}, {rows})"
            f" is needed, a position for each row."
        )
    host = as_numpy(array) if array.device == "cpu" else read_host(array, live)
    lead = {1: (1, 1), 2: (batch, 1), 3: (batch, heads)}[host.ndim]
    return host.reshape(*lead, rows).astype(np.int64)


class Angles(NamedTuple):
    """The row of the tables for each row of keys, -1 if the key stays as it is; and the tables.

    Rows are (B, H, S), with 1 for B or H if all share the same. A table is viewed as its first row, (1, D_r / 2), so
    that one launch serves tables of any number of rows.
    """

    rows: ArrayView
    cos: ArrayView
    sin: ArrayView


class Shifts(NamedTuple):
    """By how much rows move: which rows move, and the difference that is added to each position."""

    moved: Host
    difference: Host
    least: int
    seen: Host  # for least, least + 1, and so on: whether a row moves by it

    @property
    def largest(self) -> int:
        """The largest difference."""
        return self.least + len(self.seen) - 1


class AngleTable(NamedTuple):
    """The cosines and sines of all differences from `first` on, one row for each, on the device."""

    first: int
    cos: ArrayView
    sin: ArrayView

    def covers(self, least: int, largest: int) -> bool:
        """Whether each difference from `least` to `largest` has a row."""
        return self.first <= least and largest < self.first + self.cos.shape[0]


def shifts_of(before: Host, after: Host, operation: str) -> Shifts | None:
    """By how much rows move from the positions `before` to those `after`; None if no row moves.

    Raises:
        PositionError: the differences are too far apart.
    """
    moved = (before >= 0) & (after >= 0) & (before != after)
    difference = np.where(moved, after - before, 0)
    least, largest = int(difference.min(initial=0)), int(difference.max(initial=0))
    if largest - least >= MOST_ANGLES:
        raise PositionError(
            f"{operation}: rows move by {least} to {largest} positions, which is a range of more than "
            f"{MOST_ANGLES}. Make several calls."
        )
    if least == largest:
        return None
    seen = np.zeros(largest - least + 1, bool)
    seen[(difference - least)[moved]] = True
    first, last = (int(x) for x in np.nonzero(seen)[0][[0, -1]])
    return Shifts(moved, difference, least + first, seen[first : last + 1])


def _cos_and_sin(rope: Rope, differences: Host, live: runtime.Runtime) -> tuple[ArrayView, ArrayView]:
    """Cosines and sines on the device, with a row for each difference."""
    angle = differences[:, None] * rope.inv_freq
    return to_device(np.cos(angle).astype(np.float32), live), to_device(np.sin(angle).astype(np.float32), live)


def _table(live: runtime.Runtime, rope: Rope, shifts: Shifts) -> AngleTable | None:
    """The table of this rotation; if it lacks a difference, it grows to at least twice its size.

    None if most of its rows would be for differences that nobody asked for, or if it would be too large.
    """
    tables = live.plans.get(TABLES)
    if tables is None:
        tables = live.plans.keep(TABLES, BoundedCache(CACHED_TABLES))
    key = rope.inv_freq.tobytes()
    known: AngleTable | None = tables.get(key)
    least, largest = shifts.least, shifts.largest
    if known is not None and known.covers(least, largest):
        return known
    most = TABLE_BYTES // (8 * rope.inv_freq.size)
    asked = int(np.count_nonzero(shifts.seen))
    if known is not None:
        rows = known.cos.shape[0]
        asked += rows
        last = max(largest, known.first + rows - 1)
        if least < known.first:
            least = min(least, max(last + 1 - 2 * rows, last + 1 - most))
        else:
            least, largest = known.first, max(largest, known.first + min(2 * rows, most) - 1)
        largest = max(largest, last)
    if largest - least >= min(most, SPARSE * asked):
        return None
    if known is not None or len(tables) >= CACHED_TABLES:
        live.synchronize()  # those that go may be in use
    tables[key] = table = AngleTable(least, *_cos_and_sin(rope, np.arange(least, largest + 1), live))
    return table


def _angles_on_device(
    live: runtime.Runtime, rope: Rope, before: Host, after: Host, operation: str
) -> tuple[Angles | None, bool]:
    """The angles that move rows from the positions `before` to those `after`, and whether later calls find them cached.

    None if no row moves.

    Raises:
        PositionError: the differences are too far apart.
    """
    small = before.nbytes + after.nbytes <= CACHED_BYTES // 8
    key = (rope.inv_freq.tobytes(), before.shape, after.shape, before.tobytes(), after.tobytes()) if small else None
    cached = live.plans.get(ROTATE)
    if cached is None:
        cached = live.plans.keep(ROTATE, BoundedCache(CACHED_TURNS))
    for other, angles in list(cached.values()):  # compared, since hashing so many bytes takes far longer
        if other == key:
            return angles, True
    shifts = shifts_of(before, after, operation)
    if shifts is None:
        return None, True
    table = _table(live, rope, shifts)
    if table is not None:
        cos, sin, rows = table.cos, table.sin, shifts.difference - table.first
    else:
        cos, sin = _cos_and_sin(rope, np.nonzero(shifts.seen)[0] + shifts.least, live)
        rows = (np.cumsum(shifts.seen) - 1)[np.where(shifts.moved, shifts.difference - shifts.least, 0)]
    index = to_device(np.where(shifts.moved, rows, -1).astype(np.int32), live)
    new_angles = Angles(index, *(a.restrided((1, a.shape[1]), a.strides) for a in (cos, sin)))
    if key is None or (table is None and cos.nbytes * 2 > CACHED_BYTES):
        return new_angles, False
    if len(cached) >= CACHED_TURNS:
        live.synchronize()  # those that go may be in use
    cached.keep(object(), (key, new_angles))
    return new_angles, True


def rotate_rows(
    live: runtime.Runtime,
    operation: str,
    k: ArrayView,
    scale: ArrayView | None,
    before: Host,
    after: Host,
    rope: Rope,
) -> None:
    """Rotate the rows of k (B, H, S, D), which were checked, from the positions `before` to those `after`.

    Both are (B, H, S) on the host, with 1 for B or H if all share the same.
    """
    launch.refuse_during_capture(live, operation, "positions on the host", launch.OUTSIDE_CAPTURES)
    tables, cached = _angles_on_device(live, rope, before, after, operation)
    if tables is None:
        return
    arrays = Views([*tables, k] if scale is None else [*tables, k, scale])
    key = (operation, ROTATE, arrays.key, rope.interleaved)
    plan = live.plans.get(key)
    if plan is None:
        names = ("the rows of tables", "cosines", "sines", "k", "scale")[: len(arrays)]
        written = (False, False, False, True, True)[: len(arrays)]

        def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
            return [_bind(live, operation, arrays, rope)]

        plan = live.plans.keep(key, Plan(live, operation, names, written, bind))
    plan.run(arrays)
    if not cached:
        live.synchronize()  # the tables are this call's own


def _bind(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], rope: Rope) -> Launch:
    """Bind the rotation of k and its scales, which follow the `Angles` in `arrays`."""
    from tikv.kernels import lanes as lane_kernels
    from tikv.kernels import rotate as kernels
    from tikv.kernels.address import inverse_of
    from tikv.kernels.codec import Codec
    from tikv.kernels.write_qkv import NormRopeChoices

    index, cos, sin, k = arrays[:4]
    scale = arrays[4] if len(arrays) > 4 else None
    batch, heads, rows, width = k.shape
    sequence, head, token = k.strides[:3]
    row_layout = Rows(k, sequence=sequence, token=token, head=head)
    size, half = k.dtype.itemsize, rope.rope_dim // 2
    aligned = alignment(row_layout, width)
    if aligned % size:
        raise unaligned(operation, row_layout, row_layout)
    whole = (half, width - rope.rope_dim, rope.rope_dim)
    elements = next(
        n for n in ((1,) if live.is_cpu else UNITS) if all(w % n == 0 for w in whole) and aligned % (n * size) == 0
    )
    bits = min(8, elements * size) * 8
    codec = Codec(k.dtype.short, k.dtype.short, elements, bits, bits)
    checks.addressable(k, bits // 8, live, "k", operation)
    shared_by = 1
    if not live.is_cpu:
        shared_by = min(32, 1 << (max(1, half // elements) - 1).bit_length())
    index_steps = [0 if n == 1 else step for n, step in zip(index.shape, index.strides, strict=True)]
    together = 1
    if not live.is_cpu and (scale is None or (rope.rope_dim == width and half // elements <= shared_by)):
        alike = 1 if index_steps[1] else heads if index_steps[0] else batch * heads
        together = next(n for n in TOGETHER if alike % n == 0)
    count = batch * heads * rows // together
    iterations = count * shared_by
    if not live.is_cpu:
        iterations = -(-iterations // lane_kernels.BLOCK) * lane_kernels.BLOCK
    checks.countable(iterations, operation)
    pairs = "interleaved" if rope.interleaved else "half"
    choices = NormRopeChoices(pairs, rope.rope_dim, None if scale is None else 0.0, False)
    serial = live.is_cpu and count * width * size < SERIAL_BYTES
    code = "" if scale is None else scale.dtype.short
    kernel = launch.kernel(
        live, kernels.make_rotate, live.kernel_style, serial, codec, choices, width, shared_by, together, code
    )
    by_rows, by_heads = inverse_of(rows), inverse_of(heads)
    numbers = kernels.RotateParams(
        iterations=iterations,
        rows=rows,
        rows_inverse=by_rows[0],
        rows_shift=by_rows[1],
        heads=heads,
        heads_inverse=by_heads[0],
        heads_shift=by_heads[1],
        count=count,
        angle_first=index.offset // 4,
        angle_sequence=index_steps[0],
        angle_head=index_steps[1],
        cos_first=cos.offset // 4,
        sin_first=sin.offset // 4,
    )
    if scale is not None:
        first, steps = scale.offset // scale.dtype.itemsize, scale.strides
        numbers = numbers._replace(scale_first=first, scale_sequence=steps[0], scale_head=steps[1], scale_row=steps[2])
    arguments = [k, index, cos, sin, scale if scale is not None else cos]
    strides = tuple(strides_in_words(row_layout, bits // 8))
    return Launch(kernel.bind(iterations, *arguments, strides, numbers), arguments)
