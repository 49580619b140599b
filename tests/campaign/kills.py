"""Processes that are killed while they save: the file is the generation before or after, and nothing piles up."""

import multiprocessing
import os
import pathlib
import random
import signal
import time

import numpy as np

import tikv
from campaign.progress import Progress, Settings

GOAL, UNIT = 200, "kills"
TOKENS = 200  # of a generation: about 2 MB in a file
MOST_SECONDS = 60  # that a child takes to begin
FORM = {"num_layers": 2, "num_kv_heads": 4, "head_dim": 64, "dtype": "float32"}


def store_of(kind: str):
    if kind == "pool":
        pool = tikv.PagedKVCacheStore(**FORM, num_blocks=32, block_size=16)
        pool.add()
        return pool
    return tikv.KVCacheStore(**FORM, capacity=256)


def fill(store, kind: str, generation: int) -> None:
    """Let the store hold this generation, and nothing else."""
    k = np.full((TOKENS + generation % 7, 4, 64), generation, np.float32)
    if kind == "pool":
        store.truncate(0, 0)
    else:
        store.reset()
    for layer in range(2):
        store.append(layer, k, -k, *(([0], [0, len(k)]) if kind == "pool" else ()))


def generation_of(path: pathlib.Path, kind: str) -> int:
    """Which generation the file is, all of it."""
    store = (tikv.PagedKVCacheStore if kind == "pool" else tikv.KVCacheStore).load(path)
    found = [a.copy_to_host() for layer in range(2) for a in store.tokens(layer, *([0] if kind == "pool" else []))]
    generation = int(found[0].flat[0])
    tokens = found[0].shape[0 if kind == "pool" else 2]
    assert tokens == TOKENS + generation % 7, f"{tokens} tokens of generation {generation}"
    for a, sign in zip(found, (1, -1, 1, -1), strict=True):
        assert (a == sign * generation).all(), "rows of several generations"
    return generation


def save_for_ever(path: str, kind: str, arch: str, saved) -> None:
    """In the child: one generation after the other; `saved` gets the number of each that is there."""
    tikv.init(arch=arch)
    store = store_of(kind)
    for generation in range(1, 1 << 20):
        fill(store, kind, generation)
        store.save(path)
        saved.value = generation


def run(settings: Settings, progress: Progress) -> None:
    # Forked from a process that has loaded Taichi and not started it: a child begins in a tenth of the time.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["tikv.stores.store", "tikv.stores.pool", "campaign.kills"])
    number, mid_save = settings.only or 0, 0
    while not progress.over:
        chance = random.Random(f"{settings.seed} {number}")
        kind = ("store", "pool")[number % 2]
        path = settings.folder / "kills" / f"{kind}.safetensors"
        try:
            mid_save += one_kill(processes, chance, path, kind, settings.arch)
            progress.count()
        except Exception as error:
            progress.fail(number, kind, error)
        if settings.only is not None:
            return
        number += 1
    progress.remarks = f"kills; {mid_save} in the midst of a file"
    for kind in ("store", "pool"):  # the next save that is not killed clears what the others left
        store = store_of(kind)
        fill(store, kind, 1)
        path = settings.folder / "kills" / f"{kind}.safetensors"
        if path.exists():
            store.save(path)
    left = [name for name in os.listdir(settings.folder / "kills") if not name.endswith(".safetensors")]
    if left:
        progress.fail(number, "the end", f"left behind: {left}")


def one_kill(processes, chance: random.Random, path: pathlib.Path, kind: str, arch: str) -> bool:
    """Let a child save, kill it, and look at what is there; whether it was in the midst of a file."""
    path.parent.mkdir(exist_ok=True)
    saved = processes.Value("q", 0, lock=False)
    child = processes.Process(target=save_for_ever, args=(str(path), kind, arch, saved), daemon=True)
    child.start()
    try:
        until = time.perf_counter() + MOST_SECONDS
        while saved.value == 0:
            if not child.is_alive() or time.perf_counter() > until:
                raise RuntimeError(f"the child did not begin to save: exit code {child.exitcode}")
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
    finally:
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join()
    last, found = saved.value, generation_of(path, kind)
    assert found in (last, last + 1), f"generation {found} after {last} was saved"
    left = [name for name in os.listdir(path.parent) if not name.endswith(".safetensors")]
    assert len(left) <= 1, f"left behind: {left}"
    return bool(left)
