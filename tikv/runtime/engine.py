"""The engine that compiles and runs the kernels, which is Taichi. This module alone imports and starts it.

Whatever it takes to do so beyond Taichi's public names stands here too. Others take `ti` from `tikv.runtime`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tikv import forks
from tikv.errors import ArchError
from tikv.runtime.devices import SPIRV_ARCHS
from tikv.runtime.dropped import Array
from tikv.runtime.real_functions import RealFunctions

_lock = threading.RLock()
_taichi: Any = None
_impl: Any = None
_kernel_impl: Any = None
_node_context: Any = None
_program_at_load: Any = None
_kept_ndarray: Any = None


def load() -> Any:
    """Import Taichi once: no banner, no version check on the network, and each ndarray stamped with its program."""
    global _taichi, _impl, _kernel_impl, _node_context, _program_at_load, _kept_ndarray
    if _taichi is None:
        with _lock:
            if _taichi is None:
                os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")
                os.environ.setdefault("TI_SKIP_VERSION_CHECK", "ON")
                try:
                    with _quiet_compilation():
                        taichi = importlib.import_module("taichi")
                except ImportError as error:
                    raise ArchError(
                        f"runtime: Taichi cannot be imported ({error}). "
                        f"Install taichi>=1.7.4,<1.8 on CPython 3.10-3.13."
                    ) from error
                _impl = importlib.import_module("taichi.lang.impl")
                _kernel_impl = importlib.import_module("taichi.lang.kernel_impl")
                _node_context = importlib.import_module("taichi.lang.ast.ast_transformer_utils").ASTTransformerContext
                _program_at_load = _impl.get_runtime().prog
                ndarrays = importlib.import_module("taichi.lang._ndarray")
                _stamp_ndarrays(ndarrays.Ndarray)
                # A finalizer may run anywhere, in the middle of Taichi's work too: so it only tells.
                tell = {"__del__": lambda self: self._tikv_dropped()}
                _kept_ndarray = type("KeptNdarray", (ndarrays.ScalarNdarray,), tell)
                _taichi = taichi
    return _taichi


@contextlib.contextmanager
def _quiet_compilation() -> Iterator[None]:
    """Hide what Python says of Taichi's sources, which it compiles here when they were installed without byte code.

    A warning of the compiler carries the file's path as its module, one of running code the module's name.
    """
    if "taichi" in sys.modules:
        yield
        return
    with warnings.catch_warnings():
        for category in (SyntaxWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=r"(.*[/\\])?taichi([./\\]|$)")
        yield
    # Taichi adds this one when it is imported, and it ended with the context.
    warnings.filterwarnings("once", category=DeprecationWarning, module="taichi")


def _stamp_ndarrays(ndarray_class: Any) -> None:
    """Let every `ti.ndarray` remember its program: a stale one is otherwise a dangling pointer nobody can recognise."""
    original = ndarray_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tikv_program = _impl.get_runtime().prog

    ndarray_class.__init__ = __init__


def new_words(count: int, dropped: Callable[[Array], None] | None = None) -> Any:
    """A `ti.ndarray` of so many 32-bit words. With `dropped` that is called when it goes, and Taichi frees nothing."""
    taichi = load()
    made = taichi.ndarray(taichi.u32, (count,))
    if dropped is not None:
        made._tikv_dropped = functools.partial(dropped, Array(made.arr, 4 * count))
        made.__class__ = _kept_ndarray
    return made


def is_stale_ndarray(array: Any) -> bool:
    """Whether a `ti.ndarray` belongs to a program that no longer runs."""
    made_in = getattr(array, "_tikv_program", _program_at_load)
    return made_in is None or _impl.get_runtime().prog is not made_in


def is_imported() -> bool:
    """Whether anybody has imported Taichi."""
    return _taichi is not None or "taichi" in sys.modules


def before_fork() -> None:
    """Wait until no other thread imports Taichi, so that a forked process has all of it or nothing."""
    _lock.acquire()


def after_fork() -> None:
    """Undo `before_fork`, in parent and child."""
    _lock.release()


def is_left_behind() -> bool:
    """Whether this process was forked from one in which Taichi ran, and none was started since."""
    return forks.left_behind is not None and front().prog is forks.left_behind


def front() -> Any:
    """Taichi's own runtime in Python. Its `prog` is the program that runs, and None before the start and after the end.

    Every start makes another one.
    """
    load()
    return _impl.get_runtime()


def start(arch: str, options: Mapping[str, Any]) -> None:
    """Start a program on this arch and no other, quietly; whatever ran before ends."""
    taichi = load()
    # Taichi's CUDA session fixes at its start whether a product and a sum may become one rounding. Ours may not.
    exact = {"fast_math": False} if arch == "cuda" else {}
    with contextlib.redirect_stdout(io.StringIO()):
        taichi.init(
            arch=getattr(taichi, arch), **(exact | {"log_level": taichi.WARN, **options, "enable_fallback": False})
        )
    _impl.get_runtime().materialize()  # else the first kernel must be compiled by this thread


def known_options() -> set[str]:
    """What `start` takes beside the arch."""
    special = load().lang.misc._SpecialConfig()
    of_program = {n for n in dir(_impl.default_cfg()) if not n.startswith("_")} - {"arch", "default_up"}
    return {"default_fp", "default_ip", "require_version", *vars(special), *of_program}


def arch_of(program: Any) -> str:
    """The arch a program runs on, "cpu" whatever the processor."""
    name: str = _taichi.lang.misc._ti_core.arch_name(program.config().arch)
    return {"x64": "cpu", "arm64": "cpu"}.get(name, name)


def _next_real_function(front: Any, program: Any) -> Callable[[Any, Any], Any]:
    """What takes the place of Taichi's `Program.create_function` while a kernel is compiled."""
    functions = front.__dict__.get("_tikv_real_functions")
    if functions is None:
        functions = RealFunctions(type(program).create_function, _taichi.lang.misc._ti_core.FunctionKey)
        front._tikv_real_functions = functions
    functions.begin_kernel(program)
    return lambda program, key: functions.take(program, key)


