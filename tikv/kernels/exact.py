"""float32 arithmetic with the same bits on every back end: products that are not fused, quotients and roots.

A GPU also takes subnormal numbers for 0: CUDA does under Taichi, and Mesa's lavapipe; Vulkan and Metal may. Where one
could count, integers compute with it, or a rule says that numbers this small are 0 (`without_small`).

A GPU's compiler fuses a product and a sum into one rounding, and its `/` and roots are off by some units in the last
place: on CUDA under Taichi, and as SPIR-V allows on Vulkan and Metal. Integer operations are exact: they prevent the
fusing, and turn an approximation into the nearest float32. Metal's compiler also reorders sums and products, which
integers prevent too. On CPU the plain operations are IEEE.
"""

import functools
import math

from tikv.runtime import ti

FRACTION, HIDDEN, ONE, INFINITE, NAN = 0x7FFFFF, 0x800000, 0x3F800000, 0x7F800000, 0x7FC00000
# A number >= -64 is rounded by adding ROUNDING, truncating and subtracting OFFSET: near a tie down, then corrected.
OFFSET, ROUNDING = 64, 64.5 - 2.0**-7

OFF = 2.0**-21  # Newton's step is off by 3 units of 2**-24, and a product and a quotient are rounded
TAME_BITS = (127 + 100) << 23  # the reciprocal of larger numbers may be flushed to 0


@ti.func
def apart(x, row):
    """x, with its origin hidden from the compiler by `row`, a value that it does not know, never negative."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) ^ (ti.bit_cast(row, ti.u32) >> ti.u32(31)), ti.f32)


@functools.cache
def make_product(style):
    """product(x, y, row): x * y, rounded before anything is added; `row` is a row's first word, never negative."""

    @ti.func
    def product(x, y, row):
        value = x * y
        if ti.static(style != "cpu"):
            value = apart(value, row)
        return value

    return product


@ti.func
def small_product(x, y):
    """The product, rounded correctly, by integers; x is normal and has at most 8 bits, the product is finite."""
    u, v = ti.bit_cast(x, ti.u32), ti.bit_cast(y, ti.u32)
    bits, power_y = normalised(v & ti.u32(0x7FFFFFFF))
    code = ((u & ti.u32(FRACTION)) | ti.u32(HIDDEN)) >> ti.u32(16)
    whole = code * ((bits & ti.u32(FRACTION)) | ti.u32(HIDDEN))  # 31 or 32 bits
    more = ti.cast(whole >> ti.u32(31), ti.i32)
    field = ti.cast((u >> ti.u32(23)) & ti.u32(0xFF), ti.i32) + power_y - 127 + more
    # What is shifted out first leaves a bit below the one that rounds; 28 more shift everything out.
    fraction = (whole >> ti.u32(5)) | ti.select((whole & ti.u32(31)) > ti.u32(0), ti.u32(1), ti.u32(0))
    shift = ti.cast(ti.min(2 + more + ti.max(1 - field, 0), 28), ti.u32)
    rounded = (fraction + (ti.u32(1) << (shift - ti.u32(1))) - ti.u32(1) + ((fraction >> shift) & ti.u32(1))) >> shift
    encoded = rounded + (ti.cast(ti.max(field, 1) - 1, ti.u32) << ti.u32(23))
    return ti.bit_cast(encoded | ((u ^ v) & ti.u32(0x80000000)), ti.f32)


@functools.cache
def make_code_product(style):
    """code_product(x, y): x * y, rounded correctly, for any y; x is 0 or normal and has at most 8 bits, as codes have.

    Plain products are right, but for those that a GPU may take for 0.
    """

    @ti.func
    def code_product(x, y):
        value = x * y
        if ti.static(style != "cpu"):
            if ti.bit_cast(value, ti.u32) & ti.u32(0x7FFFFFFF) < ti.u32(2 * HIDDEN):
                if x != ti.f32(0.0) and ti.bit_cast(y, ti.u32) << ti.u32(1) > ti.u32(0):
                    value = small_product(x, y)
        return value

    return code_product


