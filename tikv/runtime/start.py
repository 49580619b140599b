"""Start Taichi, or attach to the one the caller started. The only module that imports it; others take `ti` from here.

`from tikv.runtime import ti` loads Taichi on first use, quietly and without its version check. `current()` gives the
live runtime; a runtime dies when somebody calls `ti.init` or `ti.reset` again, and everything made in it dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import io
import itertools
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tikv.errors import ArchError, OptionError, StaleRuntimeError

log = logging.getLogger("tikv")

ARCHS = ("metal", "cuda", "vulkan", "cpu")  # the order in which "auto" looks
_lock = threading.RLock()
_epochs = itertools.count(1)
_current: Runtime | None = None
_taichi: Any = None
_impl: Any = None
_program_at_load: Any = None
side_streams: set[int] = set()  # CUDA streams beside the default one that kernels were launched on
before_synchronize: list[Callable[[], None]] = []  # waits for launchers other than Taichi's


def __getattr__(name: str) -> Any:
    if name == "ti":
        return _load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load() -> Any:
    """Import Taichi once: no banner, no version check on the network, and each ndarray stamped with its program."""
    global _taichi, _impl, _program_at_load
    if _taichi is None:
        with _lock:
            if _taichi is None:
                os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")
                os.environ.setdefault("TI_SKIP_VERSION_CHECK", "ON")
                try:
                    taichi = importlib.import_module("taichi")
                except ImportError as error:
                    raise ArchError(
                        f"runtime: Taichi cannot be imported ({error}). "
                        f"Install taichi>=1.7.4,<1.8 on CPython 3.10-3.13."
                    ) from error
                _impl = importlib.import_module("taichi.lang.impl")
                _program_at_load = _impl.get_runtime().prog
                _stamp_ndarrays(importlib.import_module("taichi.lang._ndarray").Ndarray)
                _taichi = taichi
    return _taichi


def _stamp_ndarrays(ndarray_class: Any) -> None:
    """Let every `ti.ndarray` remember its program: a stale one is otherwise a dangling pointer nobody can recognise."""
    original = ndarray_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._tikv_program = _impl.get_runtime().prog

    ndarray_class.__init__ = __init__


class _Recorded(threading.local):
    """The bound one-shot calls of a thread that records for a graph, see `launch.recording`."""

    plans: dict[Any, Any] | None = None


recorded = _Recorded()


class Runtime:
    """One live Taichi program: its arch, its epoch (counted from 1) and what a launch needs of it."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.front = _impl.get_runtime()  # Taichi's own runtime, which lets go of the program when it ends
        self.epoch = next(_epochs)
        config = program.config()
        arch = _taichi.lang.misc._ti_core.arch_name(config.arch)
        self.arch = {"x64": "cpu", "arm64": "cpu"}.get(arch, arch)
        if self.arch not in ARCHS:
            raise ArchError(
                f"runtime: Taichi runs on arch {arch!r}; this library knows {', '.join(ARCHS)}. "
                f"Call ti.init(arch=ti.cpu)."
            )
        self.debug = bool(config.debug)
        self.is_cpu = self.arch == "cpu"
        self.is_cuda = self.arch == "cuda"
        self.threads = int(config.cpu_max_num_threads)  # that the CPU back end may use
        self.is_spirv = self.arch in ("vulkan", "metal")
        self.has_float64 = not self.is_spirv
        self.has_subgroups: bool | None = None if self.is_spirv else False  # None: not tried yet, see `launch`
        self.kernels: dict[Any, Any] = {}  # compiled kernels of this program, filled by `launch`
        self._plans: dict[Any, Any] = {}
        self.lock = threading.RLock()

    @property
    def plans(self) -> dict[Any, Any]:
        """Bound one-shot calls, filled by `ops`; a thread that records has its own."""
        own = recorded.plans
        return self._plans if own is None else own

    @property
    def alive(self) -> bool:
        """Whether this is still the program Taichi runs."""
        return _impl.get_runtime().prog is self.program

    @property
    def kernel_style(self) -> str:
        """Which form of a kernel this arch wants: "cpu", "cuda" or "spirv"."""
        return "spirv" if self.is_spirv else self.arch

    @contextlib.contextmanager
    def compiling(self, fast_math: bool) -> Iterator[None]:
        """Compile under this library's settings whatever the caller chose, and put the caller's back.

        The choices of the caller (`fast_math`, `default_fp`, `debug` ...) must not change one bit of a copy.
        """
        front, config = _impl.get_runtime(), self.program.config()
        wanted = {"fast_math": fast_math, "debug": False, "check_out_of_bound": False}
        saved = {name: getattr(config, name) for name in wanted}
        saved_front = (front.default_fp, front.default_ip, front.default_up, front.short_circuit_operators)
        unrolling = front.unrolling_limit if hasattr(front, "unrolling_limit") else None
        try:
            for name, value in wanted.items():
                setattr(config, name, value)
            front.default_fp, front.default_ip, front.default_up = _taichi.f32, _taichi.i32, _taichi.u32
            front.short_circuit_operators = True
            if unrolling is not None:
                front.unrolling_limit = 0
            yield
        finally:
            for name, value in saved.items():
                setattr(config, name, value)
            front.default_fp, front.default_ip, front.default_up, front.short_circuit_operators = saved_front
            if unrolling is not None:
                front.unrolling_limit = unrolling

    def synchronize(self) -> None:
        """Wait until the device has finished everything launched so far."""
        for wait in before_synchronize:
            wait()
        self.program.synchronize()

    def __repr__(self) -> str:
        return f"Runtime({self.arch}, epoch {self.epoch}{'' if self.alive else ', gone'})"


