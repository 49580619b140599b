"""Merge two attention states over different keys into one."""

from typing import NamedTuple

from tikv.kernels.attention.parameters import BITS, LOG2E, MASKED, MINUS_INFINITY, SCALARS, X
from tikv.kernels.attention.softmax import exp2
from tikv.kernels.codec import SIZE, element_array, make_load, make_store
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class MergeStatesParams(NamedTuple):
    """Numbers of a merge of two states: items, and the extents of the last leading axes."""

    items: int = 0
    extent_1: int = 1
    extent_2: int = 1


P = MergeStatesParams(*range(len(MergeStatesParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)
OUT_A, OUT_B, LSE_A, LSE_B, OUT, LSE = 0, 4, 8, 12, 16, 20  # for each, three strides and the first entry
STRIDES = ti.types.vector(24, ti.i32)


@ti.func
def state_row(row, array: ti.template(), strides, params):
    """The address of a row in one of these arrays."""
    inner, rest = row % params[P.extent_2], row // params[P.extent_2]
    middle, outer = rest % params[P.extent_1], rest // params[P.extent_1]
    return outer * strides[array] + middle * strides[array + 1] + inner * strides[array + 2] + strides[array + 3]


def make_merge_states(style, serial, width, code_a, code_b, code_out):
    """merge(out_a, out_b, lse_a, lse_b, out, lse, strides, params, scalars): merges two states into one.

    An item is an element, or on CPU a row, whose weights are computed once; `serial` is as in `lanes.make_loop`.
    `AttentionScalars.lse_scale` converts the base of the log-sum-exps to 2. The extent of `out_a` is the number of
    items.
    """
    A, B, RESULT = element_array(code_a), element_array(code_b), element_array(code_out)
    load_a, load_b = make_load(code_a, 1, SIZE[code_a] * 8), make_load(code_b, 1, SIZE[code_b] * 8)
    store = make_store(code_out, 1, SIZE[code_out] * 8, style)

    @ti.func
    def merge_item(i, arrays: ti.template(), strides, params, scalars):
        out_a, out_b, lse_a, lse_b, out, lse = ti.static(arrays)
        row, first, end = i // width, i % width, i % width + 1
        if ti.static(style == "cpu"):
            row, first, end = i, 0, width
        a_bits = lse_a[state_row(row, LSE_A, strides, params)]
        b_bits = lse_b[state_row(row, LSE_B, strides, params)]
        a_counts, b_counts = a_bits != ti.u32(MINUS_INFINITY), b_bits != ti.u32(MINUS_INFINITY)
        wa, wb, bits = ti.f32(0.0), ti.f32(0.0), ti.u32(MINUS_INFINITY)
        if a_counts or b_counts:
            a, b = ti.f32(MASKED), ti.f32(MASKED)
            if a_counts:
                a = ti.bit_cast(a_bits, ti.f32) * scalars[X.lse_scale]
            if b_counts:
                b = ti.bit_cast(b_bits, ti.f32) * scalars[X.lse_scale]
            m = ti.max(a, b)
            wa, wb = exp2(a - m), exp2(b - m)
            total = wa + wb
            bits = ti.bit_cast((m + ti.log(total) * ti.f32(LOG2E)) / scalars[X.lse_scale], ti.u32)
            inverse = ti.f32(1.0) / total
            wa, wb = wa * inverse, wb * inverse
        at_a, at_b = state_row(row, OUT_A, strides, params), state_row(row, OUT_B, strides, params)
        to = state_row(row, OUT, strides, params)
        for d in range(first, end):
            x = ti.f32(0.0)
            if a_counts:
                x = x + wa * load_a(out_a, at_a + d)[0]
            if b_counts:
                x = x + wb * load_b(out_b, at_b + d)[0]
            store(out, to + d, ti.Vector([x]), ti.f32(1.0))
        if first == 0:
            lse[state_row(row, LSE, strides, params)] = bits

    loop = make_loop(style, serial, merge_item, P.items)

    @ti.kernel
    def merge_states(out_a: A, out_b: B, lse_a: BITS, lse_b: BITS, out: RESULT, lse: BITS, strides: STRIDES,
                     params: PARAMS, scalars: SCALARS):  # fmt: skip
        loop(out_a, params, ((out_a, out_b, lse_a, lse_b, out, lse), strides, params, scalars))

    return merge_states


make_merge_states.fast_math = True
