"""A `GrowingLayer` in the host's memory, read through a copy on the device; layers share a few places for copies."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from tikv import runtime
from tikv.arrays import Array, ArrayView, CacheArray
from tikv.dtypes import DType
from tikv.runtime.interrupts import uninterrupted
from tikv.stores.layers.growing import AppendAlike, GrowingLayer
from tikv.stores.layers.residents import Frame, Residents, Transfer, refuse_capture, transfer_of, why_plain


class Places:
    """The places for copies on each device, which the layers of a cache share.

    Args:
        count: the number of the cache's layers, which are used in order.
        resident_layers: how many of them have a copy on a device.
        transfer: makes the object that copies to a place, on any device; None if only GPUs have places.
    """

    def __init__(
        self, count: int, resident_layers: int, transfer: Callable[[runtime.Runtime], Transfer] | None = None
    ) -> None:
        self.count, self.resident_layers, self.transfer = count, resident_layers, transfer
        # Weak references, since each layer refers to this: a cycle would delay freeing the layers.
        self._layers: weakref.WeakValueDictionary[int, HostedLayer] = weakref.WeakValueDictionary()
        self._residents: dict[runtime.Runtime, Residents[Place]] = {}

    def why_plain(self, live: runtime.Runtime, operation: str) -> str:
        """As `residents.why_plain`; empty if copies are made anyway."""
        return "" if self.transfer else why_plain(live, operation)

    def add(self, layer: HostedLayer) -> None:
        """Add a layer, instead of any other with its number."""
        for residents in self._residents.values():
            residents.drop(layer.number)
        self._layers[layer.number] = layer
        live = layer.runtime
        residents = self._residents.setdefault(live, Residents((), self.count, ()))
        residents.layers = sorted(i for i, x in self._layers.items() if x.runtime is live)
        while len(residents.frames) < min(self.resident_layers, len(residents.layers)):
            residents.frames.append(Place((self.transfer or transfer_of)(live)))

    def of(self, layer: HostedLayer) -> Residents[Place]:
        """The resident layers of its device."""
        return self._residents[layer.runtime]

    def bring(self, layer: HostedLayer, ahead: bool = False) -> Place:
        """The place of a layer, to which it is at least being copied; with `ahead`, the next layer is copied too."""
        residents = self.of(layer)
        place = residents.bring(layer.number, self._fetch)
        if ahead:
            residents.layers = [number for number in residents.layers if number in self._layers]
            residents.bring_next(layer.number, self._fetch)
        return place

    def _fetch(self, number: int, place: Place) -> None:
        place.take(self._layers[number])

    def __deepcopy__(self, memo: dict[int, Any]) -> Places:
        """New places for the copies of the layers, which are added when they are made."""
        copied = Places(self.count, self.resident_layers, self.transfer)
        memo[id(self)] = copied
        return copied


class Place(Frame):
    """A `Frame` whose content is a `GrowingLayer`, or None before its first use."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__(None, transfer)
        self._holder: weakref.ref[HostedLayer] | None = None
        self._references: list[weakref.ref[MemoryReference]] = []

    def take(self, layer: HostedLayer) -> None:
        """Start the copy of a layer's tokens, after the previous layer has left."""
        before = None if self._holder is None else self._holder()
        if before is not None:
            before.leave()
        self.layer, self._holder = None, None
        # Arrays that were handed out do not change as long as they are referenced.
        if any(reference() is not None for reference in self._references) or not layer.fits(self.content):
            self.content = None  # freed before more is allocated
            self.content = layer.empty_copy()
        self._references = []
        self.transfer.start(layer.pairs(self.content))
        self._holder = weakref.ref(layer)

    def hand_out(self, array: CacheArray) -> CacheArray:
        """An array of the content to hand out, which records whether it is still referenced."""
        a = array.view_for("TikvCache")
        reference = MemoryReference(a.owner)
        self._references = [*(one for one in self._references if one() is not None), weakref.ref(reference)]
        view = ArrayView(
            a.ptr, a.shape, a.strides, a.dtype, a.device, writable=a.writable, handle=a.handle, offset=a.offset,
            owner=reference,
        )  # fmt: skip
        return CacheArray(view, self.content.runtime)


