"""See any array as pointer + shape + strides, without a copy, and hand our own memory out the same way.

`view` accepts NumPy, torch, `ti.ndarray`, `CacheArray`, and whatever speaks `__cuda_array_interface__` or DLPack. An
`ArrayView` says where elements lie; on Vulkan and Metal, where memory has no pointer, it holds Taichi's handle.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.dtypes import DType
from tikv.errors import ArchError, DTypeError, ShapeError, StaleRuntimeError

ALIGNMENT = 64  # bytes; a cache line, and more than any word we move


MAX_FORMS = 1 << 16  # forms of arrays that are remembered
_forms: dict[tuple[Any, ...], int] = {}
_numbers = itertools.count()  # a number is never given twice, so what was kept under a forgotten one is never found


def _form_number(form: tuple[Any, ...]) -> int:
    """A small number for what a bound launch depends on: all but the address, of which only the alignment counts."""
    found = _forms.get(form)
    if found is None:
        if len(_forms) >= MAX_FORMS:
            _forms.clear()
        found = _forms.setdefault(form, next(_numbers))
    return found


class ArrayView:
    """Where an array lies: pointer (or handle and byte offset), shape, strides in elements, dtype, device."""

    __slots__ = ("device", "dtype", "handle", "key", "offset", "owner", "ptr", "shape", "span", "strides", "writable")

    def __init__(
        self,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        device: str,
        *,
        writable: bool = True,
        handle: Any = None,
        offset: int = 0,
        owner: Any = None,
    ) -> None:
        self.ptr = ptr  # address of element 0; 0 where memory has no address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device  # "cpu", "cuda:0", "vulkan", "metal"
        self.writable = writable
        self.handle = handle  # Taichi's ndarray, when the memory is one
        self.offset = offset  # bytes from the start of the handle's memory to element 0; 0 where ptr says it all
        self.owner = owner  # keeps the memory alive
        self.span = span_bytes(shape, strides, dtype.itemsize)
        self.key = _form_number(
            (shape, strides, dtype.short, device, ptr % ALIGNMENT, writable, offset, handle is None)
        )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without the gaps between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def at(self, ptr: int) -> ArrayView:
        """Another array of this form, at an address with the same alignment; nothing holds its memory."""
        found: ArrayView = object.__new__(ArrayView)
        found.ptr = ptr
        found.shape, found.strides, found.dtype = self.shape, self.strides, self.dtype
        found.device, found.writable, found.handle = self.device, self.writable, None
        found.offset, found.owner = self.offset, None
        found.span, found.key = self.span, self.key
        return found

    def bare(self) -> ArrayView:
        """The same address without a hold on the memory, for what outlives a call."""
        if self.owner is None:
            return self
        return ArrayView(
            self.ptr, self.shape, self.strides, self.dtype, self.device, writable=self.writable, offset=self.offset
        )

    def moved(self, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> ArrayView:
        """The same memory seen with another shape and strides, starting `first` elements further on."""
        jump = first * self.dtype.itemsize
        return ArrayView(
            self.ptr + jump if self.ptr else 0,
            shape,
            strides,
            self.dtype,
            self.device,
            writable=self.writable,
            handle=self.handle,
            offset=self.offset + (0 if self.ptr else jump),
            owner=self.owner,
        )

    def __repr__(self) -> str:
        return describe(self)


def describe(array: ArrayView) -> str:
    """An array in a message: `f16[8,4096,128]`."""
    return f"{array.dtype.short}[{','.join(map(str, array.shape))}]"


def span_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to behind the last element of a strided array (strides in elements, not negative)."""
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return tuple(strides)


def is_contiguous(array: ArrayView) -> bool:
    """Whether elements follow one another in row-major order; the stride of an axis of one says nothing."""
    wanted = contiguous_strides(array.shape)
    return 0 in array.shape or all(n == 1 or s == w for n, s, w in zip(array.shape, array.strides, wanted, strict=True))


def host_bytes(ptr: int, nbytes: int) -> np.ndarray[Any, Any]:
    """The bytes from a host address on as a NumPy array, not a copy; the caller keeps the memory alive."""
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(ptr)
    return np.frombuffer(buffer, np.uint8)


