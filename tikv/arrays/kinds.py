"""Results in the kind of array that a caller works with: NumPy's, torch's, or that of a library with DLPack.

A launch writes into an array that `new_like` makes. For libraries such as JAX, whose arrays are immutable, this is
tikv's memory until it is written: then `handed_over` makes it an array of that library, without a copy. On CUDA it
waits for the launch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import dlpack
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import ArrayView
from tikv.arrays.cache_array import CacheArray
from tikv.arrays.gradients import refuse_backward
from tikv.arrays.memory import RoomFor, new_array, new_host_array
from tikv.dtypes import DType
from tikv.runtime.cache import BoundedCache


class _ForAnother(CacheArray):
    """tikv's memory for a result that another library will take by DLPack."""

    def __init__(self, array: ArrayView, live: runtime.Runtime, take: Callable[[Any], Any], like: Any) -> None:
        super().__init__(array, live)
        self._take = take
        self._like = like

    def hand_over(self) -> Any:
        """The memory as an array of that library, on the device of the array `like`."""
        array, device = self._take(self), getattr(self._like, "device", None)
        return array if device is None or array.device == device else array.to_device(device)


def new_like(like: Any, shape: Sequence[int], dtype: DType, live: runtime.Runtime, *, zeroed: bool = False) -> Any:
    """A new array that becomes a result of the kind of `like`, once it is written and `handed_over`.

    It is an array of NumPy, torch, or a library with `from_dlpack`, such as JAX and CuPy, on the same device; for
    anything else it is a `CacheArray`. If autograd follows `like`, `backward` through the result raises.
    """
    try:
        if isinstance(like, np.ndarray):
            return (np.zeros if zeroed else np.empty)(shape, dtype.numpy)
        if hasattr(like, "new_empty"):
            made = (like.new_zeros if zeroed else like.new_empty)(tuple(shape), dtype=dtypes.to_torch(dtype.name))
            return refuse_backward(made, like) if like.requires_grad else made
    except (MemoryError, RuntimeError, ValueError):
        with RoomFor(math.prod(shape) * dtype.itemsize, str(getattr(like, "device", "cpu"))):
            raise
    take = None if like is None or isinstance(like, CacheArray) else _from_dlpack_of(like)
    if take is None:
        return CacheArray(new_array(shape, dtype, live, zeroed=zeroed), live)
    make = new_host_array if like.__dlpack_device__()[0] in dlpack.HOST_KINDS else new_array
    if not _takes(type(like), take, dtype, make, live):
        return CacheArray(new_array(shape, dtype, live, zeroed=zeroed), live)
    return _ForAnother(make(shape, dtype, live, zeroed=zeroed), live, take, like)


def handed_over(result: Any) -> Any:
    """The caller's array from one that `new_like` made; anything else is returned unchanged."""
    return result.hand_over() if type(result) is _ForAnother else result


def _from_dlpack_of(array: Array) -> Callable[[Any], Any] | None:
    """`from_dlpack` of an array's library, which is imported already; None if the library lacks it."""
    if not hasattr(array, "__dlpack_device__"):
        return None
    try:
        namespace = array.__array_namespace__()
    except Exception:  # it has no such method, or refuses
        namespace = sys.modules.get(type(array).__module__.partition(".")[0])
    return getattr(namespace, "from_dlpack", None)


_tried: BoundedCache[tuple[type, str, Any], bool] = BoundedCache()


def _takes(kind: type, take: Callable[[Any], Any], dtype: DType, make: Any, live: runtime.Runtime) -> bool:
    """Whether a library accepts arrays of this dtype: tried once beforehand, so that no result is lost."""
    key = kind, dtype.name, make
    accepted = _tried.get(key)
    if accepted is None:
        try:
            accepted = tuple(take(CacheArray(make((1,), dtype, live, zeroed=True), live)).shape) == (1,)
        except Exception:  # each library has errors of its own
            accepted = False
        _tried.keep(key, accepted)
    return accepted
