"""`commit` of paged stores: memory and tables are those of sequences that had only the accepted path appended."""

import numpy as np
import oracle
import pytest
from launch_counter import count_launches

import tikv
from tikv.ops import compact
from tikv.stores import limits

pytestmark = pytest.mark.thorough

LAYERS, HEADS, WIDTH, PAGE = 2, 2, 32, 4
FORM = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 24, "block_size": PAGE}
SWAPPED = 3  # the sequence of refused calls that lies in host memory


def rows(arch, rng, n, width=WIDTH):
    """New keys and values (n, H, D) of each layer, and a function that puts some of them where kernels read."""
    host = rng.standard_normal((LAYERS, 2, n, HEADS, width)).astype(np.float32)
    return host, lambda keep: [[oracle.place(np.ascontiguousarray(a[keep]), arch) for a in kv] for kv in host]


def append(pool, placed, seqs, counts):
    for layer, kv in enumerate(placed):
        pool.append(layer, *kv, seqs, cu_seqlens=[0, *np.cumsum(counts).tolist()])


def contents(pool, *seqs):
    """What sequences hold, bit for bit, and what is known of them."""
    found = []
    for seq in seqs:
        for layer in range(LAYERS):
            found += [oracle.to_numpy(a).tobytes() for a in pool.tokens(layer, seq)]
            found.append((pool.layer_length(layer, seq), pool.positions(layer, seq).tolist()))
    return found


def everything(pool):
    """All bits of a pool's memory and all that it counts."""
    arrays = [a for layer in pool._pages.pools.layers for a in layer]
    bits = [oracle.to_numpy(tikv.CacheArray(a, pool.runtime)).tobytes() for a in arrays]
    there = [seq for seq in pool.sequences if seq != SWAPPED]
    tables = [pool.block_table(seq).tolist() for seq in there]
    return bits, tables, pool.num_free_blocks, pool.num_shared_blocks, contents(pool, *there)


@pytest.mark.full(each_value=True)
@pytest.mark.parametrize(
    ("dtype", "layout", "per_head"),
    [("float32", "NHD", False), ("int8", "HND", False), (tikv.Quant(4, 32), "NHD", False), ("float32", "HND", True)],
)
def test_a_path_is_kept_as_if_only_it_had_been_appended(arch, rng, dtype, layout, per_head, monkeypatch):
    if dtype == "int8":
        monkeypatch.setitem(limits.SHARED_BYTES, arch, 1)  # a piece of memory for each layer
    pool, plain = (tikv.PagedKVCacheStore(**FORM, dtype=dtype, layout=layout, per_head=per_head) for _ in range(2))
    for store in (pool, plain):
        assert [store.add(), store.add()] == [0, 1]
    counts, paths = [6, 3], [[0, 2, 5], [0, 1]]
    for start in ([3, 9], [1, 0]):
        _, text = rows(arch, rng, sum(start))
        for store in (pool, plain):
            append(store, text(slice(None)), [0, 1], start)
        _, draft = rows(arch, rng, 9)
        append(pool, draft(slice(None)), [0, 1], counts)
        append(plain, draft([0, 2, 5, 6, 7]), [0, 1], [3, 2])
        pool.commit([0, 1], paths)
        assert contents(pool, 0, 1) == contents(plain, 0, 1)
        assert pool.num_free_blocks == plain.num_free_blocks
    _, more = rows(arch, rng, 4)
    append(pool, more(slice(None)), [0, 1], [2, 2])
    pool.commit([0], np.array([[1]]))
    pool.commit([1], [], drafted=2)
    assert [pool.length(seq) for seq in (0, 1)] == [11, 13]


