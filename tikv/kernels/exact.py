"""float32 arithmetic of the same bits on every back end: products that stay products, quotients and roots.

A GPU's compiler makes one rounding of a product and a sum, and its `/` and roots are some units of the last place off:
CUDA's under Taichi, and what SPIR-V asks of Vulkan and Metal. What it must leave alone are integers: they stop the
fusing, and turn an approximation into the nearest float32. Metal's compiler also takes sums and products in another
order, and integers stop that too. On CPU the plain operations are IEEE's.
"""

import functools
import math

from tikv.runtime import ti

FRACTION, HIDDEN, ONE, INFINITE = 0x7FFFFF, 0x800000, 0x3F800000, 0x7F800000
# A number from -64 on is rounded by adding ROUNDING, cutting and taking OFFSET: near a tie down, to be corrected.
OFFSET, ROUNDING = 64, 64.5 - 2.0**-7

OFF = 2.0**-21  # the step of Newton is off by 3 units of 2**-24, and a product and a quotient are rounded
TAME_BITS = (127 + 100) << 23  # the reciprocal of larger numbers may be lost


@ti.func
def apart(x, row):
    """x, of which the compiler does not see how it came about; `row` is what it does not know, and never below 0."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) ^ (ti.bit_cast(row, ti.u32) >> ti.u32(31)), ti.f32)


@functools.cache
def make_product(style):
    """product(x, y, row): x * y, rounded before anything is added; `row` is the first word of a row, never below 0."""

    @ti.func
    def product(x, y, row):
        found = x * y
        if ti.static(style != "cpu"):
            found = apart(found, row)
        return found

    return product


@functools.cache
def make_in_order(style):
    """in_order(x, row): x, a sum or a product that is rounded before another takes it in; `row` as for `make_product`.

    Metal's compiler joins them in any order unless it is told otherwise, which Taichi does not do.
    """

    @ti.func
    def in_order(x, row):
        found = x
        if ti.static(style == "spirv"):
            found = apart(x, row)
        return found

    return in_order


@ti.func
def rough_reciprocal(x):
    """1 / x as the back end has it: up to 16 units of the last place off."""
    return ti.f32(1.0) / x


@ti.func
def rough_reciprocal_root(x):
    """The same of the root, for x in 1..4."""
    return ti.f32(1.0) / ti.sqrt(x)


@ti.func
def near_reciprocal(x):
    """1 / x, of which a product is less than `OFF` of itself off the quotient; x normal, above 0 and below 2**100."""
    rough = rough_reciprocal(x)
    return rough * (ti.f32(2.0) - x * rough)


@ti.func
def nearest(dividend, divisor, guess, inverse):
    """The integer nearest to dividend / divisor, of which there is no tie, from a guess at most 32 away.

    The divisor has 24 bits, `inverse` is about its reciprocal. The dividend, of up to 48 bits, is known modulo 2**32,
    which is enough: what the guess leaves of it is less.
    """
    rest = ti.bit_cast(dividend - guess * divisor, ti.i32)
    whole = ti.cast(ti.cast(rest, ti.f32) * inverse + ti.f32(ROUNDING), ti.i32) - OFFSET  # right, or one too low
    rest = rest - whole * ti.bit_cast(divisor, ti.i32)
    whole = whole + ti.select(2 * rest > ti.bit_cast(divisor, ti.i32), 1, 0)
    return guess + ti.bit_cast(whole, ti.u32)


@ti.func
def quotient(x, y):
    """The bits of the float32 nearest to x / y, of which x and y are the bits; 0 where that is subnormal.

    y is positive and normal; x is positive and finite, and the quotient too.
    """
    a, b = (x & ti.u32(FRACTION)) | ti.u32(HIDDEN), (y & ti.u32(FRACTION)) | ti.u32(HIDDEN)
    less = ti.select(a < b, ti.u32(1), ti.u32(0))
    inverse = rough_reciprocal(ti.bit_cast((y & ti.u32(FRACTION)) | ti.u32(ONE), ti.f32))
    ratio = ti.bit_cast(((x & ti.u32(FRACTION)) | ti.u32(ONE)) + (less << ti.u32(23)), ti.f32) * inverse  # 1..2
    guess = ti.cast(ti.cast(ratio * ti.f32(2.0**23), ti.i32), ti.u32)
    found = nearest(a << (ti.u32(23) + less), b, guess, inverse * ti.f32(2.0**-23))
    exponent = ti.cast(x >> ti.u32(23), ti.i32) - ti.cast(y >> ti.u32(23), ti.i32) + 127 - ti.cast(less, ti.i32)
    return ti.select(exponent > 0, (ti.cast(exponent, ti.u32) << ti.u32(23)) + (found - ti.u32(HIDDEN)), ti.u32(0))


@functools.cache
def make_ratio(style):
    """ratio(x, y): x / y for a normal y above 0, rounded correctly; what is below 2**-125 is 0.

    Of x a NaN stays one, and an infinity infinite; a subnormal may count as 0.
    """

    @ti.func
    def ratio(x, y):
        found = x
        if ti.static(style == "cpu"):
            found = x / y
        else:
            u, divisor = ti.bit_cast(x, ti.u32), ti.bit_cast(y, ti.u32)
            a = u & ti.u32(0x7FFFFFFF)
            power = ti.cast(a >> ti.u32(23), ti.i32) - ti.cast(divisor >> ti.u32(23), ti.i32)
            exact = quotient(ti.select(ti.abs(power) < 129, a, ti.u32(ONE)), divisor)
            exact = ti.select(power < 129, ti.min(exact, ti.u32(INFINITE)), ti.u32(INFINITE))
            exact = ti.select(power > -126, exact, ti.u32(0))
            exact = ti.select(a < ti.u32(HIDDEN), ti.u32(0), exact)
            exact = ti.select(a < ti.u32(INFINITE), exact, a)
            found = ti.bit_cast(exact | (u & ti.u32(0x80000000)), ti.f32)
        return found

    return ratio


@ti.func
def upper_half(x):
    """The 12 highest bits of a float's 24; what is left of it has 12 too."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) & ti.u32(0xFFFFF000), ti.f32)


