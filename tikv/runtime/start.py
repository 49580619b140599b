"""The live runtime: starts it, attaches to the one that the caller started, and detects that it has ended."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from tikv import engines, forks
from tikv.errors import ArchError, OptionError, StaleRuntimeError
from tikv.runtime import devices, engine
from tikv.runtime.cache import BoundedCache
from tikv.runtime.copying import NotCopied
from tikv.runtime.devices import ARCHS, NEVER_RUN, SPIRV_ARCHS
from tikv.runtime.dropped import Dropped

log = logging.getLogger("tikv")

_lock = threading.RLock()
_epochs = itertools.count(1)
_current: Runtime | None = None
_made: weakref.WeakSet[Runtime] = weakref.WeakSet()  # those that are still referenced
before_synchronize: list[Callable[[], None]] = []  # waits for launchers other than the engine's


class _ThreadPlans(threading.local):
    """The bound one-shot calls of a thread that records for a graph, see `launch.recording`."""

    plans: BoundedCache[Any, Any] | None = None


thread_plans = _ThreadPlans()


class _NoFront:
    """Replaces the engine's own runtime in objects that were made before this process was forked."""

    prog = None


_FORKED = _NoFront()


def _why_forked() -> str:
    name = engine.engine_in_use().title
    return (
        f"this process was forked after {name} had started, and {name}'s threads exist in the parent process "
        "alone. Start processes with multiprocessing.get_context('spawn'), or fork before the first operation. "
        "Share data as NumPy copies (copy_to_host()) made before the fork."
    )


class Turns:
    """Orders launches with another library that works on the same memory; this base class does nothing."""

    def __enter__(self) -> None:
        """Let the other library's earlier work come before what follows."""

    def __exit__(self, *_: object) -> None:
        """Let what was launched come before the other library's next work."""

    def settle(self) -> None:
        """Wait until the other library has done all its work."""


