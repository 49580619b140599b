"""`copy`, `copy_kv` and `linearize`: whole buffers, every bit, on every back end."""

import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, dtypes, launch, reference
from tikv.ops import checks

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPE = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": BF16, "f64": np.dtype(np.float64),
        "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}  # fmt: skip
SAME = ["f32>f32", "f16>f16", "bf16>bf16"]
CONVERTING = ["f32>f16", "f32>bf16", "bf16>f32", "f16>e4m3"]
LAYOUTS = [(s, c) for s in ("token_major", "head_major") for c in ("token_major", "head_major")]


class Case(NamedTuple):
    """Where rows go: a cache of `capacity` slots, `tokens` rows given, and the arguments of the call."""

    name: str
    capacity: int
    tokens: int
    position: int
    window: int | None = None
    num_tokens: int | None = None
    src_offset: int = 0


LINEAR = [
    Case("nothing", 5, 0, 5),
    Case("one_first", 5, 1, 0),
    Case("two_last", 5, 2, 3),
    Case("exact_fit", 63, 63, 0),
    Case("one_less", 64, 63, 1),
    Case("a_part", 101, 100, 7, num_tokens=63, src_offset=37),
    Case("none_of_some", 5, 3, 2, num_tokens=0, src_offset=3),
]
RING = [
    Case("nothing", 5, 0, 2**40, window=5),
    Case("one_first", 5, 1, 0, window=5),
    Case("one_last", 5, 1, 4, window=5),
    Case("two_over_the_end", 9, 2, 6, window=7),
    Case("capacity_less_one", 63, 62, 60, window=63),
    Case("capacity", 63, 63, 7, window=63),
    Case("capacity_and_one", 63, 64, 0, window=63),
    Case("twice_and_three", 30, 63, 11, window=30),
    Case("narrow_window", 100, 100, 3, window=8),
    Case("one_slot", 4, 2, 9, window=1),
    Case("around_2_31", 7, 4, 2**31 - 2, window=7),
    Case("around_2_32", 7, 16, 2**32 - 3, window=6),
    Case("far", 7, 3, 2**40 + 5, window=7),
    Case("farthest", 7, 3, 2**63 - 5, window=7),
    Case("a_part", 9, 63, 5, window=9, num_tokens=20, src_offset=41),
]


def numpy_types(pair):
    return tuple(TYPE[name] for name in pair.split(">"))


def contents(rng, shape, pair):
    """Any bits; where they are converted, ordinary numbers in every other place, most bits being out of range."""
    src, cache = numpy_types(pair)
    found = oracle.random_bits(rng, shape, src)
    if src != cache:
        found.reshape(-1)[::2] = oracle.numbers(rng, found.reshape(-1)[::2].shape, src)
    return found


def shapes(case, heads, width, src_layout, cache_layout):
    src = (case.tokens, heads) if src_layout == "token_major" else (heads, case.tokens)
    cache = (case.capacity, heads) if cache_layout == "token_major" else (heads, case.capacity)
    return (*src, width), (*cache, width)


def arguments(case, src_layout, cache_layout):
    fields = {name: value for name, value in case._asdict().items() if name not in ("name", "capacity", "tokens")}
    return {**fields, "src_layout": src_layout, "cache_layout": cache_layout}


def check(arch, rng, pair, case, heads, widths, layouts):
    """Run `copy` or `copy_kv` and compare the whole caches with the oracle."""
    keywords = arguments(case, *layouts)
    sources, before = [], []
    for width in widths:
        src_shape, cache_shape = shapes(case, heads, width, *layouts)
        sources.append(contents(rng, src_shape, pair))
        before.append(oracle.random_bits(rng, cache_shape, numpy_types(pair)[1]))
    given = [oracle.place(src.copy(), arch) for src in sources]
    caches = [oracle.place(cache.copy(), arch) for cache in before]
    call = tikv.copy if len(widths) == 1 else tikv.copy_kv
    call(*given, *caches, **keywords)
    converts = pair in CONVERTING
    for name, src, old, seen, cache in zip("kv", sources, before, given, caches, strict=False):
        what = f"{name} {case.name} {layouts}"
        want = reference.copy(src, old, **keywords)
        oracle.assert_same_bits(cache, want, what=what, any_nan=converts)
        oracle.assert_same_bits(seen, src, what=f"source of {what}")


