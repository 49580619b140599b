"""The runtime is started again and again; what was made before is refused, what is made afterwards works."""

import gc

import numpy as np
import oracle

import tikv
from campaign.memory import resident_bytes
from campaign.progress import Progress, Settings

GOAL, UNIT = 1_000, "starts"
HEADS, WIDTH = 2, 8


class Made:
    """A store, a pool and arrays; all of it in every tenth start, else what compiles a single kernel."""

    def __init__(self, number: int, arch: str):
        self.number, self.arch, self.all = number, arch, number % 10 == 0
        form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "dtype": "float32"}
        self.store = tikv.KVCacheStore(**form, capacity=8, window=4)
        self.pool = tikv.PagedKVCacheStore(**form, num_blocks=4, block_size=2)
        self.seq = self.pool.add([1, 2, 3])
        self.k = oracle.place(np.full((3, HEADS, WIDTH), number, np.float32), arch)
        self.store.append(0, self.k, self.k)
        self.held = [self.store.keys(0), self.store.values(0)]
        self.snapshot = None
        if self.all:
            self.snapshot = self.store.snapshot()
            self.pool.append(0, self.k, self.k, [self.seq], [0, 3])
            self.held += [*self.store.tokens(0), *self.pool.tokens(0, self.seq)]

    def works(self) -> None:
        for i, found in enumerate(self.held):
            got = found.copy_to_host()
            if i < 2:
                got = got[:, :, :3]  # the slots that are filled
            assert (got.size, (got == self.number).all()) == (3 * HEADS * WIDTH, True), "not what was appended"

    def is_refused(self) -> None:
        store, pool, k, seq = self.store, self.pool, self.k, self.seq
        calls = {
            "append": lambda: store.append(0, k, k),
            "append_all": lambda: store.append_all(k[None], k[None]),
            "tokens": lambda: store.tokens(0),
            "trim": lambda: store.trim(1),
            "snapshot": store.snapshot,
            "array": self.held[-1].copy_to_host,
            "add": lambda: pool.add(),
            "pool append": lambda: pool.append(0, k, k, [seq], [0, 3]),
            "pool tokens": lambda: pool.tokens(0, seq),
            "swap_out": lambda: pool.swap_out(seq),
        }
        if self.all:
            calls["restore"] = lambda: store.restore(self.snapshot)
        for name, call in calls.items():
            try:
                call()
            except tikv.StaleRuntimeError:
                continue
            raise AssertionError(f"{name} of a runtime that is gone was not refused")


def run(settings: Settings, progress: Progress) -> None:
    old, made, number, first = None, None, settings.only or 0, 0
    while not progress.over:
        try:
            made = Made(number, settings.arch)
            made.works()
            tikv.init(arch=settings.arch)
            made.is_refused()
            if old is not None and number % 10 == 0:
                old.is_refused()
        except Exception as error:
            progress.fail(number, "start and use", error)
        old = made if number % 2 else None  # some are dropped at once, some a start later
        made = None
        if number % 50 == 20:
            gc.collect()
        number += 1
        progress.count()
        if progress.done == 20:
            first = resident_bytes()
        if settings.only is not None:
            break
    grown = (resident_bytes() - first) / max(1, progress.done - 20) if first else 0
    progress.remarks = f"starts; grown by {grown / 1e3:.0f} kB a start"
