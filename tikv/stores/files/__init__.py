"""Caches in files: safetensors with metadata, written by `replacing` and read by `tensor_file`; pickle is never used.

A file has checksums of every tensor, with its dtype and shape, and of its metadata, so that damage is noticed and not
loaded. Checksums do not protect against a malicious file, whose author writes them too. So the metadata are compared
with the tensors in the file before a tensor is read or memory is allocated.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from tikv import dtypes, extras, runtime
from tikv.dtypes import DType
from tikv.errors import CacheFileError, CapacityError, DTypeError, TikvError
from tikv.formats import GroupFormat, parse_format
from tikv.stores.files import replacing, tensor_file
from tikv.stores.files.tensor_file import NUMBERS, Entry
from tikv.stores.row_format import RowFormat, RowFormats

Array = np.ndarray[Any, Any]
Meta: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Meta, dict[str, Entry]], None]
VERSION = 1
MOST_SHOWN = 300  # characters of a file's own words in a message
target_of = replacing.target_of


class CacheFileCapacityError(CacheFileError, CapacityError):
    """A file asks for more memory than there is: it is false, or holds a store of a larger machine."""


def write(
    path: str | os.PathLike[str], kind: str, tensors: dict[str, Array], meta: dict[str, Any], operation: str
) -> None:
    """Save named arrays and JSON metadata of a kind of cache, with checksums; see `write_tensors`."""
    tensors = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    text = json.dumps(meta)
    checksums = {"": _checksum_of_text(text), **{name: _checksum(tensor) for name, tensor in tensors.items()}}
    metadata = {"tikv": kind, "version": str(VERSION), "facts": text, "crc32": json.dumps(checksums)}
    write_tensors(path, tensors, metadata, operation)


def write_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Array], metadata: dict[str, str], operation: str
) -> None:
    """Save named arrays and strings; an old file of that name is replaced in one step; after an error it is unchanged.

    CacheFileError: the path has the wrong ending, the description is too long to be read again, or the system refuses.
    """
    save = extras.need("safetensors.numpy", operation).save
    target_of(path, operation)
    data = save({name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}, metadata)
    tensor_file.require_described(data, operation)
    replacing.replace(path, data, operation)


def read(
    path: str | os.PathLike[str], kind: str, operation: str, check: Check | None = None
) -> tuple[dict[str, Array], Meta]:
    """The arrays and metadata of a file that `write` made for the same kind of cache, checked, or CacheFileError.

    `check` is called with the metadata and the description of the tensors before any tensor is read. If these
    contradict each other, it raises an error that `understanding` converts.
    """
    shown = repr(str(path))
    with tensor_file.opened(path, operation) as file:
        metadata = file.metadata
        if metadata.get("tikv") != kind:
            saved_kind = metadata.get("tikv")
            holds = f"{words(saved_kind)}, not a {kind}" if saved_kind else "no cache of this library"
            raise CacheFileError(f"{operation}: {shown} holds {holds}. Give a file that {kind}.save wrote.")
        if metadata.get("version") != str(VERSION):
            raise CacheFileError(
                f"{operation}: {shown} has format version {words(metadata.get('version'))}; this library reads "
                f"{VERSION}. Use the version that wrote it."
            )
        try:
            meta, checksums = (tensor_file.parsed(metadata[name]) for name in ("facts", "crc32"))
            as_saved = checksums.pop("") == _checksum_of_text(metadata["facts"])
            if type(meta) is not dict or {*checksums} != {*file.entries}:
                raise ValueError("it does not describe the tensors in the file")
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise CacheFileError(
                f"{operation}: {shown} is damaged: its description cannot be read ({words(repr(error))}). Save it "
                f"again."
            ) from None
        if not as_saved:
            raise CacheFileError(
                f"{operation}: {shown} is damaged: its description is not the one saved. Save it again."
            )
        if check is not None:
            with understanding(path, operation):
                check(meta, file.entries)
        tensors = {name: file.read(name) for name in file.entries}
    wrong = [name for name, tensor in tensors.items() if _checksum(tensor) != checksums[name]]
    if wrong:
        raise CacheFileError(
            f"{operation}: {shown} is damaged: the bytes of {words(', '.join(sorted(wrong)))} are not those saved. "
            f"Save it again."
        )
    return tensors, meta


def kind_of(path: str | os.PathLike[str], operation: str) -> str:
    """The kind of cache that a file says it holds; this checks nothing in the file."""
    with tensor_file.opened(path, operation) as file:
        return file.metadata.get("tikv") or ""


@contextlib.contextmanager
def understanding(path: str | os.PathLike[str], operation: str) -> Iterator[None]:
    """A context for interpreting a file's metadata, in which errors are blamed on the file and not on the caller.

    Raises:
        CacheFileError: a fact is missing or impossible.
        CacheFileCapacityError: this machine has no room for the store.
        DTypeError: unconverted, since another machine may support a store of this form.
    """
    try:
        yield
    except CapacityError as error:
        raise CacheFileCapacityError(
            f"{operation}: {str(path)!r} describes a store that is too large here: {words(str(error))}"
        ) from None
    except (CacheFileError, DTypeError):
        raise
    except (MemoryError, RuntimeError) as error:
        of_memory = "memory" in str(error).lower() and not isinstance(error, TikvError)  # Taichi's and torch's word
        if not of_memory and not isinstance(error, MemoryError):
            raise
        raise CacheFileCapacityError(
            f"{operation}: there is no memory for the store that {str(path)!r} describes ({words(str(error))}). Free "
            f"some, or save a smaller store."
        ) from None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise CacheFileError(
            f"{operation}: {str(path)!r} does not describe a store: {words(str(error) or repr(error))}. Save it again."
        ) from None


def require_memory(path: str | os.PathLike[str], nbytes: int, operation: str) -> None:
    """Raise CacheFileCapacityError if a file describes a store larger than this machine's whole memory."""
    arch = runtime.current().arch
    limit = runtime.memory_bytes(arch)
    if limit is not None and nbytes > limit:
        raise CacheFileCapacityError(
            f"{operation}: {str(path)!r} describes a store of {nbytes} bytes, and {arch} has {limit} in all. Load it "
            f"on a larger machine, or save a smaller store."
        )


