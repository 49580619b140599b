"""PagedKVCacheStore: sequences of any length over one pool of blocks, sharing what they have in common.

Which sequence holds which blocks is kept in `sequences`, keys and values in `layer_pools`, slots and block tables on
the device in `device_tables`; `paged_files` saves and loads sequences.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, CacheArray, describe, new_array, new_like, runtime_of, view
from tikv.errors import DTypeError, ShapeError, TikvError
from tikv.ops import checks, paged, rope
from tikv.ops.attention.paged import paged_call
from tikv.ops.attention.plan import AttentionCall
from tikv.ops.attention.terms import Terms, tree_of
from tikv.ops.indices import host_integers, index_array
from tikv.ops.write_qkv import fused_call
from tikv.runtime.cache import BoundedCache
from tikv.stores import files, paged_files
from tikv.stores.attend import attend_in_order, last_queries, mass_queries_of, results_of
from tikv.stores.block_pool import salt_bytes
from tikv.stores.device_tables import DeviceTables
from tikv.stores.head_rows import HeadAppend, refuse_per_head
from tikv.stores.head_sequences import HeadSequences
from tikv.stores.layer_pools import LayerPools
from tikv.stores.pool_drafts import PoolDrafts
from tikv.stores.pool_form import PoolForm
from tikv.stores.queries import attend_queries
from tikv.stores.ragged_attention import RaggedAttention, even_starts
from tikv.stores.sequences import AppendStep, Sequences, SequenceState
from tikv.stores.whole import StoreLock, whole


class PagedKVCacheStore(PoolDrafts, runtime.DeepCopied):
    """Keys and values of many sequences in one pool of blocks, which sequences, forks and common prefixes share.

    A sequence is a number that `add` or `fork` gives and `free` takes back; it is never given twice. Its tokens lie in
    blocks of ``block_size`` slots. A block may belong to several sequences; whoever writes into it first gets a copy.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and V.
        head_dim: width of a head of K, and of V unless ``head_dim_v`` says otherwise.
        num_blocks: blocks of the pool, for all sequences together.
        block_size: tokens of a block.
        dtype: storage: float32, float16, bfloat16, float64, float8_e4m3fn, float8_e5m2; int8 with a scale per token and
            head; or codes of groups along a row, a `tikv.Quant`, "q8_0" or "q4_0", which `tikv.quantize` describes.
        v_dtype: storage of V, where that is another than that of K.
        k_scale, v_scale: as in `KVCacheStore`; one number each with ``per_head``.
        layout: of a layer's pool: "NHD" (N, bs, H, D), "HND" (N, H, bs, D), or "VLLM" K (N, H, D/x, bs, x) and V
            (N, H, D, bs).
        head_dim_v: width of a head of V.
        scale_dtype: of the scales of int8 (N, bs, H), and of those and the biases of a `tikv.Quant` (N, bs, H, n):
            float16 or float32. "q8_0" and "q4_0" have float16.
        per_head: a block holds tokens of one head of one layer, the pools have H = 1, and each layer and head of a
            sequence has a block table, so that `compact` can drop other tokens of each. Each layer has ``num_blocks``
            of its own. Such a store shares no blocks, by prefix or `fork`, does not swap or save, and has no
            `write_qkv`.

    Raises:
        CapacityError: a layer is larger than a launch on this arch can address.
        DTypeError, OptionError, PositionError, ShapeError: an argument that is none.

    Exactness: appended rows keep their bits; a narrowing dtype rounds to nearest even; int8 and groups are as in
        `tikv.quantize`: a token is quantised once.
    Cost: an append is one launch for all its sequences; tables and counts are kept on the host, and reading them never
    waits for the device.
    Threads: each call is whole, and calls of several threads come one after the other. Hold ``lock`` to make one of
    several calls.
    GPUs: the memory lies on the one that is torch's current when the store is made.

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
        k_scale: Any = None,
        v_scale: Any = None,
    ) -> None:
        operation = "PagedKVCacheStore"
        self.runtime = runtime_of()
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
            per_head=per_head,
            v_dtype=v_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        self._pools = LayerPools(self.form, self.num_layers, self.runtime)
        sizes = self.num_layers, self.form.num_blocks, self.form.block_size
        self._sequences = HeadSequences(*sizes, self.form.num_kv_heads) if per_head else Sequences(*sizes)
        self._appends: BoundedCache[Any, paged.WriteSlotsPlan] = BoundedCache()
        self._head_appends: BoundedCache[Any, HeadAppend] = BoundedCache()
        self._on_device = DeviceTables(self.runtime)
        self.lock = StoreLock()

    __deepcopy__ = whole(runtime.DeepCopied.__deepcopy__)

    @whole
    def add(self, token_ids: Any = None, salt: str | bytes | int | None = None) -> int:
        """A new sequence; with token ids, beginning with the blocks it has in common with another.

        Full blocks are shared whose tokens, and all before them, some sequence has appended to every layer, even if
        that sequence was freed and its blocks were not taken since. `length` says how many tokens are there; append
        only the rest, which are taken to be those of ``token_ids``. Pass all but the last to keep one for the model.

        Args:
            token_ids: (n,) integers, on the host or a device; None shares nothing.
            salt: of a tenant, say: sequences of different salts never share a block. "1", b"1" and 1 are different.

        Returns:
            The number of the sequence.

        Raises:
            DTypeError, ShapeError: not a list of integers, or no salt.

        Cost: none on the device; about 1 us a block.

        Examples:
            >>> import numpy as np, tikv
            >>> pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, num_blocks=8, block_size=2)
            >>> prompt = [5, 6, 7, 8, 9]
            >>> a = pool.add(prompt)
            >>> pool.append(0, *np.ones((2, 5, 1, 4), np.float16), [a], cu_seqlens=[0, 5])
            >>> [pool.length(s) for s in (pool.add([5, 6, 7, 8, 1]), pool.add([1, 6, 7, 8]), pool.add(prompt, "a"))]
            [4, 0, 0]
        """
        operation = "PagedKVCacheStore.add"
        if token_ids is not None:
            refuse_per_head(self.form, operation, "blocks of single heads are not found by token_ids")
        runtime.require_alive(self.runtime, operation)
        ids = host_integers(token_ids, "token_ids", operation, self.runtime) if token_ids is not None else []
        if ids and not -(2**63) <= min(ids) <= max(ids) < 2**63:
            raise DTypeError(f"{operation}: token_ids hold an integer of more than 64 bits.")
        return self._sequences.add(ids, salt_bytes(salt, operation))

    @whole
    def append(self, layer: int, k: Any, v: Any, seqs: Sequence[int], cu_seqlens: Any = None) -> None:
        """Append new tokens of some sequences to one layer, in one launch.

        A step appends to every layer; blocks are taken by the first layer that needs them.

        Args:
            layer: its index.
            k, v: (T, H, D) and (T, H, D_v), the tokens of the first sequence before those of the second, and so on. Of
                the store's dtype or one that `tikv.copy` converts to it; for int8 and groups float32, float16 or
                bfloat16.
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
        self._append(operation, self._layer(layer, operation), k, v, seqs, cu_seqlens)

    def _append(self, operation: str, layer: int, k: Any, v: Any, seqs: Sequence[int], cu_seqlens: Any) -> AppendStep:
        """`append`, by the name that errors give as the operation; where the tokens went."""
        k_view, v_view = view(k, "k", operation), view(v, "v", operation)
        checks.rank(k_view, (3,), "k", "(T, H, D)", operation)
        pools, scales = self._pools.layers[layer], self._pools.scales[layer]
        key = (layer, k_view.key, v_view.key)
        if self.form.per_head:
            return self._append_heads(operation, layer, (k_view, v_view), seqs, cu_seqlens, key)
        plan = self._appends.get(key)
        if plan is None:
            form, index = self.form, new_array(k_view.shape[:1], dtypes.int32, self.runtime)
            arrays = [k_view, pools[0], v_view, pools[1], index, *scales.values()]
            checked = paged.check_write_slots(self.runtime, operation, arrays, form.layout, form.formats, [*scales])
            plan = self._appends.keep(key, checked)

        step = self._begin(operation, layer, seqs, cu_seqlens, k_view.shape[0])
        try:
            arrays = [k_view, pools[0], v_view, pools[1], self._on_device.slots(step), *scales.values()]
            self._copy_shared(step, lambda: plan.prepare(arrays))
            plan.run(arrays)
        except BaseException as error:
            self._sequences.undo(step, refused=isinstance(error, TikvError))
            raise
        self._sequences.commit(layer, step)
        return step

    def _append_heads(
        self,
        operation: str,
        layer: int,
        rows: tuple[ArrayView, ArrayView],
        seqs: Sequence[int],
        cu_seqlens: Any,
        key: tuple[Any, ...],
    ) -> AppendStep:
        """`_append` by a slot for each token and head."""
        pools, scales = self._pools.layers[layer], self._pools.scales[layer]
        write = self._head_appends.get(key)
        if write is None:
            write = self._head_appends.keep(key, HeadAppend(self.runtime, operation, self.form, rows, pools, scales))
        step = self._begin(operation, layer, seqs, cu_seqlens, rows[0].shape[0])
        try:
            step.slots = write.ordered(step.slots)
            write.run(rows, pools, scales, self._on_device.slots(step))
        except BaseException as error:
            self._sequences.undo(step, refused=isinstance(error, TikvError))
            raise
        self._sequences.commit(layer, step)
        return step

    @whole
    def write_qkv(
        self,
        layer: int,
        qkv: Any,
        seqs: Sequence[int],
        cu_seqlens: Any = None,
        *,
        num_q_heads: int,
        norm_rope: rope.NormRope | None = None,
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
        refuse_per_head(self.form, operation, "the fused write has one slot for all heads of a token")
        _refuse_fused(self.form, operation)
        layer = self._layer(layer, operation)
        rows = view(qkv, "qkv", operation)
        checks.rank(rows, (2,), "qkv", "(T, (Hq + 2 H) * D)", operation)
        pools = self._pools.layers[layer]
        scales: dict[str, Any] = self._pools.scales[layer]

        step = self._begin(operation, layer, seqs, cu_seqlens, rows.shape[0])
        try:
            if norm_rope is not None and rope_positions is None:
                rope_positions = self._on_device.upload("positions", step.positions)
            call = fused_call(
                operation,
                qkv,
                pools[0],
                pools[1],
                num_q_heads=num_q_heads,
                norm_rope=norm_rope,
                slot_mapping=self._on_device.slots(step),
                rope_positions=rope_positions,
                layout=self.layout,
                q_layout=q_layout,
                **scales,
            )
            self._copy_shared(step, call.prepare)
            q = call.run()
        except BaseException as error:
            self._sequences.undo(step, refused=isinstance(error, TikvError))
            raise
        self._sequences.commit(layer, step)
        return q

    def _begin(self, operation: str, layer: int, seqs: Sequence[int], cu_seqlens: Any, rows: int) -> AppendStep:
        """Take blocks for a layer's new tokens; `Sequences.commit` or `undo` ends it."""
        ids = tuple(host_integers(seqs, "seqs", operation, self.runtime))
        bounds = _cumulated(cu_seqlens, len(ids), rows, operation, self.runtime)
        return self._sequences.begin(operation, layer, ids, bounds, rows)

    def _copy_shared(self, step: AppendStep, prepare: Callable[[], None]) -> None:
        """Copy the shared blocks that a step writes into, once the write is prepared, which can be refused no more."""
        if step.copies and not step.committed:
            prepare()
            self._pools.copy_blocks(step.copies)

    @whole
    def attend(
        self,
        layer: int,
        q: Any,
        seqs: Sequence[int],
        *,
        layout: str = "token_major",
        scale: float | None = None,
        window: int | None = None,
        return_lse: bool = False,
        impl: str = "auto",
        softcap: float | None = None,
        out: Any = None,
        sink_logits: Any = None,
        alibi_slopes: Any = None,
        return_mass: bool = False,
        mass_queries: int | None = None,
        mask: Any = None,
        parents: Any = None,
    ) -> Any:
        """Attention of queries over what one layer of their sequences holds: `tikv.paged_decode_attention` on the pool.

        Args:
            layer: its index; its new tokens have been appended.
            q: (B, Hq, D), one query a sequence; or (B, T, Hq, D), the last T tokens of each, causal; head-major
                (B, Hq, T, D). For one sequence the axis of B may be left out, as in `KVCacheStore.attend`.
            seqs: the B sequences.
            layout: of q and of what is returned, "token_major" or "head_major".
            scale: of the scores; None for 1 / sqrt(D).
            window: tokens that a query sees, its own included; None for all.
            return_lse: also return the log-sum-exp of the scores.
            out: array for the result, in its shape, of q's dtype.
            impl, softcap, sink_logits, alibi_slopes, mask, parents: as in `tikv.paged_decode_attention`.
            return_mass, mass_queries: as in `KVCacheStore.attend`.

        Returns:
            ``out`` or a new array, of q's dtype and axes and V's width; with ``return_lse`` also lse, float32 in that
            shape without the last axis; with ``return_mass`` the mass last, float32 (B, num_kv_heads, longest), by
            position.

        Raises:
            PositionError: a sequence is none, is swapped out, or has some tokens but fewer than queries.
            ShapeError, DTypeError, OptionError: q, ``out`` or an option does not fit.

        Exactness: float32 arithmetic, one rounding at the end. A sequence without tokens gives 0 and -inf.
        Cost: one launch; each key and value is read once for all query heads of its KV head.
        """
        operation = "PagedKVCacheStore.attend"
        layer = self._layer(layer, operation)
        ids = tuple(host_integers(seqs, "seqs", operation, self.runtime))
        states = [self._state(seq, operation) for seq in ids]
        return_lse = checks.flag(return_lse, "return_lse", operation)
        queries = attend_queries(
            operation, view(q, "q", operation), layout, len(ids), self.num_kv_heads, self.head_dim, self.runtime
        )
        if queries.tokens > 1 or self._sequences.compacted:
            distances = {"window": window, "alibi_slopes": alibi_slopes}
            for seq, state in zip(ids, states, strict=True):
                remedy = queries.remedy(state.came(layer), self.num_kv_heads)
                self._sequences.check_queries(operation, layer, seq, state, queries.tokens, distances, remedy)
        tables, lens, most = self._tables(layer, ids, states)
        pools = self._pools.layers[layer]
        scales: dict[str, Any] = self._pools.scales[layer]
        terms = Terms(sink_logits, alibi_slopes, mask, index_array(parents))
        wanted = mass_queries_of(return_mass, mass_queries, terms, operation, self.form.formats[0])

        def call(rows: ArrayView) -> AttentionCall:
            return paged_call(
                operation, rows, pools[0], pools[1], tables, lens, layout=self.layout, scale=scale, window=window,
                softcap=softcap, impl=impl, terms=terms, formats=self.form.formats, **scales,
            )  # fmt: skip

        attending = call(queries.heads_first)
        result, lse = attend_in_order(
            attending.plan, q, queries, dict(attending.arrays), out, return_lse or wanted != 0
        )
        if wanted == 0:
            return results_of(result, lse, None)
        shape = (len(ids), self.num_kv_heads, int(np.max(most, initial=0)))
        mass = new_like(q, shape, dtypes.float32, self.runtime, zeroed=True)
        to_lse = queries.as_read(view(lse, "lse", operation))
        asking, their_lse = last_queries(queries.heads_first, to_lse, wanted)
        call(asking).weigh(their_lse, view(mass, "mass", operation))
        return results_of(result, lse if return_lse else None, mass)

    @whole
    def extend(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        seqs: Sequence[int],
        cu_seqlens: Any = None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        sink_logits: Any = None,
        alibi_slopes: Any = None,
        mask: Any = None,
        parents: Any = None,
        return_mass: bool = False,
        mass_queries: int | None = None,
    ) -> Any:
        """Append new tokens of some sequences and attend with their queries, in one call, prompts of any lengths.

        Args:
            layer: its index.
            q: (T, Hq, D) the queries of the new tokens, float32, float16 or bfloat16; num_kv_heads divides Hq.
            k, v, seqs, cu_seqlens: as in `append`.
            scale, window, softcap, sink_logits, alibi_slopes: as in `attend`; slopes of each of ``seqs``, or of all.
            mask, parents: as in `tikv.paged_decode_attention`, where the new tokens of each sequence are a tree: as
                many of each, at most 256, without padding.
            return_lse: also return the log-sum-exp of the scores, float32 (T, Hq).
            return_mass, mass_queries: as in `attend`; the last queries of each sequence.

        Returns:
            A new array of q's kind and dtype, (T, Hq, D_v); with ``return_lse`` also lse, and with ``return_mass`` the
            mass. Padding gives 0 and -inf.

        Raises:
            As `append` and `attend`. Nothing is written, and every sequence is as it was.

        Exactness: as `append` and `attend`: attention reads what is stored.
        Cost: as `append`; and attention is one launch for neighbouring sequences with as many new tokens, 256 queries
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
        layer = self._layer(layer, operation)
        return_lse = checks.flag(return_lse, "return_lse", operation)
        added = Terms(sink_logits, alibi_slopes, mask, index_array(parents))
        pools, scales = self._pools.layers[layer], self._pools.scales[layer]
        wanted = mass_queries_of(return_mass, mass_queries, added, operation, self.form.formats[0])
        seqs = host_integers(seqs, "seqs", operation, self.runtime)
        terms = added.views(operation)
        call = RaggedAttention(
            operation, self.form, pools, scales, q, scale, window, softcap, return_lse, len(seqs), terms, wanted
        )
        if tree_of(terms) and cu_seqlens is not None:
            cu_seqlens = even_starts(operation, cu_seqlens, len(seqs), call.q.shape[0], self.runtime)
        rows = view(k, "k", operation)
        checks.rank(rows, (3,), "k", "(T, H, D)", operation)
        checks.extent(call.q.shape[0], rows.shape[0], "the number of rows of q", operation, f"k: {describe(rows)}")
        if self._sequences.compacted:
            distances = {"window": window, "alibi_slopes": alibi_slopes}
            for seq in seqs:
                self._sequences.check_queries(operation, layer, seq, self._state(seq, operation), 1, distances)
        step = self._append(operation, layer, k, v, seqs, cu_seqlens)
        try:
            return call.attend(step.cu_seqlens, *self._tables(layer, step.ids, step.states))
        except BaseException:
            self._sequences.revoke(layer, step)
            raise

    def _tables(
        self, layer: int, ids: tuple[int, ...], states: Sequence[SequenceState]
    ) -> tuple[ArrayView, ArrayView, np.ndarray[Any, Any]]:
        """Block tables and lengths of sequences on the device, and the lengths on the host."""
        if isinstance(self._sequences, HeadSequences):
            return self._on_device.head_tables(layer, self._sequences, ids, states)
        lengths = tuple(state.lengths[layer] for state in states)
        return *self._on_device.block_tables(self._sequences.version, ids, states, lengths), np.array(lengths, np.int64)

    @whole
    def tokens(self, layer: int, seq: int) -> tuple[CacheArray, CacheArray]:
        """What one layer of a sequence holds, as a copy: K (length, H, D), V (length, H, D_v).

        int8 and groups come as float32.

        With ``per_head`` the length is what the head with most tokens holds, and zeros follow those of the others.

        Raises:
            PositionError: ``seq`` is none, or is swapped out.

        Cost: each row is read once and written once; a launch for K and one for V.
        """
        operation = "PagedKVCacheStore.tokens"
        layer = self._layer(layer, operation)
        state = self._state(seq, operation)
        if isinstance(self._sequences, HeadSequences):
            return self._tokens_of_heads(layer, self._sequences.of_heads(layer, state))
        length = state.lengths[layer]
        table = np.array(state.blocks[: self._sequences.blocks_for(length)], np.int32)
        found = []
        for stream, row in enumerate(self.form.rows):
            out = new_array((length, self.num_kv_heads, row.width), row.read_dtype, self.runtime)
            if length:
                self._pools.gather(layer, stream, table, length, out)
            found.append(CacheArray(out, self.runtime))
        return found[0], found[1]

    def _tokens_of_heads(self, layer: int, heads: Sequence[SequenceState]) -> tuple[CacheArray, CacheArray]:
        """`tokens` of a sequence whose heads have blocks of their own."""
        most, found = max(head.lengths[0] for head in heads), []
        for stream, row in enumerate(self.form.rows):
            out = new_array((most, len(heads), row.width), row.read_dtype, self.runtime, zeroed=True)
            for h, head in enumerate(heads):
                if n := head.lengths[0]:
                    to, table = out.part(1, h, h + 1).part(0, 0, n), np.array(head.blocks, np.int32)
                    self._pools.gather(layer, stream, table, n, to)
            found.append(CacheArray(out, self.runtime))
        return found[0], found[1]

    @whole
    def save(self, path: str | os.PathLike[str], seqs: Sequence[int] | None = None) -> None:
        """Save sequences to a .safetensors file: written beside it, synced, then renamed.

        A block that several of them hold is saved once and shared again when it is loaded, and prefixes are found again
        by `add`: the file carries the token ids of full blocks and the salts, for whoever can read it. Of a block only
        the slots that they have filled are saved, the others as zeros. One that is swapped out comes back so.

        Args:
            path: ends in ``.safetensors``. A file of that name is replaced in one step and keeps its mode; one behind a
                link is, and the link stays. What killed saves left in its folder is removed.
            seqs: the sequences, each once; None for all there are.

        Raises:
            CacheFileError: another ending, or the system refuses. An old file stays as it was.
            PositionError: a sequence is none, or is named twice.

        Exactness: every bit. Cost: their blocks, once to the host and once to the disk.

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
        refuse_per_head(self.form, operation, "files have a block table for a sequence")
        runtime.require_alive(self.runtime, operation)
        files.target_of(path, operation)
        ids = self.sequences if seqs is None else host_integers(seqs, "seqs", operation, self.runtime)
        states = self._sequences.distinct(ids, operation, "Name it once.", swapped=True)
        paged_files.write(path, self._sequences, self._pools, ids, states, operation)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, num_blocks: int | None = None, share_prefixes: bool = True
    ) -> PagedKVCacheStore:
        """A new store with the form and the sequences of a saved one, under their numbers, on the arch that runs now.

        Args:
            path: a file that `save` wrote.
            num_blocks: blocks of the pool; None for as many as the saved one had.
            share_prefixes: as in `load_sequences`.

        Raises:
            CacheFileError: the file is missing, damaged or not one that `save` wrote, or contradicts itself; or this
                machine has too little memory for its pool, and then it is a CapacityError too.
            CapacityError, DTypeError: ``num_blocks`` are too few, or this arch cannot hold it.
        """
        operation = "PagedKVCacheStore.load"
        contents = paged_files.read(path, operation)
        form = paged_files.arguments(path, contents, num_blocks, operation)
        with files.understanding(path, operation):
            store = cls(**form)
        paged_files.restore_all(path, contents, store._sequences, store._pools, operation, share_prefixes)
        return store

    @whole
    def load_sequences(
        self, path: str | os.PathLike[str], *, share_prefixes: bool = True, salt: str | bytes | int | None = None
    ) -> list[int]:
        """Add the sequences of a file to this pool: a prompt that was computed before, for example.

        Blocks that they share with each other are shared here too; none is shared with sequences that are here already.
        `add` finds their prefixes by the token ids in the file, where this pool has none of its own; old files have no
        token ids. That the rows belong to these tokens nobody can check: load a stranger's file with a ``salt`` of its
        own or with ``share_prefixes=False``.

        Args:
            path: a file that `save` wrote, of the same layers, heads, widths, dtype and block size; in any layout.
            share_prefixes: False: no `add` finds them, and they find nothing here when they are swapped in.
            salt: under which `add` finds them, whatever the file says; None for what it says of each.

        Returns:
            Their numbers here, in the order in which they were saved.

        Raises:
            CacheFileError: the file is missing, damaged or not one that `save` wrote, or contradicts itself.
            ShapeError, DTypeError: it is of another form.
            CapacityError: too few blocks are free. Whatever is raised, the pool is as it was.

        Exactness: every bit. Cost: the file is read once, its blocks are written once in all layers.
        """
        operation = "PagedKVCacheStore.load_sequences"
        refuse_per_head(self.form, operation, "files have a block table for a sequence")
        runtime.require_alive(self.runtime, operation)
        own = self._sequences, self._pools, operation, share_prefixes, salt_bytes(salt, operation)
        return paged_files.add(path, paged_files.read(path, operation), *own)