def current() -> Runtime:
    """The live runtime: the one in hand, else the caller's, else a new one on the best arch (see `init`)."""
    global _current
    runtime = _current
    if runtime is not None and _impl.get_runtime().prog is runtime.program:
        return runtime
    with _lock:
        _load()
        program = _impl.get_runtime().prog
        if program is None:
            return init()
        if _current is None or _current.program is not program:
            _current = Runtime(program)
            log.info("attached to Taichi on %s (epoch %d)", _current.arch, _current.epoch)
        return _current


def running() -> Runtime | None:
    """The live runtime, this library's or the caller's, or None; never starts or imports anything."""
    if _taichi is None and "taichi" not in sys.modules:
        return None
    _load()
    return current() if _impl.get_runtime().prog is not None else None


def is_started() -> bool:
    """Whether Taichi runs, whoever started it."""
    _load()
    return _impl.get_runtime().prog is not None


def require_alive(runtime: Runtime, operation: str) -> None:
    """Refuse an object whose runtime is gone.

    Raises:
        StaleRuntimeError: Taichi was started again since the object was made.
    """
    if _impl.get_runtime().prog is not runtime.program:
        raise StaleRuntimeError(
            f"{operation}: made in Taichi runtime epoch {runtime.epoch}, which a later ti.init() or ti.reset() ended; "
            f"its memory is gone. Call ti.init() once, before creating stores and arrays, and create this one again."
        )


def is_stale_ndarray(array: Any) -> bool:
    """Whether a `ti.ndarray` belongs to a program that no longer runs."""
    made_in = getattr(array, "_tikv_program", _program_at_load)
    return made_in is None or _impl.get_runtime().prog is not made_in


def init(arch: str = "auto", **taichi_options: Any) -> Runtime:
    """Start Taichi for this library. Optional: the first operation does it, or attaches to the Taichi you started.

    Args:
        arch: "auto" takes the first that works of Metal, CUDA, a real Vulkan GPU, CPU; or one of those names.
            A named arch that is missing is an error, never another arch.
        **taichi_options: passed to `ti.init` (`debug`, `device_memory_GB`, `cpu_max_num_threads`, ...).
            `debug=True` turns rows that a device-side index would skip into errors.

    Raises:
        ArchError: the arch is unknown, or Taichi cannot start on it.
        OptionError: an option that Taichi does not know. What ran goes on running.

    Cost: 0.2 s on CPU, 0.5 to 3 s on a GPU. Ends any Taichi runtime that was running, with all its memory.

    Example:
        >>> import tikv
        >>> tikv.init(arch="cpu").arch
        'cpu'
    """
    global _current
    if arch != "auto" and arch not in ARCHS:
        raise ArchError(f"init: unknown arch {arch!r}. Use 'auto' or one of {', '.join(ARCHS)}.")
    taichi = _load()
    # Asked here: Taichi itself ends what runs before it looks at its options.
    if unknown := sorted(set(taichi_options) - _known_options(taichi)):
        raise OptionError(
            f"init: Taichi has no option {', '.join(unknown)}. Use those of ti.init: debug, cpu_max_num_threads, "
            f"device_memory_GB, offline_cache, log_level, ..."
        )
    with _lock:
        candidates = [arch] if arch != "auto" else list(candidate_archs())
        options = {"log_level": taichi.WARN, **taichi_options, "enable_fallback": False}
        # Taichi's CUDA session fixes at its start whether a product and a sum may become one rounding. Ours may not.
        on_cuda = {"fast_math": False} | options
        reasons = []
        for name in candidates:
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    taichi.init(arch=getattr(taichi, name), **(on_cuda if name == "cuda" else options))
            except Exception as error:
                reasons.append(f"{name}: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}")
                continue
            _impl.get_runtime().materialize()  # else the first kernel must be compiled by this thread
            _current = Runtime(_impl.get_runtime().prog)
            log.info("started Taichi on %s (epoch %d)", _current.arch, _current.epoch)
            return _current
        raise ArchError(f"init: Taichi could not start ({'; '.join(reasons)}). Run `python -m tikv doctor` to see why.")


def _known_options(taichi: Any) -> set[str]:
    """What `ti.init` takes beside the arch."""
    of_program = {n for n in dir(_impl.default_cfg()) if not n.startswith("_")} - {"arch", "default_up"}
    return {"default_fp", "default_ip", "require_version", *vars(taichi.lang.misc._SpecialConfig()), *of_program}


