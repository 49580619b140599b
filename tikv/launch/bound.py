"""A kernel bound to its arguments, and the engine's two launchers of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, extras, runtime
from tikv.arrays import ArrayView, CudaBytes, host_bytes
from tikv.dtypes import NUMPY_WORDS
from tikv.launch.compilation import CompiledKernel
from tikv.launch.vectors import fields_of, place_in, places_of


class Bound:
    """A kernel with its arguments, some of which may change between launches. One thread at a time uses it.

    An entry of a vector is given by its argument and its index there, or by its name: see `vectors.joined`. Memory that
    has an address is not kept alive here: the caller keeps it for as long as launches use it.
    """

    def __init__(self, kernel: CompiledKernel, iterations: int, arguments: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.iterations = iterations
        self.arguments: list[Any] = list(arguments)
        self.numbers = [None if isinstance(value, ArrayView) else value for value in arguments]  # as they were bound
        self._fields = fields_of(arguments, kernel.is_float)
        for i, value in enumerate(arguments):
            if isinstance(value, tuple):
                self.arguments[i] = np.array(value, np.int32).data if kernel.words[i] else list(value)
            elif kernel.words[i]:
                Bound.set_array(self, i, value)

    def set_array(self, i: int, array: ArrayView) -> None:
        """Let array argument `i` be `array`."""
        self.arguments[i] = array.without_owner() if array.handle is None else array

    def set_pointer(self, i: int, pointer: int) -> None:
        """Let array argument `i`, which has an address, lie at another one; its form stays."""
        self.arguments[i] = self.arguments[i].at_address(pointer)

    def set_entry(self, i: int, j: int, value: int) -> None:
        """Let entry `j` of vector argument `i` be `value`."""
        self.arguments[i][j] = value

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Name -> (argument, place in it), for each name that only one entry of a vector has."""
        return places_of(self._fields)

    def set(self, name: str, value: int) -> None:
        """Let the entry of that name be `value`."""
        self.set_entry(*place_in(self.places, name, self.kernel.name), value)

    def setter(self, name: str) -> Callable[[int], None]:
        """A function that sets the entry of a name, with the least work."""
        return self._setter_at(*place_in(self.places, name, self.kernel.name))

    def _setter_at(self, i: int, j: int) -> Callable[[int], None]:
        numbers = self.arguments[i]
        if isinstance(numbers, memoryview):  # the launch reads this memory, so setting it is enough
            return functools.partial(operator.setitem, numbers, j)
        return functools.partial(self.set_entry, i, j)

    def launch(self) -> None:
        """Run the kernel; returns before the device is done, except on CPU."""
        raise AssertionError("a Bound is made by Kernel.bind")

    def launcher(self) -> Callable[[], None]:
        """A function that does `launch` with the least work."""
        return self.launch

    def release(self, which: Sequence[int] | None = None) -> None:
        """Drop arrays without an address, which would otherwise be kept alive; set them again to launch.

        `which` are the arguments that each launch sets; None: all arrays.
        """
        for i in range(len(self.arguments)) if which is None else which:
            value = self.arguments[i]
            if isinstance(value, ArrayView) and value.handle is not None:
                self.arguments[i] = None


