"""FlashInfer's wrappers and functions of one request by their definition, on torch tensors and NumPy arrays."""

import inspect

import numpy as np
import oracle
import pytest
from flashinfer_by_definition import attention

import tikv
from tikv.compat import flashinfer

pytestmark = pytest.mark.thorough

CASES = [
    {},
    {"causal": True},
    {"causal": True, "window": 5},
    {"window": 3},
    {"causal": True, "softcap": 2.0, "scale": 0.3},
    {"mode": "ALIBI"},
    {"mode": "ALIBI", "causal": True},
    {"mode": "ALIBI", "window": 4},
    {"mode": "ROPE_LLAMA"},
    {"mode": "ROPE_LLAMA", "causal": True, "rope": (2.0, 5e3), "softcap": 3.0},
    {"mask": True},
    {"mask": True, "window": 6},
    {"mask": True, "mode": "ALIBI"},
    {"mask": True, "mode": "ROPE_LLAMA"},
]
COUNTS, LENGTHS = (1, 0, 5, 19, 2, 3), (9, 4, 5, 27, 1, 0)  # also more queries than keys, and no keys
ATOL = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def name_of(case):
    return "-".join(f"{name}={value}" for name, value in case.items()) or "all"


def placed(a, arch, dtype="float32"):
    """A torch tensor of the dtype on the device of the back end; NumPy's array if torch is not installed."""
    try:
        import torch
    except ImportError:
        return oracle.place(a, arch)
    tensor = torch.from_numpy(np.ascontiguousarray(a))
    if a.dtype.kind == "f":
        tensor = tensor.to(getattr(torch, dtype))
    return tensor.cuda() if arch == "cuda" else tensor


def values(a):
    """The numbers of an array in float64."""
    return a.detach().double().cpu().numpy() if hasattr(a, "detach") else np.asarray(a, np.float64)


def filled(like):
    """An array of the same kind and form, of which every element is 7."""
    return like.new_full(like.shape, 7) if hasattr(like, "new_full") else np.full_like(like, 7)


def options_of(case):
    """The case as options of a plan, and of the definition."""
    options = {
        "causal": case.get("causal", False),
        "window_left": case.get("window", -1),
        "logits_soft_cap": case.get("softcap"),
        "sm_scale": case.get("scale"),
        "pos_encoding_mode": case.get("mode", "NONE"),
    }
    if "rope" in case:
        options |= {"rope_scale": case["rope"][0], "rope_theta": case["rope"][1]}
    return options, {name: value for name, value in case.items() if name != "mask"}


def compared(out, lse, q, k, v, starts, of_keys, case, masks=None, dtype="float32"):
    """Compare the results of all requests with the definition."""
    definition = options_of(case)[1]
    out, lse = values(out), values(lse)
    assert out.shape == (*q.shape[:2], v.shape[-1])
    for b in range(len(starts) - 1):
        rows, keys = slice(*starts[b : b + 2]), slice(*of_keys[b : b + 2])
        mask = None if masks is None else masks[b]
        want, want_lse = attention(q[rows], k[keys], v[keys], mask=mask, **definition)
        np.testing.assert_allclose(out[rows], want, rtol=0, atol=ATOL[dtype])
        np.testing.assert_allclose(lse[rows], want_lse, rtol=1e-6, atol=2e-5 if dtype == "float32" else 5e-3)


def requests_of(rng, heads, group, width, width_v=None, dtype="float32", counts=COUNTS, lengths=LENGTHS):
    """Queries and keys of requests, rounded to the dtype; where those of each start; and a mask for each."""
    starts, of_keys = (np.cumsum([0, *n]).astype(np.int32) for n in (counts, lengths))
    arrays = []
    for rows, n, columns in (
        (starts[-1], heads * group, width),
        (of_keys[-1], heads, width),
        (of_keys[-1], heads, width_v or width),
    ):
        a = rng.standard_normal((rows, n, columns)).astype(np.float32)
        arrays.append(values(placed(a, "cpu", dtype)).astype(np.float32))
    masks = [rng.random((n, m)) < 0.5 for n, m in zip(counts, lengths, strict=True)]
    return arrays, starts, of_keys, masks


