"""What a model remembers between tokens: a `tikv` store, or nothing at all. Both are a `model.Memory`."""

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
    """

    def __init__(self, model: Model, capacity: int, dtype: str = "float32"):
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
            return attention(q, *self._tokens(layer), self.windows[layer])
        # The first of many new tokens sees keys that the last of them pushes out of the ring: read before writing.
        old_k, old_v = self._tokens(layer)
        self.store.append(layer, k, v)
        k = np.concatenate([old_k, k.transpose(1, 0, 2)], axis=1)
        v = np.concatenate([old_v, v.transpose(1, 0, 2)], axis=1)
        return attention(q, k, v, self.windows[layer])

    def _tokens(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """What a layer holds, oldest first: K and V (H, length, D) in float32."""
        k, v = self.store.tokens(layer)
        return np.asarray(k)[0].astype(np.float32), np.asarray(v)[0].astype(np.float32)
