"""Decide which tokens each query reads: three ways from the literature, on a small model whose cache keeps everything.

    python examples/choose.py
    python examples/choose.py --read 96 48 24 --excerpts 4
    python examples/choose.py --plot choose.png         # needs matplotlib
    python examples/choose.py --text my_module.py       # Python source: the model was trained on it

The prompt is read in one prefill. Then the text continues token by token, and in each layer that sees all tokens, a
query reads only some of them. The cost of a method is the log-likelihood that the text loses. The table has the bytes
of keys, values and summaries that are read for a token, the loss in nats, and the median time.

A method returns the tokens for each KV head; `KVCacheStore.attend(indices=)` reads only those rows, in place.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small

import numpy as np
from shared import loss
from shared.model import Model

import tikv

PAGE = 8  # tokens that are chosen together
SINKS = 4  # first tokens that are always read

Choice = tuple[np.ndarray, int]  # tokens (1, H or none, 1, K), and the rows that were read to choose them


# --- the ways: which tokens of a store's layer a query (1, Hq, D) shall read, `count` at most


def window(q: np.ndarray, store: tikv.KVCacheStore, layer: int, count: int) -> Choice:
    """The first tokens and the newest, whatever the query: attention sinks and a recent window."""
    length = store.held(layer)
    newest = max(SINKS, length - (count - SINKS))
    return np.r_[: min(SINKS, length), newest:length][None, None], 0


def quest(q: np.ndarray, store: tikv.KVCacheStore, layer: int, count: int) -> Choice:
    """The pages whose least and greatest keys, which the store keeps, could score highest."""
    length = store.held(layer)
    least, greatest = store.page_summaries(layer)
    scores = tikv.page_scores(q, least, greatest, length, page=PAGE)
    chosen = tikv.select(scores, count // PAGE, page=PAGE, sinks=SINKS, recent=1, valid=length)
    return chosen, 2 * store.num_kv_heads * -(-length // PAGE)


def block_mean(q: np.ndarray, store: tikv.KVCacheStore, layer: int, count: int) -> Choice:
    """The pages whose mean key scores highest, as MoBA chooses blocks."""
    keys = np.asarray(store.tokens(layer)[0])  # a program that is fast keeps the means
    _, heads, length, dim = keys.shape
    starts = np.arange(0, length, PAGE)
    means = np.add.reduceat(keys.astype(np.float32), starts, axis=2) / np.diff(np.r_[starts, length])[:, None]
    scores = np.einsum("hgd,hpd->hp", q.reshape(heads, -1, dim), means[0].astype(np.float32))
    chosen = tikv.select(scores[None, :, None], count // PAGE, page=PAGE, sinks=SINKS, recent=1, valid=length)
    return chosen, heads * len(starts)


Way = Callable[[np.ndarray, tikv.KVCacheStore, int, int], Choice]
WAYS: dict[str, Way] = {
    "window and sinks": window,
    "block mean": block_mean,
    "quest": quest,
}


class Memory:
    """The model's memory (`model.Memory`) in a store; `way` and `count` say what queries read, and None all."""

    def __init__(self, model: Model, capacity: int):
        self.store = tikv.KVCacheStore(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype="float16",
            window=model.windows,
            page_summaries=PAGE,
        )
        self.windows = model.windows
        self.way: Way | None = None
        self.count = 0
        self.rows_read = 0  # of one head: keys, values, and summaries

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append, and attend to what the way chooses in layers that see all tokens."""
        heads = self.store.num_kv_heads
        if len(q) == 1 and self.way is not None and self.windows[layer] is None:
            self.store.append(layer, k, v)
            indices, summaries = self.way(q, self.store, layer, self.count)
            chosen = int((indices >= 0).sum()) * (1 if indices.ndim == 4 else heads)
            self.rows_read += 2 * chosen + summaries
            return self.store.attend(layer, q, indices=indices)
        out = self.store.extend(layer, q, k, v)
        self.rows_read += 2 * heads * self.store.held(layer)
        return out


def log_likelihood(
    model: Model, memory: Memory, logits: np.ndarray, ids: list[int], position: int
) -> tuple[float, float, float]:
    """(nats per token, KiB that are read per token, median milliseconds) of a continued text."""
    memory.rows_read = 0
    nats, seconds = loss.log_likelihood(model, memory, logits, ids, position)
    read = memory.rows_read * model.head_dim * 2 / 1024
    return nats, read / len(ids), seconds * 1e3


def measure(model: Model, excerpts: list[list[int]], prompt: int, counts: list[int]) -> list[tuple]:
    """Rows of (way, tokens read, KiB read per token, nats lost per token, milliseconds); the first reads all tokens."""
    memory = Memory(model, max(map(len, excerpts)))
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for ids in excerpts:
        memory.store.reset()
        memory.way = None
        logits = model.forward(ids[:prompt], 0, memory)[-1]
        after_prompt, best_possible = memory.store.snapshot(), 0.0
        for name, count in [("everything", 0), *((name, count) for name in WAYS for count in counts)]:
            memory.store.restore(after_prompt)
            memory.way, memory.count = WAYS.get(name), count
            nats, read, milliseconds = log_likelihood(model, memory, logits, ids[prompt:], prompt)
            if name == "everything":
                best_possible = nats
            found.setdefault((name, count), []).append((read, best_possible - nats, milliseconds))
    return [(name, count, *np.mean(rows, axis=0).tolist()) for (name, count), rows in found.items()]


def lines(rows: list[tuple]) -> list[loss.Line]:
    """Bytes that a token reads against the loss, for each way."""
    return [
        (way, sorted((read, nats) for name, _, read, nats, _ in rows if name in (way, "everything"))) for way in WAYS
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", type=int, nargs="+", default=[96, 48, 24], help="tokens that a query reads")
    parser.add_argument("--prompt", type=int, default=192, help="tokens in the prompt")
    parser.add_argument("--continuation", type=int, default=96, help="tokens whose likelihood is measured")
    loss.add_options(parser)
    given = parser.parse_args()
    model = Model.load(Path(__file__).parent / "model")
    length, most = given.prompt + given.continuation, model.config["max_position_embeddings"]
    if min(given.read) < 2 * PAGE or given.prompt < 1 or given.continuation < 1:
        parser.error(f"--read takes numbers from {2 * PAGE} on, --prompt and --continuation from 1")
    if length > most:
        parser.error(f"--prompt and --continuation are at most {most} tokens together")
    texts = loss.excerpts(parser, given, model, length)

    rows = measure(model, texts, given.prompt, given.read)
    print(f"{'method':<20} {'tokens':>6} {'KiB read':>9} {'nats lost':>10} {'ms/token':>11}")
    for name, count, read, nats, milliseconds in rows:
        print(f"{name:<20} {count or 'all':>6} {read:>9.1f} {nats:>10.3f} {milliseconds:>11.2f}")
    if given.plot:
        loss.plot(given.plot, lines(rows), "KiB that a token reads", "Which tokens a query reads")


if __name__ == "__main__":
    main()
