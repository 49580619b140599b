"""flash-attention 3's `flash_attn_with_kvcache`, in a module of its wheel's name."""

from __future__ import annotations

from typing import Any

from tikv.compat.indices import flag, refuse_option
from tikv.compat.kvcache import Arguments, CacheCall

OPERATION = "flash_attn_interface.flash_attn_with_kvcache"


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
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
) -> Any:
    """Append new keys and values in place, and attend over the cache: flash-attention 3's function of that name.

    Args:
        q: (B, Sq, Hq, D), or with ``cu_seqlens_q`` (total, Hq, D); 8-bit floats too.
        k_cache, v_cache: (B_cache, S, H, D) and (B_cache, S, H, D_v); or with ``page_table`` (N, page, H, D), any page
            size.
        k, v: (B, S_new, H, D) and (B, S_new, H, D_v), or with ``cu_seqlens_k_new`` (total, H, D), to append at
            ``cache_seqlens``; None to read only.
        qv: (B, Sq, Hq, D_v) or (total, Hq, D_v): scores are ``q.k + qv.v``, for latent attention. K and V have to be
            neighbouring columns of one array.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), for ``k`` and ``q``; a position for each slot of a row.
        cache_seqlens: an int or (B,) int32: slots in use before the append, padding included. None: all.
        cache_batch_idx: (B,) int32: which row of the cache, or of the ``page_table``, each sequence has. Where two have
            one, new rows of either stay.
        cache_leftpad: (B,) int32: where each sequence starts in its row.
        page_table: (B, pages) int32.
        cu_seqlens_q, cu_seqlens_k_new: (B + 1,) int32 where each sequence's queries, or new tokens, start.
        max_seqlen_q: with ``cu_seqlens_q``, the most queries of a sequence.
        rotary_seqlens: (B,) int32: the position that rotates each sequence's first new token and query; None for
            ``cache_seqlens``. Without rotation it says nothing.
        q_descale, k_descale, v_descale: (B, H) float32, of q and of caches of 8-bit floats: what is read is multiplied.
        softmax_scale: None for ``1 / sqrt(D)``, with ``qv`` ``1 / sqrt(D + D_v)``.
        causal, window_size, softcap, rotary_interleaved, num_splits: as in `tikv.compat.flash_attn`.
        attention_chunk: a query sees the keys of its own chunk of so many tokens; 0 for all.
        scheduler_metadata: None; there is nothing to prepare.
        pack_gqa: None or True; query heads of a group always share what is read.
        sm_margin: 0; a launch takes the whole GPU.
        return_softmax_lse: also return the LSE, (B, Hq, Sq) or (Hq, total), natural logarithm.

    Returns:
        (B, Sq, Hq, D_v) or (total, Hq, D_v) in q's dtype, bfloat16 for 8-bit floats; with ``return_softmax_lse`` also
        the LSE. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: an option that is not offered, by its name: ``qv`` over K and V that lie apart, descales of a cache
            of no 8-bit floats, metadata, margins.
        ShapeError, DTypeError, PositionError, CapacityError: as `tikv.write_slots` and `tikv.paged_decode_attention`.
            Nothing is written. Lengths, rows, pages and padding are checked where all of them lie on the host; else
            new rows without a slot are left out, and lengths are bounded.

    Exactness: appended bits are kept; attention as `tikv.decode_attention`. Cost: an append, and an attention over
        pages of a whole row each, without a copy of the cache. Padding makes a table of all tokens of a row; chunks one
        of all tokens that each query may see, whose keys no other query shares.

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
        refuse_option(OPERATION, scheduler_metadata=("given", "None"))
    if pack_gqa is not None and not flag(pack_gqa, "pack_gqa", OPERATION):
        refuse_option(OPERATION, pack_gqa=(pack_gqa, "None or True"))
    if type(sm_margin) is not int or sm_margin:
        refuse_option(OPERATION, sm_margin=(sm_margin, "0"))
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
