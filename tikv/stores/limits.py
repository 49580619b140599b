"""How large one piece of memory may be."""

from __future__ import annotations

from tikv import runtime

# The largest block that a launch addresses.
BLOCK_BYTES = {"cpu": 2**33, "cuda": 2**33, **dict.fromkeys(("vulkan", "metal", "amdgpu"), 2**32 - 64)}
# The largest block that several layers share, if that is less. Apple promises a `maxBufferLength` of 256 MiB, Vulkan a
# `maxMemoryAllocationSize` of 1 GiB. Whether a device has larger ones depends on it, so a larger block is allocated
# only for a layer that needs it.
SHARED_BYTES = {"metal": 2**28, "vulkan": 2**30}


def shared_bytes(live: runtime.Runtime) -> int:
    """The largest block that layers share."""
    return min(BLOCK_BYTES[live.arch], SHARED_BYTES.get(live.arch, BLOCK_BYTES[live.arch]))
