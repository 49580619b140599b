"""The sequences of a per-head paged store: a block table for each layer, sequence and KV head.

A block holds tokens of one head of one layer, and each layer deals out blocks of its own. To `Sequences` of one layer a
head of a sequence is a sequence: here they are put together. As there, bookkeeping on the host alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tikv.arrays import Host
from tikv.stores.block_pool import slots_of
from tikv.stores.head_rows import Moves
from tikv.stores.sequences import AppendStep, PathStep, Sequences, SequenceState


@dataclass
class HeadState(SequenceState):
    """What is known of one sequence. `lengths` count tokens that came, whatever a head still holds of them."""

    seq: int = 0
    since: list[int] = field(default_factory=list)  # of each layer: tokens behind its newest compaction, or all
    kept: list[list[Host] | None] = field(default_factory=list)  # of each layer: positions that each head held then
    shifts: list[int] = field(default_factory=list)  # of each layer: a newer token's position less its number

    def compacted_at(self, layer: int) -> int | None:
        """As `SequenceState.compacted_at`."""
        return None if self.kept[layer] is None else self.lengths[layer] - self.since[layer]

    def shift(self, layer: int) -> int:
        """By how much the position of a new token is beyond its number."""
        return self.shifts[layer]


@dataclass
class HeadStep(AppendStep):
    """Where the new rows of one layer go: `slots` has one for each token and head."""

    layer: int = 0
    rows: AppendStep | None = None  # the step of the layer's `Sequences`


@dataclass
class HeadPaths(PathStep):
    """Which of the newest tokens of some sequences are kept."""

    of_layers: list[PathStep] = field(default_factory=list)  # the same of the heads in each layer


class HeadSequences(Sequences):
    """`Sequences` whose heads hold different tokens.

    Attributes:
        layers: of each layer the `Sequences` of its heads; head h of sequence n is their number n * heads + h.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, heads: int) -> None:
        super().__init__(num_layers, num_blocks, block_size)
        self.heads = heads
        self.layers = [Sequences(1, num_blocks, block_size) for _ in range(num_layers)]

    @property
    def num_free(self) -> int:
        """Free blocks of the layer that has fewest."""
        return min(layer.num_free for layer in self.layers)

    def of_heads(self, layer: int, state: SequenceState) -> list[SequenceState]:
        """The states of a sequence's heads in one layer."""
        assert isinstance(state, HeadState)
        first = state.seq * self.heads
        return [self.layers[layer].states[first + h] for h in range(self.heads)]

    def held(self, layer: int, state: SequenceState) -> Host:
        """(H,) int32: tokens that each head holds."""
        return np.array([head.lengths[0] for head in self.of_heads(layer, state)], np.int32)

    def positions_by_head(self, layer: int, state: SequenceState) -> list[Host]:
        """Of each head the true positions of what it holds, ascending, int64."""
        assert isinstance(state, HeadState)
        length, kept = state.lengths[layer], state.kept[layer]
        if kept is None:
            return [np.arange(length)] * self.heads
        newer = np.arange(length - state.since[layer], length) + state.shifts[layer]
        return [np.concatenate([head, newer]) for head in kept]

    def tables(self, layer: int, states: Sequence[SequenceState]) -> tuple[Host, Host]:
        """(B, H, most blocks) block tables padded with -1, and (B, H) what heads hold, int32."""
        heads = [self.of_heads(layer, state) for state in states]
        most = max([1, *(len(head.blocks) for of_one in heads for head in of_one)])
        table, lens = (
            np.full((len(states), self.heads, most), -1, np.int32),
            np.zeros((len(states), self.heads), np.int32),
        )
        for b, of_one in enumerate(heads):
            for h, head in enumerate(of_one):
                table[b, h, : len(head.blocks)] = head.blocks
                lens[b, h] = head.lengths[0]
        return table, lens

    def add(self, token_ids: Sequence[int], salt: bytes) -> int:
        """A new sequence without tokens."""
        for layer in self.layers:
            for _ in range(self.heads):
                layer.add([], b"")
        zeros = [0] * self.num_layers
        state = HeadState(
            [], zeros, seq=self.next, since=list(zeros), kept=[None] * self.num_layers, shifts=list(zeros)
        )
        return self._insert(state)

    def truncate(self, state: SequenceState, n: int) -> None:
        """Keep the tokens before position `n` in every layer; `check_truncate` says whether that can be."""
        assert isinstance(state, HeadState)
        for i, layer in enumerate(self.layers):
            dropped = max(0, state.lengths[i] - n)
            for head in self.of_heads(i, state):
                layer.truncate(head, head.lengths[0] - dropped)
            state.lengths[i] -= dropped
            state.since[i] -= dropped
        state.newest = [0] * self.num_layers
        self._changed()

    def free(self, seq: int) -> None:
        """Forget a sequence that is there, and give back its blocks."""
        del self.states[seq]
        for layer in self.layers:
            for h in range(self.heads):
                layer.free(seq * self.heads + h)
        self._changed()

    def begin(
        self, operation: str, layer: int, ids: tuple[int, ...], cu_seqlens: tuple[int, ...], rows: int
    ) -> AppendStep:
        """As `Sequences.begin`; blocks are taken for each head that needs one."""
        states = self.distinct(ids, operation, "Append its tokens in one piece.")
        heads, counts = self.heads, np.diff(cu_seqlens)
        of_heads = tuple(seq * heads + h for seq in ids for h in range(heads))
        bounds = np.concatenate([[0], np.cumsum(np.repeat(counts, heads))]).tolist()
        inner = self.layers[layer].begin(operation, 0, of_heads, tuple(bounds), rows * heads)
        slots = np.full(rows * heads, -1, np.int32)
        for first, end in itertools.pairwise(cu_seqlens):  # the rows of a head there, of a token here
            some = inner.slots[first * heads : end * heads]
            slots[first * heads : end * heads] = some.reshape(heads, end - first).T.ravel()
        starts = [state.lengths[layer] for state in states]
        return HeadStep(ids, cu_seqlens, states, starts, [], np.zeros(rows, np.int32), slots, layer=layer, rows=inner)

    def undo(self, step: AppendStep, *, refused: bool) -> None:
        """As `Sequences.undo`; only an append takes blocks."""
        if not isinstance(step, HeadStep):
            return
        assert step.rows is not None
        self.layers[step.layer].undo(step.rows, refused=refused)

    def commit(self, layer: int, step: AppendStep) -> None:
        """As `Sequences.commit`."""
        assert isinstance(step, HeadStep)
        assert step.rows is not None
        self.layers[layer].commit(0, step.rows)
        for state, count in zip(step.states, np.diff(step.cu_seqlens).tolist(), strict=True):
            assert isinstance(state, HeadState)
            state.lengths[layer] += count
            state.since[layer] += count
            state.newest[layer] = count

    def revoke(self, layer: int, step: AppendStep) -> None:
        """As `Sequences.revoke`."""
        assert isinstance(step, HeadStep)
        assert step.rows is not None
        self.layers[layer].revoke(0, step.rows)
        for state, start in zip(step.states, step.starts, strict=True):
            assert isinstance(state, HeadState)
            state.since[layer] -= state.lengths[layer] - start
            state.lengths[layer], state.newest[layer] = start, 0

    def begin_paths(
        self, operation: str, states: Sequence[SequenceState], drafted: Sequence[int], paths: Sequence[Host]
    ) -> PathStep:
        """As `Sequences.begin_paths`; every head keeps the same path."""
        none = np.empty(0, np.int32)
        step = HeadPaths((), (0,), list(states), [], [], none, none, drafted=list(drafted), paths=list(paths))
        counts = [n for n in drafted for _ in range(self.heads)]
        whose = [path for path in paths for _ in range(self.heads)]
        for i, layer in enumerate(self.layers):
            of_heads = [head for state in states for head in self.of_heads(i, state)]
            step.of_layers.append(layer.begin_paths(operation, of_heads, counts, whose))
        return step

    def moved_slots(self, step: PathStep) -> list[tuple[Host, Host]]:
        """As `Sequences.moved_slots`, of the rows of all heads."""
        assert isinstance(step, HeadPaths)
        return [layer.moved_slots(rows)[0] for layer, rows in zip(self.layers, step.of_layers, strict=True)]

    def commit_paths(self, step: PathStep) -> None:
        """As `Sequences.commit_paths`."""
        assert isinstance(step, HeadPaths)
        for layer, rows in zip(self.layers, step.of_layers, strict=True):
            layer.commit_paths(rows)
        for state, drafted, path in zip(step.states, step.drafted, step.paths, strict=True):
            assert isinstance(state, HeadState)
            less = drafted - len(path)
            state.lengths = [n - less for n in state.lengths]
            state.since = [n - less for n in state.since]
            state.newest = [len(path)] * self.num_layers
        self._changed()

    def moves(self, layer: int, state: SequenceState, keep: Sequence[Host], turned: bool) -> Moves:
        """The rows that a compaction moves, or turns to a position that is its place, of all heads."""
        found: list[tuple[Host, ...]] = []
        heads = zip(self.of_heads(layer, state), self.positions_by_head(layer, state), keep, strict=True)
        for head, positions, index in heads:
            place, before = np.arange(len(index)), positions[index]
            at = (index != place) | (turned & (before != place))
            slots = (slots_of(head.blocks, some[at], self.block_size) for some in (index, place))
            found.append((*slots, before[at], place[at]))
        return Moves(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def compact_heads(self, layer: int, state: SequenceState, keep: Sequence[Host], turned: bool) -> None:
        """Count what each head has kept, whose rows were moved and turned; blocks behind it are free."""
        assert isinstance(state, HeadState)
        positions = self.positions_by_head(layer, state)
        kept = [of_head[index] for of_head, index in zip(positions, keep, strict=True)]
        if turned:
            kept = [np.arange(len(index)) for index in keep]
            state.shifts[layer] = max(map(len, keep)) - state.lengths[layer]
        state.kept[layer] = kept
        state.since[layer], state.newest[layer] = 0, 0
        for head, index in zip(self.of_heads(layer, state), keep, strict=True):
            self.layers[layer].truncate(head, len(index))
        self.compacted = True
        self._changed()
