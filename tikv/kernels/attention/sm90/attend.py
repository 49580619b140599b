"""Attention of prompts by the warpgroups of compute capability 9.0: S = Q K^T and O += P V, both by `wgmma`.

A block has one warpgroup that produces, or two over codes, and two that consume. Those that produce write tiles of K
and V into shared memory, some of each ahead, and say by a barrier that one is there; a consumer says when it has done
with one. A consumer has 64 query rows. It starts the product that makes a tile's scores and the one that adds the
values of the tile before, and makes weights of the scores while the values are added; the two consumers take turns at
starting theirs, so that one computes weights while the other multiplies. Weights stay in registers: the sums of the
first product lie in the order in which the second takes its operand. As in `sm80.attend`, results are rescaled only
when a maximum grows.

Where the user allows it, products over codes of 8 bits take both operands in 8 bits: `sm90.eight` has what differs.

Which keys a tile has is told by index, as everywhere (`visible`). Rows of K and V lie in shared memory as `sm90.ir`
says; what no row of the task sees is zero there.

Under `Choices.invariant` a row has the same bits in any task, as `ops.attention.invariance` says of tensor cores:

- Tiles begin at multiples of their keys, by position. Both products compute each row by itself; so blocks of one
  consumer, for few rows, and of two give a row the same bits, single tokens included.
- Splits are merged with the same operations in the same order by a kernel of its own or, where tasks fill the device
  and memory has room, by the tasks, which then take all keys: see `consumer.make_close`. Over codes there is no room
  in tasks of two consumers: these compute several parts, one after another, and have the results of each merged later.
  A part knows nothing of those before. A tile that a row does not see changes no bit, so it does not matter with
  which tile a task begins.
"""

from tikv.kernels.attention.parameters import P, make_attend_kernel
from tikv.kernels.attention.sm80.instructions import HALVES
from tikv.kernels.attention.sm90 import ir
from tikv.kernels.attention.sm90.coded import make_produce_codes
from tikv.kernels.attention.sm90.consumer import make_consume
from tikv.kernels.attention.sm90.eight import make_produce_eight
from tikv.kernels.attention.sm90.producer import make_produce
from tikv.kernels.attention.sm90.tiles import BITCODE as BITCODE
from tikv.kernels.attention.sm90.tiles import (
    GROUP,
    KEYS_OF,
    B,
    R,
    computes_in_turn,
    instructions,
    make_range,
    memory_for,
    moves_of,
)
from tikv.kernels.attention.sm90.tiles import PIECE as PIECE
from tikv.kernels.attention.sm90.tiles import Warpgroups as Warpgroups
from tikv.kernels.attention.sm90.tiles import merges as merges
from tikv.kernels.attention.sm90.tiles import producers_of as producers_of
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.lanes import ALL
from tikv.runtime import ti

ROWS_OF_ONE = ir.ROWS  # query rows of a task with one consumer


