"""`budget`: which tokens each head keeps, if the heads of a layer, or of all layers, share one number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, CacheArray, describe, handed_over, new_like, runtime_of, view
from tikv.errors import CapacityError, DTypeError, OptionError
from tikv.ops import checks
from tikv.ops.plan import Launch, Plan

OVER = ("heads", "layers")
SERIAL_SCORES = 1 << 12  # on CPU, below this one thread finishes before another wakes


def budget(scores: Array, total: int, *, over: str = "heads", least: int = 0, sinks: int = 0, recent: int = 0) -> Array:
    """Which tokens to keep if heads, or heads and layers, share a budget: those with the highest scores among all.

    Heads that matter more keep more. Each head keeps its first and newest tokens and at least ``least`` in all; the
    rest of ``total`` goes to the highest scores of the whole sequence, in whichever head they are.

    Args:
        scores: float32 (B, H, S) of one layer, or (L, B, H, S) of all layers; any strides with a contiguous last axis.
            A score of -infinity is kept only as one of the first or newest; NaN is kept before all numbers.
        total: how many tokens a sequence keeps, over all of its heads, and over all layers if there are several. The
            first, the newest and the least of each head are part of it.
        over: "heads" for (B, H, S), "layers" for (L, B, H, S).
        least: how many tokens each head keeps at least, its first and newest included.
        sinks, recent: how many of the first and of the newest tokens each head always keeps.

    Returns:
        A bool mask of the shape of ``scores``, which `KVCacheStore.compact` takes, or a layer of it. It is an array of
        the kind of ``scores``, or of NumPy for a `CacheArray`.

    Raises:
        CapacityError: ``total`` is more than the number of scores of a sequence, or ``least`` than that of a head.
        OptionError: ``total`` is less than what the heads always keep; ``over`` does not fit the axes.
        ShapeError, DTypeError: scores of another form.

    Exactness: the exact highest scores; of equal scores the older are kept, then those of the first layer and head, and
        0 equals -0. Deterministic, and the same on every back end.
    Cost: one launch, which sorts nothing and reads the scores 35 times; on CUDA 4 times and on Vulkan and Metal 9, or
        up to twice as often if only some of equal scores are kept. As often again if ``least`` is above ``sinks`` +
        ``recent``. A sequence is one thread on a CPU, and one block of threads on a GPU.

    Examples:
        >>> import numpy as np, tikv
        >>> scores = np.array([[[9, 1, 8, 7, 2], [3, 0, 4, 0, 1]]], np.float32)
        >>> tikv.budget(scores, 5, least=2).astype(int).tolist()
        [[[1, 0, 1, 1, 0], [1, 0, 1, 0, 0]]]
        >>> tikv.budget(scores, 5, recent=1).sum(axis=-1).tolist()
        [[4, 1]]
    """
    operation = "budget"
    live, a = runtime_of(scores), view(scores, "scores", operation)
    over = checks.option(over, "over", operation, OVER)
    numbers = tuple(
        checks.integer(n, name, operation, high=2**30)
        for name, n in (("total", total), ("least", least), ("sinks", sinks), ("recent", recent))
    )
    key = (operation, a.key, over, numbers)
    plan: Any = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, BudgetPlan(live, operation, a, over, numbers))
    out = new_like(scores, a.shape, dtypes.int8, live)
    plan.run([a, view(out, "out", operation)])
    return _as_mask(handed_over(out))


def _as_mask(out: Array) -> Any:
    """An int8 array of 0 and 1 as bool, without a copy."""
    if isinstance(out, CacheArray):
        return out.numpy().view(np.bool_)
    if hasattr(out, "detach"):
        import torch

        return out.view(torch.bool)
    return out.view(np.bool_)


class BudgetPlan(Plan):
    """A budget over scores of one form; see `ops.plan`."""

    def __init__(
        self, live: runtime.Runtime, operation: str, scores: ArrayView, over: str, numbers: tuple[int, ...]
    ) -> None:
        super().__init__(live, operation, ("scores", "out"), (False, True))
        checks.on_device([("scores", scores)], live, operation)
        axes = {"heads": "(B, H, S)", "layers": "(L, B, H, S)"}
        if scores.ndim in (3, 4) and scores.ndim != (3 if over == "heads" else 4):
            other = "layers" if over == "heads" else "heads"
            raise OptionError(
                f"{operation}: over={over!r} takes scores {axes[over]}, and they are {describe(scores)}. Use "
                f"over={other!r}, or other scores."
            )
        checks.rank(scores, (3,) if over == "heads" else (4,), "scores", axes[over], operation)
        checks.readable(scores, "scores", operation)
        if scores.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: scores is {describe(scores)}; scores must be float32.")
        checks.addressable(scores, 4, live, "scores", operation)
        self.layers, (self.sequences, self.heads, self.tokens) = (
            scores.shape[0] if over == "layers" else 1,
            scores.shape[-3:],
        )
        self.numbers, self.rows = numbers, self.layers * self.heads
        total, least, sinks, recent = numbers
        self.nothing = self.sequences * self.rows * self.tokens == 0
        held = self.rows * self.tokens
        if total > held:
            raise CapacityError(f"{operation}: total={total}, and a sequence has {held} scores. Use at most {held}.")
        if least > self.tokens:
            raise CapacityError(
                f"{operation}: least={least}, and a head has {self.tokens} scores. Use at most {self.tokens}."
            )
        always = self.rows * min(self.tokens, max(least, sinks + recent))
        if total < always:
            raise OptionError(
                f"{operation}: total={total} is less than what least={least}, sinks={sinks} and recent={recent} keep "
                f"of {self.rows} heads, which is {always}. Use total={always} or more."
            )

    def bind(self, arrays: Sequence[ArrayView]) -> list[Launch]:
        """As in `Plan`."""
        from tikv.kernels.budget import BudgetParams, make_budget, threads_of
        from tikv.kernels.lanes import LEAST_ITERATIONS

        live, (scores, out) = self.live, arrays
        total, least, sinks, recent = self.numbers
        serial = live.is_cpu and (self.sequences == 1 or math.prod(scores.shape) < SERIAL_SCORES)
        each = threads_of(live.kernel_style) if not live.is_cpu else 1 if serial else LEAST_ITERATIONS
        of_layer = self.sequences * self.heads * self.tokens
        checks.integer(self.sequences * each, "threads that share out", self.operation, high=2**31 - 1)
        checks.integer(of_layer * self.layers, "scores", self.operation, high=2**31 - 1)
        numbers = BudgetParams(
            sequences=self.sequences,
            rows=self.rows,
            heads=self.heads,
            tokens=self.tokens,
            total=total,
            least=least,
            sinks=min(sinks, self.tokens),
            recent=min(recent, self.tokens),
            score_layer=scores.strides[0] if scores.ndim == 4 else 0,
            score_sequence=scores.strides[-3],
            score_head=scores.strides[-2],
            score_first=scores.offset // 4,
            out_layer=of_layer,
            out_sequence=self.heads * self.tokens,
            out_first=out.offset,
        )
        kernel = launch.kernel(live, make_budget, live.kernel_style, serial)
        return [Launch(kernel.bind(self.sequences * each, scores, out, tuple(numbers)), [scores, out])]
