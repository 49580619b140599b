"""The memory of contiguous layers, which are adjacent in it: allocating, copying and reading it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import runtime
from tikv.arrays import (
    ALIGNMENT,
    Array,
    ArrayView,
    CacheArray,
    Host,
    Memory,
    as_numpy,
    memory_of_host,
    new_array,
    read_host,
    to_device,
)
from tikv.dtypes import DType
from tikv.errors import CapacityError, PositionError, ShapeError
from tikv.ops.compact import bind_in_place
from tikv.ops.layouts import LINEAR, Placement, Rows
from tikv.ops.plan import Launch
from tikv.ops.row_copy import bind_copies
from tikv.runtime.cache import BoundedCache
from tikv.stores.history import History
from tikv.stores.layers.counts import HeadLengths, Layer
from tikv.stores.layers.shared_launches import SharedLaunches, can_be_shared
from tikv.stores.limits import BLOCK_BYTES, FORMS_OF_LAYER, require_memory, shared_bytes
from tikv.stores.locking import StoreLock
from tikv.stores.row_format import Divisor, RowFormats

JOINT_BYTES = 2**31 - 64  # the most bytes that a launch on CPU can address in one array of K and V together


ArrayPlace = tuple[int, tuple[int, ...], DType, int]  # the piece of memory, the shape, the dtype and the first byte


class Arrangement(NamedTuple):
    """How memory is shared out among layers, which depends only on their sizes.

    Attributes:
        nbytes: bytes of keys, values and scales.
        blocks: the number of the first layer of each block, and of the one after its last.
        pieces: the bytes of each piece of memory.
        arrays: for each layer, where K, V, and the scales of both lie, None for one that has none.
    """

    nbytes: int
    blocks: list[list[int]]
    pieces: list[int]
    arrays: list[list[ArrayPlace | None]]


class LayerMemory:
    """The memory of some layers: head-major (batch, num_kv_heads, slots, width), in as few blocks as possible.

    A block is what a launch can address. On CPU its K and V are one piece of memory if they have at most `JOINT_BYTES`.

    Args:
        live, rows, num_kv_heads, batch_size: those of the store.
        layers: the layers whose arrays are set; a layer's `slots` say how many it needs.
        page: tokens per page, if layers without a window keep page summaries; else None.
        on_host: whether it is the host's memory, which kernels read and write in place.

    Attributes:
        blocks: the layers of each block, in order.
        version: how often memory was allocated; code that is bound to it compares this to notice that it was replaced.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        layers: Sequence[Layer],
        rows: RowFormats,
        num_kv_heads: int,
        batch_size: int,
        page: int | None = None,
        on_host: bool = False,
    ) -> None:
        self.runtime = live
        self.on_host = on_host
        self.layers = list(layers)
        self.rows = rows
        self.num_kv_heads = num_kv_heads
        self.batch_size = batch_size
        self.page = page
        self.version = 0
        self.lock = StoreLock()  # the store's lock
        # Plans of launches over this memory.
        self.plans: BoundedCache[Any, Any] = BoundedCache(FORMS_OF_LAYER * max(1, len(self.layers)))
        self.blocks: list[list[Layer]] = []
        self.allocate(batch_size)

    def like(self, layers: Sequence[Layer]) -> LayerMemory:
        """New memory for other layers of the same rows, heads and batch."""
        return LayerMemory(self.runtime, layers, self.rows, self.num_kv_heads, self.batch_size)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, scales and summaries of pages, filled or not."""
        return sum(a.nbytes for layer in self.layers for a in (*layer.arrays, *(layer.summaries or ())))

    def allocate(self, batch_size: int) -> None:
        """Allocate memory for a batch of this size and the layers' slots; nothing changes if that fails."""
        limit, shared = BLOCK_BYTES[self.runtime.arch], shared_bytes(self.runtime)
        sizes = batch_size, self.num_kv_heads, *[(layer.index, layer.slots) for layer in self.layers]
        key = ("memory", self.rows, self.page, limit, shared, JOINT_BYTES, sizes)
        plan: Arrangement | None = self.runtime.plans.get(key)
        if plan is None:
            plan = self.runtime.plans.keep(key, self._arranged(batch_size, limit, shared))
        remedy = "Use a smaller capacity or batch, a window, or a dtype of fewer bits."
        require_memory(plan.nbytes, self.runtime, "KVCacheStore", remedy, self.on_host)
        pieces = [self._block(nbytes) for nbytes in plan.pieces]
        made: list[Any] = [
            tuple([None if at is None else pieces[at[0]].array(*at[1:]) for at in arrays]) for arrays in plan.arrays
        ]
        blocks = [self.layers[first:end] for first, end in plan.blocks]
        summaries = [pair for block in blocks for pair in self._summaries_for(block, batch_size)]
        divisors = [self._divisors_for(batch_size, numbers) for numbers in self.rows.divisors]
        self.batch_size, self.blocks = batch_size, blocks
        self.version += 1
        self.plans.clear()
        for layer, arrays, pair in zip(self.layers, made, summaries, strict=True):
            layer.hold(arrays, (divisors[0], divisors[1]), self.rows.formats)
            layer.summaries = pair

    def _arranged(self, batch_size: int, limit: int, shared: int) -> Arrangement:
        """How memory for a batch of this size is shared out, in blocks of at most `limit` bytes.

        Several layers share at most `shared` bytes.

        Raises:
            CapacityError: a layer is larger than a block.
        """
        rows = [batch_size * self.num_kv_heads * layer.slots for layer in self.layers]
        widest = max(row.nbytes for row in self.rows.both)
        if self.page is not None:  # keys are counted one by one
            limit = min(limit, 2**31 * min(row.stored.itemsize for row in self.rows.both))
            shared = min(limit, shared)
        blocks, taken = [[0, 0]], 0  # the first layer of a block and the one after its last; bytes of the last block
        for i, layer in enumerate(self.layers):
            needed = rows[i] * widest
            if needed > limit:
                raise CapacityError(
                    f"KVCacheStore: layer {layer.index} needs {needed} bytes in one block "
                    f"(batch_size={batch_size} x num_kv_heads={self.num_kv_heads} x {layer.slots} slots); "
                    f"{self.runtime.arch} addresses {limit}. Use a smaller capacity, a window, or several stores."
                )
            if taken and taken + needed > shared:
                blocks.append([i, i])
                taken = 0
            blocks[-1][1], taken = i + 1, taken + needed
        each = [row.nbytes + row.numbers * self.rows.scale_dtype.itemsize for row in self.rows.both]
        pieces: list[int] = []
        arrays = [
            places
            for first, end in blocks
            for places in self._places_for(
                [(batch_size, self.num_kv_heads, x.slots) for x in self.layers[first:end]], pieces
            )
        ]
        return Arrangement(sum(rows) * sum(each), blocks, pieces, arrays)

    def _divisors_for(self, batch_size: int, numbers: Divisor) -> ArrayView | None:
        """Divisors on the device; those of heads are repeated for each sequence, and the view shows the first."""
        if numbers is None:
            return None
        heads = len(numbers)
        divisors = to_device(np.tile(np.array(numbers, np.float32), batch_size if heads > 1 else 1), self.runtime)
        return divisors.restrided((heads,), divisors.strides)

    def _places_for(self, shapes: list[tuple[int, int, int]], pieces: list[int]) -> list[list[ArrayPlace | None]]:
        """Where K, V and their scales, or None without scales, of each layer of a block lie; adds to `pieces`."""
        (k, v), alike, scale_dtype = self.rows.both, self.rows.alike, self.rows.scale_dtype
        total, k_piece = sum(map(math.prod, shapes)), len(pieces)
        v_first = -(-total * k.nbytes // ALIGNMENT) * ALIGNMENT
        if alike and self.runtime.is_cpu and v_first + total * v.nbytes <= JOINT_BYTES:
            pieces.append(v_first + total * v.nbytes)
        else:
            pieces += [total * k.nbytes, total * v.nbytes]
            v_first = 0
        v_piece, of_row = len(pieces) - 1, self.rows.numbers * scale_dtype.itemsize
        scale_pieces: list[int | None] = []
        for row in (k, v):
            scale_pieces.append(len(pieces) if row.numbers else None)
            pieces += [total * of_row] if row.numbers else []
        arrays, first = [], 0
        for shape in shapes:
            keys = k_piece, (*shape, k.stored_width), k.stored, first * k.nbytes
            values = v_piece, (*shape, v.stored_width), v.stored, v_first + first * v.nbytes
            of_rows = (*shape, *self.rows.scale_axes), scale_dtype, first * of_row
            arrays.append([keys, values, *[None if n is None else (n, *of_rows) for n in scale_pieces]])
            first += math.prod(shape)
        return arrays

    def _summaries_for(self, block: list[Layer], batch_size: int) -> list[tuple[ArrayView, ArrayView] | None]:
        """New memory for the summaries of each layer of a block; None for layers that keep none."""
        page, dtype, width = self.page, self.rows.k.read_dtype, self.rows.k.width
        if page is None:
            return [None] * len(block)
        pages = [0 if layer.ring else -(-layer.slots // page) for layer in block]
        rows, summaries, first = batch_size * self.num_kv_heads, [], 0
        half = -(-sum(pages) * rows * width * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        both = Memory(2 * half, self.runtime)
        for n in pages:
            shape = batch_size, self.num_kv_heads, n, width
            least, greatest = (both.array(shape, dtype, at + first * dtype.itemsize) for at in (0, half))
            summaries.append((least, greatest) if n else None)
            first += n * rows * width
        return summaries

    def _block(self, nbytes: int) -> Memory:
        """Memory of `nbytes` bytes, in the same place as the layers."""
        return memory_of_host(nbytes, self.runtime) if self.on_host else Memory(nbytes, self.runtime)

    def _beside(self, shape: tuple[int, ...], dtype: DType) -> ArrayView:
        """A new array, in the same place as the layers."""
        return self._block(math.prod(shape) * dtype.itemsize).array(shape, dtype)

    def recount(self, layer: Layer, length: int, history: History | None, valid_from: int = 0) -> None:
        """Set a layer's counts, whatever it held before."""
        was_even = layer.head_lengths is None
        layer.length, layer.valid_from, layer.history, layer.head_lengths = length, valid_from, history, None
        layer.newest = 0
        if history is not None and not history.even:
            layer.head_lengths = HeadLengths(self.runtime, layer.lengths)
        if not (was_even and layer.head_lengths is None):
            self.plans.clear()  # appends depend on whether heads have the same length

    def trim(self, operation: str, layers: Sequence[Layer], n: int) -> None:
        """Drop the `n` newest tokens of layers of one store, or raise; see `Layer.refuse_trim`."""
        length = max(layer.end for layer in layers)
        for layer in layers:
            layer.refuse_trim(operation, n, length)
        for layer in layers:
            drop = max(0, layer.end - (length - n))
            history, now = layer.history, layer.length - drop
            if drop and history is not None and now < history.tokens:
                self.recount(layer, now, history.trimmed(history.tokens - now), min(layer.valid_from, now))
            elif drop:
                layer.length, layer.valid_from, layer.newest = now, min(layer.valid_from, now), 0
                if layer.head_lengths is not None:
                    layer.head_lengths.grow(-drop)

    def reset(self, layers: Sequence[Layer]) -> None:
        """Forget all tokens of these layers."""
        for layer in layers:
            self.recount(layer, 0, None)

    def tokens(
        self, operation: str, layer: Layer, first: int = 0, dtype: DType | None = None
    ) -> tuple[CacheArray, CacheArray]:
        """A copy of what a layer holds from a position on, in temporal order; None means `RowFormat.read_dtype`."""
        fixed, start = self._fixed_and_start(layer, first)
        shape = (self.batch_size, self.num_kv_heads, fixed + max(0, layer.length - start))
        k, v = (new_array((*shape, row.width), dtype or row.read_dtype, self.runtime) for row in self.rows.both)
        self.copy_tokens(operation, layer, k, v, first)
        return CacheArray(k, self.runtime), CacheArray(v, self.runtime)

    def copy_tokens(self, operation: str, layer: Layer, k: ArrayView, v: ArrayView, first: int = 0) -> None:
        """Write `tokens` to arrays (batch, heads, slots, width) of any dtype, or to some of their columns."""
        fixed, start = self._fixed_and_start(layer, first)
        self.gather(operation, layer, [k, v], tokens=fixed, position=first, at=0)
        self.gather(operation, layer, [k, v], tokens=layer.length - start, position=start, at=fixed)

    def _fixed_and_start(self, layer: Layer, first: int) -> tuple[int, int]:
        """How many sinks a layer holds from a position on, and the position at which the ring's tokens begin."""
        return max(0, min(layer.length, layer.sinks) - first), max(layer.valid_from, layer.sinks, first)

    def gather(
        self, operation: str, layer: Layer, out: list[ArrayView], *, tokens: int, position: int, at: int
    ) -> None:
        """Copy the rows of consecutive positions into `out`, from its token `at` on."""
        if tokens <= 0:
            return
        shape, placement = (self.batch_size, self.num_kv_heads, tokens), layer.placement(position)
        arrays = [*out, layer.k, layer.v, *[a for a in layer.read_scales if a is not None]]
        if not can_be_shared(arrays):
            for each in self._bind_gather(operation, layer, out, at, shape, placement):
                each.bound.launch()
            return
        # Layers of one form are read one after another, and the next reads of them are often of more tokens.
        plans, key = self.runtime.plans, (self.rows, layer.form, placement, shape, at, *[a.key for a in out])
        last, launches = plans.get("gathered", (None, None))
        if last != key:
            launches = SharedLaunches(self._bind_gather(operation, layer, out, at, shape, placement), arrays)
            plans["gathered"] = key, launches
        launches.run(arrays)

    def _bind_gather(
        self, operation: str, layer: Layer, out: list[ArrayView], at: int, shape: tuple[int, ...], placement: Placement
    ) -> list[Launch]:
        """The launches of `gather`, of `shape` sequences, heads and tokens."""
        scales = layer.scales_of_rows(self.num_kv_heads, self.rows.numbers)
        stored = zip((layer.k, layer.v), self.rows.formats, scales, strict=True)
        src = [rows_of(a)._replace(format=format, scale=scale) for a, format, scale in stored]
        dst = [rows_of(a, at) for a in out]
        return bind_rows(self.runtime, operation, src, dst, self.rows.widths, shape, placement)

    def copy_filled(self) -> list[list[ArrayView]]:
        """Copies of every layer's filled slots, in the same place as the layers."""
        taken = []
        for layer in self.layers:
            copies = []
            for a in layer.arrays:
                to = self._beside((*a.shape[:2], layer.filled, *a.shape[3:]), a.dtype)
                self.move_slots(a, to, layer.filled)
                copies.append(to)
            taken.append(copies)
        return taken

    def write_filled(self, taken: Sequence[Sequence[ArrayView]]) -> None:
        """Write what `copy_filled` copied back to its slots, for the current batch."""
        for layer, arrays in zip(self.layers, taken, strict=True):
            for a, b in zip(arrays, layer.arrays, strict=True):
                self.move_slots(a, b, layer.filled)

    def to_host(self) -> list[list[Host]]:
        """Every layer's filled slots as NumPy arrays."""
        live = self.runtime
        if not self.on_host:
            return [[read_host(a, live) for a in arrays] for arrays in self.copy_filled()]
        live.synchronize()
        return [[as_numpy(a)[:, :, : layer.filled].copy() for a in layer.arrays] for layer in self.layers]

    def from_host(self, taken: Sequence[Sequence[Host]]) -> None:
        """Write what `to_host` returned for layers with the same counts."""
        if not self.on_host:
            self.write_filled([[to_device(np.ascontiguousarray(a), self.runtime) for a in arrays] for arrays in taken])
            return
        self.runtime.synchronize()
        for layer, arrays in zip(self.layers, taken, strict=True):
            for a, to in zip(arrays, layer.arrays, strict=True):
                as_numpy(to)[:, :, : layer.filled] = a

    def move_slots(self, src: ArrayView, dst: ArrayView, slots: int, sequences: ArrayView | None = None) -> None:
        """Copy the first slots of (batch, heads, slots[, width]) arrays, from the sequences that `sequences` names."""
        if slots == 0:
            return
        ends, shape = ([rows_of(src)], [rows_of(dst)]), (self.batch_size, self.num_kv_heads, slots)
        width, placement = width_of(src), LINEAR
        if sequences is not None:
            shape, placement = (sequences.shape[0], *shape[1:]), Placement("group", array=sequences, group=1)
        copy_rows(self.runtime, "KVCacheStore", *ends, [width], shape, placement)

    def move_in_place(
        self, operation: str, layers: Sequence[Layer], slots: np.ndarray[Any, Any], most: int, start: int = 0
    ) -> None:
        """Move rows of neighbouring layers of one form to the front of the `most` slots from `start`, in one launch.

        `slots` (layers * batch[, heads], n) has the rows' slots, counted from `start`, for all heads or by head.
        """
        arrays, groups = layers[0].arrays, len(layers) * self.batch_size
        rows = [rows_of(a.restrided((groups, *a.shape[1:]), a.strides), start) for a in arrays]  # of all these layers
        widths, index = [width_of(a) for a in arrays], to_device(slots.astype(np.int32), self.runtime)
        shape = groups, self.num_kv_heads, most
        bind_in_place(self.runtime, operation, rows, widths, shape, index).bound.launch()

    def reorder(self, operation: str, index: Array) -> None:
        """Replace each sequence b by sequence index[b], in place; raises as `sequences_of`."""
        sequences = self.sequences_of(operation, index)
        if len(sequences) != self.batch_size:
            raise ShapeError(
                f"{operation}: index has {len(sequences)} entries for batch_size={self.batch_size}. "
                f"Use select() to change the batch size."
            )
        if (sequences != np.arange(self.batch_size)).any():
            filled = [((*a.shape[:2], x.filled, *a.shape[3:]), a) for x in self.layers for a in x.arrays if x.filled]
            # The arrays are copied one after another through the same memory of the device, wherever the layers are.
            through = Memory(max((math.prod(shape) * a.dtype.itemsize for shape, a in filled), default=0), self.runtime)
            index = to_device(sequences, self.runtime)
            for shape, a in filled:
                taken = through.array(shape, a.dtype)
                self.move_slots(a, taken, shape[2], index)
                self.move_slots(taken, a, shape[2])
            self._follow(sequences)

    def select(self, sequences: np.ndarray[Any, Any]) -> None:
        """Keep these sequences, in this order, in new memory; nothing changes if that is too large."""
        before, index = [layer.arrays for layer in self.layers], to_device(sequences, self.runtime)
        self.allocate(len(sequences))
        for layer, arrays in zip(self.layers, before, strict=True):
            for a, to in zip(arrays, layer.arrays, strict=True):
                self.move_slots(a, to, layer.filled, index)
        self._follow(sequences)

    def _follow(self, sequences: np.ndarray[Any, Any]) -> None:
        """Reorder what compactions left of each sequence."""
        for layer in self.layers:
            if layer.history is not None:
                history = layer.history.of_sequences(sequences)
                length = layer.length - layer.history.tokens + history.tokens
                oldest = min(layer.valid_from, length)
                if layer.ring and layer.head_lengths is not None and history.even:  # as in `grow`
                    oldest = max(oldest, length - layer.ring)
                self.recount(layer, length, history, oldest)

    def sequences_of(self, operation: str, index: Array) -> np.ndarray[Any, Any]:
        """A user's list of sequences as int32; raises if it is not a list of integers, is empty or leaves the batch."""
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


def copy_rows(
    live: runtime.Runtime,
    operation: str,
    src: Sequence[Rows],
    dst: Sequence[Rows],
    widths: Sequence[int],
    shape: tuple[int, ...],
    src_place: Placement = LINEAR,
) -> None:
    """Copy the rows of `shape` sequences, heads and tokens at once, to where `dst` says; see `bind_copies`."""
    for each in bind_rows(live, operation, src, dst, widths, shape, src_place):
        each.bound.launch()


def bind_rows(
    live: runtime.Runtime,
    operation: str,
    src: Sequence[Rows],
    dst: Sequence[Rows],
    widths: Sequence[int],
    shape: tuple[int, ...],
    src_place: Placement,
) -> list[Launch]:
    """The launches of `copy_rows`."""
    sizes: dict[str, Any] = dict(zip(("groups", "heads", "tokens"), shape, strict=True))
    return bind_copies(live, operation, src=src, dst=dst, widths=widths, src_place=src_place, **sizes)


def width_of(a: ArrayView) -> int:
    """The number of elements in a row of a (batch, heads, slots[, width]) array."""
    return a.shape[3] if a.ndim == 4 else 1


def rows_of(a: ArrayView, first_token: int = 0) -> Rows:
    """The places of the rows of a (batch, heads, slots[, width]) array."""
    return Rows(a, sequence=a.strides[0], token=a.strides[2], head=a.strides[1], first=first_token * a.strides[2])
