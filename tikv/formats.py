"""One row a format that keeps numbers as codes of 2 to 8 bits, which a scale makes numbers again.

A format says which numbers share a scale, how many bits a code has, and by which rule both are found. int8 has a scale
for each row; formats of groups have one, and maybe a bias, for so many columns; floats of 8 bits have none, or one for
all rows of a head, or of all heads, which the caller gives. The rules are in `kernels/codec.py` and, of groups,
`kernels/groups.py`, and in `reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from tikv import dtypes
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError, ShapeError

WORD_BITS = 32  # codes of groups lie in words of so many bits, the first in the lowest
BITS = (2, 3, 4, 8)
GROUPS = (32, 64, 128)
MOST_RESIDUAL = 1 << 30


@dataclass(frozen=True)
class Format:
    """A row: its name, what has a scale, bits of a code, rule, dtype of the array of codes, dtypes of scales."""

    name: str
    scale_of: Literal["row", "group", "head"]  # that of a head, or of all heads, is the caller's
    bits: int
    rule: str  # "int8", "float8", "affine", "q8_0" or "q4_0"
    stored: DType
    scale_dtypes: tuple[DType, ...]

    @property
    def code(self) -> str:
        """What kernels are compiled for."""
        return self.stored.short

    @property
    def finds_scales(self) -> bool:
        """Whether a write finds the scales, and stores them beside the codes."""
        return self.scale_of != "head"

    def numbers_of(self, width: int) -> int:
        """Scales of a row, those of groups with their biases; 0 where rows have none of their own."""
        return int(self.finds_scales)

    def check_scale_dtype(self, dtype: DType, operation: str, name: str = "scale_dtype") -> DType:
        """A dtype that its scales may have, in an array.

        Raises:
            DTypeError: they may not.
        """
        if dtype not in self.scale_dtypes:
            raise DTypeError(
                f"{operation}: {name} {dtype.name} is not offered for {self}. Use "
                f"{' or '.join(row.name for row in self.scale_dtypes)}."
            )
        return dtype

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class GroupFormat(Format):
    """A row of a format whose groups of columns have numbers of their own."""

    group: int  # codes
    numbers: int  # 2: a scale and a bias; 1: a scale

    @property
    def code(self) -> str:
        """What kernels are compiled for: words of codes say too little."""
        return self.name

    def numbers_of(self, width: int) -> int:
        """Scales and biases of a row."""
        return width // self.group * self.numbers

    def words(self, width: int) -> int:
        """Words of a row of codes."""
        return width * self.bits // WORD_BITS

    def columns(self, words: int) -> int:
        """Columns of a row of so many words."""
        return words * WORD_BITS // self.bits

    def groups(self, width: int, what: str, operation: str) -> int:
        """Groups of a row.

        Raises:
            ShapeError: they do not divide it.
        """
        if width % self.group or width == 0:
            raise ShapeError(
                f"{operation}: {what} is {width} wide, and groups of {self} have {self.group} columns. Use a multiple "
                f"of {self.group}, or a format of smaller groups."
            )
        return width // self.group


@dataclass(frozen=True)
class Quant:
    """A format as mlx quantises: groups of numbers, each with a scale and a bias.

    Args:
        bits: of a code: 2, 3, 4 or 8.
        group: numbers that share a scale and a bias: 32, 64 or 128.
        axis: "head_dim", along the columns of a row; or "tokens": of keys a channel over a group of tokens, of values
            still along the columns, as KIVI has it. A `tikv.KVCacheStore` keeps it.
        residual: with "tokens", how many of the newest tokens, at least, stay as they came; not below the group.

    Raises:
        OptionError: another number of bits or columns, another axis, or a residual that does not fit.

    Examples:
        >>> Quant(bits=4).format.name
        'quant4_64'
    """

    bits: int
    group: int = 64
    axis: str = "head_dim"
    residual: int = 0

    def __post_init__(self) -> None:
        for name, value, offered in (("bits", self.bits, BITS), ("group", self.group, GROUPS)):
            if type(value) is not int or value not in offered:
                raise OptionError(f"Quant: {name}={value!r} is not offered. Use one of {offered}.")
        if self.axis not in ("head_dim", "tokens"):
            raise OptionError(f"Quant: axis={self.axis!r} is not offered. Use 'head_dim' or 'tokens'.")
        if type(self.residual) is not int or not (
            self.group <= self.residual < MOST_RESIDUAL if self.axis == "tokens" else self.residual == 0
        ):
            wanted = f"an int from {self.group}, the group, on" if self.axis == "tokens" else "0 with axis='head_dim'"
            raise OptionError(f"Quant: residual={self.residual!r} is not offered. Use {wanted}.")

    def __repr__(self) -> str:
        residual = f", residual={self.residual}" if self.residual else ""
        return f"Quant(bits={self.bits}, group={self.group}, axis={self.axis!r}{residual})"

    @property
    def row(self) -> GroupFormat:
        """The row of the table, by which groups are encoded, whatever their axis."""
        return GROUP_FORMATS[f"quant{self.bits}_{self.group}"]

    @property
    def format(self) -> GroupFormat:
        """The row of the table, of groups of columns.

        Raises:
            OptionError: the groups are of tokens.
        """
        if self.axis == "tokens":
            raise OptionError(
                f"{self}: groups along tokens are kept by tikv.KVCacheStore(dtype=...) alone. Use axis='head_dim'."
            )
        return self.row

    @property
    def by_tokens(self) -> GroupFormat:
        """What a store of groups along tokens is said to keep."""
        return replace(self.row, name=f"{self.row.name}_tokens", rule="tokens")


def _group_format(name: str, bits: int, group: int, rule: str) -> GroupFormat:
    affine = rule == "affine"
    scales = dtypes.GROUP_SCALES if affine else (dtypes.float16,)
    return GroupFormat(name, "group", bits, rule, dtypes.uint32, scales, group, 2 if affine else 1)


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("int8", "row", 8, "int8", dtypes.int8, dtypes.SCALES),
        *(Format(row.name, "head", 8, "float8", row, dtypes.SCALES) for row in dtypes.FLOATS8),
        _group_format("q8_0", 8, 32, "q8_0"),
        _group_format("q4_0", 4, 32, "q4_0"),
        *(_group_format(f"quant{bits}_{group}", bits, group, "affine") for bits in BITS for group in GROUPS),
    )
}

# The rows of groups, which kernels know by the same names; all rows by the names that kernels have for them.
GROUP_FORMATS = {name: row for name, row in FORMATS.items() if isinstance(row, GroupFormat)}
OF_CODE = {row.code: row for row in FORMATS.values()}
_OF_DTYPE = {row.stored: row for row in FORMATS.values() if not isinstance(row, GroupFormat)}

# What a message about a dtype adds where a format is taken as well.
OR_FORMATS = ", q8_0, q4_0, or a tikv.Quant of 2, 3, 4 or 8 bits"


def format_of(kept: DType | GroupFormat) -> Format | None:
    """The row of what rows are kept as; None for a model's own dtypes.

    Examples:
        >>> print(format_of(dtypes.int8), format_of(dtypes.float16))
        int8 None
    """
    return kept if isinstance(kept, Format) else _OF_DTYPE.get(kept)


def parse_format(value: Any) -> GroupFormat | None:
    """The row of groups that a user's argument means, a `Quant`, a name or a row; None for anything else."""
    if isinstance(value, Quant):
        return value.format
    if isinstance(value, GroupFormat):
        return value
    return GROUP_FORMATS.get(value) if isinstance(value, str) else None
