"""The loops over keys and widths of attention on CPU.

They are real functions, which take the arrays' pointers into registers, so LLVM vectorises their loops. `work` is the
memory of the workers. The last argument of each function tells kernels apart that differ only in the functions they
call. `n` keys are at most `CHUNK`; the `min` tells LLVM so.
"""

from typing import Any, NamedTuple

from tikv.kernels.address import make_word_offset
from tikv.kernels.attention.parameters import BITS, FLOATS, MASKED, array_types
from tikv.kernels.attention.softmax import exp2, is_masked, make_logit
from tikv.kernels.attention.terms import make_bias
from tikv.kernels.attention.tree import index_in_tree
from tikv.kernels.attention.visible import make_in_bounds
from tikv.kernels.codec import SIZE, make_element_to_f32, make_load, make_store
from tikv.runtime import ti

CHUNK = 64  # keys whose scores are held at once
ROW = CHUNK + 16  # floats between two rows of numbers about a chunk's keys: pairs may write one more
LINE_BYTES = 64  # of a cache line
INDICES = 1 << 31  # of a signed integer of 32 bits
BAND = 4  # at most so many query rows have their sums in registers at once


def rows_per_band(rows):
    """The number of query rows whose sums are in registers at once; all bands have the same number."""
    bands = -(-rows // BAND)
    return -(-rows // bands)


def band_of(c):
    """`rows_per_band` of one set of choices; under `invariant` it does not depend on the number of rows."""
    if c.invariant:
        return min(BAND, 2 * c.group)  # without groups, a token has one row: a smaller band has fewer idle rows
    return rows_per_band(c.rows)


@ti.func
def before(at, n: ti.template()):
    """An index that n numbers follow: the `min` tells LLVM that their indices do not overflow.

    Without it, LLVM examines every condition around a loop to find out, which takes most of a kernel's compile time. It
    does not treat indices that may overflow as neighbours, so it would not read or write them together.
    """
    return ti.min(at, ti.static(INDICES - n))


@ti.func
def ordered(x):
    """The bits of a float as an integer with the same order."""
    return flipped(ti.bit_cast(x, ti.i32))


@ti.func
def flipped(i):
    """Flip all bits of a negative number except its sign; a second call restores the number.

    It uses shifts: LLVM would turn a mask into a `select`, and one after the loop into a freeze of the loop's maximum,
    and would then not vectorise the loop.
    """
    return i ^ ti.cast(ti.cast(i >> 31, ti.u32) >> ti.u32(1), ti.i32)


class KeyLoops(NamedTuple):
    """Loops over the listed keys of K and V, head by head."""

    list_keys: Any
    prefetch: Any
    dots: Any
    load_scales: Any
    add_values: Any
    add_visible_values: Any


class RowLoops(NamedTuple):
    """Loops over the numbers of one query row."""

    load_query: Any
    clear: Any
    tree_indices: Any
    logits: Any
    largest: Any
    weights: Any
    count_masked: Any
    multiply: Any
    shrink: Any
    store: Any


def make_key_loops(c):
    """The `KeyLoops` of one set of choices."""
    careful = make_add_visible_values(c) if c.masked else None
    return KeyLoops(make_list_keys(), make_prefetch(c), make_dots(c), make_load_scales(c), make_add_values(c), careful)


def make_list_keys():
    """list_keys(...): lists the addresses of neighbouring keys, as integers in the bits of floats."""

    @ti.real_func
    def list_keys(work: FLOATS, to: ti.i32, n: ti.i32, first: ti.i32, step: ti.i32, number: ti.i32):
        begin = before(to, ROW)
        for j in range(ti.min(n, CHUNK)):
            work[begin + j] = ti.bit_cast(first + j * step, ti.f32)

    return list_keys


def make_note_key():
    """note_key(...): `make_list_keys` for one key."""

    @ti.func
    def note_key(work: ti.template(), to, n, first, step, number):
        work[to] = ti.bit_cast(first, ti.f32)

    return note_key


def make_prefetch(c):
    """prefetch(...): loads a number from each cache line of the listed keys, in the order of memory, pages together.

    Memory has a long latency, and a core prefetches only consecutive lines; so it waits for several pages at once.
    """
    _, KV, _, _, _, _ = array_types("cpu", c)
    value = make_element_to_f32(c.cache)
    PER_PAGE = 1 if c.index_bits else min(c.page or CHUNK, CHUNK)
    PER_LINE = LINE_BYTES // SIZE[c.cache]

    @ti.real_func
    def prefetch(rows: KV, work: FLOATS, lists: ti.i32, first: ti.i32, head: ti.i32, heads: ti.i32, span: ti.i32,
                 n: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for h in range(heads):
            for j in range(ti.min(PER_PAGE, n)):
                total = ti.f32(0.0)
                for line in range((span + PER_LINE - 1) // PER_LINE):
                    for page in range((n - j + PER_PAGE - 1) // PER_PAGE):
                        at = ti.bit_cast(work[lists + page * PER_PAGE + j], ti.i32) + first + h * head
                        total += value(rows[at + line * PER_LINE])
                work[to + j] = total

    return prefetch


def make_dots(c):
    """dots(...): computes scores of bands of rows with two listed keys at a time, some keys of each head in turn."""
    _, KV, _, _, _, _ = array_types("cpu", c)
    value, k_word = make_element_to_f32(c.cache), make_word_offset(*c.k_inner)
    D, B = c.width, band_of(c)

    @ti.real_func
    def dots(k: KV, work: FLOATS, lists: ti.i32, first: ti.i32, head: ti.i32, n: ti.i32, keys_per_pass: ti.i32,
             heads: ti.i32, bands: ti.i32, queries: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for group in range((n + keys_per_pass - 1) // keys_per_pass):
            for h in range(heads):
                for band in range(bands):
                    for pair in range((ti.min(keys_per_pass, n - group * keys_per_pass) + 1) // 2):
                        j = group * keys_per_pass + pair * 2
                        k0 = before(ti.bit_cast(work[lists + j], ti.i32) + first + h * head, D)
                        k1 = before(ti.bit_cast(work[lists + j + 1], ti.i32) + first + h * head, D)
                        q0 = before(queries + (h * bands + band) * B * D, B * D)
                        at = to + (h * bands + band) * B * ROW + j
                        s0 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                        s1 = ti.Vector([ti.f32(0.0) for _ in range(B)])
                        for d in range(D):
                            x0, x1 = value(k[k0 + k_word(d)]), value(k[k1 + k_word(d)])
                            for g in ti.static(range(B)):
                                s0[g] += x0 * work[q0 + g * D + d]
                                s1[g] += x1 * work[q0 + g * D + d]
                        for g in ti.static(range(B)):
                            work[at + g * ROW] = s0[g]
                            work[at + g * ROW + 1] = s1[g]

    return dots


def make_load_scales(c):
    """load_scales(...): loads the scales of the listed keys of one head."""
    _, _, _, _, SC, _ = array_types("cpu", c)

    @ti.real_func
    def load_scales(scales: SC, work: FLOATS, lists: ti.i32, first: ti.i32, n: ti.i32, to: ti.i32, number: ti.i32):
        begin, listed = before(to, ROW), before(lists, ROW)
        for j in range(ti.min(n, CHUNK)):
            work[begin + j] = ti.cast(scales[ti.bit_cast(work[listed + j], ti.i32) + first], ti.f32)

    return load_scales


def make_add_values(c):
    """add_values(...): adds the weighted values of the listed keys to the accumulators, in the order of `dots`."""
    _, KV, _, _, _, _ = array_types("cpu", c)
    value, v_word = make_element_to_f32(c.cache), make_word_offset(*c.v_inner)
    DV, B = c.width_v, band_of(c)

    @ti.real_func
    def add_values(v: KV, work: FLOATS, lists: ti.i32, first: ti.i32, head: ti.i32, n: ti.i32, keys_per_pass: ti.i32,
                   heads: ti.i32, bands: ti.i32, weights: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for group in range((n + keys_per_pass - 1) // keys_per_pass):
            for h in range(heads):
                for band in range(bands):
                    for pair in range((ti.min(keys_per_pass, n - group * keys_per_pass) + 1) // 2):
                        j = group * keys_per_pass + pair * 2
                        v0 = before(ti.bit_cast(work[lists + j], ti.i32) + first + h * head, DV)
                        v1 = before(ti.bit_cast(work[lists + j + 1], ti.i32) + first + h * head, DV)
                        at = weights + (h * bands + band) * B * ROW + j
                        a0 = before(to + (h * bands + band) * B * DV, B * DV)
                        p0 = ti.Vector([work[at + g * ROW] for g in range(B)])
                        p1 = ti.Vector([work[at + g * ROW + 1] for g in range(B)])
                        for d in range(DV):
                            x0, x1 = value(v[v0 + v_word(d)]), value(v[v1 + v_word(d)])
                            for g in ti.static(range(B)):
                                work[a0 + g * DV + d] = work[a0 + g * DV + d] + p0[g] * x0 + p1[g] * x1

    return add_values


def make_add_visible_values(c):
    """add_visible_values(...): `add_values` row by row, without the keys that the row does not see, which may be NaN.

    Few chunks have such keys: those at the newest tokens and at a window's end.
    """
    _, KV, _, _, _, _ = array_types("cpu", c)
    value, v_word = make_element_to_f32(c.cache), make_word_offset(*c.v_inner)
    DV, B = c.width_v, band_of(c)

    @ti.real_func
    def add_visible_values(v: KV, work: FLOATS, lists: ti.i32, first: ti.i32, head: ti.i32, n: ti.i32, heads: ti.i32,
                           bands: ti.i32, weights: ti.i32, to: ti.i32, number: ti.i32):  # fmt: skip
        for h in range(heads):
            for j in range(n + n % 2):
                v0 = before(ti.bit_cast(work[lists + j], ti.i32) + first + h * head, DV)
                for r in range(bands * B):
                    p = work[weights + (h * bands * B + r) * ROW + j]
                    a0 = before(to + (h * bands * B + r) * DV, DV)
                    for d in range(ti.select(is_masked(p), 0, DV)):
                        work[a0 + d] = work[a0 + d] + p * value(v[v0 + v_word(d)])

    return add_visible_values


def make_row_loops(c):
    """The `RowLoops` of one set of choices."""
    return RowLoops(*make_start_loops(c), make_tree_indices(), *make_softmax_loops(c), *make_accumulator_loops(c))


def make_start_loops(c):
    """(load_query, clear)."""
    Q, _, _, _, _, _ = array_types("cpu", c)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    D = c.width

    @ti.real_func
    def load_query(q: Q, work: FLOATS, at: ti.i32, to: ti.i32, number: ti.i32):
        source, target = before(at, D), before(to, D)
        for d in range(D):
            work[target + d] = load_q(q, source + d)[0]

    @ti.real_func
    def clear(work: FLOATS, at: ti.i32, n: ti.i32, number: ti.i32):
        for d in range(n):
            work[at + d] = 0.0

    return load_query, clear


def make_tree_indices():
    """tree_indices(...): computes the indices that the listed keys have for a query of a tree."""

    @ti.real_func
    def tree_indices(work: FLOATS, tree: BITS, indices: ti.i32, to: ti.i32, n: ti.i32, row: ti.i32, first: ti.i32,
                     words: ti.i32, tokens: ti.i32, new: ti.i32, high: ti.i32, sinks: ti.i32, last_sink: ti.i32,
                     number: ti.i32):  # fmt: skip
        source, target = before(indices, ROW), before(to, ROW)
        for j in range(ti.min(n, CHUNK)):
            index = ti.bit_cast(work[source + j], ti.i32)
            counts_as = index_in_tree(index, tree, row, first, words, tokens, new, high, sinks, last_sink)
            work[target + j] = ti.bit_cast(counts_as, ti.f32)

    return tree_indices


def make_softmax_loops(c):
    """(logits, largest, weights, count_masked, multiply), each over the scores of a row with a chunk's keys."""
    logit_of, in_bounds, bias = make_logit(c), make_in_bounds(c), make_bias(c)

    @ti.real_func
    def logits(work: FLOATS, at: ti.i32, n: ti.i32, scale: ti.f32, softcap: ti.f32, scales: ti.i32, index: ti.i32,
               low: ti.i32, high: ti.i32, sinks: ti.i32, last_sink: ti.i32, slope: ti.f32, origin: ti.i32,
               others: ti.i32, number: ti.i32):  # fmt: skip
        """Turn the scores of a row into logits, or into `MASKED`."""
        first, scale_first, index_first = before(at, ROW), before(scales, ROW), before(index, ROW)
        for j in range(ti.min(n, CHUNK)):
            x = work[first + j]
            if ti.static(c.row_scale):
                x = x * work[scale_first + j]
            x = logit_of(x, scale, softcap)
            if ti.static(c.alibi):
                x += bias(slope, ti.bit_cast(work[index_first + j], ti.i32), high, sinks, last_sink, origin, others)
            if ti.static(c.masked):
                i = ti.bit_cast(work[index_first + j], ti.i32)
                x = ti.select(in_bounds(i, low, high, sinks, last_sink) > 0, x, ti.f32(MASKED))
            work[first + j] = x

    @ti.real_func
    def largest(work: FLOATS, at: ti.i32, n: ti.i32, number: ti.i32) -> ti.f32:
        """The largest logit of a row, or a NaN; the loop is separate so that LLVM vectorises both."""
        top = ti.i32(-0x7FFFFFFF)
        first = before(at, ROW)
        for j in range(ti.min(n, CHUNK)):
            top = ti.max(top, ordered(work[first + j]))
        return ti.bit_cast(flipped(top), ti.f32)

    @ti.real_func
    def weights(work: FLOATS, at: ti.i32, n: ti.i32, high: ti.f32, number: ti.i32) -> ti.f32:
        """Turn the logits of a row into weights, except those that are `MASKED`; return the sum of the weights."""
        total = ti.f32(0.0)
        first = before(at, ROW)
        for j in range(ti.min(n, CHUNK)):
            x = work[first + j]
            p = exp2(x - high)
            if ti.static(c.masked):
                total += ti.select(is_masked(x), ti.f32(0.0), p)
                p = ti.select(is_masked(x), x, p)
            else:
                total += p
            work[first + j] = p
        return total

    @ti.real_func
    def count_masked(work: FLOATS, at: ti.i32, n: ti.i32, number: ti.i32) -> ti.i32:
        """The number of keys that a row does not see, counted in its logits."""
        total = 0
        first = before(at, ROW)
        for j in range(ti.min(n, CHUNK)):
            total += ti.select(is_masked(work[first + j]), 1, 0)
        return total

    @ti.real_func
    def multiply(work: FLOATS, at: ti.i32, n: ti.i32, scales: ti.i32, number: ti.i32):
        """Multiply the weights of a row by the scales of V; the loop is separate so that LLVM vectorises it."""
        first, scale_first = before(at, ROW), before(scales, ROW)
        for j in range(ti.min(n, CHUNK)):
            p = work[first + j]
            weight = p * work[scale_first + j]
            if ti.static(c.masked):
                weight = ti.select(is_masked(p), p, weight)
            work[first + j] = weight

    return logits, largest, weights, count_masked, multiply


def make_accumulator_loops(c):
    """(shrink, store) for the accumulators of a row."""
    _, _, _, _, _, OUT = array_types("cpu", c)
    store_value = make_store(c.out, 1, SIZE[c.out] * 8, "cpu")
    DV = c.width_v

    @ti.real_func
    def shrink(work: FLOATS, at: ti.i32, factor: ti.f32, number: ti.i32):
        begin = before(at, DV)
        for d in range(DV):
            work[begin + d] = work[begin + d] * factor

    @ti.real_func
    def store(out: OUT, work: FLOATS, at: ti.i32, to: ti.i32, inverse: ti.f32, number: ti.i32):
        source, target = before(at, DV), before(to, DV)
        for d in range(DV):
            store_value(out, target + d, ti.Vector([work[source + d] * inverse]), ti.f32(1.0))

    return shrink, store
