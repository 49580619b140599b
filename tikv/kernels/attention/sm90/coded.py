"""The producers of `sm90.attend` where K and V are codes: they make halves of them, the numbers that they stand for.

A warp copies the codes of its rows to shared memory, one or two tiles ahead, in pieces of 16 bytes, which do not pass
through the small L1 cache. Its lanes read them there and write the numbers to where `sm90.producer` would copy them.
The codes of a later tile take the place of those that the warp has read, half of its rows at a time.

Codes become halves of float16 by their bits, without rounding. These are multiplied by their scales as halves, where
both are float16, else as floats; so the number that meets the queries is rounded once.
"""

from typing import NamedTuple

import numpy as np

from tikv.formats import OF_CODE, GroupFormat
from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.parameters import S
from tikv.kernels.attention.sm80.instructions import lane_bits
from tikv.kernels.attention.sm80.tiles import has_bounds
from tikv.kernels.attention.sm90.producer import make_clean
from tikv.kernels.attention.sm90.tiles import (
    KEYS_OF,
    PANEL_ROW,
    PIECE,
    B,
    R,
    computes_in_turn,
    instructions,
    make_find,
    make_is_whole,
    make_stage_of,
    make_tile_at,
    panels,
    piece_offset,
)
from tikv.kernels.attention.task import T
from tikv.kernels.codec import SIZE, WORD, make_bits_to_f32, make_f32_to_bits
from tikv.kernels.groups import has_halves, make_place
from tikv.kernels.lanes import ALL
from tikv.runtime import ti

COLUMNS = 64  # of a panel
RULES = {"int8": 128, "q8_0": 128, "affine": 0, "q4_0": 8, "float8": 0}  # what is taken from a code without a sign


class LaneCodes(NamedTuple):
    """How the codes of a format lie, and how the lanes of a warp share them out."""

    rule: str
    bits: int  # of a code
    group: int  # codes of a row that share a scale
    numbers: int  # of a group: none, a scale, or a scale and a bias
    lanes: int  # that read a panel of a row
    words: int  # of 32 bits that each of them reads of it

    @property
    def rows(self) -> int:
        """Rows that a warp reads at a time."""
        return 32 // self.lanes

    @property
    def panel(self) -> int:
        """Bytes of a panel of a row."""
        return COLUMNS * self.bits // 8


