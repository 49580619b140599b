"""Write text with a small language model whose KV cache is in tikv.

    python examples/generate.py
    python examples/generate.py --prompt "class Stack:" --seed 3
    python examples/generate.py --greedy              # always the likeliest token; the text soon repeats itself
    python examples/generate.py --no-cache            # recompute everything for every token: same text, slower
    python examples/generate.py --dtype int8          # a quarter of the memory; also with --cache paged

The model (1.8 million parameters, trained by train.py on Python's standard library) runs in NumPy. Two of its four
layers see a window of 64 tokens: their part of the cache is a ring, which this text fills several times.
The text goes to stdout, the figures to stderr.
"""

import argparse
import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# The matrices are small: a second BLAS thread costs more than it brings, and takes a core from tikv's kernels.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from shared.memory import NoMemory, PagedMemory, StoreMemory, pool_for
from shared.model import FILE_START, Memory, Model

import tikv

Choose = Callable[[np.ndarray], int]


class Chooser:
    """Picks each next token from its logits: the likeliest at temperature 0, else drawn with a seed.

    Small models go round in circles, so a token that would write the same `no_repeat` tokens a second time is left out.
    """

    def __init__(self, prompt: list[int], temperature: float = 0.0, seed: int = 0, no_repeat: int = 0):
        self.temperature, self.no_repeat = temperature, no_repeat
        self.rng = np.random.default_rng(seed)
        self.ids: list[int] = []
        self.followers: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
        for token in prompt:
            self._note(token)

    def __call__(self, logits: np.ndarray) -> int:
        """The token for logits (vocabulary,), noted as written."""
        logits = logits.astype(np.float64)
        if self.no_repeat:
            logits[self.followers[self._tail()]] = -np.inf
        if self.temperature == 0:
            token = int(logits.argmax())
        else:
            weights = np.exp((logits - logits.max()) / self.temperature)
            token = int(self.rng.choice(len(weights), p=weights / weights.sum()))
        self._note(token)
        return token

    def _tail(self) -> tuple[int, ...]:
        return tuple(self.ids[len(self.ids) - self.no_repeat + 1 :])

    def _note(self, token: int) -> None:
        if self.no_repeat and len(self.ids) >= self.no_repeat - 1:
            self.followers[self._tail()].append(token)
        self.ids.append(token)


def cached(model: Model, prompt: list[int], memory: Memory, choose: Choose) -> Iterator[int]:
    """Tokens without end: the prompt goes through the model once, then each new token alone."""
    logits = model.forward(prompt, 0, memory)[-1]
    position = len(prompt)
    while True:
        token = choose(logits)
        yield token
        logits = model.forward([token], position, memory)[-1]
        position += 1


def recomputed(model: Model, prompt: list[int], choose: Choose) -> Iterator[int]:
    """Tokens without end: all that was written so far goes through the model again for every token."""
    ids = list(prompt)
    while True:
        ids.append(choose(model.forward(ids, 0, NoMemory(model))[-1]))
        yield ids[-1]


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="class Cache:\n    def __init__(self", help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=300, help="tokens to write (default %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        default="float32",
        help="dtype in which K and V are stored; the arithmetic is float32 (default %(default)s)",
    )
    parser.add_argument(
        "--cache",
        choices=("contiguous", "paged"),
        default="contiguous",
        help="contiguous store or pool of pages; the text is the same in float32 (default %(default)s)",
    )
    parser.add_argument(
        "--attention",
        choices=("numpy", "tikv"),
        default="numpy",
        help="what computes attention for a new token; tikv reads the cache in place, but compiles longer at first",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="recompute everything for every token; then compare with the cache's time",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="sampling temperature; 0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=20, help="seed of the sampling (default %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token, as --temperature 0 does")
    parser.add_argument(
        "--no-repeat",
        type=int,
        default=5,
        metavar="N",
        help="never write the same N tokens in a row twice; 0 allows it (default %(default)s)",
    )
    parser.add_argument("--arch", default="auto", help="tikv's back end: auto, cpu, cuda, vulkan or metal")
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parent / "model", help="folder that train.py wrote"
    )
    args = parser.parse_args()
    if args.greedy:
        args.temperature = 0.0
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: must be at least 1")
    if args.no_repeat < 0 or args.no_repeat == 1:
        parser.error(f"--no-repeat {args.no_repeat}: must be 0, or at least 2")
    if not args.temperature >= 0:  # which nan is not
        parser.error(f"--temperature {args.temperature}: must be 0 or more")
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: must be 0 or more")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; examples/train.py writes one")
    return args


def style(code: str, text: str, stream) -> str:
    """The text in a terminal's style, where the stream is a terminal that wants it."""
    wanted = stream.isatty() and "NO_COLOR" not in os.environ
    return f"\033[{code}m{text}\033[0m" if wanted else text


def report(text: str) -> None:
    """One line of figures."""
    print(style("2", text, sys.stderr), file=sys.stderr, flush=True)


def main() -> int:
    """Generate, stream, report. Exit status 1 where a float32 cache changed the greedy text, 130 after Ctrl-C."""
    args = arguments()
    try:
        arch = tikv.init(arch=args.arch).arch
    except tikv.TikvError as error:
        sys.exit(f"--arch {args.arch}: {error}")
    model = Model.load(args.model)
    prompt = model.tokenizer.encode(FILE_START + model.tokenizer.clean(args.prompt))
    capacity = len(prompt) + args.tokens
    if args.cache == "paged":
        pool = pool_for(model, -(-capacity // 16), args.dtype)
        memory = PagedMemory(model, pool, [pool.add()], args.attention)
    else:
        memory = StoreMemory(model, capacity, args.dtype, args.attention)
    report(f"{model.parameters:,} parameters in NumPy, KV cache in tikv on {arch}")

    started = time.perf_counter()
    model.forward(prompt, 0, memory)
    model.forward(prompt[:1], len(prompt), memory)
    memory.reset()
    report(f"kernels ready in {time.perf_counter() - started:.1f} s\n")

    def generate(use_cache: bool, show: bool) -> tuple[list[int], float]:
        choose = Chooser(prompt, args.temperature, args.seed, args.no_repeat)
        tokens = cached(model, prompt, memory, choose) if use_cache else recomputed(model, prompt, choose)
        written: list[int] = []
        started = time.perf_counter()
        for _, token in zip(range(args.tokens), tokens, strict=False):
            written.append(token)
            if show:
                print(model.tokenizer.decode([token]), end="", flush=True)
        return written, time.perf_counter() - started

    print(style("1", model.tokenizer.decode(prompt[1:]), sys.stdout), end="", flush=True)
    shown, seconds = generate(use_cache=not args.no_cache, show=True)
    print(flush=True)
    how = "recomputing everything" if args.no_cache else f"with a {args.dtype} cache"
    report(f"\n{args.tokens} tokens in {seconds:.2f} s {how}: {args.tokens / seconds:.0f} tokens/s")
    status = 0
    if args.no_cache:
        written, seconds_cached = generate(use_cache=True, show=False)
        same = next((i for i, pair in enumerate(zip(shown, written, strict=True)) if pair[0] != pair[1]), None)
        verdict = "same text" if same is None else f"another text from token {same} on"
        report(
            f"{args.tokens} tokens in {seconds_cached:.2f} s with a {args.dtype} cache: "
            f"{args.tokens / seconds_cached:.0f} tokens/s, {seconds / seconds_cached:.1f} times as fast, {verdict}"
        )
        status = int(same is not None and args.dtype == "float32" and args.temperature == 0)
    report(f"cache: {memory.nbytes:,} bytes, {memory.summary()}")
    return status


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)
