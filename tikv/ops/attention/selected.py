"""The array `indices`, by which a caller selects the tokens that each query reads, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView, describe
from tikv.errors import CapacityError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import CacheLayout, QueryShape
from tikv.ops.indices import host_indices

MOST_RING_LENGTH = 2**30  # a ring's length, given as one number, is reduced from here on


def indices_by_head(arrays: Mapping[str, ArrayView]) -> bool:
    """Whether each KV head reads its own tokens."""
    return "indices" in arrays and arrays["indices"].ndim == 4


def check_indices(
    operation: str, arrays: Mapping[str, ArrayView], query: QueryShape, cache: CacheLayout, live: runtime.Runtime
) -> None:
    """Check that the form of the indices fits the queries and the cache.

    Raises:
        ShapeError, DTypeError, ArchError: it does not.
    """
    a = arrays["indices"]
    checks.on_device([("indices", a)], live, operation)
    checks.indices(a, "indices", operation)
    checks.rank(a, (3, 4), "indices", "(B, T, K), or (B, H, T, K) per KV head", operation)
    lead = (query.batch, cache.heads) if a.ndim == 4 else (query.batch,)
    needed = (*lead, query.queries)
    if a.shape[:-1] != needed:
        axes = "(B, H, T, K)" if a.ndim == 4 else "(B, T, K)"
        shown = ", ".join(map(str, needed))
        raise ShapeError(f"{operation}: indices is {describe(a)} where {axes} = ({shown}, K) is needed.")
    checks.addressable(a, a.dtype.itemsize, live, "indices", operation)


def check_selected(
    operation: str, arrays: Mapping[str, ArrayView], cache: CacheLayout, length: int, live: runtime.Runtime
) -> None:
    """Check that each index known to the host is -1 or a token of its sequence; in debug mode, also for duplicates.

    Args:
        operation: the operation's name, for messages.
        arrays: indices, and lens if they are given.
        cache: the cache that is attended over.
        length: the length of all sequences, if there is no array of lengths.
        live: the runtime.

    Raises:
        PositionError: an index is not, or a query has it twice.
        CapacityError: a ring's length is too large for its indices to be counted.
    """
    if "lens" not in arrays and cache.kind == "ring" and length >= MOST_RING_LENGTH:
        raise CapacityError(
            f"{operation}: indices count from the first token, and length={length} is beyond {MOST_RING_LENGTH}. "
            "Pass lengths as an array."
        )
    known = host_indices(arrays["indices"], live)
    if known is None or known.size == 0:
        return
    ends = _ends(arrays, cache, length, live)
    if int(known.min()) < -1 or int(known.max()) >= int(ends.min()):
        ends = ends.reshape(*ends.shape, *[1] * (known.ndim - ends.ndim))
        wrong = (known < -1) | (known >= ends)
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            end = int(np.broadcast_to(ends, known.shape)[at])
            raise PositionError(
                f"{operation}: indices[{', '.join(map(str, at))}]={int(known[at])} is not a token of its sequence, "
                f"which has {end}. Use 0 to {end - 1}, or -1 for no token."
            )
    if live.debug:
        ordered = np.sort(known, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            at = tuple(int(n) for n in np.argwhere(twice)[0])
            raise PositionError(
                f"{operation}: indices[{', '.join(map(str, at[:-1]))}] name token {int(ordered[at])} more than "
                "once, so it would be counted more than once. Name each token once."
            )


def _ends(
    arrays: Mapping[str, ArrayView], cache: CacheLayout, length: int, live: runtime.Runtime
) -> np.ndarray[Any, Any]:
    """The most tokens that there can be: of all sequences, of each, or of each KV head if it has its own indices."""
    if "lens" not in arrays:
        return np.array(length)
    lens = host_indices(arrays["lens"], live)
    if lens is None:
        return np.array(2**62 if cache.kind == "ring" else cache.capacity)
    return lens.max(axis=1) if lens.ndim == 2 and not indices_by_head(arrays) else lens
