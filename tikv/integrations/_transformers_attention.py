"""Attention for transformers models under the name "tikv", and the mask that it gets; importing this registers both."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tikv.ops.attention.contiguous import contiguous_call
from tikv.ops.attention.terms import Terms

ATTENTION = "tikv"  # the name for attn_implementation


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attention under the name "tikv": a decoded token reads the cache in place, whatever its storage.

    So does the prompt of a model with learned sinks, where no mask is needed. Torch's `scaled_dot_product_attention`
    takes other prompts, padded batches, training and what `torch.compile` traces; with a soft cap or sinks plain torch
    does.

    Args:
        module: the attention module.
        query: (batch, heads, T, head_dim).
        key, value: (batch, num_kv_heads, n, head_dim), as `TikvCache.update` or any other cache returns them.
        attention_mask: None where all keys, or with T = n and a causal module those up to a query itself, are seen;
            else (batch, 1, T, n).
        dropout, softcap: as the model says. In the order of transformers' own functions, whose wrappers give the
            dropout by its place.
        scaling: of the scores; None for ``1 / sqrt(head_dim)``.
        **kwargs: for torch's attention; of them ``s_aux``, (heads,), are the logits of learned sinks.

    Returns:
        ((batch, T, heads, head_dim_v), None).
    """
    sinks = kwargs.pop("s_aux", None)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    stored = getattr(key, "tikv_stored", None)
    graded = (query, key, value) if sinks is None else (query, key, value, sinks)
    trained = torch.is_grad_enabled() and any(a.requires_grad for a in graded)
    # kvpress masks keys of single heads in the functions that it finds at its import, of which this may be none.
    masked_outside = getattr(module, "masked_key_indices", None) is not None
    ours = query.shape[2] == 1 or (sinks is not None and query.dtype is not torch.float64)
    if ours and attention_mask is None and not masked_outside and not trained and not dropout and not _is_traced():
        lengths = torch.full((query.shape[0],), key.shape[2], dtype=torch.int32, device=query.device)
        k_scale, v_scale = (None, None) if stored is None else stored[3:]
        call = contiguous_call(
            "decode_attention", query, key, value, lengths, scale=scaling, softcap=softcap, k_scale=k_scale,
            v_scale=v_scale, causal=causal, terms=Terms(None if sinks is None else sinks.detach().float()),
            formats=None if stored is None else stored[0].store.formats,
        )  # fmt: skip
        return call.attend(query, impl="auto").transpose(1, 2), None
    if stored is not None:
        layer, first, end, *_ = stored
        key, value = layer._read(first, end)
    if softcap is not None or sinks is not None:
        return _plain(query, key, value, attention_mask, scaling, dropout, softcap, sinks, causal), None
    forward = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out, _ = forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    return out, None


def _plain(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: Any,
    causal: bool,
) -> Any:
    """Attention with a soft cap and sinks, step by step."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and query.shape[2] > 1:
        shape = query.shape[2], key.shape[2]
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(shape[1] - shape[0])
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (torch.nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def mask_for_attend(*args: Any, **kwargs: Any) -> Any:
    """The mask that torch's attention would get; None also where a single query sees every key, as behind a window."""
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    if mask is None or mask.shape[-2] != 1 or mask.dtype != torch.bool or _is_traced():
        return mask
    return None if bool(mask.all()) else mask


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, mask_for_attend)
