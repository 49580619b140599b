"""Prefill: many tokens, K and V, from token-major rows into head-major caches. Bandwidth is the question."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline

BF16 = ml_dtypes.bfloat16
CASES = {
    "float32": (np.float32, np.float32),
    "float16": (np.float16, np.float16),
    "bfloat16": (BF16, BF16),
    "float32 to float16": (np.float32, np.float16),
    "float32 to bfloat16": (np.float32, BF16),
    "bfloat16 to float32": (BF16, np.float32),
}


def by_tikv(k, v, k_cache, v_cache, position):
    return lambda: tikv.copy_kv(k, v, k_cache, v_cache, position=position)


def by_numpy(k, v, k_cache, v_cache, position):
    places = slice(position, position + k.shape[0])

    def run():
        k_cache[:, places] = k.swapaxes(0, 1)
        v_cache[:, places] = v.swapaxes(0, 1)

    return run


def by_torch(k, v, k_cache, v_cache, position):
    places = slice(position, position + k.shape[0])

    def run():
        k_cache[:, places].copy_(k.transpose(0, 1))
        v_cache[:, places].copy_(v.transpose(0, 1))

    return run


PEERS = {"tikv": by_tikv, "torch": by_torch, "numpy": by_numpy}


@pytest.mark.parametrize("peer", PEERS, indirect=True)
@pytest.mark.parametrize("case", CASES)
def bench_prefill(arch, rng, peer, case, sizes, smoke, timed):
    src_dtype, cache_dtype = (np.dtype(dtype) for dtype in CASES[case])
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    tokens, position = sizes.prefill, 3
    # Ordinary values: subnormals and NaN would slow some peers' conversions down.
    rows = [(rng.random((tokens, heads, width), np.float32) - np.float32(0.5)).astype(src_dtype) for _ in "kv"]
    before = [oracle.random_bits(rng, (heads, tokens + 8, width), cache_dtype) for _ in "kv"]
    place = oracle.to_torch if peer == "torch" else oracle.place
    caches = [place(cache.copy(), arch) for cache in before]
    call = PEERS[peer](*(place(src, arch) for src in rows), *caches, position)

    call()
    for name, src, old, cache in zip("kv", rows, before, caches, strict=True):
        oracle.assert_same_bits(cache, reference.copy(src, old, position=position), what=f"{peer}: {name}")

    stored = (dtypes.parse(src_dtype, "bench"), dtypes.parse(cache_dtype, "bench"))
    moved = roofline.bytes_moved(tokens, heads, width, *stored)
    timed(call, op="copy_kv", peer=peer, case=case, bytes_moved=moved)
