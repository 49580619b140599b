"""The gradients of attention, by torch's operations, from the log-sum-exp: over a few keys at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
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
        mask: (batch or 1, 1, T, n) bools that say which keys a query sees; None for the keys up to itself.
    """

    q: Any
    out: Any
    lse: Any
    scale: float | None
    softcap: float | None
    window: int | None = None
    mask: Any = None

    def parts(self, heads: int, held: int) -> tuple[list[tuple[slice, slice]], int]:
        """Which heads of keys, and of the queries of each, are taken at a time, and how many keys."""
        batch, all_heads, tokens, width = self.q.shape
        group, on_cpu, every = all_heads // heads, self.q.device.type == "cpu", slice(None)
        # On a CPU, no more memory at once than half of the queries'. A launch of a GPU costs more than these megabytes.
        queries = batch * all_heads * tokens
        together = not on_cpu or queries <= FEW_QUERIES
        rows = queries if together else batch * tokens
        most = min(MOST_SCORES, max(queries * width // 4, rows * held // MOST_STEPS)) if on_cpu else MOST_SCORES
        step = max(32, most // rows)
        if together:
            return [(every, every)], step
        return [(slice(h, h + 1), slice(i, i + 1)) for h in range(heads) for i in range(group)], step

    def of_heads(self, of_heads: slice, of_group: slice, heads: int) -> _QueriesOfHeads:
        """The queries of some heads of keys."""
        q = self.q.unflatten(1, (heads, -1))[:, of_heads, of_group]
        group, tokens = q.shape[2:4]
        mask = None if self.mask is None else self.mask[:, :, None].expand(-1, -1, group, -1, -1)
        return _QueriesOfHeads(q.flatten(2, 3).float(), self.scale, self.softcap, self.window, tokens, mask)


class Trained:
    """The positions whose keys or values get a gradient; the gradients of all of them lie one after the other.

    Args:
        spans: (first, end) of each part of them; parts do not overlap.
    """

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        self.count = 0
        self._runs: list[tuple[int, int, int]] = []  # first, end, and where their gradients begin
        for first, end in sorted(spans):
            if self._runs and self._runs[-1][1] == first:
                self._runs[-1] = self._runs[-1][0], end, self._runs[-1][2]
            elif first < end:
                self._runs.append((first, end, self.count))
            self.count += max(0, end - first)

    def among(self, start: int, end: int) -> list[tuple[slice, slice]]:
        """Which of the keys start..end are trained, and where their gradients lie."""
        common = [(max(first, start), min(last, end), row - first) for first, last, row in self._runs]
        return [(slice(a - start, b - start), slice(a + to, b + to)) for a, b, to in common if a < b]

    def part(self, gradients: Array, first: int, end: int) -> Any:
        """The gradients of one of the spans."""
        at = next((row + first - a for a, b, row in self._runs if a <= first < b), 0)
        return gradients[:, :, at : at + max(0, end - first)]


def log_sum_exp(call: Attended, keys: Array, sinks: Any = None) -> Any:
    """(batch, Hq, T) float32: that of the scores and of the logits (Hq,) of learned sinks, whatever ``call.lse`` is."""
    torch: Any = sys.modules["torch"]
    heads, held = keys.shape[1:3]
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    by_head = lse.unflatten(1, (heads, -1))
    parts, step = call.parts(heads, held)
    for of_heads, of_group in parts:
        part, to = call.of_heads(of_heads, of_group, heads), by_head[:, of_heads, of_group]
        so_far = torch.full(part.q.shape[:3], -math.inf, device=call.q.device)
        for start in range(0, held, step):
            scores, *_ = part.scores(keys[:, of_heads], start, min(held, start + step))
            so_far = torch.logaddexp(so_far, torch.logsumexp(scores, -1))
        to.copy_(so_far.unflatten(2, to.shape[2:]))
    return lse if sinks is None else torch.logaddexp(lse, sinks.float()[:, None])


def gradients(
    call: Attended, keys: Array, values: Array, grad_out: Array, grad_lse: Any, trained: tuple[Trained, Trained],
    of_queries: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients of queries, and of those keys and values that are trained, in float32.

    Args:
        call: the call.
        keys, values: (batch, H, n, D) and (batch, H, n, Dv), as they are stored.
        grad_out, grad_lse: the gradients of the results; None for that of a log-sum-exp that nothing uses.
        trained: which keys, and which values.
        of_queries: whether the queries' gradient is wanted; None is returned otherwise.
    """
    torch: Any = sys.modules["torch"]
    batch, heads, held, width = keys.shape
    floats: Any = {"dtype": torch.float32, "device": call.q.device}
    of_q = torch.zeros(call.q.shape, **floats).unflatten(1, (heads, -1)) if of_queries else None
    of_k = torch.zeros((batch, heads, trained[0].count, width), **floats)
    of_v = torch.zeros((batch, heads, trained[1].count, values.shape[3]), **floats)
    grad_lse = torch.zeros_like(call.lse) if grad_lse is None else grad_lse
    arrays = [a.unflatten(1, (heads, -1)) for a in (call.out, grad_out, call.lse, grad_lse)]
    parts, step = call.parts(heads, held)
    for of_heads, of_group in parts:
        out, of_out, lse, of_lse = (a[:, of_heads, of_group].flatten(2, 3).float() for a in arrays)
        centre = (of_out * out).sum(-1, keepdim=True) - of_lse[..., None]
        lse = lse.masked_fill(lse == -math.inf, 0)[..., None]  # of queries that see no key
        part = call.of_heads(of_heads, of_group, heads)
        to_q = None if of_q is None else of_q[:, of_heads, of_group].flatten(2, 3)
        to = to_q, of_k[:, of_heads], of_v[:, of_heads]
        for start in range(0, held, step):
            end = min(held, start + step)
            of_keys, of_values = (rows.among(start, end) for rows in trained)
            if of_queries or of_keys or of_values:
                read = keys[:, of_heads], values[:, of_heads]
                part.add(read, (start, end), (of_out, lse, centre), (of_keys, of_values), to)
    return None if of_q is None else of_q.flatten(1, 2), of_k, of_v


def gradients_of_parts(
    call: Attended, rows: tuple[Array, Array], grads: tuple[Array, Any], spans: Sequence[tuple[int, int]],
    needed: Sequence[bool],
) -> list[Any]:  # fmt: skip
    """The gradients of queries, and of the keys and values of each span, one after the other; float32, or None.

    Args:
        call: the call.
        rows, grads: keys and values, and the gradients of the results, as in `gradients`.
        spans: (first, end) of the positions of tokens that came together.
        needed: which of the gradients are computed.
    """
    trained = [Trained(span for span, asked in zip(spans, needed[which::2], strict=True) if asked) for which in (1, 2)]
    of_q, *of_rows = gradients(call, *rows, *grads, (trained[0], trained[1]), needed[0])
    of_parts = [of_q]
    for i, asked in enumerate(needed[1:]):
        of_parts.append(trained[i % 2].part(of_rows[i % 2], *spans[i // 2]) if asked else None)
    return of_parts


class _QueriesOfHeads(NamedTuple):
    """The queries of some heads, those that share a head of keys one after the other, as `Attended`; in float32.

    Attributes:
        tokens: how many tokens the queries are of.
    """

    q: Any
    scale: float | None
    softcap: float | None
    window: int | None
    tokens: int
    mask: Any

    @property
    def factor(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.q.shape[3]) if self.scale is None else self.scale

    def scores(self, keys: Array, start: int, end: int) -> tuple[Any, Any, Any]:
        """The scores of the keys start..end, -inf of those that are not seen; the soft cap's slope; which are not seen.

        Without a soft cap, or if all keys are seen, None is returned instead.
        """
        torch: Any = sys.modules["torch"]
        q, held, slope, unseen = self.q, keys.shape[2], None, None
        scores = (q @ keys[:, :, start:end].float().transpose(2, 3)).mul_(self.factor)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_()
            slope = 1 - scores.square()
            scores.mul_(self.softcap)
        if self.mask is not None:
            unseen = ~self.mask[..., start:end].flatten(2, 3)
        elif end > held - self.tokens + 1 or self.window is not None:
            position = torch.arange(held - self.tokens, held, device=q.device).repeat(q.shape[2] // self.tokens)[
                :, None
            ]
            of_key = torch.arange(start, end, device=q.device)
            unseen = of_key > position
            if self.window is not None:
                unseen |= of_key <= position - self.window
        if unseen is not None:
            scores.masked_fill_(unseen, -math.inf)
        return scores, slope, unseen

    def add(
        self, read: tuple[Any, Any], keys: tuple[int, int], of_result: tuple[Any, Any, Any],
        trained: tuple[list[tuple[slice, slice]], list[tuple[slice, slice]]], to: tuple[Any, Any, Any],
    ) -> None:  # fmt: skip
        """Add what some keys contribute to gradients; nothing passes between a key and a query that does not see it.

        A NaN would, since a product multiplies it by 0. A query that sees it has a NaN in its scores' gradient.

        Args:
            read: all keys and values.
            keys: the first of these keys, and their end.
            of_result: the result's gradient, the log-sum-exp, and what each query's weights have in common in their
                gradient.
            trained: `Trained.among` of these keys, and of their values.
            to: the gradients of queries, or None, and of the keys and values that are trained.
        """
        (of_out, lse, centre), (of_q, of_k, of_v), (start, end) = of_result, to, keys
        weights, slope, unseen = self.scores(read[0], start, end)
        weights.sub_(lse).exp_()
        if unseen is not None:
            weights.masked_fill_(unseen, 0)
        for columns, rows in trained[1]:
            of_v[:, :, rows] += weights[..., columns].transpose(2, 3) @ of_out
        if of_q is None and not trained[0]:
            return
        v = read[1][:, :, start:end].float()
        of_scores = (of_out @ v.transpose(2, 3)).sub_(centre).mul_(weights).mul_(self.factor)
        if slope is not None:
            of_scores.mul_(slope)
        if unseen is not None:
            of_scores.masked_fill_(unseen, 0)
        if of_q is not None:
            k = read[0][:, :, start:end].float().nan_to_num(0, 0, 0)
            of_q.flatten(0, 1).baddbmm_(of_scores.flatten(0, 1), k.flatten(0, 1))
        q = self.q.nan_to_num(0, 0, 0) if trained[0] else self.q
        for columns, rows in trained[0]:
            of_k[:, :, rows] += of_scores[..., columns].transpose(2, 3) @ q
