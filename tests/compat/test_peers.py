"""The peers' names give the peers' results: each is compared with a plain NumPy or torch reference of its own."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv.compat import flash_attn, flashinfer, mlx, vllm

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.float32, np.float16]


def softmax_attention(q, k, v, scale, mask, softcap=0.0, bias=0.0):
    """Attention of q (Sq, D) over k (S, D), v (S, D) under mask (Sq, S): float64, and the LSE."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(mask, scores + bias, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.maximum(total, 1e-300) @ v.astype(np.float64), (top + np.log(total))[..., 0]


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
        with pytest.raises(tikv.ShapeError, match=r"copy_blocks: 2 key caches and . value caches"):
            vllm.copy_blocks(*wrong, [(0, 1)])
        for cache, old in zip(caches, kept, strict=True):
            oracle.assert_same_bits(cache, old)


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
        ([0, 5], [3, 0], [2, 1, 3], r"batch_indices\[1\] names request 5 of 2"),
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
        ({"custom_mask": np.arange(20) != 10}, tikv.OptionError, "custom_mask='1 hidden tokens before the 2 new"),
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


def rotate(x, positions, cos, sin, interleaved):
    """One row x (H, D) after another, pair by pair."""
    x = x.astype(np.float32).copy()
    half = cos.shape[1]
    for s, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            x0, x1 = x[s, :, a].copy(), x[s, :, b].copy()
            x[s, :, a] = x0 * cos[position, i] - x1 * sin[position, i]
            x[s, :, b] = x1 * cos[position, i] + x0 * sin[position, i]
    return x


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"causal": True, "new": 3, "queries": 3},
        {"paged": True, "new": 1},
        {"batch_idx": True, "new": 3, "queries": 3, "causal": True},
        {"window": (4, 0), "new": 3, "queries": 3},
        {"window": (4, 2), "new": 3, "queries": 3},
        {"alibi": (3, 4), "queries": 4},
        {"causal": True, "queries": 7, "short": True},
        {"rotary": True, "interleaved": True, "new": 3, "queries": 3, "causal": True},
        {"rotary": True, "interleaved": False, "new": 1, "paged": True},
        {"leftpad": True, "new": 1},
        # Options together: terms and layouts of which the kernels of attention are tested in tests/ops.
        *(
            pytest.param(case, marks=pytest.mark.thorough, id="-".join(case))
            for case in (
                {"window": (-1, 1), "queries": 4, "paged": True},
                {"window": (3, -1), "queries": 4, "leftpad": True},
                {"window": (3, 2), "alibi": (4,), "queries": 4},
                {"window": (2, 1), "new": 1, "queries": 7, "paged": True, "short": True},
                {"softcap": 2.0, "new": 1},
                {"alibi": (3, 4), "causal": True, "new": 3, "queries": 3, "paged": True},
                {"alibi": (4,), "leftpad": True, "new": 1},
            )
        ),
    ],
    ids=lambda case: "-".join(case) or "read",
)
def test_flash_attn_with_kvcache(arch, rng, case):
    batch, heads, group, width, capacity = 3, 2, 2, 32, 24
    new, queries = case.get("new", 0), case.get("queries", 1)
    size = 4 if case.get("paged") else capacity  # that of pages of the tests above: the same kernels
    rows = batch * capacity // size + 2 if case.get("paged") else batch + 2
    k_cache, v_cache = (rng.standard_normal((rows, size, heads, width)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((batch, queries, heads * group, width)).astype(np.float32)
    k, v = (rng.standard_normal((batch, new, heads, width)).astype(np.float32) if new else None for _ in "kv")
    lens = np.array([0, 4, 20] if case.get("short") else [5, 13, 20], np.int32)
    options = {"causal": case.get("causal", False), "return_softmax_lse": True, "softcap": case.get("softcap", 0.0)}
    table = rng.permutation(rows)[: batch * (capacity // size)].reshape(batch, -1).astype(np.int32)
    if case.get("paged"):
        options["block_table"] = oracle.place(table, arch)
    elif case.get("batch_idx"):
        options["cache_batch_idx"] = oracle.place(np.ascontiguousarray(table[:, 0]), arch)
    else:
        table = np.arange(batch)[:, None]
    if "window" in case:
        options["window_size"] = case["window"]
    pads = np.array([0, 2, 7], np.int32) if case.get("leftpad") else np.zeros(batch, np.int32)
    if case.get("leftpad"):
        options["cache_leftpad"] = oracle.place(pads, arch)
    cos, sin = (f(rng.standard_normal((32, 8))).astype(np.float32) for f in (np.cos, np.sin))
    if case.get("rotary"):
        options |= {"rotary_cos": oracle.place(cos, arch), "rotary_sin": oracle.place(sin, arch)}
        options["rotary_interleaved"] = case["interleaved"]
    slopes = rng.uniform(0.1, 0.5, case.get("alibi", (1,))).astype(np.float32)
    if "alibi" in case:
        options["alibi_slopes"] = oracle.place(slopes, arch)
    caches = [oracle.place(a.copy(), arch) for a in (k_cache, v_cache)]
    given = [None if a is None else oracle.place(a, arch) for a in (k, v)]
    out, lse = flash_attn.flash_attn_with_kvcache(
        oracle.place(q, arch), *caches, *given, cache_seqlens=oracle.place(lens, arch), **options
    )
    left, right = case.get("window", (-1, 0 if case.get("causal") else -1))
    for b in range(batch):
        before = int(lens[b])
        slots = [(table[b, p // size], p % size) for p in range(before + new)]
        q_b = q[b]
        if case.get("rotary"):
            steps = range(before, before + queries) if right == 0 else [before] * queries
            q_b = rotate(q_b, list(steps), cos, sin, case["interleaved"])
            k[b] = rotate(k[b], list(range(before, before + new)), cos, sin, case["interleaved"])
        for i in range(new):
            k_cache[slots[before + i]], v_cache[slots[before + i]] = k[b, i], v[b, i]
        keys, values = (np.array([a[s] for s in slots]).reshape(-1, heads, width) for a in (k_cache, v_cache))
        end = before + new
        own = np.arange(end - queries, end)[:, None]
        seen = np.broadcast_to(np.arange(end) >= pads[b], (queries, end)).copy()
        if left >= 0:
            seen &= np.arange(end) >= own - left
        if right >= 0:
            seen &= np.arange(end) <= own + right
        for h in range(heads * group):
            head = (q_b[:, h], keys[:, h // group], values[:, h // group], width**-0.5, seen, case.get("softcap", 0.0))
            steep = np.broadcast_to(slopes, (batch, heads * group))[b, h] if "alibi" in case else 0.0
            bias = -steep * np.abs(own - np.arange(end))
            want, want_lse = softmax_attention(*head, bias)
            np.testing.assert_allclose(oracle.to_numpy(out)[b, :, h], want, rtol=0, atol=2e-6)
            np.testing.assert_allclose(oracle.to_numpy(lse)[b, h], want_lse, rtol=0, atol=1e-5)
    if case.get("rotary"):
        np.testing.assert_allclose(oracle.to_numpy(caches[0]), k_cache, rtol=0, atol=1e-6)
    else:
        oracle.assert_same_bits(caches[0], k_cache)
    oracle.assert_same_bits(caches[1], v_cache)


def test_flash_attn_refuses_what_is_not_offered(arch, rng):
    q, cache = (oracle.place(rng.standard_normal((1, 1, 2, 32)).astype(np.float32), arch) for _ in range(2))
    for name, options in {
        "alibi_slopes": {"alibi_slopes": np.ones(2)},
        "window_size": {"window_size": (3, 2.5)},
        "cache_leftpad": {"cache_leftpad": np.zeros(1, np.int32), "block_table": np.zeros((1, 1), np.int32)},
    }.items():
        with pytest.raises(tikv.TikvError, match=name):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, **options)


WRONG = {
    "k and v must both": {"k": 1},
    "rotary_cos and rotary_sin must both": {"k": 2, "v": 2, "rotary_sin": (24, 4)},
    r"rotary_cos is \(9, 4\)": {"k": 2, "v": 2, "rotary_cos": (9, 4), "rotary_sin": (9, 4)},
    r"rotary_cos is \(24, 20\)": {"k": 2, "v": 2, "rotary_cos": (24, 20), "rotary_sin": (24, 20)},
    r"k \(1, 1, 2, 16\)": {"k": 1, "v": 1},
    r"cache_seqlens\[1\]=24 and 1 new": {"k": 2, "v": 2, "cache_seqlens": [3, 24]},
    r"cache_seqlens\[0\]=-1 and 1 new": {"k": 2, "v": 2, "cache_seqlens": [-1, 4]},
    "reaches -1, which is no row": {"k": 2, "v": 2, "cache_seqlens": [3, 4], "cache_batch_idx": [0, -1]},
    r"cache_leftpad\[1\]=-1 leaves": {"k": 2, "v": 2, "cache_leftpad": [0, -1]},
    r"cache_leftpad\[0\]=5 leaves -1 tokens": {"k": 2, "v": 2, "cache_leftpad": [5, 0]},
    r"cache_leftpad is \(1,\)": {"k": 2, "v": 2, "cache_leftpad": [0]},
    "softcap=-1.0": {"k": 2, "v": 2, "cache_seqlens": [3, 4], "softcap": -1.0},
}


@pytest.mark.parametrize("why", WRONG)
def test_flash_attn_refuses_what_is_wrong_before_it_writes(arch, rng, why):
    given = {"cache_seqlens": [3, 4], **WRONG[why]}
    q = oracle.place(rng.standard_normal((2, 3, 4, 16)).astype(np.float32), arch)
    before = rng.standard_normal((2, 24, 2, 16)).astype(np.float32)
    caches = [oracle.place(before.copy(), arch) for _ in "kv"]
    for name in given:
        if name in ("k", "v"):
            given[name] = oracle.place(np.ones((given[name], 1, 2, 16), np.float32), arch)
        elif name.startswith("rotary"):
            given[name] = oracle.place(np.ones(given[name], np.float32), arch)
        elif name.startswith("cache_"):
            given[name] = np.array(given[name], np.int32)
    with pytest.raises(tikv.TikvError, match=why):
        flash_attn.flash_attn_with_kvcache(q, *caches, **given)
    for cache in caches:
        oracle.assert_same_bits(cache, before)


def test_flash_attn_pages_that_are_missing_are_refused_before_the_append(arch, rng):
    q, new = (oracle.place(np.ones((1, 1, heads, 16), np.float32), arch) for heads in (4, 2))
    before = rng.standard_normal((3, 8, 2, 16)).astype(np.float32)
    caches = [oracle.place(before.copy(), arch) for _ in "kv"]
    table = {"block_table": np.array([[1, -1]], np.int32), "cache_seqlens": np.int64(8)}
    with pytest.raises(tikv.PositionError, match="sequence 0 of 9 tokens reaches -1"):
        flash_attn.flash_attn_with_kvcache(q, *caches, new, new, **table)
    for cache in caches:
        oracle.assert_same_bits(cache, before)


class MlxRotating:
    """mlx-lm's RotatingKVCache, one token at a time, from its description: keep, max_size, offset, idx."""

    def __init__(self, keep, max_size):
        self.keep, self.max_size, self.offset, self.idx, self.rows = keep, max_size, 0, 0, []

    def append(self, row):
        if self.idx == self.max_size:
            self.idx = self.keep
        if self.idx == len(self.rows):
            self.rows.append(row)
        else:
            self.rows[self.idx] = row
        self.idx += 1
        self.offset += 1


@pytest.mark.parametrize("tokens", [3, 6, 7, 15])
def test_mlx_files_both_ways(arch, rng, tmp_path, tokens):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    keep, window, heads, width = 2, 6, 2, 4
    k, v = (oracle.numbers(rng, (2, tokens, heads, width), np.float16) for _ in "kv")
    rotating = [MlxRotating(keep, window) for _ in "kv"]
    for t in range(tokens):
        for cache, rows in zip(rotating, (k, v), strict=True):
            cache.append(rows[0, t])
    stacked = [np.stack(cache.rows).swapaxes(0, 1)[None] for cache in rotating]
    tensors = {"0.0": stacked[0], "0.1": stacked[1]}
    tensors |= {"1.0": k[1].swapaxes(0, 1)[None], "1.1": v[1].swapaxes(0, 1)[None]}
    state = (keep, window, rotating[0].offset, rotating[0].idx)
    facts = {f"0.0.{j}": str(x) for j, x in enumerate(state)} | {"0.1": "", "1.model": "tiny"}
    facts |= {"2.0": "RotatingKVCache", "2.1": "KVCache"}
    theirs = tmp_path / "theirs.safetensors"
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, theirs, facts)
    store, metadata = mlx.load_prompt_cache(theirs, return_metadata=True)
    assert metadata == {"model": "tiny"}
    form = {"num_layers": 2, "num_kv_heads": heads, "head_dim": width, "capacity": store.capacity, "dtype": "float16"}
    own = tikv.KVCacheStore(**form, window=[window, None], sinks=keep)
    for layer in range(2):
        own.append(layer, k[layer], v[layer])
        for a, b in zip(store.tokens(layer), own.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b)
    extra = [oracle.numbers(rng, (2, heads, width), np.float16) for _ in "kv"]
    for s in (store, own):
        s.append(0, *extra)
    for a, b in zip(store.tokens(0), own.tokens(0), strict=True):
        oracle.assert_same_bits(a, b)
    again = mlx.load_prompt_cache(theirs)
    ours = tmp_path / "ours.safetensors"
    mlx.save_prompt_cache(ours, again, {"model": "tiny"}, since="0.6")
    with safe_open(ours, "np") as file:
        assert file.metadata() == facts
        for name, a in tensors.items():
            oracle.assert_same_bits(file.get_tensor(name), np.ascontiguousarray(a), what=name)

    # The form since 0.32: numbers are arrays, and arrays may have room for more tokens.
    numbers = {"0.2": state[2], "0.3": keep, "0.4": window, "0.5": state[3], "1.2": tokens}
    facts = {"0.model": "tiny", "1.0": "RotatingKVCache", "1.1": "KVCache", "2.0": ""}
    for n, name in enumerate(numbers, 1):
        facts |= {f"2.{n}.0": name, f"2.{n}.1": "scalar"}
    mlx.save_prompt_cache(ours, again, {"model": "tiny"})
    with safe_open(ours, "np") as file:
        assert file.metadata() == facts
        assert {name: int(file.get_tensor(name)) for name in numbers} == numbers
        for name, a in tensors.items():
            oracle.assert_same_bits(file.get_tensor(name), np.ascontiguousarray(a), what=name)
    roomy = {name: np.concatenate([a, np.full_like(a[:, :, :1], np.nan)], 2) for name, a in tensors.items()}
    if tokens >= window:  # what rotates has no room
        roomy |= {"0.0": tensors["0.0"], "0.1": tensors["0.1"]}
    arrays = {name: np.ascontiguousarray(a) for name, a in roomy.items()}
    save_file(arrays | {name: np.array(value, np.int32) for name, value in numbers.items()}, theirs, facts)
    newer, metadata = mlx.load_prompt_cache(theirs, return_metadata=True)
    assert metadata == {"model": "tiny"}
    for layer in range(2):
        for a, b in zip(newer.tokens(layer), again.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b)


def through_files_of_mlx_lm(cache, theirs, store, folder):
    """Save mlx-lm's caches and the store that equals them, and load each by the other; what mlx-lm then has."""
    cache.save_prompt_cache(str(folder / "theirs.safetensors"), theirs, {"model": "tiny"})
    loaded, metadata = mlx.load_prompt_cache(folder / "theirs.safetensors", return_metadata=True)
    assert metadata == {"model": "tiny"}
    for layer in range(store.num_layers):
        for a, b in zip(loaded.tokens(layer), store.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b)
    mlx.save_prompt_cache(folder / "ours.safetensors", store, {"model": "tiny"})
    again, metadata = cache.load_prompt_cache(str(folder / "ours.safetensors"), return_metadata=True)
    assert metadata == {"model": "tiny"}
    return again


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("steps", [(3,), (8,), (9, 1, 1), (4, *[1] * 30)])
def test_mlx_lm_itself_reads_and_writes(arch, rng, tmp_path, steps):
    cache = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    import mlx.core as mx

    theirs = [cache.RotatingKVCache(max_size=8, keep=2), cache.KVCache()]
    store = tikv.KVCacheStore(
        num_layers=2, num_kv_heads=2, head_dim=4, capacity=64, dtype="float16", window=[8, None], sinks=2
    )
    for n in steps:
        k, v = (oracle.numbers(rng, (n, 2, 4), np.float16) for _ in "kv")
        for layer, own in enumerate(theirs):
            own.update_and_fetch(*(mx.array(a.swapaxes(0, 1)[None]) for a in (k, v)))
            store.append(layer, k, v)
    again = through_files_of_mlx_lm(cache, theirs, store, tmp_path)
    assert [each.offset for each in again] == [sum(steps)] * 2
    row = mx.array(oracle.numbers(rng, (1, 2, 1, 4), np.float16))
    for one, other in zip(again, theirs, strict=True):  # and both go on alike, whatever the order of their rows
        for a, b in zip(one.update_and_fetch(row, row), other.update_and_fetch(row, row), strict=True):
            assert sorted(np.array(a)[0, 0].tolist()) == sorted(np.array(b)[0, 0].tolist())


def mlx_parts(cache):
    """Words, scales and biases of a `Quantized`, by the names that mlx-lm's files end with."""
    return {str(n): oracle.to_numpy(part) for n, part in enumerate(cache[:3])}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("since", mlx.SINCE)
def test_mlx_files_of_quantised_caches_both_ways(arch, rng, tmp_path, since):
    """Keys of 128 columns and values of 64; arrays with room for more; scales of bfloat16 become float32."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    heads, tokens, widths, quant = 2, 5, (128, 64), tikv.Quant(bits=4, group=64)
    form = {"num_layers": 2, "num_kv_heads": heads, "head_dim": 128, "head_dim_v": 64, "dtype": quant}
    store = tikv.KVCacheStore(**form, capacity=16, scale_dtype="float32")
    rows = [[rng.standard_normal((tokens, heads, w)).astype(np.float32) for w in widths] for _ in range(2)]
    for layer, (k, v) in enumerate(rows):
        store.append(layer, k, v)
    ours = tmp_path / "ours.safetensors"
    mlx.save_prompt_cache(ours, store, {"model": "tiny"}, since=since)
    with safe_open(ours, "np") as file:
        facts, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = {f"{i}.{j}" for i in range(2) for j in (2, 3, 4)} if since == "0.32" else set()
    assert set(found) == names | {f"{i}.{j}.{n}" for i in range(2) for j in range(2) for n in range(3)}
    for i, layer in enumerate(rows):
        for j, a in enumerate(layer):
            for n, want in mlx_parts(tikv.quantize(np.ascontiguousarray(a.swapaxes(0, 1)[None]), quant)).items():
                oracle.assert_same_bits(found[f"{i}.{j}.{n}"], want)
    state = {"0.2": 5, "0.3": 64, "0.4": 4} if since == "0.32" else {"0.0.0": "5", "0.0.1": "64", "0.0.2": "4"}
    assert {name: int(found[name]) if since == "0.32" else facts[name] for name in state} == state

    theirs = tmp_path / "theirs.safetensors"
    parts = {name: a for name, a in found.items() if name.count(".") == 2}
    if since == "0.32":
        parts = {name: np.concatenate([a, a[:, :, :2]], axis=2) for name, a in parts.items()}
    parts = {name: a.astype(BF16) if name[-1] != "0" else a for name, a in parts.items()}
    save_file({**found, **{name: np.ascontiguousarray(a) for name, a in parts.items()}}, theirs, facts)
    loaded, metadata = mlx.load_prompt_cache(theirs, return_metadata=True)
    assert metadata == {"model": "tiny"}
    assert (loaded.dtype.name, loaded.scale_dtype.name, loaded.length) == ("quant4_64", "float32", tokens)
    mlx.save_prompt_cache(ours, loaded, {"model": "tiny"}, since=since)
    with safe_open(ours, "np") as file:
        assert file.metadata() == facts
        for name, a in parts.items():
            want = a[:, :, :tokens] if name[-1] == "0" else a[:, :, :tokens].astype(np.float32)
            oracle.assert_same_bits(file.get_tensor(name), np.ascontiguousarray(want), what=name)
    loaded.append(0, *rows[1])
    assert loaded.held(0) == 2 * tokens


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 64, np.float16), (8, 32, np.float32)])
def test_mlx_lm_itself_reads_and_writes_quantised_caches(arch, rng, tmp_path, bits, group, dtype):
    """It has the bits that the store has, from rows of its own dtype, and both go on alike."""
    cache = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    import mlx.core as mx

    theirs = [cache.QuantizedKVCache(group_size=group, bits=bits) for _ in range(2)]
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "capacity": 64}
    scales = np.dtype(dtype).name
    store = tikv.KVCacheStore(**form, dtype=tikv.Quant(bits=bits, group=group), scale_dtype=scales)
    for n in (4, 1):
        k, v = (rng.standard_normal((n, 2, 64)).astype(dtype) for _ in "kv")
        for layer, own in enumerate(theirs):
            own.update_and_fetch(*(mx.array(a.swapaxes(0, 1)[None]) for a in (k, v)))
            store.append(layer, k, v)
    again = through_files_of_mlx_lm(cache, theirs, store, tmp_path)
    assert [(each.offset, each.group_size, each.bits) for each in again] == [(5, group, bits)] * 2
    row = mx.array(rng.standard_normal((1, 2, 1, 64)).astype(dtype))
    for one, other in zip(again, theirs, strict=True):
        for mine, his in zip(one.update_and_fetch(row, row), other.update_and_fetch(row, row), strict=True):
            for a, b in zip(mine, his, strict=True):
                oracle.assert_same_bits(np.array(a), np.array(b))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"0.2": np.array(9, np.int32)}, tikv.CacheFileError, "has no 9 tokens"),
        ({"0.4": np.array(5, np.int32)}, tikv.OptionError, "layer 0 has 5 bits in groups of 32"),
        ({"0.3": np.array(48, np.int32)}, tikv.OptionError, "groups of 48"),
        ({"0.3": np.array(64, np.int32)}, tikv.CacheFileError, "scales of keys that fit"),
        ({"0.4": np.array(8, np.int32)}, tikv.CacheFileError, "scales of keys that fit"),
        ({"0.0.0": np.ones((1, 1, 2, 8), np.float32)}, tikv.CacheFileError, "words of keys"),
        ({"0.1.2": np.ones((1, 1, 2, 2), np.float16)}, tikv.CacheFileError, "biases of values in float16"),
        ({"0.1.2": np.ones((1, 1, 3, 2), np.float32)}, tikv.CacheFileError, "biases of values that fit"),
        ({"0.1.0": np.ones((1, 1, 2), np.uint32)}, tikv.CacheFileError, "words of values that fit"),
        ({"0.1.1": None}, tikv.CacheFileError, r"0\.1\.1"),
    ],
)
def test_mlx_files_of_quantised_caches_that_cannot_be(arch, tmp_path, change, error, match):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=64, capacity=8, dtype=tikv.Quant(4, 32))
    facts = {"1.0": "QuantizedKVCache", "2.0": ""}
    tensors = {"0.2": np.array(2, np.int32), "0.3": np.array(32, np.int32), "0.4": np.array(4, np.int32)}
    for j in range(2):
        tensors[f"0.{j}.0"] = np.ones((1, 1, 2, 8), np.uint32)
        tensors |= {f"0.{j}.{n}": np.ones((1, 1, 2, 2), np.float32) for n in (1, 2)}
    save_file(tensors, path, facts)
    assert mlx.load_prompt_cache(path).length == 2
    wrong = {name: a for name, a in (tensors | change).items() if a is not None}
    save_file(wrong, path, facts)
    with pytest.raises(error, match=match):
        mlx.load_prompt_cache(path)
    save_file(tensors, path, facts | {"1.1": "KVCache"})
    with pytest.raises(tikv.OptionError, match="some layers are quantised and others are not"):
        mlx.load_prompt_cache(path)
    ring = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=64, capacity=8, dtype=store.dtype, window=4)
    with pytest.raises(tikv.OptionError, match="a window over quant4_32"):
        mlx.save_prompt_cache(path, ring)
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "capacity": 8}
    with pytest.raises(tikv.OptionError, match="dtype='q8_0' is not offered"):
        mlx.save_prompt_cache(path, tikv.KVCacheStore(**form, dtype="q8_0"))
    with pytest.raises(tikv.OptionError, match="v_dtype='float16' differ"):
        mlx.save_prompt_cache(path, tikv.KVCacheStore(**form, dtype=store.dtype, v_dtype="float16"))


@pytest.mark.parametrize(
    ("shape", "state"),
    [
        ((2, 6, 4), (2, 6, 9, 5)),
        ((1, 2, 6, 4), (2, 6, 9, 99)),
        ((1, 2, 6, 4), (2, 6, 9, -3)),
        ((1, 2, 6, 4), (0, 0, 9, 5)),
        ((1, 2, 6, 4), (6, 6, 9, 6)),
        ((1, 2, 6, 4), (2, 6, 3, 5)),
        ((1, 2, 3, 4), (2, 6, 50, 3)),
        ((1, 2, 6, 4), (2, 6, "x", 5)),
        ((1, 2, 6, 4), (2, 6, 9)),
    ],
)
def test_mlx_files_whose_state_cannot_be_are_refused(arch, tmp_path, shape, state):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    facts = {f"0.0.{j}": str(x) for j, x in enumerate(state)} | {"2.0": "RotatingKVCache"}
    save_file({name: np.ones(shape, np.float32) for name in ("0.0", "0.1")}, path, facts)
    with pytest.raises(tikv.CacheFileError, match="damaged: layer 0 has no"):
        mlx.load_prompt_cache(path)


def test_mlx_refusals(arch, rng, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    save_file({"0.0": np.ones((1, 1, 2, 4), np.float32)}, path, {"0.0": "", "2.0": "ChunkedKVCache"})
    with pytest.raises(tikv.TikvError, match="ChunkedKVCache"):
        mlx.load_prompt_cache(path)
    save_file({name: np.ones((1, 1, 2, 4), np.float32) for name in ("0.0", "0.1")}, path, {"0.0": "", "2.0": "KVCache"})
    for capacity in (0, 1):
        with pytest.raises(tikv.TikvError, match=r"mlx\.load_prompt_cache|capacity=0"):
            mlx.load_prompt_cache(path, capacity=capacity)
    save_file({"a": np.ones(2, np.float32)}, path)
    with pytest.raises(tikv.CacheFileError, match="no prompt cache"):
        mlx.load_prompt_cache(path)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="int8")
    with pytest.raises(tikv.TikvError, match="dtype='int8'"):
        mlx.save_prompt_cache(path, store)
    ring = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32", window=4)
    rows = np.ones((6, 1, 4), np.float32)
    ring.append(0, rows, rows)
    ring.trim(1)
    with pytest.raises(tikv.TikvError, match="trimmed"):
        mlx.save_prompt_cache(path, ring)
