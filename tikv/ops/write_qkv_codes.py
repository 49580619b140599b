"""The fused write into groups of codes, in two launches: the fused write makes float32 rows, and a second the codes.

A group's scale needs all its numbers, but several threads of the fused kernel hold them once pairs are rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, new_array, runtime_of, view, view_all
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.ops.copy import CopyOptions, CopyPlan, check_copy
from tikv.ops.indices import check_slots, host_indices, view_indices
from tikv.ops.layouts import Formats, token_and_head_axes
from tikv.ops.paged import WriteSlotsPlan, check_write_slots
from tikv.ops.plan import NO_ENTRIES
from tikv.ops.quantized_arrays import codes_of_pair, require_slots_first

_CONTIGUOUS = ("k", "k_dst", "v", "v_dst")


class FusedTarget(NamedTuple):
    """Where a fused write puts K and V; parameters of `write_qkv`."""

    k_dst: Array
    v_dst: Array
    position: int | None = None
    window: int | None = None
    slot_mapping: Array | None = None
    layout: str = "head_major"
    k_scale: Array | float | None = None
    v_scale: Array | float | None = None


def write_codes(
    fused: Callable[..., Any],
    operation: str,
    qkv: Array,
    target: FusedTarget,
    *,
    rope_positions: Array,
    out: Array,
    **how: Any,
) -> Any:
    """`write_qkv` into two `Quantized`; `fused` writes the rows of K and V to float32 arrays, and Q.

    Raises:
        As `write_qkv` does, before anything is written.
    """
    k_dst, v_dst, position, window, slot_mapping, layout, k_scale, v_scale = target
    live = runtime_of(qkv, k_dst)
    pair = {"k_dst": k_dst, "v_dst": v_dst}
    codes, numbers, formats = codes_of_pair(live, operation, pair, (k_scale, v_scale), written=True)
    if (position is None) is (slot_mapping is None) or (slot_mapping is not None and window is not None):
        raise PositionError(
            f"{operation}: position (with or without window) says where rows go in a cache, slot_mapping where "
            "they go in a pool. Pass one of the two."
        )
    source = view(qkv, "qkv", operation)
    checks.rank(source, (2,), "qkv", "(T, (Hq + 2H) * D)", operation)
    tokens = source.shape[0]
    index = None if slot_mapping is None else view_indices(slot_mapping, "slot_mapping", operation)
    if index is None:
        _, head = token_and_head_axes(layout, "layout", operation)
    else:
        require_slots_first(operation, checks.option(layout, "layout", operation, ("NHD", "HND", "VLLM")))
        head = 2
    rope = None if rope_positions is None else view_indices(rope_positions, "rope_positions", operation)
    unknown = rope is not None and host_indices(rope, live) is None  # rows beyond the tables are skipped
    rows = []
    for name, array, quantised in zip(pair, codes, pair.values(), strict=True):
        checks.rank(array, (3 if index is None else 4,), name, "(H, capacity, D), or a pool (N, bs, H, D)", operation)
        shape = (tokens, array.shape[head], quantised.shape[-1])
        rows.append(new_array(shape, dtypes.float32, live, zeroed=unknown))
    arrays = [rows[0], codes[0], rows[1], codes[1]]
    plan: CopyPlan | WriteSlotsPlan
    if index is None:
        plan, entries = _into_caches(live, operation, arrays, numbers, position, window, layout, formats)
        arrays += numbers
    else:
        arrays += [index, *numbers]
        plan, entries = _into_pools(live, operation, arrays, layout, formats), NO_ENTRIES
    named: list[tuple[str, ArrayView, bool]] = [("qkv", source, False)]
    if out is not None:
        named.append(("out", view(out, "out", operation), True))
    checks.disjoint([*named, *((f"{n}'s codes", a, True) for n, a in zip(pair, codes, strict=True))], operation)
    if rope_positions is None and position is not None:
        rope_positions = np.arange(position, position + tokens)
    between = FusedTarget(rows[0], rows[1], position=0, layout="token_major")
    q = fused(operation, qkv, between, rope_positions=rope_positions, out=out, **how)
    plan.run(arrays, entries)
    return q


def _into_caches(
    live: runtime.Runtime,
    operation: str,
    arrays: list[ArrayView],
    numbers: list[ArrayView],
    position: Any,
    window: Any,
    layout: str,
    formats: Formats,
) -> tuple[CopyPlan, Any]:
    """The plan that quantises rows into contiguous caches, and its entries; everything is checked."""
    window = checks.integer_or_none(window, "window", operation)
    views = view_all((*arrays, *numbers), (*_CONTIGUOUS, "k_scale", "v_scale"), operation)
    key = (operation, "codes", views.key, window, layout, formats)
    plan: CopyPlan | None = live.plans.get(key)
    if plan is None:
        options = CopyOptions(window, cache_layout=layout)
        plan = live.plans.keep(key, check_copy(live, operation, views, _CONTIGUOUS, options, formats=formats))
    return plan, plan.entries_at(position)


def _into_pools(
    live: runtime.Runtime, operation: str, arrays: list[ArrayView], layout: str, formats: Formats
) -> WriteSlotsPlan:
    """The plan that quantises rows into pools; the slots are checked."""
    names = ("k", "k_dst", "v", "v_dst", "slot_mapping", "k_scale", "v_scale")
    views = view_all(tuple(arrays), names, operation)
    key = (operation, "codes", views.key, layout, formats)
    plan: WriteSlotsPlan | None = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check_write_slots(live, operation, views, layout, formats))
    check_slots(arrays[4], plan.pool, live, operation)
    return plan
