"""Graphs give the bits of the calls one by one, run many times, follow positions, and die with their runtime."""

import subprocess
import sys

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, dtypes, runtime


def on_device(array):
    """A CacheArray of the library's own memory: what Taichi's graph takes on Vulkan and Metal."""
    live = runtime.current()
    if array.dtype not in (np.int32, np.int64):
        assert dtypes.of_numpy(array.dtype) is not None
    return arrays.CacheArray(arrays.to_device(array, live), live)


def own_copy(array, arch, owned):
    return on_device(array) if owned else oracle.place(array.copy(), arch)


@pytest.mark.parametrize("owned", [False, True], ids=["caller", "owned"])
@pytest.mark.parametrize("window", [None, 5], ids=["linear", "ring"])
@pytest.mark.parametrize("dtypes_", [("f4", "f4"), ("f4", "f2"), ("f2", "f2")], ids=["f32", "f32_f16", "f16"])
def test_copies_follow_their_position(arch, rng, owned, window, dtypes_):
    builder = tikv.GraphBuilder()
    builder.copy_kv("k", "v", "k_cache", "v_cache", position="here", window=window)
    builder.copy("k", "other", position=1)
    builder.copy("v", "other", position="there", window=window)
    graph = builder.compile()
    before = {name: oracle.random_bits(rng, (2, 9, 6), dtypes_[1]) for name in ("k_cache", "v_cache", "other")}
    one, all_ = ({name: own_copy(a, arch, owned) for name, a in before.items()} for _ in range(2))
    for here, there in ((0, 3), (4, 6), (5, 0)):
        new = {name: own_copy(oracle.numbers(rng, (2, 2, 6), dtypes_[0]), arch, owned) for name in "kv"}
        assert graph.run({**new, **all_, "here": here, "there": there}) == {}
        tikv.copy_kv(new["k"], new["v"], one["k_cache"], one["v_cache"], position=here, window=window)
        tikv.copy(new["k"], one["other"], position=1)
        tikv.copy(new["v"], one["other"], position=there, window=window)
    for name in before:
        oracle.assert_same_bits(all_[name], one[name], what=name)
        assert (oracle.bits(one[name]) != oracle.bits(before[name])).any()


def test_slots_and_ragged_appends(arch, rng):
    builder = tikv.GraphBuilder()
    builder.write_slots("k", "v", "k_pool", "v_pool", "slots")
    builder.append_ragged("k_new", "v_new", "k_cache", "v_cache", "offsets")
    graph = builder.compile()
    pools = [oracle.random_bits(rng, (3, 4, 2, 8), np.float32) for _ in "kv"]
    caches = [oracle.random_bits(rng, (2, 2, 6, 8), np.float32) for _ in "kv"]
    kept = [[oracle.place(a.copy(), arch) for a in (*pools, *caches)] for _ in range(2)]
    for step in range(3):
        rows = [oracle.place(oracle.numbers(rng, (4, 2, 8), np.float32), arch) for _ in "kv"]
        new = [oracle.place(oracle.numbers(rng, (2, 2, 3, 8), np.float32), arch) for _ in "kv"]
        slots = oracle.place(np.array([step, 5, -1, 11 - step]), arch)
        offsets = oracle.place(np.array([step, 4 - 3 * step]), arch)
        values = dict(zip(("k_pool", "v_pool", "k_cache", "v_cache"), kept[0], strict=True))
        values |= {"k": rows[0], "v": rows[1], "slots": slots, "k_new": new[0], "v_new": new[1], "offsets": offsets}
        graph.run(values)
        tikv.write_slots(*rows, *kept[1][:2], slots)
        tikv.append_ragged(*new, *kept[1][2:], offsets)
    for a, b in zip(*kept, strict=True):
        oracle.assert_same_bits(a, b)


def test_what_a_graph_refuses(arch, rng):
    with pytest.raises(tikv.TikvError, match="no calls"):
        tikv.GraphBuilder().compile()
    builder = tikv.GraphBuilder()
    with pytest.raises(tikv.TikvError, match="name of an array"):
        builder.copy(np.ones(3), "cache", position=0)
    builder.copy("src", "cache", position="position")
    graph = builder.compile()
    src = oracle.place(oracle.numbers(rng, (2, 1, 4), np.float32), arch)
    before = oracle.random_bits(rng, (1, 6, 4), np.float32)
    cache = oracle.place(before.copy(), arch)
    with pytest.raises(tikv.TikvError, match="missing position"):
        graph.run({"src": src, "cache": cache})
    with pytest.raises(tikv.TikvError, match="unknown extra"):
        graph.run({"src": src, "cache": cache, "position": 0, "extra": 1})
    graph.run({"src": src, "cache": cache, "position": 2})
    after = oracle.to_numpy(cache).copy()
    for position, error in ((5, tikv.CapacityError), (-1, tikv.PositionError)):
        with pytest.raises(error):
            graph.run({"src": src, "cache": cache, "position": position})
        oracle.assert_same_bits(cache, after)


def test_a_graph_dies_with_its_runtime():
    script = """
import numpy as np, tikv
builder = tikv.GraphBuilder()
builder.copy("src", "cache", position=0)
graph = builder.compile()
values = {"src": np.ones((1, 1, 4), np.float32), "cache": np.zeros((1, 2, 4), np.float32)}
graph.run(values)
tikv.init("cpu")
try:
    graph.run(values)
except tikv.StaleRuntimeError as error:
    print("stale:", error)
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "stale: Graph.run" in child.stdout


@pytest.mark.parametrize("layer", [None, 1])
def test_a_compiled_step_writes_what_append_writes(arch, rng, layer):
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 12, "dtype": "float16", "window": [4, None]}
    stepped, plain = tikv.KVCacheStore(**form), tikv.KVCacheStore(**form)
    step = tikv.compile_step(stepped, layers=layer, attend=False)
    for _ in range(6):
        shape = (2, 1, 2, 8) if layer is None else (1, 2, 8)
        k, v = (oracle.place(oracle.numbers(rng, shape, np.float32), arch) for _ in "kv")
        step.run(k, v)
        if layer is None:
            plain.append_all(k, v)
        else:
            plain.append(layer, k, v)
    for i in range(2):
        for a, b in zip(stepped.tokens(i), plain.tokens(i), strict=True):
            oracle.assert_same_bits(a, b)
