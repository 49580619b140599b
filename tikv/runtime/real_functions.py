"""Real functions of kernels, in an order that is the same in every process.

An engine finds a kernel in its cache on disk by a hash of all that the kernel's source became. There it lists the real
functions that a kernel calls by their addresses in memory, which is an order of chance: on the CPU, attention would be
compiled again in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OURS = -1  # instance of a function; the engine counts from 0, and compares functions by their numbers alone
LEAST = 32  # that are ready when a kernel's compilation begins; those of a kernel with more may come in any order


class RealFunctions:
    """The engine's functions for the real functions of one program's kernels: for one kernel, by ascending address.

    The engine can neither move a function nor say where it lies. So some are always made in advance, and sorted.
    """

    def __init__(self, create: Any, key_class: Any, address_of: Callable[[Any], int]) -> None:
        self._create, self._key_class, self._address_of = create, key_class, address_of
        self._spare: list[Any] = []
        self._made = 0

    def begin_kernel(self, program: Any) -> None:
        """See to it that a kernel's functions can all be taken from those that are sorted."""
        if len(self._spare) < LEAST:
            for _ in range(2 * LEAST):
                self._made += 1
                self._spare.append(self._create(program, self._key_class("tikv", self._made, _OURS)))
            self._spare.sort(key=self._address_of)

    def take(self, program: Any, key: Any) -> Any:
        """The next function, in the place of the engine's own `Program.create_function`."""
        return self._spare.pop(0) if self._spare else self._create(program, key)
