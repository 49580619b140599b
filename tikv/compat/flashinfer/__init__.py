"""FlashInfer's functions of pages and of merging, its attention of one request, and its wrappers with plan and run.

As in FlashInfer, page tables and last-page lengths already count the tokens that are being appended, log-sum-exps are
of base 2, and pages of one token may omit the axis of length 1.
"""

from tikv.compat.flashinfer import cascade as cascade
from tikv.compat.flashinfer import decode as decode
from tikv.compat.flashinfer import mla as mla
from tikv.compat.flashinfer import page as page
from tikv.compat.flashinfer import prefill as prefill
from tikv.compat.flashinfer.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
)
from tikv.compat.flashinfer.cascade import (
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
)
from tikv.compat.flashinfer.cascade import MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper
from tikv.compat.flashinfer.cascade import merge_state as merge_state
from tikv.compat.flashinfer.cascade import merge_state_in_place as merge_state_in_place
from tikv.compat.flashinfer.cascade import merge_states as merge_states
from tikv.compat.flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper
from tikv.compat.flashinfer.decode import (
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from tikv.compat.flashinfer.decode import batch_decode_with_paged_kv_cache as batch_decode_with_paged_kv_cache
from tikv.compat.flashinfer.decode import fast_decode_plan as fast_decode_plan
from tikv.compat.flashinfer.decode import single_decode_with_kv_cache as single_decode_with_kv_cache
from tikv.compat.flashinfer.page import append_paged_kv_cache as append_paged_kv_cache
from tikv.compat.flashinfer.page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
from tikv.compat.flashinfer.page import get_batch_indices_positions as get_batch_indices_positions
from tikv.compat.flashinfer.page import get_seq_lens as get_seq_lens
from tikv.compat.flashinfer.page import nvfp4_quantize_append_paged_kv_cache as nvfp4_quantize_append_paged_kv_cache
from tikv.compat.flashinfer.page import (
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from tikv.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper
from tikv.compat.flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper
from tikv.compat.flashinfer.prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
from tikv.compat.flashinfer.prefill import (
    single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
)