# --- metadata, which may have any type and size until it is checked


def integer(value: Any, name: str, *, low: int = 0, high: int = NUMBERS) -> int:
    """The value, which must be an integer in [low, high], or ValueError; true and 1.0 are not integers here."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {reprlib.repr(value)} and must be an integer from {low} to {high}")
    return value


def listed(value: Any, name: str, count: int | None = None) -> list[Any]:
    """The value, which must be a list, of `count` entries if that is given, or ValueError."""
    if type(value) is not list or (count is not None and len(value) != count):
        expected = "a list" if count is None else f"a list of {count}"
        raise ValueError(f"{name} is {reprlib.repr(value)} and must be {expected}")
    return value


def integers(value: Any, name: str, each: str, count: int | None = None, *, high: int = NUMBERS) -> list[int]:
    """The value, which must be a list of integers in [0, high], `count` of them if that is given, or ValueError."""
    return [integer(n, each, high=high) for n in listed(value, name, count)]


def storage(form: Meta) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """The arrays of a layer in a store of this form: each one's name, row shape and dtype; or ValueError."""
    names, scale_name = (form["dtype"], form.get("v_dtype", form["dtype"])), form.get("scale_dtype", "float16")
    stored: list[DType | GroupFormat] = []
    for name in names:
        format = parse_format(name) if type(name) is str else None
        if type(name) is not str or (name not in dtypes.APPENDED and format is None):
            raise ValueError(f"dtype {reprlib.repr(name)} is not stored; {', '.join(dtypes.APPENDED)} are")
        stored.append(format or dtypes.parse(name, ""))
    if scale_name not in [row.name for row in dtypes.SCALES]:
        raise ValueError(f"scale_dtype {reprlib.repr(scale_name)} is not supported")
    own_scales = [row.own_scale_dtype for row in stored if isinstance(row, GroupFormat) and row.own_scale_dtype]
    scale = own_scales[0] if own_scales else dtypes.parse(scale_name, "")
    width = integer(form["head_dim"], "head_dim", low=1)
    width_v = width if form.get("head_dim_v") is None else integer(form["head_dim_v"], "head_dim_v", low=1)
    rows = RowFormats(RowFormat(stored[0], width), RowFormat(stored[1], width_v), scale)
    for row in rows.both:
        if row.format is not None:
            row.format.groups(row.width, "a head", "a file")
    return [(name, shape, dtype.numpy) for name, (shape, dtype) in rows.arrays().items()]


def require_entry(entries: dict[str, Entry], name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise ValueError if the file has no tensor of that name, shape and dtype."""
    entry = entries.get(name)
    if entry is None:
        raise ValueError(f"there is no tensor {name}")
    if entry.shape != shape or entry.dtype != dtype:
        raise ValueError(f"{name} is {entry.stored} {entry.shape} where {dtype.name} {shape} is needed")


def words(text: Any) -> str:
    """A file's own words for a message: shortened, and without characters that control a terminal."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text)[: MOST_SHOWN + 1])
    return shown if len(shown) <= MOST_SHOWN else f"{shown[: MOST_SHOWN - 3]}..."


def _checksum(tensor: Array) -> int:
    """CRC-32 of the dtype, the shape and the bytes."""
    start = _checksum_of_text(f"{tensor.dtype.name}{tensor.shape}")
    return zlib.crc32(tensor.reshape(-1).view(np.uint8).data, start) if tensor.size else start


def _checksum_of_text(text: str) -> int:
    return zlib.crc32(text.encode())
