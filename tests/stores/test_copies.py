"""copy.copy, copy.deepcopy and pickle: memory of its own with the same bits, or a refusal that says what does."""

import copy
import pickle
import types

import numpy as np
import oracle
import pytest
from inside import storage_of

import tikv
from tikv import arrays, dtypes, runtime

FORM = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}


def rows(rng, arch, tokens, heads=2, dtype=np.float32):
    return oracle.place(oracle.numbers(rng, (tokens, heads, 8), dtype), arch)


def contents(store, layer):
    return [oracle.to_numpy(a) for a in store.tokens(layer)]


def same(a, b):
    """Bit for bit: memory that nobody has written yet may look like NaNs."""
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {}), ("int8", {}), ("float16", {"window": [6, None], "sinks": 2}), ("bfloat16", {"head_dim_v": 4})],
    ids=["float32", "int8", "rings", "widths"],
)
def test_a_deep_copy_of_a_store_goes_its_own_way(arch, rng, dtype, options):
    store = tikv.KVCacheStore(capacity=16, dtype=dtype, **FORM, **options)
    width_v = options.get("head_dim_v", 8)
    k = oracle.place(oracle.numbers(rng, (9, 2, 8), np.float32), arch)
    v = oracle.place(oracle.numbers(rng, (9, 2, width_v), np.float32), arch)
    for layer in range(2):
        store.append(layer, k, v)
    store.trim(1)
    twin = copy.deepcopy(store)
    assert type(twin) is tikv.KVCacheStore
    assert (twin.length, twin.dtype, twin.windows) == (store.length, store.dtype, store.windows)
    assert repr(twin) == repr(store)
    before = [contents(store, layer) for layer in range(2)]
    assert all(same(contents(twin, layer), before[layer]) for layer in range(2))
    for _ in range(3):
        for layer in range(2):
            twin.append(layer, k[:2], v[:2])
    assert (twin.length, store.length) == (14, 8)
    assert all(same(contents(store, layer), before[layer]) for layer in range(2))
    third = copy.deepcopy(store)
    for _ in range(3):
        for layer in range(2):
            for one in (store, third):
                one.append(layer, k[:2], v[:2])
    for layer in range(2):
        assert same(contents(store, layer), contents(twin, layer))
        assert same(contents(third, layer), contents(twin, layer))
    twin.reset()
    twin.append(0, k, v)
    assert third.length == 14


def test_what_was_put_behind_the_counts_comes_along(arch, rng):
    """Appends at positions are counted later, by `advance`."""
    store = tikv.KVCacheStore(capacity=16, dtype="float32", **FORM)
    k = rows(rng, arch, 2)
    positions = store.positions_on_device()
    for layer in range(2):
        store.append(layer, k, k, positions=positions)
    twin = copy.deepcopy(store)
    store.advance(2)
    twin.advance(2)
    assert same(contents(twin, 1), contents(store, 1))


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NHD"), ("int8", "HND"), ("bfloat16", "VLLM")])
def test_a_deep_copy_of_a_pool_goes_its_own_way(arch, rng, dtype, layout):
    pool = tikv.PagedKVCacheStore(num_blocks=16, block_size=4, dtype=dtype, layout=layout, **FORM)
    k = rows(rng, arch, 10)
    a = pool.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    for layer in range(2):
        pool.append(layer, k, k, [a], cu_seqlens=[0, 10])
    b, c = pool.fork(a), pool.fork(a)
    pool.swap_out(c)
    twin = copy.deepcopy(pool)
    assert repr(twin) == repr(pool)
    before = {s: contents_of(pool, s) for s in (a, b)}
    assert all(same(contents_of(twin, s), before[s]) for s in (a, b))
    for layer in range(2):
        twin.append(layer, k[:3], k[:3], [a], cu_seqlens=[0, 3])
    twin.free(b)
    twin.swap_in(c)
    assert same(contents_of(twin, c), before[a])
    assert pool.length(b) == 10
    assert (twin.length(a), pool.length(a)) == (13, 10)
    assert all(same(contents_of(pool, s), before[s]) for s in (a, b))
    assert twin.length(twin.add([1, 2, 3, 4, 5, 6, 7, 8, 1])) == 8
    assert twin.add() == pool.add() + 1


def contents_of(pool, seq):
    return [oracle.to_numpy(a) for layer in range(2) for a in pool.tokens(layer, seq)]


