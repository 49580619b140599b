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
    """A store, and for each layer all rows that came, and all bits that its codes' memory should have.

    `values` is what V is stored in: None as K's codes are, a `Quant`, or a dtype.
    """

    def __init__(self, rng, arch, quant, dtype, layers=1, values=None, window=None, sinks=0, capacity=CAPACITY):
        self.rng, self.arch, self.quant, self.dtype = rng, arch, quant, np.dtype(dtype)
        self.batch, self.window, self.sinks = BATCH, window, sinks
        self.values = quant if values is None else values
        form = {"num_layers": layers, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": capacity}
        form |= {"window": window, "sinks": sinks}
        self.store = tikv.KVCacheStore(
            **form, batch_size=BATCH, dtype=quant, v_dtype=values, scale_dtype=self.dtype.name
        )
        self.rows = [np.zeros((2, BATCH, HEADS, 0, WIDTH), np.float32) for _ in range(layers)]  # as the newest are
        self.coded, self.oldest = [0] * layers, [0] * layers  # behind the sinks; the first that is still seen
        self.bits = []
        for codes in self.store._storage.codes:
            start = [oracle.random_bits(rng, a.shape, a.dtype.numpy) for a in codes.arrays]
            for a, host in zip(codes.arrays, start, strict=True):
                write_host(host, a)
            self.bits.append(start)

    def new(self, count, rows=None):
        """K and V of new tokens, and their queries, (batch, heads, count, width)."""
        k, v, q = (
            self.rng.standard_normal((self.batch, heads, count, WIDTH)).astype(np.float32)
            for heads in (HEADS, HEADS, Q_HEADS)
        )
        if rows is not None:
            k, v = rows
        stored = np.float32 if isinstance(self.values, tikv.Quant) else self.values
        rows = np.stack([k.astype(self.dtype).astype(np.float32), v.astype(stored).astype(np.float32)])
        if isinstance(self.values, tikv.Quant):
            rows[1] = v.astype(self.dtype)
        return [oracle.place(a, self.arch) for a in (k, v, q)], rows, q

    def grow(self, layer, rows):
        """Count one token after another; a group that is older than the ring has room for becomes codes first."""
        group, quant = self.quant.group, self.quant
        for t in range(rows.shape[3]):
            held = self.rows[layer].shape[3] - self.sinks - self.coded[layer]
            if held == quant.residual + group:
                self.encode(layer)
            self.rows[layer] = np.concatenate([self.rows[layer], rows[:, :, :, t : t + 1]], axis=3)
            if self.window:
                oldest = self.rows[layer].shape[3] - self.window + self.sinks
                self.oldest[layer] = max(self.oldest[layer], oldest)
            yield t

    def encode(self, layer):
        group, first = self.quant.group, self.sinks + self.coded[layer]
        k, v = self.rows[layer][:, :, :, first : first + group]
        k_codes, k_numbers, v_codes, *v_numbers = self.bits[layer]
        at = self.coded[layer] // group % k_codes.shape[2]
        by_channel = self.quantised(np.ascontiguousarray(k.swapaxes(2, 3)), self.quant)
        k_codes[:, :, at] = by_channel[0]
        k_numbers[:, :, at] = np.stack(by_channel[1:], axis=-1).reshape(k_numbers[:, :, at].shape)
        tokens = slice(at * group, at * group + group)
        if isinstance(self.values, tikv.Quant):
            by_token = self.quantised(np.ascontiguousarray(v), self.values)
            v_codes[:, :, tokens] = by_token[0]
            to = v_numbers[0][:, :, tokens]
            to[...] = np.stack(by_token[1:], axis=-1).reshape(to.shape)
        else:
            v_codes[:, :, tokens] = v.astype(v_codes.dtype)
        self.coded[layer] += group

    def quantised(self, rows, quant):
        rows = rows.astype(self.dtype)
        return reference.quantize_groups(rows, quant.bits, quant.group, "affine", self.dtype)

    def numbers(self, layer):
        """(K, V) of all tokens as attention reads them, (batch, heads, n, width) float32; what was overwritten is 0."""
        group, coded = self.quant.group, self.coded[layer]
        k, v = self.rows[layer].copy()
        k_codes, k_numbers, v_codes, *v_numbers = self.bits[layer]
        room = k_codes.shape[2]
        for g in range(coded // group):
            to, at = slice(self.sinks + g * group, self.sinks + (g + 1) * group), g % room
            if g < coded // group - room:
                k[:, :, to] = v[:, :, to] = 0
                continue
            of_k = k_codes[:, :, at], k_numbers[:, :, at, :, :1], k_numbers[:, :, at, :, 1:]
            k[:, :, to] = reference.dequantize_groups(*of_k, self.quant.bits, "affine").swapaxes(2, 3)
            tokens = slice(at * group, at * group + group)
            if isinstance(self.values, tikv.Quant):
                of_v = v_codes[:, :, tokens], v_numbers[0][:, :, tokens, 0::2], v_numbers[0][:, :, tokens, 1::2]
                v[:, :, to] = reference.dequantize_groups(*of_v, self.values.bits, "affine")
            else:
                v[:, :, to] = v_codes[:, :, tokens].astype(np.float32)
        return k, v

    def held(self, layer):
        """The positions that are held."""
        length = self.rows[layer].shape[3]
        return [*range(min(length, self.sinks)), *range(max(self.sinks, self.oldest[layer]), length)]

    def append(self, layer, count, rows=None):
        placed, rows, _ = self.new(count, rows)
        self.store.append(layer, *placed[:2], layout="head_major")
        for _ in self.grow(layer, rows):
            pass

    def extend(self, layer, count):
        (k, v, q), rows, queries = self.new(count)
        got = oracle.to_numpy(self.store.extend(layer, q, k, v, layout="head_major"))
        for t in self.grow(layer, rows):
            held = self.held(layer)
            check_attention(got[:, :, t], queries[:, :, t], *(a[:, :, held] for a in self.numbers(layer)))

    def trim(self, count):
        self.store.trim(count)
        for layer, rows in enumerate(self.rows):
            left = rows.shape[3] - count
            self.rows[layer] = rows[:, :, :, :left]
            self.coded[layer] = min(self.coded[layer], max(0, left - self.sinks))
            self.oldest[layer] = min(self.oldest[layer], left)

    def reorder(self, index, name="reorder"):
        """Sequences continue from others; memory that no token has come to may hold anything then."""
        getattr(self.store, name)(index)
        self.batch = len(index)
        self.rows = [rows[:, index] for rows in self.rows]
        group = self.quant.group
        for layer, codes in enumerate(self.store._storage.codes):
            coded = min(self.coded[layer], codes.room)
            for i, (a, bits) in enumerate(zip(codes.arrays, self.bits[layer], strict=True)):
                now, filled = CacheArray(a, self.store.runtime).numpy().copy(), coded // (group if i < 2 else 1)
                now[:, :, :filled] = bits[index][:, :, :filled]
                self.bits[layer][i] = now

    def check(self):
        for i, (codes, bits) in enumerate(zip(self.store._storage.codes, self.bits, strict=True)):
            assert self.store.quantised(i) == self.coded[i]
            held = self.held(i)
            assert self.store.held(i) == len(held)
            assert self.store.positions(i)[0, 0].tolist() == held
            for a, want in zip(codes.arrays, bits, strict=True):
                oracle.assert_same_bits(CacheArray(a, self.store.runtime), want, what=f"layer {i}")
            for got, want in zip(self.store.tokens(i), self.numbers(i), strict=True):
                want = want[:, :, held].astype(got.numpy().dtype)
                oracle.assert_same_bits(got, want, what=f"tokens of layer {i}")

    def attend(self, layer, queries=1, **options):
        """Attention of the newest tokens' queries; each sees the tokens up to its own."""
        _, _, q = self.new(queries)
        got = oracle.to_numpy(self.store.attend(layer, oracle.place(q, self.arch), layout="head_major", **options))
        k, v = self.numbers(layer)
        options.pop("missing", None)
        for t in range(queries):
            end = k.shape[2] - queries + t + 1
            seen = [n for n in self.held(layer) if n < end]
            if self.window:
                seen = [n for n in seen if n < self.sinks or n > end - 1 - (self.window - self.sinks)]
            check_attention(got[:, :, t], q[:, :, t], k[:, :, seen], v[:, :, seen], **options)


def check_attention(out, q, keys, values, softcap=None, sink_logits=None):
    for b in range(q.shape[0]):
        for h in range(Q_HEADS):
            at = b, h // (Q_HEADS // HEADS)
            scores = keys[at].astype(np.float64) @ q[b, h] * WIDTH**-0.5
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sink_logits is None else np.exp(sink_logits[h]))
            np.testing.assert_allclose(out[b, h], weights @ values[at].astype(np.float64) / total, rtol=0, atol=3e-5)


BY_VALUES = {  # of V, beside K of 4 bits by channel
    "8 bits": tikv.Quant(8, 32),
    "2 bits of narrower groups than K's": tikv.Quant(2, 32),
    "plain": "float16",
    "plain, of another dtype": "float32",
}


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
    go_on_from_a_file(model, tmp_path)
    before = model.store
    model.append(0, 20)
    model.check()
    model.attend(0)
    before.restore(taken)
    assert (before.length, before.quantised(0)) == (111, 64)


def go_on_from_a_file(model, folder):
    """Let the model's store be the one that a file of it gives, whose memory without tokens is 0."""
    path = folder / "cache.safetensors"
    model.store.save(path)
    model.store = tikv.KVCacheStore.load(path)
    model.bits = [[a.copy() for a in bits] for bits in model.bits]
    for bits, coded in zip(model.bits, model.coded, strict=True):
        for i, a in enumerate(bits):
            a[:, :, coded // (model.quant.group if i < 2 else 1) :] = 0
    model.check()


@pytest.mark.parametrize("values", BY_VALUES.values(), ids=BY_VALUES)
def test_values_are_stored_otherwise_than_keys(arch, rng, tmp_path, values):
    """K alone by channel; V by token with another width of codes, or as numbers."""
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 32), np.float16, values=values)
    model.append(0, 70)
    model.check()
    model.attend(0)
    model.extend(0, 40)
    model.check()
    model.attend(0, 2)
    go_on_from_a_file(model, tmp_path)
    assert model.store.v_dtype == (values.row if isinstance(values, tikv.Quant) else tikv.dtypes.parse(values, ""))
    model.append(0, 20)
    model.check()


