"""Describes this machine: its devices, their names and memory, and which archs are worth trying."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pathlib
import platform
import sys
from collections.abc import Iterator
from typing import Any

ARCHS = ("metal", "cuda", "vulkan", "cpu", "amdgpu")  # best first; "auto" never takes amdgpu
SPIRV_ARCHS = ("metal", "vulkan")  # archs whose kernels are SPIR-V, and whose memory has no address
NEVER_RUN = ("amdgpu",)  # archs on which nobody has run this library yet
_INTEGRATED = 18  # in the CUDA driver's CUdevice_attribute
_PORTABLE, _MAPPED = 1, 2  # flags of page-locked memory: every context may use it, at a device address


def candidate_archs() -> Iterator[str]:
    """The archs that this machine has hardware for, best first. CPU is always last."""
    if sys.platform == "darwin":
        yield "metal"
    if _has_library("libcuda.so.1", "nvcuda.dll"):
        yield "cuda"
    if any(kind != "cpu" for _, kind in vulkan_devices()):
        yield "vulkan"
    yield "cpu"


def _has_library(*names: str) -> bool:
    return _library(*names) is not None


def _library(*names: str) -> Any:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


class _ApplicationInfo(ctypes.Structure):
    """Vulkan's VkApplicationInfo: which version of Vulkan this program uses."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api", ctypes.c_uint32),
    ]


class _InstanceCreateInfo(ctypes.Structure):
    """Vulkan's VkInstanceCreateInfo: with what Vulkan is started."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("num_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("num_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    ]


class _SubgroupProperties(ctypes.Structure):
    """Vulkan's VkPhysicalDeviceSubgroupProperties: the size of a subgroup, and what it can compute."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("size", ctypes.c_uint32),
        ("stages", ctypes.c_uint32),
        ("operations", ctypes.c_uint32),
        ("quads", ctypes.c_uint32),
    ]


class _DriverProperties(ctypes.Structure):
    """Vulkan's VkPhysicalDeviceDriverProperties: which driver a device has."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("driver", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 516),  # name, text and version
    ]


class _Properties2(ctypes.Structure):
    """Vulkan's VkPhysicalDeviceProperties2, which leads to the structures above; its own properties as raw words."""

    _fields_ = [("type", ctypes.c_int), ("next", ctypes.c_void_p), ("properties", ctypes.c_uint64 * 512)]


class _Heap(ctypes.Structure):
    """Vulkan's VkMemoryHeap: the bytes of one memory of a device, and whether it is the device's own."""

    _fields_ = [("size", ctypes.c_uint64), ("flags", ctypes.c_uint32)]


class _MemoryProperties(ctypes.Structure):
    """Vulkan's VkPhysicalDeviceMemoryProperties: the memories of a device."""

    _fields_ = [
        ("num_types", ctypes.c_uint32),
        ("types", ctypes.c_uint32 * 2 * 32),
        ("num_heaps", ctypes.c_uint32),
        ("heaps", _Heap * 16),
    ]


_DEVICE_LOCAL = 1  # a flag of a heap
_VULKAN_1_1 = (1 << 22) | (1 << 12)
_PROPERTIES_2, _SUBGROUP_PROPERTIES, _DRIVER_PROPERTIES = 1000059001, 1000094000, 1000196000  # types of structures
_DRIVERS = (4, 13)  # NVIDIA's own and Mesa's lavapipe, with which this library's kernels have run
_COMPUTE, _BASIC, _ARITHMETIC = 0x20, 1, 4
_VULKAN_KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}


@contextlib.contextmanager
def _physical_devices() -> Iterator[tuple[Any, list[Any]]]:
    """The Vulkan loader and a handle of each device; (None, []) without a loader."""
    vulkan = _library("libvulkan.so.1", "vulkan-1.dll", "libvulkan.1.dylib")
    if vulkan is None:
        yield None, []
        return
    application = _ApplicationInfo(0, None, b"tikv", 1, b"tikv", 1, _VULKAN_1_1)
    create = _InstanceCreateInfo(1, None, 0, ctypes.pointer(application), 0, None, 0, None)
    instance = ctypes.c_void_p()
    if vulkan.vkCreateInstance(ctypes.byref(create), None, ctypes.byref(instance)) != 0:
        yield None, []
        return
    try:
        count = ctypes.c_uint32()
        if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None) != 0:
            count.value = 0
        handles = (ctypes.c_void_p * count.value)()
        if count.value and vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles) != 0:
            count.value = 0
        yield vulkan, [ctypes.c_void_p(handle) for handle in handles[: count.value]]
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _properties(vulkan: Any, handle: Any) -> bytes:
    properties = ctypes.create_string_buffer(4096)  # VkPhysicalDeviceProperties is 824 bytes
    vulkan.vkGetPhysicalDeviceProperties(handle, properties)
    return properties.raw


