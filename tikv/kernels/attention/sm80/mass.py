"""The attention mass of keys on the tensor cores, for prompts: a warp holds its keys and goes over all query rows.

Each warp reads `Tile.key_tiles` tiles of K once, as fragments that stay in registers. The rows of queries pass by in
shared memory, so many at a time that a block's warps share, as the fragments that `sm80.attend` multiplies. A row's
log-sum-exp turns its scores into weights directly; a lane adds up those of its keys, and at the end four lanes join
what they have of the same keys. No two warps have the same key, so each mass is stored once, and its sum has one order.
"""

from typing import NamedTuple

from tikv.kernels.attention.addresses import make_query_row
from tikv.kernels.attention.mass import make_joined, make_lse_of_row, make_mass_offset
from tikv.kernels.attention.parameters import BITS, FLOATS, INFINITY, PARAMS, SCALARS, STRIDES, P, array_types
from tikv.kernels.attention.sm80 import floats
from tikv.kernels.attention.sm80.attend import make_mask
from tikv.kernels.attention.sm80.instructions import HALVES, ROWS, WARPS, instructions, lane_bits
from tikv.kernels.attention.sm80.kinds import kind_of
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.sm80.tiles import L, has_bounds, make_find_slot, make_is_whole, make_limits
from tikv.kernels.attention.softmax import not_above_zero
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.codec import word_array
from tikv.kernels.lanes import BLOCK, shuffle_xor
from tikv.runtime import ti

SHARED_HALVES = 1 << 14  # of queries that a block has in shared memory at once
QUERY_UNIT = 2  # halves of q in a word of 32 bits
ROW_LANES = (1, 2)  # distances between lanes that have other rows of the same keys


class Tile(NamedTuple):
    """How a block takes keys and query rows."""

    key_tiles: int  # tiles of `KEYS` keys that a warp holds
    chunk: int  # query rows in shared memory
    resident: int  # as in `attend.Tile`
    row_tiles: int = 1

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return WARPS * self.key_tiles * KEYS


