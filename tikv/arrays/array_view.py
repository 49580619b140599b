"""Where an array lies: pointer (or handle and byte offset), shape and strides, whatever library it comes from."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.dtypes import DType
from tikv.errors import CopyError, DTypeError, ShapeError
from tikv.runtime.cache import BoundedCache

Host = np.ndarray[Any, Any]  # numbers that the host reads
ALIGNMENT = 64  # bytes; a cache line, and more than any word that is moved

MAX_FORMS = 1 << 16  # forms of arrays that are remembered
_forms: BoundedCache[tuple[Any, ...], int] = BoundedCache(MAX_FORMS)
_numbers = itertools.count()  # no number is used twice, so an entry kept under a forgotten number is never found


def _form_number(form: tuple[Any, ...]) -> int:
    """A small number for what a bound launch depends on: everything except the address, but with its alignment."""
    number = _forms.get(form)
    return _forms.keep(form, next(_numbers)) if number is None else number


# Views by the form of an array and the new shape and strides; of an address only the alignment is part of the key.
_restrided: BoundedCache[tuple[Any, ...], ArrayView] = BoundedCache(MAX_FORMS)


class ArrayView:
    """Where an array lies: pointer (or handle and byte offset), shape, strides in elements, dtype, device."""

    __slots__ = (
        "device",
        "dtype",
        "handle",
        "host",
        "key",
        "offset",
        "owner",
        "ptr",
        "shape",
        "span",
        "strides",
        "writable",
    )

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
        self.ptr = ptr  # address of element 0; 0 if memory has no address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device  # "cpu", "cuda:0", "vulkan", "metal"; "mps": PyTorch's own memory on Metal
        self.writable = writable
        self.handle = handle  # if memory has no address: Taichi's ndarray, or the storage of a tensor on MPS
        self.offset = offset  # bytes from the start of the handle's memory to element 0; 0 if there is a ptr
        self.owner = owner  # keeps the memory alive
        self.host: np.ndarray[Any, Any] | None = None  # the elements, once read; others may change them
        self.span = span_bytes(shape, strides, dtype.itemsize)
        self.key = _form_number(
            (shape, strides, dtype.short, device, ptr % ALIGNMENT, writable, offset, handle is None)
        )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def is_staged(self) -> bool:
        """Whether a GPU's kernels need a copy of it in tikv's memory."""
        return self.device in ("cpu", "mps")

    @property
    def nbytes(self) -> int:
        """The bytes of the elements, without the gaps between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def at_address(self, ptr: int) -> ArrayView:
        """Another array of this form, at an address with the same alignment; it does not keep its memory alive."""
        view: ArrayView = object.__new__(ArrayView)
        view.ptr = ptr
        view.shape, view.strides, view.dtype = self.shape, self.strides, self.dtype
        view.device, view.writable, view.handle = self.device, self.writable, None
        view.offset, view.owner, view.host = self.offset, None, None
        view.span, view.key = self.span, self.key
        return view

    def without_owner(self) -> ArrayView:
        """The same view without a reference to the owner, for objects that outlive a call."""
        if self.owner is None:
            return self
        if self.handle is None:
            return self.at_address(self.ptr)
        return ArrayView(
            self.ptr, self.shape, self.strides, self.dtype, self.device, writable=self.writable, offset=self.offset
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ArrayView:
        """The same place in a copy of its owner, which is tikv's memory."""
        owner = self.owner
        if not hasattr(owner, "block"):
            raise CopyError(f"copy.deepcopy: {self!r} is a view of another object's memory. Copy that object instead.")
        new_owner = copy.deepcopy(owner, memo)
        return ArrayView(
            new_owner.ptr + self.ptr - owner.ptr,
            self.shape,
            self.strides,
            self.dtype,
            self.device,
            writable=self.writable,
            handle=None if self.handle is None else new_owner.handle,
            offset=self.offset,
            owner=new_owner,
        )

    def restrided(self, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> ArrayView:
        """The same memory with another shape and strides, starting `first` elements later."""
        jump = first * self.dtype.itemsize
        if not self.ptr:
            return self._restrided(shape, strides, 0, self.offset + jump)
        key = (self.key, shape, strides, jump % ALIGNMENT)
        like = _restrided.get(key)
        if like is None:
            like = _restrided.keep(key, self._restrided(shape, strides, self.ptr + jump, self.offset).without_owner())
        view = like.at_address(self.ptr + jump)
        view.owner = self.owner
        return view

    def _restrided(self, shape: tuple[int, ...], strides: tuple[int, ...], ptr: int, offset: int) -> ArrayView:
        return ArrayView(
            ptr,
            shape,
            strides,
            self.dtype,
            self.device,
            writable=self.writable,
            handle=self.handle,
            offset=offset,
            owner=self.owner,
        )

    def transposed(self, *order: int) -> ArrayView:
        """The same elements with the axes in this order."""
        return self.restrided(tuple(self.shape[i] for i in order), tuple(self.strides[i] for i in order))

    def part(self, axis: int, first: int, end: int) -> ArrayView:
        """The elements from `first` to `end` of one axis."""
        if first == 0 and end == self.shape[axis]:
            return self
        shape = (*self.shape[:axis], end - first, *self.shape[axis + 1 :])
        return self.restrided(shape, self.strides, first * self.strides[axis])

    def batch_of_one(self) -> ArrayView:
        """The same array with a leading axis of one sequence."""
        return self.restrided((1, *self.shape), (0, *self.strides))

    def __repr__(self) -> str:
        return describe(self)


def describe(array: ArrayView) -> str:
    """An array in a message: `f16[8,4096,128]`."""
    return f"{array.dtype.short}[{','.join(map(str, array.shape))}]"


def span_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first element to the end of the last in a strided array (strides in elements, not negative)."""
    if 0 in shape:
        return 0
    last = 0
    for n, stride in zip(shape, strides, strict=True):
        last += (n - 1) * stride
    return (1 + last) * itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return tuple(strides)


def is_contiguous(array: ArrayView) -> bool:
    """Whether elements follow one another in row-major order; the stride of an axis of length one is ignored."""
    row_major = contiguous_strides(array.shape)
    axes = zip(array.shape, array.strides, row_major, strict=True)
    return 0 in array.shape or all(n == 1 or stride == packed for n, stride, packed in axes)


def numpy_address(array: Host) -> int:
    """The address of a NumPy array's elements; reading it as a buffer takes a third of the microsecond NumPy takes."""
    if array.flags.carray and array.dtype.kind != "V":  # ml_dtypes have no buffer
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):
            pass  # an empty array
    return int(array.ctypes.data)


@functools.cache
def _bytes_of_bits(bits: int) -> Any:
    return ctypes.c_uint8 * (1 << bits)


def host_buffer(ptr: int, nbytes: int) -> Any:
    """A buffer of at least so many bytes from a host address on; more is not to be used.

    Each length would be a class of its own, which is slow to make, and which only the garbage collector frees.
    """
    return _bytes_of_bits(nbytes.bit_length()).from_address(ptr)


def host_bytes(ptr: int, nbytes: int) -> np.ndarray[Any, Any]:
    """The bytes from a host address on as a NumPy array, not a copy; the caller keeps the memory alive."""
    return np.frombuffer(host_buffer(ptr, nbytes), np.uint8, nbytes)


class Views(list[ArrayView]):
    """The arrays of one call in order, their addresses, and one number for what a launch over them depends on."""

    __slots__ = ("key", "pointers")
    followed = False  # whether autograd follows one of the arrays

    def __init__(self, views: Sequence[ArrayView]) -> None:
        super().__init__(views)
        self.key = _form_number(tuple([v.key for v in views]))
        self.pointers = tuple([v.ptr for v in views])

    def at_addresses(self, pointers: tuple[int, ...]) -> Views | None:
        """Arrays of these forms at other addresses; None if one is aligned differently."""
        views = []
        for v, p in zip(self, pointers, strict=True):
            if (p ^ v.ptr) % ALIGNMENT:
                return None
            views.append(v if p == v.ptr else v.at_address(p))
        moved: Views = Views.__new__(Views)
        moved.extend(views)
        moved.key, moved.pointers = self.key, pointers
        return moved


class FollowedViews(Views):
    """The views of a call in which torch's autograd follows an array."""

    __slots__ = ()
    followed = True


def require_memory(array: ArrayView, name: str, operation: str) -> None:
    """Check that an array with elements has an address, or a handle.

    Raises:
        ShapeError: it has neither.
    """
    if array.span and not array.ptr and array.handle is None:
        raise ShapeError(
            f"{operation}: {name} is {describe(array)} without memory: its address is 0. Pass an array that holds "
            "values."
        )


def unknown_dtype(name: str, operation: str, dtype: Any) -> DTypeError:
    """The error for an array of a dtype that this library does not store."""
    *most, last = [row.name for row in dtypes.of_argument(name, operation)]
    offered = f"{', '.join(most)} or {last}" if most else last
    return DTypeError(f"{operation}: {name} has dtype {dtype}. Use {offered}.")
