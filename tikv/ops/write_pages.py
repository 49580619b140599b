"""`write_pages`: writes new rows into pools, placed by concatenated page tables, which may be on the device."""

from __future__ import annotations

from collections.abc import Sequence

from tikv import runtime
from tikv.arrays import Array, ArrayView, Views, runtime_of, view
from tikv.ops import checks
from tikv.ops.layouts import Placement
from tikv.ops.paged import check_pool_write
from tikv.ops.plan import Launch, Plan

_NAMES = ("k", "k_pool", "v", "v_pool", "batch_indices", "positions", "kv_indices", "kv_indptr")
_WRITTEN = (False, True, False, True, False, False, False, False)


def write_pages(
    operation: str,
    k: Array,
    v: Array,
    k_pool: Array,
    v_pool: Array,
    requests: Array,
    positions: Array,
    pages: Array,
    starts: Array,
    layout: str,
) -> None:
    """Write new keys and values into page pools in one launch, each token into its request's pages.

    A token without a request, a position, or a page in the pool is skipped.

    Args:
        operation: the operation's name, for messages.
        k, v, k_pool, v_pool, layout: as in `tikv.write_slots`; pools must not need scales.
        requests, positions: (T,) int32 or int64: the request of each token, and its position in it.
        pages: the pages of all requests, concatenated.
        starts: (B + 1,) where each request's pages start.

    Raises:
        ShapeError, DTypeError, ArchError: an array has the wrong axes, dtype or device.
    """
    live = runtime_of(k_pool, k)
    arguments = (k, k_pool, v, v_pool, requests, positions, pages, starts)
    arrays = Views([view(a, name, operation) for a, name in zip(arguments, _NAMES, strict=True)])
    key = ("write_pages", operation, layout, arrays.key)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _checked(live, operation, arrays, layout))
    plan.run(arrays)


def _checked(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], layout: str) -> Plan:
    write = check_pool_write(live, operation, _NAMES, arrays, layout)
    checks.convertible(arrays[0], arrays[1], "k", "k_pool", operation)
    for name, a in zip(_NAMES[4:], arrays[4:], strict=True):
        checks.indices(a, name, operation)
        checks.rank(a, (1,), name, "(B + 1,)" if name == "kv_indptr" else "(T,)", operation)
    for name, a in zip(_NAMES[4:6], arrays[4:6], strict=True):
        checks.extent(a.shape[0], write.tokens, f"the length of {name}", operation, "one for each token")

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        return write.bind(live, operation, arrays, Placement("pages", pages=arrays[4:]))

    return Plan(live, operation, _NAMES, _WRITTEN, None if write.nothing else bind)
