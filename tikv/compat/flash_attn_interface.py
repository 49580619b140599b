"""flash-attention 3's functions, in a module named as in its wheel."""

from __future__ import annotations

import itertools
from typing import Any

from tikv.arrays import Array, Arrays, describe, view
from tikv.compat.flash_rows import RowsArguments, attend_rows, unpacked
from tikv.compat.indices import flag, refuse_option
from tikv.compat.kvcache import Arguments, CacheCall
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks

OPERATION = "flash_attn_interface.flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    qv: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    page_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Arrays:
    """Append new keys and values in place, then attend over the cache, as flash-attention 3's function does.

    Args:
        q: (B, Sq, Hq, D), or with ``cu_seqlens_q`` (total, Hq, D); 8-bit floats are taken too.
        k_cache, v_cache: (B_cache, S, H, D), (B_cache, S, H, D_v); with ``page_table``, (N, page, H, D), any page size.
        k, v: (B, S_new, H, D) and (B, S_new, H, D_v), or with ``cu_seqlens_k_new`` (total, H, D), appended at
            ``cache_seqlens``; None to read only.
        qv: (B, Sq, Hq, D_v) or (total, Hq, D_v): the scores become ``q.k + qv.v``, for latent attention. K and V that
            are adjacent columns of one array are read in place; others are copied in each call.
        rotary_cos, rotary_sin: as in `tikv.compat.flash_attn`, (positions, rotary_dim / 2).
        cache_seqlens: int or (B,) int32: the slots in use before the append, padding included; None for all.
        cache_batch_idx: (B,) int32: the row of the cache, or of ``page_table``, that each sequence uses. If two
            sequences use one row, the new rows of either of them stay.
        cache_leftpad: (B,) int32: the slot of its row where each sequence starts.
        page_table: (B, pages) int32.
        cu_seqlens_q, cu_seqlens_k_new: (B + 1,) int32: where the queries, or the new tokens, of each sequence start.
        max_seqlen_q: the most queries that a sequence has; needed with ``cu_seqlens_q``.
        rotary_seqlens: (B,) int32: the position by which each sequence's first new token and query are rotated; None
            for ``cache_seqlens``. It has no effect without rotation.
        q_descale, k_descale, v_descale: (B, H) float32, by which 8-bit floats of q and the caches are multiplied.
        softmax_scale: None for ``1 / sqrt(D)``, or ``1 / sqrt(D + D_v)`` with ``qv``.
        causal, window_size, softcap, rotary_interleaved, num_splits: as in `tikv.compat.flash_attn`.
        attention_chunk: tokens per chunk: a query sees only the keys of its own chunk; 0 for all keys.
        scheduler_metadata: must be None; there is nothing to prepare.
        pack_gqa: has no effect; the query heads of a group always share the keys that they read.
        sm_margin: must be 0; a launch takes the whole GPU.
        return_softmax_lse: also return the log-sum-exp (natural logarithm), (B, Hq, Sq) or (Hq, total).

    Returns:
        (B, Sq, Hq, D_v) or (total, Hq, D_v), in q's dtype, or bfloat16 if q is in 8-bit floats; with
        ``return_softmax_lse``, also the log-sum-exp. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: an option that is not supported, which the message names: descales with ``qv``, or of a cache that
            is not in 8-bit floats, metadata, or margins.
        ShapeError, DTypeError, PositionError, CapacityError: as in `tikv.compat.flash_attn`. Nothing is written.

    Exactness: an append keeps every bit; attention is as exact as `tikv.decode_attention`.
    Cost: one append and one attention, with each row of the cache read as one page; the cache is not copied, except for
        ``qv`` with K and V in separate arrays. docs/names.md has the cost of ``qv``, padding and chunks.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flash_attn_interface
        >>> cache = np.zeros((2, 2, 4, 1, 1), np.float32)
        >>> cache[1, :, :3, 0, 0] = [[1, 3, 0], [2, 4, 9]]
        >>> q = np.ones((2, 1, 1, 1), np.float32)
        >>> out = flash_attn_interface.flash_attn_with_kvcache(q, *cache, cache_seqlens=np.array([2, 3]))
        >>> out.ravel().tolist()
        [2.0, 5.0]
    """
    flag(return_softmax_lse, "return_softmax_lse", OPERATION)
    if scheduler_metadata is not None:
        raise OptionError(f"{OPERATION}: scheduler_metadata is not supported. Leave it out.")
    _check_options(OPERATION, pack_gqa, sm_margin)
    call = CacheCall(
        Arguments(
            OPERATION,
            q,
            k_cache,
            v_cache,
            k,
            v,
            qv,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            cu_seqlens_q,
            cu_seqlens_k_new,
            max_seqlen_q,
            rotary_seqlens,
            q_descale,
            k_descale,
            v_descale,
            softmax_scale,
            causal,
            window_size,
            attention_chunk,
            softcap,
            rotary_interleaved,
            num_splits=num_splits,
        )
    )
    out, lse = call.run()
    return (out, lse) if return_softmax_lse else out


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Arrays:
    """Attend, as flash-attention 3's function does in inference: there is no `backward`.

    Args:
        q, k, v, softmax_scale, causal, window_size, softcap: as in `tikv.compat.flash_attn.flash_attn_func`.
        qv, q_descale, k_descale, v_descale, attention_chunk: as in `flash_attn_with_kvcache`.
        num_splits: 0 lets the library choose.
        pack_gqa, sm_margin: as in `flash_attn_with_kvcache`.
        deterministic: has no effect, since results are always the same.
        return_attn_probs: also return the log-sum-exp (natural logarithm), (B, Hq, Sq).

    Returns:
        (B, Sq, Hq, D_v) in q's dtype, or bfloat16 if q is in 8-bit floats; with ``return_attn_probs``, a pair.

    Raises:
        OptionError, ShapeError, DTypeError: as in `tikv.compat.flash_attn.flash_attn_func`, or as
            `flash_attn_with_kvcache` refuses these options.

    Exactness, cost: as in `tikv.compat.flash_attn.flash_attn_func`; with ``qv``, a descale or chunks, those of
        `flash_attn_with_kvcache`.
    """
    operation = "flash_attn_interface.flash_attn_func"
    _check_options(operation, pack_gqa, sm_margin, deterministic)
    wants_lse = flag(return_attn_probs, "return_attn_probs", operation)
    out, lse = attend_rows(
        RowsArguments(
            operation,
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=num_splits,
            qv=qv,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            attention_chunk=attention_chunk,
        )
    )
    return (out, lse) if wants_lse else out


