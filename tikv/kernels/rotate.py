"""Rows rotated in place by an angle of their own: keys that move to another position. One launch.

Arithmetic is float32, as `kernels.write_qkv` rotates: each product is rounded, then their sum, and the sum once more to
the stored dtype. An int8 row is dequantised, rotated, and quantised with a new scale. On CPU an iteration is a row; on
a GPU `lanes` threads share one.
"""

from typing import NamedTuple

from tikv.kernels.address import RowStrides, S, index_array
from tikv.kernels.codec import (
    SCALE_WORD,
    finite_magnitude_bits,
    make_bits_to_f32,
    make_reciprocal,
    make_scale,
    make_store,
    scale_array,
    word_array,
)
from tikv.kernels.lanes import make_loop, make_row_max
from tikv.kernels.write_qkv import make_rotation
from tikv.runtime import ti

FLOATS = ti.types.ndarray(dtype=ti.f32, ndim=1)
STRIDES = ti.types.vector(len(RowStrides._fields), ti.i32)


class RotateParams(NamedTuple):
    """Numbers of a launch."""

    iterations: int = 0
    rows: int = 0  # of a head
    heads: int = 1
    count: int = 0  # rows of all heads
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


def make_rotate(style, serial, codec, transform, width, lanes, scale):
    """rotate(x, angles, cos, sin, scales, strides, params): a row by the row of the tables that `angles` names.

    None, where it names one below 0, which stays as it is.

    Args:
        style: "cpu", "cuda" or "spirv".
        serial: on CPU, run in the calling thread.
        codec: of a unit, the same at both ends.
        transform: `kernels.write_qkv.NormRopeChoices`; int8 has an epsilon, so that values are multiplied by the scale.
        width: elements of a row.
        lanes: threads that share a row; 1 on CPU.
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

    loop = make_loop(style, serial, body, R.iterations)

    @ti.kernel
    def rotate(x: X, angles: ANGLES, cos: FLOATS, sin: FLOATS, scales: SC, strides: STRIDES, params: PARAMS):
        loop(x, params, (x, angles, cos, sin, scales, strides, params))

    return rotate
