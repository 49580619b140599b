"""Products in 8 bits in `sm90.attend`, where K and V are codes of 8 bits and the user allows it.

Query rows become codes of the type of K, each with a factor of its own, and meet the codes of K as they lie in the
cache. Over int8 a key's scale then multiplies its sums, which are exact integers, and V becomes halves as in
`sm90.coded`. 8-bit floats have one scale for all keys of a head: that of K multiplies the logits, and that of V the
result. There weights become codes too, up to 2 ** 8.8 of the largest 448, without a factor; and the codes of V are
transposed, since products in 8 bits take both operands along the columns or keys over which they sum up.
"""

from tikv.kernels.attention.addresses import make_query_row, make_slot_offsets
from tikv.kernels.attention.parameters import P, S
from tikv.kernels.attention.sm90 import ir
from tikv.kernels.attention.sm90.producer import make_copy_rows
from tikv.kernels.attention.sm90.tiles import (
    GROUP,
    KEYS_OF,
    PANEL_ROW,
    PIECE,
    ROWS,
    B,
    R,
    instructions,
    is_transposed,
    make_find,
    make_is_whole,
    make_tile_at,
    piece_offset,
)
from tikv.kernels.attention.task import T
from tikv.kernels.codec import SIZE, make_bits_to_f32
from tikv.kernels.lanes import ALL, make_row_max
from tikv.runtime import ti

OPERANDS = {"e4m3": ("e4m3", 448.0), "i8": ("s8", 127.0)}  # of each type of codes: that of products, the largest code
OWN = 32  # keys of a warp that produces
LEAST = 0x02000000  # the bits of 2 ** -123, which a factor of scores is at least: that of a row of zeros would be 0


def operand_of(c) -> str:
    """The type of a product's operands, as `sm90.ir` names it."""
    return OPERANDS[c.cache][0]


# --- producers


