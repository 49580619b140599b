"""A step that ends between two layers: nothing goes on from there before `align`, and after it the bits are as without.

Each store is beside a twin whose steps all end behind the last layer.
"""

import re

import numpy as np
import oracle
import pytest
from host_stores import host_store
from inside import storage_of

import tikv
from tikv import arrays

LAYERS, HEADS, Q_HEADS, WIDTH, CAPACITY, BLOCKS, SIZE = 3, 2, 4, 32, 128, 8, 32
SIZES = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH}
GROUPS = tikv.Quant(4, 32, axis="tokens", residual=32)
STORES = {
    "float32": {"dtype": "float32"},
    "int8 rings": {"dtype": "int8", "window": [6, None, 6], "sinks": 1},
    "summaries": {"dtype": "float32", "page_summaries": 4},
    "groups along tokens": {"dtype": GROUPS},
    "groups along tokens with a window": {"dtype": GROUPS, "window": 40, "sinks": 1},
    "on the host": {"dtype": "float32", "window": [None, 6, 6], "resident_layers": 1},
}
POOLS = {
    "float32": {"dtype": "float32"},
    "int8, HND": {"dtype": "int8", "layout": "HND"},
    "per head": {"dtype": "float32", "per_head": True},
    "groups along tokens": {"dtype": GROUPS},
}


def store_of(arch, name):
    make = (lambda **form: host_store(arch, **form)) if name == "on the host" else tikv.KVCacheStore
    return make(**SIZES, capacity=CAPACITY, **STORES[name])


def new(rng, arch, tokens):
    """Queries, keys and values of a layer's new tokens."""
    host = (rng.standard_normal((tokens, heads, WIDTH)).astype(np.float32) for heads in (Q_HEADS, HEADS, HEADS))
    return [oracle.place(a, arch) for a in host]


def everything(store):
    """All bits of a store's memory, and all that it counts."""
    storage = storage_of(store)
    memory = [arrays.read_host(a, store.runtime).tobytes() for i in range(LAYERS) for a, _ in storage.filled(i)]
    counts = [(c.length, c.valid_from, c.newest, c.history, c.end) for c in storage.counts]
    codes = [(c.tokens, c.dropped) for c in getattr(storage, "codes", [])]
    return memory, counts, codes, repr(store), store._draft


def bits(pair):
    return [oracle.to_numpy(a).tobytes() for a in pair]


def tokens_of(store):
    return [bits(store.tokens(i)) for i in range(LAYERS)]


def refused_calls(store, rng, arch):
    """Calls that go on from where the layers are, by what they are."""
    q, k, v = new(rng, arch, 1)
    stacked = [oracle.place(np.stack([oracle.to_numpy(a)] * LAYERS), arch) for a in (k, v)]
    calls = {
        "append": lambda: store.append(0, k, v),
        "extend": lambda: store.extend(0, q, k, v),
        "append_all": lambda: store.append_all(*stacked),
        "trim": lambda: store.trim(1),
    }
    try:
        step, first = tikv.compile_step(store, attend=False), tikv.compile_step(store, layers=0)
    except tikv.OptionError:  # its slots do not follow from positions
        return calls
    at = oracle.place(np.array([store.length], np.int64), arch)
    return calls | {
        "append at a position": lambda: store.append(0, k, v, positions=at),
        "append_all at a position": lambda: store.append_all(*stacked, positions=at),
        "a step of all layers": lambda: step.run(*stacked),
        "a step of the first": lambda: first.run(k, v, q),
        "positions_on_device": store.positions_on_device,
        "advance": lambda: store.advance(1),
    }


