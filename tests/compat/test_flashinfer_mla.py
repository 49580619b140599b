"""FlashInfer's latent attention by its definition."""

import numpy as np
import oracle
import pytest
from flashinfer_by_definition import attention
from test_flashinfer_wrappers import filled, placed, values

import tikv
from tikv.compat import flashinfer

CKV, KPE = 48, 16
COUNTS, LENGTHS = (1, 0, 5, 9, 2), (9, 4, 5, 27, 0)


def latent(rng, page, counts=COUNTS, lengths=LENGTHS, heads=8):
    """(q_nope, q_pe), pages (N, page, CKV + KPE), the arrays of a plan, and the rows of each request."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    q = rng.standard_normal((starts[-1], heads, CKV + KPE)).astype(np.float32)
    pages = -(-np.array(lengths) // page)
    indptr = np.cumsum([0, *pages]).astype(np.int32)
    indices = rng.permutation(indptr[-1] + 2)[: indptr[-1]].astype(np.int32)
    cache = rng.standard_normal((indptr[-1] + 2, page, CKV + KPE)).astype(np.float32)
    rows = [cache[indices[indptr[b] : indptr[b + 1]]].reshape(-1, CKV + KPE)[:n] for b, n in enumerate(lengths)]
    return q, cache, (starts, indptr, indices, np.array(lengths, np.int32)), rows


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page", [1, 5])
@pytest.mark.parametrize("adjacent", [False, True], ids=["apart", "adjacent"])
def test_latent_attention(arch, rng, adjacent, page, causal):
    q, cache, table, rows = latent(rng, page)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(placed(np.zeros(8, np.uint8), arch))
    table = (table[0], np.append(table[1], 0), *table[2:])  # the entry after the last request is not read
    wrapper.plan(*(placed(a, arch) for a in table), 8, CKV, KPE, page, causal, 0.2, "float32", "float32")
    parts = [placed(a, arch) for a in (q[..., :CKV], q[..., CKV:])]
    pages = placed(cache, arch)
    pools = [pages[..., :CKV], pages[..., CKV:]]
    if not adjacent:
        pools = [placed(a, arch) for a in (cache[..., :CKV], cache[..., CKV:])]
    out, lse = wrapper.run(*parts, *pools, return_lse=True)
    natural = wrapper.run(*parts, *pools, return_lse=True, return_lse_base_on_e=True)[1]
    for b in range(len(COUNTS)):
        of_queries, keys = slice(*table[0][b : b + 2]), rows[b][:, None]
        want, want_lse = attention(q[of_queries], keys, keys[..., :CKV], scale=0.2, causal=causal)
        np.testing.assert_allclose(values(out)[of_queries], want, rtol=0, atol=3e-6)
        np.testing.assert_allclose(values(lse)[of_queries], want_lse, rtol=0, atol=2e-5)
        np.testing.assert_allclose(values(natural)[of_queries], want_lse * np.log(2), rtol=0, atol=2e-5)
    to, to_lse = filled(out), filled(lse)
    assert wrapper.run(*parts, *pools, out=to, lse=to_lse) is to
    oracle.assert_same_bits(oracle.to_numpy(to), oracle.to_numpy(out))
    oracle.assert_same_bits(oracle.to_numpy(to_lse), oracle.to_numpy(lse))


def dense_of(table, page):
    """(cum_seq_lens_q, block_tables, seq_lens) of a plan's arrays; entries that no request has name no page."""
    starts, indptr, indices, lengths = table
    pages = np.full((len(lengths), np.diff(indptr).max() + 2), 999, np.int32)
    for b in range(len(lengths)):
        pages[b, : indptr[b + 1] - indptr[b]] = indices[indptr[b] : indptr[b + 1]]
    return starts, pages, lengths


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("form", ["csr", "dense", "arrays"])
@pytest.mark.parametrize("joint", [False, True], ids=["pair", "one"])
def test_the_form_of_newer_versions(arch, rng, joint, form):
    """Indices as metadata, queries and keys as one array or a pair, and sinks."""
    q, cache, table, rows = latent(rng, 5)
    sinks = rng.standard_normal(8).astype(np.float32)
    dense = [placed(a, arch) for a in dense_of(table, 5)]
    metadata = flashinfer.mla.MLAPlanMetadata.csr(*(placed(a, arch) for a in table))
    options = {"metadata": metadata}
    if form == "dense":
        options = {"metadata": flashinfer.mla.MLAPlanMetadata.dense(*dense, max_q_len=9)}
    elif form == "arrays":
        options = dict(zip(("cum_seq_lens_q", "block_tables", "seq_lens"), dense, strict=True))
    options |= {"num_heads": 8, "head_dim_ckv": CKV, "head_dim_kpe": KPE, "page_size": 5, "causal": True}
    options |= {"sm_scale": 0.2, "q_data_type": "float32", "kv_data_type": "float32", "lse_mode": "base2"}
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(placed(np.zeros(8, np.uint8), arch))
    wrapper.plan(**options, use_sinks=True, query_layout="packed")
    arrays = {"query": placed(q, arch), "kv_cache": placed(cache, arch)}
    if not joint:
        arrays = {name: (a[..., :CKV], a[..., CKV:]) for name, a in arrays.items()}
    out, lse = (values(a) for a in wrapper.run(**arrays, sinks=placed(sinks, arch), return_lse=True))
    for b in range(len(COUNTS)):
        of_queries, keys = slice(*table[0][b : b + 2]), rows[b][:, None]
        want, want_lse = attention(q[of_queries], keys, keys[..., :CKV], scale=0.2, causal=True)
        with_sink = np.logaddexp2(want_lse, sinks * np.log2(np.e))
        np.testing.assert_allclose(out[of_queries], want * np.exp2(want_lse - with_sink)[..., None], rtol=0, atol=3e-6)
        np.testing.assert_allclose(lse[of_queries], with_sink, rtol=0, atol=2e-5)
    with pytest.raises(tikv.OptionError, match="sinks are missing, and the plan has use_sinks=True"):
        wrapper.run(**arrays)