class Views(list[ArrayView]):
    """The arrays of one call in turn, their addresses, and one number for what a launch over them depends on."""

    __slots__ = ("key", "pointers")

    def __init__(self, views: Sequence[ArrayView]) -> None:
        super().__init__(views)
        self.key = _form_number(tuple([v.key for v in views]))
        self.pointers = tuple([v.ptr for v in views])

    def at(self, pointers: tuple[int, ...]) -> Views | None:
        """Arrays of these forms at other addresses; None where one is aligned differently."""
        views = []
        for v, p in zip(self, pointers, strict=True):
            if (p ^ v.ptr) % ALIGNMENT:
                return None
            views.append(v if p == v.ptr else v.at(p))
        found: Views = Views.__new__(Views)
        found.extend(views)
        found.key, found.pointers = self.key, pointers
        return found


class _Recent:
    """What an operation was last given; for torch tensors also a test whether others have the same forms."""

    __slots__ = ("count", "guards", "same", "views")

    def __init__(self, views: Views, same: Callable[..., bool] | None = None, guards: int = 0) -> None:
        self.views = views
        self.count = len(views)
        self.same = same
        self.guards = guards  # made for these forms; inference mode and autocast ask for one of their own


MAX_GUARDS = 8
_recent: dict[str, _Recent] = {}


def view_all(arrays: tuple[Any, ...], names: Sequence[str], operation: str) -> Views:
    """`view` of each array of a call, cheaper: where they have the forms of the call before, only addresses are read.

    Raises:
        As `view`.
    """
    recent = _recent.get(operation)
    if recent is not None and recent.count == len(arrays):
        same = recent.same
        if same is not None and same(*arrays):
            pointers = tuple(map(_torch_address, arrays))
            found = recent.views
            if pointers == found.pointers:
                return found
            moved = found.at(pointers)
            if moved is not None:
                recent.views = moved
                return moved
        for array, seen in zip(arrays, recent.views, strict=True):
            if _kept_of_numpy(array) is not seen:
                break
        else:
            return recent.views
        views = [view(a, name, operation) for a, name in zip(arrays, names, strict=True)]
        if views == recent.views:
            return recent.views
    else:
        recent = None
        views = [view(a, name, operation) for a, name in zip(arrays, names, strict=True)]
    found = Views(views)
    if all(v.owner is None and v.handle is None for v in views):  # keeps nothing alive
        same, guards = None, 0
        if recent is not None and recent.views.key == found.key:  # forms that come back are worth a guard
            same, guards = recent.same, recent.guards
            if guards < MAX_GUARDS:
                same, guards = _torch_guard(arrays) or same, guards + 1
        _recent[operation] = _Recent(found, same, guards)
    return found


def last_test(operation: str) -> tuple[Callable[..., bool], Callable[[Any], int], int] | None:
    """How torch tensors with the forms of the operation's last call are told, their addresses, and `Views.key` of them.

    The key depends on their alignment too, which is not tested. None where those arrays have no such test.
    """
    recent = _recent.get(operation)
    return None if recent is None or recent.same is None else (recent.same, _torch_address, recent.views.key)


# A weak reference also keeps NumPy from resizing the array in place, so pointer and shape stay true.
_numpy_views: dict[int, tuple[weakref.ref[Any], ArrayView]] = {}


def _kept_of_numpy(array: Any) -> ArrayView | None:
    """The view of a NumPy array that was seen before and is as it was; None for whatever else."""
    held: Any = _numpy_views.get(id(array))
    if held is None or held[0]() is not array:
        return None
    seen: ArrayView = held[1]
    if (
        seen.shape == array.shape
        and (seen.dtype.numpy is array.dtype or seen.dtype.numpy == array.dtype)
        and seen.writable is array.flags.writeable
    ):
        return seen
    return None


def view(array: Any, name: str, operation: str) -> ArrayView:
    """See `array` as an `ArrayView`. Nothing is copied; `name` and `operation` are for the message of a refusal.

    Raises:
        DTypeError: the dtype, or the kind of object, is not one this library stores.
        StaleRuntimeError: a `ti.ndarray` or `CacheArray` of a runtime that is gone.
    """
    kind = type(array)
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers[kind] = _reader_of(array, kind, name, operation)
    return reader(array, name, operation)


