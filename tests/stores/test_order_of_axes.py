"""`attend` takes queries token-major as `append` and `extend` do, or head-major when told.

What fits one order alone is refused in the other, and never read as something else.
"""

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

KV_HEADS, HEADS, WIDTH = 2, 4, 16
FORM = {"num_layers": 1, "num_kv_heads": KV_HEADS, "head_dim": WIDTH, "dtype": "float32"}


class Contiguous:
    """A store of some sequences of 6 tokens."""

    def __init__(self, arch, rng, batch, num_kv_heads=KV_HEADS):
        self.arch, self.batch = arch, batch
        self.store = tikv.KVCacheStore(**FORM | {"num_kv_heads": num_kv_heads}, capacity=32, batch_size=batch)
        k, v = rng.standard_normal((2, batch, 6, num_kv_heads, WIDTH)).astype(np.float32)
        self.rows = k, v
        self.store.append(0, oracle.place(k, arch), oracle.place(v, arch))

    def attend(self, q, **options):
        return self.store.attend(0, oracle.place(np.ascontiguousarray(q), self.arch), **options)


class Paged(Contiguous):
    """A pool of as many sequences."""

    def __init__(self, arch, rng, batch, num_kv_heads=KV_HEADS):
        self.arch, self.batch = arch, batch
        self.store = tikv.PagedKVCacheStore(**FORM | {"num_kv_heads": num_kv_heads}, num_blocks=16, block_size=4)
        self.seqs = [self.store.add() for _ in range(batch)]
        k, v = rng.standard_normal((2, batch, 6, num_kv_heads, WIDTH)).astype(np.float32)
        self.rows = k, v
        rows = [oracle.place(a.reshape(batch * 6, num_kv_heads, WIDTH), arch) for a in (k, v)]
        self.store.append(0, *rows, self.seqs, cu_seqlens=range(0, 6 * batch + 1, 6))

    def attend(self, q, **options):
        return self.store.attend(0, oracle.place(np.ascontiguousarray(q), self.arch), self.seqs, **options)


