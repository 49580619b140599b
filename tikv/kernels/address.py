"""Tokens to slots, slots to words: the only place that computes where a row lies.

A placement answers "which slot does token t of sequence b go to?", with -1 for none. A sequence here is one of a batch,
or one of a layer and a batch. Positions reach a kernel either as a scalar that the host has reduced (see
`ops.layouts.reduced_position`), or as absolute values in device memory, which are bounds-checked here.

The numbers a kernel needs travel as two vectors of 32-bit integers, `strides` and `params`. On CPU the copy finds both
in one array.
"""

import functools
from typing import NamedTuple

from tikv.runtime import ti


class RowStrides(NamedTuple):
    """Strides of one end of one stream, counted in words of its array; `first` is the first row's first word."""

    sequence: int = 0
    block: int = 0
    token: int = 0
    head: int = 0
    first: int = 0


class CopyParams(NamedTuple):
    """The numbers that placements and scales need in addition to the strides."""

    iterations: int = 0
    k_units: int = 0  # units in a row of each stream
    v_units: int = 0
    groups: int = 1
    tokens: int = 0  # rows of a head in a group
    src_position: int = 0
    dst_position: int = 0
    keep: int = 0  # first token that a ring does not lose
    sinks: int = 0
    ring: int = 0  # slots after the sinks that wrap; 0: none
    src_limit: int = 0  # slots, or pages of a table, that exist
    dst_limit: int = 0
    index_group: int = 0
    index_step: int = 0
    src_index: int = 0  # first entry of the index array for each end
    dst_index: int = 0
    scale_group: int = 0
    scale_step: int = 0
    scale_head: int = 0
    k_scale: int = 0  # first entry of each scale array
    v_scale: int = 0
    k_tensor: int = 0  # the bits of the scale of a tensor, of formats that have one
    v_tensor: int = 0


class PageNumbers(NamedTuple):
    """First entries and strides of the index arrays of placement "pages", and how many requests and pages there are."""

    request_first: int = 0
    request_step: int = 1
    position_first: int = 0
    position_step: int = 1
    page_first: int = 0
    page_step: int = 1
    start_first: int = 0
    start_step: int = 1
    requests: int = 0
    pages: int = 0  # of all requests


# The index of each number in its vector: strides[K_DST + S.head], params[P.ring].
S = RowStrides(*range(len(RowStrides._fields)))
P = CopyParams(*range(len(CopyParams._fields)))
K_SRC, K_DST, V_SRC, V_DST = (len(S) * i for i in range(4))
N = PageNumbers(*range(len(PageNumbers._fields)))
STRIDES = ti.types.vector(4 * len(S), ti.i32)
PARAMS = ti.types.vector(len(P), ti.i32)
NUMBERS = ti.types.vector(len(N), ti.i32)
INDEX = {0: ti.i32, 32: ti.i32, 64: ti.i64}  # by its bits; 0 without an index
PARAMS_ARRAY = ti.types.ndarray(dtype=ti.i32, ndim=1)  # on CPU: `params` followed by `strides`


def index_array(bits):
    """The type of an array of slots, pages, positions or lengths."""
    return ti.types.ndarray(dtype=INDEX[bits], ndim=1)


