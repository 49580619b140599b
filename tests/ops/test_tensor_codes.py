"""Attention by CUDA's tensor cores over codes, against the float64 oracle over the numbers that they stand for.

Numbers of V are rounded to halves before they meet their weights, which are as well.
"""

import contextlib
import types

import ml_dtypes
import numpy as np
import oracle
import pytest
from invariance import invariant
from ops.test_chosen import choose, expected
from ops.test_tensor_cores import CUDA, array_of, check, form_of, given, make, on_cuda

import tikv
from tikv import arrays, dtypes, launch
from tikv.formats import FORMATS
from tikv.ops.attention.families import family_for
from tikv.ops.attention.families.tensor_cores import TensorCodes
from tikv.ops.layouts import Scale
from tikv.ops.quantized_arrays import Quantized

GROUPS = ["quant8_64", "quant4_64", "q8_0", "q4_0", "quant8_32", "quant4_32", "quant8_128", "quant4_128"]
FLOATS = ["float8_e4m3fn", "float8_e5m2"]
FLOAT_GROUPS = ["mxfp8", "mxfp4", "nvfp4"]
PLAIN = ["int8", *FLOATS]  # which arrays of NumPy hold
LENS = (300, 1, 0, 64, 17)
SETTINGS = [contextlib.nullcontext, invariant]


class Coded:
    """A `Case` or `Pages` of float16 whose K and V become codes."""

    def __init__(self, rng, arch, name, place="linear", *, query="float16", spoil=False, **options):
        kept = name if name in PLAIN else "float16"
        self.case, self.cache = make(rng, place, dtype=kept, query_dtype=query, **options)
        if name in PLAIN:
            return
        for side in ("k", "v"):
            numbers = getattr(self.cache, side)
            unseen = np.isnan(numbers).any(axis=-1)
            coded = tikv.quantize(oracle.place(numbers, arch), name)
            if spoil:  # what nobody sees may be anything
                import torch

                kept = [coded.scales] + ([] if coded.biases is None else [coded.biases])
                for array in map(torch.from_dlpack, kept):
                    at = torch.from_numpy(unseen).to(array.device)
                    if array.dtype.itemsize == 1:
                        array.view(torch.uint8)[at] = 0xFF  # NaN of both floats
                    else:
                        array[at] = np.nan
            setattr(self.cache, side, coded)
            rows = getattr(self.case, f"{side}_real").astype(np.float16)
            real = oracle.to_numpy(tikv.dequantize(tikv.quantize(oracle.place(rows, arch), name)))
            setattr(self.case, f"{side}_real", real.astype(np.float64))

    def run(self, arch, monkeypatch, **asked):
        place = oracle.place
        monkeypatch.setattr(oracle, "place", lambda a, arch: a if isinstance(a, tuple) else place(a, arch))
        return self.cache.run(arch, **asked)


def attend(rng, arch, monkeypatch, name, place="linear", seen=None, asked=None, tolerance=1.0, **options):
    """Compare with the oracle: `asked` goes to the call, `seen` to both."""
    coded = Coded(rng, arch, name, place, **options)
    got = coded.run(arch, monkeypatch, **(seen or {}), **(asked or {}))
    check(coded.case, got, coded.case.expected(**(seen or {})), tolerance)


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*PLAIN, *GROUPS, *FLOAT_GROUPS])
def test_formats(arch, rng, tiles, monkeypatch, name, query):
    attend(rng, arch, monkeypatch, name, query=query, capacity=300, lens=LENS)


@on_cuda
@pytest.mark.parametrize("name", [*PLAIN, "quant8_64", "quant4_64", "q4_0", *FLOAT_GROUPS])
@pytest.mark.parametrize("group", [1, 5, 8, 12, 20])
def test_groups_of_heads(arch, rng, tiles, monkeypatch, name, group):
    attend(rng, arch, monkeypatch, name, group=group, capacity=300, lens=LENS)


