"""Memory is given back: by the process, when stores and arrays are dropped, and without the garbage collector."""

import gc
import mmap
import sys
import threading
import time
import weakref

import ml_dtypes
import numpy as np
import oracle
import pytest
from inside import layers_of

import tikv
from tikv import dtypes, runtime
from tikv.arrays import Memory, as_numpy, host_bytes, new_like, read_host, to_device, view, write_host
from tikv.arrays.memory import RoomFor
from tikv.dtypes import DType
from tikv.runtime import engine
from tikv.runtime.dropped import KEPT_BYTES, Array, Dropped
from tikv.stores import limits
from tikv.stores.layers.growing import GrowingLayer

RESIDENT = """
import os, subprocess, sys
import numpy as np
import tikv

def resident():  # MiB
    if os.path.exists("/proc/self/statm"):
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) / 1024

def grown(make, times):
    for n in range(3):
        make(n)
    before = resident()
    for n in range(times):
        make(n)
    return resident() - before

def store(n):
    made = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=64, capacity=32768, dtype="float16")
    assert made.nbytes == 1 << 24
    made.append(0, new, new)

def one_shot(n):
    k, v = np.zeros((2, 2, 1024 << n % 3, 64), np.float16)
    tikv.copy_kv(new, new, k, v, position=5)
    assert k.any() and v.any()

def quantized(n):
    q, scale = tikv.quantize(np.ones((1024 << n % 3, 2, 64), np.float16))

tikv.init(arch=sys.argv[1])
new = np.ones((4, 2, 64), np.float16)
print(grown(store, 24), grown(one_shot, 200), grown(quantized, 200))
"""


def test_the_process_is_no_larger_for_what_it_dropped(arch, python):
    """24 stores of 16 MiB, 200 copies between arrays of the host, 200 results of 0.1 to 0.5 MiB."""
    grown = [float(mib) for mib in python(RESIDENT, arch).stdout.split()]
    assert len(grown) == 3
    assert max(grown) < 64, f"MiB more: {grown}"


def ones(*shape):
    return np.ones(shape, np.float16)


def contiguous(dtype="float16"):
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=8, capacity=32, window=[None, 16], dtype=dtype)
    store.append(0, ones(2, 1, 8), ones(2, 1, 8))
    store.append(1, ones(2, 1, 8), ones(2, 1, 8))
    store.append_all(ones(2, 1, 1, 8), ones(2, 1, 1, 8))
    store.attend(0, ones(1, 2, 8))
    store.restore(store.snapshot())
    store.repeat(2)
    return store


def step():
    store = contiguous()
    made = tikv.compile_step(store)
    made.run(ones(2, 2, 1, 1, 8), ones(2, 2, 1, 1, 8), ones(2, 2, 2, 8))
    return made


def growing():
    layer = GrowingLayer(num_kv_heads=1, head_dim=8, capacity=8)
    layer.append(ones(1, 1, 4, 8), ones(1, 1, 4, 8))
    layer.make_room(capacity=32, drop=0)
    layer.append(ones(1, 1, 4, 8), ones(1, 1, 4, 8))
    return layer


def paged():
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=8, block_size=4)
    first = pool.add([1, 2, 3])
    pool.append(0, ones(3, 1, 8), ones(3, 1, 8), [first], cu_seqlens=[0, 3])
    fork = pool.fork(first)
    pool.append(0, ones(1, 1, 8), ones(1, 1, 8), [fork])
    pool.attend(0, ones(1, 2, 8), [first])
    pool.swap_out(first)
    pool.swap_in(first)
    return pool


def memories(owner):
    """Weak references to the memory below a store, a step or a pool."""
    store = getattr(owner, "store", owner)
    paged = isinstance(store, tikv.PagedKVCacheStore)
    arrays = (store._pages.pools.groups if paged else layers_of(store))[0].arrays
    return [weakref.ref(a.owner) for a in arrays]


@pytest.mark.full(unless=lambda case: case["make"] in (contiguous, paged))
@pytest.mark.parametrize("make", [contiguous, lambda: contiguous("int8"), step, growing, paged])
def test_memory_goes_with_the_last_reference(arch, make):
    """Not when the garbage collector comes round, which counts objects and not their bytes."""
    make()
    gc.collect()
    gc.disable()
    try:
        made = make()
        held = memories(made)
        assert held
        assert all(memory() is not None for memory in held)
        del made
        assert [memory() for memory in held] == [None] * len(held)
    finally:
        gc.enable()


