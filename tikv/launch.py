"""Compile a kernel once a runtime, bind it once, launch it many times by the cheapest route of the arch.

The direct route fills Taichi's launch context itself. On CPU the context is kept and relaunched, changing only the
arguments that changed; on CUDA, Vulkan and Metal a launch overwrites it, so each launch fills a fresh one. It uses
names inside `taichi.lang`, and is therefore pinned to `taichi>=1.7.4,<1.8`; `TIKV_LAUNCHER=public` takes Taichi's
public call instead, with the same bits at ten times the cost.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.errors import ArchError

Factory = Callable[..., Any]

_NUMPY_WORDS = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip

ROUTES = ("direct", "public")
_route: str | None = None


def route() -> str:
    """The launcher in use: what `choose_route` or `TIKV_LAUNCHER` says, else "direct"."""
    return _route or choose_route(os.environ.get("TIKV_LAUNCHER") or "direct")


def choose_route(name: str) -> str:
    """Take this launcher for kernels bound from now on.

    Raises:
        ArchError: no such launcher.
    """
    global _route
    if name not in ROUTES:
        raise ArchError(f"launch: unknown launcher {name!r}. Use one of {', '.join(ROUTES)}.")
    _route = name
    return name


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
            key = self.primal.ensure_compiled(*map(self._placeholder, range(len(annotations))))
            self.taichi_kernel = self.primal.compiled_kernels[key]
            program = live.program
            self.compiled = program.compile_kernel(program.config(), program.get_device_caps(), self.taichi_kernel)

    def _placeholder(self, i: int) -> Any:
        if self.words[i]:
            return np.zeros(1, _NUMPY_WORDS[self.words[i]])
        if self.lengths[i]:
            return runtime.ti.Vector([0] * self.lengths[i], runtime.ti.f32 if self.is_float[i] else runtime.ti.i32)
        return 0.0 if self.is_float[i] else 0

    @property
    def name(self) -> str:
        """A readable identity: the factory and its choices."""
        return f"{self.factory.__name__.removeprefix('make_')}({', '.join(map(str, self.choices))})"

    def bind(self, iterations: int, *arguments: Any) -> Bound:
        """Bind arguments in the order of the signature: an `ArrayView` an array, a tuple a vector, else a number."""
        if route() == "public":
            return _PublicBound(self, iterations, arguments)
        return (_KeptBound if self.runtime.is_cpu else _FreshBound)(self, iterations, arguments)


class Bound:
    """A kernel with its arguments; change some, launch, and again. Hold `lock` from the first change to the launch.

    It does not keep memory alive where memory has an address: the caller does, for as long as launches use it.
    """

    def __init__(self, kernel: Kernel, iterations: int, arguments: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.iterations = iterations
        self.arguments = [list(v) if kernel.lengths[i] else v for i, v in enumerate(arguments)]
        for i, value in enumerate(arguments):
            if kernel.words[i]:
                Bound.set_array(self, i, value)
        self.lock = threading.RLock()

    def set_array(self, i: int, array: ArrayView) -> None:
        """Let array argument `i` be `array`."""
        self.arguments[i] = array.bare() if array.handle is None else array

    def set_entry(self, i: int, j: int, value: int) -> None:
        """Let entry `j` of vector argument `i` be `value`."""
        self.arguments[i][j] = value

    def launch(self) -> None:
        """Run the kernel; returns before the device is done, except on CPU."""
        raise AssertionError("a Bound is made by Kernel.bind")

    def release(self) -> None:
        """Let go of arrays without an address, which a bound call would otherwise keep alive; set them again to launch."""
        for i, value in enumerate(self.arguments):
            if self.kernel.words[i] and value is not None and value.handle is not None:
                self.arguments[i] = None


class _KeptBound(Bound):
    """CPU: one launch context, relaunched. Arrays must be given by pointer; one that holds an ndarray cannot be kept."""

    def __init__(self, kernel: Kernel, iterations: int, arguments: tuple[Any, ...]) -> None:
        super().__init__(kernel, iterations, arguments)
        self.context = _filled_context(self)
        self._set_array = self.context.set_arg_external_array_with_shape
        self._set_entry = self.context.set_struct_arg_int
        self._launch = kernel.runtime.program.launch_kernel
        self._compiled = kernel.compiled
        self._pointers = [value.ptr if kernel.words[i] else 0 for i, value in enumerate(arguments)]

    def set_array(self, i: int, array: ArrayView) -> None:
        if array.ptr != self._pointers[i]:
            self._pointers[i] = array.ptr
            self._set_array([i], array.ptr, array.span, [self.iterations if i == 0 else 1], 0)

    def set_entry(self, i: int, j: int, value: int) -> None:
        if self.arguments[i][j] != value:
            self.arguments[i][j] = value
            self._set_entry([i, j], value)

    def launch(self) -> None:
        self._launch(self._compiled, self.context)


class _FreshBound(Bound):
    """CUDA, Vulkan, Metal: a launch overwrites its context's pointers, so each launch fills a fresh one."""

    def launch(self) -> None:
        self.kernel.runtime.program.launch_kernel(self.kernel.compiled, _filled_context(self))


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
            elif value.handle is not None:
                values.append(value.handle)
            else:
                values.append(_words(value, word, self.iterations if i == 0 else None))
        with kernel.runtime.lock, kernel.runtime.compiling(kernel.fast_math):
            kernel.function(*values)


def _filled_context(bound: Bound) -> Any:
    """A launch context of Taichi's with the bound arguments in it."""
    kernel = bound.kernel
    context = kernel.taichi_kernel.make_launch_context()
    for i, value in enumerate(bound.arguments):
        if kernel.words[i]:
            if value.handle is not None:
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
    dtype = np.dtype(_NUMPY_WORDS[word])
    count = max(1, array.span // dtype.itemsize) if extent is None else extent
    if array.device == "cpu":
        return np.frombuffer((ctypes.c_uint8 * (count * dtype.itemsize)).from_address(array.ptr), dtype)
    try:
        import torch
    except ImportError as error:
        raise ArchError(
            "launch: TIKV_LAUNCHER=public on CUDA needs torch. Install taichi-kv[torch] or unset it."
        ) from error

    class _Interface:
        __cuda_array_interface__ = {"shape": (count,), "typestr": dtype.str, "data": (array.ptr, False), "version": 3}

    return torch.as_tensor(_Interface(), device=array.device)


def kernel(live: runtime.Runtime, factory: Factory, *choices: Any) -> Kernel:
    """The compiled kernel of a factory and its choices in a runtime; compiled on first use, then kept."""
    key = (factory, choices)
    found = live.kernels.get(key)
    if found is None:
        with live.lock:
            found = live.kernels.get(key)
            if found is None:
                runtime.log.info("compiling %s, once", factory.__name__)
                found = live.kernels[key] = Kernel(live, factory, choices)
    return found  # type: ignore[no-any-return]