@pytest.mark.parametrize("adjacent", [False, True], ids=["apart", "adjacent"])
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_appended_keys(arch, rng, adjacent, on_host):
    """Both parts of each new token in its page; every other bit stays."""
    _, cache, (_, indptr, indices, lengths), _ = latent(rng, 5)
    new = np.minimum(lengths, (3, 4, 0, 9, 0))
    batch = np.append(np.repeat(np.arange(5), new), -1).astype(np.int32)
    spans = [np.arange(n - t, n) for n, t in zip(lengths, new, strict=True)]
    positions = np.append(np.concatenate(spans), 0).astype(np.int32)
    rows = rng.standard_normal((len(batch), CKV + KPE)).astype(np.float32)
    want = cache.copy()
    for t in range(len(batch) - 1):
        want[indices[indptr[batch[t]] + positions[t] // 5], positions[t] % 5] = rows[t]
    pages = placed(cache.copy(), arch)
    pools = [pages[..., :CKV], pages[..., CKV:]]
    if not adjacent:
        pools = [placed(np.ascontiguousarray(a), arch) for a in (cache[..., :CKV], cache[..., CKV:])]
    last = ((lengths - 1) % 5 + 1).astype(np.int32)
    index = [placed(a, "cpu" if on_host else arch) for a in (batch, positions, indices, indptr, last)]
    parts = [placed(np.ascontiguousarray(a), arch) for a in (rows[:, :CKV], rows[:, CKV:])]
    flashinfer.append_paged_mla_kv_cache(*parts, *index[:2], *pools, *index[2:])
    oracle.assert_same_bits(np.concatenate([oracle.to_numpy(a) for a in pools], -1), want)
    with pytest.raises(tikv.ShapeError, match="append_ckv"):
        flashinfer.append_paged_mla_kv_cache(parts[0][:, None], parts[1], *index[:2], *pools, *index[2:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decode_of_deepseek_sizes(arch, rng, dtype):
    """The widths of DeepSeek's models, one query for each request, without rotated columns too."""
    pytest.importorskip("torch")
    lengths = (33, 1, 70)
    for width, beside in ((512, 64), (512, 0)):
        q, ckv = rng.standard_normal((3, 16, width + beside)), rng.standard_normal((8, 16, width + beside))
        q, ckv = (values(placed(a.astype(np.float32), "cpu", dtype)).astype(np.float32) for a in (q, ckv))
        indptr, indices = np.array([0, 3, 4, 9]), np.array([7, 0, 3, 5, 1, 2, 4, 6, 6])
        table = [placed(a, arch) for a in (np.arange(4), indptr, indices, np.array(lengths))]
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(placed(np.zeros(8, np.uint8), arch))
        wrapper.plan(*table, 16, width, beside, 16, False, 192**-0.5, dtype, dtype)
        parts = [placed(a, arch, dtype) for a in (q[..., :width], q[..., width:], ckv[..., :width], ckv[..., width:])]
        out, lse = wrapper.run_return_lse(*parts)
        for b, n in enumerate(lengths):
            keys = ckv[indices[indptr[b] : indptr[b + 1]]].reshape(-1, 1, width + beside)[:n]
            want, want_lse = attention(q[b : b + 1], keys, keys[..., :width], scale=192**-0.5)
            np.testing.assert_allclose(values(out)[b], want[0], rtol=0, atol=2e-3 if dtype == "float16" else 1.6e-2)
            np.testing.assert_allclose(values(lse)[b], want_lse[0], rtol=0, atol=1e-2)


def test_tokens_after_the_end_are_not_read(arch, rng):
    q, cache, table, _ = latent(rng, 16)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(placed(np.zeros(8, np.uint8), arch))
    wrapper.plan(*(placed(a, arch) for a in table), 8, CKV, KPE, 16, True, 0.2, "float32", "float32")
    outs = []
    for filler in (0, np.nan):
        filled = np.full_like(cache, filler)
        for b, n in enumerate(LENGTHS):
            for p in range(n):
                page = table[2][table[1][b] + p // 16]
                filled[page, p % 16] = cache[page, p % 16]
        parts = (q[..., :CKV], q[..., CKV:], filled[..., :CKV], filled[..., CKV:])
        outs.append(oracle.to_numpy(wrapper.run(*(placed(a, arch) for a in parts))))
    oracle.assert_same_bits(*outs)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("plan", {"sm_scale": None}, "sm_scale=None"),
        ("plan", {"kv_data_type": "float8_e4m3fn"}, "kv_data_type=float8_e4m3fn is not supported"),
        ("plan", {"use_profiler": True}, "use_profiler=True"),
        ("plan", {"kv_len_arr": np.array([3, 9])}, r"kv_len_arr\[1\]=9; it must be from 0 to the tokens"),
        ("plan", {"kv_indptr": np.array([0, 1])}, "kv_indptr has 2 entries"),
        ("plan", {"kv_indptr": 3}, "kv_indptr"),
        ("plan", {"head_dim_kpe": -1}, "head_dim_kpe"),
        ("plan", {"num_heads": None}, "num_heads"),
        ("plan", {"page_size": None}, "page_size"),
        ("plan", {"causal": None}, "causal=None"),
        ("plan", {"q_data_type": None}, "q_data_type=None"),
        ("plan", {"qo_indptr": None}, "qo_indptr is missing"),
        ("plan", {"seq_lens": np.array([3, 6])}, "two descriptions of the pages"),
        ("plan", {"metadata": flashinfer.mla.MLAPlanMetadata()}, "metadata and arrays of indices are both given"),
        ("plan", {"metadata": 3} | dict.fromkeys(flashinfer.mla.CSR), "metadata is int"),
        ("plan", {"max_q_len": 1.5}, "max_q_len"),
        ("plan", {"lse_mode": "base10"}, "lse_mode='base10'"),
        ("plan", {"query_layout": "joint"}, "query_layout='joint'"),
        ("plan", {"kv_cache_layout": "joint"}, "kv_cache_layout='joint'"),
        ("plan", {"output_scale": "per-tensor"}, "output_scale='per-tensor'"),
        ("plan", {"scale_mode": "bmm-scalar"}, "scale_mode='bmm-scalar'"),
        ("plan", {"output_dtype": "float16"}, "output_dtype=float16"),
        ("plan", {"skip_softmax": True}, "skip_softmax=True"),
        ("plan", {"use_sinks": 3}, "use_sinks=3"),
        ("run", {"sinks": np.ones(4, np.float32)}, "sinks are passed, and the plan has use_sinks=False"),
        ("run", {"bmm1_scale": 1.0}, "bmm1_scale=1.0 is not supported"),
        ("run", {"bmm2_scale": 1.0}, "bmm2_scale=1.0 is not supported"),
        ("run", {"query": np.ones((2, 4, 12), np.float32)}, "query and q_nope are both given"),
        ("run", {"q_pe": None}, "q_pe is missing. Pass query, or q_nope and q_pe"),
        ("run", {"ckv_cache": None, "kpe_cache": None, "kv_cache": (1, (2, 3))}, "kv_cache has 2 parts"),
        ("run", {"q_pe": np.ones((2, 4, 3), np.float32)}, r"q_pe \(2, 4, 3\); the plan needs the widths 8 and 4"),
        ("run", {"kpe_cache": np.ones((2, 4, 4), np.float32)}, r"kpe_cache \(2, 4, 4\)"),
        ("run", {"kpe_cache": np.ones((3, 4, 4), np.float16)}, "both need one dtype"),
        ("run", {"ckv_cache": np.ones((3, 4, 8), np.float16)}, "kv_data_type=float32"),
        ("run", {"q_nope": np.ones((3, 4, 8), np.float32), "q_pe": np.ones((3, 4, 4), np.float32)}, "q is "),
        ("run", {"ckv_scale": 1.0}, "ckv_scale=1.0 is not supported"),
        ("run", {"page_table": np.ones((2, 2))}, "page_table is not supported"),
        ("run", {"out": np.ones((2, 4, 12), np.float32)}, "out is"),
        (
            "run",
            {"ckv_cache": np.ones((2, 4, 8), np.float32), "kpe_cache": np.ones((2, 4, 4), np.float32)},
            "needs page 2, but there are 2",
        ),
    ],
)
def test_what_is_refused(arch, method, change, words):
    plan = {
        "qo_indptr": np.array([0, 1, 2]),
        "kv_indptr": np.array([0, 1, 3]),
        "kv_indices": np.array([2, 0, 1]),
        "kv_len_arr": np.array([3, 6]),
        "num_heads": 4,
        "head_dim_ckv": 8,
        "head_dim_kpe": 4,
        "page_size": 4,
        "causal": False,
        "sm_scale": 0.5,
        "q_data_type": "float32",
        "kv_data_type": "float32",
    }
    run = {
        "q_nope": np.ones((2, 4, 8), np.float32),
        "q_pe": np.ones((2, 4, 4), np.float32),
        "ckv_cache": np.ones((3, 4, 8), np.float32),
        "kpe_cache": np.ones((3, 4, 4), np.float32),
        "out": np.ones((2, 4, 8), np.float32),
        "lse": np.ones((2, 4), np.float32),
    }
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(np.zeros(8, np.uint8))
    wrapper.plan(**plan)
    arguments = (plan if method == "plan" else run) | change
    with pytest.raises(tikv.TikvError, match=words):
        getattr(wrapper, method)(**arguments)
    if method == "run":
        assert (arguments["out"] == 1).all()
        assert (arguments["lse"] == 1).all()
    wrapper.run(**run)


@pytest.mark.archs("cpu")
def test_what_the_constructor_refuses(arch):
    for option in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "use_cuda_graph"):
        with pytest.raises(tikv.OptionError, match=option):
            flashinfer.mla.BatchMLAPagedAttentionWrapper(np.zeros(8, np.uint8), **{option: True})
    with pytest.raises(tikv.OptionError, match="backend='cutlass'"):
        flashinfer.mla.BatchMLAPagedAttentionWrapper(np.zeros(8, np.uint8), backend="cutlass")
