"""`commit` after `extend(parents=)`: a path from the root, once; of other tokens any, in ascending order."""

import numpy as np
import oracle
import pytest
from host_stores import host_store
from inside import layers_of

import tikv
from tikv import arrays

LAYERS, HEADS, Q_HEADS, WIDTH = 2, 2, 4, 16
SIZES = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH}
TREES = [[-1, 0, 0, 2, 1, 3], [-1, -1, 1, 1, 2, 0]]  # of two sequences
NO_PATH = r"does not continue the path: in the tree of extend\(\), the parent of token"
STORES = {
    "float32": {"dtype": "float32"},
    "int8, window": {"dtype": "int8", "window": 30},
    "summaries": {"dtype": "float32", "page_summaries": 4},
    "on the host": {"dtype": "float32", "resident_layers": 1},
}
POOLS = {
    "float32": {"dtype": "float32"},
    "int8, HND": {"dtype": "int8", "layout": "HND"},
    "per head": {"dtype": "float32", "per_head": True},
}


class Cache:
    """A store or a pool of two sequences, called alike."""

    def __init__(self, rng, arch, pooled, name, tree=TREES):
        self.rng, self.arch, self.pooled, self.tree, self.seqs = rng, arch, pooled, tree, []
        if pooled:
            self.of = tikv.PagedKVCacheStore(**SIZES, num_blocks=24, block_size=8, **POOLS[name])
            self.seqs = [self.of.add(), self.of.add()]
        else:
            make = (lambda **form: host_store(arch, **form)) if name == "on the host" else tikv.KVCacheStore
            self.of = make(**SIZES, capacity=40, batch_size=2, **STORES[name])
        self.append(5)

    def rows(self, tokens, heads):
        lead = (2 * tokens,) if self.pooled else (2, tokens)
        host = self.rng.standard_normal((*lead, heads, WIDTH)).astype(np.float32)
        return oracle.place(host, self.arch)

    def bounds(self, tokens):
        return (self.seqs, [0, tokens, 2 * tokens]) if self.pooled else ()

    def append(self, tokens):
        for layer in range(LAYERS):
            self.of.append(layer, *(self.rows(tokens, HEADS) for _ in "kv"), *self.bounds(tokens))

    def draft(self, tree=None, layers=range(LAYERS)):
        tree = self.tree if tree is None else tree
        parents = oracle.place(np.array(tree, np.int32), self.arch)
        for layer in layers:
            rows = [self.rows(len(tree[0]), heads) for heads in (Q_HEADS, HEADS, HEADS)]
            self.of.extend(layer, *rows, *self.bounds(len(tree[0])), parents=parents)
            parents[:] = -1  # the caller uses it again
            parents = oracle.place(np.array(tree, np.int32), self.arch)
        return self

    def commit(self, paths, drafted=None):
        self.of.commit(*(self.seqs,) * self.pooled, paths, drafted)

    def trim(self, n):
        if not self.pooled:
            self.of.trim(n)
            return
        for seq in self.seqs:
            self.of.truncate(seq, self.of.length(seq) - n)

    @property
    def length(self):
        return self.of.length(0) if self.pooled else self.of.length

    def bits(self):
        """All bits of the memory, and all that is counted."""
        if self.pooled:
            layers = self.of._pages.pools.layers
            states = [(s.blocks, s.lengths, s.newest, s.draft) for s in self.of._pages.sequences.states.values()]
        else:
            layers = [layer.arrays for layer in layers_of(self.of)]
            states = [(layer.length, layer.newest) for layer in layers_of(self.of)], self.of._draft
        return [arrays.read_host(a, self.of.runtime).tobytes() for layer in layers for a in layer], repr(states)

    def refuses(self, paths, words, drafted=None):
        before = self.bits()
        with pytest.raises(tikv.PositionError, match=words):
            self.commit(paths, drafted)
        assert self.bits() == before, paths


def of_each(test):
    forms = [(False, name) for name in STORES] + [(True, name) for name in POOLS]
    ids = [f"{'pool' if pooled else 'store'}-{name}" for pooled, name in forms]
    return pytest.mark.archs("cpu", "cuda")(pytest.mark.parametrize(("pooled", "name"), forms, ids=ids)(test))


@of_each
def test_only_a_path_from_the_root_is_kept_and_only_once(arch, rng, pooled, name):
    cache = Cache(rng, arch, pooled, name).draft()
    right = [0, 2, 3, 5], [1, 2, 4]
    for wrong in (
        ([1, 2], [1, 2]),  # siblings, without their parent
        ([2, 3], [1, 2]),  # without the root
        ([0, 3], [1, 2]),  # a level is left out
        ([0, 1, 2], [1, 2, 4]),  # a sibling after a sibling
        ([0, 2, 3], [0, 1, 2]),  # the second sequence: two roots
        ([1, 2, 4], [0, 2, 3]),  # those of the other sequence
    ):
        cache.refuses([list(path) for path in wrong], NO_PATH)
        cache.refuses([list(path) for path in wrong], NO_PATH, drafted=6)
    n = 4 if pooled else 3
    cache.commit([right[0][:n], right[1]])
    assert cache.length == 5 + n
    for drafted in (None, 1, 3):
        cache.refuses([[0], [0]], "since the last commit", drafted)
    cache.append(1)
    cache.refuses([[0, 1], [0, 1]], "only 1 of the 2 drafted tokens", drafted=2)
    cache.commit([[0], [0]])
    cache.draft()
    cache.commit([[], []])
    cache.draft().refuses([[1], [1]], NO_PATH)
    cache.commit([[0, 1, 4], [0, 5]] if pooled else [[0, 1], [0, 5]])


