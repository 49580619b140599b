"""The least and the greatest key of each page of a layer: updating them in appends, and computing them again.

Token `n` of those that a layer without a window holds is in page `n // page`. If keys are stored as numbers, an append
summarises the pages that it writes to in its own launch. Keys with scales are decoded first, in one more launch.
Operations that move or drop tokens call `summarize`, which computes the changed pages again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tikv.arrays import ArrayView, Host, new_array
from tikv.ops.layouts import Placement, Rows, WrittenPages
from tikv.ops.page_summaries import both_of, distance_in, summarize_listed
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory, copy_rows, rows_of

DECODED_TOKENS = 4096  # how many tokens of a sequence are decoded at a time


def written_pages(page: int, layer: Layer, heads: int, head: int) -> WrittenPages:
    """The summaries that an append to a layer, or to it and its neighbours in memory, updates.

    `heads` is the number of heads per sequence in the launch, and `head` the number of its first head.
    """
    pair = layer.summaries
    assert pair is not None
    pages, width = pair[0].shape[2:]
    of_head = pages * width
    to = Rows(both_of(pair), sequence=heads * of_head, token=width, head=of_head, first=head * of_head)
    return WrittenPages(page, to, distance_in(pair))


def summarize(operation: str, memory: LayerMemory, layers: Sequence[Layer], first: int = 0) -> None:
    """Compute the page summaries again, from the page of token `first` on, for those layers that keep them."""
    for layer in layers:
        if layer.summaries is not None:
            _summarize_layer(operation, memory, layer, max(0, first))


def summarize_last(operation: str, memory: LayerMemory, layers: Sequence[Layer]) -> None:
    """The same for the last page, after some of its tokens were dropped."""
    for layer in layers:
        summarize(operation, memory, [layer], int(layer.lengths.min()) - 1)


def _summarize_layer(operation: str, memory: LayerMemory, layer: Layer, first: int) -> None:
    page, lens, summaries = memory.page, layer.lengths, layer.summaries
    assert page is not None
    assert summaries is not None
    pages = summaries[0].shape[2]
    heads = memory.num_kv_heads if lens.size == 1 else 1  # all of a sequence, or one at a time
    end, start, decoded = int(lens.max(initial=0)), first // page * page, not memory.rows.k.is_numbers
    at_once = max(page, DECODED_TOKENS // page * page) if decoded else max(1, end - start)
    for begin in range(start, end, at_once):
        stop = min(end, begin + at_once)
        rows = _decoded(operation, memory, layer, begin, stop) if decoded else layer.k
        listed = _listed(page, memory, lens, range(begin, stop, page), begin * decoded, rows.shape[2], pages)
        summarize_listed(memory.runtime, operation, rows, summaries, listed, (heads, 1, rows.shape[2], pages))


def _listed(page: int, memory: LayerMemory, lens: Host, starts: range, origin: int, tokens: int, pages: int) -> Host:
    """(n, 3) for `summarize_listed`: the pages that begin at these tokens, in rows that begin at token `origin`."""
    batch, heads = memory.batch_size, memory.num_kv_heads
    each, of_each = (np.arange(batch) * heads, np.repeat(lens, batch)) if lens.size == 1 else (
        np.arange(batch * heads), np.broadcast_to(lens, (batch, heads)).ravel())  # fmt: skip
    begin = np.array(starts, np.int64)
    counts = np.clip(of_each[:, None] - begin, 0, page)
    table = np.stack([each[:, None] * tokens + begin - origin, counts, each[:, None] * pages + begin // page], axis=-1)
    return table[counts > 0]


def _decoded(operation: str, memory: LayerMemory, layer: Layer, begin: int, stop: int) -> ArrayView:
    """The decoded keys of these slots, (batch, heads, n, width), in new memory."""
    row, tokens = memory.rows.k, stop - begin
    shape = memory.batch_size, memory.num_kv_heads, tokens
    out = new_array((*shape, row.width), row.read_dtype, memory.runtime)
    scale = layer.scales_of_rows(memory.num_kv_heads, memory.rows.numbers)[0]
    src = rows_of(layer.k)._replace(format=row.format, scale=scale)
    copy_rows(memory.runtime, operation, [src], [rows_of(out)], [row.width], shape, Placement(position=begin))
    return out
