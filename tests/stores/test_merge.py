"""`compact(merge=)`: dropped rows are added to kept ones, against sums in NumPy; every other bit stays."""

import copy

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

HEADS, WIDTH = 2, 32


def random_merge(rng, keep, held):
    """(to, weights) (B, H, held) that add most dropped tokens of a bool mask to some of those kept."""
    to = np.full(keep.shape, -1, np.int64)
    for b, h, j in np.ndindex(*keep.shape):
        kept = np.flatnonzero(keep[b, h])
        if not keep[b, h, j] and len(kept) and rng.random() < 0.8 and j < held[b, h]:
            to[b, h, j] = rng.choice(kept[: max(1, len(kept) // 2)])
    return to, rng.standard_normal(keep.shape).astype(np.float32)


def summed(rows, to, weights):
    """What rows (B, H, n, D) become, float32, one after the other; and which get something."""
    sums, gets = rows.astype(np.float32).copy(), np.zeros(to.shape, bool)
    for b, h, j in np.ndindex(*to.shape):
        if to[b, h, j] >= 0:
            sums[b, h, to[b, h, j]] += weights[b, h, j] * rows[b, h, j].astype(np.float32)
            gets[b, h, to[b, h, j]] = True
    return sums, gets


def buffers(store):
    return [oracle.to_numpy(a).copy() for a in (store.keys(0), store.values(0))] + [
        oracle.to_numpy(a).copy() for a in scales_of(store)
    ]


def scales_of(store):
    try:
        return [a for a in store.scales(0) if a is not None]
    except tikv.TikvError:
        return []


FORMS = [
    {"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"dtype": "q4_0"}, {"dtype": "float8_e4m3fn"},
    {"dtype": "float16", "v_dtype": tikv.Quant(bits=4, group=32)}, {"dtype": "float32", "window": 24, "sinks": 3},
    {"dtype": "q8_0", "window": 20},
]  # fmt: skip


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_that_are_merged(arch, rng, form, even):
    """Twice, so that the second is of a layer with a history.

    The buffers are those of a compaction without merge, but for the rows that got something, which are what an append
    of the sums writes.
    """
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 40, "batch_size": 2, **form}
    store = tikv.KVCacheStore(**form)
    fresh = tikv.KVCacheStore(**{**form, "window": None, "sinks": 0})
    store.append(0, *(place(a) for a in rng.standard_normal((2, 2, 35, HEADS, WIDTH)).astype(np.float32)))
    for _ in range(2):
        plain = copy.deepcopy(store)
        held = np.broadcast_to(store.held(0), (2, HEADS))
        n = int(held.max())
        keep = np.zeros((2, HEADS, n), bool)
        for b, h in np.ndindex(2, HEADS):
            kept = n // 2 if even else int(rng.integers(1, held[b, h] + 1))
            keep[b, h, rng.choice(held[b, h], min(kept, held[b, h]), replace=False)] = True
        to, weights = random_merge(rng, keep, held)
        sums = [summed(oracle.to_numpy(a), to, weights) for a in store.tokens(0)]
        store.compact(0, keep, merge=(place(to), place(weights)))
        plain.compact(0, keep)
        np.testing.assert_array_equal(store.positions(0), plain.positions(0))
        fresh.reset()
        fresh.append(0, *(place(a[0]) for a in sums), layout="head_major")
        expected = buffers(plain)
        for b, h, j in zip(*np.nonzero(sums[0][1]), strict=True):
            rank = int(keep[b, h, :j].sum())
            for whole, of_sums in zip(expected, buffers(fresh), strict=True):
                whole[b, h, rank] = of_sums[b, h, j]
        for a, b in zip(buffers(store), expected, strict=True):
            oracle.assert_same_bits(a, b)


@pytest.mark.parametrize(
    "form",
    [
        {"dtype": "float32"}, {"dtype": "int8", "layout": "HND"}, {"dtype": "q4_0", "per_head": True},
        {"dtype": "float16", "per_head": True}, {"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn", "v_dtype": "float16"},
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_pages_that_are_merged(arch, rng, form):
    """Of a sequence whose blocks a fork shares: the fork keeps its rows."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    made = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 40, "block_size": 4, **form}
    pool, per_head = tikv.PagedKVCacheStore(**made), form.get("per_head", False)
    seq = pool.add()
    pool.append(0, *(place(a) for a in rng.standard_normal((2, 19, HEADS, WIDTH)).astype(np.float32)), [seq], [0, 19])
    other = None if per_head else pool.fork(seq)
    before = [oracle.to_numpy(a).copy() for a in pool.tokens(0, seq)]
    keep = np.zeros((1, HEADS, 19), bool)
    for h in range(HEADS):
        keep[0, h, rng.choice(19, 7 + 3 * h * per_head, replace=False) if h == 0 or per_head else keep[0, 0]] = True
    to, weights = random_merge(rng, keep, np.full((1, HEADS), 19))
    sums = [summed(a.swapaxes(0, 1)[None], to, weights) for a in before]
    free = pool.num_free_blocks
    pool.compact(0, seq, keep[0] if per_head else keep[0, 0], merge=(place(to[0]), place(weights[0])))
    fresh = tikv.PagedKVCacheStore(**made)
    of_sums = fresh.add()
    fresh.append(0, *(place(np.ascontiguousarray(a[0][0].swapaxes(0, 1))) for a in sums), [of_sums], [0, 19])
    for got, old, new in zip(pool.tokens(0, seq), before, fresh.tokens(0, of_sums), strict=True):
        got, new = oracle.to_numpy(got), oracle.to_numpy(new)
        for h in range(HEADS):
            kept = np.flatnonzero(keep[0, h])
            want = np.where(sums[0][1][0, h, kept, None], new[kept, h], old[kept, h])
            oracle.assert_same_bits(np.ascontiguousarray(got[: len(kept), h]), want)
    if other is not None:
        for a, b in zip(before, pool.tokens(0, other), strict=True):
            oracle.assert_same_bits(b, a)
    else:
        assert pool.num_free_blocks > free


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("only_values", [True, False], ids=["values", "both"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", [{"dtype": "float16"}, {"dtype": "q4_0"}, {"dtype": "int8"}], ids=str)
def test_a_row_that_is_added_to_several(arch, rng, form, paged, only_values):
    """With one more axis; keys stay bit for bit if only values are merged."""
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, **form}
    if paged:
        store = tikv.PagedKVCacheStore(num_blocks=24, block_size=4, per_head=True, **form)
        where = (store.add(),)
        sizes = ([*where], [0, 20])
    else:
        store, where, sizes = tikv.KVCacheStore(capacity=24, **form), (), ()
    rows = rng.standard_normal((2, 20, HEADS, WIDTH)).astype(np.float32)
    store.append(0, *map(place, rows), *sizes)
    held = [oracle.to_numpy(a).copy() for a in store.tokens(0, *where)]
    if paged:
        held = [a.swapaxes(0, 1)[None] for a in held]
    keep = np.zeros((1, HEADS, 20), bool)
    for h in range(HEADS):
        keep[0, h, rng.choice(20, 8, replace=False)] = True
    pairs = [random_merge(rng, keep, np.full((1, HEADS), 20)) for _ in range(3)]
    to, weights = (np.stack(a, axis=-1) for a in zip(*pairs, strict=True))
    if not paged:
        plain = copy.deepcopy(store)
        plain.compact(0, keep)
    merge = tuple(place(a if not paged else np.ascontiguousarray(a[0])) for a in (to, weights))
    store.compact(0, *where, keep[0] if paged else keep, merge=merge + (("values",) if only_values else ()))
    for i, (a, rows) in enumerate(zip(store.tokens(0, *where), held, strict=True)):
        now = oracle.to_numpy(a)
        now = now.swapaxes(0, 1)[None] if paged else now
        kept = np.stack([rows[0, h, keep[0, h]] for h in range(HEADS)])[None]
        if only_values and i == 0:
            np.testing.assert_array_equal(now, kept)
            continue
        sums = rows.astype(np.float64)
        for h, j, m in np.ndindex(HEADS, 20, 3):
            if to[0, h, j, m] >= 0:
                sums[0, h, to[0, h, j, m]] += weights[0, h, j, m] * rows[0, h, j].astype(np.float64)
        want = np.stack([sums[0, h, keep[0, h]] for h in range(HEADS)])[None]
        step = {"float16": 2e-3, "int8": 1 / 127, "q4_0": 1 / 7}[form["dtype"]]
        np.testing.assert_allclose(now, want, atol=step * abs(want).max())
    if only_values and not paged:
        oracle.assert_same_bits(oracle.to_numpy(store.keys(0)), oracle.to_numpy(plain.keys(0)))


@pytest.mark.parametrize(
    ("merge", "error", "says"),
    [
        (
            ([[[-1, 1, -1, -1]]], "w"),
            tikv.PositionError,
            "to of sequence 0, head 0, token 1 is 1, which is a token that",
        ),
        (([[[0, -1, -1, -1]]], "w"), tikv.PositionError, "is of a token that is kept"),
        (([[[-1, 4, -1, -1]]], "w"), tikv.PositionError, "is not a token that its head holds"),
        (([[[-1, -2, -1, -1]]], "w"), tikv.PositionError, "is not a token that its head holds"),
        (([[[-1, 0, -1]]], "w"), tikv.ShapeError, r"to is .* where \(1, 1, 4\) is needed"),
        (([[[-1, 0, -1, -1]]], np.ones((1, 1, 3), np.float32)), tikv.ShapeError, "weights is"),
        (([[[-1, 0, -1, -1]]], np.ones((1, 1, 4))), tikv.DTypeError, "weights is .*(must be|Use) float32"),
        ((np.zeros((1, 1, 4), np.float32), "w"), tikv.DTypeError, "to is"),
        (([[[-1, 0, -1, -1]]],), tikv.OptionError, r"merge must be \(to, weights\)"),
        ("to", tikv.OptionError, "merge must be"),
    ],
)
@pytest.mark.parametrize("paged", [False, True])
def test_a_merge_that_cannot_be_is_refused(arch, merge, error, says, paged):
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}
    rows = np.arange(16, dtype=np.float32).reshape(2, 4, 1, 2)
    if merge != "to":
        merge = tuple(np.ones((1, 1, 4), np.float32) if isinstance(a, str) else np.asarray(a) for a in merge)
    if paged:
        store, merge = (
            tikv.PagedKVCacheStore(**form, num_blocks=4, block_size=2),
            merge if merge == "to" else tuple(a[0] for a in merge),
        )
        where = (store.add(),)
        store.append(0, *rows, list(where), [0, 4])
        says = says.replace("(1, 1, 4", "(1, 4").replace(r"\(1, 1, 4", r"\(1, 4")
    else:
        store, where = tikv.KVCacheStore(**form, capacity=4), ()
        store.append(0, *rows)
    before = buffers(store)
    with pytest.raises(error, match=says):
        store.compact(0, *where, [0, 2] if paged else [[0, 2]], merge=merge)
    with pytest.raises(tikv.OptionError, match="merge cannot be combined with rope"):
        store.compact(0, *where, [0, 2] if paged else [[0, 2]], merge=merge, rope=tikv.Rope(np.ones(1, np.float32)))
    for a, b in zip(before, buffers(store), strict=True):
        oracle.assert_same_bits(b, a)
    assert (store.held(0, *where) == 4) if not paged else (np.asarray(store.held(0, *where)) == 4).all()


@pytest.mark.archs("cpu")
def test_groups_along_tokens_are_not_merged(arch):
    codes = tikv.Quant(bits=8, group=32, axis="tokens", residual=32)
    rows = np.ones((2, 70, 1, 32), np.float32)
    to, weights = np.full((1, 70), -1), np.ones((1, 70), np.float32)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=32, capacity=96, dtype=codes)
    store.append(0, *rows)
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=32, num_blocks=4, block_size=32, dtype=codes)
    seq = pool.add()
    pool.append(0, *rows, [seq], [0, 70])
    with pytest.raises(tikv.OptionError, match="a store of groups along tokens does not merge rows"):
        store.compact(0, [range(64)], merge=(to[None], weights[None]))
    with pytest.raises(tikv.OptionError, match="a pool of groups along tokens does not merge rows"):
        pool.compact(0, seq, range(64), merge=(to, weights))
