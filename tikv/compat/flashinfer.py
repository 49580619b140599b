"""FlashInfer's page functions, such as `append_paged_kv_cache`, and its wrapper of paged decode as a single function.

As in FlashInfer, page tables and last-page lengths already count the tokens that are being appended, log-sum-exps are
of base 2, and pages of one token may omit the axis of length 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import (
    Array,
    Arrays,
    ArrayView,
    CacheArray,
    describe,
    handed_over,
    new_like,
    refuse_backward,
    runtime_of,
    view,
    write_host,
)
from tikv.compat.indices import Indices, for_operation, library_of, on_host, refuse_option
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks, paged
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.merge import merge_into, merge_parts
from tikv.ops.attention.options import QUERIES, real
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.indices import host_integers
from tikv.ops.quantize import Quantized
from tikv.ops.write_pages import write_pages
from tikv.runtime import current

LAYOUTS = ("NHD", "HND")
SCALED = (*dtypes.FLOATS8, dtypes.int8)  # dtypes of pools whose scales attention multiplies by as it reads


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
    _check_layout(kv_layout, operation)
    k_pool, v_pool = _pools(paged_kv_cache, kv_layout, operation)
    indices = {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    if not any(map(on_host, indices.values())) and not current().debug:
        write_pages(
            operation, append_key, append_value, k_pool, v_pool, batch_indices, positions, kv_indices, kv_indptr,
            kv_layout,
        )  # fmt: skip
        return
    index = Indices(operation, indices)
    batch = index.array("batch_indices", (None,), "(nnz,)")
    position = index.array("positions", (batch.shape[0],), "(nnz,)")
    pages, starts = index.array("kv_indices", (None,), "(pages,)"), index.array("kv_indptr", (None,), "(B + 1,)")
    requests, where = starts.shape[0] - 1, index.library.where
    block_size = _slots_of_page(k_pool, kv_layout)
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
    paged.slots_call(operation, append_key, append_value, k_pool, v_pool, slots, layout=kv_layout).run()


def batch_decode_with_paged_kv_cache(
    q: Array,
    paged_kv_cache: Array | tuple[Array, Array],
    paged_kv_indptr: Array,
    paged_kv_indices: Array,
    paged_kv_last_page_len: Array,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    custom_mask: Array | None = None,
    packed_custom_mask: Array | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
    return_lse: bool = False,
) -> Arrays:
    """Attention of the newest tokens of several requests over their pages, which are read in place.

    Args:
        q: (B, Hq, D), or (B, T, Hq, D) for T new tokens per request; the pages already hold their keys and values.
        paged_kv_cache: (N, 2, bs, H, D) for NHD, (N, 2, H, bs, D) for HND; or a tuple (k, v) of
            arrays without the axis of 2. Pages of one token may also omit the axis of 1.
        paged_kv_indptr: (B + 1,): where each request's pages start.
        paged_kv_indices: the pages of all requests, one after the other.
        paged_kv_last_page_len: (B,): filled slots in each last page.
        kv_layout: "NHD" or "HND".
        causal: each query sees the tokens up to its own; otherwise it sees all. Ignored with a mask.
        custom_mask: bool: the tokens that each query sees, a (T, length) mask per request, flattened, one request after
            the other. It must show every token before the T new ones.
        packed_custom_mask: the same mask in uint8, with 8 tokens in a byte, the lowest bit first; each request starts a
            new byte.
        window_left: how many tokens before its own a query sees; -1 for all. Not allowed with a mask.
        logits_soft_cap: None or 0 for no cap.
        sm_scale: None for ``1 / sqrt(D)``.
        q_scale, k_scale, v_scale: numbers: ``q_scale`` and ``k_scale`` multiply the scores, and ``v_scale`` the result.
            For pools in 8-bit floats, ``k_scale`` and ``v_scale`` may also be (H,) arrays; int8 pools need theirs.
        sinks: (Hq,) float32: one more logit for each query head, which counts in the denominator only.
        out: an array for the result; None for a new one.
        return_lse: also return the log-sum-exp of base 2, (B, Hq) or (B, T, Hq) float32.

    Returns:
        An array shaped as q, with V's width; with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: another layout, a window with a mask, two masks, or a mask that hides a token before the new ones.
        ShapeError: the mask has another size.
        ShapeError, DTypeError, PositionError: as `tikv.paged_decode_attention`.

    Exactness: as `tikv.paged_decode_attention`. Unless the pools are in 8 bits, ``v_scale`` multiplies the result after
        it is rounded, as in FlashInfer, which rounds once more. Cost: the same, with index arithmetic before it. If
        ``paged_kv_indptr`` and ``paged_kv_last_page_len`` lie on a device, the call waits for them. It waits for a mask
        too, to check the older tokens.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> q, starts, pages, last = np.ones((1, 1, 1), np.float32), np.array([0, 2]), np.array([2, 0]), np.array([1])
        >>> flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), starts, pages, last).tolist()
        [[[3.0]]]
    """
    operation = "flashinfer.batch_decode_with_paged_kv_cache"
    _check_layout(kv_layout, operation)
    window_left = checks.integer(window_left, "window_left", operation, low=-(2**31))
    masked = custom_mask is not None or packed_custom_mask is not None
    if custom_mask is not None and packed_custom_mask is not None:
        raise OptionError(f"{operation}: custom_mask and packed_custom_mask are both given. Pass one of them.")
    if masked and window_left >= 0:
        refuse_option(operation, window_left=(window_left, "-1 with a mask, since the mask says what queries see"))
    k_pool, v_pool = _pools(paged_kv_cache, kv_layout, operation)
    asked = view(q, "q", operation)
    checks.rank(asked, (3, 4), "q", "(B, Hq, D) or (B, T, Hq, D)", operation)
    block_size, queries = _slots_of_page(k_pool, kv_layout), asked.shape[1] if asked.ndim == 4 else 1
    lens, table = _lengths_and_table(
        operation, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, asked.shape[0], block_size
    )
    terms: dict[str, Any] = {"sink_logits": sinks}
    if masked:
        terms["mask"] = _mask_of_new_tokens(operation, custom_mask, packed_custom_mask, lens, queries)
    scale, scales, of_result = real(sm_scale, "sm_scale", operation), dict[str, Any](), None
    of_scores = [real(q_scale, "q_scale", operation)]
    if all(not isinstance(pool, Quantized) and pool.dtype in SCALED for pool in (k_pool, v_pool)):
        if k_scale is not None or v_scale is not None:
            scales = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
    else:
        of_scores.append(real(k_scale, "k_scale", operation))
        of_result = _finite(real(v_scale, "v_scale", operation), "v_scale", operation)
    for factor in of_scores:
        if factor is not None:
            scale = (asked.shape[-1] ** -0.5 if scale is None else scale) * factor
    pools = Caches(PagedLayout(kv_layout), k_pool, v_pool, lens.astype(np.int32), for_operation(table, q), **scales)
    request = AttendRequest(
        scale=scale,
        softcap=real(logits_soft_cap, "logits_soft_cap", operation) or None,
        lse_base2=True,
        short=not masked,
        **terms,
        **_seen(causal or masked, window_left, queries, int(table.shape[1]) * block_size),
    )
    call = attention_call(operation, _heads_first(asked), pools, request)
    if out is None:
        out = new_like(q, (*asked.shape[:-1], call.plan.cache.width_v), asked.dtype, call.plan.live)
    to = _heads_first(view(out, "out", operation))
    if not return_lse:
        call.attend(None, Results(to))
        return refuse_backward(_multiplied(handed_over(out), of_result), q, k_pool, v_pool)
    lse = new_like(q, asked.shape[:-1], dtypes.float32, call.plan.live)
    call.attend(None, Results(to, True, _heads_first(view(lse, "lse", operation), asked.ndim - 1)))
    return refuse_backward((_multiplied(handed_over(out), of_result), handed_over(lse)), q, k_pool, v_pool)


def _finite(number: float | None, name: str, operation: str) -> float | None:
    """The number, or None.

    Raises:
        OptionError: it is not finite.
    """
    if number is not None and not math.isfinite(number):
        raise OptionError(f"{operation}: {name}={number} is not a finite number.")
    return number


def _multiplied(result: Any, factor: float | None) -> Any:
    """The result times a number, rounded to its dtype: in place, unless its library's arrays are immutable."""
    if factor is None or factor == 1.0:
        return result
    if isinstance(result, CacheArray):
        seen = view(result, "out", "multiply")
        write_host(_multiplied(result.copy_to_host(), factor), seen)
    elif isinstance(result, np.ndarray):
        result[...] = (result.astype(np.float32) * np.float32(factor)).astype(result.dtype)
    elif library_of(result) is not np:
        result.detach().mul_(factor)
    else:
        result = result * factor
    return result


