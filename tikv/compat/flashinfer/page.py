"""FlashInfer's functions of pages, such as `append_paged_kv_cache`."""

from __future__ import annotations

import math
from typing import Any

from tikv import dtypes
from tikv.arrays import Array, describe, view
from tikv.compat.flashinfer.nvfp4 import written_pools
from tikv.compat.flashinfer.pools import check_layout, pools_of, slots_of_page
from tikv.compat.indices import Indices, on_host, refuse_option
from tikv.compat.ragged_rows import first_rows, with_one_head
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks, paged
from tikv.ops.attention.options import real
from tikv.ops.quantized_arrays import Quantized
from tikv.ops.write_pages import write_pages
from tikv.runtime import current


def append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array,
    positions: Array,
    paged_kv_cache: Array | tuple[Array, Array],
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
    kv_layout: str = "NHD",
) -> None:
    """Write ragged new keys and values into a paged cache.

    Args:
        append_key, append_value: (nnz, H, D).
        batch_indices, positions: (nnz,) integers: the request of each token, and the token's position in it; -1 skips a
            token.
        paged_kv_cache: (N, 2, bs, H, D) for NHD, (N, 2, H, bs, D) for HND; or a tuple (k, v) of
            arrays without the axis of 2. Pages of one token may also omit the axis of 1.
        kv_indices: the pages of all requests, one after the other.
        kv_indptr: (B + 1,): where each request's pages start.
        kv_last_page_len: (B,): filled slots in each last page, the appended tokens included; not read.
        kv_layout: "NHD" or "HND".

    Raises:
        OptionError: another layout.
        PositionError: a page is outside the cache, a request does not exist, or a position lies beyond a request's
            pages. This is checked where the indices lie on the host; on a device such a token is skipped.

    Exactness: bit-exact. Cost: one launch. It finds the slots itself if the indices lie on the device; otherwise NumPy
        finds them first.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> cache = np.zeros((2, 2, 2, 1, 1), np.float32)
        >>> rows = np.ones((1, 1, 1), np.float32)
        >>> pages, starts, last = np.array([1]), np.array([0, 1]), np.array([2])
        >>> flashinfer.append_paged_kv_cache(rows, rows, np.array([0]), np.array([1]), cache, pages, starts, last)
        >>> cache[1, 0].ravel().tolist()
        [0.0, 1.0]
    """
    operation = "flashinfer.append_paged_kv_cache"
    check_layout(kv_layout, operation)
    k_pool, v_pool = pools_of(paged_kv_cache, kv_layout, operation)
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _append(operation, (append_key, append_value), (k_pool, v_pool), indices, kv_layout)


def append_paged_mla_kv_cache(
    append_ckv: Array,
    append_kpe: Array,
    batch_indices: Array,
    positions: Array,
    ckv_cache: Array,
    kpe_cache: Array,
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
) -> None:
    """Write ragged new latent keys into pages, both parts in one launch.

    Args:
        append_ckv, append_kpe: (nnz, ckv_dim) and (nnz, kpe_dim), of any widths.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as in `append_paged_kv_cache`.
        ckv_cache, kpe_cache: (N, page_size, ckv_dim) and (N, page_size, kpe_dim); they may be columns of one array.

    Raises:
        ShapeError, DTypeError, PositionError: as in `append_paged_kv_cache`. Nothing is written.

    Exactness, cost: as `append_paged_kv_cache`.
    """
    operation = "flashinfer.append_paged_mla_kv_cache"
    rows, pools = [], []
    for name, a, cache in (("ckv", append_ckv, ckv_cache), ("kpe", append_kpe, kpe_cache)):
        new, held = view(a, f"append_{name}", operation), view(cache, f"{name}_cache", operation)
        checks.rank(new, (2,), f"append_{name}", f"(nnz, {name}_dim)", operation)
        checks.rank(held, (3,), f"{name}_cache", f"(N, page_size, {name}_dim)", operation)
        rows.append(with_one_head(new, 1))
        pools.append(with_one_head(held, 2))
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _append(operation, (rows[0], rows[1]), (pools[0], pools[1]), indices, "NHD")


