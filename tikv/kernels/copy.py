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
    V_DST,
    V_SRC,
    WHERE_VECTOR,
    WHICH_VECTOR,
    W,
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
    make_scale,
    make_store,
)
from tikv.kernels.lanes import BLOCK, SPIRV_THREADS, make_row_max
from tikv.runtime import ti


class Side(NamedTuple):
    """One end of a copy: placement, page length (0: none), how K's and V's rows are cut (chunk, stride in words)."""

    place: str = "linear"
    page: int = 0
    k_inner: tuple[int, int] = (0, 0)
    v_inner: tuple[int, int] = (0, 0)


class Stream(NamedTuple):
    """K or V in a copy: units in a row, and how a unit is read and written."""

    units: int
    codec: Codec


def make_copy(style, serial, heads, grouped, streams, src, dst, lanes, index_bits, scale):
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
    move_k = make_move_row(style, heads, lanes, k, src.k_inner, dst.k_inner, scale, (KS, KD, KS if plain else SC), uid)
    move_v = make_move_row(style, heads, lanes, v, src.v_inner, dst.v_inner, scale, (VS, VD, KS if plain else SC), uid)
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
        gs = g
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
        if ti.static(planes):
            if second:
                move_v(vs, vd, v_scale, i, lane, ok, v_src(gs, s, h, where), v_dst(g, d, h, where),
                       scale_at + which[W.v_scale], which[W.v_units],
                       where[V_SRC + 3], v_head, scale_head)  # fmt: skip
            else:
                move_k(ks, kd, k_scale, i, lane, ok, k_src(gs, s, h, where), k_dst(g, d, h, where),
                       scale_at + which[W.k_scale], which[W.k_units],
                       where[K_SRC + 3], k_head, scale_head)  # fmt: skip
        else:
            move_k(ks, kd, k_scale, i, lane, ok, k_src(gs, s, h, where), k_dst(g, d, h, where),
                   scale_at + which[W.k_scale], which[W.k_units],
                   where[K_SRC + 3], k_head, scale_head)  # fmt: skip
            if ti.static(two):
                move_v(vs, vd, v_scale, i, lane, ok, v_src(gs, s, h, where), v_dst(g, d, h, where),
                       scale_at + which[W.v_scale], which[W.v_units],
                       where[V_SRC + 3], v_head, scale_head)  # fmt: skip

    @ti.kernel
    def copy_plain(ks: KS, kd: KD, vs: VS, vd: VD, where: WHERE_VECTOR, which: WHICH_VECTOR):
        """K, its destination, V, its destination; with one stream V's arrays repeat K's."""
        if ti.static(style == "spirv"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(SPIRV_THREADS):
                for n in range((which[W.iterations] - i + SPIRV_THREADS - 1) // SPIRV_THREADS):
                    step(i + n * SPIRV_THREADS, ks, kd, vs, vd, ks, ks, ks, where, which)
        elif ti.static(style == "cuda"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(ks.shape[0]):
                step(i, ks, kd, vs, vd, ks, ks, ks, where, which)
        else:
            ti.loop_config(serialize=serial)
            for i in range(ks.shape[0]):
                step(i, ks, kd, vs, vd, ks, ks, ks, where, which)

    @ti.kernel
    def copy_full(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, k_scale: SC, v_scale: SC,
                  where: WHERE_VECTOR, which: WHICH_VECTOR):  # fmt: skip
        """The same with an index array and scales; those a placement or codec does not use repeat another array."""
        if ti.static(style == "spirv"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(SPIRV_THREADS):
                for n in range((which[W.iterations] - i + SPIRV_THREADS - 1) // SPIRV_THREADS):
                    step(i + n * SPIRV_THREADS, ks, kd, vs, vd, index, k_scale, v_scale, where, which)
        elif ti.static(style == "cuda"):
            ti.loop_config(block_dim=BLOCK)
            for i in range(ks.shape[0]):
                step(i, ks, kd, vs, vd, index, k_scale, v_scale, where, which)
        else:
            ti.loop_config(serialize=serial)
            for i in range(ks.shape[0]):
                step(i, ks, kd, vs, vd, index, k_scale, v_scale, where, which)

    return copy_plain if plain else copy_full


def make_unit(style, codec, src_inner, dst_inner):
    """(magnitude, move_unit): the bits of the largest finite magnitude in a unit of a row, and its move."""
    raw = codec.src == "raw"
    dequantising = not raw and codec.src == "i8"
    src_at, dst_at = make_inner(*src_inner), make_inner(*dst_inner)
    src_words, dst_words = codec.src_words, codec.dst_words
    load = None if raw else make_load(codec.src, codec.elements, codec.src_bits)
    store = None if raw else make_store(codec.dst, codec.elements, codec.dst_bits, style)

    @ti.func
    def magnitude(a: ti.template(), src_row, u):
        values = load(a, src_row + src_at(u * src_words))
        m = ti.u32(0)
        for e in ti.static(range(codec.elements)):
            m = ti.max(m, finite_magnitude_bits(values[e]))
        return m

    @ti.func
    def move_unit(a: ti.template(), b: ti.template(), src_row, dst_row, u, factor):
        if ti.static(raw):
            b[dst_row + dst_at(u)] = a[src_row + src_at(u)]
        else:
            values = load(a, src_row + src_at(u * src_words))
            if ti.static(dequantising):
                values = values * factor
            store(b, dst_row + dst_at(u * dst_words), values, factor)

    return magnitude, move_unit


def make_move_row(style, heads, lanes, stream, src_inner, dst_inner, scale, types, uid):
    """move_row(src, dst, scales, thread, lane, ok, src_row, dst_row, scale_at, units, ...): a lane's part of a row.

    On CPU: all rows of a token; the last arguments are the strides between its heads, in src, dst and scales.
    """
    codec = stream.codec
    quantising = codec.src != "raw" and codec.dst == "i8"
    dequantising = codec.src == "i8"
    magnitude, move_unit = make_unit(style, codec, src_inner, dst_inner)
    scale_bits = make_scale(scale, style) if quantising else None
    scale_value = make_bits_to_f32(scale) if scale else None
    scale_word = ti.u16 if scale == "f16" else ti.u32
    row_max = make_row_max(style, lanes)
    SRC, DST, SCALE = types

    if style == "cpu":
        # A real function takes the arrays' pointers into registers, so that LLVM may vectorise the loops. Its number
        # tells kernels apart that differ in nothing but the functions they call.
        @ti.real_func
        def rows(a: SRC, b: DST, scales: SCALE, src_row: ti.i32, dst_row: ti.i32, scale_at: ti.i32, units: ti.i32,
                 src_head: ti.i32, dst_head: ti.i32, scale_head: ti.i32, number: ti.i32):  # fmt: skip
            for h in range(heads):
                s, d, at = src_row + h * src_head, dst_row + h * dst_head, scale_at + h * scale_head
                factor = ti.f32(1.0)
                if ti.static(quantising):
                    m = ti.u32(0)
                    for u in range(units):
                        m = ti.max(m, magnitude(a, s, u))
                    bits = scale_bits(m)
                    factor = ti.f32(1.0) / scale_value(bits)
                    scales[at] = ti.cast(bits, scale_word)
                elif ti.static(dequantising):
                    factor = scale_value(scales[at])
                for u in range(units):
                    move_unit(a, b, s, d, u, factor)

        @ti.func
        def move_rows(a: ti.template(), b: ti.template(), scales: ti.template(), thread, lane, ok, src_row, dst_row,
                      scale_at, units, src_head, dst_head, scale_head):  # fmt: skip
            if ok:
                rows(a, b, scales, src_row, dst_row, scale_at, units, src_head, dst_head, scale_head, uid)

        return move_rows

    rounds = -(-stream.units // lanes)
    full = stream.units == rounds * lanes

    @ti.func
    def move_row(
        a: ti.template(),
        b: ti.template(),
        scales: ti.template(),
        thread,
        lane,
        ok,
        src_row,
        dst_row,
        scale_at,
        units,
        src_head,
        dst_head,
        scale_head,
    ):
        factor = ti.f32(1.0)
        if ti.static(quantising):
            m = ti.u32(0)
            for n in ti.static(range(rounds)):
                if ok and lane + n * lanes < units:
                    m = ti.max(m, magnitude(a, src_row, lane + n * lanes))
            bits = scale_bits(row_max(thread, m))
            factor = ti.f32(1.0) / scale_value(bits)
            if ok and lane == 0:
                scales[scale_at] = ti.cast(bits, scale_word)
        elif ti.static(dequantising):
            if ok:
                factor = scale_value(scales[scale_at])
        if ok:
            for n in ti.static(range(rounds)):
                if ti.static(full):
                    move_unit(a, b, src_row, dst_row, lane + n * lanes, factor)
                elif lane + n * lanes < units:
                    move_unit(a, b, src_row, dst_row, lane + n * lanes, factor)

    return move_row
