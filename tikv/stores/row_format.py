"""How rows of keys and values are stored: in a dtype or in groups of codes, how wide, and divided by which scale.

A store states all of this once, as `RowFormats`: memory is allocated by it, appended rows are checked against it, and
files, messages and attention read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, describe
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError
from tikv.formats import OR_FORMATS, OR_GROUPS, GroupFormat, format_of, parse_format
from tikv.ops import checks
from tikv.ops.fixed_scales import fixed_numbers
from tikv.ops.layouts import Formats
from tikv.ops.page_summaries import SUMMARIZED

Stored: TypeAlias = DType | GroupFormat
Divisor: TypeAlias = tuple[float, ...] | None  # the caller's scale of 8-bit floats: one number, or one for each head
ROWS = ("k", "v")
SCALES = ("k_scale", "v_scale")


class RowFormat(NamedTuple):
    """How rows of K, or of V, are stored.

    Attributes:
        dtype: a dtype, or a format of groups of codes.
        width: the numbers in a row.
        divisor: what all rows are divided by before they are stored, and multiplied by when they are read.
    """

    dtype: Stored
    width: int
    divisor: Divisor = None

    @property
    def format(self) -> GroupFormat | None:
        """The format, if a row is groups of codes."""
        return self.dtype if isinstance(self.dtype, GroupFormat) else None

    @property
    def stored(self) -> DType:
        """The dtype of the array that holds the rows; codes are packed into words, which have their own dtype."""
        return dtypes.uint32 if isinstance(self.dtype, GroupFormat) else self.dtype

    @property
    def stored_width(self) -> int:
        """The number of a row's elements in that array."""
        return self.dtype.words(self.width) if isinstance(self.dtype, GroupFormat) else self.width

    @property
    def nbytes(self) -> int:
        """Bytes of a row without its scales."""
        return self.stored_width * self.stored.itemsize

    @property
    def numbers(self) -> int:
        """How many scales a row has, with the biases of groups counted too; 0 without scales."""
        row = format_of(self.dtype)
        return 0 if row is None else row.numbers_of(self.width)

    @property
    def is_numbers(self) -> bool:
        """Whether a row is plain numbers without scales, so that reading returns what is stored."""
        return self.format is None and self.read_dtype is self.stored

    @property
    def read_dtype(self) -> DType:
        """The dtype that `tokens` returns: the stored one, or float32 if rows have scales."""
        return dtypes.float32 if self.numbers or self.divisor is not None else self.stored


