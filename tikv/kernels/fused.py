"""The fused write: split a row of [Q heads | K heads | V heads], normalise and rotate Q and K, store all three.

    for each token t, head h:  dst[place(t), h] = codec(rotate(normalise(src[t, h]), position(t)))

One top-level loop, one task, one launch. On CPU an iteration is the heads of Q, K or V of a token; on a GPU it is a
lane of a row, and all lanes of a block meet wherever a row's lanes agree on a number. Rows that are not rotated are
the copy's own rows. Arithmetic is float32; the order of a norm's sum depends on nothing but the head width,
so that every use of this kernel gives the same bits on every back end.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.address import K_DST, K_SRC, V_DST, V_SRC, WHICH_VECTOR, W, Where, make_inner, make_place, make_row
from tikv.kernels.codec import (
    WORD,
    finite_magnitude_bits,
    make_bits_to_f32,
    make_load,
    make_reciprocal,
    make_scale,
    make_store,
)
from tikv.kernels.copy import make_rows, make_unit
from tikv.kernels.exact import make_divide_by, make_product, make_reciprocal_root
from tikv.kernels.lanes import LEAST_ITERATIONS, halves, make_loop, make_row_max, make_row_sum
from tikv.runtime import ti


class Turn(NamedTuple):
    """What norms and rotations need beside `address.Which`, whose `src_position` is the rope position of token 0."""

    limit: int = 0  # rows of the tables
    first: int = 0  # first entry of the array of rope positions, and its stride
    step: int = 0
    cos: int = 0  # first entry of each table, and its stride
    cos_step: int = 0
    sin: int = 0
    sin_step: int = 0
    q_weight: int = 0
    k_weight: int = 0
    q_units: int = 0  # units in a row of Q


class Change(NamedTuple):
    """The transform of a stream: how pairs lie, elements rotated, the norm's epsilon and whether it has a weight."""

    pairs: str = ""  # "half": i with i + rope_dim / 2; "interleaved": 2i with 2i + 1; "": nothing is done
    rope_dim: int = 0
    eps: float | None = None
    weighted: bool = False


Q_SRC, Q_DST = 4 * len(Where._fields), 5 * len(Where._fields)
T = Turn(*range(len(Turn._fields)))
FUSED_WHERE_VECTOR = ti.types.vector(6 * len(Where._fields), ti.i32)
TURN_VECTOR = ti.types.vector(len(Turn._fields), ti.i32)
SUM_CHUNK = 4  # neighbouring elements that a GPU lane takes for a norm's sum
CPU_TERMS = 32  # most terms of a running sum that are written out one by one
CPU_HEADS = 8  # most heads whose norms are found before the first of them is turned
CPU_PAIRS = 64  # most pairs of a row that are on the stack at once: more compile longer, fewer run slower


