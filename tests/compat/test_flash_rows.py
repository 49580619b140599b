"""`flash_attn_func` and `flash_attn_varlen_func` of both versions by their definition."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from peers_by_definition import softmax_attention
from test_flashinfer_graphs import Replayed

import tikv
from tikv.compat import flash_attn, flash_attn_interface, flash_rows
from tikv.ops.attention.query_tiles import query_tiles

pytestmark = pytest.mark.thorough

HEADS, GROUP, WIDTH = 2, 2, 32
COUNTS, HELD = (1, 0, 5, 21, 3, 2), (9, 3, 5, 24, 1, 0)  # more queries than keys, and no keys, too


def expected(q, k, v, left, right, softcap=0.0, slopes=None):
    """(out, lse) of one sequence: q (n, Hq, D), k and v (m, H, D)."""
    n, m = len(q), len(k)
    own, keys = np.arange(m - n, m)[:, None], np.arange(m)
    seen = np.ones((n, m), bool)
    if left >= 0:
        seen &= keys >= own - left
    if right >= 0:
        seen &= keys <= own + right
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.zeros((q.shape[1], n))
    for h in range(q.shape[1]):
        bias = 0.0 if slopes is None else -slopes[h] * np.abs(own - keys)
        head = k[:, h // GROUP], v[:, h // GROUP]
        out[:, h], lse[h] = softmax_attention(q[:, h], *head, q.shape[-1] ** -0.5, seen, softcap, bias)
    return out, lse


CASES = [
    {},
    {"causal": True},
    {"causal": True, "window": (6, -1)},
    {"window": (6, 2)},
    {"window": (3, -1)},
    {"causal": True, "softcap": 2.0, "alibi": (4,)},
    {"alibi": (6, 4)},
    {"causal": True, "alibi": (6, 4)},
]


def options_of(case, rng, arch):
    slopes = rng.uniform(0.1, 0.5, case["alibi"]).astype(np.float32) if "alibi" in case else None
    options = {"causal": case.get("causal", False), "softcap": case.get("softcap", 0.0)}
    options["window_size"] = case.get("window", (-1, -1))
    if slopes is not None:
        options["alibi_slopes"] = oracle.place(slopes, arch)
    left, right = options["window_size"]
    return options, slopes, left, 0 if options["causal"] else right


def call(options, version=2):
    """The function of a version, and what it takes of these options."""
    module = flash_attn if version == 2 or "alibi_slopes" in options else flash_attn_interface
    return module.flash_attn_varlen_func, module.flash_attn_func


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "all")
def test_sequences_of_different_lengths(arch, rng, case, paged):
    options, slopes, left, right = options_of(case, rng, arch)
    starts = np.cumsum([0, *COUNTS]).astype(np.int32)
    of_keys = np.cumsum([0, *HELD]).astype(np.int32)
    q = rng.standard_normal((starts[-1] + 2, HEADS * GROUP, WIDTH)).astype(np.float32)  # two rows of no sequence
    k, v = (rng.standard_normal((of_keys[-1], HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    caches = [k, v]
    if paged:
        page = 4
        table = rng.permutation(len(HELD) * 6).reshape(len(HELD), 6).astype(np.int32)
        caches = [rng.standard_normal((table.size, page, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]
        for b, held in enumerate(HELD):
            for p in range(held):
                for pool, a in zip(caches, (k, v), strict=True):
                    pool[table[b, p // page], p % page] = a[of_keys[b] + p]
        options["block_table"] = oracle.place(table, arch)
    arrays = [oracle.place(a, arch) for a in (q, *caches, starts, of_keys)]
    for version in (2, 3):
        varlen, _ = call(options, version)
        out, lse = varlen(*arrays, max(COUNTS), max(HELD), return_attn_probs=True, **options)[:2]
        out, lse = oracle.to_numpy(out), oracle.to_numpy(lse)
        assert out.shape == q.shape
        assert lse.shape == q.shape[1::-1]
        for b in range(len(HELD)):
            rows, keys = slice(*starts[b : b + 2]), slice(*of_keys[b : b + 2])
            of_row = None if slopes is None else np.broadcast_to(slopes, (len(HELD), HEADS * GROUP))[b]
            want, want_lse = expected(q[rows], k[keys], v[keys], left, right, options["softcap"], of_row)
            np.testing.assert_allclose(out[rows], want, rtol=0, atol=3e-6)
            np.testing.assert_allclose(lse[:, rows], want_lse, rtol=0, atol=1e-5)
        assert (out[starts[-1] :] == 0).all()
        assert (lse[:, starts[-1] :] == -np.inf).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.get("alibi") != (6, 4)], ids=lambda c: "-".join(c) or "all")
def test_sequences_of_one_length(arch, rng, case):
    options, slopes, left, right = options_of(case, rng, arch)
    q = rng.standard_normal((2, 5, HEADS * GROUP, WIDTH)).astype(np.float32)
    k, v = (rng.standard_normal((2, 9, HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    arrays = [oracle.place(a, arch) for a in (q, k, v)]
    for version in (2, 3):
        _, dense = call(options, version)
        out, lse = dense(*arrays, return_attn_probs=True, **options)[:2]
        for b in range(2):
            want, want_lse = expected(q[b], k[b], v[b], left, right, options["softcap"], slopes)
            np.testing.assert_allclose(oracle.to_numpy(out)[b], want, rtol=0, atol=3e-6)
            np.testing.assert_allclose(oracle.to_numpy(lse)[b], want_lse, rtol=0, atol=1e-5)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("case", [{"causal": True}, {"window": (6, 2)}, {"causal": True, "alibi": (4,)}], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_captured_runs_read_later_lengths(arch, rng, paged, case):
    """A captured call follows lengths, rows and tables that change in place."""
    pytest.importorskip("torch")
    options, slopes, left, right = options_of(case, rng, arch)
    varlen, _ = call(options, 3)
    page, most = 4, max(HELD)
    shape = (36, page) if paged else (sum(HELD),)
    q = oracle.to_torch(rng.standard_normal((sum(COUNTS), HEADS * GROUP, WIDTH)).astype(np.float32), arch)
    caches = [oracle.to_torch(rng.standard_normal((*shape, HEADS, WIDTH)).astype(np.float32), arch) for _ in "kv"]
    indices = [np.zeros(len(HELD) + 1, np.int32), np.zeros(len(HELD) + 1, np.int32), np.zeros((len(HELD), 6), np.int32)]
    starts, of_keys, table = (oracle.to_torch(a, arch) for a in indices)
    if paged:
        options["block_table"] = table
    replayed = None
    for order in (rng.permutation(len(HELD)) for _ in range(4)):
        lengths, pages = np.array(HELD)[order], rng.permutation(36).reshape(6, 6).astype(np.int32)
        ends = np.cumsum([0, *np.array(COUNTS)[order]]), np.cumsum([0, *lengths])
        for a, numbers in ((starts, ends[0]), (of_keys, ends[1]), (table, pages)):
            a.copy_(oracle.to_torch(numbers.astype(np.int32), arch))
        for a in (q, *caches):
            a.copy_(oracle.to_torch(rng.standard_normal(a.shape).astype(np.float32), arch))
        replayed = replayed or Replayed(
            arch, lambda: varlen(q, *caches, starts, of_keys, max(COUNTS), most, return_attn_probs=True, **options)
        )
        out, lse = (oracle.to_numpy(a) for a in replayed()[:2])
        for b, n in enumerate(lengths):
            rows, keys = slice(*ends[0][b : b + 2]), slice(*ends[1][b : b + 2])
            held = [oracle.to_numpy(a) for a in caches]
            held = [a[pages[b]].reshape(-1, HEADS, WIDTH)[:n] if paged else a[keys] for a in held]
            want, want_lse = expected(oracle.to_numpy(q)[rows], *held, left, right, options["softcap"], slopes)
            np.testing.assert_allclose(out[rows], want, rtol=0, atol=3e-6)
            np.testing.assert_allclose(lse[:, rows], want_lse, rtol=0, atol=1e-5)


@pytest.mark.archs("cpu", "cuda")
def test_captured_runs_of_one_length(arch, rng):
    pytest.importorskip("torch")
    q, k, v = (
        oracle.to_torch(rng.standard_normal((2, n, h, WIDTH)).astype(np.float32), arch)
        for n, h in ((5, HEADS * GROUP), (9, HEADS), (9, HEADS))
    )
    replayed = Replayed(arch, lambda: flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True))
    for _ in range(2):
        for a in (q, k, v):
            a.copy_(oracle.to_torch(rng.standard_normal(a.shape).astype(np.float32), arch))
        out, lse = (oracle.to_numpy(a) for a in replayed()[:2])
        for b in range(2):
            want, want_lse = expected(*(oracle.to_numpy(a)[b] for a in (q, k, v)), -1, 0)
            np.testing.assert_allclose(out[b], want, rtol=0, atol=3e-6)
            np.testing.assert_allclose(lse[b], want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("of_three", [False, True], ids=["kv", "qkv"])
def test_arrays_in_one(arch, rng, of_three):
    """The same bits as from arrays of their own."""
    starts = np.cumsum([0, *COUNTS]).astype(np.int32)
    heads = HEADS if of_three else HEADS * GROUP
    rows = [rng.standard_normal((2 * starts[-1], n, WIDTH)).astype(np.float32) for n in (heads, HEADS, HEADS)]
    whole = np.stack(rows if of_three else rows[1:], 1)
    options = {"causal": True, "window_size": (6, -1), "softcap": 2.0, "return_attn_probs": True}
    for dense in (False, True):
        shaped = [a.reshape(2, starts[-1], *a.shape[1:]) if dense else a[: starts[-1]] for a in (*rows, whole)]
        *arrays, joint = (oracle.place(np.ascontiguousarray(a), arch) for a in shaped)
        indptr, most = oracle.place(starts, arch), max(COUNTS)
        packed = (joint,) if of_three else (arrays[0], joint)
        if dense:
            want = flash_attn.flash_attn_func(*arrays, **options)
            name = "flash_attn_qkvpacked_func" if of_three else "flash_attn_kvpacked_func"
            out = getattr(flash_attn, name)(*packed, **options)
        else:
            want = flash_attn.flash_attn_varlen_func(*arrays, indptr, indptr, most, most, **options)
            name = "flash_attn_varlen_qkvpacked_func" if of_three else "flash_attn_varlen_kvpacked_func"
            lengths = (indptr, most) if of_three else (indptr, indptr, most, most)
            out = getattr(flash_attn, name)(*packed, *lengths, **options)
        for a, b in zip(out[:2], want[:2], strict=True):
            oracle.assert_same_bits(oracle.to_numpy(a), oracle.to_numpy(b))
        assert out[2] is None
        with pytest.raises(tikv.ShapeError, match=r"of q?kv"):
            getattr(flash_attn, name)(*packed[:-1], packed[-1][..., :1, :, :], *(() if dense else lengths))
        if dense and of_three:
            third = flash_attn_interface.flash_attn_qkvpacked_func(joint, **options)
            oracle.assert_same_bits(oracle.to_numpy(third[0]), oracle.to_numpy(want[0]))


def test_query_heads_in_one_array(arch, rng):
    """Version 3 takes more query heads than KV heads in one array."""
    whole = rng.standard_normal((2, 9, HEADS * (GROUP + 2), WIDTH)).astype(np.float32)
    parts = np.split(whole, [HEADS * GROUP, HEADS * (GROUP + 1)], 2)
    arrays = [oracle.place(np.ascontiguousarray(a), arch) for a in parts]
    want = flash_attn_interface.flash_attn_func(*arrays, causal=True)
    call = flash_attn_interface.flash_attn_qkvpacked_func
    out = call(oracle.place(whole, arch), causal=True, num_heads_q=HEADS * GROUP)
    oracle.assert_same_bits(oracle.to_numpy(out), oracle.to_numpy(want))
    for heads, words in (
        (3, "after 3 query heads"),
        (8, "after 8 query heads"),
        (0, "num_heads_q"),
        (1.5, "num_heads_q"),
    ):
        with pytest.raises(tikv.TikvError, match=words):
            call(oracle.place(whole, arch), num_heads_q=heads)


@pytest.mark.archs("cpu")
def test_every_tile_size_gives_the_same(arch, rng, monkeypatch):
    """Tiles of a GPU's size, of one query, and all between."""
    starts, of_keys = (np.cumsum([0, *n]).astype(np.int32) for n in (COUNTS, HELD))
    q = rng.standard_normal((starts[-1], HEADS * GROUP, WIDTH)).astype(np.float32)
    k, v = (rng.standard_normal((of_keys[-1], HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    results = []
    for size in (1, 2, 7, 16, 64):
        monkeypatch.setattr(flash_rows, "TILE_QUERIES_ON_HOST", size)
        results.append(flash_attn.flash_attn_varlen_func(q, k, v, starts, of_keys, 30, 30, causal=True))
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=0, atol=2e-6)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("size", [1, 3, 16])
def test_tiles_of_torch_are_those_of_numpy(arch, size):
    """On a device, torch computes them; the rows of a tile are the queries of its sequence, each once."""
    torch = pytest.importorskip("torch")
    starts = np.cumsum([0, *COUNTS])
    total = int(starts[-1]) + 2
    tiles = query_tiles(np, starts, np.arange(total), size, len(COUNTS))
    for a, b in zip(
        tiles, query_tiles(torch, torch.tensor(starts), torch.arange(total), size, len(COUNTS)), strict=True
    ):
        np.testing.assert_array_equal(a, b.numpy())
    for row in range(starts[-1]):
        assert tiles.rows[tiles.tile[row], tiles.number[row]] == row
        sequence = int(np.searchsorted(starts[1:], row, side="right"))
        assert tiles.sequence[tiles.tile[row]] == sequence
        after = size - 1 - tiles.number[row] + tiles.behind[tiles.tile[row]]
        assert row + after == starts[sequence + 1] - 1
    assert tiles.used.sum() == sum(-(-n // size) for n in COUNTS)


@pytest.mark.archs("cpu")
def test_no_queries_and_no_sequences(arch):
    q, k = np.ones((0, 4, 16), np.float32), np.ones((3, 2, 16), np.float32)
    for starts, of_keys in (([0], [0]), ([0, 0], [0, 3])):
        starts, of_keys = np.array(starts, np.int32), np.array(of_keys, np.int32)
        assert flash_attn.flash_attn_varlen_func(q, k, k, starts, of_keys, 0, 3).shape == (0, 4, 16)


@pytest.mark.archs("cpu")
def test_used_keys_of_version_3(arch, rng):
    """`seqused_k` alone over pages, as vLLM's kernels are called, and over rows."""
    q = rng.standard_normal((3, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((9, 2, 16)).astype(np.float32) for _ in "kv")
    starts, of_keys, used = (np.array(a, np.int32) for a in ([0, 1, 3], [0, 4, 9], [3, 2]))
    varlen = flash_attn_interface.flash_attn_varlen_func
    by_rows = varlen(q, k, v, starts, of_keys, 2, 5, seqused_k=used, causal=True)
    pools = [np.concatenate([a[:4], a[4:8]]).reshape(2, 4, 2, 16) for a in (k, v)]
    table = np.array([[0], [1]], np.int32)
    by_pages = varlen(q, *pools, starts, None, 2, 5, seqused_k=used, causal=True, block_table=table)
    np.testing.assert_allclose(by_rows, by_pages, rtol=0, atol=1e-6)
    want, _ = expected(q[1:3], k[4:6], v[4:6], -1, 0)
    np.testing.assert_allclose(by_rows[1:3], want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4]], ids="-".join)
def test_used_queries_of_version_3(arch, rng, case):
    """The rows after the queries in use give 0 and -inf, and change nothing: as without these rows."""
    options, *_ = options_of(case, rng, arch)
    starts, of_keys = (np.cumsum([0, *n]).astype(np.int32) for n in (COUNTS, HELD))
    rows = rng.standard_normal((starts[-1], HEADS * GROUP, WIDTH)).astype(np.float32)
    k, v = (oracle.place(rng.standard_normal((of_keys[-1], HEADS, WIDTH)).astype(np.float32), arch) for _ in "kv")
    unused = np.array([2, 3, 0, 7, 0, 1])
    apart = np.cumsum([0, *(COUNTS + unused)]).astype(np.int32)
    q = np.full((apart[-1] + 2, *rows.shape[1:]), np.nan, np.float32)
    inside = np.concatenate([apart[b] + np.arange(n) for b, n in enumerate(COUNTS)])
    q[inside] = rows

    def call(q, starts, **more):
        arrays = oracle.place(q, arch), k, v, *(oracle.place(a, arch) for a in (starts, of_keys))
        more = {name: oracle.place(np.array(a, np.int32), arch) for name, a in more.items()}
        varlen = flash_attn_interface.flash_attn_varlen_func
        out, lse = varlen(*arrays, 28, max(HELD), return_attn_probs=True, **more, **options)
        return oracle.to_numpy(out), oracle.to_numpy(lse)

    out, lse = call(q, apart, seqused_q=COUNTS)
    want, want_lse = call(rows, starts)
    outside = np.setdiff1d(np.arange(len(q)), inside)
    np.testing.assert_allclose(out[inside], want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse[:, inside], want_lse, rtol=0, atol=2e-6)
    assert (out[outside] == 0).all()
    assert (lse[:, outside] == -np.inf).all()


@pytest.mark.archs("cpu")
def test_more_queries_in_use_than_there_are_are_refused(arch):
    q, starts = np.ones((2, 2, 16), np.float32), np.array([0, 2], np.int32)
    for used, words in (([3], r"seqused_q\[0\]=3 is not one of 0..2, the queries"), ([1, 1], "seqused_q is")):
        with pytest.raises(tikv.TikvError, match=words):
            flash_attn_interface.flash_attn_varlen_func(
                q, q, q, starts, starts, 2, 2, seqused_q=np.array(used, np.int32)
            )


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 0.5}, "dropout_p=0.5 is not supported"),
        ({"window_size": (1,)}, "window_size"),
        ({"max_seqlen_q": 1}, "max_seqlen_q=1, but sequence 1 has 2 queries"),
        ({"max_seqlen_k": 3}, "max_seqlen_k=3, but sequence 0 has 4 keys"),
        ({"max_seqlen_q": None}, "max_seqlen_q is missing"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k is missing"),
        ({"cu_seqlens_k": np.array([0, 4, 99], np.int32)}, "must ascend from 0 to at most the 9 rows of k"),
        ({"cu_seqlens_k": np.array([0, 4], np.int32)}, r"cu_seqlens_k is \(2,\)"),
        ({"cu_seqlens_q": np.array([0, 2, 1], np.int32)}, "must ascend"),
        ({"v": np.ones((8, 2, 16), np.float32)}, "both need one dtype and the same shape"),
        ({"alibi_slopes": np.ones(3, np.float32)}, "alibi_slopes is"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(arch, options, words):
    given = {
        "q": np.ones((3, 4, 16), np.float32),
        "k": np.ones((9, 2, 16), np.float32),
        "v": np.ones((9, 2, 16), np.float32),
        "cu_seqlens_q": np.array([0, 1, 3], np.int32),
        "cu_seqlens_k": np.array([0, 4, 9], np.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 5,
    }
    with pytest.raises(tikv.TikvError, match=words):
        flash_attn.flash_attn_varlen_func(**given | options)


OF_VERSION_3 = [
    {"attention_chunk": 5, "causal": True},
    {"attention_chunk": 4, "window_size": (2, 1), "softcap": 2.0},
    {"qv": True},
    {"qv": True, "causal": True, "attention_chunk": 7},
    {"fp8": "qkv", "causal": True},
    {"fp8": "v", "attention_chunk": 6},
]


@pytest.mark.parametrize("form", ["one length", "rows", "rows in use", "pages"])
@pytest.mark.parametrize("case", OF_VERSION_3, ids="-".join)
def test_options_of_version_3_alone(arch, rng, case, form):
    """Each sequence has what `flash_attn_with_kvcache` gives for its queries over its keys, which the two only read."""
    dtype = np.dtype(ml_dtypes.float8_e4m3fn if "fp8" in case else np.float32)
    counts, held = ((4, 4, 4), (9, 9, 9)) if form == "one length" else (COUNTS, HELD)
    extra = np.array([2, 3, 0, 7, 0, 1]) if form == "rows in use" else np.zeros(len(counts), int)
    starts, of_keys = (np.cumsum([0, *n]).astype(np.int32) for n in (counts + extra, held))

    def rows(count, heads, width):
        return rng.standard_normal((count, heads, width)).astype(np.float32).astype(dtype)

    q, k = rows(starts[-1], HEADS * GROUP, WIDTH), rows(of_keys[-1], HEADS, WIDTH)
    v, qv = rows(of_keys[-1], HEADS, 16), rows(starts[-1], HEADS * GROUP, 16) if "qv" in case else None
    options = {name: value for name, value in case.items() if name not in ("qv", "fp8")}
    scales = {
        f"{name}_descale": rng.uniform(0.5, 2, (len(counts), HEADS)).astype(np.float32) for name in case.get("fp8", "")
    }
    on_device = {name: oracle.place(a, arch) for name, a in scales.items()}
    given = {"q": q, "k": k, "v": v} | ({} if qv is None else {"qv": qv})
    if form == "one length":
        given = {name: a.reshape(len(counts), -1, *a.shape[1:]) for name, a in given.items()}
        function = flash_attn_interface.flash_attn_func
    else:
        function = flash_attn_interface.flash_attn_varlen_func
        indices = {"cu_seqlens_q": starts, "cu_seqlens_k": of_keys, "seqused_q": np.array(counts, np.int32)}
        if form == "pages":
            table = rng.permutation(len(held) * 6).reshape(len(held), 6).astype(np.int32)
            indices["block_table"] = table
            for name, a in (("k", k), ("v", v)):
                given[name] = np.zeros((table.size, 4, *a.shape[1:]), dtype)
                for b, n in enumerate(held):
                    for p in range(n):
                        given[name][table[b, p // 4], p % 4] = a[of_keys[b] + p]
        if form != "rows in use":
            del indices["seqused_q"]
        on_device |= {name: oracle.place(a, arch) for name, a in indices.items()}
        most = (2**31 - 1,) * 2 if form == "rows in use" else (max(counts), max(held))
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), most, strict=True))
    arrays = {name: oracle.place(a, arch) for name, a in given.items()} | on_device
    out, lse = map(oracle.to_numpy, function(**arrays, **options, return_attn_probs=True))
    if form == "one length":
        out, lse = out.reshape(-1, *out.shape[2:]), np.concatenate(lse, 1)
    for b, n in enumerate(counts):
        at, keys = slice(starts[b], starts[b] + n), slice(*of_keys[b : b + 2])
        want, want_lse = np.zeros((n, HEADS * GROUP, 16)), np.full((HEADS * GROUP, n), -np.inf)
        if n and held[b]:
            one = {"q": q[at], "k_cache": k[keys], "v_cache": v[keys]} | ({} if qv is None else {"qv": qv[at]})
            one = {name: oracle.place(a[None], arch) for name, a in one.items()}
            one |= {name: oracle.place(a[b : b + 1].copy(), arch) for name, a in scales.items()}
            seen = {name: value for name, value in options.items() if name[:3] != "max"}
            results = flash_attn_interface.flash_attn_with_kvcache(**one, **seen, return_softmax_lse=True)
            want, want_lse = (oracle.to_numpy(a)[0] for a in results)
        atol = 4e-3 if "fp8" in case else 3e-6  # results of 8-bit floats are bfloat16
        np.testing.assert_allclose(out[at].astype(np.float32), want.astype(np.float32), rtol=atol, atol=atol)
        np.testing.assert_allclose(lse[:, at], want_lse, rtol=0, atol=1e-5)
    outside = np.setdiff1d(np.arange(len(q)), np.concatenate([starts[b] + np.arange(n) for b, n in enumerate(counts)]))
    assert (out[outside] == 0).all()
    assert (lse[:, outside] == -np.inf).all()


@pytest.mark.archs("cpu")
def test_backward_is_refused(arch):
    torch = pytest.importorskip("torch")
    q = torch.ones(2, 2, 16, requires_grad=True)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, q, q, starts, starts, 2, 2, causal=True)
    with pytest.raises(tikv.OptionError):
        out.sum().backward()
