"""A pool of keys by channel over groups of tokens: each sequence holds what a contiguous store of its own does."""

import copy

import numpy as np
import oracle
import pytest
from campaign.token_group_pool import TokenGroupPool

import tikv
from tikv.arrays import CacheArray
from tikv.stores import files

pytestmark = pytest.mark.thorough

HEADS, WIDTH, Q_HEADS, LAYERS = 2, 32, 4, 2
QUANT = tikv.Quant(4, 32, "tokens", 32)
FORM = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, "scale_dtype": "float16"}


class Both:
    """A pool, and of each sequence a contiguous store, which `test_token_groups` compares with NumPy."""

    def __init__(self, rng, arch, quant=QUANT, blocks=40, **form):
        self.rng, self.arch = rng, arch
        self.form = {**FORM, "dtype": quant, **form}
        self.pool = tikv.PagedKVCacheStore(**self.form, num_blocks=blocks, block_size=64)
        self.stores = {}

    def add(self):
        seq = self.pool.add()
        self.stores[seq] = tikv.KVCacheStore(**self.form, capacity=640)
        return seq

    def rows(self, tokens, heads=HEADS):
        return self.rng.standard_normal((tokens, heads, WIDTH)).astype(np.float32)

    def append(self, layer, counts):
        """So many tokens for each of some sequences, in one call."""
        k, v = (self.rows(sum(counts.values())) for _ in "kv")
        starts = np.cumsum([0, *counts.values()]).tolist()
        self.pool.append(layer, *(oracle.place(a, self.arch) for a in (k, v)), list(counts), starts)
        for seq, first, end in zip(counts, starts, starts[1:], strict=False):
            if end > first:
                self.stores[seq].append(layer, *(oracle.place(a[first:end], self.arch) for a in (k, v)))

    def extend(self, layer, counts, **options):
        q, k, v = self.rows(sum(counts.values()), Q_HEADS), *(self.rows(sum(counts.values())) for _ in "kv")
        starts = np.cumsum([0, *counts.values()]).tolist()
        placed = [oracle.place(a, self.arch) for a in (q, k, v)]
        got = oracle.to_numpy(self.pool.extend(layer, *placed, list(counts), starts, **options))
        for seq, first, end in zip(counts, starts, starts[1:], strict=False):
            if end > first:
                some = [oracle.place(a[first:end], self.arch) for a in (q, k, v)]
                want = oracle.to_numpy(self.stores[seq].extend(layer, *some, **options))
                np.testing.assert_allclose(got[first:end], want, rtol=0, atol=2e-5)

    def attend(self, layer, seqs, tokens=1, **options):
        q = self.rng.standard_normal((len(seqs), tokens, Q_HEADS, WIDTH)).astype(np.float32)
        got = oracle.to_numpy(self.pool.attend(layer, oracle.place(q, self.arch), seqs, **options))
        for b, seq in enumerate(seqs):
            want = self.stores[seq].attend(layer, oracle.place(q[b : b + 1], self.arch), **options)
            np.testing.assert_allclose(got[b], oracle.to_numpy(want)[0], rtol=0, atol=2e-5)

    def check(self):
        for seq, store in self.stores.items():
            for layer in range(LAYERS):
                assert self.pool.layer_length(layer, seq) == store.layer_length(layer)
                if store.layer_length(layer):
                    for got, want in zip(self.pool.tokens(layer, seq), store.tokens(layer), strict=True):
                        oracle.assert_same_bits(got, np.swapaxes(want.copy_to_host()[0], 0, 1), what=f"{seq}, {layer}")


