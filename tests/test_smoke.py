"""The outside behaviour in a second: what runs first, on every Python and every back end."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference


@pytest.mark.parametrize(
    ("src_dtype", "cache_dtype"),
    [(np.float32, np.float32), (np.float32, np.float16), (ml_dtypes.bfloat16, ml_dtypes.bfloat16)],
    ids=["f32", "f32_f16", "bf16"],
)
@pytest.mark.parametrize("window", [None, 6], ids=["linear", "ring"])
def test_copy_kv(arch, rng, src_dtype, cache_dtype, window):
    position = 2 if window is None else 9
    rows = [oracle.numbers(rng, (4, 2, 8), src_dtype) for _ in "kv"]
    before = [oracle.random_bits(rng, (2, 6, 8), cache_dtype) for _ in "kv"]
    caches = [oracle.place(cache.copy(), arch) for cache in before]
    tikv.copy_kv(*(oracle.place(src, arch) for src in rows), *caches, position=position, window=window)
    for name, src, old, cache in zip("kv", rows, before, caches, strict=True):
        oracle.assert_same_bits(cache, reference.copy(src, old, position=position, window=window), what=name)


def test_a_store_gives_back_what_it_was_given(arch, rng):
    k, v = (oracle.numbers(rng, (5, 2, 8), np.float32) for _ in "kv")
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=6, dtype="float32")
    store.append(0, oracle.place(k[:4], arch), oracle.place(v[:4], arch))
    store.append(0, oracle.place(k[4:], arch), oracle.place(v[4:], arch))
    for name, kept, given in zip("kv", store.tokens(0), (k, v), strict=True):
        oracle.assert_same_bits(oracle.to_numpy(kept)[0], given.swapaxes(0, 1), what=name)
    assert store.length == 5
    with pytest.raises(tikv.CapacityError, match="capacity"):
        store.append(0, oracle.place(k[:2], arch), oracle.place(v[:2], arch))
    assert store.length == 5


def test_a_refusal_writes_nothing(arch, rng):
    src = oracle.random_bits(rng, (4, 2, 8), np.float32)
    before = oracle.random_bits(rng, (2, 6, 8), np.float32)
    cache = oracle.place(before.copy(), arch)
    with pytest.raises(tikv.TikvError):
        tikv.copy(oracle.place(src, arch), cache, position=3)
    oracle.assert_same_bits(cache, before)
