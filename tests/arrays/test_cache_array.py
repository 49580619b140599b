"""A store's memory in a researcher's hands: indices and arithmetic as NumPy or torch have them."""

import numpy as np
import oracle
import pytest

import tikv


@pytest.fixture
def store(arch):
    made = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype="float32")
    rows = np.arange(64, dtype=np.float32).reshape(8, 2, 4)
    made.append(0, *(oracle.place(a, arch) for a in (rows, -rows)))
    return made


def host(found):
    return oracle.to_numpy(found)


def test_an_index_gives_what_it_names(store):
    keys = store.keys(0)
    whole = keys.copy_to_host()
    for index in (0, (0, 1), (slice(None), 1, slice(0, 3)), (..., 2), ([0, 0], [1, 0])):
        np.testing.assert_array_equal(host(keys[index]), whole[index])


def test_an_index_is_a_view_where_it_can_be_one(store, arch):
    keys = store.keys(0)
    if arch in ("vulkan", "metal"):
        with pytest.raises(tikv.ArchError, match="cannot be written through an index"):
            keys[0, 0, 0] = 7
        with pytest.raises(ValueError, match="read-only"):
            keys[0][0, 0] = 7
        return
    keys[0, 0, 0] = 7
    keys[0][0, 1] = 8
    keys[0, 1] = store.values(0)[0, 1]
    wanted = store.keys(0).copy_to_host()
    assert (wanted[0, 0, 0] == 7).all()
    assert (wanted[0, 0, 1] == 8).all()
    np.testing.assert_array_equal(wanted[0, 1], store.values(0).copy_to_host()[0, 1])


def test_arithmetic_is_that_of_its_elements(store):
    keys, values = store.keys(0), store.values(0)
    k, v = keys.copy_to_host(), values.copy_to_host()
    for found, wanted in [
        (keys + values, k + v), (2 - keys, 2 - k), (keys * 0.5, k * 0.5), (1 / (keys + 1), 1 / (k + 1)),
        (keys @ values[0, 0].T, k @ v[0, 0].T),
        (-keys, -k), (abs(values), abs(v)), (keys == values, k == v), (keys > 3, k > 3), (keys**2, k**2),
    ]:  # fmt: skip
        np.testing.assert_array_equal(host(found), wanted)
    assert len({keys, values}) == 2


def test_shapes_sums_and_dtypes_are_numpys(store, arch):
    """Called as NumPy's, on every device; on CUDA the results are torch's."""
    keys, k = store.keys(0), store.keys(0).copy_to_host()
    assert (keys.ndim, keys.size, len(keys)) == (k.ndim, k.size, len(k))
    kind = type(keys[0])
    for found, wanted in [
        (keys.reshape(2, -1), k.reshape(2, -1)), (keys.reshape((4, 16)), k.reshape(4, 16)),
        (keys.transpose(), k.transpose()), (keys.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3)),
        (keys.transpose((3, 0, 1, 2)), k.transpose(3, 0, 1, 2)), (keys.T, k.T),
        (keys.sum(axis=2), k.sum(axis=2)), (keys.sum(axis=(0, -1), keepdims=True), k.sum(axis=(0, -1), keepdims=True)),
        (keys.mean(axis=3), k.mean(axis=3)), (keys.max(axis=1), k.max(axis=1)), (keys.min(axis=(1, 2)), k.min((1, 2))),
        (keys.astype("float16"), k.astype(np.float16)), (keys.astype(np.int32), k.astype(np.int32)),
    ]:  # fmt: skip
        assert isinstance(found, kind)
        assert host(found).dtype == wanted.dtype
        np.testing.assert_array_equal(host(found), wanted)
    for found, wanted in [(keys.sum(), k.sum()), (keys.mean(), k.mean()), (keys.max(), k.max()), (keys.min(), k.min())]:
        assert float(found) == float(wanted)
    assert keys.tolist() == k.tolist()
    assert [float(row[0, 0, 1]) for row in (*keys, *iter(keys))] == [1.0, 1.0]
    with pytest.raises(tikv.DTypeError, match=r"CacheArray\.astype: unknown dtype"):
        keys.astype("complex64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_narrow_elements_are_added_up_without_loss(arch, dtype):
    """NumPy's own sum of 300 ones in bfloat16 is 256, and of 8 bits 16."""
    made = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=300, dtype=dtype)
    made.append(0, *(oracle.place(np.full((300, 1, 4), x, np.float32), arch) for x in (1, -2)))
    keys, values = made.keys(0), made.values(0)
    one = float(host(keys).ravel()[0])  # an int8 store keeps 127 and a scale
    wide = np.int64 if dtype == "int8" else np.float32
    for found, wanted in ((keys.sum(), 1200 * one), (keys.sum(axis=2), 300 * one), (values.sum(), None)):
        assert host(found).dtype == wide
        if wanted is not None:
            assert (host(found) == wanted).all()
    assert host(keys.mean(axis=(0, 2))).dtype == (np.float64 if dtype == "int8" else np.float32)
    np.testing.assert_allclose(host(keys.mean(axis=(0, 2))), one, rtol=1e-15)  # a GPU multiplies by 1 / 300
    assert (host(keys.max()), host(keys.min(axis=2)).dtype) == (one, keys.dtype.numpy)


