"""Tokens to slots, slots to words: the only place that computes where a row lies.

A placement answers "which slot does token t of group g go to", or -1 for none. A group is a sequence, or a layer and a
sequence. Positions reach a kernel either as a scalar that the host has reduced (see `moves.reduced_position`), or as
absolute values in device memory, which are bounds-checked here.

The numbers a kernel needs travel as two vectors of 32-bit integers: `where` holds strides, `which` placements. On CPU
the copy finds both in one array.
"""

import functools
from typing import NamedTuple

from tikv.runtime import ti

PLACEMENTS = ("linear", "ring", "ragged", "slots", "table", "group", "layers")


class Where(NamedTuple):
    """Strides of one end of one stream, counted in words of its array; `first` is the first row's first word."""

    group: int = 0
    block: int = 0
    step: int = 0
    head: int = 0
    first: int = 0


class Which(NamedTuple):
    """What placements and scales need beside the strides."""

    iterations: int = 0
    k_units: int = 0  # units in a row of each stream
    v_units: int = 0
    groups: int = 1
    tokens: int = 0  # rows of a head in a group
    src_position: int = 0
    dst_position: int = 0
    keep: int = 0  # first token that a ring does not lose
    sinks: int = 0
    ring: int = 0  # slots behind the sinks that wrap; 0: none
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


K_SRC, K_DST, V_SRC, V_DST = (len(Where._fields) * i for i in range(4))
W = Which(*range(len(Which._fields)))  # W.ring is the place of `ring` in a kernel's vector
WHERE_VECTOR = ti.types.vector(4 * len(Where._fields), ti.i32)
WHICH_VECTOR = ti.types.vector(len(Which._fields), ti.i32)
NUMBERS_ARRAY = ti.types.ndarray(dtype=ti.i32, ndim=1)  # on CPU: `which`, and `where` behind it


@ti.func
def ring_slot(p, sinks, ring):
    """The slot of position p behind `sinks` fixed slots: the ring, computed here and nowhere else."""
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
def make_place(kind, page, position, limit, first):
    """place(g, t, index, which) -> slot or -1; the last three choices name the entries of `which` for this end.

    linear: position + t. ring: the same behind sinks; tokens before `keep`, which the ring would lose, are skipped.
    ragged: index[g] + t if inside [0, limit), or in the ring when there is one. slots: index[t] if inside [0, limit).
    table: page index[(position + t) // page] if inside [0, limit). group: as linear, in the group that index[g] names.
    layers: as ring or linear, by the sinks and ring of group g in index[4g + 2] and index[4g + 3].
    """

    @ti.func
    def place(g, t, index: ti.template(), which):
        slot = -1
        if ti.static(kind == "linear" or kind == "group"):
            slot = which[position] + t
        elif ti.static(kind == "ring"):
            p = which[position] + t
            if t >= which[W.keep] or p < which[W.sinks]:
                slot = ring_slot(p, which[W.sinks], which[W.ring])
        elif ti.static(kind == "ragged"):
            p = ti.cast(index[g * which[W.index_group] + which[first]], ti.i64) + t
            if p >= 0:
                if which[W.ring] > 0:
                    if t >= which[W.keep] or p < which[W.sinks]:
                        slot = ring_slot_of_absolute(p, which[W.sinks], which[W.ring])
                elif p < which[limit]:
                    slot = ti.cast(p, ti.i32)
        elif ti.static(kind == "slots"):
            s = ti.cast(index[g * which[W.index_group] + t * which[W.index_step] + which[first]], ti.i64)
            if s >= 0 and s < which[limit]:
                slot = ti.cast(s, ti.i32)
        elif ti.static(kind == "layers"):
            p = which[position] + t
            sinks = ti.cast(index[which[first] + 4 * g + 2], ti.i32)
            ring = ti.cast(index[which[first] + 4 * g + 3], ti.i32)
            slot = p
            if ring > 0:
                slot = -1
                if p < sinks or t >= which[W.tokens] - ring:
                    slot = ring_slot(p, sinks, ring)
        else:
            p = which[position] + t
            entry = g * which[W.index_group] + (p // page) * which[W.index_step] + which[first]
            block = ti.cast(index[entry], ti.i64)
            # Without signs: Vulkan takes a negative number, widened to 64 bits, for one above 0.
            if ti.cast(block, ti.u64) < ti.cast(which[limit], ti.u64):
                slot = ti.cast(block, ti.i32) * page + p % page
        return slot

    return place


@ti.func
def row_of_layer(g, h, slot, index: ti.template(), first):
    """The row of a slot in a block of layers of different lengths.

    index[4g] is the group's first row, index[4g + 1] the rows of a head.
    """
    return ti.cast(index[first + 4 * g], ti.i32) + h * ti.cast(index[first + 4 * g + 1], ti.i32) + slot


@functools.cache
def make_row(page, end):
    """row(g, slot, h, where) -> word of the row's first element, by the strides at `end`; page 0 means no pages."""

    @ti.func
    def row(g, slot, h, where):
        word = where[end + 4] + g * where[end] + h * where[end + 3]
        if ti.static(page > 0):
            word = word + (slot // page) * where[end + 1] + (slot % page) * where[end + 2]
        else:
            word = word + slot * where[end + 2]
        return word

    return row


@functools.cache
def make_inner(chunk, chunk_stride):
    """inner(word): where a row's word lies behind the row's first. Chunk 0 means side by side.

    vLLM's pages cut a row of K into 16-byte chunks, and one of V into single elements, `chunk_stride` words apart.
    """

    @ti.func
    def inner(word):
        found = word
        if ti.static(chunk > 0):
            found = (word // chunk) * chunk_stride + word % chunk
        return found

    return inner
