"""Share out a number of kept tokens among the heads of a sequence: a select over all heads, after one for each head.

First each head marks the tokens that it keeps whatever the others have: the first, the newest, and its best up to the
least number. Marked tokens then have the highest key, and one more search finds the lowest key that the sequence
keeps, as `select` does for a row. A sequence takes one thread on CPU, and a block of threads elsewhere; a thread marks
and counts the same positions throughout, so it only reads marks of its own.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.codec import word_array
from tikv.kernels.lanes import BLOCK, LEAST_ITERATIONS, SPIRV_THREADS
from tikv.kernels.select import KEPT, key_of
from tikv.runtime import ti


class BudgetParams(NamedTuple):
    """Numbers of a launch."""

    sequences: int = 0
    rows: int = 0  # heads of a sequence, of all layers
    heads: int = 1  # of a layer
    tokens: int = 0  # of a head
    total: int = 0
    least: int = 0
    sinks: int = 0
    recent: int = 0
    score_layer: int = 0
    score_sequence: int = 0
    score_head: int = 0
    score_first: int = 0
    out_layer: int = 0
    out_sequence: int = 0
    out_first: int = 0


P = BudgetParams(*range(len(BudgetParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)
OUT = word_array(8)


@ti.func
def score_row(b, row, params):
    """The address of the scores of a head."""
    layer, head = row // params[P.heads], row % params[P.heads]
    return (params[P.score_first] + layer * params[P.score_layer] + b * params[P.score_sequence]
            + head * params[P.score_head])  # fmt: skip


@ti.func
def out_row(b, row, params):
    """The address of the mask of a head."""
    layer, head = row // params[P.heads], row % params[P.heads]
    return (params[P.out_first] + layer * params[P.out_layer] + b * params[P.out_sequence]
            + head * params[P.tokens])  # fmt: skip


@ti.func
def marked_key(score, mark, entry, tokens):
    """The key of a token in the sequence's search, once its head has marked what it keeps."""
    return ti.select(mark != ti.u8(0), ti.u32(KEPT), key_of(score, entry, tokens, 1, 0, 0))


def make_budget(style, serial):
    """budget(scores, out, params): out gets 1 for each token that is kept, and 0 for the others.

    On CPU the extent of scores is the sequences, times `LEAST_ITERATIONS` unless it is `serial`.
    """
    if style == "cpu":
        return make_budget_cpu(serial)
    share_out = make_sequence()

    @ti.kernel
    def budget(scores: FLOATS, out: OUT, params: PARAMS):
        ti.loop_config(block_dim=BLOCK)
        for i in range(SPIRV_THREADS if ti.static(style == "spirv") else scores.shape[0]):
            thread, block = i % BLOCK, i // BLOCK
            count, step = 1, 1
            if ti.static(style == "spirv"):
                step = SPIRV_THREADS // BLOCK
                count = (params[P.sequences] - block + step - 1) // step
            for n in range(count):
                share_out(thread, block + n * step, scores, out, params)

    return budget


def make_block_sum():
    """block_sum(thread, value, shared): the sum over a block's threads; all of them call it."""

    @ti.func
    def block_sum(thread, value, shared: ti.template()):
        total = value
        ti.simt.block.sync()
        shared[thread] = total
        ti.simt.block.sync()
        for halving in ti.static(range(BLOCK.bit_length() - 1)):
            if thread < ti.static(BLOCK >> (halving + 1)):
                total += shared[thread + ti.static(BLOCK >> (halving + 1))]
                shared[thread] = total
            ti.simt.block.sync()
        return shared[0]

    return block_sum


