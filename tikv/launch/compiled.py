"""Kernels, compiled on first use and kept.

A runtime keeps each kernel that it compiled for as long as it lives, without a limit: there are as many as a program
uses forms of arrays, bound launches and graphs hold them anyway, and a dropped one would be compiled again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.errors import ArchError
from tikv.launch import launcher
from tikv.launch.bound import Bound, FreshBound, KeptBound, PublicBound
from tikv.launch.compilation import CompiledKernel, Factory
from tikv.launch.cuda import driver, keys, made, native
from tikv.launch.cuda.legacy_stream import DirectOnCuda, PublicOnCuda
from tikv.launch.cuda.native import Native, NativeBound
from tikv.launch.notices import notice
from tikv.launch.recorder import Recorded, bind_recorded


class NeedsNativeLauncher(ArchError):
    """A kernel needs what only the native launcher provides, which is missing or refused the kernel."""


class Kernel(CompiledKernel):
    """A compiled kernel of one runtime, bound to arguments by the launcher of its arch."""

    native: Native | None = None  # the driver's form, once a launch was bound natively

    def compile(self) -> None:
        """As in `CompiledKernel`, with a notice if it takes long."""
        if self.compiled is None:
            with notice.compiling(self.title, self.runtime.arch):
                super().compile()

    def bind(self, iterations: int, *arguments: Any) -> Bound:
        """Bind arguments in the order of the signature: an `ArrayView` for an array, a tuple for a vector, or a number.

        On CPU a tuple may also be given for an array of i32: the launch then holds these numbers in its own memory. A
        NamedTuple, or several in `vectors.joined`, names its entries for `Bound.set` and `Bound.setter`.
        """
        if self.needs_native and not self.runtime.engine.has_known_ptx and not self.is_made:
            raise self._needs_native("no file of kernels made beforehand has it")
        bound = bind_recorded(self, iterations, arguments)
        if bound is not None:
            return bound
        launcher_name = launcher.launcher_of(self.runtime)[0]
        if launcher_name == "native":
            bound = self._bind_native(iterations, arguments)
            if bound is not None:
                return bound
            launcher_name = "direct"
        if self.needs_native:
            raise self._needs_native(launcher.fallbacks.get(self.name, f"the launcher is {launcher_name!r}"))
        if self.runtime.index:
            raise ArchError(
                f"{self.name}: {self.runtime.device} needs the native launcher, which cannot launch this kernel "
                f"({launcher.fallbacks.get(self.name, 'it was not chosen')}). Move the arrays to cuda:0."
            )
        self.compile()
        if self.runtime.is_cuda:
            return (PublicOnCuda if launcher_name == "public" else DirectOnCuda)(self, iterations, arguments)
        if launcher_name == "public":
            return PublicBound(self, iterations, arguments)
        return (KeptBound if self.runtime.is_cpu else FreshBound)(self, iterations, arguments)

    @functools.cached_property
    def is_made(self) -> bool:
        """Whether a file of kernels made beforehand has it, for the runtime's GPU."""
        target = driver.device(self.runtime.index).target
        return made.has(keys.made_key_of(self.factory, self.choices), target)

    def _needs_native(self, why: str) -> NeedsNativeLauncher:
        """That the native launcher cannot take this kernel, and no other can."""
        what = "shared memory" if self.shared_bytes else "arithmetic or instructions"
        way_out = "Unset TIKV_LAUNCHER" if self.runtime.engine.has_known_ptx else "Use engine='taichi'"
        return NeedsNativeLauncher(
            f"{self.name}: this kernel needs {what} that only the native launcher provides, and that launcher "
            f"is not used here ({why}). {way_out}."
        )

    def _bind_native(self, iterations: int, arguments: tuple[Any, ...]) -> Bound | None:
        """A native launch; None if only the engine's launcher can do it: arrays on the host, or PTX of unknown form."""
        if any(self.words[i] and array.device == "cpu" for i, array in enumerate(arguments)):
            return None
        if self.native is None:
            if self.name in launcher.fallbacks:
                return None
            try:
                with notice.compiling(self.title, self.runtime.arch):
                    self.native = native.load_native(self)
            except ArchError as error:
                was_expected = isinstance(error, made.NotMade)
                captured = driver.capturing(self.runtime.index) and not was_expected
                if captured or launcher.launcher_setting() == "native":
                    raise
                launcher.fallbacks[self.name] = str(error)
                level = logging.INFO if was_expected else logging.WARNING
                runtime.log.log(
                    level, "kernel %s keeps %s's own launcher: %s", self.name, self.runtime.engine.title, error
                )
                return None
        return NativeBound(self, iterations, arguments, self.native)


def kernel(live: runtime.Runtime, factory: Factory, *choices: Any) -> Kernel:
    """The compiled kernel for a factory and its choices in a runtime; compiled on first use, then kept."""
    key = (factory, choices)
    compiled: Kernel | None = live.kernels.get(key)
    if compiled is None:
        with live.lock:
            compiled = live.kernels.get(key)
            if compiled is None:
                runtime.log.info("compiling %s, once", factory.__name__)
                compiled = live.kernels[key] = Kernel(live, factory, choices)
    return compiled


def bind_again(recorded: Recorded) -> Bound:
    """A recorded launch, bound so that it can run."""
    assert isinstance(recorded.kernel, Kernel)
    return recorded.kernel.bind(recorded.iterations, *recorded.arguments)


def bind_elsewhere(bound: Bound, arrays: Iterable[ArrayView]) -> Bound:
    """The same launch over other arrays of the same forms, in the order of its arguments."""
    assert isinstance(bound.kernel, Kernel)
    rest = iter(arrays)
    return bound.kernel.bind(bound.iterations, *[next(rest) if n is None else n for n in bound.numbers])
