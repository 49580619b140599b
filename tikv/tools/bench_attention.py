"""`tikv bench --attention`: tikv's attention beside torch's, shape by shape; `impl="auto"` then takes the faster one.

Both are called as `decode_attention` calls them, over the same plain cache. Rounds alternate, so that other load on the
machine affects both; a time is the best of the rounds.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

from tikv import extras, runtime
from tikv.errors import ArchError, TikvError
from tikv.ops import attention
from tikv.ops.attention.measured import Timing, Timings
from tikv.tools.bench import ROUNDS, TORCH_DEVICES, Machine

HEADS = {"cpu": (8, 2), "cuda": (32, 8)}  # heads of queries, and of keys and values
QUERIES = 1, 8, 16, 32, 64, 128, 512, 2048
WIDTHS = 64, 128
KEYS = 4096
DTYPES = {"cpu": ("float32", "float16", "bfloat16"), "cuda": ("float16", "bfloat16", "float32")}
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # for weighted means of numbers below 0.5


def shapes(arch: str) -> list[tuple[str, int, int]]:
    """Every dtype, width and number of queries that is timed."""
    return list(itertools.product(DTYPES[arch], WIDTHS, QUERIES))


def start(arch: str) -> Machine:
    """The back end, with torch on it.

    Raises:
        ArchError: it does not start, or torch cannot attend over memory of it.
        MissingPackageError: torch is not installed.
    """
    live = runtime.init(arch)
    if live.arch not in HEADS:
        raise ArchError(f"bench: torch has no attention on {live.arch} to compare. Name cpu or cuda with --arch.")
    extras.need("torch", "bench --attention")
    machine = Machine(live)
    if machine.torch is None:
        raise ArchError(f"bench: torch does not see this machine's {live.arch}. Install the torch that does.")
    return machine


def measure(machine: Machine, seconds: float) -> Iterator[Timing]:
    """Time every shape, for about so many seconds in all when kernels are in the engine's cache.

    Raises:
        TikvError: results differ by more than rounding.
    """
    asked = shapes(machine.live.arch)
    for dtype, width, queries in asked:
        yield time_shape(machine, (dtype, width, queries, KEYS), seconds / len(asked))


def time_shape(machine: Machine, shape: tuple[str, int, int, int], seconds: float) -> Timing:
    """Compare and time both for one dtype, width, number of queries and of keys."""
    dtype, width, queries, keys = shape
    q_heads, kv_heads = HEADS[machine.live.arch]
    torch, device = machine.torch, TORCH_DEVICES[machine.live.arch]
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> Any:
        return (torch.rand(sizes, generator=generator) - 0.5).to(device, getattr(torch, dtype))

    q, k, v = numbers(1, q_heads, queries, width), *(numbers(1, kv_heads, keys, width) for _ in "kv")
    out = torch.empty_like(q)

    def attend(impl: str) -> None:
        attention.decode_attention(q, k, v, keys, out=out, impl=impl)

    results, best = [], {}
    for impl in ("taichi", "torch"):
        attend(impl)
        results.append(out.float().cpu().clone())  # without the copy it may be `out` itself
        best[impl] = float("inf")
    if not bool((results[0] - results[1]).abs().max() <= TOLERANCE[dtype]):
        raise TikvError(
            f"bench: tikv's and torch's attention differ, for {queries} {dtype} queries of {width} columns over {keys} "
            f"keys. Run `tikv support` and report what it says."
        )
    end = time.perf_counter() + seconds
    for rounds in itertools.count():
        if rounds >= ROUNDS and time.perf_counter() >= end:
            break
        for impl in best:
            best[impl] = min(best[impl], machine.seconds(functools.partial(attend, impl), 1))
    return Timing(dtype, width, queries, keys, round(best["taichi"] * 1e6, 1), round(best["torch"] * 1e6, 1))


def timings(rows: list[Timing]) -> Timings:
    """The measured rows in the file's form."""
    return Timings(datetime.date.today().isoformat(), runtime.version_of("torch") or "", tuple(rows))