@on_cuda
@pytest.mark.parametrize("name", [*PLAIN, "quant8_64", "quant4_64", "q8_0", "q4_0", *FLOAT_GROUPS])
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize("queries", [None, 3, 40])
def test_storages_and_queries(arch, rng, tiles, monkeypatch, name, place, queries):
    """Where a KV head has 4, 12 and 160 query rows."""
    if place == "ring":
        coded = Coded(rng, arch, name, queries=queries, lens=(98, 99, 100, 777, 41), ring=99, sinks=3, capacity=99)
        check(coded.case, coded.run(arch, monkeypatch), coded.case.expected(window=99))
        return
    lens = LENS if queries is None else (300, 0, 64, 41)
    for window in (None, 37):
        with monkeypatch.context() as patched:
            attend(rng, arch, patched, name, place, {"window": window}, queries=queries, lens=lens, capacity=300)


@on_cuda
@pytest.mark.parametrize("name", [*PLAIN, "quant8_64", "quant4_64", "q4_0", *FLOAT_GROUPS])
@pytest.mark.parametrize("place", ["linear", "ring", "NHD"])
@pytest.mark.parametrize("queries", [None, 40])
def test_under_invariant(arch, rng, tiles, monkeypatch, name, place, queries):
    with invariant(64):
        if place == "ring":
            coded = Coded(rng, arch, name, queries=queries, lens=(98, 777, 41), ring=99, sinks=3, capacity=99)
            check(coded.case, coded.run(arch, monkeypatch), coded.case.expected(window=99))
        else:
            seen, lens = {"window": 37, "softcap": 5.0}, (300, 0, 64, 41)
            attend(rng, arch, monkeypatch, name, place, seen, queries=queries, lens=lens, capacity=300, tolerance=2)
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@on_cuda
@pytest.mark.parametrize("name", [*PLAIN, "quant8_64", "q4_0", *FLOAT_GROUPS])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_chosen_tokens(arch, rng, tiles, monkeypatch, name, place):
    coded = Coded(rng, arch, name, place, queries=2, group=4, lens=(300, 0, 64), capacity=300)
    indices = choose(rng, coded.case, 70)
    got = coded.run(arch, monkeypatch, indices=oracle.place(indices, arch))
    check(coded.case, got, expected(coded.case, indices)[:2])
    assert None not in tiles


@on_cuda
@pytest.mark.parametrize(
    ("name", "width", "width_v"),
    [
        ("int8", 64, 64), ("int8", 64, 128), ("int8", 96, 96), ("quant8_64", 64, 64), ("quant4_64", 64, 64),
        ("q4_0", 64, 64), ("q8_0", 96, 96), ("quant8_32", 96, 96), ("float8_e4m3fn", 64, 64),
        ("float8_e4m3fn", 128, 64), ("float8_e4m3fn", 96, 96), ("float8_e5m2", 64, 128), ("float8_e5m2", 96, 64),
        ("mxfp8", 64, 64), ("mxfp8", 96, 96), ("mxfp4", 64, 64), ("nvfp4", 64, 64),
    ],
)  # fmt: skip
def test_widths(arch, rng, tiles, monkeypatch, name, width, width_v):
    attend(rng, arch, monkeypatch, name, width=width, width_v=width_v, lens=(130, 20), capacity=130)


@on_cuda
@pytest.mark.parametrize("name", [*PLAIN, "quant8_64", "quant4_64", "q4_0", *FLOAT_GROUPS])
@pytest.mark.parametrize("page", [3, 16, 48])
@pytest.mark.parametrize("splits", [1, 3])
def test_pages_and_splits(arch, rng, tiles, monkeypatch, name, page, splits):
    form = {"page": page, "width": 64 if page == 3 else 128, "lens": (200, 64, 0, 33)}
    attend(rng, arch, monkeypatch, name, "NHD", {"window": 70}, {"num_splits": splits}, **form)


