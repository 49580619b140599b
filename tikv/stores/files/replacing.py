"""A file replaced in one step: written beside the target under a short name, synced, renamed.

Whoever writes holds a lock on what it writes (flock), which the system opens when the process ends, however it ends. So
a file of such a name whose lock can be taken is what a killed save left behind, and the next save into the folder
removes it.
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
except ImportError:  # Windows, where a file that is open can be neither removed nor renamed, which is a lock too
    fcntl = None  # type: ignore[assignment]
_LOCKS = fcntl is not None

SUFFIX = ".safetensors"
_TEMPORARY = re.compile(r"\.tikv-[0-9a-f]{16}\.tmp")  # short: the target's name may be as long as the system allows
_ABANDONED = 86400  # seconds after which a file is left behind where the file system has no locks


def target_of(path: str | os.PathLike[str], operation: str, suffix: str = SUFFIX) -> Path:
    """The file to write, behind a link if `path` is one, known to be possible before anything is done for it.

    Raises:
        CacheFileError: that is not a path, its name does not end in `suffix`, its folder is not there, or what is there
            is not a file.
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
    except (OSError, ValueError) as error:  # a name that is too long, a circle of links, a zero byte
        if isinstance(error, CacheFileError):
            raise
        raise CacheFileError(f"{operation}: cannot write {str(target)!r}: {error}. Give another name.") from None
    if mode is not None and not stat.S_ISREG(mode):
        raise CacheFileError(f"{operation}: {str(target)!r} is not a file, so it is not replaced. Give another name.")
    return target


def replace(path: str | os.PathLike[str], data: bytes, operation: str, suffix: str = SUFFIX) -> None:
    """Let a file hold these bytes: in one step, or it stays as it was.

    A file that was there keeps its mode, and a link stays a link; a new file has the mode that the umask gives. Files
    that killed saves left in the folder are removed.

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
    for _ in range(100):  # another process, which cleared the folder, may have taken the file before it was locked
        temporary = target.with_name(f".tikv-{secrets.token_hex(8)}.tmp")
        try:
            # Not readable by more than the old file, not even for a moment.
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
    """What a file is and who may do what with it; None if it does not exist."""
    try:
        return os.stat(target).st_mode
    except FileNotFoundError:
        return None


def _bits(mode: int | None) -> int:
    return 0o666 if mode is None else mode & 0o777


def _lock(file: IO[bytes]) -> bool:
    """Lock a new file; false if it was removed before."""
    if not _LOCKS:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return os.fstat(file.fileno()).st_nlink > 0


def _clear(folder: Path) -> None:
    """Remove what killed saves left in a folder, whatever their target was; never what is being written."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if _TEMPORARY.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    if not _LOCKS:
        os.unlink(path)  # refused while it is open
        return
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - found.st_mtime < _ABANDONED:
                return
        os.unlink(path)
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the rename last a power cut, where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