class KeptBound(Bound):
    """CPU: one launch context, relaunched. Arrays are given by pointer; one that holds an ndarray cannot be kept."""

    def __init__(self, kernel: CompiledKernel, iterations: int, arguments: tuple[Any, ...]) -> None:
        super().__init__(kernel, iterations, arguments)
        self.context = _filled_context(self)
        self._set_array = self.context.set_arg_external_array_with_shape
        self._set_entry = self.context.set_struct_arg_int
        self._launch = kernel.runtime.program.launch_kernel
        self._compiled = kernel.compiled
        self._indices = [kernel.runtime.engine.argument_index(i) for i in range(len(arguments))]
        self._pointers = [value.ptr if isinstance(value, ArrayView) else 0 for value in arguments]
        self._spans = [value.span if isinstance(value, ArrayView) else 0 for value in arguments]

    def set_array(self, i: int, array: ArrayView) -> None:
        self.set_pointer(i, array.ptr)

    def set_pointer(self, i: int, pointer: int) -> None:
        if pointer != self._pointers[i]:
            self._pointers[i] = -1  # Ctrl-C may come at any line
            self._set_array(self._indices[i], pointer, self._spans[i], (self.iterations if i == 0 else 1,), 0)
            self._pointers[i] = pointer

    def set_entry(self, i: int, j: int, value: int) -> None:
        entries = self.arguments[i]
        if entries[j] != value:
            if not self.kernel.words[i]:
                entries[j] = None
                self._set_entry((i, j), value)
            entries[j] = value

    def launch(self) -> None:
        self._launch(self._compiled, self.context)

    def launcher(self) -> Callable[[], None]:
        return functools.partial(self._launch, self._compiled, self.context)


class FreshBound(Bound):
    """CUDA, Vulkan, Metal: a launch overwrites its context's pointers, so each launch fills a fresh one."""

    def launch(self) -> None:
        live = self.kernel.runtime
        if live.dropped.fresh:
            live.give_back()
        with live.turns:
            live.program.launch_kernel(self.kernel.compiled, _filled_context(self))


class PublicBound(Bound):
    """Any arch: a launch by the engine's public call, if ``TIKV_LAUNCHER`` is "public"."""

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
                values.append(_flat_array(value, word, self.iterations if i == 0 else None))
        with kernel.runtime.lock, kernel.runtime.compiling(kernel.fast_math), kernel.runtime.turns:
            kernel.function(*values)


def _retyped(handle: Any, word: str) -> Any:
    """The memory of a `ti.ndarray` under another element type, which the public call compares with the kernel's."""
    borrowed = type("Borrowed", (type(handle),), {"__init__": lambda self: None, "__del__": lambda self: None})()
    vars(borrowed).update(vars(handle), element_type=getattr(runtime.ti, word))
    return borrowed


def _filled_context(bound: Bound) -> Any:
    """A launch context of the engine's with the bound arguments in it."""
    kernel = bound.kernel
    context = kernel.traced.make_launch_context()
    index_of = kernel.runtime.engine.argument_index
    for i, value in enumerate(bound.arguments):
        if kernel.words[i]:
            if isinstance(value, memoryview):
                context.set_arg_external_array_with_shape(
                    index_of(i), np.asarray(value).ctypes.data, value.nbytes, [len(value)], 0
                )
            elif value.handle is not None:
                context.set_arg_ndarray(index_of(i), value.handle.arr)
            else:
                extent = bound.iterations if i == 0 else 1
                context.set_arg_external_array_with_shape(index_of(i), value.ptr, value.span, [extent], 0)
        elif kernel.lengths[i]:
            put = context.set_struct_arg_float if kernel.is_float[i] else context.set_struct_arg_int
            for j, entry in enumerate(value):
                put([i, j], entry)
        elif kernel.is_float[i]:
            context.set_arg_float(index_of(i), value)
        else:
            context.set_arg_int(index_of(i), value)
    return context


def _flat_array(array: ArrayView, word: str, extent: int | None) -> Any:
    """A flat NumPy or torch array over the same memory, for the public call; `extent` overrides its length."""
    dtype = np.dtype(NUMPY_WORDS[word])
    count = max(1, array.span // dtype.itemsize) if extent is None else extent
    if array.device == "cpu":
        return host_bytes(array.ptr, count * dtype.itemsize).view(dtype)
    torch = extras.need("torch", "launch: TIKV_LAUNCHER=public on CUDA")
    tensor = torch.as_tensor(CudaBytes(array.ptr, count * dtype.itemsize), device=array.device)
    return tensor.view(dtypes.to_torch(dtype.name))
