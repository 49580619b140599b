"""Encode KVarN's tiles on CUDA in one launch: a block of threads for each tile, whose numbers stay in registers.

The rule is that of `reference.quantize_tiles`, as in `tiles`. A warp has every `WARPS`th token, and a lane every 32nd
channel of these. So each running sum over a channel's tokens belongs to a warp, and over a token's channels to a lane.
Sums of tokens are completed by shuffles, those of channels in shared memory. Quotients by factors are products with
their reciprocals, which are then corrected (`tiles_cuda.ll`).
"""

import functools
import pathlib

from tikv.formats import TILE_FORMATS, block_of
from tikv.kernels.codec import SIZE, element_array, make_load, word_array
from tikv.kernels.hadamard import steps_of
from tikv.kernels.lanes import WARP_DISTANCES, butterfly_distances, shuffle, shuffle_xor
from tikv.kernels.tiles import (
    CHANNEL_SUMS,
    LEAST_DEVIATION,
    LEAST_SCALE,
    PARAMS,
    TOKEN_SUMS,
    TURNS,
    P,
    make_half,
    make_next_factor,
    row_of,
)
from tikv.runtime import engine_in_use, ti

SOURCE = pathlib.Path(__file__).with_suffix(".ll")
BITCODE = SOURCE.with_suffix(".bc")  # llvm-as-14 tiles_cuda.ll -o tiles_cuda.bc
LANES, WARPS = TOKEN_SUMS, CHANNEL_SUMS
THREADS = LANES * WARPS
WIDEST = 256  # channels for whose numbers a thread has registers
FAR = 3e38  # beyond every deviation


@functools.cache
def instructions():
    """The functions of `tiles_cuda.ll`, to be called in kernels."""
    return engine_in_use().bitcode(str(BITCODE))


def numbers_of(c):
    """How many numbers of a tile a thread holds."""
    return TILE_FORMATS[c.name].group * c.width // THREADS


@ti.func
def greater(a, b):
    """The greater of two numbers."""
    return ti.max(a, b)


@ti.func
def added(a, b):
    """The sum of two numbers."""
    return a + b


