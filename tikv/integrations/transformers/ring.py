"""Layers whose slots may be a ring: a token overwrites the oldest after the sinks, and nothing is moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling as _is_traced

from tikv.errors import ArchError, OptionError, ShapeError, TikvError
from tikv.integrations.transformers import layer as layers
from tikv.integrations.transformers import room as rooms
from tikv.integrations.transformers import shim, steps, traced
from tikv.integrations.transformers import stored_ops as ops
from tikv.integrations.transformers.gradients import has_gradient
from tikv.integrations.transformers.layer import TikvLayer
from tikv.integrations.transformers.slot_map import Array, SlotMap
from tikv.integrations.transformers.storage import Storage
from tikv.runtime.interrupts import uninterrupted

_INDEXED = {1: torch.uint8, 4: torch.int32}  # by bytes: torch cannot index 8-bit floats or words of codes


class RingLayer(TikvLayer):
    """The base of layers whose slots are in temporal order or a ring, as their `slot_map` says.

    Several new tokens are appended in temporal order. A single token overwrites the oldest one of a ring, in which a
    compiled step finds its slot from its position, which is on the device.

    Attributes:
        window: how many tokens a query sees, itself and the sinks included.
        sinks: how many first tokens of a row every query sees.
        ring: how many slots after the sinks a ring has.
    """

    ring: int
    keeps_rows = False
    moves_tokens = True
    _ring_first: int | None = None  # the oldest position in the ring; None if the slots are in temporal order

    @property
    def slot_map(self) -> SlotMap:
        """Where each token lies now."""
        store = self.store
        if store is None:
            return SlotMap(0, self.sinks, self.sinks, 0, self._starts)
        if self._ring_first is None:
            return SlotMap(store.end, store.origin + self.sinks, self.sinks, 0, self._starts)
        first = max(self._ring_first, store.end - self.ring)  # compiled steps may have overwritten some since
        return SlotMap(store.end, first, self.sinks, self.ring, self._starts)

    @uninterrupted
    def _rearrange(self, to: SlotMap, capacity: int) -> None:
        """Move the tokens of a map of the same rows to its slots, drop the others, and have `capacity` slots.

        If the capacity changes, the memory is new, and what `update` returned before still refers to the old.
        """
        self._recall()
        store, memory, sources = self.store, self._words(), self.slot_map.sources(to)
        assert store is not None
        renewed = capacity != store.capacity
        if renewed:
            length, origin = store.length, store.origin
            store.recount(length=0, origin=0)  # nothing is copied here
            try:
                store.make_room(capacity=capacity)
            except BaseException:
                store.recount(length=length, origin=origin)
                raise
        self._ring_first = to.first if to.ring else None
        self._count_as(to)
        if renewed:
            self._attach()
        if renewed or (sources != np.arange(to.used)).any():
            self._take_from(memory, sources)
        self._clear_empty(0)
        if self._counted is not None:
            self._counted.current = False
        self._show_ring()

    def _count_as(self, to: SlotMap) -> None:
        """Let the storage count the slots that a map uses, up to its newest token."""
        assert self._store is not None
        self._store.recount(length=to.used, origin=to.end - to.used)

    def _take_from(self, memory: list[Any], sources: Array) -> None:
        """Copy to each of the first slots the slot of some memory that `sources` gives: (slots,) or (batch, slots)."""
        index, used = torch.as_tensor(sources, device=self.device), sources.shape[-1]
        for words, to in zip(memory, self._words(), strict=True):
            if index.ndim == 1:
                to[:, :, :used] = words[:, :, index]
            else:
                rows = torch.arange(len(index), device=self.device)[:, None]
                to[:, :, :used] = words[rows, :, index].transpose(1, 2)

    def _words(self) -> list[Any]:
        """The memory in dtypes that torch can index."""
        return [a.view(_INDEXED.get(a.dtype.itemsize, a.dtype)) for a in self._memory.arrays()]

    def _capacity(self) -> int:
        return 0 if self._store is None else self._store.capacity

    def _attach(self) -> None:
        super()._attach()
        self._show_ring()

    def _show_ring(self) -> None:
        """Tell attention which of the slots the newest token sees."""
        if self._memory is None:
            return
        to, slots = self.slot_map, self._memory.slots
        if to.starts is not None:
            held = [len(to.held(start)) for start in to.starts]
            slots.sees(torch.tensor(held, dtype=torch.int32, device=self.device))
        elif to.ring + to.sinks > self.window:
            slots.sees(to.end, self.window, self.sinks + self.ring)
        else:
            slots.sees(None)

    def _put_in_order(self) -> None:
        """Move the tokens to temporal order."""
        if self._ring_first is not None:
            self._rearrange(self.slot_map._replace(ring=0), self._capacity())

    def _can_go_round(self) -> bool:
        """Whether all that a single token sees is held; if someone has set fewer keys, it is not."""
        now = self.slot_map
        return self.store is not None and now.first <= self._oldest_needed(now.end)

    def _go_round(self) -> bool:
        """Make the slots a ring for a single token, if all that its window needs is held; whether they are one."""
        if self._ring_first is not None or not self._can_go_round():
            return self._ring_first is not None
        now = self.slot_map
        to = now._replace(first=max(now.first, now.end - self.ring), ring=self.ring)
        self._rearrange(to, self.sinks + self.ring)
        return True

    def _overwrite(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """`update` of one token in a ring."""
        if layers._made_alike(key_states, value_states):
            return self._overwrite(*layers._alike(key_states, value_states))
        if has_gradient(key_states, value_states):
            return self._without_gradient(key_states, value_states)
        self._recall()
        before = self.slot_map
        after = before._replace(end=before.end + 1, first=max(before.first, before.end + 1 - self.ring))
        self._ring_first = after.first
        try:
            if self._starts is None:
                self._append_at(int(before.slots(before.end)), key_states, value_states)
            else:
                self._append_rows(before, key_states, value_states)
        except BaseException as error:
            if isinstance(error, TikvError):  # nothing was written
                self._ring_first = before.first
            self._count_as(before)
            raise
        self._count_as(after)
        self._clear_empty(before.used)
        self._count_on_device(1)
        self._show_ring()
        return self._returned(key_states, 0, after.used)

    def _append_at(self, slot: int, key_states: Any, value_states: Any) -> None:
        """Write one token of each row to a slot."""
        store: Any = self.store
        store.recount(length=slot, origin=store.end - slot)
        if store.append_alike(key_states, value_states, store.capacity):
            return
        if key_states.dtype is not self.dtype:
            self._refit(key_states, value_states, None)
        try:
            store.append(key_states, value_states)
        except (ShapeError, ArchError) as error:
            self._refit(key_states, value_states, error)

    def _append_rows(self, to: SlotMap, key_states: Any, value_states: Any) -> None:
        """Write the next tokens of rows that begin at different positions; padding is not written."""
        if not self._memory.takes(key_states, value_states):
            self._refit(key_states, value_states, None)
        assert self.store is not None
        starts, memory = np.asarray(to.starts), self._memory
        next_tokens = to.end - starts if to.ring else [int(to.slots(to.end, start)) for start in starts]
        where = torch.as_tensor(np.asarray(next_tokens), dtype=torch.int64, device=self.device)
        ops.append_stored(
            key_states, value_states, memory.k, memory.v, *memory.scales, where, to.ring, self.sinks,
            *(ops.name_of(format) for format in self.store.rows.formats),
        )  # fmt: skip

    def _clear_empty(self, first: int) -> None:
        """Write zeros to empty slots from `first` on, which attention that gets a mask multiplies by 0."""
        if self._starts is None:
            return
        empty = self.slot_map.positions()[:, first:] < 0
        if empty.any():
            hidden = torch.as_tensor(empty, device=self.device)[:, None]
            for words in self._words():
                words = words[:, :, first : first + empty.shape[1]]
                words.masked_fill_(hidden if words.ndim == 3 else hidden[..., None], 0)

    def _traced_update(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        if not self._goes_by_steps() and self._ring_first is not None:  # a number that steps must not look at
            return traced.update_outside(self, key_states, value_states)
        return super()._traced_update(key_states, value_states)

    def _count_on_device(self, tokens: int) -> None:
        counted = self._counted
        if counted is not None and counted.current:
            if tokens == 1:
                counted.count.add_(1)
            elif tokens:  # tokens are dropped from slots in temporal order, and the ring is made before the next step
                counted.current = False

    def _count_steps(self) -> None:
        """Count what compiled steps have added."""
        counted, store = self._counted, self._store
        assert counted is not None
        assert store is not None
        now = SlotMap(store.end + counted.taken(), self._ring_first or 0, self.sinks, self.ring, self._starts)
        self._count_as(now)
        self._ring_first = max(now.first, now.end - self.ring)
        self._settled = max(self._settled, self._ring_first - self.sinks)
        self._show_ring()

    def make_ready(self) -> None:
        """Make the slots a ring before a single token, if its step may be compiled."""
        counted, store = self._counted, self._store
        if (counted is None or not counted.current) and store is not None and store.length:
            self._make_ready()

    def _make_ready(self) -> None:
        store = self.store
        if store is None or not self.is_compileable or self.record_past or self._staged or not self._go_round():
            return
        if self._counted is None:
            self._counted = steps.Counted(self, self.sinks + self.ring, self.sinks, self.ring, self._starts)
        self._counted.set(store.end)

    def _cropped_to(self, tokens_to_remove: int) -> int:
        target = super()._cropped_to(tokens_to_remove)
        if target != self.get_seq_length():
            self._put_in_order()
        return target

    def _forget(self) -> None:
        self._ring_first = None
        self._set_starts(None)
        if self._counted is not None:
            self._counted.current = False
        super()._forget()
        self._show_ring()

    def _set_starts(self, starts: tuple[int, ...] | None) -> None:
        if starts != self._starts:
            self._starts, self._counted = starts, None

    def _visible(self) -> tuple[Any, Any]:
        if not _is_traced():
            self._put_in_order()
        return super()._visible()

    def _set(self, which: str, tensor: Any) -> None:
        if self._starts is not None and tensor is not None:
            raise OptionError(
                f"{self._name}: {which} cannot be set, since the rows begin at positions {list(self._starts)}, and a "
                f"tensor does not say which of its tokens are a row's sinks. Use batch_select_indices() for one row, "
                f"or reset()."
            )
        super()._set(which, tensor)
        if not self._staged:
            self._ring_first, self._starts = None, None
            self._show_ring()

    def _follow_rows(self, rows: Any, batch: int) -> None:
        """Let each row begin where the row that it was copied from does."""
        if self._starts is not None:
            self._set_starts(tuple(torch.tensor(self._starts)[rows.cpu()].tolist()))
            self._show_ring()

    def take_over(self, oldest: int, starts: list[int] | None) -> None:
        """Go on from a file, in which the slots after the sinks are in temporal order, the first of them `oldest`.

        Files of version 0.3 may have another `oldest` than the first slot after the sinks.
        """
        store: Any = self.store
        self._ring_first, self._starts = None, None if starts is None else tuple(starts)
        if oldest != self.sinks:
            behind = np.roll(np.arange(self.sinks, store.length), self.sinks - oldest)
            self._take_from(self._words(), np.r_[: self.sinks, behind])
        self._show_ring()

    def __deepcopy__(self, memo: dict[int, Any]) -> TikvLayer:
        copied: Any = super().__deepcopy__(memo)
        copied._ring_first, copied._starts = self._ring_first, self._starts
        copied._show_ring()
        return copied  # type: ignore[no-any-return]


class SlidingRing(RingLayer):
    """A sliding layer of a cache whose steps may be compiled.

    It is a `TikvLayer`, with its tokens in temporal order, until a single token comes while attention is "tikv". Then
    the slots are a ring, of the window and of what a `crop` of 64 tokens needs, until several tokens come at once.

    Args:
        index, window, max_cache_len, dtype, config: as in `TikvLayer`.
    """

    def __init__(self, index: int, window: int, max_cache_len: int | None, dtype: Storage, config: Any) -> None:
        room = window + rooms.ROLLBACK
        self.ring = room if max_cache_len is None else max(window, min(room, max_cache_len))
        super().__init__(index, window, max_cache_len, dtype, config)

    def _arrange(self, tokens: int) -> bool:
        """Put the slots into the order for so many new tokens; whether that is a ring."""
        if tokens == 1 and not self.record_past and self.store is not None and self.store.length:
            self.make_ready()
            if self._goes_by_steps():
                return True
        self._put_in_order()
        return False

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        """As `TikvLayer.get_mask_sizes`."""
        if not _is_traced():
            self._arrange(shim.query_length(queries))
        return super().get_mask_sizes(queries)

    def let_go_of_prompt(self) -> None:
        """As `TikvLayer.let_go_of_prompt`; a ring has no room for more."""
        if self._ring_first is None:
            super().let_go_of_prompt()

    def update_in_order(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update_in_order`."""
        self._put_in_order()
        return super().update(key_states, value_states)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update`."""
        if _is_traced() or not self._arrange(self._tokens_of(key_states)):
            return super().update(key_states, value_states)
        self._refuse_beyond_limit(1)
        return self._overwrite(key_states, value_states)
