"""One row a format that keeps groups of numbers as integers of a few bits, with a scale, and maybe a bias, a group.

A format says how many bits and numbers a group has and by which rule they are found. The rules are `encode` and
`decode` of a group in `kernels/groups.py`, and in `reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tikv.errors import OptionError, ShapeError

WORD_BITS = 32  # codes lie in words of so many bits, the first in the lowest
BITS = (2, 3, 4, 8)
GROUPS = (32, 64, 128)
MOST_RESIDUAL = 1 << 30


@dataclass(frozen=True)
class GroupFormat:
    """A row: its name, which kernels are compiled for, bits of a code, codes of a group, rule, numbers of a group."""

    name: str
    bits: int
    group: int
    rule: str  # "affine", "q8_0" or "q4_0"
    numbers: int  # 2: a scale and a bias; 1: a scale

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

    def __str__(self) -> str:
        return self.name


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
        return FORMATS[f"quant{self.bits}_{self.group}"]

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


FORMATS = {
    row.name: row
    for row in (
        GroupFormat("q8_0", 8, 32, "q8_0", 1),
        GroupFormat("q4_0", 4, 32, "q4_0", 1),
        *(GroupFormat(f"quant{bits}_{group}", bits, group, "affine", 2) for bits in BITS for group in GROUPS),
    )
}


# What a message about a dtype adds where a format is taken as well.
OR_FORMATS = ", q8_0, q4_0, or a tikv.Quant of 2, 3, 4 or 8 bits"


def parse_format(value: Any) -> GroupFormat | None:
    """The row that a user's argument means, a `Quant`, a name or a row; None for what is none."""
    if isinstance(value, Quant):
        return value.format
    if isinstance(value, GroupFormat):
        return value
    return FORMATS.get(value) if isinstance(value, str) else None
