"""What the machine says of itself: its devices, and the archs that are tried on it."""

import pathlib
import runpy

import pytest

from tikv import engines, runtime
from tikv.ops.attention.splits import GPU_BLOCKS
from tikv.runtime import devices, engine
from tikv.stores.limits import BLOCK_BYTES, SHARED_BYTES
from tikv.tools.doctor import REMEDIES

BENCHES = pathlib.Path(__file__).parents[2] / "benches"

MACHINES = {
    "a Mac": ("darwin", [], [("Apple M3", "integrated")], ["cpu"]),
    "an NVIDIA GPU": (
        "linux",
        ["libcuda.so.1"],
        [("H200", "discrete"), ("llvmpipe", "cpu")],
        ["cuda", "vulkan", "cpu"],
    ),
    "an AMD GPU": ("linux", [], [("llvmpipe", "cpu"), ("RX 7900", "discrete")], ["vulkan", "cpu"]),
    "a laptop": ("linux", [], [("Iris Xe", "integrated")], ["vulkan", "cpu"]),
    "lavapipe alone": ("linux", [], [("llvmpipe", "cpu")], ["cpu"]),
    "nothing": ("linux", [], [], ["cpu"]),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_order_of_auto(monkeypatch, machine):
    """Metal, CUDA, a real Vulkan GPU, CPU: a software driver is never chosen."""
    platform, libraries, found, expected = MACHINES[machine]
    monkeypatch.setattr(devices.sys, "platform", platform)
    monkeypatch.setattr(devices, "_has_library", lambda *names: any(name in libraries for name in names))
    monkeypatch.setattr(devices, "vulkan_devices", lambda: found)
    monkeypatch.setattr(engine, "shares_mps", lambda: False)
    assert runtime.candidate_archs() == expected
    assert runtime.why_auto()


def test_auto_on_a_mac_takes_metal_where_it_shares_memory_with_torch(monkeypatch):
    """Else the CPU: Metal copies what it is given, and has not been run there."""
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    monkeypatch.setattr(devices, "_has_library", lambda *names: False)
    monkeypatch.setattr(devices, "vulkan_devices", list)
    for shares, torch, expected, why in (
        (True, "2.8", ["metal", "cpu"], "PyTorch can use"),
        (True, None, ["cpu"], "in place"),
        (False, "2.8", ["cpu"], "in place"),
    ):
        monkeypatch.setattr(engine, "shares_mps", lambda shares=shares: shares)
        monkeypatch.setattr(engines, "version_of", lambda name, torch=torch: torch)
        assert runtime.candidate_archs() == expected
        assert why in runtime.why_auto()


def test_which_engine_shares_memory_with_torch(monkeypatch):
    for used, shares in ((engines.TAICHI, False), (engines.QUADRANTS, True)):
        monkeypatch.setattr(engine, "selection", lambda used=used: (used, "asked for"))
        assert engine.shares_mps() == shares
    monkeypatch.undo()
    monkeypatch.setattr(engine, "_module", None)
    monkeypatch.setenv("TIKV_ENGINE", "abacus")
    assert not engine.shares_mps(), "the first operation says what is wrong with it"


@pytest.mark.archs("vulkan")
def test_the_vulkan_driver_is_found(arch):
    """By the loader itself, before Taichi is asked."""
    found = runtime.vulkan_devices()
    assert found
    assert all(name and kind in ("integrated", "discrete", "virtual", "other", "cpu") for name, kind in found)
    assert runtime.device_name("vulkan") in [name for name, _ in found]


def test_what_the_machine_says_of_itself(arch):
    assert runtime.device_name(arch)
    assert runtime.memory_bytes("cpu") > 2**28
    assert runtime.version_of("pytest") == pytest.__version__
    assert runtime.version_of("no-such-distribution") is None


def test_every_table_of_archs_has_all_of_them():
    """A row that is missing would be met where it is looked up first."""
    archs = set(runtime.ARCHS)
    assert set(BLOCK_BYTES) == set(REMEDIES) == archs
    assert all(size <= BLOCK_BYTES[arch] for arch, size in SHARED_BYTES.items())
    assert set(GPU_BLOCKS) == archs - {"cpu"}
    assert set(runpy.run_path(str(BENCHES / "shapes.py"))["SIZES"]) == archs


class Driver:
    """Stands in for the driver's library: two devices with a context each, of which a thread has one or none."""

    def __init__(self, current):
        self.current = current

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device, index):
        device._obj.value = index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 + device.value
        return 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.current
        return 0

    def cuCtxSetCurrent(self, context):
        self.current = context.value
        return 0


@pytest.mark.parametrize(("before", "after"), [(100, 100), (101, 101), (None, 101)], ids=["other", "own", "none"])
def test_the_current_gpu_is_left_as_it_was(monkeypatch, before, after):
    cuda = Driver(before)
    monkeypatch.setattr(devices, "_cuda_library", lambda: cuda)
    assert devices.num_gpus() == 2
    with devices.current_gpu(1):
        assert cuda.current == 101
    assert cuda.current == after
    with pytest.raises(KeyError), devices.current_gpu(1):
        raise KeyError
    assert cuda.current == after


def test_without_a_driver_there_is_no_current_gpu(monkeypatch):
    monkeypatch.setattr(devices, "_cuda_library", lambda: None)
    assert devices.num_gpus() == 0
    with devices.current_gpu(0):
        pass


def test_of_a_device_that_is_not_there_the_current_one_stays(monkeypatch):
    cuda = Driver(100)
    monkeypatch.setattr(devices, "_cuda_library", lambda: cuda)
    monkeypatch.setattr(cuda, "cuDeviceGet", lambda device, index: 101)
    with devices.current_gpu(5):
        assert cuda.current == 100
    assert cuda.current == 100


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "3000"}, [3000]),
        ("0::/\n", {"memory.max": "2000"}, [2000]),
        ("5:memory:/job\n4:cpu:/x\n", {"memory/job/memory.limit_in_bytes": "1000", "x/memory.max": "1"}, [1000]),
        ("0::/gone\n", {}, []),
    ],
)
def test_the_limits_of_control_groups_are_read(tmp_path, groups, files, limits):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "self").write_text(groups)
    assert sorted(set(devices._group_limits(tmp_path, str(tmp_path / "self")))) == limits


def test_a_limit_of_control_groups_limits_the_memory(monkeypatch):
    monkeypatch.setattr(devices, "_group_limits", lambda: [123456])
    assert runtime.memory_bytes("cpu") == 123456
