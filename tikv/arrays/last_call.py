"""Views of all arrays of a call; they are cheap if the arrays have the forms of the operation's previous call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv.arrays.array_view import FollowedViews, Views
from tikv.arrays.gradients import is_followed
from tikv.arrays.readers import check_torch_memory, known_numpy_view, view_without_owner
from tikv.runtime.cache import BoundedCache

MOST_ADDRESSES = 256  # that are remembered for one form, and for how many forms


class _LastCall:
    """The last arrays of an operation; for torch tensors also a test whether others have the same forms."""

    __slots__ = ("count", "fits", "guards", "unnested", "views")

    def __init__(self, views: Views) -> None:
        self.views = views
        self.count = len(views)
        self.fits: Callable[..., bool] | None = None
        self.unnested = _unnested_at.get(views.key) or _unnested_at.keep(views.key, BoundedCache(MOST_ADDRESSES))
        self.guards = 0  # how many were made for these forms; inference mode and autocast need their own


# By `Views.key`, the addresses at which torch tensors of these forms were found to have all of their memory. Asking the
# storage of a new tensor takes a microsecond, and tensors are allocated and freed at a few addresses.
_unnested_at: BoundedCache[int, BoundedCache[tuple[int, ...], bool]] = BoundedCache(MOST_ADDRESSES)

MAX_GUARDS = 8
_last_calls: dict[str, _LastCall] = {}  # one for each operation


def view_all(arrays: tuple[Any, ...], names: Sequence[str], operation: str) -> Views:
    """`view` of each array of a call, but cheaper: if they have the previous call's forms, only addresses are read.

    These views keep no NumPy array and no torch tensor alive: the caller must, for as long as it uses them.

    Raises:
        As `view` does.
    """
    last = _last_calls.get(operation)
    if last is not None and last.count != len(arrays):
        last = None
    remembered: Views | None = None  # read once: another thread may replace `last.views` at any time
    if last is not None:
        remembered = last.views
        fits, pointers = last.fits, None if last.fits is None else _addresses(arrays)
        if fits is not None and pointers is not None:
            if pointers == remembered.pointers:
                if fits(*arrays):
                    return remembered
            elif (pointers in last.unnested or not _any_nested(arrays)) and fits(*arrays):
                if pointers not in last.unnested:
                    for array, pointer, seen, name in zip(arrays, pointers, remembered, names, strict=False):
                        check_torch_memory(array, pointer, seen, name, operation)
                    last.unnested[pointers] = True
                elsewhere = remembered.at_addresses(pointers)
                if elsewhere is not None:
                    last.views = elsewhere
                    return elsewhere
        for array, seen in zip(arrays, remembered, strict=True):
            if known_numpy_view(array) is not seen:
                break
        else:
            return remembered
    views = [view_without_owner(a, name, operation) for a, name in zip(arrays, names, strict=True)]
    if is_followed(*arrays):  # these are never remembered, so remembered forms need no such check
        return FollowedViews(views)
    if last is not None and remembered is not None and views == remembered:
        if last.fits is None:  # the same tensors as in the previous call are worth a guard too
            last.fits = torch_guard(arrays)
        return remembered
    all_views = Views(views)
    _remember(operation, arrays, all_views, last)
    return all_views


def _addresses(arrays: tuple[Any, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(map(_torch_address, arrays))
    except (TypeError, RuntimeError):  # they are not tensors, or have no address
        return None


def _any_nested(tensors: tuple[Any, ...]) -> bool:
    """Whether one is a nested tensor, for which torch's guards would end the process."""
    return any(t.is_nested for t in tensors)


def _remember(operation: str, arrays: tuple[Any, ...], views: Views, last: _LastCall | None) -> None:
    for seen in views:
        if seen.owner is not None or seen.handle is not None:
            return  # it would be kept alive
    if last is None or last.views.key != views.key:
        _last_calls[operation] = _LastCall(views)
        return
    last.views = views
    if last.guards < MAX_GUARDS and (fits := torch_guard(arrays)) is not None:  # recurring forms are worth one
        last.fits, last.guards = fits, last.guards + 1


def last_call_test(
    operation: str, names: Sequence[str]
) -> tuple[Callable[..., bool], Callable[[Any], int], int, Callable[..., bool]] | None:
    """Tests for torch tensors with the forms of the operation's last call, their addresses, and their `Views.key`.

    The first test takes tensors at the addresses of the last call. The last takes addresses and tensors at any address,
    and raises ShapeError, with these names, for tensors without memory. The key also depends on alignment, which is not
    tested. None if the arrays have no such test.
    """
    last = _last_calls.get(operation)
    if last is None or last.fits is None:
        return None
    fits, views = last.fits, list(last.views)
    # For each array the addresses that were checked: new rows reuse a few addresses, in many combinations.
    whole: list[BoundedCache[int, bool]] = [BoundedCache(MOST_ADDRESSES) for _ in views]

    def fits_at(pointers: tuple[int, ...], *arrays: Any) -> bool:
        if _any_nested(arrays) or not fits(*arrays):
            return False
        for i, pointer in enumerate(pointers):
            if pointer not in whole[i]:
                check_torch_memory(arrays[i], pointer, views[i], names[i], operation)
                whole[i][pointer] = True
        return True

    return fits, _torch_address, last.views.key, fits_at


_torch_address: Callable[[Any], int]
_torch_guards: Any = None  # torch's class of guards; False if it does not do what is needed


def torch_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """A test, a single torch call, for tensors of exactly these forms: type, dtype, device, shape, strides, lazy bits.

    Torch guards its compiled functions with it. None if one is not a plain tensor, or if torch has no such guards.
    """
    global _torch_address, _torch_guards
    torch: Any = sys.modules.get("torch")
    if torch is None or _torch_guards is False or any(type(t) is not torch.Tensor for t in tensors):
        return None
    if _torch_guards is None:
        _torch_address = torch.Tensor.data_ptr
        _torch_guards = _find_torch_guards(torch) or False
        return torch_guard(tensors)
    shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guard: Callable[..., bool] = _torch_guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return guard


def _find_torch_guards(torch: Any) -> Any:
    """Torch's guards, if they exist and distinguish what they must; they are not a public part of torch."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        with torch.inference_mode(False), torch.enable_grad():
            base = torch.zeros(2, 3)
            fits = guards(base, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
            others = (
                torch.zeros(3, 2),
                torch.zeros(2, 3, 1),
                torch.zeros(3, 2).t(),
                torch.zeros(2, 3, dtype=torch.float64),
                torch.empty(2, 3, device="meta"),
                torch.zeros(2, 3).to_sparse(),
                torch._neg_view(torch.zeros(2, 3)),
                torch.zeros(2, 3, requires_grad=True),
                np.zeros((2, 3), np.float32),
            )
            works = fits(torch.ones(2, 3)) and not any(fits(other) for other in others)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None
    return guards if works else None
