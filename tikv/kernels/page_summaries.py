"""Summarise the keys of a page: the least and the greatest number in each channel.

Numbers are compared as integers of the same order, so -0 comes before 0, and the result does not depend on the order of
rows. A NaN lies beyond the infinities, so it appears in one of the two.
"""

import functools
import zlib
from typing import NamedTuple

from tikv.kernels.address import P as C
from tikv.kernels.address import index_array, make_slot_of
from tikv.kernels.codec import SIZE, WORD, element_array, make_bits_to_f32, make_f32_to_bits
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti

# The bits of infinity, or of the largest finite number if the dtype has no infinity; and of NaN.
LARGEST = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80, "e4m3": 0x7E, "e5m2": 0x7C}
NAN = {"f32": 0x7FC00000, "f16": 0x7E00, "bf16": 0x7FC0, "e4m3": 0x7F, "e5m2": 0x7E}
SIGNED = {8: ti.i16, 16: ti.i16, 32: ti.i32}  # for 8 bits, LLVM refuses Taichi's code


class SummaryParams(NamedTuple):
    """Numbers of a launch; strides and first entries in elements."""

    items: int = 0
    heads: int = 1
    pages: int = 1
    page: int = 1  # tokens of a page
    length: int = 0  # of every sequence, if there is no array of lengths
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
    integer: object  # integer(bits) -> the signed integer of these lower bits
    least_bits: object  # least_bits(low, high) -> the bits of the least number, or of NaN
    greatest_bits: object


@functools.cache
def make_order(code, style):
    """The order of a dtype; on CPU by the smallest integers, since a vector register holds the most of them."""
    bits = SIZE[code] * 8
    number, word = SIGNED[bits] if style == "cpu" else ti.i32, WORD[bits]
    shift, mask, largest, nan = 32 - bits, (1 << (bits - 1)) - 1, LARGEST[code], NAN[code]

    @ti.func
    def ordered(x):
        return ti.select(x < number(0), x ^ number(mask), x)

    @ti.func
    def integer(a):
        value = number(0)
        if ti.static(style != "cpu"):
            value = ti.cast(ti.cast(a, ti.u32) << ti.u32(shift), ti.i32) >> shift
        elif ti.static(bits == 8):
            x = ti.cast(a, number)
            value = ti.select(x > number(127), x - number(256), x)
        else:
            value = ti.cast(a, number)
        return value

    @ti.func
    def key(a):
        return ordered(integer(a))

    @ti.func
    def bits_of(x, low, high):
        # Two selects: an `or` of comparisons is not a vector instruction, and SPIR-V does not have it.
        of_high = ti.select(high > number(largest), word(nan), ti.cast(ordered(x), word))
        return ti.select(low < number(~largest), word(nan), of_high)

    @ti.func
    def least_bits(low, high):
        return bits_of(low, low, high)

    @ti.func
    def greatest_bits(low, high):
        return bits_of(high, low, high)

    return Order(key, integer, least_bits, greatest_bits)


def make_key_of(source, code, style):
    """key_of(bits): the key that a number of another dtype has after it is stored."""
    key = make_order(code, style).key
    decode, encode, word = make_bits_to_f32(source), make_f32_to_bits(code, style), WORD[SIZE[code] * 8]

    @ti.func
    def key_of(a):
        return key(ti.cast(encode(decode(a)), word))

    return key if source == code else key_of


def make_summarize_rows(code, width):
    """CPU: summarize_rows(k, least, greatest, at, step, count, low_to, high_to, number): a page of at least one row.

    Rows are read one after the other, and update the least and the greatest numbers so far. These two rows stay in the
    first-level cache, and LLVM vectorises the loops. They hold keys until the end.
    """
    K = element_array(code)
    order = make_order(code, "cpu")
    word = WORD[SIZE[code] * 8]

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
                least[low_to + c] = ti.cast(ti.min(order.integer(least[low_to + c]), x), word)
                greatest[high_to + c] = ti.cast(ti.max(order.integer(greatest[high_to + c]), x), word)
        for c in range(width):
            low, high = order.integer(least[low_to + c]), order.integer(greatest[high_to + c])
            least[low_to + c] = order.least_bits(low, high)
            greatest[high_to + c] = order.greatest_bits(low, high)

    return summarize_rows


