"""Attention over a contiguous layer: `attend`, what it cannot answer, and `extend`, which also appends.

A ring overwrites its oldest tokens with the newest, so a prompt cannot be appended first and attended over afterwards:
its first queries see tokens that its last ones overwrite. `extend` then attends over the ring as it is and over the new
rows, merges both by their log-sum-exps, and appends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, Views, handed_over, new_like, view, view_all
from tikv.errors import OptionError, PositionError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.contiguous import contiguous_cache
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.options import MOST_QUERIES, AttentionOptions, plan_key, real
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.terms import NO_TERMS, Terms, check_parents, tree_of
from tikv.ops.layouts import Formats
from tikv.ops.staging import Staging
from tikv.stores.append import ROWS, Appends
from tikv.stores.kept import most_held
from tikv.stores.layer import Layer, LayerMemory
from tikv.stores.queries import AXES, Queries, extend_queries, heads_first

MISSING = ("raise", "ignore")
NO_VIEWS: Mapping[str, ArrayView] = {}


class AttentionScale(NamedTuple):
    """What turns products of queries and keys into scores."""

    scale: float | None
    softcap: float | None

    @classmethod
    def checked(cls, scale: Any, softcap: Any, operation: str) -> AttentionScale:
        """The numbers that a caller gave."""
        return cls(real(scale, "scale", operation), real(softcap, "softcap", operation))


def layer_arrays(layer: Layer, q: ArrayView, terms: Mapping[str, ArrayView] = NO_VIEWS) -> dict[str, ArrayView]:
    """Queries, a layer's memory and what is added to the scores, by the names that attention has for them."""
    arrays = {"q": q, "k": layer.k, "v": layer.v}
    for name, scale in zip(("k_scale", "v_scale"), layer.read_scales, strict=True):
        if scale is not None:
            arrays[name] = scale
    return {**arrays, **terms} if terms else arrays


def layer_plan(
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], layer: Layer, scores: AttentionScale
) -> AttentionPlan:
    """The plan of attention over a layer for queries of this form, checked once.

    Raises:
        ArchError, ShapeError, DTypeError, OptionError: the queries do not fit the layer.
    """
    return kept_plan(live, operation, arrays, scores, layer.ring, layer.sinks, layer.ring, layer.formats)


def kept_plan(
    live: runtime.Runtime,
    operation: str,
    arrays: dict[str, ArrayView],
    scores: AttentionScale,
    span: int,
    sinks: int,
    ring: int,
    formats: Formats = (None, None),
    dealt: tuple[int, int] = (0, 0),
) -> AttentionPlan:
    """The plan of attention over `sinks` and `span` tokens behind them, 0 for all, in `ring` slots or a plain cache.

    `dealt` is as in `AttentionOptions`.
    """
    key = plan_key(operation, arrays, (*scores, span, sinks, ring, formats, dealt))
    plan = live.plans.get(key)
    if plan is None:
        checks.on_device([("q", arrays["q"])], live, operation)
        k, v, scales = arrays["k"], arrays["v"], tuple(arrays[n] for n in ("k_scale", "v_scale") if n in arrays)
        options = AttentionOptions(scores.scale, True, span or None, scores.softcap, None, False, dealt=dealt)
        cache = contiguous_cache(k, v, scales, sinks=sinks, ring=ring, formats=formats)
        plan = live.plans.keep(key, AttentionPlan(live, operation, arrays, cache, k.shape[0], options))
    found: AttentionPlan = plan
    return found


def refuse_missing(operation: str, layer: Layer, queries: int, on_device: bool) -> None:
    """The first of these queries, which are several, sees no key whose slot a newer token has taken.

    Raises:
        PositionError: it does; or only the device knows how many tokens there are.
    """
    if layer.ring and on_device:
        raise PositionError(
            f"{operation}: layer {layer.index} slides (window={layer.window}), and with seq_lens on the device nobody "
            f"knows whether {queries} queries see tokens that newer ones overwrote. Use missing='ignore', or one query."
        )
    wanted = max(layer.sinks, layer.length - queries + 1 - layer.ring)
    held_from = layer.valid_from if layer.head_lengths is None else layer.length - layer.ring
    if layer.ring and wanted < held_from and layer.sinks < held_from:
        raise PositionError(
            f"{operation}: the first of {queries} queries, at position {layer.length - queries}, sees tokens from "
            f"{wanted} on, and layer {layer.index} holds them from {held_from} on (window={layer.window}, "
            f"sinks={layer.sinks}): newer ones took their slots. Use extend(), which attends before it appends, or "
            f"missing='ignore' to attend over what is left."
        )


