"""Decode attention on CUDA in registers: a few neighbouring threads read a key together, word by word.

The threads that share a key are its lanes. They hold the same columns of K, V, queries and result, so a pass over the
keys needs no barrier and no shared memory. Shuffles sum q.k by transposing: each step halves the query rows, then the
keys, that a lane keeps. In the end a lane owns the scores of one row and a few of the keys in flight, takes their
exponentials, and hands the weights to its neighbours. The result is rescaled only when a maximum grows. The groups of a
block merge once, at the end.
"""

from typing import NamedTuple

from tikv.kernels.address import make_word_offset
from tikv.kernels.attention.addresses import make_find_key, make_output_offsets, make_query_row, make_slot_offsets
from tikv.kernels.attention.parameters import (
    LOG2E,
    MASKED,
    Choices,
    P,
    S,
    X,
    make_attend_kernel,
)
from tikv.kernels.attention.softmax import is_masked, make_inverse, make_logit, make_store_lse
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.terms import make_bias, make_origin, make_slope_of, make_start_state
from tikv.kernels.attention.tree import make_depth_of, make_index_of
from tikv.kernels.attention.visible import make_is_visible, make_query_bounds
from tikv.kernels.codec import FLOAT8, SIZE, make_bits_to_f32, make_decode, make_load, make_store
from tikv.kernels.lanes import ALL, BLOCK, butterfly_max, butterfly_sum, shuffle, shuffle_xor
from tikv.runtime import ti

WORD_BITS = 64
MAX_WIDTH = 256  # wider heads need more registers than a thread has
LN2 = 0.6931471805599453
LAG = 8.0  # how far a maximum may be behind before the result is rescaled: weights stay below e ** LAG


class LaneShape(NamedTuple):
    """How the threads of a block share the work."""

    lanes: int  # threads that share a key
    keys: int  # in flight in each lane
    resident: int  # blocks that a multiprocessor holds at once, which limits the registers of a thread
    owners: int  # at most so many lanes of a row share the scores of its keys


