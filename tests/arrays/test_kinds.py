"""Results are arrays of the library that the caller works with: JAX, and any other that takes DLPack."""

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, runtime

on_host = pytest.mark.archs("cpu", "vulkan", "metal")


@pytest.fixture(scope="module")
def jax():
    """JAX on the CPU, whatever else it finds."""
    found = pytest.importorskip("jax", reason="jax is not installed")
    with found.default_device(found.devices("cpu")[0]):
        yield found


class Array:
    """An array of a library of our own, whose arrays no other may write."""

    def __init__(self, values, device="here"):
        self.values = values
        self.device = device
        self.shape = values.shape

    def __dlpack__(self, **requests):
        return self.values.__dlpack__(**requests)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()

    def __array_namespace__(self):
        return Library

    def to_device(self, device):
        return Array(self.values, device)


class Library:
    refused = frozenset()

    @classmethod
    def from_dlpack(cls, array):
        if str(array.dtype) in cls.refused:
            raise BufferError("not this dtype")
        return Array(np.from_dlpack(array))


def calls(make, rng):
    """By name, results of what takes arrays of this library, beside those of the same call with NumPy's."""
    rows, q = oracle.numbers(rng, (6, 2, 16), np.float32), oracle.numbers(rng, (6, 4, 16), np.float32)
    cache = oracle.numbers(rng, (2, 2, 8, 16), np.float32)
    qkv = oracle.numbers(rng, (3, 8 * 16), np.float32)
    table = np.array([[1, 0]], np.int32)

    def stores(new):
        made = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, capacity=8, dtype="float32")
        pool = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=2, head_dim=16, num_blocks=4, block_size=4, dtype="float32"
        )
        seq = pool.add()
        extended = made.extend(0, *(new(a) for a in (q, rows, -rows)), return_lse=True, return_mass=True)
        by_pool = pool.extend(0, *(new(a) for a in (q, rows, -rows)), [seq], [0, 6], return_lse=True, return_mass=True)
        return {
            "extend": extended,
            "attend": made.attend(0, new(q[:1]), return_lse=True, return_mass=True),
            "pool.extend": by_pool,
            "pool.attend": pool.attend(0, new(q[:1]), [seq], return_lse=True, return_mass=True),
        }

    def one_shot(new):
        pools = cache.reshape(4, 4, 2, 16), -cache.reshape(4, 4, 2, 16)
        one = tikv.decode_attention(new(q[:1]), cache[:1], -cache[:1], 5, return_lse=True)
        two = tikv.decode_attention(new(q[:1]), -cache[:1], cache[:1], 3, return_lse=True)
        k, v = np.zeros((2, 2, 8, 16), np.float32)
        rope = tikv.NormRope(mode="half", cos=np.zeros((8, 8), np.float32), sin=np.ones((8, 8), np.float32))
        layer = tikv.ContiguousKVLayer(8, 2, 16, dtype="float32")
        return {
            "decode_attention": one,
            "paged_decode_attention": tikv.paged_decode_attention(new(q[:1]), *pools, table, [5], return_lse=True),
            "merge_states": tikv.merge_states(*one, *two),
            "write_qkv": tikv.write_qkv(new(qkv), k, v, num_q_heads=4, norm_rope=None, position=0),
            "norm_rope": tikv.norm_rope(new(q), rope, position=0),
            "layer.extend": layer.extend(*(new(a) for a in (q, rows, -rows)), return_lse=True, return_mass=True),
        }

    return stores(lambda a: make(a.copy())) | one_shot(lambda a: make(a.copy()))


def each(found):
    return found if isinstance(found, tuple) else (found,)


