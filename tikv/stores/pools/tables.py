"""What a paged store's launches read besides rows: slots, positions, block tables and lengths, on the device.

They are uploaded when they change, into the memory of the previous ones, and serve every layer of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, Host, new_array, to_device, write_host
from tikv.ops.staging import KnownOnHost
from tikv.stores.pools.sequences import AppendStep, Sequences, SequenceState
from tikv.stores.pools.shared_prefix import Block, Neighbours, neighbours


class DeviceTables:
    """The block tables, lengths and slots that launches of one store read, int32 on the device."""

    def __init__(self, live: runtime.Runtime) -> None:
        self.runtime = live
        self._memory: dict[str, ArrayView] = {}
        self._slots: tuple[AppendStep, ArrayView] | None = None  # the last ones, and the step they belong to
        # The last tables, after what they depend on; one entry for all layers, or one per layer.
        self._tables: dict[int, tuple[Any, ArrayView, ArrayView, Host, Host]] = {}
        # What `neighbours` found in the last tables that heads share, by sequences and queries.
        self._shared: tuple[Any, dict[tuple[int, int, int], Any]] = (None, {})

    def upload(self, name: str, array: Host) -> ArrayView:
        """A host array copied to the device, into the memory of the last one of this name and shape."""
        uploaded = self._memory.get(name)
        if uploaded is None or uploaded.shape != array.shape:
            uploaded = self._memory[name] = new_array(array.shape, dtypes.int32, self.runtime)
        write_host(array, uploaded)
        return uploaded

    def known(self, name: str, array: Host) -> ArrayView:
        """The same, and the host still knows its contents."""
        uploaded = self.upload(name, array)
        uploaded = uploaded.restrided(uploaded.shape, uploaded.strides)
        uploaded.owner = KnownOnHost(uploaded.owner, array)
        return uploaded

    def slots(self, step: AppendStep, ordered: Callable[[Host], Host] | None = None) -> ArrayView:
        """(T,) the slots of the rows of a step, in an order that is the same for all layers."""
        last = self._slots
        if last is None or last[0] is not step:
            self._slots = None  # while their memory is written
            slots = step.slots if ordered is None else ordered(step.slots)
            last = self._slots = (step, self.upload("slots", slots))
        return last[1]

    def block_tables(
        self, layer: int, sequences: Sequences, ids: tuple[int, ...], states: Sequence[SequenceState]
    ) -> tuple[ArrayView, ArrayView, Host]:
        """Block tables and lengths as in `Sequences.block_tables`, and the lengths on the host too.

        They are kept until they change, for each layer if heads have their own.
        """
        of_layer = layer if sequences.by_head else 0
        key = (ids, sequences.version_of(layer), tuple([state.lengths[layer] for state in states]))
        last = self._tables.get(of_layer)
        if last is None or last[0] != key:
            table, lens = sequences.block_tables(layer, states)
            self._tables.pop(of_layer, None)  # while their memory is written
            # Attention splits the keys of heads of different lengths by lengths that the host knows.
            on_device = (self.known if sequences.by_head else self.upload)(f"lengths {of_layer}", lens)
            last = self._tables[of_layer] = key, self.upload(f"tables {of_layer}", table), on_device, lens, table
        return last[1:4]

    def neighbours(self, first: int, end: int, queries: int, block: Block) -> tuple[list[Neighbours], ArrayView | None]:
        """`shared_prefix.neighbours` in the last `block_tables`, and the tokens after what sequences share.

        It looks at the sequences in places `first` to `end`. The second is None if nothing is shared.
        """
        key, *_, lens, table = self._tables[0]
        if self._shared[0] != key:
            self._shared = key, {}
        asked = first, end, queries
        known = self._shared[1].get(asked)
        if known is None:
            runs = neighbours(table[first:end], lens[first:end], queries, block)
            unshared = None
            if runs:
                shared = np.repeat([run.blocks * block.tokens for run in runs], [run.end - run.first for run in runs])
                unshared = to_device((lens[first:end] - shared).astype(np.int32), self.runtime)
            known = self._shared[1][asked] = runs, unshared
        return known
