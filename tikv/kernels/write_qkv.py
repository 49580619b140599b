"""The write of Q, K and V: split a row of [Q heads | K heads | V heads], normalise and rotate Q and K, store all three.

    for each token t, head h:  dst[slot(t), h] = codec(rotate(normalise(src[t, h]), position(t)))

It has one top-level loop, so one task and one launch. On CPU an iteration is the heads of Q, K or V of a token; on a
GPU it is a lane of a row, and all lanes of a block synchronise wherever a row's lanes agree on a number. Rows that are
not rotated use the code of the copy. Arithmetic is float32. The order of a norm's sum depends only on the head width,
so every use of this kernel gives the same bits on every back end.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.address import (
    K_DST,
    K_SRC,
    PARAMS,
    V_DST,
    V_SRC,
    P,
    S,
    index_array,
    make_row_offset,
    make_slot_of,
    make_word_offset,
)
from tikv.kernels.codec import (
    SCALE_WORD,
    finite_magnitude_bits,
    make_bits_to_f32,
    make_load,
    make_reciprocal,
    make_scale,
    make_store,
    scale_array,
    word_array,
)
from tikv.kernels.copy import make_rows, make_unit
from tikv.kernels.exact import make_divide_by, make_in_order, make_product, make_reciprocal_root
from tikv.kernels.lanes import LEAST_ITERATIONS, butterfly_distances, make_loop, make_row_max, make_row_sum
from tikv.runtime import ti


class RopeParams(NamedTuple):
    """Numbers of norms and rotations beside `CopyParams`, whose `src_position` is the rope position of token 0."""

    table_rows: int = 0
    positions_first: int = 0  # first entry of the array of rope positions, and its stride
    positions_stride: int = 0
    cos_first: int = 0  # first entry of each table, and its stride
    cos_stride: int = 0
    sin_first: int = 0
    sin_stride: int = 0
    q_weight_first: int = 0
    k_weight_first: int = 0
    q_units: int = 0  # units in a row of Q


class NormRopeChoices(NamedTuple):
    """The transform of a stream: the pairs, the elements to rotate, the norm's epsilon and whether it has a weight."""

    pairs: str = ""  # "half": i with i + rope_dim / 2; "interleaved": 2i with 2i + 1; "": no transform
    rope_dim: int = 0
    eps: float | None = None
    weighted: bool = False


Q_SRC, Q_DST = 4 * len(S), 5 * len(S)
R = RopeParams(*range(len(RopeParams._fields)))
STRIDES = ti.types.vector(6 * len(S), ti.i32)
ROPE_PARAMS = ti.types.vector(len(R), ti.i32)
FLOATS = ti.types.ndarray(dtype=ti.f32, ndim=1)
SUM_CHUNK = 4  # neighbouring elements that a GPU lane adds to a norm's sum
CPU_TERMS = 32  # at most so many terms of a running sum are unrolled
CPU_HEADS = 8  # at most so many heads have their norms computed before the first is rotated
CPU_PAIRS = 64  # at most so many pairs of a row are on the stack at once: more take longer to compile, fewer to run


