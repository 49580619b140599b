"""Host memory that a GPU's kernels read and write in place, over the link between both."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays.array_view import ALIGNMENT
from tikv.arrays.memory import Memory, RoomFor
from tikv.errors import ArchError


def memory_of_host(nbytes: int, live: runtime.Runtime) -> Memory:
    """A block of host memory that the device's kernels can use: page-locked on CUDA, ordinary memory on CPU.

    Raises:
        ArchError: kernels of this device cannot address it.
        CapacityError: there is not enough memory.
    """
    if live.is_cpu:
        return Memory(nbytes, live)
    if not live.is_cuda:
        raise ArchError(
            f"memory: kernels on {live.device} cannot read the host's memory. Use memory of the device, or CPU or CUDA."
        )
    return PageLocked(nbytes, live)


class PageLocked(Memory):
    """Page-locked memory of the host, at one address for the host and for all GPUs. NumPy sees its bytes as `block`."""

    def __init__(self, nbytes: int, live: runtime.Runtime) -> None:
        self.runtime, self.device, self.nbytes = live, live.device, nbytes
        self.handle, self.ptr = None, 0
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with RoomFor(size, "the host (page-locked)"):
            self.ptr = runtime.lock_pages(size, live.index)
        self.block: Any = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.ptr))

    def __del__(self) -> None:
        # As in `Memory`: at the interpreter's end and in a forked process the memory cannot be freed.
        if not getattr(self, "ptr", 0) or sys is None or sys.is_finalizing() or runtime is None or runtime.is_forked():
            return
        runtime.unlock_pages(self.ptr, self.runtime.index)

    def clear(self) -> None:
        """Set every byte to zero."""
        self.runtime.synchronize()
        self.block.fill(0)
