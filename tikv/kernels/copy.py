"""The copy: one kernel does every contiguous, ragged, slot-mapped, paged, casting or quantising move of rows.

    for each sequence b, token t, head h:  dst[b, slot(t), h] = codec(src[b, slot'(t), h])

It is one top-level loop, so one task and one launch, for K alone or K and V. On CPU an iteration moves a token's rows,
first those of K, then those of V; on a GPU it moves one unit of a row of both, so that neighbouring threads access
neighbouring words. `lanes` threads share a row that is quantised, and first agree on its largest magnitude.
"""

import zlib
from typing import NamedTuple

from tikv.formats import GROUP_FORMATS, OF_CODE
from tikv.kernels.address import (
    K_DST,
    K_SRC,
    NUMBERS,
    PARAMS,
    PARAMS_ARRAY,
    STRIDES,
    V_DST,
    V_SRC,
    P,
    S,
    index_array,
    make_row_offset,
    make_slot_of,
    make_word_offset,
    row_of_layer,
)
from tikv.kernels.codec import (
    FLOAT8,
    SCALE_WORD,
    WORD,
    Codec,
    element_array,
    finite_magnitude_bits,
    make_bits_to_f32,
    make_load,
    make_reciprocal,
    make_scale,
    make_store,
    make_word_magnitude,
    scale_array,
    word_array,
)
from tikv.kernels.exact import make_code_product, make_ratio
from tikv.kernels.group_lanes import make_rotate_back, make_shared_groups
from tikv.kernels.group_rows import make_dequantise_rows, make_quantise_rows
from tikv.kernels.groups import make_dequantise_unit
from tikv.kernels.lanes import make_loop, make_row_max
from tikv.kernels.page_summaries import WRITTEN, W, make_summarize_written
from tikv.runtime import ti


class EndLayout(NamedTuple):
    """One end of a copy: placement, page length (0: no pages), (chunk, stride in words) of the rows of K and of V."""

    placement: str = "linear"
    page: int = 0
    k_inner: tuple[int, int] = (0, 0)
    v_inner: tuple[int, int] = (0, 0)


class Stream(NamedTuple):
    """K or V in a copy: units in a row (0 on CPU, which counts at run time), and the codec that moves a unit."""

    units: int
    codec: Codec


