"""Stores of groups along tokens against a plain model: keys by channel, values by token, each token quantised once."""

import copy

import numpy as np
import oracle
import pytest
from campaign.token_groups import TokenGroups
from inside import codes_of
from token_group_model import BATCH, HEADS, WIDTH, Model

import tikv
from tikv import formats
from tikv.arrays import CacheArray

pytestmark = pytest.mark.thorough

FULL = pytest.mark.full


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


@pytest.mark.full(unless=lambda case: case["values"] in (BY_VALUES["8 bits"], "float16"))
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
    with pytest.raises(tikv.PositionError, match="newer ones overwrote the rest"):
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
        oracle.assert_same_bits(got, want.copy_to_host())
    assert (again.windows, again.sinks, again.length) == ([window], sinks, model.store.length)


def test_whole_groups_are_dropped_and_others_come(arch, rng):
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 32), np.float16)
    model.append(0, 130)  # 96 of them codes
    with pytest.raises(tikv.PositionError, match="Drop at most 34, or 66 for whole groups"):
        model.store.trim(50)
    model.check()
    model.trim(66)
    model.check()
    assert (model.store.length, model.store.quantised(0)) == (64, 64)
    model.attend(0)
    model.append(0, 40)
    model.check()
    model.attend(0)
    model.append(0, 40)
    model.check()
    model.attend(0, 2)


