"""ContiguousLayers: a layer is an array of slots; in a sliding layer, those after the sinks are a ring.

`KVCacheStore` uses it for every dtype except groups along tokens. Its layers are adjacent in memory, so that one launch
appends to all of them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import runtime
from tikv.arrays import Array, ArrayView, CacheArray, Views, view, view_without_owner
from tikv.errors import CapacityError, OptionError, ShapeError
from tikv.formats import parse_aging
from tikv.ops import checks
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.request import AttendRequest
from tikv.ops.rotate import Rope
from tikv.runtime.interrupts import Held
from tikv.stores import files
from tikv.stores.draft import Draft
from tikv.stores.files import contiguous as contiguous_files
from tikv.stores.history import History
from tikv.stores.layers import drafts
from tikv.stores.layers.append import appends_to
from tikv.stores.layers.attend import (
    last_queries,
    layer_arrays,
    layer_plan,
    mass_shape,
    refuse_missing,
    refuse_wrapped,
    results_of,
    weigh,
)
from tikv.stores.layers.compaction import compact_layers, tokens_by_head
from tikv.stores.layers.counts import Layer, require_uncompacted
from tikv.stores.layers.extend import extend
from tikv.stores.layers.memory import LayerMemory
from tikv.stores.layers.queries import Queries, attend_queries
from tikv.stores.layers.rewriting import rewrite_layer, rewritten_from, tokens_of
from tikv.stores.layers.storage import NO_PAGES, LayerStorage, StoreConfig, Triple
from tikv.stores.layers.summaries import summarize, summarize_last
from tikv.stores.layers.unkept import extend_unkept
from tikv.stores.row_format import RowFormats, check_summarized


class Captured(NamedTuple):
    """Counts and copies of the filled slots of layers."""

    batch_size: int
    divisors: Any
    windows: list[tuple[int | None, int]]
    counts: list[tuple[int, int, int]]  # length, oldest valid position, filled slots
    histories: list[History | None]
    arrays: list[list[ArrayView]]


class ContiguousLayers(LayerStorage):
    """Layers of slots, see the module; `appends` has the plans of appends to them."""

    title = "a contiguous store"
    file_kind = "KVCacheStore"
    keeps_summaries = True

    def __init__(
        self,
        live: runtime.Runtime,
        config: StoreConfig,
        operation: str = "KVCacheStore",
        rows: RowFormats | None = None,
    ) -> None:
        self.runtime = live
        self.rows = rows or RowFormats.checked(operation, live, config.num_kv_heads, **config.rows)
        self.counts = config.counts()
        check_summarized(operation, self.rows, config.page_summaries)
        self.memory = LayerMemory(
            live, self.counts, self.rows, config.num_kv_heads, config.batch_size, config.page_summaries,
            config.place == "host",
        )  # fmt: skip
        self.appends = appends_to(self.memory)
        self.lock = self.memory.lock

    @classmethod
    def serves(cls, dtype: Any) -> bool:
        """Every dtype but those in which only older tokens are codes."""
        return parse_aging(dtype) is None

    def layer(self, operation: str, layer: int) -> Layer:
        return self.counts[layer]

    # --- writes

    def append(self, operation: str, layer: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.append`: one launch."""
        self.appends.append(operation, self.counts[layer], rows, layout)

    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """As `LayerStorage.append_all`: one launch per block of memory, if the layers have the same length."""
        self.appends.append_all(operation, rows, layout)

    def append_at(self, operation: str, layer: int | None, arrays: Views, layout: str) -> None:
        layers = self.counts if layer is None else [self.counts[layer]]
        require_uncompacted(layers, operation, "Append without positions.")
        self.appends.append_at(operation, layers, arrays, layout, layer is None)

    def require_positions(self, operation: str, remedy: str) -> None:
        self.appends.require_positions(operation)
        require_uncompacted(self.counts, operation, remedy)

    def advance(self, operation: str, tokens: int) -> None:
        for layer in self.counts:
            layer.require_room(operation, tokens)
        for layer in self.counts:
            layer.grow(tokens)

    # --- reads

    def attend(self, operation: str, layer: int, q: Array, request: AttendRequest) -> Any:
        """As `LayerStorage.attend`: one launch, or two if the keys are split over several."""
        state, memory, live, seq_lens = self.counts[layer], self.memory, self.runtime, request.seq_lens
        q_view, beside = view_without_owner(q, "q", operation), request.terms.views(operation)
        length, oldest = state.length, state.valid_from
        if state.head_lengths is not None and seq_lens is None:
            beside["lens"], length = state.head_lengths.array, 0
        if seq_lens is not None:
            require_uncompacted([state], operation, "Leave seq_lens out.")
            beside["lens"] = lens = view(seq_lens, "seq_lens", operation)
            checks.on_device([("seq_lens", lens)], live, operation)
            length, oldest = 0, state.trimmed_to
        queries, plan, mass = self._attention(operation, state, q_view, beside, request)
        if seq_lens is None:
            queries.refuse_more_than(operation, state.length, memory.num_kv_heads)
        if request.block is not None:
            refuse_wrapped(operation, state, 0)
        elif request.missing == "raise" and queries.tokens > 1:
            refuse_missing(operation, state, queries.tokens, seq_lens is not None)
        asked = queries.as_read(q_view)
        arrays = layer_arrays(state, asked, beside)
        if not mass.kind:
            to = queries.results(request.out, request.return_lse)
            return plan.attend(q, arrays, AttendedTokens(length, oldest), to, request.impl)
        mass, indices = mass._replace(into=request.mass_into), arrays.get("indices")
        to_mass = mass.array(operation, q, mass_shape(memory, state.most_held, indices), live, arrays)
        to = queries.results(request.out, True)
        result, lse = plan.attend(q, arrays, AttendedTokens(length, oldest), to, request.impl)
        to_lse = queries.as_read(view(lse, "lse", operation))
        asking = last_queries(asked, to_lse, mass.queries)
        mass.start(to_mass)
        weigh(operation, memory, state, *asking, request.scores, mass, to_mass, indices, not request.block)
        return results_of(result, lse if request.return_lse else None, to_mass)

    def _attention(
        self, operation: str, layer: Layer, q: ArrayView, beside: dict[str, ArrayView], request: AttendRequest
    ) -> tuple[Queries, AttentionPlan, Mass]:
        """The form of these queries, their plan, and the mass that is asked for; checked once per form.

        `beside` are the call's arrays other than the queries and those of the layer.
        """
        known = request.seq_lens is None, request.mass_into is None
        key = (operation, q.key, layer.form, request.choices, *known, *beside)
        if beside:
            key += tuple([a.key for a in beside.values()])
        attention: tuple[Queries, AttentionPlan, Mass] | None = self.runtime.plans.get(key)
        if attention is None:
            mass = request.asked_mass(operation)._replace(into=None)  # a kept plan holds no array
            sizes = self.batch_size, self.memory.num_kv_heads
            queries = attend_queries(operation, q, request.layout, *sizes, self.rows.k.width, self.runtime)
            arrays = layer_arrays(layer, queries.as_read(q), beside)
            block = request.as_block(operation, queries.tokens)
            plan = layer_plan(self.runtime, operation, arrays, layer, request.scores, causal=not block)
            request.check_choices(operation)
            attention = self.runtime.plans.keep(key, (queries, plan, mass))
        return attention

    def extend(self, operation: str, layer: int, arrays: Triple, request: AttendRequest) -> Any:
        """As `LayerStorage.extend`; if it fails after its append, the last page's summary is restored too."""
        state = self.counts[layer]
        if not request.keep:
            return extend_unkept(operation, self.appends, state, arrays, request)
        if state.summaries is None:
            return extend(operation, self.appends, state, arrays, request)
        end = state.length
        try:
            return extend(operation, self.appends, state, arrays, request)
        except BaseException:
            with Held():
                if state.length == end:
                    summarize_last(operation, self.memory, [state])
            raise

    def rewrite(self, operation: str, layer: int, start: int, rows: Views, layout: str) -> None:
        """As `LayerStorage.rewrite`: one launch."""
        state = self.counts[layer]
        first = rewritten_from(operation, state, start, tokens_of(rows[0], layout))
        rewrite_layer(operation, self.appends, state, first, rows, layout)
        summarize(operation, self.memory, [state])

    def tokens(self, operation: str, layer: int) -> tuple[CacheArray, CacheArray]:
        """As `LayerStorage.tokens`: one launch."""
        state = self.counts[layer]
        if state.head_lengths is not None:
            return tokens_by_head(operation, self.memory, state)
        return self.memory.tokens(operation, state)

    # --- dropping and reordering tokens

    def page_summaries(self, operation: str, layer: int) -> tuple[ArrayView, ArrayView]:
        """As `LayerStorage.page_summaries`, in place; OptionError for a layer that keeps none."""
        state = self.counts[layer]
        if self.memory.page is None:
            raise OptionError(f"{operation}: the store keeps no summaries of pages. Make it with page_summaries=16.")
        if state.summaries is None:
            raise OptionError(
                f"{operation}: layer {layer} has window={state.window}. {NO_PAGES} Ask a layer without a window, or "
                f"summarise what tokens() returns with tikv.summarize_pages."
            )
        return state.summaries

    def compact(self, operation: str, keeps: Mapping[int, Any], rope: Rope | None, merge: Any = None) -> None:
        layers = [self.counts[i] for i in keeps]
        compact_layers(operation, self.memory, layers, list(keeps.values()), rope, merge=merge)
        summarize(operation, self.memory, layers)

    def commit(self, operation: str, path: Any, drafted: int | None, draft: Draft) -> None:
        first = drafts.commit(operation, self.memory, path, drafted, draft)
        summarize(operation, self.memory, self.counts, first - 1)  # the previous page, if no drafted token stays

    def trim(self, operation: str, n: int) -> None:
        self.memory.trim(operation, self.counts, n)
        summarize_last(operation, self.memory, self.counts)

    def reset(self) -> None:
        self.memory.reset(self.counts)

    def reorder(self, operation: str, index: Array) -> None:
        """As `LayerStorage.reorder`: in place."""
        self.memory.reorder(operation, index)
        summarize(operation, self.memory, self.counts)

    def select(self, operation: str, index: Array) -> None:
        """As `LayerStorage.select`: in new memory."""
        self.memory.select(self.memory.sequences_of(operation, index))
        summarize(operation, self.memory, self.counts)

    # --- copies

    def capture(self) -> Captured:
        """As `LayerStorage.capture`: filled slots only, on the device."""
        counts = [(layer.length, layer.valid_from, layer.filled) for layer in self.counts]
        histories, arrays = [layer.history for layer in self.counts], self.memory.copy_filled()
        return Captured(self.batch_size, self.rows.divisors, self._windows(), counts, histories, arrays)

    def _windows(self) -> list[tuple[int | None, int]]:
        return [(layer.window, layer.sinks) for layer in self.counts]

    def restore(self, operation: str, captured: Any, shown: tuple[str, str]) -> None:
        memory, (snapshot, store) = self.memory, shown
        ours = [[(a.shape[1:2] + a.shape[3:], a.dtype) for a in layer.arrays] for layer in self.counts]
        theirs = [[(a.shape[1:2] + a.shape[3:], a.dtype) for a in arrays] for arrays in captured.arrays]
        if (ours, self._windows(), self.rows.divisors) != (theirs, captured.windows, captured.divisors):
            raise ShapeError(
                f"{operation}: {snapshot} does not belong to this store ({store}). Restore it into the store it "
                "was taken from."
            )
        for layer, (_, _, filled) in zip(self.counts, captured.counts, strict=True):
            if filled > layer.slots:
                raise CapacityError(
                    f"{operation}: the snapshot has {filled} tokens in layer {layer.index}, which has room for "
                    f"{layer.slots} here. Restore it into a store with capacity={filled} or more."
                )
        if captured.batch_size != memory.batch_size:
            memory.allocate(captured.batch_size)
        for layer, (length, oldest, _), history in zip(self.counts, captured.counts, captured.histories, strict=True):
            memory.recount(layer, length, history, oldest)
        memory.write_filled(captured.arrays)
        summarize(operation, memory, self.counts)

    def filled(self, layer: int) -> list[tuple[ArrayView, int]]:
        state = self.counts[layer]
        return [(a, state.filled) for a in state.arrays]

    def count_as(self, layer: int, other: ContiguousLayers, index: int) -> None:
        state, source = self.counts[layer], other.counts[index]
        state.index = source.index
        counts = (state.length, state.valid_from), (source.length, source.valid_from)
        if state.history is not source.history or counts[0] != counts[1]:
            self.memory.recount(state, source.length, source.history, source.valid_from)
        state.newest = source.newest

    def to_host(self, operation: str) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        return list(zip(self.counts, self.memory.to_host(), strict=True))

    def take_over(
        self,
        operation: str,
        counts: Sequence[Sequence[int]],
        arrays: Sequence[Sequence[Any]],
        histories: Sequence[History | None] | None = None,
    ) -> None:
        """As `LayerStorage.take_over`, with what compactions left; or ShapeError, and nothing is changed."""
        histories, counted = histories or [None] * len(self.counts), [copy.copy(layer) for layer in self.counts]
        for layer, (length, valid_from), filled, history in zip(counted, counts, arrays, histories, strict=True):
            layer.length, layer.valid_from = int(length), int(valid_from)
            _check_layer(operation, layer, filled, history is not None and not history.even)
        for state, layer, history in zip(self.counts, counted, histories, strict=True):
            self.memory.recount(state, layer.length, history, layer.valid_from)
        self.memory.from_host(arrays)
        summarize(operation, self.memory, self.counts)

    # --- files

    def save(self, path: str | os.PathLike[str], config: StoreConfig, operation: str) -> None:
        saved = config._replace(batch_size=self.batch_size)
        contiguous_files.write(path, saved.arguments(self.rows), self.to_host(operation), operation)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], live: runtime.Runtime, operation: str, **placed: Any
    ) -> tuple[StoreConfig, Any]:
        arguments, counts, histories, arrays = contiguous_files.read(path, operation)
        with files.understanding(path, operation):
            config = StoreConfig.checked("KVCacheStore", **arguments, **placed)
            storage = cls(live, config)
            storage.take_over(operation, counts, arrays, histories)
        return config, storage


