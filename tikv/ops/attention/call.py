"""The front door of attention: from the arrays of a caller, contiguous or paged, to a call whose form is checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from tikv import runtime
from tikv.arrays import Array, ArrayView, describe, runtime_of, view, view_all
from tikv.errors import ShapeError
from tikv.ops import checks
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.options import INTEGERS, AttentionOptions, CacheLayout
from tikv.ops.attention.plan import NEW, AttentionPlan, ReadyAttention, Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.attention.terms import NO_TERMS
from tikv.ops.fixed_scales import scale_given
from tikv.ops.indices import index_array
from tikv.ops.layouts import Formats
from tikv.ops.quantized_arrays import Quantized, codes_of_pair

STORED = ("k", "v", "k_scale", "v_scale")  # the arrays that store a cache of codes


class AttendedLayout(Protocol):
    """How keys and values lie, as a caller says it: contiguous, or in pages. Its fields are part of a plan's key."""

    @property
    def names(self) -> Mapping[str, str]:
        """The caller's parameters, by the array that attention reads."""

    def check(self, operation: str, caches: Caches, request: AttendRequest) -> None:
        """Refuse what pages of this layout cannot do; OptionError."""

    def cache(
        self, live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], formats: Formats,
        options: AttentionOptions,
    ) -> tuple[CacheLayout, AttentionOptions]:  # fmt: skip
        """The checked `CacheLayout` of arrays that lie so, and the options, whose span does not count the sinks."""


class Caches(NamedTuple):
    """Keys and values as a caller gave them.

    `formats` are those of a store's caches, each of which may hold words of codes, with the scales of their groups, or
    have no scales. The other fields are parameters of `decode_attention` and `paged_decode_attention`.
    """

    layout: AttendedLayout
    k: Any
    v: Any
    lens: Any = None
    table: Any = None
    k_scale: Any = None
    v_scale: Any = None
    head_dim_v: Any = None
    formats: Formats | None = None


class AttentionCall(NamedTuple):
    """A call of attention whose form is checked; `attend` runs it, once or several times."""

    plan: AttentionPlan
    arrays: dict[str, ArrayView]
    length: int  # the length of all sequences, if there is no array of lengths
    owners: tuple[Any, ...]  # objects that own the memory, which views do not keep alive

    def attend(self, like: Any, results: Results = NEW, impl: str = "taichi", first_valid: int = 0) -> Any:
        """`AttentionPlan.attend` over these arrays."""
        return self.plan.attend(like, dict(self.arrays), AttendedTokens(self.length, first_valid), results, impl)

    def prepare(self, like: Any, results: Results = NEW) -> ReadyAttention:
        """`attend` without the launches: every step that can fail is done, and `run` of the result computes."""
        ready = self.plan.ready(like, dict(self.arrays), AttendedTokens(self.length), results)
        return ready.prepared(like, results, *self.owners)

    def prepare_to_weigh(self, lse: ArrayView, mass: ArrayView, kind: str) -> ReadyAttention:
        """`weigh` in the same way."""
        ready = self.plan.ready_to_weigh(dict(self.arrays), lse, mass, AttendedTokens(self.length), kind)
        return ready.prepared(lse, mass, *self.owners)

    def weigh(self, lse: ArrayView, mass: ArrayView, kind: str) -> None:
        """`AttentionPlan.weigh` over these arrays."""
        self.plan.weigh(dict(self.arrays), lse, mass, AttendedTokens(self.length), kind)


