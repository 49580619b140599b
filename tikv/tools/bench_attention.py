"""`tikv bench --attention`: tikv's attention beside torch's, shape by shape; `impl="auto"` then takes the faster one.

Both are called as `decode_attention` calls them, over the same plain cache. Rounds alternate, so that other load on the
machine affects both; a time is the best of the rounds. On CUDA a round is like a prompt or a token of a model: so many
calls as it has layers, one after the other without a wait between them, for a length that no round had before. So the
times include what an implementation prepares for a new length, and what it costs to wait for the GPU in every call.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tikv import extras, runtime
from tikv.errors import ArchError, TikvError
from tikv.ops import attention
from tikv.ops.attention.measured import FULL, KINDS, RECTANGULAR, SQUARE, Timing, Timings
from tikv.tools.bench import LAYERS, ROUNDS, TORCH_DEVICES, Machine

HEADS = {"cpu": (8, 2), "cuda": (32, 8)}  # heads of queries, and of keys and values
QUERIES = {  # by back end and kind; the square of 8,192 queries is left out for float32, which takes long
    "cpu": {SQUARE: (64, 512, 2048), RECTANGULAR: (8, 32, 64, 128, 512, 2048), FULL: (1, 64, 512)},
    "cuda": {SQUARE: (64, 512, 2048, 8192), RECTANGULAR: (8, 32, 64, 128, 512, 2048), FULL: (1, 8, 64, 512, 2048)},
}
MOST_QUERIES = {"float32": 2048}
WIDTHS = 64, 128
KEYS = 4096
CALLS = {"cpu": 1, "cuda": LAYERS}  # in a round
LONGEST = 0.1  # seconds of a round; it has fewer calls if they take longer
MOST_ROUNDS = 16  # each has another length on CUDA
DTYPES = {"cpu": ("float32", "float16", "bfloat16"), "cuda": ("float16", "bfloat16", "float32")}
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # for weighted means of numbers below 0.5


class AttentionShape(NamedTuple):
    """What one row of the table times: a kind of call, a dtype, the width of heads and the number of queries."""

    kind: str
    dtype: str
    width: int
    queries: int

    @property
    def keys(self) -> int:
        """How many tokens are in the cache."""
        return self.queries if self.kind == SQUARE else KEYS


def shapes(arch: str) -> list[AttentionShape]:
    """Every kind, dtype, width and number of queries that is timed."""
    return [
        AttentionShape(kind, dtype, width, queries)
        for kind, dtype, width in itertools.product(KINDS, DTYPES[arch], WIDTHS)
        for queries in QUERIES[arch][kind]
        if queries <= MOST_QUERIES.get(dtype, queries)
    ]


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
    for shape in asked:
        yield time_shape(machine, shape, seconds / len(asked))


def time_shape(machine: Machine, shape: AttentionShape, seconds: float) -> Timing:
    """Compare and time both for one shape."""
    kind, dtype, width, most = shape
    arch, torch = machine.live.arch, machine.torch
    q_heads, kv_heads = HEADS[arch]
    device = TORCH_DEVICES[arch]
    generator = torch.Generator(device).manual_seed(0)

    def numbers(*sizes: int) -> Any:
        return (torch.rand(sizes, generator=generator, device=device) - 0.5).to(getattr(torch, dtype))

    q, k, v = numbers(1, q_heads, most, width), *(numbers(1, kv_heads, shape.keys, width) for _ in "kv")
    out = torch.empty_like(q)

    def attend(impl: str, less: int = 0) -> None:
        queries = most - less if kind == SQUARE else most
        asked, to = q[:, :, :queries], out[:, :, :queries]
        attention.decode_attention(asked, k, v, shape.keys - less, out=to, causal=kind != FULL, impl=impl)

    results, best = [], {}
    for impl in ("taichi", "torch"):
        attend(impl)
        results.append(out.float().clone())  # without the copy it may be `out` itself
        best[impl] = float("inf")
    if not bool((results[0] - results[1]).abs().max() <= TOLERANCE[dtype]):
        raise TikvError(
            f"bench: tikv's and torch's attention differ, for {most} {dtype} queries of {width} columns over "
            f"{shape.keys} keys, {kind}. Run `tikv support` and report what it says."
        )
    longest = max(machine.seconds(functools.partial(attend, impl), 1) for impl in best)
    calls = max(1, min(CALLS[arch], int(LONGEST / longest)))
    end = time.perf_counter() + seconds
    for rounds in range(MOST_ROUNDS):
        if rounds >= ROUNDS and time.perf_counter() >= end:
            break
        less = rounds + 1 if machine.live.is_cuda else 0
        for impl in best:
            best[impl] = min(best[impl], machine.seconds(functools.partial(attend, impl, less), calls))
    taken = (round(best[impl] * 1e6, 1) for impl in ("taichi", "torch"))
    return Timing(kind, dtype, width, most, shape.keys, *taken)


def timings(rows: list[Timing]) -> Timings:
    """The measured rows in the file's form."""
    return Timings(datetime.date.today().isoformat(), runtime.version_of("torch") or "", tuple(rows))