@pytest.mark.full("vulkan", unless=lambda params: params["values"] == "float16")
@pytest.mark.parametrize("values", [None, "float16", tikv.Quant(8, 32)], ids=str)
def test_sequences_hold_what_stores_of_their_own_do(arch, rng, values):
    both = Both(rng, arch, v_dtype=values)
    a, b, c = (both.add() for _ in range(3))
    for layer in range(LAYERS):
        both.append(layer, {a: 70, b: 3, c: 140})
    both.check()
    both.attend(0, [a, b, c])
    both.attend(1, [c, a], 2)
    for _ in range(40):
        both.append(1, {a: 1, b: 1, c: 1})  # not layer 0, whose append begins a step: then lengths are equal
    both.check()
    both.attend(1, [c, b, a], softcap=2.0, scale=0.3)
    both.attend(0, [c, b, a])
    both.extend(1, {c: 45, a: 0, b: 70})
    both.check()
    assert both.pool.nbytes > 0


@pytest.mark.full("vulkan")
def test_forks_trims_and_swaps(arch, rng):
    both = Both(rng, arch)
    a = both.add()
    for layer in range(LAYERS):
        both.append(layer, {a: 150})
    b = both.pool.fork(a)
    both.stores[b] = copy.deepcopy(both.stores[a])
    both.check()
    both.attend(0, [a, b])
    for layer in range(LAYERS):  # in a shared block, of which groups become codes on both sides
        both.append(layer, {a: 50, b: 41})
    both.check()
    both.attend(1, [b, a])
    with pytest.raises(tikv.PositionError, match="or a multiple of 32"):
        both.pool.truncate(a, 101)
    for seq, n in ((a, 170), (b, 96)):
        both.pool.truncate(seq, n)
        both.stores[seq].trim(both.stores[seq].length - n)
    both.check()
    both.attend(0, [b, a])
    both.pool.swap_out(b)
    for layer in range(LAYERS):
        both.append(layer, {a: 33})
    d = both.add()
    for layer in range(LAYERS):
        both.append(layer, {d: 10})
    both.pool.swap_in(b)
    both.check()
    for layer in range(LAYERS):
        both.append(layer, {b: 70, a: 1})
    both.check()
    both.attend(1, [b, d, a])
    both.pool.free(a)
    del both.stores[a]
    for _ in range(5):  # pages of new tokens for more sequences
        seq = both.add()
        both.append(0, {seq: 66})
    both.check()
    both.attend(0, list(both.stores))


