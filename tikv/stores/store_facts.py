"""What a contiguous store is and holds: its counts, its memory where it lies, and its picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import CacheArray
from tikv.dtypes import DType
from tikv.errors import DTypeError, PositionError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.stores import draw
from tikv.stores.kept import held_rows
from tikv.stores.layer import Layer, LayerMemory
from tikv.stores.storage import size_in_words
from tikv.stores.whole import StoreLock, whole


class StoreFacts(draw.Drawn):
    """The part of `KVCacheStore` that only looks."""

    runtime: runtime.Runtime
    lock: StoreLock
    num_layers: int
    num_kv_heads: int
    capacity: int
    dtype: DType | GroupFormat
    windows: list[int | None]
    sinks: int
    _layers: list[Layer]
    _counts: list[Layer]
    _memory: LayerMemory

    @property
    def batch_size(self) -> int:
        """Sequences now."""
        return self._memory.batch_size

    @property
    @whole
    def length(self) -> int:
        """Tokens appended since `reset`, less those trimmed; while a step is under way, that of the layers ahead."""
        return max(layer.end for layer in self._counts)

    @property
    @whole
    def seq_lens(self) -> np.ndarray[Any, Any]:
        """(batch_size,) int32: `length` for each sequence, on the host.

        Raises:
            PositionError: `length` does not fit int32, as it may not in a store whose layers all slide.
        """
        return self._lens("KVCacheStore.seq_lens", "Read `length`.")

    def _lens(self, operation: str, remedy: str) -> np.ndarray[Any, Any]:
        """`length` for each sequence, if it fits."""
        if self.length >= 2**31:
            raise PositionError(f"{operation}: length={self.length} does not fit int32. {remedy}")
        return np.full(self.batch_size, self.length, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales, filled or not."""
        return self._memory.nbytes

    def layer_length(self, layer: int) -> int:
        """Tokens appended to one layer since `reset`, less those trimmed."""
        return self._counts[self._layer(layer, "KVCacheStore.layer_length").index].end

    @whole
    def held(self, layer: int) -> int | np.ndarray[Any, Any]:
        """Tokens that a layer holds: `length`, less what a window or `compact` let go.

        Returns:
            A number; or (batch, H) int32, where a compaction left heads of different lengths.
        """
        found = self._counts[self._layer(layer, "KVCacheStore.held").index]
        if found.head_lengths is None:
            return found.held
        return held_rows(found).counts.astype(np.int32)

    @whole
    def positions(self, layer: int) -> np.ndarray[Any, Any]:
        """(batch, H, held) int64 on the host: the position of each token held, in the order of `tokens`.

        -1 stands behind the last of a head that holds fewer than others.
        """
        found = held_rows(self._counts[self._layer(layer, "KVCacheStore.positions").index]).positions
        return np.array(np.broadcast_to(found, (self.batch_size, self.num_kv_heads, found.shape[-1])), np.int64)

    def next_position(self, layer: int) -> int:
        """The position of the layer's next token: `layer_length`, unless keys were rotated to other positions."""
        return self._counts[self._layer(layer, "KVCacheStore.next_position").index].next_position

    def _layer(self, index: int, operation: str) -> Layer:
        live = self.runtime
        if live.front.prog is not live.program:  # asked here too, on every append's way
            runtime.require_alive(live, operation)
        if type(index) is not int or not 0 <= index < self.num_layers:
            index = checks.integer(index, "layer", operation, high=self.num_layers - 1)
        return self._layers[index]

    def keys(self, layer: int) -> CacheArray:
        """(batch_size, num_kv_heads, slots, head_dim): the layer's keys where they lie, not a copy."""
        return CacheArray(self._layer(layer, "KVCacheStore.keys").k, self.runtime)

    def values(self, layer: int) -> CacheArray:
        """(batch_size, num_kv_heads, slots, head_dim_v): the layer's values where they lie, not a copy."""
        return CacheArray(self._layer(layer, "KVCacheStore.values").v, self.runtime)

    def scales(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """The scales of K and of V: of int8 each (batch_size, num_kv_heads, slots).

        Of groups each (batch_size, num_kv_heads, slots, n): a row's scales, each with its bias behind it if it has one.

        Raises:
            DTypeError: the store has none.
        """
        found = self._layer(layer, "KVCacheStore.scales")
        if found.k_scale is None or found.v_scale is None:
            raise DTypeError(
                f"KVCacheStore.scales: a {self.dtype.name} store has no scales; int8 and groups have. Use dtype='int8'."
            )
        return CacheArray(found.k_scale, self.runtime), CacheArray(found.v_scale, self.runtime)

    @whole
    def _picture(self) -> str:
        groups: dict[tuple[int, int, int, int, int], list[int]] = {}
        for layer in self._layers:
            state = (layer.slots, layer.sinks, layer.ring, layer.length, layer.valid_from)
            groups.setdefault(state, []).append(layer.index)
        rows = [
            draw.Slots(f"layer{'s' * (len(group) > 1)} {draw.ranges(group)}", slots, sinks, ring > 0, length, first)
            for (slots, sinks, ring, length, first), group in groups.items()
        ]
        return draw.slots(repr(self), rows)

    def __len__(self) -> int:
        """`length`; so an empty store is false: ask ``store is not None`` whether there is one."""
        return self.length

    @whole
    def __repr__(self) -> str:
        distinct = sorted({str(w) for w in self.windows if w is not None})
        kind = "linear" if not distinct else f"window {'/'.join(distinct)}"
        if distinct and any(w is None for w in self.windows):
            kind += " and linear"
        if self.sinks:
            kind += f", {self.sinks} sinks"
        batch = f" x batch {self.batch_size}" if self.batch_size > 1 else ""
        return (
            f"KVCacheStore({self.num_layers} layers{batch} x {self.num_kv_heads} heads x {self._memory.width}, "
            f"{self.dtype.name}, {kind}, {self.length}/{self.capacity} tokens, {size_in_words(self.nbytes)}, "
            f"{self.runtime.arch})"
        )
