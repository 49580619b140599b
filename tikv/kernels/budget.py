"""Share out a number of kept tokens among the heads of a sequence: a select over all heads, after one for each head.

If a head keeps a least number, it first marks what it keeps whatever the others have: the first tokens, the newest, and
its best up to that number. Marked tokens then have the highest key, and one more search finds the lowest key that the
sequence keeps, as `select` does for a row. A sequence takes one thread on CPU, and a block of threads elsewhere, whose
neighbours read neighbouring scores; a thread only reads marks of its own.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.codec import word_array
from tikv.kernels.lanes import BLOCK, LEAST_ITERATIONS, SPIRV_THREADS
from tikv.kernels.select import KEPT, key_of, make_find_boundary, score_key
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


class Search(NamedTuple):
    """Entries of the vector that says what a search is among."""

    sequence: int = 0
    first: int = 1  # of its rows
    rows: int = 2
    marked: int = 3  # whether the heads have marked what they keep


P, S = BudgetParams(*range(len(BudgetParams._fields))), Search()
PARAMS = ti.types.vector(len(P), ti.i32)
OUT = word_array(8)
DIGIT_BITS = {"cuda": 11, "spirv": 4}  # of a key, that one reading of the scores finds
KEYS, TURNS, MARKS = range(3)  # tasks of a search
AT_ONCE = 8  # scores that a thread reads before it counts one of them


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


def threads_of(style):
    """Threads of the block that a sequence has on a GPU."""
    return 1024 if style == "cuda" else BLOCK


def copies_of(style):
    """Counters of a digit: one on CUDA; elsewhere each thread has its own, as no barrier orders atomic additions."""
    return 1 if style == "cuda" else BLOCK


def make_budget(style, serial):
    """budget(scores, out, params): out gets 1 for each token that is kept, and 0 for the others.

    The extent of scores is the sequences times `threads_of(style)`; on CPU it is the sequences, times
    `LEAST_ITERATIONS` unless it is `serial`.
    """
    if style == "cpu":
        return make_budget_cpu(serial)
    threads, share_out = threads_of(style), make_share_out(style)

    @ti.kernel
    def budget(scores: FLOATS, out: OUT, params: PARAMS):
        ti.loop_config(block_dim=threads)
        for i in range(SPIRV_THREADS if ti.static(style == "spirv") else scores.shape[0]):
            thread, block = i % threads, i // threads
            count, step = 1, 1
            if ti.static(style == "spirv"):
                step = SPIRV_THREADS // threads
                count = (params[P.sequences] - block + step - 1) // step
            for n in range(count):
                share_out(thread, block + n * step, scores, out, params)

    return budget


make_budget.resident = lambda style, serial: 1


def make_share_out(style):
    """share_out(thread, b, scores, out, params): a thread's share of a sequence; all threads of a block call it.

    A search finds the last entry that is kept: digit by digit, from the highest down, it finds the entry's key, and
    then its turn, unless all entries of that key are kept. Older tokens have higher turns, and then the first rows.
    """
    threads, bits, copies = threads_of(style), DIGIT_BITS[style], copies_of(style)
    digits, bins = -(-32 // bits), 1 << bits
    find_boundary, visit = make_find_boundary(threads, bins), make_visit(style)

    @ti.func
    def add_copies(thread, counts: ti.template()):
        total = 0
        for copy in range(ti.select(thread < bins, copies, 0)):
            total += counts[thread * copies + copy]
        ti.simt.block.sync()
        if thread < bins:
            counts[thread] = total
        ti.simt.block.sync()

    @ti.func
    def share_out(thread, b, scores: ti.template(), out: ti.template(), params):
        counts = ti.simt.block.SharedArray((bins * copies,), ti.i32)
        boundary = ti.simt.block.SharedArray((2,), ti.i32)
        least = params[P.least]
        heads = ti.select(least > params[P.sinks] + params[P.recent], params[P.rows], 0)  # that search for themselves
        for n in range(heads + 1):
            search, room = ti.Vector([b, 0, params[P.rows], ti.select(heads > 0, 1, 0)]), params[P.total]
            if n < heads:
                search, room = ti.Vector([b, n, 1, 0]), least
            key, turn = ti.select(room > 0, ti.u32(0), ti.u32(KEPT)), ti.u32(0)  # of the last
            first_turn = ti.cast(search[S.rows] * params[P.tokens] - 1, ti.u32)
            for step in range(2 * digits + 1):
                task, shift = step // digits, ti.cast((digits - 1 - step % digits) * bits, ti.u32)
                counting = task == KEYS or (task == TURNS and first_turn >> shift > ti.u32(0))
                if task == MARKS or (room > 0 and counting):
                    for i in range((bins * copies - thread + threads - 1) // threads):
                        counts[i * threads + thread] = 0
                    ti.simt.block.sync()
                    visit(thread, task, shift, ti.Vector([key, turn]), search, counts, scores, out, params)
                    ti.simt.block.sync()
                    if task != MARKS:
                        if ti.static(copies > 1):
                            add_copies(thread, counts)
                        find_boundary(thread, room, counts, boundary)
                        if counts[0] > room:
                            digit = ti.cast(boundary[0], ti.u32) << shift
                            key |= ti.select(task == KEYS, digit, ti.u32(0))
                            turn |= ti.select(task == TURNS, digit, ti.u32(0))
                            room = ti.select(counts[boundary[0]] > room, boundary[1], 0)
                        else:
                            room = 0
                    ti.simt.block.sync()

    return share_out


def make_visit(style):
    """visit(thread, task, shift, last, search, counts, scores, out, params): a task, over all entries of a search.

    `KEYS` and `TURNS` count the entries of each digit at `shift`, if their higher digits are those of the last entry
    that is kept; `MARKS` marks the entries up to that one. Scores are read before any of them is counted, but for the
    last of a head and those that are always kept.
    """
    threads, bits, copies = threads_of(style), DIGIT_BITS[style], copies_of(style)

    @ti.func
    def turn_of(entry, row, search, tokens):
        return ti.cast((tokens - entry) * search[S.rows] - 1 - (row - search[S.first]), ti.u32)

    @ti.func
    def count(thread, task, shift, last, key, turn, counts: ti.template()):
        value, prefix = ti.select(task == KEYS, key, turn), ti.select(task == KEYS, last[0], last[1])
        differs = ti.select(key == ti.u32(0), ti.u32(1), ((value ^ prefix) >> shift) >> ti.u32(bits))
        if ti.select(task == KEYS, differs, ti.select(key == last[0], differs, ti.u32(1))) == ti.u32(0):
            at = ti.cast((value >> shift) & ti.u32((1 << bits) - 1), ti.i32)
            if ti.static(copies == 1):
                ti.atomic_add(counts[at], 1)
            else:
                counts[at * copies + thread] = counts[at * copies + thread] + 1

    @ti.func
    def kept(last, key, turn):
        among = ti.select(key == last[0], ti.select(turn >= last[1], 1, 0), ti.select(key > last[0], 1, 0))
        return ti.cast(ti.select(key == ti.u32(0), 0, among), ti.u8)

    @ti.func
    def visit(thread, task, shift, last, search, counts: ti.template(), scores: ti.template(), out: ti.template(),
              params):  # fmt: skip
        tokens, sinks, recent = params[P.tokens], params[P.sinks], params[P.recent]
        for row in range(search[S.first], search[S.first] + search[S.rows]):
            first, to = score_row(search[S.sequence], row, params), out_row(search[S.sequence], row, params)
            for begin in range((tokens - thread + threads * AT_ONCE - 1) // (threads * AT_ONCE)):
                entry = begin * threads * AT_ONCE + thread
                if entry >= sinks and entry + (AT_ONCE - 1) * threads < tokens - recent:
                    keys = ti.Vector([ti.u32(0) for _ in range(AT_ONCE)])
                    for m in ti.static(range(AT_ONCE)):
                        keys[m] = score_key(scores[first + entry + m * threads])
                    if search[S.marked] != 0:
                        for m in ti.static(range(AT_ONCE)):
                            mark = out[to + entry + m * threads]
                            keys[m] = ti.select(mark != ti.u8(0), ti.u32(KEPT), keys[m])
                    if task == MARKS:
                        for m in ti.static(range(AT_ONCE)):
                            at = entry + m * threads
                            out[to + at] = kept(last, keys[m], turn_of(at, row, search, tokens))
                    else:
                        for m in ti.static(range(AT_ONCE)):
                            turn = turn_of(entry + m * threads, row, search, tokens)
                            count(thread, task, shift, last, keys[m], turn, counts)
                else:
                    for m in range((ti.min(tokens - entry, AT_ONCE * threads) + threads - 1) // threads):
                        at = entry + m * threads
                        turn = turn_of(at, row, search, tokens)
                        key = key_of(scores[first + at], at, tokens, 1, sinks, recent)
                        if search[S.marked] != 0:
                            key = ti.select(out[to + at] != ti.u8(0), ti.u32(KEPT), key)
                        if task == MARKS:
                            out[to + at] = kept(last, key, turn)
                        else:
                            count(thread, task, shift, last, key, turn, counts)

    return visit


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
