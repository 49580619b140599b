"""tikv on Metal without a Mac: Taichi runs on another back end, tikv believes it is Metal, and kernels run on the CPU.

A launch does what Taichi's runtime does on Metal. Arrays of the host go to the GPU's memory and back by copies, and of
those that a kernel only writes there is nothing to be read: what it leaves alone has no likely value.
"""

import ctypes
import functools
import operator
import pathlib
from collections import Counter
from typing import Any

import numpy as np

from metal_on_cpu import taichi_source
from metal_on_cpu.library import MetalFunction, Options
from tikv import launch, runtime
from tikv.kernels import lanes
from tikv.launch import ahead, bound, compiled, subgroups, vectors
from tikv.runtime import engine

UNSET = 0xA5


class BackEnd:
    """The Metal that runs here.

    Attributes:
        options: of launches from now on.
        folder: where compiled code is kept.
        known: `Source` by kernel's name; others are compiled when they are launched.
        launched: the names of kernels that were launched, with how often.
    """

    def __init__(self, options: Options, folder: pathlib.Path, known: dict[str, Any] | None = None) -> None:
        self.options = options
        self.folder = folder
        self.known = dict(known or {})
        self.launched: Counter[str] = Counter()
        self._launches: dict[tuple[str, Options], LaunchedOnCpu] = {}

    def launch(self, kernel, arguments, iterations):
        """Launch a kernel of tikv's with the arguments of a `Bound`."""
        key = kernel.name, self.options
        if key not in self._launches:
            if kernel.name not in self.known:
                self.known[kernel.name] = taichi_source.source_of(kernel)
            self._launches[key] = LaunchedOnCpu(self.known[kernel.name], self.options, self.folder)
        self.launched[kernel.name] += 1
        self._launches[key](kernel, arguments, iterations)


