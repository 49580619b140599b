"""Encode and decode KVarN's tiles: a group of tokens x the channels of a head, rotated, balanced, and then codes.

The rule is that of `reference.quantize_tiles`, in the same order of sums, so the bits are the same on every back end.
It takes a few passes over a tile in each of 16 turns. A CPU makes them one after another, in memory of its thread. On
CUDA a block of threads does (`tiles_cuda`). On other GPUs, and for very wide heads, each pass is a launch over all
tiles, with a thread for each token, channel or tile, since a pass needs all results of the one before it.
"""

import functools
import math
import zlib
from typing import NamedTuple

from tikv.formats import TILE_FORMATS, block_of
from tikv.kernels.address import index_array
from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.codec import (
    SIZE,
    element_array,
    make_bits_to_f32,
    make_f32_to_bits,
    make_load,
    make_store,
    word_array,
)
from tikv.kernels.exact import make_in_order, make_product, make_ratio, make_root, without_small
from tikv.kernels.groups import INFINITE, make_whole_ratio
from tikv.kernels.hadamard import HELD, add_pair, columns_in_turn, local_row, make_turn_lanes, steps_of
from tikv.kernels.lanes import LEAST_ITERATIONS, make_loop
from tikv.runtime import ti

TURNS = 16
TOKEN_SUMS, CHANNEL_SUMS = 32, 16  # running sums over a token's channels, and over a channel's tokens
BAND = 8  # channels that a CPU takes at a time
TOGETHER = 8  # tokens that a GPU thread decodes: those of a word of keys' codes
CHUNK = 4  # neighbouring channels that a GPU thread decodes
EDGE = 65504.0  # float16's largest number
LEAST_SCALE, LEAST_DEVIATION = 1e-10, 1e-8
LOW, HIGH = 1e-3, 1e3  # between which a deviation counts
LEAST_FACTOR, MOST_FACTOR = math.exp(-0.3), math.exp(10.0)
TINY_BITS, TINY_DISTANCE = (127 - 80) << 23, 2.0**-60


class TileParams(NamedTuple):
    """Numbers of a launch: items of work, extents, strides and first entries."""

    items: int = 0
    tokens: int = 1  # of a head that the launch reads or writes
    heads: int = 1  # of a sequence
    sequence: int = 0  # the strides of rows, which are numbered through all heads of all sequences
    head: int = 0
    token: int = 0
    step: int = 1  # tiles from those of a head to those of the next
    skip: int = 0  # tokens of a head's first tile that are not read
    first: int = 0  # entries: of the rows, the codes, the scales and the factors
    codes_first: int = 0
    numbers_first: int = 0
    factors_first: int = 0
    work: int = 0  # the stride between the memory of tiles, or of workers
    rows: int = 0  # that are decoded
    parts: int = 1  # of a head's tokens, `TOGETHER` each, which GPUs decode
    table_sequence: int = 0
    table_first: int = 0


class Tiles(NamedTuple):
    """The compile-time choices of the kernels."""

    name: str  # of the format
    of: str  # "keys" or "values"
    code: str  # dtype code of the rows
    width: int  # channels
    table: int = 0  # bits of an entry of the table of blocks that hold the tiles; 0 without a table


class Places(NamedTuple):
    """Where a tile's memory has what: its numbers, balanced ones, factors, deviations, the best factors, imbalance."""

    balanced: int
    tokens: int
    channels: int
    of_tokens: int
    of_channels: int
    best_tokens: int
    best_channels: int
    imbalance: int
    end: int


