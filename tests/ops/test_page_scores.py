"""`summarize_pages` and `page_scores` against NumPy, and with `select` and attention as Quest has them."""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
          "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}  # fmt: skip
LENS = np.array([50, 33, 0])


@pytest.mark.full(unless=lambda case: case["dtype"] == "bfloat16")
@pytest.mark.parametrize(("dtype", "page", "width"), [(name, 16, 24) for name in DTYPES] + [("bfloat16", 7, 5)])
def test_summaries(arch, rng, dtype, page, width):
    """Bit for bit, zeros with their signs and NaN too; what lies behind a length, here NaN, does not count."""
    k = rng.standard_normal((3, 2, 50, width)).astype(DTYPES[dtype])
    k[0, 0] = np.where(rng.random((50, width)) < 0.9, rng.choice([0.0, -0.0], (50, width)), k[0, 0])
    k[0, 1, rng.integers(50, size=5), rng.integers(width, size=5)] = np.nan
    for b, length in enumerate(LENS):
        k[b, :, length:] = np.nan
    got = tikv.summarize_pages(oracle.place(k, arch), LENS, page=page)
    for b, h in itertools.product(range(3), range(2)):
        for a, want in zip(got, reference.summarize_pages(k[b, h], LENS[b], page), strict=True):
            oracle.assert_same_bits(oracle.to_numpy(a)[b, h], want)


def test_a_nan_is_in_both(arch, rng):
    k = rng.standard_normal((1, 1, 32, 4)).astype(np.float32)
    k[0, 0, 3, 1] = k[0, 0, 16, 2] = k[0, 0, 31, 3] = np.nan
    k[0, 0, 5, 0], k[0, 0, 6, 0] = np.inf, -np.inf
    least, greatest = map(oracle.to_numpy, tikv.summarize_pages(oracle.place(k, arch), 32))
    for a in (least, greatest):
        assert np.isnan(a[0, 0]).tolist() == [[False, True, False, False], [False, False, True, True]]
    assert (least[0, 0, 0, 0], greatest[0, 0, 0, 0]) == (-np.inf, np.inf)