class LaunchedOnCpu:
    """A kernel's Metal source, launched as Taichi's runtime does it."""

    def __init__(self, source, options, folder):
        self.arguments = ahead.arguments_of(source)
        self.size = source.arguments["args_bytes_"]
        self.bindings = {bind["binding"]: bind["buffer"]["root_id"][0] for bind in source.task["buffer_binds"]}
        self.groups = -(-source.task["advisory_total_num_threads"] // source.task["advisory_num_threads_per_group"])
        self.function = MetalFunction(source.metal, options, folder, [a.offsets[0] for a in self.arguments])

    def __call__(self, kernel, arguments, iterations):
        given: list[Any] = []  # of an array its bytes and its extent, else the value
        back: list[tuple[Any, np.ndarray]] = []
        ndarrays: dict[int, np.ndarray] = {}  # bytes by the id of a ti.ndarray, which may be given twice
        for i, value in enumerate(arguments):
            if not kernel.words[i]:
                given.append(value)
                continue
            array = getattr(value, "handle", None)
            if array is None and hasattr(value, "arr"):
                array = value
            if array is None:
                memory, extent = self._copied(i, value, iterations if i == 0 else 1, back)
            else:
                if id(array) not in ndarrays:
                    ndarrays[id(array)] = bytes_of(array, kernel.runtime)
                memory, extent = ndarrays[id(array)], array.shape[0]
                if self.arguments[i].written and not is_on_host(kernel.runtime):
                    back.append((array, memory))
            given.append((memory, extent))
        self._launch(given)
        for to, memory in back:
            if hasattr(to, "from_numpy"):
                like = to.to_numpy()
                to.from_numpy(memory.view(like.dtype).reshape(like.shape))
            else:
                ctypes.memmove(to, memory.ctypes.data, memory.nbytes)

    def _copied(self, i, value, extent, back):
        """An array of the host: its bytes, copied if the kernel reads them, and its extent."""
        if isinstance(value, memoryview):
            value = np.asarray(value)
        if isinstance(value, np.ndarray):
            address, size, extent = value.ctypes.data, value.nbytes, value.shape[0]
        else:
            address, size = value.ptr, value.span
        memory = np.full(size, UNSET, np.uint8)
        if self.arguments[i].read:
            ctypes.memmove(memory.ctypes.data, address, size)
        if self.arguments[i].written:
            back.append((address, memory))
        return memory, extent

    def _launch(self, given):
        packed = np.zeros(self.size, np.uint8)
        for argument, value in zip(self.arguments, given, strict=True):
            # Of an array its extent; where a pointer would stand there is a buffer instead.
            entries = (value[1],) if isinstance(value, tuple) else np.atleast_1d(value)
            for at, is_float, entry in zip(argument.offsets, argument.is_float, entries, strict=False):
                dtype = np.float32 if is_float else np.int32
                packed[at : at + 4] = np.array([entry], dtype).view(np.uint8)
        buffers = {binding: packed if i == ahead.ARGUMENTS else given[i][0] for binding, i in self.bindings.items()}
        self.function(self.groups, buffers)


def is_on_host(live):
    """Whether the memory of a `ti.ndarray` is the host's."""
    return live.program.config().arch in (runtime.ti.x64, runtime.ti.arm64)


def bytes_of(array, live):
    """The bytes of a `ti.ndarray`: themselves where they are the host's, else a copy."""
    if not is_on_host(live):
        return np.ascontiguousarray(array.to_numpy()).reshape(-1).view(np.uint8).copy()
    live.synchronize()
    size = array.arr.nelement() * array.arr.element_size()
    address = live.program.get_ndarray_data_ptr_as_int(array.arr)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class GraphOnCpu(launch.TaichiGraph):
    """The launches of a `ti.graph`, one after the other."""

    def __init__(self, back_end, launches, ndarrays):
        self._back_end = back_end
        self._values, self._names = dict(ndarrays), list(ndarrays)
        self._launches = [(kernel, vectors.fields_of(arguments, kernel.is_float)) for kernel, arguments in launches]
        self._given = [[list(a) if isinstance(a, tuple) else a for a in arguments] for _, arguments in launches]

    def setter(self, n, name):
        kernel, fields = self._launches[n]
        i, j = vectors.place_in(vectors.places_of(fields), name, kernel.name)
        return functools.partial(operator.setitem, self._given[n][i], j)

    def launch(self):
        for (kernel, _), given in zip(self._launches, self._given, strict=True):
            arguments = [self._values[a] if kernel.words[i] else a for i, a in enumerate(given)]
            self._back_end.launch(kernel, arguments, 0)


def install(back_end, under):
    """Let tikv start on "metal", which is this back end, with Taichi on another: "vulkan", or "cpu".

    On Vulkan kernels are compiled as they are wanted; on the CPU all have to be known. There is no way back.
    """
    start, arch_of, on_metal = engine.start, engine.arch_of, [False]

    def start_here(arch, options):
        on_metal[0] = arch == "metal"
        start(under if on_metal[0] else arch, options)

    def arch_here(program):
        found = arch_of(program)
        return "metal" if on_metal[0] and found == under else found

    engine.start, engine.arch_of = start_here, arch_here

    def on_cpu_if_metal(original, instead):
        """A method of something bound or compiled, replaced where its runtime is on Metal."""

        @functools.wraps(original)
        def chosen(self):
            live = (self.kernel if isinstance(self, launch.Bound) else self).runtime
            return instead(self) if live.arch == "metal" else original(self)

        return chosen

    def launch_bound(self):
        back_end.launch(self.kernel, self.arguments, self.iterations)

    for kind in (bound.FreshBound, bound.PublicBound):
        kind.launch = on_cpu_if_metal(kind.launch, launch_bound)
    compiled.Kernel.compile = on_cpu_if_metal(compiled.Kernel.compile, lambda self: None)

    tried, graph = subgroups.tried, launch.TaichiGraph

    def tried_here(live):
        if live.arch != "metal":
            return tried(live)
        trial = launch.kernel(live, lanes.make_self_test, lanes.SUBGROUP)
        found = np.zeros(lanes.SELF_TEST_ROWS * lanes.BLOCK, np.float32)
        back_end.launch(trial, [found], 0)
        return "" if lanes.self_test_passed(found) else subgroups.WRONG

    def graph_here(launches, ndarrays):
        live = launches[0][0].runtime
        return GraphOnCpu(back_end, launches, ndarrays) if live.arch == "metal" else graph(launches, ndarrays)

    subgroups.tried, launch.TaichiGraph = tried_here, graph_here
    runtime.log.info("Metal is this machine's CPU")
