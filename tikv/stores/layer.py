"""The layers of a contiguous store: their counts, and the memory in which they lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import ALIGNMENT, ArrayView, CacheArray, Memory, new_array, to_device
from tikv.dtypes import DType
from tikv.errors import CapacityError, PositionError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops.fixed_scales import fixed_scale, head_step
from tikv.ops.layouts import LINEAR, Formats, Placement, Rows, Scale, reduced_position
from tikv.ops.row_copy import bind_copies, bind_copy
from tikv.runtime.cache import BoundedCache
from tikv.stores.kept import HeadLengths, Kept, lengths_of
from tikv.stores.storage import BLOCK_BYTES, Divisors, RowForm, shared_bytes
from tikv.stores.whole import StoreLock

WIDTHS = ("head_dim", "head_dim_v")
JOINT_BYTES = 2**31 - 64  # of K and V that are one array to a launch on CPU: it can address each of their bytes


class Layer:
    """One layer's slots and counts."""

    def __init__(self, index: int, capacity: int, window: int | None, sinks: int) -> None:
        self.index = index
        self.window = window
        self.sinks = sinks if window is not None else 0
        self.slots = capacity if window is None else window
        self.ring = 0 if window is None else window - self.sinks
        self.length = 0  # tokens appended since reset, less those trimmed; after a compaction see `kept`
        self.valid_from = 0  # oldest position behind the sinks whose slot has not been overwritten
        self.newest = 0  # of those tokens, how many the last append brought
        self.kept: Kept | None = None  # what the last compaction left, if there was one
        self.head_lengths: HeadLengths | None = None  # where it left heads of different lengths
        self.k: ArrayView
        self.v: ArrayView
        self.k_scale: ArrayView | None = None
        self.v_scale: ArrayView | None = None
        self.divisors: tuple[ArrayView | None, ArrayView | None] = (None, None)  # of all rows, or of each head's
        self.formats: Formats = (None, None)  # of what K and V hold, where that is groups of codes

    @property
    def held(self) -> int:
        """Tokens that can be read: the sinks and what the ring still has."""
        fixed = min(self.length, self.sinks)
        return fixed + max(0, self.length - max(self.valid_from, self.sinks))

    @property
    def end(self) -> int:
        """Tokens appended since reset, less those trimmed, whatever compactions dropped."""
        return self.length if self.kept is None else self.kept.end + self.length - self.kept.tokens

    @property
    def next_position(self) -> int:
        """Of the next token: `end`, unless keys were rotated to other positions."""
        return self.length if self.kept is None else self.kept.next_position + self.length - self.kept.tokens

    @property
    def filled(self) -> int:
        """Slots that have ever been written, from slot 0."""
        return min(self.length, self.slots)

    @property
    def trimmed_to(self) -> int:
        """`valid_from` where trimming made it later than the ring alone does; else 0."""
        return self.valid_from if self.ring and self.valid_from > max(0, self.length - self.ring) else 0

    @property
    def named(self) -> dict[str, ArrayView]:
        """The layer's memory by the names that files have: K, V, and the scales of what is int8 or groups."""
        found = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: a for name, a in found.items() if a is not None}

    @property
    def arrays(self) -> list[ArrayView]:
        """`named` without the names."""
        return list(self.named.values())

    @property
    def scales(self) -> list[ArrayView]:
        """The scales of K and of V that there are, those of groups with their biases."""
        return [a for a in (self.k_scale, self.v_scale) if a is not None]

    @property
    def read_scales(self) -> tuple[ArrayView | None, ArrayView | None]:
        """What stored rows of K and of V are multiplied by: scales of rows, or one of all rows or each head's."""
        k, v = self.divisors
        return self.k_scale if k is None else k, self.v_scale if v is None else v

    def scales_of_rows(self, heads: int, numbers: int) -> list[Scale | None]:
        """`read_scales`, and where they lie: `numbers` a slot of each of so many heads."""
        of_head = self.slots * numbers
        return [
            None if a is None else fixed_scale(a) if a.ndim < 3 else Scale(a, heads * of_head, numbers, of_head)
            for a in self.read_scales
        ]

    def scales_by_head(self, numbers: int, first: int = 0) -> list[Scale | None]:
        """The same with each head a sequence of its own, from that of `first` on."""
        of_head = self.slots * numbers
        found: list[Scale | None] = []
        for a in self.read_scales:
            if a is None:
                found.append(None)
            elif a.ndim < 3:
                found.append(Scale(a, sequence=head_step(a), first=first * head_step(a)))
            else:
                found.append(Scale(a, sequence=of_head, token=numbers, first=first * of_head))
        return found

    def slot_of(self, position: int) -> int:
        """The slot of a position."""
        return reduced_position(position, self.sinks, self.ring)

    def refuse_trim(self, operation: str, n: int, length: int) -> None:
        """The layer can go back when a store of so many tokens drops `n` of them.

        Raises:
            PositionError: tokens behind those were dropped, or their slots taken.
        """
        drop = self.end - (length - n)
        if drop <= 0:
            return
        if self.kept is not None and self.end - drop < self.kept.first_whole:
            first = self.kept.first_whole
            raise PositionError(
                f"{operation}: cannot drop {n} tokens: a compaction dropped number {first - 1} of layer {self.index}, "
                f"which would be among those that stay. Drop at most {length - first}, or reset()."
            )
        wrapped = self.head_lengths is not None and self.ring > 0 and self.length > self.slots
        if wrapped or self.sinks < self.length - drop < self.valid_from:
            oldest = self.end if wrapped else self.end - self.length + self.valid_from
            raise PositionError(
                f"{operation}: cannot drop {n} tokens after the window has wrapped (layer {self.index}: "
                f"length={self.end}, window={self.window}, sinks={self.sinks}): positions before {oldest} are "
                f"overwritten. Drop at most {length - oldest}, or reset()."
            )

    def grow(self, tokens: int) -> None:
        """Count that many more tokens, of a layer whose heads have one length."""
        self.length += tokens
        self.newest = tokens
        if self.ring and self.length - self.ring > self.valid_from:
            self.valid_from = self.length - self.ring


