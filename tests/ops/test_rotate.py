"""`rotate`: the same bits as the reference on every back end, and the keys that float64 finds at the new position."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import reference
from tikv.ops import rotate as operation

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
SHAPE = (2, 2, 9)


def places(rng):
    """Positions before and after; one row is none, one stays where it is."""
    before = np.sort(rng.integers(0, 5000, SHAPE))
    after = np.broadcast_to(np.arange(SHAPE[2]), SHAPE).copy()
    before[0, 0, 3], after[1, 1, 2] = -1, before[1, 1, 2]
    return before, after


def moved_by(before, after):
    return np.where((before < 0) | (after < 0), 0, after - before)


@pytest.mark.parametrize(
    ("dtype", "width", "rope_dim", "interleaved"),
    [(np.float32, 8, 8, False), (np.float16, 20, 12, False), (BF16, 6, 2, True), (np.float16, 16, 16, True)],
    ids=["f32", "f16-partial", "bf16-interleaved", "f16-interleaved"],
)
def test_bits(arch, rng, dtype, width, rope_dim, interleaved):
    before, after = places(rng)
    freq = 1e4 ** -(np.arange(rope_dim // 2) / (rope_dim // 2))
    rows = oracle.numbers(rng, (*SHAPE, width), dtype)
    want = reference.rotate(rows, moved_by(before, after), freq, interleaved=interleaved)
    guarded = oracle.Guarded(rng, rows)
    k = oracle.place(guarded.array, arch)
    assert tikv.rotate(k, before, after, tikv.Rope(freq, interleaved=interleaved)) is k
    oracle.assert_same_bits(k, reference.encode(want, np.dtype(dtype)))
    guarded.check()


@pytest.mark.parametrize(
    ("dtype", "width", "rope_dim", "interleaved"),
    [(E4M3, 20, 12, False), (E5M2, 16, 16, True), pytest.param(E4M3, 7, 6, True, marks=pytest.mark.full)],
    ids=["e4m3-partial", "e5m2-interleaved", "e4m3-odd"],
)
def test_floats_of_8_bits_saturate(arch, rng, dtype, width, rope_dim, interleaved):
    """Every byte; a row that stays keeps its bits, NaNs of any payload."""
    before, after = places(rng)
    freq = 1e3 ** -(np.arange(rope_dim // 2) / (rope_dim // 2))
    rows = rng.integers(0, 256, (*SHAPE, width), dtype=np.uint8).view(dtype)
    moved = moved_by(before, after)
    with np.errstate(invalid="ignore"):
        want = reference.encode(reference.rotate(rows, moved, freq, interleaved=interleaved), np.dtype(dtype))
    want = np.where((moved == 0)[..., None], rows, want)
    want[..., rope_dim:] = rows[..., rope_dim:]
    guarded = oracle.Guarded(rng, rows)
    k = oracle.place(guarded.array, arch)
    tikv.rotate(k, before, after, tikv.Rope(freq, interleaved=interleaved))
    oracle.assert_same_bits(k, want, any_nan=True)
    oracle.assert_same_bits(oracle.to_numpy(k)[moved == 0], rows[moved == 0])
    guarded.check()


def test_positions_of_all_heads_and_of_calls_before(arch, rng):
    """Positions for all heads or for sequences, and those of calls before again: the bits that each row's own have."""
    rows = rng.standard_normal((*SHAPE, 8)).astype(np.float32)
    batch, heads, tokens = SHAPE
    to = np.arange(batch * tokens).reshape(batch, tokens)
    cases = [
        (np.arange(tokens) * 2 + step, after, np.array(freq))
        for step in (1, 2)
        for after in (to[0], to, np.tile(to[0], (batch, heads, 1)))
        for freq in ([1.0, 0.3, 0.05, 0.01], [0.5, 0.1, 0.02, 0.005])
    ]
    for before, after, freq in [*cases, *cases[:3], *cases[-2:]]:
        k = oracle.place(rows.copy(), arch)
        tikv.rotate(k, before, after, tikv.Rope(freq))
        moved = np.broadcast_to(after if after.ndim != 2 else after[:, None], SHAPE) - before
        oracle.assert_same_bits(k, reference.rotate(rows, moved, freq).astype(np.float32))


