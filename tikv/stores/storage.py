"""What a store may keep its rows in, how large a piece of memory may be, and how sizes are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from tikv import dtypes, runtime
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError
from tikv.formats import OR_FORMATS, GroupFormat, format_of, parse_format
from tikv.ops.fixed_scales import fixed_numbers

# What all rows of K, and all of V, are divided by: one number, or one a head; None for nothing.
Divisors: TypeAlias = tuple[tuple[float, ...] | None, tuple[float, ...] | None]

# The largest block that a launch addresses.
BLOCK_BYTES = {"cpu": 2**33, "cuda": 2**33, **dict.fromkeys(("vulkan", "metal", "amdgpu"), 2**32 - 64)}
# The largest that several layers share, where that is less. Apple promises a `maxBufferLength` of 256 MiB,
# Vulkan a `maxMemoryAllocationSize` of 1 GiB: what is larger depends on the device, so it is asked of it only for a
# layer that needs it.
SHARED_BYTES = {"metal": 2**28, "vulkan": 2**30}


def shared_bytes(live: runtime.Runtime) -> int:
    """The largest block that layers share."""
    return min(BLOCK_BYTES[live.arch], SHARED_BYTES.get(live.arch, BLOCK_BYTES[live.arch]))


class RowForm(NamedTuple):
    """How rows of K, or of V, are kept.

    Attributes:
        dtype: a dtype, or a format of groups of codes.
        width: numbers of a row.
        divided: all rows are divided by a scale before they are stored.
    """

    dtype: DType | GroupFormat
    width: int
    divided: bool = False

    @property
    def format(self) -> GroupFormat | None:
        """The format, if a row is groups of codes."""
        return self.dtype if isinstance(self.dtype, GroupFormat) else None

    @property
    def stored(self) -> DType:
        """The dtype of the array that holds the rows: words of codes have one of their own."""
        return dtypes.uint32 if isinstance(self.dtype, GroupFormat) else self.dtype

    @property
    def stored_width(self) -> int:
        """Elements of a row in that array."""
        return self.dtype.words(self.width) if isinstance(self.dtype, GroupFormat) else self.width

    @property
    def nbytes(self) -> int:
        """Bytes of a row without its scales."""
        return self.stored_width * self.stored.itemsize

    @property
    def numbers(self) -> int:
        """Scales of a row, those of groups with their biases; 0 for none."""
        row = format_of(self.dtype)
        return 0 if row is None else row.numbers_of(self.width)

    @property
    def read_dtype(self) -> DType:
        """What `tokens` gives: the stored dtype, or float32 for what has scales."""
        return dtypes.float32 if self.numbers or self.divided else self.stored


def storage(
    dtype: Any, scale_dtype: Any, live: runtime.Runtime, operation: str, also: str = ""
) -> tuple[DType, DType | None]:
    """What a cache stores its rows in, and their scales where it has them; ``also`` is as in `dtypes.parse`.

    Raises:
        DTypeError: it is not offered, or not on this arch.
    """
    format = parse_format(dtype)
    if format is not None:
        raise DTypeError(
            f"{operation}: {format} is kept by KVCacheStore and PagedKVCacheStore alone. Use one of them, or another "
            f"dtype such as 'int8'."
        )
    stored = dtypes.parse(dtype, operation, also)
    if stored.name not in dtypes.APPENDED:
        raise DTypeError(f"{operation}: dtype {stored.name} is not stored. Use one of {', '.join(dtypes.APPENDED)}.")
    if stored is dtypes.float64 and not live.has_float64:
        raise DTypeError(f"{operation}: {live.arch} has no float64. Use float32, or CPU or CUDA.")
    return stored, _scales_of(stored, scale_dtype, operation)


def storage_or_format(
    dtype: Any, scale_dtype: Any, live: runtime.Runtime, operation: str
) -> tuple[DType | GroupFormat, DType | None]:
    """`storage`, or a format of groups and the dtype of its scales.

    Raises:
        DTypeError: it is not offered, or not on this arch.
    """
    format = parse_format(dtype)
    if format is None:
        return storage(dtype, scale_dtype, live, operation, OR_FORMATS)
    return format, _scales_of(format, scale_dtype, operation)


def _scales_of(kept: DType | GroupFormat, scale_dtype: Any, operation: str) -> DType | None:
    """The dtype of the scales that are stored beside what is kept; None for none, whatever dtype was asked for.

    Raises:
        DTypeError: it is not offered.
    """
    scales, row = dtypes.parse(scale_dtype, operation), format_of(kept)
    if scales not in dtypes.SCALES:
        raise DTypeError(f"{operation}: scale_dtype {scales.name} is not offered. Use float16 or float32.")
    if row is None or not row.finds_scales:
        return None
    return row.check_scale_dtype(scales, operation)


def check_divided(kept: Sequence[DType | GroupFormat | None], given: Sequence[Any], operation: str) -> None:
    """Scales that a caller gave for K and V, or did not, are of floats of 8 bits; None is the dtype of a model.

    Raises:
        OptionError: one is of something else.
    """
    for name, dtype, scale in zip(("k_scale", "v_scale"), kept, given, strict=True):
        if scale is not None and dtype not in dtypes.FLOATS8:
            shown = "the model has it" if dtype is None else dtype.name
            raise OptionError(
                f"{operation}: {name} is of floats of 8 bits, and {name[0].upper()} is kept as {shown}. Leave it out, "
                f"or use float8_e4m3fn or float8_e5m2."
            )


def divisors_of(kept: Sequence[DType | GroupFormat], given: Sequence[Any], heads: int, operation: str) -> Divisors:
    """What K and V are divided by, as `k_scale` and `v_scale` of a caller say; 1 where only the other is given.

    Raises:
        OptionError: a scale of what is not kept in floats of 8 bits, or beside scales of rows; or no such number.
        ShapeError: it is neither one number nor one a head.
    """
    found: list[tuple[float, ...] | None] = [None, None]
    if all(scale is None for scale in given):
        return None, None
    check_divided(kept, given, operation)
    for i, (name, dtype, scale) in enumerate(zip(("k_scale", "v_scale"), kept, given, strict=True)):
        row = format_of(dtype)
        if row is not None and row.finds_scales:
            raise OptionError(
                f"{operation}: {dtype.name} has scales of rows, and attention finds those of K and V by the same "
                f"strides, so that the other one has no scale of its own. Leave k_scale and v_scale out."
            )
        if row is not None:
            found[i] = (1.0,) if scale is None else fixed_numbers(scale, heads, name, operation)
    k, v = found
    if k is not None and v is not None and len(k) != len(v):
        k, v = (numbers * (heads if len(numbers) == 1 else 1) for numbers in (k, v))
    return k, v


def named_divisors(divisors: Divisors) -> dict[str, list[float]]:
    """Divisors as the arguments that make a store with them, as JSON has them; none where there are none."""
    return {name: [*found] for name, found in zip(("k_scale", "v_scale"), divisors, strict=True) if found is not None}


def appended(*kept: DType | GroupFormat, divided: bool = False) -> tuple[str, ...]:
    """The names of what may be appended to a cache whose K and V are kept as this, or as these."""
    found = []
    for dtype in kept:
        row = format_of(dtype)
        scaled = row is not None and (row.finds_scales or divided)
        found.append(tuple(row.name for row in dtypes.QUANTIZABLE) if scaled else dtypes.APPENDED[dtype.name])
    return tuple(name for name in found[0] if all(name in names for names in found))


def counted(number: int, what: str) -> str:
    """So many of something, in the singular where it is one.

    Examples:
        >>> counted(1, "layer"), counted(0, "layer"), counted(2, "layer")
        ('1 layer', '0 layers', '2 layers')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def size_in_words(nbytes: int) -> str:
    """Bytes in the unit that shows them.

    Examples:
        >>> size_in_words(512), size_in_words(2304), size_in_words(33554432)
        ('512 B', '2.3 kB', '33.6 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 100_000 else f"{nbytes / 1e6:.1f} MB"
