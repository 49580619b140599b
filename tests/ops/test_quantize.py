"""int8: the rule against an oracle that goes element by element, and the same rule in pools of every layout."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference, runtime

pytestmark = pytest.mark.full(each_value=True)

BF16 = ml_dtypes.bfloat16
SOURCES = [np.float32, np.float16, BF16]
SCALES = [np.float16, np.float32]
LAYOUTS = ("NHD", "HND", "VLLM")


def name(dtype):
    return np.dtype(dtype).name


def awkward_rows(rng, dtype, width):
    """Rows of every kind: any bits, ordinary, tiny, subnormal for the scale, zero, infinite, NaN, huge, ties."""
    rows = [oracle.numbers(rng, (40, width), np.float32) * np.exp2(rng.integers(-20, 20, (40, 1)), dtype=np.float32)]
    with np.errstate(invalid="ignore", over="ignore"):
        rows.append(oracle.random_bits(rng, (24, width), dtype).astype(np.float32))
        tiny = np.float32(10.0) ** -np.arange(1, 30, dtype=np.float32)
        rows.append(rng.standard_normal((len(tiny), width)).astype(np.float32) * tiny[:, None])
        special = np.zeros((6, width), np.float32)
        special[1] = -0.0
        special[2, : width // 2 + 1] = np.inf
        special[3] = np.nan
        special[4] = rng.standard_normal(width)
        special[4, :2] = [np.nan, -np.inf][:width]
        special[5] = 3.0e38
        rows.append(special)
        found = np.concatenate(rows).astype(dtype)
    # A float32 subnormal is zero where the device flushes it; bfloat16 has the same ones, float16 has none of them.
    if found.dtype != np.float16:
        found[np.abs(found.astype(np.float32)) < np.finfo(np.float32).tiny] = 0
    return found


@pytest.mark.parametrize("scale_dtype", SCALES, ids=name)
@pytest.mark.parametrize("dtype", SOURCES, ids=name)
def test_the_rule(arch, rng, dtype, scale_dtype):
    for width in (1, 3, 16, 128):
        x = awkward_rows(rng, dtype, width)
        q, scale = tikv.quantize(oracle.place(x, arch), scale_dtype)
        want_q, want_scale = reference.quantize(x, scale_dtype)
        oracle.assert_same_bits(scale, want_scale, what=f"scales of rows of {width}")
        oracle.assert_same_bits(q, want_q, what=f"rows of {width}")
        assert oracle.to_numpy(q).min() >= -127
        for out_dtype in (np.float32, np.float16, BF16):
            out = oracle.place(oracle.random_bits(rng, x.shape, out_dtype), arch)
            assert tikv.dequantize(q, scale, out) is out
            oracle.assert_same_bits(out, reference.dequantize(want_q, want_scale, out_dtype))
        oracle.assert_same_bits(tikv.dequantize(q, scale), reference.dequantize(want_q, want_scale))


def quantized(x, arch, scale_dtype="float16"):
    return tuple(oracle.to_numpy(a) for a in tikv.quantize(oracle.place(x, arch), scale_dtype))


def quantize_as_the_original(x):
    """By the float32 scale, stored as float16 afterwards, and not below 1e-8 / 127."""
    magnitude = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-8))
    scale = magnitude / np.float32(127)
    with np.errstate(invalid="ignore"):
        q = np.rint(np.clip(x * (np.float32(1) / scale), -127, 127))
    return q, scale[..., 0].astype(np.float16)


def worst_in_steps(x, q, scale):
    step = scale.astype(np.float64)[..., None]
    return float((np.abs(x.astype(np.float64) - q.astype(np.float64) * step) / step).max())


def test_an_element_is_within_half_a_step_of_the_stored_scale(arch, rng):
    """The original rounds the scale after using it: 0.55 steps."""
    x = rng.standard_normal((2000, 64)).astype(np.float32)
    q, scale = quantized(x, arch)
    assert worst_in_steps(x, q, scale) <= 0.5 + 1e-5
    assert worst_in_steps(x, *quantize_as_the_original(x)) > 0.53


@pytest.mark.parametrize("exponent", range(-30, 0, 3))
def test_tiny_rows_keep_a_scale(arch, rng, exponent):
    """The original's float16 scale is zero below 3.8e-6, and its rows with it."""
    x = rng.standard_normal((50, 32)).astype(np.float32) * np.float32(10.0) ** exponent
    for scale_dtype in SCALES:
        q, scale = quantized(x, arch, scale_dtype)
        assert scale.min() >= np.finfo(scale_dtype).tiny
        assert worst_in_steps(x, q, scale) <= 0.5 + 1e-5
    assert (np.abs(q).max(axis=-1) == 127).all(), "float32 scales resolve every row"
    if exponent == -9:
        assert not quantize_as_the_original(x)[1].any()


