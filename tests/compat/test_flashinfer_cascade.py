"""FlashInfer's wrappers over parts of a context that requests share: as attention over each request's whole context."""

import numpy as np
import oracle
import pytest
from flashinfer_by_definition import attention
from test_flashinfer_graphs import Replayed
from test_flashinfer_wrappers import ATOL, placed, values

import tikv
from tikv.compat import flashinfer

pytestmark = pytest.mark.thorough

BUFFERS = ("qo_indptr_buf_arr", "paged_kv_indptr_buf_arr", "paged_kv_indices_buf_arr", "paged_kv_last_page_len_buf_arr")


def levels_of(rng, counts, lengths, page):
    """(arrays of a plan for each level, pages in use): `lengths` of the parts of each level, whole pages but the last.

    On the first level all requests share one part, on the second the first two and the others; on the last none.
    """
    groups = [[len(counts)], [2, len(counts) - 2], [1] * len(counts)]
    groups = [groups[0], groups[-1]] if len(lengths) == 2 else groups
    starts, first, levels = np.cumsum([0, *counts]), 0, []
    free = rng.permutation(sum(-(-n // page) for parts in lengths for n in parts) + 3)
    for group, parts in zip(groups, lengths, strict=True):
        queries = starts[np.cumsum([0, *group])]
        pages = -(-np.array(parts) // page)
        indptr = np.cumsum([0, *pages])
        last = np.where(pages > 0, (np.array(parts) - 1) % page + 1, 0)
        levels.append([queries, indptr, free[first : first + indptr[-1]], last])
        first += indptr[-1]
    return [[a.astype(np.int32) for a in level] for level in levels], groups, free.size


def contexts(levels, groups, pools, page, layout):
    """The keys and values of each request, over all levels, and how many of them are the request's own."""
    pools = [np.swapaxes(a, 1, 2) if layout == "HND" else a for a in pools]
    whole = []
    for b in range(len(groups[-1])):
        parts = []
        for (_, indptr, indices, last), group in zip(levels, groups, strict=True):
            part = int(np.searchsorted(np.cumsum(group), b, side="right"))
            pages = indices[indptr[part] : indptr[part + 1]]
            n = max(0, len(pages) - 1) * page + last[part]
            parts.append([a[pages].reshape(-1, *a.shape[2:])[:n] for a in pools])
        whole.append([np.concatenate([p[i] for p in parts]) for i in range(2)] + [len(parts[-1][0])])
    return whole


def compared(out, q, starts, whole, causal, dtype="float32", softcap=0.0):
    for b, (k, v, last) in enumerate(whole):
        rows, n = slice(*starts[b : b + 2]), starts[b + 1] - starts[b]
        seen = np.arange(len(k)) < len(k) - last
        seen = seen | (np.arange(len(k)) <= np.arange(len(k) - n, len(k))[:, None]) | (not causal)
        want, _ = attention(q[rows], k, v, mask=seen, softcap=softcap)
        np.testing.assert_allclose(values(out)[rows], want, rtol=0, atol=2 * ATOL[dtype])


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize(("page", "layout"), [(1, "NHD"), (5, "HND"), (16, "NHD")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[(37,), (17, 3, 9, 5)], [(16,), (11, 32), (17, 3, 9, 5)]], ids=["two", "three"])
def test_levels_are_merged(arch, rng, lengths, causal, page, layout):
    """Also levels whose last page is not full, and a request without queries."""
    counts = (3, 0, 9, 5)
    levels, groups, blocks = levels_of(rng, counts, lengths, page)
    shape = (blocks, page, 2, 32) if layout == "NHD" else (blocks, 2, page, 32)
    pools = [rng.standard_normal(shape).astype(np.float32) for _ in "kv"]
    starts = np.cumsum([0, *counts])
    q = rng.standard_normal((starts[-1], 4, 32)).astype(np.float32)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(lengths), placed(np.zeros(8, np.uint8), arch), layout)
    assert not wrapper.is_cuda_graph_enabled
    tables = [[placed(a, arch) for a in arrays] for arrays in zip(*levels, strict=True)]
    wrapper.plan(*tables, 4, 2, 32, page, causal=causal, logits_soft_cap=4.0, q_data_type="float32")
    cache = tuple(placed(a, arch) for a in pools)
    out = wrapper.run(placed(q, arch), cache)
    compared(out, q, starts, contexts(levels, groups, pools, page, layout), causal, softcap=4.0)
    both = placed(np.stack(pools, 1), arch)
    oracle.assert_same_bits(oracle.to_numpy(wrapper.forward(placed(q, arch), both)), oracle.to_numpy(out))


@pytest.mark.archs("cpu", "cuda")
def test_levels_of_a_later_plan_with_graphs(arch, rng):
    """The same buffers, and plans that need less than the first one; on CUDA one capture follows them."""
    pytest.importorskip("torch")
    counts, page = (2, 2, 2, 2), 4
    arrays = [[placed(np.zeros(n, np.int32), arch) for n in (parts + 1, parts + 1, 40, parts)] for parts in (1, 4)]
    buffers = dict(zip(BUFFERS, zip(*arrays, strict=True), strict=True))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
        2, placed(np.zeros(8, np.uint8), arch), use_cuda_graph=True, **{name: list(a) for name, a in buffers.items()}
    )
    assert wrapper.is_cuda_graph_enabled
    starts = np.cumsum([0, *counts])
    pools = [rng.standard_normal((48, page, 2, 32)).astype(np.float32) for _ in "kv"]
    cache, replayed = tuple(placed(a, arch) for a in pools), None
    asked = placed(np.zeros((starts[-1], 4, 32), np.float32), arch)
    for lengths in ([(37,), (17, 3, 9, 5)], [(8,), (2, 30, 4, 7)]):
        levels, groups, _ = levels_of(rng, counts, lengths, page)
        q = rng.standard_normal((starts[-1], 4, 32)).astype(np.float32)
        asked.copy_(placed(q, arch))
        tables = [[placed(a, arch) for a in table] for table in zip(*levels, strict=True)]
        wrapper.plan(*tables, 4, 2, 32, page, causal=True, q_data_type="float32")
        replayed = replayed or Replayed(arch, lambda: wrapper.run(asked, cache))
        compared(replayed(), q, starts, contexts(levels, groups, pools, page, "NHD"), True)
        for buffer, a in zip(buffers["paged_kv_indptr_buf_arr"], levels, strict=True):
            np.testing.assert_array_equal(values(buffer), a[1])


@pytest.mark.full("vulkan", each_value=True)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stage", ["decode", "append", "append-causal"])
def test_a_prefix_in_rows(arch, rng, stage, layout):
    """The wrappers that FlashInfer had before its levels."""
    pytest.importorskip("torch")
    counts = (1, 1, 1, 1) if stage == "decode" else (3, 0, 9, 5)
    levels, groups, blocks = levels_of(rng, counts, [(32,), (17, 3, 9, 5)], 16)
    pools = [
        values(placed(rng.standard_normal((blocks, 16, 2, 64)).astype(np.float32), "cpu", "float16")) for _ in "kv"
    ]
    starts = np.cumsum([0, *counts])
    q = values(placed(rng.standard_normal((starts[-1], 4, 64)).astype(np.float32), "cpu", "float16"))
    whole = contexts(levels, groups, pools, 16, "NHD")
    prefix = [a[:32] for a in whole[0][:2]]
    kind = "Decode" if stage == "decode" else "Prefill"
    name = f"Batch{kind}WithSharedPrefixPagedKVCacheWrapper"
    wrapper = getattr(flashinfer, name)(placed(np.zeros(8, np.uint8), arch), layout)
    queries, *table = (placed(a, arch) for a in levels[-1])
    wrapper.begin_forward(*table if stage == "decode" else (queries, *table), 4, 2, 64, 16)
    if layout == "HND":
        pools, prefix = [a.swapaxes(1, 2) for a in pools], [a.swapaxes(0, 1) for a in prefix]
    arrays = [placed(a, arch, "float16") for a in (q, *prefix)]
    cache = tuple(placed(a, arch, "float16") for a in pools)
    options = {"causal": True} if stage == "append-causal" else {}
    out = wrapper.forward(*arrays, cache, **options)
    assert out.dtype == arrays[0].dtype
    compared(out, q, starts, whole, bool(options), "float16")
    wrapper.end_forward()


@pytest.mark.archs("cpu")
def test_what_is_refused(arch, rng):
    space = np.zeros(8, np.uint8)
    with pytest.raises(tikv.TikvError, match="num_levels"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, space)
    for name in BUFFERS:
        with pytest.raises(tikv.OptionError, match=f"{name} needs use_cuda_graph=True"):
            flashinfer.MultiLevelCascadeAttentionWrapper(1, space, **{name: [space]})
    with pytest.raises(tikv.ShapeError, match="qo_indptr_buf_arr is NoneType"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, space, use_cuda_graph=True)
    counts = (2, 1, 1, 1)
    levels, _, blocks = levels_of(rng, counts, [(8,), (5, 3, 2, 4)], 4)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, space)
    q, cache = np.ones((5, 4, 16), np.float32), (np.ones((blocks, 4, 2, 16), np.float32),) * 2
    with pytest.raises(tikv.OptionError, match="there is no plan yet"):
        wrapper.run(q, cache)
    tables = [list(a) for a in zip(*levels, strict=True)]
    wrapper.plan(*tables, 4, 2, 16, 4, q_data_type="float32")
    before = wrapper.run(q, cache)
    shorter = [[level[:-1] for level in tables[0]], *tables[1:]]
    for change, words in (
        ([tables[0][:1], *tables[1:]], "qo_indptr_arr is 1 arrays"),
        ([*tables[:3], tables[3][0]], "paged_kv_last_page_len is ndarray"),
        (shorter, "level 0: paged_kv_indptr has 2 entries"),
        ([*tables[:3], [tables[3][0], tables[3][1] * 9]], "level 1: paged_kv_last_page_len"),
    ):
        with pytest.raises(tikv.TikvError, match=words):
            wrapper.plan(*change, 4, 2, 16, 4, q_data_type="float32")
        oracle.assert_same_bits(wrapper.run(q, cache), before)  # the plans of all levels stay
    with pytest.raises(tikv.ShapeError, match="run of level 1: q is"):
        wrapper.run(q[1:], cache)
