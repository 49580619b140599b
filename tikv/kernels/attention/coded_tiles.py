"""Attention over KVarN's tiles, for few queries: their codes are read in place, by rotated queries.

Keys and values of a tile are each a matrix of codes. A line of codes has a scale and a bias, a column has a factor: for
keys, lines are channels and columns tokens; for values it is the other way round. So a query's scores with a tile, and
a tile's share of a result, are both the product of a row of numbers with such a matrix: numbers meet the scales and
biases of lines, and sums the factors of columns. Between the two products, `make_tile_weights` turns scores into
weights. Results are in the rotated basis, see `hadamard`.
"""

import zlib
from typing import Any, NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.cpu.lines import BAND, make_line_sums
from tikv.kernels.attention.cpu.loops import before, flipped, ordered
from tikv.kernels.attention.mass import make_joined
from tikv.kernels.attention.parameters import BITS, FLOATS, LOG2E, LOWEST, MINUS_INFINITY, NAN, SCALARS, X
from tikv.kernels.attention.softmax import exp2, inverse_of, is_nan, is_nothing, make_logit, not_above_zero
from tikv.kernels.codec import ELEMENT, make_bits_to_f32, make_element_to_f32, word_array
from tikv.kernels.groups import step_of_code, unit_of
from tikv.kernels.lanes import LEAST_ITERATIONS, butterfly_distances, make_loop, make_row_max, make_row_sum
from tikv.runtime import ti

UNIT = 8  # codes that a GPU's thread takes at a time
EXACT = 0x4B000000  # the bits of 2**23, whose last bits are a code
AHEAD = 8  # lines of codes that a GPU's thread loads before it uses them; they divide the lines of every tile
LANES = 32  # of a GPU, for a row of scores
PIECE = 64  # neighbouring slots of a row that a CPU computes in a loop; they divide every group of tokens


class ProductParams(NamedTuple):
    """Numbers of a launch: items of work, extents, strides and first entries."""

    items: int = 0
    tiles: int = 0  # of a sequence that are read
    room: int = 0  # tiles that fit in the memory of a sequence, or of a block
    heads: int = 1  # KV heads
    queries: int = 1  # of a query head
    parts: int = 1  # in which the tiles are read
    each: int = 1  # tiles of a part
    part: int = 0  # the step from the result of a part to the next
    tokens: int = 0  # the stride between rows of scores
    codes_first: int = 0
    numbers_first: int = 0
    factors_first: int = 0
    blocks: int = 0  # that a table may name
    table_sequence: int = 0
    table_first: int = 0
    lens_sequence: int = 0
    lens_first: int = 0
    work: int = 0  # on CPU: the stride between the workers' memory


class WeightParams(NamedTuple):
    """Numbers of a launch that turns scores into weights."""

    items: int = 0
    all_rows: int = 0
    rows: int = 1  # of a KV head
    queries: int = 1
    heads: int = 1  # KV heads
    tokens: int = 0  # the stride between rows of scores
    slots: int = 0  # that have scores
    length: int = 0  # of every sequence, if there is no array of lengths
    first_valid: int = 0
    ahead: int = 0
    window: int = 0
    ring: int = 0
    lens_sequence: int = 0
    lens_first: int = 0
    lse_first: int = 0
    lse_sequence: int = 0  # of log-sum-exps that are given: strides
    lse_head: int = 0
    lse_token: int = 0
    mass_sequence: int = 0
    mass_head: int = 0
    mass_first: int = 0


class ProductForm(NamedTuple):
    """The compile-time choices of the kernels of tiles."""

    of: str  # "keys" or "values"
    bits: int
    lines: int  # of codes in a tile
    columns: int
    group: int  # query heads of a KV head
    table: int  # bits of an entry of the table; 0 without a table
    lens: int  # bits of a length; 0: all tiles are read


