"""FlashInfer's pages in nvfp4: bytes of two codes each, with scales of groups and one for all keys or values."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from test_flashinfer_graphs import Replayed
from test_flashinfer_wrappers import compared, name_of, options_of, paged, placed, requests_of

import tikv
from tikv import reference
from tikv.compat import flashinfer

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CASES = [{"causal": True}, {"window": 3, "softcap": 2.0}, {"mode": "ALIBI"}, {"mask": True}]


def encoded(cache):
    """(uint8 codes (..., D / 2), float8_e4m3fn scales (..., D / 16)) of rows, the lower four bits first."""
    words, scales, _ = reference.quantize_groups(cache, 4, 16, "nvfp4", ml_dtypes.float8_e4m3fn)
    return words.view(np.uint8), scales.reshape(*cache.shape[:-1], -1).astype(ml_dtypes.float8_e4m3fn)


def decoded(codes, scales):
    values = np.stack((CODES[codes & 15], CODES[codes >> 4]), -1).reshape(*codes.shape[:-1], -1)
    return (values * np.repeat(scales.astype(np.float64), 16, -1)).astype(np.float32)


def eight_bits(scales, arch):
    """Scales as an array of the library that the others are of."""
    try:
        import torch
    except ImportError:
        return oracle.place(scales, arch)
    tensor = torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn)
    return tensor.cuda() if arch == "cuda" else tensor


def bits(a):
    """The bytes of an array."""
    if hasattr(a, "detach"):
        import torch

        return a.cpu().view(torch.uint8).numpy()
    return np.asarray(a).view(np.uint8)


def both(scales, arch):
    """The scales of keys and of values, each contiguous."""
    return tuple(eight_bits(np.ascontiguousarray(scales[:, i]), arch) for i in range(2))


def stored(rng, page=5, **requests):
    """(q, k, v), starts, of_keys, masks, (codes, scales), table, with k and v as decoded from the codes."""
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 2, 64, **requests)
    cache, *table = paged(rng, k, v, of_keys, page, "NHD")
    codes, scales = encoded(cache)
    k, v = (decoded(*encoded(a)) for a in (k, v))
    return (q, k, v), starts, of_keys, masks, (codes, scales), table


@pytest.mark.full("vulkan", unless=lambda params: params["case"] == CASES[0])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pages_of_prompts(arch, rng, case):
    (q, k, v), starts, of_keys, masks, (codes, scales), table = stored(rng)
    options, _ = options_of(case)
    if case.get("mask"):
        options["custom_mask"] = placed(np.concatenate([mask.ravel() for mask in masks]), arch)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    table = [placed(a, arch) for a in (starts, *table)]
    wrapper.plan(*table, 4, 2, 64, 5, q_data_type="float32", kv_data_type="uint8", **options)
    cache, of_groups = placed(codes, arch), both(scales, arch)
    results = []
    together = eight_bits(scales, arch)
    for pages, numbers in (
        (cache, of_groups),
        ((cache[:, 0], cache[:, 1]), of_groups),
        (cache, together),
        (cache, placed(scales.view(np.uint8), arch)),
    ):
        results.append(wrapper.run(placed(q, arch), pages, return_lse=True, kv_cache_sf=numbers))
        compared(*results[-1], q, k, v, starts, of_keys, case, masks if case.get("mask") else None)
    for out, _ in results[1:]:
        oracle.assert_same_bits(oracle.to_numpy(out), oracle.to_numpy(results[0][0]))


def test_decoding_with_scales_of_all(arch, rng):
    """`k_scale` and `v_scale` are those of all keys and values, which codes and scales of groups are multiplied by."""
    (q, k, v), starts, of_keys, _, (codes, scales), table = stored(rng, 16, counts=(1,) * 3, lengths=(33, 1, 16))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    table = [placed(a, arch) for a in table]
    wrapper.plan(*table, 4, 2, 64, 16, q_data_type="float32", kv_data_type="uint8")
    pages = {"paged_kv_cache": placed(codes, arch), "kv_cache_sf": both(scales, arch)}
    out, lse = wrapper.run_return_lse(placed(q, arch), **pages, k_scale=0.5, v_scale=0.25)
    compared(out, lse, q, 0.5 * k, 0.25 * v, starts, of_keys, {})


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("together", [False, True], ids=["pair", "one"])
def test_captured_decoding(arch, rng, together):
    """On CUDA one capture follows later plans, also where pages are every other block."""
    pytest.importorskip("torch")
    buffers = [placed(np.zeros(n, np.int32), arch) for n in (4, 12, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch), *buffers)
    codes, scales = encoded(rng.standard_normal((20, 2, 5, 2, 64)).astype(np.float32))
    numbers = eight_bits(scales, arch) if together else both(scales, arch)
    pages, q = placed(codes, arch), placed(np.zeros((3, 4, 64), np.float32), arch)
    pools, replayed = decoded(codes, scales), None
    for lengths in ((9, 4, 6), (20, 0, 1), (1, 30, 2)):
        counts = -(-np.array(lengths) // 5)
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        indices = rng.permutation(20)[: indptr[-1]].astype(np.int32)
        last = np.where(counts > 0, (np.array(lengths) - 1) % 5 + 1, 0).astype(np.int32)
        table = [placed(a, arch) for a in (indptr, indices, last)]
        wrapper.plan(*table, 4, 2, 64, 5, q_data_type="float32", kv_data_type="uint8")
        asked = rng.standard_normal((3, 4, 64)).astype(np.float32)
        q.copy_(placed(asked, arch))
        replayed = replayed or Replayed(arch, lambda: wrapper.run(q, pages, return_lse=True, kv_cache_sf=numbers))
        rows = [pools[indices[indptr[b] : indptr[b + 1]]].swapaxes(1, 2) for b in range(3)]
        k, v = (
            np.concatenate([a[:, :, i].reshape(-1, 2, 64)[:n] for a, n in zip(rows, lengths, strict=True)])
            for i in range(2)
        )
        compared(*replayed(), asked, k, v, np.arange(4), np.cumsum([0, *lengths]), {})


@pytest.mark.parametrize("by_slots", [False, True], ids=["pages", "slots"])
def test_appended_rows(arch, rng, by_slots):
    """The bits of the definition, in the pages that they belong to, and no others."""
    lengths, new, page = np.array([9, 3, 7]), np.array([4, 3, 0]), 4
    counts = -(-lengths // page)
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.permutation(9)[: indptr[-1]].astype(np.int32)
    batch = np.append(np.repeat(np.arange(3), new), -1).astype(np.int32)
    positions = np.append(np.concatenate([np.arange(n - t, n) for n, t in zip(lengths, new, strict=True)]), -1)
    slots = np.where(batch < 0, -1, indices[indptr[batch] + positions // page] * page + positions % page)
    rows = [rng.standard_normal((8, 2, 32)).astype(np.float32) for _ in "kv"]
    before = rng.integers(0, 255, (9, 2, page, 2, 16), np.uint8), rng.integers(0, 100, (9, 2, page, 2, 2), np.uint8)
    cache, of_groups = placed(before[0].copy(), arch), both(before[1].view(ml_dtypes.float8_e4m3fn), arch)
    arrays, scales = [placed(a, arch) for a in rows], (0.5, 2.0)
    if by_slots:
        flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            *arrays, placed(slots[:7], arch), cache, of_groups, *scales
        )
    else:
        table = (indices, indptr, ((lengths - 1) % page + 1).astype(np.int32))
        index = [placed(a, arch) for a in (batch, positions.astype(np.int32), *table)]
        flashinfer.nvfp4_quantize_append_paged_kv_cache(*arrays, *index[:2], cache, of_groups, *index[2:], *scales)
    codes, numbers_after = before[0].copy(), before[1].copy()
    for stream, (a, scale) in enumerate(zip(rows, scales, strict=True)):
        words, numbers, _ = reference.quantize_groups(a, 4, 16, "nvfp4", ml_dtypes.float8_e4m3fn, scale)
        for t, slot in enumerate(slots[:7]):
            codes[slot // page, stream, slot % page] = words[t].view(np.uint8)
            numbers_after[slot // page, stream, slot % page] = numbers[t].astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(bits(cache), codes)
    for stream, a in enumerate(of_groups):
        np.testing.assert_array_equal(bits(a), numbers_after[:, stream])


@pytest.mark.archs("cpu")
def test_what_writes_refuse(arch):
    rows, cache = [np.ones((2, 2, 32), np.float32) for _ in "kv"], np.zeros((2, 2, 4, 2, 16), np.uint8)
    scales = tuple(np.zeros((2, 4, 2, 2), ml_dtypes.float8_e4m3fn) for _ in "kv")
    call = flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    right = {"slot_mapping": np.array([1, 2]), "paged_kv_cache": cache, "kv_cache_sf": scales}
    right |= {"k_scale": 1.0, "v_scale": 1.0}
    for change, words in (
        ({"k_scale": 0.0}, "k_scale=0.0"),
        ({"v_scale": float("inf")}, "v_scale=inf"),
        ({"kv_layout": "HND"}, "kv_layout='HND'"),
        ({"nvfp4_4over6": 3}, "nvfp4_4over6=3"),
        ({"slot_mapping": np.array([1, 9])}, "9"),
        ({"slot_mapping": np.array([1, 2, 3])}, "fewer rows than the 3"),
        ({"kv_cache_sf": None}, "kv_cache_sf is NoneType"),
        ({"kv_cache_sf": np.zeros((2, 2, 4, 2, 2), np.uint8)}, "lie in one array, which can be read only"),
    ):
        with pytest.raises(tikv.TikvError, match=words):
            call(*rows, **right | change)
        assert not cache.any()
        assert not scales[0].view(np.uint8).any()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_sf": None}, "pages of uint8 hold nvfp4, and its scales are missing"),
        (
            {"kv_cache_sf": (np.ones((4, 5, 2, 4), np.float32),) * 2},
            "kv_cache_sf is float32; it must be float8_e4m3fn",
        ),
        ({"kv_cache_sf": (np.ones((4, 5, 2, 3), ml_dtypes.float8_e4m3fn),) * 2}, "16 codes have one scale"),
        ({"kv_cache_sf": (np.ones((4, 5, 3, 4), np.uint8)[:, :, :2],) * 2}, "Pass keys and values in one array each"),
        ({"paged_kv_cache": np.ones((4, 2, 5, 2, 64), np.float32)}, "and the pages are float32"),
        ({"paged_kv_cache": np.ones((4, 2, 5, 2, 64), np.uint8)}, "16 codes have one scale"),
        ({"paged_kv_cache": np.ones((4, 2, 5, 2, 33), np.uint8)[..., 1:]}, "rows start at such words"),
        ({"paged_kv_cache": np.ones((4, 2, 6, 2, 32), np.uint8)}, "16 codes have one scale"),
        ({"paged_kv_cache": (np.ones((4, 5, 2, 32), np.uint8),)}, "Pass "),
        ({"q": np.ones((3, 4, 32), np.float32)}, "the plan needs"),
    ],
)
def test_what_is_refused(arch, change, words):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.zeros(8, np.uint8))
    plan = [np.array([0, 1, 2, 3]), np.array([2, 0, 1]), np.array([3, 5, 1])]
    wrapper.plan(*plan, 4, 2, 64, 5, q_data_type="float32", kv_data_type="uint8")
    call = {
        "q": np.ones((3, 4, 64), np.float32),
        "paged_kv_cache": np.ones((4, 2, 5, 2, 32), np.uint8),
        "kv_cache_sf": (np.ones((4, 5, 2, 4), ml_dtypes.float8_e4m3fn),) * 2,
        "out": np.ones((3, 4, 64), np.float32),
    }
    with pytest.raises(tikv.TikvError, match=words):
        wrapper.run(**call | change)
    assert (call["out"] == 1).all()
    wrapper.run(**call)
    for space, option in (("HND", "NONE"), ("NHD", "ROPE_LLAMA")):
        other = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.zeros(8, np.uint8), space)
        other.plan(*plan, 4, 2, 64, 5, option, q_data_type="float32", kv_data_type="uint8")
        with pytest.raises(tikv.TikvError, match=r"kv_layout='HND'|ROPE_LLAMA reads"):
            other.run(**call)
    wrapper.plan(*plan, 4, 2, 64, 5, q_data_type="float32")
    with pytest.raises(tikv.DTypeError, match="keys: nvfp4, and the plan has kv_data_type=float32"):
        wrapper.run(**call)


@pytest.mark.archs("cpu")
def test_rows_in_nvfp4_are_refused(arch):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(8, np.uint8))
    with pytest.raises(tikv.DTypeError, match="kv_data_type=uint8 is nvfp4, which is not supported here"):
        wrapper.plan(np.array([0, 1]), np.array([0, 3]), 4, 2, 64, q_data_type="float32", kv_data_type="uint8")
