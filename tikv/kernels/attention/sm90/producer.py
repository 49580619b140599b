"""The producer of `sm90.attend`: K and V of a task, tile by tile, into shared memory."""

from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.sm80.instructions import INFINITE
from tikv.kernels.attention.sm80.tiles import has_bounds
from tikv.kernels.attention.sm90.tiles import (
    FAR,
    KEYS_OF,
    PANEL_ROW,
    PIECE,
    B,
    R,
    instructions,
    make_index_in_tile,
    make_is_whole,
    make_slot_of,
    make_tile_at,
    panels,
    piece_offset,
)
from tikv.kernels.attention.task import T
from tikv.kernels.lanes import ALL
from tikv.runtime import ti


def make_produce(memory, c):
    """produce(thread, shared, barriers, seen, ...): copy the tiles of a task; by all threads of the first warpgroup.

    A lane of a warp looks up the row of one key, and all of them copy the rows of the warp's keys, in pieces.
    """
    ext = instructions()
    keys = KEYS_OF[c.width]
    OWN = keys // 4  # keys of a warp
    tile_at, is_whole, slot_of = make_tile_at(c), make_is_whole(c), make_slot_of(c)
    index_in_tile = make_index_in_tile(c)
    k_offset, v_offset, _ = make_slot_offsets(c)
    copy_rows, clean = make_copy_rows(c.width * 2, keys, OWN), make_clean(OWN, c)
    STAGES = memory.stages

    @ti.func
    def produce(thread, shared, barriers, seen, visible, task, arrays: ti.template(), strides, params):
        table = ti.static(arrays[4])
        lane, warp = thread % 32, thread // 32
        k, v = ti.u64(0), ti.u64(0)
        ext.address_k(k)
        ext.address_v(v)
        k += ti.cast(task[T.k_first], ti.u64) * ti.u64(8)
        v += ti.cast(task[T.v_first], ti.u64) * ti.u64(8)
        before, slot, coming = -1, -1, -1  # slots of a lane's key of three tiles: the next is looked up ahead
        tiles, stage, phase = seen[R.tiles], 0, 1
        # Keys of a tile, then values of the tile before, as they are asked for; the first and the last of these do not
        # exist.
        for n in range(ti.select(tiles > 0, 2 * tiles + 4, 0)):
            of_v, round = n & 1, n >> 1
            if of_v == 0:
                before, slot = slot, coming
            tile = round - 1 - of_v
            if tile >= 0 and tile < tiles:
                row, at, parity = slot, stage, phase
                if of_v != 0:
                    row, at, parity = before, (STAGES if stage == 0 else stage) - 1, phase ^ (1 if stage == 0 else 0)
                offset = ti.select(of_v != 0, v_offset(row, strides), k_offset(row, strides))
                offset = ti.select(row < 0, -1, offset)
                barrier = barriers + ti.cast(of_v * B.v_there + at * 8, ti.u32)
                done, of_phase = barrier + ti.u32(B.k_done), ti.cast(parity, ti.u32)
                ext.barrier_wait(done, of_phase)
                to = shared + ti.cast(memory.k + (of_v * STAGES + at) * memory.tile, ti.u32)
                there = ti.cast(ti.simt.warp.ballot(ti.cast(row >= 0, ti.i32)), ti.u32)
                copy_rows(lane, warp, to, ti.select(of_v != 0, v, k), offset, there)
                if of_v == 0 and lane == 0:
                    note = barriers + ti.cast(B.exists + at * 16 + warp * 4, ti.u32)
                    ext.write_4(note, there)
                    ext.barrier_arrive(barrier)
                cleans = 0
                if ti.static(has_bounds(c)):
                    cleans = of_v * (1 - is_whole(tile_at(tile, seen), seen))
                if cleans != 0:
                    ext.copies_wait()
                    clean(lane, warp, to, barriers)
                    ext.for_products()
                    ext.barrier_arrive(barrier)
                else:
                    ext.copies_arrive(barrier)
            if of_v == 0:  # behind the copies, whose time is that of looking up
                index, coming = index_in_tile(warp * OWN + lane, round, seen, visible), -1
                if ti.static(OWN < 32):
                    index = ti.select(lane < OWN, index, FAR)
                if round < tiles:
                    coming = slot_of(index, seen, visible, task, table, strides, params)
            elif round > 0:
                stage += 1
                if stage == STAGES:
                    stage, phase = 0, phase ^ 1

    return produce


