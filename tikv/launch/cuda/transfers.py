"""Copies from the host's page-locked memory to a GPU's, on a stream beside the one that computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.launch.cuda import driver


@functools.cache
def _stream_of_copies(index: int) -> int:
    """The handle of a GPU's stream for copies. It lives as long as the process: memory dropped later waits for it."""
    cu = driver.binding()
    with driver.device(index).entered():
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return int(driver.checked(cu.cuStreamCreate(flags), "cuStreamCreate"))


class _Event:
    """A point in a stream of CUDA, for which another stream can wait: `record` marks it, `wait` waits for it."""

    def __init__(self) -> None:
        cu = driver.binding()
        flags = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        self.handle = driver.checked(cu.cuEventCreate(flags), "cuEventCreate")

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None and not runtime.is_forked():
            driver.binding().cuEventDestroy(self.handle)

    def record(self, stream: int) -> None:
        """Mark the end of the work that the stream has been given so far."""
        driver.checked(driver.binding().cuEventRecord(self.handle, driver.stream_object(stream)), "cuEventRecord")

    def wait(self, stream: int) -> None:
        """Make the stream wait for this point; without a wait if it was never recorded."""
        cu = driver.binding()
        driver.checked(cu.cuStreamWaitEvent(driver.stream_object(stream), self.handle, 0), "cuStreamWaitEvent")


class DriverTransfer:
    """Repeated copies from the host's memory to one place on the GPU.

    `start` waits for the earlier work of the current stream, which includes all writes to the source, and for `used`.
    Code that reads the copy calls `wait` before it reads, and `used` afterwards.
    """

    def __init__(self, live: runtime.Runtime) -> None:
        self._index = live.index
        self._device = driver.device(live.index)
        self._copies = _stream_of_copies(live.index)
        live.copy_streams.add(self._copies)  # memory that is dropped waits for it
        with self._device.entered():
            self._arrived, self._used, self._before = _Event(), _Event(), _Event()

    def start(self, pairs: Sequence[tuple[ArrayView, ArrayView, int]]) -> None:
        """Copy the first `count` entries of the third axis of each host array to the array on the GPU."""
        with self._device.entered():
            self._before.record(driver.stream(self._index))
            self._before.wait(self._copies)
            self._used.wait(self._copies)
            for source, to, count in pairs:
                _copy(source, to, count, self._copies)
            self._arrived.record(self._copies)

    def wait(self) -> None:
        """Make the next launches wait for the copy."""
        with self._device.entered():
            self._arrived.wait(driver.stream(self._index))

    def used(self) -> None:
        """Make the next copy wait for the launches so far."""
        with self._device.entered():
            self._used.record(driver.stream(self._index))


def _copy(source: ArrayView, to: ArrayView, count: int, stream: int) -> None:
    """Copy the first `count` entries of the third axis of a (batch, heads, n, ...) array to an array with any n.

    It takes one command, for one piece of memory or for one piece per head.
    """
    cu, queue, heads = driver.binding(), driver.stream_object(stream), source.shape[0] * source.shape[1]
    if not count or not heads:
        return
    of_head, of_head_there = source.nbytes // heads, to.nbytes // heads
    filled = of_head // source.shape[2] * count
    if heads == 1 or filled == of_head == of_head_there:
        driver.checked(cu.cuMemcpyHtoDAsync(to.ptr, source.ptr, heads * filled, queue), "cuMemcpyHtoDAsync")
        return
    whole: Any = cu.CUDA_MEMCPY2D()
    whole.srcMemoryType, whole.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST, cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    whole.srcHost, whole.dstDevice = source.ptr, to.ptr
    whole.srcPitch, whole.dstPitch = of_head, of_head_there
    whole.WidthInBytes, whole.Height = filled, heads
    driver.checked(cu.cuMemcpy2DAsync(whole, queue), "cuMemcpy2DAsync")
