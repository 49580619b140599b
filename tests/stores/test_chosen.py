"""Attention of stores over chosen tokens, which count from the first that a layer or a sequence has."""

import itertools

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

HEADS, GROUP, WIDTH = 2, 2, 64


def rows(rng, *lead):
    """K and V whose numbers float16, int8 with a scale of 1 / 8 and float32 have alike."""
    found = rng.integers(-8, 9, (2, *lead, HEADS, WIDTH)).astype(np.float32)
    found[..., 0] = 127
    return found / 8


def want(q, k, v, chosen, sees):
    """(out, lse, mass) of queries (B, T, Hq, D) over K and V (B, n, H, D), of tokens that `sees(t)` has."""
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.zeros(q.shape[:3])
    mass = np.zeros((len(q), HEADS, *chosen.shape[-2:]))
    for b, t, h in itertools.product(*map(range, q.shape[:3])):
        row = chosen[b, t] if chosen.ndim == 3 else chosen[b, h // GROUP, t]
        where = [i for i, token in enumerate(row) if token in sees(t)]
        keys, values = (a[b, row[where], h // GROUP] for a in (k, v))
        wide = np.concatenate([values, np.eye(len(where))], axis=1)
        found, lse[b, t, h] = reference.attention(q[b, t, h], keys, wide, scale=WIDTH**-0.5)
        out[b, t, h], weights = np.split(found, [v.shape[-1]])
        mass[b, h // GROUP, t, where] += weights
    return out, lse, mass


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        finite = np.isfinite(b)
        np.testing.assert_array_equal(oracle.to_numpy(a)[~finite], b[~finite])
        np.testing.assert_allclose(oracle.to_numpy(a)[finite], b[finite], rtol=0, atol=5e-5)


@pytest.mark.full(unless=lambda case: case["dtype"] == "float16")
@pytest.mark.parametrize(
    ("dtype", "v_dtype", "window"),
    [("float16", None, None), ("int8", None, 12), ("quant4_64", None, None), ("q8_0", "float16", None)],
)
def test_layers_of_a_store(arch, rng, dtype, v_dtype, window):
    """Linear and sliding, of every kind of format, K and V alike or not."""
    if dtype == "quant4_64":
        dtype = tikv.Quant(bits=4, group=64)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=30, batch_size=2, dtype=dtype,
                              v_dtype=v_dtype, window=window, sinks=2 if window else 0)  # fmt: skip
    k, v = rows(rng, 2, 30)
    store.append(0, oracle.place(k, arch), oracle.place(v, arch))
    held = sorted({*range(2), *range(30 - 10, 30)}) if window else list(range(30))
    k[:, held], v[:, held] = (oracle.to_numpy(a).astype(np.float32).swapaxes(1, 2) for a in store.tokens(0))
    q = rng.standard_normal((2, 3, HEADS * GROUP, WIDTH)).astype(np.float32)
    chosen = np.stack([[rng.permutation(30)[:14] for _ in range(3)] for _ in range(2)])

    def sees(t):
        return [p for p in held if p <= 27 + t and (p < 2 or p > 27 + t - 10 or not window)]

    expected = want(q, k, v, chosen, sees)
    options = {"indices": oracle.place(chosen, arch), "missing": "ignore"}
    got = store.attend(0, oracle.place(q, arch), return_lse=True, **options)
    close(got, expected[:2])
    if dtype in ("float16", "int8"):
        close(store.attend(0, oracle.place(q, arch), return_mass=True, **options), [expected[0], expected[2]])


@pytest.mark.full(unless=lambda case: case["dtype"] == "quant4_64")
@pytest.mark.parametrize("dtype", ["int8", "quant4_64", "q8_0", "mxfp4"])
def test_tokens_as_many_as_neighbours_in_another_order(arch, rng, dtype):
    """From the first to the last of them are as many as are chosen, and still each has the scales of its own row."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 30}
    store = tikv.KVCacheStore(**form, dtype=tikv.Quant(bits=4, group=64) if dtype == "quant4_64" else dtype)
    k, v = rng.standard_normal((2, 1, 9, HEADS, WIDTH)).astype(np.float32) * 2.0 ** np.arange(9)[:, None, None] / 16
    store.append(0, *(oracle.place(a.astype(np.float32), arch) for a in (k, v)))
    k, v = (oracle.to_numpy(a).astype(np.float32).swapaxes(1, 2) for a in store.tokens(0))
    q = rng.standard_normal((1, 1, HEADS * GROUP, WIDTH)).astype(np.float32) / 16
    for chosen in ([0, 3, 1, 2, 4], [4, 6, 5, 7]):
        chosen = np.array([[chosen]])
        got = store.attend(0, oracle.place(q, arch), indices=oracle.place(chosen, arch), return_lse=True)
        close(got, want(q, k, v, chosen, lambda t: range(9))[:2])


@pytest.mark.parametrize("by_head", [False, True])
def test_a_layer_whose_heads_hold_different_tokens(arch, rng, by_head):
    """Indices count what a compaction left of a head."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=30, dtype="float32")
    k, v = rows(rng, 1, 20)
    store.append(0, oracle.place(k, arch), oracle.place(v, arch))
    keep = np.zeros((1, HEADS, 20), bool)
    keep[0, 0, ::2], keep[0, 1, 5:] = True, True
    store.compact(0, keep)
    newer = rows(rng, 1, 2)
    store.append(0, oracle.place(newer[0], arch), oracle.place(newer[1], arch))
    whole = [np.concatenate([a, b], axis=1) for a, b in zip((k, v), newer, strict=True)]
    left = [[*np.flatnonzero(keep[0, h]), 20, 21] for h in range(HEADS)]
    lengths = [len(tokens) for tokens in left]
    q = rng.standard_normal((1, 1, HEADS * GROUP, WIDTH)).astype(np.float32)
    if by_head:
        chosen = np.stack([rng.permutation(n)[:9] for n in lengths])[None, :, None]
    else:
        chosen = rng.permutation(max(lengths))[None, None, :9]
    held = [np.full((1, max(lengths), HEADS, WIDTH), np.nan, np.float32) for _ in range(2)]
    each = []
    for h, tokens in enumerate(left):
        for to, a in zip(held, whole, strict=True):
            to[0, : lengths[h], h] = a[0, tokens, h]
        row = chosen[:, h] if by_head else chosen
        some = want(q, *held, np.where(row < lengths[h], row, -1), lambda t, h=h: range(lengths[h]))
        each.append(some[0][:, :, h * GROUP : (h + 1) * GROUP])
    got = store.attend(0, oracle.place(q, arch), indices=oracle.place(chosen, arch))
    close([got], [np.concatenate(each, axis=2)])


@pytest.mark.full(unless=lambda case: case["dtype"] == "int8")
@pytest.mark.parametrize(("dtype", "layout"), [("float16", "NHD"), ("int8", "HND"), ("quant4_64", "NHD")])
def test_sequences_of_a_pool(arch, rng, dtype, layout):
    if dtype == "quant4_64":
        dtype = tikv.Quant(bits=4, group=64)
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=16, block_size=4,
                                  dtype=dtype, layout=layout)  # fmt: skip
    seqs = [pool.add(), pool.add()]
    k, v = rows(rng, 2, 18)
    for t in range(0, 18, 6):  # so that blocks of both take turns
        for b, seq in enumerate(seqs):
            new = [oracle.place(np.ascontiguousarray(a[b, t : t + 6]), arch) for a in (k, v)]
            pool.append(0, *new, [seq], cu_seqlens=[0, 6])
    for b, seq in enumerate(seqs):
        k[b], v[b] = (oracle.to_numpy(a).astype(np.float32) for a in pool.tokens(0, seq))
    q = rng.standard_normal((2, 3, HEADS * GROUP, WIDTH)).astype(np.float32)
    chosen = np.stack([[[rng.permutation(18)[:9] for _ in range(3)] for _ in range(HEADS)] for _ in range(2)])
    expected = want(q, k, v, chosen, lambda t: range(16 + t))
    options = {"indices": oracle.place(chosen, arch)}
    close(pool.attend(0, oracle.place(q, arch), seqs, return_lse=True, **options), expected[:2])
    if isinstance(dtype, str):
        got = pool.attend(0, oracle.place(q, arch), seqs, return_mass=True, **options)
        close(got, [expected[0], expected[2]])


@pytest.mark.archs("cpu")
def test_lengths_on_the_device_and_lists(arch, rng):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=30, dtype="float32")
    k, v = rows(rng, 1, 20)
    store.append(0, k, v)
    q = rng.standard_normal((1, 1, HEADS * GROUP, WIDTH)).astype(np.float32)
    chosen = [[[3, 11, 0, -1]]]
    expected = want(q, k, v, np.array(chosen), lambda t: range(12))
    got = store.attend(0, q, seq_lens=np.array([12]), indices=chosen, return_lse=True)
    close(got, expected[:2])


@pytest.mark.archs("cpu")
def test_refused_calls(arch, rng):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 64}
    k, v = rows(rng, 1, 4)
    q = np.ones((1, HEADS * GROUP, WIDTH), np.float32)
    store = tikv.KVCacheStore(**form, dtype="float32")
    store.append(0, k, v)
    with pytest.raises(tikv.PositionError, match=r"indices\[0, 0, 1\]=4 is not a token of its sequence, which has 4"):
        store.attend(0, q, indices=[[[0, 4]]])
    with pytest.raises(tikv.OptionError, match="mass_queries=1 cannot be combined with indices"):
        store.attend(0, q, indices=[[[0]]], return_mass=True, mass_queries=1)
    store = tikv.KVCacheStore(**form, dtype=tikv.Quant(bits=4, group=32, axis="tokens", residual=32))
    store.append(0, k, v)
    with pytest.raises(tikv.OptionError, match="does not support indices"):
        store.attend(0, q, indices=[[[0]]])
