"""Attention with gradients: the bits of attention without them, and a backward without a matrix of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tikv.integrations.transformers.memory.stored import in_rows
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.ops.attention.backward import Attended, gradients_of_parts, log_sum_exp
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest


class Read(NamedTuple):
    """What a call reads, beside its tensors.

    Attributes:
        request: the scale, the soft cap and the window.
        mask: (batch or 1, 1, T, n) bools that say which keys a query sees; None for the keys up to itself.
        attend: attention without gradients, (batch, T, heads, head_dim_v); None for this library's kernels.
        spans: (first, end) of the keys and values that came with a gradient; None for all.
    """

    request: AttendRequest
    mask: Any = None
    attend: Callable[[], torch.Tensor] | None = None
    spans: tuple[tuple[int, int], ...] | None = None


class TrainedAttention(torch.autograd.Function):  # type: ignore[misc]
    """Attention as it is without gradients, whose backward uses torch's operations, a few keys at a time."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, read: Read, *sources: Any
    ) -> torch.Tensor:
        """(batch, heads, T, head_dim_v).

        Args:
            ctx: torch's.
            query: (batch, heads, T, head_dim).
            key, value: (batch, num_kv_heads, n, head_dim) with n >= T.
            sinks: (heads,) the logits of learned sinks; or None.
            read: what else the call reads.
            *sources: the keys and the values of each of its spans, one after the other.
        """
        if read.attend is None:
            logits = None if sinks is None else sinks.detach().float()
            rows, caches = in_rows(query), Caches(CONTIGUOUS, in_rows(key), in_rows(value), key.shape[2])
            call = attention_call(ATTENTION_CALL, rows, caches, read.request._replace(sink_logits=logits))
            out, lse = call.attend(rows, Results(return_lse=True))
        else:
            out, lse = read.attend().transpose(1, 2).clone(memory_format=torch.contiguous_format), None
        whole = (key, value) if read.spans is None else sources
        ctx.read, ctx.dtypes = read._replace(attend=None), [a.dtype for a in whole]
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of those of `forward`'s arguments that want one."""
        query, key, value, sinks, out, lse = ctx.saved_tensors
        read, needed, of_sinks = ctx.read, ctx.needs_input_grad, None
        request, whole = read.request, read.spans is None
        call = Attended(query, out, lse, request.scale, request.softcap, request.window, read.mask)
        spans, asked = (((0, key.shape[2]),), needed[1:3]) if whole else (read.spans, needed[5:])
        with torch.autocast(query.device.type, enabled=False):
            if lse is None:
                call = call._replace(lse=log_sum_exp(call, key, sinks))
            of_q, *of_rows = gradients_of_parts(call, (key, value), (grad_out, None), spans, (needed[0], *asked))
            if needed[3]:
                weights = torch.exp(sinks.float()[:, None] - call.lse)
                of_sinks = -(weights * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)
        of_q = None if of_q is None else of_q.to(query.dtype)
        of_rows = [None if a is None else a.to(dtype) for a, dtype in zip(of_rows, ctx.dtypes, strict=True)]
        return (of_q, *of_rows, of_sinks, None) if whole else (of_q, None, None, of_sinks, None, *of_rows)