_Reader = Callable[[Any, str, str], "ArrayView"]
_readers: dict[type, _Reader] = {}


def _reader_of(array: Any, kind: type, name: str, operation: str) -> _Reader:
    """How arrays of this type are seen."""
    if kind is ArrayView:
        return _of_view
    if issubclass(kind, CacheArray):
        return _of_cache_array
    if kind.__module__.partition(".")[0] == "torch" or _is_torch_subclass(kind):
        return _of_torch
    if issubclass(kind, np.ndarray):
        return _of_numpy
    if kind.__module__.startswith("taichi."):
        return _of_taichi
    if hasattr(array, "__cuda_array_interface__"):
        return _of_cuda_interface
    if hasattr(array, "__dlpack__"):
        return _of_dlpack
    raise DTypeError(
        f"{operation}: {name} is {kind.__module__}.{kind.__qualname__}, which is no array. Pass a NumPy array, a torch "
        f"tensor, a ti.ndarray or an object with __dlpack__."
    )


def _of_view(array: ArrayView, name: str, operation: str) -> ArrayView:
    return array


def _of_cache_array(array: CacheArray, name: str, operation: str) -> ArrayView:
    return array.view_for(operation)


def _is_torch_subclass(kind: type) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)


def _unknown_dtype(name: str, operation: str, dtype: Any) -> DTypeError:
    return DTypeError(f"{operation}: {name} has dtype {dtype}. Use one of {', '.join(row.name for row in dtypes.ALL)}.")


def _numpy_address(array: Any) -> int:
    # NumPy itself takes a microsecond to tell; as a buffer it is told in a third. ml_dtypes have no buffer.
    if array.flags.carray and array.dtype.kind != "V":
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))
        except (TypeError, ValueError, BufferError):
            pass  # an empty one
    return int(array.ctypes.data)


_numpy_forms: dict[tuple[Any, ...], ArrayView] = {}


def _of_numpy(array: Any, name: str, operation: str) -> ArrayView:
    seen = _kept_of_numpy(array)
    if seen is not None:
        return seen
    number = id(array)
    pointer = _numpy_address(array)
    form = (array.shape, array.strides, array.dtype, array.flags.writeable, pointer % ALIGNMENT)
    like = _numpy_forms.get(form)
    if like is None:
        if len(_numpy_forms) >= MAX_FORMS:
            _numpy_forms.clear()
        like = _numpy_forms[form] = _view_of_numpy(array, pointer, name, operation)
    found = like.at(pointer)
    _numpy_views[number] = (weakref.ref(array, lambda _: _numpy_views.pop(number, None)), found)
    return found