def inverse_of(divisor):
    """(inverse, shift), two 32-bit numbers with which `divided` divides by an integer that is at least 1."""
    shift = 31 + (divisor - 1).bit_length()
    inverse = -(-(1 << shift) // divisor)  # below 2**32; its excess changes no quotient
    return inverse - (1 << 32), shift  # the signed number with these bits


@ti.func
def divided(x, inverse, shift):
    """The quotient x // n for x >= 0, by `inverse_of(n)`: `//` itself takes some thirty instructions on a GPU."""
    # No casts to unsigned numbers: SPIRV-Cross writes these in a form that C++ parses as a function type.
    product = (ti.cast(x, ti.i64) & ti.i64(0xFFFFFFFF)) * (ti.cast(inverse, ti.i64) & ti.i64(0xFFFFFFFF))
    return ti.cast(product >> ti.cast(shift, ti.i64), ti.i32)


@ti.func
def ring_slot(p, sinks, ring):
    """The slot of position p in a ring after `sinks` fixed slots; it is computed only here."""
    slot = p
    if p >= sinks:
        slot = sinks + ti.cast(ti.cast(p - sinks, ti.u32) % ti.cast(ring, ti.u32), ti.i32)
    return slot


@ti.func
def ring_slot_of_absolute(p, sinks, ring):
    """`ring_slot` for a 64-bit position: reduced first, as the host does it."""
    short = ti.cast(ti.min(p, ti.cast(sinks, ti.i64)), ti.i32)
    if p >= sinks:
        short = sinks + ti.cast((p - sinks) % ti.cast(ring, ti.i64), ti.i32)
    return ring_slot(short, sinks, ring)


@functools.cache
def make_slot_of(placement, page, position, limit, first):
    """slot_of(b, t, index, params) -> slot or -1; the last three choices are the entries of `params` for this end.

    linear: position + t. ring: the same, after sinks; tokens before `keep`, which the ring would lose, are skipped.
    ragged: index[b] + t if inside [0, limit), or in the ring when there is one. slots: index[t] if inside [0, limit).
    table: page index[(position + t) // page] if inside [0, limit). group: as linear, in sequence index[b].
    layers: as ring or linear, by the sinks and ring of sequence b in index[4b + 2] and index[4b + 3].
    pages: as `make_slot_of_request`, of (requests, positions, pages, starts, numbers) in place of one index.
    """
    if placement == "pages":
        return make_slot_of_request(page, limit)

    @ti.func
    def slot_of(b, t, index: ti.template(), params):
        slot = -1
        if ti.static(placement == "linear" or placement == "group"):
            slot = params[position] + t
        elif ti.static(placement == "ring"):
            p = params[position] + t
            if t >= params[P.keep] or p < params[P.sinks]:
                slot = ring_slot(p, params[P.sinks], params[P.ring])
        elif ti.static(placement == "ragged"):
            p = ti.cast(index[b * params[P.index_group] + params[first]], ti.i64) + t
            if p >= 0:
                if params[P.ring] > 0:
                    if t >= params[P.keep] or p < params[P.sinks]:
                        slot = ring_slot_of_absolute(p, params[P.sinks], params[P.ring])
                elif p < params[limit]:
                    slot = ti.cast(p, ti.i32)
        elif ti.static(placement == "slots"):
            s = ti.cast(index[b * params[P.index_group] + t * params[P.index_step] + params[first]], ti.i64)
            if s >= 0 and s < params[limit]:
                slot = ti.cast(s, ti.i32)
        elif ti.static(placement == "layers"):
            p = params[position] + t
            sinks = ti.cast(index[params[first] + 4 * b + 2], ti.i32)
            ring = ti.cast(index[params[first] + 4 * b + 3], ti.i32)
            slot = p
            if ring > 0:
                slot = -1
                if p < sinks or t >= params[P.tokens] - ring:
                    slot = ring_slot(p, sinks, ring)
        else:
            p = params[position] + t
            entry = b * params[P.index_group] + (p // page) * params[P.index_step] + params[first]
            block = ti.cast(index[entry], ti.i64)
            # Unsigned: Vulkan takes a negative number that was widened to 64 bits for a positive one.
            if ti.cast(block, ti.u64) < ti.cast(params[limit], ti.u64):
                slot = ti.cast(block, ti.i32) * page + p % page
        return slot

    return slot_of


def make_slot_of_request(page, limit):
    """slot_of(b, t, index, params): by token t's request and position, in the concatenated pages of all requests.

    A token without a request, a position or a page of its request inside [0, limit) gets -1.
    """

    @ti.func
    def slot_of(b, t, index: ti.template(), params):
        requests, positions, pages, starts, numbers = ti.static(index)
        # All comparisons are unsigned: Vulkan takes a negative number that was widened to 64 bits for a positive one.
        slot = -1
        r = ti.cast(requests[numbers[N.request_first] + t * numbers[N.request_step]], ti.u64)
        position = ti.cast(positions[numbers[N.position_first] + t * numbers[N.position_step]], ti.u64)
        ahead = position // ti.u64(page)
        if r < ti.cast(numbers[N.requests], ti.u64) and ahead < ti.cast(numbers[N.pages], ti.u64):
            at = numbers[N.start_first] + ti.cast(r, ti.i32) * numbers[N.start_step]
            entry = ti.cast(starts[at], ti.i32) + ti.cast(ahead, ti.i32)
            end = ti.min(ti.cast(starts[at + numbers[N.start_step]], ti.i32), numbers[N.pages])
            if entry >= 0 and entry < end:
                block = ti.cast(pages[numbers[N.page_first] + entry * numbers[N.page_step]], ti.u64)
                if block < ti.cast(params[limit] // page, ti.u64):
                    slot = ti.cast(block, ti.i32) * page + ti.cast(position, ti.i32) % page
        return slot

    return slot_of


@ti.func
def row_of_layer(b, h, slot, index: ti.template(), first):
    """The row of a slot in a block of layers of different lengths.

    index[4b] is the sequence's first row, index[4b + 1] the rows of a head.
    """
    return ti.cast(index[first + 4 * b], ti.i32) + h * ti.cast(index[first + 4 * b + 1], ti.i32) + slot


@functools.cache
def make_row_offset(page, end):
    """row_offset(b, slot, h, strides) -> the first word of the row, by the strides from `end` on; page 0: no pages."""

    @ti.func
    def row_offset(b, slot, h, strides):
        word = strides[end + S.first] + b * strides[end + S.sequence] + h * strides[end + S.head]
        if ti.static(page > 0):
            word = word + (slot // page) * strides[end + S.block] + (slot % page) * strides[end + S.token]
        else:
            word = word + slot * strides[end + S.token]
        return word

    return row_offset


@functools.cache
def make_word_offset(chunk, chunk_stride):
    """word_offset(word): the offset of a row's word from its first word. Chunk 0 means that words are contiguous.

    vLLM's pages cut a row of K into 16-byte chunks, and one of V into single elements, `chunk_stride` words apart.
    """

    @ti.func
    def word_offset(word):
        offset = word
        if ti.static(chunk > 0):
            offset = (word // chunk) * chunk_stride + word % chunk
        return offset

    return word_offset
