"""Attention over chosen tokens, against the float64 oracle over the same tokens; what nobody chose is NaN."""

import itertools

import numpy as np
import oracle
import pytest
from ops.test_attention import Case, HeadPages, Pages, assert_close

import tikv
from tikv import arrays, reference

pytestmark = [pytest.mark.full(each_value=True), pytest.mark.thorough]


def choose(rng, case, k, *, by_head=False, dtype=np.int64, holes=True):
    """(B, T, k) or (B, H, T, k) tokens of a case's sequences, each once for a query, in any order; some are -1."""
    queries = case.q.shape[2] if case.q.ndim == 4 else 1
    heads = case.k_real.shape[1]
    found = np.full((len(case.lens), heads if by_head else 1, queries, k), -1, dtype)
    for b, h, t in itertools.product(*map(range, found.shape[:3])):
        length = case.length(b, h) if by_head else int(np.max(case.lens[b]))
        some = rng.permutation(length)[: k - 2 if holes else k]
        found[b, h, t, rng.permutation(k)[: len(some)]] = some
    return found if by_head else found[:, 0]


def expected(case, indices, *, scale=None, softcap=None, slopes=None, sink_logits=None, **seen):
    """(out, lse, the weight of each chosen token) in float64."""
    q = case.q if case.q.ndim == 4 else case.q[:, :, None]
    out, lse = np.zeros((*q.shape[:3], case.v_real.shape[-1])), np.zeros(q.shape[:3])
    mass = np.zeros((len(case.lens), case.k_real.shape[1], *indices.shape[-2:]))
    for b, h, t in itertools.product(*map(range, q.shape[:3])):
        kv_head, queries = h // case.group, q.shape[2]
        length = case.length(b, kv_head)
        visible = set(reference.visible_positions(length, t, queries, sinks=case.sinks, held=case.ring, **seen))
        row = indices[b, t] if indices.ndim == 3 else indices[b, kv_head, t]
        where = [i for i, token in enumerate(row) if token in visible]
        at = row[where]
        added = {} if slopes is None else {"bias": float(slopes[h]) * (at - (length - queries + t)).astype(float)}
        if sink_logits is not None:
            added["sink_logit"] = float(sink_logits[h])
        wide = np.concatenate([case.v_real[b, kv_head, at], np.eye(len(at))], axis=1)
        found, lse[b, h, t] = reference.attention(
            q[b, h, t], case.k_real[b, kv_head, at], wide, scale=scale or q.shape[-1] ** -0.5, softcap=softcap, **added
        )
        out[b, h, t], weights = np.split(found, [case.v_real.shape[-1]])
        mass[b, kv_head, t, where] += weights
    return out.reshape(*case.q.shape[:-1], -1), lse.reshape(case.q.shape[:-1]), mass


def spoil(case, indices):
    """Make NaN of every row of a linear float cache that no query chose."""
    for b, h in itertools.product(*map(range, case.k.shape[:2])):
        row = indices[b] if indices.ndim == 3 else indices[b, h]
        others = np.setdiff1d(np.arange(case.k.shape[2]), row)
        case.k[b, h, others] = case.v[b, h, others] = np.nan


@pytest.mark.full(unless=lambda case: case["group"] != 12)
@pytest.mark.parametrize(
    ("queries", "group", "by_head", "splits"), [(None, 2, False, None), (3, 2, True, 3), (5, 12, False, None)]
)
def test_only_chosen_rows_are_read(arch, rng, queries, group, by_head, splits):
    """12 query heads of a KV head are several tasks of one query."""
    case = Case(rng, queries=queries, group=group, lens=(40, 9, 0), capacity=44)
    indices = choose(rng, case, 12, by_head=by_head, dtype=np.int32 if by_head else np.int64)
    spoil(case, indices)
    got = case.run(arch, indices=oracle.place(indices, arch), num_splits=splits)
    assert_close(got, expected(case, indices)[:2], "float32")