def _check_layer(operation: str, layer: Layer, arrays: Sequence[np.ndarray[Any, Any]], uneven: bool) -> None:
    for name, mine, array in zip(layer.named, layer.arrays, arrays, strict=False):
        shape = (*mine.shape[:2], layer.filled, *mine.shape[3:])
        if array.shape != shape or array.dtype != mine.dtype.numpy or layer.length > 2**62:
            raise ShapeError(
                f"{operation}: {name} of layer {layer.index} is {array.dtype} {array.shape} where "
                f"{mine.dtype.name} {shape} is needed."
            )
    if len(arrays) != len(layer.arrays):
        raise ShapeError(
            f"{operation}: layer {layer.index} has {len(arrays)} arrays where {len(layer.arrays)} are needed."
        )
    if layer.ring == 0 and layer.length > layer.slots:
        raise ShapeError(f"{operation}: layer {layer.index} has {layer.length} tokens in {layer.slots} slots.")
    fits = layer.valid_from == 0 if uneven else layer.held <= layer.slots  # heads of different lengths wrap separately
    if not 0 <= layer.valid_from <= layer.length or not fits:
        raise ShapeError(
            f"{operation}: layer {layer.index} has {layer.length} tokens in {layer.slots} slots, and the oldest is "
            f"{layer.valid_from}."
        )
