"""Fragments of tensor cores from float16 and bfloat16: a lane takes whole words of K, of V and of the queries."""

from tikv.kernels.attention.addresses import make_query_row, make_slot_offsets
from tikv.kernels.attention.parameters import P, X
from tikv.kernels.attention.sm80.instructions import INFINITE, ROWS, Fragments, instructions, make_clear, make_weigh
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.softmax import make_logit
from tikv.kernels.attention.task import T
from tikv.kernels.codec import make_bits_to_f32
from tikv.runtime import ti

WORD_BITS = 64


def make_fragments(x, c):
    """The `Fragments` of a tile for choices whose K, V and queries are of one of `sm80.instructions.HALVES`."""
    NK, NV = c.width // KEYS, c.width_v // KEYS
    return Fragments(
        keys=4 * NK,
        values=4 * NV,
        queries=2 * NK * x.row_tiles,
        results=4 * NV * x.row_tiles,
        load_queries=make_load_queries(x, c),
        load_keys=make_load_keys(c),
        load_values=make_load_values(c),
        scores=make_scores(x, c),
        clear=make_clear(0, NV, INFINITE[c.cache], c),
        add_values=make_add_values(x, c),
        settle=settle,
        column_of=make_column_of(c),
        apart=1,
    )


@ti.func
def settle(acc: ti.template(), task, v_scale: ti.template(), strides, scalars):
    """Nothing: results are kept as they are."""


