"""NVIDIA's driver through its own Python binding: load modules, launch entries, on torch's or the caller's stream."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tikv import extras, runtime
from tikv.errors import ArchError

MULTIPROCESSOR_COUNT, CAPABILITY_MAJOR = 16, 75  # in the driver's CUdevice_attribute
_lock = threading.Lock()
_used_stream: contextvars.ContextVar[int | None] = contextvars.ContextVar("tikv_stream", default=None)


@functools.cache
def binding() -> Any:
    """The module `cuda.bindings.driver`.

    Raises:
        ArchError: the module, or the driver below it, is missing.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except Exception as error:
        raise ArchError(f"cuda-bindings cannot be imported ({error}). {extras.install('cuda')}.") from error


def checked(result: Any, what: str) -> Any:
    """The value that a driver call returned.

    Raises:
        ArchError: the call failed.
    """
    status, *values = result
    if status != binding().CUresult.CUDA_SUCCESS:
        raise ArchError(
            f"{what}: the CUDA driver says {status.name}. After an illegal address the process must be started "
            "again; TIKV_LAUNCHER=direct chooses Taichi's own launcher."
        )
    return values[0] if values else None


class Device:
    """A CUDA device, in the context that torch uses as well."""

    def __init__(self, index: int) -> None:
        cu = binding()
        checked(cu.cuInit(0), "cuInit")
        self.index = index
        device = checked(cu.cuDeviceGet(index), f"cuDeviceGet of device {index}")
        attribute = cu.CUdevice_attribute
        major, minor = (
            checked(cu.cuDeviceGetAttribute(which, device), "cuDeviceGetAttribute")
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.target = f"sm_{major}{minor}"
        self.overlaps = major >= 9 and checked(cu.cuDriverGetVersion(), "cuDriverGetVersion") >= 12040

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Make it this thread's current device within the block; torch's device is restored at the end."""
        return runtime.current_gpu(self.index)

    def load(self, ptx: str, entry: str, shared_bytes: int = 0) -> Any:
        """The function of an entry; the driver compiles it, or finds it in its own cache.

        A launch may give a block up to `shared_bytes` of shared memory.

        Raises:
            ArchError: the driver refuses the PTX, or a CUDA graph is being captured, so nothing may be loaded.
        """
        if capturing(self.index):
            raise ArchError(
                "launch: a kernel would have to be loaded while a CUDA graph is being captured. Run the step once "
                "before capturing it, as torch's own operations require too."
            )
        cu = binding()
        with self.entered():
            module = checked(cu.cuModuleLoadData(ptx.encode() + b"\0"), "cuModuleLoadData")
            function = checked(cu.cuModuleGetFunction(module, entry.encode()), "cuModuleGetFunction")
            if shared_bytes:
                most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(cu.cuFuncSetAttribute(function, most, shared_bytes), "cuFuncSetAttribute")
                # The driver itself may leave less shared memory than all blocks that could run together need.
                share = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
                checked(cu.cuFuncSetAttribute(function, share, 100), "cuFuncSetAttribute")
            return function


def multiprocessors(index: int) -> int:
    """The number of multiprocessors of a CUDA device.

    Raises:
        ArchError: there is no driver, or it does not say.
    """
    return _attribute(MULTIPROCESSOR_COUNT, index, "how many multiprocessors it has")


def generation(index: int) -> int:
    """The major number of a CUDA device's compute capability.

    Raises:
        ArchError: there is no driver, or it does not say.
    """
    return _attribute(CAPABILITY_MAJOR, index, "its compute capability")


@functools.cache
def _attribute(which: int, index: int, what: str) -> int:
    """A device's attribute, from the driver's own library: cuda-bindings need not be installed."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    handle, number = ctypes.c_int(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        raise ArchError(
            f"launch: NVIDIA's driver cannot be loaded ({error}). Install it, or use another arch."
        ) from error
    status = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(handle), index)
        or cuda.cuDeviceGetAttribute(ctypes.byref(number), which, handle)
    )
    if status:
        raise ArchError(
            f"launch: for device {index}, the CUDA driver does not say {what} (error {status}). Run `python -m tikv "
            "doctor` for more, and update the driver."
        )
    return number.value


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """A CUDA device, opened once.

    Raises:
        ArchError: the binding, driver or device is missing; or kernels, compiled for device 0, do not run on this one.
    """
    opened = _devices.get(index)
    if opened is not None:
        return opened
    first = device(0) if index else None
    with _lock:
        if index not in _devices:
            opened = Device(index)
            if first is not None and opened.target != first.target:
                raise ArchError(
                    f"launch: cuda:{index} is {opened.target}, but kernels are compiled for cuda:0, which is "
                    f"{first.target}. Start a process that sees cuda:{index} alone (set CUDA_VISIBLE_DEVICES)."
                )
            _devices[index] = opened
        return _devices[index]


