"""Keeping the accepted path of drafted tokens: its rows are moved together in place, and the others are dropped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.errors import PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.indices import index_array
from tikv.stores.draft import Draft
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory


def commit(operation: str, memory: LayerMemory, path: Any, drafted: int | None, draft: Draft) -> int:
    """Keep a path of the newest tokens of every layer and drop the others; see `KVCacheStore.commit`.

    Returns:
        The place of the first drafted token, which is the same in all layers.
    """
    drafted = _drafted(operation, memory.layers, drafted, draft)
    indices = _path(operation, path, memory.batch_size, drafted)
    draft.check(operation, list(indices), drafted, memory.layers[0].end)
    for layer in memory.layers:
        history = layer.history
        if history is not None and (layer.head_lengths is not None or layer.length - drafted < history.tokens):
            raise PositionError(
                f"{operation}: layer {layer.index} was compacted, and its heads differ in length or the {drafted} "
                "drafted tokens were not appended since. Use compact() with the tokens that stay, or reset() to "
                "start again."
            )
        if layer.ring and layer.length > layer.slots and indices.shape[1] < drafted:
            raise PositionError(
                f"{operation}: layer {layer.index} slides (window={layer.window}), and its {drafted} drafted "
                f"tokens took the slots of older ones, which queries would see after a shorter path. Keep all of them, "
                f"or restore a snapshot and append the path."
            )
    if (indices != np.arange(indices.shape[1])).any():
        for block in memory.blocks:
            for _, group in itertools.groupby(block, lambda layer: layer.slots):  # one stride leads through them
                together = list(group)
                slots, start = np.tile(indices, (len(together), 1)), together[0].length - drafted
                memory.move_in_place(operation, together, slots, drafted, start)
    first = memory.layers[0].length - drafted
    for layer in memory.layers:
        layer.length -= drafted - indices.shape[1]
        layer.newest = 0
    return first


def _drafted(operation: str, layers: Sequence[Layer], drafted: int | None, draft: Draft) -> int:
    """How many of the newest tokens were drafted, which must be the same in all layers; or PositionError."""
    first = layers[0]
    for layer in layers:
        if (layer.length, layer.newest) != (first.length, first.newest):
            raise PositionError(
                f"{operation}: layer {layer.index} has {layer.length} tokens ({layer.newest} from its last append), "
                f"and layer {first.index} has {first.length} ({first.newest} from its last append). Append the draft "
                "to all layers first."
            )
    if drafted is not None:
        drafted = checks.integer(drafted, "drafted", operation, low=0, high=first.length)
    return draft.tokens(operation, first.newest, drafted, first.end)


def _path(operation: str, path: Any, batch: int, drafted: int) -> np.ndarray[Any, Any]:
    """The path as (B, n) int32; raises if it has another form, does not ascend, or goes outside the draft."""
    host = index_array(path, "path", operation)
    host = np.asarray(host.tolist() if hasattr(host, "tolist") else host)
    if host.ndim == 1 and batch == 1:
        host = host[None]
    if host.ndim != 2 or len(host) != batch or (host.size and host.dtype.kind not in "iu"):
        alone = " or (n,)" if batch == 1 else ""
        raise ShapeError(
            f"{operation}: path has shape {host.shape} where integers (B, n) = ({batch}, n){alone} are needed."
        )
    for b, one in enumerate(host):
        check_ascending(operation, one, drafted, b)
    return host.astype(np.int32)


def check_ascending(operation: str, path: np.ndarray[Any, Any], drafted: int, sequence: int) -> None:
    """Raise PositionError if the path of one sequence does not ascend within its draft."""
    wrong = (path < 0) | (path >= drafted) | (np.diff(path, prepend=-1) <= 0)
    if wrong.any():
        i = int(wrong.argmax())
        raise PositionError(
            f"{operation}: path[{sequence}, {i}]={int(path[i])} does not ascend within the {drafted} drafted tokens. "
            f"Use ascending indices below {drafted}."
        )
