"""`extend` with ``keep=False``: attention over what is held and over new tokens, of which a store keeps nothing."""

import contextlib

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

HEADS, GROUP, WIDTH = 2, 2, 32
ALONG_TOKENS = tikv.Quant(bits=8, group=32, axis="tokens", residual=32)
FORMS = [
    {"dtype": "float32"},
    {"dtype": "float16", "capacity": 70},
    {"dtype": "float32", "window": 24, "sinks": 2},
    {"dtype": "q8_0", "window": 16},
    {"dtype": "int8", "v_dtype": "q4_0"},
    {"dtype": ALONG_TOKENS},
    {"dtype": ALONG_TOKENS, "window": 96, "sinks": 2},
]


def attention(q, k, v, key_positions, query_positions, window=None, sinks=0):
    """(results (Hq, T, D), weights (H, group, T, n)) of q (Hq, T, D) over k, v (H, n, D), by positions (H, n)."""
    heads, _, width = k.shape
    q = q.reshape(heads, -1, *q.shape[1:]).astype(np.float64)
    scores = np.einsum("hgtd,hnd->hgtn", q, k) * width**-0.5
    at, of = key_positions[:, None, None], query_positions[:, None]
    sees = at <= of
    if window:
        sees &= (at < sinks) | (at > of - (window - sinks))
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgtn,hnd->hgtd", weights, v).reshape(-1, q.shape[2], width), weights


def contents(store):
    """Every bit that a store holds, as far as its calls show it."""
    arrays = [*store.tokens(0)]
    with contextlib.suppress(tikv.TikvError):  # groups along tokens
        arrays += [store.keys(0), store.values(0)]
    return [oracle.to_numpy(a).copy() for a in arrays] + [store.length, store.held(0), repr(store)]


