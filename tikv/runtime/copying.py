"""How `copy` and `pickle` treat objects whose memory or launches belong to one running engine."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from tikv.errors import CopyError

T = TypeVar("T", bound="DeepCopied")


class NotCopied:
    """An object that `copy` and `pickle` refuse, with a message that names the method to use."""

    __slots__ = ()
    instead = "Make another one."  # the way out, for the message

    def __reduce_ex__(self, protocol: Any) -> Any:  # copy.copy(), copy.deepcopy() and pickle call this
        raise CopyError(
            f"{type(self).__name__}: this object cannot be copied or pickled in this way, since it belongs to the "
            f"engine that runs in this process. {self.instead}"
        )


class DeepCopied(NotCopied):
    """An object that `copy.deepcopy()` copies, with all its memory, and that `copy.copy()` and `pickle` refuse.

    It copies the object's parts: `Memory` is copied on its device, views of it keep their places in it, a
    `BoundedCache` starts empty, and the runtime stays the same.
    """

    __slots__ = ()

    def __deepcopy__(self: T, memo: dict[int, Any]) -> T:
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        for name, value in vars(self).items():
            object.__setattr__(duplicate, name, copy.deepcopy(value, memo))
        return duplicate