@pytest.mark.parametrize(("layout", "launches"), [("NHD", 1), ("HND", 2)])
def test_rows_of_all_layers_move_in_one_launch(arch, rng, monkeypatch, layout, launches):
    """K, V and scales together, but for scales that lie in another order; a GPU's threads may share rows."""
    if layout == "NHD":
        monkeypatch.setattr(compact, "shares_rows", lambda live: arch != "cpu")
    pool, plain = (tikv.PagedKVCacheStore(**FORM | {"num_blocks": 64}, dtype="int8", layout=layout) for _ in "ab")
    for store in (pool, plain):
        store.add()
    _, text = rows(arch, rng, 130)
    path = [0, *range(2, 130, 2)]
    append(pool, text(slice(None)), [0], [130])
    append(plain, text(path), [0], [len(path)])
    counted = count_launches(monkeypatch)
    pool.commit([0], path)
    assert len(counted) == launches
    assert contents(pool, 0) == contents(plain, 0)


@pytest.mark.archs("cpu", "cuda")
def test_a_tree_extends_sequences_and_their_paths_are_committed(arch, rng):
    pool, plain = (tikv.PagedKVCacheStore(**FORM | {"head_dim": 16}, dtype="float32") for _ in range(2))
    seqs = sorted({store.add() for store in (pool, plain) for _ in range(2)})
    parents, path = [-1, 0, 0, 2, 1, 3], [0, 2, 3, 5]
    both = [*path, *(6 + t for t in path)]
    q = oracle.place(rng.standard_normal((12, 4, 16)).astype(np.float32), arch)
    tree = oracle.place(np.array([parents] * 2, np.int32), arch)
    _, text = rows(arch, rng, 12, width=16)
    _, draft = rows(arch, rng, 12, width=16)
    for store in (pool, plain):
        append(store, text(slice(None)), seqs, [5, 7])
    for layer, kv in enumerate(draft(slice(None))):
        pool.extend(layer, q, *kv, seqs, cu_seqlens=[0, 6, 12], parents=tree)
    append(plain, draft(both), seqs, [4, 4])
    pool.commit(seqs, np.array([path] * 2))
    assert contents(pool, *seqs) == contents(plain, *seqs)


def test_shared_blocks_are_copied_and_prefixes_stay_known(arch, rng):
    pool, plain = (tikv.PagedKVCacheStore(**FORM, dtype="float32") for _ in range(2))
    prompt = list(range(9))
    a = {store.add(prompt) for store in (pool, plain)}.pop()
    _, text = rows(arch, rng, 9)
    for store in (pool, plain):
        append(store, text(slice(None)), [a], [9])
    b = pool.fork(a)
    _, draft = rows(arch, rng, 6)
    append(pool, draft(slice(None)), [a], [6])
    c, d = pool.fork(a), pool.fork(a)
    append(plain, draft([1, 4]), [a], [2])
    before, free = contents(pool, b, d), pool.num_free_blocks
    pool.commit([a, c], [[1, 4], [0, 1, 3, 5]])
    assert contents(pool, a) == contents(plain, a)
    assert contents(pool, b, d) == before
    assert free - pool.num_free_blocks == 3, "the block of 9 to 11 for each, and that of 12 to 15 for the longer path"
    assert np.array_equal(pool.block_table(a)[:2], pool.block_table(d)[:2])
    found = pool.add(prompt)
    assert pool.length(found) == 8
    assert [oracle.to_numpy(x)[:8].tobytes() for x in pool.tokens(1, a)] == [
        oracle.to_numpy(x).tobytes() for x in pool.tokens(1, found)
    ]


def test_layers_that_were_compacted_keep_a_path_of_what_came_since(arch, rng):
    pool = tikv.PagedKVCacheStore(**FORM, dtype="float32")
    seq = pool.add()
    _, text = rows(arch, rng, 11)
    append(pool, text(slice(None)), [seq], [11])
    pool.compact(0, seq, [0, 4, 10])
    host, draft = rows(arch, rng, 5)
    append(pool, draft(slice(None)), [seq], [5])
    held = [oracle.to_numpy(pool.tokens(layer, seq)[0]) for layer in range(LAYERS)]
    with pytest.raises(tikv.PositionError, match=r"drafted=6 .* 16 tokens in layer 0, 5 of them since"):
        pool.commit([seq], [0], drafted=6)
    pool.commit([seq], [0, 3])
    assert pool.positions(0, seq)[0].tolist() == [0, 4, 10, 11, 12]
    for layer, before in enumerate(held):
        got = oracle.to_numpy(pool.tokens(layer, seq)[0])
        np.testing.assert_array_equal(got, np.concatenate([before[:-5], host[layer, 0][[0, 3]]]))