def paged(rng, k, v, of_keys, page, layout):
    """(cache (N, 2, ...), indptr, indices, last_page_len) that hold these rows, in pages in any order."""
    lengths = np.diff(of_keys)
    counts = -(-lengths // page)
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    indices = rng.permutation(indptr[-1] + 3)[: indptr[-1]].astype(np.int32)
    cache = rng.standard_normal((indptr[-1] + 3, 2, page, *k.shape[1:])).astype(np.float32)
    for b, n in enumerate(lengths):
        for p in range(n):
            block = indices[indptr[b] + p // page]
            cache[block, 0, p % page], cache[block, 1, p % page] = k[of_keys[b] + p], v[of_keys[b] + p]
    last = np.where(counts > 0, (lengths - 1) % page + 1, 0).astype(np.int32)
    return np.ascontiguousarray(cache.swapaxes(2, 3)) if layout == "HND" else cache, indptr, indices, last


def mask_options(masks, case, packed, arch):
    if not case.get("mask"):
        return None, {}
    if packed:
        bits = [np.packbits(mask.ravel(), bitorder="little") for mask in masks]
        return masks, {"packed_custom_mask": placed(np.concatenate(bits), arch)}
    return masks, {"custom_mask": placed(np.concatenate([mask.ravel() for mask in masks]), arch)}


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_prefill_of_pages(arch, rng, case, page):
    layout = "HND" if page == 5 else "NHD"
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 2, 32)
    cache, *table = paged(rng, k, v, of_keys, page, layout)
    cache = placed(cache, arch)
    masks, of_mask = mask_options(masks, case, page == 1, arch)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch), layout)
    table = [placed(a, "cpu" if page == 16 else arch) for a in (starts, *table)]
    wrapper.plan(*table, 4, 2, 32, page, q_data_type="float32", **options_of(case)[0], **of_mask)
    for given in (cache, (cache[:, 0], cache[:, 1])):
        out, lse = wrapper.run(placed(q, arch), given, return_lse=True)
        compared(out, lse, q, k, v, starts, of_keys, case, masks)
    to, to_lse = filled(out), filled(lse)
    assert wrapper.run(placed(q, arch), cache, out=to, lse=to_lse) is to
    oracle.assert_same_bits(oracle.to_numpy(to), oracle.to_numpy(out))
    oracle.assert_same_bits(oracle.to_numpy(to_lse), oracle.to_numpy(lse))


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_prefill_of_rows(arch, rng, case, layout):
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 4, 32, 16)
    masks, of_mask = mask_options(masks, case, layout == "HND", arch)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch), layout)
    indptr = [placed(a, arch) for a in (starts, of_keys)]
    wrapper.plan(*indptr, 8, 2, 32, 16, q_data_type="float32", **options_of(case)[0], **of_mask)
    keys = [placed(a.swapaxes(0, 1) if layout == "HND" else a, arch) for a in (k, v)]
    out, lse = wrapper.run_return_lse(placed(q, arch), *keys)
    compared(out, lse, q, k, v, starts, of_keys, case, masks)
    to, to_lse = filled(out), filled(lse)
    assert wrapper.run(placed(q, arch), *keys, out=to, lse=to_lse, return_lse=True)[0] is to
    oracle.assert_same_bits(oracle.to_numpy(to), oracle.to_numpy(out))
    oracle.assert_same_bits(oracle.to_numpy(to_lse), oracle.to_numpy(lse))


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("case", [c for c in CASES if "mask" not in c], ids=name_of)
def test_decode_of_pages(arch, rng, case, each):
    if each == 1 and case.get("causal"):
        case = case | {"causal": False}
    case = case | {"causal": each > 1}
    lengths = (9, 4, 17, 3) if each > 1 else (9, 0, 17, 1)
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 4, 32, counts=(each,) * 4, lengths=lengths)
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    options, _ = options_of(case)
    del options["causal"]
    table = [placed(a, arch) for a in table]
    wrapper.plan(*table, 8, 2, 32, 5, q_data_type="float32", q_len_per_req=each, **options)
    out, lse = wrapper.run(placed(q, arch), placed(cache, arch), return_lse=True)
    compared(out, lse, q, k, v, starts, of_keys, case)
    with pytest.raises(tikv.ShapeError, match=f"q_len_per_req={each}, as in the plan, need {4 * each} rows"):
        wrapper.run(placed(q[1:], arch), placed(cache, arch))
    with pytest.raises(tikv.OptionError, match="q_len_per_req=2"):
        wrapper.run(placed(q, arch), placed(cache, arch), q_len_per_req=2)
    to, to_lse = filled(out), filled(lse)
    wrapper.run(placed(q, arch), placed(cache, arch), out=to, lse=to_lse)
    oracle.assert_same_bits(oracle.to_numpy(to), oracle.to_numpy(out))
    oracle.assert_same_bits(oracle.to_numpy(to_lse), oracle.to_numpy(lse))


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_request(arch, rng, case, layout):
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 2, 32, counts=(7,), lengths=(20,))
    options, _ = options_of(case)
    keys = [placed(a.swapaxes(0, 1) if layout == "HND" else a, arch) for a in (k, v)]
    masks, of_mask = mask_options(masks, case, layout == "HND", arch)
    if "custom_mask" in of_mask:
        of_mask["custom_mask"] = of_mask["custom_mask"].reshape(7, 20)
    out, lse = flashinfer.single_prefill_with_kv_cache(
        placed(q, arch), *keys, kv_layout=layout, return_lse=True, **options, **of_mask
    )
    compared(out, lse, q, k, v, starts, of_keys, case, masks)
    again = flashinfer.single_prefill_with_kv_cache_return_lse(
        placed(q, arch), *keys, kv_layout=layout, **options, **of_mask
    )
    oracle.assert_same_bits(oracle.to_numpy(again[1]), oracle.to_numpy(lse))
    if masks is None:
        del options["causal"]
        out, lse = flashinfer.single_decode_with_kv_cache(
            placed(q[-1], arch), *keys, kv_layout=layout, return_lse=True, **options
        )
        compared(out[None], lse[None], q[-1:], k, v, np.array([0, 1]), of_keys, case | {"causal": False})


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "group", "width"), [(4, 1, 64), (2, 4, 128), (1, 8, 256)])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
def test_narrow_dtypes_and_heads(arch, rng, dtype, heads, group, width, mode):
    pytest.importorskip("torch")
    case = {"mode": mode, "causal": True}
    (q, k, v), starts, of_keys, _ = requests_of(rng, heads, group, width, dtype=dtype)
    cache, *table = paged(rng, k, v, of_keys, 16, "NHD")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    table = [placed(a, arch) for a in (starts, *table)]
    shape = heads * group, heads, width, 16
    wrapper.plan(*table, *shape, causal=True, pos_encoding_mode=mode, q_data_type=dtype)
    q_there, cache = placed(q, arch, dtype), placed(cache, arch, dtype)
    out, lse = wrapper.run(q_there, cache, return_lse=True)
    assert out.dtype == q_there.dtype
    compared(out, lse, q, k, v, starts, of_keys, case, dtype=dtype)


