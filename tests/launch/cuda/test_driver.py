"""What is asked of torch and of the driver's library, by stand-ins for both."""

import contextlib
import ctypes
import sys
import types

import pytest

import tikv
from tikv.launch.cuda import driver


def torch_of(raw=None, capturing=None, stream=64, captured=False):
    """Torch as far as it is asked; its private names only where they are given."""
    private = {"_cuda_getCurrentRawStream": raw, "_cuda_isCurrentStreamCapturing": capturing}
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream),
        is_current_stream_capturing=lambda: captured,
    )
    return types.SimpleNamespace(cuda=cuda, _C=types.SimpleNamespace(**{n: f for n, f in private.items() if f}))


@pytest.fixture
def found(monkeypatch):
    """The stream and whether it is captured, as told by a torch."""
    monkeypatch.setattr(driver, "_torch_stream", None)
    monkeypatch.setattr(driver, "_torch_capturing", None)

    def ask(torch):
        monkeypatch.setitem(sys.modules, "torch", torch)
        return driver.stream(0), driver.capturing(0)

    return ask


def test_torchs_cheap_calls_are_used_where_they_agree(found):
    raw, capturing = (lambda device: 64), (lambda: True)
    assert found(torch_of(raw, capturing, captured=True)) == (64, True)
    assert (driver._torch_stream, driver._torch_capturing) == (raw, capturing)


def fails(*arguments):
    raise TypeError("another signature")


@pytest.mark.parametrize(
    ("raw", "capturing"),
    [
        (None, None),
        (lambda device: 64, None),
        (lambda device: 65, lambda: True),
        (lambda device: 64, lambda: False),
        (fails, lambda: True),
        (lambda device: 64, fails),
    ],
    ids=["neither is there", "one is missing", "another stream", "not captured", "refuses", "refuses both"],
)
def test_torchs_public_calls_are_used_otherwise(found, raw, capturing):
    assert found(torch_of(raw, capturing, captured=True)) == (64, True)
    assert driver._torch_stream is not raw
    assert driver._torch_capturing is not capturing


def test_a_torch_without_cuda_is_asked_again_later(found):
    torch = torch_of()
    torch.cuda.is_initialized = lambda: False
    assert found(torch) == (0, False)
    torch.cuda.is_initialized = lambda: True
    assert found(torch) == (64, False)


class Library:
    """NVIDIA's driver: a call fails that is named."""

    def __init__(self, failing=""):
        self.failing = failing

    def cuInit(self, flags):
        return 100 * (self.failing == "cuInit")

    def cuDeviceGet(self, device, number):
        device._obj.value = number + 3
        return 101 * (self.failing == "cuDeviceGet")

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert (attribute, device.value) == (16, 5)
        value._obj.value = 46
        return 1 * (self.failing == "cuDeviceGetAttribute")


@pytest.fixture
def asked(monkeypatch):
    """How many multiprocessors a library says there are; without cuda-bindings."""
    driver._attribute.cache_clear()

    def no_binding():
        raise tikv.ArchError("cuda-bindings cannot be imported")

    monkeypatch.setattr(driver, "binding", no_binding)

    def ask(load):
        monkeypatch.setattr(ctypes, "CDLL", load)
        return driver.multiprocessors(2)

    yield ask
    driver._attribute.cache_clear()


def test_the_drivers_library_tells_the_multiprocessors(asked):
    assert asked(lambda name: Library()) == 46


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_that_does_not_tell_is_an_error(asked, failing):
    with pytest.raises(tikv.ArchError, match=r"for device 2, .* does not say how many multiprocessors.*error \d+"):
        asked(lambda name: Library(failing))
    assert asked(lambda name: Library()) == 46, "a failure is not kept"


def test_no_driver_is_an_error(asked):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(tikv.ArchError, match="driver cannot be loaded"):
        asked(missing)


class TwoDevices:
    """Stands in for cuda.bindings.driver: two devices, of which the thread has one."""

    CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
    CUstreamCaptureStatus = types.SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)
    CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )

    def __init__(self):
        self.current, self.capabilities = 0, [(9, 0), (9, 0)]
        self.synchronized, self.captured = [], set()

    def cuInit(self, flags):
        return (0,)

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetAttribute(self, which, device):
        return 0, self.capabilities[device][which]

    def cuDriverGetVersion(self):
        return 0, 13000

    def cuCtxSynchronize(self):
        self.synchronized.append(self.current)
        return (0,)

    def cuStreamIsCapturing(self, stream):
        return 0, int(stream in self.captured)

    @contextlib.contextmanager
    def current_gpu(self, index):
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def contexts(monkeypatch):
    found = TwoDevices()
    monkeypatch.setattr(driver, "binding", lambda: found)
    monkeypatch.setattr(driver.runtime, "current_gpu", found.current_gpu)
    monkeypatch.setattr(driver, "_devices", {})
    monkeypatch.setattr(driver, "stream_object", lambda handle: handle)
    monkeypatch.setattr(driver, "_torch_stream", lambda index: (0, 64)[index])
    monkeypatch.setattr(driver, "_torch_capturing", lambda: False)
    cuda = types.SimpleNamespace(current_device=lambda: 0)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return found


def test_all_devices_are_waited_for(contexts):
    for index in (0, 1):
        assert driver.device(index) is driver.device(index)
    driver.synchronize_all()
    assert (contexts.synchronized, contexts.current) == ([0, 1], 0)


def test_a_device_that_is_not_the_current_one_may_be_captured(contexts):
    """Torch tells of the current device alone."""
    driver.device(0)
    assert not driver.capturing(0)
    driver.device(1)
    assert not driver.capturing(1)
    contexts.captured = {64}
    assert driver.capturing(1)
    assert not driver.capturing(0)
    with pytest.raises(
        tikv.ArchError, match="the host cannot wait for the device while a CUDA graph is being captured"
    ):
        driver.synchronize_all()
    assert contexts.synchronized == []


def test_devices_that_kernels_are_not_compiled_for_are_refused(contexts):
    contexts.capabilities[1] = (8, 0)
    with pytest.raises(
        tikv.ArchError,
        match=r"cuda:1 is sm_80, but kernels are compiled for cuda:0, which is sm_90.*CUDA_VISIBLE_DEVICES",
    ):
        driver.device(1)
    assert driver.device(0).target == "sm_90"
