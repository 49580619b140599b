"""Quantisation as plain functions: rows to int8 with a scale each, or to groups of codes, and back.

Caches and pools quantise by the same kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tikv import dtypes, runtime
from tikv.arrays import (
    Array,
    Arrays,
    ArrayView,
    CacheArray,
    describe,
    new_array,
    runtime_of,
    view,
)
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.formats import FORMATS, GROUP_FORMATS, TILE_FORMATS, Format, GroupFormat, parse_format
from tikv.ops import checks
from tikv.ops.fixed_scales import fixed_numbers
from tikv.ops.layouts import Rows, Scale
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantize_tiles import QuantizedTiles, dequantize_tiles, quantize_tiles
from tikv.ops.quantized_arrays import (
    Quantized,
    codes_and_numbers,
    merged_axes,
    parts_of,
    target_of,
)
from tikv.ops.row_copy import bind_copy


def quantize(
    x: Array,
    format: Any = "int8",
    *,
    scale_dtype: Any = None,
    tensor_scale: float | None = None,
    of: str | None = None,
) -> Arrays:
    """Quantise the rows of the last axis, in one launch: to int8 with a scale for each row, or to groups of codes.

    Formats of groups give the same bits as the libraries that they come from: `tikv.Quant` gives mlx's words, scales
    and biases, and "q8_0" and "q4_0" give GGUF's codes and float16 scales. int8 is symmetric, with one scale per row:
    ``scale = max|x| / 127`` in ``scale_dtype`` and ``q = round(clamp(x * (1 / scale), -127, 127))``, ties to even.
    [The rules of quantisation][the-rules-of-quantisation] (docs/tutorials/formats.md) have the limits of scales, the
    scales of "mxfp8", "mxfp4" and "nvfp4", and what becomes of a NaN, an infinity, zeros and subnormal numbers.

    Args:
        x: (..., D) float32, float16 or bfloat16; any strides with a contiguous last axis, if the other axes can be
            merged into at most two.
        format: "int8"; a `tikv.Quant`; "q8_0" or "q4_0"; "mxfp8", "mxfp4" or "nvfp4". If "_hadamard", and perhaps a
            seed, is appended to a format of groups, rows are rotated first, as in `tikv.Quant`. The dtype of int8
            scales may be given in place of "int8". KVarN is "kvarn_k4v2" or "kvarn_k4v4", with "_g64" for tiles of 64
            tokens instead of 128.
        scale_dtype: for int8 "float16", the default, or "float32"; for a `tikv.Quant` one of these or "bfloat16", by
            default the dtype of x, as in mlx. GGUF's scales are float16; formats of floats fix the dtype of theirs.
        tensor_scale: for "nvfp4", the float32 by which all numbers are divided first; None for 1. NVIDIA's choice is
            the largest magnitude / (6 * 448).
        of: for KVarN, "keys" or "values": what x (..., T, D) holds, whose T tokens are whole tiles.

    Returns:
        For int8, ``q`` (..., D) int8 and ``scale`` (...), new arrays on the device; for KVarN a `QuantizedTiles`, else
        a `Quantized`, of new arrays.

    Raises:
        DTypeError: x, or the scale, has the wrong dtype.
        ShapeError: x has no axis, or its rows have no elements or do not divide into whole groups.
        OptionError: the format is unknown; a ``tensor_scale`` is not positive, or not for "nvfp4"; or ``of`` is missing
            for KVarN, or given for another format.

    Exactness: groups have the bits of mlx 0.32 and gguf 0.19 on a CPU. For int8 ``|x - q * scale| <= scale / 2``, up to
        float32 rounding, for each finite element whose magnitude is at most 127 times the largest scale (float16:
        8.3e6).
    Cost: each element is read twice, the second time from the processor's nearest cache, and written once.
    Source: ``int8_kv_append_paged``, with the scale rounded before use instead of after.

    Examples:
        >>> import numpy as np, tikv
        >>> q, scale = tikv.quantize(np.float32([[1.0, -2.0, 0.5]]), scale_dtype="float32")
        >>> q.copy_to_host().tolist(), scale.shape, str(scale.dtype)
        ([[64, -127, 32]], (1,), 'float32')
        >>> quantized = tikv.quantize(np.ones((3, 64), np.float16), tikv.Quant(bits=4))
        >>> quantized.codes.shape, quantized.scales.shape, str(quantized.biases.dtype), quantized.nbytes
        ((3, 8), (3, 1), 'float16', 108)
    """
    operation = "quantize"
    live = runtime_of(x)
    tiles = TILE_FORMATS.get(format) if isinstance(format, str) else None
    if tiles is not None:
        others = {"scale_dtype": scale_dtype, "tensor_scale": tensor_scale}
        return quantize_tiles(live, operation, x, tiles, of, others)
    if of is not None:
        raise OptionError(f"{operation}: of={of!r} is only for {', '.join(map(repr, TILE_FORMATS))}. Leave it out.")
    row: Format | None = parse_format(format)  # not int8, nor 8-bit floats, whose scales are not found here
    dtype = None if row is not None else dtypes.find(format)
    if dtype is dtypes.int8:
        row = FORMATS["int8"]
    elif dtype is not None and dtype in FORMATS["int8"].scale_dtypes and scale_dtype is None:
        row, scale_dtype = FORMATS["int8"], dtype
    if row is None:
        offered = ", ".join(
            repr(name) for name in ("int8", "int4", *GROUP_FORMATS, *TILE_FORMATS) if not name.startswith("quant")
        )
        if dtype is not None:
            raise DTypeError(
                f"{operation}: {dtype.name} has no scale for each row, so convert x to that dtype with your array "
                f"library. Or use {offered} or a tikv.Quant."
            )
        raise OptionError(f"{operation}: unknown format {format!r}. Use {offered} or a tikv.Quant.")
    if tensor_scale is not None:
        if not isinstance(row, GroupFormat) or not row.has_tensor_scale:
            raise OptionError(f"{operation}: {row} has no scale for the whole tensor. Leave tensor_scale out.")
        row = row.scaled(fixed_numbers(tensor_scale, 1, "tensor_scale", operation)[0])
    rows = view(x, "x", operation)
    checks.on_device([("x", rows)], live, operation)
    if rows.dtype not in dtypes.QUANTIZABLE:
        raise DTypeError(f"{operation}: x is {describe(rows)}. Pass float32, float16 or bfloat16.")
    if scale_dtype is None:
        scales = rows.dtype if row.rule == "affine" else row.scale_dtypes[0]
    else:
        scales = row.check_scale_dtype(dtypes.parse(scale_dtype, operation, offered=row.scale_dtypes), operation)
    checks.readable(rows, "x", operation)
    if rows.ndim == 0 or rows.shape[-1] == 0 != math.prod(rows.shape[:-1]):
        raise ShapeError(f"{operation}: x is {describe(rows)}; a row needs at least one element to have a scale.")
    names, written, lead, width = ("x", "codes", "scales"), (False, True, True), rows.shape[:-1], rows.shape[-1]
    if not isinstance(row, GroupFormat):
        codes, numbers = new_array(rows.shape, row.stored, live), new_array(lead, scales, live)
        _run(live, operation, names, written, (rows, codes, numbers), numbers.strides)
        return CacheArray(codes, live), CacheArray(numbers, live)
    row.groups(width, "x", operation)
    codes = new_array((*lead, row.words(width)), row.stored, live)
    numbers = new_array((*lead, row.numbers_of(width)), scales, live)
    _run(live, operation, names, written, (rows, codes, numbers), numbers.strides[:-1], (None, row))
    scale, *bias = (CacheArray(part, live) for part in parts_of(numbers, row.numbers))
    return Quantized(CacheArray(codes, live), scale, bias[0] if bias else None, row, rows.shape)


def dequantize(q: Array | Quantized | QuantizedTiles, scale: Array | None = None, out: Array | None = None) -> Array:
    """The numbers that codes stand for, in one launch: int8 rows with a scale each, or what `quantize` made.

    Args:
        q: (..., D) int8; or a `Quantized` or a `QuantizedTiles`, without ``scale``. A `Quantized` built from arrays
            that `quantize` did not make is copied through the host.
        scale: (...) float16 or float32, for int8.
        out: (..., D) float32, float16 or bfloat16; None for a new float32 array.

    Returns:
        ``out``, or a new `CacheArray` on the device.

    Raises:
        DTypeError, ShapeError: arrays that are not as described above, or that overlap.
        OptionError: ``scale`` is given with a `Quantized` or a `QuantizedTiles`.

    Exactness: the product in float32, rounded once to the dtype of ``out``; with a bias, product and sum are each
        rounded.
    Cost: each element is read once and written once.
    Source: the reading half of ``int8_paged_decode_attention``.

    Examples:
        >>> import numpy as np, tikv
        >>> tikv.dequantize(np.int8([[2, -4]]), np.float32([0.5])).copy_to_host().tolist()
        [[1.0, -2.0]]
    """
    operation = "dequantize"
    live = runtime_of(q)
    if isinstance(q, (Quantized, QuantizedTiles)):
        if scale is not None:
            raise OptionError(f"{operation}: a {type(q).__name__} has its own scales. Leave scale out.")
        if isinstance(q, QuantizedTiles):
            return dequantize_tiles(live, operation, q, out)
        return _dequantize_groups(live, operation, q, out)
    if scale is None:
        raise DTypeError(f"{operation}: q is not a Quantized, and scale is missing. Pass the scales of its int8 rows.")
    rows, scales = view(q, "q", operation), view(scale, "scale", operation)
    checks.on_device([("q", rows), ("scale", scales)], live, operation)
    int8 = FORMATS["int8"]
    if rows.dtype is not int8.stored:
        raise DTypeError(f"{operation}: q is {describe(rows)}, not int8.")
    checks.scales(scales, "scale", int8, operation)
    if rows.ndim == 0 or scales.shape != rows.shape[:-1]:
        raise ShapeError(f"{operation}: scale is {describe(scales)} where {describe(rows)} needs {rows.shape[:-1]}.")
    for name, a in (("q", rows), ("scale", scales)):
        checks.readable(a, name, operation)
    target, out = target_of(live, operation, out, rows.shape)
    _run(live, operation, ("q", "out", "scale"), (False, True, False), (rows, target, scales), scales.strides)
    return out


def _dequantize_groups(live: runtime.Runtime, operation: str, quantized: Quantized, out: Array) -> Any:
    """`dequantize` for codes of groups."""
    codes, numbers = codes_and_numbers(live, operation, quantized)
    target, out = target_of(live, operation, out, tuple(quantized.shape))
    names, written = ("codes", "out", "scales"), (False, True, False)
    _run(live, operation, names, written, (codes, target, numbers), numbers.strides[:-1], (quantized.format, None))
    return out


def _run(
    live: runtime.Runtime,
    operation: str,
    names: Sequence[str],
    written: Sequence[bool],
    arrays: Sequence[ArrayView],
    scale_strides: tuple[int, ...],
    formats: tuple[GroupFormat | None, GroupFormat | None] = (None, None),
) -> None:
    """Convert rows (..., D) to rows (..., D), with one scale per row or per group: an array of each, in this order.

    `scale_strides` has no axis of groups; `formats` are those of the source and the destination.
    """
    shape = arrays[0].shape
    if 0 in shape:
        return
    width = arrays[1 if formats[0] else 0].shape[-1]
    extents, strides = merged_axes(shape[:-1], [arrays[0].strides[:-1], arrays[1].strides[:-1], scale_strides])
    if len(extents) > 2:
        raise ShapeError(
            f"{operation}: {names[0]} ({describe(arrays[0])}, strides {arrays[0].strides} elements) has more than "
            "two axes that cannot be merged into one. Pass a contiguous array."
        )
    groups, tokens = (1,) * (2 - len(extents)) + tuple(extents)
    (src_group, src), (dst_group, dst), (scale_group, scale) = ((0,) * (2 - len(extents)) + s for s in strides)

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        scales = Scale(arrays[2], sequence=scale_group, token=scale)
        bound = bind_copy(
            live,
            operation,
            src=[Rows(arrays[0], sequence=src_group, token=src, format=formats[0])],
            dst=[Rows(arrays[1], sequence=dst_group, token=dst, format=formats[1], scale=scales)],
            widths=[width],
            heads=1,
            tokens=tokens,
            groups=groups,
        )
        return [bound]

    Plan(live, operation, names, written, bind).run(arrays)
