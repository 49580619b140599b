"""Paged stores whose heads hold different tokens, against a plain model: of each head a list of positions."""

import itertools

import numpy as np
import oracle
import pytest

import tikv
from tikv import reference

HEADS, GROUP, WIDTH, PAGE = 3, 2, 16, 4


class Model:
    """A store and, of each layer and sequence, what came and what each head still holds."""

    def __init__(self, arch, rng, *, layers=1, dtype="float16", layout="NHD", num_blocks=64):
        self.arch, self.rng, self.layers = arch, rng, layers
        self.store = tikv.PagedKVCacheStore(num_layers=layers, num_kv_heads=HEADS, head_dim=WIDTH, head_dim_v=8,
                                            num_blocks=num_blocks, block_size=PAGE, dtype=dtype, layout=layout,
                                            per_head=True)  # fmt: skip
        self.rows, self.kept = {}, {}

    def place(self, array):
        return oracle.place(np.ascontiguousarray(array), self.arch)

    def add(self):
        seq = self.store.add()
        for layer in range(self.layers):
            self.rows[layer, seq] = [np.empty((0, HEADS, w), np.float32) for w in (WIDTH, 8)]
            self.kept[layer, seq] = [np.empty(0, np.int64) for _ in range(HEADS)]
        return seq

    def new_rows(self, seqs, counts, layer=0):
        """K and V (T, H, ...) of new tokens, which the model has from now on; exact in float16 and int8 alike."""
        new = []
        for i, width in enumerate((WIDTH, 8)):
            rows = self.rng.integers(-8, 9, (sum(counts), HEADS, width)).astype(np.float32)
            rows[..., 0] = 127 / 8  # the scale of int8 is 1 / 8 for each
            rows /= 8
            new.append(rows)
            for seq, part in zip(seqs, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
                self.rows[layer, seq][i] = np.concatenate([self.rows[layer, seq][i], part])
        for seq, n in zip(seqs, counts, strict=True):
            length = len(self.rows[layer, seq][0])
            self.kept[layer, seq] = [
                np.concatenate([head, np.arange(length - n, length)]) for head in self.kept[layer, seq]
            ]  # fmt: skip
        return new

    def append(self, seqs, counts, layer=0):
        k, v = self.new_rows(seqs, counts, layer)
        self.store.append(layer, self.place(k), self.place(v), seqs, cu_seqlens=[0, *np.cumsum(counts).tolist()])

    def compact(self, seq, masks, layer=0, as_mask=True):
        """Keep what the masks of the heads say, given as a mask or, where all keep as many, as indices."""
        most = max(map(len, self.kept[layer, seq]))
        keep = np.zeros((HEADS, most), bool)
        for h, mask in enumerate(masks):
            keep[h, : len(mask)] = mask
        self.kept[layer, seq] = [head[mask] for head, mask in zip(self.kept[layer, seq], masks, strict=True)]
        self.store.compact(layer, seq, keep if as_mask else np.stack([np.flatnonzero(row) for row in keep]))

    def check(self, seq, layer=0):
        """Rows, positions, counts and blocks are the model's."""
        store, kept = self.store, self.kept[layer, seq]
        held = [len(head) for head in kept]
        assert store.held(layer, seq).tolist() == held
        lengths = [len(self.rows[n, seq][0]) for n in range(self.layers)]
        assert store.length(seq) == (max if lengths.count(0) == len(lengths) - 1 else min)(lengths)
        positions = store.positions(layer, seq)
        for found, stored in zip(self.rows[layer, seq], store.tokens(layer, seq), strict=True):
            stored = oracle.to_numpy(stored)
            assert stored.shape[0] == positions.shape[1] == max(held)
            for h, head in enumerate(kept):
                np.testing.assert_array_equal(stored[: len(head), h], found[head, h])
                assert (stored[len(head) :, h] == 0).all()
                assert positions[h].tolist() == [*head.tolist(), *[-1] * (max(held) - len(head))]
        assert [(row >= 0).sum() for row in store.block_table(seq, layer)] == [-(-n // PAGE) for n in held]

    def attention(self, q, seqs, layer=0, last=None):
        """(out, mass) of queries (B, Hq, T, D), the newest tokens': float64; mass of the last queries."""
        most = max(len(head) for seq in seqs for head in self.kept[layer, seq])
        out, mass = np.zeros((*q.shape[:3], 8)), np.zeros((len(seqs), HEADS, most))
        for (b, seq), h, t in itertools.product(enumerate(seqs), range(q.shape[1]), range(q.shape[2])):
            head = self.kept[layer, seq][h // GROUP]
            at = head[: len(head) - (q.shape[2] - 1 - t)]
            k, v = (rows[at, h // GROUP].astype(np.float64) for rows in self.rows[layer, seq])
            out[b, h, t], _ = reference.attention(q[b, h, t], k, v, scale=WIDTH**-0.5)
            if len(at) and (last is None or t >= q.shape[2] - last):
                mass[b, h // GROUP, : len(at)] += reference.attention(
                    q[b, h, t], k, np.eye(len(at)), scale=WIDTH**-0.5
                )[0]  # fmt: skip
        return out, mass

    def queries(self, *shape):
        return self.rng.standard_normal((*shape, WIDTH)).astype(np.float32)


def random_masks(rng, kept, share):
    return [rng.random(len(head)) < share for head in kept]


@pytest.mark.thorough  # compaction and attention by head, each tested by itself
@pytest.mark.full("vulkan")
@pytest.mark.full(unless=lambda case: case["dtype"] == "int8")
@pytest.mark.parametrize(("dtype", "layout"), [("int8", "NHD"), ("float16", "HND")])
def test_heads_keep_what_each_is_told(arch, rng, dtype, layout):
    """Append, compact, append, attend and extend, of two sequences whose heads differ more and more; one holds none."""
    model = Model(arch, rng, dtype=dtype, layout=layout)
    a, b = model.add(), model.add()
    model.append([a, b], [11, 6])
    model.compact(a, [*random_masks(rng, model.kept[0, a][:2], 0.5), np.zeros(11, bool)])
    model.check(a)
    model.check(b)
    q = model.queries(2, HEADS * GROUP, 1)
    out, mass = model.store.attend(0, model.place(q[:, :, 0]), [a, b], return_mass=True)
    want, their = model.attention(q, [a, b])
    np.testing.assert_allclose(oracle.to_numpy(out), want[:, :, 0], atol=1e-5)
    np.testing.assert_allclose(oracle.to_numpy(mass), their, atol=2e-5)
    assert (oracle.to_numpy(out)[0, 2 * GROUP :] == 0).all()

    q = model.queries(HEADS * GROUP, 7)  # three tokens of a, four of b
    k, v = model.new_rows([a, b], [3, 4])
    out, mass = model.store.extend(0, model.place(q.swapaxes(0, 1)), model.place(k), model.place(v), [a, b],
                                   cu_seqlens=[0, 3, 7], return_mass=True, mass_queries=2)  # fmt: skip
    out, mass = oracle.to_numpy(out), oracle.to_numpy(mass)
    for i, (seq, tokens) in enumerate(((a, slice(0, 3)), (b, slice(3, 7)))):
        want, their = model.attention(q[None, :, tokens], [seq], last=2)
        np.testing.assert_allclose(out[tokens].swapaxes(0, 1), want[0], atol=1e-5)
        np.testing.assert_allclose(mass[i, :, : their.shape[2]], their[0], atol=2e-5)
    model.check(a)
    model.compact(b, [np.arange(10) % 2 == h % 2 for h in range(HEADS)], as_mask=False)
    model.append([b, a], [1, 1])
    model.check(a)
    model.check(b)


def test_layers_are_compacted_by_themselves_and_blocks_are_free_at_once(arch, rng):
    model = Model(arch, rng, layers=2, num_blocks=12)
    seq = model.add()
    for layer in range(2):
        model.append([seq], [16], layer)
    assert model.store.num_free_blocks == 0
    model.compact(seq, [np.arange(16) < n for n in (1, 4, 5)], layer=0)
    assert (model.store.block_table(seq, 0) >= 0).sum() == 4
    assert model.store.num_free_blocks == 0, "the other layer is full"
    model.compact(seq, [np.arange(16) >= 8 for _ in range(HEADS)], layer=1)
    assert model.store.num_free_blocks == 6
    k, v = (model.place(np.zeros((40, HEADS, w), np.float32)) for w in (WIDTH, 8))
    with pytest.raises(tikv.CapacityError, match="blocks are needed"):
        model.store.append(1, k, v, [seq], [0, 40])
    model.check(seq, 0)
    model.check(seq, 1)
    other = model.add()
    for layer in range(2):
        model.append([seq, other], [3, 2], layer)
        model.check(seq, layer)
        model.check(other, layer)
    model.store.free(seq)
    assert model.store.num_free_blocks == 9
    model.check(other, 1)


def test_bytes_follow_the_rows_that_are_kept(arch, rng):
    """Of heads from 10 to 90 %: the rows kept and the tails of blocks."""
    store = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=9, head_dim=8, num_blocks=9 * 50, block_size=16,
                                   per_head=True)  # fmt: skip
    seq, rows = store.add(), np.zeros((800, 9, 8), np.float16)
    store.append(0, oracle.place(rows, arch), oracle.place(rows, arch), [seq], cu_seqlens=[0, 800])
    assert store.num_free_blocks == 0
    shares = np.arange(1, 10) / 10
    keep = rng.permuted(np.tile(np.arange(800), (9, 1)), axis=1) < (shares * 800)[:, None]
    store.compact(0, seq, keep)
    used = (store.num_blocks - store.num_free_blocks) * store.nbytes // store.num_blocks
    kept, tails = int(keep.sum()) * 8 * 2 * 2, 9 * 15 * 8 * 2 * 2
    assert kept <= used <= 1.03 * kept + tails


def test_rows_between_which_something_lies_are_appended(arch, rng):
    """Keys that are a slice of fused rows."""
    model = Model(arch, rng)
    seq = model.add()
    k, v = model.new_rows([seq], [9])
    fused = np.concatenate([k.reshape(9, -1), v.reshape(9, -1), np.zeros((9, 7), np.float32)], axis=1)
    placed = oracle.place(fused, arch)
    if not hasattr(placed, "reshape"):
        pytest.skip("no slices of this array")
    k, v = placed[:, : HEADS * WIDTH], placed[:, HEADS * WIDTH : HEADS * (WIDTH + 8)]
    model.store.append(0, k.reshape(9, HEADS, WIDTH), v.reshape(9, HEADS, 8), [seq], cu_seqlens=[0, 9])
    model.check(seq)


def test_tokens_behind_a_compaction_can_be_cut_off(arch, rng):
    model = Model(arch, rng)
    seq = model.add()
    model.append([seq], [10])
    model.compact(seq, random_masks(rng, model.kept[0, seq], 0.4))
    model.append([seq], [5])
    model.store.truncate(seq, 12)
    model.rows[0, seq] = [rows[:12] for rows in model.rows[0, seq]]
    model.kept[0, seq] = [head[head < 12] for head in model.kept[0, seq]]
    model.check(seq)
    with pytest.raises(tikv.PositionError, match="cannot keep 9 tokens: layer 0 was compacted when it had 10"):
        model.store.truncate(seq, 9)
    model.check(seq)


@pytest.mark.archs("cpu")
def test_what_a_per_head_store_does_not_do_is_refused(tmp_path, arch):
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 4, "num_blocks": 8, "block_size": 2}
    store = tikv.PagedKVCacheStore(**form, per_head=True)
    seq = store.add()
    k = np.ones((4, 2, 4), np.float16)
    store.append(0, k, k, [seq], cu_seqlens=[0, 4])
    calls = {
        "add": lambda: store.add([1, 2, 3]),
        "fork": lambda: store.fork(seq),
        "swap_out": lambda: store.swap_out(seq),
        "save": lambda: store.save(tmp_path / "a.safetensors"),
        "load_sequences": lambda: store.load_sequences(tmp_path / "a.safetensors"),
        "write_qkv": lambda: store.write_qkv(0, np.zeros((1, 24), np.float16), [seq], num_q_heads=2),
    }
    for name, call in calls.items():
        with pytest.raises(tikv.OptionError, match=f"^PagedKVCacheStore.{name}: this store has per_head=True"):
            call()
    with pytest.raises(tikv.OptionError, match="layout VLLM"):
        tikv.PagedKVCacheStore(**(form | {"head_dim": 8}), layout="VLLM", per_head=True)
    with pytest.raises(tikv.OptionError, match="Pass layer="):
        store.block_table(seq)
    with pytest.raises(tikv.ShapeError, match="number of heads"):
        store.append(0, k[:, :1], k[:, :1], [seq], cu_seqlens=[0, 4])
    for keep, error, says in (
        ([[2, 1], [0, 1]], tikv.PositionError, "1 after 2"),
        ([[0, 4], [0, 1]], tikv.PositionError, "has 4, and 4 rows"),
        (np.ones((2, 5), bool), tikv.ShapeError, "mask of shape"),
        (np.ones((3, 4), bool), tikv.ShapeError, "mask of shape"),
        (np.array([[0.5]]), tikv.DTypeError, "int32 or int64"),
    ):
        with pytest.raises(error, match=says) as caught:
            store.compact(0, seq, keep)
        assert str(caught.value).startswith("PagedKVCacheStore.compact: "), caught.value
    assert store.held(0, seq).tolist() == [4, 4]
    store.compact(0, seq, np.array([[True, False, False, True], [False, False, True, False]]))
    with pytest.raises(tikv.PositionError, match="the mask keeps row 1 of sequence 0, head 1"):
        store.compact(0, seq, np.ones((2, 2), bool))
    q = np.ones((1, 2, 2, 4), np.float32)
    out = np.full(q.shape, 7, np.float32)
    with pytest.raises(tikv.PositionError, match="2 queries are given for sequence 0"):
        store.attend(0, q, [seq], out=out)
    with pytest.raises(tikv.OptionError, match="window cannot be used with sequence 0, whose layer 0 was compacted"):
        store.attend(0, q[:, 0], [seq], window=3)
    with pytest.raises(tikv.OptionError, match="alibi_slopes cannot be used with sequence 0"):
        store.attend(0, q[:, 0], [seq], alibi_slopes=np.ones(2, np.float32))
    with pytest.raises(tikv.OptionError, match="window cannot be used with sequence 0, whose layer 0 was compacted"):
        store.extend(0, np.ones((1, 2, 4), np.float32), k[:1], k[:1], [seq], window=3)
    assert (out == 7).all()
    assert store.held(0, seq).tolist() == [2, 1]
    assert store.draw() is not None
    assert "per head" in repr(store)
