"""A consumer of `sm90.attend`: the products of 64 query rows, and the weights between them."""

from tikv.kernels.attention.addresses import make_output_offsets, make_query_row
from tikv.kernels.attention.parameters import LOG2E, LOWEST, MASKED_BITS, MINUS_INFINITY, NOT_STORED, P, X
from tikv.kernels.attention.sm80.instructions import HALVES, INFINITE
from tikv.kernels.attention.sm80.tiles import has_bounds, make_tile_bounds
from tikv.kernels.attention.sm90 import ir
from tikv.kernels.attention.sm90.coded import make_half_at
from tikv.kernels.attention.sm90.eight import make_find_factors, make_load_codes, make_scale_scores, operand_of
from tikv.kernels.attention.sm90.merge import next_part
from tikv.kernels.attention.sm90.terms import make_add_slopes, make_see_in_tree, make_start_rows, rise_of
from tikv.kernels.attention.sm90.tiles import (
    GROUP,
    KEYS_OF,
    PANEL_ROW,
    PIECE,
    ROWS,
    B,
    R,
    computes_in_turn,
    instructions,
    is_transposed,
    make_gap_of,
    make_index_in_tile,
    make_is_whole,
    make_slot_of,
    make_stage_of,
    make_tile_at,
    memory_for,
    merges_parts,
    piece_offset,
)
from tikv.kernels.attention.softmax import inverse_of, is_finite, is_nan, make_store_lse, part_lse
from tikv.kernels.attention.task import T
from tikv.kernels.attention.tree import make_depth_of, make_index_of
from tikv.kernels.attention.visible import make_in_bounds
from tikv.kernels.codec import SIZE, WORD, make_store
from tikv.kernels.lanes import ALL, butterfly_max, butterfly_sum
from tikv.runtime import ti

QUAD = [2, 1]  # distances of the lanes that share a row


