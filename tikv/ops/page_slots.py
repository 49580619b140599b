"""`page_slots`: the slots of new tokens from page tables that lie one after the other, where the tables lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, Views, new_like, view
from tikv.ops import checks
from tikv.ops.plan import Launch, Plan

_NAMES = ("batch_indices", "positions", "kv_indices", "kv_indptr", "slots")


def page_slots(operation: str, requests: Any, positions: Any, pages: Any, starts: Any, page: int) -> Any:
    """The slot of each token in one launch: (T,) int32 of the kind of `requests`, -1 where it has none.

    Args:
        operation: for messages.
        requests, positions: (T,) int32 or int64: the request of each token, and its position in it.
        pages: the pages of all requests, one after the other.
        starts: (B + 1,) where each request's pages start.
        page: slots of a page.

    Raises:
        ShapeError, DTypeError, ArchError: an array has other axes, another dtype, or lies elsewhere.
    """
    live = runtime.current()
    given = [view(a, n, operation) for a, n in zip((requests, positions, pages, starts), _NAMES, strict=False)]
    slots = new_like(requests, given[0].shape, dtypes.int32, live)
    arrays = Views([*given, view(slots, "slots", operation)])
    key = ("page_slots", operation, page, arrays.key)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _checked(live, operation, arrays, page))
    plan.run(arrays)
    return slots


def _checked(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], page: int) -> Plan:
    checks.on_device(list(zip(_NAMES, arrays, strict=True)), live, operation)
    for name, a in zip(_NAMES, arrays, strict=True):
        checks.indices(a, name, operation)
        checks.rank(a, (1,), name, "(B + 1,)" if name == "kv_indptr" else "(T,)", operation)
    tokens = arrays[0].shape[0]
    checks.extent(arrays[1].shape[0], tokens, "the length of positions", operation, "one for each token")

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.page_slots import PageSlotsParams, make_page_slots

        places = [n for a in arrays for n in (a.offset // a.dtype.itemsize, a.strides[0])]
        counts = (tokens, page, arrays[2].shape[0], arrays[3].shape[0] - 1)
        numbers = PageSlotsParams(*counts, *places[:-1])
        bits = tuple(a.dtype.itemsize * 8 for a in arrays[:4])
        kernel = launch.kernel(live, make_page_slots, live.kernel_style, bits)
        return [Launch(kernel.bind(tokens, *arrays, numbers), arrays)]

    return Plan(live, operation, _NAMES, [False] * 4 + [True], bind if tokens else None)