def make_produce_eight(warps, produce_halves, memory, c):
    """produce(thread, shared, barriers, seen, ...): write the tiles of a task; half of the warps K, the others V."""
    TRANSPOSED = is_transposed(c)
    produce_keys = make_produce_keys(memory, c)
    produce_transposed = make_produce_transposed(memory, c) if TRANSPOSED else None

    @ti.func
    def produce(thread, shared, barriers, seen, visible, task, arrays: ti.template(), strides, params):
        lane, warp = thread % 32, ti.simt.warp.shfl_sync_i32(ti.u32(ALL), thread // 32, 0)
        table = ti.static(arrays[4])
        if warp < warps:
            produce_keys(lane, warp, shared, barriers, seen, visible, task, table, strides, params)
        elif ti.static(TRANSPOSED):
            produce_transposed(lane, warp - warps, shared, barriers, seen, visible, task, table, strides, params)
        else:
            produce_halves(thread, shared, barriers, seen, visible, task, arrays, strides, params)

    return produce


def make_produce_keys(memory, c):
    """produce_keys(lane, warp, ...): copy a warp's codes of K, and over int8 their scales, as floats."""
    ext, keys, SCALED = instructions(), KEYS_OF[c.width], not is_transposed(c)
    find, copy_rows = make_find(OWN, c), make_copy_rows(c.width, keys, OWN)
    k_offset, _, scale_offset = make_slot_offsets(c)
    kind = c.scale if SCALED else "f32"
    read_number, to_f32 = getattr(ext, f"read_number_{SIZE[kind]}"), make_bits_to_f32(kind)
    PARTS, PART = 128 // keys, keys // 4

    @ti.func
    def read_scale(slot, base, to: ti.template(), strides):
        """Start to read the scale of a lane's key."""
        at = base + ti.cast(scale_offset(ti.max(slot, 0), strides), ti.u64) * ti.u64(SIZE[c.scale])
        read_number(to, at)

    @ti.func
    def produce_keys(lane, warp, shared, barriers, seen, visible, task, table: ti.template(), strides, params):
        base, scales_at, scale = ti.u64(0), ti.u64(0), ti.u32(0)
        ext.address_k(base)
        base += ti.cast(task[T.k_first], ti.u64) * ti.u64(c.bits // 8)
        tiles, stage, phase = seen[R.tiles], 0, ti.u32(1)
        coming = find(0, lane, warp, seen, visible, task, table, strides, params)
        if ti.static(SCALED):
            ext.address_k_scale(scales_at)
            first = strides[S.k_scale_first] + task[T.scale_first]
            scales_at += ti.cast(first, ti.u64) * ti.u64(SIZE[c.scale])
            if tiles > 0:
                read_scale(coming, scales_at, scale, strides)
        for tile in range(tiles):
            offset = ti.select(coming < 0, -1, k_offset(ti.max(coming, 0), strides))
            there = ti.cast(ti.simt.warp.ballot(ti.cast(coming >= 0, ti.i32)), ti.u32)
            barrier = barriers + ti.cast(B.k_there + stage * 8, ti.u32)
            done = barrier + ti.u32(B.k_done)
            ext.barrier_wait(done, phase)
            to = shared + ti.cast(memory.k + stage * memory.tile, ti.u32)
            copy_rows(lane, warp, to, base, offset, there)
            if ti.static(SCALED):
                at = barriers + ti.cast(B.nbytes + 4 * ROWS + (stage * keys + warp * OWN + lane) * 4, ti.u32)
                number = ti.bit_cast(to_f32(scale), ti.u32)
                ext.write_4(at, number)
                ext.warp_meets()
            if lane == 0:
                note = barriers + ti.cast(B.exists + stage * 16 + warp * (4 * PARTS), ti.u32)
                for part in ti.static(range(PARTS)):
                    of_part = (there >> ti.u32(part * PART)) & ti.u32((1 << PART) - 1)
                    ext.write_4(note, of_part)
                    note += ti.u32(4)
                ext.barrier_arrive(barrier)
            ext.copies_arrive(barrier)
            stage += 1
            if stage == memory.stages:
                stage, phase = 0, phase ^ ti.u32(1)
            coming = find(tile + 1, lane, warp, seen, visible, task, table, strides, params)
            if ti.static(SCALED):
                read_scale(coming, scales_at, scale, strides)

    return produce_keys


def make_produce_transposed(memory, c):
    """produce_transposed(lane, warp, ...): copy a warp's codes of V, a tile ahead, and write them as rows of keys.

    A lane has the place of a key of the warp's 32, and then of a column of 16: those of 32 keys and 16 columns are
    turned together. Where rows see different keys, NaNs become zeros, as `sm90.producer.make_clean` does it.
    """
    ext, AREA = instructions(), memory.of_codes * OWN // KEYS_OF[c.width]
    find, copy_rows, (_, v_offset, _) = make_find(OWN, c), make_copy_rows(c.width, OWN, OWN), make_slot_offsets(c)
    tile_at, is_whole = make_tile_at(c), make_is_whole(c)

    @ti.func
    def produce_transposed(lane, warp, shared, barriers, seen, visible, task, table: ti.template(), strides, params):
        base = ti.u64(0)
        ext.address_v(base)
        base += ti.cast(task[T.v_first], ti.u64) * ti.u64(c.bits // 8)
        tiles, stage, phase = seen[R.tiles], 0, ti.u32(1)
        coming = find(0, lane, warp, seen, visible, task, table, strides, params)
        area = shared + ti.cast(memory.codes + warp * (2 * AREA), ti.u32)
        own_key = ti.cast(lane * PANEL_ROW + (lane & 7) * PIECE, ti.u32)
        column, piece = (lane & 7) * 2 + (lane >> 3 & 1), warp * 2 + (lane >> 4)
        own_column = ti.cast(column * PANEL_ROW + ((piece ^ (column & 7)) * PIECE), ti.u32)
        for n in range(ti.select(tiles > 0, tiles + 1, 0)):
            if n < tiles:
                offset = ti.select(coming < 0, -1, v_offset(ti.max(coming, 0), strides))
                there = ti.cast(ti.simt.warp.ballot(ti.cast(coming >= 0, ti.i32)), ti.u32)
                copy_rows(lane, 0, area + ti.cast(n % 2 * AREA, ti.u32), base, offset, there)
                coming = find(n + 1, lane, warp, seen, visible, task, table, strides, params)
            ext.copies_close()
            if n > 0:
                ext.copies_left_1()
                ext.warp_meets()
                barrier = barriers + ti.cast(B.v_there + stage * 8, ti.u32)
                done = barrier + ti.u32(B.k_done)
                ext.barrier_wait(done, phase)
                of_key = area + ti.cast((n - 1) % 2 * AREA, ti.u32) + own_key
                to = shared + ti.cast(memory.v + stage * memory.tile_v, ti.u32) + own_column
                whole, spoiled = 1, ti.u32(0)
                if ti.static(c.masked):
                    whole = is_whole(tile_at(n - 1, seen), seen)
                for i in ti.static(range(c.width // 32)):
                    y = [ti.u32(0) for _ in range(8)]
                    for j in ti.static(range(2 * i, 2 * i + 2)):  # two at a time, of which none waits for the other
                        at = (of_key ^ ti.u32(j % 8 * PIECE)) + ti.u32(j // 8 * (OWN * PANEL_ROW))
                        ext.read_turned(*y[4 * (j % 2) : 4 * (j % 2) + 4], at)
                    if ti.static(c.masked):
                        if whole == 0:
                            for e in ti.static(range(8)):
                                nans = ((y[e] & ti.u32(0x7F7F7F7F)) + ti.u32(0x01010101)) & ti.u32(0x80808080)
                                y[e] = y[e] & ~((nans >> ti.u32(7)) * ti.u32(0xFF))
                                spoiled = spoiled | nans
                    for j in ti.static(range(2)):
                        ext.write_keys(to, *y[4 * j : 4 * j + 4])
                        to += ti.u32(16 * PANEL_ROW)
                if spoiled != ti.u32(0):
                    note, yes = barriers + ti.u32(B.spoiled), ti.u32(1)
                    ext.write_4(note, yes)
                ext.for_products()
                ext.barrier_arrive(barrier)
                ext.warp_meets()  # what has been read may be overwritten
                stage += 1
                if stage == memory.stages:
                    stage, phase = 0, phase ^ ti.u32(1)
        ext.copies_wait()

    return produce_transposed


# --- consumers


def make_load_codes(memory, c):
    """load_codes(thread, half, row, shared, ...): a warpgroup's query rows as codes; two threads have a row.

    Each row's factor is behind the barriers: the largest of its numbers, divided by the largest code.
    """
    ext, LARGEST = instructions(), OPERANDS[c.cache][1]
    query_row, row_max, to_f32 = make_query_row(c), make_row_max("cuda", 2), make_bits_to_f32(c.query)
    codes, COUNT = getattr(ext, f"codes_{operand_of(c)}"), c.width // 32  # pieces of codes of a thread

    @ti.func
    def fetch(address, to: ti.template()):
        """16 numbers of a row."""
        for i in ti.static(range(2)):
            words, at = [ti.u32(0) for _ in range(4)], address + ti.u64(i * PIECE)
            ext.fetch_16(*words, at)
            for e in ti.static(range(4)):
                to[8 * i + 2 * e] = to_f32(words[e] & ti.u32(0xFFFF))
                to[8 * i + 2 * e + 1] = to_f32(words[e] >> ti.u32(16))

    @ti.func
    def load_codes(thread, half, row, shared, task, strides, params):
        q, threads, behind, side = ti.u64(0), ti.u32(GROUP), thread // 2, thread % 2
        ext.address_q(q)
        rows = params[P.queries] * c.group
        first = query_row(task[T.sequence], task[T.head], ti.min(row + behind, rows - 1), strides, params)
        q += ti.cast(first, ti.u64) * ti.u64(2) + ti.cast(side * c.width, ti.u64)
        top, x = ti.u32(0), [ti.f32(0.0) for _ in range(16)]
        for j in range(COUNT):
            fetch(q + ti.cast(j * 32, ti.u64), x)
            for e in ti.static(range(16)):
                top = ti.max(top, ti.bit_cast(x[e], ti.u32) & ti.u32(0x7FFFFFFF))  # as numbers, with NaNs above all
        top = row_max(thread, top)
        largest, steps = ti.bit_cast(top, ti.f32), ti.f32(0.0)
        if top != ti.u32(0):
            most = ti.f32(LARGEST)
            ext.divide(steps, most, largest)  # as the definition divides: else codes between two would be others
            steps = ti.min(steps, ti.f32(3e38))
        for j in range(COUNT):
            fetch(q + ti.cast(j * 32, ti.u64), x)
            words = [ti.u32(0) for _ in range(4)]
            for e in ti.static(range(16)):
                x[e] *= steps
            for e in ti.static(range(4)):
                codes(words[e], x[4 * e], x[4 * e + 1], x[4 * e + 2], x[4 * e + 3])
            at = shared + piece_offset(half * ir.ROWS, behind, side * COUNT + j, ROWS)
            ext.write_16(at, *words)
        if side == 0:
            at = shared + ti.u32(memory.barriers + B.nbytes) + ti.cast((half * ir.ROWS + behind) * 4, ti.u32)
            factor = ti.bit_cast(largest * ti.f32(1.0 / LARGEST), ti.u32)
            ext.write_4(at, factor)
        ext.for_products()
        barrier = ti.cast(half + 1, ti.u32)
        ext.meet(barrier, threads)

    return load_codes


def make_find_factors(c):
    """find_factors(thread, ..., factor) -> a factor of the result; `factor` gets those of a thread's two rows."""
    ext, to_f32, SCALED = instructions(), make_bits_to_f32(c.scale or "f32"), is_transposed(c) and c.scale != ""

    @ti.func
    def find_factors(thread, barriers, task, arrays: ti.template(), strides, factor: ti.template()):
        k_scale, v_scale = ti.static(arrays[5], arrays[6])
        at, of_result = thread // 32 * 16 + thread % 32 // 4, ti.f32(1.0)
        for r in ti.static(range(2)):
            bits, place = ti.u32(0), barriers + ti.cast(B.nbytes + (at + 8 * r) * 4, ti.u32)
            ext.read_4(bits, place)
            factor[r] *= ti.bit_cast(bits, ti.f32)
        if ti.static(SCALED):
            of_keys = to_f32(k_scale[strides[S.k_scale_first] + task[T.scale_first]])
            of_result = to_f32(v_scale[strides[S.v_scale_first] + task[T.scale_first]])
            for r in ti.static(range(2)):
                factor[r] *= of_keys
        for r in ti.static(range(2)):  # -infinity, the score of what is not seen, must stay so; bits, for NaN
            if ti.bit_cast(factor[r], ti.u32) < ti.u32(LEAST):
                factor[r] = ti.bit_cast(ti.u32(LEAST), ti.f32)
        return of_result

    return find_factors


def make_scale_scores(c):
    """scale_scores(lane, stage, barriers, integers, s): sums of integers become floats, times the scales of keys."""
    ext, keys = instructions(), KEYS_OF[c.width]

    @ti.func
    def scale_scores(lane, stage, barriers, integers: ti.template(), s: ti.template()):
        at = barriers + ti.cast(B.nbytes + 4 * ROWS + stage * (keys * 4) + (lane & 3) * 8, ti.u32)
        for j in ti.static(range(keys // 8)):
            of_keys, place = [ti.f32(0.0) for _ in range(2)], at + ti.u32(32 * j)
            ext.read_8(*of_keys, place)
            for i in ti.static(range(4)):
                s[ti.static(4 * j + i)] = ti.cast(integers[ti.static(4 * j + i)], ti.f32) * of_keys[ti.static(i % 2)]

    return scale_scores
