"""The lock of an engine's cache on disk: a file, which stays there and blocks all others if its process is killed.

An engine makes the file while it reads its list of kernels or writes new ones, and then removes it. It tries for a
quarter of a second to make it; after that it warns, ignores the cache and compiles everything. The file does not name
its owner. But the owner only reads and writes the files beside it, one after the other: if none of them changes for a
second, the owner is gone. If a process is suspended for so long and then resumes, what it wrote may be lost, and
kernels are compiled again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("tikv")

QUIET_SECONDS = 1.0  # after so long without a change, the lock has no owner
LEAST_SECONDS = 0.2  # of these, watch at least so long: a remote disk's clock may differ
MOST_SECONDS = 30.0  # after so long, the engine tries without waiting further
_PAUSE = 0.05
_EXPLAINED = (
    "%s: another process has locked the engine's cache of compiled kernels, or ended without removing this lock, which "
    "this process may not remove. If the engine says 'Lock failed', it compiles the kernels that it needs again; "
    "results are the same. If no other process uses the engine, delete the file."
)  # the engine's own message names a command that deletes all kernels


class _Seen(NamedTuple):
    """A lock file, and when something was last written beside it."""

    number: int
    made: int  # nanoseconds
    changed: int


def wait_for(lock: Path) -> None:
    """Return once the lock is free: its process has removed it, or is gone, and then it is removed here."""
    begun = since = time.monotonic()
    before: _Seen | None = None
    while (seen := _look_at(lock)) is not None:
        now = time.monotonic()
        if seen != before:
            before, since = seen, now
        by_clock = time.time() - seen.changed / 1e9
        if now - since >= QUIET_SECONDS or (now - since >= LEAST_SECONDS and by_clock >= QUIET_SECONDS):
            if not _remove(lock, seen):
                log.warning(_EXPLAINED, lock)
                return
            log.info("removed %s, which a process that is gone left there", lock)
        elif now - begun >= MOST_SECONDS:
            log.warning(_EXPLAINED, lock)
            return
        time.sleep(_PAUSE)


def _look_at(lock: Path) -> _Seen | None:
    """The lock, or None if there is no lock that this process may see."""
    try:
        status = lock.stat()
        changed = [status.st_mtime_ns, lock.parent.stat().st_mtime_ns]
        with os.scandir(lock.parent) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    changed.append(entry.stat().st_mtime_ns)
    except OSError:
        return None
    return _Seen(status.st_ino, status.st_mtime_ns, max(changed))


def _remove(lock: Path, seen: _Seen) -> bool:
    """Remove only the lock that was seen: of two processes that find it, one may already have locked again.

    False if this process may not remove it.
    """
    aside = lock.with_name(f"{lock.name}.{os.getpid()}")
    try:
        lock.rename(aside)
        status = aside.stat()
        if (status.st_ino, status.st_mtime_ns) == (seen.number, seen.made) or lock.exists():
            aside.unlink()
        else:
            aside.rename(lock)
    except FileNotFoundError:  # its process, or another one that found it, was faster
        return True
    except OSError:
        return False
    return True
