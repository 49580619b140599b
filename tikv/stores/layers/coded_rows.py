"""Codes of older tokens, with scales for each token: what `tikv.Quant(sinks=, recent=)` keeps of keys and values."""

from __future__ import annotations

from typing import Any

from tikv import dtypes, runtime
from tikv.arrays import ArrayView
from tikv.ops.attention.call import plan_key
from tikv.ops.attention.options import AttentionOptions, CacheLayout
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import LINEAR, Placement, Rows, Scale
from tikv.stores.layers.attend import cache_plan
from tikv.stores.layers.coded_arrays import CodeSlots, ScoreMemory, Weighing, rows_of_blocks
from tikv.stores.layers.memory import copy_rows
from tikv.stores.layers.token_group_form import RowForm
from tikv.stores.row_format import ROWS, SCALES, RowFormat


class CodedRows:
    """The arrays of codes, (n, heads, tokens, ...), see `RowForm.arrays`; n and calls are those of `CodedArrays`."""

    def __init__(self, form: RowForm, *arrays: ArrayView) -> None:
        self.form = form
        named = dict(zip(form.arrays(), arrays, strict=True))
        names = [*zip(ROWS, (f"{x}_codes" for x in ROWS), strict=True)]
        names += [*zip(SCALES, (f"{x}_numbers" for x in ROWS), strict=True)]
        self.attended = {name: named[of] for name, of in names if of in named}

    def _rows(self, name: str, token: int, block: int) -> Rows:
        """K or V from a token on, of all sequences, or of a block."""
        row = self._formats[ROWS.index(name)]
        a, scales, scale = self.attended[name], self.attended.get(f"{name}_scale"), None
        if scales is not None:
            of, head, step = scales.strides[:3]
            scale = Scale(scales, sequence=of, head=head, token=step, first=block * of + token * step)
        of, head, step, _ = a.strides
        first = block * of + token * step
        return Rows(a, sequence=of, head=head, token=step, first=first, format=row.format, scale=scale)

    @property
    def _formats(self) -> tuple[RowFormat, RowFormat]:
        return self.form.keys, self.form.values

    def turned(self, sequences: int, groups: int, dtype: dtypes.DType, live: runtime.Runtime) -> int:
        """How many sequences `encode` gets, which needs no memory: rows become codes as they are."""
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
        """Quantise a group of rows of K and V, whose slots `placement` gives, in two launches."""
        shape = sequences, self.form.heads, self.form.group
        for name, source, row in zip(ROWS, rows, self._formats, strict=True):
            copy_rows(live, operation, [source], [self._rows(name, token, block)], [row.width], shape, placement)

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
        shape = sequences, self.form.heads, len(tokens)
        for name, target, row in zip(ROWS, to, self._formats, strict=True):
            copy_rows(live, operation, [self._rows(name, tokens.start, block)], [target], [row.width], shape)

    def attend(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory
    ) -> Any:
        """Attention of (batch, Hq, T, D) queries over the codes, which are read in place."""
        plan, arrays = self._plan(operation, q, scores, slots, scratch)
        to = scratch.partial("of codes", (*q.shape[:3], self.form.values.width))
        return plan.attend(None, arrays, slots.tokens, to)

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
        plan, arrays = self._plan(operation, q, scores, slots, scratch)
        plan.weigh(arrays, weighing.lse, weighing.to, slots.tokens, weighing.kind)

    def _plan(
        self, operation: str, q: ArrayView, scores: AttentionScale, slots: CodeSlots, scratch: ScoreMemory
    ) -> tuple[AttentionPlan, dict[str, ArrayView]]:
        """The plan of attention over the codes, and its arrays."""
        arrays = {"q": q, **self.attended, **slots.paged}
        if slots.page:
            return self._paged_plan(operation, arrays, scores, slots, scratch.runtime), arrays
        formats = self.form.keys.format, self.form.values.format
        form = slots.span or 0, 0, slots.ring, formats
        plan = cache_plan(scratch.runtime, operation, arrays, scores, *form, causal=slots.span is not None)
        return plan, arrays

    def _paged_plan(
        self, operation: str, arrays: dict[str, ArrayView], scores: AttentionScale, slots: CodeSlots,
        live: runtime.Runtime,
    ) -> AttentionPlan:  # fmt: skip
        """The plan of attention over codes in the blocks of a pool, all of which each query sees."""
        form = self.form
        options = ("coded rows", *scores, form.keys.format, form.values.format, slots.room, slots.page, slots.blocks)
        key = plan_key(operation, arrays, options)
        plan: AttentionPlan | None = live.plans.get(key)
        if plan is None:
            cache = CacheLayout(
                k=rows_of_blocks(self._rows("k", 0, 0)),
                v=rows_of_blocks(self._rows("v", 0, 0)),
                heads=form.heads,
                width=form.keys.width,
                width_v=form.values.width,
                kind="table",
                capacity=slots.room,
                page=slots.page,
                blocks=slots.blocks,
            )
            asked = AttentionOptions(scores.scale, causal=False, softcap=scores.softcap)
            plan = live.plans.keep(key, AttentionPlan(live, operation, arrays, cache, asked))
        return plan
