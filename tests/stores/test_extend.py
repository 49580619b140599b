"""`extend`: prompts of any length attend as one sequence without a cache would, and leave what appends would leave."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

HEADS, WIDTH = 2, 8


class Case(NamedTuple):
    """A store to extend; `prompts` are the numbers of new tokens, one call each."""

    name: str
    dtype: str = "float32"
    source: str = "float32"
    query: str = "float32"
    window: int | None = None
    sinks: int = 0
    batch: int = 1
    group: int = 1
    layout: str = "token_major"
    softcap: float | None = None
    prompts: tuple[int, ...] = (8, 1, 16, 1)
    width: int = WIDTH


CASES = [
    Case("linear", prompts=(5, 1, 13, 2)),
    Case("linear-head-major", batch=2, group=4, layout="head_major"),
    Case("linear-long", prompts=(300, 8)),
    Case("ring", window=8),
    Case("ring-sinks", window=8, sinks=3, group=4),
    Case("ring-sinks-in-parts", window=8, sinks=5, prompts=(2, 2, 3, 9)),
    Case("ring-long", window=8, sinks=2, prompts=(8, 300, 8)),
    Case("ring-batch", window=6, sinks=1, batch=2, layout="head_major"),
    Case("ring-one", window=1, prompts=(1, 8, 1)),
    Case("ring-exactly-full", window=8, prompts=(8, 8, 1)),
    Case("ring-int8", dtype="int8", window=8, sinks=3, group=4),
    Case("ring-float16", dtype="float16", source="float16", query="float16", window=8),
    Case("ring-down-cast", dtype="float16", window=8, sinks=1, batch=2),
    Case("ring-bfloat16", dtype="bfloat16", source="bfloat16", query="bfloat16", window=8, softcap=5.0),
    Case("int8", dtype="int8", batch=2),
    # Wide enough for CUDA's tensor cores, which then give `extend`'s two parts in float32.
    Case("ring-wide", dtype="float16", source="float16", query="float16", window=16, sinks=2, group=4, width=64,
         prompts=(16, 40, 1)),
]  # fmt: skip
USUAL = ("linear-head-major", "ring-int8")
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def numpy_type(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def expected(q, k, v, first, case):
    """(out, lse) in float64 of queries (B, T, Hq, D) at positions from `first` on over all tokens (B, H, N, D)."""
    _, tokens, heads, width = q.shape
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    position = np.arange(first, first + tokens)[:, None]
    key = np.arange(k.shape[2])[None]
    sees = key <= position
    if case.window is not None:
        sees &= (key < case.sinks) | (key > position - (case.window - case.sinks))
    group = heads // k.shape[1]
    k, v = k.repeat(group, 1), v.repeat(group, 1)
    scores = np.einsum("bthd,bhnd->bthn", q, k) / np.sqrt(width)
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    scores = np.where(sees[None, :, None], scores, -np.inf)
    high = scores.max(-1, keepdims=True)
    weights = np.exp(scores - high)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bthn,bhnd->bthd", weights / total, v), (high + np.log(total))[..., 0]


def rows(rng, case, tokens, heads, dtype):
    return rng.standard_normal((case.batch, tokens, heads, case.width)).astype(numpy_type(dtype))


def in_layout(a, layout):
    return a if layout == "token_major" else np.ascontiguousarray(a.swapaxes(1, 2))


def store_of(case, **changes):
    """A store whose memory is full of the same old rows, whoever asks."""
    form: dict[str, Any] = {
        "num_layers": 2, "num_kv_heads": HEADS, "head_dim": case.width, "capacity": 320, "batch_size": case.batch,
        "dtype": case.dtype, "window": case.window, "sinks": case.sinks,
    }  # fmt: skip
    store = tikv.KVCacheStore(**{**form, **changes})
    rng = np.random.default_rng(1)
    for layer in range(2):
        old = rng.standard_normal((case.batch, 320, HEADS, case.width)).astype(numpy_type(case.source))
        store.append(layer, old, -old)
    store.reset()
    return store


def raw(store):
    """Every bit of a store's memory."""
    arrays = [a for layer in range(2) for a in (store.keys(layer), store.values(layer))]
    if store.dtype.name == "int8":
        arrays += [a for layer in range(2) for a in store.scales(layer)]
    return [np.asarray(a.copy_to_host()).tobytes() for a in arrays]


