"""The native launch without a GPU: arguments laid out, and launches, which a stand-in for the driver records."""

import contextlib
import ctypes
import types
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tikv
from tikv import launch
from tikv.arrays import view
from tikv.launch.cuda import driver, native


@given(st.lists(st.sampled_from(["array", "number", *range(1, 33)]), min_size=1, max_size=12))
def test_arguments_lie_as_a_c_compiler_lays_them(kinds):
    class Array(ctypes.Structure):
        _fields_ = [("extent", ctypes.c_int32), ("pointer", ctypes.c_uint64)]

    def field(kind):
        return Array if kind == "array" else ctypes.c_int32 if kind == "number" else ctypes.c_int32 * kind

    names = [f"a{i}" for i in range(len(kinds))]
    natural = type(
        "Natural", (ctypes.Structure,), {"_fields_": [(n, field(k)) for n, k in zip(names, kinds, strict=True)]}
    )
    words = ["u64" if kind == "array" else None for kind in kinds]
    offsets, size = launch.argument_layout(words, [kind if isinstance(kind, int) else 0 for kind in kinds])
    assert offsets == [getattr(natural, name).offset for name in names]
    assert size == -(-ctypes.sizeof(natural) // 8) * 8


@given(st.integers(1, 2**31 - 1), st.sampled_from([32, 128, 256]), st.integers(1, 1 << 20))
def test_a_stride_never_leaves_32_bits(iterations, block, most):
    try:
        blocks = launch.blocks_of(iterations, block, most, "example")
    except tikv.CapacityError:
        assert iterations + block > 2**31 - 1
        return
    assert 1 <= blocks <= most
    assert iterations + blocks * block <= 2**31 - 1
    assert blocks * block < iterations + block


class Recorder:
    """Stands in for cuda.bindings.driver: keeps the argument bytes of each launch."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self):
        self.launched = []
        self.size = 0
        self.failures = []

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        if self.failures:
            return (self.failures.pop(0),)
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launched.append((function, config.hStream, ctypes.string_at(address, self.size)))
        return (0,)


class Refused(int):
    name = "CUDA_ERROR_INVALID_CONTEXT"


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(driver, "binding", lambda: found)
    monkeypatch.setattr(driver, "multiprocessors", lambda index: 4)
    monkeypatch.setattr(driver, "stream_object", lambda handle: handle)
    monkeypatch.setattr(
        driver,
        "launch_config",
        lambda blocks, block, starts_early, shared_bytes: types.SimpleNamespace(blocks=blocks, block=block, hStream=0),
    )
    found.stream, found.capturing = (lambda index: 0), (lambda index: False)  # of a device; a test may say otherwise
    monkeypatch.setattr(driver, "stream", lambda index: found.stream(index))
    monkeypatch.setattr(driver, "capturing", lambda index: found.capturing(index))
    return found


class Size(NamedTuple):
    depth: int
    rows: int
    columns: int


def bound_of(recorder, iterations=300):
    kernel = types.SimpleNamespace(
        words=["u64", "u32", None, None], lengths=[0, 0, 3, 0], is_float=[False, False, False, True]
    )
    kernel.name = kernel.title = "example"
    kernel.runtime = types.SimpleNamespace(is_cuda=True, index=1, side_streams=set())
    offsets, recorder.size = launch.argument_layout(kernel.words, kernel.lengths)
    arrays = [view(np.zeros(4, np.float32), "a", "example") for _ in range(2)]
    device = types.SimpleNamespace(index=1, overlaps=False, entered=contextlib.nullcontext)
    loaded = native.Native(device, "function", 128, offsets, recorder.size)
    return native.NativeBound(kernel, iterations, (*arrays, Size(1, -2, 3), 0.5), loaded), arrays


ARGUMENTS = np.dtype(
    {
        "names": ["n0", "p0", "n1", "p1", "v", "f"],
        "formats": ["<i4", "<u8", "<i4", "<u8", ("<i4", 3), "<f4"],
        "offsets": [0, 8, 16, 24, 32, 44],
        "itemsize": 48,
    }
)


def test_a_launch_carries_its_arguments(recorder):
    bound, arrays = bound_of(recorder)
    bound.launch()
    other = view(np.zeros(4, np.float32), "a", "example")
    bound.set_array(1, other)
    bound.set_entry(2, 1, 77)
    bound.launch()
    assert (bound._config.blocks, bound._config.block) == (3, 128)
    (_, _, first), (_, _, second) = recorder.launched
    first, second = np.frombuffer(first, ARGUMENTS)[0], np.frombuffer(second, ARGUMENTS)[0]
    assert (first["n0"], first["p0"], first["n1"], first["p1"]) == (300, arrays[0].ptr, 1, arrays[1].ptr)
    assert (first["v"].tolist(), first["f"]) == ([1, -2, 3], 0.5)
    assert (second["p0"], second["p1"], second["v"].tolist()) == (arrays[0].ptr, other.ptr, [1, 77, 3])


def test_entries_go_by_name(recorder):
    bound, _ = bound_of(recorder)
    put = bound.setter("rows")
    bound.set("columns", 5)
    put(6)
    bound.launch()
    assert np.frombuffer(recorder.launched[0][2], ARGUMENTS)[0]["v"].tolist() == [1, 6, 5]


def test_a_launch_goes_to_the_stream_of_the_moment(recorder):
    bound, _ = bound_of(recorder)
    for handle in (0, 64, 64, 128, 0):
        recorder.stream = lambda index, handle=handle: handle + index
        bound.launch()
    assert [stream for _, stream, _ in recorder.launched] == [1, 65, 65, 129, 1], "that of the kernel's device"
    assert bound.kernel.runtime.side_streams == {1, 65, 129}


def test_a_thread_without_a_context_gets_one_and_a_second_failure_is_raised(recorder):
    bound, _ = bound_of(recorder)
    recorder.failures = [Refused(201)]
    bound.launch()
    assert len(recorder.launched) == 1
    recorder.failures = [Refused(201), Refused(201)]
    with pytest.raises(tikv.ArchError, match="example: the CUDA driver says CUDA_ERROR_INVALID_CONTEXT"):
        bound.launch()
    assert len(recorder.launched) == 1


def test_a_stream_that_the_driver_refuses_is_not_kept(recorder):
    bound, _ = bound_of(recorder)
    recorder.stream, recorder.failures = (lambda index: 64), [Refused(400), Refused(400)]
    with pytest.raises(tikv.ArchError, match="example: the CUDA driver says"):
        bound.launch()
    recorder.stream = lambda index: 0
    assert bound.kernel.runtime.side_streams == set(), "torch would be told of it when memory is freed"
    bound.launch()
    assert [stream for _, stream, _ in recorder.launched] == [0]


def test_a_position_is_not_baked_into_a_graph(recorder):
    bound, _ = bound_of(recorder)
    recorder.stream = lambda index: 64
    bound.set_entry(2, 0, 5)
    recorder.capturing = lambda index: index == 1
    bound.set_entry(2, 0, 6)
    with pytest.raises(tikv.ArchError, match=r"baked into the CUDA graph.*positions_on_device"):
        bound.launch()
    assert recorder.launched == []
    unchanging, _ = bound_of(recorder)
    unchanging.launch()
    assert len(recorder.launched) == 1, "what the host never changes may be captured"
    unchanging.setter("rows")(7)
    with pytest.raises(tikv.ArchError, match="baked into the CUDA graph"):
        unchanging.launch()
    cuda = types.SimpleNamespace(is_cuda=True, index=1)
    with pytest.raises(tikv.ArchError, match=r"KVCacheStore\.append: a position on the host"):
        launch.refuse_during_capture(cuda, "KVCacheStore.append")
    launch.refuse_during_capture(types.SimpleNamespace(is_cuda=False), "KVCacheStore.append")


def make_short(width):
    """A factory of kernels; nobody makes one."""


def make_long(width):
    """One whose kernels count on how many of their blocks a multiprocessor holds."""


make_long.resident = lambda width: 2


def test_a_kernel_that_fills_the_device_does_not_start_early(monkeypatch):
    """Blocks placed while the launch before still runs lie unevenly."""
    devices = [
        types.SimpleNamespace(index=i, target="sm_90", overlaps=i < 2, load=lambda *arguments, i=i: (i, *arguments))
        for i in range(3)
    ]
    patched = types.SimpleNamespace(text="text", entry="entry", block=128)
    monkeypatch.setattr(native, "_natives", {})
    monkeypatch.setattr(driver, "device", lambda index: devices[index])
    monkeypatch.setattr(native.compiler, "ptx_of", lambda factory, choices, target: "ptx")
    monkeypatch.setattr(native.ptx, "patch", lambda *arguments: patched)
    monkeypatch.setattr(native.runtime, "before_synchronize", [])
    early = {}
    for factory in (make_short, make_long):
        for index in range(3):
            live = types.SimpleNamespace(index=index)
            kernel = types.SimpleNamespace(
                factory=factory, choices=(8,), words=["u64"], lengths=[0], fast_math=False, runtime=live,
                shared_bytes=100 * index,
            )  # fmt: skip
            found = native.load_native(kernel)
            assert found.shared_bytes == found.function[-1] == 100 * index
            assert found is native.load_native(kernel)
            assert (found.device, found.function[0]) == (devices[index], index), "loaded on each device"
            early[factory.__name__, index] = found.starts_early
    assert [key for key, value in early.items() if value] == [("make_short", 0), ("make_short", 1)]


@pytest.mark.parametrize("bits", [8, 16, 32], ids=["int8", "float16", "float32"])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("rows", range(1, 9))
def test_a_block_of_attention_has_room_for_its_results(rows, long, bits):
    """A block may have 48 KiB of shared memory, and the rows of a task halve down to one among the lanes of a key."""
    from tikv.kernels.attention.cuda import attend as lanes

    for width in range(8, lanes.MAX_WIDTH + 1, 8):
        shape = lanes.shape_of(width, lanes.WORD_BITS // bits, rows, long)
        kept, groups = lanes.rows_kept(rows), lanes.BLOCK // shape.lanes
        assert 4 * kept * groups * (width + 2) <= 48 << 10, (width, shape)
        assert kept <= shape.lanes <= 32, (width, shape)
        assert shape.keys in (2, 4, 8), (width, shape)  # they halve among the lanes of a row
        assert shape.resident * 4 * kept * groups * (width + 2) <= 220 << 10, (width, shape)
