"""Codes of groups of tokens: keys by channel over a group, values by token or as numbers; written, read, attended over.

A group is quantised once, while its rows are still stored, and never written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, new_array
from tikv.ops.attention.by_channel import ChannelKeys, ScoredValues, channel_plan, channel_scores, scored_plan
from tikv.ops.attention.launches import ALL, AttendedTokens
from tikv.ops.attention.plan import AttentionPlan, Results
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import LINEAR, Placement, Rows, Scale
from tikv.runtime.cache import BoundedCache
from tikv.stores.layers.attend import NO_VIEWS
from tikv.stores.layers.memory import copy_rows
from tikv.stores.layers.token_group_form import CodeForm

MOST_SCRATCH = 16


class ScoreMemory:
    """Memory that passes results from one launch to the next, by purpose and shape.

    In a decode loop it is always the same memory, so launches need not be bound to other addresses.
    """

    def __init__(self, live: runtime.Runtime) -> None:
        self.runtime = live
        self._arrays: BoundedCache[tuple[str, tuple[int, ...], str], ArrayView] = BoundedCache(MOST_SCRATCH)

    def array(self, purpose: str, shape: tuple[int, ...], dtype: dtypes.DType = dtypes.float32) -> ArrayView:
        """Memory of this shape, with any contents."""
        key = purpose, shape, dtype.short
        memory = self._arrays.get(key)
        if memory is None:
            memory = self._arrays.keep(key, new_array(shape, dtype, self.runtime))
        return memory

    def partial(self, purpose: str, shape: tuple[int, ...]) -> Results:
        """Memory for a result of attention of this shape and its log-sum-exps, to be merged with another."""
        out, lse = self.array(purpose, shape), self.array(f"sums {purpose}", shape[:-1])
        return Results(out, True, lse, is_partial=True, is_new=True)


class CodeSlots(NamedTuple):
    """Which codes are attended over, and where their slots are.

    Attributes:
        groups: the most groups that a sequence has.
        room: slots of a sequence, or as many as a table can name.
        ring: slots of the ring; 0 without a ring.
        span: tokens that a query sees, itself included, if queries come after the keys; None: each query sees all keys.
        tokens: the tokens that are attended over.
        page, blocks: slots per block and number of blocks, if codes lie in pages; else 0.
        paged: for a pool, the block tables, "table", and how many tokens of each sequence are codes, "lens".
        known: for a pool, the blocks of each sequence, and how many of its tokens are codes.
    """

    groups: int
    room: int
    ring: int = 0
    span: int | None = None
    tokens: AttendedTokens = ALL
    page: int = 0
    blocks: int = 0
    paged: Mapping[str, ArrayView] = NO_VIEWS
    known: Sequence[tuple[Sequence[int], int]] = ()


class Weighing(NamedTuple):
    """What weighs keys: the log-sum-exps of all scores of the queries, (batch, Hq, T), and the mass to write."""

    among: int  # queries that the call attended with: those that weigh are its last ones, and read what it read
    lse: ArrayView
    to: ArrayView  # (batch, heads, tokens), which accumulates
    kind: str


def rows_of_blocks(rows: Rows) -> Rows:
    """Rows (blocks, heads, tokens, ...) as attention over pages reads them."""
    scale = rows.scale and rows.scale._replace(sequence=0, block=rows.scale.sequence)
    return rows._replace(sequence=0, block=rows.sequence, scale=scale)


class CodedArrays(NamedTuple):
    """The arrays of codes, (n, heads, groups or tokens, ...), see `CodeForm.arrays`.

    n counts the sequences of a layer, or the blocks of a pool; blocks are written and read one at a time.
    """

    form: CodeForm
    k: ArrayView
    k_numbers: ArrayView
    v: ArrayView
    v_numbers: ArrayView | None = None

    def keys(self, token: int = 0, block: int = 0) -> Rows:
        """The keys from the group of a token on: each channel is a row, and each head is its own sequence."""
        group, codes, numbers = token // self.form.keys.group, self.k.strides, self.k_numbers.strides
        first = block * numbers[0] + group * numbers[2]
        scale = Scale(self.k_numbers, sequence=numbers[1], token=numbers[3], first=first)
        first = block * codes[0] + group * codes[2]
        return Rows(self.k, sequence=codes[1], token=codes[3], first=first, format=self.form.keys, scale=scale)

    def values(self, token: int = 0, block: int = 0) -> Rows:
        """The values from a token on."""
        scale, (sequence, head, step, _) = None, self.v.strides
        if self.v_numbers is not None:
            of, to_head, to_next = self.v_numbers.strides[:3]
            first = block * of + token * to_next
            scale = Scale(self.v_numbers, sequence=of, head=to_head, token=to_next, first=first)
        return Rows(
            self.v, sequence=sequence, head=head, token=step, first=block * sequence + token * step,
            format=self.form.values.format, scale=scale,
        )  # fmt: skip

    def _by_channel(self, a: ArrayView) -> tuple[Rows, Rows]:
        """Keys (sequences * heads, groups * width, group), with a row per channel of a group, and as rows of tokens."""
        group, head, heads = self.form.keys.group, a.strides[0], self.form.heads
        tokens = Rows(a, sequence=heads * head, head=head, block=self.form.width * group, token=1, inner=(1, group))
        return Rows(a, sequence=head, token=group), tokens

    def turned(self, sequences: int, groups: int, dtype: dtypes.DType, live: runtime.Runtime) -> ArrayView:
        """New memory for keys by channel."""
        pairs, group = sequences * self.form.heads, self.form.keys.group
        return new_array((pairs, groups * self.form.width, group), dtype, live)

    def encode(
        self,
        live: runtime.Runtime,
        operation: str,
        rows: tuple[Rows, Rows],
        transposed: ArrayView,
        token: int,
        block: int = 0,
        placement: Placement = LINEAR,
    ) -> None:
        """Quantise a group of rows of K and V, whose slots `placement` gives, in three launches.

        `transposed` is memory for the group's keys by channel, for all sequences that the rows belong to.
        """
        form, pairs, group = self.form, transposed.shape[0], self.form.keys.group
        by_channel, by_token = self._by_channel(transposed)
        shape = pairs // form.heads, form.heads, group
        copy_rows(live, operation, [rows[0]], [by_token], [form.width], shape, placement)
        copy_rows(live, operation, [by_channel], [self.keys(token, block)], [group], (pairs, 1, form.width))
        copy_rows(live, operation, [rows[1]], [self.values(token, block)], [form.values.width], shape, placement)

    def decode(
        self,
        live: runtime.Runtime,
        operation: str,
        tokens: range,
        to: tuple[Rows, Rows],
        sequences: int,
        block: int = 0,
    ) -> None:
        """Decode these tokens, which go up to the end of a group, in three launches."""
        form, group = self.form, self.form.keys.group
        skip = tokens.start % group
        transposed = self.turned(sequences, (skip + len(tokens)) // group, dtypes.float32, live)
        by_channel, by_token = self._by_channel(transposed)
        pairs, channels, _ = transposed.shape
        shape, placement = (sequences, form.heads, len(tokens)), Placement("linear", group, position=skip)
        keys, values = self.keys(tokens.start, block), self.values(tokens.start, block)
        copy_rows(live, operation, [keys], [by_channel], [group], (pairs, 1, channels))
        copy_rows(live, operation, [by_token], [to[0]], [form.width], shape, placement)
        copy_rows(live, operation, [values], [to[1]], [form.values.width], shape)

    def attend(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory
    ) -> Any:
        """Attention of (batch, Hq, T, D) queries over the codes: float32 results and log-sum-exps.

        K's and V's codes are read in place, in one launch or two, and one more if the keys are split over several.

        Args:
            operation, q, scores: those of the call.
            slots: which codes, and where they are.
            scratch: memory for the scores and the results.
        """
        keys, arrays = self._read(q, slots)
        in_place = {**arrays, "k_scale": self.k_numbers}
        values = self._values_at(slots)
        plan = channel_plan(scratch.runtime, operation, in_place, keys, values, scores)
        if plan is not None:
            arrays = in_place
        else:
            plan = self._scored(operation, arrays, keys, scores, slots.groups, values, scratch)
        return plan.attend(None, arrays, slots.tokens, scratch.partial("of codes", (*q.shape[:3], values.width)))

    def weigh(
        self,
        operation: str,
        q: ArrayView,
        weighing: Weighing,
        scores: AttentionScale,
        slots: CodeSlots,
        scratch: ScoreMemory,
    ) -> None:
        """Weigh the codes, in two launches; see `AttentionPlan.weigh`. The others are as in `attend`."""
        keys, arrays = self._read(q, slots)
        plan = self._scored(operation, arrays, keys, scores, slots.groups, self._values_at(slots), scratch)
        plan.weigh(arrays, weighing.lse, weighing.to, slots.tokens, weighing.kind)

    def _values_at(self, slots: CodeSlots) -> ScoredValues:
        """Where V's codes are."""
        rows = rows_of_blocks(self.values()) if slots.page else self.values()
        width = self.form.values.width
        return ScoredValues(rows, width, slots.room, slots.ring, slots.span, slots.page, slots.blocks)

    def _read(self, q: ArrayView, slots: CodeSlots) -> tuple[ChannelKeys, dict[str, ArrayView]]:
        """K's codes and their places, and the arrays of a call."""
        arrays = {"q": q, "k": self.k, "v": self.v, **slots.paged}
        if self.v_numbers is not None:
            arrays["v_scale"] = self.v_numbers
        return ChannelKeys(self.k, self.k_numbers, self.form.keys, slots.paged.get("table")), arrays

    def _scored(
        self, operation: str, arrays: dict[str, ArrayView], keys: ChannelKeys, scores: AttentionScale, groups: int,
        values: ScoredValues, scratch: ScoreMemory,
    ) -> AttentionPlan:  # fmt: skip
        """Compute the scores of K's codes, which take K's place in `arrays`; the plan of attention that reads them."""
        q, heads = arrays["q"], self.form.heads
        arrays["k"] = scratch.array("scores", (q.shape[0], heads, q.shape[1] // heads * q.shape[2], values.tokens))
        channel_scores(scratch.runtime, operation, q, keys, arrays["k"], groups)
        return scored_plan(scratch.runtime, operation, arrays, values, scores)
