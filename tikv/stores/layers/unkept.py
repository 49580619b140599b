"""`extend` with ``keep=False``: attention over what a cache holds and over new tokens, of which nothing is kept.

One launch reads the cache and one the new rows, unchanged; a third merges both. Nothing is written to the cache. With
KVarN's tiles, `extend` attends in this way too, and then appends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, new_array, view, view_all
from tikv.errors import CapacityError
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.options import MOST_QUERIES
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.attention.terms import check_new_tokens
from tikv.ops.staging import Staging
from tikv.stores.layers.append import ROWS, Appends
from tikv.stores.layers.attend import (
    cache_plan,
    last_queries,
    layer_arrays,
    layer_plan,
    mass_shape,
    refuse_wrapped,
    results_of,
)
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import copy_rows, rows_of
from tikv.stores.layers.queries import AXES, extend_queries, heads_first
from tikv.stores.layers.rewriting import tokens_of

# over_held(q, ahead, terms, to): attention of queries that end `ahead` tokens after the newest that is held; None if
# there is nothing to attend over.
OverHeld = Callable[[ArrayView, int, Mapping[str, ArrayView], Results], Any]
PARTIAL_BYTES = 1 << 26  # of a result that is merged, if more queries than `MOST_QUERIES` are taken at a time


class UnkeptTokens(NamedTuple):
    """New tokens of several sequences, as caches (batch, H, T, D) that the device sees, and what their queries see."""

    live: runtime.Runtime
    operation: str
    k: ArrayView
    v: ArrayView
    scores: AttentionScale
    terms: Mapping[str, ArrayView]
    span: int = 0  # tokens after the sinks that a query sees; 0 for all
    sinks: int = 0  # how many of the first new tokens are sinks
    block: int = 0  # how many of the last queries see all new tokens
    held: int = 0  # how many of the first of these tokens are no new ones, but copies of what is held

    def check(self, q: ArrayView) -> None:
        """Raise if attention cannot read these rows with these queries (batch, Hq, T, D)."""
        self._plan({"q": q, "k": self.k, "v": self.v, **self.terms})
        check_new_tokens(self.operation, self.terms, q.shape[2], self.live)

    def _plan(self, arrays: dict[str, ArrayView], causal: bool = True) -> Any:
        return cache_plan(self.live, self.operation, arrays, self.scores, self.span, self.sinks, 0, causal=causal)

    def attend(self, q: ArrayView, out: ArrayView, lse: ArrayView | None, over_held: OverHeld | None = None) -> None:
        """Attention of the new tokens' queries over what is held and over the tokens before, some in a launch.

        Without `over_held`, there is nothing held but what is among these tokens.
        """
        but_sinks = {name: a for name, a in self.terms.items() if name != "sink_logits"}
        causal, most = q.shape[2] - self.block, self._most_queries(q, over_held is not None)
        for first in (*range(0, causal, most), *range(causal, q.shape[2], most)):
            end = min(causal if first < causal else q.shape[2], first + most)
            piece, to = q.part(2, first, end), out.part(2, first, end)
            to_lse = None if lse is None else lse.part(2, first, end)
            held = over_held and over_held(piece, end, self.terms, self._partial(piece))
            terms = self.terms if held is None else but_sinks
            arrays = {"q": piece, "k": self.k, "v": self.v, **terms}
            results = Results(to, lse is not None, to_lse) if held is None else self._partial(piece)
            seen = AttendedTokens(self.held + (end if first < causal else q.shape[2]))
            new = self._plan(arrays, first < causal).attend(None, arrays, seen, results)
            if held is not None:
                merge_into(self.operation, (*held, *new), False, to, to_lse)

    def behind(self, held: int, memory: Sequence[ArrayView], sinks: int) -> UnkeptTokens:
        """Copies of these tokens behind so many that `memory` already has; `sinks` of all are sinks."""
        new = self.k, self.v
        shape, widths = self.k.shape[:3], [a.shape[3] for a in new]
        src, dst = [rows_of(a) for a in new], [rows_of(a, held) for a in memory]
        copy_rows(self.live, self.operation, src, dst, widths, (shape[0], shape[1], shape[2]))
        return self._replace(k=memory[0], v=memory[1], held=held, sinks=sinks)

    def _most_queries(self, q: ArrayView, merges: bool) -> int:
        """How many queries are taken at a time: as many as their kernels take, or as there is room to merge."""
        most: int = self._plan({"q": q, "k": self.k, "v": self.v, **self.terms}).family.most_queries
        of_query = q.shape[0] * q.shape[1] * self.v.shape[3] * 4
        return min(most, max(MOST_QUERIES, PARTIAL_BYTES // max(1, of_query))) if merges else most

    def weigh(self, q: ArrayView, lse: ArrayView, to: ArrayView, kind: str) -> None:
        """Add the mass that the last queries give those new tokens that stay seen to the end of `to`, (B, H, n)."""
        tokens = self.k.shape[2]
        oldest = max(self.sinks, tokens - self.span if self.span else 0)
        seen = self.sinks + tokens - oldest
        arrays, of_new = {"q": q, "k": self.k, "v": self.v}, to.part(2, to.shape[2] - seen, to.shape[2])
        self._plan(arrays).weigh(arrays, lse, of_new, AttendedTokens(tokens, oldest), kind)

    def _partial(self, q: ArrayView) -> Results:
        """New memory for a result that is merged before it is rounded."""
        out = new_array((*q.shape[:-1], self.v.shape[-1]), dtypes.float32, self.live)
        return Results(out, True, new_array(q.shape[:-1], dtypes.float32, self.live), is_partial=True, is_new=True)


def unkept_call(
    operation: str,
    appends: Appends,
    layer: Layer,
    arrays: tuple[Any, Any, Any],
    request: AttendRequest,
    held: int,
    check: Callable[[ArrayView, Mapping[str, ArrayView]], None],
    span: int,
    join: Callable[[ArrayView, UnkeptTokens], UnkeptTokens | None] | None = None,
) -> Callable[[OverHeld, Callable[[ArrayView, ArrayView, Mass, Any], None]], Any]:
    """Check `extend` with ``keep=False`` over a layer; returns run(over_held, weigh), which computes its results.

    Args:
        operation, request: those of the call; with `keep`, the mass is also that of the new tokens.
        appends, layer: where the new rows would be appended.
        arrays: q, k and v as the caller gave them.
        held: how many tokens of a head, at most, the mass is of.
        check: raises if queries (batch, Hq, T, D) and terms do not fit what is held.
        span: tokens after the sinks that a query sees; 0 for all.
        join: gives, for queries and the new tokens, copies of all that they attend over, or None.
    """
    live, like = appends.memory.runtime, arrays[0]
    mass, memory = request.asked_mass(operation), appends.memory
    rows, axes = appends.checked(operation, [layer], view_all(arrays[1:], ROWS, operation), request.layout, False)
    sizes = memory.batch_size, memory.num_kv_heads, memory.rows.k.width, rows[0].shape[1 + axes[0]]
    q_view = view(like, "q", operation)
    queries = extend_queries(operation, q_view, request.layout, *sizes, live)
    q, tokens = queries.as_read(q_view), sizes[-1]
    new = [heads_first(a.restrided(a.shape[1:], a.strides[1:]), AXES[request.layout]) for a in rows]
    terms, sinks = request.terms.views(operation), max(0, min(layer.sinks - layer.length, tokens))
    _refuse_short_heads(operation, layer, tokens)
    block = request.in_block(operation, tokens)
    if block:
        refuse_wrapped(operation, layer, tokens)
    made = UnkeptTokens(live, operation, new[0], new[1], request.scores, terms, span, sinks, block)
    made.check(q)
    check(q, terms)
    others = {"q": q, "k": new[0], "v": new[1]}
    to_mass = mass.array(operation, like, mass_shape(memory, held), live, others) if mass else None

    def run(over_held: OverHeld, weigh: Callable[[ArrayView, ArrayView, Mass, Any], None]) -> Any:
        out, lse = queries.new_out(like, memory.rows.v.width, live), queries.new_lse(like, live)
        mass.start(to_mass)
        if tokens:
            results = [view(out, "out", operation), view(lse, "lse", operation)]
            read = [*terms.values(), q, *new]
            stage = Staging(live, [*read, *results], [False] * len(read) + [True] * len(results))
            staged_q, k, v, to, to_lse = stage.arrays[len(terms) :]
            of_device = dict(zip(terms, stage.arrays, strict=False))
            to, to_lse = queries.as_read(to), queries.as_read(to_lse)
            staged = made._replace(k=k, v=v, terms=of_device)
            whole = join(staged_q, staged) if join else None
            if whole is None:
                staged.attend(staged_q, to, to_lse, over_held)
            else:
                whole.attend(staged_q, to, to_lse)
            if mass:
                weigh(staged_q, to_lse, mass, to_mass)
                if request.keep:
                    asking = last_queries(staged_q, to_lse, mass.queries)
                    staged.weigh(*asking, view(to_mass, "mass", operation), mass.kind)
            stage.finish()
        return results_of(out, lse if request.return_lse else None, to_mass)

    return run


def _refuse_short_heads(operation: str, layer: Layer, tokens: int) -> None:
    """Raise CapacityError if some heads of a ring have fewer tokens than sinks, and others have more."""
    if layer.head_lengths is None or not layer.ring or layer.length + tokens <= layer.slots:
        return
    if int(layer.lengths.min()) < layer.sinks:
        raise CapacityError(
            f"{operation}: a head of layer {layer.index} holds fewer tokens than its sinks={layer.sinks}, and "
            f"{tokens} new tokens exceed the window. Use keep=True, or fewer tokens at a time."
        )


def extend_unkept(
    operation: str, appends: Appends, layer: Layer, arrays: tuple[Any, Any, Any], request: AttendRequest
) -> Any:
    """`KVCacheStore.extend` with ``keep=False`` over a contiguous layer."""
    live, scores = appends.memory.runtime, request.scores

    def check(q: ArrayView, terms: Mapping[str, ArrayView]) -> None:
        layer_plan(live, operation, layer_arrays(layer, q, terms), layer, scores)

    def tokens(arrays: dict[str, ArrayView], ahead: int) -> AttendedTokens:
        if layer.head_lengths is None:
            return AttendedTokens(layer.length, layer.valid_from, ahead)
        arrays["lens"] = layer.head_lengths.array
        return AttendedTokens(0, layer.valid_from, ahead)

    def over_held(q: ArrayView, ahead: int, terms: Mapping[str, ArrayView], to: Results) -> Any:
        if layer.length == 0 or (layer.ring and not layer.sinks and ahead - q.shape[2] + 1 >= layer.ring):
            return None
        read = layer_arrays(layer, q, terms)
        of_layer = tokens(read, ahead)
        return layer_plan(live, operation, read, layer, scores).attend(None, read, of_layer, to)

    def weigh(q: ArrayView, lse: ArrayView, mass: Mass, to_mass: Any) -> None:
        q, lse = last_queries(q, lse, mass.queries)
        read = layer_arrays(layer, q)
        of_layer = tokens(read, new)
        plan = layer_plan(live, operation, read, layer, scores)
        plan.weigh(read, lse, view(to_mass, "mass", operation), of_layer, mass.kind)

    run = unkept_call(operation, appends, layer, arrays, request, layer.most_held, check, layer.ring)
    new = tokens_of(view(arrays[1], "k", operation), request.layout)
    return run(over_held, weigh)
