"""Codes of K and V in shared memory: each warp copies its own tiles there, some tiles ahead.

A warp has memory for `Tile.stages` tiles. Its lanes copy the rows of a tile in pieces of 16 bytes, and the numbers of
their groups in words of 4, and wait for them only when the tile is used. So more bytes are in flight than registers
could hold, and a lane finds the slots of few keys. The registers of `take_keys` and `take_values` are those of
`load_keys` and `load_values`.

The pieces of a row are exchanged by a few bits of the row's number, and rows of V that lanes read at once follow each
other. So what a warp reads at once lies in different banks.
"""

from typing import NamedTuple

from tikv.formats import OF_CODE
from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.parameters import S
from tikv.kernels.attention.sm80.coded import Pieces, codes_of, pieces
from tikv.kernels.attention.sm80.floats import KINDS, layout_of, scales_per_word
from tikv.kernels.attention.sm80.instructions import ROWS, WARPS, instructions
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.sm80.tiles import (
    L,
    counts_in_page,
    in_tile,
    make_find_values,
    make_is_whole,
    make_look_up,
    make_slot_behind,
    make_tile_at,
)
from tikv.kernels.attention.task import T
from tikv.kernels.lanes import ALL
from tikv.runtime import ti

PIECE = 16  # bytes that are copied at once
WORD = 4  # of the numbers of groups
ROW_BYTES = (32, 64, 128)  # of rows whose pieces lanes can share evenly
BANKS = 128  # bytes of shared memory that are read at once
MEMORY, RESERVED = 227 << 10, 1 << 10  # bytes for a multiprocessor's blocks; those of a block that no kernel has
MOST_STAGES = 5
WIDTH = 128  # of the heads whose tiles are copied
# By the rule and the bits of a format: the blocks of warps that copy tiles which a multiprocessor holds. For other
# formats, and for pages, registers that read a tile ahead were faster on an H200, or were not compared.
BLOCKS = {("int8", 8): 3, ("affine", 8): 3, ("q8_0", 8): 3, ("mxfp8", 8): 3, ("affine", 4): 4, ("q4_0", 4): 4,
          ("nvfp4", 4): 4}  # fmt: skip


