"""The memory of a paged store: the pools of all layers, which move whole blocks of every layer together.

All layers have pools of one form, so a block id names the same block of every layer. The layers are adjacent in as few
arrays as launches can address; copying a block copies it in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView, new_array, to_device
from tikv.ops import blocks, paged
from tikv.ops.attention.call import Caches
from tikv.ops.attention.paged import PagedLayout
from tikv.runtime.cache import BoundedCache
from tikv.stores.limits import FORMS_OF_LAYER, require_memory
from tikv.stores.pools.config import HostArray, PoolConfig
from tikv.stores.pools.summaries import LayerPages
from tikv.stores.row_format import SCALES

HostBlocks: TypeAlias = list[list[HostArray]]  # copies of blocks of all layers: the arrays of each group


class LayerGroup:
    """Layers whose blocks are adjacent: they have one array for K, one for V and one for each kind of scales."""

    def __init__(self, config: PoolConfig, layers: int, live: runtime.Runtime) -> None:
        self.config, self.layers, n = config, layers, layers * config.num_blocks
        self.arrays = [new_array((n, *shape), dtype, live) for shape, dtype in config.block_forms()]
        self.summaries: list[ArrayView] = []  # (n, pages, heads, width) each: the least and the greatest keys

    def of_layer(self, layer: int) -> list[ArrayView]:
        """The arrays of one of the layers, in place."""
        n = self.config.num_blocks
        return [a.part(0, layer * n, layer * n + n) for a in self.arrays]

    def summaries_of(self, layer: int) -> tuple[ArrayView, ArrayView]:
        """The summaries of one of the layers, (pages of all blocks, heads, width) each."""
        _, pages, heads, width = self.summaries[0].shape
        n = self.config.num_blocks * pages
        least, greatest = (
            a.restrided((n, heads, width), (heads * width, width, 1), layer * n * heads * width) for a in self.summaries
        )
        return least, greatest

    def pairs(self, src: Sequence[int], dst: Sequence[int], src_blocks: int, dst_blocks: int) -> HostArray:
        """(layers * n, 2) int32: each block to move and its destination, in each layer; pools have these sizes."""
        pair = np.stack([np.asarray(src, np.int32), np.asarray(dst, np.int32)], axis=1)
        layer = np.arange(self.layers, dtype=np.int32)[:, None, None]
        return np.ascontiguousarray((pair + layer * np.array([src_blocks, dst_blocks], np.int32)).reshape(-1, 2))


class BlockPools:
    """The blocks of all layers of a store; a number names the same block of each layer.

    Attributes:
        config: what the layers have in common.
        groups: the groups of layers that share one piece of memory.
        layers: K's pool, V's pool and, for int8 and groups, their scales, in place, for each layer.
    """

    def __init__(self, config: PoolConfig, num_layers: int, live: runtime.Runtime) -> None:
        self.config, self.runtime = config, live
        blocks_of_layers = num_layers * config.num_blocks
        nbytes = sum(blocks_of_layers * math.prod(shape) * dtype.itemsize for shape, dtype in config.block_forms())
        require_memory(nbytes, live, "PagedKVCacheStore", "Use fewer blocks, or a dtype of fewer bits.")
        most = min(num_layers, config.layers_together(live))
        self.groups = [LayerGroup(config, min(most, num_layers - first), live) for first in range(0, num_layers, most)]
        self.layers = [group.of_layer(i) for group in self.groups for i in range(group.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, including page summaries, filled or not."""
        return sum(a.nbytes for group in self.groups for a in (*group.arrays, *group.summaries))

    def summarize_blocks(self, written: Sequence[int]) -> None:
        """Compute the summaries of these blocks' pages, for layers that keep any."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each pair from one block to another, in all layers."""
        src, dst = zip(*pairs, strict=True)
        for group in self.groups:
            numbers = group.pairs(src, dst, self.config.num_blocks, self.config.num_blocks)
            for arrays in (group.arrays[:2], group.arrays[2:], group.summaries):
                if len(arrays) == 2:
                    blocks.copy_blocks(arrays[0], arrays[1], numbers)
                elif arrays:
                    blocks.swap_blocks(arrays[0], arrays[0], numbers)

    def read_blocks(self, numbers: Sequence[int]) -> HostBlocks:
        """Copies of these blocks of all layers on the host; it waits for them."""
        n = len(numbers)
        copies = self.host_blocks(n)
        for group, host in zip(self.groups if n else (), copies, strict=False):
            pairs = group.pairs(numbers, range(n), self.config.num_blocks, n)
            for array, to in zip(group.arrays, host, strict=True):
                blocks.swap_blocks(array, to, pairs)
        self.runtime.synchronize()
        return copies

    def host_blocks(self, n: int) -> HostBlocks:
        """Memory of the host for `n` blocks of all layers."""
        return [
            [np.empty((group.layers * n, *a.shape[1:]), a.dtype.numpy) for a in group.arrays] for group in self.groups
        ]

    def write_blocks(self, host: HostBlocks, src: Sequence[int], dst: Sequence[int]) -> None:
        """Write blocks `src` of what `read_blocks` copied into blocks `dst`, in all layers, and wait."""
        if not dst:
            return
        for group, arrays in zip(self.groups, host, strict=True):
            pairs = group.pairs(src, dst, len(arrays[0]) // group.layers, self.config.num_blocks)
            for array, source in zip(group.arrays, arrays, strict=True):
                blocks.swap_blocks(source, array, pairs)
        self.runtime.synchronize()

    def arguments(self) -> dict[str, Any]:
        """The arguments of a store of this configuration, as `PoolConfig.arguments`."""
        return {"num_layers": len(self.layers), **self.config.arguments()}

    def to_rows(self, host: HostBlocks) -> list[list[HostArray]]:
        """What `read_blocks` copied, by layer, in the shapes of `PoolConfig.names`."""
        layers = []
        for group, arrays in zip(self.groups, host, strict=True):
            n = len(arrays[0]) // group.layers
            for i in range(group.layers):
                layers.append([self.config.to_rows(s, a[i * n : (i + 1) * n]) for s, a in enumerate(arrays)])
        return layers

    def from_rows(self, rows: list[list[HostArray]]) -> HostBlocks:
        """The reverse of `to_rows`."""
        layers = iter([[self.config.from_rows(s, a) for s, a in enumerate(arrays)] for arrays in rows])
        return [
            [np.concatenate(a) for a in zip(*(next(layers) for _ in range(group.layers)), strict=True)]
            for group in self.groups
        ]


class LayerPools(BlockPools):
    """The pools of all layers of a store, with rows stored token by token.

    Attributes:
        scales: each layer's scales of int8 and groups by the names of operations' parameters; or what all rows are
            divided by.
        caches: all of this for each layer, as attention takes it, without block tables.
        pages: the page summaries of each layer, or None.
        writes: the writes of rows of one form each, which are bound to these arrays.
    """

    def __init__(self, config: PoolConfig, num_layers: int, live: runtime.Runtime) -> None:
        super().__init__(config, num_layers, live)
        divisors = {
            name: to_device(np.array(numbers, np.float32), live)
            for name, numbers in zip(SCALES, config.rows.divisors, strict=True)
            if numbers is not None
        }
        self.scales: list[dict[str, Any]] = [
            dict(zip(config.scale_names, arrays[2:], strict=True)) | divisors for arrays in self.layers
        ]
        self.caches = [
            Caches(PagedLayout(config.layout), k, v, formats=config.rows.formats, **scales)
            for (k, v, *_), scales in zip(self.layers, self.scales, strict=True)
        ]
        self.pages: list[LayerPages | None] = [None] * num_layers
        self.writes: BoundedCache[Any, Any] = BoundedCache(FORMS_OF_LAYER * num_layers)
        if config.page is not None:
            self._make_pages(config.page)

    def _make_pages(self, page: int) -> None:
        config, summaries = self.config, []
        for group in self.groups:
            shape = group.arrays[0].shape[0], config.block_size // page, config.block_heads, config.rows.k.width
            both = new_array((2, *shape), config.rows.k.read_dtype, self.runtime)
            group.summaries = [both.restrided(shape, both.strides[1:], i * both.strides[0]) for i in range(2)]
            summaries += [group.summaries_of(i) for i in range(group.layers)]
        of_layers = zip(self.layers, self.scales, summaries, strict=True)
        self.pages = [LayerPages(self.runtime, config, k, scales, pair) for (k, *_), scales, pair in of_layers]

    def write_blocks(self, host: HostBlocks, src: Sequence[int], dst: Sequence[int]) -> None:
        """As `BlockPools.write_blocks`; it also computes the summaries of their pages."""
        super().write_blocks(host, src, dst)
        self.summarize_blocks(dst)
        self.runtime.synchronize()

    def summarize_blocks(self, written: Sequence[int]) -> None:
        """Compute the summaries of these blocks' pages again, in all layers, if any are kept."""
        size = self.config.block_size
        slots = (np.asarray(written, np.int64)[:, None] * size + np.arange(size)).ravel()
        for pages in self.pages:
            if pages is not None:
                pages.summarize_slots("PagedKVCacheStore", slots)

    def gather(self, layer: int, stream: int, table: HostArray, length: int, out: ArrayView) -> None:
        """Copy `length` rows of K (0) or of V (1) out of the blocks of a table."""
        scale = self.scales[layer].get(SCALES[stream])
        paged.gather(
            "PagedKVCacheStore.tokens", self.layers[layer][stream], table, length, layout=self.config.layout,
            scale=scale, out=out, format=self.config.rows.formats[stream],
        )  # fmt: skip
