"""Words to values and back: the only place that knows the bits of a dtype.

A unit is a few neighbouring elements that one thread moves: `Codec` says how many, and which words hold them. Equal
dtypes move words and never look inside, so NaN payloads, -0 and subnormals stay as they are.
"""

import functools
from typing import NamedTuple

from tikv.formats import GROUP_FORMATS, OF_CODE
from tikv.kernels.exact import ONE, quotient
from tikv.runtime import ti

WORD = {8: ti.u8, 16: ti.u16, 32: ti.u32, 64: ti.u64}
SIZE = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1, "e5m2": 1, "i8": 1}
SCALE_WORD = {
    "": ti.u32,
    "f16": ti.u16,
    "bf16": ti.u16,
    "f32": ti.u32,
    "e4m3": ti.u8,
    "e8m0": ti.u8,
}  # dtypes of a row's or a group's scale
# The types with which CPU kernels view an array whose words are elements.
ELEMENT = {"f32": ti.f32, "f16": ti.f16, "bf16": ti.u16, "e4m3": ti.u8, "e5m2": ti.u8, "i8": ti.i8, "e8m0": ti.u8}


class Codec(NamedTuple):
    """How a unit is read and written: dtype codes ("raw" on both sides for a bit copy), elements, bits of a word."""

    src: str
    dst: str
    elements: int
    src_bits: int
    dst_bits: int
    turn: tuple[int, int] | None = None  # for codes of rotated rows: columns per block and seed, see `hadamard`

    @property
    def finds_scale(self) -> bool:
        """Whether a row is quantised with its own scale, computed from its largest magnitude."""
        return self.dst in OF_CODE and OF_CODE[self.dst].scale_of == "row"

    @property
    def src_words(self) -> int:
        """The words of a unit at the source; a group of codes counts as one."""
        whole = self.src == "raw" or self.src in GROUP_FORMATS
        return 1 if whole else self.elements * SIZE[self.src] * 8 // self.src_bits

    @property
    def dst_words(self) -> int:
        """The words of a unit at the destination."""
        return 1 if self.dst == "raw" else self.elements * SIZE[self.dst] * 8 // self.dst_bits


def word_array(bits):
    """The type of an array of words."""
    return ti.types.ndarray(dtype=WORD[bits], ndim=1)


def element_array(code):
    """The type of an array in which each word is one element."""
    return word_array(SIZE[code] * 8)


def scale_array(code):
    """The type of an array of the scales of int8 rows."""
    return ti.types.ndarray(dtype=SCALE_WORD[code], ndim=1)


@ti.func
def bf16_to_f32(bits):
    """The value of bfloat16 bits; exact."""
    return ti.bit_cast(ti.cast(bits, ti.u32) << ti.u32(16), ti.f32)


@ti.func
def f32_to_bf16(value):
    """Round to nearest even in integers; a NaN stays a (quiet) NaN."""
    u = ti.bit_cast(value, ti.u32)
    rounded = (u + ti.u32(0x7FFF) + ((u >> ti.u32(16)) & ti.u32(1))) >> ti.u32(16)
    nan = (u & ti.u32(0x7FFFFFFF)) > ti.u32(0x7F800000)
    return ti.cast(ti.select(nan, (u >> ti.u32(16)) | ti.u32(0x40), rounded), ti.u16)


@ti.func
def e4m3_to_f32(bits):
    """The value of float8_e4m3fn bits; exact. Except for NaN they are a float16 whose exponent is 8 too small."""
    half = ((bits & ti.u32(0x80)) << ti.u32(8)) | ((bits & ti.u32(0x7F)) << ti.u32(7))
    value = ti.cast(ti.bit_cast(ti.cast(half, ti.u16), ti.f16), ti.f32) * ti.f32(256.0)
    nan = ti.select((bits & ti.u32(0x7F)) == ti.u32(0x7F), ti.u32(0x7FC00000), ti.u32(0))
    return ti.bit_cast(ti.bit_cast(value, ti.u32) | nan, ti.f32)


