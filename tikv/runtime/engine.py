"""The engine of this process, which compiles and runs the kernels: only this module chooses, imports and starts it.

Everything that this needs beyond an engine's public names is here, and what differs between engines is in
`tikv.engines`. Other modules take `ti` from `tikv.runtime`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tikv import engines, forks
from tikv.engines import Engine
from tikv.errors import ArchError, OptionError
from tikv.runtime import cache_lock, tracing
from tikv.runtime.devices import SPIRV_ARCHS
from tikv.runtime.dropped import Array
from tikv.runtime.real_functions import RealFunctions

_lock = threading.RLock()
_module: Any = None  # the engine, once it is imported
_engine: Engine = next(iter(engines.ALL.values()))  # which engine it is; meaningless until then
_why = ""
_program_at_load: Any = None
_kept_ndarray: Any = None
_ndarrays: weakref.WeakSet[Any] = weakref.WeakSet()  # all that were made since, in any program
_LEVELS = ("trace", "debug", "info", "warn", "error", "critical")  # levels of an engine's log
before_end: list[Callable[[Any], None]] = []  # these are called with a program that is about to end


def selection(asked: str = "auto") -> tuple[Engine, str]:
    """(engine, why): the engine in use, else the one asked for, the one that TIKV_ENGINE names, or the best one.

    Raises:
        OptionError: there is no such engine.
        ArchError: another engine is in use.
    """
    by_environment = os.environ.get("TIKV_ENGINE") or "auto"
    for name, where in ((asked, f"init: engine={asked!r}"), (by_environment, f"runtime: TIKV_ENGINE={by_environment}")):
        if name != "auto" and name not in engines.ALL:
            raise OptionError(f"{where} is not an engine. Use auto, {' or '.join(engines.ALL)}.")
    if _module is not None:
        if asked not in ("auto", _engine.name):
            other = engines.ALL[asked]
            raise ArchError(
                f"init: this process uses {_engine.title} ({_why}), and a process has one engine. Choose "
                f"{other.title} in another process, before its first operation: tikv.init(engine={asked!r}), or "
                f"TIKV_ENGINE={asked}."
            )
        return _engine, _why
    if asked != "auto":
        return engines.ALL[asked], "asked for"
    if by_environment != "auto":
        return engines.ALL[by_environment], "TIKV_ENGINE names it"
    return engines.selected_by_itself()


def load(asked: str = "auto") -> Any:
    """Import the engine once: no banner, no version check on the network, and each ndarray stamped with its program.

    Raises:
        ArchError: it is missing, or too old or too new; or another engine is in use.
        OptionError: no such engine.
    """
    if _module is None or asked != "auto":
        with _lock:
            engine, why = selection(asked)
            if _module is None:
                _import(engine, why)
    return _module


def _import(engine: Engine, why: str) -> None:
    global _module, _engine, _why, _program_at_load, _kept_ndarray
    for name, value in engine.quiet.items():
        os.environ.setdefault(name, value)
    version = engine.version()
    if version is not None and (refused := engine.why_refused(version)):
        raise ArchError(f"runtime: {refused}. {engine.remedy}")
    try:
        with _quiet_compilation(engine):
            module = _import_silently(engine.name)
            for part in ("lang.impl", "lang.ast.ast_transformer_utils", "lang._ndarray"):
                importlib.import_module(f"{engine.name}.{part}")
    except ImportError as error:
        raise ArchError(f"runtime: {engine.title} cannot be imported ({error}). {engine.remedy}") from error
    _engine, _why = engine, why
    _program_at_load = engine.program
    tracing.watch_decorators(engine)
    ndarrays = engine.part("lang._ndarray")
    _stamp_ndarrays(ndarrays.Ndarray)
    _free_ndarrays_in_time(engine, ndarrays.ScalarNdarray)
    # A finalizer may run anywhere, even in the middle of the engine's work, so it only notes the array.
    tell = {"__del__": lambda self: self._tikv_dropped()}
    _kept_ndarray = type("KeptNdarray", (ndarrays.ScalarNdarray,), tell)
    _module = module
    atexit.register(_wait_at_exit)  # the program is freed after that, with the last Python objects


def _import_silently(name: str) -> Any:
    """Import an engine without its unimportant messages, such as the red one in notebooks about where it prints.

    Its native part, which has the switch, is loaded first. Importing that would run the package's first line, so for
    that moment the package is registered without having been executed.
    """
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None or spec.loader is None:
        return importlib.import_module(name)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        core = importlib.import_module(f"{name}._lib").core
        core.set_logging_level("warn")
        spec.loader.exec_module(module)
        core.set_logging_level("info")
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def engine_in_use() -> Engine:
    """The engine of this process; it is imported if necessary."""
    load()
    return _engine


def engine_report() -> dict[str, Any]:
    """Which engine is in use, or would be, its version, and why; or what is wrong with it. Imports nothing."""
    try:
        engine, why = selection()
    except OptionError as error:
        return {"engine": "none", "title": "the engine", "version": None, "why": str(error)}
    name, version = engine.name, engine.version()
    if _module is None and not engine.is_imported:
        refused = f"{engine.title} is not installed" if version is None else engine.why_refused(version)
        if refused is not None:
            name, why = "none", f"{refused}. {engine.remedy}"
    return {"engine": name, "title": engine.title, "version": version, "why": why}


def shares_mps() -> bool:
    """Whether the engine that is or would be in use lets PyTorch see its memory on MPS. Imports nothing."""
    try:
        return selection()[0].mps_arch is not None
    except OptionError:  # of TIKV_ENGINE: the first operation says so
        return False


@contextlib.contextmanager
def _quiet_compilation(engine: Engine) -> Iterator[None]:
    """Hide Python's warnings about an engine's sources, which it compiles now if they were installed without byte code.

    A compiler warning has the file's path as its module; a warning of running code has the module's name.
    """
    if engine.is_imported:
        yield
        return
    with warnings.catch_warnings():
        for category in (SyntaxWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, module=rf"(.*[/\\])?{engine.name}([./\\]|$)")
        yield
    # The engine adds this filter at import, and the context has just removed it.
    warnings.filterwarnings("once", category=DeprecationWarning, module=engine.name)


def _stamp_ndarrays(ndarray_class: Any) -> None:
    """Let every `ti.ndarray` remember its program: otherwise a stale one is a dangling pointer that looks valid."""
    original = ndarray_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tikv_program = _engine.program
        _ndarrays.add(self)

    ndarray_class.__init__ = __init__


def _free_ndarrays_in_time(engine: Engine, ndarray_class: Any) -> None:
    """Let a program free its ndarrays when it ends, and let each be freed only by its own program.

    An engine would free the rest when Python frees the program, at any later time: by address, which another program's
    array may have by then.
    """
    settings_class, at_load = type(engine.settings), engine.program
    clear, delete = settings_class.clear, ndarray_class.__del__

    def clear_all(self: Any) -> None:
        program = engine.program_of(self)
        for array in list(_ndarrays) if program is not None else ():
            if array._tikv_program is program and array.arr is not None:
                program.delete_ndarray(array.arr)
        for tell in before_end if program is not None else ():
            tell(program)
        if program is not None:  # new kernels are about to be written to the cache
            _wait_for_cache(program.config().offline_cache_file_path)
        clear(self)

    def delete_own(self: Any) -> None:
        # Not `is_stale_ndarray`: at the end of Python a module's own names are gone.
        if getattr(self, "_tikv_program", at_load) is engine.program:
            delete(self)

    settings_class.clear, ndarray_class.__del__ = clear_all, delete_own


def new_words(count: int, dropped: Callable[[Array], None] | None = None) -> Any:
    """A `ti.ndarray` of so many 32-bit words. If `dropped` is given, it is called instead of freeing."""
    ti = load()
    # The traceback takes longer the deeper the stack is.
    with _replaced([(_engine.part("lang._ndarray"), "get_traceback", str)]), _errors_not_printed():
        made = ti.ndarray(getattr(ti, _engine.word), (count,))
    if dropped is not None:
        made._tikv_dropped = functools.partial(dropped, Array(made.arr, 4 * count))
        made.__class__ = _kept_ndarray
    return made


@contextlib.contextmanager
def _errors_not_printed() -> Iterator[None]:
    """Suppress the engine's output of an error, which it prints before it raises it."""
    core = _engine.core
    level = next((level for level in _LEVELS if core.logging_effective(level)), _LEVELS[-1])
    core.set_logging_level(_LEVELS[-1])
    try:
        yield
    finally:
        core.set_logging_level(level)


