"""The attention mass of keys on CUDA, with the lanes of `cuda.attend`: K is read once for all query rows of a KV head.

As in attention, a lane has the scores of one row and a few of the keys in flight. The row's log-sum-exp turns them into
weights directly. Then the weights of a key are summed over the lanes that have its other rows.
"""

from tikv.kernels.address import make_word_offset
from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.cuda.attend import LN2, Exchange, make_dots, make_load_queries, make_logits, make_slot_of
from tikv.kernels.attention.mass import make_joined, make_lse_of_row, make_mass_offset
from tikv.kernels.attention.parameters import BITS, FLOATS, PARAMS, SCALARS, STRIDES, P, array_types
from tikv.kernels.attention.softmax import not_above_zero
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.lanes import BLOCK, shuffle_xor
from tikv.runtime import ti


def make_mass_lanes(shape, single, by_slot, greatest, c):
    """mass(q, k, lens, table, k_scale, lse, mass, strides, params, scalars): `mass.make_mass` in words of 64 bits.

    It does not serve chosen tokens. The extent of q is tasks * `BLOCK`. If `single`, a KV head has at most
    `Choices.rows` query rows, which stay in registers; otherwise rows are read again for every few keys.
    """
    Q, K, LENS, TABLE, SC, _ = array_types("cuda", c)
    mass_task = make_mass_task(Exchange(shape, c), single, by_slot, make_joined(greatest), c)

    @ti.kernel
    def mass_of_keys(q: Q, k: K, lens: LENS, table: TABLE, k_scale: SC, lse: BITS, mass: FLOATS, strides: STRIDES,
                     params: PARAMS, scalars: SCALARS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            arrays = ti.static((q, k, lens, table, k_scale, lse, mass))
            mass_task(i % BLOCK, i // BLOCK, arrays, strides, params, scalars)

    return mass_of_keys


make_mass_lanes.fast_math = True
make_mass_lanes.resident = lambda shape, single, by_slot, greatest, c: shape.resident


def make_mass_task(x, single, by_slot, joined, c):
    """mass_task(thread, number, ...): a thread's share of a task; all threads of a block call it."""
    decode_task, load_queries, lse_of_row = make_decode_task("cuda", 1, c), make_load_queries(x, c), make_lse_of_row(c)
    load_keys, weigh = make_load_keys(x, c), make_weigh(x, joined, c)
    store_mass = make_store_mass(x, by_slot, joined, c)
    L, U, R, groups = x.lanes, x.keys, x.rows, x.groups
    own_keys = U // x.shared_keys

    @ti.func
    def mass_task(thread, number, arrays: ti.template(), strides, params, scalars):
        q, k, lens, table, k_scale, lse, mass = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        rows = params[P.queries] * c.group
        lane, group = thread % L, thread // L
        mine = 0  # the row of a block whose scores this lane owns
        for n in ti.static(range(len(x.rows_left))):
            if (lane & ti.static(x.row_distances[n])) != 0:
                mine = mine + ti.static(x.rows_left[n])
        my_key = 0  # of every `shared_keys`
        for n in ti.static(range(len(x.keys_left))):
            if (lane & ti.static(x.key_distances[n])) != 0:
                my_key = my_key + ti.static(x.keys_left[n])
        queries = [ti.f32(0.0) for _ in range(R * x.k_elements)]
        kw = [ti.u64(0) for _ in range(x.k_rounds * U)]
        sees, of_row = 0, ti.f32(0.0)
        if ti.static(single):
            load_queries(lane, mine, task, q, queries, strides, params, scalars)
            if mine < rows:
                sees, of_row = lse_of_row(task[T.kv_head], mine, lse, strides, params, scalars)
        for turn in range((task[T.end] - task[T.begin] + groups * U - 1) // (groups * U)):
            here = task[T.begin] + turn * groups * U + group
            load_keys(here, lane, task, kw, visible, k, table, strides, params)
            totals = [ti.f32(0.0) for _ in range(own_keys)]
            if ti.static(single):
                weigh(here, lane, mine, my_key, sees, of_row, kw, queries, totals, visible, task, table, k_scale,
                      strides, params, scalars)  # fmt: skip
            else:
                for block in range((rows + c.rows - 1) // c.rows):
                    task[T.row] = block * c.rows
                    load_queries(lane, mine, task, q, queries, strides, params, scalars)
                    sees = 0
                    if mine < c.rows and block * c.rows + mine < rows:  # rows are padded to a power of 2
                        sees, of_row = lse_of_row(task[T.kv_head], block * c.rows + mine, lse, strides, params, scalars)
                    weigh(here, lane, mine, my_key, sees, of_row, kw, queries, totals, visible, task, table, k_scale,
                          strides, params, scalars)  # fmt: skip
            store_mass(here, lane, my_key, totals, visible, task, table, mass, strides, params)

    return mass_task


def make_load_keys(x, c):
    """load_keys(first, lane, task, kw, ...): starts to read this lane's words of the next keys."""
    slot_of, (k_offset, _, _), k_word = make_slot_of(x, c), make_slot_offsets(c), make_word_offset(*c.k_inner)
    L = x.lanes

    @ti.func
    def load_keys(first, lane, task, kw: ti.template(), visible, k: ti.template(), table: ti.template(), strides,
                  params):  # fmt: skip
        for u in ti.static(range(x.keys)):
            slot, _, _ = slot_of(first + u * x.groups, task, visible, table, strides, params)
            k_row = task[T.k_first] + k_offset(slot, strides)
            for w in ti.static(range(x.k_rounds)):
                kw[u * x.k_rounds + w] = k[k_row + k_word(ti.min(w * L + lane, x.k_words - 1))]
                if ti.static((w + 1) * L > x.k_words):
                    kw[u * x.k_rounds + w] = ti.select(w * L + lane < x.k_words, kw[u * x.k_rounds + w], ti.u64(0))

    return load_keys


def make_weigh(x, joined, c):
    """weigh(here, lane, mine, ...): joins the weights that this lane's row gives its keys with `totals`."""
    dots, logits = make_dots(x, c), make_logits(x, c)
    K = x.shared_keys
    own_keys = x.keys // K

    @ti.func
    def weigh(here, lane, mine, my_key, sees, of_row, kw: ti.template(), queries: ti.template(), totals: ti.template(),
              visible, task, table: ti.template(), k_scale: ti.template(), strides, params, scalars):  # fmt: skip
        scores = [ti.f32(0.0) for _ in range(x.keys)]
        dots(lane, kw, queries, scores)
        v_factor = [ti.f32(1.0) for _ in range(own_keys)]
        counts = [1 for _ in range(own_keys)]
        query = ti.min(task[T.row] + mine, params[P.queries] * c.group - 1) // c.group
        zero = ti.f32(0.0)
        logits(here, query, my_key, zero, zero, scores, v_factor, counts, visible, task, table, k_scale, k_scale,
               (), strides, params, scalars)  # fmt: skip
        for o in ti.static(range(own_keys)):
            if sees > 0 and counts[o] != 0:
                totals[o] = joined(totals[o], ti.exp(not_above_zero(scores[o * K] - of_row * ti.f32(LN2))))

    return weigh


def make_store_mass(x, by_slot, joined, c):
    """store_mass(here, lane, my_key, totals, ...): joins the keys' weights over all rows; one lane stores each."""
    slot_of, mass_offset = make_slot_of(x, c), make_mass_offset(by_slot, c)
    K = x.shared_keys
    others = sum(x.row_distances) + sum(x.sum_distances)  # the lanes that have the same keys

    @ti.func
    def store_mass(here, lane, my_key, totals: ti.template(), visible, task, table: ti.template(), mass: ti.template(),
                   strides, params):  # fmt: skip
        for o in ti.static(range(x.keys // K)):
            total = totals[o]
            for distance in ti.static(x.row_distances):
                total = joined(total, shuffle_xor(total, distance))
            index = here + (o * K + my_key) * x.groups
            slot, counts, _ = slot_of(index, task, visible, table, strides, params)
            if (lane & ti.static(others)) == 0 and index < task[T.end] and counts != 0:
                at = mass_offset(task[T.sequence], task[T.head], 0, 0, index, slot, visible, strides, params)
                mass[at] = joined(mass[at], total)

    return store_mass