@ti.func
def e5m2_to_f32(bits):
    """The value of float8_e5m2 bits, the upper half of a float16's; exact."""
    return ti.cast(ti.bit_cast(ti.cast((bits & ti.u32(0xFF)) << ti.u32(8), ti.u16), ti.f16), ti.f32)


@ti.func
def e8m0_to_f32(bits):
    """The value of float8_e8m0fnu bits, the exponent field of a float32; exact. The least is subnormal, 255 is NaN."""
    special = ti.select(
        bits == ti.u32(0), ti.u32(0x400000), ti.select(bits == ti.u32(255), ti.u32(0x400000), ti.u32(0))
    )
    return ti.bit_cast((bits << ti.u32(23)) | special, ti.f32)


@ti.func
def e2m1_to_f32(bits):
    """The value of a 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, whose doubles are the digits of one constant."""
    doubled = (ti.u32(0xC8643210) >> ((bits & ti.u32(7)) << ti.u32(2))) & ti.u32(15)
    value = ti.cast(ti.cast(doubled, ti.i32), ti.f32) * ti.f32(0.5)
    return ti.bit_cast(ti.bit_cast(value, ti.u32) | ((bits & ti.u32(8)) << ti.u32(28)), ti.f32)


class Float8(NamedTuple):
    """An 8-bit type: the bits of its fraction, its least normal exponent, the bytes of its largest number and NaN."""

    fraction: int
    least: int
    largest: int
    nan: int


FLOAT8 = {"e4m3": Float8(3, -6, 0x7E, 0x7F), "e5m2": Float8(2, -14, 0x7B, 0x7E)}


@functools.cache
def make_f32_to_float8(code, style):
    """f32_to_float8(value): nearest even, saturating, infinities too; a NaN stays a (quiet) NaN.

    It uses integers. Where arithmetic is IEEE, a subnormal result is rounded by adding a number whose last place is the
    least subnormal.
    """
    kind = FLOAT8[code]
    dropped = 23 - kind.fraction
    normal_field = kind.least + 127  # the exponent field of the least normal number as a float32
    rebias = (normal_field - 1) << 23
    large = 2.0 ** (kind.least - kind.fraction + 23)
    large_bits = (kind.least - kind.fraction + 23 + 127) << 23
    widest = dropped + normal_field  # the shift of a fraction to units of the least subnormal, and its exponent field

    @ti.func
    def f32_to_float8(value):
        u = ti.bit_cast(value, ti.u32)
        a = u & ti.u32(0x7FFFFFFF)
        r = a - ti.u32(rebias)
        normal = (r + ti.u32((1 << (dropped - 1)) - 1) + ((r >> ti.u32(dropped)) & ti.u32(1))) >> ti.u32(dropped)
        small = ti.u32(0)
        if ti.static(style == "spirv"):
            field = ti.min(ti.max(a >> ti.u32(23), ti.u32(widest - 25)), ti.u32(normal_field - 1))  # 25 shift all to 0
            shift = ti.u32(widest) - field
            m = (a & ti.u32(0x7FFFFF)) | ti.u32(0x800000)
            small = (m + (ti.u32(1) << (shift - ti.u32(1))) - ti.u32(1) + ((m >> shift) & ti.u32(1))) >> shift
        else:
            small = ti.bit_cast(ti.bit_cast(a, ti.f32) + ti.f32(large), ti.u32) - ti.u32(large_bits)
        byte = ti.select(a >= ti.u32(normal_field << 23), ti.min(normal, ti.u32(kind.largest)), small)
        byte = ti.select(a > ti.u32(0x7F800000), ti.u32(kind.nan), byte)
        return byte | ((u >> ti.u32(24)) & ti.u32(0x80))

    return f32_to_float8