@on_cuda
@pytest.mark.parametrize("name", ["quant8_64", "quant4_64", "q8_0", "q4_0", *FLOAT_GROUPS])
@pytest.mark.parametrize("queries", [None, 2])
@pytest.mark.parametrize("place", ["linear", "NHD"])
def test_what_nobody_sees_may_be_nan(arch, rng, tiles, monkeypatch, name, queries, place):
    attend(rng, arch, monkeypatch, name, place, spoil=True, queries=queries, lens=(39, 23, 5))


@on_cuda
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["quant8_64", "quant4_64", "q8_0"])
def test_numbers_at_the_edge_of_float16(arch, rng, tiles, monkeypatch, name, query, setting):
    """Which codes may leave: one key stands for numbers up to 65,504, the others for some around 1."""
    coded = Coded(rng, arch, name, query=query, lens=(300,), capacity=300)
    numbers = coded.case.v_real.astype(np.float16)
    numbers[:, :, 100:140] *= np.float16(60000 / 5)
    numbers = np.clip(numbers, -65504, 65504)
    coded.cache.v = tikv.quantize(oracle.place(numbers, arch), name)
    coded.case.v_real = oracle.to_numpy(tikv.dequantize(coded.cache.v)).astype(np.float64)
    coded.case.q[:] = coded.case.q / 100
    with setting():
        got = coded.run(arch, monkeypatch)
    check(coded.case, got, coded.case.expected())


@on_cuda
@pytest.mark.parametrize("times", [2.0**-9, 2.0**9])
def test_small_and_large_queries_and_numbers(arch, rng, tiles, monkeypatch, times):
    """Of bfloat16 queries a power of two is taken."""
    coded = Coded(rng, arch, "quant8_64", query="bfloat16", lens=(300, 40), capacity=300)
    coded.case.q[:] = coded.case.q * np.float32(times)
    seen = {"scale": float(128**-0.5 / times)}
    check(coded.case, coded.run(arch, monkeypatch, **seen), coded.case.expected(**seen))


