"""The child process of `tikv.launch.cuda.compiler`: it runs Taichi only to get the PTX that Taichi writes."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import pickle
import select
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any

from tikv import runtime
from tikv.arrays import Memory
from tikv.dtypes import int8
from tikv.errors import ArchError
from tikv.launch.bound import FreshBound
from tikv.launch.compilation import CompiledKernel, Factory
from tikv.launch.cuda.compiler import receive, send

IDLE_SECONDS = 60  # a child holds a CUDA context, some hundreds of megabytes of the GPU


def serve_compiler() -> None:
    """Run the compiling process of `tikv.launch.cuda.compiler`."""
    serve(_launch_over_nothing)


def _launch_over_nothing(factory: Factory, choices: tuple[Any, ...]) -> None:
    """Launch a kernel once, so that Taichi generates its code; the loop's extent and all numbers are zero.

    A loop with constant bounds runs all the same, so arrays get memory that may be written.
    """
    live = runtime.current()
    kernel = CompiledKernel(live, factory, choices)
    kernel.compile()
    memory = Memory(1 << 20, live)
    memory.clear()
    array = memory.array((memory.nbytes,), int8)
    arguments = [array if w else (0,) * n if n else 0 for w, n in zip(kernel.words, kernel.lengths, strict=True)]
    with live.compiling(kernel.fast_math):
        FreshBound(kernel, 0, tuple(arguments)).launch()
        live.synchronize()


def serve(launch: Callable[[Callable[..., Any], tuple[Any, ...]], None]) -> None:
    """The child: compile on request, until stdin ends or no request has come for a minute.

    `launch` makes a kernel from a factory and its choices and launches it over empty arrays. After a failure the child
    ends, since its CUDA context may be unusable.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Taichi writes to stdout, also from C++
    requests = sys.stdin.buffer
    with tempfile.TemporaryDirectory(prefix="tikv-compile-") as directory:
        os.chdir(directory)
        try:
            failed = False
            while not failed and _readable(requests):
                request = receive(requests)
                if request is None:
                    break
                try:
                    answer = {"ptx": _generated(launch, *pickle.loads(request))}
                except Exception as error:
                    answer, failed = {"error": f"{type(error).__name__}: {error}"}, True
                send(answers, json.dumps(answer).encode())
        finally:
            os.chdir(os.path.dirname(directory))


_started_for: bool | None = None  # the `fast_math` that the child's Taichi was started with


def _readable(pipe: IO[bytes]) -> bool:
    if sys.platform == "win32":  # select takes sockets only
        return True
    return bool(select.select([pipe], [], [], IDLE_SECONDS)[0])


def _generated(
    launch: Callable[[Callable[..., Any], tuple[Any, ...]], None], factory: Callable[..., Any], choices: tuple[Any, ...]
) -> str:
    """The PTX that Taichi writes when it first launches a kernel.

    For a kernel that differs from an earlier one only in its choices, Taichi writes PTX only after a new start.
    """
    global _started_for
    fast_math = bool(getattr(factory, "fast_math", False))  # also read once when Taichi's CUDA session starts
    for start in (fast_math != _started_for, True):
        if start:
            runtime.init("cuda", offline_cache=False, print_kernel_asm=True, fast_math=fast_math)
            _started_for = fast_math
        for file in glob.glob("*.ptx"):
            os.unlink(file)
        launch(factory, choices)
        written = [pathlib.Path(path) for path in glob.glob("*.ptx")]
        if len(written) == 1:
            return written[0].read_text(encoding="utf-8", errors="replace")
    raise ArchError(f"Taichi wrote {len(written)} PTX files for one kernel")