@pytest.mark.parametrize(
    ("values", "window", "sinks"), [(None, None, 0), ("float16", None, 0), (None, 100, 4)], ids=str
)
def test_compact_keeps_groups_as_a_whole(arch, rng, tmp_path, values, window, sinks):
    """Of each head its own groups and new tokens: all memory has the bits of a store that only these ever came to."""
    model = Model(rng, arch, tikv.Quant(4, 32, "tokens", 40), np.float16, values=values, window=window, sinks=sinks)
    model.append(0, 150)  # 96 behind the sinks are codes, and of a window the oldest group is in part out of it
    new = len(model.held(0)) - (150 - sinks - 96)
    seen = model.held(0)
    groups = {g: [i for i, n in enumerate(seen) if n >= sinks and (n - sinks) // 32 == g] for g in range(3)}
    of_heads = [[2, 1], [1, 2]] if window else [[0, 2], [1, 2]]
    chosen = [[*range(sinks), *sorted(i for g in some for i in groups[g])] for some in of_heads]
    tails = [[*range(new, new + 20)], [*range(new + 3, new + 43, 2)]]
    model.compact(0, np.array([[[*a, *b] for a, b in zip(chosen, tails, strict=True)]] * BATCH))
    model.check()
    assert (model.store.quantised(0), model.store.held(0), model.store.length) == (64, len(chosen[0]) + 20, 150)
    model.attend(0)
    with pytest.raises(tikv.PositionError, match="cannot go back beyond token 149"):
        model.store.trim(1)
    model.extend(0, 30)
    model.check()
    taken = model.store.snapshot()
    model.trim(7)
    model.check()
    go_on_from_a_file(model, tmp_path)
    model.append(0, 40)
    model.check()
    model.attend(0)
    held = np.arange(len(model.held(0)))
    model.compact(0, np.broadcast_to(held, (BATCH, HEADS, len(held))))
    model.check()
    model.attend(0)
    model.compact(0, np.broadcast_to(held[-9:], (BATCH, HEADS, 9)))
    model.reorder([1, 0])
    model.append(0, 80)
    model.check()
    model.attend(0)
    model.store.restore(taken)
    assert (model.store.length, model.store.held(0)) == (180, len(chosen[0]) + 50)


@pytest.mark.archs("cpu")
@pytest.mark.full(unless=lambda case: case["number"] < 1)
@pytest.mark.parametrize("number", range(4))
def test_random_sequences(arch, tmp_path, number):
    """A moment of the campaign: appends, compactions, trims, sequences, copies and files against rows in NumPy."""
    made = TokenGroups(np.random.default_rng([3, number]), arch, number, tmp_path)
    for _ in range(60):
        made.step()


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
    for a, want in zip(codes_of(model.store)[0].arrays, model.bits[0], strict=True):
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
ROPE = tikv.Rope(np.ones(16))
Q = np.ones((1, 1, 32), np.float32)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda s: tikv.Quant(4, 64, "tokens"), tikv.OptionError, "residual=0 is not supported. Use residual=64"),
        (lambda s: tikv.Quant(4, 64, "tokens", 63), tikv.OptionError, "residual=63"),
        (lambda s: tikv.Quant(4, 64, residual=64), tikv.OptionError, "Use 0 with axis='head_dim'"),
        (lambda s: tikv.Quant(4, 64, "rows"), tikv.OptionError, "Use 'head_dim' or 'tokens'"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype=QUANT, v_dtype=QUANT), tikv.OptionError, "only keys have scales"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype=QUANT, k_scale=2.0), tikv.OptionError, "k_scale with Quant"),
        (lambda s: tikv.KVCacheStore(**FORM, dtype="float16", v_dtype=QUANT), tikv.OptionError, "KVCacheStore"),
        (lambda s: tikv.KVCacheStore(**{**FORM, "head_dim": 48}, dtype=QUANT), tikv.ShapeError, "head_dim_v is 48"),
        (
            lambda s: tikv.quantize(ROWS, QUANT),
            tikv.OptionError,
            "are supported only for keys",
        ),
        (lambda s: s.append(0, ROWS[:17], ROWS[:17]), tikv.CapacityError, "96"),
        (lambda s: s.append(0, ROWS[:1], ROWS[:1], positions=np.zeros(1, np.int32)), tikv.OptionError, "positions"),
        (lambda s: s.positions_on_device(), tikv.OptionError, "since the host counts which keys are quantised"),
        (lambda s: s.advance(1), tikv.OptionError, "since the host counts which keys are quantised"),
        (lambda s: tikv.compile_step(s), tikv.OptionError, r"compile_step: a store of groups.*Call append\(\)"),
        (lambda s: s.extend(0, ROWS[:17], ROWS[:17], ROWS[:17]), tikv.CapacityError, "96"),
        (lambda s: s.extend(0, ROWS[:2], ROWS[:1], ROWS[:1]), tikv.ShapeError, "tokens of q"),
        (
            lambda s: s.attend(0, np.ones((1, 49, 1, 32), np.float32)),
            tikv.PositionError,
            "49 queries are given, but only the newest 48",
        ),
        (lambda s: s.attend(0, Q, alibi_slopes=np.ones(1, np.float32)), tikv.OptionError, "alibi_slopes"),
        (lambda s: s.attend(0, Q, impl="torch"), tikv.OptionError, "torch"),
        (
            lambda s: s.compact(0, [[0, 40]]),
            tikv.PositionError,
            r"cannot keep 1 of its tokens 0 to 31.*from 32 on are not",
        ),
        (
            lambda s: s.compact(0, [[*range(31), 32]]),
            tikv.PositionError,
            "head 0 of sequence 0 in layer 0 cannot keep 31",
        ),
        (lambda s: s.compact(0, [[80]]), tikv.PositionError, "80"),
        (
            lambda s: s.compact(0, [[]], rope=ROPE),
            tikv.OptionError,
            "compact: .*quantised a second time.*Leave rope out",
        ),
        (lambda s: s.reorder([1]), tikv.PositionError, "index 1 is outside"),
        (lambda s: s.keys(0), tikv.OptionError, "Read tokens"),
        (lambda s: s.trim(81), tikv.PositionError, "81"),
        (lambda s: s.trim(49), tikv.PositionError, "the first 32 are codes"),
        (lambda s: s.restore(tikv.KVCacheStore(**FORM).snapshot()), tikv.OptionError, "a store of a different form"),
        (lambda s: tikv.KVCacheStore(**FORM).restore(s.snapshot()), tikv.OptionError, "a store of a different form"),
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
        (lambda facts: facts["quant"].update(axis="head_dim", residual=0), "all tokens of .* are codes"),
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
