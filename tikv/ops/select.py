"""`select`: chooses the tokens that a query shall read, by scores of tokens or of pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, runtime_of, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import INTEGERS
from tikv.ops.indices import host_indices, index_array
from tikv.ops.plan import Launch, Plan

SERIAL_SCORES = 1 << 12  # on CPU, below this one thread finishes before another wakes


def select(
    scores: Array, k: int, *, page: int | None = None, sinks: int = 0, recent: int = 0, valid: Array | int | None = None
) -> Array:
    """The tokens with the highest scores, for ``indices=`` of attention.

    Args:
        scores: (B, T, N), or (B, H, T, N) per KV head, float32: of N tokens, or of N pages of ``page`` tokens; any
            strides with a contiguous last axis. A score of -infinity is chosen only if its token or page is always
            kept; NaN is chosen before all numbers.
        k: how many tokens or pages are chosen, including those that are always kept.
        page: tokens per page, if scores are those of pages: the number that `page_scores` took (its default is 16).
            None if scores are those of tokens. The scores do not tell which they are, so without ``page`` the indices
            of pages are returned as if they were those of tokens; an error is raised only if ``valid`` on the host
            shows it.
        sinks: how many of the first tokens are always chosen, with their whole pages if scores are those of pages.
        recent: the same for the newest tokens.
        valid: the number of valid tokens: an int for all, (B,), or (B, T) for each query, int32 or int64, on the host
            or the device; None if all scores are valid. Later tokens are not chosen.

    Returns:
        (B, T, K) or (B, H, T, K) int32 of the array kind of ``scores``, where K is ``k`` or ``k * page``: the chosen
        tokens in ascending order, then -1 if there are fewer.

    Raises:
        ShapeError, DTypeError: arrays that do not agree.
        PositionError: ``valid`` on the host is negative, or greater than the number of tokens that have scores, which
            is N, or N * ``page``. On the device it is limited to this range.
        OptionError: ``k`` is less than the number always kept.

    Exactness: the exact top k; of equal scores the older are chosen, and 0 equals -0. Deterministic.
    Cost: one launch, which sorts nothing and reads the scores 34 times; 5 times on CUDA.

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
        shape: the shape of the result.
    """

    def __init__(
        self, live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], numbers: tuple[int, int, int, int]
    ) -> None:
        scores, valid = arrays[0], arrays[1:]
        names = ("scores", *["valid"] * len(valid), "out")
        super().__init__(live, operation, names, [False] * len(arrays) + [True])
        checks.on_device(list(zip(names, arrays, strict=False)), live, operation)
        checks.rank(scores, (3, 4), "scores", "(B, T, N), or (B, H, T, N) per KV head", operation)
        checks.readable(scores, "scores", operation)
        if scores.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: scores is {describe(scores)}; scores must be float32.")
        checks.addressable(scores, 4, live, "scores", operation)
        k, page, sinks, recent = self.selection = numbers
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
        for a in valid:
            checks.indices(a, "valid", operation)
            queries = scores.shape[0], scores.shape[-2]
            if a.shape not in (queries[:1], queries):
                raise ShapeError(
                    f"{operation}: valid is {describe(a)} where (B,) = {queries[:1]} or (B, T) = {queries} is needed."
                )

    def entries_at(self, arrays: Sequence[ArrayView], tokens: int) -> dict[str, int]:
        """The entry for a number of tokens, -1 for all that have scores; an array's numbers are checked if known.

        Raises:
            PositionError: a number is negative, or greater than the number of tokens that have scores.
        """
        known = host_indices(arrays[1], self.live) if len(arrays) > 1 else None
        for number in (tokens,) if known is None else (known.min(initial=0), known.max(initial=0)):
            if number > self.most or (known is not None and number < 0):
                of_pages = "" if self.selection[1] > 1 else ", or page= if these are scores of pages"
                raise PositionError(
                    f"{self.operation}: valid is {number}, but there are scores for {self.most} tokens. Use 0 to "
                    f"{self.most}{of_pages}."
                )
        return {} if len(arrays) > 1 else {"valid": self.most if tokens < 0 else tokens}

    def bind(self, arrays: Sequence[ArrayView]) -> list[Launch]:
        """As in `Plan`."""
        from tikv.kernels import select_cuda
        from tikv.kernels.lanes import BLOCK, LEAST_ITERATIONS
        from tikv.kernels.select import SelectParams, make_select

        live, (k, page, sinks, recent) = self.live, self.selection
        scores, valid, out = arrays[0], arrays[1] if len(arrays) > 2 else None, arrays[-1]
        heads = scores.shape[1] if scores.ndim == 4 else 1
        serial = live.is_cpu and self.rows * scores.shape[-1] < SERIAL_SCORES
        bits = 0 if valid is None else valid.dtype.itemsize * 8
        factory: Callable[..., Any] = make_select
        choices: tuple[Any, ...] = (live.kernel_style, serial, bits)
        each = BLOCK if not live.is_cpu else 1 if serial else LEAST_ITERATIONS
        if live.is_cuda:
            each = select_cuda.THREADS
            factory, choices = select_cuda.make_select_cuda, (each, bits)
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
        kernel = launch.kernel(live, factory, *choices)
        arguments = [scores, out if valid is None else valid, out]
        return [Launch(kernel.bind(self.rows * each, *arguments, numbers), arguments)]
