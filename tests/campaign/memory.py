"""A million appends: what the process takes must not grow once everything was made that is made once."""

import itertools
import os
import random

import numpy as np
import oracle

import tikv
from campaign.progress import Progress, Settings

GOAL, UNIT = 1_000_000, "appends"
WARM = 20_000  # appends at most, or a fifth of what there is to do, after which nothing may be new
MOST_BYTES = 4 << 20  # that it may have grown by at the end: what Python's own memory sways by


def resident_bytes() -> int:
    """What this process has in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(settings: Settings, progress: Progress) -> None:
    chance = random.Random(settings.seed)
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float16"}
    ring = tikv.KVCacheStore(**form, capacity=64, window=16, sinks=2)
    linear = tikv.KVCacheStore(**form, capacity=64)
    pool = tikv.PagedKVCacheStore(**form, num_blocks=32, block_size=4)
    one, both = (oracle.place(np.ones(shape, np.float16), settings.arch) for shape in ((1, 2, 8), (2, 1, 2, 8)))
    seq, warm, most = pool.add(), 0, 0
    for number in itertools.count():
        if progress.over:
            break
        which = number % 4
        if which == 0:
            ring.append(chance.randrange(2), one, one)
        elif which == 1:
            if linear.length == linear.capacity:
                linear.reset() if chance.random() < 0.5 else linear.trim(chance.randint(1, 64))
            linear.append_all(both, both)
        elif which == 2:
            ring.append_all(both, both)
        else:
            if pool.length(seq) >= 64:
                pool.free(seq)
                seq = pool.add()
            for layer in range(2):
                pool.append(layer, one, one, [seq])
        progress.count()
        if number % 1000 == 999:
            now = resident_bytes()
            if number < WARM and number < progress.goal // 5:
                warm = now
            most = max(most, now - (warm or now))
    grown = resident_bytes() - (warm or resident_bytes())
    progress.remarks = f"appends; grown by {grown / 1e6:+.2f} MB since warm, at most {most / 1e6:.2f} MB"
    if grown > MOST_BYTES:
        progress.fail(0, "resident memory", f"it grew by {grown} bytes in {progress.done} appends")
