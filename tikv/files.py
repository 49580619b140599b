"""Caches in files: safetensors with metadata, written beside the target, synced and renamed; no pickle anywhere.

A file carries the checksum of every tensor, so that damage is seen and not loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tikv.errors import CacheFileError

Array = np.ndarray[Any, Any]
SUFFIX = ".safetensors"
VERSION = 1


def write(
    path: str | os.PathLike[str], kind: str, tensors: dict[str, Array], facts: dict[str, Any], operation: str
) -> None:
    """Save named arrays and JSON facts of a kind of cache, with checksums; see `write_tensors`."""
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    metadata = {"tikv": kind, "version": str(VERSION), "facts": json.dumps(facts), "crc32": json.dumps(checksums)}
    write_tensors(path, tensors, metadata, operation)


def write_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Array], metadata: dict[str, str], operation: str
) -> None:
    """Save named arrays and strings; an old file of that name is replaced in one step or stays as it was.

    Raises:
        CacheFileError: the name does not end in .safetensors, or the system refuses to write.
    """
    from safetensors.numpy import save

    target = Path(path)
    if target.suffix != SUFFIX:
        raise CacheFileError(f"{operation}: {str(target)!r} does not end in {SUFFIX}. Name the file so.")
    data = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, metadata)
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.stem}-", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = ""
        _sync_folder(target.parent)
    except OSError as error:
        raise CacheFileError(f"{operation}: cannot write {str(target)!r}: {error}.") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def read_tensors(path: str | os.PathLike[str], operation: str) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays and strings of a safetensors file.

    Raises:
        CacheFileError: the file is missing, truncated or no safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        raise CacheFileError(
            f"{operation}: cannot read {str(path)!r} as safetensors: {error}. Save the cache again."
        ) from error


def read(path: str | os.PathLike[str], kind: str, operation: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays and facts of a file that `write` made for the same kind of cache, checked.

    Raises:
        CacheFileError: the file is missing, truncated, damaged, of another kind or a later version.
    """
    shown = repr(str(path))
    tensors, metadata = read_tensors(path, operation)
    if metadata.get("tikv") != kind:
        found = metadata.get("tikv") or "no cache of this library"
        raise CacheFileError(f"{operation}: {shown} holds {found}, not a {kind}. Give a file that {kind}.save wrote.")
    if metadata.get("version") != str(VERSION):
        raise CacheFileError(
            f"{operation}: {shown} has format version {metadata.get('version')}; this library reads {VERSION}. Use the "
            f"version that wrote it."
        )
    try:
        facts, checksums = json.loads(metadata["facts"]), json.loads(metadata["crc32"])
        wrong = [name for name in {*checksums, *tensors} if _checksum(tensors[name]) != checksums[name]]
    except (KeyError, ValueError, TypeError) as error:
        raise CacheFileError(f"{operation}: {shown} is damaged: its description cannot be read ({error!r}).") from error
    if wrong:
        raise CacheFileError(
            f"{operation}: {shown} is damaged: the bytes of {', '.join(sorted(wrong))} are not those saved."
        )
    return tensors, facts


def _checksum(tensor: Array) -> int:
    return zlib.crc32(tensor.reshape(-1).view(np.uint8).data) if tensor.size else 0


def _sync_folder(folder: Path) -> None:
    """Make the rename last a power cut, where a folder can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
