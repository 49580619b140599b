"""Threads that share a store: no token is lost, and nobody sees another's rows."""

import sys
import threading

import numpy as np
import pytest

import tikv

THREADS, TURNS = 8, 40
HEADS, WIDTH = 2, 8


def together(work):
    """Run work(number) in many threads that begin at once; the first error any of them had is raised here."""
    barrier, errors = threading.Barrier(THREADS), []

    def run(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def rows(number, turn, tokens=1):
    """Rows that say which thread wrote them, and when."""
    return np.full((tokens, HEADS, WIDTH), number * 100 + turn, np.float32)


@pytest.fixture(autouse=True)
def often_in_turn():
    """Threads change places much more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.archs("cpu", "vulkan")
@pytest.mark.parametrize("window", [None, 64])
def test_a_store_keeps_every_token_of_every_thread(window, arch):
    store = tikv.KVCacheStore(
        num_layers=2, num_kv_heads=HEADS, head_dim=WIDTH, capacity=THREADS * TURNS, window=window, dtype="float32"
    )
    store.append(0, rows(0, 0), rows(0, 0))
    store.reset()

    def work(number):
        for turn in range(TURNS):
            new = rows(number, turn)
            store.append(0, new, -new)
            k, v = (np.asarray(a.copy_to_host()) for a in store.tokens(0))
            assert (k == -v).all()

    together(work)
    assert store.layer_length(0) == THREADS * TURNS
    k = np.asarray(store.tokens(0)[0].copy_to_host())[0]
    assert (k == k[:1, :, :1]).all(), "a row was written by two threads"
    held = k[0, :, 0].astype(int).tolist()
    for number in range(THREADS):
        mine = [n % 100 for n in held if n // 100 == number]
        assert mine == sorted(mine)
    if window is None:
        assert sorted(held) == sorted(n * 100 + t for n in range(THREADS) for t in range(TURNS))
    else:
        assert len(set(held)) == 64


@pytest.mark.archs("cpu", "vulkan")
def test_extend_of_several_threads_is_whole(arch):
    """Each thread's query finds its own key, which was appended in the same call, at the same position for K and V."""
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=1, head_dim=WIDTH, capacity=THREADS * TURNS, dtype="float32", window=4
    )

    def work(number):
        for _ in range(TURNS // 2):
            key = np.zeros((1, 1, WIDTH), np.float32)
            key[..., number] = 1000  # orthogonal to those of all other threads
            out = store.extend(0, key, key, np.full((1, 1, WIDTH), number, np.float32))
            assert (np.asarray(out) == number).all()

    together(work)
    assert store.length == THREADS * (TURNS // 2)


@pytest.mark.archs("cpu", "vulkan")
def test_a_pool_gives_no_sequence_rows_of_another(arch):
    pool = tikv.PagedKVCacheStore(
        num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=THREADS * 6, block_size=4, dtype="float32"
    )

    def work(number):
        for turn in range(TURNS // 4):
            seq = pool.add()
            pool.append(0, rows(number, turn, 5), -rows(number, turn, 5), [seq], [0, 5])
            other = pool.fork(seq)
            for _ in range(3):
                pool.append(0, rows(number, turn), -rows(number, turn), [other])
            for name, tokens in ((seq, 5), (other, 8)):
                k, v = (np.asarray(a.copy_to_host()) for a in pool.tokens(0, name))
                assert k.shape[0] == tokens
                assert (k == number * 100 + turn).all()
                assert (v == -k).all()
            assert pool.context_lens.size >= 2
            pool.free(seq)
            pool.free(other)

    together(work)
    assert pool.num_free_blocks == pool.num_blocks


@pytest.mark.archs("cpu", "vulkan")
def test_a_layer_counts_every_token(arch):
    layer = tikv.ContiguousKVLayer(THREADS * TURNS, HEADS, WIDTH, dtype="float32")

    def work(number):
        for turn in range(TURNS):
            new = rows(number, turn)
            layer.extend(new, new, -new)

    together(work)
    assert len(layer) == THREADS * TURNS
    k, v = (np.asarray(a.copy_to_host()) for a in (layer.keys, layer.values))
    assert (k == -v).all()
    assert sorted(k[0, :, 0].astype(int).tolist()) == sorted(n * 100 + t for n in range(THREADS) for t in range(TURNS))


@pytest.mark.archs("cpu", "vulkan")
def test_a_step_is_compiled_without_a_deadlock(arch):
    """Recording takes the runtime's lock, and appends take the store's: in one order, whoever waits for whom."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=8, dtype="float32")
    held, release = threading.Event(), threading.Event()

    def hold():
        with store.lock:
            held.set()
            release.wait(60)

    threads = [threading.Thread(target=hold), threading.Thread(target=lambda: tikv.compile_step(store))]
    threads[0].start()
    assert held.wait(60)
    threads[1].start()
    threads[1].join(1)
    assert threads[1].is_alive(), "it waits for the store"
    free = store.runtime.lock.acquire(timeout=10)
    if free:
        store.runtime.lock.release()
    release.set()
    for thread in threads:
        thread.join(60)
    assert free


@pytest.mark.archs("cpu", "vulkan")
def test_an_error_names_the_method_that_was_called(arch):
    """Whichever of append and extend came first with rows of this form."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=4, dtype="float32")
    new = rows(1, 1, 3)
    store.extend(0, new, new, new)
    with pytest.raises(tikv.CapacityError, match=r"^KVCacheStore\.append"):
        store.append(0, new, new)