# The others differ in numbers, or put parts of these together.
@pytest.mark.full(unless=lambda case: case["case"].name in USUAL)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_prompt_attends_as_without_a_cache_and_is_appended(case, arch):
    rng = np.random.default_rng(3)
    store, plain, whole = store_of(case), store_of(case), store_of(case, window=None, sinks=0)
    for turn, tokens in enumerate(case.prompts):
        q = rows(rng, case, tokens, HEADS * case.group, case.query)
        k, v = (rows(rng, case, tokens, HEADS, case.source) for _ in "kv")
        first = store.length
        given = [oracle.place(in_layout(a, case.layout), arch) for a in (q, k, v)]
        found = store.extend(1, *given, layout=case.layout, softcap=case.softcap, return_lse=turn % 2 == 0)
        out = found[0] if turn % 2 == 0 else found
        plain.append(1, *given[1:], layout=case.layout)
        whole.append(1, *given[1:], layout=case.layout)
        want, want_lse = expected(q, *(np.asarray(a.copy_to_host()) for a in whole.tokens(1)), first, case)
        got = in_layout(oracle.to_numpy(out), case.layout)
        assert got.dtype == numpy_type(case.query)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=3 * TOLERANCE[case.query])
        if turn % 2 == 0:
            lse = in_layout(oracle.to_numpy(found[1])[..., None], case.layout)[..., 0]
            np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)
        assert raw(store) == raw(plain)
        assert (store.layer_length(0), store.layer_length(1)) == (0, first + tokens)


def test_after_a_trim_a_ring_attends_over_what_it_still_holds(arch):
    """Tokens that the trimmed ones overwrote are gone; nothing of the trimmed ones is seen."""
    rng = np.random.default_rng(4)
    case = Case("trimmed", window=8)
    store = store_of(case)
    k, v = (rows(rng, case, 20, HEADS, "float32") for _ in "kv")
    store.append(0, oracle.place(k, arch), oracle.place(v, arch))
    store.trim(3)  # positions 12 to 16 are left
    q, k2, v2 = (rows(rng, case, 10, HEADS, "float32") for _ in "qkv")
    out = store.extend(0, *(oracle.place(a, arch) for a in (q, k2, v2)))
    held_k, held_v = (np.concatenate([a[:, 12:17], b], 1).swapaxes(1, 2) for a, b in ((k, k2), (v, v2)))
    want, _ = expected(q, held_k, held_v, 5, case)
    np.testing.assert_allclose(oracle.to_numpy(out), want, rtol=0, atol=6e-6)


def test_zero_tokens_are_checked_and_change_nothing(arch):
    store = store_of(Case("linear"))
    none = [oracle.place(np.zeros((0, heads, WIDTH), np.float32), arch) for heads in (4, HEADS, HEADS)]
    out, lse = store.extend(0, *none, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape), store.length) == ((0, 4, WIDTH), (0, 4), 0)
    with pytest.raises(tikv.ShapeError):
        store.extend(0, none[0], none[1], oracle.place(np.zeros((1, HEADS, WIDTH), np.float32), arch))


