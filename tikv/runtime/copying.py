"""What `copy` and `pickle` do with objects whose memory or launches belong to one running Taichi."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from tikv.errors import CopyError

T = TypeVar("T", bound="DeepCopied")


class NotCopied:
    """An object that `copy` and `pickle` refuse, in words that say which method does."""

    __slots__ = ()
    instead = "Make another one."  # the way out, for the message

    def __reduce_ex__(self, protocol: Any) -> Any:  # what copy.copy(), copy.deepcopy() and pickle ask
        raise CopyError(
            f"{type(self).__name__}: copy and pickle do not work here: it belongs to the Taichi that runs in "
            f"this process. {self.instead}"
        )


class DeepCopied(NotCopied):
    """An object that `copy.deepcopy()` copies, with all its memory, and that `copy.copy()` and `pickle` refuse.

    It works by what the object consists of: `Memory` is copied on its device, views of it keep their places in it, what
    is kept in a `BoundedCache` is made again, and the runtime stays the same.
    """

    __slots__ = ()

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        found = object.__new__(type(self))
        memo[id(self)] = found
        for name, value in vars(self).items():
            object.__setattr__(found, name, copy.deepcopy(value, memo))
        return found
