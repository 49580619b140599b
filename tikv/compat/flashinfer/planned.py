"""What FlashInfer's wrappers share: a plan says which queries belong to which keys, and runs attend as it says.

A plan does the arithmetic on indices once, on the host, and places the results where queries lie, so that a run reads
nothing on the host. If all requests have equally many queries, they are read where they lie; others become tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, refuse_backward, runtime_of, view
from tikv.compat.flash_rows import caches_of_rows, tile_size
from tikv.compat.flashinfer.masks import read_tokens, window_tokens
from tikv.compat.flashinfer.pools import PageLists
from tikv.compat.flashinfer.scores import (
    Scales,
    Scores,
    alibi_slopes,
    check_rotated,
    multiplied,
    rotated_rows,
    scales_of,
    turns_of,
)
from tikv.compat.indices import for_operation, library_of, on_host
from tikv.compat.kvcache import Sight, seen_keys
from tikv.compat.ragged_rows import on_device_of, require_library, wide
from tikv.errors import DTypeError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.call import AttentionCall, Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.options import QUERIES
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.plan import Results
from tikv.ops.attention.query_tiles import query_tiles
from tikv.ops.attention.request import AttendRequest
from tikv.ops.quantized_arrays import Quantized

ALL_KEYS = Sight(-1, -1, 0)
PLACED = ("lengths", "table", "shift", "positions", "pages", "key_positions", "rows", "places")  # what a plan places
ROTATED = (*QUERIES, *dtypes.FLOATS8)  # dtypes of keys that can be rotated as they are copied
LOG2_E = float(np.log2(np.e))


class Requests(NamedTuple):
    """The queries and keys of B requests, as numbers on the host; the queries of a request follow each other."""

    starts: np.ndarray[Any, Any]  # (B + 1,) where the queries of each start
    lengths: np.ndarray[Any, Any]  # (B,) keys of each
    first: np.ndarray[Any, Any] | None = None  # (B,) the first row of keys of each, if keys lie one after the other
    lists: PageLists | None = None  # the pages of each, if keys lie in pages
    page: int = 1  # tokens of a page

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """(B,) the queries of each."""
        return np.diff(self.starts)

    @property
    def of_queries(self) -> np.ndarray[Any, Any]:
        """(total,) the request of each query."""
        return np.repeat(np.arange(len(self.lengths)), self.counts)


class Heads(NamedTuple):
    """The heads and widths that a plan is made for."""

    queries: int
    keys: int
    width: int
    width_v: int


class Keys(NamedTuple):
    """Keys and values of a run: pools (N, bs, H, D) or (N, H, bs, D), or rows (total, H, D).

    Without `v`, the first columns of the keys are the values. `arrays` are those of the caller, with the same axes.
    """

    k: Any
    v: Any
    arrays: tuple[Any, Any]
    layout: str = "NHD"
    every: int = 1  # each page is every so many blocks of the pools


class Run(NamedTuple):
    """The arguments of one run."""

    q: Any
    keys: Keys
    scales: dict[str, Any]
    sinks: Any = None
    out: Any = None
    lse: Any = None
    return_lse: bool = False
    base2: bool = True
    heads_first: bool = False  # whether the log-sum-exp is (Hq, total)


class PlanRoom(NamedTuple):
    """The most that the plans of one wrapper need, for CUDA graphs, whose arrays stay where they are."""

    total: int  # queries
    pages: int  # entries of the list of pages; 0 if keys are rows
    tiled: bool  # whether requests may have different numbers of queries


class PlannedAttention:
    """Attention of the queries of requests over their keys; `run` may be called any number of times.

    Args:
        operation: the operation's name, for messages.
        requests: the queries and keys of each request.
        heads: the shape of queries, keys and values.
        scores: the options.
        like: an array on the device where queries and keys lie.
        tokens: the tokens that each query reads, from `read_tokens`; None for those that `scores.sight` says.
        room: what the later plans that `follow` takes need; None without later plans.
    """

    def __init__(
        self, operation: str, requests: Requests, heads: Heads, scores: Scores, like: Any, tokens: Any = None,
        room: PlanRoom | None = None,
    ) -> None:  # fmt: skip
        self.room, self.of_mask = room, tokens
        self.operation, self.requests, self.heads, self.scores, self.like = operation, requests, heads, scores, like
        self.total, self.on_host = int(requests.starts[-1]), on_host(like)
        if scores.mode == "ALIBI" and tokens is None and scores.sight.right < 0 <= scores.sight.left:
            tokens = window_tokens(requests.counts, requests.lengths, scores.sight.left)
        self.sight = scores.sight if tokens is None else ALL_KEYS
        self.tokens = None if tokens is None else for_operation(tokens, like)
        self.rows: Any = None  # the query of each row of a tile; None if queries are read where they lie
        self.places: Any = None  # the row of the tiles that holds each query
        sequence, lengths = self._plan_queries()
        self.sequences = len(sequence)
        self.slopes: Any = None
        self.positions: Any = None
        self.shift: Any = None  # of each query, what its slopes are multiplied by in its log-sum-exp
        numbers = np.arange(self.total) - requests.starts[requests.of_queries]
        before = (requests.lengths - requests.counts)[requests.of_queries]  # the position of a request's first query
        if scores.mode == "ROPE_LLAMA":
            check_rotated(heads.width, operation)
            self.positions = self._placed(before + numbers)
            self.turns = self._constant(turns_of(scores, heads.width))
        elif scores.mode == "ALIBI":
            self.slopes = self._constant(alibi_slopes(heads.queries))
            if self.sight.right < 0:  # every tile then ends where its request ends, and distances are counted so
                before = requests.lengths[requests.of_queries] - self.size + self._in_tile(numbers) - numbers
            self.shift = self._placed(before)
        self.table: Any = None
        self.pages: Any = None  # the pages whose keys are rotated
        self.key_positions: Any = None
        if requests.lists is not None:
            self._plan_pages(requests.lists, sequence, lengths)
        else:
            assert requests.first is not None
            self._plan_rows(requests.first, sequence, lengths)

    def _plan_queries(self) -> tuple[Any, Any]:
        """(the request, the keys) of each sequence of `size` queries that attention is asked for."""
        requests, counts = self.requests, self.requests.counts
        if self.tokens is not None:
            self.size = 1
            return requests.of_queries, requests.lengths[requests.of_queries]
        most, total, room = int(counts.max(initial=0)), self.total, self.room
        if not (room and room.tiled) and most == int(counts.min(initial=most)):
            self.size = most
            return np.arange(len(counts)), requests.lengths
        if room:
            most = total = room.total
        group = max(1, self.heads.queries // max(1, self.heads.keys))
        self.size = tile_size(self.sight, False, most, group, self.on_host)
        tiles = query_tiles(np, requests.starts, np.arange(total), self.size, len(counts))
        used = len(tiles.used) if room else int(tiles.used.sum())
        rows = tiles.rows[:used].reshape(-1).clip(max=max(0, self.total - 1))  # also of tiles that no request needs
        self.rows = for_operation(rows, self.like)
        self.places = for_operation(tiles.tile * self.size + tiles.number, self.like)
        return tiles.sequence[:used], tiles.lengths(requests.lengths, self.sight.right == 0)[:used]

    def _in_tile(self, numbers: np.ndarray[Any, Any]) -> Any:
        """The number in its tile of each query, from its number in its request."""
        if self.tokens is not None:
            return 0
        counts = self.requests.counts[self.requests.of_queries]
        return numbers if self.rows is None else self.size - 1 - (counts - 1 - numbers) % self.size

    def _plan_pages(self, lists: PageLists, sequence: Any, lengths: Array) -> None:
        """The pages and lengths that attention reads."""
        page, table = self.requests.page, None
        if self.scores.mode == "ROPE_LLAMA":
            first, last = int(lists.starts[0]), int(lists.starts[-1])
            of_page = np.repeat(np.arange(len(lists.lengths)), np.diff(lists.starts))
            ordinal = np.arange(first, last) - lists.starts[of_page]
            positions, pages = (ordinal * page)[:, None] + np.arange(page), lists.pages[first:last]
            if self.room:
                positions, pages = (_padded(a, self.room.pages) for a in (positions, pages))
            self.key_positions = for_operation(positions.reshape(-1), self.like)
            self.pages = for_operation(pages, self.like)
            table = np.clip(lists.entries(sequence), first, max(first, last - 1)) - first
        table = lists.table(sequence) if table is None else table
        if self.room:
            table = _padded(table, max(1, self.room.pages), axis=1)
        self.table, self.lengths = for_operation(table, self.like), for_operation(lengths, self.like)

    def _plan_rows(self, first: Any, sequence: Any, lengths: Array) -> None:
        """The rows that attention reads; for queries that read tokens of their own, each row is a page."""
        ends = first + self.requests.lengths
        if self.scores.mode == "ROPE_LLAMA":
            positions = np.zeros(int(ends.max(initial=0)), np.int64)
            for start, end in zip(first, ends, strict=True):
                positions[start:end] = np.arange(end - start)
            self.key_positions = for_operation(positions, self.like)
        if self.tokens is not None:
            steps = np.arange(max(1, int(lengths.max(initial=0))))
            rows = np.minimum(first[sequence][:, None] + steps, max(0, int(ends.max(initial=0)) - 1))
            self.table, self.lengths = for_operation(rows, self.like), for_operation(lengths, self.like)
            return
        starts = first[sequence]
        both = np.stack((np.maximum(starts + lengths, starts), starts), 1)
        self.lengths = for_operation(both.reshape(-1), self.like)

    def _placed(self, numbers: np.ndarray[Any, Any]) -> Any:
        """A number of each query, where queries lie."""
        return for_operation(_padded(numbers, self.room.total) if self.room else numbers, self.like)

    def _constant(self, numbers: np.ndarray[Any, Any]) -> Any:
        """Numbers where queries lie, in their dtype."""
        return numbers if self.on_host else library_of(self.like).as_tensor(numbers, device=self.like.device)

    def follow(self, plan: PlannedAttention) -> None:
        """Become another plan with the same room; arrays stay where they are, as a captured graph needs it."""
        for name in PLACED:
            array, new = getattr(self, name), getattr(plan, name)
            if isinstance(array, np.ndarray):
                array[...] = new
            elif array is not None:
                array.copy_(new)
        self.requests, self.total = plan.requests, plan.total

    def run(self, run: Run) -> Any:
        """`out`, or (out, lse) with `return_lse`.

        Raises:
            TikvError: an array does not fit the plan. Nothing is written.
        """
        operation, heads, keys = self.operation, self.heads, run.keys
        q, rotates = view(run.q, "q", operation), self.scores.mode == "ROPE_LLAMA"
        self._check(q, run)
        both = (keys.k, keys.k if keys.v is None else keys.v)
        scales = scales_of(operation, both, heads.width, self.scores.scale, run.scales, not rotates)
        shape = (self.total, heads.queries, heads.width_v)
        needs_lse = run.return_lse or run.lse is not None
        out = self._result(run.out, "out", run.q, shape, q)
        of_lse = shape[1::-1] if run.heads_first else shape[:2]
        lse = self._result(run.lse, "lse", run.q, of_lse, q, dtypes.float32) if needs_lse else None
        if 0 not in shape:
            asked, (to, to_lse) = run.q, (out, lse)
            table = self.table
            if rotates:
                asked, (keys, table) = (
                    rotated_rows(_detached(asked), self.positions[: self.total], self.turns),
                    self._rotated(keys),
                )
            if self.rows is not None:
                asked = _detached(asked)[on_device_of(self.rows, asked)]
            copied = asked is not run.q
            if copied:
                rows, live = (self.sequences * self.size, heads.queries), runtime_of(run.q)
                to = new_like(asked, (*rows, heads.width_v), dtypes.float32 if rotates else q.dtype, live)
                to_lse = new_like(asked, rows, dtypes.float32, live) if needs_lse else None
            elif needs_lse and run.heads_first:
                to_lse = new_like(asked, shape[:2], dtypes.float32, runtime_of(run.q))
            views = {"out": view(to, "out", operation)}
            if needs_lse:
                views["lse"] = view(to_lse, "lse", operation)
            read = {"q": view(asked, "q", operation)}
            read |= {name: a for name, a in (("k", memory_of(keys.k)), ("v", memory_of(keys.v))) if a is not None}
            writes = [(name, a, True) for name, a in views.items()]
            if needs_lse and to_lse is not lse:
                writes.append(("lse", view(lse, "lse", operation), True))
            checks.disjoint([*writes, *[(name, a, False) for name, a in read.items()]], operation)
            call = self._call(self._sequences(read["q"]), keys, table, scales, run)
            in_sequences = self._sequences(views["lse"], 2) if needs_lse else None
            call.prepare(None, Results(self._sequences(views["out"]), needs_lse, in_sequences)).run()
            if copied:
                self._copy(to, out)
            if needs_lse:
                of_tokens = _detached(lse).T if run.heads_first else lse
                if to_lse is not lse:
                    self._copy(to_lse, of_tokens)
                if self.slopes is not None:
                    self._shift(of_tokens, run.base2)
        out = multiplied(handed_over(out), scales.of_result)
        results = (out, handed_over(lse)) if run.return_lse else out
        return refuse_backward(results, run.q, *run.keys.arrays)

    def _check(self, q: ArrayView, run: Run) -> None:
        """Check that q and the keys fit the plan, and the libraries of arrays if there is arithmetic on them."""
        operation, heads = self.operation, self.heads
        if q.shape != (self.total, heads.queries, heads.width):
            raise ShapeError(
                f"{operation}: q is {describe(q)} where the plan needs {(self.total, heads.queries, heads.width)}."
            )
        if q.dtype not in QUERIES:
            raise DTypeError(f"{operation}: q is {describe(q)}; queries must be float32, float16 or bfloat16.")
        if (q.device == "cpu") is not self.on_host:
            raise ShapeError(
                f"{operation}: q is on {q.device}, and the workspace of the wrapper is not. Pass a workspace on the "
                "device of q, whose memory is not used."
            )
        named: dict[str, Any] = {"q": run.q}
        rotates = self.scores.mode == "ROPE_LLAMA"
        if rotates:
            named |= dict(zip(("k", "v"), run.keys.arrays, strict=True))
            for name, a in (("keys", run.keys.k), ("values", run.keys.v)):
                if isinstance(a, Quantized) or a.dtype not in ROTATED:
                    raise DTypeError(
                        f"{operation}: {name} are {described(a)}; ROPE_LLAMA reads "
                        f"{', '.join(t.name for t in ROTATED)}."
                    )
        if rotates or self.rows is not None or self.slopes is not None or run.heads_first:
            named |= {name: a for name, a in (("out", run.out), ("lse", run.lse)) if a is not None}
            require_library(operation, named, "lse_layout='HN'" if run.heads_first else "Such a plan")
        seen = (run.keys.k.shape[-2 if run.keys.layout == "NHD" else -3], run.keys.k.shape[-1])
        if seen != (heads.keys, heads.width) or (run.keys.v is not None and run.keys.v.shape[-1] != heads.width_v):
            raise ShapeError(
                f"{operation}: keys are {described(run.keys.k)}"
                + ("" if run.keys.v is None else f" and values {described(run.keys.v)}")
                + f"; the plan needs {heads.keys} heads of widths {heads.width} and {heads.width_v}."
            )
        if (
            self.requests.lists is not None
            and run.keys.k.shape[1 if run.keys.layout == "NHD" else 2] != self.requests.page
        ):
            raise ShapeError(
                f"{operation}: keys are {described(run.keys.k)}; the plan needs pages of {self.requests.page} tokens."
            )

    def _result(
        self,
        array: Array,
        name: str,
        like: Any,
        shape: tuple[int, ...],
        q: ArrayView,
        dtype: dtypes.DType | None = None,
    ) -> Any:
        """The caller's array for a result, checked, or a new one."""
        dtype = dtype or q.dtype
        if array is None:
            return new_like(like, shape, dtype, runtime_of(like))
        a = view(array, name, self.operation)
        checks.writable(a, name, self.operation)
        if a.shape != shape or a.device != q.device:
            raise ShapeError(
                f"{self.operation}: {name} is {describe(a)} on {a.device} where {shape} on {q.device} is needed."
            )
        if a.dtype is not dtype:
            raise DTypeError(f"{self.operation}: {name} is {describe(a)}; it must be {dtype.name}.")
        return array

    def _sequences(self, a: ArrayView, axes: int = 3) -> ArrayView:
        """Rows (sequences * size, Hq, ...) as (sequences, Hq, size, ...), or without the axis of size if that is 1."""
        if self.size == 1:
            return a
        step, head, *inner = a.strides
        return a.restrided(
            (self.sequences, a.shape[1], self.size, *a.shape[2:]), (step * self.size, head, step, *inner)
        )

    def _rotated(self, keys: Keys) -> tuple[Keys, Any]:
        """Rotated keys with the values, both in float32, of all rows or of the requests' pages; and the table of these.

        Raises:
            PositionError: a page on the host is not in the cache. On a device, such a page is ignored.
        """
        k, v, table = *(_detached(a) for a in keys.arrays), self.table
        if self.pages is None:
            count = int(self.key_positions.shape[0])
            k, v = rotated_rows(k[:count], self.key_positions, self.turns), wide(v[:count])
        else:
            if not self.on_host and int(self.pages.shape[0]):
                outside = (self.pages < 0) | (self.pages >= k.shape[0])
                table = table.masked_fill(outside[table.long()], -1)
            k, v = (pages_of(self.operation, a, self.pages) for a in (k, v))
            if keys.layout == "HND":
                k, v = (a.swapaxes(1, 2) for a in (k, v))
            rows = k.reshape(-1, *k.shape[2:])
            k, v = rotated_rows(rows, self.key_positions, self.turns).reshape(k.shape), wide(v)
        return Keys(view(k, "k", self.operation), view(v, "v", self.operation), (k, v)), table

    def _call(self, asked: ArrayView, keys: Keys, table: Any, scales: Scales, run: Run) -> AttentionCall:
        """The checked call of attention."""
        k, v, layout = keys.k, keys.v, PagedLayout(keys.layout)
        if table is None:
            held = k.shape[0]
            if self.sequences == 1 and self.room is None:
                first, length = int(self.requests.first[0]), int(self.requests.lengths[0])  # type: ignore[index]
                rows = [
                    a.restrided((1, a.shape[1], length, a.shape[2]), (0, a.strides[1], a.strides[0], a.strides[2]),
                                first * a.strides[0])
                    for a in (k, v)
                ]  # fmt: skip
                caches = Caches(CONTIGUOUS, rows[0], rows[1], length)
            else:
                caches = caches_of_rows(k, v, self.lengths, self.sequences)
            caches = caches._replace(**scales.of_codes)
        else:
            if self.requests.lists is None:
                k, v = (a.restrided((a.shape[0], 1, *a.shape[1:]), (a.strides[0], 0, *a.strides[1:])) for a in (k, v))
                layout = PagedLayout()
            held = int(table.shape[1]) * (1 if self.requests.lists is None else self.requests.page)
            if keys.every > 1:
                table = table * keys.every
            width_v = self.heads.width_v if v is None else None
            caches = Caches(layout, k, v, self.lengths, table, head_dim_v=width_v, **scales.of_codes)
        request = AttendRequest(
            scale=scales.scale, softcap=self.scores.softcap, lse_base2=run.base2, short=True, alibi_slopes=self.slopes,
            sink_logits=run.sinks, indices=self.tokens,
            **seen_keys(self.sight, self.size, held, slopes=False),
        )  # fmt: skip
        return attention_call(self.operation, asked, caches, request)

    def _copy(self, source: Any, to: Any) -> None:
        """Copy rows of sequences to the queries that they belong to."""
        if self.places is not None:
            source = source[on_device_of(self.places[: self.total], source)]
        if isinstance(to, np.ndarray):
            to[...] = source.astype(to.dtype)
        else:
            to.detach().copy_(source)

    def _shift(self, lse: Array, base2: bool) -> None:
        """Add to log-sum-exps what FlashInfer's slopes add to all scores of a query.

        They multiply the key's position less the query's number in its request, and not less its position.
        """
        factor = LOG2_E if base2 else 1.0
        if isinstance(lse, np.ndarray):
            lse += self.shift[: self.total, None] * (self.slopes * np.float32(factor))
        else:
            shift, slopes = (on_device_of(a, lse) for a in (self.shift, self.slopes))
            lse.detach().add_(shift[: self.total, None] * (slopes * factor))


