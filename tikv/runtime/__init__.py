"""Start Taichi, or attach to the one the caller started, and say what this machine is.

`from tikv.runtime import ti` loads Taichi on first use, quietly and without its version check. `current()` gives the
live runtime; a runtime dies when somebody calls `ti.init` or `ti.reset` again, and everything made in it dies with it.
"""

from __future__ import annotations

from typing import Any

from tikv.runtime import engine
from tikv.runtime.devices import (
    ARCHS,
    candidate_archs,
    device_name,
    memory_bytes,
    version_of,
    vulkan_devices,
    vulkan_subgroups,
)
from tikv.runtime.engine import is_stale_ndarray
from tikv.runtime.start import (
    Runtime,
    before_synchronize,
    current,
    init,
    is_started,
    log,
    recorded,
    require_alive,
    running,
    side_streams,
)

__all__ = [
    "ARCHS",
    "Runtime",
    "before_synchronize",
    "candidate_archs",
    "current",
    "device_name",
    "init",
    "is_stale_ndarray",
    "is_started",
    "log",
    "memory_bytes",
    "recorded",
    "require_alive",
    "running",
    "side_streams",
    "version_of",
    "vulkan_devices",
    "vulkan_subgroups",
]


def __getattr__(name: str) -> Any:
    if name == "ti":
        return engine.load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
