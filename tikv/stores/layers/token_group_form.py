"""How a store with groups along tokens keeps rows: the newest unquantised, the older ones as codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from tikv import dtypes, runtime
from tikv.dtypes import DType
from tikv.errors import OptionError
from tikv.formats import Aging, GroupFormat, Quant, TileFormat, parse_aging, parse_format
from tikv.ops import checks
from tikv.ops.quantize_tiles import check_width
from tikv.stores.layers.counts import Layer
from tikv.stores.row_format import ROWS, RowFormat, RowFormats


class CodeForm(NamedTuple):
    """How the older tokens of a layer are kept: keys as codes by channel, values as `values` says.

    Attributes:
        heads: the number of KV heads.
        width: the number of channels of a key.
        keys: the format of a channel's codes.
        key_scales: the dtype of their scales and biases.
        values: how rows of V are stored: a dtype or groups of codes.
        value_scales: the dtype of the scales of those rows, if they have any.
        rows: the dtype of the rows that are quantised.
    """

    heads: int
    width: int
    keys: GroupFormat
    key_scales: DType
    values: RowFormat
    value_scales: DType
    rows: DType

    def arrays(self) -> dict[str, tuple[tuple[int, ...], DType, int]]:
        """By name in files: the shape of an entry for a group or a token, its dtype, and how many tokens it serves."""
        keys, values, group = self.keys, self.values, self.keys.group
        arrays: dict[str, tuple[tuple[int, ...], DType, int]] = {
            "k_codes": ((self.width, keys.words(group)), dtypes.uint32, group),
            "k_numbers": ((self.width, keys.numbers), self.key_scales, group),
            "v_codes": ((values.stored_width,), values.stored, 1),
        }
        if values.numbers:
            axis = (values.numbers,) if values.format else ()
            arrays["v_numbers"] = (axis, self.value_scales, 1)
        return arrays

    @property
    def group(self) -> int:
        """How many tokens become codes together."""
        return self.keys.group


class RowForm(NamedTuple):
    """How the older tokens of a layer are kept if keys and values are codes by token, or values are numbers.

    Attributes:
        heads, value_scales, rows: as in `CodeForm`.
        group: how many tokens become codes together.
        keys, values: how rows are stored.
    """

    heads: int
    group: int
    keys: RowFormat
    values: RowFormat
    value_scales: DType
    rows: DType

    def arrays(self) -> dict[str, tuple[tuple[int, ...], DType, int]]:
        """As in `CodeForm`."""
        numbers = max(self.keys.numbers, self.values.numbers)  # attention reads the scales of both with these strides
        arrays: dict[str, tuple[tuple[int, ...], DType, int]] = {}
        for name, row in zip(ROWS, (self.keys, self.values), strict=True):
            arrays[f"{name}_codes"] = ((row.stored_width,), row.stored, 1)
            if row.numbers:
                arrays[f"{name}_numbers"] = ((numbers,) if row.format else (), self.value_scales, 1)
        return arrays


class TileForm(NamedTuple):
    """How the older tokens of a layer are kept in tiles, see `TileFormat`.

    Attributes:
        heads, rows: as in `CodeForm`.
        tiles: the format.
        widths: the number of channels of a key and of a value.
    """

    heads: int
    tiles: TileFormat
    widths: tuple[int, int]
    rows: DType

    def arrays(self) -> dict[str, tuple[tuple[int, ...], DType, int]]:
        """As in `CodeForm`."""
        arrays: dict[str, tuple[tuple[int, ...], DType, int]] = {}
        for name, of, width in zip(ROWS, ("keys", "values"), self.widths, strict=True):
            rows, columns = self.tiles.sides(of, width)
            words = columns * self.tiles.bits(of) // 32
            arrays[f"{name}_codes"] = ((rows, words), dtypes.uint32, self.group)
            arrays[f"{name}_numbers"] = ((rows, 2), dtypes.float16, self.group)
            arrays[f"{name}_factors"] = ((columns,), dtypes.float16, self.group)
        return arrays

    @property
    def group(self) -> int:
        """As in `CodeForm`."""
        return self.tiles.group


OlderForm: TypeAlias = CodeForm | RowForm | TileForm


def token_bytes(form: OlderForm) -> float:
    """Bytes per token and head."""
    return sum(math.prod(shape) * dtype.itemsize / tokens for shape, dtype, tokens in form.arrays().values())


class TokenGroupForm(NamedTuple):
    """How rows are stored: as the store reports them, the newest, and the older ones.

    Attributes:
        quant: the format that the user asked for.
        said: the formats that the store reports.
        newest: the arguments for rows of the newest tokens.
        codes: the form of the older ones.
    """

    quant: Aging
    said: RowFormats
    newest: dict[str, Any]
    codes: OlderForm

    @property
    def slots(self) -> int:
        """How many tokens after the sinks may be unquantised."""
        return self.quant.newest + self.quant.group

    @property
    def has_axis(self) -> bool:
        """Whether keys are grouped along tokens, and another axis would be a way out of what that excludes."""
        return isinstance(self.codes, CodeForm)

    @property
    def named(self) -> str:
        """The format, as messages name it."""
        return "groups along tokens" if self.has_axis else str(self.quant)

    @property
    def other(self) -> str:
        """A format without what this one excludes, as messages name it."""
        return "axis='head_dim'" if self.has_axis else "another format"

    @property
    def closes_early(self) -> bool:
        """Whether a full group becomes codes with the next call, instead of when there is no more room."""
        return isinstance(self.quant, TileFormat)

    def closed_at(self, tokens: int) -> int:
        """How many of so many tokens after the sinks are codes by their age alone."""
        slots, group = self.slots, self.quant.group
        return max(0, -(-(tokens - slots) // group)) * group

    def sinks(self, operation: str, sinks: int, any_window: bool = False) -> int:
        """How many first tokens stay unquantised, in a store with this argument `sinks`.

        Raises:
            OptionError: the format has sinks too, or a layer has a window, in which `sinks` says which tokens stay.
        """
        if self.quant.sinks and (sinks or any_window):
            raise OptionError(
                f"{operation}: {self.quant} with sinks={sinks} or a window is not supported, where the store's sinks "
                "stay unquantised. Use sinks= of the store alone."
            )
        return sinks or self.quant.sinks

    @property
    def newest_rows(self) -> tuple[RowFormat, RowFormat]:
        """How rows of K and of V are stored among the newest tokens."""
        k, v = self.said.both
        return RowFormat(self.newest["dtype"], k.width), RowFormat(self.newest["v_dtype"], v.width)

    @property
    def names_of_arrays(self) -> list[str]:
        """The names in files of the arrays of the newest tokens and of the codes."""
        return [*ROWS, *self.codes.arrays()]

    @property
    def slot_bytes(self) -> float:
        """Bytes per token and head, as codes and among the newest."""
        return token_bytes(self.codes) + sum(row.stored_width * row.stored.itemsize for row in self.newest_rows)

    def filled(self, lead: tuple[int, int], newest: int, coded: int) -> dict[str, tuple[tuple[int, ...], DType]]:
        """By name: the shapes (*lead, ...) of arrays for this many newest tokens and codes, and their dtypes."""
        arrays: dict[str, tuple[tuple[int, ...], DType]]
        arrays = {name: ((newest, row.width), row.stored) for name, row in zip(ROWS, self.newest_rows, strict=True)}
        codes = self.codes.arrays().items()
        arrays |= {name: ((coded // tokens, *row), dtype) for name, (row, dtype, tokens) in codes}
        return {name: ((*lead, *shape), dtype) for name, (shape, dtype) in arrays.items()}

    def names(self, block_size: int) -> dict[str, tuple[tuple[int, ...], DType]]:
        """The arrays of codes by name, with the shape of a block of `block_size` tokens, and the dtype."""
        arrays, heads = self.codes.arrays().items(), self.codes.heads
        return {name: ((block_size // tokens, heads, *row), dtype) for name, (row, dtype, tokens) in arrays}

    @classmethod
    def checked(
        cls, operation: str, live: runtime.Runtime, heads: int, rows: Mapping[str, Any], row_dtype: Any = None
    ) -> TokenGroupForm:
        """The form that a store's arguments ask for; `row_dtype` is that of the newest keys, None for that of scales.

        Raises:
            OptionError: the caller gave K a scale, or V is grouped along tokens.
            DTypeError, ShapeError: as `RowFormats.checked`.
        """
        quant, v_dtype = parse_aging(rows["dtype"]), rows.get("v_dtype")
        assert quant is not None
        for name, value in (("k_scale", rows.get("k_scale")), ("v_scale", rows.get("v_scale"))):
            if value is not None:
                raise OptionError(
                    f"{operation}: {name} with {quant} is not supported: codes have their own scales, and 8-bit float "
                    "values are stored without one. Leave it out."
                )
        if parse_aging(v_dtype) is not None:
            raise OptionError(
                f"{operation}: v_dtype {v_dtype!r} is not supported: only dtype= says which tokens stay unquantised, "
                "and only keys have scales by channel, over a group of tokens. Use groups along 'head_dim' or a dtype "
                "for V, or leave v_dtype out."
            )
        if isinstance(quant, TileFormat):
            return cls._of_tiles(operation, live, heads, quant, rows, row_dtype)
        return cls._of_groups(operation, live, heads, quant, rows, row_dtype)

    @classmethod
    def _of_tiles(
        cls, operation: str, live: runtime.Runtime, heads: int, tiles: TileFormat, rows: Mapping[str, Any],
        row_dtype: Any,
    ) -> TokenGroupForm:  # fmt: skip
        """`checked` for KVarN, whose newest rows are float16 unless `row_dtype` says otherwise."""
        if live.invariant:
            raise OptionError(
                f"{operation}: {tiles} under tikv.init(invariant=True) is not supported: the tokens of a call see each "
                "other unquantised, so results depend on which call brought a token. Use another format."
            )
        for name, default in (("v_dtype", None), ("scale_dtype", "float16")):
            value = rows.get(name, default)
            if value is not None and str(value) != default:
                raise OptionError(
                    f"{operation}: {name}={value!r} does not apply to {tiles}, which encodes keys and values, with "
                    "float16 scales. Leave it out."
                )
        width = checks.integer(rows.get("head_dim"), "head_dim", operation, low=1)
        width_v = rows.get("head_dim_v")
        width_v = width if width_v is None else checks.integer(width_v, "head_dim_v", operation, low=1)
        for name, n in (("head_dim", width), ("head_dim_v", width_v)):
            check_width(operation, tiles, n, f"{name} is {n}")
        newest = dtypes.float16 if row_dtype is None else dtypes.parse(row_dtype, operation)
        said = RowFormats(
            RowFormat(tiles.reported("keys"), width), RowFormat(tiles.reported("values"), width_v), dtypes.float16
        )
        arguments = {"head_dim": width, "head_dim_v": width_v, "dtype": newest, "v_dtype": newest}
        return cls(tiles, said, arguments, TileForm(heads, tiles, (width, width_v), newest))

    @classmethod
    def _of_groups(
        cls, operation: str, live: runtime.Runtime, heads: int, quant: Quant, rows: Mapping[str, Any], row_dtype: Any
    ) -> TokenGroupForm:
        """`checked` for a `Quant`."""
        v_dtype, scales = rows.get("v_dtype"), rows.get("scale_dtype", "float16")
        values = quant.row.unturned if v_dtype is None else v_dtype
        widths = {name: rows.get(name) for name in ("head_dim", "head_dim_v")}
        scale_dtype = dtypes.parse(scales, operation, offered=quant.row.scale_dtypes)
        key_scales = quant.row.check_scale_dtype(scale_dtype, operation)
        format = parse_format(values)
        v_scales = scales if format is None or format.own_scale_dtype is None else "float16"
        by_row = quant.axis == "head_dim"
        formats = RowFormats.checked(
            operation, live, heads, dtype=quant.row if by_row else key_scales, v_dtype=values, scale_dtype=v_scales,
            **widths,
        )  # fmt: skip
        width, v = formats.k.width, formats.v
        newest = key_scales if row_dtype is None else dtypes.parse(row_dtype, operation)
        newest_v = v.dtype if isinstance(v.dtype, DType) and v.dtype in dtypes.FLOATS else newest
        said = RowFormats(
            RowFormat(quant.by_tokens, width),
            RowFormat(quant.by_tokens, v.width) if v_dtype is None else v,
            key_scales,
        )
        arguments = {
            "head_dim": width, "head_dim_v": v.width, "dtype": newest, "v_dtype": newest_v, "scale_dtype": scales
        }  # fmt: skip
        codes: OlderForm
        if by_row:
            codes = RowForm(heads, quant.group, formats.k, v, formats.scale_dtype, newest)
        else:
            codes = CodeForm(heads, width, quant.row, key_scales, v, formats.scale_dtype, newest)
        return cls(quant, said, arguments, codes)


def room_of(layer: Layer, quant: Aging) -> int:
    """How many tokens of a layer may be codes at a time, in whole groups.

    With a window, these are the tokens that are still seen when a group has just become codes.
    """
    newest, group = 0 if isinstance(quant, TileFormat) else quant.newest, quant.group
    if layer.ring:
        return max(1, -(-(layer.ring - newest) // group)) * group
    return max(1, (layer.slots - newest) // group) * group
