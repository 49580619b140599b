"""Merges of a compaction in pages: the rows that kept tokens become, coded in a pool of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, Host, new_array, to_device
from tikv.ops import blocks
from tikv.stores.layers.memory import copy_rows, rows_of
from tikv.stores.layers.merging import Merge, checked_merge
from tikv.stores.pools.append import HeadWrite, RowWrite
from tikv.stores.pools.blocks import slots_of
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.rows import as_rows, pairs_of, rows_of_head
from tikv.stores.pools.sequences import SequenceState


class PagedMerge(NamedTuple):
    """The sums of one layer of a sequence as the pool's dtype stores them.

    Attributes:
        merge: which rows get something, of one sequence.
        pages, layer: where they belong.
        pools: a pool whose first slots have the sums of all heads, in the order of `merge.targets`.
    """

    merge: Merge
    pages: Pages[LayerPools]
    layer: int
    pools: LayerPools

    @classmethod
    def of(
        cls, operation: str, pages: Pages[LayerPools], layer: int, state: SequenceState, index: Host, held: Any,
        merge: Any,
    ) -> PagedMerge | None:  # fmt: skip
        """Check a merge, and add up and code its rows; None if nothing gets anything."""
        live, config = pages.runtime, pages.config
        heads = config.num_kv_heads
        counts = np.broadcast_to(np.asarray(held), (1, heads))
        keep = np.broadcast_to(index, (heads, index.shape[-1]))[None]
        checked = checked_merge(operation, merge, keep, counts, live, per_sequence=True)
        if checked is None:
            return None
        rows = _decoded(pages, layer, state, int(counts.max()))
        sums = [checked.sums(live, a, (0, 1, heads), token_major=True) for a in rows]
        tokens = sums[0].shape[0]
        slots = tokens * (heads if config.per_head else 1)
        small = dataclasses.replace(config, num_blocks=-(-slots // config.block_size), page=None)
        pools = LayerPools(small, 1, live)
        write = (HeadWrite if config.per_head else RowWrite)(operation, pools, 0, sums)
        for call in write.calls(sums, to_device(np.arange(slots, dtype=np.int32), live)):
            call.run()
        live.synchronize()  # the launch reads slots that only this call keeps alive
        return cls(checked, pages, layer, pools)

    @property
    def first(self) -> int:
        """The first place that a sum has among the kept tokens."""
        return int(self.merge.places[self.merge.places >= 0].min())

    def write(self, operation: str, tables: Sequence[Sequence[int]]) -> None:
        """Write the sums to the places that the kept tokens have now, in the blocks of each head."""
        config, heads = self.pages.config, self.pages.config.num_kv_heads
        written = []
        for h, table in enumerate(tables):
            (n,) = np.nonzero(self.merge.places[0, h] >= 0)
            dst = slots_of(table, self.merge.places[0, h, n], config.block_size)
            src, head = (n * heads + h, 0) if config.per_head else (n, h)
            written.append(dst)
            arrays = zip(self.pools.layers[0], self.pages.pools.layers[self.layer], strict=True)
            for stream, (name, (a, to)) in enumerate(zip(("k", "v", *config.scale_names), arrays, strict=True)):
                if n.size and self.merge.changes(name):
                    pairs = pairs_of(rows_of_head(config, stream, src, head), rows_of_head(config, stream, dst, head))
                    blocks.swap_blocks(as_rows(a, config), as_rows(to, config), pairs)
        summaries = self.pages.pools.pages[self.layer]
        if summaries is not None:
            summaries.summarize_slots(operation, np.unique(np.concatenate(written)))


def _decoded(pages: Pages[LayerPools], layer: int, state: SequenceState, most: int) -> list[ArrayView]:
    """K and V of a sequence as float32 (tokens, heads, width)."""
    heads, held, rows = pages.config.num_kv_heads, pages.sequences.blocks_held(layer, state), []
    for stream, row in enumerate(pages.config.rows.both):
        out = new_array((most, heads, row.width), row.read_dtype, pages.runtime, zeroed=True)
        for h, (table, n) in enumerate(held):
            to = out if len(held) == 1 else out.part(1, h, h + 1).part(0, 0, n)
            if n:
                pages.pools.gather(layer, stream, np.array(table, np.int32), n, to)
        rows.append(_widened(pages.runtime, out))
    return rows


def _widened(live: runtime.Runtime, rows: ArrayView) -> ArrayView:
    """Contiguous rows (tokens, heads, width) as float32."""
    if rows.dtype is dtypes.float32:
        return rows
    tokens, heads, width = rows.shape
    wide = new_array(rows.shape, dtypes.float32, live)
    shape, strides = (1, 1, tokens * heads, width), (0, 0, width, 1)
    src, dst = (rows_of(a.restrided(shape, strides)) for a in (rows, wide))
    copy_rows(live, "PagedKVCacheStore.compact", [src], [dst], [width], (1, 1, tokens * heads))
    return wide
