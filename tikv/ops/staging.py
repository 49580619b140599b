"""Copies of arrays of the host, and of PyTorch on MPS, in a device's memory for the duration of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, Memory, StagedNdarray, host_bytes, mps, read_host, write_host
from tikv.errors import CapacityError

APART = 64  # arrays in one copy begin at multiples of so many bytes, as each would alone
MOST_TOGETHER = 2**28  # the most bytes that are worth copying together


class KnownOnHost:
    """Owner of an array on a device whose values the host knows as well; otherwise like the owner that it wraps."""

    __slots__ = ("on_host", "owner")

    def __init__(self, owner: Any, on_host: ArrayView | np.ndarray[Any, Any] | None) -> None:
        self.owner = owner
        self.on_host = on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)


class _Region(NamedTuple):
    """A region of memory that arrays of a call share, so that it is copied as a whole.

    `members` are the numbers of these arrays.
    """

    memory: Any  # the storage of a tensor on MPS; None: the host's
    start: int
    end: int
    members: list[int]

    @property
    def base(self) -> int:
        """Where the copy starts, chosen so that words keep their alignment."""
        return self.start // 8 * 8

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return self.end - self.start

    @property
    def room(self) -> int:
        """The bytes that it takes in a copy where another region may follow."""
        return -(-(self.end - self.base) // APART) * APART


def _together(regions: Sequence[_Region], written: Sequence[bool]) -> list[list[_Region]]:
    """Groups of host regions that are copied together: those that are written, and so copied back, and the others.

    A copy to Vulkan or Metal and back waits for the device, whatever its size. A region on MPS is copied there, alone.
    """
    groups: list[list[_Region]] = []
    open_: dict[bool, list[_Region]] = {}
    for region in regions:
        back = any(written[i] for i in region.members)
        last = open_.get(back, [])
        if region.memory is None and last and sum(s.room for s in [*last, region]) <= MOST_TOGETHER:
            last.append(region)
        else:
            groups.append([region])
            if region.memory is None:
                open_[back] = groups[-1]
    return groups


def _regions(arrays: Sequence[ArrayView]) -> list[_Region]:
    """The regions of the staged arrays; arrays whose bytes overlap share one."""
    extents = [(a.handle, a.ptr + a.offset, a.span, i) for i, a in enumerate(arrays) if a.is_staged and a.span]
    regions: list[_Region] = []
    for memory, start, span, i in sorted(extents, key=lambda extent: (id(extent[0]), extent[1])):
        last = regions[-1] if regions else None
        if last is not None and memory is last.memory and start < last.end:
            regions[-1] = last._replace(end=max(last.end, start + span), members=[*last.members, i])
        else:
            regions.append(_Region(memory, start, start + span, [i]))
    return regions


class Staging:
    """Copies of host arrays and tensors on MPS in tikv's memory for the duration of a call; none on CPU.

    Arrays whose bytes overlap share one device block, so copying one back does not undo what was written to the other.
    With `filled` false the memory is made but nothing is copied, for launches that are bound and not run.
    """

    def __init__(
        self, live: runtime.Runtime, arrays: Sequence[ArrayView], written: Sequence[bool], filled: bool = True
    ) -> None:
        self.arrays = list(arrays)
        self._live = live
        self._filled = filled
        self._back: list[Callable[[], None]] = []
        owners = [a.owner for a, w in zip(arrays, written, strict=True) if w]
        self._back += [owner.write_back for owner in owners if isinstance(owner, StagedNdarray)]
        if live.is_cpu:
            return
        regions = _regions(arrays)
        if regions:
            launch.refuse_during_capture(live, "launch", "what an array on the host holds now")
        for together in _together(regions, written):
            copied = self._copied_on_mps if together[0].memory is not None else self._copied_from_host
            memory, offsets = copied(together, any(written[i] for i in together[0].members))
            for region, offset, i in ((s, p, i) for s, p in zip(together, offsets, strict=True) for i in s.members):
                a = arrays[i]
                first = memory.array((1,), a.dtype, offset + a.ptr + a.offset - region.base)
                owner: Any = memory if region.memory is not None else KnownOnHost(memory, a)
                self.arrays[i] = ArrayView(
                    first.ptr,
                    a.shape,
                    a.strides,
                    a.dtype,
                    first.device,
                    handle=first.handle,
                    offset=first.offset,
                    owner=owner,
                )

    def _copied_from_host(self, together: Sequence[_Region], written: bool) -> tuple[Memory, list[int]]:
        """The copy of some host regions together, and the offset of each base in it."""
        live = self._live  # not through `self`, whose cycle would keep this copy until the garbage collector runs
        offsets, size = [], 0
        for region in together:
            offsets.append(size)
            size += region.room
        try:
            memory = Memory(size, live)
        except CapacityError:
            raise CapacityError(
                f"memory: the host arrays span {size} bytes from their first element to their last, and "
                f"{live.device} has no room for that many in one piece. Pass contiguous copies, or one part at a "
                "time."
            ) from None
        if not self._filled:
            return memory, offsets
        whole = memory.array((size,), dtypes.int8)
        raw = np.zeros(size, np.int8)
        for region, offset in zip(together, offsets, strict=True):
            first = offset + region.start - region.base
            raw[first : first + region.size] = host_bytes(region.start, region.size).view(np.int8)
        write_host(raw, whole)

        def bring_back() -> None:
            host = read_host(whole, live)
            for region, offset in zip(together, offsets, strict=True):
                first = offset + region.start - region.base
                ctypes.memmove(region.start, host.ctypes.data + first, region.size)

        if written:
            self._back.insert(0, bring_back)
        return memory, offsets

    def _copied_on_mps(self, together: Sequence[_Region], written: bool) -> tuple[Memory, list[int]]:
        ((storage, start, end, _),) = together
        base, turns = together[0].base, mps.turns_of(self._live)
        block = turns.borrow(end - base)
        if not self._filled:
            turns.give_back(block)
            return block.memory, [0]
        theirs, ours = storage.bytes[start:end], block.bytes[start - base : end - base]
        ours.copy_(theirs)

        def bring_back() -> None:
            if written:
                theirs.copy_(ours)
            turns.give_back(block)

        self._back.insert(0, bring_back)
        return block.memory, [0]

    def finish(self) -> None:
        """Copy what was written back to where it came from."""
        for bring_back in self._back:
            bring_back()
