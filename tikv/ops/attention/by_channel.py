"""Attention over keys quantised by channel over groups of tokens, and values by token; the codes are read in place.

The scores of all keys are computed first, by a kernel of their own: float32, 4 bytes for each key and row of queries.
Attention then reads them as keys of one column, by queries of 1, so that values have no second way of being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.plan import Launch, Plan

SERIAL_PRODUCTS = 1 << 16  # on CPU, below this the calling thread is done before another one is awake


def channel_scores(
    live: runtime.Runtime,
    operation: str,
    q: ArrayView,
    codes: ArrayView,
    numbers: ArrayView,
    out: ArrayView,
    format: GroupFormat,
    groups: int,
) -> None:
    """Products of queries and the keys of the first `groups` groups of tokens, in one launch.

    Args:
        live: the runtime.
        operation: for messages.
        q: (B, Hq, T, D) float32, float16 or bfloat16, whose last axis is contiguous.
        codes: (B, H, room, D, words) uint32, contiguous: of each group of tokens those of each channel.
        numbers: (B, H, room, D, 2): their scales and biases.
        out: (B * H, Hq / H * T, tokens) float32, contiguous; the scores of a KV head's query heads, one after another.
        format: of the codes.
        groups: how many.

    Raises:
        CapacityError: more than 32-bit indices reach.
    """
    key = ("channel_scores", q.key, codes.key, numbers.key, out.key, format, groups)
    plan: Any = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _plan(live, operation, format, groups))
    plan.run([q, codes, numbers, out])


def _plan(live: runtime.Runtime, operation: str, format: GroupFormat, groups: int) -> Plan:
    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.attention.by_channel import ScoreParams, make_channel_scores
        from tikv.kernels.groups import unit_of

        q, codes, numbers, out = arrays
        batch, heads, room, width, _ = codes.shape
        group, queries = q.shape[1] // heads, q.shape[2]
        rows = group * queries
        band = next(n for n in (4, 2, 1) if rows % n == 0)
        count, _ = unit_of(format.name)
        items = batch * heads * (rows // band) * groups * (format.group // count)
        checks.integer(items, "units of scores", operation, high=2**31 - 1)
        for name, a in (("q", q), ("K", codes), ("scales", numbers), ("scores", out)):
            checks.addressable(a, a.dtype.itemsize, live, name, operation)
        kernel = launch.kernel(
            live,
            make_channel_scores,
            live.kernel_style,
            live.is_cpu and items * count * width < SERIAL_PRODUCTS,
            format.name,
            q.dtype.short,
            numbers.dtype.short,
            width,
            group,
            band,
        )
        firsts = [a.offset // a.dtype.itemsize for a in (q, codes, numbers)]
        params = ScoreParams(items, groups, room, heads, queries, out.shape[2], *q.strides[:3], *firsts)
        return [Launch(kernel.bind(items, *arrays, tuple(params)), arrays)]

    names = ("q", "K", "the scales of K", "scores")
    return Plan(live, operation, names, (False, False, False, True), bind)
