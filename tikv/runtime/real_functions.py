"""Real functions of kernels, in an order that is the same in every process.

An engine finds a kernel in its cache on disk by a hash of all that the kernel's source became. There it lists the real
functions that a kernel calls by their addresses in memory, which is an order of chance: on the CPU, attention would be
compiled again in every process.
"""

from __future__ import annotations

import ctypes
from typing import Any

LEAST = 32  # that are ready when a kernel's compilation begins; those of a kernel with more may come in any order


class RealFunctions:
    """The engine's functions for the real functions of one program's kernels: for one kernel, by ascending address.

    The engine can neither move a function nor say where it lies. So some are always made in advance, and sorted.
    """

    def __init__(self, create: Any, key_class: Any) -> None:
        self._create, self._key_class = create, key_class
        self._spare: list[Any] = []
        self._made = 0

    def begin_kernel(self, program: Any) -> None:
        """See to it that a kernel's functions can all be taken from those that are sorted."""
        if len(self._spare) < LEAST:
            for _ in range(2 * LEAST):
                self._made += 1
                # Taichi tells functions apart by two numbers; of its own, the second is at least 0.
                self._spare.append(self._create(program, self._key_class("tikv", self._made, -1)))
            self._spare.sort(key=_address)

    def take(self, program: Any, key: Any) -> Any:
        """The next function, in the place of the engine's own `Program.create_function`."""
        return self._spare.pop(0) if self._spare else self._create(program, key)


def _address(function: Any) -> int:
    """Where the C++ object of one of pybind11's objects lies: they keep that right behind Python's own part."""
    found: int | None = ctypes.c_void_p.from_address(id(function) + object.__basicsize__).value
    return found or 0
