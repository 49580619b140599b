#!/usr/bin/env python3
"""Speculative decoding with a tree: one pass of the model verifies several guesses of how the text continues.

    python examples/speculative.py --tokens 120
    python examples/speculative.py --branches 4 --depth 8

The draft is what followed the last two tokens earlier in the text; guesses with a common beginning share their nodes.
One pass gives the likeliest token after every node. Tokens of a branch that match it are accepted, and
`KVCacheStore.commit` keeps their keys and values. The text is that of plain decoding, token for token.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from shared.model import FILE_START, Model

import tikv

WINDOW_OF_GUESS = 2  # tokens that have to agree for what followed them to be a guess


class TreeMemory:
    """Keys and values of all tokens in a `tikv.KVCacheStore`; the new tokens of a call may be a tree.

    Sliding layers are stored whole as well and read through their window: a ring would have overwritten what queries
    see after a draft that was dropped.
    """

    def __init__(self, model: Model, capacity: int):
        self.windows = model.windows
        self.parents: np.ndarray | None = None  # of the next call's tokens, (1, T); None for one after the other
        self.store = tikv.KVCacheStore(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype="float32",
        )

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append the rows and attend. Shapes as in `shared.model.Memory`."""
        self.store.append(layer, k, v)
        queries = np.ascontiguousarray(q.transpose(1, 0, 2)[None])
        keys, values = self.store.keys(layer), self.store.values(layer)
        length = self.store.layer_length(layer)
        out = tikv.decode_attention(
            queries, keys, values, length, window=self.windows[layer], parents=self.parents, impl="taichi"
        )
        return np.asarray(out)[0].transpose(1, 0, 2)


def guesses(ids: list[int], branches: int, depth: int) -> list[list[int]]:
    """What followed the last tokens wherever they stood before, the newest first."""
    found: list[list[int]] = []
    tail = ids[-WINDOW_OF_GUESS:]
    for end in range(len(ids) - 1, WINDOW_OF_GUESS - 1, -1):
        if len(found) == branches:
            break
        if ids[end - WINDOW_OF_GUESS : end] == tail:
            guess = ids[end : end + depth]
            if guess not in found:
                found.append(guess)
    return found


def tree_of(root: int, branches: list[list[int]]) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a tree whose branches share what they begin with; a parent comes before its children."""
    tokens, parents = [root], [-1]
    for branch in branches:
        node = 0
        for token in branch:
            child = next((i for i, p in enumerate(parents) if p == node and tokens[i] == token), None)
            if child is None:
                child = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, parents


def write(model: Model, prompt: list[int], count: int, branches: int, depth: int) -> tuple[list[int], int]:
    """(tokens, passes): the likeliest tokens after a prompt, some of a branch at a time; 0 branches for one."""
    memory = TreeMemory(model, len(prompt) + count + branches * depth + 1)
    token = int(model.forward(prompt, 0, memory)[-1].argmax())
    text, passes = list(prompt), 0
    while len(text) < len(prompt) + count:
        tokens, parents = tree_of(token, guesses([*text, token], branches, depth))
        depths = np.zeros(len(tokens), np.int64)
        for node, parent in enumerate(parents[1:], 1):
            depths[node] = depths[parent] + 1
        memory.parents = np.array([parents], np.int32)
        likeliest = model.forward(tokens, len(text) + depths, memory).argmax(axis=-1)
        passes += 1
        path = [0]
        while True:
            token = int(likeliest[path[-1]])
            child = next((i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == token), None)
            if child is None:
                break
            path.append(child)
        memory.store.commit(path)
        text += [tokens[node] for node in path]
    return text[len(prompt) : len(prompt) + count], passes


def main() -> None:
    """Write the same text both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="class Cache:\n    def __init__(self", help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=120, help="tokens to write (default %(default)s)")
    parser.add_argument("--branches", type=int, default=3, help="guesses per step (default %(default)s)")
    parser.add_argument("--depth", type=int, default=6, help="tokens per guess (default %(default)s)")
    parser.add_argument("--arch", default="auto", help="tikv's back end: auto, cpu, cuda, vulkan or metal")
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parent / "model", help="folder that train.py wrote"
    )
    args = parser.parse_args()
    for name in ("tokens", "branches", "depth"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: must be at least 1")
    tikv.init(arch=args.arch)
    model = Model.load(args.model)
    prompt = model.tokenizer.encode(FILE_START + args.prompt)
    texts = {}
    for name, branches in (("one by one", 0), ("in branches", args.branches)):
        write(model, prompt, args.tokens, branches, args.depth)  # compiles: trees of other sizes are other kernels
        start = time.perf_counter()
        texts[name], passes = write(model, prompt, args.tokens, branches, args.depth)
        seconds = time.perf_counter() - start
        print(f"{name}: {args.tokens} tokens in {passes} passes, {args.tokens / passes:.2f} per pass, {seconds:.2f} s")
    first, second = texts.values()
    print(args.prompt + model.tokenizer.decode(second))
    if first != second:
        raise SystemExit("The texts differ.")


if __name__ == "__main__":
    main()
