"""`compact` of a store: what is held, where it stands, and that every other call goes on from there."""

import copy

import ml_dtypes
import numpy as np
import oracle
import pytest
from launch_counter import count_launches

import tikv
from tikv import reference

pytestmark = pytest.mark.thorough

HEADS, WIDTH, CAPACITY = 2, 8, 32
# name: (dtype, window of two layers, sinks, batch)
FORMS = {
    "linear": ("float32", None, 0, 1),
    "ring": ("float16", [6, None], 2, 2),
    "int8": ("int8", [None, 7], 0, 2),
}


class Model:
    """A store, and for each layer, sequence and head the list of (position, K, V) that it should hold."""

    def __init__(self, rng, arch, form, tokens):
        dtype, window, self.sinks, self.batch = FORMS[form]
        self.rng, self.arch, self.dtype = rng, arch, np.dtype(dtype)
        self.windows = window if isinstance(window, list) else [window] * 2
        self.store = tikv.KVCacheStore(
            num_layers=2, num_kv_heads=HEADS, head_dim=WIDTH, head_dim_v=4, capacity=CAPACITY, batch_size=self.batch,
            dtype=dtype, window=window, sinks=self.sinks,
        )  # fmt: skip
        self.held = [[[[] for _ in range(HEADS)] for _ in range(self.batch)] for _ in range(2)]
        self.length = [0, 0]
        for layer in range(2):
            self.append(layer, tokens)

    def rows(self, tokens):
        """New K and V, and what a store of this dtype makes of them."""
        source = np.float32 if self.dtype == np.int8 else self.dtype
        given = [oracle.numbers(self.rng, (self.batch, tokens, HEADS, w), source) for w in (WIDTH, 4)]
        stored = [reference.dequantize(*reference.quantize(a)) if self.dtype == np.int8 else a for a in given]
        return [oracle.place(a, self.arch) for a in given], stored

    def count(self, layer, stored, t):
        """What one more token does: it takes a free slot, or that of the oldest behind the sinks."""
        for b in range(self.batch):
            for h, held in enumerate(self.held[layer][b]):
                if len(held) == self.windows[layer]:
                    del held[self.sinks]
                held.append((self.length[layer], *(a[b, t, h] for a in stored)))
        self.length[layer] += 1

    def append(self, layer, tokens):
        given, stored = self.rows(tokens)
        self.store.append(layer, *given)
        for t in range(tokens):
            self.count(layer, stored, t)

    def extend(self, layer, tokens):
        """Attention of new tokens, each over what is held when it comes, in float64."""
        given, stored = self.rows(tokens)
        q = self.rng.standard_normal((self.batch, tokens, 2 * HEADS, WIDTH)).astype(np.float32)
        found, mass = self.store.extend(layer, oracle.place(q, self.arch), *given, return_mass=True, mass_queries=1)
        got, mass = oracle.to_numpy(found), oracle.to_numpy(mass)
        for t in range(tokens):
            self.count(layer, stored, t)
            self.check_attention(layer, q[:, t], got[:, t])
        assert mass.shape[2] == self.counts(layer).max()
        there = np.arange(mass.shape[2]) < self.counts(layer)[..., None]
        np.testing.assert_allclose((mass * there).sum(axis=-1), 2, atol=2e-3)  # of two query heads a head
        assert (mass[~there] == 0).all()

    def check_attention(self, layer, q, got):
        for b in range(self.batch):
            for g in range(2 * HEADS):
                held = self.held[layer][b][g // 2]
                k, v = (np.array([row[i] for row in held]).reshape(len(held), -1) for i in (1, 2))
                want, _ = reference.attention(q[b, g], k, v, scale=WIDTH**-0.5)
                # float32 keeps 24 bits of a score, and a weight is off by what its score is: with thousands, it shows.
                scores, off = (f(k) @ f(q[b, g].astype(np.float64)) * WIDTH**-0.5 for f in (np.asarray, np.abs))
                weights = np.exp(scores - scores.max())
                off = (weights / weights.sum() * off * 2**-22) @ np.abs(v - want)
                assert (np.abs(got[b, g] - want) <= 2e-5 * max(1, np.abs(want).max()) + off).all()

    def keep(self, layer, mask):
        """Compact the layer by a mask over (batch, heads, held)."""
        self.store.compact(layer, mask)
        for b in range(self.batch):
            for h in range(HEADS):
                held = self.held[layer][b][h]
                held[:] = [row for row, kept in zip(held, mask[b, h], strict=False) if kept]

    def counts(self, layer):
        return np.array([[len(held) for held in heads] for heads in self.held[layer]])

    def check(self, store=None):
        store = self.store if store is None else store
        for layer in range(2):
            counts = self.counts(layer)
            assert store.layer_length(layer) == store.next_position(layer) == self.length[layer]
            assert np.broadcast_to(store.held(layer), counts.shape).tolist() == counts.tolist()
            positions = store.positions(layer)
            assert positions.shape == (self.batch, HEADS, counts.max(initial=0))
            assert positions.dtype == np.int64
            found = [oracle.to_numpy(a) for a in store.tokens(layer)]
            for b in range(self.batch):
                for h, held in enumerate(self.held[layer][b]):
                    assert positions[b, h].tolist() == [row[0] for row in held] + [-1] * (
                        positions.shape[2] - len(held)
                    )
                    for i, got in enumerate(found):
                        want = np.zeros(got.shape[2:], got.dtype)
                        for j, row in enumerate(held):
                            want[j] = row[1 + i]
                        oracle.assert_same_bits(got[b, h], want, what=f"layer {layer}, {'kv'[i]}")


def even(rng, model, layer, count):
    """A mask that keeps as many for each head."""
    held = model.counts(layer).max()
    order = rng.random((model.batch, HEADS, held)).argsort(axis=-1)
    return order < count


def uneven(rng, model, layer):
    mask = rng.random((model.batch, HEADS, model.counts(layer).max())) < 0.6
    mask[0, 0] = False
    mask[-1, -1] = True
    return mask & (np.arange(mask.shape[-1]) < model.counts(layer)[..., None])


@pytest.mark.full("vulkan")  # its parts run there, each by itself
@pytest.mark.full(unless=lambda case: case["form"] == "ring")
@pytest.mark.parametrize("form", FORMS)
def test_a_store_goes_on_after_compactions(arch, rng, form):
    model = Model(rng, arch, form, 9)
    for round_ in range(3):
        for layer in range(2):
            held = model.counts(layer).max()
            model.keep(layer, even(rng, model, layer, held // 2) if round_ == 0 else uneven(rng, model, layer))
        model.check()
        for call, tokens in ((model.append, 1), (model.extend, 3), (model.extend, 1)):
            for layer in range(2):
                call(layer, tokens)
        model.check()
    model.store.save(path := "compacted.safetensors")
    snapshot, twin = model.store.snapshot(), copy.deepcopy(model.store)
    for store in (tikv.KVCacheStore.load(path), twin):
        model.check(store)
    if model.batch > 1:
        model.store.reorder([1, 0])
        for heads in model.held:
            heads.reverse()
        model.check()
        model.store.restore(snapshot)
        for heads in model.held:
            heads.reverse()
    model.check()
    model.store.reset()
    model.held = [[[[] for _ in range(HEADS)] for _ in range(model.batch)] for _ in range(2)]
    model.length = [0, 0]
    for layer in range(2):
        model.append(layer, 2)
    model.check()


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.archs("cpu", "cuda")
def test_all_layers_move_in_one_launch(arch, rng, monkeypatch):
    model = Model(rng, arch, "linear", 9)
    keep = np.stack([np.sort(rng.random((1, HEADS, 9)).argsort(axis=-1)[..., :4], axis=-1) for _ in range(2)])
    launches = count_launches(monkeypatch)
    model.store.compact_all(keep)
    assert len(launches) == 1
    for layer in range(2):
        for h in range(HEADS):
            held = model.held[layer][0][h]
            held[:] = [held[i] for i in keep[layer, 0, h]]
    model.check()


@pytest.mark.archs("cpu")
def test_trim_stops_at_what_was_dropped(arch, rng):
    model = Model(rng, arch, "linear", 9)
    mask = np.ones((1, HEADS, 9), bool)
    mask[0, 0, 2] = mask[0, 1, 5] = False  # position 5 is the newest that a head dropped
    for layer in range(2):
        model.keep(layer, mask)
        model.append(layer, 2)
    with pytest.raises(tikv.PositionError, match=r"layer 0 cannot go back beyond token 5.*at most 5"):
        model.store.trim(6)
    model.check()
    model.store.trim(4)
    for layer in range(2):
        for held in model.held[layer][0]:
            held[:] = [row for row in held if row[0] < 7]
        model.length[layer] = 7
    model.check()
    model.append(0, 3)
    model.append(1, 3)
    model.check()


@pytest.mark.archs("cpu")
def test_sequences_that_are_left_have_one_length_and_have_wrapped(arch, rng):
    """The first sequence kept less in both heads: alone it is even, and newer tokens took the place of its oldest."""
    model = Model(rng, arch, "ring", 6)
    mask = np.ones((2, HEADS, 6), bool)
    mask[0, :, :2] = False
    model.keep(0, mask)
    for layer in range(2):
        model.append(layer, 5)
    model.store.reorder([0, 0])
    model.held = [[[list(held) for held in heads[0]] for _ in range(2)] for heads in model.held]
    model.check()
    for layer in range(2):
        model.append(layer, 1)
    model.check()
    with pytest.raises(tikv.PositionError, match="overwritten"):
        model.store.trim(5)


@pytest.mark.archs("cpu")
def test_heads_that_keep_nothing_give_zero(arch, rng):
    model = Model(rng, arch, "linear", 5)
    mask = np.zeros((1, HEADS, 5), bool)
    mask[0, 1, 3] = True
    model.keep(0, mask)
    out, lse = model.store.attend(0, np.ones((1, 2 * HEADS, WIDTH), np.float32), return_lse=True)
    assert (out[0, :2] == 0).all()
    assert np.isneginf(lse[0, :2]).all()
    assert np.isfinite(lse[0, 2:]).all()
    assert model.store.held(0).tolist() == [[0, 1]]
    assert model.store.held(0).dtype == np.int32
    model.keep(1, np.zeros((1, HEADS, 5), bool))
    assert model.store.held(1) == 0
    assert model.store.positions(1).shape == (1, HEADS, 0)
    model.append(1, 2)
    model.check()


@pytest.mark.archs("cpu")
def test_refused_calls_change_nothing(arch, rng):
    model = Model(rng, arch, "ring", 9)
    before = [a.copy_to_host() for layer in range(2) for a in (model.store.keys(layer), model.store.values(layer))]
    good = [[[0, 1]] * HEADS] * 2
    for layer, keep, error, match in (
        (0, [[[1, 0]] * HEADS] * 2, tikv.PositionError, "sequence 0, head 0 has 0 after 1"),
        (0, [[[1, 6]] * HEADS] * 2, tikv.PositionError, "has 6, and 6 rows are held"),
        (1, np.ones((2, HEADS, 8), bool), tikv.ShapeError, r"a mask of shape \(2, 2, 8\), but each head has 9 rows"),
        (0, [0, 1], tikv.ShapeError, "indices of shape"),
        (2, good, tikv.PositionError, "layer=2"),
    ):
        with pytest.raises(error, match=f"^KVCacheStore.compact: .*{match}"):
            model.store.compact(layer, keep)
    with pytest.raises(tikv.ShapeError, match=r"^KVCacheStore.compact_all: keep has 1 entries for num_layers=2"):
        model.store.compact_all([good])
    with pytest.raises(tikv.PositionError, match=r"^KVCacheStore.compact_all: "):
        model.store.compact_all([good, [[[3, 2]] * HEADS] * 2])
    after = [a.copy_to_host() for layer in range(2) for a in (model.store.keys(layer), model.store.values(layer))]
    for a, b in zip(before, after, strict=True):
        oracle.assert_same_bits(b, a)
    model.check()
    model.keep(0, uneven(rng, model, 0))
    for call in (
        model.store.positions_on_device,
        lambda: model.store.attend(0, np.ones((2, 2, WIDTH), np.float32), seq_lens=[3, 3]),
        lambda: model.store.append(0, *model.rows(1)[0], positions=np.zeros(2, np.int64)),
        lambda: tikv.compile_step(model.store, layers=0, attend=False).run(*model.rows(1)[0]),
    ):
        with pytest.raises(tikv.PositionError, match="layer 0 was compacted"):
            call()
    model.check()


@pytest.mark.archs("cpu")
def test_keys_are_turned_to_their_new_index(arch, rng):
    freq = [1.0, 0.3, 0.1, 0.01]
    for dtype in ("float32", "int8", "float8_e4m3fn"):
        eighth = dtype == "float8_e4m3fn"
        store = tikv.KVCacheStore(
            num_layers=2, num_kv_heads=HEADS, head_dim=WIDTH, capacity=16, dtype=dtype, window=[6, None], sinks=1,
            k_scale=0.25 if eighth else None,
        )  # fmt: skip
        rows = oracle.numbers(rng, (2, 9, HEADS, WIDTH), np.float32)
        store.append_all(rows, rows)
        keep = np.array([[[0, 2, 5], [1, 3, 4]]])
        want = []
        for layer in range(2):
            positions, k = store.positions(layer), oracle.to_numpy(store.tokens(layer)[0])
            kept = reference.compact(k, keep)[:, :, :3]
            moved_by = np.arange(3) - reference.compact(positions[..., None], keep)[:, :, :3, 0]
            turned = reference.rotate(kept, moved_by, freq)
            if dtype == "int8":
                stays = moved_by == 0
                turned = np.where(stays[..., None], kept, reference.dequantize(*reference.quantize(turned)))
            if eighth:  # turned as they are stored, without the scale
                turned = reference.encode(turned / 0.25, np.dtype(ml_dtypes.float8_e4m3fn)).astype(np.float32) * 0.25
            want.append(turned.astype(np.float32))
        store.compact_all([keep, keep], rope=tikv.Rope(freq))
        for layer in range(2):
            oracle.assert_same_bits(store.tokens(layer)[0], want[layer])
            assert store.positions(layer).tolist() == [[[0, 1, 2]] * HEADS]
            assert (store.length, store.next_position(layer), store.held(layer)) == (9, 3, 3)
        store.append_all(rows[:, :1], rows[:, :1])
        assert store.positions(1)[0, 0].tolist() == [0, 1, 2, 3]
        assert (store.length, store.next_position(0)) == (10, 4)
        with pytest.raises(tikv.ShapeError, match=r"^KVCacheStore.compact: the rotation of 10 elements is wider"):
            store.compact(0, [[[0]] * HEADS], rope=tikv.Rope([1.0] * 5))
