"""A model's memory between tokens: a `tikv` store, contiguous or paged, or nothing. Each is a `shared.model.Memory`."""

import numpy as np

import tikv
from shared.model import Model, attention


class NoMemory:
    """Remembers nothing: a call attends over the rows that it gets, so each token runs all earlier ones again."""

    def __init__(self, model: Model):
        self.windows = model.windows

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Attend over k and v alone. Shapes as in `model.Memory`."""
        return attention(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), self.windows[layer])


class StoreMemory:
    """Keys and values in a `tikv.KVCacheStore`: rings of `window` slots for sliding layers, all tokens for the rest.

    Args:
        model: tells layers, heads and windows.
        capacity: tokens the global layers can hold.
        dtype: what K and V are stored in; the rows come as float32 and are rounded by the store.
        read: who attends for a single token: "numpy" takes the tokens out and attends here, "tikv" lets the store do it
            where they lie, as it does for prompts.
    """

    def __init__(self, model: Model, capacity: int, dtype: str = "float32", read: str = "numpy"):
        self.read = read
        windows = [None if window is None else min(window, capacity) for window in model.windows]
        self.windows = model.windows
        self.store = tikv.KVCacheStore(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype=dtype,
            window=windows,
        )

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append the rows and attend. Shapes as in `model.Memory`."""
        if len(q) > 1 or self.read == "tikv":
            # The first tokens of a prompt see keys that its last ones push out of a ring: one call does both in order.
            return self.store.extend(layer, q, k, v)
        self.store.append(layer, k, v)
        return attention(q, *self._tokens(layer), self.windows[layer])

    def reset(self) -> None:
        """Forget everything."""
        self.store.reset()

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.store.nbytes

    def summary(self) -> str:
        """What the cache holds, in words."""
        length = self.store.length
        rings = sorted({window for window in self.windows if window is not None})
        turns = [f"; a ring of {window} went round {length // window} times" for window in rings]
        return f"{length} tokens" + "".join(turns)

    def _tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """What a layer holds, oldest first: K and V (H, length, D) in float32."""
        k, v = self.store.tokens(layer)
        return np.asarray(k)[0].astype(np.float32), np.asarray(v)[0].astype(np.float32)


class PagedMemory:
    """Keys and values of some sequences of a `tikv.PagedKVCacheStore`, in blocks that other sequences may share.

    A call brings one token of each sequence, or any number of tokens of the only one. Every layer keeps all tokens; a
    sliding layer reads its window of them.

    Args:
        model: tells the windows.
        pool: made by `pool_for`.
        seqs: the sequences of the pool that the tokens belong to.
        read: who attends for a single token: "numpy" takes the tokens out and attends here, "tikv" lets the pool do it
            where they lie, as it does for prompts.
    """

    def __init__(self, model: Model, pool: "tikv.PagedKVCacheStore", seqs: list[int], read: str = "numpy"):
        self.read = read
        self.windows = model.windows
        self.pool = pool
        self.seqs = seqs

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append the rows and attend. Shapes as in `model.Memory`."""
        bounds = [0, len(k)] if len(self.seqs) == 1 else None
        if len(q) > len(self.seqs) or self.read == "tikv":
            return self.pool.extend(layer, q, k, v, self.seqs, bounds, window=self.windows[layer])
        self.pool.append(layer, k, v, self.seqs, bounds)
        mixed = [
            attention(rows, *self._tokens(layer, seq), self.windows[layer])
            for seq, rows in zip(self.seqs, np.split(q, len(self.seqs)), strict=True)
        ]
        return np.concatenate(mixed)

    def reset(self) -> None:
        """Forget everything; the blocks go back to the pool."""
        for seq in self.seqs:
            self.pool.truncate(seq, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.pool.nbytes

    def summary(self) -> str:
        """What the cache holds, in words."""
        held = self.pool.num_blocks - self.pool.num_free_blocks
        tokens = sum(self.pool.length(seq) for seq in self.seqs)
        return f"{tokens} tokens in {held} blocks of {self.pool.block_size}"

    def _tokens(self, layer: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """What a layer holds of a sequence: K and V (H, length, D) in float32."""
        k, v = self.pool.tokens(layer, seq)
        return tuple(np.asarray(rows).astype(np.float32).transpose(1, 0, 2) for rows in (k, v))


def pool_for(model: Model, num_blocks: int, dtype: str = "float32", block_size: int = 16) -> "tikv.PagedKVCacheStore":
    """A pool of blocks for sequences of this model."""
    return tikv.PagedKVCacheStore(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
    )