SMALL_BITS = (127 - 96) << 23


@ti.func
def without_small(x):
    """x, or a 0 of its sign if x is below 2**-96: sums and differences of what remains are never subnormal."""
    u = ti.bit_cast(x, ti.u32)
    return ti.bit_cast(ti.select(u & ti.u32(0x7FFFFFFF) < ti.u32(SMALL_BITS), u & ti.u32(0x80000000), u), ti.f32)


@functools.cache
def make_in_order(style):
    """in_order(x, row): x, a sum or a product that is rounded before it is used further; `row` is as in `make_product`.

    Metal's compiler reorders such operations unless it is told not to, which Taichi does not do.
    """

    @ti.func
    def in_order(x, row):
        value = x
        if ti.static(style == "spirv"):
            value = apart(x, row)
        return value

    return in_order


@ti.func
def rough_reciprocal(x):
    """The back end's own 1 / x: up to 16 units in the last place off."""
    return ti.f32(1.0) / x


@ti.func
def rough_reciprocal_root(x):
    """The back end's own 1 / sqrt(x), for x in 1..4."""
    return ti.f32(1.0) / ti.sqrt(x)


@ti.func
def near_reciprocal(x):
    """1 / x; its product with y is within a relative error of `OFF` of y / x; x is normal, above 0, below 2**100."""
    rough = rough_reciprocal(x)
    return rough * (ti.f32(2.0) - x * rough)


@ti.func
def nearest(dividend, divisor, guess, inverse):
    """The integer nearest to dividend / divisor, which is never a tie, from a guess at most 32 away.

    The divisor has 24 bits, `inverse` approximates its reciprocal. The dividend, of up to 48 bits, is known modulo
    2**32, which is enough, since the guess leaves a smaller remainder.
    """
    rest = ti.bit_cast(dividend - guess * divisor, ti.i32)
    whole = ti.cast(ti.cast(rest, ti.f32) * inverse + ti.f32(ROUNDING), ti.i32) - OFFSET  # exact, or one too low
    rest = rest - whole * ti.bit_cast(divisor, ti.i32)
    whole = whole + ti.select(2 * rest > ti.bit_cast(divisor, ti.i32), 1, 0)
    return guess + ti.bit_cast(whole, ti.u32)


@ti.func
def whole_quotient(x, y):
    """(the 24 bits of the float32 nearest to x / y, 1 if x has the smaller fraction else 0) of the bits of two floats.

    Signs and exponents do not count. The first may be 2**24.
    """
    a, b = (x & ti.u32(FRACTION)) | ti.u32(HIDDEN), (y & ti.u32(FRACTION)) | ti.u32(HIDDEN)
    less = ti.select(a < b, ti.u32(1), ti.u32(0))
    inverse = rough_reciprocal(ti.bit_cast((y & ti.u32(FRACTION)) | ti.u32(ONE), ti.f32))
    ratio = ti.bit_cast(((x & ti.u32(FRACTION)) | ti.u32(ONE)) + (less << ti.u32(23)), ti.f32) * inverse  # 1..2
    guess = ti.cast(ti.cast(ratio * ti.f32(2.0**23), ti.i32), ti.u32)
    return nearest(a << (ti.u32(23) + less), b, guess, inverse * ti.f32(2.0**-23)), less


@ti.func
def quotient(x, y):
    """The bits of the float32 nearest to x / y, where x and y are given as bits; 0 if the quotient is subnormal.

    y is positive and normal; x and the quotient are positive and finite.
    """
    whole, less = whole_quotient(x, y)
    exponent = ti.cast(x >> ti.u32(23), ti.i32) - ti.cast(y >> ti.u32(23), ti.i32) + 127 - ti.cast(less, ti.i32)
    return ti.select(exponent > 0, (ti.cast(exponent, ti.u32) << ti.u32(23)) + (whole - ti.u32(HIDDEN)), ti.u32(0))