class RowFormats(NamedTuple):
    """How the rows of a store are stored, and the dtype of the scales beside them."""

    k: RowFormat
    v: RowFormat
    scale_dtype: DType

    @classmethod
    def checked(
        cls,
        operation: str,
        live: runtime.Runtime,
        num_kv_heads: int,
        *,
        head_dim: Any,
        dtype: Any = "float16",
        head_dim_v: Any = None,
        v_dtype: Any = None,
        scale_dtype: Any = "float16",
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> RowFormats:
        """The formats that a store's arguments ask for, or an error about one; `KVCacheStore` describes them."""
        width = checks.integer(head_dim, "head_dim", operation, low=1)
        width_v = width if head_dim_v is None else checks.integer(head_dim_v, "head_dim_v", operation, low=1)
        k, k_scales = _stored_as(dtype, scale_dtype, live, operation, OR_FORMATS)
        v, v_scales = _stored_as(dtype if v_dtype is None else v_dtype, scale_dtype, live, operation, OR_GROUPS)
        v = values_of(v, v_dtype, operation)
        if k_scales and v_scales and k_scales is not v_scales:
            raise DTypeError(
                f"{operation}: keys of {k} have {k_scales.name} scales and values of {v} have {v_scales.name} "
                "scales, but attention needs scales of one dtype. Use formats whose scales have the same dtype, "
                "or a plain dtype for one of them."
            )
        (k, v), (k_scale, v_scale) = _scaled_whole((k, v), (k_scale, v_scale), operation)
        of_k, of_v = _divisors((k, v), (k_scale, v_scale), num_kv_heads, operation)
        for name, stored, columns in (("head_dim", k, width), ("head_dim_v", v, width_v)):
            if isinstance(stored, GroupFormat):
                stored.groups(columns, name, operation)
        scales = k_scales or v_scales or dtypes.parse(scale_dtype, operation, offered=dtypes.SCALES)
        return cls(RowFormat(k, width, of_k), RowFormat(v, width_v, of_v), scales)

    @property
    def both(self) -> tuple[RowFormat, RowFormat]:
        """The formats of K and of V."""
        return self.k, self.v

    @property
    def widths(self) -> tuple[int, int]:
        """The numbers in a row of K and of V."""
        return self.k.width, self.v.width

    @property
    def formats(self) -> Formats:
        """The formats of K and of V, each None unless its rows are groups of codes."""
        return self.k.format, self.v.format

    @property
    def divisors(self) -> tuple[Divisor, Divisor]:
        """What rows of K and of V are divided by."""
        return self.k.divisor, self.v.divisor

    @property
    def divided(self) -> bool:
        """Whether rows of K or of V are divided by a scale that the caller gave."""
        return self.divisors != (None, None)

    @property
    def alike(self) -> bool:
        """Whether K and V are stored in the same dtype or format, apart from a rotation of keys."""
        return self.k.dtype.name == self.v.dtype.name

    @property
    def numbers(self) -> int:
        """The distance from a row's scales to the next row's, for K and V alike: the larger number of both."""
        return max(self.k.numbers, self.v.numbers)

    @property
    def name(self) -> str:
        """The names of what K and V are stored as, for messages and a `repr`."""
        return str(self.k.dtype) if self.alike else f"{self.k.dtype}|{self.v.dtype}"

    @property
    def width(self) -> str:
        """The width of a head, or those of K and V, for a `repr`."""
        k, v = self.widths
        return str(k) if k == v else f"{k}|{v}"

    @property
    def appended(self) -> tuple[str, ...]:
        """The names of the dtypes that may be appended."""
        return appended(self.k.dtype, self.v.dtype, divided=self.divided)

    @property
    def scale_axes(self) -> tuple[int, ...]:
        """The axis of a row's scales as a shape, empty unless a row has several; the same for K and V."""
        return () if self.formats == (None, None) else (self.numbers,)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """The arrays that hold rows, by their names in files: the shape of a row and the dtype."""
        arrays = {name: ((row.stored_width,), row.stored) for name, row in zip(ROWS, self.both, strict=True)}
        scaled = [name for name, row in zip(SCALES, self.both, strict=True) if row.numbers]
        return {**arrays, **dict.fromkeys(scaled, (self.scale_axes, self.scale_dtype))}

    def arguments(self) -> dict[str, Any]:
        """The arguments of a store with these rows, in JSON's types."""
        arguments: dict[str, Any] = {"head_dim": self.k.width, "head_dim_v": self.v.width, "dtype": str(self.k.dtype)}
        arguments["scale_dtype"] = "float16" if self.scale_dtype not in dtypes.GROUP_SCALES else self.scale_dtype.name
        if str(self.v.dtype) != arguments["dtype"]:
            arguments["v_dtype"] = str(self.v.dtype)
        for name, row in zip(SCALES, self.both, strict=True):
            whole = 1.0 if row.format is None else row.format.tensor_scale
            if row.divisor is not None or whole != 1.0:
                arguments[name] = [whole] if row.divisor is None else [*row.divisor]
        return arguments


def check_summarized(operation: str, rows: RowFormats, page: int | None) -> None:
    """Raise DTypeError if page summaries are asked for of keys in a format that `page_scores` does not take."""
    if page is not None and rows.k.read_dtype not in SUMMARIZED:
        raise DTypeError(
            f"{operation}: page_summaries={page} cannot summarise keys kept as {rows.k.dtype}, which page_scores "
            "cannot read. Use another dtype, or leave page_summaries out."
        )


def plain_format(
    dtype: Any, scale_dtype: Any, live: runtime.Runtime, operation: str, also: str = ""
) -> tuple[DType, DType | None]:
    """The dtypes of the rows and scales of a cache without groups of codes; ``also`` is as in `dtypes.parse`."""
    format = parse_format(dtype)
    if format is not None:
        raise DTypeError(
            f"{operation}: {format} works only in KVCacheStore and PagedKVCacheStore. Use one of them, or another "
            "dtype such as 'int8'."
        )
    stored = dtypes.parse(dtype, operation, also)
    if stored.name not in dtypes.APPENDED:
        raise DTypeError(f"{operation}: dtype {stored.name} cannot be stored. Use one of {', '.join(dtypes.APPENDED)}.")
    if stored is dtypes.float64 and not live.has_float64:
        raise DTypeError(f"{operation}: {live.arch} has no float64. Use float32, or CPU or CUDA.")
    return stored, _scales_of(stored, scale_dtype, operation)


def _stored_as(
    dtype: Any, scale_dtype: Any, live: runtime.Runtime, operation: str, also: str
) -> tuple[Stored, DType | None]:
    """`plain_format`, or a format of groups and the dtype of its scales."""
    format = parse_format(dtype)
    if format is None:
        return plain_format(dtype, scale_dtype, live, operation, also)
    return format, _scales_of(format, scale_dtype, operation)


def _scales_of(stored: Stored, scale_dtype: Any, operation: str) -> DType | None:
    """The dtype of the scales beside rows, if it is supported; None without scales, whatever dtype was asked for."""
    scales, row = dtypes.parse(scale_dtype, operation, offered=dtypes.SCALES), format_of(stored)
    if scales not in dtypes.SCALES:
        raise DTypeError(f"{operation}: scale_dtype {scales.name} is not supported. Use float16 or float32.")
    if row is None or not row.finds_scales:
        return None
    if isinstance(row, GroupFormat) and row.own_scale_dtype:
        if scales is not dtypes.float16:
            raise DTypeError(
                f"{operation}: scale_dtype {scales.name} is not supported for {row}, whose scales are "
                f"{row.own_scale_dtype.name}. Leave scale_dtype out."
            )
        return row.own_scale_dtype
    return row.check_scale_dtype(scales, operation)


def values_of(stored: Any, v_dtype: Any, operation: str) -> Any:
    """The format of values: `stored`, without the rotation that it has if it was taken from the keys.

    Raises:
        OptionError: the given format rotates rows.
    """
    if not isinstance(stored, GroupFormat) or stored.seed is None:
        return stored
    if v_dtype is not None:
        raise OptionError(
            f"{operation}: v_dtype {stored} has rotated rows, and values are not rotated: attention's results "
            f"would have to be rotated back. Use {stored.unturned}."
        )
    return stored.unturned


def _scaled_whole(
    stored: tuple[Stored, Stored], scales: tuple[Any, Any], operation: str
) -> tuple[tuple[Stored, Stored], tuple[Any, Any]]:
    """Put given scales into those formats that have one scale for the whole tensor; return formats and other scales.

    Raises:
        ShapeError, OptionError: float32 cannot divide by a scale.
    """
    formats: list[Stored] = [*stored]
    rest = [*scales]
    for i, (name, dtype, scale) in enumerate(zip(SCALES, stored, scales, strict=True)):
        if isinstance(dtype, GroupFormat) and dtype.has_tensor_scale and scale is not None:
            formats[i], rest[i] = dtype.scaled(fixed_numbers(scale, 1, name, operation)[0]), None
    return (formats[0], formats[1]), (rest[0], rest[1])


def check_divided(stored: Sequence[Stored | None], scales: Sequence[Any], operation: str) -> None:
    """Raise OptionError if a scale is given that K or V, or the other of them, cannot have; None: the model's dtype."""
    for name, dtype, scale in zip(SCALES, stored, scales, strict=True):
        whole = isinstance(dtype, GroupFormat) and dtype.has_tensor_scale
        if scale is not None and dtype not in dtypes.FLOATS8 and not whole:
            shown = "in the model's dtype" if dtype is None else f"as {dtype}"
            raise OptionError(
                f"{operation}: {name} scales 8-bit floats and nvfp4, but {name[0].upper()} is stored {shown}. Leave it "
                "out, or use float8_e4m3fn, float8_e5m2 or nvfp4."
            )
    by_row = [dtype for dtype in stored if dtype is not None and (row := format_of(dtype)) and row.finds_scales]
    floats = [s for dtype, s in zip(stored, scales, strict=True) if dtype in dtypes.FLOATS8]
    if by_row and any(scale is not None for scale in floats):
        raise OptionError(
            f"{operation}: {by_row[0].name} has one scale per row, and attention reads the scales of K and V with "
            "the same strides, so neither k_scale nor v_scale can be given. Leave both out."
        )


def _divisors(stored: Sequence[Stored], scales: Sequence[Any], heads: int, operation: str) -> tuple[Divisor, Divisor]:
    """What K and V are divided by, from a caller's `k_scale` and `v_scale`; 1 for one if only the other is given.

    Scales are refused if rows are not 8-bit floats, or K or V has a scale per row. Each is one number or one per head.
    """
    if all(scale is None for scale in scales):
        return None, None
    divisors: list[Divisor] = [None, None]
    check_divided(stored, scales, operation)
    for i, (name, dtype, scale) in enumerate(zip(SCALES, stored, scales, strict=True)):
        if format_of(dtype) is not None:
            divisors[i] = (1.0,) if scale is None else fixed_numbers(scale, heads, name, operation)
    k, v = divisors
    if k is not None and v is not None and len(k) != len(v):
        k, v = (numbers * (heads if len(numbers) == 1 else 1) for numbers in (k, v))
    return k, v


def appended(*stored: Stored, divided: bool = False) -> tuple[str, ...]:
    """The names of the dtypes that may be appended to a cache whose K and V are stored as this, or as these."""
    by_format = []
    for dtype in stored:
        row = format_of(dtype)
        scaled = row is not None and (row.finds_scales or divided)
        by_format.append(tuple(row.name for row in dtypes.QUANTIZABLE) if scaled else dtypes.APPENDED[dtype.name])
    return tuple(name for name in by_format[0] if all(name in names for names in by_format))


def check_appended(operation: str, k: ArrayView, allowed: Sequence[str], to: str, other: str = "") -> None:
    """Check that new rows have one of these dtypes, if any fits both K and V; `to` and `other` complete the message.

    Raises:
        DTypeError: they have not.
    """
    if k.dtype.name not in allowed:
        no_rows = "Make the store with another v_dtype: no rows fit both K and V"
        way = f"Append {' or '.join(allowed)}" if allowed else no_rows
        raise DTypeError(f"{operation}: cannot append {k.dtype.name} to {to} (k: {describe(k)}). {way}{other}.")
