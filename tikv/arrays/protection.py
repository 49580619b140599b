"""Whether host memory may be written, for arrays that cannot say: torch and DLPack drop NumPy's read-only flag.

A write to a read-only mapping ends the process. So the system is asked about the first and the last page of a
destination, once per page.
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

# Pages that were writable when they were checked. A page that is unmapped, and then mapped as read-only, is not checked
# again: 2 us per page and call would be as much as a small copy takes.
_writable: BoundedCache[int, bool] = BoundedCache(1 << 16)


def is_protected(ptr: int, span: int) -> bool:
    """Whether the first or the last page of host memory is known to be read-only.

    False if this is not known: on systems other than Linux 5.14 and later, and for memory that the system allows to be
    written but its owner does not, such as bytes given to `torch.frombuffer`.
    """
    for page in (ptr // PAGE, (ptr + span - 1) // PAGE):
        if page not in _writable:
            populate = _populate()
            # Device memory is refused as well, hence the second check.
            if populate is not None and populate(page * PAGE, PAGE, _POPULATE_WRITE) and _is_mapped_read_only(page):
                return True
            _writable[page] = True
    return False


@functools.cache
def _populate() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`, if it supports this request."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError, ValueError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
        page = mmap.mmap(-1, PAGE)
        if madvise(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE, _POPULATE_WRITE) == 0:
            return madvise
    return None


def _is_mapped_read_only(page: int) -> bool:
    address = page * PAGE
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as lines:
        for line in lines:
            span, rights = line.split(maxsplit=2)[:2]
            first, end = (int(number, 16) for number in span.split("-"))
            if first <= address < end:
                return "w" not in rights
    return False
