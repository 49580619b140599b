"""Stores and pools of KVarN's tiles: the bits of the reference, and attention over what the codes stand for."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from inside import storage_of
from launch_counter import count_launches

import tikv
from tikv import formats, launch, reference
from tikv.arrays import read_host, runtime_of
from tikv.ops.attention.coded_tiles import tile_parts
from tikv.ops.attention.families.family import Family
from tikv.stores.layers import coded_tiles

pytestmark = pytest.mark.thorough

BATCH, HEADS, QUERIES = 2, 2, 4  # queries are of so many heads
LIMITS = {np.float16: 2.0**-9, ml_dtypes.bfloat16: 2.0**-7, np.float32: 1e-5}  # of the largest result


class Tokens:
    """A store of tiles with one layer, and all rows that it was given."""

    def __init__(self, rng, arch, name, width=64, dtype=np.float16, batch=BATCH, **options):
        self.rng, self.arch, self.format, self.dtype = rng, arch, formats.TILE_FORMATS[name], dtype
        self.batch, self.width, self.sinks, self.window = batch, width, options.get("sinks", 0), options.get("window")
        self.store = tikv.KVCacheStore(
            num_layers=1, num_kv_heads=HEADS, head_dim=width, capacity=900, batch_size=batch, dtype=name, **options
        )
        self.k, self.v = (np.zeros((batch, HEADS, 0, width), dtype) for _ in "kv")
        self.rounds = arch == "cuda"  # decoded tiles, to the dtype of many queries

    def new(self, count, heads=HEADS):
        """Rows as models give them, with channels and tokens of different size, on the device."""
        x = self.rng.standard_normal((self.batch, count, heads, self.width))
        x *= np.exp(self.rng.standard_normal((self.batch, count, heads, 1)) / 2)
        x[..., ::7] *= 5
        return oracle.place(x.astype(self.dtype), self.arch)

    def note(self, k, v):
        for name, rows in (("k", k), ("v", v)):
            more = np.asarray(oracle.to_numpy(rows)).swapaxes(1, 2)
            setattr(self, name, np.concatenate([getattr(self, name), more], axis=2))

    def append(self, count):
        k, v = self.new(count), self.new(count)
        self.store.append(0, k, v)
        self.note(k, v)

    def trim(self, n):
        self.store.trim(n)
        self.k, self.v = self.k[:, :, :-n], self.v[:, :, :-n]

    def as_coded(self, of, rows, coded):
        """Rows as numbers in float32, those of the tokens `coded` as their tiles give them back."""
        numbers, bits = rows.astype(np.float32), self.format.bits(of)
        if coded.stop > coded.start:
            tiles = reference.quantize_tiles(rows[:, :, coded], bits, self.format.group, of)
            numbers[:, :, coded] = reference.dequantize_tiles(*tiles, bits, of)
        return numbers

    def expected(self):
        """What the store stands for."""
        coded, both = slice(self.sinks, self.sinks + self.store.quantised(0)), []
        for of, rows in (("keys", self.k), ("values", self.v)):
            numbers = self.as_coded(of, rows.astype(np.float16), coded)  # as which the newest tokens are stored
            if self.window and numbers.shape[2] > self.window:
                numbers = np.delete(numbers, range(self.sinks, numbers.shape[2] - self.window + self.sinks), axis=2)
            both.append(numbers)
        return both

    def check(self):
        """All that is held, bit for bit, and attention over it."""
        k, v = self.expected()
        for a, numbers in zip(self.store.tokens(0), (k, v), strict=True):
            oracle.assert_same_bits(a, numbers)
        q = self.new(1, QUERIES)
        self.compare(self.store.attend(0, q), oracle.to_numpy(q), k, v)

    def seen_by_a_call(self, held):
        """What queries see that came with all tokens from `held` on: tiles that are full before the call are codes."""
        tiles = max(0, held - self.sinks) // self.format.group
        coded = slice(self.sinks, self.sinks + tiles * self.format.group)
        return [self.as_coded(of, rows, coded) for of, rows in (("keys", self.k), ("values", self.v))]

    def as_read(self, numbers, q):
        """What queries read, for each query head: for many, CUDA rounds decoded tiles for its tensor cores."""
        group = q.shape[2] // HEADS
        many = q.shape[1] * group > coded_tiles.MOST_ROWS
        read = numbers.astype(self.dtype) if self.rounds and many else numbers
        return np.repeat(read.astype(np.float64), group, axis=1)

    def logits(self, q, k, cap=None):
        """The logits of the newest tokens' queries, in float64; -inf for keys that they do not see."""
        logits = q.astype(np.float64).swapaxes(1, 2) @ self.as_read(k, q).swapaxes(-1, -2) / np.sqrt(self.width)
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        queries, keys = logits.shape[2:]
        rows, number = np.arange(keys - queries, keys)[:, None], np.arange(keys)
        visible = number <= rows
        if self.window and keys > self.window:
            visible &= (number < self.sinks) | (number > rows - self.window + self.sinks)
        return np.where(visible, logits, -np.inf)

    def weights(self, q, k, cap=None):
        """The weights that the newest tokens' queries give keys, in float64."""
        logits = self.logits(q, k, cap)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def compare(self, out, q, k, v, cap=None):
        """Attention of the newest tokens' queries in float64."""
        exact = (self.weights(q, k, cap) @ self.as_read(v, q)).swapaxes(1, 2)
        limit = LIMITS[q.dtype.type] * abs(exact).max()
        assert abs(oracle.to_numpy(out).astype(np.float64) - exact).max() <= limit


