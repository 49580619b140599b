"""The slots of new tokens from page tables one after the other, and FlashInfer's append by them."""

import numpy as np
import oracle
import pytest

import tikv
from tikv.compat import flashinfer
from tikv.ops.page_slots import page_slots

# Two requests of pages 4, 7, 1 and of 0, and one without pages; page 1 is missing.
PAGES, STARTS = [4, 7, -1, 0], [0, 3, 4, 4]
TOKENS = [(0, 0), (0, 3), (0, 4), (0, 8), (0, 12), (1, 2), (1, 4), (2, 0), (3, 0), (-1, 0), (0, -1), (1, 0)]
SLOTS = [16, 19, 28, -1, -1, 2, -1, -1, -1, -1, -1, 0]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_of_tokens(arch, dtype):
    arrays = [np.array(a, dtype) for a in (*zip(*TOKENS, strict=True), PAGES, STARTS)]
    got = page_slots("test", *(oracle.place(a, arch) for a in arrays), 4)
    assert oracle.to_numpy(got).tolist() == SLOTS


@pytest.mark.archs("cpu", "cuda")
def test_append_where_the_host_knows_no_index(arch, rng, monkeypatch):
    """Tokens without a page are skipped, and nothing else changes."""
    monkeypatch.setattr(flashinfer, "on_host", lambda array: False)
    cache = oracle.random_bits(rng, (8, 2, 4, 2, 8), np.float32)
    rows = [oracle.random_bits(rng, (len(TOKENS), 2, 8), np.float32) for _ in "kv"]
    want = cache.copy()
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            want[slot // 4, :, slot % 4] = rows[0][t], rows[1][t]
    pools = [oracle.place(np.ascontiguousarray(cache[:, i]), arch) for i in range(2)]
    index = [oracle.place(np.array(a, np.int32), arch) for a in (*zip(*TOKENS, strict=True), PAGES, STARTS)]
    flashinfer.append_paged_kv_cache(*(oracle.place(a, arch) for a in rows), *index[:2], tuple(pools), *index[2:], None)
    for i in range(2):
        assert oracle.to_numpy(pools[i]).tobytes() == np.ascontiguousarray(want[:, i]).tobytes()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({0: np.zeros(3, np.int32)}, tikv.ShapeError, "the length of positions"),
        ({2: np.zeros((2, 2), np.int32)}, tikv.ShapeError, "kv_indices"),
        ({3: np.zeros(2, np.float32)}, tikv.DTypeError, "kv_indptr"),
    ],
)
def test_index_arrays_that_are_none_are_refused(change, error, says, arch):
    arrays = [np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(1, np.int32), np.array([0, 1], np.int32)]
    arrays = [change.get(i, a) for i, a in enumerate(arrays)]
    with pytest.raises(error, match=says):
        page_slots("test", *arrays, 4)
