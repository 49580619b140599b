"""Every kind of array an operation takes, seen in place; and the ones it refuses, with the reason."""

import ctypes
import gc
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, dtypes, reference, runtime
from tikv.arrays import dlpack
from tikv.ops import checks

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float32), np.dtype(np.float16), BF16]
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.name)


class Producer:
    """Nothing but DLPack: a NumPy array behind the two methods of the protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **requests):
        return self.array.__dlpack__(**requests)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Exporter:
    """bfloat16 over DLPack, which NumPy's own export does not know: the library's export of a view."""

    def __init__(self, array, writable=True):
        self.array = array

    def __dlpack__(self, **requests):
        return dlpack.export(arrays.view(self.array, "array", "test"))

    def __dlpack_device__(self):
        return 1, 0


def ti_ndarray(array):
    """A `ti.ndarray` with these contents; bfloat16 as u16."""
    ti = runtime.ti
    words = array.view(np.uint16) if array.dtype == BF16 else array
    kind = {"float32": ti.f32, "float16": ti.f16, "uint16": ti.u16}[words.dtype.name]
    made = ti.ndarray(kind, words.shape)
    made.from_numpy(words)
    return made


def read(made, dtype):
    return made.to_numpy().view(dtype)


@pytest.fixture(params=[None, 5], ids=["linear", "ring"])
def write(request, rng):
    """(src, cache before, keywords, cache after) of a small copy."""

    def make(dtype):
        src, before = oracle.random_bits(rng, (3, 2, 8), dtype), oracle.random_bits(rng, (2, 5, 8), dtype)
        keywords = {"position": 2 if request.param is None else 9, "window": request.param}
        return src, before, keywords, reference.copy(src, before, **keywords)

    return make


@by_dtype
@pytest.mark.archs("cpu", "vulkan", "metal")
def test_numpy(arch, write, dtype):
    src, before, keywords, after = write(dtype)
    cache = before.copy()
    for _ in range(2):
        tikv.copy(src, cache, **keywords)
        oracle.assert_same_bits(cache, after)


@by_dtype
@pytest.mark.archs("cpu", "vulkan", "metal")
def test_a_subclass_of_numpy(arch, write, dtype):
    class Mine(np.ndarray):
        pass

    src, before, keywords, after = write(dtype)
    cache = before.copy()
    tikv.copy(src.view(Mine), cache.view(Mine), **keywords)
    oracle.assert_same_bits(cache, after)


@by_dtype
def test_torch(arch, write, dtype):
    pytest.importorskip("torch")
    src, before, keywords, after = write(dtype)
    cache = oracle.to_torch(before.copy(), arch)
    for _ in range(2):
        tikv.copy(oracle.to_torch(src.copy(), arch), cache, **keywords)
        oracle.assert_same_bits(cache, after)


def test_a_torch_parameter_and_a_view_of_it(arch, write):
    torch = pytest.importorskip("torch")
    src, before, keywords, after = write(np.float32)
    cache = oracle.to_torch(before.copy(), arch)
    rows = torch.nn.Parameter(oracle.to_torch(np.concatenate([src, src]), arch))
    tikv.copy(rows[3:], cache, **keywords)
    oracle.assert_same_bits(cache, after)


def test_a_tensor_that_was_changed_in_place_is_seen_anew(arch, rng):
    """The same object with other memory, shape or dtype."""
    torch = pytest.importorskip("torch")
    cache = oracle.to_torch(np.zeros((2, 5, 8), np.float32), arch)
    tensor = oracle.to_torch(oracle.numbers(rng, (3, 2, 8), np.float32), arch)
    tikv.copy(tensor, cache, position=0)
    changed = oracle.to_torch(oracle.numbers(rng, (4, 2, 8), np.float32), arch)
    tensor.data = changed
    tikv.copy(tensor, cache, position=1)
    oracle.assert_same_bits(cache[:, 1:].contiguous(), oracle.to_numpy(changed).swapaxes(0, 1))
    tensor.data = changed.to(torch.float16)
    with pytest.raises(tikv.DTypeError, match="cannot copy float16 into float32"):
        tikv.copy(tensor, cache, position=1)


@pytest.mark.parametrize("kind", [np.ndarray, np.matrix, np.memmap])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_where_an_ndarray_lies(kind, dtype, tmp_path):
    """What is read as a buffer is what NumPy says, for its subclasses and for views too."""
    dtype = dtypes.parse(dtype, "test").numpy
    if kind is np.memmap:
        whole = np.memmap(tmp_path / "rows", dtype, "w+", shape=(4, 6))
    else:
        whole = np.zeros((4, 6), dtype).view(kind)
    fixed = whole.copy()
    fixed.flags.writeable = False
    for array in (whole, whole[1:], whole[2:, 3:], whole.T, whole[:0], fixed):
        seen = arrays.view(array, "array", "test")
        assert seen.ptr == array.ctypes.data
        assert (seen.shape, seen.writable) == (array.shape, array.flags.writeable)
        assert [s * seen.dtype.itemsize for s in seen.strides] == list(array.strides)


def test_new_ndarrays_of_one_form(arch, rng):
    """Each call brings an array of its own, as a model does, now and then aligned or laid out in another way."""
    cache = oracle.random_bits(rng, (2, 6, 8), np.float32)
    given, want = oracle.place(cache.copy(), arch), cache
    for step in range(12):
        row = oracle.random_bits(rng, (1, 2, 8), np.float32)
        if step % 3 == 1:
            row = np.concatenate([row.ravel()[:1], row.ravel()])[1:].reshape(row.shape)
        elif step % 3 == 2:
            row = row.transpose(1, 0, 2).copy().transpose(1, 0, 2)
        tikv.copy(row, given, position=step, window=6)
        want = reference.copy(row, want, position=step, window=6)
        oracle.assert_same_bits(given, want, what=f"step {step}")


@by_dtype
@pytest.mark.archs("cpu", "vulkan", "metal")
def test_dlpack(arch, write, dtype):
    src, before, keywords, after = write(dtype)
    cache = before.copy()
    producer = Exporter if dtype == BF16 else Producer
    tikv.copy(producer(src), producer(cache), **keywords)
    oracle.assert_same_bits(cache, after)


@by_dtype
@pytest.mark.parametrize("axes", [1, 3])
def test_ti_ndarray(arch, write, dtype, axes):
    """Of one axis and of several, on either side; u16 holds bfloat16."""
    src, before, keywords, after = write(dtype)
    if axes == 1:
        flat = ti_ndarray(before.reshape(-1))
        seen = arrays.view(flat, "cache", "test").restrided(before.shape, arrays.contiguous_strides(before.shape))
        tikv.copy(oracle.place(src, arch), seen, **keywords)
        oracle.assert_same_bits(read(flat, dtype).reshape(before.shape), after)
        return
    cache = ti_ndarray(before)
    tikv.copy(ti_ndarray(src), cache, **keywords)
    oracle.assert_same_bits(read(cache, dtype), after)
    for t in range(2):
        tikv.copy(oracle.place(src[t : t + 1].copy(), arch), cache, position=t)
        after = reference.copy(src[t : t + 1], after, position=t)
    oracle.assert_same_bits(read(cache, dtype), after)


def test_a_ti_ndarray_is_written_under_another_shape(arch, rng):
    """The flat variants see (capacity, row) as one head; what they write must arrive."""
    src, before = oracle.random_bits(rng, (2, 16), np.float32), oracle.random_bits(rng, (5, 16), np.float32)
    cache = ti_ndarray(before)
    tikv.variants.kv_cache_copy_f32(oracle.place(src, arch), cache, write_pos=3)
    want = before.copy()
    want[3:] = src
    oracle.assert_same_bits(read(cache, np.float32), want)


def test_a_ti_ndarray_of_vectors(arch, rng):
    ti = runtime.ti
    before = oracle.random_bits(rng, (2, 5, 4), np.float32)
    cache = ti.Vector.ndarray(4, ti.f32, (2, 5))
    cache.from_numpy(before)
    src = oracle.random_bits(rng, (3, 2, 4), np.float32)
    tikv.copy(oracle.place(src, arch), cache, position=1)
    oracle.assert_same_bits(read(cache, np.float32), reference.copy(src, before, position=1))


def test_one_ti_ndarray_is_not_both_ends(arch):
    both = ti_ndarray(np.zeros((3, 3, 8), np.float32))
    with pytest.raises(tikv.ShapeError, match="overlap in memory"):
        tikv.copy(both, both, position=0)
    cache = ti_ndarray(np.zeros((3, 3, 8), np.float32))
    src = oracle.place(np.ones((1, 3, 8), np.float32), arch)
    with pytest.raises(tikv.ShapeError, match=r"k_cache .* and v_cache .* overlap"):
        tikv.copy_kv(src, src, cache, cache, position=0)
    assert not read(cache, np.float32).any()


def test_cache_array(arch, rng):
    """What a store hands out is an array like any other."""
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=2, head_dim=8, capacity=5, dtype="bfloat16", window=5)
    src = oracle.random_bits(rng, (9, 2, 8), BF16)
    store.append(1, oracle.place(src, arch), oracle.place(src, arch))
    seen = arrays.view(store.keys(1), "cache", "test")
    ring = seen.restrided(seen.shape[1:], seen.strides[1:])
    out = oracle.place(np.zeros((2, 5, 8), BF16), arch)
    tikv.linearize(ring, out, length=9)
    oracle.assert_same_bits(out, src[-5:].swapaxes(0, 1))
    host = store.keys(1).copy_to_host()
    assert host.dtype == BF16
    assert not np.shares_memory(host, store.keys(1).copy_to_host())
    oracle.assert_same_bits(host[0, :, 8 % 5], src[8])
    oracle.assert_same_bits(np.array(store.keys(1)), host)
    assert repr(store.keys(1)) == f"CacheArray(bf16[1,2,5,8], {store.keys(1).device})"
    assert len(store.keys(1)) == 1


@pytest.mark.archs("vulkan", "metal")
def test_memory_without_an_address_is_not_shared(arch):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=5)
    for share in (store.keys(0).numpy, store.keys(0).__dlpack__, store.keys(0).__dlpack_device__):
        with pytest.raises(tikv.ArchError, match=r"Use copy_to_host\(\)"):
            share()


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8"])
def test_exports_over_dlpack(arch, dtype):
    """The same memory in the true dtype; alive as long as the consumer is, freed when nobody wants it."""
    torch = pytest.importorskip("torch")
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=5, dtype=dtype)
    tensor = torch.from_dlpack(store.values(0))
    assert tensor.dtype == getattr(torch, dtype)
    assert tuple(tensor.shape) == (1, 2, 5, 8)
    assert tensor.data_ptr() == arrays.view(store.values(0), "values", "test").ptr
    memory = weakref.ref(store.values(0)._array.owner)
    del store
    gc.collect()
    assert memory() is not None
    del tensor
    gc.collect()
    assert memory() is None


@pytest.mark.archs("cpu", "cuda")
def test_an_export_that_nobody_takes_is_freed(arch):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=5)
    memory = store.keys(0)._array.owner
    before = sys.getrefcount(memory)
    for _ in range(100):
        capsule = store.keys(0).__dlpack__()
        assert sys.getrefcount(memory) == before + 1
        del capsule
        assert sys.getrefcount(memory) == before


@pytest.mark.archs("cpu", "cuda")
def test_an_export_may_end_while_an_error_is_on_its_way(arch):
    """As when a call fails that is given another library's array of it: the error arrives all the same."""
    torch = pytest.importorskip("torch")
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=5)
    for _ in range(3):
        with pytest.raises(TypeError, match="no keyword arguments"):
            gc.is_tracked(torch.from_dlpack(store.keys(0)), wrong=1)
        with pytest.raises(KeyError, match="no such"):
            [torch.from_dlpack(store.keys(0)), {}["no such"]]


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_an_import_is_let_go_of(arch):
    """The plan of a call keeps neither the array nor its capsule."""
    src, cache = np.ones((3, 2, 8), np.float32), np.zeros((2, 5, 8), np.float32)
    watched = weakref.ref(src)
    tikv.copy(Producer(src), Producer(cache), position=0)
    del src
    gc.collect()
    assert watched() is None


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_view_keeps_its_array_alive_and_nothing_else_does(arch, library):
    """Also where an array of its form has been seen, and that of a view that is cut from it."""
    make = np.ones if library == "numpy" else pytest.importorskip("torch").ones
    for _ in range(2):
        array = make((3, 2, 8))
        watched, seen = weakref.ref(array), arrays.view(array, "array", "test")
        assert seen.part(0, 0, 3) is seen
        part = seen.part(0, 1, 2)
        del array, seen
        gc.collect()
        assert watched() is not None
        part = part.transposed(1, 0, 2)
        assert watched() is not None
        assert arrays.as_numpy(part).sum() == 16
        del part
        gc.collect()
        assert watched() is None


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_a_new_array_in_old_memory_is_a_new_array(arch, rng):
    """Arrays come and go at the same address and under the same id."""
    cache = np.zeros((2, 64, 8), np.float16)
    for t in range(64):
        src = oracle.random_bits(rng, (1, 2, 8), np.float16)
        tikv.copy(src, cache, position=t)
        oracle.assert_same_bits(cache[:, t], src[0])


