"""Keys and values in a storage format of the cache: tensors that are decoded when they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tikv.integrations.transformers.memory.slots import CacheSlots, attend_contiguous
from tikv.ops.attention.call import Caches
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.request import AttendRequest


class Pair:
    """The keys and values that one `update` returned: their slots or, after they were used, the decoded tensors.

    Args:
        layer: the `TikvLayer`, which decodes them; it calls `numbers` before its memory changes.
        first, end: the range of their slots.
    """

    __slots__ = ("__weakref__", "_layer", "_numbers", "end", "first")

    def __init__(self, layer: Any, first: int, end: int) -> None:
        self._layer, self.first, self.end = layer, first, end
        self._numbers: tuple[Any, Any] = ()  # type: ignore[assignment]

    def numbers(self) -> tuple[Any, Any]:
        """Both, decoded, in their own memory."""
        if self._layer is not None:
            with torch.no_grad():
                memory = self._layer._here()
                both = [a.clone() if memory.holds(a) else a for a in memory.read(self.first, self.end)]
            self._numbers = both[0].contiguous(), both[1].contiguous()
            self._layer = None
        return self._numbers

    def attend(self, query: torch.Tensor, request: AttendRequest) -> Any:
        """Attention of (batch, heads, 1, head_dim) queries by the layer itself; None if others can read its memory.

        It is None too after they were decoded, and for selected keys, which such layers do not support.
        """
        attend = None if self._layer is None or request.indices is not None else self._layer._here().attend
        return None if attend is None else attend(self.first, query, request)

    def stored(self) -> Any:
        """(keys, values, scales of keys, scales of values, formats) as they are stored.

        It is None after they were decoded, since the model may have changed what it got.
        """
        return None if self._layer is None else self._layer._here().stored(self.first, self.end)

    def slots(self) -> CacheSlots | None:
        """The same as the first of some `CacheSlots`, if others can read them."""
        return None if self._layer is None else self._layer._here().slots_from(self.first, self.end)


class _Copied(Pair):
    """A pair whose memory is its own.

    Args:
        numbers, stored: what `Pair.numbers` and `Pair.stored` give.
    """

    __slots__ = ("_stored",)

    def __init__(self, numbers: tuple[Any, Any], stored: Any) -> None:
        super().__init__(None, 0, 0)
        self._numbers, self._stored = numbers, stored

    def stored(self) -> Any:
        """As `Pair.stored`."""
        return self._stored

    def slots(self) -> CacheSlots:
        """As `Pair.slots`."""
        return CacheSlots(*self._stored)


class StoredTensor(torch.Tensor):  # type: ignore[misc]
    """Keys or values with the model's shape and dtype, which are decoded before torch does anything with them.

    So a model may slice, repeat, scale or gate what `update` returned; if it does not, `attend` reads it in place.
    """

    pair: Any  # a `Pair`, or another object with `numbers` and `stored`
    which: int  # 0: keys; 1: values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do any operation of torch on the decoded tensors."""
        args, kwargs = pytree.tree_map_only(StoredTensor, StoredTensor.numbers, (args, kwargs or {}))
        return function(*args, **kwargs)

    def numbers(self) -> Any:
        """The decoded tensor."""
        return self.pair.numbers()[self.which]

    # What torch does without dispatching an operation would find no memory here.

    def data_ptr(self) -> int:
        """The address of the decoded tensor; all methods below use that tensor too."""
        return self.numbers().data_ptr()  # type: ignore[no-any-return]

    def untyped_storage(self) -> Any:
        """Its memory."""
        return self.numbers().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        """A NumPy array."""
        return self.numbers().numpy(force=force)

    def tolist(self) -> Any:
        """A list."""
        return self.numbers().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numbers().__array__(dtype)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numbers().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.numbers().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:
        return repr(self.numbers())


_make = torch.Tensor._make_wrapper_subclass


def stored_tensors(pair: Any, k_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """The keys and the values of a pair, with these shapes."""
    keys, values = (_make(StoredTensor, shape, dtype=dtype, device=device) for shape in (k_shape, v_shape))
    keys.pair, keys.which = pair, 0
    values.pair, values.which = pair, 1
    return keys, values


def copied_tensors(numbers: tuple[Any, Any], stored: Any) -> Any:
    """Keys and values like those of `stored_tensors`, over a copy of what `Pair.stored` gave, and its numbers."""
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in stored]
    k, v = numbers
    return stored_tensors(_Copied(numbers, copies), k.shape, v.shape, k.dtype, k.device)


def decoded(tensor: torch.Tensor) -> Any:
    """A plain tensor, decoded if it was not one; other things as they are."""
    return tensor.numbers() if isinstance(tensor, StoredTensor) else tensor


def pair_of(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """The pair that one `update` returned, if these are its tensors and autograd does not follow them; else None."""
    if type(keys) is not StoredTensor or type(values) is not StoredTensor:
        return None
    return keys.pair if keys.pair is values.pair and (keys.which, values.which) == (0, 1) else None


def stored_pair(keys: torch.Tensor, values: torch.Tensor) -> Any:
    """`Pair.stored`, if these are the tensors of one `update`, unused and not followed by autograd; else None."""
    pair = pair_of(keys, values)
    return None if pair is None else pair.stored()


def reads_in_place(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether attention reads these keys and values where they are stored."""
    slots = getattr(key, "tikv_slots", None)
    return pair_of(key, value) is not None if slots is None else slots.are(key, value)


def attend_in_place(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, request: AttendRequest) -> Any:
    """Attention of (batch, heads, T, head_dim) queries to all keys or to selected ones, reading them as stored."""
    query, held = in_rows(query), key.shape[2]
    slots = getattr(key, "tikv_slots", None)
    if slots is not None and slots.are(key, value):
        return slots.attend(query, held, request)
    pair = pair_of(key, value)
    if isinstance(pair, Pair):  # keys made from latents are not stored
        out = pair.attend(query, request)
        if out is not None:
            return out
        slots = pair.slots()
        if slots is not None:
            return slots.attend(query, held, request)
    caches = Caches(CONTIGUOUS, in_rows(decoded(key)), in_rows(decoded(value)), held)
    return attend_contiguous(query, caches, held, request)


def in_rows(a: Any) -> Any:
    """The array with contiguous rows, as the kernel needs them."""
    return a if a.stride(3) == 1 else a.contiguous()
