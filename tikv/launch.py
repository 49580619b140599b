"""Compile a kernel once a runtime, bind it once, launch it many times by the cheapest route of the arch.

Three launchers give the same bits. **native**, on CUDA: NVIDIA's driver launches the kernel on torch's current stream,
or on that of `use_stream`, and a CUDA graph may capture it. **direct**: Taichi's launcher, whose launch context is
filled here; on CPU it is kept and relaunched, changing only the arguments that changed; elsewhere a launch overwrites
it, so each launch fills a fresh one. **public**: Taichi's public call, at ten times the cost.

The first that works is taken; `TIKV_LAUNCHER` or `choose_launcher` names one. Native and direct use what is inside
Taichi 1.7, and Taichi is therefore pinned to `taichi>=1.7.4,<1.8`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, CudaBytes, Memory, host_bytes
from tikv.cuda import compiler, driver, ptx
from tikv.cuda.driver import use_stream
from tikv.dtypes import NUMPY_WORDS, int8
from tikv.errors import ArchError, CapacityError
from tikv.runtime.cache import BoundedCache

__all__ = ["Bound", "Kernel", "choose_launcher", "kernel", "launcher_report", "refuse_baked", "use_stream"]

Factory = Callable[..., Any]

LAUNCHERS = ("native", "direct", "public")
_chosen: str | None = None
_unavailable: ArchError | None = None
_fallbacks: dict[str, str] = {}  # kernels that native could not take, and why


def choose_launcher(name: str | None) -> None:
    """Take this launcher for kernels bound from now on; None takes the first that works.

    Calls that were bound before keep theirs. On CPU, Vulkan and Metal "native" means "direct".

    Raises:
        ArchError: no such launcher.
    """
    global _chosen
    if name is not None and name not in LAUNCHERS:
        raise ArchError(f"launch: unknown launcher {name!r}. Use one of {', '.join(LAUNCHERS)}.")
    _chosen = name


def _wanted() -> str | None:
    """The launcher asked for by name, if any."""
    name = _chosen or os.environ.get("TIKV_LAUNCHER") or None
    if name is not None and name not in LAUNCHERS:
        raise ArchError(f"launch: TIKV_LAUNCHER={name} is no launcher. Use one of {', '.join(LAUNCHERS)}, or unset it.")
    return name


def _launcher(live: runtime.Runtime) -> tuple[str, str]:
    """(launcher, why) for kernels bound now in a runtime.

    Raises:
        ArchError: native was asked for on CUDA and cannot be had.
    """
    global _unavailable
    wanted = _wanted()
    if wanted == "public":
        return wanted, "asked for"
    if not live.is_cuda:
        return "direct", f"the cheapest on {live.arch}"
    if wanted == "direct":
        return wanted, "asked for"
    if _unavailable is None:
        try:
            driver.device()
        except ArchError as error:
            _unavailable = error
    if _unavailable is None:
        return "native", "asked for" if wanted else "cuda-bindings is installed and the driver answers"
    if wanted:
        raise ArchError(f"launch: the native launcher was asked for and is not there: {_unavailable}") from _unavailable
    return "direct", str(_unavailable)


def multiprocessors(live: runtime.Runtime) -> int:
    """Of the CUDA device; of an H200 where only Taichi's launcher is there, which does not tell."""
    return driver.device().multiprocessors if _launcher(live)[0] == "native" else 132


def launcher_report(live: runtime.Runtime) -> dict[str, Any]:
    """Which launcher kernels of a runtime get, why, and which kernels it could not take.

    Example:
        >>> import tikv
        >>> tikv.launch.launcher_report(tikv.init(arch="cpu"))["launcher"]
        'direct'
    """
    try:
        name, why = _launcher(live)
    except ArchError as error:
        name, why = "none", str(error)
    return {"launcher": name, "why": why, "fallbacks": dict(_fallbacks) if live.is_cuda else {}}