def make_copy(style, serial, heads, grouped, streams, src, dst, lanes, index_bits, scale, joint, summaries=None):
    """The copy for one set of compile-time choices; not cached, since on CPU its functions belong to one program.

    Args:
        style: "cpu", "cuda" or "spirv": the shape of the loop.
        serial: on CPU, run in the calling thread; for a small copy that is cheaper than waking others.
        heads: rows per token.
        grouped: whether there is more than one sequence.
        streams: one `Stream` (K) or two (K and V).
        src, dst: the `EndLayout` of each end.
        lanes: threads that share a row; 1 on CPU.
        index_bits: 0 without an index array, else 32 or 64; for placement "pages", one for each of its four arrays.
        scale: dtype code of the scales, or "" without scales: scales of int8 rows are computed and written, those of
            8-bit floats are read.
        joint: on CPU without index and scales, K and V go to one array, since each array of a launch takes time.
        summaries: the `WrittenForm` of pages of keys that the same launch summarises; there are no scales then.
    """
    k, v = streams[0], streams[-1]
    KS, KD, VS, VD = (word_array(bits) for s in (k, v) for bits in (s.codec.src_bits, s.codec.dst_bits))
    by_pages = dst.placement == "pages"
    IX, SC = index_array(0 if by_pages else index_bits), scale_array(scale)
    plain = index_bits == 0 and scale == ""
    decode_item = make_decode_item(style, heads, grouped, lanes, len(streams) == 2)
    find_rows = make_find_rows(src, dst, k.codec.src in OF_CODE)
    if style == "cpu":
        unused = plain or summaries is not None  # whether scales are unused: a launch then passes K's source instead
        uid = (
            zlib.crc32(repr((style, serial, heads, grouped, streams, src, dst, index_bits, scale, unused)).encode())
            >> 1
        )
        types = (KS, KD, KS if unused else SC), (VS, VD, KS if unused else SC)
        move_rows = make_move_token_rows(heads, streams, src, dst, scale, types, uid)
    else:
        move_rows = make_move_row(style, streams, src, dst, lanes, scale)

    @ti.func
    def copy_item(i, arrays: ti.template(), strides, params):
        """Move the rows of iteration i."""
        ks, kd, vs, vd, index, k_scale, v_scale = ti.static(arrays)
        b, t, h, lane, is_v, inside = decode_item(i, params)
        rows = find_rows(b, t, h, inside, index, strides, params)
        move_rows(i, b, h, lane, is_v, rows, (ks, kd, vs, vd, k_scale, v_scale), strides, params)

    if summaries is not None:
        uid = zlib.crc32(repr((style, serial, heads, grouped, streams, src, dst, index_bits, summaries)).encode()) >> 1
        summarize = make_summarize_written(style, summaries, dst, uid)
        types = KS, KD, VS, VD, IX
        return make_copy_summarized(style, serial, copy_item, summarize, summaries, types, index_bits, joint)

    if style == "cpu":
        placed, strided = len(P), 4 * len(S)  # here, since Taichi warns about `len` in a kernel

        @ti.func
        def copy_item_cpu(i, arrays: ti.template(), numbers: ti.template()):
            """`copy_item` with its numbers in host memory, where the host changes one without a call of Taichi."""
            params = ti.Vector([numbers[n] for n in range(placed)])
            strides = ti.Vector([numbers[placed + n] for n in range(strided)])
            copy_item(i, arrays, strides, params)

        loop_cpu = make_loop(style, serial, copy_item_cpu, P.iterations)

        @ti.kernel
        def copy_cpu(ks: KS, kd: KD, vs: VS, vd: VD, numbers: PARAMS_ARRAY):
            """Like `copy_plain`."""
            loop_cpu(ks, numbers, ((ks, kd, vs, vd, ks, ks, ks), numbers))

        @ti.kernel
        def copy_joint(ks: KS, d: KD, vs: VS, numbers: PARAMS_ARRAY):
            """The same, with one destination array for K and V."""
            loop_cpu(ks, numbers, ((ks, d, vs, d, ks, ks, ks), numbers))

        @ti.kernel
        def copy_full_cpu(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, k_scale: SC, v_scale: SC, numbers: PARAMS_ARRAY):
            """Like `copy_full`."""
            loop_cpu(ks, numbers, ((ks, kd, vs, vd, index, k_scale, v_scale), numbers))

        if by_pages:
            return make_copy_by_pages_cpu((KS, KD, VS, VD), index_bits, loop_cpu)
        return copy_joint if joint else copy_cpu if plain else copy_full_cpu

    loop = make_loop(style, serial, copy_item, P.iterations)

    @ti.kernel
    def copy_plain(ks: KS, kd: KD, vs: VS, vd: VD, strides: STRIDES, params: PARAMS):
        """Takes K, its destination, V, and its destination; with one stream, V's arrays repeat K's."""
        loop(ks, params, ((ks, kd, vs, vd, ks, ks, ks), strides, params))

    @ti.kernel
    def copy_full(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, k_scale: SC, v_scale: SC,
                  strides: STRIDES, params: PARAMS):  # fmt: skip
        """Takes an index array and scales as well; unused arguments repeat another array."""
        loop(ks, params, ((ks, kd, vs, vd, index, k_scale, v_scale), strides, params))

    if by_pages:
        return make_copy_by_pages((KS, KD, VS, VD), index_bits, loop)
    return copy_plain if plain else copy_full


