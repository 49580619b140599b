"""Tells users who wait for a first call that kernels are being compiled."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from tikv import runtime

SECONDS = 2.0  # compilation time in a process after which it says so


class Notice:
    """Counts how long a process has compiled kernels; a compiler runs inside `compiling(...)`.

    After `SECONDS` it says so, once, through the logger "tikv": on stderr, unless logging is configured. A timer does
    this during compilation, since a first call that takes ten seconds looks like one that hangs. The environment
    variable TIKV_QUIET, set to anything, or the logger's level suppresses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent = 0.0
        self._kernels = 0
        self._said = False
        self._listener: Callable[[str], None] | None = None

    @contextlib.contextmanager
    def compiling(self, kernel: str, arch: str) -> Iterator[None]:
        """The context in which a kernel of this name is compiled."""
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
        """Instead give the name of each kernel to a function that shows it."""
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
