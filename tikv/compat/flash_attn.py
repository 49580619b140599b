"""flash-attention's `flash_attn_with_kvcache`: append, rotate and attend over a token-major cache or its pages."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from tikv.compat.indices import as_index, library_of, on_host, refuse_option, refuse_where
from tikv.errors import DTypeError, ShapeError
from tikv.ops import paged
from tikv.ops.attention.contiguous import contiguous_call
from tikv.ops.attention.paged import paged_call
from tikv.ops.attention.terms import Terms

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
        cache_batch_idx: (B,) int32: which row of the cache each sequence is, different ones with ``k``; None for the
            first B.
        cache_leftpad: (B,) int32: where each sequence starts in its row.
        block_table: (B, pages) int32.
        softmax_scale: None for ``1 / sqrt(D)``.
        causal: aligned to the last key: query i is the token at ``length - Sq + i``, the new tokens counted, and sees
            none behind itself. A query that would come before the first token sees nothing.
        window_size: (left, right) tokens before and behind its own that a query sees, aligned likewise; -1 for
            unlimited, and right 0 for causal.
        softcap: 0 for none.
        rotary_interleaved: pairs (2i, 2i + 1); False for half-split pairs.
        alibi_slopes: (Hq,) or (B, Hq) float32: scores get ``-slope * distance``, where q lies.
        num_splits: 0 for the library's choice.
        return_softmax_lse: also return the LSE, (B, Hq, Sq), natural logarithm.

    Returns:
        (B, Sq, Hq, D) in q's dtype; with ``return_softmax_lse`` a pair. A query that sees nothing gives 0 and -inf.

    Raises:
        OptionError: left padding with pages or rotation; a window that is no pair of integers.
        ShapeError, DTypeError, PositionError: as `tikv.write_slots` and `tikv.paged_decode_attention`; lengths, rows,
            pages and padding are checked before the append where they lie on the host.

    Exactness: appended bits are kept; attention as `tikv.decode_attention`. Cost: an append, and an attention over
    pages of a whole row each, without a copy of the cache.
    """
    if alibi_slopes is not None and str(alibi_slopes.dtype).removeprefix("torch.") != "float32":
        raise DTypeError(f"{OPERATION}: alibi_slopes is {alibi_slopes.dtype}; it is float32.")
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((q.shape[2],), (q.shape[0], q.shape[2])):
        raise ShapeError(
            f"{OPERATION}: alibi_slopes is {tuple(alibi_slopes.shape)}; it must be ({q.shape[2]},) or "
            f"({q.shape[0]}, {q.shape[2]})."
        )
    if cache_leftpad is not None and (block_table is not None or rotary_cos is not None):
        refuse_option(OPERATION, cache_leftpad=("given", "None with block_table or rotary_cos"))
    if softcap < 0:
        refuse_option(OPERATION, softcap=(softcap, "0 for none, or a positive number"))
    for one, other, names in ((k, v, "k and v"), (rotary_cos, rotary_sin, "rotary_cos and rotary_sin")):
        if (one is None) != (other is None):
            raise ShapeError(f"{OPERATION}: {names} must both be given, or neither.")
    batch, block_size = q.shape[0], k_cache.shape[1]
    if k is not None and (k.shape[0], *v.shape[:2]) != (batch, batch, k.shape[1]):
        raise ShapeError(
            f"{OPERATION}: q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; k and v must be "
            f"({batch}, S_new, H, D)."
        )
    library = library_of(q, k_cache)
    if block_table is not None and cache_batch_idx is not None:
        refuse_option(OPERATION, cache_batch_idx=("given", "None with block_table"))
    given = cache_seqlens, cache_batch_idx, block_table
    before, table = _lengths_and_table(*given, batch, block_size, q)
    seen = _seen(causal, window_size, q.shape[1], table.shape[1] * block_size, alibi_slopes is not None)
    new = 0 if k is None else k.shape[1]
    if new or cache_leftpad is not None:
        known = before, table
        if not on_host(before) and all(map(on_host, given)):  # as it was before a copy went to q's device
            lens, idx, pages = map(_as_numpy, given)
            known = _lengths_and_table(lens, idx, pages, batch, block_size, np.empty(0))
        if new:
            _check_lengths(*known, new, k_cache.shape[0], block_size)
        if cache_leftpad is not None and on_host(cache_leftpad) and on_host(known[0]):
            cache_leftpad = np.asarray(cache_leftpad)
            _check_padding(cache_leftpad, known[0], new)
    if rotary_cos is not None:
        if k is None:
            refuse_option(OPERATION, rotary_cos=("given", "k and v with it"))
        _check_rotation(rotary_cos, rotary_sin, table.shape[1] * block_size, q.shape[3])
        steps = _arange(q.shape[1], q)[None]
        if not causal and tuple(window_size) == (-1, -1):
            steps = library.zeros_like(steps)
        q = _rotated(q, before[:, None] + steps, rotary_cos, rotary_sin, rotary_interleaved)
        k = _rotated(k, before[:, None] + _arange(new, q)[None], rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None:
        position = before[:, None] + _arange(new, q)[None]
        page = library.clip(position // block_size, None, table.shape[1] - 1)
        blocks = library.take_along_dim(table, page, 1) if library is not np else np.take_along_axis(table, page, 1)
        slots = blocks * block_size + position % block_size
        flat_k, flat_v = (x.reshape(batch * new, *x.shape[2:]) for x in (k, v))
        paged.write_slots(flat_k, flat_v, k_cache, v_cache, slots.reshape(-1))
    options: dict[str, Any] = {
        "scale": softmax_scale,
        "softcap": softcap or None,
        "num_splits": num_splits or None,
        "short": True,
        **seen,
    }
    heads_first = _swap(q, 1, 2)
    lens = before + new
    if cache_leftpad is None:
        terms = Terms(alibi_slopes=alibi_slopes)
        call = paged_call(OPERATION, heads_first, k_cache, v_cache, _int32(table), _int32(lens), terms=terms, **options)
        out, lse = call.attend(heads_first, return_lse=True)
    else:
        shared = alibi_slopes is None or len(alibi_slopes.shape) == 1
        slopes = [alibi_slopes if shared else alibi_slopes[b] for b in range(batch)]
        out, lse = _padded(heads_first, k_cache, v_cache, table, lens, cache_leftpad, options, slopes, library)
    out = _swap(out, 1, 2)
    return (out, lse) if return_softmax_lse else out


def _padded(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    table: Any,
    lens: Any,
    leftpad: Any,
    options: dict[str, Any],
    slopes: list[Any],
    library: Any,
) -> tuple[Any, Any]:
    """Sequence by sequence, over the part of its row behind the padding."""
    outs, lses = [], []
    pads, rows, ends = (np.asarray(x.tolist()) for x in (leftpad, table[:, 0], lens))
    for b, (pad, row, end) in enumerate(zip(pads, rows, ends, strict=True)):
        k, v = (_swap(cache[row : row + 1, pad:end], 1, 2) for cache in (k_cache, v_cache))
        query, length, terms = q[b : b + 1], np.array([end - pad], np.int32), Terms(alibi_slopes=slopes[b])
        out, lse = contiguous_call(OPERATION, query, k, v, length, terms=terms, **options).attend(
            query, return_lse=True
        )
        outs.append(out)
        lses.append(lse)
    join = np.concatenate if library is np else library.cat
    return join(outs), join(lses)


def _seen(causal: bool, window_size: Any, queries: int, capacity: int, slopes: bool) -> dict[str, Any]:
    """Which keys a query sees, as options of attention.

    Raises:
        OptionError: a window that is no pair of integers.
    """
    if len(window_size) != 2 or not all(isinstance(n, numbers.Integral) for n in window_size):
        refuse_option(OPERATION, window_size=(window_size, "(left, right), integers, -1 for unlimited"))
    left, right = (min(int(n), capacity) for n in window_size)
    if causal or queries == 1:  # nothing lies behind one query at the end
        right = 0
    if right < 0 and left < 0 and not slopes:
        return {"causal": False}
    newer = right if right >= 0 else capacity
    return {"causal": True, "newer": newer, "window": None if left < 0 else left + 1 + newer}


def _check_lengths(before: Any, table: Any, new: int, blocks: int, block_size: int) -> None:
    """What attention would refuse after the append: lengths, and the pages that they reach."""
    capacity, lens = table.shape[1] * block_size, before + new
    refuse_where(
        (before < 0) | (lens > capacity),
        OPERATION,
        lambda b: f"cache_seqlens{[*b]}={int(before[b])} and {new} new tokens: a row has 0..{capacity} slots.",
    )
    starts = _arange(table.shape[1], before)[None] * block_size
    refuse_where(
        ((table < 0) | (table >= blocks)) & (starts < lens[:, None]),
        OPERATION,
        lambda at: (
            f"sequence {at[0]} of {int(lens[at[0]])} tokens reaches {int(table[at])}, which is no row or page of "
            f"the {blocks} of the cache."
        ),
    )


def _check_padding(leftpad: Any, before: Any, new: int) -> None:
    """What attention would refuse after the append: padding, and the tokens that it leaves."""
    if leftpad.shape != tuple(before.shape):
        raise ShapeError(f"{OPERATION}: cache_leftpad is {leftpad.shape}; it must be {tuple(before.shape)}.")
    pads = leftpad.astype(np.int64)
    left = np.asarray(before) + new - pads
    refuse_where(
        (pads < 0) | (left < 0),
        OPERATION,
        lambda b: f"cache_leftpad{[*b]}={pads[b]} leaves {left[b]} tokens. Use 0 to {int(before[b]) + new}.",
    )


def _check_rotation(cos: Any, sin: Any, capacity: int, width: int) -> None:
    fits = len(cos.shape) == 2 and cos.shape[0] >= capacity and 0 < 2 * cos.shape[1] <= width
    if not fits or tuple(cos.shape) != tuple(sin.shape):
        raise ShapeError(
            f"{OPERATION}: rotary_cos is {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}; both must be (at least "
            f"{capacity} positions, at most {width // 2} pairs)."
        )


def _as_numpy(array: Any) -> Any:
    return array if array is None or isinstance(array, numbers.Integral) else np.asarray(array)


def _lengths_and_table(
    cache_seqlens: Any, cache_batch_idx: Any, block_table: Any, batch: int, block_size: int, like: Any
) -> tuple[Any, Any]:
    """Tokens of each sequence before the call (B,), and its pages or the one row it is (B, pages), placed as `like`."""
    if cache_seqlens is None:
        cache_seqlens = block_size * (1 if block_table is None else block_table.shape[1])
    if isinstance(cache_seqlens, numbers.Integral):
        lens = _arange(batch, like) * 0 + int(cache_seqlens)
    else:
        lens = as_index(cache_seqlens, like)
    if block_table is not None:
        return lens, as_index(block_table, like)
    rows = _arange(batch, like) if cache_batch_idx is None else as_index(cache_batch_idx, like)
    return lens, rows[:, None]


def _arange(n: int, like: Any) -> Any:
    library = library_of(like)
    return np.arange(n) if library is np else library.arange(n, device=like.device)


def _swap(x: Any, a: int, b: int) -> Any:
    return np.swapaxes(x, a, b) if isinstance(x, np.ndarray) else x.transpose(a, b)


def _int32(array: Any) -> Any:
    return array.astype(np.int32) if isinstance(array, np.ndarray) else array.int()


def _rotated(x: Any, positions: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Rows x (B, S, H, D) rotated at (B, S) positions in float32, rounded once to x's dtype."""
    library = library_of(x)
    half = cos.shape[-1]
    wide = x.astype(np.float32) if library is np else x.float()
    c, s = ((t.astype(np.float32) if library is np else t.float())[positions][:, :, None] for t in (cos, sin))
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
    else:
        a, b = turned[..., :half], turned[..., half:]
    first, second = a * c - b * s, b * c + a * s
    if interleaved:
        pair = np.stack((first, second), -1) if library is np else library.stack((first, second), -1)
        turned = pair.reshape(turned.shape)
    else:
        turned = np.concatenate((first, second), -1) if library is np else library.cat((first, second), -1)
    whole = np.concatenate((turned, rest), -1) if library is np else library.cat((turned, rest), -1)
    rounded: Any = whole
    return rounded.astype(x.dtype) if library is np else rounded.to(x.dtype)
