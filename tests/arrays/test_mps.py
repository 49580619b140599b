"""torch tensors on MPS beside kernels, with stand-ins for what only a Mac has: the device, its queue, shared memory.

The stand-in for a tensor lies on the CPU, says that it lies on MPS, and is copied when its queue is committed, as
PyTorch does on a Mac: a launch that comes too early, or a copy that comes too late, gives wrong values.
"""

import types

import ml_dtypes
import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tikv  # noqa: E402
from tikv import engines, reference, runtime  # noqa: E402
from tikv.arrays import mps  # noqa: E402
from tikv.launch import bound  # noqa: E402


class Tensor(torch.Tensor):
    """A tensor that seems to lie on MPS."""

    @property
    def device(self):
        return torch.device("mps")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            queue.given.append(args[:2])
            return args[0]
        if function is torch.Tensor.cpu:
            queue.commit("wait")
            return args[0].as_subclass(torch.Tensor).clone()
        return super().__torch_function__(function, types, args, kwargs or {})


class Queue:
    """What PyTorch was given and has not committed; and the memory of ours that it sees."""

    def __init__(self):
        self.given, self.seen, self.log = [], {}, []

    def commit(self, what):
        self.log.append(what)
        while self.given:
            to, source = self.given.pop(0)
            self.log.append("copy")
            for tensor in (to, source):
                self.refresh(tensor)
            to.as_subclass(torch.Tensor).copy_(source.as_subclass(torch.Tensor))
            if (key := to.untyped_storage().data_ptr()) in self.seen:
                words, ndarray = self.seen[key]
                ndarray.from_numpy(words.view(ndarray_type(ndarray)))

    def refresh(self, tensor):
        if (key := tensor.untyped_storage().data_ptr()) in self.seen:
            words, ndarray = self.seen[key]
            words[:] = ndarray.to_numpy().view(np.int32)

    def see(self, ndarray):
        words = np.zeros(ndarray.shape, np.int32)
        found = torch.from_numpy(words).as_subclass(Tensor)
        self.seen[found.untyped_storage().data_ptr()] = words, ndarray
        return found


queue = Queue()


def ndarray_type(ndarray):
    return np.uint32 if str(ndarray.dtype) == "u32" else np.int32


def on_mps(array):
    return oracle.to_torch(np.ascontiguousarray(array), "cpu").as_subclass(Tensor)


def values(tensor):
    assert type(tensor) is Tensor
    queue.commit("read")
    queue.refresh(tensor)
    return oracle.to_numpy(tensor.as_subclass(torch.Tensor).clone())


@pytest.fixture(params=["one queue", "two queues"])
def mac(request, arch, monkeypatch):
    """An engine that shares memory with PyTorch on this back end, on PyTorch's queue or on its own."""
    global queue
    queue = Queue()
    kind, live = type(runtime.engine_in_use()), runtime.current()
    monkeypatch.setattr(kind, "mps_arch", arch)
    monkeypatch.setattr(engines, "that_shares_mps", runtime.engine_in_use)
    monkeypatch.setattr(kind, "as_torch", lambda self, ndarray: queue.see(ndarray))
    monkeypatch.setattr(kind, "is_on_queue_of_torch", lambda self, program: request.param == "one queue")
    event = types.SimpleNamespace(record=lambda: queue.commit("commit"))
    monkeypatch.setattr(torch.mps, "Event", lambda: event)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: queue.commit("wait"))
    filled = bound._filled_context
    monkeypatch.setattr(bound, "_filled_context", lambda b: queue.log.append("launch") or filled(b))
    turns = mps.MpsTurns(live)
    turns._program = types.SimpleNamespace(synchronize=lambda: queue.log.append("ours is done"))
    monkeypatch.setattr(live, "turns", turns)
    yield types.SimpleNamespace(live=live, turns=turns, shared=request.param == "one queue")
    live.plans.clear()  # whose arrays were checked for this engine


pytestmark = pytest.mark.archs("vulkan")


def whole(rng, shape, dtype, before=3, behind=5):
    """(a tensor somewhere in a storage of random bits, all elements of that storage)."""
    count = int(np.prod(shape))
    base = oracle.to_torch(oracle.random_bits(rng, (before + count + behind,), dtype), "cpu").as_subclass(Tensor)
    return base[before : before + count].view(shape), base


def test_copy_kv_writes_what_it_should_and_nothing_else(mac, rng):
    """Tensors in the middle of storages, K and V in one, rows with gaps between them; twice, from and to other ones."""
    for _ in range(2):
        rows, _ = whole(rng, (3, 2, 2, 8), np.float16)
        k, v = rows[:, 0], rows[:, 1]
        caches, all_caches = whole(rng, (2, 2, 7, 8), np.float16, before=4)
        want = values(all_caches).copy()
        part = want[4 : 4 + 2 * 2 * 7 * 8].reshape(2, 2, 7, 8)
        for i, x in enumerate((k, v)):
            part[i] = reference.copy(values(x), part[i], position=5, window=7)
        tikv.copy_kv(k, v, caches[0], caches[1], position=5, window=7)
        oracle.assert_same_bits(values(all_caches), want)


