"""The older tokens of a layer as codes, quantised from the rows that a ring still has.

In a layer with a window, groups have slots in a ring: a group is overwritten as a whole once none of its tokens is
seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView, Host, Memory, memory_of_host, read_host, to_device, write_host
from tikv.errors import CapacityError
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import Rows
from tikv.stores.layers.coded import Coded, coded
from tikv.stores.layers.coded_arrays import CodeSlots, ScoreMemory, Weighing
from tikv.stores.layers.coded_tiles import CodedTiles
from tikv.stores.layers.compaction import copied_slots
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory, rows_of
from tikv.stores.layers.token_group_form import OlderForm
from tikv.stores.limits import BLOCK_BYTES


class ChannelCodes:
    """The codes of one layer's tokens after its sinks, in their own memory.

    Args:
        live: the runtime.
        form: how codes are kept.
        batch: the number of sequences.
        room: how many tokens there is memory for, in whole groups.
        rings: whether the slots of groups are a ring.
        scratch: memory for results between launches, which layers share.
        on_host: whether the memory is the host's.

    Attributes:
        tokens: how many tokens became codes, including those that were overwritten since.
        dropped: how many of the first tokens were dropped, in whole groups, if the slots are not a ring.

    Raises:
        CapacityError: an array is larger than a launch on this arch can address.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        form: OlderForm,
        batch: int,
        room: int,
        rings: bool,
        scratch: ScoreMemory,
        on_host: bool = False,
    ) -> None:
        self.runtime, self.form, self.group, self.rings = live, form, form.group, rings
        self.tokens, self.dropped, self.scratch, self.on_host = 0, 0, scratch, on_host
        self.arrays: list[ArrayView] = []
        self._coded: Coded
        self.hold(self.like(batch, room))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases, filled or not."""
        return sum(a.nbytes for a in self.arrays)

    @property
    def first(self) -> int:
        """How many of the tokens that became codes were overwritten or dropped."""
        return max(0, self.tokens - self.room) if self.rings else self.dropped

    @property
    def slots(self) -> int:
        """How many tokens' slots were ever written, from the first on."""
        return min(self.tokens - self.dropped, self.room)

    def encode(self, operation: str, layer: Layer) -> None:
        """Quantise the next group of tokens, whose rows the layer's ring has."""
        self._coded.encode(
            self.runtime, operation, (rows_of(layer.k), rows_of(layer.v)), self._memory_to_encode,
            (self.tokens - self.dropped) % self.room, placement=layer.placement(layer.sinks + self.tokens),
        )  # fmt: skip
        self.tokens += self.group

    @property
    def tiles(self) -> CodedTiles | None:
        """The codes, if they are tiles."""
        return self._coded if isinstance(self._coded, CodedTiles) else None

    def encode_rows(self, operation: str, tiles: CodedTiles, rows: tuple[Rows, Rows], groups: int) -> None:
        """Quantise the next groups of tokens, whose rows follow each other; they do not count as codes yet."""
        at = self.tokens - self.dropped
        tiles.encode_rows(self.runtime, operation, rows, self.batch, range(at, at + groups * self.group))

    def decode(self, operation: str, k: ArrayView, v: ArrayView, first: int = 0) -> None:
        """Write the numbers of all tokens from `first` on to the start of (batch, H, n, D) float32 arrays."""
        at = first
        while at < self.tokens:  # a launch for each run of consecutive slots
            slot = (at - self.dropped) % self.room
            slots = range(slot, min(self.room, slot + self.tokens - at))
            to = rows_of(k, at - first), rows_of(v, at - first)
            self._coded.decode(self.runtime, operation, slots, to, self.batch)
            at += len(slots)

    def attend(
        self,
        operation: str,
        q: ArrayView,
        scores: AttentionScale,
        oldest: int = 0,
        window: tuple[int, int] | None = None,
    ) -> Any:
        """Attention of (batch, Hq, T, D) queries over the codes from token `oldest` on, as `CodedArrays.attend`.

        All queries see all of these codes. With a `window`, each sees the newest ones within a number of tokens up to
        its own; it also says how many tokens after the last code the last query is.
        """
        return self._coded.attend(operation, q, scores, self._attended(oldest, window), self.scratch)

    def weigh(
        self,
        operation: str,
        q: ArrayView,
        weighing: Weighing,
        scores: AttentionScale,
        oldest: int = 0,
        window: tuple[int, int] | None = None,
    ) -> None:
        """Weigh the codes from token `oldest` on, as `CodedArrays.weigh`; the rest is as in `attend`."""
        self._coded.weigh(operation, q, weighing, scores, self._attended(oldest, window), self.scratch)

    def _attended(self, oldest: int, window: tuple[int, int] | None) -> CodeSlots:
        """The codes from token `oldest` on."""
        span, ahead = window or (None, 0)
        tokens = AttendedTokens(self.tokens - self.dropped, oldest - self.dropped, ahead)
        return CodeSlots(self.slots // self.group, self.room, self.room if self.rings else 0, span, tokens)

    def selected(self, sequences: np.ndarray[Any, Any], memory: LayerMemory) -> list[ArrayView]:
        """Copies of what some sequences hold, in new memory that `hold` then takes."""
        index, made = to_device(sequences, self.runtime), self.like(len(sequences))
        for (a, slots), to in zip(self.filled, made, strict=True):
            memory.move_slots(_of_slots(a), _of_slots(to), slots, index)
        return made

    def copied(self, operation: str, groups: Host, memory: LayerMemory) -> list[ArrayView]:
        """Copies of the groups (batch, heads, m), numbered as in `tokens`; `hold_only` takes the copies."""
        copies = []
        for a, (_, _, tokens) in zip(self.arrays, self.form.arrays().values(), strict=True):
            rows, each = _of_slots(a), self.group // tokens
            first = (groups * self.group - self.dropped) % self.room // tokens
            slots = (first[..., None] + np.arange(each)).reshape(*groups.shape[:2], -1)
            copies.append(copied_slots(operation, memory, rows, slots))
        return copies

    def hold_only(self, copied: Sequence[ArrayView], groups: int, memory: LayerMemory) -> None:
        """Hold only the `groups` groups that `copied` returned; with 0 groups there are no arrays."""
        for a, source in zip(self.arrays, copied, strict=groups > 0):
            memory.move_slots(source, _of_slots(a), source.shape[2])
        self.tokens, self.dropped = groups * self.group, 0

    def moved(self, room: int, drop: int, memory: LayerMemory) -> list[ArrayView]:
        """Copies without the `drop` oldest tokens, whole groups, in new memory for `room` tokens; `hold` takes them."""
        made = self.like(self.batch, room)
        for (a, slots), (_, _, tokens), to in zip(self.filled, self.form.arrays().values(), made, strict=True):
            rows, gone = _of_slots(a), drop // tokens
            memory.move_slots(rows.part(2, gone, rows.shape[2]), _of_slots(to), slots - gone)
        return made

    def like(self, batch: int, room: int | None = None) -> list[ArrayView]:
        """New memory for `batch` sequences and `room` tokens, or as many tokens as now with None.

        Raises:
            CapacityError: an array is larger than a launch on this arch can address.
        """
        live, room, made = self.runtime, self.room if room is None else room, []
        for name, (shape, dtype, tokens) in self.form.arrays().items():
            whole = (batch, self.form.heads, room // tokens, *shape)
            needed, limit = math.prod(whole) * dtype.itemsize, BLOCK_BYTES[live.arch]
            if needed > limit:
                raise CapacityError(
                    f"KVCacheStore: {name} of a layer need {needed} bytes in one piece of memory, and {live.arch} "
                    f"addresses {limit}. Use a smaller capacity, or several stores."
                )
            block = memory_of_host(needed, live) if self.on_host else Memory(needed, live)
            made.append(block.array(whole, dtype))
        return made

    def hold(self, arrays: list[ArrayView]) -> None:
        """Use these arrays, which `like` made, as the memory."""
        before = self.arrays[0].shape[0] if self.arrays else 0
        self.arrays, self._coded = arrays, coded(self.form, arrays)
        _, _, of_entry = next(iter(self.form.arrays().values()))
        self.batch, self.room = arrays[0].shape[0], arrays[0].shape[2] * of_entry
        if self.batch != before:
            self._memory_to_encode: Any = self._coded.turned(self.batch, 1, self.form.rows, self.runtime)

    @property
    def filled(self) -> list[tuple[ArrayView, int]]:
        """`arrays`, each with how many entries of its third axis were ever written."""
        tokens = [tokens for _, _, tokens in self.form.arrays().values()]
        return [(a, self.slots // n) for a, n in zip(self.arrays, tokens, strict=True)]

    def copy_to_host(self) -> list[np.ndarray[Any, Any]]:
        """The filled parts of `arrays` on the host."""
        return [read_host(a, self.runtime)[:, :, :n] for a, n in self.filled]

    def take_over(self, tokens: int, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Hold what `copy_to_host` returned for codes of the same form."""
        for to, saved in zip(self.arrays, arrays, strict=True):
            host = np.zeros(to.shape, to.dtype.numpy)
            host[:, :, : saved.shape[2]] = saved
            write_host(host, to)
        self.tokens = tokens


def _of_slots(a: ArrayView) -> ArrayView:
    """An array (batch, heads, slots, ...) as rows (batch, heads, slots, width), or (batch, heads, slots)."""
    if a.ndim < 5:
        return a
    return a.restrided((*a.shape[:3], math.prod(a.shape[3:])), (*a.strides[:3], 1))
