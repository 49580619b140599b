"""Floats of 8 bits with a scale: what is stored is the row over the scale, what is read the product."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import dtypes, reference
from tikv.compat import vllm

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
BLOCKS, PAGE, HEADS, WIDTH = 3, 4, 2, 16
SLOTS = np.array([5, -1, 0, 11, 2])


def rows_of(rng, dtype=np.float32):
    """Numbers of many magnitudes, and those at which rounding and dividing go wrong."""
    rows = oracle.numbers(rng, (5, HEADS, WIDTH), dtype)
    rows[0, 0, :8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 6e4, -6e4, 2.0**-14]
    return rows


def divided(rows, scale):
    """The float32 quotients by a number or a head's."""
    with np.errstate(all="ignore"):
        return rows.astype(np.float32) / np.broadcast_to(np.asarray(scale, np.float32), (HEADS,))[:, None]


def pools_of(rng, dtype):
    return [oracle.random_bits(rng, (BLOCKS, PAGE, HEADS, WIDTH), dtype) for _ in "kv"]


PER_HEAD = np.array([0.75, 3.1e-3], np.float32)


@pytest.mark.parametrize(
    ("dtype", "source", "scales"),
    [(E4M3, np.float32, (0.3, 1.7)), (E5M2, np.float16, (PER_HEAD, PER_HEAD[::-1].copy()))],
    ids=["e4m3", "e5m2"],
)
def test_rows_are_divided_written_and_read_back(arch, rng, dtype, source, scales):
    """Into pages by slots, and out of them; the rest of the pools keeps its bits."""
    rows = [rows_of(rng, source) for _ in "kv"]
    before = pools_of(rng, dtype)
    pools = [oracle.place(p.copy(), arch) for p in before]
    k_scale, v_scale = (s if isinstance(s, float) else oracle.place(s, arch) for s in scales)
    given = [oracle.place(r, arch) for r in rows]
    tikv.write_slots(*given, *pools, SLOTS, k_scale=k_scale, v_scale=v_scale)
    for row, old, pool, scale in zip(rows, before, pools, scales, strict=True):
        want = reference.write_slots(reference.encode(divided(row, scale), dtype), old, SLOTS)
        oracle.assert_same_bits(pool, want, any_nan=True)
        table = np.array([2, 0], np.int32)
        got = tikv.gather_paged(pool, table, 6, scale=k_scale if scale is scales[0] else v_scale)
        read = reference.gather_paged(want, table, 6).astype(np.float32)
        by_head = np.broadcast_to(np.asarray(scale, np.float32), (HEADS,))[:, None]
        oracle.assert_same_bits(got, read * by_head, any_nan=True)


@pytest.mark.archs("cpu")
def test_a_scale_may_be_left_out(arch, rng):
    rows, before = [rows_of(rng) for _ in "kv"], pools_of(rng, E4M3)
    pools = [p.copy() for p in before]
    tikv.write_slots(*rows, *pools, SLOTS)
    for row, old, pool in zip(rows, before, pools, strict=True):
        oracle.assert_same_bits(pool, reference.write_slots(reference.encode(row, E4M3), old, SLOTS), any_nan=True)


