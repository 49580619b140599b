"""How tokens are spread over ranks: blocks of consecutive positions go to the ranks round-robin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tikv.ops.attention.options import MOST_QUERIES
from tikv.stores.layers.counts import Layer


class QueryRun(NamedTuple):
    """Consecutive queries that one launch of attention can serve over a rank's keys."""

    first: int  # the position of the first query
    end: int  # the position after the last query
    length: int  # tokens on this rank that the last query may see
    ahead: int  # how far after the newest of these the last query is assumed to be
    first_valid: int  # the oldest of this rank's tokens after its sinks that the first query sees
    span: int  # tokens that a query sees, counted back from where it is assumed to be; 0 for all


class TokenSharding(NamedTuple):
    """Position p is on rank ``p // interleave % world``; a rank numbers its own tokens 0, 1, 2, ... in order.

    Examples:
        >>> from tikv.distributed.token_sharding import TokenSharding
        >>> first, second = TokenSharding(0, 2, 4), TokenSharding(1, 2, 4)  # 2 ranks, blocks of 4 tokens
        >>> list(first.runs(0, 10)), list(second.runs(0, 10))
        ([(0, 4), (8, 10)], [(4, 8)])
        >>> first.count(10), second.count(10), first.position(4)  # its token number 4 is at position 8
        (6, 4, 8)
    """

    rank: int
    world: int
    interleave: int

    def count(self, position: int) -> int:
        """This rank's tokens before a position."""
        rounds, rest = divmod(position, self.world * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def most(self, tokens: int) -> int:
        """The most of any `tokens` consecutive tokens that one rank can have."""
        rounds, rest = divmod(tokens, self.world * self.interleave)
        return rounds * self.interleave + min(rest, self.interleave)

    def owns(self, position: int) -> bool:
        """Whether the token at a position is on this rank."""
        return position // self.interleave % self.world == self.rank

    def position(self, index: int) -> int:
        """The position of this rank's token number `index`."""
        block, inside = divmod(index, self.interleave)
        return (block * self.world + self.rank) * self.interleave + inside

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs of consecutive positions, among those from `first` to before `end`, that are on this rank."""
        block = first // self.interleave
        block += (self.rank - block) % self.world
        while block * self.interleave < end:
            yield max(first, block * self.interleave), min(end, (block + 1) * self.interleave)
            block += self.world

    def blocks(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The positions from `first` to before `end`, split into parts that are each on one rank."""
        while first < end:
            after = min(end, (first // self.interleave + 1) * self.interleave)
            yield first, after
            first = after

    def places(self, positions: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Where tokens at ascending positions are, if each rank stores its own contiguously.

        Returns:
            (the rank of each token and its place there, (2, n) int64; how many of the tokens each rank has).
        """
        ranks = positions // self.interleave % self.world
        places = np.empty_like(ranks)
        counts = [int((ranks == rank).sum()) for rank in range(self.world)]
        for rank, count in enumerate(counts):
            places[ranks == rank] = np.arange(count)
        return np.stack([ranks, places]), counts

    def query_runs(self, layer: Layer, valid_from: int, first: int, end: int) -> Iterator[QueryRun]:
        """Queries at consecutive positions, split so that each part is a plain causal attention over this rank's keys.

        From one query to the next, the newest key on this rank that it sees moves on by one or stays the same, and so
        does the oldest. Where the newest stays, the queries are treated as far enough ahead that all of them see it.

        Args:
            layer: the sinks and the ring over all ranks.
            valid_from: the oldest position after the sinks that may be seen, whatever the window.
            first: the position of the first query.
            end: the position after the last query.
        """
        # A window's oldest key after the sinks moves only if it was not trimmed and was there before.
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
                last = self.count(max(fixed, after - layer.ring))  # the oldest key that the last query sees
                if newest_moves or queries == 1:
                    span = length - last if oldest_moves and queries > 1 else 0
                elif oldest_moves:
                    span, ahead = far, far + last - length
                else:
                    ahead = queries
            elif queries > 1 and not newest_moves:
                ahead = queries
            yield QueryRun(first, after, length, ahead, oldest, span)
            first = after

    def _moves(self, layer: Layer, fixed: int, position: int) -> tuple[bool, bool]:
        """Whether the newest and the oldest key here differ from those for the query at the previous position."""
        evicted = position - layer.ring
        return self.owns(position), layer.ring > 0 and evicted >= fixed and self.owns(evicted)

    def _next_change(self, layer: Layer, fixed: int, position: int) -> int:
        """The next position after this one at which `_moves` may change."""
        change = (position // self.interleave + 1) * self.interleave
        if layer.ring:
            evicted = position - layer.ring
            edge = fixed if evicted < fixed else (evicted // self.interleave + 1) * self.interleave
            change = min(change, edge + layer.ring)
        return change
