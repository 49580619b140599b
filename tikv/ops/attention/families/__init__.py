"""The families of attention kernels: each has a class, which says what it serves, and how it shares out the work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tikv.ops.attention.families.form import Form as Form

if TYPE_CHECKING:  # families need kernels, and so the engine, which is imported as late as possible
    from tikv.ops.attention.families.family import Family


def families_of(style: str) -> tuple[type[Family], ...]:
    """The families whose kernels have a style of `Runtime.kernel_style`; the first that serves a form is chosen."""
    if style == "cpu":
        from tikv.ops.attention.families.cpu import Cpu, CpuInOrder

        return CpuInOrder, Cpu
    if style == "spirv":
        from tikv.ops.attention.families.spirv import Spirv

        return (Spirv,)
    from tikv.ops.attention.families.cuda import CudaBlocks, CudaLanes
    from tikv.ops.attention.families.tensor_cores import TensorChannels, TensorCodes, TensorRows
    from tikv.ops.attention.families.warpgroups import WarpgroupLatents, WarpgroupPrompts

    return WarpgroupLatents, WarpgroupPrompts, TensorChannels, TensorRows, TensorCodes, CudaLanes, CudaBlocks


def family_for(form: Form, native: bool = True) -> Family:
    """The family that attends to a form; without `native`, one whose kernels each launcher supports."""
    families = families_of(form.live.kernel_style)
    return next(f(form) for f in families if not f.why_not(form) and (native or not f.needs_native(form)))


def is_served(form: Form) -> bool:
    """Whether a family attends to a form; without one, keys by channel are read in another way."""
    return any(not family.why_not(form) for family in families_of(form.live.kernel_style))
