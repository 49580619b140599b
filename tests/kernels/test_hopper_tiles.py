"""The tiles that warpgroups walk and the keys of them that a row sees, computed on a CPU, against the oracle."""

import itertools

import numpy as np
import pytest

from tikv import reference, runtime
from tikv.kernels.attention import task, tree
from tikv.kernels.attention.parameters import (
    BITS,
    FLOATS,
    MAX_TOKENS,
    PARAMS,
    STRIDES,
    TERMS,
    AttentionParams,
    AttentionStrides,
    AttentionTerms,
    Choices,
    P,
)
from tikv.kernels.attention.sm80.tiles import make_tile_bounds
from tikv.kernels.attention.sm90 import consumer, terms
from tikv.kernels.attention.sm90 import tiles as hopper_tiles
from tikv.runtime import ti

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.thorough]
PLAIN = Choices(
    kind="linear", page=0, sinks=False, cache="f16", bits=64, scale="", k_inner=(0, 0), v_inner=(0, 0), query="f16",
    out="f16", width=128, width_v=128, group=2, rows=128, causal=True, masked=True, softcap=False, lens_bits=0,
    table_bits=0,
)  # fmt: skip


@ti.func
def bits_from(found: ti.template(), n):
    """What the instruction of this name does."""
    found = ti.select(n < 32, ti.u32(0xFFFFFFFF) << ti.cast(ti.min(ti.max(n, 0), 31), ti.u32), ti.u32(0))  # noqa: F841


INDICES = ti.types.ndarray(dtype=ti.i32, ndim=1)


class Instructions:
    def __getattr__(self, name):
        return bits_from