def shape_of(width: int, unit: int, rows: int, long: bool) -> LaneShape:
    """The shape for a head width, elements in a word and query rows of a task that was fastest on an H200.

    If the code for a key is `long`, see `is_long`, LLVM makes one function of it only for fewer keys.
    """
    each = {2: 8 if rows == 1 else 4, 4: 8 if rows <= 4 else 4, 8: 16 if rows == 1 else 8}[unit]
    lanes = 8
    while lanes * each < width and lanes < 32:
        lanes *= 2
    words = -(-width // (unit * lanes))
    held = rows_kept(rows) * unit * words  # queries, and as many results
    registers = 2 * held + 4 * 8 * words  # with 8 keys' K and V
    keys = 8 if registers <= 144 else 4
    if long:
        keys = 4 if held <= 32 else 2
    owners = 1 if unit < 8 and 2 < rows <= 4 else lanes
    return LaneShape(lanes, keys, 4 if registers <= 96 and rows <= 2 else 3, owners)


def is_long(c: Choices) -> bool:
    """Whether a key takes much code: keys are chosen, or masked for some rows, or are 8-bit floats to decode."""
    return c.masked or c.index_bits > 0 or c.cache in FLOAT8


def rows_kept(rows: int) -> int:
    """The number of query rows that a task computes, a power of two; rows beyond those it has are never stored."""
    return 1 << (rows - 1).bit_length()


class Exchange:
    """What follows from a shape for one set of choices: the words of a lane, and which lanes exchange numbers."""

    def __init__(self, shape, c):
        self.lanes, self.keys, self.groups = shape.lanes, shape.keys, BLOCK // shape.lanes
        self.k_words, self.v_words = c.width // c.unit, c.width_v // c.unit  # of a row
        self.k_rounds, self.v_rounds = -(-self.k_words // shape.lanes), -(-self.v_words // shape.lanes)  # of a lane
        self.k_elements, self.v_elements = self.k_rounds * c.unit, self.v_rounds * c.unit
        self.rows = rows_kept(c.rows)
        halvings = self.rows.bit_length() - 1
        # Distances between lanes that swap halves of their rows, and how many rows each keeps.
        self.row_distances = [shape.lanes >> (n + 1) for n in range(halvings)]
        self.rows_left = [self.rows >> (n + 1) for n in range(halvings)]
        # Keys that the lanes of a row share; a lane owns one of every so many.
        self.shared_keys = min(shape.keys, shape.lanes >> halvings, shape.owners)
        turns = self.shared_keys.bit_length() - 1
        # Distances between lanes that swap halves of their keys, and between those that then only add.
        self.key_distances = [shape.lanes >> (n + 1) for n in range(halvings, halvings + turns)]
        self.keys_left = [self.shared_keys >> (n + 1) for n in range(turns)]
        self.sum_distances = [shape.lanes >> (n + 1) for n in range(halvings + turns, shape.lanes.bit_length() - 1)]
        # The distance to the lane that owns the row which this lane keeps at g, and the same for keys.
        self.row_owner = distances_to_owners(self.rows, self.row_distances, self.rows_left)
        self.key_owner = distances_to_owners(self.shared_keys, self.key_distances, self.keys_left)


def distances_to_owners(count, distances, masks):
    """For each of `count` rows or keys, the distance to its owner after the halvings."""
    return [sum(d for d, n in zip(distances, masks, strict=True) if i & n) for i in range(count)]


def make_attend_lanes(shape, parts, c):
    """attend(q, k, v, lens, table, k_scale, v_scale, out, lse, strides, params, scalars) on CUDA.

    K and V are in words of 64 bits, and rows of V in one piece. The extent of q is tasks * `BLOCK`. Choices are as in
    `cpu.attend.make_attend_cpu`, terms as in `spirv.attend.make_attend_block`.
    """
    attend_task = make_attend_task(Exchange(shape, c), parts, c)

    @ti.func
    def attend_all(arrays: ti.template(), terms: ti.template(), strides: ti.template(), params: ti.template(),
                   scalars: ti.template()):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(ti.static(arrays[0]).shape[0]):
            attend_task(i % BLOCK, i // BLOCK, arrays, terms, strides, params, scalars)

    return make_attend_kernel(attend_all, "cuda", c)


make_attend_lanes.fast_math = True
make_attend_lanes.resident = lambda shape, parts, c: shape.resident


def make_attend_task(x, parts, c):
    """attend_task(thread, number, ...): a thread's share of a task; all threads of a block call it."""
    decode_task = make_decode_task("cuda", 1, c)
    load_queries, load_keys, dots = make_load_queries(x, c), make_load_keys(x, c), make_dots(x, c)
    logits, rescale, add_values = make_logits(x, c), make_rescale(x), make_add_values(x, c)
    merge_groups, start_state, slope_of = make_merge_groups(x, parts, c), make_start_state(c), make_slope_of(c)
    L, U, R, EV, groups = x.lanes, x.keys, x.rows, x.v_elements, x.groups
    own_keys = U // x.shared_keys

    @ti.func
    def attend_task(thread, number, arrays: ti.template(), terms: ti.template(), strides, params, scalars):
        q, k, v, lens, table, k_scale, v_scale, out, lse = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        begin, end = task[T.begin], task[T.end]
        lane, group = thread % L, thread // L
        # Each lane keeps the rows in its own order, row g ^ mine at g. Then every lane keeps the first half when rows
        # are halved, and what it needs from another lane lies there at the same place.
        mine = 0  # the row whose scores this lane owns
        for n in ti.static(range(len(x.rows_left))):
            if (lane & ti.static(x.row_distances[n])) != 0:
                mine = mine + ti.static(x.rows_left[n])
        query = ti.min(task[T.row] + mine, params[P.queries] * c.group - 1) // c.group
        my_key = 0  # of every `shared_keys`
        for n in ti.static(range(len(x.keys_left))):
            if (lane & ti.static(x.key_distances[n])) != 0:
                my_key = my_key + ti.static(x.keys_left[n])
        others_of_row = (thread % 32) & ~ti.static(sum(x.key_distances))
        # The lane that owns key i of this lane's row.
        holder = [others_of_row + ti.static(x.key_owner[i]) for i in range(x.shared_keys)]
        queries = [ti.f32(0.0) for _ in range(R * x.k_elements)]
        load_queries(lane, mine, task, q, queries, strides, params, scalars)
        m, l = ti.f32(MASKED), ti.f32(0.0)
        slope = ti.f32(0.0)
        if ti.static(c.terms):
            r = ti.min(task[T.row] + mine, params[P.queries] * c.group - 1)
            slope = slope_of(task[T.sequence], task[T.head], r, terms)
            if ti.static(c.sink_logits):
                high, weight = start_state(task[T.head], r, task[T.split] + group, terms)
                m = ti.max(high * ti.f32(LN2), ti.f32(MASKED))
                l = ti.select(my_key == 0, weight, ti.f32(0.0))
        acc = [ti.f32(0.0) for _ in range(R * EV)]
        kw = [ti.u64(0) for _ in range(x.k_rounds * U)]
        vw = [ti.u64(0) for _ in range(x.v_rounds * U)]
        alive = [0 for _ in range(U)]
        for turn in range((end - begin + groups * U - 1) // (groups * U)):
            here = begin + turn * groups * U + group
            load_keys(here, lane, task, kw, vw, alive, visible, k, v, table, strides, params)
            scores = [ti.f32(0.0) for _ in range(U)]
            dots(lane, kw, queries, scores)
            v_factor = [ti.f32(1.0) for _ in range(own_keys)]
            counts = [1 for _ in range(own_keys)]
            high = logits(here, query, my_key, slope, m, scores, v_factor, counts, visible, task, table, k_scale,
                          v_scale, terms, strides, params, scalars)  # fmt: skip
            if ti.simt.warp.any_nonzero(ti.u32(ALL), ti.cast(high > m + ti.f32(LAG), ti.i32)) != 0:
                rescale(high, m, l, acc)
            # A V that does not count may be infinite: it is the last key's again, or from another sequence's page.
            if ti.static(not c.gaps and not c.masked):
                if here - group + groups * U > end:
                    for u in ti.static(range(U)):
                        if here + u * groups >= end:
                            for w in ti.static(range(x.v_rounds)):
                                vw[u * x.v_rounds + w] = ti.u64(0)
            add_values(holder, m, l, acc, scores, v_factor, counts, vw, alive)
        l = butterfly_sum(l, x.key_distances)
        merge_groups(thread, mine, task, m, l, acc, out, lse, strides, params, scalars)

    return attend_task


def make_load_queries(x, c):
    """load_queries(lane, mine, ...): loads a lane's columns of the task's rows, row g ^ mine at g.

    Logits are in base e here, and their scale is multiplied into the queries unless a soft cap comes between.
    """
    query_row, load_q = make_query_row(c), make_load(c.query, 1, SIZE[c.query] * 8)
    L, UNIT = x.lanes, c.unit

    @ti.func
    def load_queries(lane, mine, task, q: ti.template(), queries: ti.template(), strides, params, scalars):
        rows = params[P.queries] * c.group
        scale = ti.f32(1.0)
        if ti.static(not c.softcap):
            scale = scalars[X.logit_scale] * ti.f32(LN2)
        for g in ti.static(range(x.rows)):
            r = ti.min(task[T.row] + (g ^ mine), rows - 1)
            at = query_row(task[T.sequence], task[T.head], r, strides, params)
            for w in ti.static(range(x.k_rounds)):
                column = ti.min(w * L + lane, x.k_words - 1) * UNIT
                for e in ti.static(range(UNIT)):
                    value = load_q(q, at + column + e)[0] * scale
                    if ti.static((w + 1) * L > x.k_words):
                        value = ti.select(w * L + lane < x.k_words, value, ti.f32(0.0))
                    queries[g * x.k_elements + w * UNIT + e] = value

    return load_queries


def make_slot_of(x, c):
    """slot_of(n, task, visible, table, strides, params) -> (slot, whether it counts, index) of the n-th key.

    After the end, the slot is the last key's and does not count. Lanes that need both for every key derive the slot
    from whether the key counts. So they compare before they read keys, and keep no index meanwhile. This takes 5 % less
    time with 4 query heads per KV head, and 2 % more with 8, whose lanes share the keys: bench_attention.py.
    """
    find_key = make_find_key(c)

    @ti.func
    def slot_of(n, task, visible, table: ti.template(), strides, params):
        counts, index = ti.cast(n < task[T.end], ti.i32), n
        last = ti.min(n, task[T.end] - 1)
        if ti.static(x.shared_keys == 1):
            last = ti.select(counts != 0, n, task[T.end] - 1)
        key = find_key(task[T.sequence], task[T.head], task[T.row] // c.group, last, visible, table, strides, params)
        slot = key[0]
        if ti.static(c.gaps):
            counts = ti.select(slot >= 0, counts, 0)
            slot = ti.max(slot, 0)
        if ti.static(c.index_bits > 0):
            index = key[2]
        return slot, counts, index

    return slot_of


def make_load_keys(x, c):
    """load_keys(first, lane, task, kw, vw, alive, ...): starts to read this lane's words of the next keys."""
    slot_of, (k_offset, v_offset, _), k_word = make_slot_of(x, c), make_slot_offsets(c), make_word_offset(*c.k_inner)
    L = x.lanes

    @ti.func
    def load_keys(first, lane, task, kw: ti.template(), vw: ti.template(), alive: ti.template(), visible,
                  k: ti.template(), v: ti.template(), table: ti.template(), strides, params):  # fmt: skip
        for u in ti.static(range(x.keys)):
            slot, counts, _ = slot_of(first + u * x.groups, task, visible, table, strides, params)
            alive[u] = counts
            k_row = task[T.k_first] + k_offset(slot, strides)
            for w in ti.static(range(x.k_rounds)):
                kw[u * x.k_rounds + w] = k[k_row + k_word(ti.min(w * L + lane, x.k_words - 1))]
                if ti.static((w + 1) * L > x.k_words):
                    kw[u * x.k_rounds + w] = ti.select(w * L + lane < x.k_words, kw[u * x.k_rounds + w], ti.u64(0))
            v_row = task[T.v_first] + v_offset(slot, strides)
            for w in ti.static(range(x.v_rounds)):
                vw[u * x.v_rounds + w] = v[v_row + ti.min(w * L + lane, x.v_words - 1)]

    return load_keys


def make_dots(x, c):
    """dots(lane, kw, queries, scores): q.k of this lane's row and keys, at the first of every `shared_keys`."""
    decode = make_decode(c.cache, WORD_BITS)
    UNIT, R, K = c.unit, x.rows, x.shared_keys

    @ti.func
    def halve_rows(s):
        """This lane's row of the sums over the lanes that swap rows."""
        for n in ti.static(range(len(x.rows_left))):
            for g in ti.static(range(x.rows_left[n])):
                s[g] = s[g] + shuffle_xor(s[ti.static(g + x.rows_left[n])], ti.static(x.row_distances[n]))
        return s[0]

    @ti.func
    def share_keys(t: ti.template(), lane):
        """The sums of this lane's keys over the lanes of its row."""
        for n in ti.static(range(len(x.keys_left))):
            upper = (lane & ti.static(x.key_distances[n])) != 0
            for o in ti.static(range(x.keys // K)):
                for i in ti.static(range(x.keys_left[n])):
                    low, high = t[o * K + i], t[ti.static(o * K + i + x.keys_left[n])]
                    t[o * K + i] = ti.select(upper, high, low) + shuffle_xor(
                        ti.select(upper, low, high), ti.static(x.key_distances[n])
                    )
        for o in ti.static(range(x.keys // K)):
            t[o * K] = butterfly_sum(t[o * K], x.sum_distances)

    @ti.func
    def dots(lane, kw: ti.template(), queries: ti.template(), scores: ti.template()):
        for u in ti.static(range(x.keys)):
            s = [ti.f32(0.0) for _ in range(R)]
            for w in ti.static(range(x.k_rounds)):
                values = decode(kw[u * x.k_rounds + w])
                for g in ti.static(range(R)):
                    for e in ti.static(range(UNIT)):
                        s[g] += values[e] * queries[g * x.k_elements + w * UNIT + e]
            scores[u] = halve_rows(s)
        share_keys(scores, lane)

    return dots


def make_logits(x, c):
    """logits(here, query, my_key, ...) -> the maximum of m and this lane's logits, which replace the scores."""
    slot_of, (_, _, scale_offset) = make_slot_of(x, c), make_slot_offsets(c)
    logit_of, is_visible = make_logit(c), make_is_visible(c)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None
    query_bounds, bias, origin = make_query_bounds(), make_bias(c), make_origin(c)
    depth_of, index_of = make_depth_of(c), make_index_of(c)
    K = x.shared_keys
    own_keys = x.keys // K

    @ti.func
    def logits(here, query, my_key, slope, m, scores: ti.template(), v_factor: ti.template(), counts: ti.template(),
               visible, task, table: ti.template(), k_scale: ti.template(), v_scale: ti.template(),
               terms: ti.template(), strides, params, scalars):  # fmt: skip
        k_factor = [ti.f32(1.0) for _ in range(own_keys)]
        indices = [0 for _ in range(own_keys)]
        for o in ti.static(range(own_keys)):
            slot, counts[o], index = slot_of(here + (o * K + my_key) * x.groups, task, visible, table, strides, params)
            indices[o] = index
            if ti.static(c.scale != ""):
                at = task[T.scale_first] + scale_offset(slot, strides)
                k_factor[o] = scale_value(k_scale[strides[S.k_scale_first] + at])
                v_factor[o] = scale_value(v_scale[strides[S.v_scale_first] + at])
            if ti.static(c.masked):
                depth, counts_as = depth_of(task[T.sequence], query, terms, params), index
                if ti.static(c.tree):
                    bounds = query_bounds(depth, visible, params)
                    counts_as = index_of(task[T.sequence], query, index, bounds, visible, terms, params)
                if not is_visible(depth, counts_as, visible, params):
                    counts[o] = 0
        high = m
        for o in ti.static(range(own_keys)):
            logit = scores[o * K] * k_factor[o]
            if ti.static(c.softcap):
                logit = logit_of(logit, scalars[X.logit_scale], scalars[X.softcap]) * ti.f32(LN2)
            if ti.static(c.alibi):
                bounds = query_bounds(depth_of(task[T.sequence], query, terms, params), visible, params)
                index = index_of(task[T.sequence], query, indices[o], bounds, visible, terms, params)
                stands = origin(query, terms)
                logit = logit + bias(slope, index, bounds[1], bounds[2], bounds[3], stands[0], stands[1])
            scores[o * K] = ti.select(counts[o] != 0, logit, ti.f32(MASKED))
            high = ti.max(high, scores[o * K])
        return high

    return logits


def make_rescale(x):
    """rescale(high, m, l, acc): rescales sums and results to the new maxima of their rows."""
    EV = x.v_elements

    @ti.func
    def rescale(high, m: ti.template(), l: ti.template(), acc: ti.template()):
        top = butterfly_max(high, x.key_distances)
        shrink = ti.exp(m - top)
        m = top
        l = l * shrink
        for g in ti.static(range(x.rows)):
            f = shrink
            if ti.static(g > 0):
                f = shuffle_xor(shrink, ti.static(x.row_owner[g]))
            for e in ti.static(range(EV)):
                acc[g * EV + e] *= f

    return rescale


def make_add_values(x, c):
    """add_values(holder, m, l, acc, logits, ...): adds a lane's weighted columns of V to its results."""
    decode = make_decode(c.cache, WORD_BITS)
    UNIT, R, EV, K = c.unit, x.rows, x.v_elements, x.shared_keys

    @ti.func
    def add_values(holder: ti.template(), m, l: ti.template(), acc: ti.template(), logits: ti.template(),
                   v_factor: ti.template(), counts: ti.template(), vw: ti.template(),
                   alive: ti.template()):  # fmt: skip
        for o in ti.static(range(x.keys // K)):
            p = ti.select(counts[o] != 0, ti.exp(logits[o * K] - m), ti.f32(0.0))
            l = l + p
            weight = p
            if ti.static(c.scale != ""):
                weight = p * v_factor[o]
            if ti.static(c.masked):
                weight = ti.select(counts[o] != 0, weight, ti.f32(MASKED))
            elif ti.static(c.scale != ""):
                weight = ti.select(counts[o] != 0, weight, ti.f32(0.0))
            for i in ti.static(range(K)):
                u = ti.static(o * K + i)
                weights = [weight for _ in range(R)]
                if ti.static(K > 1):
                    weights[0] = shuffle(weight, holder[i])
                for g in ti.static(range(1, R)):
                    weights[g] = shuffle_xor(weights[0], ti.static(x.row_owner[g]))
                for w in ti.static(range(x.v_rounds)):
                    word = vw[u * x.v_rounds + w]
                    if ti.static(c.gaps and not c.masked):
                        word = ti.select(alive[u] != 0, word, ti.u64(0))
                    values = decode(word)
                    for g in ti.static(range(R)):
                        for e in ti.static(range(UNIT)):
                            y = values[e]
                            if ti.static(c.masked):  # a value that a row does not see may be infinite
                                y = ti.select(is_masked(weights[g]), ti.f32(0.0), y)
                            acc[g * EV + w * UNIT + e] += weights[g] * y

    return add_values


def make_merge_groups(x, parts, c):
    """merge_groups(thread, mine, task, m, l, acc, ...): merges the groups' results in shared memory and stores them."""
    L, R, UNIT, EV, DV, groups = x.lanes, x.rows, c.unit, x.v_elements, c.width_v, x.groups
    store_rows = make_store_rows(x, parts, c)

    @ti.func
    def merge_groups(thread, mine, task, m, l, acc: ti.template(), out: ti.template(), lse: ti.template(), strides,
                     params, scalars):  # fmt: skip
        lane, group = thread % L, thread // L
        sums = ti.simt.block.SharedArray((R * groups * DV,), ti.f32)
        tops = ti.simt.block.SharedArray((R * groups,), ti.f32)
        totals = ti.simt.block.SharedArray((R * groups,), ti.f32)
        ti.simt.block.sync()
        tops[mine * groups + group] = m  # all lanes that own the row write the same value
        ti.simt.block.sync()
        top = m
        for j in range(groups):
            top = ti.max(top, tops[mine * groups + j])
        fade = ti.exp(m - top)  # rescales to the maximum over the groups
        totals[mine * groups + group] = l * fade
        fades = [fade for _ in range(R)]
        for g in ti.static(range(1, R)):
            fades[g] = shuffle_xor(fade, ti.static(x.row_owner[g]))
        for w in ti.static(range(x.v_rounds)):
            word = w * L + lane
            if word < x.v_words:
                for g in ti.static(range(R)):
                    for e in ti.static(range(UNIT)):
                        sums[((g ^ mine) * groups + group) * DV + word * UNIT + e] = (
                            acc[g * EV + w * UNIT + e] * fades[g]
                        )
        ti.simt.block.sync()
        store_rows(thread, task, tops, totals, sums, out, lse, strides, params, scalars)

    return merge_groups


def make_store_rows(x, parts, c):
    """store_rows(thread, task, tops, totals, sums, ...): stores the task's rows of the result, and log-sum-exps."""
    output_offsets, store_lse = make_output_offsets(parts, c), make_store_lse(parts)
    inverse_of_sum = make_inverse(c)
    store = make_store(c.out, 1, SIZE[c.out] * 8, "cuda")
    DV, groups = c.width_v, x.groups
    columns = -(-DV // BLOCK)

    @ti.func
    def store_rows(thread, task, tops: ti.template(), totals: ti.template(), sums: ti.template(), out: ti.template(),
                   lse: ti.template(), strides, params, scalars):  # fmt: skip
        for g in range(ti.min(c.rows, params[P.queries] * c.group - task[T.row])):
            r = task[T.row] + g
            at, lse_at = output_offsets(task[T.kv_head], r, task[T.split], strides, params)
            total = ti.f32(0.0)
            for j in range(groups):
                total = total + totals[g * groups + j]
            inverse = inverse_of_sum(total, scalars)
            for n in range(columns):
                d = n * BLOCK + thread
                if d < DV:
                    y = ti.f32(0.0)
                    for j in range(groups):
                        y = y + sums[(g * groups + j) * DV + d]
                    store(out, at + d, ti.Vector([y * inverse]), ti.f32(1.0))
            if thread == 0:
                high = ti.f32(MASKED)
                for j in range(groups):
                    high = ti.max(high, tops[g * groups + j])
                store_lse(lse, lse_at, high * ti.f32(LOG2E), total, scalars)

    return store_rows
