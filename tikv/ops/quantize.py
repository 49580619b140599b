"""int8 as plain functions: rows to int8 and a scale each, and back. Caches and pools quantise by the same kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, CacheArray, describe, new_array, view
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks
from tikv.ops.layouts import Rows
from tikv.ops.plan import Launch, Plan
from tikv.ops.row_copy import bind_copy


def quantize(x: Any, scale_dtype: Any = "float16") -> tuple[CacheArray, CacheArray]:
    """Quantise each row of the last axis to int8, symmetric, with a scale of its own; in one launch.

    The rule, in float32, that every int8 cache here follows:

    - ``scale = max|x| / 127`` over the finite elements of the row, not below the smallest normal number of the scale's
      dtype nor above its largest finite one, rounded to that dtype (nearest even) before it is used;
    - ``q = round(clamp(x * (1 / scale), -127, 127))``, ties to even; -128 is never used.

    So a row of zeros gives 0; a row too small for its scale's dtype gives what the smallest normal scale resolves
    (float16: steps of 6.1e-5; take float32 scales for such rows); an infinity gives 127 or -127, and a NaN 0, without
    harm to the other elements. Float32 subnormals count as zero on devices that flush them.

    Args:
        x: (..., D) float32, float16 or bfloat16; any strides with a contiguous last axis that two loops can follow.
        scale_dtype: "float16" or "float32".

    Returns:
        ``q`` (..., D) int8 and ``scale`` (...), new arrays on the device.

    Raises:
        DTypeError: another dtype of x or of the scale.
        ShapeError: x has no axis, or rows without elements.

    Exactness: ``|x - q * scale| <= scale / 2`` for every finite element, to float32 rounding, as far as 127
        steps of the largest scale reach (float16: 8.3e6).
    Cost: each element is read twice, the second time from the nearest cache, and written once.
    Source: ``int8_kv_append_paged``, with the scale rounded before use instead of after.

    Example:
        >>> import numpy as np, tikv
        >>> q, scale = tikv.quantize(np.float32([[1.0, -2.0, 0.5]]), scale_dtype="float32")
        >>> q.copy_to_host().tolist(), scale.shape, str(scale.dtype)
        ([[64, -127, 32]], (1,), 'float32')
    """
    operation = "quantize"
    live = runtime.current()
    rows = view(x, "x", operation)
    checks.on_device([("x", rows)], live, operation)
    if rows.dtype not in dtypes.QUANTIZABLE:
        raise DTypeError(f"{operation}: x is {describe(rows)}. Pass float32, float16 or bfloat16.")
    scales = dtypes.parse(scale_dtype, operation)
    if scales not in dtypes.SCALES:
        raise DTypeError(f"{operation}: scale_dtype is {scales}; it is float16 or float32.")
    checks.readable(rows, "x", operation)
    if rows.ndim == 0 or rows.shape[-1] == 0 != math.prod(rows.shape[:-1]):
        raise ShapeError(f"{operation}: x is {describe(rows)}; a row needs at least one element to have a scale.")
    q = new_array(rows.shape, dtypes.int8, live)
    scale = new_array(rows.shape[:-1], scales, live)
    _run(live, operation, ("x", "q", "scale"), (False, True, True), (rows, q, scale))
    return CacheArray(q, live), CacheArray(scale, live)


def dequantize(q: Any, scale: Any, out: Any = None) -> Any:
    """Multiply each int8 row by its scale, in one launch.

    Args:
        q: (..., D) int8.
        scale: (...) float16 or float32.
        out: (..., D) float32, float16 or bfloat16; None for a new float32 array.

    Returns:
        ``out``, or a new `CacheArray` on the device.

    Raises:
        DTypeError, ShapeError: arrays that are not as above, or overlap.

    Exactness: the product in float32, rounded once to the dtype of ``out``.
    Cost: each element is read once and written once.
    Source: the reading half of ``int8_paged_decode_attention``.

    Example:
        >>> import numpy as np, tikv
        >>> tikv.dequantize(np.int8([[2, -4]]), np.float32([0.5])).copy_to_host().tolist()
        [[1.0, -2.0]]
    """
    operation = "dequantize"
    live = runtime.current()
    rows, scales = view(q, "q", operation), view(scale, "scale", operation)
    checks.on_device([("q", rows), ("scale", scales)], live, operation)
    if rows.dtype is not dtypes.int8:
        raise DTypeError(f"{operation}: q is {describe(rows)}, not int8.")
    if scales.dtype not in dtypes.SCALES:
        raise DTypeError(f"{operation}: scale is {describe(scales)}; it is float16 or float32.")
    if rows.ndim == 0 or scales.shape != rows.shape[:-1]:
        raise ShapeError(f"{operation}: scale is {describe(scales)} where {describe(rows)} needs {rows.shape[:-1]}.")
    for name, a in (("q", rows), ("scale", scales)):
        checks.readable(a, name, operation)
    if out is None:
        target = new_array(rows.shape, dtypes.float32, live)
        out = CacheArray(target, live)
    else:
        target = view(out, "out", operation)
        checks.on_device([("out", target)], live, operation)
        if target.dtype not in dtypes.QUANTIZABLE:
            raise DTypeError(f"{operation}: out is {describe(target)}. Pass float32, float16 or bfloat16.")
        if target.shape != rows.shape:
            raise ShapeError(f"{operation}: out is {describe(target)} where {describe(rows)} was given.")
        checks.writable(target, "out", operation)
    _run(live, operation, ("q", "out", "scale"), (False, True, False), (rows, target, scales))
    return out


def _run(
    live: runtime.Runtime,
    operation: str,
    names: Sequence[str],
    written: Sequence[bool],
    arrays: Sequence[ArrayView],
) -> None:
    """Convert rows, (..., D) into (..., D), with a scale a row: one array of each, in this order."""
    shape = arrays[0].shape
    if 0 in shape:
        return
    extents, strides = merged_axes(shape[:-1], [arrays[0].strides[:-1], arrays[1].strides[:-1], arrays[2].strides])
    if len(extents) > 2:
        raise ShapeError(
            f"{operation}: {names[0]} ({describe(arrays[0])}, strides {arrays[0].strides} elements) has more than two "
            f"axes that do not follow one another. Pass a contiguous array."
        )
    groups, tokens = (1,) * (2 - len(extents)) + tuple(extents)
    (src_group, src), (dst_group, dst), (scale_group, scale) = ((0,) * (2 - len(extents)) + s for s in strides)

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        bound = bind_copy(
            live,
            operation,
            src=[Rows(arrays[0], sequence=src_group, token=src)],
            dst=[Rows(arrays[1], sequence=dst_group, token=dst)],
            widths=[shape[-1]],
            heads=1,
            tokens=tokens,
            groups=groups,
            scales=[arrays[2]],
            scale=arrays[2].dtype,
            scale_group=scale_group,
            scale_step=scale,
        )
        return [bound]

    Plan(live, operation, names, written, bind).run(arrays)


def merged_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Join neighbouring axes that one loop can follow in every array, and drop those of extent one.

    Example:
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
