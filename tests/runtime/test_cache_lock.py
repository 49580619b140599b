"""A lock that a killed process left in the engine's cache costs no warning and no compilation; one in use stays."""

import logging
import os
import threading
import time

import pytest

from tikv import runtime
from tikv.runtime import cache_lock

APPEND = """
import sys
from pathlib import Path
import numpy as np, tikv
tikv.init(arch=sys.argv[1])
store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=16, capacity=64, dtype=sys.argv[2])
rows = np.ones((3, 2, 16), np.float32)
store.append(0, rows, rows)
if len(sys.argv) > 3:
    Path(sys.argv[3]).touch()
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "engine.lock"


def seconds_of(call, *args):
    begun = time.monotonic()
    call(*args)
    return time.monotonic() - begun


def test_without_a_lock_nothing_is_waited_for(lock, tmp_path):
    assert seconds_of(cache_lock.wait_for, lock) < 0.1
    assert seconds_of(cache_lock.wait_for, tmp_path / "no folder" / "engine.lock") < 0.1


def test_the_lock_of_a_dead_process_is_removed(lock, caplog):
    caplog.set_level(logging.INFO, "tikv")
    lock.touch()
    assert seconds_of(cache_lock.wait_for, lock) >= 0.5  # a file's time may be coarse
    assert list(lock.parent.iterdir()) == []
    assert "a process that is gone left there" in caplog.text


def test_an_old_lock_is_removed_sooner(lock):
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - 60,) * 2)
    assert cache_lock.LEAST_SECONDS <= seconds_of(cache_lock.wait_for, lock) < cache_lock.QUIET_SECONDS
    assert not lock.exists()


def test_a_lock_in_use_is_waited_for(lock, monkeypatch):
    """Its process writes one file after another; it finds its lock again and removes it itself."""
    monkeypatch.setattr(
        cache_lock, "QUIET_SECONDS", 2.0
    )  # of less than the writes take, and of a busy machine's pauses
    lock.touch()
    found = []

    def work():
        for number in range(25):
            time.sleep(0.1)
            (lock.parent / f"{number % 3}.kernel").write_bytes(bytes(number))
        found.append(lock.exists())
        lock.unlink()

    thread = threading.Thread(target=work)
    thread.start()
    waited = seconds_of(cache_lock.wait_for, lock)
    thread.join()
    assert found == [True]
    assert waited > 2


def test_it_is_not_waited_for_without_end(lock, monkeypatch, caplog):
    monkeypatch.setattr(cache_lock, "MOST_SECONDS", 0.3)
    lock.touch()
    assert seconds_of(cache_lock.wait_for, lock) < 1
    assert lock.exists()
    assert "If the engine says 'Lock failed', it compiles" in caplog.text


def test_a_lock_that_cannot_be_removed_is_explained(lock, monkeypatch, caplog):
    monkeypatch.setattr(cache_lock, "_remove", lambda *_: False)
    lock.touch()
    cache_lock.wait_for(lock)
    assert str(lock) in caplog.text
    assert "results are the same. If no other process uses the engine, delete the file." in caplog.text


def test_what_was_locked_anew_meanwhile_is_left(lock):
    """Of two processes that find the lock of a dead one, the second may come when a third has its own."""
    lock.touch()
    seen = cache_lock._look_at(lock)
    lock.unlink()
    assert cache_lock._remove(lock, seen)
    os.utime(lock.parent)
    lock.touch()
    os.utime(lock, ns=(seen.made + 10**9,) * 2)
    assert cache_lock._remove(lock, seen)
    assert lock.exists()
    assert list(lock.parent.iterdir()) == [lock]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do everything")
def test_a_lock_that_may_not_be_removed_is_left(lock):
    lock.touch()
    lock.parent.chmod(0o500)
    cache_lock.wait_for(lock)
    lock.parent.chmod(0o700)
    assert lock.exists()


def test_the_engine_starts_and_ends_over_it_as_if_it_were_not_there(arch, tmp_path, python):
    """No warning of the engine's, and no kernel is compiled again: neither files nor their list are written."""
    engine = runtime.engine_in_use()
    lock = tmp_path / engine.cache_lock
    # CUDA's native launcher keeps its kernels elsewhere.
    folders = {engine.cache_variable: str(tmp_path), "TIKV_LAUNCHER": "public"}

    def kernels():
        return {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}

    python(APPEND, arch, "float32", **folders)
    before = kernels()
    assert before
    for _ in range(2):
        lock.touch()
        child = python(APPEND, arch, "float32", **folders)
        assert (child.stdout, child.stderr) == ("", "")
        assert kernels() == before
    # The lock of one that dies while this one runs: what this one compiled is kept all the same.
    child = python(APPEND, arch, "int8", str(lock), **folders)
    assert (child.stdout, child.stderr) == ("", "")
    assert len(kernels()) > len(before)
    assert not lock.exists()
