"""What attention over a text has to give: all tokens in float64 under a mask, as the cache's format stores them."""

from typing import Any, NamedTuple

import numpy as np
import oracle
import torch

import tikv
from lives.families import CHUNKED, FULL, SLIDING, WINDOW
from tikv.formats import Aging, TileFormat


class Sight(NamedTuple):
    """Which keys a layer's queries see: its kind and, for full layers of a cache with a window, that and its sinks."""

    kind: str
    window: int | None = None
    sinks: int = 0

    def mask(self, starts: Any, queries: Any, held: int) -> Any:
        """(batch, queries, held): which of the first `held` positions the queries at these positions see.

        `starts` is (batch,), the position of each row's first token that is not padding.
        """
        key, query, start = torch.arange(held)[None, None], queries[None, :, None], starts[:, None, None]
        seen = (key <= query) & (key >= start)
        if self.kind == SLIDING:
            return seen & (key > query - WINDOW)
        if self.kind == CHUNKED:
            return seen & ((key - start) // WINDOW == (query - start) // WINDOW)
        if self.kind == FULL and self.window is not None:
            return seen & ((key - start < self.sinks) | (key > query - (self.window - self.sinks)))
        return seen


def attention(
    query: Any, key: Any, value: Any, mask: Any, scale: float, softcap: Any, sinks: Any, bias: Any = None
) -> Any:
    """(batch, queries, heads, width) float64: softmax attention by its definition. Hidden queries get zeros."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (a.repeat_interleave(query.shape[1] // a.shape[1], 1) for a in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        sinks = sinks.double().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : key.shape[2]]
    return torch.einsum("bhqk,bhkd->bqhd", weights, value)


def format_of(name: str | None) -> Any:
    """What a cache takes as its format for a name here.

    "quant4_32", "quant4_32_hadamard", "tokens4_32" and "older4_32" are a `tikv.Quant`, "tokens" along tokens, "older"
    with first and newest tokens as they came.
    """
    if name is not None and name.startswith(("tokens", "older")):
        bits, group = map(int, name.removeprefix("tokens").removeprefix("older").split("_"))
        if name.startswith("older"):
            return tikv.Quant(bits, group, sinks=4, recent=group + 1)
        return tikv.Quant(bits, group, "tokens", group)
    if name is None or not name.startswith("quant"):
        return name
    bits, group, *rotated = name.removeprefix("quant").split("_")
    return tikv.Quant(int(bits), int(group), rotate="hadamard" if rotated else None)


def as_stored(rows: Any, name: str | None, scale: float | None = None, keys: bool = False) -> Any:
    """The numbers that a cache of this format, and with this ``k_scale`` or ``v_scale``, gives back of float32 rows.

    A rotation is for keys only.
    """
    if name is None:
        return rows
    if name.endswith("_hadamard"):
        plain = name.removesuffix("_hadamard")
        if not keys:
            return as_stored(rows, plain)
        rotated = as_stored(torch.from_numpy(oracle.reference.hadamard(rows.numpy())), plain)
        return torch.from_numpy(oracle.reference.hadamard(rotated.numpy(), back=True))
    numbers = rows.numpy()
    if scale is not None and name == "nvfp4":
        quantised = oracle.reference.quantize_groups(numbers, 4, 16, name, np.float16, scale)
        return torch.from_numpy(oracle.reference.dequantize_groups(*quantised, 4, name) * np.float32(scale))
    if scale is not None:
        return as_stored(rows / np.float32(scale), name) * np.float32(scale)
    if name == "int8":
        return torch.from_numpy(_int8(numbers))
    return torch.from_numpy(np.asarray(oracle.as_stored(numbers, name), np.float32))


def _int8(rows: Any) -> Any:
    """As `tikv.reference.quantize`, for finite rows, all at once."""
    scale = np.maximum(np.abs(rows).max(-1, keepdims=True) / np.float32(127), np.finfo(np.float16).tiny)
    scale = scale.astype(np.float16).astype(np.float32)
    return np.round(np.clip(rows * (np.float32(1) / scale), -127, 127)) * scale


def end_of_codes(form: Aging, sinks: int, end: int, before: int, after: int) -> int:
    """Where the codes of a layer end, 0 without any, when it had `before` tokens and now has `after` in one call.

    Args:
        form: a format in which older tokens are codes.
        sinks: how many first tokens never are.
        end: where the codes ended before.
    """
    end = max(end, sinks)
    if isinstance(form, TileFormat):  # a full tile becomes codes with the next call
        end += max(0, before - end) // form.group * form.group
    for length in range(before, after):
        if length - end == form.newest + form.group:
            end += form.group
    return end if end > sinks else 0


def with_codes(rows: Any, form: Aging, codes: slice, keys: bool) -> Any:
    """The numbers of rows (batch, heads, tokens, width) of which these tokens are codes, and all others as they came.

    Along tokens, keys are groups of tokens by channel, and values groups of columns.
    """
    numbers = rows.float()
    if codes.stop <= codes.start:
        return numbers
    older = np.ascontiguousarray(numbers[:, :, codes].numpy())
    if isinstance(form, TileFormat):
        of = "keys" if keys else "values"
        tiles = oracle.reference.quantize_tiles(older, form.bits(of), form.group, of)
        older = oracle.reference.dequantize_tiles(*tiles, form.bits(of), of)
    else:
        by_channel = keys and form.axis == "tokens"
        older = older.swapaxes(2, 3) if by_channel else older
        quantised = oracle.reference.quantize_groups(
            np.ascontiguousarray(older), form.bits, form.group, "affine", np.float16
        )
        older = oracle.reference.dequantize_groups(*quantised, form.bits, "affine")
        older = older.swapaxes(2, 3) if by_channel else older
    older = torch.from_numpy(np.ascontiguousarray(older))
    return torch.cat((numbers[:, :, : codes.start], older, numbers[:, :, codes.stop :]), 2)
