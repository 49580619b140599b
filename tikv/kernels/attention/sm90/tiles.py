"""What producer and consumers of `sm90.attend` share: the tiles of a task, and where they lie in shared memory."""

import functools
import pathlib
from typing import Any, NamedTuple

from tikv.formats import OF_CODE
from tikv.kernels.attention.parameters import P
from tikv.kernels.attention.sm80.instructions import HALVES
from tikv.kernels.attention.sm80.tiles import FAR, has_bounds, make_find_slot, make_first_of, make_tile_bounds
from tikv.kernels.attention.sm90 import ir
from tikv.kernels.attention.task import T
from tikv.kernels.attention.tree import first_new
from tikv.kernels.attention.visible import V
from tikv.runtime import engine_in_use, ti

BITCODE = pathlib.Path(__file__).with_name("hopper.bc")  # see `sm90.ir`
GROUP = 128  # threads of a warpgroup
ROWS = ir.QUERY_ROWS  # query rows of a task
KEYS_OF = dict(ir.SHAPES)  # of a tile, by the width of the heads
STAGES_OF = {64: 3, 96: 3, 128: 3, 256: 2}  # tiles of K, and of V, that lie in shared memory at most
SHARED_BYTES = 227 << 10  # that a block has
PIECE = 16  # bytes that are copied at a time, at a multiple of which every row begins
PANEL_ROW = ir.PANEL
MOST_STAGES = max(STAGES_OF.values())


class Warpgroups(NamedTuple):
    """How the warpgroups of a block share the work."""

    rows: int = ROWS
    resident: int = 1  # blocks that a multiprocessor holds at once
    filling: int = 1
    paired: bool = True  # whether two columns of the result begin at a multiple of their size
    producers: int = 1  # warpgroups that produce: see `producers_of`
    of_one_query: bool = False  # whether the rows of a task always belong to one query
    consumers: int = 2  # warpgroups that multiply, each `ir.ROWS` of the rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.producers + self.consumers) * GROUP


def producers_of(codes: bool, width: int) -> int:
    """How many warpgroups produce: one, or over codes two, one for K and one for V.

    Over codes of 256 columns one produces both: with 512 threads a thread has 128 registers, as many as the operands of
    one instruction on results take.
    """
    return 2 if codes and width <= 128 else 1


class Range(NamedTuple):
    """Entries of what `make_range` returns: the tiles of a task, and the keys that all of its rows see."""

    tiles: int = 0
    end: int = 1  # behind the last key, by index
    low: int = 2  # every row sees the task's keys above it
    high: int = 3  # up to this one
    fixed: int = 4  # tiles that have sinks alone; one follows the other from the task's first key on
    first: int = 5  # key of the first of them
    resume: int = 6  # first key of the tile behind them, in which the last sinks take the place of as many keys
    gap: int = 7  # how much further back than the keys that they replace these sinks are
    before: int = 8  # tiles of the parts that the task has computed before: see `computes_in_turn`


R = Range()


def moves_of(producers: int, consumers: int) -> list[Any] | None:
    """Functions that move registers between the warpgroups of a block; None for two, which have enough at first.

    give_away() and get_back() are for those that produce, get_many() and give_back() for those that consume.
    """
    row = next((row[2:] for row in ir.REGISTERS if row[:2] == (producers, consumers)), None)
    if row is None:
        return None
    first, producer, consumer = row
    names = f"dec_{producer}", f"inc_{first}", f"inc_{consumer}", f"dec_{first}"
    return [getattr(instructions(), f"registers_{name}") for name in names]


@functools.cache
def instructions():
    """The functions of `sm90.ir`, to be called in kernels."""
    return engine_in_use().bitcode(str(BITCODE))


