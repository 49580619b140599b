"""What a task of attention computes, from its number: which sequence, KV head, query rows and split of the keys."""

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
    begin: int = 5  # first of the split's keys, by their index over what is visible
    end: int = 6  # behind the last
    k_first: int = 7  # where the head's rows of K and of V begin, and its scales but for the first entry of each array
    v_first: int = 8
    scale_first: int = 9


T = Task()


def make_decode_task(style, keys_multiple, c):
    """decode_task(number, lens, strides, params) -> (the vector `VisibleRange` of its head, the vector `Task`).

    Splits begin at multiples of `keys_multiple` keys; where KV heads have lengths of their own, the last splits of a
    short one may have none. Where tokens are chosen, the keys are those that a query chose. On CPU a task has
    `heads_per_task` KV heads, fewer for the last of a sequence, and one where they differ in length or have pages or
    chosen tokens of their own. Under `invariant` keys are counted by position, see `make_fixed_share`.
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
        if ti.static(c.chosen > 0):
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

    Which keys a query's partial results are of, and where the blocks of `keys_multiple` begin, follows from positions
    alone. A sink logit is a part by itself, the first. Splits that nobody sees between the sinks and the first key
    behind them are left out. Chosen tokens are counted as they are given.
    """

    @ti.func
    def fixed_share(split, count, visible, params):
        length, number, sinks = params[P.split_keys], split, 0
        if ti.static(c.sink_logits):
            number = number - 1
        low, last = 0, count
        if ti.static(c.chosen == 0):
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
