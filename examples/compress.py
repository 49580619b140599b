"""Decide which tokens a KV cache keeps: six methods from the literature, each in a few lines, on a small model.

    python examples/compress.py
    python examples/compress.py --table --excerpts 4    # nine methods by their names, from shared/named.py
    python examples/compress.py --table --json FILE     # the same as a file for benches/tables.py
    python examples/compress.py --keep 0.5 0.25 --excerpts 4
    python examples/compress.py --plot compress.png     # needs matplotlib
    python examples/compress.py --text my_module.py     # Python source: the model was trained on it

The prompt is read in one prefill. Then each layer that sees all tokens keeps a share of them, chosen by one of the
methods below, and the text continues token by token. The cost of a method is the log-likelihood that the text loses.
The table has the bytes of the kept keys and values, the loss in nats per token, and the median time of a token.

A method gets the tokens that a layer holds (`Layer`) and says which of them each head keeps. `KVCacheStore.compact`
does the rest: it moves rows together in place, and queries still see tokens at their true positions.
"""

import argparse
import datetime
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small

import numpy as np
from shared import loss
from shared.model import Model
from shared.named import NAMED, Prompt

import tikv

SINKS = 4  # first tokens that streaming keeps
WINDOW = 16  # newest queries that an observation window asks, and newest tokens that it keeps
POOL = 5  # neighbours over which its scores are averaged
SAFE = 0.2  # of a head's budget, what other heads cannot take


@dataclass
class Layer:
    """What one layer holds after the prompt: H heads, n tokens.

    Attributes:
        keys: (H, n, D).
        mass: (H, n) attention that all queries of the prompt gave each token.
        window: (H, n) the same of the newest queries.
    """

    keys: np.ndarray
    mass: np.ndarray
    window: np.ndarray


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """The indices of each head's highest scores, ascending: (H, count)."""
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[:, :count], axis=-1)


# --- the ways: what each head keeps, as indices (H, count) or a mask (H, n)


def streaming(layer: Layer, count: int) -> np.ndarray:
    """The first tokens and the newest: attention sinks and a window."""
    heads, held = layer.mass.shape
    sinks = min(SINKS, count)
    return np.tile(np.r_[:sinks, held - count + sinks : held], (heads, 1))


def heavy_hitters(layer: Layer, count: int) -> np.ndarray:
    """The tokens that were attended to most."""
    return best(layer.mass, count)


def key_norm(layer: Layer, count: int) -> np.ndarray:
    """The shortest keys."""
    return best(-np.linalg.norm(layer.keys, axis=-1), count)


def key_difference(layer: Layer, count: int) -> np.ndarray:
    """The keys least like the mean key."""
    unit = layer.keys / np.linalg.norm(layer.keys, axis=-1, keepdims=True)
    mean = unit.mean(axis=1, keepdims=True)
    return best(-(unit * mean).sum(axis=-1) / np.linalg.norm(mean, axis=-1), count)


