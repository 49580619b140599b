"""The fused QKV write beside its steps: the transform of Q and of K, then the writes. 4 query heads per KV head."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import reference
from tikv.ops import write_qkv

GROUP = 4  # query heads a KV head


@pytest.mark.parametrize("peer", ["tikv", "steps"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 32, 128, 2048])
def bench_write_qkv(arch, rng, peer, dtype, tokens, sizes, smoke, timed):
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    dtype, position, q_heads = np.dtype(dtype), 7, GROUP * heads
    rows = oracle.numbers(rng, (tokens, (q_heads + 2 * heads) * width), dtype)
    angle = rng.uniform(-3, 3, (tokens + position, width // 2))
    tables = {name: oracle.place(f(angle).astype(np.float32), arch) for name, f in (("cos", np.cos), ("sin", np.sin))}
    weights = {name: oracle.place(oracle.numbers(rng, (width,), np.float32), arch) for name in ("q_weight", "k_weight")}
    how = tikv.NormRope(mode="norm_half", **tables, **weights)
    before = [oracle.random_bits(rng, (heads, tokens + 8, width), dtype) for _ in "kv"]
    caches = [oracle.place(cache.copy(), arch) for cache in before]
    fused = oracle.place(rows, arch)
    out = oracle.place(np.empty((tokens, q_heads, width), dtype), arch)
    parts = oracle.place(rows, arch).reshape(tokens, q_heads + 2 * heads, width)
    q, k, v = parts[:, :q_heads], parts[:, q_heads : q_heads + heads], parts[:, q_heads + heads :]
    wide = [oracle.place(np.empty((tokens, n, width), np.float32), arch) for n in (q_heads, heads)]

    def by_steps():
        # Each step rounds once, into float32; the copies round to the storage type.
        write_qkv.norm_rope(q, how, position=position, out=wide[0])
        write_qkv.norm_rope(k, how, position=position, weight="k", out=wide[1])
        tikv.copy(wide[0], out, position=0, cache_layout="token_major")
        tikv.copy(wide[1], caches[0], position=position)
        tikv.copy(v, caches[1], position=position)

    def by_tikv():
        tikv.write_qkv(fused, *caches, num_q_heads=q_heads, norm_rope=how, position=position, out=out)

    # The check of one is that both give the same bits.
    by_steps()
    want = [oracle.to_numpy(a).copy() for a in (out, *caches)]
    for cache, old in zip(caches, before, strict=True):
        cache[...] = oracle.place(old, arch)
    by_tikv()
    for name, got, expected in zip(("q", "k", "v"), (out, *caches), want, strict=True):
        oracle.assert_same_bits(got, expected, what=name)
    _, _, new_v = reference.split_qkv(rows, q_heads, heads)
    oracle.assert_same_bits(caches[1], reference.copy(new_v, before[1], position=position), what="v")
    call = by_tikv if peer == "tikv" else by_steps
    case = f"norm and RoPE, {tokens} token{'s' * (tokens > 1)}, {dtype}"
    calls = max(1 if arch == "cpu" else 10, sizes.calls // (4 * tokens))
    timed(call, op="write_qkv", peer=peer, case=case, bytes_moved=2 * rows.nbytes, calls=calls)
