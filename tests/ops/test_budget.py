"""`budget` against a stable sort over all heads of a sequence: ties, signs, NaN, what each head always keeps."""

import numpy as np
import oracle
import pytest
from ops.test_select import rows

import tikv
from tikv import reference


def check(scores, mask, total, **options):
    """The whole mask (..., B, H, S), sequence by sequence."""
    mask = oracle.to_numpy(mask)
    assert (mask.dtype, mask.shape) == (np.bool_, scores.shape)
    layers = scores if scores.ndim == 4 else scores[None]
    got = mask if scores.ndim == 4 else mask[None]
    for b in range(scores.shape[-3]):
        each = layers[:, b].reshape(-1, scores.shape[-1])
        want = reference.budget(each, total, **options)
        np.testing.assert_array_equal(got[:, b].reshape(each.shape), want)
        assert want.sum() <= total


@pytest.mark.parametrize(
    ("total", "options"),
    [
        (0, {}), (1, {}), (90, {}), (900, {}), (200, {"least": 20}), (300, {"least": 31, "sinks": 2, "recent": 30}),
        (200, {"sinks": 4, "recent": 9}), (900, {"least": 300}), (150, {"least": 50, "recent": 3}),
    ],
)  # fmt: skip
def test_over_heads(arch, rng, total, options):
    scores = rows(rng, (2, 3, 300))
    check(scores, tikv.budget(oracle.place(scores, arch), total, **options), total, **options)


@pytest.mark.parametrize("least", [0, 11])
def test_over_layers(arch, rng, least):
    scores = rows(rng, (3, 2, 2, 150))
    options = {"least": least, "sinks": 1, "recent": 4}
    check(scores, tikv.budget(oracle.place(scores, arch), 400, over="layers", **options), 400, **options)


@pytest.mark.parametrize("options", [{}, {"least": 700, "sinks": 3, "recent": 9}])
@pytest.mark.parametrize("kind", ["apart", "few values", "one value", "mostly never kept"])
def test_more_tokens_than_a_block_reads_at_once(arch, rng, kind, options):
    """The last of the kept is found by its key alone, or by its place among many of that key."""
    scores = rng.standard_normal((1, 2, 8200)).astype(np.float32)
    if kind == "few values":
        scores = rows(rng, scores.shape)
    elif kind == "one value":
        scores[:] = -2.5
    elif kind == "mostly never kept":
        scores[rng.random(scores.shape) < 0.9] = -np.inf
    check(scores, tikv.budget(oracle.place(scores, arch), 5003, **options), 5003, **options)


def test_scores_of_any_strides_and_no_scores(arch, rng):
    whole = rows(rng, (2, 5, 90))
    placed = oracle.place(whole, arch)
    part = np.ascontiguousarray(whole[:, 1:4, 7:70])
    if isinstance(placed, np.ndarray) or hasattr(placed, "detach"):
        check(part, tikv.budget(placed[:, 1:4, 7:70], 60, least=5), 60, least=5)
    for shape in ((0, 2, 5), (2, 2, 0)):
        assert oracle.to_numpy(tikv.budget(oracle.place(np.zeros(shape, np.float32), arch), 0)).shape == shape


def test_what_a_store_keeps(arch, rng):
    """The mask goes to `compact`, whose heads then hold different numbers of tokens."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=4, head_dim=8, capacity=64, batch_size=2, dtype="float32")
    k, v = (oracle.place(rng.standard_normal((2, 50, 4, 8)).astype(np.float32), arch) for _ in "kv")
    store.append(0, k, v)
    scores = rng.standard_exponential((2, 4, 50)).astype(np.float32) * np.array([[[1], [2], [4], [8]]], np.float32)
    keep = tikv.budget(oracle.place(scores, arch), 80, least=6, sinks=2, recent=2)
    store.compact(0, keep)
    held = store.held(0)
    np.testing.assert_array_equal(held, oracle.to_numpy(keep).sum(axis=-1))
    assert (held.sum(axis=1) == 80).all()
    assert (held >= 6).all()
    assert held[0, 0] < held[0, 3]


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("scores", "total", "options", "error", "says"),
    [
        (np.zeros((1, 2, 5), np.float32), 11, {}, tikv.CapacityError, "total=11, and a sequence has 10 scores"),
        (np.zeros((1, 2, 5), np.float32), 10, {"least": 6}, tikv.CapacityError, "least=6, and a head has 5"),
        (np.zeros((1, 2, 5), np.float32), 3, {"least": 2}, tikv.OptionError, "total=3 is less than.*which is 4"),
        (np.zeros((1, 2, 5), np.float32), 3, {"sinks": 1, "recent": 1}, tikv.OptionError, "Use total=4 or more"),
        (np.zeros((1, 2, 5), np.float32), -1, {}, tikv.PositionError, "total=-1"),
        (np.zeros((1, 2, 5), np.float32), 3, {"over": "tokens"}, tikv.OptionError, "unknown over"),
        (np.zeros((1, 2, 5), np.float32), 3, {"over": "layers"}, tikv.OptionError, "over='heads'"),
        (np.zeros((1, 1, 2, 5), np.float32), 3, {}, tikv.OptionError, "over='layers'"),
        (np.zeros((2, 5), np.float32), 3, {}, tikv.ShapeError, r"\(B, H, S\)"),
        (np.zeros((1, 2, 5)), 3, {}, tikv.DTypeError, "must be float32"),
        (np.zeros((1, 2, 10), np.float32)[..., ::2], 3, {}, tikv.ShapeError, "not contiguous"),
        ([[1.0]], 3, {}, tikv.DTypeError, "scores"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(arch, scores, total, options, error, says):
    with pytest.raises(error, match=says) as caught:
        tikv.budget(scores, total, **options)
    assert str(caught.value).startswith("budget: ")
