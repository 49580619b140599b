"""Rows that are turned before they become codes: bits, numbers that come back, attention over them, what is refused."""

import numpy as np
import oracle
import pytest

import tikv
from tikv import formats, reference
from tikv.compat import mlx

FULL = pytest.mark.full
# A block of each number of threads of a GPU, an even and an odd number of steps, each order of columns in a thread.
TURNED = [
    ("quant4_64_hadamard", 128),
    ("q4_0_hadamard7", 64),
    pytest.param("quant3_32_hadamard", 96, marks=FULL),
    pytest.param("mxfp8_hadamard", 160, marks=FULL),
    pytest.param("nvfp4_hadamard3", 80, marks=FULL),
    pytest.param("quant2_32_hadamard", 256, marks=FULL),
]


def sylvester(n):
    """The matrix of 1 and -1 of that order."""
    found = np.ones((1, 1))
    while len(found) < n:
        found = np.block([[found, found], [found, -found]])
    return found


def turned_by_hand(rows, seed):
    """In float64, by a whole matrix."""
    width = rows.shape[-1]
    n = formats.block_of(width)
    matrix = np.kron(np.eye(width // n), sylvester(n)) / np.sqrt(n)
    return rows.astype(np.float64) * reference.hadamard_signs(width, seed) @ matrix


def coded(x, row):
    """Codes and numbers of groups of turned rows."""
    scales = np.dtype(x.dtype) if row.rule == "affine" else row.scale_dtypes[0].numpy
    turned = x if row.seed is None else reference.hadamard(x, row.seed)
    return reference.quantize_groups(turned, row.bits, row.group, row.rule, scales)


def numbers_of(parts, row):
    """What codes stand for, turned back."""
    found = reference.dequantize_groups(*parts, row.bits, row.rule)
    return found if row.seed is None else reference.hadamard(found, row.seed, back=True)


def compare(got, want, what):
    for a, b in zip(got[:3], want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            oracle.assert_same_bits(a, b, what=what)


@pytest.mark.parametrize("width", [16, 96, 128])
def test_the_reference_is_a_product_with_a_matrix(rng, width):
    rows = rng.standard_normal((5, width))
    turned = reference.hadamard(rows, 9, dtype=np.float64)
    np.testing.assert_allclose(turned, turned_by_hand(rows, 9), rtol=0, atol=1e-13)
    np.testing.assert_allclose(reference.hadamard(turned, 9, back=True, dtype=np.float64), rows, rtol=0, atol=1e-13)
    assert len({tuple(reference.hadamard_signs(width, seed)) for seed in range(4)}) == 4
    assert abs(reference.hadamard_signs(1024).sum()) < 100


@pytest.mark.parametrize(("name", "width"), TURNED)
def test_codes_and_what_they_stand_for(arch, rng, name, width):
    """Bit for bit, also of rows of one large column, of a NaN and an infinity, which reach all of their block."""
    row = formats.parse_format(name)
    dtype = np.float16 if name.startswith("q4_0") else np.float32
    x = (rng.standard_normal((9, 5, width)) * np.exp2(rng.integers(-5, 4, (9, 5, 1)))).astype(dtype)
    x[0, 0], x[0, 1], x[0, 2, 1:] = 0, -0.0, 0
    x[1, :, 3] *= 30
    x[2, 0, 5], x[2, 1, 5], x[2, 2, :] = np.nan, np.inf, -np.inf
    want = coded(x, row)
    got = tikv.quantize(oracle.place(x, arch), name)
    compare(got, want, name)
    back = numbers_of(want, row)
    oracle.assert_same_bits(tikv.dequantize(got), back, any_nan=True)
    plain = numbers_of(coded(x[3:], row.unturned), row.unturned)
    assert abs(back[3:] - x[3:]).max() > 0
    assert not np.array_equal(back[3:], plain)


def test_attention_turns_its_queries(arch, rng):
    """Against float64 over keys that the codes stand for, turned by hand; values are not rotated."""
    name, k_row = "quant4_64_hadamard", formats.parse_format("quant4_64_hadamard")
    k, v = (rng.standard_normal((2, 2, 21, 64)).astype(np.float16) for _ in "kv")
    k[..., 7] *= 20
    caches = tikv.quantize(oracle.place(k, arch), name), tikv.quantize(oracle.place(v, arch), "quant4_64")
    codes = [oracle.to_numpy(a) for a in caches[0][:3]]
    turned = reference.dequantize_groups(*codes, 4, "affine").astype(np.float64)
    values = oracle.to_numpy(tikv.dequantize(caches[1])).astype(np.float64)
    q = rng.standard_normal((2, 4, 3, 64)).astype(np.float32)
    lens = np.array([21, 9])
    out, lse = tikv.decode_attention(oracle.place(q, arch), *caches, lens, return_lse=True, impl="taichi")
    out, lse, turned_q = oracle.to_numpy(out), oracle.to_numpy(lse), turned_by_hand(q, 0)
    for b, length in enumerate(lens):
        for h in range(4):
            for t in range(3):
                seen = slice(0, length - 2 + t)
                row = turned_q[b, h, t], turned[b, h // 2, seen], values[b, h // 2, seen]
                want, want_lse = reference.attention(*row, scale=64**-0.5)
                np.testing.assert_allclose(out[b, h, t], want, rtol=0, atol=2e-5)
                np.testing.assert_allclose(lse[b, h, t], want_lse, rtol=0, atol=1e-4)
    assert k_row.seed == 0


def test_keys_are_turned_and_values_are_not(arch, rng):
    """By one launch of both, in a store, through its file, and in pages; what `tokens` gives is turned back."""
    row = formats.parse_format("quant4_64_hadamard")
    k, v = (rng.standard_normal((5, 2, 64)).astype(np.float32) for _ in "kv")
    k[..., 3] *= 10
    pools = tikv.quantize(oracle.place(np.zeros((2, 4, 2, 64), np.float16), arch), str(row))
    values = tikv.quantize(oracle.place(np.zeros((2, 4, 2, 64), np.float16), arch), "quant4_64")
    tikv.write_slots(oracle.place(k, arch), oracle.place(v, arch), pools, values, np.array([2, 0, 7, 4, -1]))
    for cache, given, kind in ((pools, k, row), (values, v, row.unturned)):
        want = reference.quantize_groups(
            reference.hadamard(given) if kind.seed is not None else given, 4, 64, "affine", np.float16
        )
        for part, rows in zip(cache[:3], want, strict=True):
            flat = oracle.to_numpy(part).reshape(8, 2, -1)
            oracle.assert_same_bits(flat[[2, 0, 7, 4]], rows[:4])


@pytest.mark.parametrize("name", ["quant4_64_hadamard", pytest.param("mxfp4_hadamard5", marks=FULL)])
def test_stores_and_pools_of_turned_keys(arch, rng, tmp_path, name):
    row = formats.parse_format(name)
    k, v = (rng.standard_normal((1, 9, 2, 64)).astype(np.float32) for _ in "kv")
    scales = row.scale_dtypes[0].numpy if row.is_float else np.float16
    want = [
        numbers_of(reference.quantize_groups(a, row.bits, row.group, row.rule, scales), kind)[0].swapaxes(0, 1)
        for a, kind in ((reference.hadamard(k, row.seed), row), (v, row.unturned))
    ]
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "dtype": name}
    store = tikv.KVCacheStore(**form, capacity=12)
    store.append(0, *(oracle.place(a, arch) for a in (k, v)))
    assert (str(store.dtype), str(store.v_dtype)) == (name, row.name)
    assert name in repr(store)
    store.save(tmp_path / "store.safetensors")
    again = tikv.KVCacheStore.load(tmp_path / "store.safetensors")
    assert (again.dtype, again.v_dtype) == (store.dtype, store.v_dtype)
    pool = tikv.PagedKVCacheStore(**form, num_blocks=3, block_size=4)
    seq = pool.add()
    pool.append(0, *(oracle.place(a[0], arch) for a in (k, v)), [seq], np.array([0, 9]))
    for kept in (store, again):
        for got, numbers in zip(kept.tokens(0), want, strict=True):
            oracle.assert_same_bits(got, numbers[None])
    for got, numbers in zip(pool.tokens(0, seq), want, strict=True):
        oracle.assert_same_bits(got, numbers.swapaxes(0, 1))
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    for out in (again.attend(0, oracle.place(q, arch)), pool.attend(0, oracle.place(q, arch), [seq])):
        for h in range(4):
            expected, _ = reference.attention(q[0, h], *(a[h // 2].astype(np.float64) for a in want), scale=64**-0.5)
            np.testing.assert_allclose(oracle.to_numpy(out).reshape(4, 64)[h], expected, rtol=0, atol=2e-5)


@pytest.mark.archs("cpu")
def test_a_large_column_costs_less(arch, rng):
    """What it is for: of keys with a few large columns scores are nearer to those of what was written."""
    k = rng.standard_normal((256, 128)).astype(np.float32)
    k[:, [5, 77]] *= 25
    q = rng.standard_normal((64, 128))
    errors = {}
    for rotate in (None, "hadamard"):
        kept = tikv.dequantize(tikv.quantize(k, tikv.Quant(3, 64, rotate=rotate))).numpy()
        errors[rotate] = np.sqrt(np.mean(((kept - k) @ q.T) ** 2))
    assert errors["hadamard"] < 0.7 * errors[None]


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: tikv.Quant(4, rotate="fourier"), tikv.OptionError, "rotate='fourier' is not supported"),
        (lambda: tikv.Quant(4, rotate="hadamard", seed=-1), tikv.OptionError, "seed=-1 is not supported"),
        (lambda: tikv.Quant(4, seed=3), tikv.OptionError, "Use 0, or rotate='hadamard'"),
        (
            lambda: tikv.Quant(4, 32, axis="tokens", residual=32, rotate="hadamard"),
            tikv.OptionError,
            "each channel has its own scales",
        ),
        (lambda: _store(v_dtype=tikv.Quant(4, rotate="hadamard")), tikv.OptionError, "values are not rotated"),
        (lambda: _store(dtype="quant4_64_hadamard9999999999"), tikv.DTypeError, "unknown dtype"),
        (lambda: _pair("quant4_64", "quant4_64_hadamard"), tikv.OptionError, "Use quant4_64"),
        (lambda: _pair("quant4_32_hadamard", "quant4_64"), tikv.DTypeError, "Use one format"),
        (
            lambda: _store(dtype="mxfp4", v_dtype="nvfp4"),
            tikv.DTypeError,
            "float8_e8m0fnu scales and values of nvfp4 have float8_e4m3fn",
        ),
        (lambda: _store(dtype="mxfp4", scale_dtype="float32"), tikv.DTypeError, "Leave scale_dtype out"),
        (lambda: _store(dtype="mxfp4", k_scale=2.0), tikv.OptionError, "K is stored as mxfp4"),
        (lambda: _store(dtype="nvfp4", k_scale=[1.0, 2.0]), tikv.ShapeError, "k_scale has 2 numbers"),
        (
            lambda: mlx.save_prompt_cache("cache.safetensors", _store(dtype="quant4_64_hadamard")),
            tikv.OptionError,
            "dtype='quant4_64_hadamard' and v_dtype='quant4_64' differ",
        ),
        (lambda: _rotate("quant4_64_hadamard"), tikv.DTypeError, "k holds codes of quant4_64_hadamard"),
    ],
)
def test_refused(arch, call, error, match):
    with pytest.raises(error, match=match):
        call()


def _store(**options):
    return tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=64, capacity=8, **options)


def _rotate(name):
    keys = tikv.quantize(np.ones((1, 1, 4, 64), np.float32), name)
    positions = np.arange(4)
    tikv.rotate(keys, positions, positions + 1, tikv.Rope(inv_freq=np.ones(32, np.float32)))


def _pair(k, v):
    caches = [tikv.quantize(np.ones((1, 1, 4, 64), np.float32), name) for name in (k, v)]
    return tikv.decode_attention(np.ones((1, 1, 64), np.float32), *caches, 3)
