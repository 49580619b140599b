"""TokenGroupLayers: ``tikv.Quant(axis="tokens")``: older tokens are codes, the newest are as the model gave them.

The newest tokens of a layer are in a ring of `residual` + `group` slots after its sinks, a `ContiguousLayers`. When
the ring is full, an append first quantises its oldest group, see `channel_codes`: so a token's age decides, not the
call that appended it. Sinks are never quantised, and groups are counted from the first token after them. With a window,
a group is dropped as a whole, once no query can see any of its tokens; until then attention leaves out tokens outside
the window. Attention reads both parts in place and merges them by their log-sum-exps.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from tikv import runtime
from tikv.arrays import Array, ArrayView, CacheArray, Host, Views, new_array, view, view_all
from tikv.dtypes import DType
from tikv.errors import CapacityError, OptionError, PositionError
from tikv.formats import parse_aging
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.plan import AttentionPlan, Results
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.rotate import Rope
from tikv.runtime.interrupts import uninterrupted
from tikv.stores import files
from tikv.stores.files import token_groups as token_group_files
from tikv.stores.history import History
from tikv.stores.layers.append import ROWS
from tikv.stores.layers.attempt import attempt
from tikv.stores.layers.attend import (
    cache_plan,
    last_queries,
    layer_arrays,
    refuse_missing,
    refuse_wrapped,
    results_of,
)
from tikv.stores.layers.channel_codes import ChannelCodes
from tikv.stores.layers.coded_arrays import ScoreMemory, Weighing
from tikv.stores.layers.coded_tiles import joined_memory
from tikv.stores.layers.contiguous import Captured, ContiguousLayers
from tikv.stores.layers.counts import Layer, cannot_align
from tikv.stores.layers.group_compaction import choose, copy_kept, hold_only
from tikv.stores.layers.memory import rows_of
from tikv.stores.layers.queries import AXES, attend_queries, extend_queries, heads_first, with_tokens
from tikv.stores.layers.rewriting import rewrite_layer, rewritten_from, tokens_of
from tikv.stores.layers.storage import LayerStorage, StoreConfig, Triple
from tikv.stores.layers.token_group_form import TileForm, TokenGroupForm, room_of, token_bytes
from tikv.stores.layers.unkept import UnkeptTokens, unkept_call
from tikv.stores.limits import require_memory

REFUSED = ("seq_lens", "alibi_slopes", "out", "mask", "parents", "indices")


class CapturedGroups(NamedTuple):
    """What a store with groups along tokens held: its newest tokens, and each layer's counts and codes."""

    newest: Captured
    config: tuple[Any, ...]
    counts: list[tuple[int, int, History | None]]
    codes: list[tuple[int, list[np.ndarray[Any, Any]]]]


