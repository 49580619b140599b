"""Decode attention by blocks of threads on Vulkan and Metal, and on CUDA if no faster kernel fits.

A block takes `BLOCK` keys at a time. A group of neighbouring threads, a subgroup or a warp, computes the score of one
key after another: its threads read the key's words side by side, and q.k is a sum over the group. Then each thread owns
a score, the groups agree on the maximum, and each thread sums columns of V. On a device without such operations, a
group is one thread.
"""

from typing import NamedTuple

from tikv.kernels.address import make_word_offset
from tikv.kernels.attention.addresses import (
    make_find_key,
    make_output_offsets,
    make_query_row,
    make_score_offset,
    make_slot_offsets,
)
from tikv.kernels.attention.parameters import (
    LOG2E,
    MASKED,
    P,
    S,
    X,
    make_attend_kernel,
)
from tikv.kernels.attention.softmax import exp2, is_masked, is_nan, make_inverse, make_logit, make_store_lse
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.terms import make_bias, make_origin, make_slope_of, make_start_state
from tikv.kernels.attention.tree import make_depth_of, make_index_of
from tikv.kernels.attention.visible import make_is_visible, make_query_bounds
from tikv.kernels.codec import SIZE, make_bits_to_f32, make_load, make_store
from tikv.kernels.groups import make_column, make_place
from tikv.kernels.groups import make_load_unit as make_load_unit_of_codes
from tikv.kernels.lanes import BLOCK, SINGLE, SPIRV_THREADS, WARP, G, make_group_operations
from tikv.runtime import ti

MAX_IN_FLIGHT = 8  # keys that a thread reads at a time
NARROW = 32  # words of a key; if there are more, a thread reads two at a time
# The size of the code for a row of a task on CUDA, in quarters of an element of a unit, and its limit for 8 rows.
CODE = {
    "decoded": 4,
    "masked": 4,
    "indices": 4,
    "tree": 4,
    "softcap": 2,
    "sinks": 2,
    "alibi_slopes": 1,
    "sink_logits": 1,
}
LONGEST = 16


class BlockShape(NamedTuple):
    """How the threads of a block share the work."""

    units: int  # words of a row of K
    units_v: int
    rounds: int  # units of the result that a thread owns
    sharers: int  # threads that own the same unit, each for its own keys
    max_groups: int  # of a block
    keys: int  # whose K a group reads at a time
    v_keys: int  # whose V a thread reads at a time
    words: int  # of a key that a thread reads at a time


def most_rows(unit, parts):
    """The maximum of query rows of a task on CUDA, 8 or 4, for units of so many elements and the named parts of `CODE`.

    The code of all rows of a task is unrolled. LLVM inlines a loop's body only up to some length, about 3,700 lines of
    PTX. It calls a longer body as a function, which the native launcher does not support.
    """
    return 8 if 4 * unit + sum(CODE[name] for name in parts) <= LONGEST else 4


