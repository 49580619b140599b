"""The sequences of a paged store: their blocks, how many tokens each layer holds, and where the next tokens go.

This is bookkeeping on the host; the store moves the data. An append has three parts: `Sequences.begin` takes the
blocks, the store copies those that are shared and writes the rows, and `commit` counts them, or `undo` gives the blocks
back.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.errors import CapacityError, OptionError, PositionError
from tikv.ops import checks
from tikv.ops.attention.request import AttendRequest
from tikv.stores import lengths
from tikv.stores.draft import Draft, Parents
from tikv.stores.history import History
from tikv.stores.picture import counted
from tikv.stores.pools.blocks import BlockPool, chained_digests, slots_of

DISTANCES = ("window", "alibi_slopes")
no_rows = functools.partial(np.empty, 0, np.int32)


@dataclass
class SequenceState:
    """What is known of one sequence: its blocks, how many tokens each layer holds of it, and what was dropped."""

    blocks: list[int]
    lengths: list[int]  # tokens that each layer holds
    token_ids: Host = field(default_factory=lambda: np.empty(0, np.int64), compare=False)  # known ones
    salt: bytes = b""  # as `salt_bytes` gives it
    digests: list[bytes] = field(default_factory=list)  # of the full blocks of `token_ids`
    registered: int = 0  # how many of those every layer has written
    swapped: Any = None  # its blocks on the host, as `LayerPools.read_blocks` gives them, if it is swapped out
    withheld: frozenset[bytes] | None = None  # of one from a file: digests that the pool knew before, and goes on to
    histories: list[History | None] = field(default_factory=list)  # of each layer, by its newest compaction
    newest: list[int] = field(default_factory=list, compare=False)  # of each layer: tokens that the last append brought
    draft: Draft = field(default=Draft(), compare=False)  # what is known of its newest tokens
    number: int = field(default=-1, compare=False)  # of the sequence

    def __post_init__(self) -> None:
        self.histories = self.histories or [None] * len(self.lengths)
        self.newest = self.newest or [0] * len(self.lengths)

    @property
    def ends(self) -> list[int]:
        """Tokens appended to each layer, less those truncated."""
        counted = zip(self.lengths, self.histories, strict=True)
        return [held + (history.dropped if history else 0) for held, history in counted]

    @property
    def length(self) -> int:
        """Tokens that were appended to every layer, less those truncated; see `lengths.common`."""
        return lengths.common(self.ends)

    @property
    def held(self) -> int:
        """Tokens of the layer that holds the most."""
        return max(self.lengths)

    def appended(self, layer: int) -> int:
        """Tokens appended to a layer, less those truncated."""
        history = self.histories[layer]
        return self.lengths[layer] + (history.dropped if history else 0)

    def shift(self, layer: int) -> int:
        """The difference between a new token's position and its place among those held."""
        history = self.histories[layer]
        return history.next_position - history.tokens if history else 0

    def positions(self, layer: int) -> Host:
        """The position of each token that a layer holds, int64."""
        history, held = self.histories[layer], self.lengths[layer]
        return np.arange(held) if history is None else history.rows(held - history.tokens)[0]

    def _since(self, layer: int) -> tuple[int, str]:
        """How many tokens were appended to a layer since its compaction, and words for a message about that."""
        history, appended = self.histories[layer], self.appended(layer)
        since = appended - (history.end if history else 0)
        return since, f", {since} of them since it was compacted" if history else ""

    @property
    def named(self) -> str:
        """The sequence, for messages about its layers."""
        return f" of sequence {self.number}"

    @property
    def remedy(self) -> str:
        """The way out if a step ended between two layers."""
        n, seq = counted(min(self.ends), "token"), self.number
        return f"Call align([{seq}]) to bring every layer of it back to {n}, or free({seq})."

    def cannot_align(self, operation: str, layer: int, n: int, why: str) -> PositionError:
        """The error for a layer that cannot go back to `n` tokens."""
        return PositionError(
            f"{operation}: layer {layer} of sequence {self.number} cannot go back from {self.ends[layer]} tokens to "
            f"{n}: {why}. Call free({self.number}) and begin again, or append the missing tokens to the other layers."
        )

    def check_truncate(self, operation: str, n: int) -> None:
        """Raise PositionError if tokens after the first `n` were appended before a compaction."""
        for layer, history in enumerate(self.histories):
            if history is not None and n < history.end:
                raise PositionError(
                    f"{operation}: sequence {self.number} cannot keep {n} tokens: layer {layer} was compacted when "
                    f"it had {history.end}. Keep at least that many."
                )

    def check_queries(self, operation: str, layer: int, queries: int, request: AttendRequest, remedy: str = "") -> None:
        """Refuse several queries whose own tokens are not all held, and distances where tokens were dropped.

        `DISTANCES` of a request count how far a key is from its query. `remedy` is another way out if there are more
        queries than tokens.
        """
        for name in DISTANCES:
            if getattr(request, name) is not None and self.histories[layer] is not None:
                raise OptionError(
                    f"{operation}: {name} cannot be used with sequence {self.number}, whose layer {layer} was "
                    "compacted: attention counts the tokens that are left, not how far apart they were. Leave "
                    f"{name} out."
                )
        appended, (since, known) = self.appended(layer), self._since(layer)
        if queries > 1 and appended and queries > since:
            raise PositionError(
                f"{operation}: {queries} queries are given for sequence {self.number}, which has {appended} tokens in "
                f"layer {layer}{known}. The queries belong to the newest tokens: append those first, or pass fewer "
                f"queries.{remedy}"
            )

    def drafted(self, operation: str, drafted: int | None) -> int:
        """How many of the newest tokens were drafted, the same in all layers; None: those of the last append.

        PositionError if a layer has fewer since it was compacted, if layers differ, or if the number is unknown.
        """
        appended, newest = self.appended(0), self.newest[0]
        for layer, brought in enumerate(self.newest):
            other = self.appended(layer)
            if other != appended or (brought != newest and drafted is None):
                raise PositionError(
                    f"{operation}: layer {layer} of sequence {self.number} has {other} tokens ({brought} from its last "
                    f"append), and layer 0 has {appended} ({newest} from its last append). Append the draft to all "
                    "layers first."
                )
        count = self.draft.tokens(operation, newest, drafted, appended, f" to sequence {self.number}")
        for layer, (since, known) in enumerate(map(self._since, range(len(self.histories)))):
            if since < count:
                raise PositionError(
                    f"{operation}: drafted={count} is too many, since sequence {self.number} has {appended} tokens in "
                    f"layer {layer}{known}. Pass at most {since}."
                )
        return count


