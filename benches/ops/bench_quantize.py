"""Pools of fewer bits: writes that quantise, beside a plain write of the same rows, and reading back."""

import numpy as np
import oracle
import pytest
import shapes

import tikv
from tikv import dtypes, formats, reference
from tikv.tools import roofline

SCALE = dtypes.float16


@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
@pytest.mark.parametrize("stored", ["quant8_64", "q8_0", "quant4_64", "q4_0"])
def bench_write_groups(arch, rng, peer, stored, sizes, smoke, timed):
    """The same write into codes of groups; `bench_write_numbers` has the float16 that they are compared with."""
    if smoke and stored != "quant4_64":
        pytest.skip("one format is enough to see that it runs")
    heads, width, _ = shapes.MODELS["8x128"]
    block = shapes.SCATTER.block
    tokens = (sizes.prefill if not smoke else 32) // block * block
    row = formats.FORMATS[stored]
    few = [(rng.random((block, heads, width), np.float32) - np.float32(0.5)).astype(np.float16) for _ in "kv"]
    new = [oracle.place(np.concatenate([a] * (tokens // block)), arch) for a in few]
    slots = rng.permutation(tokens)
    empty = oracle.place(np.zeros((tokens // block, block, heads, width), np.float16), arch)
    pools, places = [tikv.quantize(empty, stored) for _ in "kv"], oracle.place(slots, arch)

    def call():
        tikv.write_slots(*new, *pools, places)

    call()
    for pool, rows, name in zip(pools, few, "kv", strict=True):
        want = reference.quantize_groups(rows, row.bits, row.group, row.rule, np.float16)
        for got, part in zip((pool.codes, pool.scales, pool.biases), want, strict=True):
            if part is not None:
                whole = np.concatenate([part] * (tokens // block))
                before = np.zeros((tokens // block, block, *part.shape[1:]), part.dtype)
                oracle.assert_same_bits(got, reference.write_slots(whole, before, slots), what=name)
    moved = 2 * tokens * heads * width * 2 + sum(pool.nbytes for pool in pools)
    case = f"{tokens:,} tokens into {stored}"
    timed(call, op="write_slots", peer=peer, case=case, bytes_moved=moved)


@pytest.mark.parametrize("peer", ["tikv"], indirect=True)
@pytest.mark.parametrize("stored", ["float16", "int8", "float8_e4m3fn"])
def bench_write_numbers(arch, rng, peer, stored, sizes, smoke, timed):
    """The float16 write that all others are compared with; int8 with a scale per row, and 8-bit floats."""
    dtype = dtypes.parse(stored, "bench")
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    block = (shapes.SMOKE_SCATTER if smoke else shapes.SCATTER).block
    tokens = sizes.prefill // block * block
    # Few different rows, many times: the oracle goes element by element.
    few = [(rng.random((block, heads, width), np.float32) - np.float32(0.5)).astype(np.float16) for _ in "kv"]
    rows = [np.concatenate([a] * (tokens // block)) for a in few]
    slots = rng.permutation(tokens)
    before = [oracle.random_bits(rng, (tokens // block, block, heads, width), dtype.numpy) for _ in "kv"]
    scales_before = [oracle.random_bits(rng, (tokens // block, block, heads), SCALE.numpy) for _ in "kv"]
    new, pools, scales = ([oracle.place(a.copy(), arch) for a in arrays] for arrays in (rows, before, scales_before))
    options = dict(zip(("k_scale", "v_scale"), scales, strict=True)) if stored == "int8" else {}
    places = oracle.place(slots, arch)

    def call():
        tikv.write_slots(*new, *pools, places, **options)

    call()
    for i, name in enumerate("kv"):
        by_row = stored == "int8"
        want, want_scale = (
            reference.quantize(few[i], SCALE.numpy) if by_row else (reference.encode(few[i], dtype.numpy), None)
        )
        want = np.concatenate([want] * (tokens // block))
        oracle.assert_same_bits(pools[i], reference.write_slots(want, before[i], slots), what=name)
        if want_scale is not None:
            want_scale = np.concatenate([want_scale] * (tokens // block))[..., None]
            after = reference.write_slots(want_scale, scales_before[i][..., None], slots)[..., 0]
            oracle.assert_same_bits(scales[i], after, what=f"scales of {name}")
    moved = roofline.bytes_moved(tokens, heads, width, dtypes.float16, dtype)
    if stored == "int8":
        moved += 2 * tokens * heads * SCALE.itemsize
    case = f"{tokens:,} tokens into {stored}"
    timed(call, op="write_slots", peer=peer, case=case, bytes_moved=moved)


@pytest.mark.parametrize("peer", ["tikv", "torch"], indirect=True)
def bench_dequantize(arch, rng, peer, sizes, smoke, timed):
    heads, width, _ = shapes.SMOKE if smoke else shapes.MODELS["8x128"]
    q = rng.integers(-127, 128, (sizes.prefill, heads, width)).astype(np.int8)
    scale = np.abs(oracle.numbers(rng, (sizes.prefill, heads), np.float32))
    place = oracle.to_torch if peer == "torch" else oracle.place
    stored, scales, out = place(q, arch), place(scale, arch), place(np.zeros(q.shape, np.float32), arch)
    if peer == "tikv":

        def call():
            tikv.dequantize(stored, scales, out)
    else:
        import torch

        def call():
            torch.mul(stored, scales[..., None], out=out)

    call()
    oracle.assert_same_bits(out, reference.dequantize(q, scale), what=peer)
    moved = q.size * (1 + out.dtype.itemsize) + scale.nbytes
    timed(call, op="dequantize", peer=peer, case=f"{sizes.prefill:,} tokens to float32", bytes_moved=moved)