class TokenGroupLayers(LayerStorage):
    """Layers of codes and a ring of the newest tokens each, see the module.

    Attributes:
        newest: the sinks and the rings.
        codes: the codes of each layer's older tokens.
    """

    title = "a store of groups along tokens"
    remedy = "Use axis='head_dim'."
    file_kind = token_group_files.KIND

    def __init__(
        self, live: runtime.Runtime, config: StoreConfig, row_dtype: Any = None, sinks: int | None = None
    ) -> None:
        """Memory for a store; `sinks` first tokens are never codes, or None for what the configuration says."""
        rows = dict(config.rows)
        form = self.form = TokenGroupForm.checked("KVCacheStore", live, config.num_kv_heads, rows, row_dtype)
        quant = form.quant
        self.title, self.remedy = f"a store of {form.named}", f"Use {form.other}."
        if sinks is None:
            sinks = form.sinks("KVCacheStore", config.sinks, any(config.windows))
        slots = sinks + form.slots
        ring = config._replace(capacity=slots, windows=(slots,) * config.num_layers, sinks=sinks, rows=form.newest)
        self.counts, on_host = config.counts(), config.place == "host"
        rooms = [room_of(layer, quant) for layer in self.counts]
        of_codes = math.ceil(sum(rooms) * config.batch_size * config.num_kv_heads * token_bytes(form.codes))
        remedy = "Use a smaller capacity or batch, a window, or fewer bits."
        require_memory(of_codes, live, "KVCacheStore", remedy, on_host)
        self.newest = ContiguousLayers(live, ring)
        self.newest.appends.of = f"a store of groups along tokens, whose newest rows are {self.newest.rows.name}"
        self.runtime, self.lock, self.memory = live, self.newest.lock, self.newest.memory
        self.quant, self.config, self.rows = quant, config, form.said
        self.scratch = ScoreMemory(live)
        self.codes = [
            ChannelCodes(live, form.codes, config.batch_size, room, layer.ring > 0, self.scratch, on_host)
            for layer, room in zip(self.counts, rooms, strict=True)
        ]

    @classmethod
    def serves(cls, dtype: Any) -> bool:
        """Formats in which older tokens are codes."""
        return parse_aging(dtype) is not None

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, biases and the newest tokens, filled or not."""
        return self.memory.nbytes + sum(codes.nbytes for codes in self.codes)

    def described(self, config: StoreConfig) -> str:
        prefix = f"{super().described(config)}, " if any(config.windows) or config.sinks else f"{self.rows.name}, "
        newest = "open tile" if self.form.closes_early else f"{self.quant.newest} or more"
        return f"{prefix}{newest} {self.form.codes.rows.name}"

    def quantised(self, operation: str, layer: int) -> int:
        return self.codes[layer].tokens

    # --- writes

    @uninterrupted
    def append(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.append`: one launch for tokens that fit, and three for each group that becomes codes."""
        arrays, axes = self._checked(operation, layer, rows, layout)
        self._append_parts(operation, layer, arrays, axes[0], layout)

    @uninterrupted
    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """As `LayerStorage.append_all`: as `append` for each layer."""
        stacked, axes = self.newest.appends.checked(operation, self.newest.counts, rows, layout, True)
        for counts in self.counts:
            counts.require_room(operation, stacked[0].shape[1 + axes[0]])
        for i in range(len(self.counts)):
            arrays = [a.restrided(a.shape[1:], a.strides[1:], i * a.strides[0]) for a in stacked]
            self._append_parts(operation, i, arrays, axes[0], layout)

    def append_at(self, operation: str, layer: int | None, arrays: Views, layout: str) -> None:
        """Raise OptionError."""
        self.require_positions(operation, "Append without positions.")

    def require_positions(self, operation: str, remedy: str) -> None:
        """Raise OptionError: appends at positions on the device, steps and graphs are not supported."""
        raise OptionError(
            f"{operation}: {self.title} does not support this, since the host counts which keys are quantised. {remedy}"
        )

    def _checked(self, operation: str, layer: int, rows: Views, layout: str) -> tuple[list[ArrayView], tuple[int, int]]:
        """New K and V that fit the layer as (batch, ., ., width), and their axes of tokens and heads."""
        arrays, axes = self.newest.appends.checked(operation, [self.newest.counts[layer]], rows, layout, False)
        self.counts[layer].require_room(operation, arrays[0].shape[1 + axes[0]])
        return [a.restrided(a.shape[1:], a.strides[1:]) for a in arrays], axes

    def _append_parts(
        self, operation: str, layer: int, rows: Sequence[ArrayView], token_axis: int, layout: str
    ) -> None:
        """Append new rows of one layer, after groups that earlier calls filled became codes."""
        if rows[0].shape[token_axis]:
            self._close(operation, layer)
        if self._append_tiles(operation, layer, rows, token_axis, layout):
            return
        for part in self._parts(operation, layer, rows, token_axis):
            self._append(operation, layer, part, layout)

    @uninterrupted
    def _append_tiles(
        self, operation: str, layer: int, rows: Sequence[ArrayView], token_axis: int, layout: str
    ) -> bool:
        """Append new rows that are whole tiles, which are encoded together, and others; whether it has done so.

        Codes and ring have the bits that they have if tiles pass the ring one by one.
        """
        ring, codes, tokens = self.newest.counts[layer], self.codes[layer], rows[0].shape[token_axis]
        of_codes, on_cpu = codes.tiles, self.runtime.is_cpu
        as_kept = all(a.dtype is ring.k.dtype and (on_cpu or not a.is_staged) for a in rows)
        if of_codes is None or codes.rings or not as_kept:
            return False
        fixed, open_rows = max(0, ring.sinks - ring.length), max(0, ring.length - ring.sinks - codes.tokens)
        first = fixed + -open_rows % codes.group  # of the new tokens, the one that begins a tile
        tiles = -(-(tokens - first - ring.ring) // codes.group)
        if tiles < 1:
            return False
        start, rest = (
            _Part(a, b, Views([of.part(token_axis, a, b) for of in rows])) for a, b in ((0, first), (first, tokens))
        )
        if first:
            self._append(operation, layer, start, layout)
        self._close(operation, layer)
        k, v = (heads_first(a, AXES[layout]) for a in rest.rows)
        codes.encode_rows(operation, of_codes, (rows_of(k), rows_of(v)), tiles)
        self._append(operation, layer, rest, layout)
        codes.tokens += tiles * codes.group
        return True

    def _close(self, operation: str, layer: int) -> None:
        """Let the groups that earlier calls filled become codes, if the form says so."""
        ring, codes = self.newest.counts[layer], self.codes[layer]
        if not self.form.closes_early:
            return
        full = (ring.length - ring.sinks - codes.tokens) // codes.group
        if full > 1 and codes.tokens % ring.ring == 0 and not codes.rings and codes.tiles is not None:
            first = ring.slot_of(ring.sinks + codes.tokens)  # the tiles follow each other in the ring
            rows = rows_of(ring.k, first), rows_of(ring.v, first)
            codes.encode_rows(operation, codes.tiles, rows, full)
            codes.tokens += full * codes.group
            return
        for _ in range(full):
            codes.encode(operation, ring)

    def _parts(self, operation: str, layer: int, rows: Sequence[ArrayView], token_axis: int) -> Iterator[_Part]:
        """New rows in parts that fit the ring; if it is full, its oldest group becomes codes first."""
        ring, codes = self.newest.counts[layer], self.codes[layer]
        tokens, first = rows[0].shape[token_axis], 0
        while first < tokens:
            if ring.length - ring.sinks - codes.tokens >= ring.ring:
                codes.encode(operation, ring)
            free = ring.ring + ring.sinks + codes.tokens - ring.length
            end = min(tokens, first + free, first + MOST_QUERIES)
            yield _Part(first, end, Views([a.part(token_axis, first, end) for a in rows]))
            first = end

    @uninterrupted
    def _append(self, operation: str, layer: int, part: _Part, layout: str) -> None:
        self.newest.append(operation, layer, part.rows, layout)
        self.counts[layer].grow(part.end - part.first)

    # --- reads

    def rewrite(self, operation: str, layer: int, start: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.rewrite`, for sinks and tokens that are not codes yet."""
        counts, ring, codes = self.counts[layer], self.newest.counts[layer], self.codes[layer]
        tokens = tokens_of(rows[0], layout)
        first = rewritten_from(operation, counts, start, tokens)
        coded = ring.sinks + codes.tokens if codes.tokens else 0
        if first < coded and first + tokens > ring.sinks:
            oldest = start + coded - first
            raise PositionError(
                f"{operation}: position {start} of layer {layer} cannot be rewritten: tokens before {oldest} are "
                f"codes, quantised once. Rewrite tokens from {oldest} on."
            )
        rewrite_layer(operation, self.newest.appends, ring, first, rows, layout)

    def tokens(self, operation: str, layer: int) -> tuple[CacheArray, CacheArray]:
        """As `LayerStorage.tokens`; keys are float32."""
        return self.tokens_from(operation, layer, 0)

    def tokens_from(
        self, operation: str, layer: int, first: int, dtype: DType | None = None
    ) -> tuple[CacheArray, CacheArray]:
        """A copy of what a layer holds from a position on, in temporal order, in a dtype, or in that of `tokens`."""
        live, lead, count = self.runtime, (self.batch_size, self.config.num_kv_heads), self._tokens_from(layer, first)
        out = [new_array((*lead, count, row.width), dtype or row.read_dtype, live) for row in self.rows.both]
        self._copy_tokens(operation, layer, first, out)
        return CacheArray(out[0], live), CacheArray(out[1], live)

    def _tokens_from(self, layer: int, first: int) -> int:
        """How many tokens a layer holds from a position on."""
        counts, sinks = self.counts[layer], self.newest.counts[layer].sinks
        fixed = max(0, min(counts.length, sinks) - first)
        return fixed + max(0, counts.length - max(counts.valid_from, sinks, first))

    def _copy_tokens(self, operation: str, layer: int, first: int, out: list[ArrayView]) -> None:
        """Copy what a layer holds from a position on to the start of (batch, heads, n, width) arrays, as numbers."""
        counts, ring, codes = self.counts[layer], self.newest.counts[layer], self.codes[layer]
        fixed = max(0, min(counts.length, ring.sinks) - first)
        start = max(counts.valid_from, ring.sinks, first)  # of what goes round
        plain = max(start, ring.sinks + codes.tokens)
        behind = [a.part(2, fixed, a.shape[2]) for a in out]
        if plain > start:
            codes.decode(operation, behind[0], behind[1], start - ring.sinks)
        self.memory.gather(operation, ring, out, tokens=fixed, position=first, at=0)
        self.memory.gather(operation, ring, out, tokens=counts.length - plain, position=plain, at=fixed + plain - start)

    def attend(self, operation: str, layer: int, q: Array, request: AttendRequest) -> Any:
        """As `LayerStorage.attend`, both parts read in place.

        Raises:
            PositionError: a query's own token is codes already (`extend` attends before that), or with a window a query
                would see a token that was overwritten.
            OptionError: slopes, ``seq_lens`` or torch's attention are asked for.
        """
        return self.attend_since(operation, layer, q, request, self.counts[layer].valid_from)

    def attend_since(self, operation: str, layer: int, q: Array, request: AttendRequest, since: int) -> Any:
        """`attend` over the tokens from position `since` on, which are held."""
        ring, heads, live = self.newest.counts[layer], self.config.num_kv_heads, self.runtime
        self._refuse_options(operation, request)
        request.check_choices(operation, ("auto", "taichi"))
        scores, terms = request.scores, request.terms.views(operation)
        sizes, q_view = (self.batch_size, heads, self.rows.k.width), view(q, "q", operation)
        queries = attend_queries(operation, q_view, request.layout, *sizes, live)
        if block := request.as_block(operation, queries.tokens):
            refuse_wrapped(operation, self.counts[layer], 0)
        several = with_tokens(queries.as_read(q_view), 4)
        self._ring_plan(operation, layer, several, scores, terms)
        newest = ring.length - (ring.sinks + self.codes[layer].tokens if self.codes[layer].tokens else 0)
        if ring.length and queries.tokens > max(newest, 1):
            raise PositionError(
                f"{operation}: {queries.tokens} queries are given, but only the newest {newest} tokens of layer "
                f"{ring.index} are not codes yet. Attend with at most that many, or use extend(), which attends as it "
                f"appends.{queries.remedy(newest, heads)}"
            )
        if request.missing == "raise" and queries.tokens > 1 and not block:
            refuse_missing(operation, self.counts[layer], queries.tokens, False)
        mass = request.asked_mass(operation)
        to_mass = self._mass_array(operation, layer, q, mass, {"q": q_view}) if mass else None
        result, lse = queries.new_out(q, self.rows.v.width, live), queries.new_lse(q, live)
        to = with_tokens(queries.as_read(view(result, "out", operation)), 4)
        to_lse = with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
        causal = not block
        self._attend(operation, layer, several, scores, terms, Results(to, True, to_lse), since, causal=causal)
        if mass:
            mass.start(to_mass)
            to_weights = view(to_mass, "mass", operation)
            self._weigh(operation, layer, several, to_lse, to_weights, mass, scores, since, causal=causal)
        return results_of(result, lse if request.return_lse else None, to_mass)

    def _mass_array(
        self, operation: str, layer: int, like: Any, mass: Mass, others: dict[str, ArrayView], tokens: int = 0
    ) -> Any:
        """The checked array that gets the mass of what the layer holds after so many new tokens, or a new one."""
        shape = self.batch_size, self.config.num_kv_heads, self.counts[layer].held_after(tokens)
        return mass.array(operation, like, shape, self.runtime, others)

    def _refuse_options(self, operation: str, request: AttendRequest) -> None:
        title, remedy = f"{self.title} does not support", f"Leave it out, or use {self.form.other}."
        request.refuse(operation, REFUSED, title, remedy)

    def _ring_plan(
        self, operation: str, layer: int, q: ArrayView, scores: AttentionScale, terms: dict[str, ArrayView],
        ahead: int = 0, causal: bool = True,
    ) -> tuple[AttentionPlan, dict[str, ArrayView]]:  # fmt: skip
        """The plan of attention over the sinks and the newest tokens, for queries that may be `ahead`; its arrays."""
        ring, span = self.newest.counts[layer], self.counts[layer].ring
        if not span and not ahead:
            span = ring.ring
        arrays = layer_arrays(ring, q, terms)
        form = span, ring.sinks, ring.ring, ring.formats
        plan = cache_plan(self.runtime, operation, arrays, scores, *form, causal=causal)
        return plan, arrays

    def _attend(
        self,
        operation: str,
        layer: int,
        q: ArrayView,
        scores: AttentionScale,
        terms: dict[str, ArrayView],
        to: Results,
        since: int,
        ahead: int = 0,
        causal: bool = True,
    ) -> None:
        """Attention of (batch, Hq, T, D) queries of the newest tokens over tokens from position `since` on.

        With `ahead`, the last query is that of a token so many after the newest. Without `causal`, all see the newest.
        """
        counts, ring, codes = self.counts[layer], self.newest.counts[layer], self.codes[layer]
        plan, arrays = self._ring_plan(operation, layer, q, scores, terms, ahead, causal)
        oldest = max(codes.first, since - ring.sinks)
        plain = ring.sinks + codes.tokens if codes.tokens else 0
        tokens = AttendedTokens(ring.length, max(ring.valid_from, plain, since), ahead)
        if codes.tokens <= oldest:
            plan.attend(None, arrays, tokens, to)
            return
        of_ring = plan.attend(None, arrays, tokens, self.scratch.partial("of the newest", to.out.shape))
        ahead += ring.length - ring.sinks - codes.tokens
        of_codes = codes.attend(operation, q, scores, oldest, (counts.ring, ahead) if counts.ring else None)
        merge_into(operation, (*of_ring, *of_codes), False, to.out, to.lse)

    def _weigh(
        self, operation: str, layer: int, q: ArrayView, lse: ArrayView, to: ArrayView, mass: Mass,
        scores: AttentionScale, since: int, ahead: int = 0, causal: bool = True,
    ) -> None:  # fmt: skip
        """Add the mass that queries as in `_attend` give the sinks and the tokens from position `since` on to `to`."""
        among, (q, lse) = q.shape[2], last_queries(q, lse, mass.queries)
        counts, ring, codes = self.counts[layer], self.newest.counts[layer], self.codes[layer]
        plan, arrays = self._ring_plan(operation, layer, q, scores, {}, ahead, causal)
        oldest = max(codes.first, since - ring.sinks)
        coded = max(0, codes.tokens - oldest)
        plain = ring.sinks + codes.tokens if codes.tokens else 0
        tokens = AttendedTokens(ring.length, max(ring.valid_from, plain, since), ahead)
        plan.weigh(arrays, lse, to, tokens, mass.kind, coded)
        if coded:
            ahead += ring.length - ring.sinks - codes.tokens
            part = Weighing(among, lse, to.part(2, ring.sinks, ring.sinks + coded), mass.kind)
            codes.weigh(operation, q, part, scores, oldest, (counts.ring, ahead) if counts.ring else None)

    def extend(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Any:
        """As `LayerStorage.extend`, with as many tokens at a time as the ring has room for.

        Each query sees what it would see if the tokens came one at a time.
        """
        live, (q, k, v) = self.runtime, arrays
        self._refuse_options(operation, request)
        if not request.keep:
            return self._unkept(operation, layer, arrays, request)()
        if request.block is not None:
            remedy = "Append the tokens, and attend with block=."
            request.refuse(operation, ("block",), f"{self.title} does not support", remedy)
        if self.form.closes_early:
            return self._extend_tiles(operation, layer, arrays, request)
        scores, terms = request.scores, request.terms.views(operation)
        rows, axes = self._checked(operation, layer, view_all((k, v), ROWS, operation), request.layout)
        sizes = self.batch_size, self.config.num_kv_heads, self.rows.k.width, rows[0].shape[axes[0]]
        q_view = view(q, "q", operation)
        queries = extend_queries(operation, q_view, request.layout, *sizes, live)
        asked = queries.as_read(q_view)
        self._ring_plan(operation, layer, asked, scores, terms)
        mass, to_mass, tokens = request.asked_mass(operation), None, sizes[-1]
        if mass:
            others = {"q": q_view, "k": rows[0], "v": rows[1]}
            to_mass = self._mass_array(operation, layer, q, mass, others, tokens)
        first_weighed = tokens if not mass else 0 if mass.queries is None else tokens - mass.queries
        counts = self.counts[layer]
        held_from = max(counts.valid_from, counts.length + tokens - counts.ring if counts.ring else 0)
        out, lse = queries.new_out(q, self.rows.v.width, live), queries.new_lse(q, live)
        to, to_lse = queries.as_read(view(out, "out", operation)), queries.as_read(view(lse, "lse", operation))
        with self.attempted(operation, layer):
            mass.start(to_mass)
            for part in self._parts(operation, layer, rows, axes[0]):
                since = self.counts[layer].valid_from
                self._append(operation, layer, part, request.layout)
                views = [a.part(2, part.first, part.end) for a in (asked, to, to_lse)]
                self._attend(operation, layer, views[0], scores, terms, Results(views[1], True, views[2]), since)
                if first_weighed < part.end:
                    weights, last = view(to_mass, "mass", operation), part.end - max(part.first, first_weighed)
                    of_part = mass._replace(queries=last)
                    self._weigh(operation, layer, views[0], views[2], weights, of_part, scores, held_from)
            return results_of(out, lse if request.return_lse else None, to_mass)

    @uninterrupted
    def _extend_tiles(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Any:
        """`extend` of tiles: queries see the new tokens unquantised; then these are appended."""
        rows, axes = self._checked(operation, layer, view_all(arrays[1:], ROWS, operation), request.layout)
        attend = self._unkept(operation, layer, arrays, request)
        if rows[0].shape[axes[0]]:
            self._close(operation, layer)
        results = attend()
        self._append_parts(operation, layer, rows, axes[0], request.layout)
        return results

    def _unkept(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Callable[[], Any]:
        """Check `extend` with ``keep=False``, or of tiles; returns what computes its results."""
        scores, counts, ring = request.scores, self.counts[layer], self.newest.counts[layer]
        new = tokens_of(view(arrays[1], "k", operation), request.layout)
        more = new if request.keep else 0  # tokens whose mass is asked for too
        since = min(counts.length, max(counts.valid_from, counts.length + more - counts.ring if counts.ring else 0))

        def check(q: ArrayView, terms: Mapping[str, ArrayView]) -> None:
            self._ring_plan(operation, layer, q, scores, dict(terms), len(q.shape))

        def over_held(q: ArrayView, ahead: int, terms: Mapping[str, ArrayView], to: Results) -> Any:
            if ring.length == 0 or (counts.ring and not ring.sinks and ahead - q.shape[2] + 1 >= counts.ring):
                return None
            self._attend(operation, layer, q, scores, dict(terms), to, counts.valid_from, ahead)
            return to.out, to.lse

        def weigh(q: ArrayView, lse: ArrayView, mass: Mass, to_mass: Any) -> None:
            if ring.length:
                to = view(to_mass, "mass", operation)
                self._weigh(operation, layer, q, lse, to, mass, scores, since, new)

        join = functools.partial(self._joined, operation, layer)
        run = unkept_call(
            operation, self.newest.appends, ring, arrays, request, counts.held_after(more), check, counts.ring, join
        )
        return functools.partial(run, over_held, weigh)

    def _joined(self, operation: str, layer: int, q: ArrayView, new: UnkeptTokens) -> UnkeptTokens | None:
        """All that queries of new tokens attend over, tiles decoded once, as one array; None if parts are merged."""
        held, tokens, sinks = self._tokens_from(layer, 0), q.shape[2], self.newest.counts[layer].sinks
        if not held:
            return new
        if not isinstance(self.form.codes, TileForm):
            return None
        memory = joined_memory(self.form.codes, q, (new.k, new.v), held + tokens, self.scratch)
        if memory is None:
            return None
        self._copy_tokens(operation, layer, 0, memory)
        return new.behind(held, memory, min(sinks, held + tokens) if new.span else 0)

    def attempted(self, operation: str, layer: int) -> AbstractContextManager[None]:
        """As `LayerStorage.attempted`; tokens that have become codes stay codes."""
        codes, ring = self.codes[layer], self.newest.counts[layer]
        # Groups that earlier calls filled may become codes in a call that is undone.
        most = max(codes.tokens, ring.length - ring.sinks) if self.form.closes_early else codes.tokens
        return attempt(operation, [self.counts[layer], ring], lambda: codes.tokens > most)

    # --- dropping and moving tokens

    @uninterrupted
    def compact(self, operation: str, keeps: Mapping[int, Any], rope: Rope | None, merge: Any = None) -> None:
        """As `LayerStorage.compact`, for whole groups; all layers are copied before any is written."""
        if merge is not None:
            raise OptionError(
                f"{operation}: {self.title} does not merge rows, since those that are codes would be quantised a "
                f"second time, with other scales. Leave merge out, or use {self.form.other}."
            )
        if rope is not None:
            raise OptionError(
                f"{operation}: {self.title} does not rotate keys, since those that are codes would be quantised a "
                f"second time, with other scales. Leave rope out."
            )
        layers = [(self.newest, self.counts[i], self.codes[i]) for i in keeps]
        choices = [choose(operation, *layer, keep) for layer, keep in zip(layers, keeps.values(), strict=True)]
        copied = [copy_kept(operation, *layer, choice) for layer, choice in zip(layers, choices, strict=True)]
        for layer, choice, copies in zip(layers, choices, copied, strict=True):
            hold_only(operation, *layer, choice, copies)

    def trim(self, operation: str, n: int) -> None:
        """As `LayerStorage.trim`; tokens that are codes are dropped in whole groups, or all of them by `reset`.

        Raises:
            PositionError: part of a group would be kept, or with a window tokens are needed that were overwritten.
                Nothing is changed.
        """
        length = max(counts.end for counts in self.counts)
        if n == length:
            self.reset()
            return
        self.refuse_trim(operation, n, length)
        for counts, ring, codes in zip(self.counts, self.newest.counts, self.codes, strict=True):
            remaining, history = _remaining(counts, length - n), counts.history
            if remaining == counts.length:
                continue
            if history is not None and remaining < history.tokens:
                counts.history = history.trimmed(history.tokens - remaining)
            codes.tokens = min(codes.tokens, max(0, remaining - ring.sinks))
            for each in (counts, ring):
                each.length, each.valid_from, each.newest = remaining, min(each.valid_from, remaining), 0

    def refuse_trim(self, operation: str, n: int, length: int) -> None:
        """Raise PositionError if layers, of which the longest has `length` tokens, cannot drop the `n` newest."""
        for counts, ring, codes in zip(self.counts, self.newest.counts, self.codes, strict=True):
            remaining, coded = _remaining(counts, length - n), ring.sinks + codes.tokens if codes.tokens else 0
            counts.refuse_trim(operation, n, length)
            if remaining < coded and (remaining - ring.sinks) % self.quant.group and remaining > ring.sinks:
                most = length - (counts.end - counts.length + coded)
                whole = n + (remaining - ring.sinks) % self.quant.group
                lost = counts.history is not None and length - whole < counts.history.first_whole
                raise PositionError(
                    f"{operation}: cannot drop {n} tokens of length={length}: the first {coded} are codes of whole "
                    f"groups, quantised once. Drop at most {most}{'' if lost else f', or {whole} for whole groups'}, "
                    f"or reset()."
                )

    def refuse_align(self, operation: str, length: int) -> None:
        """As `LayerStorage.refuse_align`; a group that the dropped tokens let become codes does not come back."""
        super().refuse_align(operation, length)
        for counts, ring, codes in zip(self.counts, self.newest.counts, self.codes, strict=True):
            remaining = _remaining(counts, length)
            before, now = (self.form.closed_at(n - ring.sinks) for n in (remaining, counts.length))
            older = remaining - ring.sinks < codes.tokens
            older = older or (before < codes.tokens == now and not self.form.closes_early)
            if ring.sinks < remaining < counts.length and older:
                why = "older tokens became codes when its newest were appended"
                raise cannot_align(operation, counts.index, counts.end, length, why)

    def reset(self) -> None:
        self.newest.reset()
        for counts, codes in zip(self.counts, self.codes, strict=True):
            self.memory.recount(counts, 0, None)
            codes.tokens = codes.dropped = 0

    @uninterrupted
    def reorder(self, operation: str, index: Array) -> None:
        """As `LayerStorage.reorder`; codes are copied to new memory."""
        sequences = self.memory.sequences_of(operation, index)
        if len(sequences) == self.batch_size and (sequences == np.arange(self.batch_size)).all():
            return
        taken = [codes.selected(sequences, self.memory) for codes in self.codes]
        self.newest.reorder(operation, index)
        self._hold(sequences, taken)

    @uninterrupted
    def select(self, operation: str, index: Array) -> None:
        """As `LayerStorage.select`: in new memory."""
        sequences = self.memory.sequences_of(operation, index)
        taken = [codes.selected(sequences, self.memory) for codes in self.codes]
        self.newest.select(operation, index)
        self._hold(sequences, taken)

    def _hold(self, sequences: Host, taken: Sequence[list[ArrayView]]) -> None:
        """Hold the codes of these sequences, and what compactions left of them."""
        for counts, codes, arrays in zip(self.counts, self.codes, taken, strict=True):
            codes.hold(arrays)
            if counts.history is not None:
                counts.history = counts.history.of_sequences(sequences)

    # --- copies and files

    def _kind(self) -> tuple[Any, ...]:
        """What a store must have in common with one whose contents it takes over."""
        windows = [(layer.window, layer.sinks) for layer in self.counts]
        return len(self.counts), windows, self.config.num_kv_heads, self.quant, self.form.codes

    def capture(self) -> CapturedGroups:
        """As `LayerStorage.capture`; codes are copied through the host."""
        codes = [(codes.tokens, codes.copy_to_host()) for codes in self.codes]
        counts = [(layer.length, layer.valid_from, layer.history) for layer in self.counts]
        return CapturedGroups(self.newest.capture(), self._kind(), counts, codes)

    @uninterrupted
    def restore(self, operation: str, captured: Any, shown: tuple[str, str]) -> None:
        snapshot, store = shown
        if captured.config != self._kind():
            raise OptionError(
                f"{operation}: {snapshot:.200} was taken from a store of a different form. Restore it into a store "
                f"made with the same arguments, not into {store}."
            )
        for layer, codes, (length, *_), (coded, _) in zip(
            self.counts, self.codes, captured.counts, captured.codes, strict=True
        ):
            if not layer.ring and (length > layer.slots or coded - codes.dropped > codes.room):
                raise CapacityError(
                    f"{operation}: the snapshot has {length} tokens, and there is room for {layer.slots}. Restore "
                    "it into a store with room for them."
                )
        batch = captured.newest.batch_size
        made = [None if batch == codes.batch else codes.like(batch) for codes in self.codes]
        self.newest.restore(operation, captured.newest, shown)
        for counts, codes, new, (length, oldest, history), (tokens, arrays) in zip(
            self.counts, self.codes, made, captured.counts, captured.codes, strict=True
        ):
            self.memory.recount(counts, length, history, oldest)
            if new is not None:
                codes.hold(new)
            codes.take_over(tokens, arrays)

    def filled(self, layer: int) -> list[tuple[ArrayView, int]]:
        return [*self.newest.filled(layer), *self.codes[layer].filled]

    def count_as(self, layer: int, other: TokenGroupLayers, index: int) -> None:
        self.newest.count_as(layer, other.newest, index)
        state, source = self.counts[layer], other.counts[index]
        self.memory.recount(state, source.length, source.history, source.valid_from)
        state.index, state.newest = source.index, source.newest
        codes, theirs = self.codes[layer], other.codes[index]
        codes.tokens, codes.dropped = theirs.tokens, theirs.dropped

    def save(self, path: str | os.PathLike[str], config: StoreConfig, operation: str) -> None:
        layers = [
            token_group_files.SavedLayer(counts, ring.valid_from, codes.tokens, [*arrays, *codes.copy_to_host()])
            for counts, (ring, arrays), codes in zip(
                self.counts, self.newest.to_host(operation), self.codes, strict=True
            )
        ]
        token_group_files.write(path, config._replace(batch_size=self.batch_size), self.form, layers, operation)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], live: runtime.Runtime, operation: str, **placed: Any
    ) -> tuple[StoreConfig, Any]:
        config, layers = token_group_files.read(path, live, operation, placed)
        with files.understanding(path, operation):
            storage = cls(live, config)
            counts = [(layer.counts.length, layer.oldest) for layer in layers]
            storage.newest.take_over(operation, counts, [layer.arrays[:2] for layer in layers])
            for state, codes, layer in zip(storage.counts, storage.codes, layers, strict=True):
                storage.memory.recount(state, layer.counts.length, layer.counts.history, layer.counts.valid_from)
                codes.take_over(layer.coded, layer.arrays[2:])
        return config, storage


def _remaining(counts: Layer, length: int) -> int:
    """How many of a layer's tokens remain if its store is trimmed to this length."""
    return counts.length - max(0, counts.end - length)


class _Part(NamedTuple):
    """Some of the tokens of an append: which, and their rows."""

    first: int
    end: int
    rows: Views
