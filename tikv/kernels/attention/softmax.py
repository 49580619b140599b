"""The arithmetic of a softmax in base 2: exponentials, logits with a soft cap, log-sum-exps."""

from tikv.kernels.attention.parameters import LOG2E, MINUS_INFINITY, X
from tikv.runtime import ti


@ti.func
def exp2(x):
    """2 ** x for x <= 0, within 2e-7 of it relatively; 0 below -126."""
    y = ti.max(x, ti.f32(-126.0))
    i = ti.cast(y - ti.f32(0.5), ti.i32)
    f = y - ti.cast(i, ti.f32)
    p = ti.f32(1.5403530393381609e-4)
    p = p * f + ti.f32(1.3333558146428443e-3)
    p = p * f + ti.f32(9.618129107628477e-3)
    p = p * f + ti.f32(5.550410866482158e-2)
    p = p * f + ti.f32(2.402265069591007e-1)
    p = p * f + ti.f32(6.931471805599453e-1)
    p = p * f + ti.f32(1.0)
    return ti.select(x < ti.f32(-126.0), ti.f32(0.0), p * ti.bit_cast((i + 127) << 23, ti.f32))


def make_logit(c):
    """logit_of(dot, scale, softcap): from q.k to base-2 logits, by these two of `AttentionScalars`."""

    @ti.func
    def logit_of(dot, scale, softcap):
        found = dot * scale
        if ti.static(c.softcap):
            a = exp2(-ti.abs(found) * ti.f32(2.0 * LOG2E))
            t = (ti.f32(1.0) - a) / (ti.f32(1.0) + a)
            found = ti.select(found < ti.f32(0.0), -t, t) * softcap
        return found

    return logit_of


def make_store_lse(parts):
    """store_lse(lse, at, m, l, scalars): store m + log2(l), as it is for a part, in the base asked for in the end."""

    @ti.func
    def store_lse(lse: ti.template(), at, m, l, scalars):
        bits = ti.u32(MINUS_INFINITY)
        if l > ti.f32(0.0):
            value = m + ti.log(l) * ti.f32(LOG2E)
            if ti.static(not parts):
                value = value * scalars[X.lse_scale]
            bits = ti.bit_cast(value, ti.u32)
        lse[at] = bits

    return store_lse
