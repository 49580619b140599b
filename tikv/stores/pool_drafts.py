"""Keeping the accepted paths of drafted tokens in a paged store: their rows move together, the others are forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import Host
from tikv.errors import OptionError, ShapeError, TikvError
from tikv.ops import checks
from tikv.ops.indices import host_integers
from tikv.ops.plan import Launch
from tikv.stores.commit import check_ascending
from tikv.stores.head_rows import move_in_place
from tikv.stores.pool_changes import PoolChanges
from tikv.stores.whole import whole


class PoolDrafts(PoolChanges):
    """The part of `PagedKVCacheStore` that keeps the accepted paths of drafted tokens."""

    @whole
    def commit(self, seqs: Sequence[int], path: Any, drafted: int | None = None) -> None:
        """Keep a path of the newest tokens of each sequence and drop the others: those of a tree that were accepted.

        It is done in every layer, which `append` or `extend` gave the draft before. Blocks that are left empty are free
        at once. Sequences that share blocks with these keep what they hold.

        Args:
            seqs: the sequences, each once.
            path: for each of them ascending indices among its drafted tokens, on the host, as many as it likes; an
                array (len(seqs), n) where all keep as many; (n,) for a single sequence.
            drafted: how many of the newest tokens of each were drafted; None for those of its last `append` or
                `extend`.

        Raises:
            PositionError: an index falls, repeats or leaves the draft; layers of a sequence to which different numbers
                of tokens came; a draft that is older than a `compact`; a sequence is none, is swapped out or is named
                twice.
            ShapeError: the path is no list of integers for each sequence.
            CapacityError: too few blocks are free for copies of those that another sequence shares.
            OptionError: layout VLLM. Nothing is changed.

        Exactness: rows, scales and codes keep their bits: those of a sequence that had only its path appended.
        Cost: rows that move are read and written once, in one launch for all layers that lie in one piece of memory,
            keys, values and scales together; in layout HND scales are one more. Paths of the first drafted tokens take
            none. Shared blocks in which rows change are copied first.

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
        if self.layout == "VLLM":
            raise OptionError(f"{operation}: layout VLLM cuts rows into pieces, which are not moved. Use NHD or HND.")
        ids, sequences = host_integers(seqs, "seqs", operation, self.runtime), self._sequences
        states = sequences.distinct(ids, operation, "Give its path once.")
        if drafted is not None:
            drafted = checks.integer(drafted, "drafted", operation)
        counts = sequences.check_drafted(operation, ids, states, drafted)
        step = sequences.begin_paths(operation, states, counts, _paths(operation, path, counts))
        try:
            launches = self._moves(operation, sequences.moved_slots(step))
            if step.copies:
                self._pools.copy_blocks(step.copies)
            for moves in launches:
                moves.bound.launch()
        except BaseException as error:
            sequences.undo(step, refused=isinstance(error, TikvError))
            raise
        sequences.commit_paths(step)

    def _moves(self, operation: str, slots: Sequence[tuple[Host, Host]]) -> list[Launch]:
        """The launches that move rows from slots to slots of each layer, in the order of their places."""
        layers, found = iter(slots), []
        for group in self._pools.groups:
            first = np.arange(group.layers) * self.num_blocks * self.block_size
            pairs = [(src + n, dst + n) for n, (src, dst) in zip(first, layers, strict=False)]
            found += move_in_place(self.runtime, operation, self.form, group.arrays, pairs)
        return found


def _paths(operation: str, path: Any, drafted: Sequence[int]) -> list[Host]:
    """The path of each sequence, ascending int64.

    Raises:
        ShapeError, PositionError: it has another form, does not ascend, or leaves the draft.
    """
    given = path.tolist() if hasattr(path, "tolist") else path
    given = list(given) if isinstance(given, list | tuple | range) else [given]
    if len(drafted) == 1 and not any(isinstance(one, list | tuple) or hasattr(one, "shape") for one in given):
        given = [given]
    if len(given) != len(drafted):
        raise ShapeError(f"{operation}: path has {len(given)} entries for {len(drafted)} sequences. Give one of each.")
    found = []
    for i, (one, count) in enumerate(zip(given, drafted, strict=True)):
        numbers = one.tolist() if hasattr(one, "tolist") else one
        if not isinstance(numbers, list | tuple | range) or not all(type(n) is int for n in numbers):
            raise ShapeError(f"{operation}: path[{i}] is {one}. Give a list of ascending integers for each sequence.")
        found.append(np.array(numbers, np.int64))
        check_ascending(operation, found[-1], count, i)
    return found