def read_only(array):
    array.flags.writeable = False
    return array


DESTINATIONS = {
    "read-only": (lambda a: read_only(a), "the destination cache .* is read-only. Pass a writable array"),
    "negative strides": (lambda a: a[:, ::-1], "cache has negative strides"),
    "columns": (lambda a: a[..., ::2], "the last axis of cache is not contiguous .* Pass a copy"),
    "backwards": (lambda a: a[..., ::-1], "the last axis of cache is not contiguous"),
    "broadcast": (
        lambda a: np.lib.stride_tricks.as_strided(a, a.shape, (0, *a.strides[1:])),
        "the destination cache .* is broadcast; its elements share memory",
    ),
}


@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.parametrize("kind", DESTINATIONS)
def test_destinations_that_cannot_be_written_in_place(arch, rng, kind):
    change, message = DESTINATIONS[kind]
    before = oracle.random_bits(rng, (2, 5, 8), np.float32)
    memory = before.copy()
    cache = change(memory)
    with pytest.raises(tikv.ShapeError, match=rf"^copy: {message}"):
        tikv.copy(np.ones((1, *cache.shape[::2]), np.float32), cache, position=0)
    oracle.assert_same_bits(memory, before)


@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[..., ::2], "the last axis of src is not contiguous"),
        (lambda a: a[::-1], "src has negative strides"),
        (lambda a: a.swapaxes(1, 2), "the last axis of src is not contiguous"),
    ],
    ids=["columns", "negative", "transposed"],
)
def test_sources_that_cannot_be_read_in_place(arch, rng, change, message):
    src = change(oracle.random_bits(rng, (3, 2, 8), np.float32))
    cache = np.zeros((src.shape[1], 5, src.shape[2]), np.float32)
    with pytest.raises(tikv.ShapeError, match=f"^copy: {message}"):
        tikv.copy(src, cache, position=0)
    assert not cache.any()


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_a_read_only_source_is_read(arch, write):
    src, before, keywords, after = write(np.float32)
    cache = before.copy()
    tikv.copy(read_only(src), cache, **keywords)
    oracle.assert_same_bits(cache, after)


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_write_protection_that_comes_later_is_seen(arch):
    src, cache = np.ones((1, 2, 8), np.float32), np.zeros((2, 5, 8), np.float32)
    tikv.copy(src, cache, position=0)
    cache.flags.writeable = False
    with pytest.raises(tikv.ShapeError, match="read-only"):
        tikv.copy(src, cache, position=1)


