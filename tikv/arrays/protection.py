"""Whether memory of the host may be written, where an array cannot say: torch and DLPack lose what NumPy knows.

A write to a read-only mapping ends the process. The system is asked about the first and the last page of a destination,
once per page.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

from tikv.runtime.cache import BoundedCache

PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: make pages ready to be written, and keep what is in them

# Pages that could be written when they were asked about. One that is unmapped, and mapped anew as read-only, is not
# asked about again: 2 us a page and call would be as much as a small copy takes.
_writable: BoundedCache[int, bool] = BoundedCache(1 << 16)


def is_protected(ptr: int, span: int) -> bool:
    """Whether the first or the last page of host memory is known to be read-only.

    False where it is not known: on other systems than Linux 5.14 and later, and for memory that the system lets be
    written but its owner does not, such as bytes that `torch.frombuffer` was given.
    """
    for page in (ptr // PAGE, (ptr + span - 1) // PAGE):
        if page not in _writable:
            populate = _populate()
            # Memory of devices is refused as well, hence the second question.
            if populate is not None and populate(page * PAGE, PAGE, _POPULATE_WRITE) and _is_mapped_read_only(page):
                return True
            _writable[page] = True
    return False


@functools.cache
def _populate() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`, if it knows the question."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        found = ctypes.CDLL(None).madvise
        found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
        own = mmap.mmap(-1, PAGE)
        if found(ctypes.addressof(ctypes.c_char.from_buffer(own)), PAGE, _POPULATE_WRITE) == 0:
            return found
    return None


def _is_mapped_read_only(page: int) -> bool:
    address = page * PAGE
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as lines:
        for line in lines:
            places, rights = line.split(maxsplit=2)[:2]
            first, end = (int(place, 16) for place in places.split("-"))
            if first <= address < end:
                return "w" not in rights
    return False
