"""How a store with groups along tokens keeps rows: the newest unquantised, the older ones as codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.dtypes import DType
from tikv.errors import OptionError
from tikv.formats import GroupFormat, Quant, parse_format
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
    def token_bytes(self) -> float:
        """Bytes per token and head."""
        return sum(math.prod(shape) * dtype.itemsize / tokens for shape, dtype, tokens in self.arrays().values())


class TokenGroupForm(NamedTuple):
    """How rows are stored: as the store reports them, the newest, and the older ones.

    Attributes:
        quant: the format of the keys.
        said: the formats that the store reports.
        newest: the arguments for rows of the newest tokens.
        codes: the form of the older ones.
    """

    quant: Quant
    said: RowFormats
    newest: dict[str, Any]
    codes: CodeForm

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
        return self.codes.token_bytes + sum(row.stored_width * row.stored.itemsize for row in self.newest_rows)

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
        quant, v_dtype = rows["dtype"], rows.get("v_dtype")
        for name, value in (("k_scale", rows.get("k_scale")), ("v_scale", rows.get("v_scale"))):
            if value is not None:
                raise OptionError(
                    f"{operation}: {name} with groups along tokens is not supported: codes have their own scales, "
                    "and 8-bit float values are stored without one. Leave it out."
                )
        if isinstance(v_dtype, Quant) and v_dtype.axis == "tokens":
            raise OptionError(
                f"{operation}: v_dtype {v_dtype!r} is not supported: only keys have scales by channel, over a group "
                f"of tokens. Use groups along 'head_dim' or a dtype for V, or leave v_dtype out."
            )
        scales = rows.get("scale_dtype", "float16")
        values = quant.row if v_dtype is None else v_dtype
        widths = {name: rows.get(name) for name in ("head_dim", "head_dim_v")}
        scale_dtype = dtypes.parse(scales, operation, offered=quant.row.scale_dtypes)
        key_scales = quant.row.check_scale_dtype(scale_dtype, operation)
        format = parse_format(values)
        v_scales = scales if format is None or format.own_scale_dtype is None else "float16"
        formats = RowFormats.checked(
            operation, live, heads, dtype=key_scales, v_dtype=values, scale_dtype=v_scales, **widths
        )
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
        codes = CodeForm(heads, width, quant.row, key_scales, v, formats.scale_dtype, newest)
        return cls(quant, said, arguments, codes)


def room_of(layer: Layer, quant: Quant) -> int:
    """How many tokens of a layer may be codes at a time, in whole groups.

    With a window, these are the tokens that are still seen when a group has just become codes: `residual` are newer.
    """
    residual, group = quant.residual, quant.group
    if layer.ring:
        return max(1, -(-(layer.ring - residual) // group)) * group
    return max(1, (layer.slots - residual) // group) * group
