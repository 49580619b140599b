"""Shapes and arguments that FlashInfer's own tests have: widths, groups, strides, masks without keys."""

import numpy as np
import oracle
import pytest
from test_flashinfer_wrappers import compared, paged, placed, requests_of, values

import tikv
from tikv.compat import flashinfer

pytestmark = pytest.mark.thorough


def space(arch):
    return placed(np.zeros(8, np.uint8), arch)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize(("width", "width_v"), [(192, 128), (448, 256), (40, 24)])
def test_widths_of_keys_and_values(arch, rng, width, width_v):
    """Those of DeepSeek's prompts, the widest ones, and odd multiples of 8."""
    case = {"causal": True, "softcap": 3.0}
    (q, k, v), starts, of_keys, _ = requests_of(rng, 1, 2, width, width_v, counts=(3, 0, 17), lengths=(9, 4, 23))
    options = {"causal": True, "logits_soft_cap": 3.0, "q_data_type": "float32"}
    rows = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space(arch))
    rows.plan(placed(starts, arch), placed(of_keys, arch), 2, 1, width, width_v, **options)
    out, lse = rows.run_return_lse(*(placed(a, arch) for a in (q, k, v)))
    compared(out, lse, q, k, v, starts, of_keys, case)
    state = rng.bit_generator.state
    k_pages, *table = paged(rng, k, k, of_keys, 8, "NHD")
    rng.bit_generator.state = state  # so that both have their tokens in the same pages
    v_pages, *_ = paged(rng, v, v, of_keys, 8, "NHD")
    pages = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch))
    pages.plan(*(placed(a, arch) for a in (starts, *table)), 2, 1, width, 8, width_v, **options)
    pools = tuple(placed(a[:, 0], arch) for a in (k_pages, v_pages))
    compared(*pages.run_return_lse(placed(q, arch), pools), q, k, v, starts, of_keys, case)


@pytest.mark.parametrize(("heads", "group", "page"), [(4, 7, 3), (2, 3, 7), (1, 12, 3)])
def test_groups_and_pages_of_odd_sizes(arch, rng, heads, group, page):
    case = {"causal": True, "window": 20}
    (q, k, v), starts, of_keys, _ = requests_of(rng, heads, group, 32, counts=(17, 1, 37), lengths=(97, 54, 38))
    cache, *table = paged(rng, k, v, of_keys, page, "HND")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch), "HND")
    table = [placed(a, arch) for a in (starts, *table)]
    wrapper.plan(*table, heads * group, heads, 32, page, causal=True, window_left=20, q_data_type="float32")
    compared(*wrapper.run_return_lse(placed(q, arch), placed(cache, arch)), q, k, v, starts, of_keys, case)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("decode", [False, True], ids=["prompts", "decode"])
def test_arrays_with_gaps(arch, rng, decode, layout):
    """Queries that are columns of a projection, and pools of K and V that are parts of two wider arrays."""
    counts = (1, 1, 1) if decode else (5, 0, 9)
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32, counts=counts, lengths=(9, 4, 23))
    cache, *table = paged(rng, k, v, of_keys, 5, layout)
    wide_q = placed(rng.standard_normal((len(q), 8, 32)).astype(np.float32), arch)
    wide_k = placed(rng.standard_normal((*cache.shape[:1], *cache.shape[2:4], 48)).astype(np.float32), arch)
    wide_v = placed(rng.standard_normal((2 * len(cache), *cache.shape[2:])).astype(np.float32), arch)
    wide_q[:, 2:6] = placed(q, arch)
    wide_k[..., 8:40] = placed(cache[:, 0], arch)
    wide_v[::2] = placed(cache[:, 1], arch)
    pools = (wide_k[..., 8:40], wide_v[::2])
    table = [placed(a, arch) for a in table]
    if decode:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space(arch), layout)
        wrapper.plan(*table, 4, 2, 32, 5, q_data_type="float32")
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch), layout)
        wrapper.plan(placed(starts, arch), *table, 4, 2, 32, 5, causal=True, q_data_type="float32")
    out, lse = wrapper.run_return_lse(wide_q[:, 2:6], pools)
    compared(out, lse, q, k, v, starts, of_keys, {"causal": not decode})


