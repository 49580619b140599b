"""Groups of codes as threads of a GPU find them, run on the CPU: a thread a group, reciprocals as rough as they get."""

import importlib

import numpy as np
import pytest

from tikv import formats, reference, runtime

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.thorough]
ROWS, WIDTH = 3000, 128


def numbers(rng, row):
    """Any, half-way between codes and beside it, of one magnitude, with a NaN or an infinity among them."""
    x = rng.standard_normal((ROWS, WIDTH)) * np.exp2(rng.integers(-12, 12, (ROWS, 1)))
    x[ROWS // 3 : ROWS // 2] = rng.integers(-(1 << row.bits), 1 << row.bits, (ROWS // 2 - ROWS // 3, WIDTH)) / 2
    x[-60:-40] = rng.choice([-3.0, 3.0], (20, WIDTH))
    x[-40:] = np.where(rng.random((40, WIDTH)) < 0.1, rng.choice([np.nan, np.inf, -np.inf], (40, WIDTH)), x[-40:])
    x[-3:] = np.array([[0], [np.nan], [-np.inf]])
    x = x.astype(np.float16)
    x[ROWS // 3 : ROWS // 2 : 2] = np.nextafter(x[ROWS // 3 : ROWS // 2 : 2], np.float16(rng.choice([-9, 9])))
    return x


@pytest.mark.parametrize(
    ("name", "style", "off"),
    [
        # A thread has a whole group, whose elements are unrolled: groups of 64 compile for thrice as long.
        ("quant8_32", "cuda", -12),
        ("quant8_32", "cuda", 12),
        ("quant8_32", "spirv", 12),
        *(
            pytest.param("quant8_64", style, off, marks=pytest.mark.thorough)
            for style, off in (("cuda", -12), ("cuda", 12), ("spirv", 12))
        ),
        ("quant3_32", "cuda", -12),
        ("q8_0", "cuda", 12),
        ("q4_0", "cuda", 12),
    ],
)
def test_threads_find_the_codes(arch, rng, monkeypatch, name, style, off):
    exact, group_lanes, copy, codec = (
        importlib.import_module(f"tikv.kernels.{part}") for part in ("exact", "group_lanes", "copy", "codec")
    )
    ti, row = runtime.ti, formats.FORMATS[name]
    rough = exact.rough_reciprocal

    @ti.func
    def rougher(x):
        return ti.bit_cast(ti.bit_cast(rough(x), ti.i32) + off, ti.f32)

    monkeypatch.setattr(exact, "rough_reciprocal", rougher)
    monkeypatch.setattr(group_lanes, "HELD", row.group)
    count = WIDTH // row.group
    stream = copy.Stream(count, codec.Codec("f16", name, row.group, 64, 32))
    read, write = group_lanes.make_shared_groups(style, stream, "f16")
    words, numbers_of_row = row.words(WIDTH), count * row.numbers
    uint64, uint32, uint16 = (ti.types.ndarray(dtype=kind, ndim=1) for kind in (ti.u64, ti.u32, ti.u16))

    @ti.kernel
    def encode(a: uint64, b: uint32, scales: uint16):
        for i in range(ROWS * count):
            r, group = i // count, i % count
            held = read(a, group, r * (WIDTH // 4))
            write(b, scales, i, group, True, r * words, r * numbers_of_row, held, 1.0)

    x = numbers(rng, row)
    codes, scales = np.zeros(ROWS * words, np.uint32), np.zeros(ROWS * numbers_of_row, np.uint16)
    with runtime.current().compiling(False):
        encode(x.view(np.uint64).ravel(), codes, scales)
    want, *parts = reference.quantize_groups(x, row.bits, row.group, row.rule, np.float16)
    np.testing.assert_array_equal(codes.reshape(want.shape), want)
    side_by_side = np.stack([part for part in parts if part is not None], -1).view(np.uint16)
    np.testing.assert_array_equal(scales, side_by_side.ravel())