def make_summarize_written_rows(source, code, width):
    """CPU: the same for all heads of a page whose last rows are new, and are read from the copy's source.

    summarize_written_rows(new, k, to, new_at, new_step, fresh, at, step, old, low_to, high_to, heads, new_head, head,
    to_head, number): `old` counts rows that were stored before, and `fresh` new rows.
    """
    NEW, K = element_array(source), element_array(code)
    order, key_of = make_order(code, "cpu"), make_key_of(source, code, "cpu")
    word, most = WORD[SIZE[code] * 8], (1 << (SIZE[code] * 8 - 1)) - 1

    @ti.real_func
    def summarize_written_rows(new: NEW, k: K, to: K, new_at: ti.i32, new_step: ti.i32, fresh: ti.i32, at: ti.i32,
                               step: ti.i32, old: ti.i32, low_to: ti.i32, high_to: ti.i32, heads: ti.i32,
                               new_head: ti.i32, head: ti.i32, to_head: ti.i32, number: ti.i32):  # fmt: skip
        for h in range(heads):
            low, high = low_to + h * to_head, high_to + h * to_head
            for c in range(width):
                to[low + c] = word(most)
                to[high + c] = word(most + 1)
            for n in range(old):
                row = at + h * head + n * step
                for c in range(width):
                    x = order.key(k[row + c])
                    to[low + c] = ti.cast(ti.min(order.integer(to[low + c]), x), word)
                    to[high + c] = ti.cast(ti.max(order.integer(to[high + c]), x), word)
            for n in range(fresh):
                row = new_at + h * new_head + n * new_step
                for c in range(width):
                    x = key_of(new[row + c])
                    to[low + c] = ti.cast(ti.min(order.integer(to[low + c]), x), word)
                    to[high + c] = ti.cast(ti.max(order.integer(to[high + c]), x), word)
            for c in range(width):
                lowest, highest = order.integer(to[low + c]), order.integer(to[high + c])
                to[low + c] = order.least_bits(lowest, highest)
                to[high + c] = order.greatest_bits(lowest, highest)

    return summarize_written_rows


def make_summarize_page(style, code, width, uid):
    """summarize_page(arrays, at, step, count, low_to, high_to): a page of one head; without rows, 0 in both.

    On CPU it does all channels; on a GPU the channel to which all three addresses point.
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
    """length_of(b, lens, params): the bounded number of tokens of a sequence; `params_type` names its parameters."""
    Q = params_type

    @ti.func
    def length_of(b, lens: ti.template(), params):
        tokens = params[Q.length]
        if ti.static(lens_bits > 0):
            length = ti.cast(lens[params[Q.lens_first] + b * params[Q.lens_sequence]], ti.i64)
            tokens = ti.cast(ti.min(ti.max(length, ti.i64(0)), ti.cast(params[Q.capacity], ti.i64)), ti.i32)
        return tokens

    return length_of


def make_summarize_pages(style, serial, code, width, lens_bits):
    """summarize(k, lens, least, greatest, params): an item is a page of a head, on a GPU a channel of one.

    `code` is the dtype of all arrays but the lengths. The function is not cached, since its real function belongs to
    one Taichi program.
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


class ListedParams(NamedTuple):
    """Numbers of `make_summarize_listed`; strides and first entries in elements."""

    items: int = 0
    heads: int = 1
    list_first: int = 0
    k_token: int = 0
    k_head: int = 0
    k_first: int = 0
    to_head: int = 0
    least_first: int = 0
    greatest_first: int = 0


L = ListedParams(*range(len(ListedParams._fields)))
LISTED = ti.types.vector(len(L), ti.i32)


def make_summarize_listed(style, serial, code, width):
    """summarize(k, listed, least, greatest, params): summarises the pages of a list, for all heads.

    The list has three numbers for each page: the place of its first row, its number of rows, and the place of its
    summary. Places are counted in rows of `width` elements.
    """
    uid = zlib.crc32(repr(("summarize_listed", serial, code, width)).encode()) >> 1
    K, LIST = element_array(code), index_array(32)
    channels, summarize_page = 1 if style == "cpu" else width, make_summarize_page(style, code, width, uid)

    @ti.func
    def summarize_item(i, arrays: ti.template(), params):
        k, listed, least, greatest = ti.static(arrays)
        channel, others = i % channels, i // channels
        h, entry = others % params[L.heads], params[L.list_first] + others // params[L.heads] * 3
        at = params[L.k_first] + listed[entry] * width + h * params[L.k_head] + channel
        to = listed[entry + 2] * width + h * params[L.to_head] + channel
        low_to, high_to = params[L.least_first] + to, params[L.greatest_first] + to
        summarize_page((k, least, greatest), at, params[L.k_token], listed[entry + 1], low_to, high_to)

    loop = make_loop(style, serial, summarize_item, L.items)

    @ti.kernel
    def summarize(k: K, listed: LIST, least: K, greatest: K, params: LISTED):
        loop(k, params, ((k, listed, least, greatest), params))

    return summarize


