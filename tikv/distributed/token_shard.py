"""TokenShardLayers: one rank's tokens of a cache, with the counts over all ranks. It knows no other process.

The ring of a sliding layer holds this rank's share of the window and up to one block more. A block of a prompt can
therefore be appended before its queries attend, while the oldest keys that they see are still there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, Arrays, ArrayView, CacheArray, Views, new_array, view, view_all
from tikv.distributed.token_sharding import QueryRun, TokenSharding
from tikv.errors import OptionError, PositionError
from tikv.ops import checks
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.local_positions import local_positions
from tikv.ops.staging import Staging
from tikv.runtime.cache import BoundedCache
from tikv.runtime.interrupts import uninterrupted
from tikv.stores.draft import Draft
from tikv.stores.layers.append import ROWS
from tikv.stores.layers.attend import NO_VIEWS, cache_plan, layer_arrays, layer_plan, refuse_missing
from tikv.stores.layers.contiguous import Captured, ContiguousLayers
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.queries import Queries, extend_queries
from tikv.stores.layers.storage import LayerStorage, StoreConfig, Triple

MAX_COUNTED = 2**30  # the most positions that attention with slopes can count


class _Form(NamedTuple):
    """What is known about new rows of one form: the number of tokens, and the axis that counts them."""

    tokens: int
    axis: int  # the axis of tokens in the given arrays


class CapturedShard(NamedTuple):
    """The tokens that a rank held, with the counts over all ranks."""

    local: Captured
    sharding: TokenSharding
    counts: tuple[tuple[int, int], ...]  # length and oldest valid position of each layer


class TokenShardLayers(LayerStorage):
    """One rank's part of layers whose tokens are spread over ranks: `local` holds the tokens that `sharding` gives it.

    It is given all tokens and counts all of them. Its memory holds this rank's tokens, over which `attend_own` attends.
    """

    title = "a store whose tokens are sharded over several processes"
    remedy = "Shard by heads instead."

    def __init__(self, live: runtime.Runtime, form: StoreConfig, sharding: TokenSharding) -> None:
        self.check_summaries("ShardedKVCacheStore", form)
        if form.place != "device":
            raise OptionError(f"ShardedKVCacheStore: {self.title} does not support place={form.place!r}. {self.remedy}")
        self.runtime, self.sharding = live, sharding
        later = sharding.interleave - 1  # tokens of a block after its first, appended before the first query attends
        own_sinks = sharding.count(form.sinks)
        windows = [None if w is None else own_sinks + sharding.most(w - form.sinks + later) for w in form.windows]
        capacity = max(sharding.most(form.capacity), *(w or 1 for w in windows))
        self.local = ContiguousLayers(live, form._replace(capacity=capacity, windows=tuple(windows), sinks=own_sinks))
        self.counts, local = form.counts(), self.local
        self.rows, self.lock, self.memory = local.rows, local.lock, local.memory
        self._forms: BoundedCache[Any, _Form] = BoundedCache()
        self._device_counts: BoundedCache[Any, ArrayView] = BoundedCache()

    @classmethod
    def serves(cls, dtype: Any) -> bool:
        """False for every form: only `ShardedKVCacheStore` makes one."""
        return False

    @property
    def drawn(self) -> list[Layer]:
        """This rank's layers."""
        return self.local.counts

    def layer(self, operation: str, layer: int) -> Layer:
        """This rank's arrays of a layer."""
        return self.local.counts[layer]

    # --- writes

    @uninterrupted
    def append(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.append`, of all new tokens; this rank stores only its own."""
        to, counts = self.local.counts[layer], self.counts[layer]
        form = self._form_of(operation, [to], rows, layout, False)
        if form.tokens == 1 and (counts.ring or counts.length < counts.slots) and self.sharding.owns(counts.length):
            self.local.append(operation, layer, rows, layout)
            counts.grow(1)
            return
        self._require_room(operation, [to], form.tokens)
        self._append_own(operation, [to], rows, layout, form, False)

    @uninterrupted
    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """As `LayerStorage.append_all`, of all new tokens; this rank stores only its own."""
        layers = self.local.counts
        form = self._form_of(operation, layers, rows, layout, True)
        self._require_room(operation, layers, form.tokens)
        if len({counts.length for counts in self.counts}) == 1:
            self._append_own(operation, layers, rows, layout, form, True)
            return
        for i, to in enumerate(layers):
            of_layer = Views([a.restrided(a.shape[1:], a.strides[1:], i * a.strides[0]) for a in rows])
            self._append_own(operation, [to], of_layer, layout, form._replace(axis=form.axis - 1), False)

    def append_at(self, operation: str, layer: int | None, arrays: Views, layout: str) -> None:
        """As `LayerStorage.append_at`, of one token per sequence, which is skipped if it belongs to another rank."""
        layers = self.local.counts if layer is None else [self.local.counts[layer]]
        k, v, positions = arrays
        form = self._form_of(operation, layers, Views([k, v]), layout, layer is None)
        if form.tokens != 1:
            raise OptionError(
                f"{operation}: {form.tokens} tokens have positions that only the device knows, but where tokens "
                "are sharded the host must know which of them belong to this rank. Append one token at a time, or "
                "without positions."
            )
        out = self._on_device("positions")
        local_positions(self.runtime, operation, positions, out, self.sharding, False)
        self.local.append_at(operation, layer, Views([k, v, out]), layout)

    def require_positions(self, operation: str, remedy: str) -> None:
        """As `LayerStorage.require_positions`; it never raises, since no layer is ever compacted."""

    def advance(self, operation: str, tokens: int) -> None:
        """As `LayerStorage.advance`, of the tokens of all ranks."""
        for counts in self.counts:
            counts.require_room(operation, tokens)
        for local, counts in zip(self.local.counts, self.counts, strict=True):
            counts.grow(tokens)
            local.grow(self.sharding.count(counts.length) - local.length)

    def _form_of(self, operation: str, layers: list[Layer], rows: Views, layout: str, stacked: bool) -> _Form:
        """The form of new rows, checked once for each form, except whether there is room for them."""
        key = (rows.key, layout, stacked, self.memory.version)
        form = self._forms.get(key)
        if form is None:
            arrays, (token_axis, _) = self.local.appends.checked(operation, layers, rows, layout, stacked)
            axis = rows[0].ndim - (3 if token_axis == 1 else 2)
            form = self._forms.keep(key, _Form(arrays[0].shape[1 + token_axis], axis))
        return form

    def _on_device(self, name: str) -> ArrayView:
        """(batch,) int32 on the device for what is computed from positions there; the same array for all calls."""
        array = self._device_counts.get((name, self.batch_size))
        if array is None:
            made = new_array((self.batch_size,), dtypes.int32, self.runtime)
            array = self._device_counts.keep((name, self.batch_size), made)
        return array

    def _require_room(self, operation: str, layers: Sequence[Layer], tokens: int) -> None:
        """Raise CapacityError or PositionError if one of these layers has no room for this many tokens."""
        for to in layers:
            self.counts[to.index].require_room(operation, tokens)
        if self.runtime.is_cuda:
            launch.refuse_during_capture(self.runtime, operation)

    @uninterrupted
    def _append_own(
        self, operation: str, layers: list[Layer], rows: Views, layout: str, form: _Form, stacked: bool
    ) -> None:
        """Append those of the checked rows that belong to this rank, and count all of them."""
        length = self.counts[layers[0].index].length
        for first, end in self.sharding.runs(length, length + form.tokens):
            local_rows = rows
            if end - first < form.tokens:
                local_rows = Views([a.part(form.axis, first - length, end - length) for a in rows])
            if stacked:
                self.local.append_all(operation, local_rows, layout)
            else:
                self.local.append(operation, layers[0].index, local_rows, layout)
        for to in layers:
            self.counts[to.index].grow(form.tokens)

    # --- reads

    def attend(self, operation: str, layer: int, q: Array, request: AttendRequest) -> Arrays:
        """Attention over this rank's tokens only, as if there were no others."""
        return self.local.attend(operation, layer, q, request)

    def extend(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Arrays:
        """Raise OptionError, since the keys that a query sees are spread over several ranks."""
        self._refuse(operation, "Call ShardedKVCacheStore.extend, or shard by heads.")

    def tokens(self, operation: str, layer: int) -> tuple[CacheArray, CacheArray]:
        """This rank's tokens of a layer."""
        return self.local.tokens(operation, layer)

    def attend_own(
        self,
        operation: str,
        layer: int,
        q: ArrayView,
        partials: ArrayView,
        scores: AttentionScale,
        missing: str,
        seq_lens: Array | int | None = None,
        slopes: Mapping[str, ArrayView] = NO_VIEWS,
    ) -> None:
        """The attention of the newest tokens' queries over this rank's keys.

        Args:
            operation, layer, scores: those of the call.
            q: (batch, Hq, T, D).
            partials: (batch, Hq, T, D_v + 1) float32: each row's result, followed by its log-sum-exp.
            missing, seq_lens: as in `KVCacheStore.attend`; `seq_lens` are refused with several queries, with slopes, or
                where a rank's share of the window depends on them.
            slopes: ALiBi slopes by the name of attention's parameter, if given; positions must stay below MAX_COUNTED.
        """
        if seq_lens is not None:
            if slopes:
                raise OptionError(
                    f"{operation}: slopes cannot be combined with seq_lens on the device: where tokens are "
                    "sharded, the host must know how far keys are from the query. Leave seq_lens out, or shard by "
                    "heads."
                )
            self._attend_at(operation, layer, q, partials, scores, view(seq_lens, "seq_lens", operation))
            return
        counts, queries = self.counts[layer], q.shape[2]
        self._require_countable(operation, slopes, counts.length)
        if 0 < counts.length < queries:
            raise PositionError(
                f"{operation}: the {queries} queries belong to the newest tokens, and the cache has {counts.length}. "
                f"Append the tokens first, or use extend()."
            )
        if missing == "raise" and queries > 1:
            refuse_missing(operation, counts, queries, False)
        first = counts.length - queries
        runs: Iterable[QueryRun] = self.sharding.query_runs(counts, counts.valid_from, first, counts.length)
        if not counts.length:
            runs = [QueryRun(first, 0, 0, 0, 0, 0)]
        self._attend(operation, layer, q, partials, scores, runs, first, slopes)

    def _require_countable(self, operation: str, slopes: Mapping[str, ArrayView], length: int) -> None:
        """Raise PositionError if slopes would have to count more positions than kernels can."""
        if slopes and length > MAX_COUNTED:
            raise PositionError(
                f"{operation}: slopes over sharded tokens reach at most {MAX_COUNTED} positions, but the length is "
                f"{length}. Use reset(), or shard by heads."
            )

    def _attend_at(
        self, operation: str, layer: int, q: ArrayView, partials: ArrayView, scores: AttentionScale, seq_lens: ArrayView
    ) -> None:
        """`attend_own` with one query per sequence and `seq_lens` in device memory, where the launch reads them."""
        counts, local = self.counts[layer], self.local.counts[layer]
        around = self.sharding.world * self.sharding.interleave
        if q.shape[2] != 1:
            raise OptionError(
                f"{operation}: seq_lens on the device allow one query per sequence if tokens are sharded, not "
                f"{q.shape[2]}. Attend with one query, or leave seq_lens out."
            )
        if counts.ring % around:
            raise OptionError(
                f"{operation}: layer {layer} slides over {counts.ring} tokens after its sinks, which is not a "
                f"multiple of {self.sharding.world} ranks x interleave={self.sharding.interleave}: with seq_lens "
                "on the device, the host cannot know how many of them this rank holds. Use a window of such a "
                "multiple plus the sinks."
            )
        lens = self._on_device("lens")
        local_positions(self.runtime, operation, seq_lens, lens, self.sharding, True)
        arrays = {**layer_arrays(local, q), "lens": lens}
        span = counts.ring // self.sharding.world
        plan = cache_plan(self.runtime, operation, arrays, scores, span, local.sinks, local.ring, local.formats)
        out, lse = self._out_and_lse(partials)
        oldest = self.sharding.count(counts.trimmed_to)
        plan.attend(None, arrays, AttendedTokens(first_valid=oldest), Results(out, True, lse, is_partial=True))

    def _out_and_lse(self, partials: ArrayView) -> tuple[ArrayView, ArrayView]:
        """Views of the results in `partials`, and of their log-sum-exps."""
        width = self.rows.v.width
        out = partials.restrided((*partials.shape[:3], width), partials.strides)
        return out, partials.restrided(partials.shape[:3], partials.strides[:3], width)

    def extension(
        self, operation: str, layer: int, arrays: tuple[Any, Any, Any], layout: str, scores: AttentionScale
    ) -> tuple[Queries, ArrayView, Views]:
        """The checked arguments of `KVCacheStore.extend`: the queries, their view for kernels, and the rows."""
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        local = self.local.counts[layer]
        rows = view_all(arrays[1:], ROWS, operation)
        form = self._form_of(operation, [local], rows, layout, False)
        self._require_room(operation, [local], form.tokens)
        sizes = self.batch_size, self.memory.num_kv_heads, self.rows.k.width, form.tokens
        q_view = view(arrays[0], "q", operation)
        queries = extend_queries(operation, q_view, layout, *sizes, self.runtime)
        read = queries.as_read(q_view)
        layer_plan(self.runtime, operation, layer_arrays(local, read), local, scores)
        return queries, read, rows

    def extend_own(
        self,
        operation: str,
        layer: int,
        rows: Views,
        layout: str,
        q: ArrayView,
        partials: ArrayView,
        scores: AttentionScale,
        slopes: Mapping[str, ArrayView] = NO_VIEWS,
    ) -> None:
        """Append new tokens, which `extension` checked, and attend with their queries over this rank's keys."""
        to, counts = self.local.counts[layer], self.counts[layer]
        form = self._form_of(operation, [to], rows, layout, False)
        self._require_countable(operation, slopes, counts.length + form.tokens)
        start, end = counts.length, counts.length + form.tokens
        # A sliding layer takes a prompt block by block, since its last tokens would overwrite what its first ones see.
        for first, after in self.sharding.blocks(start, end) if counts.ring else [(start, end)]:
            block = Views([a.part(form.axis, first - start, after - start) for a in rows])
            oldest = counts.valid_from  # before the block's tokens overwrite it
            self._append_own(operation, [to], block, layout, form._replace(tokens=after - first), False)
            runs = self.sharding.query_runs(counts, oldest, first, after)
            self._attend(operation, layer, q, partials, scores, runs, start, slopes)

    def _attend(
        self,
        operation: str,
        layer: int,
        q: ArrayView,
        partials: ArrayView,
        scores: AttentionScale,
        runs: Iterable[QueryRun],
        start: int,
        slopes: Mapping[str, ArrayView],
    ) -> None:
        """Attend with each run of queries; the first query of `q` has the position `start`."""
        local, live = self.local.counts[layer], self.runtime
        stage = Staging(live, [q, partials], [False, True])
        q, partials = stage.arrays
        out, lse = self._out_and_lse(partials)
        block = self.sharding.interleave
        sharded = (block, (self.sharding.world - 1) * block) if slopes else (0, 0)
        for run in runs:
            queries, to, to_lse = (a.part(2, run.first - start, run.end - start) for a in (q, out, lse))
            arrays = layer_arrays(local, queries, slopes)
            slots = local.sinks, local.ring, local.formats
            plan = cache_plan(live, operation, arrays, scores, run.span, *slots, sharded)
            tokens = AttendedTokens(run.length, run.first_valid, run.ahead, run.first - self.sharding.rank * block)
            plan.attend(None, arrays, tokens, Results(to, True, to_lse, is_partial=True))
        stage.finish()

    def held_positions(self, layer: int) -> np.ndarray[Any, Any]:
        """The positions of the tokens of a layer that can still be seen, over all ranks, ascending."""
        counts = self.counts[layer]
        fixed = np.arange(min(counts.length, counts.sinks))
        return np.concatenate([fixed, np.arange(max(counts.valid_from, counts.sinks), counts.length)])

    def weigh_own(
        self, operation: str, layer: int, q: ArrayView, lse: ArrayView, to: Any, scores: AttentionScale, kind: str
    ) -> None:
        """Write into `to` how much weight the newest tokens' queries gave to the keys that this rank holds.

        `q` and `lse` are (batch, Hq, T, D) and (batch, Hq, T), over the keys of all ranks; `to` is a tensor of zeros
        (batch, num_kv_heads, n), where n is at least this rank's share of `held_positions`; `kind` is the mass's.
        """
        import torch

        join = torch.maximum if kind == "max" else torch.add
        counts, local, live = self.counts[layer], self.local.counts[layer], self.runtime
        start = counts.length - q.shape[2]
        fixed = self.sharding.count(min(counts.sinks, counts.length))
        first_held = self.sharding.count(max(counts.valid_from, counts.sinks))  # after the sinks
        for run in self.sharding.query_runs(counts, counts.valid_from, start, counts.length):
            oldest = max(local.sinks, run.first_valid, run.length - local.ring if local.ring else 0)
            own_fixed, recent = min(local.sinks, run.length), max(0, run.length - oldest)
            mass = to.new_zeros((*to.shape[:2], own_fixed + recent))
            queries, queries_lse = (a.part(2, run.first - start, run.end - start) for a in (q, lse))
            stage = Staging(live, [queries, queries_lse, view(mass, "mass", operation)], [False, False, True])
            queries, queries_lse, mass_view = stage.arrays
            arrays = layer_arrays(local, queries)
            plan = cache_plan(live, operation, arrays, scores, run.span, local.sinks, local.ring, local.formats)
            plan.weigh(arrays, queries_lse, mass_view, AttendedTokens(run.length, run.first_valid, run.ahead), kind)
            stage.finish()
            first = fixed + oldest - first_held
            for part, of_run in ((to[..., :own_fixed], mass[..., :own_fixed]),
                                 (to[..., first : first + recent], mass[..., own_fixed:])):  # fmt: skip
                torch.Tensor.copy_(part, join(part, of_run))

    # --- counts, forgetting, copies

    def take_counts(self, counts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Take lengths and oldest valid positions over all ranks, and return those of this rank's tokens."""
        for layer, (length, valid_from) in zip(self.counts, counts, strict=True):
            layer.length, layer.valid_from = length, valid_from
        return [(self.sharding.count(length), self.sharding.count(valid_from)) for length, valid_from in counts]

    def trim(self, operation: str, n: int) -> None:
        """As `LayerStorage.trim`, of the tokens of all ranks."""
        self.memory.trim(operation, self.counts, n)
        self._follow()

    def reset(self) -> None:
        self.memory.reset(self.counts)
        self._follow()

    def _follow(self) -> None:
        """Reduce the counts of this rank's tokens after those over all ranks went down."""
        for local, counts in zip(self.local.counts, self.counts, strict=True):
            local.length = min(local.length, self.sharding.count(counts.length))
            local.valid_from = min(local.valid_from, local.length)

    def commit(self, operation: str, path: Array, drafted: int | None, draft: Draft) -> None:
        """Raise OptionError, since the newest tokens are spread over several ranks."""
        self._refuse(operation)

    def reorder(self, operation: str, index: Array) -> None:
        self.local.reorder(operation, index)

    def select(self, operation: str, index: Array) -> None:
        self.local.select(operation, index)

    def capture(self) -> CapturedShard:
        """As `LayerStorage.capture`, of this rank's tokens, with the counts over all ranks."""
        counts = tuple((layer.length, layer.valid_from) for layer in self.counts)
        return CapturedShard(self.local.capture(), self.sharding, counts)

    def restore(self, operation: str, captured: Any, shown: tuple[str, str]) -> None:
        """As `LayerStorage.restore`, of what this rank captured with the same sharding; or OptionError."""
        if captured.sharding != self.sharding:
            raise OptionError(
                f"{operation}: {shown[0]} is not a snapshot of tokens sharded as here ({self.sharding}). Pass what "
                f"`snapshot` returned on this rank."
            )
        self.local.restore(operation, captured.local, shown)
        for counts, (length, valid_from) in zip(self.counts, captured.counts, strict=True):
            counts.length, counts.valid_from = length, valid_from

    def to_host(self, operation: str) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        return self.local.to_host(operation)

    def take_over(self, operation: str, counts: Sequence[Sequence[int]], arrays: Sequence[Sequence[Any]]) -> None:
        self.local.take_over(operation, counts, arrays)

    def save(self, path: str | os.PathLike[str], form: StoreConfig, operation: str) -> None:
        """Raise OptionError, since `ShardedKVCacheStore.save` writes one file per rank."""
        self._refuse(operation, "Call ShardedKVCacheStore.save.")
