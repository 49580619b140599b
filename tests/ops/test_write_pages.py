"""New rows into pages by page tables one after the other, and FlashInfer's append by them."""

import numpy as np
import oracle
import pytest
from launch_counter import count_launches

import tikv
from tikv.compat import flashinfer
from tikv.ops.write_pages import write_pages

# Two requests of pages 4, 7, -1 and of 0, and one without pages; the pool has no page 9.
PAGES, STARTS = [4, 7, -1, 0, 9], [0, 3, 5, 5]
TOKENS = [
    (0, 0), (0, 3), (0, 4), (0, 8), (0, 12), (1, 2), (1, 4), (1, 8), (2, 0), (3, 0), (-1, 0), (0, -1), (1, 0)
]  # fmt: skip
SLOTS = [16, 19, 28, -1, -1, 2, -1, -1, -1, -1, -1, -1, 0]


def rows_and_pools(rng, dtype=np.float32):
    return (
        [oracle.random_bits(rng, (len(TOKENS), 2, 8), np.float32) for _ in "kv"],
        [oracle.random_bits(rng, (8, 4, 2, 8), dtype) for _ in "kv"],
    )


def index_arrays(arch, dtype):
    return [oracle.place(np.array(a, dtype), arch) for a in (*zip(*TOKENS, strict=True), PAGES, STARTS)]


def expected(rows, pools):
    want = [pool.copy() for pool in pools]
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            for plane in range(2):
                want[plane][slot // 4, slot % 4] = rows[plane][t]
    return want


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tokens_without_a_page_are_skipped(arch, rng, dtype):
    rows, pools = rows_and_pools(rng)
    given = [oracle.place(pool.copy(), arch) for pool in pools]
    write_pages("test", *(oracle.place(a, arch) for a in rows), *given, *index_arrays(arch, dtype), "NHD")
    for pool, want in zip(given, expected(rows, pools), strict=True):
        oracle.assert_same_bits(pool, want)


@pytest.mark.archs("cpu", "cuda")
def test_append_where_the_host_knows_no_index_is_one_launch(arch, rng, monkeypatch):
    monkeypatch.setattr(flashinfer.page, "on_host", lambda array: False)
    rows, pools = rows_and_pools(rng)
    given = [oracle.place(pool.copy(), arch) for pool in pools]
    index, new = index_arrays(arch, np.int32), [oracle.place(a, arch) for a in rows]
    counted = count_launches(monkeypatch)
    flashinfer.append_paged_kv_cache(*new, *index[:2], tuple(given), *index[2:], None)
    assert len(counted) == 1
    for pool, want in zip(given, expected(rows, pools), strict=True):
        oracle.assert_same_bits(pool, want)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({5: np.zeros(3, np.int32)}, tikv.ShapeError, "the length of positions"),
        ({6: np.zeros((2, 2), np.int32)}, tikv.ShapeError, "kv_indices"),
        ({7: np.zeros(2, np.float32)}, tikv.DTypeError, "kv_indptr"),
        ({3: np.zeros((8, 4, 2, 9), np.float32)}, tikv.ShapeError, "the head width of v_pool"),
        ({2: np.zeros((8, 4, 2, 8), np.int8), 3: np.zeros((8, 4, 2, 8), np.int8)}, tikv.DTypeError, "int8"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, error, says, arch, rng):
    rows, pools = rows_and_pools(rng)
    arrays = [*rows, *pools, *index_arrays("cpu", np.int32)]
    arrays = [change.get(i, a) for i, a in enumerate(arrays)]
    before = [a.copy() for a in arrays[2:4]]
    with pytest.raises(error, match=says):
        write_pages("test", *arrays, "NHD")
    for pool, kept in zip(arrays[2:4], before, strict=True):
        oracle.assert_same_bits(pool, kept)
