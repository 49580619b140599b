"""Summaries of pages that a list names, for stores, which know where pages lie."""

from __future__ import annotations

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, Host, to_device
from tikv.ops import checks

SUMMARIZED = (dtypes.float32, dtypes.float16, dtypes.bfloat16, *dtypes.FLOATS8)
SERIAL_NUMBERS = 1 << 14  # on CPU, below this one thread finishes before another wakes


def distance_in(pair: tuple[ArrayView, ArrayView]) -> int:
    """Elements from the least to the greatest; both lie in one piece of memory."""
    least, greatest = pair
    return (greatest.ptr - least.ptr + greatest.offset - least.offset) // least.dtype.itemsize


def both_of(pair: tuple[ArrayView, ArrayView]) -> ArrayView:
    """The array from the first of the least to the last of the greatest."""
    return pair[0].restrided((distance_in(pair) + pair[1].span // pair[1].dtype.itemsize,), (1,))


def summarize_listed(
    live: runtime.Runtime,
    operation: str,
    keys: ArrayView,
    summaries: tuple[ArrayView, ArrayView],
    listed: Host,
    steps: tuple[int, int, int, int],
) -> None:
    """Put the least and the greatest keys of pages into `summaries`, in one launch.

    Args:
        live, operation: the call's runtime and operation.
        keys: an array of contiguous rows.
        summaries: the arrays of the least and of the greatest, of contiguous rows too.
        listed: (n, 3) integers: for each page its first row, its number of rows, and the row of its summary.
        steps: the heads of each page; then the step in rows to the next token, head, and summary of a head.
    """
    from tikv.kernels.page_summaries import ListedParams, make_summarize_listed

    heads, token, head, to_head = steps
    width, n = keys.shape[-1], len(listed)
    items = n * heads * (1 if live.is_cpu else width)
    if items == 0:
        return
    checks.countable(items, operation)
    index = to_device(listed.astype("int32").reshape(-1), live)
    arrays = [keys, index, *summaries]
    for a, name in zip(arrays, ("keys", "pages", "least", "greatest"), strict=True):
        checks.addressable(a, a.dtype.itemsize, live, name, operation)
    k_first, list_first, least_first, greatest_first = (a.offset // a.dtype.itemsize for a in arrays)
    numbers = ListedParams(
        items=items, heads=heads, list_first=list_first, k_token=token * width, k_head=head * width, k_first=k_first,
        to_head=to_head * width, least_first=least_first, greatest_first=greatest_first,
    )  # fmt: skip
    serial = live.is_cpu and int(listed[:, 1].sum()) * heads * width < SERIAL_NUMBERS
    kernel = launch.kernel(live, make_summarize_listed, live.kernel_style, serial, keys.dtype.short, width)
    kernel.bind(items, *arrays, numbers).launch()
