"""Masks as FlashInfer passes them: those of all requests, flattened, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv.arrays import Array
from tikv.compat.indices import library_of
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError


def mask_of_new_tokens(operation: str, mask: Array, packed_mask: Any, lens: np.ndarray[Any, Any], queries: int) -> Any:
    """(B, T, T) bool: the new tokens that each query sees, from concatenated, flattened masks (T, length).

    Raises:
        ShapeError, DTypeError: the mask has another size or dtype.
        PositionError: a request is shorter than its queries.
        OptionError: a token before the new ones is hidden.
    """
    name, array = _checked(operation, (mask, packed_mask))
    sizes, per_entry = lens * queries, 1 if packed_mask is None else 8
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


def _checked(operation: str, masks: tuple[Any, Any]) -> tuple[str, Any]:
    """The name and the array of a call's mask: of (custom_mask, packed_custom_mask) the second, if it is passed.

    Raises:
        DTypeError: it has the wrong dtype.
    """
    name, array, dtype = ("custom_mask", masks[0], "bool")
    if masks[1] is not None:
        name, array, dtype = ("packed_custom_mask", masks[1], "uint8")
    if not str(getattr(array, "dtype", type(array))).endswith(dtype):
        raise DTypeError(f"{operation}: {name} is {getattr(array, 'dtype', type(array).__name__)}; it must be {dtype}.")
    return name, array


def read_tokens(
    operation: str, masks: tuple[Any, Any], counts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], before: int
) -> np.ndarray[Any, Any]:
    """(queries, 1, K) int32: the tokens of its request that each query reads, and -1 after them.

    Args:
        operation: the operation's name, for messages.
        masks: (custom_mask, packed_custom_mask); the second is used if both are passed, as in FlashInfer.
        counts, lengths: (B,) the queries and the tokens of each request.
        before: how many tokens before its own a query sees at most; -1 for all.

    Raises:
        ShapeError, DTypeError: the mask has another size or dtype.
    """
    name, array = _checked(operation, masks)
    packed = masks[1] is not None
    values = np.asarray(array if library_of(array) is np else array.detach().cpu()).reshape(-1)
    sizes = counts * lengths
    parts = -(-sizes // 8) if packed else sizes
    whole = len(counts) == 1 and tuple(array.shape) == (int(counts[0]), int(lengths[0])) and not packed
    if values.size != int(parts.sum()) or not (whole or len(array.shape) == 1):
        raise ShapeError(
            f"{operation}: {name} is {tuple(array.shape)}; {counts.tolist()} queries over {lengths.tolist()} tokens "
            f"need ({int(parts.sum())},)."
        )
    seen = []
    for part, n, length in zip(np.split(values, np.cumsum(parts)[:-1]), counts, lengths, strict=True):
        bits = np.unpackbits(part, count=n * length, bitorder="little").astype(bool) if packed else part
        seen.append(bits.reshape(n, length) & _window(n, length, before))
    return _listed(seen)


def window_tokens(counts: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], before: int) -> np.ndarray[Any, Any]:
    """As `read_tokens`: the tokens from so many before its own on, and all after it."""
    return _listed([_window(n, length, before) for n, length in zip(counts, lengths, strict=True)])


def _window(queries: int, length: int, before: int) -> np.ndarray[Any, Any]:
    """(queries, length) bool: the tokens from so many before its own on; all if the number is negative."""
    first = np.arange(length - queries, length)[:, None] - before
    return (np.arange(length) >= first) | (before < 0)


def _listed(masks: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """(queries, 1, K) int32: the tokens that the masks show, and -1 after them."""
    counts = [mask.sum(1) for mask in masks]
    most = max([1, *[int(n.max(initial=0)) for n in counts]])
    tokens, row = np.full((sum(map(len, masks)), most), -1, np.int32), 0
    for mask, shown in zip(masks, counts, strict=True):
        order = np.argsort(~mask, axis=1, kind="stable")[:, :most]
        used = np.arange(order.shape[1]) < shown[:, None]
        tokens[row : row + len(mask), : order.shape[1]] = np.where(used, order, -1)
        row += len(mask)
    return tokens[:, None]
