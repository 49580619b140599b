"""The loop of a kernel, the threads that share a row in it, and how they agree on a number.

They agree by shuffles on CUDA and by shared memory on Vulkan and Metal. On CPU a row belongs to one thread, which gets
back what it gives.
"""

import functools

from tikv.runtime import ti

BLOCK = 128  # threads of a GPU block; rows never straddle one, since the lanes of a row divide it
LEAST_ITERATIONS = 512  # that Taichi gives a CPU thread
SPIRV_THREADS = 1 << 16  # of a Vulkan or Metal launch; each strides over the work, so the loop bound is constant


def make_loop(style, serial, step, count):
    """loop(extent, numbers, arguments): a kernel's one top-level loop, step(i, *arguments) for each iteration i.

    On CPU and CUDA there are as many as the array `extent` is said to have elements. On Vulkan and Metal, where only a
    constant bound leaves it one task, `SPIRV_THREADS` threads stride over numbers[count]. All of loop's arguments are
    templates: a value that is passed would be copied in a task of its own.
    """

    @ti.func
    def loop(extent: ti.template(), numbers: ti.template(), arguments: ti.template()):
        if ti.static(style == "spirv"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(SPIRV_THREADS):
                for n in range((numbers[count] - i + SPIRV_THREADS - 1) // SPIRV_THREADS):
                    step(i + n * SPIRV_THREADS, *arguments)
        elif ti.static(style == "cuda"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(extent.shape[0]):
                step(i, *arguments)
        else:
            ti.loop_config(serialize=serial)
            for i in range(extent.shape[0]):
                step(i, *arguments)

    return loop


@functools.cache
def make_row_max(style, lanes):
    """row_max(thread, value): the largest u32 among the lanes of a row, for each of them."""

    @ti.func
    def row_max(thread, value):
        found = value
        if ti.static(lanes > 1 and style == "cuda"):
            for step in ti.static(halves(lanes)):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(0xFFFFFFFF), ti.bit_cast(found, ti.i32), step)
                found = ti.max(found, ti.bit_cast(other, ti.u32))
        elif ti.static(lanes > 1):
            shared = ti.simt.block.SharedArray((BLOCK,), ti.u32)
            place = thread % BLOCK
            for step in ti.static(halves(lanes)):
                ti.simt.block.sync()
                shared[place] = found
                ti.simt.block.sync()
                found = ti.max(found, shared[place ^ step])
        return found

    return row_max


@functools.cache
def make_row_sum(style, steps):
    """row_sum(thread, value): the float32 sum over the lanes of a row that these steps join, the same bits for each."""

    @ti.func
    def row_sum(thread, value):
        found = value
        if ti.static(len(steps) > 0 and style == "cuda"):
            for step in ti.static(steps):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(0xFFFFFFFF), ti.bit_cast(found, ti.i32), step)
                found = found + ti.bit_cast(other, ti.f32)
        elif ti.static(len(steps) > 0):
            shared = ti.simt.block.SharedArray((BLOCK,), ti.f32)
            place = thread % BLOCK
            for step in ti.static(steps):
                ti.simt.block.sync()
                shared[place] = found
                ti.simt.block.sync()
                found = found + shared[place ^ step]
        return found

    return row_sum


def halves(lanes):
    """The steps by which lanes meet each other, pair by pair: half of them first.

    Example:
        >>> halves(8)
        [4, 2, 1]
    """
    return [lanes >> n for n in range(1, lanes.bit_length())]