@pytest.mark.parametrize(("window", "sinks", "residual"), [(100, 4, 32), (97, 0, 33), (70, 3, 64)])
def test_of_a_window_a_group_leaves_as_a_whole(arch, rng, tmp_path, window, sinks, residual):
    """Sinks stay as they came; what is seen is what a ring of rows would hold, also in the middle of a group."""
    quant = tikv.Quant(4, 32, "tokens", residual)
    model = Model(rng, arch, quant, np.float16, window=window, sinks=sinks)
    for count in (2, 30, 64, 20, 60, 1, 33):
        model.append(0, count)
        model.check()
        model.attend(0)
    model.extend(0, 45)
    model.check()
    model.attend(0, 3, missing="ignore")
    with pytest.raises(tikv.PositionError, match="newer ones took their slots"):
        model.attend(0, 3)
    model.trim(3)
    model.check()
    model.attend(0)
    go_on = model.store.snapshot()
    model.append(0, 40)
    model.check()
    model.store.restore(go_on)
    path = tmp_path / "ring.safetensors"
    model.store.save(path)
    again = tikv.KVCacheStore.load(path)
    for got, want in zip(again.tokens(0), model.store.tokens(0), strict=True):
        oracle.assert_same_bits(got, want.numpy())
    assert (again.windows, again.sinks, again.length) == ([window], sinks, model.store.length)


