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
