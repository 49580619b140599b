"""Decode attention: what every form of it shares. Which keys a query sees, where they lie, and how parts are merged.

A task is a block of query rows of one KV head of one sequence, over one split of the keys it sees; rows are counted
query by query, the heads of a group first. Keys are counted by an index over what is visible: first the sinks, then the
newest tokens, so that no task ever looks at a key outside. `attention_cpu` and `attention_gpu` attend; with several
splits they leave normalised parts and base-2 log-sum-exps, which `make_merge` here turns into the result.
"""

from typing import NamedTuple

from tikv.kernels.address import make_inner
from tikv.kernels.codec import SIZE, WORD, bf16_to_f32, make_bits_to_f32, make_load, make_store
from tikv.kernels.lanes import BLOCK, WHOLE, highest_over, make_loop, sum_over
from tikv.runtime import ti

LOG2E = 1.4426950408889634
MASKED = -1e30  # the score of a key that is not seen; infinities and fast arithmetic do not go together
SEEN = -9e29  # scores above are real
MINUS_INFINITY = 0xFF800000
FAR = 1 << 30  # more tokens than a launch can see
MOST_SPLITS = 1024
IN_FLIGHT = 4  # parts that a lane reads at a time


class Choices(NamedTuple):
    """Compile-time choices: how keys are found, what the words hold, which rows a task computes."""

    place: str  # "linear", "ring" or "table"
    page: int  # slots of a page; 0 without a table
    sinks: bool
    cache: str  # dtype code of K and V
    bits: int  # of a word of K and V
    scale: str  # dtype code of the int8 scales, or ""
    k_inner: tuple[int, int]  # (chunk, stride) in words of a row that lies in pieces; (0, 0) for one that does not
    v_inner: tuple[int, int]
    query: str  # dtype code of q
    out: str  # dtype code of the result; "f32" for the parts of splits
    width: int
    width_v: int
    group: int  # query heads of a KV head
    rows: int  # query rows of a task
    causal: bool
    masked: bool  # whether queries of a task may see different keys
    softcap: bool
    lens_bits: int  # 0: one length for all sequences, among the numbers
    table_bits: int

    @property
    def unit(self) -> int:
        """Elements in a word of K and V."""
        return self.bits // (SIZE[self.cache] * 8)


class Where(NamedTuple):
    """Strides and first entries, in elements of q, out, scales, lengths and table, and in words of K and V."""

    q_batch: int = 0
    q_head: int = 0
    q_query: int = 0
    q_first: int = 0
    out_batch: int = 0
    out_head: int = 0
    out_query: int = 0
    out_first: int = 0
    k_batch: int = 0
    k_block: int = 0
    k_step: int = 0
    k_head: int = 0
    k_first: int = 0
    v_batch: int = 0
    v_block: int = 0
    v_step: int = 0
    v_head: int = 0
    v_first: int = 0
    scale_batch: int = 0
    scale_block: int = 0
    scale_step: int = 0
    scale_head: int = 0
    k_scale_first: int = 0
    v_scale_first: int = 0
    lens_step: int = 0
    lens_first: int = 0
    table_batch: int = 0
    table_step: int = 0
    table_first: int = 0


class Which(NamedTuple):
    """The other numbers of a launch."""

    tasks: int = 0
    splits: int = 1
    heads: int = 0  # KV heads
    queries: int = 1
    row_blocks: int = 1  # tasks of a KV head and split
    length: int = 0  # of every sequence, when there is no array of lengths
    capacity: int = 0  # slots that lengths of a cache that is no ring are bounded by
    sinks: int = 0
    span: int = FAR  # tokens behind the sinks that a query sees, itself included
    ring: int = 0  # slots behind the sinks that wrap
    first_valid: int = 0  # oldest position behind the sinks that is still there
    blocks: int = 0  # of the pool
    lse_first: int = 0  # of the parts' log-sum-exps, or the result's
    out_lse_first: int = 0  # of the result's, where parts are merged
    part_first: int = 0
    mass_first: int = 0
    batch: int = 1
    heads_together: int = 1  # on CPU: KV heads of a task
    near: int = 0  # keys of a head that are read before those of the next
    side: int = 0  # `attention_cpu.BY_TOKENS`, `BY_PAGES` or 0
    work_floats: int = 0  # of a worker


