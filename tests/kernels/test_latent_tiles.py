"""The keys of latents that rows of a task see, computed on a CPU, against the oracle."""

import itertools

import numpy as np
import pytest

from tikv import reference
from tikv.kernels.attention import task, visible
from tikv.kernels.attention.parameters import (
    FLOATS,
    MAX_TOKENS,
    PARAMS,
    STRIDES,
    AttentionParams,
    AttentionStrides,
    Choices,
    P,
)
from tikv.kernels.attention.sm90 import latents
from tikv.ops.attention.families.tensor_cores import rows_of_tile
from tikv.runtime import ti

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.thorough]
PLAIN = Choices(
    kind="linear", page=0, sinks=False, cache="f16", bits=64, scale="", k_inner=(0, 0), v_inner=(0, 0), query="f16",
    out="f16", width=576, width_v=512, group=16, rows=64, causal=True, masked=True, softcap=False, lens_bits=0,
    table_bits=0,
)  # fmt: skip


def make_look(x, c):
    """look(unused, seen, ...): in how many tiles a row sees a key, as seen[row, key]."""
    decode_task, find_range = task.make_decode_task("cuda", latents.KEYS, c), latents.make_find_range(x, c)
    mask, in_bounds, query_bounds = latents.make_mask(x, c), visible.make_in_bounds(c), visible.make_query_bounds()
    T, R, OWN, MASKED = task.T, latents.R, x.rows // x.consumers, latents.is_masked(x, c)

    @ti.kernel
    def look(unused: FLOATS, seen: ti.types.ndarray(dtype=ti.i32, ndim=2), strides: STRIDES, params: PARAMS):
        ti.loop_config(serialize=True)
        for number in range(params[P.tasks]):
            found, own = decode_task(number, unused, strides, params)
            some = find_range(found, own, params)
            last = ti.min(own[T.row] + c.rows, params[P.queries] * c.group)
            for n, thread in ti.ndrange(latents.tiles_of(some), x.consumers * latents.GROUP):
                at, lane = some[R.begin] + n * latents.KEYS, thread % 32
                s = [ti.f32(0.0) for _ in range(OWN // 2)]
                whole = at > some[R.low] and at + (latents.KEYS - 1) <= some[R.high]
                if ti.static(MASKED) and not whole:
                    mask(thread, thread // latents.GROUP, at, found, own, params, s)
                for i in ti.static(range(OWN // 2)):
                    row = own[T.row] + thread // latents.GROUP * OWN + i // 4 * 8 + i % 2 + (lane & 3) * 2
                    key = at + thread % latents.GROUP // 32 * 16 + (lane >> 2) + i // 2 % 2 * 8
                    if row < last and key < some[R.end]:
                        sees = ti.cast(s[i] == ti.f32(0.0), ti.i32)
                        if ti.static(not MASKED):  # what the copying warps leave out
                            bounds = query_bounds(own[T.row] // c.group, found, params)
                            sees = in_bounds(key, bounds[0], bounds[1], bounds[2], bounds[3])
                        seen[row, key] += sees

    return look


@pytest.mark.parametrize("group", [1, 5, 16, 64, 128])
@pytest.mark.parametrize("sinks", [(0,), (3, 150)])
def test_each_key_is_seen_once(arch, group, sinks):
    """By rows of one query, and by those of several; of short and long windows, by one task and by several."""
    for queries, length, splits in ((9, 300, 1), (70, 200, 3), (2, 2, 1)):
        x = latents.tile_of(group, queries)
        rows = rows_of_tile(x, group, queries)
        c = PLAIN._replace(sinks=sinks != (0,), group=group, rows=rows)
        look, blocks = make_look(x, c), queries * group // rows if x.of_one_query else -(-queries * group // rows)
        for window, held in itertools.product((None, 5, 100), sinks):
            params = AttentionParams(tasks=blocks * splits, splits=splits, heads=1, queries=queries, row_blocks=blocks,
                                     length=length, capacity=length, sinks=held,
                                     window=MAX_TOKENS if window is None else window)  # fmt: skip
            seen = np.zeros((queries * group, length), np.int32)
            look(np.ones(1, np.float32), seen, AttentionStrides(), params)
            oldest = max(held, 0 if window is None else length - window - queries + 1)
            positions = [*range(min(held, length)), *range(oldest, length)]
            span = {} if window is None else {"window": window + held, "sinks": held}
            for row in range(0, queries * group, 1 if group < 64 else 7):
                want = reference.visible_positions(length, row // group, queries, **span)
                assert [positions[i] for i in np.flatnonzero(seen[row])] == want
            assert seen.max() <= 1


@pytest.mark.parametrize("rows", list(latents.CONSUMERS))
def test_what_lies_in_shared_memory_fits_and_begins_where_products_read(arch, rows):
    memory = latents.memory_of(rows)
    assert memory.nbytes <= 227 << 10
    assert not any(n % 1024 for n in (memory.tiles, memory.weights, latents.TILE))
    assert not any(n % 16 for n in (memory.there, memory.exists, memory.tops))
    assert list(memory) == sorted(memory)


@pytest.mark.parametrize(
    ("group", "queries", "rows", "of_one_query"),
    [(16, 1, 16, True), (20, 1, 64, True), (128, 1, 64, True), (128, 9, 64, True), (16, 2, 64, False),
     (16, 9, 64, False), (1, 4, 16, False)],
)  # fmt: skip
def test_a_task_has_rows_of_one_query_where_none_is_left_empty(arch, group, queries, rows, of_one_query):
    found = latents.tile_of(group, queries)
    assert (found.rows, found.of_one_query) == (rows, of_one_query)
    assert rows_of_tile(found, group, queries) <= rows
