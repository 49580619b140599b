"""A store's memory as an array for NumPy, torch, and libraries that support DLPack."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tikv import dtypes, extras, runtime
from tikv.arrays import dlpack, mps
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import ArrayView, describe
from tikv.arrays.memory import as_numpy, new_array, read_host, to_device
from tikv.dtypes import DType
from tikv.errors import ArchError, ShapeError


class CacheArray(runtime.NotCopied):
    """Memory of a store, handed out without a copy: an array with a shape, a true dtype and a device.

    `numpy()` works on CPU, `torch()` and `__dlpack__` on CPU and CUDA, `torch()` also on Metal with Quadrants;
    `copy_to_host()` works everywhere and copies.

    Indexing gives views of `numpy()` on CPU and of `torch()` on CUDA. On Vulkan and Metal, whose memory has no pointer,
    it gives read-only NumPy copies. Arithmetic gives new arrays: torch's on CUDA, else NumPy's. Together with a torch
    tensor, and in torch's own functions, a `CacheArray` acts as a torch tensor.

    `reshape`, `transpose`, `T`, `astype`, `sum`, `mean`, `max`, `min`, `item` and `tolist` are called as in NumPy.
    Arrays that they return are of the kinds that indexing gives. For everything else use `numpy()` or `torch()`.

    `clone()`, `copy.copy()` and `copy.deepcopy()` return a `CacheArray` with its own memory; `pickle` is refused.

    Examples:
        >>> import tikv
        >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype="bfloat16")
        >>> store.keys(0).shape, str(store.keys(0).numpy().dtype)
        ((1, 2, 8, 4), 'bfloat16')
        >>> store.keys(0)[...] = 0  # the memory of a new store may hold anything
        >>> store.keys(0)[0, 1, :3] = 2
        >>> (store.keys(0)[0, :, 0] * 4).shape, float((store.keys(0) + 1)[0, 1, 2, 0])
        ((2, 4), 3.0)
        >>> store.keys(0)[...] = 1
        >>> store.keys(0).reshape(2, -1).shape, store.keys(0).sum(axis=(0, 2, 3)).tolist()
        ((2, 32), [32.0, 32.0])
    """

    instead = "Pickle copy_to_host(), a NumPy array."

    def __init__(self, array: ArrayView, live: runtime.Runtime) -> None:
        self._array = array
        self._runtime = live

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self._array.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> DType:
        """The true storage dtype."""
        return self._array.dtype

    @property
    def device(self) -> str:
        """Where the memory lies: cpu, cuda:0, cuda:1 and so on, vulkan or metal."""
        return self._array.device

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self._array.nbytes

    def view_for(self, operation: str) -> ArrayView:
        """The view that an operation uses.

        Raises:
            StaleRuntimeError: the runtime in which this memory was made no longer exists.
        """
        runtime.require_alive(self._runtime, operation)
        return self._array

    def numpy(self) -> np.ndarray[Any, Any]:
        """The memory as a NumPy array, not a copy; waits for the launches so far.

        Raises:
            ArchError: the memory is not on CPU; `copy_to_host()` copies it.
        """
        array = self.view_for("CacheArray.numpy")
        if array.device != "cpu":
            raise ArchError(
                f"CacheArray.numpy: the memory is on {array.device}. Use copy_to_host(), torch() or __dlpack__()."
            )
        return as_numpy(array)

    def torch(self, *, wait: bool = True) -> Any:
        """The memory as a torch tensor, not a copy: on CPU, CUDA, or MPS if Quadrants runs on Metal.

        A tensor on MPS becomes invalid when the engine is started again.

        Args:
            wait: False if every launch that uses the memory goes to torch's current stream, like the work on the
                tensor. Then the host does not wait for launches on several streams of a GPU.

        Raises:
            ArchError: the memory is on Vulkan, or on Metal with Taichi, where torch cannot view it.
            MissingPackageError: torch is not installed.
        """
        torch = extras.need("torch", "CacheArray.torch")
        array = self.view_for("CacheArray.torch")
        if array.device in runtime.SPIRV_ARCHS:
            return mps.as_torch(array, self._runtime)
        return torch.from_dlpack(self if wait else dlpack.export(array, None))

    def __dlpack_device__(self) -> tuple[int, int]:
        array = self.view_for("CacheArray.__dlpack__")
        if array.device in runtime.SPIRV_ARCHS:
            raise ArchError(
                f"CacheArray.__dlpack__: memory on {array.device} has no pointer to share. Use copy_to_host()."
            )
        return dlpack.device_of(array)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        copy: bool | None = None,
        **_requests: Any,
    ) -> Any:
        self.__dlpack_device__()
        if copy:
            return self.__copy__().__dlpack__(max_version=max_version)
        array, live = self._array, self._runtime
        # Work on CUDA's default stream comes after everything that was launched there.
        ordered = live.is_cuda and stream == dlpack.LEGACY_STREAM and not live.side_streams
        if array.device != "cpu" and not ordered:
            live.synchronize()
        return dlpack.export(array, max_version)

    def copy_to_host(self) -> np.ndarray[Any, Any]:
        """A NumPy copy of the contents, from any device; waits for the launches so far."""
        return read_host(self.view_for("CacheArray.copy_to_host"), self._runtime)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False and (self.device != "cpu" or dtype not in (None, self.dtype.numpy)):
            raise ShapeError(
                f"CacheArray.__array__: copy=False is not possible: {describe(self._array)} on {self.device} must "
                f"be copied to become {np.dtype(dtype or self.dtype.numpy)} in NumPy. Leave copy out."
            )
        host = self.numpy() if self.device == "cpu" and not copy else self.copy_to_host()
        return host if dtype is None else host.astype(dtype, copy=False)

    def reshape(self, *shape: Any) -> Any:
        """The elements in another shape, which may have one -1; a view of the memory if indexing gives one."""
        return self._native().reshape(*shape)

    def transpose(self, *axes: Any) -> Any:
        """The axes in this order, or reversed if no axes are given; a view if indexing gives one.

        Raises:
            ShapeError: some axes are given but not all; to swap two axes, as torch does, use ``torch().transpose``.
        """
        native = self._native()
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = tuple(order or reversed(range(self.ndim)))
        if len(order) != self.ndim:
            raise ShapeError(
                f"CacheArray.transpose: {len(order)} axes are named, and the array has {self.ndim}. Name all of "
                "them in their new order, as in NumPy, or use torch().transpose(a, b) to swap two."
            )
        return native.transpose(order) if isinstance(native, np.ndarray) else native.permute(order)

    @property
    def T(self) -> Any:
        """The axes reversed."""
        return self.transpose()

    def astype(self, dtype: Any) -> Any:
        """A copy in another dtype: a name, or a dtype of NumPy or torch.

        Raises:
            DTypeError: no dtype has that name.
        """
        row, native = dtypes.parse(dtype, "CacheArray.astype"), self._native()
        if isinstance(native, np.ndarray):
            return native.astype(row.numpy)
        return native.to(dtypes.to_torch(row.name), copy=True)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        """The sum over all axes or some: float64 for float64, float32 for other floats, int64 for integers."""
        return self._reduced("sum", axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Any:
        """The mean over all axes or some: float32 for floats of at most 32 bits, else float64."""
        return self._reduced("mean", axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Any:
        """The largest element over all axes or some, in the array's dtype; NaN if there is a NaN."""
        return self._reduced("max", axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Any:
        """The least element over all axes or some, in the array's dtype; NaN if there is a NaN."""
        return self._reduced("min", axis, keepdims)

    def _reduced(self, name: str, axis: Any, keepdims: bool) -> Any:
        native, of_floats = self._native(), self.dtype in dtypes.FLOATS
        wide = dtypes.float32 if of_floats else dtypes.float64 if name == "mean" else dtypes.int64
        if self.dtype is dtypes.float64:
            wide = dtypes.float64
        as_it_is = name in ("max", "min")
        if isinstance(native, np.ndarray):
            options = {} if as_it_is else {"dtype": wide.numpy}
            return getattr(native, name)(axis=axis, keepdims=keepdims, **options)
        axes, wider = tuple(range(self.ndim)) if axis is None else axis, native.to(dtypes.to_torch(wide.name))
        if as_it_is:
            return getattr(wider, f"a{name}")(axes, keepdim=keepdims).to(native.dtype)
        total = wider.sum(axes, keepdim=keepdims)
        # A division, as in NumPy: on a GPU torch multiplies by an inverse, which rounds differently.
        return total if name == "sum" else total / (native.numel() // max(total.numel(), 1))

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self.copy_to_host().item()

    def tolist(self) -> Any:
        """The elements as Python numbers, in nested lists."""
        return self.copy_to_host().tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.copy_to_host())  # NumPy refuses it for several elements

    def __iter__(self) -> Iterator[Any]:
        return iter(self._native())

    def _native(self, other: Any = None) -> Any:
        """The array for indexing and arithmetic: NumPy's or torch's, by the device and the other operand."""
        if self.device.startswith("cuda") or type(other).__module__.split(".")[0] == "torch":
            return self.torch()
        if self.device == "cpu":
            return self.numpy()
        copied = self.copy_to_host()
        copied.flags.writeable = False  # otherwise writes to the copy would be lost silently
        return copied

    def __getitem__(self, index: Array) -> Any:
        return self._native()[index]

    def __setitem__(self, index: Array, value: Any) -> None:
        if self.device in runtime.SPIRV_ARCHS:
            raise ArchError(
                f"CacheArray: memory on {self.device} cannot be written through an index. Append to the store, or use "
                "tikv.copy."
            )
        self._native()[index] = value._native() if isinstance(value, CacheArray) else value

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_for_torch(args), **_for_torch(kwargs or {}))

    def clone(self) -> CacheArray:
        """An array with the same elements in memory of its own on the same device, as torch's ``clone``.

        Cost: the elements are copied through the host, but on CUDA by torch on the device if torch is imported.

        Examples:
            >>> import tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=2, dtype="float32")
            >>> store.keys(0)[...] = 1
            >>> before = store.keys(0).clone()
            >>> store.keys(0)[...] = 2
            >>> before.tolist()
            [[[[1.0, 1.0], [1.0, 1.0]]]]
        """
        array, live = self.view_for("CacheArray.clone"), self._runtime
        if not live.is_cuda or "torch" not in sys.modules:
            return CacheArray(to_device(read_host(array, live), live), live)
        clone = CacheArray(new_array(array.shape, array.dtype, live), live)
        clone.torch().copy_(self.torch())
        return clone

    def __copy__(self) -> CacheArray:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheArray:
        return self.clone()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"CacheArray({describe(self._array)}, {self.device})"

    __hash__ = object.__hash__  # by identity, as in torch's tensors, since == compares the elements

    if not TYPE_CHECKING:  # a type checker refuses such a name itself

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"CacheArray has no {name!r}. Use this attribute of torch() or numpy(), which share its memory, or of "
                f"copy_to_host()."
            )

    if TYPE_CHECKING:  # they are made below, all in the same way
        __add__: Callable[[Any], Any]
        __radd__: Callable[[Any], Any]
        __sub__: Callable[[Any], Any]
        __rsub__: Callable[[Any], Any]
        __mul__: Callable[[Any], Any]
        __rmul__: Callable[[Any], Any]
        __truediv__: Callable[[Any], Any]
        __rtruediv__: Callable[[Any], Any]
        __pow__: Callable[[Any], Any]
        __rpow__: Callable[[Any], Any]
        __matmul__: Callable[[Any], Any]
        __rmatmul__: Callable[[Any], Any]
        __lt__: Callable[[Any], Any]
        __le__: Callable[[Any], Any]
        __gt__: Callable[[Any], Any]
        __ge__: Callable[[Any], Any]
        __neg__: Callable[[], Any]
        __abs__: Callable[[], Any]


