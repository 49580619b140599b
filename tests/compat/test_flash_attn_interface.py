"""flash-attention 3's `flash_attn_with_kvcache` by its definition: one query after another, in NumPy and float64."""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest
from peers_by_definition import rotate, softmax_attention

import tikv
from tikv.compat import flash_attn_interface, indices

E4M3, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
HEADS, GROUP, CAPACITY = 2, 2, 24

CASES = [
    {},
    {"ragged_q": True, "ragged_k": True, "causal": True},
    {"ragged_q": True, "new": 2, "paged": True, "batch_idx": True, "window": (4, 1)},
    {"leftpad": True, "paged": True, "new": 3, "queries": 3, "causal": True},
    {"chunk": 5, "causal": True, "new": 1},
    {"chunk": 4, "queries": 6, "leftpad": True, "window": (2, 1)},
    {"chunk": 6, "ragged_q": True, "causal": True, "paged": True},
    {"rotary": True, "rotary_seqlens": True, "ragged_q": True, "ragged_k": True, "causal": True, "interleaved": True},
    {"rotary": True, "new": 2, "queries": 3, "interleaved": False},
    {"fp8": True, "descales": "qkv", "new": 1},
    {"fp8": True, "descales": "v", "queries": 3, "causal": True, "chunk": 7},
    {"qv": "k first", "new": 1, "softcap": 3.0},
    {"qv": "v first", "ragged_q": True, "causal": True},
    {"qv": "apart", "new": 3, "queries": 3, "causal": True, "paged": True, "batch_idx": True},
    {"qv": "apart", "ragged_q": True, "leftpad": True, "softcap": 3.0},
    {"qv": "apart", "chunk": 5, "new": 1},
]


