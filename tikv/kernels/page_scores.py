"""The highest score that a key of a page can have, from the least and the greatest number in each channel."""

import zlib
from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.attention.parameters import FLOATS, MINUS_INFINITY
from tikv.kernels.codec import SIZE, element_array, make_load
from tikv.kernels.lanes import make_loop
from tikv.kernels.page_summaries import make_length_of
from tikv.runtime import ti


class PageParams(NamedTuple):
    """Numbers of a launch; strides and first entries in elements."""

    items: int = 0
    groups: int = 1  # on CUDA, of lanes that have pages
    heads: int = 1  # KV heads
    group: int = 1  # query heads of each
    queries: int = 1
    pages: int = 1
    page: int = 1  # tokens of one
    length: int = 0  # of every sequence, where there is no array of lengths
    capacity: int = 0
    lens_sequence: int = 0
    lens_first: int = 0
    k_sequence: int = 0  # of queries
    k_head: int = 0
    k_token: int = 0
    k_first: int = 0
    least_sequence: int = 0
    least_head: int = 0
    least_page: int = 0
    least_first: int = 0
    greatest_sequence: int = 0
    greatest_head: int = 0
    greatest_page: int = 0
    greatest_first: int = 0
    out_first: int = 0


P = PageParams(*range(len(PageParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_page_scores(style, serial, query, code, width, lens_bits):
    """scores(q, least, greatest, lens, out, params): an item is a page, for a query of a KV head's query heads.

    Not cached: its real function, whose sums LLVM vectorises, belongs to one Taichi program.

    `query` and `code` are the dtypes of q and of the summaries. A page none of whose tokens a query sees has -infinity.
    For CPU, Vulkan and Metal; CUDA has `page_scores_cuda`.
    """
    uid = zlib.crc32(repr(("page_scores", serial, query, code, width, lens_bits)).encode()) >> 1
    Q, K, LENS = element_array(query), element_array(code), index_array(lens_bits)
    load_q, load_k = make_load(query, 1, SIZE[query] * 8), make_load(code, 1, SIZE[code] * 8)
    length_of = make_length_of(lens_bits, P)

    def products(q: Q, least: K, greatest: K, at: ti.i32, low: ti.i32, high: ti.i32, number: ti.i32) -> ti.f32:
        total = ti.f32(0.0)
        for d in range(width):
            x, y, z = load_q(q, at + d)[0], load_k(least, low + d)[0], load_k(greatest, high + d)[0]
            total += x * ti.select(x > ti.f32(0.0), z, y)
        return total

    products = ti.real_func(products) if style == "cpu" else ti.func(products)

    @ti.func
    def score_page(i, arrays: ti.template(), params):
        q, least, greatest, lens, out = ti.static(arrays)
        page, others = i % params[P.pages], i // params[P.pages]
        t, kv_head = others % params[P.queries], others // params[P.queries]
        b, h = kv_head // params[P.heads], kv_head % params[P.heads]
        low = params[P.least_first] + b * params[P.least_sequence] + h * params[P.least_head]
        low += page * params[P.least_page]
        high = params[P.greatest_first] + b * params[P.greatest_sequence] + h * params[P.greatest_head]
        high += page * params[P.greatest_page]
        score = ti.bit_cast(ti.u32(MINUS_INFINITY), ti.f32)
        if page * params[P.page] < length_of(b, lens, params) - (params[P.queries] - 1 - t):
            score = ti.f32(0.0)
            for g in range(params[P.group]):
                at = params[P.k_first] + b * params[P.k_sequence] + (h * params[P.group] + g) * params[P.k_head]
                at += t * params[P.k_token]
                score += products(q, least, greatest, at, low, high, uid)
        out[params[P.out_first] + i] = score

    loop = make_loop(style, serial, score_page, P.items)

    @ti.kernel
    def scores(q: Q, least: K, greatest: K, lens: LENS, out: FLOATS, params: PARAMS):
        loop(q, params, ((q, least, greatest, lens, out), params))

    return scores


make_page_scores.fast_math = True
