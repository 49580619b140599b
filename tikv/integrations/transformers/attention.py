"""Attention for transformers models under the name "tikv", and its mask; importing this module registers both."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tikv import runtime
from tikv.errors import DTypeError, OptionError
from tikv.integrations.transformers import batching, keywords, shim, steps
from tikv.integrations.transformers.chosen import attend_chosen, chosen_keys
from tikv.integrations.transformers.keywords import ATTENTION as ATTENTION
from tikv.integrations.transformers.keywords import HEARD, KEYWORDS, MODEL, OPERATION
from tikv.integrations.transformers.paged import attend_pages
from tikv.integrations.transformers.prompts import PromptMask, attend_prompt, prompt_mask, window_of
from tikv.integrations.transformers.slots import request_of
from tikv.integrations.transformers.stored import attend_in_place, decoded, reads_in_place
from tikv.ops.attention.request import AttendRequest

_READ = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of queries that the kernel takes


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
) -> tuple[Any, Any]:
    """Attention under the name "tikv": a decoded token reads the cache in place, whatever its storage.

    So does a token in a step that `torch.compile` traces, if the memory of its `TikvCache` is allocated once. A prompt
    whose queries are the newest tokens, and see the keys up to themselves or a window of these, is served by this
    library's kernels if the model has learned sinks, and under ``tikv.init(invariant=True)``. In float16 and bfloat16
    on NVIDIA GPUs of compute capability 9.0 they also serve such a prompt after earlier tokens, with a window or with a
    soft cap. Queries for which the model chose keys read only the rows of these, see `chosen_keys`. Torch's
    `scaled_dot_product_attention` serves other prompts, padded batches, training and other traced code; with a soft cap
    or sinks, plain torch operations do. `KEYWORDS` lists how the other keywords are honoured; unknown ones go to the
    model's own function, as under the name "eager".

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
    in_place = _by_compiled_step(call) or _by_kernels(call) or _over_selected_keys(call)
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
        served: whether this library's kernels can serve the queries.
        ours: whether they do, and torch does not, if there is no mask.
    """

    def __init__(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, scale: float | None,
        softcap: float | None, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.module, self.query, self.key, self.value = module, query, key, value
        self.dropout, self.scale, self.softcap, self.options = dropout, scale, softcap, options
        self.said = () if HEARD.issuperset(options) else keywords.said(options)
        self.sinks = sinks = options.get("s_aux")
        causal = options.get("is_causal")
        self.causal = getattr(module, "is_causal", True) if causal is None else causal
        graded = (query, key, value) if sinks is None else (query, key, value, sinks)
        trained = torch.is_grad_enabled() and any(a.requires_grad for a in graded)
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
        self.served = query.dtype in _READ and batch == k_batch and not (masked_outside or trained or dropout)
        self.logits = None if sinks is None else sinks.detach().float()
        self.ours = self.served and (self.tokens == 1 or sinks is not None or _is_invariant()) and not self.said

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
            raise DTypeError(f"{OPERATION}: the mask is {mask.dtype}. Use bools, or floats to add to the scores.")
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


def _says_what_is_read(mask: Any, key: Any, value: Any) -> bool:
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


def mask_for_attend(*args: Any, **kwargs: Any) -> Any:
    """The mask that torch's attention would get; None too if a single query sees every key, as with a window.

    Several queries that are the newest tokens get a `PromptMask`, of which `attend` knows what they see. It is also
    made for a prompt in memory with room for more: without a mask, torch's attention would let its queries see the
    first keys, while `attend` assumes that queries are the newest.
    """
    made = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    tokens = shim.query_length(kwargs["q_length"] if "q_length" in kwargs else kwargs["cache_position"])
    offset = kwargs["kv_offset"]
    if isinstance(offset, (steps.SlotsOffset, torch.Tensor)):
        return _mask_of_slots(made, tokens, **kwargs)
    may_skip = kwargs.get("allow_is_causal_skip", True)
    if isinstance(offset, steps.KnownOffset) and (tokens == 1 or shim.MASKS_PROMPTS_OF_COMPILED) and not may_skip:
        # The caller never skips the mask for a cache whose steps may be compiled; here it is known when it may.
        kwargs["allow_is_causal_skip"] = may_skip = window_of(kwargs["mask_function"]) is not None
    if may_skip and tokens not in (1, kwargs["kv_length"]):
        kwargs["allow_is_causal_skip"] = False
    if tokens > 1 and not args and not _is_traced():
        found = prompt_mask(lambda: made(**kwargs | {"allow_is_causal_skip": False}), **kwargs)
        if found is not None:
            all_seen = found.window is None or found.window >= kwargs["kv_length"]
            if all_seen and may_skip and tokens == kwargs["kv_length"]:
                return None
            if not kwargs.get("use_vmap", shim.MASKS_BY_VMAP):
                return found
            if all_seen and _is_invariant():
                return None  # `attend` knows what each of several newest queries sees
    mask = made(*args, **kwargs)
    if mask is None or not may_skip or mask.shape[-2] != 1 or mask.dtype != torch.bool or _is_traced():
        return mask
    return None if bool(mask.all()) else mask


def _is_invariant() -> bool:
    """Whether `tikv.init` was told that rows shall have the same bits whatever the batch; False while traced."""
    live = None if _is_traced() else runtime.running()
    return live is not None and live.invariant


def _mask_of_slots(
    made: Any,
    tokens: int,
    *,
    kv_offset: Any,
    kv_length: int,
    mask_function: Any,
    attention_mask: Any = None,
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

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        position = where[key] if where.ndim == 1 else where[batch, key]
        found = mask_function(batch, head, query, position) & (position <= newest)
        return found if padding is None else found & padding[batch, position.clamp(min=0, max=padding.shape[1] - 1)]

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


def _begin_at(starts: Any, padding: Any) -> bool:
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


def attend_batch(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """`attend` while a manager of transformers' continuous batching runs: over its pages, or as `attend` without them.

    Raises:
        OptionError: there are no pages, and this version of transformers made no mask.
    """
    cache = kwargs.get("cache")
    if cache is None or not hasattr(cache, "layer_to_allocator"):
        if not shim.MODELS_UPDATE_PAGES:
            raise OptionError(
                f"{OPERATION}: the model was called while a manager of continuous batching runs, which this version of "
                "transformers makes no masks for. Stop the manager first."
            )
        return attend(module, query, key, value, attention_mask, dropout, scaling, softcap, **kwargs)
    keywords.check_declared(type(module))
    batching.check_attention(cache)
    return attend_pages(module, query, key, value, scaling, softcap, kwargs), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, mask_for_attend)
batching.install(attend_batch, mask_for_attend)
