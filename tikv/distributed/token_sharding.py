"""How tokens lie on ranks: blocks of consecutive positions in turn, so that each rank has some of any stretch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tikv.ops.attention.options import MOST_QUERIES
from tikv.stores.layers.counts import Layer


class Stretch(NamedTuple):
    """Consecutive queries whose keys on a rank one launch of attention describes."""

    first: int  # position of the first query
    end: int  # behind that of the last
    length: int  # tokens on this rank that the last one may see
    ahead: int  # how far the last query is taken to stand behind the newest of these
    first_valid: int  # oldest of this rank's tokens, behind its sinks, that the first one sees
    span: int  # tokens that a query sees, counted back from where it is taken to stand; 0 for all


class TokenSharding(NamedTuple):
    """Position p lies on rank ``p // interleave % world``; a rank's tokens, in order, are its tokens 0, 1, 2, ..."""

    rank: int
    world: int
    interleave: int

    def count(self, position: int) -> int:
        """This rank's tokens before a position."""
        rounds, rest = divmod(position, self.world * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def most(self, tokens: int) -> int:
        """The most tokens that one rank can have of a run of consecutive tokens, wherever it begins."""
        rounds, rest = divmod(tokens, self.world * self.interleave)
        return rounds * self.interleave + min(rest, self.interleave)

    def owns(self, position: int) -> bool:
        """Whether the token at a position lies on this rank."""
        return position // self.interleave % self.world == self.rank

    def position(self, index: int) -> int:
        """The position of this rank's n-th token."""
        block, inside = divmod(index, self.interleave)
        return (block * self.world + self.rank) * self.interleave + inside

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The stretches of consecutive positions among these that lie on this rank."""
        block = first // self.interleave
        block += (self.rank - block) % self.world
        while block * self.interleave < end:
            yield max(first, block * self.interleave), min(end, (block + 1) * self.interleave)
            block += self.world

    def blocks(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """These positions, split into parts that each lie on one rank."""
        while first < end:
            after = min(end, (first // self.interleave + 1) * self.interleave)
            yield first, after
            first = after

    def places(self, positions: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Where tokens at ascending positions are, if each rank stores its own side by side.

        Returns:
            (ranks and places, (2, n) int64; how many each rank has).
        """
        ranks = positions // self.interleave % self.world
        places = np.empty_like(ranks)
        counts = [int((ranks == rank).sum()) for rank in range(self.world)]
        for rank, count in enumerate(counts):
            places[ranks == rank] = np.arange(count)
        return np.stack([ranks, places]), counts

    def stretches(self, layer: Layer, valid_from: int, first: int, end: int) -> Iterator[Stretch]:
        """Queries at consecutive positions, split so that each part is a plain causal attention over this rank's keys.

        From one query to the next, the newest key that it sees here moves on by one or stays, and so does the oldest.
        Where the newest stays, the queries are treated as far enough ahead that all see it.

        Args:
            layer: the sinks and the ring over all ranks.
            valid_from: the oldest position after the sinks that may be seen, whatever the window.
            first: the position of the first query.
            end: the position after the last query.
        """
        # A window's oldest key behind the sinks moves only if it was not trimmed and was there before.
        fixed = max(layer.sinks, valid_from)
        far = self.most(layer.ring) + MOST_QUERIES + self.interleave
        while first < end:
            moves = self._moves(layer, fixed, first)
            after = first
            while after < end and self._moves(layer, fixed, after) == moves:
                after = self._next_change(layer, fixed, after)
            after = min(after, end, first + MOST_QUERIES)
            length, queries = self.count(after), after - first
            newest_moves, oldest_moves = moves
            ahead, span, oldest = 0, 0, 0
            if layer.ring:
                oldest = self.count(max(fixed, first + 1 - layer.ring))
                last = self.count(max(fixed, after - layer.ring))  # the oldest that the last query sees
                if newest_moves or queries == 1:
                    span = length - last if oldest_moves and queries > 1 else 0
                elif oldest_moves:
                    span, ahead = far, far + last - length
                else:
                    ahead = queries
            elif queries > 1 and not newest_moves:
                ahead = queries
            yield Stretch(first, after, length, ahead, oldest, span)
            first = after

    def _moves(self, layer: Layer, fixed: int, position: int) -> tuple[bool, bool]:
        """Whether the newest and the oldest key here are others than for the query at the position before."""
        left = position - layer.ring
        return self.owns(position), layer.ring > 0 and left >= fixed and self.owns(left)

    def _next_change(self, layer: Layer, fixed: int, position: int) -> int:
        """The next position behind this one at which `_moves` may be otherwise."""
        found = (position // self.interleave + 1) * self.interleave
        if layer.ring:
            left = position - layer.ring
            edge = fixed if left < fixed else (left // self.interleave + 1) * self.interleave
            found = min(found, edge + layer.ring)
        return found