@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "value"), [("shape", (2, 1, 8)), ("dtype", np.int32)])
def test_a_form_that_changes_in_place_is_seen(arch, name, value):
    src, cache = np.ones((1, 2, 8), np.float32), np.zeros((2, 5, 8), np.float32)
    for position in range(3):
        tikv.copy(src, cache, position=position)
    setattr(src, name, value)
    before = cache.copy()
    with pytest.raises((tikv.ShapeError, tikv.DTypeError)):
        tikv.copy(src, cache, position=3)
    oracle.assert_same_bits(cache, before)


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_overlap_is_refused_exactly(arch, rng):
    """Arrays that share an element are refused; those that only interleave are not."""
    memory = oracle.random_bits(rng, (2, 5, 16), np.float32)
    before = memory.copy()
    src = np.ones((1, 2, 8), np.float32)
    with pytest.raises(tikv.ShapeError, match=r"copy_kv: k_cache \(f32\[2,5,8\]\) and v_cache .* overlap in memory"):
        tikv.copy_kv(src, src, memory[..., :8], memory[..., 7:15], position=0)
    with pytest.raises(tikv.ShapeError, match=r"copy: src .* and cache .* overlap .*, and one of them is written"):
        tikv.copy(memory[:1, :2, :8], memory[..., 4:12], position=0)
    oracle.assert_same_bits(memory, before)
    tikv.copy_kv(src, 2 * src, memory[..., :8], memory[..., 8:], position=3)
    before[:, 3, :8], before[:, 3, 8:] = 1, 2
    oracle.assert_same_bits(memory, before)
    tikv.copy(memory[:1, :2, :8], memory[..., 8:], position=0)
    before[:, 0, 8:] = before[0, :2, :8]
    oracle.assert_same_bits(memory, before)
    tikv.copy_kv(src, src, memory[..., :8], memory[..., 8:], position=0)


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_overlap_is_seen_when_only_addresses_change(arch):
    """The second call has the same plan as the first."""
    memory = np.zeros((4, 2, 5, 16), np.float32)
    src = np.ones((1, 2, 16), np.float32)
    tikv.copy_kv(src, src, memory[0], memory[1], position=0)
    with pytest.raises(tikv.ShapeError, match="overlap in memory"):
        tikv.copy_kv(src, src, memory[2], memory[2], position=0)
    assert not memory[2:].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [[1.0, 2.0]], "src is list, which is not an array"),
        (lambda: None, "src is NoneType, which is not an array"),
        (lambda: np.zeros((1, 2, 8), np.complex64), "src has dtype complex64. Use float32, float16, bfloat16"),
        (lambda: np.zeros((1, 2, 8), ">f4"), "src has dtype >f4"),
        (lambda: np.zeros((1, 2, 8), np.uint16), "src has dtype uint16"),
        (lambda: np.zeros((1, 2, 8), bool), "src has dtype bool"),
        (lambda: runtime.ti.ndarray(runtime.ti.i16, (1, 2, 8)), "src has dtype i16"),
        (
            lambda: runtime.ti.field(runtime.ti.f32, (1, 2, 8)),
            "src is a ScalarField. Of Taichi's containers, only ti.ndarray can be passed",
        ),
    ],
    ids=["list", "none", "complex", "byte_order", "uint16", "bool", "ti_i16", "ti_field"],
)
def test_what_is_no_array_of_ours(arch, make, message):
    with pytest.raises(tikv.DTypeError, match=f"^copy: {oracle.said(message)}"):
        tikv.copy(make(), oracle.place(np.zeros((2, 5, 8), np.float32), arch), position=0)


