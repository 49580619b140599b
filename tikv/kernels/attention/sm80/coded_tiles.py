"""Attention over KVarN's tiles on tensor cores: S = Q K^T and O = P V, whose codes each warp copies to shared memory.

A warp takes a tile at a time, keys and values apart: while one of both is used, the other one, or that of the warp's
next tile, is under way. Codes become the lowest bits of halves, as in `sm80.coded`. What meets them has the scales of
their lines: queries for keys, weights for values. A query's product is a sum of two halves, which are rows n and n + 8
of one fragment; so sums lack 2 ** -22 of their terms. A weight's is a half. The factors of columns multiply sums, and
biases are sums of their own for each row.

A lane has the same neighbouring codes of each line that it reads, four lines at once; so both products find the same
tokens in the same lanes. Lines lie in shared memory in the order in which lanes read them, which avoids conflicts of
banks. Results are parts, in the rotated basis: `make_merge_tiles` merges them and rotates them back.
"""

from typing import Any, NamedTuple

from tikv.formats import block_of
from tikv.kernels.address import index_array
from tikv.kernels.attention.coded_tiles import (
    PARAMS,
    WEIGHT_PARAMS,
    P,
    ProductForm,
    W,
    WeightForm,
    is_seen,
    make_find_tile,
    make_rows_of,
    make_seen,
)
from tikv.kernels.attention.parameters import BITS, FLOATS, LOWEST, MASKED, MINUS_INFINITY, SCALARS, X
from tikv.kernels.attention.sm80.copies import PIECE, make_read_words
from tikv.kernels.attention.sm80.instructions import ROWS, WARPS, instructions
from tikv.kernels.attention.softmax import exp2, inverse_of, make_logit, make_store_lse
from tikv.kernels.codec import make_bits_to_f32, word_array
from tikv.kernels.hadamard import LaneColumns, make_turn_lanes
from tikv.kernels.lanes import ALL, BLOCK, butterfly_max, butterfly_sum, make_row_max
from tikv.runtime import ti

WIDTHS = (64, 128, 256)  # of K and V
BANKS = 128  # bytes of shared memory that are read at once
MEMORY, RESERVED = 227 << 10, 1 << 10  # bytes for a multiprocessor's blocks; those of a block that no kernel has
MOST_RESIDENT = 2  # blocks that a multiprocessor holds, for the registers of a thread
STEP = 16  # lines of a product
CHUNK = 64  # columns of V that are added up together
LAG = 8.0  # how far a maximum may be behind before the result is rescaled
QUARTERS = 4  # of a row of results, each with a gap behind it, so that lanes write to different banks
QUAD = [2, 1]  # distances between the lanes that have a row
LEAST, MOST = 16, 252  # exponent fields of a row's largest number, whose powers of two are float32
LACKING = 2.0**11  # times what queries lack, as halves: so small scales lose no bits
SMALL = 2.0**24  # codes are 2 ** -24 of what they are


class FusedForm(NamedTuple):
    """The compile-time choices."""

    keys: ProductForm
    values: ProductForm
    weights: WeightForm


