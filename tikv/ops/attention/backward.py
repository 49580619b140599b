"""The gradients of attention, by torch's operations, from the log-sum-exp: over a few keys at a time."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

MOST_SCORES = 1 << 22  # that exist at once: 16 MB, and as much for each of a few others of their shape


class Attended(NamedTuple):
    """What a call of causal attention read and gave, head-major.

    Attributes:
        q: (batch, Hq, T, D); its queries are the newest tokens.
        out, lse: the result (batch, Hq, T, Dv) and the log-sum-exp of its scores (batch, Hq, T).
        scale, softcap: as in `tikv.decode_attention`.
    """

    q: Any
    out: Any
    lse: Any
    scale: float | None
    softcap: float | None


def gradients(call: Attended, keys: Any, values: Any, grad_out: Any, grad_lse: Any, first: int) -> tuple[Any, Any, Any]:
    """The gradients of queries, and of the keys and values from position `first` on, in float32.

    Args:
        call: the call.
        keys, values: (batch, H, n, D) and (batch, H, n, Dv), as they are stored.
        grad_out, grad_lse: the gradients of the results.
        first: earlier keys and values are frozen.
    """
    torch: Any = sys.modules["torch"]
    batch, heads, held, width = keys.shape
    tokens = call.q.shape[2]
    rows = (batch, heads, -1)  # the queries of all heads that share a head of keys, one after the other
    q, out, grad_out = (a.float().reshape(*rows, a.shape[3]) for a in (call.q, call.out, grad_out))
    lse = call.lse.float().reshape(*rows, 1)
    centre = (grad_out * out).sum(-1, keepdim=True) - grad_lse.float().reshape(*rows, 1)
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    position = torch.arange(held - tokens, held, device=q.device).repeat(q.shape[2] // tokens)[:, None]
    of_q = torch.zeros_like(q)
    of_k = torch.zeros((batch, heads, held - first, width), dtype=torch.float32, device=q.device)
    of_v = torch.zeros((batch, heads, held - first, values.shape[3]), dtype=torch.float32, device=q.device)
    step = max(64, MOST_SCORES // (batch * heads * q.shape[2]))
    for start in range(0, held, step):
        end = min(held, start + step)
        k, v = keys[:, :, start:end].float(), values[:, :, start:end].float()
        scores = q @ k.transpose(2, 3) * scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = torch.exp(scores - lse)
        if end > held - tokens + 1:
            weights = weights.masked_fill(torch.arange(start, end, device=q.device) > position, 0)
        of_scores = weights * (grad_out @ v.transpose(2, 3) - centre) * scale
        if call.softcap is not None:
            of_scores = of_scores * (1 - (scores / call.softcap).square())
        of_q += of_scores @ k
        if end > first:
            trained = slice(max(first - start, 0), None)
            to = slice(max(start, first) - first, end - first)
            of_k[:, :, to] = of_scores[..., trained].transpose(2, 3) @ q
            of_v[:, :, to] = weights[..., trained].transpose(2, 3) @ grad_out
    return of_q.reshape(call.q.shape), of_k, of_v
