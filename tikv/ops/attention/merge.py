"""Merges attention states of several sets of keys: `merge_states` merges two, `merge_parts` any number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, refuse_backward, runtime_of, view
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import QUERIES
from tikv.ops.plan import Launch, Plan

STATES = ("out_a", "out_b", "lse_a", "lse_b")
SERIAL_ELEMENTS = 1 << 16  # on CPU, below this the calling thread finishes before another one wakes


def merge_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, lse_base2: bool = False, out: Array | None = None
) -> tuple[Array, Array]:
    """Merge two attention states into the one that attention over both sets of keys would have given.

    Use it for a prefix that sequences share, a prompt in chunks, or keys on several devices.

    Args:
        out_a, out_b: results over each set, (..., D_v) with two to four axes, float32, float16 or bfloat16.
        lse_a, lse_b: their log-sum-exps, float32 (...) with any strides; -inf for an empty set, whose result is then
            ignored. A NaN makes the new row and its log-sum-exp NaN.
        lse_base2: both log-sum-exps, and the new one, are in base 2 instead of e.
        out: array for the result, with a contiguous last axis; None for a new array of the kind and dtype of `out_a`.

    Returns:
        (out, lse) of both sets together.

    Raises:
        ShapeError, DTypeError: the arrays do not fit each other.

    Exactness: float32, one rounding at the end.
    Cost: each state is read once; one launch.
    Source: ``CascadeAttentionPlan``.

    Examples:
        >>> import numpy as np, tikv
        >>> one, two = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 3, np.float32)
        >>> merged, lse = tikv.merge_states(one, np.zeros((1, 1), np.float32), two, np.zeros((1, 1), np.float32))
        >>> merged.tolist(), round(float(lse[0, 0]), 4)
        ([[[2.0, 2.0]]], 0.6931)
    """
    lse_base2 = checks.flag(lse_base2, "lse_base2", "merge_states")
    states = out_a, lse_a, out_b, lse_b
    merged = merge_into("merge_states", states, lse_base2, out, None)
    refuse_backward(merged, *states)
    return merged


def merge_into(operation: str, states: Sequence[Any], lse_base2: bool, out: Array, lse: Array) -> tuple[Array, Array]:
    """`merge_states` of (out_a, lse_a, out_b, lse_b), which may also be given an array for the log-sum-exps."""
    out_a, lse_a, out_b, lse_b = states
    live = runtime_of(out_a, out_b)
    arrays = [view(a, n, operation) for n, a in zip(STATES, (out_a, out_b, lse_a, lse_b), strict=True)]
    first = arrays[0]
    result = new_like(out_a, first.shape, first.dtype, live) if out is None else out
    if lse is None:
        lse = new_like(out_a, first.shape[:-1], dtypes.float32, live)
    arrays += [view(result, "out", operation), view(lse, "lse", operation)]
    key = (operation, *[a.key for a in arrays], lse_base2)
    plan = live.plans.get(key)
    if plan is None:
        _check_states(live, operation, arrays)
        plan = live.plans.keep(key, _merge_plan(live, operation, first.shape, lse_base2))
    plan.run(arrays)
    return handed_over(result), handed_over(lse)


def _check_states(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView]) -> None:
    """Refuse two states that cannot be merged, and an array for the result that does not fit them."""
    first, second, _, _, to, _ = arrays
    checks.on_device(list(zip(STATES, arrays[:4], strict=True)), live, operation)
    for name, a in zip(STATES[:2], arrays[:2], strict=True):
        checks.rank(a, (2, 3, 4), name, "(..., D_v)", operation)
        checks.readable(a, name, operation)
        if a.dtype not in QUERIES:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; states must be float32, float16 or bfloat16.")
        if a.shape[-1] == 0:
            raise ShapeError(f"{operation}: {name} is {describe(a)}, of width 0. Use a head width of at least 1.")
    if second.shape != first.shape:
        raise ShapeError(f"{operation}: out_b is {describe(second)} where {first.shape} is needed, the shape of out_a.")
    for name, a in zip(STATES[2:], arrays[2:4], strict=True):
        if a.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; a log-sum-exp must be float32.")
        if a.shape != first.shape[:-1]:
            raise ShapeError(f"{operation}: {name} is {describe(a)} where {first.shape[:-1]} is needed.")
        checks.ascending(a, name, operation)
    checks.on_device([("out", to)], live, operation)
    checks.writable(to, "out", operation)
    checks.readable(to, "out", operation)
    if to.shape != first.shape or to.dtype not in QUERIES:
        raise ShapeError(f"{operation}: out is {describe(to)} where a float {first.shape} is needed.")


def _merge_plan(live: runtime.Runtime, operation: str, shape: tuple[int, ...], base2: bool) -> Plan:
    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.attention.merge_states import MergeStatesParams, make_merge_states
        from tikv.kernels.attention.parameters import LOG2E, AttentionScalars

        out_a, out_b, _, _, to, _ = arrays
        codes = [a.dtype.short for a in (out_a, out_b, to)]
        elements = checks.integer(math.prod(shape), "elements of a state", operation, high=2**31 - 1)
        items = elements // shape[-1] if live.is_cpu else elements
        serial = live.is_cpu and elements < SERIAL_ELEMENTS
        kernel = launch.kernel(live, make_merge_states, live.kernel_style, serial, shape[-1], *codes)
        strides: list[int] = []
        for a in arrays:
            lead = a.strides[:-1] if a.ndim == len(shape) else a.strides
            strides += [*[0] * (3 - len(lead)), *lead, a.offset // a.dtype.itemsize]
        extents = [*[1] * (4 - len(shape)), *shape[:-1]]
        two = MergeStatesParams(items, extents[1], extents[2])
        factors = AttentionScalars(lse_scale=1.0 if base2 else LOG2E)
        return [Launch(kernel.bind(items, *arrays, tuple(strides), tuple(two), tuple(factors)), arrays)]

    return Plan(live, operation, (*STATES, "out", "lse"), [False] * 4 + [True] * 2, bind if math.prod(shape) else None)


def merge_parts(
    operation: str,
    parts: ArrayView,
    out: ArrayView,
    lse: ArrayView,
    sink_logits: ArrayView | None = None,
    base2: bool = False,
) -> None:
    """Merge any number of states that lie in one array: each row holds a result followed by its log-sum-exp.

    Args:
        operation: the operation's name, for messages.
        parts: (number, B, Hq, T, D_v + 1) float32, contiguous.
        out: (B, Hq, T, D_v), of any float dtype and strides whose last is 1.
        lse: (B, Hq, T) float32, of any strides.
        sink_logits: (Hq,) float32, which count once, whatever the number of parts; or None.
        base2: the log-sum-exps are in base 2 rather than e.
    """
    live = runtime_of(parts)
    arrays = [parts, out, lse, *([] if sink_logits is None else [sink_logits])]
    key = ("merge_parts", *[a.key for a in arrays], base2)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _merge_parts_plan(live, operation, out.shape, sink_logits is not None, base2))
    plan.run(arrays)


def _merge_parts_plan(live: runtime.Runtime, operation: str, shape: tuple[int, ...], sinks: bool, base2: bool) -> Plan:
    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.attention.merge_parts import MergePartsParams, make_merge_parts
        from tikv.kernels.attention.parameters import LOG2E, AttentionScalars

        parts, to, lse, *logits = arrays
        rows, width = math.prod(shape[:-1]), shape[-1]
        checks.integer(math.prod(parts.shape), "elements of gathered states", operation, high=2**31 - 1)
        firsts = [a.offset // a.dtype.itemsize for a in arrays]
        numbers = MergePartsParams(
            rows * width, parts.shape[0], rows, *shape[1:3], firsts[0],
            *to.strides[:3], firsts[1], *lse.strides, firsts[2], *[a.strides[0] for a in logits], *firsts[3:],
        )  # fmt: skip
        kernel = launch.kernel(live, make_merge_parts, live.kernel_style, width, to.dtype.short, sinks)
        factors = AttentionScalars(lse_scale=1.0 if base2 else LOG2E)
        return [Launch(kernel.bind(rows * width, *arrays, tuple(numbers), tuple(factors)), arrays)]

    names = ("parts", "out", "lse", *["sink_logits"] * sinks)
    return Plan(live, operation, names, [False, True, True, *[False] * sinks], bind if math.prod(shape) else None)