def tile_of(width: int, codes: bool) -> Tile:
    """The tile for keys of a width that `sm80.attend` serves, up to 256, as halves or as codes."""
    if codes:
        return Tile(2, 64, 3)
    many = ROWS * WARPS
    wide = width > 128
    return Tile(1 if wide else 2, min(128, SHARED_HALVES // width // many * many), 3 if wide else 4)


def make_mass_tensor(x, by_slot, greatest, c):
    """mass(q, k, lens, table, k_scale, lse, mass, strides, params, scalars): as `cuda.mass.make_mass_lanes`.

    K, its scales and q are in the words that `make_attend_tensor` reads, but q over halves is in words of `QUERY_UNIT`.
    The extent of q is tasks * `BLOCK`.
    """
    Q, K, LENS, TABLE, KSC, _ = array_types("cuda", c)
    if c.cache in HALVES:
        Q = word_array(32)
    else:
        KSC = kind_of(c.cache).numbers_arrays(c)[0]
    mass_task = make_mass_task(x, by_slot, make_joined(greatest), c)

    @ti.kernel
    def mass_of_keys(q: Q, k: K, lens: LENS, table: TABLE, k_scale: KSC, lse: BITS, mass: FLOATS, strides: STRIDES,
                     params: PARAMS, scalars: SCALARS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            arrays = ti.static((q, k, lens, table, k_scale, lse, mass))
            mass_task(i % BLOCK, i // BLOCK, arrays, strides, params, scalars)

    return mass_of_keys


make_mass_tensor.fast_math = True
make_mass_tensor.uses_bitcode = True
make_mass_tensor.resident = lambda x, by_slot, greatest, c: x.resident
make_mass_tensor.needs_native = lambda x, by_slot, greatest, c: c.cache in floats.NEEDS_NATIVE
make_mass_tensor.pairs = True


def make_mass_task(x, by_slot, joined, c):
    """mass_task(thread, number, ...): a thread's share of a task; all threads of a block call it."""
    decode_task, find_slot, lse_of_row = make_decode_task("cuda", x.keys, c), make_find_slot(c), make_lse_of_row(c)
    f = kind_of(c.cache).make_fragments(x, c)
    put, take = (make_put_halves, make_take_halves) if c.cache in HALVES else (make_put, make_take)
    put, take = put(x, f, c), take(x, f, c)
    add_weights, store_mass = make_add_weights(x, f, joined, c), make_store_mass(x, by_slot, joined, c)
    TILES, CHUNK = x.key_tiles, x.chunk
    limits, is_whole = make_limits(CHUNK, KEYS, c), make_is_whole(c)

    @ti.func
    def mass_task(thread, number, arrays: ti.template(), strides, params, scalars):
        q, k, lens, table, k_scale, lse, mass = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        lane, warp = thread % 32, thread // 32
        queries = ti.simt.block.SharedArray((CHUNK // ROWS * f.queries * 32,), ti.u32)
        lses = ti.simt.block.SharedArray((CHUNK,), ti.f32)
        rows = params[P.queries] * c.group
        # Without it, the assembler keeps K as it was read, and moves it to where products need it for all rows again.
        nothing = ti.cast(rows >> 31, ti.u32)
        for turn in range((task[T.end] - task[T.begin] + (x.keys - 1)) // x.keys):
            at = task[T.begin] + turn * x.keys + warp * ti.static(TILES * KEYS)
            kf = [[ti.u32(0) for _ in range(f.keys)] for _ in range(TILES)]
            totals = [[ti.f32(0.0) for _ in range(2)] for _ in range(TILES)]
            slots = [0 for _ in range(2)]
            for j in ti.static(range(TILES)):
                for i in ti.static(range(2)):
                    n = ti.min(at + (lane >> 2) + ti.static(j * KEYS + i * 8), task[T.end] - 1)
                    slots[i] = ti.max(find_slot(task, 0, n, visible, table, strides, params), 0)
                f.load_keys(lane, slots, task, k, k_scale, kf[j], strides)
                for i in ti.static(range(f.keys)):
                    kf[j][i] = kf[j][i] ^ nothing
            for n in range((rows + (CHUNK - 1)) // CHUNK):
                first = n * CHUNK
                ti.simt.block.sync()  # until all warps have used the rows before
                put(first, thread, task, q, k_scale, queries, strides, params)
                if thread < CHUNK:
                    of_row = ti.bit_cast(ti.u32(INFINITY), ti.f32)  # of a row that sees nothing: its weights are 0
                    if first + thread < rows:
                        sees, value = lse_of_row(task[T.kv_head], first + thread, lse, strides, params, scalars)
                        of_row = ti.select(sees > 0, value, of_row)
                    lses[thread] = of_row
                ti.simt.block.sync()
                clear = 1  # whether all of these rows see all keys of the warp
                if ti.static(has_bounds(c)):
                    seen = limits(first, visible, task, params)
                    clear = is_whole(at, seen, visible, task)
                    clear *= is_whole(at + ti.static((TILES - 1) * KEYS), seen, visible, task)
                for g in range((ti.min(CHUNK, rows - first) + (ROWS - 1)) // ROWS):
                    qf = [ti.u32(0) for _ in range(f.queries)]
                    take(g, lane, queries, qf)
                    add_weights(at, first, g, lane, clear, kf, qf, lses, totals, visible, task, params, scalars)
            for j in ti.static(range(TILES)):
                store_mass(at + ti.static(j * KEYS), lane, totals[j], visible, task, table, mass, strides, params)

    return mass_task


def make_put(x, f, c):
    """put(first, thread, task, q, k_scale, queries, ...): fragments of the rows from `first`, into shared memory."""

    @ti.func
    def put(first, thread, task, q: ti.template(), k_scale: ti.template(), queries: ti.template(), strides, params):
        lane, warp = thread % 32, thread // 32
        for n in range(ti.static(x.chunk // ROWS // WARPS)):
            g = n * WARPS + warp
            if first + g * ROWS < params[P.queries] * c.group:
                qf = [ti.u32(0) for _ in range(f.queries)]
                # Plus zero: LLVM would compute the addresses before the loops, and has no registers to keep them.
                same = lane + (first + n) * (params[P.queries] >> 31)
                f.load_queries(first + g * ROWS, same, 0, task, q, k_scale, qf, strides, params)
                for i in ti.static(range(f.queries)):
                    queries[(g * f.queries + i) * 32 + lane] = qf[i]

    return put


def make_take(x, f, c):
    """take(g, lane, queries, qf): a lane's fragments of the g-th `ROWS` rows in shared memory."""

    @ti.func
    def take(g, lane, queries: ti.template(), qf: ti.template()):
        for i in ti.static(range(f.queries)):
            qf[i] = queries[(g * f.queries + i) * 32 + lane]

    return take


def make_exchange(c):
    """exchange(r) -> the bits that permute the words of row r: lanes read two of each of four rows at once."""
    swap = 2 if c.width % 64 == 0 else 0

    @ti.func
    def exchange(r):
        return ((r & 1) << 1) | ((r & swap) << 3)

    return exchange


def make_put_halves(x, f, c):
    """`make_put` for halves: rows as they are, whose words the lanes of a warp read side by side."""
    query_row, exchange = make_query_row(c), make_exchange(c)
    WORDS, EACH = c.width // QUERY_UNIT, -(-c.width // QUERY_UNIT // 32)  # of a row, and of a lane
    ROWS_OF_WARP = x.chunk // WARPS  # at most 32

    @ti.func
    def put(first, thread, task, q: ti.template(), k_scale: ti.template(), queries: ti.template(), strides, params):
        lane, r = thread % 32, thread // 32 * ROWS_OF_WARP
        last = params[P.queries] * c.group - 1  # rows after it repeat it
        mine = query_row(task[T.sequence], task[T.head], ti.min(first + r + lane, last), strides, params)
        for n in range(ti.min(ROWS_OF_WARP, last + 1 - first - r + (ROWS - 1)) // ROWS):
            held = [ti.u32(0) for _ in range(ROWS * EACH)]
            for i in ti.static(range(ROWS)):
                row = ti.bit_cast(lane_bits(ti.bit_cast(mine, ti.u32), n * ROWS + i), ti.i32)
                for j in ti.static(range(EACH)):
                    held[ti.static(i * EACH + j)] = q[row + ti.min(lane + ti.static(32 * j), WORDS - 1)]
            for i in ti.static(range(ROWS)):
                to = (r + n * ROWS + i) * WORDS
                for j in ti.static(range(EACH)):
                    if lane + ti.static(32 * j) < WORDS:
                        queries[to + ((lane + ti.static(32 * j)) ^ exchange(i))] = held[ti.static(i * EACH + j)]

    return put


def make_take_halves(x, f, c):
    """`make_take` for halves: the columns of `halves.make_load_queries`."""
    exchange = make_exchange(c)
    WORDS = c.width // QUERY_UNIT

    @ti.func
    def take(g, lane, queries: ti.template(), qf: ti.template()):
        row = (g * ROWS + (lane >> 2)) * WORDS
        first = ((lane & 3) * 4) ^ exchange(lane >> 2)
        for n in ti.static(range(0, f.queries, 2)):
            at = row + (first ^ ti.static(n // 4 % 2 * 16 + n % 4)) + ti.static(n // 8 * 32)
            qf[n], qf[ti.static(n + 1)] = queries[at], queries[at + 1]

    return take


def make_add_weights(x, f, joined, c):
    """add_weights(at, first, g, lane, clear, kf, qf, lses, ...): the g-th `ROWS` rows from `first` weigh a warp's keys.

    Nothing is masked if it is `clear` that all rows see all keys.
    """
    exp2 = instructions().exp2
    limits, is_whole, mask = make_limits(ROWS, KEYS, c), make_is_whole(c), make_mask(x, c)

    @ti.func
    def add_weights(at, first, g, lane, clear, kf: ti.template(), qf: ti.template(), lses: ti.template(),
                    totals: ti.template(), visible, task, params, scalars):  # fmt: skip
        row = first + g * ROWS
        seen = ti.Vector([task[T.begin], task[T.end], 0, 0])
        if ti.static(has_bounds(c)):
            if clear == 0:
                seen = limits(row, visible, task, params)
        for j in ti.static(range(x.key_tiles)):
            here = at + ti.static(j * KEYS)
            if here < seen[L.end] and here + KEYS > seen[L.begin]:
                p = [ti.f32(0.0) for _ in range(4)]
                f.scores(kf[j], qf, p, scalars)
                for i in ti.static(range(4)):
                    p[i] -= lses[g * ROWS + (lane & 3) * 2 + ti.static(i % 2)]
                if ti.static(has_bounds(c)):
                    if clear == 0 and is_whole(here, seen, visible, task) == 0:
                        counts = [1 for _ in range(2)]
                        mask(here, row, lane, counts, p, visible, params)
                for i in ti.static(range(4)):
                    below, weight = not_above_zero(p[i]), ti.f32(0.0)
                    exp2(weight, below)
                    totals[j][ti.static(i // 2)] = joined(totals[j][ti.static(i // 2)], weight)

    return add_weights


def make_store_mass(x, by_slot, joined, c):
    """store_mass(at, lane, totals, ...): joins the weights of a tile's keys over all rows; one lane stores each."""
    find_slot, mass_offset = make_find_slot(c), make_mass_offset(by_slot, c)

    @ti.func
    def store_mass(at, lane, totals: ti.template(), visible, task, table: ti.template(), mass: ti.template(), strides,
                   params):  # fmt: skip
        for i in ti.static(range(2)):
            total = totals[i]
            for distance in ti.static(ROW_LANES):
                total = joined(total, shuffle_xor(total, distance))
            index = at + (lane >> 2) + ti.static(i * 8)
            if (lane & 3) == 0 and index < task[T.end]:
                slot = find_slot(task, 0, index, visible, table, strides, params)
                if slot >= 0:
                    to = mass_offset(task[T.sequence], task[T.head], 0, 0, index, slot, visible, strides, params)
                    mass[to] = joined(mass[to], total)

    return store_mass