@pytest.mark.parametrize("packed", [False, True], ids=["bool", "packed"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA"])
def test_masks_with_one_key_and_with_none(arch, rng, packed, mode):
    """A query that sees one key gives its value; one that sees none gives 0 and -inf, beside others that see some."""
    (q, k, v), starts, of_keys, masks = requests_of(rng, 2, 2, 32, counts=(4, 3, 9), lengths=(9, 20, 33))
    for mask in masks:
        mask[0], mask[1] = False, np.arange(mask.shape[1]) == mask.shape[1] // 2
    masks[1][:] = False
    flat = [np.packbits(m.ravel(), bitorder="little") if packed else m.ravel() for m in masks]
    name = "packed_custom_mask" if packed else "custom_mask"
    options = {name: placed(np.concatenate(flat), arch), "pos_encoding_mode": mode, "q_data_type": "float32"}
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch))
    wrapper.plan(*(placed(a, arch) for a in (starts, *table)), 4, 2, 32, 5, **options)
    out, lse = wrapper.run_return_lse(placed(q, arch), placed(cache, arch))
    compared(out, lse, q, k, v, starts, of_keys, {"mask": True, "mode": mode}, masks)
    hidden = [int(starts[0]), *range(starts[1], starts[2]), int(starts[2])]
    assert (values(out)[hidden] == 0).all()
    assert (values(lse)[hidden] == -np.inf).all()
    for b in (0, 2):
        seen = np.repeat(v[of_keys[b] + masks[b].shape[1] // 2], 2, axis=0)
        np.testing.assert_allclose(values(out)[starts[b] + 1], seen, rtol=0, atol=1e-6)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("each", [2, 4, 7])
def test_several_drafted_tokens_decode_as_prompts_do(arch, rng, each):
    """The decode wrapper with `q_len_per_req`, and the wrapper of prompts over the same pages: the same bits."""
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 4, 64, counts=(each,) * 5, lengths=(9, 8, 97, 54, 33))
    cache, *table = paged(rng, k, v, of_keys, 16, "NHD")
    table = [placed(a, arch) for a in table]
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space(arch), use_tensor_cores=True)
    decode.plan(*table, 8, 2, 64, 16, q_data_type="float32", q_len_per_req=each, window_left=30)
    prompts = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch))
    options = {"causal": True, "window_left": 30, "q_data_type": "float32", "uniform_q_len": each}
    prompts.plan(placed(starts, arch), *table, 8, 2, 64, 16, **options)
    results = [w.run_return_lse(placed(q, arch), placed(cache, arch)) for w in (decode, prompts)]
    compared(*results[0], q, k, v, starts, of_keys, {"causal": True, "window": 30})
    for a, b in zip(*results, strict=True):
        oracle.assert_same_bits(oracle.to_numpy(a), oracle.to_numpy(b))


@pytest.mark.archs("cpu", "cuda")
def test_room_for_more_queries_than_the_first_plan(arch, rng):
    """With `max_total_num_rows`, a wrapper for graphs may be planned for few queries first."""
    pytest.importorskip("torch")
    buffers = [placed(np.zeros(n, np.int32), arch) for n in (3, 3, 30, 2)]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    of_buffers = dict(zip(names, buffers, strict=True))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        space(arch), use_cuda_graph=True, max_total_num_rows=20, **of_buffers
    )
    for counts, lengths in (((1, 2), (9, 4)), ((8, 12), (33, 15)), ((0, 5), (1, 7))):
        (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32, counts=counts, lengths=lengths)
        cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
        wrapper.plan(*(placed(a, arch) for a in (starts, *table)), 4, 2, 32, 5, causal=True, q_data_type="float32")
        out, lse = wrapper.run_return_lse(placed(q, arch), placed(cache, arch))
        compared(out, lse, q, k, v, starts, of_keys, {"causal": True})
    many = np.array([0, 1, 22], np.int32)
    with pytest.raises(tikv.TikvError, match="22 queries, and there is room for 20"):
        wrapper.plan(*(placed(a, arch) for a in (many, *table)), 4, 2, 32, 5, causal=True, q_data_type="float32")
    with pytest.raises(tikv.TikvError, match="max_total_num_rows=20 needs use_cuda_graph=True"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(space(arch), max_total_num_rows=20)
