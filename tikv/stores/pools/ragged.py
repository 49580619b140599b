"""Attention of the new tokens of several sequences over pages; each sequence may have any number of new tokens.

All sequences of a launch have the same number of queries. So neighbouring sequences with equally many new tokens share
a launch, and a long prompt takes several, each of which reads no further than its last query sees.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, Host, handed_over, new_like, to_device, view
from tikv.errors import ShapeError
from tikv.ops.attention.call import AttentionCall, attention_call
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import fill
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.paged import check_paged_queries
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.attention.terms import check_parents, check_scores, tree_of
from tikv.ops.indices import host_integers
from tikv.ops.staging import KnownOnHost, Staging
from tikv.runtime import Runtime
from tikv.stores.layers.attend import results_of
from tikv.stores.layers.queries import rows_first, rows_of_queries
from tikv.stores.layers.unkept import UnkeptTokens
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.shared_prefix import Neighbours, SharedAttention, pool_call, serves


class RaggedAttention:
    """Queries of several sequences' new tokens, checked against a layer's pools before anything is written.

    Args:
        operation, pages, layer, request: those of the call.
        q: the queries, (T, Hq, D) or head-major (Hq, T, D).
        sequences: how many sequences there are.
        terms: views of what is added to the scores, and of which new tokens queries see.
    """

    def __init__(
        self,
        operation: str,
        pages: Pages[LayerPools],
        layer: int,
        q: Array,
        request: AttendRequest,
        sequences: int,
        terms: Mapping[str, ArrayView],
    ) -> None:
        config = self._config = pages.config
        self.operation, self.live, self.caller_q = operation, pages.runtime, q
        self.layout = request.layout
        of_pools = config.num_kv_heads, config.rows.k.width
        self.q = rows_of_queries(operation, view(q, "q", operation), self.layout, *of_pools, self.live)
        self.return_lse = request.return_lse
        self.mass, self._to_mass = request.asked_mass(operation), None
        self._two_sided = request.in_block(operation, self.q.shape[0])  # last queries of a sequence that see all
        self._caches, self._request, self._tables = pages.pools.caches[layer], request, pages.tables
        self._block = pages.block
        check_scores(operation, terms, sequences, self.q.shape[1], self.live)
        self._check(_as_sequences(self.q, 0, 1, self.q.shape[0]), {})
        self._check_tree(terms, sequences)
        self._terms = terms
        if terms:
            stage = Staging(self.live, list(terms.values()), [False] * len(terms))
            self._terms = dict(zip(terms, stage.arrays, strict=True))

    def _check(self, q: ArrayView, terms: Mapping[str, ArrayView]) -> None:
        """Raise unless queries (sequences, Hq, T, D) fit these pools."""
        heads = self._config.num_kv_heads if self._config.per_head else None
        check_paged_queries(self.operation, q, self._caches, self._request, terms, heads)

    def _check_tree(self, terms: Mapping[str, ArrayView], sequences: int) -> None:
        """Raise unless a mask or tree fits new tokens that are equally many for each sequence."""
        name = tree_of(terms)
        if not name or not sequences:
            return
        tokens = self.q.shape[0] // sequences
        if tokens * sequences != self.q.shape[0] or tokens > MOST_QUERIES:
            raise ShapeError(
                f"{self.operation}: {name.removesuffix('_bits')} is given, and q has {self.q.shape[0]} rows for "
                f"{sequences} sequences. Pass the same number of new tokens for each, at most {MOST_QUERIES}."
            )
        if tokens:
            self._check(_as_sequences(self.q, 0, sequences, tokens), terms)
        if "parents" in terms:
            check_parents(self.operation, terms["parents"], self.live)

    def _call(
        self, q: ArrayView, table: ArrayView, lens: Any, terms: Mapping[str, ArrayView], causal: bool = True
    ) -> AttentionCall:
        caches = self._caches._replace(table=table, lens=lens)
        request = self._request if causal else self._request._replace(causal=False)
        return attention_call(self.operation, q, caches, request, terms=terms)

    def take_mass(self, sequences: int, longest: int, rows: Sequence[ArrayView]) -> None:
        """Take the array that gets the mass, for heads that hold up to `longest` tokens; raises if it does not fit."""
        if self.mass.kind:
            shape = sequences, self._config.num_kv_heads, longest
            read = {"q": self.q, **dict(zip("kv", rows, strict=True))}
            self._to_mass = self.mass.array(self.operation, self.caller_q, shape, self.live, read)

    def attend(self, cu_seqlens: Sequence[int], tables: ArrayView, lens: ArrayView, ends: Host) -> Any:
        """Attention over the tokens that the pools hold now, the new ones included.

        Args:
            cu_seqlens: which rows belong to which sequence.
            tables, lens: (B, blocks) and (B,), on the device; or (B, H, blocks) and (B, H).
            ends: the same lengths, on the host.

        Returns:
            (T, Hq, D_v), and with `return_lse` (T, Hq), or in the layout of the queries; 0 and -inf after the last of
            `cu_seqlens`. With mass also (B, H, longest).
        """
        rows, heads, live = self.q.shape[0], self.q.shape[1], self.live
        lead = (rows, heads) if self.layout == "token_major" else (heads, rows)
        tokens = rows // max(1, len(ends))
        if (
            not self.mass.kind
            and not self._two_sided
            and 0 < tokens <= MOST_QUERIES
            and cu_seqlens == tuple(range(0, rows + 1, tokens))
        ):
            run = _Run(0, len(ends), tokens, 0, tables, lens, ends)
            if self._neighbours(run) is None:
                as_read = functools.partial(self._as_sequences, tokens)
                call = self._call(run.rows(self.q), tables, run.lengths(live), self._terms)
                return call.attend(self.caller_q, Results(None, self.return_lse, lead=lead, as_read=as_read))
        padded = cu_seqlens[-1] < rows
        results = [new_like(self.caller_q, (*lead, self._config.rows.v.width), self.q.dtype, live, zeroed=padded)]
        if self.return_lse or self.mass:
            results.append(new_like(self.caller_q, lead, dtypes.float32, live))
            if padded:
                fill(results[1], -np.inf)
        if self.mass:
            results.append(self._to_mass)
            self.mass.start(self._to_mass)
        views = [view(a, name, self.operation) for a, name in zip(results, ("out", "lse", "mass"), strict=False)]
        views[:2] = [rows_first(a, self.layout) for a in views[:2]]
        stage = Staging(live, [self.q, *views], [False] + [True] * len(views))
        for first, end in _runs(cu_seqlens):
            row, tokens = cu_seqlens[first], cu_seqlens[first + 1] - cu_seqlens[first]
            of_these = tables.part(0, first, end), lens.part(0, first, end), ends[first:end]
            run = _Run(first, end, tokens, row, *of_these)
            self._attend_run(run, stage.arrays[:3])
            if self.mass:
                self._weigh_run(run, *stage.arrays)
        stage.finish()
        if not self.return_lse:
            del results[1:2]
        results = [handed_over(a) for a in results]
        return tuple(results) if len(results) > 1 else results[0]

    def attend_unkept(
        self, cu_seqlens: Sequence[int], rows: Sequence[ArrayView], tables: ArrayView, lens: ArrayView, ends: Host
    ) -> Any:
        """Attention over the tokens that the pools hold now and over new rows (T, H, D), which they do not hold.

        The other arguments and the result are as in `attend`; the mass is that of the tokens that are held.
        """
        lead = self.q.shape[:2] if self.layout == "token_major" else self.q.shape[1::-1]
        results = [new_like(self.caller_q, (*lead, self._config.rows.v.width), self.q.dtype, self.live, zeroed=True)]
        results.append(new_like(self.caller_q, lead, dtypes.float32, self.live))
        fill(results[1], -np.inf)
        views = [rows_first(view(a, "results", self.operation), self.layout) for a in results]
        stage = Staging(self.live, [self.q, *rows, *views], [False] * 3 + [True] * 2)
        self.mass.start(self._to_mass)
        for first, end in _runs(cu_seqlens):
            row, tokens = cu_seqlens[first], cu_seqlens[first + 1] - cu_seqlens[first]
            run = _Run(first, end, tokens, row, tables.part(0, first, end), lens.part(0, first, end), ends[first:end])
            q, k, v, out, lse = (run.rows(a) for a in stage.arrays)
            terms, slopes = self._terms, self._terms.get("alibi_slopes")
            if slopes and slopes.ndim == 2:
                terms = {**terms, "alibi_slopes": slopes.part(0, first, end)}
            span = self._request.window or 0
            block = min(self._two_sided, tokens)
            new = UnkeptTokens(self.live, self.operation, k, v, self._request.scores, terms, span, block=block)
            new.attend(q, out, lse, functools.partial(self._over_held, run))
            if self.mass and run.ends.any():
                begin = 0 if self.mass.queries is None else max(0, tokens - self.mass.queries)
                call = self._call(q.part(2, begin, tokens), run.tables, run.lengths(self.live), {})
                to = view(self._to_mass, "mass", self.operation).part(0, first, end)
                asked = AttendedTokens(call.length, ahead=tokens)
                call.plan.weigh(dict(call.arrays), lse.part(2, begin, tokens), to, asked, self.mass.kind)
        stage.finish()
        return results_of(results[0], results[1] if self.return_lse else None, self._to_mass)

    def _over_held(self, run: _Run, q: ArrayView, ahead: int, terms: Mapping[str, ArrayView], to: Results) -> Any:
        """Attention of a run's queries, `ahead` of what its sequences hold; None if they hold nothing."""
        if not run.ends.any():
            return None
        call = self._call(q, run.tables, run.lengths(self.live), terms)
        return call.plan.attend(None, dict(call.arrays), AttendedTokens(call.length, ahead=ahead), to)

    def _as_sequences(self, tokens: int, a: ArrayView) -> ArrayView:
        """A caller's result as (sequences, Hq, tokens, ...), for equally many new tokens each."""
        return _as_sequences(rows_first(a, self.layout), 0, self.q.shape[0] // tokens, tokens)

    def _neighbours(self, run: _Run) -> tuple[Sequence[Neighbours], ArrayView] | None:
        """Which sequences of a run share how many blocks, and their tokens after those; None if none share any."""
        if run.end - run.first < 2 or self._two_sided or not serves(self.live, self._request, self._config.per_head):
            return None
        runs, own_lens = self._tables.neighbours(run.first, run.end, run.tokens, self._block)
        return None if own_lens is None else (runs, own_lens)

    def _attend_run(self, run: _Run, arrays: Sequence[ArrayView]) -> None:
        """Attention into arrays of all queries, out and log-sum-exps."""
        slopes, terms = self._terms.get("alibi_slopes"), self._terms  # those of a tree are of all, which are one run
        if slopes and slopes.ndim == 2:
            terms = {**terms, "alibi_slopes": slopes.part(0, run.first, run.end)}
        most = MOST_QUERIES
        if (shared := self._neighbours(run)) is not None:
            make = pool_call(self.operation, self._caches, terms)
            arguments = self.operation, self.live, self._request, make, run.tables, shared[1], shared[0]
            q, out, *lse = (run.rows(a) for a in arrays)
            SharedAttention(*arguments, self._config.block_size).attend(q, out, lse[0] if lse else None)
            return
        if run.tokens > most:
            most = self._call(run.rows(arrays[0]), run.tables, run.lengths(self.live), terms).plan.family.most_queries
        causal = run.tokens - min(self._two_sided, run.tokens)
        for begin in (*range(0, causal, most), *range(causal, run.tokens, most)):
            alone = begin < causal
            stop = min(causal if alone else run.tokens, begin + most)
            q, out, *lse = (run.rows(a, begin, stop) for a in arrays)
            call = self._call(q, run.tables, run.lengths(self.live, run.tokens - stop if alone else 0), terms, alone)
            call.attend(None, Results(out, bool(lse), lse[0] if lse else None))

    def _weigh_run(self, run: _Run, q: ArrayView, out: ArrayView, lse: ArrayView, mass: ArrayView) -> None:
        """The mass of what `_attend_run` attended over."""
        begin = 0 if self.mass.queries is None else max(0, run.tokens - self.mass.queries)
        causal, to = run.tokens - min(self._two_sided, run.tokens), mass.part(0, run.first, run.end)
        for first, end in ((begin, causal), (max(begin, causal), run.tokens)):
            if first < end:
                lens = run.lengths(self.live, run.tokens - end)
                call = self._call(run.rows(q, first, end), run.tables, lens, {}, end == causal or not self._two_sided)
                call.weigh(run.rows(lse, first, end), to, self.mass.kind)


class _Run(NamedTuple):
    """Sequences `first` to `end` with equally many new tokens each, from a row on; their tables and lengths."""

    first: int
    end: int
    tokens: int
    row: int
    tables: ArrayView
    lens: ArrayView
    ends: Host  # the same lengths on the host

    def rows(self, a: ArrayView, begin: int = 0, stop: int | None = None) -> ArrayView:
        """Their rows of (T, Hq, ...) as (sequences, Hq, tokens, ...), each sequence's from `begin` to `stop`."""
        queries = (self.tokens if stop is None else stop) - begin
        return _as_sequences(a, self.row, self.end - self.first, self.tokens, begin, queries)

    def lengths(self, live: Runtime, less: int = 0) -> Any:
        """Their lengths, less some newest tokens, which only one sequence has."""
        if self.ends.size == 1:
            return int(self.ends.item()) - less
        if less:
            return to_device((self.ends - less).astype(np.int32), live)
        if isinstance(self.lens.owner, KnownOnHost):  # of all sequences: what the host knows of these is `ends`
            lens = self.lens.restrided(self.lens.shape, self.lens.strides)
            lens.owner = KnownOnHost(self.lens.owner.owner, self.ends)
            return lens
        return self.lens


def even_starts(operation: str, cu_seqlens: Array, sequences: int, rows: int, live: Runtime) -> list[int]:
    """Starts of sequences that have equally many new tokens each, on the host; or ShapeError."""
    starts = host_integers(cu_seqlens, "cu_seqlens", operation, live)
    if len(starts) == sequences + 1 and (starts[-1] != rows or len({b - a for a, b in itertools.pairwise(starts)}) > 1):
        raise ShapeError(
            f"{operation}: a mask or parents are given, and cu_seqlens is {starts} for {rows} rows, so sequences "
            "have different numbers of new tokens, or rows are padding. Extend all sequences with the same number "
            "of new tokens."
        )
    return starts


def _runs(cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring sequences with equally many new tokens, few enough for a launch; others are single."""
    counts = [b - a for a, b in itertools.pairwise(cu_seqlens)]
    runs, first = [], 0
    for tokens, same in itertools.groupby(counts):
        end = first + len(list(same))
        if tokens:
            step = 1 if tokens > MOST_QUERIES else end - first
            runs += [(i, i + step) for i in range(first, end, step)]
        first = end
    return runs


def _as_sequences(
    a: ArrayView, row: int, count: int, tokens: int, begin: int = 0, queries: int | None = None
) -> ArrayView:
    """Rows (T, Hq, ...) from `row` on as (count, Hq, queries, ...): of `tokens` rows each, those from `begin` on."""
    per_token, per_head, *rest = a.strides
    shape = (count, a.shape[1], tokens if queries is None else queries, *a.shape[2:])
    return a.restrided(shape, (tokens * per_token, per_head, per_token, *rest), (row + begin) * per_token)
