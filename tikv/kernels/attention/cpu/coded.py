"""The loops of attention on CPU over formats with groups, which never dequantise a row.

With s and b the scale and bias of a group, q.k is the sum over groups of s (q.codes) + b sum(q), and a weight p adds
p s codes + p b to a result. One shift and one mask take codes out of a vector of neighbouring words. The numbers of a
query, and of a result until it is stored, lie in the order in which codes come out: those of one place in all units
together. A loop that LLVM vectorises reads the words of K. For V the code writes out each lane and LLVM joins them, so
the sums over keys stay in registers.
"""

from typing import Any, NamedTuple

from tikv.formats import GROUP_FORMATS
from tikv.kernels.attention.cpu.loops import CHUNK, ROW, before, rows_per_band
from tikv.kernels.attention.parameters import FLOATS, array_types
from tikv.kernels.attention.softmax import is_masked
from tikv.kernels.codec import SIZE, make_element_to_f32, make_load, make_store
from tikv.kernels.groups import (
    make_code,
    make_code_to_f32,
    make_column,
    make_place,
    offset_of,
    step_of_code,
    unit_of,
)
from tikv.runtime import ti

LEAST_GROUP = 16
LANES = 8  # of a vector on most CPUs
KEYS = 2  # that are multiplied with queries together
SUMS = 8  # vectors of sums that a pass over a chunk's keys keeps in registers
ENDED = -1  # follows the last of the listed keys


def work_floats(rows, width, width_v):
    """Floats that codes take of a worker's memory beside its rows: (scales, numbers, sums of queries)."""
    widest = max(width, width_v)
    groups = widest // LEAST_GROUP
    return groups * ROW, (CHUNK + 1) * groups * 2, rows * groups


class CodeLoops(NamedTuple):
    """Loops over the codes of listed keys of a head."""

    load_query: Any
    sum_queries: Any
    load_numbers: Any
    dots: Any


class ValueLoops(NamedTuple):
    """Loops over the codes of the values of listed keys of a head."""

    load_numbers: Any
    add_values: Any
    add_visible_values: Any
    store: Any


def make_key_loops(c):
    """The `CodeLoops` of one set of choices."""
    name = c.cache
    return CodeLoops(make_load_query(name, c), make_sum_queries(name, c), make_load_numbers(name, c.width, c),
                     make_dots(name, c))  # fmt: skip


def make_value_loops(c):
    """The `ValueLoops` of one set of choices."""
    add_values = make_add_values(c, False)
    careful = make_add_values(c, True) if c.masked else add_values
    return ValueLoops(make_load_numbers(c.cache, c.width_v, c), add_values, careful, make_store_values(c.cache, c))


def has_bias(name):
    """Whether a code of 0 may stand for a number other than 0."""
    return GROUP_FORMATS[name].numbers == 2 or offset_of(name) != 0.0


def make_load_query(name, c):
    """load_query(...): loads a row of queries, place by place over all units, divided by the place's step."""
    Q, _, _, _, _, _ = array_types("cpu", c)
    load_q, column = make_load(c.query, 1, SIZE[c.query] * 8), make_column(name)
    count, _ = unit_of(name)
    units, steps = c.width // count, [1 / step_of_code(name, e) for e in range(count)]

    @ti.real_func
    def load_query(q: Q, work: FLOATS, at: ti.i32, to: ti.i32, number: ti.i32):
        for u in range(units):
            for e in ti.static(range(count)):
                work[to + e * units + u] = load_q(q, at + column(u * count + e))[0] * ti.f32(ti.static(steps[e]))

    return load_query


def make_sum_queries(name, c):
    """sum_queries(...): sums each row of queries over each group."""
    row, (count, _) = GROUP_FORMATS[name], unit_of(name)
    units, groups, rows = row.group // count, c.width // row.group, -(-c.rows // rows_per_band(c.rows))
    rows, steps = rows * rows_per_band(c.rows), [step_of_code(name, e) for e in range(count)]

    @ti.real_func
    def sum_queries(work: FLOATS, queries: ti.i32, to: ti.i32, number: ti.i32):
        for r in range(rows):
            for i in range(groups):
                total = ti.f32(0.0)
                for u in range(units):
                    for e in ti.static(range(count)):
                        total += work[queries + (r * count + e) * (groups * units) + i * units + u] * steps[e]
                work[to + r * groups + i] = total

    return sum_queries


