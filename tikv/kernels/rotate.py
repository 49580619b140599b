"""Rows rotated in place by an angle of their own: keys that move to another position. One launch.

Arithmetic is float32, as `kernels.write_qkv` rotates: each product is rounded, then their sum, and the sum once more to
the stored dtype. An int8 row is dequantised, rotated, and quantised with a new scale. On CPU an iteration is a row; on
a GPU `lanes` threads share one. Cosines and sines are as many bytes as a row of float16 has, so that where heads have
the same positions a thread reads them once for its part of the rows of several, all of which it reads before it writes.
"""

from typing import NamedTuple

from tikv.kernels.address import RowStrides, S, index_array
from tikv.kernels.codec import (
    SCALE_WORD,
    WORD,
    finite_magnitude_bits,
    make_bits_to_f32,
    make_decode,
    make_reciprocal,
    make_scale,
    make_store,
    scale_array,
    word_array,
)
from tikv.kernels.lanes import make_loop, make_row_max
from tikv.kernels.write_qkv import make_rotation, make_turn
from tikv.runtime import ti

FLOATS = ti.types.ndarray(dtype=ti.f32, ndim=1)
STRIDES = ti.types.vector(len(RowStrides._fields), ti.i32)


class RotateParams(NamedTuple):
    """Numbers of a launch."""

    iterations: int = 0
    rows: int = 0  # of a head
    heads: int = 1
    count: int = 0  # rows of all heads, those that a thread turns together counting once
    angle_first: int = 0
    angle_sequence: int = 0
    angle_head: int = 0
    cos_first: int = 0
    sin_first: int = 0
    scale_first: int = 0
    scale_sequence: int = 0
    scale_head: int = 0
    scale_row: int = 0


R = RotateParams(*range(len(RotateParams._fields)))
PARAMS = ti.types.vector(len(R), ti.i32)


