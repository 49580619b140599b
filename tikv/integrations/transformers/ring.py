"""Layers whose slots are a ring: a token overwrites the oldest after the sinks, and nothing is moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling as _is_traced

from tikv.errors import ArchError, ShapeError
from tikv.integrations.transformers import layer as layers
from tikv.integrations.transformers import steps
from tikv.integrations.transformers.gradients import has_gradient
from tikv.integrations.transformers.layer import TikvLayer
from tikv.integrations.transformers.storage import Storage

_INDEXED = {1: torch.uint8, 4: torch.int32}  # by bytes: torch cannot index 8-bit floats or words of codes


class RingLayer(TikvLayer):
    """The base of layers whose slots may be a ring.

    In compiled steps the token at position p is in slot ``sinks + (p - sinks) % (window - sinks)``, so that each step
    finds its slot from the position, which is on the device.
    """

    window: int
    sinks: int
    _oldest: int  # slot of the oldest token after the sinks; `sinks` if slots are in temporal order

    def _overwrite(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """`update` of one token when all slots are taken."""
        if layers._made_alike(key_states, value_states):
            return self._overwrite(*layers._alike(key_states, value_states))
        if has_gradient(key_states, value_states):
            return self._without_gradient(key_states, value_states)
        self._recall()
        store: Any = self.store
        slot, end = self._oldest, store.end
        store.recount(length=slot, origin=end - slot)
        try:
            if not store.append_alike(key_states, value_states, store.capacity):
                if key_states.dtype is not self.dtype:
                    self._refit(key_states, value_states, None)
                try:
                    store.append(key_states, value_states)
                except (ShapeError, ArchError) as error:
                    self._refit(key_states, value_states, error)
            end += 1
        finally:
            store.recount(length=self.window, origin=end - self.window)
        self._oldest = slot + 1 if slot + 1 < self.window else self.sinks
        self._count_on_device(1)
        return self._seen(key_states, self.window)

    def _slot_of(self, position: int) -> int:
        """The slot of a position in compiled steps."""
        ring = self.window - self.sinks
        return position if position < self.window else self.sinks + (position - self.sinks) % ring

    def _count_on_device(self, tokens: int) -> None:
        counted = self._counted
        if counted is not None and counted.current:
            if tokens == 1:
                counted.count.add_(1)
            else:
                counted.current = False

    def _recount_on_device(self) -> None:
        """Do nothing: tokens are dropped from slots in temporal order, and the ring is made before the next step."""

    def _count_steps(self) -> None:
        """Count what compiled steps have added, and which token is the oldest now."""
        counted, store = self._counted, self._store
        assert counted is not None
        assert store is not None
        end = store.end + counted.taken()
        held = min(end, self.window)
        store.recount(length=held, origin=end - held)
        self._oldest = self._slot_of(end) if end >= self.window else self.sinks
        self._settled = max(self._settled, end - held)

    def make_ready(self) -> None:
        """Make the slots a ring before a single token, if steps may be compiled."""
        counted, store = self._counted, self._store
        ready = counted is not None and counted.current
        if not ready and store is not None and store.length and steps.are_compiled(self.device):
            self._make_ready()

    def _go_round(self) -> None:
        """Move tokens from temporal order to the slots of compiled steps; there are as many slots as the window has."""
        store = self.store
        assert store is not None
        end = store.end
        if end > self.window:
            self._rearrange(steps.order_of_ring(end, self.window, self.sinks))
        self._oldest = self._slot_of(end) if end >= self.window else self.sinks
        if self._counted is None:
            self._counted = steps.Counted(self, self.window, self.sinks, self.window - self.sinks)
        self._counted.set(end)

    def _put_in_order(self) -> None:
        """Move the tokens back to temporal order."""
        store = self.store
        if self._counted is not None:
            self._counted.current = False
        if store is None or self._oldest == self.sinks:
            return
        self._recall()
        behind = np.roll(np.arange(self.sinks, self.window), self.sinks - self._oldest)
        self._rearrange(np.r_[: self.sinks, behind])
        self._oldest = self.sinks

    def _rearrange(self, order: np.ndarray[Any, Any]) -> None:
        """Move to each slot of the window the token that is in the slot given by `order`."""
        chosen = torch.as_tensor(order, device=self.device)
        for a in self._memory():
            words = a.view(_INDEXED.get(a.dtype.itemsize, a.dtype))
            words[:, :, : self.window] = words[:, :, chosen]


class SlidingRing(RingLayer):
    """A sliding layer of a cache whose steps may be compiled.

    It is a `TikvLayer`, with its tokens in temporal order, until a step is about to be compiled. Then only its window
    is kept and the slots are a ring, in compiled steps and others, until several tokens come at once.

    Args:
        index, window, max_cache_len, dtype, config: as in `TikvLayer`.
    """

    def __init__(self, index: int, window: int, max_cache_len: int | None, dtype: Storage, config: Any) -> None:
        self.window, self.sinks, self._oldest = window, 0, 0
        super().__init__(index, window, max_cache_len, dtype, config)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update`."""
        if _is_traced() or self._counted is None or not self._counted.current:
            return super().update(key_states, value_states)
        tokens = self._tokens_of(key_states)
        self._refuse_beyond_limit(tokens)
        if tokens > 1:
            self._put_in_order()
        elif self.store is not None and self.store.length == self.window:
            return self._overwrite(key_states, value_states)
        return super().update(key_states, value_states)

    def _make_ready(self) -> None:
        store = self.store
        if store is None or not self.is_compileable or self.record_past or self._staged:
            return
        self._recall()
        self._put_in_order()
        store.make_room(capacity=self.window, drop=max(0, store.length - self.window))
        self._attach()
        self._go_round()

    def _cropped_to(self, tokens_to_remove: int) -> int:
        found = super()._cropped_to(tokens_to_remove)
        if found != self.get_seq_length():
            self._put_in_order()
        return found

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self._oldest = 0
        if self._counted is not None:
            self._counted.current = False
        super().reset()

    def _visible(self) -> tuple[Any, Any]:
        if not _is_traced():
            self._put_in_order()
        return super()._visible()

    def _set(self, which: str, tensor: Any) -> None:
        super()._set(which, tensor)
        if not self._staged:
            self._oldest = 0

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As `TikvLayer.batch_repeat_interleave`."""
        self._put_in_order()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """As `TikvLayer.batch_select_indices`."""
        self._put_in_order()
        super().batch_select_indices(indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> TikvLayer:
        self._put_in_order()
        return super().__deepcopy__(memo)
