"""torch tensors on MPS, which lie in Metal's memory, used with kernels on Metal.

An engine with an `mps_arch` lets PyTorch view tikv's memory as a tensor on MPS; no engine accepts a buffer that PyTorch
made. So PyTorch shares a store's memory, but a tensor of its own is copied into tikv's memory before a launch, and back
after it if it is written: by PyTorch, on the device. Nothing goes through the host, and nothing waits if kernels are
launched on PyTorch's own queue.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from tikv import dtypes, runtime
from tikv.arrays.annotations import Array
from tikv.arrays.array_view import ArrayView
from tikv.arrays.memory import Memory
from tikv.dtypes import DType
from tikv.errors import ArchError

KEPT_BYTES = 1 << 26  # the most in blocks that are kept for later calls


class MpsStorage:
    """The storage of tensors on MPS, as bytes; it is the handle of an `ArrayView` of such a tensor.

    A storage has one such object at a time, so the object identifies its views. An address on MPS is that of a Metal
    buffer's object, so neighbouring addresses have no meaning.
    """

    def __init__(self, tensor: Array) -> None:
        torch = sys.modules["torch"]
        self.bytes = tensor.detach().new_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


_storages: weakref.WeakValueDictionary[int, MpsStorage] = weakref.WeakValueDictionary()


def view_of(tensor: Array, dtype: DType) -> ArrayView:
    """A tensor on MPS as a view that keeps it alive."""
    address = tensor.untyped_storage().data_ptr()
    storage = _storages.get(address)
    if storage is None:
        storage = _storages.setdefault(address, MpsStorage(tensor))
    first = tensor.storage_offset() * dtype.itemsize
    return ArrayView(
        0, tuple(tensor.shape), tensor.stride(), dtype, "mps", handle=storage, offset=first, owner=(storage, tensor)
    )


class _Block:
    """tikv's memory, which PyTorch views as bytes."""

    def __init__(self, nbytes: int, live: runtime.Runtime) -> None:
        self.memory = Memory(nbytes, live)
        live.program.synchronize()  # else the engine might zero new memory after PyTorch's copy
        self.bytes = live.engine.as_torch(self.memory.handle).view(sys.modules["torch"].uint8)


class MpsTurns(runtime.Turns):
    """Keeps PyTorch and the kernels of one runtime in the order of their calls; and has blocks for copies of tensors.

    On one queue, work that is committed first runs first. The engine commits each launch. PyTorch gathers work before
    it commits, so it is made to commit before each launch. On two queues each waits for the other.
    """

    def __init__(self, live: runtime.Runtime) -> None:
        torch: Any = sys.modules["torch"]
        self._mps = torch.mps
        self._program = live.program
        self._live = live
        self._event = torch.mps.Event() if live.engine.is_on_queue_of_torch(live.program) else None
        self._free: list[_Block] = []

    def __enter__(self) -> None:
        if self._event is not None:
            self._event.record()  # this commits
        else:
            self._mps.synchronize()

    def __exit__(self, *_: object) -> None:
        if self._event is None:
            self._program.synchronize()

    def settle(self) -> None:
        """Wait until PyTorch has done all its work."""
        self._mps.synchronize()

    def borrow(self, nbytes: int) -> _Block:
        """A block of at least so many bytes."""
        fitting = [block for block in self._free if nbytes <= block.memory.nbytes <= 4 * nbytes]
        if not fitting:
            return _Block(nbytes, self._live)
        smallest = min(fitting, key=lambda block: block.memory.nbytes)
        self._free.remove(smallest)
        return smallest

    def give_back(self, block: _Block) -> None:
        """Keep a block for later calls, unless too much is kept already."""
        if sum(each.memory.nbytes for each in self._free) + block.memory.nbytes <= KEPT_BYTES:
            self._free.append(block)


def turns_of(live: runtime.Runtime) -> MpsTurns:
    """The `MpsTurns` of a runtime; from the first call on, every launch waits for its turn."""
    with live.lock:
        if not isinstance(live.turns, MpsTurns):
            live.turns = MpsTurns(live)
        return live.turns


def as_torch(array: ArrayView, live: runtime.Runtime) -> Any:
    """Memory of tikv as a torch tensor on MPS, not a copy; it becomes invalid when the runtime ends.

    Raises:
        ArchError: the engine cannot show its memory.
    """
    if live.engine.mps_arch != live.arch:
        raise ArchError(
            f"CacheArray.torch: torch cannot share {live.engine.title}'s memory on {live.arch}. Use "
            f"copy_to_host(), which waits for the device and copies {array.nbytes:,} bytes."
        )
    turns_of(live)
    words = live.engine.as_torch(array.handle).view(dtypes.to_torch(array.dtype.name))
    return words.as_strided(array.shape, array.strides, array.offset // array.dtype.itemsize)
