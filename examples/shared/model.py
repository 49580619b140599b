"""A small language model in NumPy: Qwen3's layer, with sliding-window and global attention in alternation.

Grouped-query attention with a norm on every query and key head, half-split rotary positions, SwiGLU, RMSNorm. The files
read here are Hugging Face's for a Qwen3 model (config.json, model.safetensors) with the vocabulary in config.json.
The memory between tokens is not a part of the model: `Model.forward` hands each layer's new rows to a `Memory`.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

FILE_START = "\0"
OTHER = "\ufffd"


class Memory(Protocol):
    """Where a layer's keys and values go, and what its queries see."""

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Take the rows of T new tokens, k and v (T, H, D), and return what q (T, Hq, D) reads: (T, Hq, D)."""
        ...


class Tokenizer:
    """Text to numbers: the longest known piece first, from left to right."""

    def __init__(self, pieces: Sequence[str]):
        self.pieces = list(pieces)
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._match = re.compile("|".join(map(re.escape, sorted(self.pieces, key=len, reverse=True))))

    @staticmethod
    def clean(text: str) -> str:
        """The text in the characters the model knows: printable ASCII and newline; any other becomes U+FFFD."""
        return re.sub(r"[^\n -~]", OTHER, text.expandtabs(4))

    def encode(self, text: str) -> list[int]:
        """The ids of the pieces; joined again, they give the text."""
        return [self._ids[piece] for piece in self._match.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; the start of a file shows as an empty line."""
        return "".join(self.pieces[i] for i in ids).replace(FILE_START, "\n\n")


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Softmax attention of the newest T tokens over all S, each seeing itself and what came before, within the window.

    Args:
        q: (T, Hq, D), the last T positions of the S.
        k: (H, S, D); query head h reads KV head h // (Hq / H).
        v: (H, S, D).
        window: tokens a query sees, itself included; None for all before it.

    Returns:
        (T, Hq, D) float32.
    """
    tokens, query_heads, dim = q.shape
    heads, length, _ = k.shape
    grouped = (q * dim**-0.5).reshape(tokens, heads, -1, dim).transpose(1, 2, 0, 3).reshape(heads, -1, dim)
    scores = (grouped @ k.transpose(0, 2, 1)).reshape(heads, -1, tokens, length)
    back = np.arange(length - tokens, length)[:, None] - np.arange(length)
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    if hidden.any():
        scores[..., hidden] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = weights.reshape(heads, -1, length) @ v
    return mixed.reshape(heads, -1, tokens, dim).transpose(2, 0, 1, 3).reshape(tokens, query_heads, dim)


class Model:
    """The network. `forward` gives the logits of the next token after each of those it is given.

    Args:
        config: the keys of a Hugging Face Qwen3Config, and "vocabulary".
        weights: arrays by their Hugging Face names; computed with in float32 whatever they are stored in.
    """

    def __init__(self, config: dict, weights: dict[str, np.ndarray]):
        self.config = config
        self.tokenizer = Tokenizer(config["vocabulary"])
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config["head_dim"]
        self.windows = [
            config["sliding_window"] if kind == "sliding_attention" else None for kind in config["layer_types"]
        ]
        self.parameters = sum(value.size for value in weights.values())
        read = {name.removeprefix("model."): value.astype(np.float32) for name, value in weights.items()}
        self.embedding, self.norm = read["embed_tokens.weight"], read["norm.weight"]
        self.layers = [
            {
                "input_norm": read[f"layers.{i}.input_layernorm.weight"],
                "qkv": np.concatenate([read[f"layers.{i}.self_attn.{name}_proj.weight"] for name in "qkv"]),
                "q_norm": read[f"layers.{i}.self_attn.q_norm.weight"],
                "k_norm": read[f"layers.{i}.self_attn.k_norm.weight"],
                "output": read[f"layers.{i}.self_attn.o_proj.weight"],
                "mlp_norm": read[f"layers.{i}.post_attention_layernorm.weight"],
                "gate_up": np.concatenate([read[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]),
                "down": read[f"layers.{i}.mlp.down_proj.weight"],
            }
            for i in range(self.num_layers)
        ]
        self._frequencies = config["rope_theta"] ** -(np.arange(0, self.head_dim, 2) / self.head_dim)

    @classmethod
    def load(cls, folder: Path) -> "Model":
        """Read config.json and model.safetensors from a folder that train.py wrote."""
        from safetensors.numpy import load_file

        return cls(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))

    def excerpts(self, text: str, count: int, length: int) -> list[list[int]]:
        """The first stretches of a text, `length` tokens each, every one read as the beginning of a file.

        Raises:
            ValueError: the text is too short.
        """
        ids, start = self.tokenizer.encode(self.tokenizer.clean(text)), self.tokenizer.encode(FILE_START)
        if len(ids) < length * count:
            raise ValueError(f"has {len(ids)} tokens, and {count} excerpts of {length} are asked for")
        return [start + ids[i * length : (i + 1) * length - len(start)] for i in range(count)]

    def forward(self, ids: Sequence[int], position: int | np.ndarray, memory: Memory) -> np.ndarray:
        """Run T tokens over what the memory holds: logits (T, vocabulary), float32.

        Args:
            ids: the tokens; those of one sequence follow each other.
            position: of the first of them; or (T,), where they are of several sequences.
            memory: appends the keys and values and attends.
        """
        query_rows = self.num_heads * self.head_dim
        kv_rows = self.num_kv_heads * self.head_dim
        positions = position + np.arange(len(ids)) if np.ndim(position) == 0 else position
        turns = positions[:, None, None] * self._frequencies
        cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
        x = self.embedding[np.asarray(ids)]
        for index, layer in enumerate(self.layers):
            qkv = self._normed(x, layer["input_norm"]) @ layer["qkv"].T
            q, k, v = (
                rows.reshape(len(ids), -1, self.head_dim)
                for rows in np.split(qkv, [query_rows, query_rows + kv_rows], axis=1)
            )
            q = rotate(self._normed(q, layer["q_norm"]), cos, sin)
            k = rotate(self._normed(k, layer["k_norm"]), cos, sin)
            mixed = memory.attend(index, q, k, v)
            x = x + mixed.reshape(len(ids), -1) @ layer["output"].T
            gate, up = np.split(self._normed(x, layer["mlp_norm"]) @ layer["gate_up"].T, 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
        return self._normed(x, self.norm) @ self.embedding.T

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """RMSNorm over the last axis."""
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(self.config["rms_norm_eps"])) * weight


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Half-split rotation: element i turns together with element i + D / 2. x (T, H, D), cos and sin (T, 1, D / 2)."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
