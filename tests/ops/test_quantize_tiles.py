"""KVarN: the reference against the definition in float64, and the kernels against the reference, bit for bit."""

import shutil
import subprocess

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference
from tikv.arrays import read_host, runtime_of, to_device
from tikv.ops.quantize_tiles import TileRows, run_tiles

pytestmark = pytest.mark.thorough

BF16 = ml_dtypes.bfloat16
OF = ("keys", "values")


def uneven(rng, lead, tokens, width, dtype=np.float32):
    """Tokens and channels of very different magnitudes, as in models."""
    by_token, by_channel = (np.exp(rng.standard_normal(shape)) for shape in ((tokens, 1), width))
    return (rng.standard_normal((*lead, tokens, width)) * by_token * by_channel).astype(dtype)


def awkward(rng, tokens, width, dtype):
    """Tiles of ordinary tokens, with NaN, infinities, zeros, tiny and huge numbers, alike tokens, and of any bits."""
    x = uneven(rng, (9,), tokens, width)
    x[1, 3, 5], x[1, 7, 2], x[1, 7, 3] = np.nan, np.inf, -np.inf
    x[2] = 0
    x[3] = x[3, :1]
    x[4] *= np.float32(1e-20)
    x[5] *= np.float32(1e6)
    x[6, :, 1], x[6, ::2, 2] = 0, 1e30
    x[7] *= np.exp2(-rng.integers(0, 120, (tokens, 1))).astype(np.float32)
    with np.errstate(all="ignore"):
        x[8] = oracle.random_bits(rng, (tokens, width), dtype).astype(np.float32)
        x = x.astype(dtype)
    if x.dtype != np.float16:  # a device may take float32 subnormals for 0
        x[abs(x.astype(np.float32)) < np.finfo(np.float32).tiny] = 0
    return x


def by_definition(tile, bits, of):
    """(codes as rows, the tile that they stand for) of a tile G x D in float64, as KVarN states it, with logarithms."""
    matrix = np.ones((1, 1))
    while len(matrix) < tile.shape[1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix /= np.sqrt(len(matrix))
    x = tile.astype(np.float64) @ matrix
    t, c = np.zeros((len(x), 1)), np.zeros((1, x.shape[1]))

    def spread(axis):
        return (x / np.exp(t) / np.exp(c)).std(axis, ddof=1, keepdims=True)

    def imbalance():
        return sum(a.max() / max(a.min(), 1e-8) for a in (spread(1), spread(0)))

    iterates = [(imbalance(), t, c)]
    for _ in range(16):
        t = np.clip(t + np.log(np.clip(spread(1), 1e-3, 1e3)), -0.3, 10)
        c = np.clip(c + np.log(np.clip(spread(0), 1e-3, 1e3)), -0.3, 10)
        iterates.append((imbalance(), t, c))
    _, t, c = min(reversed(iterates), key=lambda iterate: iterate[0])
    balanced, axis, last = x / np.exp(t) / np.exp(c), 0 if of == "keys" else 1, 2**bits - 1
    low, high = balanced.min(axis, keepdims=True), balanced.max(axis, keepdims=True)
    scale = np.maximum((high - low) / last, 1e-10)
    codes = np.clip(np.round((balanced - low) / scale), 0, last)
    stands_for = (codes * scale + low) * np.exp(t) * np.exp(c) @ matrix.T
    return codes.T if of == "keys" else codes, stands_for


def codes_of(words, bits):
    bit = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return (bit.reshape(*words.shape[:-1], -1, bits) << np.arange(bits, dtype=np.uint8)).sum(-1)


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize(("group", "width", "bits"), [(128, 128, 4), (64, 64, 2), (64, 256, 4)])
def test_the_reference_is_the_definition(rng, group, width, bits, of):
    x = uneven(rng, (2,), group, width)
    tiles = reference.quantize_tiles(x, bits, group, of)
    back = reference.dequantize_tiles(*tiles, bits, of)
    for i, tile in enumerate(x):
        codes, stands_for = by_definition(tile, bits, of)
        differences = abs(codes - codes_of(tiles[0][i, 0], bits))
        assert differences.max() <= 1
        assert differences.mean() < 1e-3, "only ties may be rounded to the other side"
        error = abs(back[i] - stands_for).max() / abs(stands_for).max()
        assert error < 2.0**-7 or differences.max() > 0


def test_zeros_stay_zeros():
    for of in OF:
        zeros = reference.quantize_tiles(np.zeros((64, 32), np.float32), 4, 64, of)
        assert not reference.dequantize_tiles(*zeros, 4, of).any()


def test_few_bits_lose_less_than_groups_of_columns(rng):
    """What balancing is for: on uneven tiles its 4 bits lose less than mlx's, which take as many bits."""
    x = uneven(rng, (), 128, 128)
    tiles = reference.dequantize_tiles(*reference.quantize_tiles(x, 4, 128, "keys"), 4, "keys")
    groups = reference.dequantize_groups(*reference.quantize_groups(x, 4, 64, "affine"), 4, "affine")
    size = np.linalg.norm(x, axis=1)
    lost = [np.linalg.norm(y - x, axis=1) / size for y in (tiles, groups)]
    assert lost[0].mean() < lost[1].mean()


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [
        ("kvarn_k4v2_g64", 64, np.float32),
        ("kvarn_k4v4", 128, np.float16),
        ("kvarn_k4v2_g64", 96, BF16),
        pytest.param("kvarn_k4v2_g64", 288, np.float16, marks=[pytest.mark.archs("cuda"), pytest.mark.full]),
    ],
)
def test_the_bits_of_the_reference(arch, rng, name, width, dtype, of):
    form = formats.TILE_FORMATS[name]
    x = awkward(rng, form.group, width, dtype)
    expected = reference.quantize_tiles(x, form.bits(of), form.group, of)
    tiles = tikv.quantize(oracle.place(x, arch), name, of=of)
    for part, a, b in zip(("codes", "scales", "biases", "factors"), tiles, expected, strict=False):
        oracle.assert_same_bits(a, b, what=part)
    assert tiles.nbytes == sum(a.nbytes for a in expected)
    for out_dtype in (np.float32, dtype):
        out = oracle.place(oracle.random_bits(rng, x.shape, out_dtype), arch)
        assert tikv.dequantize(tiles, out=out) is out
        oracle.assert_same_bits(out, reference.dequantize_tiles(*expected, form.bits(of), of, out_dtype))