def panels(width: int) -> int:
    """Panels of 64 columns that a row takes in shared memory."""
    return -(-width // 64)


class Barriers(NamedTuple):
    """Offsets of the barriers from the first, one of each for every stage, and of what the producer notes of tiles."""

    k_there: int = 0
    v_there: int = 8 * MOST_STAGES
    k_done: int = 16 * MOST_STAGES
    v_done: int = 24 * MOST_STAGES
    exists: int = 32 * MOST_STAGES  # a bit a key of a tile: whether it is one of the task's, in a page that exists
    spoiled: int = 48 * MOST_STAGES  # whether infinities or NaNs were taken out of V, of any tile
    nbytes: int = 48 * MOST_STAGES + 16


B = Barriers()


class Memory(NamedTuple):
    """Where things lie in shared memory, in bytes from a multiple of 1,024 on."""

    k: int
    v: int
    tile: int  # bytes of a tile of K
    tile_v: int  # and of V
    stages: int  # tiles of each
    codes: int  # of tiles to come: those of K, then of V
    of_codes: int  # bytes of the codes of a tile of K, or of V
    ahead: int  # tiles of each whose codes are there
    barriers: int
    nbytes: int
    merged: int = 0  # of the parts before, by which `consumer.make_close` merges them; behind the codes


def memory_of(width: int, bits: int = 0, merged_rows: int = 0) -> Memory:
    """The `Memory` of heads of this width: queries first, then tiles, then codes of so many bits if there are any.

    So many rows have a result of the parts before. Fewer codes lie ahead, if only then two tiles have room.
    """
    k, tile = panels(width) * ROWS * PANEL_ROW, panels(width) * KEYS_OF[width] * PANEL_ROW
    of_codes, of_merged, stages = tile * bits // 16, merged_rows * (width * 4 + 8), 0
    for ahead in (2, 1) if width <= 128 else (1,):
        room = SHARED_BYTES - k - of_merged - 2 * ahead * of_codes - B.nbytes - 1024
        stages = min(STAGES_OF[width], room // (2 * tile))
        if stages > 1 or not merged_rows:
            break
    codes = k + 2 * stages * tile
    merged = codes + 2 * ahead * of_codes
    barriers = merged + of_merged
    nbytes = barriers + B.nbytes + 1024
    return Memory(k, k + stages * tile, tile, tile, stages, codes, of_codes, ahead, barriers, nbytes, merged)


def memory_of_eight(width: int, floats: bool) -> Memory:
    """The `Memory` of products in 8 bits: behind the barriers are factors of query rows, then scales of the keys.

    Over `floats` V is codes too, a row of keys for each column, and the codes of tiles to come are its own. Otherwise
    it is halves, made of codes that lie as `memory_of` has them.
    """
    columns, keys = -(-width // PANEL_ROW), KEYS_OF[width]
    k, tile, ahead = columns * ROWS * PANEL_ROW, columns * keys * PANEL_ROW, 2 if width <= 128 or floats else 1
    tile_v = width * PANEL_ROW if floats else panels(width) * keys * PANEL_ROW
    of_codes = tile if floats else tile_v // 2
    numbers = 4 * (ROWS + MOST_STAGES * keys)
    room = SHARED_BYTES - k - ahead * of_codes - B.nbytes - numbers - 1024
    stages = min(STAGES_OF[width], room // (tile + tile_v))
    v = k + stages * tile
    codes = v + stages * tile_v
    barriers = codes + ahead * of_codes
    if not floats:
        codes -= ahead * of_codes  # where those of K would begin, which are not kept
    return Memory(k, v, tile, tile_v, stages, codes, of_codes, ahead, barriers, barriers + B.nbytes + numbers + 1024)


def merges(rows: int, width: int, bits: int) -> bool:
    """Whether there is room to merge the parts of so many rows where they are computed."""
    return memory_of(width, bits, rows).stages > 1


def bits_of(c) -> int:
    """Bits of a code; 0 of halves."""
    return 0 if c.cache in HALVES else OF_CODE[c.cache].bits


def merges_parts(x, parts, c) -> bool:
    """Whether a kernel merges the parts of a task itself."""
    return c.invariant and not parts and merges(x.rows, c.width, bits_of(c))


def computes_in_turn(parts, c) -> bool:
    """Whether a task may compute several parts, one after another, for a kernel that merges them.

    Over codes it has no room to merge them; but tiles of the next part can be made while it multiplies those of one.
    """
    return c.invariant and parts and bits_of(c) > 0


def memory_for(x, parts, c) -> Memory:
    """The `Memory` of a kernel's choices."""
    if c.eight:
        return memory_of_eight(c.width, is_transposed(c))
    return memory_of(c.width, bits_of(c), x.rows if merges_parts(x, parts, c) else 0)


def is_transposed(c) -> bool:
    """Whether a kernel multiplies codes of V: floats have one scale for all keys, which comes behind the sums."""
    return c.eight and c.cache == "e4m3"


def make_range(c, rows_of_task=ROWS):
    """find_range(row, visible, task, params) -> the vector `Range` of the task's rows, of which `row` is the first.

    Under `invariant` tiles begin at multiples of their keys, by position, and sinks stay at theirs.
    """
    bounds_of = make_tile_bounds(c)
    keys = KEYS_OF[c.width]

    @ti.func
    def find_range(row, visible, task, params):
        begin, end, low, high, fixed = task[T.begin], task[T.end], -FAR, FAR, 0
        resume, gap = begin, 0
        if ti.static(has_bounds(c)):
            rows = params[P.queries] * c.group
            first_depth, last_depth = (
                ti.min(row, rows - 1) // c.group,
                (ti.min(row + rows_of_task, rows) - 1) // c.group,
            )
            if ti.static(c.tree):  # depths that a query may have
                first_depth, last_depth = 0, params[P.queries] - 1
            first, last = bounds_of(first_depth, visible, params), bounds_of(last_depth, visible, params)
            low, high, newest = last[0], first[1], last[1]
            if ti.static(c.tree):
                high = first_new(visible, params) - 1
            if ti.static(c.sinks):
                low, newest = ti.max(low, first[2] - 1), ti.max(newest, ti.min(last[3], last[2] - 1))
            end = ti.min(end, newest + 1)
            if ti.static(not c.invariant):
                resume = ti.max(begin, first[0] + 1)
            elif ti.static(not c.sinks):
                resume = ti.max(begin, (ti.max(first[0], -1) + 1) // keys * keys)
            if ti.static(packs_sinks(c)):
                sinks = ti.max(ti.min(visible[V.sinks], end) - begin, 0)
                fixed, rest = sinks // keys, sinks % keys
                resume = ti.max(begin + sinks, ti.min(resume, end)) - rest
                if rest > 0:
                    gap = resume - begin - fixed * keys
        tiles = fixed + ti.max(end - resume + (keys - 1), 0) // keys
        return ti.Vector([tiles, end, low, high, fixed, begin, resume, gap, 0])

    return find_range


def packs_sinks(c) -> bool:
    """Whether tiles of sinks come first, and the last of them share a tile with keys after them."""
    return c.sinks and has_bounds(c) and not c.invariant


def make_stage_of(stages):
    """stage_of(n) -> (where tile n lies in shared memory, and the phase of its barriers), tile 0 of phase 0.

    `n` counts the tiles of all parts of a task.
    """

    @ti.func
    def stage_of(n):
        return n % stages, ti.cast(n // stages & 1, ti.u32)

    return stage_of


def make_slot_of(c):
    """slot_of(index, seen, visible, task, ...) -> the slot of the key at an index; -1 if the task has no such key."""
    find_slot, first_of = make_find_slot(c), make_first_of(c)

    @ti.func
    def slot_of(index, seen, visible, task, table: ti.template(), strides, params):
        slot, is_there = -1, index < seen[R.end]
        if ti.static(c.invariant):
            is_there = index < seen[R.end] and index >= first_of(task, visible)
        if is_there:
            slot = find_slot(task, task[T.row] // c.group, index, visible, table, strides, params)
        return slot

    return slot_of


def make_tile_at(c):
    """tile_at(n, seen) -> the index of the first key of a task's tile n, or of the one that a sink replaces."""
    keys = KEYS_OF[c.width]

    @ti.func
    def tile_at(n, seen):
        at = seen[R.resume] + (n - seen[R.fixed]) * keys
        if ti.static(packs_sinks(c)):
            at = ti.select(n < seen[R.fixed], seen[R.first] + n * keys, at)
        return at

    return tile_at


def make_gap_of(c):
    """gap_of(n, seen) -> how much further back the sinks of tile n are than the keys that they replace."""

    @ti.func
    def gap_of(n, seen):
        gap = 0
        if ti.static(packs_sinks(c)):
            gap = ti.select(n == seen[R.fixed], seen[R.gap], 0)
        return gap

    return gap_of


def make_index_in_tile(c):
    """index_in_tile(key, n, seen, visible) -> the index of a key of tile n."""
    tile_at, gap_of = make_tile_at(c), make_gap_of(c)

    @ti.func
    def index_in_tile(key, n, seen, visible):
        index = tile_at(n, seen) + key
        if ti.static(packs_sinks(c)):
            of_sink = index - gap_of(n, seen)
            index = ti.select(of_sink < visible[V.sinks], of_sink, index)
        return index

    return index_in_tile


def make_find(OWN, c):
    """find(n, lane, warp, ...): the slot of a lane's key of tile n, of the `OWN` keys of a warp; -1 if it has none."""
    index_in_tile, slot_of = make_index_in_tile(c), make_slot_of(c)

    @ti.func
    def find(n, lane, warp, seen, visible, task, table: ti.template(), strides, params):
        index, slot = index_in_tile(warp * OWN + lane, n, seen, visible), -1
        if n < seen[R.tiles]:
            slot = slot_of(index, seen, visible, task, table, strides, params)
        return slot

    return find


def make_is_whole(c):
    """is_whole(at, seen) -> 1 if every row of a task sees all of the task's keys in the tile from index `at` on."""
    keys = KEYS_OF[c.width]

    @ti.func
    def is_whole(at, seen):
        return ti.cast(at > seen[R.low], ti.i32) * ti.cast(at + (keys - 1) <= seen[R.high], ti.i32)

    return is_whole


@ti.func
def piece_offset(eights, row, piece, rows):
    """The offset of a piece of row `eights` + `row` in panels of `rows` rows; `eights` is a multiple of 8."""
    offset = (piece >> 3) * (rows * PANEL_ROW) + (eights + row) * PANEL_ROW + (((piece & 7) ^ (row & 7)) << 4)
    return ti.cast(offset, ti.u32)
