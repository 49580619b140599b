"""NaN in what stores hold: what a token's query sees counts, what was trimmed, freed or overwritten does not.

By the float64 oracle over the tokens that were appended, with prompts, steps, rings that wrap and pools.
"""

import itertools

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

HEADS, GROUP, WIDTH = 2, 2, 16
SCALE = WIDTH**-0.5


class Tokens:
    """Queries, keys and values of one sequence, token by token; some of K and V NaN."""

    def __init__(self, rng, count, spoiled=(), dtype=np.float32):
        self.q = rng.standard_normal((count, HEADS * GROUP, WIDTH)).astype(np.float32)
        self.k, self.v = (rng.integers(-8, 9, (count, HEADS, WIDTH)).astype(dtype) / dtype(8) for _ in "kv")
        for side, token in spoiled:
            getattr(self, side)[token, 1, 3] = np.nan

    def rows(self, arch, first, end):
        """(q, k, v) of tokens from first to end, of a batch of one."""
        return [oracle.place(np.ascontiguousarray(a[first:end]), arch) for a in (self.q, self.k, self.v)]

    def check(self, got, first, end, window=None, sinks=0, tolerance=1e-5):
        """(out, lse) of the queries from first to end, each of which sees what came before it."""
        out, lse = (np.asarray(oracle.to_numpy(a), np.float64).reshape(end - first, *shape)
                    for a, shape in zip(got, ((HEADS * GROUP, WIDTH), (HEADS * GROUP,)), strict=True))  # fmt: skip
        for t, h in itertools.product(range(first, end), range(HEADS * GROUP)):
            at = reference.visible_positions(t + 1, 0, window=window, sinks=sinks)
            want = reference.attention(self.q[t, h], self.k[at, h // GROUP], self.v[at, h // GROUP], scale=SCALE)
            for name, a, b in zip(("out", "lse"), (out[t - first, h], lse[t - first, h]), want, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name} of token {t}, head {h}")


SPOILED = [("k", 4), ("v", 7), ("k", 19)]


@pytest.mark.parametrize("prompts", [(9, 1, 12), (22,)])
def test_a_linear_layer(arch, rng, prompts):
    """Prompts in one piece and in several, and steps."""
    tokens = Tokens(rng, 24, SPOILED)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=30, dtype="float32")
    first = 0
    for count in (*prompts, 1, 1):
        got = store.extend(0, *tokens.rows(arch, first, first + count), return_lse=True)
        tokens.check(got, first, first + count)
        first += count


def test_what_was_trimmed_does_not_count(arch, rng):
    """Slots behind the length hold NaN, and newer tokens take some of them."""
    broken = Tokens(rng, 12, [(side, t) for side in "kv" for t in range(6, 12)])
    tokens = Tokens(rng, 9)
    for name in "qkv":
        getattr(tokens, name)[:6] = getattr(broken, name)[:6]
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=30, dtype="float32")
    store.extend(0, *broken.rows(arch, 0, 12))
    store.trim(6)
    tokens.check(store.extend(0, *tokens.rows(arch, 6, 9), return_lse=True), 6, 9)
    store.reset()
    tokens.check(store.extend(0, *tokens.rows(arch, 0, 9), return_lse=True), 0, 9)


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("prompts", [(8, 1, 13, 1), (23,)])
def test_a_ring(arch, rng, sinks, prompts):
    """A prompt that wraps is attended to by parts, which are merged; a NaN leaves with the token that has it."""
    tokens = Tokens(rng, 23, [("k", 4), ("v", 7)])
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=8, window=8, sinks=sinks, dtype="float32"
    )
    first = 0
    for count in prompts:
        got = store.extend(0, *tokens.rows(arch, first, first + count), return_lse=True)
        tokens.check(got, first, first + count, window=8, sinks=sinks)
        first += count
    assert np.isfinite(oracle.to_numpy(got[0])[-1]).all()


