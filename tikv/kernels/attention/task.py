"""What a task of attention computes, from its number: which sequence, KV head, query rows and split of the keys."""

from typing import NamedTuple

from tikv.kernels.attention.parameters import P, S
from tikv.kernels.attention.visible import V, make_visible_range
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
    chosen tokens of their own.
    """
    visible_range = make_visible_range(c)

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
        k_first = strides[S.k_first] + b * strides[S.k_sequence] + h * strides[S.k_head]
        v_first = strides[S.v_first] + b * strides[S.v_sequence] + h * strides[S.v_head]
        scale_first = b * strides[S.scale_sequence] + h * strides[S.scale_head]
        return visible, ti.Vector([split, row, b, h, kv_head, begin, end, k_first, v_first, scale_first])

    return decode_task