@on_cuda
@pytest.mark.parametrize("query", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("queries", [None, 3])
def test_every_finite_float_of_8_bits(arch, rng, tiles, monkeypatch, name, query, queries):
    """Of both signs, subnormal ones too; by chance each comes in most columns."""
    coded = Coded(rng, arch, name, query=query, queries=queries, lens=(300,), capacity=300)
    kind = dtypes.parse(name, "test").numpy
    every = np.arange(256, dtype=np.uint8).view(kind)
    every = every[np.isfinite(every.astype(np.float32))]
    case = coded.case
    for side in "kv":
        rows = getattr(case, side)
        rows[...] = rng.choice(every, rows.shape)
        setattr(case, f"{side}_real", rows.astype(np.float64))
    case.q[:] = case.q * np.float32(2.0**-8 if name == "float8_e4m3fn" else 2.0**-14)
    check(case, coded.run(arch, monkeypatch), case.expected())


def random_codes(rng, arch, name, shape, bytes_of_scales, tensor_scale=None):
    """(rows of any codes but NaN with scales of these bytes, their numbers in float64)."""
    row = FORMATS[name] if tensor_scale is None else FORMATS[name].scaled(tensor_scale)
    words = rng.integers(0, 256, (*shape[:-1], shape[-1] * row.bits // 8), np.uint8)
    if row.bits == 8:
        words[(words & 0x7F) == 0x7F] = 0x80  # -0
    scales = rng.choice(np.asarray(bytes_of_scales, np.uint8), (*shape[:-1], shape[-1] // row.group))
    scales = scales.view(row.scale_dtypes[0].numpy)
    words = words.view(np.uint32)
    coded = Quantized(oracle.place(words, arch), oracle.place(scales, arch), None, row, shape)
    return coded, oracle.to_numpy(tikv.dequantize(coded)).astype(np.float64)


SCALES = {"mxfp8": (range(67, 187), range(112, 121)), "mxfp4": (range(67, 187), range(120, 130)),
          "nvfp4": ([*range(127), *range(128, 255)], range(0x38, 0x50))}  # fmt: skip


@on_cuda
@pytest.mark.parametrize("name", FLOAT_GROUPS)
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_codes_and_scales(arch, rng, tiles, monkeypatch, name, group, queries, far, setting):
    """Scales of V in one tile are up to 2 ** 120 apart, and all columns are right by their own numbers.

    If not `far`, what has the largest has no weight, and the others are what is left.
    """
    form = {"query": "bfloat16", "group": group, "queries": queries, "lens": (150, 40), "capacity": 150}
    coded = Coded(rng, arch, name, **form)
    case, cache = coded.case, coded.cache
    of_v, of_k = SCALES[name]
    if not far:
        of_v = range(118, 126) if name != "nvfp4" else range(0x30, 0x40)
    tensor = 0.37 if name == "nvfp4" else None
    cache.k, case.k_real = random_codes(rng, arch, name, (2, 2, 150, 128), of_k, tensor)
    cache.v, case.v_real = random_codes(rng, arch, name, (2, 2, 150, 128), of_v, tensor)
    case.q[:] = case.q * np.float32(0.25 / np.sqrt((case.k_real**2).mean()))
    if not far:
        case.q[:] = np.abs(case.q)
        k, v = (np.zeros((2, 2, 150, 128), np.float32) for _ in "kv")
        k[...], v[...] = case.k_real, case.v_real
        k[:, :, 17], v[:, :, 17] = -40 * np.abs(k).max(), v[:, :, 17] * 2.0 ** (40 if name != "nvfp4" else 5)
        cache.k, cache.v = (tikv.quantize(oracle.place(a, arch), FORMATS[name]) for a in (k, v))
        case.k_real, case.v_real = (oracle.to_numpy(tikv.dequantize(a)).astype(np.float64) for a in (cache.k, cache.v))
    with setting():
        out, lse = coded.run(arch, monkeypatch)
    want, want_lse = case.expected()
    case.v_real = np.abs(case.v_real)
    size = case.expected()[0]
    assert (np.abs(out - want) <= 2.0**-7 * size).all()
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)


@on_cuda
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("place", ["linear", "NHD"])
@pytest.mark.parametrize("queries", [None, 3])
def test_scales_of_floats_of_8_bits(arch, rng, tiles, monkeypatch, name, place, queries):
    """One for all heads as numbers, or one for each as arrays of either dtype."""
    coded = Coded(rng, arch, name, place, queries=queries, lens=(300, 41), capacity=300)
    case, seen = coded.case, {"window": 120}
    k_real, v_real = case.k_real, case.v_real
    for dtype in (None, np.float32, np.float16):
        k_scale, v_scale = (rng.uniform(0.25, 4, 2).astype(dtype or np.float32) for _ in "kv")
        scales = {"k_scale": float(k_scale[0]), "v_scale": float(v_scale[0])}
        if dtype is None:
            k_scale, v_scale = k_scale[:1], v_scale[:1]
        else:
            scales = {"k_scale": oracle.place(k_scale, arch), "v_scale": oracle.place(v_scale, arch)}
        case.k_real, case.v_real = (
            real * scale.astype(np.float64)[:, None, None] for real, scale in ((k_real, k_scale), (v_real, v_scale))
        )
        with monkeypatch.context() as patched:
            check(case, coded.run(arch, patched, **seen, **scales), case.expected(**seen))


@on_cuda
def test_another_launcher_has_no_instruction_for_floats_of_8_bits(arch, rng, tiles, monkeypatch):
    """The plan goes on with the other kernels."""
    coded = Coded(rng, arch, "float8_e4m3fn", lens=(300, 17), capacity=300)
    before = coded.run(arch, monkeypatch)
    launch.choose_launcher("direct")
    try:
        after = coded.run(arch, monkeypatch)
        assert launch.why_no_hopper(arrays.runtime_of()).startswith("kernels are launched by 'direct'")
    finally:
        launch.choose_launcher(None)
    for got in (before, after):
        check(coded.case, got, coded.case.expected())


@on_cuda
@pytest.mark.parametrize("name", ["int8", "float8_e5m2", "quant8_64", "quant4_64", "q4_0", "mxfp4"])
def test_tiles_that_registers_hold(arch, rng, tiles, monkeypatch, name):
    """As on other GPUs than those of compute capability 9.0."""
    launch.choose_launcher("direct")
    try:
        attend(rng, arch, monkeypatch, name, lens=LENS, capacity=300)
    finally:
        launch.choose_launcher(None)
    assert [tile.stages for tile in tiles] == [0] * len(tiles)


@on_cuda
def test_options_of_the_softmax(arch, rng, tiles, monkeypatch):
    for name, seen, more in (
        ("quant4_64", {"scale": 1.3, "softcap": 2.5}, {"tolerance": 2}),
        ("int8", {"causal": False}, {"queries": 3}),
        ("float8_e4m3fn", {"scale": 1.3, "softcap": 2.5}, {"tolerance": 2}),
    ):
        with monkeypatch.context() as patched:
            attend(rng, arch, patched, name, seen=seen, lens=(40, 11), **more)


@on_cuda
@pytest.mark.parametrize("name", [*PLAIN, "quant8_32", "quant4_32", *FLOAT_GROUPS])
def test_the_longest_kernels_are_one_function(arch, rng, tiles, monkeypatch, name):
    seen = {"window": 60, "softcap": 5.0}
    attend(rng, arch, monkeypatch, name, "NHD", seen, query="bfloat16", lens=(150, 9), queries=8, tolerance=2)
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


# --- without a GPU


def codes_given(name, q_dtype="float16", scale="float16", width=128, width_v=None, at=0):
    """As `given`, of codes."""
    arrays, query, cache = given("float16", q_dtype, width, width_v)
    kind = dtypes.parse(name, "test") if name in PLAIN else dtypes.uint32
    arrays["k"].dtype = arrays["v"].dtype = kind
    scales = [array_of(dtypes.parse(scale, "test"), at) for _ in "kv"]
    arrays |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
    k, v = (
        rows._replace(format=None if name in PLAIN else FORMATS[name], scale=Scale(scale, token=4, head=8))
        for rows, scale in zip((cache.k, cache.v), scales, strict=True)
    )
    return arrays, query, cache._replace(k=k, v=v)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "int8"}, ""),
        ({"name": "quant4_64", "q_dtype": "bfloat16"}, ""),
        ({"name": "q4_0", "width": 64}, ""),
        ({"name": "quant4_64", "q_dtype": "float32"}, "q is float32, over codes"),
        ({"name": "quant3_64"}, "K and V are quant3_64"),
        ({"name": "mxfp4", "scale": "float8_e8m0fnu"}, ""),
        ({"name": "mxfp4", "scale": "float8_e8m0fnu", "at": 2}, "a row do not begin at a multiple of 4 bytes"),
        ({"name": "mxfp4", "scale": "float8_e8m0fnu", "at": 2, "width": 64}, ""),
        ({"name": "mxfp4", "scale": "float8_e8m0fnu", "width": 96}, "cannot share whole words of mxfp4"),
        ({"name": "nvfp4", "scale": "float8_e4m3fn"}, "nvfp4, and the GPU is of compute capability 8, and they need 9"),
        ({"name": "int8", "scale": "float32"}, "scales are float32"),
        ({"name": "float8_e5m2", "scale": "float32", "width": 96}, ""),
        ({"name": "float8_e5m2", "q_dtype": "float32"}, "q is float32, over codes"),
        ({"name": "float8_e4m3fn"}, "float8_e4m3fn, and the GPU is of compute capability 8, and they need 9"),
        ({"name": "int8", "width": 256}, "256 and 256 wide"),
        ({"name": "q4_0", "width": 96}, "cannot share whole words of q4_0"),
        ({"name": "quant8_64", "at": 2}, "scales of a row do not begin at a multiple of 4 bytes"),
    ],
)
def test_what_the_tensor_cores_leave_to_the_other_kernels(arch, ampere, options, why):
    form = form_of(codes_given(**options))
    found = TensorCodes.why_not(form)
    assert why in found
    assert bool(why) == bool(found)
    assert family_for(form).on_tensor_cores != bool(why)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("launcher", ["native", "direct"])