@pytest.fixture
def limits(monkeypatch):
    """Sets how much memory is used, and how many tiles are taken at a time; or that prompts read tiles as on CUDA."""

    def change(of=coded_tiles, **values):
        for name, value in values.items():
            monkeypatch.setattr(of, name, value)

    return change


def on_cuda(live):
    return True


@pytest.mark.parametrize(
    ("name", "width", "sinks", "dtype"),
    [
        pytest.param("kvarn_k4v2_g64", 64, 4, np.float16),
        pytest.param("kvarn_k4v4", 128, 0, np.float32, marks=pytest.mark.archs("cpu", "cuda")),
        pytest.param("kvarn_k4v2", 96, 1, np.float32, marks=pytest.mark.full),
    ],
)
@pytest.mark.full("vulkan")
def test_the_bits_of_the_reference(arch, rng, tmp_path, name, width, sinks, dtype):
    """A tile becomes codes with the first call after the one that fills it; sinks and the open tile stay float16."""
    tokens = Tokens(rng, arch, name, width, dtype, sinks=sinks)
    group = tokens.format.group
    tokens.append(sinks + group - 1)
    tokens.append(1)
    tokens.check()
    assert tokens.store.quantised(0) == 0
    tokens.append(1)
    tokens.check()
    assert tokens.store.quantised(0) == group
    tokens.append(3 * group)  # more than there is room for beside an open tile
    tokens.check()
    taken, path = tokens.store.snapshot(), tmp_path / "tiles.safetensors"
    tokens.store.save(path)
    tokens.append(2)
    tokens.check()
    again = tikv.KVCacheStore.load(path)
    assert (again.dtype.name, again.sinks, again.nbytes) == (name, sinks, tokens.store.nbytes)
    tokens.store.restore(taken)
    for a, b in zip(again.tokens(0), tokens.store.tokens(0), strict=True):
        oracle.assert_same_bits(a, b.copy_to_host())
    tokens.store.reset()
    assert (tokens.store.length, tokens.store.quantised(0)) == (0, 0)


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.archs("cpu", "cuda")
def test_tiles_of_one_call_are_encoded_together(arch, rng, monkeypatch, limits, layout):
    """A few launches for all of them, and the bits of calls that bring few tokens, in what is saved too."""
    limits(TILES_TOGETHER=2 * BATCH * HEADS)
    tokens, others = (Tokens(rng, arch, "kvarn_k4v2_g64", sinks=3) for _ in "ab")
    counted = count_launches(monkeypatch)
    for count, launches in ((3 + 128, 0), (5 * 64, 6), (130, 6), (4 * 64, 6)):
        k, v = tokens.new(count), tokens.new(count)
        given = [oracle.place(np.ascontiguousarray(oracle.to_numpy(a).swapaxes(1, 2)), arch) for a in (k, v)]
        counted.clear()
        tokens.store.append(0, *((k, v) if layout == "token_major" else given), layout=layout)
        assert len([name for name in counted if name.startswith("encode_tiles")]) == launches
        tokens.note(k, v)
        for first in range(0, count, 50):
            others.store.append(0, *(a[:, first : first + 50] for a in (k, v)))
        tokens.check()
        assert tokens.store.quantised(0) <= others.store.quantised(0)
    tokens.append(1)
    others.store.append(0, *(oracle.place(a[:, :, -1:].swapaxes(1, 2).copy(), arch) for a in (tokens.k, tokens.v)))
    held = [storage_of(each.store).filled(0) for each in (tokens, others)]
    for (a, slots), (b, same) in zip(*held, strict=True):
        assert slots == same
        ours, theirs = (np.ascontiguousarray(read_host(each, runtime_of())[:, :, :slots]) for each in (a, b))
        oracle.assert_same_bits(ours, theirs)