def make_rotate(style, serial, codec, transform, width, lanes, together, scale):
    """rotate(x, angles, cos, sin, scales, strides, params): a row by the row of the tables that `angles` names.

    None, where it names one below 0, which stays as it is.

    Args:
        style: "cpu", "cuda" or "spirv".
        serial: on CPU, run in the calling thread.
        codec: of a unit, the same at both ends.
        transform: `kernels.write_qkv.NormRopeChoices`; int8 has an epsilon, so that values are multiplied by the scale.
        width: elements of a row.
        lanes: threads that share a row; 1 on CPU.
        together: neighbouring heads with the same angles, also of several sequences, whose rows of a position a thread
            turns; 1 on CPU and for int8.
        scale: dtype code of int8 scales, or "".
    """
    elements, words = codec.elements, codec.src_words
    pairs, rotated, units = transform.rope_dim // 2 // elements, transform.rope_dim // elements, width // elements
    rest_units = units - rotated if scale else 0  # the others stay as they are
    pair, rest = make_rotation(style, codec, transform)
    store = make_store(codec.dst, elements, codec.dst_bits, style)
    row_max = make_row_max(style, lanes)
    scale_bits = make_scale(scale, style) if scale else None
    reciprocal, scale_value = make_reciprocal(style), make_bits_to_f32(scale) if scale else None
    scale_word = SCALE_WORD[scale]
    X, ANGLES, SC = word_array(codec.src_bits), index_array(32), scale_array(scale)

    @ti.func
    def largest(values, count: ti.template()):
        m = ti.u32(0)
        for e in ti.static(range(count)):
            m = ti.max(m, finite_magnitude_bits(values[e]))
        return m

    @ti.func
    def body(i, x: ti.template(), angles: ti.template(), cos: ti.template(), sin: ti.template(),
             scales: ti.template(), strides, params):  # fmt: skip
        r, lane = i // lanes, i % lanes
        group, s = r // params[R.rows], r % params[R.rows]
        b, h = group // params[R.heads], group % params[R.heads]
        angle = -1
        if r < params[R.count]:
            at_angle = params[R.angle_first] + b * params[R.angle_sequence] + h * params[R.angle_head] + s
            angle = ti.cast(angles[at_angle], ti.i32)
        row = strides[S.first] + b * strides[S.sequence] + h * strides[S.head] + s * strides[S.token]
        cos_row = params[R.cos_first] + angle * (transform.rope_dim // 2)
        sin_row = params[R.sin_first] + angle * (transform.rope_dim // 2)
        norm, inverse = ti.f32(1.0), ti.f32(1.0)
        if ti.static(scale != ""):
            at = (
                params[R.scale_first]
                + b * params[R.scale_sequence]
                + h * params[R.scale_head]
                + s * params[R.scale_row]
            )
            held = ti.u32(0)
            if angle >= 0 and lane == 0:  # which alone reads the scale, since it alone writes it
                held = ti.cast(scales[at], ti.u32)
            norm = scale_value(row_max(i, held))  # a scale is not negative, so that its bits are in order
            m = ti.u32(0)
            if angle >= 0:
                for n in range((pairs - lane + lanes - 1) // lanes):
                    _, _, found = pair(x, row, lane + n * lanes, norm, cos, cos_row, sin, sin_row, cos, 0)
                    m = ti.max(m, largest(found, 2 * elements))
                for n in range((rest_units - lane + lanes - 1) // lanes):
                    m = ti.max(m, largest(rest(x, row, rotated + lane + n * lanes, norm, cos, 0), elements))
            bits = scale_bits(row_max(i, m))
            inverse = reciprocal(scale_value(bits))
            if angle >= 0 and lane == 0:
                scales[at] = ti.cast(bits, scale_word)
        if angle >= 0:
            for n in range((pairs - lane + lanes - 1) // lanes):
                first, second, found = pair(x, row, lane + n * lanes, norm, cos, cos_row, sin, sin_row, cos, 0)
                store(x, row + first * words, ti.Vector([found[e] for e in range(elements)]), inverse)
                store(x, row + second * words, ti.Vector([found[elements + e] for e in range(elements)]), inverse)
            for n in range((rest_units - lane + lanes - 1) // lanes):
                u = rotated + lane + n * lanes
                store(x, row + u * words, rest(x, row, u, norm, cos, 0), inverse)

    decode, turn = make_decode(codec.src, codec.src_bits), make_turn(style, elements, transform.pairs == "interleaved")
    per_word = elements // words
    word, held_words = WORD[codec.src_bits], 2 * words * together
    # Units of a pair: at p and p + half, or at 2p and 2p + 1.
    step, apart = (2, 1) if transform.pairs == "interleaved" else (1, transform.rope_dim // 2 // elements)

    @ti.func
    def body_together(i, x: ti.template(), angles: ti.template(), cos: ti.template(), sin: ti.template(),
                      scales: ti.template(), strides, params):  # fmt: skip
        r, lane = i // lanes, i % lanes
        group, s = r // params[R.rows] * together, r % params[R.rows]
        angle = -1
        if r < params[R.count]:
            at_angle = params[R.angle_first] + group // params[R.heads] * params[R.angle_sequence] + s
            angle = ti.cast(angles[at_angle], ti.i32)
        if angle >= 0:
            at = ti.Vector([0 for _ in range(together)])
            for g in ti.static(range(together)):
                b, h = (group + g) // params[R.heads], (group + g) % params[R.heads]
                at[g] = strides[S.first] + b * strides[S.sequence] + h * strides[S.head] + s * strides[S.token]
            cos_row = params[R.cos_first] + angle * (transform.rope_dim // 2)
            sin_row = params[R.sin_first] + angle * (transform.rope_dim // 2)
            for n in range((pairs - lane + lanes - 1) // lanes):
                p = lane + n * lanes
                held = ti.Vector([word(0) for _ in range(held_words)])
                for g in ti.static(range(together)):
                    for w in ti.static(range(words)):
                        held[2 * g * words + w] = x[at[g] + step * p * words + w]
                        held[(2 * g + 1) * words + w] = x[at[g] + (step * p + apart) * words + w]
                c, s_ = (
                    ti.Vector([ti.f32(0.0) for _ in range(elements)]),
                    ti.Vector([ti.f32(0.0) for _ in range(elements)]),
                )
                for e in ti.static(range(elements)):
                    c[e], s_[e] = cos[cos_row + p * elements + e], sin[sin_row + p * elements + e]
                for g in ti.static(range(together)):
                    both = ti.Vector([ti.f32(0.0) for _ in range(2 * elements)])
                    for w in ti.static(range(2 * words)):
                        some = decode(held[2 * g * words + w])
                        for e in ti.static(range(per_word)):
                            both[w * per_word + e] = some[e]
                    found = turn(both, c, s_, at[g])
                    first = at[g] + step * p * words
                    store(x, first, ti.Vector([found[e] for e in range(elements)]), ti.f32(1.0))
                    store(x, first + apart * words, ti.Vector([found[elements + e] for e in range(elements)]),
                          ti.f32(1.0))  # fmt: skip

    loop = make_loop(style, serial, body if together == 1 else body_together, R.iterations)

    @ti.kernel
    def rotate(x: X, angles: ANGLES, cos: FLOATS, sin: FLOATS, scales: SC, strides: STRIDES, params: PARAMS):
        loop(x, params, (x, angles, cos, sin, scales, strides, params))

    return rotate
