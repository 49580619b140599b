"""`compact` of half of a model's cache: all layers at once, each head its own rows, beside torch's gather."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline

# Which half: any rows of each head, blocks of 16 rows of it, or the newest rows of all.
HALVES = ("any rows", "runs of 16", "the newest")


def half(rng, which, shape):
    """Ascending indices of half of the rows, (layers, heads, rows / 2)."""
    rows = shape[2]
    run = min({"any rows": 1, "runs of 16": 16, "the newest": rows // 2}[which], rows // 2)
    order = rng.random((*shape[:2], rows // run)).argsort(axis=-1)[..., : rows // run // 2]
    if which == "the newest":
        order = np.ones_like(order)
    found = np.sort(order, axis=-1)[..., None] * run + np.arange(run)
    return found.reshape(*shape[:2], -1).astype(np.int32)


@pytest.mark.parametrize("which", HALVES)
@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
def bench_compact(arch, rng, peer, which, smoke, timed):
    """In place by tikv; torch can only make a new array. On a GPU the indices lie on the device."""
    heads, width, layers = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    shape = (layers, heads, 64 if smoke else 8192)
    before = rng.random((*shape, width), np.float32).astype(np.float16)
    keep = half(rng, which, shape)
    if peer == "tikv":
        cache, index = oracle.place(before.copy(), arch), oracle.place(keep, arch)

        def call():
            return tikv.compact(cache, index)
    else:
        cache, index = oracle.to_torch(before.copy(), arch), oracle.to_torch(keep.astype(np.int64), arch)
        index = index[..., None].expand(*keep.shape, width)

        def call():
            return cache.gather(2, index)

    want = reference.compact(before, keep)[:, :, : keep.shape[2]]
    oracle.assert_same_bits(oracle.to_numpy(call())[:, :, : keep.shape[2]], want)
    moved = roofline.bytes_moved(keep[0, 0].size * layers, heads, width, *[dtypes.float16] * 2, streams=1)
    case = f"{layers} layers, {shape[2]} rows, half: {which}"
    calls, rounds = (1, 5) if arch == "cpu" else (8, 7)
    timed(call, op="compact", peer=peer, case=case, bytes_moved=moved, calls=calls, rounds=rounds)