def test_the_order_of_a_call(mac, rng):
    """PyTorch has done, or at least committed, what it was given before the launch, and reads what that wrote."""
    k, cache = on_mps(np.ones((1, 2, 8), np.float32)), on_mps(np.zeros((2, 4, 8), np.float32))
    tikv.copy(k, cache, position=1)
    queue.log.clear()
    tikv.copy(k, cache, position=2)
    assert values(cache)[:, 1:3].all()
    before, behind = ("commit", []) if mac.shared else ("wait", ["ours is done"])
    last = queue.log.index("read")
    assert queue.log[:last] == ["wait" if not mac.shared else "commit", "copy", "copy", "copy", "launch", *behind]
    assert queue.log[:1] == [before]
    assert queue.log[last:] == ["read", "copy"]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_store_takes_and_gives_them(mac, rng, dtype):
    """`append`, `extend` and `attend` as with NumPy arrays; its memory is PyTorch's without a copy."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "capacity": 16, "dtype": dtype}
    plain, store = tikv.KVCacheStore(**form), tikv.KVCacheStore(**form)
    rows = [oracle.numbers(rng, (5, 2, 16), np.float32).astype(kind) for _ in "kv"]
    q = oracle.numbers(rng, (3, 4, 16), np.float32).astype(kind)
    plain.append(0, *(a[:2] for a in rows))
    store.append(0, *(on_mps(a)[:2] for a in rows))
    want = plain.extend(0, q, *(a[2:] for a in rows))
    found = store.extend(0, on_mps(q), *(on_mps(a)[2:] for a in rows))
    oracle.assert_same_bits(values(found), want)
    found, lse = store.attend(0, on_mps(q[:1]), return_lse=True)
    want, want_lse = plain.attend(0, q[:1], return_lse=True)
    oracle.assert_same_bits(values(found), want)
    oracle.assert_same_bits(values(lse), want_lse)
    for mine, other in ((store.keys(0), plain.keys(0)), (store.values(0), plain.values(0))):
        seen = mine.torch()
        assert (seen.shape, str(seen.dtype)) == (mine.shape, f"torch.{dtype}")
        oracle.assert_same_bits(values(seen), other.copy_to_host())


def test_a_launch_does_not_overtake_what_pytorch_reads(mac):
    """A copy from a store's memory that PyTorch was given before the store was written again."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=4, dtype="float32")
    store.append(0, *(on_mps(np.full((1, 1, 8), 3, np.float32)) for _ in "kv"))
    kept = on_mps(np.zeros((1, 1, 4, 8), np.float32))
    kept.copy_(store.keys(0).torch())
    store.reset()
    new = np.full((1, 1, 8), 7, np.float32)
    store.append(0, new, new)
    assert (values(kept)[0, 0, 0] == 3).all()
    assert (values(store.keys(0).torch())[0, 0, 0] == 7).all()


def test_what_pytorch_wrote_is_read_back(mac):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=4, dtype="float32")
    store.keys(0).torch().copy_(on_mps(np.full((1, 1, 4, 8), 5, np.float32)))
    assert (store.keys(0).copy_to_host() == 5).all()


def test_other_operations(mac, rng):
    """Indices, tables of a rotation and arrays of a graph that lie there."""
    qkv = oracle.numbers(rng, (3, 4 * 8), np.float16)
    angle = np.arange(16, dtype=np.float32)[:, None] / 10.0 ** np.arange(4, dtype=np.float32)
    tables = np.cos(angle), np.sin(angle)
    slots = np.array([4, -1, 2], np.int64)
    found = []
    for place in (np.array, on_mps):
        pool = place(np.zeros((2, 2, 4, 1, 8), np.float16))
        rope = tikv.NormRope(mode="half", cos=place(tables[0]), sin=place(tables[1]))
        q = tikv.write_qkv(
            place(qkv), pool[0], pool[1], num_q_heads=2, norm_rope=rope, slot_mapping=place(slots),
            rope_positions=place(np.array([0, 5, 9], np.int32)), layout="NHD",
        )  # fmt: skip
        builder = tikv.GraphBuilder()
        builder.copy("src", "cache", position=1)
        cache = place(np.zeros((1, 4, 8), np.float16))
        builder.compile().run({"src": place(qkv[:2, None, :8]), "cache": cache})
        found.append([pool, q, cache])
    for plain, mine in zip(*found, strict=True):
        oracle.assert_same_bits(values(mine), plain)


def test_blocks_are_used_again(mac):
    """Of at most so many bytes; calls side by side have some each."""
    caches = [on_mps(np.zeros((2, 4, 8), np.float32)) for _ in range(2)]
    for position in range(4):
        for cache in caches:
            tikv.copy(on_mps(np.ones((1, 2, 8), np.float32)), cache, position=position)
    assert len(mac.turns._free) == 2
    assert all(values(cache).all() for cache in caches)
    big = mac.turns.borrow(mps.KEPT_BYTES)
    mac.turns.give_back(big)
    assert len(mac.turns._free) == 2
    assert mac.turns.borrow(64) is not big