@pytest.mark.parametrize("case", [*LINEAR, *RING], ids=lambda c: f"{'ring' if c.window else 'linear'}_{c.name}")
@pytest.mark.parametrize(
    ("pair", "widths"),
    [("f16>f16", (80,)), ("f32>f16", (80,)), *((pair, (24, 80)) for pair in [*SAME, *CONVERTING])],
    ids=lambda x: x if isinstance(x, str) else "k" if len(x) == 1 else "kv",
)
def test_every_pair_in_every_layout(arch, rng, pair, widths, case):
    for layouts in LAYOUTS:
        check(arch, rng, pair, case, 3, widths, layouts)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("case", [LINEAR[3], RING[7]], ids=lambda c: c.name)
def test_float64(arch, rng, case):
    for layouts in LAYOUTS:
        check(arch, rng, "f64>f64", case, 3, (5, 8), layouts)


@pytest.mark.archs("vulkan", "metal")
def test_float64_is_refused_where_there_is_none(arch):
    with pytest.raises(tikv.DTypeError, match=f"float64, which {arch} does not have"):
        tikv.copy(np.zeros((1, 1, 2)), np.zeros((1, 1, 2)), position=0)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_integers_are_copied_as_they_are(arch, rng, dtype):
    src, before = oracle.random_bits(rng, (5, 3, 6), dtype), oracle.random_bits(rng, (3, 4, 6), dtype)
    cache = oracle.place(before.copy(), arch)
    tikv.copy(oracle.place(src, arch), cache, position=6, window=4)
    oracle.assert_same_bits(cache, reference.copy(src, before, position=6, window=4))


@pytest.mark.parametrize("pair", ["f16>f16", "f32>f16"])
@pytest.mark.parametrize(("heads", "widths"), [(1, (1,)), (3, (3, 1)), (8, (64,)), (1, (128, 64)), (2, (127,))])
def test_shapes(arch, rng, pair, heads, widths):
    for case in RING[3:8]:
        for layouts in LAYOUTS:
            check(arch, rng, pair, case, heads, widths, layouts)


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 100])
@pytest.mark.parametrize("heads", [0, 1, 3])
def test_extents_that_are_empty_or_one(arch, rng, tokens, heads):
    for case in (Case("linear", tokens + 2, tokens, 2), Case("ring", 9, tokens, 8, window=9)):
        for width in (0, 4):
            check(arch, rng, "f32>f32", case, heads, (width,), ("token_major", "head_major"))
        check(arch, rng, "f32>f32", case, heads, (0, 4), ("token_major", "head_major"))


@pytest.mark.parametrize("pair", ["f16>f16", "f32>f32", "f32>f16", "bf16>f32"])
@pytest.mark.parametrize(("src_shift", "cache_shift"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 2), (4, 2)])
def test_arrays_that_begin_in_the_middle(arch, rng, pair, src_shift, cache_shift):
    """Whatever the address allows, in words of 8, 4 or 2 bytes; what lies around the cache stays as it is."""
    src_type, cache_type = numpy_types(pair)
    case, layouts = RING[3], ("token_major", "head_major")
    src_shape, cache_shape = shapes(case, 2, 16, *layouts)
    src_buffer = contents(rng, (np.prod(src_shape) + 64,), pair).astype(src_type)
    buffer = oracle.random_bits(rng, (np.prod(cache_shape) + 64,), cache_type)

    def carve(flat, shift, shape):
        return flat[16 + shift : 16 + shift + int(np.prod(shape))].reshape(shape)

    given, written = oracle.place(src_buffer, arch), oracle.place(buffer.copy(), arch)
    keywords = arguments(case, *layouts)
    tikv.copy(carve(given, src_shift, src_shape), carve(written, cache_shift, cache_shape), **keywords)
    want = buffer.copy()
    old = carve(want, cache_shift, cache_shape)
    old[...] = reference.copy(carve(src_buffer, src_shift, src_shape), old, **keywords)
    oracle.assert_same_bits(written, want, any_nan=pair in CONVERTING)