def codes(pool):
    """The bits of the blocks that each sequence's codes fill."""
    found = []
    for seq in pool.sequences:
        table, counted = pool.block_table(seq).tolist(), pool._pages.coded[seq]
        for coded, arrays in zip(counted, pool._pages.pools.layers, strict=True):
            for a in arrays:
                host, per_token = oracle.to_numpy(CacheArray(a, pool.runtime)), 64 // a.shape[2]
                rows = host[table].swapaxes(1, 2).reshape(-1, *a.shape[1:2], *a.shape[3:])[: coded // per_token]
                found.append(rows.view(np.uint8))
    return found


@pytest.mark.full("vulkan", unless=lambda params: params["values"] is None)
@pytest.mark.parametrize("values", [None, "float8_e4m3fn", tikv.Quant(8, 32)], ids=str)
def test_files(arch, rng, tmp_path, values):
    """What is loaded has the bits that were saved, shares what was shared, and goes on alike."""
    path, both = tmp_path / "pool.safetensors", Both(rng, arch, v_dtype=values)
    a, empty = both.add(), both.add()
    for layer, tokens in enumerate((141, 150)):
        both.append(layer, {a: tokens})
    b = both.pool.fork(a)
    both.stores[b] = copy.deepcopy(both.stores[a])
    both.append(1, {b: 77})
    c = both.add()
    both.append(1, {c: 3})
    both.pool.save(path)
    before, shared = codes(both.pool), both.pool.num_shared_blocks
    both.pool.append(1, *[oracle.place(both.rows(1), arch) for _ in "kv"], [a])  # after it was saved
    both.pool = tikv.PagedKVCacheStore.load(path, num_blocks=30)
    assert (both.pool.sequences, both.pool.num_shared_blocks) == ([a, empty, b, c], shared)
    for got, want in zip(codes(both.pool), before, strict=True):
        np.testing.assert_array_equal(got, want)
    both.check()
    both.pool.swap_out(b)
    both.pool.save(path, [c, b])
    both.pool.free(a)
    both.pool.free(empty)
    del both.stores[a], both.stores[empty]
    new_c, new_b = both.pool.load_sequences(path)
    both.stores |= {new_c: copy.deepcopy(both.stores[c]), new_b: copy.deepcopy(both.stores[b])}
    both.pool.swap_in(b)
    both.pool.swap_in(new_b)
    both.check()
    both.append(1, {new_c: 90, b: 1, new_b: 70})
    both.append(0, {c: 64})
    both.append(1, {new_b: 70, c: 64})
    both.check()
    both.attend(1, [new_b, new_c, b])
    both.attend(0, [new_b, c, b])
    assert both.pool.add() not in (b, c, new_b, new_c)


@pytest.mark.archs("cpu")
def test_files_of_other_pools_change_nothing(arch, rng, tmp_path):
    path, both = tmp_path / "pool.safetensors", Both(rng, arch)
    seq = both.add()
    for layer in range(LAYERS):
        both.append(layer, {seq: 150})
    both.pool.save(path)
    form = {**FORM, "dtype": QUANT, "num_blocks": 8, "block_size": 64}
    for more, error, match in (
        ({"dtype": tikv.Quant(8, 32, "tokens", 32)}, tikv.DTypeError, r"had dtype=Quant\(bits=4"),
        ({"dtype": tikv.Quant(4, 32, "tokens", 33)}, tikv.DTypeError, "residual=32.*residual=33"),
        ({"dtype": "float16"}, tikv.DTypeError, "this one has float16"),
        ({"v_dtype": "float16"}, tikv.DTypeError, "v_dtype"),
        ({"scale_dtype": "float32"}, tikv.DTypeError, "scale_dtype"),
        ({"block_size": 32}, tikv.ShapeError, "block_size"),
        ({"num_blocks": 2}, tikv.CapacityError, "free"),
    ):
        pool = tikv.PagedKVCacheStore(**form | more)
        with pytest.raises(error, match=match):
            pool.load_sequences(path)
        assert (pool.sequences, pool.num_free_blocks, pool.add()) == ([], pool.num_blocks, 0)
    with pytest.raises(tikv.CapacityError, match="free"):
        tikv.PagedKVCacheStore.load(path, num_blocks=2)
    plain = tikv.PagedKVCacheStore(**FORM, num_blocks=8, block_size=64)
    plain.save(tmp_path / "plain.safetensors")
    with pytest.raises(tikv.DTypeError, match="had dtype=float16"):
        both.pool.load_sequences(tmp_path / "plain.safetensors")
    both.check()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda facts: facts["sequences"][0]["coded"].__setitem__(0, 97), "150 tokens in layer 0, 97 of them codes"),
        (lambda facts: facts["sequences"][0]["coded"].__setitem__(1, 64), "150 tokens in layer 1, 64 of them codes"),
        (lambda facts: facts["sequences"][0]["coded"].__setitem__(1, 160), "160 of them codes"),
        (lambda facts: facts["sequences"][0]["coded"].__setitem__(1, 128), "is needed"),
        (lambda facts: facts["sequences"][0]["coded"].append(0), "must be a list of 2"),
        (lambda facts: facts["sequences"][0].pop("coded"), "coded"),
        (lambda facts: facts["form"].update(head_dim=64), "is needed"),
        (lambda facts: facts["form"].update(head_dim="x"), "head_dim"),
        (lambda facts: facts["form"].update(block_size=48), "not a multiple of the group"),
        (lambda facts: facts["form"].update(v_dtype="int5"), "int5"),
        (lambda facts: facts["form"].update(per_head=True), "per_head"),
        (lambda facts: facts["form"]["dtype"].update(axis="head_dim", residual=0), "not along tokens"),
        (lambda facts: facts["form"]["dtype"].update(bits=8), "is needed"),
        (lambda facts: facts["form"]["dtype"].update(sinks=60), "150 tokens in layer 0, 96 of them codes"),
        (lambda facts: facts["form"]["dtype"].update(bits=5), "bits=5"),
        (lambda facts: facts["form"]["dtype"].update(more=1), "more"),
        (lambda facts: facts["form"].update(dtype=[4]), "is not stored"),
    ],
)
def test_files_that_contradict_themselves(arch, rng, tmp_path, monkeypatch, change, match):
    path, both, write = tmp_path / "pool.safetensors", Both(rng, arch), files.write
    seq = both.add()
    for layer in range(LAYERS):
        both.append(layer, {seq: 150})

    def changed(path, kind, tensors, facts, operation):
        facts = copy.deepcopy(facts)  # some of which is the pool's own
        change(facts)
        write(path, kind, tensors, facts, operation)

    monkeypatch.setattr(files, "write", changed)
    both.pool.save(path)
    for load in (tikv.PagedKVCacheStore.load, both.pool.load_sequences):
        with pytest.raises((tikv.CacheFileError, tikv.DTypeError), match=match):
            load(path)
    both.check()