def test_tensors_of_one_storage_that_overlap_are_refused(mac):
    """An address on MPS says nothing of neighbours: two storages never overlap, however near they seem."""
    base = on_mps(np.zeros(64, np.float32))
    cache, rows = base[:32].view(1, 4, 8), base[24:40].view(2, 1, 8)
    with pytest.raises(tikv.ShapeError, match="overlap in memory"):
        tikv.copy(rows, cache, position=0)
    tikv.copy(base[32:48].view(2, 1, 8), cache, position=0)


def test_a_cache_of_transformers(mac, rng):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tikv.integrations.transformers import TikvCache

    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=32, vocab_size=8
    )
    cache, steps = TikvCache(config), [oracle.numbers(rng, (2, 1, 2, n, 16), np.float32) for n in (5, 1)]
    for step in steps:
        with torch.no_grad():
            found = cache.update(*map(on_mps, step), 0)
    for mine, want in zip(found, np.concatenate(steps, axis=3), strict=True):
        oracle.assert_same_bits(values(mine.as_subclass(Tensor)), want)


def calls(x):
    """Operations given a tensor on MPS."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=4, dtype="float32")
    paged = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=2, dtype="float32")
    sequence = paged.add()
    room, builder = np.zeros((1, 4, 8), np.float32), tikv.GraphBuilder()
    builder.copy("src", "cache", position=0)
    return {
        "copy_kv": lambda: tikv.copy_kv(room[:, :1], room[:, :1], x, room, position=0),
        "KVCacheStore.append": lambda: store.append(0, x, x),
        "KVCacheStore.attend": lambda: store.attend(0, x),
        "KVCacheStore.extend": lambda: store.extend(0, x, x, x),
        "quantize": lambda: tikv.quantize(x),
        "linearize": lambda: tikv.linearize(x, room, length=1),
        "decode_attention": lambda: tikv.decode_attention(x, room[None], room[None], 1),
        "Graph.run|^copy": lambda: builder.compile().run({"src": x, "cache": room}),
        "PagedKVCacheStore.append": lambda: paged.append(0, x, x, [sequence]),
        "PagedKVCacheStore.attend": lambda: paged.attend(0, x, [sequence]),
    }


@pytest.mark.archs("cpu", "vulkan")
def test_an_engine_that_shares_no_memory_refuses_them(arch, monkeypatch):
    """By name, with the way out and what that costs; nothing is written."""
    live = runtime.current()
    monkeypatch.setattr(type(live.engine), "mps_arch", None)
    other = types.SimpleNamespace(title="Another", name="another", mps_arch="metal", remedy="Install it.")
    monkeypatch.setattr(engines, "that_shares_mps", lambda: other)
    x = on_mps(np.ones((1, 1, 8), np.float32))
    with pytest.raises(tikv.ArchError) as caught:
        tikv.copy(x, np.zeros((1, 4, 8), np.float32), position=0)
    assert str(caught.value) == (
        f"copy: src is a torch tensor on mps, and {live.engine.title} cannot share memory with PyTorch, but Another "
        "can. Call tikv.init('metal', engine='another') in another process (Install it), or pass src.cpu(), which "
        "waits for the GPU and copies 32 bytes each time; results have to be copied back the same way."
    )
    for name, call in calls(x).items():
        with pytest.raises(tikv.ArchError, match=rf"(^{name}).*: \w+ is a torch tensor on mps, and"):
            call()


@pytest.mark.archs("cpu")
def test_on_another_back_end_they_are_refused(arch, monkeypatch):
    monkeypatch.setattr(type(runtime.engine_in_use()), "mps_arch", "metal")
    message = (
        rf"and {runtime.engine_in_use().title} runs on cpu\. Call tikv\.init\('metal'\) before the first operation"
    )
    with pytest.raises(tikv.ArchError, match=message):
        tikv.copy(on_mps(np.ones((1, 1, 8), np.float32)), np.zeros((1, 4, 8), np.float32), position=0)


@pytest.mark.parametrize(("queue_of_torch", "told"), [(0, {}), (77, {"external_metal_command_queue": 77})])
def test_kernels_are_started_on_the_queue_of_pytorch(monkeypatch, queue_of_torch, told):
    """On Metal alone, and where PyTorch is imported and says which it is."""
    interop = types.SimpleNamespace(get_mps_command_queue=lambda: queue_of_torch)
    monkeypatch.setitem(engines.sys.modules, "quadrants.interop", interop)
    if told:
        told["external_metal_command_queue_is_torch_queue"] = True
    assert engines.QUADRANTS.start_options("metal") == told
    assert engines.TAICHI.start_options("metal") == engines.QUADRANTS.start_options("vulkan") == {}
    monkeypatch.delitem(engines.sys.modules, "torch")
    assert engines.QUADRANTS.start_options("metal") == {}