def test_nan_and_infinity_harm_nobody_else(arch):
    """In the original an infinity makes the scale infinite and every other element NaN; a NaN becomes 127."""
    row = np.float32([1.0, np.nan, -0.5, np.inf, 0.25, -np.inf])
    q, scale = quantized(row[None], arch, "float32")
    assert q.tolist() == [[127, 0, -64, 127, 32, -127]]
    assert scale.tolist() == [np.float32(1) / np.float32(127)]
    for lost in (np.float32([[np.nan, np.inf]]), np.float32([[0.0, -0.0]])):
        q, scale = quantized(lost, arch)
        assert q.tolist() == [[0, 127 if np.isinf(lost).any() else 0]]
        assert scale.tolist() == [np.finfo(np.float16).tiny]


def test_ties_go_to_even(arch):
    """The original's tests round halves away from zero."""
    row = np.float32([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5])
    q, scale = quantized(row[None], arch)
    assert scale.tolist() == [1.0]
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -126]]


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (0, 4), (3, 0, 2, 5), (1, 1), (2, 2, 2, 2, 3)], ids=str)
def test_shapes(arch, rng, shape):
    x = oracle.numbers(rng, shape, np.float16)
    q, scale = tikv.quantize(oracle.place(x, arch))
    want_q, want_scale = (
        reference.quantize(x) if x.size else (np.zeros(shape, np.int8), np.zeros(shape[:-1], np.float16))
    )
    oracle.assert_same_bits(q, want_q)
    oracle.assert_same_bits(scale, want_scale)
    oracle.assert_same_bits(tikv.dequantize(q, scale), reference.dequantize(want_q, want_scale))


def test_a_dtype_names_the_format_or_its_scales(arch, rng):
    x = oracle.numbers(rng, (3, 8), np.float32)
    for format, scales in (("int8", "float16"), (np.int8, "float16"), ("float32", "float32"), (np.float32, "float32")):
        q, scale = tikv.quantize(oracle.place(x, arch), format)
        assert str(scale.dtype) == scales
        oracle.assert_same_bits(q, reference.quantize(x, np.dtype(scales))[0])


def test_strided_rows_are_read_in_place(arch, rng):
    fused = oracle.numbers(rng, (6, 5, 24), np.float32)
    placed = oracle.place(fused, arch)
    for cut in (np.s_[:, :, 8:16], np.s_[::2, 1:4], np.s_[3], np.s_[:, 2]):
        q, scale = tikv.quantize(placed[cut])
        want_q, want_scale = reference.quantize(fused[cut])
        oracle.assert_same_bits(q, want_q)
        oracle.assert_same_bits(scale, want_scale)
        out = oracle.random_bits(rng, fused.shape, np.float32)
        want, target = out.copy(), oracle.place(out, arch)
        want[cut] = reference.dequantize(want_q, want_scale)
        tikv.dequantize(q, scale, target[cut])
        oracle.assert_same_bits(target, want)
    swapped = placed.swapaxes(0, 1)
    oracle.assert_same_bits(tikv.quantize(swapped)[0], reference.quantize(fused.swapaxes(0, 1))[0])


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_what_quantize_and_dequantize_refuse(arch, rng):
    x = oracle.numbers(rng, (4, 3, 8), np.float32)
    q, scale = np.zeros((4, 3, 8), np.int8), np.ones((4, 3), np.float32)
    out = oracle.random_bits(rng, x.shape, np.float32)
    before = out.copy()
    for call, error, match in (
        (lambda: tikv.quantize(q), tikv.DTypeError, "x is i8.*float32, float16 or bfloat16"),
        (lambda: tikv.quantize(x, scale_dtype="bfloat16"), tikv.DTypeError, "scale_dtype bfloat16 is not supported"),
        (lambda: tikv.quantize(x, "fp8"), tikv.DTypeError, "float8_e4m3fn has no scale for each row, so convert x"),
        (lambda: tikv.quantize(x, "bfloat16"), tikv.DTypeError, "bfloat16 has no scale for each row, so convert x"),
        (lambda: tikv.quantize(x, "half"), tikv.OptionError, "unknown format 'half'. Use 'int8'"),
        (lambda: tikv.quantize(x[:, :, ::2]), tikv.ShapeError, "not contiguous"),
        (lambda: tikv.quantize(x[:, :, :0]), tikv.ShapeError, "at least one element"),
        (lambda: tikv.quantize(np.zeros((), np.float32)), tikv.ShapeError, "at least one element"),
        (
            lambda: tikv.quantize(np.zeros((9, 9, 9, 3), np.float32)[::2, ::2, ::2]),
            tikv.ShapeError,
            "more than two axes",
        ),
        (lambda: tikv.dequantize(x, scale, out), tikv.DTypeError, "not int8"),
        (lambda: tikv.dequantize(q), tikv.DTypeError, "scale is missing. Pass the scales"),
        (lambda: tikv.dequantize(q, scale.astype(BF16), out), tikv.DTypeError, "scale is bf16"),
        (lambda: tikv.dequantize(q, scale[:3], out), tikv.ShapeError, r"scale is f32\[3,3\]"),
        (lambda: tikv.dequantize(q, scale, out[:3]), tikv.ShapeError, "out is"),
        (lambda: tikv.dequantize(q, scale, out.view(np.int32)), tikv.DTypeError, "out is i32"),
        (lambda: tikv.dequantize(q, out[:, :, 0].copy(), out.view(np.int8)[..., :8]), tikv.TikvError, "out"),
    ):
        with pytest.raises(error, match=match):
            call()
    oracle.assert_same_bits(out, before)


