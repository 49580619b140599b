"""Arrays of the host on a GPU: how often they are copied, which costs a wait for the device each time."""

import numpy as np
import pytest

import tikv
from tikv.ops import staging

pytestmark = pytest.mark.archs("vulkan", "metal")


@pytest.fixture
def copies(monkeypatch):
    """The names of the copies to the device and back, as they are done."""
    done = []

    def counted(name, original):
        def copy(*arguments):
            done.append(name)
            return original(*arguments)

        return copy

    for name in ("write_host", "read_host"):
        monkeypatch.setattr(staging, name, counted(name, getattr(staging, name)))
    return done


def rows(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


def test_a_call_copies_what_it_reads_and_what_it_writes_once_each(arch, rng, copies):
    """However many arrays there are, and whatever addresses they have."""
    k, v = (rows(rng, 2, 3, 8) for _ in "kv")
    memory = rows(rng, 3 * 5 * 8 + 1)
    caches = [memory[1:].reshape(3, 5, 8), rows(rng, 3, 5, 8)]
    want = [cache.copy() for cache in caches]
    for cache, new in zip(want, (k, v), strict=True):
        cache[:, 2:4] = new.swapaxes(0, 1)
    first = memory[0].copy()
    tikv.copy_kv(k, v, *caches, position=2)
    assert copies == ["write_host", "write_host", "read_host"]
    assert memory[0] == first
    for cache, expected in zip(caches, want, strict=True):
        np.testing.assert_array_equal(cache, expected)


def test_large_arrays_are_copied_one_by_one(arch, rng, copies, monkeypatch):
    monkeypatch.setattr(staging, "MOST_TOGETHER", 200)
    k, v, *caches = (rows(rng, 2, 3, 8) for _ in range(4))
    tikv.copy_kv(k, v, *caches, position=0, cache_layout="token_major")
    assert sorted(copies) == ["read_host"] * 2 + ["write_host"] * 4
    np.testing.assert_array_equal(caches[0], k)
    np.testing.assert_array_equal(caches[1], v)


def test_a_store_copies_no_memory_of_the_device(arch, rng, copies):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=6, dtype="float16")
    k, v = (rows(rng, 1, 2, 8) for _ in "kv")
    store.append(0, k, v)
    assert copies == ["write_host"], "the rows, and nothing of the store's"
    copies.clear()
    other = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=6, dtype="float16")
    other.append(0, *(array for array in store.tokens(0)), layout="head_major")
    assert copies == []
    store.attend(0, store.keys(0).copy_to_host()[:, :, 0])
    assert copies == ["write_host", "write_host", "read_host"], "the query, and the result, which is the host's"
    np.testing.assert_array_equal(other.tokens(0)[0].copy_to_host()[0, :, 0], k[0])
