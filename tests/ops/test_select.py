"""`select` against a stable sort: ties, signs, NaN, what is always kept, tokens and pages."""

import itertools

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, reference


def rows(rng, shape):
    """Scores with many ties, zeros of both signs, infinities, a NaN, subnormals, and some alone."""
    found = np.round(rng.standard_normal(shape) * 3).astype(np.float32) / 2
    some = rng.random(shape)
    found[some < 0.1] = -0.0
    found[(some > 0.1) & (some < 0.13)] = np.inf
    found[(some > 0.13) & (some < 0.2)] = -np.inf
    found[(some > 0.2) & (some < 0.22)] = np.nan
    found[(some > 0.22) & (some < 0.24)] = -np.float32(np.nan)
    found[(some > 0.24) & (some < 0.3)] *= 1e-40
    return found


def check(got, scores, k, valid, **options):
    """Each row of (..., K) is what the sort gives, and -1 behind it."""
    got = oracle.to_numpy(got)
    assert got.dtype == np.int32
    assert got.shape == (*scores.shape[:-1], k * options.get("page", 1))
    for at in itertools.product(*map(range, scores.shape[:-1])):
        tokens = valid if isinstance(valid, int) else int(valid[at[0]] if valid.ndim == 1 else valid[at[0], at[-1]])
        want = reference.select(scores[at], k, tokens, **options)
        row = got[at].tolist()
        assert [token for token in row if token >= 0] == want
        if options.get("page", 1) == 1:
            assert row[len(want) :] == [-1] * (len(row) - len(want))


@pytest.mark.parametrize("k", [1, 7, 128, 300, 700])
def test_tokens(arch, rng, k):
    scores = rows(rng, (2, 3, 2, 700))
    check(tikv.select(oracle.place(scores, arch), k), scores, k, 700)


@pytest.mark.parametrize("k", [1, 2048, 33000])
def test_long_rows(arch, rng, k):
    """Of more scores than a block has bits for; most differ in their last digits alone, and some are equal."""
    scores = np.round(rng.standard_normal((2, 1, 40000)) * 1e4).astype(np.float32) / 2**14 + 700
    scores[1, 0] = np.where(rng.random(40000) < 0.999, np.float32(-1), scores[1, 0])
    check(tikv.select(oracle.place(scores, arch), k, valid=39000), scores, k, 39000)


@pytest.mark.parametrize(
    ("k", "options"),
    [(5, {"sinks": 2, "recent": 3}), (9, {"page": 16, "sinks": 17, "recent": 18}), (4, {"page": 3, "recent": 1})],
)
def test_what_is_always_kept(arch, rng, k, options):
    """Whatever their scores; of sequences of different lengths, some of which have less than that."""
    page, valid = options.get("page", 1), np.array([300, 131, 1, 0])
    scores = rows(rng, (4, 2, 300 // page + 1))
    check(tikv.select(oracle.place(scores, arch), k, valid=valid, **options), scores, k, valid, **options)


def test_tokens_of_each_query(arch, rng):
    scores = rows(rng, (2, 2, 3, 40))
    valid = np.array([[38, 39, 40], [0, 1, 2]], np.int32)
    check(tikv.select(oracle.place(scores, arch), 6, valid=oracle.place(valid, arch)), scores, 6, valid)


def test_equal_scores_are_chosen_from_the_oldest(arch):
    scores = np.zeros((1, 1, 1000), np.float32)
    scores[..., ::2] = -0.0
    assert oracle.to_numpy(tikv.select(oracle.place(scores, arch), 3)).tolist() == [[[0, 1, 2]]]
    scores[..., 500] = np.float32(1e-45)
    assert oracle.to_numpy(tikv.select(oracle.place(scores, arch), 3)).tolist() == [[[0, 1, 500]]]


@pytest.mark.archs("cpu")
def test_strides_lists_and_nothing(arch, rng):
    wide = rows(rng, (3, 2, 2, 50))
    scores = wide[::2, :, :, 3:40]
    check(tikv.select(scores, 5, valid=[37, 2]), scores, 5, np.array([37, 2]))
    large = rows(rng, (1, 2, 9000))  # by several threads
    check(tikv.select(large, 100, valid=8999), large, 100, 8999)
    assert tikv.select(np.zeros((0, 2, 5), np.float32), 2).shape == (0, 2, 2)
    assert tikv.select(np.zeros((1, 1, 0), np.float32), 2).tolist() == [[[-1, -1]]]


@pytest.mark.archs("vulkan", "cuda")
def test_tokens_that_only_the_device_knows_are_bounded(arch, rng):
    scores = rows(rng, (3, 1, 20))
    live = arrays.runtime_of()
    valid = arrays.CacheArray(arrays.to_device(np.array([2**40, -3, 7]), live), live)
    check(tikv.select(oracle.place(scores, arch), 6, valid=valid), scores, 6, np.array([20, 0, 7]))


ROW = np.zeros((2, 1, 8), np.float32)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: tikv.select(ROW, 0), tikv.PositionError, "k"),
        (lambda: tikv.select(ROW, 3, sinks=2, recent=2), tikv.OptionError, r"k=3 is less .* Use k=4 or more"),
        (lambda: tikv.select(ROW, 2, page=4, recent=5, sinks=1), tikv.OptionError, "may be 3 pages of 4"),
        (lambda: tikv.select(ROW, 2, page=2**28), tikv.PositionError, "tokens that have scores"),
        (lambda: tikv.select(ROW, 2, valid=9), tikv.PositionError, "valid is 9, but there are scores for 8"),
        (lambda: tikv.select(ROW, 2, page=2, valid=np.array([16, 17])), tikv.PositionError, "valid is 17"),
        (lambda: tikv.select(ROW, 2, valid=np.array([1, -1])), tikv.PositionError, "valid is -1"),
        (lambda: tikv.select(ROW, 2, valid=np.array([1])), tikv.ShapeError, r"\(B,\) = \(2,\)"),
        (lambda: tikv.select(ROW.astype(np.float64), 2), tikv.DTypeError, "float32"),
        (lambda: tikv.select(ROW[0], 2), tikv.ShapeError, r"\(B, T, N\)"),
        (lambda: tikv.select(np.zeros((1, 8, 8), np.float32).swapaxes(1, 2), 2), tikv.ShapeError, "contiguous"),
    ],
)
def test_refused_calls(arch, call, error, match):
    with pytest.raises(error, match=match):
        call()