def shape_of(kind, c):
    """The `BlockShape` for a kind of group of threads."""
    units, units_v = c.width // c.unit, c.width_v // c.of_values.unit
    sharers = 1
    while sharers * 2 * units_v <= BLOCK and sharers * 2 * MAX_IN_FLIGHT <= BLOCK:
        sharers *= 2
    in_flight = MAX_IN_FLIGHT if c.rows <= 2 else 4 if c.rows <= 4 else 2  # as registers allow
    return BlockShape(
        units=units,
        units_v=units_v,
        rounds=-(-units_v // BLOCK),
        sharers=sharers,
        max_groups=BLOCK // 32 if kind == WARP else BLOCK,
        keys=1 if kind == SINGLE else in_flight,
        v_keys=max(in_flight, 4),
        words=1 if kind == SINGLE or units <= NARROW else 2,
    )


def make_attend_block(style, kind, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, strides, params, scalars) on Vulkan, Metal and CUDA.

    On CUDA the extent of q is tasks * `BLOCK`. With terms, the arguments sink_logits, slopes and the words of a tree
    come before the vectors, and their numbers last. `kind` is how neighbouring threads exchange numbers, as in
    `lanes.make_group_operations`; the other choices are as in `cpu.attend.make_attend_cpu`.
    """
    group_position = make_group_operations(kind).position
    attend_task = make_attend_task(style, kind, parts, c)

    @ti.func
    def attend_all(arrays: ti.template(), terms: ti.template(), strides: ti.template(), params: ti.template(),
                   scalars: ti.template()):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        if ti.static(style == "spirv"):
            for i in range(SPIRV_THREADS):
                thread, first = i % BLOCK, i // BLOCK
                count = (params[P.tasks] - first + SPIRV_THREADS // BLOCK - 1) // (SPIRV_THREADS // BLOCK)
                if count > 0:
                    position = group_position(thread)
                    for n in range(count):
                        number = first + n * (SPIRV_THREADS // BLOCK)
                        attend_task(thread, position, number, arrays, terms, strides, params, scalars)
        else:
            for i in range(ti.static(arrays[0]).shape[0]):
                position = group_position(i % BLOCK)
                attend_task(i % BLOCK, position, i // BLOCK, arrays, terms, strides, params, scalars)

    return make_attend_kernel(attend_all, style, c)


make_attend_block.fast_math = True


def make_attend_block_in_order(style, kind, parts, c):
    """`make_attend_block` for `Choices.invariant`: no compiler reorders its sums."""
    return make_attend_block(style, kind, parts, c)


def make_attend_task(style, kind, parts, c):
    """attend_task(thread, position, number, ...): a thread's share of a task; all threads of a block call it."""
    shape, group_sum = shape_of(kind, c), make_group_operations(kind).sum
    decode_task = make_decode_task(style, BLOCK if c.invariant else 1, c)
    load_queries, load_key = make_load_queries(shape, c), make_load_key(c)
    group_logits, start_state = make_group_logits(shape, kind, c), make_start_state(c)
    cv = c.of_values
    to_weights, add_values = make_to_weights(shape, cv), make_add_values(shape, cv)
    add_sharers, store_rows = make_add_sharers(shape, cv), make_store_rows(style, shape, parts, cv)
    R, groups = c.rows, c.groups or cv.groups

    @ti.func
    def attend_task(thread, position, number, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse = ti.static(arrays)
        queries = ti.simt.block.SharedArray((R * c.width,), ti.f32)  # in the order rows, elements of a word, words
        weights = ti.simt.block.SharedArray((R * BLOCK,), ti.f32)
        of_groups = ti.simt.block.SharedArray((R * shape.max_groups,), ti.f32)
        k_rows = ti.simt.block.SharedArray((BLOCK * (2 if groups else 1),), ti.i32)  # with groups, also of their scales
        v_rows = ti.simt.block.SharedArray((BLOCK,), ti.i32)
        mine = position[G.offset] + position[G.rank]  # which of the block's keys this thread owns
        visible, task = decode_task(number, lens, strides, params)
        sharer, column = thread // shape.units_v, thread % shape.units_v
        if ti.static(shape.sharers == 1):
            sharer, column = 0, thread
        ti.simt.block.sync()
        load_queries(thread, task, q, queries, strides, params)
        m = ti.Vector([ti.f32(MASKED)] * R)
        l = ti.Vector([ti.f32(0.0)] * R)  # for the keys that this thread owns
        acc = ti.Vector([ti.f32(0.0)] * (R * shape.rounds * cv.unit))
        if ti.static(c.sink_logits):
            for g in ti.static(range(R)):
                m[g], weight = start_state(task[T.head], task[T.row] + g, task[T.split], terms)
                l[g] = ti.select(thread == 0, weight, ti.f32(0.0))
        for chunk in range((task[T.end] - task[T.begin] + BLOCK - 1) // BLOCK):
            remaining = ti.min(BLOCK, task[T.end] - task[T.begin] - chunk * BLOCK)
            slot, index, k_row, v_row, scale_row, k_factor, v_factor = load_key(
                task[T.begin] + chunk * BLOCK + mine, visible, task, table, k_scale, v_scale, strides, params
            )
            k_rows[mine], v_rows[mine] = k_row, v_row
            if ti.static(groups):
                k_rows[BLOCK + mine] = scale_row
            ti.simt.block.sync()
            logits = group_logits(position, index, slot, remaining, k_factor, visible, task, k, k_scale, queries,
                                  k_rows, of_groups, terms, strides, params, scalars)  # fmt: skip
            ti.simt.block.sync()
            to_weights(mine, position, v_factor, logits, of_groups, weights, m, l, acc)
            ti.simt.block.sync()
            if sharer < shape.sharers:
                add_values(sharer, column, remaining, v, v_scale, v_rows, k_rows, weights, acc, strides)
            ti.simt.block.sync()
        for g in ti.static(range(R)):
            l[g] = group_sum(l[g])
        if position[G.rank] == 0:
            for g in ti.static(range(R)):
                of_groups[position[G.index] * R + g] = l[g]
        add_sharers(thread, column, weights, acc)
        store_rows(thread, sharer, column, position, task, of_groups, m, acc, out, lse, strides, params, scalars)

    return attend_task


def make_load_queries(shape, c):
    """load_queries(thread, task, q, queries, strides, params): copies the task's rows of q to shared memory."""
    query_row, load_q = make_query_row(c), make_load(c.query, 1, SIZE[c.query] * 8)
    R, D, U, units = c.rows, c.width, c.unit, shape.units
    rounds = -(-R * D // BLOCK)
    place_of = make_place(c.cache)

    @ti.func
    def load_queries(thread, task, q: ti.template(), queries: ti.template(), strides, params):
        rows = params[P.queries] * c.group
        for n in range(rounds):
            z = n * BLOCK + thread
            if z < R * D:
                r = ti.min(task[T.row] + z // D, rows - 1)
                d = z % D
                at = query_row(task[T.sequence], task[T.head], r, strides, params)
                place = place_of(d)
                queries[(z // D * U + place % U) * units + place // U] = load_q(q, at + d)[0]

    return load_queries


def make_load_unit(inner, c):
    """load_unit(array, scales, row, scale_row, u) -> the numbers of unit u of a row, in pieces as `inner` says."""
    if c.groups:
        return make_load_unit_of_codes(c.cache, make_bits_to_f32(c.scale))
    load, word = make_load(c.cache, c.unit, c.bits), make_word_offset(*inner)

    @ti.func
    def load_unit(array: ti.template(), scales: ti.template(), row, scale_row, u):
        return load(array, row + word(u))

    return load_unit


def make_load_key(c):
    """load_key(n, ...) -> (slot, index, row of K, of V, of scales, scale of K, of V) for the key that a thread owns."""
    find_key, (k_offset, v_offset, scale_offset), cv = make_find_key(c), make_slot_offsets(c), c.of_values
    score_offset = make_score_offset(c)
    scale_value = make_bits_to_f32(c.scale or cv.scale) if c.scale or cv.scale else None

    @ti.func
    def load_key(n, visible, task, table: ti.template(), k_scale: ti.template(), v_scale: ti.template(), strides,
                 params):  # fmt: skip
        slot, index, k_row, v_row, scale_row = -1, n, 0, -1, 0
        k_factor, v_factor = ti.f32(1.0), ti.f32(1.0)
        if n < task[T.end]:
            key = find_key(task[T.sequence], task[T.head], task[T.row] // c.group, n, visible, table, strides, params)
            slot, index = key[0], key[2]
        if slot >= 0:
            k_row, v_row = task[T.k_first] + k_offset(slot, strides), task[T.v_first] + v_offset(slot, strides)
            if ti.static(c.scored):
                k_row = task[T.k_first] + score_offset(slot, index, visible)
            if ti.static(c.scale != "" or cv.scale != ""):
                scale_row = task[T.scale_first] + scale_offset(slot, strides)
            if ti.static(c.row_scale):
                k_factor = scale_value(k_scale[strides[S.k_scale_first] + scale_row])
            if ti.static(cv.row_scale):
                v_factor = scale_value(v_scale[strides[S.v_scale_first] + scale_row])
        return slot, index, k_row, v_row, scale_row, k_factor, v_factor

    return load_key


def make_group_dots(shape, group_sum, c):
    """group_dots(position, remaining, k, ...): the bits of q.k for this thread's key, row by row.

    The threads of a group compute the products of all their keys together, word by word.
    """
    load_unit = make_load_unit(c.k_inner, c)
    R, U, units, keys, words = c.rows, c.unit, shape.units, shape.keys, shape.words

    @ti.func
    def group_dots(position, remaining, k: ti.template(), k_scale: ti.template(), queries: ti.template(),
                   k_rows: ti.template(), strides):  # fmt: skip
        rank, size, offset = position[G.rank], position[G.size], position[G.offset]
        bits = ti.Vector([0] * R)
        for turn in range((ti.min(size, remaining - offset) + keys - 1) // keys):
            sums = ti.Vector([ti.f32(0.0)] * (R * keys))
            here, scale_here = ti.Vector([0] * keys), ti.Vector([0] * keys)
            for n in ti.static(range(keys)):
                key = offset + ti.min(turn * keys + n, size - 1)
                here[n] = k_rows[key]
                if ti.static(c.groups):
                    scale_here[n] = k_rows[BLOCK + key] + strides[S.k_scale_first]
            for step in range((units + size * words - 1) // (size * words)):
                for w in ti.static(range(words)):
                    u = (step * words + w) * size + rank
                    inside = u < units
                    u = ti.min(u, units - 1)
                    x = ti.Vector([ti.f32(0.0)] * (keys * U))
                    for n in ti.static(range(keys)):
                        values = load_unit(k, k_scale, here[n], scale_here[n], u)
                        for e in ti.static(range(U)):
                            x[n * U + e] = ti.select(inside, values[e], ti.f32(0.0))
                    for g in ti.static(range(R)):
                        for e in ti.static(range(U)):
                            y = queries[(g * U + e) * units + u]
                            for n in ti.static(range(keys)):
                                sums[n * R + g] += x[n * U + e] * y
            for n in ti.static(range(keys)):
                # No `select`: Metal evaluates only one side, so some threads of a group would not take part in the sum.
                mask = ti.select(rank == turn * keys + n, -1, 0)
                for g in ti.static(range(R)):
                    bits[g] = bits[g] | (ti.bit_cast(group_sum(sums[n * R + g]), ti.i32) & mask)
        return bits

    return group_dots


def make_group_logits(shape, kind, c):
    """group_logits(...): the logits of this thread's key, row by row; the maxima of each group go to `of_groups`."""
    operations = make_group_operations(kind)
    group_max, group_dots = operations.max, make_group_dots(shape, operations.sum, c)
    logit_of, is_visible = make_logit(c), make_is_visible(c)
    query_bounds, slope_of, bias, origin = make_query_bounds(), make_slope_of(c), make_bias(c), make_origin(c)
    depth_of, index_of = make_depth_of(c), make_index_of(c)
    R = c.rows

    @ti.func
    def group_logits(position, index, slot, remaining, k_factor, visible, task, k: ti.template(),
                     k_scale: ti.template(), queries: ti.template(), k_rows: ti.template(), of_groups: ti.template(),
                     terms: ti.template(), strides, params, scalars):  # fmt: skip
        rows = params[P.queries] * c.group
        bits = ti.Vector([0] * R)
        if ti.static(c.scored):
            for g in ti.static(range(R)):
                r = ti.min(task[T.row] + g, rows - 1)
                word = k[k_rows[position[G.offset] + position[G.rank]] + r * strides[S.k_block]]
                bits[g] = ti.cast(word, ti.i32)
        else:
            bits = group_dots(position, remaining, k, k_scale, queries, k_rows, strides)
        logits, top = ti.Vector([ti.f32(MASKED)] * R), ti.Vector([ti.f32(MASKED)] * R)
        for g in ti.static(range(R)):
            logit = logit_of(ti.bit_cast(bits[g], ti.f32) * k_factor, scalars[X.logit_scale], scalars[X.softcap])
            r, counts_as = ti.min(task[T.row] + g, rows - 1), index
            depth = depth_of(task[T.sequence], r // c.group, terms, params)
            if ti.static(c.alibi or c.tree):
                bounds = query_bounds(depth, visible, params)
                counts_as = index_of(task[T.sequence], r // c.group, index, bounds, visible, terms, params)
                slope = slope_of(task[T.sequence], task[T.head], r, terms) * ti.f32(LOG2E)
                stands = origin(r // c.group, terms)
                logit += bias(slope, counts_as, bounds[1], bounds[2], bounds[3], stands[0], stands[1])
            logits[g] = ti.select(slot >= 0, logit, ti.f32(MASKED))
            if ti.static(c.masked):
                sees = is_visible(depth, counts_as, visible, params)
                logits[g] = ti.select(sees, logits[g], ti.f32(MASKED))
            top[g] = group_max(ti.select(is_nan(logits[g]), ti.f32(MASKED), logits[g]))
        if position[G.rank] == 0:
            for g in ti.static(range(R)):
                of_groups[position[G.index] * R + g] = top[g]
        return logits

    return group_logits


def make_to_weights(shape, c):
    """to_weights(mine, ...): writes the weights of a thread's key to shared memory; rescales sums and results.

    If rows see different keys, the weight of a key that a row does not see stays `MASKED`.
    """
    R, elements = c.rows, shape.rounds * c.unit

    @ti.func
    def to_weights(mine, position, v_factor, logits, of_groups: ti.template(), weights: ti.template(),
                   m: ti.template(), l: ti.template(), acc: ti.template()):  # fmt: skip
        for g in ti.static(range(R)):
            high = m[g]
            for j in range(position[G.groups]):
                high = ti.max(high, of_groups[j * R + g])
            shrink = exp2(m[g] - high)
            m[g] = high
            masked = is_masked(logits[g])
            p = ti.select(masked, ti.f32(0.0), exp2(logits[g] - high))
            l[g] = l[g] * shrink + p
            for e in ti.static(range(elements)):
                acc[g * elements + e] *= shrink
            weight = p * v_factor
            if ti.static(c.masked):
                weight = ti.select(masked, ti.f32(MASKED), weight)
            weights[g * BLOCK + mine] = weight

    return to_weights


def make_add_values(shape, c):
    """add_values(sharer, column, remaining, v, ...): adds a thread's weighted columns of V to its results."""
    load_unit = make_load_unit(c.v_inner, c)
    R, U, rounds, sharers, v_keys = c.rows, c.unit, shape.rounds, shape.sharers, shape.v_keys

    @ti.func
    def add_values(sharer, column, remaining, v: ti.template(), v_scale: ti.template(), v_rows: ti.template(),
                   k_rows: ti.template(), weights: ti.template(), acc: ti.template(), strides):  # fmt: skip
        for turn in range((remaining + sharers * v_keys - 1) // (sharers * v_keys)):
            x = ti.Vector([ti.f32(0.0)] * (v_keys * rounds * U))
            for n in ti.static(range(v_keys)):
                at, scale_at = v_rows[(turn * v_keys + n) * sharers + sharer], 0
                if ti.static(c.groups):
                    scale_at = k_rows[BLOCK + (turn * v_keys + n) * sharers + sharer] + strides[S.v_scale_first]
                for z in ti.static(range(rounds)):
                    unit = ti.min(z * BLOCK + column, shape.units_v - 1)
                    values = load_unit(v, v_scale, ti.max(at, 0), scale_at, unit)
                    for e in ti.static(range(U)):
                        x[(n * rounds + z) * U + e] = ti.select(at >= 0, values[e], ti.f32(0.0))
            for n in ti.static(range(v_keys)):
                for g in ti.static(range(R)):
                    p = weights[g * BLOCK + (turn * v_keys + n) * sharers + sharer]
                    for e in ti.static(range(rounds * U)):
                        y = p * x[n * rounds * U + e]
                        if ti.static(c.masked):  # a value that a query does not see may be NaN
                            y = ti.select(is_masked(p), ti.f32(0.0), y)
                        acc[g * rounds * U + e] += y

    return add_values


def make_add_sharers(shape, c):
    """add_sharers(thread, column, memory, acc): adds up the results of the threads that own the same columns."""
    R, U = c.rows, c.unit

    @ti.func
    def add_sharers(thread, column, memory: ti.template(), acc: ti.template()):
        if ti.static(shape.sharers > 1):
            for e in ti.static(range(U)):
                for g in ti.static(range(R)):
                    memory[g * BLOCK + thread] = acc[g * U + e]
                ti.simt.block.sync()
                for g in ti.static(range(R)):
                    x = ti.f32(0.0)
                    for j in ti.static(range(shape.sharers)):
                        x = x + memory[g * BLOCK + j * shape.units_v + column]
                    acc[g * U + e] = x
                ti.simt.block.sync()
        else:
            ti.simt.block.sync()

    return add_sharers


def make_store_rows(style, shape, parts, c):
    """store_rows(...): stores the task's rows, divided by the sums of their weights, and log-sum-exps."""
    output_offsets, store_lse = make_output_offsets(parts, c), make_store_lse(parts)
    inverse_of_sum = make_inverse(c)
    store = make_store(c.out, 1, SIZE[c.out] * 8, style)
    R, U, rounds, column_of = c.rows, c.unit, shape.rounds, make_column(c.cache)

    @ti.func
    def store_rows(thread, sharer, column, position, task, of_groups: ti.template(), m, acc, out: ti.template(),
                   lse: ti.template(), strides, params, scalars):  # fmt: skip
        for g in ti.static(range(R)):
            r = task[T.row] + g
            if r < params[P.queries] * c.group:
                total = ti.f32(0.0)
                for j in range(position[G.groups]):
                    total = total + of_groups[j * R + g]
                inverse = inverse_of_sum(total, scalars)
                at, lse_at = output_offsets(task[T.kv_head], r, task[T.split], strides, params)
                for z in ti.static(range(rounds)):
                    u = z * BLOCK + column
                    if sharer == 0 and u < shape.units_v:
                        for e in ti.static(range(U)):
                            store(out, at + column_of(u * U + e), ti.Vector([acc[(g * rounds + z) * U + e] * inverse]),
                                  ti.f32(1.0))  # fmt: skip
                if thread == 0:
                    store_lse(lse, lse_at, m[g], total, scalars)

    return store_rows
