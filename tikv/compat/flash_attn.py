"""flash-attention's functions: attention of queries over keys, and over a cache to which it appends."""

from __future__ import annotations

from tikv.arrays import Array, Arrays
from tikv.compat.flash_rows import RowsArguments, attend_rows, refuse_dropout, unpacked
from tikv.compat.indices import flag
from tikv.compat.kvcache import Arguments, CacheCall

OPERATION = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Arrays:
    """Append new keys and values in place, then attend over the cache, as flash-attention's function does.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (B_cache, S, H, D); with ``block_table``, (N, page, H, D) of any page size.
        k, v: (B, S_new, H, D), appended at ``cache_seqlens``; None to read only.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), which rotate ``k`` and ``q``; they need a position for each
            slot of a row.
        cache_seqlens: an int or (B,) int32: the number of tokens in the cache before the append; None for the whole
            cache.
        cache_batch_idx: (B,) int32: the row of the cache, or of ``block_table``, that each sequence uses; None for the
            first B. With ``k``, every sequence needs a row of its own.
        cache_leftpad: (B,) int32: the slot of its row where each sequence starts.
        block_table: (B, pages) int32.
        softmax_scale: None for ``1 / sqrt(D)``.
        causal: query i is the token at ``length - Sq + i``, where the length counts the new tokens, and sees no later
            token. A query that would come before the first token sees nothing.
        window_size: (left, right), integers or integer arrays: how many tokens before and after its own a query sees;
            -1 for unlimited. A right of 0 is causal.
        softcap: 0 for no softcap.
        rotary_interleaved: pairs (2i, 2i + 1); False for half-split pairs.
        alibi_slopes: (Hq,) or (B, Hq) float32: ``-slope * distance`` is added to the scores; it lies where q lies.
        num_splits: 0 lets the library choose.
        return_softmax_lse: also return the log-sum-exp (natural logarithm), (B, Hq, Sq).

    Returns:
        (B, Sq, Hq, D) in q's dtype; with ``return_softmax_lse``, a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: a window that is not a pair of integers; rotation without new keys.
        ShapeError, DTypeError, PositionError, CapacityError: as `tikv.write_slots` and `tikv.paged_decode_attention`.
            Nothing is written. Lengths, rows, pages and padding are checked if all of them lie on the host. Otherwise
            new rows without a slot are skipped, and lengths are clamped.

    Exactness: an append keeps every bit; attention is as exact as `tikv.decode_attention`. Cost: one append and one
        attention, with each row of the cache read as one page; the cache is not copied. Padding adds a table with an
        entry for each token of a row.
    """
    flag(return_softmax_lse, "return_softmax_lse", OPERATION)
    call = CacheCall(
        Arguments(
            OPERATION,
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            rotary_interleaved=rotary_interleaved,
            alibi_slopes=alibi_slopes,
            num_splits=num_splits,
            table_name="block_table",
        )
    )
    out, lse = call.run()
    return (out, lse) if return_softmax_lse else out


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Arrays:
    """Attend, as flash-attention's function does in inference: there is no `backward`.

    Args:
        q: (B, Sq, Hq, D).
        k, v: (B, Sk, H, D) and (B, Sk, H, D_v).
        dropout_p: must be 0.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_with_kvcache`; query i is the token
            at ``Sk - Sq + i``.
        deterministic: has no effect, since results are always the same.
        return_attn_probs: also return the log-sum-exp (natural logarithm), (B, Hq, Sq), and None for the probabilities.

    Returns:
        (B, Sq, Hq, D_v) in q's dtype; with ``return_attn_probs``, three. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: dropout; a window that is not a pair of integers.
        ShapeError, DTypeError: as `tikv.decode_attention`.

    Exactness, cost: those of `tikv.decode_attention`; nothing is copied.
    """
    operation = "flash_attn_func"
    flag(deterministic, "deterministic", operation)
    wants_lse = flag(return_attn_probs, "return_attn_probs", operation)
    refuse_dropout(operation, dropout_p)
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
            alibi_slopes=alibi_slopes,
        )
    )
    return (out, lse, None) if wants_lse else out


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
) -> Arrays:
    """Attend with sequences of different lengths, one after the other, as flash-attention's function does in inference.

    Args:
        q: (total_q, Hq, D).
        k, v: (total_k, H, D) and (total_k, H, D_v); with ``block_table``, (N, page, H, D) of any page size.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32: where the queries and keys of each sequence start. On a device they
            are not read by the host.
        max_seqlen_q, max_seqlen_k: the most queries and the most keys that a sequence has.
        dropout_p, deterministic: as in `flash_attn_func`.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_with_kvcache`.
        return_attn_probs: also return the log-sum-exp (natural logarithm), (Hq, total_q), and None for the
            probabilities.
        block_table: (B, pages) int32.

    Returns:
        (total_q, Hq, D_v) in q's dtype; with ``return_attn_probs``, three. A query that sees nothing, and a row that
        belongs to no sequence, give 0 and -inf.

    Raises:
        OptionError: dropout; a window that is not a pair of integers.
        ShapeError, DTypeError, PositionError: as `tikv.decode_attention` and `tikv.paged_decode_attention`. Starts,
            lengths and pages are checked if all of them lie on the host. Otherwise they are limited to what there is.

    Exactness: that of `tikv.decode_attention`. Cost: one attention of tiles of queries; keys are read where they lie,
        and queries and results are copied once. A window with a right side, and ``alibi_slopes`` without ``causal``,
        make each sequence one tile: of ``max_seqlen_q`` queries.
    """
    operation = "flash_attn_varlen_func"
    flag(deterministic, "deterministic", operation)
    wants_lse = flag(return_attn_probs, "return_attn_probs", operation)
    refuse_dropout(operation, dropout_p)
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
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            block_table=block_table,
        )
    )
    return (out, lse, None) if wants_lse else out


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Arrays:
    """`flash_attn_func` of queries, keys and values in one array, which is read in place.

    Args:
        qkv: (B, S, 3, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Raises:
        OptionError, ShapeError, DTypeError: as in `flash_attn_func`.
    """
    q, k, v = unpacked("flash_attn_qkvpacked_func", qkv, "qkv", ("B", "S"), 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Arrays:
    """`flash_attn_func` of keys and values in one array, which is read in place.

    Args:
        q: (B, Sq, Hq, D).
        kv: (B, Sk, 2, H, D).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_func`.

    Raises:
        OptionError, ShapeError, DTypeError: as in `flash_attn_func`.
    """
    k, v = unpacked("flash_attn_kvpacked_func", kv, "kv", ("B", "S"), 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Arrays:
    """`flash_attn_varlen_func` of queries, keys and values in one array, which is read in place.

    Args:
        qkv: (total, 3, H, D).
        cu_seqlens: (B + 1,) int32: where each sequence starts.
        max_seqlen: the most tokens that a sequence has.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs: as in
            `flash_attn_varlen_func`.

    Raises:
        OptionError, ShapeError, DTypeError, PositionError: as in `flash_attn_varlen_func`.
    """
    q, k, v = unpacked("flash_attn_varlen_qkvpacked_func", qkv, "qkv", ("total",), 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Arrays:
    """`flash_attn_varlen_func` of keys and values in one array, which is read in place.

    Args:
        q: (total_q, Hq, D).
        kv: (total_k, 2, H, D).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p: as in `flash_attn_varlen_func`.
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as there.
        return_attn_probs: as there.

    Raises:
        OptionError, ShapeError, DTypeError, PositionError: as in `flash_attn_varlen_func`.
    """
    k, v = unpacked("flash_attn_varlen_kvpacked_func", kv, "kv", ("total",), 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
