"""The quotients and roots of the kernels are NumPy's, however roughly a back end itself divides and takes roots."""

import importlib

import numpy as np
import pytest

from tikv import runtime

LEAST_NORMAL, INFINITE = 0x00800000, 0x7F800000


@pytest.fixture(params=[None, -12, -1, 3, 12], ids=lambda n: "as it is" if n is None else f"{n} units off")
def exact(request, arch, monkeypatch):
    """(the module, a style): a back end's own, or the GPUs' with approximations so many units of the last place off."""
    module = importlib.import_module("tikv.kernels.exact")
    ti, off, style = runtime.ti, request.param, runtime.current().kernel_style
    if off is None:
        return module, style

    def rougher(rough):
        @ti.func
        def found(x):
            return ti.bit_cast(ti.bit_cast(rough(x), ti.i32) + off, ti.f32)

        return found

    for name in ("rough_reciprocal", "rough_reciprocal_root"):
        monkeypatch.setattr(module, name, rougher(getattr(module, name)))
    return module, "spirv" if style == "cpu" else style


def positive(rng, low, high=INFINITE, count=100_000):
    """Floats by their bits: any, those of few bits or nearly all, and what lies around each power of 2."""
    powers = np.arange(0, INFINITE, 1 << 23)
    few = rng.integers(0, 1 << 23, count) & -(1 << rng.integers(0, 24, count))
    near = (powers + np.arange(-3, 4)[:, None]).ravel()
    bits = np.concatenate([rng.integers(low, high, count), rng.choice(powers, count) + (few ^ 0x7FFFFF), near])
    bits = np.concatenate([bits, rng.choice(powers, count) + few])
    return bits[(bits >= low) & (bits < high)].astype(np.uint32).view(np.float32)


def of_each(function, values):
    """The results of a Taichi function for float32 values."""
    ti = runtime.ti

    @ti.kernel
    def kernel(x: ti.types.ndarray(dtype=ti.u32, ndim=1), y: ti.types.ndarray(dtype=ti.u32, ndim=1)):
        for i in range(x.shape[0]):
            y[i] = ti.bit_cast(function(ti.bit_cast(x[i], ti.f32)), ti.u32)

    found = np.zeros(values.size, np.uint32)
    with runtime.current().compiling(False):
        kernel(values.view(np.uint32).copy(), found)
    return found.view(np.float32)


def assert_equal(found, want, given):
    wrong = (found.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(found) & np.isnan(want))
    assert not wrong.any(), [f"{a[wrong][0]!r} ({a.view(np.uint32)[wrong][0]:#x})" for a in (given, found, want)]


@pytest.mark.parametrize("least", [0.0, 1e-6], ids=["from 0", "from 1e-6"])
def test_reciprocal_roots(exact, rng, least):
    module, style = exact
    bits = int(np.float32(least).view(np.uint32))
    values = np.concatenate([positive(rng, max(1, bits)), np.float32([least, np.inf, np.nan, -np.nan])])
    with np.errstate(all="ignore"):
        want = np.float32(1) / np.sqrt(values)
    assert_equal(of_each(module.make_reciprocal_root.__wrapped__(style, least), values), want, values)


def test_roots(exact, rng):
    module, style = exact
    values = np.concatenate([positive(rng, LEAST_NORMAL), np.float32([0])])
    assert_equal(of_each(module.make_root.__wrapped__(style), values), np.sqrt(values), values)


@pytest.mark.parametrize("divisor", [1.0, 2.0, 6.0, 80.0, 96.0, 127.0, 128.0, 160.0, 1000.0, 16777215.0])
def test_quotients(exact, rng, divisor):
    module, style = exact
    low = np.float32(divisor * 2.0**-126)  # quotients below are not normal
    values = np.concatenate([positive(rng, int(low.view(np.uint32))), np.float32([0, np.inf, np.nan])])
    want = values / np.float32(divisor)
    assert_equal(of_each(module.make_divide_by.__wrapped__(style, divisor), values), want, values)


def test_reciprocals(exact, rng):
    _, style = exact
    codec = importlib.import_module("tikv.kernels.codec")
    values = positive(rng, LEAST_NORMAL, int(np.float32(2.0**126).view(np.uint32)))
    assert_equal(of_each(codec.make_reciprocal.__wrapped__(style), values), np.float32(1) / values, values)


@pytest.mark.parametrize("divisor", [1.0, 15.0, 255.0, 4095.0, 100003.0])
@pytest.mark.archs("cpu", "cuda")
def test_small_quotients(exact, rng, divisor):
    """By the quick way of CUDA, of which a compiler may round a product and a sum once."""
    module, _ = exact
    ti, small_ratio = runtime.ti, module.make_small_ratio.__wrapped__("cuda")

    @ti.func
    def by_divisor(x):
        return small_ratio(x, ti.f32(divisor))

    low = np.float32(divisor * 2.0**-90)
    values = np.concatenate([positive(rng, int(low.view(np.uint32))), np.float32([0])])
    assert_equal(of_each(by_divisor, values), values / np.float32(divisor), values)
