"""What changes the sequences of a paged store but for appends: forks, what is cut off, dropped, swapped and freed."""

from __future__ import annotations

from typing import Any

from tikv.errors import OptionError, PositionError
from tikv.ops import checks
from tikv.ops.kept import Rows, counts_of, host_kept_indices
from tikv.stores.head_rows import move_rows, refuse_per_head
from tikv.stores.head_sequences import HeadSequences
from tikv.stores.pool_facts import PoolFacts
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
        if isinstance(self._sequences, HeadSequences):
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
    def compact(self, layer: int, seq: int, keep: Any) -> None:
        """Keep some of the tokens that each head of a sequence holds in one layer, and drop the others.

        Blocks that are left empty are free at once. The next token still stands at position `length`, and goes behind
        what is kept; `positions` says where those that are kept stand.

        Args:
            layer: its index.
            seq: the sequence.
            keep: ascending indices into the order of `tokens`, (H, n) or (n,) for all heads; or a bool mask (H, m) or
                (m,) with m the most that a head holds, which may keep a different number for each head.

        Raises:
            OptionError: the store has no blocks for single heads.
            PositionError: an index falls, repeats or points outside; a mask keeps what a head does not hold; ``seq`` is
                none.
            ShapeError, DTypeError: keep has another shape or dtype. Nothing is changed.

        Exactness: bit-exact.
        Cost: each row that moves is read twice and written twice; indices and masks are read by the host.

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
        if not isinstance(sequences, HeadSequences):
            raise OptionError(f"{operation}: blocks of this store hold all heads of all layers. Use per_head=True.")
        held = sequences.held(layer, state)
        rows = Rows(1, self.num_kv_heads, int(held.max()), held[None])
        index = host_kept_indices(_of_one(keep), rows, self.runtime, operation)
        counts = counts_of(index)
        lists = [
            of_head[:n] for of_head, n in zip(
                index[0] if index.ndim == 3 else [index[0]] * self.num_kv_heads,
                counts[0] if index.ndim == 3 else [counts[0]] * self.num_kv_heads,
                strict=True,
            )
        ]  # fmt: skip
        move_rows(self.runtime, self._pools.layers[layer], *sequences.moves(layer, state, lists))
        sequences.compact(layer, state, lists)


def _of_one(keep: Any) -> Any:
    """Indices or a mask of one sequence, with an axis of sequences."""
    return [keep] if isinstance(keep, list | tuple) else keep[None]