def mass_queries_of(
    return_mass: bool, mass_queries: Any, terms: Terms, operation: str, format: GroupFormat | None = None
) -> int | None:
    """Over how many of the last queries the mass is wanted: None for all of them, 0 for no mass.

    Raises:
        PositionError: less than one.
        OptionError: a number, and no mass is wanted; or the mass of scores with slopes, or of a tree, or of codes of
            groups.
    """
    return_mass = checks.flag(return_mass, "return_mass", operation)
    uncounted = [name for name, array in terms._asdict().items() if array is not None and name != "sink_logits"]
    if return_mass and format is not None:
        raise OptionError(f"{operation}: the mass of keys of {format} is not offered. Leave return_mass out.")
    if return_mass and uncounted:
        raise OptionError(f"{operation}: return_mass counts no {uncounted[0]}. Ask for one of the two.")
    if mass_queries is None:
        return None if return_mass else 0
    if not return_mass:
        raise OptionError(f"{operation}: mass_queries={mass_queries} without return_mass=True. Ask for the mass too.")
    return checks.integer(mass_queries, "mass_queries", operation, low=1)


def last_queries(q: ArrayView, lse: ArrayView, wanted: int | None) -> tuple[ArrayView, ArrayView]:
    """The last `wanted` of (batch, Hq, T, D) queries, None for all, and their log-sum-exps (batch, Hq, T)."""
    if wanted is None or q.ndim == 3:
        return q, lse
    first, tokens = max(0, q.shape[2] - wanted), q.shape[2]
    return q.part(2, first, tokens), lse.part(2, first, tokens)


def attend_in_order(
    plan: AttentionPlan,
    like: Any,
    queries: Queries,
    arrays: dict[str, ArrayView],
    out: Any,
    return_lse: bool,
    impl: str = "taichi",
    length: int = 0,
    first_valid: int = 0,
) -> tuple[Any, Any]:
    """`AttentionPlan.attend`, whose results have the caller's order of axes; without lse None for it."""
    if queries.as_given:
        found = plan.attend(like, arrays, out, return_lse, impl, length, first_valid)
        return found if return_lse else (found, None)
    operation, live, width = plan.operation, plan.live, plan.shape[-1]
    result = queries.new_out(like, width, live) if out is None else out
    to = view(result, "out", operation)
    if out is not None:
        queries.check_out(operation, to, width, live)
    to = queries.as_read(to)
    lse = queries.new_lse(like, live) if return_lse else None
    to_lse = None if lse is None else queries.as_read(view(lse, "lse", operation))
    plan.attend(like, arrays, to, return_lse, impl, length, first_valid, lse=to_lse, is_new=out is None)
    return result, lse


def results_of(out: Any, lse: Any, mass: Any) -> Any:
    """What was asked for: the result alone, or with what else is not None."""
    found = [handed_over(a) for a in (out, lse, mass) if a is not None]
    return found[0] if len(found) == 1 else tuple(found)


def weigh(
    operation: str, memory: LayerMemory, layer: Layer, q: ArrayView, lse: ArrayView, scores: AttentionScale, like: Any
) -> Any:
    """How much weight these queries of the newest tokens gave each key of a layer: (batch, heads, held) float32.

    Args:
        operation: for messages.
        memory: the layer's.
        layer: what they attended over, their own tokens included.
        q: (batch, Hq, D) or (batch, Hq, T, D).
        lse: the log-sum-exps of their scores.
        scores: the scale and the soft cap.
        like: the mass is a new array of its kind.
    """
    length, arrays = layer.length, layer_arrays(layer, q)
    if layer.head_lengths is not None:
        arrays["lens"], length = layer.head_lengths.array, 0
    shape = (memory.batch_size, memory.num_kv_heads, most_held(layer))
    mass = new_like(like, shape, dtypes.float32, memory.runtime, zeroed=True)
    plan = layer_plan(memory.runtime, operation, arrays, layer, scores)
    plan.weigh(arrays, lse, view(mass, "mass", operation), length, layer.valid_from)
    return mass


