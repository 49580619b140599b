"""Decode attention on CUDA in registers: a few neighbouring threads read a key together, word by word.

The threads that share a key, its lanes, hold the same columns of K, V, queries and result, so a pass over the keys has
no barrier and no shared memory: q.k is summed by shuffles, by transposing: each step halves the query rows that a lane
keeps, until it owns one row's score, takes one exponential, and hands the weight to its neighbours. A few keys are in
flight in each lane, and the result is rescaled only when a maximum grows. The groups of a block merge once, at the end.
"""

from typing import NamedTuple

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
    across_lanes,
    make_place,
    make_put_lse,
    make_run,
    make_score,
    make_seen,
    make_target,
    make_visible,
    row_address,
)
from tikv.kernels.codec import SIZE, WORD, make_bits_to_f32, make_decode, make_load, make_store
from tikv.kernels.lanes import BLOCK
from tikv.runtime import ti

BITS = 64  # of a word
WIDEST = 256  # head widths above need more registers than there are
ALL = 0xFFFFFFFF
LN2 = 0.6931471805599453


class Shape(NamedTuple):
    """How the threads of a block share the work."""

    lanes: int  # threads that share a key
    keys: int  # in flight in each lane
    resident: int  # blocks that a multiprocessor holds at once; what registers a thread may use follows


