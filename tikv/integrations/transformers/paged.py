"""Attention over the pages of transformers' continuous batching, read where they lie.

A batch holds the queries of many requests, one request after the other: decoded tokens, prompts, and chunks of prompts.
transformers would gather all keys of a batch, and mask what belongs to other requests. Here the new keys are written
into their pages, and queries read pages through a table. Only a chunk of a prompt in a sliding layer is read with a
copy of the window before it: the pages of such a layer are a ring, in which the chunk replaces what it still sees.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch

from tikv.errors import OptionError, ShapeError
from tikv.integrations.transformers import keywords
from tikv.integrations.transformers.slots import request_of
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS, ContiguousLayout
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.query_tiles import QueryTiles, query_tiles
from tikv.ops.attention.request import AttendRequest

OPERATION = f"{keywords.OPERATION} in continuous batching"
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
        k, v: (N, page, H, D), which overlap.
        rows: keys and values as rows (n, H, D) for writes.
        window: the slots of the ring of a sliding layer; None if the layer keeps all tokens.
        trash: a row that no request reads.
        sentinel: the row that stands for a new token among those that a sliding layer reads.
    """

    k: Any
    v: Any
    rows: tuple[Any, Any]
    window: int | None
    trash: int
    sentinel: int


class Batch(NamedTuple):
    """The batch of a step, for the layers that share an allocator.

    Args:
        starts: (B + 1,) where the queries of each request start.
        lengths: (B,) how many tokens each request has, the new ones included.
        most_queries, most_tokens: the most of a request; bounds that the host knows.
        table: (B, pages) the pages of each request, if every request has one new token; else None.
        read, write: the rows that transformers would read, and those of the new tokens; None with `table`.
    """

    starts: Any
    lengths: Any
    most_queries: int
    most_tokens: int
    table: Any = None
    read: Any = None
    write: Any = None


