"""Stores of groups along tokens against a plain model: keys by channel, values by token, each token quantised once."""

import copy

import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference
from tikv.arrays import CacheArray, write_host

pytestmark = pytest.mark.thorough

BATCH, HEADS, WIDTH, CAPACITY = 2, 2, 32, 150
Q_HEADS = 4
FULL = pytest.mark.full


class Model:
    """A store, and for each layer its rows, and all bits that its codes' memory should have."""

    def __init__(self, rng, arch, quant, dtype, layers=1):
        self.rng, self.arch, self.quant, self.dtype = rng, arch, quant, np.dtype(dtype)
        form = {"num_layers": layers, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": CAPACITY}
        self.store = tikv.KVCacheStore(**form, batch_size=BATCH, dtype=quant, scale_dtype=self.dtype.name)
        self.rows = [np.zeros((2, BATCH, HEADS, 0, WIDTH), dtype) for _ in range(layers)]
        self.coded = [0] * layers
        self.bits = []
        for codes in self.store._storage.codes:
            start = [oracle.random_bits(rng, a.shape, a.dtype.numpy) for a in codes.arrays]
            for a, host in zip(codes.arrays, start, strict=True):
                write_host(host, a)
            self.bits.append(start)

    def new(self, count):
        """K and V of new tokens, and their queries, (batch, heads, count, width)."""
        k, v, q = (
            self.rng.standard_normal((BATCH, heads, count, WIDTH)).astype(np.float32)
            for heads in (HEADS, HEADS, Q_HEADS)
        )
        return [oracle.place(a, self.arch) for a in (k, v, q)], np.stack([k, v]).astype(self.dtype), q

    def grow(self, layer, rows):
        """Count one token after another; a group that is older than the ring has room for becomes codes first."""
        group, quant = self.quant.group, self.quant
        for t in range(rows.shape[3]):
            held = self.rows[layer].shape[3] - self.coded[layer]
            if held == quant.residual + group:
                self.encode(layer)
            self.rows[layer] = np.concatenate([self.rows[layer], rows[:, :, :, t : t + 1]], axis=3)
            yield t

    def encode(self, layer):
        group, first = self.quant.group, self.coded[layer]
        k, v = self.rows[layer][:, :, :, first : first + group]
        by_channel = self.quantised(np.ascontiguousarray(k.swapaxes(2, 3)))
        by_token = self.quantised(np.ascontiguousarray(v))
        k_codes, k_numbers, v_codes, v_numbers = self.bits[layer]
        k_codes[:, :, first // group], v_codes[:, :, first : first + group] = by_channel[0], by_token[0]
        for to, (_, scales, biases) in (
            (k_numbers[:, :, first // group], by_channel),
            (v_numbers[:, :, first : first + group], by_token),
        ):
            to[...] = np.stack([scales, biases], axis=-1).reshape(to.shape)
        self.coded[layer] += group

    def quantised(self, rows):
        return reference.quantize_groups(rows, self.quant.bits, self.quant.group, "affine", self.dtype)

    def numbers(self, layer):
        """(K, V) as attention reads them, (batch, heads, n, width) float32."""
        group, coded = self.quant.group, self.coded[layer]
        k, v = self.rows[layer].astype(np.float32)
        if coded:
            k_codes, k_numbers, v_codes, v_numbers = self.bits[layer]
            groups = coded // group
            of_k = k_codes[:, :, :groups], k_numbers[:, :, :groups, :, :1], k_numbers[:, :, :groups, :, 1:]
            found = reference.dequantize_groups(*of_k, self.quant.bits, "affine")
            k[:, :, :coded] = found.swapaxes(3, 4).reshape(BATCH, HEADS, coded, WIDTH)
            of_v = v_codes[:, :, :coded], v_numbers[:, :, :coded, 0::2], v_numbers[:, :, :coded, 1::2]
            v[:, :, :coded] = reference.dequantize_groups(*of_v, self.quant.bits, "affine")
        return k, v

    def append(self, layer, count):
        placed, rows, _ = self.new(count)
        self.store.append(layer, *placed[:2], layout="head_major")
        for _ in self.grow(layer, rows):
            pass

    def extend(self, layer, count):
        (k, v, q), rows, queries = self.new(count)
        got = oracle.to_numpy(self.store.extend(layer, q, k, v, layout="head_major"))
        for t in self.grow(layer, rows):
            check_attention(got[:, :, t], queries[:, :, t], *self.numbers(layer))

    def trim(self, count):
        self.store.trim(count)
        self.rows = [rows[:, :, :, : rows.shape[3] - count] for rows in self.rows]

    def check(self):
        for i, (codes, bits) in enumerate(zip(self.store._storage.codes, self.bits, strict=True)):
            assert self.store.quantised(i) == self.coded[i]
            for a, want in zip(codes.arrays, bits, strict=True):
                oracle.assert_same_bits(CacheArray(a, self.store.runtime), want, what=f"layer {i}")
            for got, want in zip(self.store.tokens(i), self.numbers(i), strict=True):
                oracle.assert_same_bits(got, want, what=f"tokens of layer {i}")

    def attend(self, layer, queries=1, **options):
        """Attention of the newest tokens' queries; each sees the tokens up to its own."""
        _, _, q = self.new(queries)
        got = oracle.to_numpy(self.store.attend(layer, oracle.place(q, self.arch), layout="head_major", **options))
        k, v = self.numbers(layer)
        for t in range(queries):
            seen = k.shape[2] - queries + t + 1
            check_attention(got[:, :, t], q[:, :, t], k[:, :, :seen], v[:, :, :seen], **options)


def check_attention(out, q, keys, values, softcap=None, sink_logits=None):
    for b in range(BATCH):
        for h in range(Q_HEADS):
            at = b, h // (Q_HEADS // HEADS)
            scores = keys[at].astype(np.float64) @ q[b, h] * WIDTH**-0.5
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sink_logits is None else np.exp(sink_logits[h]))
            np.testing.assert_allclose(out[b, h], weights @ values[at].astype(np.float64) / total, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("quant", "dtype"),
    [
        pytest.param(tikv.Quant(4, 32, "tokens", 32), np.float16, marks=pytest.mark.full("vulkan")),
        pytest.param(tikv.Quant(3, 32, "tokens", 40), np.float32, marks=pytest.mark.full("cpu", "cuda")),
        pytest.param(tikv.Quant(2, 32, "tokens", 33), np.float16, marks=FULL),
        pytest.param(tikv.Quant(8, 32, "tokens", 32), np.float32, marks=FULL),
    ],
    ids=str,
)
def test_tokens_age_by_position_and_are_quantised_once(arch, rng, tmp_path, quant, dtype):
    """Appends and extends of any size; no bit of an older code changes, whatever comes after."""
    model = Model(rng, arch, quant, dtype)
    for count in (3, 30, 31, 1, 2):
        model.append(0, count)
        model.check()
        model.attend(0)
    model.extend(0, 44)
    model.check()
    taken = model.store.snapshot()
    if arch == "cpu":  # kernels that other tests compile on each back end
        model.attend(0, 3)
        model.attend(0, softcap=2.0)
        model.attend(0, sink_logits=np.array([0.5, -1, 2, 0], np.float32))
    model.trim(5)
    model.append(0, 1)
    model.check()
    model.trim(1)
    path = tmp_path / "cache.safetensors"
    model.store.save(path)
    before = model.store
    model.store = tikv.KVCacheStore.load(path)
    model.bits = [[a.copy() for a in bits] for bits in model.bits]
    for bits, coded in zip(model.bits, model.coded, strict=True):
        for a, n in zip(bits, (coded // quant.group,) * 2 + (coded,) * 2, strict=True):
            a[:, :, n:] = 0  # memory that no token has come to
    model.check()
    model.append(0, 20)
    model.check()
    model.attend(0)
    before.restore(taken)
    assert (before.length, before.quantised(0)) == (111, 64)


def test_layers_and_batches(arch, rng):
    """`append_all` gives each layer what `append` gives; a reset store begins anew; a copy is a store of its own."""
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 32), np.float16, layers=2)
    k, v = (rng.standard_normal((2, BATCH, HEADS, 70, WIDTH)).astype(np.float32) for _ in "kv")
    model.store.append_all(oracle.place(k, arch), oracle.place(v, arch), layout="head_major")
    for layer in range(2):
        for _ in model.grow(layer, np.stack([k[layer], v[layer]]).astype(np.float16)):
            pass
    model.check()
    assert model.store.positions(1)[0, 0].tolist() == list(range(70))
    assert model.store.held(1) == 70
    twin = copy.deepcopy(model.store)
    model.store.reset()
    assert (model.store.length, model.store.quantised(0)) == (0, 0)
    model.rows = [rows[:, :, :, :0] for rows in model.rows]
    model.coded = [0, 0]
    model.append(1, 65)
    assert [a.shape[2] for a in twin.tokens(0)] == [70, 70]
    assert "layers 0" in twin.draw()
    assert "quant4_32_tokens" in repr(twin)
    with pytest.raises(tikv.PositionError, match="the first 32 are codes of whole groups"):
        twin.trim(39)
    twin.trim(70)
    assert twin.length == 0


FORM = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "capacity": 96}
QUANT = tikv.Quant(4, 32, "tokens", 32)
ROWS = np.ones((80, 1, 32), np.float32)
Q = np.ones((1, 1, 32), np.float32)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda s: tikv.Quant(4, 64, "tokens"), tikv.OptionError, "residual=0 is not offered. Use an int from 64"),
        (lambda s: tikv.Quant(4, 64, "tokens", 63), tikv.OptionError, "residual=63"),
        (lambda s: tikv.Quant(4, 64, residual=64), tikv.OptionError, "Use 0 with axis='head_dim'"),
        (lambda s: tikv.Quant(4, 64, "rows"), tikv.OptionError, "Use 'head_dim' or 'tokens'"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype=QUANT, window=64), tikv.OptionError, "window=64 with groups"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype=QUANT, v_dtype="float16"), tikv.OptionError, "v_dtype"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype="float16", v_dtype=QUANT), tikv.OptionError, "KVCacheStore"),
        (lambda s: tikv.KVCacheStore(**{**FORM, "head_dim": 48}, dtype=QUANT), tikv.ShapeError, "head_dim_v is 48"),
        (lambda s: tikv.quantize(ROWS, QUANT), tikv.OptionError, "groups along tokens are kept by tikv.KVCacheStore"),
        (
            lambda s: tikv.PagedKVCacheStore(
                num_layers=1, num_kv_heads=1, head_dim=32, num_blocks=2, block_size=4, dtype=QUANT
            ),
            tikv.OptionError,
            "groups along tokens",
        ),
        (lambda s: s.append(0, ROWS[:17], ROWS[:17]), tikv.CapacityError, "96"),
        (lambda s: s.append(0, ROWS[:1], ROWS[:1], positions=np.zeros(1, np.int32)), tikv.OptionError, "positions"),
        (lambda s: s.extend(0, ROWS[:17], ROWS[:17], ROWS[:17]), tikv.CapacityError, "96"),
        (lambda s: s.extend(0, ROWS[:2], ROWS[:1], ROWS[:1]), tikv.ShapeError, "tokens of q"),
        (
            lambda s: s.attend(0, np.ones((1, 49, 1, 32), np.float32)),
            tikv.PositionError,
            "49 queries, and the newest 48",
        ),
        (lambda s: s.attend(0, Q, return_mass=True), tikv.OptionError, "return_mass"),
        (lambda s: s.attend(0, Q, alibi_slopes=np.ones(1, np.float32)), tikv.OptionError, "alibi_slopes"),
        (lambda s: s.attend(0, Q, impl="torch"), tikv.OptionError, "torch"),
        (lambda s: s.compact(0, [[0]]), tikv.OptionError, "compact: a store of groups along tokens"),
        (lambda s: s.reorder([0]), tikv.OptionError, "reorder"),
        (lambda s: s.keys(0), tikv.OptionError, "Read tokens"),
        (lambda s: s.trim(81), tikv.PositionError, "81"),
        (lambda s: s.trim(49), tikv.PositionError, "the first 32 are codes"),
        (lambda s: s.restore(tikv.KVCacheStore(**FORM).snapshot()), tikv.OptionError, "not of a store of this form"),
        (lambda s: tikv.KVCacheStore(**FORM).restore(s.snapshot()), tikv.OptionError, "not a snapshot"),
    ],
)
def test_refused_calls(arch, call, error, match):
    """After which the store holds what it held."""
    store = tikv.KVCacheStore(**FORM, dtype=QUANT)
    store.append(0, ROWS, ROWS)
    before = [a.copy_to_host() for a in store.tokens(0)]
    with pytest.raises(error, match=match):
        call(store)
    assert (store.length, store.quantised(0)) == (80, 32)
    for a, b in zip(store.tokens(0), before, strict=True):
        oracle.assert_same_bits(a, b)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda facts: facts["counts"][0].__setitem__(2, 33), "80 tokens, 33 of them codes"),
        (lambda facts: facts["counts"][0].__setitem__(0, 97), "97 tokens"),
        (lambda facts: facts["counts"][0].__setitem__(2, 0), "80 tokens, 0 of them codes"),
        (lambda facts: facts["form"].update(head_dim=64), "is needed"),
        (lambda facts: facts["form"].update(capacity=10**15), "bytes"),
        (lambda facts: facts["quant"].update(axis="head_dim", residual=0), "axis is 'head_dim'"),
        (lambda facts: facts["quant"].update(bits=8), "is needed"),
    ],
)
def test_files_that_contradict_themselves(arch, tmp_path, monkeypatch, change, match):
    from tikv.stores import files
    from tikv.stores.files import token_groups as token_group_files

    store = tikv.KVCacheStore(**FORM, dtype=QUANT)
    store.append(0, ROWS, ROWS)
    path, write = tmp_path / "cache.safetensors", files.write

    def changed(path, kind, tensors, facts, operation):
        change(facts)
        write(path, kind, tensors, facts, operation)

    monkeypatch.setattr(token_group_files.files, "write", changed)
    store.save(path)
    with pytest.raises(tikv.CacheFileError, match=match):
        tikv.KVCacheStore.load(path)


def test_formats_of_both_axes_have_one_row():
    assert tikv.Quant(4, 32, "tokens", 64).row is formats.FORMATS["quant4_32"]
