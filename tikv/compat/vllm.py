"""vLLM's cache operations: `reshape_and_cache_flash`, `reshape_and_cache`, `copy_blocks`, `swap_blocks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.compat.indices import refuse_option
from tikv.dtypes import DType, float8_e4m3fn, float8_e5m2, to_torch
from tikv.errors import DTypeError, ShapeError
from tikv.ops import blocks, paged

FLOATS8 = {"fp8": float8_e4m3fn, "fp8_e4m3": float8_e4m3fn, "fp8_e5m2": float8_e5m2}
OFFERED = "'auto', 'fp8', 'fp8_e4m3', 'fp8_e5m2', or 'int8' with a scale per token and head"


def _pool_of_bytes(pool: Any, dtype: DType, name: str, operation: str) -> Any:
    """A pool as one of 8-bit floats: as it is, or a view of vLLM's bytes.

    Raises:
        DTypeError: it is neither.
    """
    given = str(pool.dtype).removeprefix("torch.")
    if given == dtype.name:
        return pool
    if given != "uint8":
        raise DTypeError(f"{operation}: {name} is {given}. Pass uint8 or {dtype.name}.")
    return pool.view(dtype.numpy if isinstance(pool, np.ndarray) else to_torch(dtype.name))


def _write(operation: str, layout: str, *arguments: Any) -> None:
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale = arguments
    if kv_cache_dtype not in ("auto", "int8", *FLOATS8):
        refuse_option(operation, kv_cache_dtype=(kv_cache_dtype, OFFERED))
    tokens = len(slot_mapping)  # rows behind these are padding
    scales = {"k_scale": k_scale, "v_scale": v_scale} if kv_cache_dtype == "int8" else {}
    if kv_cache_dtype in FLOATS8:
        dtype = FLOATS8[kv_cache_dtype]
        key_cache = _pool_of_bytes(key_cache, dtype, "key_cache", operation)
        value_cache = _pool_of_bytes(value_cache, dtype, "value_cache", operation)
        if k_scale is not None or v_scale is not None:
            scales = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
    paged.write_slots(key[:tokens], value[:tokens], key_cache, value_cache, slot_mapping, layout=layout, **scales)


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Write keys and values into paged caches by slot: vLLM's function of that name.

    Args:
        key, value: (T, H, D), any strides between tokens; rows behind ``len(slot_mapping)`` are padding.
        key_cache, value_cache: (N, bs, H, D), contiguous or a transposed view of (N, H, bs, D).
        slot_mapping: integers; below 0 skips.
        kv_cache_dtype: "auto", which stores the bits, or rounds float32 to a narrower cache; "fp8" or "fp8_e4m3", and
            "fp8_e5m2", into caches of uint8 or of that dtype; or "int8", which writes the scales.
        k_scale, v_scale: not read for "auto"; for fp8 a number, an array of one, or (H,): what is stored is
            ``row / scale``, saturating; for "int8" (N, bs, H), written.

    Raises:
        OptionError: another kv_cache_dtype.
        PositionError, ShapeError, DTypeError: as `tikv.write_slots`.

    Exactness, cost: as `tikv.write_slots`.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import vllm
        >>> k_cache, v_cache = np.zeros((2, 1, 4, 1, 2), np.float32)
        >>> rows = np.ones((2, 1, 2), np.float32)
        >>> vllm.reshape_and_cache_flash(rows, rows, k_cache, v_cache, np.array([2, -1]))
        >>> k_cache[0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """
    given = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    _write("vllm.reshape_and_cache_flash", "NHD", *given)


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """The same into vLLM's older layout: keys (N, H, D/x, bs, x) with x elements in 16 bytes, values (N, H, D, bs)."""
    given = (key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    _write("vllm.reshape_and_cache", "VLLM", *given)


def copy_blocks(key_caches: Sequence[Any], value_caches: Sequence[Any], block_mapping: Any) -> None:
    """Copy blocks within the caches of every layer.

    Args:
        key_caches, value_caches: one pool a layer.
        block_mapping: (P, 2) integers: from, to.

    Raises:
        ShapeError: the lists have different lengths, or the pools different numbers of blocks.
        PositionError: a block outside the pools, or of one pair the source and of another the destination.

    Cost: one launch a layer.
    """
    counts = [cache.shape[0] for cache in (*key_caches, *value_caches)]
    if len(key_caches) != len(value_caches) or len(set(counts)) > 1:
        raise ShapeError(
            f"vllm.copy_blocks: {len(key_caches)} key caches and {len(value_caches)} value caches of {counts} blocks. "
            f"Pass one of each a layer, all of as many blocks."
        )
    for k_cache, v_cache in zip(key_caches, value_caches, strict=True):
        blocks.copy_blocks(k_cache, v_cache, block_mapping)


def swap_blocks(src: Any, dst: Any, block_size_in_bytes: Any = None, block_mapping: Any = None) -> None:
    """Copy blocks from one pool to another, on the same device or between device and host.

    Args:
        src, dst: pools of one shape behind the first axis.
        block_size_in_bytes: of a block, checked; or the mapping itself, as older versions take it third.
        block_mapping: (P, 2) integers: from, to.

    Raises:
        OptionError: the size is not that of a block of these pools.
        ShapeError: there is no mapping; or as `tikv.swap_blocks`, like all else.
    """
    operation = "vllm.swap_blocks"
    if block_mapping is None:
        if block_size_in_bytes is None:
            raise ShapeError(f"{operation}: block_mapping is missing. Pass (P, 2) pairs of blocks: from, to.")
        block_size_in_bytes, block_mapping = None, block_size_in_bytes
    if block_size_in_bytes is not None:
        itemsize = src.dtype.itemsize
        actual = itemsize
        for extent in src.shape[1:]:
            actual *= extent
        if int(block_size_in_bytes) != actual:
            refuse_option(
                operation, block_size_in_bytes=(block_size_in_bytes, f"{actual}, the bytes of a block of src")
            )
    blocks.swap_blocks(src, dst, block_mapping)