def test_whole_groups_are_dropped_and_others_come(arch, rng):
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 32), np.float16)
    model.append(0, 130)  # 96 of them codes
    with pytest.raises(tikv.PositionError, match="Drop at most 34, 66 for whole groups"):
        model.store.trim(50)
    model.check()
    model.trim(66)
    model.check()
    assert (model.store.length, model.store.quantised(0)) == (64, 64)
    model.attend(0, 0)
    model.append(0, 40)
    model.check()
    model.attend(0)
    model.append(0, 40)
    model.check()
    model.attend(0, 2)


def test_sequences_continue_from_others(arch, rng):
    """Groups are of tokens: whole sequences move without another scale."""
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 32), np.float16, layers=2, values="float16")
    for layer in range(2):
        model.append(layer, 70)
    model.reorder([1, 1])
    model.check()
    model.attend(0)
    model.append(0, 30)
    model.append(1, 30)
    model.reorder([1, 0, 1], "select")
    model.check()
    model.attend(1)
    model.append(0, 33)
    model.check()
    assert model.store.batch_size == 3
    model.store.repeat(2)
    assert model.store.tokens(0)[0].shape[0] == 6


@pytest.mark.archs("cpu")
def test_awkward_rows_have_the_bits_of_the_oracle(arch, rng):
    """Channels of one number, of zeros, of infinities, NaN, subnormals and of many magnitudes."""
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 32), np.float32)
    values = oracle.awkward_float32()
    shape = (BATCH, HEADS, 96, WIDTH)
    k, v = rng.choice(values, (2, *shape))
    k[:, 0, :, :4] = np.float32([0, -0.0, 1e-30, 3e38])
    k[:, 0, :, 4] = rng.choice(np.float32([np.inf, -np.inf, np.nan, 1]), shape[::2])
    model.append(0, 96, (k, v))
    for a, want in zip(model.store._storage.codes[0].arrays, model.bits[0], strict=True):
        oracle.assert_same_bits(CacheArray(a, model.store.runtime), want)
    assert model.coded == [32]


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
        (lambda s: tikv.KVCacheStore(**FORM, dtype=QUANT, v_dtype=QUANT), tikv.OptionError, "only keys have scales"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype=QUANT, k_scale=2.0), tikv.OptionError, "k_scale with groups"),
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
        (lambda s: s.reorder([1]), tikv.PositionError, "index 1 is outside"),
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