def lanes_of(width):
    """GPU threads that share a row; they fix the order of a norm's sum, so they depend only on the width."""
    return min(32, 1 << (-(-width // 8) - 1).bit_length())


def far_and_near(lanes):
    """Distances of a norm's sum over lanes: (before the sums of a chunk's elements are joined, after that).

    On CPU a vector register holds the sums that are left after the first distances.
    """
    distances = butterfly_distances(lanes)
    return tuple(n for n in distances if n >= 4), tuple(n for n in distances if n < 4)


def largest_divisor(n, most):
    """The largest divisor of n up to `most`; 1 if n is 0."""
    return max((d for d in range(1, min(n, most) + 1) if n % d == 0), default=1)


def make_write_qkv(style, serial, q_heads, kv_heads, width, streams, dst, transforms, index_bits, rope_bits, scale):
    """The write of Q, K and V for one set of compile-time choices. Like `copy.make_copy`, it is not cached.

    Args:
        style, serial: as in `copy.make_copy`.
        q_heads, kv_heads: heads of Q, and of K and of V; with 0 of K and V, only the transform of Q is done.
        width: elements of a row.
        streams: the `Stream` of Q, K and V.
        dst: the `EndLayout` that K and V go to.
        transforms: the `NormRopeChoices` of Q and of K, which are equal except for the weight.
        index_bits, rope_bits: 0 without an array of slots, or of rope positions; otherwise 32 or 64.
        scale: dtype code of the int8 scales, or "" without scales.
    """
    choices = (style, serial, q_heads, kv_heads, width, streams, dst, transforms, index_bits, rope_bits, scale)
    QS, QD, KS, KD, VS, VD = (word_array(bits) for s in streams for bits in (s.codec.src_bits, s.codec.dst_bits))
    IX, RX, SC = index_array(index_bits), index_array(rope_bits), scale_array(scale)
    plain = index_bits == 0 and rope_bits == 0 and scale == ""
    slot_of = make_slot_of(dst.placement, dst.page, P.dst_position, P.dst_limit, P.dst_index)
    rope_position = make_rope_position(transforms[0].pairs != "", rope_bits)
    if style == "cpu":
        uid = zlib.crc32(repr(choices).encode()) >> 2
        scales = QS if plain else SC
        types = (QS, QD, scales), (KS, KD, scales), (VS, VD, scales)
        write_heads = make_write_heads(q_heads, kv_heads, width, streams, dst, transforms, scale, types, uid)
        write_token = make_write_token(kv_heads, dst.page, slot_of, rope_position, write_heads)
        write_item = make_worker_share(serial, kv_heads, write_token)
    else:
        write_item = make_write_row(
            style, q_heads, kv_heads, width, streams, dst, transforms, scale, slot_of, rope_position
        )
    loop = make_loop(style, serial, write_item, P.iterations)

    @ti.kernel
    def write_qkv_plain(qs: QS, qd: QD, ks: KS, kd: KD, vs: VS, vd: VD, cos: FLOATS, sin: FLOATS, q_weight: FLOATS,
                        k_weight: FLOATS, strides: STRIDES, rope: ROPE_PARAMS, params: PARAMS):  # fmt: skip
        """Takes source and destination of Q, K and V, and the transform's arrays; unused arguments repeat another."""
        loop(
            qs, params, ((qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, qs, qs, qs, qs), strides, params, rope)
        )

    @ti.kernel
    def write_qkv_full(qs: QS, qd: QD, ks: KS, kd: KD, vs: VS, vd: VD, cos: FLOATS, sin: FLOATS, q_weight: FLOATS,
                       k_weight: FLOATS, index: IX, positions: RX, k_scale: SC, v_scale: SC, strides: STRIDES,
                       rope: ROPE_PARAMS, params: PARAMS):  # fmt: skip
        """Takes slots, rope positions and scales as well."""
        loop(qs, params, ((qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, index, positions, k_scale, v_scale),
                          strides, params, rope))  # fmt: skip

    return write_qkv_plain if plain else write_qkv_full


def make_rope_position(rotated, rope_bits):
    """rope_position(t, positions, params, rope): the row of the tables for token t, or -1 if it is outside them."""

    @ti.func
    def rope_position(t, positions: ti.template(), params, rope):
        p = 0
        if ti.static(rotated):
            p = params[P.src_position] + t
            if ti.static(rope_bits > 0):
                position = ti.cast(positions[rope[R.positions_first] + t * rope[R.positions_stride]], ti.i64)
                p = -1
                if position >= 0 and position < rope[R.table_rows]:
                    p = ti.cast(position, ti.i32)
        return p

    return rope_position


def make_write_heads(q_heads, kv_heads, width, streams, dst, transforms, scale, types, uid):
    """CPU: the functions that transform and store all heads of Q, of K and of V of a token."""
    q, k, v = streams
    return (
        make_norm_rope_rows(width, q_heads, q, (0, 0), transforms[0], "", types[0], 2 * uid),
        make_norm_rope_rows(width, kv_heads, k, dst.k_inner, transforms[1], scale, types[1], 2 * uid + 1),
        make_norm_rope_rows(width, kv_heads, v, dst.v_inner, NormRopeChoices(), scale, types[2], 2 * uid),
    )


def make_write_token(kv_heads, page, slot_of, rope_position, write_heads):
    """CPU: write_token(i, ...): writes the heads of Q, of K or of V of a token."""
    store_q, store_k, store_v = write_heads
    kinds = 3 if kv_heads else 1
    q_src, q_dst = make_row_offset(0, Q_SRC), make_row_offset(0, Q_DST)
    k_src, k_dst = make_row_offset(0, K_SRC), make_row_offset(page, K_DST)
    v_src, v_dst = make_row_offset(0, V_SRC), make_row_offset(page, V_DST)

    @ti.func
    def write_token(i, arrays: ti.template(), strides, params, rope):
        qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, index, positions, k_scale, v_scale = ti.static(arrays)
        n = ti.cast(i, ti.u32)
        t = ti.cast(n // ti.u32(kinds), ti.i32)
        kind = ti.cast(n % ti.u32(kinds), ti.i32)
        p = rope_position(t, positions, params, rope)
        if p >= 0:
            cos_row, sin_row = rope[R.cos_first] + p * rope[R.cos_stride], rope[R.sin_first] + p * rope[R.sin_stride]
            if kind == 0:
                a, b = q_src(0, t, 0, strides), q_dst(0, t, 0, strides)
                store_q(qs, qd, k_scale, cos, sin, q_weight, a, b, 0, cos_row, sin_row, rope[R.q_weight_first],
                        rope[R.q_units], strides[Q_SRC + S.head], strides[Q_DST + S.head], 0)  # fmt: skip
            elif ti.static(kv_heads > 0):
                slot = slot_of(0, t, index, params)
                if slot >= 0:
                    at = slot * params[P.scale_step]
                    if kind == 1:
                        a, b = k_src(0, t, 0, strides), k_dst(0, slot, 0, strides)
                        store_k(ks, kd, k_scale, cos, sin, k_weight, a, b, at + params[P.k_scale], cos_row, sin_row,
                                rope[R.k_weight_first], params[P.k_units], strides[K_SRC + S.head],
                                strides[K_DST + S.head], params[P.scale_head])  # fmt: skip
                    else:
                        a, b = v_src(0, t, 0, strides), v_dst(0, slot, 0, strides)
                        store_v(vs, vd, v_scale, cos, sin, k_weight, a, b, at + params[P.v_scale], cos_row, sin_row,
                                rope[R.k_weight_first], params[P.v_units], strides[V_SRC + S.head],
                                strides[V_DST + S.head], params[P.scale_head])  # fmt: skip

    return write_token


def make_worker_share(serial, kv_heads, write_token):
    """CPU: worker_share(i, ...): writes a worker's tokens, in the first of the iterations that Taichi gives it."""
    kinds = 3 if kv_heads else 1
    every = 1 if serial else LEAST_ITERATIONS

    @ti.func
    def worker_share(i, arrays: ti.template(), strides, params, rope):
        items = params[P.tokens] * kinds
        workers = params[P.iterations] // every
        most = (items + workers - 1) // workers
        first = (i // every) * most
        end = ti.min(items, first + most)
        if i % every != 0:
            end = 0
        for n in range(first, end):
            write_token(n, arrays, strides, params, rope)

    return worker_share


def make_write_row(style, q_heads, kv_heads, width, streams, dst, transforms, scale, slot_of, rope_position):
    """GPU: write_row(i, ...): a lane's share of a row. Threads without a row, or with a skipped row, take part too."""
    q, k, v = streams
    lanes, normed = lanes_of(width), transforms[0].eps is not None
    q_src, q_dst = make_row_offset(0, Q_SRC), make_row_offset(0, Q_DST)
    k_src, k_dst = make_row_offset(0, K_SRC), make_row_offset(dst.page, K_DST)
    v_src, v_dst = make_row_offset(0, V_SRC), make_row_offset(dst.page, V_DST)
    row_norm = make_row_norm(style, width, q, k, kv_heads, transforms[0].eps) if normed else None
    _, q_move = make_row_parts(lanes, make_row_part(style, width, q, (0, 0), transforms[0]))
    k_peak, k_move = make_row_parts(lanes, make_row_part(style, width, k, dst.k_inner, transforms[1]))
    v_peak, v_move = make_row_parts(lanes, make_row_part(style, width, v, dst.v_inner, NormRopeChoices()))
    store_scale = make_store_scale(style, lanes, scale) if scale else None

    @ti.func
    def write_row(i, arrays: ti.template(), strides, params, rope):
        qs, qd, ks, kd, vs, vd, cos, sin, q_weight, k_weight, index, positions, k_scale, v_scale = ti.static(arrays)
        n = ti.cast(i, ti.u32)
        lane = ti.cast(n % ti.u32(lanes), ti.i32)
        r = n // ti.u32(lanes)
        h = ti.cast(r % ti.u32(q_heads + 2 * kv_heads), ti.i32)
        t = ti.cast(r // ti.u32(q_heads + 2 * kv_heads), ti.i32)
        p, slot = -1, -1
        if t < params[P.tokens]:
            p = rope_position(t, positions, params, rope)
            if ti.static(kv_heads > 0):
                slot = slot_of(0, t, index, params)
        is_q = p >= 0 and h < q_heads
        is_k = p >= 0 and slot >= 0 and h >= q_heads and h < q_heads + kv_heads
        is_v = p >= 0 and slot >= 0 and h >= q_heads + kv_heads
        cos_row, sin_row = rope[R.cos_first] + p * rope[R.cos_stride], rope[R.sin_first] + p * rope[R.sin_stride]
        kv_head = h - q_heads
        kv_head = ti.select(kv_head >= kv_heads, kv_head - kv_heads, kv_head)
        norm = ti.f32(1.0)
        if ti.static(normed):
            norm = row_norm(i, lane, t, h, kv_head, is_q, is_k, qs, ks, strides)
        if is_q:
            q_move(qs, qd, q_src(0, t, h, strides), q_dst(0, t, h, strides), lane, ti.f32(1.0), norm, cos, cos_row,
                   sin, sin_row, q_weight, rope[R.q_weight_first])  # fmt: skip
        if ti.static(kv_heads > 0):
            factor = ti.f32(1.0)
            at = kv_head * params[P.scale_head] + slot * params[P.scale_step]
            if ti.static(scale != ""):
                peak = ti.u32(0)
                if is_k:
                    k_peak(peak, ks, k_src(0, t, kv_head, strides), lane, norm, cos, cos_row, sin, sin_row, k_weight,
                           rope[R.k_weight_first])  # fmt: skip
                if is_v:
                    v_peak(peak, vs, v_src(0, t, kv_head, strides), lane, norm, cos, cos_row, sin, sin_row, k_weight,
                           rope[R.k_weight_first])  # fmt: skip
                factor = store_scale(i, lane, peak, is_k, is_v, at, k_scale, v_scale, params)
            if is_k:
                k_move(ks, kd, k_src(0, t, kv_head, strides), k_dst(0, slot, kv_head, strides), lane, factor, norm, cos,
                       cos_row, sin, sin_row, k_weight, rope[R.k_weight_first])  # fmt: skip
            if is_v:
                v_move(vs, vd, v_src(0, t, kv_head, strides), v_dst(0, slot, kv_head, strides), lane, factor, norm, cos,
                       cos_row, sin, sin_row, k_weight, rope[R.k_weight_first])  # fmt: skip

    return write_row


def make_row_norm(style, width, q, k, kv_heads, eps):
    """GPU: row_norm(i, lane, t, h, kv_head, is_q, is_k, qs, ks, strides): the factor for a row of Q or K."""
    q_squares, k_squares = make_squares(style, width, q.codec), make_squares(style, width, k.codec)
    q_src, k_src = make_row_offset(0, Q_SRC), make_row_offset(0, K_SRC)
    norm_of, in_order = make_norm(style, width, eps), make_in_order(style)
    far_sum, near_sum = (make_row_sum(style, distances) for distances in far_and_near(lanes_of(width)))

    @ti.func
    def row_norm(i, lane, t, h, kv_head, is_q, is_k, qs: ti.template(), ks: ti.template(), strides):
        sums = ti.Vector([ti.f32(0.0) for _ in range(SUM_CHUNK)])
        if is_q:
            sums = q_squares(qs, q_src(0, t, h, strides), lane)
        if ti.static(kv_heads > 0):
            if is_k:
                sums = k_squares(ks, k_src(0, t, kv_head, strides), lane)
        for e in ti.static(range(SUM_CHUNK)):
            sums[e] = in_order(far_sum(i, sums[e]), strides[Q_SRC + S.head])
        first, second = sums[0] + sums[1], sums[2] + sums[3]
        joined = in_order(first, strides[Q_SRC + S.head]) + in_order(second, strides[Q_SRC + S.head])
        return norm_of(near_sum(i, joined))

    return row_norm


def make_store_scale(style, lanes, scale):
    """GPU: store_scale(i, lane, peak, ...) -> the reciprocal of a row's scale, which one lane of K or V stores."""
    row_max, scale_bits, reciprocal = make_row_max(style, lanes), make_scale(scale, style), make_reciprocal(style)
    scale_value = make_bits_to_f32(scale)
    scale_word = SCALE_WORD[scale]

    @ti.func
    def store_scale(i, lane, peak, is_k, is_v, at, k_scale: ti.template(), v_scale: ti.template(), params):
        bits = scale_bits(row_max(i, peak))
        factor = reciprocal(scale_value(bits))
        if is_k and lane == 0:
            k_scale[at + params[P.k_scale]] = ti.cast(bits, scale_word)
        if is_v and lane == 0:
            v_scale[at + params[P.v_scale]] = ti.cast(bits, scale_word)
        return factor

    return store_scale


def make_row_parts(lanes, part):
    """GPU: (peak, move) for all parts of a row that belong to a lane: every `lanes`-th. `peak` raises `highest`."""
    rounds = -(-part.count // lanes)

    @ti.func
    def peak(highest: ti.template(), a: ti.template(), row, lane, norm, cos: ti.template(), cos_row,
             sin: ti.template(), sin_row, weight: ti.template(), weight_at):  # fmt: skip
        for m in ti.static(range(rounds)):
            if lane + m * lanes < part.count:
                largest = part.peak(a, row, lane + m * lanes, norm, cos, cos_row, sin, sin_row, weight, weight_at)
                highest = ti.max(highest, largest)

    @ti.func
    def move(a: ti.template(), b: ti.template(), src_row, dst_row, lane, factor, norm, cos: ti.template(), cos_row,
             sin: ti.template(), sin_row, weight: ti.template(), weight_at):  # fmt: skip
        for m in ti.static(range(rounds)):
            if lane + m * lanes < part.count:
                part.move(a, b, src_row, dst_row, lane + m * lanes, factor, norm, cos, cos_row, sin, sin_row, weight,
                          weight_at)  # fmt: skip

    return peak, move


def make_norm(style, width, eps):
    """norm_of(total): 1 / sqrt(total / width + eps), each step rounded correctly."""
    mean, reciprocal_root = make_divide_by(style, float(width)), make_reciprocal_root(style, eps)

    @ti.func
    def norm_of(total):
        return reciprocal_root(mean(total) + ti.f32(eps))

    return norm_of


def make_squares(style, width, codec):
    """squares(array, row, lane): a GPU lane's running sums of squares of a row.

    A lane takes every lanes-th chunk of `SUM_CHUNK` elements, in words of any size; each element of a chunk has a sum.
    """
    lanes = lanes_of(width)
    load = make_load(codec.src, codec.elements, codec.src_bits)
    units, words, each = width // codec.elements, codec.src_words, SUM_CHUNK // codec.elements
    rounds = -(-width // (SUM_CHUNK * lanes))
    # The square of a 16-bit element is exact, so it does not matter whether it is fused with the sum.
    product, in_order = make_product(style if codec.src == "f32" else "cpu"), make_in_order(style)

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
                        sums[m] = in_order(sums[m] + product(x[e], x[e], row), row)
        return sums

    return squares


def make_norm_rope_rows(width, heads, stream, inner, transform, scale, types, uid):
    """CPU: the function that transforms and stores all heads of a token; its last arguments are the heads' strides."""
    codec = stream.codec
    SRC, DST, SCALE = types
    if transform.pairs == "":
        rows = make_rows(heads, stream, (0, 0), inner, scale, types)

        @ti.func
        def move_rows(a: ti.template(), b: ti.template(), scales: ti.template(), cos: ti.template(), sin: ti.template(),
                      weight: ti.template(), src_row, dst_row, scale_at, cos_row, sin_row, weight_at, units, src_head,
                      dst_head, scale_head):  # fmt: skip
            rows(a, b, scales, src_row, dst_row, scale_at, units, src_head, dst_head, scale_head, uid)

        return move_rows

    normed, weighted, quantising = transform.eps is not None, transform.weighted, codec.finds_scale
    interleaved, half, behind = transform.pairs == "interleaved", transform.rope_dim // 2, width - transform.rope_dim
    decode = make_bits_to_f32(codec.src)
    store = make_store(codec.dst, 1, codec.dst_bits, "cpu")
    dst_at, cut = make_word_offset(*inner), inner[0] > 0
    scale_bits = make_scale(scale, "cpu") if quantising else None
    reciprocal = make_reciprocal("cpu")
    scale_value = make_bits_to_f32(scale) if quantising else None
    scale_word = SCALE_WORD[scale]
    lanes = lanes_of(width)
    running = SUM_CHUNK * lanes
    far, near = (len(distances) for distances in far_and_near(lanes))
    terms, rest = largest_divisor(width // running, CPU_TERMS), width % running
    together, held = largest_divisor(heads, CPU_HEADS), largest_divisor(half, CPU_PAIRS)
    norm_of = make_norm("cpu", width, transform.eps) if normed else None

    @ti.func
    def scaled(value, norm, weight: ti.template(), at):
        normalised = value
        if ti.static(normed):
            if ti.static(weighted):
                normalised = value * (norm * weight[at])
            else:
                normalised = value * norm
        return normalised

    @ti.func
    def put(b: ti.template(), row, first, n, value, factor):
        """Store element first + n of a row. LLVM vectorises over n because n is added last, and alone."""
        at = row + first + n
        if ti.static(cut):
            at = row + dst_at(first + n)
        store(b, at, ti.Vector([value]), factor)

    # Each loop does one kind of work on a few numbers on the stack: LLVM vectorises each as suits it, without testing
    # whether arrays overlap. All loops are here, since a loop in a function that a real function calls gives wrong
    # results.
    @ti.real_func
    def norm_rope(a: SRC, b: DST, scales: SCALE, cos: FLOATS, sin: FLOATS, weight: FLOATS, src_row: ti.i32,
                  dst_row: ti.i32, scale_at: ti.i32, cos_row: ti.i32, sin_row: ti.i32, weight_at: ti.i32,
                  src_head: ti.i32, dst_head: ti.i32, scale_head: ti.i32, number: ti.i32):  # fmt: skip
        sums = ti.Vector([ti.f32(0.0) for _ in range(running)])
        fours = ti.Vector([ti.f32(0.0) for _ in range(1 << near)])
        norms = ti.Vector([ti.f32(1.0) for _ in range(together)])
        x = ti.Vector([ti.f32(0.0) for _ in range(held)])
        y = ti.Vector([ti.f32(0.0) for _ in range(held)])
        for group in range(heads // together):
            if ti.static(normed):
                # Norms of several heads come first: the root of one is computed while the next is summed.
                for h in range(together):
                    s = src_row + (group * together + h) * src_head
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
                    if ti.static(rest > 0):
                        for e in range(rest):
                            value = decode(a[s + (width - rest) + e])
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
                head = group * together + h
                s, d, at = src_row + head * src_head, dst_row + head * dst_head, scale_at + head * scale_head
                norm, factor = norms[h], ti.f32(1.0)
                m = ti.u32(0)
                # An int8 row is rotated twice, the first time for its largest magnitude.
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
    def norm_rope_rows(a: ti.template(), b: ti.template(), scales: ti.template(), cos: ti.template(),
                       sin: ti.template(), weight: ti.template(), src_row, dst_row, scale_at, cos_row, sin_row,
                       weight_at, units, src_head, dst_head, scale_head):  # fmt: skip
        norm_rope(a, b, scales, cos, sin, weight, src_row, dst_row, scale_at, cos_row, sin_row, weight_at, src_head,
             dst_head, scale_head, uid)  # fmt: skip

    return norm_rope_rows


class RowPart(NamedTuple):
    """The parts of a row: their number, and the functions that find a part's largest magnitude and move it."""

    count: int
    peak: object
    move: object


def make_turn(style, elements, interleaved):
    """turn(both, c, s, row): the concatenated values of two units, rotated by a cosine and a sine for each pair."""
    product = make_product(style)

    @ti.func
    def turn(both, c, s, row):
        rotated = both
        for j in ti.static(range(elements)):
            i, k = ti.static((2 * j, 2 * j + 1) if interleaved else (j, j + elements))
            rotated[i] = product(both[i], c[j], row) - product(both[k], s[j], row)
            rotated[k] = product(both[k], c[j], row) + product(both[i], s[j], row)
        return rotated

    return turn


def make_rotation(style, codec, transform):
    """(pair, rest): the new values of a rotated pair of units, and of a unit that is not rotated."""
    elements, words = codec.elements, codec.src_words
    load = make_load(codec.src, elements, codec.src_bits)
    half_units = transform.rope_dim // 2 // elements
    interleaved = transform.pairs == "interleaved"
    normed, weighted = transform.eps is not None, transform.weighted
    in_order, turn = make_in_order(style), make_turn(style, elements, interleaved)

    @ti.func
    def scaled(x, row, element, norm, weight: ti.template(), weight_at):
        normalised = x
        if ti.static(normed):
            for e in ti.static(range(elements)):
                factor = norm
                if ti.static(weighted):
                    factor = in_order(norm * weight[weight_at + element + e], row)
                normalised[e] = in_order(x[e] * factor, row)
        return normalised

    @ti.func
    def pair(a: ti.template(), row, p, norm, cos: ti.template(), cos_row, sin: ti.template(), sin_row,
             weight: ti.template(), weight_at):  # fmt: skip
        first, second = p, p + half_units
        if ti.static(interleaved):
            first, second = 2 * p, 2 * p + 1
        x = scaled(load(a, row + first * words), row, first * elements, norm, weight, weight_at)
        y = scaled(load(a, row + second * words), row, second * elements, norm, weight, weight_at)
        both = ti.Vector([ti.f32(0.0) for _ in range(2 * elements)])
        for e in ti.static(range(elements)):
            both[e], both[e + elements] = x[e], y[e]
        c, s = ti.Vector([ti.f32(0.0) for _ in range(elements)]), ti.Vector([ti.f32(0.0) for _ in range(elements)])
        for j in ti.static(range(elements)):
            c[j], s[j] = cos[cos_row + p * elements + j], sin[sin_row + p * elements + j]
        return first, second, turn(both, c, s, row)

    @ti.func
    def rest(a: ti.template(), row, u, norm, weight: ti.template(), weight_at):
        return scaled(load(a, row + u * words), row, u * elements, norm, weight, weight_at)

    return pair, rest


def make_row_part(style, width, stream, inner, transform):
    """GPU: the parts of a row that its lanes share: rotated pairs of units, or single units."""
    codec = stream.codec
    dst_at, words, elements = make_word_offset(*inner), codec.dst_words, codec.elements
    if transform.pairs == "":
        magnitude, move_unit = make_unit(style, codec, (0, 0), inner, "")

        @ti.func
        def peak_of_unit(a: ti.template(), row, u, norm, cos: ti.template(), cos_row, sin: ti.template(), sin_row,
                         weight: ti.template(), weight_at):  # fmt: skip
            return magnitude(a, row, u)

        @ti.func
        def move_unit_alone(a: ti.template(), b: ti.template(), src_row, dst_row, u, factor, norm, cos: ti.template(),
                            cos_row, sin: ti.template(), sin_row, weight: ti.template(), weight_at):  # fmt: skip
            move_unit(a, b, src_row, dst_row, u, factor)

        return RowPart(stream.units, peak_of_unit, move_unit_alone)

    pair, rest = make_rotation(style, codec, transform)
    store = make_store(codec.dst, elements, codec.dst_bits, style)
    pairs = transform.rope_dim // 2 // elements
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

    return RowPart(count, peak, move)
