"""Decode over KV heads of different lengths beside heads that all have the mean length, and with the mass of each key.

After a compaction that keeps half of the tokens on average, heads hold from 10 to 90 %. Attention reads as much as if
each held half, and should take at most 1.1 times as long. With the mass of each key it reads K a second time, and
should take at most 1.5 times as long as without.
"""

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference, runtime
from tikv.stores.layers.counts import HeadLengths

PAGE, WIDTH, GROUP = 16, 128, 4
BATCHES = {"cuda": 32, "cpu": 8}
SPREADS = ("even", "10 to 90 %")


class Work:
    """Keys, values and queries of float16, as many of each head as `spread` says."""

    def __init__(self, arch, rng, smoke, spread):
        self.arch = arch
        batch, heads, capacity = (1, 4, 64) if smoke else (BATCHES.get(arch, 1), 8, 8192)
        shares = np.full(heads, 0.5) if spread == "even" else np.linspace(0.1, 0.9, heads)
        self.lens = rng.permuted(np.tile(np.rint(shares * capacity).astype(np.int32), (batch, 1)), axis=1)
        few = rng.standard_normal((heads, 64, WIDTH)).astype(np.float16)
        # Rows repeat every 64 tokens: what is timed does not depend on the values, and making them is quick.
        tiled = np.tile(few, (1, capacity // 64, 1))
        self.k = np.array(np.broadcast_to(tiled, (batch, heads, capacity, WIDTH)), order="C")
        self.v = np.ascontiguousarray(self.k[:, :, ::-1])
        self.q = rng.standard_normal((batch, heads * GROUP, WIDTH)).astype(np.float16)
        self.row_bytes = 2 * WIDTH * 2  # of K and V
        self.case = f"{batch} x {heads} heads, {capacity // 2} tokens on average, {GROUP} query heads per KV head"

    def check(self, out):
        """Fail unless the result of the first sequence is right."""
        got = oracle.to_numpy(out)[0].astype(np.float64)
        for h in range(len(got)):
            n = self.lens[0, h // GROUP]
            keys, values = (a[0, h // GROUP, :n].astype(np.float64) for a in (self.k, self.v))
            want, _ = reference.attention(self.q[0, h], keys, values, scale=WIDTH**-0.5)
            assert np.abs(got[h] - want).max() < 0.02

    def put(self, *arrays):
        return [oracle.place(a, self.arch) for a in arrays]

    def pages(self, rng):
        """K and V in pages of one head each, and their block tables."""
        batch, heads, capacity, _ = self.k.shape
        blocks = -(-self.lens // PAGE)
        order = rng.permutation(int(blocks.sum())).astype(np.int32)
        table = np.full((batch, heads, capacity // PAGE), -1, np.int32)
        pools = [np.empty((len(order), PAGE, 1, WIDTH), np.float16) for _ in "kv"]
        first = 0
        for b, h in np.ndindex(batch, heads):
            n = blocks[b, h]
            table[b, h, :n] = order[first : first + n]
            for pool, rows in zip(pools, (self.k, self.v), strict=True):
                pool[order[first : first + n]] = rows[b, h, : n * PAGE].reshape(n, PAGE, 1, WIDTH)
            first += n
        return *pools, table


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("place", ["contiguous", "pages of one head"])
def bench_decode_after_compaction(arch, rng, smoke, place, spread, timed):
    """The rows of a place differ by how the same number of keys is spread over heads."""
    work = Work(arch, rng, smoke, spread)
    lens = HeadLengths(runtime.current(), work.lens).array  # on the device and known to the host, as those of a store
    if place == "contiguous":
        arrays = work.put(work.q, work.k, work.v)

        def call():
            return tikv.decode_attention(*arrays, lens)
    else:
        arrays = work.put(work.q, *work.pages(rng))

        def call():
            return tikv.paged_decode_attention(*arrays, lens)

    work.check(call())
    case = f"{place}, {work.case}, {spread}"
    moved = int(work.lens.sum()) * work.row_bytes
    timed(call, op="decode_attention", peer="tikv", case=case, bytes_moved=moved, rounds=7)


@pytest.mark.parametrize("mass", [False, True])
def bench_mass(arch, rng, smoke, mass, timed):
    """The rate counts K and V; with the mass K is read once more."""
    work = Work(arch, rng, smoke, "even")
    arrays = work.put(work.q, work.k, work.v)
    lens = int(work.lens[0, 0])

    def call():
        return tikv.decode_attention(*arrays, lens, return_mass=mass, impl="taichi")

    found = call()
    work.check(found[0] if mass else found)
    if mass:
        total = oracle.to_numpy(found[1]).sum(axis=-1)
        np.testing.assert_allclose(total, GROUP, rtol=1e-3)
    case = f"contiguous, {work.case}{', with the mass' if mass else ''}"
    moved = int(work.lens.sum()) * work.row_bytes
    timed(call, op="decode_attention", peer="tikv", case=case, bytes_moved=moved, rounds=7)
