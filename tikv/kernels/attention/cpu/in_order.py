"""Attention on CPU whose rows have the same bits whatever else a call computes: one kernel for prompts and tokens.

As for prompts, the keys of a chunk, then its values, are first converted to floats, so the loops do not depend on the
format. A chunk is `CHUNK` positions from a multiple of `CHUNK`; a key that a row does not see, or that does not exist,
keeps its place with weight 0. So the terms of each sum have the same places whichever keys other rows see, and a band
has the same number of rows whatever the number of queries.
"""

from typing import Any, NamedTuple

from tikv.kernels.attention.addresses import make_find_key, make_score_offset, make_slot_offsets
from tikv.kernels.attention.cpu.loops import CHUNK, ROW, band_of, before, make_key_loops, make_note_key
from tikv.kernels.attention.cpu.numbers import make_numbers
from tikv.kernels.attention.parameters import FLOATS, HIDDEN, P, S
from tikv.kernels.attention.softmax import is_finite, is_masked
from tikv.kernels.attention.task import T
from tikv.runtime import ti


class RowFunctions(NamedTuple):
    """Functions that `cpu.attend` makes: they decode a task, start and store its rows, compute weights and prefetch."""

    decode_task: Any
    start_rows: Any
    store_rows: Any
    softmax: Any
    ahead_k: Any
    ahead_v: Any
    take_scores: Any


