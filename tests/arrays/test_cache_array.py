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


def test_a_runtime_that_is_gone_is_said(store, arch):
    keys = store.keys(0)
    tikv.init(arch=arch)
    with pytest.raises(tikv.StaleRuntimeError):
        keys[0]
