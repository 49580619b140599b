"""Memory that is not what it says: arrays without it, with too little, read-only or overlapping itself, are refused."""

import mmap
import sys

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, reference
from tikv.arrays import protection
from tikv.runtime.cache import BoundedCache

SHAPE = (1, 2, 8)
on_host = pytest.mark.archs("cpu", "vulkan", "metal")


def fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(SHAPE)


def resized(torch, nbytes, first=0):
    found = torch.zeros((first + 1, *SHAPE[1:]))[first:]
    found.untyped_storage().resize_(nbytes)
    return found


def wrapped(torch, how):
    found = []
    how(lambda t: (found.append(t), t.sum())[1])
    return found[0]


class Subclass:
    """A wrapper that has a shape and no memory, as DTensor has."""

    def __new__(cls, torch):
        class Wrapper(torch.Tensor):
            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                raise NotImplementedError

        return torch.Tensor._make_wrapper_subclass(Wrapper, SHAPE, dtype=torch.float32)


TENSORS = {
    "fake": (fake, "there is no memory behind it"),
    "zero": (lambda t: t._efficientzerotensor(SHAPE), "there is no memory behind it"),
    "emptied": (lambda t: resized(t, 0), "there is no memory behind it"),
    "emptied, from the middle": (lambda t: resized(t, 0, first=4), "there is no memory behind it"),
    "smaller": (lambda t: resized(t, 32), "its storage has 32 bytes"),
    "smaller, from the middle": (lambda t: resized(t, 5 * 64 - 4, first=4), "its storage has 316 bytes"),
    "wrapper": (Subclass, ""),
    "functional": (lambda t: t._to_functional_tensor(t.zeros(SHAPE)), "there is no memory behind it"),
    "nested": (lambda t: t.nested.nested_tensor([t.zeros(2, 8)], layout=t.strided), "without memory of its own"),
    "jagged": (lambda t: t.nested.nested_tensor([t.zeros(2, 8)], layout=t.jagged), "layout torch.jagged"),
    "mkldnn": (lambda t: t.zeros(SHAPE).to_mkldnn(), "layout torch._mkldnn"),
    "csr": (lambda t: t.zeros(2, 8).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantized": (lambda t: t.quantize_per_tensor(t.zeros(SHAPE), 0.1, 0, t.qint8), "dtype torch.qint8"),
    "vmap": (lambda t: wrapped(t, lambda f: t.vmap(f)(t.zeros(3, *SHAPE))), "without memory of its own"),
    "grad": (lambda t: wrapped(t, lambda f: t.func.grad(f)(t.zeros(SHAPE))), "without memory of its own"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_without_all_of_its_memory(arch, rng, kind):
    """As a source and as a destination; also where a whole one of the same form came before."""
    torch = pytest.importorskip("torch")
    make, message = TENSORS[kind]
    wrong = make(torch)
    src, cache = (oracle.to_torch(oracle.numbers(rng, SHAPE, np.float32), arch) for _ in "sc")
    cache = cache.permute(1, 0, 2)
    before = oracle.to_numpy(cache).copy()
    for _ in range(2):
        with pytest.raises(tikv.TikvError, match=f"^copy: src .*{message}"):
            tikv.copy(wrong, cache, position=0)
        with pytest.raises(tikv.TikvError, match=f"^copy: cache .*{message}"):
            tikv.copy(src, wrong, position=0)
        oracle.assert_same_bits(oracle.to_numpy(cache).copy(), before)
        for _ in range(3):
            tikv.copy(src, cache, position=0)
        before = oracle.to_numpy(cache).copy()


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("kind", ["zero", "emptied", "emptied, from the middle", "smaller"])
def test_in_a_decode_loop_too(arch, rng, kind, monkeypatch):
    """Where arrays are only looked at as far as they may differ: `append` and the layer of transformers' cache."""
    torch = pytest.importorskip("torch")
    from tikv.stores.layers.growing import GrowingLayer

    wrong, message = TENSORS[kind][0](torch), TENSORS[kind][1]
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=64, dtype="float32")
    growing = GrowingLayer(num_kv_heads=2, head_dim=8, capacity=64, dtype="float32")
    monkeypatch.setattr(sys.modules[__name__], "SHAPE", (1, 2, 1, 8))
    wrong_layer = TENSORS[kind][0](torch)
    want, kept = [], []
    if arch == "cuda":
        wrong = None
    for step in range(8):
        k = oracle.to_torch(oracle.numbers(rng, (1, 2, 8), np.float32), arch)
        kept.append(k)  # so that each lies elsewhere
        want.append(oracle.to_numpy(k)[0])
        store.append(0, k, k)
        layer_k = k.reshape(1, 2, 1, 8)
        if not growing.append_alike(layer_k, layer_k, 64):
            growing.append(layer_k, layer_k)
        if wrong is not None:
            for given in ((wrong, k), (k, wrong)):
                with pytest.raises(tikv.ShapeError, match=f"^KVCacheStore.append: [kv] .*{message}"):
                    store.append(0, *given)
                mine = [layer_k if t is k else wrong_layer for t in given]
                with pytest.raises(tikv.ShapeError, match=message):
                    assert growing.append_alike(*mine, 64) or growing.append(*mine)
        assert store.length == growing.length == step + 1
    oracle.assert_same_bits(oracle.to_numpy(store.tokens(0)[0])[0], np.stack(want, axis=1))
    oracle.assert_same_bits(oracle.to_numpy(growing.decoded(0)[0])[0], np.stack(want, axis=1))


def test_an_empty_tensor_needs_no_memory(arch):
    torch = pytest.importorskip("torch")
    cache = oracle.to_torch(np.ones((2, 5, 8), np.float32), arch)
    for _ in range(3):
        tikv.copy(oracle.to_torch(np.zeros((0, 2, 8), np.float32), arch), cache, position=0)
    assert torch.all(cache == 1)


class Raises:
    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **requests):
        raise self.error

    def __dlpack_device__(self):
        return 1, 0


class RaisesInterface:
    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("it is being computed")


@pytest.mark.parametrize("error", [BufferError("no"), ValueError("gone"), RuntimeError(), KeyError("x")])
def test_an_export_that_raises(arch, error):
    cache = oracle.place(np.zeros((2, 5, 8), np.float32), arch)
    with pytest.raises(tikv.DTypeError, match=r"^copy: src .* gave no DLPack capsule .*Pass a copy") as caught:
        tikv.copy(Raises(error), cache, position=0)
    assert caught.value.__cause__ is error


def test_an_interface_that_raises(arch):
    cache = oracle.place(np.zeros((2, 5, 8), np.float32), arch)
    with pytest.raises(tikv.DTypeError, match=r"^copy: src .*raised RuntimeError \(it is being computed\)"):
        tikv.copy(RaisesInterface(), cache, position=0)


@on_host
def test_an_export_without_memory(arch):
    seen = arrays.view(np.zeros((1, 2, 8), np.float32), "array", "test")

    class Nothing(Raises):
        def __dlpack__(self, **requests):
            capsule = arrays.dlpack.export(seen)
            arrays.dlpack._in(capsule).tensor.data = None
            return capsule

    with pytest.raises(tikv.ShapeError, match=r"^copy: src is f32\[1,2,8\] without memory"):
        tikv.copy(Nothing(None), np.zeros((2, 5, 8), np.float32), position=0)


@on_host
def test_a_masked_array_is_refused(arch):
    """On either side and as an index: the mask would be lost."""
    cache, src = np.zeros((2, 5, 8), np.float32), np.ones((1, 2, 8), np.float32)
    masked = np.ma.masked_array(src, src > 0)
    with pytest.raises(tikv.DTypeError, match=r"^copy: src is a masked array.*src\.filled\(value\), or src\.data"):
        tikv.copy(masked, cache, position=0)
    with pytest.raises(tikv.DTypeError, match=r"^copy: cache is a masked array"):
        tikv.copy(src, np.ma.masked_array(cache), position=0)
    tikv.copy(masked.filled(3), cache, position=0)
    assert (cache[:, 0] == 3).all()
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=4, block_size=4, dtype="float32")
    with pytest.raises(tikv.DTypeError, match="token_ids is a masked array"):
        pool.add(np.ma.masked_array([1, 2, 3], [0, 1, 0]))


