"""Which rows are kept: ascending indices or a mask, for each head or for all heads of a sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, Host, as_numpy, describe, read_host, view
from tikv.errors import DTypeError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.indices import host_indices, index_array, view_indices


class HeadRows(NamedTuple):
    """The numbers of sequences, heads and rows of each head; and how many rows are in use, one number or several."""

    batch: int
    heads: int
    limit: int
    held: Any  # an int, or (B,) or (B, H) on the host


def kept_indices(keep: Any, rows: HeadRows, live: runtime.Runtime, operation: str) -> Any:
    """The rows that a caller keeps, as indices (B, n) or (B, H, n), on the host or the device.

    A mask becomes int32 indices on the host; -1 pads the heads that keep fewer rows than others.

    Raises:
        ShapeError, DTypeError: an array of the wrong shape or dtype; more rows than there are.
        PositionError: indices known to the host do not ascend, or are outside; a mask keeps a row that is not in use.
    """
    mask = _mask(keep, operation)
    if mask is not None:
        _check_shape(mask.shape, rows, rows.limit, "a mask", operation)
        _check_mask(mask, rows, operation)
        return indices_of_mask(mask)
    keep = index_array(keep, "keep", operation)
    index = view(keep, "keep", operation)
    checks.on_device([("keep", index)], live, operation)
    if index.dtype not in dtypes.INDICES:
        raise DTypeError(f"{operation}: keep is {describe(index)}. Pass int32 or int64 indices, or a bool mask.")
    if any(stride < 0 for stride in index.strides):
        raise ShapeError(f"{operation}: keep has negative strides {index.strides}. Pass a copy.")
    _check_shape(index.shape, rows, None, "indices", operation)
    host = host_indices(index, live)
    if host is not None:
        check_ascending(host, rows.held, operation)
    return keep


def host_kept_indices(keep: Any, rows: HeadRows, live: runtime.Runtime, operation: str) -> Host:
    """`kept_indices` as int32 on the host; always checked, wherever they came from."""
    indices = kept_indices(keep, rows, live, operation)
    if isinstance(indices, np.ndarray):
        return indices.astype(np.int32, copy=False)
    index = view(indices, "keep", operation)
    host = as_numpy(index) if index.device == "cpu" else read_host(index, live)
    check_ascending(host, rows.held, operation)
    return host.astype(np.int32)


def _mask(keep: Any, operation: str) -> Host | None:
    """A mask on the host, wherever it lies; None if `keep` is not a mask.

    Raises:
        ShapeError: the list does not form an array.
    """
    if isinstance(keep, list | tuple):
        try:
            keep = np.asarray(keep)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ShapeError(
                f"{operation}: keep is a list that cannot become an array: {reason}. Pass rows of equal length, or "
                "a mask."
            ) from None
    if not str(getattr(keep, "dtype", "")).endswith("bool"):
        return None
    if hasattr(keep, "detach"):
        keep = keep.detach().cpu().numpy()
    return np.asarray(keep)


def _check_shape(shape: tuple[int, ...], rows: HeadRows, last: int | None, what: str, operation: str) -> None:
    """Check for shape (B, H, n) or (B, n), where n is `last`, or at most the number of rows.

    Raises:
        ShapeError: otherwise.
    """
    lead = (rows.batch, rows.heads)
    n = "n" if last is None else str(last)
    if len(shape) not in (2, 3) or shape[:-1] not in (lead, lead[:1]):
        raise ShapeError(
            f"{operation}: keep is {what} of shape {shape} where ({rows.batch}, {rows.heads}, {n}), or "
            f"({rows.batch}, {n}) for all heads, is needed. Pass a list for each sequence and head."
        )
    if (last is not None and shape[-1] != last) or (last is None and shape[-1] > rows.limit):
        raise ShapeError(
            f"{operation}: keep is {what} of shape {shape}, but each head has {rows.limit} rows. "
            + ("Pass True or False for each." if last is not None else f"Pass at most {rows.limit}.")
        )


def _check_mask(mask: Host, rows: HeadRows, operation: str) -> None:
    """Check that every row kept is in use.

    Raises:
        PositionError: one is not.
    """
    if isinstance(rows.held, int) and rows.held >= rows.limit:
        return
    held = _for_each(rows.held, mask.ndim)
    wrong = mask & (np.arange(mask.shape[-1]) >= held[..., None])
    if wrong.any():
        *lead, row = (int(i) for i in np.argwhere(wrong)[0])
        raise PositionError(
            f"{operation}: the mask keeps row {row} of {_head(lead)}, which holds "
            f"{int(np.broadcast_to(held, mask.shape[:-1])[tuple(lead)])} rows. Keep rows that are held."
        )


def check_ascending(index: Host, held: Any, operation: str) -> None:
    """Check that each list of indices ascends within [0, held); -1 at its end means no index.

    Raises:
        PositionError: one does not.
    """
    if index.size == 0:
        return
    falls = index[..., 1:] <= index[..., :-1]
    first, last = index[..., 0], index[..., -1]
    limits = _for_each(held, index.ndim)
    if not (falls.any() or (first < 0).any() or (last >= limits).any()):
        return
    if falls.any():
        *lead, at = (int(i) for i in np.argwhere(falls)[0])
        pair = index[tuple(lead)][at : at + 2].tolist()
        raise PositionError(
            f"{operation}: keep of {_head(lead)} has {pair[1]} after {pair[0]}, at index {at + 1}. Each number must "
            "be above the one before: sort them, and remove duplicates."
        )
    outside = (first < 0) | (last >= limits)
    lead = [int(i) for i in np.argwhere(outside)[0]]
    row = index[tuple(lead)]
    limit = int(np.broadcast_to(limits, outside.shape)[tuple(lead)])
    wrong = int(row[0]) if row[0] < 0 else int(row[-1])
    raise PositionError(
        f"{operation}: keep of {_head(lead)} has {wrong}, and {limit} rows are held there. Use 0..{limit - 1}: indices "
        f"count the rows that are held, they are not positions in the text."
    )


def _for_each(held: Any, ndim: int) -> Host:
    """`held`, in a shape that broadcasts against lists with `ndim` - 1 leading axes."""
    counts = np.asarray(held)
    if counts.ndim == 1 and ndim == 3:
        return counts[:, None]
    least: Host = counts.min(axis=1) if counts.ndim == 2 and ndim == 2 else counts
    return least


def _head(lead: list[int]) -> str:
    return f"sequence {lead[0]}" + (f", head {lead[1]}" if len(lead) > 1 else "")


def indices_of_mask(mask: Host) -> Host:
    """The ascending indices of what a mask keeps, int32 (..., n), where n is the largest count; -1 pads the others.

    Examples:
        >>> indices_of_mask(np.array([[True, False, True], [False, True, False]])).tolist()
        [[0, 2], [1, -1]]
    """
    counts = mask.sum(axis=-1)
    indices = np.full((*mask.shape[:-1], int(counts.max(initial=0))), -1, np.int32)
    ranks = np.cumsum(mask, axis=-1) - 1
    nonzero = np.nonzero(mask)
    at = (*nonzero[:-1], ranks[nonzero])
    indices[at] = nonzero[-1]
    return indices


def counts_of(index: Host) -> Host:
    """How many rows each list keeps."""
    counts: Host = (index >= 0).sum(axis=-1, dtype=np.int32)
    return counts


def held_lengths(lengths: Array, rows: tuple[int, int, int], live: runtime.Runtime, operation: str) -> Any:
    """How many of (batch, heads, rows) are in use, per sequence or head: all if `lengths` is None or on the device.

    Raises:
        ShapeError, DTypeError: it is neither an integer nor integers of shape (B,) or (B, H).
        PositionError: a length is negative, or more than the number of rows.
    """
    batch, heads, limit = rows
    if lengths is None:
        return limit
    if isinstance(lengths, int):
        return checks.integer(lengths, "lengths", operation, high=limit)
    array: ArrayView = view_indices(lengths, "lengths", operation)
    checks.on_device([("lengths", array)], live, operation)
    checks.indices(array, "lengths", operation)
    if array.shape not in ((batch,), (batch, heads)):
        raise ShapeError(
            f"{operation}: lengths is {describe(array)} where ({batch},) or ({batch}, {heads}) is needed, one "
            "number per sequence, or one per sequence and head."
        )
    host = host_indices(array, live)
    if host is None:
        return limit
    if host.size and not 0 <= int(host.min()) <= int(host.max()) <= limit:
        wrong = int(host.min()) if host.min() < 0 else int(host.max())
        raise PositionError(f"{operation}: lengths has {wrong} for a cache of {limit} rows. Use 0..{limit}.")
    return np.array(host)