def by_definition(case, given):
    """(out, lse, k_cache, v_cache) of each sequence in turn; `given` are NumPy arrays by the function's names."""
    caches = {name: given[name].copy() for name in ("k_cache", "v_cache")}
    size, scale = caches["k_cache"].shape[1], given["scale"]
    outs, lses = [], []
    for b in range(given["table"].shape[0]):
        before, pad = int(given["lens"][b]), int(given["pads"][b])
        q, (k, v) = given["q"][b].astype(np.float32), (None if given[n] is None else given[n][b] for n in "kv")
        first = int(given["rotary_seqlens"][b])
        if case.get("rotary"):
            local = case.get("causal") or "window" in case or "chunk" in case
            steps = range(first, first + len(q)) if local else [first] * len(q)
            q = rotate(q, list(steps), given["cos"], given["sin"], case["interleaved"])
            k = rotate(k, list(range(first, first + len(k))), given["cos"], given["sin"], case["interleaved"])
        end = before + (0 if k is None else len(k))
        slots = [(given["table"][b, p // size], p % size) for p in range(end)]
        for i in range(end - before):
            caches["k_cache"][slots[before + i]] = k[i]
            caches["v_cache"][slots[before + i]] = v[i]
        keys, values = (
            np.array([caches[name][s] for s in slots[pad:]]).reshape(-1, *caches[name].shape[2:]).astype(np.float64)
            for name in ("k_cache", "v_cache")
        )
        if case.get("descales"):
            keys, values = keys * given["k_descale"][b][:, None], values * given["v_descale"][b][:, None]
            q = q * np.repeat(given["q_descale"][b], GROUP)[:, None]
        own, key = np.arange(end - pad - len(q), end - pad)[:, None], np.arange(end - pad)
        left, right = case.get("window", (-1, -1))
        right = 0 if case.get("causal") else right
        seen = np.ones((len(q), end - pad), bool)
        if left >= 0:
            seen &= key >= own - left
        if right >= 0:
            seen &= key <= own + right
        if "chunk" in case:
            seen &= key // case["chunk"] == own // case["chunk"]
        rows, lse_rows = [], []
        for h in range(HEADS * GROUP):
            k_h, v_h, q_h = keys[:, h // GROUP], values[:, h // GROUP], q[:, h]
            if case.get("qv"):
                q_h, k_h = np.concatenate([q_h, given["qv"][b][:, h]], -1), np.concatenate([k_h, v_h], -1)
            out, lse = softmax_attention(q_h, k_h, v_h, scale, seen, case.get("softcap", 0.0))
            rows.append(out)
            lse_rows.append(lse)
        outs.append(np.stack(rows, 1))
        lses.append(np.stack(lse_rows))
    return outs, lses, caches["k_cache"], caches["v_cache"]


def made(rng, case):
    """The arguments of a case by name, each sequence's rows apart, and those that the definition alone needs."""
    batch, dtype = 3, E4M3 if case.get("fp8") else np.float32
    width, width_v = (32, 64) if case.get("qv") else (32, 32)
    size = 4 if case.get("paged") else CAPACITY
    rows = batch * CAPACITY // size + 2
    table = rng.permutation(rows)[: batch * (CAPACITY // size)].reshape(batch, -1).astype(np.int32)
    if not case.get("paged") and not case.get("batch_idx"):
        table = np.arange(batch, dtype=np.int32)[:, None]

    def values(*shape):
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    latent = values(rows, size, HEADS, width + width_v)
    cut = width if case.get("qv") != "v first" else width_v
    parts = latent[..., :cut], latent[..., cut:]
    k_cache, v_cache = parts if case.get("qv") != "v first" else parts[::-1]
    if case.get("qv", "apart") == "apart":
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
    queries = [2, 5, 1] if case.get("ragged_q") else [case.get("queries", 1)] * batch
    new = [1, 0, 3] if case.get("ragged_k") else [case.get("new", 0)] * batch
    found = {
        "latent": latent,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "table": table,
        "lens": np.array([5, 13, 20], np.int32),
        "pads": np.array([0, 2, 7], np.int32) if case.get("leftpad") else np.zeros(batch, np.int32),
        "q": [values(n, HEADS * GROUP, width) for n in queries],
        "qv": [values(n, HEADS * GROUP, width_v) for n in queries],
        "k": [values(n, HEADS, width) for n in new] if any(new) else None,
        "v": [values(n, HEADS, width_v) for n in new] if any(new) else None,
        "cos": np.cos(rng.standard_normal((32, 8))).astype(np.float32),
        "sin": np.sin(rng.standard_normal((32, 8))).astype(np.float32),
        "scale": (width + width_v if case.get("qv") else width) ** -0.5,
    }
    found["rotary_seqlens"] = found["lens"] // 2 if case.get("rotary_seqlens") else found["lens"]
    for name in "qkv":
        number = rng.uniform(0.5, 2, (batch, HEADS)).astype(np.float32)
        found[f"{name}_descale"] = number if name in case.get("descales", "") else np.ones_like(number)
    return found


def called(case, found, placed):
    """(out, lse, k_cache, v_cache) of the function, where `placed` puts the arrays, and each sequence's rows apart."""
    ragged_q, ragged_k = case.get("ragged_q"), case.get("ragged_k")
    together = {True: np.concatenate, False: np.stack}
    latent = placed(found["latent"].copy())
    cut = found["v_cache" if case.get("qv") == "v first" else "k_cache"].shape[-1]
    caches = latent[..., :cut], latent[..., cut:]
    if case.get("qv") == "v first":
        caches = caches[::-1]
    elif case.get("qv", "apart") == "apart":
        caches = [placed(found[name].copy()) for name in ("k_cache", "v_cache")]
    rows = {name: together[bool(ragged_q)](found[name]) for name in ("q", "qv")}
    rows |= {name: together[bool(ragged_k)](found[name]) for name in "kv" if found[name] is not None}
    arrays = {"cache_seqlens": found["lens"]}
    if case.get("paged"):
        table = found["table"]
        if case.get("batch_idx"):
            table = np.concatenate([table[::-1], table[:1] * 0])
            arrays["cache_batch_idx"] = np.array([2, 1, 0], np.int32)
        arrays["page_table"] = table
    if case.get("leftpad"):
        arrays["cache_leftpad"] = found["pads"]
    for name, on in (("q", ragged_q), ("k", ragged_k)):
        if on:
            starts = np.cumsum([0] + [len(a) for a in found[name]]).astype(np.int32)
            arrays["cu_seqlens_q" if name == "q" else "cu_seqlens_k_new"] = starts
    if case.get("rotary"):
        arrays |= {"rotary_cos": found["cos"], "rotary_sin": found["sin"]}
    if case.get("rotary_seqlens"):
        arrays["rotary_seqlens"] = found["rotary_seqlens"]
    arrays |= {f"{name}_descale": found[f"{name}_descale"] for name in case.get("descales", "")}
    options = {
        "causal": case.get("causal", False),
        "window_size": case.get("window", (-1, -1)),
        "attention_chunk": case.get("chunk", 0),
        "softcap": case.get("softcap", 0.0),
        "rotary_interleaved": case.get("interleaved", True),
        "max_seqlen_q": 5 if ragged_q else None,
    }
    given = {name: placed(a) for name, a in (rows | arrays).items() if name != "qv" or case.get("qv")}
    out, lse = flash_attn_interface.flash_attn_with_kvcache(
        given.pop("q"), *caches, **given, **options, return_softmax_lse=True
    )
    out, lse = oracle.to_numpy(out), oracle.to_numpy(lse)
    assert (out.dtype, lse.dtype) == (BF16 if case.get("fp8") else np.float32, np.float32)
    if ragged_q:
        starts = arrays["cu_seqlens_q"]
        assert lse.shape == (HEADS * GROUP, starts[-1])
        out = [out[a:b] for a, b in itertools.pairwise(starts)]
        lse = [lse[:, a:b] for a, b in itertools.pairwise(starts)]
    return out, lse, *map(oracle.to_numpy, caches)


def compare(case, found, got):
    outs, lses, k_cache, v_cache = by_definition(case, found)
    exact = 2**-8 if case.get("fp8") else 0
    for b in range(len(outs)):
        want = outs[b]
        np.testing.assert_allclose(got[0][b].astype(np.float64), want, rtol=exact, atol=3e-6)
        np.testing.assert_allclose(got[1][b], lses[b], rtol=0, atol=2e-5)
    if case.get("rotary"):
        np.testing.assert_allclose(got[2], k_cache, rtol=0, atol=1e-6)
    else:
        oracle.assert_same_bits(got[2], k_cache)
    oracle.assert_same_bits(got[3], v_cache)


def name_of(case):
    return "-".join(f"{name}={value}" if value is not True else name for name, value in case.items()) or "read"


# What reads by single tokens, two widths or 8-bit floats has kernels of its own, which Vulkan is slow to compile.
PLAIN = [case for case in CASES if not {"chunk", "leftpad", "qv", "fp8"} & set(case)]
OWN_KERNELS = [pytest.param(case, marks=pytest.mark.thorough, id=name_of(case)) for case in CASES if case not in PLAIN]


@pytest.mark.parametrize("case", [*PLAIN, *OWN_KERNELS], ids=name_of)
def test_flash_attn_3_with_kvcache(arch, rng, case):
    found = made(rng, case)
    compare(case, found, called(case, found, lambda a: oracle.place(a, arch)))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("known", [True, False], ids=["torch", "of a device"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_flash_attn_3_of_torch(arch, rng, monkeypatch, case, known):
    """Tensors; and such as if the host did not know the indices, which are computed with by torch then, unchecked."""
    if not known:
        monkeypatch.setattr(indices, "on_host", lambda array: indices.library_of(array) is np)
        monkeypatch.setattr(indices, "for_operation", lambda array, like: array.int())
        monkeypatch.setattr("tikv.compat.kvcache.for_operation", lambda array, like: array.int())
    found = made(rng, case)
    compare(case, found, called(case, found, lambda a: oracle.to_torch(a, "cpu")))


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (
            {"scheduler_metadata": np.zeros(3, np.int32)},
            tikv.OptionError,
            "scheduler_metadata is not supported",
        ),
        ({"pack_gqa": 2}, tikv.OptionError, "pack_gqa=2"),
        ({"sm_margin": 4}, tikv.OptionError, "sm_margin=4"),
        (
            {"qv": np.ones((2, 1, 2, 16), np.float32), "v_descale": np.ones((2, 1), np.float32)},
            tikv.OptionError,
            "v_descale is given with qv",
        ),
        ({"qv": np.ones((2, 1, 2, 8), np.float32)}, tikv.ShapeError, r"qv is f32\[2,1,2,8\]"),
        (
            {"k_descale": np.ones((2, 1), np.float32)},
            tikv.OptionError,
            "8-bit floats, but k_cache is float32",
        ),
        ({"rotary_seqlens": np.zeros(3, np.int32)}, tikv.ShapeError, "rotary_seqlens"),
        ({"cu_seqlens_q": np.array([0, 2], np.int32)}, tikv.ShapeError, "q is .* it must be .total, Hq, D"),
        ({"cu_seqlens_k_new": np.array([0, 1, 2], np.int32)}, tikv.ShapeError, "without k and v"),
        ({"attention_chunk": -1}, tikv.PositionError, "attention_chunk=-1"),
        (
            {"cache_batch_idx": np.array([0, 3]), "page_table": np.array([[0], [1]])},
            tikv.PositionError,
            "is not a row of",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_flash_attn_3_names_what_it_does_not_offer(arch, change, error, why):
    q, cache = np.ones((2, 1, 2, 16), np.float32), [np.ones((2, 8, 1, 16), np.float32) for _ in "kv"]
    with pytest.raises(error, match=why):
        flash_attn_interface.flash_attn_with_kvcache(q, *cache, **change)


def test_flash_attn_3_with_qv_over_caches_that_do_not_fit_writes_nothing(arch):
    q, row = np.ones((2, 1, 2, 16), np.float32), np.ones((2, 1, 1, 16), np.float32)
    k_cache = np.zeros((2, 8, 1, 16), np.float32)
    for v_cache, error in (
        (np.zeros((2, 6, 1, 16), np.float32), tikv.ShapeError),
        (np.zeros((2, 8, 1, 16), np.float16), tikv.DTypeError),
    ):
        placed = [oracle.place(a, arch) for a in (q, k_cache.copy(), v_cache, row, row.astype(v_cache.dtype))]
        with pytest.raises(error, match="with qv, both need the same dtype, and the same shape but for the last axis"):
            flash_attn_interface.flash_attn_with_kvcache(*placed, oracle.place(q, arch), cache_seqlens=2)
        assert not any(oracle.to_numpy(a).any() for a in placed[1:3])


def test_flash_attn_3_of_ragged_queries_says_how_many(arch):
    q, cache = np.ones((3, 2, 16), np.float32), [np.ones((2, 8, 1, 16), np.float32) for _ in "kv"]
    starts = np.array([0, 1, 3], np.int32)
    for most, why in ((None, "max_seqlen_q is missing"), (1, "max_seqlen_q=1, but sequence 1 has 2")):
        with pytest.raises(tikv.TikvError, match=why):
            flash_attn_interface.flash_attn_with_kvcache(q, *cache, cu_seqlens_q=starts, max_seqlen_q=most)


def test_flash_attn_3_of_no_queries_still_appends(arch):
    cache = [np.zeros((1, 4, 1, 8), np.float32) for _ in "kv"]
    q, row = np.ones((1, 0, 2, 8), np.float32), np.ones((1, 1, 1, 8), np.float32)
    placed = [oracle.place(a, arch) for a in (q, *cache, row, row)]
    out = flash_attn_interface.flash_attn_with_kvcache(*placed, cache_seqlens=2)
    assert tuple(out.shape) == (1, 0, 2, 8)
    for a in placed[1:3]:
        assert oracle.to_numpy(a)[0, :, 0, 0].tolist() == [0, 0, 1, 0]
