"""Decode attention on CPU: each worker thread walks over its tasks, `CHUNK` keys at a time, with its own memory.

Taichi gives a CPU thread at least 512 iterations, so the loop has that many for each worker, and one of them does the
work. `cpu.loops` has the loops over keys and widths. A worker first lists the addresses of a chunk's keys, so the same
loops read pages, rings and contiguous keys.
"""

import zlib
from typing import NamedTuple

from tikv.formats import GROUP_FORMATS
from tikv.kernels.address import index_array
from tikv.kernels.attention.addresses import (
    make_find_key,
    make_output_offsets,
    make_query_row,
    make_score_offset,
    make_slot_offsets,
)
from tikv.kernels.attention.cpu import coded
from tikv.kernels.attention.cpu.in_order import RowFunctions, make_attend_invariant
from tikv.kernels.attention.cpu.loops import (
    CHUNK,
    LINE_BYTES,
    ROW,
    band_of,
    before,
    make_key_loops,
    make_list_keys,
    make_note_key,
    make_prefetch,
    make_row_loops,
    rows_per_band,
)
from tikv.kernels.attention.cpu.numbers import make_numbers
from tikv.kernels.attention.parameters import (
    BITS,
    FLOATS,
    LOG2E,
    PARAMS,
    SCALARS,
    STRIDES,
    TERMS,
    N,
    P,
    S,
    X,
    array_types,
)
from tikv.kernels.attention.softmax import exp2, is_masked, make_inverse, make_store_lse
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.terms import make_origin, make_slope_of, make_start_state
from tikv.kernels.attention.tree import make_depth_of
from tikv.kernels.attention.visible import V, first_position, make_query_bounds, make_rows_range
from tikv.kernels.lanes import LEAST_ITERATIONS
from tikv.runtime import ti

LISTS = 7  # rows of numbers about a chunk's keys that a worker has beside its heads' state
PREFETCH_TOKENS, PREFETCH_PAGES = 1, 2  # the heads of a token, or of a page, are prefetched together; 0: no prefetch
LINE = LINE_BYTES // 4  # floats of a cache line
NUMBER_ROWS = 64  # query rows of a prompt's task, which share keys and values that are first converted to floats
MAX_FLOATS = 12288  # of the state of the heads that a task reads together: a core's caches keep so many beside the keys


