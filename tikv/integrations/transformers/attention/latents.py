"""Keys and values that a model expands from latents, one short row per token: only if they are needed.

DeepSeek's models cache a latent and a rotated key for all heads, and their method `expand_kv` makes the keys and values
of every head for all tokens before attention is called. If attention reads few of them, queries are projected to the
latents instead: a head's key is ``W_k latent``, so its score is ``(W_k^T q) latent``, and the sum of its values is W_v
times the sum of latents.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced

from tikv.integrations.transformers.memory.stored import StoredTensor, decoded, stored_pair, stored_tensors
from tikv.integrations.transformers.memory.stored_ops import decode_stored, name_of
from tikv.integrations.transformers.names import ATTENTION
from tikv.integrations.transformers.versions.configurations import attention_of
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.request import AttendRequest

MOST_NUMBERS = 1 << 24  # the most numbers in rows that are gathered at once
_originals: dict[Any, Any] = {}  # the original `expand_kv` of each class
_linear: dict[Any, bool] = {}  # whether it is the linear map that is described above


class Expansion:
    """The keys and values that `expand_kv` would make, as the pair of two `StoredTensor`.

    Args:
        module: the attention module.
        expand: its original method.
        latents: (batch, 1, n, rank).
        rotated: (batch, 1, n, width).
    """

    __slots__ = ("__weakref__", "_expand", "_made", "latents", "module", "rotated")

    def __init__(self, module: Any, expand: Any, latents: Any, rotated: Any) -> None:
        self.module, self._expand, self.latents, self.rotated = module, expand, latents, rotated
        self._made: Any = None

    def numbers(self) -> tuple[Any, Any]:
        """Keys and values, made by the model's own method."""
        if self._made is None:
            with torch.no_grad():
                self._made = self._expand(self.module, decoded(self.latents), decoded(self.rotated))
        return self._made  # type: ignore[no-any-return]

    def stored(self) -> Any:
        """None, since they are not stored."""
        return None

    def attend(self, query: torch.Tensor, request: AttendRequest) -> Any:
        """None, so that attention reads `numbers`."""
        return None

    def rows(self, numbers: Any) -> Any:
        """(batch, M, rank + width) latents and rotated keys, of only the tokens (batch, M)."""
        sequences = torch.arange(numbers.shape[0], device=numbers.device)[:, None]
        stored = stored_pair(self.latents, self.rotated)
        if stored is None:
            return torch.cat([decoded(a)[:, 0][sequences, numbers] for a in (self.latents, self.rotated)], -1)
        both = []
        for a, scale, format, like in zip(
            stored[:2], stored[2:4], stored[4], (self.latents, self.rotated), strict=True
        ):
            row = _taken(a, sequences, numbers)
            if scale is not None or format is not None:
                by_row = scale is not None and scale.ndim > 2
                row_scale = _taken(scale, sequences, numbers) if by_row else scale
                row = decode_stored(row, row_scale, like.shape[-1], name_of(format))
            both.append(row[:, 0].to(like.dtype))
        return torch.cat(both, -1)


def _taken(a: Any, sequences: Any, numbers: Any) -> Any:
    """(batch, 1, M, ...) rows of (batch, 1, n, ...), of any dtype."""
    bits = a.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()])
    return bits[:, 0][sequences, numbers].view(a.dtype)[:, None]


def keep_latents(kind: Any) -> None:
    """Make attention modules of this class expand latents only when keys and values are used.

    The class's method `expand_kv` is wrapped, once; it does not change unless attention is "tikv".
    """
    owner = _owner_of(kind)
    if owner is None or owner in _originals:
        return
    original = _originals[owner] = owner.expand_kv

    @functools.wraps(original)
    def expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> Any:
        if _is_traced() or torch.is_grad_enabled() or attention_of(self.config) != ATTENTION:
            return original(self, kv_nope, k_rot)
        if not _serves(self, owner, kv_nope, k_rot):
            return original(self, kv_nope, k_rot)
        made = Expansion(self, original, kv_nope, k_rot)
        shape = kv_nope.shape[0], _heads(self), kv_nope.shape[2]
        k_shape, v_shape = (*shape, self.qk_nope_head_dim + self.qk_rope_head_dim), (*shape, self.v_head_dim)
        return stored_tensors(made, k_shape, v_shape, kv_nope.dtype, kv_nope.device)

    owner.expand_kv = expand_kv


def _owner_of(kind: Any) -> Any:
    """The class that defines the method, or None."""
    return next((cls for cls in kind.__mro__ if "expand_kv" in vars(cls)), None)


