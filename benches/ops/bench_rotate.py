"""`rotate` of half a gibibyte of keys, all to new positions, as after a compaction."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline


@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
def bench_rotate(arch, rng, peer, smoke, timed):
    """What is read and written is counted, not the tables; positions come from the host in each of four calls."""
    heads, width, layers = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    rows = 16 if smoke else 8192
    before = rng.standard_normal((layers, heads, rows, width), np.float32).astype(np.float16)
    freq = 1e4 ** -(np.arange(width // 2) / (width // 2))
    rope, old, new = tikv.Rope(freq), np.arange(rows) * 2 + 1, np.arange(rows)
    k = oracle.place(before.copy(), arch)
    tikv.rotate(k, old, new, rope)
    some = before[:1, :1]
    want = reference.rotate(some, np.broadcast_to(new - old, some.shape[:3]), freq)
    oracle.assert_same_bits(oracle.to_numpy(k)[:1, :1], want.astype(np.float16))
    moved = roofline.bytes_moved(rows * layers, heads, width, *[dtypes.float16] * 2, streams=1)
    timed(
        lambda: tikv.rotate(k, old, new, rope),
        op="rotate",
        peer=peer,
        case=f"{layers} layers, {rows} rows, float16",
        bytes_moved=moved,
        calls=4,
        rounds=5,
    )