@pytest.mark.parametrize("width", [64, 63, 7])
@pytest.mark.parametrize("pair", ["f32>f16", "bf16>bf16"])
def test_the_slices_of_a_fused_qkv_are_read_in_place(arch, rng, pair, width):
    """K and V lie side by side behind Q, in rows that are longer than they are."""
    tokens, query_heads, heads, capacity = 6, 4, 2, 8
    qkv = contents(rng, (tokens, (query_heads + 2 * heads) * width), pair)
    before = [oracle.random_bits(rng, (heads, capacity, width), numpy_types(pair)[1]) for _ in "kv"]
    fused = oracle.place(qkv.copy(), arch)

    def part(rows, first):
        return rows[:, first * width : (first + heads) * width].reshape(tokens, heads, width)

    sources = [part(fused, first) for first in (query_heads, query_heads + heads)]
    if arch != "cuda":
        assert all(np.shares_memory(source, fused) for source in sources)
    caches = [oracle.place(cache.copy(), arch) for cache in before]
    tikv.copy_kv(*sources, *caches, position=7, window=8)
    for name, first, old, cache in zip("kv", (query_heads, query_heads + heads), before, caches, strict=True):
        want = reference.copy(part(qkv, first), old, position=7, window=8)
        oracle.assert_same_bits(cache, want, what=name, any_nan=pair in CONVERTING)


def test_every_stride_may_differ(arch, rng):
    """Views with gaps between tokens, heads and slots, on both sides; K and V interleaved in one buffer."""
    src = oracle.random_bits(rng, (7, 2, 5, 12), np.float16)
    buffer = oracle.random_bits(rng, (6, 3, 2, 14), np.float16)
    given, written = oracle.place(src, arch), oracle.place(buffer.copy(), arch)

    def k_and_v(a, b):
        return a[::2, 0, :3, 1:9], a[::2, 1, ::2, 3:11], b[:, :, 0, 2:10], b[:, :, 1, 5:13]

    keywords = {"position": 3, "window": 5, "cache_layout": "token_major"}
    tikv.copy_kv(*k_and_v(given, written), **keywords)
    want = buffer.copy()
    for k_or_v in range(2):
        views = k_and_v(src, want)
        views[2 + k_or_v][...] = reference.copy(views[k_or_v], views[2 + k_or_v], **keywords)
    oracle.assert_same_bits(written, want)


def test_a_broadcast_source_is_read(arch, rng):
    row = oracle.random_bits(rng, (1, 1, 4), np.float32)
    before = oracle.random_bits(rng, (3, 6, 4), np.float32)
    cache = oracle.place(before.copy(), arch)
    wide = np.broadcast_to(row, (4, 3, 4)) if arch != "cuda" else oracle.place(row, arch).expand(4, 3, 4)
    tikv.copy(wide, cache, position=1)
    oracle.assert_same_bits(cache, reference.copy(np.broadcast_to(row, (4, 3, 4)), before, position=1))


@pytest.mark.parametrize("cache_type", ["f16", "bf16"])
@pytest.mark.parametrize("width", [3, 64])
def test_narrowing_rounds_to_nearest_even(arch, rng, cache_type, width):
    """Every tie, edge, subnormal, infinity and NaN."""
    values = oracle.awkward_float32()
    values = values[: len(values) // width * width].reshape(-1, 1, width)
    before = oracle.random_bits(rng, (1, len(values), width), TYPE[cache_type])
    cache = oracle.place(before.copy(), arch)
    tikv.copy(oracle.place(values, arch), cache, position=0)
    want = reference.encode(values, TYPE[cache_type]).swapaxes(0, 1)
    oracle.assert_same_bits(cache, want, any_nan=True)


@pytest.mark.parametrize("width", [3, 64])
def test_widening_keeps_every_bfloat16(arch, rng, width):
    values = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    values = values[: len(values) // width * width].reshape(-1, 1, width)
    cache = oracle.place(oracle.random_bits(rng, (1, len(values), width), np.float32), arch)
    tikv.copy(oracle.place(values, arch), cache, position=0)
    want = (oracle.bits(values).astype(np.uint32) << 16).view(np.float32).swapaxes(0, 1)
    oracle.assert_same_bits(cache, want, any_nan=True)


@pytest.mark.parametrize("pair", ["f32>f16", "f16>f16"])
def test_k_and_v_together_are_k_then_v(arch, rng, pair):
    k, v = contents(rng, (5, 3, 24), pair), contents(rng, (5, 3, 80), pair)
    before = [oracle.random_bits(rng, (3, 4, width), numpy_types(pair)[1]) for width in (24, 80)]
    fused, single = ([oracle.place(cache.copy(), arch) for cache in before] for _ in range(2))
    tikv.copy_kv(oracle.place(k, arch), oracle.place(v, arch), *fused, position=9, window=4)
    for src, cache in zip((k, v), single, strict=True):
        tikv.copy(oracle.place(src, arch), cache, position=9, window=4)
    for name, one, other in zip("kv", fused, single, strict=True):
        oracle.assert_same_bits(one, oracle.to_numpy(other), what=name)


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 9, 10, 13, 2**31 - 1, 2**31 + 3, 2**40 + 2, 2**63 - 1])
def test_linearize(arch, rng, dtype, layout, length):
    """The temporal order of a ring; `out` is compared whole, guards included."""
    heads, capacity, width = 3, 5, 7
    tokens = min(length, capacity)

    def shape(n):
        return (n, heads, width) if layout == "token_major" else (heads, n, width)

    ring = oracle.random_bits(rng, shape(capacity), TYPE[dtype])
    buffer = oracle.random_bits(rng, (64 + int(np.prod(shape(tokens))),), TYPE[dtype])
    written, want = oracle.place(buffer.copy(), arch), buffer.copy()
    tikv.linearize(oracle.place(ring, arch), written[32:-32].reshape(shape(tokens)), length=length, cache_layout=layout)
    want[32:-32] = reference.linearize(ring, length=length, cache_layout=layout).reshape(-1)
    oracle.assert_same_bits(written, want)