def expected(model, q):
    """What (batch, T, Hq, D) queries of the newest tokens see, in float64: the result and its log-sum-exp."""
    k, v = (np.repeat(a.astype(np.float64), q.shape[2] // a.shape[2], axis=2) for a in model.rows)
    scores = np.einsum("bthd,bnhd->btnh", q.astype(np.float64), k) * WIDTH**-0.5
    tokens, held = q.shape[1], k.shape[1]
    scores[:, np.arange(held)[None] > np.arange(held - tokens, held)[:, None]] = -np.inf
    most = scores.max(axis=2, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(axis=2, keepdims=True)
    return np.einsum("btnh,bnhd->bthd", weights / total, v), (most + np.log(total))[:, :, 0]


def equal(got, want):
    assert tuple(got.shape) == want.shape
    np.testing.assert_allclose(oracle.to_numpy(got), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", [Contiguous, Paged])
def test_every_order_gives_the_same(arch, rng, kind, batch):
    model = kind(arch, rng, batch)
    for tokens in (1, 3):
        q = rng.standard_normal((batch, tokens, HEADS, WIDTH)).astype(np.float32)
        want, want_lse = expected(model, q)
        swapped = want.swapaxes(1, 2), want_lse.swapaxes(1, 2)
        forms = [(q, {}, (want, want_lse)), (q.swapaxes(1, 2), {"layout": "head_major"}, swapped)]
        if batch == 1:
            forms += [(a[0], options, (out[0], lse[0])) for a, options, (out, lse) in forms]
        if tokens == 1:
            single = want[:, 0], want_lse[:, 0]
            forms += [(q[:, 0], {}, single), (q[:, 0], {"layout": "head_major"}, single)]
            forms += [(q[0, 0], {}, (single[0][0], single[1][0]))] if batch == 1 else []
        for given, options, (out, lse) in forms:
            equal(model.attend(given, **options), out)
            got = model.attend(given, **options, return_lse=True, return_mass=True)
            equal(got[0], out)
            equal(got[1], lse)
            assert tuple(got[2].shape) == (batch, KV_HEADS, 6)
            np.testing.assert_allclose(oracle.to_numpy(got[2]).sum(-1), tokens * HEADS // KV_HEADS, rtol=1e-5)
            room = oracle.place(np.full(out.shape, np.nan, np.float32), arch)
            assert model.attend(given, **options, out=room) is room
            equal(room, out)


@pytest.mark.archs("cpu")
def test_append_and_attend_are_the_halves_of_extend(arch, rng):
    q, k, v = (rng.standard_normal((1, 10, heads, WIDTH)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    whole, halves = (tikv.KVCacheStore(**FORM, capacity=32) for _ in range(2))
    want, want_lse = whole.extend(0, q, k, v, return_lse=True)
    halves.append(0, k, v)
    for part in (slice(4, 10), slice(9, 10)):
        got, lse = halves.attend(0, q[:, part], return_lse=True)
        np.testing.assert_allclose(got[:, -1], want[:, -1], atol=1e-6)
        np.testing.assert_allclose(lse[:, -1], want_lse[:, -1], atol=1e-6)
    np.testing.assert_allclose(halves.attend(0, q[0]), want[0], atol=1e-6)


SHAPE, POSITION = tikv.ShapeError, tikv.PositionError
TOKENS_FIRST, HEADS_FIRST = r"\(batch, T, Hq, D\)", r"\(batch, Hq, T, D\)"


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("kind", [Contiguous, Paged])
@pytest.mark.parametrize(
    ("shape", "layout", "error", "says"),
    [
        ((1, 4, 3, 16), "token_major", SHAPE, rf"Read as {HEADS_FIRST}, it fits: use layout='head_major'\.$"),
        ((1, 3, 4, 16), "head_major", SHAPE, rf"Read as {TOKENS_FIRST}, it fits: use layout='token_major'\.$"),
        ((4, 3, 16), "token_major", SHAPE, r"Read as \(Hq, T, D\), it fits: use layout='head_major'\.$"),
        ((1, 5, 3, 16), "token_major", SHAPE, r"3 query heads .* Use a multiple of 2\.$"),
        ((1, 8, 4, 16), "token_major", POSITION, rf"8 queries.* Read as {HEADS_FIRST}, q would fit: .*'head_major'\.$"),
        (
            (1, 4, 8, 16),
            "head_major",
            POSITION,
            rf"8 queries.* Read as {TOKENS_FIRST}, q would fit: .*'token_major'\.$",
        ),
        ((1, 8, 8, 16), "token_major", POSITION, "8 queries(?!.*would fit)"),
        (
            (2, 1, 4, 16),
            "token_major",
            SHAPE,
            rf"batch of q is 2 where 1 is needed \(q: f32\[2,1,4,16\], {TOKENS_FIRST}",
        ),
        ((1, 1, 4, 8), "token_major", SHAPE, r"the head width of q is 8 .*f32\[1,1,4,8\]"),
        (
            (16,),
            "token_major",
            SHAPE,
            rf"q is f32\[16\], with 1 axes; it must be {TOKENS_FIRST} or \(batch, Hq, D\), or",
        ),
        ((4, 16), "NHD", tikv.OptionError, "unknown layout 'NHD'"),
    ],
)
def test_another_order_is_refused(arch, rng, kind, shape, layout, error, says):
    model = kind(arch, rng, 1)
    with pytest.raises(error, match=says) as caught:
        model.attend(np.ones(shape, np.float32), layout=layout)
    assert str(caught.value).startswith(f"{type(model.store).__name__}.attend: ")


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("kind", [Contiguous, Paged])
def test_what_can_be_read_in_two_ways_is_refused(arch, rng, kind):
    """Of one KV head (1, n, D) may be n query heads or n tokens, head-major; token-major it is n query heads."""
    model = kind(arch, rng, 1, num_kv_heads=1)
    q = rng.standard_normal((1, 4, WIDTH)).astype(np.float32)
    equal(model.attend(q), expected(model, q[:, None])[0][:, 0])
    with pytest.raises(
        tikv.ShapeError, match=r"may be 4 query heads of one token or 4 tokens of one query head\. Pass \(batch"
    ):
        model.attend(q, layout="head_major")
    equal(model.attend(q[:, :, None], layout="head_major"), expected(model, q[:, None])[0].swapaxes(1, 2))
    equal(model.attend(q[:, None], layout="head_major"), expected(model, q[:, :, None])[0].swapaxes(1, 2))


@pytest.mark.archs("cpu")
def test_a_batch_has_its_axis(arch, rng):
    for kind in (Contiguous, Paged):
        model = kind(arch, rng, 2)
        with pytest.raises(
            tikv.ShapeError, match=r"the batch of q is 3 where 2 is needed \(q: f32\[3,4,16\], \(batch, Hq"
        ):
            model.attend(np.ones((3, HEADS, WIDTH), np.float32))
        with pytest.raises(tikv.ShapeError, match=r"2 axes; it must be \(batch, T, Hq, D\) or \(batch, Hq, D\)\.$"):
            model.attend(np.ones((HEADS, WIDTH), np.float32))
        with pytest.raises(tikv.ShapeError, match=r"out is f32\[2,4,3,16\] where \(2, 3, 4, 16\) is needed"):
            model.attend(np.ones((2, 3, HEADS, WIDTH), np.float32), out=np.zeros((2, HEADS, 3, WIDTH), np.float32))


@pytest.mark.archs("cpu")
def test_a_store_of_groups_along_tokens_has_the_same_order(arch, rng):
    """Its codes and its newest tokens are merged in the caller's order."""
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "capacity": 96, "batch_size": 2}
    store = tikv.KVCacheStore(**form, dtype=tikv.Quant(4, 32, "tokens", 32))
    store.append(0, *rng.standard_normal((2, 2, 70, 1, 32)).astype(np.float32))
    q = rng.standard_normal((2, 3, 2, 32)).astype(np.float32)
    want, want_lse = store.attend(0, q.swapaxes(1, 2), layout="head_major", return_lse=True)
    got, lse = store.attend(0, q, return_lse=True)
    oracle.assert_same_bits(got, np.ascontiguousarray(want.swapaxes(1, 2)))
    oracle.assert_same_bits(lse, np.ascontiguousarray(want_lse.swapaxes(1, 2)))
    equal(store.attend(0, q[:, -1]), want[:, :, -1])
    with pytest.raises(
        tikv.PositionError, match=r"64 queries .* only the newest 38 .* q would fit: use layout='head_major'"
    ):
        store.attend(0, np.ones((2, 64, 2, 32), np.float32))


@pytest.mark.parametrize("per_head", [False, True])
def test_a_pool_takes_head_major_rows(arch, rng, per_head):
    """The same bits and the same attention, of sequences of several lengths and a row of padding."""
    pools = [tikv.PagedKVCacheStore(**FORM, num_blocks=16, block_size=4, per_head=per_head) for _ in range(2)]
    q, k, v = (rng.standard_normal((8, heads, WIDTH)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    seqs, starts = [pool.add() for pool in pools for _ in "ab"][:2], [0, 3, 7]
    place = lambda *arrays: [oracle.place(np.ascontiguousarray(a), arch) for a in arrays]  # noqa: E731
    pools[0].append(0, *place(k[:2], v[:2]), seqs)
    pools[1].append(0, *place(k[:2].swapaxes(0, 1), v[:2].swapaxes(0, 1)), seqs, layout="head_major")
    options = {"return_lse": True, "return_mass": True}
    want = pools[0].extend(0, *place(q, k, v), seqs, starts, **options)
    got = pools[1].extend(
        0, *place(*(a.swapaxes(0, 1) for a in (q, k, v))), seqs, starts, layout="head_major", **options
    )
    for a, b in zip(got[:2], want[:2], strict=True):
        oracle.assert_same_bits(a, np.ascontiguousarray(oracle.to_numpy(b).swapaxes(0, 1)))
    oracle.assert_same_bits(got[2], oracle.to_numpy(want[2]))
    for seq in seqs:
        for a, b in zip(pools[1].tokens(0, seq), pools[0].tokens(0, seq), strict=True):
            oracle.assert_same_bits(a, oracle.to_numpy(b))


def rows_of(*shape):
    return np.ones((*shape, WIDTH), np.float32)


@pytest.mark.archs("cpu")
def test_rows_in_the_other_order_name_it(arch):
    store, of_two = (tikv.KVCacheStore(**FORM, capacity=32, batch_size=batch) for batch in (1, 2))
    pools = [
        tikv.PagedKVCacheStore(**FORM, num_blocks=4, block_size=4, per_head=per_head) for per_head in (False, True)
    ]
    seqs = [pool.add() for pool in pools]
    other = "In the other order of axes it fits: use layout="
    head_major, token_major = rf"{other}'head_major'\.$", rf"{other}'token_major'\.$"
    k, q = rows_of(1, 2, 5), rows_of(1, 4, 5)
    for call, says in (
        (lambda: store.append(0, k, k), rf"\(k: f32\[1,2,5,16\], token_major\)\. {head_major}"),
        (lambda: store.append(0, k[0], k[0]), rf"\(k: f32\[2,5,16\], token_major\)\. {head_major}"),
        (lambda: store.append(0, rows_of(5, 2), k[0]), rf"\(v: f32\[2,5,16\], token_major\)\. {head_major}"),
        (lambda: store.append(0, rows_of(5, 2), rows_of(5, 2), layout="head_major"), token_major),
        (lambda: of_two.append(0, *[rows_of(2, 2, 5)] * 2), head_major),
        (lambda: store.append_all(k[None], k[None]), rf"\(k: f32\[1,1,2,5,16\], token_major\)\. {head_major}"),
        (lambda: store.extend(0, q, k, k), head_major),
        (
            lambda: store.append(0, *[rows_of(1, 3, 5)] * 2),
            r"is 5 where 2 is needed \(k: f32\[1,3,5,16\], token_major\)\.$",
        ),
        *(
            (lambda p=p, s=s: p.append(0, k[0], k[0], [s], [0, 5]), head_major)
            for p, s in zip(pools, seqs, strict=True)
        ),
        (lambda: pools[0].append(0, *[rows_of(5, 2)] * 2, seqs[:1], [0, 5], layout="head_major"), token_major),
        (
            lambda: pools[0].extend(0, q[0], k[0], k[0], seqs[:1], [0, 5]),
            r"Read as \(Hq, T, D\), it fits: use layout='head_major'",
        ),
    ):
        with pytest.raises(tikv.ShapeError, match=says):
            call()


@pytest.mark.archs("cpu")
def test_shapes_in_messages_are_as_they_were_given(arch):
    store, pool = tikv.KVCacheStore(**FORM, capacity=32), tikv.PagedKVCacheStore(**FORM, num_blocks=4, block_size=4)
    seq = [pool.add()]
    for call, says in (
        (
            lambda q: store.extend(0, q, *[rows_of(5, 2)] * 2),
            r"\(q: f32\[5,3,16\], \(T, Hq, D\)\)\. Use a multiple of 2\.$",
        ),
        (lambda q: store.attend(0, q), r"\(q: f32\[5,3,16\], \(T, Hq, D\)\)\. Use a multiple of 2\.$"),
        (
            lambda q: pool.extend(0, q, *[rows_of(5, 2)] * 2, seq, [0, 5]),
            r"\(q: f32\[5,3,16\], \(T, Hq, D\)\)\. Use a mult",
        ),
        (
            lambda q: store.extend(0, q[:, :2].astype(np.float64), *[rows_of(5, 2)] * 2),
            r"q is f64\[5,2,16\]; queries must be float32",
        ),
        (lambda q: store.extend(0, q[:, :2, :8], *[rows_of(5, 2)] * 2), r"head width of q is 8 .*\(q: f32\[5,2,8\]"),
        (
            lambda q: store.extend(0, q[:4, :2], *[rows_of(5, 2)] * 2),
            r"tokens of q is 4 where 5 .*\(q: f32\[4,2,16\], \(T, Hq",
        ),
    ):
        with pytest.raises(tikv.TikvError, match=says):
            call(rows_of(5, 3))


@pytest.mark.archs("cpu")
def test_rows_of_another_dtype_say_how_to_make_the_store(arch):
    import ml_dtypes

    rows = rows_of(5, 2).astype(ml_dtypes.bfloat16)
    form = FORM | {"dtype": "float16"}
    stores = [
        tikv.KVCacheStore(**form, capacity=32),
        *(tikv.PagedKVCacheStore(**form, num_blocks=4, block_size=4, per_head=p) for p in (False, True)),
    ]
    calls = [lambda: stores[0].append(0, rows, rows)]
    calls += [lambda pool=pool: pool.append(0, rows, rows, [pool.add()], [0, 5]) for pool in stores[1:]]
    for call in calls:
        with pytest.raises(tikv.DTypeError, match=r"[Oo]r make the store with dtype='bfloat16'\.$"):
            call()
    apart = tikv.KVCacheStore(**form, capacity=32, v_dtype="float64")
    with pytest.raises(tikv.DTypeError, match=r"\. Make the store with another v_dtype: no rows fit both K and V\.$"):
        apart.append(0, rows, rows)
    with pytest.raises(tikv.DTypeError, match=r"Append float32 or float16\.$"):
        stores[0].append(0, *[rows_of(5, 2).astype(np.int8)] * 2)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "newest", "layers_take", "pool_takes"),
    [
        ({}, "float16", "float32 or float16", "float32 or float16"),
        ({"scale_dtype": "float32"}, "float32", "float32", "float32 or bfloat16"),
        ({"v_dtype": "float32"}, r"float16\|float32", "float32", "float32"),
    ],
)
def test_rows_that_groups_along_tokens_do_not_take_are_to_be_converted(arch, options, newest, layers_take, pool_takes):
    """No message says to make the store with another dtype, which would give up the groups."""
    import ml_dtypes

    form = {**FORM, "head_dim": 32, "dtype": tikv.Quant(4, 32, "tokens", 32), **options}
    store, pool = tikv.KVCacheStore(**form, capacity=64), tikv.PagedKVCacheStore(**form, num_blocks=4, block_size=32)
    seq, names = [pool.add()], ("float32", "float16", "bfloat16", "float64")
    for name in names:
        rows = np.ones((1, 2, 32), getattr(ml_dtypes, name, name))
        calls = [
            (layers_take, "a store", lambda rows=rows: store.append(0, rows, rows)),
            (layers_take, "a store", lambda rows=rows: store.append_all(rows[None], rows[None])),
            (layers_take, "a store", lambda rows=rows: store.extend(0, np.ones((1, 2, 32), np.float32), rows, rows)),
            (pool_takes, "a pool", lambda rows=rows: pool.append(0, rows, rows, seq)),
        ]
        for takes, what, call in calls:
            if name in takes.split(" or "):
                call()
                continue
            says = f"append {name} to {what} of groups along tokens, whose newest rows are {newest} "
            with pytest.raises(tikv.DTypeError, match=rf"{says}.*\. Append {takes}\.$"):
                call()
