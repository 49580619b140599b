"""Prompts whose queries are the newest tokens: masks that are made when something reads them, and attention without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers.masking_utils import causal_mask_function

from tikv import runtime
from tikv.integrations.transformers.memory import steps
from tikv.integrations.transformers.memory.stored import StoredTensor, attend_in_place, decoded, in_rows
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import ContiguousLayout
from tikv.ops.attention.request import AttendRequest


class PromptMask(StoredTensor):
    """The mask of queries that are the newest tokens, each of which sees the keys up to itself, or a window of them.

    Attention that knows that needs no mask. Whatever else uses this tensor finds the bools, which are made then.
    """

    window: int | None  # how many tokens a query sees, itself and the sinks included; None for all
    sinks: int  # how many of the first keys every query sees


class _Mask:
    """A mask that is made when it is read, once for all layers."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made = make, None

    def numbers(self) -> tuple[Any]:
        """The mask, as the only one of a tuple."""
        if self._made is None:
            self._made = self._make()
        return (self._made,)


def prompt_mask(
    make: Callable[[], Any],
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: Any,
    mask_function: Any,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> PromptMask | None:
    """The mask that `make` makes, if it only says that the queries are the newest tokens; else None.

    Args:
        make: makes the mask, (batch, 1, T, n) bools.
        batch_size, kv_length, kv_offset, mask_function, attention_mask, **kwargs: as in transformers' mask functions.
    """
    window = window_of(mask_function)
    if window is None:
        return None
    if "q_offset" in kwargs:
        first, tokens, device = int(kwargs["q_offset"]), kwargs["q_length"], kwargs["device"]
    else:  # older versions of transformers
        positions: Any = kwargs["cache_position"]
        first, tokens, device = int(positions[0]), positions.shape[0], positions.device
    if first + tokens != int(kv_offset) + kv_length:
        return None
    if attention_mask is not None and not bool(attention_mask.all()):
        return None
    sinks = 0
    if isinstance(kv_offset, steps.StreamedOffset):
        if window or kv_offset.map.ring or kv_offset.map.starts is not None:
            return None
        window, sinks = kv_offset.window, kv_offset.map.sinks
    shape = batch_size, 1, tokens, kv_length
    mask: PromptMask = torch.Tensor._make_wrapper_subclass(PromptMask, shape, dtype=torch.bool, device=device)
    mask.pair, mask.which, mask.window, mask.sinks = _Mask(make), 0, window or None, sinks
    return mask


def window_of(function: Any) -> int | None:
    """How many keys up to itself a query sees by a mask function; 0 for all of them, None if it does more than that."""
    if function is causal_mask_function:
        return 0
    parts = next((c for c in _closure(function) if isinstance(c, tuple)), ())
    names = [getattr(part, "__qualname__", "") for part in parts]
    if len(parts) != 2 or not names[0].startswith("sliding_window_overlay.") or parts[1] is not causal_mask_function:
        return None
    return next((c for c in _closure(parts[0]) if isinstance(c, int)), None)


def _closure(function: Any) -> list[Any]:
    """What a function took from the functions around it."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def attend_prompt(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PromptMask | None,
    request: AttendRequest,
    always: bool,
) -> Any:
    """Attention of the newest tokens: (batch, T, heads, head_dim_v); None if torch's attention serves it.

    Args:
        query, key, value: as in `attend`.
        mask: what a query sees; None for all keys up to itself.
        request: the scale, the soft cap and the logits of sinks.
        always: this library's kernels are used; otherwise, only the warpgroups of an NVIDIA GPU.
    """
    sinks = 0
    if mask is not None:
        request, sinks = request._replace(window=mask.window), mask.sinks
    if always and not sinks:
        return attend_in_place(query, key, value, request).transpose(1, 2)
    if not (always or query.is_cuda):
        return None
    caches = Caches(ContiguousLayout(sinks=sinks), in_rows(decoded(key)), in_rows(decoded(value)), key.shape[2])
    query = in_rows(query)
    call = attention_call(ATTENTION_CALL, query, caches, request)
    if not (always or call.plan.family.in_warpgroups):
        return None
    return call.attend(query, impl="taichi").transpose(1, 2)


def is_invariant() -> bool:
    """Whether `tikv.init` was told that rows shall have the same bits whatever the batch; False while traced."""
    live = None if _is_traced() else runtime.running()
    return live is not None and live.invariant
