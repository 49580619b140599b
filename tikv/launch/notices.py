"""Tell whoever waits for a first call what it waits for: kernels that are being compiled."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from tikv import runtime

SECONDS = 2.0  # of compiling in a process, after which it says so


class Notice:
    """How long a process has compiled kernels by now; who compiles tells it, `compiling` in `compiling(...)`.

    After `SECONDS` of them it says so, once, by the logger "tikv": on stderr, where nobody has set up logging. That
    happens while a kernel is being compiled, by a timer: a first call that takes ten seconds looks like one that hangs.
    The environment variable TIKV_QUIET, set to anything, or the logger's level keeps it quiet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = 0.0
        self._kernels = 0
        self._said = False
        self._listener: Callable[[str], None] | None = None

    @contextlib.contextmanager
    def compiling(self, kernel: str, arch: str) -> Iterator[None]:
        """While a kernel of this name is being compiled."""
        listener = self._listener
        if listener is not None:
            listener(kernel)
            yield
            return
        self._kernels += 1
        if self._said:
            yield
            return
        timer = threading.Timer(max(0.0, SECONDS - self._spent), self._say, (kernel, arch))
        timer.daemon = True
        timer.start()
        begun = time.monotonic()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._spent += time.monotonic() - begun

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[str], None]) -> Iterator[None]:
        """Give the name of each kernel to a function instead, which shows it."""
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    def _say(self, kernel: str, arch: str) -> None:
        with self._lock:
            if self._said:
                return
            self._said = True
        if os.environ.get("TIKV_QUIET"):
            return
        runtime.log.warning(
            "tikv is compiling kernels for %s, or loading those that earlier processes compiled: %d so far, for "
            "%g seconds, now %r. tikv.warmup does this ahead of time. TIKV_QUIET=1, or the level of the logger "
            "'tikv', hides this message.",
            arch, self._kernels, SECONDS, kernel,
        )  # fmt: skip


notice = Notice()