def _view_of_numpy(array: Any, pointer: int, name: str, operation: str) -> ArrayView:
    dtype = dtypes.of_numpy(array.dtype)
    if dtype is None:
        raise _unknown_dtype(name, operation, array.dtype)
    itemsize = dtype.itemsize
    if any(s % itemsize for s in array.strides):
        raise ShapeError(
            f"{operation}: {name} has byte strides {array.strides}, not multiples of its {itemsize}-byte elements. "
            f"Pass a copy: numpy.ascontiguousarray({name})."
        )
    strides = tuple(s // itemsize for s in array.strides)
    return ArrayView(pointer, array.shape, strides, dtype, "cpu", writable=array.flags.writeable)


_torch_forms: dict[tuple[Any, ...], ArrayView] = {}


def _of_torch(array: Any, name: str, operation: str) -> ArrayView:
    # A model makes new tensors of the same form each step, so what follows from the form is kept, not the tensor.
    try:
        pointer = array.data_ptr()
        form = (array.shape, array.stride(), array.dtype, array.device, pointer % ALIGNMENT)
    except RuntimeError:
        _check_strided(array, name, operation)
        raise
    if array.is_neg():
        raise DTypeError(
            f"{operation}: {name} is a lazily negated torch tensor; its memory holds other values. "
            f"Pass {name}.resolve_neg()."
        )
    seen = _torch_forms.get(form)
    if seen is None:
        _check_strided(array, name, operation)
        shape, strides, torch_dtype, torch_device, _ = form
        dtype = dtypes.of_torch(torch_dtype)
        if dtype is None:
            raise _unknown_dtype(name, operation, torch_dtype)
        device = _torch_device_name(torch_device, name, operation)
        if len(_torch_forms) >= MAX_FORMS:
            _torch_forms.clear()
        seen = _torch_forms[form] = ArrayView(pointer, tuple(shape), strides, dtype, device)
    return seen if seen.ptr == pointer else seen.at(pointer)


_torch_address: Callable[[Any], int]
_torch_guards: Any = None  # torch's class of guards; False where it does not do what is needed


def _torch_guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """A test, one call of torch's, for tensors of these very forms: type, dtype, device, shape, strides, lazy bits.

    It is what guards torch's compiled functions. None for what is no plain tensor, or where torch has no such guards.
    """
    global _torch_address, _torch_guards
    torch: Any = sys.modules.get("torch")
    if torch is None or _torch_guards is False or any(type(t) is not torch.Tensor for t in tensors):
        return None
    if _torch_guards is None:
        _torch_address = torch.Tensor.data_ptr
        _torch_guards = _find_torch_guards(torch) or False
        return _torch_guard(tensors)
    shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    found: Callable[..., bool] = _torch_guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
    return found


def _find_torch_guards(torch: Any) -> Any:
    """Torch's guards, if they are there and tell apart what they must; they are no public part of torch."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        with torch.inference_mode(False), torch.enable_grad():
            base = torch.zeros(2, 3)
            same = guards(base, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
            others = (
                torch.zeros(3, 2),
                torch.zeros(2, 3, 1),
                torch.zeros(3, 2).t(),
                torch.zeros(2, 3, dtype=torch.float64),
                torch.empty(2, 3, device="meta"),
                torch.zeros(2, 3).to_sparse(),
                torch._neg_view(torch.zeros(2, 3)),
                torch.zeros(2, 3, requires_grad=True),
                np.zeros((2, 3), np.float32),
            )
            works = same(torch.ones(2, 3)) and not any(same(other) for other in others)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return None
    return guards if works else None


def _check_strided(array: Any, name: str, operation: str) -> None:
    if str(array.layout) != "torch.strided":
        raise DTypeError(f"{operation}: {name} is a torch tensor of layout {array.layout}. Pass {name}.to_dense().")


def _torch_device_name(device: Any, name: str, operation: str) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    raise ArchError(f"{operation}: {name} is a torch tensor on {device}. Use a CPU or CUDA tensor.")


def _of_taichi(array: Any, name: str, operation: str) -> ArrayView:
    if not hasattr(array, "arr"):
        raise DTypeError(
            f"{operation}: {name} is a {type(array).__name__}. Of Taichi's containers only ti.ndarray is seen."
        )
    if runtime.is_stale_ndarray(array):
        raise StaleRuntimeError(
            f"{operation}: {name} is a ti.ndarray made before the last ti.init() or ti.reset(); its memory is gone. "
            f"Make it again."
        )
    live = runtime.current()
    taichi_name = str(array.dtype)
    element_name = {"u16": "bf16"}.get(taichi_name, taichi_name)  # Taichi has no bfloat16; u16 holds its bits
    dtype = next((row for row in dtypes.ALL if row.short == element_name), None)
    if dtype is None:
        raise _unknown_dtype(name, operation, taichi_name)
    shape = tuple(array.shape) + tuple(array.element_shape)
    if live.is_spirv:
        if len(shape) != 1:
            staged = StagedNdarray(array)
            return ArrayView(staged.host.ctypes.data, shape, contiguous_strides(shape), dtype, "cpu", owner=staged)
        return ArrayView(0, shape, (1,), dtype, live.arch, handle=array, owner=array)
    pointer = live.program.get_ndarray_data_ptr_as_int(array.arr)
    device = "cuda:0" if live.is_cuda else "cpu"
    return ArrayView(pointer, shape, contiguous_strides(shape), dtype, device, owner=array)


class StagedNdarray:
    """A `ti.ndarray` of several axes on Vulkan or Metal, which a flat kernel argument cannot take: a host copy of it.

    Owns what a view of it sees; whoever wrote to the view calls `write_back`.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        self.host = np.ascontiguousarray(array.to_numpy())

    def write_back(self) -> None:
        """Put the host copy into the ndarray."""
        self.array.from_numpy(self.host)


def _of_cuda_interface(array: Any, name: str, operation: str) -> ArrayView:
    described = array.__cuda_array_interface__
    dtype = dtypes.of_numpy(np.dtype(described["typestr"]))
    if dtype is None:
        raise _unknown_dtype(name, operation, described["typestr"])
    shape = tuple(described["shape"])
    byte_strides = described.get("strides")
    strides = contiguous_strides(shape) if byte_strides is None else tuple(s // dtype.itemsize for s in byte_strides)
    pointer, read_only = described["data"]
    return ArrayView(pointer, shape, strides, dtype, "cuda:0", writable=not read_only, owner=array)


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

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST = 1, 2, 3

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


def _of_dlpack(array: Any, name: str, operation: str) -> ArrayView:
    try:
        capsule = array.__dlpack__()
    except BufferError as error:
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) gave no DLPack capsule ({error}). Pass a copy of it."
        ) from error
    if not _capsule_is_valid(capsule, b"dltensor"):
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) gave a DLPack capsule this library cannot read."
        )
    tensor = ctypes.cast(_capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLManagedTensor)).contents.tensor
    dtype = dtypes.of_dlpack(tensor.code, tensor.bits)
    if dtype is None or tensor.lanes != 1:
        raise _unknown_dtype(name, operation, f"DLPack code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes")
    if tensor.device_type in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
        device = "cpu"
    elif tensor.device_type == _DLPACK_CUDA:
        device = f"cuda:{tensor.device_id}"
    else:
        raise ArchError(f"{operation}: {name} lies on DLPack device {tensor.device_type}. Use CPU or CUDA memory.")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    immutable = type(array).__module__.startswith("jax")  # its arrays are values; writing into one is undefined
    # The capsule was not consumed, so its own destructor frees the export when the view goes.
    return ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        device,
        writable=not immutable,
        owner=(array, capsule),
    )


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


