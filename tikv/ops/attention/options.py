"""A cache's layout, the options of a call, the shape of its queries, and the checks of all three."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import ArrayView, describe
from tikv.errors import CapacityError, DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import format_of
from tikv.ops import checks
from tikv.ops.fixed_scales import check_fixed_scales
from tikv.ops.layouts import Rows, Scale

QUERIES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)


IMPLEMENTATIONS = ("auto", "taichi", "torch")
READ_SCALES = (*dtypes.SCALES, dtypes.float8_e8m0fnu, dtypes.float8_e4m3fn)  # formats check the last two
MOST_ROWS = 8  # query rows that share a pass over the keys


class CacheLayout(NamedTuple):
    """What the memory that attention reads looks like: K and V, how their slots are found, and their scales."""

    k: Rows
    v: Rows
    heads: int
    width: int
    width_v: int
    kind: str  # "linear", "ring" or "table"
    capacity: int  # the greatest length: slots, or tokens that the table can name
    page: int = 0
    blocks: int = 0
    sinks: int = 0
    ring: int = 0
    in_keys: bool = False  # whether V is the first columns of K
    starts: bool = False  # whether lengths are (2 * B,): each sequence's length and its first key that is seen
    scored: bool = False  # K holds products of queries and keys; `k.block` is the step between query rows
    by_channel: bool = False  # K is codes by channel; `k.token` is the step between groups of tokens

    @property
    def alike(self) -> bool:
        """Whether K and V are stored in one format; the keys alone may be rotated."""
        other = self.scored or self.by_channel
        return not other and self.k.storage == self.v.storage and self.k.array.dtype is self.v.array.dtype

    @property
    def scales(self) -> list[Scale]:
        """The scales of K and V, as far as there are any; both have the same strides, unless K's are by channel."""
        return [rows.scale for rows in (self.k, self.v) if rows.scale is not None]

    @property
    def scale_strides(self) -> tuple[int, int, int, int]:
        """The steps, in entries, between the scales of sequences, blocks, tokens and heads; V's if it has scales."""
        scale = self.v.scale or self.k.scale
        return (scale.sequence, scale.block, scale.token, scale.head) if scale else (0, 0, 0, 0)


class AttentionOptions(NamedTuple):
    """The options of a call of attention, without the arrays."""

    scale: float | None = None
    causal: bool = True
    span: int | None = None  # tokens after the sinks that a query sees
    softcap: float | None = None
    splits: int | None = None
    base2: bool = False
    mass: str = ""  # one of `mass.MASSES`, if attention itself gives the mass of each slot
    newer: int = 0  # tokens after its own that a causal query sees; its span counts them too
    short: bool = False  # a length may be less than the number of queries; the first queries then see nothing
    sharded: tuple[int, int] = (0, 0)  # keys per block of this rank, and of other ranks between two; for slopes


class QueryShape(NamedTuple):
    """The sizes and strides of q or of the result."""

    batch: int
    heads: int
    queries: int
    width: int
    strides: tuple[int, int, int]  # those of a sequence, a head, a query


def real(value: Any, name: str, operation: str) -> float | None:
    """A number among the options as a float, so that equal numbers give equal keys."""
    if value is None or type(value) is float:
        return value
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError("float() reads it")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise OptionError(f"{operation}: {name}={value!r} is not a number. Use a float, or None.") from None


MOST_SPLITS = 1024
MOST_QUERIES = 256  # queries of a prompt per launch, which reads all keys that its first to last query see
MOST_WARPGROUP_QUERIES = 1 << 14
INTEGERS = (int, np.integer)


def query_shape(a: ArrayView, name: str, operation: str) -> QueryShape:
    """The shape and strides of q, or of the result.

    Raises:
        ShapeError: it has other axes, or its last one is not contiguous.
    """
    checks.rank(a, (3, 4), name, "(B, Hq, D) or (B, Hq, T, D)", operation)
    checks.readable(a, name, operation)
    tokens, step = (a.shape[2], a.strides[2]) if a.ndim == 4 else (1, 0)
    return QueryShape(a.shape[0], a.shape[1], tokens, a.shape[-1], (a.strides[0], a.strides[1], step))


