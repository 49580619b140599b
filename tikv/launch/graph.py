"""Launches as one compiled `ti.graph`, for archs whose memory has no address."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.launch.compilation import CompiledKernel
from tikv.launch.vectors import fields_of, place_in, places_of


class TaichiGraph:
    """Launches as one compiled `ti.graph` over whole `ti.ndarray`s, which Vulkan and Metal have instead of addresses.

    Taichi's own `dispatch` requires an ndarray with the kernel's element type. Here ndarrays hold words that kernels
    read as any type, so kernels are compiled here and passed to the graph directly.

    Args:
        launches: the kernel and arguments of each launch; an array argument is the name of an ndarray.
        ndarrays: one for each name, with the element type of those that runs will use.
    """

    def __init__(self, launches: Sequence[tuple[CompiledKernel, Sequence[Any]]], ndarrays: dict[str, Any]) -> None:
        graph, kinds = runtime.ti.graph, runtime.ti.graph.ArgKind
        arrays = {name: graph.Arg(kinds.NDARRAY, name, a.dtype, ndim=1) for name, a in ndarrays.items()}
        self._values: dict[str, Any] = dict(ndarrays)  # the next run's ndarrays, numbers and vectors, by name
        self._names = list(ndarrays)
        self._launches = [(kernel, fields_of(arguments, kernel.is_float)) for kernel, arguments in launches]
        builder = graph.GraphBuilder()
        for n, (kernel, arguments) in enumerate(launches):
            kernel.compile()
            parameters = []
            for i, argument in enumerate(arguments):
                number = runtime.ti.f32 if kernel.is_float[i] else runtime.ti.i32
                if kernel.words[i]:
                    parameters.append(arrays[argument])
                    continue
                name = f"{n}.{i}"
                if kernel.lengths[i]:
                    parameters.append(graph.Arg(kinds.MATRIX, name, runtime.ti.types.vector(kernel.lengths[i], number)))
                    self._values[name] = runtime.ti.Vector(list(argument), number)
                else:
                    parameters.append(graph.Arg(kinds.SCALAR, name, number))
                    self._values[name] = argument
            builder._graph_builder.dispatch(kernel.traced, parameters)
        self._compiled = builder.compile()
        self._runtime = launches[0][0].runtime

    def set_array(self, i: int, array: ArrayView) -> None:
        """Replace the `i`-th ndarray, in the order in which they were given, by that of `array`."""
        self._values[self._names[i]] = array.handle

    def setter(self, n: int, name: str) -> Callable[[int], None]:
        """A function that sets the entry of that name in launch `n`."""
        kernel, fields = self._launches[n]
        i, j = place_in(places_of(fields), name, kernel.name)
        return functools.partial(operator.setitem, self._values[f"{n}.{i}"].entries, j)

    def launch(self) -> None:
        """Run all launches in their order; returns before the device is done."""
        with self._runtime.turns:
            self._compiled.run(self._values)

    def release(self, which: Sequence[int]) -> None:
        """Drop these ndarrays, which would otherwise be kept alive; set them again to launch."""
        for i in which:
            self._values[self._names[i]] = None