SCALES = {"q_scale": 0.75, "k_scale": 1.5, "v_scale": 0.625}


@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_scales(arch, rng, dtype, mode):
    """They multiply scores and the result, for codes as they are read, and of rotated keys after the rotation."""
    pytest.importorskip("torch")
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32, dtype=dtype)
    q = requests_of(rng, 2, 2, 32)[0][0]
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    case = {"causal": True, "scale": 0.2 * 0.75 * 1.5, "mode": mode}
    options = {"causal": True, "sm_scale": 0.2, "q_data_type": "float32", "kv_data_type": dtype}
    table = [placed(a, arch) for a in (starts, *table)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    wrapper.plan(*table, 4, 2, 32, 5, pos_encoding_mode=mode, **options)
    out, lse = wrapper.run(placed(q, arch), placed(cache, arch, dtype), return_lse=True, **SCALES)
    compared(out, lse, q, k, v * 0.625, starts, of_keys, case)
    rows = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    rows.plan(placed(starts, arch), placed(of_keys, arch), 4, 2, 32, pos_encoding_mode=mode, **options)
    keys = [placed(a, arch, dtype) for a in (k, v)]
    out, lse = rows.run(placed(q, arch), *keys, return_lse=True, **SCALES)
    compared(out, lse, q, k, v * 0.625, starts, of_keys, case)


def test_sinks(arch, rng):
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32)
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    sinks = rng.standard_normal(4).astype(np.float32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(placed(np.zeros(8, np.uint8), arch))
    wrapper.plan(*(placed(a, arch) for a in (starts, *table)), 4, 2, 32, 5, causal=True, q_data_type="float32")
    out, lse = (
        values(a) for a in wrapper.run(placed(q, arch), placed(cache, arch), return_lse=True, sinks=placed(sinks, arch))
    )
    for b in range(len(COUNTS)):
        rows, keys = slice(*starts[b : b + 2]), slice(*of_keys[b : b + 2])
        want, want_lse = attention(q[rows], k[keys], v[keys], causal=True)
        with_sink = np.logaddexp2(want_lse, sinks * np.log2(np.e))
        np.testing.assert_allclose(out[rows], want * np.exp2(want_lse - with_sink)[..., None], rtol=0, atol=3e-6)
        np.testing.assert_allclose(lse[rows], with_sink, rtol=0, atol=2e-5)


@pytest.mark.archs("cpu")
def test_a_plan_copies_its_indices(arch, rng):
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 2, 32)
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    for of_mask in ({}, {"custom_mask": np.concatenate([mask.ravel() for mask in masks])}):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(np.zeros(8, np.uint8))
        given = [a.copy() for a in (starts, *table)]
        wrapper.plan(*given, 4, 2, 32, 5, q_data_type="float32", **of_mask)
        before = wrapper.run(q, cache)
        for a in (*given, *of_mask.values()):
            a[...] = 0
        oracle.assert_same_bits(wrapper.run(q, cache), before)
        with pytest.raises(tikv.TikvError):
            wrapper.plan(*given, 4, 2, 32, 0)
        oracle.assert_same_bits(wrapper.run(q, cache), before)
        plans = wrapper.run(q, cache * 2)  # pages are read in place, in each run
        assert np.abs(plans - before).max() > 0.1


