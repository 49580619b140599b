"""flash-attention's `flash_attn_with_kvcache`: append, rotate and attend, over a token-major or a paged cache."""

from __future__ import annotations

from tikv.arrays import Array, Arrays
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
