"""Records what a thread binds and launches instead of launching it, for a graph to launch later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.launch.bound import Bound
from tikv.launch.compilation import CompiledKernel
from tikv.launch.vectors import fields_of, places_of
from tikv.runtime.cache import BoundedCache


class Recorded(NamedTuple):
    """A launch that was recorded instead of made; it keeps the memory of its arrays alive."""

    kernel: CompiledKernel
    iterations: int
    arguments: tuple[Any, ...]  # vectors keep the names of their entries

    @property
    def named(self) -> dict[str, tuple[int, int]]:
        """Name -> (argument, place in it), for each name that only one entry of a vector has."""
        return places_of(fields_of(self.arguments, self.kernel.is_float))


class _Recording(threading.local):
    """Where the launches of a recording thread go: to this list, or to the device if it is None."""

    launches: list[Recorded] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recording(live: runtime.Runtime, plans: BoundedCache[Any, Any]) -> Iterator[list[Recorded]]:
    """Collect what this thread binds and launches, and launch nothing.

    Meanwhile its one-shot calls use the cache `plans` instead of the runtime's.
    """
    launches: list[Recorded] = []
    with live.lock:
        before, runtime.thread_plans.plans = runtime.thread_plans.plans, plans
        _recording.launches = launches
        try:
            yield launches
        finally:
            runtime.thread_plans.plans = before
            _recording.launches = None


def is_recording() -> bool:
    """Whether this thread records: what is bound now is never launched, and must not be kept."""
    return _recording.launches is not None


def bind_recorded(kernel: CompiledKernel, iterations: int, arguments: tuple[Any, ...]) -> Bound | None:
    """A bound kernel that notes its launches, if this thread records."""
    launches = _recording.launches
    return None if launches is None else RecordedBound(kernel, iterations, arguments, launches)


class RecordedBound(Bound):
    """A bound kernel under `recording`: it keeps its arrays alive, and notes its launches."""

    def __init__(
        self, kernel: CompiledKernel, iterations: int, arguments: tuple[Any, ...], launches: list[Recorded]
    ) -> None:
        super().__init__(kernel, iterations, arguments)
        self.arguments = [list(v) if isinstance(v, tuple) else v for v in arguments]
        self._make: dict[int, Callable[[list[Any]], tuple[Any, ...]]] = {
            i: getattr(v, "_make", tuple) for i, v in enumerate(arguments) if isinstance(v, tuple)
        }
        self._launches = launches

    def set_array(self, i: int, array: ArrayView) -> None:
        self.arguments[i] = array

    def set_entry(self, i: int, j: int, value: int) -> None:
        self.arguments[i][j] = value

    def launch(self) -> None:
        arguments = tuple(self._make[i](v) if i in self._make else v for i, v in enumerate(self.arguments))
        self._launches.append(Recorded(self.kernel, self.iterations, arguments))