ROWS = np.ones((2, 2, 8), np.float32)
CACHES = [np.zeros((2, 5, 8), np.float32) for _ in "kv"]
KEYS = [np.ones((1, 2, 5, 8), np.float32) for _ in "kv"]
QUERIES = np.ones((1, 2, 8), np.float32)


def attend(**options):
    return lambda q=QUERIES, lens=5, **more: tikv.decode_attention(q, *KEYS, lens, **options, **more)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: attend()(q=a), "q has dtype {}. Use float32, float16 or bfloat16."),
        (lambda a: attend()(lens=a), "seq_lens has dtype {}. Use int32 or int64."),
        (lambda a: attend()(indices=a), "indices has dtype {}. Use int32 or int64."),
        (lambda a: attend()(parents=a), "parents has dtype {}. Use int32 or int64."),
        (lambda a: attend()(sink_logits=a), "sink_logits has dtype {}. Use float32."),
        (lambda a: tikv.select(a, 1), "scores has dtype {}. Use float32."),
        (lambda a: tikv.quantize(a), "x has dtype {}. Use float32, float16 or bfloat16."),
        (lambda a: tikv.dequantize(a, QUERIES), "q has dtype {}. Use int8."),
        (lambda a: tikv.copy_kv(a, ROWS, *CACHES, position=0), "k has dtype {}. Use float32, float16, bfloat16, "),
        (lambda a: tikv.write_slots(ROWS, ROWS, *KEYS, a), "slot_mapping has dtype {}. Use int32 or int64."),
        (lambda a: tikv.compact(KEYS[0], a), "keep has dtype {}. Use int32 or int64."),
    ],
)
def test_the_dtypes_that_an_error_offers_are_those_of_the_argument(call, message, arch):
    with pytest.raises(tikv.DTypeError) as refused:
        call(np.ones((1, 2, 8), np.complex64))
    assert message.format("complex64") in str(refused.value)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    "call",
    [
        lambda: tikv.quantize(ROWS, scale_dtype="float8"),
        lambda: tikv.KVCacheStore(
            num_layers=1, num_kv_heads=2, head_dim=8, capacity=8, dtype="int8", scale_dtype="float8"
        ),
    ],
)
def test_the_dtypes_that_an_error_offers_for_scales_are_those_of_scales(call, arch):
    with pytest.raises(tikv.DTypeError, match=r"unknown dtype 'float8'\. Use one of float16, float32\."):
        call()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("dtype", [dtypes.int32, dtypes.int64])
