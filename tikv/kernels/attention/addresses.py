"""Where keys, query rows and results of attention lie."""

from tikv.kernels.attention.parameters import MAX_TOKENS, P, S
from tikv.kernels.attention.visible import V
from tikv.kernels.codec import WORD
from tikv.runtime import ti


def make_locate(c):
    """locate(b, h, index, visible, table, strides, params) -> (slot, n): where a visible key of KV head h lies.

    n is how many lie in a row from there.     A slot of -1 means a page that does not exist; nobody sees those n keys.
    """
    unsigned = WORD[c.table_bits or 32]

    @ti.func
    def locate(b, h, index, visible, table: ti.template(), strides, params):
        behind = index - visible[V.sinks]
        slot, n = visible[V.first] + behind, MAX_TOKENS
        if ti.static(c.place == "ring"):
            end = params[P.sinks] + params[P.ring]
            if slot >= end:
                slot = slot - params[P.ring]
            n = end - slot
        elif ti.static(c.place == "table"):
            p = ti.cast(slot, ti.u32)
            page = ti.cast(p // ti.u32(c.page), ti.i32)
            inside = ti.cast(p % ti.u32(c.page), ti.i32)
            row = strides[S.table_first] + b * strides[S.table_sequence]
            if ti.static(c.table_by_head):
                row = row + h * params[P.table_head]
            block = table[row + page * strides[S.table_block]]
            slot = -1
            # One comparison without signs: Vulkan takes a negative number, widened to 64 bits, for one above 0.
            if ti.cast(block, unsigned) < ti.cast(params[P.blocks], unsigned):
                slot = ti.cast(block, ti.i32) * c.page + inside
            n = c.page - inside
        if ti.static(c.sinks):
            if behind < 0:
                slot, n = index, -behind
        return ti.Vector([slot, n])

    return locate


def make_slot_offset(c, token, block):
    """slot_offset(slot, strides): how far a slot lies from the first, by the entries `token` and `block` of strides."""

    @ti.func
    def slot_offset(slot, strides):
        at = slot * strides[token]
        if ti.static(c.place == "table"):
            s = ti.cast(slot, ti.u32)
            page, inside = ti.cast(s // ti.u32(c.page), ti.i32), ti.cast(s % ti.u32(c.page), ti.i32)
            at = page * strides[block] + inside * strides[token]
        return at

    return slot_offset


def make_slot_offsets(c):
    """`make_slot_offset` of K, of V and of the scales."""
    return (
        make_slot_offset(c, S.k_token, S.k_block),
        make_slot_offset(c, S.v_token, S.v_block),
        make_slot_offset(c, S.scale_token, S.scale_block),
    )


@ti.func
def query_row_offset(b, h, r, group, queries, first, sequence, head, token):
    """Where query row r of KV head h lies: its head comes first in r, then the query."""
    return first + b * sequence + (h * group + r % group) * head + r // group * token


def make_query_row(c):
    """query_row(b, h, r, strides, params): where query row r of KV head h of a sequence lies in q."""

    @ti.func
    def query_row(b, h, r, strides, params):
        return query_row_offset(b, h, r, c.group, params[P.queries], strides[S.q_first], strides[S.q_sequence],
                                strides[S.q_head], strides[S.q_token])  # fmt: skip

    return query_row


@ti.func
def result_offsets(kv_head, r, group, lse_first, strides, params):
    """(of its first element, of its log-sum-exp): where query row r of a KV head, counted over sequences, ends."""
    b, h = kv_head // params[P.heads], kv_head % params[P.heads]
    at = query_row_offset(b, h, r, group, params[P.queries], strides[S.out_first], strides[S.out_sequence],
                          strides[S.out_head], strides[S.out_token])  # fmt: skip
    lse_at = query_row_offset(b, h, r, group, params[P.queries], lse_first, strides[S.lse_sequence],
                              strides[S.lse_head], strides[S.lse_token])  # fmt: skip
    return at, lse_at


def make_output_offsets(parts, c):
    """output_offsets(kv_head, r, split, strides, params): `result_offsets`, or of the split's part if there are."""

    @ti.func
    def output_offsets(kv_head, r, split, strides, params):
        at, lse_at = 0, 0
        if ti.static(parts):
            part = (kv_head * (params[P.queries] * c.group) + r) * params[P.splits] + split
            at, lse_at = params[P.part_first] + part * c.width_v, params[P.lse_first] + part
        else:
            at, lse_at = result_offsets(kv_head, r, c.group, params[P.lse_first], strides, params)
        return at, lse_at

    return output_offsets
