"""Attention for transformers models under the name "tikv"."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tikv.errors import DTypeError
from tikv.integrations.transformers.attention import keywords
from tikv.integrations.transformers.attention.chosen import attend_chosen, chosen_keys
from tikv.integrations.transformers.attention.keywords import HEARD, KEYWORDS, MODEL
from tikv.integrations.transformers.attention.prompts import PromptMask, attend_prompt, is_invariant
from tikv.integrations.transformers.attention.trained import Read, TrainedAttention
from tikv.integrations.transformers.attention.weighing import attend_weighed
from tikv.integrations.transformers.memory.gradients import followed
from tikv.integrations.transformers.memory.slots import request_of
from tikv.integrations.transformers.memory.stored import attend_in_place, decoded, reads_in_place
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.ops.attention.request import AttendRequest

_READ = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of queries that the kernel takes


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Attention under the name "tikv": a decoded token reads the cache in place, whatever its storage.

    So does a token in a step that `torch.compile` traces, if the memory of its `TikvCache` is allocated once. A prompt
    whose queries are the newest tokens, and see the keys up to themselves or a window of these, is served by this
    library's kernels if the model has learned sinks, and under ``tikv.init(invariant=True)``. In float16 and bfloat16
    on NVIDIA GPUs of compute capability 9.0 they also serve such a prompt after earlier tokens, with a window or with a
    soft cap. Queries for which the model chose keys read only the rows of these, see `chosen_keys`. Torch's
    `scaled_dot_product_attention` serves other prompts, padded batches, training and other traced code; with a soft cap
    or sinks, plain torch operations do. If the keys are of a cache that was made with ``grad=True``, what serves
    without gradients computes the result, and `TrainedAttention` the gradients. `KEYWORDS` lists how the other keywords
    are honoured; unknown ones go to the model's own function, as under the name "eager".

    Args:
        module: the attention module.
        query: (batch, heads, T, head_dim).
        key, value: (batch, num_kv_heads, n, head_dim), as `TikvCache.update` or any other cache returns them.
        attention_mask: bool, True where a key is seen, or numbers to add to the scores; it broadcasts to (batch, heads,
            T, n). With None, all keys are seen; but if a causal module has several queries, they are the newest tokens,
            and each sees the keys up to itself.
        dropout, softcap: those of the model. Their order is that of transformers' own functions, whose wrappers pass
            the dropout by position.
        scaling: the factor of the scores; None for ``1 / sqrt(head_dim)``.
        **kwargs: other keywords; ``s_aux``, (heads,), are the logits of learned sinks.

    Returns:
        ((batch, T, heads, head_dim_v), the weights if ``output_attentions`` asks for them, else None).

    Raises:
        OptionError: the model declares that only its own attention serves it, or passes a keyword that only its own
            function would know, and has no such function.
        DTypeError: the mask has integers.
    """
    keywords.check_declared(type(module))
    call = _Call(module, query, key, value, attention_mask, dropout, scaling, softcap, kwargs)
    weighing = getattr(key, "tikv_weighing", None)
    if weighing is not None:
        return attend_weighed(call, weighing), None
    in_place = _by_compiled_step(call) or _by_kernels(call) or _in_training(call) or _over_selected_keys(call)
    if in_place is not None:
        return in_place
    call.decode()
    return _by_own_function(call) or _by_plain_operations(call) or _by_sdpa(call)


