"""DLPack, the C structure by which libraries hand arrays to one another: read one, and hand out our own."""

from __future__ import annotations

import ctypes
from typing import Any

from tikv import dtypes
from tikv.arrays.array_view import ArrayView, contiguous_strides, require_memory, unknown_dtype
from tikv.errors import ArchError, DTypeError


class _DLTensor(ctypes.Structure):
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
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", _Deleter)]

_CPU, _CUDA, _CUDA_HOST = 1, 2, 3  # kinds of devices

# Prototypes of our own: the attributes of ctypes.pythonapi are shared with every other library in the process.
_C = ctypes.PYFUNCTYPE
_new_capsule: Any = _C(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_capsule_pointer: Any = _C(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_is_valid: Any = _C(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
# For a capsule that is being freed, which must not be referenced any more: by address.
_dying_pointer: Any = _C(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
_dying_is_valid: Any = _C(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))


def read(array: Any, name: str, operation: str) -> ArrayView:
    """See an array that speaks DLPack; the view keeps it and its capsule alive."""
    try:
        capsule = array.__dlpack__()
    except Exception as error:  # each library has errors of its own
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) gave no DLPack capsule ({said}). Pass a copy of it."
        ) from error
    if not _capsule_is_valid(capsule, b"dltensor"):
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) gave a DLPack capsule this library cannot read."
        )
    tensor = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLManagedTensor)).contents.tensor
    dtype = dtypes.of_dlpack(tensor.code, tensor.bits)
    if dtype is None or tensor.lanes != 1:
        raise unknown_dtype(name, operation, f"DLPack code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes")
    if tensor.device_type in (_CPU, _CUDA_HOST):
        device = "cpu"
    elif tensor.device_type == _CUDA:
        device = f"cuda:{tensor.device_id}"
    else:
        raise ArchError(f"{operation}: {name} lies on DLPack device {tensor.device_type}. Use CPU or CUDA memory.")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    immutable = type(array).__module__.startswith("jax")  # its arrays are values; writing into one is undefined
    # The capsule was not consumed, so its own destructor frees the export when the view goes.
    found = ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        device,
        writable=not immutable,
        owner=(array, capsule),
    )
    if not tensor.data:
        require_memory(found.at_address(0), name, operation)
    return found


_exports: dict[int, Any] = {}


# A tensor may die after this module at the interpreter's end: what its deleter needs are defaults of functions that
# are never freed.
def _release_export(managed: Any, exports: Any = _exports, address: Any = ctypes.addressof) -> None:
    exports.pop(address(managed.contents), None)


def _free_unconsumed(
    capsule: int, exports: Any = _exports, is_valid: Any = _dying_is_valid, pointer: Any = _dying_pointer
) -> None:
    if is_valid(capsule, b"dltensor"):
        exports.pop(pointer(capsule, b"dltensor"), None)


_release_export_c = _Deleter(_release_export)
_free_unconsumed_c = _C(None, ctypes.c_void_p)(_free_unconsumed)
for _immortal in (_release_export_c, _free_unconsumed_c):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_immortal))


def device_of(array: ArrayView) -> tuple[int, int]:
    """The kind and the index of the device that memory with an address lies on."""
    return (_CPU, 0) if array.device == "cpu" else (_CUDA, int(array.device.partition(":")[2]))


def export(array: ArrayView, owner: Any) -> Any:
    """A capsule over `array`; `owner` lives until the consumer is done with it."""
    managed = _DLManagedTensor()
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*array.strides)
    kind, index = device_of(array)
    code, bits = array.dtype.dlpack
    managed.tensor = _DLTensor(array.ptr, kind, index, array.ndim, code, bits, 1, shape, strides, 0)
    managed.deleter = _release_export_c
    address = ctypes.addressof(managed)
    _exports[address] = (managed, shape, strides, owner)
    return _new_capsule(address, b"dltensor", ctypes.cast(_free_unconsumed_c, ctypes.c_void_p))
