"""Ctrl-C at every line of a call: a store is as before it, or as after it, and says which where it is `extend`."""

import ast
import functools
import gc
import pathlib
import signal
import sys
import threading
import traceback

import numpy as np
import pytest
from host_stores import host_store
from wrong_arguments import contents

import tikv

pytestmark = pytest.mark.thorough

HEADS, Q_HEADS, WIDTH = 2, 4, 16
FILES = "/tikv/stores/", "/tikv/ops/plan.py", "/tikv/ops/attention/plan.py", "/tikv/launch/bound.py"


@functools.cache
def blocks(file):
    """Where each `with` statement of a file and its body begin, and where it ends."""
    withs = (node for node in ast.walk(ast.parse(pathlib.Path(file).read_text("utf-8"))) if isinstance(node, ast.With))
    return [(node.lineno, node.body[0].lineno, node.end_lineno) for node in withs]


def leaves_a_block(file, line, before):
    """Whether a line is a `with` statement's once more, behind its body, where `__exit__` is about to be called.

    Python itself raises nothing there, so Ctrl-C does not come between a body and the release of its lock.
    """
    return any(begin <= line < body <= (before or 0) <= end for begin, body, end in blocks(file))


def interrupted(call, at):
    """Make a call, Ctrl-C at the `at`-th line of ours that it comes to; how many lines it came to."""
    count = 0
    lines = {}

    def trace(frame, event, argument):
        nonlocal count
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if not any(part in name for part in FILES) or name.endswith("interrupts.py"):
            return None
        if function == "__del__" or (function == "<lambda>" and name.endswith("readers.py")):
            return None  # called as memory goes: Python drops what is raised there
        if event == "line":
            before, lines[frame] = lines.get(frame), frame.f_lineno
            if leaves_a_block(name, frame.f_lineno, before):
                return trace
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    gc.disable()  # what it calls may be ours, where Python drops what is raised
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.fixture(autouse=True)
def heard():
    """A process that a shell started in the background ignores Ctrl-C, and Python then does not raise it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def every(request):
    """How many lines lie between two that are tried."""
    return 1 if request.config.getoption("--full") else 7


def new(rng, tokens, heads=HEADS, width=WIDTH):
    return rng.standard_normal((1, tokens, heads, width)).astype(np.float32)


def store_of(rng, tokens=9, **form):
    sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 40, "dtype": "float32"} | form
    store = tikv.KVCacheStore(**sizes)
    for layer in range(2):
        store.append(layer, *(new(rng, tokens, width=sizes["head_dim"]) for _ in "kv"))
    return store


def on_host(rng, tokens=9, **form):
    sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 40, "dtype": "float32"} | form
    store = host_store("cpu", **sizes, resident_layers=1)
    for layer in range(2):
        store.append(layer, *(new(rng, tokens) for _ in "kv"))
    store.attend(0, new(rng, 1, Q_HEADS))
    return store


def uneven(rng, **form):
    store = store_of(rng, **form)
    mask = np.ones((1, HEADS, store.held(1)), bool)
    mask[0, 1, :3] = False
    store.compact(1, mask)
    return store


def pool_of(rng, **form):
    sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 24, "block_size": 4}
    pool = tikv.PagedKVCacheStore(**sizes, dtype="float32", **form)
    seqs = [pool.add(), pool.add()]
    for layer in range(2):
        pool.append(layer, new(rng, 9)[0], new(rng, 9)[0], seqs, [0, 6, 9])
    if not pool.config.per_head:
        pool.fork(0)
    return pool


def rows_of(pool, layer, seq):
    try:
        return [np.asarray(rows) for rows in pool.tokens(layer, seq)]
    except tikv.PositionError:
        return "swapped out"


def held(store):
    """What anybody can see of a store: counts, the tokens that it holds, and the summaries of their pages."""
    if isinstance(store, tikv.PagedKVCacheStore):
        there = [seq for seq in store.sequences if rows_of(store, 0, seq) != "swapped out"]
        pages = [store.page_summaries(i, there) for i in range(2)] if store.config.page else []
        return contents(
            [(seq, store.layer_length(i, seq), rows_of(store, i, seq)) for i in range(2) for seq in store.sequences],
            [np.asarray(a) for pair in pages for a in pair],
        )
    counts = [(store.layer_length(i), store.held(i), store.positions(i)) for i in range(2)]
    pages = [of_pages(store, i) for i in range(2)] if "summaries" in repr(store) else []
    return contents(counts, [[*map(np.asarray, store.tokens(i))] for i in range(2)], store.length, pages)


def of_pages(store, layer):
    """The summaries of the pages of 4 tokens in which each head of a layer has some."""
    counts = np.broadcast_to(store.held(layer), (store.batch_size, HEADS))
    pair = [np.asarray(a) for a in store.page_summaries(layer)]
    return [a[b, h, : -(-counts[b, h] // 4)] for a in pair for b, h in np.ndindex(counts.shape)]


def free(store):
    """Blocks that a pool may still give."""
    return getattr(store, "num_free_blocks", None)


def is_free(lock):
    """Whether another thread could take a lock now."""
    taken = []

    def take():
        if lock.acquire(timeout=10):
            lock.release()
            taken.append(True)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return bool(taken)


def each_break(fresh, call, every):
    """Make a call on a fresh store again and again, each time with Ctrl-C a few lines later, until it comes too late.

    Gives the store, what Ctrl-C says and whether it came as the call was on its way out, with all done.
    """
    call(fresh())  # compiles
    for at in range(1, 100_000, every):
        store = fresh()
        try:
            interrupted(lambda store=store: call(store), at)
        except KeyboardInterrupt as error:
            assert is_free(store.lock)
            assert is_free(store.runtime.lock)
            inside = [
                frame for frame, _ in traceback.walk_tb(error.__traceback__) if "/tikv/" in frame.f_code.co_filename
            ]
            yield store, str(error), not str(error) and inside[-1].f_code.co_name in LEAVING
        else:
            assert at > 10
            return


def check(make, call, every, says=None, keeps_blocks=False):
    """Ctrl-C at lines in turn: the store is as before the call or as after it, and goes on as that one does.

    Where it is as after it, Ctrl-C must say something. A pool's sequences may keep blocks that were taken for them.
    Returns whether it was as after it.
    """
    fresh = lambda: make(np.random.default_rng(0))  # noqa: E731
    store, done = fresh(), False
    before, free_before = held(store), free(store)
    call(store)
    after, free_after = held(store), free(store)
    for store, said, leaving in each_break(fresh, call, every):
        found = held(store)
        assert found in (before, after)
        if found == before:
            assert keeps_blocks or free(store) == free_before
            call(store)
        elif not leaving:
            done = True
            assert says is None or says in said
        assert (held(store), free(store)) == (after, free_after)
    return done


def extend(tokens, width=WIDTH):
    def call(store):
        rng = np.random.default_rng(1)
        q, k, v = (new(rng, tokens, heads, width) for heads in (Q_HEADS, HEADS, HEADS))
        store.extend(1, q, k, v, return_lse=True)

    return call


def append(tokens, layer=1):
    def call(store):
        rng = np.random.default_rng(1)
        store.append(layer, new(rng, tokens), new(rng, tokens))

    return call


def append_all(store):
    store.append_all(*(np.stack([new(np.random.default_rng(1), 3)] * 2) for _ in "kv"))


# What runs when all is done.
LEAVING = "extend", "call", "__exit__", "results_of", "handed_over", "is_followed", "refuse_backward"
RING = {"capacity": 8, "window": 8, "sinks": 2}
LOST = "KVCacheStore.extend was interrupted. Layer 1 holds "


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("make", "tokens", "wraps"),
    [
        (store_of, 3, False),
        (lambda rng: store_of(rng, capacity=20, window=20), 3, False),
        (lambda rng: store_of(rng, **RING), 5, True),
        (lambda rng: store_of(rng, **RING), 1, True),
        (uneven, 3, False),
        (on_host, 3, False),
        (lambda rng: on_host(rng, **RING), 5, True),
        (lambda rng: store_of(rng, page_summaries=4), 3, False),
    ],
    ids=[
        "linear",
        "a ring with room",
        "a ring that wraps",
        "a token into a ring",
        "uneven heads",
        "on the host",
        "a ring on the host that wraps",
        "summaries of pages",
    ],
)
def test_extend_leaves_a_store_as_before_or_says_what_it_holds(arch, every, make, tokens, wraps):
    done = check(make, extend(tokens), every, LOST)
    assert done == wraps or (wraps and every > 1), "the lines behind the append are few: one of 7 may miss them"


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("make", "lost"), [(store_of, False), (lambda rng: store_of(rng, **RING), True)])
def test_an_error_of_attention_behind_the_append_does_as_ctrl_c(arch, monkeypatch, make, lost):
    store = make(np.random.default_rng(0))
    before = held(store)

    def no_memory(*given):
        raise tikv.CapacityError("no memory for parts.")

    monkeypatch.setattr("tikv.ops.attention.launches.AttentionLaunches.attend", no_memory)
    with pytest.raises(tikv.CapacityError) as error:
        extend(1)(store)
    told = " Layer 1 holds 1 of the new tokens, which overwrote older ones: its length is now 10."
    assert str(error.value) == "no memory for parts." + told * lost
    assert (held(store) == before) is not lost
    assert store.layer_length(1) == 9 + lost


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("kind", ["uneven rings", "groups along tokens"])
def test_what_goes_in_by_parts_says_how_much(arch, every, kind):
    """A token at a time, or as many as become codes: those that came are counted, and the message has their number."""
    if kind == "groups along tokens":
        quant = tikv.Quant(4, 32, "tokens", 32)
        make, call, each = lambda rng: store_of(rng, 60, capacity=160, head_dim=32, dtype=quant), extend(40, 32), 4
    else:
        make, call, each = lambda rng: uneven(rng, **RING), extend(9), 1
    fresh = lambda: make(np.random.default_rng(0))  # noqa: E731
    start, before, partly = fresh().layer_length(1), held(fresh()), set()
    for store, said, leaving in each_break(fresh, call, each * every):
        came = store.layer_length(1) - start
        assert store.layer_length(0) == start
        if came:
            partly.add(came)
            says = f"{LOST}{came} of the new tokens, which overwrote older ones: its length is now {start + came}."
            assert leaving or says == said
        else:
            assert held(store) == before
    assert len(partly) > 1


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("make", "call"),
    [
        (store_of, append(3)),
        (lambda rng: store_of(rng, **RING), append(3)),
        (lambda rng: store_of(rng, **RING), append(1)),
        (uneven, append(2)),
        (store_of, append_all),
        (lambda rng: store_of(rng, window=[None, 8], capacity=20), append_all),
        (store_of, lambda store: store.compact(0, [[[0, 4, 5]] * HEADS])),
        (store_of, lambda store: store.trim(2)),
        (store_of, lambda store: store.commit([0, 2])),
        (store_of, lambda store: store.repeat(2)),
        (lambda rng: store_of(rng, batch_size=1), lambda store: store.reset()),
        (lambda rng: store_of(rng, page_summaries=4), append(3)),
        (lambda rng: store_of(rng, page_summaries=4, dtype="int8"), append(3)),
        (lambda rng: uneven(rng, page_summaries=4), append(2)),
        (lambda rng: store_of(rng, page_summaries=4), lambda store: store.compact(0, [[[0, 4, 5]] * HEADS])),
        (on_host, append(3, layer=0)),
        (on_host, append_all),
        (on_host, lambda store: store.compact(0, [[[0, 4, 5]] * HEADS])),
        (on_host, lambda store: store.repeat(2)),
    ],
)
def test_a_change_is_made_whole_or_not_at_all(arch, every, make, call):
    check(make, call, every)


def rows(tokens):
    return [new(np.random.default_rng(1), tokens, heads)[0] for heads in (Q_HEADS, HEADS, HEADS)]


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("form", "call"),
    [
        ({}, lambda pool: pool.append(1, *rows(5)[1:], [0, 1], [0, 3, 5])),
        ({}, lambda pool: pool.extend(1, *rows(5), [0, 1], [0, 3, 5])),
        ({"per_head": True}, lambda pool: pool.extend(1, *rows(5), [0, 1], [0, 3, 5])),
        ({}, lambda pool: pool.compact(1, 0, [0, 2, 5])),
        ({}, lambda pool: pool.truncate(0, 3)),
        ({}, lambda pool: pool.free(0)),
        ({}, lambda pool: pool.commit([0, 1], [[0, 2], [1]])),
        ({}, lambda pool: pool.fork(1)),
        ({}, lambda pool: pool.swap_out(0)),
        ({"page_summaries": 4}, lambda pool: pool.append(1, *rows(5)[1:], [0, 1], [0, 3, 5])),
        ({"page_summaries": 4}, lambda pool: pool.extend(1, *rows(5), [0, 1], [0, 3, 5])),
        ({"page_summaries": 4}, lambda pool: pool.compact(1, 0, [0, 2, 5])),
    ],
)  # fmt: skip
def test_a_pool_is_as_before_or_as_after(arch, every, form, call):
    keeps_blocks = "extend" in call.__code__.co_names
    done = check(lambda rng: pool_of(rng, **form), call, every, keeps_blocks=keeps_blocks)
    assert not (done and keeps_blocks)


@pytest.mark.archs("cpu")
def test_a_pool_of_groups_says_how_many_tokens_it_holds(arch, every):
    """New tokens go in by as many as become codes, which cannot be taken back."""
    quant, rng = tikv.Quant(4, 32, "tokens", 32), np.random.default_rng(1)
    given = [new(rng, 45, heads, 32)[0] for heads in (Q_HEADS, HEADS, HEADS)]

    def fresh():
        rng = np.random.default_rng(0)
        sizes = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": 32, "num_blocks": 16, "block_size": 32}
        pool = tikv.PagedKVCacheStore(**sizes, dtype=quant)
        seqs = [pool.add(), pool.add()]
        for layer in range(2):
            pool.append(layer, *(new(rng, 90, width=32)[0] for _ in "kv"), seqs, [0, 60, 90])
        return pool

    start, before, partly = {0: 60, 1: 30}, held(fresh()), set()
    for pool, said, leaving in each_break(fresh, lambda pool: pool.extend(1, *given, [0, 1], [0, 40, 45]), 4 * every):
        lengths = {seq: pool.layer_length(1, seq) for seq in (0, 1)}
        if lengths == start:
            assert held(pool) == before
        else:
            partly.add(tuple(lengths.values()))
            assert leaving or f"layer 1 now holds {lengths} tokens of each sequence." in said
    assert len(partly) > 1
