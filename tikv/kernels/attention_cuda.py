"""Decode attention on CUDA in registers: a few neighbouring threads read a key together, word by word.

The threads that share a key, its lanes, hold the same columns of K, V, queries and result, so a pass over the keys has
no barrier and no shared memory: q.k is summed by shuffles, by transposing: each step halves the query rows, then the
keys, that a lane keeps, until it owns the scores of one row and a few of the keys in flight, takes their exponentials,
and hands the weights to its neighbours. The result is rescaled only when a maximum grows. The groups of a block merge
once, at the end.
"""

from typing import NamedTuple

from tikv.kernels.address import make_inner
from tikv.kernels.attention import (
    FACTORS,
    INDEX,
    LOG2E,
    MASKED,
    WHERE,
    WHICH,
    F,
    N,
    P,
    S,
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
from tikv.kernels.lanes import ALL, BLOCK, across_lanes, from_lane, highest_over, sum_over
from tikv.runtime import ti

BITS = 64  # of a word
WIDEST = 256  # head widths above need more registers than there are
LN2 = 0.6931471805599453
LAG = 8.0  # how far a maximum may be behind before the result is rescaled: weights stay below e ** LAG


class Shape(NamedTuple):
    """How the threads of a block share the work."""

    lanes: int  # threads that share a key
    keys: int  # in flight in each lane
    resident: int  # blocks that a multiprocessor holds at once; what registers a thread may use follows
    owners: int  # lanes of a row that share out the scores of its keys, at most


def shape_of(width: int, unit: int, rows: int, masked: bool) -> Shape:
    """The shape for heads of a width, elements in a word and query rows of a task, by what was fastest on an H200.

    Code for keys that some rows see and others do not is long: of more keys LLVM no longer makes one function.
    """
    each = {2: 8 if rows == 1 else 4, 4: 8 if rows <= 4 else 4, 8: 16 if rows == 1 else 8}[unit]
    lanes = 8
    while lanes * each < width and lanes < 32:
        lanes *= 2
    words = -(-width // (unit * lanes))
    held = rows_kept(rows) * unit * words  # queries, and as many results
    registers = 2 * held + 4 * 8 * words  # with 8 keys' K and V
    keys = 8 if registers <= 144 else 4
    if masked:
        keys = 4 if held <= 32 else 2
    owners = 1 if unit < 8 and 2 < rows <= 4 else lanes
    return Shape(lanes, keys, 4 if registers <= 96 and rows <= 2 else 3, owners)


def rows_kept(rows: int) -> int:
    """Query rows that a task computes: so many that they halve. The ones too many are never stored."""
    return 1 << (rows - 1).bit_length()


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
    T = min(U, L >> halvings, shape.owners)  # keys that the lanes of a row share out; a lane owns one of every T
    turns = T.bit_length() - 1
    key_apart = [L >> (n + 1) for n in range(halvings, halvings + turns)]  # lanes that swap halves of their keys
    key_kept = [T >> (n + 1) for n in range(turns)]
    rest = [L >> (n + 1) for n in range(halvings + turns, L.bit_length() - 1)]  # lanes that then only add
    # How far the lane is that owns the row which this lane keeps at g.
    owner = [sum(a for a, k in zip(apart, kept, strict=True) if g & k) for g in range(R)]
    key_owner = [sum(a for a, k in zip(key_apart, key_kept, strict=True) if i & k) for i in range(T)]
    columns = -(-DV // BLOCK)

    @ti.func
    def halved(s):
        """Of the rows' sums over the lanes that swap them, this lane's row."""
        for n in ti.static(range(halvings)):
            for g in ti.static(range(kept[n])):
                s[g] = s[g] + across_lanes(s[ti.static(g + kept[n])], ti.static(apart[n]))
        return s[0]

    @ti.func
    def shared_out(t: ti.template(), lane):
        """The sums over the lanes of its row, of this lane's keys: one of every `T`, at the first's place."""
        for n in ti.static(range(turns)):
            upper = (lane & ti.static(key_apart[n])) != 0
            for o in ti.static(range(U // T)):
                for i in ti.static(range(key_kept[n])):
                    low, high = t[o * T + i], t[ti.static(o * T + i + key_kept[n])]
                    t[o * T + i] = ti.select(upper, high, low) + across_lanes(
                        ti.select(upper, low, high), ti.static(key_apart[n])
                    )
        for o in ti.static(range(U // T)):
            t[o * T] = sum_over(t[o * T], rest)

    @ti.func
    def slot_of(index, end, b, seen, table: ti.template(), where, which):
        """(slot, whether it counts) of a key; behind the end, of the last, which does not count."""
        slot = run(b, ti.min(index, end - 1), seen, table, where, which)[0]
        counts = ti.cast(index < end, ti.i32)
        if ti.static(c.place == "table"):
            counts = ti.select(slot >= 0, counts, 0)
            slot = ti.max(slot, 0)
        return slot, counts

    @ti.func
    def fetch(first, end, lane, b, k_head, v_head, kw: ti.template(), vw: ti.template(), alive: ti.template(), seen,
              k: ti.template(), v: ti.template(), table: ti.template(), where, which):  # fmt: skip
        """Start to read this lane's words of the next keys."""
        for u in ti.static(range(U)):
            slot, counts = slot_of(first + u * groups, end, b, seen, table, where, which)
            alive[u] = counts
            k_row = k_head + k_place(slot, where)
            for w in ti.static(range(KW)):
                kw[u * KW + w] = k[k_row + k_inner(ti.min(w * L + lane, k_words - 1))]
                if ti.static((w + 1) * L > k_words):
                    kw[u * KW + w] = ti.select(w * L + lane < k_words, kw[u * KW + w], ti.u64(0))
            v_row = v_head + v_place(slot, where)
            for w in ti.static(range(VW)):
                vw[u * VW + w] = v[v_row + ti.min(w * L + lane, v_words - 1)]

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
        my_key = 0  # of every T
        for n in ti.static(range(turns)):
            if (lane & ti.static(key_apart[n])) != 0:
                my_key = my_key + ti.static(key_kept[n])
        others_of_row = (thread % 32) & ~ti.static(sum(key_apart))
        holder = [others_of_row + ti.static(key_owner[i]) for i in range(T)]  # of key i of this lane's row

        # Logits are natural here, and their scale is in the queries unless a soft cap comes between.
        factor = ti.f32(1.0)
        if ti.static(not c.softcap):
            factor = factors[F.scale] * ti.f32(LN2)
        queries = [ti.f32(0.0) for _ in range(R * E)]
        for g in ti.static(range(R)):
            at = row_address(b, h, ti.min(row0 + (g ^ mine), rows - 1), c.group, which[N.queries], where[P.q_first],
                             where[P.q_batch], where[P.q_head], where[P.q_query])  # fmt: skip
            for w in ti.static(range(KW)):
                column = ti.min(w * L + lane, k_words - 1) * UNIT
                for e in ti.static(range(UNIT)):
                    queries[g * E + w * UNIT + e] = load_q(q, at + column + e)[0] * factor

        m, l = ti.f32(MASKED), ti.f32(0.0)
        acc = [ti.f32(0.0) for _ in range(R * EV)]
        kw = [ti.u64(0) for _ in range(KW * U)]
        vw = [ti.u64(0) for _ in range(VW * U)]
        alive = [0 for _ in range(U)]
        for turn in range((end - begin + groups * U - 1) // (groups * U)):
            here = begin + turn * groups * U + group
            fetch(here, end, lane, b, k_head, v_head, kw, vw, alive, seen, k, v, table, where, which)
            scores = [ti.f32(0.0) for _ in range(U)]
            for u in ti.static(range(U)):
                s = [ti.f32(0.0) for _ in range(R)]
                for w in ti.static(range(KW)):
                    values = decode(kw[u * KW + w])
                    for g in ti.static(range(R)):
                        for e in ti.static(range(UNIT)):
                            s[g] += values[e] * queries[g * E + w * UNIT + e]
                scores[u] = halved(s)
            shared_out(scores, lane)
            k_factor = [ti.f32(1.0) for _ in range(U // T)]
            v_factor = [ti.f32(1.0) for _ in range(U // T)]
            counts = [1 for _ in range(U // T)]
            for o in ti.static(range(U // T)):
                index = here + (o * T + my_key) * groups
                slot, counts[o] = slot_of(index, end, b, seen, table, where, which)
                if ti.static(c.scale != ""):
                    at = scale_head + scale_place(slot, where)
                    k_factor[o] = scale_value(k_scale[where[P.k_scale_first] + at])
                    v_factor[o] = scale_value(v_scale[where[P.v_scale_first] + at])
                if ti.static(c.masked):
                    if not visible(query, index, seen, which):
                        counts[o] = 0
            high = m
            for o in ti.static(range(U // T)):
                found = scores[o * T] * k_factor[o]
                if ti.static(c.softcap):
                    found = score(found, factors[F.scale], factors[F.cap]) * ti.f32(LN2)
                scores[o * T] = ti.select(counts[o] != 0, found, ti.f32(MASKED))
                high = ti.max(high, scores[o * T])
            if ti.simt.warp.any_nonzero(ti.u32(ALL), ti.cast(high > m + ti.f32(LAG), ti.i32)) != 0:
                high = highest_over(high, key_apart)
                shrink = ti.exp(m - high)
                m = high
                l = l * shrink
                for g in ti.static(range(R)):
                    f = shrink
                    if ti.static(g > 0):
                        f = across_lanes(shrink, ti.static(owner[g]))
                    for e in ti.static(range(EV)):
                        acc[g * EV + e] *= f
            # What does not count may be infinite: the last key's V again, or that of another sequence's page.
            if ti.static(c.place != "table" and not c.masked):
                if here - group + groups * U > end:
                    for u in ti.static(range(U)):
                        if here + u * groups >= end:
                            for w in ti.static(range(VW)):
                                vw[u * VW + w] = ti.u64(0)
            for o in ti.static(range(U // T)):
                p = ti.select(counts[o] != 0, ti.exp(scores[o * T] - m), ti.f32(0.0))
                l = l + p
                weight = p
                if ti.static(c.scale != ""):
                    weight = ti.select(counts[o] != 0, p * v_factor[o], ti.f32(0.0))
                for i in ti.static(range(T)):
                    u = ti.static(o * T + i)
                    weights = [weight for _ in range(R)]
                    if ti.static(T > 1):
                        weights[0] = from_lane(weight, holder[i])
                    for g in ti.static(range(1, R)):
                        weights[g] = across_lanes(weights[0], ti.static(owner[g]))
                    for w in ti.static(range(VW)):
                        word = vw[u * VW + w]
                        if ti.static(c.place == "table" and not c.masked):
                            word = ti.select(alive[u] != 0, word, ti.u64(0))
                        values = decode(word)
                        for g in ti.static(range(R)):
                            for e in ti.static(range(UNIT)):
                                x = values[e]
                                if ti.static(c.masked):  # what a row does not see may be infinite
                                    x = ti.select(weights[g] > ti.f32(0.0), x, ti.f32(0.0))
                                acc[g * EV + w * UNIT + e] += weights[g] * x
        l = sum_over(l, key_apart)

        sums = ti.simt.block.SharedArray((R * groups * DV,), ti.f32)
        tops = ti.simt.block.SharedArray((R * groups,), ti.f32)
        totals = ti.simt.block.SharedArray((R * groups,), ti.f32)
        ti.simt.block.sync()
        tops[mine * groups + group] = m  # all lanes that own the row write the same
        ti.simt.block.sync()
        top = m
        for j in range(groups):
            top = ti.max(top, tops[mine * groups + j])
        fade = ti.exp(m - top)  # to the maximum over the groups
        totals[mine * groups + group] = l * fade
        fades = [fade for _ in range(R)]
        for g in ti.static(range(1, R)):
            fades[g] = across_lanes(fade, ti.static(owner[g]))
        for w in ti.static(range(VW)):
            word = w * L + lane
            if word < v_words:
                for g in ti.static(range(R)):
                    for e in ti.static(range(UNIT)):
                        sums[((g ^ mine) * groups + group) * DV + word * UNIT + e] = (
                            acc[g * EV + w * UNIT + e] * fades[g]
                        )
        ti.simt.block.sync()
        for g in range(ti.min(c.rows, rows - row0)):
            r = row0 + g
            at, lse_at = target(bh, r, split, where, which)
            total = ti.f32(0.0)
            for j in range(groups):
                total = total + totals[g * groups + j]
            inverse = ti.f32(0.0)
            if total > ti.f32(0.0):
                inverse = ti.f32(1.0) / total
            for n in range(columns):
                d = n * BLOCK + thread
                if d < DV:
                    x = ti.f32(0.0)
                    for j in range(groups):
                        x = x + sums[(g * groups + j) * DV + d]
                    store(out, at + d, ti.Vector([x * inverse]), ti.f32(1.0))
            if thread == 0:
                high = ti.f32(MASKED)
                for j in range(groups):
                    high = ti.max(high, tops[g * groups + j])
                put_lse(lse, lse_at, high * ti.f32(LOG2E), total, factors)

    @ti.kernel
    def attend(q: Q, k: KV, v: KV, lens: LENS, table: TABLE, k_scale: SC, v_scale: SC, out: OUT, lse: LSE,
               where: WHERE, which: WHICH, factors: FACTORS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            work(i % BLOCK, i // BLOCK, q, k, v, lens, table, k_scale, v_scale, out, lse, where, which, factors)

    return attend


make_attend_lanes.fast_math = True
make_attend_lanes.resident = lambda shape, parts, c: shape.resident
