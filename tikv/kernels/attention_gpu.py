"""Decode attention by a block of threads on Vulkan and Metal, and on CUDA where nothing faster fits.

A block takes `BLOCK` keys at a time. A party of neighbours, a subgroup or a warp, computes the score of one key after
another: its threads read the key's words side by side, and q.k is a sum over the party. Then each thread owns a score,
the parties agree on the highest, and each thread sums up columns of V. Where there are no such operations, a party is
one thread.
"""

from tikv.kernels.address import make_inner
from tikv.kernels.attention import (
    FACTORS,
    INDEX,
    MASKED,
    SEEN,
    WHERE,
    WHICH,
    F,
    N,
    P,
    S,
    exp2,
    make_place,
    make_put_lse,
    make_run,
    make_score,
    make_seen,
    make_target,
    make_visible,
    row_address,
)
from tikv.kernels.codec import SIZE, WORD, make_bits_to_f32, make_load, make_store
from tikv.kernels.lanes import ALONE, BLOCK, SPIRV_THREADS, WARP, make_across
from tikv.runtime import ti

MOST_IN_FLIGHT = 8  # keys that a thread reads at a time
NARROW = 32  # words of a key; where there are more, a thread reads two at a time


def make_attend_block(style, way, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors) on Vulkan, Metal and CUDA.

    On CUDA the extent of q is tasks * `BLOCK`. `way` is how neighbours agree, as in `lanes.make_across`, the other
    choices as in `attention_cpu.make_attend_cpu`.
    """
    KV = ti.types.ndarray(dtype=WORD[c.bits], ndim=1)
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if c.scale == "f16" else ti.u32, ndim=1)
    across = make_across(way)
    place_of, total, highest = across.place, across.total, across.highest
    seen_by, run, visible = make_seen(c), make_run(c), make_visible(c)
    score, target, put_lse = make_score(c), make_target(parts, c), make_put_lse(parts)
    k_place, v_place = make_place(c, P.k_step, P.k_block), make_place(c, P.v_step, P.v_block)
    scale_place = make_place(c, P.scale_step, P.scale_block)
    k_inner, v_inner = make_inner(*c.k_inner), make_inner(*c.v_inner)
    U, R, D, DV = c.unit, c.rows, c.width, c.width_v
    load = make_load(c.cache, U, c.bits)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None
    store = make_store(c.out, 1, SIZE[c.out] * 8, style)
    units, units_v = D // U, DV // U
    turns = -(-units_v // BLOCK)  # units of the result that a thread owns
    sharers = 1  # threads that own the same unit, each over keys of its own
    while sharers * 2 * units_v <= BLOCK and sharers * 2 * MOST_IN_FLIGHT <= BLOCK:
        sharers *= 2
    q_turns = -(-R * D // BLOCK)
    most_parties = BLOCK // 32 if way == WARP else BLOCK
    in_flight = MOST_IN_FLIGHT if R <= 2 else 4 if R <= 4 else 2  # what registers allow
    keys = 1 if way == ALONE else in_flight  # of which a party reads K at a time
    v_keys = max(in_flight, 4)  # of which a thread reads V at a time
    words = 1 if way == ALONE or units <= NARROW else 2  # of a key that a thread reads at a time

    @ti.func
    def work(thread, place, task, q: ti.template(), k: ti.template(), v: ti.template(), lens: ti.template(),
             table: ti.template(), k_scale: ti.template(), v_scale: ti.template(), out: ti.template(),
             lse: ti.template(), where, which, factors):  # fmt: skip
        qs = ti.simt.block.SharedArray((R * D,), ti.f32)  # as rows, elements of a word, words
        sc = ti.simt.block.SharedArray((R * BLOCK,), ti.f32)
        tops = ti.simt.block.SharedArray((R * most_parties,), ti.f32)
        k_rows = ti.simt.block.SharedArray((BLOCK,), ti.i32)
        v_rows = ti.simt.block.SharedArray((BLOCK,), ti.i32)
        rank, size, before, number, parties = place[0], place[1], place[2], place[3], place[4]
        mine = before + rank  # which of the block's keys this thread owns
        split, rest = task % which[N.splits], task // which[N.splits]
        row0, bh = rest % which[N.row_blocks] * R, rest // which[N.row_blocks]
        b, h = bh // which[N.heads], bh % which[N.heads]
        rows = which[N.queries] * c.group
        seen = seen_by(b, lens, where, which)
        share = (seen[S.count] + which[N.splits] - 1) // which[N.splits]
        begin = split * share
        end = ti.min(seen[S.count], begin + share)
        k_head = where[P.k_first] + b * where[P.k_batch] + h * where[P.k_head]
        v_head = where[P.v_first] + b * where[P.v_batch] + h * where[P.v_head]
        scale_head = b * where[P.scale_batch] + h * where[P.scale_head]
        owner, column = thread // units_v, thread % units_v
        if ti.static(sharers == 1):
            owner, column = 0, thread
        ti.simt.block.sync()
        for turn in range(q_turns):
            z = turn * BLOCK + thread
            if z < R * D:
                r = ti.min(row0 + z // D, rows - 1)
                d = z % D
                at = row_address(b, h, r, c.group, which[N.queries], where[P.q_first], where[P.q_batch],
                                 where[P.q_head], where[P.q_query])  # fmt: skip
                qs[(z // D * U + d % U) * units + d // U] = load_q(q, at + d)[0]
        m = ti.Vector([ti.f32(MASKED)] * R)
        l = ti.Vector([ti.f32(0.0)] * R)  # of the keys that this thread owns
        acc = ti.Vector([ti.f32(0.0)] * (R * turns * U))
        for chunk in range((end - begin + BLOCK - 1) // BLOCK):
            left = ti.min(BLOCK, end - begin - chunk * BLOCK)
            index = begin + chunk * BLOCK + mine
            slot, k_row, v_row = -1, 0, -1
            k_factor, v_factor = ti.f32(1.0), ti.f32(1.0)
            if index < end:
                slot = run(b, index, seen, table, where, which)[0]
            if slot >= 0:
                k_row, v_row = k_head + k_place(slot, where), v_head + v_place(slot, where)
                if ti.static(c.scale != ""):
                    at = scale_head + scale_place(slot, where)
                    k_factor = scale_value(k_scale[where[P.k_scale_first] + at])
                    v_factor = scale_value(v_scale[where[P.v_scale_first] + at])
            k_rows[mine], v_rows[mine] = k_row, v_row
            ti.simt.block.sync()
            bits = ti.Vector([0] * R)  # of the dots of this thread's key
            for turn in range((ti.min(size, left - before) + keys - 1) // keys):
                found = ti.Vector([ti.f32(0.0)] * (R * keys))
                here = ti.Vector([0] * keys)
                for n in ti.static(range(keys)):
                    here[n] = k_rows[before + ti.min(turn * keys + n, size - 1)]
                for step in range((units + size * words - 1) // (size * words)):
                    for w in ti.static(range(words)):
                        u = (step * words + w) * size + rank
                        inside = u < units
                        u = ti.min(u, units - 1)
                        x = ti.Vector([ti.f32(0.0)] * (keys * U))
                        for n in ti.static(range(keys)):
                            values = load(k, here[n] + k_inner(u))
                            for e in ti.static(range(U)):
                                x[n * U + e] = ti.select(inside, values[e], ti.f32(0.0))
                        for g in ti.static(range(R)):
                            for e in ti.static(range(U)):
                                y = qs[(g * U + e) * units + u]
                                for n in ti.static(range(keys)):
                                    found[n * R + g] += x[n * U + e] * y
                for n in ti.static(range(keys)):
                    # Not `select`: Metal's evaluates but one side, and a sum only some of a party would take part in.
                    wanted = ti.select(rank == turn * keys + n, -1, 0)
                    for g in ti.static(range(R)):
                        bits[g] = bits[g] | (ti.bit_cast(total(found[n * R + g]), ti.i32) & wanted)
            dots, top = ti.Vector([ti.f32(MASKED)] * R), ti.Vector([ti.f32(MASKED)] * R)
            for g in ti.static(range(R)):
                dot = score(ti.bit_cast(bits[g], ti.f32) * k_factor, factors[F.scale], factors[F.cap])
                dots[g] = ti.select(slot >= 0, dot, ti.f32(MASKED))
                if ti.static(c.masked):
                    sees = visible(ti.min(row0 + g, rows - 1) // c.group, index, seen, which)
                    dots[g] = ti.select(sees, dots[g], ti.f32(MASKED))
                top[g] = highest(ti.select(dots[g] > ti.f32(SEEN), dots[g], ti.f32(MASKED)))
            if rank == 0:
                for g in ti.static(range(R)):
                    tops[number * R + g] = top[g]
            ti.simt.block.sync()
            for g in ti.static(range(R)):
                high = m[g]
                for j in range(parties):
                    high = ti.max(high, tops[j * R + g])
                shrink = exp2(m[g] - high)
                m[g] = high
                p = ti.f32(0.0)
                if dots[g] > ti.f32(SEEN):
                    p = exp2(dots[g] - high)
                l[g] = l[g] * shrink + p
                for e in ti.static(range(turns * U)):
                    acc[g * turns * U + e] *= shrink
                weight = p * v_factor
                if ti.static(c.scale != "" and c.masked):  # the scale of what a query does not see may be NaN
                    weight = ti.select(p > ti.f32(0.0), weight, ti.f32(0.0))
                sc[g * BLOCK + mine] = weight
            ti.simt.block.sync()
            if owner < sharers:
                for turn in range((left + sharers * v_keys - 1) // (sharers * v_keys)):
                    x = ti.Vector([ti.f32(0.0)] * (v_keys * turns * U))
                    for n in ti.static(range(v_keys)):
                        at = v_rows[(turn * v_keys + n) * sharers + owner]
                        for z in ti.static(range(turns)):
                            values = load(v, ti.max(at, 0) + v_inner(ti.min(z * BLOCK + column, units_v - 1)))
                            for e in ti.static(range(U)):
                                x[(n * turns + z) * U + e] = ti.select(at >= 0, values[e], ti.f32(0.0))
                    for n in ti.static(range(v_keys)):
                        for g in ti.static(range(R)):
                            p = sc[g * BLOCK + (turn * v_keys + n) * sharers + owner]
                            for e in ti.static(range(turns * U)):
                                y = p * x[n * turns * U + e]
                                if ti.static(c.masked):  # what a query does not see may be NaN
                                    y = ti.select(p > ti.f32(0.0), y, ti.f32(0.0))
                                acc[g * turns * U + e] += y
            ti.simt.block.sync()
        for g in ti.static(range(R)):
            l[g] = total(l[g])
        if rank == 0:
            for g in ti.static(range(R)):
                tops[number * R + g] = l[g]
        if ti.static(sharers > 1):
            for e in ti.static(range(U)):
                for g in ti.static(range(R)):
                    sc[g * BLOCK + thread] = acc[g * U + e]
                ti.simt.block.sync()
                for g in ti.static(range(R)):
                    x = ti.f32(0.0)
                    for j in ti.static(range(sharers)):
                        x = x + sc[g * BLOCK + j * units_v + column]
                    acc[g * U + e] = x
                ti.simt.block.sync()
        else:
            ti.simt.block.sync()
        for g in ti.static(range(R)):
            r = row0 + g
            if r < rows:
                whole = ti.f32(0.0)
                for j in range(parties):
                    whole = whole + tops[j * R + g]
                inverse = ti.f32(0.0)
                if whole > ti.f32(0.0):
                    inverse = ti.f32(1.0) / whole
                at, lse_at = target(bh, r, split, where, which)
                for z in ti.static(range(turns)):
                    u = z * BLOCK + column
                    if owner == 0 and u < units_v:
                        for e in ti.static(range(U)):
                            store(out, at + u * U + e, ti.Vector([acc[(g * turns + z) * U + e] * inverse]),
                                  ti.f32(1.0))  # fmt: skip
                if thread == 0:
                    put_lse(lse, lse_at, m[g], whole, factors)

    @ti.kernel
    def attend(q: Q, k: KV, v: KV, lens: LENS, table: TABLE, k_scale: SC, v_scale: SC, out: OUT, lse: BITS,
               where: WHERE, which: WHICH, factors: FACTORS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        if ti.static(style == "spirv"):
            for i in range(SPIRV_THREADS):
                thread, first = i % BLOCK, i // BLOCK
                count = (which[N.tasks] - first + SPIRV_THREADS // BLOCK - 1) // (SPIRV_THREADS // BLOCK)
                if count > 0:
                    place = place_of(thread)
                    for n in range(count):
                        work(thread, place, first + n * (SPIRV_THREADS // BLOCK), q, k, v, lens, table, k_scale,
                             v_scale, out, lse, where, which, factors)  # fmt: skip
        else:
            for i in range(q.shape[0]):
                place = place_of(i % BLOCK)
                work(i % BLOCK, place, i // BLOCK, q, k, v, lens, table, k_scale, v_scale, out, lse, where, which,
                     factors)  # fmt: skip

    return attend


make_attend_block.fast_math = True
