"""Products on CPU of a few rows of numbers with lines of codes, such as the channels of a group of tokens.

The words of a line are the lanes of vectors: the code writes out each lane, and LLVM joins them. One mask takes the
same code out of each word, for all rows of a band. Sums stay in registers, so a pass over several rows takes only a few
codes of a word.
"""

from tikv.kernels.attention.cpu.coded import ENDED
from tikv.kernels.attention.cpu.loops import before
from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.codec import word_array
from tikv.kernels.groups import make_code, unit_of
from tikv.runtime import ti

BAND = 4  # at most so many rows share a code that was taken out of its word
LINE_WORDS = 16  # words of a cache line
SUMS = 64  # floats that are summed in registers: 8 vectors of most CPUs


def line_work_floats(lines, columns):
    """Floats that a worker needs: rows times scales, biases, a list of lines, sums."""
    return (BAND + 1) * (lines + 1) + BAND * columns


def make_line_sums(name, lines, columns, rows):
    """(list_lines, fetch, add_up) of real functions; they belong to one Taichi program, so they are not cached.

    `list_lines` writes down where each line begins, `fetch` reads the cache lines of codes beforehand, and `add_up`
    adds up the numbers of rows times the codes of each line, in the order in which codes come out.

    Args:
        name: of the format whose codes they are.
        lines: how many.
        columns: codes of a line.
        rows: that are computed together.
    """
    code, (count, words) = make_code(name), unit_of(name)
    units, CODES = columns // count, word_array(32)
    E = max(e for e in range(1, count + 1) if count % e == 0 and (e == 1 or e * rows * units <= SUMS))

    @ti.real_func
    def list_lines(work: FLOATS, to: ti.i32, uid: ti.i32):
        begin = before(to, lines + 1)
        for r in range(lines):
            work[begin + r] = ti.bit_cast(r * (units * words), ti.f32)
        work[begin + lines] = ti.bit_cast(ENDED, ti.f32)

    @ti.real_func
    def fetch(codes: CODES, work: FLOATS, first: ti.i32, to: ti.i32, uid: ti.i32):
        total = ti.u32(0)
        for line in range(lines * units * words // LINE_WORDS):
            total = total | codes[first + line * LINE_WORDS]
        work[to] = ti.bit_cast(total, ti.f32)

    @ti.real_func
    def add_up(codes: CODES, work: FLOATS, first: ti.i32, numbers: ti.i32, listed: ti.i32, to: ti.i32, uid: ti.i32):
        for part in ti.static(range(count // E)):
            sums = ti.Vector([ti.f32(0.0)] * (rows * E * units))
            at, entry, word = before(numbers, rows * lines), listed, ti.bit_cast(work[listed], ti.i32)
            while word != ENDED:  # if the loop had a count, LLVM would gather words of several lines
                begin = before(word + first, units * words)
                for u in ti.static(range(units)):
                    packed = [codes[begin + ti.static(u * words + w)] for w in range(words)]
                    for e in ti.static(range(E)):
                        x = code(packed, part * E + e)
                        for g in ti.static(range(rows)):
                            sums[(g * E + e) * units + u] += x * work[at + ti.static(g * lines)]
                at += 1
                entry += 1
                word = ti.bit_cast(work[entry], ti.i32)
            for g in ti.static(range(rows)):
                begin = before(to + (g * count + part * E) * units, E * units)
                for n in ti.static(range(E * units)):
                    work[begin + ti.static(n)] = sums[g * E * units + n]

    return list_lines, fetch, add_up
