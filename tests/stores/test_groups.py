"""Stores whose rows are groups of codes: what was written is never touched again, whatever comes after."""

import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference

pytestmark = pytest.mark.thorough

HEADS, WIDTH, CAPACITY = 2, 64, 16


class Model:
    """A store, and its layers as lists of rows that were quantised once."""

    def __init__(self, rng, arch, name, *, window=None, sinks=0, layers=2):
        self.rng, self.arch, self.row = rng, arch, formats.FORMATS[name]
        form = {"num_layers": layers, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": CAPACITY}
        self.store = tikv.KVCacheStore(**form, dtype=name, window=window, sinks=sinks)
        windows = window if isinstance(window, list) else [window] * layers
        self.layers = [reference.History(CAPACITY, w, sinks if w else 0) for w in windows]

    def rows(self, count):
        return [self.rng.standard_normal((len(self.layers), count, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]

    def quantised(self, rows):
        return reference.quantize_groups(rows, self.row.bits, self.row.group, self.row.rule, np.float16)

    def append(self, count, *, together=False):
        k, v = self.rows(count)
        if together:
            self.store.append_all(*(oracle.place(a, self.arch) for a in (k, v)))
        for i, layer in enumerate(self.layers):
            if not together:
                self.store.append(i, *(oracle.place(a[i].copy(), self.arch) for a in (k, v)))
            layer.append([tuple(self.quantised(a[i, t]) for a in (k, v)) for t in range(count)])

    def numbers(self, layer):
        """(K, V), each (HEADS, n, WIDTH) float32, as the codes say."""
        kept, row = self.layers[layer].kept(), self.row
        values = [[reference.dequantize_groups(*token[i], row.bits, row.rule) for token in kept] for i in range(2)]
        return [np.stack(v, axis=1) for v in values]

    def check(self):
        for i in range(len(self.layers)):
            for got, want in zip(self.store.tokens(i), self.numbers(i), strict=True):
                oracle.assert_same_bits(got, want[None], what=f"layer {i}")


def check_attention(out, q, keys, values):
    """One query of each head, (Hq, WIDTH), over (HEADS, n, WIDTH)."""
    for h in range(len(q)):
        kv_head = h // (len(q) // HEADS)
        want, _ = reference.attention(q[h], keys[kv_head], values[kv_head], scale=WIDTH**-0.5)
        np.testing.assert_allclose(out[h], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "window", "sinks"),
    [("quant4_64", None, 0), ("q8_0", [None, 6], 2), pytest.param("quant3_32", 5, 0, marks=pytest.mark.full)],
)
def test_what_was_written_stays(arch, rng, tmp_path, name, window, sinks):
    """Through appends of one layer and of all, trims, snapshots, files, rings that turn."""
    model = Model(rng, arch, name, window=window, sinks=sinks)
    store = model.store
    model.append(3)
    model.append(4, together=True)
    model.check()
    snapshot = store.snapshot()
    before = [oracle.to_numpy(store.keys(i)).copy() for i in range(2)]
    model.append(1)
    for i in range(2):
        changed = (oracle.to_numpy(store.keys(i)) != before[i]).any(axis=(0, 1, 3))
        assert changed.sum() == 1  # a token takes a slot and leaves all others
    model.check()
    store.save(tmp_path / "store.safetensors")
    again = tikv.KVCacheStore.load(tmp_path / "store.safetensors")
    assert again.dtype is model.row
    for i in range(2):
        for a, b in zip(store.tokens(i), again.tokens(i), strict=True):
            oracle.assert_same_bits(a, b)
    store.trim(1)
    for layer in model.layers:
        layer.trim(1)
    model.check()
    store.restore(snapshot)
    if window is None:
        model.append(2, together=True)
        model.check()


@pytest.mark.parametrize(("name", "window"), [("quant4_64", None), pytest.param("q4_0", 6, marks=pytest.mark.full)])
def test_attention_and_extend(arch, rng, name, window):
    model = Model(rng, arch, name, window=window, layers=1)
    model.append(9)
    q = rng.standard_normal((1, 4, WIDTH)).astype(np.float32)
    out = oracle.to_numpy(model.store.attend(0, oracle.place(q, arch)))
    check_attention(out.reshape(4, WIDTH), q[0], *model.numbers(0))
    k, v = model.rows(3)
    q = rng.standard_normal((3, 4, WIDTH)).astype(np.float32)
    given = [oracle.place(a, arch) for a in (q, k[0], v[0])]
    out = oracle.to_numpy(model.store.extend(0, *given))
    for t in range(3):
        model.layers[0].append([tuple(model.quantised(a[0, t]) for a in (k, v))])
        check_attention(out[t], q[t], *model.numbers(0))
    model.check()


@pytest.mark.full("vulkan")
def test_compaction_keeps_the_codes(arch, rng):
    """Evenly, then each head with a length of its own, and what is appended and attended after."""
    model = Model(rng, arch, "quant4_64", layers=1)
    model.append(8)
    keys, values = model.numbers(0)
    store = model.store
    store.compact(0, np.array([[0, 2, 3, 6, 7]]))
    keys, values = (a[:, [0, 2, 3, 6, 7]] for a in (keys, values))
    for got, want in zip(store.tokens(0), (keys, values), strict=True):
        oracle.assert_same_bits(got, want[None])
    mask = np.array([[[1, 1, 0, 1, 0], [0, 0, 1, 0, 0]]], bool)
    store.compact(0, mask)
    k, v = model.rows(2)
    store.append(0, *(oracle.place(a[0], arch) for a in (k, v)))
    q = rng.standard_normal((1, 4, WIDTH)).astype(np.float32)
    out = oracle.to_numpy(store.attend(0, oracle.place(q, arch))).reshape(4, WIDTH)
    row = model.row
    new = [reference.dequantize_groups(*model.quantised(a[0]), row.bits, row.rule).swapaxes(0, 1) for a in (k, v)]
    for h in range(4):
        held = [
            np.concatenate([a[h // 2, mask[0, h // 2]], n[h // 2]]) for a, n in zip((keys, values), new, strict=True)
        ]
        want, _ = reference.attention(q[0, h], *held, scale=WIDTH**-0.5)
        np.testing.assert_allclose(out[h], want, rtol=0, atol=2e-5)


@pytest.mark.archs("cpu")
def test_bytes_and_refused_stores(arch):
    form = {"num_layers": 1, "num_kv_heads": 1}
    store = tikv.KVCacheStore(**form, capacity=100, head_dim=128, dtype=tikv.Quant(4, 64))
    assert store.nbytes <= 0.29 * tikv.KVCacheStore(**form, capacity=100, head_dim=128).nbytes
    assert "quant4_64" in repr(store)
    with pytest.raises(tikv.ShapeError, match="head_dim is 80 wide"):
        tikv.KVCacheStore(**form, capacity=4, head_dim=80, dtype=tikv.Quant(4, 64))
    with pytest.raises(tikv.DTypeError, match="not supported for q8_0"):
        tikv.KVCacheStore(**form, capacity=4, head_dim=64, dtype="q8_0", scale_dtype="float32")
    store = tikv.KVCacheStore(**form, capacity=4, head_dim=64, dtype="q8_0")
    with pytest.raises(tikv.DTypeError, match="cannot append float64 to a q8_0 store"):
        store.append(0, *(np.ones((1, 1, 64)) for _ in "kv"))
    store.append(0, *(np.ones((3, 1, 64), np.float32) for _ in "kv"))
    before = oracle.to_numpy(store.keys(0)).copy()
    with pytest.raises(tikv.DTypeError, match="cannot be rotated"):
        store.compact(0, np.array([[0, 2]]), rope=tikv.Rope(inv_freq=np.ones(32, np.float32)))
    oracle.assert_same_bits(store.keys(0), before)
