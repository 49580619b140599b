"""Kernels that other processes compile while this one goes on: a call that needs one waits until it is done.

So which kernel serves a call never depends on how far they are.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable

from tikv import forks

ENGINE = "the engine's cache"  # the name of all kernels of an engine that reads the list of its cache once
_running: list[Pending] = []


class Pending:
    """Kernels that a thread has other processes compile, until the work ends or the interpreter does.

    Args:
        names: the kernels, by the names under which `wait_for` asks for them.
        work: what the thread does. It says in `ends_by` how its processes end, and calls `done` after each kernel.

    Attributes:
        ended: whether the interpreter ends.
    """

    def __init__(self, names: Iterable[str], work: Callable[[Pending], None]) -> None:
        self.ended = False
        self._end: Callable[[], None] = lambda: None
        self._events = {name: threading.Event() for name in names}
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        _running.append(self)
        self._thread.start()

    def _run(self, work: Callable[[Pending], None]) -> None:
        try:
            work(self)
        finally:
            _running.remove(self)
            atexit.unregister(self.close)
            for name in self._events:
                self.done(name)

    def ends_by(self, end: Callable[[], None]) -> bool:
        """At the interpreter's end, call this function, which ends the processes; False if that has begun."""
        self._end = end
        atexit.register(self.close)  # before the end of whatever exists now, such as temporary folders
        return not self.ended

    def done(self, name: str) -> None:
        """Let calls that need this kernel go on; if it failed, they compile it themselves."""
        self._events[name].set()

    def wait_for(self, name: str) -> bool:
        """Wait for a kernel, if it is one of these; whether it is."""
        event = self._events.get(name)
        return event is not None and event.wait()

    def close(self) -> None:
        """End the processes, and wait for the thread."""
        self.ended = True
        self._end()
        self._thread.join(60)


def wait_for(name: str) -> bool:
    """Wait for a kernel that other processes compile; whether there was one of this name."""
    return any(pending.wait_for(name) for pending in tuple(_running))


def close() -> None:
    """End all processes."""
    for pending in tuple(_running):
        pending.close()


def _leave_behind() -> None:
    """In a forked process: the threads and their processes are the parent's."""
    for pending in _running:
        atexit.unregister(pending.close)
    _running.clear()


atexit.register(close)
forks.in_child.append(_leave_behind)