def own_kernels(front: Any) -> None:
    """Take this library's kernels out of Taichi's list, which keeps all of them for the programs to come."""
    for kernel in [kernel for kernel in front.kernels if kernel.func.__module__.startswith("tikv.")]:
        front.kernels.remove(kernel)


_sources: dict[tuple[Callable[[Any], Any], str, int, str], Any] = {}


def _once(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read(function)` of the source, once for all functions that were made of the same lines."""

    def read_once(function: Any) -> Any:
        code = function.__code__
        key = read, code.co_filename, code.co_firstlineno, code.co_name
        if key not in _sources:
            _sources[key] = read(function)
        return _sources[key]

    return read_once


def _line_of(context: Any, node: Any) -> str:
    return f'File "{context.file}", line {node.lineno + context.lineno_offset}, in {context.func.func.__name__}:\n'


@contextlib.contextmanager
def compiling(program: Any, fast_math: bool) -> Iterator[None]:
    """Compile under this library's settings whatever the caller chose, and put the caller's back.

    The choices of the caller (`fast_math`, `default_fp`, `debug` ...) must not change one bit of a copy.
    """
    front, config = _impl.get_runtime(), program.config()
    of_config = {"fast_math": fast_math, "debug": False, "check_out_of_bound": False}
    if arch_of(program) in SPIRV_ARCHS:
        # Forwarding stores to loads is half of a kernel's compilation, and drivers do it for whatever they are given.
        of_config["cfg_optimization"] = False
    of_front = {
        "default_fp": _taichi.f32,
        "default_ip": _taichi.i32,
        "default_up": _taichi.u32,
        "short_circuit_operators": True,
        "unrolling_limit": 0,
    }
    wanted: list[tuple[Any, str, Any]] = [(config, name, value) for name, value in of_config.items()]
    wanted += [(front, name, value) for name, value in of_front.items() if hasattr(front, name)]
    if arch_of(program) == "cpu":
        wanted.append((type(program), "create_function", _next_real_function(front, program)))
    # Taichi draws the source line under each expression, for messages of errors that our kernels do not have.
    wanted += [(_node_context, "get_pos_info", _line_of)]
    # And it reads the source of a function again each time that one is called in a kernel: a quarter of what it does.
    wanted += [(_kernel_impl, name, _once(getattr(_kernel_impl, name))) for name in ("getsourcelines", "getsourcefile")]
    saved = [(where, name, getattr(where, name)) for where, name, _ in wanted]
    try:
        for where, name, value in wanted:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in saved:
            setattr(where, name, value)