def _seen(causal: bool, window_left: int, queries: int, capacity: int) -> dict[str, Any]:
    """Which keys a query sees, as options of attention: all, those up to its own, or a window before its own."""
    if causal or queries == 1:
        return {"window": None if window_left < 0 else window_left + 1}
    if window_left < 0:
        return {"causal": False}
    newer = capacity + queries  # if there are more queries than tokens, the first query comes before all tokens
    return {"newer": newer, "window": window_left + 1 + newer}


def _heads_first(a: ArrayView, axes: int | None = None) -> ArrayView:
    """(B, T, Hq, ...) as (B, Hq, T, ...), and the other way round; without T as it is."""
    if a.ndim < 3 or (a.ndim if axes is None else axes + 1) != 4:
        return a
    return a.transposed(0, 2, 1, *range(3, a.ndim))


def _check_layout(kv_layout: Any, operation: str) -> None:
    if kv_layout not in LAYOUTS:
        refuse_option(operation, kv_layout=(kv_layout, "'NHD' or 'HND'"))


def _pools(paged_kv_cache: Array | tuple[Array, Array], layout: str, operation: str) -> tuple[Any, Any]:
    """The pools of K and V, from a pair or from one array, with an axis for the tokens of a page.

    Raises:
        ShapeError, DTypeError: it is neither.
    """
    if isinstance(paged_kv_cache, tuple | list):
        if len(paged_kv_cache) != 2:
            raise ShapeError(f"{operation}: paged_kv_cache has {len(paged_kv_cache)} arrays. Pass (k, v).")
        if any(isinstance(pool, Quantized) for pool in paged_kv_cache):
            return paged_kv_cache[0], paged_kv_cache[1]
        pools = [view(a, f"paged_kv_cache[{i}]", operation) for i, a in enumerate(paged_kv_cache)]
    else:
        both = view(paged_kv_cache, "paged_kv_cache", operation)
        checks.rank(both, (4, 5), "paged_kv_cache", "(N, 2, bs, H, D) or (N, 2, H, D)", operation)
        checks.extent(both.shape[1], 2, "the second axis of paged_kv_cache", operation, describe(both))
        pools = [
            both.restrided((both.shape[0], *both.shape[2:]), (both.strides[0], *both.strides[2:]), i * both.strides[1])
            for i in range(2)
        ]
    axis = 1 if layout == "NHD" else 2
    for i, a in enumerate(pools):
        if a.ndim == 3:  # pages of one token
            shape, strides = (*a.shape[:axis], 1, *a.shape[axis:]), (*a.strides[:axis], 0, *a.strides[axis:])
            pools[i] = a.restrided(shape, strides)
        checks.rank(pools[i], (4,), "a pool", "(N, bs, H, D) for NHD, (N, H, bs, D) for HND", operation)
    return pools[0], pools[1]


