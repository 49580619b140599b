"""Scores of queries with keys that are quantised by channel: each channel of a group of tokens has a scale and a bias.

The codes of a channel lie one after another, token by token. With s and b of channel d in the key's group, q.k is the
sum over d of (q s) code + q b. It is added up for a few rows of queries and all tokens of a unit of codes, or on CPU of
a group. The groups of each KV head lie one after another, in memory of their sequence or in the blocks of a table.
"""

import zlib
from typing import NamedTuple

from tikv.formats import GROUP_FORMATS
from tikv.kernels.address import index_array
from tikv.kernels.attention.cpu.lines import BAND, make_line_sums
from tikv.kernels.attention.cpu.loops import before
from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.codec import (
    ELEMENT,
    SIZE,
    element_array,
    make_bits_to_f32,
    make_element_to_f32,
    make_load,
    scale_array,
    word_array,
)
from tikv.kernels.groups import make_code, step_of_code, unit_of
from tikv.kernels.lanes import LEAST_ITERATIONS, make_loop
from tikv.runtime import ti


class ScoreParams(NamedTuple):
    """Numbers of a launch: units of work, extents, strides and first entries."""

    items: int = 0
    groups: int = 0  # of tokens in a sequence whose scores are computed
    room: int = 0  # groups that fit in the memory of a sequence, or of a block
    heads: int = 1  # KV heads
    queries: int = 1  # of a query head
    tokens: int = 0  # the stride between rows of scores
    q_sequence: int = 0
    q_head: int = 0
    q_token: int = 0
    q_first: int = 0
    k_first: int = 0
    numbers_first: int = 0
    blocks: int = 0  # that a table may name
    table_sequence: int = 0
    table_first: int = 0
    work: int = 0  # on CPU: the stride between the workers' memory


class Scored(NamedTuple):
    """The compile-time choices of the kernels of scores."""

    name: str  # of the format, which has groups of tokens
    query: str  # dtype code of q
    scale: str  # dtype code of scales and biases
    width: int  # channels
    group: int  # query heads of a KV head
    table: int  # bits of an entry of the table; 0 without a table


