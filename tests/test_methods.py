"""The methods of `examples/shared/methods.py` against their papers' formulas, in float64 on small cases."""

import sys
from pathlib import Path

import numpy as np
import pytest

import tikv

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from shared import methods

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.thorough]
HEADS, GROUP, WIDTH = 2, 2, 16


def made(rng, tokens, layers=1):
    store = tikv.KVCacheStore(num_layers=layers, num_kv_heads=HEADS, head_dim=WIDTH, capacity=64, dtype="float32")
    rows = rng.standard_normal((layers, 2, tokens, HEADS, WIDTH)).astype(np.float32)
    for layer in range(layers):
        store.append(layer, *rows[layer])
    return store, rows


def queries(rng, tokens):
    return rng.standard_normal((tokens, HEADS * GROUP, WIDTH)).astype(np.float32)


def weights(q, keys, end):
    """(H, group, T, n) in float64, of queries (T, Hq, D) that end at token `end` - 1 of keys (n, H, D)."""
    q = q.astype(np.float64).reshape(len(q), HEADS, GROUP, WIDTH)
    scores = np.einsum("thgd,nhd->hgtn", q, keys.astype(np.float64)) / np.sqrt(WIDTH)
    seen = np.arange(len(keys)) <= (end - len(q) + np.arange(len(q)))[:, None]
    e = np.where(seen, np.exp(scores), 0)
    return e / e.sum(axis=-1, keepdims=True)


def top(scores, count):
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :count], axis=-1)


def test_h2o(rng):
    """Each head's own sums over all queries so far; of those but the newest, the least is dropped in each step."""
    store, _ = made(rng, 0)
    method, k_all = methods.H2O(store, 0, 10, 4), []
    held = [np.zeros(0, int)] * HEADS
    sums = np.zeros((HEADS, 40))
    for tokens in (14, 1, 1, 3):
        q, (k, v) = queries(rng, tokens), rng.standard_normal((2, tokens, HEADS, WIDTH)).astype(np.float32)
        method.extend(q, k, v)
        first = len(np.concatenate([*k_all, k[:0]]))
        k_all.append(k)
        keys = np.concatenate(k_all)
        for h in range(HEADS):
            held[h] = np.concatenate([held[h], np.arange(first, first + tokens)])
            w = weights(q, keys[held[h]], len(held[h]))[h]
            sums[h, held[h]] += w.sum(axis=(0, 1))
            if len(held[h]) > 10:
                older, newest = held[h][:-4], held[h][-4:]
                held[h] = np.concatenate([older[top(sums[h, older], 6)], newest])
        np.testing.assert_array_equal(store.positions(0)[0], np.stack(held))


def test_tova(rng):
    store, rows = made(rng, 30)
    q = queries(rng, 1)
    methods.tova(store, 0, q, 12)
    scores = weights(q, rows[0, 0], 30).sum(axis=(1, 2)).mean(axis=0)
    np.testing.assert_array_equal(store.positions(0)[0], np.tile(top(scores, 12), (HEADS, 1)))


