"""Rotate rows in place, each by its own angle: keys that move to another position. It takes one launch.

As in `kernels.write_qkv`, arithmetic is float32: each product is rounded, then their sum, and the sum once more to the
stored dtype. An int8 row is dequantised, rotated, and quantised with a new scale. On CPU an iteration is a row; on a
GPU `lanes` threads share one. The cosines and sines of a row take as many bytes as a row of float16. So if heads have
the same positions, a thread reads them once for its part of several heads' rows, and reads all these rows before it
writes.
"""

from typing import NamedTuple

from tikv.kernels.address import RowStrides, S, divided, index_array
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
from tikv.kernels.exact import make_in_order
from tikv.kernels.lanes import make_loop, make_row_max
from tikv.kernels.write_qkv import make_rotation, make_turn
from tikv.runtime import ti

FLOATS = ti.types.ndarray(dtype=ti.f32, ndim=1)
STRIDES = ti.types.vector(len(RowStrides._fields), ti.i32)


class RotateParams(NamedTuple):
    """Numbers of a launch."""

    iterations: int = 0
    rows: int = 0  # of a head
    rows_inverse: int = 0  # this and the next: `address.inverse_of` the rows
    rows_shift: int = 0
    heads: int = 1
    heads_inverse: int = 0
    heads_shift: int = 0
    count: int = 0  # rows of all heads; rows that a thread rotates together count once
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


@ti.func
def largest(values, count: ti.template()):
    """The bits of the largest finite magnitude of these values."""
    m = ti.u32(0)
    for e in ti.static(range(count)):
        m = ti.max(m, finite_magnitude_bits(values[e]))
    return m


