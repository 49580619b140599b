"""Appends to contiguous layers: one layer or all of them, at the position that the host counts or one in device memory.

An `AppendPlan` is found again by the forms of the new rows, see `ops.plan`. Writes and reads of the layers' memory are
bound to addresses, so the plans are forgotten when that memory is allocated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, launch
from tikv.arrays import ALIGNMENT, ArrayView, Views, describe, to_device
from tikv.errors import OptionError
from tikv.ops import checks
from tikv.ops.layouts import Placement, Rows, reduced_position
from tikv.ops.plan import NO_ENTRIES, Entries, Launch, Plan
from tikv.ops.row_copy import bind_copies
from tikv.runtime.cache import BoundedCache
from tikv.runtime.interrupts import Held, uninterrupted
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory
from tikv.stores.layers.queries import check_heads
from tikv.stores.layers.shared_launches import SharedLaunches, can_be_shared
from tikv.stores.layers.summaries import summarize, written_pages
from tikv.stores.row_format import RowFormats, check_appended

ROWS = ("k", "v")
NAMES = (*ROWS, "positions")
TOKENS_AND_HEADS = {"token_major": (1, 2), "head_major": (2, 1)}  # axes of (batch, ., ., width) rows of one layer


class AppendPlan(Plan):
    """A checked append of rows of one form to layers of one length.

    Attributes:
        layers: the layers that it writes to.
        tokens: how many tokens it adds to each.
        room: how many tokens all of the layers can hold.
        absolute: True if rings of different lengths are written at once, so that the position is not reduced.
        counted: True if the host counts the position; else the launch reads it.
    """

    def __init__(
        self,
        memory: LayerMemory,
        operation: str,
        layers: list[Layer],
        rows: Sequence[ArrayView],
        axes: tuple[int, int],
        positions: ArrayView | None,
        absolute: bool,
    ) -> None:
        names = NAMES if positions is not None else ROWS
        super().__init__(memory.runtime, operation, names, [False] * len(names))
        # The plan must not refer to `memory`, which refers to its plans: a cycle would delay freeing the memory.
        self.batch, self.heads = memory.batch_size, memory.num_kv_heads
        self.rows = memory.rows
        self.lock = memory.lock
        self.page = memory.page if memory.rows.k.is_numbers else None  # the launch updates their summaries
        self.layers = layers
        self.absolute = absolute
        self.counted = positions is None
        if self.counted and not self.live.is_spirv:
            self.loop_entry = "dst_position"
        self.token_axis, self.head_axis = axes
        self.tokens = rows[0].shape[1 + self.token_axis]
        self.room = min((layer.slots for layer in layers if not layer.ring), default=2**63)
        # The forms of K and V as (layers, batch, ., ., width) and as given, without references to the arrays.
        self._forms = [(a.shape, a.strides) for a in rows]
        self._views = [a.without_owner() for a in rows]
        self.alignments = [a.ptr % ALIGNMENT for a in rows]
        # The range in which the address of rows must be for them to share memory with K or V of the layers.
        first, last = layers[0], layers[-1]
        k_end, v_end = last.k.ptr + last.k.span, last.v.ptr + last.v.span
        self._near = min(first.k.ptr, first.v.ptr) - max(a.span for a in rows), max(k_end, v_end)

    def append(self, rows: Views) -> None:
        """Write rows of the checked form after the tokens that the layers hold, and count them.

        The caller holds the store's lock. After the first run this does `entries_at`, `run` and the counts in one
        function, since a decode loop waits for it once per layer: `benches/stores/bench_append.py`. It raises
        CapacityError if a layer without a window has no room, ShapeError if rows share memory with the layers.
        """
        layers = self.layers
        first = layers[0]
        length = first.length
        launch_again = self.launch_again
        try:
            if launch_again is None:
                self.run(rows, self.entries_at(length))
            else:
                if length + self.tokens > self.room:
                    checks.fits_linear(length, self.tokens, self.room, self.operation, checks.STORE_NAMES)
                position = length
                if first.ring and not self.absolute:
                    position = reduced_position(length, first.sinks, first.ring)
                if rows.pointers != self.pointers:
                    self._move_to(rows.pointers)
                launch_again(position)
            after = length + self.tokens
            for layer in layers:  # as `Layer.grow`, inlined: many calls would take as long as the launch
                layer.length = after
                layer.newest = self.tokens
                if layer.ring and after - layer.ring > layer.valid_from:
                    layer.valid_from = after - layer.ring
        except KeyboardInterrupt:
            self._finish(rows, length)
            raise

    @uninterrupted
    def _finish(self, rows: Views, length: int) -> None:
        """Repeat an append that Ctrl-C interrupted, unless nothing was launched: a ring may have lost older tokens.

        The same rows go to the same slots and the counts become the same, however much of it was done before.
        """
        staged = not self.live.is_cpu and any(a.is_staged for a in rows)  # these are bound again in each run
        if self.launches is None and not staged:
            return  # it was interrupted while kernels were compiled
        self.run(rows, self.entries_at(length))
        for layer in self.layers:
            layer.length = length
            layer.grow(self.tokens)

    def entries_at(self, length: int) -> Entries:
        """The entries of a launch that writes after `length` tokens, which is checked."""
        if length + self.tokens > self.room:
            checks.fits_linear(length, self.tokens, self.room, self.operation, checks.STORE_NAMES)
        first = self.layers[0]
        if first.ring and not self.absolute:
            length = reduced_position(length, first.sinks, first.ring)
        return {"dst_position": length}

    def revalidate(self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]) -> tuple[None, Entries]:
        """Check that the layers have room, if the host counts the position."""
        return None, self.entries_at(self.layers[0].length) if self.counted else NO_ENTRIES

    def in_step(self) -> bool:
        """Whether one position serves all layers: they have the same length, and it fits 32 bits where it must."""
        lengths = [layer.length for layer in self.layers]
        if lengths.count(lengths[0]) < len(lengths):
            return False
        return not self.absolute or lengths[0] + self.tokens < 2**31

    def check_overlaps(self, arrays: Sequence[ArrayView]) -> None:
        """As `refuse_shared`."""
        refuse_shared(self.operation, self.layers, arrays)

    def _move(self, arrays: Sequence[ArrayView], pointers: tuple[int, ...]) -> None:
        if 0 in pointers:
            super()._move(arrays, pointers)
        else:
            self._move_to(pointers)

    def _move_to(self, pointers: tuple[int, ...]) -> None:
        """`Plan._move` to addresses. If they are near the layers, it checks that the rows share no memory with them."""
        start, end = self._near
        for pointer in pointers:
            if start < pointer < end:
                rows = [a.at_address(p) for a, p in zip(self._views, pointers, strict=False)]
                refuse_shared(self.operation, self.layers, rows)
                break
        self.pointers = None  # as `Plan._move` does
        for j, uses in enumerate(self._uses):
            for bound, i, _ in uses:
                bound.set_pointer(i, pointers[j])
        self.pointers = pointers

    def move_to(self, pointers: tuple[int, ...]) -> bool:
        """Let the launch read K and V of this form at these addresses; False if their alignment differs."""
        (k, v), (of_k, of_v) = pointers, self.alignments
        if k % ALIGNMENT != of_k or v % ALIGNMENT != of_v:
            return False
        self._move_to(pointers)
        return True

    def bind(self, views: Sequence[ArrayView]) -> list[Launch]:
        """The launch over K, V and any positions that it reads; a copy of one for a layer of the same form, if any."""
        layer = self.layers[0]
        arrays = [*views, *layer.arrays]
        if not (self.counted and len(self.layers) == 1 and layer.is_plain and can_be_shared(arrays)):
            return self._bind_anew(views)
        plans, form = self.live.plans, form_of_append(self.rows, self.token_axis, layer, views)
        launches: SharedLaunches | None = plans.get(form)
        if launches is None:
            launches = plans.keep(form, SharedLaunches(self._bind_anew(views), arrays))
        return launches.over(arrays)

    def _bind_anew(self, views: Sequence[ArrayView]) -> list[Launch]:
        first, batch, heads = self.layers[0], self.batch, self.heads
        scales = first.scales_of_rows(heads, self.rows.numbers)
        if self.absolute:
            placement = Placement("layers", array=self._layer_table())
            dst = [
                Rows(a, token=a.shape[3], format=format)
                for a, format in zip((first.k, first.v), self.rows.formats, strict=True)
            ]
            # The table has the first row of each layer's heads, and so the first scale too.
            scales = [None if a is None else a._replace(sequence=0, head=0) if a.token else a for a in scales]
        else:
            placement, dst = first.placement(0, self.tokens), self._rows_of_layers()
            if not self.counted:
                placement = placement._replace(kind="ragged", array=views[2], limit=first.slots, group=int(batch > 1))
        sequence_axis = 0 if batch == 1 else 1
        src = [
            Rows(a, sequence=s[sequence_axis], token=s[1 + self.token_axis], head=s[1 + self.head_axis])
            for a, (_, s) in zip(views, self._forms, strict=False)
        ]
        dst = [rows._replace(scale=scale) for rows, scale in zip(dst, scales, strict=True)]
        return self._bind(src, dst, {"heads": heads, "groups": len(self.layers) * batch, "dst_place": placement})

    def _bind(self, src: Sequence[Rows], dst: Sequence[Rows], params: dict[str, Any], head: int = 0) -> list[Launch]:
        """The launches for these rows; `head` is the number of the first head if each head is its own sequence."""
        widths, tokens, first = self.rows.widths, self.tokens, self.layers[0]
        if self.page is not None and first.summaries is not None:
            dst = [dst[0]._replace(pages=written_pages(self.page, first, params["heads"], head)), *dst[1:]]
        return bind_copies(self.live, self.operation, src=src, dst=dst, widths=widths, tokens=tokens, **params)

    def _rows_of_layers(self) -> list[Rows]:
        """Where K and V of the layers are in memory; all of the layers have equally many slots."""
        first, last = self.layers[0], self.layers[-1].v
        ends = [(first.k, 0), (first.v, 0)]
        if first.k.owner is first.v.owner:  # the launch sees one array
            size = first.k.dtype.itemsize
            both = first.k.restrided(((last.ptr + last.span - first.k.ptr) // size,), (1,))
            ends = [(both, 0), (both, (first.v.ptr - first.k.ptr) // size)]
        rows = []
        for (a, start), form in zip(ends, self.rows.both, strict=True):
            token, head = form.stored_width, first.slots * form.stored_width
            rows.append(Rows(a, sequence=self.heads * head, token=token, head=head, first=start, format=form.format))
        return rows

    def _layer_table(self) -> ArrayView:
        """(layers * batch, 4) int32 on the device: first row, rows per head, sinks and ring of each sequence."""
        table = np.empty((len(self.layers), self.batch, 4), np.int32)
        row = 0
        for i, layer in enumerate(self.layers):
            for b in range(self.batch):
                table[i, b] = (row, layer.slots, layer.sinks, layer.ring)
                row += self.heads * layer.slots
        self._table = to_device(table.reshape(-1), self.live)  # kept alive for the launches
        return self._table


def form_of_append(rows: RowFormats, token_axis: int, layer: Layer, views: Sequence[ArrayView]) -> tuple[Any, ...]:
    """What the launch of an append to one plain layer depends on, except for addresses."""
    apart = layer.k.owner is not layer.v.owner  # then the launch does not depend on where V is
    return "append", rows, token_axis, layer.form, None if apart else layer.v.ptr - layer.k.ptr, *[a.key for a in views]


class UnevenAppendPlan(AppendPlan):
    """An append to one layer whose heads hold different numbers of tokens: rows go after each head's last token."""

    def __init__(
        self, memory: LayerMemory, operation: str, layer: Layer, rows: Sequence[ArrayView], axes: tuple[int, int]
    ) -> None:
        super().__init__(memory, operation, [layer], rows, axes, None, False)
        self.counted, self.loop_entry = False, ""  # the launch reads the lengths of heads

    @uninterrupted
    def append(self, rows: Views) -> None:
        """Write rows after the tokens of each head, and count them."""
        layer = self.layers[0]
        launch.refuse_during_capture(self.live, self.operation)
        if layer.length + self.tokens > self.room:
            checks.fits_linear(layer.length, self.tokens, self.room, self.operation, checks.STORE_NAMES)
        self.run(rows)
        assert layer.head_lengths is not None
        layer.head_lengths.grow(self.tokens)
        layer.length += self.tokens
        layer.newest = self.tokens

    def bind(self, views: Sequence[ArrayView]) -> list[Launch]:
        """One launch, or one per sequence if no single stride leads through all heads of the batch."""
        layer, heads = self.layers[0], self.heads
        assert layer.head_lengths is not None
        strides = [form[1] for form in self._forms]
        even = self.batch == 1 or all(s[1] == heads * s[1 + self.head_axis] for s in strides)
        groups = heads * (self.batch if even else 1)
        placement = layer.placement(0, self.tokens)._replace(kind="ragged", limit=layer.slots, group=1)
        launches = []
        for b in range(1 if even else self.batch):
            first = b * heads
            src = [
                Rows(a, sequence=s[1 + self.head_axis], token=s[1 + self.token_axis], first=b * s[1])
                for a, s in zip(views, strides, strict=False)
            ]
            scales, widths = layer.scales_by_head(self.rows.numbers, first), [r.stored_width for r in self.rows.both]
            stored = zip((layer.k, layer.v), widths, self.rows.formats, scales, strict=True)
            dst = [
                Rows(a, sequence=layer.slots * w, token=w, first=first * layer.slots * w, format=format, scale=scale)
                for a, w, format, scale in stored
            ]
            index = layer.head_lengths.array.restrided((groups,), (1,), first)
            placed = {"heads": 1, "groups": groups, "dst_place": placement._replace(array=index)}
            launches += self._bind(src, dst, placed, first)
        return launches