def _slots_of_page(pool: Any, layout: str) -> int:
    """The number of tokens per page."""
    return int((pool.codes if isinstance(pool, Quantized) else pool).shape[1 if layout == "NHD" else 2])


def _lengths_and_table(
    operation: str, indptr: Any, indices: Array, last_page_len: Any, batch: int, block_size: int
) -> tuple[np.ndarray[Any, Any], Any]:
    """(the tokens of each request, on the host; a table with a row of pages for each, where the pages lie).

    Raises:
        ShapeError, DTypeError, PositionError: the arrays do not fit the queries or one another.
    """
    live = current()
    starts, last = (
        np.array(host_integers(a, name, operation, live), np.int64)
        for a, name in ((indptr, "paged_kv_indptr"), (last_page_len, "paged_kv_last_page_len"))
    )
    if (len(starts), len(last)) != (batch + 1, batch):
        raise ShapeError(
            f"{operation}: paged_kv_indptr has {len(starts)} entries and paged_kv_last_page_len {len(last)}; the "
            f"{batch} requests of q need {batch + 1} and {batch}."
        )
    index = Indices(operation, {"paged_kv_indices": indices})
    pages, counts = index.array("paged_kv_indices", (None,), "(pages,)"), np.diff(starts)
    if starts[0] < 0 or (counts < 0).any() or starts[-1] > len(pages):
        raise PositionError(
            f"{operation}: paged_kv_indptr is {starts.tolist()}; it must ascend, and stay within the "
            f"{len(pages)} pages of paged_kv_indices."
        )
    wrong = (counts > 0) & ((last < 1) | (last > block_size))
    if wrong.any():
        b = int(np.argmax(wrong))
        raise PositionError(
            f"{operation}: paged_kv_last_page_len[{b}]={int(last[b])}; it must be from 1 to the page size, "
            f"{block_size}."
        )
    lens = np.where(counts > 0, (counts - 1) * block_size + last, 0)
    entries = starts[:-1, None] + np.arange(max(1, counts.max(initial=0)))
    if not len(pages):
        return lens, np.full(entries.shape, -1)
    return lens, pages[index.as_int64(np.minimum(entries, len(pages) - 1))]


