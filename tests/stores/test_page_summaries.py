"""The summaries that a store keeps have the bits of `reference.summarize_pages` of what it holds; the rest stays."""

import copy

import numpy as np
import oracle
import pytest
from launch_counter import count_launches

import tikv
from tikv import reference, runtime
from tikv.arrays import read_host

HEADS, WIDTH, PAGE, CAPACITY = 2, 8, 4, 23
NUMBERS = ("float32", "float16", "bfloat16", "float8_e4m3fn")  # of which the append's launch keeps summaries
QUANT = tikv.Quant(bits=4, group=32)


def store_of(dtype="float32", batch=1, layers=2, width=WIDTH, **form):
    return tikv.KVCacheStore(num_layers=layers, num_kv_heads=HEADS, head_dim=width, capacity=CAPACITY, dtype=dtype,
                             batch_size=batch, page_summaries=PAGE, **form)  # fmt: skip


def rows(rng, arch, *lead, width=WIDTH):
    """K and V, of which zeros have either sign and some become zeros when they are rounded."""
    found = rng.standard_normal((2, *lead, HEADS, width)).astype(np.float32)
    small = rng.choice([0.0, -0.0, 1e-30, -1e-30], found[0].shape)
    found[0] = np.where(rng.random(found[0].shape) < 0.3, small, found[0])
    return [oracle.place(a, arch) for a in found]


def of_contents(keys, lens, page=PAGE):
    """By sequence and head, the summaries of its pages: keys are (B, H, n, D)."""
    for b, h in np.ndindex(keys.shape[:2]):
        yield (b, h), reference.summarize_pages(keys[b, h, : lens[b, h]], int(lens[b, h]), page)


