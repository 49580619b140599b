"""Views any array as an `ArrayView`, without a copy: there is a reader for each kind of array.

`view` accepts NumPy, torch, `ti.ndarray`, `CacheArray`, and arrays with `__cuda_array_interface__` or DLPack.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from tikv import dtypes, engines, runtime
from tikv.arrays import dlpack, mps
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import (
    ALIGNMENT,
    MAX_FORMS,
    ArrayView,
    contiguous_strides,
    describe,
    numpy_address,
    require_memory,
    unknown_dtype,
)
from tikv.arrays.cache_array import CacheArray
from tikv.arrays.memory import StagedNdarray
from tikv.errors import ArchError, DTypeError, ShapeError, StaleRuntimeError
from tikv.runtime.cache import BoundedCache

# By the id of the array; an entry is removed with its array, so there is no other limit. A weak reference also keeps
# NumPy from resizing the array in place, so pointer and shape stay valid.
_numpy_views: dict[int, tuple[weakref.ref[Any], ArrayView]] = {}


def known_numpy_view(array: Array) -> ArrayView | None:
    """The view of a NumPy array that was seen before and is unchanged; None for anything else."""
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


def view(array: Array, name: str, operation: str) -> ArrayView:
    """View `array` as an `ArrayView`, which keeps it alive. Nothing is copied.

    Args:
        array: any array.
        name, operation: the names in error messages.

    Raises:
        DTypeError: this library does not store the dtype, or does not know the kind of object; or the object raises.
        ShapeError: a torch tensor has no memory, or less than its shape needs. The size of its storage is not checked
            if a tensor of the same form has been seen at its address.
        StaleRuntimeError: a `ti.ndarray` or `CacheArray` belongs to a runtime that no longer exists.
    """
    array_view = view_without_owner(array, name, operation)
    if array_view.owner is None and array_view is not array:
        array_view = array_view.at_address(array_view.ptr)
        array_view.owner = array
    return array_view


def view_without_owner(array: Array, name: str, operation: str) -> ArrayView:
    """`view` for views that are kept from call to call; the caller keeps NumPy arrays and torch tensors alive.

    Raises:
        As `view` does.
    """
    kind = type(array)
    reader = _readers.get(kind)
    if reader is None:
        reader = _readers.keep(kind, _reader_of(array, kind, name, operation))
    return reader(array, name, operation)


def view_of_new(array: Array, name: str, operation: str) -> ArrayView:
    """`view_without_owner` of an array that `new_like` made for this call: it is neither remembered nor checked."""
    if type(array) is np.ndarray:
        return _see_numpy(array, name, operation)
    if _readers.get(type(array)) is _of_torch and array.device.type != "mps":
        pointer = array.data_ptr()
        return _see_torch(array, pointer, _torch_form(array, pointer), name, operation)
    return view_without_owner(array, name, operation)


def view_bits(array: Array, name: str, operation: str) -> ArrayView:
    """As `view`, for code that moves bits without reading numbers: NumPy and torch arrays of any dtype of 1 to 8 bytes.

    Elements of a dtype that this library does not store are viewed as a dtype of the same size that it does.

    Raises:
        As `view` does.
    """
    if isinstance(array, np.ndarray):
        if dtypes.of_numpy(array.dtype) is None and not array.dtype.hasobject:
            seen = dtypes.of_size(array.dtype.itemsize)
            array = array if seen is None else array.view(seen.numpy)
    elif type(array).__module__.partition(".")[0] == "torch" and hasattr(array, "data_ptr"):
        seen = dtypes.of_size(array.dtype.itemsize) if dtypes.of_torch(array.dtype) is None else None
        with contextlib.suppress(RuntimeError):  # a sparse or nested tensor, which `view` will report
            array = array if seen is None else array.view(dtypes.to_torch(seen.name))
    return view(array, name, operation)


_Reader = Callable[[Any, str, str], "ArrayView"]
_readers: BoundedCache[type, _Reader] = BoundedCache()


def _reader_of(array: Array, kind: type, name: str, operation: str) -> _Reader:
    """The reader for arrays of this type."""
    if kind is ArrayView:
        return _of_view
    if issubclass(kind, CacheArray):
        return _of_cache_array
    if kind.__module__.partition(".")[0] == "torch" or _is_torch_subclass(kind):
        return _of_torch
    if issubclass(kind, np.ma.MaskedArray):
        return _refuse_masked
    if issubclass(kind, np.ndarray):
        return _of_numpy
    if kind.__module__.partition(".")[0] in engines.ALL:
        return _of_engine
    if _has(array, "__cuda_array_interface__"):
        return _of_cuda_interface
    if hasattr(array, "__dlpack__"):
        return dlpack.read
    called = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise DTypeError(
        f"{operation}: {name} is {called}, which is not an array. Pass a NumPy array, a torch tensor, a ti.ndarray or "
        f"an object with __dlpack__."
    )


def _has(array: Array, attribute: str) -> bool:
    try:
        return hasattr(array, attribute)
    except Exception:  # a property that raises
        return True


def _refuse_masked(array: Array, name: str, operation: str) -> ArrayView:
    raise DTypeError(
        f"{operation}: {name} is a masked array, and its mask would be lost. Pass {name}.filled(value), or "
        f"{name}.data, which has the masked values too."
    )


def _of_view(array: ArrayView, name: str, operation: str) -> ArrayView:
    return array


def _of_cache_array(array: CacheArray, name: str, operation: str) -> ArrayView:
    return array.view_for(operation)


def _is_torch_subclass(kind: type) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)


_numpy_forms: BoundedCache[tuple[Any, ...], ArrayView] = BoundedCache(MAX_FORMS)


def _of_numpy(array: Array, name: str, operation: str) -> ArrayView:
    seen = known_numpy_view(array)
    if seen is not None:
        return seen
    number = id(array)
    array_view = _see_numpy(array, name, operation)
    _numpy_views[number] = (weakref.ref(array, lambda _: _numpy_views.pop(number, None)), array_view)
    return array_view


def _see_numpy(array: Array, name: str, operation: str) -> ArrayView:
    pointer = numpy_address(array)
    form = (array.shape, array.strides, array.dtype, array.flags.writeable, pointer % ALIGNMENT)
    like = _numpy_forms.get(form)
    if like is None:
        like = _numpy_forms.keep(form, _view_of_numpy(array, pointer, name, operation))
    return like.at_address(pointer)


def _view_of_numpy(array: Array, pointer: int, name: str, operation: str) -> ArrayView:
    dtype = dtypes.of_numpy(array.dtype)
    if dtype is None:
        raise unknown_dtype(name, operation, array.dtype)
    itemsize = dtype.itemsize
    if any(s % itemsize for s in array.strides):
        raise ShapeError(
            f"{operation}: {name} has byte strides {array.strides}, not multiples of its {itemsize}-byte elements. "
            f"Pass a copy: numpy.ascontiguousarray({name})."
        )
    strides = tuple(s // itemsize for s in array.strides)
    return ArrayView(pointer, array.shape, strides, dtype, "cpu", writable=array.flags.writeable)


_torch_forms: BoundedCache[tuple[Any, ...], ArrayView] = BoundedCache(MAX_FORMS)


def _of_torch(array: Array, name: str, operation: str) -> ArrayView:
    # A model makes new tensors of the same form in each step, so what follows from the form is kept, not the tensor.
    try:
        pointer = array.data_ptr()
        form = _torch_form(array, pointer)
        negated = array.is_neg()
    except Exception as error:  # nested, sparse and other layouts; tensors inside torch.func, which wrap others
        _check_strided(array, name, operation)
        raise DTypeError(
            f"{operation}: {name} is a torch tensor without memory of its own ({_first_line(error)}). Pass a plain "
            "tensor: call outside torch.vmap and torch.func.grad, and pass the parts of a nested tensor one by "
            "one."
        ) from error
    if negated:
        raise DTypeError(
            f"{operation}: {name} is a lazily negated torch tensor; its memory holds other values. "
            f"Pass {name}.resolve_neg()."
        )
    seen = _see_torch(array, pointer, form, name, operation)
    check_torch_memory(array, pointer, seen, name, operation)
    return mps.view_of(array, seen.dtype) if seen.device == "mps" else seen


def _torch_form(array: Array, pointer: int) -> tuple[Any, ...]:
    return array.shape, array.stride(), array.dtype, array.device, pointer % ALIGNMENT


def _see_torch(array: Array, pointer: int, form: tuple[Any, ...], name: str, operation: str) -> ArrayView:
    seen = _torch_forms.get(form)
    if seen is None:
        _check_strided(array, name, operation)
        shape, strides, torch_dtype, torch_device, _ = form
        dtype = dtypes.of_torch(torch_dtype)
        if dtype is None:
            raise unknown_dtype(name, operation, torch_dtype)
        device = _torch_device_name(torch_device, name, operation)
        seen = _torch_forms.keep(form, ArrayView(pointer, tuple(shape), strides, dtype, device))
    return seen if seen.ptr == pointer else seen.at_address(pointer)


def check_torch_memory(array: Array, pointer: int, seen: ArrayView, name: str, operation: str) -> None:
    """Check that a torch tensor has memory, and as much as its shape needs.

    Raises:
        ShapeError: it has not.
    """
    if not seen.span:
        return
    try:
        first = array.storage_offset() * seen.dtype.itemsize
        held = array.untyped_storage().nbytes()
    except Exception as error:
        raise ShapeError(
            f"{operation}: {name} is a torch tensor without a storage ({_first_line(error)}). Pass a tensor whose "
            "values are in memory."
        ) from error
    if pointer <= first or held < first + seen.span:
        what = "there is no memory behind it" if pointer <= first else f"its storage has {held} bytes"
        raise ShapeError(
            f"{operation}: {name} is a torch tensor {describe(seen)} that needs {first + seen.span} bytes, and {what}. "
            "It may be a FakeTensor or a ZeroTensor, or resize_ made its storage smaller. Pass a tensor whose values "
            f"are in memory; {name}.clone() gives a ZeroTensor memory."
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _check_strided(array: Array, name: str, operation: str) -> None:
    if str(array.layout) != "torch.strided":
        raise DTypeError(f"{operation}: {name} is a torch tensor of layout {array.layout}. Pass {name}.to_dense().")


def _torch_device_name(device: Any, name: str, operation: str) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        return f"cuda:{device.index or 0}"
    if device.type == "mps":
        return "mps"
    raise ArchError(f"{operation}: {name} is a torch tensor on {device}. Use a tensor on CPU, CUDA or MPS.")


def _of_engine(array: Array, name: str, operation: str) -> ArrayView:
    used, of = runtime.engine_in_use(), engines.ALL[type(array).__module__.partition(".")[0]]
    if of is not used:
        raise ArchError(
            f"{operation}: {name} is a {type(array).__name__} of {of.title}, and this process uses {used.title}. "
            f"Call tikv.init(engine={of.name!r}) before the first operation, or pass a copy: {name}.to_numpy()."
        )
    if not hasattr(array, "arr"):
        raise DTypeError(
            f"{operation}: {name} is a {type(array).__name__}. Of {used.title}'s containers, only {used.alias}.ndarray "
            "can be passed."
        )
    if runtime.is_stale_ndarray(array):
        raise StaleRuntimeError(
            f"{operation}: {name} is a {used.alias}.ndarray made before the last {used.alias}.init() or "
            f"{used.alias}.reset(); its memory is gone. Make it again."
        )
    live = runtime.current()
    taichi_name = str(array.dtype)
    element_name = {"u16": "bf16"}.get(taichi_name, taichi_name)  # Taichi has no bfloat16; u16 holds its bits
    dtype = next((row for row in dtypes.ALL if row.short == element_name), None)
    if dtype is None:
        raise unknown_dtype(name, operation, taichi_name)
    shape = tuple(array.shape) + tuple(array.element_shape)
    if live.is_spirv:
        if len(shape) != 1:
            staged = StagedNdarray(array)
            return ArrayView(staged.host.ctypes.data, shape, contiguous_strides(shape), dtype, "cpu", owner=staged)
        return ArrayView(0, shape, (1,), dtype, live.arch, handle=array, owner=array)
    pointer = live.program.get_ndarray_data_ptr_as_int(array.arr)
    device = "cuda:0" if live.is_cuda else "cpu"
    return ArrayView(pointer, shape, contiguous_strides(shape), dtype, device, owner=array)


def _wait_for_producer(array: Array, stream: int | None, number: int) -> None:
    """Wait until an array is computed, unless the order of streams already makes tikv's launches wait.

    JAX computes on streams of its own, which the interface does not name; CuPy and others name the stream.
    """
    if hasattr(array, "block_until_ready"):
        array.block_until_ready()
    torch: Any = sys.modules.get("torch")
    if stream is None or not runtime.current().is_cuda:
        return
    if torch is None:
        runtime.current().synchronize()
    elif stream != dlpack.LEGACY_STREAM or torch.cuda.current_stream(number).cuda_stream:
        torch.cuda.ExternalStream(stream, device=f"cuda:{number}").synchronize()


def _of_cuda_interface(array: Array, name: str, operation: str) -> ArrayView:
    try:
        described = array.__cuda_array_interface__
    except Exception as error:
        raise DTypeError(
            f"{operation}: {name} ({type(array).__name__}) does not say where its memory is: its "
            f"__cuda_array_interface__ raised {type(error).__name__} ({_first_line(error)}). Pass a copy of it."
        ) from error
    dtype = dtypes.of_numpy(np.dtype(described["typestr"]))
    if dtype is None:
        raise unknown_dtype(name, operation, described["typestr"])
    shape = tuple(described["shape"])
    byte_strides = described.get("strides")
    strides = contiguous_strides(shape) if byte_strides is None else tuple(s // dtype.itemsize for s in byte_strides)
    pointer, read_only = described["data"]
    # The interface does not say which GPU it is; CuPy and others also have `__dlpack_device__`.
    number = array.__dlpack_device__()[1] if hasattr(array, "__dlpack_device__") else 0
    _wait_for_producer(array, described.get("stream"), number)
    array_view = ArrayView(pointer or 0, shape, strides, dtype, f"cuda:{number}", writable=not read_only, owner=array)
    require_memory(array_view, name, operation)
    return array_view