class Lines(NamedTuple):
    """The lines of a tile's codes in shared memory.

    Bit n of a line's place is bit `order[n]` of its number: lines that lanes of a quad read at once follow each other.
    """

    bits: int
    count: int
    columns: int
    order: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a line."""
        return self.columns * self.bits // 8

    @property
    def of_lane(self) -> int:
        """Bytes of a line that a lane reads."""
        return self.nbytes // 8

    @property
    def copied(self) -> list[int]:
        """The bits of a line's number in the order in which copies run through them: lines of all banks come first."""
        first = self.order[: (BANKS // self.nbytes).bit_length() - 1]
        return [*first, *sorted({*self.order} - {*first})]

    def place(self, line: int) -> int:
        """The place of a line."""
        return sum((line >> bit & 1) << n for n, bit in enumerate(self.order))

    def exchange(self, place: Any) -> Any:
        """Which bits of the number of a piece are flipped: four lines are read at once."""
        return place % 4 * self.nbytes // BANKS * 2


class Layout(NamedTuple):
    """Where a tile lies in the shared memory of a warp, in bytes; the codes of keys begin at 0."""

    k_numbers: int
    k_factors: int
    v: int
    v_numbers: int
    v_factors: int
    nbytes: int


def lines_of(c: ProductForm) -> Lines:
    """The lines of a tile: channels of keys in the order of queries, or tokens in that of the products with keys."""
    bits = c.lines.bit_length() - 1
    if c.of == "keys":
        order = (2, 3, 0, 1, *range(4, bits))
    else:
        n = bits - 3  # of a lane's tokens; two lanes of keys are one of a quad
        order = (n + 1, n + 2, n, *range(n))
    return Lines(c.bits, c.lines, c.columns, order)


def layout_of(c: FusedForm) -> Layout:
    """The layout of a tile."""
    sizes = []
    for of in (c.keys, c.values):
        sizes += [of.lines * of.columns * of.bits // 8, of.lines * 4, of.columns * 2]
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return Layout(*ends[:5], -(-ends[5] // BANKS) * BANKS)


def query_bytes(c: FusedForm) -> int:
    """Bytes from a row of queries in shared memory to the next: two rows lie in different banks."""
    return c.keys.lines * 4 + BANKS // 2


def shared_bytes(c: FusedForm) -> int:
    """Bytes of shared memory of a block: queries, and the tiles of its warps, or later their results."""
    merged = WARPS * ROWS * (c.values.columns + QUARTERS + 2) * 4
    return ROWS * query_bytes(c) + max(WARPS * layout_of(c).nbytes, merged) + BANKS


def resident(c: FusedForm) -> int:
    """Blocks that a multiprocessor holds."""
    return max(1, min(MOST_RESIDENT, MEMORY // (shared_bytes(c) + RESERVED)))


def held_of(width: int) -> int:
    """Columns of a row that a lane of `make_merge_tiles` holds."""
    return max(2, block_of(width) // 32)


def lanes_of(width: int) -> int:
    """Lanes of such a row."""
    return width // held_of(width)


def make_copy_lines(lines):
    """(first_of(lane), copy(to, first, source)): starts to copy a tile's lines.

    `first_of` has the offsets of a lane's first piece: where it goes to, and where it comes from, as `source` has it.
    """
    ext = instructions()
    PER_LINE, SIZE = lines.nbytes // PIECE, lines.nbytes
    AT_ONCE = 32 // PER_LINE  # lines
    of_lane, of_turn = lines.copied[: AT_ONCE.bit_length() - 1], lines.copied[AT_ONCE.bit_length() - 1 :]
    turns = [sum((n >> i & 1) << bit for i, bit in enumerate(of_turn)) for n in range(lines.count // AT_ONCE)]
    places = [(line, lines.place(line)) for line in turns]

    @ti.func
    def first_of(lane):
        piece, line, place = lane % PER_LINE, 0, 0
        for i, bit in ti.static(enumerate(of_lane)):
            line = line | ((lane // PER_LINE >> i & 1) << bit)
        for n, bit in ti.static(enumerate(lines.order)):
            place = place | ((line >> bit & 1) << n)
        to = place * SIZE + (piece ^ lines.exchange(place)) * PIECE
        return ti.Vector([ti.cast(to, ti.u32), ti.cast(line * SIZE + piece * PIECE, ti.u32)])

    @ti.func
    def copy(to, first, source):
        for line, place in ti.static(places):
            exchanged = to + (first ^ ti.u32(ti.static(lines.exchange(place) * PIECE)))
            target, address = exchanged + ti.u32(place * SIZE), source + ti.u64(line * SIZE)
            ext.copy_16(target, address)

    return first_of, copy


def make_copy_numbers(count, exchanged):
    """copy(to, source, lane): starts to copy so many pieces; a lane of a quad has `exchanged` of them, if they swap."""
    ext = instructions()

    @ti.func
    def copy(to, source, lane):
        for n in ti.static(range(-(-count // 32))):
            piece = lane + ti.static(n * 32)
            if piece < count:
                place = piece
                if ti.static(exchanged > 0):
                    place = piece ^ (piece // exchanged)
                target = to + ti.cast(place * PIECE, ti.u32)
                address = source + ti.cast(piece * PIECE, ti.u64)
                ext.copy_16(target, address)

    return copy


def make_lane_offset(lines):
    """lane_offset(lane): where a lane's part of the first line lies that it reads."""

    @ti.func
    def lane_offset(lane):
        quad, behind = lane & 3, (lane >> 2) * lines.of_lane
        piece = (behind // PIECE) ^ lines.exchange(quad)
        return ti.cast(quad * lines.nbytes + piece * PIECE + behind % PIECE, ti.u32)

    return lane_offset


def times_of(bits, n):
    """How many times its codes register n is, see `make_multiply`."""
    return 1 << n * bits % 8


def make_multiply(lines, nbytes):
    """multiply(address, a, acc): adds the products of a fragment with four lines, of which a lane reads so many bytes.

    A register has a code of two lines: the lowest bits of two halves, 2 ** -24 of `times_of` them.
    """
    ext = instructions()
    read_words, bits = make_read_words(ext), lines.bits
    WORDS, EACH = max(1, nbytes // 4), 16 // bits  # words of a line; codes of half a word

    @ti.func
    def multiply(address, a: ti.template(), acc: ti.template()):
        words = [ti.u32(0) for _ in range(4 * WORDS)]
        for j in ti.static(range(4)):
            at = address + ti.u32(4 * j * lines.nbytes)
            if ti.static(nbytes == 2):
                ext.read_2(words[j], at)
            else:
                read_words(at, WORDS, words, ti.static(j * WORDS))
        for part in ti.static(range(nbytes // 2)):
            b = [ti.u32(0) for _ in range(2 * EACH)]
            for pair in ti.static(range(2)):
                both = ti.u32(0)
                w = ti.static(2 * pair * WORDS + part // 2)
                if ti.static(part % 2 == 0):
                    ext.low_halves(both, words[w], words[ti.static(w + WORDS)])
                else:
                    ext.high_halves(both, words[w], words[ti.static(w + WORDS)])
                for e in ti.static(range(EACH)):
                    mask = ti.static((((1 << bits) - 1) << e * bits % 8) * 0x10001)
                    b[ti.static(pair * EACH + e)] = (both >> ti.u32(ti.static(e * bits // 8 * 8))) & ti.u32(mask)
            for e in ti.static(range(EACH)):
                o = ti.static(4 * (part * EACH + e))
                ext.multiply_f16(acc[o], acc[ti.static(o + 1)], acc[ti.static(o + 2)], acc[ti.static(o + 3)], a[0],
                                 a[1], a[2], a[3], b[e], b[ti.static(EACH + e)])  # fmt: skip

    return multiply


def make_split():
    """split(y, a): four numbers as a fragment: their halves, and `LACKING` times what these lack."""
    ext, half = instructions(), make_bits_to_f32("f16")

    @ti.func
    def split(y: ti.template(), a: ti.template()):
        for n in ti.static(range(2)):
            high, low = ti.u32(0), ti.u32(0)
            ext.pack_f16(high, y[ti.static(2 * n)], y[ti.static(2 * n + 1)])
            near = (y[ti.static(2 * n)] - half(high & ti.u32(0xFFFF))) * ti.f32(LACKING)
            far = (y[ti.static(2 * n + 1)] - half(high >> ti.u32(16))) * ti.f32(LACKING)
            ext.pack_f16(low, near, far)
            a[ti.static(2 * n)], a[ti.static(2 * n + 1)] = high, low

    return split


def make_attend_tiles(c):
    """attend(q, k, v, ...): each block attends over a part of the tiles of a KV head, for `ROWS` rows.

    `q` has rotated queries, and its extent is tasks * `BLOCK`; results of each part are divided by their weights.
    """
    attend_task = make_attend_task(c)

    @ti.kernel
    def attend(q: FLOATS, k: word_array(32), v: word_array(32), k_factors: word_array(16), v_factors: word_array(16),
               k_numbers: word_array(32), v_numbers: word_array(32), table: index_array(c.keys.table),
               lens: index_array(c.keys.lens), out: FLOATS, lse: BITS, of_keys: PARAMS, of_values: PARAMS,
               seen: WEIGHT_PARAMS, scalars: SCALARS):  # fmt: skip
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            arrays = ti.static((q, table, lens, out, lse))
            attend_task(i % BLOCK, i // BLOCK, arrays, of_keys, of_values, seen, scalars)

    return attend


make_attend_tiles.fast_math = True
make_attend_tiles.uses_bitcode = True
make_attend_tiles.resident = resident
make_attend_tiles.shared_bytes = shared_bytes


def make_load_queries(c):
    """load_queries(q, first, lane, warp, shared): a row's queries times a power of two, below 1, to shared memory.

    Returns what undoes that power.
    """
    ext, row_max, Q_BYTES, D = instructions(), make_row_max("cuda", 4), query_bytes(c), c.keys.lines
    PIECES, OF_WARP = max(1, D // BLOCK), min(D, BLOCK) // WARPS

    @ti.func
    def load_queries(q: ti.template(), first, lane, warp, shared):
        quad, largest = lane & 3, ti.u32(0)
        for s in range(D // STEP):
            for n in ti.static(range(4)):
                bits = ti.bit_cast(q[first + s * STEP + quad * 4 + n], ti.u32)
                largest = ti.max(largest, bits & ti.u32(0x7FFFFFFF))
        exponent = ti.min(ti.max(row_max(lane, largest) >> ti.u32(23), ti.u32(LEAST)), ti.u32(MOST))
        power = ti.bit_cast((ti.u32(253) - exponent) << ti.u32(23), ti.f32)
        for n in range(PIECES):
            for e in ti.static(range(OF_WARP // 4)):
                column = n * BLOCK + warp * OF_WARP + quad * ti.static(OF_WARP // 4) + e
                to = shared + ti.cast((lane >> 2) * Q_BYTES + column * 4, ti.u32)
                number = ti.bit_cast(q[first + column] * power, ti.u32)
                ext.write_4(to, number)
        return ti.bit_cast((exponent + ti.u32(1)) << ti.u32(23), ti.f32)

    return load_queries


def make_copy_tile(c):
    """(find_bases(bases, ...), first_of(lane), copy_keys(...), copy_values(...)): starts to copy halves of tiles."""
    ext, at, keys, values = instructions(), layout_of(c), lines_of(c.keys), lines_of(c.values)
    (k_first_of, copy_k), (v_first_of, copy_v) = make_copy_lines(keys), make_copy_lines(values)
    D, DV, TOKENS = keys.count, values.columns, keys.columns
    copy_k_numbers, copy_k_factors = make_copy_numbers(D // 4, 0), make_copy_numbers(TOKENS // 8, 0)
    copy_v_numbers, copy_v_factors = make_copy_numbers(TOKENS // 4, TOKENS // 16), make_copy_numbers(DV // 8, 0)
    K_TILE, V_TILE = at.k_numbers, at.v_numbers - at.v
    K_BITS, V_BITS = keys.bits, values.bits

    @ti.func
    def find_bases(bases: ti.template(), of_keys, of_values):
        ext.address_k(bases[0])
        ext.address_v(bases[1])
        ext.address_k_scale(bases[2])
        ext.address_v_scale(bases[3])
        ext.address_behind_v(bases[4])
        ext.address_before_k_scale(bases[5])
        bases[0] += ti.cast(of_keys[P.codes_first], ti.u64) * ti.u64(K_BITS)
        bases[1] += ti.cast(of_values[P.codes_first], ti.u64) * ti.u64(V_BITS)
        bases[2] += ti.cast(of_keys[P.numbers_first], ti.u64) * ti.u64(4)
        bases[3] += ti.cast(of_values[P.numbers_first], ti.u64) * ti.u64(4)
        bases[4] += ti.cast(of_keys[P.factors_first], ti.u64) * ti.u64(2)
        bases[5] += ti.cast(of_values[P.factors_first], ti.u64) * ti.u64(2)

    @ti.func
    def first_of(lane):
        k, v = k_first_of(lane), v_first_of(lane)
        return ti.Vector([k[0], k[1], v[0], v[1]])

    @ti.func
    def copy_keys(tile, lane, first, memory, bases: ti.template()):
        if tile >= 0:
            index = ti.cast(tile, ti.u64)
            copy_k(memory, first[0], bases[0] + index * ti.u64(K_TILE) + ti.cast(first[1], ti.u64))
            copy_k_numbers(memory + ti.u32(at.k_numbers), bases[2] + index * ti.u64(D * 4), lane)
            copy_k_factors(memory + ti.u32(at.k_factors), bases[4] + index * ti.u64(TOKENS * 2), lane)
        ext.copies_commit()

    @ti.func
    def copy_values(tile, lane, first, memory, bases: ti.template()):
        if tile >= 0:
            index = ti.cast(tile, ti.u64)
            copy_v(memory + ti.u32(at.v), first[2], bases[1] + index * ti.u64(V_TILE) + ti.cast(first[3], ti.u64))
            copy_v_numbers(memory + ti.u32(at.v_numbers), bases[3] + index * ti.u64(TOKENS * 4), lane)
            copy_v_factors(memory + ti.u32(at.v_factors), bases[5] + index * ti.u64(DV * 2), lane)
        ext.copies_commit()

    return find_bases, first_of, copy_keys, copy_values


def make_find_next(c):
    """find_next(coming, end, ...) -> (coming, tile, whole): the next tile of which a row of the warp sees something.

    `tile` is its place, or -1; `whole` says that every row sees all of it. `bounds` are `make_seen`'s.
    """
    find_tile, TOKENS = make_find_tile(c.keys), c.keys.columns

    @ti.func
    def find_next(coming, end, b, h, bounds, ring, table: ti.template(), lens: ti.template(), of_keys):
        tile, whole, at, first, count = -1, 0, coming, bounds[0], bounds[1]
        while at < end and tile < 0:
            tile = find_tile(b, h, at, table, lens, of_keys)
            slot = at * TOKENS
            distance = slot - first
            distance += ti.select(distance < 0, ring, 0)
            begins = ti.cast(distance >= 0, ti.i32) * ti.cast(distance < count, ti.i32)
            enters = ti.cast(first > slot, ti.i32) * ti.cast(first < slot + TOKENS, ti.i32)
            is_some = ti.select(count > 0, begins + enters, 0)
            lacks = 1 - ti.cast(distance >= 0, ti.i32) * ti.cast(distance + TOKENS <= count, ti.i32)
            whole = ti.select(ti.simt.warp.any_nonzero(ti.u32(ALL), lacks) != 0, 0, 1)
            if ti.simt.warp.any_nonzero(ti.u32(ALL), is_some) == 0:
                tile = -1
            if tile < 0:
                at += WARPS
        return ti.Vector([at, tile, whole])

    return find_next


def make_score(c):
    """score(lane, memory, queries, undone, s, scalars): a row's base-2 logits of a lane's tokens.

    Number 2 j + e is that of the lane's token j in half e of its tokens.
    """
    ext, half, keys, at = instructions(), make_bits_to_f32("f16"), lines_of(c.keys), layout_of(c)
    read_words, split, logit_of = make_read_words(ext), make_split(), make_logit(c.weights)
    multiply, lane_offset = make_multiply(keys, keys.of_lane), make_lane_offset(keys)
    D, OF_LANE, SIZE = keys.count, keys.columns // 4, STEP * keys.nbytes

    @ti.func
    def score(lane, memory, queries, undone, s: ti.template(), scalars):
        quad, lines = lane & 3, memory + lane_offset(lane)
        acc = [ti.f32(0.0) for _ in range(2 * OF_LANE)]
        biased = ti.f32(0.0)
        for n in range(D // STEP):
            words = [ti.u32(0) for _ in range(8)]
            behind = ti.cast(n * ti.static(STEP * 4) + quad * PIECE, ti.u32)
            queries_at, numbers_at = queries + behind, memory + ti.u32(at.k_numbers) + behind
            read_words(queries_at, 4, words, 0)
            read_words(numbers_at, 4, words, 4)
            y = [ti.f32(0.0) for _ in range(4)]
            for e in ti.static(range(4)):
                x, pair = ti.bit_cast(words[e], ti.f32), words[ti.static(4 + e)]
                y[e] = x * half(pair & ti.u32(0xFFFF))
                biased += x * half(pair >> ti.u32(16))
            a = [ti.u32(0) for _ in range(4)]
            split(y, a)
            multiply(lines + ti.cast(n * SIZE, ti.u32), a, acc)
        biased = butterfly_sum(biased, QUAD)
        factors = [ti.u32(0) for _ in range(OF_LANE // 2)]
        for n in ti.static(range(OF_LANE // 8)):
            factors_at = memory + ti.u32(at.k_factors + n * PIECE) + ti.cast(quad * ti.static(OF_LANE * 2), ti.u32)
            read_words(factors_at, 4, factors, ti.static(4 * n))
        for i in ti.static(range(OF_LANE)):
            j, e = ti.static(i // 2, i % 2)
            token = ti.static(e * OF_LANE // 2 + j)
            factor = half((factors[ti.static(token // 2)] >> ti.u32(token % 2 * 16)) & ti.u32(0xFFFF)) * undone
            sums = acc[ti.static(4 * j + e)] + acc[ti.static(4 * j + e + 2)] * ti.f32(1 / LACKING)
            dot = (sums * ti.f32(SMALL / times_of(keys.bits, j)) + biased) * factor
            s[i] = logit_of(dot, scalars[X.logit_scale], scalars[X.softcap])

    return score


def make_rescale(c):
    """rescale(s, m, l, total): a row's maximum grows if logits are far above it, and what was added up fades."""
    ext, OF_LANE, COLUMNS = instructions(), c.keys.columns // 4, c.values.columns // 4

    @ti.func
    def rescale(s: ti.template(), m: ti.template(), l: ti.template(), total: ti.template()):
        top = s[0]
        for i in ti.static(range(1, OF_LANE)):
            top = ti.max(top, s[i])
        grown = ti.cast(top > m[0] + ti.f32(LAG), ti.i32)
        if ti.simt.warp.any_nonzero(ti.u32(ALL), grown) != 0:
            top = butterfly_max(ti.max(m[0], top), QUAD)
            below, fade = m[0] - top, ti.f32(0.0)
            ext.exp2(fade, below)
            m[0] = top
            l[0] *= fade
            for i in ti.static(range(COLUMNS)):
                total[i] *= fade

    return rescale


def make_weigh(c):
    """weigh(lane, memory, s, m, l) -> (power, biases): logits become weights, times the scales of their tokens.

    They are divided by `power`, so that the largest scale is near 1; so is `biases`, the sum of the weighted biases.
    """
    ext, half, row_max = instructions(), make_bits_to_f32("f16"), make_row_max("cuda", 4)
    read_words, V_NUMBERS, OF_LANE = make_read_words(ext), layout_of(c).v_numbers, c.keys.columns // 4

    @ti.func
    def weigh(lane, memory, s: ti.template(), m: ti.template(), l: ti.template()):
        quad, largest = lane & 3, ti.u32(0)
        pairs = [ti.u32(0) for _ in range(OF_LANE)]
        for n in ti.static(range(OF_LANE // 4)):
            piece = quad * ti.static(OF_LANE // 4) + (quad ^ n)
            numbers_at = memory + ti.u32(V_NUMBERS) + ti.cast(piece * PIECE, ti.u32)
            read_words(numbers_at, 4, pairs, ti.static(4 * n))
        for i in ti.static(range(OF_LANE)):
            largest = ti.max(largest, pairs[i] & ti.u32(0x7FFF))
        exponent = ti.cast(ti.min(row_max(lane, largest) >> ti.u32(10), ti.u32(30)), ti.i32) - 15
        power = ti.bit_cast((exponent + 127) << 23, ti.f32)
        base, of_tile, biases = m[0] + ti.cast(exponent, ti.f32), ti.f32(0.0), ti.f32(0.0)
        for i in ti.static(range(OF_LANE)):
            below, weight = s[i] - base, ti.f32(0.0)
            ext.exp2(weight, below)
            of_tile += weight
            pair = pairs[ti.static(i % 2 * OF_LANE // 2 + i // 2)]
            biases += weight * half(pair >> ti.u32(16))
            s[i] = weight * half(pair & ti.u32(0xFFFF))
        l[0] += of_tile * power
        return ti.Vector([power, butterfly_sum(biases, QUAD)])

    return weigh


def make_add_values(c):
    """add_values(lane, memory, s, power, biases, total): adds a tile's values by `make_weigh`'s weights.

    Number 2 j + e of a chunk is column j in half e: a lane has two halves of a chunk's columns.
    """
    ext, half, values, at = instructions(), make_bits_to_f32("f16"), lines_of(c.values), layout_of(c)
    CHUNKS, COLUMNS = max(1, values.columns // CHUNK), values.columns // 4
    OF_CHUNK, BYTES, SIZE = COLUMNS // CHUNKS, values.of_lane // CHUNKS, STEP * values.nbytes
    read_words = make_read_words(ext)
    multiply, lane_offset = make_multiply(values, BYTES), make_lane_offset(values)

    @ti.func
    def add_values(lane, memory, s: ti.template(), power, biases, total: ti.template()):
        quad, lines = lane & 3, memory + ti.u32(at.v) + lane_offset(lane)
        for chunk in ti.static(range(CHUNKS)):
            acc = [ti.f32(0.0) for _ in range(2 * OF_CHUNK)]
            for n in ti.static(range(values.count // STEP)):
                a = [ti.u32(0) for _ in range(4)]
                for e in ti.static(range(2)):
                    ext.pack_f16(a[ti.static(2 * e)], s[ti.static(4 * n + 2 * e)], s[ti.static(4 * n + 2 * e + 1)])
                multiply(lines + ti.u32(n * SIZE + chunk * BYTES), a, acc)
            factors = [ti.u32(0) for _ in range(OF_CHUNK // 2)]
            for e in ti.static(range(2)):
                first = quad * COLUMNS + ti.static(e * COLUMNS // 2 + chunk * OF_CHUNK // 2)
                factors_at = memory + ti.u32(at.v_factors) + ti.cast(first * 2, ti.u32)
                for n in ti.static(range(OF_CHUNK // 16)):
                    words_at = factors_at + ti.u32(n * PIECE)
                    read_words(words_at, 4, factors, ti.static(e * OF_CHUNK // 4 + 4 * n))
            for i in ti.static(range(OF_CHUNK)):
                j, e = ti.static(i // 2, i % 2)
                word = factors[ti.static(e * OF_CHUNK // 4 + j // 2)]
                factor = half((word >> ti.u32(j % 2 * 16)) & ti.u32(0xFFFF)) * power
                sums = acc[ti.static(4 * j + e)] * ti.f32(SMALL / times_of(values.bits, j)) + biases
                total[ti.static(chunk * OF_CHUNK + i)] += sums * factor

    return add_values


def make_attend_task(c):
    """attend_task(thread, number, arrays, ...): a thread's share of a task; warps take every fourth tile."""
    ext, seen_by, (query_row, _), Q_BYTES = instructions(), make_seen(c.weights), make_rows_of(c.keys), query_bytes(c)
    load_queries, find_next, score, rescale = make_load_queries(c), make_find_next(c), make_score(c), make_rescale(c)
    find_bases, first_of, copy_keys, copy_values = make_copy_tile(c)
    weigh, add_values, finish = make_weigh(c), make_add_values(c), make_finish(c)
    TOKENS, OF_LANE, COLUMNS, SIZE = c.keys.columns, c.keys.columns // 4, c.values.columns // 4, layout_of(c).nbytes

    @ti.func
    def attend_task(thread, number, arrays: ti.template(), of_keys, of_values, seen, scalars):
        q, table, lens, out, lse = ti.static(arrays)
        lane, warp = thread % 32, thread // 32
        parts, blocks = of_keys[P.parts], (seen[W.rows] + (ROWS - 1)) // ROWS
        part, rest = number % parts, number // parts
        row, head = rest % blocks * ROWS, rest // blocks
        b, h = head // of_keys[P.heads], head % of_keys[P.heads]
        r = ti.min(row + (lane >> 2), seen[W.rows] - 1)
        bounds, ring = seen_by(b, r // c.keys.group, lens, seen), seen[W.ring]
        bases = [ti.u64(0) for _ in range(6)]
        find_bases(bases, of_keys, of_values)
        queries = ti.u32(0)
        ext.shared_memory(queries)
        queries = (queries + ti.u32(BANKS - 1)) // ti.u32(BANKS) * ti.u32(BANKS)
        tiles, copied = queries + ti.u32(ROWS * Q_BYTES), first_of(lane)
        undone = load_queries(q, query_row(b, h, r, of_keys), lane, warp, queries)
        ti.simt.block.sync()
        queries += ti.cast((lane >> 2) * Q_BYTES, ti.u32)
        m = [ti.f32(LOWEST)]
        l = [ti.f32(0.0)]
        total = [ti.f32(0.0) for _ in range(COLUMNS)]
        coming, end = part * of_keys[P.each] + warp, ti.min((part + 1) * of_keys[P.each], of_keys[P.tiles])
        current, whole, state = coming, 0, 0  # `state` is 1 with a current tile, and -1 after the last one
        while state >= 0:
            coming_tile = find_next(coming, end, b, h, bounds, ring, table, lens, of_keys)
            # The same in each turn; LLVM, which does not know that, computes addresses when they are needed.
            memory = tiles + ti.cast(warp * SIZE + (coming_tile[0] >> 31), ti.u32)
            s = [ti.f32(0.0) for _ in range(OF_LANE)]
            if state == 1:
                ext.copies_wait_1()
                ext.warp_meets()
                score(lane, memory, queries, undone, s, scalars)
                ext.warp_meets()
            copy_keys(coming_tile[1], lane, copied, memory, bases)
            if state == 1:
                if whole == 0:
                    for i in ti.static(range(OF_LANE)):
                        token = (lane & 3) * OF_LANE + ti.static(i % 2 * OF_LANE // 2 + i // 2)
                        is_in = is_seen(current * TOKENS + token, bounds[0], bounds[1], ring)
                        s[i] = ti.select(is_in, s[i], ti.f32(MASKED))
                rescale(s, m, l, total)
                ext.copies_wait_1()
                ext.warp_meets()
                of_tile = weigh(lane, memory, s, m, l)
                add_values(lane, memory, s, of_tile[0], of_tile[1], total)
                ext.warp_meets()
            copy_values(coming_tile[1], lane, copied, memory, bases)
            state = ti.select(coming_tile[1] >= 0, 1, -1)
            current, whole, coming = coming_tile[0], coming_tile[2], coming_tile[0] + WARPS
        ext.copies_wait_0()
        place = ti.Vector([b, h, row, part])
        finish(thread, place, tiles, m[0], butterfly_sum(l[0], QUAD), total, out, lse, of_values, seen, scalars)

    return attend_task


def make_finish(c):
    """finish(thread, place, shared, m, l, total, ...): merges the warps' results, and stores them as those of a part.

    `place` has the sequence, the KV head, the first row and the part.
    """
    ext, store_lse, (result_row, _) = instructions(), make_store_lse(True), make_rows_of(c.values)
    DV = c.values.columns
    COLUMNS, TIMES, OF_CHUNK = DV // 4, -(-DV // BLOCK), min(DV, CHUNK) // 4
    ROW = (DV + QUARTERS) * 4
    TOPS, SUMS = ROWS * WARPS * ROW, ROWS * WARPS * (ROW + 4)

    @ti.func
    def read(address):
        bits = ti.u32(0)
        ext.read_4(bits, address)
        return ti.bit_cast(bits, ti.f32)

    @ti.func
    def write(address, number):
        bits = ti.bit_cast(number, ti.u32)
        ext.write_4(address, bits)

    @ti.func
    def finish(thread, place, shared, m, l, total: ti.template(), out: ti.template(), lse: ti.template(), of_values,
               seen, scalars):  # fmt: skip
        lane, warp = thread % 32, thread // 32
        quad, of_row = lane & 3, ti.cast((lane >> 2) * 4, ti.u32)
        mine = of_row + ti.cast(warp * ti.static(ROWS * 4), ti.u32)
        ti.simt.block.sync()
        if quad == 0:
            write(shared + ti.u32(TOPS) + mine, m)
        ti.simt.block.sync()
        top = m
        for w in ti.static(range(WARPS)):
            top = ti.max(top, read(shared + ti.u32(TOPS + 4 * ROWS * w) + of_row))
        below, fade = m - top, ti.f32(0.0)
        ext.exp2(fade, below)
        if quad == 0:
            write(shared + ti.u32(SUMS) + mine, l * fade)
        first = shared + mine * ti.u32(ROW // 4) + ti.cast(quad * ti.static((COLUMNS + 1) * 4), ti.u32)
        for i in ti.static(range(COLUMNS)):
            # Of each chunk, a lane has columns of two neighbours by turns.
            chunk, j, e = ti.static(i // OF_CHUNK, i % OF_CHUNK // 2, i % 2)
            column = ti.static(e * COLUMNS // 2 + chunk * OF_CHUNK // 2 + j)
            write(first + ti.u32(column * 4), total[i] * fade)
        ti.simt.block.sync()
        for n in range(ti.min(ROWS, seen[W.rows] - place[2])):
            to = result_row(place[0], place[1], place[2] + n, of_values)
            of_sums, of_all, most = ti.f32(0.0), ti.cast(n * 4, ti.u32), ti.f32(LOWEST)
            for w in ti.static(range(WARPS)):
                of_sums += read(shared + ti.u32(SUMS + 4 * ROWS * w) + of_all)
                most = ti.max(most, read(shared + ti.u32(TOPS + 4 * ROWS * w) + of_all))
            inverse = inverse_of(of_sums)
            for u in ti.static(range(TIMES)):
                d = u * BLOCK + thread
                if d < DV:
                    y = ti.f32(0.0)
                    at = shared + of_all * ti.u32(ROW // 4) + ti.cast((d + d // COLUMNS) * 4, ti.u32)
                    for w in ti.static(range(WARPS)):
                        y += read(at + ti.u32(w * ROWS * ROW))
                    out[place[3] * of_values[P.part] + to + d] = y * inverse
            if thread == 0:
                store_lse(lse, place[3] * seen[W.all_rows] + to // DV, most, of_sums, scalars)

    return finish


class MergeParams(NamedTuple):
    """Numbers of a launch of `make_merge_tiles`."""

    items: int = 0
    rows: int = 0
    parts: int = 1
    part: int = 0  # the step from the result of a part to the next
    out_first: int = 0
    lse_first: int = 0


M = MergeParams(*range(len(MergeParams._fields)))
MERGE_PARAMS = ti.types.vector(len(M), ti.i32)


def make_merge_tiles(width):
    """merge(x, sums, out, lse, params, scalars): the parts' results `x`, merged and rotated back.

    `sums` has the base-2 log-sum-exps of parts. An item is a lane of a row.
    """
    n = block_of(width)
    HELD, LANES = held_of(width), lanes_of(width)
    columns = LaneColumns(tuple(tuple(range(first, first + HELD)) for first in range(0, n, HELD)))
    turn, store_lse = make_turn_lanes("cuda", columns, None), make_store_lse(False)

    @ti.func
    def merge_row(i, x: ti.template(), sums: ti.template(), out: ti.template(), lse: ti.template(), params, scalars):
        lane, row = i % LANES, i // LANES
        inside = row < params[M.rows]
        row = ti.select(inside, row, 0)
        m, total = ti.f32(LOWEST), ti.f32(0.0)
        for part in range(params[M.parts]):
            bits = sums[part * params[M.rows] + row]
            m = ti.max(m, ti.select(bits == ti.u32(MINUS_INFINITY), ti.f32(LOWEST), ti.bit_cast(bits, ti.f32)))
        values = ti.Vector.zero(ti.f32, HELD)
        for part in range(params[M.parts]):
            bits = sums[part * params[M.rows] + row]
            if bits != ti.u32(MINUS_INFINITY):
                weight = exp2(ti.bit_cast(bits, ti.f32) - m)
                total += weight
                at = part * params[M.part] + row * width + lane * HELD
                for e in ti.static(range(HELD)):
                    values[e] += weight * x[at + e]
        inverse = inverse_of(total)
        for e in ti.static(range(HELD)):
            values[e] *= inverse
        values = turn(i, lane, values, row)
        if inside:
            to = params[M.out_first] + row * width + lane * HELD
            for e in ti.static(range(HELD)):
                out[to + e] = values[e]
            if lane == 0:
                store_lse(lse, params[M.lse_first] + row, m, total, scalars)

    @ti.kernel
    def merge(x: FLOATS, sums: BITS, out: FLOATS, lse: BITS, params: MERGE_PARAMS, scalars: SCALARS):
        ti.loop_config(block_dim=BLOCK)
        for i in range(x.shape[0]):
            merge_row(i, x, sums, out, lse, params, scalars)

    return merge


make_merge_tiles.fast_math = True
