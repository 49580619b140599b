"""Infinities and NaNs of V that some query rows of a tile see and others do not.

A tensor core multiplies the weights of all rows by the values of all keys, and 0 times an infinity is NaN. So if some
row does not see every key of a tile, infinities and NaNs are left out and the tile is noted. After the results are
stored, a plain loop over the noted tiles adds them to the rows that see them. Few tasks have such tiles.

Which tiles are noted depends on the other rows of a task. Under `Choices.invariant` a row must not: a result that is
infinite or NaN is noted with all its tiles, and becomes the sum of the infinities and NaNs that its row sees.
"""

from tikv.kernels.attention.addresses import make_output_offsets
from tikv.kernels.attention.parameters import NAN, P
from tikv.kernels.attention.sm80.instructions import ROWS, WARPS
from tikv.kernels.attention.sm80.kinds import kind_of
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.sm80.tiles import has_bounds, make_find_slot, make_first_of, make_tile_bounds
from tikv.kernels.attention.softmax import is_finite
from tikv.kernels.attention.task import T
from tikv.kernels.attention.visible import V, make_in_bounds
from tikv.kernels.codec import SIZE, make_load, make_store
from tikv.kernels.lanes import BLOCK
from tikv.runtime import ti

NONE = 1 << 30
# Shared memory holds, for each warp, the first key of its noted tiles and the key after the last. It also holds the
# ranges and the task that a second pass needs, so no register keeps them meanwhile.
VISIBLE = 2 * WARPS
TASK = VISIBLE + len(V)
NOTES = TASK + len(T)


@ti.func
def begin_notes(thread, visible, task, notes: ti.template()):
    """Start without notes; all threads write the same values."""
    ti.simt.block.sync()  # the notes of the task before were read
    for w in ti.static(range(WARPS)):
        notes[ti.static(2 * w)], notes[ti.static(2 * w + 1)] = NONE, 0
    for i in ti.static(range(len(V))):
        notes[ti.static(VISIBLE + i)] = visible[i]
    for i in ti.static(range(len(T))):
        notes[ti.static(TASK + i)] = task[i]
    ti.simt.block.sync()


@ti.func
def note(at, warp, notes: ti.template()):
    """Note the tile that begins at key `at`."""
    ti.atomic_min(notes[2 * warp], at)
    ti.atomic_max(notes[2 * warp + 1], at + KEYS)


@ti.func
def note_results(task, warp, acc: ti.template(), notes: ti.template()):
    """Note all tiles of the task if a result of the lane is infinite or NaN."""
    total = ti.f32(0.0)
    for i in ti.static(range(len(acc))):
        total += acc[i]
    if not is_finite(total):
        ti.atomic_min(notes[2 * warp], task[T.begin])
        ti.atomic_max(notes[2 * warp + 1], task[T.end])


def make_restore(x, parts, c):
    """restore(thread, notes, arrays, ...): adds the values that tiles left out to the warp's, or the block's, rows.

    All threads of a block call it after the results are stored.
    """
    by_warp = x.shared_out == "rows"
    value_at = kind_of(c.cache).make_value_at(c)
    tile_bounds, in_bounds, find_slot = make_tile_bounds(c), make_in_bounds(c), make_find_slot(c)
    first_of = make_first_of(c)
    output_offsets = make_output_offsets(parts, c)
    load, store = make_load(c.out, 1, SIZE[c.out] * 8), make_store(c.out, 1, SIZE[c.out] * 8, "cuda")
    threads, most, DV = 32 if by_warp else BLOCK, ROWS * x.row_tiles, c.width_v

    @ti.func
    def left_out(t, column, begin, end, visible, task, arrays: ti.template(), strides, params):
        """The sum of the infinities and NaNs in a column that query t sees."""
        v, table, v_scale = ti.static((arrays[2], arrays[4], arrays[6]))
        total, bounds = ti.f32(0.0), tile_bounds(t, visible, params)
        for n in range(ti.max(begin, first_of(task, visible)), ti.min(end, task[T.end])):
            seen = 1
            if ti.static(has_bounds(c)):
                seen = in_bounds(n, bounds[0], bounds[1], bounds[2], bounds[3])
            if seen > 0:
                slot = find_slot(task, t, n, visible, table, strides, params)
                if slot >= 0:
                    value = value_at(slot, column, task, v, v_scale, strides)
                    if not is_finite(value):
                        total += value
        return total

    @ti.func
    def restore(thread, notes: ti.template(), arrays: ti.template(), strides, params):
        out, lse = ti.static((arrays[7], arrays[8]))
        ti.simt.block.sync()  # other threads stored results, and other warps made notes
        begin, end = NONE, 0
        for w in ti.static(range(WARPS)):
            if ti.static(not by_warp) or thread // 32 == w:
                begin, end = ti.min(begin, notes[ti.static(2 * w)]), ti.max(end, notes[ti.static(2 * w + 1)])
        if begin < end:
            visible = ti.Vector([notes[ti.static(VISIBLE + i)] for i in range(len(V))])
            task = ti.Vector([notes[ti.static(TASK + i)] for i in range(len(T))])
            row = task[T.row]
            if ti.static(by_warp):
                row = row + thread // 32 * most
            behind = ti.min(params[P.queries] * c.group, task[T.row] + c.rows)
            count = ti.min(most, behind - row) * DV
            for n in range((count - thread % threads + threads - 1) // threads):
                r, column = row + (n * threads + thread % threads) // DV, (n * threads + thread % threads) % DV
                missing = left_out(r // c.group, column, begin, end, visible, task, arrays, strides, params)
                if not is_finite(missing):
                    at, lse_at = output_offsets(task[T.kv_head], r, task[T.split], strides, params)
                    rest = ti.f32(0.0)
                    if ti.static(not c.invariant):
                        rest = load(out, at + column)[0]
                    elif lse[lse_at] == ti.u32(NAN):
                        rest = ti.bit_cast(ti.u32(NAN), ti.f32)
                    store(out, at + column, ti.Vector([rest + missing]), ti.f32(1.0))

    return restore