@pytest.mark.archs("cpu", "cuda")
def test_a_call_sees_its_own_rows_as_they_came(arch, rng):
    tokens = Tokens(rng, arch, "kvarn_k4v2_g64", sinks=2)
    tokens.append(100)
    for count in (1, 7, 200):
        q, k, v = tokens.new(count, QUERIES), tokens.new(count), tokens.new(count)
        tokens.store.extend(0, q, k, v, keep=False)
        held = tokens.store.length
        out, lse = tokens.store.extend(0, q, k, v, return_lse=True)
        assert (tokens.store.length, lse.shape) == (held + count, (BATCH, count, QUERIES))
        tokens.note(k, v)
        tokens.compare(out, oracle.to_numpy(q), *tokens.seen_by_a_call(held))
        assert tokens.store.quantised(0) >= (held - 2) // 64 * 64
        tokens.check()


@pytest.mark.parametrize(
    ("name", "most", "options"),
    [
        ("kvarn_k4v2_g64", 1 << 27, {"sinks": 2}),
        ("kvarn_k4v2_g64", 1 << 27, {"window": 150, "sinks": 3}),
        pytest.param("kvarn_k4v4_g64", 1 << 18, {}, marks=pytest.mark.archs("cpu", "cuda")),
    ],
)
@pytest.mark.archs("cpu", "vulkan", "cuda")
@pytest.mark.full("vulkan")
def test_a_prompt_reads_decoded_tiles_as_a_cache(arch, rng, monkeypatch, limits, name, most, options):
    """As on CUDA: tiles are decoded once and nothing is merged, but for prompts that lack the room for that."""
    limits(joins_tokens=on_cuda, JOINED_BYTES=most)
    limits(Family, most_queries=1 << 14)
    tokens = Tokens(rng, arch, name, **options)
    tokens.rounds = True
    counted = count_launches(monkeypatch)
    for count in (20, 130, 9, 300):
        q, k, v = tokens.new(count, QUERIES), tokens.new(count), tokens.new(count)
        held = tokens.store.length
        joins = BATCH * HEADS * 2 * 64 * 2 << (held + count - 1).bit_length() <= most
        unkept, lse = map(oracle.to_numpy, tokens.store.extend(0, q, k, v, keep=False, return_lse=True))
        logits = rng.standard_normal(QUERIES).astype(np.float32)
        sunk = tokens.store.extend(0, q, k, v, keep=False, sink_logits=oracle.place(logits, arch))
        expected = unkept / (1 + np.exp(logits - lse))[..., None]
        assert abs(oracle.to_numpy(sunk) - expected).max() <= 2.0**-9 * abs(expected).max()
        counted.clear()
        out = tokens.store.extend(0, q, k, v)
        merges = [name for name in counted if name.startswith("merge_states")]
        assert len(merges) == (0 if joins or not held else 2)  # of old and newest tokens, and of the call's
        tokens.note(k, v)
        tokens.compare(out, oracle.to_numpy(q), *tokens.seen_by_a_call(held))


