"""Decode attention over stores of 4 bits: keys by channel, with the newest in float16, or groups along rows."""

import numpy as np
import oracle
import pytest

import tikv


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("axis", ["tokens", "head_dim"])
def bench_attend_over_groups(arch, rng, axis, group, smoke, timed):
    heads, tokens, width = (2, 128, 64) if smoke else (8, 8192, 128)
    quant, form = tikv.Quant(4, 64, axis, 64 if axis == "tokens" else 0), {"capacity": tokens}
    form |= {"num_layers": 1, "num_kv_heads": heads, "head_dim": width}
    store = tikv.KVCacheStore(**form, dtype=quant, v_dtype=tikv.Quant(4, 64))
    k, v = (oracle.place(rng.standard_normal((tokens, heads, width), np.float32), arch) for _ in "kv")
    store.append(0, k, v)
    q = rng.standard_normal((1, heads * group, width), np.float32)
    placed = oracle.place(q, arch)
    keys, values = (np.repeat(oracle.to_numpy(a)[0], group, axis=0) for a in store.tokens(0))
    scores = np.einsum("hd,htd->ht", q[0], keys, dtype=np.float64) * width**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = np.einsum("ht,htd->hd", weights / weights.sum(axis=-1, keepdims=True), values, dtype=np.float64)
    np.testing.assert_allclose(oracle.to_numpy(store.attend(0, placed))[0], want, rtol=0, atol=3e-5)
    case = f"4 bits along {axis}, {group} query head{'s' if group > 1 else ''}, {tokens:,}"
    timed(lambda: store.attend(0, placed), op="KVCacheStore.attend", peer="tikv", case=case, bytes_moved=store.nbytes)