@pytest.mark.archs("cpu", "vulkan", "cuda")
def test_quotients_are_the_nearest(arch, rng):
    """Of all float32 that 8 bits round in one way or the other, by scales of any fraction."""
    x = np.concatenate([oracle.around_float8(E4M3), oracle.around_float8(E5M2)])
    for scale in (np.float32(1.1), np.float32(0.07), np.float32(2.0**-70), np.float32(3e20)):
        near = (x * scale).astype(np.float32)
        values = np.concatenate([near, np.nextafter(near, np.float32(9)), x, np.float32([3e38, np.inf, -np.inf])])
        values = values[: values.size // WIDTH * WIDTH].reshape(-1, 1, WIDTH)
        values = np.where(np.abs(values) < 1.2e-38, np.float32(0), values)  # a subnormal may count as 0
        tokens = len(values)
        pools = [oracle.place(np.zeros((1, tokens, 1, WIDTH), E4M3), arch) for _ in "kv"]
        rows = oracle.place(values, arch)
        tikv.write_slots(rows, rows, *pools, np.arange(tokens), k_scale=float(scale), v_scale=float(scale))
        with np.errstate(over="ignore"):
            want = reference.encode(values / scale, E4M3)[None]
        oracle.assert_same_bits(pools[0], want, what=f"scale {scale}", any_nan=True)


@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_attention_multiplies(arch, rng, place):
    """Scores by K's scale and weights by V's, of each head."""
    k, v = (rng.standard_normal((1, HEADS, 12, WIDTH)).astype(E4M3) for _ in "kv")
    q = rng.standard_normal((1, 2 * HEADS, WIDTH)).astype(np.float32)
    k_scale, v_scale = PER_HEAD * np.float32([1, 200]), PER_HEAD[::-1].copy()
    scales = {"k_scale": oracle.place(k_scale, arch), "v_scale": oracle.place(v_scale, arch)}
    arrays = [oracle.place(a, arch) for a in (q, k, v)]
    if place == "linear":
        got = tikv.decode_attention(*arrays, 11, **scales, impl="taichi")
    else:
        pages = [
            oracle.place(np.ascontiguousarray(a[0].swapaxes(0, 1)).reshape(3, 4, HEADS, WIDTH), arch) for a in (k, v)
        ]
        got = tikv.paged_decode_attention(arrays[0], *pages, np.array([[0, 1, 2]]), np.array([11]), **scales)
    keys, values = (a[0, :, :11].astype(np.float64) * s[:, None, None] for a, s in ((k, k_scale), (v, v_scale)))
    for h in range(2 * HEADS):
        want, _ = reference.attention(q[0, h], keys[h // 2], values[h // 2], scale=WIDTH**-0.5)
        np.testing.assert_allclose(oracle.to_numpy(got)[0, h], want, rtol=0, atol=2e-5)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("scales", "error", "match"),
    [
        ((0.0, 1.0), tikv.OptionError, "k_scale=0.0 is not a positive normal"),
        ((1.0, float("nan")), tikv.OptionError, "v_scale=nan"),
        ((1.0, None), tikv.ShapeError, "v_scale is missing"),
        ((np.ones(3, np.float32),) * 2, tikv.ShapeError, r"one per head: \(2,\)"),
        ((np.ones(2), np.ones(2)), tikv.DTypeError, "float16 or float32"),
        ((1.0, np.ones(2, np.float32)), tikv.ShapeError, "a number for both"),
    ],
)
def test_scales_that_are_refused(arch, rng, scales, error, match):
    rows, before = [rows_of(rng) for _ in "kv"], pools_of(rng, E4M3)
    pools = [p.copy() for p in before]
    with pytest.raises(error, match=match):
        tikv.write_slots(*rows, *pools, SLOTS, k_scale=scales[0], v_scale=scales[1])
    with pytest.raises(tikv.DTypeError, match="a scale divides float32"):
        tikv.write_slots(*(r.astype(E4M3) for r in rows), *pools, SLOTS, k_scale=2.0, v_scale=2.0)
    for got, want in zip(pools, before, strict=True):
        oracle.assert_same_bits(got, want)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_vllm_caches_of_bytes(arch, rng, name):
    """As vLLM has them: uint8, with scales that are tensors of one number."""
    torch = pytest.importorskip("torch")
    dtype = dtypes.parse({"fp8": "float8_e4m3fn"}.get(name, "float8_e5m2"), "test").numpy
    rows, before = [rows_of(rng) for _ in "kv"], pools_of(rng, dtype)
    pools = [oracle.to_torch(p.view(np.uint8).copy(), arch) for p in before]
    scales = [torch.tensor(s, device=pools[0].device) for s in (0.5, 1.3)]
    given = [oracle.to_torch(r, arch) for r in rows]
    slots = torch.from_numpy(SLOTS).to(pools[0].device)
    vllm.reshape_and_cache_flash(*given, *pools, slots, name, *scales)
    for row, old, pool, scale in zip(rows, before, pools, (0.5, 1.3), strict=True):
        want = reference.write_slots(reference.encode(divided(row, scale), dtype), old, SLOTS)
        oracle.assert_same_bits(oracle.to_numpy(pool).view(dtype), want, any_nan=True)
    with pytest.raises(tikv.DTypeError, match="key_cache is float16"):
        vllm.reshape_and_cache_flash(*given, *(p.to(torch.float16) for p in pools), slots, name)


@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_attention_multiplies_by_scales_of_each_sequence(arch, rng, place):
    """(B, H) scales, as flash-attention 3 has its descales: each sequence and head has its own."""
    k, v = (rng.standard_normal((2, HEADS, 12, WIDTH)).astype(E4M3) for _ in "kv")
    q = rng.standard_normal((2, 2 * HEADS, WIDTH)).astype(np.float32)
    k_scale, v_scale = (rng.uniform(0.5, 2, (2, HEADS)).astype(np.float32) for _ in "kv")
    scales = {"k_scale": oracle.place(k_scale, arch), "v_scale": oracle.place(v_scale, arch)}
    arrays = [oracle.place(a, arch) for a in (q, k, v)]
    lens = np.array([11, 7])
    if place == "linear":
        got = tikv.decode_attention(*arrays, lens, **scales, impl="taichi")
    else:
        pages = [oracle.place(np.ascontiguousarray(a.swapaxes(1, 2)).reshape(6, 4, HEADS, WIDTH), arch) for a in (k, v)]
        got = tikv.paged_decode_attention(arrays[0], *pages, np.arange(6).reshape(2, 3), lens, **scales)
    for b, n in enumerate(lens):
        keys, values = (a[b, :, :n].astype(np.float64) * s[b, :, None, None] for a, s in ((k, k_scale), (v, v_scale)))
        for h in range(2 * HEADS):
            want, _ = reference.attention(q[b, h], keys[h // 2], values[h // 2], scale=WIDTH**-0.5)
            np.testing.assert_allclose(oracle.to_numpy(got)[b, h], want, rtol=0, atol=2e-5)
    wrong = {name: np.ones((3, HEADS), np.float32) for name in scales}
    with pytest.raises(tikv.ShapeError, match=r"one per sequence and head: \(2, 2\)"):
        tikv.decode_attention(q, k, v, lens, **wrong)