@ti.func
def normalised(a):
    """(the bits of a normal float with the same fraction, the exponent field that it would have) of a magnitude's bits.

    The field of a subnormal number is below 1.
    """
    is_subnormal = a < ti.u32(HIDDEN)
    lifted = ti.bit_cast(ti.cast(ti.cast(a, ti.i32), ti.f32), ti.u32)  # exact: a subnormal number is a * 2**-149
    bits = ti.select(is_subnormal, lifted, a)
    return bits, ti.cast(bits >> ti.u32(23), ti.i32) - ti.select(is_subnormal, 149, 0)


@functools.cache
def make_ratio(style):
    """ratio(x, y): x / y for any two floats, rounded correctly; on a GPU quotients below 2**-126 become 0."""

    @ti.func
    def ratio(x, y):
        value = x
        if ti.static(style == "cpu"):
            value = x / y
        else:
            u, v = ti.bit_cast(x, ti.u32), ti.bit_cast(y, ti.u32)
            a, b = u & ti.u32(0x7FFFFFFF), v & ti.u32(0x7FFFFFFF)
            dividend, power = normalised(a)
            divisor, power_y = normalised(b)
            whole, less = whole_quotient(dividend, divisor)
            exponent = power - power_y + 127 - ti.cast(less, ti.i32)
            exact = (ti.cast(exponent, ti.u32) << ti.u32(23)) + (whole - ti.u32(HIDDEN))
            exact = ti.select(exponent < 255, ti.select(exponent > 0, exact, ti.u32(0)), ti.u32(INFINITE))
            exact = ti.select(a == ti.u32(0), ti.u32(0), ti.select(a == ti.u32(INFINITE), ti.u32(INFINITE), exact))
            alike = ti.select(a == b, ti.u32(NAN), exact)
            exact = ti.select(b == ti.u32(0), ti.select(a == ti.u32(0), alike, ti.u32(INFINITE)), exact)
            exact = ti.select(b == ti.u32(INFINITE), ti.select(a == ti.u32(INFINITE), alike, ti.u32(0)), exact)
            exact = ti.select(ti.max(a, b) > ti.u32(INFINITE), ti.u32(NAN), exact)
            value = ti.bit_cast(exact | ((u ^ v) & ti.u32(0x80000000)), ti.f32)
        return value

    return ratio


@ti.func
def upper_half(x):
    """The 12 highest bits of a float's 24; the remainder has 12 bits too."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) & ti.u32(0xFFFFF000), ti.f32)


@ti.func
def without_last_bit(x):
    """The float x, rounded towards 0 to 23 bits."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) & ti.u32(0xFFFFFFFE), ti.f32)


SMALL = 4096.0


@functools.cache
def make_small_ratio(style):
    """small_ratio(x, n): x / n, rounded correctly, for an integer n >= 1 and x >= 0.

    It is fast below `SMALL`: products of halves with n are exact, so the remainder of a first quotient is exact too,
    whether or not a product and a sum are fused. No quotient of such numbers lies close enough to the midpoint of two
    floats for the second quotient to be wrong; those below 2**-90 may be. The first quotient lacks its last bit, so
    that a compiler cannot replace it in a sum by the product, which has more bits.
    """
    ratio = make_ratio(style)

    @ti.func
    def small_ratio(x, n):
        value = x
        if ti.static(style == "cuda"):
            inverse = near_reciprocal(n)
            first = without_last_bit(x * inverse)
            high = upper_half(first)
            rest = (x - high * n) - (first - high) * n
            value = ti.select(n > ti.f32(1.0), first + rest * inverse, x)
            if n >= ti.f32(SMALL):
                value = ratio(x, n)
        else:
            value = ratio(x, n)
        return value

    return small_ratio