def refuse_shared(operation: str, layers: Sequence[Layer], rows: Sequence[ArrayView]) -> None:
    """Raise ShapeError if new K or V shares an element with the layers that it is appended to."""
    named = [(name, a, False) for name, a in zip(ROWS, rows, strict=False)]
    for layer in layers:
        stored = ("the store's keys", layer.k, True), ("the store's values", layer.v, True)
        checks.disjoint([*named, *stored], operation)


class Appends:
    """The appends to the layers of one memory: it checks them, keeps their plans and runs them.

    Attributes:
        of: what messages call the store if these layers are only a part of its storage; else empty.
    """

    def __init__(self, memory: LayerMemory) -> None:
        self.memory, self.of = memory, ""
        self.plans: BoundedCache[Any, AppendPlan] = memory.plans
        self._once: BoundedCache[Any, bool] = BoundedCache(memory.plans.limit)  # keys of appends that made no plan

    def append_first(
        self, operation: str, layers: list[Layer], views: Views, layout: str, key: tuple[Any, ...], stacked: bool
    ) -> None:
        """Check new arrays, append them, and keep the plan under `key` if one plan serves all layers.

        `stacked` says that the arrays have a leading axis of layers.
        """
        tokens = self.checked_for_room(operation, layers, views, layout, stacked)
        if tokens == 0:
            return
        rows, axes = [self._rows(a, stacked) for a in views], TOKENS_AND_HEADS[layout]
        launch.refuse_during_capture(self.memory.runtime, operation)
        if tokens > 1 and len(layers) == 1 and key not in self._once and self._append_once(layers[0], rows, axes[0]):
            self._once[key] = True
            return
        even = self._lie_evenly(rows)
        together = len(layers) > 1 and len({layer.length for layer in layers}) == 1 and even
        together = together and all(layer.head_lengths is None for layer in layers)
        mixed = together and len({(layer.slots, layer.ring) for layer in layers}) > 1
        if mixed and (layers[0].length + tokens >= 2**31 or self.memory.page is not None):
            # One 32-bit position can no longer serve rings of different lengths; and rings keep no summaries.
            together = mixed = False
        parts = self.memory.blocks if together else [[layer] for layer in layers]
        first = [part[0].index if stacked else 0 for part in parts]  # neighbouring layers
        sources = [
            [a.restrided((len(part), *a.shape[1:]), a.strides, at * a.strides[0]) for a in rows]
            for part, at in zip(parts, first, strict=True)
        ]
        plans = []
        for i, (part, source) in enumerate(zip(parts, sources, strict=True)):
            part_plan = None if even else self.plans.get((key, i))  # needed even if a plan for all layers exists
            if part_plan is None and part[0].head_lengths is not None:
                part_plan = UnevenAppendPlan(self.memory, operation, part[0], source, axes)
            elif part_plan is None:
                part_plan = AppendPlan(self.memory, operation, part, source, axes, None, mixed)
                if not even:
                    self.plans.keep((key, i), part_plan)
            plans.append(part_plan)
        for plan, source in zip(plans, sources, strict=True):
            plan.append(Views(source))
        if len(plans) == 1:
            self.plans[key] = plans[0]

    @uninterrupted
    def _append_once(self, layer: Layer, rows: Sequence[ArrayView], token_axis: int) -> bool:
        """Append checked rows by a launch that another layer of this form has bound; False if none has.

        A prompt seldom has the length of another, so a plan of its own is made when this form comes again.
        """
        arrays = [*rows, *layer.arrays]
        if layer.ring or layer.head_lengths is not None or not (layer.is_plain and can_be_shared(arrays)):
            return False
        live = self.memory.runtime
        if not live.is_cpu and any(a.is_staged for a in rows):
            return False
        launches: SharedLaunches | None = live.plans.get(form_of_append(self.memory.rows, token_axis, layer, rows))
        if launches is None:
            return False
        launches.run(arrays, {"dst_position": layer.length})
        layer.grow(rows[0].shape[1 + token_axis])
        return True

    def append(self, operation: str, layer: Layer, rows: Views, layout: str) -> None:
        """Append views of new K and V to one layer."""
        key = (operation, layer.index, rows.key, layout)
        plan = self.plans.get(key)
        if plan is None:
            self.append_first(operation, [layer], rows, layout, key, False)
        else:
            plan.append(rows)

    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """Append views of new K and V, stacked, to all layers."""
        key = (operation, rows.key, layout)
        plan = self.plans.get(key)
        if plan is None or not plan.in_step():
            with Held():  # layers of different lengths, or several blocks of memory, take a launch each
                self.append_first(operation, self.memory.layers, rows, layout, key, True)
        else:
            plan.append(rows)

    def require_positions(self, operation: str) -> None:
        """Raise OptionError unless appends at positions on the device are possible."""
        return None

    def append_at(self, operation: str, layers: list[Layer], views: Views, layout: str, stacked: bool) -> None:
        """Append at positions that the launch reads, the third of the arrays; the host's counts do not change."""
        self.require_positions(operation)
        key = ("at", layers[0].index, stacked, views.key, layout)
        plan = None if launch.is_recording() else self.plans.get(key)
        if plan is None:
            rows, axes = self.checked(operation, layers, Views(views[:2]), layout, stacked)
            positions = views[2]
            self._check_positions(operation, positions)
            if rows[0].shape[1 + axes[0]] == 0:
                return
            forms = {(layer.slots, layer.ring) for layer in self.memory.layers}
            together = self.memory.batch_size == 1 and len(self.memory.blocks) == 1 and len(forms) == 1
            if stacked and not together:
                for layer in layers:
                    k, v = (a.restrided(a.shape[1:], a.strides[1:], layer.index * a.strides[0]) for a in views[:2])
                    self.append_at(operation, [layer], Views([k, v, positions]), layout, False)
                return
            plan = AppendPlan(self.memory, operation, layers, rows, axes, positions, False)
            if not launch.is_recording():
                self.plans.keep(key, plan)
        plan.run(views)

    def _check_positions(self, operation: str, positions: ArrayView) -> None:
        checks.on_device([("positions", positions)], self.memory.runtime, operation)
        checks.indices(positions, "positions", operation)
        checks.rank(positions, (1,), "positions", "(batch,)", operation)
        checks.extent(
            positions.shape[0], self.memory.batch_size, "the length of positions", operation, describe(positions)
        )

    def _lie_evenly(self, rows: Sequence[ArrayView]) -> bool:
        """Whether one stride leads from each sequence to the next, across layers too."""
        batch = self.memory.batch_size
        return batch == 1 or len(self.memory.layers) == 1 or all(a.strides[0] == batch * a.strides[1] for a in rows)

    def checked_for_room(self, operation: str, layers: list[Layer], views: Views, layout: str, stacked: bool) -> int:
        """Make all checks of an append: `check`, and that there is room. Returns the number of tokens.

        Raises:
            CapacityError, PositionError: a layer is full. Others as `check`.
        """
        self.check(operation, layers, views, layout, stacked)
        tokens = views[0].shape[-3 if layout == "token_major" else -2]
        for layer in layers:
            layer.require_room(operation, tokens)
        return tokens

    def checked(
        self, operation: str, layers: list[Layer], views: Views, layout: str, stacked: bool
    ) -> tuple[list[ArrayView], tuple[int, int]]:
        """`check` new K and V.

        Returns:
            Both as (layers, batch, ., ., width), and which of the axes after the first are tokens and heads.
        """
        self.check(operation, layers, views, layout, stacked)
        return [self._rows(a, stacked) for a in views], TOKENS_AND_HEADS[layout]

    def check(self, operation: str, layers: list[Layer], views: Views, layout: str, stacked: bool) -> None:
        """Check that new K and V fit the layers and share no memory with them."""
        checks.option(layout, "layout", operation, checks.LAYOUTS)
        memory = self.memory
        form = (memory.rows, memory.num_kv_heads, memory.batch_size, len(layers), layout, stacked)
        key, plans = ("appended", *form, views.key), memory.runtime.plans
        if plans.get(key) is None:
            self._check(operation, layers, views, layout, stacked)
            plans.keep(key, True)
        refuse_shared(operation, layers, views)

    def _check(self, operation: str, layers: list[Layer], views: Views, layout: str, stacked: bool) -> None:
        """Raise unless new K and V have the axes, dtypes and extents that the layers take."""
        memory, (k, v) = self.memory, views
        token_axis, head_axis = TOKENS_AND_HEADS[layout]
        named = (("k", k), ("v", v))
        checks.on_device(named, memory.runtime, operation)
        checks.same_dtype(k, v, "k", "v", operation)
        allowed, to, other = memory.rows.appended, self.of or f"a {memory.rows.name} store", ""
        if allowed and k.dtype in dtypes.FLOATS and not self.of:  # the dtype of a part is not that of its store
            other = f", or make the store with dtype={k.dtype.name!r}"
        check_appended(operation, k, allowed, to, other)
        axes, lead = "T, H, D" if token_axis == 1 else "H, T, D", "num_layers, batch" if stacked else "batch"
        shape = f"({lead}, {axes})" + (", or without the batch" if memory.batch_size == 1 else "")
        full = 5 if stacked else 4
        rows = []
        for name, a in named:
            checks.readable(a, name, operation)
            checks.rank(a, (full - 1, full) if memory.batch_size == 1 else (full,), name, shape, operation)
            rows.append(self._rows(a, stacked))
        tokens = rows[0].shape[1 + token_axis]
        for (name, whole), a, width in zip(named, rows, memory.rows.widths, strict=True):
            detail = f"{name}: {describe(whole)}, {layout}"
            checks.extent(a.shape[0], len(layers), f"the number of layers of {name}", operation, detail)
            batch = a.shape[1]
            remedy = (
                f"Make the store with batch_size={batch}; select() and repeat() change the batch of one with tokens."
            )
            checks.extent(batch, memory.batch_size, f"the batch of {name}", operation, detail, remedy)
            heads, count = a.shape[1 + head_axis], a.shape[1 + token_axis]
            check_heads(operation, name, heads, count, memory.num_kv_heads, detail, layout)
            checks.extent(a.shape[4], width, f"the head width of {name}", operation, detail)
            of_k = f"k: {describe(k)}"
            checks.extent(a.shape[1 + token_axis], tokens, f"the number of tokens of {name}", operation, of_k)

    @staticmethod
    def _rows(a: ArrayView, stacked: bool) -> ArrayView:
        """The array as (layers, batch, ., ., width), whichever of the leading axes the caller left out."""
        at = 1 if stacked else 0
        if a.ndim == at + 3:
            a = a.restrided((*a.shape[:at], 1, *a.shape[at:]), (*a.strides[:at], 0, *a.strides[at:]))
        return a if stacked else a.batch_of_one()


