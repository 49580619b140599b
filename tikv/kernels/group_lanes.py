"""Quantise rows in groups on a GPU: a few neighbouring threads share a group and agree on its edges.

The bits are those of the rules in `kernels/groups.py`. A thread holds its numbers and finds their codes by a product
with a reciprocal. It applies the rule itself only if the rule's quotient might give a different code, or if a number is
a NaN or an infinity.
"""

from tikv.formats import GROUP_FORMATS
from tikv.kernels.codec import SCALE_WORD, SIZE, WORD, make_bits_to_f32, make_decode, make_f32_to_bits, make_store
from tikv.kernels.exact import OFF, TAME_BITS, make_code_product, make_product, near_reciprocal, upper_half
from tikv.kernels.group_rows import BELOW_HALF
from tikv.kernels.groups import (
    BIAS,
    FACTOR,
    INFINITE,
    LARGEST,
    ORIGIN,
    SCALE,
    UNIT,
    magnitude,
    make_column,
    make_divided,
    make_float_code,
    make_load_unit,
    make_rule,
    unit_of,
)
from tikv.kernels.hadamard import HELD, LaneColumns, columns_in_order, make_turn_lanes
from tikv.kernels.lanes import make_row_max
from tikv.runtime import ti

PART = 4  # numbers that follow one another in memory in every format
ROUNDING = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits


def lanes_of_group(name):
    """The number of threads that share a group: each holds `HELD` numbers, or a unit if that has more."""
    return GROUP_FORMATS[name].group // max(HELD, unit_of(name)[0])


@ti.func
def key_of(x):
    """An integer with the order of the float."""
    i = ti.bit_cast(x, ti.u32)
    return i ^ (ti.bit_cast(ti.bit_cast(i, ti.i32) >> 31, ti.u32) | ti.u32(0x80000000))


@ti.func
def of_key(key):
    """The float that has a key."""
    i = ti.bit_cast(~key, ti.i32) >> 31
    return ti.bit_cast(key ^ (ti.bit_cast(i, ti.u32) | ti.u32(0x80000000)), ti.f32)


def make_edges(name, style, held_numbers, column_of):
    """edges(thread, member, held) -> (the state for `Rule.finish`, whether all numbers of the thread are finite).

    The threads of a group compute the state together; `column_of(member, i)` is the column of number `i` of a thread.
    """
    row = GROUP_FORMATS[name]
    affine, by_sign = row.rule == "affine", row.rule == "q4_0"
    row_max = make_row_max(style, lanes_of_group(name))

    @ti.func
    def finite_range(held):
        """The least and the largest finite number, and whether all numbers are finite."""
        low, high, finite = ti.f32(LARGEST), ti.f32(-LARGEST), 1
        for i in ti.static(range(held_numbers)):
            known = magnitude(held[i]) < ti.u32(INFINITE)
            low = ti.min(low, ti.select(known, held[i], ti.f32(LARGEST)))
            high = ti.max(high, ti.select(known, held[i], ti.f32(-LARGEST)))
            finite = ti.select(known, finite, 0)
        return low, high, finite

    @ti.func
    def edges(thread, member, held):
        finite = 1
        bounds = ti.Vector([ti.f32(0.0), ti.f32(0.0)])
        if ti.static(affine):
            low, high = ti.f32(LARGEST), ti.f32(-LARGEST)
            if ti.static(style == "cuda"):
                # There the minimum and maximum of a number and a NaN are the number, and `quick` gives a NaN code 0.
                for i in ti.static(range(held_numbers)):
                    low, high = ti.min(low, held[i]), ti.max(high, held[i])
                if ti.max(magnitude(low), magnitude(high)) >= ti.u32(INFINITE):
                    low, high, finite = finite_range(held)
            else:
                low, high, finite = finite_range(held)
            bounds = ti.Vector([of_key(~row_max(thread, ~key_of(low))), of_key(row_max(thread, key_of(high)))])
        else:
            largest = ti.u32(0)
            for i in ti.static(range(held_numbers)):
                known = magnitude(held[i]) < ti.u32(INFINITE)
                largest = ti.max(largest, ti.select(known, magnitude(held[i]), ti.u32(0)))
                finite = ti.select(known, finite, 0)
            largest = row_max(thread, largest)
            if ti.static(by_sign):
                first = ti.u32(0)  # twice the count of columns after it, plus its sign
                for i in ti.static(range(held_numbers)):
                    known = magnitude(held[i]) < ti.u32(INFINITE)
                    m = ti.select(known, magnitude(held[i]), ti.u32(0))
                    sign = ti.select(known, ti.bit_cast(held[i], ti.u32) >> ti.u32(31), ti.u32(0))
                    after = ti.cast(row.group - 1 - column_of(member, i), ti.u32)
                    first = ti.max(first, ti.select(m == largest, (after << ti.u32(1)) | sign, ti.u32(0)))
                largest = largest | ((row_max(thread, first) & ti.u32(1)) << ti.u32(31))
            bounds = ti.Vector([ti.bit_cast(largest, ti.f32), ti.f32(0.0)])
        return bounds, finite

    return edges


