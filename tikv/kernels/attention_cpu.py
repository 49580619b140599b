"""Decode attention on CPU: a worker thread walks over tasks, `CHUNK` keys at a time, its state in memory of its own.

Taichi gives a CPU thread at least 512 iterations, so the loop has that many for each worker, and one of them works. The
loops over keys and widths are real functions: those take the arrays' pointers into registers, so that LLVM vectorises
them, as long as it meets no constant between an array's index and the loop's: widths and strides are arguments.
"""

import zlib

from tikv.kernels.address import make_inner
from tikv.kernels.attention import (
    ELEMENT,
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
    make_value,
    make_visible,
    row_address,
)
from tikv.kernels.codec import SIZE, WORD, make_bits_to_f32, make_load, make_store
from tikv.kernels.lanes import LEAST_ITERATIONS
from tikv.runtime import ti

CHUNK = 64  # keys whose scores are held at once
ROW = CHUNK + 16  # floats between the scores of two query rows: the last pair may write one too many
LINE = 16  # floats of a cache line


def band_of(rows):
    """Query rows whose sums are in registers at once; bands of one width cover all rows."""
    bands = -(-rows // 4)
    return -(-rows // bands)


def work_floats(rows, width, width_v):
    """Floats of a worker's memory: queries, accumulators, scores, maxima and sums of its rows, in whole cache lines."""
    padded = -(-rows // band_of(rows)) * band_of(rows)
    return -(-padded * (width + width_v + ROW + 2) // LINE) * LINE + LINE


@ti.func
def ordered(x):
    """The bits of a float as an integer that orders as the floats do; LLVM vectorises its maximum."""
    i = ti.bit_cast(x, ti.i32)
    return i ^ ((i >> 31) & 0x7FFFFFFF)


def make_attend_cpu(workers, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, work, where, which, factors) on CPU.

    Not cached: its real functions belong to one Taichi program.

    Args:
        workers: threads; 1 runs in the calling thread.
        parts: whether out and lse take the parts of splits, row by row and split by split, or the result.
        c: the other `Choices`; widths are taken from there too.

    `work` holds `work_floats` floats for each worker.
    """
    KV = ti.types.ndarray(dtype=ELEMENT[c.cache], ndim=1)
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if c.scale == "f16" else ti.u32, ndim=1)
    WORK = ti.types.ndarray(dtype=ti.f32, ndim=1)
    seen_by, run, visible, put_lse = make_seen(c), make_run(c), make_visible(c), make_put_lse(parts)
    score = make_score(c)
    k_place, v_place = make_place(c, P.k_step, P.k_block), make_place(c, P.v_step, P.v_block)
    scale_place = make_place(c, P.scale_step, P.scale_block)
    k_inner, v_inner = make_inner(*c.k_inner), make_inner(*c.v_inner)
    value = make_value(c.cache)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cpu")
    B = band_of(c.rows)
    bands = -(-c.rows // B)
    R = bands * B
    size = work_floats(c.rows, c.width, c.width_v)
    iterations = workers * LEAST_ITERATIONS if workers > 1 else 1
    every = LEAST_ITERATIONS if workers > 1 else 1
    uid = zlib.crc32(repr((workers, parts, c)).encode()) >> 1

    @ti.real_func
    def dots(k: KV, work: WORK, base: ti.i32, step: ti.i32, near: ti.i32, qs: ti.i32, to: ti.i32, width: ti.i32,
             row: ti.i32, number: ti.i32):  # fmt: skip
        """Scores of a band's rows with keys side by side, two keys at a time."""
        for pair in range((near + 1) // 2):
            j = pair * 2
            j1 = ti.min(j + 1, near - 1)
            k0, k1 = base + j * step, base + j1 * step
            s0 = ti.Vector([ti.f32(0.0) for _ in range(B)])
            s1 = ti.Vector([ti.f32(0.0) for _ in range(B)])
            for d in range(width):
                x0, x1 = value(k[k0 + k_inner(d)]), value(k[k1 + k_inner(d)])
                for g in ti.static(range(B)):
                    s0[g] += x0 * work[qs + g * width + d]
                    s1[g] += x1 * work[qs + g * width + d]
            for g in ti.static(range(B)):
                work[to + g * row + j] = s0[g]
                work[to + g * row + j + 1] = s1[g]

    @ti.real_func
    def rescale(scales: SC, work: WORK, at: ti.i32, step: ti.i32, near: ti.i32, to: ti.i32, row: ti.i32,
                number: ti.i32):  # fmt: skip
        """Scores, or weights, times the scales of their keys."""
        for j in range(near):
            y = scale_value(scales[at + j * step])
            for g in ti.static(range(R)):
                work[to + g * row + j] = work[to + g * row + j] * y

    @ti.real_func
    def logits(work: WORK, to: ti.i32, near: ti.i32, factor: ti.f32, cap: ti.f32, number: ti.i32):
        for j in range(near):
            work[to + j] = score(work[to + j], factor, cap)

    @ti.real_func
    def largest(work: WORK, at: ti.i32, n: ti.i32, number: ti.i32) -> ti.f32:
        top = ti.i32(-0x7FFFFFFF)
        for j in range(n):
            top = ti.max(top, ordered(work[at + j]))
        return ti.bit_cast(top ^ ((top >> 31) & 0x7FFFFFFF), ti.f32)

    @ti.real_func
    def weigh(work: WORK, at: ti.i32, n: ti.i32, high: ti.f32, number: ti.i32) -> ti.f32:
        """Turn the logits of a row into weights; their sum."""
        total = ti.f32(0.0)
        for j in range(n):
            x = work[at + j]
            p = exp2(x - high)
            if ti.static(c.masked or c.place == "table"):
                p = ti.select(x > ti.f32(SEEN), p, ti.f32(0.0))
            work[at + j] = p
            total += p
        return total

    @ti.real_func
    def clear(work: WORK, at: ti.i32, width: ti.i32, number: ti.i32):
        for d in range(width):
            work[at + d] = 0.0

    @ti.real_func
    def shrink(work: WORK, at: ti.i32, factor: ti.f32, width: ti.i32, number: ti.i32):
        for d in range(width):
            work[at + d] = work[at + d] * factor

    @ti.real_func
    def add(v: KV, work: WORK, base: ti.i32, step: ti.i32, near: ti.i32, weights: ti.i32, to: ti.i32, width: ti.i32,
            row: ti.i32, number: ti.i32):  # fmt: skip
        """Add the values of keys side by side, weighted, to a band's accumulators, two keys at a time."""
        for pair in range((near + 1) // 2):
            j = pair * 2
            j1 = ti.min(j + 1, near - 1)
            v0, v1 = base + j * step, base + j1 * step
            only = ti.select(j1 > j, ti.f32(1.0), ti.f32(0.0))
            p0 = ti.Vector([work[weights + g * row + j] for g in range(B)])
            p1 = ti.Vector([work[weights + g * row + j1] * only for g in range(B)])
            for d in range(width):
                x0, x1 = value(v[v0 + v_inner(d)]), value(v[v1 + v_inner(d)])
                for g in ti.static(range(B)):
                    work[to + g * width + d] = work[to + g * width + d] + p0[g] * x0 + p1[g] * x1

    @ti.real_func
    def fetch(q: Q, work: WORK, at: ti.i32, to: ti.i32, width: ti.i32, number: ti.i32):
        for d in range(width):
            work[to + d] = load_q(q, at + d)[0]

    @ti.real_func
    def finish(out: OUT, work: WORK, at: ti.i32, to: ti.i32, inverse: ti.f32, width: ti.i32, number: ti.i32):
        for d in range(width):
            store(out, to + d, ti.Vector([work[at + d] * inverse]), ti.f32(1.0))

    @ti.kernel
    def attend(q: Q, k: KV, v: KV, lens: LENS, table: TABLE, k_scale: SC, v_scale: SC, out: OUT, lse: BITS, work: WORK,
               where: WHERE, which: WHICH, factors: FACTORS):  # fmt: skip
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker = i // every
            tasks = 0
            if i % every == 0:
                tasks = (which[N.tasks] - worker + workers - 1) // workers
            width, width_v, row = which[N.width], which[N.width_v], which[N.score_row]
            qs = worker * size
            acc = qs + R * width
            sc = acc + R * width_v
            maxima = sc + R * row
            sums = maxima + R
            for turn in range(tasks):
                task = turn * workers + worker
                split, rest = task % which[N.splits], task // which[N.splits]
                row0, bh = rest % which[N.row_blocks] * c.rows, rest // which[N.row_blocks]
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
                for g in range(R):
                    r = ti.min(row0 + ti.min(g, c.rows - 1), rows - 1)
                    at = row_address(b, h, r, c.group, which[N.queries], where[P.q_first], where[P.q_batch],
                                     where[P.q_head], where[P.q_query])  # fmt: skip
                    fetch(q, work, at, qs + g * width, width, uid)
                    work[maxima + g] = MASKED
                    work[sums + g] = 0.0
                clear(work, acc, R * width_v, uid)
                for chunk in range((end - begin + CHUNK - 1) // CHUNK):
                    c0 = begin + chunk * CHUNK
                    n = ti.min(CHUNK, end - c0)
                    j0 = 0
                    while j0 < n:
                        found = run(b, c0 + j0, seen, table, where, which)
                        slot, near = found[0], ti.min(found[1], n - j0)
                        if slot >= 0:
                            base = k_head + k_place(slot, where)
                            for band in range(bands):
                                dots(k, work, base, where[P.k_step], near, qs + band * B * width,
                                     sc + band * B * row + j0, width, row, uid)  # fmt: skip
                            if ti.static(c.scale != ""):
                                at = where[P.k_scale_first] + scale_head + scale_place(slot, where)
                                rescale(k_scale, work, at, where[P.scale_step], near, sc + j0, row, uid)
                            for g in range(R):
                                logits(work, sc + g * row + j0, near, factors[F.scale], factors[F.cap], uid)
                        else:
                            for j in range(near):
                                for g in range(R):
                                    work[sc + g * row + j0 + j] = MASKED
                        j0 += near
                    for g in range(R):
                        if ti.static(c.masked):
                            t = ti.min(row0 + g, rows - 1) // c.group
                            for j in range(n):
                                if not visible(t, c0 + j, seen, which):
                                    work[sc + g * row + j] = MASKED
                        high = largest(work, sc + g * row, n, uid)
                        low = work[maxima + g]
                        if high > low:
                            by = exp2(low - high)
                            work[maxima + g] = high
                            work[sums + g] = work[sums + g] * by
                            shrink(work, acc + g * width_v, by, width_v, uid)
                        work[sums + g] = work[sums + g] + weigh(work, sc + g * row, n, ti.max(high, low), uid)
                    j0 = 0
                    while j0 < n:
                        found = run(b, c0 + j0, seen, table, where, which)
                        slot, near = found[0], ti.min(found[1], n - j0)
                        if slot >= 0:
                            base = v_head + v_place(slot, where)
                            if ti.static(c.scale != ""):
                                at = where[P.v_scale_first] + scale_head + scale_place(slot, where)
                                rescale(v_scale, work, at, where[P.scale_step], near, sc + j0, row, uid)
                            for band in range(bands):
                                add(v, work, base, where[P.v_step], near, sc + band * B * row + j0,
                                    acc + band * B * width_v, width_v, row, uid)  # fmt: skip
                        j0 += near
                for g in range(c.rows):
                    r = row0 + g
                    if r < rows:
                        inverse = ti.f32(0.0)
                        if work[sums + g] > 0.0:
                            inverse = ti.f32(1.0) / work[sums + g]
                        at, lse_at = 0, 0
                        if ti.static(parts):
                            lse_at = (bh * rows + r) * which[N.splits] + split
                            at = lse_at * width_v
                        else:
                            at = row_address(b, h, r, c.group, which[N.queries], where[P.out_first],
                                             where[P.out_batch], where[P.out_head], where[P.out_query])  # fmt: skip
                            lse_at = (bh * c.group + r % c.group) * which[N.queries] + r // c.group
                        finish(out, work, acc + g * width_v, at, inverse, width_v, uid)
                        put_lse(lse, lse_at, work[maxima + g], work[sums + g], factors)

    return attend


make_attend_cpu.fast_math = True
