"""Wrappers made for CUDA graphs: a later plan changes what a captured run reads; on a CPU, a run after another plan."""

import numpy as np
import pytest
from flashinfer_by_definition import attention
from test_flashinfer_wrappers import paged, placed, requests_of, values

import tikv
from tikv.compat import flashinfer

FIRST = ((3, 1, 4), (9, 4, 6))
LATER = (((1, 1, 2), (20, 4, 2)), ((4, 0, 4), (5, 3, 23)), FIRST)
DECODED = ((9, 4, 6), (20, 0, 1), (1, 30, 2), (9, 4, 6))


def buffers(arch, *extents):
    return [placed(np.zeros(n, np.int32), arch) for n in extents]


class Replayed:
    """Runs of one wrapper: on CUDA one capture, which each call replays; elsewhere a run in each call."""

    def __init__(self, arch, run):
        self.run, self.graph = run, None
        if arch != "cuda":
            return
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = run()

    def __call__(self):
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.results


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("mode", ["NONE", "ALIBI", "ROPE_LLAMA"])
def test_decode(arch, rng, mode):
    pytest.importorskip("torch")
    of_buffers = buffers(arch, 4, 12, 3)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(buffers(arch, 8)[0], *of_buffers)
    assert wrapper.is_cuda_graph_enabled
    cache = placed(rng.standard_normal((20, 2, 5, 2, 32)).astype(np.float32), arch)
    q, replayed = placed(rng.standard_normal((3, 8, 32)).astype(np.float32), arch), None
    for lengths in DECODED:
        counts = -(-np.array(lengths) // 5)
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        indices = rng.permutation(20)[: indptr[-1]].astype(np.int32)
        last = np.where(counts > 0, (np.array(lengths) - 1) % 5 + 1, 0).astype(np.int32)
        table = [placed(a, arch) for a in (indptr, indices, last)]
        wrapper.plan(*table, 8, 2, 32, 5, pos_encoding_mode=mode, q_data_type="float32")
        for buffer, a in zip(of_buffers, (indptr, indices, last), strict=True):
            np.testing.assert_array_equal(values(buffer)[: len(a)], a)
        replayed = replayed or Replayed(arch, lambda: wrapper.run(q, cache, return_lse=True))
        q.copy_(placed(rng.standard_normal((3, 8, 32)).astype(np.float32), arch))
        out, lse = (values(a) for a in replayed())
        pools = values(cache).astype(np.float32)
        for b, n in enumerate(lengths):
            k, v = (pools[indices[indptr[b] : indptr[b + 1]], i].reshape(-1, 2, 32)[:n] for i in range(2))
            want, want_lse = attention(values(q).astype(np.float32)[b : b + 1], k, v, mode=mode)
            np.testing.assert_allclose(out[b], want[0], rtol=0, atol=3e-6)
            np.testing.assert_allclose(lse[b], want_lse[0], rtol=0, atol=2e-5)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("case", [{"causal": True}, {"window": 3}, {"mode": "ALIBI"}, {"mode": "ROPE_LLAMA"}], ids=str)
@pytest.mark.parametrize("of_pages", [True, False], ids=["pages", "rows"])
def test_prefill(arch, rng, of_pages, case):
    pytest.importorskip("torch")
    if case.get("mode") == "ROPE_LLAMA" and not of_pages:
        pytest.skip("is refused")
    space = buffers(arch, 8)[0]
    if of_pages:
        names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        of_buffers = dict(zip(names, buffers(arch, 4, 4, 12, 3), strict=True))
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, use_cuda_graph=True, **of_buffers)
    else:
        of_buffers = dict(zip(("qo_indptr_buf", "kv_indptr_buf"), buffers(arch, 4, 4), strict=True))
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, use_cuda_graph=True, **of_buffers)
    options = {"causal": case.get("causal", False), "window_left": case.get("window", -1)}
    options |= {"pos_encoding_mode": case.get("mode", "NONE"), "q_data_type": "float32"}
    asked = placed(np.zeros((8, 4, 32), np.float32), arch)
    caches = [placed(np.zeros((16, 2, 5, 2, 32) if of_pages else (40, 2, 32), np.float32), arch) for _ in "kv"]
    caches, replayed = caches[: 1 if of_pages else 2], None
    for counts, lengths in (FIRST, *LATER):
        (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32, counts=counts, lengths=lengths)
        asked[: len(q)] = placed(q, arch)
        if of_pages:
            cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
            caches[0][: len(cache)] = placed(cache, arch)
            wrapper.plan(*(placed(a, arch) for a in (starts, *table)), 4, 2, 32, 5, **options)
        else:
            for cache, a in zip(caches, (k, v), strict=True):
                cache[: len(a)] = placed(a, arch)
            wrapper.plan(placed(starts, arch), placed(of_keys, arch), 4, 2, 32, **options)
        if arch == "cuda":
            replayed = replayed or Replayed(arch, lambda: wrapper.run(asked, *caches, return_lse=True))
            out, lse = replayed()
        else:
            out, lse = wrapper.run(asked[: len(q)], *caches, return_lse=True)
        for b in range(3):
            rows, keys = slice(*starts[b : b + 2]), slice(*of_keys[b : b + 2])
            want, want_lse = attention(q[rows], k[keys], v[keys], **case)
            np.testing.assert_allclose(values(out)[rows], want, rtol=0, atol=3e-6)
            np.testing.assert_allclose(values(lse)[rows], want_lse, rtol=0, atol=2e-5)