def make_sequence():
    """share_out(thread, b, scores, out, params): a thread's share of a sequence; all threads of a block call it."""
    block_sum = make_block_sum()

    @ti.func
    def before(thread, value, shared: ti.template()):
        """(the sum over the threads before this one, the sum over all)."""
        ti.simt.block.sync()
        shared[thread] = value
        ti.simt.block.sync()
        of_lower, total = 0, 0
        for j in range(BLOCK):
            of_lower += ti.select(j < thread, shared[j], 0)
            total += shared[j]
        return ti.Vector([of_lower, total])

    @ti.func
    def share_out(thread, b, scores: ti.template(), out: ti.template(), params):
        shared = ti.simt.block.SharedArray((BLOCK,), ti.i32)
        tokens, rows, sinks, recent = params[P.tokens], params[P.rows], params[P.sinks], params[P.recent]
        each = (tokens + BLOCK - 1) // BLOCK
        begin, end = thread * each, ti.min((thread + 1) * each, tokens)
        for row in range(rows):
            first, to, lowest = score_row(b, row, params), out_row(b, row, params), ti.u32(KEPT)
            room, equal_before = tokens, 0
            if params[P.least] > sinks + recent:
                lowest = ti.u32(0)
                for step in range(32):
                    threshold = lowest | (ti.u32(0x80000000) >> ti.cast(step, ti.u32))
                    count = 0
                    for entry in range(begin, end):
                        key = key_of(scores[first + entry], entry, tokens, 1, sinks, recent)
                        count += ti.select(key >= threshold, 1, 0)
                    lowest = ti.select(block_sum(thread, count, shared) >= params[P.least], threshold, lowest)
                more, same = 0, 0
                for entry in range(begin, end):
                    key = key_of(scores[first + entry], entry, tokens, 1, sinks, recent)
                    more += ti.select(key > lowest, 1, 0)
                    same += ti.select(key == lowest, 1, 0)
                room = params[P.least] - block_sum(thread, more, shared)
                equal_before = before(thread, same, shared)[0]
                room = ti.select(lowest == ti.u32(0), 0, room)
            for entry in range(begin, end):
                key = key_of(scores[first + entry], entry, tokens, 1, sinks, recent)
                mark = ti.select(key > lowest, 1, 0)
                if key == lowest:
                    mark = ti.select(equal_before < room, 1, 0)
                    equal_before += 1
                out[to + entry] = ti.cast(mark, ti.u8)
        lowest = ti.u32(0)
        for step in range(32):
            threshold = lowest | (ti.u32(0x80000000) >> ti.cast(step, ti.u32))
            count = 0
            for row in range(rows):
                first, to = score_row(b, row, params), out_row(b, row, params)
                for entry in range(begin, end):
                    key = marked_key(scores[first + entry], out[to + entry], entry, tokens)
                    count += ti.select(key >= threshold, 1, 0)
            lowest = ti.select(block_sum(thread, count, shared) >= params[P.total], threshold, lowest)
        more, same = 0, 0
        for row in range(rows):
            first, to = score_row(b, row, params), out_row(b, row, params)
            for entry in range(begin, end):
                key = marked_key(scores[first + entry], out[to + entry], entry, tokens)
                more += ti.select(key > lowest, 1, 0)
                same += ti.select(key == lowest, 1, 0)
        room = params[P.total] - block_sum(thread, more, shared)
        room = ti.select(lowest == ti.u32(0), 0, room)
        equal_before = before(thread, same, shared)[0]
        for entry in range(begin, end):  # of equal scores the oldest, then those of the first rows
            for row in range(rows):
                to = out_row(b, row, params) + entry
                key = marked_key(scores[score_row(b, row, params) + entry], out[to], entry, tokens)
                mark = ti.select(key > lowest, 1, 0)
                if key == lowest:
                    mark = ti.select(equal_before < room, 1, 0)
                    equal_before += 1
                out[to] = ti.cast(mark, ti.u8)

    return share_out