def window_scores(q, keys, pool):
    sums = weights(q, keys, len(keys)).sum(axis=(1, 2))
    padded = np.pad(sums, ((0, 0), (pool // 2, pool // 2)))
    return np.stack([padded[:, i : i + sums.shape[1]] for i in range(pool)]).mean(axis=0)


def test_snapkv(rng):
    store, rows = made(rng, 40)
    q = queries(rng, 6)
    methods.snapkv(store, 0, q, 16)
    scores = window_scores(q, rows[0, 0], 5)
    want = np.concatenate([top(scores[:, :34], 10), np.tile(np.arange(34, 40), (HEADS, 1))], axis=1)
    np.testing.assert_array_equal(store.positions(0)[0], want)


def test_adakv(rng):
    store, rows = made(rng, 40)
    q = queries(rng, 6)
    q[:, :GROUP] *= 5  # the first head looks at few tokens
    methods.adakv(store, 0, q, 16, safe=0.2)
    scores = window_scores(q, rows[0, 0], 5)[:, :34]
    mask = np.zeros((HEADS, 34), bool)
    np.put_along_axis(mask, top(scores, 2), True, axis=1)  # a fifth of 10
    rest = np.where(mask, -1, scores).ravel()
    mask.ravel()[top(rest, 2 * 10 - 4)] = True
    for h in range(HEADS):
        at = store.positions(0)[0, h]
        np.testing.assert_array_equal(at[at >= 0], [*np.flatnonzero(mask[h]), *range(34, 40)])


def test_pyramidkv():
    """An arithmetic sequence whose mean is the budget, and whose last number is the mean divided by beta."""
    numbers = methods.pyramidkv(8, 72, recent=8, beta=16)
    assert numbers[-1] == 8 + 64 / 16
    assert numbers[0] == 8 + 2 * 64 - 4
    assert np.mean(numbers) == pytest.approx(72, abs=0.5)
    assert np.ptp(np.diff(numbers)) <= 1


def test_kvzip(rng):
    """The greatest weight over the repeated text's queries and a group's heads; the text's own keys take their part."""
    store, rows = made(rng, 20, layers=2)
    replayed = [(queries(rng, 20), *rng.standard_normal((2, 20, HEADS, WIDTH)).astype(np.float32)) for _ in range(2)]
    scores = methods.kvzip(store, dict(enumerate(replayed)), 0.5, least=3)
    keys = [np.concatenate([rows[i, 0], k]) for i, (_, k, _) in enumerate(replayed)]
    want = np.stack([weights(replayed[i][0], keys[i], 40)[..., :20].max(axis=(1, 2)) for i in range(2)])
    np.testing.assert_allclose(np.stack(scores)[:, 0], want, atol=1e-6)
    held = [np.broadcast_to(store.held(i), (1, HEADS)) for i in range(2)]
    assert np.sum(held) == 40
    assert np.min(held) >= 3
    assert store.length == 20


def test_expected_attention(rng):
    """Of normally distributed queries, the mean over later positions, as kvpress computes it; sinks stay."""
    store, rows = made(rng, 30)
    q = (rng.standard_normal((30, HEADS * GROUP, WIDTH)) + rng.standard_normal(WIDTH)).astype(np.float32)
    angles = np.arange(30, 50)[:, None] / 100 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
    scores = methods.expected_attention(store, 0, q, np.cos(angles), np.sin(angles), 12)[0]
    half = WIDTH // 2
    turns = np.zeros((20, WIDTH, WIDTH))
    for i in range(half):
        turns[:, i, i] = turns[:, half + i, half + i] = np.cos(angles[:, i])
        turns[:, i, half + i], turns[:, half + i, i] = -np.sin(angles[:, i]), np.sin(angles[:, i])
    turn = turns.mean(axis=0)
    want = np.zeros((HEADS, 26))
    for h in range(HEADS * GROUP):
        x = q[4:, h].astype(np.float64)
        mean, covariance = turn @ x.mean(axis=0), turn @ np.cov(x.T, bias=True) @ turn.T
        keys = rows[0, 0, 4:, h // GROUP].astype(np.float64)
        e = np.exp(keys @ mean / np.sqrt(WIDTH) + np.diag(keys @ covariance @ keys.T) / (2 * WIDTH))
        want[h // GROUP] += e / e.sum() / GROUP
    want *= np.linalg.norm(rows[0, 1, 4:].astype(np.float64), axis=-1).T
    np.testing.assert_allclose(scores[:, 4:], want, rtol=1e-5)
    sinks = np.tile(np.arange(4), (HEADS, 1))
    np.testing.assert_array_equal(store.positions(0)[0], np.concatenate([sinks, 4 + top(want, 8)], axis=1))


def test_cam(rng):
    """V of a dropped token over the size of its window is added to the kept tokens after it; keys do not change."""
    store, rows = made(rng, 24)
    sums = rng.random((1, HEADS, 24)).astype(np.float32)
    keep = np.sort(np.argsort(-sums, axis=-1)[..., :9], axis=-1)
    methods.cam(store, 0, sums, keep, 3, np.random.default_rng(5))
    draws, merged = np.random.default_rng(5), 0
    for h in range(HEADS):
        values = rows[0, 1, :, h].astype(np.float64)
        for j in range(24):
            after = [i for i in keep[0, h] if i > j][:3]
            if j in keep[0, h] or not after:
                continue
            probability = min(1, sums[0, h, j] / np.mean([sums[0, h, i] for i in after]))
            if draws.random() < probability:
                merged += 1
                for i in after:
                    values[i] += rows[0, 1, j, h].astype(np.float64) / len(after)
        k, v = (np.asarray(a)[0, h] for a in store.tokens(0))
        np.testing.assert_array_equal(k, rows[0, 0, keep[0, h], h])
        np.testing.assert_allclose(v, values[keep[0, h]], atol=1e-6)
    assert 3 < merged < 27


def test_heads_that_stream():
    scores = np.array([[0.9, 0.1, 0.5], [0.2, 0.8, 0.3]])
    np.testing.assert_array_equal(methods.streaming_heads(scores, 0.5), [[True, False, True], [False, True, False]])
    assert methods.streaming_heads(scores, 0).all()


def both_ways(q, keys, values):
    """Attention of all queries to all keys, in float64."""
    w = np.exp(np.einsum("thgd,nhd->hgtn", q.astype(np.float64).reshape(len(q), HEADS, GROUP, -1), keys) / 4)
    out = np.einsum("hgtn,nhd->thgd", w / w.sum(axis=-1, keepdims=True), values.astype(np.float64))
    return out.reshape(len(q), HEADS * GROUP, -1)


def test_block_cache(rng):
    """Two blocks of 5 after a prompt of 8; the first step of each computes everything, two others the block alone."""
    store, _ = made(rng, 0, layers=2)
    cache, held = methods.BlockCache(store, 8), {}
    for block in range(2):
        cache.begin(5)
        end = 8 + 5 * (block + 1)
        for step in range(3):
            for layer in range(2):
                tokens = 5 if step else end
                q, (k, v) = queries(rng, tokens), rng.standard_normal((2, tokens, HEADS, WIDTH)).astype(np.float32)
                out = cache.attend(layer, q, k, v)
                before = held.get(layer, (k[:0], v[:0])) if step else (k[:0], v[:0])
                held[layer] = tuple(np.concatenate([a[: end - tokens], b]) for a, b in zip(before, (k, v), strict=True))
                np.testing.assert_allclose(out, both_ways(q, *held[layer]), atol=1e-5)
    assert store.length == 18
