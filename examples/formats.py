"""How many bits does a KV cache need? Every format of `tikv`, measured on a small model.

    python examples/formats.py
    python examples/formats.py --formats float16 q8_0 quant4_32 --excerpts 4
    python examples/formats.py --plot formats.png       # needs matplotlib
    python examples/formats.py --text my_module.py      # Python source: the model was trained on it

A text is read token by token, with keys and values kept in one of the formats. The cost of a format is the
log-likelihood that the text loses. The table has the bytes of a token's keys and values over all layers, the loss in
nats per token, and tokens per second: for the model, and for attention alone over a long cache (`--context` tokens of
random numbers), which takes most of the time in longer texts.

"_hadamard" rotates keys before they are quantised. "_tokens" quantises keys by channel over groups of tokens, and keeps
the newest 32 to 64 in float16; "_recent" does so too, and quantises older ones by token. "kvarn" quantises
full tiles of 64 tokens.
"""

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small

import numpy as np
from shared import loss
from shared.model import Model

import tikv

FORMATS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    **{f"quant{bits}_32": tikv.Quant(bits=bits, group=32) for bits in (8, 4, 3, 2)},
    **{f"quant{bits}_32_hadamard": tikv.Quant(bits=bits, group=32, rotate="hadamard") for bits in (4, 3, 2)},
    **{f"quant{bits}_32_tokens": tikv.Quant(bits=bits, group=32, axis="tokens", residual=32) for bits in (4, 3, 2)},
    **{f"quant{bits}_32_recent": tikv.Quant(bits=bits, group=32, recent=32) for bits in (4, 3, 2)},
    **{name: name for name in ("kvarn_k4v4_g64", "kvarn_k4v2_g64")},
}
PLAIN = "float32"  # what the others are compared with
TURNS = 7  # of the timing over a long cache, of which the median counts


class Memory:
    """The model's memory (`model.Memory`) in a store of one format."""

    def __init__(self, model: Model, capacity: int, name: str):
        self.store = tikv.KVCacheStore(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype=FORMATS[name],
            window=model.windows,
        )

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append the rows of a token, and attend over what the store now holds, the token as it is kept."""
        self.store.append(layer, k, v)
        return self.store.attend(layer, q)


def log_likelihood(model: Model, memory: Memory, ids: list[int]) -> tuple[float, float]:
    """(nats per token, median seconds per token) of a text that is read token by token."""
    total, times = 0.0, []
    memory.store.reset()
    for position, (token, following) in enumerate(itertools.pairwise(ids)):
        start = time.perf_counter()
        row = model.forward([token], position, memory)[-1].astype(np.float64)
        times.append(time.perf_counter() - start)
        total += row[following] - row.max() - np.log(np.exp(row - row.max()).sum())
    return total / len(times), float(np.median(times))


def long_cache(model: Model, context: int, name: str) -> tuple[int, float]:
    """(bytes of a token over all layers, median seconds of attention of a token in one layer over `context` tokens)."""
    heads, width = model.num_kv_heads, model.head_dim
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=heads, head_dim=width, capacity=context, dtype=FORMATS[name])
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((context, heads, width), dtype=np.float32)
    store.append(0, rows, rows)
    q = rng.standard_normal((1, model.num_heads, width), dtype=np.float32)
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        store.attend(0, q)
        times.append(time.perf_counter() - start)
    return round(store.nbytes * model.num_layers / context), float(np.median(times))


def measure(model: Model, excerpts: list[list[int]], names: list[str], context: int) -> list[tuple]:
    """Rows of (format, bytes per token, nats lost per token, tokens/s of the model, tokens/s of attention)."""
    rows = []
    plain = None
    names = [PLAIN, *(name for name in names if name != PLAIN)]
    for number, name in enumerate(names):
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {len(names)}: {name:<20}", end="", file=sys.stderr, flush=True)
        memory = Memory(model, model.config["max_position_embeddings"], name)
        nats, seconds = np.mean([log_likelihood(model, memory, ids) for ids in excerpts], axis=0)
        plain = nats if plain is None else plain
        nbytes, long_seconds = long_cache(model, context, name)
        rows.append((name, nbytes, float(plain - nats), float(1 / seconds), 1 / (long_seconds * model.num_layers)))
    if sys.stderr.isatty():
        print("\r" + " " * 32 + "\r", end="", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT",
                        help=f"any of {', '.join(FORMATS)}; {PLAIN} is always included")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=256, help="tokens in an excerpt")
    parser.add_argument("--context", type=int, default=32768, help="tokens in the long cache")
    loss.add_options(parser)
    given = parser.parse_args()
    model = Model.load(Path(__file__).parent / "model")
    most = model.config["max_position_embeddings"]
    if not 2 <= given.tokens <= most or given.excerpts < 1 or given.context < 1:
        parser.error(f"--tokens takes 2 to {most}, --excerpts and --context at least 1")
    texts = loss.excerpts(parser, given, model, given.tokens)

    rows = measure(model, texts, given.formats, given.context)
    print(f"{'format':<18} {'bytes/token':>13} {'nats lost':>10} {'tokens/s':>9} {'attention, tokens/s':>20}")
    for name, nbytes, nats, rate, long_rate in rows:
        print(f"{name:<18} {nbytes:>13,} {nats:>10.4f} {rate:>9,.0f} {long_rate:>20,.0f}")
    if given.plot:
        lines = [(name, [(nbytes, nats)]) for name, nbytes, nats, _, _ in rows]
        loss.plot(given.plot, lines, "bytes of a token", "What a format costs", xscale="log")


if __name__ == "__main__":
    main()
