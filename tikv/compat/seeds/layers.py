"""One layer of one sequence, as in the layer trait of the third seed: the caller keeps the count and the blocks.

`ContiguousKVLayer` and `PagedKVLayer` implement each name of that trait, in every dtype; `SEED_NAMES` maps the names. A
step has three calls: write, from `len` on; `set_len`; attend. `KVCacheStore` and `PagedKVCacheStore` keep the count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import Array, Arrays, ArrayView, CacheArray, Views, runtime_of, to_device, write_host
from tikv.compat.seeds.kv_layer import KVLayer
from tikv.errors import CapacityError, DTypeError, PositionError, ShapeError
from tikv.ops import checks, copy, paged, rope
from tikv.ops.attention.call import AttentionCall, Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.paged import PagedLayout
from tikv.ops.attention.request import AttendRequest
from tikv.ops.write_qkv import write_fused
from tikv.ops.write_qkv_codes import FusedTarget
from tikv.stores.layers.append import Appends
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory
from tikv.stores.locking import locked
from tikv.stores.picture import counted
from tikv.stores.pools import blocks as block_pool
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.memory import LayerPools
from tikv.stores.row_format import RowFormat, RowFormats, plain_format

# Each name of the seed's trait and its names here. A `_mut` form has the same name: mutable properties are assigned.
SEED_NAMES: dict[str, tuple[str, ...]] = {
    "alloc_contig": ("ContiguousKVLayer.alloc_contig",),
    "alloc_paged": ("PagedKVLayer.alloc_paged",),
    "len": ("ContiguousKVLayer.__len__", "PagedKVLayer.__len__"),
    "set_len": ("ContiguousKVLayer.set_len", "PagedKVLayer.set_len"),
    "capacity": ("ContiguousKVLayer.capacity", "PagedKVLayer.capacity"),
    "block_size": ("ContiguousKVLayer.block_size", "PagedKVLayer.block_size"),
    "num_kv_heads": ("ContiguousKVLayer.num_kv_heads", "PagedKVLayer.num_kv_heads"),
    "head_dim": ("ContiguousKVLayer.head_dim", "PagedKVLayer.head_dim"),
    "is_paged": ("ContiguousKVLayer.is_paged", "PagedKVLayer.is_paged"),
    "block_table": ("PagedKVLayer.block_table",),
    "context_lens": ("PagedKVLayer.context_lens",),
    "paged_block_indices": ("PagedKVLayer.paged_block_indices",),
    "ensure_contig_capacity": ("ContiguousKVLayer.ensure_contig_capacity",),
    "paged_write": ("PagedKVLayer.paged_write",),
    "contig_write": ("ContiguousKVLayer.contig_write",),
    "paged_decode_attention": ("PagedKVLayer.paged_decode_attention",),
    "contig_decode_attention": ("ContiguousKVLayer.contig_decode_attention",),
}


class ContiguousKVLayer(KVLayer):
    """Keys and values of one sequence in one layer, head-major (num_kv_heads, capacity, head_dim), which can grow.

    Args:
        capacity: tokens that fit.
        num_kv_heads: heads of K and V.
        head_dim: width of a head.
        dtype: float32, float16, bfloat16, or int8 with a scale per token and head.
        scale_dtype: dtype of the int8 scales (num_kv_heads, capacity), float16 or float32.

    Raises:
        DTypeError, PositionError: an argument is not valid.

    Threads: each call that writes or reads is atomic; calls of several threads run one after the other.
    Source: ``KvLayer::alloc_contig``, whose int8 form panics; here every dtype works.

    Examples:
        >>> import numpy as np, tikv
        >>> layer = tikv.ContiguousKVLayer.alloc_contig(8, 1, 4, dtype="int8")
        >>> qkv = np.ones((3, (2 + 1 + 1) * 4), np.float32)
        >>> q = layer.contig_write(qkv, num_q_heads=2)
        >>> layer.set_len(len(layer) + 3)
        >>> layer.contig_decode_attention(q)[:, 0, 0].round(2).tolist(), len(layer), layer.is_paged
        ([1.0, 1.0, 1.0], 3, False)
    """

    _remedy = "Call ensure_contig_capacity({}) first."

    def __init__(
        self, capacity: int, num_kv_heads: int, head_dim: int, *, dtype: Any = "float16", scale_dtype: Any = "float16"
    ) -> None:
        operation = "ContiguousKVLayer"
        live = runtime_of()
        capacity = checks.integer(capacity, "capacity", operation, low=1)
        num_kv_heads = checks.integer(num_kv_heads, "num_kv_heads", operation, low=1)
        head_dim = checks.integer(head_dim, "head_dim", operation, low=1)
        stored, scales = plain_format(dtype, scale_dtype, live, operation)
        row = RowFormat(stored, head_dim)
        self._rows = RowFormats(row, row, scales or dtypes.float16)
        super().__init__(num_kv_heads, head_dim, stored, live, capacity, 0)
        self._arrays = self._allocate(capacity)

    @classmethod
    def alloc_contig(
        cls, capacity: int, num_kv_heads: int, head_dim: int, *, dtype: Any = "float16", scale_dtype: Any = "float16"
    ) -> ContiguousKVLayer:
        """The constructor, under its name in the source design."""
        return cls(capacity, num_kv_heads, head_dim, dtype=dtype, scale_dtype=scale_dtype)

    def _allocate(self, capacity: int) -> list[ArrayView]:
        """Allocate the arrays of a store of one layer: K, V and, for int8, their scales."""
        self._layer = Layer(0, capacity, None, 0)
        memory = LayerMemory(self.runtime, [self._layer], self._rows, self.num_kv_heads, 1)
        self._appends = Appends(memory)
        return [a.restrided(a.shape[1:], a.strides[1:]) for a in self._layer.arrays]

    @property
    def keys(self) -> CacheArray:
        """(num_kv_heads, capacity, head_dim): the keys in place, not a copy."""
        return CacheArray(self._arrays[0], self.runtime)

    @property
    def values(self) -> CacheArray:
        """(num_kv_heads, capacity, head_dim): the values in place, not a copy."""
        return CacheArray(self._arrays[1], self.runtime)

    @locked
    def ensure_contig_capacity(self, required: int) -> None:
        """Grow to at least ``required`` slots; existing tokens keep every bit.

        Raises:
            PositionError: ``required`` is not a valid count.

        Cost: nothing if there are enough slots; else the `len` tokens are read and written once, into new memory.
            Arrays returned earlier keep the old memory.
        """
        operation = "ContiguousKVLayer.ensure_contig_capacity"
        runtime.require_alive(self.runtime, operation)
        required = checks.integer(required, "required", operation)
        if required <= self.capacity:
            return
        old, new = self._arrays, self._allocate(required)
        for i in range(0, len(old), 2):
            source, room = ([_rows(a) for a in arrays[i : i + 2]] for arrays in (old, new))
            copy.copy_kv(*source, *room, position=0, num_tokens=self._len, src_layout="head_major")
        self._arrays, self._capacity, self._slots = new, required, required

    @locked
    def contig_write(
        self,
        rows: Array,
        *,
        num_q_heads: int,
        norm_rope: rope.NormRope | None = None,
        rope_positions: Array | None = None,
        q_layout: str = "token_major",
    ) -> Array:
        """Split fused rows, normalise and rotate them, and write their keys and values from slot `len` on.

        `len` does not change.

        Args:
            rows: (T, (Hq + 2 * num_kv_heads) * head_dim) rows [Q heads | K heads | V heads].
            num_q_heads: Hq.
            norm_rope: a `tikv.NormRope`, or None to split only.
            rope_positions: (T,) positions to rotate by; None for ``len + arange(T)``.
            q_layout: layout of the result, "token_major" (T, Hq, D) or "head_major" (Hq, T, D).

        Returns:
            q, in the dtype of ``rows``.

        Raises:
            CapacityError: ``len + T`` is more than `capacity`. Nothing is written.
            ShapeError, DTypeError, OptionError, PositionError: as `tikv.write_qkv`.

        Exactness, cost: as `tikv.write_qkv`; one launch.
        """
        operation = "ContiguousKVLayer.contig_write"
        self._end(operation, rows)
        k, v, *_ = self._arrays
        target = FusedTarget(k, v, position=self._len, **self._scales())
        return write_fused(
            operation, rows, target, num_q_heads=num_q_heads, norm_rope=norm_rope, rope_positions=rope_positions,
            q_layout=q_layout,
        )  # fmt: skip

    @locked
    def contig_decode_attention(
        self,
        q: Array,
        *,
        q_layout: str = "token_major",
        scale: float | None = None,
        causal: bool = True,
        window: int | None = None,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
    ) -> Arrays:
        """Attention of the queries of the newest T tokens over the `len` tokens.

        Args:
            q: (T, Hq, D) token-major or (Hq, T, D) head-major, as ``q_layout`` says.
            q_layout: layout of ``q`` and of the result.
            scale: factor of the scores; None for 1 / sqrt(D).
            causal: each query sees only keys up to its own.
            window: tokens that a query sees, its own included; None for all.
            sink_logits, alibi_slopes: as in `tikv.decode_attention`.
            return_mass, mass_queries, mass_into: as in `extend`.

        Returns:
            An array like ``q``; with ``return_mass`` also the mass.

        Raises:
            PositionError, ShapeError, DTypeError, OptionError: as `tikv.decode_attention`.

        Exactness, cost: as `tikv.decode_attention`.
        """
        request = AttendRequest(
            scale=scale, window=window, sink_logits=sink_logits, alibi_slopes=alibi_slopes, return_mass=return_mass,
            mass_queries=mass_queries, mass_into=mass_into, causal=causal,
        )  # fmt: skip
        lens = np.array([self._len], np.int32)
        return self._attend("ContiguousKVLayer.contig_decode_attention", q, q_layout, lens, request)

    def _call(self, operation: str, q: ArrayView, lens: Array, request: AttendRequest) -> AttentionCall:
        k, v, *_ = self._arrays
        scales = {name: a.batch_of_one() for name, a in self._scales().items()}
        caches = Caches(CONTIGUOUS, k.batch_of_one(), v.batch_of_one(), lens, **scales)
        return attention_call(operation, q, caches, request)

    def _write(self, operation: str, rows: list[ArrayView]) -> None:
        self._layer.length = self._len
        self._appends.append(operation, self._layer, Views(rows), "token_major")


def _rows(a: ArrayView) -> ArrayView:
    """K, V or their scales as rows (H, capacity, width)."""
    return a if a.ndim == 3 else a.restrided((*a.shape, 1), (*a.strides, 1))


class KVPool(runtime.DeepCopied):
    """One layer's pool of blocks, which `PagedKVLayer`s of many sequences share.

    Args:
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        num_kv_heads, head_dim, dtype, scale_dtype: as in `ContiguousKVLayer`; int8 scales are (num_blocks, block_size,
            num_kv_heads).
        layout: "NHD", "HND" or "VLLM", as in `tikv.write_slots`.

    Raises:
        CapacityError: the pool is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument is not valid.
    """

    instead = "Use copy.deepcopy(); for another process, copy_to_host() what `keys` and `values` hold."

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = "float16",
        layout: str = "NHD",
        scale_dtype: Any = "float16",
    ) -> None:
        self.runtime = runtime_of()
        plain_format(dtype, scale_dtype, self.runtime, "KVPool")  # groups of codes are refused
        self.form = PoolConfig.checked(
            "KVPool",
            self.runtime,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            scale_dtype=scale_dtype,
            layout=layout,
        )
        self.arrays = LayerPools(self.form, 1, self.runtime).layers[0]

    @property
    def keys(self) -> CacheArray:
        """The pool of keys in place, in the pool's layout; not a copy."""
        return CacheArray(self.arrays[0], self.runtime)

    @property
    def values(self) -> CacheArray:
        """The pool of values in place, in the pool's layout; not a copy."""
        return CacheArray(self.arrays[1], self.runtime)

    @property
    def scales(self) -> tuple[CacheArray, CacheArray]:
        """The int8 scales of keys and values, each (num_blocks, block_size, num_kv_heads), in place.

        Raises:
            DTypeError: the pool is not int8.
        """
        if len(self.arrays) == 2:
            raise DTypeError(f"KVPool.scales: a {self.form.rows.name} pool has no scales; only int8 has.")
        return CacheArray(self.arrays[2], self.runtime), CacheArray(self.arrays[3], self.runtime)

    def __repr__(self) -> str:
        form = self.form
        return (
            f"KVPool({counted(form.num_blocks, 'block')} of {form.block_size} x {counted(form.num_kv_heads, 'head')} x "
            f"{form.rows.width}, {form.rows.name}, {form.layout}, {self.runtime.arch})"
        )