class LayerMemory:
    """The memory of some layers: head-major (batch, num_kv_heads, slots, width), in as few blocks as may be.

    A block is what a launch can address. On CPU its K and V lie in one piece of memory up to `JOINT_BYTES`.

    Args:
        live: the runtime.
        layers: whose arrays are set; a layer's `slots` say how many it needs.
        batch_size, num_kv_heads, head_dim, head_dim_v, dtype, scale_dtype, v_dtype: as in `KVCacheStore`.
        divisors: what all rows are divided by.

    Attributes:
        rows: how those of K and of V are kept.
        blocks: the layers of each block, in order.
        version: how often memory was made: what is bound to it knows by that when it is gone.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        layers: Sequence[Layer],
        *,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int,
        dtype: DType | GroupFormat,
        scale_dtype: DType,
        v_dtype: DType | GroupFormat | None = None,
        divisors: Divisors = (None, None),
    ) -> None:
        self.runtime = live
        self.layers = list(layers)
        self.batch_size = batch_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.head_dim_v = head_dim_v
        self.dtype, self.v_dtype = dtype, dtype if v_dtype is None else v_dtype
        self.scale_dtype = scale_dtype
        self.divisors = divisors
        self.rows = (
            RowForm(self.dtype, head_dim, divisors[0] is not None),
            RowForm(self.v_dtype, head_dim_v, divisors[1] is not None),
        )
        for row, name in zip(self.rows, WIDTHS, strict=True):
            if row.format is not None:
                row.format.groups(row.width, name, "KVCacheStore")
        self.formats: Formats = (self.rows[0].format, self.rows[1].format)
        self.alike = self.dtype is self.v_dtype
        self.numbers = max(row.numbers for row in self.rows)  # from a row's scales to the next row's, of K as of V
        self.version = 0
        self.lock = StoreLock()  # of the store
        self.plans: BoundedCache[Any, Any] = BoundedCache()  # of launches over this memory
        self.blocks: list[list[Layer]] = []
        self.allocate(batch_size)

    @property
    def kept_as(self) -> str:
        """What K and V are kept as, for messages and a `repr`."""
        return self.dtype.name if self.alike else f"{self.dtype.name}|{self.v_dtype.name}"

    @property
    def width(self) -> str:
        """The width of a head, or those of K and V, for a `repr`."""
        return str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}|{self.head_dim_v}"

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales, filled or not."""
        return sum(a.nbytes for layer in self.layers for a in layer.arrays)

    def allocate(self, batch_size: int) -> None:
        """Make new memory for a batch of this size and the layers' slots; nothing changes until all of it is there.

        Raises:
            CapacityError: a layer is larger than a launch on this arch can address.
        """
        rows = {layer.index: batch_size * self.num_kv_heads * layer.slots for layer in self.layers}
        widest = max(row.nbytes for row in self.rows)
        limit, shared = BLOCK_BYTES[self.runtime.arch], shared_bytes(self.runtime)
        blocks: list[list[Layer]] = [[]]
        for layer in self.layers:
            needed = rows[layer.index] * widest
            if needed > limit:
                raise CapacityError(
                    f"KVCacheStore: layer {layer.index} needs {needed} bytes in one block "
                    f"(batch_size={batch_size} x num_kv_heads={self.num_kv_heads} x {layer.slots} slots); "
                    f"{self.runtime.arch} addresses {limit}. Use a smaller capacity, a window, or several stores."
                )
            if blocks[-1] and sum(rows[x.index] for x in blocks[-1]) * widest + needed > shared:
                blocks.append([])
            blocks[-1].append(layer)
        made = [self._memory_for(sum(rows[layer.index] for layer in block)) for block in blocks]
        divisors = [self._divisors_for(batch_size, numbers) for numbers in self.divisors]
        self.batch_size, self.blocks = batch_size, blocks
        self.version += 1
        for layer in self.layers:
            layer.divisors = divisors[0], divisors[1]
        self.plans.clear()
        for block, memory in zip(blocks, made, strict=True):
            self._place(block, rows, *memory)

    def _divisors_for(self, batch_size: int, numbers: tuple[float, ...] | None) -> ArrayView | None:
        """Divisors on the device, those of heads once for each sequence, of which the view shows the first's."""
        if numbers is None:
            return None
        heads = len(numbers)
        found = to_device(np.tile(np.array(numbers, np.float32), batch_size if heads > 1 else 1), self.runtime)
        return found.restrided((heads,), found.strides)

    def _memory_for(self, rows: int) -> tuple[Memory, Memory, int, list[Memory | None]]:
        """Memory for so many rows of K and of V, where in its own V begins, and memory for the scales of both."""
        k_bytes, v_bytes = (rows * row.nbytes for row in self.rows)
        v_first = -(-k_bytes // ALIGNMENT) * ALIGNMENT
        if self.alike and self.runtime.is_cpu and v_first + v_bytes <= JOINT_BYTES:
            k_block = v_block = Memory(v_first + v_bytes, self.runtime)
        else:
            k_block, v_block, v_first = Memory(k_bytes, self.runtime), Memory(v_bytes, self.runtime), 0
        scale_bytes = rows * self.numbers * self.scale_dtype.itemsize
        scales = [Memory(scale_bytes, self.runtime) if row.numbers else None for row in self.rows]
        return k_block, v_block, v_first, scales

    def _place(
        self,
        block: list[Layer],
        rows: dict[int, int],
        k_block: Memory,
        v_block: Memory,
        v_first: int,
        scales: list[Memory | None],
    ) -> None:
        first, (k, v) = 0, self.rows
        of_row = () if self.formats == (None, None) else (self.numbers,)
        for layer in block:
            shape = (self.batch_size, self.num_kv_heads, layer.slots)
            layer.formats = self.formats
            layer.k = k_block.array((*shape, k.stored_width), k.stored, first * k.nbytes)
            layer.v = v_block.array((*shape, v.stored_width), v.stored, v_first + first * v.nbytes)
            offset = first * self.numbers * self.scale_dtype.itemsize
            layer.k_scale, layer.v_scale = (
                None if m is None else m.array((*shape, *of_row), self.scale_dtype, offset) for m in scales
            )
            first += rows[layer.index]

    def recount(self, layer: Layer, length: int, kept: Kept | None, valid_from: int = 0) -> None:
        """Let a layer be one that holds so much, whatever it held before."""
        was_even = layer.head_lengths is None
        layer.length, layer.valid_from, layer.kept, layer.head_lengths = length, valid_from, kept, None
        layer.newest = 0
        if kept is not None and not kept.even:
            layer.head_lengths = HeadLengths(self.runtime, lengths_of(layer))
        if not (was_even and layer.head_lengths is None):
            self.plans.clear()  # appends to heads of one length and of several are launched otherwise

    def trim(self, layer: Layer, target: int) -> None:
        """Drop the newest tokens of a layer, down to so many appended ones; `Layer.refuse_trim` was asked."""
        drop = layer.end - target
        if drop <= 0:
            return
        kept, length = layer.kept, layer.length - drop
        if kept is None or length >= kept.tokens:
            layer.length, layer.valid_from, layer.newest = length, min(layer.valid_from, length), 0
            if layer.head_lengths is not None:
                layer.head_lengths.grow(-drop)
        else:
            self.recount(layer, length, kept.trimmed(kept.tokens - length), min(layer.valid_from, length))

    def tokens(self, operation: str, layer: Layer, first: int = 0) -> tuple[CacheArray, CacheArray]:
        """What a layer holds from a position on, in temporal order, as a copy, in `RowForm.read_dtype`."""
        fixed = max(0, min(layer.length, layer.sinks) - first)
        start = max(layer.valid_from, layer.sinks, first)
        held = fixed + max(0, layer.length - start)
        shape = (self.batch_size, self.num_kv_heads, held)
        out = [new_array((*shape, row.width), row.read_dtype, self.runtime) for row in self.rows]
        self._gather(operation, layer, out, tokens=fixed, position=first, at=0)
        self._gather(operation, layer, out, tokens=held - fixed, position=start, at=fixed)
        return CacheArray(out[0], self.runtime), CacheArray(out[1], self.runtime)

    def _gather(
        self, operation: str, layer: Layer, out: list[ArrayView], *, tokens: int, position: int, at: int
    ) -> None:
        """Copy the rows of consecutive positions into `out`, from its token `at` on."""
        if tokens <= 0:
            return
        params: dict[str, Any] = {
            "src_position": layer.slot_of(position),
            "sinks": layer.sinks,
            "ring": layer.ring,
        }
        scales = layer.scales_of_rows(self.num_kv_heads, self.numbers)
        stored = zip((layer.k, layer.v), self.formats, scales, strict=True)
        for launch in bind_copies(
            self.runtime,
            operation,
            src=[rows_of(a)._replace(format=format, scale=scale) for a, format, scale in stored],
            dst=[rows_of(a, at) for a in out],
            widths=(self.head_dim, self.head_dim_v),
            heads=self.num_kv_heads,
            tokens=tokens,
            groups=self.batch_size,
            src_place=Placement("ring") if layer.ring else LINEAR,
            **params,
        ):
            launch.bound.launch()

    def copy_filled(self, sequences: np.ndarray[Any, Any] | None = None) -> list[list[ArrayView]]:
        """Copies of every layer's filled slots, of the chosen sequences; None: of all."""
        count = self.batch_size if sequences is None else len(sequences)
        index = None if sequences is None else to_device(sequences, self.runtime)
        taken = []
        for layer in self.layers:
            found = []
            for a in layer.arrays:
                to = new_array((count, self.num_kv_heads, layer.filled, *a.shape[3:]), a.dtype, self.runtime)
                self.move_slots(a, to, layer.filled, index)
                found.append(to)
            taken.append(found)
        return taken

    def write_filled(self, taken: Sequence[Sequence[ArrayView]]) -> None:
        """Write what `copy_filled` copied into the slots it came from, for the batch as it is now."""
        for layer, arrays in zip(self.layers, taken, strict=True):
            for a, b in zip(arrays, layer.arrays, strict=True):
                self.move_slots(a, b, layer.filled)

    def move_slots(self, src: ArrayView, dst: ArrayView, slots: int, sequences: ArrayView | None = None) -> None:
        """Copy the first slots of (batch, heads, slots[, width]) arrays, from the sequences that `sequences` names."""
        if slots == 0:
            return
        params: dict[str, Any] = {"index_group": 1} if sequences is not None else {}
        bind_copy(
            self.runtime,
            "KVCacheStore",
            src=[rows_of(src)],
            dst=[rows_of(dst)],
            widths=[src.shape[3] if src.ndim == 4 else 1],
            heads=self.num_kv_heads,
            tokens=slots,
            groups=self.batch_size if sequences is None else sequences.shape[0],
            src_place=Placement("group") if sequences is not None else LINEAR,
            index=sequences,
            **params,
        ).bound.launch()

    def reorder(self, operation: str, index: Any) -> None:
        """Let sequence b continue from what sequence index[b] holds, in place.

        Raises:
            ShapeError, PositionError: the index has another length or leaves the batch.
        """
        chosen = self.sequences_of(operation, index)
        if len(chosen) != self.batch_size:
            raise ShapeError(
                f"{operation}: index has {len(chosen)} entries for batch_size={self.batch_size}. "
                f"Use select() to change it."
            )
        if (chosen != np.arange(self.batch_size)).any():
            self.write_filled(self.copy_filled(chosen))
            self._follow(chosen)

    def select(self, sequences: np.ndarray[Any, Any]) -> None:
        """Keep these sequences, in this order, in new memory.

        Raises:
            CapacityError: a layer would be larger than a launch can address. Nothing is changed.
        """
        taken = self.copy_filled(sequences)
        self.allocate(len(sequences))
        self.write_filled(taken)
        self._follow(sequences)

    def _follow(self, sequences: np.ndarray[Any, Any]) -> None:
        """What compactions left of each sequence goes with it."""
        for layer in self.layers:
            if layer.kept is not None:
                kept = layer.kept.of_sequences(sequences)
                length = layer.length - layer.kept.tokens + kept.tokens
                oldest = min(layer.valid_from, length)
                if layer.ring and layer.head_lengths is not None and kept.even:  # one count again, as `grow` has it
                    oldest = max(oldest, length - layer.ring)
                self.recount(layer, length, kept, oldest)

    def sequences_of(self, operation: str, index: Any) -> np.ndarray[Any, Any]:
        """A user's list of sequences as int32.

        Raises:
            ShapeError, PositionError: it is empty, is no list of integers, or leaves the batch.
        """
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


def rows_of(a: ArrayView, first_token: int = 0) -> Rows:
    """Where the rows of a (batch, heads, slots[, width]) array lie."""
    return Rows(a, sequence=a.strides[0], token=a.strides[2], head=a.strides[1], first=first_token * a.strides[2])
