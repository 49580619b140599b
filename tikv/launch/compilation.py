"""A kernel compiled for one runtime, and the types of its arguments; this module does not launch it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tikv import runtime
from tikv.dtypes import NUMPY_WORDS
from tikv.launch import pending

Factory = Callable[..., Any]


class CompiledKernel:
    """A compiled kernel of one runtime: a factory and its compile-time choices.

    Arrays are flat: a kernel sees words from a view's first element on. On CPU and CUDA the first array's extent is
    the number of iterations, which the kernel's one loop runs over; on Vulkan and Metal a vector carries it.
    """

    def __init__(self, live: runtime.Runtime, factory: Factory, choices: tuple[Any, ...]) -> None:
        self.runtime = live
        self.factory = factory
        self.choices = choices
        self.fast_math = bool(getattr(factory, "fast_math", False))
        shared_bytes = getattr(factory, "shared_bytes", None)  # per block; only the native launcher gives it
        self.shared_bytes = int(shared_bytes(*choices)) if shared_bytes else 0
        needs_native = getattr(factory, "needs_native", None)  # for instructions that Taichi's text has as comments
        self.needs_native = self.shared_bytes > 0 or (needs_native is not None and needs_native(*choices))
        if getattr(factory, "uses_bitcode", False) and not live.engine.has_bitcode:
            self.needs_native = True  # only another engine can compile it
        self.seconds_read = 0.0  # of the engine, to turn the kernel's source into its program
        self.seconds_compiled = 0.0  # of its compiler, or to read what it made earlier from the disk
        with live.lock, live.compiling(self.fast_math):
            begin = time.perf_counter()
            self.function = factory(*choices)
            self.seconds_read += time.perf_counter() - begin
            self.primal = self.function._primal
            live.own_kernels()
            annotations = live.engine.annotations(self.primal)
            self.words = [str(a.dtype) if hasattr(a, "ndim") and not hasattr(a, "n") else None for a in annotations]
            self.lengths = [int(a.n) if hasattr(a, "n") else 0 for a in annotations]
            self.is_float = ["f" in str(getattr(a, "dtype", a)) for a in annotations]
        self.traced: Any = None
        self.compiled: Any = None

    def trace(self) -> None:
        """Let the engine read the kernel's source, unless it has done so."""
        with self.runtime.lock, self.runtime.compiling(self.fast_math):
            self._trace()

    def _trace(self) -> None:
        if self.traced is None:
            placeholders = [self._placeholder(i) for i in range(len(self.words))]
            begin = time.perf_counter()
            self.traced = self.runtime.engine.traced(self.primal, placeholders)
            self.seconds_read += time.perf_counter() - begin

    def compile(self) -> None:
        """Compile for the engine's launcher, in this process, unless it is compiled already."""
        if self.compiled is not None:
            return
        live = self.runtime
        if not live.has_compiled:
            pending.wait_for(pending.ENGINE)
        with live.lock, live.compiling(self.fast_math):
            if self.compiled is None:
                self._trace()
                begin = time.perf_counter()
                live.has_compiled = True
                self.compiled = live.engine.compiled(live.program, self.traced)
                self.seconds_compiled = time.perf_counter() - begin

    def _placeholder(self, i: int) -> Any:
        if word := self.words[i]:
            return np.zeros(1, NUMPY_WORDS[word])
        if self.lengths[i]:
            return runtime.ti.Vector([0] * self.lengths[i], runtime.ti.f32 if self.is_float[i] else runtime.ti.i32)
        return 0.0 if self.is_float[i] else 0

    @property
    def title(self) -> str:
        """What the kernel does, in words."""
        return self.factory.__name__.removeprefix("make_").replace("_", " ")

    @functools.cached_property
    def name(self) -> str:
        """A readable identity: the factory and its choices."""
        return f"{self.factory.__name__.removeprefix('make_')}({', '.join(map(str, self.choices))})"
