"""What a `TikvCache` with ``max_cache_len`` will need, compared with the memory that there is, before it is allocated.

Its layers allocate theirs one by one, and only their first tokens say how many sequences there are. So the cache
compares twice: when it is made, for one sequence of the model's configuration; and with the first tokens of each kind
of layers, whose shape and device are then known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tikv import dtypes, runtime
from tikv.errors import CapacityError
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.names import CACHE
from tikv.stores.picture import counted, size_in_words
from tikv.stores.row_format import RowFormat


def bytes_of(layers: Sequence[Any], shape: tuple[int, int, int, int], storage: Storage, dtype: str) -> int:
    """The least bytes of layers with a limit: (batch, heads, width of K, width of V) in a model of this dtype."""
    batch, heads, *widths = shape
    model = dtypes.parse(dtype, CACHE)
    rows = [RowFormat(stored or model, n) for stored, n in zip((storage.k, storage.v), widths, strict=True)]
    slots = sum(min(n for n in (layer.limit, layer.sliding_window) if n is not None) for layer in layers)
    needed: int = batch * heads * slots * sum(row.nbytes for row in rows)
    return needed


def require_for_one(layers: Sequence[Any], storage: Storage, text: Any, on_host: bool) -> None:
    """Check that there is memory for one sequence of a model with this configuration, as far as it gives the sizes.

    Raises:
        CapacityError: there is not.
    """
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    queries, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    width = getattr(text, "head_dim", None) or getattr(text, "d_kv", None)
    if width is None and isinstance(queries, int) and isinstance(hidden, int):
        width = hidden // queries
    if not isinstance(heads, int) or not isinstance(width, int) or hasattr(text, "kv_lora_rank"):
        return  # layers differ, or keys are latents
    archs = ["cpu"] if on_host else ["cpu", "cuda"]
    if not on_host and runtime.is_started():
        archs = [runtime.current().arch]
    sizes = {arch: size for arch in archs if (size := runtime.memory_bytes(arch)) is not None}
    if sizes:
        arch = max(sizes, key=sizes.__getitem__)
        _compare(bytes_of(layers, (1, heads, width, width), storage, "float16"), 1, len(layers), arch, sizes[arch])


def require_for_batch(
    layers: Sequence[Any], storage: Storage, keys: torch.Tensor, values: torch.Tensor, before: int, on_host: bool
) -> int:
    """The bytes that these layers need, which have tokens of one shape, added to those that others need.

    Raises:
        CapacityError: the device has less.
    """
    if keys.ndim != 4 or values.ndim != 4:
        return before  # the layer says what is wrong
    shape = (*keys.shape[:2], keys.shape[3], values.shape[3])
    needed = before + bytes_of(layers, shape, storage, str(keys.dtype))
    device: torch.device = keys.device
    arch = "cuda" if device.type == "cuda" and not on_host else "cpu"
    limit = runtime.memory_bytes(arch, device.index or 0 if arch == "cuda" else 0)
    if limit is not None:
        _compare(needed, shape[0], len(layers), arch, limit)
    return needed


def _compare(needed: int, batch: int, layers: int, arch: str, limit: int) -> None:
    if needed > limit:
        raise CapacityError(
            f"{CACHE}: {counted(layers, 'layer')} for {counted(batch, 'sequence')} of max_cache_len tokens need "
            f"{needed} bytes ({size_in_words(needed)}), and {arch} has {limit} bytes of memory in all "
            f"({size_in_words(limit)}). Use a smaller max_cache_len, or a dtype of fewer bits."
        )
