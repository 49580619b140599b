"""A folder of compiled kernels in the user's cache: reads are checked, writes are atomic, and its size is bounded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import sys
import tempfile

from tikv import runtime

MAGIC = b"taichi-kv kernel 1\n"
LIMIT_BYTES = 256 << 20  # a kernel takes 3 to 150 KB; above this, the least recently used are removed


def folder() -> pathlib.Path:
    """Where kernels are kept: ``TIKV_CACHE_DIR``, else the platform's cache folder for the user."""
    if path := os.environ.get("TIKV_CACHE_DIR"):
        return pathlib.Path(path)
    if sys.platform == "win32":
        base = pathlib.Path(os.environ.get("LOCALAPPDATA") or pathlib.Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = pathlib.Path.home() / "Library" / "Caches"
    else:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return base / "taichi-kv"


def read(key: str) -> str | None:
    """The text kept under a key; None if the folder has no such text, or if the text is damaged."""
    path = folder() / f"{key}.ptx"
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    head, _, body = raw.removeprefix(MAGIC).partition(b"\n")
    if not raw.startswith(MAGIC) or head != _digest(key, body):
        runtime.log.warning("the cached kernel %s is damaged or foreign; it is compiled again", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # so that eviction knows it is in use
    return body.decode()


def write(key: str, text: str) -> None:
    """Keep a text under a key. If the folder cannot be written, each process compiles the kernel again."""
    body = text.encode()
    directory = folder()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f"{key}.", suffix=".part", delete=False) as part:
            try:
                part.write(MAGIC + _digest(key, body) + b"\n" + body)
                part.close()
                os.replace(part.name, directory / f"{key}.ptx")
            except BaseException:
                os.unlink(part.name)
                raise
        _evict(directory)
    except OSError as error:
        runtime.log.warning("the kernel cache %s cannot be written: %s", directory, error)


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + body).hexdigest().encode()


def _evict(directory: pathlib.Path) -> None:
    """Remove the least recently used entries until the others fit."""
    entries = []
    for path in directory.glob("*.ptx"):
        with contextlib.suppress(OSError):
            status = path.stat()
            entries.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= LIMIT_BYTES:
            break
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
