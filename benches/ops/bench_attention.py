"""Decode attention against torch's over the same memory: storage, head groups, rings, pages, one long sequence, int8.

A rate is the bytes of K and V that a call reads, divided by its time. Each result is checked first, on the first
sequence.
"""

import math

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

PAGE = 16
CODES = {"float32": np.float32, "float16": np.float16, "int8": np.int8}


class Work:
    """A cache of given bytes, its queries, and how each peer reads it."""

    def __init__(self, arch, rng, smoke, *, dtype, width, group, place="contiguous", batch=None):
        self.arch, self.place, self.group = arch, place, group
        self.terms: dict[str, np.ndarray] = {}  # what is added to the scores
        heads = 2 if smoke else 8
        itemsize = np.dtype(CODES[dtype]).itemsize
        goal = (1 << 30) if arch != "vulkan" else (1 << 26)
        batch = batch or (2 if smoke else 32)
        length = 64 if smoke else 32768 if batch == 1 else goal // (2 * itemsize * width * heads * batch)
        shape = (batch, heads, length, width)
        few = rng.standard_normal((heads, 64, width)).astype(np.float32)
        self.scale = None
        if dtype == "int8":
            few = np.rint(few * 32).clip(-127, 127)
            self.scale = np.full(shape[:3], 1 / 32, np.float16)
        few = few.astype(CODES[dtype])
        # Rows repeat every 64 tokens: what is timed does not depend on the values, and making them is quick.
        self.k = np.array(np.broadcast_to(np.tile(few, (1, length // 64, 1)), shape), order="C")
        self.v = np.ascontiguousarray(self.k[:, :, ::-1])
        q = rng.standard_normal((batch, heads * group, width))
        self.q = q.astype(np.float16 if dtype == "float16" else np.float32)
        self.bytes = self.k.nbytes + self.v.nbytes + (0 if self.scale is None else 2 * self.scale.nbytes)
        grouped = f"{group} query head{'s' * (group > 1)} per KV head"
        self.case = f"{place} {dtype}, {batch} x {length} tokens, {heads} x {width}, {grouped}"
        real = 1.0 if self.scale is None else 1 / 32
        self.want = np.stack(
            [
                reference.attention(
                    self.q[0, h], self.k[0, h // group] * np.float64(real), self.v[0, h // group] * np.float64(real),
                    scale=width**-0.5,
                )[0]
                for h in range(heads * group)
            ]
        )  # fmt: skip
        self.lens = np.full(batch, length, np.int32)
        if place in ("NHD", "HND"):
            self._cut(rng, length)

    def _cut(self, rng, length):
        """The same keys and values in pages of a pool, in random order."""
        batch, heads, _, width = self.k.shape
        blocks = batch * length // PAGE
        self.table = rng.permutation(blocks).astype(np.int32).reshape(batch, -1)
        pools = []
        for rows in (self.k, self.v):
            pages = rows.reshape(batch, heads, -1, PAGE, width).transpose(0, 2, 3, 1, 4).reshape(-1, PAGE, heads, width)
            if self.place == "HND":
                pages = pages.swapaxes(1, 2)
            pool = np.empty(pages.shape, rows.dtype)
            pool[self.table.reshape(-1)] = pages
            pools.append(pool)
        self.k, self.v = pools

    def call(self, peer):
        """The call that is timed; it returns the result."""
        if peer == "torch":
            return self._torch()
        put = lambda a: oracle.place(a, self.arch)  # noqa: E731
        q, k, v, lens = map(put, (self.q, self.k, self.v, self.lens))
        if self.place in ("NHD", "HND"):
            table = put(self.table)
            return lambda: tikv.paged_decode_attention(q, k, v, table, lens, layout=self.place)
        options = {"impl": "taichi", **{name: put(a) for name, a in self.terms.items()}}
        if self.scale is not None:
            scale = put(self.scale)
            options |= {"k_scale": scale, "v_scale": scale}
        if self.place == "ring":
            # Wrapped by whole turns of 64 tokens, so that the rows seen, and the result, are those of the linear cache.
            capacity = self.k.shape[2]
            lens = put(np.full(len(self.lens), 3 * capacity + 64 * (capacity // 128), np.int32))
            options["ring"] = True
        return lambda: tikv.decode_attention(q, k, v, lens, **options)

    def _torch(self):
        """SDPA over a contiguous cache; over pages after a gather, since torch has no other way."""
        import torch

        q, k, v = (oracle.to_torch(a, self.arch) for a in (self.q, self.k, self.v))
        attention = torch.nn.functional.scaled_dot_product_attention
        if self.place not in ("NHD", "HND"):
            return lambda: attention(q[:, :, None], k, v, enable_gqa=True)
        table = oracle.to_torch(self.table.astype(np.int64), self.arch)
        batch, heads, width = len(self.lens), k.shape[1 if self.place == "HND" else 2], k.shape[-1]

        def gather(pool):
            pages = pool[table.reshape(-1)]
            pages = pages.transpose(1, 2) if self.place == "NHD" else pages
            return pages.reshape(batch, -1, heads, PAGE, width).transpose(1, 2).reshape(batch, heads, -1, width)

        return lambda: attention(q[:, :, None], gather(k), gather(v), enable_gqa=True)


def measure(work, peer, timed):
    call = work.call(peer)
    got = oracle.to_numpy(call()).astype(np.float64).reshape(*work.q.shape)[0]
    error = np.abs(got - work.want).max()
    assert error < 0.02 * math.sqrt(np.abs(work.want).max() + 1), f"{peer}: {error}"
    timed(call, op="decode_attention", peer=peer, case=work.case, bytes_moved=work.bytes, rounds=5)


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def bench_attend(arch, rng, smoke, peer, dtype, width, group, timed):
    """Contiguous caches of 1 GiB, and torch over the same arrays."""
    measure(Work(arch, rng, smoke, dtype=dtype, width=width, group=group), peer, timed)


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("group", [1, 4])
def bench_attend_one_sequence(arch, rng, smoke, peer, group, timed):
    """One sequence of 32,768 tokens, which split-K has to spread over the device."""
    measure(Work(arch, rng, smoke, dtype="float16", width=128, group=group, batch=1), peer, timed)


@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("dtype", ["int8"])
def bench_attend_int8(arch, rng, smoke, peer, dtype, group, timed):
    """int8 with its scales; compare the time per token with float16's."""
    measure(Work(arch, rng, smoke, dtype=dtype, width=128, group=group), peer, timed)


@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
@pytest.mark.parametrize("group", [1, 4])
def bench_attend_ring(arch, rng, smoke, peer, group, timed):
    """A ring that has wrapped."""
    measure(Work(arch, rng, smoke, dtype="float16", width=128, group=group, place="ring"), peer, timed)


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("place", ["NHD", "HND"])
@pytest.mark.parametrize("group", [1, 4])
def bench_attend_pages(arch, rng, smoke, peer, place, group, timed):
    """Random pages of 16 slots read in place; torch gathers them first."""
    measure(Work(arch, rng, smoke, dtype="float16", width=128, group=group, place=place), peer, timed)


@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
@pytest.mark.parametrize("term", ["nothing", "sink_logits", "alibi_slopes"])
def bench_attend_with_terms(arch, rng, smoke, peer, term, timed):
    """A sink that weighs nothing and slopes of 0, which leave the result as it is, against the call without."""
    work = Work(arch, rng, smoke, dtype="float16", width=128, group=4)
    work.case += f", with {term}"
    if term != "nothing":
        work.terms[term] = np.full(work.q.shape[1], -60.0 if term == "sink_logits" else 0.0, np.float32)
    measure(work, peer, timed)
