"""Which slot of a layer's memory holds which token, in each row of the batch: one rule for writes, reads and masks."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class SlotMap(NamedTuple):
    """The slots of the tokens that a layer holds: of each row its first `sinks` tokens, and the newest ones.

    Rows of a left-padded batch begin at different positions; their padding has no slot. Token q of a row, counted from
    its first token, is in slot q as long as nothing was dropped. The sinks stay there. The tokens after them follow in
    temporal order, or go round: token q is in slot ``sinks + (q - sinks) % ring``.

    Attributes:
        end: the position of the next token.
        first: the oldest position after the sinks that is still held.
        sinks: how many first tokens of a row are never dropped.
        ring: the number of slots after the sinks that tokens go round; 0 if the slots are in temporal order.
        starts: the position of each row's first token; None if all rows begin at position 0.

    Examples:
        >>> SlotMap(end=11, first=7, sinks=2, ring=4).positions().tolist()
        [0, 1, 10, 7, 8, 9]
        >>> SlotMap(end=5, first=2, sinks=2, starts=(0, 4)).positions().tolist()
        [[0, 1, 2, 3, 4], [4, -1, -1, -1, -1]]
    """

    end: int
    first: int
    sinks: int = 0
    ring: int = 0
    starts: tuple[int, ...] | None = None

    @property
    def used(self) -> int:
        """How many first slots are in use: as many as the longest row needs."""
        start = min(self.starts or (0,))
        if self.ring:
            return max(0, min(self.end - start, self.sinks + self.ring))
        return max(0, min(self.end - start, self.sinks)) + max(0, self.end - max(self.first, start + self.sinks))

    def after(self, tokens: int) -> SlotMap:
        """The map after so many more tokens, which overwrite the oldest of a ring."""
        end = self.end + tokens
        first = max(self.first, end - self.ring) if self.ring else self.first
        return SlotMap(end, first, self.sinks, self.ring, self.starts)

    def held(self, start: int = 0) -> Array:
        """The positions that are held of a row that begins at `start`, in temporal order."""
        behind = max(self.first, start + self.sinks, self.end - self.ring if self.ring else 0)
        held: Array = np.r_[start : min(start + self.sinks, self.end), behind : self.end].astype(np.int64)
        return held

    def slots(self, positions: Array | int, start: int = 0) -> Array:
        """The slots of held or next positions of a row that begins at `start`; negative for its padding."""
        token: Array = np.asarray(positions) - start
        if self.ring:
            behind = self.sinks + (token - self.sinks) % self.ring
        else:
            behind = token - max(0, self.first - start - self.sinks)
        slots: Array = np.where(token < self.sinks, token, behind)
        return slots

    def positions(self) -> Array:
        """The position in each slot that is in use, (slots,) or, if `starts` are given, (batch, slots); -1 if empty."""
        rows = np.full((len(self.starts or (0,)), self.used), -1, np.int64)
        for row, start in zip(rows, self.starts or (0,), strict=True):
            held = self.held(start)
            row[self.slots(held, start)] = held
        return rows if self.starts else rows[0]

    def sources(self, to: SlotMap) -> Array:
        """For each slot in use by the map `to`, the slot of the same token here: (slots,) or (batch, slots).

        A slot that `to` leaves empty gets some token of its row.
        """
        rows = np.zeros((len(self.starts or (0,)), to.used), np.int64)
        for row, start in zip(rows, self.starts or (0,), strict=True):
            held = to.held(start)
            sources = self.slots(held, start)
            row[:] = sources[0] if len(sources) else 0
            row[to.slots(held, start)] = sources
        return rows if self.starts else rows[0]


class TokenMoves(NamedTuple):
    """For each of the first slots, the slot from which its token comes: (slots,) or (batch, slots).

    Attributes:
        runs: (first, end) of each run of neighbouring slots, in order; empty if `sources` has a row for each sequence.
    """

    sources: Array
    runs: list[tuple[int, int]]

    @classmethod
    def of(cls, sources: Array) -> TokenMoves:
        """The moves from these slots."""
        if sources.ndim > 1 or not len(sources):
            return cls(sources, [])
        cuts = [0, *(np.flatnonzero(np.diff(sources) != 1) + 1).tolist(), len(sources)]
        return cls(sources, [(int(sources[a]), int(sources[b - 1]) + 1) for a, b in itertools.pairwise(cuts)])


@functools.lru_cache(maxsize=2)  # layers of one kind move the same tokens one after another
def moves_between(now: SlotMap, to: SlotMap) -> TokenMoves:
    """How the tokens of a map get to the slots that they have in another."""
    return TokenMoves.of(now.sources(to))