@pytest.mark.parametrize(
    ("kind", "queries", "options", "rounds"),
    [
        ("sum", None, {"sinks": 2}, False),
        ("max", 5, {}, True),
        ("last", None, {"sinks": 2}, False),
        ("last", None, {"sinks": 2}, True),
        ("sum", None, {"window": 150, "sinks": 3}, True),
    ],
)
@pytest.mark.archs("cpu", "cuda")
def test_the_mass_of_what_a_call_attends_over(arch, rng, limits, kind, queries, options, rounds):
    """`extend` weighs held codes, and its own tokens as they came; so does `attend` after it, if they are few.

    Where decoded tiles are rounded for many queries, those that weigh read them as all queries did.
    """
    if rounds:
        limits(joins_tokens=on_cuda)
    tokens = Tokens(rng, arch, "kvarn_k4v2_g64", **options)
    total, window, tokens.rounds = None, (tokens.window or 10_000) - tokens.sinks, rounds or arch == "cuda"
    for count in (1, 100, 7, 200):
        q, k, v = tokens.new(count, QUERIES), tokens.new(count), tokens.new(count)
        held = tokens.store.length
        coded = max(0, held - tokens.sinks) // 64 * 64
        tokens.note(k, v)
        keys = tokens.k.astype(np.float32)
        if coded:
            tiles = reference.quantize_tiles(tokens.k[:, :, tokens.sinks : tokens.sinks + coded], 4, 64, "keys")
            keys[:, :, tokens.sinks : tokens.sinks + coded] = reference.dequantize_tiles(*tiles, 4, "keys")
        before = [oracle.to_numpy(a) for a in tokens.store.tokens(0)], tokens.store.quantised(0)
        wrong = oracle.place(np.zeros((BATCH, HEADS, 999), np.float32), arch)
        with pytest.raises(tikv.ShapeError, match="mass_into"):
            tokens.store.extend(0, q, k, v, return_mass=kind, mass_into=wrong)
        assert (tokens.store.length, tokens.store.quantised(0)) == (held, before[1])
        for a, numbers in zip(tokens.store.tokens(0), before[0], strict=True):
            oracle.assert_same_bits(a, numbers)

        length, first = held + count, max(tokens.sinks, held + count - window)
        seen = [*range(min(length, tokens.sinks)), *range(min(length, first), length)]
        total = oracle.place(rng.random((BATCH, HEADS, len(seen)), np.float32), arch)
        start = oracle.to_numpy(total).copy()
        _, mass = tokens.store.extend(0, q, k, v, return_mass=kind, mass_queries=queries, mass_into=total)
        assert mass is total
        logits, rows = tokens.logits(oracle.to_numpy(q), keys), np.arange(held, length)[:, None]
        number = np.arange(length)
        logits = np.where((number < tokens.sinks) | (number > rows - window), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True)).reshape(BATCH, HEADS, -1, count, length)[..., seen]
        weights = weights[..., -1 if kind == "last" else -(queries or count) :, :].reshape(BATCH, HEADS, -1, len(seen))
        exact = {"sum": start + weights.sum(2), "max": np.maximum(start, weights.max(2)), "last": weights.sum(2)}
        np.testing.assert_allclose(oracle.to_numpy(mass), exact[kind], atol=2e-4)
        if count <= 7 and not options.get("window"):
            again = tokens.store.attend(
                0, q, return_mass=kind, mass_queries=queries, mass_into=oracle.place(start, arch)
            )
            np.testing.assert_allclose(oracle.to_numpy(mass), oracle.to_numpy(again[1]), atol=1e-5)
        k_held, v_held = tokens.expected()
        oracle.assert_same_bits(tokens.store.tokens(0)[0], k_held)
        oracle.assert_same_bits(tokens.store.tokens(0)[1], v_held)


