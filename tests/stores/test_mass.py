"""The attention mass of what stores hold, against the weights of plain softmaxes over explicit positions."""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

pytestmark = pytest.mark.thorough

GROUP, WIDTH, HEADS = 2, 16, 2


class Queries:
    """The newest tokens' queries (batch, Hq, T, D), and the mass that they give the tokens of a store."""

    def __init__(self, rng, batch, tokens):
        self.q = rng.standard_normal((batch, HEADS * GROUP, tokens, WIDTH)).astype(np.float32)

    def mass(self, keys, held, length, last=None, *, window=None, sinks=0, ring=None, oldest=0):
        """(batch, heads, held), of `keys` (batch, heads, length, D) by position."""
        batch, _, tokens, _ = self.q.shape
        found = np.zeros((batch, HEADS, length))
        for b, h, t in itertools.product(range(batch), range(HEADS * GROUP), range(tokens)):
            if last is not None and t < tokens - last:
                continue
            at = reference.visible_positions(
                length, t, tokens, window=window, sinks=sinks, held=ring, first_valid=oldest
            )  # fmt: skip
            each, _ = reference.attention(
                self.q[b, h, t], keys[b, h // GROUP, at], np.eye(len(at)), scale=WIDTH**-0.5
            )  # fmt: skip
            found[b, h // GROUP, at] += each
        return found[:, :, held]


def rows(rng, batch, tokens):
    """(k, v) head-major, of values that int8 and float16 keep nearly as they are."""
    return rng.integers(-8, 9, (2, batch, HEADS, tokens, WIDTH)).astype(np.float32) / 8


def close(mass, want):
    assert oracle.to_numpy(mass).dtype == np.float32
    np.testing.assert_allclose(oracle.to_numpy(mass), want, atol=2e-5)


def test_mass_of_a_linear_layer(arch, rng):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=40, batch_size=2)
    k, v = rows(rng, 2, 6)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    first, second = Queries(rng, 2, 5), Queries(rng, 2, 1)
    out, mass = store.extend(
        0, place(first.q), place(k[:, :, :5]), place(v[:, :, :5]), layout="head_major", return_mass=True, mass_queries=2
    )
    assert out.shape == first.q.shape
    close(mass, first.mass(k, range(5), 5, 2))
    found = store.attend(0, place(first.q.swapaxes(1, 2)), return_lse=True, return_mass=True)
    assert [a.shape for a in found][1:] == [(2, 5, HEADS * GROUP), (2, HEADS, 5)]
    close(found[2], first.mass(k, range(5), 5))
    store.append(0, place(k[:, :, 5:]), place(v[:, :, 5:]), layout="head_major")
    close(store.attend(0, place(second.q[:, :, 0]), return_mass=True)[1], second.mass(k, range(6), 6))
    options = {"layout": "head_major", "return_mass": True, "mass_queries": 64}
    close(store.attend(0, place(second.q), **options)[1], second.mass(k, range(6), 6))
    nothing = [place(a[:, :, :0]) for a in (first.q, k, v)]
    assert (oracle.to_numpy(store.extend(0, *nothing, layout="head_major", return_mass=True)[1]) == 0).all()


def test_mass_of_a_ring_is_in_the_order_of_its_tokens(arch, rng):
    """The sinks, then the oldest that is left; also after a trim, which leaves fewer than the window."""
    window, sinks = 8, 2
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=window, window=window,
                              sinks=sinks, dtype="int8")  # fmt: skip
    k, v = rows(rng, 1, 12)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    stored = tikv.quantize(place(k[0]))
    real = oracle.to_numpy(tikv.dequantize(*stored))[None].astype(np.float64)
    first, second = Queries(rng, 1, 11), Queries(rng, 1, 1)
    mass = store.extend(0, *(place(a) for a in (first.q, k[:, :, :11], v[:, :, :11])), layout="head_major",
                        return_mass=True, mass_queries=3)[1]  # fmt: skip
    seen = {"window": window, "sinks": sinks}
    close(mass, first.mass(real[:, :, :11], [0, 1, *range(5, 11)], 11, 3, **seen))
    mass = store.extend(0, *(place(a) for a in (second.q, k[:, :, 11:], v[:, :, 11:])), layout="head_major",
                        return_mass=True)[1]  # fmt: skip
    close(mass, second.mass(real, [0, 1, *range(6, 12)], 12, **seen))
    store.trim(2)
    mass = store.attend(0, place(second.q[:, :, 0]), return_mass=True)[1]
    close(mass, second.mass(real[:, :, :10], [0, 1, *range(6, 10)], 10, oldest=6, **seen))


