"""Replacing a file in one step: it is written beside the target under a short name, synced and renamed.

A save holds a lock (flock) on the file that it writes, and the system releases the lock when the process ends, however
it ends. So if the lock of such a file can be taken, a killed save left it, and the next save into the folder removes
it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import IO

from tikv.errors import CacheFileError

try:
    import fcntl
except ImportError:  # on Windows an open file can be neither removed nor renamed, which serves as a lock
    fcntl = None  # type: ignore[assignment]
_LOCKS = fcntl is not None

SUFFIX = ".safetensors"
_TEMPORARY = re.compile(r"\.tikv-[0-9a-f]{16}\.tmp")  # short: the target's name may be as long as the system allows
_ABANDONED = 86400  # seconds after which a file counts as left by a killed save, if the file system has no locks


def target_of(path: str | os.PathLike[str], operation: str, suffix: str = SUFFIX) -> Path:
    """The file to write, which is the one linked to if `path` is a link; checked before any other work is done.

    Raises:
        CacheFileError: it is not a path, its name does not end in `suffix`, its folder does not exist, or something
            other than a file is there.
    """
    try:
        target = Path(path)
    except TypeError:
        raise CacheFileError(f"{operation}: {path!r} is not a path. Give the name of a file.") from None
    if suffix and target.suffix != suffix:
        raise CacheFileError(f"{operation}: {str(target)!r} does not end in {suffix}. Give the file that suffix.")
    try:
        if target.is_symlink():
            target = Path(os.path.realpath(target))
        if not target.parent.is_dir():
            raise CacheFileError(f"{operation}: there is no folder {str(target.parent)!r}. Make it, or name another.")
        mode = _mode_of(target)
    except (OSError, ValueError) as error:  # such as a name that is too long, a cycle of links, a zero byte
        if isinstance(error, CacheFileError):
            raise
        raise CacheFileError(f"{operation}: cannot write {str(target)!r}: {error}. Give another name.") from None
    if mode is not None and not stat.S_ISREG(mode):
        raise CacheFileError(f"{operation}: {str(target)!r} is not a file, so it is not replaced. Give another name.")
    return target


def replace(path: str | os.PathLike[str], data: bytes, operation: str, suffix: str = SUFFIX) -> None:
    """Write these bytes to a file in one step; after an error, an old file is unchanged.

    An old file's mode is kept, and a link stays a link; a new file has the mode that the umask gives. Files that killed
    saves left in the folder are removed.

    Raises:
        CacheFileError: as `target_of`, or the system refuses to write.
    """
    target = target_of(path, operation, suffix)
    try:
        _clear(target.parent)
        _write(target, data)
    except OSError as error:
        raise CacheFileError(
            f"{operation}: cannot write {str(target)!r}: {error}. Make room, or name another file; a file that was "
            "there before is unchanged."
        ) from None


def _write(target: Path, data: bytes) -> None:
    mode = _mode_of(target)
    for _ in range(100):  # another process that clears the folder may have removed the file before it was locked
        temporary = target.with_name(f".tikv-{secrets.token_hex(8)}.tmp")
        try:
            # At no moment is it readable by more users than the old file.
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, _bits(mode))) as file:
                if not _lock(file):
                    continue
                if mode is not None:
                    with contextlib.suppress(OSError):  # a file system without modes
                        os.chmod(temporary, stat.S_IMODE(mode))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if not _LOCKS:
                    file.close()
                os.replace(temporary, target)
            _sync_folder(target.parent)
            return
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    raise OSError("another process removes what is written")


def _mode_of(target: Path) -> int | None:
    """A file's type and permissions; None if it does not exist."""
    try:
        return os.stat(target).st_mode
    except FileNotFoundError:
        return None


def _bits(mode: int | None) -> int:
    return 0o666 if mode is None else mode & 0o777


def _lock(file: IO[bytes]) -> bool:
    """Lock a new file; False if it was removed before."""
    if not _LOCKS:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return True
    return os.fstat(file.fileno()).st_nlink > 0


def _clear(folder: Path) -> None:
    """Remove what killed saves left in a folder, whatever their targets were, but no file that is being written."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    if not _LOCKS:
        os.unlink(path)  # Windows refuses while it is open
        return
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - status.st_mtime < _ABANDONED:
                return
        os.unlink(path)
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut, on systems where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
