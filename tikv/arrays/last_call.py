"""The arrays of a call, seen together, and cheaply where they are like those of the operation's call before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv.arrays.array_view import FollowedViews, Views
from tikv.arrays.gradients import is_followed
from tikv.arrays.readers import check_torch_memory, known_numpy_view, view_without_owner
from tikv.runtime.cache import BoundedCache


class _LastCall:
    """What an operation was last given; for torch tensors also a test whether others have the same forms."""

    __slots__ = ("count", "fits", "guards", "unnested", "views")

    def __init__(self, views: Views) -> None:
        self.views = views
        self.count = len(views)
        self.fits: Callable[..., bool] | None = None
        self.unnested = _unnested_at.get(views.key) or _unnested_at.keep(views.key, BoundedCache())
        self.guards = 0  # made for these forms; inference mode and autocast ask for one of their own


# By `Views.key`, the addresses at which torch tensors of these forms were seen to have all of their memory. To ask the
# storage takes a microsecond for a new tensor, and tensors come and go at a few addresses.
_unnested_at: BoundedCache[int, BoundedCache[tuple[int, ...], bool]] = BoundedCache()

MAX_GUARDS = 8
_last_calls: dict[str, _LastCall] = {}  # one of each operation


def view_all(arrays: tuple[Any, ...], names: Sequence[str], operation: str) -> Views:
    """`view` of each array of a call, cheaper: where they have the forms of the call before, only addresses are read.

    These views keep no NumPy array and no torch tensor alive: who calls this has to, as long as it uses them.

    Raises:
        As `view`.
    """
    last = _last_calls.get(operation)
    if last is not None and last.count != len(arrays):
        last = None
    if last is not None:
        found = last.views
        fits, pointers = last.fits, None if last.fits is None else _addresses(arrays)
        if fits is not None and pointers is not None:
            if pointers == found.pointers:
                if fits(*arrays):
                    return found
            elif (pointers in last.unnested or not _any_nested(arrays)) and fits(*arrays):
                if pointers not in last.unnested:
                    for array, pointer, seen, name in zip(arrays, pointers, found, names, strict=False):
                        check_torch_memory(array, pointer, seen, name, operation)
                    last.unnested[pointers] = True
                elsewhere = found.at_addresses(pointers)
                if elsewhere is not None:
                    last.views = elsewhere
                    return elsewhere
        for array, seen in zip(arrays, last.views, strict=True):
            if known_numpy_view(array) is not seen:
                break
        else:
            return last.views
    views = [view_without_owner(a, name, operation) for a, name in zip(arrays, names, strict=True)]
    if is_followed(*arrays):  # never remembered, so that what is found again needs no such question
        return FollowedViews(views)
    if last is not None and views == last.views:
        if last.fits is None:  # the very tensors of the call before, which are worth a guard too
            last.fits = torch_guard(arrays)
        return last.views
    found = Views(views)
    _remember(operation, arrays, found, last)
    return found


def _addresses(arrays: tuple[Any, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(map(_torch_address, arrays))
    except (TypeError, RuntimeError):  # no tensors, or tensors that have none
        return None


def _any_nested(tensors: tuple[Any, ...]) -> bool:
    """Whether one is a nested tensor, at which torch's guards end the process."""
    return any(t.is_nested for t in tensors)


def _remember(operation: str, arrays: tuple[Any, ...], views: Views, last: _LastCall | None) -> None:
    for seen in views:
        if seen.owner is not None or seen.handle is not None:
            return  # it would be kept alive
    if last is None or last.views.key != views.key:
        _last_calls[operation] = _LastCall(views)
        return
    last.views = views
    if last.guards < MAX_GUARDS and (fits := torch_guard(arrays)) is not None:  # forms that come back are worth one
        last.fits, last.guards = fits, last.guards + 1


def last_call_test(
    operation: str, names: Sequence[str]
) -> tuple[Callable[..., bool], Callable[[Any], int], int, Callable[..., bool]] | None:
    """How torch tensors with the forms of the operation's last call are told, their addresses, and `Views.key` of them.

    The first test takes tensors that are at the addresses of the last call, the last their addresses and them, wherever
    they are; it raises ShapeError of those without memory, by these names. The key depends on their alignment too,
    which is not tested. None where those arrays have no such test.
    """
    last = _last_calls.get(operation)
    if last is None or last.fits is None:
        return None
    fits, views = last.fits, list(last.views)
    # Of each array the addresses that were looked at: new rows come and go at a few, in many combinations.
    whole: list[BoundedCache[int, bool]] = [BoundedCache() for _ in views]

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
_torch_guards: Any = None  # torch's class of guards; False where it does not do what is needed


def torch_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """A test, one call of torch's, for tensors of these very forms: type, dtype, device, shape, strides, lazy bits.

    It is what guards torch's compiled functions. None for what is not a plain tensor, or where torch has no such
    guards.
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
    found: Callable[..., bool] = _torch_guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return found


def _find_torch_guards(torch: Any) -> Any:
    """Torch's guards, if they are there and tell apart what they must; they are not a public part of torch."""
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