class MemoryReference:
    """Keeps memory alive as long as an array over it exists."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


class HostedLayer(GrowingLayer):
    """A `GrowingLayer` in the host's memory. The arrays that it returns are on the device, until its copy is replaced.

    Args:
        places, number: the places for copies, and the layer's number.
        on_leave: called before its copy is replaced: `keys`, `values` and `scales` returned before are then invalid.
        **form: as in `GrowingLayer`.
    """

    on_host = True

    def __init__(self, places: Places, number: int, on_leave: Callable[[], None], **form: Any) -> None:
        super().__init__(**form)
        self.number, self._on_leave = number, weakref.WeakMethod(on_leave)
        self._places = places
        places.add(self)

    # --- its copy

    def fits(self, content: GrowingLayer | None) -> bool:
        """Whether a copy of this layer fits there."""
        if content is None or content.capacity < self.capacity:
            return False
        forms = [(x.rows.arguments(), x._layers.memory.num_kv_heads, x.batch_size) for x in (self, content)]
        return forms[0] == forms[1]

    def empty_copy(self) -> GrowingLayer:
        """A layer of this form on the device."""
        with runtime.current_gpu(self.runtime.index) if self.runtime.is_cuda else contextlib.nullcontext():
            return GrowingLayer(**self.arguments())

    def pairs(self, content: GrowingLayer) -> list[tuple[ArrayView, ArrayView, int]]:
        """What is copied, see `Transfer.start`."""
        arrays = zip(self._layer.arrays, content._layer.arrays, strict=True)
        return [(a, to, self.length) for a, to in arrays]

    def leave(self) -> None:
        """Tell the readers of its copy that it goes."""
        call = self._on_leave()
        if call is not None:
            call()

    def bring(self, ahead: bool = False) -> GrowingLayer:
        """Its copy, for launches from now on; with `ahead`, the next layer is copied meanwhile."""
        refuse_capture(self.runtime, "TikvCache")
        place = self._places.bring(self, ahead)
        place.transfer.wait()
        content: GrowingLayer = place.content
        content.recount(length=self.length, origin=self.origin)
        return content

    def _place(self) -> Place:
        self.bring()
        return self._places.bring(self)

    def _on_host(self) -> contextlib.AbstractContextManager[None]:
        return self._places.of(self).on_host(self.number)

    # --- reads

    @property
    def keys(self) -> CacheArray:
        """As `GrowingLayer.keys`, of the copy; its capacity may be more."""
        place = self._place()
        return place.hand_out(place.content.keys)

    @property
    def values(self) -> CacheArray:
        """As `GrowingLayer.values`, of the copy."""
        place = self._place()
        return place.hand_out(place.content.values)

    @property
    def scales(self) -> tuple[CacheArray | None, CacheArray | None]:
        """As `GrowingLayer.scales`, of the copy."""
        place = self._place()
        k, v = (None if a is None else place.hand_out(a) for a in place.content.scales)
        return k, v

    def decoded(self, first: int, dtype: DType | None = None) -> tuple[CacheArray, CacheArray]:
        """As `GrowingLayer.decoded`, by the copy."""
        return self.bring().decoded(first, dtype)

    # --- writes

    @uninterrupted
    def append(self, k: Array, v: Array) -> None:
        """As `GrowingLayer.append`, to the copy and to the host."""
        content = self.bring()
        with self._places.of(self).writing(self.number, self._places.bring(self)):
            content.append(k, v)
            super().append(k, v)

    def _like_the_last(self, operation: str) -> AppendAlike:
        return self.append_alike  # takes no tokens, since they go to two places

    def make_room(self, *, capacity: int, drop: int = 0) -> None:
        """As `GrowingLayer.make_room`."""
        changes = capacity != self.capacity or drop
        with self._on_host() if changes else contextlib.nullcontext():
            super().make_room(capacity=capacity, drop=drop)

    def compact(self, keep: Any) -> None:
        """As `GrowingLayer.compact`."""
        with self._on_host():
            super().compact(keep)

    def _move(self, operation: str, index: Array, move: Callable[[str, Any], None]) -> None:
        with self._on_host():
            super()._move(operation, index, move)

    def from_host(self, arrays: Any, **counts: Any) -> None:
        """As `GrowingLayer.from_host`."""
        with self._on_host():
            super().from_host(arrays, **counts)
