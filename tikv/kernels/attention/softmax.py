"""The arithmetic of a softmax in base 2: exponentials, logits with a soft cap, log-sum-exps.

A NaN or an infinity among the logits makes the sum of the weights NaN, and with it the row's result and log-sum-exp.
Tests of a number that may be NaN look at its bits: with fast arithmetic, a compiler may take a comparison with NaN for
true or false, and either operand of a maximum for the larger. Sums and products with a NaN are NaN everywhere.
"""

from tikv.formats import GROUP_FORMATS
from tikv.kernels.attention.parameters import INFINITY, LOG2E, MASKED_BITS, MINUS_INFINITY, NAN, X
from tikv.runtime import ti

LEAST_POWER = 0xC2FC0000  # the bits of -126
BELOW_LEAST = MINUS_INFINITY - LEAST_POWER  # the count of numbers below it


@ti.func
def exp2(x):
    """2 ** x for x <= 0, with a relative error below 2e-7; 0 for x below -126, and NaN for NaN."""
    i = ti.cast(ti.max(x, ti.f32(-126.0)) - ti.f32(0.5), ti.i32)
    f = x - ti.cast(i, ti.f32)
    p = ti.f32(1.5403530393381609e-4)
    p = p * f + ti.f32(1.3333558146428443e-3)
    p = p * f + ti.f32(9.618129107628477e-3)
    p = p * f + ti.f32(5.550410866482158e-2)
    p = p * f + ti.f32(2.402265069591007e-1)
    p = p * f + ti.f32(6.931471805599453e-1)
    p = p * f + ti.f32(1.0)
    below = ti.bit_cast(x, ti.u32) - ti.u32(LEAST_POWER + 1) < ti.u32(BELOW_LEAST)
    return ti.select(below, ti.f32(0.0), p * ti.bit_cast((i + 127) << 23, ti.f32))


@ti.func
def not_above_zero(x):
    """The smaller of x and 0, or NaN for NaN; rounding may have left x above 0."""
    bits = ti.bit_cast(x, ti.u32)
    return ti.bit_cast(ti.select(bits <= ti.u32(INFINITY), ti.u32(0), bits), ti.f32)


@ti.func
def is_masked(x):
    """Whether a logit, or the weight computed from it, belongs to a key that its row does not see."""
    return ti.bit_cast(x, ti.u32) == ti.u32(MASKED_BITS)


@ti.func
def is_nan(x):
    """Whether x is NaN."""
    return (ti.bit_cast(x, ti.u32) & ti.u32(0x7FFFFFFF)) > ti.u32(INFINITY)


@ti.func
def is_finite(x):
    """Whether x is neither infinite nor NaN."""
    return (ti.bit_cast(x, ti.u32) & ti.u32(INFINITY)) != ti.u32(INFINITY)


@ti.func
def is_nothing(l):
    """Whether a sum of weights is 0: the row saw no key, or no key with a score above -infinity."""
    return (ti.bit_cast(l, ti.u32) & ti.u32(0x7FFFFFFF)) == ti.u32(0)


@ti.func
def inverse_of(l):
    """1 / l for a sum of weights l, which divides a result; 0 if the row saw no key."""
    return ti.select(is_nothing(l), ti.f32(0.0), ti.f32(1.0) / l)


def make_inverse(c):
    """inverse(l, scalars): `inverse_of`, times the scale of the whole tensor V if its format has one."""
    row = GROUP_FORMATS.get(c.of_values.cache)
    scaled = row is not None and row.has_tensor_scale

    @ti.func
    def inverse(l, scalars):
        factor = inverse_of(l)
        if ti.static(scaled):
            factor = factor * scalars[X.value_scale]
        return factor

    return inverse


def make_logit(c):
    """logit_of(dot, scale, softcap): the base-2 logit for q.k, with these two of `AttentionScalars`."""

    @ti.func
    def logit_of(dot, scale, softcap):
        logit = dot * scale
        if ti.static(c.softcap):
            a = exp2(-ti.abs(logit) * ti.f32(2.0 * LOG2E))
            t = (ti.f32(1.0) - a) / (ti.f32(1.0) + a)
            logit = ti.select(logit < ti.f32(0.0), -t, t) * softcap
        return logit

    return logit_of


@ti.func
def part_lse(m, l):
    """The bits of a part's log-sum-exp, as `make_store_lse` stores them."""
    bits = ti.u32(MINUS_INFINITY)
    if not is_nothing(l):
        value = m + ti.log(l) * ti.f32(LOG2E)
        bits = ti.select(is_nan(l), ti.u32(NAN), ti.bit_cast(value, ti.u32))
    return bits


def make_store_lse(parts):
    """store_lse(lse, at, m, l, scalars): stores m + log2(l), in base 2 for a part, else in the requested base."""

    @ti.func
    def store_lse(lse: ti.template(), at, m, l, scalars):
        bits = ti.u32(MINUS_INFINITY)
        if not is_nothing(l):
            value = m + ti.log(l) * ti.f32(LOG2E)
            if ti.static(not parts):
                value = value * scalars[X.lse_scale]
            bits = ti.select(is_nan(l), ti.u32(NAN), ti.bit_cast(value, ti.u32))
        lse[at] = bits

    return store_lse