def observation(layer: Layer) -> np.ndarray:
    """Scores (H, n): what the newest queries attend to, averaged over neighbours; the newest tokens stay."""
    padded = np.pad(layer.window, ((0, 0), (POOL // 2, POOL // 2)))
    scores = np.lib.stride_tricks.sliding_window_view(padded, POOL, axis=-1).mean(axis=-1)
    scores[:, -WINDOW:] = scores.max() + 1
    return scores


def observation_window(layer: Layer, count: int) -> np.ndarray:
    """The tokens that the newest queries attend to, with their neighbours."""
    return best(observation(layer), count)


def budgets_by_head(layer: Layer, count: int) -> np.ndarray:
    """The same scores, compared across heads: one that looks at few tokens leaves its room to the others."""
    scores = observation(layer)
    heads, held = scores.shape
    np.put_along_axis(scores, best(scores, max(1, int(SAFE * count))), np.inf, axis=-1)
    mask = np.ones(heads * held, bool)
    mask[np.argsort(scores, axis=None, kind="stable")[: heads * (held - count)]] = False
    return mask.reshape(heads, held)


WAYS: dict[str, Callable[[Layer, int], np.ndarray]] = {
    "streaming": streaming,
    "heavy hitters": heavy_hitters,
    "key norm": key_norm,
    "key difference": key_difference,
    "observation window": observation_window,
    "budgets by head": budgets_by_head,
}


class Memory:
    """The model's memory (`model.Memory`) in a store, and what it saw of the prompt."""

    def __init__(self, model: Model, capacity: int):
        self.store = tikv.KVCacheStore(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype="float16",
            window=model.windows,
        )
        self.whole = [i for i, window in enumerate(model.windows) if window is None]
        self.seen: dict[int, Layer] = {}

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append and attend; of a prompt, note which tokens its queries looked at."""
        if len(q) == 1 or layer not in self.whole:
            return self.store.extend(layer, q, k, v)
        out, mass = self.store.extend(layer, q, k, v, return_mass=True)
        _, window = self.store.attend(layer, q[-WINDOW:], return_mass=True)
        keys = np.asarray(self.store.tokens(layer)[0]).astype(np.float32)[0]
        self.seen[layer] = Layer(keys, mass[0], window[0])
        return out

    def compact(self, way: Callable[[Layer, int], np.ndarray], share: float) -> None:
        """Let each head of the layers that see all tokens keep a share of them."""
        for index, layer in self.seen.items():
            count = max(1, int(layer.mass.shape[1] * share))
            self.store.compact(index, way(layer, count)[None])

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values that are held."""
        row = 2 * self.store.head_dim * 2
        heads = self.store.num_kv_heads
        held = [np.broadcast_to(self.store.held(i), (1, heads)).sum() for i in range(self.store.num_layers)]
        return int(sum(held)) * row


def measure(model: Model, excerpts: list[list[int]], prompt: int, shares: list[float]) -> list[tuple]:
    """Rows of (way, share, bytes kept, nats lost per token, milliseconds per token); the first drops nothing."""
    memory = Memory(model, max(map(len, excerpts)))
    found: dict[tuple[str, float], list[tuple[int, float, float]]] = {}
    for ids in excerpts:
        memory.store.reset()
        logits = model.forward(ids[:prompt], 0, memory)[-1]
        after_prompt, seen = memory.store.snapshot(), dict(memory.seen)
        cases = [("everything", 1.0), *((name, share) for name in WAYS for share in shares)]
        best_possible = 0.0
        for name, share in cases:
            memory.store.restore(after_prompt)
            memory.seen = dict(seen)
            if name != "everything":
                memory.compact(WAYS[name], share)
            kept = memory.kept_bytes
            nats, seconds = loss.log_likelihood(model, memory, logits, ids[prompt:], prompt)
            if name == "everything":
                best_possible = nats
            found.setdefault((name, share), []).append((kept, best_possible - nats, seconds * 1e3))
    return [(name, share, *np.mean(rows, axis=0).tolist()) for (name, share), rows in found.items()]


def measure_named(model: Model, excerpts: list[list[int]], prompt: int, shares: list[float]) -> list[tuple]:
    """The rows of `measure` for the methods of `NAMED`."""
    memory = Prompt(model, max(map(len, excerpts)))
    sums: dict[tuple[str, float], list[tuple[int, float, float]]] = {}
    for ids in excerpts:
        logits = memory.read(ids[:prompt])
        after_prompt, best_possible = memory.store.snapshot(), 0.0
        for name, share in [("everything", 1.0), *((name, share) for name in NAMED for share in shares)]:
            memory.store.restore(after_prompt)
            memory.heads.clear()
            if name != "everything":
                NAMED[name](memory, max(1, int(prompt * share)))
            kept = memory.kept_bytes
            nats, seconds = loss.log_likelihood(model, memory, logits, ids[prompt:], prompt)
            best_possible = nats if name == "everything" else best_possible
            sums.setdefault((name, share), []).append((kept, best_possible - nats, seconds * 1e3))
    return [(name, share, *np.mean(rows, axis=0).tolist()) for (name, share), rows in sums.items()]


def table(rows: list[tuple], command: str) -> dict:
    """A file of one table, as benches/tables.py writes it into a page: a row for each method, with all shares."""
    texts = []
    for name in dict.fromkeys(name for name, *_ in rows):
        numbers = [row[1:] for row in rows if row[0] == name]
        columns = zip(*[(f"{a:g}", f"{b / 1024:.1f}", f"{c:.3f}", f"{d:.1f}") for a, b, c, d in numbers], strict=True)
        texts.append([name, *(" / ".join(column) for column in columns)])
    about = {"devices": {"cpu": "a CPU"}, "versions": {}, "date": datetime.date.today().isoformat()}
    columns = ["method", "share of the tokens", "KiB kept", "nats lost", "ms a token"]
    title = "Methods by name, and the loss of a small model"
    made = {"title": title, "command": command, "columns": columns, "rows": texts}
    return {"form": 1, "small": False, "environment": about, "tables": [made], "left_out": {}}


def lines(rows: list[tuple]) -> list[loss.Line]:
    """Bytes kept against the loss, for each way."""
    return [
        (way, sorted((kept / 1024, nats) for name, _, kept, nats, _ in rows if name in (way, "everything")))
        for way in dict.fromkeys(name for name, *_ in rows if name != "everything")
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--keep", type=float, nargs="+", default=[0.5, 0.25, 0.125], help="shares of the tokens to keep"
    )
    parser.add_argument("--prompt", type=int, default=192, help="tokens in the prompt")
    parser.add_argument("--continuation", type=int, default=96, help="tokens whose likelihood is measured")
    parser.add_argument("--table", action="store_true", help="measure the methods of shared/named.py instead")
    parser.add_argument("--json", type=Path, help="with --table, write the table to this file")
    loss.add_options(parser)
    given = parser.parse_args()
    model = Model.load(Path(__file__).parent / "model")
    length = given.prompt + given.continuation
    if not all(0 < share <= 1 for share in given.keep) or given.prompt < WINDOW or given.continuation < 1:
        parser.error(f"--keep takes shares between 0 and 1, --prompt at least {WINDOW}, --continuation at least 1")
    if length > model.config["max_position_embeddings"]:
        parser.error(
            f"--prompt and --continuation are at most {model.config['max_position_embeddings']} tokens together"
        )
    texts = loss.excerpts(parser, given, model, length)

    rows = (measure_named if given.table else measure)(model, texts, given.prompt, given.keep)
    if given.json:
        command = f"python examples/compress.py --table --excerpts {given.excerpts}"
        given.json.write_text(json.dumps(table(rows, command), indent=1) + "\n", encoding="utf-8")
    print(f"{'method':<22} {'share':>6} {'KiB kept':>9} {'nats lost':>10} {'ms/token':>11}")
    for name, share, kept, nats, milliseconds in rows:
        print(f"{name:<22} {share:>6.3f} {kept / 1024:>9.1f} {nats:>10.3f} {milliseconds:>11.2f}")
    if given.plot:
        loss.plot(given.plot, lines(rows), "KiB of keys and values kept", "What a cache keeps")


if __name__ == "__main__":
    main()
