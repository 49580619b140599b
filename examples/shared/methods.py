"""What a cache keeps, by methods' names: each in a few lines over `return_mass`, `tikv.select`, `tikv.budget`, merges.

They work on one layer of a `tikv.KVCacheStore` of one sequence, with NumPy arrays; `pyramidkv` and `kvzip` on all
layers, and `BlockCache` on one after the other. `tests/test_methods.py` compares each with its paper's formula in
float64.
"""

from collections.abc import Mapping
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
    store: tikv.KVCacheStore, replayed: Mapping[int, tuple[Any, Any, Any]], share: float, least: int = 0
) -> list[np.ndarray]:
    """KVzip (arXiv:2505.23416): the greatest attention that each token gets when the context is repeated.

    Args:
        store: what holds the context.
        replayed: for each layer that sees all tokens q, k and v of the text that repeats it; it is not kept.
        share: the share of all tokens, over these layers and their heads, that is kept.
        least: how many tokens each head keeps at least.

    Returns:
        The scores of each of these layers, (1, H, n).
    """
    scores = []
    for layer, (q, k, v) in replayed.items():
        _, mass = store.extend(layer, q, k, v, keep=False, return_mass="max")
        scores.append(mass)
    stacked = np.stack(scores)
    keep = tikv.budget(stacked, int(share * stacked.size), over="layers", least=least)
    for layer, mask in zip(replayed, keep, strict=True):
        store.compact(layer, mask)
    return scores


def expected_attention(
    store: tikv.KVCacheStore, layer: int, q: np.ndarray, cos: np.ndarray, sin: np.ndarray, count: int, sinks: int = 4
) -> np.ndarray:
    """Expected Attention (arXiv:2510.00636): the attention that later queries will give, times the values' norms.

    Args:
        store, layer: what is held.
        q: (n, Hq, D) the queries of the prompt before their rotation.
        cos, sin: (positions, D / 2) of the rotations at later positions.
        count: tokens that each head keeps.
        sinks: how many of them are the first; queries of these positions do not count.

    Returns:
        The scores, (1, H, n).
    """
    k, v = (np.asarray(a)[0].astype(np.float64) for a in store.tokens(layer))
    width = k.shape[2]
    asked = q[sinks:].astype(np.float64).reshape(len(q) - sinks, len(k), -1, width)
    mean, other = asked.mean(axis=0), asked - asked.mean(axis=0)
    covariance = np.einsum("thgi,thgj->hgij", other, other) / len(asked)
    c, s = np.diag(np.tile(cos.mean(axis=0), 2)), np.diag(sin.mean(axis=0))
    turn = c + np.block([[0 * s, -s], [s, 0 * s]])  # the mean of the rotations
    mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
    logits = np.einsum("hgd,hnd->hgn", mean, k) / np.sqrt(width)
    logits = logits[..., sinks:] + np.einsum("hni,hgij,hnj->hgn", k, covariance, k)[..., sinks:] / (2 * width)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=1)
    scores = weights * np.linalg.norm(v[:, sinks:], axis=-1)
    scores = np.pad(scores, ((0, 0), (sinks, 0)), constant_values=scores.max() + 1)[None].astype(np.float32)
    store.compact(layer, highest(scores, count))
    return scores


def cam(
    store: tikv.KVCacheStore, layer: int, sums: np.ndarray, keep: np.ndarray, window: int, rng: np.random.Generator
) -> None:
    """CaM, Cache Merging (openreview LCTmppB165): values of dropped tokens are added to the kept tokens after them.

    Args:
        store, layer: what is held.
        sums: (1, H, n) the attention that each token got.
        keep: (1, H, count) what a method keeps, ascending.
        window: how many kept tokens after a dropped one get a part of its value.
        rng: decides: a value is merged with the probability of its token's sum over the mean of those of its window.
    """
    to = np.full((*sums.shape, window), -1)
    weights = np.zeros(to.shape, np.float32)
    for h in range(sums.shape[1]):
        for j in np.setdiff1d(np.arange(sums.shape[2]), keep[0, h]):
            after = keep[0, h][keep[0, h] > j][:window]
            if len(after) and rng.random() * sums[0, h, after].mean() < sums[0, h, j]:
                to[0, h, j, : len(after)], weights[0, h, j] = after, 1 / len(after)
    store.compact(layer, keep, merge=(to, weights, "values"))


def streaming_heads(scores: np.ndarray, share: float) -> np.ndarray:
    """DuoAttention (arXiv:2410.10819): which (L, H) heads see all tokens; the others see sinks and a window.

    Args:
        scores: (L, H) what was learned: how much each head needs all tokens.
        share: the share of the heads that stream, those of the least scores.
    """
    whole = np.ones(scores.size, bool)
    whole[np.argsort(scores, axis=None, kind="stable")[: round(scores.size * share)]] = False
    return whole.reshape(scores.shape)


class BlockCache:
    """Fast-dLLM's block cache (arXiv:2505.22618): a block of positions is rewritten until all its tokens are decided.

    The first step of a block computes all positions, so that the rows before it are rewritten too; its other steps
    compute the block alone, over the rows that are held. Queries of a step see each other both ways.

    Args:
        store: what holds the rows of all layers.
        prompt: tokens of the prompt.
    """

    def __init__(self, store: tikv.KVCacheStore, prompt: int):
        self.store, self.end = store, prompt

    def begin(self, size: int) -> None:
        """The next block has so many positions."""
        self.end += size

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Attention of a step, whose rows are those of the newest positions; a layer is called once in each step."""
        start = self.end - len(k)
        held = self.store.layer_length(layer) - start
        if held:
            self.store.rewrite(layer, start, k[:held], v[:held])
        if held < len(k):
            self.store.append(layer, k[held:], v[held:])
        return self.store.attend(layer, q, block=len(q))
