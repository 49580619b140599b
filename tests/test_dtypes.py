"""Every row of `tikv/dtypes.py`: what converts into it, what a cache of it keeps, whether attention reads that.

A new row is tested here without a line of its own.
"""

import copy

import numpy as np
import oracle
import pytest

import tikv
from tikv import dtypes, formats, reference, runtime
from tikv.tools import support

HEADS, TOKENS, WIDTH = 2, 7, 16
CONVERSIONS = [(source, dtype) for source, into in dtypes.CONVERSIONS.items() for dtype in into]
APPENDED = [(source, dtype) for dtype, sources in dtypes.APPENDED.items() for source in sources]


def numpy_of(name):
    """The NumPy type of a row; the test is skipped where the back end has none."""
    if name == "float64" and not runtime.current().has_float64:
        pytest.skip("there is no float64 on this back end")
    return dtypes.parse(name, "test").numpy


@pytest.mark.parametrize(("source", "dtype"), CONVERSIONS, ids=map(">".join, CONVERSIONS))
def test_a_copy_converts_every_value(arch, rng, source, dtype):
    """Of float32 those at which rounding goes wrong, of 8 and 16 bits all there are."""
    of_source, of_cache = numpy_of(source), numpy_of(dtype)
    narrows = source == "float32" and dtype != source
    values = oracle.awkward_float32() if narrows else oracle.random_bits(rng, 1 << 16, of_source)
    if of_source.itemsize <= 2:
        values = np.arange(1 << 16).astype(f"u{of_source.itemsize}").view(of_source)
    values = values[: values.size // WIDTH * WIDTH].reshape(-1, 1, WIDTH)
    cache = oracle.random_bits(rng, (1, len(values), WIDTH), of_cache)
    tikv.copy(values, cache, position=0)
    want = reference.encode(values, of_cache).swapaxes(0, 1)
    oracle.assert_same_bits(cache, want, any_nan=source != dtype)


@pytest.mark.full("vulkan")  # whose stores and attention have tests of their own
@pytest.mark.full(each_value=True)
@pytest.mark.parametrize(("source", "dtype"), APPENDED, ids=map(">".join, APPENDED))
def test_a_store_keeps_what_is_appended(arch, rng, source, dtype):
    """And attends over it, or says that attention does not read it."""
    numpy_of(dtype)
    rows = [rng.standard_normal((TOKENS, HEADS, WIDTH)).astype(numpy_of(source)) for _ in "kv"]
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=TOKENS + 2, dtype=dtype)
    store.append(0, *rows)
    kept = [np.stack([as_kept(row, dtype) for row in of]) for of in rows]
    for got, want in zip(store.tokens(0), kept, strict=True):
        oracle.assert_same_bits(got, want.swapaxes(0, 1)[None])
    q = rng.standard_normal((1, HEADS, WIDTH)).astype(np.float32)
    if dtypes.parse(dtype, "test") not in dtypes.ATTENDED:
        with pytest.raises(tikv.DTypeError, match=f"attention reads {dtypes.ATTENDED[0].name}, "):
            store.attend(0, q)
        return
    got = oracle.to_numpy(store.attend(0, q))
    for h in range(HEADS):
        want, _ = reference.attention(q[0, h], kept[0][:, h], kept[1][:, h], scale=WIDTH**-0.5)
        np.testing.assert_allclose(got[0, h], want, rtol=0, atol=1e-5)


def as_kept(rows, dtype):
    """Rows as they come back from a store; those of int8 are quantised, each with a scale of its own."""
    if dtype == "int8":
        return reference.dequantize(*reference.quantize(rows))
    return reference.encode(rows, numpy_of(dtype))


def test_the_reference_has_the_same_conversions():
    assert set(reference._CONVERSIONS) == {pair for pair in CONVERSIONS if pair[0] != pair[1]}


def test_tikv_support_tries_every_dtype_of_a_cache():
    """Its columns, which the README shows."""
    assert {stored for _, stored in support.DTYPES.values()} - set(formats.GROUP_FORMATS) == set(dtypes.APPENDED)


def test_a_dtype_that_a_storage_has_for_itself_is_copied_as_itself():
    own = dtypes.DType("halves", "halves", np.dtype(np.float32), (2, 32))
    assert copy.deepcopy([own])[0] is own
    assert copy.deepcopy(dtypes.int8) is dtypes.int8


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("fp16", "float16"),
        ("bf16", "bfloat16"),
        ("int4", "quant4_32"),
    ],
)
def test_a_name_of_other_libraries_is_one_of_ours(arch, short, name):
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "capacity": 4}
    assert repr(tikv.KVCacheStore(**form, dtype=short)) == repr(tikv.KVCacheStore(**form, dtype=name))
