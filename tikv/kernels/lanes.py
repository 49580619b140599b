"""The loop of a kernel, the threads that share a row in it, and how they agree on a number.

They agree by shuffles on CUDA and by shared memory on Vulkan and Metal, where the width of subgroups is not known in
advance. On CPU a row belongs to one thread, which gets back its own value. `make_group_operations` is for kernels that
work with groups of threads of any width: warps, subgroups, or single threads.
"""

import functools
from typing import Any, NamedTuple

from tikv.runtime import engine_in_use, ti

BLOCK = 128  # threads of a GPU block; rows never straddle one, since the lanes of a row divide it
LEAST_ITERATIONS = 512  # the fewest iterations that Taichi gives a CPU thread
ALL = 0xFFFFFFFF  # lanes of a warp
SPIRV_THREADS = 1 << 16  # threads of a Vulkan or Metal launch; each strides over the work: the loop bound is constant


def butterfly_distances(lanes):
    """The distances over which lanes exchange in a butterfly reduction: half of them first.

    Examples:
        >>> butterfly_distances(8)
        [4, 2, 1]
    """
    return [lanes >> n for n in range(1, lanes.bit_length())]


WARP_DISTANCES = butterfly_distances(32)  # those of a whole warp


def make_loop(style, serial, body, count):
    """loop(extent, numbers, arguments): a kernel's one top-level loop, body(i, *arguments) for each iteration i.

    On CPU and CUDA the declared length of the array `extent` is the number of iterations. On Vulkan and Metal, where
    only a constant bound keeps the kernel one task, `SPIRV_THREADS` threads stride over numbers[count]. All of loop's
    arguments are templates: a value would be copied in a task of its own.
    """

    @ti.func
    def loop(extent: ti.template(), numbers: ti.template(), arguments: ti.template()):
        if ti.static(style == "spirv"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(SPIRV_THREADS):
                for n in range((numbers[count] - i + SPIRV_THREADS - 1) // SPIRV_THREADS):
                    body(i + n * SPIRV_THREADS, *arguments)
        elif ti.static(style == "cuda"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(extent.shape[0]):
                body(i, *arguments)
        else:
            ti.loop_config(serialize=serial)
            for i in range(extent.shape[0]):
                body(i, *arguments)

    return loop


@ti.func
def shuffle_xor(x, distance: ti.template()):
    """The value of the lane of a CUDA warp at this distance."""
    return ti.bit_cast(ti.simt.warp.shfl_xor_i32(ti.u32(ALL), ti.bit_cast(x, ti.i32), distance), ti.f32)


@ti.func
def shuffle(x, lane):
    """The value of a lane of the CUDA warp."""
    return ti.bit_cast(ti.simt.warp.shfl_sync_i32(ti.u32(ALL), ti.bit_cast(x, ti.i32), lane), ti.f32)


@ti.func
def butterfly_sum(x, distances: ti.template()):
    """The float32 sum over the lanes of a CUDA warp that these distances join, the same bits for each."""
    total = x
    for distance in ti.static(distances):
        total = total + shuffle_xor(total, distance)
    return total


@ti.func
def butterfly_max(x, distances: ti.template()):
    """The largest float32 among the lanes of a CUDA warp that these distances join; no value may be NaN."""
    largest = x
    for distance in ti.static(distances):
        largest = ti.max(largest, shuffle_xor(largest, distance))
    return largest


@functools.cache
def make_row_max(style, lanes):
    """row_max(thread, value): the largest u32 among the lanes of a row, for each of them."""

    @ti.func
    def row_max(thread, value):
        largest = value
        if ti.static(lanes > 1 and style == "cuda"):
            for distance in ti.static(butterfly_distances(lanes)):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(ALL), ti.bit_cast(largest, ti.i32), distance)
                largest = ti.max(largest, ti.bit_cast(other, ti.u32))
        elif ti.static(lanes > 1):
            shared = ti.simt.block.SharedArray((BLOCK,), ti.u32)
            in_block = thread % BLOCK
            for distance in ti.static(butterfly_distances(lanes)):
                ti.simt.block.sync()
                shared[in_block] = largest
                ti.simt.block.sync()
                largest = ti.max(largest, shared[in_block ^ distance])
        return largest

    return row_max


@functools.cache
def make_row_sum(style, distances):
    """row_sum(thread, value): the float32 sum over a row's lanes that these distances join, the same bits for each."""

    @ti.func
    def row_sum(thread, value):
        total = value
        if ti.static(style == "cuda"):
            total = butterfly_sum(value, distances)
        elif ti.static(len(distances) > 0):
            shared = ti.simt.block.SharedArray((BLOCK,), ti.f32)
            in_block = thread % BLOCK
            for distance in ti.static(distances):
                ti.simt.block.sync()
                shared[in_block] = total
                ti.simt.block.sync()
                total = total + shared[in_block ^ distance]
        return total

    return row_sum


class GroupOperations(NamedTuple):
    """How neighbouring threads of a block agree without a barrier; all threads of a group call these together."""

    position: Any  # position(thread) -> the vector `GroupPosition`; with a barrier: for all of a block together
    sum: Any  # sum(x): the float32 sum over the group
    max: Any  # max(x): the largest float32 of the group, none of which is a NaN


class GroupPosition(NamedTuple):
    """Entries of `GroupOperations.position`'s result: a thread's place in its group, and the group's in the block."""

    rank: int = 0  # of the thread, from 0
    size: int = 1  # threads of the group
    offset: int = 2  # threads of the groups before it
    index: int = 3  # of the group, from 0
    groups: int = 4  # of the block


G = GroupPosition()
SUBGROUP, WARP, SINGLE = "subgroup", "warp", "single"  # kinds of group
subgroup_add, subgroup_min, subgroup_max = (engine_in_use().over_subgroup(name) for name in ("add", "min", "max"))


@functools.cache
def make_group_operations(kind):
    """The operations of `WARP` on CUDA, `SUBGROUP` on Vulkan and Metal, or `SINGLE`, groups of one thread, anywhere.

    The only assumption about subgroups is that they partition the block: their widths differ by device, on some by
    kernel, and may be less than what the device reports. They are counted, and their threads ranked, at run time.
    """

    @ti.func
    def group_position(thread):
        position = ti.Vector([0, 1, thread, thread, BLOCK])
        if ti.static(kind == WARP):
            position = ti.Vector([thread % 32, 32, thread - thread % 32, thread // 32, BLOCK // 32])
        elif ti.static(kind == SUBGROUP):
            sizes = ti.simt.block.SharedArray((BLOCK,), ti.i32)  # of each group, at its first thread
            size = subgroup_add(1)
            rank = ti.simt.subgroup.inclusive_add(1) - 1
            first = subgroup_min(thread)
            sizes[thread] = ti.select(thread == first, size, 0)
            ti.simt.block.sync()
            offset, index, groups = 0, 0, 0
            for n in range((BLOCK + size - 1) // size):
                other = n * size + rank
                counts = ti.select(other < BLOCK, sizes[ti.min(other, BLOCK - 1)], 0)
                earlier = ti.select(other < first, counts, 0)
                offset = offset + earlier
                index = index + ti.min(earlier, 1)
                groups = groups + ti.min(counts, 1)
            position = ti.Vector([rank, size, subgroup_add(offset), subgroup_add(index), subgroup_add(groups)])
        return position

    @ti.func
    def group_sum(x):
        total = x
        if ti.static(kind == WARP):
            total = butterfly_sum(x, WARP_DISTANCES)
        elif ti.static(kind == SUBGROUP):
            total = subgroup_add(x)  # of type i32, if one asks Taichi: only a variable has the right one
        return total

    @ti.func
    def group_max(x):
        largest = x
        if ti.static(kind == WARP):
            largest = butterfly_max(x, WARP_DISTANCES)
        elif ti.static(kind == SUBGROUP):
            largest = subgroup_max(x)
        return largest

    return GroupOperations(group_position, group_sum, group_max)


def make_self_test(kind):
    """self_test(out): of each thread of one block its `GroupPosition`, and sum and maximum of the threads' numbers."""
    OUT = ti.types.ndarray(dtype=ti.f32, ndim=1)
    group_position, group_sum, group_max = make_group_operations(kind)
    entries = len(GroupPosition._fields)

    @ti.kernel
    def self_test(out: OUT):
        ti.loop_config(block_dim=BLOCK)
        for i in range(BLOCK):
            position = group_position(i)
            for n in ti.static(range(entries)):
                out[n * BLOCK + i] = ti.cast(position[n], ti.f32)
            out[entries * BLOCK + i] = group_sum(ti.cast(i, ti.f32))
            out[(entries + 1) * BLOCK + i] = group_max(ti.cast(i, ti.f32))

    return self_test


SELF_TEST_ROWS = len(GroupPosition._fields) + 2  # numbers of a thread that a self-test leaves


def self_test_passed(numbers):
    """Whether the result of a self-test is right: the groups partition the block, in order, and each agrees."""
    if not abs(numbers).max() <= BLOCK * BLOCK:  # or a NaN
        return False
    rank, size, offset, index, groups, sums, maxima = numbers.astype(int).reshape(SELF_TEST_ROWS, BLOCK).tolist()
    threads = range(BLOCK)
    members = [[j for j in threads if index[j] == index[i]] for i in threads]
    return (
        sorted(b + r for b, r in zip(offset, rank, strict=True)) == list(threads)
        and sorted(set(index)) == list(range(groups[0]))
        and set(groups) == {groups[0]}
        and all(
            size[i] == len(members[i])
            and offset[i] == offset[members[i][0]]
            and rank[i] < size[i]
            and sums[i] == sum(members[i])
            and maxima[i] == max(members[i])
            for i in threads
        )
    )
