"""Index arguments: lists as arrays, values that the host knows, and the checks of slots, blocks and tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, as_numpy, describe, read_host, view
from tikv.errors import DTypeError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.layouts import PoolShape


def index_array(values: Any, name: str, operation: str) -> Any:
    """An index argument as an array: a list or tuple of integers becomes one, anything else is left as it is.

    Raises:
        ShapeError: the list does not form an array.
    """
    if isinstance(values, list | tuple | range):
        try:
            array = np.asarray(values)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ShapeError(
                f"{operation}: {name} is a list that cannot become an array: {reason}. Pass rows of equal length."
            ) from None
        return array.astype(np.int64) if array.size == 0 else array
    return values


def view_indices(values: Any, name: str, operation: str) -> ArrayView:
    """`view` of an index argument, which may be a list.

    Raises:
        ShapeError, DTypeError: it is not an array.
    """
    return view(index_array(values, name, operation), name, operation)


def values_known(index: ArrayView, live: runtime.Runtime) -> bool:
    """Whether the values of an index array are known: on the host, or anywhere in debug mode."""
    return index.device == "cpu" or live.debug or getattr(index.owner, "on_host", None) is not None


def host_indices(index: ArrayView, live: runtime.Runtime) -> np.ndarray[Any, Any] | None:
    """The values of an index array, if they are known; None when only the device knows them."""
    if index.owner is not None and (known := getattr(index.owner, "on_host", None)) is not None:
        if isinstance(known, np.ndarray):
            assert known.shape == index.shape, "a part of an array goes with its part of what the host knows"
            return known
        index = known
    if index.device == "cpu":
        if index.host is None:
            index.host = as_numpy(index)
        return index.host
    return read_host(index, live) if live.debug else None


def host_integers(values: Any, name: str, operation: str, live: runtime.Runtime) -> list[int]:
    """`values` as a list of integers, wherever they lie; an array on a device is read back.

    Raises:
        DTypeError, ShapeError: it is not valid.
    """
    if isinstance(values, list | tuple | range):
        if {*map(type, values)} <= {int}:
            return list(values)
        try:
            values = np.asarray(values)
        except ValueError:  # lists of different lengths
            raise ShapeError(f"{operation}: {name} must be a list of integers, not {values!r}.") from None
    if type(values) is np.ndarray and values.ndim == 1 and values.dtype.kind in "iu":
        return values.tolist()  # type: ignore[no-any-return]
    if isinstance(values, int):
        raise ShapeError(f"{operation}: {name} is {values}, one integer. Pass a list: [{values}].")
    if isinstance(values, str | bytes):
        raise DTypeError(f"{operation}: {name} is text, {values[:20]!r}. Pass a list of integers.")
    array = view(values, name, operation)
    checks.rank(array, (1,), name, "a list of integers", operation)
    if array.dtype not in dtypes.INDICES:
        raise DTypeError(f"{operation}: {name} is {describe(array)}. Pass integers, int32 or int64.")
    host = as_numpy(array) if array.device == "cpu" else read_host(array, live)
    integers: list[int] = host.tolist()
    return integers


def check_slots(index: ArrayView, shape: PoolShape, live: runtime.Runtime, operation: str, unique: bool = True) -> None:
    """Check that no known slot is beyond the pool and, in debug mode, that no two tokens go to one slot.

    Slots that are read need not be `unique`.

    Raises:
        PositionError: one is, or two do.
    """
    name, slots = "slot_mapping", host_indices(index, live)
    if slots is None or slots.size == 0:
        return
    if int(slots.max()) >= shape.slots:
        token = int(np.argmax(slots >= shape.slots))
        raise PositionError(
            f"{operation}: {name}[{token}]={int(slots[token])} is beyond the pool of {shape.slots} slots "
            f"({shape.blocks} blocks of {shape.page}). Use a slot below that, or a negative one to skip the token."
        )
    if live.debug and unique:
        check_unique(slots[slots >= 0], name, operation)


def check_unique(targets: np.ndarray[Any, Any], name: str, operation: str) -> None:
    """Check that no destination is named twice.

    Raises:
        PositionError: one is.
    """
    unique, counts = np.unique(targets, return_counts=True)
    if unique.size != targets.size:
        twice = int(unique[np.argmax(counts > 1)])
        raise PositionError(
            f"{operation}: {name} names destination {twice} more than once, and which row stays is undefined. Keep one."
        )


def check_blocks(blocks: np.ndarray[Any, Any], limit: int, name: str, operation: str) -> None:
    """Check that those blocks of a table that a length reaches are in the pool.

    Raises:
        PositionError: one is not.
    """
    wrong = (blocks < 0) | (blocks >= limit)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise PositionError(
            f"{operation}: {name}[{at}]={int(blocks[at])} is not one of the pool's {limit} blocks, and the length "
            f"reaches it. Use 0..{limit - 1}."
        )
