"""A safetensors file from an untrusted source: its claims are checked against the file's size and fixed limits.

The library's reader takes a name, waits forever at a pipe, reads a description of 100 MB, and fails with a KeyError at
an unknown dtype. Here the description is checked before anything else is read, and tensors are read one by one.
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
HEADER_BYTES = 2**23  # the longest description: far longer than any store's, and read in a second
HEADER_PARTS = 700_000  # its most lists, objects, names and commas: they, not its text, take JSON's time
MOST_AXES = 32
NUMBERS = 2**62  # larger than any count of tokens or bytes

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
    """The description of a tensor in a file: the file's name for its dtype, its shape, and its range of bytes."""

    stored: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype, or ValueError."""
        dtype = DTYPES.get(self.stored)
        if dtype is None:
            raise ValueError(f"dtype {reprlib.repr(self.stored)} is not one that is read here")
        return dtype

    @property
    def nbytes(self) -> int:
        """The number of its bytes in the file."""
        return self.end - self.begin


class TensorFile:
    """An open file whose description has been checked.

    Attributes:
        metadata: the file's strings.
        entries: the descriptions of its tensors, by name.
    """

    def __init__(self, file: IO[bytes], metadata: dict[str, str], entries: dict[str, Entry]) -> None:
        self._file = file
        self.metadata = metadata
        self.entries = entries

    def read(self, name: str) -> Array:
        """One tensor; ValueError if its dtype is unknown or the file has become shorter."""
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
    """A context with a safetensors file open for reading.

    Raises:
        CacheFileError: it is missing, not a plain file, truncated or not safetensors; or a tensor in it cannot be read.
    """
    try:
        name = os.fspath(path)
    except TypeError:
        raise CacheFileError(f"{operation}: {path!r} is not a path. Give that of a file that save wrote.") from None
    try:
        with open(name, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is a pipe, a folder or a device, not a file")
            yield _described(file, status.st_size)
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
    """Parse JSON of at most a description's size, without numbers such as NaN that JSON lacks; or ValueError."""
    parts = sum(text.count(mark) for mark in "[{:,")
    if len(text) > HEADER_BYTES or parts > HEADER_PARTS:
        raise ValueError(
            f"its JSON has {len(text)} characters and {parts} parts; at most {HEADER_BYTES} characters and "
            f"{HEADER_PARTS} parts are read"
        )
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def require_described(data: bytes, operation: str) -> None:
    """Raise CacheFileError if the description of a file about to be written is larger than `opened` allows."""
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    parts = sum(header.count(mark) for mark in (b"[", b"{", b":", b","))
    if len(header) > HEADER_BYTES or parts > HEADER_PARTS:
        raise CacheFileError(
            f"{operation}: the description of what is saved takes {len(header)} bytes and {parts} parts, but at most "
            f"{HEADER_BYTES} bytes and {HEADER_PARTS} parts can be read back. Save fewer sequences in a file."
        )


def _open_at_once(name: str, flags: int) -> int:
    """Open a file without waiting, even if it is a pipe that nobody writes to."""
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _described(file: IO[bytes], size: int) -> TensorFile:
    """The description of a file of `size` bytes; ValueError if it is not safetensors, or its claims are impossible."""
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
        if entry.begin != end:  # a gap, or an overlap, which could ask for more memory than the file has bytes
            raise ValueError(f"the bytes of {reprlib.repr(name)} do not begin where those before it end")
        end = entry.end
    if end != size:
        raise ValueError(f"it has {size} bytes where its description says {end}")
    return TensorFile(file, metadata, entries)


def _entry(name: str, said: Any, first: int) -> Entry:
    """The description of one tensor, or ValueError if it is impossible."""
    fields = said if type(said) is dict else {}
    stored, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
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
    # The size of an element is unknown if the dtype is.
    if stored in DTYPES and math.prod(shape) * DTYPES[stored].itemsize != entry.nbytes:
        raise ValueError(f"{reprlib.repr(name)} of {stored} {shape} has {entry.nbytes} bytes, which does not fit")
    return entry
