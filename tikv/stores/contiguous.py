"""KVCacheStore: owns the keys and values of all layers, and knows how many tokens each layer holds.

Memory is head-major, (num_layers, batch, num_kv_heads, slots, head_dim), one block for K and one for V, split by layers
only where a block would be larger than a launch can address. On CPU the two lie in one piece of memory up to
`JOINT_BYTES`. A layer with a window is a ring behind its sinks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import (
    ALIGNMENT,
    ArrayView,
    CacheArray,
    Memory,
    Views,
    describe,
    new_array,
    read_host,
    to_device,
    view,
    view_all,
)
from tikv.dtypes import DType
from tikv.errors import CapacityError, DTypeError, OptionError, PositionError, ShapeError
from tikv.launch import Bound
from tikv.ops import checks, quantize
from tikv.ops.attention.plan import IMPLEMENTATIONS, Form, Question, contiguous_cache, form_key, real
from tikv.ops.row_copy import MAX_PLANS, End, Placement, Staging, bind_copy, entry_of, keep_plan, reduced_position
from tikv.stores import draw, files

# The largest block that a launch addresses.
BLOCK_BYTES = {"cpu": 2**33, "cuda": 2**33, "vulkan": 2**32 - 64, "metal": 2**32 - 64}
JOINT_BYTES = 2**31 - 64  # of K and V that are one array to a launch on CPU: it can address each of their bytes
SOURCES = {
    "float32": ("float32",),
    "float16": ("float32", "float16"),
    "bfloat16": ("float32", "bfloat16"),
    "float64": ("float64",),
    "int8": ("float32", "float16", "bfloat16"),
}  # what may be appended to a store of each dtype
_ROWS, _ROWS_AT = ("k", "v"), ("k", "v", "positions")  # names of what an append takes


def storage(dtype: Any, scale_dtype: Any, live: runtime.Runtime, operation: str) -> tuple[DType, DType | None]:
    """What a cache stores its rows in, and their scales where it is int8.

    Raises:
        DTypeError: it is not offered, or not on this arch.
    """
    stored, scales = dtypes.parse(dtype, operation), dtypes.parse(scale_dtype, operation)
    if stored.name not in SOURCES:
        raise DTypeError(f"{operation}: dtype {stored.name} is not stored. Use one of {', '.join(SOURCES)}.")
    if stored is dtypes.float64 and not live.has_float64:
        raise DTypeError(f"{operation}: {live.arch} has no float64. Use float32, or CPU or CUDA.")
    if scales not in quantize.SCALES:
        raise DTypeError(f"{operation}: scale_dtype {scales.name} is not offered. Use float16 or float32.")
    return stored, scales if stored is dtypes.int8 else None


def size_in_words(nbytes: int) -> str:
    """Bytes in the unit that shows them.

    Example:
        >>> size_in_words(512), size_in_words(2304), size_in_words(33554432)
        ('512 B', '2.3 kB', '33.6 MB')
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 100_000 else f"{nbytes / 1e6:.1f} MB"


class Layer:
    """One layer's slots and counts."""

    def __init__(self, index: int, capacity: int, window: int | None, sinks: int) -> None:
        self.index = index
        self.window = window
        self.sinks = sinks if window is not None else 0
        self.slots = capacity if window is None else window
        self.ring = 0 if window is None else window - self.sinks
        self.length = 0  # tokens appended since reset, less those trimmed
        self.valid_from = 0  # oldest position behind the sinks whose slot has not been overwritten
        self.k: ArrayView
        self.v: ArrayView
        self.k_scale: ArrayView | None = None
        self.v_scale: ArrayView | None = None

    @property
    def held(self) -> int:
        """Tokens that can be read: the sinks and what the ring still has."""
        fixed = min(self.length, self.sinks)
        return fixed + max(0, self.length - max(self.valid_from, self.sinks))

    @property
    def filled(self) -> int:
        """Slots that have ever been written, from slot 0."""
        return min(self.length, self.slots)

    @property
    def trimmed_to(self) -> int:
        """`valid_from` where trimming made it later than the ring alone does; else 0."""
        return self.valid_from if self.ring and self.valid_from > max(0, self.length - self.ring) else 0

    def arrays(self) -> dict[str, ArrayView]:
        """The layer's memory by name: k, v, and for int8 k_scale and v_scale."""
        named = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: a for name, a in named.items() if a is not None}

    def slot_of(self, position: int) -> int:
        """The slot of a position."""
        return reduced_position(position, self.sinks, self.ring)

    def grow(self, tokens: int) -> None:
        """Count that many more tokens."""
        self.length += tokens
        if self.ring and self.length - self.ring > self.valid_from:
            self.valid_from = self.length - self.ring


class AppendPlan:
    """A bound append: the launch, the layers it writes, the tokens it adds and how its position is counted."""

    __slots__ = (
        "alignments", "bound", "forms", "layers", "mixed", "near", "pointers", "put", "room", "sources", "table",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        bound: Bound,
        layers: list[Layer],
        tokens: int,
        mixed: bool,
        sources: Sequence[ArrayView],
        table: ArrayView | None,
    ) -> None:
        self.bound = bound
        self.layers = layers
        self.tokens = tokens
        self.mixed = mixed  # rings of different lengths: the position stays absolute
        self.put = bound.setter(len(bound.arguments) - 1)  # into the vector of placements
        self.sources = sources
        self.forms = [a.bare() for a in sources if a.handle is None]  # of K and V, without a hold on them
        self.alignments = [a.ptr % ALIGNMENT for a in self.forms]
        self.table = table  # kept alive for the launches
        self.room = min((layer.slots for layer in layers if not layer.ring), default=2**63)  # tokens that all can hold
        self.pointers: tuple[int, ...] | None = None  # of the arrays last bound, which have passed the checks
        first, last = layers[0], layers[-1]  # of one block; what the launch writes lies between two addresses, twice
        k_start, k_end, v_start, v_end = first.k.ptr, last.k.ptr + last.k.span, first.v.ptr, last.v.ptr + last.v.span
        # Between which addresses each of the forms would have to start to share memory with it.
        self.near = [(k_start - a.span, k_end, v_start - a.span, v_end) for a in self.forms]

    def is_aligned(self, pointers: Sequence[int]) -> bool:
        """Whether K and V at these addresses are aligned as those that were bound."""
        return [p % ALIGNMENT for p in pointers] == self.alignments

    def refuse_shared(self, operation: str, pointers: Sequence[int]) -> None:
        """K and V of the bound form at these addresses share no element with the layers.

        Raises:
            ShapeError: they do.
        """
        for p, (k_start, k_end, v_start, v_end) in zip(pointers, self.near, strict=True):
            if k_start < p < k_end or v_start < p < v_end:
                _refuse_shared(operation, self.layers, [a.at(q) for a, q in zip(self.forms, pointers, strict=True)])
                break

    def rebind(self, operation: str, pointers: tuple[int, ...], rows: Sequence[ArrayView] = ()) -> None:
        """Let the launch read K and V of the bound form elsewhere: at these addresses; or `rows`, which have none.

        Raises:
            ShapeError: they share memory with the layers.
        """
        if pointers[0]:
            self.refuse_shared(operation, pointers)
            self.bound.set_pointer(0, pointers[0])
            self.bound.set_pointer(2, pointers[1])
        else:
            self.bound.set_array(0, rows[0])
            self.bound.set_array(2, rows[1])
        self.pointers = pointers


