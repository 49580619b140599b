"""Gives the real functions of kernels the same order in every process.

An engine finds a kernel in its cache on disk by a hash of its intermediate code. There it lists the real functions that
a kernel calls in the order of their addresses, which varies: on the CPU, every process would compile attention again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OURS = -1  # instance of a function; the engine counts from 0, and compares functions by their numbers alone
LEAST = 32  # functions ready when a kernel's compilation begins; if it needs more, their order may vary


class RealFunctions:
    """The engine's objects for the real functions of one program's kernels, by ascending address within a kernel.

    The engine cannot choose the address of a function. So some are always made in advance, and sorted.
    """

    def __init__(self, create: Any, key_class: Any, address_of: Callable[[Any], int]) -> None:
        self._create, self._key_class, self._address_of = create, key_class, address_of
        self._spare: list[Any] = []
        self._made = 0

    def begin_kernel(self, program: Any) -> None:
        """Make sure that all of a kernel's functions can be taken from the sorted ones."""
        if len(self._spare) < LEAST:
            for _ in range(2 * LEAST):
                self._made += 1
                self._spare.append(self._create(program, self._key_class("tikv", self._made, _OURS)))
            self._spare.sort(key=self._address_of)

    def take(self, program: Any, key: Any) -> Any:
        """The next function; this replaces the engine's own `Program.create_function`."""
        return self._spare.pop(0) if self._spare else self._create(program, key)