def make_copy_summarized(style, serial, copy_item, summarize_written, form, types, index_bits, joint):
    """The kernels of `make_copy` without scales; after the items that copy come items that summarise pages of keys.

    On CPU words are elements, so pages are read directly from K's source and destination. Elsewhere both are passed
    again as arrays of elements. `to` receives the summaries.
    """
    KS, KD, VS, VD, IX = types
    NEW, STORED = element_array(form.source), element_array(form.code)
    placed, strided, counted = len(P), 4 * len(S), len(W)

    @ti.func
    def item(i, arrays: ti.template(), index: ti.template(), of_pages: ti.template(), strides, params, written):
        ks, kd, vs, vd = ti.static(arrays)
        if i < written[W.copied_items]:
            copy_item(i, (ks, kd, vs, vd, index, ks, ks), strides, params)
        else:
            summarize_written(i - written[W.copied_items], of_pages, index, params, written)

    @ti.func
    def item_cpu(i, arrays: ti.template(), index: ti.template(), of_pages: ti.template(), numbers: ti.template()):
        params = ti.Vector([numbers[n] for n in range(placed)])
        strides = ti.Vector([numbers[placed + n] for n in range(strided)])
        written = ti.Vector([numbers[placed + strided + n] for n in range(counted)])
        item(i, arrays, index, of_pages, strides, params, written)

    if style == "cpu":
        loop_cpu = make_loop(style, serial, item_cpu, P.iterations)

        @ti.kernel
        def copy_summarized_joint(ks: KS, d: KD, vs: VS, to: STORED, numbers: PARAMS_ARRAY):
            loop_cpu(ks, numbers, ((ks, d, vs, d), ks, (ks, d, to), numbers))

        @ti.kernel
        def copy_summarized_cpu(ks: KS, kd: KD, vs: VS, vd: VD, to: STORED, numbers: PARAMS_ARRAY):
            loop_cpu(ks, numbers, ((ks, kd, vs, vd), ks, (ks, kd, to), numbers))

        @ti.kernel
        def copy_summarized_placed(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, to: STORED, numbers: PARAMS_ARRAY):
            loop_cpu(ks, numbers, ((ks, kd, vs, vd), index, (ks, kd, to), numbers))

        return copy_summarized_joint if joint else copy_summarized_placed if index_bits else copy_summarized_cpu

    loop = make_loop(style, serial, item, W.all_items)

    @ti.kernel
    def copy_summarized(ks: KS, kd: KD, vs: VS, vd: VD, index: IX, new: NEW, stored: STORED, to: STORED,
                        strides: STRIDES, params: PARAMS, written: WRITTEN):  # fmt: skip
        loop(ks, written, ((ks, kd, vs, vd), index, (new, stored, to), strides, params, written))

    return copy_summarized


def make_copy_by_pages_cpu(types, index_bits, loop):
    """`copy_cpu` of `make_copy` with the index arrays of placement "pages"."""
    KS, KD, VS, VD = types
    REQUESTS, POSITIONS, PAGES, STARTS = (index_array(bits) for bits in index_bits)

    @ti.kernel
    def copy_by_pages(ks: KS, kd: KD, vs: VS, vd: VD, requests: REQUESTS, positions: POSITIONS, pages: PAGES,
                      starts: STARTS, numbers: PARAMS_ARRAY, page_numbers: NUMBERS):  # fmt: skip
        index = ti.static((requests, positions, pages, starts, page_numbers))
        loop(ks, numbers, ((ks, kd, vs, vd, index, ks, ks), numbers))

    return copy_by_pages


def make_copy_by_pages(types, index_bits, loop):
    """`copy_plain` of `make_copy` with the index arrays of placement "pages"."""
    KS, KD, VS, VD = types
    REQUESTS, POSITIONS, PAGES, STARTS = (index_array(bits) for bits in index_bits)

    @ti.kernel
    def copy_by_pages(ks: KS, kd: KD, vs: VS, vd: VD, requests: REQUESTS, positions: POSITIONS, pages: PAGES,
                      starts: STARTS, strides: STRIDES, params: PARAMS, page_numbers: NUMBERS):  # fmt: skip
        index = ti.static((requests, positions, pages, starts, page_numbers))
        loop(ks, params, ((ks, kd, vs, vd, index, ks, ks), strides, params))

    return copy_by_pages


