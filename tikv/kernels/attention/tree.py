"""New tokens that form a tree, or that have a mask: which of them a query sees, and their depths.

`make_tree` writes a row of words for each new token: its depth, and a bit for each new token that it sees. Attention
then treats a new key as an older one, by the difference of their depths, or as a key that no query sees.
"""

from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.parameters import BITS, MAX_TOKENS, N, P
from tikv.kernels.attention.visible import V
from tikv.kernels.codec import word_array
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class TreeParams(NamedTuple):
    """Numbers of `make_tree`."""

    rows: int = 0  # new tokens of all sequences
    tokens: int = 0  # of a sequence
    words: int = 0  # of a token
    to: int = 0  # first word
    source: int = 0  # first entry of the caller's array, and its strides
    source_sequence: int = 0
    source_token: int = 0
    source_key: int = 0


R = TreeParams(*range(len(TreeParams._fields)))
PARAMS = ti.types.vector(len(R), ti.i32)


def make_tree(style, form):
    """tree(source, words, params): `form` is "mask" (a byte per key), "bits" (8 keys per byte), or parents' bits."""
    SOURCE = word_array(8) if form in ("mask", "bits") else index_array(form)

    @ti.func
    def row_of_parents(b, t, at, source: ti.template(), words: ti.template(), params):
        depth, p = -1, t
        for n in range(params[R.words] - 1):
            w = params[R.words] - 2 - n  # in the order in which a walk to the root passes them
            bits = ti.u32(0)
            while p >= w * 32:
                bits = bits | (ti.u32(1) << ti.cast(p % 32, ti.u32))
                depth += 1
                parent = source[params[R.source] + b * params[R.source_sequence] + p * params[R.source_token]]
                # A parent that does not precede its token counts as no parent; on the device, nobody could check.
                # Unsigned: Vulkan takes a negative number, widened to 64 bits, for a positive one.
                p = ti.select(ti.cast(parent, ti.u64) < ti.cast(p, ti.u64), ti.cast(parent, ti.i32), -1)
            words[at + 1 + w] = bits
        words[at] = ti.cast(depth, ti.u32)

    @ti.func
    def row_of_mask(b, t, at, source: ti.template(), words: ti.template(), params):
        first = params[R.source] + b * params[R.source_sequence] + t * params[R.source_token]
        depth = -1
        for w in range(params[R.words] - 1):
            bits = ti.u32(0)
            for e in range(ti.min(32, params[R.tokens] - w * 32)):
                k = w * 32 + e
                sees = ti.u32(0)
                if ti.static(form == "mask"):
                    sees = ti.min(ti.cast(source[first + k * params[R.source_key]], ti.u32), ti.u32(1))
                else:
                    byte = ti.cast(source[first + k // 8 * params[R.source_key]], ti.u32)
                    sees = (byte >> ti.cast(k % 8, ti.u32)) & ti.u32(1)
                bits = bits | (sees << ti.cast(e, ti.u32))
                depth += ti.cast(sees, ti.i32)
            words[at + 1 + w] = bits
        words[at] = ti.cast(ti.max(depth, 0), ti.u32)

    @ti.func
    def tree_row(i, arrays: ti.template(), params):
        source, words = ti.static(arrays)
        b, t = i // params[R.tokens], i % params[R.tokens]
        at = params[R.to] + i * params[R.words]
        if ti.static(form in ("mask", "bits")):
            row_of_mask(b, t, at, source, words, params)
        else:
            row_of_parents(b, t, at, source, words, params)

    loop = make_loop(style, False, tree_row, R.rows)

    @ti.kernel
    def tree(source: SOURCE, words: BITS, params: PARAMS):
        loop(source, params, ((source, words), params))

    return tree


def make_depth_of(c):
    """depth_of(b, t, terms, params): the distance of new token t from the prefix: t, or its depth in a tree."""

    @ti.func
    def depth_of(b, t, terms: ti.template(), params):
        depth = t
        if ti.static(c.tree):
            _sinks, _slopes, tree, numbers = ti.static(terms)
            row = numbers[N.tree_first] + (b * params[P.queries] + t) * numbers[N.tree_words]
            depth = ti.cast(tree[row], ti.i32)
        return depth

    return depth_of


@ti.func
def first_new(visible, params):
    """The index of the first new token, behind all older keys."""
    return visible[V.count] - params[P.queries] + params[P.ahead]


@ti.func
def index_in_tree(index, tree: ti.template(), row, first, words, tokens, new, high, sinks, last_sink):
    """The index by which a key counts for the query whose words begin at `row`, without a branch.

    Keys from index `new` are the new tokens, whose words begin at `first`. A key that the query does not see counts as
    newer than all. A key that it sees is never later than the query; `query_bounds` gave the other arguments.
    """
    j = ti.min(ti.max(index - new, 0), tokens - 1)
    sees = (tree[row + 1 + (j >> 5)] >> ti.cast(j & 31, ti.u32)) & ti.u32(1)
    back = ti.min(ti.cast(tree[first + j * words], ti.i32) - ti.cast(tree[row], ti.i32), 0)
    counts_as = ti.select(last_sink + back < sinks, last_sink + back, high + back)
    counts_as = ti.select(sees != ti.u32(0), counts_as, MAX_TOKENS)
    counts_as = ti.select(index >= new, counts_as, index)
    return ti.select(index > MAX_TOKENS, index, counts_as)  # the key does not exist


def make_index_of(c):
    """index_of(b, t, index, bounds, visible, terms, params): the index by which a key counts for query t."""

    @ti.func
    def index_of(b, t, index, bounds, visible, terms: ti.template(), params):
        counts_as = index
        if ti.static(c.tree):
            _sinks, _slopes, tree, numbers = ti.static(terms)
            words, tokens = numbers[N.tree_words], params[P.queries]
            first = numbers[N.tree_first] + b * tokens * words
            counts_as = index_in_tree(index, tree, first + t * words, first, words, tokens, first_new(visible, params),
                                      bounds[1], bounds[2], bounds[3])  # fmt: skip
        return counts_as

    return index_of
