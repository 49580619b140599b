"""Attention of a training step: the bits that generating gave, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from tikv.integrations.transformers.memory.stored import in_rows
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.ops.attention.backward import Attended, gradients
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest


class TrainedAttention(torch.autograd.Function):  # type: ignore[misc]
    """Causal attention of the newest tokens by this library's kernels, whose backward uses torch's operations."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, request: AttendRequest
    ) -> torch.Tensor:
        """(batch, heads, T, head_dim_v).

        Args:
            ctx: torch's.
            query: (batch, heads, T, head_dim).
            key, value: (batch, num_kv_heads, n, head_dim) with n >= T.
            sinks: (heads,) the logits of learned sinks; or None.
            request: the scale, the soft cap and the window.
        """
        logits = None if sinks is None else sinks.detach().float()
        rows, caches = in_rows(query), Caches(CONTIGUOUS, in_rows(key), in_rows(value), key.shape[2])
        call = attention_call(ATTENTION_CALL, rows, caches, request._replace(sink_logits=logits))
        out, lse = call.attend(rows, Results(return_lse=True))
        ctx.request = request
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of queries, keys, values and sinks."""
        query, key, value, sinks, out, lse = ctx.saved_tensors
        request = ctx.request
        call = Attended(query, out, lse, request.scale, request.softcap, request.window)
        of_q, of_k, of_v = gradients(call, key, value, grad_out, torch.zeros_like(lse), 0)
        of_sinks = None
        if sinks is not None:
            weights = torch.exp(sinks.float()[:, None] - lse)
            of_sinks = -(weights * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return of_q.to(query.dtype), of_k.to(key.dtype), of_v.to(value.dtype), of_sinks, None
