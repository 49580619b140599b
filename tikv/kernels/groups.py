"""Encode and decode groups of numbers as codes of a few bits, by each rule of `tikv/formats.py`.

Each rule gives the bits of the library that it comes from, on every back end. Quotients are the nearest float32
(`exact.make_ratio`), products are rounded before a sum, and integers do everything else that could be rounded in two
ways. A group's range covers its finite numbers. A NaN gets the code of 0, or code 0, and an infinity gets the last code
on its side. Codes that are floats keep the sign of a 0, and those of 8 bits keep a NaN.
"""

import functools
from typing import NamedTuple

from tikv.formats import FLOAT_RULES, GROUP_FORMATS
from tikv.kernels.codec import (
    FLOAT8,
    e2m1_to_f32,
    e4m3_to_f32,
    make_bits_to_f32,
    make_f32_to_bits,
    make_f32_to_float8,
    make_store,
)
from tikv.kernels.exact import (
    HIDDEN,
    OFF,
    TAME_BITS,
    make_code_product,
    make_product,
    make_ratio,
    make_small_ratio,
    near_reciprocal,
)
from tikv.runtime import ti

LARGEST = 3.4028234663852886e38
LEAST_SCALE = 1e-7  # of mlx
SMALL_BITS = (127 - 100) << 23  # GGUF's rules take groups below 2**-100 for 0, since their scale is 0 in float16
INFINITE = 0x7F800000
LARGE_BITS = (127 + 20) << 23  # the fraction of a quotient from 2**20 on is unknown without its rounding
UNIT = 4  # codes that a thread of a GPU takes at a time in attention
LARGEST_BITS = 0x7F7FFFFF
# The middles between neighbouring 4-bit floats from 0 on; at a middle, the even code is taken.
HALF_WAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
POWER = {"mxfp8": 8, "mxfp4": 2}  # the exponent of the largest power of two in an element
BEYOND_BITS = (127 + 20) << 23  # a number above 2**20 exceeds the largest code with any scale of 8 bits
NOTHING = 2.0**30  # replaces a block's scale of 0
SCALE, BIAS, FACTOR, ORIGIN = range(4)  # a group's numbers: the two that are stored, and the two that give codes


class Rule(NamedTuple):
    """How the groups of a format are encoded.

    The state of a group in mlx's formats is its least and its largest finite number; the first exceeds the second if
    all numbers are 0 or not finite. In GGUF's formats the state is the first number of the largest magnitude, whose
    sign q8_0 does not need, and 0.
    """

    finish: object  # finish(state of a group) -> its numbers
    code: object  # code(value, numbers, row) -> the code of a value


@ti.func
def round_to_even(x):
    """The integer nearest to a float that is not negative, ties to even; it also works above 2**31."""
    low = ti.floor(x)
    rest = x - low
    half = low * ti.f32(0.5)
    odd = half - ti.floor(half) > ti.f32(0.0)
    up = ti.select(rest == ti.f32(0.5), ti.select(odd, ti.f32(1.0), ti.f32(0.0)),
                   ti.select(rest > ti.f32(0.5), ti.f32(1.0), ti.f32(0.0)))  # fmt: skip
    return low + up


@ti.func
def magnitude(x):
    """The bits of |x|."""
    return ti.bit_cast(x, ti.u32) & ti.u32(0x7FFFFFFF)


@ti.func
def signed(bits, negative):
    """The float with the bits of a magnitude, and a sign."""
    return ti.bit_cast(bits | ti.select(negative, ti.u32(0x80000000), ti.u32(0)), ti.f32)


@functools.cache
def make_whole_ratio(style):
    """whole_ratio(x, y): the integer nearest to the float32 nearest to x / y, for x >= 0 and a normal y > 0."""
    ratio = make_ratio(style)

    @ti.func
    def whole_ratio(x, y):
        rounded = ti.f32(0.0)
        if ti.static(style == "cpu"):
            rounded = round_to_even(ratio(x, y))
        else:
            quick = x * near_reciprocal(y)
            rounded = ti.floor(quick + ti.f32(0.5))
            doubt = ti.abs(quick - rounded) + quick * ti.f32(OFF)
            if doubt >= ti.f32(0.5) or magnitude(quick) > ti.u32(LARGE_BITS) or magnitude(y) > ti.u32(TAME_BITS):
                rounded = round_to_even(ratio(x, y))
        return rounded

    return whole_ratio


