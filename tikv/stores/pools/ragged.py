"""Attention of the new tokens of several sequences over pages, each with as many as it likes.

A launch takes one number of queries, so neighbouring sequences with as many new tokens share one, and a long prompt has
several, each of which reads no further than its last query sees.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import ArrayView, Host, handed_over, new_like, to_device, view, write_host
from tikv.errors import ShapeError
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.paged import check_paged_queries, paged_call
from tikv.ops.attention.plan import AttentionCall
from tikv.ops.attention.request import AttendRequest
from tikv.ops.attention.terms import check_parents, check_scores, tree_of
from tikv.ops.indices import host_integers
from tikv.ops.staging import KnownOnHost, Staging
from tikv.runtime import Runtime
from tikv.stores.layers.queries import rows_first, rows_of_queries
from tikv.stores.pools.pages import Pages


class RaggedAttention:
    """Queries of several sequences' new tokens, checked against a layer's pools before anything is written.

    Args:
        operation: for messages.
        pages: of the store.
        layer: its index.
        q: the queries, (T, Hq, D) or head-major (Hq, T, D).
        request: what is asked of attention.
        sequences: how many there are.
        terms: views of what is added to the scores, and of which of the new tokens queries see.

    Raises:
        ShapeError, DTypeError, OptionError, PositionError: the queries or an option do not fit.
    """

    def __init__(
        self,
        operation: str,
        pages: Pages,
        layer: int,
        q: Any,
        request: AttendRequest,
        sequences: int,
        terms: Mapping[str, ArrayView],
    ) -> None:
        form = self._form = pages.form
        self.operation, self.live, self.given = operation, pages.runtime, q
        self.layout = request.layout
        of_pools = form.num_kv_heads, form.rows.k.width
        self.q = rows_of_queries(operation, view(q, "q", operation), self.layout, *of_pools, self.live)
        self.return_lse = request.return_lse
        self.mass_queries = request.asked_mass(operation, form.rows.k.format)
        self._pools = pages.pools.layers[layer]
        self._options: dict[str, Any] = {"layout": form.layout, "formats": form.formats, "scale": request.scale}
        self._options |= {"window": request.window, "softcap": request.softcap, **pages.pools.scales[layer]}
        check_scores(operation, terms, sequences, self.q.shape[1], self.live)
        self._check(_as_sequences(self.q, 0, 1, self.q.shape[0]), {})
        self._check_tree(terms, sequences)
        stage = Staging(self.live, list(terms.values()), [False] * len(terms))
        self._terms = dict(zip(terms, stage.arrays, strict=True))

    def _check(self, q: ArrayView, terms: Mapping[str, ArrayView]) -> None:
        """Queries (sequences, Hq, T, D) can be asked of these pools."""
        k_pool, v_pool = self._pools[:2]
        heads = self._form.num_kv_heads if self._form.per_head else None
        check_paged_queries(self.operation, q, k_pool, v_pool, heads, terms, **self._options)

    def _check_tree(self, terms: Mapping[str, ArrayView], sequences: int) -> None:
        """Which of the new tokens queries see fits as many of each sequence."""
        name = tree_of(terms)
        if not name or not sequences:
            return
        tokens = self.q.shape[0] // sequences
        if tokens * sequences != self.q.shape[0] or tokens > MOST_QUERIES:
            raise ShapeError(
                f"{self.operation}: {name.removesuffix('_bits')} is given, and q has {self.q.shape[0]} rows for "
                f"{sequences} sequences. Use as many new tokens of each, at most {MOST_QUERIES}."
            )
        if tokens:
            self._check(_as_sequences(self.q, 0, sequences, tokens), terms)
        if "parents" in terms:
            check_parents(self.operation, terms["parents"], self.live)

    def _call(self, q: ArrayView, table: ArrayView, lens: Any, terms: Mapping[str, ArrayView]) -> AttentionCall:
        k_pool, v_pool = self._pools[:2]
        return paged_call(self.operation, q, k_pool, v_pool, table, lens, terms=terms, **self._options)

    def attend(self, cu_seqlens: Sequence[int], tables: ArrayView, lens: ArrayView, ends: Host) -> Any:
        """Attention over the tokens that the pools hold now, the new ones included.

        Args:
            cu_seqlens: which rows belong to which sequence.
            tables, lens: (B, blocks) and (B,), on the device; or (B, H, blocks) and (B, H).
            ends: the same lengths, on the host.

        Returns:
            (T, Hq, D_v), and with `return_lse` (T, Hq), or in the layout of the queries; 0 and -inf behind the last of
            `cu_seqlens`. With mass (B, H, longest).
        """
        rows, heads, live = self.q.shape[0], self.q.shape[1], self.live
        padded = cu_seqlens[-1] < rows
        lead = (rows, heads) if self.layout == "token_major" else (heads, rows)
        results = [new_like(self.given, (*lead, self._form.rows.v.width), self.q.dtype, live, zeroed=padded)]
        if self.return_lse or self.mass_queries != 0:
            results.append(new_like(self.given, lead, dtypes.float32, live))
            if padded:
                _fill(results[1], -np.inf)
        if self.mass_queries != 0:
            shape = (len(ends), self._form.num_kv_heads, int(np.max(ends, initial=0)))
            results.append(new_like(self.given, shape, dtypes.float32, live, zeroed=True))
        views = [view(a, name, self.operation) for a, name in zip(results, ("out", "lse", "mass"), strict=False)]
        views[:2] = [rows_first(a, self.layout) for a in views[:2]]
        stage = Staging(live, [self.q, *views], [False] + [True] * len(views))
        for first, end in _runs(cu_seqlens):
            self._attend_run(stage.arrays[:3], first, end, cu_seqlens, tables, lens, ends)
            if self.mass_queries != 0:
                self._weigh_run(stage.arrays, first, end, cu_seqlens, tables, lens, ends)
        stage.finish()
        if not self.return_lse:
            del results[1:2]
        results = [handed_over(a) for a in results]
        return tuple(results) if len(results) > 1 else results[0]

    def _attend_run(
        self,
        arrays: Sequence[ArrayView],
        first: int,
        end: int,
        cu_seqlens: Sequence[int],
        tables: ArrayView,
        lens: ArrayView,
        ends: Host,
    ) -> None:
        """Attention of sequences `first` to `end`, which have as many new tokens each."""
        count, tokens = end - first, cu_seqlens[first + 1] - cu_seqlens[first]
        table = tables.part(0, first, end)
        most = MOST_QUERIES
        if tokens > most:
            q = _as_sequences(arrays[0], cu_seqlens[first], count, tokens)
            length = self._lengths(lens.part(0, first, end), ends[first:end], 0)
            most = self._call(q, table, length, self._terms_of(first, end)).plan.most_queries
        for begin in range(0, tokens, most):
            stop = min(tokens, begin + most)
            q, out, *lse = (_as_sequences(a, cu_seqlens[first], count, tokens, begin, stop - begin) for a in arrays)
            length = self._lengths(lens.part(0, first, end), ends[first:end], tokens - stop)
            call = self._call(q, table, length, self._terms_of(first, end))
            call.attend(None, out=out, return_lse=bool(lse), lse=lse[0] if lse else None)

    def _terms_of(self, first: int, end: int) -> dict[str, ArrayView]:
        """The terms of sequences `first` to `end`; those of a tree are of all, which are one run."""
        slopes = self._terms.get("alibi_slopes")
        return self._terms | ({"alibi_slopes": slopes.part(0, first, end)} if slopes and slopes.ndim == 2 else {})

    def _weigh_run(
        self,
        arrays: Sequence[ArrayView],
        first: int,
        end: int,
        cu_seqlens: Sequence[int],
        tables: ArrayView,
        lens: ArrayView,
        ends: Host,
    ) -> None:
        """The mass of what `_attend_run` attended over."""
        q, _, lse, mass = arrays
        count, tokens = end - first, cu_seqlens[first + 1] - cu_seqlens[first]
        wanted = tokens if self.mass_queries is None else min(tokens, self.mass_queries)
        q, lse = (_as_sequences(a, cu_seqlens[first], count, tokens, tokens - wanted, wanted) for a in (q, lse))
        length = self._lengths(lens.part(0, first, end), ends[first:end], 0)
        self._call(q, tables.part(0, first, end), length, {}).weigh(lse, mass.part(0, first, end))

    def _lengths(self, lens: ArrayView, ends: Host, less: int) -> Any:
        """Lengths of some sequences, less some newest tokens, which only one sequence has."""
        if ends.size == 1:
            return int(ends.item()) - less
        if less:
            return to_device((ends - less).astype(np.int32), self.live)
        if isinstance(lens.owner, KnownOnHost):  # of all sequences: what the host knows of these is `ends`
            lens.owner = KnownOnHost(lens.owner.owner, ends)
        return lens


def even_starts(operation: str, cu_seqlens: Any, sequences: int, rows: int, live: Runtime) -> list[int]:
    """Starts of sequences that have as many new tokens each, as the host knows them.

    Raises:
        ShapeError: they have not.
    """
    starts = host_integers(cu_seqlens, "cu_seqlens", operation, live)
    if len(starts) == sequences + 1 and (starts[-1] != rows or len({b - a for a, b in itertools.pairwise(starts)}) > 1):
        raise ShapeError(
            f"{operation}: a mask or parents are given, and cu_seqlens is {starts} for {rows} rows: new tokens of "
            f"different numbers, or padding. Extend sequences with as many new tokens each."
        )
    return starts


def _runs(cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring sequences with as many new tokens, some, and few enough for one launch; others by themselves."""
    counts = [b - a for a, b in itertools.pairwise(cu_seqlens)]
    found, first = [], 0
    for tokens, same in itertools.groupby(counts):
        end = first + len(list(same))
        if tokens:
            step = 1 if tokens > MOST_QUERIES else end - first
            found += [(i, i + step) for i in range(first, end, step)]
        first = end
    return found


def _as_sequences(
    a: ArrayView, row: int, count: int, tokens: int, begin: int = 0, queries: int | None = None
) -> ArrayView:
    """Rows (T, Hq, ...) from `row` on as (count, Hq, queries, ...): of `tokens` rows each, those from `begin` on."""
    per_token, per_head, *rest = a.strides
    shape = (count, a.shape[1], tokens if queries is None else queries, *a.shape[2:])
    return a.restrided(shape, (tokens * per_token, per_head, per_token, *rest), (row + begin) * per_token)


def _fill(array: Any, value: float) -> None:
    """Set all elements of what `new_like` gave."""
    if isinstance(array, np.ndarray):
        array.fill(value)
    elif hasattr(array, "fill_"):
        array.fill_(value)
    else:
        write_host(np.full(array.shape, value, np.float32), view(array, "array", "fill"))
