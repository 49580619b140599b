"""What functions that quantise share: the array that they write numbers to, and scales and biases side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, CacheArray, describe, new_array, read_host, to_device, view
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks


def target_of(live: runtime.Runtime, operation: str, out: Array, shape: tuple[int, ...]) -> tuple[ArrayView, Any]:
    """(the view that numbers are written to, what is returned): `out`, checked, or a new float32 array."""
    if out is None:
        target = new_array(shape, dtypes.float32, live)
        return target, CacheArray(target, live)
    target = view(out, "out", operation)
    checks.on_device([("out", target)], live, operation)
    if target.dtype not in dtypes.QUANTIZABLE:
        raise DTypeError(f"{operation}: out is {describe(target)}. Pass float32, float16 or bfloat16.")
    if target.shape != shape:
        raise ShapeError(f"{operation}: out is {describe(target)} where {shape} is needed.")
    checks.writable(target, "out", operation)
    return target, out


def parts_of(numbers: ArrayView, n: int) -> list[ArrayView]:
    """The scales (n = 1), or scales and biases (n = 2), as views of an array that interleaves them."""
    shape = (*numbers.shape[:-1], numbers.shape[-1] // n)
    return [numbers.restrided(shape, (*numbers.strides[:-1], n), i) for i in range(n)]


def side_by_side(parts: list[ArrayView]) -> ArrayView | None:
    """Scales and biases as one interleaved array, if they lie so in memory, as `quantize` makes them; else None."""
    first, n = parts[0], len(parts)
    if all(a.strides[-1] == n or first.shape[-1] == 1 for a in parts) and all(
        a.strides[:-1] == first.strides[:-1]
        and a.handle is first.handle
        and a.ptr + a.offset == first.ptr + first.offset + i * a.dtype.itemsize
        for i, a in enumerate(parts)
    ):
        return first.restrided((*first.shape[:-1], first.shape[-1] * n), (*first.strides[:-1], 1))
    return None


def copied_together(parts: list[ArrayView], live: runtime.Runtime) -> ArrayView:
    """A copy of scales and biases in which those of a group lie side by side."""
    host = np.stack([read_host(a, live) for a in parts], axis=-1)
    return to_device(np.ascontiguousarray(host.reshape(*parts[0].shape[:-1], -1)), live)


def merged_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Join neighbouring axes that one loop can follow in every array, and drop those of extent one.

    Examples:
        >>> merged_axes((2, 3, 4), [(12, 4, 1), (24, 8, 2)])
        ((24,), [(1,), (2,)])
        >>> merged_axes((2, 1, 4), [(12, 4, 1)])
        ((2, 4), [(12, 1)])
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for extent, *steps in zip(shape, *strides, strict=True):
        if extent == 1:
            continue
        if axes and all(last == step * extent for last, step in zip(axes[-1][1], steps, strict=True)):
            axes[-1] = (axes[-1][0] * extent, tuple(steps))
        else:
            axes.append((extent, tuple(steps)))
    return tuple(extent for extent, _ in axes), [tuple(s[i] for _, s in axes) for i in range(len(strides))]
