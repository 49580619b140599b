"""What is asked of torch and of the driver's library, by stand-ins for both."""

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
        return driver.stream(), driver.capturing()

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
        assert (attribute, device.value) == (16, 3)
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
        return driver.multiprocessors()

    yield ask
    driver._attribute.cache_clear()


def test_the_drivers_library_tells_the_multiprocessors(asked):
    assert asked(lambda name: Library()) == 46


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_that_does_not_tell_is_an_error(asked, failing):
    with pytest.raises(tikv.ArchError, match=r"does not say how many multiprocessors.*error \d+"):
        asked(lambda name: Library(failing))
    assert asked(lambda name: Library()) == 46, "a failure is not kept"


def test_no_driver_is_an_error(asked):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(tikv.ArchError, match="driver cannot be loaded"):
        asked(missing)
