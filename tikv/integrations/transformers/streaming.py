"""The layer of a `TikvCache` with a window for models with full attention, and the masks of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tikv.errors import OptionError, PositionError
from tikv.integrations.transformers import layer as layers
from tikv.integrations.transformers import room as rooms
from tikv.integrations.transformers import shim, steps, traced
from tikv.integrations.transformers.attention import ATTENTION
from tikv.integrations.transformers.gradients import has_gradient
from tikv.integrations.transformers.layer import TikvLayer
from tikv.integrations.transformers.ring import RingLayer
from tikv.integrations.transformers.room import Room
from tikv.integrations.transformers.storage import Storage
from tikv.stores.picture import counted

_MASKED = ("sdpa", "eager")  # attention functions whose masks are made here; "tikv" uses that of "sdpa"


class StreamingLayer(RingLayer):
    """A full-attention layer of a model, which keeps only the first tokens of each row and the newest ones.

    Once the window is full, a single token overwrites the oldest after the sinks, so that it sees all slots, in place
    and in no order; keys are already rotated by their true positions. Longer prompts are held whole, in temporal order,
    until the next tokens come. Padding on the left is not stored: the sinks are a row's first real tokens.

    Args:
        index, dtype, config: as in `TikvLayer`.
        window: how many tokens a query sees, itself and the sinks included.
        sinks: how many first tokens of a row every query sees.
    """

    _way_out_of_crop = "Drop fewer, or reset()."

    def __init__(self, index: int, window: int, sinks: int, dtype: Storage, config: Any) -> None:
        self.sinks, self.ring = sinks, window - sinks
        super().__init__(index, None, None, dtype, config)
        self.window, self.room = window, Room(most=window)
        self._past, self._goes_on = window - sinks - 1, True
        know_masks()

    def _attach(self) -> None:
        super()._attach()
        self.has_prompt_room = self._capacity() > self.window + rooms.ROLLBACK

    def begin_rows(self, starts: tuple[int, ...]) -> None:
        """Take note of the position of each row's first token, before new tokens come.

        Raises:
            PositionError: tokens of a row are held that began at another position.
        """
        end, known = self.get_seq_length(), self._starts or (0,) * len(starts)
        if len(known) != len(starts) or (end and self.store is not None and len(starts) != self.batch_size):
            return  # another batch, which `update` refuses
        for row, (now, before) in enumerate(zip(starts, known, strict=True)):
            if now != before and before < end:
                raise PositionError(
                    f"{self._name}: the attention mask says that the text of row {row} begins at position {now}, but "
                    f"its first tokens, which stay visible, were kept from position {before} on. Pass the mask of the "
                    f"whole text from the prompt on, or reset()."
                )
        if any(starts) or self._starts is not None:
            self._set_starts(starts)

    def may_begin_later(self) -> bool:
        """Whether a row has had only padding so far."""
        return self._starts is not None and max(self._starts) >= self.get_seq_length()

    def _will_go_round(self, tokens: int) -> bool:
        """Whether `_arrange` will make the slots a ring for so many new tokens."""
        store = self.store
        if tokens > 1 or store is None or not store.length:
            return False
        return self._ring_first is not None or (store.end + 1 > self.window and self._can_go_round())

    def _arrange(self, tokens: int) -> bool:
        """Put the slots into the order for so many new tokens; whether that is a ring."""
        if tokens == 1 and self.for_steps:
            self.make_ready()
        if self._will_go_round(tokens):
            return self._go_round()
        self._put_in_order()
        return False

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As `TikvLayer.update`: new tokens may see the sinks, the newest tokens and the new ones.

        Raises:
            As `TikvLayer.update`.
            OptionError: several new tokens do not all see each other, and attention gets no mask that could say so.
        """
        if _is_traced():
            counted = self._counted
            if counted is not None and counted.current:
                return self._traced_update(key_states, value_states)
            return traced.update_outside(self, key_states, value_states)
        if self._staged:
            self._refuse_half_set()
        tokens, end = self._tokens_of(key_states), self.get_seq_length()
        attention = shim.attention_of(self.config)
        if tokens > 1 and end + tokens > self.window and attention not in (*_MASKED, ATTENTION):
            raise OptionError(
                f"{self._name}: {tokens} new tokens after {end} do not all see each other within "
                f"window={self.window}, and attention {attention!r} gets no mask that hides keys outside the window. "
                f"Use {', '.join(_MASKED)} or {ATTENTION}, or pass one token at a time."
            )
        if self._arrange(tokens):
            return self._overwrite(key_states, value_states)
        if end + tokens > self.window:
            self._settle(tokens)
        if self._starts is None:
            return super().update(key_states, value_states)
        return self._append_padded(key_states, value_states)

    def _append_padded(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """`update` of tokens in temporal order, for rows that begin at different positions."""
        key_states, value_states = layers._alike(key_states, value_states)
        if has_gradient(key_states, value_states):
            return self._without_gradient(key_states, value_states)
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        self._recall()
        now, tokens = self.slot_map, key_states.shape[2]
        after = now._replace(end=now.end + tokens)
        if after.used > self._capacity():
            assert self.store is not None
            self.store.make_room(capacity=self.room.slots_for(after.used))
            self._attach()
        self._append_rows(now, key_states, value_states)
        self._count_as(after)
        self._clear_empty(0)
        self._show_ring()
        return self._returned(key_states, 0, after.used)

    def _settle(self, tokens: int) -> None:
        """Drop what no later query sees, and give back the memory of a prompt beyond the window."""
        now = self.slot_map
        first = min(self._oldest_needed(now.end), now.end)
        if self.store is not None and now.first < first:
            self._rearrange(now._replace(first=first), max(self.window, min(self._capacity(), self.window + tokens)))

    def let_go_of_prompt(self) -> None:
        """As `TikvLayer.let_go_of_prompt`."""
        room = self.window + rooms.ROLLBACK
        if not (self.store is None or self._staged or self.record_past) and self._capacity() > room:
            now = self.slot_map
            first = max(now.first, self._oldest_needed(now.end) - 1 - rooms.ROLLBACK)
            self._rearrange(now._replace(first=first), room)

    def _visible(self) -> tuple[Any, Any]:
        if _is_traced():
            return super()._visible()
        self._settle(0)
        return super()._visible()

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        """As `TikvLayer.get_mask_sizes`; if keys are left out, the second number also knows each key's position."""
        tokens = shim.query_length(queries)
        goes_round = self._will_go_round(tokens) if _is_traced() else self._arrange(tokens)
        if self._goes_by_steps() and (tokens == 1 or _is_traced()):
            return super().get_mask_sizes(queries)
        end = self.get_seq_length()
        if self._starts is None and end + tokens <= self.window:
            return end + tokens, steps.KnownOffset(0) if self.for_steps and not _is_traced() else 0
        now = self.slot_map
        if goes_round:
            now = now._replace(first=max(now.first, end - self.ring), ring=self.ring)
        else:
            now = now._replace(first=max(now.first, min(self._oldest_needed(now.end), now.end)))
        return steps.StreamedOffset.sizes(now._replace(end=end + tokens), tokens, self.window)

    def compact(self, keep: Any) -> None:
        """Raise OptionError, since the window decides which tokens this layer holds."""
        raise OptionError(f"{self._name}: compact() works only on layers without a window. Leave window out.")

    def _blank(self) -> TikvLayer:
        return type(self)(self.index, self.window, self.sinks, self.storage, self.config, **self._options)

    def __repr__(self) -> str:
        kind = f"window {self.window} with {counted(self.sinks, 'sink')}"
        return f"TikvLayer({kind}, {self.store!r})" if self.store is not None else f"TikvLayer({kind}, empty)"


def know_masks() -> None:
    """Have `_mask` make the masks of keys that are not a range; all other masks are unchanged."""
    for name in _MASKED:
        made = ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not hasattr(made, "tikv_made_by"):
            AttentionMaskInterface.register(name, _knowing(made))


def _knowing(made: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        offset = kwargs.get("kv_offset")
        return _mask(made, offset, **kwargs) if isinstance(offset, steps.StreamedOffset) else made(*args, **kwargs)

    mask.tikv_made_by = made  # type: ignore[attr-defined]
    return mask


def _mask(
    made: Callable[..., Any],
    offset: steps.StreamedOffset,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """The mask that `made` makes for the keys of a streaming layer, where each query has its own window."""
    slots, starts = offset.map, offset.map.starts
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    if offset.tokens == 1 and padding is None and starts is None and allow_is_causal_skip:
        return None
    device = kwargs["device"] if "device" in kwargs else kwargs["cache_position"].device
    where = torch.as_tensor(slots.positions(), device=device)
    first = torch.as_tensor(starts or (0,), device=device)
    if padding is not None:
        padding = torch.nn.functional.pad(padding, (0, max(0, slots.end - padding.shape[1])))

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        position = where[key] if starts is None else where[batch, key]
        start = first[0] if starts is None else first[batch]
        near = (position < start + offset.sinks) | (position > query - (offset.window - offset.sinks))
        seen = mask_function(batch, head, query, position) & near & (position >= 0)
        return seen if padding is None else seen & padding[batch, position.clamp(min=0)]

    kwargs.update(kv_offset=0, mask_function=sees, attention_mask=None, allow_is_causal_skip=False)
    return made(**kwargs)
