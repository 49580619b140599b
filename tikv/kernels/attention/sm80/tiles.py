"""The keys of a tile of the tensor cores: where a task's tiles begin and end, and the slots of their keys.

Keys are counted by an index over those that some query sees. Under `Choices.invariant` they are counted by position, so
that the length of a sequence and the number of queries do not move the tiles; chosen tokens by their order.
"""

from typing import NamedTuple

from tikv.kernels.attention.addresses import make_find_key, make_locate
from tikv.kernels.attention.parameters import P, S
from tikv.kernels.attention.sm80.instructions import HALVES
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.task import T
from tikv.kernels.attention.visible import V, first_position, make_query_bounds
from tikv.kernels.codec import WORD
from tikv.kernels.lanes import ALL
from tikv.runtime import ti

FAR = 1 << 30  # above every index of a key


class Limits(NamedTuple):
    """Entries of the vector that `make_limits` returns: numbers of keys, for the rows of a warp."""

    begin: int = 0  # of the first tile; may lie before the task's first key
    end: int = 1  # after the last key that some row sees
    low: int = 2  # every row sees the task's keys above `low`
    high: int = 3  # and up to `high`


L = Limits()


def has_whole_tiles(c) -> bool:
    """Whether the keys of a tile lie in one page, which is then looked up once."""
    return c.kind == "table" and c.page % KEYS == 0 and not c.sinks and not c.index_bits


def has_bounds(c) -> bool:
    """Whether the rows of a task may see different keys of its range; the chosen tokens of a query are its own."""
    return c.masked and c.causal and not c.index_bits


def make_tile_bounds(c):
    """tile_bounds(t, visible, params): `make_query_bounds`, but by position if the keys of a tile are counted so."""
    query_bounds = make_query_bounds()

    @ti.func
    def tile_bounds(t, visible, params):
        bounds = query_bounds(t, visible, params)
        if ti.static(c.invariant):
            bounds[0], bounds[1] = bounds[3] - params[P.window], bounds[3]
        return bounds

    return tile_bounds


def make_first_of(c):
    """first_of(task, visible) -> the first key of a task, which may lie within its first tile."""

    @ti.func
    def first_of(task, visible):
        begin = task[T.begin]
        if ti.static(c.invariant and not c.index_bits and not c.sinks):
            begin = ti.max(begin, first_position(visible))
        return begin

    return first_of