@pytest.mark.archs("cpu", "cuda")
def test_drafts_enter_no_tile_before_the_next_call(arch, rng):
    """Tokens of one call can be dropped one by one, wherever tiles end."""
    tokens = Tokens(rng, arch, "kvarn_k4v4_g64")
    tokens.append(60)
    tokens.append(10)  # drafts, which fill a tile
    tokens.trim(8)
    tokens.check()
    assert tokens.store.quantised(0) == 0
    tokens.append(64)
    tokens.trim(63)
    tokens.check()
    tokens.append(2)
    tokens.append(1)
    assert tokens.store.quantised(0) == 64
    with pytest.raises(tikv.PositionError, match="Drop at most 2, or 66 for whole groups"):
        tokens.store.trim(3)
    tokens.trim(2)
    tokens.check()
    tokens.append(5)
    tokens.check()


@pytest.mark.archs("cpu", "cuda")
def test_a_window_drops_whole_tiles(arch, rng):
    tokens = Tokens(rng, arch, "kvarn_k4v2_g64", window=150, sinks=3)
    for count in (100, 80, 1, 64, 130, 2):
        tokens.append(count)
        tokens.check()


@pytest.mark.archs("cpu", "cuda")
def test_pieces_of_limited_memory(arch, rng, limits):
    """Memory for scores and for decoded tokens is limited: results over pieces are merged, and each gets its mass."""
    limits(DECODED_BYTES=1 << 19, SCORE_BYTES=1 << 14)
    tokens = Tokens(rng, arch, "kvarn_k4v4_g64", width=128, batch=3, sinks=4)
    tokens.append(4 + 6 * 64)
    tokens.append(20)
    assert tokens.store.quantised(0) == 6 * 64
    k, v = tokens.expected()
    for queries, cap in ((1, None), (3, 30.0), (20, None)):  # few read the codes in place, many decoded tokens
        q = tokens.new(queries, QUERIES)
        out, mass = tokens.store.attend(0, q, return_mass=True, softcap=cap)
        greatest = tokens.store.attend(0, q, return_mass="max", softcap=cap)[1]
        tokens.compare(out, oracle.to_numpy(q), k, v, cap)
        weights = tokens.weights(oracle.to_numpy(q), k, cap).reshape(3, HEADS, -1, k.shape[2])
        np.testing.assert_allclose(oracle.to_numpy(mass), weights.sum(2), atol=1e-4)
        np.testing.assert_allclose(oracle.to_numpy(greatest), weights.max(2), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "width", "group", "queries", "cap", "dtype", "options"),
    [
        ("kvarn_k4v2", 128, 4, 1, None, np.float16, {}),
        ("kvarn_k4v4_g64", 64, 2, 4, None, np.float16, {}),
        ("kvarn_k4v2_g64", 128, 3, 5, 30.0, np.float16, {}),
        ("kvarn_k4v4", 128, 1, 1, None, np.float16, {}),
        ("kvarn_k4v2_g64", 64, 4, 1, None, np.float16, {"window": 500, "sinks": 3}),
        ("kvarn_k4v2_g64", 256, 8, 2, None, np.float16, {}),
        ("kvarn_k4v2", 128, 4, 1, None, ml_dtypes.bfloat16, {}),
    ],
)
@pytest.mark.archs("cuda")
def test_few_rows_on_tensor_cores(arch, rng, monkeypatch, name, width, group, queries, cap, dtype, options):
    """Keys and values in one launch, in one part of the tiles and in several."""
    if reason := launch.why_no_hopper(runtime_of()):
        pytest.skip(reason)
    tokens = Tokens(rng, arch, name, width, batch=3, **options)
    counted = count_launches(monkeypatch)
    for count in (150, 550):
        tokens.append(count)
        tokens.append(queries)
        q = oracle.place(oracle.to_numpy(tokens.new(queries, group * HEADS)).astype(dtype), arch)
        counted.clear()
        out, lse = tokens.store.attend(0, q, softcap=cap, return_lse=True)
        names = [name.partition("(")[0] for name in counted]
        assert [name for name in names if name.endswith("_tiles")] == ["attend_tiles", "merge_tiles"]
        rows, (k, v) = oracle.to_numpy(q), tokens.expected()
        tokens.compare(out, rows, k, v, cap)
        sums = np.log(np.exp(tokens.logits(rows, k, cap)).sum(-1)).swapaxes(1, 2)
        np.testing.assert_allclose(oracle.to_numpy(lse), sums, atol=1e-3)