def test_bool_indices_are_told_of_integers_which_then_work(arch, dtype):
    chosen = np.array([[[[1]], [[3]]]])
    with pytest.raises(tikv.DTypeError, match=r"indices has dtype bool\. Use int32 or int64\."):
        attend()(indices=chosen.astype(bool))
    attend()(indices=chosen.astype(dtype.numpy))


def test_strides_between_elements_are_refused(arch):
    packed = np.zeros((1, 2, 8), np.dtype([("tag", np.uint8), ("value", np.float32)]))["value"]
    with pytest.raises(tikv.ShapeError, match=r"src has byte strides .* Pass a copy: numpy\.ascontiguousarray\(src\)"):
        tikv.copy(packed, oracle.place(np.zeros((2, 5, 8), np.float32), arch), position=0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda t: t.zeros((1, 2, 8), device="meta"), tikv.ArchError, "src is a torch tensor on meta"),
        (lambda t: t.zeros((1, 2, 8), dtype=t.int16), tikv.DTypeError, "src has dtype torch.int16"),
        (lambda t: t.zeros((1, 2, 8)).to_sparse(), tikv.DTypeError, "src is a torch tensor of layout torch.sparse_coo"),
        (lambda t: t.zeros((1, 2, 1), dtype=t.complex64).conj().imag, tikv.DTypeError, "src is a lazily negated"),
        (lambda t: t.zeros((1, 1, 8)).expand(1, 2, 8)[..., ::2], tikv.ShapeError, "last axis of src is not contiguous"),
    ],
    ids=["meta", "int16", "sparse", "negated", "columns"],
)
def test_torch_tensors_that_cannot_be_seen(arch, make, error, message):
    torch = pytest.importorskip("torch")
    with pytest.raises(error, match=f"^copy: .*{message}"):
        tikv.copy(make(torch), oracle.place(np.zeros((2, 5, 8), np.float32), arch), position=0)


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_what_is_read_only_over_dlpack_is_read_and_never_written(arch, rng):
    """It can say so since DLPack 1.0."""
    src = oracle.random_bits(rng, (1, 2, 8), np.float32)
    given = Producer(read_only(src))
    try:
        given.__dlpack__(max_version=(1, 0))
    except TypeError:
        pytest.skip("this NumPy knows DLPack before 1.0 alone")
    cache = np.zeros((2, 5, 8), np.float32)
    tikv.copy(given, cache, position=3)
    oracle.assert_same_bits(cache[:, 3], src[0])
    before = read_only(cache.copy())
    with pytest.raises(tikv.ShapeError, match=r"copy: the destination cache .* is read-only"):
        tikv.copy(src, Producer(before), position=0)
    oracle.assert_same_bits(before, cache)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 9)])
