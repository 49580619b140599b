"""Comparing buffers as raw bits, filling them with random ones, and planting the errors a comparison has to notice."""

import re

import ml_dtypes
import numpy as np
import pytest

from tikv import formats, reference

_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def random_bits(rng, shape, dtype) -> np.ndarray:
    """An array of any bits at all: NaN payloads, subnormals, infinities and both zeros among them."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(bytearray(rng.bytes(count * dtype.itemsize)), dtype=dtype).reshape(shape)


def numbers(rng, shape, dtype) -> np.ndarray:
    """Ordinary finite values over many magnitudes, for arithmetic and conversions."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    return values.astype(dtype)


FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


def around_float8(dtype) -> np.ndarray:
    """Each value of a type of 8 bits, what lies half-way to the next, also behind the last, and neighbours of these."""
    finite = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    finite = np.unique(finite[np.isfinite(finite)])
    step = finite[-1] - finite[-2]
    places = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, finite[-1:] + step / 2, finite[-1:] + step])
    places = np.concatenate([places, -places]).astype(np.float32)
    return np.concatenate([places, *(np.nextafter(places, np.float32(to)) for to in (-np.inf, np.inf))])


def awkward_float32() -> np.ndarray:
    """The float32 values that conversions to 8 or 16 bits get wrong first: ties, overflow, subnormals, NaN, zeros."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    ties_bf16 = (halves << 16) | 0x8000
    around = np.concatenate([ties_bf16 - 1, ties_bf16, ties_bf16 + 1, halves << 16]).astype(np.uint32).view(np.float32)
    edges = [
        65504.0,
        65519.996,
        65520.0,
        65536.0,
        2.0**-24,
        2.0**-25,
        2.0**-25 * 1.0000001,
        6.1e-5,
        5.9e-8,
        3.4028235e38,
    ]
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F801000], np.uint32).view(
        np.float32
    )
    with np.errstate(all="ignore"):
        f16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        middle = (f16 + np.nextafter(f16, np.float32(np.inf), dtype=np.float32)) / 2
        tie = f16.view(np.uint32) | np.uint32(1 << 12)
    edges = np.array([sign * e for e in edges for sign in (1, -1)] + [0.0, -0.0, np.inf, -np.inf], np.float32)
    return np.concatenate([around, edges, nans, f16, middle, tie.view(np.float32), *map(around_float8, FLOAT8)])


def said(text: str) -> str:
    """A message that speaks of Taichi, as it is with the engine in use."""
    from tikv import runtime

    engine = runtime.engine_in_use()
    return re.sub(r"\bti\b(?=\.(init|reset|ndarray)\b)", engine.alias, text).replace("Taichi", engine.title)


def to_torch(array, arch):
    """A NumPy array as a torch tensor: over the same memory, or a copy on the GPU for "cuda"; without torch, skip."""
    torch = pytest.importorskip("torch")
    if array.dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu, *FLOAT8):
        bits = array.view(np.int16 if array.dtype.itemsize == 2 else np.int8)
        tensor = torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
    else:
        tensor = torch.from_numpy(array)
    return tensor.cuda() if arch == "cuda" else tensor


def place(array, arch):
    """A NumPy array where the back end reads and writes it in place: a torch tensor on CUDA, itself elsewhere."""
    return to_torch(array, arch) if arch == "cuda" else array


def to_numpy(array) -> np.ndarray:
    """The values of an array of NumPy, torch, JAX, tikv or the engine, with the bits they have."""
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array)
    if type(array).__module__.split(".")[0] == "torch":
        import torch

        host = array.detach().cpu()
        name = str(host.dtype).removeprefix("torch.")
        if name != "bfloat16" and not name.startswith("float8"):
            return host.numpy()
        return host.view(torch.int16 if name == "bfloat16" else torch.int8).numpy().view(getattr(ml_dtypes, name))
    for method in ("copy_to_host", "to_numpy", "get"):
        if hasattr(array, method):
            return getattr(array, method)()
    if hasattr(array, "__array__"):
        return np.asarray(array)
    raise TypeError(f"to_numpy: no way to read a {type(array).__name__}")


def bits(array) -> np.ndarray:
    """The array as unsigned words of its own width."""
    array = to_numpy(array)
    return np.ascontiguousarray(array).view(_WORD[array.dtype.itemsize]).reshape(array.shape)


def isnan(array) -> np.ndarray:
    """NaNs, without the warning that NumPy gives for the signalling ones of bfloat16."""
    with np.errstate(invalid="ignore"):
        return np.isnan(array)


def as_stored(rows, name) -> np.ndarray:
    """What a store of that dtype or format gives back of float32 rows."""
    if name in formats.GROUP_FORMATS:
        row = formats.GROUP_FORMATS[name]
        quantised = reference.quantize_groups(rows, row.bits, row.group, row.rule, np.float16)
        return reference.dequantize_groups(*quantised, row.bits, row.rule)
    if name == "int8":
        return reference.dequantize(*reference.quantize(rows))
    return reference.encode(rows, getattr(ml_dtypes, name, None) or np.dtype(name).type)


def assert_same_bits(got, want, *, what="buffer", any_nan=False) -> None:
    """Fail unless both have the same shape, dtype and bits, naming the first difference and how many there are.

    With `any_nan` a NaN may be any NaN: the rule for values that were converted rather than copied.
    """
    got, want = to_numpy(got), to_numpy(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    differs = bits(got) != bits(want)
    if any_nan:
        differs &= ~(isnan(got) & isnan(want))
    if differs.any():
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        digits = 2 * got.dtype.itemsize
        raise AssertionError(
            f"{what}: {np.count_nonzero(differs)} of {differs.size} elements differ, the first at {list(first)}: "
            f"got 0x{int(bits(got)[first]):0{digits}x} ({got[first]}), "
            f"expected 0x{int(bits(want)[first]):0{digits}x} ({want[first]})"
        )


class Guarded:
    """An array in the middle of a larger buffer of random bits; `check` fails if anything around it was written."""

    def __init__(self, rng, values, guard=64):
        """Put `values` between two guards of that many elements."""
        self._buffer = random_bits(rng, values.size + 2 * guard, values.dtype)
        self._guard = guard
        self.array = self._buffer[guard : guard + values.size].reshape(values.shape)
        self.array[...] = values
        self._before = self._buffer.copy()

    def check(self):
        """Fail if a guard differs from what it was."""
        for what, part in (
            ("guard before the array", slice(None, self._guard)),
            ("guard after the array", slice(-self._guard, None)),
        ):
            assert_same_bits(self._buffer[part], self._before[part], what=what)


def flip_bit(array, index, bit=0) -> np.ndarray:
    """A copy with one bit of one element flipped."""
    planted = bits(array).copy()
    planted[index] ^= planted.dtype.type(1 << bit)
    return planted.view(array.dtype)


def move_slot(array, axis, source, target) -> np.ndarray:
    """A copy in which the row that belongs to slot `source` lies in slot `target` as well."""
    planted = bits(array).copy()
    slots = np.moveaxis(planted, axis, 0)
    slots[target] = slots[source]
    return planted.view(array.dtype)


def swap(array, axis, a, b) -> np.ndarray:
    """A copy with two slices exchanged: two heads, two slots, two pages."""
    planted = bits(array).copy()
    slices = np.moveaxis(planted, axis, 0)
    slices[[a, b]] = slices[[b, a]]
    return planted.view(array.dtype)
