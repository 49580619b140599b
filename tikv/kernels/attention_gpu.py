"""Decode attention by a block of threads with shared memory alone: Vulkan, Metal, and CUDA where nothing faster fits.

A block takes `BLOCK` keys at a time: a thread computes the scores of its own key, then owns columns of the result.
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
from tikv.kernels.lanes import BLOCK, SPIRV_THREADS
from tikv.runtime import ti


def make_attend_block(style, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors) on Vulkan, Metal and CUDA.

    On CUDA the extent of q is tasks * `BLOCK`. Choices as in `attention_cpu.make_attend_cpu`.
    """
    KV = ti.types.ndarray(dtype=WORD[c.bits], ndim=1)
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if c.scale == "f16" else ti.u32, ndim=1)
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
    q_turns = -(-R * D // BLOCK)

    @ti.func
    def work(thread, task, q: ti.template(), k: ti.template(), v: ti.template(), lens: ti.template(),
             table: ti.template(), k_scale: ti.template(), v_scale: ti.template(), out: ti.template(),
             lse: ti.template(), where, which, factors):  # fmt: skip
        qs = ti.simt.block.SharedArray((R * D,), ti.f32)
        sc = ti.simt.block.SharedArray((R * BLOCK,), ti.f32)
        v_rows = ti.simt.block.SharedArray((BLOCK,), ti.i32)
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
        ti.simt.block.sync()
        for turn in range(q_turns):
            z = turn * BLOCK + thread
            if z < R * D:
                r = ti.min(row0 + z // D, rows - 1)
                at = row_address(b, h, r, c.group, which[N.queries], where[P.q_first], where[P.q_batch],
                                 where[P.q_head], where[P.q_query])  # fmt: skip
                qs[z] = load_q(q, at + z % D)[0]
        ti.simt.block.sync()
        m = ti.Vector([ti.f32(MASKED)] * R)
        l = ti.Vector([ti.f32(0.0)] * R)
        acc = ti.Vector([ti.f32(0.0)] * (R * turns * U))
        for chunk in range((end - begin + BLOCK - 1) // BLOCK):
            index = begin + chunk * BLOCK + thread
            dots = ti.Vector([ti.f32(MASKED)] * R)
            slot, v_factor = -1, ti.f32(1.0)
            if index < end:
                slot = run(b, index, seen, table, where, which)[0]
            v_row = -1
            if slot >= 0:
                v_row = v_head + v_place(slot, where)
                k_row = k_head + k_place(slot, where)
                k_factor = ti.f32(1.0)
                if ti.static(c.scale != ""):
                    at = scale_head + scale_place(slot, where)
                    k_factor = scale_value(k_scale[where[P.k_scale_first] + at])
                    v_factor = scale_value(v_scale[where[P.v_scale_first] + at])
                dots = ti.Vector([ti.f32(0.0)] * R)
                for u in range(units):
                    x = load(k, k_row + k_inner(u))
                    for e in ti.static(range(U)):
                        for g in ti.static(range(R)):
                            dots[g] += x[e] * qs[g * D + u * U + e]
                for g in ti.static(range(R)):
                    dots[g] = score(dots[g] * k_factor, factors[F.scale], factors[F.cap])
                    if ti.static(c.masked):
                        if not visible(ti.min(row0 + g, rows - 1) // c.group, index, seen, which):
                            dots[g] = MASKED
            v_rows[thread] = v_row
            for g in ti.static(range(R)):
                sc[g * BLOCK + thread] = dots[g]
            ti.simt.block.sync()
            shrink = ti.Vector([ti.f32(1.0)] * R)
            for g in ti.static(range(R)):
                high = m[g]
                for j in range(BLOCK):
                    high = ti.max(high, sc[g * BLOCK + j])
                shrink[g] = exp2(m[g] - high)
                m[g] = high
                l[g] = l[g] * shrink[g]
                for e in ti.static(range(turns * U)):
                    acc[g * turns * U + e] *= shrink[g]
            ti.simt.block.sync()
            for g in ti.static(range(R)):
                p = ti.f32(0.0)
                if dots[g] > ti.f32(SEEN):
                    p = exp2(dots[g] - m[g])
                sc[g * BLOCK + thread] = p
            ti.simt.block.sync()
            for j in range(BLOCK):
                for g in ti.static(range(R)):
                    l[g] += sc[g * BLOCK + j]
            if ti.static(c.scale != ""):
                ti.simt.block.sync()
                for g in ti.static(range(R)):
                    p = sc[g * BLOCK + thread]
                    y = p * v_factor
                    if ti.static(c.masked):
                        y = ti.select(p > ti.f32(0.0), y, ti.f32(0.0))
                    sc[g * BLOCK + thread] = y
                ti.simt.block.sync()
            for j in range(ti.min(BLOCK, end - begin - chunk * BLOCK)):
                at = v_rows[j]
                if at >= 0:
                    for turn in ti.static(range(turns)):
                        u = turn * BLOCK + thread
                        if u < units_v:
                            x = load(v, at + v_inner(u))
                            for g in ti.static(range(R)):
                                p = sc[g * BLOCK + j]
                                for e in ti.static(range(U)):
                                    y = p * x[e]
                                    if ti.static(c.masked):  # what a query does not see may be NaN
                                        y = ti.select(p > ti.f32(0.0), y, ti.f32(0.0))
                                    acc[(g * turns + turn) * U + e] += y
            ti.simt.block.sync()
        for g in ti.static(range(R)):
            r = row0 + g
            if r < rows:
                inverse = ti.f32(0.0)
                if l[g] > ti.f32(0.0):
                    inverse = ti.f32(1.0) / l[g]
                at, lse_at = target(bh, r, split, where, which)
                for turn in ti.static(range(turns)):
                    u = turn * BLOCK + thread
                    if u < units_v:
                        for e in ti.static(range(U)):
                            store(out, at + u * U + e, ti.Vector([acc[(g * turns + turn) * U + e] * inverse]),
                                  ti.f32(1.0))  # fmt: skip
                if thread == 0:
                    put_lse(lse, lse_at, m[g], l[g], factors)

    @ti.kernel
    def attend(q: Q, k: KV, v: KV, lens: LENS, table: TABLE, k_scale: SC, v_scale: SC, out: OUT, lse: BITS,
               where: WHERE, which: WHICH, factors: FACTORS):  # fmt: skip
        if ti.static(style == "spirv"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(SPIRV_THREADS):
                for n in range((which[N.tasks] - i // BLOCK + SPIRV_THREADS // BLOCK - 1) // (SPIRV_THREADS // BLOCK)):
                    work(i % BLOCK, i // BLOCK + n * (SPIRV_THREADS // BLOCK), q, k, v, lens, table, k_scale, v_scale,
                         out, lse, where, which, factors)  # fmt: skip
        else:
            ti.loop_config(block_dim=BLOCK)
            for i in range(q.shape[0]):
                work(i % BLOCK, i // BLOCK, q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors)

    return attend


make_attend_block.fast_math = True