def make_attend_hopper(tile, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, strides, params, scalars) on compute capability 9.0.

    K and V in words of 64 bits, of one of `HALVES`, and q of the same; rows in one piece that begin at multiples of
    `PIECE` bytes, those of q too. Or K and V are codes, as `sm90.coded` takes them, and q is of one of `HALVES`. The
    extent of q is tasks * `tile.threads`. Choices as in `cpu.attend.make_attend_cpu`, terms as in
    `spirv.attend.make_attend_block`.
    """
    attend_task, THREADS = make_attend_task(tile, parts, c), tile.threads

    @ti.func
    def attend_all(arrays: ti.template(), terms: ti.template(), strides: ti.template(), params: ti.template(),
                   scalars: ti.template()):  # fmt: skip
        ti.loop_config(block_dim=THREADS)
        for i in range(ti.static(arrays[0]).shape[0]):
            attend_task(i % THREADS, i // THREADS, arrays, terms, strides, params, scalars)

    return make_attend_kernel(attend_all, "cuda", c)


make_attend_hopper.fast_math = True
make_attend_hopper.uses_bitcode = True
make_attend_hopper.resident = lambda tile, parts, c: tile.resident
make_attend_hopper.shared_bytes = lambda tile, parts, c: memory_for(tile, parts, c).nbytes


def make_attend_hopper_in_order(tile, parts, c):
    """`make_attend_hopper` for `Choices.invariant`: no compiler reorders its sums or fuses them with products.

    A task has the rows of one consumer or two. If there is room, it merges its parts itself, of `P.least_share` keys
    each, see `consumer.make_close`. Else its parts have `P.split_keys` keys each; over codes it has several of them, of
    `P.least_share` keys together.
    """
    return make_attend_hopper(tile, parts, c)


make_attend_hopper_in_order.uses_bitcode = True
make_attend_hopper_in_order.resident = make_attend_hopper.resident
make_attend_hopper_in_order.shared_bytes = make_attend_hopper.shared_bytes


def make_attend_task(x, parts, c):
    """attend_task(thread, number, ...): a thread's share of a task; all threads of a block call it."""
    ext = instructions()
    keys, memory = KEYS_OF[c.width], memory_for(x, parts, c)
    decode_task, find_range = make_decode_task("cuda", keys, c), make_range(c, x.rows)
    PRODUCERS, THREADS, consume = x.producers, x.threads, make_consume(x, parts, c)
    IN_TURN = computes_in_turn(parts, c)
    warps = 4 if c.cache in HALVES else 2 * PRODUCERS  # that write a tile
    produce = make_produce(memory, c) if c.cache in HALVES else make_produce_codes(warps, memory, parts, c)
    if c.eight:
        produce = make_produce_eight(warps, produce, memory, c)
    moves = moves_of(PRODUCERS, x.consumers)
    MOVES, (give_away, get_back, get_many, give_back) = moves is not None, moves or [None] * 4
    # Each thread that writes arrives, and of each warp one that notes; of those that consume, one of each warp.
    MAKE = ((B.k_there, 33 * warps), (B.v_there, 32 * warps), (B.k_done, 4 * x.consumers), (B.v_done, 4 * x.consumers))

    @ti.func
    def find_part(number, before, lens: ti.template(), strides, params):
        """The keys that a part's head has, the part as a task, and the range of its tiles after those `before`."""
        visible, task = decode_task(number, lens, strides, params)
        seen = find_range(task[T.row], visible, task, params)
        seen[R.before] = before
        return visible, task, seen

    @ti.func
    def attend_task(thread, number, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        lens = ti.static(arrays[3])
        in_turn = 1  # parts of a task
        if ti.static(IN_TURN):
            in_turn = ti.max(params[P.least_share] // params[P.split_keys], 1)
        shares = (params[P.splits] + in_turn - 1) // in_turn
        share, others = number % shares, number // shares
        # Of a KV head's rows the last come first: those of a prompt see most, and what comes last shall take least.
        block = params[P.row_blocks] - 1 - others % params[P.row_blocks]
        others = others // params[P.row_blocks] * params[P.row_blocks] + block
        part = others * params[P.splits] + share * in_turn
        last = ti.min(part + in_turn, (others + 1) * params[P.splits]) - 1
        visible, task, seen = find_part(part, 0, lens, strides, params)
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
        all_have_theirs, threads = ti.u32(5), ti.u32(THREADS)
        if warpgroup < PRODUCERS:
            if ti.static(MOVES):
                give_away()
            if ti.static(IN_TURN):
                while part <= last:
                    produce(thread, shared, barriers, seen, visible, task, arrays, strides, params)
                    part += 1
                    if part <= last:
                        before = seen[R.before] + seen[R.tiles]
                        visible, task, seen = find_part(part, before, lens, strides, params)
            else:
                produce(thread, shared, barriers, seen, visible, task, arrays, strides, params)
            if ti.static(MOVES):
                ext.meet(all_have_theirs, threads)  # else this warpgroup could take back what the others still wait for
                get_back()
        else:
            if ti.static(MOVES):
                get_many()
                ext.let_pass(all_have_theirs, threads)
            if ti.static(IN_TURN):
                while part <= last:
                    consume(thread - PRODUCERS * GROUP, warpgroup - PRODUCERS, shared, barriers, seen, visible, task,
                            arrays, terms, strides, params, scalars)  # fmt: skip
                    part += 1
                    if part <= last:
                        before = seen[R.before] + seen[R.tiles]
                        visible, task, seen = find_part(part, before, lens, strides, params)
            else:
                consume(thread - PRODUCERS * GROUP, warpgroup - PRODUCERS, shared, barriers, seen, visible, task,
                        arrays, terms, strides, params, scalars)  # fmt: skip
            if ti.static(MOVES):
                give_back()
        ti.simt.block.sync()
        if thread == 0:
            for which, _ in ti.static(MAKE):
                for stage in ti.static(range(memory.stages)):
                    at = barriers + ti.u32(which + 8 * stage)
                    ext.barrier_end(at)
        ti.simt.block.sync()

    return attend_task