def make_affine(bits, style):
    """The rule of mlx: codes count steps from the edge of larger magnitude, which is a whole number of steps."""
    ratio, small_ratio, whole_ratio = make_ratio(style), make_small_ratio(style), make_whole_ratio(style)
    last = float((1 << bits) - 1)

    @ti.func
    def finish(state):
        any_finite = state[0] <= state[1]
        low, high = ti.select(any_finite, state[0], ti.f32(0.0)), ti.select(any_finite, state[1], ti.f32(0.0))
        # A subnormal edge decides only the sign of the scale, and a GPU may have found another one, or 0.
        low = ti.select(magnitude(low) < ti.u32(HIDDEN), ti.f32(0.0), low)
        high = ti.select(magnitude(high) < ti.u32(HIDDEN), ti.f32(0.0), high)
        span = ti.min(high - low, ti.f32(LARGEST))
        scale = ti.max(small_ratio(span, ti.f32(last)), ti.f32(LEAST_SCALE))
        by_low = magnitude(low) > magnitude(high)
        edge = ti.select(by_low, low, high)
        steps = whole_ratio(ti.abs(edge), scale)
        stepped = steps > ti.f32(0.0)
        refitted = small_ratio(ti.abs(edge), ti.max(steps, ti.f32(1.0)))
        scale = ti.select(stepped, ti.select(magnitude(steps) < ti.u32(INFINITE), refitted, scale), scale)
        bias = ti.select(stepped, edge, ti.f32(0.0))
        factor = ti.select(stepped, scale, ti.f32(0.0))
        return ti.Vector([ti.select(by_low, scale, -scale), bias, ti.select(by_low, factor, -factor), bias])

    @ti.func
    def code(value, numbers, row):
        distance = value - numbers[ORIGIN]
        factor = numbers[FACTOR]
        level = ti.f32(0.0)
        if (distance < ti.f32(0.0)) == (factor < ti.f32(0.0)) and magnitude(factor) > ti.u32(0):
            level = ti.f32(last)
            if magnitude(distance) < ti.u32(INFINITE):
                level = ti.min(round_to_even(ratio(ti.abs(distance), ti.abs(factor))), ti.f32(last))
        if magnitude(value) > ti.u32(INFINITE):
            level = ti.f32(0.0)
        return ti.cast(ti.cast(level, ti.i32), ti.u32)

    return Rule(finish, code)


def make_gguf(bits, style):
    """GGUF's rules: q8_0 scales by the largest magnitude and rounds halves away from 0; q4_0 also uses its sign."""
    ratio, product = make_ratio(style), make_product(style)

    @ti.func
    def finish(state):
        edge = state[0]
        scale = ti.f32(0.0)
        if ti.static(bits == 8):
            scale = ratio(ti.abs(edge), ti.f32(127.0))
        else:
            scale = edge * ti.f32(-0.125)
        inverse = signed(magnitude(ratio(ti.f32(1.0), ti.abs(scale))), scale < ti.f32(0.0))
        factor = ti.select(magnitude(edge) < ti.u32(SMALL_BITS), ti.f32(0.0), inverse)
        return ti.Vector([scale, ti.f32(0.0), factor, ti.f32(0.0)])

    @ti.func
    def code(value, numbers, row):
        level = 0
        x = value
        if magnitude(x) > ti.u32(INFINITE) or magnitude(numbers[FACTOR]) == ti.u32(0):
            x = ti.f32(0.0)
        endless = magnitude(x) == ti.u32(INFINITE)
        if endless:
            x = ti.f32(0.0)
        scaled = product(x, numbers[FACTOR], row)
        if ti.static(bits == 8):
            a = magnitude(scaled)
            whole = ti.cast(ti.floor(ti.bit_cast(a, ti.f32)), ti.i32)
            # By its bits, so that the compiler does not compute the rounded number again inside a sum.
            rest = ti.bit_cast(a, ti.f32) - ti.cast(whole, ti.f32)
            level = whole + ti.select(rest >= ti.f32(0.5), 1, 0)
            level = ti.min(level, 127)
            if endless:
                level = 127
            if (scaled < ti.f32(0.0)) or (endless and value < ti.f32(0.0)):
                level = -level
            level = level & 0xFF
        else:
            level = ti.min(ti.max(ti.cast(scaled + ti.f32(8.5), ti.i32), 0), 15)
            if endless:
                level = ti.select((value < ti.f32(0.0)) == (numbers[FACTOR] < ti.f32(0.0)), 15, 0)
        return ti.cast(level, ti.u32)

    return Rule(finish, code)


