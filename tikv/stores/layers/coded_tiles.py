"""Codes of KVarN's tiles; written, read, attended over.

Attention decodes some tiles at a time to float32, in memory of a limited size, and attends over them; the results are
merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, write_host
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.merge import merge_into
from tikv.ops.attention.plan import AttentionPlan, Results
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import LINEAR, Placement, Rows
from tikv.ops.quantize_tiles import TILES_OF, TileRows, run_tiles
from tikv.stores.layers.attend import cache_plan
from tikv.stores.layers.coded_arrays import CodeSlots, ScoreMemory, Weighing
from tikv.stores.layers.memory import rows_of
from tikv.stores.layers.token_group_form import TileForm

DECODED_BYTES = 1 << 23  # of keys and values that are decoded at a time


class DecodedTokens(NamedTuple):
    """Neighbouring slots of some sequences, decoded together.

    Attributes:
        first, sequences: the first sequence, and how many.
        slots: the slots, of the block if there are blocks.
        block: the number of the block.
        at: the number of the first of these tokens among those that are attended over.
        newer: how many codes of the sequence are newer.
    """

    first: int
    sequences: int
    slots: range
    block: int
    at: int
    newer: int


class CodedTiles(NamedTuple):
    """The arrays of codes, (n, heads, tiles, ...), see `TileForm.arrays`; the calls are those of `CodedArrays`."""

    form: TileForm
    k: ArrayView
    k_numbers: ArrayView
    k_factors: ArrayView
    v: ArrayView
    v_numbers: ArrayView
    v_factors: ArrayView

    def turned(self, sequences: int, groups: int, dtype: dtypes.DType, live: runtime.Runtime) -> int:
        """How many sequences `encode` gets; `run_tiles` allocates memory."""
        return sequences

    def encode(
        self,
        live: runtime.Runtime,
        operation: str,
        rows: tuple[Rows, Rows],
        sequences: int,
        token: int,
        block: int = 0,
        placement: Placement = LINEAR,
    ) -> None:
        """Quantise a tile of rows of K and V; its slots follow each other from that of `placement` on."""
        at = [a._replace(first=a.first + placement.position * a.token) for a in rows]
        group = range(token, token + self.form.group)
        self._run(live, operation, group, (at[0], at[1]), sequences, block, writes_tiles=True)

    def decode(
        self,
        live: runtime.Runtime,
        operation: str,
        tokens: range,
        to: tuple[Rows, Rows],
        sequences: int,
        block: int = 0,
    ) -> None:
        """Decode these tokens, in two launches."""
        self._run(live, operation, tokens, to, sequences, block, writes_tiles=False)

    def _run(
        self, live: runtime.Runtime, operation: str, tokens: range, rows: tuple[Rows, Rows], sequences: int, block: int,
        writes_tiles: bool,
    ) -> None:  # fmt: skip
        form, tiles = self.form, self.k.shape[2]
        first = block * form.heads * tiles + tokens.start // form.group
        arrays = (self.k, self.k_numbers, self.k_factors), (self.v, self.v_numbers, self.v_factors)
        for of, to, codes, width in zip(TILES_OF, rows, arrays, form.widths, strict=True):
            firsts = [a.offset // a.dtype.itemsize + first * a.strides[2] for a in codes]
            places = TileRows(
                sequences, form.heads, len(tokens), to.sequence, to.head, to.token,
                (to.array.offset // to.array.dtype.itemsize + to.first, firsts[0], firsts[1], firsts[2]), tiles,
                tokens.start % form.group,
            )  # fmt: skip
            run_tiles(live, operation, form.tiles, of, (to.array, *codes), places, width, writes_tiles)

    def attend(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory
    ) -> Any:
        """Attention of (batch, Hq, T, D) queries over the codes: float32 results and log-sum-exps."""
        to = scratch.partial("of codes", (*q.shape[:3], self.form.widths[1]))
        by_first: dict[int, list[DecodedTokens]] = {}
        for run in self._runs(slots, q.shape[0]):
            by_first.setdefault(run.first, []).append(run)
        if sum(runs[0].sequences for runs in by_first.values()) < q.shape[0]:
            _clear(to)  # a sequence has no codes
        for first, runs in by_first.items():
            part = [a.part(0, first, first + runs[0].sequences) for a in (q, to.out, to.lse)]
            self._attend_in_turn(operation, part[0], scores, slots, runs, scratch, part[1], part[2])
        return to.out, to.lse

    def _attend_in_turn(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, runs: list[DecodedTokens],
        scratch: ScoreMemory, out: ArrayView, lse: ArrayView,
    ) -> None:  # fmt: skip
        """Attention over some runs of the same sequences, whose results are merged one by one."""
        before: Any = None
        for i, run in enumerate(runs):
            plan, arrays, tokens = self._decoded(operation, q, scores, slots, run, scratch)
            is_last = i == len(runs) - 1
            to = Results(out, True, lse, is_partial=True, is_new=True)
            if not is_last:
                to = scratch.partial(f"of codes {i % 2}", out.shape)
            if before is None:
                before = plan.attend(None, arrays, tokens, to)
            else:
                result = plan.attend(None, arrays, tokens, scratch.partial("of some codes", out.shape))
                before = merge_into(operation, (*before, *result), False, to.out, to.lse)

    def weigh(
        self,
        operation: str,
        q: ArrayView,
        weighing: Weighing,
        scores: AttentionScale,
        slots: CodeSlots,
        scratch: ScoreMemory,
    ) -> None:
        """Weigh the codes; see `AttentionPlan.weigh`."""
        for run in self._runs(slots, q.shape[0]):
            end = run.first + run.sequences
            asking, lse, to = (a.part(0, run.first, end) for a in (q, weighing.lse, weighing.to))
            plan, arrays, tokens = self._decoded(operation, asking, scores, slots, run, scratch)
            plan.weigh(arrays, lse, to.part(2, run.at, run.at + len(run.slots)), tokens, weighing.kind)

    def _decoded(
        self,
        operation: str,
        q: ArrayView,
        scores: AttentionScale,
        slots: CodeSlots,
        run: DecodedTokens,
        scratch: ScoreMemory,
    ) -> tuple[AttentionPlan, dict[str, ArrayView], AttendedTokens]:
        """Decode a run; the plan of attention over its tokens, the plan's arrays, and which tokens they are."""
        form, live = self.form, scratch.runtime
        lead = run.sequences, form.heads, self._most(slots, run.sequences)
        k, v = (scratch.array(f"decoded {of}", (*lead, n)) for of, n in zip(TILES_OF, form.widths, strict=True))
        self.decode(live, operation, run.slots, (rows_of(k), rows_of(v)), run.sequences, run.block)
        arrays = {"q": q, "k": k, "v": v}
        causal = slots.span is not None
        plan = cache_plan(live, operation, arrays, scores, slots.span or 0, 0, 0, causal=causal)
        return plan, arrays, AttendedTokens(len(run.slots), ahead=slots.tokens.ahead + run.newer)

    def _most(self, slots: CodeSlots, sequences: int) -> int:
        """How many tokens of so many sequences are decoded at a time, in whole tiles."""
        group, room = self.form.group, slots.page or slots.room
        most = DECODED_BYTES // (sequences * self.form.heads * sum(self.form.widths) * 4)
        return max(group, min(room, most) // group * group)

    def _runs(self, slots: CodeSlots, batch: int) -> Iterator[DecodedTokens]:
        """What is decoded one after the other."""
        if slots.page:
            for i, (blocks, coded) in enumerate(slots.known):
                most, at = self._most(slots, 1), 0
                while at < coded:
                    first = at % slots.page
                    end = at + min(coded - at, most, slots.page - first)
                    yield DecodedTokens(i, 1, range(first, first + end - at), blocks[at // slots.page], at, coded - end)
                    at = end
            return
        most, oldest, end = self._most(slots, batch), slots.tokens.first_valid, slots.tokens.length
        at = oldest
        while at < end:
            slot = at % slots.room
            count = min(end - at, slots.room - slot, most)
            yield DecodedTokens(0, batch, range(slot, slot + count), 0, at - oldest, end - at - count)
            at += count


def _clear(to: Results) -> None:
    """Make a result one over no keys."""
    assert to.lse is not None
    write_host(np.zeros(to.out.shape, np.float32), to.out)
    write_host(np.full(to.lse.shape, -np.inf, np.float32), to.lse)
