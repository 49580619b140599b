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


def test_addresses_do_not_add_up():
    """Tensors lie anywhere, in any form: only a few of those that were checked are remembered."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from tikv.arrays import last_call

    memory = torch.zeros(1 << 16)
    for width in range(8, 8 + 2 * last_call.MOST_ADDRESSES):
        for first in range(2):
            view_all((memory[first * 16 : first * 16 + width],), ["a"], "a call with many forms")
    for first in range(3 * last_call.MOST_ADDRESSES):
        view_all((memory[first * 16 : first * 16 + 8],), ["a"], "a call at many addresses")
    assert len(last_call._unnested_at) <= last_call.MOST_ADDRESSES
    assert max(map(len, last_call._unnested_at.values())) <= last_call.MOST_ADDRESSES
