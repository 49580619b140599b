"""flash-attention's `flash_attn_with_kvcache` by its definition, and what is refused before anything is written."""

import mmap

import numpy as np
import oracle
import pytest
from peers_by_definition import rotate, softmax_attention

import tikv
from tikv.compat import flash_attn

pytestmark = pytest.mark.thorough


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
        {"window": (3, -1), "queries": 30, "short": True},
        {"rotary": True, "interleaved": True, "new": 3, "queries": 3, "causal": True},
        {"rotary": True, "interleaved": False, "new": 1, "paged": True},
        {"leftpad": True, "new": 1},
        {"leftpad": True, "rotary": True, "interleaved": True, "new": 1, "causal": True},
        # Options together: terms and layouts of which the kernels of attention are tested in tests/ops.
        *(
            pytest.param(case, marks=pytest.mark.thorough, id="-".join(case))
            for case in (
                {"window": (-1, 1), "queries": 4, "paged": True},
                {"window": (3, -1), "queries": 4, "leftpad": True},
                {"leftpad": True, "paged": True, "queries": 3, "new": 3, "causal": True},
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
        window = np.array(case["window"])
        options["window_size"] = case["window"] if "alibi" in case else oracle.to_torch(window, "cpu")
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
        "rotary_cos": {"rotary_cos": np.ones((32, 8), np.float32), "rotary_sin": np.ones((32, 8), np.float32)},
    }.items():
        with pytest.raises(tikv.TikvError, match=name):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, **options)


WRONG = {
    "k and v must both": {"k": 1},
    "rotary_cos and rotary_sin must both": {"k": 2, "v": 2, "rotary_sin": (24, 4)},
    r"rotary_cos is \(9, 4\)": {"k": 2, "v": 2, "rotary_cos": (9, 4), "rotary_sin": (9, 4)},
    r"rotary_cos is \(24, 20\)": {"k": 2, "v": 2, "rotary_cos": (24, 20), "rotary_sin": (24, 20)},
    r"k f32\[1,1,2,16\]": {"k": 1, "v": 1},
    r"cache_seqlens\[1\]=24 and 1 new": {"k": 2, "v": 2, "cache_seqlens": [3, 24]},
    r"cache_seqlens\[0\]=-1 and 1 new": {"k": 2, "v": 2, "cache_seqlens": [-1, 4]},
    r"needs row -1 \(cache_batch_idx\[1\]\), but": {
        "k": 2,
        "v": 2,
        "cache_seqlens": [3, 4],
        "cache_batch_idx": [0, -1],
    },
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
    for page, more, where in (
        (-1, {}, r"block_table\[0, 1\]"),
        (3, {}, r"block_table\[0, 1\]"),
        (7, {"cache_batch_idx": [1]}, r"block_table\[1, 1\]"),
    ):
        table = np.array([[1, page]] if not more else [[0, 0], [1, page]], np.int32)
        with pytest.raises(RuntimeError, match=rf"has 9 tokens and needs page {page} \({where}\)") as caught:
            flash_attn.flash_attn_with_kvcache(
                q, *caches, new, new, block_table=table, cache_seqlens=np.int64(8), **more
            )
        assert isinstance(caught.value, tikv.PositionError)
        for cache in caches:
            oracle.assert_same_bits(cache, before)
    for length, rows, where in ((16, (new, new), "=16 and 1 new tokens"), (17, (), "=17 and 0 new tokens")):
        with pytest.raises(RuntimeError, match=f"{where} do not fit the 16 slots of a row of block_table"):
            flash_attn.flash_attn_with_kvcache(
                q, *caches, *rows, block_table=np.array([[1, 0]], np.int32), cache_seqlens=length
            )
        for cache in caches:
            oracle.assert_same_bits(cache, before)


# What attention over the cache refuses, though the new rows fit: the width, heads and dtype of q, and options.
MISFITS = {
    "do not divide among 2 KV heads": {"heads": 3},
    "the head width of q is 8": {"width": 8},
    "queries must be float32|q is float64, which": {"dtype": np.float64},
    "softcap=nan": {"softcap": float("nan")},
    "scale=nan": {"softmax_scale": float("nan")},
    "softmax_scale='x'": {"softmax_scale": "x"},
    "num_splits=-3": {"num_splits": -3},
    "num_splits is 1.5": {"num_splits": 1.5},
    r"window_size=\(1.0, 2.0\)": {"window_size": (1.0, 2.0)},
    r"alibi_slopes is f32\[3\]": {"alibi_slopes": np.zeros(3, np.float32)},
    r"alibi_slopes is f16\[4\]": {"alibi_slopes": np.zeros(4, np.float16)},
    r"cache_seqlens is \(3,\)": {"cache_seqlens": np.array([3, 5, 1])},
    "block_table is float32": {"block_table": np.zeros((2, 2), np.float32)},
    r"block_table is \(1, 2\)": {"block_table": np.array([[0, 1]])},
}


@pytest.mark.parametrize("why", MISFITS)
def test_flash_attn_refuses_what_only_attention_cannot_take_before_it_writes(arch, why):
    given = {"heads": 4, "width": 16, "dtype": np.float32, "cache_seqlens": np.array([3, 5]), **MISFITS[why]}
    q = oracle.place(np.ones((2, 1, given.pop("heads"), given.pop("width")), given.pop("dtype")), arch)
    rows, caches = ([oracle.place(np.full((2, n, 2, 16), n == 1, np.float32), arch) for _ in "kv"] for n in (1, 16))
    with pytest.raises(tikv.TikvError, match=why):
        flash_attn.flash_attn_with_kvcache(q, *caches, *rows, **given)
    assert not any(oracle.to_numpy(cache).any() for cache in caches)


@pytest.mark.archs("cpu")
def test_flash_attn_finds_what_attention_cannot_address_before_it_writes(arch):
    """Rows so far apart that a write addresses them and attention does not: known when its launch is bound."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = [np.frombuffer(mmap.mmap(-1, 2**32 + 2**20, flags=flags), np.float16) for _ in "kv"]
    far = [np.lib.stride_tricks.as_strided(a, (2, 16, 2, 16), (2**32 + 128, 64, 32, 2)) for a in memory]
    q, new = np.ones((2, 1, 4, 16), np.float16), np.ones((2, 1, 2, 16), np.float16)
    with pytest.raises(tikv.CapacityError, match="spans 4294968448 bytes"):
        flash_attn.flash_attn_with_kvcache(q, *far, new, new, cache_seqlens=np.array([3, 5], np.int32))
    assert not any(cache[b, (3, 5)[b]].any() for cache in far for b in range(2))