def _refuse_fused(form: PoolForm, operation: str) -> None:
    """What the fused write does not make.

    Raises:
        DTypeError: the store keeps that.
    """
    why = ""
    if not form.alike:
        why = f"keeps K and V alike, and this store is {form.kept_as}"
    elif form.formats != (None, None):
        why = f"makes no codes of {form.kept_as}"
    elif form.divisors != (None, None):
        why = "divides by no scale"
    if why:
        raise DTypeError(f"{operation}: the fused write {why}. Write to arrays with tikv.write_qkv and append them.")


def _cumulated(cu_seqlens: Any, count: int, rows: int, operation: str, live: runtime.Runtime) -> tuple[int, ...]:
    """The cumulated numbers of tokens, which agree with the rows there are."""
    if cu_seqlens is None:
        if rows != count:
            wanted = f"[0, {rows}]" if count == 1 else f"[0, ..., {rows}]"
            detail = f"one for each sequence, as cu_seqlens is None; for more give cu_seqlens={wanted}"
            checks.extent(rows, count, "the number of rows", operation, detail)
        return tuple(range(count + 1))
    bounds = tuple(host_integers(cu_seqlens, "cu_seqlens", operation, live))
    checks.extent(len(bounds), count + 1, "the length of cu_seqlens", operation, f"{count} sequences")
    if bounds[0] != 0 or bounds[-1] > rows or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ShapeError(
            f"{operation}: cu_seqlens={list(bounds)} must begin with 0, never fall, and end at most at the "
            f"{rows} rows given."
        )
    return bounds
