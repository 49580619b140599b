"""Attention on the tensor cores of CUDA, over halves or codes: S^T = K Q^T and O^T = V^T P^T, all in registers.

A warp takes 16 keys at a time. Its lanes read K and V as fragments of `mma.sync.m16n8k16`. Both products allow any
order of a head's columns, so each lane takes whole words. The scores come out transposed, nearly in the form that the
second product needs: their exponentials are rounded to halves, and two shuffles transpose 8 x 8 of them at a time. As
in `cuda.attend`, results are rescaled only when a maximum grows.

The warps of a block divide the keys among them and merge once, at the end. If there are many query rows, they divide
the rows, and read the same keys from shared memory (`sm80.staged`) or from the cache of their multiprocessor. For wide
heads, they divide the columns, and each adds its part of the logits. `sm80.tiles` finds the keys of a tile. Where
the GPU can, `sm80.copies` copies tiles of codes into shared memory ahead. Under `Choices.invariant` the order in which
a row's tiles are added does not depend on the number of rows: see `ops.attention.invariance`.
`sm80.halves` turns K and V into fragments; `sm80.coded` does so for codes that are integers, and `sm80.floats`
for codes that are floats. `sm80.infinities` handles infinities and NaNs that only some rows see. `tensor_cores.ll`
has the instructions that Taichi does not know.
"""

from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.addresses import make_output_offsets
from tikv.kernels.attention.parameters import (
    BITS,
    FLOATS,
    LOWEST,
    MASKED,
    PARAMS,
    SCALARS,
    STRIDES,
    TERMS,
    P,
    X,
    array_types,
)
from tikv.kernels.attention.sm80 import coded, copies, exchange, floats, halves, infinities, staged
from tikv.kernels.attention.sm80.infinities import note
from tikv.kernels.attention.sm80.instructions import HALVES, ROWS, WARPS, instructions
from tikv.kernels.attention.sm80.kinds import kind_of
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.sm80.tiles import (
    L,
    has_bounds,
    has_whole_tiles,
    in_tile,
    make_find_keys,
    make_find_values,
    make_limits,
    make_look_up,
    make_slot_behind,
    make_tile_at,
    make_tile_bounds,
)
from tikv.kernels.attention.softmax import inverse_of, make_logit, make_store_lse
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.visible import make_in_bounds
from tikv.kernels.codec import SIZE, make_store, word_array
from tikv.kernels.lanes import ALL, BLOCK, butterfly_max, butterfly_sum
from tikv.runtime import ti

ROW_BYTES = 16  # every row begins at a multiple of this: its words are read in pairs
WIDTHS = range(64, 257, 32)  # of K and V
WIDE, WIDE_V = range(64, 577, 64), range(128, 513, 128)  # for wider heads, whose columns the warps divide
FEW_REGISTERS = ("e4m3", "e5m2")  # codes whose tiles fit four times, if a tile is not read ahead
LAG = 8.0  # how far a maximum may be behind before the result is rescaled: weights stay below 2 ** LAG
LAG_OF_CODES = 6.0  # the same under `invariant` over codes that are integers: 2 ** `coded.LARGE` weights are halves too
KEY_DISTANCES = [16, 8, 4]  # between lanes that have different keys of the same rows


class Tile(NamedTuple):
    """How the warps of a block share the work."""

    row_tiles: int  # tiles of `ROWS` query rows that each warp computes
    shared_out: str  # what the warps divide: "keys", "rows", "columns" of the heads, or "exchange": keys, then columns
    resident: int  # blocks that a multiprocessor holds at once, which limits the registers of a thread
    filling: int = 2  # blocks that are enough to keep the memory busy
    ahead: bool = False  # whether the next tile's K and V are read while this one's are used
    of_one_query: bool = False  # whether the rows of a task always belong to one query
    stages: int = 0  # tiles that a warp has in shared memory, if it copies them there: see `sm80.copies`

    @property
    def rows(self) -> int:
        """Query rows of a task."""
        return ROWS * self.row_tiles * (WARPS if self.shared_out == "rows" else 1)


