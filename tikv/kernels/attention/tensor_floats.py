"""Fragments of tensor cores from floats of 8 bits, which become halves exactly, by one instruction for two of them.

The scales of a head, if there are any, are multiplied into what logits lack and into the results. Queries become halves
as in `tensor_codes`, whose pieces these are too.
"""

from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.parameters import S, X
from tikv.kernels.attention.softmax import make_logit
from tikv.kernels.attention.staged import KEYS
from tikv.kernels.attention.task import T
from tikv.kernels.attention.tensor_codes import (
    codes_of,
    make_column_of,
    make_load_halves,
    make_load_keys,
    make_load_values,
    pairs_of,
    pieces,
)
from tikv.kernels.attention.tensor_instructions import Fragments, instructions, lane_bits, make_weigh
from tikv.kernels.codec import WORD, make_bits_to_f32
from tikv.runtime import ti

COUNT = 2  # registers that a word becomes
NEEDS_NATIVE = ("e4m3",)  # whose instruction the native launcher alone can ask for
# By a format's code, what carries the bits of an infinity or a NaN, and no others, into the place of the sign.
CARRY = {"e4m3": 0x01010101, "e5m2": 0x04040404}


def make_fragments(x, c):
    """The `Fragments` of a tile for choices whose K and V are floats of 8 bits."""
    key, value = codes_of(c.cache, c.width), codes_of(c.cache, c.width_v)
    of_k, of_v = pieces(c.cache, c.width, c.width_v)
    return Fragments(
        keys=2 * of_k.count * of_k.words,
        values=4 * of_v.count * of_v.words,
        queries=(2 * (c.width // KEYS) + 2) * x.row_tiles,
        results=4 * (c.width_v // KEYS) * x.row_tiles,
        load_queries=make_load_queries(x, key, of_k, c),
        load_keys=make_load_keys(key, of_k, c),
        load_values=make_load_values(value, of_v, c),
        scores=make_scores(x, of_k, c),
        clear=make_clear(of_v, c),
        add_values=make_add_values(x, of_v, c),
        settle=make_settle(x, c),
        column_of=make_column_of(of_v, c),
        apart=1,
    )


def make_scale_of_head(first, c):
    """scale_of_head(scales, task, strides): by what all numbers of K, or of V, of a KV head are multiplied."""
    to_f32 = make_bits_to_f32(c.scale or "f32")

    @ti.func
    def scale_of_head(scales: ti.template(), task, strides):
        found = ti.f32(1.0)
        if ti.static(c.scale != ""):
            found = to_f32(ti.cast(scales[strides[first] + task[T.scale_first]], ti.u32))
        return found

    return scale_of_head


def make_load_queries(x, codes, piece, c):
    """load_queries(row, lane, start, task, q, k_scale, qf, ...): a lane's fragments of Q^T, in the order of K's codes.

    Behind them comes, of two rows of each tile, what logits lack for the power of two of `make_load_halves`, and for
    the scale of K.
    """
    load_halves = make_load_halves(x, piece, pairs_of(codes), [1.0], c)
    scale_of_head = make_scale_of_head(S.k_scale_first, c)
    POWERS = 2 * (c.width // KEYS) * x.row_tiles

    @ti.func
    def load_queries(row, lane, start, task, q: ti.template(), k_scale: ti.template(), qf: ti.template(), strides,
                     params):  # fmt: skip
        scale = scale_of_head(k_scale, task, strides)
        for g in ti.static(range(x.row_tiles)):
            exponent = load_halves(g, row, lane, start, task, q, qf, strides, params)
            for e in ti.static(range(2)):
                lacking = lane_bits(exponent, (lane & 3) * 8 + e * 4) - ti.u32(15)
                factor = ti.bit_cast(lacking << ti.u32(23), ti.f32) * scale
                qf[ti.static(POWERS + 2 * g + e)] = ti.bit_cast(factor, ti.u32)

    return load_queries


def make_scores(x, piece, c):
    """scores(kf, qf, p, scalars): base-2 logits of the lane's two keys, for two rows of each tile of rows."""
    ext, logit_of = instructions(), make_logit(c)
    multiply, to_halves = ext.multiply_f16, getattr(ext, f"halves_{c.cache}")
    WORDS, NK, G = piece.count * piece.words, c.width // KEYS, x.row_tiles
    POWERS = 2 * NK * G

    @ti.func
    def scores(kf: ti.template(), qf: ti.template(), p: ti.template(), scalars):
        s = [ti.f32(0.0) for _ in range(8 * G)]  # two sums, so that no product waits for the one before
        for w in ti.static(range(WORDS)):
            near = [ti.u32(0) for _ in range(COUNT)]
            far = [ti.u32(0) for _ in range(COUNT)]
            to_halves(near[0], near[1], kf[w])
            to_halves(far[0], far[1], kf[ti.static(WORDS + w)])
            for g in ti.static(range(G)):
                o, b = ti.static(8 * g + w % 2 * 4, 2 * NK * g + 2 * w)
                multiply(s[o], s[ti.static(o + 1)], s[ti.static(o + 2)], s[ti.static(o + 3)], near[0], far[0], near[1],
                         far[1], qf[b], qf[ti.static(b + 1)])  # fmt: skip
        for i in ti.static(range(4 * G)):
            o = ti.static(i // 4 * 8 + i % 4)
            lacking = ti.bit_cast(qf[ti.static(POWERS + i // 4 * 2 + i % 2)], ti.f32)
            p[i] = logit_of((s[o] + s[ti.static(o + 4)]) * lacking, scalars[X.logit_scale], scalars[X.softcap])

    return scores


def make_clear(piece, c):
    """clear(counts, vf) -> not 0 if rows may miss something: `tensor_instructions.make_clear`, of floats of 8 bits."""
    WORDS = piece.count * piece.words

    @ti.func
    def clear(counts: ti.template(), vf: ti.template()):
        found = ti.u32(0)
        for i in ti.static(range(4)):
            for n in ti.static(range(i * WORDS, (i + 1) * WORDS)):
                if ti.static(c.masked):
                    infinite = ((vf[n] & ti.u32(0x7F7F7F7F)) + ti.u32(CARRY[c.cache])) & ti.u32(0x80808080)
                    found = found | infinite
                    vf[n] = vf[n] & ~((infinite >> ti.u32(7)) * ti.u32(0xFF))
                else:
                    vf[n] = ti.select(counts[ti.static(i + 2)] != 0, vf[n], ti.u32(0))
        return ti.select(found != ti.u32(0), 1, 0)

    return clear


def make_add_values(x, piece, c):
    """add_values(lane, p, vf, acc, sums): V, weighted, is added to the results, and the weights to `sums`."""
    ext, weigh = instructions(), make_weigh(x, "f16")
    multiply, to_halves = ext.multiply_f16, getattr(ext, f"halves_{c.cache}")
    WORDS, NV, G = piece.count * piece.words, c.width_v // KEYS, x.row_tiles

    @ti.func
    def add_values(lane, p: ti.template(), vf: ti.template(), acc: ti.template(), sums: ti.template()):
        b = [ti.u32(0) for _ in range(2 * G)]
        weigh(lane, p, b, sums)
        for w in ti.static(range(WORDS)):
            # Of the word's four columns, each in two rows of V; of the first two rows, then of the others.
            found = [ti.u32(0) for _ in range(8)]
            for i in ti.static(range(2)):
                first = ti.static(2 * i * WORDS + w)
                low, high = ti.u32(0), ti.u32(0)
                ext.low_bytes(low, vf[first], vf[ti.static(first + WORDS)])
                ext.high_bytes(high, vf[first], vf[ti.static(first + WORDS)])
                to_halves(found[ti.static(4 * i)], found[ti.static(4 * i + 1)], low)
                to_halves(found[ti.static(4 * i + 2)], found[ti.static(4 * i + 3)], high)
            for t in ti.static(range(2)):
                for g in ti.static(range(G)):
                    a = ti.static((g * NV + 2 * w + t) * 4)
                    multiply(acc[a], acc[ti.static(a + 1)], acc[ti.static(a + 2)], acc[ti.static(a + 3)],
                             found[ti.static(2 * t)], found[ti.static(2 * t + 1)], found[ti.static(4 + 2 * t)],
                             found[ti.static(5 + 2 * t)], b[ti.static(2 * g)], b[ti.static(2 * g + 1)])  # fmt: skip

    return add_values


def make_settle(x, c):
    """settle(acc, task, v_scale, strides): the results times the scale of V."""
    scale_of_head, COUNT = make_scale_of_head(S.v_scale_first, c), 4 * (c.width_v // KEYS) * x.row_tiles

    @ti.func
    def settle(acc: ti.template(), task, v_scale: ti.template(), strides):
        if ti.static(c.scale != ""):
            scale = scale_of_head(v_scale, task, strides)
            for i in ti.static(range(COUNT)):
                acc[i] *= scale

    return settle


def make_value_at(c):
    """value_at(slot, column, task, v, v_scale, strides): a number of V."""
    scale_of_head, to_f32 = make_scale_of_head(S.v_scale_first, c), make_bits_to_f32(c.cache)
    _, v_offset, _ = make_slot_offsets(c)

    @ti.func
    def value_at(slot, column, task, v: ti.template(), v_scale: ti.template(), strides):
        word = v[task[T.v_first] + v_offset(slot, strides) + column * 8 // c.bits]
        code = ti.cast(word >> ti.cast(column * 8 % c.bits, WORD[c.bits]), ti.u32) & ti.u32(0xFF)
        return to_f32(code) * scale_of_head(v_scale, task, strides)

    return value_at
