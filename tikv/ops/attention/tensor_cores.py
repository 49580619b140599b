"""Whether attention uses CUDA's tensor cores, and how their work is shared out."""

from __future__ import annotations

from typing import Any

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.ops.attention.launches import row_bytes
from tikv.ops.attention.options import CacheLayout, QueryShape
from tikv.ops.attention.terms import TREES, Terms


def why_not_tensor_cores(live: runtime.Runtime, arrays: dict[str, ArrayView], cache: CacheLayout) -> str:
    """Why tensor cores cannot attend over arrays of this form; empty if they can."""
    if reason := why_no_products(live, arrays, cache):
        return reason
    return why_not_terms(arrays)


def why_not_terms(arrays: dict[str, ArrayView]) -> str:
    """Which terms are given that kernels do not have; empty if no term is given."""
    terms = [name for name in dict.fromkeys((*Terms._fields, *TREES)) if name in arrays and name != "indices"]
    return f"{' and '.join(terms)} are given" if terms else ""


def why_no_products(live: runtime.Runtime, arrays: dict[str, ArrayView], cache: CacheLayout) -> str:
    """Why tensor cores cannot multiply q, K and V as they are stored; empty if they can."""
    if reason := launch.why_no_tensor_cores(live):
        return reason
    if live.invariant and (reason := launch.why_not_native(live)):
        return f"tikv.init(invariant=True) is set, and {reason}"  # others may fuse products with sums
    from tikv.kernels.attention import tensor_cores
    from tikv.kernels.attention.tensor_instructions import HALVES

    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if cache.k.storage not in HALVES:
        if live.invariant:
            return "tikv.init(invariant=True) is set, and the order of their sums over codes depends on the queries"
        if reason := _why_not_codes(live, q, cache):
            return reason
    elif v.dtype is not k.dtype or q.dtype is not k.dtype:
        return f"q is {q.dtype.name}, K {k.dtype.name}, V {v.dtype.name}"
    elif not tensor_cores.serves_widths(cache.width, cache.width_v):
        return f"heads are {cache.width} and {cache.width_v} wide"
    if cache.k.inner[0] or cache.v.inner[0]:
        return "rows are stored in several pieces"
    if row_bytes(k, v, cache, tensor_cores.ROW_BYTES) != tensor_cores.ROW_BYTES:
        return f"not every row begins at a multiple of {tensor_cores.ROW_BYTES} bytes"
    return ""


def _why_not_codes(live: runtime.Runtime, q: ArrayView, cache: CacheLayout) -> str:
    """The part of `why_not_tensor_cores` for K and V that are codes."""
    from tikv.kernels.attention import tensor_codes, tensor_floats
    from tikv.kernels.attention.tensor_kinds import kind_of

    storage = cache.k.storage
    if needs_native(cache) and (reason := launch.why_no_hopper(live)):
        return f"K and V are {cache.k.format or cache.k.array.dtype.name}, and {reason}"
    if tensor_codes.codes_of(storage, cache.width) is None or not cache.alike:
        return f"K and V are {cache.k.format or cache.k.array.dtype.name}"
    if q.dtype.short not in tensor_codes.QUERIES:
        return f"q is {q.dtype.name}, over codes"
    if cache.width not in tensor_codes.WIDTHS or cache.width_v not in tensor_codes.WIDTHS:
        return f"heads are {cache.width} and {cache.width_v} wide"
    if 0 in kind_of(storage).word_bits(storage, cache.width, cache.width_v):
        return f"threads cannot share whole words of {storage} in heads {cache.width} and {cache.width_v} wide"
    scales = [scale.array for scale in cache.scales]
    together = 2 if cache.k.format and cache.k.format.numbers == 2 else 1
    if storage in tensor_floats.KINDS:
        together = tensor_floats.scales_per_word(storage, cache.width, cache.width_v)
    elif [a.dtype.short for a in scales] != ["f16", "f16"]:
        return f"scales are {scales[0].dtype.name}"
    nbytes = together * scales[0].dtype.itemsize if together > 1 else 1
    return "" if scales_begin_at(cache, nbytes) else f"the scales of a row do not begin at a multiple of {nbytes} bytes"


def scales_begin_at(cache: CacheLayout, nbytes: int) -> bool:
    """Whether the scales of every row of K and V begin at a multiple of so many bytes."""
    scales = [scale.array for scale in cache.scales]
    places = (*(a.ptr or 0 for a in scales), *(a.offset for a in scales))
    steps = (n * a.dtype.itemsize for a in scales for n in cache.scale_strides)
    return not any(at % nbytes for at in (*places, *steps))


