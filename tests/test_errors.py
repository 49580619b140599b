"""Every refusal: its class, its whole message, and that nothing was written."""

import numpy as np
import oracle
import pytest

import tikv
from tikv import errors

TREE = {
    "ShapeError": ValueError,
    "DTypeError": TypeError,
    "CopyError": TypeError,
    "OptionError": ValueError,
    "CapacityError": ValueError,
    "PositionError": IndexError,
    "ArchError": RuntimeError,
    "MissingPackageError": ImportError,
    "GroupError": RuntimeError,
    "StaleRuntimeError": RuntimeError,
    "CacheFileError": OSError,
}


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_ours_and_python_s(name):
    kind = getattr(tikv, name)
    assert issubclass(kind, tikv.TikvError)
    assert issubclass(kind, TREE[name])


def test_the_tree_is_complete():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and name != "TikvError"}
    assert kinds == set(TREE)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# (what is wrong, arrays as (shape, dtype) of src then cache or k, v, k_cache, v_cache, keywords, error, message)
F32, F16, F64, I8 = "float32", "float16", "float64", "int8"
SRC, CACHE = ((3, 2, 8), F32), ((2, 5, 8), F32)
COPY = [
    (
        "overflow", SRC, CACHE, {"position": 3}, tikv.CapacityError,
        "copy: the linear cache is full (position=3 + num_tokens=3 > capacity=5). Use capacity >= 6, or window=5 to "
        "keep only the newest tokens.",
    ),
    (
        "negative_position", SRC, CACHE, {"position": -1}, tikv.PositionError,
        "copy: position=-1 is outside the range. Use 0 or more.",
    ),
    (
        "position_too_large", SRC, CACHE, {"position": 2**63, "window": 5}, tikv.PositionError,
        "copy: position + num_tokens=9223372036854775811 is outside 0..9223372036854775807.",
    ),
    (
        "end_too_large", SRC, CACHE, {"position": 2**63 - 2, "window": 5}, tikv.PositionError,
        "copy: position + num_tokens=9223372036854775809 is outside 0..9223372036854775807.",
    ),
    (
        "position_is_no_integer", SRC, CACHE, {"position": 1.5}, tikv.DTypeError,
        "copy: position is 1.5, not an integer. Pass an int.",
    ),
    (
        "position_is_a_truth", SRC, CACHE, {"position": True}, tikv.DTypeError,
        "copy: position is True, not an integer. Pass an int.",
    ),
    (
        "window_too_wide", SRC, CACHE, {"position": 0, "window": 6}, tikv.CapacityError,
        "copy: window=6 exceeds capacity=5. Use a window of at most 5, or a larger cache.",
    ),
    (
        "window_of_nothing", SRC, CACHE, {"position": 0, "window": 0}, tikv.PositionError,
        "copy: window=0 is outside the range. Use 1 or more.",
    ),
    (
        "source_too_short", SRC, CACHE, {"position": 0, "num_tokens": 3, "src_offset": 1}, tikv.PositionError,
        "copy: the source range src_offset=1 + num_tokens=3 exceeds the 3 tokens given. Copy at most 2 tokens from "
        "there.",
    ),
    (
        "source_offset_past_it", SRC, CACHE, {"position": 0, "src_offset": 4}, tikv.PositionError,
        "copy: the source range src_offset=4 + num_tokens=0 exceeds the 3 tokens given. Copy at most 0 tokens from "
        "there.",
    ),
    (
        "negative_tokens", SRC, CACHE, {"position": 0, "num_tokens": -1}, tikv.PositionError,
        "copy: num_tokens=-1 is outside the range. Use 0 or more.",
    ),
    (
        "source_layout", SRC, CACHE, {"position": 0, "src_layout": "NHD"}, tikv.OptionError,
        "copy: unknown src_layout 'NHD'. Use one of 'token_major', 'head_major'.",
    ),
    (
        "cache_layout", SRC, CACHE, {"position": 0, "cache_layout": None}, tikv.OptionError,
        "copy: unknown cache_layout None. Use one of 'token_major', 'head_major'.",
    ),
    (
        "heads", SRC, ((3, 5, 8), F32), {"position": 0}, tikv.ShapeError,
        "copy: the number of heads of cache is 3 where 2 is needed (src: f32[3,2,8], cache: f32[3,5,8]). In the other "
        "order of its axes, src fits.",
    ),
    (
        "width", SRC, ((2, 5, 4), F32), {"position": 0}, tikv.ShapeError,
        "copy: the head width of cache is 4 where 8 is needed (src: f32[3,2,8], cache: f32[2,5,4]).",
    ),
    (
        "source_axes", ((2, 8), F32), CACHE, {"position": 0}, tikv.ShapeError,
        "copy: src is f32[2,8], with 2 axes; it must be (T, H, D).",
    ),
    (
        "cache_axes", SRC, ((1, 2, 5, 8), F32), {"position": 0}, tikv.ShapeError,
        "copy: cache is f32[1,2,5,8], with 4 axes; it must be (H, capacity, D).",
    ),
    (
        "narrowing_int8", SRC, ((2, 5, 8), I8), {"position": 0}, tikv.DTypeError,
        "copy: cannot copy float32 into int8 (src: f32[3,2,8], cache: i8[2,5,8]). From float32 the destination may be: "
        "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2.",
    ),
    (
        "widening_float16", ((3, 2, 8), F16), CACHE, {"position": 0}, tikv.DTypeError,
        "copy: cannot copy float16 into float32 (src: f16[3,2,8], cache: f32[2,5,8]). From float16 the destination may "
        "be: float16, float8_e4m3fn, float8_e5m2.",
    ),
]  # fmt: skip