@dataclass
class AppendStep:
    """Where the new tokens of some sequences go, and what changes in their block tables; the same for every layer."""

    states: list[SequenceState]
    ids: tuple[int, ...] = ()
    cu_seqlens: tuple[int, ...] = (0,)
    starts: list[int] = field(default_factory=list)  # what the layer held of each sequence before
    shifts: list[int] = field(default_factory=list)  # by how much positions of new tokens are beyond their places
    places: Host = field(default_factory=no_rows)  # of each row among those its sequence holds, int32; 0: padding
    slots: Host = field(default_factory=no_rows)  # where each row goes, int32; -1 for padding
    tables: list[list[int]] = field(default_factory=list)  # the blocks of each sequence after
    allocated: list[int] = field(default_factory=list)  # blocks taken for this step
    copies: list[tuple[int, int]] = field(default_factory=list)  # a shared block that is written into, and its copy
    overwritten: list[int] = field(default_factory=list)  # blocks whose tokens change
    lost: dict[int, bytes] = field(default_factory=dict)  # digests of allocated blocks that are not written yet
    committed: bool = False  # by one layer, so that tables and counts are true already
    layers: int = 0  # how many layers have committed it, if it has tokens: one layer may repeat a step without any
    alone: bool = False  # whether the first layer did it, and others have no tokens of these sequences
    of_heads: list[AppendStep] = field(default_factory=list)  # the same of heads that have tables of their own
    layer: int = 0  # where it goes, if heads have tables of their own

    @property
    def has_tokens(self) -> bool:
        """Whether any sequence gets tokens."""
        return self.cu_seqlens[-1] > 0

    @property
    def positions(self) -> Host:
        """The position of each row in its sequence, int32; 0 for padding."""
        if not any(self.shifts):
            return self.places
        return _places(np.add(self.starts, self.shifts).tolist(), self.cu_seqlens, len(self.places))


