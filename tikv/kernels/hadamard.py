"""Rotates rows by signs and a Hadamard matrix, which spreads a few large columns over many columns.

The seed None stands for a rotation without signs, that of KVarN; it is its own inverse.

A row of D columns is divided into blocks of n, the largest power of two that divides D: each column gets its sign, each
block is multiplied by the Hadamard matrix in Sylvester's order, and then by n ** -0.5. To rotate back, signs come last;
both are exact except for the rounding of sums. Numbers below 2**-96 count as 0. In each step two numbers become their
sum and their difference, first neighbours, then those 2, 4, 8 apart: this is the order of `reference.hadamard`, on
which float32 results depend.
"""

import functools
import zlib
from typing import NamedTuple

from tikv.kernels.codec import SIZE, element_array, make_load, make_store
from tikv.kernels.exact import apart, make_product, without_small
from tikv.kernels.lanes import ALL, BLOCK, make_loop
from tikv.runtime import ti

HELD = 16  # columns of a row that a GPU thread holds by default
MIX = (0x9E3779B1, 0x85EBCA77, 0x7FEB352D, 0x846CA68B)  # odd numbers by which the signs are drawn


@functools.cache
def make_sign_of(seed):
    """sign_of(column): the sign bit of a column."""
    start = (seed or 0) * MIX[1] & 0xFFFFFFFF

    @ti.func
    def no_sign(column):
        return ti.u32(0)

    @ti.func
    def sign_of(column):
        x = ti.cast(column, ti.u32) * ti.u32(MIX[0]) + ti.u32(start)
        x = (x ^ (x >> ti.u32(16))) * ti.u32(MIX[2])
        x = (x ^ (x >> ti.u32(15))) * ti.u32(MIX[3])
        return (x ^ (x >> ti.u32(16))) & ti.u32(0x80000000)

    return no_sign if seed is None else sign_of


@ti.func
def with_sign(x, sign):
    """x, or -x if the sign bit is set."""
    return ti.bit_cast(ti.bit_cast(x, ti.u32) ^ sign, ti.f32)


def steps_of(n):
    """The number of steps for a block of n."""
    return n.bit_length() - 1


def local_row(n):
    """The type of a block of a row that a function of the CPU holds."""
    return ti.types.vector(n, ti.f32)


