"""The bytes that an operation has to move, and how near a measured time comes to a measured roof.

A GB is 10**9 bytes. Bytes are counted once when read and once when written, whatever the machine's caches do.
"""

from __future__ import annotations

from tikv.dtypes import DType


def bytes_moved(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    src: DType,
    cache: DType,
    *,
    head_dim_v: int | None = None,
    streams: int = 2,
    num_layers: int = 1,
) -> int:
    """Bytes that a copy of new rows into a cache reads and writes.

    Args:
        num_tokens: rows that are stored; with a window at most `window` of those given.
        num_kv_heads: heads of each row.
        head_dim: elements of a head of K, or of the only stream.
        src: storage type of the rows.
        cache: storage type of the cache.
        head_dim_v: elements of a head of V; None for `head_dim`.
        streams: 2 for K and V, 1 for one of them.
        num_layers: layers written.

    Returns:
        Bytes read from the rows plus bytes written to the cache.

    Examples:
        >>> from tikv import dtypes
        >>> bytes_moved(1, 8, 128, dtypes.float32, dtypes.float16)
        12288
    """
    width = head_dim if streams == 1 else head_dim + (head_dim if head_dim_v is None else head_dim_v)
    return num_layers * num_tokens * num_kv_heads * width * (src.itemsize + cache.itemsize)


def gb_per_s(num_bytes: int, seconds: float) -> float:
    """Gigabytes (10**9 bytes) per second.

    Examples:
        >>> gb_per_s(2_000_000, 1e-3)
        2.0
    """
    return num_bytes / seconds / 1e9


def percent_of(rate: float, roof: float) -> float:
    """A rate as a percentage of a roof in the same unit.

    Examples:
        >>> percent_of(3.0, 4.0)
        75.0
    """
    return 100.0 * rate / roof