@pytest.mark.archs("cpu")
def test_a_damaged_file_is_refused(arch, rng, tmp_path):
    path, both = tmp_path / "pool.safetensors", Both(rng, arch)
    seq = both.add()
    both.append(0, {seq: 150})
    both.pool.save(path)
    whole = path.read_bytes()
    for _ in range(40):
        at = int(rng.integers(len(whole)))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        with pytest.raises(tikv.CacheFileError):
            both.pool.load_sequences(path)
        path.write_bytes(whole[:at])
        with pytest.raises(tikv.CacheFileError):
            both.pool.load_sequences(path)
    assert (both.pool.sequences, both.pool.num_free_blocks) == ([seq], 37)
    both.check()


@pytest.mark.archs("cpu")
def test_where_memory_ends_a_file_changes_nothing(arch, rng, tmp_path, monkeypatch):
    path, both = tmp_path / "pool.safetensors", Both(rng, arch)
    seq = both.add()
    both.append(0, {seq: 150})
    both.pool.save(path)
    new = both.pool._pages.new
    monkeypatch.setattr(new, "_grow", lambda sequences: (_ for _ in ()).throw(MemoryError("no memory")))
    loaded = [both.pool.load_sequences(path)[0] for _ in range(3)]
    with pytest.raises(MemoryError):
        both.pool.load_sequences(path)
    assert (both.pool.sequences, both.pool.num_free_blocks) == ([seq, *loaded], 28)
    both.pool.free(loaded[0])
    (again,) = both.pool.load_sequences(path)
    for number in (*loaded[1:], again):
        both.stores[number] = copy.deepcopy(both.stores[seq])
    both.append(0, dict.fromkeys(both.stores, 70))
    both.check()


def test_compact_keeps_groups_as_a_whole(arch, rng):
    """What is kept has its bits, and the fork that shared blocks has all of its own."""
    both = Both(rng, arch)
    a = both.add()
    for layer in range(LAYERS):
        both.append(layer, {a: 150})  # 96 of them codes
    b = both.pool.fork(a)
    both.stores[b] = copy.deepcopy(both.stores[a])
    keep = [*range(32), *range(64, 98), *range(99, 150, 2)]
    want = [a.copy_to_host()[keep] for a in both.pool.tokens(0, b)]
    with pytest.raises(
        tikv.PositionError, match=r"1 in layer 0 cannot keep 31 of its tokens 32 to 63.*from 96 on are not codes"
    ):
        both.pool.compact(0, b, [*range(33, 64), 149])
    both.check()
    both.pool.compact(0, b, keep)
    assert (both.pool.held(0, b), both.pool.length(b), both.pool.num_shared_blocks) == (len(keep), 150, 1)
    assert both.pool.positions(0, b)[0].tolist() == keep
    for got, rows in zip(both.pool.tokens(0, b), want, strict=True):
        oracle.assert_same_bits(got, rows)
    del both.stores[b]
    both.check()
    with pytest.raises(tikv.PositionError, match="was compacted when it had 150"):
        both.pool.truncate(b, 149)
    with pytest.raises(tikv.PositionError, match=r"2 queries .* for sequence 1.*0 of them since it was compacted"):
        both.attend(0, [b], 2)
    both.pool.compact(0, b, [])
    assert (both.pool.held(0, b), both.pool.held(1, b)) == (0, 150)