class Runtime(NotCopied):
    """One live program of the engine: its arch, its epoch (counted from 1) and what a launch needs from it.

    On CUDA each GPU has its own runtime, all for one program: the engine uses the first GPU; on the others, torch makes
    the memory and the driver launches the kernels.
    """

    def __init__(self, front: Any, first: Runtime | None = None, index: int = 0) -> None:
        self.front = front  # the engine's own runtime, which drops the program when it ends
        self.program = program = front.prog
        self.epoch: int = next(_epochs) if first is None else first.epoch
        self.arch = engine.arch_of(program)
        self.engine = engine.engine_in_use()
        if self.arch not in ARCHS:
            ti = self.engine.alias
            raise ArchError(
                f"runtime: {self.engine.title} runs on arch {self.arch!r}; this library knows {', '.join(ARCHS)}. "
                f"Call {ti}.init(arch={ti}.cpu)."
            )
        config = program.config()
        self.why_arch = f"{self.engine.title} ran already"
        self.debug = bool(config.debug)
        self.invariant: bool = first is not None and first.invariant  # see `init`, as for the next
        self.attention_bits: int = 16 if first is None else first.attention_bits
        self.is_cpu = self.arch == "cpu"
        self.is_cuda = self.arch == "cuda"
        self.index = index  # the GPU's number, 0 on other archs
        self.device = f"cuda:{index}" if self.is_cuda else self.arch  # where its memory lies
        self.num_gpus = devices.num_gpus() if self.is_cuda else 1
        self._first = first
        self._others: dict[int, Runtime] = {}  # in the first runtime: those of the other GPUs
        self.threads = int(config.cpu_max_num_threads)  # the threads that the CPU back end may use
        # An AMD GPU gets the same kernels and memory as these, which are not specific to a vendor.
        self.is_spirv = self.arch in (*SPIRV_ARCHS, "amdgpu")
        self.has_float64 = not self.is_spirv
        # Empty: kernels use subgroups. None: not tried yet, see `launch`.
        self.why_no_subgroups: str | None = None if self.is_spirv else f"kernels on {self.arch} have no use for them"
        self.kernels: BoundedCache[Any, Any] = BoundedCache()  # compiled kernels of this program, filled by `launch`
        self.has_compiled = False  # whether the engine has read the list of its cache on disk, at the first kernel
        self._plans: BoundedCache[Any, Any] = BoundedCache()
        self._scratch: defaultdict[int, list[Any]] = defaultdict(list)
        self.in_graphs: dict[Any, Any] = {}  # small arrays that captured CUDA graphs read, filled by `ops`
        self.side_streams: set[int] = set()  # CUDA streams beside the default one that kernels were launched on
        self.copy_streams: set[int] = set()  # CUDA streams of copies that launches wait for
        self.dropped = Dropped()
        self.turns: Turns = Turns()  # each launch waits for its turn
        self.lock: threading.RLock = threading.RLock() if first is None else first.lock
        _made.add(self)

    def current_gpu(self) -> contextlib.AbstractContextManager[None]:
        """Make the engine's GPU, the first, this thread's current GPU: the engine does not do that itself."""
        return devices.current_gpu(0) if self.num_gpus > 1 else contextlib.nullcontext()

    def on_gpu(self, index: int) -> Runtime:
        """The runtime of a GPU: this one, or another's, which is made at first use."""
        if index == self.index:
            return self
        first = self._first or self
        if not index:
            return first
        live = first._others.get(index)
        if live is None:
            with self.lock:
                live = first._others.setdefault(index, Runtime(self.front, first, index))
        return live

    @property
    def plans(self) -> BoundedCache[Any, Any]:
        """Plans of one-shot calls, filled by `ops`; a thread that records has its own."""
        plans = thread_plans.plans
        return self._plans if plans is None else plans

    @property
    def scratch(self) -> defaultdict[int, list[Any]]:
        """Scratch memory between launches by CUDA stream, filled by `ops`, the newest last.

        A thread that records has its own.
        """
        plans = thread_plans.plans
        return self._scratch if plans is None else plans.setdefault("scratch", defaultdict(list))

    @property
    def alive(self) -> bool:
        """Whether this is still the program that the engine runs."""
        return self.front.prog is self.program

    instead = "Pickle the name, `arch`, and call tikv.init() with it in the other process."

    def __copy__(self) -> Runtime:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self  # a copy belongs to the same program

    @property
    def kernel_style(self) -> str:
        """The form of kernel that this arch needs: "cpu", "cuda" or "spirv"."""
        return "spirv" if self.is_spirv else self.arch

    def compiling(self, fast_math: bool) -> contextlib.AbstractContextManager[None]:
        """Compile with this library's settings, whatever the caller chose, and then restore the caller's."""
        return engine.compiling(self.program, fast_math)

    def own_kernels(self) -> None:
        """Let this library's kernels end with this program."""
        engine.own_kernels()

    def synchronize(self) -> None:
        """Wait until the device has finished everything launched so far; memory dropped before is freed."""
        self.dropped.release_behind(self._synchronize, self._release)

    def _synchronize(self) -> None:
        for wait in before_synchronize:
            wait()
        self.turns.settle()
        with self.current_gpu():
            self.program.synchronize()

    def _release(self, arr: Any) -> None:
        if self.alive:  # otherwise its memory is gone, and another program's array may have the address
            self.program.delete_ndarray(arr)

    @contextlib.contextmanager
    def engine_calls(self) -> Iterator[None]:
        """Guard the engine's own calls on a `ti.ndarray`, which fail in all threads while one compiles a kernel."""
        with self.lock, self.turns, self.current_gpu():
            yield

    def new_words(self, count: int) -> Any:
        """A `ti.ndarray` of 32-bit words; on Vulkan and Metal its memory is reliably freed after it is dropped."""
        if not self.is_spirv:
            with self.lock, self.current_gpu():
                return engine.new_words(count)
        self.give_back()
        try:
            with self.lock:
                return engine.new_words(count, self.dropped.fresh.append)
        except RuntimeError:  # releasing all dropped memory may make room
            self.synchronize()
            with self.lock:
                return engine.new_words(count, self.dropped.fresh.append)

    def give_back(self) -> None:
        """If much memory was dropped, synchronize and release it."""
        if self.dropped.due():
            self.synchronize()

    def __repr__(self) -> str:
        where = self.device if self.index else self.arch
        return f"Runtime({where}, epoch {self.epoch}{'' if self.alive else ', gone'})"


def _release_what_waits(program: Any) -> None:
    for runtime in list(_made):
        if runtime.program is program:
            runtime.dropped.release_at_end(program.delete_ndarray)


engine.before_end.append(_release_what_waits)


