"""`StreamingHeadsStore`: some heads of a layer keep all tokens, and the others the first and the newest ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import runtime
from tikv.arrays import Array, describe, view
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.runtime.interrupts import uninterrupted
from tikv.stores.picture import counted, size_in_words
from tikv.stores.snapshot import Snapshot
from tikv.stores.store import KVCacheStore

NAME = "StreamingHeadsStore"


class HeadPart(NamedTuple):
    """Some heads of one layer, in a store of their own.

    Attributes:
        heads: (n,) their numbers, ascending.
        store: a `KVCacheStore` of one layer.
        streams: whether it keeps only sinks and a window.
    """

    heads: np.ndarray[Any, Any]
    store: KVCacheStore
    streams: bool


class StreamingHeadsStore(runtime.DeepCopied):
    """Keys and values of layers in which some heads keep all tokens, and the others sinks and a window.

    DuoAttention finds the heads that need all tokens. Each layer is two `KVCacheStore`, one of a window, side by side;
    `nbytes` is what both take, so heads that stream free the memory of all tokens that they do not keep.

    Args:
        whole: bool (num_layers, num_kv_heads) or (num_kv_heads,) for all layers: which heads keep all tokens.
        num_layers, num_kv_heads, head_dim, capacity: as in `KVCacheStore`.
        window: tokens that a query sees in the other heads, itself and the sinks included.
        sinks: how many of them are the first tokens.
        **form: ``batch_size``, ``dtype``, ``v_dtype``, ``head_dim_v``, ``scale_dtype``; ``k_scale`` and ``v_scale`` as
            numbers.

    Raises:
        ShapeError, OptionError: ``whole`` has the wrong shape, or a scale has a number for each head.
        TikvError: as `KVCacheStore` raises it.

    Exactness: each head has the bits that it would have in a `KVCacheStore` with its window.
    Cost: a call is one call of each of the two stores. Heads of one kind that are not neighbours are copied first.
    Threads: calls of several threads have to be kept apart by the caller.

    Examples:
        >>> import numpy as np, tikv
        >>> store = tikv.StreamingHeadsStore(whole=np.array([[True, False]]), num_layers=1, num_kv_heads=2, head_dim=4,
        ...                                  capacity=100, window=10, sinks=2, dtype="float32")
        >>> rows = np.ones((50, 2, 4), np.float32)
        >>> store.extend(0, rows, rows, rows).shape, store.held(0).tolist()
        ((50, 2, 4), [[50, 10]])
        >>> store.nbytes == (100 + 10) * 2 * 4 * 4
        True
    """

    instead = "Use copy.deepcopy(), or snapshot() to return to what it holds."

    def __init__(
        self, *, whole: Any, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int, window: int,
        sinks: int = 0, **form: Any,
    ) -> None:  # fmt: skip
        mask = np.asarray(whole)
        shapes = (num_layers, num_kv_heads), (num_kv_heads,)
        if mask.dtype != bool or mask.shape not in shapes:
            raise ShapeError(
                f"{NAME}: whole is {mask.dtype} {mask.shape}; it must be bool {shapes[0]}, or {shapes[1]} for all "
                "layers."
            )
        window = checks.integer(window, "window", NAME, low=1)
        for name in ("k_scale", "v_scale"):
            if np.ndim(form.get(name, 0)):
                raise OptionError(f"{NAME}: {name} has several numbers, and heads lie in two stores. Use one number.")
        self.whole = np.broadcast_to(mask, (num_layers, num_kv_heads)).copy()
        self.num_layers, self.num_kv_heads, self.head_dim = num_layers, num_kv_heads, head_dim
        self.capacity, self.window, self.sinks = capacity, window, sinks
        sizes: dict[str, Any] = {"num_layers": 1, "head_dim": head_dim, "capacity": capacity, **form}
        kinds: dict[bool, dict[str, Any]] = {True: {"window": window, "sinks": sinks}, False: {}}
        self._layers: list[list[HeadPart]] = []
        for row in self.whole:
            parts = []
            for streams, options in sorted(kinds.items()):  # whole heads first: their capacity may be exceeded
                heads = np.flatnonzero(row != streams)
                if len(heads):
                    store = KVCacheStore(num_kv_heads=len(heads), **sizes, **options)
                    parts.append(HeadPart(heads, store, streams))
            self._layers.append(parts)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales, filled or not."""
        return sum(part.store.nbytes for parts in self._layers for part in parts)

    @property
    def length(self) -> int:
        """Tokens appended to each layer since `reset`."""
        return self.layer_length(0)

    def layer_length(self, layer: int) -> int:
        """Tokens appended to a layer since `reset`, less those trimmed."""
        return self._parts(layer, "layer_length")[0].store.length

    def held(self, layer: int) -> np.ndarray[Any, Any]:
        """(batch, num_kv_heads) int32: how many tokens each head holds."""
        parts = self._parts(layer, "held")
        counts = np.zeros((parts[0].store.batch_size, self.num_kv_heads), np.int32)
        for part in parts:
            counts[:, part.heads] = part.store.held(0)
        return counts

    def positions(self, layer: int) -> np.ndarray[Any, Any]:
        """(batch, num_kv_heads, held) int64 on the host: the position of each token held; -1 fills shorter heads."""
        parts = self._parts(layer, "positions")
        of_parts = [part.store.positions(0) for part in parts]
        shape = of_parts[0].shape[0], self.num_kv_heads, max(a.shape[2] for a in of_parts)
        positions = np.full(shape, -1, np.int64)
        for part, a in zip(parts, of_parts, strict=True):
            positions[:, part.heads, : a.shape[2]] = a
        return positions

    @uninterrupted
    def append(self, layer: int, k: Array, v: Array, *, layout: str = "token_major") -> None:
        """Append new tokens to one layer; arguments and errors are those of `KVCacheStore.append`."""
        self._write(layer, "append", (), (k, v), {"layout": layout})

    @uninterrupted
    def extend(
        self, layer: int, q: Array, k: Array, v: Array, *, layout: str = "token_major", scale: float | None = None,
        softcap: float | None = None,
    ) -> Any:  # fmt: skip
        """Append new tokens and attend with their queries; arguments and errors are those of `KVCacheStore.extend`."""
        results = self._write(layer, "extend", (q,), (k, v), {"layout": layout, "scale": scale, "softcap": softcap})
        return self._joined(layer, results, layout)

    def attend(
        self, layer: int, q: Array, *, layout: str = "token_major", scale: float | None = None,
        softcap: float | None = None,
    ) -> Any:  # fmt: skip
        """Attend with the queries of the newest tokens; arguments and errors are those of `KVCacheStore.attend`."""
        options: dict[str, Any] = {"layout": layout, "scale": scale, "softcap": softcap}
        parts = self._parts(layer, "attend")
        groups = self._groups(q, layout, "attend")
        results = [part.store.attend(0, _taken(q, part.heads, groups, layout), **options) for part in parts]
        return self._joined(layer, results, layout)

    def trim(self, n: int) -> None:
        """Drop the newest ``n`` tokens of all layers; errors are those of `KVCacheStore.trim`. Nothing else changes."""
        for streams in (True, False):  # a window may not hold what would have to be seen again
            for part in self._all():
                if part.streams == streams:
                    part.store.trim(n)

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        for part in self._all():
            part.store.reset()

    def snapshot(self) -> list[Snapshot]:
        """What all stores hold, for `restore`."""
        return [part.store.snapshot() for part in self._all()]

    def restore(self, snapshot: Sequence[Snapshot]) -> None:
        """Go back to what a `snapshot` of this store remembers; OptionError for anything else."""
        if not isinstance(snapshot, list) or len(snapshot) != len(self._all()):
            raise OptionError(f"{NAME}.restore: this is not what snapshot() of this store returned.")
        for part, of_part in zip(self._all(), snapshot, strict=True):
            part.store.restore(of_part)

    def _all(self) -> list[HeadPart]:
        return [part for parts in self._layers for part in parts]

    def _parts(self, layer: int, method: str) -> list[HeadPart]:
        return self._layers[checks.integer(layer, "layer", f"{NAME}.{method}", high=self.num_layers - 1)]

    def _groups(self, q: Array, layout: str, method: str) -> int:
        """Query heads per KV head."""
        operation = f"{NAME}.{method}"
        checks.name(layout, "layout", operation, checks.LAYOUTS)
        a = view(q, "q", operation)
        heads = a.shape[-2 if layout == "token_major" else -3] if a.ndim >= 3 else 0
        if heads % self.num_kv_heads or not heads:
            raise ShapeError(
                f"{operation}: q is {describe(a)}; its heads must be a multiple of the {self.num_kv_heads} KV heads."
            )
        return heads // self.num_kv_heads

    def _write(
        self, layer: int, method: str, queries: tuple[Any, ...], rows: tuple[Any, Any], options: dict[str, Any]
    ) -> list[Any]:
        """Call a method of both stores of a layer that appends tokens; if it fails, no head has got any."""
        layout, parts = options["layout"], self._parts(layer, method)
        for name, a in zip("kv", rows, strict=True):
            if self._groups(a, layout, method) != 1:
                raise ShapeError(
                    f"{NAME}.{method}: {name} is {describe(view(a, name, method))}, and there are {self.num_kv_heads} "
                    "KV heads."
                )
        groups = [self._groups(q, layout, method) for q in queries] + [1, 1]
        before, results = parts[0].store.length, []
        try:
            for part in parts:
                arrays = [_taken(a, part.heads, n, layout) for a, n in zip((*queries, *rows), groups, strict=True)]
                results.append(getattr(part.store, method)(0, *arrays, **options))
        except BaseException:
            if len(parts) > 1 and not parts[0].streams:
                parts[0].store.trim(parts[0].store.length - before)
            raise
        return results

    def _joined(self, layer: int, results: list[Any], layout: str) -> Any:
        """The results of a layer's parts as one, in the order of the heads."""
        parts = self._layers[layer]
        if len(parts) == 1:
            return results[0]
        axis = -2 if layout == "token_major" else -3
        groups = results[0].shape[axis] // len(parts[0].heads)
        heads = np.argsort(np.concatenate([part.heads for part in parts]))
        return _taken(_concatenated(results, axis), heads, groups, layout)

    def __repr__(self) -> str:
        streaming = int((~self.whole).sum())
        return (
            f"{NAME}({counted(self.num_layers, 'layer')}, {streaming} of {self.whole.size} heads with a window of "
            f"{self.window} and {counted(self.sinks, 'sink')}, {self.length} tokens, {size_in_words(self.nbytes)})"
        )


def _taken(a: Any, heads: np.ndarray[Any, Any], groups: int, layout: str) -> Any:
    """Some heads of an array, `groups` of the array's for each: a view if they are neighbours."""
    index: Any = (heads[:, None] * groups + np.arange(groups)).ravel()
    if (np.diff(index) == 1).all():
        index = slice(int(index[0]), int(index[-1]) + 1)
    return a[..., index, :] if layout == "token_major" else a[..., index, :, :]


def _concatenated(arrays: list[Any], axis: int) -> Any:
    """Arrays of one library as one."""
    if hasattr(arrays[0], "index_select"):
        import torch

        return torch.cat(arrays, axis)
    namespace = arrays[0].__array_namespace__() if hasattr(arrays[0], "__array_namespace__") else np
    return namespace.concatenate(arrays, axis=axis)
