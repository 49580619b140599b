"""A machine without a GPU compiles for one: `driver.c` answers as NVIDIA's driver, and Taichi writes PTX for it."""

from __future__ import annotations

import os
import pathlib
import queue
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tikv import engines, extras, runtime
from tikv.errors import ArchError
from tikv.launch.cuda import compiler, made

OPERATION = "kernels build"
ENGINE = next(engine for engine in engines.ALL.values() if engine.has_known_ptx)
_DRIVER = pathlib.Path(__file__).parent / "driver.c"
_COMPILERS = ("cc", "gcc", "clang")


class Needed(NamedTuple):
    """A kernel to compile: its key, its name, and the request for a compiling process.

    The request stays as bytes, since reading it imports the engine, which Ctrl-C does not interrupt.
    """

    key: str
    name: str
    fast_math: bool
    request: bytes


def require_tools() -> None:
    """Check that this machine can build.

    Raises:
        ArchError: it cannot; the message says what is missing.
    """
    elsewhere = "Build on a machine that has it, and copy the files: they serve every system"
    if sys.platform != "linux":
        raise ArchError(f"{OPERATION}: this runs on Linux only, and here is {sys.platform}. {elsewhere}.")
    if ENGINE.version() is None:
        raise ArchError(f"{OPERATION}: Taichi, which writes the kernels' PTX, is not installed. {elsewhere}.")
    if runtime.version_of("cuda-bindings") is None:
        raise ArchError(f"{OPERATION}: cuda-bindings is not installed. {extras.install('cuda')}.")
    c_compiler()


def c_compiler() -> list[str]:
    """The command of the machine's C compiler: that in the environment variable CC, or the first of a few names.

    Raises:
        ArchError: the machine does not have one.
    """
    commands = [os.environ["CC"]] if os.environ.get("CC") else _COMPILERS
    for command in commands:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise ArchError(
        f"{OPERATION}: this machine has no C compiler ({', '.join(commands)}), which builds a stand-in for NVIDIA's "
        "driver. Install one (Debian: gcc libc6-dev), or name it in the environment variable CC."
    )


def build_driver(folder: pathlib.Path) -> None:
    """Compile `driver.c` to a libcuda.so.1 in a folder.

    Raises:
        ArchError: the C compiler refuses.
    """
    library = folder / "libcuda.so.1"
    command = [*c_compiler(), "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(_DRIVER), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ArchError(
            f"{OPERATION}: {command[0]} cannot compile {_DRIVER.name}: {last}. Install a C compiler with its headers "
            "(Debian: gcc libc6-dev), or name another in the environment variable CC."
        )
    (folder / "libcuda.so").symlink_to(library.name)


def environment_of(folder: pathlib.Path, capability: tuple[int, int]) -> dict[str, str]:
    """The changed environment variables of a process that runs over the driver in a folder."""
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in paths if path),
        "TIKV_KERNELS_CAPABILITY": f"{capability[0]}{capability[1]}",
        "TIKV_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder),
        made.VARIABLE: "",
        "TIKV_ENGINE": ENGINE.name,
        "TIKV_QUIET": "1",
        **ENGINE.quiet,
    }


class SideBySide:
    """Processes that compile kernels side by side, within a context.

    Going through it gives each kernel with its "ptx", or with the "error" that prevents it, until `end` is called.
    """

    def __init__(self, kernels: Sequence[Needed], processes: int, environment: Mapping[str, str]) -> None:
        waiting: queue.SimpleQueue[Needed] = queue.SimpleQueue()
        # A child starts Taichi again when the next kernel needs another kind of arithmetic.
        for kernel in sorted(kernels, key=lambda each: (each.fast_math, each.name)):
            waiting.put(kernel)
        self._count = len(kernels)
        self._answers: queue.SimpleQueue[tuple[Needed, dict[str, str]] | None] = queue.SimpleQueue()
        self._workers = [_Worker(waiting, self._answers, environment) for _ in range(min(processes, self._count))]

    def __enter__(self) -> SideBySide:
        for worker in self._workers:
            worker.start()
        return self

    def __iter__(self) -> Iterator[tuple[Needed, dict[str, str]]]:
        for _ in range(self._count):
            answer = self._answers.get()
            if answer is None:
                return
            yield answer

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the processes, whatever they do."""
        for worker in self._workers:
            worker.end()
        self._answers.put(None)


class _Worker(threading.Thread):
    """A thread that has a compiling process of its own compile what waits in a queue."""

    def __init__(
        self,
        waiting: queue.SimpleQueue[Needed],
        answers: queue.SimpleQueue[tuple[Needed, dict[str, str]] | None],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(daemon=True)
        self._waiting = waiting
        self._answers = answers
        self._environment = environment
        self._child: compiler.Child | None = None
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            try:
                kernel = self._waiting.get_nowait()
            except queue.Empty:
                return
            self._answers.put((kernel, self._answer(kernel)))

    def _answer(self, kernel: Needed) -> dict[str, str]:
        """What the compiling process answers; one that failed is replaced for the next kernel."""
        try:
            if self._child is None:
                self._child = compiler.Child(self._environment)
                if self._stopped:
                    self._child.process.kill()
            answer = self._child.ask(kernel.request)
        except (OSError, EOFError) as error:
            answer = {"error": f"the compiling process failed: {error}"}
        if "error" in answer and self._child is not None and not self._stopped:
            self._child.close()
            self._child = None
        return answer

    def end(self) -> None:
        """End the compiling process, whatever it does, and wait for the thread."""
        self._stopped = True
        if self._child is not None:
            self._child.process.kill()
        if self.ident is not None:
            self.join(60)
        if self._child is not None:
            self._child.close()
