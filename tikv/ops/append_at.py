"""Appends to one layer's arrays, in any format, at positions that the launch reads from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tikv import runtime
from tikv.arrays import Array, ArrayView, describe, runtime_of, view_all
from tikv.errors import CapacityError
from tikv.ops import checks
from tikv.ops.attention.contiguous import contiguous_cache
from tikv.ops.layouts import Formats, Placement, Rows
from tikv.ops.plan import Launch, Plan
from tikv.ops.row_copy import bind_copies

NAMES = ("k", "v", "k_cache", "v_cache", "positions")
SCALES = ("k_scale", "v_scale")


def append_at(
    operation: str,
    rows: tuple[Any, Any],
    caches: tuple[Any, Any],
    scales: tuple[Any, Any],
    positions: Array,
    *,
    formats: Formats = (None, None),
    ring: int = 0,
    sinks: int = 0,
) -> None:
    """Append new rows at the positions of their sequences, in place; one launch if K and V are stored alike.

    Args:
        operation: the operation's name, for messages.
        rows: K (B, H, T, D) and V (B, H, T, D_v), of any strides with a contiguous last axis.
        caches: one for K and one for V, (B, H, slots, width), each of one dtype: numbers, or words of codes.
        scales: for K and for V, (B, H, slots) or (B, H, slots, n), or (1,) or (H,) that rows are divided by, or None.
        positions: (B,) int32 or int64 on the device: each sequence's first new token, counted over all ever appended.
        formats: the formats of K and V, where caches hold codes of groups.
        ring: slots after the sinks that form a ring; 0 if there is no ring: then tokens past the last slot are skipped.
        sinks: the number of first slots, which are written once.

    Raises:
        ShapeError, DTypeError: arrays that do not fit each other.
    """
    live = runtime_of(caches[0], rows[0])
    present = [i for i in (0, 1) if scales[i] is not None]
    arguments = (*rows, *caches, positions, *[scales[i] for i in present])
    names = (*NAMES, *[SCALES[i] for i in present])
    arrays = view_all(arguments, names, operation)
    key = (operation, "at", formats, ring, sinks, *present, arrays.key)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _check(live, operation, names, arrays, formats, ring, sinks))
    plan.run(arrays)


def _check(
    live: runtime.Runtime,
    operation: str,
    names: Sequence[str],
    arrays: Sequence[ArrayView],
    formats: Formats,
    ring: int,
    sinks: int,
) -> Plan:
    """Check everything except where the arrays lie."""
    named = dict(zip(names, arrays, strict=True))
    checks.on_device(list(named.items()), live, operation)
    k, v, k_cache, v_cache, positions = arrays[:5]
    detail = ", ".join(f"{name}: {describe(a)}" for name, a in named.items())
    for name in NAMES[:4]:
        checks.rank(named[name], (4,), name, "(B, H, T, D)", operation)
        checks.readable(named[name], name, operation)
    checks.same_dtype(k, v, "k", "v", operation)
    batch, heads, tokens, _ = k.shape
    slots = k_cache.shape[2]
    for name, a, cache, format in (("k", k, k_cache, formats[0]), ("v", v, v_cache, formats[1])):
        for axis, expected, what in ((0, batch, "batch"), (1, heads, "number of heads"), (2, tokens, "tokens")):
            checks.extent(a.shape[axis], expected, f"the {what} of {name}", operation, detail)
        for axis, expected, what in ((0, batch, "batch"), (1, heads, "number of heads"), (2, slots, "slots")):
            checks.extent(cache.shape[axis], expected, f"the {what} of {name}_cache", operation, detail)
        width = cache.shape[3] if format is None else format.columns(cache.shape[3])
        checks.extent(a.shape[3], width, f"the head width of {name}", operation, detail)
    checks.indices(positions, "positions", operation)
    checks.rank(positions, (1,), "positions", "(B,)", operation)
    checks.extent(positions.shape[0], batch, "the length of positions", operation, detail)
    if sinks + ring > slots:
        raise CapacityError(f"{operation}: {sinks} sinks and a ring of {ring} do not fit {slots} slots ({detail}).")

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        now = dict(zip(names, arrays, strict=True))
        roles = {"k": now["k_cache"], "v": now["v_cache"]} | {name: now[name] for name in SCALES if name in now}
        cache = contiguous_cache(roles, formats=formats)
        strides = [a.strides for a in arrays[:2]]
        return bind_copies(
            live,
            operation,
            src=[
                Rows(a, sequence=s[0], head=s[1], token=s[2])
                for a, s in zip(arrays[:2], strides, strict=True)
            ],
            dst=[cache.k, cache.v],
            widths=[k.shape[3], v.shape[3]],
            heads=heads,
            tokens=tokens,
            groups=batch,
            dst_place=Placement(
                "ragged", array=now["positions"], limit=slots, group=int(batch > 1), sinks=sinks, ring=ring,
                keep=max(0, tokens - ring) if ring else 0,
            ),
        )  # fmt: skip

    written = [name in ("k_cache", "v_cache", *SCALES) for name in names]
    return Plan(live, operation, names, written, bind if tokens and batch and heads else None)