def make_rotate(style, serial, codec, transform, width, lanes, together, scale):
    """rotate(x, angles, cos, sin, scales, strides, params): rotates each row by the row of the tables in `angles`.

    A row whose entry of `angles` is negative stays unchanged.

    Args:
        style: "cpu", "cuda" or "spirv".
        serial: on CPU, run in the calling thread.
        codec: of a unit, the same at both ends.
        transform: `kernels.write_qkv.NormRopeChoices`; int8 has an epsilon, so that values are multiplied by the scale.
        width: elements of a row.
        lanes: threads that share a row; 1 on CPU.
        together: neighbouring heads with the same angles, also of several sequences, whose rows at a position a thread
            rotates; 1 on CPU, and for int8 rows that are only partly rotated or have more pairs of units than lanes.
        scale: dtype code of int8 scales, or "".
    """
    elements, words = codec.elements, codec.src_words
    pairs, rotated, units = transform.rope_dim // 2 // elements, transform.rope_dim // elements, width // elements
    rest_units = units - rotated if scale else 0  # without scales, the units that are not rotated stay unchanged
    pair, rest = make_rotation(style, codec, transform)
    store = make_store(codec.dst, elements, codec.dst_bits, style)
    row_max = make_row_max(style, lanes)
    scale_bits = make_scale(scale, style) if scale else None
    reciprocal, scale_value = make_reciprocal(style), make_bits_to_f32(scale) if scale else None
    scale_word = SCALE_WORD[scale]
    X, ANGLES, SC = word_array(codec.src_bits), index_array(32), scale_array(scale)

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
            if angle >= 0 and lane == 0:  # only this lane reads the scale, since only it writes the scale
                held = ti.cast(scales[at], ti.u32)
            norm = scale_value(row_max(i, held))  # a scale is not negative, so its bits have its order
            m = ti.u32(0)
            if angle >= 0:
                for n in range((pairs - lane + lanes - 1) // lanes):
                    _, _, both = pair(x, row, lane + n * lanes, norm, cos, cos_row, sin, sin_row, cos, 0)
                    m = ti.max(m, largest(both, 2 * elements))
                for n in range((rest_units - lane + lanes - 1) // lanes):
                    m = ti.max(m, largest(rest(x, row, rotated + lane + n * lanes, norm, cos, 0), elements))
            bits = scale_bits(row_max(i, m))
            inverse = reciprocal(scale_value(bits))
            if angle >= 0 and lane == 0:
                scales[at] = ti.cast(bits, scale_word)
        if angle >= 0:
            for n in range((pairs - lane + lanes - 1) // lanes):
                first, second, both = pair(x, row, lane + n * lanes, norm, cos, cos_row, sin, sin_row, cos, 0)
                store(x, row + first * words, ti.Vector([both[e] for e in range(elements)]), inverse)
                store(x, row + second * words, ti.Vector([both[elements + e] for e in range(elements)]), inverse)
            for n in range((rest_units - lane + lanes - 1) // lanes):
                u = rotated + lane + n * lanes
                store(x, row + u * words, rest(x, row, u, norm, cos, 0), inverse)

    if together > 1:
        body = make_body_together(style, codec, transform, lanes, together, scale)
    loop = make_loop(style, serial, body, R.iterations)
    TABLE = word_array(64) if together > 1 and elements % 2 == 0 else FLOATS  # a word has two numbers

    @ti.kernel
    def rotate(x: X, angles: ANGLES, cos: TABLE, sin: TABLE, scales: SC, strides: STRIDES, params: PARAMS):
        loop(x, params, (x, angles, cos, sin, scales, strides, params))

    return rotate


def make_body_together(style, codec, transform, lanes, together, scale):
    """The body of `make_rotate` on a GPU if a thread rotates its part of the rows of several heads.

    A thread has at most one pair of units of an int8 row, and reads it once: the new values wait for the new scale.
    """
    elements, words = codec.elements, codec.src_words
    interleaved = transform.pairs == "interleaved"
    half = transform.rope_dim // 2
    pairs = half // elements
    step, apart = (2, 1) if interleaved else (1, pairs)  # units of a pair: 2p and 2p + 1, or p and p + pairs
    per_word, word, held_words = elements // words, WORD[codec.src_bits], 2 * words * together
    decode, turn, in_order = (
        make_decode(codec.src, codec.src_bits),
        make_turn(style, elements, interleaved),
        make_in_order(style),
    )
    store, row_max = make_store(codec.dst, elements, codec.dst_bits, style), make_row_max(style, lanes)
    scale_bits, reciprocal = make_scale(scale, style) if scale else None, make_reciprocal(style)
    scale_value, scale_word = make_bits_to_f32(scale) if scale else None, SCALE_WORD[scale]

    @ti.func
    def rounds(lane):
        """The number of pairs of units that a lane has."""
        count = pairs // lanes
        if ti.static(pairs % lanes > 0):
            count = (pairs - lane + lanes - 1) // lanes
        return count

    @ti.func
    def row_offsets(b, h, s, first, sequence, head, token, params):
        """The addresses of the rows at a position for neighbouring heads, from head h of sequence b."""
        at = ti.Vector([0 for _ in range(together)])
        sequence_of, head_of = b, h
        for g in ti.static(range(together)):
            at[g] = first + sequence_of * sequence + head_of * head + s * token
            head_of += 1
            if head_of == params[R.heads]:
                sequence_of, head_of = sequence_of + 1, 0
        return at

    @ti.func
    def read(x: ti.template(), at, p):
        """Read a pair of units of each row."""
        held = ti.Vector([word(0) for _ in range(held_words)])
        for g in ti.static(range(together)):
            for w in ti.static(range(words)):
                held[2 * g * words + w] = x[at[g] + step * p * words + w]
                held[(2 * g + 1) * words + w] = x[at[g] + (step * p + apart) * words + w]
        return held

    @ti.func
    def read_angles(table: ti.template(), first):
        angles = ti.Vector([ti.f32(0.0) for _ in range(elements)])
        for e in ti.static(range(elements)):
            if ti.static(elements % 2 == 0):
                two = table[(first >> 1) + e // 2]
                angles[e] = ti.bit_cast(ti.cast(two >> ti.u64(32 * (e % 2)), ti.u32), ti.f32)
            else:
                angles[e] = table[first + e]
        return angles

    @ti.func
    def values(held, g: ti.template()):
        both = ti.Vector([ti.f32(0.0) for _ in range(2 * elements)])
        for w in ti.static(range(2 * words)):
            decoded = decode(held[2 * g * words + w])
            for e in ti.static(range(per_word)):
                both[w * per_word + e] = decoded[e]
        return both

    @ti.func
    def write(x: ti.template(), row, p, both, inverse):
        first = row + step * p * words
        store(x, first, ti.Vector([both[e] for e in range(elements)]), inverse)
        store(x, first + apart * words, ti.Vector([both[elements + e] for e in range(elements)]), inverse)

    @ti.func
    def body(i, x: ti.template(), angles: ti.template(), cos: ti.template(), sin: ti.template(),
             scales: ti.template(), strides, params):  # fmt: skip
        r, lane = i // lanes, i % lanes
        group = divided(r, params[R.rows_inverse], params[R.rows_shift])
        s = r - group * params[R.rows]
        b = divided(group * together, params[R.heads_inverse], params[R.heads_shift])
        h = group * together - b * params[R.heads]
        angle = -1
        if r < params[R.count]:
            at_angle = params[R.angle_first] + b * params[R.angle_sequence] + s
            angle = ti.cast(angles[at_angle], ti.i32)
        at = row_offsets(b, h, s, strides[S.first], strides[S.sequence], strides[S.head], strides[S.token], params)
        cos_row, sin_row = params[R.cos_first] + angle * half, params[R.sin_first] + angle * half
        if ti.static(scale == ""):
            if angle >= 0:
                for n in range(rounds(lane)):
                    p = lane + n * lanes
                    held = read(x, at, p)
                    c, s_ = read_angles(cos, cos_row + p * elements), read_angles(sin, sin_row + p * elements)
                    for g in ti.static(range(together)):
                        write(x, at[g], p, turn(values(held, g), c, s_, at[g]), ti.f32(1.0))
        else:
            of_scales = row_offsets(b, h, s, params[R.scale_first], params[R.scale_sequence], params[R.scale_head],
                                    params[R.scale_row], params)  # fmt: skip
            has_pair = ti.select(angle >= 0, ti.select(lane < pairs, 1, 0), 0)
            held = ti.Vector([word(0) for _ in range(held_words)])
            c, s_ = ti.Vector([ti.f32(0.0) for _ in range(elements)]), ti.Vector([ti.f32(0.0) for _ in range(elements)])
            if has_pair == 1:
                held = read(x, at, lane)
                c, s_ = read_angles(cos, cos_row + lane * elements), read_angles(sin, sin_row + lane * elements)
            for g in ti.static(range(together)):
                before = ti.u32(0)
                if angle >= 0 and lane == 0:  # only this lane reads the scale, since only it writes the scale
                    before = ti.cast(scales[of_scales[g]], ti.u32)
                norm = scale_value(row_max(i, before))  # a scale is not negative, so its bits have its order
                both = values(held, g)
                for e in ti.static(range(2 * elements)):
                    both[e] = in_order(both[e] * norm, at[g])
                rotated = turn(both, c, s_, at[g])
                bits = scale_bits(row_max(i, largest(rotated, 2 * elements)))
                if has_pair == 1:
                    write(x, at[g], lane, rotated, reciprocal(scale_value(bits)))
                if angle >= 0 and lane == 0:
                    scales[of_scales[g]] = ti.cast(bits, scale_word)

    return body