@ti.func
def f32_to_f16_integer(value):
    """Round to nearest even in integers, for back ends that leave the rounding of a cast open."""
    u = ti.bit_cast(value, ti.u32)
    sign = (u >> ti.u32(16)) & ti.u32(0x8000)
    a = u & ti.u32(0x7FFFFFFF)
    half = ti.u32(0)
    if a >= ti.u32(0x7F800000):
        half = ti.u32(0x7C00)
        if a > ti.u32(0x7F800000):
            half = ti.u32(0x7E00)
    elif a >= ti.u32(0x477FF000):  # 65520 and above
        half = ti.u32(0x7C00)
    elif a >= ti.u32(0x38800000):  # normal: 2**-14 and above
        r = a - ti.u32(0x38000000)
        half = (r + ti.u32(0xFFF) + ((r >> ti.u32(13)) & ti.u32(1))) >> ti.u32(13)
    elif a > ti.u32(0x33000000):  # subnormal; 2**-25 itself ties to zero
        shift = ti.u32(126) - (a >> ti.u32(23))
        m = (a & ti.u32(0x7FFFFF)) | ti.u32(0x800000)
        rounded = m >> shift
        rest = m & ((ti.u32(1) << shift) - ti.u32(1))
        tie = ti.u32(1) << (shift - ti.u32(1))
        if rest > tie or (rest == tie and (rounded & ti.u32(1)) == ti.u32(1)):
            rounded = rounded + ti.u32(1)
        half = rounded
    return ti.cast(half | sign, ti.u16)


@ti.func
def f32_to_f16_cast(value):
    """The same, if a cast rounds to nearest even: on CPU and CUDA."""
    return ti.bit_cast(ti.cast(value, ti.f16), ti.u16)


@ti.func
def finite_magnitude_bits(value):
    """The bits of |value|, or 0 if it is Inf or NaN; they order as the magnitudes do."""
    a = ti.bit_cast(value, ti.u32) & ti.u32(0x7FFFFFFF)
    return ti.select(a < ti.u32(0x7F800000), a, ti.u32(0))


@functools.cache
def make_word_magnitude(code):
    """(type, magnitude(word), to_bits(magnitude)): `finite_magnitude_bits` for words of one element.

    Magnitudes of 16-bit types are ordered as their words are: no conversion is needed, and a vector register holds
    twice as many. They are signed, since vector instructions compare signed integers.
    """
    number, infinite, mask = {
        "f32": (ti.i32, 0x7F800000, 0x7FFFFFFF),
        "f16": (ti.i16, 0x7C00, 0x7FFF),
        "bf16": (ti.i16, 0x7F80, 0x7FFF),
    }[code]
    decode = make_bits_to_f32(code)

    @ti.func
    def magnitude(bits):
        a = ti.cast(bits, number) & number(mask)
        return ti.select(a < number(infinite), a, number(0))

    @ti.func
    def to_bits(a):
        return ti.bit_cast(decode(a), ti.u32)

    return number, magnitude, to_bits


@ti.func
def round_half_even(x):
    """The nearest integer, ties to even, exact for |x| < 2**22 under any floating-point mode."""
    low = ti.floor(x)
    rest = x - low
    whole = ti.cast(low, ti.i32)
    # No `|` or `&` between comparisons: they become bitwise operations on booleans, which SPIR-V does not have.
    return whole + ti.select(rest == ti.f32(0.5), whole & 1, ti.select(rest > ti.f32(0.5), 1, 0))


@ti.func
def round_half_even_by_addition(x):
    """The same, if arithmetic is IEEE: adding 1.5 * 2**23 leaves the rounded integer in the low bits."""
    return ti.bit_cast(x + ti.f32(12582912.0), ti.i32) - 0x4B400000