class PagedKVLayer(KVLayer):
    """Keys and values of one sequence in one layer, in blocks that the caller assigns to it from a pool.

    Args:
        max_blocks_per_seq: blocks that the sequence may have.
        block_size, num_kv_heads, head_dim, dtype, layout, scale_dtype: as in `KVPool`; a given pool must agree.
        pool: a `KVPool` that many sequences share; None makes a pool of its own, with ``max_blocks_per_seq`` blocks.

    Raises:
        ShapeError: the given pool does not agree with the other arguments.
        TikvError: as `KVPool` raises it.

    Threads: each call that writes or reads is atomic; calls of several threads run one after the other.
    Source: ``KvLayer::alloc_paged``, whose int8 form gives each sequence its own pool, but numbers the blocks of all
        sequences together; here the pool is an object, of any dtype, that sequences share.

    Examples:
        >>> import numpy as np, tikv
        >>> pool = tikv.KVPool(4, 2, 1, 4, dtype="int8")
        >>> a, b = (tikv.PagedKVLayer.alloc_paged(3, 2, 1, 4, dtype="int8", pool=pool) for _ in "ab")
        >>> a.paged_block_indices, b.paged_block_indices = [3, 0], [1]
        >>> q = a.paged_write(np.ones((3, (2 + 1 + 1) * 4), np.float32), num_q_heads=2)
        >>> a.set_len(3)
        >>> a.paged_decode_attention(q)[:, 1, 0].round(2).tolist(), a.block_table.copy_to_host().tolist()
        ([1.0, 1.0, 1.0], [3, 0, -1])
    """

    _remedy = "Assign more paged_block_indices."

    def __init__(
        self,
        max_blocks_per_seq: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = "float16",
        layout: str = "NHD",
        scale_dtype: Any = "float16",
        pool: KVPool | None = None,
    ) -> None:
        operation = "PagedKVLayer"
        live = runtime_of()
        self.max_blocks_per_seq = checks.integer(max_blocks_per_seq, "max_blocks_per_seq", operation, low=1)
        if pool is None:
            pool = KVPool(
                self.max_blocks_per_seq,
                block_size,
                num_kv_heads,
                head_dim,
                dtype=dtype,
                layout=layout,
                scale_dtype=scale_dtype,
            )
        form = pool.form
        stored, scales = plain_format(dtype, scale_dtype, live, operation)
        keys = form.rows.k
        theirs_scales = form.rows.scale_dtype if form.scale_names else None
        ours = (block_size, num_kv_heads, head_dim, stored, scales, layout)
        theirs = (form.block_size, form.num_kv_heads, keys.width, keys.dtype, theirs_scales, form.layout)
        if ours != theirs:
            names = ("block_size", "num_kv_heads", "head_dim", "dtype", "scale_dtype", "layout")
            wrong = [f"{n}={b}, not {a}" for n, a, b in zip(names, ours, theirs, strict=True) if a != b]
            raise ShapeError(f"{operation}: the pool has {'; '.join(wrong)} ({pool}). Pass the pool's own values.")
        runtime.require_alive(pool.runtime, operation)
        capacity = self.max_blocks_per_seq * form.block_size
        super().__init__(form.num_kv_heads, keys.width, stored, live, capacity, form.block_size)
        self.pool = pool
        self._arrays = pool.arrays
        self._blocks: list[int] = []
        self._table = to_device(np.full(self.max_blocks_per_seq, -1, np.int32), self.runtime)
        self._lens = to_device(np.zeros(1, np.int32), self.runtime)

    @classmethod
    def alloc_paged(
        cls,
        max_blocks_per_seq: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: Any = "float16",
        layout: str = "NHD",
        scale_dtype: Any = "float16",
        pool: KVPool | None = None,
    ) -> PagedKVLayer:
        """The constructor, under its name in the source design."""
        options = {"dtype": dtype, "layout": layout, "scale_dtype": scale_dtype, "pool": pool}
        return cls(max_blocks_per_seq, block_size, num_kv_heads, head_dim, **options)

    @property
    def block_table(self) -> CacheArray:
        """(max_blocks_per_seq,) int32 on the device: `paged_block_indices`, padded with -1."""
        return CacheArray(self._table, self.runtime)

    @property
    def context_lens(self) -> CacheArray:
        """(1,) int32 on the device: `len`."""
        assert self._lens is not None
        return CacheArray(self._lens, self.runtime)

    @property
    def paged_block_indices(self) -> list[int]:
        """The sequence's blocks in order, a copy on the host.

        To change them, assign a list of block indices, such as `BlockPool.allocate` returns.

        Raises:
            CapacityError: there are more blocks than ``max_blocks_per_seq``.
            PositionError: a block is not in the pool or is listed twice, or there are too few blocks for `len` tokens.
        """
        return list(self._blocks)

    @paged_block_indices.setter
    def paged_block_indices(self, indices: Sequence[int]) -> None:
        operation = "PagedKVLayer.paged_block_indices"
        runtime.require_alive(self.runtime, operation)
        last = self.pool.form.num_blocks - 1
        blocks = [checks.integer(block, "a block index", operation, high=last) for block in indices]
        if len(blocks) > self.max_blocks_per_seq:
            raise CapacityError(
                f"{operation}: {len(blocks)} blocks exceed max_blocks_per_seq={self.max_blocks_per_seq}. Assign fewer, "
                "or create the layer with a larger one."
            )
        if len(set(blocks)) != len(blocks):
            raise PositionError(
                f"{operation}: {blocks} names a block twice, but each block holds different tokens. Name each block "
                "once."
            )
        if len(blocks) * self.block_size < self._len:
            raise PositionError(
                f"{operation}: {len(blocks)} blocks of {self.block_size} do not hold the {self._len} tokens. Assign "
                f"more blocks, or call set_len() with fewer tokens first."
            )
        self._blocks, self._slots = blocks, len(blocks) * self.block_size
        table = np.full(self.max_blocks_per_seq, -1, np.int32)
        table[: len(blocks)] = blocks
        write_host(table, self._table)

    @locked
    def paged_write(
        self,
        rows: Array,
        *,
        num_q_heads: int,
        norm_rope: rope.NormRope | None = None,
        rope_positions: Array | None = None,
        q_layout: str = "token_major",
    ) -> Array:
        """Split fused rows, normalise and rotate them, and write their keys and values from position `len` on.

        `len` does not change.

        Args:
            rows, num_q_heads, norm_rope, rope_positions, q_layout: as in `ContiguousKVLayer.contig_write`.

        Returns:
            q, in the dtype of ``rows``.

        Raises:
            CapacityError: ``len + T`` tokens do not fit in the blocks assigned. Nothing is written.
            ShapeError, DTypeError, OptionError, PositionError: as `tikv.write_qkv`.

        Exactness, cost: as `tikv.write_qkv`; one launch.
        """
        operation = "PagedKVLayer.paged_write"
        end = self._end(operation, rows)
        positions = np.arange(self._len, end, dtype=np.int32)
        slots = self._slots_of(self._len, end)
        k, v, *_ = self._arrays
        target = FusedTarget(k, v, slot_mapping=slots, layout=self.pool.form.layout, **self._scales())
        return write_fused(
            operation, rows, target, num_q_heads=num_q_heads, norm_rope=norm_rope,
            rope_positions=positions if rope_positions is None else rope_positions, q_layout=q_layout,
        )  # fmt: skip

    @locked
    def paged_decode_attention(
        self,
        q: Array,
        *,
        q_layout: str = "token_major",
        scale: float | None = None,
        window: int | None = None,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
    ) -> Arrays:
        """Causal attention of the queries of the newest T tokens over the `len` tokens.

        Args:
            q, q_layout, scale, window, sink_logits, alibi_slopes, return_mass, mass_queries, mass_into: as in
                `ContiguousKVLayer.contig_decode_attention`.

        Returns:
            An array like ``q``; with ``return_mass`` also the mass.

        Raises:
            PositionError, ShapeError, DTypeError, OptionError: as `tikv.paged_decode_attention`.

        Exactness, cost: as `tikv.paged_decode_attention`.
        """
        request = AttendRequest(
            scale=scale, window=window, sink_logits=sink_logits, alibi_slopes=alibi_slopes, return_mass=return_mass,
            mass_queries=mass_queries, mass_into=mass_into,
        )  # fmt: skip
        return self._attend("PagedKVLayer.paged_decode_attention", q, q_layout, self._lens, request)

    def _call(self, operation: str, q: ArrayView, lens: Array, request: AttendRequest) -> AttentionCall:
        k, v, *_ = self._arrays
        pools = Caches(PagedLayout(self.pool.form.layout), k, v, lens, self._table.batch_of_one(), **self._scales())
        return attention_call(operation, q, pools, request)

    def _write(self, operation: str, rows: list[ArrayView]) -> None:
        pools, layout = self._arrays, self.pool.form.layout
        index = to_device(self._slots_of(self._len, self._len + rows[0].shape[0]), self.runtime)
        arrays = [rows[0], pools[0], rows[1], pools[1], index, *pools[2:]]
        key = (operation, layout, *[a.key for a in arrays])
        plan = self.runtime.plans.get(key)
        if plan is None:
            plan = self.runtime.plans.keep(key, paged.check_write_slots(self.runtime, operation, arrays, layout))
        plan.run(arrays)

    def _slots_of(self, first: int, end: int) -> np.ndarray[Any, Any]:
        positions = np.arange(first, end, dtype=np.int32)
        return block_pool.slots_of(self._blocks, positions, self.block_size).astype(np.int32)
