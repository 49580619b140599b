"""Calls of a store that threads make side by side: each holds the store's lock, so they come one after the other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tikv.runtime.interrupts import uninterrupted

F = TypeVar("F", bound=Callable[..., Any])
_RLock: Any = type(threading.RLock())


class StoreLock(_RLock):  # type: ignore[misc]
    """The lock of a store, which a thread may take again while it holds it. A copy of the store has one of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StoreLock:
        return StoreLock()


def locked(method: F) -> F:
    """Let a method of a store hold the store's `lock` from its beginning to its end."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def changing(method: F) -> F:
    """`locked`, for what changes a store: Ctrl-C waits until it is done, so that it is never half done."""
    return locked(uninterrupted(method))
