"""The range of a page's keys in each channel, and the highest score that it allows: how queries choose pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, refuse_backward, runtime_of, view
from tikv.errors import CapacityError, DTypeError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import INTEGERS, QUERIES
from tikv.ops.indices import host_indices, index_array
from tikv.ops.page_summaries import SERIAL_NUMBERS, SUMMARIZED
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantized_arrays import Quantized


def summarize_pages(k_cache: Array, seq_lens: Array | int, *, page: int = 16) -> tuple[Array, Array]:
    """The least and the greatest number in each channel of the keys, for each page of neighbouring tokens.

    Args:
        k_cache: (B, H, S, D) float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; any strides with a contiguous
            last axis. Token ``p`` of a sequence is row ``p``.
        seq_lens: (B,) int32 or int64, on the host or the device: tokens of each sequence; or one int for all.
        page: tokens per page.

    Returns:
        (least, greatest), each (B, H, ceil(S / page), D), of the keys' dtype and array kind. A partly filled page is
        summarised from the tokens that it has; a page without tokens is 0 in both.

    Raises:
        ShapeError, DTypeError: arrays that do not agree, or keys that are int8 or a `Quantized`.
        CapacityError: a length on the host is greater than S; lengths on the device are limited to S.

    Exactness: exact, whatever the order of the keys: -0 is less than 0, and a NaN is the least and the greatest.
    Cost: one launch, which reads the keys once.
    Source: Quest (Tang et al., 2024), which introduced these summaries.

    Examples:
        >>> import numpy as np, tikv
        >>> keys = np.array([3, 1, 2, 5, 4], np.float32).reshape(1, 1, 5, 1)
        >>> [a.ravel().tolist() for a in tikv.summarize_pages(keys, 5, page=2)]
        [[1.0, 2.0, 4.0], [3.0, 5.0, 4.0]]
    """
    operation = "summarize_pages"
    if isinstance(k_cache, Quantized):
        raise DTypeError(
            f"{operation}: k_cache holds codes of {k_cache.format}. Pass the keys as they were before quantisation."
        )
    live = runtime_of(k_cache)
    size = checks.integer(page, "page", operation, low=1, high=2**31 - 1)
    k = view(k_cache, "k_cache", operation)
    lens, length, owner = _lengths(seq_lens, operation)
    arrays = [k, *lens]
    key = (operation, *[a.key for a in arrays], size)
    plan: Any = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _summary_plan(live, operation, arrays, size))
    shape, entries = (*k.shape[:2], -(-k.shape[2] // size), k.shape[3]), _entries(arrays, length, k.shape[2], plan)
    summaries = tuple(new_like(k_cache, shape, k.dtype, live) for _ in range(2))
    plan.run([*arrays, *(view(a, "out", operation) for a in summaries)], entries)
    del owner
    return handed_over(summaries[0]), handed_over(summaries[1])


def page_scores(q: Array, least: Array, greatest: Array, seq_lens: Array | int, *, page: int = 16) -> Array:
    """An upper bound on ``q.k`` over the keys of each page, summed over the query heads of a KV head.

    Each channel counts with its least or its greatest, whichever gives more: no key of the page scores higher.

    Args:
        q: (B, Hq, D) or (B, Hq, T, D) float32, float16 or bfloat16, the newest tokens' queries; any strides with a
            contiguous last axis.
        least, greatest: (B, H, P, D), as `summarize_pages` gives them; H divides Hq.
        seq_lens: (B,) int32 or int64, or one int for all: tokens of each sequence, the newest included.
        page: tokens per page of the summaries, which cannot be checked: if it is too large, the newest pages score
            -infinity. Give `select` the same number: without it, scores count as those of tokens.

    Returns:
        (B, H, T, P) float32 of q's array kind. A page that begins after a query's own token scores -infinity.

    Raises:
        ShapeError, DTypeError: arrays that do not agree.
        CapacityError: a length on the host reaches beyond the pages; lengths on the device are limited to them.

    Exactness: products and sums in float32. A NaN in a query, or in both summaries of a page, gives a NaN. So does 0
        times infinity, but on CUDA only if no other query head of the KV head multiplies that infinity by a number
        other than 0.
    Cost: one launch, which reads the summaries once; on CPU, Vulkan and Metal once for each query head.

    Examples:
        >>> import numpy as np, tikv
        >>> keys = np.array([3, 1, 2, 5, 4], np.float32).reshape(1, 1, 5, 1)
        >>> least, greatest = tikv.summarize_pages(keys, 5, page=2)
        >>> scores = tikv.page_scores(np.full((1, 1, 1), -1, np.float32), least, greatest, 5, page=2)
        >>> scores.tolist(), tikv.select(scores, 2, page=2, valid=5).tolist()
        ([[[[-1.0, -2.0, -4.0]]]], [[[[0, 1, 2, 3]]]])
    """
    operation = "page_scores"
    live = runtime_of(q, least)
    size = checks.integer(page, "page", operation, low=1, high=2**31 - 1)
    names = ("q", "least", "greatest")
    lens, length, owner = _lengths(seq_lens, operation)
    arrays = [*(view(a, name, operation) for a, name in zip((q, least, greatest), names, strict=True)), *lens]
    key = (operation, *[a.key for a in arrays], size)
    plan: Any = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _score_plan(live, operation, arrays, size))
    entries = _entries(arrays, length, arrays[1].shape[2] * size, plan)
    queries = arrays[0].shape[2] if arrays[0].ndim == 4 else 1
    out = new_like(q, (*arrays[1].shape[:2], queries, arrays[1].shape[2]), dtypes.float32, live)
    plan.run([*arrays, view(out, "out", operation)], entries)
    del owner
    return refuse_backward(handed_over(out), q, least, greatest)


def _lengths(seq_lens: Array | int, operation: str) -> tuple[list[ArrayView], int, Any]:
    """(the view, if lengths are an array; the number, if they are one; the owner, which the view does not keep)."""
    if isinstance(seq_lens, INTEGERS):
        return [], checks.integer(seq_lens, "seq_lens", operation), None
    owner = index_array(seq_lens, "seq_lens", operation)
    return [view(owner, "seq_lens", operation)], 0, owner


def _entries(arrays: Sequence[ArrayView], length: int, capacity: int, plan: Plan) -> dict[str, int]:
    """The entry of one length for all sequences; lengths are checked where the host knows them.

    Raises:
        CapacityError: one is negative or beyond the capacity.
    """
    has_lens = "seq_lens" in plan.names
    known = host_indices(arrays[-1], plan.live) if has_lens else None
    for number in (length,) if known is None else (known.min(initial=0), known.max(initial=0)):
        if not 0 <= number <= capacity:
            raise CapacityError(f"{plan.operation}: seq_lens has {number}, outside 0..{capacity}.")
    return {} if has_lens else {"length": length}


def _check_lengths(lens: Sequence[ArrayView], batch: int, operation: str) -> None:
    for a in lens:
        checks.indices(a, "seq_lens", operation)
        checks.rank(a, (1,), "seq_lens", "(B,)", operation)
        checks.extent(a.shape[0], batch, "the number of lengths", operation)


def _summary_plan(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], page: int) -> Plan:
    """The plan that summarises pages of keys of this form."""
    k, lens = arrays[0], arrays[1:]
    names = ("k_cache", *["seq_lens"] * len(lens), "least", "greatest")
    checks.on_device(list(zip(names, arrays, strict=False)), live, operation)
    checks.rank(k, (4,), "k_cache", "(B, H, S, D)", operation)
    checks.readable(k, "k_cache", operation)
    if k.dtype not in SUMMARIZED:
        raise DTypeError(
            f"{operation}: k_cache is {describe(k)}; keys must be one of {', '.join(a.name for a in SUMMARIZED)}."
        )
    _check_lengths(lens, k.shape[0], operation)
    batch, heads, capacity, width = k.shape
    pages = -(-capacity // page)
    items = batch * heads * pages * (1 if live.is_cpu else width)  # the pages of all heads; on a GPU, their channels
    items = checks.integer(items if width else 0, "channels of pages", operation, high=2**31 - 1)

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.page_summaries import SummaryParams, make_summarize_pages

        k, least, greatest = arrays[0], *arrays[-2:]
        numbers = SummaryParams(
            items=items, heads=heads, pages=pages, page=page, capacity=capacity, **_numbers_of_lengths(arrays[1:-2]),
            **_strides("k", k), **_strides("least", least), **_strides("greatest", greatest),
        )  # fmt: skip
        serial = live.is_cpu and batch * heads * capacity * width < SERIAL_NUMBERS
        bits = arrays[1].dtype.itemsize * 8 if len(arrays) > 3 else 0
        kernel = launch.kernel(live, make_summarize_pages, live.kernel_style, serial, k.dtype.short, width, bits)
        arguments = [k, arrays[1] if bits else k, least, greatest]
        return [Launch(kernel.bind(items, *arguments, numbers), arguments)]

    return _plan(live, operation, names, arrays, 2, bind if items else None)


def _score_plan(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], page: int) -> Plan:
    """The plan that scores pages of this form."""
    q, least, greatest, lens = *arrays[:3], arrays[3:]
    names = ("q", "least", "greatest", *["seq_lens"] * len(lens), "out")
    checks.on_device(list(zip(names, arrays, strict=False)), live, operation)
    checks.rank(q, (3, 4), "q", "(B, Hq, D) or (B, Hq, T, D)", operation)
    for a, name in zip(arrays[:3], names, strict=False):
        checks.readable(a, name, operation)
    for a, name in ((least, "least"), (greatest, "greatest")):
        checks.rank(a, (4,), name, "(B, H, P, D)", operation)
        if a.dtype not in SUMMARIZED:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; pass what `summarize_pages` returned.")
    checks.same_dtype(least, greatest, "least", "greatest", operation)
    if q.dtype not in QUERIES:
        raise DTypeError(f"{operation}: q is {describe(q)}; queries must be float32, float16 or bfloat16.")
    if greatest.shape != least.shape:
        raise ShapeError(
            f"{operation}: greatest is {describe(greatest)} where {least.shape} is needed, the shape of least."
        )
    detail = f"q: {describe(q)}, least: {describe(least)}"
    batch, heads, pages, width = least.shape
    checks.extent(q.shape[0], batch, "the batch of q", operation, detail)
    checks.extent(q.shape[-1], width, "the head width of q", operation, detail)
    if heads == 0 or q.shape[1] % heads:
        remedy = f"Use a multiple of {heads}."
        if heads and q.ndim == 4 and q.shape[2] % heads == 0:
            remedy = "In the other order of axes it fits: pass q.swapaxes(1, 2)."
        raise ShapeError(
            f"{operation}: {q.shape[1]} query heads do not divide among {heads} KV heads ({detail}). {remedy}"
        )
    _check_lengths(lens, batch, operation)
    queries = q.shape[2] if q.ndim == 4 else 1
    items = checks.integer(batch * heads * queries * pages, "scores", operation, high=2**31 - 1)
    checks.integer(pages * page, "tokens of all pages", operation, high=2**31 - 1)

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.page_scores import PageParams, make_page_scores
        from tikv.kernels.page_scores_cuda import SummaryRows, make_page_scores_cuda, threads_of

        q, least, greatest, out = *arrays[:3], arrays[-1]
        lens_bits = arrays[3].dtype.itemsize * 8 if len(arrays) > 4 else 0
        codes = q.dtype.short, least.dtype.short
        serial = live.is_cpu and items * width * q.shape[1] // heads < SERIAL_NUMBERS
        factory: Callable[..., Any] = make_page_scores
        choices: tuple[Any, ...] = (live.kernel_style, serial, *codes, width, lens_bits)
        words, q_words, groups, extent = least.dtype.itemsize, q.dtype.itemsize, 0, items
        if live.is_cuda:
            words = _word_bytes([least, greatest], 8)
            q_words = _word_bytes([q], min(8, words // least.dtype.itemsize * q.dtype.itemsize))
            rows = SummaryRows(*codes, width, q_words * 8, words * 8, lens_bits)
            factory, choices = make_page_scores_cuda, (rows,)
            groups, extent = threads_of(rows, batch * heads * queries, pages)
            checks.countable(extent, operation)
        numbers = PageParams(
            items=items, groups=groups, heads=heads, group=q.shape[1] // heads, queries=queries, pages=pages,
            page=page, capacity=pages * page, out_first=out.offset // 4, **_numbers_of_lengths(arrays[3:-1]),
            **_strides("k", q, q_words), **_strides("least", least, words), **_strides("greatest", greatest, words),
        )  # fmt: skip
        kernel = launch.kernel(live, factory, *choices)
        arguments = [q, least, greatest, arrays[3] if lens_bits else q, out]
        return [Launch(kernel.bind(extent, *arguments, numbers), arguments)]

    return _plan(live, operation, names, arrays, 1, bind if items else None)


def _plan(
    live: runtime.Runtime,
    operation: str,
    names: Sequence[str],
    arrays: Sequence[ArrayView],
    results: int,
    bind: Callable[[Sequence[ArrayView]], list[Launch]] | None,
) -> Plan:
    """A plan that reads these arrays and writes the given number of results."""
    for a, name in zip(arrays, names, strict=False):
        checks.addressable(a, a.dtype.itemsize, live, name, operation)
    return Plan(live, operation, tuple(names), [False] * len(arrays) + [True] * results, bind)


def _numbers_of_lengths(lens: Sequence[ArrayView]) -> dict[str, int]:
    if not lens:
        return {}
    return {"lens_sequence": lens[0].strides[0], "lens_first": lens[0].offset // lens[0].dtype.itemsize}


def _word_bytes(arrays: Sequence[ArrayView], most: int) -> int:
    """The largest power of two, in bytes up to `most`, to which every row of the arrays is aligned."""
    jumps = [n * a.dtype.itemsize for a in arrays for n in (*a.strides[:-1], a.shape[-1])]
    common = math.gcd(most, *jumps, *(a.ptr for a in arrays), *(a.offset for a in arrays))
    return common & -common


def _strides(name: str, a: ArrayView, word_bytes: int = 0) -> dict[str, int]:
    """The strides of an array for its parameters, in words: those of sequences, of heads, and of tokens or pages."""
    token, size = "token" if name == "k" else "page", word_bytes or a.dtype.itemsize
    strides = {"sequence": a.strides[0], "head": a.strides[1], token: a.strides[2] if a.ndim == 4 else 0}
    in_words = {f"{name}_{what}": n * a.dtype.itemsize // size for what, n in strides.items()}
    return in_words | {f"{name}_first": a.offset // size}
