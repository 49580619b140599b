"""JAX and CuPy arrays through DLPack: read in place, results handed over in place, and immutable ones not written."""

import gc
import weakref

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, reference

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
by_dtype = pytest.mark.parametrize("dtype", DTYPES)
on_host = pytest.mark.archs("cpu", "vulkan", "metal")


@pytest.fixture(scope="module")
def jax():
    """JAX on the CPU, whatever else it finds."""
    found = pytest.importorskip("jax", reason="jax is not installed")
    with found.default_device(found.devices("cpu")[0]):
        yield found


def address(array):
    return arrays.view(array, "array", "test").ptr


@by_dtype
@on_host
def test_jax_rows_are_read_in_place(arch, rng, jax, dtype):
    src, before = (oracle.random_bits(rng, shape, DTYPES[dtype]) for shape in ((3, 2, 8), (2, 5, 8)))
    rows = jax.numpy.asarray(src)
    assert address(rows) == rows.unsafe_buffer_pointer()
    for keywords in ({"position": 2}, {"position": 9, "window": 5}):
        cache = before.copy()
        tikv.copy(rows, cache, **keywords)
        oracle.assert_same_bits(cache, reference.copy(src, before, **keywords))
    with pytest.raises(tikv.CapacityError, match="position=3"):
        tikv.copy(rows, before, position=3)


@by_dtype
@on_host
def test_a_jax_array_is_never_written(arch, rng, jax, dtype):
    """JAX takes its arrays for values: writing into one would change others, too."""
    src = oracle.random_bits(rng, (1, 2, 8), DTYPES[dtype])
    cache = jax.numpy.asarray(oracle.random_bits(rng, (2, 5, 8), DTYPES[dtype]))
    before = np.array(cache)
    with pytest.raises(tikv.ShapeError, match=r"copy: the destination cache .* is read-only\. Pass a writable array"):
        tikv.copy(src, cache, position=0)
    with pytest.raises(tikv.ShapeError, match=r"copy_kv: the destination v_cache .* is read-only"):
        tikv.copy_kv(src, src, before.copy(), cache, position=0)
    oracle.assert_same_bits(np.asarray(cache), before)


@pytest.mark.archs("cpu")
@by_dtype
def test_jax_sees_the_cache_in_place(arch, rng, jax, dtype):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=8, dtype=dtype)
    seen = jax.dlpack.from_dlpack(store.keys(0))
    assert (seen.dtype, seen.shape) == (DTYPES[dtype], (1, 2, 8, 8))
    assert seen.unsafe_buffer_pointer() == address(store.keys(0))
    src = oracle.random_bits(rng, (5, 2, 8), DTYPES[dtype])
    store.append(0, jax.numpy.asarray(src), jax.numpy.asarray(src))
    oracle.assert_same_bits(np.asarray(seen)[0, :, :5], src.swapaxes(0, 1))
    memory = weakref.ref(store.keys(0)._array.owner)
    del store
    gc.collect()
    assert memory() is not None
    del seen
    gc.collect()
    assert memory() is None


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_a_call_inside_of_a_transformed_function_is_sent_outside(arch, jax, transform):
    cache = np.zeros((2, 5, 8), np.float32)

    def write(rows):
        tikv.copy(rows, cache, position=0)
        return rows.sum()

    with pytest.raises(tikv.DTypeError, match=r"^copy: src is an array that JAX traces.* Call this outside") as refused:
        getattr(jax, transform)(write)(jax.numpy.ones((2, 2, 8)))
    assert "DLPack" not in str(refused.value)
    assert refused.value.__suppress_context__
    assert not cache.any()


@pytest.mark.archs("cpu")
def test_a_traced_number_is_sent_outside(arch, jax):
    rows, cache = np.ones((2, 2, 8), np.float32), np.zeros((2, 5, 8), np.float32)
    with pytest.raises(tikv.DTypeError, match=r"^copy: position is an array that JAX traces.* Call this outside"):
        jax.jit(lambda position: tikv.copy(rows, cache, position=position))(1)


@on_host
def test_a_jax_result_is_waited_for(arch, jax):
    """JAX returns before it has computed; what is read is the result all the same."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda _, y: y @ x, x)[:, None, :])
    x = jax.numpy.eye(512, dtype=jax.numpy.float32)[::-1]
    cache = np.zeros((1, 512, 512), np.float32)
    for _ in range(3):
        cache[:] = 0
        tikv.copy(slow(x), cache, position=0)
        oracle.assert_same_bits(cache[0], np.eye(512, dtype=np.float32)[::-1])


@on_host
def test_a_whole_step_with_jax(arch, rng, jax):
    """Rows, queries, lengths, slots and token ids may all be JAX arrays; the attention is JAX's own, to rounding."""
    np_k, np_q = oracle.numbers(rng, (6, 2, 16), np.float32), oracle.numbers(rng, (1, 4, 16), np.float32)
    k, q = jax.numpy.asarray(np_k), jax.numpy.asarray(np_q)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, capacity=8, dtype="float32")
    pool = tikv.PagedKVCacheStore(
        num_layers=1, num_kv_heads=2, head_dim=16, num_blocks=4, block_size=4, dtype="float32"
    )
    store.append(0, k, -k)
    seq = pool.add(jax.numpy.arange(6))
    pool.append(0, k, -k, [seq], jax.numpy.asarray([0, 6]))
    want = jax.nn.dot_product_attention(q[:, None], k[None], -k[None])[:, 0]
    for out in (store.attend(0, q), pool.attend(0, q, [seq])):
        np.testing.assert_allclose(oracle.to_numpy(out), np.asarray(want), rtol=0, atol=2e-5 * np.abs(np_k).max())


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cupy_arrays_are_read_and_written_in_place(arch, rng, dtype):
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    src, before = (oracle.random_bits(rng, shape, DTYPES[dtype]) for shape in ((3, 2, 8), (2, 5, 8)))
    cache = cupy.asarray(before)
    tikv.copy(cupy.asarray(src), cache, position=2)
    oracle.assert_same_bits(cupy.asnumpy(cache), reference.copy(src, before, position=2))
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=8, dtype=dtype)
    store.append(0, cupy.asarray(src), cupy.asarray(src))
    seen = cupy.from_dlpack(store.keys(0))
    assert seen.data.ptr == address(store.keys(0))
    oracle.assert_same_bits(cupy.asnumpy(seen[0, :, :3]), src.swapaxes(0, 1))


@pytest.mark.archs("cuda")
def test_torch_on_the_default_stream_does_not_wait(arch, monkeypatch):
    """It comes behind what was launched there; where launches were on another stream it waits."""
    import torch

    live, waited = tikv.runtime.current(), []
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, capacity=4096)
    rows = torch.ones(4096, 1, 8, device="cuda")
    monkeypatch.setattr(live, "side_streams", set())
    monkeypatch.setattr(type(live), "_synchronize", lambda self: waited.append(self))
    store.append(0, rows, rows)
    assert bool((store.keys(0).torch() == 1).all())
    assert not waited
    live.side_streams.add(7)
    store.values(0).torch()
    assert waited
