"""What both versions of flash-attention's `flash_attn_with_kvcache` share: they rotate, append and attend.

A call is checked completely, and its last launch is bound, before a row is written. Attention reads
every cache as pages through a table: a row of a contiguous cache is one page. Left padding and chunks use a table of
single tokens, so that a sequence, or each query, can start at any slot.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, describe, handed_over, new_array, new_like, refuse_backward, runtime_of, view
from tikv.compat import ragged_rows
from tikv.compat.indices import Indices, flag, for_operation, is_number, library_of, refuse_option
from tikv.compat.ragged_rows import RaggedRows, on_device_of
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.ops import checks, paged
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.options import real
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.plan import PlannedCall

INDICES = ("cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens")
MOST = 2**31 - 1


class Arguments(NamedTuple):
    """The arguments of either version, named as in the newer one except for the table."""

    operation: str
    q: Array
    k_cache: Array
    v_cache: Array
    k: Array | None = None
    v: Array | None = None
    qv: Array | None = None
    rotary_cos: Array | None = None
    rotary_sin: Array | None = None
    cache_seqlens: Array | int | None = None
    cache_batch_idx: Array | None = None
    cache_leftpad: Array | None = None
    table: Array | None = None
    cu_seqlens_q: Array | None = None
    cu_seqlens_k_new: Array | None = None
    max_seqlen_q: Any = None
    rotary_seqlens: Array | None = None
    q_descale: Array | None = None
    k_descale: Array | None = None
    v_descale: Array | None = None
    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = (-1, -1)
    attention_chunk: Any = 0
    softcap: Any = 0.0
    rotary_interleaved: Any = True
    alibi_slopes: Array | None = None
    num_splits: Any = 0
    table_name: str = "page_table"


class Sight(NamedTuple):
    """The keys that a query sees: how many before and after its own (-1: all), and its chunk's size (0: no chunks).

    With ``Sight(left=2, right=0, chunk=0)`` a query sees its own key and the two before.
    """

    left: int
    right: int
    chunk: int


class Layout(NamedTuple):
    """Where the tokens of each sequence lie: on pages of a table, even if each row of the cache is one page."""

    table: Any  # (B, pages)
    page: int  # tokens per page
    before: Any  # (B,) tokens before the call
    lengths: Any  # (B,) with the new ones
    pads: Any  # (B,) slots before the first token; None for 0
    rows: Any = None  # (B,) the row of the cache, or of the table, that each sequence uses; None for its own number

    @property
    def capacity(self) -> int:
        """The number of slots of a sequence."""
        return int(self.table.shape[1]) * self.page


class Joint(NamedTuple):
    """K and V of a call with `qv` as adjacent columns of one array, which holds the keys of the joint queries."""

    keys: ArrayView
    values: ArrayView
    k_first: bool  # whether the columns of K come first
    layout: Layout
    copies: tuple[PlannedCall, ...] = ()  # what brings the rows there, if the caller's K and V are apart


class CacheCall:
    """A call of either version, checked when the object is made; `run` executes it.

    Raises:
        TikvError: arguments that do not fit each other or the cache. Nothing is written.
    """

    def __init__(self, args: Arguments) -> None:
        self.args, self.operation = args, args.operation
        arrays = {name: getattr(args, name) for name in INDICES} | {args.table_name: args.table}
        lengths = None if is_number(args.cache_seqlens) else args.cache_seqlens
        self.index = Indices(self.operation, arrays | {"cache_seqlens": lengths})
        self.views = self._views()
        self.asked = rows_of = ragged_rows.rows_of(self.index, "q", self.views["q"].shape, "cu_seqlens_q")
        self.batch = int(rows_of.counts.shape[0])
        self.queries = self._most_queries()
        self.sight = sight_of(args.causal, args.window_size, args.attention_chunk, args.operation)
        added = self._new_rows()
        self.layout = self._layout(added)
        self.rotated_from = self.layout.before
        if self.index.has("rotary_seqlens"):
            self.rotated_from = self.index.array("rotary_seqlens", (self.batch,), "(B,)")
        self._check_options()
        self.joint = None if args.qv is None else self._adjacent() or self._copied()
        queries = self._queries()
        self.write = None
        if added is not None:
            k, v = self._rows("k", added, True), self._rows("v", added, False, rotate=False)
            slots = for_operation(self._slots(added), args.k_cache)
            caches = self.views["k_cache"], self.views["v_cache"]
            self.write = paged.slots_call(self.operation, k, v, *caches, slots)
            self.write.prepare()
        if self.joint is not None:
            self.layout = self.joint.layout
        self.out, self.lse, self.attention = self._attention(queries)

    def run(self) -> tuple[Any, Any]:
        """Write the new rows, then return (out, lse)."""
        if self.write is not None:
            self.write.run()
        for copy in self.joint.copies if self.joint else ():
            copy.run()
        self.attention.run()
        q, k_cache, v_cache, k, v, qv = self.args[1:7]
        results = handed_over(self.out), handed_over(self.lse)
        out, lse = refuse_backward(results, q, k_cache, v_cache, k, v, qv)
        library = library_of(out)
        if self.views["q"].dtype in dtypes.FLOATS8:
            out = out.astype(dtypes.bfloat16.numpy) if library is np else out.bfloat16()
        if self.sight.chunk:
            lse = np.swapaxes(lse, 1, 2) if library is np else lse.transpose(1, 2)
        if not self.index.has("cu_seqlens_q"):
            return out, lse
        asked = self.asked
        at = asked.number - asked.counts[asked.sequence] + self.queries
        at = self.index.library.clip(at, 0, max(0, self.queries - 1))  # valid for rows of no sequence too
        row, at, inside = (on_device_of(a, out) for a in (asked.sequence, at, asked.inside))
        out = ragged_rows.selected(inside[:, None, None], out[row, at], 0.0)
        return out, ragged_rows.selected(inside[:, None], lse[row, :, at], -math.inf).T

    def _views(self) -> dict[str, ArrayView]:
        """Views of the given arrays; checks their numbers of axes, and that arrays of a pair are both given.

        Raises:
            ShapeError, DTypeError: they are not.
        """
        args, operation = self.args, self.operation
        for names in (("k", "v"), ("rotary_cos", "rotary_sin")):
            if len({getattr(args, name) is None for name in names}) == 2:
                raise ShapeError(f"{operation}: {' and '.join(names)} must both be given, or neither.")
        queries, new = ("cu_seqlens_q", "Sq"), ("cu_seqlens_k_new", "S_new")
        views = {}
        for name, (starts, tokens), axes in (
            ("q", queries, "Hq, D"), ("qv", queries, "Hq, D_v"), ("k", new, "H, D"), ("v", new, "H, D_v"),
            ("k_cache", ("", "S"), "H, D"), ("v_cache", ("", "S"), "H, D_v"),
        ):  # fmt: skip
            array = getattr(args, name)
            if array is None and name in ("qv", "k", "v"):
                continue
            a = views[name] = view(array, name, operation)
            ragged = bool(starts) and self.index.has(starts)
            shape = f"(total, {axes})" if ragged else f"(B, {tokens}, {axes})"
            checks.rank(a, (3,) if ragged else (4,), name, shape, operation)
        q, k, v = views["q"], views.get("k"), views.get("v")
        if k is not None and v is not None and v.shape[:-2] != k.shape[:-2]:
            raise ShapeError(f"{operation}: k is {describe(k)} and v {describe(v)}; both need the same number of rows.")
        if k is None and self.index.has("cu_seqlens_k_new"):
            raise ShapeError(f"{operation}: cu_seqlens_k_new is given without k and v. Pass them too, or leave it out.")
        if "qv" in views and views["qv"].shape != (*q.shape[:-1], views["v_cache"].shape[-1]):
            raise ShapeError(
                f"{operation}: qv is {describe(views['qv'])} where {(*q.shape[:-1], views['v_cache'].shape[-1])} is "
                f"needed: one query of v_cache's width for each query of q."
            )
        return views

    def _most_queries(self) -> int:
        """The most queries that a sequence has."""
        most, index = self.args.max_seqlen_q, self.index
        if most is not None:
            most = checks.integer(most, "max_seqlen_q", self.operation, high=MOST)
        if not index.has("cu_seqlens_q"):
            return self.views["q"].shape[1]
        if most is None:
            raise ShapeError(
                f"{self.operation}: max_seqlen_q is missing. With cu_seqlens_q, pass the largest number of queries "
                "of any sequence."
            )
        counts = self.asked.counts
        index.refuse_where(
            counts > most,
            lambda b: (
                f"max_seqlen_q={most}, but sequence {b[0]} has {int(counts[b])} queries. Pass the largest number of "
                "queries of any sequence."
            ),
        )
        return int(most)

    def _new_rows(self) -> RaggedRows | None:
        if "k" not in self.views:
            return None
        rows = ragged_rows.rows_of(self.index, "k", self.views["k"].shape, "cu_seqlens_k_new")
        if rows.counts.shape[0] != self.batch:
            q, k, v = (describe(self.views[name]) for name in "qkv")
            raise ShapeError(
                f"{self.operation}: q is {q}, k {k} and v {v}; k and v must have the {self.batch} sequences of q."
            )
        return rows

    def _layout(self, added: RaggedRows | None) -> Layout:
        """Where the tokens of the sequences lie; checks that there is room for the new ones."""
        index, name, batch, page = self.index, self.args.table_name, self.batch, self.views["k_cache"].shape[1]
        indices = index.array("cache_batch_idx", (batch,), "(B,)") if index.has("cache_batch_idx") else None
        if index.has(name):
            table = index.array(name, (batch if indices is None else None, None), "(B, pages)")
            if indices is not None:
                rows = table.shape[0]
                wrong = (indices < 0) | (indices >= rows)
                index.refuse_where(
                    wrong,
                    lambda b: f"cache_batch_idx{[*b]}={int(indices[b])} is not a row of the {name}. Use 0..{rows - 1}.",
                )
                table = table[index.library.clip(indices, 0, max(0, table.shape[0] - 1))]
        else:
            table = (index.arange(batch) if indices is None else indices)[:, None]
        if index.has("cache_seqlens"):
            before = index.array("cache_seqlens", (batch,), "(B,)")
        else:
            number = self.args.cache_seqlens
            if number is None:
                number = table.shape[1] * page
            before = index.arange(batch) * 0 + checks.integer(number, "cache_seqlens", self.operation, high=MOST)
        counts = before * 0 if added is None else added.counts
        pads = index.array("cache_leftpad", (batch,), "(B,)") if index.has("cache_leftpad") else None
        layout = Layout(table, page, before, before + counts, pads, indices)
        self._check_layout(layout, counts)
        return layout

    def _check_layout(self, layout: Layout, counts: Any) -> None:
        """Check lengths, pages and padding, if the host knows their values."""
        index, blocks, capacity = self.index, self.views["k_cache"].shape[0], layout.capacity
        table, before, lengths, pads = layout.table, layout.before, layout.lengths, layout.pads
        name = self.args.table_name
        index.refuse_where(
            (before < 0) | (lengths > capacity),
            lambda b: (
                f"cache_seqlens{[*b]}={int(before[b])} and {int(counts[b])} new tokens do not fit the {capacity} slots "
                f"of {f'a row of {name}' if index.has(name) else 'a sequence'}. Lengths must be at least 0, and the "
                "cache needs room for all tokens."
            ),
        )
        starts = index.arange(table.shape[1])[None] * layout.page
        index.refuse_where(
            ((table < 0) | (table >= blocks)) & (starts < lengths[:, None]),
            lambda at: (
                f"sequence {at[0]} has {int(lengths[at[0]])} tokens and needs {self._named(layout, *at)}, but the "
                f"cache has {blocks}. Use 0..{blocks - 1}."
            ),
        )
        if pads is not None:
            index.refuse_where(
                (pads < 0) | (pads > lengths),
                lambda b: (
                    f"cache_leftpad{[*b]}={int(pads[b])} leaves {int(lengths[b] - pads[b])} tokens. Use 0 to "
                    f"{int(lengths[b])}."
                ),
            )

    def _named(self, layout: Layout, sequence: int, number: int) -> str:
        """A page or row of the cache, and the entry of an argument that names it."""
        name, block, rows = self.args.table_name, int(layout.table[sequence, number]), layout.rows
        if self.index.has(name):
            return f"page {block} ({name}[{sequence if rows is None else int(rows[sequence])}, {number}])"
        return f"row {block}" if rows is None else f"row {block} (cache_batch_idx[{sequence}])"

    def _check_options(self) -> None:
        """Check that the arrays of the arithmetic before the launches are of one kind and fit each other.

        Raises:
            OptionError, ShapeError, DTypeError: they do not.
        """
        args, operation, views = self.args, self.operation, self.views
        queries = {"q": args.q}
        if args.rotary_cos is not None:
            if args.k is None:
                raise OptionError(f"{operation}: rotary_cos is given without k and v. Pass them too, or leave it out.")
            flag(args.rotary_interleaved, "rotary_interleaved", operation)
            tables = {"rotary_cos": args.rotary_cos, "rotary_sin": args.rotary_sin}
            ragged_rows.require_library(operation, queries | {"k": args.k} | tables, "Rotation")
            cos, sin = (view(a, name, operation) for name, a in tables.items())
            ragged_rows.check_rotation(cos, sin, self.layout.capacity, views["q"].shape[-1], operation)
        for name, of in (("q_descale", "q"), ("k_descale", "k_cache"), ("v_descale", "v_cache")):
            descale = getattr(args, name)
            if descale is None:
                continue
            if args.qv is not None:
                raise OptionError(
                    f"{operation}: {name} is given with qv, which is for values of 16 or 32 bits. Leave one out."
                )
            if views[of].dtype not in dtypes.FLOATS8:
                raise OptionError(
                    f"{operation}: {name} scales 8-bit floats, but {of} is {views[of].dtype}. Leave {name} out."
                )
            seen, shape = view(descale, name, operation), (self.batch, views["k_cache"].shape[2])
            if seen.dtype is not dtypes.float32 or seen.shape != shape:
                raise ShapeError(f"{operation}: {name} is {describe(seen)}; it must be float32 (B, H) = {shape}.")
            ragged_rows.require_library(operation, queries | {name: descale}, "A descale")
        if args.qv is not None:
            ragged_rows.require_library(operation, queries | {"qv": args.qv}, "qv")
        if self.sight.chunk or self.index.has("cu_seqlens_q") or views["q"].dtype in dtypes.FLOATS8:
            ragged_rows.require_library(operation, queries, "Such a call")

    def _slots(self, added: RaggedRows) -> Any:
        """The slot of each new row; -1, which is not written, if the device finds no room for a row."""
        index, layout = self.index, self.layout
        position = layout.before[added.sequence] + added.number
        nowhere = index.library.zeros_like(position) - 1
        if not layout.capacity:
            return nowhere
        page = index.library.clip(position // layout.page, 0, layout.table.shape[1] - 1)
        block = layout.table[added.sequence, page]
        fits = added.inside & (position >= 0) & (position < layout.capacity) & (block >= 0)
        return index.library.where(fits, block * layout.page + position % layout.page, nowhere)

    def _rows(self, name: str, rows: RaggedRows, by_number: bool, rotate: bool = True) -> Any:
        """The rows (total, heads, D) of q, k or v, rotated by their sequence's start, and perhaps by their number."""
        args, index = self.args, self.index
        x, ragged = getattr(args, name), index.has("cu_seqlens_q" if name == "q" else "cu_seqlens_k_new")
        if not ragged:
            x = ragged_rows.flat(x, name, self.operation) if not rotate else x.reshape(-1, *x.shape[2:])
        if not rotate or args.rotary_cos is None:
            return x
        held = args.rotary_cos.shape[0]
        position = self.rotated_from[rows.sequence] + (rows.number if by_number else 0)
        index.refuse_where(
            rows.inside & ((position < 0) | (position >= held)),
            lambda t: (
                f"row {t[0]} of {name} is at position {int(position[t])}, and rotary_cos and rotary_sin have positions "
                f"0..{held - 1}. Use positions within them, or pass longer tables."
            ),
        )
        position = on_device_of(index.library.clip(position, 0, held - 1), x)
        return ragged_rows.rotated(x, position, args.rotary_cos, args.rotary_sin, bool(args.rotary_interleaved))

    def _queries(self) -> Any:
        """The queries for attention, (B, T, Hq, D), with qv of D + D_v, in a dtype that it reads.

        If sequences have different numbers of queries, each one's are the last of its T; the others are not used.
        """
        args, views, beside = self.args, self.views, self.args.qv
        queries, shape = args.q, (self.batch, self.queries, *views["q"].shape[-2:])
        if args.rotary_cos is not None:
            by_number = self.sight != Sight(-1, -1, 0)
            queries = self._rows("q", self.asked, by_number)
        if self.index.has("cu_seqlens_q"):
            starts = self.index.array("cu_seqlens_q", (None,), "(B + 1,)")
            row = starts[1:, None] - self.queries + self.index.arange(self.queries)
            row = on_device_of(self.index.library.clip(row, 0, max(0, queries.shape[0] - 1)), queries)
            if not queries.shape[0]:
                row = row[:, :0]
            queries, beside = queries[row], None if beside is None else beside[row]
        elif args.rotary_cos is not None:
            queries = queries.reshape(shape)
        if views["q"].dtype in dtypes.FLOATS8:
            queries, beside = ragged_rows.wide(queries), None if beside is None else ragged_rows.wide(beside)
        if args.q_descale is not None:
            queries = queries * _by_query_head(args.q_descale, shape[2])
        if beside is None:
            return queries
        parts = [queries, beside]
        return ragged_rows.joined(parts[::-1] if self.joint and not self.joint.k_first else parts)

    def _adjacent(self) -> Joint | None:
        """K and V in place, if they are adjacent columns of one array."""
        k, v = self.views["k_cache"], self.views["v_cache"]
        width, size = k.shape[3] + v.shape[3], k.dtype.itemsize
        apart = (v.ptr + v.offset) - (k.ptr + k.offset)
        alike = (k.shape[:3], k.strides, k.dtype, k.device) == (v.shape[:3], v.strides, v.dtype, v.device)
        if alike and k.handle is v.handle and apart in (k.shape[3] * size, -v.shape[3] * size):
            first, k_first = (k, True) if apart > 0 else (v, False)
            return Joint(first.restrided((*k.shape[:3], width), k.strides), v, k_first, self.layout)
        return None

    def _copied(self) -> Joint:
        """A copy of the tokens of each sequence, with K and V as columns of one array.

        Raises:
            ShapeError, DTypeError: K and V do not fit each other.
        """
        index, layout, (k, v) = self.index, self.layout, (self.views["k_cache"], self.views["v_cache"])
        if k.shape[:3] != v.shape[:3] or k.dtype is not v.dtype:
            raise (ShapeError if k.dtype is v.dtype else DTypeError)(
                f"{self.operation}: k_cache is {describe(k)} and v_cache {describe(v)}; with qv, both need the same "
                "dtype, and the same shape but for the last axis."
            )
        most = layout.capacity
        if index.known:
            most = int(max(layout.lengths, default=0))
        token = index.arange(most)
        slots = index.library.zeros_like(layout.lengths[:, None] + token) - 1
        if most:
            block = layout.table[:, token // layout.page]
            inside = (token < layout.lengths[:, None]) & (block >= 0) & (block < k.shape[0])
            slots = index.library.where(inside, block * layout.page + token % layout.page, slots)
        slots = for_operation(slots.reshape(-1), self.args.k_cache)
        (heads, width), rows, live = k.shape[2:], self.batch * most, runtime_of(self.args.k_cache)
        both = new_array((rows, heads, width + v.shape[3]), k.dtype, live, zeroed=not index.known)
        copies = []
        for a, first, columns in ((k, 0, width), (v, width, v.shape[3])):
            to = both.restrided((rows, heads, columns), both.strides, first)
            copies.append(paged.gather_call(self.operation, a, slots, rows, layout="NHD", out=to, by_slot=True)[0])
            copies[-1].prepare()
        step = both.strides
        keys = both.restrided((self.batch, most, heads, both.shape[2]), (most * step[0], *step))
        values = keys.restrided((*keys.shape[:3], v.shape[3]), keys.strides, width)
        there = layout._replace(table=index.arange(self.batch)[:, None], page=most, rows=None)
        return Joint(keys, values, True, there, tuple(copies))

    def _attention(self, queries: Array) -> tuple[Any, Any, Any]:
        """(out, lse, what computes them) for (B, T, Hq, D) queries; every step that can fail is done."""
        args, views, layout, sight = self.args, self.views, self.layout, self.sight
        k, v = self.joint[:2] if self.joint else (views["k_cache"], views["v_cache"])
        scale = real(args.softmax_scale, "softmax_scale", self.operation)
        scales = self._descales()
        batch, most, heads = queries.shape[:3]
        asked = view(queries, "q", self.operation)
        out = new_like(queries, (batch, most, heads, v.shape[3]), asked.dtype, runtime_of(queries))
        to, table, lengths = view(out, "out", self.operation), layout.table, layout.lengths
        if sight.chunk:
            starts, lengths, reach = self._chunks(most)
            table, (k, v) = self._token_table(self.index.repeat(table, most), starts, reach, (k, v))
            scales = {name: _repeated(a, most) for name, a in scales.items()}
            queries, seen = queries.reshape(batch * most, *queries.shape[2:]), {}
            to = to.restrided((batch * most, heads, v.shape[3]), to.strides[1:])
            lse = new_like(queries, (batch, most, heads), dtypes.float32, runtime_of(queries))
            to_lse = view(lse, "lse", self.operation).restrided((batch * most, heads), (heads, 1))
            asked = view(queries, "q", self.operation)
        else:
            if layout.pads is not None:
                table, (k, v) = self._token_table(table, layout.pads, layout.capacity, (k, v))
                lengths = lengths - layout.pads
            seen = seen_keys(sight, most, layout.capacity, args.alibi_slopes is not None)
            asked, to = asked.transposed(0, 2, 1, 3), to.transposed(0, 2, 1, 3)
            lse = new_like(queries, (batch, heads, most), dtypes.float32, runtime_of(queries))
            to_lse = view(lse, "lse", self.operation)
        softcap = softcap_of(args.softcap, self.operation)
        splits = checks.integer(args.num_splits, "num_splits", self.operation)
        pools = Caches(PagedLayout(), k, v, for_operation(lengths, args.q), for_operation(table, args.q), **scales)
        request = AttendRequest(
            scale=scale, softcap=softcap, alibi_slopes=args.alibi_slopes, num_splits=splits or None,
            short=True, **seen,
        )  # fmt: skip
        ready = attention_call(self.operation, asked, pools, request).prepare(None, Results(to, True, to_lse))
        return out, lse, ready._replace(owners=(*ready.owners, queries, scales))

    def _descales(self) -> dict[str, Any]:
        """The scales of K and V per sequence and head, as options of attention: both, or neither."""
        args = self.args
        one = args.v_descale if args.k_descale is None else args.k_descale
        if one is None:
            return {}
        scales = {}
        for name, descale in (("k_scale", args.k_descale), ("v_scale", args.v_descale)):
            library = library_of(one)
            scale = library.ones_like(one) if descale is None else descale
            scales[name] = np.ascontiguousarray(scale) if library is np else scale.contiguous()
        return scales

    def _chunks(self, queries: int) -> tuple[Any, Any, int]:
        """(first slot, number of tokens) of its chunk that each of (B * T) queries sees, and the most tokens of any."""
        library, layout, sight = self.index.library, self.layout, self.sight
        pads = layout.pads if layout.pads is not None else layout.before * 0
        held = (layout.lengths - pads)[:, None]
        positions = held - queries + self.index.arange(queries)
        low = positions - positions % sight.chunk
        high = library.minimum(low + sight.chunk, held)
        if sight.left >= 0:
            low = library.maximum(low, positions - sight.left)
        if sight.right >= 0:
            high = library.minimum(high, positions + sight.right + 1)
        low = library.clip(low, 0, None)
        count = library.clip(high - low, 0, None)
        return (pads[:, None] + low).reshape(-1), count.reshape(-1), min(sight.chunk, layout.capacity)

    def _token_table(
        self, table: Array, starts: Array, most: int, caches: tuple[ArrayView, ArrayView]
    ) -> tuple[Any, tuple[ArrayView, ArrayView]]:
        """A table (R, most) of single tokens from (R,) slots on, made from a table (R, pages); and such caches.

        Raises:
            ShapeError: the tokens of a cache do not follow each other with one stride.
        """
        seen = [_by_token(a, self.operation) for a in caches]
        apart = seen[0][1]
        if seen[1][1] != apart:
            raise ShapeError(
                f"{self.operation}: rows of k_cache lie {apart} tokens apart and those of v_cache {seen[1][1]}. With "
                f"cache_leftpad or attention_chunk, both need the same layout."
            )
        last, page = max(0, self.layout.capacity - 1), max(1, self.layout.page)
        slot = self.index.library.clip(starts[:, None] + self.index.arange(most), 0, last)
        block = self.index.take(table, slot // page)
        return block * apart + slot % page, (seen[0][0], seen[1][0])


def _by_token(a: ArrayView, operation: str) -> tuple[ArrayView, int]:
    """A cache (N, page, H, D) as pages of one token, and the step in tokens from one page to the next."""
    (blocks, page, heads, width), (row, token, head, last) = a.shape, a.strides
    apart = 1 if page == 1 else page
    if page == 1:
        token = row
    elif blocks > 1:
        if token == 0 or row % token:
            raise ShapeError(
                f"{operation}: the rows of a cache ({describe(a)}, strides {a.strides} elements) are not a whole "
                f"number of tokens apart. cache_leftpad and attention_chunk need a cache whose rows are."
            )
        apart = row // token
    tokens = (blocks - 1) * apart + page if blocks else 0
    return a.restrided((tokens, 1, heads, width), (token, token, head, last)), apart


def sight_of(causal: Any, window_size: Any, chunk: Any, operation: str) -> Sight:
    """The keys that queries see, from the options.

    Raises:
        OptionError: a window that is not a pair of integers.
    """
    causal = flag(causal, "causal", operation)
    chunk = checks.integer(chunk, "attention_chunk", operation, high=MOST)
    try:
        left, right = window_size
        if isinstance(left, bool) or isinstance(right, bool):
            raise TypeError("not a number but a truth value")
        left, right = operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        accepted = "(left, right), integers, -1 for unlimited"
        refuse_option(operation, window_size=(window_size, accepted))
    return Sight(min(left, MOST) if left >= 0 else -1, 0 if causal else min(right, MOST) if right >= 0 else -1, chunk)


def softcap_of(value: Any, operation: str) -> float | None:
    """The soft cap; these libraries write 0 for no soft cap.

    Raises:
        OptionError: it is negative, or not a number.
    """
    softcap = real(value, "softcap", operation)
    if softcap is not None and softcap < 0:
        refuse_option(operation, softcap=(value, "0 for none, or a positive number"))
    return softcap or None


def seen_keys(sight: Sight, queries: int, capacity: int, slopes: bool) -> dict[str, Any]:
    """The keys that queries see, as options of attention."""
    farthest = capacity + queries  # from a query before the first token to the last one
    left, right = min(sight.left, farthest), min(sight.right, farthest)
    if queries == 1:  # no token comes after it
        right = 0
    if right < 0 and left < 0 and not slopes:
        return {"causal": False}
    newer = right if right >= 0 else farthest
    return {"causal": True, "newer": newer, "window": None if left < 0 else left + 1 + newer}


def _by_query_head(descale: Any, heads: int) -> Any:
    """(B, H) as (B, 1, Hq, 1): one number for each query head."""
    group = heads // max(1, descale.shape[1])
    spread = np.repeat(descale, group, 1) if isinstance(descale, np.ndarray) else descale.repeat_interleave(group, 1)
    return spread[:, None, :, None]


def _repeated(array: Array, times: int) -> Any:
    """Each row repeated `times` times."""
    return np.repeat(array, times, 0) if isinstance(array, np.ndarray) else array.repeat_interleave(times, 0)