def shape_of(width: int, unit: int, rows: int) -> Shape:
    """The shape for heads of a width, elements in a word and query rows of a task, by what was fastest on an H200.

    A lane holds as many queries and results as registers allow, some 32 of each. Narrow words want more keys in flight.
    """
    each = max(unit, 16 if unit == 8 and rows <= 2 else 8 if rows <= 4 else 4)
    lanes = 8
    while lanes * each < width and lanes < 32:
        lanes *= 2
    words = -(-width // (unit * lanes))
    fits = rows_kept(rows) * words * unit <= 32
    return Shape(lanes, 8 if fits and words == 1 and rows > 2 else 4, 4 if fits and (unit < 8 or rows <= 2) else 3)


def rows_kept(rows: int) -> int:
    """Query rows that a task computes: so many that they halve. The ones too many are never stored."""
    return 1 << (rows - 1).bit_length()


@ti.func
def exp2(x):
    """2 ** x by the exponential unit."""
    return ti.exp(x * ti.f32(LN2))


def make_attend_lanes(shape, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors) on CUDA.

    K and V in words of 64 bits, rows of V in one piece. The extent of q is tasks * `BLOCK`. Choices as in
    `attention_cpu.make_attend_cpu`.
    """
    KV = ti.types.ndarray(dtype=WORD[BITS], ndim=1)
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    LSE = ti.types.ndarray(dtype=ti.u32, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if c.scale == "f16" else ti.u32, ndim=1)
    seen_by, run, visible = make_seen(c), make_run(c), make_visible(c)
    score, target, put_lse = make_score(c), make_target(parts, c), make_put_lse(parts)
    k_place, v_place = make_place(c, P.k_step, P.k_block), make_place(c, P.v_step, P.v_block)
    scale_place = make_place(c, P.scale_step, P.scale_block)
    k_inner = make_inner(*c.k_inner)
    decode = make_decode(c.cache, BITS)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cuda")
    L, U, UNIT, D, DV = shape.lanes, shape.keys, c.unit, c.width, c.width_v
    groups = BLOCK // L
    k_words, v_words = D // UNIT, DV // UNIT
    KW, VW = -(-k_words // L), -(-v_words // L)  # words of a lane
    E, EV = KW * UNIT, VW * UNIT
    R = rows_kept(c.rows)
    halvings = R.bit_length() - 1
    apart = [L >> (n + 1) for n in range(halvings)]  # lanes that swap halves of their rows
    kept = [R >> (n + 1) for n in range(halvings)]
    rest = [L >> n for n in range(halvings + 1, L.bit_length())]  # lanes that then only add
    # How far the lane is that owns the row which this lane keeps at g.
    owner = [sum(a for a, k in zip(apart, kept, strict=True) if g & k) for g in range(R)]
    columns = -(-DV // BLOCK)

    @ti.func
    def halved(s):
        """The sum over the lanes of the row that this lane owns, its first."""
        for n in ti.static(range(halvings)):
            for g in ti.static(range(kept[n])):
                s[g] = s[g] + across_lanes(s[ti.static(g + kept[n])], ti.static(apart[n]))
        total = s[0]
        for step in ti.static(rest):
            total = total + across_lanes(total, step)
        return total

    @ti.func
    def fetch(first, end, lane, b, k_head, v_head, scale_head, kw: ti.template(), vw: ti.template(),
              alive: ti.template(), k_factor: ti.template(), v_factor: ti.template(), seen, k: ti.template(),
              v: ti.template(), table: ti.template(), k_scale: ti.template(), v_scale: ti.template(), where,
              which):  # fmt: skip
        """Start to read this lane's words of the next keys; behind the end the last's, which do not count."""
        for u in ti.static(range(U)):
            index = first + u * groups
            slot = run(b, ti.min(index, end - 1), seen, table, where, which)[0]
            alive[u] = ti.cast(index < end, ti.i32)
            if ti.static(c.place == "table"):
                alive[u] = ti.select(slot >= 0, alive[u], 0)
                slot = ti.max(slot, 0)
            if ti.static(c.scale != ""):
                at = scale_head + scale_place(slot, where)
                k_factor[u] = scale_value(k_scale[where[P.k_scale_first] + at])
                v_factor[u] = scale_value(v_scale[where[P.v_scale_first] + at])
            k_row = k_head + k_place(slot, where)
            for w in ti.static(range(KW)):
                kw[u * KW + w] = k[k_row + k_inner(ti.min(w * L + lane, k_words - 1))]
                if ti.static((w + 1) * L > k_words):
                    kw[u * KW + w] = ti.select(w * L + lane < k_words, kw[u * KW + w], ti.u64(0))
            v_row = v_head + v_place(slot, where)
            for w in ti.static(range(VW)):
                vw[u * VW + w] = v[v_row + ti.min(w * L + lane, v_words - 1)]
                # What does not count may be infinite: the last key's again, or another sequence's page.
                vw[u * VW + w] = ti.select(alive[u] != 0, vw[u * VW + w], ti.u64(0))

    @ti.func
    def work(thread, task, q: ti.template(), k: ti.template(), v: ti.template(), lens: ti.template(),
             table: ti.template(), k_scale: ti.template(), v_scale: ti.template(), out: ti.template(),
             lse: ti.template(), where, which, factors):  # fmt: skip
        split, others = task % which[N.splits], task // which[N.splits]
        row0, bh = others % which[N.row_blocks] * c.rows, others // which[N.row_blocks]
        b, h = bh // which[N.heads], bh % which[N.heads]
        rows = which[N.queries] * c.group
        seen = seen_by(b, lens, where, which)
        share = (seen[S.count] + which[N.splits] - 1) // which[N.splits]
        begin = split * share
        end = ti.min(seen[S.count], begin + share)
        k_head = where[P.k_first] + b * where[P.k_batch] + h * where[P.k_head]
        v_head = where[P.v_first] + b * where[P.v_batch] + h * where[P.v_head]
        scale_head = b * where[P.scale_batch] + h * where[P.scale_head]
        lane, group = thread % L, thread // L
        # Each lane keeps the rows in an order of its own, row g ^ mine at g: what is kept when rows are halved is then
        # the first half in every lane, and what a lane wants of another lies there at the same place.
        mine = 0  # the row this lane owns the scores of
        for n in ti.static(range(halvings)):
            if (lane & ti.static(apart[n])) != 0:
                mine = mine + ti.static(kept[n])
        query = ti.min(row0 + mine, rows - 1) // c.group

        queries = [ti.f32(0.0) for _ in range(R * E)]
        for g in ti.static(range(R)):
            at = row_address(b, h, ti.min(row0 + (g ^ mine), rows - 1), c.group, which[N.queries], where[P.q_first],
                             where[P.q_batch], where[P.q_head], where[P.q_query])  # fmt: skip
            for w in ti.static(range(KW)):
                column = ti.min(w * L + lane, k_words - 1) * UNIT
                for e in ti.static(range(UNIT)):
                    queries[g * E + w * UNIT + e] = load_q(q, at + column + e)[0]

        m, l = ti.f32(MASKED), ti.f32(0.0)
        acc = [ti.f32(0.0) for _ in range(R * EV)]
        kw = [ti.u64(0) for _ in range(KW * U)]
        vw = [ti.u64(0) for _ in range(VW * U)]
        alive = [0 for _ in range(U)]
        k_factor = [ti.f32(1.0) for _ in range(U)]
        v_factor = [ti.f32(1.0) for _ in range(U)]
        for turn in range((end - begin + groups * U - 1) // (groups * U)):
            here = begin + turn * groups * U + group
            fetch(here, end, lane, b, k_head, v_head, scale_head, kw, vw, alive, k_factor, v_factor, seen, k, v, table,
                  k_scale, v_scale, where, which)  # fmt: skip
            scores = [ti.f32(0.0) for _ in range(U)]
            for u in ti.static(range(U)):
                s = [ti.f32(0.0) for _ in range(R)]
                for w in ti.static(range(KW)):
                    values = decode(kw[u * KW + w])
                    for g in ti.static(range(R)):
                        for e in ti.static(range(UNIT)):
                            s[g] += values[e] * queries[g * E + w * UNIT + e]
                scores[u] = halved(s)
            high = m
            for u in ti.static(range(U)):
                found = score(scores[u] * k_factor[u], factors[F.scale], factors[F.cap])
                counts = alive[u]
                if ti.static(c.masked):
                    if not visible(query, here + u * groups, seen, which):
                        counts = 0
                scores[u] = ti.select(counts != 0, found, ti.f32(MASKED))
                high = ti.max(high, scores[u])
            if ti.simt.warp.any_nonzero(ti.u32(ALL), ti.cast(high > m, ti.i32)) != 0:
                shrink = exp2(m - high)
                m = high
                l = l * shrink
                for g in ti.static(range(R)):
                    f = shrink
                    if ti.static(g > 0):
                        f = across_lanes(shrink, ti.static(owner[g]))
                    for e in ti.static(range(EV)):
                        acc[g * EV + e] *= f
            for u in ti.static(range(U)):
                p = ti.select(scores[u] > ti.f32(SEEN), exp2(scores[u] - m), ti.f32(0.0))
                l = l + p
                weight = p * v_factor[u]
                if ti.static(c.scale != ""):  # nor may the scale of what it does not see count
                    weight = ti.select(p > ti.f32(0.0), weight, ti.f32(0.0))
                weights = [weight for _ in range(R)]
                for g in ti.static(range(1, R)):
                    weights[g] = across_lanes(weight, ti.static(owner[g]))
                for w in ti.static(range(VW)):
                    values = decode(vw[u * VW + w])
                    for g in ti.static(range(R)):
                        for e in ti.static(range(UNIT)):
                            x = values[e]
                            if ti.static(c.masked):  # what a row does not see may be infinite
                                x = ti.select(weights[g] > ti.f32(0.0), x, ti.f32(0.0))
                            acc[g * EV + w * UNIT + e] += weights[g] * x

        sums = ti.simt.block.SharedArray((R * groups * DV,), ti.f32)
        tops = ti.simt.block.SharedArray((R * groups,), ti.f32)
        totals = ti.simt.block.SharedArray((R * groups,), ti.f32)
        ti.simt.block.sync()
        for w in ti.static(range(VW)):
            word = w * L + lane
            if word < v_words:
                for g in ti.static(range(R)):
                    for e in ti.static(range(UNIT)):
                        sums[((g ^ mine) * groups + group) * DV + word * UNIT + e] = acc[g * EV + w * UNIT + e]
        tops[mine * groups + group] = m  # all lanes that own the row write the same
        totals[mine * groups + group] = l
        ti.simt.block.sync()
        for g in range(ti.min(c.rows, rows - row0)):
            r = row0 + g
            at, lse_at = target(bh, r, split, where, which)
            top, total = ti.f32(MASKED), ti.f32(0.0)
            for j in range(groups):
                top = ti.max(top, tops[g * groups + j])
            for j in range(groups):
                total = total + totals[g * groups + j] * exp2(tops[g * groups + j] - top)
            inverse = ti.f32(0.0)
            if total > ti.f32(0.0):
                inverse = ti.f32(1.0) / total
            for n in range(columns):
                d = n * BLOCK + thread
                if d < DV:
                    x = ti.f32(0.0)
                    for j in range(groups):
                        x = x + sums[(g * groups + j) * DV + d] * exp2(tops[g * groups + j] - top)
                    store(out, at + d, ti.Vector([x * inverse]), ti.f32(1.0))
            if thread == 0:
                put_lse(lse, lse_at, top, total, factors)

    @ti.kernel
    def attend(q: Q, k: KV, v: KV, lens: LENS, table: TABLE, k_scale: SC, v_scale: SC, out: OUT, lse: LSE,
               where: WHERE, which: WHICH, factors: FACTORS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            work(i % BLOCK, i // BLOCK, q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors)

    return attend


make_attend_lanes.fast_math = True
make_attend_lanes.resident = lambda shape, parts, c: shape.resident
