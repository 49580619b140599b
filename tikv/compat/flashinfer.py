"""FlashInfer's page functions: `append_paged_kv_cache`, `batch_decode_with_paged_kv_cache` and what goes with them.

As there, page tables and last-page lengths already count the tokens that are appended, and LSE is of base 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv.compat.indices import as_index, library_of, on_host, refuse_option, refuse_where
from tikv.errors import PositionError, ShapeError
from tikv.ops import attention, paged
from tikv.ops.attention.paged import paged_call
from tikv.ops.attention.terms import Terms
from tikv.ops.indices import host_integers
from tikv.ops.write_pages import write_pages
from tikv.runtime import current


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
) -> None:
    """Write ragged new keys and values into a paged cache.

    Args:
        append_key, append_value: (nnz, H, D).
        batch_indices, positions: (nnz,) integers: the request of each token, and its position in it; -1 skips.
        paged_kv_cache: (N, 2, bs, H, D) for NHD, (N, 2, H, bs, D) for HND; or the tuple (k, v) without the axis of 2.
        kv_indices: the pages of all requests, one after the other.
        kv_indptr: (B + 1,) where each request's pages start.
        kv_last_page_len: (B,) filled slots of each last page, the appended tokens included; not needed here.
        kv_layout: "NHD" or "HND".

    Raises:
        OptionError: another layout.
        PositionError: a page outside the cache, a request that there is not, or a position behind a request's pages,
            where indices lie on the host; on a device such a token is skipped.

    Exactness: bit-exact. Cost: one launch, which finds the slots where the indices lie on the device; on the host
        NumPy does before.

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
    if kv_layout not in ("NHD", "HND"):
        refuse_option(operation, kv_layout=(kv_layout, "'NHD' or 'HND'"))
    k_pool, v_pool = _pools(paged_kv_cache)
    block_size = k_pool.shape[1 if kv_layout == "NHD" else 2]
    indices = (batch_indices, positions, kv_indices, kv_indptr)
    if not any(map(on_host, indices)) and not current().debug:
        write_pages(operation, append_key, append_value, k_pool, v_pool, *indices, kv_layout)
        return
    library = library_of(*indices)
    batch, position = as_index(batch_indices), as_index(positions, batch_indices)
    pages, starts = as_index(kv_indices, batch_indices), as_index(kv_indptr, batch_indices)
    requests = starts.shape[0] - 1
    skipped = (batch < 0) | (position < 0)
    unknown = ~skipped & (batch >= requests)
    refuse_where(unknown, operation, lambda t: f"batch_indices{[*t]} names request {int(batch[t])} of {requests}.")
    zero = library.zeros_like(batch)
    left_out = skipped | unknown
    batch, position = library.where(left_out, zero, batch), library.where(left_out, zero, position)
    slots, beyond = zero - 1, ~left_out
    if pages.shape[0]:
        page = starts[batch] + position // block_size
        block = pages[library.where(page < pages.shape[0], page, zero)]
        beyond = ~left_out & ((page >= starts[batch + 1]) | (block < 0))
        slots = library.where(left_out | beyond, slots, block * block_size + position % block_size)
    refuse_where(
        beyond,
        operation,
        lambda t: (
            f"positions{[*t]}={int(position[t])} has no page in kv_indices of request {int(batch[t])}. The page "
            f"table must count the new tokens already; -1 skips one."
        ),
    )
    paged.write_slots(append_key, append_value, k_pool, v_pool, slots, layout=kv_layout)


