"""The oracle itself, against cases small enough to be written down."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import oracle
import pytest

from tikv import reference

BF16 = ml_dtypes.bfloat16


def test_copy_places_every_element_where_the_formula_says(rng):
    src = oracle.random_bits(rng, (5, 3, 4), np.float32)
    cache = oracle.random_bits(rng, (3, 9, 4), np.float32)
    after = reference.copy(src, cache, position=4, num_tokens=3, src_offset=1)
    for h, s, d in np.ndindex(cache.shape):
        want = src[1 + s - 4, h, d] if 4 <= s < 7 else cache[h, s, d]
        assert oracle.bits(after[h, s, d]) == oracle.bits(want)


@pytest.mark.parametrize("position", [0, 3, 6, 7, 8, 1 << 31, (1 << 40) + 5])
@pytest.mark.parametrize("num_tokens", [1, 6, 7, 8, 17])
def test_a_ring_keeps_the_newest_tokens(rng, position, num_tokens):
    src = oracle.random_bits(rng, (num_tokens, 2, 3), np.float16)
    after = reference.copy(src, oracle.random_bits(rng, (2, 9, 3), np.float16), position=position, window=7)
    for age in range(min(num_tokens, 7)):
        token = position + num_tokens - 1 - age
        oracle.assert_same_bits(after[:, token % 7], src[num_tokens - 1 - age])


def test_sinks_stay(rng):
    before = oracle.random_bits(rng, (1, 6, 2), np.float32)
    src = oracle.random_bits(rng, (20, 1, 2), np.float32)
    after = reference.copy(src, before, position=0, window=5, sinks=2)
    want = np.stack([src[0, 0], src[1, 0], src[17, 0], src[18, 0], src[19, 0], before[0, 5]])
    oracle.assert_same_bits(after[0], want)


def test_layouts_are_transposes(rng):
    src = oracle.random_bits(rng, (4, 3, 2), BF16)
    cache = oracle.random_bits(rng, (3, 8, 2), BF16)
    want = reference.copy(src, cache, position=2)
    swapped = reference.copy(
        src.swapaxes(0, 1), cache.swapaxes(0, 1), position=2, src_layout="head_major", cache_layout="token_major"
    )
    oracle.assert_same_bits(swapped.swapaxes(0, 1), want)


@pytest.mark.parametrize(
    ("value", "f16", "bf16"),
    [
        (0x3F800000, 0x3C00, 0x3F80),  # 1
        (0x80000000, 0x8000, 0x8000),  # -0
        (0x477FE000, 0x7BFF, 0x4780),  # 65504, the largest float16; a tie upwards in bfloat16
        (0x477FEFFF, 0x7BFF, 0x4780),  # just under the tie
        (0x477FF000, 0x7C00, 0x4780),  # 65520, the tie: infinity
        (0x33800000, 0x0001, 0x3380),  # 2**-24, the smallest float16
        (0x33000000, 0x0000, 0x3300),  # 2**-25: a tie to zero
        (0x33000001, 0x0001, 0x3300),  # above it
        (0x3F808000, 0x3C04, 0x3F80),  # a tie to even in bfloat16, downwards
        (0x3F818000, 0x3C0C, 0x3F82),  # and upwards
        (0x3F801000, 0x3C00, 0x3F80),  # a tie to even in float16, downwards
        (0x3F803000, 0x3C02, 0x3F80),  # and upwards
        (0x00000001, 0x0000, 0x0000),  # the smallest subnormal
        (0x7F7FFFFF, 0x7C00, 0x7F80),  # the largest float32: infinity
        (0xFF800000, 0xFC00, 0xFF80),  # -infinity
    ],
)
def test_rounding_is_to_nearest_even(value, f16, bf16):
    row = np.array([value], np.uint32).view(np.float32)
    assert reference.encode(row, np.float16).view(np.uint16)[0] == f16
    assert reference.encode(row, BF16).view(np.uint16)[0] == bf16


def test_widening_is_exact_and_nan_stays_nan():
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = reference.encode(every.view(BF16), np.float32)
    number = ~np.isnan(wide)
    assert np.array_equal(wide.view(np.uint32)[number], every[number].astype(np.uint32) << 16)
    for dtype in (np.float16, BF16):
        assert np.isnan(reference.encode(wide[~number], dtype)).all()


def test_pool_layouts_agree(rng):
    rows = oracle.random_bits(rng, (5, 3, 16), np.float16)
    base = oracle.random_bits(rng, (4, 2, 3, 16), np.float16)
    pools = {
        ("HND", "k"): np.array(base.swapaxes(1, 2)),
        ("VLLM", "k"): np.array(base.reshape(4, 2, 3, 2, 8).transpose(0, 2, 3, 1, 4)),
        ("VLLM", "v"): np.array(base.transpose(0, 2, 3, 1)),
    }
    mapping, table = [7, -1, 0, 3, 4], [2, 0, 3]
    want = reference.write_slots(rows, base, mapping)
    for n, s in np.ndindex(4, 2):
        slot = 2 * n + s
        oracle.assert_same_bits(want[n, s], rows[mapping.index(slot)] if slot in mapping else base[n, s])
    read = reference.gather_paged(want, table, 5)
    oracle.assert_same_bits(read, np.stack([want[2, 0], want[2, 1], want[0, 0], want[0, 1], want[3, 0]]))
    for (layout, _), pool in pools.items():
        after = reference.write_slots(rows, pool, mapping, layout=layout)
        assert after.shape == pool.shape
        oracle.assert_same_bits(reference.pool_rows(after, layout), reference.pool_rows(want))
        oracle.assert_same_bits(reference.gather_paged(after, table, 5, layout=layout), read)


def test_ragged_rows_outside_are_left_out(rng):
    new = oracle.random_bits(rng, (4, 2, 5, 3), np.float32)
    cache = oracle.random_bits(rng, (4, 2, 8, 3), np.float32)
    offsets = [-2, 3, 5, 8]
    after = reference.append_ragged(new, cache, np.array(offsets))
    for b, s in np.ndindex(4, 8):
        row = s - offsets[b]
        oracle.assert_same_bits(after[b, :, s], new[b, :, row] if 0 <= row < 5 else cache[b, :, s])


def test_linearize_undoes_the_ring(rng):
    for length in (0, 1, 5, 6, 7, 13):
        src = oracle.random_bits(rng, (length, 2, 3), np.float32)
        cache = reference.copy(src, oracle.random_bits(rng, (2, 6, 3), np.float32), position=0, window=6)
        oracle.assert_same_bits(reference.linearize(cache, length=length), src[max(0, length - 6) :].swapaxes(0, 1))


def test_history_agrees_with_the_ring(rng):
    window, sinks = 7, 2
    history = reference.History(window, window, sinks)
    cache = np.zeros((1, window, 1), np.float64)
    for count in (1, 3, 9, 2, 20):
        tokens = oracle.numbers(rng, (count, 1, 1), np.float64)
        cache = reference.copy(tokens, cache, position=history.length, window=window, sinks=sinks)
        history.append(list(tokens.ravel()))
        assert sorted(history.kept()) == sorted(cache.ravel()[: min(history.length, window)])


def test_the_oracle_does_not_load_taichi():
    script = "import sys, tikv.reference; sys.exit('taichi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("width", [1, 2, 3, 8, 9, 31, 64, 80, 128, 129, 256, 1000])
def test_squares_are_all_added_once(rng, width):
    rows = rng.integers(-50, 50, (7, width)).astype(np.float32)  # integers, which any order adds up without rounding
    np.testing.assert_array_equal(reference.sum_of_squares(rows), np.square(rows).sum(axis=-1))
