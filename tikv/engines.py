"""The engines that compile and run the kernels: Taichi, and Quadrants, its maintained fork.

Each engine has a class with its names, the versions that were tried, where it runs, and everything inside it that is
different in the other. No other module asks which engine it is. `runtime/engine.py` imports them; this module does not.

`import tikv` loads this module, so what takes long to load is imported where it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar

from tikv import extras


class Engine:
    """The interface of an engine. Its methods work once the engine is imported; they are written for Taichi 1.7."""

    name: str  # the name of the module and of the distribution
    title: str  # its name in messages
    alias: str  # the name as which its users import it
    least: str  # the oldest version that was tried
    below: str  # the first newer version that was not tried
    pythons: str
    archs: tuple[str, ...] = ("metal", "cuda", "vulkan", "cpu")
    quiet: ClassVar[Mapping[str, str]]  # environment variables without which its import prints, or asks a server
    cache_variable: str  # the environment variable that names the folder of its compiled kernels
    policy_variable: str  # the environment variable that says which of these are deleted when a process ends
    cache_lock: str  # the path of the folder's lock, within it
    program_of: attrgetter[Any]  # the program of `settings`, or None
    has_graphs: bool  # whether it has graphs of kernels that are compiled as one
    has_modules: bool  # whether it has modules of kernels that are compiled ahead of time
    has_known_ptx: bool  # whether the native CUDA launcher knows its PTX; else it launches kernels made beforehand
    has_bitcode: bool  # whether its CUDA kernels may call functions of LLVM bitcode
    mps_arch: str | None = None  # the arch on which PyTorch can see its memory, as tensors on MPS
    word: str = "u32"  # the element type of memory that tikv allocates
    core_name: str  # the name of its C++ module
    context_class: str  # what walks through a kernel's source
    position_method: str  # its method that formats the current source line for messages
    source_reader: str  # the module whose `getsourcelines` and `getsourcefile` it calls
    source_parser: str  # the module that parses the source
    decorators: str = "lang.kernel_impl"  # the module of its decorators for functions and kernels
    writes_trees_anew: bool  # whether it may read a syntax tree again, since it overwrites its notes in it

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.name}>={self.least},<{self.below}"

    @property
    def remedy(self) -> str:
        """What to do if it is missing or has the wrong version."""
        return f"Install {self.requirement} on {self.pythons}."

    def version(self) -> str | None:
        """The installed version, or None; the engine is not imported."""
        return version_of(self.name)

    def why_refused(self, version: str) -> str | None:
        """Why a version is not used: it is older or newer than those that were tried. None if it is one of them."""
        if _numbers(version) < _numbers(self.least):
            return f"{self.title} {version} is too old"
        if _numbers(version) >= _numbers(self.below):
            return f"{self.title} {version} is newer than what this version of tikv was tested with"
        return None

    @property
    def others(self) -> list[Engine]:
        """All engines except this one."""
        return [engine for engine in ALL.values() if engine is not self]

    @property
    def is_imported(self) -> bool:
        """Whether any code has imported it."""
        return self.name in sys.modules

    def part(self, name: str) -> Any:
        """One of its modules, or None if that is not imported."""
        return sys.modules.get(f"{self.name}.{name}")

    @property
    def settings(self) -> Any:
        """Its Python runtime, which holds some settings of the compiler. Each start makes a new one."""
        return self.part("lang.impl").get_runtime()

    @property
    def front(self) -> Any:
        """An object whose `prog` is the running program, or None before the start and after the end."""
        return self.settings

    @property
    def program(self) -> Any:
        """The running program, or None; it may be called before and during the engine's import."""
        return self.program_of(self.settings) if hasattr(self.part("lang.impl"), "get_runtime") else None

    @property
    def core(self) -> Any:
        """Its C++ module."""
        return getattr(self.part("lang.misc"), self.core_name)

    def arch_name(self, arch: Any) -> str:
        """The name of an arch, as a program's settings have it."""
        name: str = self.core.arch_name(arch)
        return name

    def annotations(self, kernel: Any) -> list[Any]:
        """The annotations of a kernel's arguments. `kernel` is the `_primal` of the object that `ti.kernel` makes."""
        return [argument.annotation for argument in kernel.arguments]

    def traced(self, kernel: Any, placeholders: list[Any]) -> Any:
        """A kernel traced for arguments of the kinds of these placeholders; it is not compiled yet."""
        return kernel.compiled_kernels[kernel.ensure_compiled(*placeholders)]

    def compiled(self, program: Any, traced: Any) -> Any:
        """The compiled kernel for `program.launch_kernel`, which may come from the cache on disk."""
        return program.compile_kernel(program.config(), program.get_device_caps(), traced)

    def start_options(self, arch: str) -> dict[str, Any]:
        """The options of a start on this arch, beside the caller's."""
        # For NVIDIA and AMD, the start fixes whether a product and a sum may be fused. Here they may not be.
        return {"fast_math": False} if arch in ("cuda", "amdgpu") else {}

    def is_on_queue_of_torch(self, program: Any) -> bool:
        """Whether a program launches kernels on PyTorch's own Metal queue."""
        return False

    def as_torch(self, ndarray: Any) -> Any:
        """A flat ndarray of `word` as a torch tensor over the same memory, on `mps_arch`."""
        raise NotImplementedError

    def argument_index(self, i: int) -> Any:
        """The index of argument `i` in a launch context. Entry `j` of a vector is (i, j) for every engine."""
        return (i,)

    def address_of(self, function: Any) -> int:
        """The address of a real function's C++ object: pybind11 stores it right after Python's own part."""
        import ctypes

        address: int | None = ctypes.c_void_p.from_address(id(function) + object.__basicsize__).value
        return address or 0

    def bitcode(self, path: str) -> Any:
        """The functions of an LLVM bitcode file, which CUDA kernels call with local variables."""
        import importlib

        return importlib.import_module(f"{self.name}.lang.source_builder").SourceBuilder.from_file(path)

    def over_subgroup(self, reduction: str) -> Any:
        """A function for kernels that reduces over a subgroup by "add", "min" or "max"; all threads get the result."""
        return getattr(self.part("lang.simt.subgroup"), f"reduce_{reduction}")