def attend_single(operation: str, run: Run, scores: Scores, masks: tuple[Any, Any] = (None, None)) -> Any:
    """Attention of one request, whose queries are those of its newest tokens; `masks` as in `read_tokens`."""
    q, k = view(run.q, "q", operation), run.keys.k
    checks.rank(q, (3,), "q", "(T, Hq, D)", operation)
    heads = Heads(q.shape[1], k.shape[1], k.shape[2], run.keys.v.shape[2])
    requests = Requests(np.array([0, q.shape[0]]), np.array([k.shape[0]]), np.array([0]))
    tokens = None
    if any(mask is not None for mask in masks):
        tokens = read_tokens(operation, masks, requests.counts, requests.lengths, scores.sight.left)
    return PlannedAttention(operation, requests, heads, scores, run.q, tokens).run(run)


def _padded(array: Array, extent: int, axis: int = 0) -> Any:
    """The array with zeros after its end along an axis."""
    shape = [*array.shape]
    shape[axis] = extent
    whole = np.zeros(shape, array.dtype) if isinstance(array, np.ndarray) else array.new_zeros(shape)
    whole[(slice(None),) * axis + (slice(array.shape[axis]),)] = array
    return whole


def memory_of(rows: Any) -> Any:
    """The array that holds rows, or their codes."""
    return rows.codes if isinstance(rows, Quantized) else rows


def described(rows: Any) -> str:
    """Rows or codes for a message."""
    return f"{rows.format} {rows.shape}" if isinstance(rows, Quantized) else describe(rows)


def _detached(array: Array) -> Any:
    """The same memory, which autograd does not follow."""
    return array.detach() if hasattr(array, "detach") else array


def pages_of(operation: str, array: Array, pages: Array) -> Array:
    """A copy of these pages; on a device, of any page instead of one that the array does not have.

    Raises:
        PositionError: the array does not have a page, and the host knows it.
    """
    blocks = int(array.shape[0])
    if isinstance(pages, np.ndarray) and ((pages < 0) | (pages >= blocks)).any():
        at = int(np.argmax((pages < 0) | (pages >= blocks)))
        raise PositionError(
            f"{operation}: a request needs page {int(pages[at])}, but there are {blocks}. Use 0..{blocks - 1}."
        )
    pages = on_device_of(pages.clip(0, max(0, blocks - 1)), array)
    if isinstance(array, np.ndarray) or array.element_size() > 1:
        return array[pages]
    bits = library_of(array).uint8  # torch cannot index all 8-bit floats
    return array.view(bits)[pages].view(array.dtype)
