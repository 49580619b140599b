"""Each named copy, called by its own name with its own arguments. A row of `spec.VARIANTS` needs no line here."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, reference
from tikv.compat.seeds import spec
from tikv.tools import roofline


def arguments(row, tokens, heads, width):
    """Shapes of a source and a cache, and the keyword arguments: a ring that wraps where the variant has one."""
    capacity, start = tokens + 5, tokens // 2 + 6
    if row.mapping == "flag":
        return (tokens, heads * width), (capacity, heads * width), {"write_pos": start, "is_sliding": True}
    if row.mapping == "slot":
        return (heads, width), (heads, capacity, width), {"seq_pos": start - 5}
    shape = (tokens, heads, width) if row.src_layout == "token_major" else (heads, tokens, width)
    return shape, (heads, capacity, width), {"seq_pos_start": start}


def expected(row, src, cache, scalars):
    """What the reference says, which knows rows of (T, H, D) and positions only."""
    (position,) = (value for name, value in scalars.items() if name != "is_sliding")
    if row.mapping == "flag":
        after = reference.copy(
            src[:, None], cache[:, None], position=position, window=cache.shape[0], cache_layout="token_major"
        )
        return after[:, 0]
    if row.mapping == "slot":
        return reference.copy(src[None], cache, position=position)
    return reference.copy(src, cache, position=position, window=cache.shape[1], src_layout=row.src_layout)


@pytest.mark.parametrize("row", spec.VARIANTS.values(), ids=lambda row: row.name)
def bench_variant(arch, rng, row, sizes, smoke, timed):
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    tokens = 1 if row.tokens == "one" else sizes.prefill
    src_dtype, cache_dtype = (dtypes.parse(name, "bench") for name in (row.src_dtype, row.cache_dtype))
    src_shape, cache_shape, scalars = arguments(row, sizes.context if tokens == 1 else tokens, heads, width)
    streams = range(row.streams)
    rows = [(rng.random(src_shape, np.float32) - np.float32(0.5)).astype(src_dtype.numpy) for _ in streams]
    before = [oracle.random_bits(rng, cache_shape, cache_dtype.numpy) for _ in streams]
    sources = [oracle.place(src, arch) for src in rows]
    caches = [oracle.place(cache.copy(), arch) for cache in before]
    function = getattr(tikv.variants, row.name)

    def call():
        function(*sources, *caches, **scalars)

    call()
    for src, old, cache in zip(rows, before, caches, strict=True):
        oracle.assert_same_bits(cache, expected(row, src, old, scalars), what=row.name)
    moved = roofline.bytes_moved(tokens, heads, width, src_dtype, cache_dtype, streams=row.streams)
    timed(call, op=row.name, peer="tikv", case=row.name, bytes_moved=moved, calls=sizes.calls if tokens == 1 else None)
