"""The scales of 8-bit floats: one number for a whole cache, or one per head. What is stored is x / scale.

A number on the host becomes an array on the device once, so that kernels find all scales in the same way: int8 scales
have a stride for each axis, and in these all strides are 0 except that of the heads.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, CacheArray, describe, to_device
from tikv.errors import ArchError, DTypeError, OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.layouts import Scale

SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def scale_given(value: Any, live: runtime.Runtime, name: str, operation: str) -> Any:
    """A caller's scale: an array is returned as it is, a number as an array of one element on the device.

    Raises:
        OptionError: a number that float32 does not divide by.
        ArchError: a CUDA graph is being captured, and no call before it had this number.
    """
    if not _is_number(value):
        return value
    number = _checked(value, name, operation)
    key = ("fixed scale", number)
    array = live.in_graphs.get(key, live.plans.get(key))
    captured = launch.is_captured(live)
    if array is None:
        if captured:
            raise ArchError(
                f"{operation}: {name}={value} is not on the device yet, and nothing can be copied there while a CUDA "
                "graph is captured. Make the same call once before the capture, or pass the scale as an array on the "
                "device."
            )
        array = live.plans.keep(key, CacheArray(to_device(np.array([number], np.float32), live), live))
    if captured:
        live.in_graphs[key] = array
    return array


def fixed_numbers(value: Any, heads: int, name: str, operation: str) -> tuple[float, ...]:
    """The scale of a store as the host knows it: one number or one per head, rounded to float32.

    Raises:
        OptionError: a number that float32 does not divide by.
        ShapeError: there is neither one number nor one per head.
    """
    plain = value.tolist() if hasattr(value, "tolist") else value
    listed = list(plain) if isinstance(plain, list | tuple) else [plain]
    if len(listed) not in (1, heads):
        raise ShapeError(f"{operation}: {name} has {len(listed)} numbers. Give one, or one per head: {heads}.")
    return tuple(float(np.float32(_checked(number, name, operation))) for number in listed)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


def _checked(value: Any, name: str, operation: str) -> float:
    """`value` as a float, checked to be a number that float32 divides by.

    Raises:
        OptionError: it is not valid.
    """
    number = float(value) if _is_number(value) else math.nan
    if not (math.isfinite(number) and SMALLEST <= number <= LARGEST):
        raise OptionError(f"{operation}: {name}={value} is not a positive normal float32. Use one such as 1.0.")
    return number


def check_fixed_scale(scale: ArrayView, heads: int, name: str, operation: str, batch: int | None = None) -> None:
    """Check that a scale is one number, or one per head, float16 or float32; with `batch`, or one per sequence's head.

    Raises:
        DTypeError, ShapeError: it is not.
    """
    if scale.dtype not in dtypes.SCALES:
        raise DTypeError(f"{operation}: {name} is {describe(scale)}; scales must be float16 or float32.")
    checks.readable(scale, name, operation)
    if scale.shape not in ((), (1,), (heads,), (batch, heads)):
        also = "" if batch is None else f", or one per sequence and head: {(batch, heads)}"
        raise ShapeError(
            f"{operation}: {name} is {describe(scale)}; 8-bit floats have one scale, or one per head: ({heads},){also}."
        )


def head_step(scale: ArrayView) -> int:
    """Elements between the scales of neighbouring heads: 0 if all heads share one."""
    return scale.strides[0] if scale.shape and scale.shape[0] > 1 else 0


def fixed_strides(scale: ArrayView) -> tuple[int, int]:
    """Elements between the scales of neighbouring sequences, and of neighbouring heads."""
    return scale.strides if scale.ndim == 2 else (0, head_step(scale))  # type: ignore[return-value]


def check_fixed_scales(scales: Sequence[ArrayView], heads: int, operation: str, batch: int | None = None) -> None:
    """Check the scales of K and V, which are read with the same strides.

    Raises:
        DTypeError, ShapeError: they are not such scales, or one is a number and the other one per head.
    """
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=False):
        check_fixed_scale(scale, heads, name, operation, batch)
    if len(scales) < 2:
        return
    checks.same_dtype(scales[0], scales[1], "k_scale", "v_scale", operation)
    if fixed_strides(scales[0]) != fixed_strides(scales[1]):
        raise ShapeError(
            f"{operation}: k_scale is {describe(scales[0])} and v_scale {describe(scales[1])}. Pass a number for "
            f"both, or ({heads},) for both."
        )


def fixed_scale(scale: ArrayView) -> Scale:
    """A checked scale, of all rows, of each head, or of each sequence and head, as kernels find it."""
    sequence, head = fixed_strides(scale)
    return Scale(scale, sequence=sequence, head=head)
