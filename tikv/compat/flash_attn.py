"""flash-attention's `flash_attn_with_kvcache`: append, rotate and attend over a token-major cache or its pages."""

from __future__ import annotations

from typing import Any

from tikv.compat.indices import flag
from tikv.compat.kvcache import Arguments, CacheCall

OPERATION = "flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values in place, and attend over the cache: flash-attention's function of that name.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (B_cache, S, H, D); or with ``block_table`` (N, page, H, D), any page size.
        k, v: (B, S_new, H, D) to append at ``cache_seqlens``; None to read only.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), for ``k`` and ``q``; a position for each slot of a row.
        cache_seqlens: an int or (B,) int32: tokens in the cache before the append. None: the whole cache.
        cache_batch_idx: (B,) int32: which row of the cache, or of ``block_table``, each sequence has, different ones
            with ``k``; None for the first B.
        cache_leftpad: (B,) int32: where each sequence starts in its row.
        block_table: (B, pages) int32.
        softmax_scale: None for ``1 / sqrt(D)``.
        causal: aligned to the last key: query i is the token at ``length - Sq + i``, the new tokens counted, and sees
            none behind itself. A query that would come before the first token sees nothing.
        window_size: (left, right) tokens before and behind its own that a query sees, aligned likewise, of integers or
            integer arrays; -1 for unlimited, and right 0 for causal.
        softcap: 0 for none.
        rotary_interleaved: pairs (2i, 2i + 1); False for half-split pairs.
        alibi_slopes: (Hq,) or (B, Hq) float32: scores get ``-slope * distance``, where q lies.
        num_splits: 0 for the library's choice.
        return_softmax_lse: also return the LSE, (B, Hq, Sq), natural logarithm.

    Returns:
        (B, Sq, Hq, D) in q's dtype; with ``return_softmax_lse`` a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: a window that is not a pair of integers; rotation without new keys.
        ShapeError, DTypeError, PositionError, CapacityError: as `tikv.write_slots` and `tikv.paged_decode_attention`.
            Nothing is written. Lengths, rows, pages and padding are checked where all of them lie on the host; else
            new rows without a slot are left out, and lengths are bounded.

    Exactness: appended bits are kept; attention as `tikv.decode_attention`. Cost: an append, and an attention over
        pages of a whole row each, without a copy of the cache. Padding makes a table of all tokens of a row.
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
