"""Views any array as pointer + shape + strides, without a copy, and gives out tikv's own memory in the same way.

An `ArrayView` says where the elements of an array lie; on Vulkan and Metal, where memory has no pointer, it holds
Taichi's handle, or a tensor's storage on MPS. `view` and `view_all` make views of the arrays that a caller gives.
"""

from tikv.arrays.annotations import Array as Array
from tikv.arrays.annotations import Arrays as Arrays
from tikv.arrays.array_view import ALIGNMENT as ALIGNMENT
from tikv.arrays.array_view import ArrayView as ArrayView
from tikv.arrays.array_view import Host as Host
from tikv.arrays.array_view import Views as Views
from tikv.arrays.array_view import contiguous_strides as contiguous_strides
from tikv.arrays.array_view import describe as describe
from tikv.arrays.array_view import host_bytes as host_bytes
from tikv.arrays.array_view import is_contiguous as is_contiguous
from tikv.arrays.cache_array import CacheArray as CacheArray
from tikv.arrays.dlpack import TRACED as TRACED
from tikv.arrays.dlpack import is_traced as is_traced
from tikv.arrays.gpus import runtime_of as runtime_of
from tikv.arrays.gradients import is_followed as is_followed
from tikv.arrays.gradients import refuse_backward as refuse_backward
from tikv.arrays.host_memory import memory_of_host as memory_of_host
from tikv.arrays.kinds import handed_over as handed_over
from tikv.arrays.kinds import new_like as new_like
from tikv.arrays.last_call import last_call_test as last_call_test
from tikv.arrays.last_call import torch_guard as torch_guard
from tikv.arrays.last_call import view_all as view_all
from tikv.arrays.memory import CudaBytes as CudaBytes
from tikv.arrays.memory import Memory as Memory
from tikv.arrays.memory import StagedNdarray as StagedNdarray
from tikv.arrays.memory import as_numpy as as_numpy
from tikv.arrays.memory import lasting_memory as lasting_memory
from tikv.arrays.memory import new_array as new_array
from tikv.arrays.memory import read_host as read_host
from tikv.arrays.memory import to_device as to_device
from tikv.arrays.memory import write_host as write_host
from tikv.arrays.protection import is_protected as is_protected
from tikv.arrays.readers import view as view
from tikv.arrays.readers import view_bits as view_bits
from tikv.arrays.readers import view_of_new as view_of_new
from tikv.arrays.readers import view_without_owner as view_without_owner