@pytest.mark.archs("cpu")
def test_host_memory_of_any_length_leaves_nothing_to_the_collector(arch):
    memory = np.arange(64, dtype=np.int8)

    def read(lengths):
        for n in lengths:
            found = as_numpy(view(memory[:n], "array", "test")), host_bytes(memory.ctypes.data, n)
            assert [a.tolist() for a in found] == [memory[:n].tolist()] * 2

    read([0, 1])
    gc.collect()
    gc.disable()
    try:
        read(range(2, 50))
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_taichi_is_told_behind_a_synchronize():
    """And asked for a synchronize only where much waits: by bytes, or many small arrays."""
    dropped, done = Dropped(), []
    dropped.fresh.append(Array("small", 4))
    assert not dropped.due()
    dropped.fresh.append(Array("large", KEPT_BYTES))
    assert dropped.due()

    def synchronize():
        done.append("synchronize")
        dropped.fresh.append(Array("later", 4))  # may be in use behind what is waited for

    dropped.release_behind(synchronize, done.append)
    assert done == ["synchronize", "small", "large"]
    assert not dropped.due()
    dropped.fresh.extend(Array("small", 4) for _ in range(255))
    assert not dropped.due()
    dropped.fresh.append(Array("small", 4))
    assert dropped.due()


def test_what_a_failed_synchronize_left_waits_on():
    dropped, released = Dropped(), []
    dropped.fresh.append(Array("array", KEPT_BYTES + 1))

    def fail():
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        dropped.release_behind(fail, released.append)
    assert released == []
    assert dropped.due()
    dropped.release_behind(lambda: None, released.append)
    assert released == ["array"]


def test_dropped_while_kernels_run(arch):
    """What took the place of memory that was dropped in use has its own bits."""
    new = np.random.default_rng(3).standard_normal((4, 2, 64), np.float32)
    for n in range(40):
        store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=64, capacity=4096, dtype="float32")
        store.append(0, new + n, new - n)
        k, v = store.tokens(0)
        del store
        assert (k.copy_to_host()[0].transpose(1, 0, 2) == new + n).all()
        assert (v.copy_to_host()[0].transpose(1, 0, 2) == new - n).all()


def test_of_a_runtime_that_is_gone_nothing_is_released(arch, monkeypatch):
    """Its program has freed all of it, and the address may be another array's by now."""
    live = runtime.current()
    released = []

    class Gone:
        def delete_ndarray(self, arr):
            released.append(arr)

    monkeypatch.setattr(live, "program", Gone())
    assert not live.alive
    live._release("array")
    assert released == []


def test_memory_is_read_back_in_a_dtype_that_numpy_has_no_name_for(arch, rng):
    """Of ml_dtypes' types some have none in NumPy's array interface, by which its stride tricks go."""
    float8 = DType("float8_e5m2", "e5m2", np.dtype(ml_dtypes.float8_e5m2), (12, 8))
    live = runtime.current()
    kept = Memory(24, live).array((4, 6), float8)
    given = oracle.random_bits(rng, (4, 6), float8.numpy)
    write_host(given, kept)
    oracle.assert_same_bits(read_host(kept, live), given)


def is_as_before():
    rows, cache = np.ones((2, 1, 4), np.float32), np.zeros((1, 8, 4), np.float32)
    tikv.copy(rows, cache, position=3)
    return cache[0, 3:5].all() and cache.sum() == 8


def test_memory_that_is_not_there_is_a_capacity_error(arch, capfd, monkeypatch):
    """On every device and for every kind of array that we make; the engine prints nothing, and the process goes on."""
    live = runtime.current()
    for nbytes in (2**33 - 64, 2**50) if live.is_spirv else (2**50,):
        with pytest.raises(tikv.CapacityError, match=rf"^memory: {live.device} has no room for {nbytes} bytes"):
            Memory(nbytes, live)
        assert is_as_before()
    monkeypatch.setitem(limits.BLOCK_BYTES, arch, 2**60)
    monkeypatch.setattr(runtime, "memory_bytes", lambda *_: None)  # a system that does not tell
    heads = 32 if live.is_spirv else 2**20
    with pytest.raises(tikv.CapacityError, match=f"^memory: {live.device} has no room for"):
        tikv.KVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=128, capacity=2**19)
    with pytest.raises(tikv.CapacityError, match=f"({live.device} has no room for|{arch} addresses)"):
        tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=128, num_blocks=2**15)
    assert is_as_before()
    likes = [np.zeros(1, np.float32)]
    if torch := sys.modules.get("torch"):
        likes.append(torch.zeros(1, device=live.device if live.is_cuda else "cpu"))
    for like in likes:
        with pytest.raises(tikv.CapacityError, match=r"^memory: .* has no room for"):
            new_like(like, (2**50,), dtypes.float32, live)
    assert "Assertion" not in "".join(capfd.readouterr())
    assert is_as_before()


