"""PagedKVCacheStore: sequences of any length over one pool of blocks, which share common prefixes.

This module has the public calls, the store's lock, and what a store reports about itself. `pools` has the rest: `Pages`
is the interface of each way to keep tokens in blocks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import launch, runtime
from tikv.arrays import Array, Arrays, CacheArray, is_followed, refuse_backward, runtime_of, view
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError, PositionError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.request import AttendRequest
from tikv.ops.indices import host_integers
from tikv.ops.rope import NormRope
from tikv.ops.rotate import Rope
from tikv.stores import files, picture
from tikv.stores.files import pool as pool_files
from tikv.stores.locking import StoreLock, changing, locked
from tikv.stores.picture import counted, size_in_words
from tikv.stores.pools import compaction
from tikv.stores.pools.blocks import salt_bytes
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.group_pages import TokenGroupPages
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.row_pages import RowPages
from tikv.stores.pools.sequences import SequenceState
from tikv.stores.row_format import Divisor


class PagedKVCacheStore(runtime.DeepCopied):
    """Keys and values of many sequences in one pool of blocks; forks and sequences with a common prefix share blocks.

    A sequence is a number that `add` or `fork` returns and `free` takes back; no number is returned twice.
    [Stores in detail][stores-in-detail] (docs/stores.md) says which arguments exclude each other, and what calls cost.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and V.
        head_dim: width of a head of K, and of V unless ``head_dim_v`` says otherwise.
        num_blocks: blocks of the pool, for all sequences together; with ``per_head``, of each layer.
        block_size: tokens of a block.
        dtype: the format of stored rows: float32, float16, bfloat16, float64, float8_e4m3fn, float8_e5m2; int8 with a
            scale for each token and head; or groups: a `tikv.Quant`, "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4",
            "kvarn_k4v2" or "kvarn_k4v4", see `tikv.quantize`. With KVarN and a `tikv.Quant` with sinks, recent tokens
            or ``axis="tokens"``, only older tokens become codes, and ``block_size`` is a multiple of the group.
        layout: layout of a layer's pool of N blocks of bs tokens: "NHD" (N, bs, H, D), "HND" (N, H, bs, D), or "VLLM"
            K (N, H, D/x, bs, x) and V (N, H, D, bs) with x elements in 16 bytes.
        head_dim_v: width of a head of V.
        scale_dtype: dtype of the scales of int8 (N, bs, H), and of the scales and biases of a `tikv.Quant`
            (N, bs, H, n): float16 or float32.
        per_head: each layer and head of a sequence has its own blocks, so `compact` can drop different tokens of each.
            Such a store shares no blocks, cannot swap or save, and has no `write_qkv`.
        v_dtype: the format of stored values, if it differs from that of keys.
        k_scale, v_scale: as in `KVCacheStore`; one number each with ``per_head``.
        page_summaries: tokens per page, a divisor of ``block_size``, to keep their least and greatest key; or None.

    Attributes:
        num_layers (int): layers of the model.
        lock (threading.RLock): each call holds it. A thread that holds it may take it again.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument is not valid.

    Exactness: appended rows keep their bits; a narrower dtype rounds to nearest even. Each token is quantised once.
    Cost: an append takes one launch for all its sequences. Tables and counts are on the host.
    Threads: calls of several threads run one after the other. Hold ``lock`` to keep other calls out between yours.

    Examples:
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

    instead = "Use copy.deepcopy(); fork() for another sequence; save() and load() for another process."

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
        per_head: bool = False,
        v_dtype: Any = None,
        k_scale: Array | float | None = None,
        v_scale: Array | float | None = None,
        page_summaries: int | None = None,
    ) -> None:
        operation = "PagedKVCacheStore"
        self.runtime = runtime_of()
        self.num_layers = checks.integer(num_layers, "num_layers", operation, low=1)
        config = self.config = PoolConfig.checked(
            operation, self.runtime, num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, scale_dtype=scale_dtype, layout=layout,
            per_head=per_head, v_dtype=v_dtype, k_scale=k_scale, v_scale=v_scale, page_summaries=page_summaries,
        )  # fmt: skip
        self.num_kv_heads, self.num_blocks, self.block_size = config.num_kv_heads, config.num_blocks, config.block_size
        self.layout, (self.head_dim, self.head_dim_v) = config.layout, config.rows.widths
        self.dtype: DType | GroupFormat = config.rows.k.dtype
        self.v_dtype: DType | GroupFormat = config.rows.v.dtype
        self.divisors: tuple[Divisor, Divisor] = config.rows.divisors
        kind = RowPages if config.groups is None else TokenGroupPages
        self._pages: Pages[Any] = kind(self.runtime, self.config, self.num_layers)
        self._followed = False  # whether torch's autograd follows tokens that were appended
        self.lock = StoreLock()

    __deepcopy__ = locked(runtime.DeepCopied.__deepcopy__)

    # --- its form

    @property
    def device(self) -> str:
        """As in `KVCacheStore`."""
        return self.runtime.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, scales and summaries of pages of all layers, filled or not."""
        return self._pages.nbytes

    @property
    @locked
    def sequences(self) -> list[int]:
        """The sequences of the pool, in the order in which they were made."""
        return list(self._pages.sequences.states)

    @property
    @locked
    def context_lens(self) -> np.ndarray[Any, Any]:
        """(len(sequences),) int32: `length` of each of `sequences`, on the host."""
        return np.array([state.length for state in self._pages.sequences.states.values()], np.int32)

    @property
    @locked
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; with ``per_head``, those of the layer that has the fewest."""
        return self._pages.sequences.num_free

    @property
    @locked
    def num_shared_blocks(self) -> int:
        """Blocks that more than one sequence holds."""
        return self._pages.sequences.blocks.num_shared

    @locked
    def length(self, seq: int) -> int:
        """Tokens of a sequence that every layer has, including shared ones and those that `compact` dropped.

        So in a step it grows when the last layer appends; `layer_length` and `next_position` return the numbers of one
        layer. If only one layer has tokens, it is the length of that one.
        """
        return self._state(seq, "PagedKVCacheStore.length", swapped=True).length

    @locked
    def layer_length(self, layer: int, seq: int) -> int:
        """Tokens of a sequence in one layer, including shared ones and those that `compact` dropped.

        `held` is the number that the layer still holds.
        """
        operation = "PagedKVCacheStore.layer_length"
        return self._state(seq, operation, swapped=True).appended(self._layer(layer, operation))

    @locked
    def next_position(self, layer: int, seq: int) -> int:
        """The position of the next token: `layer_length`, unless `compact` rotated keys to other positions."""
        operation = "PagedKVCacheStore.next_position"
        state, layer = self._state(seq, operation, swapped=True), self._layer(layer, operation)
        return state.lengths[layer] + state.shift(layer)

    @locked
    def block_table(self, seq: int, layer: int | None = None) -> np.ndarray[Any, Any]:
        """(blocks,) int32: the blocks of a sequence in order, a copy on the host.

        With ``per_head`` it is (H, most blocks of a head): each head's blocks in ``layer``, which must be given, and -1
        after them.
        """
        operation = "PagedKVCacheStore.block_table"
        state = self._state(seq, operation)
        if layer is None and self.config.per_head:
            raise OptionError(f"{operation}: with per_head=True each layer has its own blocks. Pass layer=.")
        return self._pages.sequences.block_table(0 if layer is None else self._layer(layer, operation), state)

    @locked
    def held(self, layer: int, seq: int) -> Any:
        """Tokens of a sequence that one layer holds: an int, or (H,) int32 by head with ``per_head``."""
        operation = "PagedKVCacheStore.held"
        layer, state = self._layer(layer, operation), self._state(seq, operation, swapped=True)
        return self._pages.sequences.held(layer, state)

    @locked
    def positions(self, layer: int, seq: int) -> np.ndarray[Any, Any]:
        """(H, most tokens of a head) int64: the true position of each token held, in order; -1 pads shorter heads."""
        operation = "PagedKVCacheStore.positions"
        layer, state = self._layer(layer, operation), self._state(seq, operation, swapped=True)
        rows = self._pages.sequences.positions(layer, state)
        positions = np.full((len(rows), max(map(len, rows))), -1, np.int64)
        for to, row in zip(positions, rows, strict=True):
            to[: len(row)] = row
        return positions if self.config.per_head else np.tile(positions, (self.num_kv_heads, 1))

    def keys(self, layer: int) -> CacheArray:
        """A layer's pool of keys in place, in the store's layout; not a copy."""
        operation = "PagedKVCacheStore.keys"
        return CacheArray(self._pages.arrays(operation, self._layer(layer, operation))[0][0], self.runtime)

    def values(self, layer: int) -> CacheArray:
        """A layer's pool of values in place, in the store's layout; not a copy."""
        operation = "PagedKVCacheStore.values"
        return CacheArray(self._pages.arrays(operation, self._layer(layer, operation))[0][1], self.runtime)

    def scales(self, layer: int) -> tuple[CacheArray | None, CacheArray | None]:
        """The scales of K and of V in place; None for one that has no scales.

        For int8 each is (N, bs, H). For groups each is (N, bs, H, n): the scales of a row, and after each its bias if
        there is one. If K and V need different numbers of them per row, both arrays have the larger n, also for int8
        beside groups, and a row uses its first entries. For 8-bit floats they are (1,) or (H,), as you passed them to
        the store.

        Raises:
            DTypeError: the store has no scales.
        """
        operation = "PagedKVCacheStore.scales"
        arrays = self._pages.arrays(operation, self._layer(layer, operation))[1]
        if not arrays:
            raise DTypeError(
                f"{operation}: a {self.config.rows.name} store has no scales; int8 and groups have. Use dtype='int8'."
            )
        scales = {name: CacheArray(a, self.runtime) for name, a in arrays.items()}
        return scales.get("k_scale"), scales.get("v_scale")

    @locked
    def page_summaries(self, layer: int, seqs: Sequence[int]) -> tuple[CacheArray, CacheArray]:
        """The least and the greatest key of each page of sequences, as `tikv.summarize_pages` computes them.

        Pass them to `tikv.page_scores`, and its result to `tikv.select`, both with the store's ``page_summaries`` as
        ``page``. Token ``n`` of those that a sequence holds is in page ``n // page``. Every call that changes the store
        updates them. Summaries of full pages are kept with their blocks; a last page that is not full is summarised in
        this call.

        Args:
            layer: its index.
            seqs: the B sequences.

        Returns:
            (least, greatest), each (B, num_kv_heads, P, head_dim), new arrays, where P is the number of pages of the
            longest sequence; of the keys' dtype, or float32 for formats with scales. Both are 0 for pages without
            tokens.

        Raises:
            OptionError: the store keeps no summaries.
            PositionError: a sequence does not exist, or is swapped out.

        Cost: one launch that copies, and one that reads at most a page of each sequence, or two with scales.

        Examples:
            >>> import numpy as np, tikv
            >>> form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "num_blocks": 4, "block_size": 2}
            >>> pool = tikv.PagedKVCacheStore(**form, dtype="float32", page_summaries=2)
            >>> seq = pool.add()
            >>> k = np.array([3, 1, 2, 5, 4], np.float32).reshape(5, 1, 1)
            >>> pool.append(0, k, k, [seq], cu_seqlens=[0, 5])
            >>> [a.numpy().ravel().tolist() for a in pool.page_summaries(0, [seq])]
            [[1.0, 2.0, 4.0], [3.0, 5.0, 4.0]]
        """
        operation = "PagedKVCacheStore.page_summaries"
        return self._pages.page_summaries(operation, self._layer(layer, operation), seqs)

    def _layer(self, index: int, operation: str) -> int:
        runtime.require_alive(self.runtime, operation)
        if type(index) is int and 0 <= index < self.num_layers:
            return index
        return checks.integer(index, "layer", operation, high=self.num_layers - 1)

    def _state(self, seq: int, operation: str, *, swapped: bool = False) -> SequenceState:
        """The state of a sequence that exists and, unless `swapped` is True, is not swapped out; or PositionError."""
        runtime.require_alive(self.runtime, operation)
        return self._pages.sequences.state(seq, operation, swapped=swapped)

    # --- writes

    @changing
    def add(self, token_ids: Array | None = None, salt: str | bytes | int | None = None, *, leave: int = 1) -> int:
        """Make a new sequence. With token ids, it begins with the full blocks that it shares with other sequences.

        A full block is shared if some sequence has appended its tokens, and all tokens before them, to every layer.
        That sequence may have been freed, as long as its blocks were not reused. Tokens whose ids were not passed to
        `add`, such as generated text, are not found. `length` says how many tokens are in the pool already; append only
        the rest. That is at least the last token, even if the whole prompt is in the pool: the model has to compute
        its logits.

        Args:
            token_ids: (n,) integers, on the host or a device; None shares nothing.
            salt: the name of a tenant, for example: sequences with different salts never share a block. "1", b"1" and 1
                are different salts.
            leave: how many of the last tokens the new sequence does not have even if they are in the pool, so that the
                model computes them; 0 takes all. A shared block that has some of them is copied before they are
                written, so an append may need one more block than its tokens fill.

        Returns:
            The number of the sequence.

        Raises:
            DTypeError, ShapeError: token_ids are not a list of integers, the salt is not a str, bytes or int, or
                ``leave`` is not an integer.
            PositionError: ``leave`` is negative.

        Cost: none on the device; about 1 us for each block.

        Examples:
            >>> import numpy as np, tikv
            >>> pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, num_blocks=8, block_size=2)
            >>> prompt = [5, 6, 7, 8, 9]
            >>> a = pool.add(prompt)
            >>> pool.append(0, *np.ones((2, 5, 1, 4), np.float16), [a], cu_seqlens=[0, 5])
            >>> [pool.length(s) for s in (pool.add([5, 6, 7, 8, 1]), pool.add([1, 6, 7, 8]), pool.add(prompt, "a"))]
            [4, 0, 0]
            >>> pool.length(pool.add([5, 6, 7, 8])), pool.length(pool.add([5, 6, 7, 8], leave=0))
            (3, 4)
        """
        operation = "PagedKVCacheStore.add"
        leave = checks.integer(leave, "leave", operation)
        if token_ids is not None:
            self._pages.refuse_per_head(operation, "blocks of single heads cannot be found by token_ids")
        runtime.require_alive(self.runtime, operation)
        ids = host_integers(token_ids, "token_ids", operation, self.runtime) if token_ids is not None else []
        if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
            raise DTypeError(f"{operation}: token_ids hold an integer of more than 64 bits.")
        return self._pages.add(ids, salt_bytes(salt, operation), leave)

    @changing
    def append(
        self,
        layer: int,
        k: Array,
        v: Array,
        seqs: Sequence[int],
        cu_seqlens: Array | None = None,
        *,
        layout: str = "token_major",
    ) -> None:
        """Append new tokens of some sequences to one layer, in one launch.

        A step appends to every layer; the first layer that needs blocks takes them.

        Args:
            layer: its index.
            k, v: (T, H, D) and (T, H, D_v), the tokens of the first sequence before those of the second, and so on. The
                dtype is the store's, or one that `tikv.copy` converts to it; for int8 and groups it is float32, float16
                or bfloat16, but for groups along tokens ``scale_dtype`` or float32.
            seqs: the sequences, each once.
            cu_seqlens: (len(seqs) + 1,) int32 or int64, a list or an array on the host or a device: sequence ``i`` gets
                rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]`` - 1. Rows from ``cu_seqlens[-1]`` on are padding. With
                None, a single sequence gets all rows, and each of several sequences gets one.
            layout: of k and v, "token_major", or "head_major" for (H, T, D).

        Raises:
            CapacityError: the pool has too few free blocks for all tokens. No sequence is changed.
            PositionError: a sequence does not exist, is swapped out or is named twice; or its layers have different
                lengths, as in `KVCacheStore.append`: `align` is the way out.
            ShapeError, DTypeError, OptionError, StaleRuntimeError: the arrays or the layout do not fit.

        Exactness, cost: as the class says. Shared blocks that are written to are copied first, in one more launch.
        """
        operation = "PagedKVCacheStore.append"
        rows, layer = (view(k, "k", operation), view(v, "v", operation)), self._layer(layer, operation)
        self._pages.append(operation, layer, rows, seqs, cu_seqlens, layout)
        self._followed |= is_followed(k, v)

    @changing
    def write_qkv(
        self,
        layer: int,
        qkv: Array,
        seqs: Sequence[int],
        cu_seqlens: Array | None = None,
        *,
        num_q_heads: int,
        norm_rope: NormRope | None = None,
        rope_positions: Array | None = None,
        q_layout: str = "token_major",
    ) -> Array:
        """Split fused rows, normalise and rotate them, and append their keys and values, as `tikv.write_qkv` does.

        Args:
            layer: its index.
            qkv: (T, (Hq + 2 H) * D) rows [Q heads | K heads | V heads].
            seqs, cu_seqlens: as in `append`.
            num_q_heads: Hq.
            norm_rope: a `tikv.NormRope`, or None to split only.
            rope_positions: (T,) positions to rotate by; None for each token's position, from `next_position` on.
            q_layout: layout of the result, "token_major" (T, Hq, D) or "head_major" (Hq, T, D).

        Returns:
            q, in the dtype of ``qkv``, normed and rotated.

        Raises:
            As `append` and `tikv.write_qkv`. Nothing is written, and no sequence is changed.

        Exactness: the same bits as `tikv.write_qkv`.
        Cost: one launch.
        """
        operation = "PagedKVCacheStore.write_qkv"
        q = self._pages.write_qkv(
            operation, self._layer(layer, operation), qkv, seqs, cu_seqlens, num_q_heads=num_q_heads,
            norm_rope=norm_rope, rope_positions=rope_positions, q_layout=q_layout,
        )  # fmt: skip
        self._followed |= is_followed(qkv)
        return q

    # --- reads

    @locked
    def attend(
        self,
        layer: int,
        q: Array,
        seqs: Sequence[int],
        *,
        layout: str = "token_major",
        scale: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
        impl: str = "auto",
        softcap: float | None = None,
        out: Array | None = None,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
        mask: Array | None = None,
        parents: Array | None = None,
        indices: Array | None = None,
        shared_prefix: str = "auto",
        block: int | None = None,
    ) -> Arrays:
        """Attend with queries over the tokens of their sequences in one layer, as `tikv.paged_decode_attention` does.

        Append the tokens first. The call counts the tokens of this layer; a layer that missed an append has fewer than
        others, and the repr of the store shows that.

        Args:
            layer: its index.
            q: (B, Hq, D), one query for each sequence; or (B, T, Hq, D), causal, for the last T tokens of each;
                head-major (B, Hq, T, D). For one sequence the axis of B may be left out, as in `KVCacheStore.attend`.
            seqs: the B sequences.
            layout: layout of q and of the result, "token_major" or "head_major".
            scale: factor of the scores; None for 1 / sqrt(D).
            window: tokens that a query sees, including its own; None for all.
            return_lse: also return the log-sum-exp of the scores.
            out: an array for the result, with its shape and q's dtype.
            impl, softcap, sink_logits, alibi_slopes, mask, parents: as in `tikv.paged_decode_attention`.
            return_mass, mass_queries, mass_into: as in `KVCacheStore.attend`.
            indices: (B, T, K) or (B, H, T, K): the tokens that each query reads, see `tikv.decode_attention`, counted
                from the first that a sequence holds.
            block: as in `KVCacheStore.attend`.
            shared_prefix: with "auto", the first blocks that neighbours among ``seqs`` share, after `fork` or `add`
                with token ids, are read once for all of them if that saves time; results differ by rounding only. With
                "off", each sequence is read separately. That is always so with a window, slopes, masks, indices or
                mass, with ``per_head``, and under ``tikv.init(invariant=True)``.

        Returns:
            ``out`` or a new array, of q's dtype and axes and V's width; with ``return_lse`` also lse, float32 in that
            shape without the last axis; with ``return_mass`` the mass last, float32: (B, num_kv_heads, n) in the order
            of `tokens`, where n is the most that a sequence holds; or with ``indices`` (B, num_kv_heads, T, K) in their
            order.

        Raises:
            PositionError: a sequence does not exist, is swapped out, or has some tokens but fewer than queries; an
                index on the host is not a token of its sequence; or, without ``return_lse``, the layer has no tokens of
                a sequence of which other layers have some.
            ShapeError, DTypeError, OptionError: q, ``out`` or an option does not fit.

        Exactness: float32 arithmetic, one rounding at the end. A sequence without tokens gives 0 and -inf.
        Cost: one launch, or two with splits as in `tikv.decode_attention`; each key and value is read once for all
            query heads of its KV head. If prefixes are shared, it takes at least three launches for each run of
            neighbours that share one.
        """
        operation = "PagedKVCacheStore.attend"
        request = AttendRequest(  # some by position, since Python puts more than 15 keywords into a dict
            layout, scale, softcap, return_lse, impl, window=window, out=out, sink_logits=sink_logits,
            alibi_slopes=alibi_slopes, return_mass=return_mass, mass_queries=mass_queries, mass_into=mass_into,
            mask=mask, parents=parents, indices=indices, shared_prefix=shared_prefix, block=block,
        ).checked(operation)  # fmt: skip
        result = self._pages.attend(operation, self._layer(layer, operation), q, seqs, request)
        return refuse_backward(result, q, followed=self._followed)

    @locked
    def extend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        seqs: Sequence[int],
        cu_seqlens: Array | None = None,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        mask: Array | None = None,
        parents: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        mass_into: Array | None = None,
        shared_prefix: str = "auto",
        keep: bool = True,
        block: int | None = None,
    ) -> Arrays:
        """Append new tokens of some sequences and attend with their queries, in one call, for prompts of any lengths.

        Args:
            layer: its index.
            q: (T, Hq, D), the new tokens' queries, float32, float16 or bfloat16; Hq is a multiple of num_kv_heads.
            k, v, seqs, cu_seqlens: as in `append`.
            layout: of q, k, v and the result, "token_major", or "head_major" for (Hq, T, D) and (H, T, D).
            scale, window, softcap, sink_logits, alibi_slopes: as in `attend`; slopes for each of ``seqs``, or for all.
            mask, parents: as in `tikv.paged_decode_attention`, if the new tokens of each sequence are a tree: equally
                many for each, at most 256, without padding.
            return_lse: also return the log-sum-exp of the scores, float32, in the result's shape without its last axis.
            return_mass, mass_queries, mass_into: as in `attend`; ``mass_queries`` limits each sequence's queries.
            keep, block: as in `KVCacheStore.extend`; the block is that of each sequence.
            shared_prefix: as in `attend`, for neighbours among ``seqs`` with equally many new tokens, at most 256.

        Returns:
            A new array of q's kind and dtype, (T, Hq, D_v) or in the layout given; with ``return_lse`` also lse, and
            with ``return_mass`` the mass. Padding gives 0 and -inf.

        Raises:
            As `append` and `attend`. Nothing is written, and no sequence is changed. The same holds after Ctrl-C,
            except with groups along tokens: there the error says how many tokens each sequence holds.

        Exactness: as `append` and `attend`: attention reads what is stored.
        Cost: as `append`; attention is one launch for neighbouring sequences with equally many new tokens, 256 queries
            of a sequence at a time.

        Examples:
            >>> import numpy as np, tikv
            >>> pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=2, num_blocks=4, dtype="float32")
            >>> seqs = [pool.add(), pool.add()]
            >>> v = np.arange(10, dtype=np.float32).reshape(5, 1, 2)
            >>> pool.extend(0, np.ones_like(v), np.zeros_like(v), v, seqs, cu_seqlens=[0, 2, 5])[:, 0, 0].tolist()
            [0.0, 1.0, 4.0, 5.0, 6.0]
        """
        operation = "PagedKVCacheStore.extend"
        request = AttendRequest(
            layout=layout, scale=scale, window=window, softcap=softcap, return_lse=return_lse, sink_logits=sink_logits,
            alibi_slopes=alibi_slopes, return_mass=return_mass, mass_queries=mass_queries, mass_into=mass_into,
            mask=mask, parents=parents, shared_prefix=shared_prefix, keep=keep, block=block,
        ).checked(operation)  # fmt: skip
        result = self._pages.extend(operation, self._layer(layer, operation), (q, k, v), seqs, cu_seqlens, request)
        self._followed |= request.keep and is_followed(k, v)
        return refuse_backward(result, q, k, v, followed=self._followed)

    @locked
    def tokens(self, layer: int, seq: int) -> tuple[CacheArray, CacheArray]:
        """A copy of the tokens that one layer of a sequence holds: K (n, H, D) and V (n, H, D_v).

        ``n`` is the number of tokens held; with ``per_head`` that of the head with the most, and zeros fill up the
        other heads. Formats with scales are returned as float32.

        Raises:
            PositionError: ``seq`` does not exist, or is swapped out.

        Cost: each row is read once and written once, by one launch for K and one for V; with ``per_head``, by these for
        each head. Groups along tokens are decoded in a few launches for each block.
        """
        operation = "PagedKVCacheStore.tokens"
        launch.refuse_during_capture(self.runtime, operation, "the number of tokens", launch.OUTSIDE_CAPTURES)
        return self._pages.tokens(operation, self._layer(layer, operation), self._state(seq, operation))

    # --- changes of sequences

    @changing
    def fork(self, seq: int) -> int:
        """Make a new sequence with the same tokens. Both share all blocks, each of which is copied before a write.

        The fork may continue differently. It takes over the token ids that ``seq`` has from `add`, up to the last full
        block that every layer holds; `add` does not find what the fork appends later.

        Returns:
            The number of the new sequence.

        Raises:
            PositionError: ``seq`` does not exist, or is swapped out.
            OptionError: the store is ``per_head``.

        Cost: none on the device now, except that with groups along tokens the newest tokens are copied; later each
        shared block that is written to is copied, in all layers.
        """
        operation = "PagedKVCacheStore.fork"
        self._pages.refuse_per_head(operation, "blocks of single heads cannot be shared")
        return self._pages.fork(self._state(seq, operation))

    @changing
    def truncate(self, seq: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence, in every layer, and give back the blocks after them.

        Raises:
            PositionError: ``seq`` does not exist, is swapped out or has fewer than ``n`` tokens; a layer had more than
                ``n`` when it was compacted; or part of a group along tokens would be kept. Nothing is changed.

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
        state.check_truncate(operation, n)
        self._pages.truncate(operation, state, n)

    @changing
    def align(self, seqs: Sequence[int] | None = None) -> np.ndarray[Any, Any]:
        """Bring every layer of each sequence back to the length of its shortest, as `KVCacheStore.align` does.

        Args:
            seqs: the sequences, each once; None for all sequences of the pool.

        Returns:
            (len(seqs),) int32 on the host: the length that every layer of each sequence has then.

        Raises:
            PositionError: a sequence does not exist, is named twice, or is swapped out with layers of different
                lengths; or a layer of one cannot go back, since it was compacted since or, with groups along tokens,
                older tokens became codes when its newest were appended. Nothing is changed.

        Cost: none on the device.
        """
        operation = "PagedKVCacheStore.align"
        runtime.require_alive(self.runtime, operation)
        sequences = self._pages.sequences
        ids = self.sequences if seqs is None else self._pages.ids(seqs, operation)
        states = sequences.distinct(ids, operation, "Name it once.", swapped=True)
        lengths = [min(state.ends) for state in states]
        uneven = [(state, n) for state, n in zip(states, lengths, strict=True) if n < max(state.ends)]
        for state, n in uneven:
            sequences.state(state.number, operation)  # in memory
            self._pages.refuse_align(operation, state, n)
        for state, n in uneven:
            self._pages.truncate(operation, state, n)
        return np.array(lengths, np.int32)

    @changing
    def free(self, seq: int) -> None:
        """Forget a sequence. Blocks that only it holds become free; `add` finds full ones until they are reused.

        Raises:
            PositionError: ``seq`` does not exist.

        Cost: none on the device.
        """
        self._state(seq, "PagedKVCacheStore.free", swapped=True)
        self._pages.free(seq)

    @changing
    def rewrite(self, layer: int, seq: int, start: int, k: Array, v: Array, *, layout: str = "token_major") -> None:
        """Write new rows to the places of a block of a sequence's tokens in one layer. See `KVCacheStore.rewrite`.

        Args:
            layer: its index.
            seq: the sequence. Others that share its blocks keep their rows: the blocks are copied first.
            start: the position of the first token of the block.
            k, v: (T, H, D), the rows of the tokens from ``start`` on.
            layout: "token_major", or "head_major" for (H, T, D).

        Raises:
            PositionError: a position is not held, a compaction moved its token, or, with groups along tokens, it is
                codes already; ``seq`` does not exist. Nothing is written.
            CapacityError: too few blocks are free to copy those that another sequence shares.
            ShapeError, DTypeError: as `append`. Nothing is written.

        Exactness: the rows have the bits that `append` writes; every other bit stays.
        Cost: that of an append of as many tokens. `add` no longer finds the blocks from ``start`` on by token ids.
        """
        operation = "PagedKVCacheStore.rewrite"
        layer, state = self._layer(layer, operation), self._state(seq, operation)
        rows = view(k, "k", operation), view(v, "v", operation)
        self._pages.rewrite(operation, layer, state, start, rows, layout)
        self._followed |= is_followed(k, v)

    @changing
    def compact(
        self, layer: int, seq: int, keep: Array, *, rope: Rope | None = None,
        merge: tuple[Any, ...] | None = None,
    ) -> None:  # fmt: skip
        """Keep some of the tokens that one layer of a sequence holds, and drop the others, in place.

        Blocks that become empty are free at once. Without ``per_head`` a block belongs to all layers, and is free when
        the last layer no longer needs it. The next token follows the kept tokens. `layer_length` does not change, and
        `next_position` changes only with ``rope``. `positions` returns the positions of the kept tokens.

        Args:
            layer: its index.
            seq: the sequence.
            keep: ascending indices into the order of `tokens`, (n,); or a bool mask (m,) with m the most that a head
                holds. With ``per_head`` also (H, n) or (H, m), different for each head; a mask may keep a different
                number for each.
            rope: the model's rotation. Keys are rotated from their true positions to their new indices, `positions`
                returns 0, 1 and so on, and `next_position` is the number of tokens in the head that keeps the most.
            merge: as in `KVCacheStore.compact`, two arrays (H, held), or with one more axis.

        Raises:
            OptionError: the layout is VLLM, or ``rope`` or ``merge`` is given with groups along tokens, or both are.
            CapacityError: too few blocks are free to copy those that another sequence shares.
            PositionError: the indices are not strictly ascending, or one points outside; a mask keeps a token that a
                head does not hold; part of a group along tokens would be kept; ``merge`` names a token that is dropped
                or not held; ``seq`` does not exist.
            ShapeError, DTypeError: the shape or dtype of ``keep`` does not fit, it keeps different tokens for heads
                that share blocks, or ``rope`` cannot rotate the keys. Nothing is changed.

        Exactness: rows, scales and codes keep their bits. Rotated keys are rounded once, as in `tikv.rotate`.
        Cost: each row that moves is read twice and written twice. The host reads indices and masks. Shared blocks in
            which rows change are copied first, in all layers, and `add` no longer finds blocks that changed.

        Examples:
            >>> import numpy as np, tikv
            >>> form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 1, "num_blocks": 8, "block_size": 2}
            >>> pool = tikv.PagedKVCacheStore(**form, dtype="float32", per_head=True)
            >>> seq = pool.add()
            >>> k = np.arange(8, dtype=np.float32).reshape(4, 2, 1)
            >>> pool.append(0, k, k, [seq], cu_seqlens=[0, 4])
            >>> pool.compact(0, seq, np.array([[True, False, True, True], [False, False, False, True]]))
            >>> pool.held(0, seq).tolist(), pool.positions(0, seq).tolist(), pool.num_free_blocks
            ([3, 1], [[0, 2, 3], [3, -1, -1]], 5)
        """
        operation = "PagedKVCacheStore.compact"
        layer, state = self._layer(layer, operation), self._state(seq, operation)
        compaction.compact(operation, self._pages, layer, state, keep, rope, merge)

    @changing
    def commit(self, seqs: Sequence[int], path: Array, drafted: int | None = None) -> None:
        """Keep a path through the newest tokens of each sequence, the accepted tokens of a tree, and drop the others.

        It works on every layer, and each layer must have the draft already, from `append` or `extend`. Blocks that
        become empty are free at once. Other sequences that share blocks with these keep what they hold. After `extend`
        with ``parents`` only a path from the root is kept, and a second commit needs new tokens, as in
        `KVCacheStore.commit`.

        Args:
            seqs: the sequences, each once.
            path: for each sequence ascending indices among its drafted tokens, on the host, any number of them; or an
                array (len(seqs), n) if all keep equally many; or (n,) for a single sequence.
            drafted: how many of the newest tokens of each were drafted; None for those of its last `append` or
                `extend`.

        Raises:
            PositionError: the indices are not strictly ascending, or one is outside the draft; kept tokens of a tree
                are not a path from its root; no tokens, or fewer than ``drafted``, were appended since the last commit;
                different numbers of tokens were appended to the layers of a sequence; a `compact` came after the draft;
                a sequence does not exist, is swapped out or is named twice.
            ShapeError: the path is not a list of integers for each sequence.
            CapacityError: too few blocks are free to copy those that another sequence shares.
            OptionError: the layout is VLLM. Nothing is changed.

        Exactness: rows, scales and codes keep their bits, as if only its path had been appended to each sequence.
        Cost: rows that move are read and written once. One launch moves keys, values and scales of all layers that
            share one piece of memory; in layout HND, scales take one more. If each path is the first n drafted tokens,
            nothing moves, and no launch is needed. Shared blocks in which rows change are copied first.

        Examples:
            >>> import numpy as np, tikv
            >>> form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "num_blocks": 4, "block_size": 2}
            >>> pool = tikv.PagedKVCacheStore(**form, dtype="float32")
            >>> seq = pool.add()
            >>> draft = np.arange(5, dtype=np.float32).reshape(5, 1, 1)
            >>> pool.append(0, draft, draft, [seq], cu_seqlens=[0, 5])
            >>> pool.commit([seq], [0, 3])
            >>> pool.length(seq), pool.num_free_blocks, pool.tokens(0, seq)[0].numpy().ravel().tolist()
            (2, 3, [0.0, 3.0])
        """
        operation = "PagedKVCacheStore.commit"
        runtime.require_alive(self.runtime, operation)
        self._pages.commit(operation, seqs, path, drafted)

    @changing
    def swap_out(self, seq: int) -> None:
        """Move a sequence's keys and values to host memory and give back its blocks; `swap_in` brings them back.

        Until then, its counts and `positions` can be read, and it can be saved or freed; other calls refuse it.

        Raises:
            PositionError: ``seq`` does not exist, or is swapped out already.
            OptionError: the store is ``per_head``.

        Cost: its blocks in all layers are read once; the call waits for the device.
        """
        operation = "PagedKVCacheStore.swap_out"
        self._pages.refuse_per_head(operation, "blocks of single heads cannot leave their pool")
        state = self._state(seq, operation)
        self._pages.swap_out(state)

    @changing
    def swap_in(self, seq: int) -> None:
        """Bring a swapped-out sequence back into the pool. Blocks of its prefix that are still there are shared.

        Raises:
            CapacityError: too few blocks are free.
            PositionError: ``seq`` does not exist, or is not swapped out. After any error, the sequence is still swapped
                out, and the blocks taken for it are free again.

        Cost: the blocks that are not shared are written once, in all layers.
        """
        operation = "PagedKVCacheStore.swap_in"
        state = self._state(seq, operation, swapped=True)
        if state.swapped is None:
            raise PositionError(f"{operation}: sequence {seq} is not swapped out. Call swap_out({seq}) first.")
        shared, fresh = self._pages.sequences.blocks_to_swap_in(state, operation)
        try:
            self._pages.write_swapped(state, shared, fresh)
        except BaseException:
            self._pages.sequences.blocks.release(shared + fresh)
            raise
        self._pages.sequences.swap_in(state, shared, fresh)

    # --- files

    @locked
    def save(self, path: str | os.PathLike[str], seqs: Sequence[int] | None = None) -> None:
        """Save sequences to a .safetensors file; a synced temporary file is renamed to it.

        A block that several of them hold is saved once and shared again when it is loaded. After loading, `add` finds
        their prefixes again: the file contains the token ids of full blocks and the salts, and anyone with access can
        read them. Slots of a block that the sequences have not filled are saved as zeros. A sequence that was saved
        while it was swapped out is swapped out after loading too.

        Args:
            path: ends in ``.safetensors``. A file of that name is replaced in one step and keeps its mode; if it is a
                link, the file that it links to is replaced. Leftovers of killed saves in that folder are removed.
            seqs: the sequences, each once; None for all sequences of the pool.

        Raises:
            CacheFileError: the path has the wrong ending, or the system refuses to write. An old file is unchanged.
            PositionError: a sequence does not exist, or is named twice.

        Exactness: every bit is kept. Cost: their blocks are copied once to the host and once to the disk.

        Examples:
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
        self._pages.refuse_per_head(operation, "a file has one block table per sequence")
        runtime.require_alive(self.runtime, operation)
        files.target_of(path, operation)
        ids = self.sequences if seqs is None else host_integers(seqs, "seqs", operation, self.runtime)
        states = self._pages.sequences.distinct(ids, operation, "Name it once.", swapped=True)
        pool_files.write(path, self._pages, ids, states, operation)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, num_blocks: int | None = None, share_prefixes: bool = True
    ) -> PagedKVCacheStore:
        """A new store with the form and the sequences of a saved one, under the same numbers, on the current arch.

        Args:
            path: a file that `save` wrote.
            num_blocks: blocks of the pool; None for as many as the saved one had.
            share_prefixes: as in `load_sequences`.

        Raises:
            CacheFileError: the file is missing, damaged or not one that `save` wrote, or contradicts itself; or this
                machine has too little memory for its pool, in which case the error is a CapacityError too.
            CapacityError, DTypeError: ``num_blocks`` is too small, or this arch cannot hold the pool.
        """
        operation = "PagedKVCacheStore.load"
        saved = pool_files.SavedSequences(path, operation)
        config = saved.arguments(num_blocks)
        with files.understanding(path, operation):
            store = cls(**config)
        saved.fill(store._pages, share_prefixes)
        return store

    @changing
    def load_sequences(
        self, path: str | os.PathLike[str], *, share_prefixes: bool = True, salt: str | bytes | int | None = None
    ) -> list[int]:
        """Add the sequences of a file to this pool, for example a prompt that was computed before.

        Blocks that they share with each other are shared here too; none is shared with sequences of this pool. `add`
        finds their prefixes by the token ids in the file, unless this pool already has such a prefix; old files have no
        token ids. Nothing can check that the rows belong to these tokens: load a file from an untrusted source with a
        ``salt`` that you use for nothing else, or with ``share_prefixes=False``.

        Args:
            path: a file that `save` wrote, of the same layers, heads, widths, dtypes, ``k_scale``, ``v_scale`` and
                block size; in any layout.
            share_prefixes: if False, `add` never finds their prefixes, and `swap_in` gives them no shared blocks.
            salt: the salt under which `add` finds their prefixes, whatever the file says; None for the salts in the
                file.

        Returns:
            Their numbers in this pool, in the order in which they were saved.

        Raises:
            CacheFileError: the file is missing, damaged or not one that `save` wrote, or contradicts itself.
            ShapeError, DTypeError: the file's form differs from this pool's.
            CapacityError: too few blocks are free. After any error, the pool is unchanged.

        Exactness: every bit is kept. Cost: the file is read once, and its blocks are written once in all layers.
        """
        operation = "PagedKVCacheStore.load_sequences"
        self._pages.refuse_per_head(operation, "a file has one block table per sequence")
        runtime.require_alive(self.runtime, operation)
        salt = salt_bytes(salt, operation)
        return pool_files.SavedSequences(path, operation).add_to(self._pages, share_prefixes, salt)

    # --- pictures and words

    @locked
    def draw(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw the page table: each sequence's blocks in order, and which blocks of the pool are shared or free.

        A notebook shows a store this way. With ``per_head`` it is the table of each head in the first layer.

        Args:
            path: ends in ``.svg``, or with the extra `plot` in ``.png``; None writes no file.

        Returns:
            The SVG text. It follows the reader's light or dark setting; its size does not grow with the memory.

        Raises:
            OptionError, CacheFileError: the path has the wrong ending, or the system refuses to write.

        Cost: none on the device.

        Examples:
            >>> import tikv
            >>> pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, num_blocks=8)
            >>> pool.draw().startswith("<svg")
            True
        """
        blocks, sequences = self._pages.sequences.drawn()
        rows = [picture.Table(*of_sequence) for of_sequence in sequences]
        sizes = self.block_size, self.num_blocks, self.num_free_blocks
        return picture.save(picture.table(repr(self), *sizes, blocks.holders, rows), path, "PagedKVCacheStore.draw")

    def _repr_html_(self) -> str:
        return self.draw()

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self._pages.sequences.states)

    def __bool__(self) -> bool:
        """True, even if the store has no sequences, so that ``store or make()`` keeps it."""
        return True

    @locked
    def __repr__(self) -> str:
        used = self.num_blocks - self.num_free_blocks
        states = self._pages.sequences.states.values()
        swapped = sum(state.swapped is not None for state in states)
        uneven = sum(len({*state.ends}) > 1 for state in states)
        counts = ((swapped, "swapped out"), (uneven, "with layers of different lengths"))
        notes = ", ".join(f"{number} {what}" for number, what in counts if number)
        notes = f" ({notes})" if notes else ""
        return (
            f"PagedKVCacheStore({counted(self.num_layers, 'layer')} x {counted(self.num_kv_heads, 'head')} x "
            f"{self.config.rows.width}, {self.config.rows.name}, "
            f"{self.layout}{', per head' * self.config.per_head}, {counted(len(self), 'sequence')}"
            f"{notes}, {used}/{counted(self.num_blocks, 'block')} of {counted(self.block_size, 'token')} used, "
            f"{self.num_shared_blocks} shared, "
            f"{size_in_words(self.nbytes)}, {self.runtime.arch})"
        )
