"""DLPack, the C structure by which libraries exchange arrays: reads others' and exports tikv's own."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import ArrayView, contiguous_strides, require_memory, unknown_dtype
from tikv.arrays.memory import as_numpy
from tikv.errors import ArchError, DTypeError


class _DLTensor(ctypes.Structure):
    """DLPack's description of an array: where it lies, on which device, its dtype, shape and strides."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    """What a capsule "dltensor" points to: an array, and the function that its consumer calls to release it."""

    _fields_ = [("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _DLManagedTensorVersioned(ctypes.Structure):
    """The same since DLPack 1.0, with a version and with flags; one says that the array is read-only."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_STRUCTURES: dict[bytes, Any] = {b"dltensor": _DLManagedTensor, b"dltensor_versioned": _DLManagedTensorVersioned}
_VERSION = 1, 0  # the newest version that is read and written; since 1.0 a tensor may say that it is read-only
_READ_ONLY = 1  # one of the flags
_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # kinds of devices
_WORDS = {nbytes: np.dtype(f"u{nbytes}") for nbytes in (1, 2, 4, 8)}  # what NumPy exports, whatever the dtype
LEGACY_STREAM = 1  # CUDA's default stream in DLPack and `__cuda_array_interface__`
HOST_KINDS = (_CPU, _CUDA_HOST)  # kinds whose memory is the host's

# Own prototypes, since every library in the process shares the attributes of ctypes.pythonapi.
_C = ctypes.PYFUNCTYPE
_capsule_pointer: Any = _C(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_is_valid: Any = _C(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


TRACED = (
    "is an array that JAX traces, and has no values yet. Call this outside of functions that jax.jit, jax.grad or "
    "jax.vmap transforms."
)


def is_traced(value: Any) -> bool:
    """Whether a value stands for an array in a function that JAX transforms."""
    jax: Any = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.core.Tracer)


def read(array: Array, name: str, operation: str) -> ArrayView:
    """View an array that supports DLPack; the view keeps it and its capsule alive."""
    try:
        try:
            capsule = array.__dlpack__(max_version=_VERSION)
        except TypeError:  # an older protocol
            capsule = array.__dlpack__()
    except Exception as error:  # each library has errors of its own
        if is_traced(array):
            raise DTypeError(f"{operation}: {name} {TRACED}") from None
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) gave no DLPack capsule ({said}). Pass a copy of it."
        ) from error
    managed = _in(capsule)
    if managed is None:
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) gave a DLPack capsule that this library cannot read. Pass a "
            "copy of it."
        )
    tensor: _DLTensor = managed.tensor
    dtype = dtypes.of_dlpack(tensor.code, tensor.bits)
    if dtype is None or tensor.lanes != 1:
        raise unknown_dtype(name, operation, f"DLPack code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes")
    if tensor.device_type in HOST_KINDS:
        device = "cpu"
    elif tensor.device_type == _CUDA:
        device = f"cuda:{tensor.device_id}"
    else:
        raise ArchError(f"{operation}: {name} is on DLPack device {tensor.device_type}. Use CPU or CUDA memory.")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    # JAX's arrays are immutable, whatever they say: writing into one is undefined.
    immutable = getattr(managed, "flags", 0) & _READ_ONLY or type(array).__module__.startswith("jax")
    # The capsule was not consumed, so its own destructor frees the export when the view is freed.
    view = ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        device,
        writable=not immutable,
        owner=(array, capsule),
    )
    if not tensor.data:
        require_memory(view.at_address(0), name, operation)
    return view


def _in(capsule: Any) -> Any:
    """The C structure that a capsule holds; None if its name is unknown, or if it was consumed already."""
    for name, structure in _STRUCTURES.items():
        if _capsule_is_valid(capsule, name):
            managed = structure.from_address(_capsule_pointer(capsule, name))
            return managed if getattr(managed, "major", _VERSION[0]) == _VERSION[0] else None
    return None


def device_of(array: ArrayView) -> tuple[int, int]:
    """The kind and the index of the device that memory with an address lies on."""
    return (_CPU, 0) if array.device == "cpu" else (_CUDA, int(array.device.partition(":")[2]))


def export(array: ArrayView, max_version: tuple[int, int] | None = None) -> Any:
    """A capsule over memory with an address; its owner lives until the consumer is done with it.

    NumPy makes it, of words as wide as the elements, and then dtype and device are set: so a C function frees it. A
    consumer may call that function while an exception propagates, which a Python function would lose.

    Args:
        array: the array to export.
        max_version: the newest version that the consumer knows; None for the form without versions.
    """
    words = as_numpy(array, _WORDS[array.dtype.itemsize])
    try:
        capsule = words.__dlpack__(max_version=max_version)
    except TypeError:  # NumPy before 2.1 knows no versions
        capsule = words.__dlpack__()
    tensor: _DLTensor = _in(capsule).tensor
    tensor.code, tensor.bits = array.dtype.dlpack
    tensor.device_type, tensor.device_id = device_of(array)
    return capsule
