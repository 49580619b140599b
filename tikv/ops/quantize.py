"""Quantisation as plain functions: rows to int8 with a scale each, or to groups of codes, and back.

Caches and pools quantise by the same kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from tikv.ops.quantized_arrays import copied_together, merged_axes, parts_of, side_by_side, target_of
from tikv.ops.row_copy import bind_copy


class Quantized(NamedTuple):
    """Rows as codes of a format, which `quantize` makes; `dequantize` turns them back into numbers.

    Attributes:
        codes: (..., D * bits / 32) uint32, the first code of a row in the lowest bits.
        scales: (..., D / group), one per group.
        biases: the same, or None if the format has no biases.
        format: the format, as `tikv.formats` defines it.
        shape: the shape of the rows, (..., D).
    """

    codes: Array
    scales: Array
    biases: Array
    format: GroupFormat
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and biases together."""
        return int(self.codes.nbytes + self.scales.nbytes + (0 if self.biases is None else self.biases.nbytes))


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


def codes_and_numbers(
    live: runtime.Runtime, operation: str, quantized: Quantized, of: str = "", written: bool = False
) -> tuple[ArrayView, ArrayView]:
    """The codes of a `Quantized`, and its scales and biases interleaved, checked; `of` is put before their names.

    Raises:
        ShapeError, DTypeError: they do not agree with each other, the format or the shape; or they must be written in
            place and cannot be.
    """
    format, shape = quantized.format, tuple(quantized.shape)
    affine = format.rule == "affine"
    if affine != (quantized.biases is not None):
        wrong = "are missing, and {} needs them" if affine else "are given, and {} has none"
        raise ShapeError(f"{operation}: {of}biases {wrong.format(format)}.")
    codes_name, *names = _names(of)
    codes, scales = view(quantized.codes, codes_name, operation), view(quantized.scales, names[0], operation)
    parts = [scales, view(quantized.biases, names[1], operation)] if affine else [scales]
    places = [(a.key, a.ptr - scales.ptr, a.handle is scales.handle) for a in parts]
    key = ("codes", codes.key, format, shape, written, *places)
    joint = live.plans.get(key)
    if joint is None:
        _check_codes(live, operation, quantized, codes, parts, of)
        numbers = side_by_side(parts)
        if written:
            if numbers is None:
                raise ShapeError(
                    f"{operation}: the scale and the bias of a group are written together, so each bias must "
                    f"follow its scale in memory; {of}scales and {of}biases are not laid out so. Write into what "
                    "tikv.quantize returned."
                )
            checks.writable(codes, f"{of}codes", operation)
            checks.writable(numbers, f"{of}scales", operation)
        joint = live.plans.keep(key, () if numbers is None else (numbers.shape, numbers.strides))
    return codes, scales.restrided(*joint) if joint else copied_together(parts, live)


def _check_codes(
    live: runtime.Runtime, operation: str, quantized: Quantized, codes: ArrayView, parts: list[ArrayView], of: str
) -> None:
    """Check that codes and `parts`, scales and perhaps biases, agree with each other, the format and the shape."""
    format, width, lead = quantized.format, quantized.shape[-1], tuple(quantized.shape[:-1])
    codes_name, *names = _names(of)
    named = list(zip(names, parts, strict=False))
    checks.on_device([(codes_name, codes), *named], live, operation)
    if codes.dtype is not dtypes.uint32:
        raise DTypeError(f"{operation}: {codes_name} is {describe(codes)}, not uint32.")
    groups = format.groups(width, f"{of}shape", operation)
    if codes.shape != (*lead, format.words(width)):
        expected = (*lead, format.words(width))
        raise ShapeError(f"{operation}: {codes_name} is {describe(codes)} where {expected} is needed.")
    for name, part in named:
        checks.scales(part, name, format, operation)
        checks.same_dtype(parts[0], part, names[0], name, operation)
        if part.shape != (*lead, groups):
            raise ShapeError(f"{operation}: {name} is {describe(part)} where {(*lead, groups)} is needed.")
    checks.readable(codes, codes_name, operation)


@functools.cache
def _names(of: str) -> tuple[str, str, str]:
    """The names that errors give to the arrays of a `Quantized`."""
    return f"{of}codes", f"{of}scales", f"{of}biases"


def codes_of_pair(
    live: runtime.Runtime, operation: str, pair: Mapping[str, Any], scales: Sequence[Any] = (), written: bool = False
) -> tuple[list[ArrayView], list[ArrayView], tuple[GroupFormat, GroupFormat]]:
    """(the codes of K and V, the scales and biases of their groups, their formats) of two `Quantized`, given by name.

    Raises:
        OptionError: scales are given beside them; or the values are rotated, which only keys may be.
        DTypeError, ShapeError: one is not a `Quantized`, their formats differ, or the strides of their scales differ.
    """
    if [scale for scale in scales if scale is not None]:
        raise OptionError(f"{operation}: a Quantized has its own scales. Leave k_scale and v_scale out.")
    (k_name, k), (v_name, v) = pair.items()
    for name, array in pair.items():
        if not isinstance(array, Quantized):
            raise DTypeError(f"{operation}: {name} is a {type(array).__name__}. Pass a Quantized for both, or neither.")
    if k.format.name != v.format.name:
        raise DTypeError(f"{operation}: K is {k.format} and V {v.format}. Use one format for both.")
    if v.format.seed is not None:
        raise OptionError(
            f"{operation}: {v_name} is {v.format}, whose rows are rotated, but values must not be rotated. Use "
            f"{v.format.unturned}."
        )
    k_codes, k_numbers = codes_and_numbers(live, operation, k, f"{k_name}'s ", written)
    v_codes, v_numbers = codes_and_numbers(live, operation, v, f"{v_name}'s ", written)
    if k_numbers.dtype is not v_numbers.dtype or k_numbers.strides[:-1] != v_numbers.strides[:-1]:
        raise ShapeError(
            f"{operation}: the scales of {k_name} are {describe(k_numbers)} and those of {v_name} "
            f"{describe(v_numbers)}. Use K and V of the same width, with scales of the same dtype."
        )
    return [k_codes, v_codes], [k_numbers, v_numbers], (k.format, v.format)


def require_quantizable(rows: ArrayView, name: str, operation: str) -> None:
    """Check that rows that become codes are float32, float16 or bfloat16.

    Raises:
        DTypeError: they have the wrong dtype.
    """
    if rows.dtype not in dtypes.QUANTIZABLE:
        raise DTypeError(
            f"{operation}: cannot quantise {name}: {describe(rows)}. Pass float32, float16 or bfloat16 rows."
        )


def scale_of_groups(numbers: ArrayView, *, token: int, head: int, sequence: int | None = None) -> Scale:
    """The scales and biases of groups, with the given axes of tokens, heads and sequences."""
    steps = numbers.strides
    return Scale(numbers, 0 if sequence is None else steps[sequence], steps[token], steps[head])


def require_slots_first(operation: str, layout: str) -> None:
    """Check that a pool that is a `Quantized` has layout NHD.

    Raises:
        OptionError: it has another.
    """
    if layout in ("HND", "VLLM"):
        raise OptionError(
            f"{operation}: layout {layout!r} does not fit a Quantized: its scales lie as its rows do, and would not be "
            f"contiguous from slot to slot. Use 'NHD', or a PagedKVCacheStore."
        )


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