def _mask_of_new_tokens(operation: str, mask: Array, packed_mask: Any, lens: np.ndarray[Any, Any], queries: int) -> Any:
    """(B, T, T) bool: the new tokens that each query sees, from concatenated, flattened masks (T, length).

    Raises:
        ShapeError, DTypeError: the mask has another size or dtype.
        PositionError: a request is shorter than its queries.
        OptionError: a token before the new ones is hidden.
    """
    name = "custom_mask" if packed_mask is None else "packed_custom_mask"
    array, sizes = mask if packed_mask is None else packed_mask, lens * queries
    per_entry, dtype = (1, "bool") if packed_mask is None else (8, "uint8")
    if not str(getattr(array, "dtype", type(array))).endswith(dtype):
        raise DTypeError(f"{operation}: {name} is {getattr(array, 'dtype', type(array).__name__)}; it must be {dtype}.")
    entries = -(-sizes // per_entry)
    if tuple(array.shape) != (int(entries.sum()),):
        raise ShapeError(
            f"{operation}: {name} is {tuple(array.shape)}; for {queries} queries over {lens.tolist()} tokens it "
            f"must be ({int(entries.sum())},)."
        )
    wrong = lens < queries
    if wrong.any():
        b = int(np.argmax(wrong))
        raise PositionError(
            f"{operation}: request {b} has {int(lens[b])} tokens, fewer than its {queries} new ones. Count the new "
            "tokens in the page table too."
        )
    library = library_of(array)
    first = (np.cumsum(entries) - entries) * per_entry + lens - queries
    new = np.arange(queries)
    places: Any = first[:, None, None] + new[:, None] * lens[:, None, None] + new
    shifts: Any = np.arange(8)
    if library is not np:
        places, shifts = (library.as_tensor(a, device=array.device) for a in (places, shifts))
    bits = array
    if packed_mask is not None:
        bits = (array[:, None] >> shifts) & 1
    bits = bits.reshape(-1) != 0
    visible = bits[places]
    hidden = int((sizes - queries * queries).sum()) - (int(bits.sum()) - int(visible.sum()))
    if hidden:
        raise OptionError(
            f"{operation}: {name} hides tokens before the {queries} new ones ({hidden} entries), which is not "
            "supported. Use a mask that shows them."
        )
    return visible


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


def _check_filled(array: Any, name: str, entries: int, operation: str) -> None:
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


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Array, Array]:
    """(v, s): attention over two parts of a context, as if they were one; ``s`` is the log-sum-exp of base 2.

    Args:
        v_a, v_b: (T, H, D).
        s_a, s_b: (T, H) float32, with any strides.

    Raises:
        ShapeError, DTypeError: as `tikv.merge_states`.
    """
    return _merged("flashinfer.merge_state", v_a, s_a, v_b, s_b)


def _merged(operation: str, *states: Any) -> tuple[Any, Any]:
    merged = merge_into(operation, states, True, None, None)
    refuse_backward(merged, *states)
    return merged


