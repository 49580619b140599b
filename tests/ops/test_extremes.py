"""Each format at the edges of float32: the largest and the least numbers, infinities, NaNs, and such scales.

Codes, scales and the numbers that they give back have the bits of the reference on every back end. CUDA, lavapipe and
perhaps others take a subnormal number for 0, or the result of an operation if it would be one.
"""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference

BF16 = np.dtype(ml_dtypes.bfloat16)
WIDTH = 128
FULL = pytest.mark.full
TINY = 2.0**-126  # the least normal float32
pytestmark = [pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"), pytest.mark.thorough]


def extreme_rows(dtype=np.float32):
    """Rows of every magnitude that a dtype has, mixtures of them, and rows with NaNs and infinities."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)
    limits = ml_dtypes.finfo(dtype)
    largest, least = float(limits.max), float(limits.smallest_subnormal)
    sizes = [largest, largest / 2, largest / 127, 65504.0, 2688.0, 1.0, 2.0**-24, 1e-7, 2.0**-9 * 6]
    sizes += [TINY * f for f in (256, 127, 2, 1, 0.9, 0.5)] + [least * 200, least, 2.0**-99.5, 2.0**-100, 2.0**-101]
    rows = []
    for size in sizes:
        rows.append(rng.uniform(-1, 1, (2, WIDTH)) * size)
        rows[-1][:, ::16] = size * rng.choice([-1, 1], (2, WIDTH // 16))
    signed = [*sizes, *(-size for size in sizes), 0.0, -0.0]
    rows.append(rng.choice(signed, (16, WIDTH)))
    rows.append(np.where(rng.random((16, WIDTH)) < 0.9, rows[-1], rng.choice([np.nan, np.inf, -np.inf], (16, WIDTH))))
    rows.append(rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], (4, WIDTH)))
    rows.append(rng.choice([largest, least], (4, WIDTH)))
    rows += [np.full((1, WIDTH), x) for x in (np.nan, np.inf, -np.inf, 0.0, -0.0)]
    with np.errstate(all="ignore"):
        return np.concatenate(rows).astype(dtype)


def compare_groups(x, arch, name, **options):
    """`quantize` and `dequantize` of rows against the reference; a NaN that is given back may be any NaN."""
    row = formats.parse_format(name)
    got = tikv.quantize(oracle.place(x, arch), name, **options)
    whole = options.get("tensor_scale", 1.0)
    turned = x if row.seed is None else reference.hadamard(x.astype(np.float32), row.seed)
    scale_dtype = oracle.to_numpy(got.scales).dtype
    want = reference.quantize_groups(turned, row.bits, row.group, row.rule, scale_dtype, tensor_scale=whole)
    for what, a, b in zip(("codes", "scales", "biases"), got[:3], want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            oracle.assert_same_bits(a, b, what=f"{what} of {name}, {options}")
    back = reference.dequantize_groups(*want, row.bits, row.rule, tensor_scale=whole)
    if row.seed is not None:
        back = reference.hadamard(back, row.seed, back=True)
    numbers = tikv.dequantize(got, out=oracle.place(np.zeros(x.shape, np.float32), arch))
    oracle.assert_same_bits(numbers, back, what=f"numbers of {name}, {options}", any_nan=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("quant4_64", np.float32),
        ("q8_0", np.float32),
        ("q4_0", np.float32),
        ("mxfp8", np.float32),
        ("mxfp4", np.float32),
        ("nvfp4", np.float32),
        ("mxfp8_hadamard", np.float32),
        ("quant8_64_hadamard", np.float32),
        *(pytest.param(f"quant{bits}_32", np.float32, marks=FULL) for bits in (2, 3, 8)),
        *(pytest.param(f"{name}_hadamard", np.float32, marks=FULL) for name in ("q8_0", "q4_0", "mxfp4", "quant3_32")),
        *(pytest.param(name, BF16, marks=FULL) for name in ("quant4_64", "q8_0", "q4_0", "mxfp8", "nvfp4_hadamard")),
        *(pytest.param(name, np.float16, marks=FULL) for name in ("quant4_64", "q4_0", "mxfp4", "nvfp4")),
    ],
)
def test_groups(arch, name, dtype):
    row = formats.parse_format(name)
    for scale in ("float16", "bfloat16", "float32") if row.rule == "affine" else (None,):
        compare_groups(extreme_rows(dtype), arch, name, **({} if scale is None else {"scale_dtype": scale}))


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("nvfp4_hadamard", marks=FULL)])
def test_quotients_beyond_float32_are_large_numbers(arch, name):
    """Divided by the scale of the whole tensor, numbers become infinite, which made their blocks 0 on GPUs."""
    for scale in (0.5, 3.1e-3, 1e-30, TINY, 3e38):
        compare_groups(extreme_rows(), arch, name, tensor_scale=scale)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_numbers_of_any_codes_and_scales(arch, rng, name):
    """Codes that other programs wrote may have scales that `quantize` never gives, so that products are subnormal."""
    row = formats.FORMATS[name]
    codes = oracle.random_bits(rng, (256, WIDTH * row.bits // 32), np.uint32)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], WIDTH // row.group, 1).view(row.scale_dtypes[0].numpy)
    for whole in (1.0, TINY, 2.0**-120) if row.has_tensor_scale else (1.0,):
        like = tikv.quantize(oracle.place(np.zeros((256, WIDTH), np.float32), arch), name, **(
            {"tensor_scale": whole} if row.has_tensor_scale else {}
        ))  # fmt: skip
        given = like._replace(codes=oracle.place(codes, arch), scales=oracle.place(scales, arch))
        got = tikv.dequantize(given, out=oracle.place(np.zeros((256, WIDTH), np.float32), arch))
        want = reference.dequantize_groups(codes, scales, None, row.bits, row.rule, tensor_scale=whole)
        oracle.assert_same_bits(got, want, any_nan=True)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [("float16", np.float32), ("float32", np.float32), pytest.param("float32", BF16, marks=FULL)],
)
def test_int8(arch, scale, dtype):
    """Also numbers that have no exact product with a scale of another program, which may be subnormal."""
    x = extreme_rows(dtype)
    codes, scales = tikv.quantize(oracle.place(x, arch), "int8", scale_dtype=scale)
    want, want_scales = reference.quantize(x, np.dtype(scale))
    oracle.assert_same_bits(scales, want_scales, what="scales")
    oracle.assert_same_bits(codes, want, what="codes")
    given = np.resize(np.array([1e-45, 1e-40, TINY / 3, TINY, 1e-30, 0.0, 3e38, np.inf], scale), len(x))
    for numbers in (want_scales, given):
        got = tikv.dequantize(oracle.place(want, arch), oracle.place(numbers, arch))
        oracle.assert_same_bits(got, reference.dequantize(want, numbers, got.dtype.name), any_nan=True)


SCALES = [None, 0.5, 3.1e-3, 1e-30, 3e38, TINY, 1e-40, 1e-45, 0.0, -2.0, np.inf, np.nan]


@pytest.mark.parametrize("name", ["float8_e4m3fn", pytest.param("float8_e5m2", marks=FULL)])
def test_float8(arch, name):
    """With scales in an array, which no check sees: of any sign, subnormal, 0, infinite or a NaN."""
    dtype, x = np.dtype(getattr(ml_dtypes, name)), extreme_rows()[:, None]
    x = np.ascontiguousarray(x[: len(x) // 4 * 4])
    blocks = len(x) // 4
    for scale in SCALES:
        given = None if scale is None else oracle.place(np.array([scale], np.float32), arch)
        pools = [oracle.place(np.zeros((blocks, 4, 1, WIDTH), dtype), arch) for _ in "kv"]
        slots, scales = np.arange(len(x)), {} if scale is None else {"k_scale": given, "v_scale": given}
        tikv.write_slots(oracle.place(x, arch), oracle.place(x, arch), *pools, slots, **scales)
        by = np.float32(1 if scale is None else scale)
        with np.errstate(all="ignore"):
            want = reference.encode(x / by, dtype).reshape(blocks, 4, 1, WIDTH)
            back = want.astype(np.float32).reshape(x.shape) * by
        oracle.assert_same_bits(pools[0], want, what=f"codes with the scale {scale}", any_nan=True)
        pool, out = oracle.place(want.copy(), arch), oracle.place(np.zeros(x.shape, np.float32), arch)
        tikv.gather_paged(pool, np.arange(blocks), len(x), out=out, **({} if scale is None else {"scale": given}))
        oracle.assert_same_bits(out, back, what=f"numbers with the scale {scale}", any_nan=True)


def finite_rows(heads, tokens, width):
    """Rows of extreme magnitudes of which attention's sums stay finite."""
    rng = np.random.default_rng(1)
    sizes = np.resize([1e4, 1.0, 1e-7, 2.0**-100, TINY, TINY / 3, 1e-44, 0.0], (heads, tokens))
    return (rng.uniform(-1, 1, (heads, tokens, width)) * sizes[..., None]).astype(np.float32)


@pytest.mark.parametrize(
    "name",
    [
        *("int8", "nvfp4", "quant4_32"),
        *(pytest.param(name, marks=FULL) for name in ("q8_0", "q4_0", "mxfp8", "mxfp4", "quant2_32")),
        *(pytest.param(name, marks=FULL) for name in ("float8_e4m3fn", "float8_e5m2")),
    ],
)
def test_attention(arch, name):
    """Over keys and values of every magnitude, within float32's error of the largest value."""
    heads, tokens, width = 2, 24, 32
    k, v = finite_rows(heads, tokens, width), finite_rows(heads, tokens, width)[:, ::-1].copy()
    k = np.minimum(abs(k), np.float32(8)) * np.sign(k)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=width, capacity=tokens, dtype=name)
    rows = [oracle.place(a, arch) for a in (k, v)]
    store.append(0, *rows, layout="head_major")
    keys, values = (oracle.as_stored(a, name).astype(np.float64) for a in (k, v))
    q = np.random.default_rng(2).standard_normal((1, heads, width)).astype(np.float32)
    got = oracle.to_numpy(store.attend(0, oracle.place(q, arch)))[0]
    for h in range(heads):
        want, _ = reference.attention(q[0, h], keys[h], values[h], scale=width**-0.5)
        np.testing.assert_allclose(got[h], want, rtol=0, atol=1e-5 * abs(values[h]).max())


