"""What a paged store's launches read beside the rows: slots, positions, block tables and lengths, on the device.

They are uploaded when they change, into the memory that the last ones had, and serve every layer of a step.
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
    """Index arrays of one store, int32."""

    def __init__(self, live: runtime.Runtime) -> None:
        self.runtime = live
        self._memory: dict[str, ArrayView] = {}
        self._slots: tuple[AppendStep, ArrayView] | None = None  # the last ones, and the step they belong to
        # The last ones, after what they depend on: of all layers, or of each.
        self._tables: dict[int, tuple[Any, ArrayView, ArrayView, Host, Host]] = {}
        # Of the last ones that heads share: what `neighbours` found, by the sequences asked about and their queries.
        self._shared: tuple[Any, dict[tuple[int, int, int], Any]] = (None, {})

    def upload(self, name: str, array: Host) -> ArrayView:
        """A host array on the device, in the memory that the last one of this name and shape had."""
        found = self._memory.get(name)
        if found is None or found.shape != array.shape:
            found = self._memory[name] = new_array(array.shape, dtypes.int32, self.runtime)
        write_host(array, found)
        return found

    def known(self, name: str, array: Host) -> ArrayView:
        """The same, and the host goes on knowing what is in it."""
        found = self.upload(name, array)
        found = found.restrided(found.shape, found.strides)
        found.owner = KnownOnHost(found.owner, array)
        return found

    def slots(self, step: AppendStep, ordered: Callable[[Host], Host] | None = None) -> ArrayView:
        """(T,) the slots of the rows of a step, in an order that is the same for all layers."""
        last = self._slots
        if last is None or last[0] is not step:
            self._slots = None  # while their memory is written
            found = step.slots if ordered is None else ordered(step.slots)
            last = self._slots = (step, self.upload("slots", found))
        return last[1]

    def block_tables(
        self, layer: int, sequences: Sequences, ids: tuple[int, ...], states: Sequence[SequenceState]
    ) -> tuple[ArrayView, ArrayView, Host]:
        """Block tables and lengths as `Sequences.block_tables` has them, and the lengths on the host too.

        They are kept until they change; those of heads for each layer.
        """
        own = layer if sequences.by_head else 0
        key = (ids, sequences.version_of(layer), tuple([state.lengths[layer] for state in states]))
        last = self._tables.get(own)
        if last is None or last[0] != key:
            table, lens = sequences.block_tables(layer, states)
            self._tables.pop(own, None)  # while their memory is written
            # Attention shares out the keys of heads of different lengths by what the host knows of them.
            on_device = (self.known if sequences.by_head else self.upload)(f"lengths {own}", lens)
            last = self._tables[own] = key, self.upload(f"tables {own}", table), on_device, lens, table
        return last[1:4]

    def neighbours(self, first: int, end: int, queries: int, block: Block) -> tuple[list[Neighbours], ArrayView | None]:
        """`shared_prefix.neighbours` among those of the last `block_tables`, and tokens behind what they share.

        Sequences from `first` to `end`, by their places. None where nothing is shared.
        """
        key, *_, lens, table = self._tables[0]
        if self._shared[0] != key:
            self._shared = key, {}
        asked = first, end, queries
        found = self._shared[1].get(asked)
        if found is None:
            runs = neighbours(table[first:end], lens[first:end], queries, block)
            own = None
            if runs:
                shared = np.repeat([run.blocks * block.tokens for run in runs], [run.end - run.first for run in runs])
                own = to_device((lens[first:end] - shared).astype(np.int32), self.runtime)
            found = self._shared[1][asked] = runs, own
        return found
