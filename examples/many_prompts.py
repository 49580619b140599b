"""Continue eight prompts at once, with their KV caches in one pool of blocks, which holds their common prefix once.

    python examples/many_prompts.py
    python examples/many_prompts.py --tokens 100 --dtype float16

The prompts are the same beginning of a Python file with eight different last lines. Each step runs the model over one
token of every prompt together. Afterwards each prompt is continued alone, in its own pool, which gives the same text.
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

# The matrices are small: a second BLAS thread costs more than it brings, and takes a core from tikv's kernels.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from generate import Chooser, cached, report, style
from shared.memory import PagedMemory, pool_for
from shared.model import FILE_START, Model

import tikv

BLOCK = 16
BEGINNING = '''"""A queue for threads, with a limit on the items that it holds."""

import threading
import time
from collections import deque


class Queue:
    """Items in the order in which they came.

    The size is zero or the number of items that may wait.
    """

    def __init__(self, size=0):
        self.size = size
        self.items = deque()
        self.lock = threading.Lock()
        self.not_empty = threading.Condition(self.lock)
        self.not_full = threading.Condition(self.lock)

'''
ENDINGS = [
    "    def put(self, item",
    "    def get(self",
    "    def __len__(self",
    "    def __repr__(self",
    "    def close(self",
    "    def clear(self",
    "    @property\n    def full(self",
    "class Error(",
]


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40, help="tokens to write for each prompt (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16", "int8"), default="float32")
    parser.add_argument(
        "--attention", choices=("numpy", "tikv"), default="tikv", help="what computes attention for single tokens"
    )
    parser.add_argument("--arch", default="auto", help="tikv's back end: auto, cpu, cuda, vulkan or metal")
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parent / "model", help="folder that train.py wrote"
    )
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: must be at least 1")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; examples/train.py writes one")
    return args


def together(
    model: Model, prompts: list[list[int]], pool: "tikv.PagedKVCacheStore", tokens: int, read: str
) -> list[list[int]]:
    """Continue all prompts in one pool, one token of each per step; each starts with the blocks that it finds there."""
    choosers = [Chooser(prompt, no_repeat=5) for prompt in prompts]
    seqs, logits = [], []
    for prompt in prompts:
        seq = pool.add(prompt)
        there = pool.length(seq)  # never all of it: the model has to run on the last token to say what follows
        logits.append(model.forward(prompt[there:], there, PagedMemory(model, pool, [seq]))[-1])
        seqs.append(seq)
    memory = PagedMemory(model, pool, seqs, read)
    written = [[choose(row)] for choose, row in zip(choosers, logits, strict=True)]
    for _ in range(tokens - 1):
        positions = np.array([pool.length(seq) for seq in seqs])
        rows = model.forward([text[-1] for text in written], positions, memory)
        for text, choose, row in zip(written, choosers, rows, strict=True):
            text.append(choose(row))
    return written


def alone(model: Model, prompt: list[int], dtype: str, tokens: int, read: str) -> list[int]:
    """Continue one prompt in its own pool."""
    pool = pool_for(model, -(-(len(prompt) + tokens) // BLOCK), dtype, BLOCK)
    memory = PagedMemory(model, pool, [pool.add()], read)
    following = cached(model, prompt, memory, Chooser(prompt, no_repeat=5))
    return [token for _, token in zip(range(tokens), following, strict=False)]


def main() -> int:
    """Generate, show and compare. The exit status is 1 if a text differs from what its prompt gives alone."""
    args = arguments()
    try:
        arch = tikv.init(arch=args.arch).arch
    except tikv.TikvError as error:
        sys.exit(f"--arch {args.arch}: {error}")
    model = Model.load(args.model)
    prompts = [model.tokenizer.encode(FILE_START + BEGINNING + ending) for ending in ENDINGS]
    separate = sum(-(-(len(prompt) + args.tokens - 1) // BLOCK) for prompt in prompts)
    pool = pool_for(model, separate, args.dtype, BLOCK)
    report(f"{len(prompts)} prompts of {len(prompts[0])} tokens or so, one pool of {args.dtype} blocks on {arch}\n")

    together(model, prompts, pool_for(model, separate, args.dtype, BLOCK), 2, args.attention)  # compiles the kernels
    started = time.perf_counter()
    written = together(model, prompts, pool, args.tokens, args.attention)
    seconds = time.perf_counter() - started
    print(BEGINNING, end="")
    for ending, text in zip(ENDINGS, written, strict=True):
        print(
            style("1", ending, sys.stdout)
            + model.tokenizer.decode(text).rstrip()
            + "\n"
            + style("2", "    # ...", sys.stdout)
        )

    started = time.perf_counter()
    apart = [alone(model, prompt, args.dtype, args.tokens, args.attention) for prompt in prompts]
    seconds_alone = time.perf_counter() - started
    held, shared = pool.num_blocks - pool.num_free_blocks, pool.num_shared_blocks
    count = len(prompts) * args.tokens
    report(f"\nblocks held: {held}, {shared} of them by all {len(prompts)} prompts; without sharing {separate}")
    report(f"together {count / seconds:.0f} tokens/s, one after the other {count / seconds_alone:.0f} tokens/s")
    same = [a == b for a, b in zip(written, apart, strict=True)]
    report(f"text as each prompt gives it alone: {sum(same)} of {len(same)}")
    return int(not all(same))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)
