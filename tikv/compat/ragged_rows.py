"""Rows of many sequences, (B, S, ...) or concatenated: the sequence of each row, and its rotation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, describe, view
from tikv.compat.indices import Indices, library_of
from tikv.errors import DTypeError, ShapeError

TABLES = (*dtypes.QUANTIZABLE, *dtypes.FLOATS8)  # dtypes of cosines and sines


class RaggedRows(NamedTuple):
    """Concatenated rows of all sequences, each with its sequence and its number in it.

    Two sequences with 2 rows and 1 row have the sequences 0, 0, 1 and the numbers 0, 1, 0.
    """

    sequence: Any
    number: Any
    counts: Any  # (B,) rows of each sequence
    inside: Any  # whether a row belongs to a sequence


def rows_of(index: Indices, name: str, shape: tuple[int, ...], starts_name: str) -> RaggedRows:
    """The rows of the array `name`: (total, ...) if `starts_name` was given, otherwise (B, S, ...).

    Raises:
        ShapeError, DTypeError, PositionError: the starts are not valid, or do not fit.
    """
    if not index.has(starts_name):
        batch, each = shape[:2]
        sequence = index.repeat(index.arange(batch), each)
        number = index.arange(batch * each) - sequence * each
        return RaggedRows(sequence, number, index.arange(batch) * 0 + each, number >= 0)
    starts = index.array(starts_name, (None,), "(B + 1,)")
    if not starts.shape[0]:
        raise ShapeError(
            f"{index.operation}: {starts_name} is empty; it needs one more entry than there are sequences."
        )
    index.check_starts(starts_name, starts, shape[0], f"rows of {name}")
    row = index.arange(shape[0])
    inside = row < starts[-1]
    sequence = index.library.searchsorted(starts[1:], row, side="right")
    sequence = index.library.where(inside, sequence, index.library.zeros_like(sequence))
    return RaggedRows(sequence, row - starts[sequence], starts[1:] - starts[:-1], inside)


def flat(array: Array, name: str, operation: str) -> Array:
    """(B, S, ...) as (B * S, ...): a copy only if the sequences do not follow one another in memory."""
    seen = view(array, name, operation)
    batch, each = seen.shape[:2]
    if batch > 1 and each > 1 and seen.strides[0] != each * seen.strides[1]:
        return array.reshape(batch * each, *seen.shape[2:])
    step = seen.strides[1] if each > 1 else seen.strides[0]
    return seen.restrided((batch * each, *seen.shape[2:]), (step, *seen.strides[2:]))


def on_device_of(indices: Array, like: Any) -> Array:
    """Integers of NumPy or torch, placed where they can index rows of `like`."""
    library = library_of(like)
    return np.asarray(indices) if library is np else library.as_tensor(indices, device=like.device)


def first_rows(array: Array, tokens: int, name: str, operation: str) -> ArrayView:
    """The rows that have slots; later rows are padding.

    Raises:
        ShapeError: there are fewer rows.
    """
    rows = view(array, name, operation)
    if rows.ndim == 0 or rows.shape[0] < tokens:
        raise ShapeError(f"{operation}: {name} is {describe(rows)}, fewer rows than the {tokens} of slot_mapping.")
    return rows.part(0, 0, tokens)


def with_one_head(a: ArrayView, axis: int) -> ArrayView:
    """The same array with an axis of one head added."""
    return a.restrided((*a.shape[:axis], 1, *a.shape[axis:]), (*a.strides[:axis], 0, *a.strides[axis:]))


def selected(condition: Array, x: Array, number: float) -> Array:
    """The entries of `x` where the condition is true, and elsewhere the number, in the dtype of `x`."""
    library = library_of(x)
    return library.where(condition, x, x.dtype.type(number) if library is np else number)


def wide(x: Array) -> Array:
    """The values in float32."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x.float()


def joined(parts: list[Any]) -> Array:
    """Arrays side by side along the last axis."""
    library = library_of(*parts)
    return np.concatenate(parts, -1) if library is np else library.cat(parts, -1)


def require_library(operation: str, arrays: dict[str, Any], why: str) -> None:
    """Check that the arrays used in arithmetic before the call are all NumPy's, or all torch's on one device.

    Raises:
        DTypeError, ShapeError: they are not.
    """
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        library, seen = library_of(array), view(array, name, operation)
        if library is not library_of(first) or (library is np and not isinstance(array, np.ndarray)):
            raise DTypeError(
                f"{operation}: {name} is {type(array).__module__}.{type(array).__name__}. {why} needs all arrays "
                f"from NumPy or all from torch."
            )
        if seen.device != view(first, first_name, operation).device:
            raise ShapeError(
                f"{operation}: {name} is {describe(seen)} on {seen.device}. {why} needs the device of {first_name}."
            )


def check_rotation(cos: ArrayView, sin: ArrayView, capacity: int, width: int, operation: str) -> None:
    """Check that the tables have a position for each slot, and at most as many pairs as the rows.

    Raises:
        ShapeError, DTypeError: they do not.
    """
    for name, a in (("rotary_cos", cos), ("rotary_sin", sin)):
        if a.dtype not in TABLES:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; use {', '.join(row.name for row in TABLES)}.")
    fits = cos.ndim == 2 and cos.shape[0] >= max(1, capacity) and 0 < 2 * cos.shape[1] <= width
    if not fits or cos.shape != sin.shape:
        raise ShapeError(
            f"{operation}: rotary_cos is {cos.shape} and rotary_sin {sin.shape}; both must be (at least "
            f"{max(1, capacity)} positions, at most {width // 2} pairs)."
        )


def rotated(x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rows x (n, H, D) rotated at (n,) positions in float32, rounded once to x's dtype."""
    library, half = library_of(x), cos.shape[-1]
    c, s = (wide(table)[positions][:, None] for table in (cos, sin))
    columns, rest = wide(x[..., : 2 * half]), wide(x[..., 2 * half :])
    if interleaved:
        a, b = columns[..., 0::2], columns[..., 1::2]
    else:
        a, b = columns[..., :half], columns[..., half:]
    first, second = a * c - b * s, b * c + a * s
    if interleaved:
        pair = np.stack((first, second), -1) if library is np else library.stack((first, second), -1)
        columns = pair.reshape(columns.shape)
    else:
        columns = joined([first, second])
    whole = joined([columns, rest])
    return whole.astype(x.dtype) if library is np else whole.to(x.dtype)