REFUSED = {
    "tokens of q": ({"q": (1, 4, 4, WIDTH)}, tikv.ShapeError),
    "heads of q": ({"q": (1, 3, 3, WIDTH)}, tikv.ShapeError),
    "width of q": ({"q": (1, 3, 4, WIDTH + 1)}, tikv.ShapeError),
    "axes of q": ({"q": (3, WIDTH)}, tikv.ShapeError),
    "dtype of q": ({"q": "int32"}, tikv.DTypeError),
    "heads of k": ({"k": (1, 3, HEADS + 1, WIDTH)}, tikv.ShapeError),
    "dtype of v": ({"v": "float64"}, tikv.DTypeError),
    "layout": ({"layout": "heads"}, tikv.OptionError),
    "scale": ({"scale": float("nan")}, tikv.OptionError),
    "softcap": ({"softcap": -1.0}, tikv.OptionError),
    "layer": ({"layer": 2}, tikv.PositionError),
    "room": ({"tokens": 321}, tikv.CapacityError),
}


# A ring has room for any number of tokens.
@pytest.mark.parametrize(
    ("what", "window"), [(what, w) for what in REFUSED for w in (None, 4) if (what, w) != ("room", 4)]
)
def test_what_is_refused_leaves_every_bit(what, window, arch):
    changes, error = REFUSED[what]
    store = store_of(Case("refused", window=window))
    rng = np.random.default_rng(5)
    tokens = changes.get("tokens", 3)
    shapes = {"q": (1, tokens, 4, WIDTH), "k": (1, tokens, HEADS, WIDTH), "v": (1, tokens, HEADS, WIDTH)}
    given = {}
    for name, shape in shapes.items():
        change = changes.get(name, shape)
        dtype = change if isinstance(change, str) else "float32"
        given[name] = rng.standard_normal(shape if isinstance(change, str) else change).astype(dtype)
    arrays = [oracle.place(a, arch) for a in given.values()]
    options = {name: changes[name] for name in ("layout", "scale", "softcap") if name in changes}
    before, length = raw(store), store.length
    with pytest.raises(error, match=r"^KVCacheStore\.extend"):
        store.extend(changes.get("layer", 0), *arrays, **options)
    assert (raw(store), store.length) == (before, length)


@pytest.mark.archs("cpu")
def test_a_form_that_was_taken_once_is_checked_again(arch):
    """For another number of tokens, and for rows that share memory with the layer."""
    store, rng = store_of(Case("again")), np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, heads, 2, WIDTH)).astype(np.float32) for heads in (4, HEADS, HEADS))
    store.extend(0, q, k, v, layout="head_major")
    before = raw(store)
    inside = [np.from_dlpack(a)[:, :, 6:8] for a in (store.keys(0), store.values(0))]
    for new, says in (
        ((k[:, :, :1], v[:, :, :1]), "number of tokens of q"),
        ((inside[0], v), r"k \(.* and the store's keys .* overlap"),
        ((inside[1], v), r"k \(.* and the store's values .* overlap"),
        ((k, inside[0]), r"v \(.* and the store's keys .* overlap"),
        ((k, inside[1]), r"v \(.* and the store's values .* overlap"),
    ):
        with pytest.raises(tikv.ShapeError, match=rf"^KVCacheStore\.extend: .*{says}"):
            store.extend(0, q, *new, layout="head_major")
        assert (raw(store), store.length) == (before, 2)


