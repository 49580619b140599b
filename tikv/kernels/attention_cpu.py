"""Decode attention on CPU: a worker thread walks over tasks, 64 keys at a time, in registers and on its stack.

Taichi gives a CPU thread at least 512 iterations, so the loop has that many for each worker, and one of them works.
"""

import functools

from tikv.kernels.address import make_inner
from tikv.kernels.attention import (
    FACTORS,
    INDEX,
    MASKED,
    SEEN,
    WHERE,
    WHICH,
    N,
    P,
    S,
    exp2,
    make_place,
    make_put_lse,
    make_run,
    make_score,
    make_seen,
    make_visible,
    row_address,
)
from tikv.kernels.codec import SIZE, WORD, bf16_to_f32, make_bits_to_f32, make_load, make_store
from tikv.runtime import ti

CHUNK = 64  # keys whose scores are held at once
STRIP = 32  # elements of an accumulator: longer stack vectors compile slowly
LEAST_ITERATIONS = 512  # that Taichi gives a thread
ELEMENT = {"f32": ti.f32, "f16": ti.f16, "bf16": ti.u16, "i8": ti.i8}


@functools.cache
def make_value(code):
    """value(x): an element of the cache as float32."""

    @ti.func
    def value(x):
        found = ti.f32(0.0)
        if ti.static(code == "bf16"):
            found = bf16_to_f32(x)
        else:
            found = ti.cast(x, ti.f32)
        return found

    return value


@ti.func
def ordered(x):
    """The bits of a float as an integer that orders as the floats do; LLVM vectorises its maximum."""
    i = ti.bit_cast(x, ti.i32)
    return i ^ ((i >> 31) & 0x7FFFFFFF)


