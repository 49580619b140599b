"""Attention over latents (MLA) by the warpgroups of compute capability 9.0: S^T = K Q^T and O^T = V^T P^T by `wgmma`.

The values of a latent are its first columns, so a tile that lies in shared memory is used twice and read once. Both
products are transposed: the rows of the first are the 64 keys of a tile, those of the second are 64 columns of V. The
columns are query rows, as few as 16, so that one token of 16 query heads fills the tensor cores. The weights go from
one product to the other through shared memory.

A block has one warpgroup that copies tiles, two of which fit, and one or two that consume them. Two divide the query
rows in the first product, and the columns of V in the second.

If the rows of a task belong to one query, every row sees the same keys; what it does not see is zero in shared memory.
Otherwise scores are masked where rows differ. There, infinities and NaNs become zeros before the second product, since
nothing times them would be NaN. Where a row does see one, its score is infinite or NaN, so its result in that column is
NaN whatever the weight: it is stored at the end.
"""

from typing import NamedTuple

from tikv.kernels.attention.addresses import (
    make_find_key,
    make_locate,
    make_output_offsets,
    make_query_row,
    make_slot_offsets,
)
from tikv.kernels.attention.parameters import LOG2E, LOWEST, MINUS_INFINITY, P, X, make_attend_kernel
from tikv.kernels.attention.sm80.instructions import INFINITE
from tikv.kernels.attention.sm90 import ir
from tikv.kernels.attention.sm90.producer import make_copy_rows
from tikv.kernels.attention.sm90.tiles import (
    FAR,
    GROUP,
    PANEL_ROW,
    PIECE,
    instructions,
    moves_of,
    panels,
    piece_offset,
)
from tikv.kernels.attention.softmax import inverse_of, make_store_lse
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.visible import make_in_bounds, make_query_bounds
from tikv.kernels.codec import SIZE, WORD
from tikv.kernels.lanes import ALL, butterfly_max, butterfly_sum
from tikv.runtime import ti

WIDTH, WIDTH_V, KEYS = ir.LATENT
CONSUMERS = dict(ir.LATENT_ROWS)  # warpgroups that consume, by query rows of a task
STAGES = 2  # tiles that lie in shared memory
WARP_KEYS = KEYS // 4
TILE = panels(WIDTH) * KEYS * PANEL_ROW  # bytes
KEY_DISTANCES = [16, 8, 4]  # between lanes that have different keys of the same rows
LAG = 8.0  # how far a maximum may be behind before the result is rescaled: weights stay below 2 ** LAG
ALL_CONSUME, END = 1, 2  # barriers of a block


class Latents(NamedTuple):
    """How the warpgroups of a block share the work."""

    rows: int  # query rows of a task
    resident: int = 1  # blocks that a multiprocessor holds at once
    filling: int = 1
    of_one_query: bool = True  # whether the rows of a task always belong to one query

    @property
    def consumers(self) -> int:
        """Warpgroups that consume."""
        return CONSUMERS[self.rows]

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (1 + self.consumers) * GROUP


class LatentMemory(NamedTuple):
    """Where things lie in shared memory, in bytes from a multiple of 1,024 on; queries come first."""

    tiles: int
    weights: int
    there: int  # barriers, of each one a stage
    done: int
    exists: int  # a bit for each key of a tile: whether the task's query sees it
    tops: int  # of each warp and query row; at the end the sums of weights
    fades: int  # of each query row; at the end the maxima
    spoiled: int  # the first key, and the key behind the last, of tiles that had infinities or NaNs
    nbytes: int


def memory_of(rows: int) -> LatentMemory:
    """The `LatentMemory` of a block with so many query rows."""
    sizes = (panels(WIDTH) * rows * PANEL_ROW, STAGES * TILE, rows * PANEL_ROW, 8 * STAGES, 8 * STAGES, 16 * STAGES,
             16 * rows, 4 * rows, 8)  # fmt: skip
    offsets = [sum(sizes[:n]) for n in range(1, len(sizes) + 1)]
    return LatentMemory(*offsets[:-1], offsets[-1] + 1024)


