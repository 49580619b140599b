"""What both versions of flash-attention's `flash_attn_func` and `flash_attn_varlen_func` share: they only attend.

Sequences of different lengths are read where they lie: in pages through a table, or one after the other in arrays
(total_k, H, D), which attention takes for one cache of which each sequence sees its own part. Queries become tiles of
equally many; where a query sees keys after its own, the tile is the whole sequence.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tikv import dtypes
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, refuse_backward, runtime_of, view
from tikv.compat import ragged_rows
from tikv.compat.indices import Indices, for_operation, library_of, on_host, refuse_option
from tikv.compat.kvcache import MOST, Arguments, CacheCall, Sight, seen_keys, sight_of, softcap_of
from tikv.compat.ragged_rows import on_device_of
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS, ContiguousLayout
from tikv.ops.attention.options import real
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.plan import Results
from tikv.ops.attention.query_tiles import QueryTiles, query_tiles
from tikv.ops.attention.request import AttendRequest

TILE_ROWS = 128  # query rows of a KV head in a tile, as many as a block of the kernels for prompts takes
TILE_QUERIES_ON_HOST = 16
DENSE = (("q", "B, Sq, Hq, D"), ("k", "B, Sk, H, D"), ("v", "B, Sk, H, D_v"))  # their axes
ONLY_OF_CACHE = ("qv", "q_descale", "k_descale", "v_descale")  # arrays that only the call of a cache knows
OF_CACHE = (*ONLY_OF_CACHE, "softmax_scale", "causal", "window_size", "attention_chunk", "softcap", "num_splits")


class RowsArguments(NamedTuple):
    """The arguments of either version; without `cu_seqlens_q`, sequences of one length, (B, S, heads, D)."""

    operation: str
    q: Any
    k: Any
    v: Any
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = (-1, -1)
    softcap: Any = 0.0
    alibi_slopes: Any = None
    num_splits: Any = 0
    block_table: Any = None
    qv: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    attention_chunk: Any = 0

    def as_of_cache(self, k: Array, v: Array, **options: Any) -> Arguments:
        """The same call with keys and values as a cache that is only read."""
        shared = {name: getattr(self, name) for name in OF_CACHE} | {"operation": self.operation, "q": self.q}
        return Arguments(**shared | {"k_cache": k, "v_cache": v} | options)


def refuse_dropout(operation: str, dropout_p: Any) -> None:
    """Refuse any dropout but 0."""
    if real(dropout_p, "dropout_p", operation) not in (0.0, None):
        refuse_option(operation, dropout_p=(dropout_p, "0.0: these functions are for inference"))


def attend_rows(args: RowsArguments) -> tuple[Any, Any]:
    """(out, lse) of a call of either function.

    Raises:
        TikvError: arguments that do not fit each other.
    """
    operation = args.operation
    sight = sight_of(args.causal, args.window_size, args.attention_chunk, operation)
    splits = checks.integer(args.num_splits, "num_splits", operation) or None
    request = AttendRequest(
        scale=real(args.softmax_scale, "softmax_scale", operation), softcap=softcap_of(args.softcap, operation),
        alibi_slopes=args.alibi_slopes, num_splits=splits, short=True,
    )  # fmt: skip
    as_cache = sight.chunk > 0 or any(getattr(args, name) is not None for name in ONLY_OF_CACHE)
    if args.cu_seqlens_q is not None:
        call = _Ragged(args, request, sight)
        out, lse = call.attend_as_cache() if as_cache else call.attend()
    else:
        out, lse = _dense_as_cache(args) if as_cache else _dense(args, request, sight)
    return refuse_backward((out, lse), args.q, args.k, args.v)  # type: ignore[no-any-return]


def _views(args: RowsArguments, axes: tuple[tuple[str, str], ...]) -> list[ArrayView]:
    """Views of q, k and v, whose axes, and their names, are given."""
    views = []
    for name, names in axes:
        a = view(getattr(args, name), name, args.operation)
        checks.rank(a, (names.count(",") + 1,), name, f"({names})", args.operation)
        views.append(a)
    q, k, v = views
    if k.shape[:-1] != v.shape[:-1] or k.dtype is not v.dtype:
        raise ShapeError(
            f"{args.operation}: k is {describe(k)} and v {describe(v)}; both need one dtype and the same shape but for "
            "the last axis."
        )
    return [q, k, v]


def _dense_as_cache(args: RowsArguments) -> tuple[Any, Any]:
    """What `_dense` gives, by the call that knows all options."""
    q, k, _ = _views(args, DENSE)
    checks.extent(k.shape[0], q.shape[0], "axis 0 of k", args.operation, describe(k))
    return CacheCall(args.as_of_cache(args.k, args.v)).run()


def _dense(args: RowsArguments, request: AttendRequest, sight: Sight) -> tuple[Any, Any]:
    """Attention of sequences with equally many queries, and equally many keys."""
    q, k, v = _views(args, DENSE)
    (batch, queries, heads, _), held = q.shape, k.shape[1]
    out, lse, results = _results(args.q, (batch, queries, heads, v.shape[3]))
    request = request._replace(**seen_keys(sight, queries, held, args.alibi_slopes is not None))
    lengths: Any = held
    if not on_host(args.q):  # a CUDA graph takes no length of the host
        lengths = args.q.new_full((batch,), held, dtype=library_of(args.q).int32)
    caches = Caches(CONTIGUOUS, k.transposed(0, 2, 1, 3), v.transposed(0, 2, 1, 3), lengths)
    attention_call(args.operation, q.transposed(0, 2, 1, 3), caches, request).prepare(None, results).run()
    return handed_over(out), handed_over(lse)


def _results(like: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Results]:
    """New arrays (n, T, Hq, D_v) and (n, Hq, T), and how attention writes them."""
    live, dtype = runtime_of(like), view(like, "q", "").dtype
    out = new_like(like, shape, dtype, live)
    lse = new_like(like, (shape[0], shape[2], shape[1]), dtypes.float32, live)
    to = view(out, "out", "").transposed(0, 2, 1, 3)
    return out, lse, Results(to, True, view(lse, "lse", ""))


def tile_size(sight: Sight, slopes: bool, most: int, group: int, on_host: bool) -> int:
    """How many queries a tile has: of so many at most, all if one of them sees keys after its own."""
    if sight.right > 0 or (sight.right < 0 and (sight.left >= 0 or slopes)):
        return most
    return min(most, TILE_QUERIES_ON_HOST if on_host else -(-TILE_ROWS // group))


def caches_of_rows(k: ArrayView, v: ArrayView, ends_and_starts: Any, sequences: int) -> Caches:
    """Rows (total, H, D) of keys and values as one cache of which each sequence sees its part.

    `ends_and_starts` is (2 * sequences,): the end and the first row of each.
    """
    rows = []
    for a in (k, v):
        (held, heads, width), step = a.shape, a.strides
        rows.append(a.restrided((sequences, heads, held, width), (0, step[1], step[0], step[2])))
    return Caches(ContiguousLayout(starts=True), rows[0], rows[1], ends_and_starts)


class _Packed(NamedTuple):
    """The queries in use, one after the other, if the sequences have more rows than these."""

    starts: Any  # (B + 1,)
    rows: Any  # (total,) the row of each; a valid row after the last of them
    number: Any  # (total,) the number of each row among them; a valid number for rows that are not in use
    inside: Any  # (total,) whether a row is in use


class _Ragged:
    """A call of `flash_attn_varlen_func`, checked when the object is made."""

    def __init__(self, args: RowsArguments, request: AttendRequest, sight: Sight) -> None:
        self.args, self.request, self.sight, self.operation = args, request, sight, args.operation
        self.paged = args.block_table is not None
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table")
        self.index = Indices(self.operation, {name: getattr(args, name) for name in names})
        of_keys = ("N, page, H, D", "N, page, H, D_v") if self.paged else ("total_k, H, D", "total_k, H, D_v")
        self.q, self.k, self.v = _views(args, (("q", "total_q, Hq, D"), ("k", of_keys[0]), ("v", of_keys[1])))
        ragged_rows.require_library(self.operation, {"q": args.q}, "Such a call")
        self.starts = self._starts("cu_seqlens_q", self.q.shape[0], "rows of q")
        self.batch = int(self.starts.shape[0]) - 1
        self.counts = self.starts[1:] - self.starts[:-1]
        if self.index.has("seqused_q"):
            self.counts = self._used("seqused_q", self.counts, "queries")
        self.first, self.lengths = self._keys()
        slopes = args.alibi_slopes
        if slopes is not None:
            a = view(slopes, "alibi_slopes", self.operation)
            if a.shape not in ((self.q.shape[1],), (self.batch, self.q.shape[1])):
                raise ShapeError(f"{self.operation}: alibi_slopes is {describe(a)}; it must be (Hq,) or (B, Hq).")
        self.most = self._most("max_seqlen_q", self.counts, "queries")
        self._most("max_seqlen_k", self.lengths, "keys")

    def attend(self) -> tuple[Any, Any]:
        """(out (total_q, Hq, D_v), lse (Hq, total_q))."""
        args, (total, heads, _) = self.args, self.q.shape
        most = min(self.most, total)
        if not (total and self.batch and most):
            shape = (1, total, heads, self.v.shape[-1])
            out, lse, _ = _results(args.q, shape)
            return _emptied(out[0], 0.0), _emptied(lse[0], -math.inf)
        size = self._tile(most)
        tiles = self._tiles(total, size)
        queries = args.q[on_device_of(tiles.rows, args.q)]
        out, lse, results = _results(args.q, (*queries.shape[:3], self.v.shape[-1]))
        asked = view(queries, "q", self.operation).transposed(0, 2, 1, 3)
        self._call(asked, tiles, size).prepare(None, results).run()
        tile, number, inside = (on_device_of(a, out) for a in (tiles.tile, tiles.number, tiles.inside))
        out = ragged_rows.selected(inside[:, None, None], out[tile, number], 0.0)
        return out, ragged_rows.selected(inside[:, None], lse[tile, :, number], -math.inf).T

    def attend_as_cache(self) -> tuple[Any, Any]:
        """What `attend` gives, by the call that knows all options: over pages of one key if there are no pages."""
        args, index, total = self.args, self.index, self.q.shape[0]
        if not (total and self.batch):
            return self.attend()
        if args.qv is not None:
            ragged_rows.require_library(self.operation, {"q": args.q, "qv": args.qv}, "qv")
            seen = view(args.qv, "qv", self.operation)
            checks.rank(seen, (3,), "qv", "(total_q, Hq, D_v)", self.operation)
            checks.extent(seen.shape[0], total, "axis 0 of qv", self.operation, describe(seen))
        starts, asked, used = self.starts, {"q": args.q, "qv": args.qv}, index.has("seqused_q")
        if used:
            packed = self._packed(total)
            starts, rows = packed.starts, on_device_of(packed.rows, args.q)
            asked = {name: None if a is None else a[rows] for name, a in asked.items()}
        k, v, table = args.k, args.v, args.block_table
        if not self.paged:
            held = self.k.shape[0]
            most = min(held, checks.integer(args.max_seqlen_k, "max_seqlen_k", self.operation))
            table = (self.first[:, None] + index.arange(most)).clip(0, max(0, held - 1))
            k, v = k[:, None], v[:, None]
        out, lse = CacheCall(
            args.as_of_cache(
                k, v, table=table, cu_seqlens_q=starts, cache_seqlens=self.lengths,
                max_seqlen_q=min(self.most, total), table_name="block_table", **asked,
            )
        ).run()  # fmt: skip
        if not used:
            return out, lse
        at, inside = (on_device_of(a, out) for a in (packed.number, packed.inside))
        out = ragged_rows.selected(inside[:, None, None], out[at], 0.0)
        return out, ragged_rows.selected(inside, lse[:, at], -math.inf)

    def _tiles(self, total: int, size: int) -> QueryTiles:
        """The queries in use in tiles of `size`."""
        library, rows = self.index.library, self.index.arange(total)
        if not self.index.has("seqused_q"):
            return query_tiles(library, self.starts, rows, size, self.batch)
        packed = self._packed(total)
        tiles = query_tiles(library, packed.starts, rows, size, self.batch)
        return tiles._replace(
            rows=packed.rows[tiles.rows],
            tile=tiles.tile[packed.number],
            number=tiles.number[packed.number],
            inside=packed.inside,
        )

    def _packed(self, total: int) -> _Packed:
        """The queries in use, one after the other."""
        library, rows, last = self.index.library, self.index.arange(total), total - 1
        starts = self.starts * 0
        starts[1:] = library.cumsum(self.counts, 0)
        apart = (self.starts - starts)[:-1]
        of_row, of_packed = (
            library.searchsorted(a[1:], rows, side="right").clip(0, self.batch - 1) for a in (self.starts, starts)
        )
        return _Packed(
            starts=starts,
            rows=(rows + apart[of_packed]).clip(0, last),
            number=(rows - apart[of_row]).clip(0, last),
            inside=rows < (self.starts[:-1] + self.counts)[of_row],
        )

    def _tile(self, most: int) -> int:
        """How many queries a tile has."""
        group = max(1, self.q.shape[1] // max(1, self.k.shape[-2]))
        return tile_size(self.sight, self.args.alibi_slopes is not None, most, group, self.q.device == "cpu")

    def _call(self, queries: ArrayView, tiles: QueryTiles, size: int) -> Any:
        """The checked call of attention of the tiles."""
        index, args, sequence = self.index, self.args, tiles.sequence
        causal = self.sight.right == 0
        if self.paged:
            table = index.array("block_table", (self.batch, None), "(B, pages)")[sequence]
            held = int(table.shape[1]) * self.k.shape[1]
            lengths = for_operation(tiles.lengths(self.lengths, causal), args.q)
            pools = Caches(PagedLayout(), self.k, self.v, lengths, for_operation(table, args.q))
            return attention_call(self.operation, queries, pools, self._request(size, held, sequence))
        first = self.first[sequence] * tiles.used
        ends = index.library.maximum(tiles.lengths(self.first + self.lengths, causal), first)
        both = index.library.stack((ends, first), 1).reshape(-1)
        caches = caches_of_rows(self.k, self.v, for_operation(both, args.q), int(sequence.shape[0]))
        return attention_call(self.operation, queries, caches, self._request(size, self.k.shape[0], sequence))

    def _request(self, size: int, held: int, sequence: Any) -> AttendRequest:
        """What tiles of so many queries of these sequences see."""
        slopes = self.args.alibi_slopes
        if slopes is not None and len(slopes.shape) == 2:
            slopes = slopes[on_device_of(sequence, slopes)]
        return self.request._replace(alibi_slopes=slopes, **seen_keys(self.sight, size, held, slopes is not None))

    def _starts(self, name: str, end: int | None, what: str) -> Any:
        """An argument (B + 1,) that ascends from 0 to at most `end`."""
        batch = None if name == "cu_seqlens_q" else self.batch + 1
        starts = self.index.array(name, (batch,), "(B + 1,)")
        if not starts.shape[0]:
            raise ShapeError(f"{self.operation}: {name} is empty; it needs one more entry than there are sequences.")
        self.index.check_starts(name, starts, MOST if end is None else end, what)
        return starts

    def _keys(self) -> tuple[Any, Any]:
        """(the first key, the number of keys) of each sequence; the first is 0 in pages."""
        index = self.index
        if not index.has("cu_seqlens_k"):
            if not (self.paged and index.has("seqused_k")):
                raise ShapeError(
                    f"{self.operation}: cu_seqlens_k is missing. Pass where the keys of each sequence start, or, with "
                    "a table of pages, seqused_k."
                )
            first = self.starts[:-1] * 0
            lengths = first
        else:
            starts = self._starts("cu_seqlens_k", None if self.paged else self.k.shape[0], "rows of k")
            lengths = starts[1:] - starts[:-1]
            first = lengths * 0 if self.paged else starts[:-1]
        if index.has("seqused_k"):
            lengths = self._used("seqused_k", lengths if index.has("cu_seqlens_k") else None, "keys")
        if self.paged:
            self._check_pages(lengths)
        return first, lengths

    def _used(self, name: str, most: Any, what: str) -> Any:
        """An argument (B,): how many of the sequence's rows are in use, of so many at most if that is known."""
        used = self.index.array(name, (self.batch,), "(B,)")
        held = used if most is None else most
        self.index.refuse_where(
            (used < 0) | (used > held),
            lambda b: f"{name}{[*b]}={int(used[b])} is not one of 0..{int(held[b])}, the {what} of the sequence.",
        )
        return self.index.library.minimum(used.clip(0), held)

    def _check_pages(self, lengths: Array) -> None:
        """Check the table, if the host knows its values."""
        index, (blocks, page) = self.index, self.k.shape[:2]
        table = index.array("block_table", (self.batch, None), "(B, pages)")
        held = int(table.shape[1]) * page
        index.refuse_where(
            lengths > held,
            lambda b: f"sequence {b[0]} has {int(lengths[b])} keys, and block_table has pages for {held}.",
        )
        starts = index.arange(table.shape[1])[None] * page
        index.refuse_where(
            ((table < 0) | (table >= blocks)) & (starts < lengths[:, None]),
            lambda at: (
                f"sequence {at[0]} has {int(lengths[at[0]])} keys and needs page {int(table[at])} (block_table"
                f"[{at[0]}, {at[1]}]), but there are {blocks}. Use 0..{blocks - 1}."
            ),
        )

    def _most(self, name: str, counts: Any, what: str) -> int:
        """The argument that says the most queries or keys of any sequence."""
        value = getattr(self.args, name)
        if value is None:
            raise OptionError(f"{self.operation}: {name} is missing. Pass the most {what} of any sequence.")
        most = checks.integer(value, name, self.operation, high=MOST)
        self.index.refuse_where(
            counts > most,
            lambda b: (
                f"{name}={most}, but sequence {b[0]} has {int(counts[b])} {what}. Pass the most {what} of any sequence."
            ),
        )
        return int(most)


def _emptied(array: Array, number: float) -> Any:
    """The array, filled with a number."""
    array[...] = number
    return array


def unpacked(operation: str, array: Array, name: str, lead: tuple[str, ...], parts: int) -> Any:
    """The parts of one array (..., parts, H, D), in place.

    Raises:
        ShapeError, DTypeError: it is no such array.
    """
    seen, axes = view(array, name, operation), ", ".join(lead)
    checks.rank(seen, (len(lead) + 3,), name, f"({axes}, {parts}, H, D)", operation)
    checks.extent(seen.shape[len(lead)], parts, f"axis {len(lead)} of {name}", operation, describe(seen))
    whole: Any = array
    places = [(slice(None),) * len(lead) + (part,) for part in range(parts)]
    return [whole[place] for place in places]