@pytest.mark.full("vulkan")  # its parts run there, each by itself
def test_mass_of_sequences_of_a_pool(arch, rng):
    """By position, the shorter sequences' zeros behind theirs; prompts of different lengths in one call."""
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=16, block_size=4)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    seqs, counts = [pool.add(), pool.add(), pool.add()], (7, 3, 3)
    (k, v), asked = rows(rng, 3, 8), [Queries(rng, 1, n) for n in counts]
    token_major = lambda a: place(np.concatenate([b[0].swapaxes(0, 1) for b in a]))  # noqa: E731
    _, lse, mass = pool.extend(
        0, token_major([a.q for a in asked]), *(token_major([a[b : b + 1, :, :n] for b, n in enumerate(counts)])
        for a in (k, v)), seqs, cu_seqlens=[0, 7, 10, 13], window=5, return_lse=True, return_mass=True, mass_queries=3,
    )  # fmt: skip
    assert (lse.shape, mass.shape) == ((13, HEADS * GROUP), (3, HEADS, 7))
    mass = oracle.to_numpy(mass)
    for b, n in enumerate(counts):
        close(mass[b : b + 1, :, :n], asked[b].mass(k[b : b + 1, :, :n], range(n), n, 3, window=5))
        assert (mass[b, :, n:] == 0).all()
    one = [Queries(rng, 1, 1) for _ in counts]
    mass = pool.attend(0, place(np.concatenate([a.q[:, :, 0] for a in one])), seqs, return_mass=True)[1]
    assert mass.shape == (3, HEADS, 7)
    mass = oracle.to_numpy(mass)
    for b, n in enumerate(counts):
        close(mass[b : b + 1, :, :n], one[b].mass(k[b : b + 1, :, :n], range(n), n))


@pytest.mark.parametrize("kind", ["ContiguousKVLayer", "PagedKVLayer"])
def test_mass_of_a_layer(arch, rng, kind):
    sizes = (40, HEADS, WIDTH) if kind == "ContiguousKVLayer" else (10, 4, HEADS, WIDTH)
    layer = getattr(tikv, kind)(*sizes)
    place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
    (k, v), first, second = rows(rng, 1, 5), Queries(rng, 1, 5), Queries(rng, 1, 3)
    if kind == "PagedKVLayer":
        layer.paged_block_indices = [3, 1]
    mass = layer.extend(*(place(a[0]) for a in (first.q, k, v)), layout="head_major", return_mass=True,
                        mass_queries=2)[1]  # fmt: skip
    close(oracle.to_numpy(mass)[None], first.mass(k, range(5), 5, 2))
    attend = layer.contig_decode_attention if kind == "ContiguousKVLayer" else layer.paged_decode_attention
    out, mass = attend(place(second.q[0]), q_layout="head_major", return_mass=True)
    assert out.shape == second.q.shape[1:]
    close(oracle.to_numpy(mass)[None], second.mass(k, range(5), 5))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mass_queries": 3}, tikv.OptionError, "needs return_mass"),
        ({"return_mass": True, "mass_queries": 0}, tikv.PositionError, "mass_queries=0"),
        ({"return_mass": True, "mass_queries": 1.5}, tikv.DTypeError, "not an integer"),
        ({"return_mass": True, "seq_lens": np.array([3], np.int32)}, tikv.OptionError, "seq_lens"),
    ],
)
def test_mass_that_cannot_be_had_is_refused(options, error, says, arch):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4, dtype="float32")
    store.append(0, *np.ones((2, 3, 1, 4), np.float32))
    out = np.full((1, 2, 4), 7, np.float32)
    with pytest.raises(error, match=says) as caught:
        store.attend(0, np.ones((1, 2, 4), np.float32), out=out, **options)
    assert str(caught.value).startswith("KVCacheStore.attend: ")
    assert (out == 7).all()


