"""Memory of a store as others take it: NumPy, torch, and whatever speaks DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import dlpack
from tikv.arrays.array_view import ArrayView, describe
from tikv.arrays.memory import as_numpy, new_array, read_host, to_device
from tikv.dtypes import DType
from tikv.errors import ArchError


class CacheArray(runtime.NotCopied):
    """Memory of a store, handed out without a copy: an array with a shape, a true dtype and a device.

    `numpy()` works on CPU, `torch()` and `__dlpack__` on CPU and CUDA; `copy_to_host()` works everywhere and copies.
    `copy.copy()` and `copy.deepcopy()` give one with memory of its own, by way of the host; `pickle` is refused.

    Example:
        >>> import tikv
        >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype="bfloat16")
        >>> store.keys(0).shape, str(store.keys(0).numpy().dtype)
        ((1, 2, 8, 4), 'bfloat16')
    """

    instead = "Pickle copy_to_host(), a NumPy array."

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
        if array.device in runtime.SPIRV_ARCHS:
            raise ArchError(
                f"CacheArray.__dlpack__: memory on {array.device} has no pointer to share. Use copy_to_host()."
            )
        return dlpack.device_of(array)

    def __dlpack__(self, **_requests: Any) -> Any:
        self.__dlpack_device__()
        array = self._array
        if array.device != "cpu":
            self._runtime.synchronize()
        return dlpack.export(array, array.owner)

    def copy_to_host(self) -> np.ndarray[Any, Any]:
        """A NumPy copy of the contents, from any device; waits for the launches so far."""
        return read_host(self.view_for("CacheArray.copy_to_host"), self._runtime)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = self.numpy() if self.device == "cpu" and not copy else self.copy_to_host()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __copy__(self) -> CacheArray:
        array = self.view_for("copy.copy of a CacheArray")
        return CacheArray(to_device(read_host(array, self._runtime), self._runtime), self._runtime)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheArray:
        return self.__copy__()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"CacheArray({describe(self._array)}, {self.device})"


def new_like(like: Any, shape: Sequence[int], dtype: DType, live: runtime.Runtime, *, zeroed: bool = False) -> Any:
    """A new array of the kind of `like`: NumPy, torch on the same device, or a `CacheArray` for anything else."""
    if isinstance(like, np.ndarray):
        return (np.zeros if zeroed else np.empty)(shape, dtype.numpy)
    if hasattr(like, "new_empty"):
        return (like.new_zeros if zeroed else like.new_empty)(tuple(shape), dtype=dtypes.to_torch(dtype.name))
    return CacheArray(new_array(shape, dtype, live, zeroed=zeroed), live)