def vulkan_devices() -> list[tuple[str, str]]:
    """(name, kind) of each Vulkan device; kind is integrated, discrete, virtual, other or cpu. Empty without a loader.

    A software driver such as lavapipe answers "cpu": good for tests, never chosen by "auto".
    """
    devices = []
    with _physical_devices() as (vulkan, handles):
        for handle in handles:
            raw = _properties(vulkan, handle)
            kind = int.from_bytes(raw[16:20], sys.byteorder)
            devices.append((raw[20:276].split(b"\0", 1)[0].decode(errors="replace"), _VULKAN_KINDS.get(kind, "other")))
    return devices


def vulkan_subgroups() -> bool:
    """Whether kernels may reduce over subgroups on every Vulkan device, since Taichi does not say which one it uses."""
    with _physical_devices() as (vulkan, handles):
        return bool(handles) and all(_reduces(vulkan, handle) for handle in handles)


def vulkan_drivers_known() -> bool:
    """Whether every Vulkan device has a driver with which this library's kernels have run."""
    with _physical_devices() as (vulkan, handles):
        return bool(handles) and all(_driver(vulkan, handle) in _DRIVERS for handle in handles)


def _driver(vulkan: Any, handle: Any) -> int:
    """The number that Vulkan gave a device's driver; 0 if the driver does not tell."""
    driver = _DriverProperties(_DRIVER_PROPERTIES, None)
    return driver.driver if _ask(vulkan, handle, driver) else 0


def _ask(vulkan: Any, handle: Any, about: ctypes.Structure) -> bool:
    """Have a device fill in a structure; False if its Vulkan is too old for that."""
    if int.from_bytes(_properties(vulkan, handle)[:4], sys.byteorder) < _VULKAN_1_1:
        return False
    both = _Properties2(_PROPERTIES_2, ctypes.cast(ctypes.pointer(about), ctypes.c_void_p))
    vulkan.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(both))
    return True


def _reduces(vulkan: Any, handle: Any) -> bool:
    subgroups = _SubgroupProperties(_SUBGROUP_PROPERTIES, None)
    if not _ask(vulkan, handle, subgroups):
        return False
    operations = _BASIC | _ARITHMETIC
    return bool(subgroups.stages & _COMPUTE) and subgroups.operations & operations == operations


def device_name(arch: str) -> str:
    """A name for the device that an arch runs on."""
    if arch == "vulkan":
        devices = vulkan_devices()
        hardware = [name for name, kind in devices if kind != "cpu"]
        return (hardware or [name for name, _ in devices] or ["unknown"])[0]
    if arch == "cuda":
        return _cuda_device(_cuda())[0]
    if arch in NEVER_RUN:
        return "unknown"
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@functools.cache
def _cuda_library() -> Any:
    return _library("libcuda.so.1", "nvcuda.dll")


def _cuda() -> Any:
    """The CUDA driver's library, initialised; None without a driver."""
    cuda = _cuda_library()
    return None if cuda is None or cuda.cuInit(0) != 0 else cuda


def num_gpus() -> int:
    """The number of CUDA devices that this process sees."""
    cuda, count = _cuda(), ctypes.c_int()
    return count.value if cuda is not None and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@functools.cache
