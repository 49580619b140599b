"""What a paged store's launches read beside the rows: slots, positions, block tables and lengths, on the device.

They are uploaded when they change, into the memory that the last ones had, and serve every layer of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, new_array, write_host
from tikv.ops.staging import KnownOnHost
from tikv.stores.head_sequences import HeadSequences
from tikv.stores.sequences import AppendStep, SequenceState


class DeviceTables:
    """Index arrays of one store, int32."""

    def __init__(self, live: runtime.Runtime) -> None:
        self.runtime = live
        self._memory: dict[str, ArrayView] = {}
        self._slots: tuple[AppendStep, ArrayView] | None = None  # the last ones, and the step they belong to
        self._tables: tuple[Any, ArrayView, ArrayView] | None = None  # the last ones, and what they depend on
        self._of_heads: dict[int, tuple[Any, ArrayView, ArrayView, np.ndarray[Any, Any]]] = {}  # the same by layer

    def upload(self, name: str, array: np.ndarray[Any, Any]) -> ArrayView:
        """A host array on the device, in the memory that the last one of this name and shape had."""
        found = self._memory.get(name)
        if found is None or found.shape != array.shape:
            found = self._memory[name] = new_array(array.shape, dtypes.int32, self.runtime)
        write_host(array, found)
        return found

    def slots(self, step: AppendStep) -> ArrayView:
        """(T,) the slots of the rows of a step."""
        kept = self._slots
        if kept is None or kept[0] is not step:
            self._slots = None  # while their memory is written
            kept = self._slots = (step, self.upload("slots", step.slots))
        return kept[1]

    def block_tables(
        self, version: int, ids: tuple[int, ...], states: Sequence[SequenceState], lengths: tuple[int, ...]
    ) -> tuple[ArrayView, ArrayView]:
        """(B, most blocks) block tables padded with -1, and (B,) lengths; kept until `Sequences.version` changes."""
        key, kept = (version, ids, lengths), self._tables
        if kept is None or kept[0] != key:
            most = max([1, *(len(state.blocks) for state in states)])
            table = np.full((len(ids), most), -1, np.int32)
            for row, state in zip(table, states, strict=True):
                row[: len(state.blocks)] = state.blocks
            lens = np.array(lengths, np.int32)
            self._tables = None  # while their memory is written
            kept = self._tables = (key, self.upload("tables", table), self.upload("lengths", lens))
        return kept[1], kept[2]

    def head_tables(
        self, layer: int, sequences: HeadSequences, ids: tuple[int, ...], states: Sequence[SequenceState]
    ) -> tuple[ArrayView, ArrayView, np.ndarray[Any, Any]]:
        """(B, H, most blocks) block tables of a layer padded with -1, (B, H) lengths, and these on the host."""
        of_layer = sequences.layers[layer]
        key = (ids, of_layer.version, tuple(state.lengths[layer] for state in states))
        kept = self._of_heads.get(layer)
        if kept is None or kept[0] != key:
            table, lens = sequences.tables(layer, states)
            self._of_heads.pop(layer, None)  # while their memory is written
            names = f"tables of heads {layer}", f"lengths of heads {layer}"
            known = self.upload(names[1], lens)
            known = known.restrided(known.shape, known.strides)
            known.owner = KnownOnHost(known.owner, lens)  # by which attention shares out the keys
            kept = self._of_heads[layer] = key, self.upload(names[0], table), known, lens
        return kept[1:]