def make_quick(name, style):
    """(prepare, quick) for a rule, with fast arithmetic.

    prepare(numbers, edges) -> (factor, whether it may give codes). quick(value, origin, factor, row) -> (the code, a
    doubt of at least 0.5 if the rule might give a different code).
    """
    row, product = GROUP_FORMATS[name], make_product(style)
    last = float((1 << row.bits) - 1)
    float_code = make_float_code(name, style) if row.is_float else None
    by_floor = style == "spirv"  # its compilers may cancel the sum and the difference of one number

    @ti.func
    def prepare(numbers, edges):
        factor, tame = numbers[FACTOR], 1
        if ti.static(row.rule == "affine"):
            size = ti.max(ti.abs(factor), ti.f32(1e-30))
            inverse = near_reciprocal(size)
            tame = ti.select(ti.max(magnitude(edges[0]), magnitude(edges[1])) < ti.u32(TAME_BITS), 1, 0)
            factor = ti.select(factor < ti.f32(0.0), -inverse, inverse)
            factor = ti.select(magnitude(numbers[FACTOR]) > ti.u32(0), factor, ti.f32(0.0))
        return factor, tame

    @ti.func
    def quick(value, origin, factor, first_word):
        code, doubt = ti.u32(0), ti.f32(0.0)
        if ti.static(row.rule == "affine"):
            steps = ti.min(ti.max((value - origin) * factor, ti.f32(0.0)), ti.f32(last))
            rest = steps
            if ti.static(by_floor):
                whole = ti.floor(steps + ti.f32(0.5))
                code = ti.cast(ti.cast(whole, ti.i32), ti.u32)
                rest = steps - whole
            else:
                rounded = steps + ti.f32(ROUNDING)
                code = ti.bit_cast(rounded, ti.u32) & ti.u32((1 << row.bits) - 1)
                rest = steps - (rounded - ti.f32(ROUNDING))
            doubt = ti.abs(rest) + steps * ti.f32(OFF)
        elif ti.static(row.rule == "q8_0"):
            scaled = product(value, factor, first_word)
            whole = ti.min(ti.cast(ti.abs(scaled) + ti.f32(BELOW_HALF), ti.i32), 127)
            code = ti.cast(ti.select(scaled < ti.f32(0.0), -whole, whole) & 0xFF, ti.u32)
        elif ti.static(row.is_float):
            code = float_code(value, factor)
        else:
            scaled = product(value, factor, first_word) + ti.f32(8.5)
            code = ti.cast(ti.min(ti.max(ti.cast(scaled, ti.i32), 0), 15), ti.u32)
        return code, doubt

    return prepare, quick


def make_settle(name):
    """settle(value, origin, factor, inverse) -> the code of a number in doubt, in mlx's formats, if sums keep order.

    Its quotient is near the middle between two codes. The distance minus the middle times the factor is exact, since
    it is computed from products of half the bits. Its sign says on which side the quotient lies; if it is small, the
    quotient is rounded to the middle, and so to the even code.
    """
    last = float((1 << GROUP_FORMATS[name].bits) - 1)

    @ti.func
    def settle(value, origin, factor, inverse):
        size, distance = ti.abs(factor), ti.abs(value - origin)
        low = ti.floor(ti.min((value - origin) * inverse, ti.f32(last)))
        middle = low + ti.f32(0.5)
        high = upper_half(size)
        rest = (distance - middle * high) - middle * (size - high)
        power = ti.bit_cast(ti.bit_cast(middle, ti.u32) & ti.u32(INFINITE), ti.f32)
        above = size * (power * ti.f32(2.0**-24))  # half a unit in the last place of the middle
        below = ti.select(low > ti.f32(0.0), above, above * ti.f32(0.5))
        whole = ti.cast(low, ti.i32)
        up = ti.select(rest > above, 1, ti.select(rest < -below, 0, whole & 1))
        return ti.cast(whole + up, ti.u32)

    return settle