@dataclass
class PathStep(AppendStep):
    """Which of the newest tokens of some sequences are kept, and what changes in their block tables."""

    drafted: list[int] = field(default_factory=list)  # of each sequence, how many of its newest tokens are asked about
    paths: list[Host] = field(default_factory=list)  # of each, ascending indices among them
    of_layers: list[PathStep] = field(default_factory=list)  # the same of heads that have tables of their own

    def starts_in(self, layer: int) -> tuple[int, ...]:
        """The place of the first drafted token of each sequence."""
        return tuple(state.lengths[layer] - drafted for state, drafted in zip(self.states, self.drafted, strict=True))


class Sequences:
    """The sequences of a store and the blocks that they share.

    Attributes:
        states: by sequence, in the order they came.
        next: the number that the next sequence gets.
        blocks: which blocks are free, and who holds the others.
        outside: how many first tokens of a sequence are stored elsewhere, so that later ones have slots before their
            places.
        by_head: heads have block tables of their own.
        version: changes whenever blocks of an existing sequence change, for code that keeps copies of tables.
    """

    by_head, outside = False, 0

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.num_layers = num_layers
        self.block_size = block_size
        self.states: dict[int, SequenceState] = {}
        self.next = 0
        self.blocks = BlockPool(num_blocks)
        self.version = 0
        self.compacted = False  # whether any sequence was ever compacted
        self._step: AppendStep | None = None  # the last one that was committed, which other layers repeat

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return self.blocks.num_free

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def _first_block(self, place: int) -> int:
        """The first block that tokens from a place on may be written to, by its place in the table."""
        return max(0, place - self.outside) // self.block_size

    def state(self, seq: int, operation: str, *, swapped: bool = False) -> SequenceState:
        """The state of a sequence that exists and, unless `swapped` is True, is not swapped out; or PositionError."""
        state = self.states.get(seq) if type(seq) is int else None
        if state is None:
            number = checks.integer(seq, "seq", operation)
            state = self.states.get(number)
            if state is None:
                what = "was freed" if number < self.next else "was never added"
                raise PositionError(
                    f"{operation}: sequence {number} {what}. There are {len(self.states)} sequences; add() or "
                    f"fork() makes one."
                )
        if state.swapped is not None and not swapped:
            raise PositionError(f"{operation}: sequence {seq} is swapped out. Call swap_in({seq}) first.")
        return state

    def distinct(
        self, ids: Sequence[int], operation: str, remedy: str, *, swapped: bool = False
    ) -> list[SequenceState]:
        """The states of sequences, each of which must exist and be named once; or PositionError."""
        states = [self.state(seq, operation, swapped=swapped) for seq in ids]
        if len(set(ids)) != len(ids):
            twice = next(seq for seq in ids if ids.count(seq) > 1)
            raise PositionError(f"{operation}: sequence {twice} is named twice in seqs. {remedy}")
        return states

    def add(self, token_ids: Sequence[int], salt: bytes, leave: int) -> int:
        """A new sequence, which begins with the registered blocks of these tokens under this salt.

        It does not have the last `leave` tokens, even if a block that it shares does: the append that brings them
        copies that block first.
        """
        ids, digests = self.known(token_ids, salt)
        prefix = self.blocks.prefix(digests)
        length = min(len(prefix) * self.block_size, max(0, len(token_ids) - leave))
        shared = prefix[: self.blocks_for(length)]
        self.blocks.acquire(shared)
        lengths = [length] * self.num_layers
        return self._insert(SequenceState(shared, lengths, ids, salt, digests, length // self.block_size))

    def known(self, token_ids: Sequence[int] | Host, salt: bytes) -> tuple[Host, list[bytes]]:
        """The token ids of full blocks, and the digests of those blocks."""
        digests = chained_digests(token_ids, self.block_size, salt)
        return np.array(token_ids[: len(digests) * self.block_size], np.int64), digests

    def fork(self, state: SequenceState) -> int:
        """A new sequence with the same tokens, which shares all blocks."""
        self.blocks.acquire(state.blocks)
        self._step = None
        full = min(state.lengths) // self.block_size
        forked = dataclasses.replace(
            state,
            blocks=list(state.blocks),
            lengths=list(state.lengths),
            token_ids=state.token_ids[: full * self.block_size],
            digests=state.digests[:full],
            histories=list(state.histories),
            newest=list(state.newest),
        )
        return self._insert(forked)

    def _insert(self, state: SequenceState) -> int:
        seq = state.number = self.next
        self.next += 1
        self.states[seq] = state
        return seq

    def truncate(self, state: SequenceState, n: int) -> None:
        """Keep the first `n` tokens in every layer, and give back the blocks after them."""
        state.lengths = [
            min(held, n - (history.dropped if history else 0))
            for held, history in zip(state.lengths, state.histories, strict=True)
        ]
        state.newest, state.draft = [0] * self.num_layers, state.draft.cut(n)
        self._cut(state, n)
        self._changed()

    def _cut(self, state: SequenceState, known: int) -> None:
        """Give back blocks after those of the layer that holds the most; forget token ids from place `known` on."""
        keep = self.blocks_for(state.held)
        self.blocks.release(state.blocks[keep:])
        del state.blocks[keep:]
        del state.digests[known // self.block_size :]
        state.token_ids = state.token_ids[: len(state.digests) * self.block_size]
        state.registered = min(state.registered, len(state.digests))

    def begin_compaction(self, operation: str, state: SequenceState, first: int, keep: int) -> AppendStep:
        """Take blocks for copies of the shared ones in which rows change, from place `first` to `keep`; as `begin`.

        The store copies `copies` and moves the rows by the step's table; `compact` or `undo` ends it.
        """
        step = AppendStep([state])
        places = range(self._first_block(first), self.blocks_for(keep)) if first < keep else range(0)
        self._allocate(operation, step, [places])
        return step

    def compact(self, layer: int, step: AppendStep, first: int, history: History) -> None:
        """Count what a layer of a sequence has kept, whose rows from place `first` on were moved."""
        (state,) = step.states
        self._take_over(step)
        state.lengths[layer], state.histories[layer], state.newest[layer] = history.tokens, history, 0
        self._cut(state, first)
        self.compacted = True
        self._changed()

    def rewritten(self, step: AppendStep, first: int) -> None:
        """Take the blocks of a rewrite from place `first` on, whose token ids no longer say what they hold."""
        (state,) = step.states
        self._take_over(step)
        self._cut(state, first)
        self._changed()

    def begin_paths(
        self,
        operation: str,
        states: Sequence[SequenceState],
        drafted: Sequence[int],
        paths: Sequence[Host],
    ) -> PathStep:
        """Take blocks for copies of the shared ones in which rows of a path move; as `begin`.

        The store copies `copies` and moves the rows by `moved_slots`; `commit_paths` or `undo` ends it.
        """
        step = PathStep(list(states), drafted=list(drafted), paths=list(paths))
        changed: list[set[int]] = [set() for _ in states]
        for starts in {step.starts_in(layer) for layer in range(self.num_layers)}:
            for places, start, path in zip(changed, starts, paths, strict=True):
                if (first := _first_moved(path)) < len(path):
                    places |= set(range((start + first) // self.block_size, self.blocks_for(start + len(path))))
        self._allocate(operation, step, [sorted(places) for places in changed])
        return step

    def moved_slots(self, step: PathStep) -> list[tuple[Host, Host]]:
        """For each layer, the slots of the rows that move, and the slots to which they move."""

        @functools.cache
        def moved(starts: tuple[int, ...]) -> tuple[Host, Host]:
            pairs = [(np.empty(0, np.int64),) * 2]
            for table, start, path in zip(step.tables, starts, step.paths, strict=True):
                place = np.arange(_first_moved(path), len(path))
                src, dst = (slots_of(table, start + places, self.block_size) for places in (path[place], place))
                pairs.append((src, dst))
            src, dst = map(np.concatenate, zip(*pairs, strict=True))
            return src, dst

        return [moved(step.starts_in(layer)) for layer in range(self.num_layers)]

    def commit_paths(self, step: PathStep) -> None:
        """Count the drafted tokens that are kept, whose rows have moved, and no others."""
        self._take_over(step)
        for state, drafted, path in zip(step.states, step.drafted, step.paths, strict=True):
            first = min(state.lengths) - drafted + _first_moved(path)
            state.lengths = [held - drafted + len(path) for held in state.lengths]
            state.newest, state.draft = [0] * self.num_layers, Draft(settled=state.length)
            self._cut(state, first)
        self._changed()

    def held(self, layer: int, state: SequenceState) -> Any:
        """Tokens that a layer of a sequence holds; of each head, (H,) int32, where heads have tables of their own."""
        return state.lengths[layer]

    def positions(self, layer: int, state: SequenceState) -> list[Host]:
        """The position of each token that a layer holds, int64: for all heads together, or by head."""
        return [state.positions(layer)]

    def block_table(self, layer: int, state: SequenceState) -> Host:
        """The blocks of a sequence in order, int32."""
        return np.array(state.blocks, np.int32)

    def block_tables(self, layer: int, states: Sequence[SequenceState]) -> tuple[Host, Host]:
        """(B, most blocks) block tables padded with -1, and (B,) lengths, int32."""
        table = padded_tables([state.blocks for state in states])
        return table, np.array([state.lengths[layer] for state in states], np.int32)

    def blocks_held(self, layer: int, state: SequenceState) -> list[tuple[list[int], int]]:
        """The blocks of what a layer of a sequence holds and how many tokens: of all heads, or of each."""
        return [(state.blocks[: self.blocks_for(state.lengths[layer])], state.lengths[layer])]

    def version_of(self, layer: int) -> int:
        """What changes whenever block tables of this layer do."""
        return self.version

    def drawn(self) -> tuple[BlockPool, list[tuple[Any, int, list[int], bool]]]:
        """What a picture shows: the blocks, and of each sequence its name, tokens, blocks, and whether it is away."""
        return self.blocks, [
            (seq, state.held, state.blocks, state.swapped is not None) for seq, state in self.states.items()
        ]

    def free(self, seq: int) -> None:
        """Forget an existing sequence, and give back its blocks."""
        self.blocks.release(self.states.pop(seq).blocks)
        self._changed()

    def swap_out(self, state: SequenceState, host: Any) -> None:
        """Give back the blocks of a sequence, whose data are in `host` now."""
        self.blocks.release(state.blocks)
        state.blocks, state.swapped = [], host
        self._changed()

    def blocks_to_swap_in(self, state: SequenceState, operation: str) -> tuple[list[int], list[int]]:
        """Take blocks for a sequence that is swapped out: those found by its prefix, and free ones; as `begin`."""
        shared = self.blocks.prefix(state.digests[: state.registered])
        self.blocks.acquire(shared)
        try:
            return shared, self.blocks.allocate(self.blocks_for(state.held) - len(shared), operation)
        except CapacityError:
            self.blocks.release(shared)
            raise

    def swap_in(self, state: SequenceState, shared: list[int], fresh: list[int]) -> None:
        """Give a sequence the blocks that were taken for it, which hold its data now."""
        state.blocks, state.swapped = shared + fresh, None
        state.registered = len(shared)
        self.register(state)
        self._changed()

    def restore(self, states: dict[int, SequenceState]) -> None:
        """Add sequences under numbers of their own; they become holders of their blocks, which hold their data."""
        for number, state in states.items():
            state.number = number
            self.blocks.acquire(state.blocks)
            if state.swapped is None:
                self.register(state)
            self.states[number] = state
            self.compacted = self.compacted or any(state.histories)
        self._changed()

    def adopt(self, states: Sequence[SequenceState]) -> list[int]:
        """`restore` sequences under the next numbers."""
        numbers = list(range(self.next, self.next + len(states)))
        self.restore(dict(zip(numbers, states, strict=True)))
        self.next += len(numbers)
        return numbers

    def register(self, state: SequenceState) -> None:
        """Make the full blocks that every layer has written findable by others."""
        full = min(min(state.lengths) // self.block_size, len(state.digests))
        for i in range(state.registered, full):
            digest = state.digests[i]
            # Blocks from a file replace no others under a digest, not even a block that was evicted for them.
            if state.withheld is None or not (digest in state.withheld or self.blocks.find(digest) is not None):
                self.blocks.register(state.blocks[i], digest)
        state.registered = max(state.registered, full)

    def _changed(self) -> None:
        self._step = None
        self.version += 1

    def refuse_uneven(self, operation: str, ids: tuple[int, ...]) -> bool:
        """Raise PositionError before a write to the first layer if layers of a sequence have different lengths.

        Returns:
            Whether only the first layer has tokens of all of these.
        """
        step, alone = self._step, True
        # A decode loop waits for this: after a step of all layers they are equally long, and if only the first has
        # tokens, a step of it alone changes nothing.
        if step is not None and step.ids == ids and not self.compacted:
            if step.layers == self.num_layers:
                return False
            if step.alone and step.layers == 1:
                return True
        for state in filter(None, map(self.states.get, ids)):
            ends = state.ends
            if lengths.differ(ends):
                lengths.refuse_different(operation, ends, state.remedy, state.named)
            alone &= not any(ends[1:])
        return alone

    def refuse_fewer(
        self, operation: str, layer: int, states: Sequence[SequenceState], cu_seqlens: Sequence[int]
    ) -> None:
        """`lengths.refuse_fewer` for each sequence of which the layer has no tokens."""
        for state, (first, end) in zip(states, itertools.pairwise(cu_seqlens), strict=True):
            if state.lengths[layer] == 0:
                lengths.refuse_fewer(operation, state.ends, state.newest, layer, end - first, state.remedy, state.named)

    def begin(
        self,
        operation: str,
        layer: int,
        ids: tuple[int, ...],
        cu_seqlens: tuple[int, ...],
        rows: int,
        part: bool = False,
    ) -> AppendStep:
        """Find where new tokens of a layer go, and take blocks for them. `commit` or `undo` ends it.

        The store copies `copies` before it writes, unless the step was `committed` by another layer. `part` says that
        the tokens are some of those of a call that was checked as a whole. CapacityError if too few blocks are free,
        and nothing is changed; PositionError as `distinct`, `refuse_uneven` and `refuse_fewer`.
        """
        alone = layer == 0 and not part and self.num_layers > 1 and self.refuse_uneven(operation, ids)
        step = self._step
        if (
            step is not None
            and (step.ids, step.cu_seqlens, len(step.slots)) == (ids, cu_seqlens, rows)
            and [state.lengths[layer] for state in step.states] == step.starts
            and (not self.compacted or [state.shift(layer) for state in step.states] == step.shifts)
        ):
            return step
        states = self.distinct(ids, operation, "Append its tokens in one piece.")
        starts = [state.lengths[layer] for state in states]
        if not part and 0 in starts:
            self.refuse_fewer(operation, layer, states, cu_seqlens)
        shifts = [state.shift(layer) for state in states] if self.compacted else []
        places = _places(starts, cu_seqlens, rows)
        step = AppendStep(states, ids, cu_seqlens, starts, shifts, places, np.full(rows, -1, np.int32), alone=alone)
        size = self.block_size
        ends = [start + b - a for start, (a, b) in zip(starts, itertools.pairwise(cu_seqlens), strict=True)]
        written = [
            range(self._first_block(n), -(-end // size)) if end > n else () for n, end in zip(starts, ends, strict=True)
        ]
        self._allocate(operation, step, written)
        for table, first, end in zip(step.tables, cu_seqlens, cu_seqlens[1:], strict=False):
            if end - first == 1:
                place = int(places[first])
                step.slots[first] = table[place // size] * size + place % size
            elif end > first:
                step.slots[first:end] = slots_of(table, places[first:end], size)
        return step

    def _allocate(self, operation: str, step: AppendStep, written: Sequence[Iterable[int]]) -> None:
        """Take the blocks that the step needs, and copies of the shared ones that it writes to; all of them or none.

        `written` has, for each sequence, the ascending places in its table whose blocks are written to.
        """
        pool = self.blocks
        needed: list[list[int]] = []  # of each sequence, the places in its table that get a block
        copied: dict[int, int] = {}
        for state, places in zip(step.states, written, strict=True):
            mine = []
            for place in places:
                if place >= len(state.blocks):
                    mine.append(place)
                    continue
                block = state.blocks[place]
                if pool.holders(block) - copied.get(block, 0) > 1:
                    copied[block] = copied.get(block, 0) + 1
                    mine.append(place)
                else:
                    step.overwritten.append(block)
            needed.append(mine)
        step.allocated = pool.allocate(sum(map(len, needed)), operation, step.lost)
        fresh = iter(step.allocated)
        for state, mine in zip(step.states, needed, strict=True):
            table = state.blocks
            if mine:
                table = table + [-1] * (mine[-1] + 1 - len(table))
                for place in mine:
                    block = next(fresh)
                    if table[place] >= 0:
                        step.copies.append((table[place], block))
                        step.lost.pop(block, None)
                    table[place] = block
            step.tables.append(table)

    def undo(self, step: AppendStep, *, refused: bool) -> None:
        """Give back the blocks of a step that failed; if it was refused before a write, with their digests."""
        if not step.committed:
            self.blocks.give_back(step.allocated, step.lost if refused else {})

    def commit(self, layer: int, step: AppendStep) -> None:
        """Count the tokens of a step in one layer, which has written them."""
        if not step.committed:
            self._take_over(step)
            if step.allocated:
                self.version += 1
            step.committed = True
            self._step = step
        step.layers += step.has_tokens
        for i, (state, start) in enumerate(zip(step.states, step.starts, strict=True)):
            state.newest[layer] = count = step.cu_seqlens[i + 1] - step.cu_seqlens[i]
            state.lengths[layer] = start + count
            if state.registered < len(state.digests):
                self.register(state)

    def grow_tree(self, step: AppendStep, parents: Parents) -> None:
        """Note the parents (B, T) of the tokens of a step, which its first layer has counted."""
        for row, (state, (first, end)) in enumerate(zip(step.states, itertools.pairwise(step.cu_seqlens), strict=True)):
            now = state.appended(0)
            state.draft = Draft(state.draft.settled, now - (end - first), now, parents, (row,))

    def revoke(self, layer: int, step: AppendStep) -> None:
        """Uncount the tokens of a step in one layer; their blocks stay, for tokens that are appended instead."""
        step.layers -= step.has_tokens
        for state, start in zip(step.states, step.starts, strict=True):
            state.lengths[layer], state.newest[layer] = start, 0

    def _take_over(self, step: AppendStep) -> None:
        """Give the blocks of a step, which has copied and written them, to its sequences."""
        for state, table in zip(step.states, step.tables, strict=True):
            state.blocks = table
        for block in step.overwritten:
            self.blocks.forget(block)
        self.blocks.release([shared for shared, _ in step.copies])


def rewritten_back(operation: str, layer: int, state: SequenceState, start: int, tokens: int) -> int:
    """How many of a layer's newest tokens begin at position `start`; the next `tokens` are held one after the other.

    Raises:
        PositionError: they are not, or a compaction may have dropped some between them.
    """
    start, end = checks.integer(start, "start", operation), state.ends[layer]
    history = state.histories[layer]
    low = 0 if history is None else history.end
    if start < low or start + tokens > end:
        raise PositionError(
            f"{operation}: positions {start} to {start + tokens - 1} of sequence {state.number} cannot be rewritten: "
            f"layer {layer} has rows for {low} to {end - 1}{', as compact() moved those before' * (low > 0)}. Rewrite "
            "positions within that range, or append the tokens."
        )
    return end - start


def refuse_missed(operation: str, layer: int, states: Sequence[SequenceState]) -> None:
    """Raise PositionError if a layer has no tokens of a sequence of which another layer has some."""
    for state in states:
        ends = state.ends
        if ends[layer] == 0 < max(ends):
            most = ends.index(max(ends))
            raise PositionError(
                f"{operation}: layer {layer} holds no tokens of sequence {state.number}, and layer {most} holds "
                f"{ends[most]}. Append to layer {layer} first, or use extend(). If the empty result is to be "
                f"merged with others, pass return_lse=True."
            )


def padded_tables(tables: Sequence[Sequence[int]]) -> Host:
    """Block tables as one array (n, most blocks) int32, at least one wide, padded with -1."""
    padded = np.full((len(tables), max([1, *map(len, tables)])), -1, np.int32)
    for row, blocks in zip(padded, tables, strict=True):
        row[: len(blocks)] = blocks
    return padded


def _first_moved(path: Host) -> int:
    """The first index of a path whose row moves, and with it all that follow; its length if none does."""
    moved = path != np.arange(len(path))
    return int(moved.argmax()) if moved.any() else len(path)


def _places(starts: Sequence[int], cu_seqlens: tuple[int, ...], rows: int) -> Host:
    """The place of each row in its sequence, after the tokens held, int32; rows after the last are padding."""
    if cu_seqlens == tuple(range(rows + 1)):
        return np.array(starts, np.int32)
    counts = [b - a for a, b in itertools.pairwise(cu_seqlens)]
    places = np.zeros(rows, np.int32)
    shift = np.repeat(np.asarray(starts, np.int64) - np.asarray(cu_seqlens[:-1], np.int64), counts)
    places[: cu_seqlens[-1]] = np.arange(cu_seqlens[-1]) + shift
    return places
