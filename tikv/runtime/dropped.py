"""Keeps Taichi's unused memory on Vulkan and Metal until it can be freed.

Taichi's own release of an ndarray silently does nothing if a kernel has used the array since the last synchronize, and
never tries again. So the arrays are kept here, and released after a synchronize.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

KEPT_BYTES = 1 << 24  # the most that may wait; above it, a synchronize is due
LEAST_BYTES = KEPT_BYTES // 256  # the least that an array counts for, so that at most 256 wait


class Array(NamedTuple):
    """One of the engine's arrays whose Python object was freed, and its size in bytes."""

    arr: Any
    nbytes: int


class Dropped:
    """The arrays of one program that wait for their release.

    A finalizer only calls `fresh.append`, since it may run in the middle of any other call, in any thread.

    Attributes:
        fresh: arrays that were dropped and are not counted yet.
    """

    def __init__(self) -> None:
        self.fresh: deque[Array] = deque()
        self._counted: list[Array] = []
        self._nbytes = 0
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Whether more bytes wait than may."""
        with self._lock:
            while self.fresh:
                array = self.fresh.popleft()
                self._counted.append(array)
                self._nbytes += max(array.nbytes, LEAST_BYTES)
            return self._nbytes > KEPT_BYTES

    def release_behind(self, synchronize: Callable[[], None], release: Callable[[Any], None]) -> None:
        """Synchronize, then release what had been dropped before; if that fails, all of it keeps waiting."""
        taken = self._take()
        try:
            synchronize()
        except BaseException:
            self.fresh.extend(taken)
            raise
        for array in taken:
            release(array.arr)

    def release_at_end(self, release: Callable[[Any], None]) -> None:
        """Release what waits in a program that is ending: later, another program's arrays may have its addresses."""
        for array in self._take():
            release(array.arr)

    def _take(self) -> list[Array]:
        self.due()
        with self._lock:
            taken, self._counted, self._nbytes = self._counted, [], 0
        return taken
