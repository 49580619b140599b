"""Attention of prompts by the warpgroups of compute capability 9.0: S = Q K^T and O += P V, both by `wgmma`.

A block has one warpgroup that produces, or two over codes, and two that consume. Those that produce write tiles of K
and V into shared memory, some of each ahead, and say by a barrier that one is there; a consumer says when it has done
with one. A consumer has 64 query rows. It starts the product that makes a tile's scores and the one that adds the
values of the tile before, and makes weights of the scores while the values are added; the two consumers take turns at
starting theirs, so that one computes weights while the other multiplies. Weights stay in registers: the sums of the
first product lie in the order in which the second takes its operand. As in `tensor_cores`, results are rescaled only
when a maximum grows.

Which keys a tile has is told by index, as everywhere (`visible`). Rows of K and V lie in shared memory as `hopper_ir`
says; what no row of the task sees is zero there.
"""

from tikv.kernels.attention.hopper_codes import make_produce_codes
from tikv.kernels.attention.hopper_consumer import make_consume
from tikv.kernels.attention.hopper_producer import make_produce
from tikv.kernels.attention.hopper_tiles import BITCODE as BITCODE
from tikv.kernels.attention.hopper_tiles import GROUP, B, instructions, make_find_task, memory_for, registers_of
from tikv.kernels.attention.hopper_tiles import KEYS_OF as KEYS_OF
from tikv.kernels.attention.hopper_tiles import PIECE as PIECE
from tikv.kernels.attention.hopper_tiles import Warpgroups as Warpgroups
from tikv.kernels.attention.hopper_tiles import producers_of as producers_of
from tikv.kernels.attention.parameters import P, make_attend_kernel
from tikv.kernels.attention.tensor_instructions import HALVES
from tikv.kernels.lanes import ALL
from tikv.runtime import ti


def make_attend_hopper(tile, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, strides, params, scalars) on compute capability 9.0.

    K and V in words of 64 bits, of one of `HALVES`, and q of the same; rows in one piece that begin at multiples of
    `PIECE` bytes, those of q too. Or K and V are codes, as `hopper_codes` takes them, and q is of one of `HALVES`. The
    extent of q is blocks * `tile.threads`: a block for each task, or fewer if `tile.persistent`. Choices as in
    `cpu.make_attend_cpu`, terms as in `subgroup.make_attend_block`.
    """
    attend_tasks, THREADS = make_attend_tasks(tile, parts, c), tile.threads
    count_blocks = instructions().count_blocks

    @ti.func
    def attend_all(arrays: ti.template(), terms: ti.template(), strides: ti.template(), params: ti.template(),
                   scalars: ti.template()):  # fmt: skip
        ti.loop_config(block_dim=THREADS)
        for i in range(ti.static(arrays[0]).shape[0]):
            blocks = 0
            if ti.static(tile.persistent):
                count_blocks(blocks)
            attend_tasks(i % THREADS, i // THREADS, blocks, arrays, terms, strides, params, scalars)

    return make_attend_kernel(attend_all, "cuda", c)


make_attend_hopper.fast_math = True
make_attend_hopper.resident = lambda tile, parts, c: tile.resident
make_attend_hopper.shared_bytes = lambda tile, parts, c: memory_for(c).nbytes


@ti.func
def number_of(j, block, blocks):
    """The number of a block's j-th task: there and back, since the tasks of a KV head have fewer and fewer keys."""
    return j * blocks + ti.select(j & 1 == 0, block, blocks - 1 - block)


@ti.func
def count_tasks(block, blocks, tasks):
    """How many of the tasks a block has."""
    rounds = tasks // blocks
    return rounds + ti.cast(number_of(rounds, block, blocks) < tasks, ti.i32)


