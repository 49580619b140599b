"""Merge the parts that the splits of attention computed into the result."""

from tikv.kernels.attention.addresses import result_offsets
from tikv.kernels.attention.parameters import (
    BITS,
    FLOATS,
    MASKED,
    MASKED_BITS,
    MINUS_INFINITY,
    PARAMS,
    SCALARS,
    STRIDES,
    P,
)
from tikv.kernels.attention.softmax import exp2, inverse_of, make_store_lse
from tikv.kernels.codec import SIZE, element_array, make_store
from tikv.kernels.lanes import BLOCK, WARP_DISTANCES, butterfly_max, butterfly_sum, make_loop
from tikv.runtime import ti

MAX_SPLITS = 1024
IN_FLIGHT = 4  # parts that a lane reads at a time


@ti.func
def part_score(bits):
    """The base-2 log-sum-exp of a part, from its bits; `MASKED`, a finite number, if it saw no key."""
    return ti.bit_cast(ti.select(bits == ti.u32(MINUS_INFINITY), ti.u32(MASKED_BITS), bits), ti.f32)


@ti.func
def part_weight(bits, m):
    """The weight of a part, from its log-sum-exp and the largest of all; 0 if it saw no key."""
    return ti.select(bits == ti.u32(MINUS_INFINITY), ti.f32(0.0), exp2(part_score(bits) - m))


def make_merge(style, serial, c):
    """Merge the parts of splits: an item is a query row on CPU and an element elsewhere; on CUDA a block has a row.

    merge(parts, part_lse, out, lse, strides, params, scalars): `parts` is f32 (rows, splits, width_v), 0 if a split saw
    no key. `part_lse` is u32 (rows, splits), bits of base-2 float32. The extent of `parts` is the number of items, on
    CUDA of threads.
    """
    OUT = element_array(c.out)
    merge_item = make_merge_row_by_block(c) if style == "cuda" else make_merge_item(style, c)
    loop = make_loop(style, serial, merge_item, P.tasks)

    @ti.kernel
    def merge(parts: FLOATS, part_lse: BITS, out: OUT, lse: BITS, strides: STRIDES, params: PARAMS, scalars: SCALARS):
        loop(parts, params, ((parts, part_lse, out, lse), strides, params, scalars))

    return merge


make_merge.fast_math = True


def make_merge_in_order(style, serial, c):
    """`make_merge`, but one part after another on every back end: parts that saw no key change no bit.

    On CUDA, as on Vulkan and Metal, an element of the result is an item.
    """
    OUT = element_array(c.out)
    loop = make_loop(style, serial, make_merge_item(style, c), P.tasks)

    @ti.kernel
    def merge(parts: FLOATS, part_lse: BITS, out: OUT, lse: BITS, strides: STRIDES, params: PARAMS, scalars: SCALARS):
        loop(parts, params, ((parts, part_lse, out, lse), strides, params, scalars))

    return merge


