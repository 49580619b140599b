"""Decode the number of an attention task into its sequence, KV head, query rows and split of the keys."""

from typing import NamedTuple

from tikv.kernels.attention.parameters import P, S
from tikv.kernels.attention.visible import V, first_position, make_visible_range
from tikv.runtime import ti


class Task(NamedTuple):
    """Entries of a task."""

    split: int = 0
    row: int = 1  # first query row
    sequence: int = 2
    head: int = 3  # first KV head
    kv_head: int = 4  # the same, counted over all sequences
    begin: int = 5  # index of the split's first key, counted over visible keys
    end: int = 6  # the index after the last
    k_first: int = 7  # addresses of the head's rows of K, of V, and of its scales without the arrays' first entries
    v_first: int = 8
    scale_first: int = 9


T = Task()


def make_decode_task(style, keys_multiple, c):
    """decode_task(number, lens, strides, params) -> (the vector `VisibleRange` of its head, the vector `Task`).

    Splits begin at multiples of `keys_multiple` keys. If each KV head has its own length, the last splits of a short
    head may have no keys. If tokens are chosen, the keys are those that a query chose. On CPU a task has
    `heads_per_task` KV heads, or fewer at the end of a sequence; it has one if each head has its own length, pages or
    chosen tokens. Under `invariant` keys are counted by position, see `make_fixed_share`.
    """
    visible_range, fixed_share = make_visible_range(c), make_fixed_share(keys_multiple, c)

    @ti.func
    def decode_task(number, lens: ti.template(), strides, params):
        split, others = number % params[P.splits], number // params[P.splits]
        row, kv_head = others % params[P.row_blocks] * c.rows, others // params[P.row_blocks]
        b, h = 0, 0
        if ti.static(style == "cpu"):
            head_blocks = (params[P.heads] + params[P.heads_per_task] - 1) // params[P.heads_per_task]
            b, h = kv_head // head_blocks, kv_head % head_blocks * params[P.heads_per_task]
            kv_head = b * params[P.heads] + h
        else:
            b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        visible = visible_range(b, h, lens, strides, params)
        count = visible[V.count]
        if ti.static(c.index_bits > 0):
            count = ti.select(count > 0, params[P.keys], 0)
        least = params[P.splits] * keys_multiple
        share = (count + least - 1) // least * keys_multiple
        if ti.static(c.lens_by_head):
            share = ti.max(share, (params[P.least_share] + keys_multiple - 1) // keys_multiple * keys_multiple)
        begin = split * share
        end = ti.min(count, begin + share)
        if ti.static(c.invariant):
            fixed = fixed_share(split, count, visible, params)
            begin, end = fixed[0], fixed[1]
        k_first = strides[S.k_first] + b * strides[S.k_sequence] + h * strides[S.k_head]
        v_first = strides[S.v_first] + b * strides[S.v_sequence] + h * strides[S.v_head]
        scale_first = b * strides[S.scale_sequence] + h * strides[S.scale_head]
        return visible, ti.Vector([split, row, b, h, kv_head, begin, end, k_first, v_first, scale_first])

    return decode_task


def make_fixed_share(keys_multiple, c):
    """fixed_share(split, count, visible, params) -> (begin, end): the positions of a split, each `split_keys` long.

    Positions alone determine the keys of each partial result, and the beginnings of the blocks of `keys_multiple`. A
    sink logit is a separate part, the first. Splits between the sinks and the first visible key after them are left
    out. Chosen tokens are counted in the order in which they are given.
    """

    @ti.func
    def fixed_share(split, count, visible, params):
        length, number, sinks = params[P.split_keys], split, 0
        if ti.static(c.sink_logits):
            number = number - 1
        low, last = 0, count
        if ti.static(c.index_bits == 0):
            sinks, low, last = visible[V.sinks], first_position(visible), visible[V.end]
            if visible[V.recent] <= 0:
                low, last = sinks, sinks
        first, of_sinks = low // length, (sinks + length - 1) // length
        behind = number >= of_sinks
        if behind:
            number = number + ti.max(first - of_sinks, 0)
        begin, end = number * length, ti.min(last, (number + 1) * length)
        if behind:
            begin = ti.max(begin, low // keys_multiple * keys_multiple)
        elif first > number:
            end = ti.min(end, sinks)
        if number < 0:
            begin, end = 0, 0
        return ti.Vector([begin, end])

    return fixed_share