def attention_call(
    operation: str, q: Array, caches: Caches, request: AttendRequest, mass: str = "",
    terms: Mapping[str, ArrayView] | None = None,
) -> AttentionCall:  # fmt: skip
    """A checked call of attention over contiguous caches or pages, under the operation name that errors give.

    `terms` are views of the request's terms, if there are some already.
    """
    request = request.checked(operation)
    layout, k, v, lens, table, k_scale, v_scale, head_dim_v, formats = caches
    live, names = runtime_of(q, k), layout.names
    if paged := "table" in names:
        layout.check(operation, caches, request)
    length, arguments, of_codes = 0, {"q": q}, None
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        pair = {names["k"]: k, names["v"]: v}
        codes, numbers, formats = codes_of_pair(live, operation, pair, (k_scale, v_scale))
        of_codes, head_dim_v = dict(zip(STORED, (*codes, *numbers), strict=True)), None
    else:
        arguments |= {"k": k, "v": v}
    if paged:
        arguments["table"] = table = index_array(table, names["table"], operation)
    if isinstance(lens, INTEGERS):
        length = checks.integer(lens, names["lens"], operation)
    else:
        arguments["lens"] = lens = index_array(lens, names["lens"], operation)
    arrays = _views_of(operation, arguments, names, head_dim_v)
    if of_codes is not None:
        arrays |= of_codes
    if v is None and v_scale is None:
        v_scale = k_scale
    if k_scale is not None or v_scale is not None:
        _add_scales(arrays, k_scale, v_scale, live, operation, both=formats is None)
    if terms is None and request.terms is not NO_TERMS:
        terms = request.terms.views(operation)
    if terms:
        arrays |= terms
    key = plan_key(operation, arrays, (request.choices, mass, layout, formats, v is None))
    plan: AttentionPlan | None = live.plans.get(key)
    if plan is None:
        request.check_choices(operation)
        options = request.options(mass)
        cache, options = layout.cache(live, operation, arrays, formats or (None, None), options)
        cache = cache._replace(in_keys=v is None)
        plan = live.plans.keep(key, AttentionPlan(live, operation, arrays, cache, options))
    return AttentionCall(plan, arrays, length, (lens, table))


def plan_key(operation: str, arrays: dict[str, ArrayView], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of an `AttentionPlan`; the options are checked, so that equal ones have the same type."""
    return (operation, *arrays, *[a.key for a in arrays.values()], *options)


def _views_of(
    operation: str, arrays: dict[str, Any], names: Mapping[str, str], head_dim_v: Any = None
) -> dict[str, ArrayView]:
    """Views of q and the other given arrays, by role; `names` gives the parameter of each role.

    Raises:
        ShapeError: as in `_values_of`, if V is None.
    """
    q = arrays["q"]
    if head_dim_v is None and arrays.get("v", q) is not None:
        if type(q) is ArrayView:  # it is a store's, and need not be remembered
            return {role: view(array, names[role], operation) for role, array in arrays.items()}
        views = view_all(tuple(arrays.values()), [names[role] for role in arrays], operation)
        return dict(zip(arrays, views, strict=True))
    by_role = {role: view(array, names[role], operation) for role, array in arrays.items() if role != "v"}
    by_role["v"] = _values_of(by_role["k"], arrays["v"], head_dim_v, names["v"], operation)
    return {role: by_role[role] for role in arrays}


def _values_of(k: ArrayView, v: Array, head_dim_v: Any, name: str, operation: str) -> ArrayView:
    """The values: a given array, or else the first `head_dim_v` columns of the keys.

    Raises:
        ShapeError: neither is given, or the two disagree; or the keys have fewer columns.
    """
    if head_dim_v is not None:
        head_dim_v = checks.integer(head_dim_v, "head_dim_v", operation, low=1)
    if v is not None:
        values = view(v, name, operation)
        if head_dim_v not in (None, values.shape[-1]):
            raise ShapeError(
                f"{operation}: both {name}, {describe(values)}, and head_dim_v={head_dim_v} are given. Leave "
                f"head_dim_v out, or pass {name}=None for values that are the first columns of the keys."
            )
        return values
    if head_dim_v is None:
        raise ShapeError(f"{operation}: {name} is None. Say how many columns of the keys are the values: head_dim_v=.")
    if not k.shape or head_dim_v > k.shape[-1]:
        raise ShapeError(f"{operation}: head_dim_v={head_dim_v} is beyond the columns of the keys, {describe(k)}.")
    return k.restrided((*k.shape[:-1], head_dim_v), k.strides)


def _add_scales(
    arrays: dict[str, ArrayView], k_scale: Any, v_scale: Any, live: runtime.Runtime, operation: str, both: bool = True
) -> None:
    """Add views of the scales to `arrays`; both must be given, unless they are a store's.

    Raises:
        ShapeError: one is missing.
        OptionError: a number that is not a scale.
    """
    if both and (k_scale is None or v_scale is None):
        missing = "k_scale" if k_scale is None else "v_scale"
        raise ShapeError(f"{operation}: {missing} is missing. Pass both scales, or neither.")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            arrays[name] = view(scale_given(scale, live, name, operation), name, operation)
