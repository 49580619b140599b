"""The memory of a layer as torch sees it: views of all slots, and of the first or the newest of them."""

from __future__ import annotations

from typing import Any

import torch

from tikv import dtypes
from tikv.integrations.transformers.memory import stored_ops as ops
from tikv.integrations.transformers.memory.gradients import has_gradient, writable_tensors
from tikv.integrations.transformers.memory.slot_map import TokenMoves
from tikv.integrations.transformers.memory.slots import CacheSlots

INDEXED = {1: torch.uint8, 4: torch.int32}  # by bytes: torch cannot index 8-bit floats or words of codes


def _find_part() -> Any:
    """part(tensor, shape, strides, first element): a view of a tensor, made by the function that compiled code uses.

    as_strided, the fallback if that function has changed, takes twice the time, and slices three times. The tensor
    must begin where its storage does.
    """
    base = torch.arange(12, device="cpu").view(2, 6)
    try:
        part = torch._C._dynamo.guards._reinterpret_tensor
        parts = part(base, (2, 2), (6, 1), 3), part(base, (2, 2), (6, 1))
        works = [a.tolist() for a in parts] == [[[3, 4], [9, 10]], [[0, 1], [6, 7]]]
        works = works and all(a.untyped_storage().data_ptr() == base.data_ptr() for a in parts)
    except (AttributeError, TypeError, RuntimeError):
        works = False
    return part if works else torch.as_strided


part = _find_part()


_FEW_RUNS = 8  # of neighbouring slots, which are copied without an index


class TorchMemory:
    """The keys and values of a `GrowingLayer` as torch sees them, until they are moved to other memory.

    Args:
        store: the layer's storage.
        dtype: the model's.
        name: the layer's, for messages.

    Attributes:
        k, v, scales: views of all slots, and of the scales of K and V, None for one that has none.
        shape: (sequences, heads) of the layer.
        widths: those of a head of K and of V.
        as_stored: whether keys and values are stored in the model's dtype.
        slots: all slots, for attention; None if it cannot read them.
    """

    attend: Any = None  # attention of a decoded token, if only the storage can read its memory

    def __init__(self, store: Any, dtype: Any, name: str) -> None:
        self._store, self._dtype, self._name = store, dtype, name
        self.widths = store.rows.widths
        with writable_tensors():
            # Launches and the model's own work run on one stream in the order of their calls, so nothing waits.
            self.k, self.v = store.keys.torch(wait=False), store.values.torch(wait=False)
            self.scales = [None if a is None else a.torch(wait=False) for a in store.scales]
        self.shape = tuple(self.k.shape[:2])
        self.device = self.k.device
        self.k_strides, self.v_strides = self.k.stride(), self.v.stride()
        self._of_rows = [None if a is None or a.ndim < 3 else (a.shape[3:], a.stride()) for a in self.scales]
        self.as_stored = self.k.dtype is dtype is self.v.dtype
        self.slots: CacheSlots | None = CacheSlots(self.k, self.v, self.scales[0], self.scales[1], store.rows.formats)

    def arrays(self) -> list[Any]:
        """Keys, values, and the scales of rows."""
        return [a for a in (self.k, self.v, *self.scales) if a is not None and a.ndim > 2]

    def words(self) -> list[Any]:
        """`arrays` in dtypes that torch can index."""
        return [a if (word := INDEXED.get(a.dtype.itemsize)) is None else a.view(word) for a in self.arrays()]

    def take(self, words: list[Any], moves: TokenMoves) -> None:
        """Copy to each of the first slots that slot of `words` which `moves` names."""
        used, runs = moves.sources.shape[-1], moves.runs
        if not used:
            return
        if 0 < len(runs) <= _FEW_RUNS:  # an index would be copied to the device, for which the host waits
            for a, to in zip(words, self.words(), strict=True):
                to[:, :, :used] = torch.cat([a[:, :, first:end] for first, end in runs], 2)
            return
        index = torch.as_tensor(moves.sources, device=self.device)
        for a, to in zip(words, self.words(), strict=True):
            if index.ndim == 1:
                to[:, :, :used] = a[:, :, index]
            else:
                rows = torch.arange(len(index), device=self.device)[:, None]
                to[:, :, :used] = a[rows, :, index].transpose(1, 2)

    def clear(self, first: int, empty: Any) -> None:
        """Write zeros to the slots from `first` on that (batch, n) bools name."""
        hidden = torch.as_tensor(empty, device=self.device)[:, None]
        for words in self.words():
            words = words[:, :, first : first + empty.shape[1]]
            words.masked_fill_(hidden if words.ndim == 3 else hidden[..., None], 0)

    def append_rows(
        self, key_states: torch.Tensor, value_states: torch.Tensor, tokens: Any, ring: int, sinks: int
    ) -> None:
        """Write the next tokens of each row, the first of which is the row's token `tokens`: (batch,)."""
        where = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        formats = [ops.name_of(format) for format in self._store.rows.formats]
        ops.append_stored(key_states, value_states, self.k, self.v, *self.scales, where, ring, sinks, *formats)

    def takes(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether tokens have the form of the memory and the model's dtype, and no gradient."""
        if key_states.shape[2] != value_states.shape[2] or has_gradient(key_states, value_states):
            return False
        return all(
            (*new.shape[:2], new.shape[3]) == (*self.shape, width)
            and (new.dtype, new.device) == (self._dtype, self.device)
            for new, width in zip((key_states, value_states), self.widths, strict=True)
        )

    def read(self, first: int, end: int) -> tuple[Any, Any]:
        """Slots first..end, the last one held, in the model's dtype: a view if that is the stored dtype."""
        if self.scales != [None, None]:
            k, v = (a.torch(wait=False) for a in self._store.decoded(first, dtypes.parse(self._dtype, self._name)))
            return k, v
        k, v = self._slices(first, end)
        if not first:
            k.tikv_slots = self.slots
        return (k, v) if self.as_stored else (k.to(self._dtype), v.to(self._dtype))

    def _slices(self, first: int, end: int) -> tuple[Any, Any]:
        """Views of slots first..end."""
        k_width, v_width = self.k.shape[3], self.v.shape[3]
        k_shape, v_shape = (*self.shape, end - first, k_width), (*self.shape, end - first, v_width)
        if not first:  # each argument costs time
            return part(self.k, k_shape, self.k_strides), part(self.v, v_shape, self.v_strides)
        return (
            part(self.k, k_shape, self.k_strides, first * k_width),
            part(self.v, v_shape, self.v_strides, first * v_width),
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of keys or of values."""
        address = tensor.untyped_storage().data_ptr()
        return address in (self.k.untyped_storage().data_ptr(), self.v.untyped_storage().data_ptr())

    def slots_from(self, first: int, end: int) -> CacheSlots | None:
        """Slots first..end for attention; all slots if `first` is 0. None if attention cannot use them."""
        return CacheSlots(*self.stored(first, end)) if first else self.slots

    def stored(self, first: int, end: int) -> Any:
        """Slots first..end as they are stored: keys, values, their scales, and the formats of both."""
        shape = *self.shape, end - first
        k_scale, v_scale = (
            a if form is None else part(a, (*shape, *form[0]), form[1], first * form[1][2])
            for a, form in zip(self.scales, self._of_rows, strict=True)
        )
        return *self._slices(first, end), k_scale, v_scale, self._store.rows.formats
