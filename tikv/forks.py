"""What a forked process must know about its parent: it inherits an engine, but not the threads that the engine needs.

`import tikv` loads this module at once, so that a fork before the first operation is seen too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from tikv import engines
from tikv.engines import Engine

left_behind: tuple[Any, ...] = ()  # programs that were running at the fork, and may not run here
in_child: list[Callable[[], None]] = []  # what a new process also calls, once `left_behind` is known


def never_free(objects: Iterable[Any]) -> None:
    """Keep the engines' programs for good: freeing one waits for its threads, which are missing, so it would hang."""
    import ctypes

    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _keep_ndarrays(engine: Engine, program: Any) -> None:
    """Leave the memory of ndarrays to the parent: CUDA's driver, asked here to free it, ends the process."""
    kind = engine.part("lang._ndarray").ScalarNdarray
    delete, settings, program_of = kind.__del__, engine.part("lang.impl").get_runtime, engine.program_of

    def delete_own(array: Any) -> None:
        if program_of(settings()) is not program:
            delete(array)

    kind.__del__ = delete_own


def _after_fork() -> None:
    global left_behind
    left_behind = ()
    for engine in engines.ALL.values():
        program = engine.program
        if program is not None:
            left_behind += (program,)
            never_free([program])
            _keep_ndarrays(engine, program)
    for act in in_child:
        act()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