@pytest.mark.archs("cpu")
def test_no_queries_and_no_requests(arch):
    rows, starts = np.ones((3, 2, 16), np.float32), np.array([0, 0, 0], np.int32)
    for indptr, of_keys in ((starts[:1], starts[:1]), (starts, np.array([0, 1, 3], np.int32))):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(8, np.uint8))
        for mode in ("NONE", "ALIBI", "ROPE_LLAMA"):
            wrapper.plan(indptr, of_keys, 4, 2, 16, q_data_type="float32", pos_encoding_mode=mode)
            out, lse = wrapper.run(np.ones((0, 4, 16), np.float32), rows, rows, return_lse=True)
            assert out.shape == (0, 4, 16)
            assert lse.shape == (0, 4)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.zeros(8, np.uint8))
    decode.plan(np.array([0, 0]), np.zeros(0, int), np.array([0]), 4, 2, 16, 4, q_data_type="float32")
    out, lse = decode.run(np.ones((1, 4, 16), np.float32), (np.ones((2, 4, 2, 16), np.float32),) * 2, return_lse=True)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


PLAN = {
    "qo_indptr": np.array([0, 1, 4], np.int32),
    "paged_kv_indptr": np.array([0, 1, 3], np.int32),
    "paged_kv_indices": np.array([2, 0, 1], np.int32),
    "paged_kv_last_page_len": np.array([3, 2], np.int32),
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 16,
    "page_size": 4,
    "q_data_type": "float32",
}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_qo_heads": 3}, "3 query heads do not divide among 2"),
        ({"page_size": 0}, "page_size"),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode='ROPE'"),
        ({"pos_encoding_mode": "ROPE_LLAMA", "head_dim_qk": 15}, "even head width"),
        ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 3.0}, "logits_soft_cap=3.0 with"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0"),
        ({"logits_soft_cap": float("nan")}, "logits_soft_cap=nan"),
        ({"sm_scale": float("inf")}, "sm_scale=inf"),
        ({"sm_scale": "x"}, "sm_scale='x'"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"window_left": -2}, "window_left"),
        ({"causal": "yes"}, "causal='yes'"),
        ({"q_data_type": "float31"}, "unknown dtype 'float31'"),
        ({"o_data_type": "float16"}, "o_data_type=float16 is not supported"),
        ({"prefix_len_ptr": np.zeros(2)}, "prefix_len_ptr is not supported"),
        ({"token_pos_in_items_len": 3}, "token_pos_in_items_len=3 is not supported"),
        ({"seq_lens": np.zeros(2)}, "seq_lens is not supported"),
        ({"block_tables": np.zeros(2)}, "block_tables is not supported"),
        ({"qo_indptr": np.array([0, 3, 2])}, "qo_indptr is .* must ascend from 0"),
        ({"qo_indptr": np.array([1, 3, 4])}, "qo_indptr is .* must ascend from 0"),
        ({"qo_indptr": np.array([0, 4])}, "paged_kv_indptr has 3 entries"),
        ({"qo_indptr": np.array([0.0, 1, 4])}, "qo_indptr"),
        ({"paged_kv_indptr": np.array([0, 1, 9])}, "stay within the 3 pages"),
        ({"paged_kv_last_page_len": np.array([3, 5])}, r"paged_kv_last_page_len\[1\]=5"),
        ({"custom_mask": np.ones(20, bool)}, r"custom_mask is \(20,\); .* need \(21,\)"),
        ({"custom_mask": np.ones(21, np.int8)}, "custom_mask is int8"),
        ({"packed_custom_mask": np.ones(9, np.uint8)}, r"packed_custom_mask is \(9,\)"),
        ({"custom_mask": np.ones(21, bool), "packed_custom_mask": np.ones(4, np.uint8)}, "both given"),
        ({"disable_split_kv": 3}, "disable_split_kv=3"),
        ({"fixed_split_size": 0.5}, "fixed_split_size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_plans_that_are_refused(arch, change, words):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(np.zeros(8, np.uint8))
    cache = (np.ones((3, 4, 2, 16), np.float32),) * 2
    wrapper.plan(**PLAN)
    with pytest.raises(tikv.TikvError, match=words):
        wrapper.plan(**PLAN | change)
    assert wrapper.run(np.ones((4, 4, 16), np.float32), cache).shape == (4, 4, 16)  # the plan before stays


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": ones(3, 4, 16)}, r"q is .* where the plan needs \(4, 4, 16\)"),
        ({"q": ones(4, 4, 16, dtype=np.float16)}, "q: float16, and the plan has q_data_type=float32"),
        ({"q": [1.0]}, "q"),
        ({"paged_kv_cache": (ones(3, 4, 2, 16, dtype=np.float16),) * 2}, "kv_data_type=float32"),
        ({"paged_kv_cache": (ones(3, 4, 1, 16),) * 2}, "the plan needs 2 heads"),
        ({"paged_kv_cache": (ones(3, 4, 2, 8),) * 2}, "the plan needs 2 heads of widths 16"),
        ({"paged_kv_cache": (ones(3, 5, 2, 16),) * 2}, "pages of 4 tokens"),
        ({"paged_kv_cache": (ones(3, 4, 2, 16),)}, "Pass "),
        ({"paged_kv_cache": (ones(2, 4, 2, 16),) * 2}, "pool's 2 blocks|but there are 2"),
        ({"out": ones(4, 4, 8)}, r"out is .* where \(4, 4, 16\)"),
        ({"out": ones(4, 4, 16, dtype=np.float16)}, "out is .* must be float32"),
        ({"lse": ones(4, 3)}, r"lse is .* where \(4, 4\)"),
        ({"lse": ones(4, 4, dtype=np.float16)}, "lse is .* must be float32"),
        ({"q_scale": "x"}, "q_scale='x'"),
        ({"v_scale": float("inf")}, "v_scale=inf"),
        ({"sinks": ones(3)}, "sink"),
        ({"window_left": 3}, "window_left=3"),
        ({"kv_cache_sf": ones(3)}, "kv_cache_sf is for pages in nvfp4, which are uint8, and the pages are float32"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor=1.0"),
        ({"use_fp16_softmax": True}, "use_fp16_softmax=True"),
        ({"return_lse": 5}, "return_lse=5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_runs_that_are_refused(arch, change, words, mode):
    """Nothing is written: not to results, nor to pages."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(ones(8, dtype=np.uint8))
    wrapper.plan(**PLAN, pos_encoding_mode=mode)
    given = {"q": ones(4, 4, 16), "paged_kv_cache": (ones(3, 4, 2, 16),) * 2, "out": ones(4, 4, 16), "lse": ones(4, 4)}
    given |= change
    with pytest.raises(tikv.TikvError, match=words):
        wrapper.run(**given)
    for a in (given["out"], given["lse"], *given["paged_kv_cache"]):
        assert (a == 1).all()


@pytest.mark.archs("cpu")
def test_what_constructors_refuse(arch):
    space = np.zeros(8, np.uint8)
    with pytest.raises(tikv.TikvError, match="there is no plan yet"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(space).run(ones(1, 2, 8), (ones(2, 4, 2, 8),) * 2)
    with pytest.raises(tikv.TikvError, match="1 more arguments"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(space).run(ones(1, 2, 8), (ones(2, 4, 2, 8),) * 2, 3)
    for name in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ):
        wrapper = getattr(flashinfer, name)
        for options in ({"kv_layout": "XYZ"}, {"backend": "cudnn"}, {"jit_args": [1]}):
            with pytest.raises(tikv.OptionError, match=next(iter(options))):
                wrapper(space, **options)
        for option, value in inspect.signature(wrapper).parameters.items():
            if value.default is None and option not in ("jit_args", "jit_kwargs", "max_total_num_rows"):
                with pytest.raises(tikv.OptionError, match=f"{option} is not supported"):
                    wrapper(space, **{option: space})
        with pytest.raises(tikv.DTypeError, match="workspace is list"):
            wrapper([1])


@pytest.mark.archs("cpu")
def test_backward_is_refused(arch):
    torch = pytest.importorskip("torch")
    q = torch.ones(3, 2, 16, requires_grad=True)
    for mode in ("NONE", "ROPE_LLAMA"):
        out = flashinfer.single_prefill_with_kv_cache(q, q, q, causal=True, pos_encoding_mode=mode)
        with pytest.raises(tikv.OptionError):
            out.sum().backward()
