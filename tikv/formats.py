"""One row a format that keeps groups of numbers as integers of a few bits, with a scale, and maybe a bias, a group.

A format says how many bits and numbers a group has and by which rule they are found. The rules are `encode` and
`decode` of a group in `kernels/groups.py`, and in `reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tikv.errors import OptionError, ShapeError

WORD_BITS = 32  # codes lie in words of so many bits, the first in the lowest
BITS = (2, 3, 4, 8)
GROUPS = (32, 64, 128)


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
    """A format as mlx quantises: groups of columns, each with a scale and a bias.

    Args:
        bits: of a code: 2, 3, 4 or 8.
        group: columns that share a scale and a bias: 32, 64 or 128.
        axis: "head_dim", along the columns of a row.

    Raises:
        OptionError: another number of bits or columns, or another axis.

    Examples:
        >>> Quant(bits=4).format.name
        'quant4_64'
    """

    bits: int
    group: int = 64
    axis: str = "head_dim"

    def __post_init__(self) -> None:
        for name, value, offered in (("bits", self.bits, BITS), ("group", self.group, GROUPS)):
            if type(value) is not int or value not in offered:
                raise OptionError(f"Quant: {name}={value!r} is not offered. Use one of {offered}.")
        if self.axis != "head_dim":
            raise OptionError(f"Quant: axis={self.axis!r} is not offered. Use 'head_dim'.")

    @property
    def format(self) -> GroupFormat:
        """The row of the table."""
        return FORMATS[f"quant{self.bits}_{self.group}"]


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
