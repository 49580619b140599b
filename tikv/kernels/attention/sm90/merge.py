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

LANES = 16  # threads that merge a row, whose columns are a multiple of this


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
    parts come from values, and are added up by themselves. `LANES` threads have a row, and share its columns: each
    computes the weights of the parts once.
    """
    OUT = element_array(c.out)
    store, store_lse = make_store(c.out, 1, SIZE[c.out] * 8, "cuda"), make_store_lse(False)
    row_offsets, width = make_row_offsets(c), c.width_v
    COLUMNS = width // LANES  # of a thread

    @ti.func
    def merge_columns(i, arrays: ti.template(), strides, params, scalars):
        parts, part_lse, out, lse = ti.static(arrays)
        row, lane = i // LANES, i % LANES
        m, l = ti.f32(MASKED), ti.f32(0.0)
        x, spoiled = [ti.f32(0.0) for _ in range(COLUMNS)], [ti.f32(0.0) for _ in range(COLUMNS)]
        first = params[P.lse_first] + row * params[P.splits]
        coming, last = part_lse[first], params[P.splits] - 1
        for s in range(params[P.splits]):
            bits, part = coming, [ti.f32(0.0) for _ in range(COLUMNS)]
            coming = part_lse[first + ti.min(s + 1, last)]  # before it is needed
            if bits == ti.u32(NOT_STORED):
                bits = ti.u32(MINUS_INFINITY)
            else:
                at = params[P.part_first] + (row * params[P.splits] + s) * width + lane
                for j in ti.static(range(COLUMNS)):
                    part[j] = parts[at + ti.static(j * LANES)]
            top, fade, weight = next_part(bits, m)
            m, l = top, l * fade + weight
            for j in ti.static(range(COLUMNS)):
                if not is_finite(part[j]):
                    spoiled[j] = spoiled[j] + part[j]
                    part[j] = ti.f32(0.0)
                x[j] = x[j] * fade + part[j] * weight
        at, lse_at = row_offsets(row, strides, params)
        inverse = inverse_of(l)
        for j in ti.static(range(COLUMNS)):
            y = x[j] * inverse
            if not is_finite(spoiled[j]):
                y = y + spoiled[j]
            store(out, at + lane + ti.static(j * LANES), ti.Vector([y]), ti.f32(1.0))
        if lane == 0:
            store_lse(lse, lse_at, m, l, scalars)

    loop = make_loop("cuda", False, merge_columns, P.tasks)

    @ti.kernel
    def merge(parts: FLOATS, part_lse: BITS, out: OUT, lse: BITS, strides: STRIDES, params: PARAMS, scalars: SCALARS):
        loop(parts, params, ((parts, part_lse, out, lse), strides, params, scalars))

    return merge


make_merge_in_passing.needs_native = lambda style, serial, c: True  # others may fuse products with sums
