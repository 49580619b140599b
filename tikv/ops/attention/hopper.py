"""Whether warpgroups of compute capability 9.0 are used, for prompts and latents: they need the native launcher."""

from __future__ import annotations

import math
from typing import Any

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.ops.attention.launches import row_bytes
from tikv.ops.attention.options import AttentionOptions, CacheLayout, QueryShape
from tikv.ops.attention.tensor_cores import why_no_products, why_not_tensor_cores
from tikv.ops.attention.terms import tree_of

LEAST_ROWS = 128  # query rows per KV head: fewer would leave part of a block idle


def why_not_warpgroups(
    live: runtime.Runtime,
    arrays: dict[str, ArrayView],
    query: QueryShape,
    cache: CacheLayout,
    options: AttentionOptions,
) -> str:
    """Why warpgroups cannot attend over arrays of this form; empty if they can."""
    if reason := launch.why_no_warpgroups(live):
        return reason
    from tikv.kernels.attention import hopper
    from tikv.kernels.attention.tensor_instructions import HALVES

    halves = cache.k.storage in HALVES
    if reason := why_no_products(live, arrays, cache) if halves else _why_not_codes(arrays, cache, options):
        return reason
    if cache.chosen:
        return "each query chooses its own tokens"
    if cache.width != cache.width_v or cache.width not in hopper.KEYS_OF:
        return f"heads are {cache.width} and {cache.width_v} wide"
    rows = query.queries * (query.heads // cache.heads)
    if query.queries == 1 or rows < LEAST_ROWS:
        return f"a KV head has {rows} query rows"
    if reason := _why_not_rows_of_queries(arrays["q"], query):
        return reason
    if options.scale is not None and not 0 < options.scale < math.inf:
        return f"scores are scaled by {options.scale}"
    if "alibi_slopes" in arrays and options.sharded[0]:
        return "alibi_slopes count tokens of other ranks"
    if "alibi_slopes" in arrays and (tree := tree_of(arrays)) and options.softcap is not None:
        return f"alibi_slopes and {tree} are given with softcap, which has not been tested on such a GPU yet"
    return ""


def _why_not_rows_of_queries(q: ArrayView, query: QueryShape) -> str:
    """Why rows of queries cannot be copied in pieces; empty if they can."""
    from tikv.kernels.attention.hopper import PIECE

    if any(n % PIECE for n in (q.ptr or 0, q.offset, *(n * q.dtype.itemsize for n in query.strides))):
        return f"not every row of q begins at a multiple of {PIECE} bytes"
    return ""


def _why_not_codes(arrays: dict[str, ArrayView], cache: CacheLayout, options: AttentionOptions) -> str:
    """The part of `why_not_warpgroups` for K and V of other types than float16 and bfloat16."""
    from tikv.kernels.attention import hopper_codes
    from tikv.kernels.attention.tensor_instructions import HALVES

    q, storage = arrays["q"], cache.k.storage
    if not cache.alike or hopper_codes.codes_of(storage, cache.width, True) is None:
        return f"K and V are {cache.k.format or cache.k.array.dtype.name}"
    if q.dtype.short not in HALVES:
        return f"q is {q.dtype.name}, over codes"
    if cache.k.inner[0] or cache.v.inner[0]:
        return "rows are stored in several pieces"
    least = hopper_codes.piece_bytes(storage, cache.width)
    if row_bytes(arrays["k"], arrays["v"], cache, least) != least:
        return f"not every row begins at a multiple of {least} bytes"
    return ""


def why_not_latents(live: runtime.Runtime, arrays: dict[str, ArrayView], query: QueryShape, cache: CacheLayout) -> str:
    """Why warpgroups cannot attend over latents of this form; empty if they can."""
    if reason := launch.why_no_warpgroups(live):
        return reason
    from tikv.kernels.attention import latent

    if not cache.in_keys:
        return "the values are an array of their own"
    if reason := why_not_tensor_cores(live, arrays, cache):
        return reason
    if (cache.width, cache.width_v) != (latent.WIDTH, latent.WIDTH_V):
        return f"heads are {cache.width} and {cache.width_v} wide"
    return _why_not_rows_of_queries(arrays["q"], query)


def choose_latents(live: runtime.Runtime, arrays: dict[str, ArrayView], query: QueryShape, cache: CacheLayout) -> Any:
    """How the work over latents is shared out, as `Latents`; None if other kernels are used."""
    if why_not_latents(live, arrays, query, cache):
        return None
    from tikv.kernels.attention import latent

    return latent.tile_of(query.heads // cache.heads, 1 if cache.chosen else query.queries)


def choose_warpgroups(
    live: runtime.Runtime,
    arrays: dict[str, ArrayView],
    query: QueryShape,
    cache: CacheLayout,
    options: AttentionOptions,
) -> Any:
    """How the work of warpgroups is shared out, as `Warpgroups` or `Latents`; None if other kernels are used."""
    if latents := choose_latents(live, arrays, query, cache):
        return latents
    if why_not_warpgroups(live, arrays, query, cache, options):
        return None
    from tikv.kernels.attention import hopper
    from tikv.kernels.attention.tensor_instructions import HALVES

    return hopper.Warpgroups(producers=hopper.producers_of(cache.k.storage not in HALVES, cache.width))