def check(store, layer, page=PAGE):
    """What is kept of pages with tokens has the bits of what is found of the layer's tokens; both arrays."""
    keys = oracle.to_numpy(store.tokens(layer)[0])
    lens = np.broadcast_to(store.held(layer), keys.shape[:2])
    kept = [oracle.to_numpy(a) for a in store.page_summaries(layer)]
    assert kept[0].shape == (store.batch_size, HEADS, -(-store.capacity // page), keys.shape[3])
    for at, wanted in of_contents(keys, lens, page):
        for got, want, name in zip(kept, wanted, ("least", "greatest"), strict=True):
            oracle.assert_same_bits(got[at][: len(want)], want, what=f"{name} of layer {layer}, sequence and head {at}")
    return kept


FORMS = [(name, 1) for name in NUMBERS] + [("float16", 3), ("int8", 2), ("q8_0", 1), (QUANT, 1), ("nvfp4_hadamard", 2)]


@pytest.mark.full(unless=lambda case: case["dtype"] in ("float32", "float16", "int8"))
@pytest.mark.parametrize(("dtype", "batch"), FORMS)
def test_appends(arch, rng, dtype, batch):
    """Single tokens and several, of one layer and of all; pages without new tokens keep every bit of theirs."""
    width = WIDTH if dtype in (*NUMBERS, "int8") else 32
    store = store_of(dtype, batch, width=width)
    before = [check(store, layer) for layer in range(2)]
    for tokens in (1, 2, 1, 5, 1, 4, 9):
        length = store.layer_length(1)
        store.append(1, *rows(rng, arch, batch, tokens, width=width))
        now = check(store, 1)
        changed = slice(length // PAGE, -(-(length + tokens) // PAGE))
        for a, was in zip(now, before[1], strict=True):
            was[:, :, changed] = a[:, :, changed]
            oracle.assert_same_bits(a, was, what="pages without new tokens")
        for a, was in zip(store.page_summaries(0), before[0], strict=True):
            oracle.assert_same_bits(oracle.to_numpy(a), was, what="the other layer")
    store.reset()
    for tokens in (3, 1, 6):
        store.append_all(*(rows(rng, arch, 2, batch, tokens, width=width)))
        if tokens == 3:
            store.compact(0, [[0, 2]] * batch)  # a launch for each layer from now on
        for layer in range(2):
            check(store, layer)


@pytest.mark.archs("cpu", "vulkan")
def test_an_append_takes_one_launch(arch, rng, monkeypatch):
    """Two more where keys have scales: they are decoded, and summarised."""
    store, scaled = store_of("float16"), store_of("int8")
    launches = count_launches(monkeypatch)
    for tokens in (1, 6, 1):
        for each, wanted in ((store, 1), (scaled, 3)):
            launches.clear()
            each.append(0, *rows(rng, arch, 1, tokens))
            assert len(launches) == wanted, launches


def test_keys_and_values_apart(arch, rng):
    """Of different widths and formats, so that K is written by a launch of its own."""
    store = store_of("float16", v_dtype="int8", head_dim_v=16, layers=1)
    for tokens in (5, 1, 3):
        k, v = rows(rng, arch, 1, tokens)[0], rows(rng, arch, 1, tokens, width=16)[1]
        store.append(0, k, v)
        check(store, 0)


@pytest.mark.full
def test_keys_that_are_divided_by_a_scale(arch, rng):
    store = store_of("float8_e4m3fn", layers=1, k_scale=[0.5, 3.0], v_scale=[1.0, 1.0])
    for tokens in (5, 1):
        store.append(0, *rows(rng, arch, 1, tokens))
        assert check(store, 0)[0].dtype == np.float32


@pytest.mark.full(unless=lambda case: case["dtype"] == "float32")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_moves_and_drops_tokens(arch, rng, tmp_path, dtype):
    """Trim, compact, heads of different lengths, commit, reorder, select, snapshots, files, copies."""
    store = store_of(dtype, 2)

    def every():
        for layer in range(2):
            check(store, layer)

    for layer in range(2):
        store.append(layer, *rows(rng, arch, 2, 14))
    for n in (1, 4, 2):
        store.trim(n)
        every()
    for layer in range(2):
        store.append(layer, *rows(rng, arch, 2, 3))
    snapshot = store.snapshot()
    store.append_all(*rows(rng, arch, 2, 2, 5))
    store.commit([[0, 2, 3], [1, 2, 4]])
    every()
    store.compact(0, [[0, 3, 4, 5, 9]] * 2)
    for layer in range(2):
        store.append(layer, *rows(rng, arch, 2, 1))
    every()
    store.compact(1, rng.random((2, HEADS, store.held(1))) < 0.5)
    every()
    for tokens in (1, 5, 1):
        for layer in range(2):
            store.append(layer, *rows(rng, arch, 2, tokens))
        every()
    store.trim(2)
    every()
    store.reorder([1, 0])
    every()
    store.repeat(2)
    every()
    store.select([3, 0, 2])
    every()
    store.save(tmp_path / "store.safetensors")
    store = tikv.KVCacheStore.load(tmp_path / "store.safetensors")
    every()
    store.append(1, *rows(rng, arch, 3, 2))
    every()
    store.restore(snapshot)
    every()
    store.append_all(*rows(rng, arch, 2, 2, 1))
    every()


def test_rotated_keys(arch, rng):
    store = store_of(layers=1)
    store.append(0, *rows(rng, arch, 1, 11))
    store.compact(0, [[1, 2, 5, 8, 9, 10]], rope=tikv.Rope(np.linspace(0.1, 1, WIDTH // 2)))
    check(store, 0)


def test_layers_with_windows_keep_none(arch, rng):
    store = store_of(layers=3, window=[6, None, None], sinks=1)
    for tokens in (4, 1, 7):
        store.append_all(*rows(rng, arch, 3, 1, tokens))
        for layer in range(3):
            store.extend(layer, oracle.place(np.ones((1, 1, 4, WIDTH), np.float32), arch), *rows(rng, arch, 1, 1))
        for layer in (1, 2):
            check(store, layer)
    with pytest.raises(tikv.OptionError, match=r"layer 0 has window=6.*another page"):
        store.page_summaries(0)


def test_positions_on_the_device(arch, rng):
    """A step appends where the device says, and the same array serves `page_scores` all along."""
    store, plain = store_of("float16", 2), store_of("float16", 2)
    step = tikv.compile_step(store, attend=False)
    for _ in range(6):
        k, v = rows(rng, arch, 2, 2, 1)
        step.run(k, v)
        plain.append_all(k, v)
    store.trim(1)
    plain.trim(1)
    k, v = rows(rng, arch, 2, 2, 1)
    step.run(k, v)
    plain.append_all(k, v)
    for layer in range(2):
        check(store, layer)
        for a, b in zip(store.page_summaries(layer), plain.page_summaries(layer), strict=True):
            oracle.assert_same_bits(oracle.to_numpy(a)[:, :, :2], oracle.to_numpy(b)[:, :, :2])


def test_a_token_beyond_the_capacity_is_skipped(arch, rng):
    store = store_of(layers=1)
    positions = oracle.place(np.array([CAPACITY - 3], np.int32), arch)
    store.append(0, *rows(rng, arch, 1, CAPACITY - 3))
    store.append(0, *rows(rng, arch, 1, 5), positions=positions)
    store.advance(3)
    check(store, 0)


def test_an_extend_that_fails_leaves_pages_as_they_were(arch, rng, monkeypatch):
    store = store_of(layers=1)
    store.append(0, *rows(rng, arch, 1, 6))
    before = check(store, 0)

    def refuse(*_):
        raise MemoryError

    monkeypatch.setattr("tikv.stores.layers.extend._Extension.attend_over_layer", refuse)
    with pytest.raises(MemoryError):
        store.extend(0, oracle.place(np.ones((1, 1, 4, WIDTH), np.float32), arch), *rows(rng, arch, 1, 1))
    for a, b in zip(check(store, 0), before, strict=True):
        oracle.assert_same_bits(a[:, :, :2], b[:, :, :2])


def test_queries_choose_by_what_is_kept(arch, rng):
    """The four calls of a decode step, as by summaries that are found anew."""
    store = store_of("float16", layers=1)
    store.append(0, *rows(rng, arch, 1, 21))
    q = oracle.place(rng.standard_normal((1, 4, WIDTH)).astype(np.float32), arch)
    least, greatest = store.page_summaries(0)
    keys = store.tokens(0)[0]
    found = [
        oracle.to_numpy(tikv.page_scores(q, *pair, 21, page=PAGE))[..., :6]
        for pair in ((least, greatest), tikv.summarize_pages(keys, 21, page=PAGE))
    ]
    oracle.assert_same_bits(*found)
    chosen = tikv.select(tikv.page_scores(q, least, greatest, 21, page=PAGE), 2, page=PAGE, valid=21)
    assert oracle.to_numpy(store.attend(0, q, indices=chosen)).shape == (1, 4, WIDTH)


def test_an_older_file_has_none(arch, rng, tmp_path):
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=8, dtype="float32")
    store.append(0, *rows(rng, arch, 1, 3))
    store.save(tmp_path / "store.safetensors")
    with pytest.raises(tikv.OptionError, match="Make it with page_summaries=16"):
        tikv.KVCacheStore.load(tmp_path / "store.safetensors").page_summaries(0)


def test_warmup(arch, rng):
    """Of steps too, where there are some: then an append compiles nothing more."""
    for dtype in ("float16", "int8"):
        store = store_of(dtype, layers=1)
        tikv.warmup(store, query_heads=2 * HEADS, tokens=(1,), formats=["float32"], steps=True, quiet=True)
        live = runtime.current()
        before = set(live.kernels)
        store.append(0, *rows(rng, arch, 1, 1))
        assert set(live.kernels) == before
        check(store, 0)


SIZES = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 32, "capacity": 8}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "error", "match"),
    [
        ({"page_summaries": 0}, tikv.PositionError, "page_summaries"),
        ({"page_summaries": 1.5}, tikv.DTypeError, "page_summaries"),
        ({"page_summaries": True}, tikv.DTypeError, "page_summaries"),
        ({"page_summaries": 16, "window": 4}, tikv.OptionError, "all layers have windows.*another page"),
        ({"page_summaries": 16, "dtype": "float64"}, tikv.DTypeError, "float64, which page_scores cannot read"),
        ({"page_summaries": 16, "dtype": tikv.Quant(bits=4, group=32, axis="tokens", residual=32)}, tikv.OptionError,
         "groups along tokens keeps no summaries"),
    ],
)  # fmt: skip
def test_refused_stores(arch, form, error, match):
    with pytest.raises(error, match=match):
        tikv.KVCacheStore(**SIZES, **form)


@pytest.mark.archs("cpu")
def test_refused_calls_change_nothing(arch, rng):
    store, scaled = store_of(), store_of("int8")
    k, v = rows(rng, arch, 1, 21)
    for each in (store, scaled):
        each.append(0, k, v)
    before = [[oracle.to_numpy(a).copy() for a in each.page_summaries(0)] for each in (store, scaled)]
    for call, error, match in (
        (lambda: store.page_summaries(2), tikv.PositionError, "layer"),
        (lambda: store.append(0, k[:, :3], v[:, :3]), tikv.CapacityError, "23"),
        (lambda: store.append(0, k[:, :1], v[:, :1, :1]), tikv.ShapeError, "v"),
        (lambda: store.compact(0, [[3, 2]]), tikv.PositionError, "2 after 3"),
        (lambda: store.trim(22), tikv.PositionError, "22"),
        (lambda: scaled.append(0, k[:, :1], v[:, :1], positions=np.array([3])), tikv.OptionError,
         "Append without positions"),
        (scaled.positions_on_device, tikv.OptionError, "positions are on the device"),
        (lambda: scaled.advance(1), tikv.OptionError, "positions are on the device"),
        (lambda: tikv.compile_step(scaled, layers=0, attend=False).run(k[:, :1], v[:, :1]), tikv.OptionError,
         "Append without positions"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            call()
        for each, was in zip((store, scaled), before, strict=True):
            for a, b in zip(each.page_summaries(0), was, strict=True):
                oracle.assert_same_bits(a, b)


# --- pools


def pool_of(dtype="float32", layout="NHD", per_head=False, page=PAGE, width=WIDTH, **form):
    form |= {"dtype": dtype, "layout": layout, "per_head": per_head, "page_summaries": page}
    return tikv.PagedKVCacheStore(num_layers=2, num_kv_heads=HEADS, head_dim=width, num_blocks=40, block_size=4, **form)


def check_pool(pool, page=PAGE):
    """Of all sequences, also behind their last page."""
    seqs = [seq for seq in pool.sequences if pool._pages.sequences.states[seq].swapped is None]
    for layer in range(2):
        found = [oracle.to_numpy(a) for a in pool.page_summaries(layer, seqs)]
        for b, seq in enumerate(seqs):
            keys = oracle.to_numpy(pool.tokens(layer, seq)[0]).swapaxes(0, 1)[None]
            lens = np.broadcast_to(pool.held(layer, seq), (1, HEADS))
            for (_, h), wanted in of_contents(keys, lens, page):
                for got, want, name in zip(found, wanted, ("least", "greatest"), strict=True):
                    padded = np.zeros_like(got[b, h])
                    padded[: len(want)] = want
                    what = f"{name} of layer {layer}, sequence {seq}, head {h}"
                    oracle.assert_same_bits(got[b, h], padded, what=what)


POOLS = [
    ("float32", "NHD", False, 4),
    ("float32", "HND", False, 2),
    ("float16", "NHD", True, 4),
    ("int8", "NHD", False, 2),
    ("int8", "HND", True, 4),
    ("bfloat16", "HND", True, 1),
    ("float8_e5m2", "NHD", False, 4),
    ("q8_0", "HND", False, 4),
    ("nvfp4_hadamard", "NHD", True, 2),
]


@pytest.mark.full(unless=lambda case: case["dtype"] in ("float32", "int8"))
@pytest.mark.parametrize(("dtype", "layout", "per_head", "page"), POOLS)
def test_pools(arch, rng, tmp_path, dtype, layout, per_head, page):
    """Appends, forks, cut and compacted sequences, paths, blocks on the host and in files, and copies."""
    width = WIDTH if dtype in (*NUMBERS, "int8", "float8_e5m2") else 32
    pool = pool_of(dtype, layout, per_head, page, width)
    a, b = pool.add(), pool.add()

    def append(seqs, *counts):
        bounds = np.cumsum([0, *counts])
        for layer in range(2):
            k, v = rows(rng, "cpu", int(bounds[-1]), width=width)
            if layer:  # not one row behind the other
                k, v = (np.concatenate([x, x])[::2] for x in (k, v))
            pool.append(layer, oracle.place(k, arch), oracle.place(v, arch), seqs, bounds)
        check_pool(pool, page)

    for counts in ((1, 1), (2, 5), (1, 0), (7, 1)):
        append([a, b], *counts)
    if not per_head:
        c = pool.fork(a)
        append([c, a], 1, 1)
        pool.truncate(c, pool.length(c) - 3)
        check_pool(pool, page)
        append([c, b], 5, 1)
        pool.swap_out(c)
        append([a], 2)
        pool.swap_in(c)
        check_pool(pool, page)
    append([b], 5)
    pool.commit([b], [0, 2, 3])
    check_pool(pool, page)
    held = int(np.max(pool.held(0, a)))
    mask = rng.random((HEADS, held)) < 0.6
    pool.compact(0, a, mask if per_head else mask[0])
    check_pool(pool, page)
    append([a, b], 1, 3)
    pool.truncate(b, pool.length(b) - 2)
    check_pool(pool, page)
    if not per_head:
        pool.save(tmp_path / "pool.safetensors")
        pool = tikv.PagedKVCacheStore.load(tmp_path / "pool.safetensors")
        check_pool(pool, page)
        pool.load_sequences(tmp_path / "pool.safetensors")
        check_pool(pool, page)
        plain = tikv.PagedKVCacheStore(num_layers=2, num_kv_heads=HEADS, head_dim=width, num_blocks=40, block_size=4,
                                       dtype=dtype, layout=layout)  # fmt: skip
        plain.load_sequences(tmp_path / "pool.safetensors")
        plain.save(tmp_path / "plain.safetensors")
        pool = pool_of(dtype, layout, per_head, page, width)
        pool.load_sequences(tmp_path / "plain.safetensors")
        check_pool(pool, page)
    pool = copy.deepcopy(pool)
    append([pool.sequences[0]], 3)


def test_a_pool_with_prefixes_and_fused_rows(arch, rng):
    pool = pool_of("float16")
    prompt = list(range(9))
    a = pool.add(prompt)
    for layer in range(2):
        pool.append(layer, *rows(rng, arch, 9), [a], [0, 9])
    b = pool.add(prompt)
    assert pool.length(b) == 8
    check_pool(pool)
    c = pool.add(prompt[:8])
    assert pool.length(c) == 7, "its last page is not full, though the block that it shares is"
    check_pool(pool)
    for layer in range(2):
        pool.append(layer, *rows(rng, arch, 1), [c])
    check_pool(pool)
    pool.free(c)
    qkv = oracle.place(rng.standard_normal((5, 4 * HEADS * WIDTH)).astype(np.float16), arch)
    for layer in range(2):
        pool.write_qkv(layer, qkv, [a, b], [0, 4, 5], num_q_heads=2 * HEADS)
    check_pool(pool)
    pool.compact(0, a, [1, 2, 5, 8, 9, 12], rope=tikv.Rope(np.linspace(0.1, 1, WIDTH // 2)))
    check_pool(pool)


@pytest.mark.archs("cpu", "vulkan")
def test_an_append_to_a_pool_takes_one_launch(arch, rng, monkeypatch):
    """Two more where keys have scales and a page is full."""
    pools = pool_of("float16"), pool_of("int8")
    seqs = [pool.add() for pool in pools]
    launches = count_launches(monkeypatch)
    for tokens, scaled in ((1, 1), (6, 3), (1, 3), (1, 1)):
        for pool, seq, wanted in zip(pools, seqs, (1, scaled), strict=True):
            launches.clear()
            pool.append(0, *rows(rng, arch, tokens), [seq], [0, tokens])
            assert len(launches) == wanted, launches


def test_a_sequence_of_a_pool_chooses_by_what_is_kept(arch, rng):
    pool = pool_of()
    seqs = [pool.add(), pool.add()]
    pool.append(0, *rows(rng, arch, 30), seqs, [0, 19, 30])
    lens = np.array([19, 11])
    q = oracle.place(rng.standard_normal((2, 4, WIDTH)).astype(np.float32), arch)
    least, greatest = pool.page_summaries(0, seqs)
    scores = tikv.page_scores(q, least, greatest, lens, page=PAGE)
    chosen = tikv.select(scores, 2, page=PAGE, valid=lens)
    out = oracle.to_numpy(pool.attend(0, q, seqs, indices=chosen))
    for b, h in np.ndindex(2, 4):
        k, v = (oracle.to_numpy(a)[:, h // 2] for a in pool.tokens(0, seqs[b]))
        of_pages = reference.summarize_pages(np.ascontiguousarray(k), int(lens[b]), PAGE)
        some = oracle.to_numpy(q)[b, h // 2 * 2 : h // 2 * 2 + 2]
        best = np.argsort(-reference.page_scores(some, *of_pages), kind="stable")[:2]
        at = [n for n in range(lens[b]) if n // PAGE in best]
        want, _ = reference.attention(oracle.to_numpy(q)[b, h], k[at], v[at], scale=WIDTH**-0.5)
        np.testing.assert_allclose(out[b, h], want, rtol=0, atol=2e-5)


def test_no_sequences(arch):
    pool = pool_of()
    assert [a.shape for a in pool.page_summaries(0, [])] == [(0, HEADS, 0, WIDTH)] * 2
    assert [a.shape for a in pool.page_summaries(0, [pool.add()])] == [(1, HEADS, 0, WIDTH)] * 2


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "error", "match"),
    [
        ({"page_summaries": 0}, tikv.PositionError, "page_summaries"),
        ({"page_summaries": 3}, tikv.OptionError, "does not divide block_size=4"),
        ({"page_summaries": 8}, tikv.OptionError, "may not cross blocks"),
        ({"page_summaries": 4, "layout": "VLLM"}, tikv.OptionError, "VLLM cuts rows"),
        ({"page_summaries": 4, "dtype": "float64"}, tikv.DTypeError, "float64, which page_scores cannot read"),
    ],
)
def test_refused_pools(arch, form, error, match):
    with pytest.raises(error, match=match):
        tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=4, block_size=4, **form)


@pytest.mark.archs("cpu")
def test_refused_calls_of_a_pool_change_nothing(arch, rng):
    pool = pool_of()
    seq, other = pool.add(), pool.add()
    k, v = rows(rng, arch, 4 * 45)
    pool.append(0, k[:13], v[:13], [seq], [0, 13])
    pool.append(1, k[:13], v[:13], [seq], [0, 13])

    def summaries():
        return [read_host(a, pool.runtime) for group in pool._pages.pools.groups for a in group.summaries]

    before = summaries()
    for call, error, match in (
        (lambda: pool.page_summaries(0, [5]), tikv.PositionError, "never added"),
        (lambda: pool.page_summaries(2, [seq]), tikv.PositionError, "layer"),
        (lambda: pool_of(page=None).page_summaries(0, []), tikv.OptionError, "Make it with page_summaries=16"),
        (lambda: pool.append(0, k, v, [other], [0, len(k)]), tikv.CapacityError, "free"),
        (lambda: pool.append(0, k[:3], v[:2], [seq], [0, 3]), tikv.ShapeError, "v"),
        (lambda: pool.compact(0, seq, [3, 2]), tikv.PositionError, "2 after 3"),
        (lambda: pool.commit([seq], [0, 14]), tikv.PositionError, "14"),
        (lambda: pool.truncate(seq, 14), tikv.PositionError, "14"),
    ):
        with pytest.raises(error, match=match):
            call()
        after = summaries()
        for a, b in zip(after, before, strict=True):
            oracle.assert_same_bits(a, b)
