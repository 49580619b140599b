"""Select the k highest scores of a row without sorting: first find the k-th highest, bit by bit, then the entries.

Each score has an unsigned key with the order of the scores. The k-th highest key is the largest number that at least k
keys reach; counting finds its bits, from the highest down. Then the entries above it are written in the order of the
row, together with as many entries equal to it as are left, the oldest first. A row takes one thread on CPU, and a block
of threads elsewhere. On CUDA `select_cuda` finds eight bits at once, by atomic additions in shared memory: Taichi's
barrier does not order those on Vulkan.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.parameters import FLOATS, INFINITY
from tikv.kernels.lanes import BLOCK, LEAST_ITERATIONS, SPIRV_THREADS
from tikv.runtime import ti

KEPT, NOT_A_NUMBER = 0xFFFFFFFF, 0xFFFFFFFE  # keys above those of all scores
LOWEST = 0x007FFFFF  # the key of -infinity, which is never chosen


class SelectParams(NamedTuple):
    """Numbers of a launch."""

    rows: int = 0
    heads: int = 1
    queries: int = 1
    entries: int = 0  # scores of a row
    k: int = 1  # scores that are chosen
    page: int = 1  # tokens of an entry
    sinks: int = 0
    recent: int = 0
    valid: int = 0  # tokens of every row, if there is no array of them
    score_sequence: int = 0
    score_head: int = 0
    score_query: int = 0
    score_first: int = 0
    valid_sequence: int = 0
    valid_query: int = 0
    valid_first: int = 0
    out_first: int = 0


P = SelectParams(*range(len(SelectParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)
OUT = ti.types.ndarray(dtype=ti.i32, ndim=1)


@ti.func
def score_key(score):
    """The key of a score, or 0 if it must not be chosen; zeros of both signs have the same key."""
    bits = ti.bit_cast(score, ti.u32)
    magnitude = bits & ti.u32(0x7FFFFFFF)
    key = ti.select(bits == magnitude, bits | ti.u32(0x80000000), ~bits)
    key = ti.select(magnitude == ti.u32(0), ti.u32(0x80000000), key)
    key = ti.select(key == ti.u32(LOWEST), ti.u32(0), key)
    return ti.select(magnitude > ti.u32(INFINITY), ti.u32(NOT_A_NUMBER), key)


@ti.func
def key_of(score, entry, valid, page, sinks, recent):
    """The key of an entry, or 0 if it must not be chosen."""
    first = entry * page
    newest = ti.select(recent > 0, valid - recent, valid + page)
    always = ti.select(first < sinks, 1, 0) | ti.select(first + page > newest, 1, 0)
    key = ti.select(always != 0, ti.u32(KEPT), score_key(score))
    return ti.select(first < valid, key, ti.u32(0))


def make_row_of(valid_bits):
    """row_of(row, valid, params) -> (the address of its scores, its tokens, at most as many as have scores)."""

    @ti.func
    def row_of(row, valid: ti.template(), params):
        t, kv_head = row % params[P.queries], row // params[P.queries]
        b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        first = params[P.score_first] + b * params[P.score_sequence] + h * params[P.score_head]
        tokens = params[P.valid]
        if ti.static(valid_bits > 0):
            at = params[P.valid_first] + b * params[P.valid_sequence] + t * params[P.valid_query]
            most = ti.cast(params[P.entries] * params[P.page], ti.i64)
            tokens = ti.cast(ti.min(ti.max(ti.cast(valid[at], ti.i64), ti.i64(0)), most), ti.i32)
        return first + t * params[P.score_query], tokens

    return row_of


def make_find_boundary(threads, bins):
    """find_boundary(thread, room, counts, boundary): the digit at which the highest `room` entries end.

    `counts` has the entries of each digit, and then those of a digit and of all above it. If there are at least `room`,
    `boundary` gets the digit and how many of its entries are among the highest. All threads of a block call it.
    """
    each = -(-bins // threads)

    @ti.func
    def find_boundary(thread, room, counts: ti.template(), boundary: ti.template()):
        for step in ti.static(range(bins.bit_length() - 1)):
            higher = ti.Vector([0 for _ in range(each)])
            for n in ti.static(range(each)):
                at = n * threads + thread + ti.static(1 << step)
                if at < bins:
                    higher[n] = counts[at]
            ti.simt.block.sync()
            for n in ti.static(range(each)):
                at = n * threads + thread
                if at < bins:
                    counts[at] = counts[at] + higher[n]
            ti.simt.block.sync()
        for n in ti.static(range(each)):
            at = n * threads + thread
            if at < bins:
                higher = 0
                if at + 1 < bins:
                    higher = counts[at + 1]
                if counts[at] >= room and higher < room:
                    boundary[0], boundary[1] = at, room - higher
        ti.simt.block.sync()

    return find_boundary


def make_select(style, serial, valid_bits):
    """select(scores, valid, out, params): out gets at most k * page tokens of each row in order, followed by -1.

    For CPU, Vulkan and Metal; CUDA has `select_cuda`. The function is not cached, since its real functions belong to
    one Taichi program. On CPU the extent of scores is the rows, times `LEAST_ITERATIONS` unless it is `serial`.
    """
    VALID = index_array(valid_bits)
    if style == "cpu":
        return make_select_cpu(serial, valid_bits, VALID)
    select_row = make_select_row(make_row_of(valid_bits))

    @ti.kernel
    def select(scores: FLOATS, valid: VALID, out: OUT, params: PARAMS):
        ti.loop_config(block_dim=BLOCK)
        for i in range(SPIRV_THREADS):
            thread, block = i % BLOCK, i // BLOCK
            for n in range((params[P.rows] - block + SPIRV_THREADS // BLOCK - 1) // (SPIRV_THREADS // BLOCK)):
                select_row(thread, block + n * (SPIRV_THREADS // BLOCK), scores, valid, out, params)

    return select


def make_select_row(row_of):
    """select_row(thread, row, scores, valid, out, params): a thread's share of a row; all of a block call it."""

    @ti.func
    def select_row(thread, row, scores: ti.template(), valid: ti.template(), out: ti.template(), params):
        above = ti.simt.block.SharedArray((BLOCK,), ti.i32)
        equal = ti.simt.block.SharedArray((BLOCK,), ti.i32)
        first, tokens = row_of(row, valid, params)
        page, sinks, recent, k = params[P.page], params[P.sinks], params[P.recent], params[P.k]
        entries = ti.min((tokens + page - 1) // page, params[P.entries])
        lowest = ti.u32(0)
        for step in range(32):
            threshold = lowest | (ti.u32(0x80000000) >> ti.cast(step, ti.u32))
            count = 0
            for n in range((entries - thread + BLOCK - 1) // BLOCK):
                entry = n * BLOCK + thread
                key = key_of(scores[first + entry], entry, tokens, page, sinks, recent)
                count += ti.select(key >= threshold, 1, 0)
            ti.simt.block.sync()
            above[thread] = count
            ti.simt.block.sync()
            for halving in ti.static(range(BLOCK.bit_length() - 1)):
                if thread < ti.static(BLOCK >> (halving + 1)):
                    count += above[thread + ti.static(BLOCK >> (halving + 1))]
                    above[thread] = count
                ti.simt.block.sync()
            lowest = ti.select(above[0] >= k, threshold, lowest)
        # Each thread has neighbouring entries, so its output follows the output of the threads before it.
        each = (entries + BLOCK - 1) // BLOCK
        begin, end = thread * each, ti.min((thread + 1) * each, entries)
        more, same = 0, 0
        for entry in range(begin, end):
            key = key_of(scores[first + entry], entry, tokens, page, sinks, recent)
            more += ti.select(key > lowest, 1, 0)
            same += ti.select(key == lowest, 1, 0)
        ti.simt.block.sync()
        above[thread], equal[thread] = more, same
        ti.simt.block.sync()
        all_above, above_before, equal_before = 0, 0, 0
        for j in range(BLOCK):
            all_above += above[j]
            above_before += ti.select(j < thread, above[j], 0)
            equal_before += ti.select(j < thread, equal[j], 0)
        room = ti.select(lowest == ti.u32(0), 0, k - all_above)  # for entries that equal the lowest
        to = params[P.out_first] + row * k * page
        rank = above_before + ti.min(equal_before, room)
        for entry in range(begin, end):
            key = key_of(scores[first + entry], entry, tokens, page, sinks, recent)
            selected = 0
            if key > lowest:
                selected = 1
            elif key == lowest:
                selected = ti.select(equal_before < room, 1, 0)
                equal_before += 1
            if selected != 0:
                for j in range(page):
                    token = entry * page + j
                    out[to + rank * page + j] = ti.select(token < tokens, token, -1)
                rank += 1
        all_equal = 0
        for j in range(BLOCK):
            all_equal += equal[j]
        written = (all_above + ti.min(all_equal, room)) * page
        for n in range((k * page - written - thread + BLOCK - 1) // BLOCK):
            out[to + written + n * BLOCK + thread] = -1

    return select_row


def make_select_cpu(serial, valid_bits, VALID):
    """`make_select` on CPU; its loops over entries are real functions, so LLVM vectorises them."""
    uid = zlib.crc32(repr(("select", serial, valid_bits)).encode()) >> 1
    row_of, every = make_row_of(valid_bits), 1 if serial else LEAST_ITERATIONS

    @ti.real_func
    def count(scores: FLOATS, first: ti.i32, entries: ti.i32, tokens: ti.i32, page: ti.i32, sinks: ti.i32,
              recent: ti.i32, threshold: ti.u32, number: ti.i32) -> ti.i32:  # fmt: skip
        matching = 0
        for entry in range(entries):
            key = key_of(scores[first + entry], entry, tokens, page, sinks, recent)
            matching += ti.select(key >= threshold, 1, 0)
        return matching

    @ti.real_func
    def write(scores: FLOATS, out: OUT, first: ti.i32, entries: ti.i32, tokens: ti.i32, page: ti.i32, sinks: ti.i32,
              recent: ti.i32, lowest: ti.u32, room: ti.i32, to: ti.i32, end: ti.i32, number: ti.i32):  # fmt: skip
        target, remaining = to, room
        for entry in range(entries):
            key = key_of(scores[first + entry], entry, tokens, page, sinks, recent)
            equal = ti.select(key == lowest, ti.select(remaining > 0, 1, 0), 0)
            remaining -= equal
            if ti.select(key > lowest, 1, equal) != 0:
                for j in range(page):
                    token = entry * page + j
                    out[target + j] = ti.select(token < tokens, token, -1)
                target += page
        for at in range(target, end):
            out[at] = -1

    @ti.func
    def select_row(row, scores: ti.template(), valid: ti.template(), out: ti.template(), params):
        first, tokens = row_of(row, valid, params)
        page, sinks, recent, k = params[P.page], params[P.sinks], params[P.recent], params[P.k]
        entries = ti.min((tokens + page - 1) // page, params[P.entries])
        lowest = ti.u32(0)
        for step in range(32):
            threshold = lowest | (ti.u32(0x80000000) >> ti.cast(step, ti.u32))
            matching = count(scores, first, entries, tokens, page, sinks, recent, threshold, uid)
            lowest = ti.select(matching >= k, threshold, lowest)
        room = 0
        if lowest == ti.u32(KEPT):
            room = k
        elif lowest > ti.u32(0):
            room = k - count(scores, first, entries, tokens, page, sinks, recent, lowest + ti.u32(1), uid)
        to = params[P.out_first] + row * k * page
        write(scores, out, first, entries, tokens, page, sinks, recent, lowest, room, to, to + k * page, uid)

    @ti.kernel
    def select(scores: FLOATS, valid: VALID, out: OUT, params: PARAMS):
        ti.loop_config(serialize=serial)
        for i in range(scores.shape[0]):
            if i % every == 0:
                select_row(i // every, scores, valid, out, params)

    return select
