"""How large one piece of memory may be, and a whole store; and how many launches a store keeps."""

from __future__ import annotations

from tikv import runtime
from tikv.errors import CapacityError
from tikv.stores.picture import size_in_words

# The largest block that a launch addresses.
BLOCK_BYTES = {"cpu": 2**33, "cuda": 2**33, **dict.fromkeys(("vulkan", "metal", "amdgpu"), 2**32 - 64)}
# The largest block that several layers share, if that is less. Apple promises a `maxBufferLength` of 256 MiB, Vulkan a
# `maxMemoryAllocationSize` of 1 GiB. Whether a device has larger ones depends on it, so a larger block is allocated
# only for a layer that needs it.
SHARED_BYTES = {"metal": 2**28, "vulkan": 2**30}

# Forms of new rows for which a layer keeps its launches, a few KB each: each prompt may have a length of its own.
FORMS_OF_LAYER = 64


def shared_bytes(live: runtime.Runtime) -> int:
    """The largest block that layers share."""
    return min(BLOCK_BYTES[live.arch], SHARED_BYTES.get(live.arch, BLOCK_BYTES[live.arch]))


def require_memory(nbytes: int, live: runtime.Runtime, operation: str, remedy: str, on_host: bool = False) -> None:
    """Check that the device, or the host with `on_host`, has this much memory, whether or not it is free.

    A system that promises more memory than it has would end the process only when tokens fill it.

    Raises:
        CapacityError: it has not.
    """
    limit = runtime.memory_bytes("cpu") if on_host else runtime.memory_bytes(live.arch, live.index)
    if limit is not None and nbytes > limit:
        where = "the host" if on_host else live.device
        raise CapacityError(
            f"{operation}: {nbytes} bytes are needed ({size_in_words(nbytes)}), and {where} has {limit} bytes of "
            f"memory in all ({size_in_words(limit)}). {remedy}"
        )