def batch_decode_with_paged_kv_cache(
    q: Any,
    paged_kv_cache: Any,
    paged_kv_indptr: Any,
    paged_kv_indices: Any,
    paged_kv_last_page_len: Any,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: Any = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of the newest tokens of some requests over their pages, read in place.

    Args:
        q: (B, Hq, D), or (B, T, Hq, D) for T new tokens of each request, which the pages hold already.
        paged_kv_cache: (N, 2, bs, H, D) for NHD, (N, 2, H, bs, D) for HND; or the tuple (k, v) without the axis of 2.
        paged_kv_indptr: (B + 1,) where each request's pages start.
        paged_kv_indices: the pages of all requests, one after the other.
        paged_kv_last_page_len: (B,) filled slots of each last page.
        kv_layout: "NHD" or "HND".
        causal: each query sees the tokens up to its own; otherwise all. No matter with a mask.
        custom_mask: bool, which tokens each query sees: (T, length) of a request, flattened, one request after the
            other. Tokens before the T new ones have to be seen.
        packed_custom_mask: the same in uint8, 8 tokens a byte, the lowest bit first; each request starts a byte.
        window_left: tokens before its own that a query sees; -1 for all. Not with a mask.
        logits_soft_cap: None or 0 for none.
        sm_scale: None for ``1 / sqrt(D)``.
        q_scale, k_scale, v_scale: of pools of 8-bit floats; ``q_scale`` of any.
        sinks: (Hq,) float32: one more logit of each query head, in the denominator only.
        out: array for the result, None for a new one.
        return_lse: also return the log-sum-exp of base 2, (B, Hq) or (B, T, Hq) float32.

    Returns:
        As q, with V's width; with ``return_lse`` a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: another layout, a window with a mask, two masks, or one that hides a token before the new ones.
        ShapeError: a mask of another size.
        ShapeError, DTypeError, PositionError: as `tikv.paged_decode_attention`.

    Exactness: as `tikv.paged_decode_attention`. Cost: as that, with index arithmetic before it. Where the first and the
        last page lengths lie on a device, they are waited for; so is a mask, whose older tokens are looked at.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> q, starts, pages, last = np.ones((1, 1, 1), np.float32), np.array([0, 2]), np.array([2, 0]), np.array([1])
        >>> flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), starts, pages, last).tolist()
        [[[3.0]]]
    """
    operation = "flashinfer.batch_decode_with_paged_kv_cache"
    if kv_layout not in ("NHD", "HND"):
        refuse_option(operation, kv_layout=(kv_layout, "'NHD' or 'HND'"))
    masked = custom_mask is not None or packed_custom_mask is not None
    if custom_mask is not None and packed_custom_mask is not None:
        refuse_option(operation, packed_custom_mask=("given", "one of custom_mask and packed_custom_mask"))
    if masked and window_left >= 0:
        refuse_option(operation, window_left=(window_left, "-1 with a mask, which says what queries see"))
    k_pool, v_pool = _pools(paged_kv_cache)
    block_size, queries = k_pool.shape[1 if kv_layout == "NHD" else 2], q.shape[1] if len(q.shape) == 4 else 1
    lens, table = _lengths_and_table(
        operation, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, q.shape[0], block_size
    )
    newer = 0 if causal or masked or queries == 1 else int(table.shape[1]) * block_size
    terms: dict[str, Any] = {"sink_logits": sinks}
    options: dict[str, Any] = {}
    if masked:
        terms["mask"] = _mask_of_new_tokens(operation, custom_mask, packed_custom_mask, lens, queries)
    if q_scale is not None:
        sm_scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * q_scale
    if k_scale is not None or v_scale is not None:
        options = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
    call = paged_call(
        operation,
        _heads_first(q),
        k_pool,
        v_pool,
        table,
        lens.astype(np.int32),
        layout=kv_layout,
        scale=sm_scale,
        window=None if window_left < 0 else window_left + 1 + newer,
        softcap=logits_soft_cap or None,
        lse_base2=True,
        terms=Terms(**terms),
        newer=newer,
        short=not masked,
        **options,
    )
    found = call.attend(_heads_first(q), out=None if out is None else _heads_first(out), return_lse=return_lse)
    if return_lse:
        return _heads_first(found[0]) if out is None else out, _heads_first(found[1], len(q.shape) - 1)
    return _heads_first(found) if out is None else out


def _heads_first(array: Any, axes: int | None = None) -> Any:
    """(B, T, Hq, ...) as (B, Hq, T, ...), and the other way round; without T as it is."""
    if (len(array.shape) if axes is None else axes + 1) != 4:
        return array
    return np.swapaxes(array, 1, 2) if isinstance(array, np.ndarray) else array.transpose(1, 2)


def _pools(paged_kv_cache: Any) -> tuple[Any, Any]:
    """K's and V's pool, of a pair or of one array."""
    if isinstance(paged_kv_cache, (tuple, list)):
        k_pool, v_pool = paged_kv_cache
        return k_pool, v_pool
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]


def _lengths_and_table(
    operation: str, indptr: Any, indices: Any, last_page_len: Any, batch: int, block_size: int
) -> tuple[np.ndarray[Any, Any], Any]:
    """Tokens of each request, on the host, and a row of pages for each, where the pages lie.

    Raises:
        ShapeError, PositionError: the arrays do not fit the queries or one another.
    """
    live = current()
    starts, last = (
        np.array(host_integers(a, name, operation, live), np.int64)
        for a, name in ((indptr, "paged_kv_indptr"), (last_page_len, "paged_kv_last_page_len"))
    )
    if (len(starts), len(last)) != (batch + 1, batch):
        raise ShapeError(
            f"{operation}: paged_kv_indptr has {len(starts)} entries and paged_kv_last_page_len {len(last)}; for the "
            f"{batch} requests of q they are {batch + 1} and {batch}."
        )
    pages, counts = as_index(indices), np.diff(starts)
    if starts[0] < 0 or (counts < 0).any() or starts[-1] > len(pages):
        raise PositionError(
            f"{operation}: paged_kv_indptr is {starts.tolist()}; it has to ascend, within the {len(pages)} pages of "
            f"paged_kv_indices."
        )
    refuse_where(
        (counts > 0) & ((last < 1) | (last > block_size)),
        operation,
        lambda b: f"paged_kv_last_page_len{[*b]}={int(last[b])}; of a page of {block_size} slots 1 to all are filled.",
    )
    lens = np.where(counts > 0, (counts - 1) * block_size + last, 0)
    entries = starts[:-1, None] + np.arange(max(1, counts.max(initial=0)))
    if not len(pages):
        return lens, _int32(as_index(np.full(entries.shape, -1), pages))
    return lens, _int32(pages[as_index(np.minimum(entries, len(pages) - 1), pages)])


def _mask_of_new_tokens(operation: str, mask: Any, packed_mask: Any, lens: np.ndarray[Any, Any], queries: int) -> Any:
    """(B, T, T) bool of masks (T, length), flattened and one after the other: what queries see of the new tokens.

    Raises:
        ShapeError: the mask has another size.
        PositionError: a request is shorter than its queries.
        OptionError: a token before the new ones is hidden.
    """
    name = "custom_mask" if packed_mask is None else "packed_custom_mask"
    given, sizes = mask if packed_mask is None else packed_mask, lens * queries
    per_entry = 1 if packed_mask is None else 8
    entries = -(-sizes // per_entry)
    if tuple(given.shape) != (int(entries.sum()),):
        raise ShapeError(
            f"{operation}: {name} is {tuple(given.shape)}; for {queries} queries over {lens.tolist()} tokens it is "
            f"({int(entries.sum())},)."
        )
    refuse_where(
        lens < queries,
        operation,
        lambda b: f"request {b[0]} has {int(lens[b])} tokens, and the mask is of {queries} new ones among them.",
    )
    bits = given
    if packed_mask is not None:
        bits = (given[:, None] >> as_index(np.arange(8), given)) & 1
    bits = bits.reshape(-1) != 0
    first = (np.cumsum(entries) - entries) * per_entry + lens - queries
    new = np.arange(queries)
    found = bits[as_index(first[:, None, None] + new[:, None] * lens[:, None, None] + new, given)]
    hidden = int((sizes - queries * queries).sum()) - (int(bits.sum()) - int(found.sum()))
    if hidden:
        refuse_option(
            operation, **{name: (f"{hidden} hidden tokens before the {queries} new ones", "a mask that shows them")}
        )
    return found


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """(B,) tokens of each request, from its pages and the filled slots of its last one; int32."""
    starts, last = as_index(kv_indptr), as_index(kv_last_page_len, kv_indptr)
    library = library_of(kv_indptr, kv_last_page_len)
    pages = starts[1:] - starts[:-1]
    lens = library.where(pages > 0, (pages - 1) * page_size + last, library.zeros_like(last))
    return _int32(lens)


def get_batch_indices_positions(
    append_indptr: Any, seq_lens: Any, nnz: int, batch_indices: Any = None, positions: Any = None
) -> tuple[Any, Any]:
    """(batch_indices, positions), each (nnz,) int32: the request and the position of each appended token.

    Args:
        append_indptr: (B + 1,) where each request's new tokens start.
        seq_lens: (B,) tokens of each request, the new ones included.
        nnz: entries to return; those behind ``append_indptr[-1]`` are -1.
        batch_indices, positions: arrays to fill and return; None for new ones.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> batch, position = flashinfer.get_batch_indices_positions(np.array([0, 1, 3]), np.array([4, 2]), 4)
        >>> batch.tolist(), position.tolist()
        ([0, 1, 1, -1], [3, 0, 1, -1])
    """
    library = library_of(append_indptr, seq_lens)
    starts, lens = as_index(append_indptr), as_index(seq_lens, append_indptr)
    if library is np:
        token = np.arange(nnz)
        batch = np.searchsorted(starts[1:], token, side="right")
    else:
        token = library.arange(nnz, device=starts.device)
        batch = library.searchsorted(starts[1:].contiguous(), token, right=True)
    beyond = token >= starts[-1]
    known = library.where(beyond, library.zeros_like(batch), batch)
    position = lens[known] - (starts[known + 1] - token)
    minus = library.zeros_like(batch) - 1
    found = _int32(library.where(beyond, minus, batch)), _int32(library.where(beyond, minus, position))
    for given, values in ((batch_indices, found[0]), (positions, found[1])):
        if given is not None:
            given[:nnz] = values
    return (found[0] if batch_indices is None else batch_indices, found[1] if positions is None else positions)


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """(v, s): attention over two parts of a context as if over both; ``s`` is LSE of base 2.

    Args:
        v_a, v_b: (T, H, D).
        s_a, s_b: (T, H) float32.
    """
    merged = attention.merge_states(v_a, s_a, v_b, s_b, lse_base2=True)
    return merged[0], merged[1]


def _int32(array: Any) -> Any:
    return array.astype(np.int32) if isinstance(array, np.ndarray) else array.int()
