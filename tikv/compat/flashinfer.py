"""FlashInfer's page functions: `append_paged_kv_cache`, `get_batch_indices_positions`, `get_seq_lens`, `merge_state`.

As there, page tables and last-page lengths already count the tokens that are appended, and LSE is of base 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv.compat.indices import as_index, library_of, on_host, refuse_option, refuse_where
from tikv.ops import attention, paged
from tikv.ops.page_slots import page_slots


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

    Exactness: bit-exact. Cost: two launches where the indices lie on the device, the first of which finds the slots; on
        the host NumPy does, before one launch.

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
    if isinstance(paged_kv_cache, (tuple, list)):
        k_pool, v_pool = paged_kv_cache
    else:
        k_pool, v_pool = paged_kv_cache[:, 0], paged_kv_cache[:, 1]
    block_size = k_pool.shape[1 if kv_layout == "NHD" else 2]
    indices = (batch_indices, positions, kv_indices, kv_indptr)
    if not any(map(on_host, indices)):
        requests, tokens, table, first = (a.contiguous() if hasattr(a, "contiguous") else a for a in indices)
        slots = page_slots(operation, requests, tokens, table, first, block_size)
        paged.write_slots(append_key, append_value, k_pool, v_pool, slots, layout=kv_layout)
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
