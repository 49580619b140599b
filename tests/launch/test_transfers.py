"""What the driver is asked to copy from the host's memory, without a driver: addresses, pitches, and in which order."""

import collections
import contextlib
import functools
import itertools
import types

import numpy as np
import pytest

from tikv import dtypes
from tikv.arrays import ArrayView, contiguous_strides
from tikv.launch.cuda import driver, transfers
from tikv.stores.layers.residents import Frame, Residents


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


class Streams:
    """Streams that do what they were given in any order that the events between them allow, as those of a GPU may."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
    CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=types.SimpleNamespace(value=1))
    CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=types.SimpleNamespace(value=2))

    def __init__(self, rng):
        self.rng, self.queues, self.recorded, self.done = rng, {}, {}, set()
        self.numbers = itertools.count(1)

    def give(self, stream, work, behind=None):
        number = next(self.numbers)
        self.queues.setdefault(stream, collections.deque()).append((number, work, behind))
        return number

    def run(self):
        while any(self.queues.values()):
            ready = [q for q in self.queues.values() if q and (q[0][2] is None or q[0][2] in self.done)]
            number, work, _ = ready[self.rng.integers(len(ready))].popleft()
            work()
            self.done.add(number)

    def CUstream(self, handle):
        return handle

    def cuStreamCreate(self, flags):
        return 0, next(self.numbers) + 1000

    def cuEventCreate(self, flags):
        return 0, next(self.numbers)

    def cuEventDestroy(self, event):
        return (0,)

    def cuEventRecord(self, event, stream):
        self.recorded[event] = self.give(stream, lambda: None)
        return (0,)

    def cuStreamWaitEvent(self, stream, event, flags):
        self.give(stream, lambda: None, self.recorded.get(event))  # at once where it was never recorded
        return (0,)


def rounds_over_layers(rng, monkeypatch, places=2, layers=5):
    """What kernels read of copies, and what was on the host when they were launched.

    Layers are used in order, or in any. Each use writes a row to the host and to the copy, and reads the copy; rows of
    layers without a copy are written too. At last two streams read, which do not wait for each other.
    """
    streams, current = Streams(rng), [0]
    monkeypatch.setattr(driver, "binding", lambda: streams)
    monkeypatch.setattr(driver, "stream_object", lambda handle: handle)
    monkeypatch.setattr(driver, "device", lambda index: types.SimpleNamespace(entered=contextlib.nullcontext))
    monkeypatch.setattr(driver, "stream", lambda index: current[0])

    def copy(source, to, count, stream):
        streams.give(stream, lambda: to.__setitem__(..., source))

    monkeypatch.setattr(transfers, "_copy", copy)
    transfers._stream_of_copies.cache_clear()
    live = types.SimpleNamespace(index=0, copy_streams=set())
    host, truth = ([np.zeros(3, int) for _ in range(layers)] for _ in "ht")
    frames = [Frame(np.full(3, -1), transfers.DriverTransfer(live)) for _ in range(places)]
    some, seen, wanted, values = Residents(range(layers), layers, frames), [], [], itertools.count(1)

    def fetch(layer, frame):
        frame.transfer.start([(host[layer], frame.content, 3)])

    def write(layer, *more):
        row, value = int(rng.integers(3)), next(values)
        truth[layer][row] = value
        for to in (host[layer], *more):
            streams.give(current[0], functools.partial(to.__setitem__, row, value))

    for turn in range(6):
        if turn == 4:
            between = streams.cuEventCreate(0)[1]
            streams.cuEventRecord(between, 0)
            streams.cuStreamWaitEvent(7, between, 0)
        for layer in rng.permutation(layers) if turn == 3 else range(layers):
            if turn > 3:
                current[0] = 7 - current[0]
            elif some.frame_of(other := int(rng.integers(layers))) is None:
                write(other)
            frame = some.bring(layer, fetch)
            some.bring_next(layer, fetch)
            frame.transfer.wait()
            if turn < 4:
                write(layer, frame.content)
            number = len(wanted)
            streams.give(current[0], lambda a=frame.content, n=number: seen.append((n, a.copy())))
            frame.transfer.used()
            wanted.append(truth[layer].copy())
    streams.run()
    transfers._stream_of_copies.cache_clear()
    return np.array([a for _, a in sorted(seen, key=lambda pair: pair[0])]), np.array(wanted)


@pytest.mark.parametrize("places", [1, 2, 3, 5])
def test_in_every_order_that_events_allow_kernels_read_what_was_written(rng, monkeypatch, places):
    for _ in range(40):
        seen, wanted = rounds_over_layers(rng, monkeypatch, places)
        assert (seen == wanted).all()


@pytest.mark.parametrize("left_out", ["_arrived", "_before", "_used"])
def test_an_event_that_is_not_waited_for_is_seen(rng, monkeypatch, left_out):
    init = transfers.DriverTransfer.__init__

    def without(self, live):
        init(self, live)
        getattr(self, left_out).wait = lambda stream: None

    monkeypatch.setattr(transfers.DriverTransfer, "__init__", without)
    found = [np.equal(*rounds_over_layers(rng, monkeypatch)).all() for _ in range(40)]
    assert not all(found)
