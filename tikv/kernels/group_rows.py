"""Quantise rows in groups on CPU, and dequantise them: loops over the numbers of a group that LLVM vectorises.

The bits are those of `kernels/groups.py`, whose rules compute a group's scale. The loops have no branches: the order of
comparisons decides what a NaN or an infinity becomes. An iteration computes as many codes as fill whole words of the
destination, so no two iterations write to one word. Words of one byte are twice as fast as wider words, which LLVM
fills from numbers that lie far apart.
"""

from tikv.formats import GROUP_FORMATS
from tikv.kernels.codec import SCALE_WORD, WORD, make_bits_to_f32, make_f32_to_bits, round_half_even_by_addition
from tikv.kernels.exact import without_small
from tikv.kernels.groups import (
    BIAS,
    FACTOR,
    INFINITE,
    ORIGIN,
    SCALE,
    make_column,
    make_dequantise_group,
    make_divided,
    make_float_code,
    make_rule,
    make_value_of_code,
)
from tikv.kernels.hadamard import add_pair, local_row, make_sign_of, steps_of, with_sign
from tikv.runtime import ti

BELOW_HALF = 0.49999997  # the float before 0.5: adding it and truncating rounds correctly, with halves up
# For a float's bits as integers: the signed and unsigned type, infinity's bits, all bits but the sign, its shift.
WORDS = {
    "f32": (ti.i32, ti.u32, 0x7F800000, 0x7FFFFFFF, 31),
    "f16": (ti.i16, ti.u16, 0x7C00, 0x7FFF, 15),
    "bf16": (ti.i16, ti.u16, 0x7F80, 0x7FFF, 15),
}
WORD_OF = {"f32": ti.u32, "f16": ti.u16, "bf16": ti.u16}


@ti.func
def above(x, low):
    """The larger of two floats, or the second if the first is a NaN."""
    return ti.select(x > low, x, low)


@ti.func
def below(x, high):
    """The smaller of two floats."""
    return ti.select(x < high, x, high)


def make_code_of(name):
    """code_of(value, origin, factor) -> the code of a number as an i32, with the numbers from `Rule.finish`."""
    row = GROUP_FORMATS[name]
    last = float((1 << row.bits) - 1)
    float_code = make_float_code(name, "cpu") if row.is_float else None

    @ti.func
    def code_of(value, origin, factor):
        code = 0
        if ti.static(row.rule == "affine"):
            steps = below(above((value - origin) / factor, ti.f32(0.0)), ti.f32(last))
            code = round_half_even_by_addition(steps)
        elif ti.static(row.rule == "q8_0"):
            scaled = value * factor  # also a NaN for an infinity if the factor is 0
            a = below(above(ti.abs(scaled), ti.f32(0.0)), ti.f32(127.0))
            whole = ti.cast(a + ti.f32(BELOW_HALF), ti.i32)
            code = ti.select(scaled < ti.f32(0.0), -whole, whole)
        elif ti.static(row.is_float):
            code = ti.cast(float_code(value, factor), ti.i32)
        else:
            scaled = value * factor
            scaled = ti.select(scaled == scaled, scaled, ti.f32(0.0))
            code = ti.cast(below(above(scaled + ti.f32(8.5), ti.f32(0.0)), ti.f32(15.5)), ti.i32)
        return code

    return code_of