def make_consume(x, parts, c):
    """consume(thread, half, shared, barriers, seen, ...): attend for one of the two halves of a task's rows."""
    ext = instructions()
    keys, memory = KEYS_OF[c.width], memory_for(x, parts, c)
    TRANSPOSED = is_transposed(c)
    NS, NO, NP = keys // 2, c.width // 2, keys // (8 if TRANSPOSED else 4)
    INTEGERS = NS if c.eight and not TRANSPOSED else 0
    of_scores, of_values = operand_of(c) if c.eight else c.query, "e4m3" if TRANSPOSED else c.query
    scores, values = getattr(ext, f"scores_{of_scores}_{c.width}"), getattr(ext, f"values_{of_values}_{c.width}")
    wait_scores, wait_values = getattr(ext, f"wait_{'integers' if INTEGERS else 1}_{NS}"), getattr(ext, f"wait_0_{NO}")
    load_queries = make_load_codes(memory, c) if c.eight else make_load_queries(c)
    weigh, pack, store_rows = make_weigh_used(x.consumers == 1, c), make_pack(c), make_store_rows(x.paired, parts, c)
    FENCES = c.cache in HALVES or c.eight  # those that convert codes have seen to it
    find_factors, scale_scores = make_find_factors(c), make_scale_scores(c)
    add_spoiled, start_rows, STAGES = make_add_spoiled(parts, c), make_start_rows(c), memory.stages
    tile_at, MERGES, TURNS = make_tile_at(c), merges_parts(x, parts, c), x.consumers == 2
    IN_TURN, stage_of = computes_in_turn(parts, c), make_stage_of(STAGES)
    begin_merged, close, take_merged = make_close(x.rows, c.width)
    restore = make_restore(parts, c)
    # Lower halves of descriptors: the address, and above it how far 64 columns are from the next, of use for V only.
    OF_KEYS, OF_VALUES = 1 << 16, (1 if TRANSPOSED else keys * PANEL_ROW >> 4) << 16

    @ti.func
    def consume(thread, half, shared, barriers, seen, visible, task, arrays: ti.template(), terms: ti.template(),
                strides, params, scalars):  # fmt: skip
        v, table, v_scale, out, lse = ti.static((arrays[2], arrays[4], arrays[6], arrays[7], arrays[8]))
        lane = thread % 32
        row = task[T.row] + half * ir.ROWS  # first of the warpgroup
        if ti.static(not IN_TURN) or seen[R.before] == 0:
            load_queries(thread % GROUP, half, row, shared, task, strides, params)
        first_row = row + thread % GROUP // 32 * 16 + lane // 4  # of the thread's two; the other is 8 further on
        qd = ti.u32(OF_KEYS) + ((shared + ti.cast(half * (ir.ROWS * PANEL_ROW), ti.u32)) >> 4)
        kd = ti.u32(OF_KEYS) + ((shared + ti.u32(memory.k)) >> 4)
        vd = ti.u32(OF_VALUES) + ((shared + ti.u32(memory.v)) >> 4)
        m = [ti.f32(LOWEST) for _ in range(2)]
        l = [ti.f32(0.0) for _ in range(2)]
        slope, stand = [ti.f32(0.0) for _ in range(2)], [0 for _ in range(2)]
        start_rows(first_row, lane, visible, task, terms, params, m, l, slope, stand)
        fade = [ti.f32(1.0) for _ in range(2)]
        acc = [ti.f32(0.0) for _ in range(NO)]
        s = [ti.f32(0.0) for _ in range(NS)]
        integers = [ti.i32(0) for _ in range(INTEGERS)]
        p = [ti.u32(0) for _ in range(NP)]
        factor, of_result = [scalars[X.logit_scale] for _ in range(2)], ti.f32(1.0)
        if ti.static(c.eight):
            of_result = find_factors(thread, barriers, task, arrays, strides, factor)
        own_turn, other_turn, both = ti.cast(half + 3, ti.u32), ti.cast(4 - half, ti.u32), ti.u32(2 * GROUP)
        tiles = seen[R.tiles]
        stage, phase = stage_of(seen[R.before])  # of a tile
        other, other_phase = stage_of(seen[R.before] + 2 * STAGES - 1)  # of the one before
        exists = [ti.u32(0) for _ in range(4)]
        if ti.static(TURNS):
            if half == 1 and tiles > 0:
                ext.let_pass(other_turn, both)
        part, merged = 0, shared + ti.u32(memory.merged)
        if ti.static(MERGES):
            part = params[P.least_share]
            if part > 0:
                begin_merged(thread % GROUP, half, merged)
        more = ti.u32(0)
        for n in range(tiles):
            begins = 0
            if ti.static(MERGES):
                if part > 0 and n > 0 and tile_at(n, seen) % ti.max(part, 1) == 0:
                    begins = 1
            there, note = (
                barriers + ti.cast(B.k_there + stage * 8, ti.u32),
                barriers + ti.cast(B.exists + stage * 16, ti.u32),
            )
            ext.barrier_wait(there, phase)
            ext.read_16(*exists, note)
            if ti.static(FENCES):
                ext.for_products()
            if ti.static(TURNS):
                ext.meet(own_turn, both)
            of_k = kd + ti.cast(stage * (memory.tile >> 4), ti.u32)
            of_v = vd + ti.cast(other * (memory.tile_v >> 4), ti.u32)
            # The first time there are no values yet: what the product makes of no weights is not used.
            if ti.static(not MERGES):
                more = ti.cast(n > 1, ti.u32)
            if ti.static(INTEGERS > 0):
                scores(*integers, qd, of_k)
            else:
                scores(*s, qd, of_k)
            if n > 0:
                there = barriers + ti.cast(B.v_there + other * 8, ti.u32)
                ext.barrier_wait(there, other_phase)
                if ti.static(FENCES):
                    ext.for_products()
            values(*acc, *p, of_v, more)
            if ti.static(TURNS):
                if half == 0 or n + 1 < tiles:
                    ext.let_pass(other_turn, both)
            if ti.static(INTEGERS > 0):
                wait_scores(*integers)
                scale_scores(lane, stage, barriers, integers, s)
            else:
                wait_scores(*s)
            if lane == 0:
                done_k = barriers + ti.cast(B.k_done + stage * 8, ti.u32)
                ext.barrier_arrive(done_k)
            if ti.static(MERGES):
                more = ti.cast(n > 0 and begins == 0, ti.u32)
                if begins != 0:
                    wait_values(*acc)
                    close(thread % GROUP, half, merged, m, l, acc)
                    for r in ti.static(range(2)):
                        m[r], l[r] = ti.f32(LOWEST), ti.f32(0.0)
            grown = weigh(n, first_row, lane, exists, seen, visible, task, terms, params, scalars, factor, slope, stand,
                          s, m, l, fade)  # fmt: skip
            wait_values(*acc)
            if lane == 0 and n > 0:
                done = barriers + ti.cast(B.v_done + other * 8, ti.u32)
                ext.barrier_arrive(done)
            if grown != 0:
                for i in ti.static(range(NO)):
                    acc[i] *= fade[ti.static(i // 2 % 2)]
            pack(s, p)
            other, other_phase = stage, phase
            stage += 1
            if stage == STAGES:
                stage, phase = 0, phase ^ ti.u32(1)
        if tiles > 0:
            there = barriers + ti.cast(B.v_there + other * 8, ti.u32)
            ext.barrier_wait(there, other_phase)
            ext.for_products()
            of_v = vd + ti.cast(other * (memory.tile_v >> 4), ti.u32)
            if ti.static(not MERGES):
                more = ti.cast(tiles > 1, ti.u32)
            values(*acc, *p, of_v, more)
            wait_values(*acc)
            if ti.static(IN_TURN) and lane == 0:
                done = barriers + ti.cast(B.v_done + other * 8, ti.u32)
                ext.barrier_arrive(done)
        if ti.static(MERGES):
            if part > 0:
                close(thread % GROUP, half, merged, m, l, acc)
                take_merged(thread % GROUP, half, merged, m, l, acc)
        store_rows(first_row, lane, tiles, task, m, l, acc, of_result, out, lse, strides, params, scalars)
        if ti.static(c.invariant):
            restore(first_row, lane, barriers, seen, visible, task, l, acc, v, table, v_scale, out, strides, params)
        elif ti.static(c.masked):
            add_spoiled(first_row, lane, barriers, seen, visible, task, terms, v, table, v_scale, out, strides, params)

    return consume


def make_close(rows, width):
    """Functions that merge parts in shared memory, by the arithmetic of `sm90.merge`.

    begin(thread, half, merged): nothing is merged. close(thread, half, merged, m, l, acc): a part is, whose results are
    `acc`. take(thread, half, merged, m, l, acc): these become what has been merged. Behind the numbers of each thread
    lie the maximum and the sum of each row.
    """
    ext, COUNT, STRIDE, OF_ROWS = instructions(), width // 8, rows * 2 * PIECE, rows * width * 4

    @ti.func
    def own_place(thread, half, merged):
        return merged + ti.cast((thread + half * GROUP) * PIECE, ti.u32)

    @ti.func
    def row_place(thread, half, merged, r: ti.template()):
        row = half * ir.ROWS + thread // 32 * 16 + thread % 32 // 4 + ti.static(8 * r)
        return merged + ti.cast(OF_ROWS + row * 8, ti.u32)

    @ti.func
    def begin(thread, half, merged):
        place, nothing, lowest = own_place(thread, half, merged), ti.u32(0), ti.u32(MASKED_BITS)
        for j in ti.static(range(COUNT)):
            to = place + ti.u32(j * STRIDE)
            ext.write_16(to, nothing, nothing, nothing, nothing)
        for r in ti.static(range(2)):
            to = row_place(thread, half, merged, r)
            behind = to + ti.u32(4)
            ext.write_4(to, lowest)
            ext.write_4(behind, nothing)
        ext.warp_meets()

    @ti.func
    def close(thread, half, merged, m: ti.template(), l: ti.template(), acc: ti.template()):
        place = own_place(thread, half, merged)
        fades, weights, inverses = [[ti.f32(0.0) for _ in range(2)] for _ in range(3)]
        for r in ti.static(range(2)):
            at, top_bits, total_bits = row_place(thread, half, merged, r), ti.u32(0), ti.u32(0)
            behind = at + ti.u32(4)
            ext.read_4(top_bits, at)
            ext.read_4(total_bits, behind)
            ext.warp_meets()
            total = butterfly_sum(l[r], QUAD)
            inverses[r] = inverse_of(total)
            top, fade, weight = next_part(part_lse(m[r], total), ti.bit_cast(top_bits, ti.f32))
            fades[r], weights[r] = fade, weight
            top_bits = ti.bit_cast(top, ti.u32)
            total_bits = ti.bit_cast(ti.bit_cast(total_bits, ti.f32) * fade + weight, ti.u32)
            ext.write_4(at, top_bits)
            ext.write_4(behind, total_bits)
            ext.warp_meets()
        for j in ti.static(range(COUNT)):
            to, y = place + ti.u32(j * STRIDE), [ti.u32(0) for _ in range(4)]
            ext.read_16(*y, to)
            for e in ti.static(range(4)):
                x = acc[ti.static(4 * j + e)] * inverses[ti.static(e // 2)]
                x = ti.bit_cast(y[e], ti.f32) * fades[ti.static(e // 2)] + x * weights[ti.static(e // 2)]
                y[e] = ti.bit_cast(x, ti.u32)
            ext.write_16(to, *y)

    @ti.func
    def take(thread, half, merged, m: ti.template(), l: ti.template(), acc: ti.template()):
        place = own_place(thread, half, merged)
        for r in ti.static(range(2)):
            at, top_bits, total_bits = row_place(thread, half, merged, r), ti.u32(0), ti.u32(0)
            behind = at + ti.u32(4)
            ext.read_4(top_bits, at)
            ext.read_4(total_bits, behind)
            m[r] = ti.bit_cast(top_bits, ti.f32)
            l[r] = ti.bit_cast(ti.select(thread % 4 == 0, total_bits, ti.u32(0)), ti.f32)  # lanes have parts of a sum
        for j in ti.static(range(COUNT)):
            to, y = place + ti.u32(j * STRIDE), [ti.u32(0) for _ in range(4)]
            ext.read_16(*y, to)
            for e in ti.static(range(4)):
                acc[ti.static(4 * j + e)] = ti.bit_cast(y[e], ti.f32)

    return begin, close, take


def make_pack(c):
    """pack(s, p): weights become the operand that the product with V takes, rounded."""
    NS, TRANSPOSED = KEYS_OF[c.width] // 2, is_transposed(c)
    of_two, of_four = (getattr(instructions(), name) for name in (f"pack_{c.query}", "codes_e4m3"))

    @ti.func
    def pack(s: ti.template(), p: ti.template()):
        if ti.static(TRANSPOSED):  # in the order that `sm90.ir.values_of_codes` describes
            for i in ti.static(range(NS // 4)):
                o = ti.static(i // 2 * 8 + i % 2 * 2)
                of_four(p[i], s[o], s[ti.static(o + 1)], s[ti.static(o + 4)], s[ti.static(o + 5)])
        else:
            for i in ti.static(range(NS // 2)):
                of_two(p[i], s[ti.static(2 * i)], s[ti.static(2 * i + 1)])

    return pack


def make_load_queries(c):
    """load_queries(thread, half, row, shared, ...): copies a warpgroup's rows to shared memory; 0 after the last."""
    ext = instructions()
    query_row = make_query_row(c)
    pieces = c.width * 2 // PIECE

    @ti.func
    def load_queries(thread, half, row, shared, task, strides, params):
        q, threads = ti.u64(0), ti.u32(GROUP)
        ext.address_q(q)
        for j in range(ir.ROWS * pieces // GROUP):
            number = j * GROUP + thread
            behind, piece = number // pieces, number % pieces
            r, rows = row + behind, params[P.queries] * c.group
            at = shared + piece_offset(half * ir.ROWS, behind, piece, ROWS)
            first = query_row(task[T.sequence], task[T.head], ti.min(r, rows - 1), strides, params)
            address = q + ti.cast(first, ti.u64) * ti.u64(2) + ti.cast(piece * PIECE, ti.u64)
            size = ti.select(r < rows, ti.u32(PIECE), ti.u32(0))
            ext.copy_16(at, address, size)
        ext.copies_wait()
        ext.for_products()
        barrier = ti.cast(half + 1, ti.u32)
        ext.meet(barrier, threads)

    return load_queries


def make_weigh_used(few, c):
    """weigh(n, ..., fade): as that of `make_weigh`; where a task may have `few` rows, its own alone are weighed.

    The scores of a warp's other rows become 0.
    """
    NS, weigh, weigh_first, rows_behind = KEYS_OF[c.width] // 2, make_weigh(2, c), make_weigh(1, c), make_rows_behind(c)

    @ti.func
    def weigh_used(n, row, lane, exists: ti.template(), seen, visible, task, terms: ti.template(), params, scalars,
                   factor: ti.template(), slope: ti.template(), stand: ti.template(), s: ti.template(),
                   m: ti.template(), l: ti.template(), fade: ti.template()):  # fmt: skip
        grown = 0
        used = rows_behind(task, params) - (row - lane // 4)  # of the warp's 16
        if used > 8:
            grown = weigh(n, row, lane, exists, seen, visible, task, terms, params, scalars, factor, slope, stand, s, m,
                          l, fade)  # fmt: skip
        else:
            if used > 0:
                grown = weigh_first(n, row, lane, exists, seen, visible, task, terms, params, scalars, factor, slope,
                                    stand, s, m, l, fade)  # fmt: skip
            for i in ti.static(range(NS)):
                if ti.static(i // 2 % 2 == 1) or used <= 0:
                    s[i] = ti.f32(0.0)
        return grown

    return weigh_used if few else weigh


def make_weigh(rows, c):
    """weigh(n, row, lane, exists, ..., s, m, l, fade) -> not 0 if a maximum grew: scores of tile n become weights.

    Those of a thread's two `rows`, or of the first alone.
    """
    ext = instructions()
    exp2, inverse, product_less = ext.exp2_flushed if c.invariant else ext.exp2, ext.inverse, ext.product_less
    keys = KEYS_OF[c.width]
    OWN = [i for i in range(keys // 2) if i // 2 % 2 < rows]  # of the scores
    mask, tile_at, is_whole, add_slopes = make_mask(rows, c), make_tile_at(c), make_is_whole(c), make_add_slopes(c)
    gap_of, (UP, LAG) = make_gap_of(c), rise_of(c)

    @ti.func
    def weigh(n, row, lane, exists: ti.template(), seen, visible, task, terms: ti.template(), params, scalars,
              factor: ti.template(), slope: ti.template(), stand: ti.template(), s: ti.template(), m: ti.template(),
              l: ti.template(), fade: ti.template()):  # fmt: skip
        at, scale = tile_at(n, seen), [factor[0], factor[1]]
        if ti.static(c.softcap):
            cap, steep = scalars[X.softcap], [factor[r] * ti.f32(2.0 * LOG2E) for r in range(2)]
            for i in ti.static(OWN):  # cap * tanh(s * scale)
                grows, above, part = s[i] * steep[ti.static(i // 2 % 2)], ti.f32(0.0), ti.f32(0.0)
                exp2(above, grows)
                above += ti.f32(1.0)
                inverse(part, above)
                s[i] = cap - ti.f32(2.0) * cap * part
            scale[0], scale[1] = ti.f32(1.0), ti.f32(1.0)
        if ti.static(c.alibi):
            add_slopes(at, gap_of(n, seen), scale, lane, slope, stand, visible, task, terms, params, s)
            scale[0], scale[1] = ti.f32(1.0), ti.f32(1.0)
        whole = ti.cast((exists[0] & exists[1] & exists[2] & exists[3]) == ti.u32((1 << keys // 4) - 1), ti.i32)
        if ti.static(has_bounds(c)):
            whole = whole * is_whole(at, seen)
        if whole == 0:
            mask(at, gap_of(n, seen), row, lane, exists, visible, task, terms, params, s)
        grown, higher = 0, [ti.f32(0.0) for _ in range(2)]
        tops = [s[i] for i in range(8)]  # several of each row: shorter chains
        for i in ti.static([i for i in OWN if i >= 8]):
            tops[ti.static(i % 8)] = ti.max(tops[ti.static(i % 8)], s[i])
        for r in ti.static(range(rows)):
            o = ti.static(2 * r)
            top = ti.max(
                ti.max(tops[o], tops[ti.static(o + 1)]), ti.max(tops[ti.static(o + 4)], tops[ti.static(o + 5)])
            )
            higher[r] = ti.max(butterfly_max(top, QUAD) * scale[r] - ti.f32(UP), m[r])
            if ti.static(c.invariant):  # whether other rows of the warp grow must not matter
                higher[r] = ti.select(higher[r] > m[r] + ti.f32(LAG), higher[r], m[r])
            grown = ti.select(higher[r] > m[r] + ti.f32(LAG), 1, grown)
        grown = ti.simt.warp.any_nonzero(ti.u32(ALL), grown)
        if grown != 0:
            for r in ti.static(range(rows)):
                below = m[r] - higher[r]
                exp2(fade[r], below)
                m[r] = higher[r]
                l[r] *= fade[r]
        sums = [ti.f32(0.0) for _ in range(4)]
        for i in ti.static(OWN):
            below, weight = ti.f32(0.0), ti.f32(0.0)
            if ti.static(c.invariant):  # else the compiler does so where it can
                product_less(below, s[i], scale[ti.static(i // 2 % 2)], m[ti.static(i // 2 % 2)])
            else:
                below = s[i] * scale[ti.static(i // 2 % 2)] - m[ti.static(i // 2 % 2)]
            exp2(weight, below)
            s[i] = weight
            sums[ti.static(i % 4)] += weight
        for r in ti.static(range(rows)):
            l[r] += sums[ti.static(2 * r)] + sums[ti.static(2 * r + 1)]
        return grown

    return weigh


def make_mask(rows, c):
    """mask(at, row, lane, exists, ..., s): the scores of keys that a row does not see become -infinity.

    Of a thread's two `rows`, or of the first alone.
    """
    tile_bounds, depth_of = make_tile_bounds(c), make_depth_of(c)
    see_in_bounds, see_in_tree = make_see_in_bounds(c), make_see_in_tree(c)
    keys = KEYS_OF[c.width]
    NS, PART = keys // 2, keys // 4

    @ti.func
    def mask(at, gap, row, lane, exists: ti.template(), visible, task, terms: ti.template(), params,
             s: ti.template()):  # fmt: skip
        for r in ti.static(range(rows)):
            bounds, of_part = ti.Vector([0, 0, 0, 0]), 0
            if ti.static(has_bounds(c)):
                t = ti.min(row + ti.static(8 * r), params[P.queries] * c.group - 1) // c.group
                bounds = tile_bounds(depth_of(task[T.sequence], t, terms, params), visible, params)
                if ti.static(c.tree):  # of the four lanes of a row each looks up a part
                    first = at + (lane & 3) * PART
                    old = see_in_bounds(first, gap, bounds)
                    of_part = ti.cast(see_in_tree(old, first, t, bounds, visible, task, terms, params), ti.i32)
            for part in ti.static(range(4)):
                key_bits = exists[part]
                if ti.static(c.tree):
                    of_row = ti.simt.warp.shfl_sync_i32(ti.u32(ALL), of_part, (lane & ~3) + part)
                    key_bits = key_bits & ti.cast(of_row, ti.u32)
                elif ti.static(has_bounds(c)):
                    key_bits = key_bits & see_in_bounds(at + ti.static(part * PART), gap, bounds)
                key_bits = key_bits >> ti.cast((lane & 3) * 2, ti.u32)
                for i in ti.static(range(NS)):
                    key = ti.static(i // 4 * 8 + i % 2)
                    if ti.static(i // 2 % 2 == r and key // PART == part):
                        sees = (key_bits & ti.u32(1 << key % PART)) != ti.u32(0)
                        s[i] = ti.bit_cast(ti.select(sees, ti.bit_cast(s[i], ti.u32), ti.u32(MINUS_INFINITY)), ti.f32)

    return mask


def make_see_in_bounds(c):
    """see_in_bounds(first, gap, bounds): a bit for each key from index `first` on that is seen by `query_bounds`.

    Keys that are sinks lie `gap` further back.
    """
    bits_from = instructions().bits_from

    @ti.func
    def see_in_bounds(first, gap, bounds):
        low, high = bounds[0] + 1 - first, bounds[1] + 1 - first
        from_low, from_high = ti.u32(0), ti.u32(0)
        bits_from(from_low, low)
        bits_from(from_high, high)
        sees = from_low & ~from_high
        if ti.static(c.sinks):
            sinks, last_sink = bounds[2] + gap - first, ti.min(bounds[2], bounds[3] + 1) + gap - first
            from_sinks, from_last = ti.u32(0), ti.u32(0)
            bits_from(from_sinks, sinks)
            bits_from(from_last, last_sink)
            sees = (sees & from_sinks) | ~from_last
        return sees

    return see_in_bounds


def make_store_rows(paired, parts, c):
    """store_rows(row, lane, tiles, task, m, l, acc, ...): each lane stores its pairs of columns of two rows.

    Under `invariant` results are rounded as `merge` rounds them, and have no zero with a sign. Where parts are computed
    in turn, one without tiles has a note in place of its results.
    """
    ext = instructions()
    output_offsets, store_lse = make_output_offsets(parts, c), make_store_lse(parts)
    halves = c.out in HALVES
    name = f"store_{'halves' if halves else 'floats'}_{'' if paired else 'apart_'}{c.width}"
    store, pack = getattr(ext, name), getattr(ext, f"pack_{c.out}") if halves else None
    store_number, rows_behind = make_store(c.out, 1, SIZE[c.out] * 8, "cuda"), make_rows_behind(c)
    note_nothing = make_note_nothing(parts, c)

    @ti.func
    def store_rows(row, lane, tiles, task, m: ti.template(), l: ti.template(), acc: ti.template(), of_result,
                   out: ti.template(),
                   lse: ti.template(), strides, params, scalars):  # fmt: skip
        behind = rows_behind(task, params)
        if ti.static(computes_in_turn(parts, c)) and tiles == 0:
            note_nothing(row, lane, behind, task, lse, strides, params)
            behind = 0
        for r in ti.static(range(2)):
            total = butterfly_sum(l[r], QUAD)
            at_row = row + ti.static(8 * r)
            if at_row < behind:
                at, lse_at = output_offsets(task[T.kv_head], at_row, task[T.split], strides, params)
                inverse = inverse_of(total) * of_result
                to = ti.u64(0)
                ext.address_out(to)
                to += ti.cast(at + (lane & 3) * 2, ti.u64) * ti.u64(SIZE[c.out])
                y = [ti.f32(0.0) for _ in range(c.width // 4)]
                for i in ti.static(range(c.width // 4)):
                    y[i] = acc[ti.static(i // 2 * 4 + 2 * r + i % 2)] * inverse
                if ti.static(c.invariant and not parts):
                    for i in ti.static(range(c.width // 4)):
                        number = ti.select(y[i] == ti.f32(0.0), ti.f32(0.0), y[i])
                        column = (lane & 3) * 2 + ti.static(i // 2 * 8 + i % 2)
                        store_number(out, at + column, ti.Vector([number]), ti.f32(1.0))
                elif ti.static(halves):
                    words = [ti.u32(0) for _ in range(c.width // 8)]
                    for j in ti.static(range(c.width // 8)):
                        pack(words[j], y[ti.static(2 * j)], y[ti.static(2 * j + 1)])
                    store(to, *words)
                else:
                    store(to, *y)
                if (lane & 3) == 0:
                    store_lse(lse, lse_at, m[r], total, scalars)

    return store_rows


def make_note_nothing(parts, c):
    """note_nothing(row, lane, behind, task, lse, ...): notes for a lane's two rows that the part has no results."""
    output_offsets = make_output_offsets(parts, c)

    @ti.func
    def note_nothing(row, lane, behind, task, lse: ti.template(), strides, params):
        at_row = row + (lane & 1) * 8
        if (lane & 3) < 2 and at_row < behind:
            at = output_offsets(task[T.kv_head], at_row, task[T.split], strides, params)[1]
            lse[at] = ti.u32(NOT_STORED)

    return note_nothing


def make_rows_behind(c):
    """rows_behind(task, params) -> the row behind the task's last: if tokens are chosen, its rows are of one query."""

    @ti.func
    def rows_behind(task, params):
        behind = params[P.queries] * c.group
        if ti.static(c.index_bits > 0):
            behind = ti.min(behind, task[T.row] + c.rows)
        return behind

    return rows_behind


def make_restore(parts, c):
    """restore(row, lane, ..., l, acc, ...): under `invariant`, a number that sees infinities or NaNs of V is their sum.

    Whether a tile has been cleaned of them depends on other rows of the task. So if one was, or if a result is infinite
    or NaN, all keys that a row sees are looked at. A row whose weights are NaN stays so.
    """
    ext = instructions()
    tile_bounds, in_bounds, slot_of = make_tile_bounds(c), make_in_bounds(c), make_slot_of(c)
    half_at, output_offsets, rows_behind = make_half_at(c), make_output_offsets(parts, c), make_rows_behind(c)
    keys, index_in_tile = KEYS_OF[c.width], make_index_in_tile(c)
    infinite, out_infinite = INFINITE[c.query], {**INFINITE, "f32": 0x7F800000}[c.out]
    sign, nan = SIZE[c.out] * 8 - 16, {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000}[c.out]
    word = WORD[SIZE[c.out] * 8]

    @ti.func
    def restore(row, lane, barriers, seen, visible, task, l: ti.template(), acc: ti.template(), v: ti.template(),
                table: ti.template(), v_scale: ti.template(), out: ti.template(), strides, params):  # fmt: skip
        note, spoiled, sums = barriers + ti.u32(B.spoiled), ti.u32(0), ti.f32(0.0)
        ext.read_4(spoiled, note)
        for i in ti.static(range(len(acc))):
            sums += acc[i]
        counts = [is_nan(butterfly_sum(l[r], QUAD)) for r in range(2)]
        looks = spoiled != ti.u32(0) or not is_finite(sums)
        for n in range(ti.select(looks, c.width // 2, 0)):
            other, column = n & 1, (n >> 2) * 8 + (lane & 3) * 2 + (n >> 1 & 1)
            thread_row, missing = row + other * 8, ti.u32(0)
            is_of_nan = ti.select(other == 0, ti.cast(counts[0], ti.i32), ti.cast(counts[1], ti.i32))
            if thread_row < rows_behind(task, params) and is_of_nan == 0:
                t = thread_row // c.group
                bounds = tile_bounds(t, visible, params)
                for k in range(seen[R.tiles] * keys):
                    index, sees = index_in_tile(k % keys, k // keys, seen, visible), 1
                    if ti.static(has_bounds(c)):
                        sees = in_bounds(index, bounds[0], bounds[1], bounds[2], bounds[3])
                    slot = -1
                    if sees != 0:
                        slot = slot_of(index, seen, visible, task, table, strides, params)
                    if slot >= 0:
                        half = half_at(slot, column, task, v, v_scale, strides)
                        if (half & ti.u32(infinite)) == ti.u32(infinite):
                            is_no_number = (half & ti.u32(0x7FFF)) != ti.u32(infinite)
                            new = ti.select(is_no_number, ti.u32(nan), ti.u32(out_infinite))
                            new = new | ((half & ti.u32(0x8000)) << ti.u32(sign))
                            missing = ti.select(missing != ti.u32(0) and missing != new, ti.u32(nan), new)
                if missing != ti.u32(0):
                    to = output_offsets(task[T.kv_head], thread_row, task[T.split], strides, params)[0]
                    out[to + column] = ti.cast(missing, word)

    return restore


def make_add_spoiled(parts, c):
    """add_spoiled(row, lane, ...): adds infinities and NaNs that the producer removed from V to the rows that see them.

    One of them makes the sum infinite or NaN, whatever its weight. Each thread adds to the results that it has stored
    itself.
    """
    ext = instructions()
    query_bounds, in_bounds, slot_of = make_tile_bounds(c), make_in_bounds(c), make_slot_of(c)
    depth_of, index_of = make_depth_of(c), make_index_of(c)
    half_at, output_offsets = make_half_at(c), make_output_offsets(parts, c)
    keys, tile_at, is_whole, index_in_tile = KEYS_OF[c.width], make_tile_at(c), make_is_whole(c), make_index_in_tile(c)
    infinite, out_infinite = INFINITE[c.query], {**INFINITE, "f32": 0x7F800000}[c.out]
    sign, nan = SIZE[c.out] * 8 - 16, {"f16": 0x7E00, "bf16": 0x7FC0, "f32": 0x7FC00000}[c.out]
    word = WORD[SIZE[c.out] * 8]

    @ti.func
    def add_spoiled(row, lane, barriers, seen, visible, task, terms: ti.template(), v: ti.template(),
                    table: ti.template(), v_scale: ti.template(), out: ti.template(), strides, params):  # fmt: skip
        note, spoiled = barriers + ti.u32(B.spoiled), ti.u32(0)
        ext.read_4(spoiled, note)
        tiles = ti.select(spoiled != ti.u32(0), seen[R.tiles], 0)
        for n in range(tiles * keys * 2):
            key, thread_row = n >> 1, row + (n & 1) * 8
            at, index, slot = tile_at(key // keys, seen), index_in_tile(key % keys, key // keys, seen, visible), -1
            if is_whole(at, seen) == 0 and index < seen[R.end] and thread_row < params[P.queries] * c.group:
                bounds = query_bounds(depth_of(task[T.sequence], thread_row // c.group, terms, params), visible, params)
                counts_as = index_of(task[T.sequence], thread_row // c.group, index, bounds, visible, terms, params)
                if in_bounds(counts_as, bounds[0], bounds[1], bounds[2], bounds[3]) != 0:
                    slot = slot_of(index, seen, visible, task, table, strides, params)
            if slot >= 0:
                to = output_offsets(task[T.kv_head], thread_row, task[T.split], strides, params)[0]
                for j in range(ti.static(c.width // 4)):
                    column = (j >> 1) * 8 + (lane & 3) * 2 + (j & 1)
                    half = half_at(slot, column, task, v, v_scale, strides)
                    if (half & ti.u32(infinite)) == ti.u32(infinite):
                        is_nan = (half & ti.u32(0x7FFF)) != ti.u32(infinite)
                        new = ti.select(is_nan, ti.u32(nan), ti.u32(out_infinite))
                        new = new | ((half & ti.u32(0x8000)) << ti.u32(sign))
                        old = ti.cast(out[to + column], ti.u32)
                        if (old & ti.u32(out_infinite)) == ti.u32(out_infinite) and old != new:
                            new = ti.u32(nan)
                        out[to + column] = ti.cast(new, word)

    return add_spoiled
