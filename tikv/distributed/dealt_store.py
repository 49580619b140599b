"""DealtStore: the tokens of a cache that lie on one rank, with the counts of all of them. It knows of no other process.

A sliding layer's ring here holds the rank's share of the window and up to a block more, so that a block of a prompt can
be appended before its queries attend: the oldest that they see are still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch
from tikv.arrays import ArrayView, Views, new_array, view, view_all
from tikv.distributed.deal import Deal, Stretch
from tikv.errors import OptionError, PositionError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.deal import deal
from tikv.ops.staging import Staging
from tikv.runtime.cache import BoundedCache
from tikv.stores.append import NAMES, ROWS
from tikv.stores.attend import (
    NO_VIEWS,
    AttentionScale,
    kept_plan,
    layer_arrays,
    layer_plan,
    refuse_missing,
)
from tikv.stores.contiguous import KVCacheStore
from tikv.stores.layer import Layer
from tikv.stores.queries import Queries, extend_queries
from tikv.stores.snapshot import Snapshot
from tikv.stores.whole import whole

MAX_COUNTED = 2**30  # positions that attention counts beside slopes


class _Form(NamedTuple):
    """What was found of new rows of one form: their number, and which axis of the arrays they are."""

    tokens: int
    axis: int  # of tokens, in the arrays as they were given


class DealtStore(KVCacheStore):
    """A rank's part of a `KVCacheStore` whose tokens are dealt to several.

    What it is given is whole, and so are its counts, `capacity`, `windows` and `sinks`; its memory holds the tokens
    that lie on this rank. Its attention is over those, and is a part of the whole's.

    Args:
        deal: which tokens lie here.
        **form: what `KVCacheStore` takes, of the whole.
    """

    def __init__(
        self,
        deal: Deal,
        *,
        num_layers: int,
        capacity: int,
        window: int | Sequence[int | None] | None = None,
        sinks: int = 0,
        **form: Any,
    ) -> None:
        operation = "ShardedKVCacheStore"
        self.deal = deal
        self.num_layers = checks.integer(num_layers, "num_layers", operation, low=1)
        self.capacity = capacity = checks.integer(capacity, "capacity", operation, low=1)
        self.sinks = sinks = checks.integer(sinks, "sinks", operation)
        windows = self._windows(window, operation)
        own_sinks = deal.count(sinks)
        behind = deal.interleave - 1  # tokens of a block that come before its first query attends
        own = [None if w is None else own_sinks + deal.most(w - sinks + behind) for w in windows]
        super().__init__(
            num_layers=num_layers,
            capacity=max(deal.most(capacity), *(w or 1 for w in own)),
            window=own,
            sinks=own_sinks,
            **form,
        )
        self.capacity, self.windows, self.sinks = capacity, windows, sinks
        self._counts = [Layer(i, capacity, w, sinks) for i, w in enumerate(windows)]
        self._forms: BoundedCache[Any, _Form] = BoundedCache()
        self._device_counts: BoundedCache[Any, ArrayView] = BoundedCache()

    # --- what is written

    @whole
    def append(self, layer: int, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """`KVCacheStore.append` of the whole's new tokens, of which this rank keeps its own."""
        operation = "ShardedKVCacheStore.append"
        to = self._layer(layer, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        if positions is not None:
            with self.lock:
                own = self._own_positions(operation, [to], (k, v, positions), layout, False)
                self._appends.append_at(operation, [to], own, layout, False)
            return
        rows = view_all((k, v), ROWS, operation)
        form = self._form_of(operation, [to], rows, layout, False)
        counts = self._counts[to.index]
        if form.tokens == 1 and (counts.ring or counts.length < counts.slots) and self.deal.owns(counts.length):
            super().append(layer, k, v, layout=layout)
            counts.grow(1)
            return
        self._require_room(operation, [to], form.tokens)
        self._append_own(operation, [to], rows, layout, form, False)

    @whole
    def append_all(self, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """`KVCacheStore.append_all` of the whole's new tokens, of which this rank keeps its own."""
        operation = "ShardedKVCacheStore.append_all"
        self._layer(0, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        if positions is not None:
            own = self._own_positions(operation, self._layers, (k, v, positions), layout, True)
            self._appends.append_at(operation, self._layers, own, layout, True)
            return
        rows = view_all((k, v), ROWS, operation)
        form = self._form_of(operation, self._layers, rows, layout, True)
        self._require_room(operation, self._layers, form.tokens)
        if len({counts.length for counts in self._counts}) == 1:
            self._append_own(operation, self._layers, rows, layout, form, True)
            return
        for i, to in enumerate(self._layers):
            of_layer = Views([a.restrided(a.shape[1:], a.strides[1:], i * a.strides[0]) for a in rows])
            self._append_own(operation, [to], of_layer, layout, form._replace(axis=form.axis - 1), False)

    def _form_of(self, operation: str, layers: list[Layer], rows: Views, layout: str, stacked: bool) -> _Form:
        """What new rows are, checked once for each form.

        Raises:
            As `KVCacheStore.append`, but for the room.
        """
        key = (rows.key, layout, stacked, self._memory.version)
        form = self._forms.get(key)
        if form is None:
            found, (token_axis, _) = self._appends.checked(operation, layers, rows, layout, stacked)
            axis = rows[0].ndim - (3 if token_axis == 1 else 2)
            form = self._forms.keep(key, _Form(found[0].shape[1 + token_axis], axis))
        return form

    def _own_positions(
        self, operation: str, layers: list[Layer], arrays: tuple[Any, Any, Any], layout: str, stacked: bool
    ) -> Views:
        """New rows of one token, and where they go among this rank's: -1, which is skipped, where they do not.

        Raises:
            OptionError: there are several tokens, which may lie on several ranks.
            As `KVCacheStore.append`.
        """
        k, v, positions = view_all(arrays, NAMES, operation)
        form = self._form_of(operation, layers, Views([k, v]), layout, stacked)
        if form.tokens != 1:
            raise OptionError(
                f"{operation}: {form.tokens} tokens at positions that the device knows, and tokens are cut: nobody on "
                f"the host knows which lie here. Append one token at a time, or without positions."
            )
        out = self._on_device("positions")
        deal(self.runtime, operation, positions, out, self.deal, False)
        return Views([k, v, out])

    def _on_device(self, name: str) -> ArrayView:
        """(batch,) int32 on the device for what is computed of positions there; the same for all calls."""
        found = self._device_counts.get((name, self.batch_size))
        if found is None:
            made = new_array((self.batch_size,), dtypes.int32, self.runtime)
            found = self._device_counts.keep((name, self.batch_size), made)
        return found

    def _require_room(self, operation: str, layers: Sequence[Layer], tokens: int) -> None:
        """All of these layers take so many tokens.

        Raises:
            CapacityError, PositionError: they do not.
        """
        for to in layers:
            counts = self._counts[to.index]
            if counts.ring == 0:
                checks.fits_linear(counts.length, tokens, counts.slots, f"{operation} (layer {counts.index})")
            checks.integer(counts.length + tokens, "length", operation)
        if self.runtime.is_cuda:
            launch.refuse_during_capture(self.runtime, operation)

    def _append_own(
        self, operation: str, layers: list[Layer], rows: Views, layout: str, form: _Form, stacked: bool
    ) -> None:
        """Append those of the rows, which are checked, that lie here, and count all."""
        length = self._counts[layers[0].index].length
        for first, end in self.deal.runs(length, length + form.tokens):
            own = rows
            if end - first < form.tokens:
                own = Views([a.part(form.axis, first - length, end - length) for a in rows])
            if not stacked:
                self._appends.append(operation, layers[0], own, layout)
                continue
            key = (operation, own.key, layout)
            plan = self._appends.plans.get(key)
            if plan is None or not plan.in_step():
                self._appends.append_first(operation, layers, own, layout, key, True)
            else:
                plan.append(own)
        for to in layers:
            self._counts[to.index].grow(form.tokens)

    # --- what is read

    @whole
    def attend_own(
        self,
        operation: str,
        layer: int,
        q: ArrayView,
        parts: ArrayView,
        scores: AttentionScale,
        missing: str,
        seq_lens: Any = None,
        slopes: Mapping[str, ArrayView] = NO_VIEWS,
    ) -> None:
        """The attention of the newest tokens' queries over this rank's keys.

        Args:
            operation: for messages.
            layer: its index.
            q: (batch, Hq, T, D).
            parts: (batch, Hq, T, D_v + 1) float32: each row's result, and behind it its log-sum-exp.
            scores: the scale and the soft cap.
            missing, seq_lens: as in `KVCacheStore.attend`.
            slopes: ALiBi's, by the name that attention has for them, if there are any.

        Raises:
            PositionError: more queries than tokens; or ``missing`` as said; or slopes of too far positions.
            OptionError: `seq_lens` with several queries, with slopes, or with a window whose share of a rank they
                decide.
        """
        if seq_lens is not None:
            if slopes:
                raise OptionError(
                    f"{operation}: slopes with seq_lens on the device, and tokens are cut: how far keys stand from the "
                    f"query is counted on the host. Leave seq_lens out, or cut heads."
                )
            self._attend_at(operation, layer, q, parts, scores, view(seq_lens, "seq_lens", operation))
            return
        counts, queries = self._counts[layer], q.shape[2]
        self._require_countable(operation, slopes, counts.length)
        if 0 < counts.length < queries:
            raise PositionError(
                f"{operation}: the length is {counts.length} for {queries} queries, whose tokens count. Use at least "
                f"{queries}, or 0."
            )
        if missing == "raise" and queries > 1:
            refuse_missing(operation, counts, queries, False)
        first = counts.length - queries
        stretches: Iterable[Stretch] = self.deal.stretches(counts, counts.valid_from, first, counts.length)
        if not counts.length:
            stretches = [Stretch(first, 0, 0, 0, 0, 0)]
        self._attend(operation, layer, q, parts, scores, stretches, first, slopes)

    def _require_countable(self, operation: str, slopes: Mapping[str, ArrayView], length: int) -> None:
        """Slopes count positions that kernels have numbers for.

        Raises:
            PositionError: they would count others.
        """
        if slopes and length > MAX_COUNTED:
            raise PositionError(
                f"{operation}: slopes over tokens that are dealt count {MAX_COUNTED} positions, and the length is "
                f"{length}. Use reset(), or cut heads."
            )

    def _attend_at(
        self, operation: str, layer: int, q: ArrayView, parts: ArrayView, scores: AttentionScale, seq_lens: ArrayView
    ) -> None:
        """`attend_own` of one query a sequence, whose lengths are where the launch reads them."""
        counts, found = self._counts[layer], self._layers[layer]
        around = self.deal.world * self.deal.interleave
        if q.shape[2] != 1:
            raise OptionError(
                f"{operation}: {q.shape[2]} queries with seq_lens on the device, and tokens are cut. Attend with one "
                f"query a sequence, or without seq_lens."
            )
        if counts.ring % around:
            raise OptionError(
                f"{operation}: layer {layer} slides over {counts.ring} tokens behind its sinks, which is no multiple "
                f"of {self.deal.world} ranks x interleave={self.deal.interleave}: with seq_lens on the device nobody "
                f"on the host knows how many of them lie here. Use a window of such a multiple and the sinks."
            )
        lens = self._on_device("lens")
        deal(self.runtime, operation, seq_lens, lens, self.deal, True)
        arrays = {**layer_arrays(found, q), "lens": lens}
        span = counts.ring // self.deal.world
        plan = kept_plan(self.runtime, operation, arrays, scores, span, found.sinks, found.ring, found.formats)
        out, lse = self._out_and_lse(parts)
        oldest = self.deal.count(counts.trimmed_to)
        plan.attend(None, arrays, out, True, "taichi", 0, oldest, lse=lse, is_part=True)

    def _out_and_lse(self, parts: ArrayView) -> tuple[ArrayView, ArrayView]:
        """Where parts have their results, and where their log-sum-exps."""
        width = self.head_dim_v
        out = parts.restrided((*parts.shape[:3], width), parts.strides)
        return out, parts.restrided(parts.shape[:3], parts.strides[:3], width)

    def extension(
        self, operation: str, layer: int, arrays: tuple[Any, Any, Any], layout: str, scores: AttentionScale
    ) -> tuple[Queries, Views]:
        """What `extend` was given as q, k and v, checked: the queries and the rows.

        Raises:
            As `KVCacheStore.extend`.
        """
        found = self._layer(layer, operation)
        layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
        rows = view_all(arrays[1:], ROWS, operation)
        form = self._form_of(operation, [found], rows, layout, False)
        self._require_room(operation, [found], form.tokens)
        sizes = self.batch_size, self.num_kv_heads, self.head_dim, form.tokens
        queries = extend_queries(operation, view(arrays[0], "q", operation), layout, *sizes, self.runtime)
        layer_plan(self.runtime, operation, layer_arrays(found, queries.heads_first), found, scores)
        return queries, rows

    @whole
    def extend_own(
        self,
        operation: str,
        layer: int,
        rows: Views,
        layout: str,
        q: ArrayView,
        parts: ArrayView,
        scores: AttentionScale,
        slopes: Mapping[str, ArrayView] = NO_VIEWS,
    ) -> None:
        """Append new tokens, which `extension` checked, and attend with their queries over this rank's keys."""
        to, counts = self._layers[layer], self._counts[layer]
        form = self._form_of(operation, [to], rows, layout, False)
        self._require_countable(operation, slopes, counts.length + form.tokens)
        start, end = counts.length, counts.length + form.tokens
        # A sliding layer takes a prompt block by block, since its last tokens would overwrite what its first see.
        for first, after in self.deal.blocks(start, end) if counts.ring else [(start, end)]:
            some = Views([a.part(form.axis, first - start, after - start) for a in rows])
            oldest = counts.valid_from  # before those of the block take its place
            self._append_own(operation, [to], some, layout, form._replace(tokens=after - first), False)
            stretches = self.deal.stretches(counts, oldest, first, after)
            self._attend(operation, layer, q, parts, scores, stretches, start, slopes)

    def _attend(
        self,
        operation: str,
        layer: int,
        q: ArrayView,
        parts: ArrayView,
        scores: AttentionScale,
        stretches: Iterable[Stretch],
        start: int,
        slopes: Mapping[str, ArrayView],
    ) -> None:
        """Attention of each stretch of queries, the first of which stands at position `start`."""
        found, live = self._layers[layer], self.runtime
        stage = Staging(live, [q, parts], [False, True])
        q, parts = stage.arrays
        out, lse = self._out_and_lse(parts)
        for at in stretches:
            some, to, to_lse = (a.part(2, at.first - start, at.end - start) for a in (q, out, lse))
            arrays = layer_arrays(found, some, slopes)
            dealt = (self.deal.interleave, (self.deal.world - 1) * self.deal.interleave) if slopes else (0, 0)
            kept = found.sinks, found.ring, found.formats
            plan = kept_plan(live, operation, arrays, scores, at.span, *kept, dealt)
            plan.attend(
                None, arrays, to, True, "taichi", at.length, at.first_valid, at.ahead, lse=to_lse, is_part=True,
                first_query=at.first - self.deal.rank * self.deal.interleave,
            )  # fmt: skip
        stage.finish()

    @property
    def key_format(self) -> GroupFormat | None:
        """The format of keys that are groups of codes."""
        return self._memory.formats[0]

    def held_positions(self, layer: int) -> np.ndarray[Any, Any]:
        """The positions of the tokens of a layer that are there to be seen, on all ranks together, ascending."""
        counts = self._counts[layer]
        fixed = np.arange(min(counts.length, counts.sinks))
        return np.concatenate([fixed, np.arange(max(counts.valid_from, counts.sinks), counts.length)])

    @whole
    def weigh_own(
        self, operation: str, layer: int, q: ArrayView, lse: ArrayView, to: Any, scores: AttentionScale
    ) -> None:
        """How much weight the newest tokens' queries gave this rank's keys, of those that are held.

        Args:
            operation: for messages.
            layer: its index.
            q: (batch, Hq, T, D).
            lse: (batch, Hq, T), the log-sum-exps over the keys of all ranks.
            to: a tensor (batch, num_kv_heads, n) of zeros, n at least this rank's share of `held_positions`.
            scores: the scale and the soft cap.
        """
        counts, found, live = self._counts[layer], self._layers[layer], self.runtime
        start = counts.length - q.shape[2]
        fixed = self.deal.count(min(counts.sinks, counts.length))
        behind = self.deal.count(max(counts.valid_from, counts.sinks))  # this rank's first that is held behind these
        for at in self.deal.stretches(counts, counts.valid_from, start, counts.length):
            oldest = max(found.sinks, at.first_valid, at.length - found.ring if found.ring else 0)
            own_fixed, recent = min(found.sinks, at.length), max(0, at.length - oldest)
            mass = to.new_zeros((*to.shape[:2], own_fixed + recent))
            some, of_some = (a.part(2, at.first - start, at.end - start) for a in (q, lse))
            stage = Staging(live, [some, of_some, view(mass, "mass", operation)], [False, False, True])
            some, of_some, own = stage.arrays
            arrays = layer_arrays(found, some)
            plan = kept_plan(live, operation, arrays, scores, at.span, found.sinks, found.ring, found.formats)
            plan.weigh(arrays, of_some, own, at.length, at.first_valid, at.ahead)
            stage.finish()
            to[..., :own_fixed] += mass[..., :own_fixed]
            if recent:
                first = fixed + oldest - behind
                to[..., first : first + recent] += mass[..., own_fixed:]

    # --- counts

    @property
    def counts(self) -> list[Layer]:
        """The counts of the whole's layers."""
        return self._counts

    def take_counts(self, counts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Let the whole have these lengths and oldest valid positions; those of this rank's tokens."""
        for layer, (length, valid_from) in zip(self._counts, counts, strict=True):
            layer.length, layer.valid_from = length, valid_from
        return [(self.deal.count(length), self.deal.count(valid_from)) for length, valid_from in counts]

    @whole
    def trim(self, n: int) -> None:
        """`KVCacheStore.trim` of the whole's tokens."""
        super().trim(n)
        self._follow()

    @whole
    def reset(self) -> None:
        """`KVCacheStore.reset`."""
        super().reset()
        self._follow()

    @whole
    def advance(self, tokens: int) -> None:
        """`KVCacheStore.advance`."""
        super().advance(tokens)
        for own, counts in zip(self._layers, self._counts, strict=True):
            own.grow(self.deal.count(counts.length) - own.length)

    def _follow(self) -> None:
        """Let the counts of this rank's tokens be those of the whole, which went down."""
        for own, counts in zip(self._layers, self._counts, strict=True):
            own.length = min(own.length, self.deal.count(counts.length))
            own.valid_from = min(own.valid_from, own.length)

    @whole
    def snapshot(self) -> Any:
        """`KVCacheStore.snapshot` of this rank's tokens and the whole's counts."""
        counts = tuple((layer.length, layer.valid_from) for layer in self._counts)
        return DealtSnapshot(super().snapshot(), self.deal, counts)

    @whole
    def restore(self, snapshot: Any) -> None:
        """`KVCacheStore.restore` of a snapshot of this rank's.

        Raises:
            As `KVCacheStore.restore`; OptionError too: it is one of another rank, or of tokens dealt otherwise.
        """
        if not isinstance(snapshot, DealtSnapshot) or snapshot.deal != self.deal:
            raise OptionError(
                f"ShardedKVCacheStore.restore: {snapshot!r} is no snapshot of tokens dealt as here ({self.deal}). Give "
                f"what `snapshot` returned on this rank."
            )
        super().restore(snapshot.own)
        for counts, (length, valid_from) in zip(self._counts, snapshot.whole, strict=True):
            counts.length, counts.valid_from = length, valid_from


class DealtSnapshot(NamedTuple):
    """A snapshot of a rank's tokens, with the counts of all. Give it to `ShardedKVCacheStore.restore`."""

    own: Snapshot
    deal: Deal
    whole: tuple[tuple[int, int], ...]  # length and oldest valid position of each layer
