"""The terms of a softmax beside q.k: a sink logit for each query head, and ALiBi's slopes of the distance.

`terms` holds the arrays of both, the words of a `tree`, and the vector `AttentionTerms`. A kernel reads the arrays that
its choices name. If they name no array, the kernel does not take these arguments, and `terms` is empty.
"""

from tikv.kernels.attention.parameters import INFINITY, LOG2E, MASKED, MINUS_INFINITY, NAN, N
from tikv.kernels.exact import ONE
from tikv.runtime import ti


def make_start_state(c):
    """start_state(h, r, split, terms) -> (maximum, sum) of a query row before its first key.

    The maximum is in base 2. A sink logit then has weight 1, or NaN if it is NaN or infinity; only the first split
    counts it.
    """

    @ti.func
    def start_state(h, r, split, terms: ti.template()):
        m, l = ti.f32(MASKED), ti.f32(0.0)
        if ti.static(c.sink_logits):
            sink_logits, _slopes, _tree, numbers = ti.static(terms)
            at = numbers[N.sink_first] + (h * c.group + r % c.group) * numbers[N.sink_head]
            bits = ti.bit_cast(sink_logits[at], ti.u32)
            if split == 0 and bits != ti.u32(MINUS_INFINITY):
                finite = (bits & ti.u32(0x7FFFFFFF)) < ti.u32(INFINITY)
                m = ti.select(finite, ti.max(sink_logits[at] * ti.f32(LOG2E), ti.f32(MASKED)), ti.f32(MASKED))
                l = ti.bit_cast(ti.select(finite, ti.u32(ONE), ti.u32(NAN)), ti.f32)
        return m, l

    return start_state


def make_slope_of(c):
    """slope_of(b, h, r, terms): how much each step from key to query lowers the logit of query row r."""

    @ti.func
    def slope_of(b, h, r, terms: ti.template()):
        slope = ti.f32(0.0)
        if ti.static(c.alibi):
            _sinks, slopes, _tree, numbers = ti.static(terms)
            head = h * c.group + r % c.group
            slope = slopes[numbers[N.slope_first] + b * numbers[N.slope_sequence] + head * numbers[N.slope_head]]
        return slope

    return slope_of


def make_origin(c):
    """origin(t, terms) -> two numbers of query t that `bias` needs beside its bounds.

    If slopes are two-sided, the first is the number of tokens that it sees after its own. If keys are sharded over
    ranks, they are its position, and the number of keys of other ranks between two blocks of a rank.
    """

    @ti.func
    def origin(t, terms: ti.template()):
        stand, others = 0, 0
        if ti.static(c.two_sided or c.block > 0):
            _sinks, _slopes, _tree, numbers = ti.static(terms)
            stand = numbers[N.newer]
            if ti.static(c.block > 0):
                stand, others = numbers[N.first_query] + t, numbers[N.others]
        return ti.Vector([stand, others])

    return origin


def make_bias(c):
    """bias(slope, index, high, sinks, last_sink, origin, others): slope * (key - query position), by `query_bounds`.

    Two-sided slopes give -slope * distance, and keys may be newer than the query. If keys are sharded over ranks, an
    index counts only this rank's keys, and the other ranks' keys lie between two blocks of them.
    """

    @ti.func
    def bias(slope, index, high, sinks, last_sink, origin, others):
        behind = index - high
        if ti.static(c.sinks):
            behind = ti.select(index < sinks, index - last_sink, behind)
        if ti.static(c.two_sided):
            behind = -ti.abs(behind + origin)
        if ti.static(c.block > 0):
            number = behind + last_sink  # the key's number among this rank's: the query's position cancels out
            behind = number + number // c.block * others - origin
        return slope * ti.cast(behind, ti.f32)

    return bias
