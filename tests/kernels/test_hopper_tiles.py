"""The tiles that warpgroups walk and the keys of them that a row sees, computed on a CPU, against the oracle."""

import numpy as np
import pytest

from tikv import reference
from tikv.kernels.attention import hopper_consumer, hopper_terms, hopper_tiles, task, tree, visible
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
from tikv.runtime import ti

pytestmark = pytest.mark.archs("cpu")
PLAIN = Choices(
    place="linear", page=0, sinks=False, cache="f16", bits=64, scale="", k_inner=(0, 0), v_inner=(0, 0), query="f16",
    out="f16", width=128, width_v=128, group=2, rows=128, causal=True, masked=True, softcap=False, lens_bits=0,
    table_bits=0,
)  # fmt: skip


@ti.func
def bits_from(found: ti.template(), n):
    """What the instruction of this name does."""
    found = ti.select(n < 32, ti.u32(0xFFFFFFFF) << ti.cast(ti.min(ti.max(n, 0), 31), ti.u32), ti.u32(0))  # noqa: F841


class Instructions:
    def __getattr__(self, name):
        return bits_from


def make_look(c):
    """look(lens, words, seen, ...): how many tiles show a key to a query row, as seen[row, key]; walked tiles last."""
    keys = hopper_tiles.KEYS_OF[c.width]
    decode_task, find_range = task.make_decode_task("cuda", keys, c), hopper_tiles.make_range(c)
    tile_at, is_whole = hopper_tiles.make_tile_at(c), hopper_tiles.make_is_whole(c)
    see_in_bounds, see_in_tree = hopper_consumer.make_see_in_bounds(c), hopper_terms.make_see_in_tree(c)
    place_of, query_bounds = tree.make_place_of(c), visible.make_query_bounds()
    T, R, PART = task.T, hopper_tiles.R, keys // 4

    @ti.kernel
    def look(lens: FLOATS, words: BITS, seen: ti.types.ndarray(dtype=ti.i32, ndim=2), strides: STRIDES,
             params: PARAMS, numbers: TERMS):  # fmt: skip
        ti.loop_config(serialize=True)
        for number in range(params[P.tasks]):
            of_tree = ti.static((lens, lens, words, numbers))
            found, own = decode_task(number, lens, strides, params)
            tiles = find_range(own[T.row], found, own, params)
            for n, j in ti.ndrange(tiles[R.tiles], ti.min(128, params[P.queries] * c.group - own[T.row])):
                row, at = own[T.row] + j, tile_at(n, tiles)
                t = row // c.group
                bounds = query_bounds(place_of(own[T.sequence], t, of_tree, params), found, params)
                for part in range(4):
                    first = at + part * PART
                    bits = see_in_bounds(first, bounds)
                    if ti.static(c.tree):
                        bits = see_in_tree(bits, first, t, bounds, found, own, of_tree, params)
                    for e in range(PART):
                        sees = ti.cast((bits >> ti.cast(e, ti.u32)) & ti.u32(1), ti.i32)
                        if first + e < tiles[R.end]:
                            seen[row, first + e] += ti.max(sees, is_whole(at, tiles))

    return look


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("sinks", [0, 3, 150])
@pytest.mark.parametrize("form", ["causal", "parents", "mask"])
def test_each_key_is_seen_once(arch, rng, monkeypatch, width, window, sinks, form):
    monkeypatch.setattr(hopper_consumer, "instructions", Instructions)
    monkeypatch.setattr(hopper_terms, "instructions", Instructions)
    c = PLAIN._replace(sinks=sinks > 0, width=width, width_v=width, tree=form != "causal")
    look = make_look(c)
    for queries, length, splits in ((70, 600, 1), (70, 600, 3), (129, 129, 1), (40, 41, 2), (70, 152, 1)):
        mask = reference.tree_mask([int(rng.integers(max(-1, t - 3), t)) for t in range(queries)])
        if form == "mask":
            mask = rng.random((queries, queries)) < 0.5
            mask[5] = False
        depths = np.maximum(mask.sum(1) - 1, 0).astype(np.uint32)
        packed = np.zeros((queries, -(-queries // 32) * 4), np.uint8)
        packed[:, : -(-queries // 8)] = np.packbits(mask, axis=1, bitorder="little")
        words = np.concatenate([depths[:, None], packed.view(np.uint32)], axis=1)
        rows = queries * c.group
        blocks = -(-rows // 128)
        params = AttentionParams(tasks=blocks * splits, splits=splits, heads=1, queries=queries, row_blocks=blocks,
                                 length=length, capacity=length, sinks=sinks,
                                 window=MAX_TOKENS if window is None else window)  # fmt: skip
        seen = np.zeros((rows, length + 1), np.int32)
        look(np.zeros(1, np.float32), words.reshape(-1), seen, AttentionStrides(), params,
             AttentionTerms(tree_words=words.shape[1]))  # fmt: skip
        oldest = max(sinks, 0 if window is None else length - window - queries + 1)
        positions = [*range(min(sinks, length)), *range(oldest, length)]
        span = {} if window is None else {"window": window + sinks, "sinks": sinks}
        for row in range(rows):
            t = row // c.group
            if form == "causal":
                want = reference.visible_positions(length, t, queries, **span)
            else:
                want = reference.visible_in_tree(length, t, mask, **span)[0]
            got = [positions[i] for i in np.flatnonzero(seen[row])]
            assert got == sorted(want)
            assert seen[row].max(initial=0) <= 1