class _Taichi(Engine):
    """Taichi 1.7, for which `Engine` is written: its names."""

    name, title, alias = "taichi", "Taichi", "ti"
    least, below = "1.7.4", "1.8"
    pythons = "CPython 3.10-3.13"
    quiet: ClassVar[Mapping[str, str]] = {"ENABLE_TAICHI_HEADER_PRINT": "0", "TI_SKIP_VERSION_CHECK": "ON"}
    cache_variable, policy_variable = "TI_OFFLINE_CACHE_FILE_PATH", "TI_OFFLINE_CACHE_CLEANING_POLICY"
    cache_lock = "ticache.lock"
    has_graphs = has_modules = has_known_ptx = has_bitcode = writes_trees_anew = True
    core_name = "_ti_core"
    context_class, position_method = "ASTTransformerContext", "get_pos_info"
    source_reader = source_parser = "lang.kernel_impl"
    program_of = attrgetter("prog")

    def start_options(self, arch: str) -> dict[str, Any]:
        # Each thread that compiles loads LLVM's runtime library, and a kernel of this library is one task for one of
        # them: three more threads only cost a tenth of the first call.
        return {**super().start_options(arch), **({"num_compile_threads": 1} if arch == "cpu" else {})}


class _ProgramOf:
    """A substitute for Quadrants' own runtime, whose `prog` raises if there is no program."""

    __slots__ = ("settings",)

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    prog = property(attrgetter("settings._prog"))


class _Unlinked:
    """The functions of a bitcode file for an engine that cannot link it: kernels can name them, but not be compiled.

    A kernel that was made beforehand is launched by the types of its arguments, which its source has.
    """

    def __getattr__(self, name: str) -> Any:
        return None


