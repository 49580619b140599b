"""Reading blocks that neighbouring sequences of a call share once for all of them.

The queries of such sequences first attend together over their common first blocks, all of which all of them see; then
each sequence attends over its own tokens; and both results are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, Host, new_array
from tikv.ops.attention.call import AttentionCall, Caches, attention_call
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest

# Bytes of keys and values that need not be read again for which two launches more are worth it. On one core of a Xeon a
# call that reads 64 MB less is no slower in any format, and 16 sequences that share 8,192 tokens of 8 heads take 0.3 to
# 0.7 of the time (bench_shared_prefix.py). Where less is shared, a CPU's caches still have it the second time.
LEAST_SAVED = 1 << 26
# Options that count or choose the tokens of each sequence.
ALONE = ("window", "alibi_slopes", "mask", "parents", "indices", "num_splits")

Call = Callable[[ArrayView, ArrayView, Any, AttendRequest], AttentionCall]


class Neighbours(NamedTuple):
    """Sequences `first` to `end` of a call and how many first blocks they share; 0 if each is read separately."""

    first: int
    end: int
    blocks: int


def serves(live: runtime.Runtime, request: AttendRequest, by_head: bool) -> bool:
    """Whether a call may read shared blocks once.

    It may not if keys count by their distance or place in a sequence, for the mass, or if pages belong to heads; nor
    under ``tikv.init(invariant=True)``, since the order of the sums depends on which sequences share a block.
    """
    if live.invariant or by_head or request.shared_prefix == "off" or request.return_mass:
        return False
    return all(getattr(request, name) is None for name in ALONE)


class Block(NamedTuple):
    """How large a block of one layer is: in tokens, and in bytes of keys, values and scales."""

    tokens: int
    nbytes: int


def neighbours(table: Host, lens: Host, queries: int, block: Block) -> list[Neighbours]:
    """How the sequences of a call are read: a list of `Neighbours`, empty if each is to be read separately.

    Args:
        table: (B, blocks), on the host.
        lens: (B,) tokens, of which the last `queries` are those of the queries.
        queries: how many queries each sequence has.
        block: the form of the pool's blocks.
    """
    alike = (table[1:, 0] == table[:-1, 0]) & (table[1:, 0] >= 0)
    if not alike.any():
        return []
    runs: list[Neighbours] = []
    saved = 0
    starts = np.flatnonzero(np.concatenate([[True], ~alike]))
    for first, end in zip(starts.tolist(), [*starts[1:].tolist(), len(table)], strict=True):
        blocks = 0
        if end - first > 1:
            most = max(0, int(lens[first:end].min()) - queries) // block.tokens
            common = (table[first:end, :most] == table[first, :most]).all(axis=0)
            blocks = most if common.all() else int(common.argmin())
        if (end - first - 1) * blocks * block.nbytes < LEAST_SAVED:
            blocks = 0
        saved += blocks
        if blocks or not runs or runs[-1].blocks:
            runs.append(Neighbours(first, end, blocks))
        else:
            runs[-1] = runs[-1]._replace(end=end)
    return runs if saved else []


def as_one(a: ArrayView) -> ArrayView | None:
    """(sequences, heads, tokens, ...) as (1, heads, sequences * tokens, ...); None if no strides can express it."""
    count, heads, tokens, *rest = a.shape
    per_sequence, per_head, per_token, *others = a.strides
    if tokens == 1:
        per_token = per_sequence
    elif per_sequence != tokens * per_token:
        return None
    return a.restrided((1, heads, count * tokens, *rest), (count * tokens * per_token, per_head, per_token, *others))


def pool_call(operation: str, caches: Caches, terms: Mapping[str, ArrayView]) -> Call:
    """Calls of attention over a pool's caches; `terms` are views of the request's, those that it has left."""

    def call(q: ArrayView, table: ArrayView, lens: Any, request: AttendRequest) -> AttentionCall:
        passed = {name: a for name, a in terms.items() if getattr(request, name) is not None}
        return attention_call(operation, q, caches._replace(table=table, lens=lens), request, terms=passed)

    return call


class SharedAttention(NamedTuple):
    """Attention of queries (B, Hq, T, D), part of whose sequences share what they begin with.

    Attributes:
        operation, live, request: of which call.
        call: makes a call of attention of queries, a table and lengths, with options.
        tables: (B, blocks), on the device.
        own_lens: (B,) tokens after those that are shared, on the device.
        runs: which sequences share how many blocks of `block_size` tokens.
    """

    operation: str
    live: runtime.Runtime
    request: AttendRequest
    call: Call
    tables: ArrayView
    own_lens: ArrayView
    runs: Sequence[Neighbours]
    block_size: int

    def attend(self, q: ArrayView, out: ArrayView, lse: ArrayView | None) -> None:
        """Attention into `out` (B, Hq, T, D_v) and `lse` (B, Hq, T)."""
        for run in self.runs:
            own_q, to = q.part(0, run.first, run.end), out.part(0, run.first, run.end)
            to_lse = None if lse is None else lse.part(0, run.first, run.end)
            table = self.tables.part(0, run.first, run.end).part(1, run.blocks, self.tables.shape[1])
            call = self.call(own_q, table, self.own_lens.part(0, run.first, run.end), self.request)
            if run.blocks == 0:
                call.attend(None, Results(to, lse is not None, to_lse))
                continue
            before = self._over_shared(run, own_q, to.shape)
            part = new_array(to.shape, dtypes.float32, self.live)
            behind = call.attend(None, Results(part, True, is_partial=True))
            if to_lse is None:
                to_lse = new_array(to.shape[:3], dtypes.float32, self.live)
            merge_into(self.operation, (*before, *behind), False, to, to_lse)

    def _over_shared(self, run: Neighbours, q: ArrayView, shape: tuple[int, ...]) -> tuple[ArrayView, ArrayView]:
        """(result, log-sum-exps) of all queries of some sequences over the blocks that these share."""
        count, heads, tokens, width = shape
        part, sums = (new_array((count, tokens, heads, *last), dtypes.float32, self.live) for last in ((width,), ()))
        part, sums = part.transposed(0, 2, 1, 3), sums.transposed(0, 2, 1)
        together, to, to_lse = as_one(q), as_one(part), as_one(sums)
        assert together is not None
        table = self.tables.part(0, run.first, run.first + 1).part(1, 0, run.blocks)
        of_all = self.request._replace(causal=False, sink_logits=None)  # a sink logit counts once
        call = self.call(together, table, run.blocks * self.block_size, of_all)
        call.attend(None, Results(to, True, to_lse, is_partial=True))
        return part, sums