def codes_of(cache: str, width: int, scaled: bool) -> LaneCodes | None:
    """The `LaneCodes` of a cache of this width; None for what is not codes that the producer takes."""
    row = OF_CODE.get(cache)
    if row is None or row.rule not in RULES or row.bits not in (8, 4):
        return None
    group, numbers = (row.group, row.numbers) if isinstance(row, GroupFormat) else (width, int(scaled))
    lanes = 4 if has_halves(cache) else 8
    return LaneCodes(row.rule, row.bits, group, numbers, lanes, COLUMNS * row.bits // 32 // lanes)


def word_bits(cache: str) -> int:
    """Bits of the words in which rows are counted: those of groups are packed in words of 32."""
    return 32 if isinstance(OF_CODE[cache], GroupFormat) else 64


def both_halves(x: float) -> int:
    """Two equal halves of float16."""
    return int(np.float16(x).view(np.uint16)) * 0x10001


def make_produce_codes(warps, memory, parts, c):
    """produce(thread, shared, barriers, seen, ...): write the tiles of a task, by all threads of what produces.

    So many warps write K, and as many V. A lane of a warp looks up the row of one key, as in `sm90.producer`.
    """
    ext = instructions()
    codes = codes_of(c.cache, c.width, c.scale != "")
    keys = KEYS_OF[c.width]
    OWN, WORDS, NUMBERS = keys // warps, codes.words * panels(c.width), c.width // codes.group * codes.numbers
    STAGES, PARTS, PART, HALF = memory.stages, 4 // warps, keys // 4, OWN // codes.rows // 2
    READY = (NUMBERS + 1) // 2 if in_pairs(codes, c) else NUMBERS
    AHEAD, SIDE, AREA = memory.ahead, memory.ahead * memory.of_codes, memory.of_codes // warps
    tile_at, is_whole, find = make_tile_at(c), make_is_whole(c), make_find(OWN, c)
    IN_TURN, stage_of = computes_in_turn(parts, c), make_stage_of(STAGES)
    k_offset, v_offset, scale_offset = make_slot_offsets(c)
    copy_half, read_row = make_copy_half(OWN, codes, c), make_read_row(codes, c)
    write_row, clear = make_write_row(OWN, codes, c), make_clear(OWN, c)
    copies_left = getattr(ext, f"copies_left_{2 * AHEAD - 1}")
    prepare, clean = make_prepare(c), make_clean(OWN, c)
    read_number = getattr(ext, f"read_number_{SIZE[c.scale]}") if c.scale else None

    @ti.func
    def read_scales(slot, base, to: ti.template(), strides):
        """Start to read the numbers of the groups of a lane's row."""
        address = base + ti.cast(scale_offset(ti.max(slot, 0), strides), ti.u64) * ti.u64(SIZE[c.scale])
        for j in ti.static(range(NUMBERS)):
            at = address + ti.u64(j * SIZE[c.scale])
            read_number(to[j], at)

    @ti.func
    def offset_of(of_v, slot, strides):
        """Where a slot's row begins."""
        row = ti.max(slot, 0)
        return ti.select(of_v != 0, v_offset(row, strides), k_offset(row, strides))

    @ti.func
    def produce(thread, shared, barriers, seen, visible, task, arrays: ti.template(), strides, params):
        table = ti.static(arrays[4])
        lane, warp = thread % 32, ti.simt.warp.shfl_sync_i32(ti.u32(ALL), thread // 32, 0)
        of_v, warp = warp // warps, warp % warps
        base, other, scales_at, other_scales = ti.u64(0), ti.u64(0), ti.u64(0), ti.u64(0)
        ext.address_k(base)
        ext.address_v(other)
        base = ti.select(of_v != 0, other, base)
        base += ti.cast(ti.select(of_v != 0, task[T.v_first], task[T.k_first]), ti.u64) * ti.u64(c.bits // 8)
        if ti.static(NUMBERS > 0):
            ext.address_k_scale(scales_at)
            ext.address_v_scale(other_scales)
            scales_at = ti.select(of_v != 0, other_scales, scales_at)
            first = ti.select(of_v != 0, strides[S.v_scale_first], strides[S.k_scale_first]) + task[T.scale_first]
            scales_at += ti.cast(first, ti.u64) * ti.u64(SIZE[c.scale])
        scales = [ti.u32(0) for _ in range(NUMBERS)]
        slots = [-1 for _ in range(AHEAD + 1)]  # of a lane's key of a tile, and of those to come
        tiles, stage, phase = seen[R.tiles], 0, ti.u32(1)
        if ti.static(IN_TURN):
            stage, phase = stage_of(seen[R.before])
            phase = phase ^ ti.u32(1)  # a stage is free at first
        codes_at = shared + ti.cast(memory.codes + of_v * SIDE + warp * AREA, ti.u32)
        for n in range(ti.select(tiles > 0, AHEAD + 1, 0)):
            for i in ti.static(range(AHEAD)):
                slots[i] = slots[ti.static(i + 1)]
            slots[AHEAD] = find(n, lane, warp, seen, visible, task, table, strides, params)
            if n < AHEAD:
                offset, at = offset_of(of_v, slots[AHEAD], strides), codes_at + ti.cast(n * memory.of_codes, ti.u32)
                for half in ti.static(range(2)):
                    copy_half(half, lane, base, offset, at)
                    ext.copies_close()
        if ti.static(NUMBERS > 0):
            if tiles > 0:
                read_scales(slots[0], scales_at, scales, strides)
        for tile in range(tiles):
            there = ti.cast(ti.simt.warp.ballot(ti.cast(slots[0] >= 0, ti.i32)), ti.u32)
            ready = [ti.u32(0) for _ in range(READY)]
            for j in ti.static(range(READY)):
                if ti.static(READY < NUMBERS):
                    ready[j] = scales[2 * j] | scales[min(2 * j + 1, NUMBERS - 1)] << ti.u32(16)
                else:
                    ready[j] = prepare(scales[j])
            if ti.static(NUMBERS > 0):
                read_scales(slots[1], scales_at, scales, strides)
            barrier = barriers + ti.cast(of_v * B.v_there + stage * 8, ti.u32)
            done = barrier + ti.u32(B.k_done)
            ext.barrier_wait(done, phase)
            to = shared + ti.cast(memory.k + of_v * (memory.v - memory.k) + stage * memory.tile_v, ti.u32)
            at = codes_at + ti.cast(tile % AHEAD * memory.of_codes, ti.u32)
            offset = offset_of(of_v, slots[AHEAD], strides)
            for half in ti.static(range(2)):
                copies_left()
                ext.warp_meets()
                words = [[ti.u32(0) for _ in range(WORDS)] for _ in range(HALF)]
                read_row(ti.static(half * HALF), lane, at, words[0])
                for i in ti.static(range(HALF)):
                    if ti.static(i + 1 < HALF):
                        read_row(ti.static(half * HALF + i + 1), lane, at, words[ti.static(i + 1)])
                    write_row(ti.static(half * HALF + i), lane, warp, to, words[i], ready)
                ext.warp_meets()
                copy_half(half, lane, base, offset, at)  # of a later tile: what lay there has been read
                ext.copies_close()
            if of_v == 0 and lane == 0:
                note = barriers + ti.cast(B.exists + stage * 16 + warp * (4 * PARTS), ti.u32)
                for part in ti.static(range(PARTS)):
                    of_part = (there >> ti.u32(part * PART)) & ti.u32((1 << PART) - 1)
                    ext.write_4(note, of_part)
                    note += ti.u32(4)
                ext.barrier_arrive(barrier)
            if of_v != 0 and there != ti.u32((1 << OWN) - 1):
                ext.warp_meets()
                clear(lane, warp, to, there)
            if ti.static(has_bounds(c)):
                if of_v * (1 - is_whole(tile_at(tile, seen), seen)) != 0:
                    ext.warp_meets()
                    clean(lane, warp, to, barriers)
            ext.for_products()
            ext.barrier_arrive(barrier)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ ti.u32(1)
            for i in ti.static(range(AHEAD)):
                slots[i] = slots[ti.static(i + 1)]
            slots[AHEAD] = find(tile + AHEAD + 1, lane, warp, seen, visible, task, table, strides, params)
        ext.copies_wait()

    return produce


@ti.func
def row_of(lane, lanes: ti.template()):
    """Which of a warp's rows a lane reads of those that are read at a time.

    Where four lanes read a row, those of two rows that lie in other banks are neighbours.
    """
    row = lane // lanes
    if ti.static(lanes == 4):
        row = (row & 4) | (row & 1) << 1 | (row & 2) >> 1
    return row


def bytes_of_row(codes, c) -> int:
    """Bytes of a row's codes in shared memory, where a last panel has room for all of its columns."""
    return panels(c.width) * codes.panel


def make_turn(codes, c):
    """turn(row): the number of a panel, in bytes, whose place that of panel 0 of a row takes, by exclusive or.

    Rows that lie in the same banks differ in it, so a warp reads a panel of several rows at once.
    """
    BANKS = 128 // codes.panel  # panels that all banks hold
    OTHERS = min(BANKS, panels(c.width))

    @ti.func
    def turn(row):
        return (row // ti.static(BANKS // OTHERS) & ti.static(OTHERS - 1)) * codes.panel

    return turn


def make_copy_half(OWN, codes, c):
    """copy_half(half, lane, base, row, to): starts to copy the codes of a half of a warp's rows of a tile.

    A lane knows where the row of one key begins, in words from `base` on. Behind the columns of a row are zeros.
    """
    copy, turn, ROW, NBYTES = (
        instructions().copy_16,
        make_turn(codes, c),
        bytes_of_row(codes, c),
        c.width * codes.bits // 8,
    )
    PIECES = ROW // PIECE
    AT_ONCE = 32 // PIECES  # rows

    @ti.func
    def copy_half(half: ti.template(), lane, base, row, to):
        key, begin = lane // PIECES, lane % PIECES * PIECE
        size = ti.select(begin < NBYTES, ti.u32(PIECE), ti.u32(0))
        place = to + ti.cast(key * ROW + (begin ^ turn(key)), ti.u32)
        address = base + ti.cast(ti.min(begin, NBYTES - PIECE), ti.u64)
        for j in ti.static(range(half * OWN // 2, (half + 1) * OWN // 2, AT_ONCE)):
            words = ti.simt.warp.shfl_sync_i32(ti.u32(ALL), row, key + j)
            source = address + ti.cast(ti.cast(words, ti.u32), ti.u64) * ti.u64(c.bits // 8)
            at = place + ti.u32(j * ROW)
            copy(at, source, size)

    return copy_half


def make_read_row(codes, c):
    """read_row(i, lane, at, words): a lane's codes of the i-th row that it reads of the warp's, by panels."""
    turn, ROW, N = make_turn(codes, c), bytes_of_row(codes, c), codes.words
    read = instructions().read_words if N == 2 else instructions().read_4

    @ti.func
    def read_row(i: ti.template(), lane, at, words: ti.template()):
        row = row_of(lane, codes.lanes)
        first = at + ti.cast(row * ROW + lane % codes.lanes * (4 * N) + turn(row), ti.u32)
        for p in ti.static(range(panels(c.width))):
            place = (first ^ ti.u32(p * codes.panel)) + ti.u32(i * codes.rows * ROW)
            read(*words[N * p : N * p + N], place)

    return read_row


def make_clear(OWN, c):
    """clear(lane, warp, to, there): a warp's rows of V without a bit in `there` become zeros: their weight is 0."""
    ext = instructions()
    keys, pieces = KEYS_OF[c.width], c.width * 2 // PIECE

    @ti.func
    def clear(lane, warp, to, there):
        for j in range(OWN * pieces // 32):
            number, nothing = j * 32 + lane, ti.u32(0)
            row = number // pieces
            if (there >> ti.cast(row, ti.u32)) & ti.u32(1) == ti.u32(0):
                address = to + piece_offset(warp * OWN, row, number % pieces, keys)
                ext.write_16(address, nothing, nothing, nothing, nothing)

    return clear


def make_write_row(OWN, codes, c):
    """write_row(i, lane, warp, to, words, scales): what a lane has read of its i-th row becomes halves of the tile.

    A lane knows the numbers of one key's groups: in pairs, or as `make_prepare` leaves them.
    """
    write_piece = make_write_piece(codes, c)
    keys, pairs = KEYS_OF[c.width], in_pairs(codes, c)
    N = 1 if pairs else codes.numbers  # registers of a group, or of the two of a panel
    OF_TWO = pairs and codes.numbers == 1
    ALONE, SPAN = codes.group >= COLUMNS or OF_TWO, COLUMNS if OF_TWO else codes.group

    @ti.func
    def write_row(i: ti.template(), lane, warp, to, words: ti.template(), scales: ti.template()):
        row, piece = row_of(lane, codes.lanes), lane % codes.lanes
        if ti.static(codes.lanes == 4):
            piece = (piece & 2) << 1 | piece & 1
        # Rows of which the first is a multiple of 8 lie alike.
        eight, behind = ti.static(i * codes.rows // 8 * 8, i * codes.rows % 8)
        address = to + piece_offset(warp * OWN, row + behind, piece, keys)
        of_row = [ti.u32(0) for _ in range(len(scales))]
        for j in ti.static(range(len(scales))):
            of_row[j] = lane_bits(scales[j], row + ti.static(i * codes.rows))
        for p in ti.static(range(panels(c.width))):
            of_panel = [ti.select(piece < 4, ti.u32(0x1010), ti.u32(0x3232)) for _ in range(N + OF_TWO)]
            for j in ti.static(range(N)):
                of_panel[j] = of_row[ti.static(p * COLUMNS // SPAN * N + j)]
                if ti.static(not ALONE and (p + 1) * COLUMNS <= c.width):  # the panel has two groups
                    of_panel[j] = ti.select(piece < 4, of_panel[j], of_row[ti.static((p * 2 + 1) * N + j)])
            at = address + ti.u32(eight * PANEL_ROW + p * keys * PANEL_ROW)
            write_piece(at, words, p, of_panel)

    return write_row


def make_write_piece(codes, c):
    """write_piece(at, words, p, scales): a lane's codes of panel p, multiplied, as a piece of a row or as two."""
    ext = instructions()
    by = ("pairs" if in_pairs(codes, c) else "halves") if by_halves(c) else c.query
    kinds = {"float8": [c.cache], "q4_0": ["low_nibbles", "high_nibbles"]}.get(
        codes.rule, ["bytes" if codes.bits == 8 else "nibbles"]
    )
    writes = [getattr(ext, f"write_{kind}_{by}_{codes.numbers}") for kind in kinds]
    zero = RULES[codes.rule]
    LESS, FLIP = both_halves(-(1024 + zero)), 0x80808080 if zero == 128 else 0
    LESS_16, BY_16 = both_halves(-(64 + zero)), both_halves(1 / 16)
    BY_TURNS = both_halves(1) & 0xFFFF | BY_16 & 0xFFFF0000
    LESS_BY_TURNS = LESS & 0xFFFF | LESS_16 & 0xFFFF0000
    GIVEN = 3 - codes.numbers if by == "pairs" else codes.numbers

    @ti.func
    def write_piece(at, words: ti.template(), p: ti.template(), scales: ti.template()):
        word, other = words[ti.static(p * codes.words)], words[ti.static((p + 1) * codes.words - 1)]
        numbers = [ti.bit_cast(scales[j], ti.f32 if by == c.query else ti.u32) for j in ti.static(range(GIVEN))]
        less = ti.u32(LESS)
        if ti.static(codes.rule == "float8"):
            writes[0](at, word, other, *numbers)
        elif ti.static(codes.bits == 8):
            word, other = word ^ ti.u32(FLIP), other ^ ti.u32(FLIP)
            writes[0](at, word, other, less, *numbers)
        elif ti.static(codes.rule != "q4_0"):
            factors, less = ti.u32(BY_TURNS), ti.u32(LESS_BY_TURNS)
            writes[0](at, word, factors, less, *numbers)
        else:
            writes[0](at, word, other, less, *numbers)
            at = at ^ ti.u32(32)  # columns 16 further on, two pieces
            factor, less = ti.u32(BY_16), ti.u32(LESS_16)
            writes[1](at, word, other, factor, less, *numbers)

    return write_piece


def in_pairs(codes, c) -> bool:
    """Whether the numbers of a row's groups are handed from lane to lane two at a time."""
    return by_halves(c) and c.width // codes.group * codes.numbers > 1


def by_halves(c) -> bool:
    """Whether numbers are multiplied by their scales as halves."""
    return c.query == "f16" and c.scale in ("", "f16")


def make_prepare(c):
    """prepare(bits): a scale in the form in which numbers are multiplied by it: two equal halves, or a float."""
    to_f32 = make_bits_to_f32(c.scale) if c.scale else None

    @ti.func
    def prepare(bits):
        prepared = bits | (bits << ti.u32(16))
        if ti.static(not by_halves(c)):
            prepared = ti.bit_cast(to_f32(bits), ti.u32)
        return prepared

    return prepare


def make_half_at(c):
    """half_at(slot, column, task, v, v_scale, strides) -> the bits of a number of V, as products have it."""
    _, v_offset, scale_offset = make_slot_offsets(c)
    codes = codes_of(c.cache, c.width, c.scale != "")
    BITS = codes.bits if codes else 16
    zero, N = (RULES[codes.rule], codes.numbers) if codes else (0, 0)
    flip = 0x80 if zero == 128 else 0
    place, word_type = make_place(c.cache), WORD[c.bits]
    to_f32, of_scale = make_bits_to_f32(c.cache), make_bits_to_f32(c.scale or "f32")
    to_half = make_f32_to_bits(c.query, "cuda")

    @ti.func
    def half_at(slot, column, task, v: ti.template(), v_scale: ti.template(), strides):
        at = place(column) * BITS
        word = v[task[T.v_first] + v_offset(slot, strides) + at // c.bits]
        bits = ti.cast(word >> ti.cast(at % c.bits, word_type), ti.u32) & ti.u32((1 << BITS) - 1)
        if ti.static(BITS < 16):
            number = ti.f32(0.0)
            if ti.static(codes.rule == "float8"):
                number = to_f32(bits)
            else:
                number = ti.cast(ti.cast(bits ^ ti.u32(flip), ti.i32) - zero, ti.f32)
            if ti.static(N > 0):
                scale_at = strides[S.v_scale_first] + task[T.scale_first] + scale_offset(slot, strides)
                scale_at += column // codes.group * N
                number *= of_scale(v_scale[scale_at])
                if ti.static(N == 2):
                    number += of_scale(v_scale[scale_at + 1])
            bits = ti.cast(to_half(number), ti.u32)
        return bits

    return half_at