@of_each
def test_other_tokens_are_kept_in_any_ascending_order(arch, rng, pooled, name):
    cache = Cache(rng, arch, pooled, name)
    cache.append(4)
    cache.commit([[1, 3], [0, 2]])
    cache.draft()
    cache.trim(6)
    cache.append(4)  # they are where a tree was
    cache.commit([[1, 3], [0, 2]])
    cache.append(2)
    cache.append(1)
    cache.commit([[0, 2], [1, 2]], drafted=3)
    assert cache.length == 11


@of_each
def test_a_draft_of_more_or_less_than_the_tree(arch, rng, pooled, name):
    chain = [[-1, 0, 1, 1], [-1, 0, 1, 1]]
    cache = Cache(rng, arch, pooled, name, chain)
    cache.append(2)
    cache.draft()
    cache.refuses([[1, 2], [1, 2]], "see all 2 drafted tokens before it, and 1 of these", drafted=6)
    cache.refuses([[0, 1, 2, 4], [0, 1, 2, 3]], NO_PATH, drafted=6)
    cache.refuses([[1], [0]], NO_PATH, drafted=2 + 1)  # of the tree, token 0 stays: 2 is no child of it
    cache.commit([[0], [0]], drafted=3)
    cache.draft()
    cache.append(1)
    cache.refuses([[2, 4], [2, 4]], NO_PATH, drafted=5)  # appended since, and the tree is known still
    cache.commit([[0, 1, 4], [0, 1, 4]], drafted=5)
    cache.draft()
    cache.trim(1)
    cache.refuses([[0, 2], [0, 2]], NO_PATH, drafted=3)
    cache.append(1)  # where the last token of the tree was
    cache.commit([[0, 1, 3], [0, 1, 3]], drafted=4)


@pytest.mark.archs("cpu", "cuda")
def test_a_tree_follows_its_sequences(arch, rng):
    cache = Cache(rng, arch, False, "float32").draft()
    snapshot = cache.of.snapshot()
    cache.of.reorder([1, 0])
    cache.refuses([[0, 2], [1, 2]], NO_PATH)
    cache.commit([[1, 2], [0, 2]])
    cache.of.restore(snapshot)
    cache.refuses([[1, 2], [0, 2]], NO_PATH, drafted=6)
    cache.commit([[0, 2], [1, 2]], drafted=6)
    cache.of.restore(snapshot)
    cache.of.select([1])
    cache.of.repeat(2)
    cache.refuses([[1, 2], [0, 2]], NO_PATH, drafted=6)
    cache.commit([[1, 2], [0, 5]], drafted=6)
    cache.of.reset()
    cache.append(6)
    cache.commit([[1, 2], [0, 2]])


@pytest.mark.archs("cpu", "cuda")
def test_a_tree_follows_a_fork(arch, rng):
    cache = Cache(rng, arch, True, "float32").draft()
    fork = cache.of.fork(0)
    cache.commit([[0, 2], [1, 2]])
    with pytest.raises(tikv.PositionError, match=NO_PATH):
        cache.of.commit([fork], [1, 2])
    cache.of.commit([fork], [0, 1, 4])
    assert [cache.of.length(seq) for seq in (0, 1, fork)] == [7, 7, 8]


@of_each
def test_a_call_that_fails_leaves_the_tree_before(arch, rng, pooled, name, monkeypatch):
    cache = Cache(rng, arch, pooled, name).draft()
    before = cache.bits()
    rows = [cache.rows(2, heads) for heads in (Q_HEADS, HEADS, HEADS)]
    with pytest.raises(tikv.PositionError, match="not a token before token 0"):  # the host knows these parents
        cache.of.extend(0, *rows, *cache.bounds(2), parents=[[0, 0], [-1, 0]])
    assert cache.bits() == before
    cache.refuses([[1], [1, 2]] if pooled else [[1, 2], [1, 2]], NO_PATH)


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("pooled", [False, True])
def test_layers_that_are_brought_back_forget_the_tree(arch, rng, pooled):
    cache = Cache(rng, arch, pooled, "float32")
    cache.draft(layers=[0])
    cache.of.align()
    cache.append(6)
    cache.commit([[1, 2], [0, 2]])


@pytest.mark.archs("cpu")
def test_a_sharded_store_by_heads_checks_its_paths(arch, rng, tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from tikv.distributed import ShardedKVCacheStore

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        for shard in ("heads", "tokens"):
            store = ShardedKVCacheStore(None, shard=shard, **SIZES, capacity=40, dtype="float32")
            rows = [rng.standard_normal((6, heads, WIDTH)).astype(np.float32) for heads in (Q_HEADS, HEADS, HEADS)]
            for layer in range(LAYERS):
                store.append(layer, *rows[1:])
            store.append(0, *rows[1:])
            for call, arguments in ((store.append, (0, *rows[1:])), (store.extend, (0, *rows)), (store.trim, (1,))):
                with pytest.raises(tikv.PositionError, match=r"align\(\)"):
                    call(*arguments)
                assert [store.layer_length(i) for i in range(LAYERS)] == [12, 6]
            assert (store.align(), store.length, store.layer_length(0)) == (6, 6, 6)
            if shard == "heads":
                for layer in range(LAYERS):
                    store.extend(layer, *rows, parents=np.array(TREES[:1]))
                with pytest.raises(tikv.PositionError, match=NO_PATH):
                    store.commit([1, 2])
                store.commit([0, 2])
                assert store.length == 8
    finally:
        dist.destroy_process_group()