def make_copy_rows(nbytes, keys, OWN):
    """copy_rows(lane, warp, to, base, row, there): starts to copy a warp's rows of a tile; a lane knows one's begin.

    A tile has so many keys, a warp `OWN` of them, and a row so many bytes.
    """
    ext = instructions()
    pieces, width = nbytes // PIECE, nbytes // 2
    QUICK = nbytes == PANEL_ROW or (nbytes % PANEL_ROW == 0 and OWN == keys // 4)
    copy = getattr(ext, f"copy_rows_{width}") if QUICK else None

    @ti.func
    def copy_rows(lane, warp, to, base, row, there):
        some_missing = ti.cast(there != ti.u32((1 << OWN) - 1), ti.i32)
        if ti.static(QUICK):
            if some_missing == 0:
                first, piece = lane >> 3, lane & 7
                column = base + ti.cast(piece * PIECE, ti.u64)
                for batch in ti.static(range(OWN // 16)):
                    targets = [to + piece_offset(warp * OWN + 16 * batch, first + 4 * i, piece, keys) for i in range(2)]
                    addresses = [ti.u64(0) for _ in range(4)]
                    for i in ti.static(range(4)):
                        source = first + ti.static(16 * batch + 4 * i)
                        words = ti.simt.warp.shfl_sync_i32(ti.u32(ALL), row, source)
                        addresses[i] = column + ti.cast(words, ti.u64) * ti.u64(8)
                    copy(*targets, *addresses)
        if ti.static(not QUICK) or some_missing != 0:
            for j in range(ti.static(OWN * pieces // 32)):
                number = j * 32 + lane
                key, piece = number // pieces, number % pieces
                words = ti.simt.warp.shfl_sync_i32(ti.u32(ALL), row, key)
                at = to + piece_offset(warp * OWN, key, piece, keys)
                address = base + ti.cast(ti.max(words, 0), ti.u64) * ti.u64(8) + ti.cast(piece * PIECE, ti.u64)
                size = ti.select(words < 0, ti.u32(0), ti.u32(PIECE))
                ext.copy_16(at, address, size)

    return copy_rows


def make_clean(OWN, c):
    """clean(lane, warp, v, barriers): infinities and NaNs in a warp's own rows of V become zeros, which is noted.

    Where a row does not see them, its weight is nothing, and nothing times them would be NaN. Halves whose exponent has
    no bit unset are found two at a time: one more in the exponent's last place carries into the sign's.
    """
    ext = instructions()
    keys, last = KEYS_OF[c.width], c.width % 64 * 2 // PIECE  # pieces of a row in a last panel that is not full
    ROUNDS = OWN // 16
    infinite = INFINITE[c.query]
    exponents, carries = infinite << 16 | infinite, 0x00010001 * (0x8000 - infinite)

    @ti.func
    def clean(lane, warp, v, barriers):
        begin, row, spoiled = v + ti.cast(warp * (OWN * PANEL_ROW) + lane * PIECE, ti.u32), lane >> 3, ti.u32(0)
        for n in range(panels(c.width) * ROUNDS):  # of 16 rows of a panel; a thread has pieces of 4
            panel, address = n // ROUNDS, begin + ti.cast(n // ROUNDS * (keys * PANEL_ROW), ti.u32)
            at = [address + ti.cast((n % ROUNDS * 4 + i) * (32 * PIECE), ti.u32) for i in range(4)]
            y = [ti.u32(0) for _ in range(16)]
            for i in ti.static(range(4)):
                ext.read_16(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3], at[i])
            for i in ti.static(range(4)):
                carried = ti.u32(0)
                for e in ti.static(range(4)):
                    carried = carried | ((y[4 * i + e] & ti.u32(exponents)) + ti.u32(carries))
                carried = carried & ti.u32(0x80008000)
                if ti.static(last > 0):
                    column = (lane & 7) ^ ti.static(4 * (i & 1)) ^ row
                    carried = ti.select(panel == panels(c.width) - 1 and column >= last, ti.u32(0), carried)
                if carried != ti.u32(0):
                    for e in ti.static(range(4)):
                        signs = ((y[4 * i + e] & ti.u32(exponents)) + ti.u32(carries)) & ti.u32(0x80008000)
                        y[4 * i + e] = y[4 * i + e] & ~((signs >> ti.u32(15)) * ti.u32(0xFFFF))
                    ext.write_16(at[i], y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3])
                spoiled = spoiled | carried
        if spoiled != ti.u32(0):
            note, yes = barriers + ti.u32(B.spoiled), ti.u32(1)
            ext.write_4(note, yes)

    return clean