class _Call:
    """One call of `attend`: its arguments, and what its cases ask about them.

    Attributes:
        said: the keywords that change scores or are unknown.
        causal: whether a query sees only the keys up to its own, if there is no mask.
        sinks: (heads,) the logits of learned sinks; or None.
        served: whether this library's kernels can serve the queries, without gradients.
        trained: whether they can, if a gradient is to flow.
        ours: whether they do, and torch does not, if there is no mask.
    """

    def __init__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float,
        scale: float | None, softcap: float | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.module, self.query, self.key, self.value = module, query, key, value
        self.dropout, self.scale, self.softcap, self.options = dropout, scale, softcap, options
        self.said = () if HEARD.issuperset(options) else keywords.said(options)
        self.sinks = sinks = options.get("s_aux")
        causal = options.get("is_causal")
        self.causal = getattr(module, "is_causal", True) if causal is None else causal
        graded = (query, key, value) if sinks is None else (query, key, value, sinks)
        with_gradients = torch.is_grad_enabled() and any(a.requires_grad for a in graded)
        # kvpress masks keys of single heads, but only in the functions that were registered when it was imported.
        masked_outside = module.__dict__.get("masked_key_indices") is not None
        (batch, _, self.tokens, _), (k_batch, _, self.held, _) = query.shape, key.shape
        self.traced = _is_traced() or _in_step(key, mask)
        if mask is not None:
            if not self.traced and _says_what_is_read(mask, key, value):
                mask = None
            elif mask.shape[-1] > self.held:
                mask = mask[..., : self.held]  # the slots that a step reads if it is not compiled
        self.mask = mask
        is_readable = query.dtype in _READ and batch == k_batch and not (masked_outside or dropout)
        self.served, self.trained = is_readable and not with_gradients, is_readable and with_gradients
        self.logits = None if sinks is None else sinks.detach().float()
        self.ours = self.served and (self.tokens == 1 or sinks is not None or is_invariant()) and not self.said

    def decode(self) -> None:
        """Make plain tensors of keys, values and the mask, and a mask of all that says which keys are seen.

        Raises:
            DTypeError: the mask has integers.
        """
        query, mask = self.query, self.mask
        if self.traced and mask is not None and hasattr(self.key, "tikv_counted") and mask.shape[-1] < self.held:
            # The mask of several tokens was made before the step, for what was stored then.
            hidden = 0 if mask.dtype is torch.bool else float("-inf")
            mask = torch.nn.functional.pad(mask, (0, self.held - mask.shape[-1]), value=hidden)
        self.key, self.value, mask = decoded(self.key), decoded(self.value), decoded(mask)
        if mask is not None and mask.dtype is not torch.bool and not mask.is_floating_point():
            raise DTypeError(f"{ATTENTION_CALL}: the mask is {mask.dtype}. Use bools, or floats to add to the scores.")
        self.causal = self.causal and self.tokens > 1  # the newest query sees all keys
        plain = self.softcap is not None or self.sinks is not None
        if mask is None and self.causal and (self.said or plain or self.tokens != self.held):
            mask = keywords.causal_mask(query, self.key)
        if self.said:
            mask = keywords.joined(self.module, query, self.key, mask, self.said, self.options)
        if mask is not None and mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]  # transformers' functions look at its heads
        self.mask = mask


def _by_compiled_step(call: _Call) -> tuple[Any, None] | None:
    """Attention of a single token that `torch.compile` traces, over the slots that the layer counts on the device."""
    if not call.traced or not call.ours or call.tokens > 1:
        return None
    counted = getattr(call.key, "tikv_counted", None)
    if counted is None or getattr(call.value, "tikv_counted", None) is not counted:
        return None
    assert counted is not None
    starts = getattr(call.mask, "tikv_starts", None)
    if call.mask is not None and starts is None and getattr(call.mask, "tikv_of_slots", None) is None:
        return None
    return counted.attend(call.query, call.scale, call.softcap, call.logits, starts).transpose(1, 2), None


def _in_step(key: Any, mask: Any) -> bool:
    """Whether keys or their mask come from a layer in a step of `steps.on_device`."""
    counted = getattr(key, "tikv_counted", None) or getattr(mask, "tikv_of_slots", None)
    return counted is not None and counted.on_device


