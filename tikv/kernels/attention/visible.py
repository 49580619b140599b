"""The keys that a query sees, counted by an index over visible keys: first the sinks, then the newest tokens."""

from typing import NamedTuple

from tikv.kernels.attention.parameters import HIDDEN, MAX_TOKENS, P, S
from tikv.runtime import ti


class VisibleRange(NamedTuple):
    """Entries of the vector that `make_visible_range` returns for a KV head of a sequence."""

    count: int = 0  # keys that some query sees
    sinks: int = 1  # how many of them are sinks
    first: int = 2  # slot, or for a table position, of the first visible key after the sinks
    recent: int = 3  # positions from that key to the end; negative without such a key
    end: int = 4  # length, at most MAX_TOKENS
    length_high: int = 5  # the length divided by MAX_TOKENS, and the remainder, if tokens are chosen
    length_low: int = 6


V = VisibleRange()


def make_visible_range(c):
    """visible_range(b, h, lens, strides, params) -> the vector `VisibleRange` of sequence b, for its KV head h.

    It bounds all lengths, also those on the device, which nobody checked.
    """

    @ti.func
    def visible_range(b, h, lens: ti.template(), strides, params):
        length = ti.cast(params[P.length], ti.i64)
        if ti.static(c.lens_bits > 0):
            at = strides[S.lens_first] + b * strides[S.lens_sequence]
            if ti.static(c.lens_by_head):
                at = at + h * params[P.lens_head]
            length = ti.cast(lens[at], ti.i64)
        length = ti.max(length, ti.i64(0))
        if ti.static(c.kind != "ring"):
            length = ti.min(length, ti.cast(params[P.capacity], ti.i64))
        sinks = ti.cast(params[P.sinks], ti.i64)
        oldest = length + ti.cast(params[P.ahead] - params[P.window], ti.i64)
        if ti.static(c.causal):
            oldest = oldest - ti.cast(params[P.queries] - 1 + params[P.later], ti.i64)
        if ti.static(c.kind == "ring"):
            oldest = ti.max(oldest, length - ti.cast(params[P.ring], ti.i64))
        low = ti.max(ti.max(sinks, ti.cast(params[P.first_valid], ti.i64)), oldest)
        if ti.static(c.starts):
            low = ti.max(low, ti.cast(lens[strides[S.lens_first] + b * strides[S.lens_sequence] + 1], ti.i64))
        first = ti.cast(ti.min(low, ti.i64(MAX_TOKENS)), ti.i32)
        if ti.static(c.kind == "ring"):
            first = params[P.sinks] + ti.cast((low - sinks) % ti.cast(params[P.ring], ti.i64), ti.i32)
        fixed = ti.cast(ti.min(sinks, length), ti.i32)
        recent = ti.cast(ti.max(length - low, ti.i64(-MAX_TOKENS)), ti.i32)
        end = ti.cast(ti.min(length, ti.i64(MAX_TOKENS)), ti.i32)
        length_high, length_low = 0, 0
        if ti.static(c.index_bits > 0):
            length_high = ti.cast(length // ti.i64(MAX_TOKENS), ti.i32)
            length_low = ti.cast(length % ti.i64(MAX_TOKENS), ti.i32)
        return ti.Vector([fixed + ti.max(recent, 0), fixed, first, recent, end, length_high, length_low])

    return visible_range


@ti.func
def first_position(visible):
    """The position of the first key after the sinks that some query sees; the end if no query sees such a key."""
    return visible[V.end] - ti.max(visible[V.recent], 0)


def make_query_bounds():
    """query_bounds(t, visible, params) -> (low, high, sinks, last_sink): the keys that query t sees, by index.

    Of the `sinks`, it sees those up to `last_sink`; of the keys after them, those above `low` and up to `high`.
    """

    @ti.func
    def query_bounds(t, visible, params):
        # The query has the position of the back-th newest key.
        back = params[P.queries] + params[P.later] - t - params[P.ahead]
        high = visible[V.sinks] + visible[V.recent] - back
        return ti.Vector([high - params[P.window], high, visible[V.sinks], visible[V.end] - back])

    return query_bounds


def make_rows_range(c):
    """rows_range(row, visible, params) -> (begin, end): the keys that a task's rows from `row` see, by index."""
    query_bounds = make_query_bounds()

    @ti.func
    def rows_range(row, visible, params):
        begin, end = 0, visible[V.count]
        if ti.static(c.masked and c.causal and not c.tree):
            last = ti.min(row + c.rows, params[P.queries] * c.group) - 1
            end = ti.max(query_bounds(last // c.group, visible, params)[1] + 1, visible[V.sinks])
            if ti.static(not c.sinks):
                begin = query_bounds(row // c.group, visible, params)[0] + 1
        return ti.Vector([begin, end])

    return rows_range


def make_in_bounds(c):
    """in_bounds(index, low, high, sinks, last_sink): 1 if the key at this index is visible, else 0, without a branch.

    If all queries see the same keys, every key that exists is visible.
    """

    @ti.func
    def in_bounds(index, low, high, sinks, last_sink):
        inside = ti.select(index <= high, ti.select(index > low, 1, 0), 0)
        if ti.static(not c.causal):
            inside = ti.select(index < HIDDEN, 1, 0)
        elif ti.static(c.sinks):
            inside = ti.select(index < sinks, ti.select(index <= last_sink, 1, 0), inside)
        return inside

    return in_bounds


def make_is_visible(c):
    """is_visible(t, index, visible, params): whether query t of a sequence sees the key at this index."""
    query_bounds, in_bounds = make_query_bounds(), make_in_bounds(c)

    @ti.func
    def is_visible(t, index, visible, params):
        sees = True
        if ti.static(c.masked):
            bounds = query_bounds(t, visible, params)
            sees = in_bounds(index, bounds[0], bounds[1], bounds[2], bounds[3]) > 0
        return sees

    return is_visible
