"""A decode step of sequences that share a prefix: the shared blocks are read once, or once for each sequence."""

import numpy as np
import oracle
import pytest

import tikv
from tikv.stores.pools import shared_prefix

PAGE, WIDTH, HEADS = 16, 128, 8


@pytest.mark.parametrize("dtype", ["float16", "int8"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("how", ["auto", "off"])
def bench_shared_prefix(arch, rng, dtype, group, how, smoke, timed, monkeypatch):
    sequences, shared, own = (3, 64, 20) if smoke else (16, 8192, 256) if arch == "cpu" else (64, 8192, 256)
    if smoke:
        monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 1)
    blocks = shared // PAGE + sequences * (own // PAGE + 1)
    pool = tikv.PagedKVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=blocks, block_size=PAGE, dtype=dtype
    )
    place = lambda a: oracle.place(a.astype(np.float16), arch)  # noqa: E731
    seqs = [pool.add()]
    pool.append(0, *map(place, rng.standard_normal((2, shared, HEADS, WIDTH))), seqs, [0, shared])
    seqs += [pool.fork(seqs[0]) for _ in range(sequences - 1)]
    rows = rng.standard_normal((2, own * sequences, HEADS, WIDTH))
    pool.append(0, *map(place, rows), seqs, [own * n for n in range(sequences + 1)])
    q = place(rng.standard_normal((sequences, HEADS * group, WIDTH)))
    call = lambda: pool.attend(0, q, seqs, shared_prefix=how)  # noqa: E731
    other = oracle.to_numpy(pool.attend(0, q, seqs, shared_prefix="off"))
    np.testing.assert_allclose(oracle.to_numpy(call()).astype(np.float32), other.astype(np.float32), atol=2e-3)
    attended = (shared + own) * sequences  # the same for both, so that rates compare as times do
    moved = attended * HEADS * WIDTH * 2 * (1 if dtype == "int8" else 2)
    case = f"{sequences} share {shared}, {own} own, {group} query head{'s' * (group > 1)}, {dtype}"
    timed(call, op="pool.attend", peer="tikv" if how == "auto" else "each alone", case=case, bytes_moved=moved, calls=3)