P = ScoreParams(*range(len(ScoreParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_find_group(c):
    """find_group(b, h, g, table, params): which of all groups is group g of a KV head; -1 if it is missing."""

    @ti.func
    def find_group(b, h, g, table: ti.template(), params):
        group = (b * params[P.heads] + h) * params[P.room] + g
        if ti.static(c.table > 0):
            block = ti.cast(table[params[P.table_first] + b * params[P.table_sequence] + g // params[P.room]], ti.i64)
            group = -1
            if block >= ti.i64(0) and block < ti.cast(params[P.blocks], ti.i64):
                group = (ti.cast(block, ti.i32) * params[P.heads] + h) * params[P.room] + g % params[P.room]
        return group

    return find_group


def make_row_of_queries(c):
    """row_of_queries(b, h, r, params): the address of query row r of KV head h; r counts the heads of a query first."""

    @ti.func
    def row_of_queries(b, h, r, params):
        head, token = h * c.group + r % c.group, r // c.group
        return params[P.q_first] + b * params[P.q_sequence] + head * params[P.q_head] + token * params[P.q_token]

    return row_of_queries


def make_channel_scores(style, band, c):
    """scores(q, codes, numbers, table, out, params) on GPUs: out (sequence, KV head, row, token) float32.

    Args:
        style: as in `lanes.make_loop`.
        band: rows that an item computes for a unit of codes; it divides the number of rows of a KV head.
        c: `Scored`.
    """
    row, code, (count, words) = GROUP_FORMATS[c.name], make_code(c.name), unit_of(c.name)
    load_q, value = make_load(c.query, 1, SIZE[c.query] * 8), make_bits_to_f32(c.scale)
    units, steps = row.group // count, [1 / step_of_code(c.name, e) for e in range(count)]
    Q, CODES, SC, TABLE = element_array(c.query), word_array(32), scale_array(c.scale), index_array(c.table)
    find_group, row_of_queries, width = make_find_group(c), make_row_of_queries(c), c.width

    @ti.func
    def score(i, arrays: ti.template(), params):
        q, codes, numbers, table, out = ti.static(arrays)
        unit, rest = i % units, i // units
        g, rest = rest % params[P.groups], rest // params[P.groups]
        bands = c.group * params[P.queries] // band
        first_row, head = rest % bands * band, rest // bands
        b, h = head // params[P.heads], head % params[P.heads]
        group = find_group(b, h, g, table, params)
        if group >= 0:
            at = ti.Vector([0] * band)
            for n in ti.static(range(band)):
                at[n] = row_of_queries(b, h, first_row + n, params)
            sums = ti.Vector([ti.f32(0.0)] * (band * count))
            biases = ti.Vector([ti.f32(0.0)] * band)
            for d in range(width):
                number = params[P.numbers_first] + (group * width + d) * 2
                s, bias = value(numbers[number]), value(numbers[number + 1])
                word = params[P.k_first] + ((group * width + d) * units + unit) * words
                packed = [codes[word + w] for w in range(words)]
                for n in ti.static(range(band)):
                    y = load_q(q, at[n] + d)[0]
                    biases[n] += y * bias
                    y = y * s
                    for e in ti.static(range(count)):
                        sums[n * count + e] += code(packed, e) * y
            for n in ti.static(range(band)):
                to = (head * bands * band + first_row + n) * params[P.tokens] + g * row.group + unit * count
                for e in ti.static(range(count)):
                    out[to + e] = sums[n * count + e] * ti.f32(ti.static(steps[e])) + biases[n]

    loop = make_loop(style, False, score, P.items)

    @ti.kernel
    def scores(q: Q, codes: CODES, numbers: SC, table: TABLE, out: FLOATS, params: PARAMS):
        loop(q, params, ((q, codes, numbers, table, out), params))

    return scores


make_channel_scores.fast_math = True


def make_channel_scores_cpu(workers, rows, most, c):
    """scores(q, codes, numbers, table, out, work, params) on CPU: as `make_channel_scores`.

    A task is a group of tokens, and a line of codes is a channel. A worker first multiplies the rows of a band by the
    scales; `make_line_sums` has the loops over codes.
    The function is not cached, since its real functions belong to one Taichi program.

    Args:
        workers: threads; 1 runs in the calling thread.
        rows: query heads of a KV head times the queries of each.
        most: at most so many of these rows are computed together.
        c: `Scored`.

    `work` holds `line_work_floats` floats for each worker.
    """
    row, (count, words) = GROUP_FORMATS[c.name], unit_of(c.name)
    load_q, value = make_load(c.query, 1, SIZE[c.query] * 8), make_element_to_f32(c.scale)
    units, steps = row.group // count, [1 / step_of_code(c.name, e) for e in range(count)]
    B = max(n for n in range(1, most + 1) if rows % n == 0)
    list_channels, fetch, add_up = make_line_sums(c.name, c.width, row.group, B)
    Q, CODES, TABLE = element_array(c.query), word_array(32), index_array(c.table)
    SC = ti.types.ndarray(dtype=ELEMENT[c.scale], ndim=1)
    find_group, row_of_queries, width = make_find_group(c), make_row_of_queries(c), c.width
    uid = zlib.crc32(repr((workers, rows, most, c)).encode()) >> 1
    iterations, every = (workers * LEAST_ITERATIONS, LEAST_ITERATIONS) if workers > 1 else (1, 1)

    @ti.real_func
    def multiply(q: Q, numbers: SC, work: FLOATS, at: ti.i32, number: ti.i32, to: ti.i32, sum_to: ti.i32,
                 uid: ti.i32):  # fmt: skip
        scales, begin, total = before(number, 2 * width), before(to, width), ti.f32(0.0)
        for d in range(width):
            y = load_q(q, at + d)[0]
            work[begin + d] = y * value(numbers[scales + d * 2])
            total += y * value(numbers[scales + d * 2 + 1])
        work[sum_to] = total

    @ti.real_func
    def store(work: FLOATS, out: FLOATS, first: ti.i32, biases: ti.i32, to: ti.i32, step: ti.i32, uid: ti.i32):
        for g in range(B):
            begin, target = before(first + g * row.group, row.group), before(to + g * step, row.group)
            bias = work[biases + g]
            for u in range(units):
                for e in ti.static(range(count)):
                    x = work[begin + ti.static(e * units) + u]
                    out[target + u * count + e] = x * ti.f32(ti.static(steps[e])) + bias

    @ti.func
    def score(task, to, arrays: ti.template(), params):
        q, codes, numbers, table, out, work = ti.static(arrays)
        g, head = task % params[P.groups], task // params[P.groups]
        b, h = head // params[P.heads], head % params[P.heads]
        channel = find_group(b, h, g, table, params) * width
        biases, listed, sums = to + BAND * width, to + BAND * (width + 1), to + (BAND + 1) * (width + 1)
        if channel >= 0:
            fetch(codes, work, params[P.k_first] + channel * (units * words), sums, uid)
            for band in range(rows // B):
                for n in range(B):
                    at = row_of_queries(b, h, band * B + n, params)
                    multiply(q, numbers, work, at, params[P.numbers_first] + channel * 2, to + n * width, biases + n,
                             uid)  # fmt: skip
                add_up(codes, work, params[P.k_first] + channel * (units * words), to, listed, sums, uid)
                store(work, out, sums, biases, (head * rows + band * B) * params[P.tokens] + g * row.group,
                      params[P.tokens], uid)  # fmt: skip

    @ti.kernel
    def scores(q: Q, codes: CODES, numbers: SC, table: TABLE, out: FLOATS, work: FLOATS, params: PARAMS):
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker, tasks = i // every, 0
            if i % every == 0:
                tasks = (params[P.items] - worker + workers - 1) // workers
            if tasks > 0:
                list_channels(work, worker * params[P.work] + BAND * (width + 1), uid)
            for turn in range(tasks):
                score(turn * workers + worker, worker * params[P.work], (q, codes, numbers, table, out, work), params)

    return scores


make_channel_scores_cpu.fast_math = True