@pytest.mark.archs("cpu", "cuda")
def test_latent_attention(arch, rng):
    pytest.importorskip("torch")
    names, widths = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), (48, 16)
    of_buffers = dict(zip(names, buffers(arch, 4, 4, 12, 3), strict=True))
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffers(arch, 8)[0], use_cuda_graph=True, **of_buffers)
    cache = placed(rng.standard_normal((16, 5, 64)).astype(np.float32), arch)
    q, replayed = placed(rng.standard_normal((3, 8, 64)).astype(np.float32), arch), None
    parts = [q[..., :48], q[..., 48:], cache[..., :48], cache[..., 48:]]
    for lengths in DECODED:
        indptr = np.cumsum([0, *(-(-np.array(lengths) // 5))]).astype(np.int32)
        indices = rng.permutation(16)[: indptr[-1]].astype(np.int32)
        table = [placed(a, arch) for a in (np.arange(4, dtype=np.int32), indptr, indices, np.array(lengths, np.int32))]
        wrapper.plan(*table, 8, *widths, 5, False, 0.2, "float32", "float32")
        replayed = replayed or Replayed(arch, lambda: wrapper.run(*parts))
        out = values(replayed())
        for b, n in enumerate(lengths):
            keys = values(cache)[indices[indptr[b] : indptr[b + 1]]].reshape(-1, 1, 64)[:n]
            want, _ = attention(values(q)[b : b + 1], keys, keys[..., :48], scale=0.2)
            np.testing.assert_allclose(out[b], want[0], rtol=0, atol=3e-6)
    with pytest.raises(tikv.OptionError, match="adjacent columns"):
        wrapper.run(*parts[:2], parts[2].clone(), parts[3].clone())


@pytest.mark.archs("cpu", "cuda")
def test_a_captured_run_without_buffers(arch, rng):
    """A wrapper as such may be captured too: its plan stays the same."""
    pytest.importorskip("torch")
    (q, k, v), starts, of_keys, _ = requests_of(rng, 2, 2, 32)
    cache, *table = paged(rng, k, v, of_keys, 5, "NHD")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(buffers(arch, 8)[0])
    wrapper.plan(*(placed(a, arch) for a in (starts, *table)), 4, 2, 32, 5, causal=True, q_data_type="float32")
    asked, cache = placed(q * 0, arch), placed(cache, arch)
    replayed = Replayed(arch, lambda: wrapper.run(asked, cache))
    asked.copy_(placed(q, arch))
    out = values(replayed())
    for b in range(len(starts) - 1):
        rows, keys = slice(*starts[b : b + 2]), slice(*of_keys[b : b + 2])
        want, _ = attention(q[rows], k[keys], v[keys], causal=True)
        np.testing.assert_allclose(out[rows], want, rtol=0, atol=3e-6)


@pytest.mark.archs("cpu")
def test_what_graphs_refuse(arch):
    """A plan that a captured run could not follow, before a buffer is written."""
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    of_buffers = dict(zip(names, (np.zeros(3, np.int32), np.zeros(4, np.int32), np.zeros(2, np.int32)), strict=True))
    space = np.zeros(8, np.uint8)
    for name in names:
        with pytest.raises(tikv.OptionError, match=f"needs {name}"):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, use_cuda_graph=True, **of_buffers | {name: None})
        with pytest.raises(tikv.DTypeError, match=name):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                space, use_cuda_graph=True, **of_buffers | {name: np.zeros(9, np.float32)}
            )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, use_cuda_graph=True, **of_buffers)
    plan = {
        "indptr": np.array([0, 1, 3]),
        "indices": np.array([2, 0, 1]),
        "last_page_len": np.array([3, 2]),
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 4,
        "q_data_type": "float32",
    }
    wrapper.plan(**plan)
    before = [a.copy() for a in of_buffers.values()]
    for change, words in (
        ({"indptr": np.array([0, 1]), "last_page_len": np.array([3])}, "paged_kv_indptr_buffer has 3 entries"),
        ({"indices": np.arange(5)}, "paged_kv_indices_buffer has 4 entries"),
        ({"window_left": 3}, "options are not those of the first plan"),
        ({"page_size": 8}, "options are not those of the first plan"),
        ({"q_data_type": "float16"}, "options are not those of the first plan"),
        ({"q_len_per_req": 2}, "options are not those|there is room for 2"),
    ):
        with pytest.raises(tikv.TikvError, match=words):
            wrapper.plan(**plan | change)
        for a, b in zip(of_buffers.values(), before, strict=True):
            np.testing.assert_array_equal(a, b)
    rows = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        space, use_cuda_graph=True, qo_indptr_buf=np.zeros(2, np.int32), kv_indptr_buf=np.zeros(2, np.int32)
    )
    heads = (4, 2, 16)
    for options, words in (
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "ROPE_LLAMA"),
        ({"pos_encoding_mode": "ALIBI", "window_left": 3}, "ALIBI"),
        ({"custom_mask": np.ones(6, bool)}, "a mask"),
    ):
        with pytest.raises(tikv.OptionError, match=words):
            rows.plan(np.array([0, 2]), np.array([0, 3]), *heads, **options)
    with pytest.raises(tikv.CapacityError, match="no queries"):
        rows.plan(np.array([0, 0]), np.array([0, 3]), *heads)
    rows.plan(np.array([0, 2]), np.array([0, 3]), *heads)
    with pytest.raises(tikv.CapacityError, match="3 queries, and there is room for 2"):
        rows.plan(np.array([0, 3]), np.array([0, 3]), *heads)
