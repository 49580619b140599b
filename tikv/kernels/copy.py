"""The copy: every contiguous, ragged, slot-mapped, paged, casting or quantising move of rows is this one kernel.

    for each group g, token t, head h:  dst[g, place(t), h] = codec(src[g, place'(t), h])

One top-level loop, one task, one launch, for K alone or K and V. On CPU an iteration is a token's rows, first those of
K, then those of V; on a GPU it is one unit of a row of both, so that neighbouring threads touch neighbouring words.
Rows that are quantised are shared by `lanes` threads, which first agree on the row's largest magnitude.
"""

import zlib
from typing import NamedTuple

from tikv.kernels.address import (
    K_DST,
    K_SRC,
    NUMBERS_ARRAY,
    V_DST,
    V_SRC,
    WHERE_VECTOR,
    WHICH_VECTOR,
    W,
    Where,
    make_inner,
    make_place,
    make_row,
    row_of_layer,
)
from tikv.kernels.codec import (
    WORD,
    Codec,
    finite_magnitude_bits,
    make_bits_to_f32,
    make_load,
    make_reciprocal,
    make_scale,
    make_store,
    make_word_magnitude,
)
from tikv.kernels.lanes import make_loop, make_row_max
from tikv.runtime import ti


class Side(NamedTuple):
    """One end of a copy: placement, page length (0: none), how K's and V's rows are cut (chunk, stride in words)."""

    place: str = "linear"
    page: int = 0
    k_inner: tuple[int, int] = (0, 0)
    v_inner: tuple[int, int] = (0, 0)


class Stream(NamedTuple):
    """K or V in a copy: units in a row (0 on CPU, which counts at run time), and how a unit is read and written."""

    units: int
    codec: Codec


