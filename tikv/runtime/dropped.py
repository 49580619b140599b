"""Memory of Taichi's on Vulkan and Metal that nobody uses any more, until it can be given back.

Taichi's own release of an ndarray does nothing, without a word, where a kernel used the array since the last
synchronize, and never tries again. So the arrays are kept here, and released behind a synchronize.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

KEPT_BYTES = 1 << 24  # that may wait; a synchronize of its own is due above it
LEAST_BYTES = KEPT_BYTES // 256  # that an array counts for, so that no more than 256 wait


class Array(NamedTuple):
    """An array of Taichi's without its Python object, and its size."""

    arr: Any
    nbytes: int


class Dropped:
    """The arrays of one program that wait for their release.

    `fresh.append` is all that a finalizer does, for it may run in the middle of any other call, in any thread.

    Attributes:
        fresh: arrays that were dropped and are not counted yet.
    """

    def __init__(self) -> None:
        self.fresh: deque[Array] = deque()
        self._counted: list[Array] = []
        self._nbytes = 0
        self._lock = threading.Lock()

    def due(self) -> bool:
        """Whether more waits than may."""
        with self._lock:
            while self.fresh:
                array = self.fresh.popleft()
                self._counted.append(array)
                self._nbytes += max(array.nbytes, LEAST_BYTES)
            return self._nbytes > KEPT_BYTES

    def release_behind(self, synchronize: Callable[[], None], release: Callable[[Any], None]) -> None:
        """Synchronize, then release what had been dropped before; where that fails, all of it goes on waiting."""
        taken = self._take()
        try:
            synchronize()
        except BaseException:
            self.fresh.extend(taken)
            raise
        for array in taken:
            release(array.arr)

    def release_at_end(self, release: Callable[[Any], None]) -> None:
        """Release what waits in a program that ends: later its addresses may be those of another program's arrays."""
        for array in self._take():
            release(array.arr)

    def _take(self) -> list[Array]:
        self.due()
        with self._lock:
            taken, self._counted, self._nbytes = self._counted, [], 0
        return taken
