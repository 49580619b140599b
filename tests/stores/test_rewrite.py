"""`rewrite` and ``block=``: rows of a block of positions are replaced, and its queries see each other both ways."""

import contextlib
import copy

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

HEADS, GROUP, WIDTH = 2, 2, 32
ALONG_TOKENS = tikv.Quant(bits=8, group=32, axis="tokens", residual=32)
FORMS = [
    {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"dtype": "q4_0"}, {"dtype": "float8_e4m3fn"},
    {"dtype": tikv.Quant(bits=3, group=32), "v_dtype": "float16"}, {"dtype": "float32", "window": 64, "sinks": 2},
    {"dtype": ALONG_TOKENS}, {"dtype": "float32", "place": "host"}, {"dtype": "float32", "page_summaries": 8},
]  # fmt: skip


def buffers(store):
    """K, V and scales as they lie, or what `tokens` gives where a store has other arrays."""
    try:
        arrays = [store.keys(0), store.values(0)]
    except tikv.TikvError:
        arrays = list(store.tokens(0))
    with contextlib.suppress(tikv.TikvError):
        arrays += [a for a in store.scales(0) if a is not None]
    return [oracle.to_numpy(a).copy() for a in arrays]


def attention(q, k, v, seen):
    """(results (Hq, T, D), weights (H, group, T, n)) of q (Hq, T, D) over k, v (H, n, D); `seen` (T, n)."""
    q = q.reshape(len(k), -1, *q.shape[1:]).astype(np.float64)
    scores = np.where(seen, np.einsum("hgtd,hnd->hgtn", q, k) * WIDTH**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgtn,hnd->hgtd", weights, v).reshape(-1, q.shape[2], WIDTH), weights


def seen_of(length, tokens, block):
    """Which of `length` tokens the newest `tokens` queries see, the last `block` of them both ways."""
    end = np.arange(length - tokens, length)
    end[tokens - block :] = length - 1
    return np.arange(length) <= end[:, None]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_block_of_rows(arch, rng, form):
    """What a store holds is what it would hold had the new rows been appended; only the block's slots change."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    made = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 64, "batch_size": 2, **form}
    store, other = (tikv.KVCacheStore(**made) for _ in range(2))
    rows = rng.standard_normal((2, 2, 50, HEADS, WIDTH)).astype(np.float32)
    for layer in range(2):
        store.append(layer, *(place(a) for a in rows))
    before = buffers(store)
    start, tokens = 37, 9
    new = rng.standard_normal((2, 2, tokens, HEADS, WIDTH)).astype(np.float32)
    rows[:, :, start : start + tokens] = new
    store.rewrite(0, start, *(place(np.ascontiguousarray(a)) for a in new))
    for layer in range(2):
        other.append(layer, *(place(a) for a in rows))
    assert (store.length, store.held(0)) == (50, 50)
    for got, want in zip(store.tokens(0), other.tokens(0), strict=True):
        oracle.assert_same_bits(got, oracle.to_numpy(want))
    for got, old in zip(buffers(store), before, strict=True):
        for at in (np.s_[:, :, :start], np.s_[:, :, start + tokens :]):
            oracle.assert_same_bits(np.ascontiguousarray(got[at]), np.ascontiguousarray(old[at]))
    if form.get("page_summaries"):
        for got, want in zip(store.page_summaries(0), other.page_summaries(0), strict=True):
            oracle.assert_same_bits(np.ascontiguousarray(oracle.to_numpy(got)[:, :, :7]),
                                    np.ascontiguousarray(oracle.to_numpy(want)[:, :, :7]))  # fmt: skip
    one = [place(np.ascontiguousarray(a[:, :1])) for a in rows]
    for each in (store, other):
        each.append(0, *one)
    for got, want in zip(store.tokens(0), other.tokens(0), strict=True):
        oracle.assert_same_bits(got, oracle.to_numpy(want))


@pytest.mark.full("vulkan", unless=lambda params: params["form"]["dtype"] in ("float32", "int8"))
@pytest.mark.full(unless=lambda case: case["form"]["dtype"] in ("int8", ALONG_TOKENS) or case["form"] == FORMS[0])
@pytest.mark.parametrize("form", [form for form in FORMS if "place" not in form], ids=str)
def test_queries_of_a_block(arch, rng, form):
    """After an append, a rewrite and `extend`; also with their mass, and with new tokens that are not kept."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    made = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 64, **form}
    store = tikv.KVCacheStore(**made)
    store.append(0, *(place(a) for a in rng.standard_normal((2, 30, HEADS, WIDTH)).astype(np.float32)))
    store.rewrite(0, 24, *(place(a) for a in rng.standard_normal((2, 6, HEADS, WIDTH)).astype(np.float32)))

    def check(results, q, block, keys=None):
        k, v = (oracle.to_numpy(a)[0].astype(np.float64) for a in store.tokens(0)) if keys is None else keys
        want, weights = attention(q.swapaxes(0, 1), k, v, seen_of(k.shape[1], len(q), block))
        np.testing.assert_allclose(oracle.to_numpy(results[0]).swapaxes(0, 1), want, atol=5e-5)
        held = int(store.held(0))
        np.testing.assert_allclose(oracle.to_numpy(results[-1])[0], weights[..., :held].sum(axis=(1, 2)), atol=1e-4)

    q = rng.standard_normal((6, HEADS * GROUP, WIDTH)).astype(np.float32)
    check(store.attend(0, place(q), block=6, return_mass=True), q, 6)
    q, k, v = (rng.standard_normal((9, n, WIDTH)).astype(np.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    old = [oracle.to_numpy(a)[0].astype(np.float64) for a in store.tokens(0)]
    both = [np.concatenate([a, b.swapaxes(0, 1)], axis=1) for a, b in zip(old, (k, v), strict=True)]
    options = {"return_mass": True, "block": 4}
    if form["dtype"] is not ALONG_TOKENS:
        check(store.extend(0, *(place(a) for a in (q, k, v)), keep=False, **options), q, 4, both)
        check(store.extend(0, *(place(a) for a in (q, k, v)), **options), q, 4)
        check(store.extend(0, *(place(a) for a in (q, k, v)), return_mass=True, block=9), q, 9)


@pytest.mark.full(unless=lambda case: case["form"]["dtype"] == "int8")
@pytest.mark.parametrize("form", [{"dtype": "float32"}, {"dtype": "int8", "per_head": True}, {"dtype": ALONG_TOKENS}],
                         ids=str)  # fmt: skip
def test_pages(arch, rng, form):
    """A sequence whose blocks a fork shares; the fork keeps its rows, and queries of both blocks see their own."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    pool = tikv.PagedKVCacheStore(**form, num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=24,
                                  block_size=32)  # fmt: skip
    seqs = [pool.add()]
    rows = rng.standard_normal((2, 50, HEADS, WIDTH)).astype(np.float32)
    pool.append(0, *(place(a) for a in rows), seqs, [0, 50])
    seqs.append(pool.add() if form.get("per_head") else pool.fork(seqs[0]))
    if form.get("per_head"):
        pool.append(0, *(place(a) for a in rows), seqs[1:], [0, 50])
    before = [oracle.to_numpy(a).copy() for a in pool.tokens(0, seqs[1])]
    new = rng.standard_normal((2, 7, HEADS, WIDTH)).astype(np.float32)
    pool.rewrite(0, seqs[0], 43, *(place(a) for a in new))
    fresh = pool.add()
    rows[:, 43:] = new
    pool.append(0, *(place(a) for a in rows), [fresh], [0, 50])
    for got, want in zip(pool.tokens(0, seqs[0]), pool.tokens(0, fresh), strict=True):
        oracle.assert_same_bits(got, oracle.to_numpy(want))
    for got, want in zip(pool.tokens(0, seqs[1]), before, strict=True):
        oracle.assert_same_bits(got, want)
    q = rng.standard_normal((2, 7, HEADS * GROUP, WIDTH)).astype(np.float32)
    out, mass = (oracle.to_numpy(a) for a in pool.attend(0, place(q), seqs, block=8, return_mass="max"))
    for i, seq in enumerate(seqs):
        k, v = (oracle.to_numpy(a).swapaxes(0, 1).astype(np.float64) for a in pool.tokens(0, seq))
        want, weights = attention(q[i].swapaxes(0, 1), k, v, seen_of(50, 7, 7))
        np.testing.assert_allclose(out[i].swapaxes(0, 1), want, atol=5e-5)
        np.testing.assert_allclose(mass[i], weights.max(axis=(1, 2)), atol=5e-5)
    if form["dtype"] is ALONG_TOKENS:
        return
    q, k, v = (rng.standard_normal((15, n, WIDTH)).astype(np.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    for keep in (False, True):
        old = [[oracle.to_numpy(a).swapaxes(0, 1).astype(np.float64) for a in pool.tokens(0, seq)] for seq in seqs]
        results = pool.extend(0, place(q), place(k), place(v), seqs, [0, 9, 15], block=4, return_mass=True, keep=keep)
        for i, (first, end) in enumerate(((0, 9), (9, 15))):
            stored = [oracle.to_numpy(a).swapaxes(0, 1).astype(np.float64) for a in pool.tokens(0, seqs[i])]
            given = [
                np.concatenate([a, b[first:end].swapaxes(0, 1)], axis=1) for a, b in zip(old[i], (k, v), strict=True)
            ]
            keys, values = stored if keep else given
            want, weights = attention(q[first:end].swapaxes(0, 1), keys, values, seen_of(keys.shape[1], end - first, 4))
            np.testing.assert_allclose(oracle.to_numpy(results[0])[first:end].swapaxes(0, 1), want, atol=5e-5)
            held = stored[0].shape[1]
            mass = oracle.to_numpy(results[-1])[i, :, :held]
            np.testing.assert_allclose(mass, weights[..., :held].sum(axis=(1, 2)), atol=1e-4)


@pytest.mark.archs("cpu")
def test_after_a_compaction(arch, rng):
    """Positions are the true ones; those that a compaction may have moved are refused."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=24, dtype="float32")
    rows = rng.standard_normal((2, 12, 2, 4)).astype(np.float32)
    uneven = np.zeros((1, 2, 12), bool)
    uneven[0, 0, :3] = uneven[0, 1, 4:6] = True
    for keep in ([[[0, 3, 5], [1, 2, 7]]], uneven):
        store.reset()
        store.append(0, *rows)
        store.compact(0, keep)
        store.append(0, *rows[:, :6])
        other = copy.deepcopy(store)
        store.rewrite(0, 14, *rows[:, 7:10])
        held = store.held(0)
        at = store.positions(0)
        for got, old, new in zip(store.tokens(0), other.tokens(0), rows, strict=True):
            want = old.numpy().copy()
            for h in range(2):
                n = int(np.broadcast_to(held, (1, 2))[0, h])
                want[0, h, n - 4 : n - 1] = new[7:10, h]
                assert at[0, h, n - 4] == 14
            oracle.assert_same_bits(got, want)
        with pytest.raises(tikv.PositionError, match="has rows for 12 to 17"):
            store.rewrite(0, 11, *rows[:, :2])


@pytest.mark.archs("cpu")
def test_what_is_refused(arch):
    rows, q = np.ones((2, 12, 1, 32), np.float32), np.ones((3, 2, 32), np.float32)
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": "float32"}
    plain, ring = tikv.KVCacheStore(**form, capacity=16), tikv.KVCacheStore(**form, capacity=8, window=8, sinks=2)
    codes = tikv.KVCacheStore(**{**form, "dtype": ALONG_TOKENS}, capacity=128)
    pool = tikv.PagedKVCacheStore(**form, num_blocks=4, block_size=8)
    seq = pool.add()
    plain.append(0, *rows)
    ring.append(0, *rows)
    codes.append(0, *np.ones((2, 80, 1, 32), np.float32))
    pool.append(0, *rows, [seq], [0, 12])
    few, parents = rows[:, :3], np.array([[-1, 0, 1]], np.int32)
    before = [buffers(each) for each in (plain, ring)]
    for call, error, says in (
        (lambda: plain.rewrite(0, 10, *few), tikv.PositionError, "positions 10 to 12 of layer 0 cannot be rewritten"),
        (lambda: plain.rewrite(0, -1, *few), tikv.PositionError, "start=-1"),
        (lambda: plain.rewrite(0, 1.5, *few), tikv.DTypeError, "start"),
        (lambda: plain.rewrite(1, 1, *few), tikv.PositionError, "layer"),
        (lambda: plain.rewrite(0, 1, few[0], few[1][:2]), tikv.ShapeError, "v"),
        (lambda: plain.rewrite(0, 1, *few[..., :16]), tikv.ShapeError, "head width"),
        (lambda: ring.rewrite(0, 1, *few), tikv.PositionError, "has rows for 6 to 11"),
        (lambda: codes.rewrite(0, 3, *few), tikv.PositionError, "are codes, quantised once"),
        (lambda: pool.rewrite(0, seq, 10, *few), tikv.PositionError, "has rows for 0 to 11"),
        (lambda: pool.rewrite(0, 99, 1, *few), tikv.PositionError, "99"),
        (lambda: ring.attend(0, q, block=3), tikv.PositionError, "block is beyond the window of layer 0"),
        (lambda: ring.extend(0, q, *few, block=3), tikv.PositionError, "block is beyond the window"),
        (lambda: ring.extend(0, q, *few, block=3, keep=False), tikv.PositionError, "block is beyond the window"),
        (lambda: plain.attend(0, q, block=2), tikv.ShapeError, "3 queries are given with block=2"),
        (lambda: plain.attend(0, q, block=0), tikv.PositionError, "block=0"),
        (lambda: plain.attend(0, q, block="3"), tikv.DTypeError, "block"),
        (lambda: plain.extend(0, q, *few, block=3, parents=parents), tikv.OptionError, "block cannot be combined with"),
        (lambda: pool.attend(0, q, [seq], block=2), tikv.ShapeError, "with block=2"),
        (lambda: codes.extend(0, q, *few, block=3), tikv.OptionError, "block. Append the tokens"),
    ):
        with pytest.raises(error, match=says):
            call()
    for each, old in zip((plain, ring), before, strict=True):
        for a, b in zip(buffers(each), old, strict=True):
            oracle.assert_same_bits(a, b)
    assert (plain.length, ring.length, codes.length, pool.length(seq)) == (12, 12, 80, 12)
