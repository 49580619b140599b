"""What the last compaction left of a layer: which tokens are held, and their positions.

For memory, appends and attention, a compacted layer is like one to which only the remaining tokens were ever appended.
`History` says which tokens those are: for a contiguous layer by sequence and head, for a sequence in a pool for all
heads together or by head. Tokens that were appended since follow them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tikv.arrays import Host


class History(NamedTuple):
    """The tokens that were left when some were last dropped, of each head or of all heads together; all on the host.

    The leading axes are (batch, heads) for a contiguous layer, (heads,) for a sequence whose heads have their own
    blocks, and (1,) for a sequence whose heads share blocks.

    Attributes:
        counts: (...) int64, tokens that each head has left.
        numbers: (..., n) int64, the number of each of them among all tokens appended, from 0; -1 after a head's last.
            Empty for a sequence in a pool, which cannot go back beyond its last compaction.
        positions: (..., n) int64, the same for their positions, which differ from the numbers if keys were rotated.
        end: tokens appended until then, less those trimmed.
        next_position: the position of the token that came next.
    """

    counts: Host
    numbers: Host
    positions: Host
    end: int
    next_position: int

    @classmethod
    def of_rows(cls, positions: Sequence[Host], end: int, next_position: int) -> History:
        """The history of a sequence in a pool from the positions that each head, or all heads as one, have left."""
        counts = np.array([len(row) for row in positions], np.int64)
        padded = np.full((len(counts), int(counts.max(initial=0))), -1, np.int64)
        for to, row in zip(padded, positions, strict=True):
            to[: len(row)] = row
        return cls(counts, np.empty(0, np.int64), padded, end, next_position)

    @property
    def tokens(self) -> int:
        """Tokens left in the head that has the most."""
        return int(self.positions.shape[-1])

    @property
    def dropped(self) -> int:
        """Tokens that were appended and dropped, in the head that has the most left."""
        return self.end - self.tokens

    @property
    def even(self) -> bool:
        """Whether all heads have equally many tokens left."""
        return self.counts.size == 0 or int(self.counts.min()) == self.tokens

    @property
    def first_whole(self) -> int:
        """The number from which on no head lacks a token."""
        back = np.arange(self.tokens)
        at = self.counts[..., None] - 1 - back
        numbers = np.take_along_axis(self.numbers, np.maximum(at, 0), axis=-1)
        follows = (at >= 0) & (numbers == self.end - 1 - back)
        return self.end - int(np.cumprod(follows, axis=-1).sum(axis=-1).min())

    def rows(self, newer: int) -> list[Host]:
        """The ascending positions that each head of a sequence in a pool holds after `newer` tokens were appended."""
        since = np.arange(self.next_position, self.next_position + newer)
        return [np.concatenate([row[:n], since]) for row, n in zip(self.positions, self.counts, strict=True)]

    def trimmed(self, drop: int) -> History:
        """The history without the `drop` newest tokens, which all heads have."""
        tokens = self.tokens - drop
        counts = self.counts - drop
        gone = np.arange(tokens) >= counts[..., None]
        numbers, positions = (np.where(gone, -1, a[..., :tokens]) for a in (self.numbers, self.positions))
        return History(counts, numbers, positions, self.end - drop, self.next_position - drop)

    def of_sequences(self, index: Host) -> History:
        """The history of these sequences of a batch."""
        counts = self.counts[index]
        most = int(counts.max(initial=0))
        numbers, positions = (a[index, :, :most] for a in (self.numbers, self.positions))
        return History(counts, numbers, positions, self.end, self.next_position)

    def require_sound(self) -> None:
        """Raise ValueError unless each head's numbers and positions ascend and are below the end; -1 is padding."""
        for a, end in ((self.numbers, self.end), (self.positions, self.next_position)):
            there = np.arange(self.tokens) < self.counts[..., None]
            rises = np.diff(a, axis=-1, prepend=-1) > 0
            if not ((a == -1) | there).all() or not (rises | ~there).all() or (a >= end).any():
                raise ValueError("the positions that a layer kept do not ascend, or go beyond its end")
        if self.tokens != int(self.counts.max(initial=0)):
            raise ValueError("there are more positions than any head of a layer kept")