class CopiedTile(NamedTuple):
    """How a tile lies in the shared memory of a warp, in bytes: rows of K, rows of V, numbers of K, numbers of V."""

    row: int
    number: int  # a group's scale, with its bias if it has one
    groups: int  # of a row
    of_k: Pieces
    of_v: Pieces

    @property
    def numbers(self) -> int:
        """Bytes of the numbers of a row."""
        return self.number * self.groups

    @property
    def nbytes(self) -> int:
        """Bytes of a tile, a multiple of `BANKS`."""
        return -(-2 * KEYS * (self.row + self.numbers) // BANKS) * BANKS

    @property
    def one_each(self) -> bool:
        """Whether the numbers of a row are too few to be copied: a lane reads those of a row, and then writes them."""
        return self.numbers == 2


def copied(cache: str, width: int, width_v: int) -> CopiedTile | None:
    """How tiles of a cache are copied; None if they cannot be."""
    codes = codes_of(cache, width)
    if codes is None or width != width_v:
        return None
    row, number = width * codes.bits // 8, 2 * codes.numbers
    if cache in KINDS:
        layout = layout_of(cache, width, width_v)
        of_k, of_v, number = layout.of_k, layout.of_v, int(layout.scale != "")
    else:
        of_k, of_v = pieces(cache, width, width_v)
    made = CopiedTile(row, number, width // codes.group if number else 0, of_k, of_v)
    if row not in ROW_BYTES or 0 in (of_k.words, of_v.words) or (made.numbers % WORD and not made.one_each):
        return None
    return made


def blocks_of(cache: str, width: int, width_v: int) -> int:
    """How many blocks of warps that copy their tiles a multiprocessor holds; 0 if tiles of a cache are not copied."""
    if (width, width_v) != (WIDTH, WIDTH) or copied(cache, width, width_v) is None:
        return 0
    return BLOCKS.get((OF_CODE[cache].rule, OF_CODE[cache].bits), 0)


def stages_of(resident: int, cache: str, width: int) -> int:
    """Tiles that a warp has in shared memory if a multiprocessor holds so many blocks, which also merge there."""
    merged = WARPS * ROWS * (width + 4) * 4
    return min(MOST_STAGES, (MEMORY // resident - RESERVED - merged) // shared_bytes(1, cache, width, width))


def shared_bytes(stages: int, cache: str, width: int, width_v: int) -> int:
    """Bytes of shared memory that a block's tiles take, which begin at a multiple of `BANKS`."""
    return WARPS * stages * copied(cache, width, width_v).nbytes + BANKS


def exchange_of_key(tile: CopiedTile):
    """exchange(key): which bits of the number of a piece of K are flipped."""
    span = tile.of_k.words  # pieces of a row that four lanes read at once
    return make_exchange(BANKS // (span * PIECE), span, tile)


def make_exchange(rows, span, tile: CopiedTile):
    """exchange(row) for rows that follow each other, of which so many are read at once, `span` pieces of each."""
    per = BANKS // tile.row  # rows that lie in different banks
    count = max(1, rows // per)

    @ti.func
    def exchange(row):
        return row // per % count * span

    return exchange


def exchange_of_value(tile: CopiedTile):
    """exchange(row): the same of V; lanes read two pieces of each of four rows at once."""
    return make_exchange(4, 2, tile)


@ti.func
def row_of_value(key):
    """Where the row of a key lies in V: even keys first."""
    return (key >> 1) + (key & 1) * ti.static(KEYS // 2)


def make_copy(slot_behind, tile, c):
    """copy(at, block, lane, to, bases, ...) -> not 0 if a key of the lane's is missing; starts to copy a tile."""
    ext = instructions()
    k_offset, v_offset, scale_offset = make_slot_offsets(c)
    of_key, of_value = exchange_of_key(tile), exchange_of_value(tile)
    PER_ROW = tile.row // PIECE
    AT_ONCE = 32 // PER_ROW  # rows
    WORDS = tile.numbers // WORD
    V_AT, K_NUMBERS = KEYS * tile.row, 2 * KEYS * tile.row
    V_NUMBERS = K_NUMBERS + KEYS * tile.numbers
    K_BYTES, V_BYTES = c.bits // 8, tile.of_v.bits // 8
    SCALE = 1 if c.cache in KINDS else 2

    @ti.func
    def copy(at, block, lane, to, bases: ti.template(), seen, visible, task, table: ti.template(), strides, params):
        missing = 0
        for n in ti.static(range(KEYS // AT_ONCE)):
            key, piece = lane // PER_ROW + ti.static(n * AT_ONCE), lane % PER_ROW
            slot = slot_behind(at, key, block, seen, visible, task, table, strides, params)
            missing = ti.select(slot < 0, 1, missing)
            slot = ti.max(slot, 0)
            k_at = task[T.k_first] + piece * ti.static(PIECE // K_BYTES) + k_offset(slot, strides)
            v_at = task[T.v_first] + piece * ti.static(PIECE // V_BYTES) + v_offset(slot, strides)
            k_from = bases[0] + ti.cast(k_at, ti.u64) * ti.u64(K_BYTES)
            v_from = bases[1] + ti.cast(v_at, ti.u64) * ti.u64(V_BYTES)
            value_row = row_of_value(key)
            k_to = to + ti.cast(key * tile.row + (piece ^ of_key(key)) * PIECE, ti.u32)
            v_to = to + ti.cast(V_AT + value_row * tile.row + (piece ^ of_value(value_row)) * PIECE, ti.u32)
            ext.copy_16(k_to, k_from)
            ext.copy_16(v_to, v_from)
        for n in ti.static(range(-(-KEYS * WORDS // 32))):
            which = lane + ti.static(32 * n)
            if which < KEYS * WORDS:
                slot = slot_behind(at, which // WORDS, block, seen, visible, task, table, strides, params)
                first = task[T.scale_first] + which % WORDS * ti.static(WORD // SCALE)
                first = first + scale_offset(ti.max(slot, 0), strides)
                k_from = bases[2] + ti.cast(strides[S.k_scale_first] + first, ti.u64) * ti.u64(SCALE)
                v_from = bases[3] + ti.cast(strides[S.v_scale_first] + first, ti.u64) * ti.u64(SCALE)
                k_to, v_to = to + ti.cast(K_NUMBERS + which * 4, ti.u32), to + ti.cast(V_NUMBERS + which * 4, ti.u32)
                ext.copy_4(k_to, k_from)
                ext.copy_4(v_to, v_from)
        return missing

    return copy


def make_numbers_of_lane(slot_behind, c):
    """numbers_of_lane(at, block, lane, bases, ...): the 2 bytes of a row of K, or of V in the upper half of a warp."""
    ext, (_, _, scale_offset), SCALE = instructions(), make_slot_offsets(c), 1 if c.cache in KINDS else 2

    @ti.func
    def numbers_of_lane(at, block, lane, bases: ti.template(), seen, visible, task, table: ti.template(), strides,
                        params):  # fmt: skip
        slot = slot_behind(at, lane % KEYS, block, seen, visible, task, table, strides, params)
        first = ti.select(lane < KEYS, strides[S.k_scale_first], strides[S.v_scale_first]) + task[T.scale_first]
        index = first + scale_offset(ti.max(slot, 0), strides)
        address = ti.select(lane < KEYS, bases[2], bases[3]) + ti.cast(index, ti.u64) * ti.u64(SCALE)
        number = ti.u32(0)
        ext.read_global_2(number, address)
        return number

    return numbers_of_lane


def make_read_words(ext):
    """read_words(address, count, to, at): neighbouring words of shared memory."""

    @ti.func
    def read_words(address, count: ti.template(), to: ti.template(), at: ti.template()):
        if ti.static(count == 4):
            ext.read_16(to[at], to[ti.static(at + 1)], to[ti.static(at + 2)], to[ti.static(at + 3)], address)
        elif ti.static(count == 2):
            ext.read_8(to[at], to[ti.static(at + 1)], address)
        else:
            for n in ti.static(range(count)):
                one = address + ti.u32(4 * n)
                ext.read_4(to[ti.static(at + n)], one)

    return read_words


def make_take_keys(tile, c):
    """take_keys(lane, shared, kf): a lane's registers of two keys, as from `load_keys`."""
    ext = instructions()
    read_words, exchange, piece = make_read_words(ext), exchange_of_key(tile), tile.of_k
    WORDS, SPAN, SIZE = piece.count * piece.words, piece.words, 4 * piece.words
    FIRST = 2 * WORDS
    NUMBERS = 2 * KEYS * tile.row
    SHARED_OUT = c.cache in KINDS and not layout_of(c.cache, c.width, c.width_v).by_sums  # nvfp4: a lane's own
    EACH = scales_per_word(c.cache, c.width, c.width_v) if c.cache in KINDS else 1

    @ti.func
    def take_keys(lane, shared, kf: ti.template()):
        key = lane >> 2
        behind = (lane & 3) * SIZE
        changed = (((behind >> 4) ^ exchange(key)) << 4) | (behind & 15)
        first = shared + ti.cast(key * tile.row + changed, ti.u32)
        for i in ti.static(range(2)):
            for n in ti.static(range(piece.count)):
                address = (first ^ ti.u32(ti.static(n * SPAN * PIECE))) + ti.u32(ti.static(8 * i * tile.row))
                read_words(address, SPAN, kf, ti.static(i * WORDS + n * SPAN))
        if ti.static(tile.numbers > 0):
            for i in ti.static(range(2)):
                at = shared + ti.cast(NUMBERS + (key + ti.static(8 * i)) * tile.numbers, ti.u32)
                if ti.static(tile.one_each):
                    ext.read_2(kf[ti.static(FIRST + i)], at)
                elif ti.static(SHARED_OUT):
                    lane_at = at + ti.cast((lane & 3) * EACH, ti.u32)
                    if ti.static(EACH == 2):
                        ext.read_2(kf[ti.static(FIRST + i)], lane_at)
                    else:
                        ext.read_1(kf[ti.static(FIRST + i)], lane_at)
                elif ti.static(tile.number == 2):
                    words = [ti.u32(0) for _ in range(tile.numbers // 4)]
                    read_words(at, ti.static(tile.numbers // 4), words, 0)
                    for j in ti.static(range(tile.groups)):
                        half = words[ti.static(j // 2)] >> ti.u32(ti.static(j % 2 * 16))
                        kf[ti.static(FIRST + i * tile.groups + j)] = half & ti.u32(0xFFFF)
                else:
                    read_words(at, ti.static(tile.numbers // 4), kf, ti.static(FIRST + i * tile.numbers // 4))

    return take_keys


def make_take_values(tile, codes, c):
    """take_values(lane, shared, vf): a lane's registers of four rows of V, as from `load_values`."""
    ext = instructions()
    read_words, exchange, piece = make_read_words(ext), exchange_of_value(tile), tile.of_v
    WORDS, SPAN, SIZE = piece.count * piece.words, piece.words, 4 * piece.words
    AT, NUMBERS = KEYS * tile.row, 2 * KEYS * tile.row + KEYS * tile.numbers

    @ti.func
    def take_values(lane, shared, vf: ti.template()):
        row = lane & 3
        for n in ti.static(range(piece.count)):
            which = (lane >> 2) + ti.static(8 * n)
            behind = which * SIZE
            changed = (((behind >> 4) ^ exchange(row)) << 4) | (behind & 15)
            first = shared + ti.cast(AT + row * tile.row + changed, ti.u32)
            group = ti.cast(ti.cast(which * piece.codes, ti.u32) // ti.u32(codes.group), ti.i32)
            numbers = shared + ti.cast(NUMBERS + (lane & 3) * 2 * tile.numbers + group * tile.number, ti.u32)
            for i in ti.static(range(4)):
                address = first + ti.u32(ti.static((i % 2 * 8 + i // 2 * 4) * tile.row))
                read_words(address, SPAN, vf, ti.static(i * WORDS + n * SPAN))
                if ti.static(tile.numbers > 0):
                    at = numbers + ti.u32(ti.static((i % 2 + i // 2 * 8) * tile.numbers))
                    to = ti.static(4 * WORDS + i * piece.count + n)
                    if ti.static(tile.number == 4):
                        ext.read_4(vf[to], at)
                    elif ti.static(tile.number == 2):
                        ext.read_2(vf[to], at)
                    else:
                        ext.read_1(vf[to], at)

    return take_values


def make_attend_copied(x, f, add_tile, step, c):
    """attend_copied(thread, row, ahead, seen, ...): the loop over the keys of a warp that copies its tiles.

    While a tile is used, those that follow are under way, into all stages but its own.
    """
    ext, layout = instructions(), copied(c.cache, c.width, c.width_v)
    look_up, tile_at, find_values, is_whole = make_look_up(c), make_tile_at(c), make_find_values(c), make_is_whole(c)
    copy = make_copy(make_slot_behind(c), layout, in_tile(c))
    take_keys, take_values = make_take_keys(layout, c), make_take_values(layout, codes_of(c.cache, c.width_v), c)
    BYTES, LAST = layout.nbytes, x.stages - 1
    wait = getattr(ext, f"copies_wait_{LAST - 1}")
    numbers_of_lane = make_numbers_of_lane(make_slot_behind(c), in_tile(c))
    NUMBERS = 2 * KEYS * layout.row

    @ti.func
    def attend_copied(thread, row, ahead, seen, visible, task, arrays: ti.template(), qf: ti.template(),
                      m: ti.template(), l: ti.template(), acc: ti.template(), sums: ti.template(), notes: ti.template(),
                      strides, params, scalars):  # fmt: skip
        lane = thread % 32
        table = ti.static(arrays[4])
        bases = [ti.u64(0) for _ in range(4)]
        ext.address_k(bases[0])
        ext.address_v(bases[1])
        ext.address_k_scale(bases[2])
        ext.address_v_scale(bases[3])
        memory = ti.u32(0)
        ext.shared_memory(memory)
        memory = (memory + ti.u32(BANKS - 1)) // ti.u32(BANKS) * ti.u32(BANKS)
        memory += ti.cast(thread // 32 * ti.static(x.stages * BYTES), ti.u32)
        kf = [ti.u32(0) for _ in range(f.keys)]
        vf = [ti.u32(0) for _ in range(f.values)]
        slots = [0 for _ in range(4)]
        counts = [0 for _ in range(6)]  # whether a lane's two keys count, and its four rows of V
        # The index and the block of the tile that is copied next; a bit for each under way, if a key of it is missing.
        coming = seen[L.begin] + ahead
        block, missing = look_up(coming, seen, visible, task, table, strides, params), ti.u32(0)
        use, fill = ti.u32(BYTES), ti.u32(0)  # the stages of the tile that is used and of the one that is copied
        tiles = (seen[L.end] - seen[L.begin] + (step - 1)) // step
        numbers = ti.u32(0)  # that a lane read of the tile before, if it reads any
        to = memory + ti.u32(NUMBERS) + ti.cast(lane * 2, ti.u32)
        for n in range(ti.select(tiles > 0, tiles + LAST, 0)):
            if ti.static(layout.one_each):
                if n > 0:
                    ext.write_2(to, numbers)
                to = memory + fill + ti.u32(NUMBERS) + ti.cast(lane * 2, ti.u32)
            wait()
            ext.warp_meets()
            if coming < seen[L.end]:
                tile = tile_at(block, task, strides)
                lacks_key = copy(coming, block, lane, memory + fill, bases, seen, visible, tile, table, strides, params)
                if ti.static(layout.one_each):
                    numbers = numbers_of_lane(coming, block, lane, bases, seen, visible, tile, table, strides, params)
                if ti.static(counts_in_page(c)):
                    lacks_key = ti.select(block < 0, 1, 0)
                if ti.static(c.gaps):
                    missing = missing | (ti.cast(lacks_key, ti.u32) << ti.u32(LAST))
            ext.copies_commit()
            at, coming = coming - LAST * step, coming + step
            block = look_up(coming, seen, visible, task, table, strides, params)
            if n >= LAST and at < seen[L.end]:
                take_keys(lane, memory + use, kf)
                p = [ti.f32(0.0) for _ in range(4 * x.row_tiles)]
                f.scores(kf, qf, p, scalars)
                take_values(lane, memory + use, vf)
                whole = is_whole(at, seen, visible, task)
                if ti.static(c.gaps):
                    lacking = ti.simt.warp.any_nonzero(ti.u32(ALL), ti.cast(missing & ti.u32(1), ti.i32))
                    whole = ti.select(lacking != 0, 0, whole)
                if whole == 0:
                    of_tile = look_up(at, seen, visible, task, table, strides, params)
                    find_values(at, of_tile, lane, seen, visible, task, table, slots, counts, strides, params)
                add_tile(at, row, thread, whole, counts, p, vf, m, l, acc, sums, notes, visible, params)
            missing = missing >> ti.u32(1)
            fill = use
            use = ti.select(use == ti.u32(LAST * BYTES), ti.u32(0), use + ti.u32(BYTES))

    return attend_copied