def test_a_pool(arch, rng):
    """A sequence that was freed leaves NaN in its blocks, which the next ones take, and fill in part."""
    pool = tikv.PagedKVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=8, block_size=4, dtype="float32"
    )
    old = pool.add()
    broken = Tokens(rng, 30, [(side, t) for side in "kv" for t in range(30)])
    pool.extend(0, *broken.rows(arch, 0, 30), [old], np.array([0, 30]))
    pool.free(old)
    both = [pool.add(), pool.add()]
    texts = [Tokens(rng, 11, [("v", 5), ("k", 9)]), Tokens(rng, 14)]
    first = [0, 0]
    for counts in ((6, 9), (1, 1), (4, 4)):
        ends = [a + n for a, n in zip(first, counts, strict=True)]
        rows = [np.concatenate([getattr(t, n)[a:b] for t, a, b in zip(texts, first, ends, strict=True)]) for n in "qkv"]
        got = pool.extend(
            0, *(oracle.place(a, arch) for a in rows), both, np.array([0, counts[0], sum(counts)]), return_lse=True
        )
        out, lse = map(oracle.to_numpy, got)
        texts[0].check((out[: counts[0]], lse[: counts[0]]), first[0], ends[0])
        texts[1].check((out[counts[0] :], lse[counts[0] :]), first[1], ends[1])
        first = ends


def test_groups_of_tokens(arch, rng):
    """Of the newest tokens, which are kept as they came; merged with codes that know no NaN."""
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=32, capacity=128, scale_dtype="float32",
        dtype=tikv.Quant(bits=8, group=32, axis="tokens", residual=32),
    )  # fmt: skip
    q = rng.standard_normal((100, HEADS * GROUP, 32)).astype(np.float32)
    k, v = (rng.standard_normal((100, HEADS, 32)).astype(np.float32) for _ in "kv")
    q[60, 1, 2] = k[99, 1, 3] = np.nan
    v[98, 0, 5] = np.inf
    got = store.extend(0, *(oracle.place(a, arch) for a in (q, k, v)), return_lse=True)
    out, lse = map(oracle.to_numpy, got)
    broken = np.isnan(lse)
    assert np.argwhere(broken).tolist() == [[60, 1], [99, 2], [99, 3]]
    np.testing.assert_array_equal(np.isnan(out).all(-1), broken)
    assert (out[98:, :2, 5] == np.inf).all()
    out[98:, :2, 5] = 0
    assert np.isfinite(out[~broken]).all()


def test_a_graph_and_a_peer(arch, rng):
    """Launches that were recorded, and flash-attention's function."""
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((1, 4, 16), (1, 2, 8, 16), (1, 2, 8, 16)))
    k[:, :, 6:], v[:, :, 6:] = np.nan, np.nan
    builder = tikv.GraphBuilder()
    builder.decode_attention("q", "k", "v", "n", out="out", lse="lse")
    graph = builder.compile()
    for spoiled in (None, "q", "k", "v"):
        arrays = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
        if spoiled == "q":
            arrays["q"][0, 1, 3] = np.nan
        elif spoiled:
            arrays[spoiled][0, 0, 2, 3] = np.nan
        want = [
            reference.attention(arrays["q"][0, h], arrays["k"][0, h // 2, :6], arrays["v"][0, h // 2, :6], scale=SCALE)
            for h in range(4)
        ]
        found = graph.run({**{name: oracle.place(a, arch) for name, a in arrays.items()}, "n": 6})
        np.testing.assert_allclose(oracle.to_numpy(found["out"])[0], [a for a, _ in want], atol=1e-5)
        np.testing.assert_allclose(oracle.to_numpy(found["lse"])[0], [b for _, b in want], atol=1e-5)
        caches = [oracle.place(np.ascontiguousarray(arrays[n].swapaxes(1, 2)), arch) for n in "kv"]
        out = tikv.compat.flash_attn.flash_attn_with_kvcache(
            oracle.place(arrays["q"][:, None], arch), *caches, cache_seqlens=6
        )
        np.testing.assert_allclose(oracle.to_numpy(out)[0, 0], [a for a, _ in want], atol=1e-5)
