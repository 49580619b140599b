"""Stores of 8-bit floats with a scale: rows are divided by it, kept, and multiplied where they are read."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

BATCH, HEADS, WIDTH = 2, 2, 16
PER_HEAD = (0.75, 3.1e-3)


def kept(rows, name, scale):
    """What a store gives back of (..., heads, width) rows; without a scale they are rounded only."""
    if scale is None:
        return rows.astype(name)
    by_head = np.broadcast_to(np.asarray(scale, np.float32), (HEADS,))[:, None]
    stored = reference.encode((rows / by_head).astype(np.float32), getattr(ml_dtypes, name))
    return stored.astype(np.float32) * by_head


class Model:
    """What a store of two layers, the second a ring, holds: the positions kept of all rows ever appended."""

    def __init__(self, rng, arch, scales, names, sinks=1, window=6):
        self.rng, self.arch, self.names = rng, arch, names
        self.scales = scales
        self.store = tikv.KVCacheStore(
            num_layers=2, num_kv_heads=HEADS, head_dim=WIDTH, capacity=24, batch_size=BATCH, window=[None, window],
            sinks=sinks, dtype=names[0], v_dtype=names[1], k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip
        self.sinks, self.window = sinks, window
        self.all = [np.empty((BATCH, 0, HEADS, WIDTH), np.float32) for _ in "kv"]

    def rows(self, count):
        return [self.rng.standard_normal((BATCH, count, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]

    def take(self, rows):
        self.all = [np.concatenate([old, new], axis=1) for old, new in zip(self.all, rows, strict=True)]

    def append(self, count):
        rows = self.rows(count)
        self.store.append_all(*(oracle.place(np.stack([a, a]), self.arch) for a in rows))
        self.take(rows)

    def held(self, layer):
        """K and V (batch, heads, n, width) of a layer."""
        n = self.all[0].shape[1]
        there = np.arange(n)
        if layer and n > self.window:
            there = np.r_[: self.sinks, n - self.window + self.sinks : n]
        found = [
            kept(a[:, there], *of) for a, of in zip(self.all, zip(self.names, self.scales, strict=True), strict=True)
        ]
        return [a.swapaxes(1, 2) for a in found]

    def check(self, store=None):
        for layer in range(2):
            for got, want in zip((store or self.store).tokens(layer), self.held(layer), strict=True):
                oracle.assert_same_bits(got, want, what=f"layer {layer}")

    def attended(self, q, layer):
        """(batch, Hq, width) of a query of each head over all that is held."""
        k, v = (a.astype(np.float64) for a in self.held(layer))
        rows = [
            [reference.attention(q[b, h], k[b, h // 2], v[b, h // 2], scale=0.25)[0] for h in range(4)]
            for b in range(BATCH)
        ]
        return np.array(rows)


@pytest.mark.thorough  # ten kernels, of operations that tests/ops/test_fixed_scales.py compares one by one
@pytest.mark.parametrize(
    ("names", "scales"),
    [
        pytest.param(("float8_e4m3fn", "float8_e4m3fn"), (PER_HEAD, 0.3), marks=pytest.mark.full("vulkan")),
        pytest.param(("float8_e5m2", "float16"), (0.3, None), marks=pytest.mark.full),
        pytest.param(("float8_e4m3fn", "float8_e5m2"), (None, np.float32(7.0)), marks=pytest.mark.full),
    ],
)
def test_rows_are_divided_and_multiplied(arch, rng, tmp_path, names, scales):
    """Through prompts, single tokens, rings, attention, extension, snapshots, files and heads of different lengths."""
    model = Model(rng, arch, scales, names)
    model.scales = [
        1.0 if scale is None and name != "float16" else scale for name, scale in zip(names, scales, strict=True)
    ]
    store = model.store
    for count in (4, 1, 3, 1):
        model.append(count)
        model.check()
    q = rng.standard_normal((BATCH, 4, WIDTH)).astype(np.float32)
    for layer in range(2):
        got = oracle.to_numpy(store.attend(layer, oracle.place(q, arch)))
        np.testing.assert_allclose(got, model.attended(q, layer), rtol=0, atol=2e-5)
    snapshot = store.snapshot()
    q, rows = rng.standard_normal((BATCH, 3, 4, WIDTH)).astype(np.float32), model.rows(3)
    outs = [oracle.to_numpy(store.extend(layer, *(oracle.place(a, arch) for a in (q, *rows)))) for layer in range(2)]
    for t in range(3):
        model.take([a[:, t : t + 1] for a in rows])
        for layer, out in enumerate(outs):
            np.testing.assert_allclose(out[:, t], model.attended(q[:, t], layer), rtol=0, atol=2e-5)
    model.check()
    store.save(tmp_path / "store.safetensors")
    again = tikv.KVCacheStore.load(tmp_path / "store.safetensors")
    assert again.divisors == store.divisors
    model.check(again)
    store.restore(snapshot)
    assert store.length == 9
    store.restore(again.snapshot())

    before = model.held(0)
    mask = np.zeros((BATCH, HEADS, 12), bool)
    mask[:, 0, ::2] = mask[0, 1, 3:] = mask[1, 1, :2] = True
    store.compact(0, mask)
    k, v = model.rows(1)
    store.append(0, oracle.place(k, arch), oracle.place(v, arch))
    new = [kept(a, *of) for a, of in zip((k, v), zip(names, model.scales, strict=True), strict=True)]
    for got, old, one in zip(store.tokens(0), before, new, strict=True):
        for b, h in np.ndindex(BATCH, HEADS):
            n = int(mask[b, h].sum())
            oracle.assert_same_bits(oracle.to_numpy(got)[b, h, :n], old[b, h, mask[b, h]])
            oracle.assert_same_bits(oracle.to_numpy(got)[b, h, n], one[b, 0, h])


@pytest.mark.archs("cpu")
def test_what_scales_refuse(arch, rng):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": 32, "capacity": 4}
    for given, error, match in (
        ({"k_scale": 1.0}, tikv.OptionError, "k_scale scales 8-bit floats and nvfp4, but K is stored as float16"),
        ({"dtype": "float8_e5m2", "v_dtype": "int8", "k_scale": 2.0}, tikv.OptionError, "int8 has one scale per row"),
        ({"dtype": "float8_e5m2", "v_dtype": "q8_0", "k_scale": 2.0}, tikv.OptionError, "q8_0 has one scale per row"),
        ({"dtype": "float8_e5m2", "k_scale": 0.0}, tikv.OptionError, "k_scale=0.0 is not a positive normal float32"),
        ({"dtype": "float8_e5m2", "v_scale": [1.0, np.inf]}, tikv.OptionError, "v_scale=inf is not a positive normal"),
        ({"dtype": "float8_e5m2", "v_scale": np.ones(3)}, tikv.ShapeError, r"v_scale has 3 numbers\. Give one, or one"),
        ({"dtype": "float8_e5m2", "k_scale": "half"}, tikv.OptionError, "k_scale=half is not a positive normal"),
    ):
        with pytest.raises(error, match=match):
            tikv.KVCacheStore(**form, **given)
    store, other = (tikv.KVCacheStore(**form, dtype="float8_e4m3fn", k_scale=s) for s in (2.0, 3.0))
    stored = np.ones((1, HEADS, 32), ml_dtypes.float8_e4m3fn)
    with pytest.raises(tikv.DTypeError, match=r"cannot append float8_e4m3fn .* Append float32 or float16 or bfloat16"):
        store.append(0, stored, stored)
    store.append(0, *(np.ones((1, HEADS, 32), np.float32) for _ in "kv"))
    with pytest.raises(tikv.ShapeError, match="does not belong to this store"):
        other.restore(store.snapshot())
    assert other.length == 0
    assert [a.numpy().tolist() for a in store.scales(0)] == [[2.0], [1.0]]
    plain = tikv.KVCacheStore(**form, dtype="float8_e4m3fn")
    with pytest.raises(tikv.DTypeError, match="has no scales"):
        plain.scales(0)
