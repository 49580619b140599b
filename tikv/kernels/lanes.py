"""Threads that share a row, and how they agree on a number: by shuffles on CUDA, shared memory on Vulkan and Metal.

On CPU a row belongs to one thread and the functions here return what they are given.
"""

import functools

from tikv.runtime import ti

BLOCK = 128  # threads of a GPU block; rows never straddle one, since the lanes of a row divide it
SPIRV_THREADS = 1 << 16  # of a Vulkan or Metal launch; each strides over the work, so the loop bound is constant


@functools.cache
def make_row_max(style, lanes):
    """row_max(thread, value): the largest u32 among the lanes of a row, for each of them."""

    @ti.func
    def row_max(thread, value):
        found = value
        if ti.static(lanes > 1 and style == "cuda"):
            for step in ti.static(_halves(lanes)):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(0xFFFFFFFF), ti.bit_cast(found, ti.i32), step)
                found = ti.max(found, ti.bit_cast(other, ti.u32))
        elif ti.static(lanes > 1):
            shared = ti.simt.block.SharedArray((BLOCK,), ti.u32)
            place = thread % BLOCK
            for step in ti.static(_halves(lanes)):
                ti.simt.block.sync()
                shared[place] = found
                ti.simt.block.sync()
                found = ti.max(found, shared[place ^ step])
        return found

    return row_max


@functools.cache
def make_row_sum(style, lanes):
    """row_sum(thread, value): the float32 sum over the lanes of a row, the same bits for each of them."""

    @ti.func
    def row_sum(thread, value):
        found = value
        if ti.static(lanes > 1 and style == "cuda"):
            for step in ti.static(_halves(lanes)):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(0xFFFFFFFF), ti.bit_cast(found, ti.i32), step)
                found = found + ti.bit_cast(other, ti.f32)
        elif ti.static(lanes > 1):
            shared = ti.simt.block.SharedArray((BLOCK,), ti.f32)
            place = thread % BLOCK
            for step in ti.static(_halves(lanes)):
                ti.simt.block.sync()
                shared[place] = found
                ti.simt.block.sync()
                found = found + shared[place ^ step]
        return found

    return row_sum


def _halves(lanes):
    return [lanes >> n for n in range(1, lanes.bit_length())]
