"""Decode attention on CPU: a worker thread walks over tasks, `CHUNK` keys at a time, its state in memory of its own.

Taichi gives a CPU thread at least 512 iterations, so the loop has that many for each worker, and one of them works. The
loops over keys and widths are real functions: those take the arrays' pointers into registers, so that LLVM vectorises
them. Where the keys of a chunk lie is listed first: pages and rings are read by the same loops as a row of keys is.
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
    make_bounds,
    make_place,
    make_put_lse,
    make_run,
    make_score,
    make_seen,
    make_target,
    make_value,
    make_within,
    row_address,
)
from tikv.kernels.codec import SIZE, WORD, make_load, make_store
from tikv.kernels.lanes import LEAST_ITERATIONS
from tikv.runtime import ti

CHUNK = 64  # keys whose scores are held at once
ROW = CHUNK + 16  # floats between two rows of numbers of a chunk's keys: pairs may write one more
LISTS = 6  # such rows of a worker: where K, V and scales lie, the keys' indices, and the scales of K and V
BY_TOKENS, BY_PAGES = 1, 2  # whose heads lie side by side; 0: those of all keys apart
LINE_BYTES = 64  # of a cache line
LINE = LINE_BYTES // 4  # its floats
MOST_FLOATS = 12288  # of the state of heads that a task reads together: what a core's caches keep beside the keys


def band_of(rows):
    """Query rows whose sums are in registers at once; bands of one width cover all rows."""
    bands = -(-rows // 4)
    return -(-rows // bands)


def head_floats(rows, width, width_v):
    """Floats that a KV head takes of a worker's memory: queries, accumulators, scores, maxima and sums of its rows."""
    padded = -(-rows // band_of(rows)) * band_of(rows)
    return padded * (width + width_v + ROW + 2)


def work_floats(rows, width, width_v, heads):
    """Floats of a worker's memory, in whole cache lines."""
    return -(-(heads * head_floats(rows, width, width_v)) // LINE) * LINE + LISTS * ROW


def heads_together(rows, width, width_v, heads):
    """KV heads that a task reads together where those of a token, or of a page, lie side by side in memory."""
    most = max(1, min(heads, MOST_FLOATS // head_floats(rows, width, width_v)))
    return -(-heads // -(-heads // most))


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
        c: the other `Choices`.

    `work` holds `work_floats` floats for each worker.
    """
    KV = ti.types.ndarray(dtype=ELEMENT[c.cache], ndim=1)
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ELEMENT[c.scale or "f32"], ndim=1)
    WORK = ti.types.ndarray(dtype=ti.f32, ndim=1)
    seen_by, run, target, put_lse = make_seen(c), make_run(c), make_target(parts, c), make_put_lse(parts)
    bounds, within = make_bounds(c), make_within(c)
    score = make_score(c)
    k_place, v_place = make_place(c, P.k_step, P.k_block), make_place(c, P.v_step, P.v_block)
    scale_place = make_place(c, P.scale_step, P.scale_block)
    k_inner, v_inner = make_inner(*c.k_inner), make_inner(*c.v_inner)
    value = make_value(c.cache)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cpu")
    D, DV = c.width, c.width_v
    NEAR = min(c.page or CHUNK, CHUNK)
    PER_LINE = LINE_BYTES // SIZE[c.cache]
    B = band_of(c.rows)
    bands = -(-c.rows // B)
    R = bands * B
    iterations = workers * LEAST_ITERATIONS if workers > 1 else 1
    every = LEAST_ITERATIONS if workers > 1 else 1
    uid = zlib.crc32(repr((workers, parts, c)).encode()) >> 1

    @ti.real_func
    def line(work: WORK, to: ti.i32, n: ti.i32, first: ti.i32, step: ti.i32, number: ti.i32):
        """Note where keys side by side lie: integers, kept in the bits of floats."""
        for j in range(n):
            work[to + j] = ti.bit_cast(first + j * step, ti.f32)

    @ti.real_func
    def touch(rows: KV, work: WORK, lie: ti.i32, first: ti.i32, head: ti.i32, heads: ti.i32, span: ti.i32, n: ti.i32,
              to: ti.i32, number: ti.i32):  # fmt: skip
        """Load a number of each cache line of the listed keys, in the order of memory, several pages at a time.

        Memory is slow to answer, and a core fetches ahead only what lies in order: pages are waited for together.
        """
        for h in range(heads):
            for j in range(ti.min(NEAR, n)):
                total = ti.f32(0.0)
                for line in range((span + PER_LINE - 1) // PER_LINE):
                    for page in range((n - j + NEAR - 1) // NEAR):
                        at = ti.bit_cast(work[lie + page * NEAR + j], ti.i32) + first + h * head
                        total += value(rows[at + line * PER_LINE])
                work[to + j] = total

    @ti.real_func
    def dots(k: KV, work: WORK, lie: ti.i32, first: ti.i32, head: ti.i32, n: ti.i32, near: ti.i32, heads: ti.i32,
             qs: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        """Scores of all rows with the keys that `lie` lists, two at a time; `near` keys of a head, then of the next."""
        for group in range((n + near - 1) // near):
            for h in range(heads):
                for band in range(bands):
                    for pair in range((ti.min(near, n - group * near) + 1) // 2):
                        j = group * near + pair * 2
                        k0 = ti.bit_cast(work[lie + j], ti.i32) + first + h * head
                        k1 = ti.bit_cast(work[lie + j + 1], ti.i32) + first + h * head
                        q0 = qs + (h * R + band * B) * D
                        at = to + (h * R + band * B) * ROW + j
                        s0 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                        s1 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                        for d in range(D):
                            x0, x1 = value(k[k0 + k_inner(d)]), value(k[k1 + k_inner(d)])
                            for g in ti.static(range(B)):
                                s0[g] += x0 * work[q0 + g * D + d]
                                s1[g] += x1 * work[q0 + g * D + d]
                        for g in ti.static(range(B)):
                            work[at + g * ROW] = s0[g]
                            work[at + g * ROW + 1] = s1[g]

    @ti.real_func
    def gather(scales: SC, work: WORK, lie: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):
        """The scales of the keys, of one head."""
        for j in range(n):
            work[to + j] = ti.cast(scales[ti.bit_cast(work[lie + j], ti.i32) + first], ti.f32)

    @ti.real_func
    def logits(work: WORK, at: ti.i32, n: ti.i32, factor: ti.f32, cap: ti.f32, scales: ti.i32, index: ti.i32,
               low: ti.i32, high: ti.i32, fixed: ti.i32, upto: ti.i32, number: ti.i32) -> ti.f32:  # fmt: skip
        """Turn the scores of a row into logits, or `MASKED`; the largest."""
        top = ti.i32(-0x7FFFFFFF)
        for j in range(n):
            x = work[at + j]
            if ti.static(c.scale != ""):
                x = x * work[scales + j]
            x = score(x, factor, cap)
            if ti.static(c.masked):
                i = ti.bit_cast(work[index + j], ti.i32)
                x = ti.select(within(i, low, high, fixed, upto) > 0, x, ti.f32(MASKED))
            work[at + j] = x
            top = ti.max(top, ordered(x))
        return ti.bit_cast(top ^ ((top >> 31) & 0x7FFFFFFF), ti.f32)

    @ti.real_func
    def weigh(work: WORK, at: ti.i32, n: ti.i32, high: ti.f32, number: ti.i32) -> ti.f32:
        """Turn the logits of a row into weights; their sum."""
        total = ti.f32(0.0)
        for j in range(n):
            x = work[at + j]
            p = exp2(x - high)
            if ti.static(c.masked):
                p = ti.select(x > ti.f32(SEEN), p, ti.f32(0.0))
            total += p
            work[at + j] = p
        return total

    @ti.real_func
    def unseen(work: WORK, at: ti.i32, n: ti.i32, number: ti.i32) -> ti.i32:
        """How many keys a row does not see, by its logits."""
        total = 0
        for j in range(n):
            total += ti.select(work[at + j] > ti.f32(SEEN), 0, 1)
        return total

    @ti.real_func
    def times(work: WORK, at: ti.i32, n: ti.i32, scales: ti.i32, number: ti.i32):
        """Multiply the weights of a row by the scales of V; a loop of its own, for LLVM to vectorise it."""
        for j in range(n):
            p = work[at + j]
            weight = p * work[scales + j]
            if ti.static(c.masked):
                weight = ti.select(p > 0.0, weight, ti.f32(0.0))
            work[at + j] = weight

    @ti.real_func
    def clear(work: WORK, at: ti.i32, n: ti.i32, number: ti.i32):
        for d in range(n):
            work[at + d] = 0.0

    @ti.real_func
    def shrink(work: WORK, at: ti.i32, factor: ti.f32, number: ti.i32):
        for d in range(DV):
            work[at + d] = work[at + d] * factor

    def make_add(careful):
        """add(...): add the values of the listed keys, weighted, to the accumulators, in the order of `dots`.

        Careful: what weighs nothing is left out, since what a query does not see may be NaN.
        """

        @ti.real_func
        def add(v: KV, work: WORK, lie: ti.i32, first: ti.i32, head: ti.i32, n: ti.i32, near: ti.i32, heads: ti.i32,
                weights: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
            for group in range((n + near - 1) // near):
                for h in range(heads):
                    for band in range(bands):
                        for pair in range((ti.min(near, n - group * near) + 1) // 2):
                            j = group * near + pair * 2
                            v0 = ti.bit_cast(work[lie + j], ti.i32) + first + h * head
                            v1 = ti.bit_cast(work[lie + j + 1], ti.i32) + first + h * head
                            at = weights + (h * R + band * B) * ROW + j
                            a0 = to + (h * R + band * B) * DV
                            p0 = ti.Vector([work[at + g * ROW] for g in range(B)])
                            p1 = ti.Vector([work[at + g * ROW + 1] for g in range(B)])
                            for d in range(DV):
                                x0, x1 = value(v[v0 + v_inner(d)]), value(v[v1 + v_inner(d)])
                                for g in ti.static(range(B)):
                                    y0, y1 = p0[g] * x0, p1[g] * x1
                                    if ti.static(careful):
                                        y0 = ti.select(p0[g] > 0.0, y0, ti.f32(0.0))
                                        y1 = ti.select(p1[g] > 0.0, y1, ti.f32(0.0))
                                    work[a0 + g * DV + d] = work[a0 + g * DV + d] + y0 + y1

        return add

    add = make_add(False)
    add_seen = make_add(True) if c.masked else add

    @ti.real_func
    def fetch(q: Q, work: WORK, at: ti.i32, to: ti.i32, number: ti.i32):
        for d in range(D):
            work[to + d] = load_q(q, at + d)[0]

    @ti.real_func
    def finish(out: OUT, work: WORK, at: ti.i32, to: ti.i32, inverse: ti.f32, number: ti.i32):
        for d in range(DV):
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
            most = which[N.heads_together]
            lists = worker * which[N.work_floats]
            k_scales, v_scales, index_of = lists + 4 * ROW, lists + 5 * ROW, lists + 3 * ROW
            qs = lists + LISTS * ROW
            acc = qs + most * R * D
            sc = acc + most * R * DV
            maxima = sc + most * R * ROW
            sums = maxima + most * R
            head_blocks = (which[N.heads] + most - 1) // most
            for turn in range(tasks):
                task = turn * workers + worker
                split, rest = task % which[N.splits], task // which[N.splits]
                row0, rest_of = rest % which[N.row_blocks] * c.rows, rest // which[N.row_blocks]
                b, h0 = rest_of // head_blocks, rest_of % head_blocks * most
                heads = ti.min(most, which[N.heads] - h0)
                rows = which[N.queries] * c.group
                seen = seen_by(b, lens, where, which)
                count = seen[S.count]
                share = (count + which[N.splits] * CHUNK - 1) // (which[N.splits] * CHUNK) * CHUNK
                index = split * share
                end = ti.min(count, index + share)
                k_first = where[P.k_first] + b * where[P.k_batch] + h0 * where[P.k_head]
                v_first = where[P.v_first] + b * where[P.v_batch] + h0 * where[P.v_head]
                scale_first = b * where[P.scale_batch] + h0 * where[P.scale_head]
                for z in range(heads * R):
                    r = ti.min(row0 + ti.min(z % R, c.rows - 1), rows - 1)
                    at = row_address(b, h0 + z // R, r, c.group, which[N.queries], where[P.q_first], where[P.q_batch],
                                     where[P.q_head], where[P.q_query])  # fmt: skip
                    fetch(q, work, at, qs + z * D, uid)
                    work[maxima + z] = MASKED
                    work[sums + z] = 0.0
                clear(work, acc, heads * R * DV, uid)
                while index < end:
                    n = 0
                    while index < end and n < CHUNK:
                        found = run(b, index, seen, table, where, which)
                        slot, near = found[0], ti.min(ti.min(found[1], end - index), CHUNK - n)
                        if slot >= 0:
                            line(work, lists + n, near, k_place(slot, where), where[P.k_step], uid)
                            line(work, lists + ROW + n, near, v_place(slot, where), where[P.v_step], uid)
                            if ti.static(c.scale != ""):
                                line(work, lists + 2 * ROW + n, near, scale_place(slot, where), where[P.scale_step],
                                     uid)  # fmt: skip
                            if ti.static(c.masked):
                                line(work, index_of + n, near, index, 1, uid)
                            n += near
                        index += near
                    if n > 0:
                        work[lists + n] = work[lists + n - 1]
                        work[lists + ROW + n] = work[lists + ROW + n - 1]
                        if which[N.side] == BY_TOKENS:
                            touch(k, work, lists, k_first, 0, 1, (heads - 1) * where[P.k_head] + D, n, sc, uid)
                        elif which[N.side] == BY_PAGES:
                            touch(k, work, lists, k_first, where[P.k_head], heads, D, n, sc, uid)
                        dots(k, work, lists, k_first, where[P.k_head], n, which[N.near], heads, qs, sc, uid)
                        hidden = 0
                        for h in range(heads):
                            if ti.static(c.scale != ""):
                                at = scale_first + h * where[P.scale_head]
                                gather(k_scale, work, lists + 2 * ROW, where[P.k_scale_first] + at, n, k_scales, uid)
                                gather(v_scale, work, lists + 2 * ROW, where[P.v_scale_first] + at, n, v_scales, uid)
                            for g in range(R):
                                z = h * R + g
                                t = ti.min(row0 + g, rows - 1) // c.group
                                sees = bounds(t, seen, which)
                                high = logits(work, sc + z * ROW, n, factors[F.scale], factors[F.cap], k_scales,
                                              index_of, sees[0], sees[1], sees[2], sees[3], uid)  # fmt: skip
                                if ti.static(c.masked):
                                    hidden += unseen(work, sc + z * ROW, n, uid)
                                low = work[maxima + z]
                                if high > low:
                                    by = exp2(low - high)
                                    work[maxima + z] = high
                                    work[sums + z] = work[sums + z] * by
                                    shrink(work, acc + z * DV, by, uid)
                                found = weigh(work, sc + z * ROW, n, ti.max(high, low), uid)
                                work[sums + z] = work[sums + z] + found
                                if ti.static(c.scale != ""):
                                    times(work, sc + z * ROW, n, v_scales, uid)
                                if n % 2 == 1:  # the last key is added twice, by half each: 0 times infinity is NaN
                                    half = work[sc + z * ROW + n - 1] * 0.5
                                    work[sc + z * ROW + n - 1] = half
                                    work[sc + z * ROW + n] = half
                        if which[N.side] == BY_TOKENS:
                            span = (heads - 1) * where[P.v_head] + DV
                            touch(v, work, lists + ROW, v_first, 0, 1, span, n, k_scales, uid)
                        elif which[N.side] == BY_PAGES:
                            touch(v, work, lists + ROW, v_first, where[P.v_head], heads, DV, n, k_scales, uid)
                        if hidden == 0:
                            add(v, work, lists + ROW, v_first, where[P.v_head], n, which[N.near], heads, sc, acc, uid)
                        elif ti.static(c.masked):
                            add_seen(v, work, lists + ROW, v_first, where[P.v_head], n, which[N.near], heads, sc, acc,
                                     uid)  # fmt: skip
                for z in range(heads * R):
                    r = row0 + z % R
                    if z % R < c.rows and r < rows:
                        inverse = ti.f32(0.0)
                        if work[sums + z] > 0.0:
                            inverse = ti.f32(1.0) / work[sums + z]
                        bh = b * which[N.heads] + h0 + z // R
                        at, lse_at = target(bh, r, split, where, which)
                        finish(out, work, acc + z * DV, at, inverse, uid)
                        put_lse(lse, lse_at, work[maxima + z], work[sums + z], factors)

    return attend


make_attend_cpu.fast_math = True