def make_load_numbers(name, width, c):
    """load_numbers(...): loads the scales and biases of the listed keys, key by key."""
    _, _, _, _, SC, _ = array_types("cpu", c)
    value, numbers = make_element_to_f32(c.scale), width // GROUP_FORMATS[name].group * GROUP_FORMATS[name].numbers

    @ti.real_func
    def load_numbers(scales: SC, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):
        begin, end = ti.bit_cast(work[lists], ti.i32), ti.bit_cast(work[lists + n - 1], ti.i32)
        together = 0  # keys that follow one another in memory; pages and chosen tokens may not
        if ti.static(c.kind != "table" and not c.index_bits):
            together = ti.select(end - begin == (n - 1) * numbers, ti.min(n, CHUNK), 0)
        at, behind = before(begin + first, CHUNK * numbers), before(to, CHUNK * numbers)
        for x in range(together * numbers):
            work[behind + x] = value(scales[at + x])
        for j in range(together, n):
            at = before(ti.bit_cast(work[lists + j], ti.i32) + first, numbers)
            row_numbers = [value(scales[at + x]) for x in range(numbers)]
            behind = before(to + j * numbers, numbers)
            for x in ti.static(range(numbers)):
                work[behind + x] = row_numbers[x]

    return load_numbers


def make_bias_of(name):
    """bias_of(work, at): the bias of a group whose scale, and bias, were loaded."""
    two, offset = GROUP_FORMATS[name].numbers == 2, offset_of(name)

    @ti.func
    def bias_of(work: ti.template(), at):
        bias = ti.f32(0.0)
        if ti.static(two):
            bias = work[at + 1]
        else:
            bias = work[at] * ti.f32(offset)
        return bias

    return bias_of


def is_spread(name, rows):
    """Whether the scales of K are copied, one for each unit.

    They are if a group has so few units that LLVM would unroll a loop over them instead of vectorising it. They also
    are for several rows: all rows use the product of a code and its scale, and each row has one sum for all groups.
    """
    return rows_per_band(rows) > 1 or GROUP_FORMATS[name].group // unit_of(name)[0] <= LANES


