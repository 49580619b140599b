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
from tikv.integrations.transformers import shim, steps
from tikv.integrations.transformers.attention import ATTENTION
from tikv.integrations.transformers.layer import TikvLayer
from tikv.integrations.transformers.ring import RingLayer
from tikv.integrations.transformers.storage import Storage
from tikv.stores.picture import counted

_MASKED = ("sdpa", "eager")  # attention functions whose masks are made here; "tikv" uses that of "sdpa"


class StreamingLayer(RingLayer):
    """A full-attention layer of a model, which keeps only the first tokens and the newest ones.

    A single token overwrites the oldest after the sinks, so that it sees all slots, in place and in no order; keys are
    already rotated by their true positions. Longer prompts are held whole, in temporal order, until the next tokens
    come.

    Args:
        index, dtype, config: as in `TikvLayer`.
        window: how many tokens a query sees, itself and the sinks included.
        sinks: how many first tokens every query sees.
    """

    def __init__(self, index: int, window: int, sinks: int, dtype: Storage, config: Any) -> None:
        self.window, self.sinks = window, sinks
        super().__init__(index, None, None, dtype, config)
        self._goes_on = True
        self._oldest = sinks
        know_masks()

    def _room_for(self, tokens: int) -> int:
        return max(tokens, min(self.window, super()._room_for(tokens)))

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
            return layers._update_outside_the_graph(self, key_states, value_states)
        store, tokens = self.store, self._tokens_of(key_states)
        if self._staged or (0 if store is None else store.end) + tokens <= self.window:
            return super().update(key_states, value_states)
        attention = shim.attention_of(self.config)
        if tokens > 1 and attention not in (*_MASKED, ATTENTION):
            raise OptionError(
                f"{self._name}: {tokens} new tokens after {self.get_seq_length()} do not all see each other within "
                f"window={self.window}, and attention {attention!r} gets no mask that hides keys outside the window. "
                f"Use {', '.join(_MASKED)} or {ATTENTION}, or pass one token at a time."
            )
        if store is None:
            return super().update(key_states, value_states)
        self._settle()
        if tokens == 1 and store.length == self.window:
            return self._overwrite(key_states, value_states)
        self._put_in_order()
        return super().update(key_states, value_states)

    def _settle(self) -> None:
        """Drop the tokens of a prompt that no later query sees, and give back the memory that they needed."""
        store = self.store
        if store is None or store.length <= self.window:
            return
        self._keep_newest(self.window)

    def _usual_room(self) -> int | None:
        return self.window + rooms.ROLLBACK

    def let_go_of_prompt(self) -> None:
        """As `TikvLayer.let_go_of_prompt`."""
        store = self.store
        if not (store is None or self._staged or self.record_past) and store.length > self.window + rooms.ROLLBACK:
            self._keep_newest(self.window + rooms.ROLLBACK)

    def _keep_newest(self, tokens: int) -> None:
        """Keep the sinks and the newest tokens, `tokens` in all, of more that are held in temporal order."""
        store = self.store
        assert store is not None
        self._recall()
        store.make_room(capacity=tokens, drop=store.length - tokens, sinks=self.sinks)
        self._attach()

    def _visible(self) -> tuple[Any, Any]:
        if _is_traced():
            return super()._visible()
        self._settle()
        self._put_in_order()
        k, v = super()._visible()
        if self.store is None or self.store.length < self.window:
            return k, v
        k, v = (torch.cat((a[:, :, : self.sinks], a[:, :, self.sinks + 1 :]), dim=2) for a in (k, v))
        return k, v

    def _make_ready(self) -> None:
        store = self.store
        if store is None or not self.is_compileable or self.record_past or self._staged:
            return
        self._recall()
        self._settle()
        self._put_in_order()
        store.make_room(capacity=self.window)
        self._attach()
        self._go_round()

    def _set(self, which: str, tensor: Any) -> None:
        super()._set(which, tensor)
        if not self._staged:
            self._oldest = self.sinks

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        """As `TikvLayer.get_mask_sizes`; if keys are left out, the second number also knows each key's position."""
        counted, tokens = self._counted, shim.query_length(queries)
        if counted is not None and counted.current and (tokens == 1 or _is_traced()):
            return super().get_mask_sizes(queries)
        end = self.get_seq_length()
        if end + tokens <= self.window:
            return end + tokens, steps.KnownOffset(0) if self.for_steps and not _is_traced() else 0
        held = 0 if self.store is None else min(self.store.length, self.window)
        over = tokens == 1 and held == self.window
        count = held if over else held + tokens
        newest = self._oldest if over else None
        return count, steps.StreamedOffset.of(end + tokens - count, count, tokens, self.window, self.sinks, newest)

    def _refuse_crop(self, length: int, target: int) -> None:
        if self.store is None:
            return
        first = length - max(0, self.store.length - self.sinks)
        needed = max(self.sinks, target - (self.window - self.sinks) + 1)
        if first > needed and target < length:
            raise PositionError(
                f"{self._name}: cannot go back from {length} to {target} tokens: a window of {self.window} needs "
                f"positions from {needed} on besides the sinks, but the cache holds {first}..{length - 1}. Drop fewer, "
                f"or reset()."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """As `TikvLayer.crop`; once tokens were overwritten, one token can be dropped before the next comes.

        Raises:
            As `TikvLayer.crop`.
        """
        self._cropped_to(tokens_to_remove)
        self._put_in_order()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self._oldest = self.sinks
        if self._counted is not None:
            self._counted.current = False
        super().reset()

    def compact(self, keep: Any) -> None:
        """Raise OptionError, since the window decides which tokens this layer holds."""
        raise OptionError(f"{self._name}: compact() works only on layers without a window. Leave window out.")

    def _blank(self) -> TikvLayer:
        found = type(self)(self.index, self.window, self.sinks, self.storage, self.config)
        found._oldest = self._oldest
        return found

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
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask
    if offset.tokens == 1 and padding is None and allow_is_causal_skip:
        return None
    device = kwargs["device"] if "device" in kwargs else kwargs["cache_position"].device
    where = torch.as_tensor(offset.positions(), device=device)
    if padding is not None:
        missing = int(offset) + offset.count - padding.shape[1]
        padding = torch.nn.functional.pad(padding, (0, max(0, missing)))

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        position = where[key]
        near = (position < offset.sinks) | (position > query - (offset.window - offset.sinks))
        found = mask_function(batch, head, query, position) & near
        return found if padding is None else found & padding[batch, position]

    kwargs.update(kv_offset=0, mask_function=sees, attention_mask=None, allow_is_causal_skip=False)
    return made(**kwargs)