def candidate_archs() -> Iterator[str]:
    """The archs that "auto" tries, best first: those this machine has hardware for. CPU is always last."""
    if sys.platform == "darwin":
        yield "metal"
    if _has_library("libcuda.so.1", "nvcuda.dll"):
        yield "cuda"
    if any(kind != "cpu" for _, kind in vulkan_devices()):
        yield "vulkan"
    yield "cpu"


def _has_library(*names: str) -> bool:
    return _library(*names) is not None


def _library(*names: str) -> Any:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class _ApplicationInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api", ctypes.c_uint32),
    ]


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("num_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("num_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    ]


class _SubgroupProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("size", ctypes.c_uint32),
        ("stages", ctypes.c_uint32),
        ("operations", ctypes.c_uint32),
        ("quads", ctypes.c_uint32),
    ]


class _Properties2(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("next", ctypes.c_void_p), ("properties", ctypes.c_uint64 * 512)]


_VULKAN_1_1 = (1 << 22) | (1 << 12)
_PROPERTIES_2, _SUBGROUP_PROPERTIES = 1000059001, 1000094000  # types of structures
_COMPUTE, _BASIC, _ARITHMETIC = 0x20, 1, 4
_VULKAN_KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}


@contextlib.contextmanager
def _physical_devices() -> Iterator[tuple[Any, list[Any]]]:
    """Vulkan's loader and a handle of each device; (None, []) without a loader."""
    vulkan = _library("libvulkan.so.1", "vulkan-1.dll", "libvulkan.1.dylib")
    if vulkan is None:
        yield None, []
        return
    application = _ApplicationInfo(0, None, b"tikv", 1, b"tikv", 1, _VULKAN_1_1)
    create = _InstanceCreateInfo(1, None, 0, ctypes.pointer(application), 0, None, 0, None)
    instance = ctypes.c_void_p()
    if vulkan.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)) != 0:
        yield None, []
        return
    try:
        count = ctypes.c_uint32()
        if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None) != 0:
            count.value = 0
        handles = (ctypes.c_void_p * count.value)()
        if count.value and vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles) != 0:
            count.value = 0
        yield vulkan, [ctypes.c_void_p(handle) for handle in handles[: count.value]]
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _properties(vulkan: Any, handle: Any) -> bytes:
    properties = ctypes.create_string_buffer(4096)  # VkPhysicalDeviceProperties is 824 bytes
    vulkan.vkGetPhysicalDeviceProperties(handle, properties)
    return properties.raw


def vulkan_devices() -> list[tuple[str, str]]:
    """(name, kind) of each Vulkan device; kind is integrated, discrete, virtual, other or cpu. Empty without a loader.

    A software driver such as lavapipe answers "cpu": good for tests, never chosen by "auto".
    """
    found = []
    with _physical_devices() as (vulkan, handles):
        for handle in handles:
            raw = _properties(vulkan, handle)
            kind = int.from_bytes(raw[16:20], sys.byteorder)
            found.append((raw[20:276].split(b"\0", 1)[0].decode(errors="replace"), _VULKAN_KINDS.get(kind, "other")))
    return found


def vulkan_subgroups() -> bool:
    """Whether kernels may reduce over subgroups, on every Vulkan device: Taichi does not say which it took."""
    with _physical_devices() as (vulkan, handles):
        return bool(handles) and all(_reduces(vulkan, handle) for handle in handles)


def _reduces(vulkan: Any, handle: Any) -> bool:
    if int.from_bytes(_properties(vulkan, handle)[:4], sys.byteorder) < _VULKAN_1_1:
        return False
    subgroups = _SubgroupProperties(_SUBGROUP_PROPERTIES, None)
    both = _Properties2(_PROPERTIES_2, ctypes.cast(ctypes.pointer(subgroups), ctypes.c_void_p))
    vulkan.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(both))
    wanted = _BASIC | _ARITHMETIC
    return bool(subgroups.stages & _COMPUTE) and subgroups.operations & wanted == wanted


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(arch: str) -> str:
    """A name for the device an arch runs on."""
    if arch == "vulkan":
        devices = vulkan_devices()
        hardware = [name for name, kind in devices if kind != "cpu"]
        return (hardware or [name for name, _ in devices] or ["unknown"])[0]
    if arch == "cuda":
        return _cuda_device()[0]
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cuda_device() -> tuple[str, int]:
    """(name, total bytes) of CUDA device 0, through the driver."""
    cuda = _library("libcuda.so.1", "nvcuda.dll")
    if cuda is None or cuda.cuInit(0) != 0:
        return "unknown", 0
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return "unknown", 0
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return name.value.decode(errors="replace"), total.value


def memory_bytes(arch: str) -> int | None:
    """Total bytes of memory an arch allocates from, where the system tells; else None."""
    if arch == "cuda":
        return _cuda_device()[1] or None
    if arch in ("cpu", "metal") and hasattr(os, "sysconf"):
        with contextlib.suppress(ValueError, OSError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
