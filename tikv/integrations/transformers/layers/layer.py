"""One layer of a `TikvCache`: keys and values, written in place in this library's memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers import cache_utils

from tikv.arrays.gradients import GradedTokens
from tikv.errors import ArchError, OptionError, PositionError, ShapeError
from tikv.integrations.transformers.attention.keywords import check_configured
from tikv.integrations.transformers.layers import room as rooms
from tikv.integrations.transformers.layers import traced
from tikv.integrations.transformers.layers.room import Room
from tikv.integrations.transformers.memory import steps
from tikv.integrations.transformers.memory.gradients import RefuseBackward, has_gradient, through
from tikv.integrations.transformers.memory.slot_map import SlotMap
from tikv.integrations.transformers.memory.storage import Storage, check_storage, share_memory_with, storage_of
from tikv.integrations.transformers.memory.stored import Pair, stored_tensors
from tikv.integrations.transformers.memory.views import TorchMemory, part
from tikv.integrations.transformers.names import ATTENTION, CACHE
from tikv.integrations.transformers.versions.caches import tokens_after_crop
from tikv.integrations.transformers.versions.configurations import attention_of
from tikv.integrations.transformers.versions.masks import query_length
from tikv.stores.layers.growing import GrowingLayer


class TikvLayer(cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer: keys and values, in place and in temporal order, in this library's memory.

    Args:
        index: the layer's number, for messages.
        window: how many tokens a query sees, itself included; None for all.
        max_cache_len: how many tokens a sequence may have; None for any number.
        dtype: the stored format, as in `TikvCache`, or a `Storage` of keys, values and scales.
        config: the model's configuration, which says whether its attention reads what is stored.
        sinks, ring: of a `RingLayer`; None and 0 for others.

    Attributes:
        store: the storage of keys and values; None before the first tokens.
        room: how many slots it has.
        slot_map: where each token lies.
        for_steps: whether the layer belongs to a cache whose steps may be compiled.
        counts_uses: whether its count on the device says how often the cache's states were used.
        has_prompt_room: whether there is more room than a window needs, see `let_go_of_prompt`.
        marks: those of snapshots, see `before_change`.
        graded: the tokens that came with a gradient; None unless the cache passes gradients on.

    A layer holds its parts: `store` and its `TorchMemory`, the `SlotMap` that is said by `_ring_first` and `_starts`,
    and `steps.Counted`. A subclass overrides some of these hooks:

    - `_new_store` and `_new_memory`: what the storage is, and what reads it; `_here`: what happens before it is read;
    - `_put_in_order` and `_show_ring`: how tokens move to temporal order, and which slots attention reads;
    - `_fix_slots` and `_count_on_device`: how compiled steps find the slots, and what they learn of other tokens;
    - `_traced_update` and `_visible`: what traced code does, and what the next token sees;
    - `_cropped_to`: which lengths `crop` leaves; `_follow_rows`: what else changes when sequences are selected;
    - `_attach`, `_set` and `_blank`: the memory was replaced, keys or values are set, and an empty layer for a copy.
    """

    is_croppable = supports_early_init = True
    is_replayable = True  # whether the layer can do without keeping new tokens, see `TikvCache.replay`
    _way_out_of_crop = "Call activate_past_recording() before the tokens that may be dropped, or reset()."
    _options: Mapping[str, Any] = MappingProxyType({})  # further arguments

    def __init__(
        self,
        index: int,
        window: int | None,
        max_cache_len: int | None,
        dtype: Any,
        config: Any,
        sinks: int | None = None,
        ring: int = 0,
    ) -> None:
        self._store: Any = None
        self._memory: Any = None  # the storage's memory as torch sees it: a `TorchMemory`, or what serves as one
        self._counted: steps.Counted | None = None  # what compiled steps know of the memory
        self._ring_first: int | None = None  # the oldest position in the ring; None if slots are in temporal order
        self._starts: tuple[int, ...] | None = None  # where the rows of a left-padded batch begin, if they have sinks
        self._staged: dict[str, Any] = {}
        self.marks: weakref.WeakSet[Any] = weakref.WeakSet()
        self.graded: GradedTokens | None = None
        self._lent: weakref.ref[Pair] | None = None  # the tensors that `update` returned and nobody has decoded yet
        self._set_aside = 0  # how many tokens that were appended are not in the length, since other keys were set
        super().__init__()
        self.index = index
        self.window: Any = window
        self.sinks, self.ring = sinks or 0, ring
        self.sliding_window = window if sinks is None else None
        self.is_sliding = self.sliding_window is not None
        self.limit = max_cache_len
        self.room = Room.of(window, max_cache_len, sinks)
        self.storage = dtype if isinstance(dtype, Storage) else storage_of(dtype)
        self.config = config
        self.for_steps = self.counts_uses = self.record_past = self.has_prompt_room = self.is_initialized = False
        self._past = 0 if window is None else max(0, window - self.sinks - 1)  # before the newest, sinks aside
        self._settled = 0  # no rollback goes back beyond this position
        if max_cache_len is not None:
            self.max_cache_len = max_cache_len

    @property
    def _name(self) -> str:
        return f"{CACHE} layer {self.index}"

    @property
    def store(self) -> GrowingLayer | None:
        """The storage, after counting all tokens of compiled steps."""
        if self._counted is not None and self._counted.steps.before is not None and not self._counted.on_device:
            self._count_steps()
        return self._store  # type: ignore[no-any-return]

    @store.setter
    def store(self, store: GrowingLayer | None) -> None:
        self._store, self._counted = store, None

    @property
    def slot_map(self) -> SlotMap:
        """Where each token lies now."""
        store, sinks = self.store, self.sinks
        if store is None:
            return SlotMap(0, sinks, sinks, 0, self._starts)
        if self._ring_first is None:
            return SlotMap(store.end, store.origin + sinks, sinks, 0, self._starts)
        first = max(self._ring_first, store.end - self.ring)  # after an interrupt, a token may be written, not counted
        return SlotMap(store.end, first, sinks, self.ring, self._starts)

    def _count_as(self, to: SlotMap) -> None:
        """Let the storage count the slots that a map uses, up to its newest token."""
        self._ring_first = to.first if to.ring else None
        self._store.recount(length=to.used, origin=to.end - to.used)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        """Allocate memory for keys and values of these shapes, dtype and device."""
        value_states = key_states if value_states is None else value_states
        tokens = self._tokens_of(key_states)
        if attention_of(self.config) == ATTENTION:
            check_configured(self.config)
        self.dtype, self.device = key_states.dtype, key_states.device
        where = share_memory_with(self.device)
        batch, heads, _, width = key_states.shape
        check_storage(self._name, self.storage, key_states, value_states)
        with where:
            self.store = self._new_store(
                num_kv_heads=heads,
                head_dim=width,
                head_dim_v=value_states.shape[3],
                capacity=self.room.slots_for(tokens),
                batch_size=batch,
                dtype=self.storage.k or self.dtype,
                v_dtype=self.storage.v or self.dtype,
                k_scale=self.storage.k_scale,
                v_scale=self.storage.v_scale,
            )
        self.is_initialized = True
        self._settled = 0
        self._attach()

    def _tokens_of(self, key_states: torch.Tensor) -> int:
        if key_states.ndim != 4:
            raise ShapeError(
                f"{self._name}: keys must be (batch, heads, tokens, head_dim), not {tuple(key_states.shape)}."
            )
        return int(key_states.shape[2])

    def _new_store(self, **form: Any) -> Any:
        """New memory of this form."""
        return GrowingLayer(**form)

    def _new_memory(self, store: Any) -> Any:
        """The memory as it is read."""
        return TorchMemory(store, self.dtype, self._name)

    def _attach(self) -> None:
        """Update the memory's views and what follows from its room; called after each change of memory or room."""
        store, room = self._store, self.room
        memory = self._memory = self._new_memory(store)
        self._counted = None
        (self.batch_size, self.num_heads), (self.head_dim, self._v_width) = memory.shape, memory.widths
        self.max_batch_size = self.batch_size
        self._whole = memory.as_stored and not self.is_sliding  # new tokens see all slots, unconverted
        self.has_prompt_room = room.after_prompt is not None and store.capacity > room.after_prompt
        self._bound = room.bound(store.capacity, store.origin)
        self._show_ring()

    def _put_in_order(self) -> None:
        """Move the tokens to temporal order, if they are in another."""

    def _clear_empty(self, first: int) -> None:
        """Write zeros to the slots from `first` on that shorter rows leave empty, if there are any."""

    def _show_ring(self) -> None:
        """Tell attention which of the slots the newest token sees, if not all of them."""

    def _here(self) -> Any:
        """The memory, which launches from now on may read."""
        return self._memory

    def _read(self, first: int, end: int) -> tuple[Any, Any]:
        """Slots first..end in the model's dtype: a view if that is the stored dtype."""
        return self._here().read(first, end)  # type: ignore[no-any-return]

    def _left_behind(self) -> int:
        """How many of the oldest held tokens no later query or rollback needs."""
        store = self.store
        if store is None or not self.is_sliding:
            return 0
        settled = store.end - rooms.ROLLBACK
        if self.record_past:
            settled = min(settled, self._settled)
        return max(0, settled - self._past - store.origin)

    def _make_room(self, tokens: int) -> None:
        """Drop tokens outside the window, and grow if that does not make enough room."""
        store: Any = self.store
        self.refuse_beyond_limit(tokens)
        drop = self._left_behind()
        needed = store.length - drop + tokens
        capacity = self.room.slots_for(needed)
        if self.is_sliding and store.capacity >= needed:
            capacity = min(capacity, store.capacity)
        self._resize(capacity, drop)

    def _resize(self, capacity: int, drop: int = 0) -> None:
        """Drop the oldest tokens and have `capacity` slots."""
        self._store.make_room(capacity=capacity, drop=drop)
        self._attach()

    def let_go_of_prompt(self) -> None:
        """After attention to a prompt, give back the memory of tokens that no later query or rollback needs.

        What `update` returned does not change: it refers to the old memory for as long as it is referenced.
        """
        store = self.store
        if store is None or self._staged:
            return
        drop = self._left_behind()
        capacity = self.room.slots_for(store.length - drop)
        if capacity < store.capacity:
            self._recall()
            self._resize(capacity, drop)

    def refuse_beyond_limit(self, tokens: int) -> None:
        """Raise CapacityError if there is no room for so many more tokens within ``max_cache_len``."""
        if self.limit is not None:
            self.room.refuse_beyond(self._name, self.get_seq_length(), tokens)

    @property
    def is_compileable(self) -> bool:
        """Whether `torch.compile` can compile all steps of this layer to one program."""
        return self.for_steps and attention_of(self.config) == ATTENTION

    def _count_on_device(self, tokens: int) -> None:
        """Note that the host has appended tokens, or with 0 that it has dropped some; compiled steps may follow."""
        if self._counted is not None:
            self._counted.current = False
        if tokens > 1 or (tokens == 0 and self._counted is not None):
            self._make_ready()

    def make_ready(self) -> None:
        """Make the layer ready for steps on the device, if it is not and if slots follow from positions."""
        counted, store = self._counted, self._store
        if (counted is None or not counted.current) and store is not None and store.length:
            self._make_ready()

    def _make_ready(self) -> None:
        """`make_ready` from here on, whatever was ready before."""
        store = self.store
        if store is None or not self.is_compileable or not self._fix_slots():
            return
        if self._counted is None:
            slots = self.slot_map
            self._counted = steps.Counted(self, store.capacity, slots.sinks, slots.ring, slots.starts, store.end)
        else:
            self._counted.set(store.end)

    def _fix_slots(self) -> bool:
        """Whether slots follow from positions from here on, in the memory that the layer has."""
        store: Any = self.store
        return not store.origin and store.capacity == self.limit

    def _count_steps(self) -> None:
        """Count what compiled steps have added.

        Raises:
            CapacityError: they continued beyond the memory, where their writes were skipped; the others are counted.
        """
        counted: Any = self._counted
        tokens, before = counted.taken(), self.slot_map
        end = before.end + tokens
        after = before.after(tokens if before.ring else min(end, counted.slots) - before.end)
        self._count_as(after)
        self._clear_empty(before.used)
        if after.ring:
            self._settled = max(self._settled, after.first - after.sinks)
            self._show_ring()
        else:
            counted.refuse_beyond(end, self._name)

    @property
    def on_device(self) -> bool:
        """Whether the code that runs now reads no numbers: torch traces it, or it is a step of `steps.on_device`."""
        return _is_traced() or (self._counted is not None and self._counted.on_device)

    @property
    def counted(self) -> steps.Counted | None:
        """What compiled steps know of the memory, after counting their tokens; None before the first tokens."""
        return None if self.store is None else self._counted

    def _goes_by_steps(self) -> bool:
        """Whether compiled steps may continue from the layer's current state."""
        return self._counted is not None and self._counted.current and attention_of(self.config) == ATTENTION

    def get_seq_length(self) -> int:
        """Tokens seen since `reset`, less those cropped; a tensor in a step on the device."""
        if self.on_device and self._goes_by_steps():
            assert self._counted is not None
            return self._counted.count[0]  # type: ignore[no-any-return]
        return 0 if self.store is None else self.store.end

    @property
    def appended(self) -> int:
        """Tokens that `update` got since `reset`, less those cropped, whatever keys and values were set."""
        return self.get_seq_length() + self._set_aside

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append new tokens; returns all keys and values that these tokens may see.

        Arguments, results and errors are those of `TikvCache.update`. Of one token, if the storage dtype is not the
        model's, attention "tikv" gets tensors that become copies as soon as something else uses them.
        """
        counted = self._counted
        if _is_traced() or (counted is not None and counted.on_device):  # as `on_device`, inlined: each step waits
            return self._traced_update(key_states, value_states)
        if self._staged:
            self._refuse_half_set()
        store: Any = self._store if counted is None else self.store
        if store is None:
            key_states, value_states = _alike(key_states, value_states)
            self.lazy_initialization(key_states, value_states)
            store = self.store
        if self._lent is not None:
            self._recall()
        end = store.append_alike(key_states, value_states, self._bound)
        if end:
            if self.for_steps:
                self._count_on_device(key_states.shape[2])
            if not self._whole or torch.is_grad_enabled():
                return self._seen(key_states, end)
            batch, heads, memory = self.batch_size, self.num_heads, self._memory  # as `read`, inlined
            keys = part(memory.k, (batch, heads, end, self.head_dim), memory.k_strides)
            keys.tikv_slots = memory.slots
            return keys, part(memory.v, (batch, heads, end, self._v_width), memory.v_strides)
        if _made_alike(key_states, value_states):  # `append_alike` does not take these tokens
            return self.update(*_alike(key_states, value_states))
        if has_gradient(key_states, value_states):  # nor does it take these
            return self._without_gradient(key_states, value_states)
        held, tokens = store.length, self._tokens_of(key_states)
        if key_states.dtype is not self.dtype:
            self._refit(key_states, value_states, None)
            store = self.store
        if held + tokens > self._bound:
            self._make_room(tokens)
            held = store.length
        try:
            store.append(key_states, value_states)
        except (ShapeError, ArchError) as error:
            self._refit(key_states, value_states, error)
            return self.update(key_states, value_states)
        if self.for_steps:
            self._count_on_device(tokens)
        return self._seen(key_states, held + tokens)

    def update_in_order(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        """`update` outside of a compiled graph, whose mask was made for slots in temporal order."""
        return self.update(key_states, value_states)

    def _without_gradient(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        """`update` of tokens with a gradient, through which backward then raises."""
        keys, values = self.update(key_states.detach(), value_states.detach())
        return RefuseBackward.apply(keys, key_states), RefuseBackward.apply(values, value_states)

    def _seen(self, key_states: torch.Tensor, end: int) -> tuple[Any, Any]:
        """The keys and values that new tokens see, after their own were written to the slots before `end`."""
        first = max(0, end - key_states.shape[2] - self._past) if self.is_sliding else 0
        return self._returned(key_states, first, end)

    def _returned(self, key_states: torch.Tensor, first: int, end: int) -> tuple[Any, Any]:
        """What `update` returns of slots first..end."""
        graded, memory = torch.is_grad_enabled(), self._memory
        one = key_states.shape[2] == 1
        if one and not (memory.as_stored or graded) and attention_of(self.config) == ATTENTION:
            pair = Pair(self, first, end)  # decoded only if something other than `attend` uses them
            self._lent = weakref.ref(pair)
            shape = self.batch_size, self.num_heads, end - first
            k_shape, v_shape = (*shape, self.head_dim), (*shape, self._v_width)
            return stored_tensors(pair, k_shape, v_shape, self.dtype, self.device)  # type: ignore[no-any-return]
        keys, values = self._read(first, end)
        if memory.as_stored and graded:  # autograd may save them, and would not notice that they are overwritten
            return keys.clone(), values.clone()
        return keys, values

    def _recall(self) -> None:
        """Decode what the last `update` returned, if it is still referenced, before the memory changes."""
        pair = None if self._lent is None else self._lent()
        self._lent = None
        if pair is not None:
            pair.numbers()

    def _traced_update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
        """`update` in code that reads no numbers: a custom operator and views do the same, if there is room."""
        key_states, value_states = _alike(key_states, value_states)
        if self._goes_by_steps():
            counted: Any = self._counted
            if self._memory.takes(key_states, value_states) and (key_states.shape[2] == 1 or not counted.ring):
                return counted.append(key_states, value_states)  # type: ignore[no-any-return]
            return traced.update_outside(self, key_states, value_states)
        if self._ring_first is not None:  # a number that steps must not look at
            return traced.update_outside(self, key_states, value_states)
        return traced.append(self, key_states, value_states)

    def _refit(self, key_states: torch.Tensor, value_states: torch.Tensor, error: Exception | None) -> None:
        """Take on the form of another model or batch if the layer is empty; else raise."""
        store: Any = self.store
        form, same = self._form, self.is_form_of(key_states, value_states)
        if store.end == 0 and not same:
            self.lazy_initialization(key_states, value_states)
            return
        if same and error is not None:
            raise error
        raise (ArchError if key_states.device != self.device else ShapeError)(
            f"{self._name}: the cache holds {store.end} tokens of keys {form[0]} and values {form[1]}, {self.dtype} on "
            f"{self.device}; the new ones are keys {tuple(key_states.shape)} and values {tuple(value_states.shape)}, "
            f"{key_states.dtype} on {key_states.device}. Use a TikvCache for each model and batch, or reset()."
        ) from error

    @property
    def _form(self) -> tuple[Any, Any]:
        """The shapes of keys and values, of any number of tokens."""
        form = tuple((self.batch_size, self.num_heads, "n", width) for width in (self.head_dim, self._v_width))
        return form  # type: ignore[return-value]

    def is_form_of(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether new tokens have the shapes, the dtype and the device of those that are held."""
        new = tuple((*a.shape[:2], "n", a.shape[-1]) for a in (key_states, value_states))
        return (self._form, self.dtype, self.device) == (new, key_states.dtype, key_states.device)

    def _visible(self) -> tuple[Any, Any]:
        """What the next token will see besides itself; in a step on the device: all slots."""
        if self.on_device and self._goes_by_steps():
            assert self._counted is not None
            return self._counted.read()
        if not self.on_device:
            self._put_in_order()
        if self.store is None:
            return None, None
        held = self.store.length
        return self._read(max(0, held - self._past) if self.is_sliding else 0, held)

    @property
    def keys(self) -> Any:
        """(batch, heads, n, head_dim): the keys that the next token will see besides its own; None before the first."""
        return self._staged["keys"] if "keys" in self._staged else self._visible()[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._set("keys", keys)

    @property
    def values(self) -> Any:
        """(batch, heads, n, head_dim_v): the values of `keys`."""
        return self._staged["values"] if "values" in self._staged else self._visible()[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._set("values", values)

    def _set(self, which: str, tensor: torch.Tensor) -> None:
        """Replace keys or values; if the length changes, the first of both waits for the other."""
        if self._starts is not None and tensor is not None:
            raise OptionError(
                f"{self._name}: {which} cannot be set, since the rows begin at positions {list(self._starts)}, and a "
                f"tensor does not say which of its tokens are a row's sinks. Use batch_select_indices() for one row, "
                f"or reset()."
            )
        self.before_change(0)
        self._recall()
        appended = self.appended
        if tensor is None:
            self._set_aside = appended
            self.store = self._ring_first = self._starts = None
            self.is_initialized = False
            self._staged.clear()
            return
        self._staged[which] = tensor
        other = "values" if which == "keys" else "keys"
        partner = self._staged.get(other)
        if partner is None and self.store is not None:
            current = getattr(self, other)
            partner = current.clone() if current.shape[:3] == tensor.shape[:3] else None
        if partner is None or partner.shape[2] != tensor.shape[2]:
            return
        new = {which: tensor, other: partner}
        end = self.store.end if self.store is not None and self.window is not None else tensor.shape[2]
        self._staged.clear()
        # The new ones may be views of the memory that they are written to.
        keys, values = new["keys"].clone(), new["values"].clone()
        self._ring_first = None
        self.lazy_initialization(keys, values)
        self._store.append(keys, values)
        self._store.origin = max(0, end - tensor.shape[2])
        self._settled = self._store.end
        self._set_aside = appended - self._store.end
        self._attach()

    def _refuse_half_set(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._staged.items()}
        raise ShapeError(
            f"{self._name}: keys and values must be set to the same number of tokens, and so far {shapes} are set. Set "
            f"the other one too."
        )

    cumulative_length = property(get_seq_length)

    def get_mask_sizes(self, queries: torch.Tensor) -> tuple[int, int]:
        """(number of keys that `update` will return for these new tokens, position of the first of them)."""
        counted, tokens = self._counted if self._goes_by_steps() else None, query_length(queries)
        if counted is not None and self.on_device:
            return counted.traced_sizes()
        end, origin = self.get_seq_length(), 0 if self.store is None else self.store.origin
        if counted is not None and tokens == 1:
            if counted.stepped:
                self.refuse_beyond_limit(1)
            return counted.slots, steps.SlotsOffset.of(counted, end + 1)
        first = max(0, end - self._past) if self.is_sliding else origin
        return end - first + tokens, steps.KnownOffset(first) if self.for_steps and not _is_traced() else first

    def get_max_length(self) -> int:
        """The most tokens that the layer can hold; -1 means any number."""
        bounds = [n for n in (self.sliding_window, self.limit) if n is not None]
        return min(bounds) if bounds else -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """As `TikvCache.activate_past_recording`."""
        self.record_past = True
        self._put_in_order()  # all layers alike: one mask is made for those of a kind
        self._settled = self.get_seq_length()

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of tokens that are held stay as they are when others come."""
        return not self.is_sliding

    def before_change(self, first: int) -> None:
        """Let snapshots copy the rows that they marked, if rows from `first` on are about to change."""
        for mark in [mark for mark in self.marks if mark.length > first]:
            mark.keep(self)
        if self.graded:
            self.graded.cut(first)

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self._forget()

    def _forget(self) -> None:
        """`reset` of keys and values."""
        self.before_change(0)
        self._recall()
        self._staged.clear()
        self._settled = self._set_aside = 0
        store = self.store
        self._ring_first = None
        self._set_starts(None)
        if self._counted is not None:
            self._counted.current = False
        if store is not None:
            store.reset()
            self._bound = self.room.bound(store.capacity, store.origin)
            self._count_on_device(0)
            self._show_ring()

    def _set_starts(self, starts: tuple[int, ...] | None) -> None:
        """Let rows begin at these positions; compiled steps, which count from them, are then made ready again."""
        if starts != self._starts:
            self._starts, self._counted = starts, None

    def compact(self, keep: Any) -> None:
        """Keep some tokens of a full layer, whose memory then shrinks to what they need.

        `GrowingLayer.compact` says what can be kept, and `GrowingGroups.compact` for groups along tokens.
        """
        if self.store is None or self.is_sliding:
            raise OptionError(
                f"{self._name}: compact() works only on layers with full attention that hold tokens. Set keys and "
                "values instead."
            )
        self.before_change(0)
        self._recall()
        self.store.compact(keep)
        self._resize(min(self.room.slots_for(self.store.length + 1), self.store.capacity))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; argument and errors are those of `TikvCache.crop`.

        A model's result must not depend on which tokens a window has dropped. `KVCacheStore.trim` is not as strict: it
        goes back as far as its ring holds tokens, and its queries see those that are left.
        """
        self.cut(self._cropped_to(tokens_to_remove))

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens, of which those that the next query sees are held, and drop the others."""
        if self.store is None:
            return
        if not length:
            self._forget()
            return
        if length != self.store.end:
            self._put_in_order()
        self.before_change(length)
        self._recall()
        self.store.trim(self.get_seq_length() - length)
        self._settled = length
        self._count_on_device(0)

    def _cropped_to(self, tokens_to_remove: int) -> int:
        """The length that `crop` leaves; raises if it is impossible."""
        length = self.get_seq_length()
        target = tokens_after_crop(int(tokens_to_remove), length)
        if target is None:
            raise _unclear_crop(self._name, int(tokens_to_remove), length)
        first, needed = self.slot_map.first, self._oldest_needed(target)
        seen = "a layer that sees all tokens" if self.window is None else f"a window of {self.window}"
        if 0 < target < length and first > needed:
            raise PositionError(
                f"{self._name}: cannot go back from {length} to {target} tokens: {seen} needs "
                f"positions from {needed} on, but the cache holds {first}..{length - 1}. {self._way_out_of_crop}"
            )
        return target

    def _oldest_needed(self, target: int) -> int:
        """The oldest position, sinks aside, that a query at position `target` sees."""
        return max(min(self._starts or (0,)) + self.sinks, target - self._past)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace each sequence b by sequence ``beam_idx[b]``."""
        batch = self._change_rows("reorder", beam_idx)
        self._follow_rows(torch.as_tensor(beam_idx), batch)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence: 0, 0, 1, 1 for 2."""
        batch = self._change_rows("repeat", repeats)
        if batch:
            self._follow_rows(torch.arange(batch).repeat_interleave(repeats), batch)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order; -1 is the last one. A boolean mask is accepted too."""
        rows = torch.as_tensor(indices)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        batch = self._change_rows("select", rows)
        self._follow_rows(rows, batch)

    def _change_rows(self, change: str, argument: Any) -> int:
        """Call a method of the storage that changes sequences, if it holds any; how many there were."""
        if not self.get_seq_length():
            return len(self._starts or ())
        batch: int = self.batch_size
        if change == "select":
            argument = torch.where(argument < 0, argument + batch, argument)
        graded = self.graded and self.graded.copied()
        self.before_change(0)
        self._recall()
        getattr(self.store, change)(argument)
        if change != "reorder":
            self._attach()
        self.graded = graded
        return batch

    def _follow_rows(self, rows: torch.Tensor, batch: int) -> None:
        """Let what else is kept of each sequence follow: the storage now has these `rows` of its `batch`."""
        if self.graded:
            self.graded.select(rows)
        if self._starts is not None:
            self._set_starts(tuple(torch.tensor(self._starts)[rows.cpu()].tolist()))
            self._show_ring()

    def _blank(self) -> TikvLayer:
        """A layer like this one, without tokens."""
        return type(self)(self.index, self.window, self.limit, self.storage, self.config, **self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> TikvLayer:
        layer, store = self._blank(), self.store
        layer.graded = self.graded and self.graded.copied()
        layer.for_steps, layer.counts_uses = self.for_steps, self.counts_uses
        layer.record_past, layer._settled, layer._set_aside = self.record_past, self._settled, self._set_aside
        layer._ring_first, layer._starts = self._ring_first, self._starts
        if store is not None:
            layer.dtype, layer.device = self.dtype, self.device
            with share_memory_with(self.device):
                layer.store = store.twin(layer._new_store)
            layer.is_initialized = True
            layer._attach()
        layer._staged = copy.deepcopy(self._staged, memo)
        memo[id(self)] = layer
        return layer

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionError(
            f"{self._name}: a cache is not pickled, nor copied by copy.copy(), which would share its memory. Use "
            f"copy.deepcopy(); to keep tokens in a file, save() of the TikvCache."
        )

    def __repr__(self) -> str:
        kind = f"window {self.sliding_window}" if self.is_sliding else "full"
        return f"TikvLayer({kind}, {self.store!r})" if self.store is not None else f"TikvLayer({kind}, empty)"


def update_with_gradients(layer: TikvLayer, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
    """`TikvLayer.update` whose results pass gradients on to the tokens that came with one."""
    first, graded = layer.get_seq_length(), layer.graded
    assert graded is not None
    with torch.no_grad():
        pair = layer.update(key_states.detach(), value_states.detach())
    graded.add(first, key_states, value_states)
    return through(graded, pair, layer.get_seq_length() - pair[0].shape[2])


def _unclear_crop(name: str, n: int, length: int) -> OptionError:
    most = min(n, length)
    return OptionError(
        f"{name}: crop({n}) is unclear: old versions of transformers kept {n} tokens, and this one counts tokens to "
        f"remove. With {length} tokens, crop({most - length}) keeps {most}, and crop({-n}) drops {most}."
    )


def _made_alike(key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
    """Whether `_alike` changes them: their dtypes differ, or the numbers of a row are not contiguous."""
    if key_states.dtype is not value_states.dtype:
        return True
    return any(a.ndim and a.shape[-1] > 1 and a.stride(-1) != 1 for a in (key_states, value_states))


def _alike(key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[Any, Any]:
    """Both in the wider dtype and with contiguous rows, since under torch.autocast a rotation widens only the keys."""
    if not _made_alike(key_states, value_states):
        return key_states, value_states
    wide = torch.promote_types(key_states.dtype, value_states.dtype)
    return key_states.to(wide).contiguous(), value_states.to(wide).contiguous()
