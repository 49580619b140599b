"""Fragments for tensor cores from codes that are floats of 8 or 4 bits.

Every code becomes a half exactly, by its bits alone. Scales of a whole head are multiplied into what logits lack and
into the results. Groups have two kinds of scales:

- those of nvfp4 are floats of 8 bits. A code times its scale is exact in half precision, for K and for V.
- those of mxfp8 and mxfp4 are powers of two, beyond the range of halves. For K they multiply the sums of a group, in
  float32. For V, every code is exact in half precision if its scale lies in the format's `Window`. If some scales of a
  tile lie outside, the tile is added in several passes, each with a window of its own: see `make_add_apart`.

Queries become halves as in `sm80.coded`, and lanes read the same pieces.
"""

import math
from typing import NamedTuple

from tikv.formats import OF_CODE
from tikv.kernels.attention.addresses import make_slot_offsets
from tikv.kernels.attention.parameters import NAN, S, X
from tikv.kernels.attention.sm80.coded import (
    Codes,
    Pieces,
    codes_of,
    make_column_of,
    make_load_halves,
    make_load_keys,
    make_load_values,
    pieces_of,
)
from tikv.kernels.attention.sm80.instructions import Fragments, instructions, lane_bits, make_add_product, make_weigh
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.softmax import make_logit
from tikv.kernels.attention.task import T
from tikv.kernels.codec import WORD, make_bits_to_f32, scale_array, word_array
from tikv.kernels.groups import make_code_to_f32
from tikv.kernels.lanes import ALL, make_row_max
from tikv.runtime import ti

# For the code of a cache: which floats its codes are, and which floats the scales of its groups are.
KINDS = {
    "e4m3": ("e4m3", ""),
    "e5m2": ("e5m2", ""),
    "mxfp8": ("e4m3", "e8m0"),
    "mxfp4": ("e2m1", "e8m0"),
    "nvfp4": ("e2m1", "e4m3"),
}
NEEDS_NATIVE = ("e4m3", "mxfp8", "nvfp4")  # their instruction exists only in the native launcher's text
# Added to a byte without its sign, it carries into the place of the sign if the byte is an infinity or a NaN.
CARRY = {"e4m3": 0x01010101, "e5m2": 0x04040404}
SIGNS = 0x80808080
FEWER = {"e4m3": 0, "e5m2": 0, "e2m1": 14}  # a code's half is 2 ** -FEWER times its number


class Window(NamedTuple):
    """The scales of V, as bytes, with which all codes are exact: from `origin + low` to `origin + high`.

    The scale `origin + n` becomes the half 2 ** (n - 15).
    """

    origin: int
    low: int
    high: int


WINDOWS = {"mxfp8": Window(106, 1, 22), "mxfp4": Window(105, 6, 30)}


class Layout(NamedTuple):
    """Which floats the codes of K and V are, and how they lie."""

    number: str  # as in `KINDS`
    scale: str
    key: Codes
    value: Codes
    of_k: Pieces
    of_v: Pieces

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The two codes of a word in each of the registers that it becomes."""
        return [(0, 1), (2, 3)] if self.key.bits == 8 else [(0, 2), (4, 6), (1, 3), (5, 7)]

    @property
    def by_sums(self) -> bool:
        """Whether the scales of K multiply the sums of its groups."""
        return self.scale == "e8m0"


def layout_of(cache: str, width: int, width_v: int) -> Layout:
    """The `Layout` of a cache."""
    number, scale = KINDS[cache]
    key, value = codes_of(cache, width), codes_of(cache, width_v)
    most = key.group if scale == "e8m0" else width  # columns of K whose four lanes share a scale
    return Layout(number, scale, key, value, pieces_of(key, width, 4, most), pieces_of(value, width_v, 8, width_v))


def word_bits(cache: str, width: int, width_v: int) -> tuple[int, int]:
    """Bits of the words in which K and V are read; 0 if a lane's piece is not a whole word of 32 bits."""
    layout = layout_of(cache, width, width_v)
    return layout.of_k.bits, layout.of_v.bits


