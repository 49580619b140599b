"""vLLM's names give vLLM's results: each is compared with a plain NumPy reference of its own."""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference
from tikv.compat import indices, vllm

FLOATS = [np.float32, np.float16]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS, ids=["f32", "f16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["NHD", "HND"])
def test_vllm_reshape_and_cache_flash(arch, rng, dtype, transposed):
    blocks, size, heads, width = 5, 4, 2, 8
    key, value = (oracle.random_bits(rng, (7, heads, width), dtype) for _ in "kv")
    before = [oracle.random_bits(rng, (blocks, size, heads, width), dtype) for _ in "kv"]
    slots = np.array([3, -1, 19, 0, 8])  # two rows behind are padding
    if transposed:
        memory = [oracle.place(np.ascontiguousarray(a.swapaxes(1, 2)), arch) for a in before]
        caches = [a.swapaxes(1, 2) for a in memory]
    else:
        caches = [oracle.place(a.copy(), arch) for a in before]
    rows = [oracle.place(a, arch) for a in (key, value)]
    vllm.reshape_and_cache_flash(*rows, *caches, oracle.place(slots, arch), "auto", 1.0, 1.0)
    for new, old, cache in zip((key, value), before, caches, strict=True):
        want = old.copy()
        for t, slot in enumerate(slots):
            if slot >= 0:
                want[slot // size, slot % size] = new[t]
        oracle.assert_same_bits(oracle.to_numpy(cache), want)
    with pytest.raises(tikv.TikvError, match="kv_cache_dtype='fp8_inc'"):
        vllm.reshape_and_cache_flash(*rows, *caches, slots, "fp8_inc")


@pytest.mark.parametrize("dtype", FLOATS, ids=["f32", "f16"])
def test_vllm_reshape_and_cache(arch, rng, dtype):
    blocks, size, heads, width = 3, 4, 2, 16
    x = 16 // np.dtype(dtype).itemsize
    key, value = (oracle.random_bits(rng, (4, heads, width), dtype) for _ in "kv")
    k_before = oracle.random_bits(rng, (blocks, heads, width // x, size, x), dtype)
    v_before = oracle.random_bits(rng, (blocks, heads, width, size), dtype)
    caches = [oracle.place(a.copy(), arch) for a in (k_before, v_before)]
    slots = np.array([11, 2, -1, 5])
    vllm.reshape_and_cache(*(oracle.place(a, arch) for a in (key, value)), *caches, oracle.place(slots, arch), "auto")
    for t, slot in enumerate(slots):
        if slot >= 0:
            for d in range(width):
                k_before[slot // size, :, d // x, slot % size, d % x] = key[t, :, d]
                v_before[slot // size, :, d, slot % size] = value[t, :, d]
    oracle.assert_same_bits(caches[0], k_before)
    oracle.assert_same_bits(caches[1], v_before)


def test_vllm_blocks(arch, rng):
    before = [oracle.random_bits(rng, (4, 2, 2, 8), np.float16) for _ in range(4)]
    caches = [oracle.place(a.copy(), arch) for a in before]
    vllm.copy_blocks(caches[:2], caches[2:], np.array([[0, 3], [1, 2]]))
    for old, cache in zip(before, caches, strict=True):
        want = old.copy()
        want[3], want[2] = old[0], old[1]
        oracle.assert_same_bits(cache, want)
    src, dst = before[0], before[1].copy()
    vllm.swap_blocks(src, dst, 64, np.array([[2, 0]]))
    oracle.assert_same_bits(dst[0], src[2])
    oracle.assert_same_bits(dst[1:], before[1][1:])
    vllm.swap_blocks(src, dst, np.array([[1, 3]]))
    oracle.assert_same_bits(dst[3], src[1])
    vllm.swap_blocks(src, dst, block_mapping=np.array([[0, 2]]))
    oracle.assert_same_bits(dst[2], src[0])
    with pytest.raises(tikv.TikvError, match="block_size_in_bytes=65"):
        vllm.swap_blocks(src, dst, 65, np.array([[2, 0]]))
    with pytest.raises(tikv.ShapeError, match="block_mapping is missing"):
        vllm.swap_blocks(src, dst)
    for wrong in ((caches[:2], caches[2:3]), (caches[:2], [caches[2], caches[3][:2]])):
        kept = [oracle.to_numpy(cache).copy() for cache in caches]
        with pytest.raises(tikv.ShapeError, match=r"copy_blocks: key_caches has 2 pools and value_caches ., of"):
            vllm.copy_blocks(*wrong, [(0, 1)])
        for cache, old in zip(caches, kept, strict=True):
            oracle.assert_same_bits(cache, old)


def test_vllm_blocks_of_bytes(arch, rng):
    """Caches of 8-bit floats are uint8 there: copied as they are, with every byte."""
    before = [rng.integers(0, 256, (4, 2, 2, 8), np.uint8) for _ in "kv"]
    k_cache, v_cache = (oracle.place(a.copy(), arch) for a in before)
    vllm.copy_blocks([k_cache], [v_cache], [(0, 3)])
    vllm.swap_blocks(k_cache, v_cache, 32, [(1, 2)])
    for old, cache, (to, block) in zip(before, (k_cache, v_cache), ((3, 0), (2, 1)), strict=True):
        want = old.copy()
        want[3] = old[0]
        if cache is v_cache:
            want[to] = before[0][block]
        oracle.assert_same_bits(cache, want)


def test_vllm_checks_every_layer_before_it_copies_one(arch, rng):
    before = [oracle.random_bits(rng, (4, 2, 2, 8), np.float32) for _ in range(4)]
    caches = [oracle.place(a.copy(), arch) for a in before]
    wrong = caches[:2], [caches[2], caches[3][:, :, :, ::2]]
    with pytest.raises(tikv.ShapeError, match=r"copy_blocks: the blocks of v_pool .* have gaps"):
        vllm.copy_blocks(*wrong, [(0, 3)])
    for old, cache in zip(before, caches, strict=True):
        oracle.assert_same_bits(cache, old)


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_vllm_concat_and_cache_mla(arch, rng, name):
    blocks, size, rank, rotated = 3, 4, 24, 8
    dtype = np.float32 if name == "auto" else E4M3
    latent, key = (oracle.numbers(rng, (5, width), np.float32) for width in (rank, rotated))
    before = oracle.random_bits(rng, (blocks, size, rank + rotated), dtype)
    cache = oracle.place(before.copy() if name == "auto" else before.view(np.uint8).copy(), arch)
    slots = np.array([11, -1, 0, 6])  # the row behind is padding
    scale = oracle.place(np.array(0.5, np.float32), arch)
    vllm.concat_and_cache_mla(
        *(oracle.place(a, arch) for a in (latent, key)), cache, oracle.place(slots, arch), name, scale
    )
    rows = np.concatenate([latent, key], -1)
    want = before.copy()
    for row, slot in zip(rows, slots, strict=False):
        if slot >= 0:
            want[slot // size, slot % size] = row if name == "auto" else reference.encode(row / np.float32(0.5), E4M3)
    oracle.assert_same_bits(oracle.to_numpy(cache).view(dtype), want, any_nan=True)
    if name == "fp8":
        given = [oracle.place(a, arch) for a in (latent, key)]
        vllm.concat_and_cache_mla(*given, cache, oracle.place(slots, arch), name, scale, skip_scale=True)
        oracle.assert_same_bits(oracle.to_numpy(cache).view(dtype)[2, 3], reference.encode(rows[0], E4M3), any_nan=True)
    with pytest.raises(tikv.OptionError, match="kv_cache_dtype='fp8_ds_mla' is not supported"):
        vllm.concat_and_cache_mla(latent, key, cache, slots, "fp8_ds_mla", scale)


TABLE = np.array([[3, 0, -1], [1, 4, 2], [-1, -1, -1]], np.int32)
STARTS, FIRST = np.array([0, 5, 11, 11], np.int32), np.array([2, 3, 0], np.int32)


def gathered(cache, rows, first, factor=None):
    """The rows that vLLM's gathers leave, one token after another."""
    want = rows.copy()
    for b, (begin, end) in enumerate(itertools.pairwise(STARTS)):
        for t in range(begin, end):
            position = t - begin + first[b]
            row = cache[TABLE[b, position // cache.shape[1]], position % cache.shape[1]]
            want[t] = row if factor is None else (row.astype(np.float32) * factor).astype(rows.dtype)
    return want


@pytest.mark.parametrize("starts", [True, False], ids=["from a token on", "from the first"])
@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_vllm_gather_and_maybe_dequant_cache(arch, rng, name, starts):
    dtype = np.float16 if name == "auto" else E4M3
    cache = oracle.numbers(rng, (5, 4, 32), np.float16).astype(dtype)
    rows = oracle.random_bits(rng, (14, 32), np.float16)
    sequence = np.array([0] * 5 + [1] * 6 + [0], np.int32)  # the last has no row of its sequence's
    dst = oracle.place(rows.copy(), arch)
    placed = oracle.place(cache if name == "auto" else cache.view(np.uint8), arch)
    index = [oracle.place(a, arch) for a in (TABLE, STARTS, sequence)]
    first = FIRST if starts else np.zeros(3, np.int32)
    scale = oracle.place(np.array(0.25, np.float32), arch)
    given = oracle.place(FIRST, arch) if starts else None
    vllm.gather_and_maybe_dequant_cache(placed, dst, *index, 12, name, scale, given)
    factor = None if name == "auto" else np.float32(0.25)
    oracle.assert_same_bits(dst, gathered(cache, rows, first, factor), any_nan=True)


@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
def test_vllm_cp_gather_cache(arch, rng, dtype):
    cache = oracle.random_bits(rng, (5, 4, 32), np.float16).view(dtype)[..., :32]
    rows = rng.integers(0, 256, (14, 32)).astype(dtype)
    dst = oracle.place(rows.copy(), arch)
    index = [oracle.place(a, arch) for a in (TABLE, STARTS)]
    cache = np.ascontiguousarray(cache)
    vllm.cp_gather_cache(oracle.place(cache, arch), dst, *index, 2, oracle.place(FIRST, arch))
    oracle.assert_same_bits(dst, gathered(cache, rows, FIRST))


@pytest.mark.archs("cpu")
def test_vllm_gathers_by_indices_of_a_device(arch, rng, monkeypatch):
    """Which the host does not know: torch finds the slots, and what has no page is left out."""
    monkeypatch.setattr(indices, "on_host", lambda array: indices.library_of(array) is np)
    cache, rows = (oracle.random_bits(rng, shape, np.float16) for shape in ((5, 4, 32), (14, 32)))
    table = TABLE.copy()
    table[1, 2] = 9
    dst, *index = (oracle.to_torch(a.copy(), "cpu") for a in (rows, table, STARTS, FIRST))
    vllm.cp_gather_cache(oracle.to_torch(cache, "cpu"), dst, *index[:2], 2, index[2])
    want = gathered(cache, rows, FIRST)
    want[10] = rows[10]  # of sequence 1 and position 8, on page 9
    oracle.assert_same_bits(dst, want)
