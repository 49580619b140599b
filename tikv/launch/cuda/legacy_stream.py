"""Launch on CUDA with the engine's launchers, which know only the legacy default stream."""

from __future__ import annotations

from tikv import extras
from tikv.errors import ArchError
from tikv.launch import launcher
from tikv.launch.bound import Bound, FreshBound, PublicBound
from tikv.launch.cuda import driver


class OnLegacyStream(Bound):
    """A launch by the engine's launcher on the legacy default stream, in order with torch's current stream."""

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
    """A launch by the engine's launcher, with a launch context that is filled here."""


class PublicOnCuda(OnLegacyStream, PublicBound):
    """A launch by the engine's public call."""
