"""tikv's own memory on the device of the live runtime, and copies between it and the host."""

from __future__ import annotations

import concurrent.futures
import ctypes
import math
import re
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import ALIGNMENT, MAX_FORMS, ArrayView, Host, contiguous_strides, host_buffer, numpy_address
from tikv.dtypes import DType
from tikv.errors import ArchError, CapacityError
from tikv.runtime.cache import BoundedCache

MOST_WORDS = 2**31 - 1  # the most in an engine's array
# What the engines, their drivers, torch and NumPy say if there is not enough memory.
_NO_ROOM = re.compile(
    r"out of (\w+ )?memory|OUT_OF_MEMORY|can't allocate|allocate_memory|Failed to allocate|array is too big|"
    r"Maximum allowed dimension|size calculation overflowed"
)


# Contiguous arrays by shape, dtype, device and alignment.
_contiguous: BoundedCache[tuple[Any, ...], ArrayView] = BoundedCache(MAX_FORMS)


class RoomFor:
    """Wraps the allocation or copy of an array. It is a class, as `contextlib` takes longer than a small array.

    Raises:
        CapacityError: instead of any error that reports a lack of memory.
    """

    __slots__ = ("device", "nbytes")

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes, self.device = nbytes, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        refused = isinstance(error, RuntimeError | ValueError) and _NO_ROOM.search(str(error))
        if refused or isinstance(error, MemoryError):
            raise CapacityError(
                f"memory: {self.device} has no room for {self.nbytes} bytes in one piece. Use smaller arrays, such as "
                f"a smaller capacity, batch or pool or a narrower dtype; free what is not needed; or use another "
                f"device."
            ) from error