def attend_pages(
    module: Any, query: Any, key: Any, value: Any, scale: float | None, softcap: float | None, options: dict[str, Any]
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
    layer, batch = _layer(allocator, module.layer_idx), _batch(cache, allocator, options)
    q, k, v = (a[0].transpose(0, 1) for a in (query, key, value))
    for name, a in (("keys", k), ("values", v)):
        if a.shape[1:] != layer.k.shape[2:]:
            raise ShapeError(
                f"{OPERATION}: {name} are {tuple(a.shape[1:])} (heads, width), and rows of pages "
                f"{tuple(layer.k.shape[2:])}. Use model.generate without batching."
            )
    sinks = options.get("s_aux")
    request = request_of(scale, softcap, True)._replace(short=True)
    if sinks is not None:
        request = request._replace(sink_logits=sinks.detach().float())
    if batch.table is not None:
        out = _newest_tokens(q, k, v, layer, batch, request)
    elif query.device.type == "cpu":
        out = _by_request(q, k, v, layer, batch, request)
    else:
        out = _by_tiles(q, k, v, layer, batch, request)
    return out[None]


def _layer(allocator: Any, number: int) -> BatchedLayer:
    """The pages of a layer."""
    k, v = allocator._kv_page_views[number]
    return BatchedLayer(
        k, v, allocator._kv_token_views[number], getattr(allocator, "sliding_window", None),
        allocator.write_trash_index, allocator.sentinel_index,
    )  # fmt: skip


def _batch(cache: Any, allocator: Any, options: dict[str, Any]) -> Batch:
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
        return Batch(starts, lengths, 1, 0, table=table[allocator.index])
    read, write = options["read_index"][allocator.index], options["write_index"][allocator.index]
    return Batch(starts, lengths, int(most_queries or 0), int(most_tokens or 0), read=read, write=write)


def _write(layer: BatchedLayer, k: Any, v: Any, rows: Any) -> None:
    for memory, new in zip(layer.rows, (k, v), strict=True):
        memory.index_copy_(0, rows, new)


def _newest_tokens(q: Any, k: Any, v: Any, layer: BatchedLayer, batch: Batch, request: AttendRequest) -> Any:
    """One new token of each request: (B, Hq, D)."""
    table, page = batch.table[: q.shape[0]], layer.k.shape[1]
    position = batch.lengths - 1
    if layer.window is not None:
        position = position % layer.window
    at = (position // page).clamp(min=0).long()
    rows = table.gather(1, at[:, None])[:, 0].long() * page + position % page
    _write(layer, k, v, torch.where(batch.lengths > 0, rows, layer.trash))
    return _newest(q, layer, table, batch.lengths, request)


def _newest(q: Any, layer: BatchedLayer, table: Any, lengths: Any, request: AttendRequest) -> Any:
    """Attention of the newest token of each request, which is written: a ring is read in the order of its slots."""
    if layer.window is not None:
        lengths = lengths.clamp(max=layer.window)
    pools = Caches(PagedLayout(), layer.k, layer.v, lengths.contiguous(), table.int().contiguous())
    return attention_call(OPERATION, q, pools, request._replace(causal=False)).attend(q)


def _pages(layer: BatchedLayer, batch: Batch, first: Any, requests: Any) -> Any:
    """(n, pages) the pages of requests in order; of a ring, in the order of its slots, for requests of one new token.

    Args:
        first: (B + 1,) where the rows of each request begin in `batch.read`.
        requests: (n,) their numbers.
    """
    page = layer.k.shape[1]
    most = batch.most_tokens if layer.window is None else min(batch.most_tokens, layer.window)
    each = torch.arange(0, max(1, most), page, device=requests.device)
    source, begin = batch.read, first[:-1]
    if not batch.read.numel():  # nothing was stored before
        source, begin = batch.write, batch.starts[:-1]
    at = begin[requests].long()[:, None] + each
    rows = source[at.clamp(max=source.numel() - 1)]
    if layer.window is not None:
        new = batch.write[batch.starts[:-1][requests].long().clamp(max=batch.write.numel() - 1)][:, None]
        rows = torch.where(rows == layer.sentinel, new, rows)
    inside = each < batch.lengths[requests][:, None]
    return torch.where(inside, rows // page, -1).int()


def _firsts(layer: BatchedLayer, batch: Batch) -> Any:
    """(B + 1,) where the rows of each request begin in `batch.read`, which a sliding layer limits to its window."""
    counts = batch.lengths
    if layer.window is not None:
        new = (batch.starts[1:] - batch.starts[:-1]).int()
        counts = new + (batch.lengths - new).clamp(max=layer.window - 1)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _by_request(q: Any, k: Any, v: Any, layer: BatchedLayer, batch: Batch, request: AttendRequest) -> Any:
    """On a CPU, where the host knows the numbers: the requests of one new token together, the others one by one."""
    starts, lengths = batch.starts.tolist(), batch.lengths.tolist()
    firsts = _firsts(layer, batch)
    counts = [end - start for start, end in itertools.pairwise(starts)]
    single = [b for b, n in enumerate(counts) if n == 1]
    many = [b for b, n in enumerate(counts) if n > 1]
    # A ring is read before it is written: the new tokens replace what the first of them still sees.
    windows: dict[int, tuple[Any, Any]] = {}
    if layer.window is not None and batch.read.numel():
        of_rows = firsts.tolist()
        for b in many:
            old, new = batch.read[of_rows[b] : of_rows[b + 1] - counts[b]], slice(starts[b], starts[b + 1])
            windows[b] = torch.cat((layer.rows[0][old], k[new])), torch.cat((layer.rows[1][old], v[new]))
    _write(layer, k, v, batch.write)
    out = torch.zeros_like(q) if starts[-1] < q.shape[0] else torch.empty_like(q)
    if single:
        numbers = torch.tensor(single)
        at = batch.starts[:-1].long()[numbers]
        table = _pages(layer, batch, firsts, numbers)
        out[at] = _newest(q[at], layer, table, batch.lengths[numbers], request)
    for b in many:
        new = slice(starts[b], starts[b + 1])
        asked = q[new].transpose(0, 1)[None]
        if lengths[b] == counts[b]:
            result = _prompt(asked, k[new], v[new], layer, request)
        elif layer.window is not None:
            result = _over_rows(asked, windows[b][0], windows[b][1], layer, request)
        else:
            numbers = torch.tensor([b])
            pools = Caches(
                PagedLayout(), layer.k, layer.v, batch.lengths[b : b + 1], _pages(layer, batch, firsts, numbers)
            )
            result = attention_call(OPERATION, asked, pools, request).attend(asked)
        out[new] = result[0].transpose(0, 1)
    return out


def _prompt(q: Any, k: Any, v: Any, layer: BatchedLayer, request: AttendRequest) -> Any:
    """Attention of a whole prompt (1, Hq, n, D) over its own keys (n, H, D)."""
    inside = layer.window is None or q.shape[2] <= layer.window
    if not inside or request.softcap is not None or request.sink_logits is not None:
        return _over_rows(q, k, v, layer, request)
    keys, values = (a.transpose(0, 1)[None] for a in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, is_causal=True, scale=request.scale, enable_gqa=q.shape[1] != keys.shape[1]
    )


def _over_rows(q: Any, k: Any, v: Any, layer: BatchedLayer, request: AttendRequest) -> Any:
    """Attention of the newest tokens (1, Hq, n, D) over keys (m, H, D) in the order of their positions."""
    keys, values = (a.transpose(0, 1)[None] for a in (k, v))
    caches = Caches(CONTIGUOUS, keys, values, k.shape[0])
    return attention_call(OPERATION, q, caches, request._replace(window=layer.window)).attend(q)


def _by_tiles(q: Any, k: Any, v: Any, layer: BatchedLayer, batch: Batch, request: AttendRequest) -> Any:
    """On a device, without waiting for it: tiles of queries, over pages or, of a ring, over the window before them."""
    sequences, total = batch.lengths.shape[0], q.shape[0]
    firsts = _firsts(layer, batch)
    group = q.shape[1] // k.shape[1]
    size = min(batch.most_queries, total, -(-TILE_ROWS // group))
    tiles = query_tiles(torch, batch.starts.long(), torch.arange(total, device=q.device), size, sequences)
    asked = q[tiles.rows].transpose(1, 2)
    in_ring = layer.window is not None and batch.most_queries > 1
    rows = _with_window(k, v, layer, batch) if in_ring else None
    _write(layer, k, v, batch.write)
    if rows is not None:
        out = _tiles_over_rows(asked, *rows, firsts, tiles, request._replace(window=layer.window))
    else:
        table = _pages(layer, batch, firsts, torch.arange(sequences, device=q.device))
        if layer.window is None:
            lengths = tiles.lengths(batch.lengths, True)
        else:
            lengths = batch.lengths.clamp(max=layer.window)[tiles.sequence] * tiles.used
        pools = Caches(PagedLayout(), layer.k, layer.v, lengths.int(), table[tiles.sequence])
        out = attention_call(OPERATION, asked, pools, request).attend(asked)
    of_rows = out.transpose(1, 2)[tiles.tile, tiles.number]
    return torch.where(tiles.inside[:, None, None], of_rows, 0)


def _with_window(k: Any, v: Any, layer: BatchedLayer, batch: Batch) -> tuple[Any, Any]:
    """The rows that a sliding layer's queries see: those before the new ones, which are copied, and the new ones."""
    if not batch.read.numel():
        return k, v
    new = (batch.read == layer.sentinel)[:, None, None]
    rows = []
    for memory, added in zip(layer.rows, (k, v), strict=True):
        rows.append(memory.index_select(0, batch.read).masked_scatter_(new, added))
    return rows[0], rows[1]


def _tiles_over_rows(q: Any, k: Any, v: Any, firsts: Any, tiles: QueryTiles, request: AttendRequest) -> Any:
    """Attention of tiles over rows (m, H, D), of which each request sees those from its first to the next request's."""
    first = firsts[:-1][tiles.sequence] * tiles.used
    ends = torch.maximum(tiles.lengths(firsts[1:], True), first)
    keys, values = (a.transpose(0, 1)[None].expand(q.shape[0], -1, -1, -1) for a in (k, v))
    both = torch.stack((ends, first), 1).reshape(-1).int()
    return attention_call(OPERATION, q, Caches(ContiguousLayout(starts=True), keys, values, both), request).attend(q)