def make_decode_item(style, heads, grouped, lanes, two):
    """decode_item(i, params) -> (sequence, token, head, lane, whether it belongs to V, whether the token exists)."""

    @ti.func
    def decode_item(i, params):
        n = ti.cast(i, ti.u32)
        is_v = False
        if ti.static(two and style == "cpu"):
            half = ti.cast(params[P.iterations], ti.u32) >> ti.u32(1)
            is_v = n >= half
            n = ti.select(is_v, n - half, n)
        r, lane, h = n, 0, 0
        if ti.static(style != "cpu"):
            lane = ti.cast(n % ti.u32(lanes), ti.i32)
            r = n // ti.u32(lanes)
            h = ti.cast(r % ti.u32(heads), ti.i32)
            r = r // ti.u32(heads)
        t, b = ti.cast(r, ti.i32), 0
        inside = t < params[P.tokens]
        if ti.static(grouped):
            tokens = ti.cast(params[P.tokens], ti.u32)
            t, b = ti.cast(r % tokens, ti.i32), ti.cast(r // tokens, ti.i32)
            inside = b < params[P.groups]
        return b, t, h, lane, is_v, inside

    return decode_item


def make_find_rows(src, dst, scales_at_src):
    """find_rows(b, t, h, inside, index, strides, params) -> the addresses of head h of token t at both ends.

    They are (whether the row is copied, slot and sequence at the source, slot at the destination, offset of its scale,
    strides between heads of K's and V's destination and of the scales).
    """
    src_slot_of = make_slot_of(src.placement, src.page, P.src_position, P.src_limit, P.src_index)
    dst_slot_of = make_slot_of(dst.placement, dst.page, P.dst_position, P.dst_limit, P.dst_index)

    @ti.func
    def find_rows(b, t, h, inside, index: ti.template(), strides, params):
        s, d = -1, -1
        if inside:
            s = src_slot_of(b, t, index, params)
            d = dst_slot_of(b, t, index, params)
        ok = s >= 0 and d >= 0
        src_sequence = ti.select(inside, b, 0)
        k_head, v_head, scale_head = strides[K_DST + S.head], strides[V_DST + S.head], params[P.scale_head]
        if ti.static(dst.placement == "layers"):
            if ok:
                d = row_of_layer(b, h, d, index, params[P.dst_index])
                rows_of_head = ti.cast(index[params[P.dst_index] + 4 * b + 1], ti.i32)
                k_head, v_head = rows_of_head * strides[K_DST + S.token], rows_of_head * strides[V_DST + S.token]
                scale_head = scale_head + rows_of_head * params[P.scale_step]
        if ti.static(src.placement == "group"):
            if ok:
                src_sequence = ti.cast(index[b * params[P.index_group] + params[P.src_index]], ti.i32)
        scale_offset = b * params[P.scale_group] + h * params[P.scale_head]
        if ti.static(scales_at_src):
            scale_offset = scale_offset + s * params[P.scale_step]
        else:
            scale_offset = scale_offset + d * params[P.scale_step]
        return ok, s, src_sequence, d, scale_offset, k_head, v_head, scale_head

    return find_rows


def make_move_token_rows(heads, streams, src, dst, scale, types, uid):
    """CPU: move_token_rows(...): moves all heads of K or of V for a token."""
    k, v = streams[0], streams[-1]
    two = len(streams) == 2
    rows_k = make_token_rows(heads, k, src.k_inner, dst.k_inner, scale, types[0], uid)
    rows_v = make_token_rows(heads, v, src.v_inner, dst.v_inner, scale, types[1], uid)
    k_src, k_dst = make_row_offset(src.page, K_SRC), make_row_offset(dst.page, K_DST)
    v_src, v_dst = make_row_offset(src.page, V_SRC), make_row_offset(dst.page, V_DST)

    @ti.func
    def move_token_rows(i, b, h, lane, is_v, rows: ti.template(), arrays: ti.template(), strides, params):
        ks, kd, vs, vd, k_scale, v_scale = ti.static(arrays)
        ok, s, src_sequence, d, scale_offset, k_head, v_head, scale_head = rows
        k_at, v_at = scale_offset + params[P.k_scale], scale_offset + params[P.v_scale]
        k_to, v_to = k_dst(b, d, h, strides), v_dst(b, d, h, strides)
        k_from, v_from = k_src(src_sequence, s, h, strides), v_src(src_sequence, s, h, strides)
        if is_v:
            if ti.static(two):
                rows_v(vs, vd, v_scale, ok, v_from, v_to, v_at, params[P.v_units], strides[V_SRC + S.head], v_head,
                       scale_head, ti.bit_cast(params[P.v_tensor], ti.f32))  # fmt: skip
        else:
            rows_k(ks, kd, k_scale, ok, k_from, k_to, k_at, params[P.k_units], strides[K_SRC + S.head], k_head,
                   scale_head, ti.bit_cast(params[P.k_tensor], ti.f32))  # fmt: skip

    return move_token_rows


def make_token_rows(heads, stream, src_inner, dst_inner, scale, types, uid):
    """CPU: token_rows(src, dst, scales, ok, ...): moves a token's rows if `ok`; other arguments as in `make_rows`."""
    codec = stream.codec
    groups = codec.dst in GROUP_FORMATS or codec.src in GROUP_FORMATS
    if codec.dst in GROUP_FORMATS:
        rows = make_quantise_rows(heads, codec, scale, types)
    elif codec.src in GROUP_FORMATS:
        rows = make_dequantise_rows(heads, codec, scale, types, uid)
    else:
        rows = make_rows(heads, stream, src_inner, dst_inner, scale, types)

    @ti.func
    def token_rows(a: ti.template(), b: ti.template(), scales: ti.template(), ok, src_row, dst_row, scale_at, units,
                   src_head, dst_head, scale_head, tensor):  # fmt: skip
        if ok:
            if ti.static(groups):
                rows(a, b, scales, src_row, dst_row, scale_at, units, src_head, dst_head, scale_head, tensor, uid)
            else:
                rows(a, b, scales, src_row, dst_row, scale_at, units, src_head, dst_head, scale_head, uid)

    return token_rows


def make_move_groups(style, streams, src, dst, lanes, scale):
    """GPU: `make_move_row` that dequantises a format with groups; a lane takes a unit."""
    k, v = streams[0], streams[-1]
    two = len(streams) == 2
    move_k, move_v = (make_dequantise_unit(s.codec, style, scale) for s in (k, v))
    k_src, k_dst = make_row_offset(src.page, K_SRC), make_row_offset(dst.page, K_DST)
    v_src, v_dst = make_row_offset(src.page, V_SRC), make_row_offset(dst.page, V_DST)

    @ti.func
    def move_row(i, b, h, lane, is_v, rows: ti.template(), arrays: ti.template(), strides, params):
        ks, kd, vs, vd, k_scale, v_scale = ti.static(arrays)
        ok, s, src_sequence, d, scale_offset, _, _, _ = rows
        k_at, v_at = scale_offset + params[P.k_scale], scale_offset + params[P.v_scale]
        k_from, v_from = k_src(src_sequence, s, h, strides), v_src(src_sequence, s, h, strides)
        if ok:
            k_to, v_to = k_dst(b, d, h, strides), v_dst(b, d, h, strides)
            for n in range((k.units - lane + lanes - 1) // lanes):
                move_k(ks, kd, k_scale, k_from, k_to, k_at, lane + n * lanes, ti.bit_cast(params[P.k_tensor], ti.f32))
            if ti.static(two):
                for n in range((v.units - lane + lanes - 1) // lanes):
                    move_v(
                        vs, vd, v_scale, v_from, v_to, v_at, lane + n * lanes, ti.bit_cast(params[P.v_tensor], ti.f32)
                    )

    return move_row


def make_move_turned(style, streams, src, dst, scale):
    """GPU: `make_move_row` that dequantises rotated rows of K or of V."""
    (stream,) = streams
    rotate_back = make_rotate_back(style, stream.codec, stream.units, scale)
    row_at, row_to = make_row_offset(src.page, K_SRC), make_row_offset(dst.page, K_DST)

    @ti.func
    def move_row(i, b, h, lane, is_v, rows: ti.template(), arrays: ti.template(), strides, params):
        ks, kd, k_scale = ti.static((arrays[0], arrays[1], arrays[5]))
        ok, s, src_sequence, d, scale_offset, _, _, _ = rows
        s = ti.select(ok, s, 0)
        scale_at = ti.select(ok, scale_offset, 0) + params[P.k_scale]
        rotate_back(ks, kd, k_scale, i, lane, ok, row_at(src_sequence, s, h, strides), row_to(b, d, h, strides),
                    scale_at, ti.bit_cast(params[P.k_tensor], ti.f32))  # fmt: skip

    return move_row


def make_move_row(style, streams, src, dst, lanes, scale):
    """GPU: move_row(...): moves a lane's part of a row of K and of V."""
    k, v = streams[0], streams[-1]
    two = len(streams) == 2
    if k.codec.src in GROUP_FORMATS and k.codec.turn is not None:
        return make_move_turned(style, streams, src, dst, scale)
    if k.codec.src in GROUP_FORMATS:
        return make_move_groups(style, streams, src, dst, lanes, scale)
    if k.codec.dst in GROUP_FORMATS:
        read_k, write_k = make_shared_groups(style, k, scale)
        read_v, write_v = make_shared_groups(style, v, scale)
    else:
        read_k, write_k = make_shared_row(style, lanes, k, src.k_inner, dst.k_inner, scale)
        read_v, write_v = make_shared_row(style, lanes, v, src.v_inner, dst.v_inner, scale)
    k_src, k_dst = make_row_offset(src.page, K_SRC), make_row_offset(dst.page, K_DST)
    v_src, v_dst = make_row_offset(src.page, V_SRC), make_row_offset(dst.page, V_DST)

    @ti.func
    def move_row(i, b, h, lane, is_v, rows: ti.template(), arrays: ti.template(), strides, params):
        ks, kd, vs, vd, k_scale, v_scale = ti.static(arrays)
        ok, s, src_sequence, d, scale_offset, _, _, _ = rows
        k_at, v_at = scale_offset + params[P.k_scale], scale_offset + params[P.v_scale]
        k_to, v_to = k_dst(b, d, h, strides), v_dst(b, d, h, strides)
        # A skipped row is read anyway, from slot 0, and a row without a sequence from sequence 0: a load without a
        # test starts sooner.
        s = ti.select(ok, s, 0)
        k_tensor, v_tensor = ti.bit_cast(params[P.k_tensor], ti.f32), ti.bit_cast(params[P.v_tensor], ti.f32)
        k_held = read_k(ks, lane, k_src(src_sequence, s, h, strides))
        if ti.static(two):
            v_held = read_v(vs, lane, v_src(src_sequence, s, h, strides))
            write_k(kd, k_scale, i, lane, ok, k_to, k_at, k_held, k_tensor)
            write_v(vd, v_scale, i, lane, ok, v_to, v_at, v_held, v_tensor)
        else:
            write_k(kd, k_scale, i, lane, ok, k_to, k_at, k_held, k_tensor)

    return move_row


def make_unit(style, codec, src_inner, dst_inner, scale):
    """(magnitude, move_unit): find the bits of the largest finite magnitude in a unit of a row; move the unit."""
    read, write, largest, _, _ = make_unit_parts(style, codec, src_inner, dst_inner, scale)

    @ti.func
    def magnitude(a: ti.template(), src_row, u):
        return largest(read(a, src_row, u))

    @ti.func
    def move_unit(a: ti.template(), b: ti.template(), src_row, dst_row, u, factor):
        write(b, dst_row, u, read(a, src_row, u), factor)

    return magnitude, move_unit


def has_scale(code, scale):
    """Whether rows of this dtype have a scale here; 8-bit floats need not have one."""
    return code in OF_CODE and scale != ""


def make_unit_parts(style, codec, src_inner, dst_inner, scale):
    """(read, write, largest, numbers, type): read and write a unit as a vector of `numbers` of this type."""
    raw = codec.src == "raw"
    dequantising, dividing = has_scale(codec.src, scale), codec.dst in FLOAT8 and scale != ""
    ratio, product = make_ratio(style), make_code_product(style)
    src_at, dst_at = make_word_offset(*src_inner), make_word_offset(*dst_inner)
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
            products = ti.Vector([product(values[e], factor) for e in range(codec.elements)])
            store(b, dst_row + dst_at(u * dst_words), products, factor)
        elif ti.static(dividing):
            quotients = ti.Vector([ratio(values[e], factor) for e in range(codec.elements)])
            store(b, dst_row + dst_at(u * dst_words), quotients, factor)
        else:
            store(b, dst_row + dst_at(u * dst_words), values, factor)

    @ti.func
    def largest(values):
        m = ti.u32(0)
        for e in ti.static(range(codec.elements)):
            m = ti.max(m, finite_magnitude_bits(values[e]))
        return m

    return read, write, largest, 1 if raw else codec.elements, word if raw else ti.f32


def make_rows(heads, stream, src_inner, dst_inner, scale, types):
    """CPU: rows(src, dst, scales, src_row, dst_row, scale_at, units, src_head, ..., number): moves a token's rows.

    The strides between heads in src, dst and scales come before the number.
    """
    codec = stream.codec
    quantising = codec.finds_scale
    scaled = has_scale(codec.src, scale) or has_scale(codec.dst, scale)
    _, move_unit = make_unit("cpu", codec, src_inner, dst_inner, scale)
    number_type, magnitude, to_bits = make_word_magnitude(codec.src) if quantising else (None, None, None)
    src_at = make_word_offset(*src_inner)
    scale_bits = make_scale(scale, "cpu") if quantising else None
    reciprocal = make_reciprocal("cpu")
    scale_value = make_bits_to_f32(scale) if scale else None
    scale_word = SCALE_WORD[scale]
    SRC, DST, SCALE = types

    # A real function takes the arrays' pointers into registers, so LLVM can vectorise the loops. Its number tells
    # kernels apart that differ only in the functions they call. LLVM does not know that `units` is not negative, hence
    # not the number of heads: it would unroll 8 known heads, which takes four times as long to compile for no speed.
    @ti.real_func
    def rows(a: SRC, b: DST, scales: SCALE, src_row: ti.i32, dst_row: ti.i32, scale_at: ti.i32, units: ti.i32,
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
            elif ti.static(scaled):
                factor = scale_value(scales[at])
            for u in range(units):
                move_unit(a, b, s, d, u, factor)

    return rows


def make_shared_row(style, lanes, stream, src_inner, dst_inner, scale):
    """(read_row, write_row): read all of a lane's units of a row, which `lanes` GPU threads share, then write them.

    read_row(src, lane, src_row) -> vector. write_row(dst, scales, thread, lane, ok, dst_row, scale_at, vector,
    scale of a tensor).
    """
    codec, units = stream.codec, stream.units
    quantising = codec.finds_scale
    scaled = has_scale(codec.src, scale) or has_scale(codec.dst, scale)
    read, write, largest, numbers, number_type = make_unit_parts(style, codec, src_inner, dst_inner, scale)
    scale_bits = make_scale(scale, style) if quantising else None
    reciprocal = make_reciprocal(style)
    scale_value = make_bits_to_f32(scale) if scale else None
    scale_word = SCALE_WORD[scale]
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
    def write_row(b: ti.template(), scales: ti.template(), thread, lane, ok, dst_row, scale_at, held, tensor):
        factor = ti.f32(1.0)
        if ti.static(quantising):
            m = ti.u32(0)
            for n in ti.static(range(rounds)):
                m = ti.max(m, largest(ti.Vector([held[n * numbers + e] for e in range(numbers)])))
            bits = scale_bits(row_max(thread, m))
            factor = reciprocal(scale_value(bits))
            if ok and lane == 0:
                scales[scale_at] = ti.cast(bits, scale_word)
        elif ti.static(scaled):
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
