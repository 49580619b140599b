"""Eight threads on one ring, one linear store and one pool: no token is lost, and nobody sees another's rows."""

import random
import sys
import threading
import time

import numpy as np

import tikv
from campaign.progress import Progress, Settings

GOAL, UNIT = 300, "seconds"
THREADS = 8
HEADS, WIDTH, WINDOW, CAPACITY = 2, 8, 16, 64


def rows(number: int, turn: int, tokens: int = 1) -> np.ndarray:
    """Rows that say which thread wrote them, and when."""
    return np.full((tokens, HEADS, WIDTH), number * 100_000 + turn % 100_000, np.float32)


def host(pair) -> list[np.ndarray]:
    return [a.copy_to_host() for a in pair]


class Shared:
    """What the threads share, and what each does with it."""

    def __init__(self, seed: int):
        form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "dtype": "float32"}
        self.seed, self.stop, self.errors = seed, threading.Event(), []
        self.turns, self.appended = [0] * THREADS, [0] * THREADS
        self.ring = tikv.KVCacheStore(**form, capacity=CAPACITY, window=WINDOW)
        self.linear = tikv.KVCacheStore(**form, capacity=CAPACITY)
        self.extended = tikv.KVCacheStore(**form | {"num_kv_heads": 1}, capacity=CAPACITY, window=4)
        self.pool = tikv.PagedKVCacheStore(**form, num_blocks=THREADS * 6, block_size=4)

    def work(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        calls = [self.use_ring, self.use_linear, self.use_pool, self.use_extend]
        try:
            while not self.stop.is_set():
                chance.choice(calls)(number, self.turns[number])
                self.turns[number] += 1
        except BaseException as error:
            self.errors.append((number, error))
            self.stop.set()

    def use_ring(self, number: int, turn: int) -> None:
        new = rows(number, turn)
        self.ring.append(0, new, -new)
        self.appended[number] += 1
        k, v = host(self.ring.tokens(0))
        assert k.shape[2] <= WINDOW
        assert (k == -v).all(), "K of one thread with V of another"
        assert (k == k[:, :1, :, :1]).all(), "a row of two threads"
        held = k[0, 0, :, 0].astype(int).tolist()
        for each in range(THREADS):
            turns = [n % 100_000 for n in held if n // 100_000 == each]
            assert turns == sorted(turns) or turns[-1] < 100, "rows of a thread in another order"

    def use_linear(self, number: int, turn: int) -> None:
        new = rows(number, turn, 2)
        with self.linear.lock:
            if self.linear.length + 2 > CAPACITY:
                self.linear.reset()
            before = self.linear.length
            self.linear.append(0, new, -new)
            assert self.linear.length == before + 2
            k, v = host(self.linear.tokens(0))
            assert k.shape[2] == before + 2
            assert (k[0, :, -2:] == new[0, 0, 0]).all(), "not the newest rows"
        assert (k == -v).all()

    def use_pool(self, number: int, turn: int) -> None:
        seq = self.pool.add()
        self.pool.append(0, rows(number, turn, 5), -rows(number, turn, 5), [seq], [0, 5])
        other = self.pool.fork(seq)
        for _ in range(3):
            self.pool.append(0, rows(number, turn), -rows(number, turn), [other])
        if turn % 5 == 0:
            self.pool.swap_out(seq)
            self.pool.swap_in(seq)
        for name, tokens in ((seq, 5), (other, 8)):
            k, v = host(self.pool.tokens(0, name))
            assert k.shape[0] == tokens
            assert (k == rows(number, turn)[0, 0, 0]).all(), "rows of another sequence"
            assert (v == -k).all()
        self.pool.free(seq)
        self.pool.free(other)

    def use_extend(self, number: int, turn: int) -> None:
        key = np.zeros((1, 1, WIDTH), np.float32)
        key[..., number] = 1000  # orthogonal to those of all other threads
        out = self.extended.extend(0, key, key, np.full((1, 1, WIDTH), number, np.float32))
        assert (np.asarray(out) == number).all(), "a query that found another's key"


def run(settings: Settings, progress: Progress) -> None:
    shared = Shared(settings.seed)
    for number in range(THREADS):  # kernels are made before the clock of the threads counts
        shared.use_extend(number, 0)
    threads = [threading.Thread(target=shared.work, args=(i,), daemon=True) for i in range(THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        while not progress.over and not shared.stop.is_set():
            time.sleep(min(1, max(0.01, settings.seconds - progress.seconds)))
            progress.done = int(progress.seconds)
            progress.count(0)
    finally:
        shared.stop.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(before)
    for number, error in shared.errors:
        progress.fail(0, f"thread {number}", error)
    if any(thread.is_alive() for thread in threads):
        progress.fail(0, "the end", "a thread waits for ever")
        return
    if not shared.errors:
        check_the_end(shared, progress)
    progress.remarks = f"seconds; {sum(shared.turns)} turns of {THREADS} threads"


def check_the_end(shared: Shared, progress: Progress) -> None:
    if shared.pool.num_free_blocks != shared.pool.num_blocks:
        progress.fail(0, "the pool", f"{shared.pool.num_blocks - shared.pool.num_free_blocks} blocks are lost")
    if shared.ring.length != sum(shared.appended):
        progress.fail(0, "the ring", f"{shared.ring.length} tokens of {sum(shared.appended)}")
