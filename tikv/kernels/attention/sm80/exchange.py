"""Few query rows on the tensor cores with the sums of many: the warps divide the keys of K and the columns of V.

Under `Choices.invariant` a row adds its tiles one after another, as in a prompt, where each warp has its own rows. With
few rows, four warps take the next four tiles of K at once and exchange the logits through shared memory. Then each has
the logits of all four tiles and adds the tiles in order, each to its share of the columns. Its words of V lie in
shared memory meanwhile: four unrolled copies of what follows would be too long for LLVM to make one function of them.
"""

from tikv.kernels.attention.sm80.halves import WORD_BITS
from tikv.kernels.attention.sm80.instructions import WARPS
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.sm80.tiles import L, make_find_keys, make_find_value_slots, make_find_values, make_look_up
from tikv.kernels.attention.task import T
from tikv.runtime import ti

COLUMNS = KEYS * WARPS  # those of V are a multiple of this
STEP = KEYS * WARPS  # keys that a block takes at a time


@ti.func
def block_of(blocks: ti.template(), tile):
    """The block of one of four tiles."""
    block = blocks[0]
    for j in ti.static(range(1, WARPS)):
        block = ti.select(tile == j, blocks[j], block)
    return block


def make_attend_exchange(x, f, add_tile, c):
    """attend_exchange(thread, row, seen, ...): the loop over the keys; `add_tile` is `sm80.attend.make_add_tile`'s.

    Logits of every second step lie in the same place, so a warp that is ahead overwrites none that another still reads.
    """
    look_up, find_keys, find_values = make_look_up(c), make_find_keys(c), make_find_values(c)
    find_value_slots = make_find_value_slots(c)
    COUNT, SIZE_OF_TILE = 4 * x.row_tiles, 32 * 4 * x.row_tiles
    V_WORDS = c.width_v // WARPS * 16 // WORD_BITS

    @ti.func
    def attend_exchange(thread, row, seen, visible, task, arrays: ti.template(), qf: ti.template(), m: ti.template(),
                        l: ti.template(), acc: ti.template(), sums: ti.template(), notes: ti.template(), strides,
                        params, scalars):  # fmt: skip
        k, v, table, k_scale, v_scale = ti.static((arrays[1], arrays[2], arrays[4], arrays[5], arrays[6]))
        logits = ti.simt.block.SharedArray((2 * WARPS * SIZE_OF_TILE,), ti.f32)
        values = ti.simt.block.SharedArray((WARPS * WARPS * f.values * 32,), ti.u32)
        lane, warp = thread % 32, thread // 32
        warp_task = task
        warp_task[T.v_first] += warp * V_WORDS
        kf = [ti.u32(0) for _ in range(f.keys)]
        vf = [ti.u32(0) for _ in range(f.values)]
        held = [ti.u32(0) for _ in range(WARPS * f.values)]
        k_slots = [0 for _ in range(2)]
        v_slots = [0 for _ in range(4)]
        counts = [0 for _ in range(6)]
        blocks = [0 for _ in range(WARPS)]  # the pool's blocks of the next four tiles
        coming = [0 for _ in range(WARPS)]  # of the four after those
        at, part, parked = seen[L.begin], 0, warp * ti.static(WARPS * f.values * 32) + lane
        for j in ti.static(range(WARPS)):
            blocks[j] = look_up(at + ti.static(j * KEYS), seen, visible, task, table, strides, params)
            coming[j] = look_up(at + ti.static(STEP + j * KEYS), seen, visible, task, table, strides, params)
        if seen[L.begin] < seen[L.end]:
            find_keys(at + warp * KEYS, block_of(blocks, warp), lane, seen, visible, task, table, k_slots, strides,
                      params)  # fmt: skip
            f.load_keys(lane, k_slots, warp_task, k, k_scale, kf, strides)
        for _ in range((seen[L.end] - seen[L.begin] + (STEP - 1)) // STEP):
            for j in ti.static(range(WARPS)):
                here = at + ti.static(j * KEYS)
                find_value_slots(here, blocks[j], lane, seen, visible, task, table, v_slots, strides, params)
                f.load_values(lane, v_slots, warp_task, v, v_scale, vf, strides)
                for i in ti.static(range(f.values)):
                    held[ti.static(j * f.values + i)] = vf[i]
            p = [ti.f32(0.0) for _ in range(COUNT)]
            f.scores(kf, qf, p, scalars)
            find_keys(at + STEP + warp * KEYS, block_of(coming, warp), lane, seen, visible, task, table, k_slots,
                      strides, params)  # fmt: skip
            f.load_keys(lane, k_slots, warp_task, k, k_scale, kf, strides)
            for i in ti.static(range(COUNT)):
                logits[part + warp * SIZE_OF_TILE + i * 32 + lane] = p[i]
            for i in ti.static(range(WARPS * f.values)):
                values[parked + ti.static(i * 32)] = held[i]
            ti.simt.block.sync()
            for j in range(ti.min(WARPS, (seen[L.end] - at + (KEYS - 1)) // KEYS)):
                for i in ti.static(range(COUNT)):
                    p[i] = logits[part + j * SIZE_OF_TILE + ti.static(i * 32) + lane]
                for i in ti.static(range(f.values)):
                    vf[i] = values[parked + (j * f.values + i) * 32]
                here = at + j * KEYS
                block = block_of(blocks, j)
                whole = find_values(here, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
                add_tile(here, row, thread, whole, counts, p, vf, m, l, acc, sums, notes, visible, params)
            for j in ti.static(range(WARPS)):
                ahead = at + ti.static(2 * STEP + j * KEYS)
                blocks[j], coming[j] = coming[j], look_up(ahead, seen, visible, task, table, strides, params)
            at, part = at + STEP, WARPS * SIZE_OF_TILE - part

    return attend_exchange
