"""`summarize_pages` of all keys of a cache, and the cost of an append that keeps summaries of pages."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("peer", ["tikv", "numpy"], indirect=True)
@pytest.mark.parametrize("case", list(DTYPES))
def bench_summarize_pages(arch, rng, peer, case, smoke, timed):
    """What is read and written is counted. NumPy takes the least, and then the greatest, of an array (..., 16, D)."""
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    tokens = 64 if smoke else 2**26 // (heads * width * np.dtype(DTYPES[case]).itemsize)
    keys = rng.standard_normal((1, heads, tokens, width), np.float32).astype(DTYPES[case])
    pages = keys.reshape(heads, tokens // 16, 16, width)
    k = oracle.place(keys, arch)
    if peer == "tikv":

        def call():
            return tikv.summarize_pages(k, tokens)
    else:

        def call():
            return pages.min(axis=2)[None], pages.max(axis=2)[None]

    for got, want in zip(call(), reference.summarize_pages(keys[0, 0], tokens, 16), strict=True):
        np.testing.assert_array_equal(oracle.to_numpy(got)[0, 0], want)
    moved = keys.nbytes + keys.nbytes // 8
    timed(call, op="summarize_pages", peer=peer, case=case, bytes_moved=moved, rounds=7)


@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
def bench_append_with_summaries(arch, rng, peer, page, smoke, timed):
    """Single tokens of 8 heads of 128, float16: with summaries each launch reads up to 15 rows of each head."""
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=width, capacity=4096, page_summaries=page)
    k, v = (oracle.place(rng.standard_normal((1, heads, width)).astype(np.float16), arch) for _ in "kv")

    def call():
        if store.length == store.capacity:
            store.reset()
        store.append(0, k, v)

    call()
    oracle.assert_same_bits(oracle.to_numpy(store.tokens(0)[0])[0, :, 0], oracle.to_numpy(k)[0])
    if page is not None:
        oracle.assert_same_bits(oracle.to_numpy(store.page_summaries(0)[0])[0, :, 0], oracle.to_numpy(k)[0])
    case = "no summaries" if page is None else f"pages of {page}"
    timed(call, op="append", peer=peer, case=case, bytes_moved=4 * heads * width * 2, calls=4096)
