"""Seconds of the first call of a kernel on an NVIDIA GPU when nothing has been compiled before.

    python benches/first_call.py

Each kind of call has its own process and its own empty folders. The time does not include the start of Python, imports
and the making of arrays; it includes the start of the process that compiles.
"""

import argparse
import sys
import time

import environment
import torch
from attention_gpu import Contiguous, Pages
from gpu import COMPILED, HEADS, WIDTH, Machine, Table, printed_by

import tikv
from tikv import launch


def append(machine):
    """A token into a store."""
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=HEADS, head_dim=WIDTH, capacity=256)
    rows = [machine.randn(1, HEADS, WIDTH) for _ in "kv"]
    return lambda: store.append(0, *rows)


def attend(machine, kind, new=1, chosen=0):
    """Queries over float16."""
    storage, q = kind(machine, 1, 256), machine.randn(1, 4 * HEADS, new, WIDTH)
    caches = [machine.randn(*storage.shape) for _ in "kv"]
    indices = torch.arange(chosen, device=machine.device)[None, None].int() if chosen else None
    return lambda: storage.call(q, caches, indices=indices)


CASES = {
    "append of a token": append,
    "attention of a token, contiguous": lambda machine: attend(machine, Contiguous),
    "attention of a token, pages of 16": lambda machine: attend(machine, Pages),
    "attention of 128 new tokens, contiguous": lambda machine: attend(machine, Contiguous, new=128),
    "attention of a token over chosen tokens": lambda machine: attend(machine, Contiguous, chosen=64),
}


def measured(machine, case):
    """Print the seconds of the first call, and of the second, and how many kernels were compiled."""
    call, seconds, kernels = CASES[case](machine), [], []
    with launch.notice.heard_by(kernels.append):
        for _ in range(2):
            start = time.perf_counter()
            call()
            if machine.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    print(*seconds, len(kernels))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one case, also without a GPU")
    parser.add_argument("--case", choices=CASES, help="measure this case, in this process")
    given = parser.parse_args()
    if given.case:
        measured(Machine(given.small), given.case)
        return
    print(environment.line(environment.environment(["cuda" if torch.cuda.is_available() else "cpu"])))
    table = Table("call, float16", "first call, s", "second, ms", "kernels compiled")
    for case in list(CASES)[: 1 if given.small else None]:
        with table.attempt(case):
            printed = printed_by([__file__, *sys.argv[1:], "--case", case], COMPILED)
            first, second, kernels = printed.splitlines()[-1].split()
            table.row(case, float(first), float(second) * 1e3, kernels)


if __name__ == "__main__":
    main()