@functools.cache
def make_divided(name, style):
    """divided(x, tensor): x divided by the scale of the whole tensor, or x itself if the format has no such scale."""
    has_scale, ratio = GROUP_FORMATS[name].has_tensor_scale, make_ratio(style)

    @ti.func
    def divided(x, tensor):
        value = x
        if ti.static(has_scale and style == "cpu"):
            value = x / tensor
        elif ti.static(has_scale):
            if tensor != ti.f32(1.0):
                value = ratio(x, tensor)
        return value

    return divided


@functools.cache
def make_float_code(name, style):
    """float_code(value, factor): the 8-bit or 4-bit float nearest to a number, with the factor from `finish`."""
    row = GROUP_FORMATS[name]
    to_float8 = make_f32_to_float8("e4m3", style)
    by_scale = row.rule == "nvfp4"  # on a GPU, numbers are compared with multiples of the scale, which are exact

    @ti.func
    def float_code(value, factor):
        u = ti.bit_cast(value, ti.u32)
        a = ti.cast(u & ti.u32(0x7FFFFFFF), ti.i32)
        size = ti.bit_cast(ti.min(a, LARGEST_BITS), ti.f32)
        code = ti.u32(0)
        if ti.static(row.bits == 8):
            code = to_float8(size * factor) | ((u >> ti.u32(24)) & ti.u32(0x80))
            code = ti.select(a > INFINITE, ti.u32(FLOAT8["e4m3"].nan), code)
        else:
            unit = ti.f32(1.0)
            if ti.static(by_scale and style == "cpu"):  # a CPU rounds quotients correctly, and divides vectors
                size = ti.bit_cast(ti.min(a, BEYOND_BITS), ti.f32) / factor
            elif ti.static(by_scale):
                size, unit = ti.bit_cast(ti.min(a, BEYOND_BITS), ti.f32), factor
            else:
                size = size * factor
            count = 0
            for n in ti.static(range(len(HALF_WAY))):
                if ti.static(n % 2 == 0):
                    count = count + ti.select(size > unit * ti.f32(HALF_WAY[n]), 1, 0)
                else:
                    count = count + ti.select(size >= unit * ti.f32(HALF_WAY[n]), 1, 0)
            code = ti.cast(count, ti.u32) | ((u >> ti.u32(28)) & ti.u32(8))
            code = ti.select(a > INFINITE, ti.u32(0), code)
        return code

    return float_code


def make_float(name, style):
    """The rules whose codes are floats: OCP's blocks have a power of two as scale, NVIDIA's an 8-bit float.

    The power puts the largest magnitude in the last octave of an element; a magnitude above the largest element is
    saturated. The power is a normal float32, and blocks below 2**-100 count as 0, as in GGUF's rules.
    """
    rule, float_code, ratio = GROUP_FORMATS[name].rule, make_float_code(name, style), make_ratio(style)
    to_float8 = make_f32_to_float8("e4m3", style)

    @ti.func
    def finish(state):
        edge = magnitude(state[0])
        scale, factor = ti.f32(1.0), ti.f32(0.0)
        if ti.static(rule == "nvfp4"):
            scale = e4m3_to_f32(to_float8(ratio(ti.bit_cast(edge, ti.f32), ti.f32(6.0))))
            factor = ti.select(scale > ti.f32(0.0), scale, ti.f32(NOTHING))
        else:
            field = ti.max(ti.cast(edge >> ti.u32(23), ti.i32) - POWER[rule], 1)
            scale = ti.bit_cast(ti.cast(field, ti.u32) << ti.u32(23), ti.f32)
            inverse = ti.bit_cast(ti.cast(254 - field, ti.u32) << ti.u32(23), ti.f32)
            factor = ti.select(edge < ti.u32(SMALL_BITS), ti.f32(0.0), inverse)
        return ti.Vector([scale, ti.f32(0.0), factor, ti.f32(0.0)])

    @ti.func
    def code(value, numbers, row):
        return float_code(value, numbers[FACTOR])

    return Rule(finish, code)


@functools.cache
def make_rule(name, style):
    """The `Rule` of a format."""
    row = GROUP_FORMATS[name]
    if row.is_float:
        return make_float(name, style)
    return make_affine(row.bits, style) if row.rule == "affine" else make_gguf(row.bits, style)


