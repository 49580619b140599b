"""Launch on CUDA through NVIDIA's driver: a kernel's function, the layout of its arguments, and the launch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tikv import runtime
from tikv.arrays import ArrayView
from tikv.errors import ArchError, CapacityError
from tikv.launch.bound import Bound
from tikv.launch.compilation import CompiledKernel
from tikv.launch.cuda import compiler, driver, keys, ptx

KEEP_ON_DEVICE = (
    "Pass arrays on the device. Keep positions in device memory: KVCacheStore.positions_on_device(), append_ragged "
    "with cache_offsets on the device, or write_slots with slot_mapping on the device."
)

OUTSIDE_CAPTURES = "Call it before or after the capture."


def is_captured(live: runtime.Runtime) -> bool:
    """Whether launches are being captured into a CUDA graph."""
    return live.is_cuda and driver.capturing(live.index)


def stream_of(live: runtime.Runtime) -> int:
    """The handle of the CUDA stream that launches go to; 0 on other back ends."""
    return driver.stream(live.index) if live.is_cuda else 0


def refuse_during_capture(
    live: runtime.Runtime, operation: str, what: str = "a position on the host", remedy: str = KEEP_ON_DEVICE
) -> None:
    """Refuse data on the host while a CUDA graph is captured: each replay would use the same position or values.

    Raises:
        ArchError: the stream of the launch is being captured.
    """
    if is_captured(live):
        raise ArchError(
            f"{operation}: {what} would be baked into the CUDA graph under capture, and each replay would use it "
            f"again. {remedy}"
        )


class Native:
    """A kernel as the driver launches it on a device: its function, the threads of a block, its arguments' offsets.

    If `starts_early`, its blocks are placed while the previous launch still runs. Blocks that find no room wait, and
    the others are distributed unevenly. A kernel with few or short blocks saves the time of a launch. A kernel that
    relies on the number of blocks of a multiprocessor loses speed: with 32 x 8,192 tokens it took 320 us instead of
    247. A launch gives a block `shared_bytes` of shared memory.
    """

    def __init__(
        self,
        device: driver.Device,
        function: Any,
        block: int,
        offsets: Sequence[int],
        size: int,
        starts_early: bool = False,
        shared_bytes: int = 0,
    ) -> None:
        self.device = device
        self.starts_early = starts_early
        self.shared_bytes = shared_bytes
        self.function = function
        self.block = block
        self.offsets = offsets
        self.size = size


# By the device and the inputs of their PTX. They outlive a runtime, since the CUDA context belongs to the process. They
# are never unloaded, since a bound launch or a captured graph may hold a function.
_natives: dict[tuple[int, str], Native] = {}


def load_native(kernel: CompiledKernel) -> Native:
    """Compile and patch a kernel for the driver, and load it on the runtime's device; once per process.

    Raises:
        ArchError: see `compiler.ptx_of`, `ptx.patch` and `driver.Device.load`.
    """
    device = driver.device(kernel.runtime.index)
    if driver.synchronize_all not in runtime.before_synchronize:
        runtime.before_synchronize.append(driver.synchronize_all)
    key = keys.key_of(kernel.factory, kernel.choices, device.target)
    native = _natives.get((device.index, key))
    if native is None:
        offsets, size = argument_layout(kernel.words, kernel.lengths)
        text = compiler.ptx_of(kernel.factory, kernel.choices, device.target)
        resident = getattr(kernel.factory, "resident", None)
        blocks = resident(*kernel.choices) if resident else None
        pairs = getattr(kernel.factory, "pairs", False)
        shared_bytes = kernel.shared_bytes
        patched = ptx.patch(text, size, device.overlaps, not kernel.fast_math, blocks, pairs, shared_bytes > 0)
        function = device.load(patched.text, patched.entry, shared_bytes)
        early = device.overlaps and resident is None
        native = Native(device, function, patched.block, offsets, size, early, shared_bytes)
        _natives[device.index, key] = native
    return native


def argument_layout(words: Sequence[str | None], lengths: Sequence[int]) -> tuple[list[int], int]:
    """The offset of each argument, and the size of all arguments, in Taichi's layout.

    An array of one axis is {i32 extent, 4 bytes of padding, u64 pointer}; a vector its entries; numbers have 32 bits.

    Examples:
        >>> from tikv.launch import argument_layout
        >>> argument_layout(["u64", None, None], [0, 3, 0])
        ([0, 16, 28], 32)
    """
    offsets, at = [], 0
    for word, length in zip(words, lengths, strict=True):
        at = -(-at // 8) * 8 if word else at
        offsets.append(at)
        at += 16 if word else 4 * max(1, length)
    return offsets, -(-at // 8) * 8


BLOCKS_PER_MULTIPROCESSOR = 4096  # far more than it holds: with fewer blocks and more work each, throughput is lower


def blocks_of(iterations: int, block: int, most: int, operation: str) -> int:
    """The number of blocks for so many iterations; each thread strides over them without exceeding 32 bits.

    Raises:
        CapacityError: there are too many iterations for a stride of 32 bits.

    Examples:
        >>> from tikv.launch import blocks_of
        >>> blocks_of(1000, 128, most=33792, operation="example")
        8
    """
    blocks = max(1, min(-(-iterations // block), most))
    room = (2**31 - 1 - iterations) // block  # the stride is added once more after the last iteration
    blocks = min(blocks, room)
    if blocks < 1:
        raise CapacityError(f"{operation}: {iterations} work items are too many for one launch. Split the call.")
    return blocks


class NativeBound(Bound):
    """A launch through the driver: it holds the arguments in a buffer, which the driver copies at each launch."""

    def __init__(self, kernel: CompiledKernel, iterations: int, arguments: tuple[Any, ...], native: Native) -> None:
        self._bytes = bytearray(native.size)
        self._anchor = (ctypes.c_char * native.size).from_buffer(self._bytes)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._anchor))
        self._pointers = memoryview(self._bytes).cast("Q")
        self._entries = memoryview(self._bytes).cast("i")
        self._at = native.offsets
        super().__init__(kernel, iterations, arguments)
        for i, value in enumerate(arguments):
            if kernel.words[i]:
                self.set_array(i, value)
                self._entries[self._at[i] // 4] = iterations if i == 0 else 1
            else:
                values = list(value) if kernel.lengths[i] else [value]
                form = f"<{len(values)}{'f' if kernel.is_float[i] else 'i'}"
                struct.pack_into(form, self._bytes, self._at[i], *values)
        self._device = device = native.device
        self._index = device.index
        self._function = native.function
        self._parameters_at = ctypes.addressof(self._parameters)
        self._stream: int | None = 0  # of the last launch; None after a launch that was refused
        self._by_host = False  # whether the host changes entries from launch to launch
        most = driver.multiprocessors(device.index) * BLOCKS_PER_MULTIPROCESSOR
        blocks = blocks_of(iterations, native.block, most, kernel.name)
        self._config = driver.launch_config(blocks, native.block, native.starts_early, native.shared_bytes)
        self._call = driver.binding().cuLaunchKernelEx

    def set_array(self, i: int, array: ArrayView) -> None:
        self.set_pointer(i, array.ptr)

    def set_pointer(self, i: int, pointer: int) -> None:
        self._pointers[(self._at[i] >> 3) + 1] = pointer

    def set_entry(self, i: int, j: int, value: int) -> None:
        self._by_host = True
        self._entries[(self._at[i] >> 2) + j] = value

    def _setter_at(self, i: int, j: int) -> Callable[[int], None]:
        entries, at = self._entries, (self._at[i] >> 2) + j

        def put(value: int) -> None:
            self._by_host = True
            entries[at] = value

        return put

    def launch(self) -> None:
        stream = driver.stream(self._index)
        if stream and self._by_host:  # the default stream cannot be captured
            refuse_during_capture(self.kernel.runtime, self.kernel.title)
        if stream != self._stream:
            self._config.hStream = driver.stream_object(stream)
            self._stream = None
        if self._call(self._config, self._function, self._parameters_at, 0)[0]:
            # A thread that has not used CUDA yet has no context, and the default stream belongs to the current device.
            # So only a second failure is an error.
            with self._device.entered():
                driver.checked(self._call(self._config, self._function, self._parameters_at, 0), self.kernel.name)
        if stream != self._stream:  # a stream that the driver refused must not reach torch, which frees memory
            self._stream = stream
            if stream:
                self.kernel.runtime.side_streams.add(stream)
