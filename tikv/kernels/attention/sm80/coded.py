"""Fragments of tensor cores from codes of 8 or 4 bits: int8 with a scale a row, and groups with a scale, maybe a bias.

A code becomes a half by its bits alone. Codes of K are the lowest bits of one, 2 ** -24 of what they are, and meet the
queries so; their sums over a group, in float32, get the group's scale and bias. Queries become halves by a power of two
for each row, which the logits get back. Codes of V are placed below the bits of 1024, of which that is then taken away;
they become the numbers that they stand for, rounded to halves, and meet the weights as V of float16 does.

A lane's words of a group hold columns that lie side by side in four lanes of K, in eight of V; which columns a product
takes together is free.
"""

import math
from typing import NamedTuple

import numpy as np

from tikv.formats import FLOAT_RULES, OF_CODE, GroupFormat
from tikv.kernels.attention.addresses import make_query_row, make_slot_offsets
from tikv.kernels.attention.parameters import P, S, X
from tikv.kernels.attention.sm80.instructions import (
    INFINITE,
    ROWS,
    Fragments,
    instructions,
    lane_bits,
    make_add_product,
    make_clear,
    make_weigh,
)
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.softmax import make_logit
from tikv.kernels.attention.task import T
from tikv.kernels.codec import WORD, make_bits_to_f32, scale_array, word_array
from tikv.kernels.groups import has_halves, make_column, make_place
from tikv.kernels.lanes import ALL, make_row_max
from tikv.runtime import ti

BITS = (8, 4)  # of a code
QUERIES = ("f16", "bf16")
WIDTHS = range(64, 129, 32)  # of K and V: of wider ones LLVM makes no single function
# By a format's rule: what is taken from a code without a sign, and the bits of a word of 32 that are turned to get one.
ZEROS = {"int8": (128, 0x80808080), "affine": (0, 0), "q8_0": (128, 0x80808080), "q4_0": (8, 0), "float8": (0, 0)}
ZEROS |= dict.fromkeys(FLOAT_RULES, (0, 0))
WIDEST_READ = 16  # bytes
LEAST = 16  # the exponent field of the smallest number that counts as a row's largest: its inverse is a float32 too
LARGE = 9  # where some number would leave float16's range, all are 2 ** -`LARGE` of what they are


class Codes(NamedTuple):
    """How the codes of a format lie."""

    bits: int
    zero: int  # which is taken from a code, as a number without a sign
    flip: int  # the bits of a word of 32 that are turned to have numbers without signs
    group: int  # codes of a row that share a scale
    numbers: int  # of a group: a scale, a scale and a bias, or none


class Pieces(NamedTuple):
    """The parts of a row that a lane reads: each as many neighbouring words of 32 bits, in every so many lanes."""

    count: int
    words: int
    codes: int  # of a piece

    @property
    def bits(self) -> int:
        """Bits of the words in which a lane reads a piece; 0 if it is not a whole word of 32 bits."""
        return 64 if self.words >= 2 else 32 * self.words


def codes_of(cache: str, width: int) -> Codes | None:
    """How codes of a cache lie in rows of a width; None for what is not codes that tensor cores take."""
    row = OF_CODE.get(cache)
    if row is None or row.bits not in BITS or row.rule not in ZEROS:
        return None
    group, numbers = (row.group, row.numbers) if isinstance(row, GroupFormat) else (width, row.numbers_of(width))
    return Codes(row.bits, *ZEROS[row.rule], group, numbers)


