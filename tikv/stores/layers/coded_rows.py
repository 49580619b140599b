"""Codes of older tokens, with scales for each token: what `tikv.Quant(sinks=, recent=)` keeps of keys and values."""

from __future__ import annotations

from typing import Any

from tikv import dtypes, runtime
from tikv.arrays import ArrayView
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import LINEAR, Placement, Rows, Scale
from tikv.stores.layers.attend import cache_plan
from tikv.stores.layers.coded_arrays import CodeSlots, ScoreMemory, Weighing
from tikv.stores.layers.memory import copy_rows
from tikv.stores.layers.token_group_form import RowForm
from tikv.stores.row_format import ROWS, SCALES, RowFormat


class CodedRows:
    """The arrays of codes, (n, heads, tokens, ...), see `RowForm.arrays`; the calls are those of `CodedArrays`."""

    def __init__(self, form: RowForm, *arrays: ArrayView) -> None:
        self.form = form
        named = dict(zip(form.arrays(), arrays, strict=True))
        names = [*zip(ROWS, (f"{x}_codes" for x in ROWS), strict=True)]
        names += [*zip(SCALES, (f"{x}_numbers" for x in ROWS), strict=True)]
        self.attended = {name: named[of] for name, of in names if of in named}

    def _rows(self, name: str, token: int) -> Rows:
        """K or V from a token on."""
        row = self._formats[ROWS.index(name)]
        a, scales, scale = self.attended[name], self.attended.get(f"{name}_scale"), None
        if scales is not None:
            steps = scales.strides
            scale = Scale(scales, sequence=steps[0], head=steps[1], token=steps[2], first=token * steps[2])
        return Rows(
            a, sequence=a.strides[0], head=a.strides[1], token=a.strides[2], first=token * a.strides[2],
            format=row.format, scale=scale,
        )  # fmt: skip

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
            copy_rows(live, operation, [source], [self._rows(name, token)], [row.width], shape, placement)

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
            copy_rows(live, operation, [self._rows(name, tokens.start)], [target], [row.width], shape)

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
        arrays = {"q": q, **self.attended}
        formats = self.form.keys.format, self.form.values.format
        form = slots.span or 0, 0, slots.ring, formats
        plan = cache_plan(scratch.runtime, operation, arrays, scores, *form, causal=slots.span is not None)
        return plan, arrays
