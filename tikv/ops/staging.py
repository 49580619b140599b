"""Arrays of the host, and of PyTorch on MPS, in memory of a device for the length of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, Memory, StagedNdarray, host_bytes, mps, read_host, write_host


class KnownOnHost:
    """Owner of an array on a device whose values the host knows as well; in all else like the owner that it wraps."""

    __slots__ = ("on_host", "owner")

    def __init__(self, owner: Any, on_host: ArrayView | np.ndarray[Any, Any] | None) -> None:
        self.owner = owner
        self.on_host = on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)


class _Stretch(NamedTuple):
    """A stretch of memory that arrays of a call share."""

    memory: Any  # the storage of a tensor on MPS; None: the host's
    start: int
    end: int
    members: list[int]

    @property
    def base(self) -> int:
        """Where the copy starts, so that every word stays aligned as it was."""
        return self.start // 8 * 8


def _stretches(arrays: Sequence[ArrayView]) -> list[_Stretch]:
    """The arrays that are staged, those whose bytes overlap together."""
    places = [(a.handle, a.ptr + a.offset, a.span, i) for i, a in enumerate(arrays) if a.is_staged and a.span]
    found: list[_Stretch] = []
    for memory, start, span, i in sorted(places, key=lambda place: (id(place[0]), place[1])):
        last = found[-1] if found else None
        if last is not None and memory is last.memory and start < last.end:
            found[-1] = last._replace(end=max(last.end, start + span), members=[*last.members, i])
        else:
            found.append(_Stretch(memory, start, start + span, [i]))
    return found


class Staging:
    """Arrays of the host and tensors on MPS in memory of ours for the length of a call; nothing on CPU.

    Arrays whose bytes overlap share one device block, so what is written to one is not undone by the other's way back.
    """

    def __init__(self, live: runtime.Runtime, arrays: Sequence[ArrayView], written: Sequence[bool]) -> None:
        self.arrays = list(arrays)
        self._live = live
        self._back: list[Callable[[], None]] = []
        owners = [a.owner for a, w in zip(arrays, written, strict=True) if w]
        self._back += [owner.write_back for owner in owners if isinstance(owner, StagedNdarray)]
        if live.is_cpu:
            return
        stretches = _stretches(arrays)
        if stretches:
            launch.refuse_during_capture(live, "launch", "what an array on the host holds now")
        for stretch in stretches:
            copied = self._copied_on_mps if stretch.memory is not None else self._copied_from_host
            memory = copied(stretch, any(written[i] for i in stretch.members))
            for i in stretch.members:
                a = arrays[i]
                first = memory.array((1,), a.dtype, a.ptr + a.offset - stretch.base)
                owner: Any = memory if stretch.memory is not None else KnownOnHost(memory, a)
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

    def _copied_from_host(self, stretch: _Stretch, written: bool) -> Memory:
        _, start, end, _ = stretch
        base = stretch.base
        memory = Memory(end - base, self._live)
        raw = np.zeros(end - base, np.int8)
        raw[start - base :] = host_bytes(start, end - start).view(np.int8)
        write_host(raw, memory.array(raw.shape, dtypes.int8))

        def bring_back() -> None:
            found = read_host(memory.array((end - base,), dtypes.int8), self._live)[start - base :]
            ctypes.memmove(start, found.ctypes.data, end - start)

        if written:
            self._back.insert(0, bring_back)
        return memory

    def _copied_on_mps(self, stretch: _Stretch, written: bool) -> Memory:
        storage, start, end, _ = stretch
        base, turns = stretch.base, mps.turns_of(self._live)
        block = turns.borrow(end - base)
        theirs, ours = storage.bytes[start:end], block.bytes[start - base : end - base]
        ours.copy_(theirs)

        def bring_back() -> None:
            if written:
                theirs.copy_(ours)
            turns.give_back(block)

        self._back.insert(0, bring_back)
        return block.memory

    def finish(self) -> None:
        """Bring what was written back to where it came from."""
        for bring_back in self._back:
            bring_back()