class _Quadrants(Engine):
    """Quadrants 1.4, a fork of Taichi: where its names, its start and its arrays differ from Taichi's."""

    name, title, alias = "quadrants", "Quadrants", "qd"
    least, below = "1.4", "1.5"
    pythons = "CPython 3.12-3.14"
    archs = (*Engine.archs, "amdgpu")
    quiet: ClassVar[Mapping[str, str]] = {"ENABLE_QUADRANTS_HEADER_PRINT": "0"}
    cache_variable, policy_variable = "QD_OFFLINE_CACHE_FILE_PATH", "QD_OFFLINE_CACHE_CLEANING_POLICY"
    cache_lock = "kernel_compilation_manager/qdcache.lock"
    has_graphs = has_modules = has_known_ptx = has_bitcode = writes_trees_anew = False
    mps_arch = "metal"
    word = "i32"  # it cannot export unsigned integers to PyTorch
    core_name = "_qd_core"
    context_class, position_method = "ASTTransformerFuncContext", "memoized_get_pos_info"
    source_reader, source_parser = "lang._wrap_inspect", "lang._func_base"
    program_of = attrgetter("_prog")

    @property
    def remedy(self) -> str:
        return f"{extras.install(self.name)}, which needs {self.requirement}, on {self.pythons}."

    @property
    def front(self) -> Any:
        return _ProgramOf(self.settings)

    def start_options(self, arch: str) -> dict[str, Any]:
        options = super().start_options(arch)
        if arch == self.mps_arch and "torch" in sys.modules and (queue := self.part("interop").get_mps_command_queue()):
            options["external_metal_command_queue"] = queue
            options["external_metal_command_queue_is_torch_queue"] = True
        return options

    def is_on_queue_of_torch(self, program: Any) -> bool:
        config = program.config()
        return bool(config.external_metal_command_queue and config.external_metal_command_queue_is_torch_queue)

    def as_torch(self, ndarray: Any) -> Any:
        return sys.modules["torch"].utils.dlpack.from_dlpack(ndarray.to_dlpack())

    def annotations(self, kernel: Any) -> list[Any]:
        return [argument.annotation for argument in kernel.arg_metas]

    def traced(self, kernel: Any, placeholders: list[Any]) -> Any:
        kernel.raise_on_templated_floats = False  # otherwise only the public call sets it
        return kernel.materialized_kernels[kernel.ensure_compiled(*placeholders)]

    def compiled(self, program: Any, traced: Any) -> Any:
        return super().compiled(program, traced).compiled_kernel_data

    def argument_index(self, i: int) -> Any:
        return i

    def address_of(self, function: Any) -> int:
        import ctypes

        # nanobind: the word after Python's own part is the offset of the address from the object's start.
        offset = ctypes.c_int32.from_address(id(function) + object.__basicsize__).value
        address: int | None = ctypes.c_void_p.from_address(id(function) + offset).value
        return address or 0

    def bitcode(self, path: str) -> Any:
        return _Unlinked()

    def over_subgroup(self, reduction: str) -> Any:
        # Here the function that has Taichi's name gives the result to the first thread only.
        return getattr(self.part("lang.simt.subgroup"), f"reduce_all_{reduction}")


TAICHI, QUADRANTS = _Taichi(), _Quadrants()
ALL: dict[str, Engine] = {engine.name: engine for engine in (TAICHI, QUADRANTS)}


def that_shares_mps() -> Engine:
    """The engine that lets PyTorch see its memory on MPS."""
    (engine,) = [engine for engine in ALL.values() if engine.mps_arch is not None]
    return engine


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None; it is not imported."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that compare; a suffix, as in 1.8.0rc1, is left out."""
    import re

    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    return tuple(numbers + [0] * (3 - len(numbers)))


def selected_by_itself() -> tuple[Engine, str]:
    """(engine, why) if the caller names none: the one that runs or is imported, else Taichi if it is available."""
    running = [engine for engine in ALL.values() if engine.program is not None]
    if len(running) == 1:
        return running[0], "it runs already"
    imported = [engine for engine in ALL.values() if engine.is_imported]
    if len(imported) == 1:
        return imported[0], "it is imported already"
    if TAICHI.version() is not None:
        return TAICHI, "it is installed"
    if QUADRANTS.version() is not None:
        return QUADRANTS, "Taichi is not installed"
    if _has_no_taichi():
        return QUADRANTS, "there is no Taichi for this Python and machine"
    return TAICHI, "the default"


def _has_no_taichi() -> bool:
    """Whether Taichi has no wheels for this Python or this machine."""
    import platform

    return sys.version_info >= (3, 14) or (sys.platform == "linux" and platform.machine() == "aarch64")