def _for_torch(arguments: Any) -> Any:
    """The arguments of a torch function, with a tensor in place of each `CacheArray`."""
    if isinstance(arguments, CacheArray):
        return arguments.torch()
    if isinstance(arguments, dict):
        return {name: _for_torch(a) for name, a in arguments.items()}
    return type(arguments)(map(_for_torch, arguments)) if type(arguments) in (list, tuple) else arguments


def _operators(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The operator of two operands, with a `CacheArray` at its left, at its right, and changed in place."""
    function, in_place = getattr(operator, name), getattr(operator, f"i{name}", None)

    def at_left(self: CacheArray, other: Any) -> Any:
        mine = self._native(other)
        return function(mine, other._native(mine) if isinstance(other, CacheArray) else other)

    def at_right(self: CacheArray, other: Any) -> Any:
        return function(other, self._native(other))

    def changed(self: CacheArray, other: Any) -> CacheArray:
        self[...] = at_left(self, other)
        return self

    yield f"__{name}__", at_left
    if in_place is not None:
        yield f"__r{name}__", at_right
        yield f"__i{name}__", changed


def _operator_of_one(name: str) -> Callable[[CacheArray], Any]:
    function = getattr(operator, name)
    return lambda self: function(self._native())


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "eq", "ne", "lt", "le", "gt", "ge"):
    for _method, _function in _operators(_name):
        setattr(CacheArray, _method, _function)
for _name in ("neg", "abs"):
    setattr(CacheArray, f"__{_name}__", _operator_of_one(_name))