def extend(
    operation: str,
    appends: Appends,
    layer: Layer,
    arrays: tuple[Any, Any, Any],
    layout: str,
    scores: AttentionScale,
    return_lse: bool,
    terms: Terms = NO_TERMS,
    mass_queries: int | None = 0,
) -> Any:
    """Attend with new queries over what a layer holds and their own tokens, then append those.

    Args:
        operation: for messages.
        appends: of the layer's memory.
        layer: what to attend over and append to.
        arrays: q, k and v as the caller gave them.
        layout: of all of them and of the result, "token_major" or "head_major".
        scores: the scale and the soft cap.
        return_lse: whether the log-sum-exps are wanted.
        terms: what is added to the scores.
        mass_queries: over how many of the last queries the mass is wanted; None for all, 0 for no mass.

    Returns:
        As `KVCacheStore.extend`.
    """
    memory = appends.memory
    live = memory.runtime
    k_rows = view_all(arrays[1:], ROWS, operation)
    rows, (token_axis, _) = appends.checked(operation, [layer], k_rows, layout, False)
    tokens = rows[0].shape[1 + token_axis]
    if layer.ring == 0:
        checks.fits_linear(layer.length, tokens, layer.slots, f"{operation} (layer {layer.index})")
    checks.integer(layer.length + tokens, "length", operation)
    like = arrays[0]
    queries = extend_queries(
        operation, view(like, "q", operation), layout, memory.batch_size, memory.num_kv_heads, memory.head_dim, tokens,
        live,
    )  # fmt: skip
    q = queries.heads_first
    # The new rows as caches (batch, H, T, D), whatever their order in memory.
    new = [heads_first(a.restrided(a.shape[1:], a.strides[1:]), AXES[layout]) for a in rows]
    added = terms.views(operation)
    layer_plan(live, operation, layer_arrays(layer, q, added), layer, scores)  # refuses what does not fit
    if tree_of(added) and tokens > MOST_QUERIES:
        raise ShapeError(f"{operation}: a mask or a tree of {tokens} tokens. Use at most {MOST_QUERIES} at a time.")
    if "parents" in added:
        check_parents(operation, added["parents"], live)

    out = queries.new_out(like, memory.head_dim_v, live)
    lse = queries.new_lse(like, live) if return_lse or mass_queries != 0 else None
    mass = None
    results = [view(out, "out", operation)]
    if lse is not None:
        results.append(view(lse, "lse", operation))
    if tokens:
        # K and V of the append lie where the caller has them; attention wants all on the device at once.
        read = [*added.values(), q, *new]
        stage = Staging(live, [*read, *results], [False] * len(read) + [True] * len(results))
        call = _Extension(operation, appends, layer, scores, dict(zip(added, stage.arrays, strict=False)))
        staged_q, k, v, staged_out, *staged_lse = stage.arrays[len(added) :]
        to = queries.as_read(staged_out)
        to_lse = queries.as_read(staged_lse[0]) if staged_lse else None
        wraps = layer.ring > 0 and layer.length + tokens > layer.slots and tokens > 1
        if wraps and layer.head_lengths is not None:
            call.token_by_token(appends, staged_q, (k, v), to, to_lse)
        elif wraps:
            call.attend_over_both(staged_q, (k, v), to, to_lse)
            appends.append(operation, layer, k_rows, layout)
        else:
            appends.append(operation, layer, k_rows, layout)
            call.attend_over_layer(staged_q, to, to_lse)
        if mass_queries != 0 and to_lse is not None:
            mass = weigh(operation, memory, layer, *last_queries(staged_q, to_lse, mass_queries), scores, like)
        stage.finish()
    elif mass_queries != 0:
        shape = (memory.batch_size, memory.num_kv_heads, most_held(layer))
        mass = new_like(like, shape, dtypes.float32, live, zeroed=True)
    return results_of(out, lse if return_lse else None, mass)