def lanes_of(width):
    """GPU threads that share a row of `width` elements: part of the order of a norm's sum, so nothing else enters."""
    return min(32, 1 << (-(-width // 8) - 1).bit_length())


def far_and_near(lanes):
    """The steps of a norm's sum over lanes: those before the sums of a chunk's elements are joined, and those after.

    On CPU a vector register holds what is left after the first ones.
    """
    steps = halves(lanes)
    return tuple(n for n in steps if n >= 4), tuple(n for n in steps if n < 4)


def largest_divisor(n, most):
    """The largest divisor of n up to `most`; 1 for none."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def make_fused(style, serial, q_heads, kv_heads, width, streams, dst, changes, index_bits, rope_bits, scale):
    """The fused write for one set of compile-time choices. Not cached, as `copy.make_copy`.

    Args:
        style, serial: as in `copy.make_copy`.
        q_heads, kv_heads: heads of Q, and of K and of V; none of K and V makes it the transform alone.
        width: elements of a row.
        streams: the `Stream` of Q, K and V.
        dst: the `Side` that K and V go to.
        changes: the `Change` of Q and of K, equal but for the weight.
        index_bits, rope_bits: 0 without an array of slots, or of rope positions, else 32 or 64.
        scale: dtype code of the int8 scales, or "" without.
    """
    q, k, v = streams
    heads = q_heads + 2 * kv_heads
    kinds = 3 if kv_heads else 1
    lanes = lanes_of(width)
    choices = (style, serial, q_heads, kv_heads, width, streams, dst, changes, index_bits, rope_bits, scale)
    uid = zlib.crc32(repr(choices).encode()) >> 2
    QS, QD, KS, KD, VS, VD = (
        ti.types.ndarray(dtype=WORD[bits], ndim=1) for s in streams for bits in (s.codec.src_bits, s.codec.dst_bits)
    )
    F = ti.types.ndarray(dtype=ti.f32, ndim=1)
    IX = ti.types.ndarray(dtype=ti.i64 if index_bits == 64 else ti.i32, ndim=1)
    RX = ti.types.ndarray(dtype=ti.i64 if rope_bits == 64 else ti.i32, ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if scale == "f16" else ti.u32, ndim=1)
    plain = index_bits == 0 and rope_bits == 0 and scale == ""
    place = make_place(dst.place, dst.page, W.dst_position, W.dst_limit, W.dst_index)
    q_src, q_dst = make_row(0, Q_SRC), make_row(0, Q_DST)
    k_src, k_dst = make_row(0, K_SRC), make_row(dst.page, K_DST)
    v_src, v_dst = make_row(0, V_SRC), make_row(dst.page, V_DST)
    q_change, k_change = changes
    eps, normed, rotated = q_change.eps, q_change.eps is not None, q_change.pairs != ""
    SQ = QS if plain else SC
    if style == "cpu":
        store_q = make_turned_rows(width, q_heads, q, (0, 0), q_change, "", (QS, QD, SQ), 2 * uid)
        store_k = make_turned_rows(width, kv_heads, k, dst.k_inner, k_change, scale, (KS, KD, SQ), 2 * uid + 1)
        store_v = make_turned_rows(width, kv_heads, v, dst.v_inner, Change(), scale, (VS, VD, SQ), 2 * uid)
    else:
        q_part, k_part, v_part = (
            make_part(style, width, s, inner, c)
            for s, inner, c in ((q, (0, 0), q_change), (k, dst.k_inner, k_change), (v, dst.v_inner, Change()))
        )
        q_squares = make_squares(style, width, q.codec) if normed else None
        k_squares = make_squares(style, width, k.codec) if normed else None
        norm_of = make_norm(style, width, eps) if normed else None
        far_sum, near_sum = (make_row_sum(style, steps) for steps in far_and_near(lanes))
        row_max = make_row_max(style, lanes)
        scale_bits = make_scale(scale, style) if scale else None
        reciprocal = make_reciprocal(style)
        scale_value = make_bits_to_f32(scale) if scale else None
        scale_word = ti.u16 if scale == "f16" else ti.u32
        q_rounds, k_rounds, v_rounds = (-(-part.count // lanes) for part in (q_part, k_part, v_part))

    @ti.func
    def rope_position(t, positions: ti.template(), which, turn):
        """The row of the tables for token t, or -1 if they have none."""
        p = 0
        if ti.static(rotated):
            p = which[W.src_position] + t
            if ti.static(rope_bits > 0):
                wanted = ti.cast(positions[turn[T.first] + t * turn[T.step]], ti.i64)
                p = -1
                if wanted >= 0 and wanted < turn[T.limit]:
                    p = ti.cast(wanted, ti.i32)
        return p

    @ti.func
    def step_cpu(i, qs: ti.template(), qd: ti.template(), ks: ti.template(), kd: ti.template(), vs: ti.template(),
                 vd: ti.template(), cos: ti.template(), sin: ti.template(), q_weight: ti.template(),
                 k_weight: ti.template(), index: ti.template(), positions: ti.template(), k_scale: ti.template(),
                 v_scale: ti.template(), where, which, turn):  # fmt: skip
        """The heads of Q, of K or of V of a token."""
        n = ti.cast(i, ti.u32)
        t = ti.cast(n // ti.u32(kinds), ti.i32)
        kind = ti.cast(n % ti.u32(kinds), ti.i32)
        p = rope_position(t, positions, which, turn)
        if p >= 0:
            cos_row, sin_row = turn[T.cos] + p * turn[T.cos_step], turn[T.sin] + p * turn[T.sin_step]
            if kind == 0:
                a, b = q_src(0, t, 0, where), q_dst(0, t, 0, where)
                store_q(qs, qd, k_scale, cos, sin, q_weight, a, b, 0, cos_row, sin_row, turn[T.q_weight],
                        turn[T.q_units], where[Q_SRC + 3], where[Q_DST + 3], 0)  # fmt: skip
            elif ti.static(kv_heads > 0):
                slot = place(0, t, index, which)
                if slot >= 0:
                    at = slot * which[W.scale_step]
                    if kind == 1:
                        a, b = k_src(0, t, 0, where), k_dst(0, slot, 0, where)
                        store_k(ks, kd, k_scale, cos, sin, k_weight, a, b, at + which[W.k_scale], cos_row, sin_row,
                                turn[T.k_weight], which[W.k_units], where[K_SRC + 3], where[K_DST + 3],
                                which[W.scale_head])  # fmt: skip
                    else:
                        a, b = v_src(0, t, 0, where), v_dst(0, slot, 0, where)
                        store_v(vs, vd, v_scale, cos, sin, k_weight, a, b, at + which[W.v_scale], cos_row, sin_row,
                                turn[T.k_weight], which[W.v_units], where[V_SRC + 3], where[V_DST + 3],
                                which[W.scale_head])  # fmt: skip

    @ti.func
    def step_shared(i, qs: ti.template(), qd: ti.template(), ks: ti.template(), kd: ti.template(), vs: ti.template(),
                    vd: ti.template(), cos: ti.template(), sin: ti.template(), q_weight: ti.template(),
                    k_weight: ti.template(), index: ti.template(), positions: ti.template(), k_scale: ti.template(),
                    v_scale: ti.template(), where, which, turn):  # fmt: skip
        """A lane of a row. Threads without a row, and rows that are skipped, still meet the others."""
        n = ti.cast(i, ti.u32)
        lane = ti.cast(n % ti.u32(lanes), ti.i32)
        r = n // ti.u32(lanes)
        h = ti.cast(r % ti.u32(heads), ti.i32)
        t = ti.cast(r // ti.u32(heads), ti.i32)
        p, slot = -1, -1
        if t < which[W.tokens]:
            p = rope_position(t, positions, which, turn)
            if ti.static(kv_heads > 0):
                slot = place(0, t, index, which)
        is_q = p >= 0 and h < q_heads
        is_k = p >= 0 and slot >= 0 and h >= q_heads and h < q_heads + kv_heads
        is_v = p >= 0 and slot >= 0 and h >= q_heads + kv_heads
        cos_row, sin_row = turn[T.cos] + p * turn[T.cos_step], turn[T.sin] + p * turn[T.sin_step]
        g = h - q_heads
        g = ti.select(g >= kv_heads, g - kv_heads, g)
        norm = ti.f32(1.0)
        if ti.static(normed):
            sums = ti.Vector([ti.f32(0.0) for _ in range(SUM_CHUNK)])
            if is_q:
                sums = q_squares(qs, q_src(0, t, h, where), lane)
            if ti.static(kv_heads > 0):
                if is_k:
                    sums = k_squares(ks, k_src(0, t, g, where), lane)
            for e in ti.static(range(SUM_CHUNK)):
                sums[e] = far_sum(i, sums[e])
            norm = norm_of(near_sum(i, (sums[0] + sums[1]) + (sums[2] + sums[3])))
        if is_q:
            a, b = q_src(0, t, h, where), q_dst(0, t, h, where)
            for m in ti.static(range(q_rounds)):
                if lane + m * lanes < q_part.count:
                    q_part.move(qs, qd, a, b, lane + m * lanes, ti.f32(1.0), norm, cos, cos_row, sin, sin_row,
                                q_weight, turn[T.q_weight])  # fmt: skip
        if ti.static(kv_heads > 0):
            factor = ti.f32(1.0)
            at = g * which[W.scale_head] + slot * which[W.scale_step]
            if ti.static(scale != ""):
                peak = ti.u32(0)
                if is_k:
                    for m in ti.static(range(k_rounds)):
                        if lane + m * lanes < k_part.count:
                            found = k_part.peak(ks, k_src(0, t, g, where), lane + m * lanes, norm, cos, cos_row, sin,
                                                sin_row, k_weight, turn[T.k_weight])  # fmt: skip
                            peak = ti.max(peak, found)
                if is_v:
                    for m in ti.static(range(v_rounds)):
                        if lane + m * lanes < v_part.count:
                            found = v_part.peak(vs, v_src(0, t, g, where), lane + m * lanes, norm, cos, cos_row, sin,
                                                sin_row, k_weight, turn[T.k_weight])  # fmt: skip
                            peak = ti.max(peak, found)
                bits = scale_bits(row_max(i, peak))
                factor = reciprocal(scale_value(bits))
                if is_k and lane == 0:
                    k_scale[at + which[W.k_scale]] = ti.cast(bits, scale_word)
                if is_v and lane == 0:
                    v_scale[at + which[W.v_scale]] = ti.cast(bits, scale_word)
            if is_k:
                a, b = k_src(0, t, g, where), k_dst(0, slot, g, where)
                for m in ti.static(range(k_rounds)):
                    if lane + m * lanes < k_part.count:
                        k_part.move(ks, kd, a, b, lane + m * lanes, factor, norm, cos, cos_row, sin, sin_row,
                                    k_weight, turn[T.k_weight])  # fmt: skip
            if is_v:
                a, b = v_src(0, t, g, where), v_dst(0, slot, g, where)
                for m in ti.static(range(v_rounds)):
                    if lane + m * lanes < v_part.count:
                        v_part.move(vs, vd, a, b, lane + m * lanes, factor, norm, cos, cos_row, sin, sin_row,
                                    k_weight, turn[T.k_weight])  # fmt: skip

    every = 1 if serial else LEAST_ITERATIONS

    @ti.func
    def share_cpu(i, qs: ti.template(), qd: ti.template(), ks: ti.template(), kd: ti.template(), vs: ti.template(),
                  vd: ti.template(), cos: ti.template(), sin: ti.template(), q_weight: ti.template(),
                  k_weight: ti.template(), index: ti.template(), positions: ti.template(), k_scale: ti.template(),
                  v_scale: ti.template(), where, which, turn):  # fmt: skip
        """A worker's share of the steps, done by the first of the iterations that Taichi gives it."""
        steps = which[W.tokens] * kinds
        workers = which[W.iterations] // every
        most = (steps + workers - 1) // workers
        first = (i // every) * most
        end = ti.min(steps, first + most)
        if i % every != 0:
            end = 0
        for n in range(first, end):
            step_cpu(n, qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, index, positions, k_scale, v_scale,
                     where, which, turn)  # fmt: skip

    loop = make_loop(style, serial, share_cpu if style == "cpu" else step_shared, W.iterations)

    @ti.kernel
    def fused_plain(qs: QS, qd: QD, ks: KS, kd: KD, vs: VS, vd: VD, cos: F, sin: F, q_weight: F, k_weight: F,
                    where: FUSED_WHERE_VECTOR, turn: TURN_VECTOR, which: WHICH_VECTOR):  # fmt: skip
        """Q, K and V, each a source and a destination, and the arrays of the transform; unused ones repeat another."""
        loop(qs, which, (qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, qs, qs, qs, qs, where, which, turn))

    @ti.kernel
    def fused_full(qs: QS, qd: QD, ks: KS, kd: KD, vs: VS, vd: VD, cos: F, sin: F, q_weight: F, k_weight: F, index: IX,
                   positions: RX, k_scale: SC, v_scale: SC, where: FUSED_WHERE_VECTOR, turn: TURN_VECTOR,
                   which: WHICH_VECTOR):  # fmt: skip
        """The same with slots, rope positions and scales."""
        loop(qs, which, (qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, index, positions, k_scale, v_scale,
                         where, which, turn))  # fmt: skip

    return fused_plain if plain else fused_full


def make_norm(style, width, eps):
    """norm_of(total): 1 / sqrt(total / width + eps), each step rounded correctly."""
    mean, reciprocal_root = make_divide_by(style, float(width)), make_reciprocal_root(style, eps)

    @ti.func
    def norm_of(total):
        return reciprocal_root(mean(total) + ti.f32(eps))

    return norm_of


def make_squares(style, width, codec):
    """squares(array, row, lane): the running sums of squares that a GPU lane has of a row.

    It takes every lanes-th chunk of `SUM_CHUNK` elements, whatever words hold them; each of a chunk has its own sum.
    """
    lanes = lanes_of(width)
    load = make_load(codec.src, codec.elements, codec.src_bits)
    units, words, each = width // codec.elements, codec.src_words, SUM_CHUNK // codec.elements
    rounds = -(-width // (SUM_CHUNK * lanes))
    # An element of 16 bits has a square without rounding: whether that is fused with the sum does not matter.
    product = make_product(style if codec.src == "f32" else "cpu")

    @ti.func
    def squares(a: ti.template(), row, lane):
        sums = ti.Vector([ti.f32(0.0) for _ in range(SUM_CHUNK)])
        for n in ti.static(range(rounds)):
            for w in ti.static(range(each)):
                u = (lane + n * lanes) * each + w
                if u < units:
                    x = load(a, row + u * words)
                    for e in ti.static(range(codec.elements)):
                        m = ti.static(w * codec.elements + e)
                        sums[m] = sums[m] + product(x[e], x[e], row)
        return sums

    return squares


def make_turned_rows(width, heads, stream, inner, change, scale, types, uid):
    """CPU: the function that transforms and stores all heads of a token of a stream; it ends in the heads' strides."""
    codec = stream.codec
    SRC, DST, SCALE = types
    if change.pairs == "":
        rows = make_rows(heads, stream, (0, 0), inner, scale, types, uid)

        @ti.func
        def move_rows(a: ti.template(), b: ti.template(), scales: ti.template(), cos: ti.template(), sin: ti.template(),
                      weight: ti.template(), src_row, dst_row, scale_at, cos_row, sin_row, weight_at, units, src_head,
                      dst_head, scale_head):  # fmt: skip
            rows(a, b, scales, True, src_row, dst_row, scale_at, units, src_head, dst_head, scale_head)

        return move_rows

    normed, weighted, quantising = change.eps is not None, change.weighted, codec.dst == "i8"
    interleaved, half, behind = change.pairs == "interleaved", change.rope_dim // 2, width - change.rope_dim
    decode = make_bits_to_f32(codec.src)
    store = make_store(codec.dst, 1, codec.dst_bits, "cpu")
    dst_at, cut = make_inner(*inner), inner[0] > 0
    scale_bits = make_scale(scale, "cpu") if quantising else None
    reciprocal = make_reciprocal("cpu")
    scale_value = make_bits_to_f32(scale) if quantising else None
    scale_word = ti.u16 if scale == "f16" else ti.u32
    lanes = lanes_of(width)
    running = SUM_CHUNK * lanes
    far, near = (len(steps) for steps in far_and_near(lanes))
    terms, left = largest_divisor(width // running, CPU_TERMS), width % running
    together, held = largest_divisor(heads, CPU_HEADS), largest_divisor(half, CPU_PAIRS)
    norm_of = make_norm("cpu", width, change.eps) if normed else None
    F = ti.types.ndarray(dtype=ti.f32, ndim=1)

    @ti.func
    def scaled(value, norm, weight: ti.template(), at):
        found = value
        if ti.static(normed):
            if ti.static(weighted):
                found = value * (norm * weight[at])
            else:
                found = value * norm
        return found

    @ti.func
    def put(b: ti.template(), row, first, n, value, factor):
        """Element first + n of a row. LLVM vectorises over n where nothing but n is added last."""
        at = row + first + n
        if ti.static(cut):
            at = row + dst_at(first + n)
        store(b, at, ti.Vector([value]), factor)

    # Loops of one kind of work each, over a few numbers on the stack: LLVM vectorises each by what suits it, without a
    # test whether arrays overlap. All are here since a loop in a function that a real function calls comes out wrong.
    @ti.real_func
    def turn(a: SRC, b: DST, scales: SCALE, cos: F, sin: F, weight: F, src_row: ti.i32, dst_row: ti.i32,
             scale_at: ti.i32, cos_row: ti.i32, sin_row: ti.i32, weight_at: ti.i32, src_head: ti.i32, dst_head: ti.i32,
             scale_head: ti.i32, number: ti.i32):  # fmt: skip
        sums = ti.Vector([ti.f32(0.0) for _ in range(running)])
        fours = ti.Vector([ti.f32(0.0) for _ in range(1 << near)])
        norms = ti.Vector([ti.f32(1.0) for _ in range(together)])
        x = ti.Vector([ti.f32(0.0) for _ in range(held)])
        y = ti.Vector([ti.f32(0.0) for _ in range(held)])
        for some in range(heads // together):
            if ti.static(normed):
                # The norms of many heads first: the root of one is found while the next is summed up.
                for h in range(together):
                    s = src_row + (some * together + h) * src_head
                    for e in range(running):
                        sums[e] = 0.0
                    for n in range(width // (running * terms)):
                        first = s + n * (running * terms)
                        for e in range(running):
                            total = sums[e]
                            for m in ti.static(range(terms)):
                                value = decode(a[first + m * running + e])
                                total = total + value * value
                            sums[e] = total
                    if ti.static(left > 0):
                        for e in range(left):
                            value = decode(a[s + (width - left) + e])
                            sums[e] = sums[e] + value * value
                    for n in ti.static(range(1, far + 1)):
                        for e in range(ti.static(running >> n)):
                            sums[e] = sums[e] + sums[e + (running >> n)]
                    for e in ti.static(range(1 << near)):
                        fours[e] = (sums[4 * e] + sums[4 * e + 1]) + (sums[4 * e + 2] + sums[4 * e + 3])
                    for n in ti.static(range(near)):
                        for e in ti.static(range(1 << (near - 1 - n))):
                            fours[e] = fours[e] + fours[e + (1 << (near - 1 - n))]
                    norms[h] = norm_of(fours[0])
            for h in range(together):
                head = some * together + h
                s, d, at = src_row + head * src_head, dst_row + head * dst_head, scale_at + head * scale_head
                norm, factor = norms[h], ti.f32(1.0)
                m = ti.u32(0)
                # An int8 row is turned twice: first for its largest magnitude.
                for storing in ti.static((False, True) if quantising else (True,)):
                    for block in range(half // held):
                        p0 = block * held
                        x0, y0 = s + p0, s + half + p0
                        x_weight, y_weight = weight_at + p0, weight_at + half + p0
                        if ti.static(interleaved):
                            x0, y0 = s + 2 * p0, s + 2 * p0 + 1
                            x_weight, y_weight = weight_at + 2 * p0, weight_at + 2 * p0 + 1
                        each = ti.static(2 if interleaved else 1)
                        for p in range(held):
                            x[p] = scaled(decode(a[x0 + each * p]), norm, weight, x_weight + each * p)
                        for p in range(held):
                            y[p] = scaled(decode(a[y0 + each * p]), norm, weight, y_weight + each * p)
                        c0, s0 = cos_row + p0, sin_row + p0
                        for p in range(held):
                            x_old, y_old = x[p], y[p]
                            x[p] = x_old * cos[c0 + p] - y_old * sin[s0 + p]
                            y[p] = y_old * cos[c0 + p] + x_old * sin[s0 + p]
                        if ti.static(not storing):
                            for p in range(held):
                                m = ti.max(m, finite_magnitude_bits(x[p]))
                            for p in range(held):
                                m = ti.max(m, finite_magnitude_bits(y[p]))
                        elif ti.static(interleaved):
                            for p in range(held):
                                put(b, d, 2 * p0, 2 * p, x[p], factor)
                                put(b, d, 2 * p0, 2 * p + 1, y[p], factor)
                        else:
                            for p in range(held):
                                put(b, d, p0, p, x[p], factor)
                            for p in range(held):
                                put(b, d, half + p0, p, y[p], factor)
                    for u in range(behind):
                        value = scaled(decode(a[s + 2 * half + u]), norm, weight, weight_at + 2 * half + u)
                        if ti.static(storing):
                            put(b, d, 2 * half, u, value, factor)
                        else:
                            m = ti.max(m, finite_magnitude_bits(value))
                    if ti.static(not storing):
                        bits = scale_bits(m)
                        factor = reciprocal(scale_value(bits))
                        scales[at] = ti.cast(bits, scale_word)

    @ti.func
    def turn_rows(a: ti.template(), b: ti.template(), scales: ti.template(), cos: ti.template(), sin: ti.template(),
                  weight: ti.template(), src_row, dst_row, scale_at, cos_row, sin_row, weight_at, units, src_head,
                  dst_head, scale_head):  # fmt: skip
        turn(a, b, scales, cos, sin, weight, src_row, dst_row, scale_at, cos_row, sin_row, weight_at, src_head,
             dst_head, scale_head, uid)  # fmt: skip

    return turn_rows


class Part(NamedTuple):
    """A share of a row: how many there are, and the functions that look for its largest magnitude and that move it."""

    count: int
    peak: object
    move: object


def make_values(style, codec, change):
    """(pair, rest): the new values of two units that are rotated into each other, and of one behind those."""
    elements, words = codec.elements, codec.src_words
    load = make_load(codec.src, elements, codec.src_bits)
    half_units = change.rope_dim // 2 // elements
    interleaved = change.pairs == "interleaved"
    normed, weighted = change.eps is not None, change.weighted
    product = make_product(style)

    @ti.func
    def scaled(x, element, norm, weight: ti.template(), weight_at):
        found = x
        if ti.static(normed):
            for e in ti.static(range(elements)):
                if ti.static(weighted):
                    found[e] = x[e] * (norm * weight[weight_at + element + e])
                else:
                    found[e] = x[e] * norm
        return found

    @ti.func
    def pair(a: ti.template(), row, p, norm, cos: ti.template(), cos_row, sin: ti.template(), sin_row,
             weight: ti.template(), weight_at):  # fmt: skip
        first, second = p, p + half_units
        if ti.static(interleaved):
            first, second = 2 * p, 2 * p + 1
        x = scaled(load(a, row + first * words), first * elements, norm, weight, weight_at)
        y = scaled(load(a, row + second * words), second * elements, norm, weight, weight_at)
        both = ti.Vector([ti.f32(0.0) for _ in range(2 * elements)])
        for e in ti.static(range(elements)):
            both[e], both[e + elements] = x[e], y[e]
        found = both
        for j in ti.static(range(elements)):
            i, k = ti.static((2 * j, 2 * j + 1) if interleaved else (j, j + elements))
            c, s = cos[cos_row + p * elements + j], sin[sin_row + p * elements + j]
            found[i] = product(both[i], c, row) - product(both[k], s, row)
            found[k] = product(both[k], c, row) + product(both[i], s, row)
        return first, second, found

    @ti.func
    def rest(a: ti.template(), row, u, norm, weight: ti.template(), weight_at):
        return scaled(load(a, row + u * words), u * elements, norm, weight, weight_at)

    return pair, rest


def make_part(style, width, stream, inner, change):
    """GPU: the parts of a row, by which its lanes share it: pairs of units that rotate into each other, or units."""
    codec = stream.codec
    dst_at, words, elements = make_inner(*inner), codec.dst_words, codec.elements
    if change.pairs == "":
        magnitude, move_unit = make_unit(style, codec, (0, 0), inner)

        @ti.func
        def peak_of_unit(a: ti.template(), row, u, norm, cos: ti.template(), cos_row, sin: ti.template(), sin_row,
                         weight: ti.template(), weight_at):  # fmt: skip
            return magnitude(a, row, u)

        @ti.func
        def move_unit_alone(a: ti.template(), b: ti.template(), src_row, dst_row, u, factor, norm, cos: ti.template(),
                            cos_row, sin: ti.template(), sin_row, weight: ti.template(), weight_at):  # fmt: skip
            move_unit(a, b, src_row, dst_row, u, factor)

        return Part(stream.units, peak_of_unit, move_unit_alone)

    pair, rest = make_values(style, codec, change)
    store = make_store(codec.dst, elements, codec.dst_bits, style)
    pairs = change.rope_dim // 2 // elements
    count = width // elements - pairs

    @ti.func
    def peak(a: ti.template(), row, p, norm, cos: ti.template(), cos_row, sin: ti.template(), sin_row,
             weight: ti.template(), weight_at):  # fmt: skip
        m = ti.u32(0)
        if p < pairs:
            _, _, x = pair(a, row, p, norm, cos, cos_row, sin, sin_row, weight, weight_at)
            for e in ti.static(range(2 * elements)):
                m = ti.max(m, finite_magnitude_bits(x[e]))
        elif ti.static(count > pairs):
            x = rest(a, row, p + pairs, norm, weight, weight_at)
            for e in ti.static(range(elements)):
                m = ti.max(m, finite_magnitude_bits(x[e]))
        return m

    @ti.func
    def move(a: ti.template(), b: ti.template(), src_row, dst_row, p, factor, norm, cos: ti.template(), cos_row,
             sin: ti.template(), sin_row, weight: ti.template(), weight_at):  # fmt: skip
        if p < pairs:
            first, second, x = pair(a, src_row, p, norm, cos, cos_row, sin, sin_row, weight, weight_at)
            store(b, dst_row + dst_at(first * words), ti.Vector([x[e] for e in range(elements)]), factor)
            store(b, dst_row + dst_at(second * words), ti.Vector([x[e + elements] for e in range(elements)]), factor)
        elif ti.static(count > pairs):
            u = p + pairs
            store(b, dst_row + dst_at(u * words), rest(a, src_row, u, norm, weight, weight_at), factor)

    return Part(count, peak, move)