@functools.cache
def make_quantise(style):
    """quantise(value, inverse_scale): int8 of value / scale, nearest even, in -127..127; Inf saturates, NaN gives 0."""
    rounded = round_half_even if style == "spirv" else round_half_even_by_addition

    @ti.func
    def quantise(value, inverse_scale):
        # Selects and a signed comparison are used, since LLVM has one vector instruction for each.
        scaled = value * inverse_scale
        scaled = ti.select(scaled > ti.f32(-127.0), scaled, ti.f32(-127.0))
        scaled = ti.select(scaled < ti.f32(127.0), scaled, ti.f32(127.0))
        a = ti.bit_cast(value, ti.i32) & 0x7FFFFFFF
        return rounded(ti.select(a > 0x7F800000, ti.f32(0.0), scaled))

    return quantise


@functools.cache
def make_bits_to_f32(code):
    """The function that turns the bits of one element into float32; exact for every dtype here."""

    @ti.func
    def bits_to_f32(bits):
        value = ti.f32(0.0)
        if ti.static(code == "f32"):
            value = ti.bit_cast(ti.cast(bits, ti.u32), ti.f32)
        elif ti.static(code == "f16"):
            value = ti.cast(ti.bit_cast(ti.cast(bits, ti.u16), ti.f16), ti.f32)
        elif ti.static(code == "bf16"):
            value = bf16_to_f32(bits)
        elif ti.static(code == "e4m3"):
            value = e4m3_to_f32(ti.cast(bits, ti.u32))
        elif ti.static(code == "e5m2"):
            value = e5m2_to_f32(ti.cast(bits, ti.u32))
        elif ti.static(code == "e8m0"):
            value = e8m0_to_f32(ti.cast(bits, ti.u32))
        else:
            value = ti.cast(ti.cast(ti.cast(bits, ti.u8), ti.i8), ti.f32)
        return value

    return bits_to_f32


@functools.cache
def make_element_to_f32(code):
    """element_to_f32(x): the float32 value of an `ELEMENT`."""

    @ti.func
    def element_to_f32(x):
        value = ti.f32(0.0)
        if ti.static(code == "bf16"):
            value = bf16_to_f32(x)
        elif ti.static(code == "e4m3"):
            value = e4m3_to_f32(ti.cast(x, ti.u32))
        elif ti.static(code == "e5m2"):
            value = e5m2_to_f32(ti.cast(x, ti.u32))
        elif ti.static(code == "e8m0"):
            value = e8m0_to_f32(ti.cast(x, ti.u32))
        else:
            value = ti.cast(x, ti.f32)
        return value

    return element_to_f32


@functools.cache
def make_f32_to_bits(code, style):
    """The function that turns float32 into the bits of one element, rounding to nearest even where it must."""
    f32_to_f16 = f32_to_f16_integer if style == "spirv" else f32_to_f16_cast
    f32_to_float8 = make_f32_to_float8(code, style) if code in FLOAT8 else None

    @ti.func
    def f32_to_bits(value):
        bits = ti.u32(0)
        if ti.static(code == "f32"):
            bits = ti.bit_cast(value, ti.u32)
        elif ti.static(code == "f16"):
            bits = ti.cast(f32_to_f16(value), ti.u32)
        elif ti.static(code in FLOAT8):
            bits = f32_to_float8(value)
        elif ti.static(code == "e8m0"):  # of powers of two alone
            bits = (ti.bit_cast(value, ti.u32) >> ti.u32(23)) & ti.u32(0xFF)
        else:
            bits = ti.cast(f32_to_bf16(value), ti.u32)
        return bits

    return f32_to_bits