def make_quantise_rows(heads, codec, scale, types):
    """quantise_rows(...): quantises a token's rows, as `rows` of `kernels.copy.make_rows`, but `units` counts groups.

    Words of the source are elements.
    """
    name, source, word_bits = codec.dst, codec.src if codec.turn is None else "f32", codec.dst_bits
    row, finish = GROUP_FORMATS[name], make_rule(name, "cpu").finish
    rotated, load = codec.turn is not None, make_bits_to_f32(codec.src)
    block, seed = codec.turn or (GROUP_FORMATS[name].group, 0)
    steps, sign_of, ROW = steps_of(block), make_sign_of(seed), local_row(block if rotated else 1)
    decode, encode, code_of = make_bits_to_f32(source), make_f32_to_bits(scale, "cpu"), make_code_of(name)
    divided = make_divided(name, "cpu")
    kind, unsigned, infinite, mask, sign_at = WORDS[source]
    size, bits, numbers, scale_word = row.group, row.bits, row.numbers, SCALE_WORD[scale]
    # The codes of an iteration and the words that it fills; for each word, the codes that have bits in it.
    codes, filled = (word_bits // bits, 1) if word_bits % bits == 0 else (word_bits, bits)
    parts = [[e for e in range(codes) if word * word_bits - bits < e * bits < (word + 1) * word_bits]
             for word in range(filled)]  # fmt: skip
    columns, step = range(codes), codes
    if row.rule == "q4_0":
        columns, step = [e // 2 + e % 2 * 16 for e in range(codes)], codes // 2
    iterations, per_block = size // codes, block // size
    WORD_TYPE = WORD[word_bits]
    affine, by_sign = row.rule == "affine", row.rule == "q4_0"
    SRC, DST, SCALES = types

    @ti.func
    def ordered(i):
        """An integer with the order of the float that has the bits `i`; a second call restores `i`."""
        return i ^ ti.cast(ti.cast(i >> kind(sign_at), unsigned) >> unsigned(1), kind)

    @ti.func
    def magnitude_of(word):
        m = ti.cast(word, kind) & kind(mask)
        return ti.select(m < kind(infinite), m, kind(0))

    @ti.func
    def word_at(a: ti.template(), row: ti.template(), first, begin, e):
        """The bits of a number in the source, or in a rotated row."""
        word = WORD_OF[source](0)
        if ti.static(rotated):
            word = ti.bit_cast(row[begin + e], ti.u32)
        else:
            word = a[first + begin + e]
        return word

    # The loops are in the real function itself: loops in a function that it calls would crash the process.
    @ti.real_func
    def quantise_rows(a: SRC, b: DST, scales: SCALES, src_row: ti.i32, dst_row: ti.i32, scale_at: ti.i32, units: ti.i32,
                      src_head: ti.i32, dst_head: ti.i32, scale_head: ti.i32, tensor: ti.f32,
                      number: ti.i32):  # fmt: skip
        sign = ti.cast(ti.cast(units, ti.u32) >> ti.u32(31), ti.i32)
        row, other = ROW(0.0), ROW(0.0)
        for h in range(heads + sign):
            for n in range(units // per_block):
                first = src_row + h * src_head + n * block
                if ti.static(rotated):
                    for i in range(block):
                        x = with_sign(without_small(load(a[first + i])), sign_of(n * block + i))
                        if ti.static(steps % 2 == 1):
                            other[i] = x
                        else:
                            row[i] = x
                    for z in ti.static(range(steps)):
                        for i in range(block // 2):
                            if ti.static((steps - z) % 2 == 1):
                                add_pair(other, row, i)
                            else:
                                add_pair(row, other, i)
                    for i in range(block):
                        row[i] = row[i] * ti.f32(ti.static(block**-0.5))
                for m in range(per_block):
                    u, of_group = n * per_block + m, m * size
                    to = dst_row + h * dst_head + u * iterations * filled
                    at = scale_at + h * scale_head + u * numbers
                    low, high = kind(mask), kind(-mask)
                    if ti.static(affine):
                        for e in range(size):
                            i = ti.cast(word_at(a, row, first, of_group, e), kind)
                            finite = (i & kind(mask)) < kind(infinite)
                            order = ordered(i)
                            low = ti.min(low, ti.select(finite, order, kind(mask)))
                            high = ti.max(high, ti.select(finite, order, kind(-mask)))
                        low, high = ordered(low), ordered(high)
                    else:
                        low = kind(0)
                        for e in range(size):
                            low = ti.max(low, magnitude_of(word_at(a, row, first, of_group, e)))
                        if ti.static(by_sign):
                            edge_at = kind(size)
                            for e in range(size):
                                here = magnitude_of(word_at(a, row, first, of_group, e)) == low
                                edge_at = ti.min(edge_at, ti.select(here, ti.cast(e, kind), kind(size)))
                            edge = ti.cast(word_at(a, row, first, of_group, ti.cast(edge_at, ti.i32)), kind)
                            low = ti.select((edge & kind(mask)) < kind(infinite), edge, kind(0))
                    group_numbers = finish(ti.Vector([divided(decode(low), tensor), decode(high)]))
                    scales[at] = ti.cast(encode(group_numbers[SCALE]), scale_word)
                    if ti.static(numbers == 2):
                        scales[at + 1] = ti.cast(encode(group_numbers[BIAS]), scale_word)
                    origin, factor = group_numbers[ORIGIN], group_numbers[FACTOR]
                    if ti.static(affine):
                        factor = ti.select(factor == ti.f32(0.0), ti.bit_cast(ti.u32(INFINITE), ti.f32), factor)
                    for k in range(iterations):
                        begin = of_group + k * step
                        values = [divided(decode(word_at(a, row, first, begin, e)), tensor) for e in columns]
                        quantised = ti.Vector([code_of(value, origin, factor) for value in values])
                        for word in ti.static(range(filled)):
                            packed = ti.u32(0)
                            for e in ti.static(parts[word]):
                                code = ti.cast(quantised[e], ti.u32) & ti.u32((1 << bits) - 1)
                                shift = ti.static(e * bits - word * word_bits)
                                if ti.static(shift >= 0):
                                    packed = packed | (code << ti.u32(shift))
                                else:
                                    packed = packed | (code >> ti.u32(-shift))
                            b[to + k * filled + word] = ti.cast(packed, WORD_TYPE)

    return quantise_rows


def make_dequantise_rows(heads, codec, scale, types, uid):
    """dequantise_rows(...): dequantises a token's rows, with the arguments of `make_quantise_rows`."""
    rotated, row = codec.turn is not None, GROUP_FORMATS[codec.src]
    block = codec.turn[0] if rotated else row.group
    dequantise_group = None if rotated else make_dequantise_group(codec.src, codec.dst, scale)
    dequantise_block = make_dequantise_block(codec, scale, types) if rotated else None
    words, per_block = block * row.bits // 32, block // row.group

    @ti.func
    def dequantise_rows(a: ti.template(), b: ti.template(), scales: ti.template(), src_row, dst_row, scale_at, units,
                        src_head, dst_head, scale_head, tensor, number):  # fmt: skip
        for h in range(heads):
            src, dst, at = src_row + h * src_head, dst_row + h * dst_head, scale_at + h * scale_head
            if ti.static(rotated):
                for n in range(units // per_block):
                    dequantise_block(a, b, scales, src + n * words, dst + n * block, at + n * per_block * row.numbers,
                                     n * block, tensor, uid)  # fmt: skip
            else:
                for u in range(units):
                    dequantise_group(a, b, scales, src, dst, at, u, tensor)

    return dequantise_rows


def make_dequantise_block(codec, scale, types):
    """dequantise_block(a, b, scales, ...): dequantises a block of a row from column `first`, and rotates it back."""
    name, (block, seed) = codec.src, codec.turn
    row, column, value_of_code = GROUP_FORMATS[name], make_column(name), make_value_of_code(name, "cpu")
    encode, decode_scale, word_type = make_f32_to_bits(codec.dst, "cpu"), make_bits_to_f32(scale), WORD[codec.dst_bits]
    size, bits, mask = row.group, row.bits, (1 << row.bits) - 1
    steps, sign_of, ROW = steps_of(block), make_sign_of(seed), local_row(block)
    SRC, DST, SCALES = types

    @ti.real_func
    def dequantise_block(a: SRC, b: DST, scales: SCALES, src: ti.i32, dst: ti.i32, at: ti.i32, first: ti.i32,
                         tensor: ti.f32, number: ti.i32):  # fmt: skip
        rotated, other = ROW(0.0), ROW(0.0)
        for e in range(block):
            group = at + e // size * row.numbers
            step, bias = decode_scale(scales[group]), ti.f32(0.0)
            if ti.static(row.numbers == 2):
                bias = decode_scale(scales[group + 1])
            word, shift = src + (e * bits >> 5), e * bits & 31
            code = a[word] >> ti.cast(shift, ti.u32)
            if ti.static(32 % bits != 0):  # for a code within one word, the second word is the same, and is shifted out
                behind = a[word + ti.select(shift + bits > 32, 1, 0)]
                code = code | ((behind << ti.u32(1)) << ti.cast(31 - shift, ti.u32))
            x = value_of_code(code & ti.u32(mask), step, bias, 0)
            if ti.static(row.has_tensor_scale):
                x = x * tensor
            x = without_small(x)
            if ti.static(steps % 2 == 1):
                other[column(e)] = x
            else:
                rotated[column(e)] = x
        for z in ti.static(range(steps)):
            for i in range(block // 2):
                if ti.static((steps - z) % 2 == 1):
                    add_pair(other, rotated, i)
                else:
                    add_pair(rotated, other, i)
        for i in range(block):
            x = with_sign(rotated[i] * ti.f32(ti.static(block**-0.5)), sign_of(first + i))
            b[dst + i] = ti.cast(encode(x), word_type)

    return dequantise_block