@pytest.mark.parametrize(("batch", "heads"), [(1, 8), (3, 3), (2, 4)], ids=["8-heads", "odd", "sequences"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.full(unless=lambda case: case["interleaved"] == (case["batch"] == 2))
def test_heads_of_the_same_positions_are_turned_together(arch, rng, batch, heads, interleaved):
    """Part of a head, heads and sequences that do not divide alike, positions of all or of sequences."""
    tokens, freq = 7, np.array([1.0, 0.3, 0.05, 0.01, 0.5, 0.1])
    after = rng.integers(0, 50, (batch, tokens))
    after[:, 2] = -1
    for to in (after[0], after):
        rows = rng.standard_normal((batch, heads, tokens, 20)).astype(np.float16)
        guarded = oracle.Guarded(rng, rows)
        k = oracle.place(guarded.array, arch)
        tikv.rotate(k, np.arange(tokens) + 20, to, tikv.Rope(freq, interleaved=interleaved))
        by = np.where(to < 0, 0, to - np.arange(tokens) - 20)
        by = np.broadcast_to(by[:, None] if by.ndim == 2 else by, rows.shape[:3])
        want = reference.rotate(rows, by, freq, interleaved=interleaved)
        oracle.assert_same_bits(k, np.where((by == 0)[..., None], rows, want.astype(np.float16)))
        guarded.check()


@pytest.mark.parametrize(
    ("width", "interleaved"), [(6, False), pytest.param(16, True, marks=pytest.mark.full)], ids=["half", "interleaved"]
)
def test_int8_heads_of_the_same_positions_are_turned_together(arch, rng, width, interleaved):
    """One sequence's positions for its heads, or all's: codes and scales are those of rows turned alone."""
    batch, heads, tokens = 2, 4, 5
    freq = 10.0 ** -np.arange(width // 2)
    after = rng.integers(0, 50, (batch, tokens))
    after[:, 2] = -1
    for to in (after[0], after):
        rows = oracle.numbers(rng, (batch, heads, tokens, width), np.float32)
        q, scale = reference.quantize(rows, np.float16)
        by = np.where(to < 0, 0, to - np.arange(tokens) - 20)
        by = np.broadcast_to(by[:, None] if by.ndim == 2 else by, rows.shape[:3])
        turned = reference.rotate(reference.dequantize(q, scale), by, freq, interleaved=interleaved)
        want = [np.where((by == 0).reshape(*by.shape, *[1] * (b.ndim - 3)), b, a)
                for a, b in zip(reference.quantize(turned, np.float16), (q, scale), strict=True)]  # fmt: skip
        k, scales = oracle.place(q.copy(), arch), oracle.place(scale.copy(), arch)
        tikv.rotate(k, np.arange(tokens) + 20, to, tikv.Rope(freq, interleaved=interleaved), scale=scales)
        oracle.assert_same_bits(scales, want[1])
        oracle.assert_same_bits(k, want[0])


@pytest.mark.archs("cpu")
def test_a_table_grows_and_then_costs_no_cosines(arch, rng, monkeypatch):
    """Differences on either side, far away and many: the bits of a table of its own, made only where one is lacking."""
    made = []
    plain = operation._cos_and_sin
    monkeypatch.setattr(operation, "_cos_and_sin", lambda *a: made.append(len(a[1])) or plain(*a))
    freq = np.array([1.0, 0.3, 0.05, 0.0123])  # no other test's

    def turn(by):
        rows = rng.standard_normal((1, 2, len(by), 8)).astype(np.float32)
        k, before = rows.copy(), np.arange(len(by)) + 10_000_000
        tikv.rotate(k, before, before + by, tikv.Rope(freq))
        oracle.assert_same_bits(k, reference.rotate(rows, np.broadcast_to(by, rows.shape[:3]), freq).astype(np.float32))
        sizes, made[:] = list(made), []
        return sizes

    down = -np.arange(1, 9)
    assert turn(down) == [8]
    assert turn(down[::-1]) == turn(down[2:5]) == []
    assert turn(down - 1) == [16], "twice as many"
    assert turn(down - 8) == []
    assert turn(np.array([3, 0, 4])) == [32], "on the other side"
    assert turn(np.array([5, -16, 10])) == []
    assert turn(np.array([1_000_000, -3])) == [2], "two of their own"
    assert turn(np.array([1_000_000, -3, -4])) == [3]
    monkeypatch.setattr(operation, "TABLE_BYTES", 40 * 8 * 4)
    assert turn(np.arange(-50, 0)) == [50], "too large"
    assert turn(np.arange(-24, 0)) == [40], "no larger than may be"
    assert turn(np.arange(-20, 15)) == []


@pytest.mark.parametrize("scale_dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_int8_gets_a_new_scale(arch, rng, scale_dtype):
    before, after = places(rng)
    freq = [1.0, 0.3, 0.01]
    q, scale = reference.quantize(oracle.numbers(rng, (*SHAPE, 10), np.float32), scale_dtype)
    turned = reference.rotate(reference.dequantize(q, scale), moved_by(before, after), freq)
    want = reference.quantize(turned, scale_dtype)
    for a, b in zip(want, (q, scale), strict=True):
        a[moved_by(before, after) == 0] = b[moved_by(before, after) == 0]
    k, scales = oracle.place(q, arch), oracle.place(scale, arch)
    tikv.rotate(k, before, after, tikv.Rope(freq), scale=scales)
    oracle.assert_same_bits(scales, want[1])
    oracle.assert_same_bits(k, want[0])


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["f32", "f16"])
def test_keys_are_those_of_the_new_position(arch, rng, dtype):
    """A key rotated for its position and moved is the key rotated for the new one, but for its first rounding."""
    freq = 1e6 ** -(np.arange(4) / 4)
    plain = rng.standard_normal((*SHAPE, 8))
    before, after = np.sort(rng.integers(0, 100_000, SHAPE)), rng.integers(0, 100_000, SHAPE)
    first, want = (reference.rotate(plain, p, freq, dtype=np.float64) for p in (before, after))
    k = oracle.place(first.astype(dtype), arch)
    tikv.rotate(k, before, after, tikv.Rope(freq))
    largest = np.abs(want).max()
    np.testing.assert_allclose(oracle.to_numpy(k).astype(np.float64), want, atol=2 * np.finfo(dtype).eps * largest)


@pytest.mark.archs("cpu")
def test_refused_calls_change_nothing(arch, rng):
    rows = oracle.numbers(rng, (*SHAPE, 8), np.float16)
    k, rope, at = rows.copy(), tikv.Rope([1.0, 0.1]), np.arange(9)
    codes = tikv.quantize(np.ones((2, 2, 9, 32), np.float16), "q8_0")
    for given, options, error, match in (
        ((k, at, at[:8], rope), {}, tikv.ShapeError, r"to_positions is i64\[8\] where \(9,\), \(2, 9\)"),
        ((k, at, at, tikv.Rope([1.0] * 5)), {}, tikv.ShapeError, "the rotation of 10 elements is wider than k"),
        ((k, at, at.astype(np.float32), rope), {}, tikv.DTypeError, "to_positions is f32"),
        ((k, at, at + 2**40, rope), {}, tikv.PositionError, "positions, which is a range of more than 4194304"),
        ((k, at, at, [1.0]), {}, tikv.OptionError, "Pass a tikv.Rope"),
        ((k.view(np.int8), at, at, rope), {}, tikv.DTypeError, "int8 keys need scale"),
        ((k, at, at, rope), {"scale": np.ones(SHAPE, np.float16)}, tikv.DTypeError, "other dtypes take no scale"),
        ((k[0], at, at, rope), {}, tikv.ShapeError, "must be"),
        ((k.view(np.float64), at, at, rope), {}, tikv.DTypeError, "Keys to rotate must be one of float32"),
        ((codes, at, at, rope), {}, tikv.DTypeError, "k holds codes of q8_0"),
    ):
        with pytest.raises(error, match=f"^rotate: .*{match}"):
            tikv.rotate(*given, **options)
    for freq, error in (([], tikv.ShapeError), ([[1.0]], tikv.ShapeError), ([np.nan], tikv.OptionError)):
        with pytest.raises(error, match=r"^Rope: inv_freq"):
            tikv.Rope(freq)
    oracle.assert_same_bits(k, rows)
