"""The expected result of every operation, in NumPy and by a different method than the kernels.

The kernels compute addresses; here tokens are kept in lists, slots come from a wheel that turns one notch per token,
and paged pools are reshaped to one row per slot. Nothing is written in place: each function returns the expected cache.
Taichi is never imported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

_CONVERSIONS = {
    ("float32", "float16"): np.float16,
    ("float32", "bfloat16"): ml_dtypes.bfloat16,
    ("bfloat16", "float32"): np.float32,
}
_FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # each with its largest number
for _name in _FLOAT8:
    for _wide in (np.float32, np.float16, ml_dtypes.bfloat16):
        _CONVERSIONS[np.dtype(_wide).name, _name] = getattr(ml_dtypes, _name)
        _CONVERSIONS[_name, np.dtype(_wide).name] = _wide


def encode(rows: Array, dtype: Any) -> Array:
    """Rows as a cache of `dtype` stores them: the same bits, or rounded to nearest even.

    Numbers beyond the largest of float8_e4m3fn or float8_e5m2, and infinities, become the largest number.

    Args:
        rows: any shape.
        dtype: the type of `rows`; or a conversion: float32 to float16 or bfloat16, bfloat16 to float32, and float32,
            float16 or bfloat16 to or from one of the two 8-bit types.

    Returns:
        An array of the same shape in `dtype`.

    Raises:
        TypeError: there is no such conversion.

    Examples:
        >>> encode(np.float32([65519.0, 65520.0, 1e-8]), np.float16).tolist()
        [65504.0, inf, 0.0]
    """
    dtype = np.dtype(dtype)
    if rows.dtype == dtype:
        return rows
    if (rows.dtype.name, dtype.name) not in _CONVERSIONS:
        raise TypeError(f"encode: cannot convert {rows.dtype} into {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype.name in _FLOAT8:
            largest = np.float32(_FLOAT8[dtype.name])
            rows = np.clip(rows.astype(np.float32), -largest, largest)
        return rows.astype(_CONVERSIONS[rows.dtype.name, dtype.name])


def slots(position: int, num_tokens: int, capacity: int, window: int | None = None, sinks: int = 0) -> list[int]:
    """The slot of each of `num_tokens` tokens from `position` on, in order; with a window, from a turning wheel.

    Raises:
        ValueError: a linear cache would overflow, or the window does not fit.

    Examples:
        >>> slots(3, 4, capacity=8), slots(3, 4, capacity=8, window=5), slots(3, 4, capacity=8, window=5, sinks=2)
        ([3, 4, 5, 6], [3, 4, 0, 1], [3, 4, 2, 3])
    """
    if window is None:
        if position + num_tokens > capacity:
            raise ValueError(f"slots: position={position} + num_tokens={num_tokens} > capacity={capacity}")
        return list(range(position, position + num_tokens))
    if not sinks < window <= capacity:
        raise ValueError(f"slots: sinks={sinks}, window={window} and capacity={capacity} do not fit")
    wheel = deque(range(sinks, window))
    wheel.rotate(-max(0, position - sinks))
    indices = []
    for token in range(position, position + num_tokens):
        if token < sinks:
            indices.append(token)
        else:
            indices.append(wheel[0])
            wheel.rotate(-1)
    return indices


def copy(
    src: Array,
    cache: Array,
    *,
    position: int,
    window: int | None = None,
    sinks: int = 0,
    num_tokens: int | None = None,
    src_offset: int = 0,
    src_layout: str = "token_major",
    cache_layout: str = "head_major",
) -> Array:
    """The cache after the rows of `src` were written to it one by one, so that of two tokens in a slot the later stays.

    Args:
        src: (T, H, D) token-major or (H, T, D) head-major.
        cache: (H, capacity, D) head-major or (capacity, H, D) token-major; not changed.
        position: absolute index of row `src_offset`.
        window: slots of the ring, its sinks included; None for a linear cache.
        sinks: leading slots that the ring leaves alone.
        num_tokens: rows to write; None for all from `src_offset` on.
        src_offset: first row.
        src_layout: "token_major" or "head_major".
        cache_layout: "token_major" or "head_major".

    Returns:
        A new array like `cache`.

    Raises:
        ValueError: a linear cache would overflow, or the rows end before `src_offset + num_tokens`.

    Examples:
        >>> copy(np.arange(3.0).reshape(3, 1, 1), np.full((1, 2, 1), 9.0), position=0, window=2).ravel()
        array([2., 1.])
    """
    tokens = [
        src[t] if src_layout == "token_major" else src[:, t] for t in range(src.shape[src_layout == "head_major"])
    ]
    if num_tokens is None:
        num_tokens = len(tokens) - src_offset
    if src_offset + num_tokens > len(tokens):
        raise ValueError(f"copy: src_offset={src_offset} + num_tokens={num_tokens} > {len(tokens)} rows")
    tokens = tokens[src_offset : src_offset + num_tokens]
    capacity = cache.shape[1] if cache_layout == "head_major" else cache.shape[0]
    newest = dict(zip(slots(position, num_tokens, capacity, window, sinks), tokens, strict=True))
    after: Array = cache.copy()
    for slot, token in newest.items():
        for head, row in enumerate(encode(token, cache.dtype)):
            if cache_layout == "head_major":
                after[head, slot] = row
            else:
                after[slot, head] = row
    return after


def linearize(cache: Array, *, length: int, cache_layout: str = "head_major") -> Array:
    """The tokens of a ring over the whole cache, oldest first, after `length` tokens were written to it from 0 on.

    Returns:
        min(length, capacity) tokens in the layout of the cache.

    Examples:
        >>> linearize(np.array([[[4.0], [5.0], [3.0]]]), length=5).ravel()
        array([3., 4., 5.])
    """
    axis = 1 if cache_layout == "head_major" else 0
    capacity = cache.shape[axis]
    order = deque(range(capacity))
    if length > capacity:
        order.rotate(-length)
    return np.take(cache, list(order)[:length], axis=axis)


def compact(cache: Array, keep: Any) -> Array:
    """The cache after each head moved the rows it keeps to the front, in their order; later rows stay as they were.

    `cache` is (B, H, S, ...), `keep` ascending indices (B, H, n) or (B, n), or a mask (B, H, S) or (B, S).

    Examples:
        >>> compact(np.arange(4.0).reshape(1, 1, 4), np.array([[1, 3]])).ravel()
        array([1., 3., 2., 3.])
    """
    after: Array = cache.copy()
    for sequence, selection, to in zip(cache, keep, after, strict=True):
        for h, rows in enumerate(sequence):
            selected = rows[selection if selection.ndim == 1 else selection[h]]
            to[h, : len(selected)] = selected
    return after


def append_ragged(new: Array, cache: Array, offsets: Sequence[int] | Array) -> Array:
    """The cache after each sequence got new rows from its own offset on; rows that fall outside are skipped.

    Args:
        new: (B, H, L, D).
        cache: (B, H, M, D); not changed.
        offsets: (B,), any integers.

    Returns:
        A new array like `cache`.

    Examples:
        >>> append_ragged(np.ones((1, 1, 3, 1)), np.zeros((1, 1, 4, 1)), [-2]).ravel()
        array([1., 0., 0., 0.])
    """
    sequences = []
    for rows, old, offset in zip(new, cache, offsets, strict=True):
        places = {int(offset) + t: rows[:, t] for t in range(rows.shape[1])}
        sequences.append([encode(places[s], cache.dtype) if s in places else old[:, s] for s in range(cache.shape[2])])
    after: Array = cache.copy()
    for b, tokens in enumerate(sequences):
        for s, token in enumerate(tokens):
            after[b, :, s] = token
    return after


def pool_rows(pool: Array, layout: str = "NHD") -> Array:
    """A pool as one row per slot and head, (N * block_size, H, D), copied.

    Args:
        pool: "NHD" (N, bs, H, D); "HND" (N, H, bs, D); "VLLM" keys (N, H, D // x, bs, x) or values (N, H, D, bs).
        layout: one of the three.
    """
    if layout == "NHD":
        blocks = pool
    elif layout == "HND":
        blocks = pool.swapaxes(1, 2)
    elif pool.ndim == 5:
        blocks = pool.transpose(0, 3, 1, 2, 4)
    else:
        blocks = pool.transpose(0, 3, 1, 2)
    n, bs, h, *row = blocks.shape
    rows: Array = np.array(blocks).reshape(n * bs, h, math.prod(row))
    return rows


def pool_from_rows(rows: Array, pool: Array, layout: str = "NHD") -> Array:
    """The inverse of `pool_rows`; `pool` gives the shape."""
    blocks: Array
    if layout == "NHD":
        blocks = rows.reshape(pool.shape)
    elif layout == "HND":
        n, h, bs, d = pool.shape
        blocks = rows.reshape(n, bs, h, d).swapaxes(1, 2)
    elif pool.ndim == 5:
        n, h, chunks, bs, x = pool.shape
        blocks = rows.reshape(n, bs, h, chunks, x).transpose(0, 2, 3, 1, 4)
    else:
        n, h, d, bs = pool.shape
        blocks = rows.reshape(n, bs, h, d).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(blocks)


def write_slots(rows: Array, pool: Array, slot_mapping: Sequence[int] | Array, *, layout: str = "NHD") -> Array:
    """The pool after row `t` went to slot `slot_mapping[t]`; negative slots are skipped.

    Args:
        rows: (T, H, D).
        pool: as in `pool_rows`; not changed.
        slot_mapping: (T,), `block * block_size + offset`.
        layout: "NHD", "HND" or "VLLM".

    Returns:
        A new array like `pool`.

    Raises:
        IndexError: a slot past the end of the pool.

    Examples:
        >>> write_slots(np.ones((2, 1, 1)), np.zeros((2, 2, 1, 1)), [3, -1]).ravel()
        array([0., 0., 0., 1.])
    """
    after = pool_rows(pool, layout)
    for row, slot in zip(encode(rows, pool.dtype), slot_mapping, strict=True):
        if slot >= 0:
            after[slot] = row
    return pool_from_rows(after, pool, layout)


def gather_paged(pool: Array, block_table: Sequence[int] | Array, length: int, *, layout: str = "NHD") -> Array:
    """The first `length` tokens of a sequence whose pages are `block_table`: (length, H, D) in the pool's type.

    Examples:
        >>> gather_paged(np.arange(4.0).reshape(2, 2, 1, 1), [1, 0], 3).ravel()
        array([2., 3., 0.])
    """
    rows = pool_rows(pool, layout)
    pages = rows.reshape(pool.shape[0], -1, *rows.shape[1:])
    tokens = [token for block in block_table if block >= 0 for token in pages[block]]
    return np.stack(tokens[:length]) if length else rows[:0]


def copy_blocks(source: Array, target: Array, pairs: Sequence[Sequence[int]] | Array) -> Array:
    """The target pool after each pair's block was copied into it; pairs with a negative block are skipped.

    Examples:
        >>> copy_blocks(np.array([[1], [2]]), np.array([[3], [4]]), [(0, 1), (-1, 0)]).ravel().tolist()
        [3, 1]
    """
    blocks = list(target)
    for source_block, target_block in pairs:
        if source_block >= 0 and target_block >= 0:
            blocks[target_block] = source[source_block]
    return np.stack(blocks)


def quantize(rows: Array, scale_dtype: Any = np.float16) -> tuple[Array, Array]:
    """int8 rows and a scale for each, element by element: the largest finite magnitude is 127 steps.

    Args:
        rows: (..., D) float32, float16 or bfloat16.
        scale_dtype: float16 or float32.

    Returns:
        (..., D) int8 and (...) of `scale_dtype`.

    Examples:
        >>> q, scale = quantize(np.float32([[1.0, -2.0, np.inf, np.nan]]))
        >>> q.tolist(), scale.tolist()
        ([[64, -127, 127, 0]], [0.0157470703125])
    """
    limits = np.finfo(scale_dtype)
    flat = rows.reshape(-1, rows.shape[-1]).astype(np.float32)
    q, scales = np.zeros(flat.shape, np.int8), np.zeros(len(flat), scale_dtype)
    for r, row in enumerate(flat):
        largest = max((abs(x) for x in row if np.isfinite(x)), default=np.float32(0))
        least = max(limits.tiny, 2.0**-125)  # by which each subnormal float32 becomes 0
        step = min(max(largest / np.float32(127), np.float32(least)), np.float32(limits.max))
        scales[r] = step
        inverse = np.float32(1) / np.float32(scales[r])
        for i, x in enumerate(row):
            if not np.isnan(x):
                with np.errstate(over="ignore"):
                    q[r, i] = round(float(min(max(x * inverse, np.float32(-127)), np.float32(127))))
    return q.reshape(rows.shape), scales.reshape(rows.shape[:-1])


def sum_of_squares(rows: Array) -> Array:
    """The sum of each row's squares, in the order of the kernels: (..., D) to (...).

    There are n running sums, 4 to 128 and about D / 2, each over every n-th column. The second half of the sums is
    added to the first until 16 are left; these are added in fours, and then again the second half to the first.

    Examples:
        >>> sum_of_squares(np.float32([[3.0, 4.0], [1.0, 1.0]]))
        array([25.,  2.], dtype=float32)
    """
    width = rows.shape[-1]
    count = next(n for n in (4, 8, 16, 32, 64, 128) if 2 * n >= width or n == 128)
    sums = np.zeros((*rows.shape[:-1], count), rows.dtype)
    for first in range(0, width, count):
        part = np.square(rows[..., first : first + count])
        sums[..., : part.shape[-1]] += part
    while sums.shape[-1] > 16:
        sums = np.add(*np.split(sums, 2, axis=-1))
    totals: Array = (sums[..., ::4] + sums[..., 1::4]) + (sums[..., 2::4] + sums[..., 3::4])
    while totals.shape[-1] > 1:
        totals = np.add(*np.split(totals, 2, axis=-1))
    return totals[..., 0]


def norm_rope(
    rows: Array,
    positions: Sequence[int] | Array,
    *,
    mode: str,
    cos: Array | None = None,
    sin: Array | None = None,
    weight: Array | None = None,
    eps: float = 1e-6,
    rope_dim: int | None = None,
    dtype: Any = np.float32,
) -> Array:
    """Rows normalised and rotated, one pair of columns after the other, in the arithmetic of `dtype`.

    In float32 each product is rounded, and then their sum, as without fused multiply-adds.

    Args:
        rows: (T, H, D).
        positions: (T,) rows of the tables.
        mode: "none", "half", "interleaved", "norm_half" or "norm_interleaved".
        cos, sin: (positions, rope_dim / 2).
        weight: (D,) or None for 1.
        eps: added to the mean of squares.
        rope_dim: columns rotated; None for all.
        dtype: float32 or float64.

    Returns:
        (T, H, D) of `dtype`.

    Examples:
        >>> norm_rope(np.array([[[3.0, 4.0]]]), [0], mode="half", cos=np.zeros((1, 1)), sin=np.ones((1, 1)))
        array([[[-4.,  3.]]], dtype=float32)
    """
    x = rows.astype(dtype)
    if mode.startswith("norm_"):
        mean = sum_of_squares(x)[..., None] / x.dtype.type(x.shape[-1])
        scale = 1 / np.sqrt(mean + x.dtype.type(eps))
        x = x * (scale if weight is None else scale * weight.astype(dtype))
    if mode == "none" or cos is None or sin is None:
        return x
    rope_dim = rows.shape[-1] if rope_dim is None else rope_dim
    columns = list(range(rope_dim))
    halves = columns[: rope_dim // 2], columns[rope_dim // 2 :]
    split = (columns[::2], columns[1::2]) if mode.endswith("interleaved") else halves
    rotated: Array = x.copy()
    for column, (i, j) in enumerate(zip(*split, strict=True)):
        for t, position in enumerate(positions):
            c, s = cos[position, column].astype(dtype), sin[position, column].astype(dtype)
            rotated[t, :, i] = x[t, :, i] * c - x[t, :, j] * s
            rotated[t, :, j] = x[t, :, j] * c + x[t, :, i] * s
    return rotated


def rotate(rows: Array, moved_by: Array, inv_freq: Any, *, interleaved: bool = False, dtype: Any = np.float32) -> Array:
    """Rows (..., D) rotated from the position they were rotated for to another, in the arithmetic of `dtype`.

    `moved_by` (...) has the differences of positions; a row whose difference is 0 is unchanged. `inv_freq` (D_r / 2,)
    and `interleaved` are as in `tikv.Rope`.

    Examples:
        >>> rotate(np.array([[1.0, 0.0]]), np.array([1]), [np.pi / 2], dtype=np.float64).round(3).tolist()
        [[0.0, 1.0]]
    """
    angle = np.multiply.outer(np.asarray(moved_by, np.float64).ravel(), np.asarray(inv_freq, np.float64))
    mode, width = "interleaved" if interleaved else "half", rows.shape[-1]
    flat = rows.reshape(-1, 1, width)
    cos, sin = np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)
    rope_dim = 2 * angle.shape[1]
    rotated = norm_rope(flat, range(len(flat)), mode=mode, cos=cos, sin=sin, rope_dim=rope_dim, dtype=dtype)
    result: Array = np.where(np.ravel(moved_by)[:, None, None] == 0, flat.astype(dtype), rotated).reshape(rows.shape)
    return result


def split_qkv(qkv: Array, num_q_heads: int, num_kv_heads: int) -> tuple[Array, Array, Array]:
    """(T, Hq, D), (T, H, D) and (T, H, D) of rows [Q heads | K heads | V heads].

    Examples:
        >>> [part.shape for part in split_qkv(np.zeros((3, 12)), 2, 1)]
        [(3, 2, 3), (3, 1, 3), (3, 1, 3)]
    """
    heads = qkv.reshape(len(qkv), num_q_heads + 2 * num_kv_heads, -1)
    q, k, v = np.split(heads, [num_q_heads, num_q_heads + num_kv_heads], axis=1)
    return q, k, v


def dequantize(q: Array, scale: Array, dtype: Any = np.float32) -> Array:
    """The values that int8 rows stand for, rounded once to `dtype`.

    Examples:
        >>> dequantize(np.int8([[2, -4]]), np.float16([0.5])).tolist()
        [[1.0, -2.0]]
    """
    return encode(q.astype(np.float32) * scale.astype(np.float32)[..., None], dtype)


def hadamard_signs(width: int, seed: int = 0) -> Array:
    """The factor of each column, 1 or -1, by which rows are multiplied before the Hadamard matrix; float32.

    Examples:
        >>> hadamard_signs(8).astype(int).tolist()
        [1, 1, -1, 1, 1, 1, 1, 1]
    """
    signs = []
    for column in range(width):
        x = (column * 0x9E3779B1 + seed * 0x85EBCA77) % 2**32
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            x = (x ^ (x >> shift)) * factor % 2**32
        signs.append(-1 if x >= 2**31 else 1)
    return np.array(signs, np.float32)


def hadamard(rows: Array, seed: int | None = 0, *, back: bool = False, dtype: Any = np.float32) -> Array:
    """Rows (..., D) rotated by signs and a Hadamard matrix, or rotated back, in the arithmetic of `dtype`.

    Blocks of n columns, the largest power of two that divides D, are multiplied by the matrix and by n ** -0.5. Numbers
    below 2**-96 count as 0. With seed None there are no signs.

    Examples:
        >>> hadamard(np.float32([[1.0, 0.0, 0.0, 0.0]])).tolist()
        [[0.5, 0.5, 0.5, 0.5]]
    """
    width = rows.shape[-1]
    n = width & -width
    signs = np.ones(width, dtype) if seed is None else hadamard_signs(width, seed).astype(dtype)
    x = rows.astype(dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        x = np.where(abs(x) < 2.0**-96, x * 0, x)
        x = (x if back else x * signs).reshape(-1, n)
        apart = 1
        while apart < n:
            pairs = x.reshape(-1, n // (2 * apart), 2, apart)
            x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, n)
            apart *= 2
        x = (x * x.dtype.type(n**-0.5)).reshape(rows.shape)
        rotated: Array = x * signs if back else x
    return rotated


_ELEMENTS: dict[str, Any] = {
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}


def _float_groups(x: Array, rule: str, tensor_scale: Any) -> tuple[Array, Array]:
    """The codes and scales of float32 groups (n, group) in a format whose codes are floats, which saturate."""
    element, largest = _ELEMENTS[rule], 448.0 if rule == "mxfp8" else 6.0
    edge = np.where(np.isfinite(x), abs(x), 0).max(1)
    x, edge = (np.divide(a, tensor_scale, dtype=np.float32) for a in (x, edge))
    if rule == "nvfp4":
        scales = np.minimum(edge / np.float32(6), np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        power = np.frexp(edge)[1] - np.frexp(largest)[1]  # puts the largest magnitude in an element's last octave
        scales = np.exp2(np.where(edge < 2.0**-126, -126, np.maximum(power, -126)).astype(np.float32))
    nothing = (edge < 2.0**-100) if rule != "nvfp4" else scales == 0
    y = np.nan_to_num(x, nan=np.nan, posinf=np.finfo(np.float32).max, neginf=-np.finfo(np.float32).max)
    y = np.where(nothing[:, None], y * 0, y / np.where(nothing, 1, scales)[:, None]).astype(np.float32)
    y = np.clip(y, -largest, largest)
    if rule != "mxfp8":
        y = np.where(np.isnan(y), np.float32(0), y)
    return np.where(np.isnan(y), np.uint8(0x7F), y.astype(element).view(np.uint8)), scales


def quantize_groups(
    rows: Array, bits: int, group: int, rule: str, scale_dtype: Any = np.float16, tensor_scale: float = 1.0
) -> tuple[Array, Array, Array | None]:
    """Groups of columns as codes with a scale, and with a bias if the rule is mlx's.

    Args:
        rows: (..., D) float32, float16 or bfloat16.
        bits: bits per code.
        group: columns per group.
        rule: "affine", "q8_0", "q4_0", "mxfp8", "mxfp4" or "nvfp4".
        scale_dtype: dtype of scales and biases; float8_e8m0fnu for mxfp8 and mxfp4, float8_e4m3fn for nvfp4.
        tensor_scale: for nvfp4, the number by which all numbers are divided first.

    Returns:
        (..., D * bits / 32) uint32, (..., D / group) and the same or None.

    Examples:
        >>> words, scales, biases = quantize_groups(np.arange(32, dtype=np.float32) - 8, 8, 32, "affine", np.float32)
        >>> hex(words[0]), scales.tolist(), biases.tolist()
        ('0xe6eef7ff', [-0.12169311940670013], [23.0])
    """
    x = rows.astype(np.float32).reshape(-1, group)
    known, largest = np.isfinite(x), np.finfo(np.float32).max
    biases = None
    with np.errstate(all="ignore"):
        if rule in _ELEMENTS:
            codes, scales = _float_groups(x, rule, np.float32(tensor_scale))
        elif rule == "affine":
            steps = np.float32(2**bits - 1)
            low, high = np.where(known, x, largest).min(1), np.where(known, x, -largest).max(1)
            low, high = (np.where(abs(edge) < 2.0**-126, np.float32(0), edge) for edge in (low, high))
            low, high = (np.where(known.any(1), edge, np.float32(0)) for edge in (low, high))
            by_low = abs(low) > abs(high)
            scales = np.maximum(np.minimum(high - low, largest) / steps, np.float32(1e-7)) * np.where(by_low, 1, -1)
            edge = np.where(by_low, low, high)
            count = np.rint(edge / scales.astype(np.float32))
            whole = (count != 0) & np.isfinite(count)
            scales = np.where(whole, edge / count, scales).astype(np.float32)
            biases = np.where(count != 0, edge, np.float32(0)).astype(np.float32)
            codes = np.clip(np.rint((x - biases[:, None]) / scales[:, None]), 0, steps)
            codes = np.where(np.isnan(x) | (count == 0)[:, None], 0, codes)
        else:
            finite = np.where(known, x, np.float32(0))
            edge = np.take_along_axis(finite, abs(finite).argmax(1)[:, None], 1)[:, 0]
            scales = abs(edge) / np.float32(127) if rule == "q8_0" else edge / np.float32(-8)
            inverse = np.where(abs(edge) < 2.0**-100, 0, 1 / scales).astype(np.float32)[:, None]
            scaled = np.where(np.isnan(x) | (inverse == 0), 0, x * inverse).astype(np.float32)
            if rule == "q8_0":
                near = np.floor(abs(scaled)) + (abs(scaled) % 1 >= 0.5)
                codes = (np.sign(scaled) * np.minimum(near, 127)).astype(np.int64) & 0xFF
            else:
                codes = np.clip(np.trunc(scaled + np.float32(8.5)), 0, 15)
                codes = codes.reshape(-1, 2, 16).swapaxes(1, 2).reshape(x.shape)  # a byte has columns i and i + 16
        cast = [None if a is None else a.astype(scale_dtype).reshape(*rows.shape[:-1], -1) for a in (scales, biases)]
    bit = codes.astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    words = np.packbits(bit.reshape(len(x), -1), axis=1, bitorder="little").view("<u4")
    assert cast[0] is not None
    return words.reshape(*rows.shape[:-1], -1), cast[0], cast[1]


def dequantize_groups(
    words: Array,
    scales: Array,
    biases: Array | None,
    bits: int,
    rule: str,
    dtype: Any = np.float32,
    tensor_scale: float = 1.0,
) -> Array:
    """The numbers that codes of groups stand for, rounded once to `dtype`.

    Examples:
        >>> dequantize_groups(np.uint32([[0x03020100] * 8]), np.float32([[0.5]]), np.float32([[1]]), 8, "affine")[0, :4]
        array([1. , 1.5, 2. , 2.5], dtype=float32)
    """
    bit = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    codes = (bit.reshape(*words.shape[:-1], -1, bits) << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    q: Array = codes.astype(np.float32)
    if rule == "q8_0":
        q = codes.view(np.int8).astype(np.float32)
    elif rule == "q4_0":
        q = codes.reshape(*words.shape[:-1], -1, 16, 2).swapaxes(-1, -2).reshape(codes.shape).astype(np.float32) - 8
    elif rule in _ELEMENTS:
        q = codes.view(_ELEMENTS[rule]).astype(np.float32)
    each = q.shape[-1] // scales.shape[-1]
    with np.errstate(all="ignore"):
        numbers = q * np.repeat(scales.astype(np.float32), each, axis=-1)
        if biases is not None:
            numbers = numbers + np.repeat(biases.astype(np.float32), each, axis=-1)
        if rule == "nvfp4":
            numbers = numbers * np.float32(tensor_scale)
        return encode(numbers.astype(np.float32), dtype)


KVARN_TURNS = 16  # how often a tile is balanced
_LEAST_FACTOR, _MOST_FACTOR = np.float32(np.exp(-0.3)), np.float32(np.exp(10.0))
_TINY, _TINY_DISTANCE = 2.0**-80, 2.0**-60


def _in_turns(x: Array, sums: int) -> Array:
    """The sum over the last axis: so many running sums, each over every n-th number; then halves are added."""
    totals = np.zeros((*x.shape[:-1], sums), x.dtype)
    for first in range(0, x.shape[-1], sums):
        totals += x[..., first : first + sums]
    while totals.shape[-1] > 1:
        totals = np.add(*np.split(totals, 2, axis=-1))
    return totals[..., 0]


def _deviation(x: Array, sums: int) -> Array:
    """The standard deviation (n - 1) over the last axis; distances from the mean below 2**-60 count as 0."""
    n = x.dtype.type(x.shape[-1])
    distance = x - (_in_turns(x, sums) / n)[..., None]
    distance = np.where(abs(distance) < _TINY_DISTANCE, x.dtype.type(0), distance)
    deviation: Array = np.sqrt(_in_turns(np.square(distance), sums) / (n - 1))
    return deviation


def _imbalance(tokens: Array, channels: Array) -> Array:
    """How uneven the deviations (..., n) of tokens and of channels are: 2 if all are equal."""
    least = tokens.dtype.type(1e-8)
    ratios = [a.max(-1) / np.maximum(a.min(-1), least) for a in (tokens, channels)]
    total: Array = ratios[0] + ratios[1]
    return total


def balance(tiles: Array) -> tuple[Array, Array]:
    """The factors of tokens and of channels by which KVarN divides rotated tiles (..., G, D), in their arithmetic.

    KVarN states it with the logarithms of these factors, to which it adds the logarithms of deviations. Here, as in the
    kernels, factors are multiplied by deviations: products, quotients and roots have the same bits on every machine.
    Each of 16 turns multiplies the factors of tokens by the deviations of the balanced tile's tokens, then those of
    channels by the deviations of its channels. The factors with the least imbalance are taken, of equal ones the last.

    Returns:
        (..., G) and (..., D).

    Examples:
        >>> tokens, channels = balance(np.float32([[[1, -1] * 16, [10, -10] * 16] * 32]))
        >>> float(tokens[0, 1] / tokens[0, 0]).__round__(4), channels.shape
        (10.0, (1, 32))
    """
    one = tiles.dtype.type(1)
    low, high = (tiles.dtype.type(edge) for edge in (1e-3, 1e3))
    least, most = (tiles.dtype.type(edge) for edge in (_LEAST_FACTOR, _MOST_FACTOR))
    tokens = np.full(tiles.shape[:-1], one)
    channels = np.full((*tiles.shape[:-2], tiles.shape[-1]), one)

    def deviations() -> tuple[Array, Array]:
        balanced = tiles / tokens[..., None] / channels[..., None, :]
        return _deviation(balanced, 32), _deviation(np.ascontiguousarray(balanced.swapaxes(-1, -2)), 16)

    of_tokens, of_channels = deviations()
    best, least_imbalance = (tokens, channels), _imbalance(of_tokens, of_channels)
    for _ in range(KVARN_TURNS):
        tokens = np.clip(tokens * np.clip(of_tokens, low, high), least, most)
        channels = np.clip(channels * np.clip(deviations()[1], low, high), least, most)
        of_tokens, of_channels = deviations()
        imbalance = _imbalance(of_tokens, of_channels)
        better = imbalance <= least_imbalance
        best = np.where(better[..., None], tokens, best[0]), np.where(better[..., None], channels, best[1])
        least_imbalance = np.where(better, imbalance, least_imbalance)
    return best


def quantize_tiles(rows: Array, bits: int, group: int, of: str) -> tuple[Array, Array, Array, Array]:
    """KVarN's codes of rotated and balanced tiles of `group` tokens.

    A NaN counts as 0, a number beyond float16's largest as that; numbers below 2**-80, rotated or not, count as 0.

    Args:
        rows: (..., T, D) float32, float16 or bfloat16; the group divides T.
        bits: bits per code.
        group: tokens per tile, G.
        of: "keys": the codes of a channel share a scale and a bias, and each token has a factor. "values": the codes of
            a token share them, and each channel has a factor.

    Returns:
        Codes (..., T / G, R, C * bits / 32) uint32, scales and biases (..., T / G, R) and factors (..., T / G, C)
        float16, where R x C are D channels x G tokens for keys, and G tokens x D channels for values.

    Examples:
        >>> codes, scales, biases, factors = quantize_tiles(np.eye(64, dtype=np.float32), 4, 64, "keys")
        >>> codes.shape, scales.shape, factors.shape
        ((1, 64, 8), (1, 64), (1, 64))
    """
    edge = np.float32(np.finfo(np.float16).max)
    x = np.where(np.isnan(rows), np.float32(0), rows.astype(np.float32))
    x = np.clip(np.where(abs(x) < _TINY, np.float32(0), x), -edge, edge)
    x = hadamard(x, None)
    x = np.where(abs(x) < _TINY, np.float32(0), x)
    x = x.reshape(*rows.shape[:-2], -1, group, rows.shape[-1])
    of_rows, of_columns = balance(x)
    x = x / of_rows[..., None] / of_columns[..., None, :]
    if of == "keys":
        x, of_rows, of_columns = np.ascontiguousarray(x.swapaxes(-1, -2)), of_columns, of_rows
    low, last = x.min(-1), np.float32(2**bits - 1)
    scale = np.maximum((x.max(-1) - low) / last, np.float32(1e-10))
    codes = np.clip(np.rint((x - low[..., None]) / scale[..., None]), 0, last).astype(np.uint8)
    bit = codes[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    words = np.packbits(bit.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little").view("<u4")
    numbers = [np.clip(a, -edge, edge).astype(np.float16) for a in (scale * of_rows, low * of_rows, of_columns)]
    return words, numbers[0], numbers[1], numbers[2]


def dequantize_tiles(
    words: Array, scales: Array, biases: Array, factors: Array, bits: int, of: str, dtype: Any = np.float32
) -> Array:
    """The rows (..., T, D) that tiles stand for, rotated back and rounded once to `dtype`.

    Examples:
        >>> tiles = quantize_tiles(np.eye(64, dtype=np.float32), 8, 64, "values")
        >>> float(abs(dequantize_tiles(*tiles, 8, "values") - np.eye(64)).max()) < 0.01
        True
    """
    bit = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    codes = (bit.reshape(*words.shape[:-1], -1, bits) << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    scales, biases, factors = (a.astype(np.float32) for a in (scales, biases, factors))
    x = (codes.astype(np.float32) * scales[..., None] + biases[..., None]) * factors[..., None, :]
    if of == "keys":
        x = x.swapaxes(-1, -2)
    x = np.ascontiguousarray(x).reshape(*x.shape[:-3], -1, x.shape[-1])
    return encode(hadamard(x, None, back=True), dtype)


class History:
    """Every token that one layer of one sequence was ever given, and which of them a cache can still hold.

    Args:
        capacity: slots of a linear layer.
        window: slots of a sliding layer, its sinks included; None for a linear one.
        sinks: leading tokens that stay.

    Examples:
        >>> layer = History(capacity=4, window=3, sinks=1)
        >>> layer.append("abcde")
        >>> layer.kept(), layer.length
        (['a', 'd', 'e'], 5)
        >>> layer.trim(1)
        >>> layer.kept()
        ['a', 'd']
    """

    def __init__(self, capacity: int, window: int | None = None, sinks: int = 0) -> None:
        self.capacity, self.window, self.sinks = capacity, window, sinks
        self._tokens: list[Any] = []
        self._oldest = sinks

    @property
    def length(self) -> int:
        """The number of tokens appended since the start, less those trimmed."""
        return len(self._tokens)

    def append(self, tokens: Sequence[Any] | Array) -> None:
        """Add tokens in order."""
        if self.window is None and self.length + len(tokens) > self.capacity:
            raise ValueError(f"History: {self.length} + {len(tokens)} tokens > capacity={self.capacity}")
        self._tokens.extend(tokens)
        if self.window is not None:
            self._oldest = max(self._oldest, self.length - (self.window - self.sinks))

    def trim(self, n: int) -> None:
        """Drop the `n` newest tokens; tokens that the ring has overwritten stay lost."""
        if n:
            del self._tokens[-n:]

    def kept(self) -> list[Any]:
        """The tokens a cache still holds, in temporal order."""
        if self.window is None:
            return list(self._tokens)
        return self._tokens[: self.sinks] + self._tokens[self._oldest :]


def visible_positions(
    length: int,
    query: int,
    queries: int = 1,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    held: int | None = None,
    first_valid: int = 0,
) -> list[int]:
    """The positions that query `query` of `queries` sees in a sequence of `length` tokens, oldest first.

    Args:
        length: tokens of the sequence, the newest included.
        query: which of the newest tokens has the query.
        queries: how many of the newest tokens have queries.
        causal: False lets each see what the newest sees.
        window: tokens a query sees, itself and the sinks included.
        sinks: first tokens that the window leaves visible.
        held: slots of a ring, sinks included, which holds no older tokens; None for a linear cache.
        first_valid: oldest position after the sinks that is still stored.

    Examples:
        >>> visible_positions(7, 1, 2, window=3, sinks=1), visible_positions(7, 0, 2, window=3, sinks=1)
        ([0, 5, 6], [0, 4, 5])
    """
    last = length - queries + query if causal else length - 1
    tokens = list(range(last + 1))
    fixed, rest = tokens[:sinks], tokens[sinks:]
    if window is not None:
        rest = rest[-(window - sinks) :]
    if held is not None:
        rest = [p for p in rest if p >= length - (held - sinks)]
    return fixed + [p for p in rest if p >= first_valid]


def tree_mask(parents: Sequence[int] | Array) -> Array:
    """Which of the new tokens each sees, (T, T): itself and its ancestors; `parents[t]` comes before t, or is -1.

    Examples:
        >>> tree_mask([-1, 0, 0]).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    mask = np.eye(len(parents), dtype=bool)
    for t, parent in enumerate(parents):
        if parent >= 0:
            mask[t] |= mask[parent]
    return mask


def visible_in_tree(
    length: int, query: int, mask: Array, *, window: int | None = None, sinks: int = 0
) -> tuple[list[int], list[int]]:
    """(tokens that a query sees, the positions they count as), in a sequence of `length` whose last T are a tree.

    The depth of a new token is the number of new tokens that it sees besides itself; for a query, at most its own.

    Args:
        length: tokens of the sequence, the new ones included.
        query: which of the new tokens has the query.
        mask: (T, T), which of the new tokens each sees.
        window, sinks: as in `visible_positions`.

    Examples:
        >>> visible_in_tree(5, 2, tree_mask([-1, 0, 0]))
        ([0, 1, 2, 4], [0, 1, 2, 3])
    """
    first = length - len(mask)
    depths = np.maximum(mask.sum(axis=1) - 1, 0)
    query_position = first + int(depths[query])
    tokens = list(range(first)) + [first + int(t) for t in np.flatnonzero(mask[query])]
    positions = [p if p < first else min(query_position, first + int(depths[p - first])) for p in tokens]
    seen = [i for i, p in enumerate(positions) if window is None or p < sinks or p > query_position - (window - sinks)]
    return [tokens[i] for i in seen], [positions[i] for i in seen]


def query_codes(q: Array, dtype: Any) -> tuple[Array, float]:
    """(codes of a query of the dtype int8 or float8_e4m3fn, their factor), as `tikv.init(attention_bits=8)` has them.

    The largest number becomes the largest code, 127 or 448. Others are multiplied in float32 by that code over that
    number, and rounded to the nearest, ties to even.

    Examples:
        >>> query_codes(np.array([254.0, -3.0, 0.0]), np.int8)
        (array([127,  -2,   0], dtype=int8), 2.0)
    """
    q, integers = q.astype(np.float32), np.dtype(dtype) == np.int8
    top, largest = np.abs(q).max(), np.float32(127 if integers else 448)
    steps = q * (largest / top) if top else q
    return (np.rint(steps) if integers else steps).astype(dtype), float(top / largest)


def attention(
    q: Array,
    keys: Array,
    values: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logit: float | None = None,
    bias: Array | float = 0.0,
    code_dtype: Any = None,
) -> tuple[Array, float]:
    """Attention of one query over the keys it sees, by a plain softmax in float64: (result, natural log-sum-exp).

    A score that is NaN or infinity makes both results NaN, as inf - inf does. A score of -infinity has weight 0, and if
    all are, the log-sum-exp is -infinity. 0 times a value that is NaN or infinite is NaN.

    Args:
        q: (D,).
        keys, values: (n, D) and (n, D_v); if n is 0, the result is 0 and -inf.
        scale: factor of q.k.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sink_logit: the logit of one more key, which has no value; None or -inf for no such key.
        bias: (n,), added to the scores after all else, such as ALiBi's `slope * (key position - query position)`.
        code_dtype: int8 or float8_e4m3fn, in which keys and values are stored, for what `tikv.init(attention_bits=8)`
            computes: q becomes `query_codes`, and over float8_e4m3fn weights become codes too, up to 2 ** 8, but not in
            their sum. Kernels may take up to 2 ** 8.8 instead, so that codes are rounded at other places.

    Examples:
        >>> attention(np.ones(1), np.zeros((2, 1)), np.array([[1.0], [3.0]]), scale=1.0)[0].tolist()
        [2.0]
    """
    if code_dtype is not None:
        codes, factor = query_codes(q, code_dtype)
        q = codes.astype(np.float64) * factor
    with np.errstate(invalid="ignore"):
        scores = scale * (keys.astype(np.float64) @ q.astype(np.float64))
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        scores, values = scores + bias, values.astype(np.float64)
        if sink_logit is not None:
            scores, values = np.append(scores, sink_logit), np.pad(values, ((0, 1), (0, 0)))
        if np.isneginf(scores).all():
            return np.zeros(len(scores)) @ values, -np.inf
        weights = np.exp(scores - scores.max())
        total, lse = weights.sum(), float(scores.max() + np.log(weights.sum()))
        if code_dtype is not None and np.dtype(code_dtype) != np.int8:
            weights = (weights * 256).astype(np.float32).astype(code_dtype).astype(np.float64) / 256
        return weights @ values / total, lse


def summarize_pages(keys: Array, length: int, page: int) -> tuple[Array, Array]:
    """The least and the greatest number in each column of `keys` (S, D), for each page of the first `length` rows.

    -0 is less than 0. If a column has a NaN, both are NaN; a page without rows has 0 in both.

    Examples:
        >>> [a.ravel().tolist() for a in summarize_pages(np.array([[3.0], [1.0], [2.0]]), 3, 2)]
        [[1.0, 2.0], [3.0, 2.0]]
    """
    pages = -(-len(keys) // page)
    least, greatest = np.zeros((2, pages, keys.shape[1]), keys.dtype)
    for n in range(-(-length // page)):
        rows = keys[n * page : min((n + 1) * page, length)]
        zero, below = rows == 0, np.signbit(rows)
        nan = np.isnan(rows).any(axis=0)
        there = np.where(nan, np.zeros(1, keys.dtype), rows)
        low, high = there.min(axis=0), there.max(axis=0)
        low = np.where((low == 0) & (zero & below).any(axis=0), -np.zeros(1, keys.dtype), low)
        high = np.where((high == 0) & (zero & ~below).any(axis=0), np.zeros(1, keys.dtype), high)
        least[n], greatest[n] = (np.where(nan, np.array(np.nan, keys.dtype), a) for a in (low, high))
    return least, greatest


def page_scores(queries: Array, least: Array, greatest: Array) -> Array:
    """The most that a key of each page can score, summed over `queries` (n, D); summaries are (P, D); in float64.

    Examples:
        >>> page_scores(np.array([[1.0], [-1.0]]), np.array([[1.0]]), np.array([[3.0]])).tolist()
        [2.0]
    """
    q = queries.astype(np.float64)[:, None]
    scores: Array = (q * np.where(q > 0, greatest.astype(np.float64), least.astype(np.float64))).sum(axis=(0, 2))
    return scores


def budget(scores: Array, total: int, *, least: int = 0, sinks: int = 0, recent: int = 0) -> Array:
    """The mask of the tokens that one sequence keeps, from scores (rows, S) of its layers' heads, by a stable sort.

    Examples:
        >>> budget(np.array([[3.0, 1.0], [2.0, 2.0]]), 2).tolist(), budget(np.array([[3.0, 2.0]]), 1, recent=1).tolist()
        ([[True, False], [True, False]], [[False, True]])
    """
    tokens, mask = scores.shape[1], np.zeros(scores.shape, bool)
    for row, of_row in enumerate(scores):
        always = sum(t < sinks or t >= tokens - recent for t in range(tokens))
        if k := min(max(least, always), tokens):
            mask[row, select(of_row, k, tokens, sinks=sinks, recent=recent)] = True
    ranks = []
    for row, token in np.ndindex(*scores.shape):
        score = scores[row, token]
        if mask[row, token] or score != -np.inf:
            value = 0.0 if np.isnan(score) else -float(score)
            ranks.append((not mask[row, token], not np.isnan(score), 0.0 if mask[row, token] else value, token, row))
    for *_, token, row in sorted(ranks)[:total]:
        mask[row, token] = True
    return mask


def select(scores: Array, k: int, valid: int, *, page: int = 1, sinks: int = 0, recent: int = 0) -> list[int]:
    """The tokens of the k highest scores in a row, by a stable sort, with those that are always kept; ascending.

    Examples:
        >>> select(np.array([0.5, 3.0, 3.0]), 1, 3), select(np.array([0.5, 3.0]), 1, 3, page=2, recent=1)
        ([1], [2])
    """
    ranks = []
    for entry, score in enumerate(scores):
        tokens = range(entry * page, min((entry + 1) * page, valid))
        always = any(token < sinks or token >= valid - recent for token in tokens)
        if tokens and (always or score != -np.inf):
            ranks.append((not always, not np.isnan(score), 0.0 if np.isnan(score) else -float(score), entry))
    selected = sorted(rank[-1] for rank in sorted(ranks)[:k])
    return [token for entry in selected for token in range(entry * page, min((entry + 1) * page, valid))]
