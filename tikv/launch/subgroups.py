"""Whether the kernels of a runtime may reduce over the subgroups of its device."""

from __future__ import annotations

import numpy as np

from tikv import runtime
from tikv.launch.compiled import kernel


def has_subgroups(live: runtime.Runtime) -> bool:
    """Whether kernels may reduce over subgroups here: the driver announces it, and a trial has the right numbers.

    The trial is not for nothing: Taichi 1.7.4 emits the operations without declaring their SPIR-V capability.
    """
    if live.has_subgroups is None:
        # Every Mac's GPU that Taichi runs on reduces over its SIMD groups; a Vulkan driver says whether it does.
        announced = live.arch == "metal" or (live.arch == "vulkan" and runtime.vulkan_subgroups())
        live.has_subgroups = announced and _agree(live)
    return live.has_subgroups


def _agree(live: runtime.Runtime) -> bool:
    from tikv.kernels import lanes

    tried = kernel(live, lanes.make_self_test, lanes.SUBGROUP)
    found = np.zeros(lanes.SELF_TEST_ROWS * lanes.BLOCK, np.float32)
    with live.lock, live.compiling(tried.fast_math):
        tried.function(found)
    right: bool = lanes.self_test_passed(found)
    if not right:
        runtime.log.warning("subgroup operations give wrong numbers on %s: attention does without", live.arch)
    return right
