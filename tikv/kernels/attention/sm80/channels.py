"""Attention on the tensor cores of CUDA over keys that are quantised by channel: all 64 tokens of a group at a time.

The codes of a channel lie along the group's tokens, so a lane has the same eight tokens of every channel that it reads,
and takes the same code out of the words of two channels, as `sm80.coded` does with two rows of V. Codes meet the
queries as the lowest bits of halves.

The scale belongs to the channel: for each group, queries are multiplied by the scales of its channels. The product of
two halves is the sum of two halves, a high and a low one, and both meet the codes. First, the largest number of a row
of queries is made less than 1, so no product with a scale leaves float16's range. A sum lacks at most 2 ** -25, where
the last bits of the product are below the least half. Products with the biases are one number for each row and group.

The fragments of V are those of `sm80.kinds`.
"""

import math

from tikv.kernels.attention.parameters import BITS, LOWEST, MASKED, PARAMS, SCALARS, STRIDES, S, X, array_types
from tikv.kernels.attention.sm80.attend import KEY_DISTANCES, LAG, Tile, make_merge_warps, make_rescale
from tikv.kernels.attention.sm80.coded import (
    Pieces,
    codes_of,
    make_load_halves,
    make_to_small_halves,
    pairs_of,
    times_of,
)
from tikv.kernels.attention.sm80.instructions import HALVES, WARPS, instructions, lane_bits
from tikv.kernels.attention.sm80.kinds import kind_of
from tikv.kernels.attention.sm80.staged import KEYS
from tikv.kernels.attention.softmax import make_logit
from tikv.kernels.attention.task import T, make_decode_task
from tikv.kernels.attention.visible import V
from tikv.kernels.codec import word_array
from tikv.kernels.lanes import ALL, BLOCK, butterfly_sum
from tikv.runtime import ti

GROUP = 64  # tokens
OF_LANE = 8  # of which a lane has so many neighbours
TILES = GROUP // KEYS
NUMBER_BYTES = 8  # a read of scales and biases: those of two channels
TOP = -1  # the exponent of the largest number of a row of queries
TILE = Tile(1, "keys", 2, ahead=True)  # with `ahead`, V is read two tiles before it is used, otherwise one
TILE_OF_4_BITS = Tile(1, "keys", 3, 3)  # for K and V in 4 bits; with others it spills registers
MOST_BITS = {2: 256, 3: 128}  # of a token, in the channels whose codes are read at once; by the blocks of a tile


def tile_of(cache: str, values: str) -> Tile:
    """How the warps of a block share the work, for the formats of K and V."""
    both = codes_of(cache, GROUP), codes_of(values, GROUP)
    return TILE_OF_4_BITS if all(codes is not None and codes.bits == 4 for codes in both) else TILE


def word_bits(cache: str, values: str, width_v: int) -> tuple[int, int]:
    """Bits of the words in which K and V are read; 0 if a lane's piece of V is not a whole word of 32 bits."""
    kind = kind_of(values)
    of_values: int = kind.WORD_BITS if values in HALVES else kind.word_bits(values, width_v, width_v)[1]
    return codes_of(cache, GROUP).bits * OF_LANE, of_values