def has_halves(name):
    """Whether the codes in a byte belong to columns 16 apart, as in q4_0; `name` may be any dtype code."""
    return name in GROUP_FORMATS and GROUP_FORMATS[name].rule == "q4_0"


@functools.cache
def make_column(name):
    """column(place): the column of a code, from its place among the codes of a row or a group."""
    halves = has_halves(name)

    @ti.func
    def column(place):
        moved = place
        if ti.static(halves):
            moved = (place & ~31) + ((place & 31) >> 1) + (place & 1) * 16
        return moved

    return column


@functools.cache
def make_place(name):
    """place(column): the inverse of `make_column`."""
    halves = has_halves(name)

    @ti.func
    def place(column):
        moved = column
        if ti.static(halves):
            moved = (column & ~31) + (column & 15) * 2 + ((column >> 4) & 1)
        return moved

    return place


@functools.cache
def make_value_of_code(name, style):
    """value_of_code(code, scale, bias, row): the number that a code stands for."""
    rule, product, code_product = GROUP_FORMATS[name].rule, make_product(style), make_code_product(style)

    @ti.func
    def value_of_code(code, scale, bias, row):
        q = ti.cast(ti.cast(code, ti.i32), ti.f32)
        if ti.static(rule == "q8_0"):
            q = ti.cast(ti.cast(code << ti.u32(24), ti.i32) >> 24, ti.f32)
        elif ti.static(rule == "q4_0"):
            q = q - ti.f32(8.0)
        elif ti.static(rule == "mxfp8"):
            q = e4m3_to_f32(ti.cast(code, ti.u32))
        elif ti.static(rule in FLOAT_RULES):
            q = e2m1_to_f32(ti.cast(code, ti.u32))
        value = q
        if ti.static(rule in FLOAT_RULES):
            value = code_product(q, scale)
        else:
            value = product(q, scale, row)
        if ti.static(rule == "affine"):
            value = value + bias
        return value

    return value_of_code


