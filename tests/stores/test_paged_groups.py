"""Page pools of groups of codes, and of K and V in two formats, against lists of rows that were quantised once."""

import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference

pytestmark = pytest.mark.thorough

HEADS, WIDTH, PAGE = 2, 64, 4


class Model:
    """A pool of one layer, and of each sequence its rows as the codes say."""

    def __init__(self, rng, arch, names, **form):
        self.rng, self.arch, self.names = rng, arch, (names[0], names[-1])
        form |= {"dtype": names[0]} if len(names) == 1 else {"dtype": names[0], "v_dtype": names[1]}
        self.store = tikv.PagedKVCacheStore(
            num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=24, block_size=PAGE, **form
        )
        self.held = {}

    def add(self):
        seq = self.store.add()
        self.held[seq] = [oracle.as_stored(np.zeros((1, HEADS, WIDTH), np.float32), name)[:0] for name in self.names]
        return seq

    def fork(self, seq):
        twin = self.store.fork(seq)
        self.held[twin] = list(self.held[seq])
        return twin

    def rows(self, count):
        return [self.rng.standard_normal((count, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]

    def take(self, k, v, seqs, counts):
        """Count rows that are given to the store."""
        for i, (rows, name) in enumerate(zip((k, v), self.names, strict=True)):
            numbers = oracle.as_stored(rows, name)
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
        found, keys_values = [], [a.astype(np.float64) for a in self.held[seq]]
        for h, row in enumerate(q):
            kv_head = h // (len(q) // HEADS)
            k, v = (a[:, kv_head] if heads is None else a[heads[kv_head], kv_head] for a in keys_values)
            found.append(reference.attention(row, k, v, scale=WIDTH**-0.5)[0])
        return np.stack(found)


@pytest.mark.full("vulkan")  # its parts run there, each by itself
@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (("quant4_64",), "NHD"),
        (("float16", "quant4_64"), "NHD"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (("q8_0",), "HND"),
                (("quant3_32",), "NHD"),
                (("int8", "quant4_64"), "HND"),
                (("q8_0", "float32"), "NHD"),
                (("float16", "float8_e4m3fn"), "VLLM"),
            )
        ),
    ],
)
def test_sequences_keep_their_codes(arch, rng, tmp_path, names, layout):
    """Through forks, copies on write, cuts, swaps and files; then attention over them, and new tokens with queries."""
    model = Model(rng, arch, names, layout=layout)
    store = model.store
    assert "|".join(names) in repr(store)
    a, b = model.add(), model.add()
    model.append([a, b], [6, 3])
    model.append([b, a], [1, 1])
    twin = model.fork(a)
    model.append([twin, a], [2, 1])  # each writes into the block that both have
    model.check()
    store.truncate(b, 2)
    model.held[b] = [rows[:2] for rows in model.held[b]]
    store.swap_out(a)
    model.append([b], [3])
    store.swap_in(a)
    model.check()
    store.save(tmp_path / "pool.safetensors")
    again = tikv.PagedKVCacheStore.load(tmp_path / "pool.safetensors")
    assert (again.dtype, again.v_dtype) == (store.dtype, store.v_dtype)
    model.check(again)
    for name, codes, numbers in zip(
        model.names,
        (store.keys(0), store.values(0)),
        store.scales(0) if store.config.scale_names else (None, None),
        strict=True,
    ):
        row = formats.GROUP_FORMATS.get(name)
        assert (numbers is not None) == (row is not None or name == "int8")
        if row is not None:
            assert oracle.to_numpy(codes).dtype == np.uint32
            assert numbers.shape[-1] == WIDTH // row.group * row.numbers

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
    model = Model(rng, arch, ("int8", "quant4_64"), per_head=True)
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
    with pytest.raises(tikv.OptionError, match="layout VLLM cuts rows into pieces, but groups of q8_0 must stay whole"):
        tikv.PagedKVCacheStore(**form, head_dim=64, dtype="q8_0", layout="VLLM")
    with pytest.raises(tikv.ShapeError, match="head_dim_v is 80 wide"):
        tikv.PagedKVCacheStore(**form, head_dim=64, head_dim_v=80, dtype=tikv.Quant(4, 64))
    with pytest.raises(tikv.DTypeError, match="q8_0 works only in KVCacheStore and PagedKVCacheStore"):
        tikv.KVPool(2, 2, 1, 64, dtype="q8_0")
    store = tikv.PagedKVCacheStore(**form, head_dim=64, dtype="q8_0")
    seq = store.add()
    before = oracle.to_numpy(store.keys(0)).copy()
    with pytest.raises(tikv.DTypeError, match=r"cannot write codes of q8_0\. Write to arrays with tikv\.write_qkv"):
        store.write_qkv(0, np.ones((1, 3 * 64), np.float32), [seq], num_q_heads=1)
    with pytest.raises(tikv.DTypeError, match="cannot quantise k"):
        store.append(0, *(np.ones((1, 1, 64)) for _ in "kv"), [seq])
    oracle.assert_same_bits(store.keys(0), before)
    assert store.length(seq) == 0