def _says_what_is_read(mask: Any, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a mask of slots says no more than what attention to these keys reads by itself."""
    counted = getattr(mask, "tikv_of_slots", None)
    if counted is None:
        return False
    return not counted.hides or reads_in_place(key, value)  # a step that is not compiled gets only slots in use


def _by_kernels(call: _Call) -> tuple[Any, None] | None:
    """Attention without a mask by this library's kernels, in place; None if torch serves it."""
    mask, query = call.mask, call.query
    if call.traced or not call.served or call.said or (mask is not None and type(mask) is not PromptMask):
        return None
    request = request_of(call.scale, call.softcap, call.causal or mask is not None)
    if call.logits is not None:
        request = request._replace(sink_logits=call.logits)
    if mask is None and call.ours:
        return attend_in_place(query, call.key, call.value, request).transpose(1, 2), None
    if call.tokens == 1 or not request.causal:
        return None
    if mask is None and call.tokens == call.held and call.softcap is None:
        return None  # cuDNN, which torch uses, is faster if queries and keys are as many
    out = attend_prompt(query, call.key, call.value, mask, request, call.ours)
    return None if out is None else (out, None)


def _in_training(call: _Call) -> tuple[Any, None] | None:
    """Attention with gradients to keys of a cache made with ``grad=True``, with the bits that it has without them.

    Under ``tikv.init(invariant=True)`` also to other keys, if a mask says no more than which window a query sees.
    """
    mask, key, value = call.mask, call.key, call.value
    if call.traced or not call.trained or call.said:
        return None
    graded, invariant = followed(key, value), is_invariant()
    in_order = call.causal or call.tokens == 1 if mask is None else type(mask) is PromptMask and not mask.sinks
    if in_order and (graded or invariant):
        window = None if mask is None else mask.window
        read = Read(request_of(call.scale, call.softcap, causal=True)._replace(window=window))
    elif graded and mask is not None and mask.dtype is torch.bool and _is_for_all_heads(mask, call):
        read = Read(request_of(call.scale, call.softcap, causal=False), mask=decoded(mask))
    else:
        return None
    sources: tuple[Any, ...] = ()
    if graded:
        key, value, sources = graded.keys, graded.values, graded.sources
        read = read._replace(spans=graded.spans)
    if graded and (read.mask is not None or not invariant):
        query, (k, v) = call.query.detach(), graded.read
        options = {**call.options, "scaling": call.scale, "softcap": call.softcap}
        read = read._replace(attend=lambda: attend(call.module, query, k, v, mask, **options)[0])
    out = TrainedAttention.apply(call.query, decoded(key), decoded(value), call.sinks, read, *sources)
    return out.transpose(1, 2), None


def _is_for_all_heads(mask: torch.Tensor, call: _Call) -> bool:
    """Whether a mask is (batch or 1, 1, T, n)."""
    batch = call.query.shape[0]
    return mask.ndim == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, call.tokens, call.held)


def _over_selected_keys(call: _Call) -> tuple[Any, None] | None:
    """Attention that reads only the rows of the keys that the model selected for each query."""
    if call.traced or not call.served:
        return None
    causal = call.causal and call.tokens > 1
    indices = chosen_keys(call.module, call.query, call.key, call.mask, causal, call.said, call.options)
    if indices is None:
        return None
    request = AttendRequest(scale=call.scale, softcap=call.softcap, sink_logits=call.logits)
    return attend_chosen(call.query, call.key, call.value, indices, request), None


def _by_own_function(call: _Call) -> tuple[Any, Any] | None:
    """Attention by the model's own function, if there are keywords that only it knows."""
    names = [name for name in call.said if KEYWORDS.get(name, MODEL) == MODEL]
    if not names:
        return None
    options = call.options | {name: None for name in call.said if name not in names}
    options |= {"scaling": call.scale, "dropout": call.dropout}
    options |= {} if call.softcap is None else {"softcap": call.softcap}
    return keywords.by_own_function(call.module, call.query, call.key, call.value, call.mask, names, options)


def _by_plain_operations(call: _Call) -> tuple[Any, None] | None:
    """Attention with a soft cap or sinks in torch operations; keys that a bool mask hides do not count, even NaN."""
    query, key, value, mask, sinks, softcap = call.query, call.key, call.value, call.mask, call.sinks, call.softcap
    if softcap is None and sinks is None:
        return None
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if call.scale is None else call.scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
        value = value.masked_fill(~mask.any(-2).unsqueeze(-1), 0)  # values of keys that no query sees
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    blind = scores.amax(-1, keepdim=True) == float("-inf")  # queries that see no key; a NaN does not count
    weights = weights.masked_fill(blind, 0)[..., : key.shape[2]]
    return (torch.nn.functional.dropout(weights, call.dropout) @ value).transpose(1, 2).contiguous(), None


def _by_sdpa(call: _Call) -> tuple[Any, None]:
    """Attention by torch's `scaled_dot_product_attention`."""
    forward, causal = ALL_ATTENTION_FUNCTIONS["sdpa"], call.causal and call.mask is None
    out, _ = forward(
        call.module, call.query, call.key, call.value, call.mask, scaling=call.scale, dropout=call.dropout,
        is_causal=causal,
    )  # fmt: skip
    return out, None