def test_a_ring_read_back_is_the_last_window(arch, rng):
    src = oracle.random_bits(rng, (23, 2, 8), np.float16)
    ring, out = (oracle.place(np.zeros((2, 7, 8), np.float16), arch) for _ in range(2))
    for first in range(0, 23, 5):
        tikv.copy(oracle.place(src[first : first + 5].copy(), arch), ring, position=first, window=7)
    tikv.linearize(ring, out, length=23)
    oracle.assert_same_bits(out, src[-7:].swapaxes(0, 1))


def test_many_tokens_are_one_token_after_the_other(arch, rng):
    k, v = (oracle.random_bits(rng, (20, 2, 8), np.float16) for _ in "kv")
    together, apart = ([oracle.place(np.zeros((2, 6, 8), np.float16), arch) for _ in "kv"] for _ in range(2))
    tikv.copy_kv(oracle.place(k, arch), oracle.place(v, arch), *together, position=3, window=6)
    for t in range(20):
        rows = [oracle.place(a[t : t + 1].copy(), arch) for a in (k, v)]
        tikv.copy_kv(*rows, *apart, position=3 + t, window=6)
    for name, one, other in zip("kv", together, apart, strict=True):
        oracle.assert_same_bits(one, oracle.to_numpy(other), what=name)


