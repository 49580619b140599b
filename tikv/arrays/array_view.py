"""Where an array lies: pointer (or handle and byte offset), shape and strides; nothing about whose array it is."""

from __future__ import annotations

import copy
import ctypes
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
ALIGNMENT = 64  # bytes; a cache line, and more than any word we move

MAX_FORMS = 1 << 16  # forms of arrays that are remembered
_forms: BoundedCache[tuple[Any, ...], int] = BoundedCache(MAX_FORMS)
_numbers = itertools.count()  # a number is never given twice, so what was kept under a forgotten one is never found


def _form_number(form: tuple[Any, ...]) -> int:
    """A small number for what a bound launch depends on: all but the address, of which only the alignment counts."""
    found = _forms.get(form)
    return _forms.keep(form, next(_numbers)) if found is None else found


# By the form of an array and how it is seen anew, a view of that form; of other addresses only the alignment counts.
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
        self.ptr = ptr  # address of element 0; 0 where memory has no address
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device  # "cpu", "cuda:0", "vulkan", "metal"; "mps": PyTorch's own memory on Metal
        self.writable = writable
        self.handle = handle  # where memory has no address: Taichi's ndarray, or the storage of a tensor on MPS
        self.offset = offset  # bytes from the start of the handle's memory to element 0; 0 where ptr says it all
        self.owner = owner  # keeps the memory alive
        self.host: np.ndarray[Any, Any] | None = None  # the elements, once they were read; they may be gone with others
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
        """Whether a GPU's kernels see it only after it was copied to tikv's memory."""
        return self.device in ("cpu", "mps")

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without the gaps between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def at_address(self, ptr: int) -> ArrayView:
        """Another array of this form, at an address with the same alignment; nothing holds its memory."""
        found: ArrayView = object.__new__(ArrayView)
        found.ptr = ptr
        found.shape, found.strides, found.dtype = self.shape, self.strides, self.dtype
        found.device, found.writable, found.handle = self.device, self.writable, None
        found.offset, found.owner, found.host = self.offset, None, None
        found.span, found.key = self.span, self.key
        return found

    def without_owner(self) -> ArrayView:
        """The same address without a hold on the memory, for what outlives a call."""
        if self.owner is None:
            return self
        return ArrayView(
            self.ptr, self.shape, self.strides, self.dtype, self.device, writable=self.writable, offset=self.offset
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ArrayView:
        """The same place in a copy of its owner, which is memory of our own."""
        owner = self.owner
        if not hasattr(owner, "block"):
            raise CopyError(f"copy.deepcopy: {self!r} is a view of another object's memory. Copy that object instead.")
        found = copy.deepcopy(owner, memo)
        return ArrayView(
            found.ptr + self.ptr - owner.ptr,
            self.shape,
            self.strides,
            self.dtype,
            self.device,
            writable=self.writable,
            handle=None if self.handle is None else found.handle,
            offset=self.offset,
            owner=found,
        )

    def restrided(self, shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> ArrayView:
        """The same memory seen with another shape and strides, starting `first` elements further on."""
        jump = first * self.dtype.itemsize
        if not self.ptr:
            return self._restrided(shape, strides, 0, self.offset + jump)
        key = (self.key, shape, strides, jump % ALIGNMENT)
        like = _restrided.get(key)
        if like is None:
            like = _restrided.keep(key, self._restrided(shape, strides, self.ptr + jump, self.offset).without_owner())
        found = like.at_address(self.ptr + jump)
        found.owner = self.owner
        return found

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
        shape = (*self.shape[:axis], end - first, *self.shape[axis + 1 :])
        return self.restrided(shape, self.strides, first * self.strides[axis])

    def batch_of_one(self) -> ArrayView:
        """The same with an axis of one sequence before its own."""
        return self.restrided((1, *self.shape), (0, *self.strides))

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


def numpy_address(array: Host) -> int:
    """Where a NumPy array's elements begin: it takes a microsecond to tell itself, and as a buffer a third of that."""
    if array.flags.carray and array.dtype.kind != "V":  # ml_dtypes have no buffer
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except (TypeError, ValueError, BufferError):
            pass  # an empty one
    return int(array.ctypes.data)


def host_bytes(ptr: int, nbytes: int) -> np.ndarray[Any, Any]:
    """The bytes from a host address on as a NumPy array, not a copy; the caller keeps the memory alive."""
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(ptr)
    return np.frombuffer(buffer, np.uint8)


class Views(list[ArrayView]):
    """The arrays of one call in turn, their addresses, and one number for what a launch over them depends on."""

    __slots__ = ("key", "pointers")
    followed = False  # by autograd, one of the arrays

    def __init__(self, views: Sequence[ArrayView]) -> None:
        super().__init__(views)
        self.key = _form_number(tuple([v.key for v in views]))
        self.pointers = tuple([v.ptr for v in views])

    def at_addresses(self, pointers: tuple[int, ...]) -> Views | None:
        """Arrays of these forms at other addresses; None where one is aligned differently."""
        views = []
        for v, p in zip(self, pointers, strict=True):
            if (p ^ v.ptr) % ALIGNMENT:
                return None
            views.append(v if p == v.ptr else v.at_address(p))
        found: Views = Views.__new__(Views)
        found.extend(views)
        found.key, found.pointers = self.key, pointers
        return found


class FollowedViews(Views):
    """Those of a call of which torch's autograd follows an array."""

    __slots__ = ()
    followed = True


def require_memory(array: ArrayView, name: str, operation: str) -> None:
    """An array with elements has an address, or a handle.

    Raises:
        ShapeError: it has none.
    """
    if array.span and not array.ptr and array.handle is None:
        raise ShapeError(
            f"{operation}: {name} is {describe(array)} without memory: its address is 0. Pass an array that holds "
            "values."
        )


def unknown_dtype(name: str, operation: str, dtype: Any) -> DTypeError:
    """The refusal of an array of a dtype that this library does not store."""
    return DTypeError(f"{operation}: {name} has dtype {dtype}. Use one of {', '.join(row.name for row in dtypes.ALL)}.")