def refuse_baked(live: runtime.Runtime, operation: str, what: str = "a position on the host") -> None:
    """Refuse what lies on the host while a CUDA graph is captured: each replay would use the same position or values.

    Raises:
        ArchError: the stream of the launch is being captured.
    """
    if live.is_cuda and driver.capturing():
        raise ArchError(
            f"{operation}: {what} would be baked into the CUDA graph under capture, and each replay would use it "
            f"again. Pass arrays on the device. Keep positions in device memory: KVCacheStore.positions_on_device(), "
            f"append_ragged with cache_offsets on the device, or write_slots with slot_mapping on the device."
        )


class Kernel:
    """A compiled kernel of one runtime: a factory and its compile-time choices.

    Arrays are flat: a kernel sees words from a view's first element on. On CPU and CUDA the first array's extent is
    the number of iterations, which the kernel's one loop runs over; on Vulkan and Metal a vector carries it.
    """

    def __init__(self, live: runtime.Runtime, factory: Factory, choices: tuple[Any, ...]) -> None:
        self.runtime = live
        self.factory = factory
        self.choices = choices
        self.fast_math = bool(getattr(factory, "fast_math", False))
        with live.lock, live.compiling(self.fast_math):
            self.function = factory(*choices)
            self.primal = self.function._primal
            annotations = [argument.annotation for argument in self.primal.arguments]
            self.words = [str(a.dtype) if hasattr(a, "ndim") and not hasattr(a, "n") else None for a in annotations]
            self.lengths = [int(a.n) if hasattr(a, "n") else 0 for a in annotations]
            self.is_float = ["f" in str(getattr(a, "dtype", a)) for a in annotations]
        self.taichi_kernel: Any = None
        self.compiled: Any = None
        self.native: _Native | None = None

    def compile(self) -> None:
        """Compile for Taichi's launcher, in this process, unless that is done."""
        live = self.runtime
        with live.lock, live.compiling(self.fast_math):
            if self.compiled is None:
                key = self.primal.ensure_compiled(*map(self._placeholder, range(len(self.words))))
                self.taichi_kernel = self.primal.compiled_kernels[key]
                program = live.program
                self.compiled = program.compile_kernel(program.config(), program.get_device_caps(), self.taichi_kernel)

    def _placeholder(self, i: int) -> Any:
        if word := self.words[i]:
            return np.zeros(1, NUMPY_WORDS[word])
        if self.lengths[i]:
            return runtime.ti.Vector([0] * self.lengths[i], runtime.ti.f32 if self.is_float[i] else runtime.ti.i32)
        return 0.0 if self.is_float[i] else 0

    @functools.cached_property
    def name(self) -> str:
        """A readable identity: the factory and its choices."""
        return f"{self.factory.__name__.removeprefix('make_')}({', '.join(map(str, self.choices))})"

    def bind(self, iterations: int, *arguments: Any) -> Bound:
        """Bind arguments in the order of the signature: an `ArrayView` an array, a tuple a vector, else a number.

        On CPU a tuple may be given for an array of i32 too: these numbers then lie in memory of the launch's own.
        """
        recorder = _recording.launches
        if recorder is not None:
            return _RecordedBound(self, iterations, arguments, recorder)
        launcher = _launcher(self.runtime)[0]
        if launcher == "native":
            bound = self._bind_native(iterations, arguments)
            if bound is not None:
                return bound
            launcher = "direct"
        self.compile()
        if self.runtime.is_cuda:
            return (_PublicOnCuda if launcher == "public" else _DirectOnCuda)(self, iterations, arguments)
        if launcher == "public":
            return _PublicBound(self, iterations, arguments)
        return (_KeptBound if self.runtime.is_cpu else _FreshBound)(self, iterations, arguments)

    def _bind_native(self, iterations: int, arguments: tuple[Any, ...]) -> Bound | None:
        """A native launch; None where only Taichi's launcher can do it: arrays on the host, PTX of unknown form."""
        if any(self.words[i] and array.device == "cpu" for i, array in enumerate(arguments)):
            return None
        if self.native is None:
            if self.name in _fallbacks:
                return None
            try:
                self.native = _load_native(self)
            except ArchError as error:
                if driver.capturing() or _wanted() == "native":
                    raise
                _fallbacks[self.name] = str(error)
                runtime.log.warning("%s stays with Taichi's launcher: %s", self.name, error)
                return None
        return _NativeBound(self, iterations, arguments, self.native)


