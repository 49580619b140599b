"""Compiles kernels in one process per core, into the engine's cache on disk, before this process needs them.

A program of the engine reads the list of that cache when it compiles its first kernel, so this is done only before.
`python -m tikv.tools.warmup.beside` is such a process: it reads a `KernelShare` and writes a line for each kernel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from tikv import launch, runtime
from tikv.launch.cuda import keys
from tikv.launch.pending import ENGINE
from tikv.runtime.cache import BoundedCache

LEAST_CORES = 3  # with two, starting the processes costs what the second core gains: docs/first_minutes.md


class KernelShare(NamedTuple):
    """The kernels that a process compiles, as factories and choices, and the start of its engine."""

    arch: str
    engine: str
    options: dict[str, Any]
    kernels: list[tuple[Callable[..., Any], tuple[Any, ...]]]


def processes_for(live: runtime.Runtime, asked: int | None, wait: bool = True) -> int:
    """How many processes may compile for this runtime, or, without `wait`, besides this one; else 1, or 0."""
    if live.is_cuda:
        usable = live.engine.has_known_ptx and not launch.why_not_native(live)
    else:
        usable = not live.has_compiled and live.program.config().offline_cache
    if not usable or not sys.executable:
        return int(wait)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if not wait:
        return asked or max(1, cores - 1)
    return asked or (cores if cores >= LEAST_CORES else 1)


def kernels_of(calls: Sequence[Callable[[], None]], live: runtime.Runtime) -> list[launch.CompiledKernel]:
    """The kernels that calls need: the calls are made, but launch nothing and compile nothing.

    If a call cannot be made so, a warning says why, and the list is empty.
    """
    try:
        return _recorded(calls, live)
    except Exception as error:
        runtime.log.warning("warmup: kernels are compiled in this process alone (%s: %s)", type(error).__name__, error)
        return []


def _recorded(calls: Sequence[Callable[[], None]], live: runtime.Runtime) -> list[launch.CompiledKernel]:
    tried = live.why_no_subgroups
    with launch.recording(live, BoundedCache()) as launches:
        live.why_no_subgroups = tried or ""  # trying would launch; most drivers have them
        try:
            for call in calls:
                call()
        finally:
            live.why_no_subgroups = tried
        return list(dict.fromkeys(recorded.kernel for recorded in launches))


def compile_beside(
    kernels: Sequence[launch.CompiledKernel],
    live: runtime.Runtime,
    processes: int,
    step: Callable[[str, int], None],
    wait: bool = True,
) -> None:
    """Let processes compile kernels, unless they were compiled in this way before; a failure is said, and costs time.

    Meanwhile this process reads the kernels' sources. Without `wait` it returns at once, and its first compilation
    waits.

    `step` is called with a text and the number of kernels that are done.
    """
    config = live.program.config()
    parts = [keys.made_key_of(kernel.factory, kernel.choices) for kernel in kernels]
    facts = (live.arch, live.engine.name, str(live.engine.version()), sys.version, *sorted(parts))
    folder = pathlib.Path(config.offline_cache_file_path)
    mark = folder / f"tikv-warmed-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}"
    processes = min(processes, len(kernels))
    launch.wait_for(ENGINE)
    if processes <= wait or mark.exists():
        return
    options = {"offline_cache_file_path": str(folder)}
    pairs = [(kernel.factory, kernel.choices) for kernel in kernels]
    try:
        shares = [
            pickle.dumps(KernelShare(live.arch, live.engine.name, options, pairs[i::processes]))
            for i in range(processes)
        ]
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")
        return
    if wait:
        _compile(shares, kernels, mark, step, None)
    else:
        launch.Pending([ENGINE], functools.partial(_compile, shares, kernels, mark, step))


def _compile(
    shares: Sequence[bytes],
    kernels: Sequence[launch.CompiledKernel],
    mark: pathlib.Path,
    step: Callable[[str, int], None],
    pending: launch.Pending | None,
) -> None:
    """`compile_beside` of shares; afterwards there is a file `mark`."""
    try:
        with _running(shares) as (children, lines):
            if pending is not None and not pending.ends_by(functools.partial(_kill, children)):
                return
            for done, kernel in enumerate(kernels, 1):
                if pending is None:
                    kernel.trace()  # meanwhile; what this process then has to do is to load
                title = lines.get()
                if title is None:
                    break
                step(f"{title}, in {len(shares)} processes", done)
            failed = [said for child, said in children if child.wait()]
            reasons = [_last_line(said) for said in failed]
    except Exception as error:
        reasons = [f"{type(error).__name__}: {error}"]
    if pending is not None and pending.ended:
        return
    if reasons:
        _say(reasons[0])
        return
    with contextlib.suppress(OSError):
        mark.touch()


def _say(why: str) -> None:
    runtime.log.warning("warmup: a process that compiles failed (%s); its kernels are compiled here", why)


def _kill(children: Children) -> None:
    for child, _ in children:
        child.kill()


Children = list[tuple["subprocess.Popen[bytes]", IO[bytes]]]


@contextlib.contextmanager
def _running(shares: Sequence[bytes]) -> Iterator[tuple[Children, queue.SimpleQueue[str | None]]]:
    """Within it, processes compile their shares, and a queue gets each title, or None when one ends early."""
    children: Children = []
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    folders = os.pathsep.join(os.path.abspath(path or os.curdir) for path in sys.path)
    try:
        for share in shares:
            said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            child = subprocess.Popen(
                [sys.executable, "-m", "tikv.tools.warmup.beside"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "PYTHONPATH": folders, "TIKV_QUIET": "1"},
            )
            children.append((child, said))
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(share)
            threading.Thread(target=_pass_lines, args=(child, lines), daemon=True).start()
        yield children, lines
    finally:
        for child, said in children:
            if child.poll() is None:
                child.kill()
            child.wait()
            said.close()


def _pass_lines(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    """Pass on what a process writes: titles of kernels, and "end" after them."""
    assert child.stdout is not None
    complete = False
    with child.stdout:
        for line in child.stdout:
            text = line.decode(errors="replace").strip()
            if text == "end":
                complete = True
            else:
                lines.put(text)
    if not complete:
        lines.put(None)


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    return (said.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]


def main() -> None:
    """The process that compiles a share."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the engine writes to stdout, also from C++
    share: KernelShare = pickle.load(sys.stdin.buffer)
    live = runtime.init(share.arch, engine=share.engine, **share.options)
    for factory, choices in share.kernels:
        kernel = launch.CompiledKernel(live, factory, choices)
        kernel.compile()
        print(kernel.title, file=answers)
    print("end", file=answers)


if __name__ == "__main__":
    from tikv.tools.warmup import beside  # not __main__, whose classes have other names

    beside.main()
