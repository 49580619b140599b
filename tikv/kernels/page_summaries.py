"""The least and the greatest number in each channel of the keys of a page.

Numbers are compared as integers in whose order they are: -0 comes before 0, and what is found does not depend on which
row comes first. A NaN lies beyond the infinities, so that it shows in one of the two.
"""

import functools
import zlib
from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.codec import SIZE, WORD, element_array
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti

# The bits of the largest number that is none, or of infinity; and of NaN.
LARGEST = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "e4m3": 0x7E, "e5m2": 0x7C}
NAN = {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0, "e4m3": 0x7F, "e5m2": 0x7E}
SIGNED = {8: ti.i16, 16: ti.i16, 32: ti.i32}  # of 8 bits Taichi has no code that LLVM takes


class SummaryParams(NamedTuple):
    """Numbers of a launch; strides and first entries in elements."""

    items: int = 0
    heads: int = 1
    pages: int = 1
    page: int = 1  # tokens of one
    length: int = 0  # of every sequence, where there is no array of lengths
    capacity: int = 0
    lens_sequence: int = 0
    lens_first: int = 0
    k_sequence: int = 0
    k_head: int = 0
    k_token: int = 0
    k_first: int = 0
    least_sequence: int = 0
    least_head: int = 0
    least_page: int = 0
    least_first: int = 0
    greatest_sequence: int = 0
    greatest_head: int = 0
    greatest_page: int = 0
    greatest_first: int = 0