def test_floats_of_8_bits_that_one_instruction_converts(arch, ampere, launcher):
    """It is of compute capability 9.0, and only the native launcher asks for it."""
    ampere.generation, ampere.launcher = 9, launcher
    form = form_of(codes_given("float8_e4m3fn"))
    found = TensorCodes.why_not(form)
    assert ("they need the native launcher" in found) == (launcher == "direct")
    assert family_for(form).on_tensor_cores == (launcher == "native")


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("options", "generation", "launcher", "copied"),
    [
        ({"name": "quant4_64"}, 9, "native", True),
        ({"name": "quant4_64"}, 9, "direct", False),
        ({"name": "quant4_64"}, 8, "native", False),
        ({"name": "q4_0", "at": 2}, 9, "native", False),
        ({"name": "int8", "at": 2}, 9, "native", True),
        ({"name": "mxfp8", "scale": "float8_e8m0fnu"}, 9, "native", True),
        ({"name": "mxfp4", "scale": "float8_e8m0fnu"}, 9, "native", False),
        ({"name": "float8_e5m2"}, 9, "native", False),
        ({"name": "int8", "width": 64}, 9, "native", False),
        ({"name": "int8", "width_v": 64}, 9, "native", False),
    ],
)
def test_which_tiles_are_copied(arch, ampere, options, generation, launcher, copied):
    """If the GPU and the launcher can, scales begin where copies may, and it is faster."""
    ampere.generation, ampere.launcher = generation, launcher
    assert (family_for(form_of(codes_given(**options))).tile.stages > 0) == copied


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "quant4_64"])
def test_under_invariant_the_work_is_always_divided_alike(arch, ampere, name):
    live = types.SimpleNamespace(**vars(CUDA) | {"invariant": True})
    ampere.generation, ampere.launcher = 9, "direct"
    arrays, query, cache = codes_given(name)
    assert "by 'direct' (asked for)" in TensorCodes.why_not(form_of((arrays, query, cache), live))
    ampere.launcher = "native"
    forms = [form_of((arrays, query._replace(queries=n), cache), live) for n in (1, 2, 9, 500)]
    assert {TensorCodes.why_not(form) for form in forms} == {""}
    families = [TensorCodes(form) for form in forms]
    assert len({family.tile for family in families}) == 1
    assert families[0].tile.shared_out == "keys"
    assert not families[0].needs_native(form_of((arrays, query, cache), live))  # other kernels have other bits


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("name", FLOAT_GROUPS)
def test_every_code_times_every_scale_of_a_window_is_a_half(arch, name):
    """Neither end of a window can be moved: the next scale would overflow, or round some product."""
    from tikv.kernels.attention.sm80.floats import FEWER, KINDS, WINDOWS

    number, scale = KINDS[name]
    kinds = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn}
    codes, scales = (np.arange(1 << n, dtype=np.uint8) for n in (FORMATS[name].bits, 8))
    codes = codes.view(kinds[number]).astype(np.float64)
    codes = codes[np.isfinite(codes)] * 2.0 ** -FEWER[number]

    def exact(scales):
        products = codes[:, None] * scales
        with np.errstate(over="ignore"):
            return (products.astype(np.float16) == products).all(axis=0)

    assert (codes.astype(np.float16) == codes).all()
    if scale == "e4m3":
        scales = scales.view(kinds[scale]).astype(np.float64)
        assert exact(scales[np.isfinite(scales)]).all()
        return
    distances = np.arange(1, 31)  # of scales that are normal halves
    window = WINDOWS[name]
    inside = (distances >= window.low) & (distances <= window.high)
    np.testing.assert_array_equal(exact(2.0 ** (distances - 15.0)), inside)