def flash_attn_qkvpacked_func(
    qkv: Array,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Arrays:
    """`flash_attn_func` of queries, keys and values in one array, which is read in place.

    Args:
        qkv: (B, S, 3, H, D); with ``num_heads_q``, (B, S, num_heads_q + 2 * H, D).
        num_heads_q: the number of query heads in ``qkv``; None if there are as many as KV heads.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size: as in `flash_attn_func`.
        attention_chunk, softcap, deterministic, sm_margin, return_attn_probs: as there.

    Raises:
        OptionError, ShapeError, DTypeError, PositionError: as in `flash_attn_func`, or heads do not divide.
    """
    operation = "flash_attn_interface.flash_attn_qkvpacked_func"
    if num_heads_q is None:
        q, k, v = unpacked(operation, qkv, "qkv", ("B", "S"), 3)
    else:
        q, k, v = _heads_of(operation, qkv, num_heads_q)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def _heads_of(operation: str, qkv: Array, num_heads_q: Any) -> Any:
    """Queries, keys and values of one array (B, S, num_heads_q + 2 * H, D), in place."""
    seen = view(qkv, "qkv", operation)
    checks.rank(seen, (4,), "qkv", "(B, S, num_heads_q + 2 * H, D)", operation)
    queries = checks.integer(num_heads_q, "num_heads_q", operation, low=1)
    keys, rest = divmod(seen.shape[2] - queries, 2)
    if rest or keys < 1:
        raise ShapeError(
            f"{operation}: qkv is {describe(seen)}; after {queries} query heads, its heads must divide into keys and "
            "values."
        )
    whole: Any = qkv
    ends = (0, queries, queries + keys, queries + 2 * keys)
    return [whole[:, :, first:end] for first, end in itertools.pairwise(ends)]


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
) -> Arrays:
    """Attend with sequences of different lengths, one after the other, as flash-attention 3's function in inference.

    Args:
        q, k, v, max_seqlen_q, max_seqlen_k: as in `tikv.compat.flash_attn.flash_attn_varlen_func`.
        cu_seqlens_q, cu_seqlens_k, block_table: likewise; with ``block_table`` and ``seqused_k``, ``cu_seqlens_k`` may
            be None, as in vLLM's kernels.
        softmax_scale, causal, window_size, softcap: likewise.
        seqused_q, seqused_k: (B,) int32: how many of its queries and keys, from the first, each sequence uses; None for
            all.
        qv, q_descale, k_descale, v_descale, attention_chunk: as in `flash_attn_with_kvcache`.
        num_splits, pack_gqa, deterministic, sm_margin: as in `flash_attn_func`.
        return_attn_probs: also return the log-sum-exp (natural logarithm), (Hq, total_q).

    Returns:
        (total_q, Hq, D_v) in q's dtype, or bfloat16 if q is in 8-bit floats; with ``return_attn_probs``, a pair.

    Raises:
        OptionError, ShapeError, DTypeError, PositionError: as in `tikv.compat.flash_attn.flash_attn_varlen_func`.

    Exactness, cost: as in `tikv.compat.flash_attn.flash_attn_varlen_func`; with ``qv``, a descale or chunks, those of
        `flash_attn_with_kvcache`, through a table with an entry for each key.
    """
    operation = "flash_attn_interface.flash_attn_varlen_func"
    _check_options(operation, pack_gqa, sm_margin, deterministic)
    wants_lse = flag(return_attn_probs, "return_attn_probs", operation)
    out, lse = attend_rows(
        RowsArguments(
            operation,
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q,
            seqused_k,
            softmax_scale,
            causal,
            window_size,
            softcap,
            num_splits=num_splits,
            block_table=block_table,
            qv=qv,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            attention_chunk=attention_chunk,
        )
    )
    return (out, lse) if wants_lse else out


def _check_options(operation: str, pack_gqa: Any, sm_margin: Any, deterministic: Any = False) -> None:
    """Refuse what these options may not be."""
    flag(deterministic, "deterministic", operation)
    if pack_gqa is not None:
        flag(pack_gqa, "pack_gqa", operation)
    if type(sm_margin) is not int or sm_margin:
        refuse_option(operation, sm_margin=(sm_margin, "0"))