def current() -> Runtime:
    """The live runtime: this library's, else the caller's, else a new one on the best arch (see `init`).

    Raises:
        StaleRuntimeError: this process was forked after the engine had started.
    """
    global _current
    runtime = _current
    if runtime is not None and runtime.front.prog is runtime.program:
        return runtime
    with _lock:
        front = engine.front()
        if front.prog is None:
            return init()
        if engine.is_left_behind():
            raise StaleRuntimeError(f"runtime: {_why_forked()}")
        if _current is None or _current.program is not front.prog:
            _current = Runtime(front)
            log.info("attached to %s on %s (epoch %d)", _current.engine.title, _current.arch, _current.epoch)
        return _current


def running() -> Runtime | None:
    """The live runtime, this library's or the caller's, or None; never starts or imports anything."""
    return current() if engine.is_imported() and is_started() else None


def is_started() -> bool:
    """Whether the engine runs, whoever started it."""
    return engine.front().prog is not None


def require_alive(runtime: Runtime, operation: str) -> None:
    """Refuse an object whose runtime no longer exists.

    Raises:
        StaleRuntimeError: the engine was started again since the object was made, or this process was forked since.
    """
    if runtime.front.prog is not runtime.program:
        if runtime.front is _FORKED:
            raise StaleRuntimeError(f"{operation}: {_why_forked()}")
        name, ti = engine.engine_in_use().title, engine.engine_in_use().alias
        raise StaleRuntimeError(
            f"{operation}: this object was made in {name} runtime epoch {runtime.epoch}, which a later tikv.init(), "
            f"{ti}.init() or {ti}.reset() ended; its memory is gone. Call init() once, before creating stores and "
            "arrays, and create this object again."
        )


def candidate_archs() -> list[str]:
    """The archs that "auto" tries, best first."""
    return _auto()[0]


def why_auto() -> str:
    """Why "auto" would take the first of `candidate_archs`."""
    return _auto()[1]


def _auto() -> tuple[list[str], str]:
    archs = list(devices.candidate_archs())
    if archs[0] == "metal" and not (engine.shares_mps() and engines.version_of("torch")):
        # On Metal each host array is copied there and back with a wait in between; on the CPU it is not copied.
        return ["cpu"], "the CPU reads NumPy's and PyTorch's arrays in place, and nobody has run Metal on a Mac yet"
    return archs, {
        "metal": "PyTorch can use this engine's memory there",
        "cuda": "NVIDIA's driver is installed",
        "vulkan": "there is a GPU with a Vulkan driver, and no CUDA",
        "cpu": "there is no GPU",
    }[archs[0]]


def init(
    arch: str = "auto", engine: str = "auto", invariant: bool | None = None, attention_bits: int | None = None,
    **options: Any,
) -> Runtime:  # fmt: skip
    """Start the engine for this library. Optional: otherwise the first operation starts it, or uses the running one.

    Args:
        arch: "auto" takes the first that works among CUDA, a real Vulkan GPU and the CPU. On macOS it takes Metal if
            PyTorch is installed and the engine is Quadrants, else the CPU; `tikv.info()["arch_why"]` says why. Or
            name "metal", "cuda", "vulkan" or "cpu": if it is missing, an error is raised, and no other arch is taken.
            "amdgpu" needs Quadrants, "auto" never takes it, and nobody has run this library on it yet.
        engine: "taichi", or "quadrants", its maintained fork. "auto" takes the one that the environment variable
            TIKV_ENGINE names, else the one that is running or imported, else Taichi if it is installed. A process has
            one engine, from its first operation or `init` on.
        invariant: if True, a row of an attention result has the same bits whatever the batch, the other sequences, the
            memory (pages or contiguous) and the chunks of its prompt, and no matter whether it belongs to a prompt or
            to a single token. This is slower: see the manual's page "Performance". Results stay within the same bounds.
            None keeps the running engine's value, or False. ``tikv.info()["invariant"]`` shows it.
        attention_bits: 8 lets attention multiply in 8 bits where kernels can, over int8 and float8_e4m3fn: queries, and
            over float8_e4m3fn weights too, are then rounded to such codes. 16 rounds only to float16 or bfloat16. The
            manual's page "Concepts" says how exact either is. None keeps the running engine's value, or 16.
            ``tikv.info()["attention_bits"]`` shows it.
        **options: passed to `ti.init` or `qd.init` (`debug`, `device_memory_GB`, `cpu_max_num_threads`, ...).
            With `debug=True`, an invalid index on the device raises an error; otherwise its row is skipped.

    Raises:
        ArchError: the arch is unknown, or the engine lacks it or cannot start on it; the engine is missing, too old or
            too new, or the process uses another one. If the machine has no device of that arch, a running engine
            continues.
        OptionError: the engine, or an option of it, is unknown; or the running engine has a different value of
            ``invariant`` or of ``attention_bits``, or one of them is not allowed. The running engine continues.
        StaleRuntimeError: this process was forked after the engine had started.

    Cost: 0.2 s on CPU, 0.5 to 3 s on a GPU. A start ends the program of an engine that is running, with all its memory.
    Processes: a process that is forked after the start has none of the engine's threads, and every operation raises
    there. Use ``multiprocessing.get_context("spawn")``, or fork before the start.

    Examples:
        >>> import tikv
        >>> tikv.init(arch="cpu").arch
        'cpu'
    """
    if invariant is not None and type(invariant) is not bool:
        raise OptionError(f"init: invariant={invariant!r} is not True, False or None.")
    if attention_bits is not None and (type(attention_bits) is not int or attention_bits not in (8, 16)):
        raise OptionError(f"init: attention_bits={attention_bits!r} is not 16, 8 or None.")
    return _start(arch, engine, options, {"invariant": invariant, "attention_bits": attention_bits})


