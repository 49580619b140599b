"""Things made once and found again: never more than a cache's limit, and one of each for all threads."""

import threading

import pytest

from tikv.runtime.cache import BoundedCache


def test_it_is_emptied_when_one_more_would_not_fit():
    cache = BoundedCache(limit=3)
    for key in range(3):
        assert cache.keep(key, str(key)) == str(key)
    assert [cache.get(key) for key in range(4)] == ["0", "1", "2", None]
    assert cache.keep(3, "3") == "3"
    assert dict(cache) == {3: "3"}


@pytest.mark.parametrize("full", [False, True])
def test_what_is_there_stays_or_is_replaced(full):
    """`keep` gives what is there already; an assignment puts another in its place. Neither forgets the rest."""
    cache = BoundedCache(limit=2 if full else 9)
    cache.keep("a", 1)
    cache.keep("b", 2)
    assert cache.keep("a", 3) == 1
    cache["a"] = 4
    assert dict(cache) == {"a": 4, "b": 2}


def test_an_assignment_counts_too():
    cache = BoundedCache(limit=2)
    for key in range(5):
        cache[key] = key
        assert len(cache) <= 2


def test_threads_that_make_the_same_get_the_same():
    for _ in range(50):
        cache, start, kept = BoundedCache(), threading.Barrier(4), []

        def make(cache=cache, start=start, kept=kept):
            start.wait()
            kept.append(cache.keep("key", object()))

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, kept))) == 1
