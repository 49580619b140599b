"""Which GPU a call is for, without one: by stand-ins for what lies there, and for torch."""

import sys
import types

import numpy as np
import pytest

from tikv import arrays, runtime
from tikv.arrays import gpus


class On:
    """An array that says where it lies as torch's and JAX's do."""

    def __init__(self, device):
        self.device = device


class Cupy:
    """One whose `device` is an object of its own, and which says its number by DLPack."""

    device = "<CUDA Device 1>"
    __cuda_array_interface__ = {}  # noqa: RUF012

    def __dlpack_device__(self):
        return 2, 1


class Codes:
    """A `Quantized`: its codes say where it lies."""

    codes = On("cuda:2")


class Wrong:
    @property
    def device(self):
        raise RuntimeError("asked")


@pytest.fixture
def first(monkeypatch):
    """The runtime of the first of three GPUs, which is torch's current one; `torch` moves on."""
    found = types.SimpleNamespace(num_gpus=3, on_gpu=lambda index: f"runtime of {index}")
    monkeypatch.setattr(gpus.start, "_current", None)
    monkeypatch.setattr(gpus.start, "current", lambda: found)
    cuda = types.SimpleNamespace(current_device=lambda: 1, is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return found


@pytest.mark.parametrize(
    ("given", "index"),
    [
        ([On("cuda:2")], 2),
        ([On("cuda")], 0),
        ([np.zeros(2), On("cuda:2"), On("cuda:0")], 2),
        ([None, Cupy()], 1),
        ([Codes()], 2),
        ([np.zeros(2), On("cpu"), None, [1], Wrong()], 1),
        ([], 1),
    ],
    ids=["second", "no number", "first that says so", "cupy", "codes", "none says so", "nothing"],
)
def test_the_gpu_of_a_call(first, given, index):
    assert arrays.runtime_of(*given) == f"runtime of {index}"


def test_without_torch_the_first_gpu_serves_what_lies_on_the_host(first, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert arrays.runtime_of(np.zeros(2)) == "runtime of 0"


def test_a_process_that_sees_one_gpu_asks_nothing(first):
    first.num_gpus = 1
    assert arrays.runtime_of(On("cuda:2")) is first


@pytest.mark.archs("cpu")
def test_a_runtime_for_each_gpu(arch, monkeypatch):
    """Of one program: each has memory, kernels and plans of its own, and all one lock."""
    live = runtime.current()
    assert (live.index, live.device, live.num_gpus) == (0, "cpu", 1)
    monkeypatch.setattr(live, "is_cuda", True)
    second = live.on_gpu(1)
    assert second is live.on_gpu(1)
    assert second is second.on_gpu(1)
    assert second.on_gpu(0) is live
    assert live.on_gpu(0) is live
    assert second.on_gpu(2) is live.on_gpu(2)
    assert second is not live.on_gpu(2)
    assert (second.index, second.epoch, second.alive) == (1, live.epoch, True)
    assert second.lock is live.lock
    assert second.plans is not live.plans
    assert second.kernels is not live.kernels
    live._others.clear()