@pytest.mark.full(unless=lambda case: case["dtype"] == "float16")
@pytest.mark.parametrize(("dtype", "query", "queries"), [("float16", np.float32, 3), ("float32", np.float16, None)])
def test_scores(arch, rng, dtype, query, queries):
    k = rng.standard_normal((3, 2, 50, 24)).astype(DTYPES[dtype])
    q = rng.standard_normal((3, 8, 24) if queries is None else (3, 8, queries, 24)).astype(query)
    least, greatest = tikv.summarize_pages(oracle.place(k, arch), LENS)
    got = oracle.to_numpy(tikv.page_scores(oracle.place(q, arch), least, greatest, LENS))
    assert got.dtype == np.float32
    assert got.shape == (3, 2, queries or 1, 4)
    q = q.reshape(3, 8, -1, 24)
    for b, h, t in itertools.product(range(3), range(2), range(queries or 1)):
        seen = max(0, -(-(LENS[b] - (queries or 1) + t + 1) // 16))
        low, high = (oracle.to_numpy(a)[b, h, :seen] for a in (least, greatest))
        want = reference.page_scores(q[b, h * 4 : h * 4 + 4, t], low, high)
        np.testing.assert_allclose(got[b, h, t, :seen], want, rtol=2e-6, atol=2e-5)
        assert np.isneginf(got[b, h, t, seen:]).all()
        keys = k[b, h, : LENS[b]].astype(np.float64) @ q[b, h * 4 : h * 4 + 4, t].astype(np.float64).T
        for n in range(min(seen, LENS[b] // 16)):  # no key of a page scores higher
            assert keys[n * 16 : n * 16 + 16].sum(axis=1).max() <= want[n] + 1e-9


@pytest.mark.full(unless=lambda case: case["width"] in (128, 5))
@pytest.mark.parametrize(
    ("dtype", "query", "width", "group", "offset"),
    [
        ("float16", "float16", 128, 4, 0),
        ("bfloat16", "bfloat16", 128, 8, 4),
        ("float16", "bfloat16", 5, 2, 1),
        ("bfloat16", "float32", 64, 1, 2),
        ("float32", "float16", 96, 3, 1),
        ("float8_e5m2", "float16", 256, 4, 0),
        ("float8_e4m3fn", "float32", 24, 2, 3),
        ("float16", "float16", 576, 16, 0),
    ],
)
def test_scores_of_rows_of_any_width_and_alignment(arch, rng, dtype, query, width, group, offset):
    """More pages than the threads that share a row score together, and the last of them in part."""
    a, b = rng.standard_normal((2, 2, 2, 21, width + offset))
    least, greatest = np.minimum(a, b).astype(DTYPES[dtype]), np.maximum(a, b).astype(DTYPES[dtype])
    q = rng.standard_normal((2, 2 * group, 2, width + offset)).astype(DTYPES[query])
    placed = (oracle.place(each, arch)[..., offset:] for each in (q, least, greatest))
    got = oracle.to_numpy(tikv.page_scores(*placed, np.array([81, 38]), page=4))
    q, least, greatest = (each[..., offset:] for each in (q, least, greatest))
    for b, h, t in itertools.product(range(2), range(2), range(2)):
        seen, queries = -(-((81, 38)[b] - 1 + t) // 4), q[b, h * group : (h + 1) * group, t]
        want = reference.page_scores(queries, least[b, h, :seen], greatest[b, h, :seen])
        largest = np.maximum(*(np.abs(each[b, h, :seen].astype(np.float64)) for each in (least, greatest)))
        bound = reference.page_scores(np.abs(queries), largest, largest).max()
        np.testing.assert_allclose(got[b, h, t, :seen], want, rtol=0, atol=1e-6 * bound)
        assert np.isneginf(got[b, h, t, seen:]).all()


def test_an_infinity_that_no_query_chooses_counts_for_nothing(arch, rng):
    least, greatest = np.sort(rng.standard_normal((2, 1, 1, 4, 16)).astype(np.float32), axis=0)
    q = np.abs(rng.standard_normal((1, 2, 16))).astype(np.float32)
    q[..., 8:] *= -1
    want = reference.page_scores(q[0], least[0, 0], greatest[0, 0])
    least[0, 0, 1, 3], greatest[0, 0, 2, 9], greatest[0, 0, 3, 0] = -np.inf, np.inf, np.inf
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    got = oracle.to_numpy(tikv.page_scores(place(q), place(least), place(greatest), 64))[0, 0, 0]
    np.testing.assert_allclose(got[:3], want[:3], rtol=1e-5, atol=1e-5)
    assert got[3] == np.inf


def test_nan_in_queries_and_summaries_shows(arch, rng):
    q = rng.standard_normal((1, 2, 8)).astype(np.float32)
    least, greatest = rng.standard_normal((2, 1, 1, 3, 8)).astype(np.float32)
    least[0, 0, 1, 3] = greatest[0, 0, 1, 3] = np.nan
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    got = oracle.to_numpy(tikv.page_scores(place(q), place(least), place(greatest), 48))
    assert np.isnan(got[0, 0, 0]).tolist() == [False, True, False]
    q[0, 1, 5] = np.nan
    assert np.isnan(oracle.to_numpy(tikv.page_scores(place(q), place(least), place(greatest), 48))).all()


def test_a_query_reads_the_pages_that_it_chose(arch, rng):
    """All four calls together, against NumPy: the chosen pages' tokens are what attention reads."""
    k, v = rng.standard_normal((2, 2, 2, 100, 16)).astype(np.float32)
    q, lens = rng.standard_normal((2, 4, 1, 16)).astype(np.float32), np.array([100, 61])
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    least, greatest = tikv.summarize_pages(place(k), lens, page=8)
    scores = tikv.page_scores(place(q), least, greatest, lens, page=8)
    indices = tikv.select(scores, 5, page=8, sinks=1, recent=8, valid=lens)
    out = oracle.to_numpy(tikv.decode_attention(place(q), place(k), place(v), lens, indices=indices))
    for b, h in itertools.product(range(2), range(4)):
        row = oracle.to_numpy(scores)[b, h // 2, 0]
        at = reference.select(row, 5, int(lens[b]), page=8, sinks=1, recent=8)
        want, _ = reference.attention(q[b, h, 0], k[b, h // 2, at], v[b, h // 2, at], scale=0.25)
        np.testing.assert_allclose(out[b, h, 0], want, atol=1e-5)


@pytest.mark.archs("vulkan", "cuda")
def test_lengths_that_only_the_device_knows_are_bounded(arch, rng):
    k = rng.standard_normal((2, 1, 20, 8)).astype(np.float32)
    live = arrays.runtime_of()
    lens = arrays.CacheArray(arrays.to_device(np.array([2**40, -3]), live), live)
    for a, want in zip(tikv.summarize_pages(oracle.place(k, arch), lens), (np.min, np.max), strict=True):
        a = oracle.to_numpy(a)
        np.testing.assert_array_equal(a[0, 0], [want(k[0, 0, :16], axis=0), want(k[0, 0, 16:], axis=0)])
        assert (a[1] == 0).all()


K, Q = np.zeros((2, 1, 8, 4), np.float32), np.zeros((2, 2, 4), np.float32)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: tikv.summarize_pages(K, 9), tikv.CapacityError, "seq_lens has 9, outside 0..8"),
        (lambda: tikv.summarize_pages(K, np.array([3, -1])), tikv.CapacityError, "seq_lens has -1"),
        (lambda: tikv.summarize_pages(K, np.array([3])), tikv.ShapeError, "the number of lengths"),
        (lambda: tikv.summarize_pages(K.astype(np.int8), 8), tikv.DTypeError, "k_cache is"),
        (lambda: tikv.summarize_pages(tikv.quantize(np.ones((1, 1, 2, 32), np.float32), "q8_0"), 2), tikv.DTypeError,
         "codes of q8_0"),
        (lambda: tikv.summarize_pages(K[0], 8), tikv.ShapeError, r"\(B, H, S, D\)"),
        (lambda: tikv.page_scores(Q, K, K[:, :, :7], 8), tikv.ShapeError, "greatest is"),
        (lambda: tikv.page_scores(Q, K, K.astype(np.float16), 8), tikv.DTypeError, "greatest"),
        (lambda: tikv.page_scores(Q[:, :, :3], K, K, 8), tikv.ShapeError, "the head width of q"),
        (lambda: tikv.page_scores(Q, K, K, 8 * 16 + 1), tikv.CapacityError, "outside 0..128"),
        (lambda: tikv.page_scores(Q, K, K, 8, page=2**28), tikv.PositionError, "tokens of all pages"),
    ],
)  # fmt: skip
def test_refused_calls(arch, call, error, match):
    with pytest.raises(error, match=match):
        call()
