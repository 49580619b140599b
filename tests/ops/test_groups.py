"""Formats of groups: codes, scales and biases against the reference and against the libraries they are of."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference
from tikv.ops import row_copy

BF16 = np.dtype(ml_dtypes.bfloat16)
WIDTH = 128
FULL = pytest.mark.full
FORMATS = ["quant2_32", "quant3_64", "quant4_64", "quant8_128", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4"]


def awkward_groups(rng, dtype):
    """Rows of every magnitude; equal numbers, ties of the two edges, zeros of both signs, one that is alone."""
    rows = [oracle.numbers(rng, (24, WIDTH), np.float32) * np.exp2(rng.integers(-6, 3, (24, 1)), dtype=np.float32)]
    rows.append(np.round(rng.standard_normal((8, WIDTH)) * 4).astype(np.float32) / 8)  # many ties
    special = np.zeros((12, WIDTH), np.float32)
    special[1] = -0.0
    special[2, ::2] = -0.0
    special[3], special[4] = 7.25, -3.0
    special[5] = 6.2e-5
    special[6, ::32] = rng.standard_normal(4)
    special[7] = np.where(np.arange(WIDTH) % 2, 5.0, -5.0)
    special[8] = np.where(np.arange(WIDTH) % 2, -5.0, 5.0)
    special[9], special[10] = abs(rng.standard_normal((2, WIDTH))) + np.float32([[1], [1000]])
    special[11] = -special[10]
    return np.concatenate([*rows, special]).astype(dtype)


def split(quantized):
    """Codes, scales and biases on the host."""
    return [None if a is None else oracle.to_numpy(a) for a in quantized[:3]]


def compare(got, want, name):
    for what, a, b in zip(("codes", "scales", "biases"), got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            oracle.assert_same_bits(a, b, what=f"{what} of {name}")


def scales_of(row, dtype=np.float32):
    """The dtype of scales of rows of a dtype, where nothing else is asked for."""
    return np.dtype(dtype) if row.rule == "affine" else row.scale_dtypes[0].numpy


def reference_of(x, row, scale_dtype):
    return reference.quantize_groups(x, row.bits, row.group, row.rule, scale_dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_the_rule(arch, rng, name):
    """And the numbers that come back, in each dtype of source and result once."""
    row = formats.FORMATS[name]
    dtype = {"quant2_32": np.float16, "quant3_64": BF16}.get(name, np.float32)
    x = awkward_groups(rng, dtype)
    scale_dtype = scales_of(row, dtype)
    got = tikv.quantize(oracle.place(x, arch), name)
    want = reference_of(x, row, scale_dtype)
    compare(split(got), want, name)
    assert got.shape == x.shape
    assert got.nbytes == sum(a.nbytes for a in want if a is not None)
    out_dtype = np.dtype(dtype)
    out = oracle.place(oracle.random_bits(rng, x.shape, out_dtype), arch)
    assert tikv.dequantize(got, out=out) is out
    oracle.assert_same_bits(out, reference.dequantize_groups(*want, row.bits, row.rule, out_dtype))


@pytest.mark.parametrize("name", ["quant4_64", "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4"])
def test_numbers_that_are_none(arch, rng, name):
    """A NaN and an infinity leave the others of their group as they would be without them."""
    row = formats.FORMATS[name]
    x = rng.standard_normal((6, WIDTH)).astype(np.float32)
    x[0, 3], x[1, 70], x[2, 5], x[3] = np.nan, np.inf, -np.inf, np.nan
    x[4, :64] = np.inf
    want = reference_of(x, row, scales_of(row))
    compare(split(tikv.quantize(oracle.place(x, arch), name)), want, name)


@pytest.mark.parametrize("name", ["quant2_32", "quant8_64"])
def test_numbers_near_the_largest(arch, rng, name):
    """Whose range may be above it, and the quotients of the range above 2**126."""
    row = formats.FORMATS[name]
    x = rng.standard_normal((8, WIDTH)).astype(np.float32)
    x = (x / abs(x).max(1, keepdims=True) * np.float32(3.4e38)).astype(BF16)
    compare(split(tikv.quantize(oracle.place(x, arch), name)), reference_of(x, row, BF16), name)


def ties(row, rng, groups):
    """Groups of float32 half-way between codes, and of those next to them."""
    last = (1 << row.bits) - 1
    x = rng.integers(0, 2 * last + 1, (groups, row.group)) / 2
    x[:, 0], x[:, 1] = 0, last
    x = (x * np.exp2(rng.integers(-9, 9, (groups, 1))) * rng.choice([-1, 1], (groups, 1))).astype(np.float32)
    near = (x.view(np.int32) + rng.integers(-2, 3, x.shape, np.int32)).view(np.float32)
    return np.where((rng.random(x.shape) < 0.5) & (x != 0), near, x)


def float_ties(row, rng):
    """Groups of every scale: numbers half-way between two floats of few bits, next to them, and beyond the largest."""
    element = ml_dtypes.float8_e4m3fn if row.bits == 8 else ml_dtypes.float4_e2m1fn
    codes = np.arange(128 if row.bits == 8 else 8, dtype=np.uint8).view(element).astype(np.float32)
    codes = codes[np.isfinite(codes)]
    middles = np.concatenate([(codes[1:] + codes[:-1]) / 2, codes, codes[-1] * np.float32([1, 1.01, 1.07, 1.25, 1.32])])
    x = rng.choice(middles, (400, WIDTH)) * rng.choice(np.float32([-1, 1]), (400, WIDTH))
    x[:, :: row.group] = codes[-1]  # so that the scale is one by which they are half-way, of MX's blocks
    least, most = (-9, 8) if row.rule == "nvfp4" else (-80, 60)
    x = x * np.exp2(rng.integers(least, most, (400, 1))).astype(np.float32)
    near = (x.view(np.int32) + rng.integers(-2, 3, x.shape, np.int32)).view(np.float32)
    return np.where((rng.random(x.shape) < 0.5) & (x != 0), near, x)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_floats_half_way(arch, rng, name):
    """Also the least numbers of float32, of which none is lost but by its scale, and blocks that count as 0."""
    row = formats.FORMATS[name]
    x = np.concatenate([float_ties(row, rng), np.zeros((14, WIDTH), np.float32)])
    for i, power in enumerate((-149, -127, -126, -117, -109, -101, -100, -99, -20, -10, -9, 9, 100, 127)):
        x[400 + i] = np.ldexp(rng.uniform(-1, 1, WIDTH), power)
    compare(split(tikv.quantize(oracle.place(x, arch), name)), reference_of(x, row, scales_of(row)), name)


@pytest.mark.parametrize("scale", [0.0625, 3.1e-3])
def test_a_scale_of_the_tensor(arch, rng, scale):
    """By which numbers are divided first; one that is no power of two is rounded."""
    row, x = formats.FORMATS["nvfp4"], awkward_groups(rng, np.float32)
    want = reference.quantize_groups(x, 4, 16, "nvfp4", scales_of(row), tensor_scale=scale)
    got = tikv.quantize(oracle.place(x, arch), "nvfp4", tensor_scale=scale)
    compare(split(got), want, "nvfp4")
    back = reference.dequantize_groups(*want, 4, "nvfp4", tensor_scale=scale)
    oracle.assert_same_bits(tikv.dequantize(got), back)
    assert not np.array_equal(want[0], reference_of(x, row, scales_of(row))[0])


@pytest.mark.parametrize("name", ["quant4_64", "quant8_64", "q8_0", "q4_0"])
def test_numbers_half_way(arch, rng, name):
    """Where a product with a reciprocal is on one side, and the quotient on the other."""
    row = formats.FORMATS[name]
    x = ties(row, rng, 2000 * WIDTH // row.group).reshape(-1, WIDTH)
    want = reference_of(x, row, scales_of(row))
    compare(split(tikv.quantize(oracle.place(x, arch), name)), want, name)


@pytest.mark.parametrize("name", ["quant4_64", "q4_0"])
def test_rows_of_an_odd_stride(arch, rng, name):
    """Three groups of 64, which a GPU gives no power of two of threads, at addresses that only 2 bytes divide."""
    row = formats.FORMATS[name]
    x = rng.standard_normal((9, 201)).astype(np.float16)
    want = reference_of(np.ascontiguousarray(x[:, 1:193]), row, np.float16)
    compare(split(tikv.quantize(oracle.place(x, arch)[:, 1:193], name)), want, name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.archs("cpu")
def test_codes_whose_bytes_are_not_counted(arch, rng, name, monkeypatch):
    """Arrays above 2 GiB, whose codes are stored by words: all arrays count as such."""
    monkeypatch.setattr(row_copy, "BYTES_COUNTED", 0)
    row, x = formats.FORMATS[name], awkward_groups(rng, np.float16)
    compare(split(tikv.quantize(x, name)), reference_of(x, row, scales_of(row, np.float16)), name)


@pytest.mark.parametrize("name", [name for name, row in formats.FORMATS.items() if row.rule == "affine"])
@pytest.mark.archs("cpu")
def test_mlx_gives_the_same_bits(arch, rng, name):
    """What a cache of mlx-lm holds, of each dtype."""
    mx = pytest.importorskip("mlx.core")
    row = formats.FORMATS[name]
    for dtype, of_mlx in ((np.float32, mx.float32), (np.float16, mx.float16), (BF16, mx.bfloat16)):
        x = awkward_groups(rng, dtype)
        given = mx.array(x.astype(np.float32)).astype(of_mlx)
        words, scales, biases = mx.quantize(given, group_size=row.group, bits=row.bits)
        want = [np.array(words), *(np.array(a.astype(mx.float32)).astype(dtype) for a in (scales, biases))]
        compare(reference_of(x, row, dtype), want, f"the reference of {name} in {np.dtype(dtype)}")
        if dtype is np.float32:
            got = tikv.quantize(x, tikv.Quant(bits=row.bits, group=row.group))
            compare(split(got), want, name)
            back = mx.dequantize(words, scales, biases, group_size=row.group, bits=row.bits)
            np.testing.assert_array_equal(oracle.to_numpy(tikv.dequantize(got)), np.array(back))


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
@pytest.mark.archs("cpu")
def test_gguf_gives_the_same_bits(arch, rng, name):
    """Whose blocks have the scale before the codes."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    x = awkward_groups(rng, np.float32)
    blocks = gguf.quants.quantize(x, kind).reshape(len(x), WIDTH // 32, -1)
    codes, scales, _ = split(tikv.quantize(x, name))
    np.testing.assert_array_equal(codes.view(np.uint8).reshape(*blocks.shape[:2], -1), blocks[..., 2:])
    np.testing.assert_array_equal(scales.view(np.uint16), blocks[..., :2].copy().view(np.uint16)[..., 0])
    back = gguf.quants.dequantize(blocks.reshape(len(x), -1), kind)
    np.testing.assert_array_equal(oracle.to_numpy(tikv.dequantize(tikv.quantize(x, name))), back)


@pytest.mark.parametrize(
    ("name", "group", "queries", "ring"),
    [
        ("quant4_64", 4, None, None),
        ("quant3_32", 1, None, None),
        ("q4_0", 1, 3, None),
        ("mxfp8", 1, 3, None),
        ("nvfp4", 4, None, None),
        pytest.param("mxfp4", 4, None, None, marks=pytest.mark.full),
        pytest.param("q8_0", 1, None, 24, marks=pytest.mark.full),
    ],
)
def test_attention_reads_the_codes(arch, rng, name, group, queries, ring):
    """Against float64 over the numbers that the codes stand for; short, full and empty sequences, and a ring."""
    heads, width, capacity, lens = 2, 64, 40, np.array([40, 23, 0] if ring is None else [61, 5, 24])
    k, v = (rng.standard_normal((3, heads, capacity, width)).astype(np.float16) for _ in "kv")
    caches = [tikv.quantize(oracle.place(a, arch), name) for a in (k, v)]
    real = [oracle.to_numpy(tikv.dequantize(cache)).astype(np.float64) for cache in caches]
    shape = (3, heads * group, width) if queries is None else (3, heads * group, queries, width)
    q = rng.standard_normal(shape).astype(np.float32)
    options = {} if ring is None else {"ring": True, "window": ring, "sinks": 2}
    got = tikv.decode_attention(oracle.place(q, arch), *caches, lens, **options, impl="taichi")
    got = oracle.to_numpy(got).reshape(3, heads * group, -1, width)
    for b, length in enumerate(lens):
        for t in range(queries or 1):
            seen = reference.visible_positions(length, t, queries or 1, held=ring, sinks=2 if ring else 0)
            slots = seen if ring is None else [p if p < 2 else 2 + (p - 2) % (ring - 2) for p in seen]
            for h in range(heads * group):
                row = q.reshape(3, heads * group, -1, width)[b, h, t]
                want, _ = reference.attention(row, *(a[b, h // group, slots] for a in real), scale=width**-0.5)
                np.testing.assert_allclose(got[b, h, t], want, rtol=0, atol=2e-5)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda k, v: (k, oracle.to_numpy(tikv.dequantize(v))), tikv.DTypeError, "v_cache is a ndarray"),
        (lambda k, v: (k, tikv.quantize(tikv.dequantize(v), "q4_0")), tikv.DTypeError, "K is q8_0 and V q4_0"),
        (
            lambda k, v: (k, tikv.quantize(np.ones((1, 1, 4, 32), np.float32), "q8_0")),
            tikv.ShapeError,
            "the same width",
        ),
        (lambda k, v: (k, v._replace(scales=None)), tikv.DTypeError, "scales"),
    ],
)
def test_caches_that_attention_refuses(arch, change, error, match):
    k, v = (tikv.quantize(np.ones((1, 1, 4, 64), np.float32), "q8_0") for _ in "kv")
    q = np.ones((1, 1, 64), np.float32)
    with pytest.raises(error, match=match):
        tikv.decode_attention(q, *change(k, v), 3)
    with pytest.raises(tikv.OptionError, match="a Quantized has its own scales"):
        tikv.decode_attention(q, k, v, 3, k_scale=1.0, v_scale=1.0)


SHARED = ["quant4_64", *(pytest.param(name, marks=pytest.mark.full) for name in ("q8_0", "mxfp8", "nvfp4"))]


def caches_of(rng, arch, name, *shape):
    """Two caches of codes of random numbers, and all their bits."""
    found = [tikv.quantize(oracle.place(rng.standard_normal(shape).astype(np.float32), arch), name) for _ in "kv"]
    return found, [split(cache) for cache in found]


def check_rows(caches, before, rows, places, name):
    """`places` gives the row that each slot of a cache got, and every other bit is as it was."""
    row = formats.FORMATS[name]
    for cache, was, new in zip(caches, before, rows, strict=True):
        coded = reference_of(np.ascontiguousarray(new), row, scales_of(row))
        want = [None if a is None else a.copy() for a in was]
        for to, source in places:
            for a, b in zip(want, coded, strict=True):
                if a is not None:
                    a[to] = b[source]
        compare(split(cache), want, name)


@pytest.mark.parametrize("name", SHARED)
def test_pools_of_codes(arch, rng, name):
    """Rows go to their slots, come back by a table, and are attended over; no other bit changes."""
    pools, before = caches_of(rng, arch, name, 5, 4, 2, 64)
    rows = [rng.standard_normal((4, 2, 64)).astype(np.float32) for _ in "kv"]
    slots = [3, -1, 17, 8]
    tikv.write_slots(*(oracle.place(a, arch) for a in rows), *pools, np.array(slots))
    check_rows(pools, before, rows, [(divmod(s, 4), t) for t, s in enumerate(slots) if s >= 0], name)
    real = [oracle.to_numpy(tikv.dequantize(pool)) for pool in pools]
    out = oracle.place(oracle.random_bits(rng, (7, 2, 64), np.float32), arch)
    assert tikv.gather_paged(pools[1], np.array([4, 1]), 7, out=out) is out
    oracle.assert_same_bits(out, real[1][[4, 1]].reshape(8, 2, 64)[:7])
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    got = oracle.to_numpy(tikv.paged_decode_attention(oracle.place(q, arch), *pools, np.array([[4, 1]]), 7))
    k, v = (a[[4, 1]].reshape(8, 2, 64)[:7].astype(np.float64) for a in real)
    for h in range(4):
        want, _ = reference.attention(q[0, h], k[:, h // 2], v[:, h // 2], scale=64**-0.5)
        np.testing.assert_allclose(got[0, h], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SHARED)
def test_caches_of_codes(arch, rng, name):
    """`copy_kv` into a ring, `copy` into one cache of tokens, `append_ragged` on both sides of a batch's range."""
    rows = [rng.standard_normal((3, 2, 64)).astype(np.float32) for _ in "kv"]
    placed = [oracle.place(a, arch) for a in rows]
    caches, before = caches_of(rng, arch, name, 2, 6, 64)
    tikv.copy_kv(*placed, *caches, position=9, window=5)
    by_head = [a.swapaxes(0, 1) for a in rows]
    check_rows(caches, before, by_head, [((slice(None), (9 + t) % 5), (slice(None), t)) for t in range(3)], name)
    (cache, _), before = caches_of(rng, arch, name, 6, 2, 64)
    tikv.copy(placed[0], cache, position=2, cache_layout="token_major")
    check_rows([cache], before[:1], rows[:1], [(slice(2, 5), slice(None))], name)
    caches, before = caches_of(rng, arch, name, 2, 2, 5, 64)
    new = [rng.standard_normal((2, 2, 3, 64)).astype(np.float32) for _ in "kv"]
    tikv.append_ragged(*(oracle.place(a, arch) for a in new), *caches, np.array([-1, 4]))
    places = [((b, slice(None), s), (b, slice(None), t)) for b, s, t in ((0, 0, 1), (0, 1, 2), (1, 4, 0))]
    check_rows(caches, before, new, places, name)


@pytest.mark.parametrize(("name", "dtype"), [("quant4_64", np.float16), pytest.param("q8_0", BF16, marks=FULL)])
def test_the_fused_write_into_codes(arch, rng, name, dtype):
    """What `norm_rope` gives, quantised: in a ring and in pages."""
    tokens, heads, width = 4, 2, 64
    angles = rng.standard_normal((16, width // 2)).astype(np.float32)
    how = tikv.NormRope(mode="half", cos=np.cos(angles), sin=np.sin(angles))
    qkv = rng.standard_normal((tokens, 3 * heads * width)).astype(dtype)
    q, k, v = (np.ascontiguousarray(a).reshape(tokens, heads, width) for a in np.split(qkv, 3, axis=1))
    turned = oracle.to_numpy(tikv.norm_rope(oracle.place(k, arch), how, weight="k", position=7))
    rows = [turned, v.astype(np.float32)]
    caches, before = caches_of(rng, arch, name, heads, 6, width)
    got = tikv.write_qkv(oracle.place(qkv, arch), *caches, num_q_heads=heads, norm_rope=how, position=7, window=5)
    want = np.empty_like(q) if arch != "cuda" else oracle.place(np.empty_like(q), arch)
    oracle.assert_same_bits(got, tikv.norm_rope(oracle.place(q, arch), how, position=7, out=want))
    by_head = [a.swapaxes(0, 1) for a in rows]
    check_rows(caches, before, by_head, [((slice(None), (7 + t) % 5), (slice(None), t)) for t in range(4)], name)
    pools, before = caches_of(rng, arch, name, 3, 4, heads, width)
    slots = [2, -1, 11, 4]
    options = {"slot_mapping": np.array(slots), "rope_positions": np.arange(7, 11), "layout": "NHD"}
    tikv.write_qkv(oracle.place(qkv, arch), *pools, num_q_heads=heads, norm_rope=how, **options)
    check_rows(pools, before, rows, [(divmod(s, 4), t) for t, s in enumerate(slots) if s >= 0], name)


def _apart(cache):
    """Its scales and biases as two arrays, which cannot be written by one launch."""
    return cache._replace(scales=oracle.to_numpy(cache.scales).copy(), biases=oracle.to_numpy(cache.biases).copy())


_ROWS = np.ones((2, 2, 64), np.float32)
_QKV = np.ones((2, 6 * 64), np.float32)
REFUSED = {
    "a write of parts apart": (
        lambda k, v: tikv.write_slots(_ROWS, _ROWS, k, _apart(v), np.array([0, 1])),
        tikv.ShapeError,
        "are not laid out so. Write into what tikv.quantize returned",
    ),
    "scales beside them": (
        lambda k, v: tikv.write_slots(_ROWS, _ROWS, k, v, np.array([0, 1]), k_scale=1.0, v_scale=1.0),
        tikv.OptionError,
        "a Quantized has its own scales",
    ),
    "another layout": (
        lambda k, v: tikv.write_slots(_ROWS, _ROWS, k, v, np.array([0, 1]), layout="HND"),
        tikv.OptionError,
        "Use 'NHD', or a PagedKVCacheStore",
    ),
    "one cache of codes": (
        lambda k, v: tikv.write_slots(_ROWS, _ROWS, k, np.ones((3, 4, 2, 64), np.float32), np.array([0, 1])),
        tikv.DTypeError,
        "v_pool is a ndarray. Pass a Quantized for both",
    ),
    "a slot outside": (
        lambda k, v: tikv.write_slots(_ROWS, _ROWS, k, v, np.array([0, 12])),
        tikv.PositionError,
        "slot",
    ),
    "rows of float64": (
        lambda k, v: tikv.write_slots(_ROWS.astype(np.float64), _ROWS.astype(np.float64), k, v, np.array([0, 1])),
        tikv.DTypeError,
        "cannot quantise k",
    ),
    "rows of another width": (
        lambda k, v: tikv.write_slots(_ROWS[..., :32], _ROWS[..., :32], k, v, np.array([0, 1])),
        tikv.ShapeError,
        "head width",
    ),
    "a gather with a scale": (
        lambda k, v: tikv.gather_paged(k, np.array([0]), 1, scale=1.0),
        tikv.OptionError,
        "Leave scale out",
    ),
    "attention in HND": (
        lambda k, v: tikv.paged_decode_attention(_ROWS, k, v, np.array([[0], [1]]), 1, layout="HND"),
        tikv.OptionError,
        "Use 'NHD'",
    ),
    "a fused write without a place": (
        lambda k, v: tikv.write_qkv(_QKV, k, v, num_q_heads=2, layout="NHD"),
        tikv.PositionError,
        "Pass one of the two",
    ),
    "a fused write of other heads": (
        lambda k, v: tikv.write_qkv(_QKV, k, v, num_q_heads=3, layout="NHD", slot_mapping=np.array([0, 1])),
        tikv.ShapeError,
        "the width of qkv",
    ),
    "a fused write to a slot outside": (
        lambda k, v: tikv.write_qkv(_QKV, k, v, num_q_heads=2, layout="NHD", slot_mapping=np.array([0, 12])),
        tikv.PositionError,
        "slot",
    ),
    "a fused write into a cache that is a pool": (
        lambda k, v: tikv.write_qkv(_QKV, k, v, num_q_heads=2, position=0),
        tikv.ShapeError,
        "k_dst",
    ),
}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_write_changes_no_code(arch, rng, what):
    call, error, match = REFUSED[what]
    pools, before = caches_of(rng, arch, "quant4_64", 3, 4, 2, 64)
    with pytest.raises(error, match=match):
        call(*pools)
    for pool, was in zip(pools, before, strict=True):
        compare(split(pool), was, what)


@pytest.mark.archs("cpu")
def test_a_position_beyond_a_cache_of_codes_writes_nothing(arch, rng):
    caches, before = caches_of(rng, arch, "quant4_64", 2, 6, 64)
    with pytest.raises(tikv.CapacityError, match="6"):
        tikv.write_qkv(_QKV, *caches, num_q_heads=2, position=5)
    with pytest.raises(tikv.CapacityError, match="6"):
        tikv.copy_kv(_ROWS, _ROWS, *caches, position=5)
    for cache, was in zip(caches, before, strict=True):
        compare(split(cache), was, "a cache")


@pytest.mark.archs("cpu")
def test_strided_rows_and_parts_of_others(arch, rng):
    """A slice of a wider array; and codes, scales and biases that lie apart."""
    whole = rng.standard_normal((5, 3, 2 * WIDTH)).astype(np.float32)
    x = whole[:, 1:, 32 : 32 + WIDTH]
    got = tikv.quantize(x, tikv.Quant(4, 32), scale_dtype="float16")
    want = reference.quantize_groups(np.ascontiguousarray(x), 4, 32, "affine", np.float16)
    compare(split(got), want, "a slice")
    apart = tikv.Quantized(*want, got.format, x.shape)
    oracle.assert_same_bits(tikv.dequantize(apart), reference.dequantize_groups(*want, 4, "affine"))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda x: tikv.Quant(bits=5), tikv.OptionError, r"bits=5 is not supported\. Use one of \(2, 3, 4, 8\)"),
        (lambda x: tikv.Quant(bits=4, group=48), tikv.OptionError, "group=48"),
        (lambda x: tikv.Quant(bits=4, axis="rows"), tikv.OptionError, "axis='rows' is not supported"),
        (lambda x: tikv.quantize(x[:, :96], tikv.Quant(4, 64)), tikv.ShapeError, "x is 96 wide"),
        (lambda x: tikv.quantize(x, "q5_0"), tikv.OptionError, "unknown format 'q5_0'. Use 'int8', 'int4', 'q8_0'"),
        (lambda x: tikv.quantize(x, "float8_e4m3fn"), tikv.DTypeError, "'int8', 'int4', 'q8_0', 'q4_0', 'mxfp8'"),
        (lambda x: tikv.quantize(x, "mxfp4", scale_dtype="float16"), tikv.DTypeError, "Use float8_e8m0fnu"),
        (lambda x: tikv.quantize(x, "mxfp4", tensor_scale=2.0), tikv.OptionError, "mxfp4 has no scale for the whole"),
        (lambda x: tikv.quantize(x, "nvfp4", tensor_scale=0.0), tikv.OptionError, "tensor_scale"),
        (lambda x: tikv.quantize(x.astype(np.float64), "q8_0"), tikv.DTypeError, "Pass float32"),
        (lambda x: tikv.quantize(x, "q8_0", scale_dtype="float32"), tikv.DTypeError, "not supported for q8_0"),
        (lambda x: tikv.dequantize(tikv.quantize(x, "q8_0"), x), tikv.OptionError, "Leave scale out"),
        (lambda x: tikv.dequantize(tikv.quantize(x, tikv.Quant(4))._replace(biases=None)), tikv.ShapeError, "missing"),
        (lambda x: tikv.dequantize(tikv.quantize(x, "q8_0")._replace(shape=(2, 64))), tikv.ShapeError, "codes is"),
        (lambda x: tikv.dequantize(tikv.quantize(x, "q8_0"), out=x[:1]), tikv.ShapeError, "out is"),
    ],
)
def test_refused_calls(arch, call, error, match):
    with pytest.raises(error, match=match):
        call(np.ones((2, WIDTH), np.float32))