class Memory:
    """A block of device memory in the live runtime: NumPy's on CPU, torch's or Taichi's on CUDA, else Taichi's."""

    def __init__(self, nbytes: int, live: runtime.Runtime) -> None:
        self.runtime = live
        self.device = live.device
        self.nbytes = nbytes
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        self.handle: Any = None
        self.block: Any
        with RoomFor(size, live.device):
            if live.is_cpu:
                self.block = _aligned_bytes(size)
                self.ptr = numpy_address(self.block)
            elif _is_torchs(live):
                torch = sys.modules["torch"]
                self.block = torch.empty(size, dtype=torch.uint8, device=live.device)
                self.ptr = self.block.data_ptr()
            elif live.index:
                raise ArchError(
                    f"memory: torch allocates all memory on {live.device}, and this process has not imported torch, or "
                    "its torch has no CUDA. Import torch before the first operation, or start a process that sees "
                    f"{live.device} alone."
                )
            elif size // 4 > MOST_WORDS:
                raise MemoryError(f"an array in {live.engine.title} has at most {MOST_WORDS} words")
            else:
                self.block = live.new_words(size // 4)
                self.handle = self.block
                self.ptr = live.program.get_ndarray_data_ptr_as_int(self.handle.arr) if live.is_cuda else 0

    def __del__(self) -> None:
        # torch reuses freed memory in the order of the stream that it was made on; launches may be on other streams.
        # At the interpreter's end modules lose their names one by one, and the memory cannot be freed. A forked process
        # has no CUDA, so it cannot free any either.
        block: Any = getattr(self, "block", None)
        if not hasattr(block, "record_stream") or sys is None or sys.is_finalizing() or runtime is None:
            return
        if runtime.is_forked():
            return
        for handle in (*self.runtime.side_streams, *self.runtime.copy_streams):
            block.record_stream(sys.modules["torch"].cuda.ExternalStream(handle, device=self.device))

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        """The same bytes in memory of their own, copied on the device."""
        live = self.runtime
        runtime.require_alive(live, "copy.deepcopy")
        memory = type(self)(self.nbytes, live)
        live.synchronize()
        if isinstance(self.block, np.ndarray):
            memory.block[:] = self.block
        elif type(memory.block) is not type(self.block):  # torch has been imported since
            whole = (-(-self.nbytes // ALIGNMENT) * ALIGNMENT,)
            write_host(read_host(self.array(whole, dtypes.int8), live), memory.array(whole, dtypes.int8))
        elif hasattr(self.block, "copy_from"):
            with live.engine_calls():
                memory.block.copy_from(self.block)
        else:
            memory.block.copy_(self.block)
            sys.modules["torch"].cuda.synchronize(self.device)
        return memory

    def array(self, shape: tuple[int, ...], dtype: DType, byte_offset: int = 0) -> ArrayView:
        """A contiguous array in this memory, `byte_offset` from its start."""
        if not self.ptr:
            strides = contiguous_strides(shape)
            return ArrayView(0, shape, strides, dtype, self.device, handle=self.handle, offset=byte_offset, owner=self)
        ptr = self.ptr + byte_offset
        form = shape, dtype, self.device, ptr % ALIGNMENT
        like = _contiguous.get(form)
        if like is None:
            like = _contiguous.keep(form, ArrayView(ptr, shape, contiguous_strides(shape), dtype, self.device))
        view = like.at_address(ptr)
        view.owner = self
        return view

    def clear(self) -> None:
        """Set every byte to zero."""
        if hasattr(self.block, "zero_"):
            stream = sys.modules["torch"].cuda.current_stream(self.device).cuda_stream
            if stream:
                self.runtime.side_streams.add(stream)
            self.block.zero_()
        else:
            with self.runtime.engine_calls():
                self.block.fill(0)


def _is_torchs(live: runtime.Runtime) -> bool:
    """Whether torch allocates the memory on the live runtime's device."""
    return live.is_cuda and "torch" in sys.modules and bool(sys.modules["torch"].cuda.is_available())


def lasting_memory(nbytes: int, live: runtime.Runtime) -> Memory:
    """Memory that outlives the call that first needs it, even if torch compiles that call.

    While torch warms up a function to capture it, a thread gets all memory from the graph's pool, and torch refuses the
    call if it keeps any of that but its results. So another thread allocates the memory, from the usual pool.
    """
    if not _is_torchs(live):  # the engine allocates for one thread at a time, which may be the caller
        return Memory(nbytes, live)
    with concurrent.futures.ThreadPoolExecutor(1) as another:
        return another.submit(Memory, nbytes, live).result()


def new_array(shape: Sequence[int], dtype: DType, live: runtime.Runtime, *, zeroed: bool = False) -> ArrayView:
    """A contiguous array in memory of its own, on the device of the live runtime."""
    memory = Memory(math.prod(shape) * dtype.itemsize, live)
    if zeroed:
        memory.clear()
    return memory.array(tuple(shape), dtype)


def new_host_array(shape: Sequence[int], dtype: DType, live: runtime.Runtime, *, zeroed: bool = False) -> ArrayView:
    """A contiguous array in memory of the host, whatever the device of the live runtime; aligned as `Memory` is."""
    nbytes = math.prod(shape) * dtype.itemsize
    with RoomFor(nbytes, "cpu"):
        block = _aligned_bytes(max(ALIGNMENT, nbytes))
    if zeroed:
        block.fill(0)
    return ArrayView(block.ctypes.data, tuple(shape), contiguous_strides(tuple(shape)), dtype, "cpu", owner=block)


def _aligned_bytes(size: int) -> Host:
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -numpy_address(raw) % ALIGNMENT
    return raw[start : start + size]


def to_device(array: np.ndarray[Any, Any], live: runtime.Runtime) -> ArrayView:
    """A copy of a host array in device memory of the live runtime."""
    dtype = dtypes.of_numpy(array.dtype)
    assert dtype is not None
    target = new_array(array.shape, dtype, live)
    write_host(np.ascontiguousarray(array), target)
    return target


def write_host(array: np.ndarray[Any, Any], to: ArrayView) -> None:
    """Copy a contiguous host array to the start of host memory, or of memory that `Memory` made."""
    if to.device == "cpu":
        ctypes.memmove(to.ptr, numpy_address(array), array.nbytes)
        return
    block = to.owner.block
    if isinstance(block, np.ndarray):  # host memory, which launches may still be using
        to.owner.runtime.synchronize()
        ctypes.memmove(to.ptr, array.ctypes.data, array.nbytes)
        return
    if hasattr(block, "from_numpy"):
        words = np.zeros(block.shape[0] * 4, np.uint8)
        words[: array.nbytes] = array.reshape(-1).view(np.uint8)
        with RoomFor(words.nbytes, to.device), to.owner.runtime.engine_calls():
            block.from_numpy(words.view(dtypes.NUMPY_WORDS[str(block.dtype)]))
    else:
        import torch

        block[: array.nbytes].copy_(torch.from_numpy(array.reshape(-1).view(np.uint8)))


def as_numpy(array: ArrayView, dtype: np.dtype[Any] | None = None) -> np.ndarray[Any, Any]:
    """A NumPy array over a view's host memory, not a copy; it keeps the view's owner, if there is one, alive.

    A `dtype` of as many bytes shows the elements as other numbers.
    """
    dtype = dtype or array.dtype.numpy
    if not array.span:
        return np.empty(array.shape, dtype)
    buffer = host_buffer(array.ptr, array.span)
    buffer.owner = array.owner
    itemsize = array.dtype.itemsize
    elements: np.ndarray[Any, Any] = np.ndarray(array.shape, dtype, buffer, 0, [s * itemsize for s in array.strides])
    return elements


def read_host(array: ArrayView, live: runtime.Runtime) -> np.ndarray[Any, Any]:
    """A contiguous NumPy copy of a view's elements, from any device."""
    live.synchronize()
    itemsize = array.dtype.itemsize
    if array.device == "cpu" or isinstance(getattr(array.owner, "block", None), np.ndarray):
        raw = ctypes.string_at(array.ptr, array.span)
    elif array.device.startswith("cuda"):
        raw = _read_cuda(array, live)
    elif array.device == "mps":
        raw = array.handle.bytes[array.offset : array.offset + array.span].cpu().numpy().tobytes()
    else:
        with RoomFor(array.span, array.device), live.engine_calls():
            words: np.ndarray[Any, Any] = getattr(array.owner, "block", array.owner).to_numpy()
        raw = words.view(np.uint8)[array.offset : array.offset + array.span].tobytes()
    strides = [s * itemsize for s in array.strides]
    elements: np.ndarray[Any, Any] = np.ndarray(array.shape, array.dtype.numpy, raw, 0, strides).copy()
    return elements


def _read_cuda(array: ArrayView, live: runtime.Runtime) -> bytes:
    block: Any = getattr(array.owner, "block", None)
    if hasattr(block, "to_numpy"):  # Taichi's own memory
        with live.engine_calls():
            words = block.to_numpy().view(np.uint8)
        start = array.ptr - array.owner.ptr
        return bytes(words[start : start + array.span].tobytes())
    import torch

    return bytes(torch.as_tensor(CudaBytes(array.ptr, array.span), device=array.device).cpu().numpy().tobytes())


class CudaBytes:
    """Bytes at a CUDA address, for readers of `__cuda_array_interface__`; the caller keeps the memory alive."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "version": 3}


class StagedNdarray:
    """A host copy of a `ti.ndarray` of several axes on Vulkan or Metal, which cannot be a flat kernel argument.

    It owns the memory that views of it see; after writing to a view, call `write_back`.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        with runtime.current().engine_calls():
            self.host = np.ascontiguousarray(array.to_numpy())

    def write_back(self) -> None:
        """Copy the host copy back to the ndarray."""
        with runtime.current().engine_calls():
            self.array.from_numpy(self.host)