def test_numbers_and_truth_are_those_of_a_single_element(store, arch):
    for number in (2.5, 0.0):
        made = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=1, capacity=1, dtype="float32")
        made.append(0, *(oracle.place(np.full((1, 1, 1), number, np.float32), arch) for _ in "kv"))
        one = made.keys(0)
        assert (float(one), int(one), bool(one), one.item()) == (number, int(number), bool(number), number)
    for refused in (bool, float):
        with pytest.raises(ValueError, match=r"ambiguous|size 1"):
            refused(store.keys(0))


def test_numpy_is_told_where_it_would_get_a_copy_against_its_will(store, arch):
    keys = store.keys(0)
    if arch == "cpu":
        assert np.shares_memory(keys.__array__(copy=False), keys.numpy())
        assert not np.shares_memory(keys.__array__(copy=True), keys.numpy())
    else:
        with pytest.raises(ValueError, match="copy=False"):
            keys.__array__(copy=False)
    with pytest.raises(ValueError, match=r"copy=False.*float64"):
        keys.__array__(np.float64, copy=False)


@pytest.mark.parametrize("clone", ["clone", "__copy__", "__deepcopy__"])
def test_a_clone_has_memory_of_its_own_on_the_same_device(store, arch, clone):
    keys, before = store.keys(0), store.keys(0).copy_to_host()
    made = getattr(keys, clone)(*[{}] * (clone == "__deepcopy__"))
    assert isinstance(made, tikv.CacheArray)
    assert (made.shape, made.dtype, made.device) == (keys.shape, keys.dtype, keys.device)
    store.reset()
    store.append(0, *(oracle.place(np.full((8, 2, 4), 7, np.float32), arch) for _ in "kv"))
    np.testing.assert_array_equal(made.copy_to_host(), before)
    if arch not in ("vulkan", "metal"):
        made[...] = 9
    assert (keys.copy_to_host() == 7).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_a_clone_has_the_same_bits_in_each_dtype(arch, rng, dtype):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype=dtype)
    rows = [oracle.place(rng.standard_normal((8, 2, 4)).astype(np.float32), arch) for _ in "kv"]
    store.append(0, *rows)
    oracle.assert_same_bits(store.values(0).clone().copy_to_host(), store.values(0).copy_to_host())


def test_an_operator_in_place_writes_into_the_store(store, arch):
    keys, before = store.keys(0), store.keys(0).copy_to_host()
    if arch in ("vulkan", "metal"):
        with pytest.raises(tikv.ArchError, match="cannot be written"):
            keys += 1
        return
    same = keys
    keys += 1
    keys *= store.keys(0)[0, 0, 0]
    assert keys is same
    np.testing.assert_array_equal(store.keys(0).copy_to_host(), (before + 1) * (before + 1)[0, 0, 0])


def test_functions_of_torch_take_it_as_a_tensor(store, arch):
    torch = pytest.importorskip("torch")
    keys, values = store.keys(0), store.values(0)
    if arch in ("vulkan", "metal"):
        with pytest.raises(tikv.ArchError):
            torch.cat([keys, values])
        return
    k, v = keys.torch(), values.torch()
    assert torch.equal(torch.cat([keys, values], dim=2), torch.cat([k, v], dim=2))
    assert torch.equal(torch.einsum("bhnd,bhnd->bhn", k, values), (k * v).sum(-1))
    q = torch.ones(1, 2, 1, 4, device=k.device)
    attended = torch.nn.functional.scaled_dot_product_attention(q, key=keys, value=values)
    assert torch.equal(attended, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    rows = torch.zeros_like(keys)
    assert torch.is_tensor(rows)
    rows[...] = keys
    assert torch.equal(rows, k)
    assert torch.equal(torch.as_tensor(keys), k)


def test_what_it_lacks_is_said_with_a_way_out(store):
    for name in ("float", "cpu", "permute", "detach"):
        assert not hasattr(store.keys(0), name)
    with pytest.raises(
        AttributeError, match=r"CacheArray has no 'permute'. Use this attribute of torch\(\) or numpy\(\)"
    ):
        store.keys(0).permute(0, 2, 1, 3)
    with pytest.raises(tikv.ShapeError, match=r"2 axes are named, and the array has 4. .*torch\(\).transpose"):
        store.keys(0).transpose(-1, -2)


def test_beside_a_torch_tensor_it_is_one(store, arch):
    torch = pytest.importorskip("torch")
    if arch in ("vulkan", "metal"):
        with pytest.raises(tikv.ArchError):
            store.keys(0) + torch.ones(4)
        return
    ones = torch.ones(4, device=store.keys(0).torch().device)
    for found in (store.keys(0) + ones, ones + store.keys(0)):
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(host(found), store.keys(0).copy_to_host() + 1)


def test_torch_sees_the_memory_itself_whether_or_not_it_waits(store, arch):
    pytest.importorskip("torch")
    if arch in ("vulkan", "metal"):
        pytest.skip("torch sees none of this memory")
    keys = store.keys(0)
    waited, at_once = keys.torch(), keys.torch(wait=False)
    assert (at_once.data_ptr(), at_once.dtype, at_once.stride()) == (waited.data_ptr(), waited.dtype, waited.stride())
    at_once.fill_(3)
    np.testing.assert_array_equal(keys.copy_to_host(), np.full(keys.shape, 3, keys.copy_to_host().dtype))


def test_a_runtime_that_is_gone_is_said(store, arch):
    keys = store.keys(0)
    tikv.init(arch=arch)
    with pytest.raises(tikv.StaleRuntimeError):
        keys[0]
