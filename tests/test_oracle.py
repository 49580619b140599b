"""The comparison can fail: each error that a kernel might make is planted, and each must be found."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from wrong_arguments import Scene, problems_of

import tikv
from tikv import reference

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int8]


@pytest.fixture(params=DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def written(request, rng):
    """K and V caches before and after a copy of five tokens to slots 2 to 6."""
    before = [oracle.random_bits(rng, (3, 8, 4), request.param) for _ in "kv"]
    rows = [oracle.random_bits(rng, (5, 3, 4), request.param) for _ in "kv"]
    after = [reference.copy(src, cache, position=2) for src, cache in zip(rows, before, strict=True)]
    return before, after


def test_equal_bits_pass(written):
    _, (k, v) = written
    oracle.assert_same_bits(k.copy(), k)
    oracle.assert_same_bits(v.copy(), v)


def test_one_wrong_bit_is_found(written):
    _, (k, _) = written
    for bit in (0, 8 * k.dtype.itemsize - 1):
        with pytest.raises(AssertionError, match=r"1 of 96 elements differ, the first at \[2, 6, 3\]: got 0x"):
            oracle.assert_same_bits(oracle.flip_bit(k, (2, 6, 3), bit), k)


def test_a_wrong_bit_outside_the_written_slots_is_found(written):
    _, (k, _) = written
    with pytest.raises(AssertionError, match=r"\[0, 7, 0\]"):
        oracle.assert_same_bits(oracle.flip_bit(k, (0, 7, 0)), k)


def test_a_shifted_slot_is_found(written):
    _, (k, _) = written
    with pytest.raises(AssertionError, match="elements differ"):
        oracle.assert_same_bits(np.roll(oracle.bits(k), 1, axis=1).view(k.dtype), k)
    with pytest.raises(AssertionError, match="elements differ"):
        oracle.assert_same_bits(oracle.move_slot(k, 1, source=6, target=7), k)


def test_swapped_heads_are_found(written):
    _, (k, _) = written
    with pytest.raises(AssertionError, match="elements differ"):
        oracle.assert_same_bits(oracle.swap(k, 0, 0, 2), k)


def test_k_and_v_swapped_are_found(written):
    _, (k, v) = written
    with pytest.raises(AssertionError, match="elements differ"):
        oracle.assert_same_bits(v, k)


def test_an_operation_that_did_not_run_is_found(written):
    (k_before, v_before), (k, v) = written
    for before, after in ((k_before, k), (v_before, v)):
        with pytest.raises(AssertionError, match="elements differ"):
            oracle.assert_same_bits(before, after)


def test_zeros_and_nan_payloads_are_told_apart():
    with pytest.raises(AssertionError, match="got 0x80000000"):
        oracle.assert_same_bits(np.float32([-0.0]), np.float32([0.0]))
    quiet, payload = (np.array([word], np.uint32).view(np.float32) for word in (0x7FC00000, 0x7FC00001))
    with pytest.raises(AssertionError, match="got 0x7fc00001"):
        oracle.assert_same_bits(payload, quiet)
    oracle.assert_same_bits(payload, quiet, any_nan=True)
    with pytest.raises(AssertionError, match="expected 0x3f800000"):
        oracle.assert_same_bits(payload, np.float32([1.0]), any_nan=True)


def test_shape_and_dtype_are_part_of_the_result():
    with pytest.raises(AssertionError, match="shape"):
        oracle.assert_same_bits(np.zeros((2, 3)), np.zeros((3, 2)))
    with pytest.raises(AssertionError, match="dtype"):
        oracle.assert_same_bits(np.zeros(2, np.float16), np.zeros(2, ml_dtypes.bfloat16))


@pytest.mark.parametrize("index", [0, 63, 64 + 12, 64 + 12 + 63])
def test_a_write_beside_the_array_is_found(rng, index):
    guarded = oracle.Guarded(rng, np.zeros((3, 4), np.float16))
    guarded.check()
    guarded.array[...] = 1
    guarded.check()
    guarded._buffer[...] = oracle.flip_bit(guarded._buffer, index).view(np.float16)
    with pytest.raises(AssertionError, match="guard"):
        guarded.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_random_bits_cover_the_awkward_values(rng, dtype):
    array = oracle.random_bits(rng, (200_000,), dtype)
    assert array.dtype == dtype
    assert len(np.unique(oracle.bits(array).view(np.uint8))) == 256
    if array.dtype.itemsize == 2:
        assert oracle.isnan(array).any()
        assert {0x8000, 0x0001, 0x7FFF} <= set(oracle.bits(array).tolist())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (None, []),
        ("writes first", ["n (wrong) , and something changed"]),
        ("takes it", ["n (wrong) was taken, and something changed"]),
        ("foreign", ["n (wrong) raised ValueError: no"]),
        ("writes nothing", ["the right call changed nothing"]),
    ],
)
def test_what_a_wrong_argument_does_is_found(fault, says):
    def scene():
        memory = np.zeros(2)

        def call(n):
            if n == 1:
                memory[0] = fault != "writes nothing"
                return
            if fault in ("writes first", "takes it"):
                memory[1] = 1
            if fault != "takes it":
                raise ValueError("no") if fault == "foreign" else tikv.ShapeError("no")

        return Scene(call, {"n": 1}, [memory], {"n": {"wrong": 2}})

    assert problems_of(scene) == says
