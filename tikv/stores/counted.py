"""CountedLayers: what a `KVCacheStore` knows about the numbers of tokens of its layers, and how it makes them equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.stores import lengths
from tikv.stores.draft import Draft
from tikv.stores.layers.counts import (
    Layer,
    check_step,
    ends_of,
    refuse_uneven_step,
    refuse_unfinished,
)
from tikv.stores.layers.storage import LayerStorage
from tikv.stores.locking import changing, locked

# What is known about the lengths of layers: all have tokens; nothing; all are equal; only the first may have tokens.
FILLED, UNKNOWN, EVEN, ALONE = range(4)


class CountedLayers(runtime.DeepCopied):
    """The counts of a store's layers, see the module; `KVCacheStore` has the tokens."""

    num_layers: int
    lock: Any
    runtime: runtime.Runtime
    _storage: LayerStorage
    _draft: Draft
    _known: int

    @property
    def batch_size(self) -> int:
        """The current number of sequences."""
        return self._storage.batch_size

    @property
    @locked
    def length(self) -> int:
        """Tokens appended to every layer since `reset`, minus those that `trim`, `commit` or `align` dropped.

        So in a step it grows when the last layer appends. `layer_length` and `next_position` return the numbers of one
        layer, and the repr shows whether layers differ. If only one layer has tokens, it is the length of that one.
        """
        return lengths.common(ends_of(self._storage.counts))

    @property
    @locked
    def seq_lens(self) -> np.ndarray[Any, Any]:
        """(batch_size,) int32: `length` for each sequence, on the host.

        Raises:
            PositionError: `length` does not fit int32, which can happen if all layers slide.
        """
        return self._lens("KVCacheStore.seq_lens", "Read `length`.")

    def _lens(self, operation: str, remedy: str) -> np.ndarray[Any, Any]:
        """`length` for each sequence, if it fits int32."""
        if self.length >= 2**31:
            raise PositionError(f"{operation}: length={self.length} does not fit int32. {remedy}")
        return np.full(self.batch_size, self.length, np.int32)

    def layer_length(self, layer: int) -> int:
        """Tokens appended to one layer since `reset`, minus those that `trim`, `commit` or `align` dropped."""
        return self._counts(layer, "KVCacheStore.layer_length").end

    def next_position(self, layer: int) -> int:
        """The position of the layer's next token: `layer_length`, unless keys were rotated to other positions."""
        return self._counts(layer, "KVCacheStore.next_position").next_position

    def _index(self, layer: int, operation: str) -> int:
        live = self.runtime
        if live.front.prog is not live.program:  # checked here first: every append comes by
            runtime.require_alive(live, operation)
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            layer = checks.integer(layer, "layer", operation, high=self.num_layers - 1)
        return layer

    def _counts(self, layer: int, operation: str) -> Layer:
        return self._storage.counts[self._index(layer, operation)]

    def _check_write(self, operation: str, layer: int, rows: ArrayView, layout: str) -> None:
        """Raise PositionError before new rows are written to a layer, if a step seems to have ended between layers."""
        ends = ends_of(self._storage.counts)
        even = ends.count(ends[0]) == len(ends)
        if even and ends[0] and len(ends) > 1:
            self._known = FILLED
            return
        self._known = ALONE if layer == 0 and not any(ends[1:]) else UNKNOWN
        if not even:
            tokens = rows.shape[-3 if layout == "token_major" else -2] if rows.ndim > 2 else 0
            refuse_unfinished(operation, self._storage.counts, layer, tokens)

    @locked
    def check_step(self, operation: str, layers: Sequence[int], tokens: int) -> list[int]:
        """For a `Step`: check that these layers of one length have room for `tokens`; return what each was trimmed to.

        Raises:
            CapacityError, PositionError: they have no room, or their lengths differ.
        """
        self._storage.require_positions(operation, "Call append() and attend().")
        counts = self._storage.counts
        if len(layers) > 1:
            refuse_uneven_step(operation, counts)
        else:
            refuse_unfinished(operation, counts, layers[0], tokens)
        return check_step([counts[i] for i in layers], tokens, operation)

    @changing
    def count_step(self, layers: Sequence[int], tokens: int) -> None:
        """For a `Step`: count the tokens that it launched."""
        self._known = UNKNOWN
        for i in layers:
            self._storage.counts[i].grow(tokens)

    @changing
    def align(self) -> int:
        """Bring every layer back to the length of the shortest, after a step that ended between two layers.

        Ctrl-C or an error may end a step of a model after some of its layers have appended. The next append to layer 0
        is then refused: call this, and make the step again. Every layer counts here, one without any tokens too. If all
        layers have the same length, nothing changes.

        Returns:
            The length that every layer has then.

        Raises:
            PositionError: a layer cannot be as it was before its newest tokens: they overwrote more than the oldest
                token of its window, older tokens became codes of groups along tokens when they were appended, or
                `compact` dropped some since. Nothing is changed; `reset` is the way out.

        Cost: none on the device, except for summaries of pages.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32")
            >>> store.append_all(*np.ones((2, 2, 3, 1, 4), np.float32))
            >>> store.append(0, *np.ones((2, 1, 1, 4), np.float32))  # and the step ends here
            >>> store.length, store.layer_length(0), store.align(), store.layer_length(0)
            (3, 4, 3, 3)
        """
        operation = "KVCacheStore.align"
        runtime.require_alive(self.runtime, operation)
        length = min(ends_of(self._storage.counts))
        self.align_to(operation, length)
        return length

    @changing
    def align_to(self, operation: str, length: int) -> None:
        """For `align`, and that of all ranks: bring every layer back to a length that none of them is shorter than."""
        if max(ends_of(self._storage.counts)) > length:
            self._known = UNKNOWN
            self._storage.align(operation, length)
            self._draft = self._draft.cut(length)

    @locked
    def refuse_align(self, operation: str, length: int) -> None:
        """Raise PositionError if `align_to` would."""
        self._storage.refuse_align(operation, length)
