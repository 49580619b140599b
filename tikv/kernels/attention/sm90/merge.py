"""The merge of parts for `sm90.attend` under `Choices.invariant`, whose tasks may merge them too, one after another."""

from tikv.kernels.attention.merge import make_row_offsets, part_score, part_weight
from tikv.kernels.attention.parameters import (
    BITS,
    FLOATS,
    MASKED,
    MINUS_INFINITY,
    NOT_STORED,
    PARAMS,
    SCALARS,
    STRIDES,
    P,
)
from tikv.kernels.attention.softmax import exp2, inverse_of, is_finite, make_store_lse
from tikv.kernels.codec import SIZE, element_array, make_store
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


@ti.func
def next_part(bits, m):
    """(maximum, factor of what was merged before, weight of the part) for a part's log-sum-exp and the maximum before.

    A part that saw no key changes nothing: the factor is then exactly 1, and the weight 0.
    """
    top = ti.max(m, part_score(bits))
    return top, exp2(m - top), part_weight(bits, top)


def make_merge_in_passing(style, serial, c):
    """`merge.make_merge_in_order` by the arithmetic of a kernel that merges parts while it computes them.

    That kernel does not know the largest log-sum-exp beforehand: see `consumer.make_close`. Infinities and NaNs of
    parts come from values, and are added up by themselves.
    """
    OUT = element_array(c.out)
    store, store_lse = make_store(c.out, 1, SIZE[c.out] * 8, "cuda"), make_store_lse(False)
    row_offsets, width = make_row_offsets(c), c.width_v

    @ti.func
    def merge_item(i, arrays: ti.template(), strides, params, scalars):
        parts, part_lse, out, lse = ti.static(arrays)
        row, d = i // width, i % width
        m, l, x, spoiled = ti.f32(MASKED), ti.f32(0.0), ti.f32(0.0), ti.f32(0.0)
        first = params[P.lse_first] + row * params[P.splits]
        for s in range(params[P.splits]):
            bits, part = part_lse[first + s], ti.f32(0.0)
            if bits == ti.u32(NOT_STORED):
                bits = ti.u32(MINUS_INFINITY)
            else:
                part = parts[params[P.part_first] + (row * params[P.splits] + s) * width + d]
            top, fade, weight = next_part(bits, m)
            if not is_finite(part):
                spoiled = spoiled + part
                part = ti.f32(0.0)
            m, l, x = top, l * fade + weight, x * fade + part * weight
        at, lse_at = row_offsets(row, strides, params)
        y = x * inverse_of(l)
        if not is_finite(spoiled):
            y = y + spoiled
        store(out, at + d, ti.Vector([y]), ti.f32(1.0))
        if d == 0:
            store_lse(lse, lse_at, m, l, scalars)

    loop = make_loop("cuda", False, merge_item, P.tasks)

    @ti.kernel
    def merge(parts: FLOATS, part_lse: BITS, out: OUT, lse: BITS, strides: STRIDES, params: PARAMS, scalars: SCALARS):
        loop(parts, params, ((parts, part_lse, out, lse), strides, params, scalars))

    return merge


make_merge_in_passing.needs_native = lambda style, serial, c: True  # others may fuse products with sums
