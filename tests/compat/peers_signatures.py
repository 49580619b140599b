"""The arguments of the peers' functions, in their order and with their defaults.

They are those of FlashInfer 0.7.4, flash-attention 2.8.4 and flash-attention 3 of August 2026. FlashInfer takes those
of the decode wrapper's `plan` after ``page_size`` by keyword, and in this order without.
"""

SIGNATURES = {
    "flashinfer.cascade.merge_state": ("v_a, s_a, v_b, s_b"),
    "flashinfer.cascade.merge_state_in_place": ("v, s, v_other, s_other, mask=None"),
    "flashinfer.cascade.merge_states": ("v, s"),
    "flashinfer.cascade.MultiLevelCascadeAttentionWrapper.__init__": (
        'self, num_levels, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, '
        "qo_indptr_buf_arr=None, paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, "
        "paged_kv_last_page_len_buf_arr=None"
    ),
    "flashinfer.cascade.MultiLevelCascadeAttentionWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffers"
    ),
    "flashinfer.cascade.MultiLevelCascadeAttentionWrapper.plan": (
        "self, qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, "
        'num_qo_heads, num_kv_heads, head_dim, page_size, causal=False, pos_encoding_mode="NONE", '
        "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, "
        'rope_theta=None, q_data_type="float16", kv_data_type=None'
    ),
    "flashinfer.cascade.MultiLevelCascadeAttentionWrapper.run": ("self, q, paged_kv_cache"),
    "flashinfer.cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.__init__": (
        'self, float_workspace_buffer, kv_layout="NHD"'
    ),
    "flashinfer.cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "flashinfer.cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "self, unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, "
        'head_dim, page_size, data_type="float16"'
    ),
    "flashinfer.cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": (
        "self, q, k_shared, v_shared, unique_kv_cache"
    ),
    "flashinfer.cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.__init__": (
        'self, float_workspace_buffer, kv_layout="NHD"'
    ),
    "flashinfer.cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "flashinfer.cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim, page_size"
    ),
    "flashinfer.cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": (
        "self, q, k_shared, v_shared, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, "
        "sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "flashinfer.page.get_batch_indices_positions": ("append_indptr, seq_lens, nnz, batch_indices=None, positions=None"),
    "flashinfer.page.get_seq_lens": ("kv_indptr, kv_last_page_len, page_size"),
    "flashinfer.page.append_paged_kv_cache": (
        "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, "
        'kv_last_page_len, kv_layout="NHD"'
    ),
    "flashinfer.page.append_paged_mla_kv_cache": (
        "append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, "
        "kv_last_page_len"
    ),
    "flashinfer.page.nvfp4_quantize_append_paged_kv_cache": (
        "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_cache_sf, kv_indices, "
        'kv_indptr, kv_last_page_len, k_scale, v_scale, kv_layout="NHD"'
    ),
    "flashinfer.page.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": (
        "append_key, append_value, slot_mapping, paged_kv_cache, kv_cache_sf, k_scale, v_scale, "
        'kv_layout="NHD", nvfp4_4over6=None'
    ),
    "flashinfer.decode.single_decode_with_kv_cache": (
        'q, k, v, kv_layout="NHD", pos_encoding_mode="NONE", use_tensor_cores=False, q_scale=None, '
        "k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, return_lse=False"
    ),
    "flashinfer.decode.fast_decode_plan": (
        "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
        'pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, '
        "data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, "
        "fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, global_override_indptr_cpu=None"
    ),
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.__init__": (
        'self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False, '
        "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
        'backend="auto", jit_args=None, jit_kwargs=None'
    ),
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.plan": (
        "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
        'pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16", '
        "kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, "
        "disable_split_kv=False, q_len_per_req=1, *, window_right=0, is_causal=None, use_token_head_sf=False"
    ),
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run": (
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, "
        "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None"
    ),
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.forward": (
        'self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, '
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.forward_return_lse": (
        'self, q, paged_kv_cache, pos_encoding_mode="NONE", q_scale=None, k_scale=None, v_scale=None, '
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "flashinfer.decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": (
        'self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout="NHD", '
        "use_tensor_cores=False"
    ),
    "flashinfer.prefill.single_prefill_with_kv_cache": (
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, "
        'packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE", '
        "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, "
        'rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None'
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.__init__": (
        'self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, '
        "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, "
        'custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None, '
        "variant_owns_mask=False, max_total_num_rows=None"
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.plan": (
        "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, "
        'causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, '
        'logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, '
        "o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, "
        "token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, "
        "uniform_q_len=None, use_token_head_sf=False"
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run": (
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        'return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, window_left=None, sinks=None, '
        "kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, "
        "uses_spcompress=None"
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.forward": (
        'self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, '
        "k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None"
    ),
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.forward_return_lse": (
        'self, q, paged_kv_cache, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, '
        "k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None"
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.__init__": (
        'self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, '
        'kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, '
        "jit_kwargs=None, variant_owns_mask=False"
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer": (
        "self, float_workspace_buffer, int_workspace_buffer"
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, "
        'custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", '
        "use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        'rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None, non_blocking=True, '
        "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, "
        "fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None, qo_indptr_cpu=None, "
        "kv_indptr_cpu=None, uniform_q_len=None, use_token_head_sf=False"
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.run": (
        "self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, "
        'return_lse=False, lse_base="log2", lse_layout="NH", enable_pdl=None, kv_cache_sf=None'
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.forward": (
        'self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1, '
        "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper.forward_return_lse": (
        'self, q, k, v, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False, window_left=-1, '
        "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.__init__": (
        "self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, "
        'kv_len_arr=None, backend="auto"'
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.plan": (
        "self, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, "
        "head_dim_ckv=None, head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, "
        "kv_data_type=None, use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, "
        'seq_lens=None, max_q_len=None, query_layout=None, kv_cache_layout=None, lse_mode="none", '
        'output_dtype=None, output_scale="none", scale_mode="default", skip_softmax=False, enable_pdl=None, '
        "use_sinks=False"
    ),
    "flashinfer.mla.BatchMLAPagedAttentionWrapper.run": (
        "self, q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False, "
        "profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, "
        "query=None, kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None"
    ),
    "flash_attn.flash_attn_qkvpacked_func": (
        "qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False"
    ),
    "flash_attn.flash_attn_kvpacked_func": (
        "q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False"
    ),
    "flash_attn.flash_attn_func": (
        "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False"
    ),
    "flash_attn.flash_attn_varlen_qkvpacked_func": (
        "qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False"
    ),
    "flash_attn.flash_attn_varlen_kvpacked_func": (
        "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False"
    ),
    "flash_attn.flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False, block_table=None"
    ),
    "flash_attn.flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
    "flash_attn_interface.flash_attn_qkvpacked_func": (
        "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
        "sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_interface.flash_attn_func": (
        "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_interface.flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
        "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_interface.flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False"
    ),
}