@pytest.mark.archs("cpu")
def test_parts_of_tiles(arch):
    """Parts have tiles each, and no more parts than pay: 132 multiprocessors hold 3 blocks of 4 warps."""
    for blocks, tiles, expected in ((256, 64, 1), (8, 64, 16), (128, 64, 2), (8, 1, 1), (8, 3, 1), (1, 4000, 63)):
        parts = tile_parts(blocks, tiles, 132, 3, 4)
        assert (parts - 1) * -(-tiles // parts) < tiles
        assert parts == expected


@pytest.mark.archs("cpu", "cuda")
def test_sequences_and_chosen_tokens(arch, rng):
    """Reordering, selecting and compaction of whole tiles, the sinks kept."""
    tokens = Tokens(rng, arch, "kvarn_k4v2_g64", sinks=4)
    tokens.append(4 + 130)
    tokens.append(3)
    tokens.store.reorder([1, 1])
    tokens.k, tokens.v = tokens.k[[1, 1]], tokens.v[[1, 1]]
    tokens.check()
    k, v = tokens.expected()
    order = [*range(4), *range(68, 132), 133, 136]
    tokens.store.compact(0, np.broadcast_to(np.array(order), (BATCH, HEADS, len(order))))
    for a, numbers in zip(tokens.store.tokens(0), (k, v), strict=True):
        oracle.assert_same_bits(a, np.ascontiguousarray(numbers[:, :, order]))
    with pytest.raises(tikv.PositionError, match="which share scales"):
        tokens.store.compact(0, np.broadcast_to(np.array([0, 1, 2, 3, 5]), (BATCH, HEADS, 5)))


@pytest.mark.parametrize(("size", "joins"), [(64, False), (192, True)])
@pytest.mark.archs("cpu", "cuda")
def test_pools(arch, rng, tmp_path, limits, size, joins):
    """Sequences of different lengths hold what stores of one sequence do, also after forks, swaps and from files."""
    if joins:  # as on CUDA
        limits(joins_tokens=on_cuda)
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": 64, "dtype": "kvarn_k4v2_g64"}
    pool = tikv.PagedKVCacheStore(num_blocks=40, block_size=size, **form)
    ids = [pool.add(), pool.add()]
    stores = [tikv.KVCacheStore(capacity=900, **form) for _ in ids]

    def rows(count, heads=HEADS):
        return oracle.place(rng.standard_normal((count, heads, 64)).astype(np.float16), arch)

    def check(pool, number, store):
        for a, b in zip(pool.tokens(0, number), store.tokens(0), strict=True):
            oracle.assert_same_bits(a, np.ascontiguousarray(b.copy_to_host()[0].swapaxes(0, 1)))

    for counts in ((3, 130), (70, 1), (300, 0), (1, 1)):
        bounds = np.array([0, counts[0], sum(counts)], np.int32)
        k, v = rows(bounds[-1]), rows(bounds[-1])
        pool.append(0, k, v, ids, bounds)
        for i, store in enumerate(stores):
            if counts[i]:
                store.append(0, k[bounds[i] : bounds[i + 1]], v[bounds[i] : bounds[i + 1]])
            check(pool, ids[i], store)
        q = rows(2, QUERIES)
        out, mass = pool.attend(0, q, ids, return_mass=True)
        for i, store in enumerate(stores):
            expected, of_store = store.attend(0, q[i : i + 1], return_mass=True)
            assert abs(oracle.to_numpy(out)[i] - oracle.to_numpy(expected)[0]).max() <= 2.0**-9
            weights = oracle.to_numpy(mass)[i, :, : store.length]
            np.testing.assert_allclose(weights, oracle.to_numpy(of_store)[0], atol=1e-4)
    bounds = np.array([0, 90, 240], np.int32)
    q, k, v = rows(240, QUERIES), rows(240), rows(240)
    wrong = oracle.place(np.zeros((2, HEADS, 9), np.float32), arch)
    with pytest.raises(tikv.ShapeError, match="mass_into"):
        pool.extend(0, q, k, v, ids, bounds, return_mass=True, mass_into=wrong)
    for i, store in enumerate(stores):
        check(pool, ids[i], store)
    out, mass = pool.extend(0, q, k, v, ids, bounds, return_mass="max", mass_queries=100)
    out, mass = oracle.to_numpy(out), oracle.to_numpy(mass)
    for i, store in enumerate(stores):
        part = slice(bounds[i], bounds[i + 1])
        expected, of_store = store.extend(0, q[part], k[part], v[part], return_mass="max", mass_queries=100)
        assert abs(out[part] - oracle.to_numpy(expected)).max() <= 2.0**-9
        np.testing.assert_allclose(mass[i, :, : store.length], oracle.to_numpy(of_store)[0], atol=1e-4)
        assert not mass[i, :, store.length :].any()
        check(pool, ids[i], store)
    other = pool.fork(ids[1])
    check(pool, other, stores[1])
    before = stores[1].snapshot()
    pool.truncate(other, stores[1].length - 3)
    stores[1].trim(3)
    for count in (5, 100):
        pool.append(0, k[:count], v[:count], [other], np.array([0, count], np.int32))
        stores[1].append(0, k[:count], v[:count])
    check(pool, other, stores[1])
    with pytest.raises(tikv.PositionError, match="are codes of whole groups"):
        pool.truncate(other, 65)
    pool.swap_out(other)
    path = tmp_path / "pool.safetensors"
    pool.save(path)
    again = tikv.PagedKVCacheStore.load(path)
    for each in (pool, again):
        each.swap_in(other)
        check(each, other, stores[1])
        check(each, ids[0], stores[0])
    stores[1].restore(before)
    check(pool, ids[1], stores[1])


FORM = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "capacity": 300, "dtype": "kvarn_k4v2_g64"}
ROW = np.ones((1, 1, 32), np.float32)