class Factors(NamedTuple):
    """The real numbers of a launch."""

    scale: float = 1.0  # with a soft cap, divided by it; else times log2(e)
    cap: float = 1.0  # the soft cap times log2(e)
    lse: float = 1.0  # from base 2 to the base asked for


P = Where(*range(len(Where._fields)))
N = Which(*range(len(Which._fields)))
F = Factors(*range(len(Factors._fields)))
WHERE = ti.types.vector(len(Where._fields), ti.i32)
WHICH = ti.types.vector(len(Which._fields), ti.i32)
FACTORS = ti.types.vector(len(Factors._fields), ti.f32)
INDEX = {0: ti.i32, 32: ti.i32, 64: ti.i64}


class Seen(NamedTuple):
    """Entries of what `make_seen` returns for a sequence."""

    count: int = 0  # keys that some query sees
    sinks: int = 1  # of which fixed
    first: int = 2  # slot, or for a table position, of the first key behind the sinks
    body: int = 3  # positions from that key to the end; negative when there is none
    end: int = 4  # length, at most FAR


S = Seen()


def make_seen(c):
    """seen(b, lens, which) -> the vector `Seen` of sequence b; lengths are bounded here, whoever gave them."""

    @ti.func
    def seen(b, lens: ti.template(), where, which):
        length = ti.cast(which[N.length], ti.i64)
        if ti.static(c.lens_bits > 0):
            length = ti.cast(lens[where[P.lens_first] + b * where[P.lens_step]], ti.i64)
        length = ti.max(length, ti.i64(0))
        if ti.static(c.place != "ring"):
            length = ti.min(length, ti.cast(which[N.capacity], ti.i64))
        sinks = ti.cast(which[N.sinks], ti.i64)
        oldest = length - ti.cast(which[N.span], ti.i64)
        if ti.static(c.causal):
            oldest = oldest - ti.cast(which[N.queries] - 1, ti.i64)
        if ti.static(c.place == "ring"):
            oldest = ti.max(oldest, length - ti.cast(which[N.ring], ti.i64))
        low = ti.max(ti.max(sinks, ti.cast(which[N.first_valid], ti.i64)), oldest)
        first = ti.cast(ti.min(low, ti.i64(FAR)), ti.i32)
        if ti.static(c.place == "ring"):
            first = which[N.sinks] + ti.cast((low - sinks) % ti.cast(which[N.ring], ti.i64), ti.i32)
        fixed = ti.cast(ti.min(sinks, length), ti.i32)
        body = ti.cast(ti.max(length - low, ti.i64(-FAR)), ti.i32)
        end = ti.cast(ti.min(length, ti.i64(FAR)), ti.i32)
        return ti.Vector([fixed + ti.max(body, 0), fixed, first, body, end])

    return seen


