"""The paged store: whole pools compared as bits, sequences against lists, and bookkeeping that never loses a block."""

import contextlib
from collections import Counter

import hypothesis
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from launch_counter import count_launches, failing_launches

import tikv
from tikv import arrays, reference
from tikv.stores import limits
from tikv.stores.pools import blocks as block_pool
from tikv.stores.pools.memory import LayerPools

pytestmark = pytest.mark.full(each_value=True)

LAYOUTS = ["NHD", "HND", "VLLM"]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HEADS, WIDTH, SIZE = 2, 16, 4
SCALE = {"float16": np.float16, "float32": np.float32}


def make(dtype="float32", *, layers=2, num_blocks=12, block_size=SIZE, layout="NHD", head_dim=WIDTH, **more):
    return tikv.PagedKVCacheStore(
        num_layers=layers,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        layout=layout,
        **more,
    )


def rows(rng, tokens, dtype=np.float32, width=WIDTH):
    return oracle.random_bits(rng, (tokens, HEADS, width), dtype)


def fill(store, rng):
    """Every byte of every pool becomes a random one."""
    for group in store._pages.pools.groups:
        for array in group.arrays:
            arrays.write_host(oracle.random_bits(rng, array.shape, array.dtype.numpy), array)


def pool_bits(store):
    """A copy of all pools: of each layer K, V and the scales of an int8 store."""
    found = []
    for layer in range(store.num_layers):
        scales = store.scales(layer) if store.dtype.name == "int8" else ()
        found.append([oracle.to_numpy(a) for a in (store.keys(layer), store.values(layer), *scales)])
    return found


def contents(store):
    """What every sequence holds, and all that is counted."""
    held = {
        seq: [[oracle.to_numpy(a).tobytes() for a in store.tokens(layer, seq)] for layer in range(store.num_layers)]
        for seq in store.sequences
    }
    tables = {seq: store.block_table(seq).tolist() for seq in store.sequences}
    return held, tables, store.num_free_blocks, store.num_shared_blocks, store.context_lens.tolist()


def extend(store, rng, seqs, counts):
    """Append random rows of the store's dtype to all layers: the rows of each layer."""
    bounds = np.cumsum([0, *counts])
    given = []
    for layer in range(store.num_layers):
        k, v = (rows(rng, bounds[-1], store.dtype.numpy) for _ in "kv")
        store.append(layer, oracle.place(k, store.runtime.arch), oracle.place(v, store.runtime.arch), seqs, bounds)
        given.append((k, v))
    return given