def make_pack(name, held_numbers):
    """(pack, pack_any): put code `i` of a thread into its words; `i` is a constant, or known at run time."""
    bits = GROUP_FORMATS[name].bits
    count = held_numbers * bits // 32

    @ti.func
    def pack(words, i: ti.template(), code):
        for w in ti.static(range(count)):
            shift = ti.static(i * bits - w * 32)
            if ti.static(0 <= shift < 32):
                words[w] = words[w] | (code << ti.u32(shift))
            elif ti.static(-bits < shift < 0):
                words[w] = words[w] | (code >> ti.u32(-shift))
        return words

    @ti.func
    def pack_any(words, i, code):
        for w in ti.static(range(count)):
            shift = i * bits - w * 32
            part = ti.u32(0)
            if shift >= 0 and shift < 32:
                part = code << ti.cast(shift, ti.u32)
            elif shift > -bits and shift < 0:
                part = code >> ti.cast(-shift, ti.u32)
            words[w] = words[w] | part
        return words

    return pack, pack_any


def columns_of_lanes(block, group, rounds, unit, share, stride, columns, places):
    """The `LaneColumns` of the numbers that threads hold, for the groups in a block of a rotated row."""

    def column(lane, i):
        place = places[i % unit]
        within = (lane % share + i // unit * share) * stride + columns[place // PART] + place % PART
        return lane // share * group + within

    lanes = range(block // group * share)
    return LaneColumns(tuple(tuple(column(lane, i) for i in range(rounds * unit)) for lane in lanes))


def make_shared_groups(style, stream, scale):
    """(read, write): read the words of a thread's numbers and write their codes, as `kernels.copy.make_shared_row`.

    A row has `lanes_of_group` threads for each of its groups. All threads of a block call `write` together.
    """
    codec, groups = stream.codec, stream.units
    name, row, rule = codec.dst, GROUP_FORMATS[codec.dst], make_rule(codec.dst, style)
    (unit, words), share = unit_of(name), lanes_of_group(name)
    rounds, size, numbers = row.group // unit // share, row.group, row.numbers
    parts, held_numbers = unit // PART, rounds * unit
    src_words = SIZE[codec.src] * 8 * PART // codec.src_bits  # of a part
    per_word, held_words = PART // src_words, rounds * parts * src_words
    decode, encode = make_decode(codec.src, codec.src_bits), make_f32_to_bits(scale, style)
    word_type, scale_word = WORD[codec.src_bits], SCALE_WORD[scale]
    # The first column of each part of a unit, and the place of each code in the parts.
    columns, stride, places = [PART * p for p in range(parts)], unit, list(range(unit))
    if row.rule == "q4_0":
        columns, stride = [16 * p for p in range(parts)], unit // 2
        places = [e // 2 + e % 2 * PART for e in range(unit)]

    @ti.func
    def column_of(member, i: ti.template()):
        place = ti.static(places[i % unit])
        return (member + ti.static(i // unit) * share) * stride + ti.static(columns[place // PART] + place % PART)

    @ti.func
    def numbers_of(held):
        """The numbers in the order of their codes."""
        values = ti.Vector.zero(ti.f32, held_numbers)
        for w in ti.static(range(held_words)):
            x = decode(held[w])
            for e in ti.static(range(per_word)):
                values[w * per_word + e] = x[e]
        return ti.Vector([values[i // unit * unit + places[i % unit]] for i in range(held_numbers)])

    settled, settle = style == "cuda" and row.rule == "affine", make_settle(name)
    edges, (prepare, quick) = make_edges(name, style, held_numbers, column_of), make_quick(name, style)
    pack, pack_any = make_pack(name, held_numbers)
    divided, has_tensor_scale = make_divided(name, style), row.has_tensor_scale
    rotated, turn = codec.turn is not None, None
    if codec.turn is not None:
        of_lanes = columns_of_lanes(codec.turn[0], row.group, rounds, unit, share, stride, columns, places)
        turn = make_turn_lanes(style, of_lanes, codec.turn[1])

    @ti.func
    def read(a: ti.template(), lane, src_row):
        held = ti.Vector.zero(word_type, held_words)
        group = ti.min(lane // share, groups - 1)
        for n in ti.static(range(rounds)):
            first = group * size + (lane % share + n * share) * stride
            for p in ti.static(range(parts)):
                at = src_row + (first + columns[p]) // PART * src_words
                for w in ti.static(range(src_words)):
                    held[(n * parts + p) * src_words + w] = a[at + w]
        return held

    @ti.func
    def write(b: ti.template(), scales: ti.template(), thread, lane, ok, dst_row, scale_at, held,
              tensor):  # fmt: skip
        group, member = lane // share, lane % share
        values = numbers_of(held)
        if ti.static(rotated):
            values = turn(thread, lane, values, dst_row)
        group_edges, finite = edges(thread, member, values)
        if ti.static(has_tensor_scale):  # later than the edges: a quotient beyond float32 is still a large number
            group_edges[0] = divided(group_edges[0], tensor)
            for i in ti.static(range(held_numbers)):
                values[i] = divided(values[i], tensor)
        group_numbers = rule.finish(group_edges)
        factor, tame = prepare(group_numbers, group_edges)
        origin, doubt = group_numbers[ORIGIN], ti.f32(0.0)
        packed = ti.Vector.zero(ti.u32, rounds * words)
        for i in ti.static(range(held_numbers)):
            code, doubt_of = quick(values[i], origin, factor, dst_row)
            if ti.static(settled):
                if doubt_of >= ti.f32(0.5):
                    code = settle(values[i], origin, group_numbers[FACTOR], factor)
            else:
                doubt = ti.max(doubt, doubt_of)
            packed = pack(packed, i, code)
        if doubt >= ti.f32(0.5) or finite * tame == 0:
            packed = ti.Vector.zero(ti.u32, rounds * words)
            # The compiler does not know this count, or it would unroll the loop.
            for n in range(held_numbers + ti.cast(ti.cast(dst_row, ti.u32) >> ti.u32(31), ti.i32)):
                value = values[0]
                for i in ti.static(range(1, held_numbers)):
                    value = ti.select(n == i, values[i], value)
                code, doubt_of = quick(value, origin, factor, dst_row)
                if doubt_of >= ti.f32(0.5) or finite * tame == 0:
                    code = rule.code(value, group_numbers, dst_row)
                packed = pack_any(packed, n, code)
        if ok and group < groups:
            if member == 0:
                scales[scale_at + group * numbers] = ti.cast(encode(group_numbers[SCALE]), scale_word)
                if ti.static(numbers == 2):
                    scales[scale_at + group * numbers + 1] = ti.cast(encode(group_numbers[BIAS]), scale_word)
            for n in ti.static(range(rounds)):
                to = dst_row + (group * ti.static(size // unit) + member + n * share) * words
                for w in ti.static(range(words)):
                    b[to + w] = packed[n * words + w]

    return read, write


def make_rotate_back(style, codec, units, scale):
    """rotate_back(a, b, scales, thread, lane, ok, ...): dequantises a thread's `HELD` columns and rotates them back.

    A row has `units` threads. All threads of a block call it together.
    """
    kind, column = GROUP_FORMATS[codec.src], make_column(codec.src)
    load_unit = make_load_unit(codec.src, make_bits_to_f32(scale), style)
    store, product = make_store(codec.dst, 1, codec.dst_bits, style), make_code_product(style)
    block, seed = codec.turn
    parts = HELD // UNIT
    # A thread's codes follow one another; their columns may not.
    of_lanes = columns_in_order(block)
    if kind.rule == "q4_0":
        of_lanes = LaneColumns(tuple(tuple(_column_of_halves(c) for c in of) for of in of_lanes.columns))
    turn = make_turn_lanes(style, of_lanes, seed, True)

    @ti.func
    def rotate_back(a: ti.template(), b: ti.template(), scales: ti.template(), thread, lane, ok, src_row, dst_row,
                  scale_at, tensor):  # fmt: skip
        inside = ok and lane < units
        at = ti.min(lane, units - 1) * parts
        values = ti.Vector.zero(ti.f32, HELD)
        for n in ti.static(range(parts)):
            unit_values = load_unit(a, scales, src_row, scale_at, at + n)
            for e in ti.static(range(UNIT)):
                x = unit_values[e]
                if ti.static(kind.has_tensor_scale):
                    x = product(x, tensor)
                values[n * UNIT + e] = x
        values = turn(thread, lane, values, src_row)
        if inside:
            for e in ti.static(range(HELD)):
                store(b, dst_row + column(at * UNIT + e), ti.Vector([values[e]]), ti.f32(1.0))

    return rotate_back


def _column_of_halves(place):
    """`make_column` for q4_0."""
    return (place & ~31) + ((place & 31) >> 1) + (place & 1) * 16
