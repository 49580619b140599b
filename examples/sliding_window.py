"""Generate far beyond a sliding window in constant memory, with the first tokens kept as attention sinks.

python examples/sliding_window.py
"""

import argparse
import contextlib
import sys

import numpy as np

import tikv


def main():
    """Push a thousand tokens through sixteen slots."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    heads, width, window, sinks = 2, 8, 16, 4
    rng = np.random.default_rng(0)
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=heads, head_dim=width, capacity=window, dtype="float32", window=window, sinks=sinks
    )
    print(store)
    history = []
    for _ in range(1000):
        k = rng.standard_normal((1, heads, width), np.float32)
        store.append(0, k, k)
        history.append(k[0])

    print(f"{store.length} tokens went through {store.nbytes} bytes")
    held = np.asarray(store.tokens(0)[0])[0]
    kept = [*range(sinks), *range(1000 - (window - sinks), 1000)]
    print("held, oldest first:", kept)
    print("and every bit of them:", bool((held == np.stack([history[p] for p in kept], axis=1)).all()))

    q = rng.standard_normal((1, heads, width), np.float32)
    print("attention reads the ring in place:", np.asarray(store.attend(0, q)).shape)

    store.trim(2)
    print(f"after a rollback of 2 tokens: length {store.length}, {store.tokens(0)[0].shape[2]} held")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            main()
            sys.stdout.flush()
        except KeyboardInterrupt:
            sys.exit(130)