def test_attend_refuses_queries_whose_tokens_newer_ones_overwrote(arch):
    rng = np.random.default_rng(6)
    case = Case("ring", window=8, sinks=2)
    store = store_of(case)
    k, v, q = (rows(rng, case, 20, HEADS, "float32") for _ in "kvq")
    store.append(0, oracle.place(k[:, :8], arch), oracle.place(v[:, :8], arch))
    all_fit = oracle.place(q[:, :8], arch)
    want, _ = expected(q[:, :8], *(a[:, :8].swapaxes(1, 2) for a in (k, v)), 0, case)
    np.testing.assert_allclose(oracle.to_numpy(store.attend(0, all_fit)), want, atol=6e-6)
    store.append(0, oracle.place(k[:, 8:], arch), oracle.place(v[:, 8:], arch))
    two = oracle.place(q[:, -2:], arch)
    with pytest.raises(
        tikv.PositionError, match=r"KVCacheStore\.attend: .*position 18, sees tokens from 13 on.*extend"
    ):
        store.attend(0, two)
    with pytest.raises(tikv.OptionError, match="missing"):
        store.attend(0, two, missing="guess")
    assert oracle.to_numpy(store.attend(0, two, missing="ignore")).shape == (1, 2, HEADS, WIDTH)
    one = oracle.place(np.ascontiguousarray(q[:, -1:]), arch)
    want, _ = expected(q[:, -1:], *(a.swapaxes(1, 2) for a in (k, v)), 19, case)
    np.testing.assert_allclose(oracle.to_numpy(store.attend(0, one)), want, atol=6e-6)


class PoolCase(NamedTuple):
    """A pool to extend; each step has the new tokens of its sequences."""

    name: str
    dtype: str = "float32"
    layout: str = "NHD"
    group: int = 1
    window: int | None = None
    steps: tuple[tuple[int, ...], ...] = ((8, 1, 8), (1, 1, 1), (1, 0, 16))


POOLS = [
    PoolCase("pages"),
    PoolCase("window-groups", window=3, group=4, layout="HND"),
    PoolCase("int8", dtype="int8"),
    PoolCase("long", steps=((300, 300), (1, 288))),
]


@pytest.mark.full(unless=lambda case: case["case"].name == "window-groups")
@pytest.mark.parametrize("case", POOLS, ids=lambda case: case.name)
def test_prompts_of_any_lengths_share_a_call(case, arch):
    rng = np.random.default_rng(7)
    form: dict[str, Any] = {
        "num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 240, "block_size": 4,
        "dtype": case.dtype, "layout": case.layout,
    }  # fmt: skip
    pool, plain = tikv.PagedKVCacheStore(**form), tikv.PagedKVCacheStore(**form)
    seqs = [pool.add() for _ in case.steps[0]]
    for _ in seqs:
        plain.add()
    mask = Case("mask", window=case.window)
    for turn, counts in enumerate(case.steps):
        bounds = [0, *np.cumsum(counts).tolist()]
        padding = 3 if turn == 1 else 0
        q, k, v = (
            rng.standard_normal((bounds[-1] + padding, heads, WIDTH)).astype(np.float32)
            for heads in (HEADS * case.group, HEADS, HEADS)
        )
        given = [oracle.place(a, arch) for a in (q, k, v)]
        starts = [pool.length(seq) for seq in seqs]
        out, lse = pool.extend(0, *given, seqs, bounds, window=case.window, return_lse=True)
        out, lse = oracle.to_numpy(out), oracle.to_numpy(lse)
        plain.append(0, *given[1:], seqs, bounds)
        for i, seq in enumerate(seqs):
            part = slice(bounds[i], bounds[i + 1])
            held = [np.asarray(a.copy_to_host()).swapaxes(0, 1)[None] for a in pool.tokens(0, seq)]
            assert pool.length(seq) == plain.length(seq) == starts[i] + counts[i]
            if counts[i]:
                want, want_lse = expected(q[None, part], *held, starts[i], mask)
                np.testing.assert_allclose(out[part], want[0], rtol=0, atol=6e-6)
                np.testing.assert_allclose(lse[part], want_lse[0], rtol=0, atol=1e-5)
            for a, b in zip(pool.tokens(0, seq), plain.tokens(0, seq), strict=True):
                assert np.asarray(a.copy_to_host()).tobytes() == np.asarray(b.copy_to_host()).tobytes()
        assert not out[bounds[-1] :].any()
        assert (lse[bounds[-1] :] == -np.inf).all()