def _primary_context(cuda: Any, index: int) -> ctypes.c_void_p | None:
    """The context of a CUDA device, which torch uses too, and an engine on device 0; None without the device."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    failed = cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDevicePrimaryCtxRetain(
        ctypes.byref(context), device
    )
    return None if failed else context


@contextlib.contextmanager
def current_gpu(index: int) -> Iterator[None]:
    """Make a CUDA device this thread's current one, and restore torch's current device afterwards.

    A thread without a current device, which has not used CUDA yet, keeps this one. Without the device nothing happens.
    """
    cuda, before = _cuda(), ctypes.c_void_p()
    context = None if cuda is None else _primary_context(cuda, index)
    if context is None or cuda.cuCtxGetCurrent(ctypes.byref(before)) != 0:
        yield
        return
    cuda.cuCtxSetCurrent(context)
    try:
        yield
    finally:
        if before.value:
            cuda.cuCtxSetCurrent(before)


@functools.cache
def _cuda_device(cuda: Any, index: int = 0) -> tuple[str, int]:
    """(name, total bytes) of a CUDA device, through the driver."""
    if cuda is None:
        return "unknown", 0
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    if cuda.cuDeviceGet(ctypes.byref(device), index) != 0:
        return "unknown", 0
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    return name.value.decode(errors="replace"), total.value


def memory_bytes(arch: str, index: int = 0) -> int | None:
    """The total bytes of memory that an arch allocates from, if the system tells; else None.

    On Vulkan it is that of the device with the most, since the engine does not say which one it uses. Of the host's
    memory it is what this process may use: its control groups may set a limit.
    """
    if arch == "cuda":
        return _cuda_device(_cuda(), index)[1] or None
    if arch == "vulkan":
        dedicated, shares = _vulkan_memory()
        return max(dedicated, memory_bytes("cpu") or 0 if shares else 0) or None
    if arch in ("cpu", "metal") and hasattr(os, "sysconf"):
        with contextlib.suppress(ValueError, OSError):
            return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits())
    return None


@functools.cache
def _group_limits(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"), proc: str = "/proc/self/cgroup") -> list[int]:
    """The limits of memory of this process's control groups, of both versions; empty without any."""
    paths = ["/"]
    with contextlib.suppress(OSError), open(proc, encoding="utf-8") as lines:
        fields = [line.rstrip("\n").split(":", 2) for line in lines]
        paths += [f[2] for f in fields if len(f) == 3 and (not f[1] or "memory" in f[1].split(","))]
    limits = []
    for path in paths:
        inside = pathlib.PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            for file in (root / group / "memory.max", root / "memory" / group / "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    limits.append(int(file.read_text(encoding="utf-8")))
    return [n for n in limits if n > 0]


@functools.cache
def _vulkan_memory() -> tuple[int, bool]:
    """The bytes of the Vulkan device with the most memory of its own, and whether one computes in the host's memory."""
    most = 0
    with _physical_devices() as (vulkan, handles):
        for handle in handles:
            memory = _MemoryProperties()
            vulkan.vkGetPhysicalDeviceMemoryProperties(handle, ctypes.byref(memory))
            heaps = memory.heaps[: memory.num_heaps]
            most = max(most, sum(heap.size for heap in heaps if heap.flags & _DEVICE_LOCAL))
    return most, any(kind in ("cpu", "integrated") for _, kind in vulkan_devices())


def shares_memory(arch: str, index: int = 0) -> bool:
    """Whether the device computes in the host's memory and has none of its own."""
    if arch == "cuda":
        cuda, device, integrated = _cuda(), ctypes.c_int(), ctypes.c_int()
        if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), index):
            return False
        return cuda.cuDeviceGetAttribute(ctypes.byref(integrated), _INTEGRATED, device) == 0 and integrated.value > 0
    if arch == "vulkan":
        return all(kind in ("cpu", "integrated") for _, kind in vulkan_devices())
    return arch in ("cpu", "metal")


def lock_pages(nbytes: int, index: int) -> int:
    """Allocate page-locked host memory; the address is the same for the host and each CUDA device.

    Raises:
        MemoryError: there is not enough memory.
    """
    cuda, address = _cuda(), ctypes.c_void_p()
    with current_gpu(index):
        status = cuda.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), _PORTABLE | _MAPPED)
    if status or not address.value:
        raise MemoryError(f"CUDA's driver could not lock {nbytes} bytes (error {status})")
    return address.value


def unlock_pages(address: int, index: int) -> None:
    """Free page-locked memory, once all devices have finished their work."""
    cuda = _cuda()
    with current_gpu(index):
        cuda.cuCtxSynchronize()
        cuda.cuMemFreeHost(ctypes.c_void_p(address))
