"""See any array as pointer + shape + strides, without a copy, and hand our own memory out the same way.

An `ArrayView` says where the elements of an array lie; on Vulkan and Metal, where memory has no pointer, it holds
Taichi's handle. `view` and `view_all` make one of whatever a caller brings.
"""

from tikv.arrays.array_view import (
    ALIGNMENT,
    ArrayView,
    Views,
    contiguous_strides,
    describe,
    host_bytes,
    is_contiguous,
)
from tikv.arrays.cache_array import CacheArray, new_like
from tikv.arrays.last_call import last_test, view_all
from tikv.arrays.memory import (
    CudaBytes,
    Memory,
    StagedNdarray,
    as_numpy,
    new_array,
    read_host,
    to_device,
    write_host,
)
from tikv.arrays.readers import view

__all__ = [
    "ALIGNMENT",
    "ArrayView",
    "CacheArray",
    "CudaBytes",
    "Memory",
    "StagedNdarray",
    "Views",
    "as_numpy",
    "contiguous_strides",
    "describe",
    "host_bytes",
    "is_contiguous",
    "last_test",
    "new_array",
    "new_like",
    "read_host",
    "to_device",
    "view",
    "view_all",
    "write_host",
]