def merge_state_in_place(v: Array, s: Array, v_other: Array, s_other: Array, mask: Array | None = None) -> None:
    """Merge another state into ``(v, s)`` in place, as `merge_state` does; named as in FlashInfer.

    Args:
        v, v_other: (T, H, D), NumPy or torch; the first is written.
        s, s_other: (T, H) float32; the first is written.
        mask: (T,) bool: the tokens whose states are merged; None for all.

    Raises:
        ShapeError, DTypeError: the arrays do not agree, or cannot be written. Nothing is written.

    Exactness: as `tikv.merge_states`; a state that the mask leaves out keeps its bits. Cost: the same, plus a copy of
        the result.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> v, s = np.ones((2, 1, 1), np.float32), np.zeros((2, 1), np.float32)
        >>> flashinfer.merge_state_in_place(v, s, 3 * v, s.copy(), np.array([True, False]))
        >>> v.ravel().tolist(), s.ravel().tolist()
        ([2.0, 1.0], [1.0, 0.0])
    """
    operation = "flashinfer.merge_state_in_place"
    library = library_of(v)
    for name, a in (("v", v), ("s", s)):
        checks.writable(view(a, name, operation), name, operation)
        if library_of(a) is not library or (library is np and not isinstance(a, np.ndarray)):
            raise DTypeError(
                f"{operation}: {name} is {type(a).__name__}. Pass v and s both from NumPy or both from torch."
            )
    merged = _merged(operation, v, s, v_other, s_other)
    where = None
    if mask is not None:
        if not str(getattr(mask, "dtype", type(mask))).endswith("bool") or tuple(mask.shape) != (v.shape[0],):
            shown = f"{getattr(mask, 'dtype', type(mask).__name__)} {tuple(getattr(mask, 'shape', ()))}"
            raise ShapeError(f"{operation}: mask is {shown}; it must be bool ({v.shape[0]},), one for each token.")
        where = np.asarray(mask) if library is np else library.as_tensor(mask, device=v.device)
    for to, result in ((v, merged[0]), (s, merged[1])):
        selected = None if where is None else where.reshape(-1, *[1] * (len(to.shape) - 1))
        if library is np:
            np.copyto(to, result, where=True if selected is None else selected)
        else:
            detached = to.detach()
            detached.copy_(result if selected is None else library.where(selected, result, detached))


def merge_states(v: Array, s: Array) -> tuple[Array, Array]:
    """(v, s): attention over any number of parts of a context, as if they were one; ``s`` is the log-sum-exp of base 2.

    Args:
        v: (T, parts, H, D), NumPy or torch, float32, float16 or bfloat16.
        s: (T, parts, H) float32, with any strides.

    Returns:
        (T, H, D) in v's dtype and (T, H) float32; 0 and -inf if there are no parts.

    Raises:
        ShapeError, DTypeError: the arrays do not agree.

    Exactness: computed in float32, and rounded once at the end. Cost: a copy of the parts in float32, and one launch.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> v, s = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1), np.zeros((1, 4, 1), np.float32)
        >>> v, s = flashinfer.merge_states(v, s)
        >>> v.ravel().round(4).tolist(), s.round(4).tolist()
        ([1.5], [[2.0]])
    """
    operation = "flashinfer.merge_states"
    parts, lse = view(v, "v", operation), view(s, "s", operation)
    checks.rank(parts, (4,), "v", "(T, parts, H, D)", operation)
    library = library_of(v)
    if library_of(s) is not library or (library is np and not isinstance(v, np.ndarray)):
        raise DTypeError(
            f"{operation}: v is {type(v).__name__} and s {type(s).__name__}. Pass both from NumPy or both from torch."
        )
    if parts.dtype not in QUERIES or lse.dtype is not dtypes.float32:
        raise DTypeError(
            f"{operation}: v is {describe(parts)} and s {describe(lse)}; v must be float32, float16 or "
            f"bfloat16, and s float32."
        )
    if lse.shape != parts.shape[:3] or lse.device != parts.device:
        raise ShapeError(
            f"{operation}: s is {describe(lse)} on {lse.device} where {parts.shape[:3]} on {parts.device} is needed."
        )
    tokens, number, heads, width = parts.shape
    live = runtime_of(v)
    out = new_like(v, (tokens, heads, width), parts.dtype, live, zeroed=True)
    out_lse = new_like(v, (tokens, heads), dtypes.float32, live)
    if number == 0 or 0 in parts.shape:
        out_lse[:] = -np.inf
        return out, out_lse
    if library is np:
        packed = np.concatenate((v.astype(np.float32), s[..., None]), -1)
        packed = np.ascontiguousarray(np.moveaxis(packed, 1, 0))
    else:
        packed = library.cat((v.detach().float(), s.detach()[..., None]), -1).movedim(1, 0).contiguous()
    seen = view(packed, "v", operation)
    seen = seen.restrided((number, tokens, heads, 1, width + 1), (*seen.strides[:3], 0, 1))
    to, to_lse = view(out, "out", operation), view(out_lse, "lse", operation)
    to = to.restrided((tokens, heads, 1, width), (*to.strides[:2], 0, 1))
    to_lse = to_lse.restrided((tokens, heads, 1), (*to_lse.strides, 0))
    merge_parts(operation, seen, to, to_lse, base2=True)
    refuse_backward((out, out_lse), s)
    return out, out_lse
