"""The third seed's layer trait: every name has a home, every dtype works in both kinds, the bits are the oracle's."""

import inspect

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference
from tikv.compat.seeds import layers
from tikv.compat.seeds.layers import SEED_NAMES, ContiguousKVLayer, KVPool, PagedKVLayer
from tikv.stores.pools import blocks as block_pool

pytestmark = pytest.mark.full(each_value=True)

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
HEADS, QUERY_HEADS, WIDTH, SIZE = 2, 4, 16, 4
COLUMNS = (QUERY_HEADS + 2 * HEADS) * WIDTH
TRAIT = [
    "alloc_contig",
    "alloc_paged",
    "len",
    "set_len",
    "capacity",
    "block_size",
    "num_kv_heads",
    "head_dim",
    "is_paged",
    "block_table",
    "context_lens",
    "paged_block_indices",
    "ensure_contig_capacity",
    "paged_write",
    "contig_write",
    "paged_decode_attention",
    "contig_decode_attention",
]


def paged(blocks_of=(5, 1, 4), dtype="float32", layout="NHD", **more):
    layer = PagedKVLayer.alloc_paged(6, SIZE, HEADS, WIDTH, dtype=dtype, layout=layout, **more)
    layer.paged_block_indices = list(blocks_of)
    return layer


def split(rows):
    q, k, v = np.split(rows, [QUERY_HEADS * WIDTH, (QUERY_HEADS + HEADS) * WIDTH], axis=1)
    return tuple(np.ascontiguousarray(x).reshape(len(rows), -1, WIDTH) for x in (q, k, v))


def stored(rows, dtype):
    """(rows as stored, scales or None), by the oracle."""
    return reference.quantize(rows) if dtype == "int8" else (reference.encode(rows, DTYPES[dtype]), None)


