"""Attention over one contiguous layer: its plan, what it cannot answer, and the mass of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, handed_over, new_like, view
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.ops.attention.call import attention_plan
from tikv.ops.attention.contiguous import contiguous_cache
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.options import AttentionOptions, CacheLayout
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
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], layer: Layer, scores: AttentionScale
) -> AttentionPlan:
    """The plan of attention over a layer for queries of this form, checked once."""
    return cache_plan(live, operation, arrays, scores, layer.ring, layer.sinks, layer.ring, layer.formats)


def cache_plan(
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], scores: AttentionScale, span: int, sinks: int,
    ring: int, formats: Formats = (None, None), sharded: tuple[int, int] = (0, 0),
) -> AttentionPlan:  # fmt: skip
    """The plan of attention over `sinks` and the newest `span` tokens, 0 for all, in `ring` slots or a plain cache.

    `sharded` is as in `AttentionOptions`.
    """

    def form() -> tuple[CacheLayout, AttentionOptions]:
        checks.on_device([("q", arrays["q"])], live, operation)
        options = AttentionOptions(scores.scale, True, span or None, scores.softcap, sharded=sharded)
        return contiguous_cache(arrays, sinks=sinks, ring=ring, formats=formats), options

    return attention_plan(live, operation, arrays, (*scores, span, sinks, ring, formats, sharded), form)


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


def last_queries(q: ArrayView, lse: ArrayView, count: int | None) -> tuple[ArrayView, ArrayView]:
    """The last `count` of (batch, Hq, T, D) queries, None for all, and their log-sum-exps (batch, Hq, T)."""
    if count is None or q.ndim == 3:
        return q, lse
    first, tokens = max(0, q.shape[2] - count), q.shape[2]
    return q.part(2, first, tokens), lse.part(2, first, tokens)


def results_of(out: Any, lse: Any, mass: Any) -> Any:
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
    like: Any,
    indices: ArrayView | None = None,
) -> Any:
    """How much weight these queries of the newest tokens gave each key of a layer: (batch, heads, held) float32.

    With chosen tokens it is (batch, heads, T, K), in the order of `indices`. `q` are (batch, Hq, D) or (batch, Hq, T,
    D), and `lse` the log-sum-exps of all their scores; the mass is a new array of the same kind as `like`.
    """
    length, arrays = layer.length, layer_arrays(layer, q)
    if layer.head_lengths is not None:
        arrays["lens"], length = layer.head_lengths.array, 0
    shape: tuple[int, ...] = (memory.batch_size, memory.num_kv_heads, layer.most_held)
    if indices is not None:
        arrays["indices"], shape = indices, (*shape[:2], *indices.shape[-2:])
    mass = new_like(like, shape, dtypes.float32, memory.runtime, zeroed=True)
    plan = layer_plan(memory.runtime, operation, arrays, layer, scores)
    plan.weigh(arrays, lse, view(mass, "mass", operation), AttendedTokens(length, layer.valid_from))
    return mass
