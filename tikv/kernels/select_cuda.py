"""`select` on CUDA: a block of threads finds the k-th highest key of a row by histograms of its digits."""

from tikv.kernels.address import index_array
from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.select import OUT, PARAMS, P, key_of, make_find_boundary, make_row_of
from tikv.runtime import ti

THREADS = 512  # of a block, which has one row
DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS  # numbers that a digit can be
AT_ONCE = 4  # scores that a thread reads before it counts one of them


def make_select_cuda(threads, valid_bits):
    """select(scores, valid, out, params): `select.make_select`; the extent of scores is the rows times `threads`."""
    VALID = index_array(valid_bits)
    select_row = make_select_row(threads, make_row_of(valid_bits))

    @ti.kernel
    def select(scores: FLOATS, valid: VALID, out: OUT, params: PARAMS):
        ti.loop_config(block_dim=threads)
        for i in range(scores.shape[0]):
            select_row(i % threads, i // threads, scores, valid, out, params)

    return select


def make_select_row(threads, row_of):
    """select_row(thread, row, scores, valid, out, params): a thread's share of a row; all of a block call it."""
    find_lowest = make_find_lowest(threads)

    @ti.func
    def select_row(thread, row, scores: ti.template(), valid: ti.template(), out: ti.template(), params):
        above = ti.simt.block.SharedArray((threads,), ti.u32)  # a word of 32 neighbouring entries' bits for each thread
        equal = ti.simt.block.SharedArray((threads,), ti.u32)
        above_until = ti.simt.block.SharedArray((threads,), ti.i32)
        equal_until = ti.simt.block.SharedArray((threads,), ti.i32)
        first, tokens = row_of(row, valid, params)
        page, sinks, recent, k = params[P.page], params[P.sinks], params[P.recent], params[P.k]
        entries = ti.min((tokens + page - 1) // page, params[P.entries])
        lowest, room = find_lowest(thread, scores, first, entries, tokens, page, sinks, recent, k)
        to = params[P.out_first] + row * k * page
        all_above, all_equal = 0, 0  # of the parts before
        for part in range((entries + threads * 32 - 1) // (threads * 32)):
            begin = part * threads * 32
            above[thread], equal[thread] = ti.u32(0), ti.u32(0)
            ti.simt.block.sync()
            for n in range(ti.min(32, (entries - begin - thread + threads - 1) // threads)):
                entry = n * threads + thread
                key = key_of(scores[first + begin + entry], begin + entry, tokens, page, sinks, recent)
                bit = ti.u32(1) << ti.cast(entry % 32, ti.u32)
                if key > lowest:
                    ti.atomic_or(above[entry // 32], bit)
                elif key == lowest and room > 0:
                    ti.atomic_or(equal[entry // 32], bit)
            ti.simt.block.sync()
            above_bits, equal_bits = above[thread], equal[thread]
            more, same = ti.cast(ti.math.popcnt(above_bits), ti.i32), ti.cast(ti.math.popcnt(equal_bits), ti.i32)
            more_until, same_until = more, same
            above_until[thread], equal_until[thread] = more, same
            ti.simt.block.sync()
            for step in ti.static(range(threads.bit_length() - 1)):
                earlier = thread - ti.static(1 << step)
                more_before = ti.select(earlier >= 0, above_until[ti.max(earlier, 0)], 0)
                same_before = ti.select(earlier >= 0, equal_until[ti.max(earlier, 0)], 0)
                ti.simt.block.sync()
                more_until += more_before
                same_until += same_before
                above_until[thread], equal_until[thread] = more_until, same_until
                ti.simt.block.sync()
            equals = all_equal + same_until - same
            rank = all_above + more_until - more + ti.min(equals, room)
            if (above_bits | equal_bits) != ti.u32(0):
                for j in range(32):
                    bit = ti.u32(1) << ti.cast(j, ti.u32)
                    selected = (above_bits & bit) != ti.u32(0)
                    if (equal_bits & bit) != ti.u32(0):
                        selected = equals < room
                        equals += 1
                    if selected:
                        token = (begin + thread * 32 + j) * page
                        for offset in range(page):
                            out[to + rank * page + offset] = ti.select(token + offset < tokens, token + offset, -1)
                        rank += 1
            all_above += above_until[threads - 1]
            all_equal += equal_until[threads - 1]
            ti.simt.block.sync()
        written = (all_above + ti.min(all_equal, room)) * page
        for n in range((k * page - written - thread + threads - 1) // threads):
            out[to + written + n * threads + thread] = -1

    return select_row


def make_find_lowest(threads):
    """find_lowest(thread, scores, first, entries, tokens, page, sinks, recent, k) -> (the k-th highest key, room).

    `room` is how many entries of this key are among the k. If fewer than k entries may be chosen, both are 0. All
    threads of a block call it.
    """
    find_boundary = make_find_boundary(threads, BINS)

    @ti.func
    def find_lowest(thread, scores: ti.template(), first, entries, tokens, page, sinks, recent, k):
        counts = ti.simt.block.SharedArray((BINS,), ti.i32)
        boundary = ti.simt.block.SharedArray((2,), ti.i32)  # the digit, and how many entries of it are among the k
        lowest, room = ti.u32(0), k
        for digit in range(32 // DIGIT_BITS):
            shift = ti.cast(32 - DIGIT_BITS - digit * DIGIT_BITS, ti.u32)
            ti.simt.block.sync()
            if thread < BINS:
                counts[thread] = 0
            ti.simt.block.sync()
            # Neighbours often share a digit, so a thread adds the entries of a digit together.
            held, run = 0, 0
            for n in range((entries - thread + threads * AT_ONCE - 1) // (threads * AT_ONCE)):
                keys = ti.Vector([ti.u32(0) for _ in range(AT_ONCE)])
                for m in ti.static(range(AT_ONCE)):
                    entry = (n * AT_ONCE + m) * threads + thread
                    score = scores[first + ti.min(entry, entries - 1)]
                    key = key_of(score, entry, tokens, page, sinks, recent)
                    keys[m] = ti.select(entry < entries, key, ti.u32(0))
                for m in ti.static(range(AT_ONCE)):
                    differs = ((keys[m] ^ lowest) >> shift) >> ti.u32(DIGIT_BITS)
                    if keys[m] != ti.u32(0) and differs == ti.u32(0):
                        value = ti.cast((keys[m] >> shift) & ti.u32(BINS - 1), ti.i32)
                        if value != held:
                            if run > 0:
                                ti.atomic_add(counts[held], run)
                            held, run = value, 0
                        run += 1
            if run > 0:
                ti.atomic_add(counts[held], run)
            ti.simt.block.sync()
            find_boundary(thread, room, counts, boundary)
            if counts[0] >= room and room > 0:
                lowest = lowest | (ti.cast(boundary[0], ti.u32) << shift)
                room = boundary[1]
            else:
                room = 0
        return lowest, room

    return find_lowest