class SummarizedAppends(Appends):
    """Appends to layers that keep page summaries of keys with scales: summaries are computed after the write."""

    @uninterrupted
    def append(self, operation: str, layer: Layer, rows: Views, layout: str) -> None:
        """As `Appends.append`; it then updates the summaries of the pages that were written."""
        first = int(layer.lengths.min())
        super().append(operation, layer, rows, layout)
        summarize(operation, self.memory, [layer], first)

    @uninterrupted
    def append_all(self, operation: str, rows: Views, layout: str) -> None:
        """As `Appends.append_all`; it then updates the summaries of the pages that were written."""
        before = [int(layer.lengths.min()) for layer in self.memory.layers]
        super().append_all(operation, rows, layout)
        for layer, first in zip(self.memory.layers, before, strict=True):
            summarize(operation, self.memory, [layer], first)

    def require_positions(self, operation: str) -> None:
        """Raise OptionError, since the host does not know which pages are written."""
        raise OptionError(
            f"{operation}: positions are on the device, and the store keeps summaries of pages, which for keys kept as "
            f"{self.memory.rows.k.dtype} need launches that the host counts. Append without positions, or make the "
            f"store without page_summaries."
        )


def appends_to(memory: LayerMemory) -> Appends:
    """The appends to the layers of a memory."""
    later = memory.page is not None and not memory.rows.k.is_numbers
    return SummarizedAppends(memory) if later else Appends(memory)