def test_an_export_has_the_form_that_is_asked_for(arch, version):
    """What knows of versions may write into a store's memory, since it says that it is not read-only."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=5, dtype="float32")
    name = str(store.keys(0).__dlpack__(max_version=version))
    if version is None or version < (1, 0):
        assert '"dltensor"' in name
    elif tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):
        assert '"dltensor_versioned"' in name
        np.from_dlpack(store.keys(0))[0, 1, 2] = 7
        assert (store.keys(0).numpy()[0, 1, 2] == 7).all()


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_a_copy_where_one_is_asked_for(arch, rng, dtype):
    torch = pytest.importorskip("torch")
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=5, dtype=dtype)
    rows = oracle.random_bits(rng, (5, 2, 8), np.dtype(dtype))
    store.append(0, oracle.place(rows, arch), oracle.place(rows, arch))
    for copy in (None, False, True):
        seen = torch.utils.dlpack.from_dlpack(store.keys(0).__dlpack__(copy=copy))
        assert (seen.data_ptr() == arrays.view(store.keys(0), "keys", "test").ptr) == (not copy)
        oracle.assert_same_bits(oracle.to_numpy(seen)[0].swapaxes(0, 1), rows)


class Elsewhere:
    """A DLPack tensor that claims to lie on another device, or to be of another dtype."""

    def __init__(self, device=1, code=2, bits=32, lanes=1):
        self.fields = device, code, bits, lanes
        self.array = np.zeros((1, 2, 8), np.float32)

    def __dlpack__(self, **requests):
        capsule = dlpack.export(arrays.view(self.array, "array", "test"))
        address = dlpack._capsule_pointer(capsule, b"dltensor")
        tensor = ctypes.cast(address, ctypes.POINTER(dlpack._DLManagedTensor)).contents.tensor
        tensor.device_type, tensor.code, tensor.bits, tensor.lanes = self.fields
        return capsule


@pytest.mark.parametrize(
    ("producer", "error", "message"),
    [
        (Elsewhere(device=8), tikv.ArchError, r"src is on DLPack device 8\. Use CPU or CUDA memory"),
        (Elsewhere(code=5, bits=64), tikv.DTypeError, "src has dtype DLPack code 5, 64 bits, 1 lanes"),
        (Elsewhere(lanes=4), tikv.DTypeError, "src has dtype DLPack code 2, 32 bits, 4 lanes"),
        (Producer(np.zeros((1, 2, 8), "U1")), tikv.DTypeError, "src .* gave no DLPack capsule"),
    ],
    ids=["metal", "complex", "lanes", "refuses"],
)
def test_dlpack_that_cannot_be_seen(arch, producer, error, message):
    with pytest.raises(error, match=f"^copy: {message}"):
        tikv.copy(producer, oracle.place(np.zeros((2, 5, 8), np.float32), arch), position=0)


@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.parametrize("index", [0, 1])
def test_a_gpu_array_where_the_engine_has_no_gpu(arch, index):
    far = Elsewhere(device=2)
    message = oracle.said(rf"copy: src is on cuda:0, but Taichi runs on {arch}\. Call tikv\.init")
    with pytest.raises(tikv.ArchError, match=message):
        tikv.copy(far, np.zeros((2, 5, 8), np.float32), position=0)


STALE = """
import sys
import numpy as np, oracle, tikv
from tikv.runtime import ti
arch = sys.argv[1]
tikv.init(arch=arch)
old = [ti.ndarray(ti.f32, shape) for shape in ((2, 5, 8), (80,))]
tikv.copy(np.ones((1, 2, 8), np.float32), old[0], position=0)
tikv.init(arch=arch)
for array in old:
    try:
        tikv.copy(np.ones((1, 2, 8), np.float32), array, position=0)
    except tikv.StaleRuntimeError as error:
        assert oracle.said("cache is a ti.ndarray made before the last ti.init()") in str(error), error
    else:
        raise SystemExit("not refused")