def make_attend_tasks(x, parts, c):
    """attend_tasks(thread, block, blocks, ...): a thread's share of a block's tasks; all threads of a block call it.

    A block has one task, or if it is persistent one of every `blocks`: then the producer goes on to the next task while
    the consumers are still at the last.
    """
    ext = instructions()
    memory, PRODUCERS, THREADS, PERSISTENT = memory_for(c), x.producers, x.threads, x.persistent
    find_task, consume = make_find_task(c), make_consume(x, parts, c)
    warps = 4 if c.cache in HALVES else 2 * PRODUCERS  # that write a tile
    produce = make_produce(PERSISTENT, c) if c.cache in HALVES else make_produce_codes(warps, c)
    registers = registers_of(PRODUCERS, c.width)
    give_away = getattr(ext, f"registers_dec_{registers.producer}")
    get_many = getattr(ext, f"registers_inc_{registers.consumer}")
    get_back, give_back = (getattr(ext, f"registers_{way}_{registers.all}") for way in ("inc", "dec"))
    # Each thread that writes arrives, and of each warp one that notes; of those that consume, one of each of 8 warps.
    MAKE = ((B.k_there, 33 * warps), (B.v_there, 32 * warps), (B.k_done, 8), (B.v_done, 8))

    @ti.func
    def attend_tasks(thread, block, blocks, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        lens = ti.static(arrays[3])
        visible, task, seen = find_task(block, lens, strides, params)
        shared = ti.u32(0)
        ext.shared_memory(shared)
        shared = (shared + ti.u32(1023)) & ti.u32(0xFFFFFC00)
        barriers = shared + ti.u32(memory.barriers)
        if thread == 0:
            for which, count in ti.static(MAKE):
                for stage in ti.static(range(memory.stages)):
                    at, arrivals = barriers + ti.u32(which + 8 * stage), ti.u32(count)
                    ext.barrier_make(at, arrivals)
            note, no = barriers + ti.u32(B.spoiled), ti.u32(0)
            ext.write_4(note, no)
        ti.simt.block.sync()
        warpgroup = ti.simt.warp.shfl_sync_i32(ti.u32(ALL), thread // GROUP, 0)  # the same for all lanes, also to LLVM
        all_have_theirs, threads, first_turn, both = ti.u32(5), ti.u32(THREADS), ti.u32(3), ti.u32(2 * GROUP)
        if warpgroup < PRODUCERS:
            give_away()
            if ti.static(PERSISTENT):
                ring = ti.Vector([0, 1])
                for j in range(count_tasks(block, blocks, params[P.tasks])):
                    visible, task, seen = find_task(number_of(j, block, blocks), lens, strides, params)
                    ring = produce(thread, ring, shared, barriers, seen, visible, task, arrays, strides, params)
            elif ti.static(c.cache in HALVES):
                produce(thread, [0, 1], shared, barriers, seen, visible, task, arrays, strides, params)
            else:
                produce(thread, shared, barriers, seen, visible, task, arrays, strides, params)
            ext.meet(all_have_theirs, threads)  # else this warpgroup could take back what the others still wait for
            get_back()
        else:
            get_many()
            ext.let_pass(all_have_theirs, threads)
            if ti.static(PERSISTENT):
                half = warpgroup - PRODUCERS
                if half == 1:
                    ext.let_pass(first_turn, both)
                ring = ti.Vector([0, 0])
                for j in range(count_tasks(block, blocks, params[P.tasks])):
                    visible, task, seen = find_task(number_of(j, block, blocks), lens, strides, params)
                    ring = consume(thread % GROUP, half, ring, shared, barriers, seen, visible, task, arrays, terms,
                                   strides, params, scalars)  # fmt: skip
                if half == 0:
                    ext.meet(first_turn, both)
            else:
                consume(thread - PRODUCERS * GROUP, warpgroup - PRODUCERS, [0, 0], shared, barriers, seen, visible,
                        task, arrays, terms, strides, params, scalars)  # fmt: skip
            give_back()
        ti.simt.block.sync()
        if thread == 0:
            for which, _ in ti.static(MAKE):
                for stage in ti.static(range(memory.stages)):
                    at = barriers + ti.u32(which + 8 * stage)
                    ext.barrier_end(at)
        ti.simt.block.sync()

    return attend_tasks