def is_stale_ndarray(array: Any) -> bool:
    """Whether a `ti.ndarray` belongs to a program that no longer runs."""
    made_in = getattr(array, "_tikv_program", _program_at_load)
    return made_in is None or _engine.program_of(_engine.settings) is not made_in


def is_imported() -> bool:
    """Whether the engine that this process uses, or would use, has been imported by any code."""
    if _module is not None:
        return True
    try:
        return selection()[0].is_imported
    except OptionError:  # of TIKV_ENGINE: the first operation says so
        return False


def before_fork() -> None:
    """Wait until no other thread is importing the engine, so that a forked process has all of it or nothing."""
    _lock.acquire()


def after_fork() -> None:
    """Undo `before_fork`, in parent and child."""
    _lock.release()


def is_left_behind() -> bool:
    """Whether this process was forked from one in which the engine ran, and has not started one since."""
    program = front().prog
    return program is not None and any(program is inherited for inherited in forks.left_behind)


def front() -> Any:
    """An object whose `prog` is the running program, or None before the start and after the end.

    Each start makes a new object.
    """
    return engine_in_use().front


def start(arch: str, options: Mapping[str, Any]) -> None:
    """Start a program on this arch and no other, quietly; whatever ran before ends.

    Raises:
        RuntimeError: it cannot start. If the machine has no such device, what ran before continues.
    """
    ti = load()
    if not _engine.part("lang.misc").is_arch_supported(getattr(ti, arch)):  # the engine asks after it has ended the old
        raise RuntimeError("it finds no such device")
    defaults = {**_engine.start_options(arch), "log_level": ti.WARN}
    folder = os.environ.get(_engine.cache_variable) or options.get("offline_cache_file_path")
    _wait_for_cache(folder or _engine.part("lang.impl").default_cfg().offline_cache_file_path)
    with contextlib.redirect_stdout(io.StringIO()), _floating_point_kept():
        ti.init(arch=getattr(ti, arch), **{**defaults, **options, "enable_fallback": False})
    _engine.settings.materialize()  # otherwise this thread must compile the first kernel


