"""Attention over one contiguous layer: its plan, what it cannot answer, and the mass of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tikv import runtime
from tikv.arrays import Array, ArrayView, handed_over, view_without_owner
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.ops.attention.call import plan_key
from tikv.ops.attention.contiguous import contiguous_cache
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.options import AttentionOptions
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import Formats
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory

NO_VIEWS: Mapping[str, ArrayView] = {}


def layer_arrays(layer: Layer, q: ArrayView, terms: Mapping[str, ArrayView] = NO_VIEWS) -> dict[str, ArrayView]:
    """Queries, a layer's memory and what is added to the scores, by the names of attention's parameters."""
    return {"q": q, **layer.attended, **terms}


def layer_plan(
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], layer: Layer, scores: AttentionScale,
    causal: bool = True,
) -> AttentionPlan:  # fmt: skip
    """The plan of attention over a layer for queries of this form, checked once."""
    form = layer.ring, layer.sinks, layer.ring, layer.formats
    return cache_plan(live, operation, arrays, scores, *form, causal=causal)


def cache_plan(
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], scores: AttentionScale, span: int, sinks: int,
    ring: int, formats: Formats = (None, None), sharded: tuple[int, int] = (0, 0), causal: bool = True,
) -> AttentionPlan:  # fmt: skip
    """The plan of attention over `sinks` and the newest `span` tokens, 0 for all, in `ring` slots or a plain cache.

    `sharded` and `causal` are as in `AttentionOptions`.
    """
    key = plan_key(operation, arrays, (*scores, span, sinks, ring, formats, sharded, causal))
    plan: AttentionPlan | None = live.plans.get(key)
    if plan is None:
        checks.on_device([("q", arrays["q"])], live, operation)
        options = AttentionOptions(scores.scale, causal, span or None, scores.softcap, sharded=sharded)
        cache = contiguous_cache(arrays, sinks=sinks, ring=ring, formats=formats)
        plan = live.plans.keep(key, AttentionPlan(live, operation, arrays, cache, options))
    return plan


def refuse_missing(operation: str, layer: Layer, queries: int, on_device: bool) -> None:
    """Raise PositionError if the first of several queries sees a key that a newer token has overwritten.

    It is also raised if only the device knows how many tokens there are.
    """
    if layer.ring and on_device:
        raise PositionError(
            f"{operation}: layer {layer.index} slides (window={layer.window}), and with seq_lens on the device the "
            f"host cannot know whether {queries} queries see tokens that newer ones overwrote. Use "
            "missing='ignore', or one query."
        )
    first_seen = max(layer.sinks, layer.length - queries + 1 - layer.ring)
    held_from = layer.valid_from if layer.head_lengths is None else layer.length - layer.ring
    if layer.ring and first_seen < held_from and layer.sinks < held_from:
        raise PositionError(
            f"{operation}: the first of {queries} queries, at position {layer.length - queries}, sees tokens from "
            f"{first_seen} on, and layer {layer.index} holds them from {held_from} on (window={layer.window}, "
            f"sinks={layer.sinks}): newer ones overwrote the rest. Use extend(), which attends before it appends, "
            "or missing='ignore' to attend over what is left."
        )


def refuse_wrapped(operation: str, layer: Layer, tokens: int) -> None:
    """Raise PositionError if a block of queries does not see all that a layer ever had, with so many new tokens."""
    if layer.ring and layer.length + tokens > layer.slots:
        raise PositionError(
            f"{operation}: block is beyond the window of layer {layer.index}: {layer.length + tokens} tokens exceed "
            f"its {layer.slots} slots, so queries of one block would see different tokens. Leave block out, or use "
            "a layer without a window."
        )


def last_queries(q: ArrayView, lse: ArrayView, count: int | None) -> tuple[ArrayView, ArrayView]:
    """The last `count` of (batch, Hq, T, D) queries, None for all, and their log-sum-exps (batch, Hq, T)."""
    if count is None or q.ndim == 3:
        return q, lse
    first, tokens = max(0, q.shape[2] - count), q.shape[2]
    return q.part(2, first, tokens), lse.part(2, first, tokens)


def results_of(out: Array, lse: Array, mass: Any) -> Any:
    """What the caller asked for: the result alone, or a tuple with those of the others that are not None."""
    if lse is None and mass is None:
        return handed_over(out)
    return tuple([handed_over(a) for a in (out, lse, mass) if a is not None])


def weigh(
    operation: str,
    memory: LayerMemory,
    layer: Layer,
    q: ArrayView,
    lse: ArrayView,
    scores: AttentionScale,
    mass: Mass,
    to: Any,
    indices: ArrayView | None = None,
    causal: bool = True,
) -> Any:
    """Weigh the keys of a layer by these queries of the newest tokens, into the array `to` of `mass_shape`.

    The caller has prepared `to` with `Mass.start`. `q` are (batch, Hq, D) or (batch, Hq, T, D), and `lse` the
    log-sum-exps of all their scores. With chosen tokens, the mass is in the order of `indices`.
    """
    length, arrays = layer.length, layer_arrays(layer, q)
    if layer.head_lengths is not None:
        arrays["lens"], length = layer.head_lengths.array, 0
    if indices is not None:
        arrays["indices"] = indices
    plan = layer_plan(memory.runtime, operation, arrays, layer, scores, causal)
    tokens = AttendedTokens(length, layer.valid_from)
    plan.weigh(arrays, lse, view_without_owner(to, "mass", operation), tokens, mass.kind)
    return to


def mass_shape(memory: LayerMemory, held: int, indices: ArrayView | None = None) -> tuple[int, ...]:
    """(batch, heads, held), or with chosen tokens (batch, heads, T, K)."""
    lead = memory.batch_size, memory.num_kv_heads
    return (*lead, held) if indices is None else (*lead, *indices.shape[-2:])
