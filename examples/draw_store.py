"""Draw where tokens lie in live stores: ring.svg, slots.svg, heads.svg and pages.svg in docs/ of this repository.

python examples/draw_store.py [--out FOLDER]
"""

import argparse
import pathlib
import sys

import numpy as np

import tikv


def ring() -> tikv.KVCacheStore:
    """A model with two sliding layers of every three, after 43 tokens; the windows have wrapped behind their sinks."""
    store = tikv.KVCacheStore(
        num_layers=6, num_kv_heads=8, head_dim=128, capacity=64, window=[20, 20, None] * 2, sinks=4, dtype="float16"
    )
    rows = np.zeros((6, 43, 8, 128), np.float32)
    store.append_all(rows, rows)
    return store


def slots() -> tikv.KVCacheStore:
    """A layer without a window and a sliding one, after 18 tokens."""
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=64, capacity=24, window=[None, 8])
    store.append_all(*np.zeros((2, 2, 18, 1, 64), np.float32))
    return store


def heads() -> tikv.KVCacheStore:
    """Two heads that kept different tokens of 30, and three more tokens."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=64, capacity=40)
    store.append(0, *np.zeros((2, 30, 2, 64), np.float32))
    keep = np.zeros((1, 2, 30), bool)
    keep[0, 0, [0, 1, 2, 7, 8, 13, 19, 27, 28, 29]] = True
    keep[0, 1, [0, 4, 5, 29]] = True
    store.compact(0, keep)
    store.append(0, *np.zeros((2, 3, 2, 64), np.float32))
    return store


def pages() -> tikv.PagedKVCacheStore:
    """Three prompts that begin alike, a fork that went on by itself, and one sequence on the host."""
    pool = tikv.PagedKVCacheStore(num_layers=6, num_kv_heads=8, head_dim=128, num_blocks=48, block_size=8)

    def append(seq: int, tokens: int) -> None:
        rows = np.zeros((tokens, 8, 128), np.float32)
        for layer in range(6):
            pool.append(layer, rows, rows, [seq], cu_seqlens=[0, tokens])

    system = list(range(32))
    for question in ([100] * 13, [200] * 30, [300] * 3):
        seq = pool.add(system + question)
        append(seq, 32 + len(question) - pool.length(seq))
    append(pool.fork(1), 9)
    append(pool.add(), 70)
    pool.swap_out(4)
    append(pool.add(), 21)
    return pool


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs"), metavar="FOLDER")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error}")
    tikv.init("cpu")
    for make in (ring, slots, heads, pages):
        make().draw(options.out / f"{make.__name__}.svg")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
