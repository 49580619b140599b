"""Pages of keys and values as FlashInfer passes them: a pair of pools or one array, and the pages of each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tikv.arrays import Array, ArrayView, describe, view
from tikv.compat.indices import Indices, library_of, refuse_option
from tikv.errors import PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.indices import host_integers
from tikv.ops.quantized_arrays import Quantized
from tikv.runtime import current

LAYOUTS = ("NHD", "HND")


def check_layout(kv_layout: Any, operation: str) -> None:
    """Refuse any layout but NHD and HND."""
    if kv_layout not in LAYOUTS:
        refuse_option(operation, kv_layout=(kv_layout, "'NHD' or 'HND'"))


def pools_of(
    paged_kv_cache: Array | tuple[Array, Array], layout: str, operation: str, read: Callable[..., ArrayView] = view
) -> tuple[Any, Any]:
    """The pools of K and V, from a pair or from one array, with an axis for the tokens of a page.

    `read` is `view`, or `view_bits` for pools of bytes.

    Raises:
        ShapeError, DTypeError: it is neither.
    """
    if isinstance(paged_kv_cache, tuple | list):
        if len(paged_kv_cache) != 2:
            raise ShapeError(f"{operation}: paged_kv_cache has {len(paged_kv_cache)} arrays. Pass (k, v).")
        if any(isinstance(pool, Quantized) for pool in paged_kv_cache):
            return paged_kv_cache[0], paged_kv_cache[1]
        pools = [read(a, f"paged_kv_cache[{i}]", operation) for i, a in enumerate(paged_kv_cache)]
    else:
        both = read(paged_kv_cache, "paged_kv_cache", operation)
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


def slots_of_page(pool: Any, layout: str) -> int:
    """The number of tokens per page."""
    return int((pool.codes if isinstance(pool, Quantized) else pool).shape[1 if layout == "NHD" else 2])


class PageLists(NamedTuple):
    """The pages of requests: those of request b are entries starts[b] to starts[b + 1] of one list."""

    starts: np.ndarray[Any, Any]  # (B + 1,) int64
    lengths: np.ndarray[Any, Any]  # (B,) int64 tokens
    pages: Any  # (entries,) int64, of NumPy, or of torch on a device

    @property
    def most(self) -> int:
        """The most pages of any request, at least 1."""
        return max(1, int(np.diff(self.starts).max(initial=0)))

    def entries(self, requests: Any) -> np.ndarray[Any, Any]:
        """(n, most) the entries of these requests' pages, and others after the last one."""
        entries: np.ndarray[Any, Any] = self.starts[:-1][requests][:, None] + np.arange(self.most)
        return entries.clip(max=max(0, len(self.pages) - 1))

    def table(self, requests: Any) -> Any:
        """(n, most) the pages of these requests, and others after the last one."""
        entries = self.entries(requests)
        if not len(self.pages):
            return np.full(entries.shape, -1)
        library = library_of(self.pages)
        return self.pages[entries if library is np else library.as_tensor(entries, device=self.pages.device)]


def page_lists(
    operation: str, names: tuple[str, str, str], arrays: tuple[Any, Any, Any], batch: int, page: int, of_lengths: bool
) -> PageLists:
    """The pages of requests from `indptr`, `indices` and, with `of_lengths`, lengths, or else last-page lengths.

    Args:
        operation, names: the operation's and the arrays' names, for messages.
        arrays: the three; `indices` alone may stay on a device.
        batch: the number of requests.
        page: tokens of a page.
        of_lengths: what the third array holds; `indptr` may then have more entries, which are not read.

    Raises:
        ShapeError, DTypeError, PositionError: the arrays do not fit the requests or one another.
    """
    live, (of_starts, of_pages, of_tokens) = current(), names
    starts, tokens = (np.array(host_integers(arrays[i], names[i], operation, live), np.int64) for i in (0, 2))
    if of_lengths:
        starts = starts[: batch + 1]
    if (len(starts), len(tokens)) != (batch + 1, batch):
        raise ShapeError(
            f"{operation}: {of_starts} has {len(starts)} entries and {of_tokens} {len(tokens)}; {batch} requests need "
            f"{batch + 1} and {batch}."
        )
    index = Indices(operation, {of_pages: arrays[1]})
    pages, counts = index.array(of_pages, (None,), "(pages,)"), np.diff(starts)
    if starts[0] < 0 or (counts < 0).any() or starts[-1] > len(pages):
        raise PositionError(
            f"{operation}: {of_starts} is {starts.tolist()}; it must ascend, and stay within the {len(pages)} pages of "
            f"{of_pages}."
        )
    if of_lengths:
        wrong, most = (tokens < 0) | (tokens > counts * page), "0 to the tokens of its pages"
    else:
        wrong, most = (counts > 0) & ((tokens < 1) | (tokens > page)), f"1 to the page size, {page}"
        tokens = np.where(counts > 0, (counts - 1) * page + tokens, 0)
    if wrong.any():
        b = int(np.argmax(wrong))
        shown = int(host_integers(arrays[2], of_tokens, operation, live)[b])
        raise PositionError(f"{operation}: {of_tokens}[{b}]={shown}; it must be from {most}.")
    return PageLists(starts, tokens, pages)
