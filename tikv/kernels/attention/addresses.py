"""Addresses of the keys, query rows and results of attention."""

from tikv.kernels.attention.parameters import MAX_TOKENS, P, S
from tikv.kernels.attention.visible import V, first_position, make_in_bounds, make_query_bounds
from tikv.kernels.codec import WORD
from tikv.runtime import ti


def make_locate(c):
    """locate(b, h, index, visible, table, strides, params) -> (slot, n): where a visible key of KV head h lies.

    n counts the keys that follow one another from there. A slot of -1 means that the page does not exist; no query
    sees those n keys.
    """
    unsigned = WORD[c.table_bits or 32]

    @ti.func
    def locate(b, h, index, visible, table: ti.template(), strides, params):
        behind = index - visible[V.sinks]
        slot, n = visible[V.first] + behind, MAX_TOKENS
        if ti.static(c.kind == "ring"):
            end = params[P.sinks] + params[P.ring]
            if slot >= end:
                slot = slot - params[P.ring]
            n = end - slot
        elif ti.static(c.kind == "table"):
            p = ti.cast(slot, ti.u32)
            page = ti.cast(p // ti.u32(c.page), ti.i32)
            inside = ti.cast(p % ti.u32(c.page), ti.i32)
            row = strides[S.table_first] + b * strides[S.table_sequence]
            if ti.static(c.table_by_head):
                row = row + h * params[P.table_head]
            block = table[row + page * strides[S.table_block]]
            slot = -1
            # One unsigned comparison: Vulkan takes a negative number, widened to 64 bits, for a positive one.
            if ti.cast(block, unsigned) < ti.cast(params[P.blocks], unsigned):
                slot = ti.cast(block, ti.i32) * c.page + inside
            n = c.page - inside
        if ti.static(c.sinks):
            if behind < 0:
                slot, n = index, -behind
        return ti.Vector([slot, n])

    return locate


def make_find_key(c):
    """find_key(b, h, t, n, visible, table, strides, params) -> (slot, count, index) of the n-th key of a task's range.

    `index` counts visible keys; slot and count are those of `make_locate`. If tokens are chosen, the range holds the
    tokens that query t of the sequence chose, and `table` is a pair of the table and the chosen tokens. A slot of -1
    then also means that no token is chosen, that it does not exist, or that the query does not see it. New tokens of a
    tree are found even if the query does not see them. Under `invariant` the n-th key is that of position n, and a slot
    of -1 also means that it lies between the sinks and the first visible key.
    """
    locate, query_bounds, in_bounds = make_locate(c), make_query_bounds(), make_in_bounds(c)

    @ti.func
    def index_of_entry(b, h, t, n, visible, indices: ti.template(), params):
        at = params[P.indices_first] + b * params[P.indices_sequence] + h * params[P.indices_head]
        token = ti.cast(indices[at + t * params[P.indices_query] + n], ti.i64)
        length = ti.cast(visible[V.length_high], ti.i64) * ti.i64(MAX_TOKENS) + ti.cast(visible[V.length_low], ti.i64)
        index = -1
        if token >= ti.i64(0) and token < length:
            if token < ti.cast(visible[V.sinks], ti.i64):
                index = ti.cast(token, ti.i32)
            elif length - token <= ti.cast(visible[V.recent], ti.i64):
                index = visible[V.sinks] + visible[V.recent] - ti.cast(length - token, ti.i32)
        if ti.static(c.causal and not c.tree):
            bounds = query_bounds(t, visible, params)
            index = ti.select(in_bounds(index, bounds[0], bounds[1], bounds[2], bounds[3]) > 0, index, -1)
        return index

    @ti.func
    def find_key(b, h, t, n, visible, table: ti.template(), strides, params):
        key = ti.Vector([-1, 1, -1])
        if ti.static(c.index_bits > 0):
            of_blocks, indices = ti.static(table)
            index = index_of_entry(b, h, t, n, visible, indices, params)
            if index >= 0:
                at = locate(b, h, index, visible, of_blocks, strides, params)
                key = ti.Vector([at[0], 1, index])
        elif ti.static(c.invariant):
            sinks, low = visible[V.sinks], first_position(visible)
            if n < sinks or n >= low:
                index = ti.select(n < sinks, n, n - low + sinks)
                at = locate(b, h, index, visible, table, strides, params)
                key = ti.Vector([at[0], at[1], index])
            else:
                key[1] = low - n
        else:
            at = locate(b, h, n, visible, table, strides, params)
            key = ti.Vector([at[0], at[1], n])
        return key

    return find_key


def make_score_offset(c):
    """score_offset(slot, index, visible): the distance from a sequence's first product to that of a key.

    Products are always laid out without pages, since sequences that share a page have products of their own.
    """

    @ti.func
    def score_offset(slot, index, visible):
        at = slot
        if ti.static(c.kind == "table"):
            at = visible[V.first] + index - visible[V.sinks]
        return at

    return score_offset


def make_slot_offset(c, token, block):
    """slot_offset(slot, strides): the distance from slot 0, by the entries `token` and `block` of strides."""

    @ti.func
    def slot_offset(slot, strides):
        at = slot * strides[token]
        if ti.static(c.kind == "table"):
            s = ti.cast(slot, ti.u32)
            page, inside = ti.cast(s // ti.u32(c.page), ti.i32), ti.cast(s % ti.u32(c.page), ti.i32)
            at = page * strides[block] + inside * strides[token]
        return at

    return slot_offset


def make_slot_offsets(c):
    """`make_slot_offset` for K, for V and for the scales."""
    return (
        make_slot_offset(c, S.k_token, S.k_block),
        make_slot_offset(c, S.v_token, S.v_block),
        make_slot_offset(c, S.scale_token, S.scale_block),
    )


@ti.func
def query_row_offset(b, h, r, group, queries, first, sequence, head, token):
    """The address of query row r of KV head h; r counts the heads of a query first."""
    return first + b * sequence + (h * group + r % group) * head + r // group * token


def make_query_row(c):
    """query_row(b, h, r, strides, params): the address in q of query row r of KV head h of sequence b."""

    @ti.func
    def query_row(b, h, r, strides, params):
        return query_row_offset(b, h, r, c.group, params[P.queries], strides[S.q_first], strides[S.q_sequence],
                                strides[S.q_head], strides[S.q_token])  # fmt: skip

    return query_row


@ti.func
def result_offsets(kv_head, r, group, lse_first, strides, params):
    """The addresses of the result of query row r and of its log-sum-exp; `kv_head` is counted over all sequences."""
    b, h = kv_head // params[P.heads], kv_head % params[P.heads]
    at = query_row_offset(b, h, r, group, params[P.queries], strides[S.out_first], strides[S.out_sequence],
                          strides[S.out_head], strides[S.out_token])  # fmt: skip
    lse_at = query_row_offset(b, h, r, group, params[P.queries], lse_first, strides[S.lse_sequence],
                              strides[S.lse_head], strides[S.lse_token])  # fmt: skip
    return at, lse_at


def make_output_offsets(parts, c):
    """output_offsets(kv_head, r, split, strides, params): `result_offsets`, or the addresses of the split's part."""

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