class Bound:
    """A kernel with its arguments; change some, launch, and again. Hold `lock` from the first change to the launch.

    It does not keep memory alive where memory has an address: the caller does, for as long as launches use it.
    """

    def __init__(self, kernel: Kernel, iterations: int, arguments: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.iterations = iterations
        self.arguments: list[Any] = list(arguments)
        for i, value in enumerate(arguments):
            if isinstance(value, tuple):
                self.arguments[i] = np.array(value, np.int32).data if kernel.words[i] else list(value)
            elif kernel.words[i]:
                Bound.set_array(self, i, value)
        self.lock = threading.RLock()

    def set_array(self, i: int, array: ArrayView) -> None:
        """Let array argument `i` be `array`."""
        self.arguments[i] = array.bare() if array.handle is None else array

    def set_pointer(self, i: int, pointer: int) -> None:
        """Let array argument `i`, which has an address, lie at another one; its form stays."""
        self.arguments[i] = self.arguments[i].at(pointer)

    def set_entry(self, i: int, j: int, value: int) -> None:
        """Let entry `j` of vector argument `i` be `value`."""
        self.arguments[i][j] = value

    def setter(self, i: int) -> Callable[[int, int], None]:
        """`set_entry` of vector argument `i`, by the cheapest call."""
        numbers = self.arguments[i]
        return numbers.__setitem__ if isinstance(numbers, memoryview) else functools.partial(self.set_entry, i)

    def launch(self) -> None:
        """Run the kernel; returns before the device is done, except on CPU."""
        raise AssertionError("a Bound is made by Kernel.bind")

    def launcher(self) -> Callable[[], None]:
        """`launch`, by the cheapest call."""
        return self.launch

    def release(self, which: Sequence[int] | None = None) -> None:
        """Let go of arrays without an address, which would otherwise be kept alive; set them again to launch.

        `which` are the arguments that each launch sets; None: all arrays.
        """
        for i in range(len(self.arguments)) if which is None else which:
            value = self.arguments[i]
            if isinstance(value, ArrayView) and value.handle is not None:
                self.arguments[i] = None


class Recorded(NamedTuple):
    """A launch that was recorded instead of done; it keeps the memory of its arrays alive."""

    kernel: Kernel
    iterations: int
    arguments: tuple[Any, ...]
    entries: tuple[tuple[int, int], ...]  # (vector, entry) of what the operation put in before the launch, in its order


class _Recording(threading.local):
    """Where the launches of a thread go that records."""

    launches: list[Recorded] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recording(live: runtime.Runtime, plans: BoundedCache[Any, Any]) -> Iterator[list[Recorded]]:
    """Collect what this thread binds and launches, and launch nothing.

    Meanwhile its one-shot calls find `plans` instead of those of earlier calls, and leave theirs there.
    """
    launches: list[Recorded] = []
    with live.lock:
        before, runtime.recorded.plans = runtime.recorded.plans, plans
        _recording.launches = launches
        try:
            yield launches
        finally:
            runtime.recorded.plans = before
            _recording.launches = None


def is_recording() -> bool:
    """Whether this thread records: what is bound now is never launched, and must not be kept."""
    return _recording.launches is not None


class _RecordedBound(Bound):
    """Under `recording`: keeps arrays and all, and notes its launches."""

    def __init__(self, kernel: Kernel, iterations: int, arguments: tuple[Any, ...], launches: list[Recorded]) -> None:
        super().__init__(kernel, iterations, arguments)
        self.arguments = [list(v) if isinstance(v, tuple) else v for v in arguments]
        self._entries: list[tuple[int, int]] = []
        self._launches = launches

    def set_array(self, i: int, array: ArrayView) -> None:
        self.arguments[i] = array

    def set_entry(self, i: int, j: int, value: int) -> None:
        self.arguments[i][j] = value
        self._entries.append((i, j))

    def launch(self) -> None:
        arguments = tuple(tuple(v) if isinstance(v, list) else v for v in self.arguments)
        self._launches.append(Recorded(self.kernel, self.iterations, arguments, tuple(self._entries)))
        self.arguments, self._launches = [], []  # who keeps the operation's plan does not keep its arrays


class TaichiGraph:
    """Launches as one compiled `ti.graph`, over whole `ti.ndarray`s: what Vulkan and Metal have instead of addresses.

    Taichi's own `dispatch` wants an ndarray of the element type of the kernel. Ours hold words that kernels read as
    they like, so kernels are compiled here and handed over as they are.

    Args:
        launches: of each its kernel and arguments; an array argument is the name of an ndarray.
        ndarrays: one for each name, of the element type of those that runs will bring.
    """

    def __init__(self, launches: Sequence[tuple[Kernel, Sequence[Any]]], ndarrays: dict[str, Any]) -> None:
        graph, kinds = runtime.ti.graph, runtime.ti.graph.ArgKind
        arrays = {name: graph.Arg(kinds.NDARRAY, name, a.dtype, ndim=1) for name, a in ndarrays.items()}
        self.values: dict[str, Any] = dict(ndarrays)  # what the next run takes: ndarrays, numbers and vectors by name
        builder = graph.GraphBuilder()
        for n, (kernel, arguments) in enumerate(launches):
            kernel.compile()
            given = []
            for i, argument in enumerate(arguments):
                number = runtime.ti.f32 if kernel.is_float[i] else runtime.ti.i32
                if kernel.words[i]:
                    given.append(arrays[argument])
                    continue
                name = f"{n}.{i}"
                if kernel.lengths[i]:
                    given.append(graph.Arg(kinds.MATRIX, name, runtime.ti.types.vector(kernel.lengths[i], number)))
                    self.values[name] = runtime.ti.Vector(list(argument), number)
                else:
                    given.append(graph.Arg(kinds.SCALAR, name, number))
                    self.values[name] = argument
            builder._graph_builder.dispatch(kernel.taichi_kernel, given)
        self._compiled = builder.compile()

    def set_entry(self, n: int, i: int, j: int, value: int) -> None:
        """Let entry `j` of the vector that is argument `i` of launch `n` be `value`."""
        self.values[f"{n}.{i}"].entries[j] = value

    def run(self) -> None:
        """Run all launches in their order; returns before the device is done."""
        self._compiled.run(self.values)


class _KeptBound(Bound):
    """CPU: one launch context, relaunched. Arrays are given by pointer; one that holds an ndarray cannot be kept."""

    def __init__(self, kernel: Kernel, iterations: int, arguments: tuple[Any, ...]) -> None:
        super().__init__(kernel, iterations, arguments)
        self.context = _filled_context(self)
        self._set_array = self.context.set_arg_external_array_with_shape
        self._set_entry = self.context.set_struct_arg_int
        self._launch = kernel.runtime.program.launch_kernel
        self._compiled = kernel.compiled
        self._pointers = [value.ptr if isinstance(value, ArrayView) else 0 for value in arguments]

    def set_array(self, i: int, array: ArrayView) -> None:
        self.set_pointer(i, array.ptr)

    def set_pointer(self, i: int, pointer: int) -> None:
        if pointer != self._pointers[i]:
            self._pointers[i] = pointer
            self._set_array((i,), pointer, self.arguments[i].span, (self.iterations if i == 0 else 1,), 0)

    def set_entry(self, i: int, j: int, value: int) -> None:
        entries = self.arguments[i]
        if entries[j] != value:
            entries[j] = value
            if not self.kernel.words[i]:
                self._set_entry((i, j), value)

    def launch(self) -> None:
        self._launch(self._compiled, self.context)

    def launcher(self) -> Callable[[], None]:
        return functools.partial(self._launch, self._compiled, self.context)


class _FreshBound(Bound):
    """CUDA, Vulkan, Metal: a launch overwrites its context's pointers, so each launch fills a fresh one."""

    def launch(self) -> None:
        self.kernel.runtime.program.launch_kernel(self.kernel.compiled, _filled_context(self))


class _OnLegacyStream(Bound):
    """CUDA by Taichi's launcher, which knows the legacy default stream alone: in order with torch's current stream."""

    def launch(self) -> None:
        if driver.capturing():
            raise ArchError(
                f"launch: {self.kernel.name} goes through Taichi's launcher, which a CUDA graph cannot capture "
                f"({_fallbacks.get(self.kernel.name) or launcher_report(self.kernel.runtime)['why']}). Pass arrays on "
                f"the device, and install taichi-kv[cuda]; tikv.info() says which launcher is in use."
            )
        stream = driver.stream()
        if stream:
            driver.synchronize(stream)
        super().launch()
        if stream:
            self.kernel.runtime.program.synchronize()


class _PublicBound(Bound):
    """Any arch: Taichi's public call."""

    def launch(self) -> None:
        kernel = self.kernel
        values: list[Any] = []
        for i, value in enumerate(self.arguments):
            word = kernel.words[i]
            if word is None:
                vector = runtime.ti.Vector
                values.append(
                    vector(value, runtime.ti.f32 if kernel.is_float[i] else runtime.ti.i32)
                    if kernel.lengths[i]
                    else value
                )
            elif isinstance(value, memoryview):
                values.append(np.asarray(value))
            elif value.handle is not None:
                values.append(_retyped(value.handle, word))
            else:
                values.append(_words(value, word, self.iterations if i == 0 else None))
        with kernel.runtime.lock, kernel.runtime.compiling(kernel.fast_math):
            kernel.function(*values)


def _retyped(handle: Any, word: str) -> Any:
    """The memory of a `ti.ndarray` under another element type, which the public call compares with the kernel's."""
    borrowed = type("Borrowed", (type(handle),), {"__init__": lambda self: None, "__del__": lambda self: None})()
    vars(borrowed).update(vars(handle), element_type=getattr(runtime.ti, word))
    return borrowed


class _DirectOnCuda(_OnLegacyStream, _FreshBound):
    """CUDA by Taichi's launcher, its launch context filled here."""


class _PublicOnCuda(_OnLegacyStream, _PublicBound):
    """CUDA by Taichi's public call."""


class _Native:
    """A kernel as the driver launches it: its function, the threads of a block, and where its arguments lie."""

    def __init__(self, function: Any, block: int, offsets: Sequence[int], size: int) -> None:
        self.function = function
        self.block = block
        self.offsets = offsets
        self.size = size


_natives: dict[str, _Native] = {}  # outlive a runtime: the context is the process's


def _load_native(kernel: Kernel) -> _Native:
    """Compile, patch and load a kernel for the driver; once a process.

    Raises:
        ArchError: see `compiler.ptx_of`, `ptx.patch` and `driver.Device.load`.
    """
    device = driver.device()
    if driver.synchronize_all not in runtime.before_synchronize:
        runtime.before_synchronize.append(driver.synchronize_all)
    key = compiler.key_of(kernel.factory, kernel.choices, device.target)
    found = _natives.get(key)
    if found is None:
        offsets, size = argument_layout(kernel.words, kernel.lengths)
        text = compiler.ptx_of(kernel.factory, kernel.choices, device.target)
        resident = getattr(kernel.factory, "resident", None)
        patched = ptx.patch(
            text, size, device.overlaps, not kernel.fast_math, resident(*kernel.choices) if resident else None
        )
        function = device.load(patched.text, patched.entry)
        found = _natives[key] = _Native(function, patched.block, offsets, size)
    return found


def serve_compiler() -> None:
    """What the compiling process of `tikv.cuda.compiler` runs."""
    compiler.serve(_launch_over_nothing)


def _launch_over_nothing(factory: Factory, choices: tuple[Any, ...]) -> None:
    """Launch a kernel once, for Taichi to generate its code: the loop's extent is zero and so are all numbers.

    A loop of constant bounds runs all the same, so arrays are memory that may be written.
    """
    live = runtime.current()
    kernel = Kernel(live, factory, choices)
    kernel.compile()
    memory = Memory(1 << 20, live)
    memory.clear()
    array = memory.array((memory.nbytes,), int8)
    arguments = [array if w else (0,) * n if n else 0 for w, n in zip(kernel.words, kernel.lengths, strict=True)]
    with live.compiling(kernel.fast_math):
        _FreshBound(kernel, 0, tuple(arguments)).launch()
        live.synchronize()


def argument_layout(words: Sequence[str | None], lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each argument lies, and the size of all, as Taichi lays them out.

    An array of one axis is {i32 extent, 4 bytes nothing, u64 pointer}; a vector its entries; numbers are of 32 bits.

    Example:
        >>> from tikv.launch import argument_layout
        >>> argument_layout(["u64", None, None], [0, 3, 0])
        ([0, 16, 28], 32)
    """
    offsets, at = [], 0
    for word, length in zip(words, lengths, strict=True):
        at = -(-at // 8) * 8 if word else at
        offsets.append(at)
        at += 16 if word else 4 * max(1, length)
    return offsets, -(-at // 8) * 8


BLOCKS_PER_MULTIPROCESSOR = 4096  # far more than it holds: fewer blocks, with more work each, move fewer bytes a second


def blocks_of(iterations: int, block: int, most: int, operation: str) -> int:
    """How many blocks run so many iterations, each thread striding over them without leaving 32 bits.

    Raises:
        CapacityError: too many iterations for a stride of 32 bits.

    Example:
        >>> from tikv.launch import blocks_of
        >>> blocks_of(1000, 128, most=33792, operation="example")
        8
    """
    blocks = max(1, min(-(-iterations // block), most))
    room = (2**31 - 1 - iterations) // block  # the stride is added once more after the last iteration
    blocks = min(blocks, room)
    if blocks < 1:
        raise CapacityError(f"{operation}: {iterations} work items leave no room for a stride. Split the call.")
    return blocks


class _NativeBound(Bound):
    """CUDA by the driver: the arguments lie in a buffer here, which the driver copies when it launches."""

    def __init__(self, kernel: Kernel, iterations: int, arguments: tuple[Any, ...], native: _Native) -> None:
        self._bytes = bytearray(native.size)
        self._anchor = (ctypes.c_char * native.size).from_buffer(self._bytes)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._anchor))
        self._pointers = memoryview(self._bytes).cast("Q")
        self._entries = memoryview(self._bytes).cast("i")
        self._at = native.offsets
        super().__init__(kernel, iterations, arguments)
        for i, value in enumerate(arguments):
            if kernel.words[i]:
                self.set_array(i, value)
                self._entries[self._at[i] // 4] = iterations if i == 0 else 1
            else:
                values = list(value) if kernel.lengths[i] else [value]
                form = f"<{len(values)}{'f' if kernel.is_float[i] else 'i'}"
                struct.pack_into(form, self._bytes, self._at[i], *values)
        self._function = native.function
        self._parameters_at = ctypes.addressof(self._parameters)
        self._stream = 0
        self._by_host = False  # whether the host changes entries from launch to launch
        most = driver.device().multiprocessors * BLOCKS_PER_MULTIPROCESSOR
        self._config = driver.launch_config(blocks_of(iterations, native.block, most, kernel.name), native.block)
        self._call = driver.binding().cuLaunchKernelEx

    def set_array(self, i: int, array: ArrayView) -> None:
        self.set_pointer(i, array.ptr)

    def set_pointer(self, i: int, pointer: int) -> None:
        self._pointers[(self._at[i] >> 3) + 1] = pointer

    def set_entry(self, i: int, j: int, value: int) -> None:
        self._by_host = True
        self._entries[(self._at[i] >> 2) + j] = value

    def launch(self) -> None:
        stream = driver.stream()
        if stream and self._by_host:  # the default stream cannot be captured
            refuse_baked(self.kernel.runtime, self.kernel.name)
        if stream != self._stream:
            self._config.hStream = driver.stream_object(stream)
            self._stream = stream
            if stream:
                runtime.side_streams.add(stream)
        if self._call(self._config, self._function, self._parameters_at, 0)[0]:
            # A thread that has not used CUDA yet has no context; a second failure is one.
            driver.device().enter()
            driver.checked(self._call(self._config, self._function, self._parameters_at, 0), self.kernel.name)


def _filled_context(bound: Bound) -> Any:
    """A launch context of Taichi's with the bound arguments in it."""
    kernel = bound.kernel
    context = kernel.taichi_kernel.make_launch_context()
    for i, value in enumerate(bound.arguments):
        if kernel.words[i]:
            if isinstance(value, memoryview):
                context.set_arg_external_array_with_shape(
                    [i], np.asarray(value).ctypes.data, value.nbytes, [len(value)], 0
                )
            elif value.handle is not None:
                context.set_arg_ndarray([i], value.handle.arr)
            else:
                extent = bound.iterations if i == 0 else 1
                context.set_arg_external_array_with_shape([i], value.ptr, value.span, [extent], 0)
        elif kernel.lengths[i]:
            put = context.set_struct_arg_float if kernel.is_float[i] else context.set_struct_arg_int
            for j, entry in enumerate(value):
                put([i, j], entry)
        elif kernel.is_float[i]:
            context.set_arg_float([i], value)
        else:
            context.set_arg_int([i], value)
    return context


def _words(array: ArrayView, word: str, extent: int | None) -> Any:
    """A flat NumPy or torch array over the same memory, for Taichi's public call; `extent` overrides its length."""
    dtype = np.dtype(NUMPY_WORDS[word])
    count = max(1, array.span // dtype.itemsize) if extent is None else extent
    if array.device == "cpu":
        return host_bytes(array.ptr, count * dtype.itemsize).view(dtype)
    try:
        import torch
    except ImportError as error:
        raise ArchError(
            "launch: TIKV_LAUNCHER=public on CUDA needs torch. Install taichi-kv[torch] or unset it."
        ) from error
    found = torch.as_tensor(CudaBytes(array.ptr, count * dtype.itemsize), device=array.device)
    return found.view(dtypes.to_torch(dtype.name))


def has_subgroups(live: runtime.Runtime) -> bool:
    """Whether kernels may reduce over subgroups here: the driver announces it, and a trial has the right numbers.

    The trial is not for nothing: Taichi 1.7.4 emits the operations without declaring their SPIR-V capability.
    """
    if live.has_subgroups is None:
        # Every Mac's GPU that Taichi runs on reduces over its SIMD groups; a Vulkan driver says whether it does.
        live.has_subgroups = (live.arch == "metal" or runtime.vulkan_subgroups()) and _agree(live)
    return live.has_subgroups


def _agree(live: runtime.Runtime) -> bool:
    lanes = importlib.import_module("tikv.kernels.lanes")
    tried = kernel(live, lanes.make_trial, lanes.SUBGROUP)
    found = np.zeros(lanes.TRIED * lanes.BLOCK, np.float32)
    with live.lock, live.compiling(tried.fast_math):
        tried.function(found)
    right: bool = lanes.agreed(found)
    if not right:
        runtime.log.warning("subgroup operations give wrong numbers on %s: attention does without", live.arch)
    return right


def kernel(live: runtime.Runtime, factory: Factory, *choices: Any) -> Kernel:
    """The compiled kernel of a factory and its choices in a runtime; compiled on first use, then kept."""
    key = (factory, choices)
    found: Kernel | None = live.kernels.get(key)
    if found is None:
        with live.lock:
            found = live.kernels.get(key)
            if found is None:
                runtime.log.info("compiling %s, once", factory.__name__)
                found = live.kernels[key] = Kernel(live, factory, choices)
    return found
