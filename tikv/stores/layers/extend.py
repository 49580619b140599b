"""`extend`: attend with new tokens over what a contiguous layer holds and over those tokens, and append them.

A ring overwrites its oldest tokens with the newest, so a prompt cannot be appended first and attended over afterwards:
its first queries see tokens that its last ones overwrite. So attention reads first the unchanged ring and the new rows,
merges both results by their log-sum-exps, and then the rows are appended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tikv.arrays import Array, ArrayView, Views, view, view_all, view_of_new, view_without_owner
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.attention.terms import check_new_tokens, tree_of
from tikv.ops.staging import Staging
from tikv.stores.layers.append import ROWS, Appends
from tikv.stores.layers.attempt import attempt
from tikv.stores.layers.attend import (
    cache_plan,
    last_queries,
    layer_arrays,
    layer_plan,
    mass_shape,
    refuse_wrapped,
    results_of,
    weigh,
)
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.queries import AXES, extend_queries, heads_first


def extend(operation: str, appends: Appends, layer: Layer, arrays: tuple[Any, Any, Any], request: AttendRequest) -> Any:
    """Attend with new queries over what a layer holds and their own tokens, then append those; `KVCacheStore.extend`.

    `arrays` are q, k and v as the caller gave them.
    """
    memory, layout = appends.memory, request.layout
    live, scores, return_lse = memory.runtime, request.scores, request.return_lse
    mass = request.asked_mass(operation)
    k_rows = view_all(arrays[1:], ROWS, operation)
    tokens = appends.checked_for_room(operation, [layer], k_rows, layout, False)
    like = arrays[0]
    sizes = memory.batch_size, memory.num_kv_heads, memory.rows.k.width, tokens
    q_view = view_without_owner(like, "q", operation)
    queries = extend_queries(operation, q_view, layout, *sizes, live)
    q = queries.as_read(q_view)
    # The new rows as caches (batch, H, T, D), in any order in memory.
    new = [heads_first(a, AXES[layout][4 - a.ndim :]) for a in k_rows]
    added = request.terms.views(operation)
    plan = layer_plan(live, operation, layer_arrays(layer, q, added), layer, scores)  # raises if something does not fit
    block = request.in_block(operation, tokens)
    if block:
        refuse_wrapped(operation, layer, tokens)
    check_new_tokens(operation, added, tokens, live)

    out = queries.new_out(like, memory.rows.v.width, live)
    lse = queries.new_lse(like, live) if return_lse or mass.kind else None
    to_mass = None
    if mass.kind:
        others = {**layer_arrays(layer, q), "new k": new[0], "new v": new[1]}
        to_mass = mass.array(operation, like, mass_shape(memory, layer.held_after(tokens)), live, others)
    results = [view_of_new(out, "out", operation)]
    if lse is not None:
        results.append(view_of_new(lse, "lse", operation))
    with attempt(operation, [layer]):
        if tokens:
            # An append takes K and V wherever the caller has them; attention needs all arrays on the device.
            read = [*added.values(), q, *new]
            stage = Staging(live, [*read, *results], [False] * len(read) + [True] * len(results))
            terms = dict(zip(added, stage.arrays, strict=False))
            call = _Extension(operation, appends, layer, scores, terms, plan.family.most_queries)
            staged_q, k, v, staged_out, *staged_lse = stage.arrays[len(added) :]
            to = queries.as_read(staged_out)
            to_lse = queries.as_read(staged_lse[0]) if staged_lse else None
            wraps = layer.ring > 0 and layer.length + tokens > layer.slots and tokens > 1
            alone = live.invariant and not tree_of(added)  # else the split into old and new depends on the call
            if wraps and (alone or layer.head_lengths is not None):
                call.token_by_token((k, v), staged_q, to, to_lse)
            elif wraps:
                call.attend_over_both((k, v), staged_q, to, to_lse)
                appends.append(operation, layer, k_rows, layout)
            else:
                appends.append(operation, layer, k_rows, layout)
                call.attend_over_layer(staged_q, to, to_lse, block)
            if mass.kind and to_lse is not None:
                mass.start(to_mass)
                call.weigh(*last_queries(staged_q, to_lse, mass.queries), mass, to_mass, block)
            stage.finish()
        elif mass.kind:
            mass.start(to_mass)
        return results_of(out, lse if return_lse else None, to_mass)


BOTH = Results(return_lse=True)  # results and log-sum-exps, in new arrays


class _Extension(NamedTuple):
    """The launches of one `extend`, over arrays (batch, heads, tokens, width) that the device sees."""

    operation: str
    appends: Appends
    layer: Layer
    scores: AttentionScale
    terms: Mapping[str, ArrayView]
    most_queries: int  # in one launch

    def attend_over_layer(self, q: ArrayView, out: ArrayView, lse: ArrayView | None, block: int) -> None:
        """Attention over a layer that already has the new tokens, and still has all that their queries see.

        The last `block` queries see all of them.
        """
        tokens = q.shape[2]
        behind, causal = self.layer.length - tokens, tokens - block
        for first, end, piece, to in self._pieces(q, out, lse, self.most_queries, block):
            of_block = first >= causal
            self._over_layer(piece, self.terms, behind + (tokens if of_block else end), 0, to, not of_block)

    def weigh(self, q: ArrayView, lse: ArrayView, mass: Mass, to: Any, block: int) -> None:
        """The mass of the keys, from queries of which the last `block` see all new tokens."""
        memory, tokens = self.appends.memory, q.shape[2]
        if not block:
            weigh(self.operation, memory, self.layer, q, lse, self.scores, mass, to)
            return
        block = min(block, tokens)
        if block < tokens:  # queries before the block are those of tokens before its own
            arrays = layer_arrays(self.layer, q.part(2, 0, tokens - block))
            length = self.layer.length - block
            if self.layer.head_lengths is not None:
                arrays["lens"], length = self.layer.head_lengths.shifted(-block), 0
            plan = layer_plan(memory.runtime, self.operation, arrays, self.layer, self.scores)
            seen = AttendedTokens(length, self.layer.valid_from)
            plan.weigh(arrays, lse.part(2, 0, tokens - block), view(to, "mass", self.operation), seen, mass.kind)
        last = q.part(2, tokens - block, tokens), lse.part(2, tokens - block, tokens)
        weigh(self.operation, memory, self.layer, *last, self.scores, mass, to, causal=False)

    def token_by_token(
        self, new: tuple[ArrayView, ArrayView], q: ArrayView, out: ArrayView, lse: ArrayView | None
    ) -> None:
        """Append each token and attend with it, for heads whose rings overwrite different tokens."""
        for t, end, piece, to in self._pieces(q, out, lse, 1):
            self.appends.append(self.operation, self.layer, Views([a.part(2, t, end) for a in new]), "head_major")
            self._over_layer(piece, self.terms, self.layer.length, 0, to)

    def attend_over_both(
        self, new: tuple[ArrayView, ArrayView], q: ArrayView, out: ArrayView, lse: ArrayView | None
    ) -> None:
        """Attention over a ring as it is before the append, and over the new tokens."""
        layer, stored = self.layer, self._as_stored(new)
        but_sinks = {name: a for name, a in self.terms.items() if name != "sink_logits"}
        for first, end, piece, to in self._pieces(q, out, lse, self.most_queries):
            if layer.length > 0 and (layer.sinks > 0 or first + 1 < layer.ring):
                of_new = self._over_new(piece, but_sinks, stored, end, BOTH)
                of_layer = self._over_layer(piece, self.terms, layer.length, end, BOTH)
                merge_into(self.operation, (*of_layer, *of_new), False, to.out, to.lse)
            else:
                self._over_new(piece, self.terms, stored, end, to)

    def _pieces(
        self, q: ArrayView, out: ArrayView, lse: ArrayView | None, most: int, block: int = 0
    ) -> Iterator[tuple[int, int, ArrayView, Results]]:
        """Pieces of the queries: the first and the end of each, its queries, and the places of their results.

        None has queries of the last `block` and others.
        """
        tokens = q.shape[2]
        causal = tokens - block
        for first in (*range(0, causal, most), *range(causal, tokens, most)):
            end = min(causal if first < causal else tokens, first + most)
            to_lse = None if lse is None else lse.part(2, first, end)
            to = Results(out.part(2, first, end), lse is not None, to_lse, is_new=True)
            yield first, end, q.part(2, first, end), to

    def _over_layer(
        self, q: Array, terms: Mapping[str, ArrayView], length: int, ahead: int, to: Results, causal: bool = True
    ) -> Any:
        """Attention over the first `length` tokens of the layer, for queries that end `ahead` tokens after them."""
        layer = self.layer
        arrays = layer_arrays(layer, q, terms)
        if layer.head_lengths is not None:
            arrays["lens"], length = layer.head_lengths.shifted(length - layer.length), 0
        plan = layer_plan(self.appends.memory.runtime, self.operation, arrays, layer, self.scores, causal)
        return plan.attend(None, arrays, AttendedTokens(length, layer.valid_from, ahead), to)

    def _over_new(
        self, q: Array, terms: Mapping[str, ArrayView], new: dict[str, ArrayView], end: int, to: Results
    ) -> Any:
        """Attention of the queries up to token `end` over the new rows up to it."""
        layer, live, arrays = self.layer, self.appends.memory.runtime, {"q": q, **new, **terms}
        sinks = max(0, min(layer.sinks - layer.length, new["k"].shape[2]))
        plan = cache_plan(live, self.operation, arrays, self.scores, layer.ring, sinks, 0, layer.formats)
        return plan.attend(None, arrays, AttendedTokens(end), to)

    def _as_stored(self, new: tuple[ArrayView, ArrayView]) -> dict[str, ArrayView]:
        """The new rows in the layer's dtype: unchanged, or as an append would convert them."""
        memory, tokens = self.appends.memory, new[0].shape[2]
        if new[0].dtype is memory.rows.k.dtype and memory.rows.alike:
            return {"k": new[0], "v": new[1]}
        layer = Layer(0, tokens, None, 0)
        Appends(memory.like([layer])).append(self.operation, layer, Views(new), "head_major")
        return {name: a for name, a in layer_arrays(layer, new[0]).items() if name != "q"}