# --- writing


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_append_changes_the_rows_it_names_and_no_other_bit(arch, rng, dtype, layout):
    store = make(dtype, layout=layout)
    fill(store, rng)
    a, b, c = store.add(), store.add(), store.add()
    before = pool_bits(store)
    for seqs, counts in (([a, b], [6, 1]), ([b, c, a], [4, 0, 3]), ([c, a, b], [1, 1, 1])):
        starts = [store.length(seq) for seq in seqs]
        given = extend(store, rng, seqs, counts)
        slots = []
        for seq, start, count in zip(seqs, starts, counts, strict=True):
            table = store.block_table(seq)
            slots += [table[p // SIZE] * SIZE + p % SIZE for p in range(start, start + count)]
        for layer, pair in enumerate(given):
            for stream, new in enumerate(pair):
                before[layer][stream] = reference.write_slots(new, before[layer][stream], slots, layout=layout)
        for layer, pools in enumerate(pool_bits(store)):
            for name, pool, wanted in zip("kv", pools, before[layer], strict=True):
                oracle.assert_same_bits(pool, wanted, what=f"layer {layer} {name}")
    assert [store.length(seq) for seq in (a, b, c)] == [10, 6, 1]
    assert store.context_lens.tolist() == [10, 6, 1]


@pytest.mark.parametrize(("given", "stored"), [("float32", "float16"), ("float32", "bfloat16")])
def test_narrower_storage_rounds_to_nearest_even(arch, rng, given, stored):
    store = make(stored, layers=1)
    seq = store.add()
    k, v = (oracle.numbers(rng, (7, HEADS, WIDTH), DTYPES[given]) for _ in "kv")
    store.append(0, oracle.place(k, arch), oracle.place(v, arch), [seq], [0, 7])
    for got, want in zip(store.tokens(0, seq), (k, v), strict=True):
        oracle.assert_same_bits(got, reference.encode(want, DTYPES[stored]))


def test_values_may_be_of_another_width(arch, rng):
    store = make("float32", head_dim_v=5)
    seq = store.add()
    k, v = rows(rng, 6), rows(rng, 6, width=5)
    for layer in range(2):
        store.append(layer, oracle.place(k, arch), oracle.place(v, arch), [seq], [0, 6])
    twin = store.fork(seq)
    store.append(0, oracle.place(k[:1], arch), oracle.place(v[:1], arch), [twin])
    for got, want in zip(store.tokens(1, twin), (k, v), strict=True):
        oracle.assert_same_bits(got, want)
    for got, want in zip(store.tokens(0, seq), (k, v), strict=True):
        oracle.assert_same_bits(got, want)


def test_a_decode_step_of_many_sequences_is_one_launch_a_layer(arch, rng, monkeypatch):
    store = make("float16", num_blocks=64)
    seqs = [store.add() for _ in range(9)]
    extend(store, rng, seqs, [1 + i % 5 for i in range(9)])
    k = oracle.place(rows(rng, 9, np.float16), arch)
    counted = count_launches(monkeypatch)
    for layer in range(2):
        store.append(layer, k, k, seqs)
    assert len(counted) == 2
    with pytest.raises(tikv.ShapeError):
        store.append(0, k, k, seqs[:3])
    assert len(counted) == 2


@pytest.mark.parametrize("kind", ["list", "tuple", "int32", "int64", "torch", "device"])
def test_seqs_and_cu_seqlens_may_be_lists_or_arrays_anywhere(arch, rng, kind):
    store = make(layers=1)
    seqs = [store.add(), store.add()]
    given: list = [seqs, [0, 2, 5]]
    if kind == "tuple":
        given = [tuple(x) for x in given]
    elif kind in ("int32", "int64"):
        given = [np.array(x, kind) for x in given]
    elif kind == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.tensor(x) for x in given]
    elif kind == "device":
        given = [
            arrays.CacheArray(arrays.to_device(np.array(x, np.int32), store.runtime), store.runtime) for x in given
        ]
    k = rows(rng, 5)
    store.append(0, oracle.place(k, arch), oracle.place(k, arch), *given)
    oracle.assert_same_bits(store.tokens(0, seqs[0])[0], k[:2])
    oracle.assert_same_bits(store.tokens(0, seqs[1])[1], k[2:])


@pytest.mark.parametrize("more", [{}, {"dtype": "kvarn_k4v4_g64", "block_size": 64, "head_dim": 32}], ids=str)
def test_without_bounds_a_single_sequence_gets_all_rows(arch, rng, more):
    """As in a `KVCacheStore`; of several sequences each gets one row."""
    width = more.get("head_dim", WIDTH)
    k, q = (oracle.place(oracle.numbers(rng, (5, HEADS, width), np.float32), arch) for _ in range(2))
    results, stores = [], []
    for bounds in ({}, {"cu_seqlens": [0, 5]}):
        store = make(layers=1, **more)
        seq = store.add()
        results += [store.extend(0, q, k, k, [seq], keep=False, **bounds), store.extend(0, q, k, k, [seq], **bounds)]
        store.append(0, k, k, [seq], **bounds)
        stores.append(store)
    for got, want in zip(results[:2], results[2:], strict=True):
        oracle.assert_same_bits(got, want)
    assert contents(stores[0]) == contents(stores[1])
    with pytest.raises(tikv.ShapeError, match="one for each sequence, since cu_seqlens is None"):
        store.append(0, k, k, [seq, store.add()])


def test_rows_behind_the_last_bound_are_padding(arch, rng):
    """The original's varlen write put such rows over the beginning of sequence 0."""
    store = make(layers=1)
    fill(store, rng)
    a, b = store.add(), store.add()
    k = rows(rng, 8)
    wide = [oracle.place(k, arch)] * 2
    store.append(0, *wide, [a, b], [0, 3, 5])
    oracle.assert_same_bits(store.tokens(0, a)[0], k[:3])
    oracle.assert_same_bits(store.tokens(0, b)[0], k[3:5])
    before = pool_bits(store)
    store.append(0, *wide, [a, b], [0, 0, 0])
    oracle.assert_same_bits(pool_bits(store)[0][0], before[0][0])
    assert (store.length(a), store.length(b)) == (3, 2)


def test_no_tokens_and_no_sequences_are_a_success_that_still_checks(arch):
    store = make(layers=1)
    seq = store.add()
    none = np.zeros((0, HEADS, WIDTH), np.float32)
    store.append(0, none, none, [])
    store.append(0, none, none, [seq], [0, 0])
    assert (store.length(seq), store.num_free_blocks) == (0, 12)
    with pytest.raises(tikv.ShapeError):
        store.append(0, none[:, :1], none[:, :1], [])
    with pytest.raises(tikv.DTypeError):
        store.append(0, none.astype(np.int32), none.astype(np.int32), [])


def test_layers_of_a_step_may_come_in_any_order_and_composition(arch, rng):
    store = make(layers=3)
    a, b = store.add(), store.add()
    k = [rows(rng, 5) for _ in range(3)]
    for layer in (2, 0):
        store.append(layer, *[oracle.place(k[layer], arch)] * 2, [a, b], [0, 3, 5])
    assert (store.length(a), store.layer_length(2, a), store.layer_length(0, b)) == (0, 3, 2)
    store.append(1, *[oracle.place(k[1][3:], arch)] * 2, [b], [0, 2])
    store.append(1, *[oracle.place(k[1][:3], arch)] * 2, [a], [0, 3])
    for layer in range(3):
        oracle.assert_same_bits(store.tokens(layer, a)[0], k[layer][:3])
        oracle.assert_same_bits(store.tokens(layer, b)[1], k[layer][3:])
    assert store.num_free_blocks == 10


def test_layers_that_need_several_pieces_of_memory(arch, rng, monkeypatch):
    one = make(layers=1)
    per_layer = one.config.bytes_of_layer
    monkeypatch.setitem(limits.SHARED_BYTES, arch, per_layer - 1)
    assert [group.layers for group in make(layers=2)._pages.pools.groups] == [1, 1]
    monkeypatch.setitem(limits.SHARED_BYTES, arch, 2 * per_layer)
    store = make(layers=5)
    assert [group.layers for group in store._pages.pools.groups] == [2, 2, 1]
    a = store.add()
    given = extend(store, rng, [a], [6])
    b = store.fork(a)
    extend(store, rng, [b], [1])
    store.swap_out(a)
    store.swap_in(a)
    for layer, (k, v) in enumerate(given):
        for seq in (a, b):
            oracle.assert_same_bits(oracle.to_numpy(store.tokens(layer, seq)[0])[:6], k)
            oracle.assert_same_bits(oracle.to_numpy(store.tokens(layer, seq)[1])[:6], v)
    monkeypatch.setitem(limits.BLOCK_BYTES, arch, per_layer - 1)
    with pytest.raises(tikv.CapacityError, match="num_blocks=12 x block_size=4"):
        make(layers=5)


# --- int8


@pytest.mark.parametrize("scale_dtype", SCALE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_sequences_of_many_tokens_and_heads_share_a_pool(arch, rng, layout, scale_dtype):
    """The original scrambled tokens and heads of a prompt, and gave each sequence a pool that its block ids left."""
    store = make("int8", layout=layout, scale_dtype=scale_dtype)
    fill(store, rng)
    before = pool_bits(store)
    a, b = store.add(), store.add()
    k, v = (oracle.numbers(rng, (11, HEADS, WIDTH), np.float32) for _ in "kv")
    k[3, 1] = 0
    k[4, 0, 2:5] = np.nan, np.inf, -np.inf
    v[5] *= 1e-7  # the original's float16 scale became 0
    bounds = [0, 4, 11]
    for layer in range(2):
        store.append(layer, oracle.place(k, arch), oracle.place(v, arch), [a, b], bounds)
    assert max(store.block_table(b)) >= 2
    slots = np.concatenate(
        [block_pool.slots_of(store.block_table(seq), np.arange(n), SIZE) for seq, n in ((a, 4), (b, 7))]
    )
    for layer, found in enumerate(pool_bits(store)):
        for stream, new in enumerate((k, v)):
            q, scale = reference.quantize(new, SCALE[scale_dtype])
            wanted = reference.write_slots(q, before[layer][stream], slots, layout=layout)
            oracle.assert_same_bits(found[stream], wanted, what=f"layer {layer} {'kv'[stream]}")
            wanted_scale = before[layer][2 + stream].reshape(-1, HEADS).copy()
            wanted_scale[slots] = scale
            oracle.assert_same_bits(found[2 + stream].reshape(-1, HEADS), wanted_scale, what=f"scales of layer {layer}")
    q, scale = reference.quantize(k, SCALE[scale_dtype])
    wanted = reference.dequantize(q, scale)
    oracle.assert_same_bits(store.tokens(1, a)[0], wanted[:4])
    oracle.assert_same_bits(store.tokens(1, b)[0], wanted[4:])


def test_int8_keeps_within_half_a_step_of_the_scale_as_stored(arch, rng):
    """The original quantised by the scale in float32 and read by its rounding to float16: up to 0.552 of a step."""
    store = make("int8", layers=1, num_blocks=80)
    seq = store.add()
    x = (rng.uniform(-1, 1, (300, HEADS, WIDTH)) * np.exp2(rng.integers(-6, 7, (300, HEADS, 1)))).astype(np.float32)
    store.append(0, oracle.place(x, arch), oracle.place(x, arch), [seq], [0, 300])
    scale = oracle.to_numpy(store.scales(0)[0]).astype(np.float64)
    scale = scale[store.block_table(seq)].reshape(-1, HEADS)[:300, :, None]
    error = np.abs(oracle.to_numpy(store.tokens(0, seq)[0]).astype(np.float64) - x) / scale
    clamped = np.abs(x) > 127 * scale  # the scale was rounded down
    assert error[~clamped].max() <= 0.5 + 1e-4
    assert error[clamped].max(initial=0) <= 0.0625


def test_int8_rounds_ties_to_even(arch):
    """The original's test rounded halves away from zero, its kernel to even."""
    store = make("int8", layers=1)
    seq = store.add()
    x = np.zeros((1, HEADS, WIDTH), np.float32)
    x[0, :, :6] = [127, 0.5, 1.5, 2.5, -0.5, -2.5]
    store.append(0, oracle.place(x, arch), oracle.place(x, arch), [seq])
    assert oracle.to_numpy(store.tokens(0, seq)[0])[0, 0, :6].tolist() == [127, 0, 2, 2, 0, -2]


# --- the whole step


def softmax_attention(q, k, v, window=None, softcap=None):
    """What q (Hq, T, D), the last T tokens, reads of k and v (length, H, D), in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    heads, queries, width = q.shape
    out = np.zeros((heads, queries, v.shape[-1]))
    lse = np.full((heads, queries), -np.inf)
    for h, t in np.ndindex(heads, queries):
        end = len(k) - queries + 1 + t
        start = 0 if window is None else max(0, end - window)
        if end > start:
            kv = h // (heads // k.shape[1])
            scores = k[start:end, kv] @ q[h, t] / np.sqrt(width)
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            top = scores.max()
            weights = np.exp(scores - top)
            out[h, t] = weights @ v[start:end, kv] / weights.sum()
            lse[h, t] = top + np.log(weights.sum())
    return out, lse


@pytest.mark.full(
    unless=lambda case: case["dtype"] in (("float32", "int8") if case["queries"] == 1 else ("float16", "bfloat16"))
)
@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize(("queries", "window"), [(1, None), (3, None), (3, 4)])
def test_attention_reads_what_each_sequence_holds(arch, rng, dtype, queries, window):
    """Also of several queries at once, where the original's int8 form read one."""
    store = make(dtype, layout="HND")
    a, b = store.add(), store.add()
    k, v = (rng.standard_normal((13, HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    for layer in range(2):
        store.append(layer, oracle.place(k, arch), oracle.place(v, arch), [a, b], [0, 5, 13])
    c = store.fork(b)
    for layer in range(2):
        store.append(layer, *[oracle.place(k[:2], arch)] * 2, [c, a])
    seqs = [c, a, b]
    q = rng.standard_normal((3, 2 * HEADS, queries, WIDTH)).astype(np.float32)
    given = oracle.place(np.ascontiguousarray(q[:, :, 0]) if queries == 1 else q, arch)
    layout = "token_major" if queries == 1 else "head_major"
    out, lse = store.attend(1, given, seqs, layout=layout, window=window, return_lse=True)
    shape = q.shape[:2] if queries == 1 else q.shape[:3]
    assert (tuple(out.shape), tuple(lse.shape)) == ((*shape, WIDTH), shape)
    for i, seq in enumerate(seqs):
        kept = [oracle.to_numpy(x).astype(np.float32) for x in store.tokens(1, seq)]
        wanted, wanted_lse = softmax_attention(q[i], *kept, window)
        np.testing.assert_allclose(oracle.to_numpy(out)[i].reshape(wanted.shape), wanted, atol=2e-5)
        np.testing.assert_allclose(oracle.to_numpy(lse)[i].reshape(wanted_lse.shape), wanted_lse, atol=2e-5)


def test_attention_takes_a_softcap_and_a_place_for_the_result(arch, rng):
    store = make(layers=1)
    a, b = store.add(), store.add()
    k, v = (rng.standard_normal((9, HEADS, WIDTH)).astype(np.float32) for _ in "kv")
    store.append(0, oracle.place(k, arch), oracle.place(v, arch), [a, b], [0, 2, 9])
    q = 4 * rng.standard_normal((2, HEADS, WIDTH)).astype(np.float32)
    out = oracle.place(np.full_like(q, np.nan), arch)
    options = {"softcap": 1.5, "impl": "taichi", "out": out}
    assert store.attend(0, oracle.place(q, arch), [a, b], **options) is out
    for i, (first, end) in enumerate(((0, 2), (2, 9))):
        wanted, _ = softmax_attention(q[i][:, None], k[first:end], v[first:end], softcap=1.5)
        np.testing.assert_allclose(oracle.to_numpy(out)[i], wanted[:, 0], atol=2e-5)


def test_attention_follows_the_tables_as_they_change(arch, rng):
    store = make(layers=1)
    a, empty = store.add(), store.add()
    q = oracle.place(rng.standard_normal((2, HEADS, WIDTH)).astype(np.float32), arch)
    k = oracle.place(rng.standard_normal((6, HEADS, WIDTH)).astype(np.float32), arch)

    def check():
        out, lse = store.attend(0, q, [empty, a], return_lse=True)
        out, lse = oracle.to_numpy(out), oracle.to_numpy(lse)
        assert (out[0] == 0).all()
        assert (lse[0] == -np.inf).all()
        kept = [oracle.to_numpy(x) for x in store.tokens(0, a)]
        wanted, _ = softmax_attention(oracle.to_numpy(q)[1][:, None], *kept)
        np.testing.assert_allclose(out[1], wanted[:, 0], atol=1e-5)

    store.append(0, k, k, [a], [0, 6])
    check()
    store.fork(a)
    check()
    store.append(0, k[:1], k[:1], [a])  # its last block is another one now
    check()
    store.truncate(a, 3)
    check()
    store.append(0, k[2:6], k[2:6], [a], [0, 4])
    check()
    store.swap_out(a)
    with pytest.raises(tikv.PositionError, match="swapped out"):
        store.attend(0, q, [empty, a])
    store.add()
    store.append(0, k, k, store.sequences[-1:], [0, 6])
    store.swap_in(a)
    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fused_write_gives_the_bits_of_its_steps(arch, rng, dtype, layout):
    angle = np.arange(64, dtype=np.float32)[:, None] / 100 ** (np.arange(WIDTH // 2, dtype=np.float32) / WIDTH)
    how = tikv.NormRope(
        mode="norm_half",
        q_weight=oracle.place(rng.uniform(0.5, 2, WIDTH).astype(np.float32), arch),
        k_weight=oracle.place(rng.uniform(0.5, 2, WIDTH).astype(np.float32), arch),
        cos=oracle.place(np.cos(angle), arch),
        sin=oracle.place(np.sin(angle), arch),
    )
    fused, steps = make(dtype, layout=layout), make(dtype, layout=layout)
    fill(fused, rng)
    for ours, theirs in zip(fused._pages.pools.groups, steps._pages.pools.groups, strict=True):
        for a, b in zip(ours.arrays, theirs.arrays, strict=True):
            arrays.write_host(arrays.read_host(a, fused.runtime), b)
    for store in (fused, steps):
        store.add(), store.add()
    heads = 3 * HEADS
    for seqs, bounds in (([0, 1], [0, 5, 7]), ([1, 0], None), ([0], [0, 3])):
        tokens = len(seqs) if bounds is None else bounds[-1]
        qkv = rng.standard_normal((tokens, (heads + 2 * HEADS) * WIDTH)).astype(np.float32)
        ends = np.cumsum([0, *np.diff(np.arange(len(seqs) + 1) if bounds is None else bounds)])
        positions = np.concatenate(
            [fused.length(seq) + np.arange(ends[i + 1] - ends[i]) for i, seq in enumerate(seqs)]
        ).astype(np.int32)
        split = [np.ascontiguousarray(x).reshape(tokens, -1, WIDTH)
                 for x in np.split(qkv, [heads * WIDTH, (heads + HEADS) * WIDTH], axis=1)]  # fmt: skip
        rope = oracle.place(positions, arch)
        for layer in range(2):
            q = fused.write_qkv(layer, oracle.place(qkv, arch), seqs, bounds, num_q_heads=heads, norm_rope=how)
            turned = [
                tikv.norm_rope(oracle.place(x, arch), how, weight=name, rope_positions=rope)
                for name, x in zip("qk", split[:2], strict=True)
            ]
            steps.append(layer, turned[1], oracle.place(split[2], arch), seqs, bounds)
            oracle.assert_same_bits(q, turned[0])
    for layer, (got, want) in enumerate(zip(pool_bits(fused), pool_bits(steps), strict=True)):
        for a, b in zip(got, want, strict=True):
            oracle.assert_same_bits(a, b, what=f"layer {layer}")
    with pytest.raises(tikv.PositionError, match="outside the tables"):
        fused.write_qkv(0, oracle.place(qkv, arch), [0], [0, 3], num_q_heads=heads, norm_rope=how,
                        rope_positions=np.array([1, 2, 64], np.int32))  # fmt: skip
    with pytest.raises(tikv.ShapeError, match="width of qkv"):
        fused.write_qkv(0, oracle.place(qkv, arch), [0], [0, 3], num_q_heads=heads + 1, norm_rope=how)
    assert (fused.length(0), fused.length(1), fused.num_free_blocks) == (9, 3, 8)


# --- sharing


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fork_gets_a_copy_of_what_is_written_into(arch, rng, dtype, layout):
    store = make(dtype, layout=layout)
    fill(store, rng)
    a = store.add()
    source = np.float32 if dtype == "int8" else DTYPES[dtype]
    prompt = oracle.place(oracle.numbers(rng, (6, HEADS, WIDTH), source), arch)
    for layer in range(2):
        store.append(layer, prompt, prompt, [a], [0, 6])
    kept = contents(store)[0][a]
    b, c = store.fork(a), store.fork(a)
    assert (store.num_shared_blocks, store.num_free_blocks) == (2, 10)
    assert store.block_table(b).tolist() == store.block_table(a).tolist()
    new = [oracle.place(oracle.numbers(rng, (1, HEADS, WIDTH), source), arch) for _ in range(2)]
    for layer in range(2):
        store.append(layer, new[layer], new[layer], [b])
    assert store.num_shared_blocks == 2, "a and c still share both, b the first"
    assert store.num_free_blocks == 9
    held = contents(store)[0]
    assert held[a] == held[c] == kept
    row = HEADS * WIDTH * (4 if dtype == "int8" else np.dtype(source).itemsize)
    assert [k[: 6 * row] for k, _ in held[b]] == [k for k, _ in kept], "the data was copied in every layer"
    for layer in range(2):
        store.append(layer, *[oracle.place(np.concatenate([oracle.to_numpy(n) for n in new]), arch)] * 2, [a, c])
    assert store.num_free_blocks == 8, "the last to write needs no copy"
    held = contents(store)[0]
    assert len({k for seq in (a, b, c) for k, _ in held[seq][:1]}) == 2
    assert all(k[: 6 * row] == kept[layer][0] for seq in (a, b, c) for layer, (k, _) in enumerate(held[seq]))


def test_a_fork_in_the_middle_of_a_step(arch, rng):
    store = make()
    a = store.add()
    k = [rows(rng, 2) for _ in range(2)]
    store.append(0, *[oracle.place(k[0][:1], arch)] * 2, [a])
    b = store.fork(a)
    store.append(1, *[oracle.place(k[1], arch)] * 2, [a, b])
    assert store.num_free_blocks == 10
    oracle.assert_same_bits(store.tokens(0, b)[0], k[0][:1])
    oracle.assert_same_bits(store.tokens(1, a)[0], k[1][:1])
    oracle.assert_same_bits(store.tokens(1, b)[0], k[1][1:])


def test_a_prefix_is_shared_once_every_layer_has_written_it(arch, rng):
    store = make(num_blocks=20)
    ids = list(range(100, 111))
    a = store.add(ids)
    given = [rows(rng, 11) for _ in range(2)]
    store.append(0, *[oracle.place(given[0], arch)] * 2, [a], [0, 11])
    assert store.length(store.add(ids)) == 0, "layer 1 has not written it yet"
    store.append(1, *[oracle.place(given[1], arch)] * 2, [a], [0, 11])
    b = store.add(np.array(ids, np.int32))
    assert (store.length(b), store.num_shared_blocks) == (8, 2)
    assert store.block_table(b).tolist() == store.block_table(a).tolist()[:2]
    assert store.length(store.add(ids[:8], leave=0)) == 8, "all of it, where it ends with a block"
    assert store.length(store.add(ids[:7])) == 4
    assert store.length(store.add([1, *ids[1:]])) == 0
    assert store.length(store.add([*ids[:5], 1, *ids[6:]])) == 4
    assert store.length(store.add()) == 0
    for layer in range(2):
        oracle.assert_same_bits(store.tokens(layer, b)[0], given[layer][:8])
        store.append(layer, *[oracle.place(given[layer][8:], arch)] * 2, [b], [0, 3])
        oracle.assert_same_bits(store.tokens(layer, b)[1], given[layer])
    assert store.num_free_blocks == 20 - 3 - 1


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("freed", [False, True])
def test_the_last_token_of_a_prompt_that_is_cached_whole_is_left_to_be_computed(arch, rng, dtype, freed):
    """Its row goes into a copy of the block while others hold the block, and into the block itself if nobody does."""
    store = make(dtype)
    fill(store, rng)
    ids = list(range(8))
    a = store.add(ids)
    given = [oracle.place(rows(rng, 8), arch) for _ in range(2)]
    last = [oracle.place(rows(rng, 1), arch) for _ in range(2)]  # other bits than what stands there
    for layer in range(2):
        store.append(layer, given[layer], given[layer], [a], [0, 8])
    before = contents(store)[0][a]
    if freed:
        store.free(a)
    b = store.add(ids)
    assert (store.length(b), len(store.block_table(b)), store.num_shared_blocks) == (7, 2, 0 if freed else 2)
    free = store.num_free_blocks
    plain = make(dtype)
    other = plain.add()
    for layer in range(2):
        plain.append(layer, given[layer][:7], given[layer][:7], [other], [0, 7])
    for layer in range(2):
        store.append(layer, last[layer], last[layer], [b])
        plain.append(layer, last[layer], last[layer], [other])
        for got, want in zip(store.tokens(layer, b), plain.tokens(layer, other), strict=True):
            oracle.assert_same_bits(got, oracle.to_numpy(want))
    assert free - store.num_free_blocks == (0 if freed else 1)
    c = store.add(ids)
    assert store.length(c) == 7, "found as before"
    if not freed:
        assert contents(store)[0][a] == before


def test_leave_says_how_many_of_the_last_tokens_are_left(arch, rng):
    store = make(layers=1)
    ids = list(range(12))
    k = oracle.place(rows(rng, 12), arch)
    store.append(0, k, k, [store.add(ids)], [0, 12])
    for leave, length in ((0, 12), (1, 11), (3, 9), (np.int64(4), 8), (5, 7), (12, 0), (2**40, 0)):
        seq = store.add(ids, leave=leave)
        assert (store.length(seq), len(store.block_table(seq))) == (length, -(-length // 4)), leave
        oracle.assert_same_bits(store.tokens(0, seq)[0], oracle.to_numpy(k)[:length])
    assert store.length(store.add([*ids, 1, 2], leave=2)) == 12, "two are left anyway"
    assert store.length(store.add([*ids, 1, 2], leave=3)) == 11
    assert store.length(store.add(leave=3)) == 0


def test_a_prompt_that_is_cached_whole_is_swapped_saved_forked_and_freed(arch, rng, tmp_path):
    store = make(num_blocks=6)
    ids = list(range(8))
    a = store.add(ids)
    given = extend(store, rng, [a], [8])
    held = [given[layer][0][:7] for layer in range(2)]
    b = store.add(ids)
    store.swap_out(b)
    store.swap_in(b)
    c = store.fork(b)
    store.save(tmp_path / "pool.safetensors", [b])
    (d,) = store.load_sequences(tmp_path / "pool.safetensors")
    for seq in (b, c, d):
        assert store.length(seq) == 7
        for layer in range(2):
            oracle.assert_same_bits(store.tokens(layer, seq)[0], held[layer])
        extend(store, rng, [seq], [1])
        store.free(seq)
    for layer in range(2):
        oracle.assert_same_bits(store.tokens(layer, a)[0], given[layer][0])
    store.free(a)
    assert store.num_free_blocks == 6
    assert store.length(store.add(ids, leave=0)) == 8


def test_a_freed_prefix_is_revived_until_its_blocks_are_taken(arch, rng):
    store = make(layers=1, num_blocks=6)
    ids = list(range(8))
    k = oracle.place(rows(rng, 8), arch)
    a = store.add(ids)
    store.append(0, k, k, [a], [0, 8])
    store.free(a)
    assert store.num_free_blocks == 6
    b = store.add(ids, leave=0)
    assert (store.length(b), store.num_free_blocks, store.num_shared_blocks) == (8, 4, 0)
    oracle.assert_same_bits(store.tokens(0, b)[0], k)
    store.free(b)
    other = store.add()
    wide = oracle.place(rows(rng, 16), arch)
    store.append(0, wide, wide, [other], [0, 16])
    assert store.length(store.add(ids, leave=0)) == 8, "blocks without a name were taken first"
    store.free(store.sequences[-1])
    store.append(0, k, k, [other], [0, 8])
    assert store.length(store.add(ids)) == 0, "their data is gone, and so is the name"


def test_a_shared_prefix_is_not_overwritten_through_one_of_its_holders(arch, rng):
    store = make(layers=1)
    ids = list(range(8))
    k, other = oracle.place(rows(rng, 8), arch), oracle.place(rows(rng, 3), arch)
    a = store.add(ids)
    store.append(0, k, k, [a], [0, 8])
    b = store.add(ids, leave=0)
    store.truncate(b, 5)
    store.append(0, other, other, [b], [0, 3])
    oracle.assert_same_bits(store.tokens(0, a)[0], k)
    c = store.add(ids, leave=0)
    oracle.assert_same_bits(store.tokens(0, c)[0], k)
    for seq in (b, c):
        store.free(seq)
    store.truncate(a, 5)
    store.append(0, other, other, [a], [0, 3])  # alone now: in place, and no longer found as what it was
    assert store.num_free_blocks == 10
    assert store.length(store.add(ids)) == 4


def test_a_prefix_that_two_sequences_wrote_outlives_the_first(arch, rng):
    store = make(layers=1, num_blocks=4)
    ids = list(range(4))
    a, b = store.add(ids), store.add(ids)
    k = oracle.place(rows(rng, 4), arch)
    for seq in (a, b):
        store.append(0, k, k, [seq], [0, 4])
    store.free(a)
    other = store.add()
    wide = oracle.place(rows(rng, 12), arch)
    store.append(0, wide, wide, [other], [0, 12])  # all that was free
    c = store.add(ids, leave=0)
    assert store.block_table(c).tolist() == store.block_table(b).tolist()
    oracle.assert_same_bits(store.tokens(0, c)[0], k)


def test_a_fork_may_go_another_way_than_the_tokens_that_were_announced(arch, rng):
    store = make(layers=1)
    ids = list(range(12))
    a = store.add(ids)
    k, other = oracle.place(rows(rng, 12), arch), oracle.place(rows(rng, 6), arch)
    store.append(0, k[:6], k[:6], [a], [0, 6])
    b = store.fork(a)
    store.append(0, other, other, [b], [0, 6])
    store.free(a)
    assert store.length(store.add(ids)) == 4, "what both have, not what the fork appended"


def test_truncate_gives_back_the_blocks_behind(arch, rng):
    store = make()
    a = store.add()
    given = extend(store, rng, [a], [11])
    b = store.fork(a)
    store.truncate(a, 11)
    store.truncate(a, 5)
    assert (store.length(a), len(store.block_table(a)), store.num_free_blocks) == (5, 2, 9)
    more = extend(store, rng, [a], [2])
    for layer in range(2):
        oracle.assert_same_bits(store.tokens(layer, b)[0], given[layer][0])
        wanted = np.concatenate([given[layer][1][:5], more[layer][1]])
        oracle.assert_same_bits(store.tokens(layer, a)[1], wanted)
    store.free(b)
    store.truncate(a, 0)
    assert (store.length(a), store.num_free_blocks) == (0, 12)
    assert store.tokens(0, a)[0].shape == (0, HEADS, WIDTH)


# --- swapping


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_swapping_moves_the_data(arch, rng, dtype):
    store = make(dtype, layout="HND", num_blocks=5)
    a, b = store.add(), store.add()
    source = np.float32 if dtype == "int8" else DTYPES[dtype]

    def put(seq, tokens):
        k = oracle.place(oracle.numbers(rng, (tokens, HEADS, WIDTH), source), arch)
        for layer in range(2):
            store.append(layer, k, k, [seq], [0, tokens])

    put(a, 10)
    put(b, 5)
    kept = contents(store)[0]
    store.swap_out(a)
    assert (store.num_free_blocks, store.length(a), "1 swapped out" in repr(store)) == (3, 10, True)
    put(b, 12)
    fill_of_b = store.tokens(0, b)
    assert store.num_free_blocks == 0
    with pytest.raises(tikv.CapacityError, match="3 blocks are needed and 0 of 5 are free"):
        store.swap_in(a)
    for refused in (store.fork, store.block_table, store.swap_out, lambda seq: store.tokens(0, seq)):
        with pytest.raises(tikv.PositionError, match=rf"sequence {a} is swapped out. Call swap_in\({a}\)"):
            refused(a)
    store.truncate(b, 5)
    store.swap_in(a)
    assert contents(store)[0] == kept
    assert fill_of_b[0].shape[0] == 17
    with pytest.raises(tikv.PositionError, match="not swapped out"):
        store.swap_in(a)
    store.swap_out(b)
    store.free(b)
    assert (store.sequences, store.num_free_blocks) == ([a], 2)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_pool_holds_more_sequences_than_its_blocks_by_moving_them(arch, rng, dtype):
    """Ten sequences of three blocks take turns in a pool of eight: the bits of a pool that has room for all."""
    small, large = (make(dtype, num_blocks=n) for n in (8, 40))
    pools = small, large
    seqs = [[pool.add() for pool in pools] for _ in range(10)]
    q = oracle.place(rows(rng, 1, np.float32), arch)
    for turn, tokens in enumerate((7, 1, 4)):
        for pair in seqs:
            if turn:
                small.swap_in(pair[0])
            k, v = (oracle.place(rows(rng, tokens, np.float32), arch) for _ in "kv")
            for layer in range(2):
                for pool, seq in zip(pools, pair, strict=True):
                    pool.append(layer, k, v, [seq], [0, tokens])
                got, want = (pool.attend(layer, q, [seq]) for pool, seq in zip(pools, pair, strict=True))
                oracle.assert_same_bits(got, oracle.to_numpy(want))
            small.swap_out(pair[0])
    assert sum(small.length(own) for own, _ in seqs) == 120 > 8 * SIZE
    assert small.num_free_blocks == 8
    for own, other in seqs:
        small.swap_in(own)
        for layer in range(2):
            for got, want in zip(small.tokens(layer, own), large.tokens(layer, other), strict=True):
                oracle.assert_same_bits(got, oracle.to_numpy(want))
        small.free(own)


def test_a_swapped_prefix_comes_back_shared(arch, rng):
    store = make(num_blocks=6)
    ids = list(range(9))
    a = store.add(ids)
    given = extend(store, rng, [a], [9])
    b = store.add(ids)
    store.swap_out(a)
    assert (store.num_free_blocks, store.num_shared_blocks) == (4, 0)
    store.swap_in(a)
    assert (store.num_free_blocks, store.num_shared_blocks) == (3, 2)
    store.swap_out(a)
    store.free(b)
    extend(store, rng, [store.add()], [24])
    store.free(store.sequences[-1])
    store.swap_in(a)
    for layer in range(2):
        oracle.assert_same_bits(store.tokens(layer, a)[0], given[layer][0])
    assert store.length(store.add(ids)) == 8, "what came back is found again"


def test_a_swap_in_that_fails_gives_its_blocks_back(arch, rng, monkeypatch):
    """Those found by the prefix and the free ones; the sequence stays swapped out, and comes back whole later."""
    store = make(num_blocks=6)
    ids = list(range(9))
    a = store.add(ids)
    given = extend(store, rng, [a], [9])
    b = store.add(ids)
    store.swap_out(a)

    def counts():
        return store.num_free_blocks, store.num_shared_blocks, store.block_table(b).tolist(), store.length(a)

    before = counts()
    real = LayerPools.write_blocks

    def broken(*arguments):
        real(*arguments)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(LayerPools, "write_blocks", broken)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the device is lost"):
            store.swap_in(a)
        assert counts() == before
    monkeypatch.undo()
    store.swap_in(a)
    assert (store.num_free_blocks, store.num_shared_blocks) == (3, 2)
    for layer in range(2):
        oracle.assert_same_bits(store.tokens(layer, a)[0], given[layer][0])


# --- refusals


def test_a_pool_that_is_too_small_leaves_every_sequence_as_it_was(arch, rng):
    store = make(num_blocks=6)
    a, b = store.add(), store.add(list(range(4)))
    extend(store, rng, [a, b], [6, 6])
    c = store.fork(a)
    before, before_bits = contents(store), pool_bits(store)
    assert store.num_free_blocks == 2
    for seqs, counts in (([b, a], [2, 11]), ([a, b, c], [1, 8, 1]), ([b], [20])):
        bounds = np.cumsum([0, *counts])
        k = oracle.place(rows(rng, bounds[-1]), arch)
        with pytest.raises(
            tikv.CapacityError, match=r"PagedKVCacheStore.append: \d blocks are needed and 2 of 6 are free"
        ):
            store.append(0, k, k, seqs, bounds)
        assert contents(store) == before
    for layer, pools in enumerate(pool_bits(store)):
        for got, want in zip(pools, before_bits[layer], strict=True):
            oracle.assert_same_bits(got, want)
    extend(store, rng, [a, b, c], [1, 2, 1])  # what is left is enough for a copy of the shared block
    assert store.num_free_blocks == 1


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (
            lambda s, k: s.append(0, k, k, [0, 9]),
            tikv.PositionError,
            "sequence 9 was never added. There are 2 sequences",
        ),
        (lambda s, k: s.append(0, k, k, [0, 1]), tikv.PositionError, "sequence 1 was freed"),
        (lambda s, k: s.append(0, k, k, [2, 2]), tikv.PositionError, "sequence 2 is named twice"),
        (lambda s, k: s.append(0, k, k, [0, -1]), tikv.PositionError, "seq=-1 is outside"),
        (lambda s, k: s.append(2, k, k, [0, 2]), tikv.PositionError, "layer=2 is outside 0..1"),
        (lambda s, k: s.append(0, k, k, 0), tikv.ShapeError, r"seqs is 0, one integer. Pass a list: \[0\]"),
        (lambda s, k: s.append(0, k, k, [0.5, 2.0]), tikv.DTypeError, r"seqs is f64\[2\]"),
        (lambda s, k: s.append(0, k[:1], k[:1], [0, 2]), tikv.ShapeError, r"1 where 2 is needed .*, \.\.\., 1\]"),
        (lambda s, k: s.append(0, k, k, [0, 2], [0, 2]), tikv.ShapeError, "the length of cu_seqlens is 2 where 3"),
        (
            lambda s, k: s.append(0, k, k, [0, 2], [0, 2, 1]),
            tikv.ShapeError,
            r"cu_seqlens=\[0, 2, 1\] must begin with 0",
        ),
        (lambda s, k: s.append(0, k, k, [0, 2], [1, 1, 2]), tikv.ShapeError, r"cu_seqlens=\[1, 1, 2\]"),
        (lambda s, k: s.append(0, k, k, [0, 2], [0, 1, 3]), tikv.ShapeError, "at the 2 rows given"),
        (lambda s, k: s.append(0, k, k[:1], [0, 2]), tikv.ShapeError, "number of tokens of v"),
        (lambda s, k: s.append(0, k[:, :1], k[:, :1], [0, 2]), tikv.ShapeError, "number of heads of k is 1"),
        (lambda s, k: s.append(0, k[..., :4], k, [0, 2]), tikv.ShapeError, "head width of k_pool"),
        (lambda s, k: s.append(0, k[0], k[0], [0, 2]), tikv.ShapeError, "k is f32"),
        (lambda s, k: s.append(0, k.view("float16")[..., :16], k, [0, 2]), tikv.DTypeError, "must have the same dtype"),
        (lambda s, k: s.append(0, *[np.ones((2, 2, 16))] * 2, [0, 2]), tikv.DTypeError, "float64"),
        (lambda s, k: s.append(0, s.keys(0).numpy()[0, :2], k, [0, 2]), tikv.ShapeError, "overlap"),
        (lambda s, k: s.truncate(0, 7), tikv.PositionError, r"has 6 tokens; it cannot keep 7\. Keep at most 6\."),
        (lambda s, k: s.truncate(0, -1), tikv.PositionError, "n=-1"),
        (lambda s, k: s.free(1), tikv.PositionError, "sequence 1 was freed"),
        (lambda s, k: s.swap_in(0), tikv.PositionError, r"sequence 0 is not swapped out\. Call swap_out"),
        (lambda s, k: s.scales(0), tikv.DTypeError, r"int8 and groups have\. Use dtype"),
        (lambda s, k: s.add([0.5]), tikv.DTypeError, "token_ids"),
        (lambda s, k: s.add([[1]]), tikv.ShapeError, "token_ids"),
        (lambda s, k: s.add([[1], [2, 3]]), tikv.ShapeError, "token_ids must be a list of integers"),
        (lambda s, k: s.append(0, k, k, [[0], [2, 2]]), tikv.ShapeError, "seqs must be a list of integers"),
        (lambda s, k: s.append(0, k, k, [0], [0, [2, 2]]), tikv.ShapeError, "cu_seqlens must be a list of integers"),
        (
            lambda s, k: s.attend(0, np.ones((2, 4, HEADS, WIDTH), np.float32), [0, 2]),
            tikv.PositionError,
            r"^PagedKVCacheStore.attend: 4 queries are given for sequence 2, which has 3 tokens in layer 0\. The",
        ),
        (
            lambda s, k: s.attend(0, k, [0, 2], impl="torch"),
            tikv.OptionError,
            r"^PagedKVCacheStore.attend: torch has no attention over pages\. Use impl='taichi'\.$",
        ),
        (
            lambda s, k: s.attend(0, k[..., :4].copy(), [0, 2]),
            tikv.ShapeError,
            "^PagedKVCacheStore.attend: .*q",
        ),
        (
            lambda s, k: s.attend(0, k, [0, 2], out=np.zeros((3, HEADS, WIDTH), np.float32)),
            tikv.ShapeError,
            "^PagedKVCacheStore.attend: out is ",
        ),
        (
            lambda s, k: s.write_qkv(0, k.reshape(2, -1), [0, 2], num_q_heads=3),
            tikv.ShapeError,
            "^PagedKVCacheStore.write_qkv: the width of qkv",
        ),
        (lambda s, k: s.add([1 << 70]), tikv.DTypeError, "token_ids"),
        (lambda s, k: s.add("abc"), tikv.DTypeError, "token_ids"),
        (lambda s, k: s.add([1], leave=-1), tikv.PositionError, r"leave=-1 is outside the range\. Use 0 or more"),
        (lambda s, k: s.add(leave=True), tikv.DTypeError, "leave is True, not an integer"),
        (lambda s, k: s.add([1], leave=0.5), tikv.DTypeError, "leave is 0.5"),
        (lambda s, k: s.add([1], leave=None), tikv.DTypeError, "leave is None"),
    ],
)
@pytest.mark.archs("cpu")
def test_refusals_say_what_is_wrong_and_change_nothing(arch, rng, what, error, words):
    store = make()
    a, freed, b = store.add(), store.add(), store.add()
    extend(store, rng, [a, b], [6, 3])
    store.free(freed)
    before, before_bits = contents(store), pool_bits(store)
    with pytest.raises(error, match=words):
        what(store, rows(rng, 2))
    assert contents(store) == before
    for layer, pools in enumerate(pool_bits(store)):
        for got, want in zip(pools, before_bits[layer], strict=True):
            oracle.assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"num_layers": 0}, tikv.PositionError, "num_layers=0"),
        ({"num_blocks": 0}, tikv.PositionError, "num_blocks=0"),
        ({"block_size": 0}, tikv.PositionError, "block_size=0"),
        ({"dtype": "int32"}, tikv.DTypeError, "int32 cannot be stored"),
        ({"dtype": "float8"}, tikv.DTypeError, "unknown dtype"),
        ({"scale_dtype": "bfloat16"}, tikv.DTypeError, "scale_dtype bfloat16"),
        ({"layout": "nhd"}, tikv.OptionError, "unknown layout 'nhd'"),
        ({"layout": "VLLM", "head_dim": 12}, tikv.ShapeError, "head_dim=12 is not a multiple of the 8 float16"),
        ({"head_dim": 2.5}, tikv.DTypeError, "head_dim is 2.5"),
    ],
)
def test_a_store_that_cannot_be_is_refused(arch, wrong, error, words):
    with pytest.raises(error, match=words):
        tikv.PagedKVCacheStore(**{"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "num_blocks": 4, **wrong})


@pytest.mark.parametrize("launched", [0, 1])
def test_a_write_that_fails_gives_its_blocks_back(arch, rng, monkeypatch, launched):
    """The copy of a block that two sequences share, or the write that comes after it."""
    store = make()
    a = store.add()
    extend(store, rng, [a], [6])
    b = store.fork(a)
    before = contents(store)

    k = oracle.place(rows(rng, 8), arch)
    error = RuntimeError("device lost")
    with failing_launches(monkeypatch, launched, error), pytest.raises(RuntimeError, match="device lost"):
        store.append(0, k, k, [a, b], [0, 4, 8])
    assert contents(store) == before
    store.append(0, k, k, [a, b], [0, 4, 8])
    oracle.assert_same_bits(oracle.to_numpy(store.tokens(0, b)[0])[6:], oracle.to_numpy(k)[4:])


def test_a_refused_write_forgets_no_prefix(arch, rng):
    """It had taken the blocks of a freed one; only the copy of a shared block is overwritten before the refusal."""
    store = make(layers=1, num_blocks=4)
    ids = list(range(12))
    a, b = store.add(ids), store.add()
    k = oracle.place(rows(rng, 12), arch)
    store.append(0, k, k, [a], [0, 12])
    store.append(0, k[:1], k[:1], [b])
    store.free(a)
    wide = oracle.place(oracle.random_bits(rng, (8, 3 * HEADS * WIDTH - 1), np.float32), arch)
    for _ in range(2):
        with pytest.raises(tikv.ShapeError):
            store.write_qkv(0, wide, [b], [0, 8], num_q_heads=HEADS)
        if arch != "vulkan":  # whose arrays do not overlap
            own = getattr(store.keys(0), "torch" if arch == "cuda" else "numpy")().reshape(-1, HEADS, WIDTH)
            with pytest.raises(tikv.ShapeError, match="overlap"):
                store.append(0, own[:8], own[8:], [b], [0, 8])
        c = store.add(ids, leave=0)
        assert (store.length(c), store.num_free_blocks) == (12, 0)
        oracle.assert_same_bits(store.tokens(0, c)[0], k)
        store.free(c)
    d = store.fork(b)
    with pytest.raises(tikv.ShapeError):
        store.write_qkv(0, wide, [d], [0, 8], num_q_heads=HEADS)
    c = store.add(ids)
    assert store.length(c) == 8, "the longest unused block has the copy"
    oracle.assert_same_bits(store.tokens(0, c)[0], k[:8])
    assert store.num_free_blocks == 1


def test_a_store_of_an_ended_runtime_is_refused(arch):
    store = make()
    seq = store.add()
    tikv.init(arch=arch)
    k = np.zeros((1, HEADS, WIDTH), np.float32)
    for use in (
        lambda: store.add(),
        lambda: store.append(0, k, k, [seq]),
        lambda: store.tokens(0, seq),
        lambda: store.fork(seq),
        lambda: store.free(seq),
        lambda: store.swap_out(seq),
        lambda: store.truncate(seq, 0),
        lambda: store.keys(0),
    ):
        with pytest.raises(tikv.StaleRuntimeError, match="epoch"):
            use()


def test_the_repr_says_what_there_is(arch, rng):
    store = make("float16", head_dim_v=8)
    a = store.add()
    k = oracle.place(rows(rng, 6, np.float16), arch)
    v = oracle.place(rows(rng, 6, np.float16, 8), arch)
    store.append(0, k, v, [a], [0, 6])
    store.fork(a)
    assert repr(store) == (
        "PagedKVCacheStore(2 layers x 2 heads x 16|8, float16, NHD, 2 sequences (2 with layers of different lengths), "
        f"2/12 blocks of 4 tokens used, 2 shared, 9.2 kB, {arch})"
    )
    store.append(1, k, v, [a], [0, 6])
    assert ", 2 sequences (1 with layers of different lengths), 4/12 " in repr(store)
    store.swap_out(a)
    assert ", 2 sequences (1 swapped out, 1 with layers of different lengths), " in repr(store)
    assert store.nbytes == 2 * 12 * 4 * HEADS * (16 + 8) * 2
    assert len(store) == 2
    small = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=16, num_blocks=1, block_size=1)
    assert len(small) == 0
    assert small
    assert small.add() == 0
    assert repr(small) == (
        "PagedKVCacheStore(1 layer x 1 head x 16, float16, NHD, 1 sequence, 0/1 block of 1 token used, 0 shared, "
        f"64 B, {arch})"
    )


# --- all of it, in any order


class AnyOrder(RuleBasedStateMachine):
    """The store against a dictionary of lists: what each layer of each sequence was given, row by row."""

    dtype, layout, arch = "float32", "NHD", "cpu"

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed):
        self.rng = np.random.default_rng(seed)
        self.store = make(self.dtype, layout=self.layout, num_blocks=9, block_size=2)
        fill(self.store, self.rng)  # what memory held before could be what a missing copy should bring
        self.model = {}  # sequence: [token ids, [k rows and v rows of each layer], swapped]

    def _row(self, layer, ids, position):
        """Of a known token what a model would compute from all tokens up to it; else anything."""
        rng = np.random.default_rng([layer, *ids[: position + 1]]) if position < len(ids) else self.rng
        return rows(rng, 2, DTYPES[self.dtype])

    def _lengths(self, seq):
        return [len(held) for held in self.model[seq][1]]

    def _is_refused(self, layer, seqs):
        """Whether a step seems to have ended between two layers of one of these sequences."""
        return layer == 0 and any(0 < this != other > 0 for this, other in map(self._lengths, seqs))

    def _may_be_refused(self, layer, seqs, counts):
        """Whether that depends on what the other layer's last append brought: tests/stores/test_unfinished_steps.py."""
        lengths = [self._lengths(seq)[:: 1 if layer == 0 else -1] for seq in seqs]
        return any(this == 0 < count < other for (this, other), count in zip(lengths, counts, strict=True))

    def _align(self, seqs):
        lens = [min(self._lengths(seq)) for seq in seqs]
        assert self.store.align(seqs).tolist() == lens
        for seq, n in zip(seqs, lens, strict=True):
            ids, held, swapped = self.model[seq]
            self.model[seq] = [ids if n == max(map(len, held)) else ids[:n], [layer[:n] for layer in held], swapped]

    def _present(self):
        return [seq for seq, (_, _, swapped) in self.model.items() if not swapped]

    @precondition(lambda self: len(self.model) < 4)  # else most of the appends would find no blocks
    @rule(ids=st.none() | st.lists(st.integers(0, 1), max_size=7))
    def add(self, ids):
        leave = int(self.rng.choice((0, 1, 1, 3)))
        seq = self.store.add(ids, leave=leave)
        assert seq not in self.model
        ids = ids or []
        there = self.store.length(seq)
        assert there <= max(0, len(ids) - leave)
        assert there % 2 == 0 or there == len(ids) - leave
        self.model[seq] = [ids, [[self._row(layer, ids, p) for p in range(there)] for layer in range(2)], False]

    @precondition(lambda self: self._present())
    @rule(data=st.data(), layers=st.sampled_from([[0, 1], [0, 1], [1, 0], [0], [1]]))
    def append(self, data, layers):
        seqs = data.draw(st.lists(st.sampled_from(self._present()), unique=True, min_size=1, max_size=3))
        counts = data.draw(st.lists(st.integers(0, 4), min_size=len(seqs), max_size=len(seqs)))
        self._append(layers, seqs, counts)

    def _append(self, layers, seqs, counts):
        bounds = None if set(counts) == {1} else np.cumsum([0, *counts])
        for layer in layers:
            if self._is_refused(layer, seqs):
                none = oracle.place(np.zeros((sum(counts), HEADS, WIDTH), DTYPES[self.dtype]), self.arch)
                with pytest.raises(tikv.PositionError, match="ended between two layers"):
                    self.store.append(layer, none, none, seqs, bounds)
                self._align(seqs)
            elif self._may_be_refused(layer, seqs, counts):
                self._align(seqs)
            new = {}
            for seq, count in zip(seqs, counts, strict=True):
                ids, held, _ = self.model[seq]
                start = len(held[layer])
                new[seq] = [self._row(layer, ids, p) for p in range(start, start + count)]
            together = np.array([row for seq in seqs for row in new[seq]], DTYPES[self.dtype]).reshape(
                -1, 2, HEADS, WIDTH
            )
            free = self.store.num_free_blocks
            most = sum((len(self.model[s][1][layer]) + n + 1) // 2 - len(self.model[s][1][layer]) // 2
                       for s, n in zip(seqs, counts, strict=True))  # fmt: skip
            k, v = (oracle.place(np.ascontiguousarray(together[:, i]), self.arch) for i in range(2))
            try:
                self.store.append(layer, k, v, seqs, bounds)
            except tikv.CapacityError:
                assert most > free
                return
            for seq in seqs:
                self.model[seq][1][layer] += new[seq]

    @precondition(lambda self: self._present() and len(self.model) < 4)
    @rule(data=st.data())
    def fork(self, data):
        seq = data.draw(st.sampled_from(self._present()))
        ids, held, _ = self.model[seq]
        known = min(map(len, held)) // 2 * 2  # it may go another way
        forked = self.store.fork(seq)
        self.model[forked] = [ids[:known], [list(layer) for layer in held], False]
        self._append([0, 1], [data.draw(st.sampled_from([seq, forked]))], [data.draw(st.integers(0, 2))])

    @precondition(lambda self: self._present())
    @rule(data=st.data())
    def truncate(self, data):
        seq = data.draw(st.sampled_from(self._present()))
        n = data.draw(st.integers(0, self.store.length(seq)))
        self.store.truncate(seq, n)
        ids, held, _ = self.model[seq]
        self.model[seq] = [ids[:n], [layer[:n] for layer in held], False]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(list(self.model)))
        self.store.free(seq)
        del self.model[seq]

    @precondition(lambda self: self._present())
    @rule(data=st.data())
    def swap_out(self, data):
        seq = data.draw(st.sampled_from(self._present()))
        self.store.swap_out(seq)
        self.model[seq][2] = True

    @precondition(lambda self: any(swapped for _, _, swapped in self.model.values()))
    @rule(data=st.data())
    def swap_in(self, data):
        seq = data.draw(st.sampled_from([s for s, (_, _, swapped) in self.model.items() if swapped]))
        with contextlib.suppress(tikv.CapacityError):
            self.store.swap_in(seq)
            self.model[seq][2] = False
            return
        assert -(-max(self._lengths(seq)) // 2) > self.store.num_free_blocks

    @invariant()
    def every_row_is_what_it_was_given(self):
        if not hasattr(self, "model"):
            return
        assert self.store.sequences == list(self.model)
        lens = [self._lengths(seq) for seq in self.model]
        assert self.store.context_lens.tolist() == [min(n) if all(n) else max(n) for n in lens]
        for seq in self._present():
            for layer, held in enumerate(self.model[seq][1]):
                wanted = np.array(held, DTYPES[self.dtype]).reshape(-1, 2, HEADS, WIDTH)
                for stream, got in enumerate(self.store.tokens(layer, seq)):
                    oracle.assert_same_bits(got, wanted[:, stream], what=f"sequence {seq}, layer {layer}")

    @invariant()
    def no_block_is_lost(self):
        if not hasattr(self, "model"):
            return
        tables = [self.store.block_table(seq).tolist() for seq in self._present()]
        held = Counter(block for table in tables for block in table)
        assert all(len(set(table)) == len(table) for table in tables)
        assert self.store.num_free_blocks == 9 - len(held)
        assert self.store.num_shared_blocks == sum(n > 1 for n in held.values())
        for seq, table in zip(self._present(), tables, strict=True):
            assert len(table) == -(-max(self._lengths(seq)) // 2)


def run_in_any_order(arch, dtype, layout, examples):
    machine = type("AnyOrderOnce", (AnyOrder,), {"dtype": dtype, "layout": layout, "arch": arch})
    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings)


@pytest.mark.full("vulkan", unless=lambda case: case["layout"] == "HND")
@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NHD"), ("bfloat16", "HND"), ("float16", "VLLM")])
def test_any_order_of_operations_keeps_every_row(arch, dtype, layout):
    run_in_any_order(arch, dtype, layout, 24 if arch == "cpu" else 6)


@pytest.mark.full("vulkan")
def test_the_comparison_of_any_order_notices_a_copy_that_is_left_out(arch, monkeypatch):
    monkeypatch.setattr(LayerPools, "copy_blocks", lambda *_: None)
    with pytest.raises(AssertionError, match="elements differ"):
        run_in_any_order(arch, "float32", "NHD", 24)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("form", ["plain", "per_head", "token_groups"])
def test_a_layer_that_missed_an_append(arch, rng, form):
    """Without a token of a sequence it is a forgotten append; with fewer than others it reads its own rows alone."""
    more = {"plain": {}, "per_head": {"per_head": True}, "token_groups": {}}[form]
    if form == "token_groups":
        more = {
            "dtype": tikv.Quant(bits=4, group=32, axis="tokens", residual=32),
            "v_dtype": "float32",
            "block_size": 32,
        }
    store, alone = (make(**more) for _ in range(2))
    if form == "plain":
        for group in store._pages.pools.groups:
            for array in group.arrays:
                arrays.write_host(np.full(array.shape, np.nan, np.float32), array)
    first, second = (store.add() for _ in range(2))
    k, q = rows(rng, 6), rows(rng, 2)
    assert not store.attend(1, q, [first, second]).any(), "no layer has any"
    store.append(0, k, k, [first, second], cu_seqlens=[0, 3, 6])
    store.append(1, k[:3], k[:3], [first], cu_seqlens=[0, 3])
    missed = rf"layer 1 holds no tokens of sequence {second}, and layer 0 holds 3\. .* return_lse=True"
    with pytest.raises(tikv.PositionError, match=missed):
        store.attend(1, q, [first, second])
    past, lse = store.attend(1, q, [first, second], return_lse=True)
    assert not past[1].any()
    assert (lse[1] == -np.inf).all()
    third = store.add()
    for layer in range(2):
        store.append(layer, k[3:5], k[3:5], [third], cu_seqlens=[0, 2])
    store.append(0, k[5:], k[5:], [third])
    seqs = [alone.add(), alone.add()]
    alone.append(0, k[:5], k[:5], seqs, cu_seqlens=[0, 3, 5])
    np.testing.assert_array_equal(store.attend(1, q, [first, third]), alone.attend(0, q, seqs))
