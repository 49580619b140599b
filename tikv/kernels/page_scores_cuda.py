"""`page_scores` on CUDA, at the speed at which memory gives the summaries.

For the query heads of a KV head, the highest scores of a channel add up to the greatest number times the sum of the
positive queries, plus the least times the sum of the others. So a summary is read once and multiplied once, however
many heads there are. Neighbouring lanes read a page's row together, and add their sums by shuffles.
"""

from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.parameters import FLOATS, MINUS_INFINITY
from tikv.kernels.codec import SIZE, WORD, make_decode, make_load, word_array
from tikv.kernels.lanes import BLOCK, butterfly_distances, butterfly_sum
from tikv.kernels.page_scores import PARAMS, P
from tikv.kernels.page_summaries import make_length_of
from tikv.runtime import ti

CHANNELS = 8  # that a lane has, as long as a warp has enough lanes


class SummaryRows(NamedTuple):
    """The compile-time choices: dtypes of queries and summaries, columns, bits of a word of each and of a length."""

    query: str
    code: str
    width: int
    query_bits: int
    bits: int
    lens_bits: int

    @property
    def elements(self) -> int:
        """The elements of a word of summaries."""
        return self.bits // (SIZE[self.code] * 8)

    @property
    def words(self) -> int:
        """The words of a row of summaries."""
        return self.width // self.elements

    @property
    def lanes(self) -> int:
        """The neighbouring lanes that share a row, a power of two."""
        count = min(-(-self.width // CHANNELS), self.words, 32)
        return 1 << (count - 1).bit_length()

    @property
    def rounds(self) -> int:
        """The words of a row that a lane reads."""
        return -(-self.words // self.lanes)

    @property
    def pages(self) -> int:
        """The pages that a lane scores with the same queries, and reads at the same time."""
        return 8 if self.rounds * self.elements <= CHANNELS else 4


def threads_of(rows, kv_queries, pages):
    """(groups of lanes that have pages, threads of the launch, whole blocks); `kv_queries` are queries of KV heads."""
    groups = kv_queries * -(-pages // rows.pages)
    return groups, -(-groups * rows.lanes // BLOCK) * BLOCK


def make_page_scores_cuda(rows):
    """scores(q, least, greatest, lens, out, params): `page_scores.make_page_scores`; the extent of q is the threads."""
    Q, K, LENS = word_array(rows.query_bits), word_array(rows.bits), index_array(rows.lens_bits)
    lanes, together, distances = rows.lanes, rows.pages, butterfly_distances(rows.lanes)
    length_of, weigh, score = make_length_of(rows.lens_bits, P), make_weigh(rows), make_score(rows)

    @ti.func
    def score_pages(i, arrays: ti.template(), params):
        q, least, greatest, lens, out = ti.static(arrays)
        lane, group = i % lanes, ti.min(i // lanes, params[P.groups] - 1)  # the last block repeats the last group
        parts = (params[P.pages] + together - 1) // together
        row, first = group // parts, group % parts * together
        t, kv_head = row % params[P.queries], row // params[P.queries]
        b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        tokens = length_of(b, lens, params) - (params[P.queries] - 1 - t)
        seen = ti.select(tokens > 0, (tokens - 1) // params[P.page] + 1, 0)
        sums = ti.Vector([ti.f32(0.0) for _ in range(together)])
        if first < seen:
            at = params[P.k_first] + b * params[P.k_sequence] + h * params[P.group] * params[P.k_head]
            weights = weigh(q, at + t * params[P.k_token], lane, params)
            low = params[P.least_first] + b * params[P.least_sequence] + h * params[P.least_head]
            high = params[P.greatest_first] + b * params[P.greatest_sequence] + h * params[P.greatest_head]
            for n in ti.static(range(together)):
                page = ti.min(first + n, seen - 1)
                sums[n] = score(least, greatest, low + page * params[P.least_page],
                                high + page * params[P.greatest_page], lane, weights)  # fmt: skip
        for base in ti.static(range(0, together, lanes)):  # each lane writes the score of one page
            page_score = ti.f32(0.0)
            for n in ti.static(range(base, min(base + lanes, together))):
                total = butterfly_sum(sums[n], distances)
                page_score = ti.select(lane == n - base, total, page_score)
            page = first + base + lane
            if lane < together and page < params[P.pages]:
                if page >= seen:
                    page_score = ti.bit_cast(ti.u32(MINUS_INFINITY), ti.f32)
                out[params[P.out_first] + row * params[P.pages] + page] = page_score

    @ti.kernel
    def scores(q: Q, least: K, greatest: K, lens: LENS, out: FLOATS, params: PARAMS):
        ti.loop_config(block_dim=BLOCK)
        for i in range(q.shape[0]):
            score_pages(i, (q, least, greatest, lens, out), params)

    return scores


make_page_scores_cuda.fast_math = True


def make_weigh(rows):
    """weigh(q, at, lane, params) -> (weights of least, of greatest, masks of least, of greatest), of a lane's columns.

    A mask clears the elements of a word that no query head multiplies, so an infinity there counts for nothing. Signs
    are read from the bits, since the compiler would lose a NaN in a comparison of floats.
    """
    elements, rounds, word_type = rows.elements, rows.rounds, WORD[rows.bits]
    whole, lanes, width = rows.words % rows.lanes == 0, rows.lanes, SIZE[rows.code] * 8
    query_words = elements * SIZE[rows.query] * 8 // rows.query_bits  # of as many columns as a word of summaries has
    load = make_load(rows.query, elements, rows.query_bits)
    ones = [((1 << width) - 1) << width * e for e in range(elements)]

    @ti.func
    def weigh(q: ti.template(), at, lane, params):
        of_least = ti.Vector([ti.f32(0.0) for _ in range(rounds * elements)])
        of_greatest = ti.Vector([ti.f32(0.0) for _ in range(rounds * elements)])
        keep_least = ti.Vector([word_type(0) for _ in range(rounds)])
        keep_greatest = ti.Vector([word_type(0) for _ in range(rounds)])
        for g in range(params[P.group]):
            for n in ti.static(range(rounds)):
                word = lane + n * lanes
                if whole or word < rows.words:
                    values = load(q, at + g * params[P.k_head] + word * query_words)
                    for e in ti.static(range(elements)):
                        bits = ti.bit_cast(values[e], ti.i32)
                        positive = ti.select(bits > 0, bits, 0)
                        of_greatest[n * elements + e] += ti.bit_cast(positive, ti.f32)
                        of_least[n * elements + e] += ti.bit_cast(bits - positive, ti.f32)
                        mask = ti.select(bits > 0, word_type(ones[e]), word_type(0))
                        keep_greatest[n] = keep_greatest[n] | mask
                        keep_least[n] = keep_least[n] | (mask ^ word_type(ones[e]))
        return of_least, of_greatest, keep_least, keep_greatest

    return weigh


def make_score(rows):
    """score(least, greatest, low, high, lane, weights): a lane's share of the highest score of the page at `low`."""
    elements, rounds, lanes = rows.elements, rows.rounds, rows.lanes
    whole, decode = rows.words % rows.lanes == 0, make_decode(rows.code, rows.bits)

    @ti.func
    def score(least: ti.template(), greatest: ti.template(), low, high, lane, weights: ti.template()):
        of_least, of_greatest, keep_least, keep_greatest = ti.static(weights)
        total = ti.f32(0.0)
        for n in ti.static(range(rounds)):
            word = lane + n * lanes
            if ti.static(not whole):
                word = ti.min(word, rows.words - 1)  # of weight 0
            y, z = decode(least[low + word] & keep_least[n]), decode(greatest[high + word] & keep_greatest[n])
            for e in ti.static(range(elements)):
                m = ti.static(n * elements + e)
                total += of_least[m] * y[e] + of_greatest[m] * z[e]
        return total

    return score