@pytest.mark.full("vulkan", unless=lambda params: params["form"]["dtype"] in ("float32", "int8"))
@pytest.mark.full(
    unless=lambda case: case["form"]["dtype"] in ("float32", "int8") and case["form"].get("v_dtype") is None
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_replay_leaves_no_trace(arch, rng, form):
    """More new tokens than there is room for, over what is held; the mass is that of the held tokens."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    store = tikv.KVCacheStore(**{"capacity": 96, **form}, num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH)
    window, sinks = form.get("window"), form.get("sinks", 0)
    for held, tokens in ((0, 3), (70, 30), (0, 1)):
        if held:
            rows = rng.standard_normal((2, held, HEADS, WIDTH)).astype(np.float32)
            store.append(0, *(place(a) for a in rows))
        length = store.length
        before = contents(store) if length else None
        q, k, v = (rng.standard_normal((tokens, n, WIDTH)).astype(np.float32) for n in (HEADS * GROUP, HEADS, HEADS))
        options = {"return_mass": "max", "return_lse": True} if length else {"return_lse": True}
        results = store.extend(0, place(q), place(k), place(v), keep=False, **options)
        stored = [oracle.to_numpy(a)[0].astype(np.float64) for a in store.tokens(0)] if length else []
        at = store.positions(0)[0] if length else np.zeros((HEADS, 0), np.int64)
        keys, values = (np.concatenate([*stored[i : i + 1], a.swapaxes(0, 1)], axis=1) for i, a in enumerate((k, v)))
        new = np.broadcast_to(length + np.arange(tokens), (HEADS, tokens))
        want, weights = attention(
            q.swapaxes(0, 1), keys, values, np.concatenate([at, new], axis=1), new[0], window, sinks
        )
        np.testing.assert_allclose(oracle.to_numpy(results[0]).swapaxes(0, 1), want, atol=3e-5)
        if length:
            mass = weights[..., : at.shape[1]].max(axis=(1, 2))
            np.testing.assert_allclose(oracle.to_numpy(results[-1])[0], mass, atol=3e-5)
            for a, b in zip(before, contents(store), strict=True):
                np.testing.assert_array_equal(a, b)
    assert store.length == 70


@pytest.mark.parametrize("form", [{"dtype": "float32"}, {"dtype": "int8", "per_head": True}, {"dtype": ALONG_TOKENS}],
                         ids=str)  # fmt: skip
def test_a_replay_over_pages(arch, rng, form):
    """Of sequences of different lengths, one of them empty, in a pool without a free block."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    heads = HEADS if form.get("per_head") else 1
    pool = tikv.PagedKVCacheStore(**form, num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=2 * heads,
                                  block_size=64)  # fmt: skip
    seqs = [pool.add(), pool.add()]
    rows = rng.standard_normal((2, 128, HEADS, WIDTH)).astype(np.float32)
    pool.append(0, *(place(a) for a in rows), seqs[:1], [0, 128])
    before = [oracle.to_numpy(a).copy() for a in pool.tokens(0, seqs[0])]
    q, k, v = (rng.standard_normal((9, n, WIDTH)).astype(np.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    out, mass = pool.extend(0, place(q), place(k), place(v), seqs, [0, 5, 9], keep=False, return_mass=True)
    for i, (first, end) in enumerate(((0, 5), (5, 9))):
        held = 128 * (i == 0)
        stored = [oracle.to_numpy(a).swapaxes(0, 1)[:, :held] for a in pool.tokens(0, seqs[0])]
        keys, values = (
            np.concatenate([old, a[first:end].swapaxes(0, 1)], axis=1).astype(np.float64)
            for old, a in zip(stored, (k, v), strict=True)
        )
        at = np.broadcast_to(np.arange(held + end - first), keys.shape[:2])
        want, weights = attention(q[first:end].swapaxes(0, 1), keys, values, at, at[0, held:])
        np.testing.assert_allclose(oracle.to_numpy(out)[first:end].swapaxes(0, 1), want, atol=3e-5)
        expected = np.zeros((HEADS, 128))
        expected[:, :held] = weights[..., :held].sum(axis=(1, 2))
        np.testing.assert_allclose(oracle.to_numpy(mass)[i], expected, atol=5e-5)
    assert [pool.length(seq) for seq in seqs] == [128, 0]
    assert pool.num_free_blocks == 0
    for a, b in zip(before, pool.tokens(0, seqs[0]), strict=True):
        oracle.assert_same_bits(b, a)


@pytest.mark.archs("cpu")
def test_a_replay_with_a_tree_and_what_it_refuses(arch, rng):
    """The drafts of a tree see their ancestors; the draft that `commit` knows stays that of the last append."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=8, dtype="float32")
    rows = rng.standard_normal((2, 7, 1, 8)).astype(np.float32)
    store.append(0, *rows)
    q = rng.standard_normal((3, 1, 8)).astype(np.float32)
    new, parents = rng.standard_normal((2, 3, 1, 8)).astype(np.float32), np.array([[-1, -1, 1]], np.int32)
    out = oracle.to_numpy(store.extend(0, q, *new, parents=parents, keep=False))
    larger = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=10, dtype="float32")
    larger.append(0, *rows)
    np.testing.assert_allclose(out, oracle.to_numpy(larger.extend(0, q, *new, parents=parents)), atol=1e-5)
    into = np.full((1, 1, 8), 3, np.float32)
    for wrong, error in (
        ({"keep": 2}, tikv.OptionError),
        ({"return_mass": "sum", "mass_into": into}, tikv.ShapeError),
        ({"sink_logits": np.zeros(3, np.float32)}, tikv.ShapeError),
    ):
        with pytest.raises(error, match=r"KVCacheStore\.extend"):
            store.extend(0, q, *new, **{"keep": False, **wrong})
    with pytest.raises(tikv.ShapeError, match="number of tokens of q"):
        store.extend(0, q[:2], *new, keep=False)
    assert store.length == 7
    assert (into == 3).all()
