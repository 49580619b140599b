"""The part of a `TikvCache`'s layer that keeps it ready for compiled steps, and counts what they have added."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced

from tikv.errors import CapacityError
from tikv.integrations.transformers import shim, steps
from tikv.integrations.transformers.attention import ATTENTION
from tikv.integrations.transformers.gradients import has_gradient
from tikv.integrations.transformers.storage import OPERATION
from tikv.stores.layers.growing import GrowingLayer


class ReadyLayer:
    """The part of a `TikvLayer` for compiled steps: its memory, which they may have written to, and its counts.

    Attributes:
        for_steps: whether the layer belongs to a cache whose steps may be compiled.
    """

    config: Any
    limit: int | None
    for_steps: bool
    index: int
    batch_size: int
    num_heads: int
    head_dim: int
    _v_width: int
    dtype: Any
    device: Any
    _store: GrowingLayer | None
    _counted: steps.Counted | None  # what compiled steps know of the memory

    @property
    def _name(self) -> str:
        return f"{OPERATION} layer {self.index}"

    @property
    def store(self) -> GrowingLayer | None:
        """The memory, after counting all tokens of compiled steps."""
        if self._counted is not None and self._counted.steps.before is not None:
            self._count_steps()
        return self._store

    @store.setter
    def store(self, store: GrowingLayer | None) -> None:
        self._store, self._counted = store, None

    def _new_store(self, **form: Any) -> GrowingLayer:
        """New memory of this form."""
        return GrowingLayer(**form)

    @property
    def is_compileable(self) -> bool:
        """Whether `torch.compile` can compile all steps of this layer to one program."""
        return self.for_steps and shim.attention_of(self.config) == ATTENTION

    def _count_on_device(self, tokens: int) -> None:
        """Note that the host has appended tokens, since compiled steps may follow a prompt."""
        if tokens > 1:
            self._make_ready()
        elif self._counted is not None:
            self._counted.current = False

    def _make_ready(self) -> None:
        """Make the layer ready for compiled steps from here on, if slots follow from positions."""
        store = self.store
        if store is None or store.origin or store.capacity != self.limit or not self.is_compileable:
            return
        if self._counted is None:
            self._counted = steps.Counted(self, self.limit, 0, 0)
        self._counted.set(store.end)

    def _count_steps(self) -> None:
        """Count what compiled steps have added.

        Raises:
            CapacityError: they continued beyond the memory; what was stored is counted.
        """
        counted, store = self._counted, self._store
        assert counted is not None
        assert store is not None
        end = store.end + counted.taken()
        store.recount(length=min(end, counted.slots), origin=0)
        if end > counted.slots:
            counted.current = False
            steps.refuse_skipped(self._name, end, counted.slots)

    def _recount_on_device(self) -> None:
        """Let compiled steps continue from the tokens that are left after the host has dropped some."""
        if self._counted is not None:
            self._make_ready()

    def get_seq_length(self) -> int:
        """Tokens seen since `reset`, less those cropped; a tensor while a step is traced."""
        if _is_traced() and self._goes_by_steps():
            assert self._counted is not None
            return self._counted.count[0]  # type: ignore[no-any-return]
        return 0 if self.store is None else self.store.end

    def _refuse_beyond_limit(self, tokens: int) -> None:
        if self.limit is not None and self.get_seq_length() + tokens > self.limit:
            raise CapacityError(
                f"{self._name}: {self.get_seq_length()} cached + {tokens} new tokens exceed max_cache_len="
                f"{self.limit}. Nothing was written. Use a larger max_cache_len, or leave it out to let the cache grow."
            )

    def _slots_for_a_step(self) -> tuple[int, int]:
        """`get_mask_sizes` of one new token, if compiled steps may follow: all slots of the memory.

        Raises:
            CapacityError: compiled steps have used up ``max_cache_len``.
        """
        counted, end = self._counted, self.get_seq_length()
        assert counted is not None
        if counted.stepped:
            self._refuse_beyond_limit(1)
        return counted.slots, steps.SlotsOffset.of(counted, end + 1)

    def _goes_by_steps(self) -> bool:
        """Whether compiled steps may continue from the layer's current state."""
        return self._counted is not None and self._counted.current and shim.attention_of(self.config) == ATTENTION

    def _update_by_step(self, key_states: Any, value_states: Any) -> tuple[Any, Any] | None:
        """`update` while traced, for tokens that a compiled step can append; None for others."""
        counted = self._counted
        assert counted is not None
        one = key_states.shape[2] == 1 or not counted.ring
        if not one or not self._takes(key_states, value_states) or has_gradient(key_states, value_states):
            return None
        return counted.append(key_states, value_states)

    def _mask_sizes_of_steps(self, queries: int) -> tuple[int, int] | None:
        """The result of `get_mask_sizes` if compiled steps may follow: all slots of the memory; else None."""
        counted = self._counted
        if counted is None or not self._goes_by_steps():
            return None
        if _is_traced():
            where = counted.positions(counted.count[0] + 1)
            offset = where - torch.arange(counted.slots, device=where.device)
            offset.tikv_counted = counted
            return counted.slots, offset
        return self._slots_for_a_step() if queries == 1 else None

    def _takes(self, key_states: Any, value_states: Any) -> bool:
        """Whether tokens have the form of the cache."""
        if key_states.shape[2] != value_states.shape[2]:
            return False
        return all(
            (*new.shape[:2], new.shape[3]) == (self.batch_size, self.num_heads, width)
            and (new.dtype, new.device) == (self.dtype, self.device)
            for new, width in ((key_states, self.head_dim), (value_states, self._v_width))
        )
