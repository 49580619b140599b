"""Layers whose slots may be a ring: a token overwrites the oldest after the sinks, and nothing is moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tikv.errors import ArchError, ShapeError, TikvError
from tikv.integrations.transformers.layers import layer as layers
from tikv.integrations.transformers.layers import room as rooms
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.memory.gradients import has_gradient
from tikv.integrations.transformers.memory.slot_map import SlotMap, TokenMoves, moves_between
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.versions.masks import query_length
from tikv.runtime.interrupts import uninterrupted


class RingLayer(TikvLayer):
    """The base of layers whose slots are in temporal order or a ring, as their `slot_map` says.

    Several new tokens are appended in temporal order. A single token overwrites the oldest one of a ring, in which a
    compiled step finds its slot from its position, which is on the device.

    Attributes:
        window: how many tokens a query sees, itself and the sinks included.
        sinks: how many first tokens of a row every query sees.
        ring: how many slots after the sinks a ring has.

    A subclass says in `_will_go_round` when the slots are a ring.
    """

    keeps_rows = False

    @uninterrupted
    def _rearrange(self, to: SlotMap, capacity: int) -> None:
        """Move the tokens of a map of the same rows to its slots, drop the others, and have `capacity` slots.

        If the capacity changes, the memory is new, and what `update` returned before still refers to the old.
        """
        self._recall()
        store, words, moves = self.store, self._memory.words(), moves_between(self.slot_map, to)
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
        self._count_as(to)
        if renewed:
            self._attach()
        if renewed or (moves.sources != np.arange(to.used)).any():
            self._memory.take(words, moves)
        self._clear_empty(0)
        if self._counted is not None:
            self._counted.current = False
        self._show_ring()

    def _clear_empty(self, first: int) -> None:
        """As `TikvLayer._clear_empty`: attention that gets a mask multiplies them by 0, and a NaN would stay one."""
        if self._starts is None:
            return
        empty = self.slot_map.positions()[:, first:] < 0
        if empty.any():
            self._memory.clear(first, empty)

    def _show_ring(self) -> None:
        if self._memory is None:
            return
        now, slots = self.slot_map, self._memory.slots
        if now.starts is not None:
            counts = [len(now.held(start)) for start in now.starts]
            slots.sees(torch.tensor(counts, dtype=torch.int32, device=self.device))
        elif now.ring + now.sinks > self.window:
            slots.sees(now.end, self.window, now.sinks + now.ring)
        else:
            slots.sees(None)

    def _put_in_order(self) -> None:
        if self._ring_first is not None:
            self._rearrange(self.slot_map._replace(ring=0), self._store.capacity)

    def _can_go_round(self) -> bool:
        """Whether all that a single token sees is held; if someone has set fewer keys, it is not."""
        now = self.slot_map
        return self.store is not None and now.first <= self._oldest_needed(now.end)

    def _go_round(self) -> bool:
        """Make the slots a ring for a single token, if all that its window needs is held; whether they are one."""
        if self._ring_first is None and not self._staged and self._can_go_round():
            self._rearrange(self._map_of_ring(), self.sinks + self.ring)
        return self._ring_first is not None

    def _map_of_ring(self) -> SlotMap:
        """The map if the slots are a ring."""
        return self.slot_map._replace(ring=self.ring).after(0)

    def _arrange(self, tokens: int) -> bool:
        """Put the slots into the order for so many new tokens; whether that is a ring."""
        if tokens == 1:
            self.make_ready()
        if self._will_go_round(tokens):
            return self._ring_first is not None or self._go_round()
        self._put_in_order()
        return False

    def _will_go_round(self, tokens: int) -> bool:
        """Whether the slots are to be a ring for so many new tokens."""
        raise NotImplementedError

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As `TikvLayer.update`."""
        if not self.on_device and (self._arrange(self._tokens_of(key_states)) or self._starts is not None):
            return self._write(key_states, value_states)
        return super().update(key_states, value_states)

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        """`update` of a token in a ring, or of tokens of rows that begin at different positions."""
        if layers._made_alike(key_states, value_states):
            return self._write(*layers._alike(key_states, value_states))
        if has_gradient(key_states, value_states):
            return self._without_gradient(key_states, value_states)
        if self._staged:
            self._refuse_half_set()
        self.refuse_beyond_limit(1)
        if self._store is None:
            self.lazy_initialization(key_states, value_states)
        self._recall()
        before, tokens = self.slot_map, key_states.shape[2]
        after = before.after(tokens)
        used = after.used
        if used > self._store.capacity:
            self._resize(self.room.slots_for(used))
        if before.ring:
            self._ring_first = after.first
        try:
            if self._starts is None:
                self._append_at(int(before.slots(before.end)), key_states, value_states)
            else:
                self._append_rows(before, key_states, value_states)
        except BaseException as error:
            written = before.ring and not isinstance(error, TikvError)  # then the oldest token may be overwritten
            self._count_as(before._replace(first=after.first) if written else before)
            raise
        self._count_as(after)
        self._clear_empty(before.used if before.ring else 0)
        self._count_on_device(tokens)
        self._show_ring()
        return self._returned(key_states, 0, used)

    def _append_at(self, slot: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write one token of each row to a slot."""
        store: Any = self._store
        store.recount(length=slot, origin=store.end - slot)
        if store.append_alike(key_states, value_states, store.capacity):
            return
        if key_states.dtype is not self.dtype:
            self._refit(key_states, value_states, None)
        try:
            store.append(key_states, value_states)
        except (ShapeError, ArchError) as error:
            self._refit(key_states, value_states, error)

    def _append_rows(self, to: SlotMap, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Write the next tokens of rows that begin at different positions; padding is not written."""
        if not self._memory.takes(key_states, value_states):
            self._refit(key_states, value_states, None)
        starts: Any = to.starts
        tokens = [to.end - start if to.ring else int(to.slots(to.end, start)) for start in starts]
        self._memory.append_rows(key_states, value_states, tokens, to.ring, to.sinks)

    def _count_on_device(self, tokens: int) -> None:
        counted = self._counted
        if counted is not None and counted.current:
            if tokens == 1:
                counted.count.add_(1)
            elif tokens:  # tokens are dropped from slots in temporal order, and the ring is made before the next step
                counted.current = False

    def _fix_slots(self) -> bool:
        return not self.record_past and self._go_round()

    def take_over(self, oldest: int, starts: list[int] | None) -> None:
        """Go on from a file, in which the slots after the sinks are in temporal order, the first of them `oldest`.

        Files of version 0.3 may have another `oldest` than the first slot after the sinks.
        """
        store: Any = self.store
        self._ring_first, self._starts = None, None if starts is None else tuple(starts)
        if oldest != self.sinks:
            behind = np.roll(np.arange(self.sinks, store.length), self.sinks - oldest)
            self._memory.take(self._memory.words(), TokenMoves.of(np.r_[: self.sinks, behind]))
        self._show_ring()


class SlidingRing(RingLayer):
    """A sliding layer of a cache whose steps may be compiled.

    It is a `TikvLayer`, with its tokens in temporal order, until a single token comes while attention is "tikv". Then
    the slots are a ring, of the window and of what a `crop` of 64 tokens needs, until several tokens come at once.

    Args:
        index, window, max_cache_len, dtype, config: as in `TikvLayer`.
    """

    def __init__(self, index: int, window: int, max_cache_len: int | None, dtype: Storage, config: Any) -> None:
        slots = window + rooms.ROLLBACK
        ring = slots if max_cache_len is None else max(window, min(slots, max_cache_len))
        super().__init__(index, window, max_cache_len, dtype, config, ring=ring)

    def _will_go_round(self, tokens: int) -> bool:
        return tokens == 1 and not self.record_past and self._goes_by_steps()

    def get_mask_sizes(self, queries: torch.Tensor) -> tuple[int, int]:
        """As `TikvLayer.get_mask_sizes`."""
        if not self.on_device:
            self._arrange(query_length(queries))
        return super().get_mask_sizes(queries)

    def let_go_of_prompt(self) -> None:
        """As `TikvLayer.let_go_of_prompt`; a ring has no room for more."""
        if self._ring_first is None:
            super().let_go_of_prompt()

    def update_in_order(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        """As `TikvLayer.update_in_order`."""
        self._put_in_order()
        return TikvLayer.update(self, key_states, value_states)