new = ti.ndarray(ti.f32, (2, 5, 8))
tikv.copy(np.ones((1, 2, 8), np.float32), new, position=4)
print(new.to_numpy().sum())
"""


def test_an_ndarray_of_a_runtime_that_is_gone(arch, python):
    assert float(python(STALE, arch).stdout.split()[-1]) == 16


@pytest.mark.parametrize(
    ("given", "name"),
    [("f16", "float16"), ("torch.bfloat16", "bfloat16"), (np.float32, "float32"), (BF16, "bfloat16"), (int, "int64")],
)
def test_names_of_dtypes(given, name):
    assert dtypes.parse(given, "test").name == name


def test_torch_names_of_dtypes():
    torch = pytest.importorskip("torch")
    for row in dtypes.ALL:
        assert dtypes.parse(getattr(torch, row.name), "test") is row


def test_a_part_is_the_same_view_however_often_it_is_seen():
    """A view of the same form is taken for another address of the same alignment; memory is kept by each of its own."""

    class Owner:
        pass

    for turn in range(2):
        for start in (1 << 20, (1 << 20) + 8, (1 << 20) + 64 * 5):
            owner = Owner()
            whole = arrays.ArrayView(start, (40, 8), (8, 1), dtypes.float32, "cpu", owner=owner)
            for first in range(70):
                part = whole.restrided((2, 4), (8, 2), first)
                at = start + 4 * first
                want = arrays.ArrayView(at, (2, 4), (8, 2), dtypes.float32, "cpu")
                assert (part.ptr, part.key, part.span) == (at, want.key, want.span), (turn, start, first)
                assert (part.shape, part.strides, part.dtype, part.device) == ((2, 4), (8, 2), dtypes.float32, "cpu")
                assert part.owner is owner
                assert part.writable
            gone = weakref.ref(owner)
            del owner, whole, part
            assert gone() is None, "what is remembered of views keeps no memory alive"
    read_only = arrays.ArrayView(1 << 20, (40, 8), (8, 1), dtypes.float32, "cpu", writable=False)
    assert not read_only.restrided((2, 4), (8, 2), 3).writable


def test_an_array_describes_itself(arch):
    seen = arrays.view(np.zeros((8, 4096, 2), np.float16), "k", "test")
    assert repr(seen) == "f16[8,4096,2]"
    assert (seen.ndim, seen.nbytes, seen.span) == (3, 8 * 4096 * 2 * 2, 8 * 4096 * 2 * 2)


class OnSecondGpu:
    """An array as CuPy has it on a GPU that is not the first; nobody reads its memory."""

    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (4, 8), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None
    }  # fmt: skip

    def __dlpack_device__(self):
        return 2, 1


@pytest.mark.archs("cpu")
def test_arrays_of_two_gpus_are_refused_with_the_way_out(arch):
    found = arrays.view(OnSecondGpu(), "src", "copy")
    assert found.device == "cuda:1"
    live = types.SimpleNamespace(
        arch="cuda", device="cuda:0", index=0, engine=runtime.current().engine, has_float64=True
    )
    with pytest.raises(tikv.ArchError) as caught:
        checks.on_device([("src", found)], live, "copy")
    assert str(caught.value) == (
        "copy: src is on cuda:1, but the arrays that it is used with are on cuda:0. Move one of them. A store stays on "
        "the GPU that was torch's current one when it was made; make it under `with torch.cuda.device('cuda:1')`."
    )
    with pytest.raises(tikv.ArchError, match=r"is on cuda:1, but .* runs on cpu"):
        tikv.copy(OnSecondGpu(), np.zeros((1, 8, 4), np.float32), position=0)


@pytest.mark.archs("cpu")
def test_an_array_that_is_still_computed_is_waited_for(arch):
    """JAX's arrays are there before their numbers are, and their interface names no stream."""
    waited = []

    class OnItsWay(OnSecondGpu):
        def block_until_ready(self):
            waited.append(self)

    given = OnItsWay()
    arrays.view(given, "src", "copy")
    assert waited == [given]


@pytest.mark.archs("cuda")
def test_what_another_stream_computes_is_waited_for(arch):
    """CuPy names the stream on which an array is computed; one that does not wait for the default one here."""
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        busy = cupy.ones((4096, 4096), cupy.float32)
        for _ in range(40):
            busy = busy @ busy * 0 + 1
        rows = busy[:4, :8].copy().reshape(4, 1, 8) * 3
        cache = cupy.zeros((1, 4, 8), cupy.float32)
        stream_of_cache = cupy.cuda.get_current_stream()
        tikv.copy(rows, cache, position=0)
    stream_of_cache.synchronize()
    stream.synchronize()
    tikv.runtime.current().synchronize()
    assert bool((cache == 3).all())