def launch_config(blocks: int, block: int, starts_early: bool, shared_bytes: int = 0) -> Any:
    """The configuration of a launch: its grid, its shared memory, and whether it may start before the previous ends."""
    cu = binding()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream_object(0)
    config.numAttrs = 0
    if starts_early:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


_torch_stream: Callable[[int], int] | None = None
_torch_capturing: Callable[[], bool] | None = None  # of the current device


def _find_torch() -> bool:
    """Find torch's functions for the current stream, once torch is imported and has started CUDA."""
    global _torch_stream, _torch_capturing
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return False
    _torch_stream, _torch_capturing = _streams_of(torch)
    return True


def _streams_of(torch: Any) -> tuple[Callable[[int], int], Callable[[], bool]]:
    """The cheapest calls for torch's current stream of a device, and for whether it is being captured.

    torch.cuda.current_stream() takes seven microseconds. The private function below it takes a tenth of one; it is used
    if torch has it and it gives the same stream.
    """

    def current(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    try:
        raw, capturing = torch._C._cuda_getCurrentRawStream, torch._C._cuda_isCurrentStreamCapturing
        works = raw(0) == current(0) and capturing() == torch.cuda.is_current_stream_capturing()
    except (AttributeError, TypeError, RuntimeError):
        works = False
    return (raw, capturing) if works else (current, torch.cuda.is_current_stream_capturing)


def stream(index: int) -> int:
    """The handle of the stream that launches on a device go to.

    It is the stream given to `use_stream`, otherwise torch's current stream on the device, otherwise 0.
    """
    handle = _used_stream.get()
    if handle is not None:
        return handle
    if _torch_stream is not None or _find_torch():
        return _torch_stream(index)  # type: ignore[misc]
    return 0


@contextlib.contextmanager
def use_stream(handle: int) -> Iterator[None]:
    """A context in which launches go to this stream, given by its handle (`cudaStream_t` as an integer).

    The stream must belong to the device of the stores that are used on it, and must live until they are gone and the
    work is done. Torch's streams need no such context: outside of one, launches go to torch's current stream.
    """
    token = _used_stream.set(int(handle))
    try:
        yield
    finally:
        _used_stream.reset(token)


def capturing(index: int) -> bool:
    """Whether the stream that launches on a device go to is being captured into a CUDA graph."""
    handle = _used_stream.get()
    if handle is None:
        if _torch_capturing is None and not _find_torch():
            return False
        if len(_devices) < 2 or sys.modules["torch"].cuda.current_device() == index:
            return _torch_capturing()  # type: ignore[misc]
        handle = stream(index)
        if not handle:
            return False  # the default stream cannot be captured
    cu = binding()
    status = checked(cu.cuStreamIsCapturing(stream_object(handle)), "cuStreamIsCapturing")
    return bool(status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


@functools.lru_cache(256)  # a program uses few streams; the least recently used one is made again
def stream_object(handle: int) -> Any:
    """A stream as an object of the binding."""
    return binding().CUstream(handle)


def synchronize_all() -> None:
    """Wait for all streams of the devices in use.

    Raises:
        ArchError: a CUDA graph is being captured, so the host may not wait.
    """
    if any(map(capturing, tuple(_devices))):
        raise ArchError(
            "launch: the host cannot wait for the device while a CUDA graph is being captured. Take host copies, "
            "torch() and DLPack views of a store's arrays before or after the capture."
        )
    for each in tuple(_devices.values()):
        with each.entered():
            checked(binding().cuCtxSynchronize(), "cuCtxSynchronize")


def synchronize(handle: int) -> None:
    """Wait for a stream."""
    checked(binding().cuStreamSynchronize(stream_object(handle)), "cuStreamSynchronize")