def _wait_for_cache(folder: str) -> None:
    """Before the engine reads or writes its cache on disk, make sure that no dead process has its lock."""
    cache_lock.wait_for(Path(folder) / _engine.cache_lock)


def _wait_at_exit() -> None:
    if not is_left_behind() and (program := _engine.program) is not None:
        _wait_for_cache(program.config().offline_cache_file_path)


@contextlib.contextmanager
def _floating_point_kept() -> Iterator[None]:
    """Restore this thread's floating-point settings: on x86 the engine's start makes it flush subnormals to zero."""
    library, settings = ctypes.CDLL("ucrtbase" if os.name == "nt" else None), ctypes.create_string_buffer(512)
    library.fegetenv(settings)
    try:
        yield
    finally:
        library.fesetenv(settings)


def require_arch(arch: str, asked: str) -> None:
    """Refuse an arch that the engine of this process, or the one that it would get, lacks. Imports nothing.

    Raises:
        ArchError: the engine lacks it, and the message says which has it; or a different engine is in use.
        OptionError: there is no such engine.
    """
    engine, _ = selection(asked)
    if arch not in engine.archs:
        (other,) = [other for other in engine.others if arch in other.archs]
        raise ArchError(
            f"init: {engine.title} has no arch {arch}, but {other.title} has. "
            f"Use engine={other.name!r} in another process. {other.remedy}"
        )


def known_options() -> set[str]:
    """The options of `start` other than the arch."""
    special = load().lang.misc._SpecialConfig()
    config = _engine.part("lang.impl").default_cfg()
    of_program = {n for n in dir(config) if not n.startswith("_")} - {"arch", "default_up"}
    return {"default_fp", "default_ip", "require_version", *vars(special), *of_program}


def arch_of(program: Any) -> str:
    """The arch that a program runs on; "cpu" for every processor."""
    name = _engine.arch_name(program.config().arch)
    return {"x64": "cpu", "arm64": "cpu"}.get(name, name)


def _next_real_function(settings: Any, program: Any) -> Callable[[Any, Any], Any]:
    """The function that replaces the engine's `Program.create_function` while a kernel is compiled."""
    functions = settings.__dict__.get("_tikv_real_functions")
    if functions is None:
        functions = RealFunctions(type(program).create_function, _engine.core.FunctionKey, _engine.address_of)
        settings._tikv_real_functions = functions
    functions.begin_kernel(program)
    return lambda program, key: functions.take(program, key)


def own_kernels() -> None:
    """Remove this library's kernels from the engine's list, which keeps all kernels for later programs."""
    kernels = _engine.settings.kernels
    for kernel in [kernel for kernel in kernels if kernel.func.__module__.startswith("tikv.")]:
        kernels.remove(kernel)


@contextlib.contextmanager
def compiling(program: Any, fast_math: bool) -> Iterator[None]:
    """Compile with this library's settings, whatever the caller chose, and then restore the caller's.

    The caller's settings (`fast_math`, `default_fp`, `debug` ...) must not change a single bit of a copy.
    """
    settings, config, arch = _engine.settings, program.config(), arch_of(program)
    of_config = {"fast_math": fast_math, "debug": False, "check_out_of_bound": False}
    if arch in (*SPIRV_ARCHS, "cpu"):
        # The engine's own optimizations take a third to a half of a kernel's compilation time, and LLVM and drivers do
        # the same work anyway: kernels are as fast without them.
        of_config["advanced_optimization"] = False
    if arch in SPIRV_ARCHS:
        of_config["cfg_optimization"] = False
    of_settings = {
        "default_fp": _module.f32,
        "default_ip": _module.i32,
        "default_up": _module.u32,
        "short_circuit_operators": True,
        "unrolling_limit": 0,
    }
    changes: list[tuple[Any, str, Any]] = [(config, name, value) for name, value in of_config.items()]
    changes += [(settings, name, value) for name, value in of_settings.items() if hasattr(settings, name)]
    if arch == "cpu":
        changes.append((type(program), "create_function", _next_real_function(settings, program)))
    changes += tracing.changes(_engine)
    with _replaced(changes):
        yield


@contextlib.contextmanager
def _replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Temporarily replace attributes of the engine: each change is (where, name, value)."""
    saved = [(where, name, getattr(where, name)) for where, name, _ in changes]
    try:
        for where, name, value in changes:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in saved:
            setattr(where, name, value)
