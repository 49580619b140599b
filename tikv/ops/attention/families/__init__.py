"""The families of attention kernels: each has a class, which says what it serves, and how it shares out the work.

`form` is what a family is chosen by, and `family` what all of them have. `cpu`, `spirv`, `cuda`, `tensor_cores` and
`warpgroups` have the classes of an architecture; `families_of` has their order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from tikv import runtime
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
    from tikv.ops.attention.families.warpgroups import WarpgroupCodes, WarpgroupLatents, WarpgroupPrompts

    of_warpgroups = WarpgroupLatents, WarpgroupCodes, WarpgroupPrompts
    return *of_warpgroups, TensorChannels, TensorRows, TensorCodes, CudaLanes, CudaBlocks


def that_need_native(form: Form) -> set[type[Family]]:
    """The families whose kernels for a form need the native launcher."""
    return {family for family in families_of(form.live.kernel_style) if family.needs_native(form)}


def why_not_families(form: Form, refused: Collection[type[Family]] = ()) -> Iterator[tuple[type[Family], str]]:
    """The families in their order, each with the reason why it does not serve a form; "" if it does.

    The native launcher does not launch the kernels of those that are `refused`.
    """
    for family in families_of(form.live.kernel_style):
        unlaunched = "the native launcher does not launch their kernel" if family in refused else ""
        yield family, family.why_not(form) or unlaunched


def family_for(form: Form, refused: Collection[type[Family]] = ()) -> Family:
    """The family that attends to a form: the first that serves it."""
    return next(family(form) for family, why in why_not_families(form, refused) if not why)


def is_served(form: Form) -> bool:
    """Whether a family attends to a form; without one, keys by channel are read in another way."""
    return any(not why for _, why in why_not_families(form))


def explain(form: Form, refused: Collection[type[Family]] = ()) -> str:
    """Which family attends to a form, and why those before it in the order do not."""
    reasons, title = [], "scores that are computed first"  # see `by_channel`
    for family, why in why_not_families(form, refused):
        if not why:
            title = family.title
            break
        reasons.append(f"not by {family.title}: {why}")
    return "; ".join([f"by {title}", *reasons])


def log_choice(operation: str, form: Form, refused: Collection[type[Family]] = ()) -> None:
    """Log `explain`, if the logger "tikv" has the level DEBUG."""
    if runtime.log.isEnabledFor(logging.DEBUG):
        runtime.log.debug("%s: attention %s", operation, explain(form, refused))