@ti.func
def without_last_bit(x):
    """The nearest float of 23 bits towards 0."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) & ti.u32(0xFFFFFFFE), ti.f32)


SMALL = 4096.0


@functools.cache
def make_small_ratio(style):
    """small_ratio(x, n): x / n, rounded correctly, for a whole number n from 1 on and x not negative.

    Quick below `SMALL`: products of halves with n are exact, so that what a first quotient leaves of x is, whether or
    not a product and a sum are rounded once. No quotient of such a number lies close enough to the middle of two floats
    for the second one to be wrong. What is below 2**-90 may be. The first quotient lacks its last bit, so that a
    compiler cannot put the product in its place, which has more bits, where it is taken from a sum.
    """
    ratio = make_ratio(style)

    @ti.func
    def small_ratio(x, n):
        found = x
        if ti.static(style == "cuda"):
            inverse = near_reciprocal(n)
            first = without_last_bit(x * inverse)
            high = upper_half(first)
            rest = (x - high * n) - (first - high) * n
            found = ti.select(n > ti.f32(1.0), first + rest * inverse, x)
            if n >= ti.f32(SMALL):
                found = ratio(x, n)
        else:
            found = ratio(x, n)
        return found

    return small_ratio


@functools.cache
def make_divide_by(style, divisor):
    """divide(x): x / divisor, rounded correctly, for x not negative and a divisor from 1 on.

    Subnormals that do not fit a float32 any more are rounded as the back end does it.
    """
    power = math.frexp(divisor)[0] == 0.5

    @ti.func
    def divide(x):
        found = x
        if ti.static(power):
            found = x * ti.f32(1.0 / divisor)
        else:
            found = x / ti.f32(divisor)
            if ti.static(style != "cpu"):
                bits = ti.bit_cast(x, ti.u32)
                exact = quotient(bits, ti.bit_cast(ti.f32(divisor), ti.u32))
                if bits - ti.u32(HIDDEN) < ti.u32(INFINITE - HIDDEN):  # normal
                    found = ti.select(exact > ti.u32(0), ti.bit_cast(exact, ti.f32), found)
        return found

    return divide


@functools.cache
def make_reciprocal_root(style, least):
    """reciprocal_root(x): 1 / sqrt(x), first the root and then the quotient rounded correctly, for x from `least` on.

    Infinity gives 0 and NaN NaN, and 0, of which `least` may be, infinity. Subnormals count where they are not flushed.
    """
    below_normal = least < 2.0**-126

    @ti.func
    def reciprocal_root(x):
        found = x
        if ti.static(style == "cpu"):
            found = ti.f32(1.0) / ti.sqrt(x)
        else:
            given = ti.bit_cast(x, ti.u32)
            bits, exponent = given, ti.cast(given >> ti.u32(23), ti.i32)
            if ti.static(below_normal):
                if given < ti.u32(HIDDEN):  # given * 2**-149
                    bits = ti.bit_cast(ti.cast(ti.cast(given, ti.i32), ti.f32), ti.u32)
                    exponent = ti.cast(bits >> ti.u32(23), ti.i32) - 149
            odd = ti.cast(exponent & 1, ti.u32)
            # x is `square`, of 47 or 48 bits, times an even power of 2: its root has 24. Known modulo 2**32.
            square = ((bits & ti.u32(FRACTION)) | ti.u32(HIDDEN)) << (ti.u32(24) - odd)
            scaled = ti.bit_cast((bits & ti.u32(FRACTION)) + (ti.u32(0x40000000) - (odd << ti.u32(23))), ti.f32)  # 1..4
            inverse = rough_reciprocal_root(scaled)
            root = ti.cast(scaled * inverse * ti.f32(2.0**23), ti.i32)
            rest = ti.bit_cast(square, ti.i32) - root * root
            more = ti.cast(rest, ti.f32) * (inverse * ti.f32(2.0**-24))  # rest / (2 * root)
            root = root + ti.cast(more + ti.f32(ROUNDING), ti.i32) - OFFSET
            rest = ti.bit_cast(square, ti.i32) - root * root
            root = root + ti.select(rest > root, 1, 0)  # square > (root + 1/2)**2
            guess = ti.cast(ti.cast(inverse * ti.f32(2.0**24), ti.i32), ti.u32)
            # 2**47 / root; 2**47 is 0 modulo 2**32.
            q = nearest(ti.u32(0), ti.bit_cast(root, ti.u32), guess, inverse * ti.f32(2.0**-23))
            field = ti.cast(190 - (exponent >> 1), ti.u32) - odd
            bits = (field << ti.u32(23)) + (q - ti.u32(HIDDEN))
            if ti.static(below_normal):
                bits = ti.select(given == ti.u32(0), ti.u32(INFINITE), bits)
            bits = ti.select(given < ti.u32(INFINITE), bits, ti.u32(INFINITE) - given)
            found = ti.bit_cast(bits, ti.f32)
        return found

    return reciprocal_root
