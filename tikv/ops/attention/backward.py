"""The gradients of attention, by torch's operations, from the log-sum-exp: over a few keys at a time."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

MOST_SCORES = 1 << 20  # that exist at once: 4 MB, and as much for each of a few others of their shape


class Attended(NamedTuple):
    """What a call of causal attention read and gave, head-major.

    Attributes:
        q: (batch, Hq, T, D); its queries are the newest tokens.
        out, lse: the result (batch, Hq, T, Dv) and the log-sum-exp of its scores (batch, Hq, T).
        scale, softcap, window: as in `tikv.decode_attention`.
    """

    q: Any
    out: Any
    lse: Any
    scale: float | None
    softcap: float | None
    window: int | None = None


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
        weights = (q @ k.transpose(2, 3)).mul_(scale)
        slope = None
        if call.softcap is not None:
            weights.div_(call.softcap).tanh_()
            slope = 1 - weights.square()
            weights.mul_(call.softcap)
        weights.sub_(lse).exp_()
        if end > held - tokens + 1:
            weights.masked_fill_(torch.arange(start, end, device=q.device) > position, 0)
        if call.window is not None:
            weights.masked_fill_(torch.arange(start, end, device=q.device) <= position - call.window, 0)
        of_scores = (grad_out @ v.transpose(2, 3)).sub_(centre).mul_(weights).mul_(scale)
        if slope is not None:
            of_scores.mul_(slope)
        of_q += of_scores @ k
        if end > first:
            trained = slice(max(first - start, 0), None)
            to = slice(max(start, first) - first, end - first)
            of_k[:, :, to] = of_scores[..., trained].transpose(2, 3) @ q
            of_v[:, :, to] = weights[..., trained].transpose(2, 3) @ grad_out
    return of_q.reshape(call.q.shape), of_k, of_v