def test_deep_copies_of_layers(arch, rng):
    """Two layers that share a pool share one in the copy too."""
    qkv = oracle.place(oracle.numbers(rng, (3, 48), np.float32), arch)
    one = tikv.ContiguousKVLayer(8, 2, 8, dtype="float32")
    one.contig_write(qkv, num_q_heads=2)
    one.set_len(3)
    twin = copy.deepcopy(one)
    twin.contig_write(qkv, num_q_heads=2)
    twin.set_len(6)
    assert (len(one), len(twin)) == (3, 6)
    assert same([twin.keys.copy_to_host()[:, :3]], [one.keys.copy_to_host()[:, :3]])
    assert arrays.view(twin.keys, "k", "test").owner is not arrays.view(one.keys, "k", "test").owner
    pool = tikv.KVPool(4, 4, 2, 8, dtype="float32")
    a, b = (tikv.PagedKVLayer(2, 4, 2, 8, dtype="float32", pool=pool) for _ in "ab")
    a.paged_block_indices, b.paged_block_indices = [3], [1]
    a.paged_write(qkv, num_q_heads=2)
    before = pool.keys.copy_to_host()
    x, y = copy.deepcopy([a, b])
    assert x.pool is y.pool
    assert x.pool is not pool
    assert same([x.pool.keys.copy_to_host()], [before])
    y.paged_write(qkv, num_q_heads=2)
    assert same([pool.keys.copy_to_host()], [before])
    assert not same([x.pool.keys.copy_to_host()], [before])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_cache_array_has_its_own_memory(arch, rng, how):
    store = tikv.KVCacheStore(capacity=4, dtype="bfloat16", **FORM)
    k = rows(rng, arch, 2)
    store.append(1, k, k)
    keys = store.keys(1)
    twin, before = how(keys), keys.copy_to_host()
    assert (type(twin), twin.shape, twin.dtype, twin.device) == (type(keys), keys.shape, keys.dtype, keys.device)
    oracle.assert_same_bits(twin.copy_to_host(), before)
    store.append(1, k, k)
    oracle.assert_same_bits(twin.copy_to_host(), before)
    assert not same([keys.copy_to_host()], [before])


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_copies_that_are_the_same(arch, rng, how):
    store = tikv.KVCacheStore(capacity=8, dtype="float32", **FORM)
    k = rows(rng, arch, 2)
    store.append(0, k, k)
    live = runtime.current()
    assert how(live) is live
    snapshot = store.snapshot()
    store.append(0, k, k)
    store.restore(how(snapshot))
    assert store.layer_length(0) == 2


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copied_builder_goes_its_own_way(arch, how):
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position="position")
    builder.compile()
    twin = how(builder)
    twin.copy("src", "out", position="position")
    assert sorted(builder.compile().arrays) == ["cache", "src"]
    assert sorted(twin.compile().arrays) == ["cache", "out", "src"]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_rotation_is_the_same(arch, rng, how):
    angle = np.arange(16, dtype=np.float32)[:, None] / 10.0 ** np.arange(4, dtype=np.float32)
    rope = tikv.NormRope(mode="half", cos=np.cos(angle), sin=np.sin(angle))
    q = rows(rng, arch, 3)
    first, second = (oracle.to_numpy(tikv.norm_rope(q, one, position=2)) for one in (rope, how(rope)))
    oracle.assert_same_bits(first, second)
    assert not same([first], [oracle.to_numpy(q)])


def of_all_kinds():
    store = tikv.KVCacheStore(capacity=8, dtype="float32", **FORM)
    builder = tikv.GraphBuilder()
    builder.copy("src", "cache", position="position")
    desc = tikv.KVCacheAppendDescriptor(
        batch_size=1, num_heads=1, new_len=1, max_cache_len=2, d_k=4, d_v=4, dtype="float32"
    )
    return {
        "KVCacheStore": (store, r"Use copy\.deepcopy\(\); snapshot\(\) .*; save\(\) and load\(\)"),
        "PagedKVCacheStore": (
            tikv.PagedKVCacheStore(num_blocks=4, dtype="float32", **FORM),
            r"Use copy\.deepcopy\(\); fork\(\) .*; save\(\) and load\(\)",
        ),
        "ContiguousKVLayer": (tikv.ContiguousKVLayer(8, 2, 8), r"Use copy\.deepcopy\(\); .*copy_to_host\(\)"),
        "PagedKVLayer": (tikv.PagedKVLayer(2, 4, 2, 8), r"Use copy\.deepcopy\(\); .*copy_to_host\(\)"),
        "KVPool": (tikv.KVPool(2, 4, 2, 8), r"Use copy\.deepcopy\(\); .*copy_to_host\(\)"),
        "CacheArray": (store.keys(0), r"Pickle copy_to_host\(\)"),
        "Snapshot": (store.snapshot(), r"save\(\) the store"),
        "Runtime": (runtime.current(), r"call tikv\.init\(\)"),
        "GraphBuilder": (builder, r"Call its methods again"),
        "Graph": (builder.compile(), r"GraphBuilder\.compile"),
        "Step": (tikv.compile_step(store), r"Call compile_step"),
        "KVCacheAppendPlan": (tikv.KVCacheAppendPlan.select(desc), r"KVCacheAppendPlan\.select\(\)"),
    }


COPIED = {
    pickle.dumps: set(),
    copy.copy: {"CacheArray", "Snapshot", "Runtime", "GraphBuilder"},
    copy.deepcopy: {
        "CacheArray", "Snapshot", "Runtime", "GraphBuilder", "KVCacheStore", "PagedKVCacheStore", "ContiguousKVLayer",
        "PagedKVLayer", "KVPool",
    },
}  # fmt: skip


@pytest.mark.parametrize("how", COPIED, ids=lambda how: how.__name__)
def test_what_is_not_copied_says_which_method_does(arch, how):
    for name, (thing, way_out) in of_all_kinds().items():
        if name in COPIED[how]:
            how(thing)
            continue
        for given in (thing, [thing], types.SimpleNamespace(inside=thing)):
            if how is copy.copy and given is not thing:
                continue
            with pytest.raises(tikv.CopyError, match=f"^{name}: .*{way_out}"):
                how(given)


def test_a_store_whose_runtime_is_gone_is_not_copied(arch, monkeypatch):
    store = tikv.KVCacheStore(capacity=8, dtype="float32", **FORM)
    monkeypatch.setattr(store.runtime, "front", types.SimpleNamespace(prog=None))
    for thing in (store, storage_of(store).memory):
        with pytest.raises(
            tikv.StaleRuntimeError, match=oracle.said(r"copy\.deepcopy: this object was made in Taichi runtime epoch")
        ):
            copy.deepcopy(thing)


@pytest.mark.parametrize("row", dtypes.ALL, ids=lambda row: row.name)
def test_a_dtype_is_one_object(row):
    """They are compared by identity."""
    assert copy.copy(row) is row
    assert copy.deepcopy({"dtype": row})["dtype"] is row
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(row, protocol)) is row