def unit_of(name):
    """(codes, words): the smallest number of words that hold whole codes."""
    bits = GROUP_FORMATS[name].bits
    return (32 // bits, 1) if 32 % bits == 0 else (32, bits)


def offset_of(name):
    """The number to add to a code that `make_code` read, for a format with a scale but no bias."""
    return {"q8_0": -128.0, "q4_0": -8.0}.get(GROUP_FORMATS[name].rule, 0.0)


def step_of_code(name, e):
    """The factor by which `make_code` multiplies code e of a unit: a power of two, so the product is exact."""
    bits = GROUP_FORMATS[name].bits
    shift = e * bits % 32
    if GROUP_FORMATS[name].is_float:
        return 1.0
    return float(1 << shift) if shift + bits < 32 else 1.0


def make_code_to_f32(row):
    """The function that decodes a code that is a float."""
    return e4m3_to_f32 if row.bits == 8 else e2m1_to_f32


@functools.cache
def make_code(name):
    """code(words, e) -> code e of a unit as a float, times `step_of_code`: integers, which LLVM vectorises.

    Codes below the highest bits of a word are not shifted, since a float times a power of two serves as well. Signed
    codes are read with 128 added.
    """
    row = GROUP_FORMATS[name]
    bits, flip = row.bits, 0x80808080 if row.rule == "q8_0" else 0
    to_f32, is_float = make_code_to_f32(row), row.is_float

    @ti.func
    def float_of(words: ti.template(), e: ti.template()):
        x = words[ti.static(e * bits // 32)] >> ti.u32(ti.static(e * bits % 32))
        return to_f32(x & ti.u32(ti.static((1 << bits) - 1)))

    @ti.func
    def code(words: ti.template(), e: ti.template()):
        word, shift = ti.static(e * bits // 32, e * bits % 32)
        x = words[word] ^ ti.u32(flip)
        if ti.static(shift + bits >= 32):
            x = x >> ti.u32(shift)
            if ti.static(shift + bits > 32):
                x = x | (words[ti.static(word + 1)] << ti.u32(ti.static(32 - shift)))
                x = x & ti.u32(ti.static((1 << bits) - 1))
        else:
            x = x & ti.u32(ti.static(((1 << bits) - 1) << shift))
        return ti.cast(ti.bit_cast(x, ti.i32), ti.f32)

    return float_of if is_float else code


@functools.cache
def make_load_unit(name, scale_value, style="cpu"):
    """load_unit(array, scales, row, scale_row, u) -> the numbers of unit u of a row of codes, in the codes' order.

    A unit has `UNIT` codes, which a GPU's thread takes at a time. `scale_value` turns an entry of `scales` into a
    float. If `style` is a GPU's, products are rounded before a bias is added; attention leaves that to the compiler.
    """
    kind, value_of_code = GROUP_FORMATS[name], make_value_of_code(name, style)
    per_group, numbers, bits = kind.group // UNIT, kind.numbers, kind.bits
    mask = (1 << bits) - 1

    @ti.func
    def load_unit(array: ti.template(), scales: ti.template(), row, scale_row, u):
        at = scale_row + u // per_group * numbers
        step, bias = scale_value(scales[at]), ti.f32(0.0)
        if ti.static(numbers == 2):
            bias = scale_value(scales[at + 1])
        first = u * ti.static(UNIT * bits)
        word, shift = row + (first >> 5), first & 31
        codes = array[word] >> ti.cast(shift, ti.u32)
        if ti.static(32 % (UNIT * bits) != 0):
            if shift > ti.static(32 - UNIT * bits):
                codes = codes | (array[word + 1] << ti.cast(32 - shift, ti.u32))
        values = ti.Vector([ti.f32(0.0) for _ in range(UNIT)])
        for e in ti.static(range(UNIT)):
            values[e] = value_of_code((codes >> ti.u32(ti.static(e * bits))) & ti.u32(mask), step, bias, row)
        return values

    return load_unit


def make_dequantise_unit(codec, style, scale):
    """dequantise_unit(a, b, scales, src_row, dst_row, scale_at, u, tensor): dequantises unit `u` on a GPU."""
    load_unit, column = make_load_unit(codec.src, make_bits_to_f32(scale), style), make_column(codec.src)
    halves = has_halves(codec.src)
    store = make_store(codec.dst, 1 if halves else UNIT, codec.dst_bits, style)
    has_tensor_scale, product = GROUP_FORMATS[codec.src].has_tensor_scale, make_code_product(style)

    @ti.func
    def dequantise_unit(a: ti.template(), b: ti.template(), scales: ti.template(), src_row, dst_row, scale_at, u,
                        tensor):  # fmt: skip
        values = load_unit(a, scales, src_row, scale_at, u)
        if ti.static(has_tensor_scale):
            for e in ti.static(range(UNIT)):
                values[e] = product(values[e], tensor)
        if ti.static(halves):
            for e in ti.static(range(UNIT)):
                store(b, dst_row + column(u * UNIT + e), ti.Vector([values[e]]), ti.f32(1.0))
        else:
            store(b, dst_row + u * codec.dst_words, values, ti.f32(1.0))

    return dequantise_unit


def make_dequantise_group(name, to, scale):
    """dequantise_group(a, b, scales, src_row, dst_row, scale_at, group, tensor): dequantises a group on CPU."""
    row, column, value_of_code = GROUP_FORMATS[name], make_column(name), make_value_of_code(name, "cpu")
    encode, decode_scale = make_f32_to_bits(to, "cpu"), make_bits_to_f32(scale)
    size, bits, numbers = row.group, row.bits, row.numbers
    mask = (1 << bits) - 1
    word_type = {"f32": ti.u32, "f16": ti.u16, "bf16": ti.u16}[to]

    @ti.func
    def dequantise_group(a: ti.template(), b: ti.template(), scales: ti.template(), src_row, dst_row, scale_at, group,
                         tensor):  # fmt: skip
        first, word = dst_row + group * size, src_row + group * ti.static(size * bits // 32)
        step, bias = decode_scale(scales[scale_at + group * numbers]), ti.f32(0.0)
        if ti.static(numbers == 2):
            bias = decode_scale(scales[scale_at + group * numbers + 1])
        for e in range(size):
            at, shift = word + (e * bits >> 5), e * bits & 31
            code = a[at] >> ti.cast(shift, ti.u32)
            if ti.static(32 % bits != 0):
                if shift + bits > 32:
                    code = code | (a[at + 1] << ti.cast(32 - shift, ti.u32))
            value = value_of_code(code & ti.u32(mask), step, bias, first)
            if ti.static(row.has_tensor_scale):
                value = value * tensor
            b[first + column(e)] = ti.cast(encode(value), word_type)

    return dequantise_group
