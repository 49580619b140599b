"""One layer of a `TikvCache`: keys and values, written in place in this library's memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling as _is_traced
from transformers import cache_utils

from tikv import dtypes
from tikv.errors import ArchError, OptionError, PositionError, ShapeError
from tikv.integrations import torch_ops
from tikv.integrations.transformers import shim, steps
from tikv.integrations.transformers.attention import ATTENTION  # registers the attention
from tikv.integrations.transformers.gradients import RefuseBackward, has_gradient
from tikv.integrations.transformers.keywords import check_configured
from tikv.integrations.transformers.room import LayerRoom
from tikv.integrations.transformers.slots import CacheSlots
from tikv.integrations.transformers.storage import OPERATION, Storage, check_storage, share_memory_with, storage_of
from tikv.integrations.transformers.stored import Pair, decoded, stored_tensors


def _find_part() -> Any:
    """part(tensor, shape, strides, first element): a view of a tensor, made by the function that compiled code uses.

    as_strided, the fallback if that function has changed, takes twice the time, and slices three times. The tensor
    must begin where its storage does.
    """
    base = torch.arange(12, device="cpu").view(2, 6)
    try:
        part = torch._C._dynamo.guards._reinterpret_tensor
        found = part(base, (2, 2), (6, 1), 3), part(base, (2, 2), (6, 1))
        works = [a.tolist() for a in found] == [[[3, 4], [9, 10]], [[0, 1], [6, 7]]]
        works = works and all(a.untyped_storage().data_ptr() == base.data_ptr() for a in found)
    except (AttributeError, TypeError, RuntimeError):
        works = False
    return part if works else torch.as_strided


_part = _find_part()


class TikvLayer(LayerRoom, cache_utils.CacheLayerMixin):  # type: ignore[misc]
    """One layer: keys and values, in place and in temporal order, in this library's memory.

    Args:
        index: the layer's number, for messages.
        window: how many tokens a query sees, itself included; None for all.
        max_cache_len: how many tokens a sequence may have; None for any number.
        dtype: the stored format, as in `TikvCache`, or a `Storage` of keys, values and scales.
        config: the model's configuration, which says whether its attention reads what is stored.
    """

    is_croppable = True
    _slots: CacheSlots | None = None
    attend_stored: Any = None  # attention of a decoded token, if only the layer can read its memory
    supports_early_init = True

    def __init__(self, index: int, window: int | None, max_cache_len: int | None, dtype: Any, config: Any) -> None:
        self._counted: steps.Counted | None = None
        self.store = None
        self._staged: dict[str, Any] = {}
        self._lent: weakref.ref[Pair] | None = None  # the tensors that `update` returned and nobody has decoded yet
        super().__init__()
        self.index = index
        self.is_sliding = window is not None
        self.sliding_window = window
        self._goes_on = self.is_sliding  # whether positions continue after the newest token, whatever is held
        self.limit = max_cache_len
        self.storage = dtype if isinstance(dtype, Storage) else storage_of(dtype)
        self.config = config
        self.for_steps = False
        self.record_past = False
        self.has_prompt_room = False  # see `let_go_of_prompt`
        self.is_initialized = False
        self._past = 0 if window is None else max(0, window - 1)  # how many tokens before the newest a query sees
        self._settled = 0  # no rollback goes back beyond this position
        if max_cache_len is not None:
            self.max_cache_len = max_cache_len

    def lazy_initialization(self, key_states: Any, value_states: Any = None) -> None:
        """Allocate memory for keys and values of these shapes, dtype and device."""
        value_states = key_states if value_states is None else value_states
        tokens = self._tokens_of(key_states)
        if shim.attention_of(self.config) == ATTENTION:
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
                capacity=self._room_for(tokens),
                batch_size=batch,
                dtype=self.storage.k or self.dtype,
                v_dtype=self.storage.v or self.dtype,
                k_scale=self.storage.k_scale,
                v_scale=self.storage.v_scale,
            )
        self.is_initialized = True
        self._settled = 0
        self._attach()

    def _tokens_of(self, key_states: Any) -> int:
        if key_states.ndim != 4:
            raise ShapeError(
                f"{self._name}: keys must be (batch, heads, tokens, head_dim), not {tuple(key_states.shape)}."
            )
        return int(key_states.shape[2])

    def _attach(self) -> None:
        """Update torch's views of the memory and what follows from them; called after each change of memory or room."""
        store = self._store
        assert store is not None
        self._counted = None
        with torch.inference_mode(False):  # traced code outside of it may not write to its tensors
            # Launches and the model's own work run on one stream in the order of their calls, so nothing waits.
            self._k, self._v = store.keys.torch(wait=False), store.values.torch(wait=False)
            self._scales: list[Any] = [None if a is None else a.torch(wait=False) for a in store.scales]
        self.batch_size, self.num_heads = self._k.shape[:2]
        self.max_batch_size = self.batch_size
        self.head_dim, self._v_width = store.rows.widths
        self._k_strides, self._v_strides = self._k.stride(), self._v.stride()
        self._of_rows = [None if a is None or a.ndim < 3 else (a.shape[3:], a.stride()) for a in self._scales]
        self._as_stored = self._k.dtype is self.dtype is self._v.dtype
        self._whole = self._as_stored and not self.is_sliding  # new tokens see all slots, unconverted
        usual = self._usual_room()
        self.has_prompt_room = usual is not None and store.capacity > usual
        self._slots = CacheSlots(self._k, self._v, self._scales[0], self._scales[1], store.rows.formats)
        self._bound = self._bound_of(store)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append new tokens; returns all keys and values that these tokens may see, in temporal order.

        Args:
            key_states, value_states: (batch, num_kv_heads, T, head_dim), any strides.
            *args, **kwargs: what else models pass; ignored.

        Returns:
            Keys and values, each (batch, num_kv_heads, n, head_dim). They are views of the cache if the storage dtype
            is the model's and gradients are off, else copies. For one token and attention "tikv", they are tensors that
            become copies as soon as something else uses them. `get_mask_sizes` returns n beforehand.

        Raises:
            ShapeError, DTypeError, ArchError: the tokens do not fit the model, batch, dtype or device of the cache.
            CapacityError: there would be more than ``max_cache_len`` tokens. Nothing is written.
        """
        if _is_traced():
            return self._traced_update(key_states, value_states)
        if self._staged:
            self._refuse_half_set()
        store: Any = self.store
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
            batch, heads = self.batch_size, self.num_heads  # as `_slices`, inlined: each step waits for it
            keys = _part(self._k, (batch, heads, end, self.head_dim), self._k_strides)
            keys.tikv_slots = self._slots
            return keys, _part(self._v, (batch, heads, end, self._v_width), self._v_strides)
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

    def update_in_order(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """`update` outside of a compiled graph, whose mask was made for slots in temporal order."""
        return self.update(key_states, value_states)

    def _without_gradient(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """`update` of tokens with a gradient, through which backward then raises."""
        keys, values = self.update(key_states.detach(), value_states.detach())
        return RefuseBackward.apply(keys, key_states), RefuseBackward.apply(values, value_states)

    def _seen(self, key_states: Any, end: int) -> tuple[Any, Any]:
        """The keys and values that new tokens see, after their own were written to the slots before `end`."""
        first = max(0, end - key_states.shape[2] - self._past) if self.is_sliding else 0
        return self._returned(key_states, first, end)

    def _returned(self, key_states: Any, first: int, end: int) -> tuple[Any, Any]:
        """What `update` returns of slots first..end."""
        graded = torch.is_grad_enabled()
        one = key_states.shape[2] == 1
        if one and not (self._as_stored or graded) and shim.attention_of(self.config) == ATTENTION:
            return self._lend(first, end)
        keys, values = self._read(first, end)
        if self._as_stored and graded:  # autograd may save them, and would not notice that they are overwritten
            return keys.clone(), values.clone()
        return keys, values

    def _lend(self, first: int, end: int) -> tuple[Any, Any]:
        """Slots first..end, which are decoded only if something other than `attend` uses them."""
        pair = Pair(self, first, end)
        self._lent = weakref.ref(pair)
        batch, heads, held = self.batch_size, self.num_heads, end - first
        k_shape, v_shape = (batch, heads, held, self.head_dim), (batch, heads, held, self._v_width)
        return stored_tensors(pair, k_shape, v_shape, self.dtype, self.device)  # type: ignore[no-any-return]

    def _recall(self) -> None:
        """Decode what the last `update` returned, if it is still referenced, before the memory changes."""
        pair = None if self._lent is None else self._lent()
        self._lent = None
        if pair is not None:
            pair.numbers()

    def _traced_update(self, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        """`update` while torch traces its caller: a custom operator and views do the same, if there is room."""
        key_states, value_states = _alike(key_states, value_states)
        if self._goes_by_steps():
            found = self._update_by_step(key_states, value_states)
            return _update_outside_the_graph(self, key_states, value_states) if found is None else found
        store = self.store
        if (
            store is None
            or self._staged
            or self._lent is not None
            or has_gradient(key_states, value_states)
            or not self._takes(key_states, value_states)
            or not store.plain
            or self.is_compileable
        ):
            return _update_outside_the_graph(self, key_states, value_states)
        tokens = key_states.shape[2]
        if tokens == 1 and store.length and _lengths_are_constants():
            return _step_outside_the_graph(self, key_states, value_states)
        drop = self._left_behind() if store.length + tokens > store.capacity else 0
        keep = store.length - drop
        end = keep + tokens
        if end > store.capacity or (self.limit is not None and store.end + tokens > self.limit):
            return _update_outside_the_graph(self, key_states, value_states)
        if drop:
            for a in self._memory():
                a[:, :, :keep] = a[:, :, drop : store.length].clone()
            store.recount(length=keep, origin=store.origin + drop)
            self._bound = self._bound_of(store)
        # Each head of each sequence is a page of a pool with one head.
        pages = torch.arange(self.batch_size * self.num_heads, device=self.device)
        slots = pages[:, None] * store.capacity + torch.arange(keep, end, device=self.device)
        k, v = (a.flatten(0, 2)[:, None] for a in (key_states, value_states))
        k_pool, v_pool = (a.flatten(0, 1)[:, :, None] for a in (self._k, self._v))
        k_scale, v_scale = (None if a is None else a.flatten(0, 1)[:, :, None] for a in self._scales)
        torch_ops.write_slots(k, v, k_pool, v_pool, slots.flatten(), k_scale=k_scale, v_scale=v_scale)
        store.recount(length=end, origin=store.origin)
        first = max(0, end - tokens - self._past) if self.is_sliding else 0
        copied = self._as_stored and torch.is_grad_enabled()  # as in `_seen`
        k, v = (a[:, :, first:end].to(self.dtype, copy=copied) for a in (self._k, self._v))
        if k_scale is not None:
            k, v = (
                (a * scale[:, :, first:end, None]).to(self.dtype) for a, scale in zip((k, v), self._scales, strict=True)
            )
        return k, v

    def _memory(self) -> list[Any]:
        """Torch's views of the memory: keys, values, and the scales of rows."""
        return [a for a in (self._k, self._v, *self._scales) if a is not None and a.ndim > 2]

    def _refit(self, key_states: Any, value_states: Any, error: Exception | None) -> None:
        """Take on the form of another model or batch if the layer is empty; else raise."""
        store = self.store
        assert store is not None
        lead = self.batch_size, self.num_heads
        form = (*lead, "n", self.head_dim), (*lead, "n", self._v_width)
        given = (
            (*key_states.shape[:2], "n", key_states.shape[-1]),
            (*value_states.shape[:2], "n", value_states.shape[-1]),
        )
        same = (form, self.dtype, self.device) == (given, key_states.dtype, key_states.device)
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

    def _read(self, first: int, end: int) -> tuple[Any, Any]:
        """Slots first..end in the model's dtype: a view if that is the stored dtype."""
        if self._scales != [None, None]:
            assert self.store is not None
            k, v = (a.torch(wait=False) for a in self.store.decoded(first, dtypes.parse(self.dtype, self._name)))
            return k, v
        k, v = self._slices(first, end)
        if not first:
            k.tikv_slots = self._slots
        return (k, v) if self._as_stored else (k.to(self.dtype), v.to(self.dtype))

    def _is_memory(self, tensor: Any) -> bool:
        """Whether a tensor is in the memory of keys or of values."""
        found = tensor.untyped_storage().data_ptr()
        return found in (self._k.untyped_storage().data_ptr(), self._v.untyped_storage().data_ptr())

    def _slices(self, first: int, end: int) -> tuple[Any, Any]:
        """Views of slots first..end."""
        k_width, v_width = self._k.shape[3], self._v.shape[3]
        k_shape = self.batch_size, self.num_heads, end - first, k_width
        v_shape = self.batch_size, self.num_heads, end - first, v_width
        if not first:  # each argument costs time
            return _part(self._k, k_shape, self._k_strides), _part(self._v, v_shape, self._v_strides)
        return (
            _part(self._k, k_shape, self._k_strides, first * k_width),
            _part(self._v, v_shape, self._v_strides, first * v_width),
        )

    def _slots_from(self, first: int, end: int) -> CacheSlots | None:
        """Slots first..end for attention; all slots if `first` is 0. None if attention cannot use them."""
        return CacheSlots(*self._stored(first, end)) if first else self._slots

    def _stored(self, first: int, end: int) -> Any:
        """Slots first..end as they are stored: keys, values, their scales, and the store's formats."""
        assert self.store is not None
        shape = self.batch_size, self.num_heads, end - first
        k_scale, v_scale = (
            a if form is None else _part(a, (*shape, *form[0]), form[1], first * form[1][2])
            for a, form in zip(self._scales, self._of_rows, strict=True)
        )
        return *self._slices(first, end), k_scale, v_scale, self.store.rows.formats

    def _visible(self) -> tuple[Any, Any]:
        """What the next token will see besides itself; while a step is traced: all slots."""
        if _is_traced() and self._goes_by_steps():
            assert self._counted is not None
            return self._counted.read()
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

    def _set(self, which: str, tensor: Any) -> None:
        """Replace keys or values; if the length changes, the first of both waits for the other."""
        self._recall()
        if tensor is None:
            self.store = None
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
        end = self.store.end if self.store is not None and self._goes_on else tensor.shape[2]
        self._staged.clear()
        # The new ones may be views of the memory that they are written to.
        keys, values = new["keys"].clone(), new["values"].clone()
        self.lazy_initialization(keys, values)
        assert self.store is not None
        self.store.append(keys, values)
        self.store.origin = max(0, end - tensor.shape[2])
        self._settled = self.store.end
        self._attach()

    def _refuse_half_set(self) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._staged.items()}
        raise ShapeError(
            f"{self._name}: keys and values must be set to the same number of tokens, and so far {shapes} are set. Set "
            f"the other one too."
        )

    cumulative_length = property(LayerRoom.get_seq_length)

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        """(number of keys that `update` will return for these new tokens, position of the first of them)."""
        if (found := self._mask_sizes_of_steps(shim.query_length(queries))) is not None:
            return found
        end, origin = self.get_seq_length(), 0 if self.store is None else self.store.origin
        first = max(0, end - self._past) if self.is_sliding else origin
        return end - first + shim.query_length(queries), steps.KnownOffset(
            first
        ) if self.for_steps and not _is_traced() else first

    def get_max_length(self) -> int:
        """The most tokens that the layer can hold; -1 means any number."""
        bounds = [n for n in (self.sliding_window, self.limit) if n is not None]
        return min(bounds) if bounds else -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """From now on, keep what `crop` needs to go back to the present length.

        After a `crop`, this goes on from the length that it left.
        """
        self.record_past = True
        self._settled = self.get_seq_length()

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self._forget()

    def _forget(self) -> None:
        """`reset` of keys and values."""
        self._recall()
        self._staged.clear()
        self._settled = 0
        if self.store is not None:
            self.store.reset()
            self._bound = self._bound_of(self.store)
            self._recount_on_device()

    def compact(self, keep: Any) -> None:
        """Keep some tokens of a full layer, whose memory then shrinks to what they need.

        `GrowingLayer.compact` says what can be kept, and `GrowingGroups.compact` for groups along tokens.
        """
        if self.store is None or self.is_sliding:
            raise OptionError(
                f"{self._name}: compact() works only on layers with full attention that hold tokens. Set keys and "
                "values instead."
            )
        self._recall()
        self.store.compact(keep)
        self.store.make_room(capacity=min(self._room_for(self.store.length + 1), self.store.capacity))
        self._attach()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; the argument means what it means in the installed transformers.

        Tokens that a window has dropped do not come back. A model's result must not depend on that: if the next query's
        window would include such tokens, the call is refused, unless `activate_past_recording` kept them.
        `KVCacheStore.trim` goes back as far as its ring holds tokens, and its queries see those that are left.

        Args:
            tokens_to_remove: a negative number drops that many. A positive number, before transformers 5.16, keeps that
                many. 0 drops nothing; before transformers 5.14, it drops all tokens.

        Raises:
            OptionError: the number is positive, since transformers 5.16.
            PositionError: tokens in the next query's window are no longer held. Nothing is changed.
        """
        target = self._cropped_to(tokens_to_remove)
        if self.store is None:
            return
        if not target:
            self._forget()
            return
        self._recall()
        self.store.trim(self.get_seq_length() - target)
        self._settled = target
        self._recount_on_device()

    def _cropped_to(self, tokens_to_remove: int) -> int:
        """The length that `crop` leaves; raises if it is impossible."""
        length = self.get_seq_length()
        target = shim.tokens_after_crop(int(tokens_to_remove), length)
        if target is None:
            n, most = int(tokens_to_remove), min(int(tokens_to_remove), length)
            raise OptionError(
                f"{self._name}: crop({n}) is unclear: old versions of transformers kept {n} tokens, and this one "
                f"counts tokens to remove. With {length} tokens, crop({most - length}) keeps {most}, and crop({-n}) "
                f"drops {most}."
            )
        self._refuse_crop(length, target)
        return target

    def _first_held(self) -> int:
        """The oldest position that is held, sinks aside."""
        return 0 if self.store is None else self.store.origin

    def _oldest_needed(self, target: int) -> int:
        """The oldest position, sinks aside, that a query at position `target` sees."""
        return max(0, target - self._past)

    def _refuse_crop(self, length: int, target: int) -> None:
        first, needed = self._first_held(), self._oldest_needed(target)
        if 0 < target < length and first > needed:
            raise PositionError(
                f"{self._name}: cannot go back from {length} to {target} tokens: {self._seen_in_words()} needs "
                f"positions from {needed} on, but the cache holds {first}..{length - 1}. {self._way_out_of_crop()}"
            )

    def _seen_in_words(self) -> str:
        return f"a window of {self.sliding_window}" if self.is_sliding else "a layer that sees all tokens"

    def _way_out_of_crop(self) -> str:
        return "Call activate_past_recording() before the tokens that may be dropped, or reset()."

    def reorder_cache(self, beam_idx: Any) -> None:
        """Replace each sequence b by sequence ``beam_idx[b]``."""
        if self.get_seq_length():
            assert self.store is not None
            self._recall()
            self.store.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence: 0, 0, 1, 1 for 2."""
        if self.get_seq_length():
            assert self.store is not None
            self._recall()
            self.store.repeat(repeats)
            self._attach()

    def batch_select_indices(self, indices: Any) -> None:
        """Keep these sequences, in this order; -1 is the last one. A boolean mask is accepted too."""
        if self.get_seq_length():
            assert self.store is not None
            self._recall()
            chosen = torch.as_tensor(indices)
            chosen = chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen
            self.store.select(torch.where(chosen < 0, chosen + self.batch_size, chosen))
            self._attach()

    def _blank(self) -> TikvLayer:
        """A layer like this one, without tokens."""
        return type(self)(self.index, self.sliding_window, self.limit, self.storage, self.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> TikvLayer:
        found = self._blank()
        found.for_steps = self.for_steps
        found.record_past, found._settled = self.record_past, self._settled
        if self.store is not None:
            found.dtype, found.device = self.dtype, self.device
            with share_memory_with(self.device):
                found.store = self.store.twin(found._new_store)
            found.is_initialized = True
            found._attach()
        found._staged = copy.deepcopy(self._staged, memo)
        memo[id(self)] = found
        return found

    def _device_of(self, store: Any) -> Any:
        """The device on which torch sees the memory of a store."""
        return store.keys.torch().device

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OptionError(
            f"{self._name}: a cache is not pickled, nor copied by copy.copy(), which would share its memory. Use "
            f"copy.deepcopy(); to keep tokens in a file, save() of the TikvCache."
        )

    def __repr__(self) -> str:
        kind = f"window {self.sliding_window}" if self.is_sliding else "full"
        return f"TikvLayer({kind}, {self.store!r})" if self.store is not None else f"TikvLayer({kind}, empty)"


def _made_alike(key_states: Any, value_states: Any) -> bool:
    """Whether `_alike` changes them: their dtypes differ, or the numbers of a row are not contiguous."""
    if key_states.dtype is not value_states.dtype:
        return True
    return any(a.ndim and a.shape[-1] > 1 and a.stride(-1) != 1 for a in (key_states, value_states))


def _alike(key_states: Any, value_states: Any) -> tuple[Any, Any]:
    """Both in the wider dtype and with contiguous rows, since under torch.autocast a rotation widens only the keys."""
    if not _made_alike(key_states, value_states):
        return key_states, value_states
    wide = torch.promote_types(key_states.dtype, value_states.dtype)
    return key_states.to(wide).contiguous(), value_states.to(wide).contiguous()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _lengths_are_constants() -> bool:
    """Whether torch compiles with ``dynamic=False``."""
    from torch._dynamo import config

    return bool(config.assume_static_by_default and not config.automatic_dynamic_shapes)


def _outside_the_graph(reason: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`TikvLayer.update` outside of compiled code; with ``fullgraph=True`` torch gives this reason in its error."""

    def update(layer: TikvLayer, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        keys, values = layer.update_in_order(key_states, value_states)
        if layer.for_steps:
            layer._make_ready()  # the next step stays in the graph
        layer._recall()  # torch cannot compile `StoredTensor`s
        return decoded(keys), decoded(values)

    found: Any = torch.compiler.disable(update)
    found._torchdynamo_disable_msg = reason
    return found  # type: ignore[no-any-return]


_update_outside_the_graph = _outside_the_graph(
    f"{OPERATION} makes and moves its memory, refuses tokens and writes codes in groups only outside of compiled "
    f"graphs. With fullgraph=True, give max_cache_len, and run the prompt or early_initialization() outside of the "
    f"compiled model"
)
_step_outside_the_graph = _outside_the_graph(
    f"{OPERATION}: torch would compile the model again for each number of cached tokens, since dynamic=False makes it "
    f"a constant. Leave dynamic out, or use dynamic=True"
)
