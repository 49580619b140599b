"""Formats of groups whose first and newest tokens stay as they came: ``tikv.Quant(sinks=, recent=)``."""

import copy

import numpy as np
import oracle
import pytest

import tikv

pytestmark = pytest.mark.thorough

BATCH, HEADS, QUERIES, WIDTH = 2, 2, 4, 64


def rows_of(rng, arch, count, heads=HEADS):
    return oracle.place(rng.standard_normal((BATCH, count, heads, WIDTH)).astype(np.float16), arch)


def attention(q, k, v):
    """Attention of the newest token's query in float64."""
    k, v = (np.repeat(oracle.to_numpy(a).astype(np.float64), QUERIES // HEADS, axis=1) for a in (k, v))
    scores = oracle.to_numpy(q).astype(np.float64).swapaxes(1, 2) @ k.swapaxes(-1, -2) / np.sqrt(WIDTH)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


@pytest.mark.parametrize(
    ("quant", "options"),
    [
        (tikv.Quant(4, 64, sinks=4, recent=64), {}),
        pytest.param(tikv.Quant(2, 32, sinks=3), {}, marks=pytest.mark.full),
        pytest.param(tikv.Quant(4, 32, recent=33, rotate="hadamard"), {}, marks=pytest.mark.full),
        (tikv.Quant(4, 32, sinks=2, recent=16), {"v_dtype": "float16"}),
        (tikv.Quant(4, 32, recent=40), {"window": 100, "sinks": 4}),
        (tikv.Quant(3, 32, "tokens", 32, sinks=5), {}),
    ],
    ids=str,
)
def test_older_tokens_have_the_bits_of_the_plain_format(arch, rng, tmp_path, quant, options):
    """First and newest tokens have the bits that were given, all others those of a store without sinks and recent."""
    if arch == "vulkan" and not (quant.sinks and quant.recent):
        pytest.skip("other kernels than the first case's are compiled for the formats without sinks and recent tokens")
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 500, "batch_size": BATCH, **options}
    store = tikv.KVCacheStore(**form, dtype=quant)
    plain = tikv.KVCacheStore(**form, dtype=tikv.Quant(quant.bits, quant.group, rotate=quant.rotate))
    exact = tikv.KVCacheStore(**form, dtype="float16") if not options.get("v_dtype") else None
    sinks = quant.sinks or options.get("sinks", 0)
    for count in (2, 70, 1, 60, 1, 130):
        k, v = rows_of(rng, arch, count), rows_of(rng, arch, count)
        for each in (store, plain, exact):
            if each is not None:
                each.append(0, k, v)
        new = store.length - sinks - store.quantised(0)
        assert store.length <= sinks + new or quant.newest <= new <= quant.newest + quant.group
        q = rows_of(rng, arch, 1, QUERIES)
        held = store.tokens(0)
        expected = attention(q, *held)
        assert abs(oracle.to_numpy(store.attend(0, q)) - expected).max() <= 2.0**-9 * abs(expected).max()
        if exact is not None and quant.axis == "head_dim":
            for a, codes, numbers in zip(held, plain.tokens(0), exact.tokens(0), strict=True):
                both = oracle.to_numpy(codes).copy()
                for of_rows in (slice(0, sinks), slice(both.shape[2] - new, None)):
                    both[:, :, of_rows] = oracle.to_numpy(numbers)[:, :, of_rows]
                oracle.assert_same_bits(a, both)
    store.trim(max(1, quant.newest))
    path = tmp_path / "recent.safetensors"
    store.save(path)
    again, q = tikv.KVCacheStore.load(path), rows_of(rng, arch, 1, QUERIES)
    assert repr(again) == repr(store)
    oracle.assert_same_bits(again.attend(0, q), oracle.to_numpy(store.attend(0, q)))
    k, v = rows_of(rng, arch, 40), rows_of(rng, arch, 40)
    q = rows_of(rng, arch, 40, QUERIES)
    out = oracle.to_numpy(store.extend(0, q, k, v))[:, -1:]
    expected = attention(oracle.place(np.ascontiguousarray(oracle.to_numpy(q)[:, -1:]), arch), *store.tokens(0))
    assert abs(out - expected).max() <= 2.0**-9 * abs(expected).max()


def seen(q, k, v, cap):
    """(T, Hq, D) queries of the newest of n tokens: results, log-sum-exps and weights in float64."""
    q, k, v = (oracle.to_numpy(a).astype(np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, QUERIES // HEADS, axis=1) for a in (k, v))
    scores = np.einsum("thd,nhd->thn", q, k) / np.sqrt(WIDTH)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    hidden = np.arange(len(k)) > len(k) - len(q) + np.arange(len(q))[:, None]
    scores = np.where(hidden[:, None], -np.inf, scores)
    lse = np.logaddexp.reduce(scores, axis=-1)
    weights = np.exp(scores - lse[..., None])
    return np.einsum("thn,nhd->thd", weights, v), lse, weights


class Pool:
    """A pool, and of each sequence a store of its own."""

    def __init__(self, rng, arch, size, **form):
        self.rng, self.arch = rng, arch
        self.form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, **form}
        self.pool, self.stores = tikv.PagedKVCacheStore(num_blocks=40, block_size=size, **self.form), {}

    def rows(self, count, heads=HEADS):
        return oracle.place(self.rng.standard_normal((count, heads, WIDTH)).astype(np.float16), self.arch)

    def add(self, store=None, seq=None):
        seq = self.pool.add() if seq is None else seq
        self.stores[seq] = tikv.KVCacheStore(capacity=900, **self.form) if store is None else copy.deepcopy(store)
        return seq

    def append(self, counts, by_extend=False):
        bounds = np.cumsum([0, *counts.values()])
        q, k, v = self.rows(bounds[-1], QUERIES), self.rows(bounds[-1]), self.rows(bounds[-1])
        out = None
        if by_extend:
            out = oracle.to_numpy(self.pool.extend(0, q, k, v, list(counts), bounds))
        else:
            self.pool.append(0, k, v, list(counts), bounds)
        for seq, first, end in zip(counts, bounds, bounds[1:], strict=False):
            if by_extend and end > first:
                want = self.stores[seq].extend(0, q[first:end], k[first:end], v[first:end])
                assert abs(out[first:end] - oracle.to_numpy(want)).max() <= 2.0**-9
            elif end > first:
                self.stores[seq].append(0, k[first:end], v[first:end])
        self.check()

    def check(self):
        for seq, store in self.stores.items():
            for got, want in zip(self.pool.tokens(0, seq), store.tokens(0), strict=True):
                oracle.assert_same_bits(got, np.ascontiguousarray(want.copy_to_host()[0].swapaxes(0, 1)), what=f"{seq}")

    def attend(self, seqs, cap=None):
        """Queries of one token and of as many as can be, their log-sum-exps and masses, against the definition."""
        held = {seq: self.pool.tokens(0, seq) for seq in seqs}
        coded = {seq: self.stores[seq].quantised(0) for seq in seqs}
        sinks = self.form["dtype"].sinks
        most = min(len(held[seq][0]) - coded[seq] - (sinks if coded[seq] else 0) for seq in seqs)
        for tokens in (1, min(5, most)):
            q = oracle.to_numpy(self.rows(len(seqs) * tokens, QUERIES)).reshape(len(seqs), tokens, QUERIES, WIDTH)
            placed = oracle.place(q, self.arch)
            out, lse, mass = self.pool.attend(0, placed, seqs, return_lse=True, return_mass=True, softcap=cap)
            greatest = self.pool.attend(0, placed, seqs, return_mass="max", softcap=cap)[1]
            for b, seq in enumerate(seqs):
                want, want_lse, weights = seen(q[b], *held[seq], cap)
                by_head = weights.transpose(1, 0, 2).reshape(HEADS, -1, weights.shape[-1])
                n = by_head.shape[-1]
                np.testing.assert_allclose(oracle.to_numpy(out)[b], want, atol=2.0**-9)
                np.testing.assert_allclose(oracle.to_numpy(lse)[b], want_lse, atol=1e-3)
                np.testing.assert_allclose(oracle.to_numpy(mass)[b, :, :n], by_head.sum(1), atol=1e-3)
                np.testing.assert_allclose(oracle.to_numpy(greatest)[b, :, :n], by_head.max(1), atol=1e-3)
                assert not oracle.to_numpy(mass)[b, :, n:].any()

    def read_over(self, counts):
        """`extend` with ``keep=False``, whose tokens see what is held and each other."""
        bounds = np.cumsum([0, *counts.values()])
        q, k, v = self.rows(bounds[-1], QUERIES), self.rows(bounds[-1]), self.rows(bounds[-1])
        got = self.pool.extend(0, q, k, v, list(counts), bounds, keep=False, return_lse=True, return_mass=True)
        out, lse, mass = map(oracle.to_numpy, got)
        for i, (seq, first, end) in enumerate(zip(counts, bounds, bounds[1:], strict=False)):
            held = [oracle.to_numpy(a).astype(np.float32) for a in self.pool.tokens(0, seq)]
            new = [oracle.to_numpy(a)[first:end].astype(np.float32) for a in (k, v)]
            both = (np.concatenate(pair) for pair in zip(held, new, strict=True))
            want, want_lse, weights = seen(oracle.to_numpy(q)[first:end], *both, None)
            n = len(held[0])
            by_head = weights[..., :n].transpose(1, 0, 2).reshape(HEADS, -1, n)
            np.testing.assert_allclose(out[first:end], want, atol=2.0**-8)
            np.testing.assert_allclose(lse[first:end], want_lse, atol=1e-3)
            np.testing.assert_allclose(mass[i, :, :n], by_head.sum(1), atol=1e-3)
        self.check()


@pytest.mark.parametrize(
    ("quant", "size", "options"),
    [
        (tikv.Quant(4, 32, sinks=4, recent=40), 64, {}),
        pytest.param(tikv.Quant(8, 64, recent=33, rotate="hadamard"), 64, {}, marks=pytest.mark.full),
        pytest.param(tikv.Quant(3, 32, sinks=40, recent=16), 32, {"v_dtype": "float16"}, marks=pytest.mark.full),
        pytest.param(tikv.Quant(4, 32, "tokens", 32, sinks=5), 32, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.full("vulkan")
def test_pools(arch, rng, tmp_path, quant, size, options):
    """Sequences of different lengths hold what stores of one sequence do, also after forks, swaps and from files."""
    if arch == "vulkan" and not (quant.sinks and quant.recent and not options):
        pytest.skip("other kernels than the first case's are compiled for the formats without sinks and recent tokens")
    pool, group, sinks = Pool(rng, arch, size, dtype=quant, **options), quant.group, quant.sinks
    a, b = pool.add(), pool.add()
    for i, counts in enumerate(((2, 130), (70, 1), (1, 100), (90, 0), (1, 1))):
        pool.append(dict(zip((a, b), counts, strict=True)), by_extend=i % 2 > 0)
        pool.attend([b, a], (None, 20.0)[i % 2])
    pool.read_over({b: 7, a: 40})
    assert pool.stores[b].quantised(0)

    c = pool.add(pool.stores[b], pool.pool.fork(b))
    pool.append({b: 41, c: 75})  # codes of different tokens go to a block that both shared
    pool.append({c: 1, b: 80, a: 3})
    pool.attend([a, b, c])
    with pytest.raises(tikv.PositionError, match="are codes of whole groups"):
        pool.pool.truncate(c, sinks + group + 1)
    for n in (pool.stores[c].length - 1, sinks + 2 * group, min(2, sinks)):
        pool.pool.truncate(c, n)
        pool.stores[c].trim(pool.stores[c].length - n)
        pool.append({c: 80})
        pool.append({c: 30, b: 1}, by_extend=True)
    pool.attend([c, b])

    k, v = pool.rows(1), pool.rows(1)
    for start in (pool.stores[b].length - 1, *range(min(1, sinks))):
        pool.pool.rewrite(0, b, start, k, v)
        pool.stores[b].rewrite(0, start, k[None], v[None])
    with pytest.raises(tikv.PositionError, match="are codes, quantised once"):
        pool.pool.rewrite(0, b, sinks, k, v)
    pool.pool.swap_out(b)
    path = tmp_path / "pool.safetensors"
    pool.pool.save(path)
    store = pool.stores.pop(b)
    pool.append({a: 1})
    pool.pool.swap_in(b)
    pool.stores[b] = store
    pool.check()
    pool.pool = tikv.PagedKVCacheStore.load(path)
    pool.pool.free(a)
    del pool.stores[a]
    pool.pool.swap_in(b)
    pool.append({b: 100, c: 3})
    pool.attend([b, c])


@pytest.mark.parametrize("quant", [tikv.Quant(4, 32, sinks=4, recent=40), tikv.Quant(4, 32, recent=16)], ids=str)
@pytest.mark.archs("cpu", "cuda")
def test_a_pool_is_compacted_to_whole_groups(arch, rng, quant):
    pool, sinks = Pool(rng, arch, 64, dtype=quant), quant.sinks
    a = pool.add()
    pool.append({a: sinks + 150})
    b = pool.add(pool.stores[a], pool.pool.fork(a))
    coded = pool.stores[a].quantised(0)
    keep = [*range(sinks), *range(sinks + 32, sinks + 64), sinks + coded, *range(sinks + coded + 4, sinks + 150, 2)]
    for wrong in [keep[: sinks + 20], [*range(sinks + 31), *keep[-3:]]] + [keep[1:]] * min(1, sinks):
        with pytest.raises(tikv.PositionError, match=r"which share scales|one of its 4 sinks"):
            pool.pool.compact(0, b, wrong)
    want = [x.copy_to_host()[keep] for x in pool.pool.tokens(0, b)]
    pool.pool.compact(0, b, keep)
    del pool.stores[b]
    pool.check()
    for got, rows in zip(pool.pool.tokens(0, b), want, strict=True):
        oracle.assert_same_bits(got, rows)
    keep = [1, len(keep) - 1]
    if sinks:  # without one of them no group may stay, and the next tokens take its place
        want = [rows[keep] for rows in want]
        pool.pool.compact(0, b, keep)
        rows = oracle.to_numpy(pool.rows(90))
        pool.pool.append(0, *[oracle.place(rows, arch)] * 2, [b], [0, 90])
        for got, held in zip(pool.pool.tokens(0, b), want, strict=True):
            oracle.assert_same_bits(oracle.to_numpy(got)[:4], np.concatenate([held, rows[:2].astype(np.float32)]))
    pool.check()


FORM = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "capacity": 100}
PAGED = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "num_blocks": 4, "dtype": tikv.Quant(4, 32, recent=3)}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: tikv.Quant(4, sinks=-1), "sinks=-1 is not supported"),
        (lambda: tikv.Quant(4, recent=True), "recent=True is not supported"),
        (lambda: tikv.Quant(4, 32, "tokens", 32, recent=3), "recent=3 with axis='tokens' is not supported"),
        (
            lambda: tikv.KVCacheStore(**FORM, dtype=tikv.Quant(4, sinks=2), window=50),
            "with sinks=0 or a window is not supported",
        ),
        (lambda: tikv.KVCacheStore(**FORM, dtype="float16", v_dtype=tikv.Quant(4, sinks=2)), "sinks and recent"),
        (lambda: tikv.quantize(np.ones((1, 64), np.float32), tikv.Quant(4, recent=2)), "sinks and recent tokens are"),
        (lambda: tikv.PagedKVCacheStore(**PAGED), "block_size=16 is not a multiple of the group of 32"),
        (lambda: tikv.PagedKVCacheStore(**PAGED, block_size=32, per_head=True), "per_head=True with Quant.*another"),
        (lambda: tikv.PagedKVCacheStore(**PAGED, block_size=32, page_summaries=16), "page_summaries=16 with Quant"),
        (lambda: tikv.PagedKVCacheStore(**PAGED, block_size=32, layout="HND"), "layout='HND' with Quant"),
        (
            lambda: tikv.PagedKVCacheStore(**PAGED, block_size=32).add([1]),
            "a pool of Quant.* cannot be found by",
        ),
        (lambda: tikv.PagedKVCacheStore(**PAGED, block_size=32).commit([0], []), "a pool of Quant.* does not support"),
        (lambda: tikv.PagedKVCacheStore(**PAGED, block_size=32).keys(0), "a pool of Quant.* Read tokens"),
    ],
)
@pytest.mark.archs("cpu")
def test_refused(arch, call, match):
    with pytest.raises(tikv.OptionError, match=match):
        call()