def test_an_array_past_32_bits_is_refused(arch):
    """Spans, not elements, are what an index has to reach; nothing this large is allocated here."""
    live = arrays.runtime_of()
    limit = 2**32 if live.is_spirv else 2**31 * 4
    address = 0 if live.is_spirv else 1 << 20
    last_ok = arrays.ArrayView(address, (limit // 4,), (1,), dtypes.float32, live.arch)
    checks.addressable(last_ok, 4, live, "cache", "copy")
    too_large = arrays.ArrayView(address, (limit // 4 + 1,), (1,), dtypes.float32, live.arch)
    with pytest.raises(tikv.CapacityError, match=rf"copy: cache \(f32\[{limit // 4 + 1}\]\) spans {limit + 4} bytes"):
        checks.addressable(too_large, 4, live, "cache", "copy")
    with pytest.raises(tikv.CapacityError, match="Split the cache"):
        checks.addressable(too_large.restrided((2, 2), (2**31 * 2, 1), 0), 4, live, "cache", "copy")


@pytest.mark.archs("cpu")
def test_a_cache_past_32_bits_is_refused_by_the_call(arch):
    """The memory behind these views is never touched: the refusal comes first."""
    far = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2, 4, 8), (2**34, 2**33, 4))
    with pytest.raises(tikv.CapacityError, match=r"copy: k .* addresses"):
        tikv.copy(np.zeros((1, 2, 8), np.float32), far, position=0)


def test_more_work_than_32_bits_count_is_refused(arch):
    rows = np.broadcast_to(np.zeros((1, 1, 2), np.float32), (2**31, 1, 2))
    with pytest.raises(tikv.CapacityError, match=r"pieces of work .* Split the call"):
        tikv.copy(rows, np.zeros((1, 4, 2), np.float32), position=0, window=4)


COUNT_TASKS = """
import ctypes, os, sys
import numpy as np
import tikv

live = tikv.init(arch=sys.argv[1], offline_cache=False, print_ir=True)


def mark():
    ctypes.CDLL(None).fflush(None)
    os.write(1, b"next kernel\\n")


k = np.zeros((4, 3, 8), np.float32)
for dtype, window in ((np.float32, 9), (np.float16, None)):
    caches = np.zeros((2, 3, 9, 8), dtype)
    mark()
    tikv.copy_kv(k, k, *caches, position=0, window=window)
mark()
tikv.linearize(np.zeros((3, 9, 8), np.float32), np.zeros((3, 9, 8), np.float32), length=20)
mark()
tikv.copy(np.zeros((4000, 3, 64), np.float32), np.zeros((3, 4000, 64), np.float32), position=0)
mark()
"""


# On CUDA a process of its own compiles, and test_cuda_launch sees that the driver gets one task.
@pytest.mark.archs("cpu", "vulkan", "metal")
@pytest.mark.skipif(sys.platform == "win32", reason="reads what Taichi prints through the C library")
def test_a_kernel_is_one_task(arch, python):
    """A second task would be a second launch; Taichi makes one for a loop whose bound is only known at run time."""
    kernels = [part for part in python(COUNT_TASKS, arch).stdout.split("next kernel\n")[1:-1] if part]
    assert len(kernels) == 4
    for compiled in kernels:
        final = compiled[compiled.rindex("kernel {") :]
        assert final.count(" = offloaded") == 1, final[:2000]


FAST_MATH = """
import sys
import numpy as np
from tikv.runtime import ti
ti.init(arch=getattr(ti, sys.argv[1]), fast_math=True, log_level=ti.WARN, enable_fallback=False)
import oracle, tikv
from tikv import reference
rng = np.random.default_rng(7)
for width in (1, 2, 64):
    for dtype in (np.float32, np.float16, oracle.ml_dtypes.bfloat16):
        src = oracle.random_bits(rng, (300, 2, width), dtype)
        before = oracle.random_bits(rng, (2, 301, width), dtype)
        cache = oracle.place(before.copy(), sys.argv[1])
        tikv.copy(oracle.place(src, sys.argv[1]), cache, position=1)
        oracle.assert_same_bits(cache, reference.copy(src, before, position=1))
values = oracle.awkward_float32().reshape(-1, 1, 1)
for dtype in (np.float16, oracle.ml_dtypes.bfloat16):
    cache = oracle.place(np.zeros((1, len(values), 1), dtype), sys.argv[1])
    tikv.copy(oracle.place(values, sys.argv[1]), cache, position=0)
    oracle.assert_same_bits(cache, reference.encode(values, dtype).swapaxes(0, 1), any_nan=True)
assert ti.cfg.fast_math
print("same bits")
"""


def test_fast_math_of_the_caller_changes_no_bit(arch, python):
    """NaN payloads, subnormals and rounding, in an engine that the caller started with fast_math."""
    assert python(FAST_MATH, arch).stdout.strip().endswith("same bits")


def test_the_kernel_is_named_after_its_factory(arch):
    tikv.copy(np.zeros((1, 1, 2), np.float32), np.zeros((1, 2, 2), np.float32), position=0)
    assert any(kernel.name.startswith("copy(") for kernel in arrays.runtime_of().kernels.values())
    assert all(isinstance(kernel, launch.Kernel) for kernel in arrays.runtime_of().kernels.values())


def test_options_are_told_apart_by_their_values(arch):
    """Whatever they come as, and though an equal number of another type was there before."""
    row, cache = np.ones((1, 1, 3), np.float32), np.zeros((1, 4, 3), np.float32)
    tikv.copy(row, cache, position=0, num_tokens=1, window=4)
    for wrong in ({"num_tokens": 1.0}, {"window": 4.0}, {"src_offset": False}, {"num_tokens": True}):
        with pytest.raises(tikv.DTypeError, match="not an integer"):
            tikv.copy(row, cache, position=0, **{"window": 4} | wrong)
    window = np.array(4)
    tikv.copy(row, cache, position=3, window=window)
    window[...] = 2
    cache[:] = 0
    tikv.copy(row, cache, position=3, window=window)
    assert cache[0, :, 0].tolist() == [0, 1, 0, 0]


def test_elements_off_their_size_are_copied_but_not_converted(arch):
    memory = np.zeros(64, np.uint8)
    row = memory[1:25].view(np.float32).reshape(1, 2, 3)
    row[...] = np.arange(6).reshape(row.shape)
    same, half = (np.zeros((2, 4, 3), dtype) for dtype in (np.float32, np.float16))
    tikv.copy(row, same, position=0)
    assert same[:, 0].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    for call in (lambda: tikv.copy(row, half, position=0), lambda: tikv.quantize(row)):
        with pytest.raises(tikv.ShapeError, match=r"not a multiple of its 4-byte elements.*aligned copy"):
            call()
    assert not half.any()