class WrittenForm(NamedTuple):
    """The compile-time choices of the summaries of a copy's rows.

    They are the dtypes of new and of stored rows, a row's width, and whether pages that are not full are summarised.
    """

    source: str
    code: str
    width: int
    unfinished: bool


class WrittenParams(NamedTuple):
    """Numbers of the summaries of a copy's rows; strides and first entries in elements."""

    all_items: int = 0  # of the launch
    copied_items: int = 0  # of them, those that copy
    summary_heads: int = 1
    page: int = 1  # tokens of a page
    row_step: int = 1  # rows of the copy from a token to the next of the same sequence and head
    new_sequence: int = 0
    new_token: int = 0
    new_head: int = 0
    new_first: int = 0
    stored_sequence: int = 0
    stored_block: int = 0
    stored_token: int = 0
    stored_head: int = 0
    stored_first: int = 0
    to_sequence: int = 0
    to_page: int = 0
    to_head: int = 0
    least_first: int = 0
    greatest_first: int = 0


W = WrittenParams(*range(len(WrittenParams._fields)))
WRITTEN = ti.types.vector(len(W), ti.i32)


def make_summarize_written(style, form, dst, uid):
    """summarize_written(i, arrays, index, params, written): summarises a page if the copy's row is its last.

    A page has `page` slots and begins at a multiple of `page`. Rows that were stored before are read from the cache,
    and rows that this launch writes are read from the copy's source, so no thread waits for a write.

    Args:
        style: "cpu", "cuda" or "spirv".
        form: a `WrittenForm`.
        dst: the `EndLayout` of the copy's destination.
        uid: tells kernels apart.
    """
    order, key_of = make_order(form.code, style), make_key_of(form.source, form.code, style)
    slot_of = make_slot_of(dst.placement, dst.page, C.dst_position, C.dst_limit, C.dst_index)
    width, most, size = form.width, (1 << (SIZE[form.code] * 8 - 1)) - 1, max(dst.page, 1)
    rows = make_summarize_written_rows(form.source, form.code, width) if style == "cpu" else None

    @ti.func
    def summarize_written(i, arrays: ti.template(), index: ti.template(), params, written):
        new, k, summaries = ti.static(arrays)
        channel, h, others = 0, 0, i
        if ti.static(style != "cpu"):
            channel, others = i % width, i // width
            h, others = others % written[W.summary_heads], others // written[W.summary_heads]
        t, b = others % params[C.tokens], others // params[C.tokens]
        slot = slot_of(b, t, index, params)
        page = written[W.page]
        start = slot - slot % page
        last = slot >= 0 and slot + 1 == start + page
        if ti.static(form.unfinished):
            ends = t + 1 == params[C.tokens] or slot + 1 == params[C.dst_limit]
            last = slot >= 0 and (last or ends)
        if last:
            fresh = 1
            for n in range(1, slot - start + 1):
                earlier = t - n * written[W.row_step]
                if fresh == n and earlier >= 0:
                    if slot_of(b, earlier, index, params) == slot - n:
                        fresh = n + 1
            old = slot + 1 - start - fresh
            new_at = written[W.new_first] + b * written[W.new_sequence] + h * written[W.new_head] + channel
            new_at += (t - (fresh - 1) * written[W.row_step]) * written[W.new_token]
            new_step = written[W.row_step] * written[W.new_token]
            at = written[W.stored_first] + b * written[W.stored_sequence] + h * written[W.stored_head] + channel
            if ti.static(dst.page > 0):
                at += start // size * written[W.stored_block] + start % size * written[W.stored_token]
            else:
                at += start * written[W.stored_token]
            to = b * written[W.to_sequence] + start // page * written[W.to_page] + h * written[W.to_head] + channel
            low_to, high_to = written[W.least_first] + to, written[W.greatest_first] + to
            step = written[W.stored_token]
            if ti.static(style == "cpu"):
                rows(new, k, summaries, new_at, new_step, fresh, at, step, old, low_to, high_to,
                     written[W.summary_heads], written[W.new_head], written[W.stored_head], written[W.to_head],
                     uid)  # fmt: skip
            else:
                low, high = most, -most - 1
                for n in range(old):
                    x = order.key(k[at + n * step])
                    low, high = ti.min(low, x), ti.max(high, x)
                for n in range(fresh):
                    x = key_of(new[new_at + n * new_step])
                    low, high = ti.min(low, x), ti.max(high, x)
                summaries[low_to] = order.least_bits(low, high)
                summaries[high_to] = order.greatest_bits(low, high)

    return summarize_written
