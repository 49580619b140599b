"""FlashInfer's attention of the newest tokens: over pages, and of one request."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, Arrays, ArrayView, describe, handed_over, new_like, refuse_backward, view
from tikv.compat.flashinfer.masks import mask_of_new_tokens
from tikv.compat.flashinfer.planned import Heads, Run, attend_single
from tikv.compat.flashinfer.pools import check_layout, page_lists, pools_of, slots_of_page
from tikv.compat.flashinfer.scores import multiplied, scales_of, scores_of
from tikv.compat.flashinfer.wrappers import (
    Wrapper,
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
from tikv.compat.indices import flag, for_operation, refuse_option
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.options import real
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest


def batch_decode_with_paged_kv_cache(
    q: Array,
    paged_kv_cache: Array | tuple[Array, Array],
    paged_kv_indptr: Array,
    paged_kv_indices: Array,
    paged_kv_last_page_len: Array,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    custom_mask: Array | None = None,
    packed_custom_mask: Array | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
    return_lse: bool = False,
) -> Arrays:
    """Attention of the newest tokens of several requests over their pages, which are read in place.

    Args:
        q: (B, Hq, D), or (B, T, Hq, D) for T new tokens per request; the pages already hold their keys and values.
        paged_kv_cache: (N, 2, bs, H, D) for NHD, (N, 2, H, bs, D) for HND; or a tuple (k, v) of
            arrays without the axis of 2. Pages of one token may also omit the axis of 1.
        paged_kv_indptr: (B + 1,): where each request's pages start.
        paged_kv_indices: the pages of all requests, one after the other.
        paged_kv_last_page_len: (B,): filled slots in each last page.
        kv_layout: "NHD" or "HND".
        causal: each query sees the tokens up to its own; otherwise it sees all. Ignored with a mask.
        custom_mask: bool: the tokens that each query sees, a (T, length) mask per request, flattened, one request after
            the other. It must show every token before the T new ones.
        packed_custom_mask: the same mask in uint8, with 8 tokens in a byte, the lowest bit first; each request starts a
            new byte.
        window_left: how many tokens before its own a query sees; -1 for all. Not allowed with a mask.
        logits_soft_cap: None or 0 for no cap.
        sm_scale: None for ``1 / sqrt(D)``.
        q_scale, k_scale, v_scale: numbers: ``q_scale`` and ``k_scale`` multiply the scores, and ``v_scale`` the result.
            For pools in 8-bit floats, ``k_scale`` and ``v_scale`` may also be (H,) arrays; int8 pools need theirs.
        sinks: (Hq,) float32: one more logit for each query head, which counts in the denominator only.
        out: an array for the result; None for a new one.
        return_lse: also return the log-sum-exp of base 2, (B, Hq) or (B, T, Hq) float32.

    Returns:
        An array shaped as q, with V's width; with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: another layout, a window with a mask, two masks, or a mask that hides a token before the new ones.
        ShapeError: the mask has another size.
        ShapeError, DTypeError, PositionError: as `tikv.paged_decode_attention`.

    Exactness: as `tikv.paged_decode_attention`. Unless the pools are in 8 bits, ``v_scale`` multiplies the result after
        it is rounded, as in FlashInfer, which rounds once more. Cost: the same, with index arithmetic before it. If
        ``paged_kv_indptr`` and ``paged_kv_last_page_len`` lie on a device, the call waits for them. It waits for a mask
        too, to check the older tokens.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> q, starts, pages, last = np.ones((1, 1, 1), np.float32), np.array([0, 2]), np.array([2, 0]), np.array([1])
        >>> flashinfer.batch_decode_with_paged_kv_cache(q, (k, v), starts, pages, last).tolist()
        [[[3.0]]]
    """
    operation = "flashinfer.batch_decode_with_paged_kv_cache"
    check_layout(kv_layout, operation)
    window_left = checks.integer(window_left, "window_left", operation, low=-(2**31))
    masked = custom_mask is not None or packed_custom_mask is not None
    if custom_mask is not None and packed_custom_mask is not None:
        raise OptionError(f"{operation}: custom_mask and packed_custom_mask are both given. Pass one of them.")
    if masked and window_left >= 0:
        refuse_option(operation, window_left=(window_left, "-1 with a mask, since the mask says what queries see"))
    k_pool, v_pool = pools_of(paged_kv_cache, kv_layout, operation)
    asked = view(q, "q", operation)
    checks.rank(asked, (3, 4), "q", "(B, Hq, D) or (B, T, Hq, D)", operation)
    block_size, queries = slots_of_page(k_pool, kv_layout), asked.shape[1] if asked.ndim == 4 else 1
    names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    arrays = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
    lists = page_lists(operation, names, arrays, asked.shape[0], block_size, of_lengths=False)
    lens, table = lists.lengths, lists.table(np.arange(asked.shape[0]))
    terms: dict[str, Any] = {"sink_logits": sinks}
    if masked:
        terms["mask"] = mask_of_new_tokens(operation, custom_mask, packed_custom_mask, lens, queries)
    by_name = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    scale = real(sm_scale, "sm_scale", operation)
    scales = scales_of(operation, (k_pool, v_pool), asked.shape[-1], scale, by_name)
    pools = Caches(
        PagedLayout(kv_layout), k_pool, v_pool, lens.astype(np.int32), for_operation(table, q), **scales.of_codes
    )
    request = AttendRequest(
        scale=scales.scale,
        softcap=real(logits_soft_cap, "logits_soft_cap", operation) or None,
        lse_base2=True,
        short=not masked,
        **terms,
        **_seen(causal or masked, window_left, queries, int(table.shape[1]) * block_size),
    )
    call = attention_call(operation, _heads_first(asked), pools, request)
    if out is None:
        out = new_like(q, (*asked.shape[:-1], call.plan.cache.width_v), asked.dtype, call.plan.live)
    to = _heads_first(view(out, "out", operation))
    if not return_lse:
        call.attend(None, Results(to))
        return refuse_backward(multiplied(handed_over(out), scales.of_result), q, k_pool, v_pool)
    lse = new_like(q, asked.shape[:-1], dtypes.float32, call.plan.live)
    call.attend(None, Results(to, True, _heads_first(view(lse, "lse", operation), asked.ndim - 1)))
    return refuse_backward((multiplied(handed_over(out), scales.of_result), handed_over(lse)), q, k_pool, v_pool)


def _seen(causal: bool, window_left: int, queries: int, capacity: int) -> dict[str, Any]:
    """Which keys a query sees, as options of attention: all, those up to its own, or a window before its own."""
    if causal or queries == 1:
        return {"window": None if window_left < 0 else window_left + 1}
    if window_left < 0:
        return {"causal": False}
    newer = capacity + queries  # if there are more queries than tokens, the first query comes before all tokens
    return {"newer": newer, "window": window_left + 1 + newer}


def _heads_first(a: ArrayView, axes: int | None = None) -> ArrayView:
    """(B, T, Hq, ...) as (B, Hq, T, ...), and the other way round; without T as it is."""
    if a.ndim < 3 or (a.ndim if axes is None else axes + 1) != 4:
        return a
    return a.transposed(0, 2, 1, *range(3, a.ndim))


def single_decode_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Arrays:
    """Attention of one query, that of the newest token of one request.

    Args:
        q: (Hq, D).
        k, v: (length, H, D) in NHD, (H, length, D) in HND.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; "ALIBI", with slopes by the number of heads; or "ROPE_LLAMA": q and the keys are
            stored unrotated and are rotated in each call.
        use_tensor_cores: has no effect.
        q_scale, k_scale, v_scale: as in `batch_decode_with_paged_kv_cache`.
        window_left, logits_soft_cap, sm_scale: likewise; no soft cap with "ALIBI".
        rope_scale, rope_theta: None for 1 and 10,000: positions are divided by the first.
        return_lse: also return the log-sum-exp of base 2, (Hq,) float32.

    Returns:
        (Hq, D); with ``return_lse``, a pair. Without keys they are 0 and -inf.

    Raises:
        OptionError, ShapeError, DTypeError: an argument is not supported, or does not fit the others.

    Exactness, cost: as `tikv.decode_attention`. "ROPE_LLAMA" copies keys and values in float32, rotates the keys there,
        and rounds the result once.
    """
    operation = "flashinfer.single_decode_with_kv_cache"
    check_layout(kv_layout, operation)
    flag(use_tensor_cores, "use_tensor_cores", operation)
    wants_lse = flag(return_lse, "return_lse", operation)
    asked = view(q, "q", operation)
    checks.rank(asked, (2,), "q", "(Hq, D)", operation)
    scores = scores_of(
        operation, pos_encoding_mode, window_left, False, logits_soft_cap, sm_scale, (rope_scale, rope_theta)
    )
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    keys = keys_in_rows(k, v, kv_layout, operation)
    if keys.k.shape != keys.v.shape:
        raise ShapeError(f"{operation}: k is {describe(keys.k)} and v {describe(keys.v)}; both need one shape.")
    run = Run(q[None], keys, scales, return_lse=wants_lse)
    results = attend_single(operation, run, scores)
    return (results[0][0], results[1][0]) if wants_lse else results[0]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Attention of the newest tokens of several requests over their pages, which are read in place.

    Args:
        float_workspace_buffer: an array on the device of the queries; its memory is not used.
        kv_layout: "NHD" or "HND".
        use_tensor_cores: has no effect.
        backend: "auto", "fa2" or "fa3", without effect.
        use_cuda_graph: plans keep their arrays in place, so that a captured run follows a later plan. The number of
            requests and all options stay as in the first plan.
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer: with ``use_cuda_graph``, arrays
            into which plans copy their indices: (B + 1,), the most pages of all requests together, and (B,).
        jit_args, jit_kwargs: must be None.

    Raises:
        OptionError, DTypeError: an option is not supported.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(np.empty(0, np.uint8))
        >>> starts, pages, last = np.array([0, 2]), np.array([2, 0]), np.array([1])
        >>> wrapper.plan(starts, pages, last, 1, 1, 1, 2, q_data_type="float32")
        >>> wrapper.run(np.ones((1, 1, 1), np.float32), (k, v)).tolist()
        [[[3.0]]]
    """

    def __init__(
        self,
        float_workspace_buffer: Array,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Array | None = None,
        paged_kv_indices_buffer: Array | None = None,
        paged_kv_last_page_len_buffer: Array | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        graphs, refused = (use_cuda_graph, buffers), {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        super().__init__(float_workspace_buffer, kv_layout, backend, refused, graphs, tiled=False)
        self._use_tensor_cores = flag(use_tensor_cores, "use_tensor_cores", self._operation("__init__"))

    @property
    def use_tensor_cores(self) -> bool:
        """As passed to the constructor."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Array,
        indices: Array,
        last_page_len: Array,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Array | None = None,
        seq_lens: Array | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Say which pages each request has, and the options of the runs that follow. The indices are copied.

        Args:
            indptr: (B + 1,): where each request's pages start, on the host or the device.
            indices: the pages of all requests, one after the other; they are not read on the host.
            last_page_len: (B,): filled slots in each last page.
            num_qo_heads, num_kv_heads, head_dim, page_size: the shapes of q and of the pages.
            pos_encoding_mode, rope_scale, rope_theta: as in `single_decode_with_kv_cache`.
            window_left, logits_soft_cap, sm_scale: likewise.
            q_data_type, kv_data_type, data_type: the dtypes of q and of the pages, which `run` checks; the last one
                stands for those that are None.
            o_data_type: None, or the dtype of q.
            non_blocking: has no effect.
            fixed_split_size, disable_split_kv: have no effect; for the same bits in any batch, call
                `tikv.init(invariant=True)`.
            block_tables, seq_lens: must be None.
            q_len_per_req: the queries of each request; if there are several, each sees the tokens up to its own.
            window_right: must be 0.
            is_causal: whether each query sees the tokens up to its own, or all; None for what ``q_len_per_req`` says.
            use_token_head_sf: must be False.

        Raises:
            OptionError, ShapeError, DTypeError, PositionError: an argument is not supported, or does not fit the
                others. The plan before stays.
        """
        operation = self._operation("plan")
        refuse_passed(operation, block_tables=block_tables, seq_lens=seq_lens, use_token_head_sf=use_token_head_sf)
        if type(window_right) is not int or window_right:
            refuse_option(operation, window_right=(window_right, "0"))
        flags = {"non_blocking": non_blocking, "disable_split_kv": disable_split_kv}
        check_hints(operation, flags, {"fixed_split_size": fixed_split_size})
        each = checks.integer(q_len_per_req, "q_len_per_req", operation, low=1)
        queries, keys, width = heads_of(
            operation, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        heads = Heads(queries, keys, width, width)
        rope = (rope_scale, rope_theta)
        causal = each > 1 if is_causal is None else flag(is_causal, "is_causal", operation)
        scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
        dtypes_of = planned_dtypes(operation, q_data_type, kv_data_type, o_data_type, data_type, codes=True)
        batch = starts_of(operation, "indptr", indptr).size - 1
        arrays, names = (indptr, indices, last_page_len), ("indptr", "indices", "last_page_len")
        requests = paged_requests(operation, np.arange(batch + 1) * each, arrays, page_size, names)
        self._take(operation, requests, heads, scores, dtypes_of, arrays)

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Array | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Array | tuple[Array, Array] | None = None,
    ) -> Arrays:
        """Attend as planned.

        Args:
            q: (B * q_len_per_req, Hq, D).
            paged_kv_cache: as in `batch_decode_with_paged_kv_cache`, in the wrapper's layout.
            args: must be empty.
            q_scale, k_scale, v_scale, sinks: as in `batch_decode_with_paged_kv_cache`.
            out, lse: arrays for the results, shaped as q and (B * q_len_per_req, Hq) float32; None for new ones.
            return_lse: also return the log-sum-exp of base 2.
            enable_pdl: has no effect.
            window_left, q_len_per_req: None, or as in the plan.
            skip_softmax_threshold_scale_factor: must be None.
            kv_cache_sf: for pages in nvfp4, which are uint8 with two codes in a byte and whose plan has
                ``kv_data_type="uint8"``: the scales of groups of 16, float8_e4m3fn or its bits in uint8, in the form of
                the pages. Only in NHD.

        Returns:
            (B * q_len_per_req, Hq, D); with ``return_lse``, a pair. A query that sees nothing gives 0 and -inf.

        Raises:
            OptionError, ShapeError, DTypeError: an argument is not supported, or does not fit the plan. Nothing is
                written.

        Exactness, cost: as `batch_decode_with_paged_kv_cache`, without waiting for a device. "ROPE_LLAMA" copies the
            pages of all requests in float32, rotates the keys there, and rounds the result once.
        """
        operation = self._operation("run")
        refuse_passed(operation, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        check_pdl(operation, enable_pdl)
        self._check_window(operation, window_left)
        keys = keys_in_pages(paged_kv_cache, self._kv_layout, operation, kv_cache_sf)
        plan = self._planned(operation, q, keys.k, args)
        rows = view(q, "q", operation).shape[:1]
        if rows != (plan.total,):
            raise ShapeError(
                f"{operation}: q is {describe(view(q, 'q', operation))} where {plan.sequences} requests with "
                f"q_len_per_req={plan.size}, as in the plan, need {plan.total} rows."
            )
        each = checks.integer_or_none(q_len_per_req, "q_len_per_req", operation)
        if each not in (None, plan.size) and plan.sequences:
            refuse_option(operation, q_len_per_req=(q_len_per_req, f"None, or {plan.size} as in the plan"))
        wants_lse = flag(return_lse, "return_lse", operation)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return plan.run(Run(q, keys, scales, sinks, out, lse, wants_lse))

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: Array,
        paged_kv_cache: Array | tuple[Array, Array],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
            q, paged_kv_cache, q_scale, k_scale, v_scale, return_lse: as in `run`.
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta: as in `plan`.

        Raises:
            OptionError, ShapeError, DTypeError: as in `run`; with ``use_cuda_graph=True``, other options than those of
                the plan.
        """
        operation = self._operation("forward")
        causal = self._plan is not None and self._plan.scores.sight.right == 0
        rope = (rope_scale, rope_theta)
        scores = scores_of(operation, pos_encoding_mode, window_left, causal, logits_soft_cap, sm_scale, rope)
        self._replan(operation, scores)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Array,
    indices: Array,
    last_page_len: Array,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Array | None = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan`, under the name by which engines put it in place of `plan`.

    Args:
        self: the wrapper.
        global_override_indptr_cpu: ``indptr`` on the host, which is read in its place without waiting for the device;
            None to read ``indptr``.
        indptr, indices, last_page_len, num_qo_heads, num_kv_heads: as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
        head_dim, page_size, pos_encoding_mode, window_left, logits_soft_cap, kv_data_type, data_type: as there.
        sm_scale, rope_scale, rope_theta, non_blocking, fixed_split_size, disable_split_kv, q_len_per_req: as there.
        q_data_type: likewise; None for ``data_type``, and float16 without both.

    Raises:
        OptionError, ShapeError, DTypeError, PositionError: as in `BatchDecodeWithPagedKVCacheWrapper.plan`.
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise OptionError(
            f"flashinfer.fast_decode_plan: self is {type(self).__name__}. Pass a BatchDecodeWithPagedKVCacheWrapper."
        )
    if q_data_type is None and data_type is None:
        q_data_type = "float16"
    starts = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    BatchDecodeWithPagedKVCacheWrapper.plan(  # `self.plan` may be this function
        self, starts, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
        window_left, logits_soft_cap, q_data_type, kv_data_type, None, data_type, sm_scale, rope_scale, rope_theta,
        non_blocking, fixed_split_size=fixed_split_size, disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req,
    )  # fmt: skip


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with ``use_cuda_graph=True``.

    Args:
        workspace_buffer: as there.
        indptr_buffer, indices_buffer, last_page_len_buffer: its three buffers.
        kv_layout, use_tensor_cores: as there.
    """

    def __init__(
        self,
        workspace_buffer: Array,
        indptr_buffer: Array,
        indices_buffer: Array,
        last_page_len_buffer: Array,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)
