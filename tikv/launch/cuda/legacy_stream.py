"""CUDA by the engine's launchers, which know the legacy default stream alone."""

from __future__ import annotations

from tikv import extras
from tikv.errors import ArchError
from tikv.launch import launcher
from tikv.launch.bound import Bound, FreshBound, PublicBound
from tikv.launch.cuda import driver


class OnLegacyStream(Bound):
    """CUDA by the engine's launcher, which knows the legacy default stream: in order with torch's current stream."""

    def launch(self) -> None:
        if driver.capturing(self.kernel.runtime.index):
            kernel = self.kernel
            why = launcher.fallbacks.get(kernel.name) or launcher.launcher_report(kernel.runtime)["why"]
            used = kernel.runtime.engine
            way_out = (
                f"Pass arrays on the device. {extras.install('cuda')}"
                if used.has_known_ptx
                else "Use engine='taichi' for CUDA graphs"
            )
            raise ArchError(
                f"launch: {kernel.name} goes through {used.title}'s launcher, which a CUDA graph cannot capture "
                f"({why}). {way_out}; tikv.info() says which launcher is in use."
            )
        stream = driver.stream(self.kernel.runtime.index)
        if stream:
            driver.synchronize(stream)
        live = self.kernel.runtime
        with live.current_gpu():
            super().launch()
            if stream:
                live.program.synchronize()


class DirectOnCuda(OnLegacyStream, FreshBound):
    """CUDA by the engine's launcher, its launch context filled here."""


class PublicOnCuda(OnLegacyStream, PublicBound):
    """CUDA by the engine's public call."""