def _start(arch: str, name: str, options: dict[str, Any], arithmetic: dict[str, Any] | None = None) -> Runtime:
    global _current
    if arch != "auto" and arch not in ARCHS:
        raise ArchError(f"init: unknown arch {arch!r}. Use 'auto' or one of {', '.join(ARCHS)}.")
    if arch != "auto":
        engine.require_arch(arch, name)  # before the import, so that nobody installs an engine that lacks the arch
    engine.load(name)
    used = engine.engine_in_use()
    # Checked here, since the engine ends what is running before it checks its options.
    if unknown := sorted(set(options) - engine.known_options()):
        raise OptionError(
            f"init: {used.title} has no option {', '.join(unknown)}. Use those of {used.alias}.init: debug, "
            f"cpu_max_num_threads, device_memory_GB, offline_cache, log_level, ..."
        )
    with _lock:
        if engine.is_left_behind():
            raise StaleRuntimeError(f"init: {_why_forked()}")
        settings = _arithmetic(arithmetic or {}, used.alias)
        reasons = []
        archs, why = ([arch], "asked for") if arch != "auto" else _auto()
        for each in archs:
            try:
                with devices.current_gpu(0) if each == "cuda" else contextlib.nullcontext():
                    engine.start(each, options)
            except Exception as error:
                reasons.append(f"{each}: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}")
                continue
            if each in NEVER_RUN:
                log.warning("tikv has never been run on %s: compare its results with those of the CPU", each)
            _current = Runtime(engine.front())
            _current.why_arch = "; ".join(reasons) or why
            for option, value in settings.items():
                setattr(_current, option, value)
            log.info("started %s on %s (epoch %d)", _current.engine.title, _current.arch, _current.epoch)
            return _current
        raise ArchError(
            f"init: {used.title} could not start ({'; '.join(reasons)}). Run `python -m tikv doctor` to see why."
        )


def _arithmetic(asked: dict[str, Any], ti: str) -> dict[str, Any]:
    """How to compute, by options of `init`: as asked, or as the running engine does; those that neither says are left.

    Raises:
        OptionError: the running engine computes in another way.
    """
    settings = {}
    for name in ("invariant", "attention_bits"):
        value, before = asked.get(name), getattr(_current, name) if _current is not None and _current.alive else None
        if value is not None and before is not None and value != before:
            raise OptionError(
                f"init: {name}={value}, but the running engine was started with {name}={before}, so "
                f"results of the two could not be compared. Call tikv.init({name}={value}) before the first "
                f"operation, or call {ti}.reset() first, which ends the running engine and frees all its memory."
            )
        if value is not None or before is not None:
            settings[name] = before if value is None else value
    return settings


def is_forked() -> bool:
    """Whether this process was forked after the engine had started; older objects then belong to its parent."""
    return _current is not None and _current.front is _FORKED


def _before_fork() -> None:
    _lock.acquire()
    engine.before_fork()


def _after_fork() -> None:
    engine.after_fork()
    _lock.release()


def _leave_behind() -> None:
    """In a forked process, mark all runtimes as ended: each launch first checks that its runtime is alive."""
    forks.never_free([runtime.program for runtime in _made])
    if _current is not None and _current.alive:
        for runtime in (_current, *_current._others.values()):
            runtime.front = _FORKED


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
    forks.in_child.append(_leave_behind)
