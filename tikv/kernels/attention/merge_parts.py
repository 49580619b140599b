"""Merge any number of attention states over different keys into one, as processes that share the keys gather them."""

from typing import NamedTuple

from tikv.kernels.attention.parameters import BITS, LOG2E, MASKED, MINUS_INFINITY, SCALARS, X
from tikv.kernels.attention.softmax import exp2
from tikv.kernels.codec import SIZE, element_array, make_store
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class MergePartsParams(NamedTuple):
    """Numbers of a merge of parts: items, parts, rows of a part, and the first entries of parts and results."""

    items: int = 0
    parts: int = 1
    rows: int = 1
    heads: int = 1
    queries: int = 1
    parts_first: int = 0
    out_sequence: int = 0
    out_head: int = 0
    out_token: int = 0
    out_first: int = 0
    lse_sequence: int = 0
    lse_head: int = 0
    lse_token: int = 0
    lse_first: int = 0
    sink_head: int = 0
    sink_first: int = 0


P = MergePartsParams(*range(len(MergePartsParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_merge_parts(style, width, code_out, sinks):
    """merge(parts, out, lse, params, scalars): one state for each row; items: rows * width, which is parts' extent.

    `parts` holds the bits of float32 (parts, rows, width + 1); a row's log-sum-exp follows its result. With `sinks`,
    the bits of a logit for each head come first; each counts once, as a part whose result is 0.
    `AttentionScalars.lse_scale` converts the base of the log-sum-exps to 2.
    """
    RESULT = element_array(code_out)
    store = make_store(code_out, 1, SIZE[code_out] * 8, style)

    @ti.func
    def merge_item(i, arrays: ti.template(), params, scalars):
        parts, out, lse = ti.static(arrays[:3])
        row, d = i // width, i % width
        query, rest = row % params[P.queries], row // params[P.queries]
        head, b = rest % params[P.heads], rest // params[P.heads]
        m, counted, sink = ti.f32(MASKED), 0, ti.u32(MINUS_INFINITY)
        if ti.static(sinks):
            sink = arrays[3][params[P.sink_first] + head * params[P.sink_head]]
            if sink != ti.u32(MINUS_INFINITY):
                m = ti.max(m, ti.bit_cast(sink, ti.f32) * ti.f32(LOG2E))
                counted = 1
        for n in range(params[P.parts]):
            at = params[P.parts_first] + (n * params[P.rows] + row) * (width + 1)
            lse_bits = parts[at + width]
            if lse_bits != ti.u32(MINUS_INFINITY):
                m = ti.max(m, ti.bit_cast(lse_bits, ti.f32) * scalars[X.lse_scale])
                counted = 1
        x, total, bits = ti.f32(0.0), ti.f32(0.0), ti.u32(MINUS_INFINITY)
        if counted == 1:
            if sink != ti.u32(MINUS_INFINITY):
                total = exp2(ti.bit_cast(sink, ti.f32) * ti.f32(LOG2E) - m)
            for n in range(params[P.parts]):
                at = params[P.parts_first] + (n * params[P.rows] + row) * (width + 1)
                lse_bits = parts[at + width]
                if lse_bits != ti.u32(MINUS_INFINITY):
                    weight = exp2(ti.bit_cast(lse_bits, ti.f32) * scalars[X.lse_scale] - m)
                    total = total + weight
                    x = x + weight * ti.bit_cast(parts[at + d], ti.f32)
            x = x / total
            bits = ti.bit_cast((m + ti.log(total) * ti.f32(LOG2E)) / scalars[X.lse_scale], ti.u32)
        to = params[P.out_first] + b * params[P.out_sequence] + head * params[P.out_head] + query * params[P.out_token]
        store(out, to + d, ti.Vector([x]), ti.f32(1.0))
        if d == 0:
            to = params[P.lse_first] + b * params[P.lse_sequence] + head * params[P.lse_head]
            lse[to + query * params[P.lse_token]] = bits

    loop = make_loop(style, False, merge_item, P.items)

    @ti.kernel
    def merge_parts(parts: BITS, out: RESULT, lse: BITS, params: PARAMS, scalars: SCALARS):
        loop(parts, params, ((parts, out, lse), params, scalars))

    @ti.kernel
    def merge_parts_and_sinks(parts: BITS, out: RESULT, lse: BITS, sink_logits: BITS, params: PARAMS,
                              scalars: SCALARS):  # fmt: skip
        loop(parts, params, ((parts, out, lse, sink_logits), params, scalars))

    return merge_parts_and_sinks if sinks else merge_parts


make_merge_parts.fast_math = True