def nvfp4_quantize_append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array,
    positions: Array,
    paged_kv_cache: Array | tuple[Array, Array],
    kv_cache_sf: tuple[Array, Array],
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
) -> None:
    """Write ragged new keys and values into pages in nvfp4.

    Args:
        append_key, append_value: (nnz, H, D) float32, float16 or bfloat16, with D a multiple of 16.
        batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len: as in `append_paged_kv_cache`.
        paged_kv_cache: uint8, (N, 2, bs, H, D / 2) or a pair (N, bs, H, D / 2): two codes in a byte, the first one in
            the lower four bits.
        kv_cache_sf: a pair of contiguous arrays (N, bs, H, D / 16), float8_e4m3fn or its bits in uint8: the scales of
            groups of 16.
        k_scale, v_scale: positive numbers, by which all keys and all values are divided first.
        kv_layout: "NHD".

    Raises:
        OptionError: another layout, or a scale that is not a positive number.
        ShapeError, DTypeError, PositionError: as in `append_paged_kv_cache`. Nothing is written.

    Exactness: the bits of `tikv.quantize` with ``tensor_scale``. FlashInfer divides in another order, so that a scale
        or a code may be the neighbouring one if a number lies between two of them. Cost: as `append_paged_kv_cache`,
        with arithmetic on the indices before the launch.
    """
    operation = "flashinfer.nvfp4_quantize_append_paged_kv_cache"
    check_layout(kv_layout, operation)
    pools = written_pools(operation, paged_kv_cache, kv_cache_sf, kv_layout, _positive(operation, k_scale, v_scale))
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _append(operation, (append_key, append_value), pools, indices, kv_layout)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: Array,
    append_value: Array,
    slot_mapping: Array,
    paged_kv_cache: Array | tuple[Array, Array],
    kv_cache_sf: tuple[Array, Array],
    k_scale: float,
    v_scale: float,
    kv_layout: str = "NHD",
    nvfp4_4over6: Any = None,
) -> None:
    """As `nvfp4_quantize_append_paged_kv_cache`, with the slot of each token.

    Args:
        append_key, append_value: (rows, H, D), of which those are written that have a slot.
        slot_mapping: (nnz,) integers, ``page * page_size + place``; a negative one skips the token.
        paged_kv_cache, kv_cache_sf, k_scale, v_scale, kv_layout: as in `nvfp4_quantize_append_paged_kv_cache`.
        nvfp4_4over6: must be None.

    Raises:
        OptionError, ShapeError, DTypeError, PositionError: as in `nvfp4_quantize_append_paged_kv_cache`. Nothing is
            written.
    """
    operation = "flashinfer.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"
    check_layout(kv_layout, operation)
    if nvfp4_4over6 is not None:
        refuse_option(operation, nvfp4_4over6=(nvfp4_4over6, "None: scales are those of amax / 6"))
    pools = written_pools(operation, paged_kv_cache, kv_cache_sf, kv_layout, _positive(operation, k_scale, v_scale))
    slots = Indices(operation, {"slot_mapping": slot_mapping}).array("slot_mapping", (None,), "(nnz,)")
    rows = [
        first_rows(a, slots.shape[0], name, operation)
        for name, a in (("append_key", append_key), ("append_value", append_value))
    ]
    paged.slots_call(operation, rows[0], rows[1], *pools, slots, layout=kv_layout).run()


def _positive(operation: str, k_scale: Any, v_scale: Any) -> tuple[float, float]:
    """Scales of all keys and of all values, checked.

    Raises:
        OptionError: one is not a positive number.
    """
    numbers = list[float]()
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        number = real(value, name, operation)
        if number is None or not (math.isfinite(number) and number > 0):
            refuse_option(operation, **{name: (value, "a positive number")})
        else:
            numbers.append(number)
    return numbers[0], numbers[1]


def _append(
    operation: str,
    rows: tuple[Any, Any],
    pools: tuple[Any, Any],
    indices: dict[str, Any],
    layout: str,
) -> None:
    """Write rows of keys and values into pools, where FlashInfer's indices of tokens and pages say.

    Raises:
        ShapeError, DTypeError, PositionError: as in `append_paged_kv_cache`. Nothing is written.
    """
    codes = any(isinstance(pool, Quantized) for pool in pools)
    if not codes and not any(map(on_host, indices.values())) and not current().debug:
        names = ("batch_indices", "positions", "kv_indices", "kv_indptr")
        arrays = [indices[name] for name in names]
        write_pages(operation, *rows, *pools, arrays[0], arrays[1], arrays[2], arrays[3], layout)
        return
    index = Indices(operation, indices)
    batch = index.array("batch_indices", (None,), "(nnz,)")
    position = index.array("positions", (batch.shape[0],), "(nnz,)")
    pages, starts = index.array("kv_indices", (None,), "(pages,)"), index.array("kv_indptr", (None,), "(B + 1,)")
    requests, where = starts.shape[0] - 1, index.library.where
    block_size = slots_of_page(pools[0], layout)
    skipped = (batch < 0) | (position < 0)
    unknown = ~skipped & (batch >= requests)
    index.refuse_where(
        unknown,
        lambda t: (
            f"batch_indices{[*t]}={int(batch[t])}, and there are {requests} requests. Use 0..{requests - 1}, or a "
            f"negative number to skip the token."
        ),
    )
    zero = index.library.zeros_like(batch)
    left_out = skipped | unknown
    batch, position = where(left_out, zero, batch), where(left_out, zero, position)
    slots, beyond = zero - 1, ~left_out
    if pages.shape[0] and block_size and requests > 0:
        page = starts[batch] + position // block_size
        inside = (page >= 0) & (page < pages.shape[0])
        block = pages[where(inside, page, zero)]
        beyond = ~left_out & (~inside | (page >= starts[batch + 1]) | (block < 0))
        slots = where(left_out | beyond, slots, block * block_size + position % block_size)
    index.refuse_where(
        beyond,
        lambda t: (
            f"positions{[*t]}={int(position[t])} has no page in kv_indices of request {int(batch[t])}. The page "
            f"table must include pages for the new tokens; position -1 skips a token."
        ),
    )
    paged.slots_call(operation, *rows, *pools, slots, layout=layout).run()


