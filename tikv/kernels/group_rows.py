"""Rows as codes of groups on CPU, and back: loops over the numbers of a group that LLVM turns into vector instructions.

The bits are those of `kernels/groups.py`, whose rules find a group's scale. A loop has no branch and stores no word of
which an iteration before has a part: what a NaN or an infinity becomes is chosen by the order of comparisons, and an
iteration finds as many codes as fill words of the destination. Bytes are twice as fast as wider ones, which LLVM fills
from numbers that lie far apart.
"""

from tikv.formats import GROUP_FORMATS
from tikv.kernels.codec import SCALE_WORD, WORD, make_bits_to_f32, make_f32_to_bits, round_half_even_by_addition
from tikv.kernels.groups import BIAS, FACTOR, INFINITE, ORIGIN, SCALE, make_dequantise_group, make_rule
from tikv.runtime import ti

BELOW_HALF = 0.49999997  # the float before 0.5: with it added, what is cut to a whole number was rounded half up
# Of a float's bits as a signed integer: its type, those of infinity, all but the sign, and how far the sign is.
WORDS = {
    "f32": (ti.i32, ti.u32, 0x7F800000, 0x7FFFFFFF, 31),
    "f16": (ti.i16, ti.u16, 0x7C00, 0x7FFF, 15),
    "bf16": (ti.i16, ti.u16, 0x7F80, 0x7FFF, 15),
}


@ti.func
def above(x, low):
    """The larger of two floats, the second where the first is a NaN."""
    return ti.select(x > low, x, low)


@ti.func
def below(x, high):
    """The smaller of two floats."""
    return ti.select(x < high, x, high)


def make_code_of(name):
    """code_of(value, origin, factor) -> the code of a number as an i32, by what `Rule.finish` found."""
    row = GROUP_FORMATS[name]
    last = float((1 << row.bits) - 1)

    @ti.func
    def code_of(value, origin, factor):
        found = 0
        if ti.static(row.rule == "affine"):
            steps = below(above((value - origin) / factor, ti.f32(0.0)), ti.f32(last))
            found = round_half_even_by_addition(steps)
        elif ti.static(row.rule == "q8_0"):
            scaled = value * factor  # a NaN also of an infinity where all is 0
            a = below(above(ti.abs(scaled), ti.f32(0.0)), ti.f32(127.0))
            whole = ti.cast(a + ti.f32(BELOW_HALF), ti.i32)
            found = ti.select(scaled < ti.f32(0.0), -whole, whole)
        else:
            scaled = value * factor
            scaled = ti.select(scaled == scaled, scaled, ti.f32(0.0))
            found = ti.cast(below(above(scaled + ti.f32(8.5), ti.f32(0.0)), ti.f32(15.5)), ti.i32)
        return found

    return code_of


