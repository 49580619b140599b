"""Terms in a consumer of `sm90.attend`: sink logits before the first tile, slopes on scores, trees in tiles' masks."""

from tikv.kernels.attention.parameters import LOG2E, LOWEST, N, P
from tikv.kernels.attention.sm90.tiles import KEYS_OF, instructions, is_transposed
from tikv.kernels.attention.task import T
from tikv.kernels.attention.terms import make_origin, make_slope_of, make_start_state
from tikv.kernels.attention.tree import first_new, make_depth_of
from tikv.kernels.attention.visible import V, make_query_bounds
from tikv.kernels.lanes import shuffle
from tikv.runtime import ti


def rise_of(c) -> tuple[float, float]:
    """(the power of two that the largest weight has, how far a maximum may be behind before the result is rescaled).

    Weights that become halves stay below 2 ** 8, and codes below the largest 8-bit float, which is 448.
    """
    return (8.0, 0.8) if is_transposed(c) else (0.0, 8.0)


def make_start_rows(c):
    """start_rows(row, lane, ..., m, l, slope, stand): the states of a thread's two rows before their first key.

    `slope` is what a logit in base 2 loses with each key that lies between, `stand` the index from which keys are
    counted; in a tree it is the depth.
    """
    start_state, slope_of, origin = make_start_state(c), make_slope_of(c), make_origin(c)
    depth_of, query_bounds, UP = make_depth_of(c), make_query_bounds(), rise_of(c)[0]

    @ti.func
    def start_rows(row, lane, visible, task, terms: ti.template(), params, m: ti.template(), l: ti.template(),
                   slope: ti.template(), stand: ti.template()):  # fmt: skip
        for r in ti.static(range(2)):
            clamped = ti.min(row + ti.static(8 * r), params[P.queries] * c.group - 1)
            if ti.static(c.sink_logits):
                top, weight = start_state(task[T.head], clamped, task[T.split], terms)
                m[r] = ti.max(top, ti.f32(LOWEST)) - ti.f32(UP)
                # The lanes of a row each have a part of its sum.
                l[r] = ti.select((lane & 3) == 0, weight * ti.f32(2.0**UP), ti.f32(0.0))
            if ti.static(c.alibi):
                slope[r] = slope_of(task[T.sequence], task[T.head], clamped, terms) * ti.f32(LOG2E)
                depth = depth_of(task[T.sequence], clamped // c.group, terms, params)
                stand[r] = depth
                if ti.static(not c.tree):
                    stand[r] = query_bounds(depth, visible, params)[1] - origin(depth, terms)[0]

    return start_rows


def make_add_slopes(c):
    """add_slopes(at, gap, scale, lane, slope, stand, ..., s): scores become logits in base 2, with `make_bias`'s bias.

    How far a key is from a query is a whole number, which float32 has.
    """
    keys = KEYS_OF[c.width]
    find_depths, origin = make_find_depths(c), make_origin(c)

    @ti.func
    def add_slopes(at, gap, scale: ti.template(), lane, slope: ti.template(), stand: ti.template(), visible, task,
                   terms: ti.template(), params, s: ti.template()):  # fmt: skip
        first = at + (lane & 3) * 2
        of_sinks, further = visible[V.sinks] + gap - first, ti.cast(behind_sinks(visible) - gap, ti.f32)
        depths = [ti.f32(0.0) for _ in range(keys // 32)]
        of_rows = [ti.cast(first - stand[r], ti.f32) for r in range(2)]
        newer = ti.cast(origin(0, terms)[0], ti.f32)
        if ti.static(c.tree):
            find_depths(at, gap, lane, depths, visible, task, terms, params)
            for r in ti.static(range(2)):
                of_rows[r] = ti.cast(-stand[r], ti.f32)
        for e in ti.static(range(keys // 4)):
            key = ti.static(e // 2 * 8 + e % 2)
            depth = ti.cast(key, ti.f32)
            if ti.static(c.tree):
                depth = shuffle(depths[ti.static(key // 32)], (lane & 3) * 2 + ti.static(key % 32))
            elif ti.static(c.sinks):
                depth += ti.select(key < of_sinks, further, ti.f32(0.0))
            for r in ti.static(range(2)):
                i = ti.static(e // 2 * 4 + 2 * r + e % 2)
                back = depth + of_rows[r]
                if ti.static(c.tree):
                    back = ti.min(back, ti.f32(0.0)) + newer
                if ti.static(c.two_sided):
                    back = -ti.abs(back)
                s[i] = s[i] * scale[r] + slope[r] * back

    return add_slopes


def make_find_depths(c):
    """find_depths(at, gap, lane, depths, ...): how far a lane's keys, one of 32 of a tile, stand behind a prefix.

    A query stands as far as its depth, and sees no key that stands further.
    """
    keys, query_bounds = KEYS_OF[c.width], make_query_bounds()

    @ti.func
    def find_depths(at, gap, lane, depths: ti.template(), visible, task, terms: ti.template(), params):
        _sinks, _slopes, tree, numbers = ti.static(terms)
        row = numbers[N.tree_first] + task[T.sequence] * params[P.queries] * numbers[N.tree_words]
        for i in ti.static(range(keys // 32)):
            index = at + lane + ti.static(32 * i)
            new = ti.min(index - first_new(visible, params), params[P.queries] - 1)
            depth = index - query_bounds(0, visible, params)[1]
            if ti.static(c.sinks):
                depth += ti.select(index - gap < visible[V.sinks], behind_sinks(visible) - gap, 0)
            if new >= 0:
                depth = ti.cast(tree[row + new * numbers[N.tree_words]], ti.i32)
            depths[i] = ti.cast(depth, ti.f32)

    return find_depths


@ti.func
def behind_sinks(visible):
    """How much further away sinks are than their indices say: so many keys between them and the others are not held."""
    return visible[V.sinks] + visible[V.recent] - visible[V.end]


def make_see_in_tree(c):
    """see_in_tree(old, first, t, bounds, ...): a bit for each key from index `first` on that query t sees.

    Those of new tokens are the tree's, within the window, which counts depths; those of older keys are `old`'s.
    """
    bits_from = instructions().bits_from

    @ti.func
    def see_in_tree(old, first, t, bounds, visible, task, terms: ti.template(), params):
        _sinks, _slopes, tree, numbers = ti.static(terms)
        words, tokens = numbers[N.tree_words], params[P.queries]
        at = first - first_new(visible, params)  # of the first of these keys among the new tokens
        before, is_new, sees = -at, ti.u32(0), ti.u32(0)
        bits_from(is_new, before)
        if is_new != ti.u32(0):
            of_sequence = numbers[N.tree_first] + task[T.sequence] * tokens * words
            row, word, shift = of_sequence + t * words, at >> 5, ti.cast(at & 31, ti.u32)
            low, high = ti.u32(0), ti.u32(0)
            if word >= 0 and word < words - 1:
                low = tree[row + 1 + word]
            if word + 1 < words - 1:
                high = tree[row + 2 + word]
            sees = (low >> shift) | ((high << ti.u32(1)) << (ti.u32(31) - shift))
            if params[P.window] < tokens:
                depth, near = ti.cast(tree[row], ti.i32), ti.u32(0)
                for e in range(32):
                    key = ti.min(ti.max(at + e, 0), tokens - 1)
                    back = ti.min(ti.cast(tree[of_sequence + key * words], ti.i32) - depth, 0)
                    is_near = ti.cast(back + params[P.window] > 0, ti.i32)
                    if ti.static(c.sinks):
                        is_near = is_near | ti.cast(bounds[1] + back < bounds[2], ti.i32)
                    near = near | (ti.cast(is_near, ti.u32) << ti.cast(e, ti.u32))
                sees = sees & near
        return (old & ~is_new) | (sees & is_new)

    return see_in_tree