@pytest.mark.skipif(sys.platform != "linux", reason="memory that is there only once it is written")
@pytest.mark.archs("vulkan")
def test_arrays_of_the_host_that_span_more_than_the_device_holds(arch):
    step, flags = 6 * 2**30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, step + 2**16, flags=flags)
    pools = [
        np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.float16)[o:], (2, 4, 1, 16), (step, 32, 32, 2))
        for o in (0, 1024)
    ]
    new = np.ones((2, 1, 16), np.float16)
    with pytest.raises(tikv.CapacityError, match=r"^memory: the host arrays span \d+ bytes.*Pass contiguous copies"):
        tikv.write_slots(new, new, *pools, np.array([1, 6]))
    assert not any(pool.any() for pool in pools)
    assert is_as_before()


@pytest.mark.archs("vulkan", "metal")
def test_what_was_dropped_makes_room(arch, monkeypatch):
    """Dropped arrays wait for a time at which it is cheap to release them; a full device is such a time."""
    live, make, asked = runtime.current(), engine.new_words, []

    def full_at_first(*args):
        asked.append(live.dropped._nbytes)
        if len(asked) == 1:
            raise RuntimeError("allocate_memory_on_device")
        return make(*args)

    dropped = live.new_words(16)
    monkeypatch.setattr(engine, "new_words", full_at_first)
    del dropped
    assert live.new_words(16).shape == (16,)
    assert asked == [asked[0], 0]
    assert asked[0] > 0


def test_another_error_is_not_taken_for_that():
    for error in (RuntimeError("device lost"), ValueError("wrong")):
        with pytest.raises(type(error), match=str(error)) as caught, RoomFor(8, "cpu"):
            raise error
        assert not isinstance(caught.value, tikv.TikvError)


@pytest.mark.archs("vulkan")
def test_memory_waits_while_another_thread_compiles(arch):
    live, compiles = runtime.current(), threading.Event()
    engine = runtime.ti.lang.impl.get_runtime()
    given = np.arange(8, dtype=np.float32)

    def compile_something():
        with live.lock:
            engine.inside_kernel = True  # as the engine says to all threads while one of them compiles
            compiles.set()
            time.sleep(0.1)
            engine.inside_kernel = False

    def meanwhile(work):
        compiles.clear()
        thread = threading.Thread(target=compile_something)
        thread.start()
        compiles.wait()
        try:
            return work()
        finally:
            thread.join()

    there = meanwhile(lambda: to_device(given, live))
    assert np.array_equal(meanwhile(lambda: read_host(there, live)), given)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"dtype": "int8"},
        {"dtype": tikv.Quant(4, 64)},
        {"dtype": tikv.Quant(2, 64, axis="tokens", residual=64)},
        {"window": 1 << 16},
        {"place": "host"},
    ],
    ids=["float16", "int8", "groups", "groups of tokens", "windows", "host"],
)
def test_a_store_larger_than_the_memory_is_refused_before_any_is_allocated(arch, form, monkeypatch):
    on_host = "place" in form
    if arch in ("vulkan", "metal") and on_host:
        pytest.skip("kernels cannot read the host's memory")
    form = {"num_kv_heads": 8, "head_dim": 64, "capacity": 1 << 16, **form}
    tikv.KVCacheStore(num_layers=1, **{**form, "capacity": 128, "window": None})  # starts the runtime
    monkeypatch.setattr(Memory, "__init__", lambda *_: pytest.fail("memory was allocated"))
    limit = runtime.memory_bytes("cpu" if on_host else arch)
    with pytest.raises(tikv.CapacityError, match=rf"^KVCacheStore: (\d+) bytes are needed .* {limit} bytes") as refused:
        tikv.KVCacheStore(num_layers=-(-limit // (1 << 16) // 128), **form)
    assert int(str(refused.value).split()[1]) > limit


@pytest.mark.parametrize("dtype", ["float16", tikv.Quant(2, 64, axis="tokens", residual=64)], ids=str)
def test_a_pool_larger_than_the_memory_is_refused_before_any_is_allocated(arch, dtype, monkeypatch):
    form = {"num_kv_heads": 8, "head_dim": 64, "num_blocks": 1 << 10, "block_size": 64, "dtype": dtype}
    tikv.PagedKVCacheStore(num_layers=1, **{**form, "num_blocks": 2})
    monkeypatch.setattr(Memory, "__init__", lambda *_: pytest.fail("memory was allocated"))
    limit = runtime.memory_bytes(arch)
    with pytest.raises(
        tikv.CapacityError, match=rf"^PagedKVCacheStore: \d+ bytes are needed .* {limit} bytes of memory"
    ):
        tikv.PagedKVCacheStore(num_layers=-(-limit // (1 << 16) // 128), **form)
