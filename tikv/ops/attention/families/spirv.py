"""Attention on Vulkan and Metal: the threads of a block share a task's keys, see `kernels.attention.spirv`."""

from __future__ import annotations

from typing import Any

from tikv import launch
from tikv.kernels import lanes
from tikv.kernels.attention.spirv.attend import make_attend_block, make_attend_block_in_order
from tikv.ops.attention.families.family import Family


class Spirv(Family):
    """Kernels of blocks, which reduce over subgroups if the device can."""

    title = "blocks of threads"
    serves = "all calls, except over keys by channel"

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        make = make_attend_block_in_order if self.live.invariant else make_attend_block
        reduce = lanes.SINGLE if launch.why_no_subgroups(self.live) else lanes.SUBGROUP
        return make, (self.live.kernel_style, reduce)