def get_seq_lens(kv_indptr: Array, kv_last_page_len: Array, page_size: int) -> Array:
    """(B,) int32: the tokens of each request, from its number of pages and the filled slots of its last page.

    Raises:
        ShapeError, DTypeError, PositionError: an argument is not such an array, or they do not fit each other.
    """
    operation = "flashinfer.get_seq_lens"
    page_size = checks.integer(page_size, "page_size", operation, low=1)
    index = Indices(operation, {"kv_indptr": kv_indptr, "kv_last_page_len": kv_last_page_len})
    starts = index.array("kv_indptr", (None,), "(B + 1,)")
    last = index.array("kv_last_page_len", (max(0, starts.shape[0] - 1),), "(B,)")
    pages = starts[1:] - starts[:-1]
    lens = index.library.where(pages > 0, (pages - 1) * page_size + last, index.library.zeros_like(last))
    return index.like_given(lens)


def get_batch_indices_positions(
    append_indptr: Array,
    seq_lens: Array | int,
    nnz: int,
    batch_indices: Array | None = None,
    positions: Array | None = None,
) -> tuple[Array, Array]:
    """(batch_indices, positions), each (nnz,) int32: the request and the position of each appended token.

    Args:
        append_indptr: (B + 1,): where each request's new tokens start.
        seq_lens: (B,): tokens of each request, the new ones included.
        nnz: entries to return; those at or after ``append_indptr[-1]`` are -1.
        batch_indices, positions: arrays to fill and return; None for new ones.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> batch, position = flashinfer.get_batch_indices_positions(np.array([0, 1, 3]), np.array([4, 2]), 4)
        >>> batch.tolist(), position.tolist()
        ([0, 1, 1, -1], [3, 0, 1, -1])
    """
    operation = "flashinfer.get_batch_indices_positions"
    nnz = checks.integer(nnz, "nnz", operation)
    index = Indices(operation, {"append_indptr": append_indptr, "seq_lens": seq_lens})
    starts = index.array("append_indptr", (None,), "(B + 1,)")
    if not starts.shape[0]:
        raise ShapeError(f"{operation}: append_indptr is empty; it needs one more entry than there are requests.")
    lens, where = index.array("seq_lens", (starts.shape[0] - 1,), "(B,)"), index.library.where
    for name, out in (("batch_indices", batch_indices), ("positions", positions)):
        if out is not None:
            _check_filled(out, name, nnz, operation)
    token = index.arange(nnz)
    batch = index.library.searchsorted(starts[1:], token, side="right")
    known = where(token >= starts[-1], index.library.zeros_like(batch), batch)
    minus = index.library.zeros_like(batch) - 1
    position = minus
    if lens.shape[0]:
        position = where(token >= starts[-1], minus, lens[known] - (starts[known + 1] - token))
    results = [index.like_given(a) for a in (where(token >= starts[-1], minus, batch), position)]
    for i, out in enumerate((batch_indices, positions)):
        if out is not None:
            out[:nnz] = results[i]
            results[i] = out
    return results[0], results[1]


def _check_filled(array: Array, name: str, entries: int, operation: str) -> None:
    """Check that a caller's array takes so many indices.

    Raises:
        ShapeError, DTypeError: it does not.
    """
    indices = view(array, name, operation)
    checks.rank(indices, (1,), name, "(nnz,)", operation)
    checks.writable(indices, name, operation)
    if indices.dtype not in dtypes.INDICES:
        raise DTypeError(f"{operation}: {name} is {describe(indices)}; indices must be int32 or int64.")
    if indices.shape[0] < entries:
        raise ShapeError(f"{operation}: {name} is {describe(indices)}, shorter than nnz={entries}.")