def refused(what, call, words):
    """Fail unless a call raises a PositionError with these words."""
    said = ""
    try:
        call()
    except tikv.PositionError as error:
        said = str(error)
    assert re.search(words, said), f"{what}: {said or 'not refused'}"


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("name", STORES)
def test_a_step_that_ended_between_two_layers_is_made_again(arch, rng, name):
    store, twin = store_of(arch, name), store_of(arch, name)
    ended = {0: 2, 1: 1, 2: 2, 8: 1, 9: 2}  # steps that first end after so many layers
    for number in range(12):
        rows = [new(rng, arch, 7 if number == 0 else 1) for _ in range(LAYERS)]
        length = store.length
        for layer in range(ended.get(number, 0)):
            store.extend(layer, *rows[layer])
        if number in ended:
            assert store.length == len(store) == store.seq_lens[0] == length
            assert "layers differ: " in repr(store)
            for what, call in refused_calls(store, rng, arch).items():
                before = everything(store)
                refused(what, call, r"align\(\) to bring every layer back to .*, or reset")
                assert everything(store) == before, what
            assert store.align() == length == store.layer_length(0)
            before = everything(store)
            assert store.align() == length
            assert everything(store) == before
        for layer, of_layer in enumerate(rows):
            got, want = (oracle.to_numpy(each.extend(layer, *of_layer)) for each in (store, twin))
            assert got.tobytes() == want.tobytes()
        assert tokens_of(store) == tokens_of(twin)
        assert store.length == twin.length
        if name == "summaries":
            pages = -(-store.length // 4)
            for layer in range(LAYERS):
                got, want = (each.page_summaries(layer) for each in (store, twin))
                assert bits(oracle.to_numpy(a)[:, :, :pages] for a in got) == bits(
                    oracle.to_numpy(a)[:, :, :pages] for a in want
                )


def of_ring(store, add):
    """Three tokens of which a ring has overwritten two that would be seen again."""
    for layer in range(LAYERS):
        add(layer, 9)
    add(0, 3)


def of_codes(store, add):
    """A token by which an older group became codes."""
    for layer in range(LAYERS):
        add(layer, 64 + store.sinks)
    add(0, 1)


def of_compaction(store, add):
    """A token that was there when the layer was compacted."""
    for layer in range(LAYERS):
        add(layer, 9)
    add(0, 1)
    store.compact(0, np.array([[0, 1, 5, 8]]))


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize(
    ("name", "lead", "why"),
    [
        ("int8 rings", of_ring, "overwritten"),
        ("on the host", of_compaction, "compact"),
        ("groups along tokens", of_codes, "codes"),
        ("groups along tokens with a window", of_codes, "codes"),
        ("float32", of_compaction, "compact"),
    ],
)
def test_what_cannot_go_back_is_refused_and_nothing_changes(arch, rng, name, lead, why):
    store = store_of(arch, name)
    lead(store, lambda layer, tokens: store.append(layer, *new(rng, arch, tokens)[1:]))
    before = everything(store)
    with pytest.raises(tikv.PositionError, match=rf"align: layer 0 cannot go back from .*{why}.*reset\(\)"):
        store.align()
    assert everything(store) == before
    store.reset()
    assert store.align() == store.length == 0
    store.append(0, *new(rng, arch, 1)[1:])


@pytest.mark.archs("cpu")
def test_a_ring_that_was_trimmed_before_goes_back(arch, rng):
    """It had room for all of the tokens that are dropped again."""
    store = tikv.KVCacheStore(**SIZES, capacity=CAPACITY, dtype="float32", window=8)
    for layer in range(LAYERS):
        store.append(layer, *new(rng, arch, 20)[1:])
    store.trim(5)
    before, length = tokens_of(store), store.length
    store.append(0, *new(rng, arch, 4)[1:])
    assert store.align() == length
    assert tokens_of(store) == before


@pytest.mark.archs("cpu")
def test_layers_that_were_never_written_are_no_reason_to_refuse(arch, rng):
    store = tikv.KVCacheStore(**SIZES, capacity=CAPACITY, dtype="float32")
    for tokens in (4, 1, 2):
        store.append(0, *new(rng, arch, tokens)[1:])
    store.trim(1)
    store.extend(0, *new(rng, arch, 1))
    assert store.length == 7
    before = everything(store)
    q, k, v = new(rng, arch, 1)
    fewer = [oracle.place(np.stack([oracle.to_numpy(a)] * LAYERS), arch) for a in (k, v)]
    step = tikv.compile_step(store, layers=1)
    calls = (
        lambda: store.append(1, k, v),
        lambda: store.extend(2, q, k, v),
        lambda: store.append_all(*fewer),
        lambda: step.run(k, v, q),
    )
    for call in calls:
        with pytest.raises(tikv.PositionError, match=r"Call align\(\) to bring every layer back to 0 tokens, or reset"):
            call()
        assert everything(store) == before
    for layer, pieces in ((1, (7,)), (2, (4, 3))):  # in one piece or in several
        for tokens in pieces:
            store.append(layer, *new(rng, arch, tokens)[1:])
    store.append(0, *new(rng, arch, 1)[1:])
    assert (store.length, store.align(), store.layer_length(0)) == (7, 7, 7)


@pytest.mark.archs("cpu")
def test_the_words_say_which_layers_differ(arch, rng):
    store = tikv.KVCacheStore(**SIZES | {"num_layers": 7}, capacity=CAPACITY, dtype="float32")
    for layer in range(7):
        store.append(layer, *new(rng, arch, 5 + layer // 2)[1:])
    assert "5/128 tokens, layers differ: 5 in layers 0-1, 6 in layers 2-3, 7 in layers 4-5, 8 in layer 6," in repr(
        store
    )
    store.append(6, *new(rng, arch, 4)[1:])
    store.append(5, *new(rng, arch, 4)[1:])
    assert "5/128 tokens, layers differ: 5 to 12," in repr(store)


# --- pools


def pool_of(name):
    return tikv.PagedKVCacheStore(**SIZES, num_blocks=24, block_size=SIZE, **POOLS[name])


def all_of_pool(pool):
    """All bits of a pool's memory, and all that it counts."""
    pools = pool._pages.pools
    memory = [arrays.read_host(a, pool.runtime).tobytes() for layer in pools.layers for a in layer]
    states = [(s.blocks, s.lengths, s.newest, s.histories, s.draft) for s in pool._pages.sequences.states.values()]
    return memory, repr(states), repr(pool), pool.context_lens.tolist(), getattr(pool._pages, "coded", None).__repr__()


def refused_of_pool(pool, rng, arch, length):
    """As `refused_calls`; sequence 2 has `length` tokens in every layer."""
    q, k, v = new(rng, arch, 1)
    return {
        "append": lambda: pool.append(0, k, v, [1]),
        "extend": lambda: pool.extend(0, q, k, v, [2]),
        "truncate": lambda: pool.truncate(2, length + 1),
    }


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("name", POOLS)
def test_a_step_of_sequences_that_ended_between_two_layers_is_made_again(arch, rng, name):
    pool, twin = pool_of(name), pool_of(name)
    seqs = [pool.add() for _ in range(3)]
    assert seqs == [twin.add() for _ in range(3)]
    ended = {0: 2, 1: 1, 2: 2, 5: 1}
    for number in range(7):
        each = [5, 2, 7] if number == 0 else [1, 1, 1] if number % 2 else [2, 1, 3]
        bounds = [0, *np.cumsum(each).tolist()]
        rows = [new(rng, arch, bounds[-1]) for _ in range(LAYERS)]
        lens = pool.context_lens.tolist()
        for layer in range(ended.get(number, 0)):
            pool.extend(layer, *rows[layer], seqs, bounds)
        if number in ended and not (number == 1 and lens == [0, 0, 0]):
            if ended[number] > 1 or any(lens):
                assert pool.context_lens.tolist() == lens == [pool.length(seq) for seq in seqs]
                assert "3 with layers of different lengths" in repr(pool)
                for what, call in refused_of_pool(pool, rng, arch, lens[2]).items():
                    before = all_of_pool(pool)
                    refused(what, call, r"align\(\[\d\]\) to bring|Keep at most")
                    assert all_of_pool(pool) == before, what
            assert pool.align([2]).tolist() == lens[2:]
            pool.extend(0, *new(rng, arch, 1), [2])
            pool.truncate(2, lens[2])
            assert pool.align().tolist() == pool.context_lens.tolist() == lens
        for layer, of_layer in enumerate(rows):
            got, want = (oracle.to_numpy(each.extend(layer, *of_layer, seqs, bounds)) for each in (pool, twin))
            assert got.tobytes() == want.tobytes()
        for layer in range(LAYERS):
            for seq in seqs:
                assert bits(pool.tokens(layer, seq)) == bits(twin.tokens(layer, seq))
        assert pool.num_free_blocks == twin.num_free_blocks


@pytest.mark.archs("cpu")
def test_sequences_whose_first_layer_alone_is_used_go_on(arch, rng):
    pool = pool_of("float32")
    a, b = pool.add(), pool.add()
    pool.append(0, *new(rng, arch, 5)[1:], [a, b], [0, 3, 5])
    pool.append(0, *new(rng, arch, 2)[1:], [b, a])
    assert pool.context_lens.tolist() == [4, 3]
    before = all_of_pool(pool)
    for seqs in ([a, b], [b]):
        with pytest.raises(tikv.PositionError, match=r"of sequence \d would be fewer than the \d of layer 0.*align"):
            pool.append(1, *new(rng, arch, len(seqs))[1:], seqs)
        assert all_of_pool(pool) == before
    for layer in (1, 2):
        pool.append(layer, *new(rng, arch, 7)[1:], [a, b], [0, 4, 7])
    pool.append(0, *new(rng, arch, 2)[1:], [a, b])


@pytest.mark.archs("cpu")
def test_an_append_of_no_tokens_hides_no_difference(arch, rng):
    pool = pool_of("float32")
    seq = pool.add()
    for layer in range(LAYERS):
        pool.append(layer, *new(rng, arch, 3)[1:], [seq], [0, 3])
    pool.append(1, *new(rng, arch, 1)[1:], [seq])
    for _ in range(LAYERS):
        pool.append(1, *new(rng, arch, 0)[1:], [seq], [0, 0])
    before = all_of_pool(pool)
    with pytest.raises(tikv.PositionError, match=r"\(3 in layers 0, 2, 4 in layer 1\).*align"):
        pool.append(0, *new(rng, arch, 0)[1:], [seq], [0, 0])
    assert all_of_pool(pool) == before


@pytest.mark.archs("cpu")
def test_sequences_that_cannot_go_back(arch, rng):
    """If one of several cannot, none does."""
    for name in ("float32", "groups along tokens"):
        pool = pool_of(name)
        a, b = pool.add(), pool.add()
        tokens = 64 if name == "groups along tokens" else 9
        for layer in range(LAYERS):
            pool.append(layer, *new(rng, arch, 2 * tokens)[1:], [b, a], [0, tokens, 2 * tokens])
        pool.append(0, *new(rng, arch, 2)[1:], [a, b])
        if name == "float32":
            pool.compact(0, b, np.arange(2, 10))
        before = all_of_pool(pool)
        with pytest.raises(tikv.PositionError, match=r"layer 0 of sequence \d cannot go back from .*free\("):
            pool.align()
        assert all_of_pool(pool) == before


@pytest.mark.archs("cpu")
def test_a_swapped_out_sequence_is_brought_back_first(arch, rng):
    pool = pool_of("float32")
    seq = pool.add()
    for layer in range(LAYERS):
        pool.append(layer, *new(rng, arch, 5)[1:], [seq], [0, 5])
    pool.swap_out(seq)
    assert pool.align().tolist() == [5]
    pool.swap_in(seq)
    pool.append(0, *new(rng, arch, 1)[1:], [seq])
    pool.swap_out(seq)
    with pytest.raises(tikv.PositionError, match="swap_in"):
        pool.align()
    pool.swap_in(seq)
    assert pool.align([seq]).tolist() == [5]
