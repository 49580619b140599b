"""Starts the engine, or attaches to the one that the caller started, and describes this machine.

`from tikv.runtime import ti` loads the engine on first use, quietly and without a version check on the network.
`current()` gives the live runtime. A runtime ends when `ti.init` or `ti.reset` is called again, and everything made in
it becomes invalid.

`start` does this, and `engine` is the only module that imports Taichi or Quadrants; `devices` knows the machine, and
`cache` has the one class for what is made once and kept. `real_functions` makes the keys of the engine's disk cache the
same in every process, `cache_lock` removes locks that a killed process left there, and `tracing` spares the engine work
that it would repeat for each call of a function. `copying` decides what is copied, and `dropped` gives memory back.
"""

from __future__ import annotations

from typing import Any

from tikv.engines import version_of as version_of
from tikv.runtime import engine
from tikv.runtime.copying import DeepCopied as DeepCopied
from tikv.runtime.copying import NotCopied as NotCopied
from tikv.runtime.devices import ARCHS as ARCHS
from tikv.runtime.devices import SPIRV_ARCHS as SPIRV_ARCHS
from tikv.runtime.devices import current_gpu as current_gpu
from tikv.runtime.devices import device_name as device_name
from tikv.runtime.devices import lock_pages as lock_pages
from tikv.runtime.devices import memory_bytes as memory_bytes
from tikv.runtime.devices import shares_memory as shares_memory
from tikv.runtime.devices import unlock_pages as unlock_pages
from tikv.runtime.devices import usable_cores as usable_cores
from tikv.runtime.devices import vulkan_devices as vulkan_devices
from tikv.runtime.devices import vulkan_drivers_known as vulkan_drivers_known
from tikv.runtime.devices import vulkan_subgroups as vulkan_subgroups
from tikv.runtime.engine import engine_in_use as engine_in_use
from tikv.runtime.engine import engine_report as engine_report
from tikv.runtime.engine import is_stale_ndarray as is_stale_ndarray
from tikv.runtime.start import Runtime as Runtime
from tikv.runtime.start import Turns as Turns
from tikv.runtime.start import before_synchronize as before_synchronize
from tikv.runtime.start import candidate_archs as candidate_archs
from tikv.runtime.start import current as current
from tikv.runtime.start import init as init
from tikv.runtime.start import is_forked as is_forked
from tikv.runtime.start import is_started as is_started
from tikv.runtime.start import log as log
from tikv.runtime.start import require_alive as require_alive
from tikv.runtime.start import running as running
from tikv.runtime.start import thread_plans as thread_plans
from tikv.runtime.start import why_auto as why_auto


def __getattr__(name: str) -> Any:
    if name == "ti":
        return engine.load()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