def refused(arch, rng, call, shapes, written, keywords, error, message):
    before = [oracle.random_bits(rng, shape, dtype) for shape, dtype in shapes]
    arrays = [oracle.place(a.copy(), arch) for a in before]
    with pytest.raises(error) as caught:
        call(*arrays, **keywords)
    assert str(caught.value) == message
    for i in written:
        oracle.assert_same_bits(arrays[i], before[i], what="destination of a refused call")


@pytest.mark.parametrize("row", COPY, ids=lambda row: row[0])
def test_copy(arch, rng, row):
    _, src, cache, keywords, error, message = row
    refused(arch, rng, tikv.copy, (src, cache), [1], keywords, error, message)


@pytest.mark.parametrize("row", COPY, ids=lambda row: row[0])
def test_a_call_that_was_fine_before_is_refused_all_the_same(arch, rng, row):
    """Its plan is kept by then."""
    _, src, cache, keywords, error, message = row
    tikv.copy(oracle.place(zeros(3, 2, 8), arch), oracle.place(zeros(2, 5, 8), arch), position=0)
    tikv.copy(oracle.place(zeros(3, 2, 8), arch), oracle.place(zeros(2, 5, 8), arch), position=0, window=5)
    refused(arch, rng, tikv.copy, (src, cache), [1], keywords, error, message)