@pytest.mark.full(unless=lambda case: case["dtype"] == "float16")
@pytest.mark.parametrize(
    ("dtype", "queries", "by_head"), [("int8", 3, False), ("float16", None, True), ("float8_e4m3fn", None, False)]
)
def test_tokens_of_a_ring(arch, rng, dtype, queries, by_head):
    """Those that were overwritten count for nothing, the sinks stay."""
    case = Case(rng, dtype=dtype, queries=queries, ring=24, sinks=3, lens=(61, 24, 7))
    indices = choose(rng, case, 30, by_head=by_head)
    got = case.run(arch, indices=oracle.place(indices, arch))
    assert_close(got, expected(case, indices, window=24)[:2], "float32")


@pytest.mark.full(unless=lambda case: case["layout"] == "NHD")
@pytest.mark.parametrize(
    ("layout", "dtype", "queries", "by_head"),
    [("NHD", "bfloat16", 3, True), ("HND", "int8", None, False), ("VLLM", "float16", 3, False)],
)
def test_tokens_of_pages(arch, rng, layout, dtype, queries, by_head):
    pages = Pages(rng, layout=layout, dtype=dtype, queries=queries, lens=(40, 3, 23))
    indices = choose(rng, pages.case, 14, by_head=by_head)
    got = pages.run(arch, indices=oracle.place(indices, arch))
    assert_close(got, expected(pages.case, indices)[:2], "float32")


@pytest.mark.parametrize("by_head", [False, True])
def test_heads_with_pages_and_lengths_of_their_own(arch, rng, by_head):
    """Of tokens that all heads share, a head counts those that it has."""
    pages = HeadPages(rng, heads=3, lens=((40, 0, 7), (3, 25, 40)))
    indices = choose(rng, pages.case, 14, by_head=by_head)
    got = pages.run(arch, indices=oracle.place(indices, arch))
    assert_close(got, expected(pages.case, indices)[:2], "float32")


def test_windows_sinks_and_causality_hold_on_top(arch, rng):
    case = Case(rng, queries=4, capacity=60, sinks=2, lens=(60, 11))
    indices = choose(rng, case, 40)
    place = oracle.place(indices, arch)
    got = case.run(arch, indices=place, window=9, sinks=2)
    assert_close(got, expected(case, indices, window=9)[:2], "float32")
    got = case.run(arch, indices=place, window=9, sinks=2, causal=False)
    assert_close(got, expected(case, indices, window=9, causal=False)[:2], "float32")


def test_terms_of_the_scores(arch, rng):
    case = Case(rng, queries=3, lens=(40, 9))
    indices = choose(rng, case, 12)
    slopes, sinks = (rng.uniform(0.1, 0.5, 4).astype(np.float32) for _ in range(2))
    got = case.run(arch, indices=oracle.place(indices, arch), softcap=2.0, alibi_slopes=oracle.place(slopes, arch),
                   sink_logits=oracle.place(sinks, arch), num_splits=2)  # fmt: skip
    want = expected(case, indices, softcap=2.0, slopes=slopes, sink_logits=sinks)
    assert_close(got, want[:2], "float32")