# Pools.

BLOCKS, PAGE, HEADS, WIDTHS = 5, 4, 3, (32, 16)
SLOTS = [7, -1, 0, 19, 4, 5, -7, 6, 13, 12, 3]


class Pools:
    """int8 pools and their scales, full of random bits, as the back end takes them."""

    def __init__(self, rng, arch, layout="NHD", scale_dtype=np.float16):
        self.layout = layout
        shapes = {
            "NHD": [(BLOCKS, PAGE, HEADS, d) for d in WIDTHS],
            "HND": [(BLOCKS, HEADS, PAGE, d) for d in WIDTHS],
            "VLLM": [(BLOCKS, HEADS, WIDTHS[0] // 16, PAGE, 16), (BLOCKS, HEADS, WIDTHS[1], PAGE)],
        }[layout]
        self.before = [oracle.random_bits(rng, shape, np.int8) for shape in shapes]
        self.scales_before = [oracle.random_bits(rng, (BLOCKS, PAGE, HEADS), scale_dtype) for _ in "kv"]
        self.guarded = [oracle.Guarded(rng, a) for a in (*self.before, *self.scales_before)]
        placed = [oracle.place(g.array, arch) for g in self.guarded]
        self.pools, self.scales = placed[:2], placed[2:]

    def write(self, rows, slots):
        k_scale, v_scale = self.scales
        tikv.write_slots(*rows, *self.pools, slots, layout=self.layout, k_scale=k_scale, v_scale=v_scale)

    def check(self, rows, slots):
        for i in (0, 1):
            q, scale = reference.quantize(rows[i], self.scales_before[i].dtype)
            want = reference.write_slots(q, self.before[i], slots, layout=self.layout)
            oracle.assert_same_bits(self.pools[i], want, what="kv"[i])
            want = reference.write_slots(scale[..., None], self.scales_before[i][..., None], slots)[..., 0]
            oracle.assert_same_bits(self.scales[i], want, what=f"scales of {'kv'[i]}")
        for guarded in self.guarded:
            guarded.check()

    def unchanged(self):
        for array, before in zip((*self.pools, *self.scales), (*self.before, *self.scales_before), strict=True):
            oracle.assert_same_bits(array, before)


def new_rows(rng, dtype, tokens=11):
    return [oracle.numbers(rng, (tokens, HEADS, width), dtype) for width in WIDTHS]


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"),
    [(np.float32, np.float32), (np.float16, np.float16), (BF16, np.float16)],
    ids=["f32-f32", "f16-f16", "bf16-f16"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_quantise_by_the_rule(arch, rng, layout, dtype, scale_dtype):
    """Many tokens of many heads: where the original's prefill was scrambled."""
    rows, case = new_rows(rng, dtype), Pools(rng, arch, layout, scale_dtype)
    case.write([oracle.place(a, arch) for a in rows], oracle.place(np.array(SLOTS), arch))
    case.check(rows, SLOTS)


@pytest.mark.parametrize(
    ("out_dtype", "scale_dtype"),
    [(None, np.float16), (np.float16, np.float16), (BF16, np.float32)],
    ids=["new-f16", "f16-f16", "bf16-f32"],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_are_gathered_and_dequantised(arch, rng, layout, out_dtype, scale_dtype):
    case, table, length = Pools(rng, arch, layout, scale_dtype), np.array([4, 0, 2, -1]), 2 * PAGE + 3
    for i, width in enumerate(WIDTHS):
        scale = np.abs(oracle.numbers(rng, (BLOCKS, PAGE, HEADS), scale_dtype))
        scales = oracle.place(scale, arch)
        q = reference.gather_paged(case.before[i], table, length, layout=layout)
        scale = reference.gather_paged(scale[..., None], table, length)[..., 0]
        want = reference.dequantize(q, scale, np.float32 if out_dtype is None else out_dtype)
        out = None if out_dtype is None else oracle.place(oracle.random_bits(rng, want.shape, out_dtype), arch)
        got = tikv.gather_paged(case.pools[i], table, length, layout=layout, scale=scales, out=out)
        assert got.shape == (length, HEADS, width)
        oracle.assert_same_bits(got, want)


def test_sequences_share_a_pool(arch, rng):
    """The original's pool had the blocks of one sequence, and took block numbers from an allocator for all of them."""
    case = Pools(rng, arch)
    tables = [[4, 0], [3, 1, 2]]
    rows = [new_rows(rng, np.float16, tokens) for tokens in (2 * PAGE, 2 * PAGE + 1)]
    for table, (k, v) in zip(tables, rows, strict=True):
        slots = np.concatenate([block * PAGE + np.arange(PAGE) for block in table])[: len(k)]
        case.write([oracle.place(k, arch), oracle.place(v, arch)], slots)
    for table, pair in zip(tables, rows, strict=True):
        for given, pool, scale in zip(pair, case.pools, case.scales, strict=True):
            got = tikv.gather_paged(pool, np.array(table), len(given), scale=scale)
            oracle.assert_same_bits(got, reference.dequantize(*reference.quantize(given)))


@pytest.mark.archs("vulkan", "cuda", "metal")
def test_a_slot_that_only_the_device_knows_to_be_outside_writes_no_scale(arch, rng):
    rows, case = new_rows(rng, np.float32), Pools(rng, arch)
    slots = np.array([*SLOTS[:-1], BLOCKS * PAGE + 2])
    if arch == "cuda":
        index = oracle.place(slots, arch)
    else:
        index = runtime.ti.ndarray(runtime.ti.i64, slots.shape)
        index.from_numpy(slots)
    case.write([oracle.place(a, arch) for a in rows], index)
    case.check(rows, [*SLOTS[:-1], -1])


@pytest.mark.archs("cpu", "vulkan", "metal")
def test_scales_that_are_refused(arch, rng):
    case, rows = Pools(rng, arch), new_rows(rng, np.float32)
    k_scale, v_scale = case.scales
    padded = np.zeros((BLOCKS, PAGE + 1, HEADS), np.float16)[:, :PAGE]
    for rows_given, scales, error, match in (
        (rows, {}, tikv.ShapeError, "k_scale is missing"),
        (rows, {"k_scale": k_scale}, tikv.ShapeError, "v_scale is missing"),
        (rows, {"k_scale": k_scale, "v_scale": v_scale[:, :, :2]}, tikv.ShapeError, r"v_scale is f16\[5,4,2\]"),
        (rows, {"k_scale": k_scale[:4], "v_scale": v_scale}, tikv.ShapeError, r"\(N, bs, H\) = \(5, 4, 3\)"),
        (rows, {"k_scale": k_scale, "v_scale": np.zeros(v_scale.shape, np.float32)}, tikv.DTypeError, "the same dtype"),
        (rows, {"k_scale": k_scale.view(BF16), "v_scale": v_scale}, tikv.DTypeError, "k_scale is bf16"),
        (rows, {"k_scale": k_scale, "v_scale": padded}, tikv.ShapeError, "gaps between its blocks"),
        (rows, {"k_scale": k_scale, "v_scale": k_scale}, tikv.ShapeError, "overlap"),
        (
            [np.zeros(a.shape, np.int8) for a in rows],
            {"k_scale": k_scale, "v_scale": v_scale},
            tikv.DTypeError,
            "cannot quantise",
        ),
    ):
        with pytest.raises(error, match=match):
            tikv.write_slots(*rows_given, *case.pools, SLOTS, **scales)
    with pytest.raises(tikv.DTypeError, match="an int8 pool needs its"):
        tikv.gather_paged(case.pools[0], [0], 1)
    with pytest.raises(tikv.ShapeError, match=r"scale is f16\[5,4,2\]"):
        tikv.gather_paged(case.pools[0], [0], 1, scale=k_scale[:, :, :2])
    with pytest.raises(tikv.DTypeError, match="int8 is read as"):
        tikv.gather_paged(case.pools[0], [0], 1, scale=k_scale, out=np.zeros((1, HEADS, WIDTHS[0]), np.int8))
    case.unchanged()