def _store(**options):
    return tikv.KVCacheStore(**{**FORM, **options})


def _pool(**options):
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "num_blocks": 2, "block_size": 64}
    return tikv.PagedKVCacheStore(**{**form, "dtype": "kvarn_k4v2_g64", **options})


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: _store(head_dim=48), tikv.ShapeError, "head_dim is 48; kvarn_k4v2_g64 supports .* a multiple of 32"),
        (lambda: _store(v_dtype="int8"), tikv.OptionError, "v_dtype='int8' does not apply to kvarn_k4v2_g64"),
        (lambda: _store(scale_dtype="float32"), tikv.OptionError, "scale_dtype='float32' does not apply to kvarn"),
        (lambda: _store(k_scale=2.0), tikv.OptionError, "k_scale with kvarn_k4v2_g64 is not supported"),
        (lambda: _store(dtype="int8", v_dtype="kvarn_k4v2"), tikv.DTypeError, "kvarn_k4v2"),
        (lambda: _pool(block_size=96), tikv.OptionError, "not a multiple of the group of 64"),
        (lambda: _pool(layout="HND"), tikv.OptionError, "layout='HND'"),
        (lambda: _store(dtype="int8", sinks=2), tikv.OptionError, "sinks=2 needs a window"),
        (lambda: _store().extend(0, ROW, ROW, ROW, parents=np.array([[-1]])), tikv.OptionError, "parents"),
        (lambda: _store().keys(0), tikv.OptionError, "a store of kvarn_k4v2_g64 .*Read tokens"),
        (lambda: _store().commit(0), tikv.OptionError, "a store of kvarn_k4v2_g64 does not support this"),
        (lambda: _pool().commit([0], []), tikv.OptionError, "a pool of kvarn_k4v2_g64"),
        (lambda: tikv.compile_step(_store()), tikv.OptionError, "compile_step"),
    ],
)
@pytest.mark.archs("cpu")
def test_refused(arch, call, error, match):
    with pytest.raises(error, match=match):
        call()
