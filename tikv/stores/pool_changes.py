"""What changes the sequences of a paged store but for appends: forks, what is cut off, dropped, swapped and freed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.errors import OptionError, PositionError, ShapeError, TikvError
from tikv.ops import checks
from tikv.ops.kept import Rows, counts_of, host_kept_indices
from tikv.ops.rotate import Rope
from tikv.stores.block_pool import slots_of
from tikv.stores.head_rows import Moves, check_turn, move_rows, refuse_per_head
from tikv.stores.head_sequences import HeadSequences
from tikv.stores.pool_facts import PoolFacts
from tikv.stores.sequences import Left
from tikv.stores.whole import whole


class PoolChanges(PoolFacts):
    """The part of `PagedKVCacheStore` that changes sequences that are there."""

    @whole
    def fork(self, seq: int) -> int:
        """A new sequence with the same tokens, sharing all blocks; the first to write into one gets a copy of it.

        It may go another way: of the ``token_ids`` that `add` was given, it keeps those of the full blocks that every
        layer holds, and what it appends later is not found by `add`.

        Returns:
            The number of the new sequence.

        Raises:
            PositionError: ``seq`` is none, or is swapped out.
            OptionError: a ``per_head`` store.

        Cost: none on the device now; later one block in all layers for each shared block that is written into.
        """
        operation = "PagedKVCacheStore.fork"
        refuse_per_head(self.form, operation, "blocks of single heads are not shared")
        return self._sequences.fork(self._state(seq, operation))

    @whole
    def truncate(self, seq: int, n: int) -> None:
        """Keep the first ``n`` tokens of a sequence, in every layer, and give back the blocks behind them.

        Raises:
            PositionError: ``seq`` is none or is swapped out, or holds fewer than ``n``; or a layer was compacted when
                it had more. Nothing is changed.

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
        self._sequences.check_truncate(operation, seq, state, n)
        self._sequences.truncate(state, n)

    @whole
    def free(self, seq: int) -> None:
        """Forget a sequence. Blocks that no other holds are free; full ones of known tokens can be found until then.

        Raises:
            PositionError: ``seq`` is none.

        Cost: none on the device.
        """
        self._state(seq, "PagedKVCacheStore.free", swapped=True)
        self._sequences.free(seq)

    @whole
    def swap_out(self, seq: int) -> None:
        """Move a sequence's keys and values to host memory and give back its blocks; `swap_in` brings them back.

        Until then it has a `length` and can be freed, and nothing else.

        Raises:
            PositionError: ``seq`` is none, or is swapped out already.
            OptionError: a ``per_head`` store.

        Cost: its blocks in all layers are read once; waits for the device.
        """
        operation = "PagedKVCacheStore.swap_out"
        refuse_per_head(self.form, operation, "blocks of single heads stay in their pool")
        state = self._state(seq, operation)
        self._sequences.swap_out(state, self._pools.read_blocks(state.blocks))

    @whole
    def swap_in(self, seq: int) -> None:
        """Bring a swapped-out sequence back into the pool. What is found there by its prefix is shared, not copied.

        Raises:
            CapacityError: too few blocks are free.
            PositionError: ``seq`` is none, or is not swapped out.
            Whatever is raised, the sequence stays swapped out and the blocks taken for it are free again.

        Cost: the blocks that are not shared are written once in all layers.
        """
        operation = "PagedKVCacheStore.swap_in"
        state = self._state(seq, operation, swapped=True)
        if state.swapped is None:
            raise PositionError(f"{operation}: sequence {seq} is not swapped out. Call swap_out({seq}) first.")
        shared, fresh = self._sequences.blocks_to_swap_in(state, operation)
        try:
            self._pools.write_blocks(state.swapped, range(len(shared), len(shared) + len(fresh)), fresh)
        except BaseException:
            self._sequences.blocks.release(shared + fresh)
            raise
        self._sequences.swap_in(state, shared, fresh)

    @whole
    def compact(self, layer: int, seq: int, keep: Any, *, rope: Rope | None = None) -> None:
        """Keep some of the tokens that one layer of a sequence holds, and drop the others; in place.

        Blocks that are left empty are free at once; without ``per_head`` blocks are of all layers, and are free when
        the last layer is done with them. The next token goes behind what is kept and still stands at position
        `length`; `positions` says where those that are kept stand.

        Args:
            layer: its index.
            seq: the sequence.
            keep: ascending indices into the order of `tokens`, (n,); or a bool mask (m,) with m the most that a head
                holds. With ``per_head`` also (H, n) or (H, m), for each head its own, a mask with any number for each.
            rope: the model's rotation: keys are turned from their true position to their new index, `positions` says 0,
                1 and so on, and `next_position`, which is `length` otherwise, goes on from the largest number kept.

        Raises:
            OptionError: layout VLLM.
            CapacityError: too few blocks are free for copies of those that another sequence shares.
            PositionError: an index falls, repeats or points outside; a mask keeps what a head does not hold; ``seq`` is
                none.
            ShapeError, DTypeError: keep has another shape or dtype, or keeps different tokens for heads that share
                blocks; keys that ``rope`` does not turn. Nothing is changed.

        Exactness: rows, scales and codes keep their bits. Keys that are turned are rounded once, as `tikv.rotate` says.
        Cost: each row that moves is read twice and written twice; indices and masks are read by the host. Shared blocks
            in which rows change are copied first, in all layers, and are found by no prefix any more.

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
        layer, state, sequences = self._layer(layer, operation), self._state(seq, operation), self._sequences
        if self.layout == "VLLM":
            raise OptionError(f"{operation}: layout VLLM cuts rows into pieces, which are not moved. Use NHD or HND.")
        pools, heads = self._pools.layers[layer], self.num_kv_heads
        if rope is not None:
            check_turn(self.form, pools, rope, operation)
        if isinstance(sequences, HeadSequences):
            held = sequences.held(layer, state)
            rows = Rows(1, heads, int(held.max()), held[None])
            index = host_kept_indices(_of_one(keep), rows, self.runtime, operation)[0]
            index = np.broadcast_to(index, (heads, index.shape[-1]))
            by_head = [row[:n] for row, n in zip(index, counts_of(index).tolist(), strict=True)]
            moves = sequences.moves(layer, state, by_head, rope is not None)
            move_rows(self.runtime, self.form, pools, moves, rope, operation)
            sequences.compact_heads(layer, state, by_head, rope is not None)
            return
        held_by_all = state.lengths[layer]
        index = host_kept_indices(_of_one(keep), Rows(1, heads, held_by_all, held_by_all), self.runtime, operation)
        chosen = _same_for_all(index[0], operation)
        place, before = np.arange(len(chosen)), state.positions(layer)[chosen]
        changed = (chosen != place) | ((rope is not None) & (before != place))
        first = int(changed.argmax()) if changed.any() else len(chosen)
        step = sequences.begin_compaction(operation, state, first, len(chosen))
        try:
            if step.copies:
                self._pools.copy_blocks(step.copies)
            src, dst = (slots_of(step.tables[0], some[changed], self.block_size) for some in (chosen, place))
            moves = Moves(src, dst, before[changed], place[changed])
            move_rows(self.runtime, self.form, pools, moves, rope, operation)
        except BaseException as error:
            sequences.undo(step, refused=isinstance(error, TikvError))
            raise
        came, shift = state.came(layer), state.shift(layer)
        left = Left(before, came - len(chosen), held_by_all + shift - len(chosen))
        sequences.compact(layer, step, first, left if rope is None else Left(place, left.dropped, 0))


def _of_one(keep: Any) -> Any:
    """Indices or a mask of one sequence, with an axis of sequences; what is no array is left for others to refuse."""
    if isinstance(keep, list | tuple):
        return [keep]
    return keep[None] if getattr(keep, "shape", ()) else keep


def _same_for_all(index: Host, operation: str) -> Host:
    """The indices (n,) or (H, n), which all heads keep.

    Raises:
        ShapeError: heads would keep different tokens.
    """
    if index.ndim == 2 and (index != index[0]).any():
        raise ShapeError(
            f"{operation}: heads would keep different tokens, and blocks of this store hold all heads. Keep the same "
            f"of each, or use per_head=True."
        )
    one = index[0] if index.ndim == 2 else index
    return one[one >= 0].astype(np.int64)
