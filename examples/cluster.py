"""Predict how long a decode step takes on a cluster that shares one KV cache, from link speed and memory speed.

    python examples/cluster.py                                     # a table for known models, 2 to 64 ranks
    python examples/cluster.py --tokens 1000000 --batch 4 --link 50 --latency 15
    python examples/cluster.py --model Llama-3.1-70B --ranks 8 --trace step.json    # for chrome://tracing

If the cache is split by tokens, each rank reads its share of a layer from memory and gathers small partial results from
all ranks. If it is split by heads, nothing is sent. The model's own work is left out, since it is the same either way.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

RANKS = (2, 4, 8, 16, 32, 64)


class Shape(NamedTuple):
    """What of a model its cache depends on."""

    layers: int
    query_heads: int
    kv_heads: int
    width: int


MODELS = {
    "Llama-3.1-8B": Shape(32, 32, 8, 128),
    "Llama-3.1-70B": Shape(80, 64, 8, 128),
    "Qwen3-32B": Shape(64, 64, 8, 128),
}


def cache_bytes(shape: Shape, tokens: int, batch: int, itemsize: int = 2) -> int:
    """Bytes of keys and values of all layers."""
    return 2 * itemsize * batch * tokens * shape.layers * shape.kv_heads * shape.width


def gathered_bytes(shape: Shape, ranks: int, batch: int, queries: int = 1) -> int:
    """Bytes that a rank receives per step, split by tokens: from each other rank a float32 result and log-sum-exp."""
    return 4 * (ranks - 1) * shape.layers * batch * shape.query_heads * queries * (shape.width + 1)


def sent_bytes(shape: Shape, tokens: int, block: int = 16, itemsize: int = 2) -> int:
    """Bytes of a sequence that `send_sequence` sends: its blocks in all layers."""
    return cache_bytes(shape, -(-tokens // block) * block, 1, itemsize)


class Cluster(NamedTuple):
    """What a step's time depends on beside the model."""

    memory: float  # bytes a second that a rank reads
    link: float  # bytes a second that a rank receives
    latency: float  # seconds of a collective, whatever its size


def step_seconds(shape: Shape, ranks: int, tokens: int, batch: int, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a decode step: reading the rank's share of the cache, and gathering."""
    read = cache_bytes(shape, -(-tokens // ranks), batch) / cluster.memory
    gather = shape.layers * cluster.latency + gathered_bytes(shape, ranks, batch) / cluster.link
    return read, gather if ranks > 1 else 0.0


def table(tokens: int, batch: int, cluster: Cluster) -> str:
    """The table of docs/many_devices.md."""
    lines = [
        "| model | ranks | cache per rank | received per step | read | gather | step | one rank |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, shape in MODELS.items():
        alone = sum(step_seconds(shape, 1, tokens, batch, cluster))
        for ranks in RANKS:
            read, gather = step_seconds(shape, ranks, tokens, batch, cluster)
            lines.append(
                f"| {name} | {ranks} | {cache_bytes(shape, -(-tokens // ranks), batch) / 1e9:.2f} GB | "
                f"{gathered_bytes(shape, ranks, batch) / 1e6:.2f} MB | {read * 1e3:.2f} ms | {gather * 1e3:.2f} ms | "
                f"{(read + gather) * 1e3:.2f} ms | {alone * 1e3:.2f} ms |"
            )
    return "\n".join(lines)


def trace(shape: Shape, ranks: int, tokens: int, batch: int, cluster: Cluster) -> dict:
    """A step of a simulated cluster, as a trace for Chrome: one row per rank, in microseconds."""
    read, gather = (seconds / shape.layers for seconds in step_seconds(shape, ranks, tokens, batch, cluster))
    events = []
    for rank in range(ranks):
        at = 0.0
        for layer in range(shape.layers):
            for name, seconds in ((f"attend {layer}", read), (f"all_gather {layer}", gather)):
                events.append({"name": name, "ph": "X", "pid": 0, "tid": rank, "ts": at * 1e6, "dur": seconds * 1e6})
                at += seconds
    return {"traceEvents": events}


def main() -> int:
    """Print the table, or write a trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=524288, help="tokens in each sequence (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="number of sequences (default %(default)s)")
    parser.add_argument(
        "--memory", type=float, default=3900, help="memory bandwidth of a rank in GB/s (default %(default)s)"
    )
    parser.add_argument(
        "--link", type=float, default=350, help="bandwidth at which a rank receives, in GB/s (default %(default)s)"
    )
    parser.add_argument(
        "--latency", type=float, default=35, help="time of a small collective in us (default %(default)s)"
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="Llama-3.1-70B", help="model for the trace")
    parser.add_argument("--ranks", type=int, default=8, help="ranks for the trace (default %(default)s)")
    parser.add_argument("--trace", type=Path, help="write the trace of one simulated step to this file")
    args = parser.parse_args()
    for name in ("tokens", "batch", "memory", "link", "latency", "ranks"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: must be more than 0")
    cluster = Cluster(args.memory * 1e9, args.link * 1e9, args.latency * 1e-6)
    if args.trace is None:
        print(table(args.tokens, args.batch, cluster))
        return 0
    found = trace(MODELS[args.model], args.ranks, args.tokens, args.batch, cluster)
    try:
        args.trace.write_text(json.dumps(found), encoding="utf-8")
    except OSError as error:
        parser.error(f"--trace {args.trace}: {error.strerror}")
    print(f"{args.trace}: {len(found['traceEvents'])} events", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