@on_host
@pytest.mark.parametrize("library", ["jax", "another"])
def test_results_are_arrays_of_the_callers_library(arch, rng, request, library):
    """Of every call that gives a new array "of q's kind", with lse and mass; the bits are those that NumPy gets."""
    make = request.getfixturevalue("jax").numpy.asarray if library == "jax" else Array
    kind, state = type(make(np.zeros(1, np.float32))), rng.bit_generator.state
    found = calls(make, rng)
    rng.bit_generator.state = state
    wanted = calls(lambda a: a, rng)
    assert found.keys() == wanted.keys()
    for name, results in found.items():
        assert len(each(results)) == len(each(wanted[name]))
        for result, right in zip(each(results), each(wanted[name]), strict=True):
            assert isinstance(right, np.ndarray), name
            assert isinstance(result, kind), name
            bits = np.asarray(result) if library == "jax" else result.values
            oracle.assert_same_bits(bits, right, what=name)
            assert result.device == make(right).device


@on_host
def test_jax_goes_on_with_what_it_gets(arch, rng, jax):
    jnp = jax.numpy
    k, q = (jnp.asarray(oracle.numbers(rng, (6, h, 16), np.float32)).astype(jnp.bfloat16) for h in (2, 4))
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, capacity=8, dtype="bfloat16")
    out = store.extend(0, q, k, k)
    assert out.dtype == jnp.bfloat16
    host = np.asarray(out).astype(np.float32)
    assert (out.reshape(6, -1) @ jnp.ones((64, 3), jnp.bfloat16)).shape == (6, 3)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda x: x.astype(jnp.float32) * 2)(out)), host * 2)
    store.reset()
    store.extend(0, q + 1, k - 1, k - 1)
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32), host)  # no later call writes into it


@on_host
def test_a_graph_gives_jax_arrays_that_the_next_run_leaves_alone(arch, rng, jax):
    q, k, v = (oracle.numbers(rng, shape, np.float32) for shape in ((1, 4, 16), (1, 2, 8, 16), (1, 2, 8, 16)))
    builder = tikv.GraphBuilder()
    builder.decode_attention("q", "k", "v", "n")
    graph = builder.compile()
    first = graph.run({"q": jax.numpy.asarray(q), "k": k, "v": v, "n": 3})["out"]
    before = np.array(first)
    second = graph.run({"q": jax.numpy.asarray(-q), "k": k, "v": v, "n": 5})["out"]
    assert isinstance(first, jax.Array)
    assert not np.array_equal(second, before)
    oracle.assert_same_bits(np.asarray(first), before)


@on_host
def test_what_a_library_does_not_take_is_a_cache_array(arch, rng, monkeypatch):
    """A dtype that it refuses, which is tried before anything is launched; or a library without `from_dlpack`."""
    monkeypatch.setattr(Library, "refused", {"float32"})
    monkeypatch.setattr(arrays.kinds, "_tried", runtime.cache.BoundedCache())
    q, k = oracle.numbers(rng, (1, 4, 16), np.float32), oracle.numbers(rng, (1, 2, 8, 16), np.float32)
    wanted = tikv.decode_attention(q, k, k, 5)
    for given in (Array(q), runtime.ti.ndarray(runtime.ti.f32, (1, 4, 16))):
        if not isinstance(given, Array):
            given.from_numpy(q)
        found = tikv.decode_attention(given, k, k, 5)
        assert type(found) is tikv.CacheArray
        oracle.assert_same_bits(oracle.to_numpy(found), wanted)


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_on_a_gpu_results_are_on_that_gpu(arch, rng, library):
    lib = pytest.importorskip(library)
    make = lib.asarray if library == "cupy" else lambda a: lib.device_put(a, lib.devices("gpu")[0])
    if library == "jax" and lib.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    state = rng.bit_generator.state
    found = calls(make, rng)
    rng.bit_generator.state = state
    wanted = calls(lambda a: a, rng)
    for name, results in found.items():
        for result, right in zip(each(results), each(wanted[name]), strict=True):
            assert isinstance(result, type(make(right))), name
            assert result.device == make(right).device
            np.testing.assert_allclose(oracle.to_numpy(result), right, rtol=0, atol=1e-5)
