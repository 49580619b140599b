"""A decode step of several sequences over pages. Most of the time is the host's part of `extend`.

The caches are short and the heads few, so that the launches take little: checks, tables, plans and views are the rest.
"""

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

HEADS, QUERY_HEADS, WIDTH, PAGE = 2, 4, 16, 16


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared tables", "tables by head"])
def bench_pool_extend_one_token(arch, rng, sequences, per_head, sizes, timed):
    blocks = 4 * sequences * (HEADS if per_head else 1)
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": blocks, "block_size": PAGE}
    pool = tikv.PagedKVCacheStore(**form, dtype="float32", per_head=per_head)
    q = rng.standard_normal((sequences, QUERY_HEADS, WIDTH)).astype(np.float32)
    k, v = rng.standard_normal((2, sequences, HEADS, WIDTH)).astype(np.float32)
    rows = [oracle.place(a, arch) for a in (q, k, v)]
    seqs = [pool.add() for _ in range(sequences)]
    most = blocks // sequences // (HEADS if per_head else 1) * PAGE

    def call():
        if pool.length(seqs[0]) == most:
            for seq in seqs:
                pool.truncate(seq, 0)
        return pool.extend(0, *rows, seqs)

    call()
    got = oracle.to_numpy(call())  # the same token twice: each query sees its own key, two times
    for i, h in np.ndindex(sequences, QUERY_HEADS):
        kv = h // (QUERY_HEADS // HEADS)
        keys, values = (np.repeat(a[i, kv][None], 2, axis=0).astype(np.float64) for a in (k, v))
        want, _ = reference.attention(q[i, h], keys, values, scale=WIDTH**-0.5)
        np.testing.assert_allclose(got[i, h], want, rtol=1e-5, atol=1e-5)
    kind = "by head" if per_head else "shared"
    moved = 2 * k.nbytes + 2 * v.nbytes  # by the append alone
    case = f"{sequences} x 1 token, {kind}"
    timed(call, op="pool.extend", peer="tikv", case=case, bytes_moved=moved, calls=sizes.calls)
