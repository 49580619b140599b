"""Ragged appends: a batch whose sequences have different lengths, K and V, into head-major caches."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline


class Batch:
    """New rows, caches and offsets of a batch, placed for a peer."""

    def __init__(self, arch, rng, peer, heads, width, sequences, new, capacity):
        shape = (sequences, heads, new, width)
        self.rows = [(rng.random(shape, np.float32) - np.float32(0.5)).astype(np.float16) for _ in "kv"]
        self.before = [oracle.random_bits(rng, (sequences, heads, capacity, width), np.float16) for _ in "kv"]
        self.offsets = rng.integers(0, capacity - new + 1, sequences)
        place = oracle.to_torch if peer == "torch" else oracle.place
        self.new = [place(a, arch) for a in self.rows]
        self.caches = [place(a.copy(), arch) for a in self.before]
        self.places = place(self.offsets, arch)
        self.peer = peer

    def check(self):
        for name, new, old, cache in zip("kv", self.rows, self.before, self.caches, strict=True):
            want = reference.append_ragged(new, old, self.offsets)
            oracle.assert_same_bits(cache, want, what=f"{self.peer}: {name}")

    def by_advanced_indices(self):
        """The assignment that torch and NumPy users write; the indices are made beforehand."""
        sequences, _, new, _ = self.rows[0].shape
        if self.peer == "torch":
            import torch

            rows = torch.arange(sequences, device=self.places.device)[:, None]
            slots = self.places[:, None] + torch.arange(new, device=self.places.device)
        else:
            rows, slots = np.arange(sequences)[:, None], self.places[:, None] + np.arange(new)

        def run():
            for new_rows, cache in zip(self.new, self.caches, strict=True):
                cache[rows, :, slots] = new_rows.swapaxes(1, 2)

        return run


@pytest.mark.parametrize("peer", ["tikv", "torch", "numpy"], indirect=True)
def bench_append_ragged(arch, rng, peer, sizes, smoke, timed):
    """On a GPU many calls are in flight, as with the copy for comparison, so the wait for each call is not timed."""
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    scatter = shapes.SMOKE_SCATTER if smoke else shapes.SCATTER
    batch = Batch(arch, rng, peer, heads, width, scatter.sequences, scatter.new, 8 * scatter.new)
    if peer == "tikv":

        def call():
            tikv.append_ragged(*batch.new, *batch.caches, batch.places)
    else:
        call = batch.by_advanced_indices()
    call()
    batch.check()
    moved = roofline.bytes_moved(scatter.sequences * scatter.new, heads, width, dtypes.float16, dtypes.float16)
    case = f"{scatter.sequences} sequences, {scatter.new} rows each, float16"
    calls = None if arch == "cpu" else sizes.calls
    timed(call, op="append_ragged", peer=peer, case=case, bytes_moved=moved, calls=calls)


@pytest.mark.parametrize("peer", ["tikv", "torch", "numpy"], indirect=True)
def bench_plan_one_token(arch, rng, peer, sizes, smoke, timed):
    """A plan's run with bound arrays: what is timed is the call."""
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    batch = Batch(arch, rng, peer, heads, width, 1, 1, sizes.context)
    if peer == "tikv":
        plan = tikv.KVCacheAppendPlan.select(
            tikv.KVCacheAppendDescriptor(
                batch_size=1, num_heads=heads, new_len=1, max_cache_len=sizes.context, d_k=width, d_v=width
            )
        )
        k_new, v_new = batch.new
        k_cache, v_cache = batch.caches
        args = tikv.KVCacheAppendArgs(
            k_new=k_new, v_new=v_new, cache_offsets=batch.places, k_cache=k_cache, v_cache=v_cache
        )

        def call():
            plan.run(args)
    else:
        call = batch.by_advanced_indices()
    call()
    batch.check()
    moved = roofline.bytes_moved(1, heads, width, dtypes.float16, dtypes.float16)
    timed(call, op="KVCacheAppendPlan.run", peer=peer, case="1 token", bytes_moved=moved, calls=sizes.calls)