K, V, KC, VC = ((3, 2, 8), F16), ((3, 2, 4), F16), ((2, 5, 8), F16), ((2, 5, 4), F16)
COPY_KV = [
    (
        "tokens", (K, ((2, 2, 4), F16), KC, VC), tikv.ShapeError,
        "copy_kv: the number of tokens of v is 2 where 3 is needed (k: f16[3,2,8], v: f16[2,2,4]).",
    ),
    (
        "heads", (K, ((3, 1, 4), F16), KC, ((1, 5, 4), F16)), tikv.ShapeError,
        "copy_kv: the number of heads of v is 1 where 2 is needed (k: f16[3,2,8], v: f16[3,1,4]).",
    ),
    (
        "capacity", (K, V, KC, ((2, 6, 4), F16)), tikv.ShapeError,
        "copy_kv: the capacity of v_cache is 6 where 5 is needed (k_cache: f16[2,5,8], v_cache: f16[2,6,4]).",
    ),
    (
        "widths_swapped", (K, V, VC, KC), tikv.ShapeError,
        "copy_kv: the head width of k_cache is 4 where 8 is needed (k: f16[3,2,8], k_cache: f16[2,5,4]).",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", COPY_KV, ids=lambda row: row[0])
def test_copy_kv(arch, rng, row):
    _, shapes, error, message = row
    refused(arch, rng, tikv.copy_kv, shapes, [2, 3], {"position": 0}, error, message)


@pytest.mark.parametrize("dtypes", [(F32, F16, F16, F16), (F32, F32, F32, F16), (F16, F32, F16, F32)])
def test_k_and_v_of_two_dtypes(arch, rng, dtypes):
    shapes = [(shape, dtype) for (shape, _), dtype in zip((K, V, KC, VC), dtypes, strict=True)]
    before = [oracle.random_bits(rng, *shape) for shape in shapes]
    arrays = [oracle.place(a.copy(), arch) for a in before]
    with pytest.raises(tikv.DTypeError, match=r"^copy_kv: "):
        tikv.copy_kv(*arrays, position=0)
    for i in (2, 3):
        oracle.assert_same_bits(arrays[i], before[i])


RING, OUT = ((2, 5, 8), F16), ((2, 5, 8), F16)
LINEARIZE = [
    (
        "short", RING, ((2, 4, 8), F16), {"length": 9}, tikv.ShapeError,
        "linearize: the number of tokens of out is 4 where 5 is needed (length=9, cache: f16[2,5,8], out: f16[2,4,8]).",
    ),
    (
        "long", RING, OUT, {"length": 3}, tikv.ShapeError,
        "linearize: the number of tokens of out is 5 where 3 is needed (length=3, cache: f16[2,5,8], out: f16[2,5,8]).",
    ),
    (
        "heads", RING, ((3, 5, 8), F16), {"length": 5}, tikv.ShapeError,
        "linearize: the number of heads of out is 3 where 2 is needed (length=5, cache: f16[2,5,8], out: f16[3,5,8]).",
    ),
    (
        "width", RING, ((2, 5, 7), F16), {"length": 5}, tikv.ShapeError,
        "linearize: the head width of out is 7 where 8 is needed (length=5, cache: f16[2,5,8], out: f16[2,5,7]).",
    ),
    (
        "negative", RING, OUT, {"length": -1}, tikv.PositionError,
        "linearize: length=-1 is outside the range. Use 0 or more.",
    ),
    (
        "layout", RING, OUT, {"length": 5, "cache_layout": "HND"}, tikv.OptionError,
        "linearize: unknown cache_layout 'HND'. Use one of 'token_major', 'head_major'.",
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", LINEARIZE, ids=lambda row: row[0])
def test_linearize(arch, rng, row):
    _, ring, out, keywords, error, message = row
    refused(arch, rng, tikv.linearize, (ring, out), [1], keywords, error, message)


def test_linearize_of_two_dtypes(arch):
    with pytest.raises(tikv.DTypeError, match=r"^linearize: "):
        tikv.linearize(oracle.place(zeros(2, 5, 8), arch), oracle.place(zeros(2, 5, 8, dtype=F16), arch), length=5)


def test_zero_tokens_still_check(arch):
    """Nothing to do is a success, of arrays that fit."""
    cache = oracle.place(zeros(2, 5, 8), arch)
    tikv.copy(oracle.place(zeros(0, 2, 8), arch), cache, position=5)
    with pytest.raises(tikv.ShapeError, match="head width"):
        tikv.copy(oracle.place(zeros(0, 2, 7), arch), cache, position=0)
    with pytest.raises(tikv.DTypeError, match="cannot copy"):
        tikv.copy(oracle.place(zeros(0, 2, 8, dtype=F16), arch), cache, position=0)
    with pytest.raises(tikv.CapacityError, match=r"position=6 \+ num_tokens=0"):
        tikv.copy(oracle.place(zeros(0, 2, 8), arch), cache, position=6)
