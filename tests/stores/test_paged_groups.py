"""Page pools whose rows are groups of codes, against lists of rows that were quantised once."""

import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference

HEADS, WIDTH, PAGE = 2, 64, 4


class Model:
    """A pool of one layer, and of each sequence its rows as the codes say."""

    def __init__(self, rng, arch, name, **form):
        self.rng, self.arch, self.row = rng, arch, formats.FORMATS[name]
        self.store = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=24, block_size=PAGE, dtype=name, **form
        )
        self.held = {}

    def add(self):
        seq = self.store.add()
        self.held[seq] = [np.empty((0, HEADS, WIDTH), np.float32) for _ in "kv"]
        return seq

    def fork(self, seq):
        twin = self.store.fork(seq)
        self.held[twin] = list(self.held[seq])
        return twin

    def rows(self, count):
        return [self.rng.standard_normal((count, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]

    def take(self, k, v, seqs, counts):
        """Count rows that are given to the store."""
        for i, rows in enumerate((k, v)):
            quantised = reference.quantize_groups(rows, self.row.bits, self.row.group, self.row.rule, np.float16)
            numbers = reference.dequantize_groups(*quantised, self.row.bits, self.row.rule)
            for seq, part in zip(seqs, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
                self.held[seq][i] = np.concatenate([self.held[seq][i], part])

    def append(self, seqs, counts):
        k, v = self.rows(sum(counts))
        self.store.append(0, *(oracle.place(a, self.arch) for a in (k, v)), seqs, [0, *np.cumsum(counts).tolist()])
        self.take(k, v, seqs, counts)

    def check(self, store=None):
        for seq, held in self.held.items():
            for got, want in zip((store or self.store).tokens(0, seq), held, strict=True):
                oracle.assert_same_bits(got, want, what=f"sequence {seq}")

    def attended(self, q, seq, heads=None):
        """(Hq, WIDTH) of one query of each head over all that a sequence, or each of its heads, holds."""
        found, keys_values = [], self.held[seq]
        for h, row in enumerate(q):
            kv_head = h // (len(q) // HEADS)
            k, v = (a[:, kv_head] if heads is None else a[heads[kv_head], kv_head] for a in keys_values)
            found.append(reference.attention(row, k, v, scale=WIDTH**-0.5)[0])
        return np.stack(found)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("quant4_64", "NHD"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("q8_0", "HND"), ("quant3_32", "NHD"))),
    ],
)
def test_sequences_keep_their_codes(arch, rng, tmp_path, name, layout):
    """Through forks, copies on write, cuts, swaps and files; then attention over them, and new tokens with queries."""
    model = Model(rng, arch, name, layout=layout)
    store = model.store
    a, b = model.add(), model.add()
    model.append([a, b], [6, 3])
    model.append([b, a], [1, 1])
    twin = model.fork(a)
    model.append([twin, a], [2, 1])  # each writes into the block that both have
    model.check()
    store.truncate(b, 2)
    model.held[b] = [rows[:2] for rows in model.held[b]]
    codes = [oracle.to_numpy(array).copy() for array in (store.keys(0), *store.scales(0))]
    store.swap_out(a)
    model.append([b], [3])
    store.swap_in(a)
    model.check()
    store.save(tmp_path / "pool.safetensors")
    again = tikv.PagedKVCacheStore.load(tmp_path / "pool.safetensors")
    assert again.dtype is model.row
    model.check(again)
    assert codes[0].dtype == np.uint32
    assert codes[1].shape[-1] == WIDTH // model.row.group * model.row.numbers

    seqs = [a, b, twin]
    q = rng.standard_normal((3, 4, WIDTH)).astype(np.float32)
    got = oracle.to_numpy(store.attend(0, oracle.place(q, arch), seqs))
    for i, seq in enumerate(seqs):
        np.testing.assert_allclose(got[i], model.attended(q[i], seq), rtol=0, atol=2e-5)
    k, v = model.rows(3)
    q = rng.standard_normal((3, 4, WIDTH)).astype(np.float32)
    got = store.extend(0, *(oracle.place(x, arch) for x in (q, k, v)), [b, twin], [0, 1, 3])
    model.take(k[:2], v[:2], [b, twin], [1, 1])
    want = [model.attended(q[0], b), model.attended(q[1], twin)]
    model.take(k[2:], v[2:], [twin], [1])
    want.append(model.attended(q[2], twin))
    np.testing.assert_allclose(oracle.to_numpy(got), np.stack(want), rtol=0, atol=2e-5)
    model.check()


@pytest.mark.full("vulkan")
def test_heads_are_compacted_by_themselves(arch, rng):
    model = Model(rng, arch, "quant4_64", per_head=True)
    seq = model.add()
    model.append([seq], [7])
    mask = np.array([[1, 0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1, 1]], bool)
    model.store.compact(0, seq, mask)
    model.append([seq], [2])
    heads = [np.concatenate([np.flatnonzero(m), [7, 8]]) for m in mask]
    for got, held in zip(model.store.tokens(0, seq), model.held[seq], strict=True):
        for h, kept in enumerate(heads):
            oracle.assert_same_bits(oracle.to_numpy(got)[: len(kept), h], held[kept, h])
    q = rng.standard_normal((1, 4, WIDTH)).astype(np.float32)
    got = oracle.to_numpy(model.store.attend(0, oracle.place(q, arch), [seq]))
    np.testing.assert_allclose(got[0], model.attended(q[0], seq, heads), rtol=0, atol=2e-5)


@pytest.mark.archs("cpu")
def test_what_pools_of_groups_refuse(arch):
    form = {"num_layers": 1, "num_kv_heads": 1, "num_blocks": 2, "block_size": 2}
    with pytest.raises(tikv.OptionError, match="layout VLLM cuts rows into pieces, and groups of q8_0 lie whole"):
        tikv.PagedKVCacheStore(**form, head_dim=64, dtype="q8_0", layout="VLLM")
    with pytest.raises(tikv.ShapeError, match="head_dim_v is 80 wide"):
        tikv.PagedKVCacheStore(**form, head_dim=64, head_dim_v=80, dtype=tikv.Quant(4, 64))
    with pytest.raises(tikv.DTypeError, match="q8_0 is kept by KVCacheStore and PagedKVCacheStore alone"):
        tikv.KVPool(2, 2, 1, 64, dtype="q8_0")
    store = tikv.PagedKVCacheStore(**form, head_dim=64, dtype="q8_0")
    seq = store.add()
    before = oracle.to_numpy(store.keys(0)).copy()
    with pytest.raises(tikv.DTypeError, match=r"makes no codes of q8_0\. Write to arrays with tikv\.write_qkv"):
        store.write_qkv(0, np.ones((1, 3 * 64), np.float32), [seq], num_q_heads=1)
    with pytest.raises(tikv.DTypeError, match="cannot quantise k"):
        store.append(0, *(np.ones((1, 1, 64)) for _ in "kv"), [seq])
    with pytest.raises(tikv.OptionError, match="the mass of keys of q8_0 is not offered"):
        store.attend(0, np.ones((1, 1, 64), np.float32), [seq], return_mass=True)
    oracle.assert_same_bits(store.keys(0), before)
    assert store.length(seq) == 0