@pytest.mark.parametrize(
    ("bits", "kept"), [(4, np.float16), *(pytest.param(bits, np.float32, marks=FULL) for bits in (2, 3, 8))]
)
def test_groups_along_tokens(arch, bits, kept):
    """A channel of 32 tokens is a group: keys of every magnitude come back as the reference's codes give them."""
    group, width = 32, 32
    tokens = 2 * group + 1  # with one more than the residual and a group have, the oldest group becomes codes
    keys = np.ascontiguousarray(extreme_rows()[:tokens, :width]).reshape(tokens, 1, width)
    keys = np.where(np.isfinite(keys) & (abs(keys) < 65504), keys, np.float32(-1.5))
    quant = tikv.Quant(bits, group, axis="tokens", residual=group)
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": width, "capacity": 128}
    store = tikv.KVCacheStore(**form, dtype=quant, scale_dtype=np.dtype(kept).name)
    store.append(0, oracle.place(keys, arch), oracle.place(keys, arch))
    got = oracle.to_numpy(store.tokens(0)[0]).reshape(tokens, width)[:group]
    channels = np.ascontiguousarray(keys[:group, 0].T).astype(kept)
    want = reference.quantize_groups(channels, bits, group, "affine", kept)
    oracle.assert_same_bits(got, np.ascontiguousarray(reference.dequantize_groups(*want, bits, "affine").T))