def copies_tiles(live: runtime.Runtime, cache: CacheLayout) -> bool:
    """Whether warps copy tiles of a cache into shared memory: see `kernels.attention.tensor_copies`."""
    from tikv.kernels.attention import tensor_copies

    storage, widths = cache.k.storage, (cache.width, cache.width_v)
    if cache.place != "linear" or cache.chosen or not tensor_copies.blocks_of(storage, *widths):
        return False
    numbers = tensor_copies.copied(storage, *widths).numbers
    return not launch.why_no_hopper(live) and scales_begin_at(cache, min(tensor_copies.WORD, numbers))


def why_not_by_channel(live: runtime.Runtime, arrays: dict[str, ArrayView], cache: CacheLayout) -> str:
    """Why tensor cores cannot read keys that are codes by channel, see `CacheLayout.by_channel`; empty if they can."""
    if live.invariant:
        return "tikv.init(invariant=True) is set, and the order of their sums over codes depends on the queries"
    if reason := launch.why_no_tensor_cores(live):
        return reason
    from tikv.kernels.attention import tensor_channels, tensor_codes, tensor_cores
    from tikv.kernels.attention.tensor_instructions import HALVES
    from tikv.kernels.attention.tensor_kinds import kind_of

    q, storage, group = arrays["q"], cache.v.storage, tensor_channels.GROUP
    codes, of_values = tensor_codes.codes_of(cache.k.storage, group), tensor_codes.codes_of(storage, cache.width_v)
    if codes is None or (codes.group, codes.numbers) != (group, 2):
        return f"K is {cache.k.format} by channel"
    if q.dtype.short not in tensor_codes.QUERIES:
        return f"q is {q.dtype.name}, over codes by channel"
    if cache.width != cache.width_v or cache.width not in tensor_codes.WIDTHS:
        return f"heads are {cache.width} and {cache.width_v} wide"
    if storage not in HALVES and (of_values is None or kind_of(storage) is not tensor_codes):
        return f"V is {cache.v.format or cache.v.array.dtype.name}"
    if 0 in tensor_channels.word_bits(cache.k.storage, storage, cache.width_v):
        return f"threads cannot share whole words of {storage} in heads {cache.width_v} wide"
    for scale in cache.scales:
        if scale.array.dtype.short != "f16":
            return f"scales are {scale.array.dtype.name}"
    if row_bytes(arrays["k"], arrays["v"], cache, tensor_cores.ROW_BYTES) != tensor_cores.ROW_BYTES:
        return f"not every row begins at a multiple of {tensor_cores.ROW_BYTES} bytes"
    for scale in cache.scales:
        if (scale.array.ptr or 0) % tensor_channels.NUMBER_BYTES or scale.array.offset % tensor_channels.NUMBER_BYTES:
            return f"scales do not begin at a multiple of {tensor_channels.NUMBER_BYTES} bytes"
    return ""


def needs_native(cache: CacheLayout) -> bool:
    """Whether the tensor cores' kernel for a cache has instructions that only the native launcher can ask for."""
    from tikv.kernels.attention.tensor_floats import NEEDS_NATIVE

    return cache.k.storage in NEEDS_NATIVE


def choose_tile(
    live: runtime.Runtime, arrays: dict[str, ArrayView], query: QueryShape, cache: CacheLayout, softcap: bool = False
) -> Any:
    """How the tensor cores' work is shared out, as a `Tile`; None if other kernels are used."""
    if cache.by_channel:
        from tikv.kernels.attention import tensor_channels

        return tensor_channels.tile_of(cache.k.storage, cache.v.storage)
    if why_not_tensor_cores(live, arrays, cache):
        return None
    from tikv.kernels.attention import tensor_cores
    from tikv.kernels.attention.staged import KEYS
    from tikv.kernels.attention.tensor_instructions import HALVES

    group, codes = query.heads // cache.heads, "" if cache.k.storage in HALVES else cache.k.storage
    rows, long = group * query.queries, softcap or cache.sinks > 0
    if live.invariant:
        rows = group if cache.chosen else rows
        long = long or cache.chosen or cache.place == "ring" or cache.page % KEYS != 0
        return tensor_cores.invariant_tile_of(cache.width, cache.width_v, rows, long)
    if cache.chosen:
        rows = group  # a task has the rows of one query
    else:
        long = query.queries > 1 and (long or cache.place == "table")
    copied = bool(codes) and copies_tiles(live, cache)
    return tensor_cores.tile_of(max(cache.width, cache.width_v), rows, codes, long, copied)
