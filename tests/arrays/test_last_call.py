"""Views of a call whose arrays have the forms of the operation's previous call."""

import sys
import threading

import numpy as np
import pytest

from tikv.arrays.last_call import view_all


@pytest.fixture
def eager_switches():
    """Threads that change places as often as the interpreter allows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(interval)


def test_threads_get_the_views_of_their_own_arrays(eager_switches):
    wrong = []

    def call():
        arrays = tuple(np.zeros((2, 8), np.float32) for _ in range(8))
        want = tuple(a.ctypes.data for a in arrays)
        for _ in range(6000):
            views = view_all(arrays, [*"abcdefgh"], "a call of many threads")
            if views.pointers != want:
                wrong.append((views.pointers, want))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