def make_attend_cpu(workers, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors) on CPU.

    Args:
        workers: threads; 1 runs in the calling thread.
        parts: whether out and lse take the parts of splits, row by row and split by split, or the result.
        c: the other `Choices`.
    """
    KV = ti.types.ndarray(dtype=ELEMENT[c.cache], ndim=1)
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if c.scale == "f16" else ti.u32, ndim=1)
    seen_by, run, visible = make_seen(c), make_run(c), make_visible(c)
    score, put_lse = make_score(c), make_put_lse(parts)
    k_place, v_place = make_place(c, P.k_step, P.k_block), make_place(c, P.v_step, P.v_block)
    scale_place = make_place(c, P.scale_step, P.scale_block)
    k_inner, v_inner = make_inner(*c.k_inner), make_inner(*c.v_inner)
    value = make_value(c.cache)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cpu")
    R, D, DV = c.rows, c.width, c.width_v
    strips = [(e, min(STRIP, DV - e * STRIP)) for e in range(-(-DV // STRIP))]
    NS = len(strips)
    together = [range(g, min(g + 4, R)) for g in range(0, R, 4)]  # rows whose sums are in registers at once
    iterations = workers * LEAST_ITERATIONS if workers > 1 else 1
    every = LEAST_ITERATIONS if workers > 1 else 1

    @ti.kernel
    def attend(q: Q, k: KV, v: KV, lens: LENS, table: TABLE, k_scale: SC, v_scale: SC, out: OUT, lse: BITS,
               where: WHERE, which: WHICH, factors: FACTORS):  # fmt: skip
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker = i // every
            tasks = 0
            if i % every == 0:
                tasks = (which[N.tasks] - worker + workers - 1) // workers
            qs = ti.Vector([ti.f32(0.0)] * (R * D))
            acc = [ti.Vector([ti.f32(0.0)] * STRIP) for _ in range(R * NS)]
            sc = [ti.Vector([ti.f32(0.0)] * (CHUNK + 1)) for _ in range(R)]
            for step in range(tasks):
                task = step * workers + worker
                split, rest = task % which[N.splits], task // which[N.splits]
                row0, bh = rest % which[N.row_blocks] * R, rest // which[N.row_blocks]
                b, h = bh // which[N.heads], bh % which[N.heads]
                rows = which[N.queries] * c.group
                seen = seen_by(b, lens, where, which)
                count = seen[S.count]
                share = (count + which[N.splits] * CHUNK - 1) // (which[N.splits] * CHUNK) * CHUNK
                begin = split * share
                end = ti.min(count, begin + share)
                k_head = where[P.k_first] + b * where[P.k_batch] + h * where[P.k_head]
                v_head = where[P.v_first] + b * where[P.v_batch] + h * where[P.v_head]
                scale_head = b * where[P.scale_batch] + h * where[P.scale_head]
                for g in ti.static(range(R)):
                    r = ti.min(row0 + g, rows - 1)
                    at = row_address(b, h, r, c.group, which[N.queries], where[P.q_first], where[P.q_batch],
                                     where[P.q_head], where[P.q_query])  # fmt: skip
                    for d in range(D):
                        qs[g * D + d] = load_q(q, at + d)[0]
                m = ti.Vector([ti.f32(MASKED)] * R)
                l = ti.Vector([ti.f32(0.0)] * R)
                for d in range(STRIP):
                    for e in ti.static(range(R * NS)):
                        acc[e][d] = 0.0
                for chunk in range((end - begin + CHUNK - 1) // CHUNK):
                    c0 = begin + chunk * CHUNK
                    n = ti.min(CHUNK, end - c0)
                    j0 = 0
                    while j0 < n:
                        found = run(b, c0 + j0, seen, table, where, which)
                        slot, near = found[0], ti.min(found[1], n - j0)
                        if slot < 0:
                            for j in range(j0, j0 + near):
                                for g in ti.static(range(R)):
                                    sc[g][j] = MASKED
                        else:
                            base = k_head + k_place(slot, where)
                            scale_at = where[P.k_scale_first] + scale_head + scale_place(slot, where)
                            for pair in range((near + 1) // 2):
                                j = pair * 2
                                j1 = ti.min(j + 1, near - 1)
                                k0, k1 = base + j * where[P.k_step], base + j1 * where[P.k_step]
                                for heads in ti.static(together):
                                    s0 = ti.Vector([ti.f32(0.0) for _ in heads])
                                    s1 = ti.Vector([ti.f32(0.0) for _ in heads])
                                    for d in range(D):
                                        x0, x1 = value(k[k0 + k_inner(d)]), value(k[k1 + k_inner(d)])
                                        for g in ti.static(heads):
                                            s0[g - heads[0]] += x0 * qs[g * D + d]
                                            s1[g - heads[0]] += x1 * qs[g * D + d]
                                    y0, y1 = ti.f32(1.0), ti.f32(1.0)
                                    if ti.static(c.scale != ""):
                                        y0 = scale_value(k_scale[scale_at + j * where[P.scale_step]])
                                        y1 = scale_value(k_scale[scale_at + j1 * where[P.scale_step]])
                                    for g in ti.static(heads):
                                        sc[g][j0 + j] = score(s0[g - heads[0]] * y0, factors)
                                        sc[g][j0 + j + 1] = score(s1[g - heads[0]] * y1, factors)
                        j0 += near
                    if ti.static(c.masked):
                        for j in range(n):
                            for g in ti.static(range(R)):
                                if not visible(ti.min(row0 + g, rows - 1) // c.group, c0 + j, seen, which):
                                    sc[g][j] = MASKED
                    for g in ti.static(range(R)):
                        top = ordered(m[g])
                        for j in range(n):
                            top = ti.max(top, ordered(sc[g][j]))
                        high = ti.bit_cast(top ^ ((top >> 31) & 0x7FFFFFFF), ti.f32)
                        if high > m[g]:
                            shrink = exp2(m[g] - high)
                            m[g] = high
                            l[g] = l[g] * shrink
                            for e in ti.static(range(NS)):
                                for d in range(STRIP):
                                    acc[g * NS + e][d] = acc[g * NS + e][d] * shrink
                        total = ti.f32(0.0)
                        for j in range(n):
                            p = exp2(sc[g][j] - high)
                            if ti.static(c.masked or c.place == "table"):
                                p = ti.select(sc[g][j] > SEEN, p, ti.f32(0.0))
                            sc[g][j] = p
                            total += p
                        l[g] = l[g] + total
                    j0 = 0
                    while j0 < n:
                        found = run(b, c0 + j0, seen, table, where, which)
                        slot, near = found[0], ti.min(found[1], n - j0)
                        if slot >= 0:
                            base = v_head + v_place(slot, where)
                            scale_at = where[P.v_scale_first] + scale_head + scale_place(slot, where)
                            for pair in range((near + 1) // 2):
                                j = pair * 2
                                j1 = ti.min(j + 1, near - 1)
                                v0, v1 = base + j * where[P.v_step], base + j1 * where[P.v_step]
                                y0, y1 = ti.f32(1.0), ti.select(j1 > j, ti.f32(1.0), ti.f32(0.0))
                                if ti.static(c.scale != ""):
                                    y0 = scale_value(v_scale[scale_at + j * where[P.scale_step]])
                                    y1 = y1 * scale_value(v_scale[scale_at + j1 * where[P.scale_step]])
                                for heads in ti.static(together):
                                    p0 = ti.Vector([sc[g][j0 + j] * y0 for g in heads])
                                    p1 = ti.Vector([sc[g][j0 + j1] * y1 for g in heads])
                                    for e in ti.static(range(NS)):
                                        for d in range(strips[e][1]):
                                            x0 = value(v[v0 + v_inner(e * STRIP + d)])
                                            x1 = value(v[v1 + v_inner(e * STRIP + d)])
                                            for g in ti.static(heads):
                                                acc[g * NS + e][d] = (
                                                    acc[g * NS + e][d] + p0[g - heads[0]] * x0 + p1[g - heads[0]] * x1
                                                )
                        j0 += near
                for g in ti.static(range(R)):
                    r = row0 + g
                    if r < rows:
                        inverse = ti.f32(0.0)
                        if l[g] > 0.0:
                            inverse = ti.f32(1.0) / l[g]
                        at, lse_at = 0, 0
                        if ti.static(parts):
                            lse_at = (bh * rows + r) * which[N.splits] + split
                            at = lse_at * DV
                        else:
                            at = row_address(b, h, r, c.group, which[N.queries], where[P.out_first],
                                             where[P.out_batch], where[P.out_head], where[P.out_query])  # fmt: skip
                            lse_at = (bh * c.group + r % c.group) * which[N.queries] + r // c.group
                        for e in ti.static(range(NS)):
                            for d in range(strips[e][1]):
                                store(out, at + e * STRIP + d, ti.Vector([acc[g * NS + e][d] * inverse]), ti.f32(1.0))
                        put_lse(lse, lse_at, m[g], l[g], factors)

    return attend


make_attend_cpu.fast_math = True