@pytest.mark.archs("cpu")
def test_what_two_formats_take_and_refuse(arch, rng, tmp_path):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 8, "block_size": PAGE}
    for wrong, error, match in (
        ({"v_dtype": "int32"}, tikv.DTypeError, "int32"),
        ({"v_dtype": "q8_0", "layout": "VLLM"}, tikv.OptionError, "groups of q8_0 must stay whole"),
        ({"v_dtype": tikv.Quant(4, 64), "head_dim_v": 80}, tikv.ShapeError, "head_dim_v is 80 wide"),
        ({"v_dtype": "q8_0", "scale_dtype": "float32"}, tikv.DTypeError, "not supported for q8_0"),
    ):
        with pytest.raises(error, match=match):
            tikv.PagedKVCacheStore(**form, **wrong)
    k, v = rng.standard_normal((2, 6, HEADS, WIDTH)).astype(np.float32)
    rope = tikv.Rope(inv_freq=np.geomspace(1, 1e-3, WIDTH // 2).astype(np.float32))
    apart, alone = (tikv.PagedKVCacheStore(**form, dtype="int8", v_dtype=name) for name in ("quant4_32", None))
    for store in (apart, alone):
        seq = store.add()
        with pytest.raises(tikv.DTypeError, match="cannot quantise k"):
            store.append(0, k.astype(np.float64), v.astype(np.float64), [seq], [0, 6])
        store.append(0, k, v, [seq], [0, 6])
        store.compact(0, seq, np.array([1, 3, 4]), rope=rope)
    oracle.assert_same_bits(apart.tokens(0, seq)[0], alone.tokens(0, seq)[0])
    mass = apart.attend(0, np.ones((1, 4, WIDTH), np.float32), [seq], return_mass=True)[1]
    np.testing.assert_allclose(np.asarray(mass).sum(axis=-1), 2, rtol=1e-5)
    with pytest.raises(tikv.DTypeError, match=r"needs K and V in one format, and this store is int8\|quant4_32"):
        apart.write_qkv(0, np.ones((1, 8 * WIDTH), np.float32), [seq], num_q_heads=4)
    assert apart.length(seq) == 6
    apart.save(tmp_path / "apart.safetensors")
    with pytest.raises(tikv.DTypeError, match="had v_dtype=quant4_32, this one has int8"):
        alone.load_sequences(tmp_path / "apart.safetensors")
    alone.save(tmp_path / "alone.safetensors")
    with pytest.raises(tikv.DTypeError, match="had v_dtype=int8, this one has quant4_32"):
        apart.load_sequences(tmp_path / "alone.safetensors")


@pytest.mark.full("vulkan")
def test_floats_of_8_bits_with_a_scale(arch, rng, tmp_path):
    """Appended, shared, read back, attended over, extended and saved: what a contiguous store of that form gives."""
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "dtype": "float8_e4m3fn"}
    form |= {"k_scale": (0.3, 2.0), "v_scale": 0.7}
    pool, store = tikv.PagedKVCacheStore(num_blocks=8, block_size=PAGE, **form), tikv.KVCacheStore(capacity=16, **form)
    k, v = (oracle.place(a, arch) for a in rng.standard_normal((2, 6, HEADS, WIDTH)).astype(np.float32))
    seq = pool.add()
    pool.append(0, k, v, [seq], [0, 6])
    store.append(0, k, v)
    seq = pool.fork(seq)
    q, k, v = (rng.standard_normal((3, h, WIDTH)).astype(np.float32) for h in (4, HEADS, HEADS))
    q, k, v = (oracle.place(a, arch) for a in (q, k, v))
    got, want = (oracle.to_numpy(a) for a in (pool.extend(0, q, k, v, [seq], [0, 3]), store.extend(0, q, k, v)))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    pool.save(tmp_path / "pool.safetensors", [seq])
    again = tikv.PagedKVCacheStore.load(tmp_path / "pool.safetensors")
    assert again.divisors == pool.divisors == store.divisors
    for one in (pool, again):
        for got, want in zip(one.tokens(0, seq), store.tokens(0), strict=True):
            oracle.assert_same_bits(got, oracle.to_numpy(want)[0].swapaxes(0, 1))
    for a, b in zip(pool.scales(0), store.scales(0), strict=True):
        assert oracle.to_numpy(a).tolist() == oracle.to_numpy(b).tolist()


@pytest.mark.archs("cpu")
def test_what_pools_with_a_scale_refuse(arch, tmp_path):
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 4, "block_size": PAGE}
    for given, match in (
        ({"v_scale": 1.0}, "v_scale scales 8-bit floats and nvfp4, but V is stored as float16"),
        ({"dtype": "float8_e5m2", "k_scale": (1.0, 2.0), "per_head": True}, "a pool has one head"),
        ({"dtype": "float8_e5m2", "v_dtype": "int8", "k_scale": 1.0}, "int8 has one scale per row"),
    ):
        with pytest.raises(tikv.OptionError, match=match):
            tikv.PagedKVCacheStore(**form, **given)
    pool, other = (tikv.PagedKVCacheStore(**form, dtype="float8_e5m2", k_scale=s) for s in (2.0, None))
    seq, rows = pool.add(), np.ones((1, HEADS, WIDTH), np.float32)
    with pytest.raises(tikv.DTypeError, match="the fused write cannot divide by a scale"):
        pool.write_qkv(0, np.ones((1, 8 * WIDTH), np.float32), [seq], num_q_heads=4)
    assert pool.length(seq) == 0
    pool.append(0, rows, rows, [seq])
    pool.save(tmp_path / "pool.safetensors")
    with pytest.raises(tikv.ShapeError, match=r"had k_scale=\[2.0\], this one has None"):
        other.load_sequences(tmp_path / "pool.safetensors")
    alone = tikv.PagedKVCacheStore(**form, dtype="float8_e5m2", k_scale=2.0, per_head=True)
    seq = alone.add()
    alone.append(0, 3 * rows, 3 * rows, [seq])
    assert [float(np.asarray(a)[0, 1, 0]) for a in alone.tokens(0, seq)] == [3.0, 3.0]