def make_dots(name, c):
    """dots(...): computes the scores of all rows with the listed keys, whose numbers were loaded.

    Two keys at a time share one load of the query.
    """
    _, KV, _, _, _, _ = array_types("cpu", c)
    row, code, (count, words) = GROUP_FORMATS[name], make_code(name), unit_of(name)
    B, bias_of, biased = rows_per_band(c.rows), make_bias_of(name), has_bias(name)
    bands, groups, units, per_group = -(-c.rows // B), c.width // row.group, c.width // count, row.group // count
    G = groups * row.numbers
    spread_out = is_spread(name, c.rows)

    @ti.func
    def dot(k: ti.template(), work: ti.template(), rows: ti.template(), q, u, steps: ti.template()):
        """The products of a unit of each key with each row of queries, times the unit's scales."""
        sums = ti.Vector([ti.f32(0.0) for _ in range(KEYS * B)])
        packed = [[k[rows[x] + u * words + w] for w in range(words)] for x in range(KEYS)]
        for e in ti.static(range(count)):
            for x in ti.static(range(KEYS)):
                number = code(packed[x], e)
                if ti.static(B > 1):
                    number = number * steps[x]
                for g in ti.static(range(B)):
                    sums[x * B + g] += number * work[q + ti.static((g * count + e) * units) + u]
        if ti.static(B == 1):
            sums = sums * steps
        return sums

    @ti.real_func
    def dots(k: KV, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, numbers: ti.i32, spread: ti.i32,
             queries: ti.i32, query_sums: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for band in range(bands):
            q, at = before(queries + band * B * c.width, B * c.width), to + band * B * ROW
            totals = before(query_sums + band * B * groups, B * groups)
            for pair in range((n + KEYS - 1) // KEYS):
                j = pair * KEYS
                rows = [before(ti.bit_cast(work[lists + j + x], ti.i32) + first, units * words) for x in range(KEYS)]
                of_keys = before(numbers + j * G, KEYS * G)
                sums = ti.Vector([ti.f32(0.0) for _ in range(KEYS * B)])
                if ti.static(spread_out):
                    scale = before(spread, KEYS * units)
                    for x in ti.static(range(KEYS)):
                        for i in ti.static(range(groups)):
                            step = work[of_keys + ti.static(x * G + i * row.numbers)]
                            for u in ti.static(range(per_group)):
                                work[scale + ti.static(x * units + i * per_group + u)] = step
                    for u in range(units):
                        steps = ti.Vector([work[scale + x * units + u] for x in range(KEYS)])
                        sums += dot(k, work, rows, q, u, steps)
                else:
                    for i in range(groups):
                        of_group = ti.Vector([ti.f32(0.0) for _ in range(KEYS)])
                        for u in range(per_group):
                            of_group += dot(k, work, rows, q, i * per_group + u, ti.Vector([1.0, 1.0]))
                        for x in ti.static(range(KEYS)):
                            sums[x] += of_group[x] * work[of_keys + ti.static(x * G) + i * row.numbers]
                for x in ti.static(range(KEYS)):
                    if ti.static(biased):
                        for i in ti.static(range(groups)):
                            bias = bias_of(work, of_keys + ti.static(x * G + i * row.numbers))
                            for g in ti.static(range(B)):
                                sums[x * B + g] += bias * work[totals + ti.static(g * groups + i)]
                    for g in ti.static(range(B)):
                        work[at + g * ROW + j + x] = sums[x * B + g]

    return dots


class Pass(NamedTuple):
    """The sums that a pass over a chunk's keys keeps in registers, for each row of a band."""

    lanes: int  # units of codes side by side
    codes: int  # of each unit
    parts: int  # passes over all codes of a unit


def pass_of(name, width, rows):
    """The `Pass` of a format: it has at most `SUMS` vectors of sums, unless there are more rows than that."""
    count, _ = unit_of(name)
    units = width // count
    codes = max(e for e in range(1, count + 1) if count % e == 0 and (e == 1 or e * rows <= SUMS))
    lanes = max(n for n in (1, 2, 4, LANES) if units % n == 0)
    if lanes == LANES and units % (2 * LANES) == 0 and 2 * codes * rows <= SUMS:
        lanes *= 2
    return Pass(lanes, codes, count // codes)


def make_part(name, p):
    """part(codes, at, number): a word that begins with the codes of a unit that pass `number` adds up."""
    (_, words), bits = unit_of(name), p.codes * GROUP_FORMATS[name].bits
    flip = 0x80808080 if GROUP_FORMATS[name].rule == "q8_0" else 0

    @ti.func
    def part(codes: ti.template(), at, number):
        x = ti.u32(0)
        if ti.static(words == 1):
            x = (codes[at] ^ ti.u32(flip)) >> ti.cast(number * bits, ti.u32)
        else:
            word, shift = number * bits >> 5, number * bits & 31
            behind = codes[at + ti.min(word + 1, words - 1)] << ti.u32(1)
            x = (codes[at + word] >> ti.cast(shift, ti.u32)) | (behind << ti.cast(31 - shift, ti.u32))
        return x

    return part


def make_code_of_part(name):
    """(code_of_part(x, e), steps): code e of a word from `make_part`, as a float times steps[e]."""
    bits, is_float, to_f32 = (
        GROUP_FORMATS[name].bits,
        GROUP_FORMATS[name].is_float,
        make_code_to_f32(GROUP_FORMATS[name]),
    )
    steps = [1.0 if is_float or (e + 1) * bits == 32 else float(1 << e * bits) for e in range(32 // bits)]

    @ti.func
    def float_of_part(x, e: ti.template()):
        return to_f32((x >> ti.u32(ti.static(e * bits))) & ti.u32(ti.static((1 << bits) - 1)))

    @ti.func
    def code_of_part(x, e: ti.template()):
        code = x
        if ti.static((e + 1) * bits == 32):
            code = x >> ti.u32(ti.static(e * bits))
        else:
            code = x & ti.u32(ti.static(((1 << bits) - 1) << (e * bits)))
        return ti.cast(ti.bit_cast(code, ti.i32), ti.f32)

    return (float_of_part if is_float else code_of_part), steps


def make_weigh(name, width, careful):
    """(weigh, add_biases): multiply a row's weights by the scales of keys; add weighted biases to the accumulators.

    `careful` leaves out keys that a query does not see, since their scales may be NaN.
    """
    row, (count, _), bias_of = GROUP_FORMATS[name], unit_of(name), make_bias_of(name)
    groups, units, of_group = width // row.group, width // count, row.group // count
    G = groups * row.numbers

    @ti.func
    def product(p, x):
        y = p * x
        if ti.static(careful):
            y = ti.select(is_masked(p), ti.f32(0.0), y)
        return y

    @ti.real_func
    def weigh(work: FLOATS, n: ti.i32, weights: ti.i32, numbers: ti.i32, to: ti.i32, number: ti.i32):
        p, s, t = before(weights, ROW), before(numbers, CHUNK * G), before(to, groups * ROW)
        for j in range(ti.min(n, CHUNK)):
            for i in ti.static(range(groups)):
                work[t + ti.static(i * ROW) + j] = product(work[p + j], work[s + j * G + ti.static(i * row.numbers)])

    @ti.real_func
    def add_biases(work: FLOATS, n: ti.i32, weights: ti.i32, numbers: ti.i32, to: ti.i32, number: ti.i32):
        p, s = before(weights, ROW), before(numbers, CHUNK * G)
        totals = ti.Vector([ti.f32(0.0) for _ in range(groups)])
        for j in range(ti.min(n, CHUNK)):
            for i in ti.static(range(groups)):
                totals[i] += product(work[p + j], bias_of(work, s + j * G + ti.static(i * row.numbers)))
        begin = before(to, width)
        for e in range(count):
            for i in ti.static(range(groups)):
                for u in range(of_group):
                    at = begin + e * units + ti.static(i * of_group) + u
                    work[at] = work[at] + totals[i]

    return weigh, add_biases


def make_add_values(c, careful):
    """add_values(...): adds the weighted values of the keys, whose numbers were loaded, to the accumulators.

    For one row, the weights are first multiplied by the scales; for several rows, each code is, once for all rows.
    `careful`, as in `make_weigh`, handles each row separately.
    """
    _, KV, _, _, _, _ = array_types("cpu", c.of_values)
    row, width, (count, words) = GROUP_FORMATS[c.cache], c.width_v, unit_of(c.cache)
    rows = -(-c.rows // rows_per_band(c.rows)) * rows_per_band(c.rows)
    B = 1 if careful else rows_per_band(c.rows)
    bands, groups, units, per_group = rows // B, width // row.group, width // count, row.group // count
    p = pass_of(c.cache, width, B)
    part, (code, steps), biased = make_part(c.cache, p), make_code_of_part(c.cache), has_bias(c.cache)
    weigh, add_biases = make_weigh(c.cache, width, careful)
    L, E = p.lanes, p.codes
    of_lane = [lane // per_group for lane in range(L)]  # each lane's group, counted from the first lane's
    # The strides between the factors of groups, and of keys.
    GROUP, KEY = (ROW, 1) if B == 1 else (row.numbers, groups * row.numbers)

    @ti.real_func
    def add_values(v: KV, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, numbers: ti.i32, weighed: ti.i32,
                   weights: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        work[lists + n] = ti.bit_cast(ENDED, ti.f32)
        for band in range(bands):
            begin, acc, factors = weights + band * B * ROW, to + band * B * width, numbers
            if ti.static(biased):
                for g in range(B):
                    add_biases(work, n, begin + g * ROW, numbers, acc + g * width, number)
            if ti.static(B == 1):
                weigh(work, n, begin, numbers, weighed, number)
                factors = weighed
            for turn in range(units // L * p.parts):
                block, of_unit = turn // p.parts, turn % p.parts
                of_group, of_key = factors + block * L // per_group * GROUP, begin
                sums = ti.Vector([ti.f32(0.0) for _ in range(B * E * L)])
                entry, key = lists, ti.bit_cast(work[lists], ti.i32)
                while key != ENDED:  # if the loop had a count, LLVM would gather from several keys at once
                    at = before(key + first + block * (L * words), L * words)
                    packed = [part(v, at + ti.static(lane * words), of_unit) for lane in range(L)]
                    steps_of_key = [work[of_group + i * GROUP] for i in range(of_lane[-1] + 1)]
                    shares = before(of_key, B * ROW)
                    for e in ti.static(range(E)):
                        for lane in ti.static(range(L)):
                            x = code(packed[lane], e) * steps_of_key[of_lane[lane]]
                            for g in ti.static(range(B)):
                                if ti.static(B == 1):
                                    sums[e * L + lane] += x
                                else:
                                    sums[(g * E + e) * L + lane] += x * work[shares + ti.static(g * ROW)]
                    of_group += KEY
                    of_key += 1
                    entry += 1
                    key = ti.bit_cast(work[entry], ti.i32)
                result = before(acc + of_unit * (E * units) + block * L, B * width)
                for g in ti.static(range(B)):
                    for e in ti.static(range(E)):
                        for lane in ti.static(range(L)):
                            here = result + ti.static(g * width + e * units + lane)
                            work[here] = work[here] + sums[(g * E + e) * L + lane] * ti.static(1 / steps[e])

    return add_values


def make_store_values(name, c):
    """store(...): stores a row of results, whose numbers lie in the order of `make_load_query`."""
    _, _, _, _, _, OUT = array_types("cpu", c)
    store_value, place, (count, _) = make_store(c.out, 1, SIZE[c.out] * 8, "cpu"), make_place(name), unit_of(name)
    units = c.width_v // count

    @ti.real_func
    def store(out: OUT, work: FLOATS, at: ti.i32, to: ti.i32, inverse: ti.f32, number: ti.i32):
        for d in range(c.width_v):
            e = place(d)
            x = work[at + e % count * units + e // count]
            store_value(out, to + d, ti.Vector([x * inverse]), ti.f32(1.0))

    return store