class WeightForm(NamedTuple):
    """The compile-time choices of `make_tile_weights`."""

    group: int
    causal: bool
    softcap: bool
    lens: int


P = ProductParams(*range(len(ProductParams._fields)))
W = WeightParams(*range(len(WeightParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)
WEIGHT_PARAMS = ti.types.vector(len(W), ti.i32)


def make_find_tile(c):
    """find_tile(b, h, g, table, lens, params): which of all tiles is tile g of a KV head; -1 if it is missing."""
    tokens = c.columns if c.of == "keys" else c.lines

    @ti.func
    def find_tile(b, h, g, table: ti.template(), lens: ti.template(), params):
        tile = (b * params[P.heads] + h) * params[P.room] + g
        if ti.static(c.table > 0):
            block = ti.cast(table[params[P.table_first] + b * params[P.table_sequence] + g // params[P.room]], ti.i64)
            tile = -1
            if block >= ti.i64(0) and block < ti.cast(params[P.blocks], ti.i64):
                tile = (ti.cast(block, ti.i32) * params[P.heads] + h) * params[P.room] + g % params[P.room]
        if ti.static(c.lens > 0):
            length = ti.cast(lens[params[P.lens_first] + b * params[P.lens_sequence]], ti.i64)
            tile = ti.select(ti.cast(g, ti.i64) * tokens < length, tile, -1)
        return tile

    return find_tile


def make_rows_of(c):
    """(row_of_queries, row_of_scores)(b, h, r, params): where row r of KV head h lies; r counts heads first.

    Queries and results are rows (sequence, query head, query), and scores rows (sequence, KV head, r).
    """
    width = c.lines if c.of == "keys" else c.columns

    @ti.func
    def row_of_queries(b, h, r, params):
        head = (b * params[P.heads] + h) * c.group + r % c.group
        return (head * params[P.queries] + r // c.group) * width

    @ti.func
    def row_of_scores(b, h, r, params):
        return ((b * params[P.heads] + h) * c.group * params[P.queries] + r) * params[P.tokens]

    return row_of_queries, row_of_scores


def make_unit(bits):
    """(unit(word), steps, middle): codes minus `middle`, each times a power of two, and what undoes those powers.

    A code is put into the last bits of 2**23, which is then subtracted: conversions take a GPU longer. So is the middle
    of all codes, since sums of large products that cancel are less exact.
    """
    shifts, middle = [e * bits % 16 for e in range(UNIT)], 1 << (bits - 1)
    steps = [0.5**shift for shift in shifts]

    @ti.func
    def unit(word):
        values = ti.Vector([ti.f32(0.0)] * UNIT)
        for e in ti.static(range(UNIT)):
            half = word
            if ti.static(e * bits >= 16):
                half = word >> ti.u32(16)
            x = (half & ti.u32(ti.static(((1 << bits) - 1) << shifts[e]))) | ti.u32(EXACT)
            values[e] = ti.bit_cast(x, ti.f32) - ti.f32(ti.static(8388608.0 + (middle << shifts[e])))
        return values

    return unit, steps, float(middle)


def make_tile_products(style, band, c):
    """products(x, codes, numbers, factors, table, lens, out, params) on GPUs: rows of numbers times matrices of codes.

    For keys, `x` has rows of queries and `out` rows of scores; for values, `x` has rows of weights and `out` the
    results of each part of the tiles.

    Args:
        style: as in `lanes.make_loop`.
        band: rows that an item computes for a unit of codes; it divides the number of rows of a KV head.
        c: `ProductForm`.
    """
    unit, steps, middle = make_unit(c.bits)
    half, units, lines, keys = make_bits_to_f32("f16"), c.columns // UNIT, c.lines, c.of == "keys"
    CODES, TABLE, LENS = word_array(UNIT * c.bits), index_array(c.table), index_array(c.lens)
    find_tile, (row_of_queries, row_of_scores) = make_find_tile(c), make_rows_of(c)

    @ti.func
    def product(i, arrays: ti.template(), params):
        x, codes, numbers, factors, table, lens, out = ti.static(arrays)
        u, rest = i % units, i // units
        part, rest = rest % params[P.parts], rest // params[P.parts]
        bands = c.group * params[P.queries] // band
        first_row, head = rest % bands * band, rest // bands
        b, h = head // params[P.heads], head % params[P.heads]
        begin = part * params[P.each]
        at = ti.Vector([0] * band)
        for n in ti.static(range(band)):
            if ti.static(keys):
                at[n] = row_of_queries(b, h, first_row + n, params)
            else:
                at[n] = row_of_scores(b, h, first_row + n, params) + begin * lines
        total = ti.Vector([ti.f32(0.0)] * (band * UNIT))
        for g in range(begin, ti.min(begin + params[P.each], params[P.tiles])):
            tile = find_tile(b, h, g, table, lens, params)
            if tile >= 0:
                sums = ti.Vector([ti.f32(0.0)] * (band * UNIT))
                biases = ti.Vector([ti.f32(0.0)] * band)
                number, word = params[P.numbers_first] + tile * lines, params[P.codes_first] + tile * lines * units + u
                for turn in range(lines // AHEAD):
                    # Loads that follow each other wait for memory together.
                    pairs, packed = ti.Vector([ti.u32(0)] * AHEAD), ti.Vector([ti.u32(0)] * AHEAD)
                    for a in ti.static(range(AHEAD)):
                        pairs[a] = numbers[number + turn * AHEAD + a]
                        packed[a] = ti.cast(codes[word + (turn * AHEAD + a) * units], ti.u32)
                    for a in ti.static(range(AHEAD)):
                        scale = half(pairs[a] & ti.u32(0xFFFF))
                        bias = half(pairs[a] >> ti.u32(16)) + scale * ti.f32(middle)
                        values = unit(packed[a])
                        for n in ti.static(range(band)):
                            y = x[at[n] + turn * AHEAD + a]
                            biases[n] += y * bias
                            y = y * scale
                            for e in ti.static(range(UNIT)):
                                sums[n * UNIT + e] += values[e] * y
                column = params[P.factors_first] + tile * c.columns + u * UNIT
                for e in ti.static(range(UNIT)):
                    factor = half(factors[column + e])
                    for n in ti.static(range(band)):
                        total[n * UNIT + e] += (sums[n * UNIT + e] * ti.f32(ti.static(steps[e])) + biases[n]) * factor
            if ti.static(not keys):
                for n in ti.static(range(band)):
                    at[n] += lines
        for n in ti.static(range(band)):
            to = u * UNIT
            if ti.static(keys):
                to += row_of_scores(b, h, first_row + n, params) + part * c.columns
            else:
                to += row_of_queries(b, h, first_row + n, params) + part * params[P.part]
            for e in ti.static(range(UNIT)):
                out[to + e] = total[n * UNIT + e]

    loop = make_loop(style, False, product, P.items)

    @ti.kernel
    def products(x: FLOATS, codes: CODES, numbers: word_array(32), factors: word_array(16), table: TABLE, lens: LENS,
                 out: FLOATS, params: PARAMS):  # fmt: skip
        loop(x, params, ((x, codes, numbers, factors, table, lens, out), params))

    return products


make_tile_products.fast_math = True


def make_tile_products_cpu(workers, rows, c):
    """products(x, codes, numbers, factors, table, lens, out, work, params) on CPU: as `make_tile_products`.

    A task is a part of a KV head's tiles. `make_line_sums` has the loops over codes.
    The function is not cached, since its real functions belong to one Taichi program.

    Args:
        workers: threads; 1 runs in the calling thread.
        rows: query heads of a KV head times the queries of each.
        c: `ProductForm`.

    `work` holds `line_work_floats` floats for each worker.
    """
    name, lines, columns, keys = f"quant{c.bits}_32", c.lines, c.columns, c.of == "keys"
    (count, words), value = unit_of(name), make_element_to_f32("f16")
    units, steps = columns // count, [1 / step_of_code(name, e) for e in range(count)]
    B = max(n for n in range(1, BAND + 1) if rows % n == 0)
    list_lines, fetch, add_up = make_line_sums(name, lines, columns, B)
    CODES, TABLE, LENS = word_array(32), index_array(c.table), index_array(c.lens)
    HALVES = ti.types.ndarray(dtype=ELEMENT["f16"], ndim=1)
    find_tile, (row_of_queries, row_of_scores) = make_find_tile(c), make_rows_of(c)
    uid = zlib.crc32(repr((workers, rows, c)).encode()) >> 1
    iterations, every = (workers * LEAST_ITERATIONS, LEAST_ITERATIONS) if workers > 1 else (1, 1)

    @ti.real_func
    def multiply(x: FLOATS, numbers: HALVES, work: FLOATS, at: ti.i32, number: ti.i32, to: ti.i32, sum_to: ti.i32,
                 uid: ti.i32):  # fmt: skip
        first, scales, begin, total = before(at, lines), before(number, 2 * lines), before(to, lines), ti.f32(0.0)
        for r in range(lines):
            y = x[first + r]
            work[begin + r] = y * value(numbers[scales + r * 2])
            total += y * value(numbers[scales + r * 2 + 1])
        work[sum_to] = total

    @ti.real_func
    def store(factors: HALVES, work: FLOATS, out: FLOATS, first: ti.i32, bias: ti.f32, factor: ti.i32, to: ti.i32,
              is_first: ti.i32, uid: ti.i32):  # fmt: skip
        begin, target, column = before(first, columns), before(to, columns), before(factor, columns)
        for u in range(units):
            for e in ti.static(range(count)):
                at = u * count + e
                x = work[begin + ti.static(e * units) + u] * ti.f32(ti.static(steps[e])) + bias
                previous = ti.select(is_first == 1, ti.f32(0.0), out[target + at])
                out[target + at] = previous + x * value(factors[column + at])

    @ti.real_func
    def clear(out: FLOATS, to: ti.i32, uid: ti.i32):
        begin = before(to, columns)
        for n in range(columns):
            out[begin + n] = ti.f32(0.0)

    @ti.func
    def product(task, to, arrays: ti.template(), params):
        x, codes, numbers, factors, table, lens, out, work = ti.static(arrays)
        part, head = task % params[P.parts], task // params[P.parts]
        b, h = head // params[P.heads], head % params[P.heads]
        biases, listed, sums = to + BAND * lines, to + BAND * (lines + 1), to + (BAND + 1) * (lines + 1)
        begin = part * params[P.each]
        for g in range(begin, ti.min(begin + params[P.each], params[P.tiles])):
            tile = find_tile(b, h, g, table, lens, params)
            first = params[P.codes_first] + tile * (lines * units * words)
            if tile >= 0:
                fetch(codes, work, first, sums, uid)
            for n in range(rows // B):
                target = ti.Vector([0] * B)
                for m in ti.static(range(B)):
                    r = n * B + m
                    if ti.static(keys):
                        target[m] = row_of_scores(b, h, r, params) + g * columns
                    else:
                        target[m] = row_of_queries(b, h, r, params) + part * params[P.part]
                if tile >= 0:
                    for m in range(B):
                        at = row_of_queries(b, h, n * B + m, params)
                        if ti.static(not keys):
                            at = row_of_scores(b, h, n * B + m, params) + g * lines
                        number = params[P.numbers_first] + tile * (2 * lines)
                        multiply(x, numbers, work, at, number, to + m * lines, biases + m, uid)
                    add_up(codes, work, first, to, listed, sums, uid)
                    for m in ti.static(range(B)):
                        is_first = 1
                        if ti.static(not keys):
                            is_first = ti.select(g == begin, 1, 0)
                        store(factors, work, out, sums + m * columns, work[biases + m],
                              params[P.factors_first] + tile * columns, target[m], is_first, uid)  # fmt: skip
                elif keys or g == begin:
                    for m in ti.static(range(B)):
                        clear(out, target[m], uid)

    @ti.kernel
    def products(x: FLOATS, codes: CODES, numbers: HALVES, factors: HALVES, table: TABLE, lens: LENS, out: FLOATS,
                 work: FLOATS, params: PARAMS):  # fmt: skip
        ti.loop_config(serialize=workers == 1)
        for i in range(iterations):
            worker, tasks = i // every, 0
            if i % every == 0:
                tasks = (params[P.items] - worker + workers - 1) // workers
            if tasks > 0:
                list_lines(work, worker * params[P.work] + BAND * (lines + 1), uid)
            for turn in range(tasks):
                product(turn * workers + worker, worker * params[P.work],
                        (x, codes, numbers, factors, table, lens, out, work), params)  # fmt: skip

    return products


make_tile_products_cpu.fast_math = True


def make_seen(c):
    """seen(b, t, lens, params) -> (first, count): the slot of the first token that query t sees, and how many it sees.

    They are those of `visible.make_query_bounds`.
    """

    @ti.func
    def seen(b, t, lens: ti.template(), params):
        length = params[W.length]
        if ti.static(c.lens > 0):
            length = ti.cast(lens[params[W.lens_first] + b * params[W.lens_sequence]], ti.i32)
        low, high = params[W.first_valid], length
        if ti.static(c.causal):
            position = length + params[W.ahead] - (params[W.queries] - t)
            low, high = ti.max(low, position - params[W.window] + 1), ti.min(high, position + 1)
        first = low
        if params[W.ring] > 0:
            low = ti.max(low, length - params[W.ring])
            first = low % params[W.ring]
        return ti.Vector([first, ti.max(high - low, 0)])

    return seen


@ti.func
def is_seen(slot, first, count, ring):
    """Whether a slot's token is seen."""
    distance = slot - first
    distance += ti.select(distance < 0, ring, 0)
    return ti.cast(distance, ti.u32) < ti.cast(count, ti.u32)


class RowSteps(NamedTuple):
    """What is done with a row of scores one after another, by the lanes of the row together."""

    greatest: Any  # greatest(scores, at, lane, slots, first, count, ring, scale, softcap): logits, and the greatest
    weigh: Any  # weigh(scores, at, lane, slots, first, count, ring, m): weights, and their sum
    multiply: Any  # multiply(scores, at, lane, slots, factor)


def make_row_steps(c):
    """The `RowSteps` of GPUs."""
    logit_of = make_logit(c)

    @ti.func
    def greatest(scores: ti.template(), at, lane, slots, first, count, ring, scale, softcap):
        m = ti.f32(LOWEST)
        for n in range((slots - lane + LANES - 1) // LANES):
            slot = lane + n * LANES
            logit = logit_of(scores[at + slot], scale, softcap)
            logit = ti.select(is_seen(slot, first, count, ring), logit, ti.f32(LOWEST))
            scores[at + slot] = logit
            m = ti.max(m, logit)
        return m

    @ti.func
    def weigh(scores: ti.template(), at, lane, slots, first, count, ring, m):
        l = ti.f32(0.0)
        for n in range((slots - lane + LANES - 1) // LANES):
            slot = lane + n * LANES
            weight = ti.select(is_seen(slot, first, count, ring), exp2(scores[at + slot] - m), ti.f32(0.0))
            scores[at + slot] = weight
            l += weight
        return l

    @ti.func
    def multiply(scores: ti.template(), at, lane, slots, factor):
        for n in range((slots - lane + LANES - 1) // LANES):
            scores[at + lane + n * LANES] *= factor

    return RowSteps(greatest, weigh, multiply)


def make_row_steps_cpu(c):
    """The `RowSteps` of a CPU, whose loops over `PIECE` slots LLVM vectorises."""
    logit_of, uid = make_logit(c), zlib.crc32(repr(c).encode()) >> 1

    @ti.real_func
    def logits(scores: FLOATS, at: ti.i32, slot: ti.i32, first: ti.i32, count: ti.i32, ring: ti.i32, scale: ti.f32,
               softcap: ti.f32, uid: ti.i32):  # fmt: skip
        begin = before(at + slot, PIECE)
        for n in range(PIECE):
            logit = logit_of(scores[begin + n], scale, softcap)
            scores[begin + n] = ti.select(is_seen(slot + n, first, count, ring), logit, ti.f32(LOWEST))

    @ti.real_func
    def largest(scores: FLOATS, at: ti.i32, top: ti.i32, uid: ti.i32) -> ti.i32:
        begin, most = before(at, PIECE), top
        for n in range(PIECE):
            most = ti.max(most, ordered(scores[begin + n]))
        return most

    @ti.real_func
    def weights(scores: FLOATS, at: ti.i32, slot: ti.i32, first: ti.i32, count: ti.i32, ring: ti.i32, m: ti.f32,
                uid: ti.i32) -> ti.f32:  # fmt: skip
        begin, l = before(at + slot, PIECE), ti.f32(0.0)
        for n in range(PIECE):
            weight = ti.select(is_seen(slot + n, first, count, ring), exp2(scores[begin + n] - m), ti.f32(0.0))
            scores[begin + n] = weight
            l += weight
        return l

    @ti.real_func
    def multiply_piece(scores: FLOATS, at: ti.i32, factor: ti.f32, uid: ti.i32):
        begin = before(at, PIECE)
        for n in range(PIECE):
            scores[begin + n] *= factor

    @ti.func
    def greatest(scores: ti.template(), at, lane, slots, first, count, ring, scale, softcap):
        top = ordered(ti.f32(LOWEST))
        for n in range(slots // PIECE):
            logits(scores, at, n * PIECE, first, count, ring, scale, softcap, uid)
            top = largest(scores, at + n * PIECE, top, uid)
        return ti.bit_cast(flipped(top), ti.f32)

    @ti.func
    def weigh(scores: ti.template(), at, lane, slots, first, count, ring, m):
        l = ti.f32(0.0)
        for n in range(slots // PIECE):
            l += weights(scores, at, n * PIECE, first, count, ring, m, uid)
        return l

    @ti.func
    def multiply(scores: ti.template(), at, lane, slots, factor):
        for n in range(slots // PIECE):
            multiply_piece(scores, at + n * PIECE, factor, uid)

    return RowSteps(greatest, weigh, multiply)


def make_tile_weights(style, serial, c):
    """weights(scores, lens, lse, params, scalars): scores become weights, in place, whose sum is 1, or 0 for no tokens.

    An item is a row on CPU, and a lane of a row on GPUs. Slots whose tokens a row does not see get the weight 0. On CPU
    the function is not cached, since its real functions belong to one Taichi program.
    """
    steps, seen = make_row_steps_cpu(c) if style == "cpu" else make_row_steps(c), make_seen(c)
    lanes = 1 if style == "cpu" else LANES
    row_max, row_sum = make_row_max(style, lanes), make_row_sum(style, tuple(butterfly_distances(lanes)))
    LENS = index_array(c.lens)

    @ti.func
    def greatest_of_lanes(i, m):
        """The greatest number of a row's lanes, compared as unsigned integers of the same order."""
        sign = ti.u32(0x80000000)
        bits = row_max(i, ti.bit_cast(ordered(m), ti.u32) ^ sign)
        return ti.bit_cast(flipped(ti.bit_cast(bits ^ sign, ti.i32)), ti.f32)

    @ti.func
    def item(i, arrays: ti.template(), params, scalars):
        scores, lens, lse = ti.static(arrays)
        row, lane = i // lanes, i % lanes
        inside = row < params[W.all_rows]
        row = ti.select(inside, row, 0)
        head, r = row // params[W.rows], row % params[W.rows]
        b, t = head // params[W.heads], r // c.group
        slots, ring, at = ti.select(inside, params[W.slots], 0), params[W.ring], row * params[W.tokens]
        bounds = seen(b, t, lens, params)
        first, count = bounds[0], bounds[1]
        m = steps.greatest(scores, at, lane, slots, first, count, ring, scalars[X.logit_scale], scalars[X.softcap])
        m = greatest_of_lanes(i, m)
        l = row_sum(i, steps.weigh(scores, at, lane, slots, first, count, ring, m))
        steps.multiply(scores, at, lane, slots, inverse_of(l))
        if lane == 0 and inside:
            bits = ti.u32(MINUS_INFINITY)
            if not is_nothing(l):
                value = (m + ti.log(l) * ti.f32(LOG2E)) * scalars[X.lse_scale]
                bits = ti.select(is_nan(l), ti.u32(NAN), ti.bit_cast(value, ti.u32))
            lse[params[W.lse_first] + (head * c.group + r % c.group) * params[W.queries] + t] = bits

    loop = make_loop(style, serial, item, W.items)

    @ti.kernel
    def weights(scores: FLOATS, lens: LENS, lse: BITS, params: WEIGHT_PARAMS, scalars: SCALARS):
        loop(scores, params, ((scores, lens, lse), params, scalars))

    return weights


make_tile_weights.fast_math = True


def make_tile_mass(style, serial, greatest, c):
    """mass(scores, lens, lse, mass, params, scalars): the mass of each token, as `mass.make_mass` defines it.

    An item is a slot of a KV head. `mass` is in the order of tokens, from `first_valid` on.
    """
    logit_of, seen, joined, LENS = make_logit(c), make_seen(c), make_joined(greatest), index_array(c.lens)

    @ti.func
    def mass_of_slot(i, arrays: ti.template(), params, scalars):
        scores, lens, lse, mass = ti.static(arrays)
        slot, head = i % params[W.slots], i // params[W.slots]
        b, h, ring = head // params[W.heads], head % params[W.heads], params[W.ring]
        total, is_seen_by_any = ti.f32(0.0), 0
        for t in range(params[W.queries]):
            bounds = seen(b, t, lens, params)
            if is_seen(slot, bounds[0], bounds[1], ring):
                is_seen_by_any = 1
                for g in range(c.group):
                    row = lse[params[W.lse_first] + b * params[W.lse_sequence] + t * params[W.lse_token]
                              + (h * c.group + g) * params[W.lse_head]]  # fmt: skip
                    if row != ti.u32(MINUS_INFINITY):
                        at = (head * params[W.rows] + t * c.group + g) * params[W.tokens] + slot
                        logit = logit_of(scores[at], scalars[X.logit_scale], scalars[X.softcap])
                        below = logit - ti.bit_cast(row, ti.f32) / scalars[X.lse_scale]
                        total = joined(total, exp2(not_above_zero(below)))
        if is_seen_by_any == 1:
            first = params[W.first_valid]
            if ring > 0:
                first = first % ring
            number = slot - first
            number += ti.select(number < 0, ring, 0)
            at = params[W.mass_first] + b * params[W.mass_sequence] + h * params[W.mass_head] + number
            mass[at] = joined(mass[at], total)

    loop = make_loop(style, serial, mass_of_slot, W.items)

    @ti.kernel
    def mass_of_tokens(scores: FLOATS, lens: LENS, lse: BITS, mass: FLOATS, params: WEIGHT_PARAMS, scalars: SCALARS):
        loop(scores, params, ((scores, lens, lse, mass), params, scalars))

    return mass_of_tokens


make_tile_mass.fast_math = True