def make_quantise_rows(heads, codec, scale, types):
    """quantise_rows(...): a token's rows, as `rows` of `kernels.copy.make_rows` but that `units` counts groups.

    Words of the source are elements.
    """
    name, source, word_bits = codec.dst, codec.src, codec.dst_bits
    row, finish = GROUP_FORMATS[name], make_rule(name, "cpu").finish
    decode, encode, code_of = make_bits_to_f32(source), make_f32_to_bits(scale, "cpu"), make_code_of(name)
    kind, unsigned, infinite, mask, sign_at = WORDS[source]
    size, bits, numbers, scale_word = row.group, row.bits, row.numbers, SCALE_WORD[scale]
    # What an iteration finds and the words that it fills; of each word the codes that have a part in it.
    codes, filled = (word_bits // bits, 1) if word_bits % bits == 0 else (word_bits, bits)
    parts = [[e for e in range(codes) if word * word_bits - bits < e * bits < (word + 1) * word_bits]
             for word in range(filled)]  # fmt: skip
    columns, step = range(codes), codes
    if row.rule == "q4_0":
        columns, step = [e // 2 + e % 2 * 16 for e in range(codes)], codes // 2
    iterations = size // codes
    WORD_TYPE = WORD[word_bits]
    affine, by_sign = row.rule == "affine", row.rule == "q4_0"
    SRC, DST, SCALES = types

    @ti.func
    def turned(i):
        """An integer that orders as the float of bits `i` does; again, and it is `i`."""
        return i ^ ti.cast(ti.cast(i >> kind(sign_at), unsigned) >> unsigned(1), kind)

    @ti.func
    def magnitude_of(word):
        m = ti.cast(word, kind) & kind(mask)
        return ti.select(m < kind(infinite), m, kind(0))

    @ti.real_func
    def quantise_rows(a: SRC, b: DST, scales: SCALES, src_row: ti.i32, dst_row: ti.i32, scale_at: ti.i32, units: ti.i32,
                      src_head: ti.i32, dst_head: ti.i32, scale_head: ti.i32, number: ti.i32):  # fmt: skip
        sign = ti.cast(ti.cast(units, ti.u32) >> ti.u32(31), ti.i32)
        for h in range(heads + sign):
            for u in range(units):
                first = src_row + h * src_head + u * size
                to = dst_row + h * dst_head + u * iterations * filled
                at = scale_at + h * scale_head + u * numbers
                low, high = kind(mask), kind(-mask)
                if ti.static(affine):
                    for e in range(size):
                        i = ti.cast(a[first + e], kind)
                        finite = (i & kind(mask)) < kind(infinite)
                        order = turned(i)
                        low = ti.min(low, ti.select(finite, order, kind(mask)))
                        high = ti.max(high, ti.select(finite, order, kind(-mask)))
                    low, high = turned(low), turned(high)
                else:
                    low = kind(0)
                    for e in range(size):
                        low = ti.max(low, magnitude_of(a[first + e]))
                    if ti.static(by_sign):
                        place = kind(size)
                        for e in range(size):
                            here = magnitude_of(a[first + e]) == low
                            place = ti.min(place, ti.select(here, ti.cast(e, kind), kind(size)))
                        edge = ti.cast(a[first + ti.cast(place, ti.i32)], kind)
                        low = ti.select((edge & kind(mask)) < kind(infinite), edge, kind(0))
                found = finish(ti.Vector([decode(low), decode(high)]))
                scales[at] = ti.cast(encode(found[SCALE]), scale_word)
                if ti.static(numbers == 2):
                    scales[at + 1] = ti.cast(encode(found[BIAS]), scale_word)
                origin, factor = found[ORIGIN], found[FACTOR]
                if ti.static(affine):
                    factor = ti.select(factor == ti.f32(0.0), ti.bit_cast(ti.u32(INFINITE), ti.f32), factor)
                for n in range(iterations):
                    begin = first + n * step
                    found_codes = ti.Vector([code_of(decode(a[begin + e]), origin, factor) for e in columns])
                    for word in ti.static(range(filled)):
                        packed = ti.u32(0)
                        for e in ti.static(parts[word]):
                            code = ti.cast(found_codes[e], ti.u32) & ti.u32((1 << bits) - 1)
                            shift = ti.static(e * bits - word * word_bits)
                            if ti.static(shift >= 0):
                                packed = packed | (code << ti.u32(shift))
                            else:
                                packed = packed | (code >> ti.u32(-shift))
                        b[to + n * filled + word] = ti.cast(packed, WORD_TYPE)

    return quantise_rows


def make_dequantise_rows(heads, codec, scale):
    """dequantise_rows(...): a token's rows of codes as numbers, otherwise as `make_quantise_rows`."""
    dequantise_group = make_dequantise_group(codec.src, codec.dst, scale)

    @ti.func
    def dequantise_rows(a: ti.template(), b: ti.template(), scales: ti.template(), src_row, dst_row, scale_at, units,
                        src_head, dst_head, scale_head, number):  # fmt: skip
        for h in range(heads):
            src, dst, at = src_row + h * src_head, dst_row + h * dst_head, scale_at + h * scale_head
            for u in range(units):
                dequantise_group(a, b, scales, src, dst, at, u)

    return dequantise_rows