@pytest.mark.archs("cpu")
@pytest.mark.full(unless=lambda case: case["number"] < 2)
@pytest.mark.parametrize("number", range(7))
def test_random_sequences(arch, tmp_path, number):
    """A moment of the campaign: forks, truncations, compactions, swaps and files against groups and rows in NumPy."""
    made = TokenGroupPool(np.random.default_rng([3, number]), arch, number, tmp_path)
    for _ in range(90):
        made.step()


@pytest.mark.archs("cpu")
def test_what_is_refused(arch):
    form = {**FORM, "dtype": QUANT, "num_blocks": 4}
    for more, error, match in (
        ({"block_size": 48}, tikv.OptionError, "Use block_size=64"),
        ({"block_size": 64, "per_head": True}, tikv.OptionError, r"per_head=True with groups.*together"),
        ({"block_size": 64, "layout": "VLLM"}, tikv.OptionError, "layout='VLLM' with groups"),
        ({"block_size": 64, "page_summaries": 16}, tikv.OptionError, r"page_summaries=16.*outside the blocks"),
        ({"block_size": 64, "v_dtype": QUANT}, tikv.OptionError, r"PagedKVCacheStore: v_dtype.*only keys have scales"),
        ({"block_size": 64, "k_scale": 2.0}, tikv.OptionError, "PagedKVCacheStore: k_scale"),
        ({"block_size": 64, "head_dim": 33}, tikv.ShapeError, "PagedKVCacheStore: head_dim_v is 33 wide"),
    ):
        with pytest.raises(error, match=match):
            tikv.PagedKVCacheStore(**form | more)
    pool = tikv.PagedKVCacheStore(**form, block_size=64)
    seq, rows = pool.add(), np.ones((100, HEADS, WIDTH), np.float32)
    for layer in range(LAYERS):
        pool.append(layer, rows, rows, [seq], [0, 100])
    q = np.ones((1, Q_HEADS, WIDTH), np.float32)
    calls = {
        "keys": lambda: pool.keys(0),
        "scales": lambda: pool.scales(0),
        "compact.rope": lambda: pool.compact(0, seq, [*range(32)], rope=tikv.Rope(np.ones(WIDTH // 2))),
        "commit": lambda: pool.commit([seq], [0]),
        "write_qkv": lambda: pool.write_qkv(0, np.ones((1, 8 * WIDTH), np.float32), [seq], num_q_heads=4),
        "window": lambda: pool.attend(0, q, [seq], window=8),
        "token_ids": lambda: pool.add([1, 2, 3]),
    }
    for name, call in calls.items():
        with pytest.raises(tikv.OptionError, match=name):
            call()
    with pytest.raises(tikv.CapacityError):
        pool.append(0, *[np.ones((200, HEADS, WIDTH), np.float32)] * 2, [seq], [0, 200])
    for more, match in (
        ({"softcap": -1.0}, "softcap=-1.0 is not a positive number"),
        ({"scale": np.nan}, "scale=nan is not a finite number"),
        ({"sink_logits": np.zeros(3, np.float32)}, "sink_logits is"),
    ):
        with pytest.raises(tikv.TikvError, match=match):
            pool.extend(0, np.ones((3, Q_HEADS, WIDTH), np.float32), rows[:3], rows[:3], [seq], [0, 3], **more)
    with pytest.raises(tikv.PositionError, match="not codes yet"):
        pool.attend(0, np.ones((1, 80, Q_HEADS, WIDTH), np.float32), [seq])
    assert pool.length(seq) == 100
    assert pool.tokens(0, seq)[0].shape == (100, HEADS, WIDTH)