P = TileParams(*range(len(TileParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


@functools.cache
def places_of(name, width):
    """The `Places` of a tile."""
    group, at = TILE_FORMATS[name].group, []
    for size in (group * width, group * width, group, width, group, width, group, width, 1):
        at.append(size + (at[-1] if at else 0))
    return Places(*at)


@ti.func
def head_at(head, params):
    """The first entry of a head's first row; heads are counted through all sequences."""
    return params[P.first] + head // params[P.heads] * params[P.sequence] + head % params[P.heads] * params[P.head]


@ti.func
def row_of(number, params):
    """The first entry of a token's row."""
    return head_at(number // params[P.tokens], params) + number % params[P.tokens] * params[P.token]


@ti.func
def without_tiny(x):
    """x, or +0 if x is below 2**-80."""
    return ti.select(ti.bit_cast(x, ti.u32) & ti.u32(0x7FFFFFFF) < ti.u32(TINY_BITS), ti.f32(0.0), x)


@ti.func
def limited(x):
    """x, a NaN as 0, limited to float16's numbers."""
    is_nan = ti.bit_cast(x, ti.u32) & ti.u32(0x7FFFFFFF) > ti.u32(INFINITE)
    return without_tiny(ti.min(ti.max(ti.select(is_nan, ti.f32(0.0), x), ti.f32(-EDGE)), ti.f32(EDGE)))


@functools.cache
def make_rolled(style):
    """rolled(count, at): the count of a loop's rounds, which a CPU's compiler does not know; `at` is never negative.

    Else LLVM writes out all rounds, and takes seconds for them. Nothing is faster for it.
    """

    @ti.func
    def rolled(count: ti.template(), at):
        rounds = count
        if ti.static(style == "cpu"):
            rounds = count + (at >> 31)
        return rounds

    return rolled


@functools.cache
def make_block_rotation(style, width):
    """rotate(work, at, other, row): rotate the numbers at `at`, or at `other` if the number of steps is odd.

    The other place holds numbers between steps; the result is at `at`, not yet multiplied by the norm.
    """
    n, in_order, rolled = block_of(width), make_in_order(style), make_rolled(style)
    steps = steps_of(n)

    @ti.func
    def rotate(work: ti.template(), at, other, row):
        for block in range(width // n):
            first = block * n
            for z in ti.static(range(steps)):
                a, b = other + first, at + first
                if ti.static((steps - z) % 2 == 0):
                    a, b = at + first, other + first
                for i in range(rolled(n // 2, at)):
                    x, y = work[a + 2 * i], work[a + 2 * i + 1]
                    work[b + i] = in_order(x + y, row)
                    work[b + i + n // 2] = in_order(x - y, row)

    return rotate


@functools.cache
def make_deviation(style, sums, count):
    """mean(sums, row) of running sums; square(x, mean, row) of a distance; deviation(sums, row) of sums of squares."""
    product, in_order, ratio, root = make_product(style), make_in_order(style), make_ratio(style), make_root(style)
    numbers, degrees = float(count), float(count - 1)

    @ti.func
    def total(running, row):
        halves = running
        for z in ti.static(range(sums.bit_length() - 1)):
            for i in ti.static(range(sums >> (z + 1))):
                halves[i] = in_order(halves[i] + halves[i + (sums >> (z + 1))], row)
        return halves[0]

    @ti.func
    def mean(running, row):
        return ratio(total(running, row), ti.f32(numbers))

    @ti.func
    def square(x, mean, row):
        distance = in_order(x - mean, row)
        distance = ti.select(ti.abs(distance) < ti.f32(TINY_DISTANCE), ti.f32(0.0), distance)
        return product(distance, distance, row)

    @ti.func
    def deviation(squares, row):
        return root(ratio(total(squares, row), ti.f32(degrees)))

    return mean, square, deviation


@functools.cache
def make_next_factor(style):
    """next_factor(factor, deviation, row): a factor after a turn."""
    product = make_product(style)

    @ti.func
    def next_factor(factor, deviation, row):
        limited_deviation = ti.min(ti.max(deviation, ti.f32(LOW)), ti.f32(HIGH))
        return ti.min(ti.max(product(factor, limited_deviation, row), ti.f32(LEAST_FACTOR)), ti.f32(MOST_FACTOR))

    return next_factor


@functools.cache
def make_half(style):
    """half(x): the bits of the nearest float16, of which none is infinite."""
    to_half = make_f32_to_bits("f16", style)

    @ti.func
    def half(x):
        return ti.cast(to_half(ti.min(ti.max(x, ti.f32(-EDGE)), ti.f32(EDGE))), ti.u16)

    return half


class Passes(NamedTuple):
    """The passes over a tile whose memory begins at `at`; each is for one token, channel, band of channels or tile."""

    load: object  # load(rows, work, at, number of the row, t, params)
    spread_channels: object  # (work, at, d, first)
    spread_token: object  # (work, at, t)
    choose: object  # (work, at, first)
    encode: object  # (work, at, tile, r, codes, numbers, factors, params)


def make_encode(style, c):
    """encode(work, at, tile, r, codes, numbers, factors, params): row r of a tile's codes, with its scale and bias."""
    form, at_of, width = TILE_FORMATS[c.name], places_of(c.name, c.width), c.width
    (rows, columns), bits = form.sides(c.of, width), form.bits(c.of)
    each, last_code = 32 // bits, float((1 << bits) - 1)
    product, in_order, ratio = make_product(style), make_in_order(style), make_ratio(style)
    whole_ratio, half, rolled = make_whole_ratio(style), make_half(style), make_rolled(style)

    @ti.func
    def encode(work: ti.template(), at, tile, r, codes: ti.template(), numbers: ti.template(),
               factors: ti.template(), params):  # fmt: skip
        # The column steps through a row's numbers: tokens of a channel, or channels of a token.
        first, step, by_row, by_column = r * width, 1, at_of.best_tokens, at_of.best_channels
        of_head = params[P.tokens] // form.group
        place = tile // of_head * params[P.step] + tile % of_head
        if ti.static(c.of == "keys"):
            first, step, by_row, by_column = r, width, at_of.best_channels, at_of.best_tokens
        of_row = work[at + by_row + r]
        low, high = ti.f32(0.0), ti.f32(0.0)
        for j in range(rolled(columns, at)):
            x, of_column = work[at + first + j * step], work[at + by_column + j]
            if ti.static(c.of == "keys"):
                x = ratio(ratio(x, of_column), of_row)
            else:
                x = ratio(ratio(x, of_row), of_column)
            work[at + at_of.balanced + first + j * step] = x
            low, high = ti.select(j == 0, x, ti.min(low, x)), ti.select(j == 0, x, ti.max(high, x))
        last = ti.f32(last_code)
        scale = ti.max(ratio(in_order(high - low, at), last), ti.f32(LEAST_SCALE))
        for w in range(rolled(columns // each, at)):
            word = ti.u32(0)
            for e in ti.static(range(each)):
                x = work[at + at_of.balanced + first + (w * each + e) * step]
                level = ti.min(whole_ratio(in_order(x - low, at), scale), last)
                word = word | (ti.cast(ti.cast(level, ti.i32), ti.u32) << ti.u32(e * bits))
            codes[params[P.codes_first] + (place * rows + r) * (columns // each) + w] = word
        to = params[P.numbers_first] + (place * rows + r) * 2
        numbers[to] = half(product(scale, of_row, at))
        numbers[to + 1] = half(product(low, of_row, at))
        for n in range((columns - r + rows - 1) // rows):
            j = r + n * rows
            factors[params[P.factors_first] + place * columns + j] = half(work[at + by_column + j])

    return encode


def make_channel_deviations(style, c):
    """channel_deviations(work, at, d): on GPUs the deviation of a channel, in a vector; balanced numbers are stored."""
    group, width, at_of = TILE_FORMATS[c.name].group, c.width, places_of(c.name, c.width)
    in_order, ratio = make_in_order(style), make_ratio(style)
    mean_of, square, deviation = make_deviation(style, CHANNEL_SUMS, group)

    @ti.func
    def channel_deviations(work: ti.template(), at, d):
        running, by = ti.Vector.zero(ti.f32, CHANNEL_SUMS), work[at + at_of.channels + d]
        for turn in range(group // CHANNEL_SUMS):
            for n in ti.static(range(CHANNEL_SUMS)):
                t = turn * CHANNEL_SUMS + n
                x = ratio(ratio(work[at + t * width + d], work[at + at_of.tokens + t]), by)
                work[at + at_of.balanced + t * width + d] = x
                running[n] = in_order(running[n] + x, at)
        mean, squares = mean_of(running, at), ti.Vector.zero(ti.f32, CHANNEL_SUMS)
        for turn in range(group // CHANNEL_SUMS):
            for n in ti.static(range(CHANNEL_SUMS)):
                x = work[at + at_of.balanced + (turn * CHANNEL_SUMS + n) * width + d]
                squares[n] = in_order(squares[n] + square(x, mean, at), at)
        return ti.Vector([deviation(squares, at)])

    return channel_deviations


def make_band_deviations(c):
    """channel_deviations(work, at, d): on CPU the deviations of a band of channels; balanced numbers are stored.

    A vector has each running sum of all channels of the band side by side, so that LLVM adds these together. The loops
    over tokens stay loops: LLVM takes half a minute for them when they are written out.
    """
    group, width, at_of = TILE_FORMATS[c.name].group, c.width, places_of(c.name, c.width)
    ratio, root, square = make_ratio("cpu"), make_root("cpu"), make_deviation("cpu", CHANNEL_SUMS, group)[1]
    numbers, degrees = float(group), float(group - 1)

    @ti.func
    def add_up(sums: ti.template()):
        """The total of each channel's running sums comes to the beginning."""
        for z in ti.static(range(steps_of(CHANNEL_SUMS))):
            half = (CHANNEL_SUMS >> (z + 1)) * BAND
            for i in range(half):
                sums[i] = sums[i] + sums[i + half]

    @ti.func
    def channel_deviations(work: ti.template(), at, d):
        sums, by = ti.Vector.zero(ti.f32, CHANNEL_SUMS * BAND), ti.Vector.zero(ti.f32, BAND)
        x, before = ti.Vector.zero(ti.f32, BAND), ti.Vector.zero(ti.f32, BAND)
        for e in ti.static(range(BAND)):
            by[e] = work[at + at_of.channels + d + e]
        for t in range(group):
            factor, n = work[at + at_of.tokens + t], t % CHANNEL_SUMS * BAND
            for e in ti.static(range(BAND)):
                x[e], before[e] = work[at + t * width + d + e], sums[n + e]
            for e in ti.static(range(BAND)):
                x[e] = ratio(ratio(x[e], factor), by[e])
            for e in ti.static(range(BAND)):
                work[at + at_of.balanced + t * width + d + e], sums[n + e] = x[e], before[e] + x[e]
        add_up(sums)
        means, squares = ti.Vector.zero(ti.f32, BAND), ti.Vector.zero(ti.f32, CHANNEL_SUMS * BAND)
        for e in ti.static(range(BAND)):
            means[e] = ratio(sums[e], ti.f32(numbers))
        for t in range(group):
            n = t % CHANNEL_SUMS * BAND
            for e in ti.static(range(BAND)):
                x[e], before[e] = work[at + at_of.balanced + t * width + d + e], squares[n + e]
            for e in ti.static(range(BAND)):
                squares[n + e] = before[e] + square(x[e], means[e], at)
        add_up(squares)
        deviations = ti.Vector.zero(ti.f32, BAND)
        for e in ti.static(range(BAND)):
            deviations[e] = root(ratio(squares[e], ti.f32(degrees)))
        return deviations

    return channel_deviations


def make_passes(style, c):
    """The `Passes` of a format."""
    form, at_of = TILE_FORMATS[c.name], places_of(c.name, c.width)
    group, width, norm, band = form.group, c.width, block_of(c.width) ** -0.5, BAND if style == "cpu" else 1
    product, in_order, ratio, rolled = make_product(style), make_in_order(style), make_ratio(style), make_rolled(style)
    load_row = make_load(c.code, 1, SIZE[c.code] * 8)
    rotate, odd = make_block_rotation(style, width), steps_of(block_of(width)) % 2
    token_mean, token_square, token_deviation = make_deviation(style, TOKEN_SUMS, width)
    channel_deviations = make_band_deviations(c) if style == "cpu" else make_channel_deviations(style, c)
    next_factor = make_next_factor(style)

    @ti.func
    def load(source: ti.template(), work: ti.template(), at, number, t, params):
        first, to, other = row_of(number, params), at + t * width, at + at_of.balanced + t * width
        for d in range(rolled(width, at)):
            x = limited(load_row(source, first + d)[0])
            if ti.static(odd):
                work[other + d] = x
            else:
                work[to + d] = x
        rotate(work, to, other, first)
        for d in range(rolled(width, at)):
            work[to + d] = without_tiny(product(work[to + d], ti.f32(norm), first))
        work[at + at_of.tokens + t] = ti.f32(1.0)

    @ti.func
    def spread_channels(work: ti.template(), at, d, first):
        to, of = at + at_of.channels + d, at + at_of.of_channels + d
        if first == 1:
            for e in ti.static(range(band)):
                work[to + e] = ti.f32(1.0)
        for again in range(first, 2):  # the factors change between two passes over the channels
            deviations = channel_deviations(work, at, d)
            for e in ti.static(range(band)):
                if again == 0:
                    work[to + e] = next_factor(work[to + e], deviations[e], at)
                else:
                    work[of + e] = deviations[e]

    @ti.func
    def spread_token(work: ti.template(), at, t):
        first = at + at_of.balanced + t * width
        running = ti.Vector([ti.f32(0.0)] * TOKEN_SUMS)
        for turn in range(width // TOKEN_SUMS):
            for n in ti.static(range(TOKEN_SUMS)):
                running[n] = in_order(running[n] + work[first + turn * TOKEN_SUMS + n], at)
        mean = token_mean(running, at)
        squares = ti.Vector([ti.f32(0.0)] * TOKEN_SUMS)
        for turn in range(width // TOKEN_SUMS):
            for n in ti.static(range(TOKEN_SUMS)):
                more = token_square(work[first + turn * TOKEN_SUMS + n], mean, at)
                squares[n] = in_order(squares[n] + more, at)
        work[at + at_of.of_tokens + t] = token_deviation(squares, at)

    @ti.func
    def unevenness(work: ti.template(), first, count: ti.template()):
        greatest, least = work[first], work[first]
        for i in range(1, count):
            greatest, least = ti.max(greatest, work[first + i]), ti.min(least, work[first + i])
        return ratio(greatest, ti.max(least, ti.f32(LEAST_DEVIATION)))

    @ti.func
    def choose(work: ti.template(), at, first):
        of_tokens = unevenness(work, at + at_of.of_tokens, group)
        imbalance = in_order(of_tokens + unevenness(work, at + at_of.of_channels, width), at)
        if first == 1 or imbalance <= work[at + at_of.imbalance]:
            work[at + at_of.imbalance] = imbalance
            for t in range(group):
                work[at + at_of.best_tokens + t] = work[at + at_of.tokens + t]
            for d in range(width):
                work[at + at_of.best_channels + d] = work[at + at_of.channels + d]
        for t in range(group):
            to = at + at_of.tokens + t
            work[to] = next_factor(work[to], work[at + at_of.of_tokens + t], at)

    return Passes(load, spread_channels, spread_token, choose, make_encode(style, c))


PASSES = ("load", "channels", "tokens", "choose", "encode")


def items_of(name, c):
    """How many items a pass has per tile."""
    form = TILE_FORMATS[c.name]
    by_pass = (form.group, c.width, form.group, 1, form.sides(c.of, c.width)[0])
    return dict(zip(PASSES, by_pass, strict=True))[name]


def make_tile_pass(style, name, first, c):
    """tile_pass(rows, codes, numbers, factors, work, params) on GPUs: one pass over all tiles.

    Args:
        style: as in `lanes.make_loop`.
        name: one of `PASSES`.
        first: 1 if nothing was balanced yet, else 0.
        c: `Tiles`.
    """
    passes, group, each = make_passes(style, c), TILE_FORMATS[c.name].group, items_of(name, c)
    X, HALVES = element_array(c.code), word_array(16)

    @ti.func
    def item(i, arrays: ti.template(), params):
        rows, codes, numbers, factors, work = ti.static(arrays)
        tile, n = i // each, i % each
        at = tile * params[P.work]
        if ti.static(name == "load"):
            passes.load(rows, work, at, tile * group + n, n, params)
        elif ti.static(name == "channels"):
            passes.spread_channels(work, at, n, first)
        elif ti.static(name == "tokens"):
            passes.spread_token(work, at, n)
        elif ti.static(name == "choose"):
            passes.choose(work, at, first)
        else:
            passes.encode(work, at, tile, n, codes, numbers, factors, params)

    loop = make_loop(style, False, item, P.items)

    @ti.kernel
    def tile_pass(rows: X, codes: word_array(32), numbers: HALVES, factors: HALVES, work: FLOATS, params: PARAMS):
        loop(rows, params, ((rows, codes, numbers, factors, work), params))

    return tile_pass


def make_encode_tiles_cpu(workers, c):
    """encode_tiles(rows, codes, numbers, factors, work, params) on CPU: each worker encodes one tile after another.

    Args:
        workers: threads; 1 runs in the calling thread.
        c: `Tiles`.
    """
    passes, group, width = make_passes("cpu", c), TILE_FORMATS[c.name].group, c.width
    X, HALVES = element_array(c.code), word_array(16)
    lines = TILE_FORMATS[c.name].sides(c.of, width)[0]
    iterations, every = (workers * LEAST_ITERATIONS, LEAST_ITERATIONS) if workers > 1 else (1, 1)

    @ti.kernel
    def encode_tiles(rows: X, codes: word_array(32), numbers: HALVES, factors: HALVES, work: FLOATS, params: PARAMS):
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker, count = i // every, 0
            if i % every == 0:
                count = (params[P.items] - worker + workers - 1) // workers
            at = worker * params[P.work]
            for number in range(count):
                tile = number * workers + worker
                for t in range(group):
                    passes.load(rows, work, at, tile * group + t, t, params)
                for turn in range(TURNS + 1):
                    first = ti.select(turn == 0, 1, 0)
                    for b in range(width // BAND):
                        passes.spread_channels(work, at, b * BAND, first)
                    for t in range(group):
                        passes.spread_token(work, at, t)
                    passes.choose(work, at, first)
                for r in range(lines):
                    passes.encode(work, at, tile, r, codes, numbers, factors, params)

    return encode_tiles


def make_find_tile(c):
    """find_tile(head, g, table, params): which of all tiles is tile g of a head, counted through all sequences."""

    @ti.func
    def find_tile(head, g, table: ti.template(), params):
        tile = head * params[P.step] + g
        if ti.static(c.table > 0):
            sequence, h, room = head // params[P.heads], head % params[P.heads], params[P.step]
            block = table[params[P.table_first] + sequence * params[P.table_sequence] + g // room]
            tile = (ti.cast(block, ti.i32) * params[P.heads] + h) * room + g % room
        return tile

    return find_tile


def make_decode_tiles(style, serial, wide, c):
    """decode_tiles(rows, codes, numbers, factors, table, params): the rows that tiles stand for.

    An item is a row on CPU. On GPUs it is `HELD` channels of `TOGETHER` tokens. Blocks of the table have `step` tiles.

    Args:
        style, serial: as in `lanes.make_loop`.
        wide: on GPUs, rows, numbers and factors are accessed in words of 64 bits where neighbours are used.
        c: `Tiles`.
    """
    by_words = wide and style != "cpu"
    bits_of_rows = 64 if by_words else SIZE[c.code] * 8
    # A thread reads numbers and factors of neighbouring channels together, but those of a token one by one.
    bits_of_numbers, bits_of_factors = (64 if by_words and c.of == of else 16 for of in ("keys", "values"))
    if style == "cpu":
        item = make_decode_row(c)
    else:
        item = make_decode_part(style, (bits_of_rows, bits_of_numbers, bits_of_factors), c)
    loop = make_loop(style, serial, item, P.items)
    NUMBERS, FACTORS = word_array(bits_of_numbers), word_array(bits_of_factors)

    @ti.kernel
    def decode_tiles(rows: word_array(bits_of_rows), codes: word_array(32), numbers: NUMBERS, factors: FACTORS,
                     table: index_array(c.table), params: PARAMS):  # fmt: skip
        loop(rows, params, ((rows, codes, numbers, factors, table), params))

    return decode_tiles


def make_decode_row(c):
    """CPU: decode_row_item(i, arrays, params): decode row i."""
    form, width, n = TILE_FORMATS[c.name], c.width, block_of(c.width)
    group, bits, (lines, columns) = form.group, form.bits(c.of), form.sides(c.of, c.width)
    each, norm, steps, keys = 32 // bits, n**-0.5, steps_of(n), c.of == "keys"
    find_tile, half = make_find_tile(c), make_bits_to_f32("f16")
    store = make_store(c.code, 1, SIZE[c.code] * 8, "cpu")
    X, HALVES, CODES = element_array(c.code), word_array(16), word_array(32)
    ROW, row_uid = local_row(n), zlib.crc32(repr(c).encode()) >> 1

    @ti.func
    def number_at(codes: ti.template(), numbers: ti.template(), factors: ti.template(), tile, t, d, first, number,
                  factor):  # fmt: skip
        r, j = t, d
        if ti.static(keys):
            r, j = d, t
        line = tile * lines + r
        word = codes[first + line * (columns // each) + j // each]
        code = (word >> ti.cast(j % each * bits, ti.u32)) & ti.u32((1 << bits) - 1)
        scale, bias = half(numbers[number + line * 2]), half(numbers[number + line * 2 + 1])
        x = ti.cast(ti.cast(code, ti.i32), ti.f32) * scale + bias
        return without_small(x * half(factors[factor + tile * columns + j]))

    @ti.real_func
    def decode_row(rows: X, codes: CODES, numbers: HALVES, factors: HALVES, tile: ti.i32, t: ti.i32, to: ti.i32,
                   codes_first: ti.i32, number: ti.i32, factor: ti.i32, uid: ti.i32):  # fmt: skip
        row, other = ROW(0.0), ROW(0.0)
        for block in range(width // n):
            first = block * n
            for i in range(n):
                x = number_at(codes, numbers, factors, tile, t, first + i, codes_first, number, factor)
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
                store(rows, to + first + i, ti.Vector([row[i] * ti.f32(norm)]), ti.f32(1.0))

    @ti.func
    def decode_row_item(i, arrays: ti.template(), params):
        rows, codes, numbers, factors, table = ti.static(arrays)
        token, to = i % params[P.tokens] + params[P.skip], row_of(i, params)
        tile = find_tile(i // params[P.tokens], token // group, table, params)
        first, number, factor = params[P.codes_first], params[P.numbers_first], params[P.factors_first]
        decode_row(rows, codes, numbers, factors, tile, token % group, to, first, number, factor, row_uid)

    return decode_row_item


def make_decode_part(style, word_bits, c):
    """GPU: decode_part(i, arrays, params): `HELD` channels of `TOGETHER` tokens; those of a head begin at a multiple.

    What belongs to channels is read once for all of these tokens. `word_bits` are those of the words of rows, numbers
    and factors.
    """
    form, width, n = TILE_FORMATS[c.name], c.width, block_of(c.width)
    group, bits, (lines, columns) = form.group, form.bits(c.of), form.sides(c.of, c.width)
    each, last_code, keys, chunks = 32 // bits, (1 << bits) - 1, c.of == "keys", HELD // CHUNK
    lanes, together = width // HELD, n // HELD  # threads of a row, and of a block of it
    in_order, half, find_tile = make_in_order(style), make_bits_to_f32("f16"), make_find_tile(c)
    turn = make_turn_lanes(style, columns_in_turn(n, CHUNK), None)
    row_bits, number_bits, factor_bits = word_bits
    store, per_word = make_store(c.code, CHUNK, row_bits, style), row_bits // (SIZE[c.code] * 8)
    load_numbers, load_factors = make_load("f16", 2 * CHUNK, number_bits), make_load("f16", CHUNK, factor_bits)
    word_shift, number_shift, factor_shift = (steps_of(n) for n in (per_word, number_bits // 16, factor_bits // 16))
    each_shift, words_of_line = steps_of(each), columns // each

    @ti.func
    def code_at(word, shift):
        code = (word >> shift) & ti.u32(last_code)
        return ti.cast(ti.cast(code, ti.i32), ti.f32)

    @ti.func
    def decode_part(i, arrays: ti.template(), params):
        rows, codes, numbers, factors, table = ti.static(arrays)
        number, lane = i // lanes, i % lanes
        head, token = number // params[P.parts], number % params[P.parts] * TOGETHER
        end, start = params[P.skip] + params[P.tokens], params[P.skip] // TOGETHER * TOGETHER
        inside = head * params[P.tokens] < params[P.rows] and start + token < end
        head, token = ti.select(inside, head, 0), start + ti.select(inside, token, 0)
        to = head_at(head, params) + (token - params[P.skip]) * params[P.token]
        tile, t, d = find_tile(head, token // group, table, params), token % group, lane // together * n
        d = d + lane % together * CHUNK
        code, line = params[P.codes_first], tile * lines
        number, factor = params[P.numbers_first] + line * 2, params[P.factors_first] + tile * columns
        words, of_channels = ti.Vector.zero(ti.u32, HELD), ti.Vector.zero(ti.f32, 2 * HELD)
        for k in ti.static(range(chunks)):
            of_chunk = d + k * together * CHUNK
            if ti.static(keys):
                pairs = load_numbers(numbers, (number + of_chunk * 2) >> number_shift)
                for e in ti.static(range(CHUNK)):
                    words[k * CHUNK + e] = codes[code + (line + of_chunk + e) * words_of_line + (t >> each_shift)]
                for e in ti.static(range(2 * CHUNK)):
                    of_channels[2 * k * CHUNK + e] = pairs[e]
            else:
                by = load_factors(factors, (factor + of_chunk) >> factor_shift)
                for e in ti.static(range(CHUNK)):
                    of_channels[k * CHUNK + e] = by[e]
        for step in range(TOGETHER):
            values = ti.Vector.zero(ti.f32, HELD)
            if ti.static(keys):
                by, shift = half(factors[factor + t + step]), ti.cast((t + step & each - 1) * bits, ti.u32)
                for e in ti.static(range(HELD)):  # a product of a code and a float16 is exact
                    x = in_order(code_at(words[e], shift) * of_channels[2 * e] + of_channels[2 * e + 1], factor)
                    values[e] = in_order(x * by, factor)
            else:
                of_token = number + (t + step) * 2
                scale, bias = half(numbers[of_token]), half(numbers[of_token + 1])
                for k in ti.static(range(chunks)):
                    column = d + k * together * CHUNK
                    word = codes[code + (line + t + step) * words_of_line + (column >> each_shift)]
                    word = word >> ti.cast((column & each - 1) * bits, ti.u32)
                    for e in ti.static(range(CHUNK)):
                        x = in_order(code_at(word, ti.u32(e * bits)) * scale + bias, factor)
                        values[k * CHUNK + e] = in_order(x * of_channels[k * CHUNK + e], factor)
            values = turn(i, lane, values, factor)
            if inside and token + step >= params[P.skip] and token + step < end:
                for k in ti.static(range(chunks)):
                    at = to + step * params[P.token] + d + k * together * CHUNK
                    x = ti.Vector([values[k * CHUNK + e] for e in range(CHUNK)])
                    store(rows, at >> word_shift, x, ti.f32(1.0))

    return decode_part