OVERLAPPING = {
    "sliding windows": ((2, 5, 8), (20, 4, 1)),
    "heads that share a token": ((2, 5, 8), (32, 8, 1)),
    "interleaved heads that meet": ((2, 3, 2), (12, 6, 1)),
    "expanded": ((2, 5, 8), (0, 8, 1)),
}
APART = {
    "interleaved": ((2, 5, 8), (8, 16, 1)),
    "nested otherwise": ((2, 3, 2), (6, 4, 1)),
    "one token": ((2, 1, 8), (8, 1, 1)),
}


@on_host
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_destination_that_overlaps_itself(arch, rng, kind):
    shape, strides = OVERLAPPING[kind]
    memory = oracle.random_bits(rng, (128,), np.float32)
    before = memory.copy()
    cache = np.lib.stride_tricks.as_strided(memory, shape, [4 * s for s in strides])
    src = np.ones((1, shape[0], shape[2]), np.float32)
    with pytest.raises(tikv.ShapeError, match=r"^copy: the destination cache .*share memory"):
        tikv.copy(src, cache, position=0)
    with pytest.raises(tikv.ShapeError, match=r"^copy_kv: the destination v_cache .*share memory"):
        tikv.copy_kv(src, src, np.zeros(shape, np.float32), cache, position=0)
    oracle.assert_same_bits(memory, before)
    tikv.linearize(cache, np.zeros(shape, np.float32), length=shape[1])  # it may be read