def make_row_offsets(c):
    """row_offsets(row, strides, params): the addresses in the result of a row's first element and its log-sum-exp."""

    @ti.func
    def row_offsets(row, strides, params):
        rows = params[P.queries] * c.group
        return result_offsets(row // rows, row % rows, c.group, params[P.out_lse_first], strides, params)

    return row_offsets


def make_merge_item(style, c):
    """merge_item(...): merges an item: a row of the result on CPU, an element on Vulkan and Metal."""
    width = c.width_v
    elements = width if style == "cpu" else 1
    items = width // elements  # of a row
    store, store_lse = make_store(c.out, 1, SIZE[c.out] * 8, style), make_store_lse(False)
    row_offsets = make_row_offsets(c)

    @ti.func
    def merge_item(i, arrays: ti.template(), strides, params, scalars):
        parts, part_lse, out, lse = ti.static(arrays)
        row, column = i // items, i % items
        m, l = ti.f32(MASKED), ti.f32(0.0)
        first = params[P.lse_first] + row * params[P.splits]
        for s in range(params[P.splits]):
            m = ti.max(m, part_score(part_lse[first + s]))
        for s in range(params[P.splits]):
            l = l + part_weight(part_lse[first + s], m)
        at, lse_at = row_offsets(row, strides, params)
        inverse = inverse_of(l)
        for e in range(elements):
            d = column + e
            x = ti.f32(0.0)
            for s in range(params[P.splits]):
                part = parts[params[P.part_first] + (row * params[P.splits] + s) * width + d]
                x = x + part_weight(part_lse[first + s], m) * part
            store(out, at + d, ti.Vector([x * inverse]), ti.f32(1.0))
        if column == 0:
            store_lse(lse, lse_at, m, l, scalars)

    return merge_item


def make_merge_row_by_block(c):
    """The work of a thread in a CUDA block that merges a row: warps share the splits, and their lanes the columns."""
    width = c.width_v
    warps, columns = BLOCK // 32, -(-width // 32)
    store, store_lse = make_store(c.out, 1, SIZE[c.out] * 8, "cuda"), make_store_lse(False)
    row_offsets, weigh_parts, add_parts = make_row_offsets(c), make_weigh_parts(), make_add_parts(width)

    @ti.func
    def merge_row_by_block(i, arrays: ti.template(), strides, params, scalars):
        parts, part_lse, out, lse = ti.static(arrays)
        weights = ti.simt.block.SharedArray((MAX_SPLITS,), ti.f32)
        sums = ti.simt.block.SharedArray((warps * width,), ti.f32)
        thread, row = i % BLOCK, i // BLOCK
        lane, warp = thread % 32, thread // 32
        m, l = weigh_parts(row, lane, part_lse, weights, params)
        ti.simt.block.sync()
        x = add_parts(row, lane, warp, parts, weights, params)
        for y in ti.static(range(columns)):
            if y * 32 + lane < width:
                sums[warp * width + y * 32 + lane] = x[y]
        ti.simt.block.sync()
        at, lse_at = row_offsets(row, strides, params)
        inverse = inverse_of(l)
        for y in ti.static(range(-(-width // BLOCK))):
            d = y * BLOCK + thread
            if d < width:
                total = ti.f32(0.0)
                for z in ti.static(range(warps)):
                    total = total + sums[z * width + d]
                store(out, at + d, ti.Vector([total * inverse]), ti.f32(1.0))
        if thread == 0:
            store_lse(lse, lse_at, m, l, scalars)

    return merge_row_by_block


def make_weigh_parts():
    """weigh_parts(row, lane, part_lse, weights, params) -> (largest logit, sum of weights); it fills in `weights`."""

    @ti.func
    def weigh_parts(row, lane, part_lse: ti.template(), weights: ti.template(), params):
        first = params[P.lse_first] + row * params[P.splits]
        m, l = ti.f32(MASKED), ti.f32(0.0)
        for n in range((params[P.splits] + 31) // 32):
            m = ti.max(m, part_score(part_lse[first + ti.min(n * 32 + lane, params[P.splits] - 1)]))
        m = butterfly_max(m, WARP_DISTANCES)
        ti.simt.block.sync()
        for n in range((params[P.splits] + 31) // 32):
            s = n * 32 + lane
            if s < params[P.splits]:
                w = part_weight(part_lse[first + s], m)
                weights[s] = w  # all warps write the same value
                l = l + w
        return m, butterfly_sum(l, WARP_DISTANCES)

    return weigh_parts


def make_add_parts(width):
    """add_parts(row, lane, warp, parts, weights, params): the weighted sum of the warp's parts in a lane's columns."""
    warps, columns = BLOCK // 32, -(-width // 32)

    @ti.func
    def add_parts(row, lane, warp, parts: ti.template(), weights: ti.template(), params):
        x = ti.Vector([ti.f32(0.0)] * columns)
        for n in range((params[P.splits] + warps * IN_FLIGHT - 1) // (warps * IN_FLIGHT)):
            part = ti.Vector([ti.f32(0.0)] * (columns * IN_FLIGHT))
            w = ti.Vector([ti.f32(0.0)] * IN_FLIGHT)
            for z in ti.static(range(IN_FLIGHT)):
                s = (n * IN_FLIGHT + z) * warps + warp
                if s < params[P.splits]:
                    w[z] = weights[s]
                    for y in ti.static(range(columns)):
                        if y * 32 + lane < width:
                            at = params[P.part_first] + (row * params[P.splits] + s) * width
                            part[z * columns + y] = parts[at + y * 32 + lane]
            for z in ti.static(range(IN_FLIGHT)):
                for y in ti.static(range(columns)):
                    x[y] += w[z] * part[z * columns + y]
        return x

    return add_parts
