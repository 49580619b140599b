"""Attention over what a cache holds, where it lies: contiguous caches, rings behind sinks, page pools.

`contiguous` and `paged` describe their arrays as a `CacheLayout` (`options`); an `AttentionPlan` (`plan`) checks the
queries against it and shares out the keys (`splits`); `launches` binds the kernels. `merge` joins results of before.
"""

from tikv.ops.attention.contiguous import decode_attention as decode_attention
from tikv.ops.attention.merge import merge_states as merge_states
from tikv.ops.attention.paged import paged_decode_attention as paged_decode_attention
