"""Compiles kernels for CUDA in one process per core, into the folder where the native launcher looks for their PTX.

The processes run over a stand-in for NVIDIA's driver, so they take no memory of the GPU.
"""

from __future__ import annotations

import functools
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Sequence

from tikv import launch, runtime
from tikv.launch.cuda import disk_cache, driver, keys, made
from tikv.tools.kernels import stand_in


def compile_ptx(
    kernels: Sequence[launch.CompiledKernel],
    live: runtime.Runtime,
    processes: int,
    step: Callable[[str, int], None],
    wait: bool = True,
) -> None:
    """Let processes write the PTX of kernels that have none on disk yet; a failure is said, and costs time.

    `step` is called with a text and the number of kernels that are done. Without `wait`, this returns at once, and
    calls wait for their kernels.
    """
    try:
        target = driver.device(live.index).target
        needed = [each for kernel in kernels if (each := _needed(kernel, target))]
    except Exception as error:
        _say(error)
        return
    if min(processes, len(needed)) > wait:
        done = len(kernels) - len(needed)
        work = functools.partial(_compile, needed, processes, target, functools.partial(_step, step, done))
        if wait:
            work(None)
        else:
            launch.Pending([each.key for each in needed], work)


def _step(step: Callable[[str, int], None], done: int, now: str, number: int) -> None:
    step(now, done + number)


def _compile(
    needed: Sequence[stand_in.Needed],
    processes: int,
    target: str,
    step: Callable[[str, int], None],
    pending: launch.Pending | None,
) -> None:
    """`compile_ptx` of kernels that have no PTX."""
    failed: list[str] = []
    processes = min(processes, len(needed))
    try:
        stand_in.require_tools()
        with tempfile.TemporaryDirectory(prefix="tikv-warmup-") as folder:
            stand_in.build_driver(pathlib.Path(folder))
            environment = stand_in.environment_of(pathlib.Path(folder), divmod(int(target.removeprefix("sm_")), 10))
            step(f"starting {processes} processes", 0)
            with stand_in.SideBySide(needed, processes, environment) as answers:
                if pending is not None and not pending.ends_by(answers.end):
                    return
                for number, (kernel, answer) in enumerate(answers, 1):
                    if "ptx" in answer:
                        disk_cache.write(kernel.key, answer["ptx"])
                    else:
                        failed.append(f"{kernel.name}: {answer['error']}")
                    if pending is not None:
                        pending.done(kernel.key)
                    step(f"{kernel.name}, in {processes} processes", number)
    except Exception as error:
        _say(error)
        return
    if failed and not (pending is not None and pending.ended):
        _say(f"{len(failed)} of {len(needed)}, {failed[0]}")


def _say(why: object) -> None:
    kind = f"{type(why).__name__}: " if isinstance(why, Exception) else ""
    runtime.log.warning("warmup: kernels are compiled one after the other instead of side by side (%s%s)", kind, why)


def _needed(kernel: launch.CompiledKernel, target: str) -> stand_in.Needed | None:
    """What a process needs to compile a kernel; None if its PTX is on disk."""
    key = keys.key_of(kernel.factory, kernel.choices, target)
    launch.wait_for(key)
    if disk_cache.read(key) or made.read(keys.made_key_of(kernel.factory, kernel.choices), target):
        return None
    request = pickle.dumps((kernel.factory, kernel.choices))
    return stand_in.Needed(key, kernel.title, kernel.fast_math, request)
