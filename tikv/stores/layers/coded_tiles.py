"""Codes of KVarN's tiles; written, read, attended over.

A few query rows of a KV head read the codes in place. For more, some tiles at a time are decoded, in memory of a
limited size, and attended over; the results are merged by their log-sum-exps. If there is room, a prompt on CUDA
decodes all tiles once, beside copies of the newest tokens and its own, and attends over them as over any cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, write_host
from tikv.ops.attention.coded_tiles import (
    SeenTiles,
    TileCodes,
    TileScratch,
    attend_tiles,
    fused_parts_of,
    parts_of,
    weigh_tiles,
    why_not_fused,
)
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

DECODED_BYTES = 1 << 26  # of keys and values that are decoded at a time
JOINED_BYTES = 1 << 27  # of keys and values that a prompt reads as one array
SCORE_BYTES = 1 << 27  # of scores that are computed at a time
MOST_ROWS = 16  # query rows of a KV head that read codes in place
TILES_TOGETHER = 256  # of all heads and sequences that a launch encodes


class DecodedTokens(NamedTuple):
    """Neighbouring slots of some sequences, decoded together.

    Attributes:
        first, sequences: the first sequence, and how many.
        slots: the slots, counted through all blocks if there are blocks.
        at: the number of the first of these tokens among those that are attended over.
        newer: how many codes of the sequence are newer.
    """

    first: int
    sequences: int
    slots: range
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

    def encode_rows(
        self, live: runtime.Runtime, operation: str, rows: tuple[Rows, Rows], sequences: int, tokens: range
    ) -> None:
        """Quantise rows of K and V that follow each other, whole tiles, in two launches for some of them."""
        most = max(1, TILES_TOGETHER // (sequences * self.form.heads)) * self.form.group
        for first in range(0, len(tokens), most):
            at = [a._replace(first=a.first + first * a.token) for a in rows]
            self._run(live, operation, tokens[first : first + most], (at[0], at[1]), sequences, writes_tiles=True)

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
        self._run(live, operation, tokens, to, sequences, block)

    def decode_blocks(
        self, live: runtime.Runtime, operation: str, tokens: int, to: tuple[Rows, Rows], table: ArrayView
    ) -> None:
        """Decode the first tokens of sequences whose blocks a table (sequences, blocks) has, in two launches."""
        self._run(live, operation, range(tokens), to, table.shape[0], table=table)

    def _run(
        self, live: runtime.Runtime, operation: str, tokens: range, rows: tuple[Rows, Rows], sequences: int,
        block: int = 0, table: ArrayView | None = None, writes_tiles: bool = False,
    ) -> None:  # fmt: skip
        """Encode or decode these tokens of sequences, of a block, or of the blocks of a table."""
        form, tiles = self.form, self.k.shape[2]
        at = block * form.heads * tiles + (0 if table else tokens.start // form.group)
        arrays = (self.k, self.k_numbers, self.k_factors), (self.v, self.v_numbers, self.v_factors)
        for of, to, codes, width in zip(TILES_OF, rows, arrays, form.widths, strict=True):
            firsts = [a.offset // a.dtype.itemsize + at * a.strides[2] for a in codes]
            places = TileRows(
                sequences, form.heads, len(tokens), to.sequence, to.head, to.token, tiles,
                (to.array.offset // to.array.dtype.itemsize + to.first, firsts[0], firsts[1], firsts[2]),
                tokens.start if table else tokens.start % form.group, table,
            )  # fmt: skip
            run_tiles(live, operation, form.tiles, of, (to.array, *codes), places, width, writes_tiles)

    def attend(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory
    ) -> Any:
        """Attention of (batch, Hq, T, D) queries over the codes: float32 results and log-sum-exps."""
        to = scratch.partial("of codes", (*q.shape[:3], self.form.widths[1]))
        if self._is_in_place(q, q.shape[2]):
            self._attend_in_place(operation, q, scores, slots, scratch, to)
        else:
            self._attend_decoded(operation, q, scores, slots, scratch, to)
        return to.out, to.lse

    def _is_in_place(self, q: ArrayView, queries: int) -> bool:
        """Whether so many queries of a sequence, with as many heads as `q`, read the codes in place."""
        return q.shape[1] * queries // self.form.heads <= MOST_ROWS

    def _decoded_dtype(self, q: ArrayView, queries: int, live: runtime.Runtime) -> dtypes.DType:
        """The dtype of decoded tiles: that of many queries, if prompts read tiles so (see `joins_tokens`)."""
        return q.dtype if joins_tokens(live) and not self._is_in_place(q, queries) else dtypes.float32

    def _codes(self, slots: CodeSlots) -> tuple[TileCodes, TileCodes]:
        """The codes of keys and of values, and where those of a sequence are."""
        table, lens = slots.paged.get("table"), slots.paged.get("lens")
        keys = TileCodes("keys", self.k, self.k_numbers, self.k_factors, table, lens)
        values = TileCodes("values", self.v, self.v_numbers, self.v_factors, table, lens)
        return keys, values

    def _attend_in_place(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory, to: Results
    ) -> None:
        """Attention that reads the codes, of as many sequences at a time as there is room for scores of."""
        codes = self._codes(slots)
        if not why_not_fused(scratch.runtime, q, codes):
            parts = fused_parts_of(scratch.runtime, q, codes, self.form.tiles, slots.groups)
            memory = TileScratch(
                scratch.array("rotated queries", q.shape),
                scratch.array("sums of codes", (parts, *q.shape[:3])),
                scratch.array("parts of codes", (parts, *q.shape[:3], self.form.widths[1])),
                is_fused=True,
            )
            form = self.form.tiles, self._seen(slots), scores
            attend_tiles(scratch.runtime, operation, q, codes, *form, memory, (to.out, to.lse))
            return
        for first, end, memory, seen in self._in_place(q, slots, scratch):
            asking, out, lse = (a.part(0, first, end) for a in (q, to.out, to.lse))
            read = codes[0].sequences(first, end), codes[1].sequences(first, end)
            attend_tiles(scratch.runtime, operation, asking, read, self.form.tiles, seen, scores, memory, (out, lse))

    def _seen(self, slots: CodeSlots) -> SeenTiles:
        """Which tiles are read, and which of their tokens a query sees."""
        known = slots.tokens
        return SeenTiles(slots.groups, known.length, known.first_valid, known.ahead, slots.span, slots.ring)

    def _in_place(
        self, q: ArrayView, slots: CodeSlots, scratch: ScoreMemory
    ) -> Iterator[tuple[int, int, TileScratch, SeenTiles]]:
        """The sequences whose scores there is room for at a time, from one to another; memory, and what they see."""
        heads, (batch, of_all, queries, width), width_v = self.form.heads, q.shape, self.form.widths[1]
        rows, tiles, seen = of_all // heads * queries, slots.groups, self._seen(slots)
        tokens = min(slots.room, self.form.group << (tiles - 1).bit_length())
        several = max(1, min(batch, SCORE_BYTES // (heads * rows * tokens * 4)))
        for first in range(0, batch, several):
            count = min(batch - first, several)
            parts = parts_of(scratch.runtime, count, heads, rows, width_v, tiles)
            memory = TileScratch(
                scratch.array("rotated queries", (count, of_all, queries, width)),
                scratch.array("scores", (count, heads, rows, tokens)),
                scratch.array("parts of codes", (parts, count, of_all, queries, width_v)),
            )
            yield first, first + count, memory, seen

    def _attend_decoded(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory, to: Results
    ) -> None:
        """Attention over decoded tiles, some at a time."""
        dtype = self._decoded_dtype(q, q.shape[2], scratch.runtime)
        by_first: dict[int, list[DecodedTokens]] = {}
        for run in self._runs(slots, q.shape[0], dtype):
            by_first.setdefault(run.first, []).append(run)
        if sum(runs[0].sequences for runs in by_first.values()) < q.shape[0]:
            _clear(to)  # a sequence has no codes
        for first, runs in by_first.items():
            asking, out, lse = (a.part(0, first, first + runs[0].sequences) for a in (q, to.out, to.lse))
            result = to._replace(out=out, lse=lse)
            self._attend_in_turn(operation, asking, scores, slots, runs, scratch, result, dtype)

    def _attend_in_turn(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, runs: list[DecodedTokens],
        scratch: ScoreMemory, result: Results, dtype: dtypes.DType,
    ) -> None:  # fmt: skip
        """Attention over some runs of the same sequences, whose results are merged one by one."""
        before: Any = None
        for i, run in enumerate(runs):
            plan, arrays, tokens = self._decoded(operation, q, scores, slots, run, scratch, dtype)
            is_last = i == len(runs) - 1
            to = result if is_last else scratch.partial(f"of codes {i % 2}", result.out.shape)
            if before is None:
                before = plan.attend(None, arrays, tokens, to)
            else:
                piece = plan.attend(None, arrays, tokens, scratch.partial("of some codes", result.out.shape))
                before = merge_into(operation, (*before, *piece), False, to.out, to.lse)

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
        if self._is_in_place(q, weighing.among):
            for first, end, memory, seen in self._in_place(q, slots, scratch):
                asking, lse, to = (a.part(0, first, end) for a in (q, weighing.lse, weighing.to))
                keys, form = self._codes(slots)[0].sequences(first, end), (self.form.tiles, seen, scores)
                weigh_tiles(scratch.runtime, operation, asking, keys, *form, memory, (lse, to, weighing.kind))
            return
        dtype = self._decoded_dtype(q, weighing.among, scratch.runtime)
        for run in self._runs(slots, q.shape[0], dtype):
            end = run.first + run.sequences
            asking, lse, to = (a.part(0, run.first, end) for a in (q, weighing.lse, weighing.to))
            plan, arrays, tokens = self._decoded(operation, asking, scores, slots, run, scratch, dtype)
            plan.weigh(arrays, lse, to.part(2, run.at, run.at + len(run.slots)), tokens, weighing.kind)

    def _decoded(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, run: DecodedTokens,
        scratch: ScoreMemory, dtype: dtypes.DType,
    ) -> tuple[AttentionPlan, dict[str, ArrayView], AttendedTokens]:  # fmt: skip
        """Decode a run; the plan of attention over its tokens, the plan's arrays, and which tokens they are."""
        form, live, table = self.form, scratch.runtime, slots.paged.get("table")
        lead = run.sequences, form.heads, self._most(slots, run.sequences, dtype)
        k, v = (scratch.array(f"decoded {of}", (*lead, n), dtype) for of, n in zip(TILES_OF, form.widths, strict=True))
        blocks = table and table.part(0, run.first, run.first + run.sequences)
        self._run(live, operation, run.slots, (rows_of(k), rows_of(v)), run.sequences, table=blocks)
        arrays = {"q": q, "k": k, "v": v}
        causal = slots.span is not None
        plan = cache_plan(live, operation, arrays, scores, slots.span or 0, 0, 0, causal=causal)
        return plan, arrays, AttendedTokens(len(run.slots), ahead=slots.tokens.ahead + run.newer)

    def _most(self, slots: CodeSlots, sequences: int, dtype: dtypes.DType) -> int:
        """How many tokens of so many sequences are decoded at a time, in whole tiles."""
        group, token = self.form.group, self.form.heads * sum(self.form.widths) * dtype.itemsize
        return max(group, min(slots.room, DECODED_BYTES // (sequences * token)) // group * group)

    def _runs(self, slots: CodeSlots, batch: int, dtype: dtypes.DType) -> Iterator[DecodedTokens]:
        """What is decoded one after the other."""
        if slots.page:
            most = self._most(slots, 1, dtype)
            for i, (_, coded) in enumerate(slots.known):
                for at in range(0, coded, most):
                    end = min(coded, at + most)
                    yield DecodedTokens(i, 1, range(at, end), at, coded - end)
            return
        most, oldest, end = self._most(slots, batch, dtype), slots.tokens.first_valid, slots.tokens.length
        at = oldest
        while at < end:
            slot = at % slots.room
            count = min(end - at, slots.room - slot, most)
            yield DecodedTokens(0, batch, range(slot, slot + count), at - oldest, end - at - count)
            at += count


def joins_tokens(live: runtime.Runtime) -> bool:
    """Whether prompts read tokens as rows of their dtype: on CUDA, for whose tensor cores this pays off."""
    return live.is_cuda


def joined_memory(
    form: TileForm, q: ArrayView, new: tuple[ArrayView, ArrayView], tokens: int, scratch: ScoreMemory
) -> list[ArrayView] | None:
    """Memory for `tokens` keys and values, decoded and unquantised, that a prompt attends over as one array.

    None if it is not served: few queries read codes in place, rows have another dtype than queries, or room is lacking.
    """
    live, dtype, heads = scratch.runtime, q.dtype, form.heads
    room = 1 << (tokens - 1).bit_length()  # a few sizes serve all prompts
    if math.prod(q.shape[1:-1]) // heads <= MOST_ROWS or not joins_tokens(live):
        return None
    if {a.dtype for a in new} | {form.rows} != {dtype} or dtype not in (dtypes.float16, dtypes.bfloat16):
        return None
    if room * q.shape[0] * heads * sum(form.widths) * dtype.itemsize > JOINED_BYTES:
        return None
    shapes = [(q.shape[0], heads, room, width) for width in form.widths]
    return [scratch.array(f"joined {of}", shape, dtype) for of, shape in zip(TILES_OF, shapes, strict=True)]


def _clear(to: Results) -> None:
    """Make a result one over no keys."""
    assert to.lse is not None
    write_host(np.zeros(to.out.shape, np.float32), to.out)
    write_host(np.full(to.lse.shape, -np.inf, np.float32), to.lse)