def _heads(module: Any) -> int:
    return int(module.kv_b_proj.weight.shape[0]) // int(module.qk_nope_head_dim + module.v_head_dim)


def _serves(module: Any, owner: Any, latents: Any, rotated: Any) -> bool:
    """Whether keys and values are the weight times the latents, with nothing in between."""
    linear: Any = getattr(module, "kv_b_proj", None)
    if (
        type(linear) is not torch.nn.Linear
        or linear.bias is not None
        or linear.weight.data.__class__ is not torch.Tensor
    ):
        return False
    if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
        return False
    if latents.ndim != 4 or latents.shape[1] != 1 or linear.weight.dtype is not latents.dtype:
        return False
    if rotated.shape[-1] != module.qk_rope_head_dim or linear.weight.device != latents.device:
        return False
    if owner not in _linear:
        _linear[owner] = _is_linear(module, owner, latents)
    return _linear[owner]


def _is_linear(module: Any, owner: Any, like: Any) -> bool:
    """Whether `expand_kv` of three tokens gives what is assumed here."""
    numbers = torch.Generator().manual_seed(0)
    shapes = (2, 1, 3, like.shape[-1]), (2, 1, 3, module.qk_rope_head_dim)
    latents, rotated = (torch.randn(s, generator=numbers).to(like.device, like.dtype) for s in shapes)
    with torch.no_grad():
        of_keys, of_values = _weights(module)
        expanded = (*shapes[1][:1], _heads(module), *shapes[1][2:])
        want = torch.cat((latents @ of_keys.mT, rotated.expand(expanded)), -1), latents @ of_values.mT
        got = _originals[owner](module, latents, rotated)
    near = 8 * torch.finfo(like.dtype).eps
    pairs = zip(got, want, strict=True)
    return all(a.shape == b.shape and bool(((a - b).abs() <= near * b.abs().amax()).all()) for a, b in pairs)


def _weights(module: Any) -> tuple[Any, Any]:
    """Weights, (heads, width, rank) each, from latents to keys without their rotated part, and to values."""
    weight = module.kv_b_proj.weight.detach()
    both = weight.view(_heads(module), -1, weight.shape[1])
    return both[:, : module.qk_nope_head_dim], both[:, module.qk_nope_head_dim :]


def made_of_latents(key: Any) -> bool:
    """Whether keys are still unexpanded latents."""
    return type(key) is StoredTensor and type(key.pair) is Expansion


def latents_of(key: torch.Tensor, value: torch.Tensor) -> Expansion | None:
    """The latents of these keys and values, if nothing has used them and autograd does not follow them."""
    if not made_of_latents(key) or type(value) is not StoredTensor or key.pair is not value.pair:
        return None
    pair: Any = key.pair
    return pair if pair._made is None and (key.which, value.which) == (0, 1) else None


def attend_latents(query: torch.Tensor, expansion: Expansion, numbers: Any, request: AttendRequest) -> Any:
    """Attention to selected tokens, which gathers only their latents: (batch, T, heads, head_dim_v).

    Args:
        query: (batch, heads, T, head_dim).
        expansion: the keys and values.
        numbers: (batch, T, K), the tokens that each query reads; -1 stands for none.
        request: the scale of the scores, and the logits of sinks.
    """
    (batch, heads, tokens, width), selected = query.shape, numbers.shape[-1]
    of_keys, of_values = _weights(expansion.module)
    rank, plain = of_keys.shape[2], of_keys.shape[1]
    asked = torch.cat((query[..., :plain] @ of_keys, query[..., plain:]), -1).transpose(1, 2)
    if request.scale is None:
        request = request._replace(scale=width**-0.5)
    numbers = numbers.sort(-1, descending=True).values  # -1 is last, where rows are ignored
    counts = (numbers >= 0).sum(-1, dtype=torch.int32)
    several = max(1, MOST_NUMBERS // (batch * selected * asked.shape[-1]))
    sums = []
    for first in range(0, tokens, several):
        part = numbers[:, first : first + several].clamp(min=0)
        rows = expansion.rows(part.flatten(1).long()).view(-1, 1, selected, asked.shape[-1])
        asking = asked[:, first : first + several].reshape(-1, heads, asked.shape[-1])
        lengths = counts[:, first : first + several].reshape(-1)
        caches = Caches(CONTIGUOUS, rows, None, lengths, head_dim_v=rank)
        out = attention_call("decode_attention", asking, caches, request).attend(asking, impl="auto")
        sums.append(out.view(batch, -1, heads, rank))
    summed = sums[0] if len(sums) == 1 else torch.cat(sums, 1)
    return (summed.transpose(1, 2) @ of_values.mT).transpose(1, 2)