def tile_of(width: int, rows: int, codes: str = "", long: bool = False, copied: bool = False, most: int = 4) -> Tile:
    """The tile for a head width and a number of query rows of a KV head; `codes` is the code of K and V, if quantised.

    If warps may copy their tiles, `copied`, they do so unless they divide the rows, in `most` blocks at most.

    A kernel is `long` if queries see different keys and there are sinks, pages or a soft cap, or if keys are chosen. It
    has fewer rows of wide heads: otherwise LLVM makes two functions of it, which the native launcher does not support.
    """
    if copied and rows <= 2 * ROWS:
        resident = min(most, copies.blocks_of(codes, width, width))
        return Tile(1, "keys", resident, resident, stages=copies.stages_of(resident, codes, width))
    if codes in FEW_REGISTERS and rows <= 2 * ROWS:
        return Tile(1, "keys", 4, 4)
    if codes:
        return Tile(1, "rows" if rows > 2 * ROWS else "keys", 3, 3, True)
    if width > WIDTHS[-1]:
        return Tile(1 if rows <= ROWS or long else 2, "columns", 2)
    if rows <= ROWS:
        return Tile(1, "keys", 4 if width <= 64 else 3 if width <= 128 else 2)
    if width > 128:
        return Tile(1, "rows" if rows > 2 * ROWS else "keys", 2)
    return Tile(2, "rows" if rows > 4 * ROWS else "keys", 3 if width <= 64 else 2)


def invariant_tile_of(width: int, width_v: int, rows: int, long: bool) -> Tile:
    """The same under `Choices.invariant`; every tile for these widths gives a row the same bits.

    A kernel is `long` if there are a soft cap, sinks or chosen tokens, or if a tile's keys may not follow each other.
    As in `tile_of`, it has fewer rows, or warps do not exchange logits; else LLVM makes two functions of it.
    """
    widest = max(width, width_v)
    if widest > WIDTHS[-1]:
        return Tile(1, "columns", 2)
    row_tiles = 1 if widest > 128 or long else 2
    if rows > 4 * ROWS or width_v % exchange.COLUMNS or (long and widest > 128):
        return Tile(row_tiles, "rows", 2)
    if rows <= ROWS and widest <= 128:
        return Tile(1, "exchange", 3)
    return Tile(row_tiles, "exchange", 2)


def serves_widths(width: int, width_v: int) -> bool:
    """Whether there is a tile for these widths of heads in halves."""
    return (width in WIDTHS and width_v in WIDTHS) or (width in WIDE and width_v in WIDE_V)


