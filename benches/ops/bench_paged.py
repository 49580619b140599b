"""Slot-mapped writes into pages: K and V of many tokens to random pages, and the call for a few thousand."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.tools import roofline


def slots_of(rng, lengths, block, num_blocks):
    """A slot for each token of sequences of these lengths, whose pages are random."""
    pages = iter(rng.permutation(num_blocks))
    found = []
    for length in lengths:
        own = np.array([next(pages) for _ in range(-(-length // block))])
        positions = np.arange(length)
        found.append(own[positions // block] * block + positions % block)
    return np.concatenate(found)


def write(arch, rng, peer, lengths, heads, width, block):
    """A checked call that writes the tokens of these sequences, and the bytes it moves."""
    tokens = sum(lengths)
    num_blocks = 2 * sum(-(-length // block) for length in lengths)
    slots = slots_of(rng, lengths, block, num_blocks)
    shape = (tokens, heads, width)
    rows = [(rng.random(shape, np.float32) - np.float32(0.5)).astype(np.float16) for _ in "kv"]
    before = [oracle.random_bits(rng, (num_blocks, block, heads, width), np.float16) for _ in "kv"]
    place = oracle.to_torch if peer == "torch" else oracle.place
    new, pools, places = [place(a, arch) for a in rows], [place(a.copy(), arch) for a in before], place(slots, arch)
    if peer == "tikv":

        def call():
            tikv.write_slots(*new, *pools, places)
    else:
        flat = [pool.reshape(num_blocks * block, heads, width) for pool in pools]

        def call():
            for to, values in zip(flat, new, strict=True):
                to[places] = values

    call()
    for name, values, old, pool in zip("kv", rows, before, pools, strict=True):
        oracle.assert_same_bits(pool, reference.write_slots(values, old, slots), what=f"{peer}: {name}")
    return call, roofline.bytes_moved(tokens, heads, width, dtypes.float16, dtypes.float16)


@pytest.mark.parametrize("peer", ["tikv", "torch", "numpy"], indirect=True)
@pytest.mark.parametrize("phase", ["prefill", "call"])
def bench_write_slots(arch, rng, peer, phase, sizes, smoke, timed):
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    scatter = shapes.SMOKE_SCATTER if smoke else shapes.SCATTER
    tokens = sizes.prefill if phase == "prefill" else scatter.tokens
    call, moved = write(arch, rng, peer, [tokens], heads, width, scatter.block)
    calls = None if arch == "cpu" or phase == "prefill" else sizes.calls
    case = f"{tokens:,} tokens, random pages of {scatter.block}, float16"
    timed(call, op="write_slots", peer=peer, case=case, bytes_moved=moved, calls=calls)


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
@pytest.mark.parametrize("lengths", ["even", "skewed"])
def bench_lengths(arch, rng, peer, lengths, smoke, timed):
    """One long sequence and many of one token against as many tokens evenly divided: the cost has to be the same."""
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    scatter = shapes.SMOKE_SCATTER if smoke else shapes.SCATTER
    skewed = [scatter.tokens] + [1] * (scatter.sequences - 1)
    each, rest = divmod(sum(skewed), scatter.sequences)
    even = [each + 1] * rest + [each] * (scatter.sequences - rest)
    call, moved = write(arch, rng, peer, {"even": even, "skewed": skewed}[lengths], heads, width, scatter.block)
    timed(call, op="write_slots", peer=peer, case=f"{lengths}, {sum(even):,} tokens", bytes_moved=moved)
