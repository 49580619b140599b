"""The least and the greatest key of each page of a pool, and reading those of sequences.

A page is part of a block. It is summarised when it is full: until then other sequences may hold fewer of its tokens, so
a sequence's last page is summarised when it is read. If keys are stored as numbers, an append summarises the pages that
it fills in its own launch; keys with scales are decoded first, in one more launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.arrays import ArrayView, CacheArray, Host, new_array, to_device
from tikv.ops import paged
from tikv.ops.layouts import Placement, Rows, WrittenPages
from tikv.ops.page_summaries import both_of, distance_in, summarize_listed
from tikv.runtime import Runtime
from tikv.stores.layers.memory import copy_rows
from tikv.stores.pools.config import PoolConfig
from tikv.stores.row_format import SCALES

Pair = tuple[ArrayView, ArrayView]


class LayerPages:
    """The summaries of one layer's pages, (blocks * pages of a block, heads, width) each, and the pool of its keys."""

    def __init__(
        self, live: Runtime, config: PoolConfig, keys: ArrayView, scales: dict[str, Any], summaries: Pair
    ) -> None:
        assert config.page is not None
        self.runtime, self.config, self.page = live, config, config.page
        self.keys, self.scale, self.summaries = keys, scales.get(SCALES[0]), summaries

    def written(self, row_step: int) -> WrittenPages:
        """The summaries that a launch of an append updates; see `WrittenPages`."""
        least = self._rows()[0]._replace(array=both_of(self.summaries))
        return WrittenPages(self.page, least, distance_in(self.summaries), unfinished=False, row_step=row_step)

    def _rows(self) -> tuple[Rows, Rows]:
        least, greatest = (Rows(a, token=a.strides[0], head=a.strides[1]) for a in self.summaries)
        return least, greatest

    def summarize_slots(self, operation: str, slots: Host) -> None:
        """Compute the summaries of the pages that contain these slots again, as if they were full."""
        pages = np.unique(slots[slots >= 0] // self.page)
        counts, heads = np.full(len(pages), self.page), self.config.block_heads
        self._summarize(operation, pages * self.page, counts, self.summaries, (pages * heads, 1))

    def summarize_filled(self, operation: str, slots: Host) -> None:
        """The same for the pages whose last slot is one of these."""
        self.summarize_slots(operation, slots[(slots >= 0) & ((slots + 1) % self.page == 0)])

    def _summarize(self, operation: str, starts: Host, counts: Host, to: Pair, places: tuple[Host, int]) -> None:
        """Summarise `counts` rows from these slots on, in one launch, or two if keys have scales.

        `places` are the rows of the first head's summaries, and the stride in rows to the next head's.
        """
        if len(starts) == 0:
            return
        config, live = self.config, self.runtime
        heads, size = config.block_heads, config.block_size
        if config.rows.k.is_numbers:
            rows, at, steps = self.keys, starts * heads, (heads, 1)
            if config.layout == "HND":
                at, steps = starts // size * heads * size + starts % size, (1, size)
        else:
            slots = (starts[:, None] + np.arange(self.page)).ravel()
            rows = new_array((len(slots), heads, config.rows.k.width), config.rows.k.read_dtype, live)
            paged.gather(
                operation, self.keys, to_device(slots.astype(np.int32), live), len(slots), layout=config.layout,
                scale=self.scale, out=rows, format=config.rows.k.format, by_slot=True,
            )  # fmt: skip
            at, steps = np.arange(len(starts)) * self.page * heads, (heads, 1)
        listed = np.stack([at, counts, places[0]], axis=-1)
        summarize_listed(live, operation, rows, to, listed, (heads, *steps, places[1]))

    def read(self, operation: str, tables: Host, lens: Host) -> tuple[CacheArray, CacheArray]:
        """Summaries of the tokens in these blocks: tables (B, M) or (B, H, M), lengths (B,) or (B, H).

        Returns:
            (B, H, P, width) each, where P is the number of pages of the longest; 0 in both for pages without tokens.
        """
        config, live, page = self.config, self.runtime, self.page
        count, heads = lens.size, config.block_heads  # of sequences, or of heads that have tables of their own
        table, held = tables.reshape(count, tables.shape[-1]).astype(np.int64), lens.reshape(count).astype(np.int64)
        pages, width = -(-int(held.max(initial=0)) // page), config.rows.k.width
        shape = (len(lens), config.num_kv_heads, pages, width)
        out = tuple(new_array(shape, config.rows.k.read_dtype, live, zeroed=True) for _ in range(2))
        if pages:
            first = np.arange(pages) * page
            block = np.take(table, np.minimum(first // config.block_size, table.shape[1] - 1), axis=1)
            slots = block * config.block_size + first % config.block_size
            self._copy_full(operation, np.where(first + page <= held[:, None], slots // page, -1), out)
            (unfilled,) = np.nonzero(held % page)
            last = held[unfilled] // page
            places = unfilled * heads * pages + last, pages
            self._summarize(operation, slots[unfilled, last], held[unfilled] % page, (out[0], out[1]), places)
        return CacheArray(out[0], live), CacheArray(out[1], live)

    def _copy_full(self, operation: str, pages: Host, out: Sequence[ArrayView]) -> None:
        """Copy the summaries of these pages (n, P), -1 for none, of all heads of a block, into (B, H, P, width)."""
        live, heads, (count, n) = self.runtime, self.config.block_heads, pages.shape
        width = self.config.rows.k.width
        to = [Rows(a, sequence=heads * n * width, token=width, head=n * width) for a in out]
        index = to_device(pages.astype(np.int32).ravel(), live)
        copy_rows(
            live, operation, self._rows(), to, [width, width], (count, heads, n),
            Placement("slots", array=index, limit=self.summaries[0].shape[0], group=n, step=1),
        )  # fmt: skip