def make_fold(count, join):
    """fold(lane, values): the sum, or what `join` makes, of a number of each lane; a lane gets that of one of `count`.

    Lane n gets that of values[n // (LANES // count)]. Lanes first join with those at half the warp's distance, as
    running sums do.
    """
    steps = [(distance, (count >> step) // 2) for step, distance in enumerate(WARP_DISTANCES)]

    @ti.func
    def fold(lane, values):
        held = values
        for distance, half in ti.static(steps):
            if ti.static(half > 0):
                is_upper = (lane & distance) > 0
                for k in ti.static(range(half)):
                    mine = ti.select(is_upper, held[k + half], held[k])
                    other = ti.select(is_upper, held[k], held[k + half])
                    held[k] = join(mine, shuffle_xor(other, distance))
            else:
                held[0] = join(held[0], shuffle_xor(held[0], distance))
        return held[0]

    return fold


def make_load_tile(c):
    """load_tile(rows, tile, lane, warp, x, params): the rotated numbers of a thread, tokens times channels, into x."""
    group, width, n = TILE_FORMATS[c.name].group, c.width, block_of(c.width)
    tokens, channels, norm = group // WARPS, width // LANES, n**-0.5
    ext, load_row = instructions(), make_load(c.code, 1, SIZE[c.code] * 8)

    @ti.func
    def load_tile(rows: ti.template(), tile, lane, warp, x: ti.template(), params):
        head = row_of(tile * group, params) + lane
        for i in ti.static(range(tokens)):
            first = head + (warp + i * WARPS) * params[P.token]
            for j in ti.static(range(channels)):
                e = ti.static(i * channels + j)
                x[e] = load_row(rows, first + j * LANES)[0]
                ext.limit(x[e])
        for z in ti.static(range(steps_of(n))):
            distance, upper = 1 << z, lane & (1 << z)
            for e in ti.static(range(tokens * channels)):
                if ti.static(1 << z < LANES):
                    ext.turn_lanes(x[e], distance, upper)
                elif ti.static(e & (1 << z) // LANES == 0):
                    ext.turn_pair(x[e], x[ti.static(e | (1 << z) // LANES)])
        for e in ti.static(range(tokens * channels)):
            factor = ti.f32(norm)
            ext.norm(x[e], factor)

    return load_tile


def make_deviations(c):
    """(of_channels, of_tokens): the standard deviations of a tile's balanced numbers; all threads call them together.

    of_channels(thread, lane, warp, values, parts, means) is that of channel `thread`, if there is such a channel. Both
    shared arrays are free again after a barrier. of_tokens(lane, values) is that of token lane // (LANES // tokens) of
    the warp's.
    """
    ext, group, width = instructions(), TILE_FORMATS[c.name].group, c.width
    tokens, channels, fold = group // WARPS, width // LANES, make_fold(group // WARPS, added)
    of_channel, of_token = float(group), float(width)  # how many numbers there are

    @ti.func
    def total(thread, lane, warp, sums: ti.template(), parts: ti.template()):
        """The total of channel `thread`, of the sums that warps have of it."""
        for j in ti.static(range(channels)):
            parts[warp * width + lane + j * LANES] = sums[j]
        ti.simt.block.sync()
        result = ti.f32(0.0)
        if thread < width:
            running = [parts[n * width + thread] for n in range(WARPS)]
            for z in ti.static(range(WARPS.bit_length() - 1)):
                for n in ti.static(range(WARPS >> (z + 1))):
                    running[n] += running[ti.static(n + (WARPS >> (z + 1)))]
            result = running[0]
        return result

    @ti.func
    def of_channels(thread, lane, warp, values: ti.template(), parts: ti.template(), means: ti.template()):
        sums, count, degrees = [ti.f32(0.0) for _ in range(channels)], ti.f32(of_channel), ti.f32(of_channel - 1)
        for e in ti.static(range(tokens * channels)):
            ext.add(sums[ti.static(e % channels)], values[e])
        mean = total(thread, lane, warp, sums, parts)
        ext.divide(mean, mean, count)
        if thread < width:
            means[thread] = mean
        ti.simt.block.sync()
        for j in ti.static(range(channels)):
            mean, sums[j] = means[lane + j * LANES], ti.f32(0.0)
            for e in ti.static(range(j, tokens * channels, channels)):
                ext.add_square(sums[j], values[e], mean)
        deviation = total(thread, lane, warp, sums, parts)
        ext.deviation(deviation, deviation, degrees)
        return deviation

    @ti.func
    def of_tokens(lane, values: ti.template()):
        sums, count, degrees = [ti.f32(0.0) for _ in range(tokens)], ti.f32(of_token), ti.f32(of_token - 1)
        for e in ti.static(range(tokens * channels)):
            ext.add(sums[ti.static(e // channels)], values[e])
        means = fold(lane, ti.Vector([sums[i] for i in range(tokens)]))
        ext.divide(means, means, count)
        for i in ti.static(range(tokens)):
            mean, sums[i] = shuffle(means, ti.static(i * LANES // tokens)), ti.f32(0.0)
            for e in ti.static(range(i * channels, (i + 1) * channels)):
                ext.add_square(sums[i], values[e], mean)
        deviation = fold(lane, ti.Vector([sums[i] for i in range(tokens)]))
        ext.deviation(deviation, deviation, degrees)
        return deviation

    return of_channels, of_tokens


def make_quotients(c):
    """(by_tokens, by_channels): a thread's numbers, divided by the factors of their tokens, or of their channels.

    by_tokens(x, factor, quotients) takes the factor of token lane // (LANES // tokens) of the warp's. by_channels(x,
    lane, channels_by, quotients) takes all factors and then their reciprocals.
    """
    ext, group, width = instructions(), TILE_FORMATS[c.name].group, c.width
    tokens, channels = group // WARPS, width // LANES

    @ti.func
    def by_tokens(x: ti.template(), factor, quotients: ti.template()):
        divisors, inverse = factor, ti.f32(0.0)
        ext.invert(inverse, divisors)
        for i in ti.static(range(tokens)):
            divisor = shuffle(divisors, ti.static(i * LANES // tokens))
            reciprocal = shuffle(inverse, ti.static(i * LANES // tokens))
            for e in ti.static(range(i * channels, (i + 1) * channels)):
                ext.divide_by(quotients[e], x[e], divisor, reciprocal)

    @ti.func
    def by_channels(x: ti.template(), lane, channels_by: ti.template(), quotients: ti.template()):
        for j in ti.static(range(channels)):
            divisor, reciprocal = channels_by[lane + j * LANES], channels_by[width + lane + j * LANES]
            for e in ti.static(range(j, tokens * channels, channels)):
                ext.divide_by(quotients[e], x[e], divisor, reciprocal)

    return by_tokens, by_channels


def make_imbalance(c):
    """imbalance(thread, lane, warp, of_channel, of_token, edges): `reference.balance`'s, which all threads get."""
    ext, fold, width = instructions(), make_fold(4, greater), c.width

    @ti.func
    def imbalance(thread, lane, warp, of_channel, of_token, edges: ti.template()):
        is_channel = thread < width
        edge = fold(lane, ti.Vector([
            of_token, -of_token, ti.select(is_channel, of_channel, ti.f32(-FAR)),
            ti.select(is_channel, -of_channel, ti.f32(-FAR)),
        ]))  # fmt: skip
        if lane % (LANES // 4) == 0:
            edges[lane // (LANES // 4) * WARPS + warp] = edge
        ti.simt.block.sync()
        of_both = ti.Vector([edges[lane], edges[lane + LANES]])  # of tokens, and of channels
        for distance in ti.static(butterfly_distances(WARPS)):
            for n in ti.static(range(2)):
                of_both[n] = ti.max(of_both[n], shuffle_xor(of_both[n], distance))
        ratios = [ti.f32(0.0), ti.f32(0.0)]
        for n in ti.static(range(2)):
            greatest, least = shuffle(of_both[n], 0), ti.max(-shuffle(of_both[n], WARPS), ti.f32(LEAST_DEVIATION))
            ext.divide(ratios[n], greatest, least)
        return ratios[0] + ratios[1]

    return imbalance


def make_balance(c):
    """balance(thread, lane, warp, x, values, shared): a thread's balanced numbers, by the rule of `reference.balance`.

    Returns the factor of token lane // (LANES // tokens) of the warp's. `channels_by`, of the shared arrays, then has
    the factors of all channels, and their reciprocals.
    """
    ext, width, numbers = instructions(), c.width, numbers_of(c)
    (of_channels, of_tokens), imbalance_of = make_deviations(c), make_imbalance(c)
    next_factor, (divide_by_tokens, divide_by_channels) = make_next_factor("cuda"), make_quotients(c)

    @ti.func
    def set_channel(thread, by_channel, channels_by: ti.template()):
        factor, inverse = by_channel, ti.f32(0.0)
        ext.invert(inverse, factor)
        if thread < width:
            channels_by[thread], channels_by[width + thread] = factor, inverse

    @ti.func
    def balance(thread, lane, warp, x: ti.template(), values: ti.template(), shared: ti.template()):
        parts, means, edges, channels_by = ti.static(shared)
        by_token, by_channel, of_token, of_channel = ti.f32(1.0), ti.f32(1.0), ti.f32(0.0), ti.f32(0.0)
        best_token, best_channel, least = ti.f32(1.0), ti.f32(1.0), ti.f32(0.0)
        divided = [ti.f32(0.0) for _ in range(numbers)]
        set_channel(thread, by_channel, channels_by)
        ti.simt.block.sync()
        for turn in range(TURNS + 1):
            if turn > 0:
                by_token = next_factor(by_token, of_token, lane)
            divide_by_tokens(x, by_token, divided)
            for again in range(ti.select(turn == 0, 1, 0), 2):  # the factors of channels change between two passes
                divide_by_channels(divided, lane, channels_by, values)
                of_channel = of_channels(thread, lane, warp, values, parts, means)
                if again == 0:
                    by_channel = next_factor(by_channel, of_channel, lane)
                    set_channel(thread, by_channel, channels_by)
                ti.simt.block.sync()
            of_token = of_tokens(lane, values)
            imbalance = imbalance_of(thread, lane, warp, of_channel, of_token, edges)
            if turn == 0 or imbalance <= least:
                least, best_token, best_channel = imbalance, by_token, by_channel
        set_channel(thread, best_channel, channels_by)
        ti.simt.block.sync()
        divide_by_tokens(x, best_token, divided)
        divide_by_channels(divided, lane, channels_by, values)
        return best_token

    return balance


def make_ranges(c):
    """(of_channel, of_token): the least number and the scale of codes; all threads call them together.

    of_channel(thread, lane, warp, values, parts) is for channel `thread`, if there is such a channel, of_token(lane,
    values) for token lane // (LANES // tokens) of the warp's.
    """
    ext, form, width = instructions(), TILE_FORMATS[c.name], c.width
    tokens, channels, last_code = form.group // WARPS, width // LANES, float((1 << form.bits(c.of)) - 1)
    fold = make_fold(tokens, greater)

    @ti.func
    def scale_of(low, high):
        span, last, scale = high - low, ti.f32(last_code), ti.f32(0.0)
        ext.divide(scale, span, last)
        return ti.max(scale, ti.f32(LEAST_SCALE))

    @ti.func
    def greatest_of(thread, lane, warp, edges, parts: ti.template()):
        ti.simt.block.sync()
        for j in ti.static(range(channels)):
            parts[warp * width + lane + j * LANES] = edges[j]
        ti.simt.block.sync()
        greatest = ti.f32(0.0)
        if thread < width:
            greatest = parts[thread]
            for n in ti.static(range(1, WARPS)):
                greatest = ti.max(greatest, parts[n * width + thread])
        return greatest

    @ti.func
    def of_channel(thread, lane, warp, values: ti.template(), parts: ti.template()):
        lows, highs = ti.Vector([ti.f32(0.0)] * channels), ti.Vector([ti.f32(0.0)] * channels)
        for j in ti.static(range(channels)):
            lows[j], highs[j] = -values[j], values[j]
            for e in ti.static(range(j + channels, tokens * channels, channels)):
                lows[j], highs[j] = ti.max(lows[j], -values[e]), ti.max(highs[j], values[e])
        low = -greatest_of(thread, lane, warp, lows, parts)
        return low, scale_of(low, greatest_of(thread, lane, warp, highs, parts))

    @ti.func
    def of_token(lane, values: ti.template()):
        lows, highs = ti.Vector([ti.f32(0.0)] * tokens), ti.Vector([ti.f32(0.0)] * tokens)
        for i in ti.static(range(tokens)):
            lows[i], highs[i] = -values[ti.static(i * channels)], values[ti.static(i * channels)]
            for e in ti.static(range(i * channels + 1, (i + 1) * channels)):
                lows[i], highs[i] = ti.max(lows[i], -values[e]), ti.max(highs[i], values[e])
        low = -fold(lane, lows)
        return low, scale_of(low, fold(lane, highs))

    return of_channel, of_token


def make_write_tile(c):
    """write_tile(thread, lane, warp, values, by_token, shared, arrays, place, params): the codes of balanced numbers.

    `place` is the tile's among those of `arrays`: codes, scales with biases, factors.
    """
    ext, form, width, keys = instructions(), TILE_FORMATS[c.name], c.width, c.of == "keys"
    group, bits, (rows, columns) = form.group, form.bits(c.of), form.sides(c.of, c.width)
    tokens, channels, each, last_code = group // WARPS, width // LANES, 32 // bits, (1 << bits) - 1
    words_of_row, shift, lanes = columns // each, each.bit_length() - 1, LANES // tokens
    (range_of_channel, range_of_token), half = make_ranges(c), make_half("cuda")

    @ti.func
    def put_numbers(numbers: ti.template(), row, low, scale, factor, params):
        to, by, of_scale, of_low = params[P.numbers_first] + row * 2, factor, scale, low
        ext.multiply(of_scale, of_scale, by)
        ext.multiply(of_low, of_low, by)
        numbers[to], numbers[to + 1] = half(of_scale), half(of_low)

    @ti.func
    def put_code(words: ti.template(), t, d, x: ti.template(), low: ti.template(), scale: ti.template()):
        code, last = 0, last_code
        ext.code(code, x, low, scale, last)
        word, column = t * words_of_row + (d >> shift), d
        if ti.static(keys):  # lanes have neighbouring channels, and write to neighbouring words
            word, column = (t >> shift) * rows + d, t
        ti.atomic_or(words[word], ti.cast(code, ti.u32) << ti.cast((column & (each - 1)) * bits, ti.u32))

    @ti.func
    def write_tile(thread, lane, warp, values: ti.template(), by_token, shared: ti.template(), arrays: ti.template(),
                   place, params):  # fmt: skip
        parts, lows, scales, channels_by, words = ti.static(shared)
        codes, numbers, factors = ti.static(arrays)
        for n in range((rows * words_of_row - thread + THREADS - 1) // THREADS):
            words[n * THREADS + thread] = ti.u32(0)
        token, is_first = lane // lanes * WARPS + warp, lane % lanes == 0
        factor = params[P.factors_first] + place * columns
        if ti.static(keys):
            low, scale = range_of_channel(thread, lane, warp, values, parts)
            if thread < width:
                lows[thread], scales[thread] = low, scale
                put_numbers(numbers, place * rows + thread, low, scale, channels_by[thread], params)
            if is_first:
                factors[factor + token] = half(by_token)
            ti.simt.block.sync()
            for j in ti.static(range(channels)):
                low_of, scale_of = lows[lane + j * LANES], scales[lane + j * LANES]
                for i in ti.static(range(tokens)):
                    e = ti.static(i * channels + j)
                    put_code(words, i * WARPS + warp, lane + j * LANES, values[e], low_of, scale_of)
        else:
            low, scale = range_of_token(lane, values)
            if is_first:
                put_numbers(numbers, place * rows + token, low, scale, by_token, params)
            if thread < width:
                factors[factor + thread] = half(channels_by[thread])
            ti.simt.block.sync()
            for i in ti.static(range(tokens)):
                low_of, scale_of = shuffle(low, ti.static(i * lanes)), shuffle(scale, ti.static(i * lanes))
                for j in ti.static(range(channels)):
                    e = ti.static(i * channels + j)
                    put_code(words, i * WARPS + warp, lane + j * LANES, values[e], low_of, scale_of)
        ti.simt.block.sync()
        for n in range((rows * words_of_row - thread + THREADS - 1) // THREADS):
            to = n * THREADS + thread
            word = to
            if ti.static(keys):
                word = to % words_of_row * rows + to // words_of_row
            codes[params[P.codes_first] + place * rows * words_of_row + to] = words[word]

    return write_tile


def make_encode_tiles_cuda(c):
    """encode_tiles(rows, codes, numbers, factors, params); the extent of rows is the tiles times `THREADS`.

    Args:
        c: `tiles.Tiles`.
    """
    form, width = TILE_FORMATS[c.name], c.width
    load_tile, balance, write_tile = make_load_tile(c), make_balance(c), make_write_tile(c)
    count, held = form.group * width * form.bits(c.of) // 32, numbers_of(c)
    HALVES = word_array(16)

    @ti.func
    def encode_tile(thread, tile, rows: ti.template(), arrays: ti.template(), params):
        parts = ti.simt.block.SharedArray((WARPS * width,), ti.f32)
        of_channels = ti.simt.block.SharedArray((width,), ti.f32)  # means, and later the least numbers
        scales = ti.simt.block.SharedArray((width,), ti.f32)
        channels_by = ti.simt.block.SharedArray((2 * width,), ti.f32)
        edges = ti.simt.block.SharedArray((4 * WARPS,), ti.f32)
        words = ti.simt.block.SharedArray((count,), ti.u32)
        lane, warp, of_head = thread % LANES, thread // LANES, params[P.tokens] // form.group
        ti.simt.block.sync()  # another tile of the block may be in shared memory
        x, values = [ti.f32(0.0) for _ in range(held)], [ti.f32(0.0) for _ in range(held)]
        load_tile(rows, tile, lane, warp, x, params)
        by_token = balance(thread, lane, warp, x, values, (parts, of_channels, edges, channels_by))
        place = tile // of_head * params[P.step] + tile % of_head
        shared = ti.static((parts, of_channels, scales, channels_by, words))
        write_tile(thread, lane, warp, values, by_token, shared, arrays, place, params)

    @ti.kernel
    def encode_tiles(rows: element_array(c.code), codes: word_array(32), numbers: HALVES, factors: HALVES,
                     params: PARAMS):  # fmt: skip
        ti.loop_config(block_dim=THREADS)
        for i in range(rows.shape[0]):
            encode_tile(i % THREADS, i // THREADS, rows, (codes, numbers, factors), params)

    return encode_tiles


make_encode_tiles_cuda.resident = lambda c: 1
make_encode_tiles_cuda.uses_bitcode = True
