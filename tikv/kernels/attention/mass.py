"""The attention mass of keys, computed after attention: how much weight queries gave each key, for eviction.

The launch reads K once for each `Choices.rows` query rows of a KV head, and the log-sum-exps that attention stored.
Here each thread has one key. `cpu.mass` and `cuda.mass` distribute the keys as attention does there; `sm80.mass` has
the tensor cores weigh those of prompts.
"""

from tikv.kernels.address import index_array, make_word_offset
from tikv.kernels.attention.addresses import (
    make_find_key,
    make_query_row,
    make_score_offset,
    make_slot_offsets,
    result_offsets,
)
from tikv.kernels.attention.parameters import (
    BITS,
    FLOATS,
    MINUS_INFINITY,
    PARAMS,
    SCALARS,
    STRIDES,
    P,
    S,
    X,
    array_types,
)
from tikv.kernels.attention.softmax import exp2, is_nan, make_logit, not_above_zero
from tikv.kernels.attention.visible import V, make_is_visible, make_visible_range
from tikv.kernels.codec import SIZE, make_bits_to_f32, make_load
from tikv.kernels.groups import make_column
from tikv.kernels.groups import make_load_unit as make_load_unit_of_codes
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


def make_mass_offset(by_slot, c):
    """mass_offset(b, h, t, n, index, slot, visible, strides, params): the address of a visible key's mass.

    It counts by slot, or by place among all tokens that are held, oldest first, even those that a window hides;
    `S.out_token` other tokens lie between the sinks and those after them. For chosen tokens it counts by t and n, for
    the n-th token that query t chose.
    """

    @ti.func
    def mass_offset(b, h, t, n, index, slot, visible, strides, params):
        at = slot
        if ti.static(c.index_bits > 0):
            at = t * strides[S.out_token] + n
        elif ti.static(not by_slot):
            at = index
            if index >= visible[V.sinks]:
                oldest = ti.max(params[P.sinks], params[P.first_valid])
                if ti.static(c.kind == "ring"):
                    oldest = ti.max(oldest, visible[V.end] - params[P.ring])
                at = at + visible[V.end] - oldest - visible[V.recent] + strides[S.out_token]
        return strides[S.out_first] + b * strides[S.out_sequence] + h * strides[S.out_head] + at

    return mass_offset


def make_joined(greatest):
    """joined(a, b): the greater of two numbers, or NaN if one is NaN; without `greatest` their sum."""

    @ti.func
    def joined(a, b):
        both = a + b
        if ti.static(greatest):
            larger = ti.select(is_nan(a), a, ti.select(a > b, a, b))
            both = ti.select(is_nan(b), b, larger)
        return both

    return joined


def make_lse_of_row(c):
    """lse_of_row(kv_head, r, lse, strides, params, scalars) -> (1 if the row sees a key, log-sum-exp in base 2)."""

    @ti.func
    def lse_of_row(kv_head, r, lse: ti.template(), strides, params, scalars):
        bits = lse[result_offsets(kv_head, r, c.group, params[P.lse_first], strides, params)[1]]
        exists, value = 0, ti.f32(0.0)
        if bits != ti.u32(MINUS_INFINITY):
            exists, value = 1, ti.bit_cast(bits, ti.f32) / scalars[X.lse_scale]
        return exists, value

    return lse_of_row