def test_heads_that_hold_different_tokens_keep_a_path_of_what_came_since(arch, rng):
    pool = tikv.PagedKVCacheStore(**FORM, dtype="float32", layout="HND", per_head=True)
    seq = pool.add()
    append(pool, rows(arch, rng, 7)[1](slice(None)), [seq], [7])
    pool.compact(0, seq, np.array([[0, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1, 1]], bool))
    host, draft = rows(arch, rng, 5)
    append(pool, draft(slice(None)), [seq], [5])
    with pytest.raises(tikv.PositionError, match=r"drafted=6 .* 12 tokens in layer 0, 5 of them since"):
        pool.commit([seq], [0], drafted=6)
    pool.commit([seq], [1, 2, 4])
    assert pool.positions(0, seq).tolist() == [[1, 7, 8, 9, -1, -1, -1, -1, -1], [0, 1, 2, 4, 5, 6, 7, 8, 9]]
    got, path = oracle.to_numpy(pool.tokens(0, seq)[0]), [1, 2, 4]
    np.testing.assert_array_equal(got[1:4, 0], host[0, 0][path, 0])
    np.testing.assert_array_equal(got[6:, 1], host[0, 0][path, 1])
    np.testing.assert_array_equal(oracle.to_numpy(pool.tokens(1, seq)[1])[7:], host[1, 1][path])


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("seqs", "path", "drafted", "error", "says"),
    [
        ([0], [0, 2, 1], None, tikv.PositionError, r"path\[0, 2\]=1 does not ascend within the 5 drafted"),
        ([0, 1], [[0], [0, 5]], None, tikv.PositionError, r"path\[1, 1\]=5"),
        ([0, 1], [[0]], None, tikv.ShapeError, "1 entries for 2 sequences"),
        ([0], [[0.5]], None, tikv.ShapeError, r"path\[0\] is \[0\.5\]"),
        ([0], 3.5, None, tikv.ShapeError, r"path\[0\] is \[3\.5\]"),
        ([0], [0], 13, tikv.PositionError, "drafted=13 is too many, since sequence 0 has 8 tokens"),
        ([0, 0], [[0], [0]], None, tikv.PositionError, "named twice"),
        ([9], [0], None, tikv.PositionError, "was never added"),
        (
            [2],
            [0],
            None,
            tikv.PositionError,
            r"layer 1 of sequence 2 has 3 tokens \(3 from its last append\), "
            r"and layer 0 has 4 \(1 from its last append\)",
        ),
        ([3], [0], None, tikv.PositionError, "sequence 3 is swapped out"),
        ([4], [1, 2], None, tikv.CapacityError, "1 blocks are needed and 0 of 8 are free"),
        ([5], [0], None, tikv.PositionError, "Pass the number of drafted tokens as drafted="),
    ],
)
def test_paths_that_are_none_are_refused(seqs, path, drafted, error, says, arch, rng):
    pool = tikv.PagedKVCacheStore(**FORM | {"num_blocks": 8}, dtype="float32")
    for n in (2, 2, 3, 3):
        append(pool, rows(arch, rng, n)[1](slice(None)), [pool.add()], [n])
    _, draft = rows(arch, rng, 11)
    append(pool, draft(slice(None)), [0, 1], [6, 5])
    pool.truncate(0, 3)
    append(pool, rows(arch, rng, 5)[1](slice(None)), [0], [5])
    pool.append(0, *rows(arch, rng, 1)[1](slice(None))[0], [2])
    pool.swap_out(SWAPPED)
    append(pool, rows(arch, rng, 3)[1](slice(None)), [pool.add()], [3])
    pool.fork(4)
    pool.truncate(5, 3)
    append(pool, rows(arch, rng, 4)[1](slice(None)), [pool.add()], [4])
    append(pool, rows(arch, rng, 4)[1](slice(None)), [pool.add()], [4])
    before = everything(pool)
    with pytest.raises(error, match=says):
        pool.commit(seqs, path, drafted)
    assert everything(pool) == before
