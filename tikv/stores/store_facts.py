"""What a contiguous store is and holds: its counts, its memory where it lies, and its picture."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import CacheArray, as_numpy, describe, read_host, view
from tikv.dtypes import DType
from tikv.errors import DTypeError, PositionError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.stores import draw
from tikv.stores.kept import held_rows, lengths_of, most_held
from tikv.stores.layer import Layer, LayerMemory
from tikv.stores.storage import Divisors, counted, size_in_words
from tikv.stores.whole import StoreLock, whole


class StoreFacts(draw.Drawn):
    """The part of `KVCacheStore` that only looks."""

    runtime: runtime.Runtime
    lock: StoreLock
    num_layers: int
    num_kv_heads: int
    capacity: int
    dtype: DType | GroupFormat
    v_dtype: DType | GroupFormat
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
    def divisors(self) -> Divisors:
        """What rows of K and of V are divided by: (1,) or (num_kv_heads,) numbers each, or None."""
        return self._memory.divisors

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

    def scales(self, layer: int) -> tuple[CacheArray | None, CacheArray | None]:
        """The scales of K and of V, None where one of the two has none: of int8 each (batch_size, num_kv_heads, slots).

        Of groups each (batch_size, num_kv_heads, slots, n): a row's scales, each with its bias behind it if it has one.
        Where K and V have rows of different numbers of them, n is the larger, also of int8, and the first are in use.
        Of 8-bit floats (1,) or (num_kv_heads,), what the store was given.

        Raises:
            DTypeError: the store has none.
        """
        found = self._layer(layer, "KVCacheStore.scales").read_scales
        if found == (None, None):
            raise DTypeError(
                f"KVCacheStore.scales: a {self._memory.kept_as} store has no scales; int8 and groups have. Use "
                f"dtype='int8'."
            )
        k, v = (None if a is None else CacheArray(a, self.runtime) for a in found)
        return k, v

    def draw(self, path: str | os.PathLike[str] | None = None, *, mass: Any = None) -> str:
        """Draw which position lies in which slot; a notebook shows a store so.

        A wheel for each ring, a strip for each layer without a window, one drawing for all layers in the same state.
        Where `compact` left holes the positions are the true ones, and heads that keep different tokens are drawn one
        by one, those of the first sequence.

        Args:
            path: ends in ``.svg``; None writes no file.
            mass: the attention mass (batch, H, held) of each layer by its index, or of layer 0 alone, as `attend` gives
                it: tokens are coloured by it, the most of a head the darkest.

        Returns:
            The SVG text, as `tikv.PagedKVCacheStore.draw` gives it.

        Raises:
            OptionError, CacheFileError: another ending, or the system refuses.
            ShapeError: the mass is of another number of tokens than the layer holds.

        Cost: none on the device, but for reading the mass.
        """
        by_layer = mass if isinstance(mass, dict) else {} if mass is None else {0: mass}
        with self.lock:
            return self._write(self._drawing({i: self._mass_of(i, a) for i, a in by_layer.items()}), path)

    def _mass_of(self, layer: int, mass: Any) -> np.ndarray[Any, Any]:
        """The mass of a layer on the host, (batch, H, held).

        Raises:
            ShapeError: it has another shape.
        """
        operation = "KVCacheStore.draw"
        found = self._layer(layer, operation)
        array = view(mass, "mass", operation)
        wanted = (self.batch_size, self.num_kv_heads, most_held(found))
        if array.shape != wanted:
            raise ShapeError(f"{operation}: mass is {describe(array)} where (batch, H, held) = {wanted} is needed.")
        return as_numpy(array) if array.device == "cpu" else read_host(array, self.runtime)

    @whole
    def _picture(self) -> str:
        return self._drawing({})

    def _drawing(self, mass: dict[int, np.ndarray[Any, Any]]) -> str:
        groups: dict[tuple[Any, ...], list[int]] = {}
        for layer in self._layers:
            for state in self._states_of(layer, mass.get(layer.index)):
                groups.setdefault(state, []).append(layer.index)
        rows = [
            draw.Slots(f"layer{'s' * (len(group) > 1)} {draw.ranges(group)}{head}", *state)
            for (head, *state), group in groups.items()
        ]
        return draw.slots(repr(self), rows)

    def _states_of(self, layer: Layer, mass: np.ndarray[Any, Any] | None) -> list[tuple[Any, ...]]:
        """What is drawn of a layer: which head, and what `draw.Slots` has behind its name."""
        form = (layer.slots, layer.sinks, layer.ring > 0)
        if layer.kept is None and mass is None:
            return [("", *form, layer.length, layer.valid_from)]
        held, lens, heads = held_rows(layer), lengths_of(layer), self.num_kv_heads
        slots, positions = (np.broadcast_to(a[0], (heads, a.shape[2])) for a in (held.slots, held.positions))
        alike = mass is None and (slots == slots[0]).all() and (positions == positions[0]).all()
        found = []
        for h in range(1 if alike else heads):
            there = slots[h] >= 0
            true, weights = np.full(layer.slots, -1), np.zeros(layer.slots)
            true[slots[h][there]] = positions[h][there]
            if mass is not None:
                weights[slots[h][there]] = mass[0, h][there] / max(float(mass[0, h].max(initial=0)), 1e-30)
            length = int(np.broadcast_to(lens[0], heads)[h])
            shown = tuple(weights.tolist()) if mass is not None else ()
            name = "" if alike else f", head {h}"
            found.append((name, *form, length, layer.valid_from, tuple(true.tolist()), shown))
        return found

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
            kind += f", {counted(self.sinks, 'sink')}"
        batch = f" x batch {self.batch_size}" if self.batch_size > 1 else ""
        tokens = f"{self.length}/{counted(self.capacity, 'token')}"
        if any(layer.kept is not None for layer in self._counts):
            most = max(most_held(layer) for layer in self._counts)
            tokens = f"{counted(self.length, 'token')}, up to {most}/{self.capacity} held"
        return (
            f"KVCacheStore({counted(self.num_layers, 'layer')}{batch} x {counted(self.num_kv_heads, 'head')} x "
            f"{self._memory.width}, {self._memory.kept_as}, {kind}, {tokens}, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )
