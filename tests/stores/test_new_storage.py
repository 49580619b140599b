"""The smallest new `LayerStorage`: the abstract methods alone, over two parts."""

import numpy as np
import pytest

import tikv
from tikv.errors import OptionError
from tikv.runtime.interrupts import uninterrupted
from tikv.stores import layers
from tikv.stores.layers.contiguous import ContiguousLayers
from tikv.stores.layers.storage import LayerStorage


class TwiceLayers(LayerStorage):
    """A toy: all tokens in float16, and once more in float32, over which attention goes."""

    title = "a toy store"

    def __init__(self, live, config):
        half, single = (config._replace(rows={**config.rows, "dtype": d}) for d in ("float16", "float32"))
        self.parts = self.half, self.single = ContiguousLayers(live, half), ContiguousLayers(live, single)
        self.runtime, self.lock, self.memory = live, self.half.lock, self.half.memory
        self.counts, self.rows = self.half.counts, self.half.rows
        for part in self.parts:
            part.appends.of = self.title

    @classmethod
    def serves(cls, dtype):
        return isinstance(dtype, str) and dtype == "twice"

    @uninterrupted
    def append(self, operation, layer, rows, layout):
        for part in self.parts:
            part.appends.checked_for_room(operation, [part.counts[layer]], rows, layout, False)
        for part in self.parts:
            part.append(operation, layer, rows, layout)

    @uninterrupted
    def append_all(self, operation, rows, layout):
        for part in self.parts:
            part.appends.checked_for_room(operation, part.counts, rows, layout, True)
        for part in self.parts:
            part.append_all(operation, rows, layout)

    def attend(self, operation, layer, q, request):
        return self.single.attend(operation, layer, q, request)

    def extend(self, operation, layer, arrays, request):
        with self.half.attempted(operation, layer), self.single.attempted(operation, layer):
            self.half.extend(operation, layer, arrays, request)
            return self.single.extend(operation, layer, arrays, request)

    def tokens(self, operation, layer):
        return self.half.tokens(operation, layer)

    @uninterrupted
    def trim(self, operation, n):
        for part in self.parts:
            part.trim(operation, n)

    def reset(self):
        for part in self.parts:
            part.reset()

    def capture(self):
        return [part.capture() for part in self.parts]

    def restore(self, operation, captured, shown):
        for part, each in zip(self.parts, captured, strict=True):
            part.restore(operation, each, shown)


@pytest.mark.archs("cpu")
def test_a_new_storage_is_a_class_and_a_place_in_the_list(arch, rng, monkeypatch, tmp_path):
    monkeypatch.setattr(layers, "STORAGES", [TwiceLayers, *layers.STORAGES])
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "capacity": 32}
    store = tikv.KVCacheStore(**sizes, dtype="twice")
    k, v = rng.standard_normal((2, 1, 5, 2, 8)).astype(np.float32)
    q = rng.standard_normal((1, 2, 4, 8)).astype(np.float32)
    for layer in range(2):
        store.append(layer, k[:, :3], v[:, :3])
    before = store.snapshot()
    plain = tikv.KVCacheStore(**sizes, dtype="float32")
    for layer in range(2):
        plain.append(layer, k[:, :3], v[:, :3])
        results = [each.extend(layer, q, k[:, 3:], v[:, 3:]) for each in (store, plain)]
        np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(np.asarray(store.tokens(0)[0])[0], k[0].swapaxes(0, 1).astype(np.float16))
    store.trim(1)
    assert store.length == 4
    store.restore(before)
    assert store.length == 3
    for to, other in ((plain, before), (store, plain.snapshot())):
        with pytest.raises(OptionError, match="a store of a different form"):
            to.restore(other)
    half = k[:, 3:].astype(np.float16)  # which the second part does not take
    for call in (lambda: store.append(0, half, half), lambda: store.append_all(*[np.stack([half] * 2)] * 2)):
        with pytest.raises(tikv.DTypeError, match="cannot append float16 to a toy store"):
            call()
    assert (store.length, plain.length) == (3, 5)
    path = tmp_path / "twice.safetensors"
    for refused in (lambda: store.save(path), lambda: store.compact(0, [[0]]), lambda: store.keys(0)):
        with pytest.raises(OptionError, match="a toy store does not support this"):
            refused()
    assert not path.exists()