def make_look(c):
    """look(slopes, words, seen, backs, walked, ...): in how many tiles a row sees a key, as seen[row, key].

    backs[row, key] is how far back a slope takes it for, walked[task] how many tiles a task has.
    """
    keys = hopper_tiles.KEYS_OF[c.width]
    decode_task, find_range = task.make_decode_task("cuda", keys, c), hopper_tiles.make_range(c, c.rows)
    tile_at, is_whole = hopper_tiles.make_tile_at(c), hopper_tiles.make_is_whole(c)
    gap_of, index_in_tile = hopper_tiles.make_gap_of(c), hopper_tiles.make_index_in_tile(c)
    see_in_bounds, see_in_tree = consumer.make_see_in_bounds(c), terms.make_see_in_tree(c)
    depth_of, query_bounds, slot_of = tree.make_depth_of(c), make_tile_bounds(c), hopper_tiles.make_slot_of(c)
    start_rows, find_depths, add_slopes = (
        getattr(terms, f"make_{name}")(c) for name in ("start_rows", "find_depths", "add_slopes")
    )
    T, R, PART = task.T, hopper_tiles.R, keys // 4

    @ti.kernel
    def look(slopes: FLOATS, words: BITS, seen: ti.types.ndarray(dtype=ti.i32, ndim=2),
             backs: ti.types.ndarray(dtype=ti.f32, ndim=2), walked: INDICES, strides: STRIDES, params: PARAMS,
             numbers: TERMS):  # fmt: skip
        ti.loop_config(serialize=True)
        for number in range(params[P.tasks]):
            of_tree = ti.static((slopes, slopes, words, numbers))
            found, own = decode_task(number, slopes, strides, params)
            tiles = find_range(own[T.row], found, own, params)
            walked[number] = tiles[R.tiles]
            for n, j in ti.ndrange(tiles[R.tiles], ti.min(c.rows, params[P.queries] * c.group - own[T.row])):
                row, at, gap = own[T.row] + j, tile_at(n, tiles), gap_of(n, tiles)
                t = row // c.group
                bounds = query_bounds(depth_of(own[T.sequence], t, of_tree, params), found, params)
                for part in range(4):
                    first = at + part * PART
                    bits = see_in_bounds(first, gap, bounds)
                    if ti.static(c.tree):
                        bits = see_in_tree(bits, first, t, bounds, found, own, of_tree, params)
                    for e in range(PART):
                        sees = ti.cast((bits >> ti.cast(e, ti.u32)) & ti.u32(1), ti.i32)
                        index = index_in_tile(part * PART + e, n, tiles, found)
                        if slot_of(index, tiles, found, own, slopes, strides, params) >= 0:
                            seen[row, index] += ti.max(sees, is_whole(at, tiles))
                top, total = [ti.f32(0.0) for _ in range(2)], [ti.f32(0.0) for _ in range(2)]
                slope, stand = [ti.f32(0.0) for _ in range(2)], [0 for _ in range(2)]
                start_rows(row, 0, found, own, of_tree, params, top, total, slope, stand)
                if ti.static(c.tree):
                    for lane in range(32):
                        places = [ti.f32(0.0) for _ in range(keys // 32)]
                        find_depths(at, gap, lane, places, found, own, of_tree, params)
                        for i in ti.static(range(keys // 32)):
                            index = index_in_tile(lane + 32 * i, n, tiles, found)
                            if index < tiles[R.end]:
                                backs[row, index] = ti.min(places[i] - ti.cast(stand[0], ti.f32), ti.f32(0.0))
                else:
                    for lane in range(4):
                        s = [ti.f32(0.0) for _ in range(keys // 2)]
                        slope[0] = ti.f32(1.0)
                        add_slopes(
                            at, gap, [ti.f32(0.0), ti.f32(0.0)], lane, slope, stand, found, own, of_tree, params, s
                        )
                        for e in ti.static(range(keys // 4)):
                            index = index_in_tile(e // 2 * 8 + e % 2 + 2 * lane, n, tiles, found)
                            if index < tiles[R.end]:
                                backs[row, index] = s[ti.static(e // 2 * 4 + e % 2)]

    return look


def words_of(mask):
    """A tree's words as `make_tree` writes them, and the depth of each new token."""
    depths = np.maximum(mask.sum(1) - 1, 0).astype(np.uint32)
    packed = np.zeros((len(mask), -(-len(mask) // 32) * 4), np.uint8)
    packed[:, : -(-len(mask) // 8)] = np.packbits(mask, axis=1, bitorder="little")
    return np.concatenate([depths[:, None], packed.view(np.uint32)], axis=1), depths


def check(look, c, mask, length, splits, window, sinks):
    """Fail unless each row sees its keys once, as far back as they are; a tree's are those of `mask`."""
    queries = len(mask)
    words, depths = words_of(mask)
    rows = queries * c.group
    blocks = -(-rows // 128)
    params = AttentionParams(tasks=blocks * splits, splits=splits, heads=1, queries=queries, row_blocks=blocks,
                             length=length, capacity=length, sinks=sinks,
                             window=MAX_TOKENS if window is None else window)  # fmt: skip
    seen = np.zeros((rows, length + 1), np.int32)
    backs, walked = np.full(seen.shape, np.nan, np.float32), np.zeros(params.tasks, np.int32)
    look(np.ones(1, np.float32), words.reshape(-1), seen, backs, walked, AttentionStrides(), params,
         AttentionTerms(tree_words=words.shape[1]))  # fmt: skip
    oldest = max(sinks, 0 if window is None else length - window - queries + 1)
    positions = [*range(min(sinks, length)), *range(oldest, length)]
    span = {} if window is None else {"window": window + sinks, "sinks": sinks}
    for row in range(rows):
        t = row // c.group
        want = counted = reference.visible_positions(length, t, queries, **span)
        own = length - queries + t
        if c.tree:
            want, counted = reference.visible_in_tree(length, t, mask, **span)
            own = length - queries + int(depths[t])
        indices = np.flatnonzero(seen[row])
        assert [positions[i] for i in indices] == want
        assert backs[row, indices].tolist() == [p - own for p in counted]
        assert seen[row].max(initial=0) <= 1
    if not c.tree and splits == 1:
        keys = hopper_tiles.KEYS_OF[c.width]
        of_tasks = [int(seen[first : first + 128].any(axis=0).sum()) for first in range(0, rows, 128)]
        assert walked.tolist() == [-(-n // keys) for n in of_tasks], "more tiles than the keys of a task fill"


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("sinks", [(0,), (3, 150)])
@pytest.mark.parametrize("form", ["causal", "tree"])
def test_each_key_is_seen_once(arch, rng, monkeypatch, width, sinks, form):
    """Of short and long windows, of trees and of any masks, by one task and by several."""
    if not runtime.current().engine.has_bitcode:
        pytest.skip(f"{runtime.current().engine.title} cannot link bitcode, which warpgroups need")
    monkeypatch.setattr(consumer, "instructions", Instructions)
    monkeypatch.setattr(terms, "instructions", Instructions)
    c = PLAIN._replace(sinks=sinks != (0,), width=width, width_v=width, tree=form == "tree", alibi=True)
    look = make_look(c)
    shapes = ((70, 600, 1), (70, 600, 3), (129, 129, 1), (40, 41, 2), (70, 152, 1))
    for (queries, length, splits), window, held in itertools.product(shapes, (None, 5, 100), sinks):
        mask = reference.tree_mask([int(rng.integers(max(-1, t - 3), t)) for t in range(queries)])
        check(look, c, mask, length, splits, window, held)
        if c.tree:
            mask = rng.random((queries, queries)) < 0.5
            mask[5] = False  # it sees nothing new
            check(look, c, mask, length, splits, window, held)


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("sinks", [0, 3, 150])
def test_tiles_by_position(arch, monkeypatch, width, sinks):
    """Under `invariant` tiles begin at multiples of their keys, for any number of rows; each key is seen once."""
    if not runtime.current().engine.has_bitcode:
        pytest.skip(f"{runtime.current().engine.title} cannot link bitcode, which warpgroups need")
    monkeypatch.setattr(consumer, "instructions", Instructions)
    for rows in (64, 128):
        c = PLAIN._replace(sinks=sinks > 0, width=width, width_v=width, rows=rows, invariant=True)
        walk, keys = make_walk(c), hopper_tiles.KEYS_OF[width]
        shapes = ((70, 600), (1, 600), (129, 129), (3, 641), (70, 152), (1, 1))
        for (queries, length), window, split in itertools.product(shapes, (None, 5, 100), (256, MAX_TOKENS)):
            splits = -(-length // split)
            blocks = -(-queries * c.group // rows)
            params = AttentionParams(tasks=blocks * splits, splits=splits, heads=1, queries=queries, row_blocks=blocks,
                                     length=length, capacity=length, sinks=sinks, split_keys=split,
                                     window=MAX_TOKENS if window is None else window)  # fmt: skip
            seen, begins = np.zeros((queries * c.group, length), np.int32), np.full(256, -1, np.int32)
            walk(np.zeros(1, np.int32), seen, begins, AttentionStrides(), params)
            assert not (begins[begins >= 0] % keys).any()
            span = {} if window is None else {"window": window + sinks, "sinks": sinks}
            for row in range(len(seen)):
                want = np.zeros(length, np.int32)
                want[reference.visible_positions(length, row // c.group, queries, **span)] = 1
                np.testing.assert_array_equal(seen[row], want)


def make_walk(c):
    """walk(table, seen, begins, ...): in how many tiles a row sees the key in a slot; where the tiles begin."""
    keys = hopper_tiles.KEYS_OF[c.width]
    decode_task, find_range = task.make_decode_task("cuda", keys, c), hopper_tiles.make_range(c, c.rows)
    tile_at, is_whole, slot_of = (
        getattr(hopper_tiles, f"make_{name}")(c) for name in ("tile_at", "is_whole", "slot_of")
    )
    index_in_tile, see_in_bounds = hopper_tiles.make_index_in_tile(c), consumer.make_see_in_bounds(c)
    tile_bounds, T, R, PART = make_tile_bounds(c), task.T, hopper_tiles.R, keys // 4

    @ti.kernel
    def walk(table: INDICES, seen: ti.types.ndarray(dtype=ti.i32, ndim=2), begins: INDICES, strides: STRIDES,
             params: PARAMS):  # fmt: skip
        ti.loop_config(serialize=True)
        for number in range(params[P.tasks]):
            found, own = decode_task(number, table, strides, params)
            tiles = find_range(own[T.row], found, own, params)
            for n, j in ti.ndrange(tiles[R.tiles], ti.min(c.rows, params[P.queries] * c.group - own[T.row])):
                row, at = own[T.row] + j, tile_at(n, tiles)
                begins[(number * 16 + n) % 256] = at
                bounds = tile_bounds(row // c.group, found, params)
                for part in range(4):
                    bits = see_in_bounds(at + part * PART, 0, bounds)
                    for e in range(PART):
                        sees = ti.cast((bits >> ti.cast(e, ti.u32)) & ti.u32(1), ti.i32)
                        index = index_in_tile(part * PART + e, n, tiles, found)
                        slot = slot_of(index, tiles, found, own, table, strides, params)
                        if slot >= 0:
                            seen[row, slot] += ti.max(sees, is_whole(at, tiles))

    return walk
