"""Attention over latents by the warpgroups of compute capability 9, against the float64 oracle.

The values are the first 512 columns of the keys, which have 576.
"""

import itertools

import numpy as np
import oracle
import pytest
from ops.test_attention import HeadPages
from ops.test_chosen import choose, expected, spoil
from ops.test_tensor_cores import check, make

import tikv
from tikv import reference
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import ContiguousLayout
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest

on_cuda = pytest.mark.archs("cuda")
LENS = (300, 1, 0, 64, 17)
WIDE = {"width": 576, "width_v": 512, "heads": 1}


def of_keys(case, cache):
    """The two with values that are columns of the keys, and no others."""
    case.v_real, case.v, cache.v = case.k_real[..., :512], None, None
    return case, cache


def run(case, cache, arch, lens=None, **options):
    """The attention of a `Case` or `Pages` without V, as float64: (out, lse)."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    lens = place(np.array(case.lens if lens is None else lens, np.int32))
    options |= {"return_lse": True, "head_dim_v": 512}
    if cache is case:
        ring = {"ring": True, "sinks": case.sinks, "window": case.ring} if case.ring else {}
        got = tikv.decode_attention(place(case.q), place(case.k), None, lens, **{**ring, **options})
    else:
        got = tikv.paged_decode_attention(
            place(case.q), place(cache.k), None, place(cache.table), lens, layout=cache.layout, **options
        )
    return [oracle.to_numpy(a).astype(np.float64) for a in got]


def attend(rng, arch, place="linear", seen=None, asked=None, tolerance=1.0, **options):
    """Compare with the oracle: `asked` goes to the call, `seen` to both."""
    case, cache = of_keys(*make(rng, place, **{**WIDE, **options}))
    got = run(case, cache, arch, **(seen or {}), **(asked or {}))
    check(case, got, case.expected(**(seen or {})), tolerance)


@on_cuda
@pytest.mark.parametrize(
    ("group", "dtype"),
    [*((n, "float16") for n in (1, 16, 20, 64, 72, 128)), *((n, "bfloat16") for n in (16, 32, 128))],
)
def test_groups(arch, rng, warpgroups, group, dtype):
    """Tasks of 16 and 64 query rows, not all of which exist."""
    attend(rng, arch, group=group, dtype=dtype, capacity=300, lens=LENS)


@on_cuda
@pytest.mark.parametrize(("place", "group"), [("linear", 16), ("NHD", 16), ("HND", 16), ("NHD", 64)])
@pytest.mark.parametrize("queries", [None, 3])
def test_storages_and_queries(arch, rng, warpgroups, place, queries, group):
    lens = LENS if queries is None else (300, 0, 64, 41)
    for window in (None, 37):
        attend(rng, arch, place, {"window": window}, queries=queries, lens=lens, capacity=300, group=group)


@on_cuda
@pytest.mark.parametrize("group", [16, 64])
@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("sinks", [0, 3])
def test_rings(arch, rng, warpgroups, queries, group, sinks):
    ring = {"ring": 99, "sinks": sinks, "capacity": 99}
    case, cache = of_keys(*make(rng, lens=(98, 99, 777, 41), queries=queries, group=group, **WIDE, **ring))
    check(case, run(case, cache, arch), case.expected(window=99))
    if queries and sinks:
        check(case, run(case, cache, arch, num_splits=2), case.expected(window=99))


@on_cuda
@pytest.mark.parametrize("splits", [1, 3, 8])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_splits(arch, rng, warpgroups, place, splits):
    for group, queries in ((16, None), (128, 2)):
        lens = (700, 33, 0, 699)
        attend(rng, arch, place, {"window": 600}, {"num_splits": splits}, lens=lens, capacity=700, queries=queries,
               group=group)  # fmt: skip


@on_cuda
def test_prompts(arch, rng, warpgroups):
    """Whose tasks have rows of one query, or of several that see different keys."""
    attend(rng, arch, queries=70, group=16, lens=(200, 0, 71), capacity=200)
    attend(rng, arch, queries=9, group=1, lens=(200, 0, 71), capacity=200)
    attend(rng, arch, queries=3, group=8, lens=(200, 3), capacity=200)
    attend(rng, arch, queries=9, group=64, lens=(200, 10, 9), capacity=200)
    attend(rng, arch, "NHD", {"window": 50}, queries=9, group=48, lens=(200, 10, 9))
    attend(rng, arch, seen={"causal": False}, queries=5, group=16, lens=(100, 7), capacity=100)


@on_cuda
@pytest.mark.parametrize("group", [16, 128])
def test_options_of_the_softmax(arch, rng, warpgroups, group):
    attend(rng, arch, seen={"scale": 0.4}, lens=(140, 11), capacity=140, group=group)
    attend(rng, arch, seen={"scale": -0.1}, lens=(140, 11), capacity=140, group=group)
    attend(rng, arch, seen={"scale": 1.3, "softcap": 2.5}, lens=(40, 11), tolerance=2, group=group)
    case, cache = of_keys(*make(rng, lens=(40, 0), group=group, **WIDE))
    out, lse = run(case, cache, arch, lse_base2=True)
    check(case, (out, lse * np.log(2)), case.expected())


@on_cuda
@pytest.mark.parametrize("group", [16, 64])
def test_maxima_that_grow_with_every_tile(arch, rng, warpgroups, group):
    """So results are rescaled again and again, for rows of both warpgroups at different tiles."""
    case, cache = of_keys(*make(rng, lens=(700, 300), capacity=700, group=group, **WIDE))
    grow = np.linspace(0.2, 3, 700)[:, None].astype(np.float16)
    case.k *= grow
    case.k_real *= grow.astype(np.float64)
    case.k_real = case.k[:, :, :700].astype(np.float64)
    case.v_real = case.k_real[..., :512]
    check(case, run(case, cache, arch, scale=0.3), case.expected(scale=0.3))


@on_cuda
@pytest.mark.parametrize(("queries", "group"), [(None, 16), (6, 64), (6, 16), (6, 5)])
def test_sinks(arch, rng, warpgroups, queries, group):
    """Which a window leaves visible: all of them, or those that are older than a query."""
    made = make(rng, capacity=200, lens=(200, 90, 6), sinks=20, queries=queries, group=group, **WIDE)
    case, cache = of_keys(*made)
    check(case, run(case, cache, arch, window=31, sinks=20), case.expected(window=31))


@on_cuda
@pytest.mark.parametrize("group", [16, 64])
def test_what_a_query_does_not_see_of_a_ring_or_behind_sinks_may_be_nan(arch, rng, warpgroups, group):
    for which, spoiled, seen, kept in (
        (0, -1, {"window": 99}, {"ring": 99, "sinks": 3, "capacity": 99}),
        (1, -12, {"window": 31}, {"sinks": 20, "capacity": 777}),
    ):
        made = make(rng, queries=2, lens=(98, 777), spoiled=spoiled, group=group, **WIDE, **kept)
        case, cache = of_keys(*made)
        got, want = run(case, cache, arch, sinks=case.sinks, **seen), case.expected(**seen)
        check(case, [a[:, :, which] for a in got], [a[:, :, which] for a in want])
        assert np.isnan(got[0][:, :, 1 - which]).any()


@on_cuda
@pytest.mark.parametrize(("queries", "group"), [(None, 16), (3, 16), (2, 64)])
def test_padding(arch, rng, warpgroups, queries, group):
    """The first slots of a sequence, which it does not see, hold NaN."""
    lens, starts = np.array((200, 66, 9)), np.array((70, 0, 9 - (queries or 1)))
    case, _ = of_keys(*make(rng, lens=lens, capacity=200, queries=queries, group=group, **WIDE))
    q = case.q if queries else case.q[:, :, None]
    want = []
    for b, start in enumerate(starts):
        case.k[b, :, :start] = np.nan
        for h, t in itertools.product(range(group), range(q.shape[2])):
            at = reference.visible_positions(lens[b], t, q.shape[2], first_valid=start)
            keys = case.k_real[b, 0, at]
            want.append(reference.attention(q[b, h, t], keys, keys[:, :512], scale=576**-0.5))
    want = [np.array(a) for a in zip(*want, strict=True)]
    both = np.stack((lens, starts), 1).astype(np.int32).ravel()
    q, k, both = (oracle.place(a, arch) for a in (case.q, case.k, both))
    caches = Caches(ContiguousLayout(starts=True), k, None, both, head_dim_v=512)
    got = attention_call("decode_attention", q, caches, AttendRequest()).attend(q, Results(return_lse=True))
    got = [oracle.to_numpy(a).astype(np.float64) for a in got]
    check(case, got, [a.reshape(b.shape) for a, b in zip(want, got, strict=True)])


@on_cuda
@pytest.mark.parametrize(("queries", "group"), [(3, 16), (2, 64)])
@pytest.mark.parametrize("place", ["linear", "NHD", "HND"])
def test_kv_heads(arch, rng, warpgroups, place, queries, group):
    wide = {**WIDE, "heads": 3}
    attend(rng, arch, place, {"window": 80}, lens=(150, 20), capacity=150, queries=queries, group=group, **wide)


@on_cuda
def test_kv_heads_and_their_own_lengths_and_pages(arch, rng, warpgroups):
    wide = {**WIDE, "heads": 2}
    case, cache = of_keys(*make(rng, capacity=300, lens=((300, 17), (0, 64)), group=16, **wide))
    check(case, run(case, cache, arch), case.expected())
    pages = HeadPages(rng, lens=((40, 0), (3, 25)), dtype="float16", query_dtype="float16", group=16, **wide)
    case, cache = of_keys(pages.case, pages)
    check(case, run(case, cache, arch), case.expected())


@on_cuda
@pytest.mark.parametrize("group", [3, 16, 64])
@pytest.mark.parametrize("spoiled", [-1, -10])
def test_what_a_query_does_not_see_may_be_nan(arch, rng, warpgroups, group, spoiled):
    case, cache = of_keys(*make(rng, queries=2, lens=(40, 23), spoiled=spoiled, group=group, **WIDE))
    got, want, query = run(case, cache, arch, window=9), case.expected(window=9), 0 if spoiled == -1 else 1
    check(case, [a[:, :, query] for a in got], [a[:, :, query] for a in want])


@on_cuda
@pytest.mark.parametrize(("place", "group"), [("linear", 16), ("NHD", 16), ("linear", 5), ("linear", 64)])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_query_that_sees_an_infinity_has_no_number(arch, rng, warpgroups, place, group, value):
    """In that column at least; the queries before it, in the same task or in another one, are as without."""
    case, cache = of_keys(*make(rng, place, queries=3, lens=(130, 70), capacity=130, group=group, **WIDE))
    want, _ = case.expected()
    if place == "linear":
        case.k[0, 0, 128, 5] = value
    else:
        page, row = divmod(128, cache.k.shape[1])
        cache.k[cache.table[0, page], row, 0, 5] = value
    got, _ = run(case, cache, arch)
    assert np.isnan(got[0, :, 1:, 5]).all()
    for found, wanted in ((got[0, :, 0], want[0, :, 0]), (got[1], want[1])):
        np.testing.assert_allclose(found, wanted, atol=2.0**-9)


@on_cuda
@pytest.mark.parametrize(("group", "queries"), [(128, None), (16, 3), (20, 2)])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_chosen(arch, rng, warpgroups, place, group, queries):
    made = make(rng, place, group=group, queries=queries, lens=(300, 90), capacity=300, **WIDE)
    indices = choose(rng, made[0], 150, dtype=np.int32 if place == "NHD" else np.int64)
    if place == "linear":
        spoil(made[0], indices)
    case, cache = of_keys(*made)
    for splits in (None, 2):
        got = run(case, cache, arch, indices=oracle.place(indices, arch), num_splits=splits)
        check(case, got, expected(case, indices)[:2])


@on_cuda
def test_the_longest_kernel_is_one_function(arch, rng, warpgroups):
    seen = {"window": 60, "softcap": 5.0}
    for group in (16, 64):
        attend(rng, arch, "NHD", seen, lens=(150, 9), tolerance=2, dtype="bfloat16", group=group, queries=4)
    made = make(rng, capacity=200, lens=((200, 4), (90, 60)), sinks=20, queries=4, group=16, **{**WIDE, "heads": 2})
    case, cache = of_keys(*made)
    got = run(case, cache, arch, window=31, sinks=20, softcap=5.0)
    check(case, got, case.expected(window=31, softcap=5.0), 2.0)
    ring = {"ring": 99, "sinks": 3, "capacity": 99}
    case, cache = of_keys(*make(rng, lens=(98, 777), queries=3, group=64, **WIDE, **ring))
    indices = choose(rng, case, 90)
    got = run(case, cache, arch, indices=oracle.place(indices, arch), softcap=5.0)
    check(case, got, expected(case, indices, window=99, softcap=5.0)[:2], 2.0)


@on_cuda
def test_mass_beside_latents(arch, rng, warpgroups):
    """It is weighed by the log-sum-exps that they gave."""
    case, _ = of_keys(*make(rng, lens=(300, 9), capacity=300, group=64, **WIDE))
    q, k, lens = (oracle.place(a, arch) for a in (case.q, case.k, np.array(case.lens)))
    out, mass = tikv.decode_attention(q, k, None, lens, head_dim_v=512, return_mass=True)
    check(case, (oracle.to_numpy(out).astype(np.float64), case.expected()[1]), case.expected())
    np.testing.assert_allclose(oracle.to_numpy(mass).sum(-1)[:, 0], 64, rtol=2e-3)


@on_cuda
def test_values_of_their_own_are_read_in_the_same_form(arch, rng):
    """A call whose values have the form of columns of the keys, but are others."""
    case, _ = make(rng, lens=(90, 9), capacity=90, group=16, **WIDE)
    other = rng.standard_normal(case.k.shape).astype(np.float16)
    q, k, wide, lens = (oracle.place(a, arch) for a in (case.q, case.k, other, np.array(case.lens)))
    first = tikv.decode_attention(q, k, None, lens, head_dim_v=512)
    second = tikv.decode_attention(q, k, wide[..., :512], lens)
    case.v_real = other[:, :, :90, :512].astype(np.float64)
    want = case.expected()
    check(case, (oracle.to_numpy(second).astype(np.float64), want[1]), want)
    case.v_real = case.k_real[..., :512]
    want = case.expected()
    check(case, (oracle.to_numpy(first).astype(np.float64), want[1]), want)
