"""Queries of many sequences, one sequence after the other, in tiles of equally many queries.

Attention kernels take (B, Hq, T, D). Sequences with different numbers of queries become tiles of T queries, each of
which attends as a sequence of its own that ends where the tile ends: this is how its queries are its newest tokens.
The numbers are computed by torch or NumPy, where they lie, and nothing waits for a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tikv.arrays import Array


class QueryTiles(NamedTuple):
    """Where the rows (total, ...) of queries lie in tiles (n, T, ...), and back.

    The first tile of a sequence may have rows of no query: they come first. Tiles without a sequence come last.
    """

    rows: Any  # (n, T) the row of each query of a tile; a valid row for those of no query
    sequence: Any  # (n,)
    behind: Any  # (n,) how many queries of its sequence follow a tile
    used: Any  # (n,) whether a tile belongs to a sequence
    tile: Any  # (total,) the tile of each row
    number: Any  # (total,) and its number there
    inside: Any  # (total,) whether a row belongs to a sequence

    def lengths(self, lengths: Array, causal: bool) -> Any:
        """(n,) the keys up to the end of each tile, from (B,) lengths; all keys of its sequence if not `causal`."""
        of_sequence = lengths[self.sequence]
        ends = (of_sequence - self.behind).clip(0) if causal else of_sequence
        return ends * self.used


def query_tiles(library: Any, starts: Array, positions: Array, size: int, sequences: int) -> QueryTiles:
    """Tiles of `size` queries of the sequences that start at `starts`.

    Args:
        library: numpy or torch, whose arrays the others are.
        starts: (B + 1,) integers that ascend from 0.
        positions: 0 to total - 1; there is at least one row.
        size: T, at most total.
        sequences: B, at least 1.
    """
    total = int(positions.shape[0])
    counts = starts[1:] - starts[:-1]
    ends = library.cumsum((counts + size - 1) // size, 0)  # where the tiles of each sequence end
    most = min(total, (total + sequences * (size - 1)) // size)
    tiles = positions[:most]
    sequence = library.searchsorted(ends, tiles, side="right").clip(0, sequences - 1)
    used = tiles < ends[-1]
    behind = (ends[sequence] - 1 - tiles) * size
    rows = (starts[1:][sequence] - behind - size)[:, None] + positions[:size]
    of_row = library.searchsorted(starts[1:], positions, side="right").clip(0, sequences - 1)
    after = starts[1:][of_row] - 1 - positions
    return QueryTiles(
        rows=rows.clip(0, total - 1),
        sequence=sequence,
        behind=behind,
        used=used,
        tile=(ends[of_row] - 1 - after // size).clip(0, most - 1),
        number=size - 1 - after % size,
        inside=positions < starts[-1],
    )
