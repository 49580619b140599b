"""The attention mass of keys on CPU, with the workers, tasks and loops of `cpu.attend`; a task has one KV head."""

import zlib
from typing import Any, NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.addresses import make_find_key, make_query_row, make_score_offset, make_slot_offsets
from tikv.kernels.attention.cpu import coded
from tikv.kernels.attention.cpu.attend import M, make_take_scores, make_worker_memory
from tikv.kernels.attention.cpu.loops import (
    CHUNK,
    ROW,
    make_key_loops,
    make_list_keys,
    make_note_key,
    make_row_loops,
    rows_per_band,
)
from tikv.kernels.attention.mass import make_joined, make_lse_of_row, make_mass_offset
from tikv.kernels.attention.parameters import BITS, FLOATS, PARAMS, SCALARS, STRIDES, P, S, X, array_types
from tikv.kernels.attention.softmax import is_masked
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.visible import make_query_bounds
from tikv.kernels.lanes import LEAST_ITERATIONS
from tikv.runtime import ti


def make_mass_cpu(workers, by_slot, greatest, c):
    """mass(q, k, lens, table, indices, k_scale, lse, mass, work, strides, params, scalars): `mass.make_mass` on CPU.

    The function is not cached, since its real functions belong to one Taichi program. `work` is as in
    `cpu.attend.make_attend_cpu`.
    """
    Q, K, LENS, TABLE, SC, _ = array_types("cpu", c)
    INDEX = index_array(c.index_bits)
    uid = zlib.crc32(repr(("mass", workers, by_slot, greatest, c)).encode()) >> 1
    rows = -(-c.rows // rows_per_band(c.rows)) * rows_per_band(c.rows)
    worker_memory, mass_task = make_worker_memory(rows, c), make_mass_task(rows, uid, by_slot, greatest, c)
    iterations = workers * LEAST_ITERATIONS if workers > 1 else 1
    every = LEAST_ITERATIONS if workers > 1 else 1

    @ti.kernel
    def mass_of_keys(q: Q, k: K, lens: LENS, table: TABLE, indices: INDEX, k_scale: SC, lse: BITS, mass: FLOATS,
                     work: FLOATS, strides: STRIDES, params: PARAMS, scalars: SCALARS):  # fmt: skip
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker = i // every
            tasks = 0
            if i % every == 0:
                tasks = (params[P.tasks] - worker + workers - 1) // workers
            memory = worker_memory(worker, params)
            for turn in range(tasks):
                number = turn * workers + worker
                if ti.static(c.index_bits > 0):
                    arrays = ti.static((q, k, lens, (table, indices), k_scale, lse, mass, work))
                    mass_task(number, memory, arrays, strides, params, scalars)
                else:
                    arrays = ti.static((q, k, lens, table, k_scale, lse, mass, work))
                    mass_task(number, memory, arrays, strides, params, scalars)

    return mass_of_keys


make_mass_cpu.fast_math = True


def make_mass_task(rows, uid, by_slot, greatest, c):
    """mass_task(number, memory, ...): computes a task, from its number to the mass of its keys.

    In place of V, a chunk's lists hold the keys' places in `mass`, and in place of V's scales their weights. The
    rows are those of a KV head, or of the query that chose the keys.
    """
    row_loops, decode_task, joined = make_row_loops(c), make_decode_task("cpu", CHUNK, c), make_joined(greatest)
    products = make_products(row_loops, rows, uid, c)
    list_chunk, add_block = make_list_chunk(uid, by_slot, c), make_add_block(row_loops, joined, uid, c)

    @ti.func
    def mass_task(number, memory, arrays: ti.template(), strides, params, scalars):
        q, k, lens, table, k_scale, lse, mass, work = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        t, first_row, last = 0, 0, params[P.queries] * c.group - 1
        if ti.static(c.index_bits > 0):
            t = task[T.row] // c.rows  # a query is a block of tasks
            first_row, last = t * c.group, (t + 1) * c.group - 1
        index = task[T.begin]
        while index < task[T.end]:
            n, index_behind = list_chunk(t, index, visible, task, memory, table, work, strides, params)
            index = index_behind
            if n > 0:
                row_loops.clear(work, memory[M.v_scales], ROW, uid)
                products.load_scales(n, task, memory, k_scale, work, strides)
                for block in range((last - first_row) // c.rows + 1):
                    block_row = first_row + block * c.rows
                    products.multiply(block_row, last, n, task, memory, q, k, work, strides, params)
                    add_block(block_row, n, visible, task, memory, lse, work, strides, params, scalars)
                for j in range(n):
                    at = ti.bit_cast(work[memory[M.v_list] + j], ti.i32)
                    mass[at] = joined(mass[at], work[memory[M.v_scales] + j])

    return mass_task


class Products(NamedTuple):
    """The products of rows of queries and a chunk's keys, which `multiply` writes where attention has its scores."""

    load_scales: Any  # (n, task, memory, k_scale, work, strides): the scales of a chunk's keys, once for all rows
    multiply: Any  # (first, last, n, task, memory, q, k, work, strides, params): with rows from `first` on


def make_products(row_loops, rows, uid, c):
    """The `Products` of one set of choices: for rows of numbers, for codes in groups, or read from memory."""
    bands, query_row, D = rows // rows_per_band(rows), make_query_row(c), c.width
    codes = coded.make_key_loops(c) if c.groups else None
    keys, take_scores = None if c.groups else make_key_loops(c), make_take_scores(uid, c)
    load_query = codes.load_query if c.groups else row_loops.load_query

    @ti.func
    def load_scales(n, task, memory, k_scale: ti.template(), work: ti.template(), strides):
        if ti.static(c.scale != ""):
            first = strides[S.k_scale_first] + task[T.scale_first]
            if ti.static(c.groups):
                codes.load_numbers(k_scale, work, memory[M.scale_list], first, n, memory[M.numbers], uid)
            else:
                keys.load_scales(k_scale, work, memory[M.scale_list], first, n, memory[M.k_scales], uid)

    @ti.func
    def multiply(first, last, n, task, memory, q: ti.template(), k: ti.template(), work: ti.template(), strides,
                 params):  # fmt: skip
        if ti.static(c.scored):
            task[T.row] = first
            take_scores(rows, n, task, memory, k, work, strides, params)
        else:
            for z in range(rows):
                r = ti.min(first + ti.min(z, c.rows - 1), last)
                at = query_row(task[T.sequence], task[T.head], r, strides, params)
                load_query(q, work, at, memory[M.queries] + z * D, uid)
            if ti.static(c.groups):
                codes.sum_queries(work, memory[M.queries], memory[M.query_sums], uid)
                codes.dots(k, work, memory[M.k_list], task[T.k_first], n, memory[M.numbers], memory[M.scales],
                           memory[M.queries], memory[M.query_sums], memory[M.scores], uid)  # fmt: skip
            else:
                keys.dots(k, work, memory[M.k_list], task[T.k_first], strides[S.k_head], n, CHUNK, 1,
                          bands, memory[M.queries], memory[M.scores], uid)  # fmt: skip

    return Products(load_scales, multiply)


def make_list_chunk(uid, by_slot, c):
    """list_chunk(t, begin, ...) -> (keys listed, the index after the last): `cpu.attend`'s, with places in `mass`."""
    find_key, (k_offset, _, scale_offset), score_offset = make_find_key(c), make_slot_offsets(c), make_score_offset(c)
    mass_offset, list_keys = make_mass_offset(by_slot, c), make_note_key() if c.index_bits else make_list_keys()

    @ti.func
    def list_chunk(t, begin, visible, task, memory, table: ti.template(), work: ti.template(), strides, params):
        at, n = begin, 0
        b, h = task[T.sequence], task[T.head]
        while at < task[T.end] and n < CHUNK:
            key = find_key(b, h, t, at, visible, table, strides, params)
            slot, count, index = key[0], ti.min(ti.min(key[1], task[T.end] - at), CHUNK - n), key[2]
            if slot >= 0:
                to = mass_offset(b, h, t, at, index, slot, visible, strides, params)
                k_first = k_offset(slot, strides)
                if ti.static(c.scored):
                    k_first = score_offset(slot, index, visible)
                list_keys(work, memory[M.k_list] + n, count, k_first, strides[S.k_token], uid)
                list_keys(work, memory[M.v_list] + n, count, to, 1, uid)
                if ti.static(c.scale != ""):
                    scale_first = scale_offset(slot, strides)
                    list_keys(work, memory[M.scale_list] + n, count, scale_first, strides[S.scale_token], uid)
                if ti.static(c.masked):
                    list_keys(work, memory[M.indices] + n, count, index, 1, uid)
                n += count
            at += count
        if n > 0:  # keys are read in pairs
            work[memory[M.k_list] + n] = work[memory[M.k_list] + n - 1]
        return n, at

    return list_chunk


def make_add_block(row_loops, joined, uid, c):
    """add_block(first, n, ...): joins the weights that the query rows from `first` give a chunk's keys to theirs."""
    query_bounds, lse_of_row = make_query_bounds(), make_lse_of_row(c)

    # It is made here, since a real function belongs to the program of the kernel that calls it, and ends with it.
    @ti.real_func
    def add_row(work: FLOATS, n: ti.i32, row: ti.i32, to: ti.i32, number: ti.i32):
        for j in range(n):
            weight = work[row + j]
            if ti.static(c.masked):
                weight = ti.select(is_masked(weight), ti.f32(0.0), weight)
            work[to + j] = joined(work[to + j], weight)

    @ti.func
    def add_block(first, n, visible, task, memory, lse: ti.template(), work: ti.template(), strides, params, scalars):
        for g in range(ti.min(c.rows, params[P.queries] * c.group - first)):
            sees, of_row = lse_of_row(task[T.kv_head], first + g, lse, strides, params, scalars)
            if sees > 0:
                scores = memory[M.scores] + g * ROW
                bounds = query_bounds((first + g) // c.group, visible, params)
                row_loops.logits(work, scores, n, scalars[X.logit_scale], scalars[X.softcap], memory[M.k_scales],
                                 memory[M.indices], bounds[0], bounds[1], bounds[2], bounds[3], 0.0, 0,
                                 0, uid)  # fmt: skip
                row_loops.weights(work, scores, n, of_row, uid)
                add_row(work, n, scores, memory[M.v_scales], uid)

    return add_block
