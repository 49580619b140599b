"""What the driver is asked to copy from the host's memory, without a driver: addresses, widths and pitches."""

import types

import numpy as np
import pytest

from tikv import dtypes
from tikv.arrays import ArrayView, contiguous_strides
from tikv.launch.cuda import driver, transfers


class Driver:
    """Copies between arrays of NumPy what CUDA's driver is asked to."""

    CUmemorytype = types.SimpleNamespace(CU_MEMORYTYPE_HOST=1, CU_MEMORYTYPE_DEVICE=2)
    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
    CUDA_MEMCPY2D = types.SimpleNamespace

    def __init__(self, memory):
        self.memory, self.calls = memory, []

    def CUstream(self, handle):
        return handle

    def cuMemcpyHtoDAsync(self, to, source, nbytes, stream):
        self.calls.append("one piece")
        self.memory[to : to + nbytes] = self.memory[source : source + nbytes]
        return (0,)

    def cuMemcpy2DAsync(self, whole, stream):
        self.calls.append("a piece for each head")
        assert (whole.srcMemoryType, whole.dstMemoryType) == (1, 2)
        for row in range(whole.Height):
            to, source = whole.dstDevice + row * whole.dstPitch, whole.srcHost + row * whole.srcPitch
            self.memory[to : to + whole.WidthInBytes] = self.memory[source : source + whole.WidthInBytes]
        return (0,)


@pytest.mark.parametrize(
    ("shape", "slots", "count", "calls"),
    [
        ((2, 3, 8, 4), 8, 5, ["a piece for each head"]),
        ((2, 3, 8, 4), 8, 8, ["one piece"]),
        ((2, 3, 8, 4), 11, 8, ["a piece for each head"]),
        ((1, 1, 8, 4), 11, 5, ["one piece"]),
        ((2, 3, 8), 8, 3, ["a piece for each head"]),
        ((2, 3, 8, 4, 2), 8, 3, ["a piece for each head"]),
        ((2, 3, 8, 4), 8, 0, []),
    ],
)
def test_the_filled_slots_of_each_head_are_copied(rng, monkeypatch, shape, slots, count, calls):
    memory = rng.integers(0, 256, 1 << 14, np.uint8)
    fake = Driver(memory)
    monkeypatch.setattr(driver, "binding", lambda: fake)
    monkeypatch.setattr(driver, "stream_object", lambda handle: handle)
    there = (*shape[:2], slots, *shape[3:])
    source, to = (
        ArrayView(at, form, contiguous_strides(form), dtypes.float16, "cuda:0")
        for at, form in ((64, shape), (8192, there))
    )

    def seen(a):
        return memory[a.ptr : a.ptr + a.nbytes].view(np.float16).reshape(a.shape)

    want = seen(to).copy()
    want[:, :, :count] = seen(source)[:, :, :count]
    before = memory.copy()
    before[to.ptr : to.ptr + to.nbytes] = want.view(np.uint8).ravel()
    transfers._copy(source, to, count, 0)
    assert fake.calls == calls
    assert (memory == before).all()