FORMATS = [
    "float16", "int8", "float8_e4m3fn", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4",
    *(tikv.Quant(bits=bits, group=32) for bits in (2, 3, 4, 8)),
    tikv.Quant(bits=4, group=64, rotate="hadamard", seed=3),
]  # fmt: skip
KINDS = ["sum", "max", "last"]


def join(kind, weights):
    """(B, H, n) of (B, H, group, T, n) weights."""
    if kind == "last":
        weights, kind = weights[:, :, :, -1:], "sum"
    return weights.sum(axis=(2, 3)) if kind == "sum" else weights.max(axis=(2, 3))


def weights_of(q, keys, window=None):
    """The weights (B, H, group, T, n) that queries (B, Hq, T, D) of the newest tokens give keys (B, H, n, D)."""
    batch, heads, n, width = keys.shape
    tokens = q.shape[2]
    scores = np.einsum(
        "bhgtd,bhnd->bhgtn", q.reshape(batch, heads, -1, tokens, width).astype(np.float64), keys.astype(np.float64)
    )
    at, end = np.arange(n), n - tokens + np.arange(tokens)[:, None]
    sees = (at <= end) & ((at > end - window) if window else True)
    scores = np.where(sees, scores * width**-0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.where(sees, weights / weights.sum(axis=-1, keepdims=True), 0)


def buffer(rng, arch, batch, heads, held):
    """(an array (batch, heads, held) that is a part of a larger one, that larger one)."""
    whole = oracle.place(rng.random((batch, heads, held + 5), dtype=np.float32), arch)
    return (whole[..., 2 : held + 2] if hasattr(whole, "__getitem__") else None), whole


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_mass_over_each_format(arch, rng, dtype, kind):
    """Of several queries and of one; two calls accumulate in one array."""
    width, held = 64, 70
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=width, capacity=80, batch_size=2, dtype=dtype)
    k, v = (rng.standard_normal((2, held, HEADS, width)).astype(np.float32) for _ in "kv")
    store.append(0, *(oracle.place(a, arch) for a in (k, v)))
    keys = oracle.to_numpy(store.tokens(0)[0]).astype(np.float64)
    total = oracle.place(np.zeros((2, HEADS, held), np.float32), arch)
    expected = np.zeros((2, HEADS, held))
    for tokens in (3, 1):
        q = rng.standard_normal((2, tokens, HEADS * GROUP, width)).astype(np.float32)
        mass = join(kind, weights_of(q.swapaxes(1, 2), keys))
        expected = mass if kind == "last" else expected + mass if kind == "sum" else np.maximum(expected, mass)
        got = store.attend(0, oracle.place(q, arch), return_mass=kind)
        close(got[-1], mass)
        result = store.attend(0, oracle.place(q, arch), return_mass=kind, mass_into=total)
        assert result[-1] is total
        np.testing.assert_array_equal(*(oracle.to_numpy(a[0]).view(np.int32) for a in (result, got)))
        close(total, expected)


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "int8", "q4_0"])
def test_each_mass_in_pools(arch, rng, dtype, kind):
    """`attend` and `extend` of sequences of different lengths; the array's other elements stay as they are."""
    width, counts = 32, (9, 4)
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=width, num_blocks=8, block_size=4,
                                  dtype=dtype)  # fmt: skip
    seqs = [pool.add(), pool.add()]
    q, k, v = (rng.standard_normal((13, heads, width)).astype(np.float32) for heads in (HEADS * GROUP, HEADS, HEADS))
    whole = rng.random((2, HEADS, 14), dtype=np.float32)
    before = whole.copy()
    into = whole[..., 2:11]
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    mass = pool.extend(0, place(q), place(k), place(v), seqs, [0, 9, 13], return_mass=kind, mass_into=into)[-1]
    assert mass is into
    expected = np.zeros((2, HEADS, 9))
    for i, seq in enumerate(seqs):
        keys = oracle.to_numpy(pool.tokens(0, seq)[0]).swapaxes(0, 1)[None].astype(np.float64)
        asked = np.concatenate([q[:9], q[9:]])[i * 9 : i * 9 + counts[i]].swapaxes(0, 1)[None]
        expected[i, :, : counts[i]] = join(kind, weights_of(asked, keys))[0]
    old = before[..., 2:11]
    want = expected if kind == "last" else expected + old if kind == "sum" else np.maximum(expected, old)
    close(into, want)
    np.testing.assert_array_equal(np.delete(whole, np.s_[2:11], 2), np.delete(before, np.s_[2:11], 2))
    one = rng.standard_normal((2, HEADS * GROUP, width)).astype(np.float32)
    mass = pool.attend(0, place(one), seqs, return_mass=kind)[-1]
    for i, seq in enumerate(seqs):
        keys = oracle.to_numpy(pool.tokens(0, seq)[0]).swapaxes(0, 1)[None].astype(np.float64)
        weights = weights_of(one[i : i + 1, :, None], keys)
        close(oracle.to_numpy(mass)[i : i + 1, :, : counts[i]], join(kind, weights))


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize("tokens", [11, 50])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "int8", "float8_e4m3fn", "q4_0", "mxfp8", "nvfp4", tikv.Quant(4, 64)], ids=str
)
def test_each_mass_of_a_prompt_in_half_precision(arch, rng, dtype, kind, tokens):
    """Of 44 and 200 query rows, where tensor cores weigh: the last tile of keys and that of rows are not full."""
    width, held, group = 128, 301, 4
    half = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": width, "capacity": 320, "batch_size": 2}
    store = tikv.KVCacheStore(**form, dtype=dtype)
    k, v = (rng.standard_normal((2, held, HEADS, width)).astype(half) for _ in "kv")
    store.append(0, *(oracle.place(a, arch) for a in (k, v)))
    keys = oracle.to_numpy(store.tokens(0)[0]).astype(np.float64)
    q = rng.standard_normal((2, tokens, HEADS * group, width)).astype(half)
    before = rng.random((2, HEADS, held), dtype=np.float32) / 100
    into = oracle.place(before.copy(), arch)
    mass = store.attend(0, oracle.place(q, arch), return_mass=kind, mass_into=into)[-1]
    assert mass is into
    want = join(kind, weights_of(q.swapaxes(1, 2), keys))
    want = want if kind == "last" else want + before if kind == "sum" else np.maximum(want, before)
    # Attention rounds codes to q's dtype for 128 rows or more on some GPUs, and so the log-sum-exps.
    exact = tokens < 50 or dtype in ("float16", "bfloat16")
    np.testing.assert_allclose(oracle.to_numpy(mass), want, rtol=5e-4 if exact else 5e-3, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("block_size", [7, 16])
def test_each_mass_of_prompts_in_half_precision_in_a_pool(arch, rng, kind, window, block_size):
    """Of sequences of different lengths, with tokens before them; a NaN is counted by those alone who see it."""
    width, counts, group = 64, (70, 9), 3
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=width, num_blocks=40,
                                  block_size=block_size, dtype="float16")  # fmt: skip
    seqs, place = [pool.add(), pool.add()], lambda a: oracle.place(a, arch)
    old = [rng.standard_normal((39, HEADS, width)).astype(np.float16) for _ in "kv"]
    pool.append(0, *map(place, old), seqs, [0, 20, 39])
    q, k, v = (rng.standard_normal((79, n, width)).astype(np.float16) for n in (HEADS * group, HEADS, HEADS))
    k[78, 0, 5] = np.nan  # the newest key of the second sequence
    mass = pool.extend(0, *map(place, (q, k, v)), seqs, [0, 70, 79], window=window, return_mass=kind)[-1]
    mass = oracle.to_numpy(mass)
    assert mass.shape == (2, HEADS, 90)
    for i, (first, n) in enumerate(((0, 90), (70, 28))):
        keys = oracle.to_numpy(pool.tokens(0, seqs[i])[0]).swapaxes(0, 1)[None]
        asked = q[first : first + counts[i]].swapaxes(0, 1)[None]
        want = join(kind, weights_of(asked, keys, window))[0]
        np.testing.assert_allclose(mass[i, :, :n], want, rtol=5e-4, atol=2e-5)
        assert (mass[i, :, n:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_each_mass_by_slot(arch, rng, kind):
    """`decode_attention` counts by slot; keys that a window hides get nothing, and "last" takes what they had."""
    q, k, v = (rng.standard_normal((1, heads, n, 16)).astype(np.float32) for heads, n in ((4, 3), (2, 12), (2, 12)))
    whole = rng.random((1, 2, 12), dtype=np.float32)
    old, place = whole.copy(), lambda a: oracle.place(a, arch)
    mass = join(kind, weights_of(q, k[:, :, :9], window=4))
    arrays = place(q), place(k), place(v), np.array([9], np.int32)
    close(tikv.decode_attention(*arrays, window=4, return_mass=kind)[-1][..., :9], mass)
    into = place(whole)
    result = tikv.decode_attention(*arrays, window=4, return_mass=kind, mass_into=into)[-1]
    assert result is into
    want = np.zeros_like(old) if kind == "last" else old.copy()
    want[..., :9] = mass if kind == "last" else mass + old[..., :9] if kind == "sum" else np.maximum(mass, old[..., :9])
    close(into, want)


@pytest.mark.parametrize("kind", KINDS)
def test_each_mass_of_a_ring_that_wraps(arch, rng, kind):
    """`extend` beyond the window: the array has the tokens that the layer holds after the call."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=8, window=8, dtype="float32")
    for tokens in (5, 6, 1):
        q, k, v = (rng.standard_normal((1, tokens, heads, WIDTH)).astype(np.float32) for heads in (4, 2, 2))
        held = min(8, int(store.held(0)) + tokens)
        into = oracle.place(np.zeros((1, HEADS, held), np.float32), arch)
        store.extend(0, *(oracle.place(a, arch) for a in (q, k, v)), return_mass=kind, mass_into=into)
        if tokens == 1 or kind == "last":
            keys = oracle.to_numpy(store.tokens(0)[0])
            close(into, join(kind, weights_of(q.swapaxes(1, 2)[:, :, -1:], keys)))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mass_into": np.zeros((1, 1, 3), np.float32)}, tikv.OptionError, "mass_into needs return_mass"),
        ({"return_mass": "mean"}, tikv.OptionError, "return_mass is 'mean'. Use one of 'sum', 'max', 'last'"),
        ({"return_mass": 2}, tikv.OptionError, "return_mass is 2"),
        ({"return_mass": "last", "mass_queries": 1}, tikv.OptionError, "counts the newest query alone"),
        ({"return_mass": "last", "indices": [[[0]]]}, tikv.OptionError, "return_mass='last' cannot be combined"),
        ({"return_mass": "max", "indices": [[[0]]], "mass_into": np.zeros((1, 1, 1, 1), np.float32)},
         tikv.OptionError, "mass_into cannot be combined"),
        ({"return_mass": True, "mass_into": np.zeros((1, 1, 4), np.float32)}, tikv.ShapeError, r"\(1, 1, 3\) is"),
        ({"return_mass": True, "mass_into": np.zeros((1, 1, 3))}, tikv.DTypeError, "must be float32"),
        ({"return_mass": True, "mass_into": np.zeros((1, 1, 6), np.float32)[..., ::2]}, tikv.ShapeError, "contiguous"),
        ({"return_mass": True, "mass_into": [0.0]}, tikv.DTypeError, "mass_into"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("call", ["attend", "extend", "pool.attend", "pool.extend"])
def test_an_array_for_the_mass_that_does_not_fit_is_refused(call, options, error, says, arch):
    """And nothing is written, neither the new rows nor the array."""
    extends, paged = call.endswith("extend"), call.startswith("pool")
    if extends and "indices" in options:
        pytest.skip("extend has no indices")
    rows = np.ones((2, 3, 1, 4), np.float32)
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": "float32"}
    make = tikv.PagedKVCacheStore if paged else tikv.KVCacheStore
    store = make(**form, **({"num_blocks": 4, "block_size": 2} if paged else {"capacity": 4}))
    where = ([store.add()],) if paged else ()
    if not extends:
        store.append(0, *rows, *where, *([[0, 3]] if paged else ()))
    before = [a.numpy().copy() for a in (store.keys(0), store.values(0))]
    q = np.ones((3 if extends else 1, 2, 4), np.float32)
    arguments = (*rows, *where, *([[0, 3]] if paged else ())) if extends else where
    with pytest.raises(error, match=says):
        (store.extend if extends else store.attend)(0, q, *arguments, **options)
    assert (store.length(*where[0]) if paged else store.length) == (0 if extends else 3)
    for a, b in zip(before, (store.keys(0), store.values(0)), strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    if isinstance(options.get("mass_into"), np.ndarray):
        assert (options["mass_into"] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [{}, {"window": 96, "sinks": 3}, {"v_dtype": "float32"}], ids=["all", "window", "v"])
def test_each_mass_over_groups_along_tokens(arch, rng, kind, form):
    """Of the codes and the newest tokens; a prompt's queries count the keys as they were when they saw them."""
    width, codes = 32, tikv.Quant(bits=8, group=32, axis="tokens", residual=32)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=width, capacity=256, batch_size=2, dtype=codes,
                              **form)  # fmt: skip
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    for tokens in (40, 150):
        q, k, v = (rng.standard_normal((2, tokens, n, width)).astype(np.float32) for n in (HEADS * GROUP, HEADS, HEADS))
        before = int(store.held(0))
        mass = store.extend(0, place(q), place(k), place(v), return_mass=kind)[-1]
        if kind == "sum" and not form.get("window"):
            np.testing.assert_allclose(oracle.to_numpy(mass).sum(axis=-1), tokens * GROUP, rtol=1e-4)
            assert (oracle.to_numpy(mass)[:, :, before:] > 0).all()
    for tokens in (3, 1):
        q = rng.standard_normal((2, tokens, HEADS * GROUP, width)).astype(np.float32)
        keys = oracle.to_numpy(store.tokens(0)[0]).astype(np.float64)
        into = place(np.zeros((2, HEADS, int(store.held(0))), np.float32))
        result = store.attend(0, place(q), return_mass=kind, mass_into=into, missing="ignore")
        assert result[-1] is into
        if tokens == 1 or not form.get("window"):
            close(into, join(kind, weights_of(q.swapaxes(1, 2), keys)))
    if kind != "last" or form.get("window"):
        return
    last = store.extend(0, *(place(a) for a in (q, k[:, :1], v[:, :1])), return_mass="last")[-1]
    close(last, join("sum", weights_of(q.swapaxes(1, 2), oracle.to_numpy(store.tokens(0)[0]))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full("vulkan")
def test_each_mass_over_groups_along_tokens_in_a_pool(arch, rng, kind):
    width, codes, counts = 32, tikv.Quant(bits=8, group=32, axis="tokens", residual=32), (150, 20)
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=width, num_blocks=8, block_size=64,
                                  dtype=codes)  # fmt: skip
    seqs = [pool.add(), pool.add()]
    q, k, v = (rng.standard_normal((170, n, width)).astype(np.float32) for n in (HEADS * GROUP, HEADS, HEADS))
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    mass = oracle.to_numpy(pool.extend(0, place(q), place(k), place(v), seqs, [0, 150, 170], return_mass=kind)[-1])
    assert mass.shape == (2, HEADS, 150)
    if kind == "sum":
        np.testing.assert_allclose(mass.sum(axis=-1), np.repeat(np.array(counts)[:, None] * GROUP, HEADS, 1), rtol=1e-4)
    assert (mass[1, :, 20:] == 0).all()
    one = rng.standard_normal((2, 2, HEADS * GROUP, width)).astype(np.float32)
    mass = oracle.to_numpy(pool.attend(0, place(one), seqs, return_mass=kind)[-1])
    for i, seq in enumerate(seqs):
        keys = oracle.to_numpy(pool.tokens(0, seq)[0]).swapaxes(0, 1)[None].astype(np.float64)
        close(mass[i : i + 1, :, : counts[i]], join(kind, weights_of(one[i : i + 1].swapaxes(1, 2), keys)))