POOL_REFUSED = {
    "rows of q": ({"q": (6, 4, WIDTH)}, {}, tikv.ShapeError),
    "heads of q": ({"q": (5, 3, WIDTH)}, {}, tikv.ShapeError),
    "width of q": ({"q": (5, 4, 4)}, {}, tikv.ShapeError),
    "axes of q": ({"q": (1, 5, 4, WIDTH)}, {}, tikv.ShapeError),
    "dtype of q": ({"q": "int32"}, {}, tikv.DTypeError),
    "heads of k": ({"k": (5, 1, WIDTH)}, {}, tikv.ShapeError),
    "window": ({}, {"window": 0}, tikv.PositionError),
    "scale": ({}, {"scale": float("inf")}, tikv.OptionError),
    "cu_seqlens": ({}, {"cu_seqlens": [0, 9]}, tikv.ShapeError),
    "sequence": ({}, {"seqs": [7]}, tikv.PositionError),
    "blocks": ({"q": (64, 4, WIDTH), "k": (64, HEADS, WIDTH), "v": (64, HEADS, WIDTH)}, {}, tikv.CapacityError),
}


@pytest.mark.parametrize("what", POOL_REFUSED)
def test_what_a_pool_refuses_leaves_every_bit(what, arch):
    changes, options, error = POOL_REFUSED[what]
    rng = np.random.default_rng(8)
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=8, block_size=4)
    pool.add()
    shared = [oracle.place(rng.standard_normal((6, HEADS, WIDTH)).astype(np.float16), arch) for _ in "kv"]
    pool.append(0, *shared, [0], [0, 6])
    pool.fork(0)  # so that an append would copy a block first
    given = {}
    for name, shape in {"q": (5, 4, WIDTH), "k": (5, HEADS, WIDTH), "v": (5, HEADS, WIDTH)}.items():
        change = changes.get(name, shape)
        dtype = change if isinstance(change, str) else "float16"
        given[name] = rng.standard_normal(shape if isinstance(change, str) else change).astype(dtype)
    arrays = [oracle.place(a, arch) for a in given.values()]
    call = {"seqs": [0], "cu_seqlens": [0, given["k"].shape[0]], **options}
    before = [np.asarray(a.copy_to_host()).tobytes() for a in (pool.keys(0), pool.values(0))]
    free, lengths = pool.num_free_blocks, pool.context_lens.tolist()
    with pytest.raises(error, match=r"^PagedKVCacheStore\.extend"):
        pool.extend(0, *arrays, **call)
    assert [np.asarray(a.copy_to_host()).tobytes() for a in (pool.keys(0), pool.values(0))] == before
    assert (pool.num_free_blocks, pool.context_lens.tolist()) == (free, lengths)


