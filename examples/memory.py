"""What a model remembers between tokens: a `tikv` store, contiguous or paged, or nothing. Each is a `model.Memory`."""

import numpy as np
from model import Model, attention

import tikv


class NoMemory:
    """Remembers nothing: a call attends over the rows it is given, so each token needs all before it once more."""

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
        read: "numpy" takes the tokens out and attends here; "tikv" lets the store attend where they lie.
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
        """Append the rows, then read. Shapes as in `model.Memory`."""
        if len(q) == 1:
            self.store.append(layer, k, v)
            if self.read == "tikv":
                return self.store.attend(layer, q)
            return attention(q, *self._tokens(layer), self.windows[layer])
        # The first of many new tokens sees keys that the last of them pushes out of the ring: read before writing.
        old_k, old_v = self._tokens(layer)
        self.store.append(layer, k, v)
        k = np.concatenate([old_k, k.transpose(1, 0, 2)], axis=1)
        v = np.concatenate([old_v, v.transpose(1, 0, 2)], axis=1)
        return attention(q, k, v, self.windows[layer])

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
        read: "numpy" takes the tokens out and attends here; "tikv" lets the pool attend for single tokens.
    """

    def __init__(self, model: Model, pool: "tikv.PagedKVCacheStore", seqs: list[int], read: str = "numpy"):
        self.read = read
        self.windows = model.windows
        self.pool = pool
        self.seqs = seqs

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append the rows, then read. Shapes as in `model.Memory`."""
        self.pool.append(layer, k, v, self.seqs, cu_seqlens=[0, len(k)] if len(self.seqs) == 1 else None)
        if self.read == "tikv" and len(q) == len(self.seqs):
            return self.pool.attend(layer, q, self.seqs, window=self.windows[layer])
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
