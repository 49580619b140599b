"""One row per format that stores numbers as codes of 2 to 8 bits, which a scale turns back into numbers.

A format says which numbers share a scale, how many bits a code has, and by which rule both are computed. int8 has a
scale for each row; formats of groups have one, and perhaps a bias, for each group of columns; 8-bit floats have none,
or one for all rows of a head, or of all heads, which the caller gives. The rules are in `kernels/codec.py`, for groups
in `kernels/groups.py`, and in `reference.py`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from tikv import dtypes
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError, ShapeError

WORD_BITS = 32  # codes of groups are packed in words of so many bits, the first code in the lowest
BITS = (2, 3, 4, 8)
GROUPS = (32, 64, 128)
MOST_RESIDUAL = 1 << 30
HADAMARD = "hadamard"
MOST_SEED = 1 << 31
FLOAT_RULES = ("mxfp8", "mxfp4", "nvfp4")  # rules whose codes are floats themselves


@dataclass(frozen=True)
class Format:
    """A row: its name, what shares a scale, bits per code, rule, dtype of the array of codes, dtypes of scales."""

    name: str
    scale_of: Literal["row", "group", "head"]  # the caller gives the scale of a head, or of all heads
    bits: int
    rule: str  # "int8", "float8", "affine", "q8_0", "q4_0", or one of `FLOAT_RULES`
    stored: DType
    scale_dtypes: tuple[DType, ...]

    @property
    def code(self) -> str:
        """What kernels are compiled for."""
        return self.stored.short

    @property
    def finds_scales(self) -> bool:
        """Whether a write computes the scales, and stores them beside the codes."""
        return self.scale_of != "head"

    def numbers_of(self, width: int) -> int:
        """The number of scales of a row, with the biases of groups; 0 if rows have no scales of their own."""
        return int(self.finds_scales)

    def check_scale_dtype(self, dtype: DType, operation: str, name: str = "scale_dtype") -> DType:
        """`dtype`, checked to be one that an array of its scales may have.

        Raises:
            DTypeError: it is not.
        """
        if dtype not in self.scale_dtypes:
            raise DTypeError(
                f"{operation}: {name} {dtype.name} is not supported for {self}. Use "
                f"{' or '.join(row.name for row in self.scale_dtypes)}."
            )
        return dtype

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class GroupFormat(Format):
    """A row of a format whose groups of columns have scales, and perhaps biases, of their own."""

    group: int  # codes per group
    numbers: int  # 2: a scale and a bias; 1: a scale
    tensor_scale: float = 1.0  # for nvfp4: all numbers are divided by it before they are encoded
    seed: int | None = None  # of the signs by which rows are rotated before that; None if they are not

    def __hash__(self) -> int:  # only of what distinguishes rows: each call looks up its plan by it
        return hash((self.name, self.seed, self.tensor_scale))

    @property
    def code(self) -> str:
        """The name that kernels are compiled for, since words of codes do not tell the format."""
        return self.name

    def numbers_of(self, width: int) -> int:
        """The number of scales and biases of a row."""
        return width // self.group * self.numbers

    def words(self, width: int) -> int:
        """The number of words in a row of codes."""
        return width * self.bits // WORD_BITS

    def columns(self, words: int) -> int:
        """The number of columns in a row of so many words."""
        return words * WORD_BITS // self.bits

    def __str__(self) -> str:
        rotation = "" if self.seed is None else f"_{HADAMARD}{self.seed or ''}"
        return f"{self.name}{rotation}"

    @property
    def unturned(self) -> GroupFormat:
        """The same format without rotation: that of the values, if this is that of the keys."""
        return self if self.seed is None else replace(self, seed=None)

    def scaled(self, tensor_scale: float) -> GroupFormat:
        """The same format, in which all numbers are first divided by a scale."""
        return replace(self, tensor_scale=tensor_scale)

    @property
    def own_scale_dtype(self) -> DType | None:
        """The dtype of its scales if the format fixes it, so that ``scale_dtype`` does not apply; else None."""
        return self.scale_dtypes[0] if self.is_float else None

    @property
    def is_float(self) -> bool:
        """Whether codes are floats, and scales are 8-bit floats."""
        return self.rule in FLOAT_RULES

    @property
    def has_tensor_scale(self) -> bool:
        """Whether one scale applies to all numbers, in addition to those of their groups."""
        return self.rule == "nvfp4"

    def groups(self, width: int, what: str, operation: str) -> int:
        """The number of groups in a row.

        Raises:
            ShapeError: groups do not divide it.
        """
        if width % self.group or width == 0:
            raise ShapeError(
                f"{operation}: {what} is {width} wide, and groups of {self} have {self.group} columns. Use a "
                f"multiple of {self.group}, or a format with smaller groups."
            )
        return width // self.group


@dataclass(frozen=True)
class TileFormat:
    """A row of KVarN: the tokens of a group and the channels of a head are a tile, balanced before it becomes codes.

    A tile's codes are a matrix. For keys its rows are channels and its columns tokens; for values it is the other way
    round. Each row has a scale and a bias, each column a factor, by which the row's numbers are multiplied.
    """

    name: str
    k_bits: int
    v_bits: int
    group: int  # tokens per tile

    def bits(self, of: str) -> int:
        """Bits per code of "keys" or "values"."""
        return self.k_bits if of == "keys" else self.v_bits

    def sides(self, of: str, width: int) -> tuple[int, int]:
        """Rows and columns of the codes of a tile whose tokens have so many channels."""
        return (width, self.group) if of == "keys" else (self.group, width)

    @property
    def newest(self) -> int:
        """How many of the newest tokens a store has room for beside an open tile.

        A tile becomes codes with the first call after the one that fills it, so tokens of one call, which may be
        drafts, enter no tile before the next, unless they are more than this.
        """
        return self.group

    @property
    def sinks(self) -> int:
        """How many first tokens it leaves as they are: none, since ``sinks=`` of a store says that."""
        return 0

    def reported(self, of: str) -> GroupFormat:
        """The format that a store of tiles reports."""
        return GroupFormat(self.name, "group", self.bits(of), "tokens", dtypes.uint32, (dtypes.float16,), GROUPS[0], 2)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Quant:
    """A format with mlx's quantisation: groups of numbers, each with a scale and a bias.

    Args:
        bits: bits per code: 2, 3, 4 or 8.
        group: numbers that share a scale and a bias: 32, 64 or 128.
        axis: "head_dim": groups lie along the columns of a row. "tokens": a group of keys is one channel of several
            tokens, and values still group along the columns, as in KIVI; only stores, pools and `TikvCache` support
            this.
        residual: with "tokens", the number of newest tokens that always stay unquantised, at least ``group``.
        rotate: "hadamard": before keys become codes, the launch that writes them multiplies them by signs and, in
            blocks, by a Hadamard matrix, whose size is the largest power of two that divides their width. Each call of
            attention does the same to the queries, once, and rounds them to their dtype. Values are not rotated, and
            keys that are read as numbers are rotated back. It cannot be used with "tokens", where each channel has its
            own scale. A NaN or an infinity spreads to all numbers of its block; numbers below 2**-96 count as 0.
        seed: the number of the set of signs, 0 or more. Kernels are compiled for each seed.
        sinks: how many first tokens always stay unquantised, K and V, in stores, pools and `TikvCache`.
        recent: how many newest tokens always stay so, at least, with "head_dim"; with "tokens" `residual` says it.
            Older tokens become codes in groups of ``group``, and are trimmed in such groups.

    Raises:
        OptionError: bits, group, axis or rotate is not one of these choices, or the residual, sinks or recent tokens
            do not fit.

    Examples:
        >>> import tikv
        >>> tikv.Quant(bits=4).format.name
        'quant4_64'
    """

    bits: int
    group: int = 64
    axis: str = "head_dim"
    residual: int = 0
    rotate: str | None = None
    seed: int = 0
    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        for name, value, offered in (("bits", self.bits, BITS), ("group", self.group, GROUPS)):
            if type(value) is not int or value not in offered:
                raise OptionError(f"Quant: {name}={value!r} is not supported. Use one of {offered}.")
        if self.axis not in ("head_dim", "tokens"):
            raise OptionError(f"Quant: axis={self.axis!r} is not supported. Use 'head_dim' or 'tokens'.")
        if type(self.residual) is not int or not (
            self.group <= self.residual < MOST_RESIDUAL if self.axis == "tokens" else self.residual == 0
        ):
            remedy = f"residual={self.group}, the group, or more" if self.axis == "tokens" else "0 with axis='head_dim'"
            raise OptionError(f"Quant: residual={self.residual!r} is not supported. Use {remedy}.")
        for name, value in (("sinks", self.sinks), ("recent", self.recent)):
            if type(value) is not int or not 0 <= value < MOST_RESIDUAL:
                raise OptionError(f"Quant: {name}={value!r} is not supported. Use a number of tokens, 0 or more.")
        if self.recent and self.axis == "tokens":
            raise OptionError(
                f"Quant: recent={self.recent} with axis='tokens' is not supported: residual={self.residual} says how "
                "many newest tokens stay unquantised there. Leave recent out."
            )
        if self.rotate not in (None, HADAMARD):
            raise OptionError(f"Quant: rotate={self.rotate!r} is not supported. Use None or {HADAMARD!r}.")
        if type(self.seed) is not int or not 0 <= self.seed < MOST_SEED or (self.seed and self.rotate is None):
            remedy = f"an int from 0 to {MOST_SEED - 1}" if self.rotate else f"0, or rotate={HADAMARD!r}"
            raise OptionError(f"Quant: seed={self.seed!r} is not supported. Use {remedy}.")
        if self.rotate and self.axis == "tokens":
            raise OptionError(
                "Quant: rotate with axis='tokens' is not supported: each channel has its own scales there, and rotated "
                "keys have no channels. Use axis='head_dim', or rotate=None."
            )

    def __repr__(self) -> str:
        residual = f", residual={self.residual}" if self.residual else ""
        rotate = f", rotate={self.rotate!r}, seed={self.seed}" if self.rotate else ""
        plain = "".join(f", {name}={n}" for name, n in (("sinks", self.sinks), ("recent", self.recent)) if n)
        return f"Quant(bits={self.bits}, group={self.group}, axis={self.axis!r}{residual}{rotate}{plain})"

    @property
    def row(self) -> GroupFormat:
        """The row of the table that encodes the groups, whatever their axis."""
        name = f"quant{self.bits}_{self.group}"
        return GROUP_FORMATS[name] if self.rotate is None else rotated(name, self.seed)

    @property
    def format(self) -> GroupFormat:
        """The row of the table for groups of columns.

        Raises:
            OptionError: the groups lie along tokens, or some tokens stay unquantised.
        """
        if self.sinks or self.recent:
            raise OptionError(
                f"{self}: sinks and recent tokens are supported only for the dtype of a tikv.KVCacheStore, "
                "PagedKVCacheStore or TikvCache. Leave them out."
            )
        if self.axis == "tokens":
            raise OptionError(
                f"{self}: groups along tokens are supported only for keys, in tikv.KVCacheStore, PagedKVCacheStore and "
                f"TikvCache. Use axis='head_dim'."
            )
        return self.row

    @property
    def newest(self) -> int:
        """How many of the newest tokens always stay unquantised, at least."""
        return self.residual if self.axis == "tokens" else self.recent

    @property
    def by_tokens(self) -> GroupFormat:
        """The format that a store reports in which older tokens are codes."""
        suffix = "tokens" if self.axis == "tokens" else "older"
        return replace(self.row, name=f"{self.row.name}_{suffix}", rule="tokens")


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
        GroupFormat("mxfp8", "group", 8, "mxfp8", dtypes.uint32, (dtypes.float8_e8m0fnu,), 32, 1),
        GroupFormat("mxfp4", "group", 4, "mxfp4", dtypes.uint32, (dtypes.float8_e8m0fnu,), 32, 1),
        GroupFormat("nvfp4", "group", 4, "nvfp4", dtypes.uint32, (dtypes.float8_e4m3fn,), 16, 1),
        *(_group_format(f"quant{bits}_{group}", bits, group, "affine") for bits in BITS for group in GROUPS),
    )
}

TILE_FORMATS = {
    row.name: row
    for row in (
        TileFormat("kvarn_k4v2", 4, 2, 128),
        TileFormat("kvarn_k4v4", 4, 4, 128),
        TileFormat("kvarn_k4v2_g64", 4, 2, 64),
        TileFormat("kvarn_k4v4_g64", 4, 4, 64),
    )
}

Aging: TypeAlias = Quant | TileFormat  # formats in which older tokens are codes, and the newest are not

# The rows of groups, which have the same names in kernels; then all rows by their names in kernels.
GROUP_FORMATS = {name: row for name, row in FORMATS.items() if isinstance(row, GroupFormat)}
OF_CODE = {row.code: row for row in FORMATS.values()}
_OF_DTYPE = {row.stored: row for row in FORMATS.values() if not isinstance(row, GroupFormat)}

SHORT_NAMES = {"int4": "quant4_32"}
"""Names that other libraries use, and the formats that they stand for here."""

_ROTATED = re.compile(rf"(.+)_{HADAMARD}(\d{{,10}})")

# What a message about a dtype adds if a format is accepted too.
OR_GROUPS = ", int4, q8_0, q4_0, mxfp8, mxfp4, nvfp4, or a tikv.Quant of 2, 3, 4 or 8 bits"
# The same of a dtype that keys and values may have together.
OR_FORMATS = OR_GROUPS.replace(", or", ", kvarn_k4v2, kvarn_k4v4, or")


def format_of(stored: DType | GroupFormat) -> Format | None:
    """The format in which rows are stored; None for a model's own dtypes.

    Examples:
        >>> print(format_of(dtypes.int8), format_of(dtypes.float16))
        int8 None
    """
    return stored if isinstance(stored, Format) else _OF_DTYPE.get(stored)


@functools.cache
def rotated(name: str, seed: int) -> GroupFormat:
    """The row of that name for rows that are rotated with the signs of that seed."""
    return replace(GROUP_FORMATS[name], seed=seed)


def block_of(width: int) -> int:
    """The number of columns that are rotated together in a row: the largest power of two that divides its width.

    Examples:
        >>> block_of(128), block_of(96), block_of(80)
        (128, 32, 16)
    """
    return width & -width


def parse_aging(value: Any) -> Aging | None:
    """The format that a user's argument means if only older tokens become codes; None for anything else."""
    if isinstance(value, Quant):
        return value if value.axis == "tokens" or value.sinks or value.recent else None
    return value if isinstance(value, TileFormat) else TILE_FORMATS.get(value) if isinstance(value, str) else None


def parse_format(value: Any) -> GroupFormat | None:
    """The row of groups that a user's argument means (a `Quant`, a name or a row); None for anything else."""
    if isinstance(value, Quant):
        return value.format
    if isinstance(value, GroupFormat):
        return value
    if not isinstance(value, str):
        return None
    match = _ROTATED.fullmatch(value)
    if match and match[1] in GROUP_FORMATS and int(match[2] or 0) < MOST_SEED:
        return rotated(match[1], int(match[2] or 0))
    return GROUP_FORMATS.get(SHORT_NAMES.get(value, value))
