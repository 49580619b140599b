"""FlashInfer's names give FlashInfer's results: each is compared with a plain NumPy reference of its own."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from peers_by_definition import softmax_attention

import tikv
from tikv import arrays
from tikv.compat import flashinfer


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("packed", [False, True], ids=["tuple", "packed"])
def test_flashinfer_append(arch, rng, layout, packed):
    size, heads, width, pages = 4, 2, 8, 7
    new_lens, seq_lens = np.array([3, 0, 1, 6]), np.array([5, 2, 1, 9])
    indptr = np.concatenate([[0], np.cumsum(-(-seq_lens // size))])
    indices = rng.permutation(pages)[: indptr[-1]]
    append_indptr = np.concatenate([[0], np.cumsum(new_lens)])
    nnz = int(append_indptr[-1]) + 2
    batch, position = flashinfer.get_batch_indices_positions(append_indptr, seq_lens, nnz)
    want_batch = [b for b, n in enumerate(new_lens) for _ in range(n)] + [-1, -1]
    want_position = [s - n + i for s, n in zip(seq_lens, new_lens, strict=True) for i in range(n)] + [-1, -1]
    assert (batch.tolist(), position.tolist()) == (want_batch, want_position)
    assert flashinfer.get_seq_lens(indptr, (seq_lens - 1) % size + 1, size).tolist() == seq_lens.tolist()
    inner = (size, heads, width) if layout == "NHD" else (heads, size, width)
    before = oracle.random_bits(rng, (pages, 2, *inner), np.float16)
    key, value = (oracle.random_bits(rng, (nnz, heads, width), np.float16) for _ in "kv")
    cache = oracle.place(before.copy(), arch)
    given = cache if packed else (cache[:, 0], cache[:, 1])
    host = [np.asarray(a) for a in (batch, position, indices, indptr, (seq_lens - 1) % size + 1)]
    index = [oracle.place(a, arch) for a in host]
    rows = [oracle.place(a, arch) for a in (key, value)]
    flashinfer.append_paged_kv_cache(*rows, index[0], index[1], given, *index[2:], kv_layout=layout)
    want = before.copy()
    for t in range(nnz - 2):
        page, slot = indices[indptr[want_batch[t]] + want_position[t] // size], want_position[t] % size
        for plane, new in enumerate((key, value)):
            if layout == "NHD":
                want[page, plane, slot] = new[t]
            else:
                want[page, plane, :, slot] = new[t]
    oracle.assert_same_bits(cache, want)
    with pytest.raises(tikv.TikvError, match="kv_layout='XYZ'"):
        flashinfer.append_paged_kv_cache(*rows, index[0], index[1], given, *index[2:], kv_layout="XYZ")


@pytest.mark.parametrize(
    ("batch", "position", "pages", "why"),
    [
        ([0, 5], [3, 0], [2, 1, 3], r"batch_indices\[1\]=5, and there are 2 requests"),
        ([0, 1], [4, 0], [2, 1, 3], r"positions\[0\]=4 has no page in kv_indices of request 0"),
        ([0, 1], [0, 8], [2, 1, 3], r"positions\[1\]=8 has no page"),
        ([0, 1], [0, 1], [-1, 1, 3], r"positions\[0\]=0 has no page"),
        ([0, 1], [0, 1], [9, 1, 3], "beyond the pool"),
        ([0, 1], [0, 1], [], r"positions\[0\]=0 has no page"),
    ],
)
def test_flashinfer_refuses_tokens_without_a_page(arch, rng, batch, position, pages, why):
    before = oracle.random_bits(rng, (4, 2, 4, 1, 8), np.float32)
    cache = oracle.place(before.copy(), arch)
    rows = [oracle.place(oracle.random_bits(rng, (2, 1, 8), np.float32), arch) for _ in "kv"]
    table = np.array(pages, np.int32), np.array([0, 1, 3]), np.array([4, 4])
    with pytest.raises(tikv.PositionError, match=why):
        flashinfer.append_paged_kv_cache(*rows, np.array(batch), np.array(position), cache, *table)
    oracle.assert_same_bits(cache, before)


@pytest.mark.parametrize(
    "case",
    [
        {"sinks": True, "window": 3},
        {"queries": 3, "causal": True, "layout": "HND", "softcap": 2.0},
        {"queries": 3, "mask": "bool"},
        {"queries": 3, "mask": "packed", "sinks": True},
        {"queries": 3, "window": 2},
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_flashinfer_batch_decode(arch, rng, case):
    size, heads, group, width, pages = 4, 2, 2, 32, 9
    queries, window, layout = case.get("queries", 1), case.get("window", -1), case.get("layout", "NHD")
    lens = np.array([9, 3, 8] if "mask" in case else [9, 0, 2])
    counts = -(-lens // size)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = rng.permutation(pages)[: indptr[-1]]
    last = np.where(counts > 0, (lens - 1) % size + 1, 0)
    pools = [rng.standard_normal((pages, size, heads, width)).astype(np.float32) for _ in "kv"]
    given = [oracle.place(np.ascontiguousarray(a.swapaxes(1, 2) if layout == "HND" else a), arch) for a in pools]
    shape = (3, heads * group, width) if queries == 1 else (3, queries, heads * group, width)
    q, sinks = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    options = {"kv_layout": layout, "window_left": window, "logits_soft_cap": case.get("softcap"), "return_lse": True}
    options["causal"] = case.get("causal", False)
    seen = []
    for n in lens:
        own, key = np.arange(n - queries, n)[:, None], np.arange(n)
        sees = (key <= own) | (not case.get("causal"))
        if "mask" in case:
            sees = (key < n - queries) | (rng.random((queries, n)) < 0.5) | (key == own)
        seen.append(sees & ((key >= own - window) | (window < 0)))
    if case.get("mask") == "bool":
        options["custom_mask"] = oracle.place(np.concatenate([a.ravel() for a in seen]), arch)
    elif case.get("mask") == "packed":
        packed = [np.packbits(a, bitorder="little") for a in seen]
        options["packed_custom_mask"] = oracle.place(np.concatenate(packed), arch)
    if case.get("sinks"):
        options["sinks"] = oracle.place(sinks, arch)
    out, lse = flashinfer.batch_decode_with_paged_kv_cache(
        oracle.place(q, arch), tuple(given), *(oracle.place(a, arch) for a in (indptr, indices, last)), **options
    )
    out, lse = oracle.to_numpy(out).reshape(3, queries, 4, width), oracle.to_numpy(lse).reshape(3, queries, 4)
    for b, n in enumerate(lens):
        own = indices[indptr[b] : indptr[b + 1]]
        k, v = (a[own].reshape(-1, heads, width)[:n] for a in pools)
        for h in range(heads * group):
            q_h = q.reshape(3, queries, 4, width)[b, :, h]
            head = (q_h, k[:, h // group], v[:, h // group], width**-0.5, seen[b], case.get("softcap", 0.0))
            want, want_lse = softmax_attention(*head)
            if case.get("sinks"):
                with_sink = np.logaddexp(want_lse, sinks[h])
                want, want_lse = want * np.exp(want_lse - with_sink)[:, None], with_sink
            np.testing.assert_allclose(out[b, :, h], want, rtol=0, atol=2e-6)
            np.testing.assert_allclose(lse[b, :, h], want_lse / np.log(2), rtol=0, atol=1e-5)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"kv_layout": "XYZ"}, tikv.OptionError, "kv_layout='XYZ'"),
        ({"paged_kv_indptr": np.array([0, 1])}, tikv.ShapeError, "paged_kv_indptr has 2 entries"),
        ({"paged_kv_indptr": np.array([0, 1, 5])}, tikv.PositionError, r"paged_kv_indptr is \[0, 1, 5\]"),
        ({"paged_kv_last_page_len": np.array([3, 5])}, tikv.PositionError, r"paged_kv_last_page_len\[1\]=5"),
        ({"custom_mask": np.ones(19, bool)}, tikv.ShapeError, r"custom_mask is \(19,\)"),
        ({"custom_mask": np.arange(20) != 10}, tikv.OptionError, "custom_mask hides tokens before the 2 new"),
        ({"custom_mask": np.ones(20, bool), "window_left": 3}, tikv.OptionError, "window_left=3"),
        ({"custom_mask": 1, "packed_custom_mask": 1}, tikv.OptionError, "packed_custom_mask"),
        (
            {"paged_kv_last_page_len": np.array([1, 3]), "custom_mask": np.ones(16, bool)},
            tikv.PositionError,
            "has 1 to",
        ),
    ],
)
def test_flashinfer_batch_decode_refuses(arch, change, error, why):
    given = {
        "q": np.ones((2, 2, 2, 8), np.float32),
        "paged_kv_cache": tuple(np.ones((3, 4, 1, 8), np.float32) for _ in "kv"),
        "paged_kv_indptr": np.array([0, 1, 3]),
        "paged_kv_indices": np.array([2, 0, 1]),
        "paged_kv_last_page_len": np.array([3, 3]),
    }
    with pytest.raises(error, match=why):
        flashinfer.batch_decode_with_paged_kv_cache(**given | change)


def test_flashinfer_merge_state(arch, rng):
    q, k, v = rng.standard_normal((1, 16)), rng.standard_normal((20, 16)), rng.standard_normal((20, 16))
    everything = np.ones((1, 20), bool)
    first, second = everything.copy(), everything.copy()
    first[:, 12:], second[:, :12] = False, False
    parts = [softmax_attention(q, k, v, 0.25, mask) for mask in (first, second)]
    states = []
    for out, lse in parts:
        states += [out.astype(np.float32)[:, None], (lse / np.log(2)).astype(np.float32)[:, None]]
    got, s = flashinfer.merge_state(*(oracle.place(np.ascontiguousarray(a), arch) for a in states))
    out, lse = softmax_attention(q, k, v, 0.25, everything)
    np.testing.assert_allclose(oracle.to_numpy(got)[:, 0], out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(oracle.to_numpy(s)[:, 0], lse / np.log(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [-1, 2])
def test_flashinfer_more_queries_than_keys(arch, rng, window):
    """Without causality each query sees all keys, those too that would lie before the first token."""
    heads, width, queries, lens = 2, 32, 9, (3, 1)
    pools = [rng.standard_normal((3, 4, heads, width)).astype(np.float32) for _ in "kv"]
    q = rng.standard_normal((2, queries, heads, width)).astype(np.float32)
    table = [oracle.place(np.array(a), arch) for a in ([0, 1, 2], [2, 0], lens)]
    given = tuple(oracle.place(a, arch) for a in pools)
    out, lse = flashinfer.batch_decode_with_paged_kv_cache(
        oracle.place(q, arch), given, *table, causal=False, window_left=window, return_lse=True
    )
    for b, (n, page) in enumerate(zip(lens, (2, 0), strict=True)):
        own, key = np.arange(n - queries, n)[:, None], np.arange(n)
        seen = (key >= own - window) | (window < 0)
        for h in range(heads):
            k, v = (a[page, :n, h] for a in pools)
            want, want_lse = softmax_attention(q[b, :, h], k, v, width**-0.5, seen)
            np.testing.assert_allclose(oracle.to_numpy(out)[b, :, h], want, rtol=0, atol=2e-6)
            np.testing.assert_allclose(oracle.to_numpy(lse)[b, :, h], want_lse / np.log(2), rtol=0, atol=1e-5)


SCALES = {"q_scale": 0.75, "k_scale": 1.5, "v_scale": 0.625}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("given", [["k_scale"], ["v_scale"], ["q_scale", "k_scale", "v_scale"]], ids="-".join)
def test_flashinfer_scales_multiply_scores_and_results(arch, rng, dtype, given):
    """Over pools of any dtype; the log-sum-exp has the scales of q and K too."""
    number = np.dtype(dtype if dtype in ("float32", "float16") else getattr(ml_dtypes, dtype))
    pools = [rng.standard_normal((3, 4, 2, 32)).astype(np.float32).astype(number) for _ in "kv"]
    kind = np.float32 if dtype == "float8_e4m3fn" else number
    q = rng.standard_normal((2, 4, 32)).astype(np.float32).astype(kind)
    table = [oracle.place(np.array(a), arch) for a in ([0, 1, 3], [2, 0, 1], [3, 2])]
    scales = {name: SCALES[name] for name in given}
    out = oracle.place(np.full(q.shape, 7, kind), arch)
    got, lse = flashinfer.batch_decode_with_paged_kv_cache(
        oracle.place(q, arch), tuple(oracle.place(a, arch) for a in pools), *table, **scales, logits_soft_cap=3.0,
        sm_scale=0.2, out=out, return_lse=True,
    )  # fmt: skip
    assert got is out
    scale = 0.2 * scales.get("q_scale", 1) * scales.get("k_scale", 1)
    exact = {"float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 0)  # rounded as a result, and as its multiple
    for b, (own, n) in enumerate((([2], 3), ([0, 1], 6))):
        for h in range(4):
            k, v = (a[own].reshape(-1, 2, 32)[:n, h // 2].astype(np.float64) for a in pools)
            seen = np.ones((1, n), bool)
            want, want_lse = softmax_attention(q[b, h][None].astype(np.float64), k, v, scale, seen, 3.0)
            want = want[0] * scales.get("v_scale", 1)
            np.testing.assert_allclose(oracle.to_numpy(got)[b, h].astype(np.float64), want, rtol=exact, atol=2e-6)
            np.testing.assert_allclose(oracle.to_numpy(lse)[b, h], want_lse[0] / np.log(2), rtol=0, atol=1e-5)


@pytest.mark.archs("cpu")
def test_flashinfer_scales_of_other_libraries_and_of_bad_values(arch, rng):
    jax = pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    k, v = rng.standard_normal((2, 1, 4, 2, 32)).astype(np.float32)
    q = rng.standard_normal((1, 4, 32)).astype(np.float32)
    table = [np.array(a) for a in ([0, 1], [0], [3])]
    plain = flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), *table)
    here = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=32, num_blocks=1, block_size=4).runtime
    ours = arrays.CacheArray(arrays.to_device(q, here), here)
    for kind, asked in (("jax", jax.numpy.asarray(q)), ("torch", torch.from_numpy(q)), ("tikv", ours)):
        got = flashinfer.batch_decode_with_paged_kv_cache(asked, (k, v), *table, v_scale=2)
        assert kind in type(got).__module__
        oracle.assert_same_bits(np.asarray(got), plain * 2)
    out = np.full_like(q, 7)
    for name, wrong in (("k_scale", "x"), ("v_scale", np.ones(2)), ("v_scale", np.inf), ("k_scale", np.nan)):
        with pytest.raises(tikv.OptionError, match="scale"):
            flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), *table, out=out, **{name: wrong})
        assert (out == 7).all()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_flashinfer_pages_of_one_token(arch, rng, layout):
    """Pools without an axis for the tokens of a page, a pair or one array: as with the axis."""
    pools = rng.standard_normal((6, 2, 2, 32)).astype(np.float32)
    both = oracle.place(pools.copy(), arch)
    axis = 1 if layout == "NHD" else 2
    with_axis = tuple(oracle.place(np.expand_dims(pools[:, i].copy(), axis), arch) for i in range(2))
    rows = [oracle.place(rng.standard_normal((2, 2, 32)).astype(np.float32), arch) for _ in "kv"]
    q = oracle.place(rng.standard_normal((1, 4, 32)).astype(np.float32), arch)
    starts, pages, last = (oracle.place(np.array(a), arch) for a in ([0, 3], [5, 0, 2], [1]))
    batch, position = (oracle.place(np.array(a), arch) for a in ([0, 0], [1, 2]))
    found = []
    for cache in (with_axis, both, (both[:, 0], both[:, 1])):
        table = pages, starts, last
        flashinfer.append_paged_kv_cache(*rows, batch, position, cache, *table, kv_layout=layout)
        found.append(flashinfer.batch_decode_with_paged_kv_cache(q, cache, starts, pages, last, kv_layout=layout))
    for i in range(2):
        oracle.assert_same_bits(oracle.to_numpy(both)[:, i], oracle.to_numpy(with_axis[i]).reshape(6, 2, 32))
    for other in found[1:]:
        oracle.assert_same_bits(other, oracle.to_numpy(found[0]))


def states_of(rng, parts, tokens=3, heads=2, width=16):
    """(T, parts, H, D) results and (T, parts, H) log-sum-exps, some of sets of no keys."""
    v = rng.standard_normal((tokens, parts, heads, width)).astype(np.float32)
    s = (4 * rng.standard_normal((tokens, parts, heads))).astype(np.float32)
    s[rng.random(s.shape) < 0.2] = -np.inf
    return v, s


def merged(v, s):
    """What all parts give together, in float64: weights are 2 ** s."""
    s = s.astype(np.float64)
    top = np.maximum(s.max(1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp2(s - top)
    total = weights.sum(1)
    with np.errstate(divide="ignore"):
        lse = top[:, 0] + np.log2(total)
    return np.einsum("tnh,tnhd->thd", weights, v) / np.maximum(total, 1e-300)[..., None], lse


@pytest.mark.parametrize("parts", [0, 1, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_flashinfer_merge_states(arch, rng, parts, dtype):
    v, s = states_of(rng, parts)
    v = v.astype(dtype)
    strided = oracle.place(np.ascontiguousarray(s.swapaxes(1, 2)), arch).swapaxes(1, 2)
    out, lse = flashinfer.merge_states(oracle.place(v, arch), strided)
    want, want_lse = merged(v, s)
    assert oracle.to_numpy(out).dtype == dtype
    np.testing.assert_allclose(oracle.to_numpy(out), want, rtol=2**-10 if dtype == np.float16 else 0, atol=2e-6)
    np.testing.assert_allclose(oracle.to_numpy(lse), want_lse, rtol=0, atol=1e-5)
    if parts == 1:
        seen = np.isfinite(s[:, 0])
        oracle.assert_same_bits(oracle.to_numpy(out)[seen], v[:, 0][seen])


@pytest.mark.parametrize("masked", [False, True])
def test_flashinfer_merge_state_in_place(arch, rng, masked):
    v, s = states_of(rng, 2)
    first = [oracle.place(np.ascontiguousarray(a[:, 0]), arch) for a in (v, s)]
    other = [oracle.place(np.ascontiguousarray(a[:, 1]), arch) for a in (v, s)]
    mask = np.array([True, False, True])
    flashinfer.merge_state_in_place(*first, *other, **({"mask": oracle.place(mask, arch)} if masked else {}))
    for got, want, old in zip(first, merged(v, s), (v[:, 0], s[:, 0]), strict=True):
        got = oracle.to_numpy(got)
        np.testing.assert_allclose(got[mask], want[mask], rtol=0, atol=1e-5)
        if masked:
            oracle.assert_same_bits(got[~mask], old[~mask])
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_flashinfer_states_go_back_in(arch, rng):
    """A shared prefix and a request's own tokens, merged by what the same module returns, whatever its strides."""
    pools = rng.standard_normal((4, 2, 4, 2, 32)).astype(np.float32)
    cache, q = oracle.place(pools, arch), oracle.place(rng.standard_normal((1, 5, 4, 32)).astype(np.float32), arch)

    def over(*pages):
        table = [np.array(a) for a in ([0, len(pages)], pages, [4])]
        return flashinfer.batch_decode_with_paged_kv_cache(
            q, cache, *(oracle.place(a, arch) for a in table), return_lse=True
        )

    (o1, s1), (o2, s2), (whole, lse) = over(0, 1), over(2), over(0, 1, 2)
    turned = oracle.place(np.ascontiguousarray(oracle.to_numpy(s2)[0].T), arch).T
    v, s = flashinfer.merge_state(o1[0], s1[0], o2[0], turned)
    np.testing.assert_allclose(oracle.to_numpy(v), oracle.to_numpy(whole)[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(oracle.to_numpy(s), oracle.to_numpy(lse)[0], rtol=0, atol=1e-5)
