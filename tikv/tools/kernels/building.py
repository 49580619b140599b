"""Builds files of kernels on a machine without a GPU: `driver.c` answers as one, and Taichi writes PTX for it."""

from __future__ import annotations

import os
import pathlib
import pickle
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tikv import engines, extras, runtime
from tikv.errors import ArchError, OptionError
from tikv.launch.cuda import compiler, made
from tikv.stores.files import replacing
from tikv.tools.kernels.collect import Collected, Needed
from tikv.tools.kernels.forms import OPERATION, KernelForm, chosen

CAPABILITIES = ((8, 0), (9, 0))
PARTS = 1000  # of the progress that is shown, for each compute capability
_COLLECTING = 50  # of them, until it is known which kernels are needed
_ENGINE = next(engine for engine in engines.ALL.values() if engine.has_known_ptx)
_DRIVER = pathlib.Path(__file__).parent / "driver.c"
_COMPILERS = ("cc", "gcc", "clang")
Step = Callable[[str, int], None]


class Built(NamedTuple):
    """A file that was written, and what is not in it, with the reason."""

    file: made.MadeFile
    left_out: dict[str, str]


def parse_capability(text: str) -> tuple[int, int]:
    """A compute capability such as 9.0.

    Raises:
        OptionError: it is not written in this way, or is older than kernels of tikv support.
    """
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None or int(match[1]) < 6:
        raise OptionError(
            f"{OPERATION}: --capability {text!r} is not a compute capability. Use one such as 8.0 or 9.0."
        )
    return int(match[1]), int(match[2])


def build(
    folder: str | os.PathLike[str],
    capabilities: Sequence[tuple[int, int]] = CAPABILITIES,
    patterns: Sequence[str] = (),
    processes: int | None = None,
    step: Step = lambda now, done: None,
) -> list[Built]:
    """Write a file of kernels for each compute capability into a folder; an old file is replaced in one step.

    Args:
        folder: made if it does not exist.
        capabilities: compute capabilities, as (major, minor). Kernels for 8.0 also serve 8.6 and 8.9.
        patterns: only forms whose names match one of these; all without patterns.
        processes: how many compile at the same time; None for as many as the process may use cores.
        step: called with a text, and how much is done of `PARTS` for each compute capability.

    Raises:
        ArchError: the machine lacks a C compiler, Taichi or cuda-bindings, or does not run Linux.
        OptionError: a pattern matches no form.
        CacheFileError: a file cannot be written.
    """
    forms = chosen(patterns)
    require_tools()
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="tikv-build-") as work:
        build_driver(pathlib.Path(work))
        for number, capability in enumerate(capabilities):
            title = f"compute capability {capability[0]}.{capability[1]}"
            environment = environment_of(pathlib.Path(work), capability)

            def show(now: str, part: int, title: str = title, begin: int = number * PARTS) -> None:
                step(f"{title}, {now}", begin + part)

            collected = collect(pathlib.Path(work) / "kernels.pickle", forms, environment, show)
            results.append(write_file(target, capability, forms, collected, processes or _cores(), environment, show))
    return results


def write_file(
    folder: pathlib.Path,
    capability: tuple[int, int],
    forms: Sequence[KernelForm],
    collected: Collected,
    processes: int,
    environment: Mapping[str, str],
    show: Step = lambda now, done: None,
) -> Built:
    """Compile the kernels of forms for a compute capability, and write them to its file in a folder.

    Raises:
        CacheFileError: the file cannot be written.
    """
    texts, failed = _compiled(collected.kernels, processes, environment, show)
    facts = {
        "tikv": sys.modules["tikv"].__version__,
        "engine": f"{_ENGINE.name} {_ENGINE.version()}",
        "forms": [form.name for form in forms if form.name not in collected.refused],
    }
    path = folder / f"sm_{capability[0]}{capability[1]}.zip"
    replacing.replace(path, made.packed(capability, texts, facts), OPERATION, path.suffix)
    return Built(made.contents(path), {**collected.refused, **failed})


def require_tools() -> None:
    """Check that this machine can build.

    Raises:
        ArchError: it cannot; the message says what is missing.
    """
    elsewhere = "Build on a machine that has it, and copy the files: they serve every system"
    if sys.platform != "linux":
        raise ArchError(f"{OPERATION}: this runs on Linux only, and here is {sys.platform}. {elsewhere}.")
    if _ENGINE.version() is None:
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
        "TIKV_ENGINE": _ENGINE.name,
        "TIKV_QUIET": "1",
        **_ENGINE.quiet,
    }


def collect(
    file: pathlib.Path, forms: Sequence[KernelForm], environment: Mapping[str, str], show: Step = lambda now, done: None
) -> Collected:
    """The kernels that forms need, found out in a process of its own.

    Raises:
        ArchError: the process failed.
    """
    folders = os.pathsep.join(path or os.curdir for path in sys.path)
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "tikv.tools.kernels.collect", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": folders, **environment, "TIKV_LAUNCHER": "native"},
        )
        with _ended(child):
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("".join(f"{form.name}\n" for form in forms))
            child.stdin.close()
            for number, line in enumerate(child.stdout):
                show(f"finding kernels: {line.strip()}", _COLLECTING * min(number, len(forms)) // len(forms))
            if child.wait():
                errors.seek(0)
                last = (errors.read().strip().splitlines() or [f"exit status {child.returncode}"])[-1]
                raise ArchError(
                    f"{OPERATION}: the process that finds out which kernels are needed failed: {last}. Run `python -m "
                    "tikv doctor cpu` to see whether the engine works here."
                )
    with open(file, "rb") as stream:
        result: Collected = pickle.load(stream)
    return result


@contextmanager
def _ended(child: subprocess.Popen[str]) -> Iterator[None]:
    """Within it, a child runs; after it, the child has ended."""
    try:
        yield
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _compiled(
    kernels: Sequence[Needed], processes: int, environment: Mapping[str, str], show: Step
) -> tuple[dict[str, str], dict[str, str]]:
    """(PTX by key, reasons by name): all kernels, compiled side by side; and those that could not be."""
    waiting: queue.SimpleQueue[Needed] = queue.SimpleQueue()
    # A child starts Taichi again when the next kernel needs another kind of arithmetic.
    for kernel in sorted(kernels, key=lambda each: (each.fast_math, each.name)):
        waiting.put(kernel)
    answers: queue.SimpleQueue[tuple[Needed, dict[str, str]]] = queue.SimpleQueue()
    workers = [_Worker(waiting, answers, environment) for _ in range(min(processes, len(kernels)))]
    texts: dict[str, str] = {}
    failed: dict[str, str] = {}
    try:
        for worker in workers:
            worker.start()
        for number in range(len(kernels)):
            kernel, answer = answers.get()
            if "ptx" in answer:
                texts[kernel.key] = answer["ptx"]
            else:
                failed[kernel.name] = answer["error"]
            show(
                f"{len(kernels):,} kernels: {kernel.name}", _COLLECTING + (PARTS - _COLLECTING) * number // len(kernels)
            )
    finally:
        for worker in workers:
            worker.end()
    return texts, failed


class _Worker(threading.Thread):
    """A thread that has a compiling process of its own compile what waits in a queue."""

    def __init__(
        self,
        waiting: queue.SimpleQueue[Needed],
        answers: queue.SimpleQueue[tuple[Needed, dict[str, str]]],
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
