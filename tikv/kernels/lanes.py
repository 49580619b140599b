"""The loop of a kernel, the threads that share a row in it, and how they agree on a number.

They agree by shuffles on CUDA and by shared memory on Vulkan and Metal, where subgroups have no width that a row could
be cut to. On CPU a row belongs to one thread, which gets back what it gives. `make_across` is for kernels that take
parties as wide as they come: warps, subgroups, or threads alone.
"""

import functools
from typing import Any, NamedTuple

from tikv.runtime import ti

BLOCK = 128  # threads of a GPU block; rows never straddle one, since the lanes of a row divide it
LEAST_ITERATIONS = 512  # that Taichi gives a CPU thread
ALL = 0xFFFFFFFF  # lanes of a warp
SPIRV_THREADS = 1 << 16  # of a Vulkan or Metal launch; each strides over the work, so the loop bound is constant


def halves(lanes):
    """The steps by which lanes meet each other, pair by pair: half of them first.

    Example:
        >>> halves(8)
        [4, 2, 1]
    """
    return [lanes >> n for n in range(1, lanes.bit_length())]


WHOLE = halves(32)  # steps that join a warp


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


@ti.func
def across_lanes(x, step: ti.template()):
    """The value of the lane of a CUDA warp at this distance."""
    return ti.bit_cast(ti.simt.warp.shfl_xor_i32(ti.u32(ALL), ti.bit_cast(x, ti.i32), step), ti.f32)


@ti.func
def from_lane(x, lane):
    """The value of a lane of the CUDA warp."""
    return ti.bit_cast(ti.simt.warp.shfl_sync_i32(ti.u32(ALL), ti.bit_cast(x, ti.i32), lane), ti.f32)


@ti.func
def sum_over(x, steps: ti.template()):
    """The float32 sum over the lanes of a CUDA warp that these steps join, the same bits for each."""
    found = x
    for step in ti.static(steps):
        found = found + across_lanes(found, step)
    return found


@ti.func
def highest_over(x, steps: ti.template()):
    """The largest float32, none a NaN, of the lanes of a CUDA warp that these steps join."""
    found = x
    for step in ti.static(steps):
        found = ti.max(found, across_lanes(found, step))
    return found


@functools.cache
def make_row_max(style, lanes):
    """row_max(thread, value): the largest u32 among the lanes of a row, for each of them."""

    @ti.func
    def row_max(thread, value):
        found = value
        if ti.static(lanes > 1 and style == "cuda"):
            for step in ti.static(halves(lanes)):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(ALL), ti.bit_cast(found, ti.i32), step)
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
        if ti.static(style == "cuda"):
            found = sum_over(value, steps)
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


class Across(NamedTuple):
    """How neighbours in a block, a party, agree without a barrier; whoever calls these, all of a party do together."""

    place: Any  # place(thread) -> the vector `Place`; with a barrier, so for all threads of the block together
    total: Any  # total(x): the float32 sum over the party
    highest: Any  # highest(x): the largest float32 of the party, none of which is a NaN


class Place(NamedTuple):
    """Entries of what `Across.place` returns: where a thread stands in its party, and the party in the block."""

    rank: int = 0  # of the thread, from 0
    size: int = 1  # threads of the party
    before: int = 2  # threads of the parties before it
    number: int = 3  # of the party, from 0
    parties: int = 4  # of the block


SUBGROUP, WARP, ALONE = "subgroup", "warp", "alone"  # ways


@functools.cache
def make_across(way):
    """The `Across` of a way: `WARP` on CUDA, `SUBGROUP` on Vulkan and Metal, `ALONE`, a thread a party, anywhere.

    Nothing is taken for granted of subgroups but that they partition the block: their widths differ by device, by
    kernel on some, and may be less than what the device reports. They are counted, and their threads ranked, as they
    come.
    """

    @ti.func
    def place(thread):
        found = ti.Vector([0, 1, thread, thread, BLOCK])
        if ti.static(way == WARP):
            found = ti.Vector([thread % 32, 32, thread - thread % 32, thread // 32, BLOCK // 32])
        elif ti.static(way == SUBGROUP):
            sizes = ti.simt.block.SharedArray((BLOCK,), ti.i32)  # of each party, at its first thread
            size = ti.simt.subgroup.reduce_add(1)
            rank = ti.simt.subgroup.inclusive_add(1) - 1
            first = ti.simt.subgroup.reduce_min(thread)
            sizes[thread] = ti.select(thread == first, size, 0)
            ti.simt.block.sync()
            before, number, parties = 0, 0, 0
            for n in range((BLOCK + size - 1) // size):
                other = n * size + rank
                counts = ti.select(other < BLOCK, sizes[ti.min(other, BLOCK - 1)], 0)
                earlier = ti.select(other < first, counts, 0)
                before = before + earlier
                number = number + ti.min(earlier, 1)
                parties = parties + ti.min(counts, 1)
            found = ti.Vector([rank, size, ti.simt.subgroup.reduce_add(before), ti.simt.subgroup.reduce_add(number),
                               ti.simt.subgroup.reduce_add(parties)])  # fmt: skip
        return found

    @ti.func
    def total(x):
        found = x
        if ti.static(way == WARP):
            found = sum_over(x, WHOLE)
        elif ti.static(way == SUBGROUP):
            found = ti.simt.subgroup.reduce_add(x)  # of type i32, if one asks Taichi: only a variable has the right one
        return found

    @ti.func
    def highest(x):
        found = x
        if ti.static(way == WARP):
            found = highest_over(x, WHOLE)
        elif ti.static(way == SUBGROUP):
            found = ti.simt.subgroup.reduce_max(x)
        return found

    return Across(place, total, highest)


def make_trial(way):
    """trial(out): of each thread of one block its `Place`, and the total and the highest of the threads' numbers."""
    OUT = ti.types.ndarray(dtype=ti.f32, ndim=1)
    across = make_across(way)
    place_of, total, highest = across.place, across.total, across.highest
    entries = len(Place._fields)

    @ti.kernel
    def trial(out: OUT):
        ti.loop_config(block_dim=BLOCK)
        for i in range(BLOCK):
            place = place_of(i)
            for n in ti.static(range(entries)):
                out[n * BLOCK + i] = ti.cast(place[n], ti.f32)
            out[entries * BLOCK + i] = total(ti.cast(i, ti.f32))
            out[(entries + 1) * BLOCK + i] = highest(ti.cast(i, ti.f32))

    return trial


TRIED = len(Place._fields) + 2  # numbers of a thread that a trial leaves


def agreed(found):
    """Whether what a trial left is right: the parties are a partition of the block, in order, and each agrees."""
    if not abs(found).max() <= BLOCK * BLOCK:  # or a NaN
        return False
    rank, size, before, number, parties, totals, tops = found.astype(int).reshape(TRIED, BLOCK).tolist()
    threads = range(BLOCK)
    members = [[j for j in threads if number[j] == number[i]] for i in threads]
    return (
        sorted(b + r for b, r in zip(before, rank, strict=True)) == list(threads)
        and sorted(set(number)) == list(range(parties[0]))
        and set(parties) == {parties[0]}
        and all(
            size[i] == len(members[i])
            and before[i] == before[members[i][0]]
            and rank[i] < size[i]
            and totals[i] == sum(members[i])
            and tops[i] == max(members[i])
            for i in threads
        )
    )
