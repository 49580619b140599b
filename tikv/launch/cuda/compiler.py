"""The PTX of a kernel: from the disk, made beforehand, or from a child process that runs Taichi only for this.

Taichi writes PTX only in a program that was started for it, and into the working directory. So a child process with a
temporary directory compiles what it is asked for over a pipe. It ends after it has been idle for a while, or when the
parent is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

from tikv import runtime
from tikv.errors import ArchError
from tikv.launch import pending
from tikv.launch.cuda import disk_cache, keys, made

REPLY_SECONDS = 300
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tikv import launch; launch.serve_compiler()"
_lock = threading.RLock()
_child: Child | None = None


def ptx_of(factory: Callable[..., Any], choices: tuple[Any, ...], target: str) -> str:
    """The PTX of the kernel that a factory makes of its choices, for a GPU of this compute capability.

    Raises:
        NotMade: it was not made beforehand, and the engine does not compile for the native launcher.
        ArchError: it cannot be compiled in a child process; the message says why.
    """
    key = keys.key_of(factory, choices, target)
    text = disk_cache.read(key) or made.read(keys.made_key_of(factory, choices), target)
    engine = runtime.engine_in_use()
    if text is None and not engine.has_known_ptx:
        raise made.NotMade(
            "no file of kernels made beforehand has it, and the native launcher cannot load what "
            f"{engine.title} compiles"
        )
    if text is None and pending.wait_for(key):
        text = disk_cache.read(key)
    if text is None:
        runtime.log.info("compiling %s for %s in a child process, once", factory.__name__, target)
        text = _compile(factory, choices)
        disk_cache.write(key, text)
    return text


class Child:
    """The compiling process: stdin takes requests, stdout gives texts, and stderr is kept for messages.

    It gets this process's environment variables with `changed` ones.
    """

    def __init__(self, changed: Mapping[str, str] | None = None) -> None:
        self.parent = os.getpid()
        self.said = tempfile.TemporaryFile()  # noqa: SIM115
        engine = runtime.engine_in_use()
        environment = {
            **os.environ,
            "TIKV_LAUNCHER": "direct",
            "TIKV_ENGINE": engine.name,
            **engine.quiet,
            **(changed or {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps([os.path.abspath(p or os.curdir) for p in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            env=environment,
        )

    @property
    def usable(self) -> bool:
        return self.parent == os.getpid() and self.process.poll() is None

    def ask(self, request: bytes) -> dict[str, str]:
        """Send a request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        send(self.process.stdin, request)
        timer = threading.Timer(REPLY_SECONDS, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            answer = receive(self.process.stdout)
        finally:
            timer.cancel()
        if answer is None:
            raise EOFError(self.last_words())
        return json.loads(answer)  # type: ignore[no-any-return]

    def last_words(self) -> str:
        """The last line it wrote to stderr, or how it ended."""
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.poll()}"

    def close(self) -> None:
        """Let it end, and wait for it."""
        if self.parent != os.getpid():
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.said.close()


def _compile(factory: Callable[..., Any], choices: tuple[Any, ...]) -> str:
    global _child
    try:
        request = pickle.dumps((factory, choices))
    except Exception as error:
        raise ArchError(f"the kernel cannot be sent to another process ({error})") from error
    if factory.__module__ == "__main__":
        raise ArchError("the kernel is defined in __main__, which another process cannot import")
    if not sys.executable:
        raise ArchError("there is no sys.executable to start another process with")
    with _lock:
        for _ in range(2):  # an idle child may have ended since the last request
            fresh = _child is None or not _child.usable
            try:
                if fresh:
                    close()
                    _child = Child()
                assert _child is not None
                answer = _child.ask(request)
                break
            except (OSError, EOFError) as error:
                close()
                failure = error
                if fresh:
                    raise ArchError(f"the compiling process failed: {error}") from error
        else:
            raise ArchError(f"the compiling process failed: {failure}")
    if "error" in answer:
        close()
        raise ArchError(f"the compiling process could not compile it: {answer['error']}")
    return answer["ptx"]


def close() -> None:
    """End the compiling process, if there is one."""
    global _child
    with _lock:
        if _child is not None:
            _child.close()
            _child = None


atexit.register(close)


def send(pipe: IO[bytes], message: bytes) -> None:
    """Write a message, after its length."""
    pipe.write(struct.pack("<Q", len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """The next message, or None at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    message = pipe.read(length)
    return message if len(message) == length else None