def _refuse_shared(operation: str, layers: Sequence[Layer], rows: Sequence[ArrayView]) -> None:
    """New K and V share no element with what they are appended to."""
    for layer in layers:
        for output in (("the store's keys", layer.k, True), ("the store's values", layer.v, True)):
            for name, a in zip(_ROWS, rows, strict=True):
                checks.disjoint([(name, a, False), output], operation)


class Snapshot:
    """What `KVCacheStore.snapshot` keeps: counts and copies of the filled slots. Give it to `restore`."""

    def __init__(
        self,
        batch_size: int,
        windows: list[tuple[int | None, int]],
        layers: list[tuple[int, int, int, list[ArrayView]]],
        live: runtime.Runtime,
    ) -> None:
        self.batch_size = batch_size
        self.windows = windows  # and sinks, of each layer
        self.layers = layers
        self.runtime = live

    def __repr__(self) -> str:
        return f"Snapshot({len(self.layers)} layers, length {max(length for length, *_ in self.layers)})"


class KVCacheStore(draw.Drawn):
    """Keys and values of a model's layers, appended token by token or prompt by prompt.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and V.
        head_dim: width of a head of K, and of V unless ``head_dim_v`` says otherwise.
        capacity: tokens that a layer without a window holds.
        batch_size: sequences, all of one length.
        dtype: storage: float32, float16, bfloat16, float64, or int8 with a scale per token and head.
        window: None; or the slots of a sliding layer, sinks included, at most ``capacity``; or one of these for each
            layer.
        sinks: first tokens that a sliding layer keeps for ever.
        head_dim_v: width of a head of V.
        scale_dtype: of the int8 scales, float16 or float32.

    Attributes:
        num_layers, num_kv_heads, head_dim, head_dim_v, capacity, sinks, scale_dtype: as given.
        batch_size: sequences now; `select` and `repeat` change it.
        dtype: what keys and values are stored in.
        windows: of each layer, the slots of a sliding one or None.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument that is none.

    Exactness: rows keep their bits; a narrowing dtype rounds to nearest even; int8 is stated in `tikv.quantize`.
    Cost: an append is one launch, whatever the length; reading `length` never waits for the device. Layers lie in as
    few blocks of memory as a launch can address, nearly always one; `append_all` is one launch a block.

    Example:
        >>> import numpy as np, tikv
        >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, capacity=8, dtype="float32", window=4)
        >>> k = np.arange(6 * 8, dtype=np.float32).reshape(6, 2, 4)
        >>> store.append(0, k, k)
        >>> store.length, store.tokens(0)[0].shape
        (6, (1, 2, 4, 4))
        >>> bool((np.asarray(store.tokens(0)[0])[0] == k[2:].transpose(1, 0, 2)).all())
        True
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        batch_size: int = 1,
        dtype: Any = "float16",
        window: int | Sequence[int | None] | None = None,
        sinks: int = 0,
        head_dim_v: int | None = None,
        scale_dtype: Any = "float16",
    ) -> None:
        operation = "KVCacheStore"
        self.runtime = runtime.current()
        self.num_layers = checks.integer(num_layers, "num_layers", operation, low=1)
        self.num_kv_heads = checks.integer(num_kv_heads, "num_kv_heads", operation, low=1)
        self.head_dim = checks.integer(head_dim, "head_dim", operation, low=1)
        self.head_dim_v = (
            self.head_dim if head_dim_v is None else checks.integer(head_dim_v, "head_dim_v", operation, low=1)
        )
        self.capacity = checks.integer(capacity, "capacity", operation, low=1)
        self.batch_size = checks.integer(batch_size, "batch_size", operation, low=1)
        self.dtype, scales = storage(dtype, scale_dtype, self.runtime, operation)
        self.scale_dtype = scales or dtypes.parse(scale_dtype, operation)
        self.sinks = checks.integer(sinks, "sinks", operation)
        self.windows = self._windows(window, operation)
        self._layers = [Layer(i, self.capacity, w, self.sinks) for i, w in enumerate(self.windows)]
        self._appends: dict[Any, AppendPlan] = {}
        self._position = entry_of("dst_position")
        self.allocations = 0  # how often memory was made: what is bound to it knows by that when it is gone
        self._allocate()

    def _windows(self, window: Any, operation: str) -> list[int | None]:
        one_each = isinstance(window, Iterable) and getattr(window, "ndim", 1) != 0
        given = list(window) if one_each else [window] * self.num_layers
        if len(given) != self.num_layers:
            raise ShapeError(
                f"{operation}: window has {len(given)} entries for num_layers={self.num_layers}. Give one a layer."
            )
        found = [checks.window_of(w, self.capacity, operation) for w in given]
        if self.sinks and all(w is None for w in found):
            raise OptionError(f"{operation}: sinks={self.sinks} without a window. Give a window, or sinks=0.")
        for w in found:
            if w is not None and self.sinks >= w:
                raise CapacityError(
                    f"{operation}: sinks={self.sinks} leave no slot of window={w} to slide. Use sinks < {w}."
                )
        return found

    def _allocate(self) -> None:
        """Place all layers in as few blocks as a launch can address; nothing changes until all memory is there."""
        rows = [self.batch_size * self.num_kv_heads * layer.slots for layer in self._layers]
        widest = max(self.head_dim, self.head_dim_v) * self.dtype.itemsize
        limit = BLOCK_BYTES[self.runtime.arch]
        groups: list[list[Layer]] = [[]]
        for layer, count in zip(self._layers, rows, strict=True):
            if count * widest > limit:
                raise CapacityError(
                    f"KVCacheStore: layer {layer.index} needs {count * widest} bytes in one block "
                    f"(batch_size={self.batch_size} x num_kv_heads={self.num_kv_heads} x {layer.slots} slots); "
                    f"{self.runtime.arch} addresses {limit}. Use a smaller capacity, a window, or several stores."
                )
            if groups[-1] and sum(rows[x.index] for x in groups[-1]) * widest + count * widest > limit:
                groups.append([])
            groups[-1].append(layer)
        made = [self._memory_of(sum(rows[layer.index] for layer in group)) for group in groups]
        self.allocations += 1
        self._blocks: list[tuple[list[Layer], Memory, Memory, Memory | None, Memory | None]] = []
        for group, memory in zip(groups, made, strict=True):
            self._place(group, rows, *memory)

    def _memory_of(self, total: int) -> tuple[Memory, Memory, int, list[Memory | None]]:
        """Memory for so many rows of K and of V, where in its own V begins, and memory for the scales of both."""
        quantised = self.dtype is dtypes.int8
        k_bytes, v_bytes = (total * width * self.dtype.itemsize for width in (self.head_dim, self.head_dim_v))
        v_first = -(-k_bytes // ALIGNMENT) * ALIGNMENT
        if self.runtime.is_cpu and v_first + v_bytes <= JOINT_BYTES:
            k_block = v_block = Memory(v_first + v_bytes, self.runtime)
        else:
            k_block, v_block, v_first = Memory(k_bytes, self.runtime), Memory(v_bytes, self.runtime), 0
        scales = [Memory(total * self.scale_dtype.itemsize, self.runtime) if quantised else None for _ in range(2)]
        return k_block, v_block, v_first, scales

    def _place(
        self,
        group: list[Layer],
        rows: list[int],
        k_block: Memory,
        v_block: Memory,
        v_first: int,
        scales: list[Memory | None],
    ) -> None:
        first = 0
        for layer in group:
            shape = (self.batch_size, self.num_kv_heads, layer.slots)
            size = self.dtype.itemsize
            layer.k = k_block.array((*shape, self.head_dim), self.dtype, first * self.head_dim * size)
            layer.v = v_block.array((*shape, self.head_dim_v), self.dtype, v_first + first * self.head_dim_v * size)
            if scales[0] is not None:
                offset = first * self.scale_dtype.itemsize
                layer.k_scale, layer.v_scale = (
                    m.array(shape, self.scale_dtype, offset) for m in scales if m is not None
                )
            first += rows[layer.index]
        self._blocks.append((group, k_block, v_block, scales[0], scales[1]))

    @property
    def length(self) -> int:
        """Tokens appended since `reset`, less those trimmed; while a step is under way, that of the layers ahead."""
        return max(layer.length for layer in self._layers)

    @property
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
        arrays = [a for x in self._layers for a in (x.k, x.v, x.k_scale, x.v_scale) if a is not None]
        return sum(a.nbytes for a in arrays)

    def layer_length(self, layer: int) -> int:
        """Tokens appended to one layer since `reset`, less those trimmed."""
        return self._layer(layer, "KVCacheStore.layer_length").length

    def _layer(self, index: int, operation: str) -> Layer:
        runtime.require_alive(self.runtime, operation)
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
        """The int8 scales of K and of V, each (batch_size, num_kv_heads, slots).

        Raises:
            DTypeError: the store is not int8.
        """
        found = self._layer(layer, "KVCacheStore.scales")
        if found.k_scale is None or found.v_scale is None:
            raise DTypeError(
                f"KVCacheStore.scales: a {self.dtype.name} store has no scales; only int8 has. Use dtype='int8'."
            )
        return CacheArray(found.k_scale, self.runtime), CacheArray(found.v_scale, self.runtime)

    def append(self, layer: int, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """Append new tokens to one layer, in one launch.

        Args:
            layer: its index.
            k, v: (batch, T, H, D) token-major or (batch, H, T, D) head-major; without the batch axis when it is 1.
                V may be narrower or wider, as the store is. Of the store's dtype; float32 for a float16 or bfloat16
                store; float32, float16 or bfloat16 for int8.
            layout: "token_major" or "head_major".
            positions: (batch,) int32 or int64 where the launch reads them, in the end on the device: the absolute
                position of each sequence's first new token, instead of `length`. For launches that are captured and
                replayed, see `positions_on_device`: counts on the host stay as they are, and a token outside a layer
                without a window is skipped.

        Raises:
            CapacityError: a layer without a window would overflow. Nothing is written.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: the arrays or options do not fit the store.
            ArchError: a CUDA graph is being captured, without ``positions``.

        Exactness, cost: as the class says.
        """
        operation = "KVCacheStore.append"
        to = self._layer(layer, operation)
        if positions is not None:
            self._append_at(operation, [to], view_all((k, v, positions), _ROWS_AT, operation), layout, False)
            return
        rows = view_all((k, v), _ROWS, operation)
        key = (layer, rows.key, layout)
        plan = self._appends.get(key)
        if plan is None:
            self._append_checked(operation, [to], rows, layout, key)
        else:
            self._append_bound(operation, plan, rows)

    def append_all(self, k: Any, v: Any, *, layout: str = "token_major", positions: Any | None = None) -> None:
        """Append new tokens to all layers, in one launch, or one a block (see the class).

        Args:
            k, v: (num_layers, batch, T, H, D) token-major or (num_layers, batch, H, T, D) head-major; the batch axis
                may be left out when it is 1.
            layout: "token_major" or "head_major".
            positions: as in `append`, for all layers; one launch where the batch is 1 and all layers have one window.

        Raises:
            As `append`. Nothing is written to any layer.
        """
        operation = "KVCacheStore.append_all"
        self._layer(0, operation)
        if positions is not None:
            rows = view_all((k, v, positions), _ROWS_AT, operation)
            self._append_at(operation, self._layers, rows, layout, True)
            return
        rows = view_all((k, v), _ROWS, operation)
        key = ("all", rows.key, layout)
        plan = self._appends.get(key)
        if plan is None or not self._in_step(plan):
            self._append_checked(operation, self._layers, rows, layout, key)
        else:
            self._append_bound(operation, plan, rows)

    def _in_step(self, plan: AppendPlan) -> bool:
        """Whether one position serves all layers: they are equally long, and it fits 32 bits where it must."""
        lengths = [layer.length for layer in self._layers]
        if lengths.count(lengths[0]) < len(lengths):
            return False
        return not plan.mixed or lengths[0] + plan.tokens < 2**31

    def _append_bound(self, operation: str, plan: AppendPlan, rows: Views) -> None:
        bound, layers = plan.bound, plan.layers
        first = layers[0]
        length = first.length  # that of all these layers
        after = length + plan.tokens
        if after > plan.room:
            checks.fits_linear(length, plan.tokens, plan.room, operation)
        position = length
        if first.ring and not plan.mixed:
            position = reduced_position(length, first.sinks, first.ring)
        with bound.lock:
            if rows.pointers != plan.pointers:
                plan.rebind(operation, rows.pointers, rows)
            plan.put(self._position, position)
            bound.launch()
            if self.runtime.is_spirv:
                bound.release((0, 2))
                plan.pointers = None
        for layer in layers:  # `Layer.grow`, whose calls for many layers would take as long as the launch
            layer.length = after
            if layer.ring and after - layer.ring > layer.valid_from:
                layer.valid_from = after - layer.ring

    def positions_on_device(self) -> CacheArray:
        """(batch_size,) int32 on the device, all `length` now: positions that launches read and a graph can advance.

        Give them to `append` in a step that is captured, add the step's tokens to them there, and replay; then tell the
        store with `advance`. Take the array's ``torch()`` once, before the capture.

        Raises:
            PositionError: `length` does not fit int32.

        Example:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=8, dtype="float32")
            >>> positions = store.positions_on_device()
            >>> for _ in range(3):
            ...     store.append(0, *np.ones((2, 1, 1, 2), np.float32), positions=positions)
            ...     positions.numpy()[:] += 1
            >>> store.advance(3)
            >>> store.length
            3
        """
        operation = "KVCacheStore.positions_on_device"
        runtime.require_alive(self.runtime, operation)
        lens = self._lens(operation, "Append without positions, or reset().")
        return CacheArray(to_device(lens, self.runtime), self.runtime)

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` more in every layer: those that appends with ``positions`` have put behind `length`.

        Raises:
            CapacityError: a layer without a window has no room for them; they were skipped.
            PositionError: a negative number.

        Cost: none on the device.
        """
        operation = "KVCacheStore.advance"
        runtime.require_alive(self.runtime, operation)
        tokens = checks.integer(tokens, "tokens", operation)
        for layer in self._layers:
            if layer.ring == 0:
                checks.fits_linear(layer.length, tokens, layer.slots, f"{operation} (layer {layer.index})")
        for layer in self._layers:
            layer.grow(tokens)

    def begin_step(self, operation: str, layers: Sequence[int], tokens: int) -> list[int]:
        """Check that these layers, of one length, take so many tokens more; what each was trimmed to.

        Raises:
            CapacityError, PositionError: they do not.
        """
        chosen = [self._layers[i] for i in layers]
        length = chosen[0].length
        for layer in chosen:
            if layer.length != length:
                raise PositionError(
                    f"{operation}: layer {layer.index} has {layer.length} tokens and layer {chosen[0].index} has "
                    f"{length}. A step of several layers needs them equally long."
                )
        for layer in chosen:
            if layer.ring == 0:
                checks.fits_linear(length, tokens, layer.slots, f"{operation} (layer {layer.index})")
        return [layer.trimmed_to for layer in chosen]

    def end_step(self, layers: Sequence[int], tokens: int) -> None:
        """Count the tokens of a step that was launched."""
        for i in layers:
            self._layers[i].grow(tokens)

    def _append_at(
        self,
        operation: str,
        layers: list[Layer],
        given: Views,
        layout: str,
        stacked: bool,
    ) -> None:
        """Append at positions that the launch reads; the host's counts stay as they are."""
        key = ("at", layers[0].index, stacked, given.key, layout)
        plan = None if launch.is_recording() else self._appends.get(key)
        if plan is None:
            k, v, positions = given
            rows, token_axis, head_axis, tokens = self._checked_rows(operation, layers, k, v, layout, stacked)
            checks.on_device([("positions", positions)], self.runtime, operation)
            checks.indices(positions, "positions", operation)
            checks.rank(positions, (1,), "positions", "(batch,)", operation)
            detail = describe(positions)
            checks.extent(positions.shape[0], self.batch_size, "the length of positions", operation, detail)
            if tokens == 0:
                return
            if stacked and not self._one_launch_at:
                for layer in layers:
                    k_rows, v_rows = (a.moved(a.shape[1:], a.strides[1:], layer.index * a.strides[0]) for a in (k, v))
                    self._append_at(operation, [layer], Views([k_rows, v_rows, positions]), layout, False)
                return
            stage = Staging(self.runtime, [*rows, positions], [False] * 3)
            *sources, index = stage.arrays
            plan = self._bind_append(operation, layers, sources, token_axis, head_axis, tokens, False, index)
            if launch.is_recording() or (not self.runtime.is_cpu and "cpu" in (k.device, v.device, positions.device)):
                plan.bound.launch()
                return
            if len(self._appends) >= MAX_PLANS:
                self._appends.clear()
            self._appends[key] = plan
            plan.sources, plan.table = (), None
        bound = plan.bound
        with bound.lock:
            if given.pointers != plan.pointers:
                if given.pointers[0]:
                    plan.refuse_shared(operation, given.pointers[:2])
                for i, a in zip((0, 2, 4), given, strict=True):
                    bound.set_array(i, a)
                plan.pointers = given.pointers
            bound.launch()
            if self.runtime.is_spirv:
                bound.release((0, 2, 4))
                plan.pointers = None

    @property
    def _one_launch_at(self) -> bool:
        """Whether one launch appends to all layers at positions it reads: one block, one sequence, one window."""
        return self.batch_size == 1 and len(self._blocks) == 1 and len({(x.slots, x.ring) for x in self._layers}) == 1

    def _append_checked(self, operation: str, layers: list[Layer], given: Views, layout: str, key: Any) -> None:
        """Check new arrays against the store, then append to `layers`, keeping the bound launch for the next time."""
        k, v = given
        stacked = operation.endswith("append_all")
        rows, token_axis, head_axis, tokens = self._checked_rows(operation, layers, k, v, layout, stacked)
        for layer in layers:
            if layer.ring == 0:
                checks.fits_linear(layer.length, tokens, layer.slots, f"{operation} (layer {layer.index})")
            checks.integer(layer.length + tokens, "length", operation)
        if tokens == 0:
            return
        launch.refuse_baked(self.runtime, operation)
        one_position = len({layer.length for layer in layers}) == 1
        whole = len(layers) > 1 and one_position
        mixed = whole and len({(layer.slots, layer.ring) for layer in layers}) > 1
        if whole and mixed and layers[0].length + tokens >= 2**31:
            whole = mixed = False  # one 32-bit position cannot serve rings of different lengths any more
        parts = [group for group, *_ in self._blocks] if whole else [[layer] for layer in layers]
        plans = []
        for part in parts:
            at = part[0].index if stacked else 0
            sources = [a.moved((len(part), *a.shape[1:]), a.strides, at * a.strides[0]) for a in rows]
            stage = Staging(self.runtime, sources, [False, False])
            plans.append(self._bind_append(operation, part, stage.arrays, token_axis, head_axis, tokens, mixed))
        for plan in plans:
            self._append_bound(operation, plan, Views(plan.sources))
            plan.sources = ()
        staged = not self.runtime.is_cpu and "cpu" in (k.device, v.device)
        if len(plans) == 1 and (whole or len(layers) == 1) and not staged:
            if len(self._appends) >= MAX_PLANS:
                self._appends.clear()
            self._appends[key] = plans[0]

    def _checked_rows(
        self, operation: str, layers: list[Layer], k: ArrayView, v: ArrayView, layout: str, stacked: bool
    ) -> tuple[list[ArrayView], int, int, int]:
        """Check new arrays against the store: (layers, batch, ., ., width) each, axes of tokens and heads, tokens."""
        token_axis, head_axis = (
            (1, 2) if checks.option(layout, "layout", operation, checks.LAYOUTS) == "token_major" else (2, 1)
        )
        named = (("k", k), ("v", v))
        checks.on_device(named, self.runtime, operation)
        checks.same_dtype(k, v, "k", "v", operation)
        if k.dtype.name not in SOURCES[self.dtype.name]:
            raise DTypeError(
                f"{operation}: cannot append {k.dtype.name} to a {self.dtype.name} store (k: {describe(k)}). Append "
                f"{' or '.join(SOURCES[self.dtype.name])}."
            )
        rows = []
        for name, a in named:
            checks.readable(a, name, operation)
            rows.append(self._rows(operation, name, a, token_axis, stacked))
        tokens = rows[0].shape[1 + token_axis]
        widths = (self.head_dim, self.head_dim_v)
        for (name, given), a, width in zip(named, rows, widths, strict=True):
            detail = f"{name}: {describe(given)}, {layout}"
            checks.extent(a.shape[0], len(layers), f"the number of layers of {name}", operation, detail)
            checks.extent(a.shape[1], self.batch_size, f"the batch of {name}", operation, detail)
            checks.extent(
                a.shape[1 + head_axis], self.num_kv_heads, f"the number of heads of {name}", operation, detail
            )
            checks.extent(a.shape[4], width, f"the head width of {name}", operation, detail)
            checks.extent(
                a.shape[1 + token_axis], tokens, f"the number of tokens of {name}", operation, f"k: {describe(k)}"
            )
        _refuse_shared(operation, layers, (k, v))
        return rows, token_axis, head_axis, tokens

    def _rows(self, operation: str, name: str, a: ArrayView, token_axis: int, stacked: bool) -> ArrayView:
        """The array as (layers, batch, ., ., width), whichever of the leading axes it came without."""
        full = 5 if stacked else 4
        if a.ndim == full - 1 and self.batch_size == 1:
            at = 1 if stacked else 0
            a = a.moved((*a.shape[:at], 1, *a.shape[at:]), (*a.strides[:at], 0, *a.strides[at:]))
        axes = "T, H, D" if token_axis == 1 else "H, T, D"
        lead = "num_layers, batch" if stacked else "batch"
        checks.rank(
            a,
            (full,),
            name,
            f"({lead}, {axes})" + (", or without the batch" if self.batch_size == 1 else ""),
            operation,
        )
        return a if stacked else a.moved((1, *a.shape), (0, *a.strides))

    def _bind_append(
        self,
        operation: str,
        part: list[Layer],
        sources: list[ArrayView],
        token_axis: int,
        head_axis: int,
        tokens: int,
        mixed: bool,
        positions: ArrayView | None = None,
    ) -> AppendPlan:
        first = part[0]
        batch, many = self.batch_size, len(part)
        if many > 1 and batch > 1 and any(a.strides[0] != batch * a.strides[1] for a in sources):
            raise ShapeError(
                f"{operation}: layers and batch of a stacked source must lie evenly "
                f"({[describe(a) for a in sources]}). Pass a copy."
            )
        group_axis = 0 if batch == 1 else 1
        src = [
            End(a, group=a.strides[group_axis], step=a.strides[1 + token_axis], head=a.strides[1 + head_axis])
            for a in sources
        ]
        index = None
        which: dict[str, Any] = {}
        place = Placement("ring" if first.ring else "linear")
        if positions is not None:
            place = Placement("ragged")
            index = positions
        if mixed:
            place = Placement("layers")
            index = self._layer_table(part)
            dst = [End(a, step=a.shape[3]) for a in (first.k, first.v)]
        else:
            slots = first.slots
            ends = [(first.k, 0), (first.v, 0)]
            if first.k.owner is first.v.owner:  # one array to the launch
                size, last = self.dtype.itemsize, part[-1].v
                both = first.k.moved(((last.ptr + last.span - first.k.ptr) // size,), (1,))
                ends = [(both, 0), (both, (first.v.ptr - first.k.ptr) // size)]
            dst = [
                End(a, group=self.num_kv_heads * slots * n, step=n, head=slots * n, first=start)
                for (a, start), n in zip(ends, (self.head_dim, self.head_dim_v), strict=True)
            ]
            which = {"dst_limit": slots, "index_group": int(batch > 1)} if positions is not None else {}
            which |= {
                "sinks": first.sinks,
                "ring": first.ring,
                "keep": max(0, tokens - first.ring) if first.ring else 0,
            }
        scales: list[ArrayView] = []
        if first.k_scale is not None and first.v_scale is not None:
            scales = [first.k_scale, first.v_scale]
            which["scale_step"] = 1
            if not mixed:
                which["scale_group"], which["scale_head"] = self.num_kv_heads * first.slots, first.slots
        bound = bind_copy(
            self.runtime,
            operation,
            src=src,
            dst=dst,
            widths=(self.head_dim, self.head_dim_v),
            heads=self.num_kv_heads,
            tokens=tokens,
            groups=many * batch,
            dst_place=place,
            index=index,
            scales=scales,
            scale=self.scale_dtype if scales else None,
            **which,
        )
        return AppendPlan(bound, part, tokens, mixed, sources, index)

    def _layer_table(self, part: list[Layer]) -> ArrayView:
        """(layers * batch, 4) int32 on the device: first row, rows of a head, sinks and ring of each."""
        table = np.empty((len(part), self.batch_size, 4), np.int32)
        row = 0
        for i, layer in enumerate(part):
            for b in range(self.batch_size):
                table[i, b] = (row, layer.slots, layer.sinks, layer.ring)
                row += self.num_kv_heads * layer.slots
        return to_device(table.reshape(-1), self.runtime)

    def tokens(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """What a layer holds, in temporal order, as a copy: K (batch, H, n, D) and V (batch, H, n, D_v).

        ``n`` is `length`, or for a sliding layer its sinks and the newest tokens behind them. int8 comes as float32.

        Cost: one launch, each row read and written once.
        """
        operation = "KVCacheStore.tokens"
        found = self._layer(layer, operation)
        out_dtype = dtypes.float32 if self.dtype is dtypes.int8 else self.dtype
        shape = (self.batch_size, self.num_kv_heads, found.held)
        out = [new_array((*shape, width), out_dtype, self.runtime) for width in (self.head_dim, self.head_dim_v)]
        fixed = min(found.length, found.sinks)
        self._gather(operation, found, out, tokens=fixed, position=0, at=0)
        start = max(found.valid_from, found.sinks)
        self._gather(operation, found, out, tokens=found.held - fixed, position=start, at=fixed)
        return CacheArray(out[0], self.runtime), CacheArray(out[1], self.runtime)

    def attend(
        self,
        layer: int,
        q: Any,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        impl: str = "auto",
        softcap: float | None = None,
        out: Any = None,
        seq_lens: Any = None,
    ) -> Any:
        """Attention of the newest tokens' queries over what a layer holds, read in place: `tikv.decode_attention`.

        Append the tokens first. Of several queries in a sliding layer, earlier ones miss what later tokens overwrote.

        Args:
            layer: its index.
            q: (batch, Hq, D) or (batch, Hq, T, D), float32, float16 or bfloat16; num_kv_heads divides Hq.
            scale, return_lse, impl, softcap, out: as in `tikv.decode_attention`.
            seq_lens: (batch,) int32 or int64 where the launch reads them, in the end on the device: tokens of each
                sequence, instead of `length`; what goes with `append` at ``positions``.

        Returns:
            As `tikv.decode_attention`.

        Raises:
            PositionError: more queries than tokens.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: as `tikv.decode_attention`.

        Example:
            >>> import numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=4, dtype="float32")
            >>> store.append(0, np.zeros((3, 1, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 1, 2))
            >>> store.attend(0, np.ones((1, 2, 2), np.float32)).tolist()
            [[[2.0, 3.0], [2.0, 3.0]]]
        """
        operation = "KVCacheStore.attend"
        found = self._layer(layer, operation)
        arrays = {"q": view(q, "q", operation), "k": found.k, "v": found.v}
        if found.k_scale is not None and found.v_scale is not None:
            arrays["k_scale"], arrays["v_scale"] = found.k_scale, found.v_scale
        length, oldest = found.length, found.valid_from
        if seq_lens is not None:
            arrays["lens"] = lens = view(seq_lens, "seq_lens", operation)
            checks.on_device([("seq_lens", lens)], self.runtime, operation)
            length, oldest = 0, found.trimmed_to
        scale, softcap = real(scale, "scale", operation), real(softcap, "softcap", operation)
        options = (scale, softcap, found.window, found.sinks)
        key = form_key(operation, arrays, options)
        form = self.runtime.plans.get(key)
        if form is None:
            question = Question(scale, True, found.ring or None, softcap, None, False)
            scales = tuple(arrays[n] for n in ("k_scale", "v_scale") if n in arrays)
            cache = contiguous_cache(found.k, found.v, scales, sinks=found.sinks, ring=found.ring)
            form = Form(self.runtime, operation, arrays, cache, self.batch_size, question)
            keep_plan(self.runtime, key, form)
        checks.option(impl, "impl", operation, IMPLEMENTATIONS)
        return form.attend(q, arrays, out, return_lse, impl, length, oldest)

    def _gather(
        self, operation: str, layer: Layer, out: list[ArrayView], *, tokens: int, position: int, at: int
    ) -> None:
        """Copy the rows of consecutive positions into `out`, from its token `at` on."""
        if tokens <= 0:
            return
        which: dict[str, Any] = {
            "src_position": reduced_position(position, layer.sinks, layer.ring),
            "sinks": layer.sinks,
            "ring": layer.ring,
        }
        scales = [a for a in (layer.k_scale, layer.v_scale) if a is not None]
        if scales:
            which.update(scale_group=self.num_kv_heads * layer.slots, scale_head=layer.slots, scale_step=1)
        bind_copy(
            self.runtime,
            operation,
            src=[_rows_of(a) for a in (layer.k, layer.v)],
            dst=[_rows_of(a, at) for a in out],
            widths=(self.head_dim, self.head_dim_v),
            heads=self.num_kv_heads,
            tokens=tokens,
            groups=self.batch_size,
            src_place=Placement("ring" if layer.ring else "linear"),
            scales=scales,
            scale=self.scale_dtype if scales else None,
            **which,
        ).launch()

    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens of every layer.

        A ring that has wrapped gives back as many tokens as it still holds; the older ones are overwritten and do not
        return, so afterwards it holds fewer than its window until it is filled again.

        Raises:
            PositionError: more than `length`, or further back than a ring still holds. Nothing is changed.

        Cost: none on the device.
        """
        operation = "KVCacheStore.trim"
        runtime.require_alive(self.runtime, operation)
        n = checks.integer(n, "n", operation)
        if n > self.length:
            raise PositionError(
                f"{operation}: cannot drop {n} tokens of length={self.length}. Drop at most {self.length}, or reset()."
            )
        target = self.length - n
        for layer in self._layers:
            if layer.sinks < target < layer.valid_from:
                raise PositionError(
                    f"{operation}: cannot drop {n} tokens after the window has wrapped (layer {layer.index}: "
                    f"length={layer.length}, window={layer.window}, sinks={layer.sinks}): positions before "
                    f"{layer.valid_from} are overwritten. Drop at most {self.length - layer.valid_from}, or reset()."
                )
        for layer in self._layers:
            if layer.length > target:
                layer.length = target
                layer.valid_from = min(layer.valid_from, target)

    def reset(self) -> None:
        """Forget all tokens. The memory stays, with what was in it."""
        runtime.require_alive(self.runtime, "KVCacheStore.reset")
        for layer in self._layers:
            layer.length = layer.valid_from = 0

    def reorder(self, index: Any) -> None:
        """Let sequence ``b`` continue from what sequence ``index[b]`` holds, for every ``b`` (beam search). In place.

        Args:
            index: (batch_size,) integers in [0, batch_size).

        Raises:
            ShapeError, PositionError: the index has another length or leaves the batch.

        Cost: the filled slots of the sequences that change, read and written twice.
        """
        operation = "KVCacheStore.reorder"
        chosen = self._batch_index(index, operation)
        if len(chosen) != self.batch_size:
            raise ShapeError(
                f"{operation}: index has {len(chosen)} entries for batch_size={self.batch_size}. "
                f"Use select() to change it."
            )
        if (chosen != np.arange(self.batch_size)).any():
            self._put(self._take(chosen))

    def select(self, index: Any) -> None:
        """Keep these sequences, in this order; the batch becomes as long as the index.

        Args:
            index: integers in [0, batch_size).

        Raises:
            ShapeError, PositionError: the index is empty or leaves the batch.
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.

        Cost: the filled slots kept, read and written twice; memory is allocated anew, and arrays handed out before keep
        the old.
        """
        self._resize(self._batch_index(index, "KVCacheStore.select"))

    def repeat(self, n: int) -> None:
        """Repeat every sequence ``n`` times: 0, 0, 1, 1 for ``n=2``. The batch grows ``n`` times.

        Raises:
            PositionError: ``n`` is less than one.
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.

        Cost: as `select`.
        """
        n = checks.integer(n, "n", "KVCacheStore.repeat", low=1)
        runtime.require_alive(self.runtime, "KVCacheStore.repeat")
        self._resize(np.repeat(np.arange(self.batch_size), n))

    def _batch_index(self, index: Any, operation: str) -> np.ndarray[Any, Any]:
        runtime.require_alive(self.runtime, operation)
        try:
            host = np.asarray(index.tolist() if hasattr(index, "tolist") else index)
        except ValueError:  # lists of different lengths
            host = np.empty(0)
        if host.ndim != 1 or host.size == 0 or host.dtype.kind not in "iu":
            raise ShapeError(f"{operation}: index must be a list of at least one integer, not {index!r}.")
        wrong = host[(host < 0) | (host >= self.batch_size)]
        if wrong.size:
            raise PositionError(
                f"{operation}: index {int(wrong[0])} is outside 0..{self.batch_size - 1}, the sequences of this batch."
            )
        return host.astype(np.int32)

    def _resize(self, chosen: np.ndarray[Any, Any]) -> None:
        taken = self._take(chosen)
        self._rebatch(len(chosen))
        self._put(taken)

    def _rebatch(self, batch_size: int) -> None:
        """Allocate anew for another batch, or stay as it was."""
        before, self.batch_size = self.batch_size, batch_size
        try:
            self._allocate()
        except BaseException:
            self.batch_size = before
            raise
        self._appends.clear()

    def _take(self, chosen: np.ndarray[Any, Any]) -> list[list[ArrayView]]:
        """Copies of every layer's filled slots, of the chosen sequences."""
        index = to_device(chosen, self.runtime)
        taken = []
        for layer in self._layers:
            arrays = [a for a in (layer.k, layer.v, layer.k_scale, layer.v_scale) if a is not None]
            found = []
            for a in arrays:
                shape = (len(chosen), self.num_kv_heads, layer.filled, *a.shape[3:])
                to = new_array(shape, a.dtype, self.runtime)
                self._move_slots(a, to, layer.filled, len(chosen), index)
                found.append(to)
            taken.append(found)
        return taken

    def _put(self, taken: list[list[ArrayView]]) -> None:
        """Write what `_take` copied into the slots it came from, for the batch as it is now."""
        for layer, arrays in zip(self._layers, taken, strict=True):
            to = [a for a in (layer.k, layer.v, layer.k_scale, layer.v_scale) if a is not None]
            for a, b in zip(arrays, to, strict=True):
                self._move_slots(a, b, layer.filled, self.batch_size, None)

    def _move_slots(self, src: ArrayView, dst: ArrayView, slots: int, groups: int, index: ArrayView | None) -> None:
        if slots == 0:
            return
        width = src.shape[3] if src.ndim == 4 else 1
        which: dict[str, Any] = {"index_group": 1} if index is not None else {}
        bind_copy(
            self.runtime,
            "KVCacheStore",
            src=[_rows_of(src)],
            dst=[_rows_of(dst)],
            widths=[width],
            heads=self.num_kv_heads,
            tokens=slots,
            groups=groups,
            src_place=Placement("group" if index is not None else "linear"),
            index=index,
            **which,
        ).launch()

    def snapshot(self) -> Snapshot:
        """Copy what the store holds, to return to it with `restore`; on the device, filled slots only."""
        runtime.require_alive(self.runtime, "KVCacheStore.snapshot")
        taken = self._take(np.arange(self.batch_size, dtype=np.int32))
        counts = [(layer.length, layer.valid_from, layer.filled) for layer in self._layers]
        windows = [(layer.window, layer.sinks) for layer in self._layers]
        layers = [(*c, arrays) for c, arrays in zip(counts, taken, strict=True)]
        return Snapshot(self.batch_size, windows, layers, self.runtime)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this store: lengths and contents, whatever was appended or trimmed since.

        Raises:
            OptionError, ShapeError: it is no snapshot, or one of a store of another form.
            CapacityError: a layer of its batch would be larger than a launch can address. Nothing is changed.
            StaleRuntimeError: the runtime of one of them is gone.
        """
        operation = "KVCacheStore.restore"
        if not isinstance(snapshot, Snapshot):
            raise OptionError(f"{operation}: {snapshot!r} is no snapshot. Give what `snapshot` returned.")
        for live in (self.runtime, snapshot.runtime):
            runtime.require_alive(live, operation)
        ours = [[(a.shape[1:2] + a.shape[3:], a.dtype) for a in x.arrays().values()] for x in self._layers]
        theirs = [[(a.shape[1:2] + a.shape[3:], a.dtype) for a in arrays] for *_, arrays in snapshot.layers]
        too_long = any(filled > x.slots for x, (_, _, filled, _) in zip(self._layers, snapshot.layers, strict=False))
        windows = [(layer.window, layer.sinks) for layer in self._layers]
        if ours != theirs or windows != snapshot.windows or too_long:
            raise ShapeError(
                f"{operation}: {snapshot!r} is not of this store ({self!r}). "
                f"Restore it into the store it was taken from."
            )
        if snapshot.batch_size != self.batch_size:
            self._rebatch(snapshot.batch_size)
        for layer, (length, valid_from, _, _) in zip(self._layers, snapshot.layers, strict=True):
            layer.length, layer.valid_from = length, valid_from
        self._put([arrays for *_, arrays in snapshot.layers])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the filled slots and all counts to a .safetensors file: written beside it, synced, then renamed.

        Args:
            path: ends in ``.safetensors``; a file of that name is replaced in one step.

        Raises:
            CacheFileError: another ending, or the system refuses. An old file stays as it was.

        Exactness: every bit. Cost: the filled slots, once to the host and once to the disk.

        Example:
            >>> import tempfile, numpy as np, tikv
            >>> store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, capacity=4, dtype="bfloat16")
            >>> store.append(0, np.ones((3, 1, 2), np.float32), np.zeros((3, 1, 2), np.float32))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     store.save(f"{folder}/cache.safetensors")
            ...     tikv.KVCacheStore.load(f"{folder}/cache.safetensors").length
            3
        """
        operation = "KVCacheStore.save"
        runtime.require_alive(self.runtime, operation)
        files.target_of(path, operation)
        tensors = {
            f"layers.{layer.index}.{name}": a
            for layer, arrays in self.export_layers()
            for name, a in zip(("k", "v", "k_scale", "v_scale"), arrays, strict=False)
        }
        form = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "capacity": self.capacity,
            "batch_size": self.batch_size,
            "dtype": self.dtype.name,
            "window": self.windows,
            "sinks": self.sinks,
            "scale_dtype": self.scale_dtype.name,
        }
        counts = [[layer.length, layer.valid_from] for layer in self._layers]
        files.write(path, "KVCacheStore", tensors, {"form": form, "counts": counts}, operation)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> KVCacheStore:
        """A new store with the form, counts and contents of a saved one, on the arch that runs now.

        Raises:
            CacheFileError: the file is missing, truncated, damaged, or not one that `save` wrote.
            CapacityError, DTypeError: this arch cannot hold it.
        """
        operation = "KVCacheStore.load"
        tensors, facts = files.read(path, "KVCacheStore", operation)
        with files.understanding(path, operation):
            store = cls(**facts["form"])
            arrays = [[tensors[f"layers.{layer.index}.{name}"] for name in layer.arrays()] for layer in store._layers]
            store.import_layers(facts["counts"], arrays, operation)
        return store

    def export_layers(self) -> list[tuple[Layer, list[np.ndarray[Any, Any]]]]:
        """Each layer's counts and host copies of its filled slots: K, V, and the scales of int8."""
        taken = self._take(np.arange(self.batch_size, dtype=np.int32))
        return [
            (layer, [read_host(a, self.runtime) for a in arrays])
            for layer, arrays in zip(self._layers, taken, strict=True)
        ]

    def import_layers(
        self, counts: Sequence[Sequence[int]], arrays: Sequence[Sequence[np.ndarray[Any, Any]]], operation: str
    ) -> None:
        """Take over what `export_layers` gave: (length, oldest valid position) and filled slots of each layer.

        Raises:
            ShapeError: an array is not of this store's form. Nothing is changed.
        """
        before = [(layer.length, layer.valid_from) for layer in self._layers]
        try:
            for layer, (length, valid_from), found in zip(self._layers, counts, arrays, strict=True):
                layer.length, layer.valid_from = int(length), int(valid_from)
                for (name, mine), given in zip(layer.arrays().items(), found, strict=True):
                    wanted = (*mine.shape[:2], layer.filled, *mine.shape[3:])
                    if given.shape != wanted or given.dtype != mine.dtype.numpy or layer.length > 2**62:
                        raise ShapeError(
                            f"{operation}: {name} of layer {layer.index} is {given.dtype} {given.shape} where "
                            f"{mine.dtype.name} {wanted} is needed."
                        )
                if layer.ring == 0 and layer.length > layer.slots:
                    raise ShapeError(
                        f"{operation}: layer {layer.index} has {layer.length} tokens in {layer.slots} slots."
                    )
                if not 0 <= layer.valid_from <= layer.length or layer.held > layer.slots:
                    raise ShapeError(
                        f"{operation}: layer {layer.index} has {layer.length} tokens in {layer.slots} slots, the "
                        f"oldest is {layer.valid_from}."
                    )
        except (ShapeError, TypeError, ValueError):
            for layer, (length, valid_from) in zip(self._layers, before, strict=True):
                layer.length, layer.valid_from = length, valid_from
            raise
        self._put([[to_device(np.ascontiguousarray(a), self.runtime) for a in found] for found in arrays])

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

    def __repr__(self) -> str:
        distinct = sorted({str(w) for w in self.windows if w is not None})
        kind = "linear" if not distinct else f"window {'/'.join(distinct)}"
        if distinct and any(w is None for w in self.windows):
            kind += " and linear"
        if self.sinks:
            kind += f", {self.sinks} sinks"
        width = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}|{self.head_dim_v}"
        batch = f" x batch {self.batch_size}" if self.batch_size > 1 else ""
        return (
            f"KVCacheStore({self.num_layers} layers{batch} x {self.num_kv_heads} heads x {width}, {self.dtype.name}, "
            f"{kind}, {self.length}/{self.capacity} tokens, {size_in_words(self.nbytes)}, {self.runtime.arch})"
        )


def _rows_of(a: ArrayView, first_token: int = 0) -> End:
    """A (batch, heads, slots[, width]) array as one end of a copy."""
    return End(a, group=a.strides[0], head=a.strides[1], step=a.strides[2], first=first_token * a.strides[2])
