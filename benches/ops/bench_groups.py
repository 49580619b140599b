"""Attention over formats with groups, in place, beside dequantising everything for torch, and beside float16."""

import numpy as np
import oracle
import pytest

import tikv


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("stored", ["float16", "quant8_64", "quant4_64", "q8_0", "q4_0"])
def bench_decode_over_codes(arch, rng, peer, stored, group, smoke, timed):
    if peer == "torch" and stored == "float16":
        pytest.skip("benches/ops/bench_attention.py has torch over float16")
    batch, heads, tokens, width = (2, 1, 64, 64) if smoke else (8, 8, 4096, 128)
    k, v = (rng.standard_normal((batch, heads, tokens, width), np.float32).astype(np.float16) for _ in "kv")
    caches = [
        oracle.place(a, arch) if stored == "float16" else tikv.quantize(oracle.place(a, arch), stored) for a in (k, v)
    ]
    numbers = [k, v] if stored == "float16" else [oracle.to_numpy(tikv.dequantize(a)) for a in caches]
    q = rng.standard_normal((batch, heads * group, width), np.float32)
    lens = np.full(batch, tokens, np.int32)
    if peer == "tikv":
        placed = oracle.place(q, arch)

        def call():
            return tikv.decode_attention(placed, *caches, lens, impl="taichi")
    else:
        import torch

        placed = oracle.to_torch(q, arch)[:, :, None]
        wide = [oracle.to_torch(np.empty(a.shape, np.float32), arch) for a in (k, v)]

        def call():
            for a, to in zip(caches, wide, strict=True):
                tikv.dequantize(a, out=to)
            return torch.nn.functional.scaled_dot_product_attention(placed, *wide, enable_gqa=group > 1)[:, :, 0]

    scores = np.einsum("bhgd,bhtd->bhgt", q.reshape(batch, heads, group, width), numbers[0], dtype=np.float64)
    weights = np.exp((scores - scores.max(axis=-1, keepdims=True)) * width**-0.5)
    weights /= weights.sum(axis=-1, keepdims=True)
    want = np.einsum("bhgt,bhtd->bhgd", weights, numbers[1], dtype=np.float64).reshape(q.shape)
    np.testing.assert_allclose(oracle.to_numpy(call()), want, rtol=0, atol=2e-5)
    nbytes = k.nbytes + v.nbytes if stored == "float16" else sum(a.nbytes for a in caches)
    case = f"{stored}, {group} query head{'s' if group > 1 else ''}, {batch} x {tokens:,}"
    timed(call, op="decode_attention", peer=peer, case=case, bytes_moved=nbytes)