def make_limits(count, step, c):
    """limits(row, visible, task, params) -> the vector `Limits` for `count` rows from `row`.

    Under `invariant` they begin at a multiple of `step`, the keys that a block takes at a time, so that each tile is
    always taken by the same warp.
    """
    tile_bounds, MULTIPLE = make_tile_bounds(c), step if c.invariant else KEYS

    @ti.func
    def limits(row, visible, task, params):
        begin, end, low, high = task[T.begin], task[T.end], -FAR, FAR
        rows = params[P.queries] * c.group
        if ti.static(has_bounds(c)):
            first = tile_bounds(ti.min(row, rows - 1) // c.group, visible, params)
            last = tile_bounds((ti.min(row + count, rows) - 1) // c.group, visible, params)
            low, high, newest = last[0], first[1], last[1]
            if ti.static(c.sinks):
                low, newest = ti.max(low, first[2] - 1), ti.max(newest, last[3])
            else:
                begin = ti.max(begin, (ti.max(first[0], -1) + 1) // MULTIPLE * MULTIPLE)
            end = ti.min(end, newest + 1)
        if row >= rows:
            end = begin
        if ti.static(has_whole_tiles(c) and not c.invariant):
            begin = begin - ((visible[V.first] + begin) & (KEYS - 1))
        return ti.Vector([begin, end, low, high])

    return limits


def make_look_up(c):
    """look_up(at, seen, ...) -> the pool's block that holds the tile at an index; -1 if the pool has no such block."""
    unsigned, position_of_tile = WORD[c.table_bits or 32], make_position_of_tile(c)

    @ti.func
    def look_up(at, seen, visible, task, table: ti.template(), strides, params):
        valid_block = -1
        if ti.static(has_whole_tiles(c)):
            if seen[L.begin] < seen[L.end]:
                p = position_of_tile(at, seen, visible)
                page = ti.cast(ti.cast(p, ti.u32) // ti.u32(c.page), ti.i32)
                first = strides[S.table_first] + task[T.sequence] * strides[S.table_sequence]
                if ti.static(c.table_by_head):
                    first = first + task[T.head] * params[P.table_head]
                block = table[first + page * strides[S.table_block]]
                if ti.cast(block, unsigned) < ti.cast(params[P.blocks], unsigned):
                    valid_block = ti.cast(block, ti.i32)
        return valid_block

    return look_up


def make_position_of_tile(c):
    """position_of_tile(at, seen, visible): of its first key in a table; after the last tile, that of the last tile."""

    @ti.func
    def position_of_tile(at, seen, visible):
        first = 0 if ti.static(c.invariant) else visible[V.first]
        return ti.min(first + at, (first + seen[L.end] - 1) & ~(KEYS - 1))

    return position_of_tile


def counts_in_page(c) -> bool:
    """Whether the slots of a tile are counted from the beginning of its page.

    That takes fewer instructions, which limit the speed with codes. With halves, memory limits the speed, and the order
    of loads that results from it took 6 % longer on an H200.
    """
    return has_whole_tiles(c) and c.cache not in HALVES


def in_tile(c):
    """The choices for addressing a tile's rows by slot: slots counted from their page follow each other."""
    return c._replace(kind="linear") if counts_in_page(c) else c


def make_tile_at(c):
    """tile_at(block, task, strides) -> the task; if slots are counted from a page, its arrays begin at the page."""

    @ti.func
    def tile_at(block, task, strides):
        tile = task
        if ti.static(counts_in_page(c)):
            page = ti.max(block, 0)
            tile[T.k_first] += page * strides[S.k_block]
            tile[T.v_first] += page * strides[S.v_block]
            tile[T.scale_first] += page * strides[S.scale_block]
        return tile

    return tile_at


def has_gaps(c) -> bool:
    """Whether a key between the first and the last of a tile may be missing."""
    return c.kind == "table" or c.index_bits > 0 or (c.invariant and c.sinks)


def make_find_slot(c):
    """find_slot(task, query, n, ...) -> the slot of the n-th key of a task's range; -1 as in `make_slot_behind`."""
    locate, find_key = make_locate(c), make_find_key(c)

    @ti.func
    def find_slot(task, query, n, visible, table: ti.template(), strides, params):
        slot = -1
        if ti.static(c.index_bits > 0 or (c.invariant and c.sinks)):
            slot = find_key(task[T.sequence], task[T.head], query, n, visible, table, strides, params)[0]
        else:
            index = n
            if ti.static(c.invariant):
                index = n - first_position(visible)
            slot = locate(task[T.sequence], task[T.head], index, visible, table, strides, params)[0]
        return slot

    return find_slot


def make_slot_behind(c):
    """slot_behind(at, behind, block, ...) -> the slot of the key `behind` keys after `at`; -1 if its page is missing.

    Keys after the last one repeat it, or are others of its page. If tokens are chosen, the keys of a tile are those
    that the task's query chose, and -1 also means that the query does not read the key: see `make_find_key`.
    """
    find_slot, position_of_tile = make_find_slot(c), make_position_of_tile(c)

    @ti.func
    def slot_behind(at, behind, block, seen, visible, task, table: ti.template(), strides, params):
        slot = -1
        if ti.static(has_whole_tiles(c)):
            inside = ti.cast(ti.cast(position_of_tile(at, seen, visible), ti.u32) % ti.u32(c.page), ti.i32)
            slot = inside + behind
            if ti.static(not counts_in_page(c)):
                slot = ti.select(block < 0, -1, block * c.page + inside + behind)
        else:
            n = ti.min(at + behind, seen[L.end] - 1)
            slot = find_slot(task, task[T.row] // c.group, n, visible, table, strides, params)
        return slot

    return slot_behind


def make_find_keys(c):
    """find_keys(at, block, lane, seen, ..., slots, ...): fills in the slots of the lane's two keys."""
    slot_behind = make_slot_behind(c)

    @ti.func
    def find_keys(at, block, lane, seen, visible, task, table: ti.template(), slots: ti.template(), strides,
                  params):  # fmt: skip
        for i in ti.static(range(2)):
            behind = (lane >> 2) + ti.static(i * 8)
            slot = slot_behind(at, behind, block, seen, visible, task, table, strides, params)
            slots[i] = ti.max(slot, 0)

    return find_keys


def make_is_whole(c):
    """is_whole(at, seen, visible, task) -> 1 if every row sees every key of the tile, of those that exist."""
    first_of = make_first_of(c)

    @ti.func
    def is_whole(at, seen, visible, task):
        whole = ti.cast(at >= first_of(task, visible), ti.i32) * ti.cast(at + KEYS <= seen[L.end], ti.i32)
        if ti.static(has_bounds(c)):
            whole = whole * ti.cast(at > seen[L.low], ti.i32) * ti.cast(at + (KEYS - 1) <= seen[L.high], ti.i32)
        return whole

    return is_whole


def make_find_value_slots(c):
    """find_value_slots(at, block, lane, seen, ..., slots, ...): fills in the slots of the lane's four rows of V."""
    slot_behind = make_slot_behind(c)

    @ti.func
    def find_value_slots(at, block, lane, seen, visible, task, table: ti.template(), slots: ti.template(), strides,
                         params):  # fmt: skip
        for i in ti.static(range(4)):
            behind = (lane & 3) * 2 + ti.static(i % 2 + i // 2 * 8)
            slot = slot_behind(at, behind, block, seen, visible, task, table, strides, params)
            slots[i] = ti.max(slot, 0)

    return find_value_slots


def make_find_values(c):
    """find_values(at, block, lane, seen, ..., slots, counts, ...) -> 1 if every row sees every key of the tile.

    It fills in the slots of the lane's four rows of V, and which of its two keys and four rows belong to the task.
    """
    slot_behind, first_of, is_whole = make_slot_behind(c), make_first_of(c), make_is_whole(c)

    @ti.func
    def find_values(at, block, lane, seen, visible, task, table: ti.template(), slots: ti.template(),
                    counts: ti.template(), strides, params):  # fmt: skip
        whole = is_whole(at, seen, visible, task)
        missing = 0
        if ti.static(counts_in_page(c)):
            missing = ti.cast(block < 0, ti.i32)
        for i in ti.static(range(6)):
            # For K the lane's own key and the one 8 after it; for V the rows that the second product pairs.
            behind = (lane >> 2) + ti.static(i * 8)
            if ti.static(i >= 2):
                behind = (lane & 3) * 2 + ti.static((i - 2) % 2 + (i - 2) // 2 * 8)
            begin = first_of(task, visible) if ti.static(c.invariant) else task[T.begin]
            counts[i] = ti.cast(at + behind >= begin, ti.i32) * ti.cast(at + behind < seen[L.end], ti.i32)
            if ti.static(i >= 2 or has_gaps(c)):
                slot = slot_behind(at, behind, block, seen, visible, task, table, strides, params)
                if ti.static(counts_in_page(c)):
                    counts[i] = ti.select(missing != 0, 0, counts[i])
                elif ti.static(has_gaps(c)):
                    missing = ti.select(slot < 0, 1, missing)
                    counts[i] = ti.select(slot < 0, 0, counts[i])
                if ti.static(i >= 2):
                    slots[ti.static(i - 2)] = ti.max(slot, 0)
        if ti.static(has_gaps(c)):
            if ti.static(not has_whole_tiles(c)):
                missing = ti.simt.warp.any_nonzero(ti.u32(ALL), missing)
            whole = ti.select(missing != 0, 0, whole)
        return whole

    return find_values
