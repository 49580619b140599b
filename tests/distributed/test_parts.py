"""Memory of what ranks exchange: kept from call to call where nothing that runs can still need it."""

import types

import pytest

from tikv.distributed import partials
from tikv.launch.cuda import driver

torch = pytest.importorskip("torch")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose stream, and whether it is being captured, the test says."""
    found = types.SimpleNamespace(is_cuda=True, index=1, stream=0, capturing=False)
    monkeypatch.setattr(driver, "stream", lambda index: found.stream + index)
    monkeypatch.setattr(driver, "capturing", lambda index: found.capturing)
    return found


def test_what_parts_have():
    made = partials.Partials.of((2, 3, 4), 8, 5, "cpu")
    assert [tuple(a.shape) for a in made[:3]] == [(2, 3, 4, 9), (5, 2, 3, 4, 9), (2, 3, 4)]
    assert {a.dtype for a in made[:3]} == {torch.float32}
    assert [a.ptr for a in made[3:]] == [a.data_ptr() for a in made[:3]]
    assert [a.shape for a in made[3:]] == [tuple(a.shape) for a in made[:3]]


def test_single_queries_share_memory_and_prompts_do_not(gpu):
    of_store = partials.StorePartials(gpu, 8, 2)
    one = of_store.of((2, 3, 1), "cpu")
    assert of_store.of((2, 3, 1), "cpu") is one
    assert of_store.of((1, 3, 1), "cpu") is not one
    assert of_store.of((2, 3, 4), "cpu") is not of_store.of((2, 3, 4), "cpu")
    assert of_store.of((2, 3, 1), "cpu") is one


def test_each_stream_and_each_graph_has_its_own(gpu):
    of_store = partials.StorePartials(gpu, 8, 2)
    one = of_store.of((2, 3, 1), "cpu")
    gpu.stream = 64
    other = of_store.of((2, 3, 1), "cpu")
    assert other is not one
    gpu.capturing = True
    captured = of_store.of((2, 3, 1), "cpu")
    assert captured is not other
    assert of_store.of((2, 3, 1), "cpu") is not captured, "a graph that is captured again"
    gpu.stream, gpu.capturing = 0, False
    assert of_store.of((2, 3, 1), "cpu") is one


def test_memory_of_inference_mode_is_used_outside_of_it():
    of_store = partials.StorePartials(types.SimpleNamespace(is_cuda=False), 8, 2)
    with torch.inference_mode():
        made = of_store.of((2, 3, 1), "cpu")
    assert of_store.of((2, 3, 1), "cpu") is made
    made.all.zero_()
