"""The attention mass of keys, after attention: which of them the queries looked at, for whoever evicts keys."""

from tikv.kernels.address import make_word_offset
from tikv.kernels.attention.addresses import make_locate, make_query_row, make_slot_offsets, result_offsets
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
from tikv.kernels.attention.softmax import exp2, make_logit
from tikv.kernels.attention.visible import V, make_is_visible, make_visible_range
from tikv.kernels.codec import SIZE, make_bits_to_f32, make_element_to_f32, make_load, scale_array
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


def make_elements(style, c):
    """elements(array, word): the values in a word of K; on CPU a word is an element."""
    if style != "cpu":
        return make_load(c.cache, c.unit, c.bits)
    value = make_element_to_f32(c.cache)

    @ti.func
    def elements(array: ti.template(), word):
        return ti.Vector([value(array[word])])

    return elements


def make_dot(style, c):
    """dot(k, k_row, q, q_row): the product of a row of K and one of q."""
    k_word = make_word_offset(*c.k_inner)
    load, load_q = make_elements(style, c), make_load(c.query, 1, SIZE[c.query] * 8)
    unit = c.unit
    units = c.width // unit

    @ti.func
    def dot(k: ti.template(), k_row, q: ti.template(), q_row):
        found = ti.f32(0.0)
        for u in range(units):
            x = load(k, k_row + k_word(u))
            for e in ti.static(range(unit)):
                found = found + x[e] * load_q(q, q_row + u * unit + e)[0]
        return found

    return dot


def make_mass(style, c):
    """The attention mass of each visible key: how much weight the query rows of its KV head give it in all.

    mass(q, k, lens, table, k_scale, lse, mass, strides, params, scalars): `lse` holds the float32 bits of what
    attention left, `mass` is (batch, heads, capacity) by slots and zero where nobody looks. Items are batch * heads *
    capacity, the extent of q.
    """
    Q, K, LENS, TABLE, _, _ = array_types(style, c)
    SC = scale_array(c.scale)  # bits, on CPU too
    visible_range, locate, is_visible = make_visible_range(c), make_locate(c), make_is_visible(c)
    logit_of, query_row, dot = make_logit(c), make_query_row(c), make_dot(style, c)
    k_offset, _, scale_offset = make_slot_offsets(c)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None

    @ti.func
    def mass_of_key(i, arrays: ti.template(), strides, params, scalars):
        q, k, lens, table, k_scale, lse, mass = ti.static(arrays)
        index, kv_head = i % params[P.capacity], i // params[P.capacity]
        b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        visible = visible_range(b, h, lens, strides, params)
        slot = -1
        if index < visible[V.count]:
            slot = locate(b, h, index, visible, table, strides, params)[0]
        if slot >= 0:
            row = strides[S.k_first] + b * strides[S.k_sequence] + h * strides[S.k_head] + k_offset(slot, strides)
            scale = ti.f32(1.0)
            if ti.static(c.scale != ""):
                head = strides[S.k_scale_first] + b * strides[S.scale_sequence] + h * strides[S.scale_head]
                scale = scale_value(k_scale[head + scale_offset(slot, strides)])
            total = ti.f32(0.0)
            for r in range(params[P.queries] * c.group):
                t = r // c.group
                product = dot(k, row, q, query_row(b, h, r, strides, params))
                bits = lse[result_offsets(kv_head, r, c.group, params[P.out_lse_first], strides, params)[1]]
                if bits != ti.u32(MINUS_INFINITY) and is_visible(t, index, visible, params):
                    logit = logit_of(product * scale, scalars[X.logit_scale], scalars[X.softcap])
                    total = total + exp2(ti.min(logit - ti.bit_cast(bits, ti.f32) / scalars[X.lse_scale], ti.f32(0.0)))
            mass[params[P.mass_first] + kv_head * params[P.capacity] + slot] = total

    loop = make_loop(style, False, mass_of_key, P.tasks)

    @ti.kernel
    def mass_of_keys(q: Q, k: K, lens: LENS, table: TABLE, k_scale: SC, lse: BITS, mass: FLOATS, strides: STRIDES,
                     params: PARAMS, scalars: SCALARS):  # fmt: skip
        loop(q, params, ((q, k, lens, table, k_scale, lse, mass), strides, params, scalars))

    return mass_of_keys


make_mass.fast_math = True
