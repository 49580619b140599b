"""The sequences of a per-head paged store: a block table for each layer, sequence and KV head.

A block holds tokens of one head of one layer, and each layer has its own blocks. Each layer has a `Sequences`, in which
every head of a sequence counts as a sequence; this module combines them. It too is only bookkeeping on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.stores.draft import Draft
from tikv.stores.history import History
from tikv.stores.pools.blocks import BlockPool, slots_of
from tikv.stores.pools.rows import Moves
from tikv.stores.pools.sequences import AppendStep, PathStep, Sequences, SequenceState, padded_tables


class HeadState(SequenceState):
    """What is known of one sequence whose heads have blocks of their own.

    `lengths` count appended tokens, whatever heads still hold of them.
    """

    @property
    def ends(self) -> list[int]:
        return self.lengths

    def appended(self, layer: int) -> int:
        return self.lengths[layer]

    def shift(self, layer: int) -> int:
        """The difference between a new token's position and its number."""
        history = self.histories[layer]
        return history.next_position - history.end if history else 0


class HeadSequences(Sequences):
    """`Sequences` whose heads hold different tokens.

    Attributes:
        layers: the `Sequences` of each layer's heads; head h of sequence n has the number n * heads + h there.
    """

    by_head = True

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, heads: int) -> None:
        super().__init__(num_layers, num_blocks, block_size)
        self.heads = heads
        self.layers = [Sequences(1, num_blocks, block_size) for _ in range(num_layers)]

    @property
    def num_free(self) -> int:
        """The free blocks of the layer that has the fewest."""
        return min(layer.num_free for layer in self.layers)

    def of_heads(self, layer: int, state: SequenceState) -> list[SequenceState]:
        """The states of a sequence's heads in one layer."""
        first = state.number * self.heads
        return [self.layers[layer].states[first + h] for h in range(self.heads)]

    def held(self, layer: int, state: SequenceState) -> Host:
        """(H,) int32: tokens that each head holds."""
        return np.array([head.lengths[0] for head in self.of_heads(layer, state)], np.int32)

    def positions(self, layer: int, state: SequenceState) -> list[Host]:
        """The true positions of what each head holds, ascending, int64."""
        history, appended = state.histories[layer], state.appended(layer)
        return [np.arange(appended)] * self.heads if history is None else history.rows(appended - history.end)

    def block_table(self, layer: int, state: SequenceState) -> Host:
        """(H, most blocks) int32: the blocks of each head in a layer, padded with -1."""
        return padded_tables([head.blocks for head in self.of_heads(layer, state)])

    def block_tables(self, layer: int, states: Sequence[SequenceState]) -> tuple[Host, Host]:
        """(B, H, most blocks) block tables padded with -1, and (B, H) what heads hold, int32."""
        heads = [head for state in states for head in self.of_heads(layer, state)]
        table = padded_tables([head.blocks for head in heads])
        lens = np.array([head.lengths[0] for head in heads], np.int32)
        return table.reshape(len(states), self.heads, -1), lens.reshape(len(states), self.heads)

    def blocks_held(self, layer: int, state: SequenceState) -> list[tuple[list[int], int]]:
        """As `Sequences.blocks_held`, for each head."""
        return [(head.blocks, head.lengths[0]) for head in self.of_heads(layer, state)]

    def version_of(self, layer: int) -> int:
        return self.layers[layer].version

    def drawn(self) -> tuple[BlockPool, list[tuple[Any, int, list[int], bool]]]:
        """As `Sequences.drawn`, for each head in the first layer."""
        first = self.layers[0]
        return first.blocks, [
            (f"{n // self.heads}, head {n % self.heads}", head.held, head.blocks, False)
            for n, head in first.states.items()
        ]

    def add(self, token_ids: Sequence[int], salt: bytes, leave: int) -> int:
        """A new sequence without tokens."""
        for layer in self.layers:
            for _ in range(self.heads):
                layer.add([], b"", leave)
        return self._insert(HeadState([], [0] * self.num_layers))

    def truncate(self, state: SequenceState, n: int) -> None:
        """Keep the tokens before position `n` in every layer; `check_truncate` checks whether that is possible."""
        for i, layer in enumerate(self.layers):
            dropped = max(0, state.lengths[i] - n)
            for head in self.of_heads(i, state):
                layer.truncate(head, head.lengths[0] - dropped)
            state.lengths[i] -= dropped
        state.newest, state.draft = [0] * self.num_layers, state.draft.cut(n)
        self._changed()

    def free(self, seq: int) -> None:
        """Forget an existing sequence, and give back its blocks."""
        del self.states[seq]
        for layer in self.layers:
            for h in range(self.heads):
                layer.free(seq * self.heads + h)
        self._changed()

    def begin(
        self,
        operation: str,
        layer: int,
        ids: tuple[int, ...],
        cu_seqlens: tuple[int, ...],
        rows: int,
        part: bool = False,
    ) -> AppendStep:
        """As `Sequences.begin`; blocks are taken for each head that needs one."""
        states = self.distinct(ids, operation, "Append its tokens in one piece.")
        if layer == 0:
            self.refuse_uneven(operation, ids)
        if any(state.lengths[layer] == 0 for state in states):
            self.refuse_fewer(operation, layer, states, cu_seqlens)
        heads = self.heads
        of_heads = tuple([seq * heads + h for seq in ids for h in range(heads)])
        counts = [b - a for a, b in itertools.pairwise(cu_seqlens) for _ in range(heads)]
        bounds = (0, *itertools.accumulate(counts))
        inner = self.layers[layer].begin(operation, 0, of_heads, bounds, rows * heads)
        slots = inner.slots
        if max(counts, default=0) > 1:  # there by head, here by token
            slots = np.full(rows * heads, -1, np.int32)
            for first, end in itertools.pairwise(cu_seqlens):
                by_head = inner.slots[first * heads : end * heads]
                slots[first * heads : end * heads] = by_head.reshape(heads, end - first).T.ravel()
        starts = [state.lengths[layer] for state in states]
        places = np.zeros(rows, np.int32)
        return AppendStep(states, ids, cu_seqlens, starts, [], places, slots, of_heads=[inner], layer=layer)

    def undo(self, step: AppendStep, *, refused: bool) -> None:
        """As `Sequences.undo`; only an append takes blocks."""
        if not isinstance(step, PathStep):
            self.layers[step.layer].undo(step.of_heads[0], refused=refused)

    def commit(self, layer: int, step: AppendStep) -> None:
        self.layers[layer].commit(0, step.of_heads[0])
        for state, (first, end) in zip(step.states, itertools.pairwise(step.cu_seqlens), strict=True):
            state.newest[layer] = end - first
            state.lengths[layer] += end - first

    def revoke(self, layer: int, step: AppendStep) -> None:
        self.layers[layer].revoke(0, step.of_heads[0])
        for state, start in zip(step.states, step.starts, strict=True):
            state.lengths[layer], state.newest[layer] = start, 0

    def begin_paths(
        self, operation: str, states: Sequence[SequenceState], drafted: Sequence[int], paths: Sequence[Host]
    ) -> PathStep:
        """As `Sequences.begin_paths`; every head keeps the same path."""
        step = PathStep(list(states), drafted=list(drafted), paths=list(paths))
        counts = [n for n in drafted for _ in range(self.heads)]
        whose = [path for path in paths for _ in range(self.heads)]
        for i, layer in enumerate(self.layers):
            of_heads = [head for state in states for head in self.of_heads(i, state)]
            step.of_layers.append(layer.begin_paths(operation, of_heads, counts, whose))
        return step

    def moved_slots(self, step: PathStep) -> list[tuple[Host, Host]]:
        """As `Sequences.moved_slots`, for the rows of all heads."""
        return [layer.moved_slots(rows)[0] for layer, rows in zip(self.layers, step.of_layers, strict=True)]

    def commit_paths(self, step: PathStep) -> None:
        for layer, rows in zip(self.layers, step.of_layers, strict=True):
            layer.commit_paths(rows)
        for state, drafted, path in zip(step.states, step.drafted, step.paths, strict=True):
            less = drafted - len(path)
            state.lengths = [n - less for n in state.lengths]
            state.newest, state.draft = [0] * self.num_layers, Draft(settled=state.length)
        self._changed()

    def moves(self, layer: int, state: SequenceState, keep: Sequence[Host], rotated: bool) -> Moves:
        """The rows of all heads that a compaction moves, or rotates to a position equal to their place."""
        moved: list[tuple[Host, ...]] = []
        heads = zip(self.of_heads(layer, state), self.positions(layer, state), keep, strict=True)
        for head, positions, index in heads:
            place, before = np.arange(len(index)), positions[index]
            at = (index != place) | (rotated & (before != place))
            slots = (slots_of(head.blocks, places[at], self.block_size) for places in (index, place))
            moved.append((*slots, before[at], place[at]))
        return Moves(*(np.concatenate(parts) for parts in zip(*moved, strict=True)))

    def compact_heads(self, layer: int, state: SequenceState, keep: Sequence[Host], rotated: bool) -> None:
        """Count what each head has kept, after its rows were moved and rotated; blocks after it become free."""
        end, next_position = state.appended(layer), state.appended(layer) + state.shift(layer)
        rows = [of_head[index] for of_head, index in zip(self.positions(layer, state), keep, strict=True)]
        if rotated:
            rows, next_position = [np.arange(len(index)) for index in keep], max(map(len, keep))
        state.histories[layer] = History.of_rows(rows, end, next_position)
        state.newest[layer] = 0
        for head, index in zip(self.of_heads(layer, state), keep, strict=True):
            self.layers[layer].truncate(head, len(index))
        self.compacted = True
        self._changed()
