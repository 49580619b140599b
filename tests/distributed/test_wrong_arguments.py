"""Each argument of a cache of several processes wrong in turn: a `TikvError`, and this rank's part is as before."""

import numpy as np
import pytest
from wrong_arguments import (
    FLAG,
    NO_ARRAY,
    NO_INTEGER,
    NO_LAYOUT,
    NO_NUMBER,
    Scene,
    but,
    destination,
    index,
    integers,
    problems_of,
    rows,
)

import tikv
from tikv.distributed import ShardedKVCacheStore, recv_sequence, send_sequence

dist = pytest.importorskip("torch.distributed")

HEADS, Q_HEADS, WIDTH, BATCH = 2, 4, 8, 2
LAYER = integers(0, 1)
LAYOUT = {**NO_LAYOUT, "the other": "head_major"}
NO_POSITIONS = {**but(NO_ARRAY, "None"), "floats": np.zeros(BATCH, np.float32), "long": np.zeros(BATCH + 1, np.int32)}


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def store_of(rng, shard):
    form = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 24, "batch_size": BATCH}
    store = ShardedKVCacheStore(
        None, shard=shard, **{"interleave": 4, "dtype": "float32", "window": [None, 12], "sinks": 2} | form
    )
    for layer in range(2):
        store.append(layer, new(rng, 7), new(rng, 7))
    return store


def new(rng, tokens, heads=HEADS):
    return rng.standard_normal((BATCH, tokens, heads, WIDTH)).astype(np.float32)


def of_scores():
    return {
        "scale": NO_NUMBER,
        "softcap": {**NO_NUMBER, "zero": 0.0, "negative": -1.0},
        "sink_logits": {**but(NO_ARRAY, "None"), "short": np.ones(Q_HEADS - 1, np.float32)},
        "alibi_slopes": {**but(NO_ARRAY, "None"), "another batch": np.ones((BATCH + 1, Q_HEADS), np.float32)},
        "mass_queries": {**but(NO_INTEGER, "None"), "zero": 0, "needs return_mass": 1},
        "return_lse": FLAG,
        "return_mass": FLAG,
    }


def append(rng, shard):
    store = store_of(rng, shard)
    k, v = new(rng, 5), new(rng, 5)
    wrong = rows(k, "cpu", heads=2, tokens=1)
    right = {"layer": 1, "k": k, "v": v}
    return Scene(
        store.append,
        right,
        [store],
        {"layer": LAYER, "k": wrong, "v": wrong, "layout": LAYOUT, "positions": NO_POSITIONS},
    )


def append_all(rng, shard):
    store = store_of(rng, shard)
    k, v = (np.stack([new(rng, 5)] * 2) for _ in "kv")
    wrong = {**rows(k, "cpu", heads=3, tokens=2), "a layer missing": k[:1]}
    return Scene(
        store.append_all,
        {"k": k, "v": v},
        [store],
        {"k": wrong, "v": wrong, "layout": LAYOUT, "positions": NO_POSITIONS},
    )


def extend(rng, shard):
    store = store_of(rng, shard)
    q, k, v = (new(rng, 5, heads) for heads in (Q_HEADS, HEADS, HEADS))
    wrong = rows(k, "cpu", heads=2, tokens=1)
    given = {"layer": LAYER, "q": rows(q, "cpu", heads=2, tokens=1), "k": wrong, "v": wrong, "layout": LAYOUT}
    return Scene(store.extend, {"layer": 1, "q": q, "k": k, "v": v}, [store], given | of_scores())


def attend(rng, shard):
    store = store_of(rng, shard)
    q = new(rng, 1, Q_HEADS)
    out = np.full(q.shape, 7, np.float32)
    lens = {**but(NO_ARRAY, "None", "a list"), "floats": np.zeros(BATCH, np.float32), "long": np.full(BATCH + 1, 7)}
    given = {
        "layer": LAYER,
        "q": rows(q, "cpu", heads=2),
        "layout": LAYOUT,
        "out": but(destination(out, "cpu"), "None"),
    }
    return Scene(
        store.attend,
        {"layer": 0, "q": q, "out": out},
        [store, out],
        given | {"missing": NO_LAYOUT, "seq_lens": lens} | of_scores(),
    )


def trim(rng, shard):
    store = store_of(rng, shard)
    return Scene(store.trim, {"n": 2}, [store], {"n": integers(0, 7)})


def reorder(rng, shard):
    store = store_of(rng, shard)
    chosen = np.array([1, 0])
    wrong = {**index(chosen, BATCH), "None": None, "a number": 3, "short": [0], "empty": []}
    return Scene(store.reorder, {"index": chosen}, [store], {"index": wrong})


def restore(rng, shard):
    store = store_of(rng, shard)
    snapshot = store.snapshot()
    store.trim(2)
    other = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=32, capacity=8).snapshot()
    return Scene(store.restore, {"snapshot": snapshot}, [store], {"snapshot": {**NO_ARRAY, "of another store": other}})


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("shard", ["heads", "tokens"])
@pytest.mark.parametrize("make", [append, append_all, extend, attend, trim, reorder, restore])
def test_a_wrong_argument_changes_nothing(arch, alone, make, shard):
    assert problems_of(lambda: make(np.random.default_rng(0), shard)) == []


@pytest.mark.archs("cpu")
def test_an_empty_cache_is_true(arch, alone):
    store = ShardedKVCacheStore(None, shard="tokens", num_layers=1, num_kv_heads=1, head_dim=4, capacity=4)
    assert len(store) == 0
    assert store


@pytest.mark.archs("cpu")
def test_what_cannot_be_sent_is_refused(arch, alone):
    """Before the other process hears of it."""
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "num_blocks": 4, "block_size": 2}
    pool, heads = tikv.PagedKVCacheStore(**form), tikv.PagedKVCacheStore(**form, per_head=True)
    seq = pool.add()
    gone = pool.add()
    pool.free(gone)
    for wrong in (None, "0", 1.5, gone, 99, [seq, seq], [seq, gone], [[seq]], object(), True):
        with pytest.raises(tikv.TikvError, match=r"^send_sequence: "):
            send_sequence(pool, wrong, 0)
    for other in (None, "pool", tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=4), heads):
        with pytest.raises(tikv.OptionError, match=r"^send_sequence: "):
            send_sequence(other, 0, 0)
        with pytest.raises(tikv.OptionError, match=r"^recv_sequence: "):
            recv_sequence(other, 0)
    for rank in (None, -1, 1, 0.5, "0"):
        with pytest.raises(tikv.TikvError, match=r"^send_sequence: dst"):
            send_sequence(pool, seq, rank)
        with pytest.raises(tikv.TikvError, match=r"^recv_sequence: src"):
            recv_sequence(pool, rank)