def make_copy(style, serial, heads, grouped, streams, src, dst, lanes, index_bits, scale, joint):
    """The copy for one set of compile-time choices. Not cached: on CPU its row functions belong to one Taichi program.

    Args:
        style: "cpu", "cuda" or "spirv": the shape of the loop.
        serial: on CPU, run in the calling thread; cheaper than waking the others for a small copy.
        heads: rows per token.
        grouped: whether there is more than one group.
        streams: one `Stream` (K) or two (K and V).
        src, dst: the `Side` of each end.
        lanes: threads that share a row; 1 on CPU.
        index_bits: 0 without an index array, else 32 or 64.
        scale: dtype code of the int8 scales, or "" without.
        joint: on CPU without index and scales, K and V go to one array: each array of a launch takes time.
    """
    k, v = streams[0], streams[-1]
    two = len(streams) == 2
    planes = two and style == "cpu"
    uid = zlib.crc32(repr((style, serial, heads, grouped, streams, src, dst, index_bits, scale)).encode()) >> 1
    KS = ti.types.ndarray(dtype=WORD[k.codec.src_bits], ndim=1)
    KD = ti.types.ndarray(dtype=WORD[k.codec.dst_bits], ndim=1)
    VS = ti.types.ndarray(dtype=WORD[v.codec.src_bits], ndim=1)
    VD = ti.types.ndarray(dtype=WORD[v.codec.dst_bits], ndim=1)
    IX = ti.types.ndarray(dtype=ti.i64 if index_bits == 64 else ti.i32, ndim=1)
    SC = ti.types.ndarray(dtype=ti.u16 if scale == "f16" else ti.u32, ndim=1)
    place_src = make_place(src.place, src.page, W.src_position, W.src_limit, W.src_index)
    place_dst = make_place(dst.place, dst.page, W.dst_position, W.dst_limit, W.dst_index)
    plain = index_bits == 0 and scale == ""
    rows_k = rows_v = read_k = read_v = write_k = write_v = None
    if style == "cpu":
        rows_k = make_rows(heads, k, src.k_inner, dst.k_inner, scale, (KS, KD, KS if plain else SC), uid)
        rows_v = make_rows(heads, v, src.v_inner, dst.v_inner, scale, (VS, VD, KS if plain else SC), uid)
    else:
        read_k, write_k = make_shared_row(style, lanes, k, src.k_inner, dst.k_inner, scale)
        read_v, write_v = make_shared_row(style, lanes, v, src.v_inner, dst.v_inner, scale)
    k_src, k_dst = make_row(src.page, K_SRC), make_row(dst.page, K_DST)
    v_src, v_dst = make_row(src.page, V_SRC), make_row(dst.page, V_DST)
    scale_slot_is_src = k.codec.src == "i8"

    @ti.func
    def step(i, ks: ti.template(), kd: ti.template(), vs: ti.template(), vd: ti.template(), index: ti.template(),
             k_scale: ti.template(), v_scale: ti.template(), where, which):  # fmt: skip
        """Move the part of a row that iteration i stands for."""
        n = ti.cast(i, ti.u32)
        second = False
        if ti.static(planes):
            half = ti.cast(which[W.iterations], ti.u32) >> ti.u32(1)
            second = n >= half
            n = ti.select(second, n - half, n)
        r, lane, h = n, 0, 0
        if ti.static(style != "cpu"):
            lane = ti.cast(n % ti.u32(lanes), ti.i32)
            r = n // ti.u32(lanes)
            h = ti.cast(r % ti.u32(heads), ti.i32)
            r = r // ti.u32(heads)
        t, g = ti.cast(r, ti.i32), 0
        inside = t < which[W.tokens]
        if ti.static(grouped):
            tokens = ti.cast(which[W.tokens], ti.u32)
            t, g = ti.cast(r % tokens, ti.i32), ti.cast(r // tokens, ti.i32)
            inside = g < which[W.groups]
        s, d = -1, -1
        if inside:
            s = place_src(g, t, index, which)
            d = place_dst(g, t, index, which)
        ok = s >= 0 and d >= 0
        gs = ti.select(inside, g, 0)
        k_head, v_head, scale_head = where[K_DST + 3], where[V_DST + 3], which[W.scale_head]
        if ti.static(dst.place == "layers"):
            if ok:
                d = row_of_layer(g, h, d, index, which[W.dst_index])
                rows_of_head = ti.cast(index[which[W.dst_index] + 4 * g + 1], ti.i32)
                k_head, v_head = rows_of_head * where[K_DST + 2], rows_of_head * where[V_DST + 2]
                scale_head = rows_of_head * which[W.scale_step]
        if ti.static(src.place == "group"):
            if ok:
                gs = ti.cast(index[g * which[W.index_group] + which[W.src_index]], ti.i32)
        scale_at = g * which[W.scale_group] + h * which[W.scale_head]
        if ti.static(scale_slot_is_src):
            scale_at = scale_at + s * which[W.scale_step]
        else:
            scale_at = scale_at + d * which[W.scale_step]
        k_at, v_at = scale_at + which[W.k_scale], scale_at + which[W.v_scale]
        k_to, v_to = k_dst(g, d, h, where), v_dst(g, d, h, where)
        if ti.static(style == "cpu"):
            k_from, v_from = k_src(gs, s, h, where), v_src(gs, s, h, where)
            if second:
                if ti.static(two):
                    rows_v(
                        vs, vd, v_scale, ok, v_from, v_to, v_at, which[W.v_units], where[V_SRC + 3], v_head, scale_head
                    )
            else:
                rows_k(ks, kd, k_scale, ok, k_from, k_to, k_at, which[W.k_units], where[K_SRC + 3], k_head, scale_head)
        else:
            # A row that is skipped is read all the same, from slot 0, one of no group from group 0: a load without a
            # test is under way sooner.
            s = ti.select(ok, s, 0)
            k_held = read_k(ks, lane, k_src(gs, s, h, where))
            if ti.static(two):
                v_held = read_v(vs, lane, v_src(gs, s, h, where))
                write_k(kd, k_scale, i, lane, ok, k_to, k_at, k_held)
                write_v(vd, v_scale, i, lane, ok, v_to, v_at, v_held)
            else:
                write_k(kd, k_scale, i, lane, ok, k_to, k_at, k_held)

    if style == "cpu":
        placed, strides = len(W), 4 * len(Where._fields)

        @ti.func
        def step_cpu(i, arrays: ti.template(), numbers: ti.template()):
            """`step`, its numbers in memory of the host's, where it changes one without a call of Taichi's."""
            which = ti.Vector([numbers[n] for n in range(placed)])
            where = ti.Vector([numbers[placed + n] for n in range(strides)])
            step(i, *arrays, where, which)

        share = make_loop(style, serial, step_cpu, W.iterations)

        @ti.kernel
        def copy_cpu(ks: KS, kd: KD, vs: VS, vd: VD, numbers: NUMBERS_ARRAY):
            """As `copy_plain`."""
            share(ks, numbers, ((ks, kd, vs, vd, ks, ks, ks), numbers))

        @ti.kernel
        def copy_joint(ks: KS, d: KD, vs: VS, numbers: NUMBERS_ARRAY):
            """The same, K and V to one array."""
            share(ks, numbers, ((ks, d, vs, d, ks, ks, ks), numbers))

        @ti.kernel
        def copy_full_cpu(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, k_scale: SC, v_scale: SC, numbers: NUMBERS_ARRAY):
            """As `copy_full`."""
            share(ks, numbers, ((ks, kd, vs, vd, index, k_scale, v_scale), numbers))

        return copy_joint if joint else copy_cpu if plain else copy_full_cpu

    loop = make_loop(style, serial, step, W.iterations)

    @ti.kernel
    def copy_plain(ks: KS, kd: KD, vs: VS, vd: VD, where: WHERE_VECTOR, which: WHICH_VECTOR):
        """K, its destination, V, its destination; with one stream V's arrays repeat K's."""
        loop(ks, which, (ks, kd, vs, vd, ks, ks, ks, where, which))

    @ti.kernel
    def copy_full(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, k_scale: SC, v_scale: SC,
                  where: WHERE_VECTOR, which: WHICH_VECTOR):  # fmt: skip
        """The same with an index array and scales; those a placement or codec does not use repeat another array."""
        loop(ks, which, (ks, kd, vs, vd, index, k_scale, v_scale, where, which))

    return copy_plain if plain else copy_full


def make_unit(style, codec, src_inner, dst_inner):
    """(magnitude, move_unit): the bits of the largest finite magnitude in a unit of a row, and its move."""
    read, write, largest, _, _ = make_unit_parts(style, codec, src_inner, dst_inner)

    @ti.func
    def magnitude(a: ti.template(), src_row, u):
        return largest(read(a, src_row, u))

    @ti.func
    def move_unit(a: ti.template(), b: ti.template(), src_row, dst_row, u, factor):
        write(b, dst_row, u, read(a, src_row, u), factor)

    return magnitude, move_unit


def make_unit_parts(style, codec, src_inner, dst_inner):
    """(read, write, largest, numbers, type): a unit as a vector of numbers of that type, from and to words."""
    raw = codec.src == "raw"
    dequantising = not raw and codec.src == "i8"
    src_at, dst_at = make_inner(*src_inner), make_inner(*dst_inner)
    src_words, dst_words = codec.src_words, codec.dst_words
    load = None if raw else make_load(codec.src, codec.elements, codec.src_bits)
    store = None if raw else make_store(codec.dst, codec.elements, codec.dst_bits, style)
    word = WORD[codec.src_bits]

    @ti.func
    def read(a: ti.template(), src_row, u):
        if ti.static(raw):
            return ti.Vector([a[src_row + src_at(u)]])
        else:
            return load(a, src_row + src_at(u * src_words))

    @ti.func
    def write(b: ti.template(), dst_row, u, values, factor):
        if ti.static(raw):
            b[dst_row + dst_at(u)] = values[0]
        elif ti.static(dequantising):
            store(b, dst_row + dst_at(u * dst_words), values * factor, factor)
        else:
            store(b, dst_row + dst_at(u * dst_words), values, factor)

    @ti.func
    def largest(values):
        m = ti.u32(0)
        for e in ti.static(range(codec.elements)):
            m = ti.max(m, finite_magnitude_bits(values[e]))
        return m

    return read, write, largest, 1 if raw else codec.elements, word if raw else ti.f32


def make_rows(heads, stream, src_inner, dst_inner, scale, types, uid):
    """A token's rows on CPU: rows(src, dst, scales, ok, src_row, dst_row, scale_at, units, src_head, ...).

    The last three are the strides between its heads, in src, dst and scales.
    """
    codec = stream.codec
    quantising = codec.src != "raw" and codec.dst == "i8"
    dequantising = codec.src == "i8"
    _, move_unit = make_unit("cpu", codec, src_inner, dst_inner)
    number_type, magnitude, to_bits = make_word_magnitude(codec.src) if quantising else (None, None, None)
    src_at = make_inner(*src_inner)
    scale_bits = make_scale(scale, "cpu") if quantising else None
    reciprocal = make_reciprocal("cpu")
    scale_value = make_bits_to_f32(scale) if scale else None
    scale_word = ti.u16 if scale == "f16" else ti.u32
    SRC, DST, SCALE = types

    # A real function takes the arrays' pointers into registers, so that LLVM may vectorise the loops. Its number
    # tells kernels apart that differ in nothing but the functions they call. LLVM does not know that `units` has no
    # sign, hence not the number of heads: a known one of 8 is written out, four times as long to compile and no faster.
    @ti.real_func
    def vectorised(a: SRC, b: DST, scales: SCALE, src_row: ti.i32, dst_row: ti.i32, scale_at: ti.i32, units: ti.i32,
             src_head: ti.i32, dst_head: ti.i32, scale_head: ti.i32, number: ti.i32):  # fmt: skip
        sign = ti.cast(ti.cast(units, ti.u32) >> ti.u32(31), ti.i32)
        for h in range(heads + sign):
            s, d, at = src_row + h * src_head, dst_row + h * dst_head, scale_at + h * scale_head
            factor = ti.f32(1.0)
            if ti.static(quantising):
                m = number_type(0)
                for u in range(units):
                    m = ti.max(m, magnitude(a[s + src_at(u)]))
                bits = scale_bits(to_bits(m))
                factor = reciprocal(scale_value(bits))
                scales[at] = ti.cast(bits, scale_word)
            elif ti.static(dequantising):
                factor = scale_value(scales[at])
            for u in range(units):
                move_unit(a, b, s, d, u, factor)

    @ti.func
    def rows(a: ti.template(), b: ti.template(), scales: ti.template(), ok, src_row, dst_row, scale_at, units,
             src_head, dst_head, scale_head):  # fmt: skip
        if ok:
            vectorised(a, b, scales, src_row, dst_row, scale_at, units, src_head, dst_head, scale_head, uid)

    return rows


def make_shared_row(style, lanes, stream, src_inner, dst_inner, scale):
    """(read_row, write_row): a lane's units of a row shared by `lanes` threads of a GPU, read before one is written.

    read_row(src, lane, src_row) -> vector. write_row(dst, scales, thread, lane, ok, dst_row, scale_at, vector).
    """
    codec, units = stream.codec, stream.units
    quantising = codec.src != "raw" and codec.dst == "i8"
    dequantising = codec.src == "i8"
    read, write, largest, numbers, number_type = make_unit_parts(style, codec, src_inner, dst_inner)
    scale_bits = make_scale(scale, style) if quantising else None
    reciprocal = make_reciprocal(style)
    scale_value = make_bits_to_f32(scale) if scale else None
    scale_word = ti.u16 if scale == "f16" else ti.u32
    row_max = make_row_max(style, lanes)
    rounds = -(-units // lanes)
    full = units == rounds * lanes

    @ti.func
    def read_row(a: ti.template(), lane, src_row):
        held = ti.Vector.zero(number_type, rounds * numbers)
        for n in ti.static(range(rounds)):
            if ti.static(full):
                values = read(a, src_row, lane + n * lanes)
                for e in ti.static(range(numbers)):
                    held[n * numbers + e] = values[e]
            elif lane + n * lanes < units:
                values = read(a, src_row, lane + n * lanes)
                for e in ti.static(range(numbers)):
                    held[n * numbers + e] = values[e]
        return held

    @ti.func
    def write_row(b: ti.template(), scales: ti.template(), thread, lane, ok, dst_row, scale_at, held):
        factor = ti.f32(1.0)
        if ti.static(quantising):
            m = ti.u32(0)
            for n in ti.static(range(rounds)):
                m = ti.max(m, largest(ti.Vector([held[n * numbers + e] for e in range(numbers)])))
            bits = scale_bits(row_max(thread, m))
            factor = reciprocal(scale_value(bits))
            if ok and lane == 0:
                scales[scale_at] = ti.cast(bits, scale_word)
        elif ti.static(dequantising):
            if ok:
                factor = scale_value(scales[scale_at])
        if ok:
            for n in ti.static(range(rounds)):
                values = ti.Vector([held[n * numbers + e] for e in range(numbers)])
                if ti.static(full):
                    write(b, dst_row, lane + n * lanes, values, factor)
                elif lane + n * lanes < units:
                    write(b, dst_row, lane + n * lanes, values, factor)

    return read_row, write_row
