"""Arrays of the host on a device for the length of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, Memory, StagedNdarray, host_bytes, read_host, write_host


class KnownOnHost:
    """Owner of an array on a device whose values the host knows as well; in all else like the owner that it wraps."""

    __slots__ = ("on_host", "owner")

    def __init__(self, owner: Any, on_host: ArrayView | np.ndarray[Any, Any] | None) -> None:
        self.owner = owner
        self.on_host = on_host

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)


class Staging:
    """Host arrays on a device for the length of a call; nothing on CPU, where the kernels see them.

    Arrays whose bytes overlap share one device block, so what is written to one is not undone by the other's way back.
    """

    def __init__(self, live: runtime.Runtime, arrays: Sequence[ArrayView], written: Sequence[bool]) -> None:
        self.arrays = list(arrays)
        self._live = live
        self._back: list[tuple[Memory, int, int]] = []
        owners = [a.owner for a, w in zip(arrays, written, strict=True) if w]
        self._write_back = [owner for owner in owners if isinstance(owner, StagedNdarray)]
        if live.is_cpu:
            return
        hosted = sorted((a.ptr, a.ptr + a.span, i) for i, a in enumerate(arrays) if a.device == "cpu" and a.span)
        if hosted:
            launch.refuse_during_capture(live, "launch", "what an array on the host holds now")
        merged: list[tuple[int, int, list[int]]] = []
        for start, end, i in hosted:
            if merged and start < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]), [*merged[-1][2], i])
            else:
                merged.append((start, end, [i]))
        for start, end, members in merged:
            base = start // 8 * 8  # keeps every word aligned as it was
            memory = Memory(end - base, live)
            raw = np.zeros(end - base, np.int8)
            raw[start - base :] = host_bytes(start, end - start).view(np.int8)
            write_host(raw, memory.array(raw.shape, dtypes.int8))
            for i in members:
                a = arrays[i]
                first = memory.array((1,), a.dtype, a.ptr - base)
                self.arrays[i] = ArrayView(
                    first.ptr,
                    a.shape,
                    a.strides,
                    a.dtype,
                    first.device,
                    handle=first.handle,
                    offset=first.offset,
                    owner=KnownOnHost(memory, a),
                )
            if any(written[i] for i in members):
                self._back.append((memory, start, end))

    def finish(self) -> None:
        """Bring what was written back to the host."""
        for memory, start, end in self._back:
            base = start // 8 * 8
            found = read_host(memory.array((end - base,), dtypes.int8), self._live)[start - base :]
            ctypes.memmove(start, found.ctypes.data, end - start)
        for staged in self._write_back:
            staged.write_back()