def padded_rows(rows):
    """The number of rows, rounded up to whole bands."""
    return -(-rows // rows_per_band(rows)) * rows_per_band(rows)


def head_floats(rows, width, width_v):
    """Floats of a worker's memory for a KV head: queries, accumulators, scores, maxima and sums of its rows."""
    return padded_rows(rows) * (width + width_v + ROW + 2)


def work_floats(rows, width, width_v, heads, codes=False):
    """Floats of a worker's memory, in whole cache lines; `codes` adds room for a chunk of a head's codes."""
    floats = heads * head_floats(rows, width, width_v)
    if codes:
        floats += sum(coded.work_floats(padded_rows(rows), width, width_v))
    return -(-floats // LINE) * LINE + LISTS * ROW


def heads_per_task(rows, width, width_v, heads):
    """How many KV heads a task reads together if the heads of a token, or of a page, lie side by side in memory."""
    most = max(1, min(heads, MAX_FLOATS // head_floats(rows, width, width_v)))
    return -(-heads // -(-heads // most))


def number_floats(width, width_v):
    """Additional floats of a worker that first converts a chunk of K, or of V, to floats."""
    return CHUNK * max(width, width_v)


class WorkerMemory(NamedTuple):
    """Where a worker's lists of a chunk's keys, of `ROW` floats each, and the state of its heads' rows begin."""

    k_list: int = 0  # addresses of their K
    v_list: int = 1
    scale_list: int = 2
    indices: int = 3
    k_scales: int = 4
    v_scales: int = 5
    tree_indices: int = 6  # the indices that they have for a query of a tree
    queries: int = 7
    acc: int = 8
    scores: int = 9
    maxima: int = 10
    sums: int = 11
    scales: int = 12  # with codes: the scales of two keys, one for each unit; a row's weights times the values' scales
    numbers: int = 13  # the stored scales and biases of a chunk's keys
    query_sums: int = 14  # sums of queries over groups


M = WorkerMemory()


def make_worker_memory(rows, c):
    """worker_memory(worker, params) -> the vector `WorkerMemory`."""
    of_codes = coded.work_floats(rows, c.width, c.width_v)

    @ti.func
    def worker_memory(worker, params):
        heads = params[P.heads_per_task]
        lists = params[P.work_first] + worker * params[P.work_floats]
        queries = lists + LISTS * ROW
        acc = queries + heads * rows * c.width
        scores = acc + heads * rows * c.width_v
        maxima = scores + heads * rows * ROW
        sums = maxima + heads * rows
        scales = sums + heads * rows
        return ti.Vector([lists, lists + ROW, lists + 2 * ROW, lists + 3 * ROW, lists + 4 * ROW, lists + 5 * ROW,
                          lists + 6 * ROW, queries, acc, scores, maxima, sums, scales,
                          scales + of_codes[0], scales + of_codes[0] + of_codes[1]])  # fmt: skip

    return worker_memory


def make_attend_cpu(workers, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, work, strides, params, scalars) on CPU.

    The function is not cached, since its real functions belong to one Taichi program.

    Args:
        workers: threads; 1 runs in the calling thread.
        parts: whether out and lse receive the parts of splits, row by row and split by split, or the result.
        c: the other `Choices`.

    `work` holds `work_floats` floats for each worker. Terms are as in `spirv.attend.make_attend_block`.
    """
    Q, K, LENS, TABLE, KSC, OUT = array_types("cpu", c)
    _, V, _, _, VSC, _ = array_types("cpu", c.of_values)
    INDEX = index_array(c.index_bits)
    uid = zlib.crc32(repr((workers, parts, c)).encode()) >> 1
    rows = -(-c.rows // band_of(c)) * band_of(c)
    worker_memory, attend_task = make_worker_memory(rows, c), make_attend_task(rows, uid, parts, c)
    iterations = workers * LEAST_ITERATIONS if workers > 1 else 1
    every = LEAST_ITERATIONS if workers > 1 else 1

    @ti.func
    def attend_all(arrays: ti.template(), terms: ti.template(), strides: ti.template(), params: ti.template(),
                   scalars: ti.template()):  # fmt: skip
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker = i // every
            tasks = 0
            if i % every == 0:
                tasks = (params[P.tasks] - worker + workers - 1) // workers
            memory = worker_memory(worker, params)
            for turn in range(tasks):
                attend_task(turn * workers + worker, memory, arrays, terms, strides, params, scalars)

    @ti.kernel
    def attend(q: Q, k: K, v: V, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
               work: FLOATS, strides: STRIDES, params: PARAMS, scalars: SCALARS):  # fmt: skip
        attend_all((q, k, v, lens, table, k_scale, v_scale, out, lse, work), (), strides, params, scalars)

    @ti.kernel
    def attend_with_terms(q: Q, k: K, v: V, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
                          work: FLOATS, sink_logits: FLOATS, slopes: FLOATS, tree: BITS, indices: INDEX,
                          strides: STRIDES, params: PARAMS, scalars: SCALARS, numbers: TERMS):  # fmt: skip
        terms = ti.static((sink_logits, slopes, tree, numbers))
        if ti.static(c.index_bits > 0):
            arrays = ti.static((q, k, v, lens, (table, indices), k_scale, v_scale, out, lse, work))
            attend_all(arrays, terms, strides, params, scalars)
        else:
            attend_all((q, k, v, lens, table, k_scale, v_scale, out, lse, work), terms, strides, params, scalars)

    return attend_with_terms if c.terms else attend


make_attend_cpu.fast_math = True


def make_attend_task(rows, uid, parts, c):
    """attend_task(number, memory, ...): computes a task, from its number to its rows of the result."""
    if c.invariant:
        plain = c._replace(cache="f32", bits=32, scale="", values=None)
        row_loops, floats = make_row_loops(plain), number_floats(c.width, c.width_v)
        ahead = [
            make_ahead(of, uid, head, w) for of, head, w in ((c, S.k_head, c.width), (c.of_values, S.v_head, c.width_v))
        ]
        functions = RowFunctions(
            make_decode_visible_task(c), make_start_rows(row_loops, uid, c), make_store_rows(row_loops, uid, parts, c),
            make_softmax(None, row_loops, uid, plain), *ahead, make_take_scores(uid, c),
        )  # fmt: skip
        return make_attend_invariant(uid, floats, functions, M, c)
    codes = c.groups if c.values is None else c.of_values.groups and c.cache not in GROUP_FORMATS and c.scale == ""
    if c.rows < NUMBER_ROWS and codes:
        return make_attend_codes(rows, uid, parts, c)
    if c.values is not None or c.rows >= NUMBER_ROWS:
        return make_attend_numbers(uid, parts, c)
    keys, decode_task = make_key_loops(c), make_decode_visible_task(c)
    row_loops = make_row_loops(c)
    start_rows, store_rows = make_start_rows(row_loops, uid, c), make_store_rows(row_loops, uid, parts, c)
    list_chunk = make_list_chunk(keys.list_keys, uid, c)
    prefetch_k = make_prefetch_heads(keys.prefetch, uid, S.k_head, c.width)
    prefetch_v = make_prefetch_heads(keys.prefetch, uid, S.v_head, c.width_v)
    softmax, bands = make_softmax(keys.load_scales, row_loops, uid, c), rows // rows_per_band(rows)

    @ti.func
    def attend_task(number, memory, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse, work = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        heads = ti.min(params[P.heads_per_task], params[P.heads] - task[T.head])
        start_rows(heads, rows, task, memory, q, work, terms, strides, params)
        index = task[T.begin]
        while index < task[T.end]:
            n, index_behind = list_chunk(index, visible, task, memory, table, work, strides, params)
            index = index_behind
            if n > 0:
                prefetch_k(k, memory[M.k_list], task[T.k_first], heads, n, memory[M.scores], work, strides, params)
                keys.dots(k, work, memory[M.k_list], task[T.k_first], strides[S.k_head], n, params[P.keys_per_pass],
                          heads, bands, memory[M.queries], memory[M.scores], uid)  # fmt: skip
                masked = softmax(heads, rows, n, visible, task, memory, k_scale, v_scale, work, terms, strides, params,
                                 scalars)  # fmt: skip
                prefetch_v(v, memory[M.v_list], task[T.v_first], heads, n, memory[M.k_scales], work, strides, params)
                if masked == 0:
                    keys.add_values(v, work, memory[M.v_list], task[T.v_first], strides[S.v_head], n,
                                    params[P.keys_per_pass], heads, bands, memory[M.scores], memory[M.acc],
                                    uid)  # fmt: skip
                elif ti.static(c.masked):
                    keys.add_visible_values(v, work, memory[M.v_list], task[T.v_first], strides[S.v_head], n, heads,
                                            bands, memory[M.scores], memory[M.acc], uid)  # fmt: skip
        store_rows(heads, rows, task, memory, out, lse, work, strides, params, scalars)

    return attend_task


def make_attend_codes(rows, uid, parts, c):
    """`make_attend_task` for values in a format with groups, and keys in such a format or as plain elements."""
    values, row_loops, bands = coded.make_value_loops(c.of_values), make_row_loops(c), rows // rows_per_band(c.rows)
    keys, row_loops = make_key_loops(c) if c.values else None, row_loops._replace(store=values.store)
    codes = None if c.values else coded.make_key_loops(c)
    if codes is not None:
        row_loops = row_loops._replace(load_query=codes.load_query)
    decode_task, list_chunk = make_decode_visible_task(c), make_list_chunk(make_list_keys(), uid, c.of_values)
    start_rows, store_rows = make_start_rows(row_loops, uid, c), make_store_rows(row_loops, uid, parts, c)
    softmax, take_scores = make_softmax(None, row_loops, uid, c), make_take_scores(uid, c)

    @ti.func
    def multiply_keys(n, task, memory, k: ti.template(), k_scale: ti.template(), work: ti.template(), strides,
                      params):  # fmt: skip
        scales, numbers = memory[M.scales], memory[M.numbers]
        if ti.static(c.scored):
            take_scores(rows, n, task, memory, k, work, strides, params)
        elif ti.static(c.groups):
            codes.load_numbers(k_scale, work, memory[M.scale_list], task[T.scale_first] + strides[S.k_scale_first], n,
                               numbers, uid)  # fmt: skip
            codes.dots(k, work, memory[M.k_list], task[T.k_first], n, numbers, scales, memory[M.queries],
                       memory[M.query_sums], memory[M.scores], uid)  # fmt: skip
        else:
            keys.dots(k, work, memory[M.k_list], task[T.k_first], 0, n, CHUNK, 1, bands, memory[M.queries],
                      memory[M.scores], uid)  # fmt: skip

    @ti.func
    def attend_task(number, memory, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse, work = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        start_rows(1, rows, task, memory, q, work, terms, strides, params)
        if ti.static(c.groups):
            codes.sum_queries(work, memory[M.queries], memory[M.query_sums], uid)
        scales, numbers = memory[M.scales], memory[M.numbers]
        index = task[T.begin]
        while index < task[T.end]:
            n, index_behind = list_chunk(index, visible, task, memory, table, work, strides, params)
            index = index_behind
            if n > 0:
                multiply_keys(n, task, memory, k, k_scale, work, strides, params)
                masked = softmax(1, rows, n, visible, task, memory, k_scale, v_scale, work, terms, strides, params,
                                 scalars)  # fmt: skip
                values.load_numbers(v_scale, work, memory[M.scale_list], task[T.scale_first] + strides[S.v_scale_first],
                                    n, numbers, uid)  # fmt: skip
                if masked == 0:
                    values.add_values(v, work, memory[M.v_list], task[T.v_first], n, numbers, scales,
                                      memory[M.scores], memory[M.acc], uid)  # fmt: skip
                elif ti.static(c.masked):
                    values.add_visible_values(v, work, memory[M.v_list], task[T.v_first], n, numbers, scales,
                                              memory[M.scores], memory[M.acc], uid)  # fmt: skip
        store_rows(1, rows, task, memory, out, lse, work, strides, params, scalars)

    return attend_task


def make_attend_numbers(uid, parts, c):
    """`make_attend_task` for prompts, or for K and V in two formats: a chunk is first converted to floats.

    The loops over floats serve all formats, and many rows share the cost of the conversion.
    """
    cv, plain = c.of_values, c._replace(cache="f32", bits=32, scale="", k_inner=(0, 0), v_inner=(0, 0), values=None)
    k_numbers, v_numbers = make_numbers(c, c.width, c.k_inner), make_numbers(cv, c.width_v, c.v_inner)
    keys, row_loops, floats = make_key_loops(plain), make_row_loops(plain), number_floats(c.width, c.width_v)
    decode_task, B = make_decode_visible_task(c), rows_per_band(c.rows)
    list_chunk = make_list_chunk(keys.list_keys, uid, c._replace(scale=c.scale or cv.scale))
    start_rows, store_rows = make_start_rows(row_loops, uid, c), make_store_rows(row_loops, uid, parts, c)
    softmax, take_scores = make_softmax(None, row_loops, uid, plain), make_take_scores(uid, c)

    @ti.func
    def list_numbers(n, width, to, memory, work: ti.template()):
        """List the addresses of the converted rows in place of K's scales, which are already multiplied in."""
        keys.list_keys(work, memory[M.k_scales], n, to, width, uid)
        work[memory[M.k_scales] + n] = work[memory[M.k_scales] + n - 1]

    @ti.func
    def attend_task(number, memory, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse, work = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        to = memory[M.k_list] + params[P.work_floats] - floats  # at the end of the worker's memory
        bands = (ti.min(c.rows, params[P.queries] * c.group - task[T.row]) + B - 1) // B
        start_rows(1, bands * B, task, memory, q, work, terms, strides, params)
        index = task[T.begin]
        while index < task[T.end]:
            n, index_behind = list_chunk(index, visible, task, memory, table, work, strides, params)
            index = index_behind
            if n > 0:
                scale_first = task[T.scale_first] + strides[S.k_scale_first]
                if ti.static(c.scored):
                    take_scores(bands * B, n, task, memory, k, work, strides, params)
                else:
                    k_numbers(k, k_scale, work, memory[M.k_list], memory[M.scale_list], task[T.k_first], scale_first, n,
                              to, uid)  # fmt: skip
                    list_numbers(n, c.width, to, memory, work)
                    keys.dots(work, work, memory[M.k_scales], 0, 0, n, CHUNK, 1, bands, memory[M.queries],
                              memory[M.scores], uid)  # fmt: skip
                masked = softmax(1, bands * B, n, visible, task, memory, k_scale, v_scale, work, terms, strides, params,
                                 scalars)  # fmt: skip
                scale_first = task[T.scale_first] + strides[S.v_scale_first]
                v_numbers(v, v_scale, work, memory[M.v_list], memory[M.scale_list], task[T.v_first], scale_first, n, to,
                          uid)  # fmt: skip
                list_numbers(n, c.width_v, to, memory, work)
                if masked == 0:
                    keys.add_values(work, work, memory[M.k_scales], 0, 0, n, CHUNK, 1, bands, memory[M.scores],
                                    memory[M.acc], uid)  # fmt: skip
                elif ti.static(c.masked):
                    keys.add_visible_values(work, work, memory[M.k_scales], 0, 0, n, 1, bands, memory[M.scores],
                                            memory[M.acc], uid)  # fmt: skip
        store_rows(1, bands * B, task, memory, out, lse, work, strides, params, scalars)

    return attend_task


def make_take_scores(uid, c):
    """take_scores(rows, n, task, ...): reads the products of a task's rows and the listed keys, which K holds."""

    @ti.real_func
    def take(k: FLOATS, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):
        begin, end = ti.bit_cast(work[lists], ti.i32), ti.bit_cast(work[lists + n - 1], ti.i32)
        together = 0
        if ti.static(c.kind != "table" and not c.index_bits):
            together = ti.select(end - begin == n - 1, ti.min(n, CHUNK), 0)
        at, behind = before(begin + first, CHUNK), before(to, ROW)
        for j in range(together):
            work[behind + j] = k[at + j]
        for j in range(together, n):
            work[behind + j] = k[ti.bit_cast(work[lists + j], ti.i32) + first]

    @ti.func
    def take_scores(rows, n, task, memory, k: ti.template(), work: ti.template(), strides, params):
        for g in range(rows):
            r = ti.min(task[T.row] + ti.min(g, c.rows - 1), params[P.queries] * c.group - 1)
            take(k, work, memory[M.k_list], task[T.k_first] + r * strides[S.k_block], n, memory[M.scores] + g * ROW,
                 uid)  # fmt: skip

    return take_scores


def make_decode_visible_task(c):
    """decode_task(number, ...): `make_decode_task`, without the keys that no row of the task sees."""
    decode_task, rows_range = make_decode_task("cpu", CHUNK, c), make_rows_range(c)

    @ti.func
    def decode_visible_task(number, lens: ti.template(), strides, params):
        visible, task = decode_task(number, lens, strides, params)
        if ti.static(c.index_bits == 0):
            seen = rows_range(task[T.row], visible, params)
            if ti.static(c.invariant):  # counted by position, from the beginning of a chunk
                ahead = first_position(visible) - visible[V.sinks]
                seen[0] = ti.select(seen[0] > 0, (seen[0] + ahead) // CHUNK * CHUNK, 0)
                seen[1] = seen[1] + ti.select(seen[1] > visible[V.sinks], ahead, 0)
            task[T.begin] = ti.max(task[T.begin], seen[0])
            task[T.end] = ti.min(task[T.end], seen[1])
        return visible, task

    return decode_visible_task


def make_start_rows(row_loops, uid, c):
    """start_rows(heads, rows, task, ...): loads a task's queries; sums start at 0, or with a sink logit."""
    query_row, start_state, D = make_query_row(c), make_start_state(c), c.width

    @ti.func
    def start_rows(heads, rows, task, memory, q: ti.template(), work: ti.template(), terms: ti.template(), strides,
                   params):  # fmt: skip
        for z in range(heads * rows):
            r = ti.min(task[T.row] + ti.min(z % rows, c.rows - 1), params[P.queries] * c.group - 1)
            at = query_row(task[T.sequence], task[T.head] + z // rows, r, strides, params)
            row_loops.load_query(q, work, at, memory[M.queries] + z * D, uid)
            m, l = start_state(task[T.head] + z // rows, r, task[T.split], terms)
            work[memory[M.maxima] + z] = m
            work[memory[M.sums] + z] = l
        row_loops.clear(work, memory[M.acc], heads * rows * c.width_v, uid)

    return start_rows


def make_list_chunk(list_keys, uid, c):
    """list_chunk(begin, ...) -> (keys listed, the index after the last): lists the next keys, at most a chunk."""
    find_key, (k_offset, v_offset, scale_offset) = make_find_key(c), make_slot_offsets(c)
    score_offset = make_score_offset(c)
    if c.index_bits:  # one key at a time
        list_keys = make_note_key()

    @ti.func
    def list_chunk(begin, visible, task, memory, table: ti.template(), work: ti.template(), strides, params):
        at, n = begin, 0
        while at < task[T.end] and n < CHUNK:
            key = find_key(task[T.sequence], task[T.head], task[T.row] // c.group, at, visible, table, strides,
                           params)  # fmt: skip
            slot, count, index = key[0], ti.min(ti.min(key[1], task[T.end] - at), CHUNK - n), key[2]
            if slot >= 0:
                k_first, v_first = k_offset(slot, strides), v_offset(slot, strides)
                if ti.static(c.scored):
                    k_first = score_offset(slot, index, visible)
                list_keys(work, memory[M.k_list] + n, count, k_first, strides[S.k_token], uid)
                list_keys(work, memory[M.v_list] + n, count, v_first, strides[S.v_token], uid)
                if ti.static(c.scale != ""):
                    scale_first = scale_offset(slot, strides)
                    list_keys(work, memory[M.scale_list] + n, count, scale_first, strides[S.scale_token], uid)
                if ti.static(c.masked or c.alibi):
                    list_keys(work, memory[M.indices] + n, count, index, 1, uid)
                n += count
            at += count
        if n > 0:  # keys are read in pairs
            work[memory[M.k_list] + n] = work[memory[M.k_list] + n - 1]
            work[memory[M.v_list] + n] = work[memory[M.v_list] + n - 1]
        return n, at

    return list_chunk


def make_ahead(c, uid, head, width):
    """`make_prefetch_heads` for K or V; no prefetch for formats with groups, whose rows have few bytes."""
    return make_no_prefetch() if c.groups else make_prefetch_heads(make_prefetch(c), uid, head, width)


def make_no_prefetch():
    """`make_prefetch_heads` without a prefetch."""

    @ti.func
    def no_prefetch(array: ti.template(), lists, first, heads, n, to, work: ti.template(), strides, params):
        pass

    return no_prefetch


def make_prefetch_heads(prefetch, uid, head, width):
    """prefetch_heads(array, lists, ...): prefetches K or V of the listed keys if `P.prefetch` says so."""

    @ti.func
    def prefetch_heads(array: ti.template(), lists, first, heads, n, to, work: ti.template(), strides, params):
        if params[P.prefetch] == PREFETCH_TOKENS:
            prefetch(array, work, lists, first, 0, 1, (heads - 1) * strides[head] + width, n, to, uid)
        elif params[P.prefetch] == PREFETCH_PAGES:
            prefetch(array, work, lists, first, strides[head], heads, width, n, to, uid)

    return prefetch_heads


def make_softmax(load_scales, row_loops, uid, c):
    """softmax(heads, rows, n, ...): turns the scores of a chunk into weights; returns how many are masked.

    If a row's maximum grows, its sum and accumulators are rescaled.
    """
    query_bounds, depth_of, slope_of, origin = make_query_bounds(), make_depth_of(c), make_slope_of(c), make_origin(c)
    DV = c.width_v

    @ti.func
    def softmax(heads, rows, n, visible, task, memory, k_scale: ti.template(), v_scale: ti.template(),
                work: ti.template(), terms: ti.template(), strides, params, scalars):  # fmt: skip
        masked = 0
        for h in range(heads):
            if ti.static(c.row_scale):
                at = task[T.scale_first] + h * strides[S.scale_head]
                k_first, v_first = strides[S.k_scale_first] + at, strides[S.v_scale_first] + at
                load_scales(k_scale, work, memory[M.scale_list], k_first, n, memory[M.k_scales], uid)
                load_scales(v_scale, work, memory[M.scale_list], v_first, n, memory[M.v_scales], uid)
            for g in range(rows):
                z = h * rows + g
                scores = memory[M.scores] + z * ROW
                r = ti.min(task[T.row] + g, params[P.queries] * c.group - 1)
                bounds = query_bounds(depth_of(task[T.sequence], r // c.group, terms, params), visible, params)
                indices = memory[M.indices]
                if ti.static(c.tree):
                    _sinks, _slopes, tree, numbers = ti.static(terms)
                    new = visible[V.count] - params[P.queries] + params[P.ahead]
                    newest = ti.bit_cast(work[indices + n - 1], ti.i32)
                    if ti.static(c.index_bits > 0):
                        newest = new  # chosen tokens come in any order
                    if newest >= new:
                        first = numbers[N.tree_first] + task[T.sequence] * params[P.queries] * numbers[N.tree_words]
                        row_loops.tree_indices(work, tree, indices, memory[M.tree_indices], n,
                                               first + r // c.group * numbers[N.tree_words], first,
                                               numbers[N.tree_words], params[P.queries], new, bounds[1], bounds[2],
                                               bounds[3], uid)  # fmt: skip
                        indices = memory[M.tree_indices]
                stands = origin(r // c.group, terms)
                slope = slope_of(task[T.sequence], task[T.head] + h, r, terms) * ti.f32(LOG2E)
                row_loops.logits(work, scores, n, scalars[X.logit_scale], scalars[X.softcap], memory[M.k_scales],
                                 indices, bounds[0], bounds[1], bounds[2], bounds[3], slope, stands[0],
                                 stands[1], uid)  # fmt: skip
                high = row_loops.largest(work, scores, n, uid)
                if ti.static(c.masked):
                    masked += row_loops.count_masked(work, scores, n, uid)
                low = work[memory[M.maxima] + z]
                if high > low:
                    factor = exp2(low - high)
                    work[memory[M.maxima] + z] = high
                    work[memory[M.sums] + z] = work[memory[M.sums] + z] * factor
                    row_loops.shrink(work, memory[M.acc] + z * DV, factor, uid)
                total = row_loops.weights(work, scores, n, ti.max(high, low), uid)
                work[memory[M.sums] + z] = work[memory[M.sums] + z] + total
                if ti.static(c.row_scale):
                    row_loops.multiply(work, scores, n, memory[M.v_scales], uid)
                if (
                    ti.static(not c.of_values.groups and not c.invariant) and n % 2 == 1
                ):  # the last key is added twice with half its weight, since 0 times infinity is NaN
                    last = work[scores + n - 1]
                    half = ti.select(is_masked(last), last, last * 0.5)
                    work[scores + n - 1] = half
                    work[scores + n] = half
        return masked

    return softmax


def make_store_rows(row_loops, uid, parts, c):
    """store_rows(heads, rows, task, ...): stores a task's rows, divided by their sums of weights, and log-sum-exps."""
    output_offsets, store_lse, inverse = make_output_offsets(parts, c), make_store_lse(parts), make_inverse(c)

    @ti.func
    def store_rows(heads, rows, task, memory, out: ti.template(), lse: ti.template(), work: ti.template(), strides,
                   params, scalars):  # fmt: skip
        for z in range(heads * rows):
            r = task[T.row] + z % rows
            if z % rows < c.rows and r < params[P.queries] * c.group:
                total = work[memory[M.sums] + z]
                at, lse_at = output_offsets(task[T.kv_head] + z // rows, r, task[T.split], strides, params)
                row_loops.store(out, work, memory[M.acc] + z * c.width_v, at, inverse(total, scalars), uid)
                store_lse(lse, lse_at, work[memory[M.maxima] + z], total, scalars)

    return store_rows