def tile_of(group: int, queries: int) -> Latents:
    """The `Latents` for so many query rows of a query, and queries that read the same keys.

    Tasks have the fewest rows that suffice, or the most; those of one query if that leaves none of them empty.
    """
    most = max(CONSUMERS)
    of_one = queries == 1 or group % most == 0
    rows = group if of_one else group * queries
    return Latents(next((n for n in CONSUMERS if rows <= n), most), of_one_query=of_one)


def is_masked(x, c) -> bool:
    """Whether rows of a task may see different keys."""
    return c.masked and not x.of_one_query


def make_attend_latents(tile, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, strides, params, scalars) on compute capability 9.0.

    K in words of 64 bits, of one of `HALVES`, and q of the same; v is not read. Rows in one piece that begin at
    multiples of `PIECE` bytes, those of q too. The extent of q is tasks * `tile.threads`. Choices and terms as in
    `sm90.attend.make_attend_hopper`; a term that changes logits has no effect.
    """
    attend_task, THREADS = make_attend_task(tile, parts, c), tile.threads

    @ti.func
    def attend_all(arrays: ti.template(), terms: ti.template(), strides: ti.template(), params: ti.template(),
                   scalars: ti.template()):  # fmt: skip
        ti.loop_config(block_dim=THREADS)
        for i in range(ti.static(arrays[0]).shape[0]):
            attend_task(i % THREADS, i // THREADS, arrays, strides, params, scalars)

    return make_attend_kernel(attend_all, "cuda", c)


make_attend_latents.fast_math = True
make_attend_latents.uses_bitcode = True
make_attend_latents.resident = lambda tile, parts, c: tile.resident
make_attend_latents.shared_bytes = lambda tile, parts, c: memory_of(tile.rows).nbytes


def make_attend_task(x, parts, c):
    """attend_task(thread, number, ...): a thread's share of a task; all threads of a block call it."""
    ext, memory, THREADS = instructions(), memory_of(x.rows), x.threads
    decode_task, find_range = make_decode_task("cuda", KEYS, c), make_find_range(x, c)
    produce, consume = make_produce(x, c), make_consume(x, parts, c)
    moves = moves_of(1, x.consumers)
    MOVES, (give_away, get_back, get_many, give_back) = moves is not None, moves or [None] * 4
    # Each thread that copies arrives, and four that note; of those that consume, one of each warp.
    MAKE = ((memory.there, GROUP + 4), (memory.done, 4 * x.consumers))

    @ti.func
    def attend_task(thread, number, arrays: ti.template(), strides, params, scalars):
        lens = ti.static(arrays[3])
        visible, task = decode_task(number, lens, strides, params)
        seen = find_range(visible, task, params)
        shared = ti.u32(0)
        ext.shared_memory(shared)
        shared = (shared + ti.u32(1023)) & ti.u32(0xFFFFFC00)
        if thread == 0:
            if ti.static(is_masked(x, c)):
                note, none = shared + ti.u32(memory.spoiled), ti.u32(FAR)
                ext.write_4(note, none)
            for which, count in ti.static(MAKE):
                for stage in ti.static(range(STAGES)):
                    at, arrivals = shared + ti.u32(which + 8 * stage), ti.u32(count)
                    ext.barrier_make(at, arrivals)
        ti.simt.block.sync()
        warpgroup = ti.simt.warp.shfl_sync_i32(ti.u32(ALL), thread // GROUP, 0)  # the same for all lanes, also to LLVM
        end, threads = ti.u32(END), ti.u32(THREADS)
        if warpgroup == 0:
            if ti.static(MOVES):
                give_away()
            produce(thread, shared, seen, visible, task, arrays, strides, params)
            if ti.static(MOVES):
                ext.meet(end, threads)  # else this warpgroup could take back what the others still wait for
                get_back()
        else:
            if ti.static(MOVES):
                get_many()
                ext.let_pass(end, threads)
            consume(thread - GROUP, warpgroup - 1, shared, seen, visible, task, arrays, strides, params, scalars)
            if ti.static(MOVES):
                give_back()
        ti.simt.block.sync()
        if thread == 0:
            for which, _ in ti.static(MAKE):
                for stage in ti.static(range(STAGES)):
                    at = shared + ti.u32(which + 8 * stage)
                    ext.barrier_end(at)
        ti.simt.block.sync()

    return attend_task


class LatentRange(NamedTuple):
    """Entries of what `make_find_range` returns, indices of keys."""

    begin: int = 0  # of the first key that some row of the task sees
    end: int = 1  # behind the last
    low: int = 2  # every row sees the task's keys above it
    high: int = 3  # and up to this one


R = LatentRange()


def make_find_range(x, c):
    """find_range(visible, task, params) -> the vector `LatentRange` of a task."""
    query_bounds = make_query_bounds()

    @ti.func
    def find_range(visible, task, params):
        begin, end, low, high = task[T.begin], task[T.end], -FAR, FAR
        if ti.static(c.masked):
            last_row = ti.min(task[T.row] + c.rows, params[P.queries] * c.group) - 1
            first = query_bounds(task[T.row] // c.group, visible, params)
            last = query_bounds(last_row // c.group, visible, params)
            low, high, newest = last[0], first[1], last[1]
            if ti.static(c.sinks):
                low, newest = ti.max(low, first[2] - 1), ti.max(newest, ti.min(last[3], last[2] - 1))
            else:
                begin = ti.max(begin, first[0] + 1)
            end = ti.min(end, newest + 1)
        return ti.Vector([begin, end, low, high])

    return find_range


@ti.func
def tiles_of(seen):
    """The number of tiles of a task."""
    return ti.max(seen[R.end] - seen[R.begin] + (KEYS - 1), 0) // KEYS


def make_produce(x, c):
    """produce(thread, shared, seen, ...): copy the tiles of a task; by all threads of the first warpgroup.

    A lane of a warp looks up the row of one key, and all of them copy the rows of the warp's keys, in pieces.
    """
    ext, memory = instructions(), memory_of(x.rows)
    row_of, copy_rows = make_row_of(x, c), make_copy_rows(WIDTH * 2, KEYS, KEYS // 4)

    @ti.func
    def produce(thread, shared, seen, visible, task, arrays: ti.template(), strides, params):
        lane, warp = thread % 32, thread // 32
        k = ti.u64(0)
        ext.address_k(k)
        k += ti.cast(task[T.k_first], ti.u64) * ti.u64(8)
        begin, end = seen[R.begin], seen[R.end]
        at, stage, phase = begin + warp * WARP_KEYS + ti.select(lane < WARP_KEYS, lane, FAR), 0, ti.u32(1)
        row = row_of(at, end, visible, task, arrays, strides, params)
        for _ in range(tiles_of(seen)):
            done = shared + ti.cast(memory.done + stage * 8, ti.u32)
            barrier = shared + ti.cast(memory.there + stage * 8, ti.u32)
            ext.barrier_wait(done, phase)
            there = ti.cast(ti.simt.warp.ballot(ti.cast(row >= 0, ti.i32)), ti.u32)
            copy_rows(lane, warp, shared + ti.cast(memory.tiles + stage * TILE, ti.u32), k, row, there)
            if lane == 0:
                note = shared + ti.cast(memory.exists + stage * 16 + warp * 4, ti.u32)
                ext.write_4(note, there)
                ext.barrier_arrive(barrier)
            ext.copies_arrive(barrier)
            at += KEYS
            row = row_of(at, end, visible, task, arrays, strides, params)  # the time of the copies is that of this
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ ti.u32(1)

    return produce


def make_row_of(x, c):
    """row_of(index, end, ...): words from a head's first row to that of a key; -1 if no row of the task sees it."""
    find_key, query_bounds, in_bounds = make_find_key(c), make_query_bounds(), make_in_bounds(c)
    k_offset, _, _ = make_slot_offsets(c)

    @ti.func
    def row_of(index, end, visible, task, arrays: ti.template(), strides, params):
        table = ti.static(arrays[4])
        query, row = task[T.row] // c.group, -1
        if index < end:
            slot = find_key(task[T.sequence], task[T.head], query, index, visible, table, strides, params)[0]
            if ti.static(c.masked and x.of_one_query):
                bounds = query_bounds(query, visible, params)
                slot = ti.select(in_bounds(index, bounds[0], bounds[1], bounds[2], bounds[3]) > 0, slot, -1)
            if slot >= 0:
                row = k_offset(slot, strides)
        return row

    return row_of


def make_consume(x, parts, c):
    """consume(thread, part, shared, seen, visible, task, ...): attend for a warpgroup's query rows and columns of V."""
    ext, memory = instructions(), memory_of(x.rows)
    scores, values = (getattr(ext, f"latent_{name}_{c.query}_{x.rows}") for name in ("scores", "values"))
    pack, exp2, inverse = getattr(ext, f"pack_{c.query}"), ext.exp2, ext.inverse
    OWN = x.rows // x.consumers  # query rows of the first product
    NS, NO, BLOCKS = OWN // 2, WIDTH_V // 64 // x.consumers * x.rows // 2, WIDTH_V // 64 // x.consumers
    wait_scores, wait_values = getattr(ext, f"wait_0_{NS}"), getattr(ext, f"wait_0_{NO}")
    load_queries, rescale, store_rows = make_load_queries(x, c), make_rescale(x), make_store_rows(x, parts, c)
    mask, clean, restore, MASKED = make_mask(x, c), make_clean(x, c), make_restore(x, parts, c), is_masked(x, c)

    @ti.func
    def consume(thread, part, shared, seen, visible, task, arrays: ti.template(), strides, params, scalars):
        lane, warp = thread % 32, thread % GROUP // 32
        barrier, threads = ti.u32(ALL_CONSUME), ti.u32(x.consumers * GROUP)
        load_queries(thread, shared, task, strides, params)
        # Lower halves of descriptors.
        of_q = ti.u32(1 << 16) + ((shared + ti.cast(part * (OWN * PANEL_ROW), ti.u32)) >> 4)
        first_k = ti.u32(1 << 16) + ((shared + ti.u32(memory.tiles)) >> 4)
        of_p = ti.u32(1 << 16) + ((shared + ti.u32(memory.weights)) >> 4)
        to_v = ti.cast(part * (BLOCKS * KEYS * PANEL_ROW >> 4), ti.u32)
        # A lane transposes 8 x 8 weights of 8 keys and 8 rows: which row of them, and whose.
        lane_row = part * OWN + (lane >> 4) * 8 + (lane & 7)
        key_piece = (warp * 2 + (lane >> 3 & 1)) ^ (lane & 7)
        to_p = shared + ti.u32(memory.weights) + ti.cast(lane_row * PANEL_ROW + key_piece * PIECE, ti.u32)
        m = [ti.f32(LOWEST) for _ in range(OWN // 4)]  # above minus infinity: masked keys have weight 0
        l = [ti.f32(0.0) for _ in range(OWN // 4)]
        acc = [ti.f32(0.0) for _ in range(NO)]
        s = [ti.f32(0.0) for _ in range(NS)]
        stage, phase = 0, ti.u32(0)
        for n in range(tiles_of(seen)):
            there = shared + ti.cast(memory.there + stage * 8, ti.u32)
            note, exists = shared + ti.cast(memory.exists + stage * 16 + warp * 4, ti.u32), ti.u32(0)
            ext.barrier_wait(there, phase)
            ext.read_4(exists, note)
            ext.for_products()
            of_k = first_k + ti.cast(stage * (TILE >> 4), ti.u32)
            of_v = of_k + to_v
            scores(*s, of_q, of_k)
            wait_scores(*s)
            key_bits, at = exists >> ti.cast(lane >> 2, ti.u32), seen[R.begin] + n * KEYS
            whole = ti.cast(at > seen[R.low], ti.i32) * ti.cast(at + (KEYS - 1) <= seen[R.high], ti.i32)
            for i in ti.static(range(NS)):
                s[i] = s[i] * scalars[X.logit_scale]
                if ti.static(c.softcap):  # softcap * tanh(s)
                    grows, above, half = s[i] * ti.f32(2.0 * LOG2E), ti.f32(0.0), ti.f32(0.0)
                    exp2(above, grows)
                    above += ti.f32(1.0)
                    inverse(half, above)
                    s[i] = scalars[X.softcap] - ti.f32(2.0) * scalars[X.softcap] * half
                sees = (key_bits & ti.u32(1 << i // 2 % 2 * 8)) != ti.u32(0)
                s[i] = ti.bit_cast(ti.select(sees, ti.bit_cast(s[i], ti.u32), ti.u32(MINUS_INFINITY)), ti.f32)
            if ti.static(MASKED):
                if whole == 0:
                    mask(thread, part, at, visible, task, params, s)
            grown = ti.u32(0)
            for i in ti.static(range(NS)):
                grown = ti.select(s[i] > m[ti.static(i // 4 * 2 + i % 2)] + ti.f32(LAG), ti.u32(1), grown)
            any_grown = ti.u32(0)
            ext.meet_and_vote(any_grown, barrier, threads, grown)
            if any_grown != ti.u32(0):
                rescale(thread, part, shared, s, m, l, acc)
            for i in ti.static(range(NS)):
                below, weight = s[i] - m[ti.static(i // 4 * 2 + i % 2)], ti.f32(0.0)
                exp2(weight, below)
                s[i] = weight
                l[ti.static(i // 4 * 2 + i % 2)] += weight
            for j in ti.static(range(OWN // 16)):
                address = to_p + ti.u32(j * 16 * PANEL_ROW)
                p = [ti.u32(0) for _ in range(4)]
                for i in ti.static(range(4)):
                    pack(p[i], s[ti.static(8 * j + 2 * i)], s[ti.static(8 * j + 2 * i + 1)])
                ext.write_turned(address, *p)
            if ti.static(MASKED):
                if whole == 0:
                    clean(thread, at, shared, stage)
            ext.for_products()
            ext.meet(barrier, threads)
            values(*acc, of_p, of_v)
            wait_values(*acc)
            if lane == 0:
                done = shared + ti.cast(memory.done + stage * 8, ti.u32)
                ext.barrier_arrive(done)
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ ti.u32(1)
        store_rows(thread, part, shared, task, m, l, acc, arrays, strides, params, scalars)
        if ti.static(MASKED):
            restore(thread, shared, visible, task, arrays, strides, params)

    return consume


def make_mask(x, c):
    """mask(thread, part, at, visible, task, params, s): the logits of keys that a row does not see become -infinity.

    Each query stands one key behind the one before, so the rows that see a key follow each other.
    """
    query_bounds, OWN = make_query_bounds(), x.rows // x.consumers

    @ti.func
    def mask(thread, part, at, visible, task, params, s: ti.template()):
        lane, first = thread % 32, task[T.row] + part * OWN + (thread & 3) * 2
        bounds, begin, end = query_bounds(0, visible, params), [0, 0], [0, 0]
        for e in ti.static(range(2)):
            key = at + thread % GROUP // 32 * WARP_KEYS + (lane >> 2) + ti.static(8 * e)
            from_query, to_query = key - bounds[1], key - bounds[0]
            if ti.static(c.sinks):
                if key < bounds[2]:
                    from_query, to_query = key - bounds[3], params[P.queries]
            begin[e] = ti.min(ti.max(from_query, 0), params[P.queries]) * c.group - first
            end[e] = ti.min(ti.max(to_query, 0), params[P.queries]) * c.group - first
        for i in ti.static(range(OWN // 2)):
            row = ti.static(i // 4 * 8 + i % 2)
            sees = ti.cast(row >= begin[ti.static(i // 2 % 2)], ti.i32) & ti.cast(
                row < end[ti.static(i // 2 % 2)], ti.i32
            )
            s[i] = ti.bit_cast(ti.select(sees != 0, ti.bit_cast(s[i], ti.u32), ti.u32(MINUS_INFINITY)), ti.f32)

    return mask


def make_clean(x, c):
    """clean(thread, at, shared, stage): infinities and NaNs in V of the tile from key `at` become 0, and it is noted.

    All threads that consume call it between the products. V is the first panels of the tile.
    """
    ext, memory = instructions(), memory_of(x.rows)
    infinite = INFINITE[c.query] * 0x10001
    carries = 0x80008000 - infinite
    count = x.consumers * GROUP

    @ti.func
    def clean(thread, at, shared, stage):
        spoiled = ti.u32(0)
        for j in range(ti.static(KEYS * WIDTH_V * 2 // PIECE // count)):
            address = shared + ti.cast(memory.tiles + stage * TILE + (j * count + thread) * PIECE, ti.u32)
            y, of_piece = [ti.u32(0) for _ in range(4)], ti.u32(0)
            ext.read_16(*y, address)
            for e in ti.static(range(4)):
                signs = ((y[e] & ti.u32(infinite)) + ti.u32(carries)) & ti.u32(0x80008000)
                y[e] = y[e] & ~((signs >> ti.u32(15)) * ti.u32(0xFFFF))
                of_piece = of_piece | signs
            if of_piece != ti.u32(0):
                ext.write_16(address, *y)
            spoiled = spoiled | of_piece
        if spoiled != ti.u32(0):
            note, last, first = shared + ti.u32(memory.spoiled), shared + ti.u32(memory.spoiled + 4), ti.u32(0)
            begin, end = ti.cast(at, ti.u32), ti.cast(at + KEYS, ti.u32)
            ext.read_4(first, note)
            if first == ti.u32(FAR):
                ext.write_4(note, begin)
            ext.write_4(last, end)

    return clean


def make_restore(x, parts, c):
    """restore(thread, shared, visible, task, ...): NaN where a row sees an infinity or NaN that `clean` took away.

    All threads that consume call it after the results are stored. Few tasks have such tiles.
    """
    ext, memory = instructions(), memory_of(x.rows)
    query_bounds, in_bounds, locate = make_query_bounds(), make_in_bounds(c), make_locate(c)
    output_offsets, (k_offset, _, _) = make_output_offsets(parts, c), make_slot_offsets(c)
    infinite, word = INFINITE[c.query], WORD[SIZE[c.out] * 8]
    nan = {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000}[c.out]
    count = x.consumers * GROUP

    @ti.func
    def restore(thread, shared, visible, task, arrays: ti.template(), strides, params):
        k, table, out = ti.static((arrays[1], arrays[4], arrays[7]))
        barrier, threads = ti.u32(ALL_CONSUME), ti.u32(count)
        note, last, first, behind = (
            shared + ti.u32(memory.spoiled), shared + ti.u32(memory.spoiled + 4), ti.u32(0), ti.u32(0),
        )  # fmt: skip
        ext.meet(barrier, threads)  # other threads stored results
        ext.read_4(first, note)
        ext.read_4(behind, last)
        rows = ti.min(task[T.row] + c.rows, params[P.queries] * c.group) - task[T.row]
        numbers = ti.select(first == ti.u32(FAR), 0, rows * WIDTH_V)
        for n in range((numbers - thread + (count - 1)) // count):
            row, column = (
                task[T.row] + (n * count + thread) // WIDTH_V,
                (n * count + thread) % WIDTH_V,
            )
            bounds, is_spoiled = query_bounds(row // c.group, visible, params), 0
            for index in range(ti.cast(first, ti.i32), ti.min(ti.cast(behind, ti.i32), task[T.end])):
                if in_bounds(index, bounds[0], bounds[1], bounds[2], bounds[3]) > 0:
                    slot = locate(task[T.sequence], task[T.head], index, visible, table, strides, params)[0]
                    if slot >= 0:
                        four = k[task[T.k_first] + k_offset(slot, strides) + (column >> 2)]
                        half = ti.cast(four >> ti.cast((column & 3) * 16, ti.u64), ti.u32)
                        is_spoiled = ti.select((half & ti.u32(infinite)) == ti.u32(infinite), 1, is_spoiled)
            if is_spoiled != 0:
                to = output_offsets(task[T.kv_head], row, task[T.split], strides, params)[0] + column
                out[to] = ti.cast(ti.u32(nan), word)

    return restore


def make_load_queries(x, c):
    """load_queries(thread, shared, task, ...): copies a task's query rows to shared memory; 0 after the last."""
    ext, query_row = instructions(), make_query_row(c)
    pieces, count = WIDTH * 2 // PIECE, x.consumers * GROUP

    @ti.func
    def load_queries(thread, shared, task, strides, params):
        q, barrier, threads = ti.u64(0), ti.u32(ALL_CONSUME), ti.u32(count)
        ext.address_q(q)
        rows = ti.min(task[T.row] + c.rows, params[P.queries] * c.group)
        for j in range(ti.static(x.rows * pieces // count)):
            number = j * count + thread
            behind, piece = number // pieces, number % pieces
            r = task[T.row] + behind
            at = shared + piece_offset(0, behind, piece, x.rows)
            first = query_row(task[T.sequence], task[T.head], ti.min(r, rows - 1), strides, params)
            address = q + ti.cast(first, ti.u64) * ti.u64(2) + ti.cast(piece * PIECE, ti.u64)
            size = ti.select(r < rows, ti.u32(PIECE), ti.u32(0))
            ext.copy_16(at, address, size)
        ext.copies_wait()
        ext.for_products()
        ext.meet(barrier, threads)

    return load_queries


def columns_of(x, r):
    """Which of a thread's results are columns of its query row r."""
    count, blocks = x.rows // 2, WIDTH_V // 64 // x.consumers
    return [b * count + r // 2 * 4 + r % 2 + 2 * e for b in range(blocks) for e in range(2)]


def make_rescale(x):
    """rescale(thread, part, shared, s, m, l, acc): rescales to new maxima; all threads that consume call it."""
    ext, memory = instructions(), memory_of(x.rows)
    OWN, BLOCKS = x.rows // x.consumers, WIDTH_V // 64 // x.consumers
    exp2, fade = ext.exp2, getattr(ext, f"fade_{2 * BLOCKS}")

    @ti.func
    def rescale(thread, part, shared, s: ti.template(), m: ti.template(), l: ti.template(), acc: ti.template()):
        lane, warp = thread % 32, thread % GROUP // 32
        barrier, threads = ti.u32(ALL_CONSUME), ti.u32(x.consumers * GROUP)
        tops, fades = shared + ti.u32(memory.tops), shared + ti.u32(memory.fades)
        for r in ti.static(range(OWN // 4)):
            i = ti.static(r // 2 * 4 + r % 2)  # the row's first key; the other one is at i + 2
            top = butterfly_max(ti.max(m[r], ti.max(s[i], s[ti.static(i + 2)])), KEY_DISTANCES)
            if lane < 4:
                row = part * OWN + ti.static(r // 2 * 8 + r % 2) + lane * 2
                at, bits = tops + ti.cast(row * 16 + warp * 4, ti.u32), ti.bit_cast(top, ti.u32)
                ext.write_4(at, bits)
        ext.meet(barrier, threads)
        for r in ti.static(range(OWN // 4)):
            row = part * OWN + ti.static(r // 2 * 8 + r % 2) + (lane & 3) * 2
            at, y = tops + ti.cast(row * 16, ti.u32), [ti.u32(0) for _ in range(4)]
            ext.read_16(*y, at)
            top = ti.max(ti.max(ti.bit_cast(y[0], ti.f32), ti.bit_cast(y[1], ti.f32)),
                         ti.max(ti.bit_cast(y[2], ti.f32), ti.bit_cast(y[3], ti.f32)))  # fmt: skip
            below, factor = m[r] - top, ti.f32(0.0)
            exp2(factor, below)
            m[r] = top
            l[r] *= factor
            if warp == 0 and lane < 4:
                to, bits = fades + ti.cast(row * 4, ti.u32), ti.bit_cast(factor, ti.u32)
                ext.write_4(to, bits)
        ext.meet(barrier, threads)
        for r in ti.static(range(x.rows // 4)):
            row = ti.static(r // 2 * 8 + r % 2) + (lane & 3) * 2
            at, bits = fades + ti.cast(row * 4, ti.u32), ti.u32(0)
            ext.read_4(bits, at)
            factor = ti.bit_cast(bits, ti.f32)
            fade(*[acc[n] for n in columns_of(x, r)], factor)

    return rescale


def make_store_rows(x, parts, c):
    """store_rows(thread, part, shared, task, m, l, acc, ...): each lane stores its columns of every row."""
    ext, memory = instructions(), memory_of(x.rows)
    output_offsets, store_lse = make_output_offsets(parts, c), make_store_lse(parts)
    OWN, BLOCKS = x.rows // x.consumers, WIDTH_V // 64 // x.consumers
    store = getattr(ext, f"store_{2 * BLOCKS}_{c.out}")

    @ti.func
    def total_of(sums, row):
        at, y = sums + ti.cast(row * 16, ti.u32), [ti.u32(0) for _ in range(4)]
        ext.read_16(*y, at)
        return (ti.bit_cast(y[0], ti.f32) + ti.bit_cast(y[1], ti.f32)) + (
            ti.bit_cast(y[2], ti.f32) + ti.bit_cast(y[3], ti.f32)
        )

    @ti.func
    def store_rows(thread, part, shared, task, m: ti.template(), l: ti.template(), acc: ti.template(),
                   arrays: ti.template(), strides, params, scalars):  # fmt: skip
        lse = ti.static(arrays[8])
        out = ti.u64(0)
        ext.address_out(out)
        lane, warp = thread % 32, thread % GROUP // 32
        barrier, threads = ti.u32(ALL_CONSUME), ti.u32(x.consumers * GROUP)
        sums, maxima = shared + ti.u32(memory.tops), shared + ti.u32(memory.fades)
        ext.meet(barrier, threads)  # the last maxima and factors are read
        for r in ti.static(range(OWN // 4)):
            total = butterfly_sum(l[r], KEY_DISTANCES)
            if lane < 4:
                row = part * OWN + ti.static(r // 2 * 8 + r % 2) + lane * 2
                at, bits = sums + ti.cast(row * 16 + warp * 4, ti.u32), ti.bit_cast(total, ti.u32)
                ext.write_4(at, bits)
                to, top = maxima + ti.cast(row * 4, ti.u32), ti.bit_cast(m[r], ti.u32)
                ext.write_4(to, top)
        ext.meet(barrier, threads)
        rows = ti.min(task[T.row] + c.rows, params[P.queries] * c.group)
        first = part * (BLOCKS * 64) + warp * 16 + (lane >> 2)
        for r in ti.static(range(x.rows // 4)):
            row = ti.static(r // 2 * 8 + r % 2) + (lane & 3) * 2
            if task[T.row] + row < rows:
                inverse = inverse_of(total_of(sums, row))
                at, _ = output_offsets(task[T.kv_head], task[T.row] + row, task[T.split], strides, params)
                to = out + ti.cast(at + first, ti.u64) * ti.u64(SIZE[c.out])
                store(to, inverse, *[acc[n] for n in columns_of(x, r)])
        if task[T.row] + thread < rows:
            _, lse_at = output_offsets(task[T.kv_head], task[T.row] + thread, task[T.split], strides, params)
            top_at, top = maxima + ti.cast(thread * 4, ti.u32), ti.u32(0)
            ext.read_4(top, top_at)
            store_lse(lse, lse_at, ti.bit_cast(top, ti.f32), total_of(sums, thread), scalars)

    return store_rows
