"""Attention that reads caches in place: contiguous caches, rings with sinks, page pools.

`contiguous` and `paged` say how arrays lie, `call` makes a checked call of them: an `AttentionPlan` (`plan`) checks the
queries against a `CacheLayout` (`options`) and splits the keys (`splits`); `launches` binds the kernels. `merge` merges
earlier results.
"""

from tikv.ops.attention.contiguous import decode_attention as decode_attention
from tikv.ops.attention.merge import merge_states as merge_states
from tikv.ops.attention.paged import paged_decode_attention as paged_decode_attention