def half_rope(rng, arch, positions=64):
    angle = np.arange(positions, dtype=np.float32)[:, None] / 100 ** (np.arange(WIDTH // 2, dtype=np.float32) / WIDTH)
    weights = [oracle.place(rng.uniform(0.5, 2, WIDTH).astype(np.float32), arch) for _ in "qk"]
    tables = [oracle.place(f(angle), arch) for f in (np.cos, np.sin)]
    return tikv.NormRope(mode="norm_half", q_weight=weights[0], k_weight=weights[1], cos=tables[0], sin=tables[1])


def attention(q, k, v, window=None):
    """What q (T, Hq, D), the last T tokens, reads of k and v (length, H, D): (T, Hq, D) in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for t, h in np.ndindex(*q.shape[:2]):
        end = len(k) - len(q) + 1 + t
        seen = slice(0 if window is None else max(0, end - window), end)
        scores = k[seen, h // (QUERY_HEADS // HEADS)] @ q[t, h] / np.sqrt(WIDTH)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[seen, h // (QUERY_HEADS // HEADS)] / weights.sum()
    return out


def test_every_name_of_the_trait_has_a_documented_home():
    assert list(SEED_NAMES) == TRAIT
    for seed_name, homes in SEED_NAMES.items():
        assert homes, seed_name
        for home in homes:
            cls, name = home.split(".")
            found = inspect.getattr_static(getattr(tikv, cls), name)
            assert (found.fget if isinstance(found, property) else found).__doc__, home
    ours = {home.split(".")[1] for homes in SEED_NAMES.values() for home in homes}
    assert {"__len__" if name == "len" else name for name in TRAIT} == ours


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contiguous_write_begins_at_len_and_leaves_it(arch, rng, dtype):
    layer = ContiguousKVLayer.alloc_contig(9, HEADS, WIDTH, dtype=dtype)
    assert (layer.capacity, layer.block_size, layer.num_kv_heads, layer.head_dim) == (9, 0, HEADS, WIDTH)
    assert not layer.is_paged
    wanted = [oracle.to_numpy(a).copy() for a in (layer.keys, layer.values)]
    for tokens in (4, 1, 3):
        rows = rng.standard_normal((tokens, COLUMNS)).astype(np.float32)
        start = len(layer)
        q = layer.contig_write(oracle.place(rows, arch), num_q_heads=QUERY_HEADS)
        assert len(layer) == start
        new = split(rows)
        oracle.assert_same_bits(q, new[0])
        for stream in (0, 1):
            wanted[stream][:, start : start + tokens] = stored(new[1 + stream], dtype)[0].swapaxes(0, 1)
        layer.set_len(start + tokens)
    for name, got, want in zip("kv", (layer.keys, layer.values), wanted, strict=True):
        oracle.assert_same_bits(got, want, what=name)
    with pytest.raises(tikv.CapacityError, match=r"len=8 \+ 2 tokens exceed the 9 slots. Call ensure.*\(10\)"):
        layer.contig_write(oracle.place(np.zeros((2, COLUMNS), np.float32), arch), num_q_heads=QUERY_HEADS)
    oracle.assert_same_bits(layer.keys, wanted[0])


@pytest.mark.parametrize("layout", ["NHD", "HND", "VLLM"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_share_a_paged_pool_of_every_dtype(arch, rng, dtype, layout):
    """Two sequences, prompts of several tokens and heads: what the original's int8 form could not do."""
    pool = KVPool(7, SIZE, HEADS, WIDTH, dtype=dtype, layout=layout)
    a, b = (PagedKVLayer.alloc_paged(4, SIZE, HEADS, WIDTH, dtype=dtype, layout=layout, pool=pool) for _ in "ab")
    a.paged_block_indices, b.paged_block_indices = [5, 1], [6, 0, 2]
    assert (a.capacity, a.block_size, a.is_paged, a.max_blocks_per_seq) == (16, SIZE, True, 4)
    wanted = [oracle.to_numpy(x).copy() for x in (pool.keys, pool.values)]
    scales = [oracle.to_numpy(x).copy() for x in pool.scales] if dtype == "int8" else []
    for layer, tokens in ((a, 5), (b, 11), (a, 1), (b, 1), (a, 2)):
        rows = rng.standard_normal((tokens, COLUMNS)).astype(np.float32)
        start = len(layer)
        layer.paged_write(oracle.place(rows, arch), num_q_heads=QUERY_HEADS)
        assert len(layer) == start
        slots = block_pool.slots_of(layer.paged_block_indices, np.arange(start, start + tokens), SIZE)
        for stream, new in enumerate(split(rows)[1:]):
            kept, scale = stored(new, dtype)
            wanted[stream] = reference.write_slots(kept, wanted[stream], slots, layout=layout)
            if dtype == "int8":
                scales[stream].reshape(-1, HEADS)[slots] = scale
        layer.set_len(start + tokens)
    for got, want in zip((pool.keys, pool.values), wanted, strict=True):
        oracle.assert_same_bits(got, want)
    for got, want in zip(pool.scales if scales else (), scales, strict=True):
        oracle.assert_same_bits(got, want)
    assert oracle.to_numpy(a.context_lens).tolist() == [8]
    assert oracle.to_numpy(b.block_table).tolist() == [6, 0, 2, -1]


@pytest.mark.parametrize(("start", "tokens"), [(11, 5), (33, 7), (14, 5)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_paged_and_contiguous_are_the_same_bits(arch, rng, dtype, start, tokens):
    """The seed's own cases: a block crossed, a shuffled table, norm and rotation; there within 1e-5."""
    how = half_rope(rng, arch)
    table = [5, 1, 4, 0, 2, 3, 8, 7, 6, 9]
    pages = PagedKVLayer.alloc_paged(10, SIZE, HEADS, WIDTH, dtype=dtype)
    pages.paged_block_indices = table
    plain = ContiguousKVLayer.alloc_contig(40, HEADS, WIDTH, dtype=dtype)
    for length in (start, tokens):
        rows = oracle.place(rng.standard_normal((length, COLUMNS)).astype(np.float32), arch)
        q = [write(rows, num_q_heads=QUERY_HEADS, norm_rope=how) for write in (pages.paged_write, plain.contig_write)]
        oracle.assert_same_bits(q[0], q[1])
        for layer in (pages, plain):
            layer.set_len(len(layer) + length)
    for pool, keys in ((pages.pool.keys, plain.keys), (pages.pool.values, plain.values)):
        gathered = reference.gather_paged(oracle.to_numpy(pool), table, start + tokens)
        oracle.assert_same_bits(gathered.swapaxes(0, 1), oracle.to_numpy(keys)[:, : start + tokens])


@pytest.mark.full(
    unless=lambda case: (
        (case["kind"], case["dtype"]) in (("contig", "bfloat16"), ("paged", "int8"))
        or (case["kind"], case["q_layout"]) == ("contig", "head_major")
    )
)
@pytest.mark.parametrize(
    ("dtype", "q_layout"), [*((dtype, "token_major") for dtype in DTYPES), ("float32", "head_major")]
)
@pytest.mark.parametrize("kind", ["contig", pytest.param("paged", marks=pytest.mark.thorough)])
def test_attention_of_one_query_and_of_many(arch, rng, dtype, q_layout, kind):
    """The original's int8 decode attends for one query though its prompts bring many."""
    if kind == "contig":
        layer = ContiguousKVLayer.alloc_contig(24, HEADS, WIDTH, dtype=dtype)
        write, attend = layer.contig_write, layer.contig_decode_attention
    else:
        layer = paged((5, 1, 4, 0), dtype=dtype, layout="HND")
        write, attend = layer.paged_write, layer.paged_decode_attention
    held = [np.zeros((0, HEADS, WIDTH), np.float32)] * 2
    for tokens, window in ((5, None), (1, None), (5, 3), (1, 3)):
        rows = rng.standard_normal((tokens, COLUMNS)).astype(np.float32)
        q = write(oracle.place(rows, arch), num_q_heads=QUERY_HEADS, q_layout=q_layout)
        layer.set_len(len(layer) + tokens)
        for stream, new in enumerate(split(rows)[1:]):
            kept, scale = stored(new, dtype)
            kept = kept.astype(np.float32) if scale is None else reference.dequantize(kept, scale)
            held[stream] = np.concatenate([held[stream], kept])
        out = oracle.to_numpy(attend(q, q_layout=q_layout, window=window))
        wanted = attention(split(rows)[0], *held, window)
        assert out.shape == tuple(q.shape)
        np.testing.assert_allclose(out if q_layout == "token_major" else out.swapaxes(0, 1), wanted, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_growing_keeps_every_bit(arch, rng, dtype):
    layer = ContiguousKVLayer.alloc_contig(5, HEADS, WIDTH, dtype=dtype)
    rows = rng.standard_normal((4, COLUMNS)).astype(np.float32)
    layer.contig_write(oracle.place(rows, arch), num_q_heads=QUERY_HEADS)
    layer.set_len(4)
    before = [oracle.to_numpy(a)[:, :4] for a in (layer.keys, layer.values)]
    q = rng.standard_normal((1, QUERY_HEADS, WIDTH)).astype(np.float32)
    read = oracle.to_numpy(layer.contig_decode_attention(oracle.place(q, arch)))
    kept = layer.keys
    layer.ensure_contig_capacity(5)
    assert layer.capacity == 5
    layer.ensure_contig_capacity(12)
    assert (layer.capacity, kept.shape, len(layer)) == (12, (HEADS, 5, WIDTH), 4)
    for got, want in zip((layer.keys, layer.values), before, strict=True):
        oracle.assert_same_bits(oracle.to_numpy(got)[:, :4], want)
    np.testing.assert_allclose(oracle.to_numpy(layer.contig_decode_attention(oracle.place(q, arch))), read, atol=1e-6)
    layer.contig_write(oracle.place(np.repeat(rows, 2, axis=0), arch), num_q_heads=QUERY_HEADS)
    layer.set_len(12)


def test_dropping_tokens_and_blocks(arch, rng):
    layer = paged((3, 0))
    rows = oracle.place(rng.standard_normal((8, COLUMNS)).astype(np.float32), arch)
    layer.paged_write(rows, num_q_heads=QUERY_HEADS)
    layer.set_len(8)
    with pytest.raises(tikv.PositionError, match="1 blocks of 4 do not hold the 8 tokens"):
        layer.paged_block_indices = [3]
    layer.set_len(3)
    layer.paged_block_indices = [3]
    assert (layer.paged_block_indices, oracle.to_numpy(layer.context_lens).tolist()) == ([3], [3])
    assert oracle.to_numpy(layer.block_table).tolist() == [3, -1, -1, -1, -1, -1]
    layer.paged_block_indices.append(9)
    assert layer.paged_block_indices == [3], "what is handed out is a copy"


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (lambda p, c, x: p.paged_write(x, num_q_heads=4), tikv.CapacityError, r"len=10 \+ 3 tokens exceed the 12"),
        (
            lambda p, c, x: c.contig_write(x, num_q_heads=4),
            tikv.CapacityError,
            r"len=3 \+ 3 tokens exceed the 5",
        ),
        (lambda p, c, x: p.set_len(13), tikv.CapacityError, "n=13 exceeds the 12 slots. Assign more paged_block"),
        (lambda p, c, x: c.set_len(6), tikv.CapacityError, r"n=6 exceeds the 5 slots. Call ensure_contig.*\(6\)"),
        (lambda p, c, x: c.set_len(-1), tikv.PositionError, "n=-1"),
        (lambda p, c, x: setattr(p, "paged_block_indices", [1, 1]), tikv.PositionError, "names a block twice"),
        (lambda p, c, x: setattr(p, "paged_block_indices", [6]), tikv.PositionError, "a block index=6 is outside 0..5"),
        (
            lambda p, c, x: setattr(p, "paged_block_indices", range(6)) or p.set_len(25),
            tikv.CapacityError,
            "n=25 exceeds the 24",
        ),
        (lambda p, c, x: p.paged_write(x[:, 1:], num_q_heads=4), tikv.CapacityError, "3 tokens"),
        (
            lambda p, c, x: p.paged_write(x[:1, 1:], num_q_heads=4),
            tikv.ShapeError,
            "^PagedKVLayer.paged_write: the width of",
        ),
        (lambda p, c, x: p.paged_decode_attention(x), tikv.ShapeError, "q is f32"),
        (
            lambda p, c, x: c.contig_write(x[:1, 1:], num_q_heads=4),
            tikv.ShapeError,
            "^ContiguousKVLayer.contig_write: the",
        ),
        (
            lambda p, c, x: p.paged_decode_attention(x[:, None, :8]),
            tikv.ShapeError,
            "paged_decode_attention: the head width",
        ),
        (
            lambda p, c, x: c.contig_decode_attention(x[:, None, :8]),
            tikv.ShapeError,
            "^ContiguousKVLayer.contig_decode_attention: the head width of q",
        ),
        (lambda p, c, x: c.contig_decode_attention(x[:, None, :16], q_layout="HND"), tikv.OptionError, "q_layout"),
        (lambda p, c, x: p.pool.scales, tikv.DTypeError, "only int8 has"),
        (lambda p, c, x: paged(dtype="int8", pool=p.pool), tikv.ShapeError, "the pool has dtype=float32, not int8"),
        (lambda p, c, x: paged(layout="HND", pool=p.pool), tikv.ShapeError, "the pool has layout=NHD, not HND"),
        (lambda p, c, x: ContiguousKVLayer.alloc_contig(0, 1, 1), tikv.PositionError, "capacity=0"),
        (lambda p, c, x: ContiguousKVLayer.alloc_contig(1, 1, 1, dtype="int32"), tikv.DTypeError, "int32"),
        (lambda p, c, x: KVPool(4, 4, 1, 12, layout="VLLM"), tikv.ShapeError, "not a multiple"),
    ],
)
@pytest.mark.archs("cpu")
def test_refusals_say_what_is_wrong_and_write_nothing(arch, rng, what, error, words):
    pages, plain = paged(), ContiguousKVLayer.alloc_contig(5, HEADS, WIDTH, dtype="float32")
    pages.set_len(10)
    plain.set_len(3)
    before = [oracle.to_numpy(a).copy() for a in (pages.pool.keys, pages.pool.values, plain.keys, plain.values)]
    with pytest.raises(error, match=words):
        what(pages, plain, rng.standard_normal((3, COLUMNS)).astype(np.float32))
    assert (len(pages), len(plain)) == (10, 3)
    after = (pages.pool.keys, pages.pool.values, plain.keys, plain.values)
    for got, want in zip(after, before, strict=True):
        oracle.assert_same_bits(got, want)


def test_layers_of_an_ended_runtime_are_refused(arch):
    pages, plain = paged(), ContiguousKVLayer.alloc_contig(5, HEADS, WIDTH)
    tikv.init(arch=arch)
    rows = np.zeros((1, COLUMNS), np.float32)
    for use in (
        lambda: plain.contig_write(rows, num_q_heads=QUERY_HEADS),
        lambda: pages.paged_write(rows, num_q_heads=QUERY_HEADS),
        lambda: plain.ensure_contig_capacity(9),
        lambda: plain.set_len(1),
        lambda: setattr(pages, "paged_block_indices", [0]),
        lambda: paged(pool=pages.pool),
    ):
        with pytest.raises(tikv.StaleRuntimeError, match="epoch"):
            use()


def test_the_reprs_say_what_there_is(arch):
    layer = paged(dtype="int8")
    layer.set_len(7)
    assert repr(layer) == f"PagedKVLayer(2 heads x 16, int8, 7/24 tokens, {arch})"
    assert repr(layer.pool) == f"KVPool(6 blocks of 4 x 2 heads x 16, int8, NHD, {arch})"
    assert repr(layers.ContiguousKVLayer(5, 1, 8)) == f"ContiguousKVLayer(1 head x 8, float16, 0/5 tokens, {arch})"
