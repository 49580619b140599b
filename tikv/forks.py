"""What a forked process has to know of its parent: it inherits Taichi, and none of the threads that Taichi waits for.

`import tikv` loads this module alone, so that a fork before the first operation is seen too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

left_behind: Any = None  # the program that ran when this process was forked; None in a process that may run it
in_child: list[Callable[[], None]] = []  # what else is to be done in a new process, when `left_behind` is known


def never_free(objects: Iterable[Any]) -> None:
    """Keep Taichi's programs for ever: to free one waits for its threads, and without them no process would end."""
    import ctypes

    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _keep_ndarrays(module: Any, runtime: Callable[[], Any]) -> None:
    """Leave the memory of ndarrays to the parent: CUDA's driver, asked here to free it, ends the process."""
    delete = module.ScalarNdarray.__del__

    def delete_own(array: Any, kept: Any = left_behind) -> None:
        if runtime().prog is not kept:
            delete(array)

    module.ScalarNdarray.__del__ = delete_own


def _after_fork() -> None:
    global left_behind
    taichi: Any = sys.modules.get("taichi.lang.impl")
    program = taichi.get_runtime().prog if hasattr(taichi, "get_runtime") else None
    if program is not None:
        left_behind = program
        never_free([program])
        _keep_ndarrays(sys.modules["taichi.lang._ndarray"], taichi.get_runtime)
    for act in in_child:
        act()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
