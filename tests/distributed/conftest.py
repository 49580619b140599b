"""Groups of processes that the tests of a folder share."""

import pytest
from processes import Pair, Processes


@pytest.fixture(scope="package")
def three():
    processes = Processes(3)
    yield processes
    processes.end()


@pytest.fixture(scope="package")
def two(three):
    return Pair(three)
