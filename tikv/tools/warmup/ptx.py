"""Compiles kernels for CUDA in one process per core, into the folder where the native launcher looks for their PTX.

The processes run over a stand-in for NVIDIA's driver, so they take no memory of the GPU.
"""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Sequence

from tikv import launch, runtime
from tikv.launch.cuda import disk_cache, driver, keys, made
from tikv.tools.kernels import stand_in


def compile_ptx(
    kernels: Sequence[launch.CompiledKernel], live: runtime.Runtime, processes: int, step: Callable[[str, int], None]
) -> None:
    """Let processes write the PTX of kernels that have none on disk yet; a failure is said, and costs time.

    `step` is called with a text and the number of kernels that are done.
    """
    try:
        target = driver.device(live.index).target
        needed = [each for kernel in kernels if (each := _needed(kernel, target))]
        done = len(kernels) - len(needed)
        processes = min(processes, len(needed))
        if processes < 2:
            return
        stand_in.require_tools()
        reasons = []
        with tempfile.TemporaryDirectory(prefix="tikv-warmup-") as folder:
            stand_in.build_driver(pathlib.Path(folder))
            major, minor = divmod(int(target.removeprefix("sm_")), 10)
            environment = stand_in.environment_of(pathlib.Path(folder), (major, minor))
            step(f"starting {processes} processes", done)
            with contextlib.closing(stand_in.compiled(needed, processes, environment)) as answers:
                for number, (kernel, answer) in enumerate(answers, done + 1):
                    if "ptx" in answer:
                        disk_cache.write(kernel.key, answer["ptx"])
                    else:
                        reasons.append(f"{kernel.name}: {answer['error']}")
                    step(f"{kernel.name}, in {processes} processes", number)
    except Exception as error:
        reasons = [f"{type(error).__name__}: {error}"]
    if reasons:
        runtime.log.warning(
            "warmup: %d kernels are compiled one after the other instead of side by side (%s)",
            len(reasons),
            reasons[0],
        )


def _needed(kernel: launch.CompiledKernel, target: str) -> stand_in.Needed | None:
    """What a process needs to compile a kernel; None if its PTX is on disk."""
    key = keys.key_of(kernel.factory, kernel.choices, target)
    if disk_cache.read(key) or made.read(keys.made_key_of(kernel.factory, kernel.choices), target):
        return None
    request = pickle.dumps((kernel.factory, kernel.choices))
    return stand_in.Needed(key, kernel.title, kernel.fast_math, request)
