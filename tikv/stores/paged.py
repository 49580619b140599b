"""PagedKVCacheStore: sequences of any length over one pool of blocks, sharing what they have in common.

All layers have pools of one form, so a block id names the same block of every layer, and a sequence has one block
table. The layers lie side by side in as few pieces of memory as a launch can address; copying a block copies it in all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, CacheArray, as_numpy, describe, new_array, read_host, view, write_host
from tikv.dtypes import DType
from tikv.errors import CapacityError, DTypeError, PositionError, ShapeError, TikvError
from tikv.ops import checks, paged
from tikv.ops import write_qkv as qkv_ops
from tikv.ops.attention import plan
from tikv.ops.row_copy import MAX_PLANS, CopyCall
from tikv.stores import block_pool, draw, files
from tikv.stores.contiguous import BLOCK_BYTES, size_in_words, storage

HostArray: TypeAlias = np.ndarray[Any, Any]


def _row_axes(axes: str) -> str:
    """The axes of a pool, a row's parts last and in order, as layout NHD has them."""
    return "NSHCX" if "X" in axes else "NSHD"


@dataclass(frozen=True)
class PoolForm:
    """What the pools of all layers have in common."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: DType
    scale_dtype: DType | None  # of int8 pools
    layout: str

    @classmethod
    def checked(
        cls,
        operation: str,
        live: runtime.Runtime,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: Any,
        scale_dtype: Any,
        layout: str,
    ) -> PoolForm:
        """The form that a user's arguments mean.

        Raises:
            CapacityError: a layer is larger than a launch on this arch addresses.
            DTypeError, OptionError, PositionError, ShapeError: an argument that is none.
        """
        stored, scales = storage(dtype, scale_dtype, live, operation)
        form = cls(
            checks.integer(num_blocks, "num_blocks", operation, low=1),
            checks.integer(block_size, "block_size", operation, low=1),
            checks.integer(num_kv_heads, "num_kv_heads", operation, low=1),
            checks.integer(head_dim, "head_dim", operation, low=1),
            checks.integer(head_dim if head_dim_v is None else head_dim_v, "head_dim_v", operation, low=1),
            stored,
            scales,
            checks.option(layout, "layout", operation, tuple(paged.LAYOUTS)),
        )
        chunk = paged.CHUNK_BYTES // stored.itemsize
        if "X" in paged.LAYOUTS[form.layout][0] and form.head_dim % chunk:
            raise ShapeError(
                f"{operation}: head_dim={form.head_dim} is no multiple of the {chunk} {stored.name} elements of a "
                f"chunk, which layout {form.layout} cuts keys into. Use NHD or HND."
            )
        if form.bytes_of_layer > form.limit(live):
            raise CapacityError(
                f"{operation}: a layer needs {form.bytes_of_layer} bytes in one piece of memory "
                f"(num_blocks={form.num_blocks} x block_size={form.block_size} x {form.num_kv_heads} heads); "
                f"{live.arch} addresses {form.limit(live)}. Use fewer blocks, or several stores."
            )
        return form

    @property
    def bytes_of_layer(self) -> int:
        """Bytes of the larger of a layer's two pools."""
        rows = self.num_blocks * self.block_size * self.num_kv_heads
        return rows * max(self.head_dim, self.head_dim_v) * self.dtype.itemsize

    def limit(self, live: runtime.Runtime) -> int:
        """Bytes that one piece of memory may have: a kernel counts 2**31 of them, at worst one element a word."""
        return min(BLOCK_BYTES[live.arch], 2**31 * self.dtype.itemsize)

    def shape(self, stream: int, num_blocks: int) -> tuple[int, ...]:
        """The shape of K's (0) or V's (1) pool of that many blocks."""
        width, chunk = (self.head_dim, self.head_dim_v)[stream], paged.CHUNK_BYTES // self.dtype.itemsize
        extent = {"N": num_blocks, "S": self.block_size, "H": self.num_kv_heads, "D": width, "C": width // chunk}
        return tuple(extent.get(axis, chunk) for axis in paged.LAYOUTS[self.layout][stream])

    def scale_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of an int8 pool's scales."""
        return num_blocks, self.block_size, self.num_kv_heads

    def names(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """A layer's arrays by name, with the shape of a block in layout NHD, and the dtype."""
        slots = (self.block_size, self.num_kv_heads)
        found: dict[str, tuple[tuple[int, ...], DType]] = {
            "k": ((*slots, self.head_dim), self.dtype),
            "v": ((*slots, self.head_dim_v), self.dtype),
        }
        if self.scale_dtype is not None:
            found |= {"k_scale": (slots, self.scale_dtype), "v_scale": (slots, self.scale_dtype)}
        return found

    def to_rows(self, stream: int, array: HostArray) -> HostArray:
        """Blocks of a pool on the host as layout NHD has them; scales, streams 2 and 3, are so already."""
        if stream > 1:
            return array
        axes = paged.LAYOUTS[self.layout][stream]
        rows = array.transpose([axes.index(axis) for axis in _row_axes(axes)])
        found: HostArray = rows.reshape(*rows.shape[:3], (self.head_dim, self.head_dim_v)[stream])
        return found

    def from_rows(self, stream: int, rows: HostArray) -> HostArray:
        """The reverse of `to_rows`."""
        if stream > 1:
            return rows
        axes = paged.LAYOUTS[self.layout][stream]
        order = _row_axes(axes)
        extent = dict(zip(axes, self.shape(stream, len(rows)), strict=True))
        split = rows.reshape([extent[axis] for axis in order])
        return np.ascontiguousarray(split.transpose([order.index(axis) for axis in axes]))

    def facts(self) -> dict[str, Any]:
        """The arguments that make a store of this form, as JSON has them."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "dtype": self.dtype.name,
            "scale_dtype": (self.scale_dtype or dtypes.float16).name,
            "layout": self.layout,
        }


class Pages:
    """The pools of some layers that lie one after the other: K, V and, for int8, their scales."""

    def __init__(self, form: PoolForm, layers: int, live: runtime.Runtime) -> None:
        self.form = form
        self.layers = layers
        shapes = [(form.shape(stream, layers * form.num_blocks), form.dtype) for stream in (0, 1)]
        if form.scale_dtype is not None:
            shapes += [(form.scale_shape(layers * form.num_blocks), form.scale_dtype)] * 2
        self.arrays = [new_array(shape, dtype, live) for shape, dtype in shapes]

    def of_layer(self, i: int) -> list[ArrayView]:
        """K's and V's pool of the i-th of these layers, and their scales if there are any."""
        n = self.form.num_blocks
        return [a.moved((n, *a.shape[1:]), a.strides, i * n * a.strides[0]) for a in self.arrays]

    def pairs(self, src: Sequence[int], dst: Sequence[int], src_blocks: int, dst_blocks: int) -> np.ndarray[Any, Any]:
        """(layers * n, 2) int32: each block to move and its destination, in each layer of pools of so many blocks."""
        pair = np.stack([np.asarray(src, np.int32), np.asarray(dst, np.int32)], axis=1)
        layer = np.arange(self.layers, dtype=np.int32)[:, None, None]
        return np.ascontiguousarray((pair + layer * np.array([src_blocks, dst_blocks], np.int32)).reshape(-1, 2))


@dataclass
class SequenceState:
    """What the store knows of one sequence."""

    blocks: list[int]
    lengths: list[int]  # tokens of each layer
    digests: list[bytes] = field(default_factory=list)  # of the full blocks whose tokens are known
    registered: int = 0  # how many of those every layer has written
    swapped: list[list[np.ndarray[Any, Any]]] | None = None  # on the host: the arrays of each of the store's `Pages`

    @property
    def length(self) -> int:
        """Tokens of the layers ahead."""
        return max(self.lengths)


@dataclass
class Step:
    """Where the new tokens of some sequences go, and what has to change in their tables; the same for every layer."""

    ids: tuple[int, ...]
    bounds: tuple[int, ...]  # cumulated numbers of tokens
    states: list[SequenceState]
    starts: list[int]
    slots: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    tables: list[list[int]]
    fresh: list[int]  # blocks taken for this step
    left: list[int]  # shared blocks that were copied before being written
    overwritten: list[int]  # blocks whose tokens change
    lost: dict[int, bytes] = field(default_factory=dict)  # digests of fresh blocks that are not written yet
    index: ArrayView | None = None  # the slots on the device
    done: bool = False  # by one layer, so that tables and counts are true already


class PagedKVCacheStore(draw.Drawn):
    """Keys and values of many sequences in one pool of blocks, which sequences, forks and common prefixes share.

    A sequence is a number that `add` or `fork` gives and `free` takes back; it is never given twice. Its tokens lie in
    blocks of ``block_size`` slots. A block may belong to several sequences; whoever writes into it first gets a copy.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and V.
        head_dim: width of a head of K, and of V unless ``head_dim_v`` says otherwise.
        num_blocks: blocks of the pool, for all sequences together.
        block_size: tokens of a block.
        dtype: storage: float32, float16, bfloat16, float64, or int8 with a scale per token and head.
        layout: of a layer's pool: "NHD" (N, bs, H, D), "HND" (N, H, bs, D), or "VLLM" K (N, H, D/x, bs, x) and V
            (N, H, D, bs).
        head_dim_v: width of a head of V.
        scale_dtype: of the int8 scales (N, bs, H), float16 or float32.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument that is none.

    Exactness: appended rows keep their bits; a narrowing dtype rounds to nearest even; int8 is as in `tikv.quantize`.
    Cost: an append is one launch for all its sequences; tables and counts are kept on the host, and reading them never
    waits for the device.

    Example:
        >>> import numpy as np, tikv
        >>> pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=4, num_blocks=8, block_size=2)
        >>> a = pool.add()
        >>> k = np.arange(5 * 8, dtype=np.float16).reshape(5, 2, 4)
        >>> pool.append(0, k, -k, [a], cu_seqlens=[0, 5])
        >>> b = pool.fork(a)
        >>> pool.append(0, k[:2], -k[:2], [a, b])
        >>> pool.length(b), pool.num_free_blocks, pool.num_shared_blocks
        (6, 4, 2)
        >>> bool((np.asarray(pool.tokens(0, b)[0])[:5] == k).all())
        True
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int = 16,
        dtype: Any = "float16",
        layout: str = "NHD",
        head_dim_v: int | None = None,
        scale_dtype: Any = "float16",
    ) -> None:
        operation = "PagedKVCacheStore"
        self.runtime = runtime.current()
        self.num_layers = checks.integer(num_layers, "num_layers", operation, low=1)
        self.form = PoolForm.checked(
            operation,
            self.runtime,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            scale_dtype=scale_dtype,
            layout=layout,
        )
        together = min(self.num_layers, self.form.limit(self.runtime) // self.form.bytes_of_layer)
        self._pages = [
            Pages(self.form, min(together, self.num_layers - first), self.runtime)
            for first in range(0, self.num_layers, together)
        ]
        self._layers = [pages.of_layer(i) for pages in self._pages for i in range(pages.layers)]
        self._blocks = block_pool.BlockPool(self.form.num_blocks)
        self._sequences: dict[int, SequenceState] = {}
        self._next = 0
        self._appends: dict[Any, CopyCall] = {}
        self._step: Step | None = None
        self._tables: tuple[Any, ArrayView, ArrayView] | None = None
        self._uploads: dict[str, ArrayView] = {}

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.form.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Width of a head of K."""
        return self.form.head_dim

    @property
    def head_dim_v(self) -> int:
        """Width of a head of V."""
        return self.form.head_dim_v

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.form.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.form.block_size

    @property
    def dtype(self) -> DType:
        """What keys and values are stored in."""
        return self.form.dtype

    @property
    def layout(self) -> str:
        """The layout of a layer's pools."""
        return self.form.layout

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales of all layers, filled or not."""
        return sum(a.nbytes for pages in self._pages for a in pages.arrays)

    @property
    def sequences(self) -> list[int]:
        """The sequences there are, in the order they came."""
        return list(self._sequences)

    @property
    def context_lens(self) -> np.ndarray[Any, Any]:
        """(len(sequences),) int32: `length` of each of `sequences`, on the host."""
        return np.array([state.length for state in self._sequences.values()], np.int32)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._blocks.num_free

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that more than one sequence holds."""
        return self._blocks.num_shared

    def length(self, seq: int) -> int:
        """Tokens of a sequence, shared ones included; while a step is under way, those of the layers ahead."""
        return self._state(seq, "PagedKVCacheStore.length", swapped=True).length

    def layer_length(self, layer: int, seq: int) -> int:
        """Tokens that one layer of a sequence holds."""
        operation = "PagedKVCacheStore.layer_length"
        return self._state(seq, operation, swapped=True).lengths[self._layer(layer, operation)]

    def block_table(self, seq: int) -> np.ndarray[Any, Any]:
        """(blocks,) int32: the blocks of a sequence in order, a copy on the host."""
        return np.array(self._state(seq, "PagedKVCacheStore.block_table").blocks, np.int32)

    def keys(self, layer: int) -> CacheArray:
        """A layer's pool of keys where it lies, in the store's layout; not a copy."""
        return CacheArray(self._layers[self._layer(layer, "PagedKVCacheStore.keys")][0], self.runtime)

    def values(self, layer: int) -> CacheArray:
        """A layer's pool of values where it lies, in the store's layout; not a copy."""
        return CacheArray(self._layers[self._layer(layer, "PagedKVCacheStore.values")][1], self.runtime)

    def scales(self, layer: int) -> tuple[CacheArray, CacheArray]:
        """The int8 scales of a layer's keys and values, each (N, bs, H), where they lie.

        Raises:
            DTypeError: the store is not int8.
        """
        operation = "PagedKVCacheStore.scales"
        found = self._layers[self._layer(layer, operation)][2:]
        if not found:
            raise DTypeError(f"{operation}: a {self.dtype.name} store has no scales; only int8 has. Use dtype='int8'.")
        return CacheArray(found[0], self.runtime), CacheArray(found[1], self.runtime)

    def _layer(self, index: int, operation: str) -> int:
        runtime.require_alive(self.runtime, operation)
        if type(index) is int and 0 <= index < self.num_layers:
            return index
        return checks.integer(index, "layer", operation, high=self.num_layers - 1)

    def _state(self, seq: int, operation: str, *, swapped: bool = False) -> SequenceState:
        """The state of a sequence that is there, and in the pool unless `swapped` allows otherwise."""
        runtime.require_alive(self.runtime, operation)
        found = self._sequences.get(seq) if type(seq) is int else None
        if found is None:
            number = checks.integer(seq, "seq", operation)
            found = self._sequences.get(number)
            if found is None:
                what = "was freed" if number < self._next else "was never added"
                raise PositionError(
                    f"{operation}: sequence {number} {what}. There are {len(self._sequences)} sequences; add() or "
                    f"fork() makes one."
                )
        if found.swapped is not None and not swapped:
            raise PositionError(f"{operation}: sequence {seq} is swapped out. Call swap_in({seq}) first.")
        return found

    def _distinct(
        self, ids: Sequence[int], operation: str, remedy: str, *, swapped: bool = False
    ) -> list[SequenceState]:
        """The states of sequences that are named once each."""
        states = [self._state(seq, operation, swapped=swapped) for seq in ids]
        if len(set(ids)) != len(ids):
            twice = next(seq for seq in ids if ids.count(seq) > 1)
            raise PositionError(f"{operation}: sequence {twice} is named twice in seqs. {remedy}")
        return states

    def add(self, token_ids: Any = None) -> int:
        """A new sequence; with token ids, beginning with the blocks it has in common with another.

        Full blocks are shared whose tokens, and all before them, some sequence has appended to every layer, even if
        that sequence was freed and its blocks were not taken since. `length` says how many tokens are there; append
        only the rest, which are taken to be those of ``token_ids``. Pass all but the last to keep one for the model.

        Args:
            token_ids: (n,) integers, on the host or a device; None shares nothing.

        Returns:
            The number of the sequence.

        Raises:
            DTypeError, ShapeError: not a list of integers.

        Cost: none on the device; about 1 us a block.

        Example:
            >>> import numpy as np, tikv
            >>> pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, num_blocks=8, block_size=2)
            >>> prompt = [5, 6, 7, 8, 9]
            >>> a = pool.add(prompt)
            >>> pool.append(0, *np.ones((2, 5, 1, 4), np.float16), [a], cu_seqlens=[0, 5])
            >>> pool.length(pool.add([5, 6, 7, 8, 1])), pool.length(pool.add([1, 6, 7, 8, 9]))
            (4, 0)
        """
        operation = "PagedKVCacheStore.add"
        runtime.require_alive(self.runtime, operation)
        ids = self._host_integers(token_ids, "token_ids", operation) if token_ids is not None else []
        if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
            raise DTypeError(f"{operation}: token_ids hold an integer of more than 64 bits.")
        digests = block_pool.chained_digests(ids, self.block_size)
        shared = self._blocks.prefix(digests)
        self._blocks.acquire(shared)
        count = len(shared)
        return self._new(SequenceState(shared, [count * self.block_size] * self.num_layers, digests, count))

    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens, sharing all blocks; the first to write into one gets a copy of it.

        It may go another way: of the ``token_ids`` that `add` was given, it keeps those of the full blocks that every
        layer holds, and what it appends later is not found by `add`.

        Returns:
            The number of the new sequence.

        Raises:
            PositionError: ``seq`` is none, or is swapped out.

        Cost: none on the device now; later one block in all layers for each shared block that is written into.
        """
        state = self._state(seq, "PagedKVCacheStore.fork")
        self._blocks.acquire(state.blocks)
        self._step = None
        known = state.digests[: min(state.lengths) // self.block_size]
        return self._new(SequenceState(list(state.blocks), list(state.lengths), known, state.registered))

    def _new(self, state: SequenceState) -> int:
        seq = self._next
        self._next += 1
        self._sequences[seq] = state
        return seq

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence, in every layer, and give back the blocks behind them.

        Raises:
            PositionError: ``seq`` is none or is swapped out, or holds fewer than ``n``. Nothing is changed.

        Cost: none on the device.
        """
        operation = "PagedKVCacheStore.truncate"
        state = self._state(seq, operation)
        n = checks.integer(n, "n", operation)
        if n > state.length:
            raise PositionError(
                f"{operation}: sequence {seq} has {state.length} tokens; it cannot keep {n}. "
                f"Keep at most {state.length}."
            )
        keep = -(-n // self.block_size)
        self._blocks.release(state.blocks[keep:])
        del state.blocks[keep:]
        state.lengths = [min(n, held) for held in state.lengths]
        del state.digests[n // self.block_size :]
        state.registered = min(state.registered, len(state.digests))
        self._step = self._tables = None

    def free(self, seq: int) -> None:
        """Forget a sequence. Blocks that no other holds are free; full ones of known tokens can be found until then.

        Raises:
            PositionError: ``seq`` is none.

        Cost: none on the device.
        """
        state = self._state(seq, "PagedKVCacheStore.free", swapped=True)
        self._blocks.release(state.blocks)
        del self._sequences[checks.integer(seq, "seq", "PagedKVCacheStore.free")]
        self._step = self._tables = None

    def swap_out(self, seq: int) -> None:
        """Move a sequence's keys and values to host memory and give back its blocks; `swap_in` brings them back.

        Until then it has a `length` and can be freed, and nothing else.

        Raises:
            PositionError: ``seq`` is none, or is swapped out already.

        Cost: its blocks in all layers are read once; waits for the device.
        """
        operation = "PagedKVCacheStore.swap_out"
        state = self._state(seq, operation)
        swapped = self._to_host(state.blocks)
        self._blocks.release(state.blocks)
        state.blocks, state.swapped = [], swapped
        self._step = self._tables = None

    def swap_in(self, seq: int) -> None:
        """Bring a swapped-out sequence back into the pool. What is found there by its prefix is shared, not copied.

        Raises:
            CapacityError: too few blocks are free. The sequence stays swapped out.
            PositionError: ``seq`` is none, or is not swapped out.

        Cost: the blocks that are not shared are written once in all layers.
        """
        operation = "PagedKVCacheStore.swap_in"
        state = self._state(seq, operation, swapped=True)
        if state.swapped is None:
            raise PositionError(f"{operation}: sequence {seq} is not swapped out. Call swap_out({seq}) first.")
        total = -(-state.length // self.block_size)
        shared = self._blocks.prefix(state.digests[: state.registered])
        self._blocks.acquire(shared)
        try:
            fresh = self._blocks.allocate(total - len(shared), operation)
        except CapacityError:
            self._blocks.release(shared)
            raise
        self._from_host(state.swapped, range(len(shared), total), fresh)
        state.blocks, state.swapped = shared + fresh, None
        state.registered = len(shared)
        self._register(state)
        self._step = self._tables = None

    def _to_host(self, chosen: Sequence[int]) -> list[list[HostArray]]:
        """Copies of these blocks in all layers: the arrays of each of the store's `Pages`, waited for."""
        n, found = len(chosen), []
        for pages in self._pages:
            host = [np.empty((pages.layers * n, *a.shape[1:]), a.dtype.numpy) for a in pages.arrays]
            if n:
                pairs = pages.pairs(chosen, range(n), self.num_blocks, n)
                for array, to in zip(pages.arrays, host, strict=True):
                    paged.swap_blocks(array, to, pairs)
            found.append(host)
        self.runtime.synchronize()
        return found

    def _from_host(self, host: list[list[HostArray]], src: Sequence[int], dst: Sequence[int]) -> None:
        """Write blocks that `_to_host` copied into blocks of the pool, in all layers, and wait for it."""
        if not dst:
            return
        for pages, arrays in zip(self._pages, host, strict=True):
            pairs = pages.pairs(src, dst, len(arrays[0]) // pages.layers, self.num_blocks)
            for array, found in zip(pages.arrays, arrays, strict=True):
                paged.swap_blocks(found, array, pairs)
        self.runtime.synchronize()

    def append(self, layer: int, k: Any, v: Any, seqs: Sequence[int], cu_seqlens: Any = None) -> None:
        """Append new tokens of some sequences to one layer, in one launch.

        A step appends to every layer; blocks are taken by the first layer that needs them.

        Args:
            layer: its index.
            k, v: (T, H, D) and (T, H, D_v), the tokens of the first sequence before those of the second, and so on. Of
                the store's dtype or one that `tikv.copy` converts to it; for int8 float32, float16 or bfloat16.
            seqs: the sequences, each once.
            cu_seqlens: (len(seqs) + 1,) int32 or int64, a list or an array on the host or a device: sequence ``i`` gets
                rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``. None: one token each. Rows behind the last are padding.

        Raises:
            CapacityError: the pool has too few free blocks for all of it. Every sequence is as it was.
            PositionError: a sequence is none, is swapped out or is named twice.
            ShapeError, DTypeError, StaleRuntimeError: arrays that do not fit.

        Exactness, cost: as the class says; shared blocks that are written into are copied first, in one more launch.
        """
        operation = "PagedKVCacheStore.append"
        layer = self._layer(layer, operation)
        k_view, v_view = view(k, "k", operation), view(v, "v", operation)
        checks.rank(k_view, (3,), "k", "(T, H, D)", operation)
        pages = self._layers[layer]
        key = (layer, k_view.key, v_view.key)
        call = self._appends.get(key)
        if call is None:
            index = new_array(k_view.shape[:1], dtypes.int32, self.runtime)
            arrays = [k_view, pages[0], v_view, pages[1], index, *pages[2:]]
            call, _ = paged.plan_write_slots(self.runtime, operation, arrays, self.layout)
            if len(self._appends) >= MAX_PLANS:
                self._appends.clear()
            self._appends[key] = call
        step = self._begin(operation, layer, seqs, cu_seqlens, k_view.shape[0])
        try:
            call.run(operation, [k_view, pages[0], v_view, pages[1], self._index(step), *pages[2:]])
        except BaseException as error:
            self._undo(step, error)
            raise
        self._commit(layer, step)

    def write_qkv(
        self,
        layer: int,
        qkv: Any,
        seqs: Sequence[int],
        cu_seqlens: Any = None,
        *,
        num_q_heads: int,
        norm_rope: qkv_ops.NormRope | None = None,
        rope_positions: Any = None,
        q_layout: str = "token_major",
    ) -> Any:
        """Split fused rows, norm and rotate them, and append their keys and values; `tikv.write_qkv` into the pool.

        Args:
            layer: its index.
            qkv: (T, (Hq + 2 H) * D) rows [Q heads | K heads | V heads].
            seqs, cu_seqlens: as in `append`.
            num_q_heads: Hq.
            norm_rope: a `tikv.NormRope`, or None to split only.
            rope_positions: (T,) positions to rotate by; None for each token's place in its sequence.
            q_layout: of the result, "token_major" (T, Hq, D) or "head_major" (Hq, T, D).

        Returns:
            q, in the dtype of ``qkv``, normed and rotated.

        Raises:
            As `append` and `tikv.write_qkv`. Nothing is written and every sequence is as it was.

        Exactness: the bits of `tikv.write_qkv`.
        Cost: one launch.
        """
        operation = "PagedKVCacheStore.write_qkv"
        layer = self._layer(layer, operation)
        rows = view(qkv, "qkv", operation)
        checks.rank(rows, (2,), "qkv", "(T, (Hq + 2 H) * D)", operation)
        pages = self._layers[layer]
        scales: dict[str, Any] = dict(zip(("k_scale", "v_scale"), pages[2:], strict=False))
        step = self._begin(operation, layer, seqs, cu_seqlens, rows.shape[0])
        try:
            if norm_rope is not None and rope_positions is None:
                rope_positions = self._upload("positions", step.positions)
            q = qkv_ops.write_qkv(
                qkv,
                pages[0],
                pages[1],
                num_q_heads=num_q_heads,
                norm_rope=norm_rope,
                slot_mapping=self._index(step),
                rope_positions=rope_positions,
                layout=self.layout,
                q_layout=q_layout,
                **scales,
            )
        except BaseException as error:
            self._undo(step, error)
            raise
        self._commit(layer, step)
        return q

    def _begin(self, operation: str, layer: int, seqs: Sequence[int], cu_seqlens: Any, tokens: int) -> Step:
        """Where a layer's new tokens go. Takes blocks and copies shared ones; `_commit` or `_undo` ends it."""
        ids = tuple(self._host_integers(seqs, "seqs", operation))
        bounds = self._bounds(operation, len(ids), cu_seqlens, tokens)
        step = self._step
        if (
            step is not None
            and (step.ids, step.bounds, len(step.slots)) == (ids, bounds, tokens)
            and [state.lengths[layer] for state in step.states] == step.starts
        ):
            return step
        states = self._distinct(ids, operation, "Append its tokens in one piece.")
        starts = [state.lengths[layer] for state in states]
        step = self._plan(
            operation, Step(ids, bounds, states, starts, *_positions(starts, bounds, tokens), [], [], [], [])
        )
        self._fill_slots(step)
        return step

    def _bounds(self, operation: str, count: int, cu_seqlens: Any, tokens: int) -> tuple[int, ...]:
        """The cumulated numbers of tokens, which agree with the rows there are."""
        if cu_seqlens is None:
            checks.extent(
                tokens, count, "the number of rows", operation, f"{count} sequences; cu_seqlens=None is one each"
            )
            return tuple(range(count + 1))
        bounds = tuple(self._host_integers(cu_seqlens, "cu_seqlens", operation))
        checks.extent(len(bounds), count + 1, "the length of cu_seqlens", operation, f"{count} sequences")
        if bounds[0] != 0 or bounds[-1] > tokens or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ShapeError(
                f"{operation}: cu_seqlens={list(bounds)} must begin with 0, never fall, and end at most at the "
                f"{tokens} rows given."
            )
        return bounds

    def _plan(self, operation: str, step: Step) -> Step:
        """Take the blocks that the step needs and copy the shared ones it writes into; all of them or nothing."""
        size, pool = self.block_size, self._blocks
        wanted: list[list[int]] = []  # of each sequence, the places in its table that get a block
        copied: dict[int, int] = {}
        for state, start, tokens in zip(step.states, step.starts, np.diff(step.bounds).tolist(), strict=True):
            have = len(state.blocks)
            places = range(start // size, -(-(start + tokens) // size)) if tokens else range(0)
            mine = []
            for place in places:
                if place >= have:
                    mine.append(place)
                    continue
                block = state.blocks[place]
                if pool.holders(block) - copied.get(block, 0) > 1:
                    copied[block] = copied.get(block, 0) + 1
                    mine.append(place)
                    step.left.append(block)
                else:
                    step.overwritten.append(block)
            wanted.append(mine)
        step.fresh = pool.allocate(sum(map(len, wanted)), operation, step.lost)
        fresh, moved = iter(step.fresh), []
        for state, mine in zip(step.states, wanted, strict=True):
            table = state.blocks
            if mine:
                table = table + [-1] * (mine[-1] + 1 - len(table))
                for place in mine:
                    block = next(fresh)
                    if table[place] >= 0:
                        moved.append((table[place], block))
                        step.lost.pop(block, None)
                    table[place] = block
            step.tables.append(table)
        if moved:
            try:
                self._copy_blocks(moved)
            except BaseException as error:
                self._undo(step, error)
                raise
        return step

    def _copy_blocks(self, moved: list[tuple[int, int]]) -> None:
        src, dst = zip(*moved, strict=True)
        for pages in self._pages:
            pairs = pages.pairs(src, dst, self.num_blocks, self.num_blocks)
            for k, v in zip(pages.arrays[::2], pages.arrays[1::2], strict=True):
                paged.copy_blocks(k, v, pairs)

    def _fill_slots(self, step: Step) -> None:
        size = self.block_size
        for table, first, end in zip(step.tables, step.bounds, step.bounds[1:], strict=False):
            if end - first == 1:
                position = int(step.positions[first])
                step.slots[first] = table[position // size] * size + position % size
            elif end > first:
                step.slots[first:end] = block_pool.slots_of(table, step.positions[first:end], size)

    def _index(self, step: Step) -> ArrayView:
        """The slots of a step on the device; every layer of the step uses the same."""
        if step.index is None:
            self._step = None  # the step before this one had its slots in the same memory
            step.index = self._upload("slots", step.slots)
        return step.index

    def _upload(self, name: str, array: np.ndarray[Any, Any]) -> ArrayView:
        """A host array on the device, in the memory that the last one of this name and shape had."""
        found = self._uploads.get(name)
        if found is None or found.shape != array.shape:
            found = self._uploads[name] = new_array(array.shape, dtypes.int32, self.runtime)
        write_host(array, found)
        return found

    def _undo(self, step: Step, error: BaseException) -> None:
        """Give back the blocks of a step that failed; with what they were found by, if it was refused, so not begun."""
        if not step.done:
            self._blocks.give_back(step.fresh, step.lost if isinstance(error, TikvError) else {})

    def _commit(self, layer: int, step: Step) -> None:
        if not step.done:
            for state, table in zip(step.states, step.tables, strict=True):
                state.blocks = table
            for block in step.overwritten:
                self._blocks.forget(block)
            self._blocks.release(step.left)
            if step.fresh:
                self._tables = None
            step.done = True
            self._step = step
        for i, (state, start) in enumerate(zip(step.states, step.starts, strict=True)):
            state.lengths[layer] = start + step.bounds[i + 1] - step.bounds[i]
            if state.registered < len(state.digests):
                self._register(state)

    def _register(self, state: SequenceState) -> None:
        """Let others find the full blocks that every layer has written by now."""
        full = min(min(state.lengths) // self.block_size, len(state.digests))
        for i in range(state.registered, full):
            self._blocks.register(state.blocks[i], state.digests[i])
        state.registered = max(state.registered, full)

    def _host_integers(self, values: Any, name: str, operation: str) -> list[int]:
        """A list of integers, from wherever they lie.

        Raises:
            DTypeError, ShapeError: it is none.
        """
        if isinstance(values, list | tuple | range):
            if all(type(n) is int for n in values):
                return list(values)
            try:
                values = np.asarray(values)
            except ValueError as error:  # lists of different lengths
                raise ShapeError(f"{operation}: {name} must be a list of integers, not {values!r}.") from error
        if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
            return values.tolist()  # type: ignore[no-any-return]
        if isinstance(values, int):
            raise ShapeError(f"{operation}: {name} is {values}, one integer. Pass a list: [{values}].")
        array = view(values, name, operation)
        checks.rank(array, (1,), name, "a list of integers", operation)
        if array.dtype not in dtypes.INDICES:
            raise DTypeError(f"{operation}: {name} is {describe(array)}. Pass integers, int32 or int64.")
        host = as_numpy(array) if array.device == "cpu" else read_host(array, self.runtime)
        found: list[int] = host.tolist()
        return found

    def attend(
        self,
        layer: int,
        q: Any,
        seqs: Sequence[int],
        *,
        scale: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention of queries over what one layer of their sequences holds: `tikv.paged_decode_attention` on the pool.

        Args:
            layer: its index; its new tokens have been appended.
            q: (B, Hq, D), one query a sequence; or (B, Hq, T, D), the last T tokens of each, causal.
            seqs: the B sequences.
            scale: of the scores; None for 1 / sqrt(D).
            window: tokens that a query sees, its own included; None for all.
            return_lse: also return the log-sum-exp of the scores.

        Returns:
            out, of q's dtype, (B, Hq, D_v) or (B, Hq, T, D_v); with ``return_lse`` also lse, float32 without the last
            axis.

        Raises:
            PositionError: a sequence is none, is swapped out, or has some tokens but fewer than queries.
            ShapeError, DTypeError: q does not fit.

        Exactness: float32 arithmetic, one rounding at the end. A sequence without tokens gives 0 and -inf.
        Cost: one launch; each key and value is read once for all query heads of its KV head.
        """
        operation = "PagedKVCacheStore.attend"
        layer = self._layer(layer, operation)
        ids = tuple(self._host_integers(seqs, "seqs", operation))
        states = [self._state(seq, operation) for seq in ids]
        rows = view(q, "q", operation)
        lengths = tuple(state.lengths[layer] for state in states)
        if rows.ndim == 4:
            for seq, length in zip(ids, lengths, strict=True):
                if 0 < length < rows.shape[2]:
                    raise PositionError(
                        f"{operation}: {rows.shape[2]} queries of sequence {seq}, which has {length} tokens in layer "
                        f"{layer}. The queries are the last tokens: append theirs first, or pass fewer."
                    )
        tables, lens = self._on_device(ids, states, lengths)
        pages = self._layers[layer]
        scales: dict[str, Any] = dict(zip(("k_scale", "v_scale"), pages[2:], strict=False))
        return plan.paged_decode_attention(
            q,
            pages[0],
            pages[1],
            tables,
            lens,
            layout=self.layout,
            scale=scale,
            window=window,
            return_lse=return_lse,
            **scales,
        )

    def _on_device(
        self, ids: tuple[int, ...], states: list[SequenceState], lengths: tuple[int, ...]
    ) -> tuple[ArrayView, ArrayView]:
        """(B, most blocks) block tables padded with -1, and (B,) lengths; kept for the next layer of the step."""
        kept = self._tables
        if kept is None or kept[0] != (ids, lengths):
            most = max([1, *(len(state.blocks) for state in states)])
            table = np.full((len(ids), most), -1, np.int32)
            for row, state in zip(table, states, strict=True):
                row[: len(state.blocks)] = state.blocks
            lens = np.array(lengths, np.int32)
            self._tables = None
            kept = self._tables = ((ids, lengths), self._upload("tables", table), self._upload("lengths", lens))
        return kept[1], kept[2]

    def tokens(self, layer: int, seq: int) -> tuple[CacheArray, CacheArray]:
        """What one layer of a sequence holds, as a copy: K (length, H, D), V (length, H, D_v). int8 comes as float32.

        Raises:
            PositionError: ``seq`` is none, or is swapped out.

        Cost: each row is read once and written once; a launch for K and one for V.
        """
        operation = "PagedKVCacheStore.tokens"
        layer = self._layer(layer, operation)
        state = self._state(seq, operation)
        length = state.lengths[layer]
        dtype = dtypes.float32 if self.dtype is dtypes.int8 else self.dtype
        pages = self._layers[layer]
        table = np.array(state.blocks[: -(-length // self.block_size)], np.int32)
        found = []
        for stream, width in enumerate((self.head_dim, self.head_dim_v)):
            out = new_array((length, self.num_kv_heads, width), dtype, self.runtime)
            if length:
                scale = pages[2 + stream] if self.dtype is dtypes.int8 else None
                paged.gather_paged(pages[stream], table, length, layout=self.layout, scale=scale, out=out)
            found.append(CacheArray(out, self.runtime))
        return found[0], found[1]

    def save(self, path: str | os.PathLike[str], seqs: Sequence[int] | None = None) -> None:
        """Save sequences to a .safetensors file: written beside it, synced, then renamed.

        A block that several of them hold is saved once and shared again when it is loaded, and prefixes are found again
        by `add`. Of a block only the slots that they have filled are saved, the others as zeros. A sequence that is
        swapped out comes back swapped out.

        Args:
            path: ends in ``.safetensors``; a file of that name is replaced in one step.
            seqs: the sequences, each once; None for all there are.

        Raises:
            CacheFileError: another ending, or the system refuses. An old file stays as it was.
            PositionError: a sequence is none, or is named twice.

        Exactness: every bit. Cost: their blocks, once to the host and once to the disk.

        Example:
            >>> import tempfile, numpy as np, tikv
            >>> form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "num_blocks": 8, "block_size": 2}
            >>> pool, other = tikv.PagedKVCacheStore(**form), tikv.PagedKVCacheStore(**form)
            >>> prompt = pool.add([5, 6, 7])
            >>> pool.append(0, *np.ones((2, 3, 1, 4), np.float16), [prompt], cu_seqlens=[0, 3])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     pool.save(f"{folder}/prompt.safetensors", [prompt])
            ...     (again,) = other.load_sequences(f"{folder}/prompt.safetensors")
            >>> other.length(again), other.length(other.add([5, 6, 8]))
            (3, 2)
        """
        operation = "PagedKVCacheStore.save"
        runtime.require_alive(self.runtime, operation)
        files.target_of(path, operation)
        ids = self.sequences if seqs is None else self._host_integers(seqs, "seqs", operation)
        states = self._distinct(ids, operation, "Name it once.", swapped=True)
        held = list(dict.fromkeys(block for state in states for block in state.blocks))
        parts = [self._to_host(held), *(state.swapped for state in states if state.swapped is not None)]
        place = {block: i for i, block in enumerate(held)}
        count, tables = len(held), []
        for state in states:
            if state.swapped is None:
                tables.append([place[block] for block in state.blocks])
            else:
                tables.append(list(range(count, count + self._table_size(state.length))))
                count += len(tables[-1])
        filled = np.zeros((self.num_layers, count), np.int64)  # slots of each block
        for state, table in zip(states, tables, strict=True):
            behind = np.array(state.lengths)[:, None] - self.block_size * np.arange(len(table))
            filled[:, table] = np.maximum(filled[:, table], behind)
        tensors = {}
        for layer, found in enumerate(zip(*map(self._rows, parts), strict=True)):
            unused = np.arange(self.block_size) >= filled[layer, :, None]
            for name, pieces in zip(self.form.names(), zip(*found, strict=True), strict=True):
                tensors[f"layers.{layer}.{name}"] = array = np.concatenate(pieces)
                array[unused] = 0
        sequences = [
            {
                "seq": seq,
                "blocks": table,
                "lengths": state.lengths,
                "digests": [digest.hex() for digest in state.digests],
                "swapped": state.swapped is not None,
            }
            for seq, state, table in zip(ids, states, tables, strict=True)
        ]
        facts = {"form": self._facts(), "next": self._next, "sequences": sequences}
        files.write(path, "PagedKVCacheStore", tensors, facts, operation)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, num_blocks: int | None = None) -> PagedKVCacheStore:
        """A new store with the form and the sequences of a saved one, under their numbers, on the arch that runs now.

        Args:
            path: a file that `save` wrote.
            num_blocks: blocks of the pool; None for as many as the saved one had.

        Raises:
            CacheFileError: the file is missing, truncated, damaged, or not one that `save` wrote.
            CapacityError, DTypeError: this arch cannot hold it, or ``num_blocks`` are too few.
        """
        operation = "PagedKVCacheStore.load"
        if num_blocks is not None:
            num_blocks = checks.integer(num_blocks, "num_blocks", operation, low=1)
        tensors, facts = files.read(path, "PagedKVCacheStore", operation)
        with files.understanding(path, operation):
            store = cls(**facts["form"] | ({} if num_blocks is None else {"num_blocks": num_blocks}))
            numbers = [saved["seq"] for saved in facts["sequences"]]
            store._next = max([facts["next"], *(number + 1 for number in numbers)])
        store._take_over(path, tensors, facts, numbers, operation)
        return store

    def load_sequences(self, path: str | os.PathLike[str]) -> list[int]:
        """Add the sequences of a file to this pool: a prompt that was computed before, for example.

        Blocks that they share with each other are shared here too; none is shared with sequences that are here already.
        `add` finds their prefixes from now on.

        Args:
            path: a file that `save` wrote, of the same layers, heads, widths, dtype and block size; in any layout.

        Returns:
            Their numbers here, in the order in which they were saved.

        Raises:
            CacheFileError: the file is missing, truncated, damaged, or not one that `save` wrote.
            ShapeError, DTypeError: it is of another form.
            CapacityError: too few blocks are free.
            Whatever is raised, the pool is as it was.

        Exactness: every bit. Cost: the file is read once, its blocks are written once in all layers.
        """
        operation = "PagedKVCacheStore.load_sequences"
        runtime.require_alive(self.runtime, operation)
        tensors, facts = files.read(path, "PagedKVCacheStore", operation)
        with files.understanding(path, operation):
            theirs = facts["form"]
            numbers = list(range(self._next, self._next + len(facts["sequences"])))
            other = [name for name, mine in self._facts().items() if theirs[name] != mine]
        for name in other:
            if name not in ("num_blocks", "layout"):
                raise (DTypeError if "dtype" in name else ShapeError)(
                    f"{operation}: the pool of {str(path)!r} had {name}={theirs[name]}, this one has "
                    f"{self._facts()[name]}. Use PagedKVCacheStore.load, or a pool of that form."
                )
        self._take_over(path, tensors, facts, numbers, operation)
        self._next += len(numbers)
        return numbers

    def _facts(self) -> dict[str, Any]:
        """The arguments that make a store of this form."""
        return {"num_layers": self.num_layers, **self.form.facts()}

    def _take_over(
        self,
        path: str | os.PathLike[str],
        tensors: dict[str, HostArray],
        facts: dict[str, Any],
        numbers: list[int],
        operation: str,
    ) -> None:
        """Make the sequences of a file under these numbers; all of them or none.

        Raises:
            CacheFileError: the file contradicts itself.
            CapacityError: too few blocks are free.
        """
        with files.understanding(path, operation):
            rows = self._saved_rows(tensors)
            saved = [self._saved_state(sequence, len(rows[0][0])) for sequence in facts["sequences"]]
            if len({*numbers}) != len(saved) or any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError(f"the sequences have the numbers {numbers}")
        used = sorted({block for state, swapped in saved if not swapped for block in state.blocks})
        fresh = self._blocks.allocate(len(used), operation)
        try:
            self._from_host(self._pooled([[a[used] for a in layer] for layer in rows]), range(len(used)), fresh)
        except BaseException:
            self._blocks.release(fresh)
            raise
        of = dict(zip(used, fresh, strict=True))
        for number, (state, swapped) in zip(numbers, saved, strict=True):
            if swapped:
                state.swapped = self._pooled([[a[state.blocks] for a in layer] for layer in rows])
                state.blocks = []
                state.registered = min(min(state.lengths) // self.block_size, len(state.digests))
            else:
                state.blocks = [of[block] for block in state.blocks]
                self._blocks.acquire(state.blocks)
                self._register(state)
            self._sequences[number] = state
        self._blocks.release(fresh)
        self._step = self._tables = None

    def _saved_rows(self, tensors: dict[str, HostArray]) -> list[list[HostArray]]:
        """The arrays of each layer in a file.

        Raises:
            KeyError, ValueError: one is missing or has another form than this store's.
        """
        names = self.form.names()
        count = len(tensors["layers.0.k"])
        for layer in range(self.num_layers):
            for name, (shape, dtype) in names.items():
                array = tensors[f"layers.{layer}.{name}"]
                if array.shape != (count, *shape) or array.dtype != dtype.numpy:
                    raise ValueError(
                        f"{name} of layer {layer} is {array.dtype.name} {array.shape} where {dtype.name} "
                        f"{(count, *shape)} is needed"
                    )
        return [[tensors[f"layers.{layer}.{name}"] for name in names] for layer in range(self.num_layers)]

    def _saved_state(self, sequence: dict[str, Any], count: int) -> tuple[SequenceState, bool]:
        """A sequence of a file, its blocks numbered as there, and whether it was swapped out.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        found, lengths = sequence["blocks"], sequence["lengths"]
        digests = [bytes.fromhex(digest) for digest in sequence["digests"]]
        if any(type(n) is not int or n < 0 for n in [*found, *lengths]) or max(found, default=-1) >= count:
            raise ValueError(f"sequence {sequence['seq']} names blocks or lengths that are none")
        if len({*found}) != len(found) or len(lengths) != self.num_layers:
            raise ValueError(f"sequence {sequence['seq']} has {len(lengths)} layers, or a block twice")
        if len(found) != self._table_size(max(lengths)):
            raise ValueError(f"sequence {sequence['seq']} has {len(found)} blocks for {max(lengths)} tokens")
        return SequenceState(found, lengths, digests), bool(sequence["swapped"])

    def _table_size(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def _rows(self, host: list[list[HostArray]]) -> list[list[HostArray]]:
        """What `_to_host` copied, by layer, as layout NHD has it."""
        found = []
        for pages, arrays in zip(self._pages, host, strict=True):
            n = len(arrays[0]) // pages.layers
            for i in range(pages.layers):
                found.append([self.form.to_rows(s, a[i * n : (i + 1) * n]) for s, a in enumerate(arrays)])
        return found

    def _pooled(self, rows: list[list[HostArray]]) -> list[list[HostArray]]:
        """The reverse of `_rows`."""
        layers = iter([[self.form.from_rows(s, a) for s, a in enumerate(arrays)] for arrays in rows])
        return [
            [np.concatenate(a) for a in zip(*(next(layers) for _ in range(pages.layers)), strict=True)]
            for pages in self._pages
        ]

    def _picture(self) -> str:
        rows = [
            draw.Table(seq, state.length, state.blocks, state.swapped is not None)
            for seq, state in self._sequences.items()
        ]
        return draw.table(
            repr(self), self.block_size, self.num_blocks, self.num_free_blocks, self._blocks.holders, rows
        )

    def __len__(self) -> int:
        """How many sequences there are; so an empty store is false: ask ``store is not None`` whether there is one."""
        return len(self._sequences)

    def __repr__(self) -> str:
        width = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}|{self.head_dim_v}"
        used = self.num_blocks - self.num_free_blocks
        swapped = sum(state.swapped is not None for state in self._sequences.values())
        return (
            f"PagedKVCacheStore({self.num_layers} layers x {self.num_kv_heads} heads x {width}, {self.dtype.name}, "
            f"{self.layout}, {len(self)} sequences{f' ({swapped} swapped out)' if swapped else ''}, "
            f"{used}/{self.num_blocks} blocks of {self.block_size} tokens used, {self.num_shared_blocks} shared, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )


def _positions(
    starts: Sequence[int], bounds: Sequence[int], rows: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(slots still unknown, position of each row in its sequence), int32; rows behind the last bound are padding."""
    counts = np.diff(bounds)
    positions = np.zeros(rows, np.int32)
    shift = np.repeat(np.asarray(starts, np.int64) - np.asarray(bounds[:-1], np.int64), counts)
    positions[: bounds[-1]] = np.arange(bounds[-1]) + shift
    return np.full(rows, -1, np.int32), positions