def pieces_of(codes: Codes, width: int, lanes: int, most: int) -> Pieces:
    """The pieces of a row over so many lanes, in each of which lie `most` columns at most that share a scale."""
    each = math.gcd(WIDEST_READ, math.gcd(most, width) * codes.bits // 8 // lanes)
    return Pieces(width * codes.bits // 8 // lanes // max(1, each), each // 4, each * 8 // codes.bits)


def pieces(cache: str, width: int, width_v: int) -> tuple[Pieces, Pieces]:
    """The pieces of K, whose four lanes share a group, and of V, whose lanes need not."""
    of_k, of_v = codes_of(cache, width), codes_of(cache, width_v)
    return pieces_of(of_k, width, 4, of_k.group), pieces_of(of_v, width_v, 8, width_v)


def word_bits(cache: str, width: int, width_v: int) -> tuple[int, int]:
    """Bits of the words in which K and V are read; 0 if a lane's piece is not a whole word of 32 bits."""
    of_k, of_v = pieces(cache, width, width_v)
    return of_k.bits, of_v.bits


def numbers_arrays(c):
    """The types of the arrays of K's scales and V's: a scale and its bias are read together."""
    return (word_array(32) if codes_of(c.cache, c.width).numbers == 2 else scale_array(c.scale),) * 2


def halves(x: float) -> int:
    """Two equal halves."""
    return int(np.float16(x).view(np.uint16)) * 0x10001


def make_fragments(x, c):
    """The `Fragments` of a tile for choices whose K and V are codes."""
    key, value = codes_of(c.cache, c.width), codes_of(c.cache, c.width_v)
    of_k, of_v = pieces(c.cache, c.width, c.width_v)
    groups = c.width // key.group
    queries = 2 * (c.width // KEYS) + 2 * groups + 2
    return Fragments(
        keys=2 * (of_k.count * of_k.words + groups),
        values=4 * of_v.count * (of_v.words + 1),
        queries=queries * x.row_tiles,
        results=4 * (c.width_v // KEYS) * x.row_tiles + (not c.invariant),
        load_queries=make_load_queries(x, key, of_k, c),
        load_keys=make_load_keys(key, of_k, c),
        load_values=make_load_values(value, of_v, c),
        scores=make_scores(x, key, of_k, c),
        clear=make_clear(4 * of_v.count * of_v.words, of_v.count, INFINITE["f16"], c),
        add_values=make_add_values(x, value, of_v, c),
        settle=make_settle(x, c),
        column_of=make_column_of(of_v, c),
        apart=16 if has_halves(c.cache) else 1,
    )


def pairs_of(codes: Codes) -> list[tuple[int, int]]:
    """Which codes of a word the registers that it becomes hold."""
    return [(0, 1), (2, 3)] if codes.bits == 8 else [(0, 4), (1, 5), (2, 6), (3, 7)]


def times_of(codes: Codes, n: int) -> int:
    """How many times its codes register n of a word is, as `make_to_small_halves` leaves them."""
    return 16 if codes.bits == 4 and n % 2 else 1


def make_load_halves(x, piece, pairs, shares, c, top=15):
    """load_halves(g, row, lane, start, task, q, qf, ...): fragments of tile g of Q^T, in the order of K's codes.

    A row is multiplied by a power of two that gives its largest number the exponent `top`, and then by the `shares` of
    its registers, over and over. Returns the exponent that this number had, as float32 has it.
    """
    query_row, column, to_f32 = make_query_row(c), make_column(c.cache), make_bits_to_f32(c.query)
    pack, row_max, NK = instructions().pack_f16, make_row_max("cuda", 4), c.width // KEYS
    # Of each register, the places in a row of its two codes, less the lane's share.
    places = [
        (
            n * 4 * piece.codes + w * piece.codes // piece.words + low,
            n * 4 * piece.codes + w * piece.codes // piece.words + high,
        )
        for n in range(piece.count)
        for w in range(piece.words)
        for low, high in pairs
    ]
    factors, most = [shares[n % len(shares)] for n in range(2 * NK)], min(253, 253 + top)

    @ti.func
    def load_halves(g: ti.template(), row, lane, start, task, q: ti.template(), qf: ti.template(), strides, params):
        r = ti.min(row + g * ROWS + (lane >> 2), params[P.queries] * c.group - 1)
        at = query_row(task[T.sequence], task[T.head], r, strides, params) + start
        share = (lane & 3) * piece.codes
        largest = ti.u32(0)
        for n in ti.static(range(2 * NK)):
            low = ti.cast(q[at + column(share + ti.static(places[n][0]))], ti.u32)
            high = ti.cast(q[at + column(share + ti.static(places[n][1]))], ti.u32)
            qf[ti.static(g * 2 * NK + n)] = low | (high << ti.u32(16))
            largest = ti.max(largest, ti.max(low & ti.u32(0x7FFF), high & ti.u32(0x7FFF)))
        largest = row_max(lane, largest)
        exponent = ti.min(ti.max(ti.bit_cast(to_f32(largest), ti.u32) >> ti.u32(23), ti.u32(LEAST)), ti.u32(most))
        power = ti.bit_cast((ti.u32(127 + top + 127) - exponent) << ti.u32(23), ti.f32)
        for n in ti.static(range(2 * NK)):
            word = qf[ti.static(g * 2 * NK + n)]
            low_half = to_f32(word & ti.u32(0xFFFF)) * power * ti.f32(factors[n])
            high_half = to_f32(word >> ti.u32(16)) * power * ti.f32(factors[n])
            both = ti.u32(0)
            pack(both, low_half, high_half)
            qf[ti.static(g * 2 * NK + n)] = both
        return exponent

    return load_halves


def make_load_queries(x, codes, piece, c):
    """load_queries(row, lane, start, task, q, k_scale, qf, ...): a lane's fragments of Q^T, in the order of K's codes.

    Where a register of codes is of 16 times its codes, a row is multiplied by a 16th. Behind the fragments come, of two
    rows of each tile, the sums over groups, 2 ** -24 of them, and what logits lack for the power of two of
    `make_load_halves` and for codes that are as small.
    """
    multiply = instructions().multiply_f16
    NK, GROUPS, G = c.width // KEYS, c.width // codes.group, x.row_tiles
    STEPS, SUMS = codes.group // KEYS, 2 * NK * G
    POWERS = SUMS + 2 * GROUPS * G
    pairs = pairs_of(codes)
    shares = [1.0 / times_of(codes, n) for n in range(len(pairs))]
    ones = [halves(times_of(codes, n)) for n in range(2)]  # which undo them
    load_halves = make_load_halves(x, piece, pairs, shares, c)

    @ti.func
    def load_queries(row, lane, start, task, q: ti.template(), k_scale: ti.template(), qf: ti.template(), strides,
                     params):  # fmt: skip
        for g in ti.static(range(G)):
            exponent = load_halves(g, row, lane, start, task, q, qf, strides, params)
            for e in ti.static(range(2)):
                lacking = lane_bits(exponent, (lane & 3) * 8 + e * 4)
                qf[ti.static(POWERS + 2 * g + e)] = ti.min(lacking + ti.u32(24 - 15), ti.u32(254)) << ti.u32(23)
            near, far = ti.u32(ones[0]), ti.u32(ones[1])
            for j in ti.static(range(GROUPS)):
                s = [ti.f32(0.0) for _ in range(4)]
                for n in ti.static(range(STEPS)):
                    b = ti.static(g * 2 * NK + 2 * (j * STEPS + n))
                    multiply(s[0], s[1], s[2], s[3], near, near, far, far, qf[b], qf[ti.static(b + 1)])
                for e in ti.static(range(2)):
                    qf[ti.static(SUMS + 2 * (g * GROUPS + j) + e)] = ti.bit_cast(s[e] * ti.f32(2.0**-24), ti.u32)

    return load_queries


def make_scales_at(codes, first, c):
    """scales_at(slot, task, strides): where the numbers of a row's groups begin, as `numbers_arrays` count them."""
    _, _, scale_offset = make_slot_offsets(c)

    @ti.func
    def scales_at(slot, task, strides):
        at = strides[first] + task[T.scale_first] + scale_offset(slot, strides)
        if ti.static(codes.numbers == 2):
            at = at >> 1
        return at

    return scales_at


def make_read(piece):
    """read(array, first, at, to): a piece's words of 32 bits, of which the first is word `first` of the array."""

    @ti.func
    def read(array: ti.template(), first, to: ti.template(), at: ti.template()):
        if ti.static(piece.bits == 32):
            for w in ti.static(range(piece.words)):
                to[ti.static(at + w)] = array[first + w]
        else:
            for w in ti.static(range(piece.words // 2)):
                word = array[first + w]
                to[ti.static(at + 2 * w)] = ti.cast(word, ti.u32)
                to[ti.static(at + 2 * w + 1)] = ti.cast(word >> ti.u64(32), ti.u32)

    return read


def make_load_keys(codes, piece, c):
    """load_keys(lane, slots, task, k, k_scale, kf, strides): start to read a lane's pieces of two keys.

    Behind those of both come their groups' numbers, if they have any.
    """
    read, scales_at = make_read(piece), make_scales_at(codes, S.k_scale_first, c)
    k_offset, _, _ = make_slot_offsets(c)
    WORDS, GROUPS = piece.count * piece.words, c.width // codes.group
    EACH = piece.words * 32 // piece.bits  # words of the array

    @ti.func
    def load_keys(lane, slots: ti.template(), task, k: ti.template(), k_scale: ti.template(), kf: ti.template(),
                  strides):  # fmt: skip
        for i in ti.static(range(2)):
            row = task[T.k_first] + k_offset(slots[i], strides)
            for n in ti.static(range(piece.count)):
                read(k, row + ((lane & 3) + ti.static(4 * n)) * EACH, kf, ti.static(i * WORDS + n * piece.words))
            if ti.static(codes.numbers > 0):
                at = scales_at(slots[i], task, strides)
                for j in ti.static(range(GROUPS)):
                    kf[ti.static(2 * WORDS + i * GROUPS + j)] = ti.cast(k_scale[at + j], ti.u32)

    return load_keys


def make_load_values(codes, piece, c):
    """load_values(lane, slots, task, v, v_scale, vf, strides): the same of four rows of V; numbers by piece."""
    read, scales_at = make_read(piece), make_scales_at(codes, S.v_scale_first, c)
    _, v_offset, _ = make_slot_offsets(c)
    WORDS, EACH = piece.count * piece.words, piece.words * 32 // piece.bits

    @ti.func
    def load_values(lane, slots: ti.template(), task, v: ti.template(), v_scale: ti.template(), vf: ti.template(),
                    strides):  # fmt: skip
        for i in ti.static(range(4)):
            row, at = task[T.v_first] + v_offset(slots[i], strides), 0
            if ti.static(codes.numbers > 0):
                at = scales_at(slots[i], task, strides)
            for n in ti.static(range(piece.count)):
                which = (lane >> 2) + ti.static(8 * n)
                read(v, row + which * EACH, vf, ti.static(i * WORDS + n * piece.words))
                if ti.static(codes.numbers > 0):
                    group = ti.cast(ti.cast(which * piece.codes, ti.u32) // ti.u32(codes.group), ti.i32)
                    vf[ti.static(4 * WORDS + i * piece.count + n)] = ti.cast(v_scale[at + group], ti.u32)

    return load_values


def make_value_at(c):
    """value_at(slot, column, task, v, v_scale, strides): a number of V."""
    codes, place, to_f32 = codes_of(c.cache, c.width_v), make_place(c.cache), make_bits_to_f32(c.scale)
    scales_at, (_, v_offset, _) = make_scales_at(codes, S.v_scale_first, c), make_slot_offsets(c)
    mask = (1 << codes.bits) - 1
    bits = pieces(c.cache, c.width, c.width_v)[1].bits
    WORD_TYPE = WORD[bits]

    @ti.func
    def value_at(slot, column, task, v: ti.template(), v_scale: ti.template(), strides):
        group = ti.cast(ti.cast(column, ti.u32) // ti.u32(codes.group), ti.i32)
        numbers = ti.cast(v_scale[scales_at(slot, task, strides) + group], ti.u32)
        bit = place(column) * codes.bits
        word = v[task[T.v_first] + v_offset(slot, strides) + bit // bits]
        code = ti.cast(word >> ti.cast(bit % bits, WORD_TYPE), ti.u32) & ti.u32(mask)
        number = ti.cast(ti.cast(code ^ ti.u32(codes.flip & mask), ti.i32) - codes.zero, ti.f32)
        value = number * to_f32(numbers & ti.u32(0xFFFF))
        if ti.static(codes.numbers == 2):
            value = value + to_f32(numbers >> ti.u32(16))
        return value

    return value_at


def make_to_halves(codes):
    """to_halves(word, halves, factor, by16, less, less16): a word's codes, in pairs, less zero, times a power of two.

    The last four are `offsets_of` it.
    """
    ext = instructions()

    @ti.func
    def to_halves(word, halves: ti.template(), factor, by16, less, less16):
        if ti.static(codes.bits == 8):
            ext.halves_8(halves[0], halves[1], word, factor, less)
        else:
            ext.halves_4(halves[0], halves[1], halves[2], halves[3], word, factor, less, by16, less16)

    return to_halves


def offsets_of(codes: Codes, factor: float) -> tuple[int, int, int, int]:
    """What `make_to_halves` takes for a factor."""
    zero = codes.zero
    return halves(factor), halves(factor / 16), halves(-(1024 + zero) * factor), halves(-(64 + zero) * factor)


def make_to_small_halves(codes):
    """to_small_halves(word, halves): the codes of a word in pairs, each 2 ** -24 of `times_of` it: halves below normal.

    Of codes without a sign: zero is still to be taken away.
    """
    ext = instructions()

    @ti.func
    def to_small_halves(word, halves: ti.template()):
        if ti.static(codes.bits == 8):
            nothing = ti.u32(0)
            ext.low_bytes(halves[0], word, nothing)
            ext.high_bytes(halves[1], word, nothing)
        else:
            halves[0], halves[1] = word & ti.u32(0x000F000F), word & ti.u32(0x00F000F0)
            rest = word >> ti.u32(8)
            halves[2], halves[3] = rest & ti.u32(0x000F000F), rest & ti.u32(0x00F000F0)

    return to_small_halves


def make_scores(x, codes, piece, c):
    """scores(kf, qf, p, scalars): base-2 logits of the lane's two keys, for two rows of each tile of rows."""
    multiply, logit_of, to_halves = instructions().multiply_f16, make_logit(c), make_to_small_halves(codes)
    add_product, to_f32 = make_add_product(c), make_bits_to_f32(c.scale)
    NK, GROUPS, G = c.width // KEYS, c.width // codes.group, x.row_tiles
    WORDS, SUMS = piece.count * piece.words, 2 * NK * G
    POWERS = SUMS + 2 * GROUPS * G
    COUNT = len(pairs_of(codes))  # registers that a word becomes
    IN_GROUP = WORDS // GROUPS

    @ti.func
    def scores(kf: ti.template(), qf: ti.template(), p: ti.template(), scalars):
        for j in ti.static(range(GROUPS)):
            s = [ti.f32(0.0) for _ in range(4 * G)]
            for w in ti.static(range(j * IN_GROUP, (j + 1) * IN_GROUP)):
                near = [ti.u32(0) for _ in range(COUNT)]
                far = [ti.u32(0) for _ in range(COUNT)]
                to_halves(kf[w] ^ ti.u32(codes.flip), near)
                to_halves(kf[ti.static(WORDS + w)] ^ ti.u32(codes.flip), far)
                for n in ti.static(range(COUNT // 2)):
                    for g in ti.static(range(G)):
                        o, b = ti.static(4 * g, 2 * NK * g + 2 * (w * COUNT // 2 + n))
                        multiply(s[o], s[ti.static(o + 1)], s[ti.static(o + 2)], s[ti.static(o + 3)],
                                 near[ti.static(2 * n)], far[ti.static(2 * n)], near[ti.static(2 * n + 1)],
                                 far[ti.static(2 * n + 1)], qf[b], qf[ti.static(b + 1)])  # fmt: skip
            for i in ti.static(range(2)):
                number = kf[ti.static(2 * WORDS + i * GROUPS + j)]
                scale = to_f32(number & ti.u32(0xFFFF))
                bias = scale * ti.f32(-1.0 * codes.zero)
                if ti.static(codes.numbers == 2):
                    bias = to_f32(number >> ti.u32(16))
                for g in ti.static(range(G)):
                    for e in ti.static(range(2)):
                        o = ti.static(4 * g + 2 * i + e)
                        total = ti.bit_cast(qf[ti.static(SUMS + 2 * (g * GROUPS + j) + e)], ti.f32)
                        add_product(p, o, s[o], scale)
                        add_product(p, o, bias, total)
        for i in ti.static(range(4 * G)):
            lacking = ti.bit_cast(qf[ti.static(POWERS + i // 4 * 2 + i % 2)], ti.f32)
            p[i] = logit_of(p[i] * lacking, scalars[X.logit_scale], scalars[X.softcap])

    return scores


def make_add_values(x, codes, piece, c):
    """add_values(lane, p, vf, acc, sums): V, weighted, is added to the results, and the weights to `sums`.

    The last of `acc` is 0 until a number may leave float16's range. From then on it is 1, and the others, with all that
    is added to them, are 2 ** -`LARGE` of what they are. Under `invariant`, where other keys must not decide how a key
    is rounded, only the numbers of that key are, and its weights are 2 ** `LARGE` times as large.
    """
    ext, weigh, to_halves = instructions(), make_weigh(x, "f16"), make_to_halves(codes)
    multiply, G, NV = ext.multiply_f16, x.row_tiles, c.width_v // KEYS
    WORDS, COUNT = piece.count * piece.words, len(pairs_of(codes))
    PIECES = 4 * piece.count
    LAST = 4 * NV * G
    ONE, LESS = offsets_of(codes, 1.0), offsets_of(codes, 2.0**-LARGE)
    ONCE, LARGER = halves(1.0), halves(2.0**LARGE)
    CODES_OF_WORD = 32 // codes.bits

    @ti.func
    def large_bits(numbers):
        """Not 0 for scales from 64 on, or biases from 32,768 on: with codes they may make numbers above 65,504."""
        return ((numbers & ti.u32(0x7FFF7FFF)) + ti.u32(0x08002C00)) & ti.u32(0x80008000)

    @ti.func
    def has_large(vf: ti.template()):
        """Whether a lane of the warp has such numbers."""
        large = ti.u32(0)
        for i in ti.static(range(PIECES)):
            large = large | large_bits(vf[ti.static(4 * WORDS + i)])
        return ti.simt.warp.any_nonzero(ti.u32(ALL), ti.select(large != ti.u32(0), 1, 0)) != 0

    @ti.func
    def make_room(vf: ti.template(), acc: ti.template()):
        if has_large(vf):
            if acc[LAST] == ti.f32(0.0):
                for i in ti.static(range(LAST)):
                    acc[i] *= ti.f32(2.0**-LARGE)
                acc[LAST] = ti.f32(1.0)

    @ti.func
    def make_room_for_keys(lane, vf: ti.template(), f: ti.template(), b: ti.template()):
        """The factors of keys with large numbers, and their weights."""
        nothing = ti.u32(0x80008000)  # -0
        for i in ti.static(range(2)):
            large = [ti.u32(0) for _ in range(2)]
            for n in ti.static(range(2 * piece.count)):
                large[ti.static(n // piece.count)] |= large_bits(vf[ti.static(4 * WORDS + 2 * i * piece.count + n)])
            mask = ti.select(large[0] != ti.u32(0), ti.u32(0xFFFF), ti.u32(0))
            mask = mask | ti.select(large[1] != ti.u32(0), ti.u32(0xFFFF0000), ti.u32(0))
            for distance in ti.static((4, 8, 16)):  # between lanes that have other columns of the same keys
                mask = mask | lane_bits(mask, lane ^ distance)
            for n in ti.static(range(4)):
                f[ti.static(4 * i + n)] = (ti.u32(ONE[n]) & ~mask) | (ti.u32(LESS[n]) & mask)
            times = (ti.u32(ONCE) & ~mask) | (ti.u32(LARGER) & mask)
            for g in ti.static(range(G)):
                ext.scale_halves(b[ti.static(2 * g + i)], b[ti.static(2 * g + i)], times, nothing)

    @ti.func
    def add_values(lane, p: ti.template(), vf: ti.template(), acc: ti.template(), sums: ti.template()):
        f = [ti.u32(ONE[i % 4]) for i in range(8)]  # of two rows of V, twice
        b = [ti.u32(0) for _ in range(2 * G)]
        if ti.static(not c.invariant):
            make_room(vf, acc)
            for i in ti.static(range(8)):
                f[i] = ti.select(acc[LAST] == ti.f32(0.0), ti.u32(ONE[i % 4]), ti.u32(LESS[i % 4]))
        weigh(lane, p, b, sums)
        if ti.static(c.invariant):
            if has_large(vf):
                make_room_for_keys(lane, vf, f, b)
        nothing = ti.u32(0x80008000)  # -0
        for n in ti.static(range(piece.count)):
            scale = [ti.u32(0) for _ in range(2)]  # of two rows of V, twice
            bias = [nothing for _ in range(2)]
            for i in ti.static(range(2)):
                first = ti.static(4 * WORDS + 2 * i * piece.count + n)
                ext.low_halves(scale[i], vf[first], vf[ti.static(first + piece.count)])
                if ti.static(codes.numbers == 2):
                    ext.high_halves(bias[i], vf[first], vf[ti.static(first + piece.count)])
                    ext.scale_halves(bias[i], bias[i], f[ti.static(4 * i)], nothing)
            for w in ti.static(range(n * piece.words, (n + 1) * piece.words)):
                # Of the word's columns, each in two rows of V; of the first two rows, then of the others.
                halves = [ti.u32(0) for _ in range(2 * CODES_OF_WORD)]
                for i in ti.static(range(2)):
                    first = ti.static(2 * i * WORDS + w)
                    near, far = vf[first] ^ ti.u32(codes.flip), vf[ti.static(first + WORDS)] ^ ti.u32(codes.flip)
                    mixed = [ti.u32(0) for _ in range(2)]
                    if ti.static(codes.bits == 8):
                        ext.low_bytes(mixed[0], near, far)
                        ext.high_bytes(mixed[1], near, far)
                    else:
                        ext.low_halves(mixed[0], near, far)
                        ext.high_halves(mixed[1], near, far)
                    for h in ti.static(range(2)):
                        part = [ti.u32(0) for _ in range(COUNT)]
                        to_halves(mixed[h], part, f[ti.static(4 * i)], f[ti.static(4 * i + 1)],
                                  f[ti.static(4 * i + 2)], f[ti.static(4 * i + 3)])  # fmt: skip
                        for e in ti.static(range(COUNT)):
                            ext.scale_halves(halves[ti.static(i * CODES_OF_WORD + h * COUNT + e)], part[e], scale[i],
                                             bias[i])  # fmt: skip
                for t in ti.static(range(CODES_OF_WORD // 2)):
                    for g in ti.static(range(G)):
                        a = ti.static((g * NV + w * CODES_OF_WORD // 2 + t) * 4)
                        multiply(acc[a], acc[ti.static(a + 1)], acc[ti.static(a + 2)], acc[ti.static(a + 3)],
                                 halves[ti.static(2 * t)], halves[ti.static(2 * t + 1)],
                                 halves[ti.static(CODES_OF_WORD + 2 * t)], halves[ti.static(CODES_OF_WORD + 2 * t + 1)],
                                 b[ti.static(2 * g)], b[ti.static(2 * g + 1)])  # fmt: skip

    return add_values


def make_settle(x, c):
    """settle(acc, ...): the results as they are, whatever they were kept by."""
    LAST = 4 * (c.width_v // KEYS) * x.row_tiles

    @ti.func
    def settle(acc: ti.template(), task, v_scale: ti.template(), strides, scalars):
        if ti.static(not c.invariant):
            if acc[LAST] != ti.f32(0.0):
                for i in ti.static(range(LAST)):
                    acc[i] *= ti.f32(2.0**LARGE)

    return settle


def make_column_of(piece, c):
    """column_of(t, lane) -> the first of the two columns of the result that a lane has in fragment t of O^T."""
    column = make_column(c.cache)

    @ti.func
    def column_of(t: ti.template(), lane):
        n, behind = ti.static(2 * t // piece.codes, 2 * t % piece.codes)
        return column(((lane >> 2) + ti.static(8 * n)) * piece.codes + behind)

    return column_of