@pytest.mark.full(unless=lambda case: (case["dtype"], case["kind"]) in (("float32", "contiguous"), ("int8", "paged")))
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_layer_of_the_third_seed_extends(kind, dtype, arch):
    rng = np.random.default_rng(9)
    if kind == "contiguous":
        layer = tikv.ContiguousKVLayer(32, HEADS, WIDTH, dtype=dtype)
    else:
        layer = tikv.PagedKVLayer(8, 4, HEADS, WIDTH, dtype=dtype)
        layer.paged_block_indices = [5, 0, 3, 7, 1, 2, 4, 6]
    kept = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=32, dtype=dtype)
    case = Case("layer", window=6)
    for turn, tokens in enumerate((8, 1, 16)):
        layout = "head_major" if turn == 2 else "token_major"
        q, k, v = (rows(rng, case, tokens, heads, "float32") for heads in (4, HEADS, HEADS))
        given = [oracle.place(in_layout(a, layout)[0], arch) for a in (q, k, v)]
        out, lse = layer.extend(*given, layout=layout, window=6, return_lse=True)
        kept.append(0, oracle.place(k, arch), oracle.place(v, arch))
        held = [np.asarray(a.copy_to_host()) for a in kept.tokens(0)]
        want, want_lse = expected(q, *held, len(layer) - tokens, case)
        got = in_layout(oracle.to_numpy(out)[None], layout)
        np.testing.assert_allclose(got, want, rtol=0, atol=6e-6)
        got = in_layout(oracle.to_numpy(lse)[None, ..., None], layout)[..., 0]
        np.testing.assert_allclose(got, want_lse, rtol=0, atol=1e-5)
    assert len(layer) == 25
    if kind == "contiguous":
        stored = np.asarray(layer.keys.copy_to_host())[:, :25]
        assert stored.tobytes() == np.asarray(kept.keys(0).copy_to_host())[0, :, :25].tobytes()
    before = [a.tobytes() for a in memory_of(layer)]
    bad = [
        oracle.place(np.zeros(shape, np.float32), arch) for shape in ((8, 4, WIDTH), (8, HEADS, WIDTH), (2, 4, WIDTH))
    ]
    for error, call in (
        (tikv.CapacityError, (bad[0], bad[1], bad[1])),
        (tikv.ShapeError, (bad[2], bad[1], bad[1])),
    ):
        with pytest.raises(error, match=r"KVLayer\.extend"):
            layer.extend(*call)
    few = [a[:2] for a in bad[:2]]
    with pytest.raises(tikv.OptionError, match=r"KVLayer\.extend"):
        layer.extend(few[0], few[1], few[1], scale=float("inf"))
    assert ([a.tobytes() for a in memory_of(layer)], len(layer)) == (before, 25)


def memory_of(layer):
    """Host copies of a layer's K and V."""
    holder = layer if isinstance(layer, tikv.ContiguousKVLayer) else layer.pool
    return [np.asarray(a.copy_to_host()) for a in (holder.keys, holder.values)]


@pytest.mark.parametrize("form", ["parents", "mask"])
def test_paged_extend_with_a_tree_is_append_and_attend(arch, rng, form):
    pools = [
        tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, num_blocks=8, block_size=4, dtype="float32")
        for _ in range(2)
    ]
    seqs = [[pool.add(), pool.add()] for pool in pools]
    k, v = (rng.standard_normal((7, 2, 16)).astype(np.float32) for _ in "kv")
    for pool, own in zip(pools, seqs, strict=True):
        pool.append(0, k, v, own, cu_seqlens=[0, 2, 7])
    parents = np.array([[-1, 0, 0, 1], [-1, -1, 1, 2]], np.int32)
    q = rng.standard_normal((8, 4, 16)).astype(np.float32)
    new = [rng.standard_normal((8, 2, 16)).astype(np.float32) for _ in "kv"]
    tree = {"parents": parents}
    if form == "mask":
        seen = np.zeros((2, 4, 4), bool)
        for b in range(2):
            for t in range(4):
                seen[b, t, t] = True
                seen[b, t] |= seen[b, parents[b, t]] if parents[b, t] >= 0 else False
        tree = {"mask": seen}
    starts = [0, 4, 8]
    bad = {"parents": np.array([[-1, 1, 0, 1], [-1, -1, 1, 2]], np.int32)}
    for options, error, says in (
        ({**tree, "cu_seqlens": [0, 3, 8]}, tikv.ShapeError, "different numbers"),
        ({**bad, "cu_seqlens": starts}, tikv.PositionError, r"parents\[0, 1\]=1"),
        ({"parents": parents[:, :3], "cu_seqlens": starts}, tikv.ShapeError, "parents"),
    ):
        with pytest.raises(error, match=says):
            pools[0].extend(0, q, *new, seqs[0], **options)
    assert pools[0].length(seqs[0][0]) == 2
    got = pools[0].extend(0, q, *new, seqs[0], cu_seqlens=starts, **tree)
    pools[1].append(0, *new, seqs[1], cu_seqlens=starts)
    want = pools[1].attend(0, q.reshape(2, 4, 4, 16), seqs[1], **tree)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want).reshape(8, 4, 16))
