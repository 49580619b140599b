"""Caches in files: safetensors with metadata, written by `replacing`; no pickle anywhere.

A file carries checksums of every tensor, with its dtype and shape, and of the facts, so that damage anywhere is seen
and not loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tikv.errors import CacheFileError, CapacityError, DTypeError
from tikv.stores import replacing

Array = np.ndarray[Any, Any]
VERSION = 1
LAYER_ARRAYS = ("k", "v", "k_scale", "v_scale")  # of a layer, by the names they have in files
target_of = replacing.target_of


def write(
    path: str | os.PathLike[str], kind: str, tensors: dict[str, Array], facts: dict[str, Any], operation: str
) -> None:
    """Save named arrays and JSON facts of a kind of cache, with checksums; see `write_tensors`."""
    tensors = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    text = json.dumps(facts)
    checksums = {"": _checksum_of_text(text), **{name: _checksum(tensor) for name, tensor in tensors.items()}}
    metadata = {"tikv": kind, "version": str(VERSION), "facts": text, "crc32": json.dumps(checksums)}
    write_tensors(path, tensors, metadata, operation)


def write_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Array], metadata: dict[str, str], operation: str
) -> None:
    """Save named arrays and strings; an old file of that name is replaced in one step or stays as it was.

    Raises:
        CacheFileError: the name does not end in .safetensors, or the system refuses to write.
    """
    from safetensors.numpy import save

    target_of(path, operation)
    data = save({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, metadata)
    replacing.replace(path, data, operation)


def read_tensors(path: str | os.PathLike[str], operation: str) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays and strings of a safetensors file.

    Raises:
        CacheFileError: the file is missing, truncated or no safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        name = os.fspath(path)
    except TypeError:
        raise CacheFileError(f"{operation}: {path!r} is no path. Give that of a file that save wrote.") from None
    try:
        with safe_open(name, "np") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except FileNotFoundError:
        raise CacheFileError(
            f"{operation}: there is no file {str(path)!r}. Give the path of a file that save wrote."
        ) from None
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
        facts_as_saved = checksums.pop("") == _checksum_of_text(metadata["facts"])
        wrong = [name for name in {*checksums, *tensors} if _checksum(tensors[name]) != checksums[name]]
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise CacheFileError(f"{operation}: {shown} is damaged: its description cannot be read ({error!r}).") from error
    if not facts_as_saved:
        raise CacheFileError(f"{operation}: {shown} is damaged: its description is not the one saved.")
    if wrong:
        raise CacheFileError(
            f"{operation}: {shown} is damaged: the bytes of {', '.join(sorted(wrong))} are not those saved."
        )
    return tensors, facts


@contextlib.contextmanager
def understanding(path: str | os.PathLike[str], operation: str) -> Iterator[None]:
    """Around what makes sense of a file's facts, which are those saved: what they contradict is no fault of the caller.

    Raises:
        CacheFileError: for a missing or impossible fact.
        CapacityError, DTypeError: as they are, since a store of this form may be possible elsewhere.
    """
    try:
        yield
    except (CapacityError, DTypeError):
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CacheFileError(
            f"{operation}: {str(path)!r} does not describe a store: {error or error!r}. Save it again."
        ) from error


def _checksum(tensor: Array) -> int:
    """CRC-32 of the bytes, which differs for another dtype or shape too."""
    start = _checksum_of_text(f"{tensor.dtype.name}{tensor.shape}")
    return zlib.crc32(tensor.reshape(-1).view(np.uint8).data, start) if tensor.size else start


def _checksum_of_text(text: str) -> int:
    return zlib.crc32(text.encode())