def share_of(x, c):
    """The choices for the columns of K and V that a warp takes: all, or its share."""
    if x.shared_out == "columns":
        c = c._replace(width=c.width // WARPS)
    return c._replace(width_v=c.width_v // WARPS) if divides_columns(x) else c


def divides_columns(x) -> bool:
    """Whether each warp has its share of the columns of a result."""
    return x.shared_out in ("columns", "exchange")


def make_attend_tensor(tile, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, strides, params, scalars) on CUDA.

    K and V are in words of 64 bits: four halves, of the same of `HALVES` as q, or codes of a kind in `sm80.kinds`.
    Rows are in one piece and begin at multiples of `ROW_BYTES`. The extent of q is tasks * `BLOCK`. Choices are as in
    `cpu.attend.make_attend_cpu`. If tokens are chosen, arguments are as in `parameters.make_attend_kernel`.
    """
    Q, KV, LENS, TABLE, SC, OUT = array_types("cuda", c)
    INDEX = index_array(c.index_bits)
    V, KSC, VSC = KV, SC, SC
    if c.cache not in HALVES:
        kind = kind_of(c.cache)
        V = word_array(kind.word_bits(c.cache, c.width, c.width_v)[1])
        KSC, VSC = kind.numbers_arrays(c)
    attend_task = make_attend_task(tile, parts, c)

    @ti.kernel
    def attend(q: Q, k: KV, v: V, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
               strides: STRIDES, params: PARAMS, scalars: SCALARS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            arrays = ti.static((q, k, v, lens, table, k_scale, v_scale, out, lse))
            attend_task(i % BLOCK, i // BLOCK, arrays, strides, params, scalars)

    @ti.kernel
    def attend_chosen(q: Q, k: KV, v: V, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
                      sink_logits: FLOATS, slopes: FLOATS, tree: BITS, indices: INDEX, strides: STRIDES,
                      params: PARAMS, scalars: SCALARS, numbers: TERMS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            arrays = ti.static((q, k, v, lens, (table, indices), k_scale, v_scale, out, lse))
            attend_task(i % BLOCK, i // BLOCK, arrays, strides, params, scalars)

    return attend_chosen if c.index_bits else attend


make_attend_tensor.fast_math = True
make_attend_tensor.uses_bitcode = True
make_attend_tensor.resident = lambda tile, parts, c: tile.resident
make_attend_tensor.shared_bytes = lambda tile, parts, c: (
    copies.shared_bytes(tile.stages, c.cache, c.width, c.width_v) if tile.stages else 0
)
make_attend_tensor.needs_native = lambda tile, parts, c: c.cache in floats.NEEDS_NATIVE
make_attend_tensor.pairs = True  # neighbouring words of K and V may be read as one: see `launch.cuda.peepholes`


def make_attend_tensor_in_order(tile, parts, c):
    """`make_attend_tensor` for `Choices.invariant`: no compiler reorders its sums or fuses them with products.

    Only the native launcher keeps products and sums apart, so no other may launch it.
    """
    return make_attend_tensor(tile, parts, c)


make_attend_tensor_in_order.needs_native = lambda tile, parts, c: True
make_attend_tensor_in_order.uses_bitcode = True
make_attend_tensor_in_order.resident = make_attend_tensor.resident
make_attend_tensor_in_order.shared_bytes = make_attend_tensor.shared_bytes
make_attend_tensor_in_order.pairs = True


def make_attend_task(x, parts, c):
    """attend_task(thread, number, ...): a thread's share of a task; all threads of a block call it."""
    decode_task = make_decode_task("cuda", step_of(x), c)
    limits, f = make_limits(ROWS * x.row_tiles, step_of(x), c), make_fragments(x, c)
    look_up, find_keys, find_values = make_look_up(c), make_find_keys(c), make_find_values(c)
    tile_at, add_tile = make_tile_at(c), make_add_tile(x, f, c)
    STAGED, COLUMNS, EXCHANGE = is_staged(x, c), x.shared_out == "columns", x.shared_out == "exchange"
    attend_staged = make_attend_staged(x, f, c) if STAGED else None
    attend_columns = make_attend_columns(x, f, c) if COLUMNS else None
    attend_exchange = exchange.make_attend_exchange(x, f, add_tile, c) if EXCHANGE else None
    attend_ahead = make_attend_ahead(x, f, c) if x.ahead else None
    attend_copied = copies.make_attend_copied(x, f, add_tile, step_of(x), c) if x.stages else None
    finish = (make_merge_warps if x.shared_out == "keys" else make_store_rows)(x, f, parts, c)
    restore = infinities.make_restore(x, parts, c) if c.masked else None
    G, STEP, share = x.row_tiles, step_of(x), share_of(x, c)
    EARLY = max(c.width, c.width_v) <= 128  # if there are registers for it

    @ti.func
    def attend_task(thread, number, arrays: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        lane, warp = thread % 32, thread // 32
        row, ahead, column = task[T.row], warp * KEYS, 0
        if ti.static(x.shared_out == "rows"):
            row, ahead = task[T.row] + warp * ti.static(ROWS * G), 0
        elif ti.static(COLUMNS):
            column = warp * share.width
        seen = limits(row, visible, task, params)
        qf = [ti.u32(0) for _ in range(f.queries)]
        f.load_queries(row, lane, column, task, q, k_scale, qf, strides, params)
        m = [ti.f32(LOWEST) for _ in range(2 * G)]  # above `MASKED`: masked keys have weight 0 from the start
        l = [ti.f32(0.0) for _ in range(2 * G)]
        acc = [ti.f32(0.0) for _ in range(f.results)]
        sums = [ti.f32(0.0) for _ in range(4 * G)]  # of the rounded weights, which divide the result
        notes = ti.simt.block.SharedArray((infinities.NOTES if c.masked else 1,), ti.i32)
        if ti.static(c.masked):
            infinities.begin_notes(thread, visible, task, notes)
        if ti.static(STAGED):
            attend_staged(thread, row, seen, visible, task, arrays, qf, m, l, acc, sums, notes, strides, params,
                          scalars)  # fmt: skip
        elif ti.static(COLUMNS):
            attend_columns(thread, row, seen, visible, task, arrays, qf, m, l, acc, sums, notes, strides, params,
                           scalars)  # fmt: skip
        elif ti.static(EXCHANGE):
            attend_exchange(thread, row, seen, visible, task, arrays, qf, m, l, acc, sums, notes, strides, params,
                            scalars)  # fmt: skip
        elif ti.static(x.stages > 0):
            attend_copied(thread, row, ahead, seen, visible, task, arrays, qf, m, l, acc, sums, notes, strides, params,
                          scalars)  # fmt: skip
        elif ti.static(x.ahead):
            attend_ahead(thread, row, ahead, seen, visible, task, arrays, qf, m, l, acc, sums, notes, strides, params,
                         scalars)  # fmt: skip
        else:
            kf = [ti.u32(0) for _ in range(f.keys)]
            vf = [ti.u32(0) for _ in range(f.values)]
            k_slots = [0 for _ in range(2)]
            v_slots = [0 for _ in range(4)]
            counts = [0 for _ in range(6)]  # whether a lane's two keys count, and its four rows of V
            at = seen[L.begin] + ahead
            block = look_up(at, seen, visible, task, table, strides, params)
            coming = look_up(at + STEP, seen, visible, task, table, strides, params)
            tile = tile_at(block, task, strides)
            if ti.static(EARLY):
                if seen[L.begin] < seen[L.end]:
                    find_keys(at, block, lane, seen, visible, task, table, k_slots, strides, params)
                    f.load_keys(lane, k_slots, tile, k, k_scale, kf, strides)
            for _ in range((seen[L.end] - seen[L.begin] + STEP - 1) // STEP):
                # The next load is always in flight: V during the first product, the next keys during the second.
                if ti.static(not EARLY):
                    find_keys(at, block, lane, seen, visible, task, table, k_slots, strides, params)
                    f.load_keys(lane, k_slots, tile, k, k_scale, kf, strides)
                whole = find_values(at, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
                f.load_values(lane, v_slots, tile, v, v_scale, vf, strides)
                p = [ti.f32(0.0) for _ in range(4 * G)]
                f.scores(kf, qf, p, scalars)
                tile = tile_at(coming, task, strides)
                if ti.static(EARLY):
                    find_keys(at + STEP, coming, lane, seen, visible, task, table, k_slots, strides, params)
                    f.load_keys(lane, k_slots, tile, k, k_scale, kf, strides)
                block, coming = coming, look_up(at + 2 * STEP, seen, visible, task, table, strides, params)
                add_tile(at, row, thread, whole, counts, p, vf, m, l, acc, sums, notes, visible, params)
                at = at + STEP
        f.settle(acc, task, v_scale, strides, scalars)
        if ti.static(c.invariant):
            infinities.note_results(task, warp, acc, notes)
        for r in ti.static(range(2 * G)):
            l[r] = butterfly_sum(l[r], KEY_DISTANCES)
        finish(thread, row, task, m, l, acc, sums, out, lse, strides, params, scalars)
        if ti.static(c.masked):
            restore(thread, notes, arrays, strides, params)

    return attend_task


def make_fragments(x, c):
    """The functions that turn K, V and the queries of these choices into fragments for the tensor cores."""
    return kind_of(c.cache).make_fragments(x, in_tile(share_of(x, c)))


def step_of(x) -> int:
    """Keys that a block takes at a time."""
    return KEYS * WARPS if x.shared_out == "keys" else KEYS


def is_staged(x, c) -> bool:
    """Whether the block reads K and V into shared memory."""
    return (
        x.shared_out == "rows"
        and c.cache in HALVES
        and c.width == c.width_v
        and c.width in staged.WIDTHS
        and not c.index_bits
        and (c.kind != "table" or has_whole_tiles(c))
    )


def make_attend_ahead(x, f, c):
    """attend_ahead(thread, row, ahead, seen, ...): the loop over the keys of a warp if a tile takes few registers.

    The next tile's K and V are read while this tile's are used, so as many bytes are in flight as with wider tiles.
    """
    look_up, tile_at = make_look_up(c), make_tile_at(c)
    find_keys, find_values = make_find_keys(c), make_find_values(c)
    add_tile = make_add_tile(x, f, c)
    STEP = step_of(x)

    @ti.func
    def attend_ahead(thread, row, ahead, seen, visible, task, arrays: ti.template(), qf: ti.template(),
                     m: ti.template(), l: ti.template(), acc: ti.template(), sums: ti.template(), notes: ti.template(),
                     strides, params, scalars):  # fmt: skip
        lane = thread % 32
        k, v, table, k_scale, v_scale = ti.static((arrays[1], arrays[2], arrays[4], arrays[5], arrays[6]))
        kf = [ti.u32(0) for _ in range(f.keys)]
        vf = [ti.u32(0) for _ in range(f.values)]
        next_kf = [ti.u32(0) for _ in range(f.keys)]
        next_vf = [ti.u32(0) for _ in range(f.values)]
        k_slots = [0 for _ in range(2)]
        v_slots = [0 for _ in range(4)]
        counts = [0 for _ in range(6)]  # whether a lane's two keys count, and its four rows of V
        at = seen[L.begin] + ahead
        block = look_up(at, seen, visible, task, table, strides, params)
        coming = look_up(at + STEP, seen, visible, task, table, strides, params)
        next_whole = 0
        tile = tile_at(block, task, strides)
        if seen[L.begin] < seen[L.end]:
            find_keys(at, block, lane, seen, visible, task, table, k_slots, strides, params)
            f.load_keys(lane, k_slots, tile, k, k_scale, next_kf, strides)
            next_whole = find_values(at, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
            f.load_values(lane, v_slots, tile, v, v_scale, next_vf, strides)
        for _ in range((seen[L.end] - seen[L.begin] + STEP - 1) // STEP):
            whole = next_whole
            for i in ti.static(range(f.keys)):
                kf[i] = next_kf[i]
            for i in ti.static(range(f.values)):
                vf[i] = next_vf[i]
            tile = tile_at(coming, task, strides)
            find_keys(at + STEP, coming, lane, seen, visible, task, table, k_slots, strides, params)
            f.load_keys(lane, k_slots, tile, k, k_scale, next_kf, strides)
            next_whole = find_values(at + STEP, coming, lane, seen, visible, task, table, v_slots, counts, strides,
                                     params)  # fmt: skip
            f.load_values(lane, v_slots, tile, v, v_scale, next_vf, strides)
            later = look_up(at + 2 * STEP, seen, visible, task, table, strides, params)
            p = [ti.f32(0.0) for _ in range(4 * x.row_tiles)]
            f.scores(kf, qf, p, scalars)
            if whole == 0:
                find_values(at, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
            add_tile(at, row, thread, whole, counts, p, vf, m, l, acc, sums, notes, visible, params)
            block, coming = coming, later
            at = at + STEP

    return attend_ahead


def make_attend_staged(x, f, c):
    """attend_staged(thread, row, seen, ...): the loop over the keys if the block has them in shared memory.

    All warps go through the keys that some row of the block sees, and each computes those that its own rows see.
    """
    limits = make_limits(ROWS * x.row_tiles * WARPS, KEYS, c)
    look_up, slot_behind, find_values = make_look_up(c), make_slot_behind(c), make_find_values(c)
    fetch, put = staged.make_fetch(slot_behind, has_whole_tiles(c), c), staged.make_put(c)
    take_keys, take_values = staged.make_take_keys(c), staged.make_take_values(c)
    add_tile = make_add_tile(x, f, c)
    G, STEP = x.row_tiles, staged.STAGED_KEYS
    WORDS = STEP * staged.words_of(c)

    @ti.func
    def attend_staged(thread, row, seen, visible, task, arrays: ti.template(), qf: ti.template(), m: ti.template(),
                      l: ti.template(), acc: ti.template(), sums: ti.template(), notes: ti.template(), strides, params,
                      scalars):  # fmt: skip
        k, v, table = ti.static((arrays[1], arrays[2], arrays[4]))
        keys = ti.simt.block.SharedArray((WORDS,), ti.u64)
        values = ti.simt.block.SharedArray((WORDS,), ti.u64)
        lane = thread % 32
        held = [ti.u64(0) for _ in range(2 * staged.words_of_a_thread(c))]
        kf = [ti.u32(0) for _ in range(f.keys)]
        vf = [ti.u32(0) for _ in range(f.values)]
        v_slots = [0 for _ in range(4)]
        counts = [0 for _ in range(6)]
        blocks = [0 for _ in range(2)]  # the pool's blocks of the tiles in shared memory
        coming = [0 for _ in range(2)]  # of the tiles that are being read
        later = [0 for _ in range(2)]  # of the tiles after those: a block is looked up a round before its rows are read
        block_seen = limits(task[T.row], visible, task, params)
        at = block_seen[L.begin]
        for i in ti.static(range(2)):
            coming[i] = look_up(at + ti.static(i * KEYS), block_seen, visible, task, table, strides, params)
            ahead = at + ti.static(STEP + i * KEYS)
            later[i] = look_up(ahead, block_seen, visible, task, table, strides, params)
        if block_seen[L.begin] < block_seen[L.end]:
            fetch(at, coming, thread, block_seen, visible, task, table, k, v, held, strides, params)
        for _ in range((block_seen[L.end] - block_seen[L.begin] + (STEP - 1)) // STEP):
            ti.simt.block.sync()
            put(thread, held, keys, values)
            ti.simt.block.sync()
            for i in ti.static(range(2)):
                blocks[i], coming[i] = coming[i], later[i]
                ahead = at + ti.static(2 * STEP + i * KEYS)
                later[i] = look_up(ahead, block_seen, visible, task, table, strides, params)
            fetch(at + STEP, coming, thread, block_seen, visible, task, table, k, v, held, strides, params)
            for tile in range(2):
                here = at + tile * KEYS
                if here < seen[L.end] and here + KEYS > seen[L.begin]:
                    block = ti.select(tile == 0, blocks[0], blocks[1])
                    whole = find_values(here, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
                    take_keys(tile * KEYS, lane, keys, kf)
                    p = [ti.f32(0.0) for _ in range(4 * G)]
                    f.scores(kf, qf, p, scalars)
                    take_values(tile * KEYS, lane, values, vf)
                    add_tile(here, row, thread, whole, counts, p, vf, m, l, acc, sums, notes, visible, params)
            at = at + STEP

    return attend_staged


def make_attend_columns(x, f, c):
    """attend_columns(thread, row, seen, ...): the loop over the keys if the warps divide the columns.

    Each warp multiplies its columns of the keys by those of the queries. All add up the four parts of the logits in the
    same order, so they have the same weights, and each weights its columns of V. Parts of every second tile lie in the
    same place, so a warp that is ahead overwrites no part that another warp still reads.
    """
    look_up, find_keys, find_values = make_look_up(c), make_find_keys(c), make_find_values(c)
    share = share_of(x, c)
    products, logit_of = halves.make_products(x, share), make_logit(c)
    add_tile = make_add_tile(x, f, c)
    COUNT, SIZE_OF_PART = 4 * x.row_tiles, 32 * 4 * x.row_tiles
    K_WORDS, V_WORDS = (width * 16 // halves.WORD_BITS for width in (share.width, share.width_v))

    @ti.func
    def attend_columns(thread, row, seen, visible, task, arrays: ti.template(), qf: ti.template(), m: ti.template(),
                       l: ti.template(), acc: ti.template(), sums: ti.template(), notes: ti.template(), strides, params,
                       scalars):  # fmt: skip
        k, v, table, k_scale, v_scale = ti.static((arrays[1], arrays[2], arrays[4], arrays[5], arrays[6]))
        logits = ti.simt.block.SharedArray((2 * WARPS * SIZE_OF_PART,), ti.f32)
        lane, warp = thread % 32, thread // 32
        warp_task = task
        warp_task[T.k_first] += warp * K_WORDS
        warp_task[T.v_first] += warp * V_WORDS
        kf = [ti.u32(0) for _ in range(f.keys)]
        vf = [ti.u32(0) for _ in range(f.values)]
        k_slots = [0 for _ in range(2)]
        v_slots = [0 for _ in range(4)]
        counts = [0 for _ in range(6)]
        at, part = seen[L.begin], 0
        block = look_up(at, seen, visible, task, table, strides, params)
        coming = look_up(at + KEYS, seen, visible, task, table, strides, params)
        if seen[L.begin] < seen[L.end]:
            find_keys(at, block, lane, seen, visible, task, table, k_slots, strides, params)
            f.load_keys(lane, k_slots, warp_task, k, k_scale, kf, strides)
        for _ in range((seen[L.end] - seen[L.begin] + (KEYS - 1)) // KEYS):
            whole = find_values(at, block, lane, seen, visible, task, table, v_slots, counts, strides, params)
            f.load_values(lane, v_slots, warp_task, v, v_scale, vf, strides)
            p = [ti.f32(0.0) for _ in range(COUNT)]
            products(kf, qf, p)
            find_keys(at + KEYS, coming, lane, seen, visible, task, table, k_slots, strides, params)
            f.load_keys(lane, k_slots, warp_task, k, k_scale, kf, strides)
            for i in ti.static(range(COUNT)):
                logits[part + warp * SIZE_OF_PART + i * 32 + lane] = p[i]
            ti.simt.block.sync()
            for i in ti.static(range(COUNT)):
                dot = logits[part + i * 32 + lane]
                for w in ti.static(range(1, WARPS)):
                    dot += logits[part + w * SIZE_OF_PART + i * 32 + lane]
                p[i] = logit_of(dot, scalars[X.logit_scale], scalars[X.softcap])
            block, coming = coming, look_up(at + 2 * KEYS, seen, visible, task, table, strides, params)
            add_tile(at, row, thread, whole, counts, p, vf, m, l, acc, sums, notes, visible, params)
            at, part = at + KEYS, WARPS * SIZE_OF_PART - part

    return attend_columns


def make_add_tile(x, f, c):
    """add_tile(at, row, thread, whole, counts, p, vf, m, ...): adds a tile's V, weighted by its logits, to the results.

    It notes the tile if it leaves values out: see `sm80.infinities`.
    """
    exp2 = instructions().exp2
    mask, rescale = make_mask(x, c), make_rescale(x, share_of(x, c))
    G, LEAST = x.row_tiles, lag_of(c)

    @ti.func
    def add_tile(at, row, thread, whole, counts: ti.template(), p: ti.template(), vf: ti.template(), m: ti.template(),
                 l: ti.template(), acc: ti.template(), sums: ti.template(), notes: ti.template(), visible,
                 params):  # fmt: skip
        lane = thread % 32
        if whole == 0:
            mask(at, row, lane, counts, p, visible, params)
            missing = f.clear(counts, vf)
            if ti.static(c.masked):
                if missing != 0:
                    note(at, thread // 32, notes)
        grown = 0
        for r in ti.static(range(2 * G)):
            top = ti.max(p[ti.static(r // 2 * 4 + r % 2)], p[ti.static(r // 2 * 4 + r % 2 + 2)])
            grown = ti.select(top > m[r] + ti.f32(LEAST), 1, grown)
        if ti.simt.warp.any_nonzero(ti.u32(ALL), grown) != 0:
            rescale(p, m, l, acc, sums)
        for i in ti.static(range(4 * G)):
            below, weight = p[i] - m[ti.static(i // 4 * 2 + i % 2)], ti.f32(0.0)
            exp2(weight, below)
            p[i] = weight
        for r in ti.static(range(2 * G)):
            l[r] += p[ti.static(r // 2 * 4 + r % 2)] + p[ti.static(r // 2 * 4 + r % 2 + 2)]
        f.add_values(lane, p, vf, acc, sums)

    return add_tile


def lag_of(c) -> float:
    """How far a maximum may be behind."""
    return LAG_OF_CODES if c.invariant and kind_of(c.cache) is coded else LAG


def make_mask(x, c):
    """mask(at, row, lane, counts, p, ...): writes `MASKED` over the logits of keys that a row does not see."""
    tile_bounds, in_bounds = make_tile_bounds(c), make_in_bounds(c)

    @ti.func
    def mask(at, row, lane, counts: ti.template(), p: ti.template(), visible, params):
        for r in ti.static(range(2 * x.row_tiles)):
            behind = (lane & 3) * 2 + ti.static(r // 2 * ROWS + r % 2)
            t = ti.min(row + behind, params[P.queries] * c.group - 1) // c.group
            for i in ti.static(range(2)):
                seen = counts[i]
                if ti.static(has_bounds(c)):
                    bounds = tile_bounds(t, visible, params)
                    index = at + (lane >> 2) + ti.static(i * 8)
                    seen = seen * in_bounds(index, bounds[0], bounds[1], bounds[2], bounds[3])
                n = ti.static(r // 2 * 4 + i * 2 + r % 2)
                p[n] = ti.select(seen != 0, p[n], ti.f32(MASKED))

    return mask


def make_rescale(x, c):
    """rescale(p, m, l, acc, sums): rescales sums and results to the new maxima of their rows.

    Under `invariant` a row keeps its maximum if another row of the warp grew: its factor is then 2 ** 0, exactly 1.
    """
    exp2 = instructions().exp2
    NV, LEAST = c.width_v // KEYS, lag_of(c)

    @ti.func
    def rescale(p: ti.template(), m: ti.template(), l: ti.template(), acc: ti.template(), sums: ti.template()):
        for r in ti.static(range(2 * x.row_tiles)):
            i = ti.static(r // 2 * 4 + r % 2)  # the row's first key; the other one is at i + 2
            top = butterfly_max(ti.max(m[r], ti.max(p[i], p[ti.static(i + 2)])), KEY_DISTANCES)
            if ti.static(c.invariant):
                top = ti.select(top > m[r] + ti.f32(LEAST), top, m[r])
            below, fade = m[r] - top, ti.f32(0.0)
            exp2(fade, below)
            m[r] = top
            l[r] *= fade
            for e in ti.static(range(2)):
                sums[ti.static(i + 2 * e)] *= fade
                for t in ti.static(range(NV)):
                    acc[ti.static((r // 2 * NV + t) * 4 + r % 2 + 2 * e)] *= fade

    return rescale


def make_store_rows(x, f, parts, c):
    """finish(...) if the warps divide the rows or columns: each lane stores its columns of two rows of a tile.

    Under `invariant` a result is rounded as `merge` rounds it.
    """
    output_offsets, store_lse = make_output_offsets(parts, c), make_store_lse(parts)
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cuda")
    # Float32 results, such as the two parts of `extend`, are stored directly.
    in_pairs = not parts and c.out in HALVES and not c.invariant
    pack = getattr(instructions(), f"pack_{c.out}") if in_pairs else None
    share, COLUMNS = share_of(x, c), divides_columns(x)
    NV = share.width_v // KEYS

    @ti.func
    def store_rows(thread, row, task, m: ti.template(), l: ti.template(), acc: ti.template(), sums: ti.template(),
                   out: ti.template(), lse: ti.template(), strides, params, scalars):  # fmt: skip
        lane, column = thread % 32, 0
        if ti.static(COLUMNS):
            column = thread // 32 * share.width_v
        for r in ti.static(range(2 * x.row_tiles)):
            i = ti.static(r // 2 * 4 + r % 2)
            at_row = row + (lane & 3) * 2 + ti.static(r // 2 * ROWS + r % 2)
            behind = params[P.queries] * c.group
            if ti.static(c.index_bits > 0):
                behind = task[T.row] + c.rows  # the next rows may belong to a query with a different choice
            if at_row < behind:
                at, lse_at = output_offsets(task[T.kv_head], at_row, task[T.split], strides, params)
                inverse = inverse_of(sums[i])
                for t in ti.static(range(NV)):
                    a = ti.static((r // 2 * NV + t) * 4 + r % 2)
                    to = at + column + f.column_of(t, lane)
                    y, z = acc[a] * inverse, acc[ti.static(a + 2)] * inverse
                    if ti.static(not in_pairs):
                        store(out, to, ti.Vector([y]), ti.f32(1.0))
                        store(out, to + f.apart, ti.Vector([z]), ti.f32(1.0))
                    else:
                        both = ti.u32(0)
                        pack(both, y, z)
                        out[to] = ti.cast(both, ti.u16)
                        out[to + f.apart] = ti.cast(both >> ti.u32(16), ti.u16)
                if (thread if ti.static(COLUMNS) else lane) < 4:
                    store_lse(lse, lse_at, m[r], l[r], scalars)

    return store_rows


def make_merge_warps(x, f, parts, c):
    """finish(...) if the warps divide the keys: it merges their results in shared memory and stores the task's rows."""
    exp2 = instructions().exp2
    output_offsets, store_lse = make_output_offsets(parts, c), make_store_lse(parts)
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cuda")
    DV, NV = c.width_v, c.width_v // KEYS

    @ti.func
    def merge_warps(thread, row, task, m: ti.template(), l: ti.template(), acc: ti.template(), sums: ti.template(),
                    out: ti.template(), lse: ti.template(), strides, params, scalars):  # fmt: skip
        results = ti.simt.block.SharedArray((ROWS * WARPS * DV,), ti.f32)
        tops = ti.simt.block.SharedArray((ROWS * WARPS,), ti.f32)
        totals = ti.simt.block.SharedArray((ROWS * WARPS,), ti.f32)
        weights = ti.simt.block.SharedArray((ROWS * WARPS,), ti.f32)
        lane, warp = thread % 32, thread // 32
        for g in ti.static(range(x.row_tiles)):
            ti.simt.block.sync()
            for e in ti.static(range(2)):
                if lane < 4:
                    tops[(lane * 2 + e) * WARPS + warp] = m[ti.static(2 * g + e)]
            ti.simt.block.sync()
            for e in ti.static(range(2)):
                r = (lane & 3) * 2 + e  # in this tile of rows
                top = m[ti.static(2 * g + e)]
                for w in ti.static(range(WARPS)):
                    top = ti.max(top, tops[r * WARPS + w])
                below, fade = m[ti.static(2 * g + e)] - top, ti.f32(0.0)
                exp2(fade, below)
                if lane < 4:
                    totals[r * WARPS + warp] = l[ti.static(2 * g + e)] * fade
                    weights[r * WARPS + warp] = sums[ti.static(4 * g + e)] * fade
                for t in ti.static(range(NV)):
                    for u in ti.static(range(2)):
                        y = acc[ti.static((g * NV + t) * 4 + e + 2 * u)] * fade
                        results[(r * WARPS + warp) * DV + f.column_of(t, lane) + u * f.apart] = y
            ti.simt.block.sync()
            first = row + ti.static(g * ROWS)
            for n in range(ti.min(ti.static(min(ROWS, c.rows - g * ROWS)), params[P.queries] * c.group - first)):
                at, lse_at = output_offsets(task[T.kv_head], first + n, task[T.split], strides, params)
                total, weight, top = ti.f32(0.0), ti.f32(0.0), ti.f32(LOWEST)
                for w in ti.static(range(WARPS)):
                    total += totals[n * WARPS + w]
                    weight += weights[n * WARPS + w]
                    top = ti.max(top, tops[n * WARPS + w])
                inverse = inverse_of(weight)
                for u in ti.static(range(-(-DV // BLOCK))):
                    d = u * BLOCK + thread
                    if d < DV:
                        y = ti.f32(0.0)
                        for w in ti.static(range(WARPS)):
                            y += results[(n * WARPS + w) * DV + d]
                        store(out, at + d, ti.Vector([y * inverse]), ti.f32(1.0))
                if thread == 0:
                    store_lse(lse, lse_at, top, total, scalars)

    return merge_warps
