"""Attention over the keys that a model chose for each query: only their rows are read.

A model passes its choice to the attention function as numbers of keys (`indices`), as numbers of blocks of keys
(`block_indices`), or as a mask that hides all other keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tikv.integrations.transformers.attention.latents import attend_latents, keep_latents, latents_of, made_of_latents
from tikv.integrations.transformers.memory.stored import attend_in_place
from tikv.ops.attention.request import AttendRequest

FEW = 32  # queries for which chosen rows are always read; keys and values of all latents cost as much as those of more
# For more queries, chosen rows are read if there are at least this many keys per chosen one: each query reads its own,
# without tensor cores or over longer latents. At 8 that takes a twelfth of torch's masked attention on a CPU, for 64
# queries.
LONGER, LONGER_ON_CPU = 8, 2

_TOLD = {(), ("indices",), ("block_indices",)}


def chosen_keys(
    module: Any,
    query: torch.Tensor,
    key: Any,
    mask: Any,
    causal: bool,
    said: Sequence[str],
    keywords: Mapping[str, Any],
) -> Any:
    """The keys that each query reads, (batch, T, K) or (batch, KV heads, T, K) int32, -1 for none.

    None if the model's choice is not certain, or if they are too many to be read one by one: then the mask is used.

    Args:
        module, query, key: as in `attend`.
        mask: bool or additive, with causality included; or None.
        causal: whether, without a mask, a query sees only the keys up to itself.
        said: the given keywords that change scores.
        keywords: all given keywords.
    """
    indexer: Any = getattr(module, "indexer", module)  # None in layers that reuse another layer's choice
    if tuple(said) not in _TOLD or (not said and (indexer is module or mask is None)):
        return None
    keep_latents(type(module))
    (batch, _, tokens, _), (heads, held) = query.shape, key.shape[1:3]
    seen = None
    if mask is not None:
        seen = _seen(mask)
        if seen is None or mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-1] != held:
            return None
        seen = seen[:, 0].expand(batch, tokens, held)
    if not said:
        return _keys_seen(seen, query, key)
    if "indices" in said:
        numbers = keywords["indices"].long()
        if numbers.shape[:-1] != (batch, tokens):
            return None
    else:
        numbers = _keys_of_blocks(indexer, keywords["block_indices"])
        if numbers is None or numbers.shape[:-1] != (batch, heads, tokens):
            return None
    if not _few(query, key, numbers.shape[-1]):
        return None
    there = (numbers >= 0) & (numbers < held)
    if seen is not None:
        seen = seen if numbers.ndim == 3 else seen[:, None].expand(batch, heads, tokens, held)
        there &= seen.gather(-1, torch.where(there, numbers, 0))
    elif causal:
        newest = torch.arange(held - tokens, held, device=query.device)
        if "block_indices" in said and keywords.get("position_ids") is not None:  # by which the model masks these
            newest = keywords["position_ids"].expand(batch, tokens)[:, None]
        there &= numbers <= newest[..., None]
    numbers = torch.where(there, numbers, -1).int().sort(-1).values
    again = numbers[..., 1:] == numbers[..., :-1]  # a mask would count these once
    numbers[..., 1:].masked_fill_(again, -1)
    return numbers


def _seen(mask: Any) -> Any:
    """Which keys a mask leaves visible, bool; None if it does more than hide keys."""
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()) else None


def _keys_seen(seen: Any, query: torch.Tensor, key: Any) -> Any:
    """The numbers of the keys that a (batch, T, n) mask leaves visible; None if too many, or more than half."""
    most = int(seen.sum(-1).amax())
    if 2 * most > key.shape[2] or not _few(query, key, most):
        return None
    numbers = torch.full((*seen.shape[:2], max(most, 1)), -1, dtype=torch.int32, device=seen.device)
    batch, token, number = seen.nonzero(as_tuple=True)
    numbers[batch, token, seen.cumsum(-1)[batch, token, number] - 1] = number.int()
    return numbers


def _keys_of_blocks(indexer: Any, blocks: Any) -> Any:
    """The keys in blocks (batch, heads, T, k) of the size that the indexer declares; None if it declares none."""
    size = getattr(indexer, "block_size", None)
    if not isinstance(size, int) or not hasattr(indexer, "build_block_mask"):
        return None
    keys = blocks[..., None] * size + torch.arange(size, device=blocks.device)
    return torch.where(blocks[..., None] < 0, -1, keys).flatten(-2)


def _few(query: torch.Tensor, key: Any, rows: int) -> bool:
    """Whether reading this many rows for each query is faster than attention to all keys with a mask."""
    if query.shape[2] <= FEW:
        return True
    longer = LONGER_ON_CPU if query.is_cpu and not made_of_latents(key) else LONGER
    return rows * longer <= int(key.shape[2])


def attend_chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, numbers: Any, request: AttendRequest
) -> Any:
    """Attention to the keys that `chosen_keys` returned: (batch, T, heads, head_dim_v)."""
    latents = latents_of(key, value)
    if latents is not None and numbers.ndim == 3:
        return attend_latents(query, latents, numbers, request)
    request = request._replace(causal=False, indices=numbers)
    return attend_in_place(query, key, value, request).transpose(1, 2)
