"""The layer of a `TikvCache` with a window for models with full attention, and the masks of its prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers import AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from tikv.errors import OptionError, PositionError
from tikv.integrations.transformers.layers import room as rooms
from tikv.integrations.transformers.layers import traced
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.ring import RingLayer
from tikv.integrations.transformers.memory import steps
from tikv.integrations.transformers.memory.slot_map import SlotMap
from tikv.integrations.transformers.memory.storage import Storage
from tikv.integrations.transformers.names import ATTENTION
from tikv.integrations.transformers.versions.configurations import attention_of
from tikv.integrations.transformers.versions.masks import query_length
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

    is_replayable = False  # a text moves the window
    _way_out_of_crop = "Drop fewer, or reset()."

    def __init__(self, index: int, window: int, sinks: int, dtype: Storage, config: Any) -> None:
        super().__init__(index, window, None, dtype, config, sinks, window - sinks)
        know_masks()

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
        store = self.store
        if tokens > 1 or store is None or not store.length:
            return False
        return self._ring_first is not None or (store.end + 1 > self.window and self._can_go_round())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As `TikvLayer.update`: new tokens may see the sinks, the newest tokens and the new ones.

        Raises:
            As `TikvLayer.update`.
            OptionError: several new tokens do not all see each other, and attention gets no mask that could say so.
        """
        tokens = 1 if self.on_device or self._staged else self._tokens_of(key_states)
        if tokens > 1 and (end := self.get_seq_length()) + tokens > self.window:
            attention = attention_of(self.config)
            if attention not in (*_MASKED, ATTENTION):
                raise OptionError(
                    f"{self._name}: {tokens} new tokens after {end} do not all see each other within "
                    f"window={self.window}, and attention {attention!r} gets no mask that hides keys outside the "
                    f"window. Use {', '.join(_MASKED)} or {ATTENTION}, or pass one token at a time."
                )
            self._put_in_order()
            self._settle(tokens)
        return super().update(key_states, value_states)

    def _traced_update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        if self._goes_by_steps():
            return super()._traced_update(key_states, value_states)
        return traced.update_outside(self, key_states, value_states)

    def _settle(self, tokens: int) -> None:
        """Drop what no later query sees, and give back the memory of a prompt beyond the window."""
        to = self._settled_map()
        if self.store is not None and to.first > self.slot_map.first:
            self._rearrange(to, max(self.window, min(self.store.capacity, self.window + tokens)))

    def _settled_map(self) -> SlotMap:
        """The map without what no later query sees."""
        now = self.slot_map
        return now._replace(first=max(now.first, min(self._oldest_needed(now.end), now.end)))

    def let_go_of_prompt(self) -> None:
        """As `TikvLayer.let_go_of_prompt`."""
        if self.has_prompt_room and self.get_seq_length() and not (self._staged or self.record_past):
            now, slots = self.slot_map, self.window + rooms.ROLLBACK
            first = max(now.first, self._oldest_needed(now.end) - 1 - rooms.ROLLBACK)
            self._rearrange(now._replace(first=first), slots)

    def _visible(self) -> tuple[Any, Any]:
        if not self.on_device:
            self._settle(0)
        return super()._visible()

    def get_mask_sizes(self, queries: torch.Tensor) -> tuple[int, int]:
        """As `TikvLayer.get_mask_sizes`; if keys are left out, the second number also knows each key's position."""
        tokens = query_length(queries)
        goes_round = self._will_go_round(tokens) if self.on_device else self._arrange(tokens)
        if self._goes_by_steps() and (tokens == 1 or self.on_device):
            return super().get_mask_sizes(queries)
        end = self.get_seq_length()
        if self._starts is None and end + tokens <= self.window:
            return end + tokens, steps.KnownOffset(0) if self.for_steps and not _is_traced() else 0
        now = self._map_of_ring() if goes_round else self._settled_map()
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
    attention_mask: torch.Tensor | None = None,
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

    def sees(batch: Any, head: Any, query: torch.Tensor, key: Any) -> Any:
        position = where[key] if starts is None else where[batch, key]
        start = first[0] if starts is None else first[batch]
        near = (position < start + slots.sinks) | (position > query - (offset.window - slots.sinks))
        seen = mask_function(batch, head, query, position) & near & (position >= 0)
        return seen if padding is None else seen & padding[batch, position.clamp(min=0)]

    kwargs.update(kv_offset=0, mask_function=sees, attention_mask=None, allow_is_causal_skip=False)
    return made(**kwargs)
