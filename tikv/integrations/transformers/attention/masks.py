"""The masks of attention "tikv": left out where attention knows what each query sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tikv.integrations.transformers.attention.prompts import is_invariant, prompt_mask, window_of
from tikv.integrations.transformers.memory import steps
from tikv.integrations.transformers.versions.masks import MASKS_BY_VMAP, MASKS_PROMPTS_OF_COMPILED, query_length


def mask_for_attend(*args: Any, **kwargs: Any) -> Any:
    """The mask that torch's attention would get; None too if a single query sees every key, as with a window.

    Several queries that are the newest tokens get a `PromptMask`, of which `attend` knows what they see. It is also
    made for a prompt in memory with room for more: without a mask, torch's attention would let its queries see the
    first keys, while `attend` assumes that queries are the newest.
    """
    made = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    tokens = query_length(kwargs["q_length"] if "q_length" in kwargs else kwargs["cache_position"])
    offset = kwargs["kv_offset"]
    if isinstance(offset, (steps.SlotsOffset, torch.Tensor)):
        return _mask_of_slots(made, tokens, **kwargs)
    may_skip = kwargs.get("allow_is_causal_skip", True)
    if isinstance(offset, steps.KnownOffset) and (tokens == 1 or MASKS_PROMPTS_OF_COMPILED) and not may_skip:
        # The caller never skips the mask for a cache whose steps may be compiled; here it is known when it may.
        kwargs["allow_is_causal_skip"] = may_skip = window_of(kwargs["mask_function"]) is not None
    if may_skip and tokens not in (1, kwargs["kv_length"]):
        kwargs["allow_is_causal_skip"] = False
    if tokens > 1 and not args and not _is_traced():
        prompt = prompt_mask(lambda: made(**kwargs | {"allow_is_causal_skip": False}), **kwargs)
        if prompt is not None:
            all_seen = prompt.window is None or prompt.window >= kwargs["kv_length"]
            if all_seen and may_skip and tokens == kwargs["kv_length"]:
                return None
            if not kwargs.get("use_vmap", MASKS_BY_VMAP):
                return prompt
            if all_seen and is_invariant():
                return None  # `attend` knows what each of several newest queries sees
    mask = made(*args, **kwargs)
    if mask is None or not may_skip or mask.shape[-2] != 1 or mask.dtype != torch.bool or _is_traced():
        return mask
    return None if bool(mask.all()) else mask


def _mask_of_slots(
    made: Any,
    tokens: int,
    *,
    kv_offset: Any,
    kv_length: int,
    mask_function: Any,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """The mask for all slots of a layer whose steps are compiled, from the position in each slot.

    If one token sees all that is written, the mask is marked: attention then reads what is stored and ignores the mask,
    unless a model has made other keys of all slots, which need it. See `mask_for_attend` about skipped masks.
    """
    traced, in_step, padding, counted = _is_traced(), isinstance(kv_offset, torch.Tensor), attention_mask, None
    starts = getattr(padding, "tikv_starts", None) if in_step else None
    if not traced:
        allow_is_causal_skip = window_of(mask_function) is not None
        padding = None if padding is None or (not in_step and bool(padding.all())) else padding
    device = kwargs["device"] if "device" in kwargs else kwargs["cache_position"].device
    if isinstance(kv_offset, steps.SlotsOffset):
        counted, newest = kv_offset.counted, kv_offset.end - 1
        where = counted.positions(kv_offset.end)
        if padding is not None and counted.starts is not None and _begin_at(counted.starts, padding[:, : newest + 1]):
            padding = None  # the padding has no slots
    else:
        counted = getattr(kv_offset, "tikv_counted", None)
        where = torch.arange(kv_length, device=device) + kv_offset
        if starts is not None and counted is not None and counted.starts is not None:
            padding = None  # as above
        newest = kwargs["q_offset"] + tokens - 1 if "q_offset" in kwargs else kwargs["cache_position"][-1]
    where = where.to(device)
    if tokens == 1 and padding is None and allow_is_causal_skip:
        seen = where <= newest
        if counted is not None and counted.window:
            seen = seen & (where > newest - counted.window)
        # Contiguous, since `generate` copies other masks, and the mark would be lost.
        shape = kwargs["batch_size"], 1, 1, kv_length
        mask = (seen if seen.ndim == 1 else seen[:, None, None]).expand(shape).contiguous()
        mask.tikv_of_slots = counted
        return mask
    if padding is not None and padding.shape[1] < kv_length:
        padding = torch.nn.functional.pad(padding, (0, kv_length - padding.shape[1]))

    def sees(batch: Any, head: Any, query: torch.Tensor, key: Any) -> Any:
        position = where[key] if where.ndim == 1 else where[batch, key]
        seen = mask_function(batch, head, query, position) & (position <= newest)
        return seen if padding is None else seen & padding[batch, position.clamp(min=0, max=padding.shape[1] - 1)]

    mask = made(
        kv_offset=0, kv_length=kv_length, mask_function=sees, attention_mask=None, allow_is_causal_skip=False, **kwargs
    )
    in_order = not traced and counted is not None and not counted.ring
    if padding is not None and tokens == 1 and in_order and allow_is_causal_skip:
        starts = starts if in_step else starts_of(padding[:, : newest + 1])
        if starts is not None:
            mask.tikv_starts = starts.to(device)  # attention reads only what is stored after the padding
    if (
        traced
        or in_step
        or padding is not None
        or tokens > 1
        or mask.dtype != torch.bool
        or counted is None
        or counted.hides
    ):
        return mask  # kept even if a window has no padding left: torch would compile again
    if bool((mask | (where > newest)).all()):
        mask.tikv_of_slots = counted
    return mask


def _begin_at(starts: torch.Tensor, padding: Any) -> bool:
    """Whether a mask (batch, n) of all tokens so far hides what is before each row's start, and nothing else."""
    positions = torch.arange(padding.shape[1], device=padding.device)
    return bool((padding.bool() == (positions >= starts[:, None].to(padding.device))).all())


def starts_of(padding: Any) -> Any:
    """(batch,) the first token of each sequence, if all padding is on the left; else None.

    `padding` is (batch, n) for all tokens so far, True where a token is seen.
    """
    starts = padding.int().argmax(1)
    behind = torch.arange(padding.shape[1], device=padding.device) >= starts[:, None]
    return starts if bool((padding == behind).all()) else None