@functools.cache
def make_divide_by(style, divisor):
    """divide(x): x / divisor, rounded correctly, for x >= 0 and a divisor >= 1.

    Subnormal results that do not fit a float32 are rounded as the back end does it.
    """
    power = math.frexp(divisor)[0] == 0.5

    @ti.func
    def divide(x):
        value = x
        if ti.static(power):
            value = x * ti.f32(1.0 / divisor)
        else:
            value = x / ti.f32(divisor)
            if ti.static(style != "cpu"):
                bits = ti.bit_cast(x, ti.u32)
                exact = quotient(bits, ti.bit_cast(ti.f32(divisor), ti.u32))
                if bits - ti.u32(HIDDEN) < ti.u32(INFINITE - HIDDEN):  # normal
                    value = ti.select(exact > ti.u32(0), ti.bit_cast(exact, ti.f32), value)
        return value

    return divide


@ti.func
def whole_root(bits, exponent):
    """(the 24 bits of the float32 nearest to a normal float's root, 1 if its exponent field is odd, about 1 / root).

    The fraction counts of `bits`. The first may be 2**24; the last is the reciprocal root of 1..4.
    """
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
    return root, odd, inverse


@functools.cache
def make_root(style):
    """root(x): the square root, rounded correctly, of 0 or a normal x."""

    @ti.func
    def root(x):
        value = x
        if ti.static(style == "cpu"):
            value = ti.sqrt(x)
        else:
            bits = ti.bit_cast(x, ti.u32)
            exponent = ti.cast(bits >> ti.u32(23), ti.i32)
            whole, odd, _ = whole_root(bits, exponent)
            field = (ti.cast(exponent + 126, ti.u32) + odd) >> ti.u32(1)
            encoded = (field << ti.u32(23)) + (ti.bit_cast(whole, ti.u32) - ti.u32(HIDDEN))
            value = ti.select(x > ti.f32(0.0), ti.bit_cast(encoded, ti.f32), ti.f32(0.0))
        return value

    return root


@functools.cache
def make_reciprocal_root(style, least):
    """reciprocal_root(x): 1 / sqrt(x), with first the root and then the quotient rounded correctly, for x >= `least`.

    Infinity gives 0, NaN gives NaN, and 0, which `least` may be, gives infinity. Subnormals count if not flushed.
    """
    below_normal = least < 2.0**-126

    @ti.func
    def reciprocal_root(x):
        value = x
        if ti.static(style == "cpu"):
            value = ti.f32(1.0) / ti.sqrt(x)
        else:
            x_bits = ti.bit_cast(x, ti.u32)
            bits, exponent = x_bits, ti.cast(x_bits >> ti.u32(23), ti.i32)
            if ti.static(below_normal):
                if x_bits < ti.u32(HIDDEN):  # x_bits * 2**-149
                    bits = ti.bit_cast(ti.cast(ti.cast(x_bits, ti.i32), ti.f32), ti.u32)
                    exponent = ti.cast(bits >> ti.u32(23), ti.i32) - 149
            root, odd, inverse = whole_root(bits, exponent)
            guess = ti.cast(ti.cast(inverse * ti.f32(2.0**24), ti.i32), ti.u32)
            # 2**47 / root; 2**47 is 0 modulo 2**32.
            q = nearest(ti.u32(0), ti.bit_cast(root, ti.u32), guess, inverse * ti.f32(2.0**-23))
            field = ti.cast(190 - (exponent >> 1), ti.u32) - odd
            bits = (field << ti.u32(23)) + (q - ti.u32(HIDDEN))
            if ti.static(below_normal):
                bits = ti.select(x_bits == ti.u32(0), ti.u32(INFINITE), bits)
            bits = ti.select(x_bits < ti.u32(INFINITE), bits, ti.u32(INFINITE) - x_bits)
            value = ti.bit_cast(bits, ti.f32)
        return value

    return reciprocal_root