@ti.func
def add_pair(a: ti.template(), b: ti.template(), i):
    """A step's sum and difference of neighbours, which go to the two halves of another vector.

    So LLVM vectorises the loop, and after all steps each number is in its place. The loops over pairs are in the real
    functions that hold the vectors, since those cannot call a function with a loop.
    """
    x, y = a[2 * i], a[2 * i + 1]
    b[i] = x + y
    b[i + ti.static(b.n // 2)] = x - y


class LaneColumns(NamedTuple):
    """The columns that the threads of a block hold: `columns[lane][i]` is the column of a thread's number i."""

    columns: tuple[tuple[int, ...], ...]

    @property
    def lanes(self):
        """Threads of a block."""
        return len(self.columns)

    @property
    def held(self):
        """Numbers of a thread."""
        return len(self.columns[0])

    def partner(self, distance):
        """(lane distance, the partner of each own number) for columns at a distance; one of the two is trivial.

        Examples:
            >>> LaneColumns(((0, 1), (2, 3))).partner(1), LaneColumns(((0, 1), (2, 3))).partner(2)
            ((0, (1, 0)), (1, (0, 1)))
        """
        holders = {column: (lane, i) for lane, of in enumerate(self.columns) for i, column in enumerate(of)}
        pairs = {
            (lane ^ holders[column ^ distance][0], tuple(holders[c ^ distance][1] for c in of))
            for lane, of in enumerate(self.columns)
            for column in of
        }
        (pair,) = pairs
        return pair


def columns_in_order(n):
    """Threads that hold `HELD` neighbouring columns each."""
    return LaneColumns(tuple(tuple(range(first, first + HELD)) for first in range(0, n, HELD)))


def columns_in_turn(n, each):
    """Threads that hold `HELD` columns each, `each` neighbours in turn: together they access words side by side.

    Examples:
        >>> [of[:5] for of in columns_in_turn(32, 4).columns]
        [(0, 1, 2, 3, 8), (4, 5, 6, 7, 12)]
    """
    lanes = n // HELD
    firsts = [range(lane * each, n, lanes * each) for lane in range(lanes)]
    return LaneColumns(tuple(tuple(first + i for first in of for i in range(each)) for of in firsts))


@functools.cache
def make_turn_lanes(style, of_lanes, seed, back=False):
    """GPU: turn(thread, lane, values, row) -> a thread's rotated numbers; all threads of a block call it together.

    `lane` is its place among the threads of the row, whose blocks lie one after another; `row` is as in `exact`.
    """
    lanes, held = of_lanes.lanes, of_lanes.held
    n = lanes * held
    norm, product, sign_of = n**-0.5, make_product(style), make_sign_of(seed)
    partners = [of_lanes.partner(1 << z) for z in range(steps_of(n))]
    columns = [of_lanes.columns[0][i] for i in range(held)]
    bits = [of_lanes.columns[1 << b][0] ^ of_lanes.columns[0][0] for b in range(steps_of(lanes))]

    @ti.func
    def column_of_lane(lane):
        """The column of a lane's number 0, minus that of lane 0."""
        column = 0
        for b in ti.static(range(len(bits))):
            column = column + ((lane >> b) & 1) * bits[b]
        return column

    @ti.func
    def summed(x, row):
        """A sum that is rounded before it is used."""
        rounded = x
        if ti.static(style == "spirv"):
            rounded = apart(x, row)
        return rounded

    @ti.func
    def change_signs(lane, values):
        signed = values
        first = lane // lanes * n + column_of_lane(lane % lanes)
        for i in ti.static(range(held)):
            signed[i] = with_sign(values[i], sign_of(first ^ columns[i]))
        return signed

    @ti.func
    def exchanged(thread, values, distance: ti.template()):
        """The numbers of the thread at a distance."""
        others = values
        if ti.static(style == "cuda"):
            for i in ti.static(range(held)):
                other = ti.simt.warp.shfl_xor_i32(ti.u32(ALL), ti.bit_cast(values[i], ti.i32), distance)
                others[i] = ti.bit_cast(other, ti.f32)
        else:
            shared = ti.simt.block.SharedArray((BLOCK * held,), ti.f32)
            in_block = thread % BLOCK
            ti.simt.block.sync()
            for i in ti.static(range(held)):
                shared[i * BLOCK + in_block] = values[i]
            ti.simt.block.sync()
            for i in ti.static(range(held)):
                others[i] = shared[i * BLOCK + (in_block ^ distance)]
        return others

    @ti.func
    def turn(thread, lane, values, row):
        rotated = values
        for i in ti.static(range(held)):
            rotated[i] = without_small(values[i])
        if ti.static(not back):
            rotated = change_signs(lane, rotated)
        # Both kinds of steps have one form: with two forms, Taichi loses the steps after a shuffle on CUDA.
        for distance, partner in ti.static(partners):
            before, others = rotated, rotated
            if ti.static(distance > 0):
                others = exchanged(thread, before, distance)
            else:
                others = ti.Vector([before[partner[i]] for i in range(held)])
            for i in ti.static(range(held)):
                upper = (lane & distance) > 0
                if ti.static(distance == 0):
                    upper = i > partner[i]
                rotated[i] = summed(ti.select(upper, others[i] - before[i], before[i] + others[i]), row)
        for i in ti.static(range(held)):
            rotated[i] = product(rotated[i], ti.f32(norm), row)
        if ti.static(back):
            rotated = change_signs(lane, rotated)
        return rotated

    return turn


class TurnParams(NamedTuple):
    """Numbers of a launch that rotates rows: items of work, extents, strides and first entries."""

    items: int = 0
    rows: int = 0
    heads: int = 1
    tokens: int = 1
    sequence: int = 0
    head: int = 0
    token: int = 0
    first: int = 0
    to_first: int = 0
    terms: int = 1  # rows that are added up, and the step from one to the next
    term: int = 0


P = TurnParams(*range(len(TurnParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_turn_rows(style, serial, code, to_code, width, n, seed, sums=False):
    """turn_rows(source, target, params): rotates rows (sequence, head, token) of any strides into contiguous rows.

    Args:
        style, serial: as in `lanes.make_loop`.
        code, to_code: dtype codes of source and target.
        width: columns of a row.
        n: columns of a block.
        seed: seed of the signs, or None.
        sums: several rows are added up before they are rotated.
    """
    A, B = element_array(code), element_array(to_code)
    load, store = make_load(code, 1, SIZE[code] * 8), make_store(to_code, 1, SIZE[to_code] * 8, style)
    steps, sign_of, ROW = steps_of(n), make_sign_of(seed), local_row(n)
    turn = None if style == "cpu" else make_turn_lanes(style, columns_in_order(n), seed)
    uid = zlib.crc32(repr((code, to_code, width, n, seed, sums)).encode()) >> 1
    lanes = width // HELD

    @ti.func
    def source_of(r, params):
        t, rest = r % params[P.tokens], r // params[P.tokens]
        h, b = rest % params[P.heads], rest // params[P.heads]
        return params[P.first] + b * params[P.sequence] + h * params[P.head] + t * params[P.token]

    @ti.real_func
    def turn_row(a: A, b: B, at: ti.i32, to: ti.i32, terms: ti.i32, term: ti.i32, number: ti.i32):
        row, other = ROW(0.0), ROW(0.0)
        for block in range(width // n):
            first = block * n
            for i in range(n):
                x = load(a, at + first + i)[0]
                if ti.static(sums):
                    for more in range(1, terms):
                        x += load(a, at + more * term + first + i)[0]
                x = with_sign(without_small(x), sign_of(first + i))
                if ti.static(steps % 2 == 1):
                    other[i] = x
                else:
                    row[i] = x
            for z in ti.static(range(steps)):
                for i in range(n // 2):
                    if ti.static((steps - z) % 2 == 1):
                        add_pair(other, row, i)
                    else:
                        add_pair(row, other, i)
            for i in range(n):
                store(b, to + first + i, ti.Vector([row[i] * ti.f32(ti.static(n**-0.5))]), ti.f32(1.0))

    @ti.func
    def turn_item(i, arrays: ti.template(), params):
        a, b = ti.static(arrays)
        if ti.static(style == "cpu"):
            to = params[P.to_first] + i * width
            turn_row(a, b, source_of(i, params), to, params[P.terms], params[P.term], uid)
        else:
            r, lane = i // lanes, i % lanes
            inside = r < params[P.rows]
            at = source_of(ti.select(inside, r, 0), params) + lane * HELD
            values = ti.Vector.zero(ti.f32, HELD)
            for e in ti.static(range(HELD)):
                values[e] = load(a, at + e)[0]
            if ti.static(sums):
                for more in range(1, params[P.terms]):
                    for e in ti.static(range(HELD)):
                        values[e] += load(a, at + more * params[P.term] + e)[0]
            values = turn(i, lane, values, at)
            if inside:
                to = params[P.to_first] + r * width + lane * HELD
                for e in ti.static(range(HELD)):
                    store(b, to + e, ti.Vector([values[e]]), ti.f32(1.0))

    loop = make_loop(style, serial, turn_item, P.items)

    @ti.kernel
    def turn_rows(source: A, target: B, params: PARAMS):
        loop(source, params, ((source, target), params))

    return turn_rows