def make_run(c):
    """run(b, index, seen, table, where, which) -> (slot, n): the slot of a visible key, and how many lie side by side.

    A slot of -1 means a page that does not exist; the keys of such a run are seen by nobody.
    """
    unsigned = WORD[c.table_bits or 32]

    @ti.func
    def run(b, index, seen, table: ti.template(), where, which):
        behind = index - seen[S.sinks]
        slot, n = seen[S.first] + behind, FAR
        if ti.static(c.place == "ring"):
            end = which[N.sinks] + which[N.ring]
            if slot >= end:
                slot = slot - which[N.ring]
            n = end - slot
        elif ti.static(c.place == "table"):
            p = ti.cast(slot, ti.u32)
            page = ti.cast(p // ti.u32(c.page), ti.i32)
            inside = ti.cast(p % ti.u32(c.page), ti.i32)
            block = table[where[P.table_first] + b * where[P.table_batch] + page * where[P.table_step]]
            slot = -1
            # One comparison without signs: Vulkan takes a negative number, widened to 64 bits, for one above 0.
            if ti.cast(block, unsigned) < ti.cast(which[N.blocks], unsigned):
                slot = ti.cast(block, ti.i32) * c.page + inside
            n = c.page - inside
        if ti.static(c.sinks):
            if behind < 0:
                slot, n = index, -behind
        return ti.Vector([slot, n])

    return run


def make_place(c, step, block):
    """place(slot, where) -> the offset of a slot, by the entries `step` and `block` of the strides."""

    @ti.func
    def place(slot, where):
        at = slot * where[step]
        if ti.static(c.place == "table"):
            s = ti.cast(slot, ti.u32)
            at = ti.cast(s // ti.u32(c.page), ti.i32) * where[block] + ti.cast(s % ti.u32(c.page), ti.i32) * where[step]
        return at

    return place


def make_bounds(c):
    """bounds(t, seen, which) -> what query t of a sequence sees, by the keys' indices, for `make_within`.

    (low, high, fixed, upto): behind the `fixed` sinks above `low` up to `high`, and of the sinks up to `upto`.
    """

    @ti.func
    def bounds(t, seen, which):
        back = which[N.queries] - t  # the query is the back-th newest token
        high = seen[S.sinks] + seen[S.body] - back
        return ti.Vector([high - which[N.span], high, seen[S.sinks], seen[S.end] - back])

    return bounds


def make_within(c):
    """within(index, low, high, fixed, upto): 1 if the key at this index is seen, else 0; without a branch."""

    @ti.func
    def within(index, low, high, fixed, upto):
        found = ti.select(index <= high, ti.select(index > low, 1, 0), 0)
        if ti.static(c.sinks):
            found = ti.select(index < fixed, ti.select(index <= upto, 1, 0), found)
        return found

    return within


def make_visible(c):
    """visible(t, index, seen, which): whether query t of a sequence sees the key at this index."""
    bounds, within = make_bounds(c), make_within(c)

    @ti.func
    def visible(t, index, seen, which):
        found = True
        if ti.static(c.masked):
            sees = bounds(t, seen, which)
            found = within(index, sees[0], sees[1], sees[2], sees[3]) > 0
        return found

    return visible


@ti.func
def exp2(x):
    """2 ** x for x <= 0, within 2e-7 of it relatively; 0 below -126."""
    y = ti.max(x, ti.f32(-126.0))
    i = ti.cast(y - ti.f32(0.5), ti.i32)
    f = y - ti.cast(i, ti.f32)
    p = ti.f32(1.5403530393381609e-4)
    p = p * f + ti.f32(1.3333558146428443e-3)
    p = p * f + ti.f32(9.618129107628477e-3)
    p = p * f + ti.f32(5.550410866482158e-2)
    p = p * f + ti.f32(2.402265069591007e-1)
    p = p * f + ti.f32(6.931471805599453e-1)
    p = p * f + ti.f32(1.0)
    return ti.select(x < ti.f32(-126.0), ti.f32(0.0), p * ti.bit_cast((i + 127) << 23, ti.f32))


def make_score(c):
    """score(dot, factor, cap): from q.k to base-2 logits, by `Factors.scale` and `Factors.cap`."""

    @ti.func
    def score(dot, factor, cap):
        found = dot * factor
        if ti.static(c.softcap):
            a = exp2(-ti.abs(found) * ti.f32(2.0 * LOG2E))
            t = (ti.f32(1.0) - a) / (ti.f32(1.0) + a)
            found = ti.select(found < ti.f32(0.0), -t, t) * cap
        return found

    return score


def make_put_lse(parts):
    """put_lse(lse, at, m, l, factors): store m + log2(l), as it is for a part, in the base asked for in the end."""

    @ti.func
    def put_lse(lse: ti.template(), at, m, l, factors):
        bits = ti.u32(MINUS_INFINITY)
        if l > ti.f32(0.0):
            value = m + ti.log(l) * ti.f32(LOG2E)
            if ti.static(not parts):
                value = value * factors[F.lse]
            bits = ti.bit_cast(value, ti.u32)
        lse[at] = bits

    return put_lse


ELEMENT = {"f32": ti.f32, "f16": ti.f16, "bf16": ti.u16, "i8": ti.i8}  # of K and V on CPU


def make_value(code):
    """value(x): an element of the cache, as CPU kernels see it, in float32."""

    @ti.func
    def value(x):
        found = ti.f32(0.0)
        if ti.static(code == "bf16"):
            found = bf16_to_f32(x)
        else:
            found = ti.cast(x, ti.f32)
        return found

    return value


def make_elements(style, c):
    """elements(array, word): the values in a word of K or V; on CPU a word is an element."""
    if style != "cpu":
        return make_load(c.cache, c.unit, c.bits)
    value = make_value(c.cache)

    @ti.func
    def elements(array: ti.template(), word):
        return ti.Vector([value(array[word])])

    return elements


@ti.func
def row_address(b, h, r, group, queries, first, batch, head, query):
    """Where query row r of KV head h lies: its head comes first in r, then the query."""
    return first + b * batch + (h * group + r % group) * head + r // group * query


@ti.func
def in_result(bh, r, group, lse_first, where, which):
    """(of its first element, of its log-sum-exp): where query row r of a sequence's KV head lies in the result."""
    b, h = bh // which[N.heads], bh % which[N.heads]
    at = row_address(b, h, r, group, which[N.queries], where[P.out_first], where[P.out_batch], where[P.out_head],
                     where[P.out_query])  # fmt: skip
    return at, lse_first + (bh * group + r % group) * which[N.queries] + r // group


def make_target(parts, c):
    """target(bh, r, split, where, which): as `in_result`, of the row in its split's part where there are parts."""

    @ti.func
    def target(bh, r, split, where, which):
        at, lse_at = 0, 0
        if ti.static(parts):
            part = (bh * (which[N.queries] * c.group) + r) * which[N.splits] + split
            at, lse_at = which[N.part_first] + part * c.width_v, which[N.lse_first] + part
        else:
            at, lse_at = in_result(bh, r, c.group, which[N.lse_first], where, which)
        return at, lse_at

    return target


@ti.func
def part_score(bits):
    """The base-2 log-sum-exp of a part, from its bits; `MASKED`, a finite number, where it saw nothing."""
    return ti.bit_cast(ti.select(bits == ti.u32(MINUS_INFINITY), ti.bit_cast(ti.f32(MASKED), ti.u32), bits), ti.f32)


def make_merge(style, serial, c):
    """Merge the parts of splits: a query row an item on CPU, its element elsewhere; on CUDA a block of threads a row.

    merge(parts, part_lse, out, lse, where, which, factors): `parts` f32 (rows, splits, width_v), 0 where a split saw
    nothing, `part_lse` u32 (rows, splits), bits of base-2 float32; the extent of `parts` is the number of items, on
    CUDA of threads.
    """
    OUT = ti.types.ndarray(dtype=WORD[SIZE[c.out] * 8], ndim=1)
    PARTS = ti.types.ndarray(dtype=ti.f32, ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    store = make_store(c.out, 1, SIZE[c.out] * 8, style)
    put_lse = make_put_lse(False)
    width = c.width_v
    each = width if style == "cpu" else 1
    across = 1 if style == "cpu" else width
    warps, columns = BLOCK // 32, -(-width // 32)

    @ti.func
    def address(row, where, which):
        """(of the row's first element, of its log-sum-exp) in the result."""
        rows = which[N.queries] * c.group
        return in_result(row // rows, row % rows, c.group, which[N.out_lse_first], where, which)

    @ti.func
    def item(i, parts: ti.template(), part_lse: ti.template(), out: ti.template(), lse: ti.template(), where, which,
             factors):  # fmt: skip
        row, column = i // across, i % across
        m, l = ti.f32(MASKED), ti.f32(0.0)
        first = which[N.lse_first] + row * which[N.splits]
        for s in range(which[N.splits]):
            m = ti.max(m, part_score(part_lse[first + s]))
        if m > ti.f32(SEEN):
            for s in range(which[N.splits]):
                l = l + exp2(part_score(part_lse[first + s]) - m)
        at, lse_at = address(row, where, which)
        inverse = ti.f32(0.0)
        if l > ti.f32(0.0):
            inverse = ti.f32(1.0) / l
        for e in range(each):
            d = column + e
            x = ti.f32(0.0)
            for s in range(which[N.splits]):
                part = parts[which[N.part_first] + (row * which[N.splits] + s) * width + d]
                x = x + exp2(part_score(part_lse[first + s]) - m) * part
            store(out, at + d, ti.Vector([x * inverse]), ti.f32(1.0))
        if column == 0:
            put_lse(lse, lse_at, m, l, factors)

    @ti.func
    def block_of_row(i, parts: ti.template(), part_lse: ti.template(), out: ti.template(), lse: ti.template(), where,
                     which, factors):  # fmt: skip
        """A row: the warps share the splits, the lanes of each the columns; a few parts are in flight in each lane."""
        weights = ti.simt.block.SharedArray((MOST_SPLITS,), ti.f32)
        sums = ti.simt.block.SharedArray((warps * width,), ti.f32)
        thread, row = i % BLOCK, i // BLOCK
        lane, warp = thread % 32, thread // 32
        first = which[N.lse_first] + row * which[N.splits]
        m, l = ti.f32(MASKED), ti.f32(0.0)
        for n in range((which[N.splits] + 31) // 32):
            m = ti.max(m, part_score(part_lse[first + ti.min(n * 32 + lane, which[N.splits] - 1)]))
        m = highest_over(m, WHOLE)
        ti.simt.block.sync()
        for n in range((which[N.splits] + 31) // 32):
            s = n * 32 + lane
            if s < which[N.splits]:
                w = ti.select(m > ti.f32(SEEN), exp2(part_score(part_lse[first + s]) - m), ti.f32(0.0))
                weights[s] = w  # each warp writes the same
                l = l + w
        l = sum_over(l, WHOLE)
        ti.simt.block.sync()
        x = ti.Vector([ti.f32(0.0)] * columns)
        for n in range((which[N.splits] + warps * IN_FLIGHT - 1) // (warps * IN_FLIGHT)):
            part = ti.Vector([ti.f32(0.0)] * (columns * IN_FLIGHT))
            w = ti.Vector([ti.f32(0.0)] * IN_FLIGHT)
            for z in ti.static(range(IN_FLIGHT)):
                s = (n * IN_FLIGHT + z) * warps + warp
                if s < which[N.splits]:
                    w[z] = weights[s]
                    for y in ti.static(range(columns)):
                        if y * 32 + lane < width:
                            at = which[N.part_first] + (row * which[N.splits] + s) * width
                            part[z * columns + y] = parts[at + y * 32 + lane]
            for z in ti.static(range(IN_FLIGHT)):
                for y in ti.static(range(columns)):
                    x[y] += w[z] * part[z * columns + y]
        for y in ti.static(range(columns)):
            if y * 32 + lane < width:
                sums[warp * width + y * 32 + lane] = x[y]
        ti.simt.block.sync()
        at, lse_at = address(row, where, which)
        inverse = ti.f32(0.0)
        if l > ti.f32(0.0):
            inverse = ti.f32(1.0) / l
        for y in ti.static(range(-(-width // BLOCK))):
            d = y * BLOCK + thread
            if d < width:
                total = ti.f32(0.0)
                for z in ti.static(range(warps)):
                    total = total + sums[z * width + d]
                store(out, at + d, ti.Vector([total * inverse]), ti.f32(1.0))
        if thread == 0:
            put_lse(lse, lse_at, m, l, factors)

    loop = make_loop(style, serial, block_of_row if style == "cuda" else item, N.tasks)

    @ti.kernel
    def merge(parts: PARTS, part_lse: BITS, out: OUT, lse: BITS, where: WHERE, which: WHICH, factors: FACTORS):
        loop(parts, which, (parts, part_lse, out, lse, where, which, factors))

    return merge


make_merge.fast_math = True


def make_mass(style, c):
    """The attention mass of each visible key: how much weight the query rows of its KV head give it in all.

    mass(q, k, lens, table, k_scale, lse, mass, where, which, factors): `lse` holds the float32 bits of what attention
    left, `mass` is (batch, heads, capacity) by slots and zero where nobody looks. Items are batch * heads * capacity,
    the extent of q.
    """
    element = ELEMENT[c.cache] if style == "cpu" else WORD[c.bits]
    Q = ti.types.ndarray(dtype=WORD[SIZE[c.query] * 8], ndim=1)
    K = ti.types.ndarray(dtype=element, ndim=1)
    LENS = ti.types.ndarray(dtype=INDEX[c.lens_bits], ndim=1)
    TABLE = ti.types.ndarray(dtype=INDEX[c.table_bits], ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if c.scale == "f16" else ti.u32, ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    MASS = ti.types.ndarray(dtype=ti.f32, ndim=1)
    seen_by, run, visible, score = make_seen(c), make_run(c), make_visible(c), make_score(c)
    k_place, scale_place = make_place(c, P.k_step, P.k_block), make_place(c, P.scale_step, P.scale_block)
    k_inner = make_inner(*c.k_inner)
    load = make_elements(style, c)
    load_q = make_load(c.query, 1, SIZE[c.query] * 8)
    scale_value = make_bits_to_f32(c.scale) if c.scale else None
    unit = c.unit
    units = c.width // unit

    @ti.func
    def item(i, q: ti.template(), k: ti.template(), lens: ti.template(), table: ti.template(), k_scale: ti.template(),
             lse: ti.template(), mass: ti.template(), where, which, factors):  # fmt: skip
        index, bh = i % which[N.capacity], i // which[N.capacity]
        b, h = bh // which[N.heads], bh % which[N.heads]
        seen = seen_by(b, lens, where, which)
        slot = -1
        if index < seen[S.count]:
            slot = run(b, index, seen, table, where, which)[0]
        if slot >= 0:
            row = where[P.k_first] + b * where[P.k_batch] + h * where[P.k_head] + k_place(slot, where)
            factor = ti.f32(1.0)
            if ti.static(c.scale != ""):
                factor = scale_value(
                    k_scale[
                        where[P.k_scale_first]
                        + b * where[P.scale_batch]
                        + h * where[P.scale_head]
                        + scale_place(slot, where)
                    ]
                )
            total = ti.f32(0.0)
            for r in range(which[N.queries] * c.group):
                t = r // c.group
                at = row_address(b, h, r, c.group, which[N.queries], where[P.q_first], where[P.q_batch],
                                 where[P.q_head], where[P.q_query])  # fmt: skip
                dot = ti.f32(0.0)
                for u in range(units):
                    x = load(k, row + k_inner(u))
                    for e in ti.static(range(unit)):
                        dot = dot + x[e] * load_q(q, at + u * unit + e)[0]
                bits = lse[which[N.out_lse_first] + (bh * c.group + r % c.group) * which[N.queries] + t]
                if bits != ti.u32(MINUS_INFINITY) and visible(t, index, seen, which):
                    logit = score(dot * factor, factors[F.scale], factors[F.cap])
                    total = total + exp2(ti.min(logit - ti.bit_cast(bits, ti.f32) / factors[F.lse], ti.f32(0.0)))
            mass[which[N.mass_first] + bh * which[N.capacity] + slot] = total

    loop = make_loop(style, False, item, N.tasks)

    @ti.kernel
    def mass_of_keys(q: Q, k: K, lens: LENS, table: TABLE, k_scale: SC, lse: BITS, mass: MASS, where: WHERE,
                     which: WHICH, factors: FACTORS):  # fmt: skip
        loop(q, which, (q, k, lens, table, k_scale, lse, mass, where, which, factors))

    return mass_of_keys


make_mass.fast_math = True


class Two(NamedTuple):
    """Numbers of a merge of two states: items, extents of the last leading axes, first entries of the results."""

    items: int = 0
    extent_1: int = 1
    extent_2: int = 1
    out_first: int = 0
    lse_first: int = 0


T = Two(*range(len(Two._fields)))
TWO = ti.types.vector(len(Two._fields), ti.i32)
OUT_A, OUT_B, LSE_A, LSE_B = 0, 4, 8, 12  # of each, three strides and the first entry
STRIDES = ti.types.vector(16, ti.i32)


def make_merge_states(style, width, code_a, code_b, code_out):
    """merge(out_a, out_b, lse_a, lse_b, out, lse, strides, two, factors): one state of two; items are rows * width.

    `factors.lse` turns the base of the log-sum-exps into 2. The extent of `out_a` is the number of items.
    """
    A = ti.types.ndarray(dtype=WORD[SIZE[code_a] * 8], ndim=1)
    B = ti.types.ndarray(dtype=WORD[SIZE[code_b] * 8], ndim=1)
    OUT = ti.types.ndarray(dtype=WORD[SIZE[code_out] * 8], ndim=1)
    BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)
    load_a, load_b = make_load(code_a, 1, SIZE[code_a] * 8), make_load(code_b, 1, SIZE[code_b] * 8)
    store = make_store(code_out, 1, SIZE[code_out] * 8, style)

    @ti.func
    def address(row, which: ti.template(), strides, two):
        inner, rest = row % two[T.extent_2], row // two[T.extent_2]
        middle, outer = rest % two[T.extent_1], rest // two[T.extent_1]
        return outer * strides[which] + middle * strides[which + 1] + inner * strides[which + 2] + strides[which + 3]

    @ti.func
    def item(i, out_a: ti.template(), out_b: ti.template(), lse_a: ti.template(), lse_b: ti.template(),
             out: ti.template(), lse: ti.template(), strides, two, factors):  # fmt: skip
        row, d = i // width, i % width
        a_bits = lse_a[address(row, LSE_A, strides, two)]
        b_bits = lse_b[address(row, LSE_B, strides, two)]
        a_seen, b_seen = a_bits != ti.u32(MINUS_INFINITY), b_bits != ti.u32(MINUS_INFINITY)
        x, bits = ti.f32(0.0), ti.u32(MINUS_INFINITY)
        if a_seen or b_seen:
            a, b = ti.f32(MASKED), ti.f32(MASKED)
            if a_seen:
                a = ti.bit_cast(a_bits, ti.f32) * factors[F.lse]
            if b_seen:
                b = ti.bit_cast(b_bits, ti.f32) * factors[F.lse]
            m = ti.max(a, b)
            wa, wb = exp2(a - m), exp2(b - m)
            inverse = ti.f32(1.0) / (wa + wb)
            if a_seen:
                x = x + wa * inverse * load_a(out_a, address(row, OUT_A, strides, two) + d)[0]
            if b_seen:
                x = x + wb * inverse * load_b(out_b, address(row, OUT_B, strides, two) + d)[0]
            bits = ti.bit_cast((m + ti.log(wa + wb) * ti.f32(LOG2E)) / factors[F.lse], ti.u32)
        store(out, two[T.out_first] + i, ti.Vector([x]), ti.f32(1.0))
        if d == 0:
            lse[two[T.lse_first] + row] = bits

    loop = make_loop(style, False, item, T.items)

    @ti.kernel
    def merge_states(out_a: A, out_b: B, lse_a: BITS, lse_b: BITS, out: OUT, lse: BITS, strides: STRIDES, two: TWO,
                     factors: FACTORS):  # fmt: skip
        loop(out_a, two, (out_a, out_b, lse_a, lse_b, out, lse, strides, two, factors))

    return merge_states


make_merge_states.fast_math = True
