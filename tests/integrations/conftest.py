"""What tests of models have in common."""

import pytest


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