def make_load_queries(x, c):
    """load_queries(row, lane, start, task, q, ..., qf, ...): a lane's fragments of Q^T, from column `start` on.

    They are two for each tile and 16 columns, which are those of `load_keys`.
    """
    query_row = make_query_row(c)
    NK = c.width // KEYS
    pairs = NK // 2 * 2

    @ti.func
    def load_queries(row, lane, start, task, q: ti.template(), k_scale: ti.template(), qf: ti.template(), strides,
                     params):  # fmt: skip
        for g in ti.static(range(x.row_tiles)):
            r = ti.min(row + g * ROWS + (lane >> 2), params[P.queries] * c.group - 1)
            first = query_row(task[T.sequence], task[T.head], r, strides, params) + start
            for n in ti.static(range(2 * NK)):
                at = first + (lane & 3) * 8 + ti.static(n // 4 * 32 + n % 4 * 2)
                if ti.static(n // 2 >= pairs):
                    at = first + (lane & 3) * 4 + ti.static(n // 4 * 32 + n % 4 * 2)
                low, high = ti.cast(q[at], ti.u32), ti.cast(q[at + 1], ti.u32)
                qf[ti.static(g * 2 * NK) + n] = low | (high << ti.u32(16))

    return load_queries


def make_load_keys(c):
    """load_keys(lane, slots, task, k, ..., kf, strides): start to read a lane's words of a tile's keys.

    They are two side by side of every eight, or one of the last four.
    """
    k_offset, _, _ = make_slot_offsets(c)
    NK = c.width // KEYS
    pairs = NK // 2 * 2  # words that have a neighbour

    @ti.func
    def load_keys(lane, slots: ti.template(), task, k: ti.template(), k_scale: ti.template(), kf: ti.template(),
                  strides):  # fmt: skip
        for i in ti.static(range(2)):
            row = task[T.k_first] + k_offset(slots[i], strides)
            first = row + (lane & 3) * 2
            for n in ti.static(range(NK)):
                at = first + ti.static(n // 2 * 8 + n % 2)
                if ti.static(n >= pairs):
                    at = row + (lane & 3) + ti.static(n // 2 * 8)
                word = k[at]
                kf[ti.static(2 * NK * i + 2 * n)] = ti.cast(word, ti.u32)
                kf[ti.static(2 * NK * i + 2 * n + 1)] = ti.cast(word >> ti.u64(32), ti.u32)

    return load_keys


def make_load_values(c):
    """load_values(lane, slots, task, v, ..., vf, strides): the same of its values.

    They are two side by side of every 16, or one of the last 8; of the last 4, if columns are a multiple of 16 alone,
    half a word.
    """
    _, v_offset, _ = make_slot_offsets(c)
    NV = c.width_v // KEYS
    pairs = NV // 4 * 2  # words that have a neighbour

    @ti.func
    def load_values(lane, slots: ti.template(), task, v: ti.template(), v_scale: ti.template(), vf: ti.template(),
                    strides):  # fmt: skip
        for i in ti.static(range(4)):
            row = task[T.v_first] + v_offset(slots[i], strides)
            first = row + (lane >> 2) * 2
            for n in ti.static(range(NV // 2)):
                at = first + ti.static(n // 2 * 16 + n % 2)
                if ti.static(n >= pairs):
                    at = row + (lane >> 2) + ti.static(n // 2 * 16)
                word = v[at]
                vf[ti.static(NV * i + 2 * n)] = ti.cast(word, ti.u32)
                vf[ti.static(NV * i + 2 * n + 1)] = ti.cast(word >> ti.u64(32), ti.u32)
            if ti.static(NV % 2 == 1):
                word = v[row + ti.static(NV // 2 * 8) + (lane >> 3)]
                vf[ti.static(NV * i + NV - 1)] = ti.cast(word >> ti.cast((lane >> 2 & 1) * 32, ti.u64), ti.u32)

    return load_values


def make_value_at(c):
    """value_at(slot, column, task, v, ..., strides): a number of V."""
    _, v_offset, _ = make_slot_offsets(c)
    to_f32 = make_bits_to_f32(c.cache)

    @ti.func
    def value_at(slot, column, task, v: ti.template(), v_scale: ti.template(), strides):
        word = v[task[T.v_first] + v_offset(slot, strides) + (column >> 2)]
        return to_f32(ti.cast(word >> ti.cast((column & 3) * 16, ti.u64), ti.u32) & ti.u32(0xFFFF))

    return value_at


def make_products(x, c):
    """products(kf, qf, p): what the lane's two keys and two rows of each tile of rows multiply to."""
    multiply = getattr(instructions(), f"multiply_{c.cache}")
    NK = c.width // KEYS

    @ti.func
    def products(kf: ti.template(), qf: ti.template(), p: ti.template()):
        for g in ti.static(range(x.row_tiles)):
            s = [ti.f32(0.0) for _ in range(8)]  # two sums, so that no product waits for the one before
            for n in ti.static(range(NK)):
                o, a, b = ti.static(n % 2 * 4, 2 * n, 2 * NK * g + 2 * n)
                multiply(s[o], s[ti.static(o + 1)], s[ti.static(o + 2)], s[ti.static(o + 3)], kf[a],
                         kf[ti.static(2 * NK + a)], kf[ti.static(a + 1)], kf[ti.static(2 * NK + a + 1)], qf[b],
                         qf[ti.static(b + 1)])  # fmt: skip
            for i in ti.static(range(4)):
                p[ti.static(4 * g + i)] = s[i] + s[ti.static(i + 4)]

    return products


def make_scores(x, c):
    """scores(kf, qf, p, scalars): base-2 logits of the lane's two keys, for two rows of each tile of rows."""
    products, logit_of = make_products(x, c), make_logit(c)

    @ti.func
    def scores(kf: ti.template(), qf: ti.template(), p: ti.template(), scalars):
        products(kf, qf, p)
        for i in ti.static(range(4 * x.row_tiles)):
            p[i] = logit_of(p[i], scalars[X.logit_scale], scalars[X.softcap])

    return scores


def make_add_values(x, c):
    """add_values(lane, p, vf, acc, sums): V, weighted, is added to the results, and the weights to `sums`."""
    multiply_rows, weigh = getattr(instructions(), f"multiply_rows_{c.cache}"), make_weigh(x, c.cache)
    NV = c.width_v // KEYS

    @ti.func
    def add_values(lane, p: ti.template(), vf: ti.template(), acc: ti.template(), sums: ti.template()):
        b = [ti.u32(0) for _ in range(2 * x.row_tiles)]
        weigh(lane, p, b, sums)
        for g in ti.static(range(x.row_tiles)):
            for t in ti.static(range(NV)):
                a = ti.static((g * NV + t) * 4)
                multiply_rows(acc[a], acc[ti.static(a + 1)], acc[ti.static(a + 2)], acc[ti.static(a + 3)], vf[t],
                              vf[ti.static(NV + t)], vf[ti.static(2 * NV + t)], vf[ti.static(3 * NV + t)],
                              b[ti.static(2 * g)], b[ti.static(2 * g + 1)])  # fmt: skip

    return add_values


def make_column_of(c):
    """column_of(t, lane) -> the first of the two columns of the result that a lane has in fragment t of O^T."""
    NV = c.width_v // KEYS
    pairs = NV // 4 * 2  # as in `make_load_values`

    @ti.func
    def column_of(t: ti.template(), lane):
        n = ti.static(t // 2)
        column = ti.static(n // 2 * 64 + n % 2 * 4 + t % 2 * 2) + (lane >> 2) * 8
        if ti.static(n >= pairs):
            column = ti.static(n // 2 * 64 + t % 2 * 2) + (lane >> 2) * 4
        if ti.static(t == NV - 1 and NV % 2 == 1):
            column = ti.static(n * 32) + (lane >> 2) * 2
        return column

    return column_of