def test_a_tree_of_new_tokens(arch, rng):
    """A chosen token among the new ones is seen by its descendants alone; slopes count depth."""
    parents = np.array([[-1, 0, 0, 1, 2]] * 2)
    case = Case(rng, queries=5, lens=(30, 12))
    indices = np.stack([[rng.permutation(n)[:9] for _ in range(5)] for n in case.lens])
    indices[:, :, 0] = np.array(case.lens)[:, None] - 4  # the second new token, which two of them see
    indices[:, :, 1:] = np.where(indices[:, :, 1:] == indices[:, :, :1], -1, indices[:, :, 1:])
    slopes = rng.uniform(0.1, 0.5, 4).astype(np.float32)
    got = case.run(arch, indices=oracle.place(indices, arch), parents=oracle.place(parents, arch),
                   alibi_slopes=oracle.place(slopes, arch))  # fmt: skip
    sees = reference.tree_mask(parents[0])
    depth = sees.sum(axis=1) - 1
    out, lse = np.zeros(case.q.shape), np.zeros(case.q.shape[:3])
    for b, h, t in itertools.product(*map(range, case.q.shape[:3])):
        new = case.lens[b] - 5
        at = [p for p in indices[b, t] if p >= 0 and (p < new or sees[t, p - new])]
        stands = np.array([p if p < new else new + depth[p - new] for p in at], float)
        out[b, h, t], lse[b, h, t] = reference.attention(
            case.q[b, h, t], case.k_real[b, h // 2, at], case.v_real[b, h // 2, at], scale=0.25,
            bias=float(slopes[h]) * (stands - (new + depth[t])),
        )  # fmt: skip
    assert_close(got, (out, lse), "float32")


@pytest.mark.parametrize(("dtype", "queries", "by_head"), [("float16", 3, True), ("int8", None, False)])
def test_mass_is_in_the_order_of_the_indices(arch, rng, dtype, queries, by_head):
    case = Case(rng, dtype=dtype, queries=queries, lens=(40, 9, 0))
    indices = choose(rng, case, 12, by_head=by_head)
    args = [oracle.place(a, arch) for a in (case.q, case.k, case.v, np.array(case.lens))]
    given = case.scales(arch) | {"indices": oracle.place(indices, arch)}
    _, mass = tikv.decode_attention(*args, return_mass=True, num_splits=2, **given)
    np.testing.assert_allclose(oracle.to_numpy(mass), expected(case, indices)[2], atol=2e-5)


def test_all_tokens_are_dense_attention(arch, rng):
    case = Case(rng, queries=3, lens=(40, 40))
    indices = np.broadcast_to(rng.permutation(40), (2, 3, 40))
    got = case.run(arch, indices=oracle.place(np.ascontiguousarray(indices), arch))
    assert_close(got, case.expected(), "float32")
    assert_close(got, case.run(arch), "float32")


@pytest.mark.parametrize("name", ["quant4_64", pytest.param("q8_0", marks=pytest.mark.full)])
def test_codes_of_groups(arch, rng, name):
    k, v = (rng.standard_normal((2, 2, 40, 64)).astype(np.float16) for _ in "kv")
    caches = [tikv.quantize(oracle.place(a, arch), name) for a in (k, v)]
    real = [oracle.to_numpy(tikv.dequantize(cache)).astype(np.float64) for cache in caches]
    q, lens = rng.standard_normal((2, 8, 64)).astype(np.float32), np.array([40, 23])
    indices = np.stack([rng.permutation(n)[:20] for n in lens])[:, None]
    got = tikv.decode_attention(oracle.place(q, arch), *caches, lens, indices=oracle.place(indices, arch))
    for b, h in itertools.product(range(2), range(8)):
        want, _ = reference.attention(q[b, h], *(a[b, h // 4, indices[b, 0]] for a in real), scale=0.125)
        np.testing.assert_allclose(oracle.to_numpy(got)[b, h], want, rtol=0, atol=2e-5)


def test_values_that_are_columns_of_the_keys(arch, rng):
    """Latent attention: 16 query heads share one KV head, and K is read once for both."""
    case = Case(rng, heads=1, group=16, width=32, width_v=16, queries=2, lens=(40, 9))
    case.v_real = case.k_real[..., :16]
    indices = choose(rng, case, 12)
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    got = tikv.decode_attention(place(case.q), place(case.k), None, np.array(case.lens), head_dim_v=16,
                                indices=place(indices), return_lse=True)  # fmt: skip
    assert_close([oracle.to_numpy(a).astype(np.float64) for a in got], expected(case, indices)[:2], "float32")


@pytest.mark.archs("cpu")
def test_strides_and_no_tokens(arch, rng):
    case = Case(rng, queries=3, lens=(40, 9))
    indices = choose(rng, case, 6)
    wide = np.full((2, 3, 13), 10**6)
    wide[..., 4:10] = indices
    want = expected(case, indices)[:2]
    assert_close(case.run(arch, indices=wide[..., 4:10]), want, "float32")
    assert_close(case.run(arch, indices=indices.tolist()), want, "float32")
    shared = np.broadcast_to(np.arange(5), (2, 3, 5))
    assert_close(case.run(arch, indices=shared), expected(case, shared)[:2], "float32")
    for nothing in (np.empty((2, 3, 0), int), np.full((2, 3, 4), -1)):
        out, lse = case.run(arch, indices=nothing)
        assert (out == 0).all()
        assert np.isneginf(lse).all()


@pytest.mark.archs("cuda", "vulkan")
def test_indices_that_only_the_device_knows_are_bounded(arch, rng):
    """An index of no token reads nothing."""
    case = Case(rng, queries=3, capacity=44, lens=(40, 9))
    indices = choose(rng, case, 12)
    wrong = np.where(indices < 0, rng.choice([-2, -(2**31), 40, 43, 44, 2**31 - 1], indices.shape), indices)
    spoil(case, indices)
    live = arrays.runtime_of()
    for dtype in (np.int32, np.int64):
        on_device = arrays.CacheArray(arrays.to_device(wrong.astype(dtype), live), live)
        got = case.run(arch, indices=on_device)
        assert_close(got, expected(case, indices)[:2], "float32")


def test_lengths_far_beyond_a_ring(arch, rng):
    """The tokens that a ring still has are counted from the first that it ever had."""
    case = Case(rng, ring=24, sinks=3, lens=(61, 47))
    indices = choose(rng, case, 20)
    want = expected(case, indices, window=24)[:2]
    later = 21 * ((1 << 35) // 21)  # a whole number of rounds, so that the same slots have the same tokens
    lens = np.array(case.lens) + later
    moved = np.where(indices >= 3, indices + later, indices)
    ring = {"ring": True, "window": 24, "sinks": 3}
    got = tikv.decode_attention(*(oracle.place(a, arch) for a in (case.q, case.k, case.v, lens)),
                                indices=oracle.place(moved, arch), return_lse=True, **ring)  # fmt: skip
    assert_close([oracle.to_numpy(a).astype(np.float64) for a in got], want, "float32")


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("indices", "error", "match"),
    [
        ([[[0, 9, -1]], [[3, 9, 1]]], tikv.PositionError, r"indices\[1, 0, 1\]=9 is not a token of .* which has 9"),
        ([[[0, -2, -1]], [[3, 8, 1]]], tikv.PositionError, r"indices\[0, 0, 1\]=-2"),
        (np.zeros((2, 2, 1, 3), int) + 9, tikv.PositionError, r"indices\[1, 0, 0, 0\]=9"),
        (np.zeros((2, 3), int), tikv.ShapeError, r"\(B, T, K\), or \(B, H, T, K\)"),
        (np.zeros((2, 4, 1, 3), int), tikv.ShapeError, r"\(B, H, T, K\) = \(2, 2, 1, K\)"),
        (np.zeros((2, 2, 3), int), tikv.ShapeError, r"\(B, T, K\) = \(2, 1, K\)"),
        (np.zeros((2, 1, 3)), tikv.DTypeError, "indices"),
    ],
)
def test_refused_indices(arch, rng, indices, error, match):
    case = Case(rng, lens=(40, 9))
    with pytest.raises(error, match=match):
        case.run(arch, indices=indices)


@pytest.mark.archs("cpu", "cuda")
def test_a_token_that_is_named_twice(arch, rng, debug):
    """It counts twice; in debug mode it is an error."""
    case = Case(rng, lens=(40, 9))
    indices = np.array([[[3, 1, 3, -1, -1]], [[0, 1, 2, 3, 4]]])
    assert_close(case.run(arch, indices=oracle.place(indices, arch)), expected(case, indices)[:2], "float32")
    debug()
    with pytest.raises(tikv.PositionError, match=r"indices\[0, 0\] name token 3 more than once"):
        case.run(arch, indices=oracle.place(indices, arch))


@pytest.mark.archs("cpu")
def test_refused_calls(arch, rng):
    case = Case(rng, lens=(40, 9))
    indices = np.zeros((2, 1, 4), int)
    with pytest.raises(tikv.OptionError, match="impl='torch'"):
        tikv.decode_attention(case.q.astype(np.float16), case.k, case.v, 9, indices=indices, impl="torch")
    ring = Case(rng, ring=24, lens=(40,))
    with pytest.raises(tikv.CapacityError, match="Pass lengths as an array"):
        tikv.decode_attention(ring.q, ring.k, ring.v, 2**30, ring=True, window=24, indices=[[[0]]])