def check_form(
    operation: str,
    arrays: dict[str, ArrayView],
    query: QueryShape,
    cache: CacheLayout,
    batch: int,
    options: AttentionOptions,
) -> None:
    """Check every remaining precondition of the form of a call."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if q.dtype not in QUERIES:
        raise DTypeError(f"{operation}: q is {describe(q)}; queries must be float32, float16 or bfloat16.")
    for name, a, rows in (("K", k, cache.k), ("V", v, cache.v)):
        if a.dtype not in dtypes.ATTENDED and rows.format is None:
            readable = ", ".join(row.name for row in dtypes.ATTENDED)
            raise DTypeError(f"{operation}: {name} is {describe(a)}; attention reads {readable}.")
        scaled, row = f"{name.lower()}_scale" in arrays, rows.format or format_of(a.dtype)
        if row is not None and row.finds_scales and not scaled:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; {row} needs k_scale and v_scale.")
        if scaled and row is None:
            raise DTypeError(
                f"{operation}: {name} is {describe(a)}; only int8 and 8-bit floats have scales. Leave k_scale and "
                "v_scale out."
            )
    for scale in [s.array for s in cache.scales]:
        if scale.dtype not in READ_SCALES:
            raise DTypeError(f"{operation}: a scale is {describe(scale)}; scales must be float16 or float32.")
        checks.same_dtype(cache.scales[0].array, scale, "k_scale", "v_scale", operation)
    checks.extent(query.batch, batch, "the batch of q", operation, f"q: {describe(q)}, K: {describe(k)}")
    checks.extent(query.width, cache.width, "the head width of q", operation, f"q: {describe(q)}, K: {describe(k)}")
    if cache.heads == 0 or query.heads % cache.heads:
        order = " Heads come before tokens, in q and in caches." * (cache.kind != "table")
        raise ShapeError(
            f"{operation}: {query.heads} query heads do not divide among {cache.heads} KV heads (q: {describe(q)}, K: "
            f"{describe(k)}). Use a multiple of {cache.heads}.{order}"
        )
    for name, a, width in (("K", k, cache.width), ("V", v, cache.width_v)):
        if width == 0:
            raise ShapeError(f"{operation}: {name} is {describe(a)}, of width 0. Use a head width of at least 1.")
    for name, value in (("scale", options.scale), ("softcap", options.softcap)):
        if value is not None and not (math.isfinite(value) and (name == "scale" or value > 0)):
            needed = "finite" if name == "scale" else "positive"
            raise OptionError(f"{operation}: {name}={value} is not a {needed} number.")
    if options.splits is not None:
        checks.integer(options.splits, "num_splits", operation, low=1, high=MOST_SPLITS)
    if "lens" in arrays:
        checks.indices(arrays["lens"], "lengths", operation)
        checks.rank(arrays["lens"], (1, 2), "lengths", "(B,), or (B, H) per KV head", operation)
        count = batch * (2 if cache.starts else 1)
        checks.extent(arrays["lens"].shape[0], count, "the number of lengths", operation, f"K: {describe(k)}")
        if lens_by_head(arrays):
            checks.extent(
                arrays["lens"].shape[1], cache.heads, "the heads of the lengths", operation, f"K: {describe(k)}"
            )
    if "table" in arrays:
        checks.extent(arrays["table"].shape[0], batch, "the batch of block_tables", operation)


def lens_by_head(arrays: dict[str, ArrayView]) -> bool:
    """Whether each KV head has its own length."""
    return "lens" in arrays and arrays["lens"].ndim == 2


def table_by_head(arrays: dict[str, ArrayView]) -> bool:
    """Whether each KV head has its own pages."""
    return "table" in arrays and arrays["table"].ndim == 3


def check_length(length: int, queries: int, limit: int, cache: CacheLayout, what: str, operation: str) -> None:
    """Check that a length is within the cache, and long enough for the queries.

    Raises:
        CapacityError, PositionError: it is not.
    """
    if length > limit:
        holds = f"the table names {cache.capacity} slots" if cache.kind == "table" else f"capacity={cache.capacity}"
        error = PositionError if cache.kind == "table" else CapacityError
        ring = ", or ring=True" if cache.kind != "table" and not operation.startswith("KVCacheStore.") else ""
        raise error(f"{operation}: {what} is {length}, but {holds}. Use lengths of at most {limit}{ring}.")
    if length < 0 or 0 < length < queries:
        raise PositionError(
            f"{operation}: {what} is {length}, and the {queries} queries belong to the newest tokens. Use at least "
            f"{queries}, or 0 for a sequence without tokens."
        )


def check_table(
    operation: str, table: np.ndarray[Any, Any] | None, length: np.ndarray[Any, Any] | int, cache: CacheLayout
) -> None:
    """Check that each block of each context is in the pool; `length` is per sequence, per head, or one for all."""
    if table is None or table.size == 0:
        return
    unsigned = table.view(np.uint32 if table.itemsize == 4 else np.uint64)  # a negative block becomes the greatest
    if np.maximum.reduce(unsigned, axis=None) < cache.blocks:  # all blocks are valid, needed or not
        return
    lens = np.full(len(table), length) if isinstance(length, int) else length
    if table.ndim == 2 and lens.ndim == 2:
        lens = lens.max(axis=1)  # the longest of a sequence's heads, which share its blocks
    elif table.ndim == 3 and lens.ndim == 1:
        lens = np.broadcast_to(lens[:, None], table.shape[:2])
    used = np.arange(table.shape[-1]) < -(-lens.astype(np.int64)[..., None] // cache.page)
    wrong = used & ((table < 0) | (table >= cache.blocks))
    if wrong.any():
        at = tuple(int(x) for x in np.argwhere(wrong)[0])
        raise PositionError(
            f"{operation}: block_tables[{', '.join(map(str, at))}]={int(table[at])} is not one of the pool's "
            f"{cache.blocks} blocks, and the context of {int(lens[at[:-1]])} tokens needs it. Use "
            f"0..{cache.blocks - 1}."
        )


def window_or_none(window: Any, operation: str) -> int | None:
    """The window, checked to be at least one token; or None."""
    return None if window is None else checks.integer(window, "window", operation, low=1)


def are_fixed(arrays: Mapping[str, ArrayView], heads: int, batch: int, operation: str) -> bool:
    """Whether the scales of K and V, as far as there are any, are fixed, as those of 8-bit floats; both lie alike."""
    scales = {name: arrays[name] for name in ("k_scale", "v_scale") if name in arrays}
    if len({a.strides for a in scales.values()}) > 1 and len({a.shape for a in scales.values()}) == 1:
        a, b = (scale.strides for scale in scales.values())
        raise ShapeError(f"{operation}: k_scale has strides {a}, v_scale {b}. Lay them out alike.")
    fixed = all(arrays[name[0]].dtype in dtypes.FLOATS8 for name in scales)
    if scales and fixed:
        check_fixed_scales(tuple(scales.values()), heads, operation, batch)
    return fixed