@on_host
@pytest.mark.parametrize("kind", APART)
def test_a_destination_whose_elements_lie_apart(arch, rng, kind):
    shape, strides = APART[kind]
    memory = np.zeros(128, np.float32)
    cache = np.lib.stride_tricks.as_strided(memory, shape, [4 * s for s in strides])
    src = oracle.random_bits(rng, (1, shape[0], shape[2]), np.float32)
    want = reference.copy(src, np.zeros(shape, np.float32), position=0)
    tikv.copy(src, cache, position=0)
    oracle.assert_same_bits(np.array(cache), want)


def test_overlap_is_told_exactly(rng):
    """Against all addresses, for many small arrays."""
    from tikv.ops import checks

    memory = arrays.view(np.zeros(4096, np.int8), "memory", "test")
    told = set()
    for _ in range(2000):
        ndim = int(rng.integers(1, 5))
        shape, strides = tuple(rng.integers(1, 5, ndim).tolist()), tuple(rng.integers(1, 13, ndim).tolist())
        places = sum(np.indices(shape)[i] * s for i, s in enumerate(strides)).ravel()
        want = np.unique(places).size < places.size
        assert checks._overlaps_itself(memory.restrided(shape, strides)) == want, (shape, strides)
        told.add(want)
    assert told == {False, True}


def mapped(tmp_path, mode, form=(2, 512, 8)):
    """A file of some pages."""
    path = tmp_path / f"rows-{mode}"
    path.write_bytes(bytes(4 * int(np.prod(form))))
    return np.memmap(path, np.float32, mode, shape=form)


linux = pytest.mark.skipif(protection._populate() is None, reason="the system does not tell which memory is read-only")


