"""What a store may keep its rows in, how large a piece of memory may be, and how sizes are shown."""

from __future__ import annotations

from typing import Any

from tikv import dtypes, runtime
from tikv.dtypes import DType
from tikv.errors import DTypeError

# The largest block that a launch addresses.
BLOCK_BYTES = {"cpu": 2**33, "cuda": 2**33, **dict.fromkeys(("vulkan", "metal", "amdgpu"), 2**32 - 64)}


def storage(dtype: Any, scale_dtype: Any, live: runtime.Runtime, operation: str) -> tuple[DType, DType | None]:
    """What a cache stores its rows in, and their scales where it is int8.

    Raises:
        DTypeError: it is not offered, or not on this arch.
    """
    stored, scales = dtypes.parse(dtype, operation), dtypes.parse(scale_dtype, operation)
    if stored.name not in dtypes.APPENDED:
        raise DTypeError(f"{operation}: dtype {stored.name} is not stored. Use one of {', '.join(dtypes.APPENDED)}.")
    if stored is dtypes.float64 and not live.has_float64:
        raise DTypeError(f"{operation}: {live.arch} has no float64. Use float32, or CPU or CUDA.")
    if scales not in dtypes.SCALES:
        raise DTypeError(f"{operation}: scale_dtype {scales.name} is not offered. Use float16 or float32.")
    return stored, scales if stored is dtypes.int8 else None


def size_in_words(nbytes: int) -> str:
    """Bytes in the unit that shows them.

    Example:
        >>> size_in_words(512), size_in_words(2304), size_in_words(33554432)
        ('512 B', '2.3 kB', '33.6 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 100_000 else f"{nbytes / 1e6:.1f} MB"
