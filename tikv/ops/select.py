"""`select`: which tokens a query shall read, by scores of tokens or of pages of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, describe, handed_over, new_like, runtime_of, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import INTEGERS
from tikv.ops.indices import host_indices, index_array
from tikv.ops.plan import Launch, Plan

SERIAL_SCORES = 1 << 12  # on CPU, below this one thread is done before another is awake


def select(scores: Any, k: int, *, page: int | None = None, sinks: int = 0, recent: int = 0, valid: Any = None) -> Any:
    """The tokens with the highest scores, for ``indices=`` of attention.

    Args:
        scores: (B, T, N), or (B, H, T, N) by KV head, float32: of N tokens, or of N pages of ``page`` tokens; any
            strides with a contiguous last axis. One of -infinity is never chosen, a NaN before all numbers.
        k: how many are chosen, tokens or pages, those included that are always kept.
        page: tokens of a page, where scores are of pages: the number that `page_scores` took, which is 16 there if
            nobody says another. None, as here if nobody says one: of tokens. Scores do not tell which they are, so
            without ``page`` numbers of pages are returned as numbers of tokens; of ``valid`` on the host an error may
            show it.
        sinks: the first so many tokens are always chosen, or the pages that have one of them.
        recent: the same of the newest so many.
        valid: tokens that there are: an int for all, (B,), or (B, T) for each query, int32 or int64, on the host or the
            device; None for all that have scores. Those behind are not chosen.

    Returns:
        (B, T, K) or (B, H, T, K) int32 of the kind of ``scores``, K being ``k`` or ``k * page``: the chosen tokens in
        their order, and -1 behind them where there are fewer.

    Raises:
        ShapeError, DTypeError: arrays that do not agree.
        PositionError: ``valid`` on the host is negative, or more than there are scores for. On the device it is
            bounded.
        OptionError: ``k`` is less than what is always kept.

    Exactness: the exact top k; of equal scores, zeros of both signs among them, the older are chosen. Deterministic.
    Cost: one launch, which reads the scores 34 times and sorts nothing.

    Examples:
        >>> import numpy as np, tikv
        >>> scores = np.array([[[0.5, 3.0, 1.0, 3.0, 2.0, 0.0]]], np.float32)
        >>> tikv.select(scores, 3).tolist(), tikv.select(scores, 3, sinks=1, recent=1).tolist()
        ([[[1, 3, 4]]], [[[0, 1, 5]]])
        >>> tikv.select(scores[..., :3], 2, page=2, valid=5).tolist()
        [[[2, 3, 4, -1]]]
    """
    operation = "select"
    live = runtime_of(scores)
    k = checks.integer(k, "k", operation, low=1, high=2**31 - 1)
    size = 1 if page is None else checks.integer(page, "page", operation, low=1, high=2**31 - 1)
    sinks = checks.integer(sinks, "sinks", operation, high=2**30)
    recent = checks.integer(recent, "recent", operation, high=2**30)
    arrays, tokens = [view(scores, "scores", operation)], -1
    if isinstance(valid, INTEGERS):
        tokens = checks.integer(valid, "valid", operation)
    elif valid is not None:
        valid = index_array(valid, "valid", operation)
        arrays.append(view(valid, "valid", operation))
    key = (operation, *[a.key for a in arrays], k, size, sinks, recent)
    plan: Any = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, SelectPlan(live, operation, arrays, (k, size, sinks, recent)))
    entries = plan.entries_at(arrays, tokens)
    out = new_like(scores, plan.shape, dtypes.int32, live)
    plan.run([*arrays, view(out, "out", operation)], entries)
    return handed_over(out)


class SelectPlan(Plan):
    """A choice among scores of one form; see `ops.plan`.

    Attributes:
        shape: of what is chosen.
    """

    def __init__(
        self, live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], numbers: tuple[int, int, int, int]
    ) -> None:
        scores, given = arrays[0], arrays[1:]
        names = ("scores", *["valid"] * len(given), "out")
        super().__init__(live, operation, names, [False] * len(arrays) + [True])
        checks.on_device(list(zip(names, arrays, strict=False)), live, operation)
        checks.rank(scores, (3, 4), "scores", "(B, T, N), or (B, H, T, N) by KV head", operation)
        checks.readable(scores, "scores", operation)
        if scores.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: scores is {describe(scores)}; scores must be float32.")
        checks.addressable(scores, 4, live, "scores", operation)
        k, page, sinks, recent = self.chosen = numbers
        least = -(-sinks // page) + (-(-(recent - 1) // page) + 1 if recent else 0)
        if k < least:
            raise OptionError(
                f"{operation}: k={k} is less than what sinks={sinks} and recent={recent} always keep, which may be "
                f"{least}{f' pages of {page}' if page > 1 else ''}. Use k={least} or more."
            )
        self.most = scores.shape[-1] * page
        checks.integer(self.most, "tokens that have scores", operation, high=2**31 - 1 - page)  # the kernel adds a page
        self.shape = (*scores.shape[:-1], k * page)
        checks.integer(math.prod(self.shape), "tokens that are chosen", operation, high=2**31 - 1)
        self.rows = math.prod(scores.shape[:-1])
        self.nothing = self.rows == 0
        for a in given:
            checks.indices(a, "valid", operation)
            queries = scores.shape[0], scores.shape[-2]
            if a.shape not in (queries[:1], queries):
                raise ShapeError(
                    f"{operation}: valid is {describe(a)} where (B,) = {queries[:1]} or (B, T) = {queries} is needed."
                )

    def entries_at(self, arrays: Sequence[ArrayView], tokens: int) -> dict[str, int]:
        """The entry of a number of tokens, -1 for all that have scores; those of an array are checked where known.

        Raises:
            PositionError: more than have scores, or less than none.
        """
        known = host_indices(arrays[1], self.live) if len(arrays) > 1 else None
        for number in (tokens,) if known is None else (known.min(initial=0), known.max(initial=0)):
            if number > self.most or (known is not None and number < 0):
                of_pages = "" if self.chosen[1] > 1 else ", or page= if these are scores of pages"
                raise PositionError(
                    f"{self.operation}: valid is {number}, but there are scores for {self.most} tokens. Use 0 to "
                    f"{self.most}{of_pages}."
                )
        return {} if len(arrays) > 1 else {"valid": self.most if tokens < 0 else tokens}

    def bind(self, arrays: Sequence[ArrayView]) -> list[Launch]:
        """As there."""
        from tikv.kernels.lanes import BLOCK, LEAST_ITERATIONS
        from tikv.kernels.select import SelectParams, make_select

        live, (k, page, sinks, recent) = self.live, self.chosen
        scores, valid, out = arrays[0], arrays[1] if len(arrays) > 2 else None, arrays[-1]
        heads = scores.shape[1] if scores.ndim == 4 else 1
        serial = live.is_cpu and self.rows * scores.shape[-1] < SERIAL_SCORES
        each = BLOCK if not live.is_cpu else 1 if serial else LEAST_ITERATIONS
        checks.integer(self.rows * each, "threads that choose", self.operation, high=2**31 - 1)
        numbers = SelectParams(
            rows=self.rows,
            heads=heads,
            queries=scores.shape[-2],
            entries=scores.shape[-1],
            k=k,
            page=page,
            sinks=sinks,
            recent=recent,
            valid=self.most,
            score_sequence=scores.strides[0],
            score_head=scores.strides[1] if scores.ndim == 4 else 0,
            score_query=scores.strides[-2],
            score_first=scores.offset // 4,
            valid_sequence=0 if valid is None else valid.strides[0],
            valid_query=0 if valid is None or valid.ndim == 1 else valid.strides[1],
            valid_first=0 if valid is None else valid.offset // valid.dtype.itemsize,
            out_first=out.offset // 4,
        )
        bits = 0 if valid is None else valid.dtype.itemsize * 8
        kernel = launch.kernel(live, make_select, live.kernel_style, serial, bits)
        given = [scores, out if valid is None else valid, out]
        return [Launch(kernel.bind(self.rows * each, *given, numbers), given)]
