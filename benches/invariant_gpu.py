"""What tikv.init(invariant=True) costs on an NVIDIA GPU, in device time; 8 KV heads of 128.

    python benches/invariant_gpu.py

It times one token of 32 sequences of 8,192 tokens, and prompts over 8,192 tokens of one sequence, with each setting in
its own process. benches/gpu.py says how time is measured.
"""

import argparse
import functools
import json
import sys

import environment
import torch
from gpu import HEADS, PAGE, WIDTH, Machine, Table, printed_by, ratio, reason

import tikv

GROUP = 4  # query heads per KV head
SIZES = {False: (32, 8192, (64, 512, 2048)), True: (2, 128, (32,))}  # sequences, tokens of each, new tokens of prompts


def calls(machine):
    """Each call by (dtype, what it is)."""
    batch, length, prompts = SIZES[machine.small]
    form = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH}
    for dtype in ("float16", "bfloat16", "int8", "quant4_64") if machine.on_gpu else ("float16",):
        like = torch.bfloat16 if dtype == "bfloat16" else torch.float16
        stored = tikv.Quant(4, 64) if dtype == "quant4_64" else dtype
        rows = [machine.randn(batch, length, HEADS, WIDTH).to(like) for _ in "kv"]
        store = tikv.KVCacheStore(**form, capacity=length, batch_size=batch, dtype=stored)
        store.append(0, *rows)
        q = machine.randn(batch, GROUP * HEADS, WIDTH).to(like)
        yield (dtype, f"a token of {batch} x {length:,}, contiguous"), functools.partial(store.attend, 0, q)
        pool = tikv.PagedKVCacheStore(**form, num_blocks=batch * length // PAGE, block_size=PAGE, dtype=stored)
        seqs = [pool.add() for _ in range(batch)]
        pool.append(0, *(a.flatten(0, 1) for a in rows), seqs, [n * length for n in range(batch + 1)])
        yield (dtype, "the same, pages of 16"), functools.partial(pool.attend, 0, q, seqs)
        for new in prompts:
            q = machine.randn(1, new, GROUP * HEADS, WIDTH).to(like)
            what = f"{new:,} new tokens over {length:,}, pages of 16"
            yield (dtype, what), functools.partial(pool.attend, 0, q, seqs[:1])


def measured(small, setting):
    """Print the microseconds of each call, or why it could not be measured, as one line."""
    machine, found = Machine(small, invariant=setting), []
    for name, call in calls(machine):
        try:
            found.append((*name, machine.us(call)))
        except Exception as error:
            found.append((*name, reason(error)))
    print(json.dumps(found))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny sizes, once each, also without a GPU")
    parser.add_argument("--setting", choices=["default", "invariant"], help="measure this setting, in this process")
    given = parser.parse_args()
    if given.setting:
        measured(given.small, given.setting == "invariant")
        return
    found = []
    for setting in ("default", "invariant"):
        printed = printed_by([__file__, *sys.argv[1:], "--setting", setting])
        found.append(json.loads(printed.splitlines()[-1]))
    print(environment.line(environment.environment(["cuda" if torch.cuda.is_available() else "cpu"])))
    table = Table("stored in", "work", "default, us", "invariant, us", "times default")
    for (dtype, what, base), (_, _, us) in zip(*found, strict=True):
        table.row(dtype, what, base, us, ratio(us, base))


if __name__ == "__main__":
    main()
