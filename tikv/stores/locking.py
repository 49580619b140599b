"""Calls of several threads on one store: each call holds the store's lock, so they run one after the other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tikv.runtime.interrupts import uninterrupted

F = TypeVar("F", bound=Callable[..., Any])
_RLock: Any = type(threading.RLock())


class StoreLock(_RLock):  # type: ignore[misc]
    """The lock of a store, which a thread may take again while it holds it. A copy of the store has its own lock."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreLock:
        return StoreLock()


def locked(method: F) -> F:
    """Make a method of a store hold the store's `lock` while it runs."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def changing(method: F) -> F:
    """`locked`, for methods that change a store: Ctrl-C waits until the method is done, so it is never half done."""
    return locked(uninterrupted(method))
