"""The loops of attention on CPU over codes of groups, which are never turned into the numbers that they stand for.

With s and b the scale and bias of a group, q.k is the sum over groups of s (q.codes) + b sum(q), and a weight p adds
p s codes + p b to a result. Codes are taken out of a vector of words, all masked by the same constant. For K these are
the words of a row: numbers of a query lie in the order in which codes come out, and a scale stands beside each word.
For V they are one word of several keys, whose sums stay in registers: words and scales of a chunk's keys are first laid
out key by key, a row of `ROW` numbers for each word of a key and each number of a group.
"""

from typing import Any, NamedTuple

from tikv.formats import FORMATS
from tikv.kernels.attention.cpu_loops import ROW, rows_per_band
from tikv.kernels.attention.parameters import FLOATS, array_types
from tikv.kernels.codec import SIZE, make_element_to_f32, make_load
from tikv.kernels.groups import make_code, make_column, offset_of, step_of_code, unit_of
from tikv.runtime import ti

ALIGNED = 32  # floats: a multiple of all units of a group
SUMS = 8  # that a pass over a chunk's keys adds up in registers


def list_rows(width, width_v):
    """Rows of numbers of a chunk's keys that (words, scales and biases) take: the most of any format."""
    widest = max(width, width_v)
    return widest // 4, widest // 16


class KeyLoops(NamedTuple):
    """Loops over the codes of listed keys of a head."""

    load_query: Any
    sum_queries: Any
    load_scales: Any
    dots: Any


class ValueLoops(NamedTuple):
    """Loops over the codes of the values of listed keys of a head."""

    load_words: Any
    load_scales: Any
    add_values: Any
    add_visible_values: Any


def make_key_loops(c):
    """The `KeyLoops` of one set of choices."""
    name = c.cache
    return KeyLoops(make_load_query(name, c), make_sum_queries(name, c), make_load_scales(name, c), make_dots(name, c))


def make_value_loops(c):
    """The `ValueLoops` of one set of choices."""
    name = c.cache
    add_values = make_add_values(name, c.width_v, c.rows, False)
    return ValueLoops(
        make_load_words(name, c),
        make_load_value_scales(name, c),
        add_values,
        make_add_values(name, c.width_v, c.rows, True) if c.masked else add_values,
    )


def has_bias(name):
    """Whether a code of 0 may stand for something else than 0."""
    return FORMATS[name].numbers == 2 or offset_of(name) != 0.0


def make_bias(name, c):
    """bias(scales, at, scale): of a group whose numbers begin at `at`."""
    value, two, offset = make_element_to_f32(c.scale), FORMATS[name].numbers == 2, offset_of(name)

    @ti.func
    def bias(scales: ti.template(), at, scale):
        found = scale * ti.f32(offset)
        if ti.static(two):
            found = value(scales[at + 1])
        return found

    return bias


def make_load_query(name, c):
    """load_query(...): a row of queries, those of one place of all units together, divided by that place's step."""
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
    """sum_queries(...): the sums of each row of queries over each group."""
    row, (count, _) = FORMATS[name], unit_of(name)
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


def make_load_scales(name, c):
    """load_scales(...): the scales of the listed keys, one beside each unit, and a row of biases for each group.

    Scales begin at a multiple of `ALIGNED`: LLVM has to see that neighbours are neighbours to store them at once.
    """
    _, _, _, _, SC, _ = array_types("cpu", c)
    row, value, bias = FORMATS[name], make_element_to_f32(c.scale), make_bias(name, c)
    count, _ = unit_of(name)
    groups, units, biased = c.width // row.group, row.group // count, has_bias(name)

    @ti.real_func
    def load_scales(scales: SC, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, biases: ti.i32,
                    number: ti.i32):  # fmt: skip
        begin = to // units
        for j in range(n):
            for i in range(groups):
                at = ti.bit_cast(work[lists + j], ti.i32) + first + i * row.numbers
                scale = value(scales[at])
                for u in range(units):
                    work[(begin + j * groups + i) * units + u] = scale
                if ti.static(biased):
                    work[biases + i * ROW + j] = bias(scales, at, scale)

    return load_scales


