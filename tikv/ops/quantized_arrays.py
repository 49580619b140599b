"""Rows as codes: a `Quantized`, its arrays as operations take them, and the array that numbers are written to."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, CacheArray, describe, new_array, read_host, to_device, view
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.layouts import Scale


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