def make_attend_invariant(uid, floats, functions, memory_of, c):
    """`cpu.attend.make_attend_task` under `Choices.invariant`.

    `floats` counts a chunk's converted numbers, which lie at the end of a worker's memory; `memory_of` names the other
    places in it. If heads lie side by side, a task has several; their rows are loaded together and computed one by one.
    """
    decode_task, start_rows, store_rows, softmax, ahead_k, ahead_v, take_scores = functions
    M, cv, B = memory_of, c.of_values, band_of(c)
    plain = c._replace(cache="f32", bits=32, scale="", k_inner=(0, 0), v_inner=(0, 0), values=None)
    k_numbers, v_numbers = make_numbers(c, c.width, c.k_inner), make_numbers(cv, c.width_v, c.v_inner)
    keys, settle = make_key_loops(plain), make_settle(c.width_v)
    list_tile = make_list_tile(keys.list_keys, uid, M, c._replace(scale=c.scale or cv.scale))

    @ti.func
    def list_numbers(n, width, to, memory, work: ti.template()):
        """List the addresses of the converted rows in place of K's scales, which are already multiplied in."""
        keys.list_keys(work, memory[M.k_scales], n, to, width, uid)
        work[memory[M.k_scales] + n] = work[memory[M.k_scales] + n - 1]

    @ti.func
    def multiply_keys(n, heads, bands, to, task, memory, k: ti.template(), k_scale: ti.template(), work: ti.template(),
                      strides, params):  # fmt: skip
        if ti.static(c.scored):
            take_scores(bands * B, n, task, memory, k, work, strides, params)
        else:
            list_numbers(n, c.width, to, memory, work)
            ahead_k(k, memory[M.k_list], task[T.k_first], heads, n, memory[M.v_scales], work, strides, params)
            for h in range(heads):
                scale_first = task[T.scale_first] + h * strides[S.scale_head] + strides[S.k_scale_first]
                k_numbers(k, k_scale, work, memory[M.k_list], memory[M.scale_list],
                          task[T.k_first] + h * strides[S.k_head], scale_first, n, to, uid)  # fmt: skip
                keys.dots(work, work, memory[M.k_scales], 0, 0, n, CHUNK, 1, bands,
                          memory[M.queries] + h * bands * B * c.width, memory[M.scores] + h * bands * B * ROW,
                          uid)  # fmt: skip

    @ti.func
    def attend_task(number, memory, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse, work = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        to = memory[M.k_list] + params[P.work_floats] - floats
        heads = ti.min(params[P.heads_per_task], params[P.heads] - task[T.head])
        bands = (ti.min(c.rows, params[P.queries] * c.group - task[T.row]) + B - 1) // B
        rows = bands * B
        start_rows(heads, rows, task, memory, q, work, terms, strides, params)
        for tile in range((task[T.end] - task[T.begin] + CHUNK - 1) // CHUNK):
            n, present = list_tile(task[T.begin] + tile * CHUNK, visible, task, memory, table, work, strides, params)
            if present > 0:
                multiply_keys(n, heads, bands, to, task, memory, k, k_scale, work, strides, params)
                masked = softmax(heads, rows, CHUNK, visible, task, memory, k_scale, v_scale, work, terms, strides,
                                 params, scalars)  # fmt: skip
                list_numbers(n, c.width_v, to, memory, work)
                ahead_v(v, memory[M.v_list], task[T.v_first], heads, n, memory[M.v_scales], work, strides, params)
                for h in range(heads):
                    scale_first = task[T.scale_first] + h * strides[S.scale_head] + strides[S.v_scale_first]
                    weights, acc = memory[M.scores] + h * rows * ROW, memory[M.acc] + h * rows * c.width_v
                    v_numbers(v, v_scale, work, memory[M.v_list], memory[M.scale_list],
                              task[T.v_first] + h * strides[S.v_head], scale_first, n, to, uid)  # fmt: skip
                    if masked > 0:
                        settle(work, to, n, weights, rows, acc, uid)
                    keys.add_values(work, work, memory[M.k_scales], 0, 0, n, CHUNK, 1, bands, weights, acc, uid)
        store_rows(heads, rows, task, memory, out, lse, work, strides, params, scalars)

    return attend_task


def make_list_tile(list_keys, uid, memory_of, c):
    """list_tile(begin, ...) -> (positions, keys): lists the keys at a chunk's positions, in order.

    A position without a key gets the address of the first row, and an index that no query sees.
    """
    M, find_key, (k_offset, v_offset, scale_offset) = memory_of, make_find_key(c), make_slot_offsets(c)
    score_offset = make_score_offset(c)
    note = make_note_key() if c.index_bits else list_keys

    @ti.func
    def list_tile(begin, visible, task, memory, table: ti.template(), work: ti.template(), strides, params):
        list_keys(work, memory[M.indices], CHUNK, HIDDEN, 0, uid)
        n, keys, positions = 0, 0, ti.min(CHUNK, task[T.end] - begin)
        while n < positions:
            key = find_key(task[T.sequence], task[T.head], task[T.row] // c.group, begin + n, visible, table, strides,
                           params)  # fmt: skip
            slot, count = key[0], ti.min(key[1], positions - n)
            if slot >= 0:
                k_first = k_offset(slot, strides)
                if ti.static(c.scored):
                    k_first = score_offset(slot, key[2], visible)
                note(work, memory[M.k_list] + n, count, k_first, strides[S.k_token], uid)
                note(work, memory[M.v_list] + n, count, v_offset(slot, strides), strides[S.v_token], uid)
                if ti.static(c.scale != ""):
                    scale_first = scale_offset(slot, strides)
                    note(work, memory[M.scale_list] + n, count, scale_first, strides[S.scale_token], uid)
                note(work, memory[M.indices] + n, count, key[2], 1, uid)
                keys += count
            else:
                note(work, memory[M.k_list] + n, count, 0, 0, uid)
                note(work, memory[M.v_list] + n, count, 0, 0, uid)
                if ti.static(c.scale != ""):
                    note(work, memory[M.scale_list] + n, count, 0, 0, uid)
            n += count
        return positions, keys

    return list_tile


def make_settle(width):
    """settle(...): replaces masked weights and values that are not finite by 0, so every place stays in the sums.

    A masked weight of 0 times a value that is not finite would be NaN. So such values are added here, to the rows that
    see them, before they become 0. The order does not matter: such a sum never becomes finite again.
    """

    @ti.real_func
    def settle(work: FLOATS, values: ti.i32, n: ti.i32, weights: ti.i32, rows: ti.i32, acc: ti.i32, number: ti.i32):
        begin, infinite = before(values, CHUNK * width), 0
        for x in range(n * width):
            infinite += ti.select(is_finite(work[begin + x]), 0, 1)
        for z in range(ti.select(infinite > 0, rows * n, 0)):
            p, to = work[weights + z // n * ROW + z % n], before(acc + z // n * width, width)
            row = before(values + z % n * width, width)
            for d in range(ti.select(is_masked(p), 0, width)):
                x = work[row + d]
                work[to + d] = work[to + d] + ti.select(is_finite(x), ti.f32(0.0), p * x)
        for x in range(ti.select(infinite > 0, n * width, 0)):
            work[begin + x] = ti.select(is_finite(work[begin + x]), work[begin + x], ti.f32(0.0))
        first = before(weights, ROW)
        for x in range(rows * ROW):
            work[first + x] = ti.select(is_masked(work[first + x]), ti.f32(0.0), work[first + x])

    return settle