def make_budget_cpu(serial):
    """`make_budget` on CPU; its loops over tokens are real functions, so LLVM vectorises them."""
    uid, every = zlib.crc32(repr(("budget", serial)).encode()) >> 1, 1 if serial else LEAST_ITERATIONS

    @ti.real_func
    def count(scores: FLOATS, first: ti.i32, tokens: ti.i32, sinks: ti.i32, recent: ti.i32, threshold: ti.u32,
              number: ti.i32) -> ti.i32:  # fmt: skip
        matching = 0
        for entry in range(tokens):
            key = key_of(scores[first + entry], entry, tokens, 1, sinks, recent)
            matching += ti.select(key >= threshold, 1, 0)
        return matching

    @ti.real_func
    def mark(scores: FLOATS, out: OUT, first: ti.i32, to: ti.i32, tokens: ti.i32, sinks: ti.i32, recent: ti.i32,
             lowest: ti.u32, room: ti.i32, number: ti.i32):  # fmt: skip
        remaining = room
        for entry in range(tokens):
            key = key_of(scores[first + entry], entry, tokens, 1, sinks, recent)
            equal = ti.select(key == lowest, ti.select(remaining > 0, 1, 0), 0)
            remaining -= equal
            out[to + entry] = ti.cast(ti.select(key > lowest, 1, equal), ti.u8)

    @ti.real_func
    def count_marked(scores: FLOATS, out: OUT, first: ti.i32, to: ti.i32, tokens: ti.i32, threshold: ti.u32,
                     number: ti.i32) -> ti.i32:  # fmt: skip
        matching = 0
        for entry in range(tokens):
            key = marked_key(scores[first + entry], out[to + entry], entry, tokens)
            matching += ti.select(key >= threshold, 1, 0)
        return matching

    @ti.func
    def matching(b, threshold, scores: ti.template(), out: ti.template(), params):
        total = 0
        for row in range(params[P.rows]):
            total += count_marked(scores, out, score_row(b, row, params), out_row(b, row, params), params[P.tokens],
                                  threshold, uid)  # fmt: skip
        return total

    @ti.func
    def share_out(b, scores: ti.template(), out: ti.template(), params):
        tokens, sinks, recent, least = params[P.tokens], params[P.sinks], params[P.recent], params[P.least]
        for row in range(params[P.rows]):
            first, lowest, room = score_row(b, row, params), ti.u32(KEPT), tokens
            if least > sinks + recent:
                lowest = ti.u32(0)
                for step in range(32):
                    threshold = lowest | (ti.u32(0x80000000) >> ti.cast(step, ti.u32))
                    if count(scores, first, tokens, sinks, recent, threshold, uid) >= least:
                        lowest = threshold
                room = 0
                if lowest == ti.u32(KEPT):
                    room = tokens
                elif lowest > ti.u32(0):
                    room = least - count(scores, first, tokens, sinks, recent, lowest + ti.u32(1), uid)
            mark(scores, out, first, out_row(b, row, params), tokens, sinks, recent, lowest, room, uid)
        lowest = ti.u32(0)
        for step in range(32):
            threshold = lowest | (ti.u32(0x80000000) >> ti.cast(step, ti.u32))
            if matching(b, threshold, scores, out, params) >= params[P.total]:
                lowest = threshold
        room = 0
        if lowest == ti.u32(KEPT):
            room = params[P.total]
        elif lowest > ti.u32(0):
            room = params[P.total] - matching(b, lowest + ti.u32(1), scores, out, params)
        for entry in range(tokens):  # of equal scores the oldest, then those of the first rows
            for row in range(params[P.rows]):
                to = out_row(b, row, params) + entry
                key = marked_key(scores[score_row(b, row, params) + entry], out[to], entry, tokens)
                equal = ti.select(key == lowest, ti.select(room > 0, 1, 0), 0)
                room -= equal
                out[to] = ti.cast(ti.select(key > lowest, 1, equal), ti.u8)

    @ti.kernel
    def budget(scores: FLOATS, out: OUT, params: PARAMS):
        ti.loop_config(serialize=serial)
        for i in range(scores.shape[0]):
            if i % every == 0:
                share_out(i // every, scores, out, params)

    return budget
