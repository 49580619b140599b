"""The partial results that ranks exchange for one attention: each rank attends over its own keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from tikv import launch, runtime
from tikv.arrays import ArrayView, view
from tikv.runtime.cache import BoundedCache

OPERATION = "ShardedKVCacheStore"
MOST_FORMS = 8  # combinations of query shape and stream


class Partials(NamedTuple):
    """Float32 tensors for the results of attention over each rank's tokens, which are merged; and views of them.

    Attributes:
        local: (batch, Hq, T, D_v + 1): each row's result, followed by its log-sum-exp.
        all: (ranks, batch, Hq, T, D_v + 1): the same, from all ranks.
        lse: (batch, Hq, T): takes log-sum-exps that the caller did not ask for.
    """

    local: Any
    all: Any
    lse: Any
    local_view: ArrayView
    all_view: ArrayView
    lse_view: ArrayView

    @classmethod
    def of(cls, shape: tuple[int, ...], width: int, ranks: int, device: Any) -> Partials:
        """New memory for `shape`, (batch, Hq, T), and results of this width."""
        import torch

        with torch.inference_mode(False):  # a tensor made in inference mode may not be written outside it
            local = torch.empty((*shape, width + 1), dtype=torch.float32, device=device)
            tensors = local, local.new_empty((ranks, *local.shape)), local.new_empty(shape)
        return cls(*tensors, *(view(a, "partial results", OPERATION) for a in tensors))


class StorePartials:
    """The memory of a store's partial results.

    The memory for one query per sequence is kept, since allocating it takes as long as gathering into it. Each stream
    has its own, since calls on two streams do not wait for each other, and so has a CUDA graph.
    """

    def __init__(self, live: runtime.Runtime, width: int, ranks: int) -> None:
        self._live = live
        self._width = width
        self._ranks = ranks
        self._cache: BoundedCache[Any, Partials] = BoundedCache(MOST_FORMS)

    def of(self, shape: tuple[int, ...], device: Any) -> Partials:
        """Memory for `shape`, (batch, Hq, T), which the caller may use while it holds the store's lock."""
        live = self._live
        if shape[2] != 1 or launch.is_captured(live):
            return Partials.of(shape, self._width, self._ranks, device)
        key = (shape, device, launch.stream_of(live))
        memory = self._cache.get(key)
        return self._cache.keep(key, Partials.of(shape, self._width, self._ranks, device)) if memory is None else memory
