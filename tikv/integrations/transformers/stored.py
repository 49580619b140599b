"""Keys and values in a storage format of the cache's own: tensors that are decoded when they are used."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tikv.integrations.transformers.slots import CacheSlots, attend_contiguous
from tikv.ops.attention.contiguous import ContiguousCaches
from tikv.ops.attention.request import AttendRequest


class Pair:
    """The keys and values that one `update` returned: where they lie or, once they were used, their numbers.

    Args:
        layer: the `TikvLayer`, which decodes them; it calls `numbers` before its memory changes.
        first, end: their slots.
    """

    __slots__ = ("__weakref__", "_layer", "_numbers", "end", "first")

    def __init__(self, layer: Any, first: int, end: int) -> None:
        self._layer, self.first, self.end = layer, first, end
        self._numbers: tuple[Any, Any] = ()  # type: ignore[assignment]

    def numbers(self) -> tuple[Any, Any]:
        """Both, decoded, in memory of their own."""
        if self._layer is not None:
            with torch.no_grad():
                found = self._layer._read(self.first, self.end)
                both = [a.clone() if self._layer._is_memory(a) else a for a in found]
            self._numbers = both[0].contiguous(), both[1].contiguous()
            self._layer = None
        return self._numbers

    def attend(self, query: Any, request: AttendRequest) -> Any:
        """Attention of (batch, heads, 1, head_dim) queries by the layer itself; None where others read its memory.

        None too once they were decoded, and of chosen keys, which no such layer reads.
        """
        own = None if self._layer is None or request.indices is not None else self._layer.attend_stored
        return None if own is None else own(self.first, query, request)

    def stored(self) -> Any:
        """(keys, values, scales of keys, scales of values, formats) as they lie there.

        None once they were decoded, since the model may have changed what it got.
        """
        return None if self._layer is None else self._layer._stored(self.first, self.end)

    def slots(self) -> CacheSlots | None:
        """The same as the first of some `CacheSlots`, where others read them."""
        return None if self._layer is None else self._layer._slots_from(self.first, self.end)


class StoredTensor(torch.Tensor):  # type: ignore[misc]
    """Keys or values with the shape and dtype of a model's, which torch decodes before it does anything with them.

    So a model may cut, repeat, scale or gate what `update` returned; where it did not, `attend` reads it in place.
    """

    pair: Any  # a `Pair`, or what has its `numbers` and `stored`
    which: int  # 0: keys; 1: values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any operation of torch, on the numbers."""
        args, kwargs = pytree.tree_map_only(StoredTensor, StoredTensor.numbers, (args, kwargs or {}))
        return function(*args, **kwargs)

    def numbers(self) -> Any:
        """The decoded tensor."""
        return self.pair.numbers()[self.which]

    # What torch does without an operation would find no memory here.

    def data_ptr(self) -> int:
        """Of the decoded tensor, as all that follows."""
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


def decoded(tensor: Any) -> Any:
    """A tensor that torch has the numbers of."""
    return tensor.numbers() if type(tensor) is StoredTensor else tensor


def pair_of(keys: Any, values: Any) -> Any:
    """What one `update` returned, if these are it and nothing has followed it; else None."""
    if type(keys) is not StoredTensor or type(values) is not StoredTensor:
        return None
    return keys.pair if keys.pair is values.pair and (keys.which, values.which) == (0, 1) else None


def stored_pair(keys: Any, values: Any) -> Any:
    """`Pair.stored`, if these are what one `update` returned and nothing has used or followed it; else None."""
    pair = pair_of(keys, values)
    return None if pair is None else pair.stored()


def attend_in_place(query: Any, key: Any, value: Any, request: AttendRequest) -> Any:
    """Attention of (batch, heads, T, head_dim) queries to all keys or to chosen ones, by what is stored of them."""
    query, held = _in_rows(query), key.shape[2]
    slots = getattr(key, "tikv_slots", None)
    if slots is not None and slots.are(key, value):
        return slots.attend(query, held, request)
    pair = pair_of(key, value)
    if isinstance(pair, Pair):  # what is made of latents lies nowhere
        found = pair.attend(query, request)
        if found is not None:
            return found
        slots = pair.slots()
        if slots is not None:
            return slots.attend(query, held, request)
    caches = ContiguousCaches(_in_rows(decoded(key)), _in_rows(decoded(value)), held)
    return attend_contiguous(query, caches, held, request)


def _in_rows(a: Any) -> Any:
    """An array whose numbers of a row follow each other, as the kernel reads them."""
    return a if a.stride(3) == 1 else a.contiguous()
