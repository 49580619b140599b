"""What `KVCacheStore.snapshot` keeps, and how a store returns to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView, to_device
from tikv.errors import CapacityError, OptionError, ShapeError
from tikv.stores.storage import counted

if TYPE_CHECKING:
    from tikv.stores.kept import Kept
    from tikv.stores.layer import LayerMemory


class Snapshot(runtime.NotCopied):
    """Counts and copies of the filled slots of a store. Give it to `KVCacheStore.restore`.

    Nothing changes it, so a copy of it is itself. It is not pickled.
    """

    instead = "Restore it into its store, and save() the store."

    def __init__(self, memory: LayerMemory) -> None:
        self.runtime = memory.runtime
        self.batch_size = memory.batch_size
        self.divisors = memory.divisors
        self.windows = [(layer.window, layer.sinks) for layer in memory.layers]
        self.counts = [(layer.length, layer.valid_from, layer.filled) for layer in memory.layers]
        self.kept = [layer.kept for layer in memory.layers]
        self.arrays = memory.copy_filled()

    def __copy__(self) -> Snapshot:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Snapshot:
        return self

    def restore(self, operation: str, store: Any, memory: LayerMemory) -> None:
        """Let `memory`, that of `store`, hold what this one did.

        Raises:
            ShapeError: the store is of another form.
            CapacityError: a layer is too small, or one of the snapshot's batch would be larger than a launch can
                address. Nothing is changed.
            StaleRuntimeError: the runtime of one of them is gone.
        """
        for live in (memory.runtime, self.runtime):
            runtime.require_alive(live, operation)
        ours = [[(a.shape[1:2] + a.shape[3:], a.dtype) for a in layer.arrays] for layer in memory.layers]
        theirs = [[(a.shape[1:2] + a.shape[3:], a.dtype) for a in arrays] for arrays in self.arrays]
        windows = [(layer.window, layer.sinks) for layer in memory.layers]
        if ours != theirs or windows != self.windows or memory.divisors != self.divisors:
            raise ShapeError(
                f"{operation}: {self!r} is not of this store ({store!r}). Restore it into the store it was taken from."
            )
        for layer, (_, _, filled) in zip(memory.layers, self.counts, strict=True):
            if filled > layer.slots:
                raise CapacityError(
                    f"{operation}: the snapshot has {filled} tokens in layer {layer.index}, which has room for "
                    f"{layer.slots} here. Restore it into a store with capacity={filled} or more."
                )
        if self.batch_size != memory.batch_size:
            memory.allocate(self.batch_size)
        for layer, (length, valid_from, _), kept in zip(memory.layers, self.counts, self.kept, strict=True):
            memory.recount(layer, length, kept, valid_from)
        memory.write_filled(self.arrays)

    def __repr__(self) -> str:
        length = max(length for length, *_ in self.counts)
        return f"Snapshot({counted(len(self.counts), 'layer')}, length {length})"


def require_snapshot(operation: str, snapshot: Any) -> Snapshot:
    """What a caller gave as a snapshot.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(snapshot, Snapshot):
        raise OptionError(f"{operation}: {snapshot!r} is no snapshot. Give what `snapshot` returned.")
    return snapshot


def take_over(
    operation: str,
    memory: LayerMemory,
    counts: Sequence[Sequence[int]],
    arrays: Sequence[Sequence[np.ndarray[Any, Any]]],
    kept: Sequence[Kept | None] | None = None,
) -> None:
    """Let the layers hold host copies of filled slots, with (length, oldest valid position) of each.

    What compactions left of them comes with `kept`, None for a layer without.

    Raises:
        ShapeError: an array is not of these layers' form, or a count that they cannot have. Nothing is changed.
    """
    layers = memory.layers
    left = kept or [None] * len(layers)
    before = [(layer.length, layer.valid_from) for layer in layers]
    try:
        for layer, (length, valid_from), found, one in zip(layers, counts, arrays, left, strict=True):
            layer.length, layer.valid_from = int(length), int(valid_from)
            _check_layer(operation, layer, found, one is not None and not one.even)
    except (ShapeError, TypeError, ValueError):
        for layer, (length, valid_from) in zip(layers, before, strict=True):
            layer.length, layer.valid_from = length, valid_from
        raise
    for layer, one in zip(layers, left, strict=True):
        memory.recount(layer, layer.length, one, layer.valid_from)
    memory.write_filled([[to_device(np.ascontiguousarray(a), memory.runtime) for a in found] for found in arrays])


def _check_layer(operation: str, layer: Any, found: Sequence[np.ndarray[Any, Any]], uneven: bool) -> None:
    mine: ArrayView
    for name, mine, given in zip(layer.named, layer.arrays, found, strict=False):
        wanted = (*mine.shape[:2], layer.filled, *mine.shape[3:])
        if given.shape != wanted or given.dtype != mine.dtype.numpy or layer.length > 2**62:
            raise ShapeError(
                f"{operation}: {name} of layer {layer.index} is {given.dtype} {given.shape} where "
                f"{mine.dtype.name} {wanted} is needed."
            )
    if len(found) != len(layer.arrays):
        raise ShapeError(f"{operation}: layer {layer.index} has {len(found)} arrays of {len(layer.arrays)}.")
    if layer.ring == 0 and layer.length > layer.slots:
        raise ShapeError(f"{operation}: layer {layer.index} has {layer.length} tokens in {layer.slots} slots.")
    fits = layer.valid_from == 0 if uneven else layer.held <= layer.slots  # heads of their own lengths wrap by them
    if not 0 <= layer.valid_from <= layer.length or not fits:
        raise ShapeError(
            f"{operation}: layer {layer.index} has {layer.length} tokens in {layer.slots} slots, the oldest is "
            f"{layer.valid_from}."
        )