def make_dots(name, c):
    """dots(...): scores of all rows with the listed keys, two at a time, whose scales and biases were loaded."""
    _, KV, _, _, _, _ = array_types("cpu", c)
    row, code, (count, words) = FORMATS[name], make_code(name), unit_of(name)
    B = rows_per_band(c.rows)
    bands, groups, units, biased = -(-c.rows // B), c.width // row.group, c.width // count, has_bias(name)

    @ti.real_func
    def dots(k: KV, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, scales: ti.i32, biases: ti.i32,
             queries: ti.i32, query_sums: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for band in range(bands):
            q, at = queries + band * B * c.width, to + band * B * ROW
            for pair in range((n + 1) // 2):
                j = pair * 2
                k0 = ti.bit_cast(work[lists + j], ti.i32) + first
                k1 = ti.bit_cast(work[lists + j + 1], ti.i32) + first
                s0 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                s1 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                for u in range(units):
                    t0 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                    t1 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                    unit0 = [k[k0 + u * words + w] for w in range(words)]
                    unit1 = [k[k1 + u * words + w] for w in range(words)]
                    for e in ti.static(range(count)):
                        x0, x1 = code(unit0, e), code(unit1, e)
                        for g in ti.static(range(B)):
                            y = work[q + (g * count + e) * units + u]
                            t0[g] += x0 * y
                            t1[g] += x1 * y
                    for g in ti.static(range(B)):
                        s0[g] += t0[g] * work[scales + j * units + u]
                        s1[g] += t1[g] * work[scales + (j + 1) * units + u]
                for g in ti.static(range(B)):
                    work[at + g * ROW + j] = s0[g]
                    work[at + g * ROW + j + 1] = s1[g]
        if ti.static(biased):
            for r in range(bands * B):
                for i in range(groups):
                    total = work[query_sums + r * groups + i]
                    for j in range(n):
                        work[to + r * ROW + j] = work[to + r * ROW + j] + total * work[biases + i * ROW + j]

    return dots


def make_load_words(name, c):
    """load_words(...): the words of the listed keys' values, key by key: integers, kept in the bits of floats."""
    _, KV, _, _, _, _ = array_types("cpu", c)
    W = FORMATS[name].words(c.width_v)

    @ti.real_func
    def load_words(codes: KV, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):
        for j in range(n):
            at = ti.bit_cast(work[lists + j], ti.i32) + first
            for w in range(W):
                work[to + w * ROW + j] = ti.bit_cast(codes[at + w], ti.f32)

    return load_words


def make_load_value_scales(name, c):
    """load_scales(...): the scales of the listed keys' values, a row for each group, and then the biases."""
    _, _, _, _, SC, _ = array_types("cpu", c)
    row, value, bias = FORMATS[name], make_element_to_f32(c.scale), make_bias(name, c)
    groups, biased = c.width_v // row.group, has_bias(name)

    @ti.real_func
    def load_scales(scales: SC, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):
        for j in range(n):
            for i in range(groups):
                at = ti.bit_cast(work[lists + j], ti.i32) + first + i * row.numbers
                scale = value(scales[at])
                work[to + i * ROW + j] = scale
                if ti.static(biased):
                    work[to + (groups + i) * ROW + j] = bias(scales, at, scale)

    return load_scales


def make_add_values(name, width, rows, careful):
    """add_values(...): add the values of the keys, whose words and scales were loaded, weighted, to the accumulators.

    Careful: what weighs nothing is left out, since the scales of what a query does not see may be NaN.
    """
    row, code, column = FORMATS[name], make_code(name), make_column(name)
    count, words_of_unit = unit_of(name)
    B = rows_per_band(rows)
    bands, groups, units = -(-rows // B), width // row.group, row.group // count
    E = max(e for e in range(1, count + 1) if count % e == 0 and (e == 1 or e * B <= SUMS))
    biased, steps = has_bias(name), [1 / step_of_code(name, e) for e in range(count)]

    @ti.real_func
    def weigh(work: FLOATS, n: ti.i32, weights: ti.i32, numbers: ti.i32, to: ti.i32, number: ti.i32) -> ti.f32:
        """The products of a row's weights and numbers of keys; their sum."""
        total = ti.f32(0.0)
        for j in range(n):
            p = work[weights + j]
            y = p * work[numbers + j]
            if ti.static(careful):
                y = ti.select(p > 0.0, y, ti.f32(0.0))
            work[to + j] = y
            total += y
        return total

    @ti.real_func
    def add_values(work: FLOATS, n: ti.i32, words: ti.i32, scales: ti.i32, weights: ti.i32, weighed: ti.i32,
                   to: ti.i32, number: ti.i32):  # fmt: skip
        for band in range(bands):
            p, acc = weights + band * B * ROW, to + band * B * width
            for i in range(groups):
                for g in range(B):
                    if ti.static(biased):
                        bias = weigh(work, n, p + g * ROW, scales + (groups + i) * ROW, weighed, number)
                        for d in range(row.group):
                            at = acc + g * width + i * row.group + d
                            work[at] = work[at] + bias
                for g in range(B):
                    weigh(work, n, p + g * ROW, scales + i * ROW, weighed + g * ROW, number)
                for u in range(units):
                    first = words + (i * units + u) * words_of_unit * ROW
                    for part in ti.static(range(count // E)):
                        sums = ti.Vector([ti.f32(0.0) for _ in range(B * E)])
                        for j in range(n):
                            unit = [ti.bit_cast(work[first + w * ROW + j], ti.u32) for w in range(words_of_unit)]
                            for e in ti.static(range(E)):
                                x = code(unit, ti.static(part * E + e))
                                for g in ti.static(range(B)):
                                    sums[g * E + e] += x * work[weighed + g * ROW + j]
                        for g in ti.static(range(B)):
                            for e in ti.static(range(E)):
                                at = acc + g * width + column((i * units + u) * count + ti.static(part * E + e))
                                work[at] = work[at] + sums[g * E + e] * ti.static(steps[part * E + e])

    return add_values