def scales_per_word(cache: str, width: int, width_v: int) -> int:
    """How many scales of a row of K a lane reads at once: up to four of all, or its own if they scale halves."""
    layout = layout_of(cache, width, width_v)
    if layout.scale == "":
        return 1
    groups = width // layout.key.group
    return math.gcd(groups, 4) if layout.by_sums else groups // 4


def numbers_arrays(c):
    """The types of the arrays of K's scales and V's."""
    if KINDS[c.cache][1] == "":
        return scale_array(c.scale), scale_array(c.scale)
    return word_array(8 * scales_per_word(c.cache, c.width, c.width_v)), word_array(8)


def make_fragments(x, c):
    """The `Fragments` of a tile for choices whose K and V are codes of `KINDS`."""
    layout = layout_of(c.cache, c.width, c.width_v)
    of_k, of_v = layout.of_k, layout.of_v
    return Fragments(
        keys=2 * (of_k.count * of_k.words + words_of_scales(layout, c)),
        values=4 * of_v.count * (of_v.words + (layout.scale != "")),
        queries=(2 * (c.width // KEYS) + 2) * x.row_tiles,
        results=4 * (c.width_v // KEYS) * x.row_tiles,
        load_queries=make_load_queries(x, layout, c),
        load_keys=make_load_scaled_keys(layout, c),
        load_values=make_load_values(layout.value._replace(numbers=int(layout.scale != "")), of_v, c),
        scores=make_scores(x, layout, c),
        clear=make_clear(layout, c),
        add_values=make_add_values(x, layout, c),
        settle=make_settle(x, layout, c),
        column_of=make_column_of(of_v, c),
        apart=1,
    )


def words_of_scales(layout, c):
    """How many registers hold the scales of a key."""
    if not layout.by_sums:
        return int(layout.scale != "")
    return c.width // layout.key.group // scales_per_word(c.cache, c.width, c.width_v)


def make_scale_of_head(first, c):
    """scale_of_head(scales, task, strides): the scale of a KV head, of K or of V; without one, 1."""
    by_head = c.scale != "" and KINDS[c.cache][1] == ""
    to_f32 = make_bits_to_f32(c.scale if by_head else "f32")

    @ti.func
    def scale_of_head(scales: ti.template(), task, strides):
        scale = ti.f32(1.0)
        if ti.static(by_head):
            scale = to_f32(ti.cast(scales[strides[first] + task[T.scale_first]], ti.u32))
        return scale

    return scale_of_head


def make_load_queries(x, layout, c):
    """load_queries(row, lane, start, task, q, k_scale, qf, ...): a lane's fragments of Q^T, in the order of K's codes.

    They are followed by the factor that the logits of two rows of each tile lack: it undoes the power of two of
    `make_load_halves` and `FEWER`, and includes the scale of K.
    """
    load_halves = make_load_halves(x, layout.of_k, layout.pairs, [1.0], c)
    scale_of_head = make_scale_of_head(S.k_scale_first, c)
    POWERS = 2 * (c.width // KEYS) * x.row_tiles

    @ti.func
    def load_queries(row, lane, start, task, q: ti.template(), k_scale: ti.template(), qf: ti.template(), strides,
                     params):  # fmt: skip
        scale = scale_of_head(k_scale, task, strides) * ti.f32(2.0 ** FEWER[layout.number])
        for g in ti.static(range(x.row_tiles)):
            exponent = load_halves(g, row, lane, start, task, q, qf, strides, params)
            for e in ti.static(range(2)):
                lacking = lane_bits(exponent, (lane & 3) * 8 + e * 4) - ti.u32(15)
                factor = ti.bit_cast(lacking << ti.u32(23), ti.f32) * scale
                qf[ti.static(POWERS + 2 * g + e)] = ti.bit_cast(factor, ti.u32)

    return load_queries


def make_load_scaled_keys(layout, c):
    """load_keys(lane, slots, task, k, k_scale, kf, strides): start to read a lane's pieces of two keys, then scales."""
    load_words = make_load_keys(layout.key._replace(numbers=0), layout.of_k, c)
    _, _, scale_offset = make_slot_offsets(c)
    FIRST, COUNT = 2 * layout.of_k.count * layout.of_k.words, words_of_scales(layout, c)
    shift = scales_per_word(c.cache, c.width, c.width_v).bit_length() - 1

    @ti.func
    def load_keys(lane, slots: ti.template(), task, k: ti.template(), k_scale: ti.template(), kf: ti.template(),
                  strides):  # fmt: skip
        load_words(lane, slots, task, k, k_scale, kf, strides)
        for i in ti.static(range(2 * (COUNT > 0))):
            at = (strides[S.k_scale_first] + task[T.scale_first] + scale_offset(slots[i], strides)) >> shift
            if ti.static(not layout.by_sums):
                at = at + (lane & 3)
            for j in ti.static(range(COUNT)):
                kf[ti.static(FIRST + i * COUNT + j)] = ti.cast(k_scale[at + j], ti.u32)

    return load_keys


def make_to_halves(number):
    """to_halves(word, halves): the codes of a word as halves, 2 ** -FEWER times their numbers, in pairs."""
    ext = instructions()
    convert = getattr(ext, f"halves_{number}")

    @ti.func
    def to_halves(word, halves: ti.template()):
        if ti.static(number == "e2m1"):
            convert(halves[0], halves[1], halves[2], halves[3], word)
        else:
            convert(halves[0], halves[1], word)

    return to_halves


def make_scores(x, layout, c):
    """scores(kf, qf, p, scalars): base-2 logits of the lane's two keys, for two rows of each tile of rows.

    Sums of a group times a scale from 2 ** 98 on may leave float32's range, although the logit does not.
    """
    ext, logit_of, to_halves = instructions(), make_logit(c), make_to_halves(layout.number)
    WORDS, NK, G, COUNT = layout.of_k.count * layout.of_k.words, c.width // KEYS, x.row_tiles, len(layout.pairs)
    POWERS = 2 * NK * G
    GROUPS = c.width // layout.key.group if layout.by_sums else 1
    IN_GROUP, SCALES, SUMS = WORDS // GROUPS, words_of_scales(layout, c), 1 if layout.by_sums else 2
    EACH = 32 // layout.key.bits
    scale_of, add_product = make_scale_of_sums(layout, c), make_add_product(c)

    @ti.func
    def products(j: ti.template(), kf: ti.template(), qf: ti.template(), s: ti.template()):
        """The sums over group j; two of each if there is one group, so that no product waits for the one before."""
        for w in ti.static(range(j * IN_GROUP, (j + 1) * IN_GROUP)):
            near = [ti.u32(0) for _ in range(COUNT)]
            far = [ti.u32(0) for _ in range(COUNT)]
            to_halves(kf[w], near)
            to_halves(kf[ti.static(WORDS + w)], far)
            if ti.static(layout.scale == "e4m3"):
                scale_halves_of(kf, w, near, far)
            for n in ti.static(range(COUNT // 2)):
                for g in ti.static(range(G)):
                    o, b = ti.static(4 * ((w * COUNT // 2 + n) % SUMS * G + g), 2 * NK * g + w * COUNT + 2 * n)
                    ext.multiply_f16(s[o], s[ti.static(o + 1)], s[ti.static(o + 2)], s[ti.static(o + 3)],
                                     near[ti.static(2 * n)], far[ti.static(2 * n)], near[ti.static(2 * n + 1)],
                                     far[ti.static(2 * n + 1)], qf[b], qf[ti.static(b + 1)])  # fmt: skip

    @ti.func
    def scale_halves_of(kf: ti.template(), w: ti.template(), near: ti.template(), far: ti.template()):
        nothing = ti.u32(0x80008000)  # -0
        byte = ti.static(w * EACH // layout.key.group)
        scale = [ti.u32(0) for _ in range(4)]
        for i in ti.static(range(2)):
            both = (kf[ti.static(2 * WORDS + i)] >> ti.u32(ti.static(8 * byte)) & ti.u32(0xFF)) * ti.u32(0x0101)
            ext.halves_e4m3(scale[ti.static(2 * i)], scale[ti.static(2 * i + 1)], both)
        for n in ti.static(range(COUNT)):
            ext.scale_halves(near[n], near[n], scale[0], nothing)
            ext.scale_halves(far[n], far[n], scale[2], nothing)

    @ti.func
    def scores(kf: ti.template(), qf: ti.template(), p: ti.template(), scalars):
        for j in ti.static(range(GROUPS)):
            s = [ti.f32(0.0) for _ in range(4 * G * SUMS)]
            products(j, kf, qf, s)
            for i in ti.static(range(4 * G)):
                if ti.static(layout.by_sums):
                    add_product(p, i, s[i], scale_of(kf, ti.static(i % 4 // 2), j))
                else:
                    p[i] = s[i] + s[ti.static(4 * G + i)]
        for i in ti.static(range(4 * G)):
            lacking = ti.bit_cast(qf[ti.static(POWERS + i // 4 * 2 + i % 2)], ti.f32)
            p[i] = logit_of(p[i] * lacking, scalars[X.logit_scale], scalars[X.softcap])
        if ti.static(layout.by_sums):
            for i in ti.static(range(2)):
                nan = ti.u32(0)
                for n in ti.static(range(SCALES)):
                    word = kf[ti.static(2 * WORDS + i * SCALES + n)]
                    nan = nan | (((word & ~ti.u32(SIGNS)) + ti.u32(CARRY["e4m3"])) & word & ti.u32(SIGNS))
                for g in ti.static(range(G)):
                    for e in ti.static(range(2)):
                        n = ti.static(4 * g + 2 * i + e)
                        p[n] = ti.select(nan != ti.u32(0), ti.bit_cast(ti.u32(NAN), ti.f32), p[n])

    return scores


def make_scale_of_sums(layout, c):
    """scale_of_sums(kf, i, j): the scale of group j of a lane's key i, a power of two; infinite for NaN."""
    WORDS, SCALES = layout.of_k.count * layout.of_k.words, words_of_scales(layout, c)
    EACH = scales_per_word(c.cache, c.width, c.width_v)

    @ti.func
    def scale_of_sums(kf: ti.template(), i: ti.template(), j: ti.template()):
        word = kf[ti.static(2 * WORDS + i * SCALES + j // EACH)]
        byte = ti.static(j % EACH)
        if ti.static(byte < 3):
            word = word << ti.u32(ti.static(23 - 8 * byte))
        else:
            word = word >> ti.u32(1)
        return ti.bit_cast(word & ti.u32(0x7F800000), ti.f32)

    return scale_of_sums


def make_clear(layout, c):
    """clear(counts, vf) -> not 0 if rows may miss something: `sm80.instructions.make_clear`, of these codes."""
    WORDS, PIECES = layout.of_v.count * layout.of_v.words, layout.of_v.count * (layout.scale != "")
    ROW_OF = [n // WORDS for n in range(4 * WORDS)] + [n // max(1, PIECES) for n in range(4 * PIECES)]
    CODES = 4 * WORDS if layout.number in CARRY else 0  # registers of codes that may be infinite or NaN
    NANS = 0x7F if layout.scale == "e4m3" else 0xFF  # the bits of a scale that is NaN

    @ti.func
    def clear(counts: ti.template(), vf: ti.template()):
        missing = ti.u32(0)
        if ti.static(c.masked):
            for n in ti.static(range(CODES)):
                infinite = ((vf[n] & ~ti.u32(SIGNS)) + ti.u32(CARRY[layout.number])) & ti.u32(SIGNS)
                vf[n] = vf[n] & ~((infinite >> ti.u32(7)) * ti.u32(0xFF))
                missing = missing | infinite
            for n in ti.static(range(4 * WORDS, len(ROW_OF))):
                infinite = (vf[n] & ti.u32(NANS)) == ti.u32(NANS)
                vf[n] = ti.select(infinite, ti.u32(0), vf[n])
                missing = ti.select(infinite, ti.u32(1), missing)
        else:
            for n in ti.static(range(len(ROW_OF))):
                vf[n] = ti.select(counts[ti.static(ROW_OF[n] + 2)] != 0, vf[n], ti.u32(0))
        return ti.select(missing != ti.u32(0), 1, 0)

    return clear


def make_values_of_word(layout):
    """values_of_word(vf, w, scale, y): the columns of word w in two rows of V, side by side, then in two other rows."""
    ext, to_halves = instructions(), make_to_halves(layout.number)
    WORDS, EACH, COUNT = layout.of_v.count * layout.of_v.words, 32 // layout.value.bits, len(layout.pairs)
    # The column of each register that a mixed word becomes; its bytes belong to the two rows in turn.
    PLACES = [0, 1] if COUNT == 2 else [0, 2, 1, 3]

    @ti.func
    def values_of_word(vf: ti.template(), w: ti.template(), scale: ti.template(), y: ti.template()):
        nothing = ti.u32(0x80008000)  # -0
        for i in ti.static(range(2)):
            first = ti.static(2 * i * WORDS + w)
            mixed = [ti.u32(0) for _ in range(2)]
            ext.low_bytes(mixed[0], vf[first], vf[ti.static(first + WORDS)])
            ext.high_bytes(mixed[1], vf[first], vf[ti.static(first + WORDS)])
            for h in ti.static(range(2)):
                part = [ti.u32(0) for _ in range(COUNT)]
                to_halves(mixed[h], part)
                for e in ti.static(range(COUNT)):
                    to = ti.static(i * EACH + h * COUNT + PLACES[e])
                    if ti.static(layout.scale != ""):
                        ext.scale_halves(y[to], part[e], scale[i], nothing)
                    else:
                        y[to] = part[e]

    return values_of_word


def make_add_values(x, layout, c):
    """add_values(lane, p, vf, acc, sums): V, weighted, is added to the results, and the weights to `sums`."""
    ext, weigh, values_of_word = instructions(), make_weigh(x, "f16"), make_values_of_word(layout)
    piece, NV, G = layout.of_v, c.width_v // KEYS, x.row_tiles
    WORDS, EACH = piece.count * piece.words, 32 // layout.value.bits
    window = WINDOWS.get(c.cache, Window(0, 0, 0))
    add_apart = make_add_apart(x, layout, values_of_word, c) if layout.by_sums else None

    @ti.func
    def scales_of_piece(vf: ti.template(), n: ti.template(), scale: ti.template()):
        """The scales of a piece as halves, for two rows of V, then for two others."""
        for i in ti.static(range(2 * (layout.scale != ""))):
            first = ti.static(4 * WORDS + 2 * i * piece.count + n)
            near, far = vf[first], vf[ti.static(first + piece.count)]
            if ti.static(layout.scale == "e4m3"):
                both, unused = near | (far << ti.u32(8)), ti.u32(0)
                ext.halves_e4m3(scale[i], unused, both)
            else:
                both = near | (far << ti.u32(16))
                scale[i] = (both - ti.u32(window.origin * 0x10001)) << ti.u32(10)

    @ti.func
    def add_in_window(vf: ti.template(), b: ti.template(), acc: ti.template()):
        for n in ti.static(range(piece.count)):
            scale = [ti.u32(0) for _ in range(2)]
            scales_of_piece(vf, n, scale)
            for w in ti.static(range(n * piece.words, (n + 1) * piece.words)):
                y = [ti.u32(0) for _ in range(2 * EACH)]
                values_of_word(vf, w, scale, y)
                for t in ti.static(range(EACH // 2)):
                    for g in ti.static(range(G)):
                        a = ti.static((g * NV + w * EACH // 2 + t) * 4)
                        ext.multiply_f16(acc[a], acc[ti.static(a + 1)], acc[ti.static(a + 2)], acc[ti.static(a + 3)],
                                         y[ti.static(2 * t)], y[ti.static(2 * t + 1)], y[ti.static(EACH + 2 * t)],
                                         y[ti.static(EACH + 2 * t + 1)], b[ti.static(2 * g)],
                                         b[ti.static(2 * g + 1)])  # fmt: skip

    @ti.func
    def is_outside(vf: ti.template()):
        """Nonzero if one of a lane's scales lies outside the window."""
        outside = ti.u32(0)
        for n in ti.static(range(piece.count)):
            for i in ti.static(range(2)):
                first = ti.static(4 * WORDS + 2 * i * piece.count + n)
                both = vf[first] | (vf[ti.static(first + piece.count)] << ti.u32(16))
                low, high = ti.static(window.origin + window.low, window.origin + window.high)
                outside = outside | (both - ti.u32(low * 0x10001)) | (ti.u32(high * 0x10001) - both)
        return ti.cast((outside >> ti.u32(15)) & ti.u32(0x10001), ti.i32)

    @ti.func
    def add_values(lane, p: ti.template(), vf: ti.template(), acc: ti.template(), sums: ti.template()):
        b = [ti.u32(0) for _ in range(2 * G)]
        weigh(lane, p, b, sums)
        added = 0
        if ti.static(layout.by_sums):
            if ti.simt.warp.any_nonzero(ti.u32(ALL), is_outside(vf)) != 0:
                add_apart(lane, vf, b, acc)
                if ti.static(not c.invariant):
                    added = 1
        if added == 0:
            add_in_window(vf, b, acc)

    return add_values


def make_add_apart(x, layout, values_of_word, c):
    """add_apart(lane, vf, b, acc): add the values of a tile if some of its scales lie outside the window.

    Each pass places the window's end at the largest scale that is left, multiplies the values whose scales lie in it,
    and adds these products to the results, times the distance of the two windows. Under `invariant` other keys must not
    decide which values are added together: windows lie side by side, from that of `WINDOWS` on, whose values are left.
    """
    ext, row_max, window = instructions(), make_row_max("cuda", 32), WINDOWS[c.cache]
    piece, NV, G = layout.of_v, c.width_v // KEYS, x.row_tiles
    WORDS, EACH = piece.count * piece.words, 32 // layout.value.bits
    LOW, HIGH, SPAN = window.origin + window.low, window.origin + window.high, window.high - window.low + 1

    @ti.func
    def half_of(scale, origin):
        """A scale as a half; 0 outside the window."""
        byte = ti.cast(scale, ti.i32)
        distance = byte - origin
        half = ti.select(distance >= window.low, ti.select(distance <= window.high, distance << 10, 0), 0)
        return ti.cast(ti.select(byte == 0xFF, 0x7E00, half), ti.u32)

    @ti.func
    def is_missing(byte, added):
        """1 for a scale whose values are to be added apart and were not: those from `added` on were."""
        missing = ti.select(byte < added, 1, 0)
        if ti.static(c.invariant):
            missing = ti.select(byte < LOW, missing, ti.select(byte > HIGH, missing, 0))
        return missing

    @ti.func
    def add_apart(lane, vf: ti.template(), b: ti.template(), acc: ti.template()):
        going, added = 1, 0xFF  # NaN is added in each pass
        while going != 0:
            largest = 0
            for n in ti.static(range(4 * piece.count)):
                byte = ti.cast(vf[ti.static(4 * WORDS + n)], ti.i32)
                largest = ti.max(largest, ti.select(is_missing(byte, added) != 0, byte + 1, 0))
            top = ti.cast(row_max(lane, ti.cast(largest, ti.u32)), ti.i32) - 1
            if ti.static(c.invariant):
                top = top + (ti.static(HIGH + 16 * SPAN) - top) % SPAN
            origin = top - window.high
            # The distance of the two windows, as two factors: one alone could leave float32's range.
            half = (origin - window.origin) >> 1
            factor = ti.bit_cast((half + 127) << 23, ti.f32)
            rest = ti.bit_cast((origin - window.origin - half + 127) << 23, ti.f32)
            for n in ti.static(range(piece.count)):
                scale = [ti.u32(0) for _ in range(2)]
                for i in ti.static(range(2)):
                    first = ti.static(4 * WORDS + 2 * i * piece.count + n)
                    far = half_of(vf[ti.static(first + piece.count)], origin)
                    scale[i] = half_of(vf[first], origin) | (far << ti.u32(16))
                for w in ti.static(range(n * piece.words, (n + 1) * piece.words)):
                    y = [ti.u32(0) for _ in range(2 * EACH)]
                    values_of_word(vf, w, scale, y)
                    for t in ti.static(range(EACH // 2)):
                        for g in ti.static(range(G)):
                            a = ti.static((g * NV + w * EACH // 2 + t) * 4)
                            s = [ti.f32(0.0) for _ in range(4)]
                            ext.multiply_f16(s[0], s[1], s[2], s[3], y[ti.static(2 * t)], y[ti.static(2 * t + 1)],
                                             y[ti.static(EACH + 2 * t)], y[ti.static(EACH + 2 * t + 1)],
                                             b[ti.static(2 * g)], b[ti.static(2 * g + 1)])  # fmt: skip
                            for e in ti.static(range(4)):
                                acc[ti.static(a + e)] += s[e] * factor * rest
            added, more = origin + window.low, 0
            for n in ti.static(range(4 * piece.count)):
                more = more | is_missing(ti.cast(vf[ti.static(4 * WORDS + n)], ti.i32), added)
            going = ti.simt.warp.any_nonzero(ti.u32(ALL), more)
        if ti.static(c.invariant):
            for n in ti.static(range(4 * WORDS, 4 * WORDS + 4 * piece.count)):
                byte = ti.cast(vf[n], ti.i32)
                inside = ti.select(byte < LOW, 0, ti.select(byte > HIGH, 0, 1))
                vf[n] = ti.select(inside != 0, vf[n], ti.u32(window.origin))  # a half of 0

    return add_apart


def make_settle(x, layout, c):
    """settle(acc, task, v_scale, strides, scalars): give the results their true size, with the scale of V."""
    scale_of_head, COUNT = make_scale_of_head(S.v_scale_first, c), 4 * (c.width_v // KEYS) * x.row_tiles
    power = FEWER[layout.number] + (WINDOWS[c.cache].origin - 112 if layout.by_sums else 0)

    @ti.func
    def settle(acc: ti.template(), task, v_scale: ti.template(), strides, scalars):
        if ti.static(power != 0 or c.scale != ""):
            scale = scale_of_head(v_scale, task, strides) * ti.f32(2.0**power)
            if ti.static(layout.scale == "e4m3"):
                scale = scale * scalars[X.value_scale]
            for i in ti.static(range(COUNT)):
                acc[i] *= scale

    return settle


def make_value_at(c):
    """value_at(slot, column, task, v, v_scale, strides): a number of V."""
    _, v_offset, scale_offset = make_slot_offsets(c)
    scale_of_head, by_group = make_scale_of_head(S.v_scale_first, c), KINDS[c.cache][1] != ""
    value, row = codes_of(c.cache, c.width_v), OF_CODE[c.cache]
    to_f32 = make_code_to_f32(row) if by_group else make_bits_to_f32(c.cache)
    scale_to_f32 = make_bits_to_f32(c.scale or "f32")
    mask = (1 << value.bits) - 1
    bits = layout_of(c.cache, c.width, c.width_v).of_v.bits

    @ti.func
    def value_at(slot, column, task, v: ti.template(), v_scale: ti.template(), strides):
        bit = column * value.bits
        word = v[task[T.v_first] + v_offset(slot, strides) + bit // bits]
        scale = scale_of_head(v_scale, task, strides)
        if ti.static(by_group):
            at = strides[S.v_scale_first] + task[T.scale_first] + scale_offset(slot, strides)
            scale = scale_to_f32(ti.cast(v_scale[at + column // value.group], ti.u32))
        return to_f32(ti.cast(word >> ti.cast(bit % bits, WORD[bits]), ti.u32) & ti.u32(mask)) * scale

    return value_at