def _export_dlpack(array: ArrayView, owner: Any) -> Any:
    """A DLPack capsule over `array`; `owner` lives until the consumer is done with it."""
    managed = _DLManagedTensor()
    shape = (ctypes.c_int64 * array.ndim)(*array.shape)
    strides = (ctypes.c_int64 * array.ndim)(*array.strides)
    kind, index = (_DLPACK_CPU, 0) if array.device == "cpu" else (_DLPACK_CUDA, int(array.device.partition(":")[2]))
    code, bits = array.dtype.dlpack
    managed.tensor = _DLTensor(array.ptr, kind, index, array.ndim, code, bits, 1, shape, strides, 0)
    managed.deleter = _release_export_c
    address = ctypes.addressof(managed)
    _exports[address] = (managed, shape, strides, owner)
    return _new_capsule(address, b"dltensor", ctypes.cast(_free_unconsumed_c, ctypes.c_void_p))


class Memory:
    """A block of device memory in the live runtime: NumPy's on CPU, torch's or Taichi's on CUDA, else Taichi's."""

    def __init__(self, nbytes: int, live: runtime.Runtime) -> None:
        self.runtime = live
        self.nbytes = nbytes
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        self.handle: Any = None
        self.block: Any
        torch = sys.modules.get("torch")
        if live.is_cpu:
            raw = np.empty(size + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            self.block = raw[start : start + size]
            self.ptr = self.block.ctypes.data
            self.device = "cpu"
        elif live.is_cuda and torch is not None and torch.cuda.is_available():
            self.block = torch.empty(size, dtype=torch.uint8, device="cuda:0")
            self.ptr = self.block.data_ptr()
            self.device = "cuda:0"
        else:
            taichi = runtime.ti
            self.block = taichi.ndarray(taichi.u32, (size // 4,))
            self.handle = self.block
            self.ptr = live.program.get_ndarray_data_ptr_as_int(self.handle.arr) if live.is_cuda else 0
            self.device = "cuda:0" if live.is_cuda else live.arch

    def __del__(self) -> None:
        # torch hands freed memory out again in the order of the stream that it was made on; launches may be elsewhere.
        # At the interpreter's end modules lose their names one by one, and nobody takes the memory any more.
        block: Any = getattr(self, "block", None)
        if not hasattr(block, "record_stream") or sys is None or sys.is_finalizing() or runtime is None:
            return
        for handle in tuple(runtime.side_streams):
            block.record_stream(sys.modules["torch"].cuda.ExternalStream(handle))

    def array(self, shape: tuple[int, ...], dtype: DType, byte_offset: int = 0) -> ArrayView:
        """A contiguous array in this memory, `byte_offset` from its start."""
        return ArrayView(
            self.ptr + byte_offset if self.ptr else 0,
            shape,
            contiguous_strides(shape),
            dtype,
            self.device,
            handle=self.handle if not self.ptr else None,
            offset=0 if self.ptr else byte_offset,
            owner=self,
        )

    def clear(self) -> None:
        """Set every byte to zero."""
        if hasattr(self.block, "zero_"):
            self.block.zero_()
        else:
            self.block.fill(0)


def new_array(shape: Sequence[int], dtype: DType, live: runtime.Runtime, *, zeroed: bool = False) -> ArrayView:
    """A contiguous array in memory of its own, on the device of the live runtime."""
    memory = Memory(math.prod(shape) * dtype.itemsize, live)
    if zeroed:
        memory.clear()
    return memory.array(tuple(shape), dtype)


def new_like(like: Any, shape: Sequence[int], dtype: DType, live: runtime.Runtime, *, zeroed: bool = False) -> Any:
    """A new array of the kind of `like`: NumPy, torch on the same device, or a `CacheArray` for anything else."""
    if isinstance(like, np.ndarray):
        return (np.zeros if zeroed else np.empty)(shape, dtype.numpy)
    if hasattr(like, "new_empty"):
        return (like.new_zeros if zeroed else like.new_empty)(tuple(shape), dtype=dtypes.to_torch(dtype.name))
    return CacheArray(new_array(shape, dtype, live, zeroed=zeroed), live)


def to_device(array: np.ndarray[Any, Any], live: runtime.Runtime) -> ArrayView:
    """A copy of a host array in device memory of the live runtime."""
    dtype = dtypes.of_numpy(array.dtype)
    assert dtype is not None
    found = new_array(array.shape, dtype, live)
    write_host(np.ascontiguousarray(array), found)
    return found


def write_host(array: np.ndarray[Any, Any], to: ArrayView) -> None:
    """Copy a contiguous host array over the start of memory that `Memory` made."""
    block = to.owner.block
    if to.device == "cpu":
        ctypes.memmove(to.ptr, array.ctypes.data, array.nbytes)
    elif hasattr(block, "from_numpy"):
        words = np.zeros(block.shape[0] * 4, np.uint8)
        words[: array.nbytes] = array.reshape(-1).view(np.uint8)
        block.from_numpy(words.view(np.uint32))
    else:
        import torch

        block[: array.nbytes].copy_(torch.from_numpy(array.reshape(-1).view(np.uint8)))


class CacheArray:
    """Memory of a store, handed out without a copy: an array with a shape, a true dtype and a device.

    `numpy()` works on CPU, `torch()` and `__dlpack__` on CPU and CUDA; `copy_to_host()` works everywhere and copies.

    Example:
        >>> import tikv
        >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype="bfloat16")
        >>> store.keys(0).shape, str(store.keys(0).numpy().dtype)
        ((1, 2, 8, 4), 'bfloat16')
    """

    def __init__(self, array: ArrayView, live: runtime.Runtime) -> None:
        self._array = array
        self._runtime = live

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each axis."""
        return self._array.shape

    @property
    def dtype(self) -> DType:
        """The true storage dtype."""
        return self._array.dtype

    @property
    def device(self) -> str:
        """Where the memory lies: cpu, cuda:0, vulkan or metal."""
        return self._array.device

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self._array.nbytes

    def view_for(self, operation: str) -> ArrayView:
        """The view an operation uses.

        Raises:
            StaleRuntimeError: the runtime this memory was made in is gone.
        """
        runtime.require_alive(self._runtime, operation)
        return self._array

    def numpy(self) -> np.ndarray[Any, Any]:
        """The memory as a NumPy array, not a copy; the launches so far are done.

        Raises:
            ArchError: the memory is not on CPU; `copy_to_host()` copies it.
        """
        array = self.view_for("CacheArray.numpy")
        if array.device != "cpu":
            raise ArchError(
                f"CacheArray.numpy: the memory is on {array.device}. Use copy_to_host(), torch() or __dlpack__()."
            )
        return as_numpy(array)

    def torch(self) -> Any:
        """The memory as a torch tensor, not a copy, on CPU or CUDA.

        Raises:
            ArchError: the memory is on Vulkan or Metal, where torch has no view of it; or torch is not installed.
        """
        try:
            import torch
        except ImportError as error:
            raise ArchError("CacheArray.torch: torch is not installed. Install taichi-kv[torch].") from error
        return torch.from_dlpack(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        array = self.view_for("CacheArray.__dlpack__")
        if array.device == "cpu":
            return _DLPACK_CPU, 0
        if array.device.startswith("cuda"):
            return _DLPACK_CUDA, int(array.device.partition(":")[2])
        raise ArchError(f"CacheArray.__dlpack__: memory on {array.device} has no pointer to share. Use copy_to_host().")

    def __dlpack__(self, **_requests: Any) -> Any:
        self.__dlpack_device__()
        array = self._array
        if array.device != "cpu":
            self._runtime.synchronize()
        return _export_dlpack(array, array.owner)

    def copy_to_host(self) -> np.ndarray[Any, Any]:
        """A NumPy copy of the contents, from any device; waits for the launches so far."""
        return read_host(self.view_for("CacheArray.copy_to_host"), self._runtime)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = self.numpy() if self.device == "cpu" and not copy else self.copy_to_host()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"CacheArray({describe(self._array)}, {self.device})"


def as_numpy(array: ArrayView) -> np.ndarray[Any, Any]:
    """A NumPy array over a view's host memory, not a copy; it keeps the view's owner, if there is one, alive."""
    if not array.span:
        return np.empty(array.shape, array.dtype.numpy)
    buffer: Any = (ctypes.c_uint8 * array.span).from_address(array.ptr)
    buffer.owner = array.owner
    itemsize = array.dtype.itemsize
    found: np.ndarray[Any, Any] = np.ndarray(
        array.shape, array.dtype.numpy, buffer, 0, [s * itemsize for s in array.strides]
    )
    return found


def read_host(array: ArrayView, live: runtime.Runtime) -> np.ndarray[Any, Any]:
    """A contiguous NumPy copy of a view's elements, from any device."""
    live.synchronize()
    itemsize = array.dtype.itemsize
    if array.device == "cpu":
        raw = ctypes.string_at(array.ptr, array.span)
    elif array.device.startswith("cuda"):
        raw = _read_cuda(array)
    else:
        words: np.ndarray[Any, Any] = getattr(array.owner, "block", array.owner).to_numpy()
        raw = words.view(np.uint8)[array.offset : array.offset + array.span].tobytes()
    flat = np.frombuffer(raw, array.dtype.numpy)
    found: np.ndarray[Any, Any] = np.lib.stride_tricks.as_strided(
        flat, array.shape, [s * itemsize for s in array.strides]
    ).copy()
    return found


def _read_cuda(array: ArrayView) -> bytes:
    block: Any = getattr(array.owner, "block", None)
    if hasattr(block, "to_numpy"):  # Taichi's own memory
        words = block.to_numpy().view(np.uint8)
        start = array.ptr - array.owner.ptr
        return bytes(words[start : start + array.span].tobytes())
    import torch

    return bytes(torch.as_tensor(CudaBytes(array.ptr, array.span), device=array.device).cpu().numpy().tobytes())


class CudaBytes:
    """Bytes at a CUDA address, for whatever reads `__cuda_array_interface__`; the caller keeps the memory alive."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (ptr, False), "version": 3}