@pytest.fixture(autouse=True)
def unknown_pages(monkeypatch):
    """A mapping may lie where earlier tests had memory that was writable, which is remembered."""
    monkeypatch.setattr(protection, "_writable", BoundedCache(1 << 16))


@linux
@on_host
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_mapping_that_is_read_only(arch, rng, tmp_path):
    """NumPy tells, torch does not; and the write would end the process. Also where only the address is new."""
    torch = pytest.importorskip("torch")
    src = oracle.numbers(rng, (1, 2, 8), np.float32)
    fixed, room = torch.from_numpy(mapped(tmp_path, "r")), torch.zeros(2, 512, 8)
    message = r"the destination {} .*is read-only memory, such as a file mapped for reading\. Pass a writable array"
    for _ in range(2):
        with pytest.raises(tikv.ShapeError, match="^copy: " + message.format("cache")):
            tikv.copy(src, fixed, position=0)
        with pytest.raises(tikv.ShapeError, match="^copy_kv: " + message.format("v_cache")):
            tikv.copy_kv(src, src, room, fixed, position=0)
        assert not fixed.any()
        for position in range(3):
            tikv.copy(src, room, position=position)
            tikv.copy_kv(src, src, room, torch.zeros_like(room), position=position)
    out = torch.zeros(512, 2, 8)
    tikv.copy(fixed.transpose(0, 1), out.transpose(0, 1), position=0)  # it is read
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=4, block_size=4, dtype="float32")
    seq = pool.add()
    pool.append(0, src, src, [seq])
    q = oracle.numbers(rng, (1, 2, 8), np.float32)
    target = torch.from_numpy(mapped(tmp_path, "r", (1, 2, 8)))
    with pytest.raises(tikv.ShapeError, match=message.format("out")):
        pool.attend(0, q, [seq], out=target)


@linux
@on_host
@pytest.mark.parametrize("mode", ["r+", "c"])
def test_a_mapping_that_may_be_written(arch, rng, tmp_path, mode):
    torch = pytest.importorskip("torch")
    src = oracle.numbers(rng, (1, 2, 8), np.float32)
    cache = torch.from_numpy(mapped(tmp_path, mode))
    want = reference.copy(src, cache.numpy().copy(), position=3)
    tikv.copy(src, cache, position=3)
    oracle.assert_same_bits(cache.numpy(), want)


@linux
def test_memory_that_is_asked_about():
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as whole:
        memory = np.frombuffer(whole, np.uint8)
        memory[:] = 7
        assert not protection.is_protected(memory.ctypes.data, memory.nbytes)
        assert (memory == 7).all()
        address = memory.ctypes.data
        del memory
    with mmap.mmap(-1, 3 * mmap.PAGESIZE, prot=mmap.PROT_READ) as fixed:
        memory = np.frombuffer(fixed, np.uint8)
        for page in range(3):
            protection._writable.pop(memory.ctypes.data // mmap.PAGESIZE + page, None)
        assert protection.is_protected(memory.ctypes.data, 1)
        assert protection.is_protected(memory.ctypes.data + 5000, 5000)
        del memory
    assert address


CRASHES = """
import sys, warnings, tempfile
warnings.simplefilter("ignore")
import numpy as np, tikv, torch
tikv.init(arch="cpu")
with tempfile.NamedTemporaryFile() as file:
    file.write(bytes(4 << 20))
    file.flush()
    fixed = torch.from_numpy(np.memmap(file.name, np.float32, "r", shape=(8, 1024, 128)))
    emptied = torch.zeros(1, 8, 128)
    emptied.untyped_storage().resize_(0)
    for src, cache in ((torch.ones(1, 8, 128), fixed), (emptied, torch.zeros(8, 1024, 128))):
        try:
            tikv.copy(src, cache, position=0)
        except tikv.ShapeError:
            print("refused")
"""


@linux
def test_the_process_goes_on(python):
    pytest.importorskip("torch")
    assert python(CRASHES).stdout == "refused\n" * 2
