"""What tests of models have in common."""

import pathlib

import pytest


def pytest_collection_modifyitems(items):
    """A case of a model takes seconds: one whose parameters all have values of earlier cases runs with --full."""
    for item in items:
        if pathlib.Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.full(each_value=True))


@pytest.fixture(scope="module")
def one_thread():
    """Models this small only wait for a second thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def set_room(monkeypatch):
    """A function that sets how much room layers have: for a rollback, beside the window, and at first."""
    from tikv.integrations.transformers.layers import room

    names = {"rollback": "ROLLBACK", "spare": "SPARE", "first": "FIRST_CAPACITY"}

    def set_to(**sizes):
        for name, tokens in sizes.items():
            monkeypatch.setattr(room, names[name], tokens)

    return set_to


@pytest.fixture
def read(monkeypatch):
    """The dtypes of keys and values that the library's attention reads."""
    from tikv.integrations.transformers.memory import stored
    from tikv.integrations.transformers.memory.slots import CacheSlots

    dtypes, in_place, by_arrays = [], CacheSlots.attend, stored.attend_contiguous

    def note(caches):
        dtypes.append((caches.k.dtype, caches.v.dtype))

    monkeypatch.setattr(CacheSlots, "attend", lambda slots, *args: (note(slots.caches), in_place(slots, *args))[1])
    monkeypatch.setattr(stored, "attend_contiguous", lambda q, c, *args: (note(c), by_arrays(q, c, *args))[1])
    return dtypes


@pytest.fixture
def as_on_a_device(monkeypatch):
    """A function after which batches are read by the code for devices, which never waits, or by its argument."""
    from tikv.integrations.transformers.batching import attend

    return lambda by=attend.by_tiles: monkeypatch.setattr(attend, "by_request", by)


@pytest.fixture
def with_cuda(monkeypatch):
    """A function after which torch says that it has CUDA."""
    import torch

    return lambda: monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
