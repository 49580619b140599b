"""The methods of `shared.methods` on the model of the examples: what each needs of a prompt, and what it then keeps."""

from collections.abc import Callable

import numpy as np

import tikv
from shared import methods
from shared.model import Model, rotate

SINKS = 4
OBSERVED = 16  # newest queries that an observation window asks
LATER = 96  # positions whose queries Expected Attention expects
MERGED = 8  # kept tokens that get a part of a dropped value
STREAMED = 32  # tokens that a head which streams keeps at least


class Prompt:
    """The model's memory (`model.Memory`) in a store, and the rows of the prompt in the layers that see all tokens."""

    def __init__(self, model: Model, capacity: int):
        self.model, self.replays = model, False
        self.form = {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim, "capacity": capacity}
        self.form |= {"dtype": "float16", "num_layers": model.num_layers}
        self.store = tikv.KVCacheStore(**self.form, window=model.windows)
        self.layers = [i for i, window in enumerate(model.windows) if window is None]
        self.heads: dict[int, tikv.StreamingHeadsStore] = {}  # one for each layer, instead of the store
        self.rows: dict[int, tuple] = {}
        self.repeated: dict[int, tuple] = {}
        self.mass: dict[int, np.ndarray] = {}

    def read(self, ids: list[int]) -> np.ndarray:
        """Read a prompt, and the same text again over it, which is not kept; returns the next token's logits."""
        self.heads.clear()
        self.store.reset()
        logits = self.model.forward(ids, 0, self)[-1]
        self.replays = True
        self.model.forward(ids, len(ids), self)
        self.replays = False
        return logits

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append and attend; of a prompt, note its rows."""
        if layer in self.heads:
            return self.heads[layer].extend(0, q, k, v)
        if self.replays:
            self.repeated[layer] = q, k, v
            return self.store.extend(layer, q, k, v, keep=False)
        if len(q) > 1:
            self.rows[layer] = q, k, v
        if len(q) == 1 or layer not in self.layers:
            return self.store.extend(layer, q, k, v)
        out, self.mass[layer] = self.store.extend(layer, q, k, v, return_mass="sum")
        return out

    def unrotated(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The queries of the prompt before their rotation, and (cos, sin) of the positions after it."""
        q, frequencies = self.rows[layer][0], self.model._frequencies
        before, after = (np.arange(n, m)[:, None] * frequencies for n, m in ((0, len(q)), (len(q), len(q) + LATER)))
        return rotate(q, np.cos(before)[:, None], -np.sin(before)[:, None]), np.cos(after), np.sin(after)

    def stream(self, count: int) -> None:
        """Let heads stream so that one keeps `count` tokens on average: those that attend least to other tokens."""
        held, heads = len(self.rows[self.layers[0]][0]), self.model.num_kv_heads
        all_heads = len(self.layers) * heads
        whole = max(0, int(all_heads * (count - STREAMED) / (held - STREAMED)))
        window = (all_heads * count - whole * held) // (all_heads - whole)
        far = [self.mass[layer][0, :, SINKS : held - window].sum(axis=-1) for layer in self.layers]
        mask = methods.streaming_heads(np.array(far), 1 - whole / all_heads)
        masks = dict(zip(self.layers, mask, strict=True))
        for layer, sliding in enumerate(self.model.windows):
            kinds = {"whole": masks.get(layer, np.zeros(heads, bool)), "window": sliding or window}
            kinds["sinks"] = 0 if sliding else SINKS
            store = self.heads[layer] = tikv.StreamingHeadsStore(**self.form | {"num_layers": 1}, **kinds)
            store.append(0, *self.rows[layer][1:])

    @property
    def kept_bytes(self) -> int:
        """Bytes of the keys and values that are held."""
        row, count = 2 * self.store.head_dim * 2, 0
        for layer in range(self.store.num_layers):
            held = self.heads[layer].held(0) if layer in self.heads else self.store.held(layer)
            count += int(np.broadcast_to(held, (1, self.store.num_kv_heads)).sum())
        return count * row


def in_each(method: Callable[[Prompt, int, int], object]) -> Callable[[Prompt, int], None]:
    """A method that works on one layer, on all that see all tokens."""

    def run(prompt: Prompt, count: int) -> None:
        for layer in prompt.layers:
            method(prompt, layer, count)

    return run


def most_attended(prompt: Prompt, layer: int, count: int) -> np.ndarray:
    """What H2O keeps after a prompt; half are the newest tokens."""
    return methods.highest(prompt.mass[layer], count, recent=count // 2)


def h2o(prompt: Prompt, layer: int, count: int) -> None:
    """H2O's choice after a prompt."""
    prompt.store.compact(layer, most_attended(prompt, layer, count))


def cam(prompt: Prompt, layer: int, count: int) -> None:
    """The same choice; CaM merges what it drops."""
    keep, rng = most_attended(prompt, layer, count), np.random.default_rng(layer)
    methods.cam(prompt.store, layer, prompt.mass[layer], keep, MERGED, rng)


def tova(prompt: Prompt, layer: int, count: int) -> None:
    """TOVA's choice, from the newest query."""
    methods.tova(prompt.store, layer, prompt.rows[layer][0], count)


def snapkv(prompt: Prompt, layer: int, count: int) -> None:
    """SnapKV's choice, from the newest queries."""
    methods.snapkv(prompt.store, layer, prompt.rows[layer][0][-OBSERVED:], count)


def adakv(prompt: Prompt, layer: int, count: int) -> None:
    """Ada-KV's choice, from the newest queries."""
    methods.adakv(prompt.store, layer, prompt.rows[layer][0][-OBSERVED:], count)


def expected_attention(prompt: Prompt, layer: int, count: int) -> None:
    """Expected Attention's choice, from the queries of the prompt."""
    methods.expected_attention(prompt.store, layer, *prompt.unrotated(layer), count, SINKS)


def pyramidkv(prompt: Prompt, count: int) -> None:
    """PyramidKV's numbers for the layers, and SnapKV's choice."""
    numbers = methods.pyramidkv(len(prompt.layers), count, OBSERVED)
    most = len(prompt.rows[prompt.layers[0]][0])
    for layer, number in zip(prompt.layers, numbers, strict=True):
        snapkv(prompt, layer, min(number, most))


def kvzip(prompt: Prompt, count: int) -> None:
    """KVzip's choice over all layers that see all tokens."""
    held = len(prompt.rows[prompt.layers[0]][0])
    methods.kvzip(prompt.store, {i: prompt.repeated[i] for i in prompt.layers}, count / held)


NAMED: dict[str, Callable[[Prompt, int], None]] = {
    "H2O": in_each(h2o),
    "CaM over H2O": in_each(cam),
    "TOVA": in_each(tova),
    "SnapKV": in_each(snapkv),
    "Ada-KV": in_each(adakv),
    "PyramidKV": pyramidkv,
    "KVzip": kvzip,
    "Expected Attention": in_each(expected_attention),
    "DuoAttention's storage": Prompt.stream,
}