@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize(
    ("name", "width", "dtype", "tokens", "between", "index"),
    [
        ("kvarn_k4v2_g64", 64, np.float16, range(61, 196), 4, np.int32),
        pytest.param("kvarn_k4v4", 128, np.float16, range(8, 21), 0, None, marks=pytest.mark.full("vulkan")),
        pytest.param("kvarn_k4v2", 128, np.float16, range(126, 131), 3, None, marks=pytest.mark.full("vulkan")),
        pytest.param("kvarn_k4v4_g64", 256, np.float16, range(5, 64), 8, np.int64, marks=pytest.mark.full("vulkan")),
        pytest.param("kvarn_k4v2", 96, np.float32, range(127, 128), 1, None, marks=pytest.mark.full),
        pytest.param("kvarn_k4v4", 256, BF16, range(0, 257), 2, np.int32, marks=pytest.mark.full),
    ],
)
def test_any_tokens_of_tiles_are_decoded(arch, rng, name, width, dtype, tokens, between, index, of):
    """As stores do it: some tokens of tiles that follow each other or are in blocks, into rows with strides."""
    form, sequences, heads = formats.TILE_FORMATS[name], 2, 3
    (lines, columns), bits, group = form.sides(of, width), form.bits(of), form.group
    tiles = -(-tokens.stop // group)
    step, blocks = (tiles + 1, 1) if index is None else (2, -(-tiles // 2))
    table = np.arange(sequences * blocks).reshape(sequences, blocks)
    if index is not None:
        table = rng.permutation(sequences * blocks + 1)[: sequences * blocks].reshape(table.shape).astype(index)
    count = (sequences * blocks + 1) * heads * step
    codes = rng.integers(0, 1 << 32, (count, 1, lines, columns * bits // 32), np.uint32)
    numbers = (rng.standard_normal((count, 1, lines, 2)) / 3).astype(np.float16)
    numbers[..., 0, :], numbers[..., 1, 0] = 0, 2.0**-24
    factors = np.exp(rng.standard_normal((count, 1, columns)) / 3).astype(np.float16)
    factors[..., :2] = 0, 2.0**-24
    decoded = reference.dequantize_tiles(codes, numbers[..., 0], numbers[..., 1], factors, bits, of, dtype)
    out = oracle.random_bits(rng, (sequences, len(tokens) + 1, heads, width + between), dtype)
    expected = out.copy()
    for b, h, t in np.ndindex(sequences, heads, len(tokens)):
        g, r = divmod(tokens[t], group)
        expected[b, t, h, :width] = decoded[(table[b, g // step] * heads + h) * step + g % step, r]
    live = runtime_of()
    arrays = [to_device(a.reshape(-1), live) for a in (out, codes, numbers, factors)]
    firsts = [a.offset // a.dtype.itemsize for a in arrays]
    blocks_of = None if index is None else to_device(table, live)
    row = width + between
    rows = TileRows(
        sequences, heads, len(tokens), (len(tokens) + 1) * heads * row, row, heads * row, step,
        (firsts[0], firsts[1], firsts[2], firsts[3]), tokens.start, blocks_of,
    )  # fmt: skip
    run_tiles(live, "test", form, of, arrays, rows, width, False)
    oracle.assert_same_bits(read_host(arrays[0], live), expected.reshape(-1))


@pytest.mark.archs("cpu", "cuda")
def test_a_write_is_one_launch_of_a_plan_that_is_kept(arch, rng):
    """Also over other arrays of the form: the plan of the first call is found again."""
    live, before = tikv.runtime.current(), None
    if live.is_cuda and not live.engine.has_bitcode:
        pytest.skip(f"{live.engine.title} cannot link bitcode")
    live.plans.clear()
    both = uneven(rng, (2, 3), 64, 64)  # of one form, which alignment is part of
    placed = oracle.place(both, arch)
    for i, x in enumerate(both):
        tiles = tikv.quantize(placed[i], "kvarn_k4v2_g64", of="keys")
        for a, b in zip(tiles, reference.quantize_tiles(x, 4, 64, "keys"), strict=False):
            oracle.assert_same_bits(a, b)
        (plan,) = (plan for key, plan in live.plans.items() if key[0] == "encode_tiles")
        assert before in (None, plan)
        before = plan
        assert len(plan.launches) == 1


@pytest.mark.once
def test_the_bitcode_is_that_of_its_source(tmp_path):
    from tikv.kernels.tiles_cuda import BITCODE, SOURCE

    assembler = shutil.which("llvm-as-14")
    if assembler is None:
        pytest.skip("needs llvm-as-14, whose bitcode it is")
    shutil.copy(SOURCE, tmp_path)  # bitcode names the file
    subprocess.run([assembler, SOURCE.name, "-o", "made.bc"], check=True, cwd=tmp_path)
    assert (tmp_path / "made.bc").read_bytes() == BITCODE.read_bytes()


def test_bits_per_number(arch, rng):
    x = uneven(rng, (2,), 256, 128)
    for of, bits in (("keys", 4.375), ("values", 2.375)):
        tiles = tikv.quantize(x, "kvarn_k4v2", of=of)
        assert tiles.nbytes * 8 / x.size == bits
        assert tiles.codes.shape[:2] == (2, 2)


@pytest.mark.full("vulkan")
def test_rows_with_strides(arch, rng):
    """Tokens before heads, as models give them."""
    x = uneven(rng, (3,), 128, 64, np.float16)
    wide = oracle.random_bits(rng, (128, 3, 96), np.float16)
    wide[:, :, :64] = x.swapaxes(0, 1)
    strided = oracle.place(wide, arch)[:, :, :64].swapaxes(0, 1)
    tiles = tikv.quantize(strided, "kvarn_k4v2_g64", of="values")
    for a, b in zip(tiles, reference.quantize_tiles(x, 2, 64, "values"), strict=False):
        oracle.assert_same_bits(a, b)
    moved = tiles._replace(biases=np.array(tiles.biases.copy_to_host()), scales=np.array(tiles.scales.copy_to_host()))
    if arch != "cuda":
        oracle.assert_same_bits(tikv.dequantize(moved), tikv.dequantize(tiles))


def test_nothing(arch):
    tiles = tikv.quantize(np.zeros((0, 64, 32), np.float32), "kvarn_k4v2_g64", of="keys")
    assert tiles.codes.shape == (0, 1, 32, 8)
    assert tikv.dequantize(tiles).shape == (0, 64, 32)


ROWS = np.ones((64, 32), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: tikv.quantize(ROWS, "kvarn_k4v2_g64"), tikv.OptionError, "of=None is not supported .* of='keys'"),
        (lambda: tikv.quantize(ROWS, "int8", of="keys"), tikv.OptionError, "of='keys' is only for 'kvarn_k4v2'"),
        (
            lambda: tikv.quantize(ROWS, "kvarn_k4v2_g64", of="keys", scale_dtype="float32"),
            tikv.OptionError,
            "scale_dtype does not apply to kvarn_k4v2_g64",
        ),
        (lambda: tikv.quantize(ROWS, "kvarn_k4v2", of="keys"), tikv.ShapeError, "whole tiles of 128 tokens"),
        (lambda: tikv.quantize(ROWS[:, :24], "kvarn_k4v2_g64", of="keys"), tikv.ShapeError, "a multiple of 32"),
        (lambda: tikv.quantize(ROWS[0], "kvarn_k4v2_g64", of="keys"), tikv.ShapeError, r"Pass \(\.\.\., T, D\)"),
        (lambda: tikv.quantize(ROWS.astype(int), "kvarn_k4v2_g64", of="keys"), tikv.DTypeError, "Pass float32"),
        (lambda: tikv.dequantize(_tiles(), np.ones(2)), tikv.OptionError, "a QuantizedTiles has its own scales"),
        (lambda: tikv.dequantize(_tiles(factors=ROWS)), tikv.DTypeError, "factors is .*, not float16"),
        (
            lambda: tikv.dequantize(_tiles(factors=np.ones((1, 63), np.float16))),
            tikv.ShapeError,
            r"factors is .* where \(1, 64\) is needed",
        ),
        (lambda: tikv.dequantize(_tiles(shape=(63, 32))), tikv.ShapeError, "whole tiles of 64 tokens"),
        (lambda: tikv.dequantize(_tiles(of="both")), tikv.OptionError, "of='both' is not supported"),
        (lambda: tikv.dequantize(_tiles(), out=np.ones((64, 33), np.float32)), tikv.ShapeError, "out is"),
    ],
)
@pytest.mark.archs("cpu")
def test_refused(arch, call, error, match):
    with pytest.raises(error, match=match):
        call()


def _tiles(**parts):
    return tikv.quantize(ROWS, "kvarn_k4v2_g64", of="keys")._replace(**parts)
