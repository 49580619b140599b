"""RowPages: a paged store that keeps the row of each token in a slot of a block, in any dtype of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, ArrayView, CacheArray, describe, new_array, to_device, view, view_without_owner
from tikv.errors import DTypeError, OptionError
from tikv.ops import checks
from tikv.ops.attention.call import AttentionCall, attention_call
from tikv.ops.attention.request import AttendRequest
from tikv.ops.attention.terms import tree_of
from tikv.ops.rotate import Rope
from tikv.ops.write_qkv import fused_call
from tikv.ops.write_qkv_codes import FusedTarget
from tikv.runtime import Runtime
from tikv.runtime.interrupts import Held
from tikv.stores.draft import Parents
from tikv.stores.layers.attend import last_queries, results_of
from tikv.stores.layers.queries import AXES, Queries, attend_queries, rows_first, with_tokens
from tikv.stores.pools import compaction
from tikv.stores.pools.append import HeadWrite, RowWrite, begin_append, check_rank, check_rows, cumulated
from tikv.stores.pools.blocks import slots_of
from tikv.stores.pools.config import PoolConfig
from tikv.stores.pools.head_sequences import HeadSequences
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.pages import Changing, Pages
from tikv.stores.pools.ragged import RaggedAttention, even_starts
from tikv.stores.pools.rows import Moves, check_turn
from tikv.stores.pools.sequences import AppendStep, SequenceState, refuse_missed, rewritten_back
from tikv.stores.pools.shared_prefix import SharedAttention, as_one, pool_call, serves


class RowPages(Pages[LayerPools]):
    """`Pages` that keep the row of each token in one slot of a block, in any dtype but groups along tokens."""

    title = "a pool of rows"
    remedy = "Use another dtype."

    def __init__(self, live: Runtime, config: PoolConfig, num_layers: int) -> None:
        super().__init__(live, config, num_layers, LayerPools(config, num_layers, live))

    def append(
        self, operation: str, layer: int, rows: Sequence[ArrayView], seqs: Array, cu_seqlens: Array, layout: str,
        check: Callable[[AppendStep], None] = lambda step: None,
    ) -> AppendStep:  # fmt: skip
        """As in `Pages`; `check` may raise before anything is written."""
        key = (layer, checks.name(layout, "layout", operation, checks.LAYOUTS), *[a.key for a in rows])
        write = self.pools.writes.get(key)
        if write is None:
            check_rows(operation, self.config, rows, layout)
        rows = [rows_first(a, layout) for a in rows]
        if write is None:
            write = self.pools.writes.keep(key, self._write(operation, layer, rows))
        step = begin_append(self, operation, layer, seqs, cu_seqlens, rows[0].shape[0])
        with Changing(self, step) as change:
            check(step)
            calls = write.calls(rows, self.tables.slots(step, write.ordered))
            change.copy_shared(calls[0].prepare)
            for call in calls:
                call.run()
            if write.summarized_later is not None:
                write.summarized_later.summarize_filled(operation, step.slots)
        self.sequences.commit(layer, step)
        return step

    def _write(self, operation: str, layer: int, rows: Sequence[ArrayView]) -> RowWrite:
        """The write of new rows of one form; the DTypeError names another store that takes their dtype, if any."""
        dtype = rows[0].dtype
        try:
            return (HeadWrite if self.config.per_head else RowWrite)(operation, self.pools, layer, rows)
        except DTypeError as error:
            if dtype is not rows[1].dtype or dtype not in dtypes.FLOATS:
                raise
            raise DTypeError(f"{error} Or make the store with dtype={dtype.name!r}.") from None

    def write_qkv(self, operation: str, layer: int, qkv: Any, seqs: Array, cu_seqlens: Array, **options: Any) -> Any:
        """As in `Pages`."""
        self._refuse_fused(operation)
        rows = view(qkv, "qkv", operation)
        checks.rank(rows, (2,), "qkv", "(T, (Hq + 2 H) * D)", operation)
        k_pool, v_pool = self.pools.layers[layer][:2]
        scales: dict[str, Any] = self.pools.scales[layer]
        step = begin_append(self, operation, layer, seqs, cu_seqlens, rows.shape[0])
        with Changing(self, step) as change:
            if options["norm_rope"] is not None and options["rope_positions"] is None:
                options["rope_positions"] = self.tables.known("positions", step.positions)
            slots = self.tables.slots(step)
            target = FusedTarget(k_pool, v_pool, slot_mapping=slots, layout=self.config.layout, **scales)
            call = fused_call(operation, qkv, target, **options)
            change.copy_shared(call.prepare)
            q = call.run()
            summaries = self.pools.pages[layer]
            if summaries is not None:
                summaries.summarize_filled(operation, step.slots)
        self.sequences.commit(layer, step)
        return q

    def _refuse_fused(self, operation: str) -> None:
        """Raise unless the fused write supports this store."""
        self.refuse_per_head(operation, "the fused write has one slot for all heads of a token")
        rows, why = self.config.rows, ""
        if not rows.alike:
            why = f"needs K and V in one format, and this store is {rows.name}"
        elif rows.formats != (None, None):
            why = f"cannot write codes of {rows.name}"
        elif rows.divided:
            why = "cannot divide by a scale"
        if why:
            raise DTypeError(
                f"{operation}: the fused write {why}. Write to arrays with tikv.write_qkv and append them."
            )

    def attend(self, operation: str, layer: int, q: Array, seqs: Array, request: AttendRequest) -> Any:
        """As in `Pages`."""
        config, live, sequences = self.config, self.runtime, self.sequences
        ids = self.ids(seqs, operation)
        states = [sequences.state(seq, operation) for seq in ids]
        if not request.return_lse and 0 in [state.lengths[layer] for state in states]:
            refuse_missed(operation, layer, states)
        sizes = len(ids), config.num_kv_heads, config.rows.k.width
        q_view = view_without_owner(q, "q", operation)
        queries = attend_queries(operation, q_view, request.layout, *sizes, live)
        read = queries.as_read(q_view)
        if queries.tokens > 1 or sequences.compacted:
            for state in states:
                remedy = queries.remedy(state.appended(layer), config.num_kv_heads)
                state.check_queries(operation, layer, queries.tokens, request, remedy)
        tables, lens, held = self.tables.block_tables(layer, sequences, ids, states)
        mass = request.asked_mass(operation)
        if request.block is not None and request.as_block(operation, queries.tokens):
            request = request._replace(causal=False)
        caches = self.pools.caches[layer]._replace(table=tables, lens=lens)
        attending = attention_call(operation, read, caches, request)
        if serves(live, request, config.per_head):
            shared = self._attend_shared(layer, q, queries, request, attending)
            if shared is not None:
                return shared
        if not mass.kind:
            return attending.attend(q, queries.results(request.out, request.return_lse))
        shape: tuple[int, ...] = (len(ids), config.num_kv_heads, int(np.max(held, initial=0)))
        if request.indices is not None:
            shape = attending.plan.mass_shape
        to_mass = mass.array(operation, q, shape, live, attending.arrays)
        result, lse = attending.attend(q, queries.results(request.out, True))
        to_lse = queries.as_read(view(lse, "lse", operation))
        asking, their_lse = last_queries(read, to_lse, mass.queries)
        mass.start(to_mass)
        weighing = attention_call(operation, asking, caches, request)
        weighing.weigh(their_lse, view(to_mass, "mass", operation), mass.kind)
        return results_of(result, lse if request.return_lse else None, to_mass)

    def _attend_shared(
        self, layer: int, q: Array, queries: Queries, request: AttendRequest, alone: AttentionCall
    ) -> Any:
        """`attend` that reads each shared block once; None if each sequence is to be read `alone`."""
        config, live, operation = self.config, self.runtime, alone.plan.operation
        read = alone.arrays["q"]
        runs, own_lens = self.tables.neighbours(0, read.shape[0], queries.tokens, self.block)
        if own_lens is None:
            return None
        asking = with_tokens(read, 4)
        if as_one(asking) is None:
            return None
        result, to = queries.result(operation, q, request.out, config.rows.v.width, live)
        if request.out is not None:
            checks.disjoint([(n, a, n == "out") for n, a in {**alone.arrays, "out": to}.items()], operation)
        lse = queries.new_lse(q, live) if request.return_lse else None
        to_lse = None if lse is None else with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
        call = pool_call(operation, self.pools.caches[layer], request.terms.views(operation))
        sharing = SharedAttention(
            operation, live, request, call, alone.arrays["table"], own_lens, runs, config.block_size
        )
        sharing.attend(asking, with_tokens(queries.as_read(to), 4), to_lse)
        return results_of(result, lse, None)

    def extend(
        self, operation: str, layer: int, arrays: tuple[Any, Any, Any], seqs: Array, cu_seqlens: Array,
        request: AttendRequest,
    ) -> Any:  # fmt: skip
        """As in `Pages`."""
        sequences, live, config, (q, k, v) = self.sequences, self.runtime, self.config, arrays
        ids = self.ids(seqs, operation)
        terms = request.terms.views(operation)
        call = RaggedAttention(operation, self, layer, q, request, len(ids), terms)
        if tree_of(terms) and cu_seqlens is not None:
            cu_seqlens = even_starts(operation, cu_seqlens, len(ids), call.q.shape[0], live)
        rows = view(k, "k", operation), view(v, "v", operation)
        check_rank(operation, "k", rows[0], request.layout)
        tokens = rows[0].shape[AXES[request.layout].index("T") - 1]
        if call.q.shape[0] != tokens:
            detail = f"k: {describe(rows[0])}"
            checks.extent(call.q.shape[0], tokens, "the number of rows of q", operation, detail)
        if sequences.compacted:
            for seq in ids:
                sequences.state(seq, operation).check_queries(operation, layer, 1, request)
        if not request.keep:
            check_rows(operation, config, rows, request.layout)
            bounds = cumulated(cu_seqlens, len(ids), tokens, operation, live)
            states = [sequences.state(seq, operation) for seq in ids]
            tables, lens, held = self.tables.block_tables(layer, sequences, ids, states)
            call.take_mass(len(ids), int(np.max(held, initial=0)), rows)
            new = [rows_first(a, request.layout) for a in rows]
            return call.attend_unkept(bounds, new, tables, lens, held)

        def take_mass(step: AppendStep) -> None:
            if call.mass.kind:
                new = np.diff(step.cu_seqlens)
                held = [np.max(sequences.held(layer, state)) for state in step.states]
                call.take_mass(len(ids), int(np.max(held + new, initial=0)), rows)

        step, before = None, [sequences.state(seq, operation).draft for seq in ids]
        parents = Parents(operation, terms["parents"], live) if layer == 0 and "parents" in terms else None
        try:
            with Held():
                step = self.append(operation, layer, rows, ids, cu_seqlens, request.layout, take_mass)
                if parents is not None:
                    sequences.grow_tree(step, parents)
            return call.attend(step.cu_seqlens, *self.tables.block_tables(layer, sequences, step.ids, step.states))
        except BaseException:
            if step is not None:
                with Held():
                    sequences.revoke(layer, step)
                    for state, draft in zip(step.states, before, strict=True):
                        state.draft = draft
            raise

    def rewrite(
        self, operation: str, layer: int, state: SequenceState, start: int, rows: Sequence[ArrayView], layout: str
    ) -> None:
        """As in `Pages`; blocks that other sequences share are copied first."""
        check_rows(operation, self.config, rows, layout)
        rows = [rows_first(a, layout) for a in rows]
        tokens, sequences, size = rows[0].shape[0], self.sequences, self.config.block_size
        back = rewritten_back(operation, layer, state, start, tokens)
        write, places = self._write(operation, layer, rows), np.arange(tokens)
        if isinstance(sequences, HeadSequences):
            heads = sequences.of_heads(layer, state)
            by_head = [slots_of(head.blocks, head.lengths[0] - back + places, size) for head in heads]
            slots = np.stack(by_head, axis=1).ravel().astype(np.int32)
            self._rewrite(operation, layer, write, rows, slots)
            return
        first = state.lengths[layer] - back
        step = sequences.begin_compaction(operation, state, first, first + tokens)
        with Changing(self, step) as change:
            change.copy_shared()
            slots = slots_of(step.tables[0], first + places, size).astype(np.int32)
            self._rewrite(operation, layer, write, rows, slots)
        sequences.rewritten(step, first)

    def _rewrite(
        self, operation: str, layer: int, write: RowWrite, rows: Sequence[ArrayView], slots: np.ndarray[Any, Any]
    ) -> None:
        """Write rows to slots, a slot for each token, and head if these have blocks of their own."""
        order = slots if write.ordered is None else write.ordered(slots)
        for call in write.calls(rows, to_device(order, self.runtime)):
            call.run()
        self.runtime.synchronize()  # the launches read slots that only this call keeps alive
        summaries = self.pools.pages[layer]
        if summaries is not None:
            summaries.summarize_slots(operation, np.unique(slots))

    def tokens(self, operation: str, layer: int, state: SequenceState) -> tuple[CacheArray, CacheArray]:
        """As in `Pages`; each head is read by itself if it has blocks of its own."""
        held, heads = self.sequences.blocks_held(layer, state), self.config.num_kv_heads
        most, copies = max(n for _, n in held), []
        for stream, row in enumerate(self.config.rows.both):
            out = new_array((most, heads, row.width), row.read_dtype, self.runtime, zeroed=len(held) > 1)
            for h, (blocks, n) in enumerate(held):
                to = out if len(held) == 1 else out.part(1, h, h + 1).part(0, 0, n)
                if n:
                    self.pools.gather(layer, stream, np.array(blocks, np.int32), n, to)
            copies.append(CacheArray(out, self.runtime))
        return copies[0], copies[1]

    def arrays(self, operation: str, layer: int) -> tuple[Sequence[ArrayView], dict[str, Any]]:
        """As in `Pages`."""
        return self.pools.layers[layer], self.pools.scales[layer]

    def page_summaries(self, operation: str, layer: int, seqs: Array) -> tuple[CacheArray, CacheArray]:
        """As in `Pages`."""
        states = [self.sequences.state(seq, operation) for seq in self.ids(seqs, operation)]
        summaries = self.pools.pages[layer]
        if summaries is None:
            raise OptionError(f"{operation}: the store keeps no summaries of pages. Make it with page_summaries=16.")
        return summaries.read(operation, *self.sequences.block_tables(layer, states))

    def move(
        self, operation: str, layer: int, state: SequenceState, table: Sequence[int], moves: Moves, rope: Rope | None
    ) -> None:
        """As in `Pages`, from slot to slot."""
        src, dst, *positions = (a[moves.changed] for a in moves)
        slots = (slots_of(table, indices, self.config.block_size) for indices in (src, dst))
        compaction.move(operation, self, layer, Moves(*slots, *positions), rope)

    def commit(self, operation: str, seqs: Array, path: Any, drafted: int | None) -> None:
        """As in `Pages`."""
        compaction.commit(operation, self, seqs, path, drafted)

    def check_rope(self, operation: str, layer: int, rope: Rope) -> None:
        """As in `Pages`."""
        check_turn(self.config, self.pools.layers[layer], rope, operation)