@functools.cache
def make_decode(code, bits):
    """decode(word) -> the float32 values of the elements in a word.

    Words of 64 bits are decoded in halves. Of four bytes, one becomes a float by an addition, and the others by the
    GPU's converter, which takes fewer instructions but is slow: so both units are busy.
    """
    value = make_bits_to_f32(code)
    width = SIZE[code] * 8
    per_half = min(bits, 32) // width

    @ti.func
    def decode(word):
        values = ti.Vector([ti.f32(0.0) for _ in range(bits // width)])
        for n in ti.static(range(max(bits // 32, 1))):
            half = ti.cast(word >> WORD[bits](32 * n), ti.u32)
            for e in ti.static(range(per_half)):
                if ti.static(code != "i8" or bits < 32):
                    values[n * per_half + e] = value(half >> ti.u32(width * e))
                elif ti.static(e == 0):
                    biased = (half & ti.u32(0xFF)) ^ ti.u32(0x4B000080)  # 2**23 + 128 + the value
                    values[n * per_half + e] = ti.bit_cast(biased, ti.f32) - ti.f32(8388736.0)
                else:
                    signed = ti.bit_cast(half << ti.u32(24 - width * e), ti.i32) >> 24
                    values[n * per_half + e] = ti.cast(signed, ti.f32)
        return values

    return decode


@functools.cache
def make_load(code, elements, bits):
    """load(array, word) -> the float32 values of the unit whose first word is `word`."""
    decode = make_decode(code, bits)
    per_word = bits // (SIZE[code] * 8)
    words = elements // per_word

    @ti.func
    def load(array: ti.template(), first):
        values = ti.Vector([ti.f32(0.0) for _ in range(elements)])
        for w in ti.static(range(words)):
            x = decode(array[first + w])
            for q in ti.static(range(per_word)):
                values[w * per_word + q] = x[q]
        return values

    return load


@functools.cache
def make_store(code, elements, bits, style):
    """store(array, word, values, inverse_scale): encode a unit's values into its words."""
    word = WORD[bits]
    width = SIZE[code] * 8
    per_word = bits // width
    words = elements // per_word
    encode = None if code == "i8" else make_f32_to_bits(code, style)
    quantise = make_quantise(style)

    @ti.func
    def store(array: ti.template(), first, values, inverse_scale):
        for w in ti.static(range(words)):
            x = word(0)
            for q in ti.static(range(per_word)):
                b = ti.u32(0)
                if ti.static(code == "i8"):
                    b = ti.cast(quantise(values[w * per_word + q], inverse_scale) & 0xFF, ti.u32)
                else:
                    b = encode(values[w * per_word + q])
                x = x | (ti.cast(b, word) << word(q * width))
            array[first + w] = x

    return store


@functools.cache
def make_reciprocal(style):
    """reciprocal(value): 1 / value, correctly rounded, for a normal value below 2**126."""

    @ti.func
    def reciprocal(value):
        inverse = ti.f32(0.0)
        if ti.static(style == "cpu"):
            inverse = ti.f32(1.0) / value
        else:
            inverse = ti.bit_cast(quotient(ti.u32(ONE), ti.bit_cast(value, ti.u32)), ti.f32)
        return inverse

    return reciprocal


BITS_OF_127 = 0x42FE0000
SCALE_LIMITS = {"f16": (6.103515625e-05, 65504.0), "f32": (2.0**-125, 3.4028234663852886e38)}


@functools.cache
def make_scale(code, style):
    """scale_bits(magnitude_bits): the scale of a row as stored, max|x| / 127 rounded to the scale's dtype.

    It is never below the smallest normal number nor above the largest finite one, so its reciprocal is finite. In
    float32 it is at least twice the smallest: a subnormal number then gets code 0, whether a GPU takes it for 0 or not.
    """
    low, high = SCALE_LIMITS[code]
    encode = make_f32_to_bits(code, style)

    @ti.func
    def scale_bits(magnitude_bits):
        exact = ti.f32(0.0)
        if ti.static(style == "cpu"):
            exact = ti.bit_cast(magnitude_bits, ti.f32) / ti.f32(127.0)
        else:
            exact = ti.bit_cast(quotient(magnitude_bits, ti.u32(BITS_OF_127)), ti.f32)
        return encode(ti.min(ti.max(exact, ti.f32(low)), ti.f32(high)))

    return scale_bits