def make_attend_channels(tile, parts, c):
    """attend(...) on CUDA, with the arguments of `sm80.attend.make_attend_tensor`.

    `k` has the codes of a group of tokens, channel by channel, in words of those of a lane, `k_token` from one group to
    the next; `k_scale` has the scales and biases of two channels in a word of 64 bits. The other strides of scales are
    those of V's.
    """
    of_v = c.of_values._replace(width=c.width_v)
    Q, K, LENS, TABLE, _, OUT = array_types("cuda", c)
    _, VALUES, _, _, VSC, _ = array_types("cuda", of_v)
    if of_v.cache not in HALVES:
        VSC = kind_of(of_v.cache).numbers_arrays(of_v)[1]
    KSC = word_array(64)
    attend_task = make_attend_task(tile, parts, of_v, c)

    @ti.kernel
    def attend(q: Q, k: K, v: VALUES, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
               strides: STRIDES, params: PARAMS, scalars: SCALARS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            arrays = ti.static((q, k, v, lens, k_scale, v_scale, out, lse))
            attend_task(i % BLOCK, i // BLOCK, arrays, strides, params, scalars)

    return attend


make_attend_channels.fast_math = True
make_attend_channels.uses_bitcode = True
make_attend_channels.resident = lambda tile, parts, c: tile.resident
make_attend_channels.pairs = True


def make_attend_task(x, parts, of_v, c):
    """attend_task(thread, number, ...): a thread's share of a task; each warp takes every fourth group of tokens."""
    codes, f = codes_of(c.cache, GROUP), kind_of(of_v.cache).make_fragments(x, of_v)
    decode_task = make_decode_task("cuda", GROUP * WARPS, c)
    load_halves = make_load_halves(x, Pieces(c.width // 8, 1, 2), [(0, 1)], [1.0], c, TOP)
    PART = math.gcd(c.width, MOST_BITS[x.resident] // codes.bits)  # channels
    PARTS, STEPS, STEPS_OF_ALL = c.width // PART, PART // KEYS, c.width // KEYS
    load_keys, multiply_keys = make_load_keys(PART, codes), make_multiply_keys(codes)
    finish_scores, weigh_keys = make_finish_scores(codes, c), make_weigh_keys(x, of_v)
    find_values, add_values = make_find_values(), make_add_values(f)
    finish = make_merge_warps(x, f, parts, c)
    WORDS = STEPS * 4 * codes.bits * OF_LANE // 32

    @ti.func
    def attend_task(thread, number, arrays: ti.template(), strides, params, scalars):
        q, k, v, lens, k_scale, v_scale, out, lse = ti.static(arrays)
        visible, task = decode_task(number, lens, strides, params)
        lane, warp = thread % 32, thread // 32
        low, high = visible[V.first] + task[T.begin], visible[V.first] + task[T.end]  # slots
        group, behind = low // GROUP + warp, 0
        if low < high:
            behind = (high + (GROUP - 1)) // GROUP
        qf = [ti.u32(0) for _ in range(2 * STEPS_OF_ALL)]
        exponent = load_halves(0, task[T.row], lane, 0, task, q, qf, strides, params)
        powers = [ti.f32(0.0) for _ in range(2)]  # that undo those of two rows
        for e in ti.static(range(2)):
            lacking = lane_bits(exponent, (lane & 3) * 8 + e * 4) - ti.u32(TOP & 0xFFFFFFFF)
            powers[e] = ti.bit_cast(lacking << ti.u32(23), ti.f32)
        m = [ti.f32(LOWEST) for _ in range(2)]
        l = [ti.f32(0.0) for _ in range(2)]
        acc = [ti.f32(0.0) for _ in range(f.results)]
        sums = [ti.f32(0.0) for _ in range(4)]
        kf = [ti.u32(0) for _ in range(WORDS)]
        next_kf = [ti.u32(0) for _ in range(WORDS)]
        numbers = [ti.u32(0) for _ in range(STEPS * 4)]
        next_numbers = [ti.u32(0) for _ in range(STEPS * 4)]
        vf = [ti.u32(0) for _ in range(f.values)]
        next_vf = [ti.u32(0) for _ in range(f.values)]
        later_vf = [ti.u32(0) for _ in range(f.values)]
        slots = [0 for _ in range(4)]
        if group < behind:
            load_keys(lane, group, 0, task, k, k_scale, next_kf, next_numbers, strides)
            find_values(0, group * GROUP, lane, slots)
            f.load_values(lane, slots, task, v, v_scale, next_vf, strides)
            if ti.static(x.ahead):
                find_values(1, group * GROUP, lane, slots)
                f.load_values(lane, slots, task, v, v_scale, later_vf, strides)
        for _ in range((behind - group + (WARPS - 1)) // WARPS):
            at, coming = group * GROUP, ti.min(group + WARPS, behind - 1)
            s = [ti.f32(0.0) for _ in range(4 * TILES)]
            biased = [ti.f32(0.0) for _ in range(4)]
            for n in range(PARTS):
                for i in ti.static(range(WORDS)):
                    kf[i] = next_kf[i]
                for i in ti.static(range(4 * STEPS)):
                    numbers[i] = next_numbers[i]
                # After the last part, the first one of the warp's next group.
                of_group = ti.select(n + 1 < PARTS, group, coming)
                load_keys(lane, of_group, (n + 1) % PARTS, task, k, k_scale, next_kf, next_numbers, strides)
                for i in ti.static(range(STEPS)):
                    multiply_keys(i, kf, numbers, qf, s, biased)
                first = [qf[i] for i in range(2 * STEPS)]
                for i in ti.static(range(2 * (STEPS_OF_ALL - STEPS))):
                    qf[i] = qf[ti.static(i + 2 * STEPS)]
                for i in ti.static(range(2 * STEPS)):
                    qf[ti.static(i + 2 * (STEPS_OF_ALL - STEPS))] = first[i]
            finish_scores(s, biased, powers, scalars)
            whole = ti.cast(at >= low, ti.i32) * ti.cast(at + GROUP <= high, ti.i32)
            weigh_keys(at, low, high, whole, lane, s, m, l, acc, sums)
            for t in range(TILES):
                for i in ti.static(range(f.values)):
                    vf[i] = next_vf[i]
                if ti.static(x.ahead):
                    for i in ti.static(range(f.values)):
                        next_vf[i] = later_vf[i]
                    find_values((t + 2) % TILES, ti.select(t + 2 < TILES, at, coming * GROUP), lane, slots)
                    f.load_values(lane, slots, task, v, v_scale, later_vf, strides)
                else:
                    find_values((t + 1) % TILES, ti.select(t + 1 < TILES, at, coming * GROUP), lane, slots)
                    f.load_values(lane, slots, task, v, v_scale, next_vf, strides)
                add_values(t, at, low, high, whole, lane, s, vf, acc, sums)
            group = group + WARPS
        f.settle(acc, task, v_scale, strides, scalars)
        for r in ti.static(range(2)):
            l[r] = butterfly_sum(l[r], KEY_DISTANCES)
        finish(thread, task[T.row], task, m, l, acc, sums, out, lse, strides, params, scalars)

    return attend_task


def make_load_keys(width, codes):
    """load_keys(lane, group, part, task, k, k_scale, kf, numbers, strides): start to read a lane's codes.

    They are those of eight tokens in four of every 16 channels; behind them come the channels' scales and biases, in
    `numbers`. A part of a group has `width` channels.
    """
    WORDS = codes.bits * OF_LANE // 32

    @ti.func
    def load_keys(lane, group, part, task, k: ti.template(), k_scale: ti.template(), kf: ti.template(),
                  numbers: ti.template(), strides):  # fmt: skip
        row = task[T.k_first] + group * strides[S.k_token] + part * ti.static(width * OF_LANE)
        # A channel has `OF_LANE` words of codes, and half a word of numbers.
        of_numbers = (strides[S.k_scale_first] >> 2) + ((row - strides[S.k_first]) >> 4) + (lane & 3)
        row = row + (lane & 3) * ti.static(2 * OF_LANE) + (lane >> 2)
        for n in ti.static(range(width // 8)):
            both = k_scale[of_numbers + ti.static(4 * n)]
            numbers[ti.static(2 * n)] = ti.cast(both, ti.u32)
            numbers[ti.static(2 * n + 1)] = ti.cast(both >> ti.u64(32), ti.u32)
            for e in ti.static(range(2)):
                word = k[row + ti.static((8 * n + e) * OF_LANE)]
                kf[ti.static((2 * n + e) * WORDS)] = ti.cast(word, ti.u32)
                if ti.static(WORDS == 2):
                    kf[ti.static((2 * n + e) * WORDS + 1)] = ti.cast(word >> ti.u64(32), ti.u32)

    return load_keys


def make_multiply_keys(codes):
    """multiply_keys(n, kf, numbers, qf, s, biased): adds the products of channels 16 n to 16 n + 15 of a part.

    Of each tile, `s` has the sums over codes for two tokens and two rows, 2 ** -24 of `times_of` them; `biased` has
    those over biases, which are the same for all tokens.
    """
    ext, to_halves = instructions(), make_to_small_halves(codes)
    WORDS, COUNT = codes.bits * OF_LANE // 32, len(pairs_of(codes))

    @ti.func
    def multiply_keys(n: ti.template(), kf: ti.template(), numbers: ti.template(), qf: ti.template(),
                      s: ti.template(), biased: ti.template()):  # fmt: skip
        high = [ti.u32(0) for _ in range(2)]  # what queries times scales are: the sums of both
        low = [ti.u32(0) for _ in range(2)]
        bias = [ti.u32(0) for _ in range(2)]
        halves = [ti.u32(0) for _ in range(2 * OF_LANE)]  # the codes of a token in two channels, for two such pairs
        for h in ti.static(range(2)):
            first = ti.static(4 * n + 2 * h)
            scale, nothing = ti.u32(0), ti.u32(0x80008000)  # -0
            ext.low_halves(scale, numbers[first], numbers[ti.static(first + 1)])
            ext.high_halves(bias[h], numbers[first], numbers[ti.static(first + 1)])
            ext.scale_halves(high[h], qf[ti.static(2 * n + h)], scale, nothing)
            less = high[h] ^ ti.u32(0x80008000)
            ext.scale_halves(low[h], qf[ti.static(2 * n + h)], scale, less)
            for w in ti.static(range(WORDS)):
                near, far = kf[ti.static(first * WORDS + w)], kf[ti.static((first + 1) * WORDS + w)]
                mixed = [ti.u32(0) for _ in range(2)]
                if ti.static(codes.bits == 8):
                    ext.low_bytes(mixed[0], near, far)
                    ext.high_bytes(mixed[1], near, far)
                else:
                    ext.low_halves(mixed[0], near, far)
                    ext.high_halves(mixed[1], near, far)
                for i in ti.static(range(2)):
                    part = [ti.u32(0) for _ in range(COUNT)]
                    to_halves(mixed[i], part)
                    for e in ti.static(range(COUNT)):
                        halves[ti.static(h * OF_LANE + (2 * w + i) * COUNT + e)] = part[e]
        ext.multiply_f16(biased[0], biased[1], biased[2], biased[3], bias[0], bias[0], bias[1], bias[1],
                         qf[ti.static(2 * n)], qf[ti.static(2 * n + 1)])  # fmt: skip
        for t in ti.static(range(TILES)):
            o, a, b = ti.static(4 * t, 2 * t, OF_LANE + 2 * t)
            ext.multiply_f16(s[o], s[ti.static(o + 1)], s[ti.static(o + 2)], s[ti.static(o + 3)],
                             halves[a], halves[ti.static(a + 1)], halves[b], halves[ti.static(b + 1)],
                             high[0], high[1])  # fmt: skip
        for t in ti.static(range(TILES)):
            o, a, b = ti.static(4 * t, 2 * t, OF_LANE + 2 * t)
            ext.multiply_f16(s[o], s[ti.static(o + 1)], s[ti.static(o + 2)], s[ti.static(o + 3)],
                             halves[a], halves[ti.static(a + 1)], halves[b], halves[ti.static(b + 1)],
                             low[0], low[1])  # fmt: skip

    return multiply_keys


def make_finish_scores(codes, c):
    """finish_scores(s, biased, powers, scalars): `s` becomes base-2 logits."""
    logit_of = make_logit(c)
    # The first and the second token of a tile are codes 2 t and 2 t + 1 of a lane.
    FACTORS = [2.0**24 / times_of(codes, i) for i in range(2)]

    @ti.func
    def finish_scores(s: ti.template(), biased: ti.template(), powers: ti.template(), scalars):
        for i in ti.static(range(4 * TILES)):
            total = s[i] * ti.f32(FACTORS[i // 2 % 2]) + biased[ti.static(i % 2)]
            s[i] = logit_of(total * powers[ti.static(i % 2)], scalars[X.logit_scale], scalars[X.softcap])

    return finish_scores


def make_find_values():
    """find_values(t, at, lane, slots): the slots of the lane's four rows of V in tile t of a group.

    Tile t has the tokens 2 t and 2 t + 1 of each lane of K, in the order in which `multiply_keys` leaves them.
    """

    @ti.func
    def find_values(t, at, lane, slots: ti.template()):
        for i in ti.static(range(4)):
            slots[i] = at + (lane & 3) * ti.static(2 * OF_LANE) + 2 * t + ti.static(i % 2 * OF_LANE + i // 2)

    return find_values


def make_weigh_keys(x, c):
    """weigh_keys(at, low, high, whole, lane, s, m, l, acc, sums): the logits `s` of a group become weights.

    If the group is not `whole`, slots before `low` and from `high` on have none.
    """
    exp2, rescale = instructions().exp2, make_rescale(x, c)

    @ti.func
    def weigh_keys(at, low, high, whole, lane, s: ti.template(), m: ti.template(), l: ti.template(),
                   acc: ti.template(), sums: ti.template()):  # fmt: skip
        if whole == 0:
            for i in ti.static(range(4 * TILES)):
                slot = at + (lane >> 2) * OF_LANE + ti.static(i // 4 * 2 + i // 2 % 2)
                s[i] = ti.select(slot >= low, ti.select(slot < high, s[i], ti.f32(MASKED)), ti.f32(MASKED))
        tops = [s[i] for i in range(4)]
        for i in ti.static(range(4, 4 * TILES)):
            tops[ti.static(i % 4)] = ti.max(tops[ti.static(i % 4)], s[i])
        grown = 0
        for r in ti.static(range(2)):
            grown = ti.select(ti.max(tops[r], tops[ti.static(r + 2)]) > m[r] + ti.f32(LAG), 1, grown)
        if ti.simt.warp.any_nonzero(ti.u32(ALL), grown) != 0:
            rescale(tops, m, l, acc, sums)
        for i in ti.static(range(4 * TILES)):
            below, weight = s[i] - m[ti.static(i % 2)], ti.f32(0.0)
            exp2(weight, below)
            s[i] = weight
            l[ti.static(i % 2)] += weight

    return weigh_keys


def make_add_values(f):
    """add_values(t, at, low, high, whole, lane, s, vf, acc, sums): adds V of tile t by its weights, the first of `s`.

    The next tile's weights become the first. Rows of V without weight become zeros, since they may be infinite.
    """
    find_values = make_find_values()

    @ti.func
    def add_values(t, at, low, high, whole, lane, s: ti.template(), vf: ti.template(), acc: ti.template(),
                   sums: ti.template()):  # fmt: skip
        if whole == 0:
            slots = [0 for _ in range(4)]
            counts = [1 for _ in range(6)]
            find_values(t, at, lane, slots)
            for i in ti.static(range(4)):
                counts[ti.static(i + 2)] = ti.cast(slots[i] >= low, ti.i32) * ti.cast(slots[i] < high, ti.i32)
            f.clear(counts, vf)
        p = [s[i] for i in range(4)]
        f.add_values(lane, p, vf, acc, sums)
        for i in ti.static(range(4, 4 * TILES)):
            s[ti.static(i - 4)] = s[i]

    return add_values
