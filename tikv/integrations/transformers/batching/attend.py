"""Attention over the pages of transformers' continuous batching, read where they lie.

A batch holds the queries of many requests, one request after the other: decoded tokens, prompts, and chunks of prompts.
transformers would gather all keys of a batch, and mask what belongs to other requests. Here the new keys are written
into their pages, and queries read pages through a table. Only a chunk of a prompt in a sliding layer is read with a
copy of the window before it: the pages of such a layer are a ring, in which the chunk replaces what it still sees.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch

from tikv.errors import OptionError, ShapeError
from tikv.integrations.transformers.attention import keywords
from tikv.integrations.transformers.attention.attend import attend
from tikv.integrations.transformers.attention.prompts import is_invariant
from tikv.integrations.transformers.batching.managers import check_attention
from tikv.integrations.transformers.batching.page_memory import PagesOfLayer, joined, put_among
from tikv.integrations.transformers.memory.slots import request_of
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.integrations.transformers.versions.installed import MODELS_UPDATE_PAGES
from tikv.ops.attention.call import attention_call
from tikv.ops.attention.plan import Results
from tikv.ops.attention.query_tiles import query_tiles
from tikv.ops.attention.request import AttendRequest

OPERATION = f"{ATTENTION_CALL} in continuous batching"
TILE_ROWS = 128  # query rows of a KV head in a tile, as many as a block of the kernels for prompts takes

# What continuous batching passes to attention beside what models pass.
BATCH = frozenset(
    {
        "cache",
        "read_index",
        "write_index",
        "block_table",
        "logits_indices",
        "logits_processor_args",
        "logits_to_keep",
        "max_seqlen_q",
        "max_seqlen_k",
        "use_cache",
    }
)


class BatchedLayer(NamedTuple):
    """The pages of a layer, and how requests use them.

    Args:
        pages: the pages.
        window: the slots of the ring of a sliding layer; None if the layer keeps all tokens.
        trash: a row that no request reads.
        sentinel: the row that stands for a new token among those that a sliding layer reads.
    """

    pages: PagesOfLayer
    window: int | None
    trash: int
    sentinel: int


class Batch:
    """The batch of a step, for the layers that share an allocator, which compute what they have in common once.

    Args:
        layer: one of these layers.
        starts: (B + 1,) where the queries of each request start.
        lengths: (B,) how many tokens each request has, the new ones included.
        most_queries, most_tokens: the most of a request; bounds that the host knows.
        table: (B, pages) the pages of each request, if every request has one new token; else None.
        read: the rows of a sliding layer that are read, or the first row of each page of a full one; None with `table`.
        write: the rows of the new tokens; None with `table`.
    """

    def __init__(
        self, layer: BatchedLayer, starts: torch.Tensor, lengths: torch.Tensor, most_queries: int, most_tokens: int,
        table: Any = None, read: Any = None, write: Any = None,
    ) -> None:  # fmt: skip
        self.window, self.page = layer.window, layer.pages.page
        self.trash, self.sentinel = layer.trash, layer.sentinel
        self.starts, self.lengths = starts, lengths
        self.most_queries, self.most_tokens = most_queries, most_tokens
        self.table, self.read, self.write = table, read, write
        self._tiles: dict[tuple[int, int], BatchTiles] = {}

    @functools.cached_property
    def newest(self) -> tuple[Any, Any, Any]:
        """For one new token of each request: its row, the lengths, and the table, of a ring in the order of slots."""
        table = self.table.int().contiguous()
        position = self.lengths - 1
        if self.window is not None:
            position = position % self.window
        at = (position // self.page).clamp(min=0).long()
        rows = table.gather(1, at[:, None])[:, 0].long() * self.page + position % self.page
        return torch.where(self.lengths > 0, rows, self.trash), self.lengths_in_pages, table

    @functools.cached_property
    def slots(self) -> Any:
        """The rows of the new tokens, as a write takes them: -1 for those that no request reads."""
        rows = self.write if self.table is None else self.newest[0]
        return torch.where(rows == self.trash, -1, rows)

    @functools.cached_property
    def lengths_in_pages(self) -> Any:
        """(B,) how many tokens the pages of each request hold."""
        lengths = self.lengths if self.window is None else self.lengths.clamp(max=self.window)
        return lengths.contiguous()

    @functools.cached_property
    def firsts(self) -> Any:
        """(B + 1,) where each request begins in `read`: a full layer's pages, or the rows that a sliding one sees."""
        if self.window is None:
            counts = (self.lengths + (self.page - 1)) // self.page
        else:
            new = (self.starts[1:] - self.starts[:-1]).int()
            counts = new + (self.lengths - new).clamp(max=self.window - 1)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def pages(self, requests: Any) -> Any:
        """(n, pages) of requests, by number; of a ring in the order of its slots, for one new token of each."""
        most = self.most_tokens if self.window is None else min(self.most_tokens, self.window)
        each = torch.arange(0, max(1, most), self.page, device=requests.device)
        if not self.read.numel():  # nothing was stored before
            source, begin, at = self.write, self.starts[:-1], each
        elif self.window is None:
            source, begin, at = self.read, self.firsts[:-1], each // self.page
        else:
            source, begin, at = self.read, self.firsts[:-1], each
        rows = source[(begin[requests].long()[:, None] + at).clamp(max=source.numel() - 1)]
        if self.window is not None:
            new = self.write[self.starts[:-1][requests].long().clamp(max=self.write.numel() - 1)][:, None]
            rows = torch.where(rows == self.sentinel, new, rows)
        inside = each < self.lengths[requests][:, None]
        return torch.where(inside, rows // self.page, -1).int()

    def tiles(self, total: int, group: int) -> BatchTiles:
        """The tiles of `total` queries whose KV heads have `group` query heads."""
        key = total, group
        if key not in self._tiles:
            self._tiles[key] = BatchTiles(self, total, group)
        return self._tiles[key]


class BatchTiles:
    """The queries of a batch in tiles, and what each tile sees: see `QueryTiles`.

    Attributes:
        rows: (n * T,) the row of each query of a tile.
        back: (total,) where the result of each row lies among those.
        in_ring: whether a chunk of a prompt may replace what it sees, so that rows are read, and not pages.
        table, lengths: of each tile, to read pages; None if rows are read.
        ends: (2 * n,) the end of each tile and its first key, to read rows; None if pages are read.
        new: (total,) where new rows go among those that were stored before; None if pages are read.
    """

    def __init__(self, batch: Batch, total: int, group: int) -> None:
        sequences, device = batch.lengths.shape[0], batch.lengths.device
        self.size = min(batch.most_queries, total, -(-TILE_ROWS // group))
        tiles = query_tiles(torch, batch.starts.long(), torch.arange(total, device=device), self.size, sequences)
        self.rows = tiles.rows.reshape(-1)
        self.back = tiles.tile * self.size + tiles.number
        self.in_ring = batch.window is not None and batch.most_queries > 1
        self.table = self.lengths = self.ends = self.new = None
        if self.in_ring:
            first = batch.firsts[:-1][tiles.sequence] * tiles.used
            ends = torch.maximum(tiles.lengths(batch.firsts[1:], True), first)
            self.ends = torch.stack((ends, first), 1).reshape(-1).int()
            if batch.read.numel():
                self.new = _among_older(batch, total)
            return
        self.table = batch.pages(torch.arange(sequences, device=device))[tiles.sequence]
        if batch.window is None:
            self.lengths = tiles.lengths(batch.lengths, True).int()
        else:
            self.lengths = (batch.lengths_in_pages[tiles.sequence] * tiles.used).int()


def _among_older(batch: Batch, total: int) -> Any:
    """(total,) where the new rows of a sliding layer lie in `batch.read`; that of a row of no request is its last one.

    Those of a chunk lie behind the older rows. A request with one new token is read in the order of its ring's slots.
    """
    rows = torch.arange(total, device=batch.read.device)
    starts, sequences = batch.starts.long(), batch.lengths.shape[0]
    request = torch.searchsorted(starts[1:], rows, side="right")
    inside, request = request < sequences, request.clamp(max=sequences - 1)
    at = batch.firsts[1:][request] - (starts[1:][request] - rows)
    slot = batch.firsts[:-1] + (batch.lengths - 1) % batch.window
    at = torch.where((starts[1:] - starts[:-1] == 1)[request], slot[request], at)
    return torch.where(inside, at, batch.read.numel() - 1)


def attend_pages(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    options: dict[str, Any],
) -> Any:
    """Write the new keys and values of a batch into their pages, and attend: (1, T, heads, head_dim).

    Args:
        module, query, key, value, scale, softcap: as in `attend`, for a batch of 1 that holds all requests.
        options: its other keywords, among them those of continuous batching.

    Raises:
        OptionError: keywords that change scores in a way that is not supported here.
        ShapeError: keys and values do not fit the pages. Nothing is written.
    """
    unknown = [name for name in keywords.said(options) if name not in BATCH]
    if unknown:
        raise OptionError(
            f"{OPERATION}: {unknown[0]} is not supported. Use another attention, or model.generate without batching."
        )
    cache = options["cache"]
    allocator = cache.layer_to_allocator[module.layer_idx]
    layer = _layer(allocator, module.layer_idx)
    q, k, v = (a[0].transpose(0, 1) for a in (query, key, value))
    for name, a in (("keys", k), ("values", v)):
        if a.shape[1:] != layer.pages.shape:
            raise ShapeError(
                f"{OPERATION}: {name} are {tuple(a.shape[1:])} (heads, width), and rows of pages {layer.pages.shape}. "
                "Use model.generate without batching."
            )
    batch = _batch_of_step(cache, allocator, layer, module.layer_idx, options)
    sinks = options.get("s_aux")
    request = request_of(scale, softcap, True)._replace(short=True)
    if sinks is not None:
        request = request._replace(sink_logits=sinks.detach().float())
    if batch.table is not None:
        _, lengths, table = batch.newest
        _write(layer, k, v, batch)
        out = _newest(q, layer, table, lengths, request)
    elif query.device.type == "cpu":
        out = by_request(q, k, v, layer, batch, request)
    else:
        out = by_tiles(q, k, v, layer, batch, request)
    return out[None]


def _layer(allocator: Any, number: int) -> BatchedLayer:
    """The pages of a layer."""
    layers: dict[int, BatchedLayer] | None = getattr(allocator, "tikv_layers", None)
    if layers is None:
        window = getattr(allocator, "sliding_window", None)
        layers = allocator.tikv_layers = {
            layer: BatchedLayer(
                allocator.memory.layer(i), window, allocator.write_trash_index, allocator.sentinel_index
            )
            for i, layer in enumerate(allocator.layer_indices)
        }
    return layers[number]


def _batch_of_step(cache: Any, allocator: Any, layer: BatchedLayer, number: int, options: dict[str, Any]) -> Batch:
    """The batch of this step for the layers of an allocator, the first of which makes it.

    So a graph that is captured computes it too, though the step before it had the same arrays.
    """
    first, last = allocator.layer_indices[0], allocator.layer_indices[-1]
    starts, batch = getattr(allocator, "tikv_step", (None, None))
    if number == first or batch is None or starts is not options["cu_seq_lens_q"]:
        starts, batch = options["cu_seq_lens_q"], _batch(cache, allocator, layer, options)
    allocator.tikv_step = (None, None) if number == last else (starts, batch)
    return batch


def _batch(cache: Any, allocator: Any, layer: BatchedLayer, options: dict[str, Any]) -> Batch:
    """The batch for the layers of an allocator."""
    most_queries, most_tokens = (options.get(f"max_length_{of}", options.get(f"max_seqlen_{of}")) for of in "qk")
    ends: Any = options["cu_seq_lens_k"]
    if isinstance(ends, dict):  # before 5.20 only if there are layers of several types
        of_type = next(name for name, one in cache.cache_allocators.items() if one is allocator)
        ends, most_tokens = ends[of_type], most_tokens[of_type]  # type: ignore[index]
    starts = options["cu_seq_lens_q"]
    lengths = (ends[1:] - ends[:-1]).int()
    table = options.get("block_table")
    if table is not None:
        return Batch(layer, starts, lengths, 1, 0, table=table[allocator.index])
    read, write = options["read_index"][allocator.index], options["write_index"][allocator.index]
    return Batch(layer, starts, lengths, int(most_queries or 0), int(most_tokens or 0), read=read, write=write)


def _write(layer: BatchedLayer, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> None:
    layer.pages.write(OPERATION, k, v, batch.slots)


def _newest(q: torch.Tensor, layer: BatchedLayer, table: Any, lengths: torch.Tensor, request: AttendRequest) -> Any:
    """Attention of the newest token of each request, which is written: (B, Hq, D)."""
    pools = layer.pages.caches(lengths, table)
    return attention_call(OPERATION, q, pools, request._replace(causal=False)).attend(q)


def by_request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: BatchedLayer, batch: Batch, request: AttendRequest
) -> Any:
    """On a CPU, where the host knows the numbers: the requests of one new token together, the others one by one."""
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    single = [b for b, n in enumerate(counts) if n == 1]
    many = [b for b, n in enumerate(counts) if n > 1]
    # A ring is read before it is written: the new tokens replace what the first of them still sees.
    windows: dict[int, tuple[Any, ...]] = {}
    if layer.window is not None and many:
        stored, of_rows = layer.pages.stored(OPERATION, k, v), batch.firsts.tolist()
        for b in many:
            rows = [a[starts[b] : starts[b + 1]] for a in stored]
            if batch.read.numel():
                older = layer.pages.taken(batch.read[of_rows[b] : of_rows[b + 1] - counts[b]])
                rows = [joined(pair) for pair in zip(older, rows, strict=True)]
            windows[b] = tuple(rows)
    _write(layer, k, v, batch)
    out = torch.zeros_like(q) if starts[-1] < q.shape[0] else torch.empty_like(q)
    if single:
        numbers = torch.tensor(single)
        at = batch.starts[:-1].long()[numbers]
        out[at] = _newest(q[at], layer, batch.pages(numbers), batch.lengths_in_pages[numbers], request)
    for b in many:
        new = slice(starts[b], starts[b + 1])
        asked = q[new].transpose(0, 1)[None]
        if lengths[b] == counts[b] and layer.pages.plain:
            result = _prompt(asked, k[new], v[new], layer, request)
        elif layer.window is not None:
            result = _over_rows(asked, windows[b], layer, request)
        else:
            pools = layer.pages.caches(batch.lengths[b : b + 1], batch.pages(torch.tensor([b])))
            result = attention_call(OPERATION, asked, pools, request).attend(asked)
        out[new] = result[0].transpose(0, 1)
    return out


def _prompt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: BatchedLayer, request: AttendRequest) -> Any:
    """Attention of a whole prompt (1, Hq, n, D) over its own keys (n, H, D)."""
    inside = layer.window is None or q.shape[2] <= layer.window
    if not inside or is_invariant() or request.softcap is not None or request.sink_logits is not None:
        return _over_rows(q, (k, v), layer, request)
    keys, values = (a.transpose(0, 1)[None] for a in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, is_causal=True, scale=request.scale, enable_gqa=q.shape[1] != keys.shape[1]
    )


def _over_rows(q: torch.Tensor, rows: tuple[Any, ...], layer: BatchedLayer, request: AttendRequest) -> Any:
    """Attention of the newest tokens (1, Hq, n, D) over stored rows in the order of their positions."""
    caches = layer.pages.contiguous(rows, rows[0].shape[0], 1, starts=False)
    return attention_call(OPERATION, q, caches, request._replace(window=layer.window)).attend(q)


def by_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: BatchedLayer, batch: Batch, request: AttendRequest
) -> Any:
    """On a device, without waiting for it: tiles of queries, over pages or, of a ring, over the window before them."""
    total, heads, width = q.shape
    tiles = batch.tiles(total, heads // k.shape[1])
    asked = q.index_select(0, tiles.rows).view(-1, tiles.size, heads, width).transpose(1, 2)
    if tiles.in_ring:
        rows = stored = layer.pages.stored(OPERATION, k, v)
        if tiles.new is not None:
            rows = layer.pages.taken(batch.read)
            put_among(rows, tiles.new, stored)
        _write(layer, k, v, batch)
        caches = layer.pages.contiguous(rows, tiles.ends, asked.shape[0], starts=True)
        request = request._replace(window=layer.window)
    else:
        _write(layer, k, v, batch)
        caches = layer.pages.caches(tiles.lengths, tiles.table)
    out = q.new_empty((asked.shape[0], tiles.size, heads, layer.pages.shape[1]))
    results = Results(out.transpose(1, 2), is_new=True)
    attention_call(OPERATION, asked, caches, request).attend(asked, results)
    return out.flatten(0, 1).index_select(0, tiles.back)


def attend_batch(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """`attend` while a manager of transformers' continuous batching runs: over its pages, or as `attend` without them.

    Raises:
        OptionError: there are no pages, and this version of transformers made no mask.
    """
    cache = kwargs.get("cache")
    if cache is None or not hasattr(cache, "layer_to_allocator"):
        if not MODELS_UPDATE_PAGES:
            raise OptionError(
                f"{ATTENTION_CALL}: the model was called while a manager of continuous batching runs, which this "
                "version of transformers makes no masks for. Stop the manager first."
            )
        return attend(module, query, key, value, attention_mask, dropout, scaling, softcap, **kwargs)
    keywords.check_declared(type(module))
    check_attention(cache)
    return attend_pages(module, query, key, value, scaling, softcap, kwargs), None