class _Extension:
    """The launches of one `extend`, over arrays (batch, heads, tokens, width) that the device sees."""

    def __init__(
        self,
        operation: str,
        appends: Appends,
        layer: Layer,
        scores: AttentionScale,
        terms: Mapping[str, ArrayView],
    ) -> None:
        self.operation = operation
        self.memory = appends.memory
        self.live = self.memory.runtime
        self.layer = layer
        self.scores = scores
        self.terms = terms
        self.but_sinks = {name: a for name, a in terms.items() if name != "sink_logits"}

    def attend_over_layer(self, q: ArrayView, out: ArrayView, lse: ArrayView | None) -> None:
        """Attention over a layer that has the new tokens, and all that their queries see."""
        behind, tokens = self.layer.length - q.shape[2], q.shape[2]
        for first in range(0, tokens, MOST_QUERIES):
            end = min(tokens, first + MOST_QUERIES)
            some, to, to_lse = (None if a is None else a.part(2, first, end) for a in (q, out, lse))
            self._over_layer(some, self.terms, behind + end, 0, to, to_lse, lse is not None)

    def token_by_token(
        self,
        appends: Appends,
        q: ArrayView,
        new: tuple[ArrayView, ArrayView],
        out: ArrayView,
        lse: ArrayView | None,
    ) -> None:
        """Append each token and attend with it, where the ring of each head overwrites another token with it."""
        for t in range(q.shape[2]):
            k, v, some, to = (a.part(2, t, t + 1) for a in (*new, q, out))
            appends.append(self.operation, self.layer, Views([k, v]), "head_major")
            to_lse = None if lse is None else lse.part(2, t, t + 1)
            self._over_layer(some, self.terms, self.layer.length, 0, to, to_lse, lse is not None)

    def attend_over_both(
        self, q: ArrayView, new: tuple[ArrayView, ArrayView], out: ArrayView, lse: ArrayView | None
    ) -> None:
        """Attention over a ring as it is before the new tokens come, and over those."""
        layer, tokens = self.layer, q.shape[2]
        stored = self._as_stored(new)
        for first in range(0, tokens, MOST_QUERIES):
            end = min(tokens, first + MOST_QUERIES)
            some, to, to_lse = (None if a is None else a.part(2, first, end) for a in (q, out, lse))
            if layer.length > 0 and (layer.sinks > 0 or first + 1 < layer.ring):
                of_new = self._over_new(some, self.but_sinks, stored, end, None, None, True)
                of_layer = self._over_layer(some, self.terms, layer.length, end, None, None, True)
                merge_into(self.operation, (*of_layer, *of_new), False, to, to_lse)
            else:
                self._over_new(some, self.terms, stored, end, to, to_lse, lse is not None)

    def _over_layer(
        self, q: Any, terms: Mapping[str, ArrayView], length: int, ahead: int, out: Any, lse: Any, return_lse: bool
    ) -> Any:
        """Attention over the first `length` tokens of the layer, of queries that end `ahead` of them."""
        layer = self.layer
        arrays = layer_arrays(layer, q, terms)
        if layer.head_lengths is not None:
            arrays["lens"], length = layer.head_lengths.shifted(length - layer.length), 0
        plan = layer_plan(self.live, self.operation, arrays, layer, self.scores)
        return plan.attend(None, arrays, out, return_lse, "taichi", length, layer.valid_from, ahead, lse=lse)

    def _over_new(
        self,
        q: Any,
        terms: Mapping[str, ArrayView],
        stored: dict[str, ArrayView],
        end: int,
        out: Any,
        lse: Any,
        return_lse: bool,
    ) -> Any:
        """Attention of the queries before token `end` over the new rows before it."""
        layer, arrays = self.layer, {"q": q, **stored, **terms}
        sinks = max(0, min(layer.sinks - layer.length, stored["k"].shape[2]))
        plan = kept_plan(self.live, self.operation, arrays, self.scores, layer.ring, sinks, 0, layer.formats)
        return plan.attend(None, arrays, out, return_lse, "taichi", end, lse=lse)

    def _as_stored(self, new: tuple[ArrayView, ArrayView]) -> dict[str, ArrayView]:
        """The new rows in the layer's dtype: themselves, or what an append makes of them."""
        memory, tokens = self.memory, new[0].shape[2]
        if new[0].dtype is memory.dtype and memory.alike:
            return {"k": new[0], "v": new[1]}
        layer = Layer(0, tokens, None, 0)
        rows = LayerMemory(
            self.live,
            [layer],
            batch_size=memory.batch_size,
            num_kv_heads=memory.num_kv_heads,
            head_dim=memory.head_dim,
            head_dim_v=memory.head_dim_v,
            dtype=memory.dtype,
            scale_dtype=memory.scale_dtype,
            v_dtype=memory.v_dtype,
            divisors=memory.divisors,
        )
        Appends(rows).append(self.operation, layer, Views(new), "head_major")
        return {name: a for name, a in layer_arrays(layer, new[0]).items() if name != "q"}
