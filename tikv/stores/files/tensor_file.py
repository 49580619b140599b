"""A safetensors file read with care: nothing is believed that the file's size and plain limits do not bear out.

The library's reader takes a name, waits without end at a pipe, reads 100 MB of description, and knows dtypes by a table
that fails with a KeyError. Here the description is checked before anything is read, and tensors are read one by one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import ml_dtypes
import numpy as np

from tikv.errors import CacheFileError, TikvError

Array = np.ndarray[Any, Any]
HEADER_BYTES = 2**23  # of a description: far more than any store's, and read in a second
HEADER_PARTS = 700_000  # lists, objects, names and commas of it: what JSON takes time for, and much more than its text
MOST_AXES = 32
NUMBERS = 2**62  # no count of tokens or bytes is larger

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class Entry:
    """What a file says of a tensor: its dtype's name there, its shape, and which of the file's bytes it is."""

    stored: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype, or ValueError."""
        found = DTYPES.get(self.stored)
        if found is None:
            raise ValueError(f"dtype {reprlib.repr(self.stored)} is not one that is read here")
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of it in the file."""
        return self.end - self.begin


class TensorFile:
    """An open file whose description has been checked.

    Attributes:
        metadata: its strings.
        entries: its tensors by name.
    """

    def __init__(self, file: IO[bytes], metadata: dict[str, str], entries: dict[str, Entry]) -> None:
        self._file = file
        self.metadata = metadata
        self.entries = entries

    def read(self, name: str) -> Array:
        """One tensor; ValueError where its dtype is unknown or the file has become shorter."""
        entry = self.entries[name]
        dtype = entry.dtype
        data = np.empty(entry.nbytes, np.uint8)
        self._file.seek(entry.begin)
        rest = memoryview(data.data)
        while rest:
            n = self._file.readinto(rest)  # type: ignore[attr-defined]
            if not n:
                raise ValueError("the file has become shorter")
            rest = rest[n:]
        return data.view(dtype).reshape(entry.shape)


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], operation: str) -> Iterator[TensorFile]:
    """A safetensors file, open to be read.

    Raises:
        CacheFileError: it is missing, no plain file, truncated, or no safetensors; or, within, a tensor cannot be read.
    """
    try:
        name = os.fspath(path)
    except TypeError:
        raise CacheFileError(f"{operation}: {path!r} is not a path. Give that of a file that save wrote.") from None
    try:
        with open(name, "rb", opener=_open_at_once) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is a pipe, a folder or a device, not a file")
            yield _described(file, found.st_size)
    except TikvError:
        raise
    except FileNotFoundError:
        raise CacheFileError(
            f"{operation}: there is no file {str(path)!r}. Give the path of a file that save wrote."
        ) from None
    except (OSError, ValueError, MemoryError) as error:
        reason = str(error) or "there is too little memory"
        raise CacheFileError(
            f"{operation}: cannot read {str(path)!r} as safetensors: {reason}. Save the cache again."
        ) from None


def parsed(text: str) -> Any:
    """JSON of a size that a description may have, without the numbers that JSON does not have; or ValueError."""
    parts = sum(text.count(mark) for mark in "[{:,")
    if len(text) > HEADER_BYTES or parts > HEADER_PARTS:
        raise ValueError(f"JSON of {len(text)} characters and {parts} parts; at most {HEADER_PARTS} parts are read")
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def require_described(data: bytes, operation: str) -> None:
    """Raise CacheFileError where the description of a file about to be written is larger than `opened` allows."""
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    parts = sum(header.count(mark) for mark in (b"[", b"{", b":", b","))
    if len(header) > HEADER_BYTES or parts > HEADER_PARTS:
        raise CacheFileError(
            f"{operation}: the description of what is saved takes {len(header)} bytes and {parts} parts; at most "
            f"{HEADER_BYTES} and {HEADER_PARTS} are read again. Save fewer sequences in a file."
        )


def _open_at_once(name: str, flags: int) -> int:
    """Open without waiting for another side, as a pipe would."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _described(file: IO[bytes], size: int) -> TensorFile:
    """What a file of that many bytes says is in it; ValueError if it is not safetensors, or says what cannot be."""
    length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
    first = 8 + length
    if size < 8 or first > size:
        raise ValueError(f"it has {size} bytes, too few for its description")
    if length > HEADER_BYTES:
        raise ValueError(f"its description has {length} bytes; at most {HEADER_BYTES} are read")
    header = parsed(file.read(length).decode())
    if type(header) is not dict:
        raise ValueError("its description is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(text) is not str for text in metadata.values()):
        raise ValueError("its metadata are not a table of strings")
    entries = {name: _entry(name, said, first) for name, said in header.items()}
    end = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:  # a gap; or bytes that are two tensors', which would take more memory than the file has
            raise ValueError(f"the bytes of {reprlib.repr(name)} do not begin where those before it end")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size} bytes where its description says {end}")
    return TensorFile(file, metadata, entries)


def _entry(name: str, said: Any, first: int) -> Entry:
    """What the description says of a tensor, or ValueError where that cannot be."""
    found = said if type(said) is dict else {}
    stored, shape, span = found.get("dtype"), found.get("shape"), found.get("data_offsets")
    if (
        type(stored) is not str
        or type(shape) is not list
        or len(shape) > MOST_AXES
        or type(span) is not list
        or len(span) != 2
        or any(type(n) is not int or not 0 <= n < NUMBERS for n in [*shape, *span])
        or span[0] > span[1]
    ):
        raise ValueError(
            f"what it says of {reprlib.repr(name)} is not a dtype, a shape and a place: {reprlib.repr(said)}"
        )
    entry = Entry(stored, tuple(shape), first + span[0], first + span[1])
    # Of a dtype that is unknown here the size of an element is, too.
    if stored in DTYPES and math.prod(shape) * DTYPES[stored].itemsize != entry.nbytes:
        raise ValueError(f"{reprlib.repr(name)} of {stored} {shape} has {entry.nbytes} bytes, which does not fit")
    return entry