def make_dots(c):
    """dots(b, h, first, k_row, scale_row, k, k_scale, q, ...): the products of a key and the rows from `first`."""
    query_row, load_q, column = make_query_row(c), make_load(c.query, 1, SIZE[c.query] * 8), make_column(c.cache)
    load_unit, R, unit = make_load_unit(c), c.rows, c.unit

    @ti.func
    def dots(b, h, first, k_row, scale_row, k: ti.template(), k_scale: ti.template(), q: ti.template(), strides,
             params):  # fmt: skip
        sums, rows = ti.Vector([ti.f32(0.0)] * R), ti.Vector([0] * R)
        for g in ti.static(range(R)):
            rows[g] = query_row(b, h, ti.min(first + g, params[P.queries] * c.group - 1), strides, params)
        for u in range(c.width // unit):
            x = load_unit(k, k_scale, k_row, scale_row, u)
            for g in ti.static(range(R)):
                for e in ti.static(range(unit)):
                    sums[g] += x[e] * load_q(q, rows[g] + column(u * unit + e))[0]
        return sums

    @ti.func
    def stored_products(b, h, first, k_row, scale_row, k: ti.template(), k_scale: ti.template(), q: ti.template(),
                        strides, params):  # fmt: skip
        products = ti.Vector([ti.f32(0.0)] * R)
        for g in ti.static(range(R)):
            r = ti.min(first + g, params[P.queries] * c.group - 1)
            products[g] = ti.bit_cast(ti.cast(k[k_row + r * strides[S.k_block]], ti.u32), ti.f32)
        return products

    return stored_products if c.scored else dots


def make_load_unit(c):
    """load_unit(array, scales, row, scale_row, u) -> the numbers of unit u of a row of K."""
    if c.groups:
        return make_load_unit_of_codes(c.cache, make_bits_to_f32(c.scale))
    load, word = make_load(c.cache, c.unit, c.bits), make_word_offset(*c.k_inner)

    @ti.func
    def load_unit(array: ti.template(), scales: ti.template(), row, scale_row, u):
        return load(array, row + word(u))

    return load_unit


def make_mass(style, by_slot, greatest, c):
    """The attention mass of each visible key: the sum of the weights that the query rows of its KV head give it.

    With `greatest` it is the greatest of these weights. It is added to what `mass` holds, or replaces what is less.

    mass(q, k, lens, table, indices, k_scale, lse, mass, strides, params, scalars) on Vulkan, Metal and CUDA: `lse`
    holds the float32 bits that attention stored. There are batch * heads * `P.keys` items, the extent of q. For chosen
    tokens there are so many for each query, and only its rows count.
    """
    Q, K, LENS, TABLE, SC, _ = array_types(style, c)
    INDEX = index_array(c.index_bits)
    visible_range, find_key, is_visible = make_visible_range(c), make_find_key(c), make_is_visible(c)
    logit_of, dots, lse_of_row = make_logit(c), make_dots(c), make_lse_of_row(c)
    mass_offset, joined, score_offset = make_mass_offset(by_slot, c), make_joined(greatest), make_score_offset(c)
    k_offset, _, scale_offset = make_slot_offsets(c)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None

    @ti.func
    def mass_of_key(i, arrays: ti.template(), strides, params, scalars):
        q, k, lens, table, k_scale, lse, mass = ti.static(arrays)
        n, kv_head = i % params[P.keys], i // params[P.keys]
        t, first, rows = 0, 0, params[P.queries] * c.group
        if ti.static(c.index_bits > 0):
            t, kv_head = kv_head % params[P.queries], kv_head // params[P.queries]
            first, rows = t * c.group, (t + 1) * c.group
        b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        visible = visible_range(b, h, lens, strides, params)
        slot, index, count = -1, n, visible[V.count]
        if ti.static(c.index_bits > 0):
            count = ti.select(count > 0, params[P.keys], 0)
        if n < count:
            key = find_key(b, h, t, n, visible, table, strides, params)
            slot, index = key[0], key[2]
        if slot >= 0:
            row = strides[S.k_first] + b * strides[S.k_sequence] + h * strides[S.k_head]
            scale, scale_row = ti.f32(1.0), 0
            if ti.static(c.scored):
                row = row + score_offset(slot, index, visible)
            else:
                row = row + k_offset(slot, strides)
            if ti.static(c.scale != ""):
                head = strides[S.k_scale_first] + b * strides[S.scale_sequence] + h * strides[S.scale_head]
                scale_row = head + scale_offset(slot, strides)
                if ti.static(c.row_scale):
                    scale = scale_value(k_scale[scale_row])
            total = ti.f32(0.0)
            for block in range((rows - first + c.rows - 1) // c.rows):
                products = dots(b, h, first + block * c.rows, row, scale_row, k, k_scale, q, strides, params)
                for g in ti.static(range(c.rows)):
                    r = first + block * c.rows + g
                    if r < rows:
                        sees, of_row = lse_of_row(kv_head, r, lse, strides, params, scalars)
                        if sees > 0 and is_visible(r // c.group, index, visible, params):
                            logit = logit_of(products[g] * scale, scalars[X.logit_scale], scalars[X.softcap])
                            total = joined(total, exp2(not_above_zero(logit - of_row)))
            at = mass_offset(b, h, t, n, index, slot, visible, strides, params)
            mass[at] = joined(mass[at], total)

    loop = make_loop(style, False, mass_of_key, P.tasks)

    @ti.kernel
    def mass_of_keys(q: Q, k: K, lens: LENS, table: TABLE, indices: INDEX, k_scale: SC, lse: BITS, mass: FLOATS,
                     strides: STRIDES, params: PARAMS, scalars: SCALARS):  # fmt: skip
        if ti.static(c.index_bits > 0):
            loop(q, params, ((q, k, lens, (table, indices), k_scale, lse, mass), strides, params, scalars))
        else:
            loop(q, params, ((q, k, lens, table, k_scale, lse, mass), strides, params, scalars))

    return mass_of_keys


make_mass.fast_math = True
