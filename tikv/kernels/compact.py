"""Moves rows of a head down in place: row j gets the content of row index[j], for ascending indices, in one launch.

Rows in pages have no natural order: the index then holds a pair for each row, its source and its destination, in an
order in which they may be moved one by one.

Since index[j] >= j, moving a head's rows in order never reads a row that was already written. So heads are independent,
and so are the words of a row, but the rows of a head are not. On CPU a thread moves a head, and also reads the rows
between those that it keeps, if that is faster (`make_wants_gaps`). On Vulkan and Metal a thread moves one word of each
row of a head, reads `HELD` of them before it writes one, and needs no barrier. On CUDA, where that would not keep
memory busy, the threads of a block share a head's words and neighbouring rows, with a barrier between reading and
writing: what a block reads in a later round lies above everything that it has written.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.address import S, index_array
from tikv.kernels.codec import word_array
from tikv.kernels.lanes import BLOCK, LEAST_ITERATIONS, make_loop
from tikv.runtime import ti

HELD = 16  # words that a GPU thread holds at once
COLUMNS, EACH = 8, 2  # neighbouring threads on CUDA, and words of a row for each: both share the work on an index
STREAMS = 4  # K, V, and the scales of both
LINE = 64  # bytes that a CPU core fetches at once
GAP = 1024  # bytes between two rows of a head, on average, above which a CPU does not read them
READ_AHEAD = 1024  # bytes of kept rows by which a CPU reads ahead of the rows that it moves
ENTRIES = len(S)  # strides of an array; a constant, since Taichi warns about `len` in a kernel


class CompactParams(NamedTuple):
    """Numbers of a launch; the index array is read at group, head and row strides of its own."""

    iterations: int = 0
    groups: int = 1
    heads: int = 1
    tokens: int = 0  # rows that each head keeps, at most
    limit: int = 0  # rows that each head has
    workers: int = 1  # threads of a CPU
    index_group: int = 0
    index_head: int = 0
    index_step: int = 0
    index_first: int = 0
    write_read: int = 0  # never 1, but the compiler does not know that, so it keeps reads that serve only for speed


C = CompactParams(*range(len(CompactParams._fields)))
PARAMS = ti.types.vector(len(C), ti.i32)
ROW_STRIDES = ti.types.vector(STREAMS * ENTRIES, ti.i32)


class Words(NamedTuple):
    """How one array is moved: bits of a word, and words of a row (0 on CPU, which counts at run time)."""

    bits: int
    units: int


class RowShape(NamedTuple):
    """How threads share the rows of a head: parts of a row, threads of a part, words of each, rows side by side."""

    parts: int
    columns: int
    words: int
    rows: int


def shape_of(units, barrier):
    """Threads for rows of so many words: a block for a part of a head's rows, or a thread for a word of them."""
    if not barrier:
        return RowShape(units, 1, 1, 1)
    columns = min(units, COLUMNS)
    words = min(EACH, -(-units // columns))
    return RowShape(-(-units // (columns * words)), columns, words, BLOCK // columns)


def threads_of(units, barrier):
    """The number of threads that move the rows of one head."""
    return shape_of(units, barrier).parts * (BLOCK if barrier else 1)


def make_compact(style, serial, barrier, streams, index_bits, placed=False):
    """compact(k, v, k_scale, v_scale, index, units, strides, params), in place; absent arrays repeat the first.

    Args:
        style: "cpu", "cuda" or "spirv".
        serial: on CPU, run in the calling thread.
        barrier: on a GPU, whether a block shares a head's rows.
        streams: a `Words` for each array.
        index_bits: 32 or 64.
        placed: each row's index is followed by its destination's.
    """
    A, B, D, E = (word_array(words.bits) for words in (*streams, *[streams[0]] * (STREAMS - len(streams))))
    count = len(streams)
    IX = index_array(index_bits)
    UNITS = ti.types.vector(STREAMS, ti.i32)
    if style == "cpu":
        uid = zlib.crc32(repr((serial, streams, index_bits, placed)).encode()) >> 1
        move = [make_move_head(words.bits, IX, uid + i, placed) for i, words in enumerate(streams)]
        every = 1 if serial else LEAST_ITERATIONS

        @ti.func
        def body(i, arrays: ti.template(), index: ti.template(), units, strides, params):
            """Moves a worker's heads, one array after the other."""
            lanes = params[C.groups] * params[C.heads]
            if i % every == 0:
                for turn in range((lanes - i // every + params[C.workers] - 1) // params[C.workers]):
                    lane = i // every + turn * params[C.workers]
                    for n in ti.static(range(count)):
                        row, at = find_head(lane, n * ENTRIES, strides, params)
                        token = strides[n * ENTRIES + S.token]
                        move[n](arrays[n], index, row, token, units[n], at, params[C.index_step], params[C.tokens],
                                params[C.limit], params[C.write_read], uid + n)  # fmt: skip
    else:
        moves = [make_move_words(shape_of(words.units, barrier), words, barrier, placed) for words in streams]
        threads = [threads_of(words.units, barrier) for words in streams]

        @ti.func
        def body(i, arrays: ti.template(), index: ti.template(), units, strides, params):
            """Moves a thread's words of an array."""
            lanes = params[C.groups] * params[C.heads]
            rest = i
            for n in ti.static(range(count)):
                array_threads = lanes * threads[n]
                if rest >= 0 and rest < array_threads:
                    row, at = find_head(rest // threads[n], n * ENTRIES, strides, params)
                    moves[n](arrays[n], index, row, strides[n * ENTRIES + S.token], rest % threads[n], at, params)
                rest = rest - array_threads

    loop = make_loop(style, serial, body, C.iterations)

    @ti.kernel
    def compact(a: A, b: B, d: D, e: E, index: IX, units: UNITS, strides: ROW_STRIDES, params: PARAMS):
        loop(a, params, ((a, b, d, e), index, units, strides, params))

    return compact


@ti.func
def find_head(lane, first, strides, params):
    """(the first word of a head's rows, its first index)."""
    b = lane // params[C.heads]
    h = lane % params[C.heads]
    row = strides[first + S.first] + b * strides[first + S.sequence] + h * strides[first + S.head]
    return row, params[C.index_first] + b * params[C.index_group] + h * params[C.index_head]


def make_wants_gaps(bits, IX, uid):
    """CPU: wants_gaps(...): 1 if moving a head is faster when the rows between those that it keeps are read as well.

    A core prefetches only if it reads in order: reading half of the rows of 256 bytes takes longer than reading all of
    them. So it is faster if at most three fifths of the rows are dropped, in short gaps.
    """

    @ti.real_func
    def wants_gaps(index: IX, token: ti.i32, units: ti.i32, at: ti.i32, step: ti.i32, tokens: ti.i32, limit: ti.i32,
                   number: ti.i32) -> ti.i32:  # fmt: skip
        rows, skipped, gaps, last = 0, 0, 0, -1
        if token == units and units * ti.static(bits // 8) >= LINE:
            for j in range(tokens):
                s = ti.cast(index[at + j * step], ti.i32)
                if s > last and s < limit:
                    rows += 1
                    skipped += s - last - 1
                    gaps += ti.min(s - last - 1, 1)
                    last = s
        wants = 0
        if skipped > 0 and 2 * ti.cast(skipped, ti.i64) <= 3 * ti.cast(rows, ti.i64):
            if ti.cast(skipped, ti.i64) * units * ti.static(bits // 8) <= ti.cast(gaps, ti.i64) * GAP:
                wants = 1
        return wants

    return wants_gaps


def make_move_head(bits, IX, uid, placed):
    """CPU: move_head(...): all rows of a head. The number distinguishes kernels, as in `kernels.copy`."""
    A = word_array(bits)
    word, line = A.dtype, LINE * 8 // bits
    wants_gaps = make_wants_gaps(bits, IX, uid)

    @ti.real_func
    def move_head(a: A, index: IX, row: ti.i32, token: ti.i32, units: ti.i32, at: ti.i32, step: ti.i32,
                  tokens: ti.i32, limit: ti.i32, write_read: ti.i32, number: ti.i32):  # fmt: skip
        ahead, end, read = 0, 0, ti.cast(0, word)
        if ti.static(not placed):
            if wants_gaps(index, token, units, at, step, tokens, limit, number) == 1:
                ahead = 1 + ti.static(READ_AHEAD * 8 // bits) // units
        for j in range(tokens):
            s, d = ti.cast(index[at + j * step], ti.i32), j
            if ti.static(placed):
                d = ti.cast(index[at + j * step + 1], ti.i32)
            if ahead > 0:
                later = ti.cast(index[at + ti.min(j + ahead, tokens - 1) * step], ti.i32)
                if later >= 0 and later < limit:
                    lines = ((later + 1) * token - end + line - 1) // line
                    for n in range(lines):
                        read = read ^ a[row + ti.min(end + n * line, (later + 1) * token - 1)]
                    end += ti.max(lines, 0) * line
            moves = s > d
            if ti.static(placed):
                moves = s >= 0 and s != d
            if moves and s < limit:
                source, target = row + s * token, row + d * token
                for u in range(units):
                    a[target + u] = a[source + u]
        if write_read == 1:
            a[row] = read

    return move_head


def make_move_words(shape, words, barrier, placed):
    """GPU: move_words(...): a thread's words of a head's rows, `HELD` words at a time."""
    _, columns, each, side = shape
    word, rows = word_array(words.bits).dtype, HELD // each
    whole = words.units % (columns * each) == 0

    @ti.func
    def moves(source, target):
        moved = source > target
        if ti.static(placed):
            moved = source != target
        return moved

    @ti.func
    def is_of_row(column, i: ti.template()):
        """Whether a row has the i-th of a thread's words."""
        inside = True
        if ti.static(not whole):
            inside = column + i * columns < words.units
        return inside

    @ti.func
    def move_words(a: ti.template(), index: ti.template(), row, token, thread, at, params):
        part, side_row = thread, 0
        column = part
        if ti.static(barrier):
            part = thread // BLOCK
            side_row = (thread % BLOCK) // columns
            column = part * (columns * each) + thread % BLOCK % columns
        # Threads without work take no row, but stop at the barrier with the others.
        taking = side_row < side and column < words.units
        tokens = params[C.tokens]
        for turn in range((tokens + side * rows - 1) // (side * rows)):
            held = ti.Vector.zero(word, HELD)
            source, target = ti.Vector.zero(ti.i32, rows), ti.Vector.zero(ti.i32, rows)
            for n in ti.static(range(rows)):
                j = (turn * rows + n) * side + side_row
                if ti.static(not placed):
                    target[n] = j
                if taking and j < tokens:
                    s = ti.cast(index[at + j * params[C.index_step]], ti.i64)
                    # Unsigned, see `kernels.address`: a negative index is above the limit.
                    if ti.cast(s, ti.u64) < ti.cast(params[C.limit], ti.u64):
                        source[n] = ti.cast(s, ti.i32)
                        if ti.static(placed):
                            target[n] = ti.cast(index[at + j * params[C.index_step] + 1], ti.i32)
            for n in ti.static(range(rows)):
                if moves(source[n], target[n]):
                    for i in ti.static(range(each)):
                        if is_of_row(column, i):
                            held[ti.static(n * each + i)] = a[row + source[n] * token + column + ti.static(i * columns)]
            if ti.static(barrier):
                ti.simt.block.sync()
            for n in ti.static(range(rows)):
                if moves(source[n], target[n]):
                    for i in ti.static(range(each)):
                        if is_of_row(column, i):
                            a[row + target[n] * token + column + ti.static(i * columns)] = held[ti.static(n * each + i)]

    return move_words
