"""The gradients of attention, by torch's operations, from the log-sum-exp: over a few keys at a time."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

from tikv.arrays import Array

MOST_SCORES = 1 << 20  # that exist at once: 4 MB, and as much for each of a few others of their shape
MOST_STEPS = 256  # over the keys, where there is less room than for these
FEW_QUERIES = 256  # of all heads and sequences, which need no steps of their own


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


def gradients(
    call: Attended, keys: Array, values: Array, grad_out: Array, grad_lse: Array, first: int
) -> tuple[Any, Any, Any]:
    """The gradients of queries, and of the keys and values from position `first` on, in float32.

    Args:
        call: the call.
        keys, values: (batch, H, n, D) and (batch, H, n, Dv), as they are stored.
        grad_out, grad_lse: the gradients of the results.
        first: earlier keys and values are frozen.
    """
    torch: Any = sys.modules["torch"]
    batch, heads, held, width = keys.shape
    group, tokens = call.q.shape[1] // heads, call.q.shape[2]
    of_q = torch.zeros((batch, heads, group, tokens, width), dtype=torch.float32, device=call.q.device)
    of_k = torch.zeros((batch, heads, held - first, width), dtype=torch.float32, device=call.q.device)
    of_v = torch.zeros((batch, heads, held - first, values.shape[3]), dtype=torch.float32, device=call.q.device)
    # On a CPU, no more memory at once than half of the queries'. A launch of a GPU costs more than these megabytes.
    queries, on_cpu = batch * heads * group * tokens, call.q.device.type == "cpu"
    together = not on_cpu or queries <= FEW_QUERIES
    rows = queries if together else batch * tokens
    most = min(MOST_SCORES, max(of_q.numel() // 4, rows * held // MOST_STEPS)) if on_cpu else MOST_SCORES
    step = max(32, most // rows)
    arrays = [a.unflatten(1, (heads, group)) for a in (call.q, call.out, grad_out, call.lse, grad_lse)]
    every = slice(None)
    parts = [(every, every)]
    if not together:
        parts = [(slice(h, h + 1), slice(i, i + 1)) for h in range(heads) for i in range(group)]
    for of_heads, of_group in parts:
        q, out, of_out, lse, of_lse = (a[:, of_heads, of_group].flatten(2, 3).float() for a in arrays)
        centre = (of_out * out).sum(-1, keepdim=True) - of_lse[..., None]
        part = _QueriesOfHeads(q, of_out, lse[..., None], centre, call.scale, call.softcap, call.window, tokens)
        to = of_q[:, of_heads, of_group].flatten(2, 3), of_k[:, of_heads], of_v[:, of_heads]
        for start in range(0, held, step):
            part.add(keys[:, of_heads], values[:, of_heads], start, min(held, start + step), first, to)
    return of_q.flatten(1, 2), of_k, of_v


class _QueriesOfHeads(NamedTuple):
    """The queries of some heads, those that share a head of keys one after the other, as `Attended`; in float32.

    Attributes:
        grad_out: the gradient of the result.
        centre: (batch, heads, n, 1), what each query's weights have in common in their gradient.
        tokens: how many tokens the queries are of.
    """

    q: Any
    grad_out: Any
    lse: Any
    centre: Any
    scale: float | None
    softcap: float | None
    window: int | None
    tokens: int

    def add(self, keys: Array, values: Array, start: int, end: int, first: int, to: tuple[Any, Any, Any]) -> None:
        """Add what some keys contribute to the gradients of queries, and of keys and values from `first` on."""
        torch: Any = sys.modules["torch"]
        held, (q, of_q, of_k, of_v) = keys.shape[2], (self.q, *to)
        scale = 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale
        k, v = keys[:, :, start:end].float(), values[:, :, start:end].float()
        weights = (q @ k.transpose(2, 3)).mul_(scale)
        slope = None
        if self.softcap is not None:
            weights.div_(self.softcap).tanh_()
            slope = 1 - weights.square()
            weights.mul_(self.softcap)
        weights.sub_(self.lse).exp_()
        if end > held - self.tokens + 1 or self.window is not None:
            position = torch.arange(held - self.tokens, held, device=q.device).repeat(q.shape[2] // self.tokens)[
                :, None
            ]
            of_key = torch.arange(start, end, device=q.device)
            weights.masked_fill_(of_key > position, 0)
            if self.window is not None:
                weights.masked_fill_(of_key <= position - self.window, 0)
        of_scores = (self.grad_out @ v.transpose(2, 3)).sub_(self.centre).mul_(weights).mul_(scale)
        if slope is not None:
            of_scores.mul_(slope)
        of_q.flatten(0, 1).baddbmm_(of_scores.flatten(0, 1), k.flatten(0, 1))
        if end > first:
            trained, rows = slice(max(first - start, 0), None), slice(max(start, first) - first, end - first)
            of_k[:, :, rows] += of_scores[..., trained].transpose(2, 3) @ q
            of_v[:, :, rows] += weights[..., trained].transpose(2, 3) @ self.grad_out
