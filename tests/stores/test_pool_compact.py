"""Compaction of paged stores whose blocks hold all heads, against a plain model: of each layer a list of positions."""

import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

pytestmark = pytest.mark.thorough

LAYERS, HEADS, GROUP, WIDTH, PAGE = 2, 3, 2, 16, 4
ROPE = tikv.Rope([1.0, 0.3, 0.05, 0.01])


class Model:
    """A store and, of each sequence and layer, the rows it holds and where they stand."""

    def __init__(self, arch, rng, *, dtype="float16", layout="NHD", num_blocks=40):
        self.arch, self.rng = arch, rng
        self.form = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, "head_dim_v": 8,
                     "num_blocks": num_blocks, "block_size": PAGE, "dtype": dtype, "layout": layout}  # fmt: skip
        self.store = tikv.PagedKVCacheStore(**self.form)
        self.rows, self.stand, self.came = {}, {}, {}

    def place(self, array):
        return oracle.place(np.ascontiguousarray(array), self.arch)

    def add(self, token_ids=None):
        seq = self.store.add(token_ids)
        for layer in range(LAYERS):
            self.rows[seq, layer] = [np.empty((0, HEADS, w), np.float32) for w in (WIDTH, 8)]
            self.stand[seq, layer], self.came[seq, layer] = [], 0
        return seq

    def fork(self, seq):
        found = self.store.fork(seq)
        for layer in range(LAYERS):
            for kept in (self.rows, self.stand, self.came):
                kept[found, layer] = kept[seq, layer]
        return found

    def next(self, seq, layer):
        return self.came[seq, layer]

    def new_rows(self, seq, layer, n):
        """K and V (n, H, ...) of new tokens, which the model has from now on; exact in float16 and int8 alike."""
        new = []
        for width in (WIDTH, 8):
            rows = self.rng.integers(-8, 9, (n, HEADS, width)).astype(np.float32)
            rows[..., 0] = 127 / 8  # the scale of int8 is 1 / 8 for each
            new.append(rows / 8)
        self.rows[seq, layer] = [np.concatenate(pair) for pair in zip(self.rows[seq, layer], new, strict=True)]
        first = self.came[seq, layer]
        self.stand[seq, layer] = [*self.stand[seq, layer], *range(first, first + n)]
        self.came[seq, layer] = first + n
        return new

    def append(self, seq, n, layers=range(LAYERS)):
        for layer in layers:
            k, v = self.new_rows(seq, layer, n)
            self.store.append(layer, self.place(k), self.place(v), [seq], [0, n])

    def compact(self, seq, layer, keep, as_mask=False):
        index = np.asarray(keep, np.int64)
        self.rows[seq, layer] = [a[index] for a in self.rows[seq, layer]]
        self.stand[seq, layer] = [self.stand[seq, layer][i] for i in keep]
        if as_mask:
            index = np.isin(np.arange(self.store.held(layer, seq)), index)
        self.store.compact(layer, seq, index)

    def truncate(self, seq, n):
        for layer in range(LAYERS):
            drop = max(0, self.came[seq, layer] - n)
            held = len(self.stand[seq, layer]) - drop
            self.rows[seq, layer] = [a[:held] for a in self.rows[seq, layer]]
            self.stand[seq, layer] = self.stand[seq, layer][:held]
            self.came[seq, layer] -= drop
        self.store.truncate(seq, n)

    def check(self, *seqs, store=None):
        store = self.store if store is None else store
        for seq, layer in itertools.product(seqs, range(LAYERS)):
            stand = self.stand[seq, layer]
            assert store.held(layer, seq) == len(stand)
            assert store.positions(layer, seq).tolist() == [stand] * HEADS
            assert store.layer_length(layer, seq) == store.next_position(layer, seq) == self.came[seq, layer]
            for want, got in zip(self.rows[seq, layer], store.tokens(layer, seq), strict=True):
                np.testing.assert_array_equal(oracle.to_numpy(got), want)
        for seq in seqs:
            assert store.length(seq) == min(self.came[seq, layer] for layer in range(LAYERS))
            held = max(len(self.stand[seq, layer]) for layer in range(LAYERS))
            assert len(store.block_table(seq)) == -(-held // PAGE)

    def attention(self, q, seq, layer):
        """(T, Hq, D_v) of queries (T, Hq, D), the newest tokens', in float64."""
        out = np.zeros((*q.shape[:2], 8))
        for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
            k, v = (a[: len(a) - (len(q) - 1 - t), h // GROUP].astype(np.float64) for a in self.rows[seq, layer])
            out[t, h], _ = reference.attention(q[t, h], k, v, scale=WIDTH**-0.5)
        return out

    def queries(self, *shape):
        return self.rng.standard_normal((*shape, HEADS * GROUP, WIDTH)).astype(np.float32)


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [("float16", "NHD"), ("int8", "HND"), ("int8", "NHD")],
)
def test_a_layer_keeps_what_it_is_told(arch, rng, dtype, layout):
    """Append, compact, append, attend and extend, of layers that keep different tokens."""
    model = Model(arch, rng, dtype=dtype, layout=layout)
    a, b = model.add(), model.add()
    model.append(a, 19)
    model.append(b, 6)
    model.compact(a, 0, [0, 3, 4, 5, 9, 16, 18], as_mask=True)
    model.check(a, b)
    model.compact(a, 1, [1, 2, 3, 4, 5, 17, 18])
    model.check(a, b)
    model.append(a, 3)
    model.compact(a, 0, [0, 1, 4, 7, 8, 9])
    model.append(a, 1)
    model.check(a, b)
    q = model.queries(2)
    for layer in range(LAYERS):
        out, mass = model.store.attend(layer, model.place(q), [a, b], return_mass=True)
        for i, seq in enumerate((a, b)):
            np.testing.assert_allclose(
                oracle.to_numpy(out)[i : i + 1], model.attention(q[i : i + 1], seq, layer), atol=1e-5
            )
            held = model.store.held(layer, seq)
            np.testing.assert_allclose(oracle.to_numpy(mass)[i, :, :held].sum(-1), GROUP, atol=1e-4)
    q = model.queries(7)
    (k, v), more = model.new_rows(a, 0, 3), model.new_rows(b, 0, 4)  # numbers of queries that one kernel attends
    rows = [model.place(np.concatenate(pair)) for pair in zip((k, v), more, strict=True)]
    out = model.store.extend(0, model.place(q), *rows,
                             [a, b], cu_seqlens=[0, 3, 7])  # fmt: skip
    np.testing.assert_allclose(oracle.to_numpy(out)[:3], model.attention(q[:3], a, 0), atol=1e-5)
    np.testing.assert_allclose(oracle.to_numpy(out)[3:], model.attention(q[3:], b, 0), atol=1e-5)
    model.check(a, b)


def test_blocks_are_free_when_the_last_layer_is_done_with_them(arch, rng):
    model = Model(arch, rng, num_blocks=5)
    seq = model.add()
    model.append(seq, 20)
    model.compact(seq, 0, [18, 19])
    assert model.store.num_free_blocks == 0, "the other layer is full"
    model.check(seq)
    model.compact(seq, 1, list(range(5)))
    assert model.store.num_free_blocks == 3
    model.compact(seq, 1, [])
    model.compact(seq, 0, [1])
    assert model.store.num_free_blocks == 4
    model.check(seq)
    model.compact(seq, 0, [])
    assert model.store.num_free_blocks == 5
    model.append(seq, 6)
    model.check(seq)
    assert model.store.length(seq) == 26


def test_blocks_that_others_share_are_copied_first(arch, rng):
    model = Model(arch, rng)
    prompt = list(range(12))
    a = model.add(prompt)
    model.append(a, 12)
    b, c = model.fork(a), model.store.add(prompt, leave=0)
    assert model.store.length(c) == 12
    free = model.store.num_free_blocks
    model.compact(b, 0, [0, 1, 2, 3, 5, 6, 9])
    assert model.store.num_free_blocks == free - 1, "the first block stays shared; the last is, with the other layer"
    model.check(a, b)
    model.compact(a, 1, [2, 11])
    model.append(a, 1)
    model.check(a, b)
    model.store.free(c)
    model.check(a, b)
    found = model.store.add(prompt, leave=0)
    assert model.store.length(found) in (0, 4, 12)
    want = model.rows[b, 1][0]  # of the other layer, which nobody compacted
    got = oracle.to_numpy(model.store.tokens(1, found)[0])
    np.testing.assert_array_equal(got, want[: len(got)])
    d = model.fork(b)
    model.append(d, 2)
    model.append(b, 1)
    model.check(a, b, d)


def test_truncate_goes_back_to_the_compaction_and_no_further(arch, rng):
    model = Model(arch, rng)
    seq = model.add()
    model.append(seq, 11)
    model.compact(seq, 1, [0, 4, 10])
    model.append(seq, 5)
    model.truncate(seq, 13)
    model.check(seq)
    model.append(seq, 1)
    with pytest.raises(tikv.PositionError, match=r"cannot keep 10 tokens: layer 1 was compacted when it had 11\."):
        model.store.truncate(seq, 10)
    model.truncate(seq, 11)
    model.check(seq)


def test_files_swaps_and_copies_know_what_is_kept(arch, rng, tmp_path):
    model = Model(arch, rng)
    a, b = model.add(), model.add()
    model.append(a, 13)
    model.append(b, 3)
    model.compact(a, 0, [0, 7, 12])
    model.compact(a, 1, [1, 2, 3, 4, 5])
    model.append(a, 2)
    model.store.save(tmp_path / "pool.safetensors")
    loaded = tikv.PagedKVCacheStore.load(tmp_path / "pool.safetensors")
    model.check(a, b, store=loaded)
    model.store.swap_out(a)
    assert model.store.length(a) == 15
    model.store.save(tmp_path / "pool.safetensors")
    model.store.swap_in(a)
    model.append(a, 2)
    model.check(a, b)
    other = tikv.PagedKVCacheStore.load(tmp_path / "pool.safetensors")
    other.swap_in(a)
    assert other.positions(0, a)[0].tolist() == [0, 7, 12, 13, 14]


@pytest.mark.parametrize("per_head", [False, True])
def test_keys_are_turned_to_their_new_places(arch, rng, per_head):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 20, "block_size": PAGE}
    pool = tikv.PagedKVCacheStore(**form, dtype="float32", per_head=per_head)
    seq = pool.add()
    k, v = (rng.standard_normal((11, HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    pool.append(0, oracle.place(k, arch), oracle.place(v, arch), [seq], [0, 11])
    pool.compact(0, seq, np.arange(0, 11, 2))  # positions stay true
    keep = np.array([0, 1, 3, 5])
    pool.compact(0, seq, keep, rope=ROPE)
    stood = np.array([0, 2, 6, 10])
    want = oracle.place(np.ascontiguousarray(k[stood].swapaxes(0, 1)[None]), arch)
    tikv.rotate(want, stood, np.arange(4), ROPE)
    got_k, got_v = (oracle.to_numpy(a) for a in pool.tokens(0, seq))
    oracle.assert_same_bits(got_k, np.ascontiguousarray(oracle.to_numpy(want)[0].swapaxes(0, 1)))
    oracle.assert_same_bits(got_v, v[stood])
    assert pool.positions(0, seq).tolist() == [[0, 1, 2, 3]] * HEADS
    assert (pool.length(seq), pool.next_position(0, seq)) == (11, 4)
    pool.append(0, oracle.place(k[:2], arch), oracle.place(v[:2], arch), [seq], [0, 2])
    assert pool.positions(0, seq)[0].tolist() == [0, 1, 2, 3, 4, 5]
    pool.compact(0, seq, [0, 5])
    assert pool.positions(0, seq)[0].tolist() == [0, 5]
    assert (pool.length(seq), pool.next_position(0, seq)) == (13, 6)


def test_keys_of_8_bits_are_turned_as_they_are_stored(arch, rng):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 4, "block_size": PAGE}
    pool = tikv.PagedKVCacheStore(**form, dtype="float8_e5m2", layout="HND")
    seq = pool.add()
    k = rng.standard_normal((9, HEADS, WIDTH)).astype(np.float32).astype(ml_dtypes.float8_e5m2)
    pool.append(0, oracle.place(k, arch), oracle.place(k, arch), [seq], [0, 9])
    pool.compact(0, seq, [2, 3, 8], rope=ROPE)
    want = oracle.place(np.ascontiguousarray(k[[2, 3, 8]].swapaxes(0, 1)[None]), arch)
    tikv.rotate(want, np.array([2, 3, 8]), np.arange(3), ROPE)
    oracle.assert_same_bits(pool.tokens(0, seq)[0], np.ascontiguousarray(oracle.to_numpy(want)[0].swapaxes(0, 1)))


def test_int8_keys_are_turned_with_their_scales(arch, rng):
    pools = [
        tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=4, block_size=PAGE,
                               dtype="int8", layout=layout) for layout in ("NHD", "HND")
    ]  # fmt: skip
    k = rng.standard_normal((9, HEADS, WIDTH)).astype(np.float32)
    found = []
    for pool in pools:
        seq = pool.add()
        pool.append(0, oracle.place(k, arch), oracle.place(k, arch), [seq], [0, 9])
        pool.compact(0, seq, [2, 3, 8], rope=ROPE)
        found.append(oracle.to_numpy(pool.tokens(0, seq)[0]))
    oracle.assert_same_bits(*found)
    want = oracle.place(np.ascontiguousarray(k[[2, 3, 8]].swapaxes(0, 1)[None]), arch)
    tikv.rotate(want, np.array([2, 3, 8]), np.arange(3), ROPE)
    np.testing.assert_allclose(found[0], oracle.to_numpy(want)[0].swapaxes(0, 1), atol=0.06)


REFUSED = [
    ([3, 1], tikv.PositionError, "has 1 after 3"),
    ([0, 6], tikv.PositionError, "has 6, and 6 rows are held there"),
    ([[0, 1], [0, 1], [0, 2]], tikv.ShapeError, "heads would keep different tokens.*use per_head=True"),
    (np.ones(5, bool), tikv.ShapeError, "Pass True or False for each"),
    ([[0]], tikv.ShapeError, "Pass a list for each"),
    ([0.5], tikv.DTypeError, "Pass int32 or int64 indices, or a bool mask"),
]


@pytest.mark.archs("cpu")
def test_what_cannot_be_kept_is_refused(arch, rng):
    model = Model(arch, rng, num_blocks=2)
    seq = model.add()
    model.append(seq, 6)
    for keep, error, why in REFUSED:
        with pytest.raises(error, match=why):
            model.store.compact(0, seq, keep)
    with pytest.raises(tikv.ShapeError, match="wider than k"):
        model.store.compact(0, seq, [0, 1], rope=tikv.Rope(np.ones(WIDTH)))
    with pytest.raises(tikv.PositionError, match="was never added"):
        model.store.compact(0, 9, [0])
    other = model.fork(seq)
    with pytest.raises(tikv.CapacityError, match="1 blocks are needed and 0 of 2 are free"):
        model.store.compact(0, other, [0, 2, 3])
    model.check(seq, other)
    model.store.free(other)
    model.compact(seq, 0, [0, 2, 4])
    q = model.place(np.ones((1, 2, HEADS * GROUP, WIDTH), np.float32))
    with pytest.raises(tikv.PositionError, match="which has 6 tokens in layer 0, 0 of them since"):
        model.store.attend(0, q, [seq])
    with pytest.raises(tikv.OptionError, match="window cannot be used with sequence 0, whose layer 0 was compacted"):
        model.store.attend(0, q[:, 0], [seq], window=4)
    model.check(seq)
    vllm = tikv.PagedKVCacheStore(**model.form | {"layout": "VLLM"})
    with pytest.raises(tikv.OptionError, match="layout VLLM cuts rows"):
        vllm.compact(0, vllm.add(), [])
