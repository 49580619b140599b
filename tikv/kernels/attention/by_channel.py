"""Scores of queries with keys whose codes have a scale and a bias a channel, over a group of tokens.

The codes of a channel lie one after another, token by token. With s and b of channel d in the key's group, q.k is the
sum over d of (q s) code + q b: each thread adds it up for the tokens of a unit of codes, for a few rows of queries.
"""

from typing import NamedTuple

from tikv.formats import GROUP_FORMATS
from tikv.kernels.attention.parameters import FLOATS
from tikv.kernels.codec import SIZE, element_array, make_bits_to_f32, make_load, scale_array, word_array
from tikv.kernels.groups import make_code, step_of_code, unit_of
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class ScoreParams(NamedTuple):
    """Numbers of a launch: units of work, extents, and where what lies."""

    items: int = 0
    groups: int = 0  # of tokens, whose scores are wanted
    room: int = 0  # groups that there is memory for
    heads: int = 1  # KV heads
    queries: int = 1  # of a query head
    tokens: int = 0  # from a row of scores to the next
    q_sequence: int = 0
    q_head: int = 0
    q_token: int = 0
    q_first: int = 0
    k_first: int = 0
    numbers_first: int = 0


P = ScoreParams(*range(len(ScoreParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_channel_scores(style, serial, name, query, scale, width, group, band):
    """scores(q, codes, numbers, out, params): out (sequence and KV head, row, token) float32.

    Args:
        style, serial: as in `lanes.make_loop`.
        name: of the format, whose groups are of tokens.
        query, scale: dtype codes of q, and of scales and biases.
        width: channels.
        group: query heads of a KV head; with the queries of each they are its rows.
        band: rows that an item computes, which divide them.
    """
    row, code, (count, words) = GROUP_FORMATS[name], make_code(name), unit_of(name)
    load_q, value = make_load(query, 1, SIZE[query] * 8), make_bits_to_f32(scale)
    units, steps = row.group // count, [1 / step_of_code(name, e) for e in range(count)]
    Q, CODES, SC = element_array(query), word_array(32), scale_array(scale)

    @ti.func
    def score(i, arrays: ti.template(), params):
        q, codes, numbers, out = ti.static(arrays)
        unit, rest = i % units, i // units
        of_group, rest = rest % params[P.groups], rest // params[P.groups]
        bands = group * params[P.queries] // band
        first_row, head = rest % bands * band, rest // bands
        b, h = head // params[P.heads], head % params[P.heads]
        channel = (head * params[P.room] + of_group) * width
        at = ti.Vector([0] * band)
        for g in ti.static(range(band)):
            r = first_row + g
            of_head, token = r // params[P.queries], r % params[P.queries]
            at[g] = (params[P.q_first] + b * params[P.q_sequence] + (h * group + of_head) * params[P.q_head]
                     + token * params[P.q_token])  # fmt: skip
        sums = ti.Vector([ti.f32(0.0)] * (band * count))
        biases = ti.Vector([ti.f32(0.0)] * band)
        for d in range(width):
            number = params[P.numbers_first] + (channel + d) * 2
            s, bias = value(numbers[number]), value(numbers[number + 1])
            word = params[P.k_first] + ((channel + d) * units + unit) * words
            found = [codes[word + w] for w in range(words)]
            for g in ti.static(range(band)):
                y = load_q(q, at[g] + d)[0]
                biases[g] += y * bias
                y = y * s
                for e in ti.static(range(count)):
                    sums[g * count + e] += code(found, e) * y
        for g in ti.static(range(band)):
            to = (head * bands * band + first_row + g) * params[P.tokens] + of_group * row.group + unit * count
            for e in ti.static(range(count)):
                out[to + e] = sums[g * count + e] * ti.f32(ti.static(steps[e])) + biases[g]

    loop = make_loop(style, serial, score, P.items)

    @ti.kernel
    def scores(q: Q, codes: CODES, numbers: SC, out: FLOATS, params: PARAMS):
        loop(q, params, ((q, codes, numbers, out), params))

    return scores


make_channel_scores.fast_math = True