P = SummaryParams(*range(len(SummaryParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


class Order(NamedTuple):
    """How numbers of a dtype are compared as integers."""

    key: object  # key(bits) -> the integer
    kept: object  # kept(bits) -> the integer of which these are the lower bits
    least_bits: object  # least_bits(low, high) -> the bits of the least of numbers between these, or of NaN
    greatest_bits: object


@functools.cache
def make_order(code, style):
    """The order of a dtype: on CPU by integers as small as may be, of which a vector register holds the most."""
    bits = SIZE[code] * 8
    number, word = SIGNED[bits] if style == "cpu" else ti.i32, WORD[bits]
    shift, mask, largest, nan = 32 - bits, (1 << (bits - 1)) - 1, LARGEST[code], NAN[code]

    @ti.func
    def turned(x):
        return ti.select(x < number(0), x ^ number(mask), x)

    @ti.func
    def kept(a):
        found = number(0)
        if ti.static(style != "cpu"):
            found = ti.cast(ti.cast(a, ti.u32) << ti.u32(shift), ti.i32) >> shift
        elif ti.static(bits == 8):
            x = ti.cast(a, number)
            found = ti.select(x > number(127), x - number(256), x)
        else:
            found = ti.cast(a, number)
        return found

    @ti.func
    def key(a):
        return turned(kept(a))

    @ti.func
    def bits_of(x, low, high):
        # Two selects: `or` of comparisons is no vector instruction, and SPIR-V has it not.
        found = ti.select(high > number(largest), word(nan), ti.cast(turned(x), word))
        return ti.select(low < number(~largest), word(nan), found)

    @ti.func
    def least_bits(low, high):
        return bits_of(low, low, high)

    @ti.func
    def greatest_bits(low, high):
        return bits_of(high, low, high)

    return Order(key, kept, least_bits, greatest_bits)


def make_summarize_rows(code, width):
    """CPU: summarize_rows(k, least, greatest, at, step, count, low_to, high_to, number): a page of at least one row.

    Rows are read one behind the other, into what is least and greatest until then: a row of each stays in the first
    cache, and LLVM vectorises the loops.
    """
    K = element_array(code)
    order = make_order(code, "cpu")
    word = WORD[SIZE[code] * 8]

    # Of a page its keys are kept in the two rows as integers of the order, and become numbers in the end.
    @ti.real_func
    def summarize_rows(k: K, least: K, greatest: K, at: ti.i32, step: ti.i32, count: ti.i32, low_to: ti.i32,
                       high_to: ti.i32, number: ti.i32):  # fmt: skip
        for c in range(width):
            x = ti.cast(order.key(k[at + c]), word)
            least[low_to + c] = x
            greatest[high_to + c] = x
        for n in range(1, count):
            row = at + n * step
            for c in range(width):
                x = order.key(k[row + c])
                least[low_to + c] = ti.cast(ti.min(order.kept(least[low_to + c]), x), word)
                greatest[high_to + c] = ti.cast(ti.max(order.kept(greatest[high_to + c]), x), word)
        for c in range(width):
            low, high = order.kept(least[low_to + c]), order.kept(greatest[high_to + c])
            least[low_to + c] = order.least_bits(low, high)
            greatest[high_to + c] = order.greatest_bits(low, high)

    return summarize_rows


def make_summarize_page(style, code, width, uid):
    """summarize_page(arrays, at, step, count, low_to, high_to): a page of one head, of no rows 0 in both.

    On CPU all channels; on a GPU the channel at which all three places already are.
    """
    order, word = make_order(code, style), WORD[SIZE[code] * 8]
    summarize_rows = make_summarize_rows(code, width) if style == "cpu" else None

    @ti.func
    def summarize_page(arrays: ti.template(), at, step, count, low_to, high_to):
        k, least, greatest = ti.static(arrays)
        if ti.static(style == "cpu"):
            if count > 0:
                summarize_rows(k, least, greatest, at, step, count, low_to, high_to, uid)
            else:
                for c in range(width):
                    least[low_to + c] = word(0)
                    greatest[high_to + c] = word(0)
        else:
            low_bits, high_bits = word(0), word(0)
            if count > 0:
                low = order.key(k[at])
                high = low
                for n in range(1, count):
                    x = order.key(k[at + n * step])
                    low, high = ti.min(low, x), ti.max(high, x)
                low_bits, high_bits = order.least_bits(low, high), order.greatest_bits(low, high)
            least[low_to] = low_bits
            greatest[high_to] = high_bits

    return summarize_page


def make_length_of(lens_bits, params_type):
    """length_of(b, lens, params): the tokens of a sequence, bounded; `params_type` names the places of its numbers."""
    Q = params_type

    @ti.func
    def length_of(b, lens: ti.template(), params):
        found = params[Q.length]
        if ti.static(lens_bits > 0):
            length = ti.cast(lens[params[Q.lens_first] + b * params[Q.lens_sequence]], ti.i64)
            found = ti.cast(ti.min(ti.max(length, ti.i64(0)), ti.cast(params[Q.capacity], ti.i64)), ti.i32)
        return found

    return length_of


def make_summarize_pages(style, serial, code, width, lens_bits):
    """summarize(k, lens, least, greatest, params): an item is a page of a head, on a GPU a channel of one.

    `code` is the dtype of all but the lengths. Not cached: its real function belongs to one Taichi program.
    """
    uid = zlib.crc32(repr(("summarize_pages", serial, code, width, lens_bits)).encode()) >> 1
    K, LENS = element_array(code), index_array(lens_bits)
    channels = 1 if style == "cpu" else width
    length_of, summarize_page = make_length_of(lens_bits, P), make_summarize_page(style, code, width, uid)

    @ti.func
    def summarize_item(i, arrays: ti.template(), params):
        k, lens, least, greatest = ti.static(arrays)
        channel, others = i % channels, i // channels
        page, kv_head = others % params[P.pages], others // params[P.pages]
        b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        first = page * params[P.page]
        count = ti.min(length_of(b, lens, params) - first, params[P.page])
        at = params[P.k_first] + b * params[P.k_sequence] + h * params[P.k_head] + first * params[P.k_token] + channel
        low_to = params[P.least_first] + b * params[P.least_sequence] + h * params[P.least_head]
        low_to += page * params[P.least_page] + channel
        high_to = params[P.greatest_first] + b * params[P.greatest_sequence] + h * params[P.greatest_head]
        high_to += page * params[P.greatest_page] + channel
        summarize_page((k, least, greatest), at, params[P.k_token], count, low_to, high_to)

    loop = make_loop(style, serial, summarize_item, P.items)

    @ti.kernel
    def summarize(k: K, lens: LENS, least: K, greatest: K, params: PARAMS):
        loop(k, params, ((k, lens, least, greatest), params))

    return summarize
