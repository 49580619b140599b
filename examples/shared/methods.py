"""What a cache keeps, by methods' names: each in a few lines over `return_mass`, `tikv.select`, `tikv.budget`.

They work on one layer of a `tikv.KVCacheStore` of one sequence, with NumPy arrays; `pyramidkv` and `kvzip` on all
layers. `tests/test_methods.py` compares each with its paper's formula in float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import tikv


def highest(scores: np.ndarray, count: int, recent: int = 0) -> np.ndarray:
    """The indices (1, H, count) of the highest of (1, H, n) scores, and of the newest tokens, ascending."""
    return tikv.select(scores[:, :, None], count, recent=recent)[:, :, 0]


class H2O:
    """Heavy-Hitter Oracle (arXiv:2306.14048): attention summed over all calls; part of the budget is the newest tokens.

    Args:
        store, layer: what is kept.
        count: tokens that each head keeps.
        recent: how many of them are the newest.
    """

    def __init__(self, store: tikv.KVCacheStore, layer: int, count: int, recent: int):
        self.store, self.layer, self.count, self.recent = store, layer, count, recent
        self.scores = np.zeros((1, store.num_kv_heads, store.capacity), np.float32)

    def extend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Attend and append, add up what each token got, and drop those that got least."""
        held = int(self.store.held(self.layer)) + len(k)
        sums = self.scores[..., :held]
        out, _ = self.store.extend(self.layer, q, k, v, return_mass="sum", mass_into=sums)
        if held > self.count:
            keep = highest(np.ascontiguousarray(sums), self.count, self.recent)
            self.store.compact(self.layer, keep)
            self.scores[..., : self.count] = np.take_along_axis(sums, keep, axis=-1)
            self.scores[..., self.count :] = 0
        return out


def tova(store: tikv.KVCacheStore, layer: int, q: np.ndarray, count: int) -> None:
    """Token Omission Via Attention (arXiv:2401.06104): the newest query's attention, one choice for all heads."""
    _, mass = store.attend(layer, q[-1:], return_mass="last")
    store.compact(layer, tikv.select(mass.mean(axis=1, keepdims=True), count)[:, 0])


def observed(store: tikv.KVCacheStore, layer: int, q: np.ndarray, pool: int) -> np.ndarray:
    """Scores (1, H, n) of an observation window: the attention of its queries, averaged over `pool` neighbours."""
    _, mass = store.attend(layer, q, return_mass="sum")
    padded = np.pad(mass, ((0, 0), (0, 0), (pool // 2, pool // 2)))
    return np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1).mean(axis=-1, dtype=np.float32)


def snapkv(store: tikv.KVCacheStore, layer: int, q: np.ndarray, count: int, pool: int = 5) -> None:
    """SnapKV (arXiv:2404.14469): what the queries of the newest tokens attend to, and these tokens themselves."""
    store.compact(layer, highest(observed(store, layer, q, pool), count, recent=len(q)))


def adakv(store: tikv.KVCacheStore, layer: int, q: np.ndarray, count: int, pool: int = 5, safe: float = 0.2) -> None:
    """Ada-KV (arXiv:2407.11550): SnapKV's scores, whose budget the heads share; each keeps a safe part of it."""
    scores, recent = observed(store, layer, q, pool), len(q)
    total, least = scores.shape[1] * count, recent + int(safe * (count - recent))
    store.compact(layer, tikv.budget(scores, total, least=least, recent=recent))


def pyramidkv(layers: int, count: int, recent: int, beta: float = 20) -> list[int]:
    """PyramidKV (arXiv:2406.02069): the tokens that each layer keeps, fewer in each next one, `count` on average.

    The last layer keeps 1 / beta of the mean beside the newest tokens, and the numbers between lie on a line.
    """
    mean = count - recent
    last = mean / beta
    return [recent + round(2 * mean - last - (2 * mean - 2 * last) * i / max(1, layers - 1)) for i in range(layers)]


def kvzip(
    store: tikv.KVCacheStore, replayed: Sequence[tuple[Any, Any, Any]], share: float, least: int = 0
) -> list[np.ndarray]:
    """KVzip (arXiv:2505.23416): the greatest attention that each token gets when the context is repeated.

    Args:
        store: what holds the context.
        replayed: for each layer q, k and v of the text that repeats it; it is not kept.
        share: the share of all tokens, over layers and heads, that is kept.
        least: how many tokens each head keeps at least.

    Returns:
        The scores of each layer, (1, H, n).
    """
    scores = []
    for layer, (q, k, v) in enumerate(replayed):
        _, mass = store.extend(layer, q, k, v, keep=False, return_mass="max")
        scores.append(mass)
    stacked = np.stack(scores)
    keep = tikv.budget(stacked, int(share * stacked.size), over="layers", least=least)
    store.compact_all(list(keep))
    return scores
