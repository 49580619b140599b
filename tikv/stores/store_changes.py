"""What lets go of a contiguous store's tokens, or puts its sequences in another order."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import runtime
from tikv.errors import OptionError, PositionError
from tikv.ops import checks
from tikv.ops.rotate import Rope
from tikv.stores.compaction import compact_layers, split_by_layer
from tikv.stores.store_facts import StoreFacts
from tikv.stores.whole import whole


class StoreChanges(StoreFacts):
    """The part of `KVCacheStore` that drops tokens, and repeats, drops or reorders sequences."""

    @whole
    def compact(self, layer: int, keep: Any, *, rope: Rope | None = None) -> None:
        """Keep some of the tokens that a layer holds, for each head its own, and drop the others; in place.

        The next token still stands at `length`: `positions` says where those kept stand, `held` how many there are.
        The slots that become free are taken first by new tokens; a sliding layer then overwrites its oldest again, and
        its first tokens held are its sinks.

        Args:
            layer: its index.
            keep: indices into the order of `tokens`, ascending: (batch, H, n), or (batch, n) for all heads; or a bool
                mask (batch, H, held) or (batch, held), which may keep a different number for each head. On the host or
                the device.
            rope: the model's rotation: keys are turned from their true position to their new index, `positions` says 0,
                1 and so on, and `next_position`, which is `length` otherwise, goes on from the largest number kept.

        Raises:
            PositionError: an index falls, repeats or is not held. Nothing is written.
            ShapeError, DTypeError, OptionError: another shape or dtype; keys that ``rope`` does not turn.

        Exactness: rows and int8 scales keep their bits. Keys that are turned are rounded once, as `tikv.rotate` says.
        Cost: the rows that move, read and written once, in one launch; of a sliding layer that has wrapped twice, in
            two for each array. What is kept is read and checked by the host. Memory stays as it is: make the store
            smaller, or take fewer tokens, to have less. Where heads keep different numbers, an append is a launch more.

        Examples:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=1, capacity=8, dtype="float32")
            >>> k = np.arange(8, dtype=np.float32).reshape(4, 2, 1)
            >>> store.append(0, k, k)
            >>> store.compact(0, [[[0, 3], [1, 2]]])
            >>> store.append(0, k[:1], k[:1])
            >>> store.length, store.held(0), store.positions(0).tolist()
            (5, 3, [[[0, 3, 4], [1, 2, 4]]])
        """
        operation = "KVCacheStore.compact"
        self._require_own_tokens(operation)
        compact_layers(operation, self._memory, [self._layer(layer, operation)], [keep], rope)

    def _require_own_tokens(self, operation: str) -> None:
        """All tokens that are counted lie here.

        Raises:
            OptionError: several processes hold them together.
        """
        if self._counts is not self._layers:
            raise OptionError(f"{operation}: the tokens are dealt to several processes. Shard by heads instead.")

    @whole
    def compact_all(self, keep: Any, *, rope: Rope | None = None) -> None:
        """`compact` of every layer, in one launch where layers keep as many tokens and lie in one block.

        Args:
            keep: an entry for each layer, as `compact` takes it.
            rope: as in `compact`; a launch more for each layer.

        Raises:
            As `compact`. Nothing is written to any layer.
        """
        operation = "KVCacheStore.compact_all"
        self._layer(0, operation)
        self._require_own_tokens(operation)
        keeps = split_by_layer(keep, self.num_layers, operation)
        compact_layers(operation, self._memory, self._layers, keeps, rope)

    @whole
    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens of every layer.

        A ring that has wrapped gives back as many tokens as it still holds; the older ones are overwritten and do not
        return, so afterwards it holds fewer than its window until it is filled again. Tokens that `compact` dropped
        count too: a store goes back no further than to the newest of them.

        Raises:
            PositionError: more than `length`, or further back than a ring still holds or a compaction left whole.
                Nothing is changed.

        Cost: none on the device.
        """
        operation = "KVCacheStore.trim"
        runtime.require_alive(self.runtime, operation)
        n = checks.integer(n, "n", operation)
        if n > self.length:
            raise PositionError(
                f"{operation}: cannot drop {n} tokens of length={self.length}. Drop at most {self.length}, or reset()."
            )
        length = self.length
        for layer in self._counts:
            layer.refuse_trim(operation, n, length)
        for layer in self._counts:
            self._memory.trim(layer, length - n)

    @whole
    def reset(self) -> None:
        """Forget all tokens. The memory stays, with what was in it."""
        runtime.require_alive(self.runtime, "KVCacheStore.reset")
        for layer in self._counts:
            self._memory.recount(layer, 0, None)

    @whole
    def reorder(self, index: Any) -> None:
        """Let sequence ``b`` continue from what sequence ``index[b]`` holds, for every ``b`` (beam search). In place.

        Args:
            index: (batch_size,) integers in [0, batch_size).

        Raises:
            ShapeError, PositionError: the index has another length or leaves the batch.

        Cost: the filled slots of the sequences that change, read and written twice.
        """
        operation = "KVCacheStore.reorder"
        runtime.require_alive(self.runtime, operation)
        self._memory.reorder(operation, index)

    @whole
    def select(self, index: Any) -> None:
        """Keep these sequences, in this order; the batch becomes as long as the index.

        Args:
            index: integers in [0, batch_size).

        Raises:
            ShapeError, PositionError: the index is empty or leaves the batch.
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.

        Cost: the filled slots kept, read and written twice; memory is allocated anew, and arrays handed out before keep
        the old.
        """
        operation = "KVCacheStore.select"
        runtime.require_alive(self.runtime, operation)
        self._memory.select(self._memory.sequences_of(operation, index))

    @whole
    def repeat(self, n: int) -> None:
        """Repeat every sequence ``n`` times: 0, 0, 1, 1 for ``n=2``. The batch grows ``n`` times.

        Raises:
            PositionError: ``n`` is less than one.
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.

        Cost: as `select`.
        """
        n = checks.integer(n, "n", "KVCacheStore.repeat", low=1)
        runtime.require_alive(self.runtime, "KVCacheStore.repeat")
        self._memory.select(np.repeat(np.arange(self.batch_size, dtype=np.int32), n))
