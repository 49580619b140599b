"""Stores that keep K and V in two formats, against each format's own rule and float64 attention."""

import itertools

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

pytestmark = pytest.mark.thorough

HEADS, WIDTH, CAPACITY = 2, 64, 16
PAIRS = [("float16", "quant4_64"), ("q8_0", "int8"), ("quant8_32", "bfloat16"), ("float8_e4m3fn", "q4_0")]


class Model:
    """A store of one layer, and the rows that it holds."""

    def __init__(self, rng, arch, names, **form):
        self.rng, self.arch, self.names = rng, arch, names
        self.store = tikv.KVCacheStore(
            num_layers=1,
            num_kv_heads=HEADS,
            head_dim=WIDTH,
            capacity=CAPACITY,
            dtype=names[0],
            v_dtype=names[1],
            **form,
        )
        window = form.get("window")
        self.history = reference.History(CAPACITY, window, form.get("sinks", 0) if window else 0)

    def place(self, *given):
        return [oracle.place(a, self.arch) for a in given]

    def rows(self, count):
        return [self.rng.standard_normal((count, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]

    def take(self, k, v):
        read = [oracle.as_stored(a, name) for a, name in zip((k, v), self.names, strict=True)]
        self.history.append([(read[0][t], read[1][t]) for t in range(len(k))])

    def append(self, count):
        k, v = self.rows(count)
        self.store.append(0, *self.place(k, v))
        self.take(k, v)

    def held(self):
        return [np.stack([token[i] for token in self.history.kept()], axis=1) for i in range(2)]

    def check(self, store=None):
        for got, want in zip((store or self.store).tokens(0), self.held(), strict=True):
            oracle.assert_same_bits(got, want[None])

    def attended(self, q):
        keys, values = (a.astype(np.float64) for a in self.held())
        found = [reference.attention(q[h], keys[h // 2], values[h // 2], scale=WIDTH**-0.5)[0] for h in range(len(q))]
        return np.stack(found)


@pytest.mark.full("vulkan")  # its parts run there, each by itself
@pytest.mark.full(unless=lambda case: case["names"] == PAIRS[0])
@pytest.mark.parametrize(("names", "window"), [(PAIRS[0], None), (PAIRS[1], 7), (PAIRS[2], None), (PAIRS[3], None)])
def test_a_store_keeps_each_in_its_format(arch, rng, tmp_path, names, window):
    """Through appends, attention, extension, snapshots, files, compaction; rows that were written are not touched."""
    model = Model(rng, arch, names, **({} if window is None else {"window": window, "sinks": 2}))
    store = model.store
    assert f"{names[0]}|{names[1]}" in repr(store)
    for count in (5, 1, 1, 2, 1):
        model.append(count)
        model.check()
    q = rng.standard_normal((4, WIDTH)).astype(np.float32)
    out = oracle.to_numpy(store.attend(0, *model.place(q[None]))).reshape(4, WIDTH)
    np.testing.assert_allclose(out, model.attended(q), rtol=0, atol=2e-5)
    snapshot = store.snapshot()
    q, (k, v) = rng.standard_normal((3, 4, WIDTH)).astype(np.float32), model.rows(3)
    out = oracle.to_numpy(store.extend(0, *model.place(q, k, v)))
    for t in range(3):
        model.take(k[t : t + 1], v[t : t + 1])
        np.testing.assert_allclose(out[t], model.attended(q[t]), rtol=0, atol=2e-5)
    model.check()
    store.save(tmp_path / "store.safetensors")
    again = tikv.KVCacheStore.load(tmp_path / "store.safetensors")
    assert (again.dtype, again.v_dtype) == (store.dtype, store.v_dtype)
    model.check(again)
    before = model.held()
    store.restore(snapshot)
    assert store.length == 10
    store.restore(again.snapshot())
    held = before[0].shape[1]
    keep = np.arange(0, held, 2)
    store.compact(0, keep[None])
    for got, want in zip(store.tokens(0), before, strict=True):
        oracle.assert_same_bits(got, want[None][:, :, keep])
    mask = np.array([[np.arange(len(keep)) < 2, np.arange(len(keep)) != 1]])
    store.compact(0, mask)
    store.append(0, *model.place(*model.rows(1)))
    lengths = store.held(0)
    assert lengths.tolist() == [[3, len(keep)]]
    for got, want in zip(store.tokens(0), before, strict=True):
        for h in range(HEADS):
            oracle.assert_same_bits(oracle.to_numpy(got)[0, h, : lengths[0, h] - 1], want[h, keep[mask[0, h]]])


@pytest.mark.archs("cpu")
def test_what_two_formats_take_and_refuse(arch, rng):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 8}
    for wrong, error, match in (
        ({"v_dtype": "int32"}, tikv.DTypeError, "int32"),
        ({"v_dtype": tikv.Quant(4, 64), "head_dim_v": 80}, tikv.ShapeError, "head_dim_v is 80 wide"),
        ({"v_dtype": "q8_0", "scale_dtype": "float32"}, tikv.DTypeError, "not supported for q8_0"),
    ):
        with pytest.raises(error, match=match):
            tikv.KVCacheStore(**form, **wrong)
    store, alone = (tikv.KVCacheStore(**form, dtype="int8", v_dtype=v_dtype) for v_dtype in ("quant4_32", None))
    with pytest.raises(tikv.DTypeError, match=r"cannot append float64 to a int8\|quant4_32 store"):
        store.append(0, *(np.ones((1, HEADS, WIDTH)) for _ in "kv"))
    k, v = (rng.standard_normal((6, HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    rope = tikv.Rope(inv_freq=np.geomspace(1, 1e-3, WIDTH // 2).astype(np.float32))
    for one in (store, alone):
        one.append(0, k, v)
        one.compact(0, np.array([[1, 3, 4]]), rope=rope)
    oracle.assert_same_bits(store.tokens(0)[0], alone.tokens(0)[0])
    half = tikv.KVCacheStore(**form, dtype="float32", v_dtype="q4_0")
    half.append(0, k, v)
    assert half.scales(0)[0] is None
    mass = half.attend(0, np.ones((1, 4, WIDTH), np.float32), return_mass=True)[1]
    np.testing.assert_allclose(np.asarray(mass).sum(axis=-1), 2, rtol=1e-5)


@pytest.mark.full(unless=lambda case: case["names"] == ("int8", "quant3_64"))  # codes that begin in one word of two
@pytest.mark.parametrize("names", [*itertools.permutations(["float32", "int8", "quant3_64", "q8_0"], 2)])
def test_any_pair(arch, rng, names):
    model = Model(rng, arch, names)
    model.append(9)
    model.check()
    q = rng.standard_normal((4, WIDTH)).astype(np.float32)
    out = oracle.to_numpy(model.store.attend(0, *model.place(q[None]))).reshape(4, WIDTH)
    np.testing.assert_allclose(out, model.attended(q), rtol=0, atol=2e-5)
