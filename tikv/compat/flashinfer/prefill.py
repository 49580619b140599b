"""FlashInfer's attention of prompts and chunks: over pages, over rows, and of one request."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tikv.arrays import Array, Arrays, describe, view
from tikv.compat.flashinfer.masks import read_tokens
from tikv.compat.flashinfer.planned import Heads, Requests, Run, attend_single
from tikv.compat.flashinfer.pools import check_layout
from tikv.compat.flashinfer.scores import scores_of
from tikv.compat.flashinfer.wrappers import (
    Wrapper,
    check_backend,
    check_hints,
    check_pdl,
    heads_of,
    keys_in_pages,
    keys_in_rows,
    paged_requests,
    planned_dtypes,
    refuse_passed,
    starts_of,
)
from tikv.compat.indices import flag
from tikv.errors import OptionError, PositionError, ShapeError


def single_prefill_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    scale_q: Array | None = None,
    scale_k: Array | None = None,
    scale_v: Array | None = None,
    o_dtype: Any = None,
    custom_mask: Array | None = None,
    packed_custom_mask: Array | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Array, Array] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Arrays:
    """Attention of the newest tokens of one request.

    Args:
        q: (T, Hq, D): query i is the token at ``length - T + i``.
        k, v: (length, H, D) and (length, H, D_v) in NHD; in HND the first two axes are swapped.
        scale_q, scale_k, scale_v, kv_cache_sf: must be None.
        o_dtype: None, or the dtype of q.
        custom_mask: (T, length) bool, flattened or not: the tokens that each query sees.
        packed_custom_mask: the same mask in uint8, with 8 tokens in a byte, the lowest bit first.
        causal: each query sees the tokens up to its own; otherwise it sees all. Ignored with a mask, as in FlashInfer.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode, rope_scale, rope_theta: as in `single_decode_with_kv_cache`.
        use_fp16_qk_reduction, backend: have no effect; scores are float32.
        window_left: how many tokens before its own a query sees; -1 for all. With a mask, both have to show a token.
        sm_scale: None for ``1 / sqrt(D)``.
        logits_soft_cap: None or 0 for no cap; not with "ALIBI".
        return_lse: also return the log-sum-exp of base 2, (T, Hq) float32.
        k_scale, v_scale: as in `batch_decode_with_paged_kv_cache`.

    Returns:
        (T, Hq, D_v); with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError, ShapeError, DTypeError: an argument is not supported, or does not fit the others.

    Exactness, cost: as `tikv.decode_attention`. With a mask each query reads tokens of its own, so queries share no
        reads; a mask on a device is copied to the host. "ROPE_LLAMA" copies keys and values in float32, rotates the
        keys there, and rounds the result once.
    """
    operation = "flashinfer.single_prefill_with_kv_cache"
    check_layout(kv_layout, operation)
    check_backend(operation, backend)
    refuse_passed(operation, scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, kv_cache_sf=kv_cache_sf)
    check_hints(operation, {"use_fp16_qk_reduction": use_fp16_qk_reduction}, {})
    wants_lse = flag(return_lse, "return_lse", operation)
    _check_masks(operation, custom_mask, packed_custom_mask)
    if o_dtype is not None:
        planned_dtypes(operation, view(q, "q", operation).dtype, None, o_dtype, name="o_dtype")
    rope = (rope_scale, rope_theta)
    scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
    keys, scales = keys_in_rows(k, v, kv_layout, operation), {"k_scale": k_scale, "v_scale": v_scale}
    masks = (custom_mask, packed_custom_mask)
    return attend_single(operation, Run(q, keys, scales, return_lse=wants_lse), scores, masks)


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Attention of the new tokens of several requests over their pages, which are read in place.

    Args:
        float_workspace_buffer: an array on the device of the queries; its memory is not used.
        kv_layout: "NHD" or "HND".
        backend: "auto", "fa2" or "fa3", without effect.
        use_cuda_graph: as in `BatchDecodeWithPagedKVCacheWrapper`. Later plans may have fewer queries than the first; a
            captured run then writes any numbers for the queries after the last request.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: with ``use_cuda_graph``,
            arrays into which plans copy their indices.
        max_total_num_rows: with ``use_cuda_graph``, the most queries of a plan; None for those of the first one.
        custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask: must be left out.

    Raises:
        OptionError, DTypeError: an option is not supported.
    """

    def __init__(
        self,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Array | None = None,
        paged_kv_indptr_buf: Array | None = None,
        paged_kv_indices_buf: Array | None = None,
        paged_kv_last_page_len_buf: Array | None = None,
        custom_mask_buf: Array | None = None,
        mask_indptr_buf: Array | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        refused: dict[str, Any] = {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        refused |= {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        refused |= {"variant_owns_mask": variant_owns_mask}
        super().__init__(
            float_workspace_buffer, kv_layout, backend, refused, (use_cuda_graph, buffers), True, max_total_num_rows
        )

    def plan(
        self,
        qo_indptr: Array,
        paged_kv_indptr: Array,
        paged_kv_indices: Array,
        paged_kv_last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Array | None = None,
        token_pos_in_items_ptr: Array | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Array | None = None,
        seq_lens: Array | None = None,
        seq_lens_q: Array | None = None,
        block_tables: Array | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Say which queries and pages each request has, and the options of the runs that follow. Indices are copied.

        Args:
            qo_indptr: (B + 1,): where each request's queries start, on the host or the device.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: as ``indptr``, ``indices`` and ``last_page_len``
                in `BatchDecodeWithPagedKVCacheWrapper.plan`.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size: the shapes of q and of the pages;
                ``head_dim_vo`` is None for values as wide as keys.
            custom_mask: bool: a mask (T, length) for each request, flattened, one request after the other.
            packed_custom_mask: the same in uint8, 8 tokens in a byte; each request starts a new byte.
            causal, window_left, logits_soft_cap, sm_scale: as in `single_prefill_with_kv_cache`.
            pos_encoding_mode, rope_scale, rope_theta: as in `single_decode_with_kv_cache`.
            q_data_type, kv_data_type: the dtypes of q and of the pages, which `run` checks.
            o_data_type: None, or the dtype of q.
            use_fp16_qk_reduction, non_blocking: have no effect.
            fixed_split_size, disable_split_kv: have no effect; for the same bits in any batch, call
                `tikv.init(invariant=True)`.
            max_token_per_sequence, max_sequence_kv, uniform_q_len: have no effect.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: must be left out.
            seq_lens, seq_lens_q, block_tables, use_token_head_sf: must be left out.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the
                others. The plan before stays.
        """
        operation = self._operation("plan")
        refuse_passed(operation, seq_lens=seq_lens, seq_lens_q=seq_lens_q, block_tables=block_tables)
        refuse_passed(operation, use_token_head_sf=use_token_head_sf)
        _refuse_items(operation, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        _check_hints(operation, use_fp16_qk_reduction, non_blocking, disable_split_kv, fixed_split_size,
                     max_token_per_sequence, max_sequence_kv, uniform_q_len)  # fmt: skip
        heads = _heads(operation, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        rope = (rope_scale, rope_theta)
        scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
        dtypes_of = planned_dtypes(operation, q_data_type, kv_data_type, o_data_type, codes=True)
        starts = starts_of(operation, "qo_indptr", qo_indptr)
        arrays = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        requests = paged_requests(operation, starts, arrays, page_size)
        tokens = _tokens(operation, custom_mask, packed_custom_mask, requests, scores.sight.left)
        self._take(operation, requests, heads, scores, dtypes_of, (qo_indptr, *arrays), tokens)

    begin_forward = plan

    def run(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Array | None = None,
        kv_cache_sf: Array | tuple[Array, Array] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Arrays:
        """Attend as planned.

        Args:
            q: (total, Hq, D), the queries of all requests.
            paged_kv_cache: as in `batch_decode_with_paged_kv_cache`, in the wrapper's layout.
            args: must be empty.
            q_scale, k_scale, v_scale, sinks: as in `batch_decode_with_paged_kv_cache`.
            out, lse: arrays for the results, (total, Hq, D_v) and (total, Hq) float32; None for new ones.
            return_lse: also return the log-sum-exp.
            lse_base: "log2" or "ln", the base of the log-sum-exp.
            lse_layout: "NH", or "HN" for a log-sum-exp (Hq, total), of which the caller's array has the form too.
            enable_pdl: has no effect.
            window_left: None, or as in the plan.
            kv_cache_sf: as in `BatchDecodeWithPagedKVCacheWrapper.run`.
            skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress: must be None.

        Returns:
            (total, Hq, D_v); with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

        Raises:
            OptionError, ShapeError, DTypeError: an argument is not supported, or does not fit the plan. Nothing is
                written.

        Exactness: as `tikv.paged_decode_attention`; ``v_scale`` as in `batch_decode_with_paged_kv_cache`.
        Cost: one attention. If requests have different numbers of queries, queries and results are copied once. With a
            mask queries share no reads. "ROPE_LLAMA" copies the pages of all requests in float32.
        """
        operation = self._operation("run")
        refuse_passed(
            operation, use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )  # fmt: skip
        check_pdl(operation, enable_pdl)
        self._check_window(operation, window_left)
        keys = keys_in_pages(paged_kv_cache, self._kv_layout, operation, kv_cache_sf)
        plan = self._planned(operation, q, keys.k, args)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        run = Run(q, keys, scales, sinks, out, lse, flag(return_lse, "return_lse", operation))
        return self._attend(operation, plan, run, lse_base, lse_layout)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Arrays:
        """`run` with these options, which replace those of the plan, also in later runs; FlashInfer has deprecated it.

        Args:
            q, paged_kv_cache, k_scale, v_scale, return_lse: as in `run`.
            causal, pos_encoding_mode: as in `plan`.
            use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta: as there.
            window_left: as there; with a mask, the window stays that of the plan.

        Raises:
            OptionError, ShapeError, DTypeError: as in `run`; with ``use_cuda_graph=True``, other options than those of
                the plan.
        """
        operation = self._operation("forward")
        flag(use_fp16_qk_reduction, "use_fp16_qk_reduction", operation)
        rope = (rope_scale, rope_theta)
        scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
        self._replan(operation, scores)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Attention of the new tokens of several requests over rows of keys, those of a request after those of another.

    Args:
        float_workspace_buffer: an array on the device of the queries; its memory is not used.
        kv_layout: "NHD" or "HND".
        backend: "auto", "fa2" or "fa3", without effect.
        use_cuda_graph: as in `BatchPrefillWithPagedKVCacheWrapper`.
        qo_indptr_buf, kv_indptr_buf: with ``use_cuda_graph``, arrays into which plans copy their indices.
        custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask: must be left out.

    Raises:
        OptionError, DTypeError: an option is not supported.
    """

    def __init__(
        self,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Array | None = None,
        kv_indptr_buf: Array | None = None,
        custom_mask_buf: Array | None = None,
        mask_indptr_buf: Array | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "kv_indptr_buf": kv_indptr_buf,
        }
        refused: dict[str, Any] = {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        refused |= {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        refused |= {"variant_owns_mask": variant_owns_mask}
        super().__init__(float_workspace_buffer, kv_layout, backend, refused, (use_cuda_graph, buffers), tiled=True)

    def plan(
        self,
        qo_indptr: Array,
        kv_indptr: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Array | None = None,
        packed_custom_mask: Array | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Array | None = None,
        token_pos_in_items_ptr: Array | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Array | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Array | None = None,
        seq_lens_q: Array | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Array | None = None,
        o_indptr: Array | None = None,
        qo_indptr_cpu: Array | None = None,
        kv_indptr_cpu: Array | None = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Say which queries and keys each request has, and the options of the runs that follow. Indices are copied.

        Args:
            qo_indptr, kv_indptr: (B + 1,): where each request's queries and keys start, on the host or the device.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo: the shapes of q, k and v.
            custom_mask, packed_custom_mask: as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
            causal, window_left, logits_soft_cap, sm_scale: as in `single_prefill_with_kv_cache`.
            pos_encoding_mode, rope_scale, rope_theta: as in `single_decode_with_kv_cache`.
            q_data_type, kv_data_type: the dtypes of q and of the keys, which `run` checks.
            o_data_type: None, or the dtype of q.
            use_fp16_qk_reduction, non_blocking: have no effect.
            fixed_split_size, disable_split_kv: have no effect; for the same bits in any batch, call
                `tikv.init(invariant=True)`.
            max_token_per_sequence, max_sequence_kv, uniform_q_len: have no effect.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: must be left out.
            seq_lens, seq_lens_q, v_indptr, o_indptr, use_token_head_sf: must be left out.
            qo_indptr_cpu, kv_indptr_cpu: the same numbers on the host, which are read in place of ``qo_indptr`` and
                ``kv_indptr`` without waiting for the device; None to read those.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the
                others. The plan before stays.
        """
        operation = self._operation("plan")
        refuse_passed(operation, seq_lens=seq_lens, seq_lens_q=seq_lens_q, v_indptr=v_indptr, o_indptr=o_indptr)
        refuse_passed(operation, use_token_head_sf=use_token_head_sf)
        _refuse_items(operation, prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        _check_hints(operation, use_fp16_qk_reduction, non_blocking, disable_split_kv, fixed_split_size,
                     max_token_per_sequence, max_sequence_kv, uniform_q_len)  # fmt: skip
        heads = _heads(operation, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
        rope = (rope_scale, rope_theta)
        scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
        dtypes_of = planned_dtypes(operation, q_data_type, kv_data_type, o_data_type)
        starts = _starts_on_host(operation, "qo_indptr", qo_indptr, qo_indptr_cpu)
        of_keys = _starts_on_host(operation, "kv_indptr", kv_indptr, kv_indptr_cpu)
        if of_keys.size != starts.size:
            raise ShapeError(
                f"{operation}: kv_indptr has {of_keys.size} entries and qo_indptr {starts.size}; both need one more "
                "than there are requests."
            )
        requests = Requests(starts, np.diff(of_keys), of_keys[:-1])
        tokens = _tokens(operation, custom_mask, packed_custom_mask, requests, scores.sight.left)
        self._take(operation, requests, heads, scores, dtypes_of, (qo_indptr, kv_indptr), tokens)

    begin_forward = plan

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Arrays:
        """Attend as planned.

        Args:
            q: (total, Hq, D), the queries of all requests.
            k, v: (rows, H, D) and (rows, H, D_v) in NHD; in HND the first two axes are swapped.
            args: must be empty.
            q_scale, k_scale, v_scale: as in `batch_decode_with_paged_kv_cache`.
            o_scale, kv_cache_sf: must be None.
            out, lse: arrays for the results, (total, Hq, D_v) and (total, Hq) float32; None for new ones.
            return_lse: also return the log-sum-exp.
            lse_base: "log2" or "ln", the base of the log-sum-exp.
            lse_layout: "NH", or "HN" for a log-sum-exp (Hq, total), of which the caller's array has the form too.
            enable_pdl: has no effect.

        Returns:
            (total, Hq, D_v); with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the plan.
                Nothing is written.

        Exactness, cost: as in `BatchPrefillWithPagedKVCacheWrapper.run`.
        """
        operation = self._operation("run")
        refuse_passed(operation, o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        check_pdl(operation, enable_pdl)
        keys = keys_in_rows(k, v, self._kv_layout, operation)
        plan = self._planned(operation, q, keys.k, args)
        assert plan.requests.first is not None
        end = int((plan.requests.first + plan.requests.lengths).max(initial=0))
        if end > keys.k.shape[0]:
            raise PositionError(f"{operation}: kv_indptr of the plan ends at {end}, and k has {keys.k.shape[0]} rows.")
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        run = Run(q, keys, scales, None, out, lse, flag(return_lse, "return_lse", operation))
        return self._attend(operation, plan, run, lse_base, lse_layout)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Arrays:
        """`run` with these options, which replace those of the plan, also in later runs; FlashInfer has deprecated it.

        Args:
            q, k, v, return_lse: as in `run`.
            causal, pos_encoding_mode: as in `plan`.
            use_fp16_qk_reduction, logits_soft_cap, sm_scale, rope_scale, rope_theta: as there.
            window_left: as there; with a mask, the window stays that of the plan.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: as in `run`; with ``use_cuda_graph=True``, other options
                than those of the plan.
        """
        operation = self._operation("forward")
        flag(use_fp16_qk_reduction, "use_fp16_qk_reduction", operation)
        rope = (rope_scale, rope_theta)
        scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
        self._replan(operation, scores)
        return self.run(q, k, v, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def _check_masks(operation: str, custom_mask: Any, packed_custom_mask: Any) -> None:
    """Refuse two masks."""
    if custom_mask is not None and packed_custom_mask is not None:
        raise OptionError(f"{operation}: custom_mask and packed_custom_mask are both given. Pass one of them.")


def _tokens(operation: str, custom_mask: Any, packed_custom_mask: Any, requests: Requests, before: int) -> Any:
    """The tokens that each query reads, or None without a mask."""
    _check_masks(operation, custom_mask, packed_custom_mask)
    if custom_mask is None and packed_custom_mask is None:
        return None
    return read_tokens(operation, (custom_mask, packed_custom_mask), requests.counts, requests.lengths, before)


def _starts_on_host(operation: str, name: str, starts: Array, copy: Array | None) -> Any:
    """`starts_of`, read from the caller's copy on the host if there is one.

    Raises:
        ShapeError: the copy has another number of entries.
    """
    if copy is None:
        return starts_of(operation, name, starts)
    numbers = starts_of(operation, f"{name}_cpu", copy)
    if view(starts, name, operation).shape != numbers.shape:
        raise ShapeError(
            f"{operation}: {name} is {describe(view(starts, name, operation))} and {name}_cpu {numbers.shape}; both "
            "need one shape."
        )
    return numbers


def _heads(operation: str, queries: Array, keys: Any, width: Any, width_v: Any) -> Heads:
    """The sizes that a plan names."""
    width_v = width if width_v is None else width_v
    return Heads(*heads_of(operation, num_qo_heads=queries, num_kv_heads=keys, head_dim_qk=width, head_dim_vo=width_v))


def _refuse_items(operation: str, prefix: Any, positions: Array, count: Any, longest: Any) -> None:
    """Refuse the arguments of several items that follow one prompt."""
    refuse_passed(operation, prefix_len_ptr=prefix, token_pos_in_items_ptr=positions, max_item_len_ptr=longest)
    if type(count) is not int or count:
        refuse_passed(operation, token_pos_in_items_len=count)


def _check_hints(operation: str, fp16: Any, non_blocking: Any, whole: Any, *integers: Any) -> None:
    """Check options of a plan that change nothing here."""
    flags = {"use_fp16_qk_reduction": fp16, "non_blocking": non_blocking, "disable_split_kv": whole}
    names = ("fixed_split_size", "max_token_per_sequence", "max_sequence_kv", "uniform_q_len")
    check_hints(operation, flags, dict(zip(names, integers, strict=True)))
