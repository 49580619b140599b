"""Dropping tokens in pages and closing the gaps: compaction, and the accepted paths of drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv.arrays import Array, Host
from tikv.errors import ShapeError
from tikv.ops import checks
from tikv.ops.keep import HeadRows, counts_of, host_kept_indices
from tikv.ops.plan import Launch
from tikv.ops.rotate import Rope
from tikv.stores.history import History
from tikv.stores.layers.drafts import check_ascending
from tikv.stores.layers.merging import refuse_with_rope
from tikv.stores.pools.head_sequences import HeadSequences
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.merging import PagedMerge
from tikv.stores.pools.pages import Changing, Pages
from tikv.stores.pools.rows import Moves, move_in_place, move_rows
from tikv.stores.pools.sequences import SequenceState


def compact(
    operation: str, pages: Pages[Any], layer: int, state: SequenceState, keep: Array, rope: Rope | None,
    merge: Any = None,
) -> None:  # fmt: skip
    """Keep some of the tokens that a layer of a sequence holds; `PagedKVCacheStore.compact`."""
    pages.refuse_pieces(operation)
    if merge is not None:
        refuse_with_rope(operation, rope)
        pages.refuse_merge(operation)
    if rope is not None:
        pages.check_rope(operation, layer, rope)
    # Indices or a mask of one sequence get an axis of sequences; what is not an array is refused later.
    of_one = [keep] if isinstance(keep, list | tuple) else keep[None] if getattr(keep, "shape", ()) else keep
    held = pages.sequences.held(layer, state)
    rows = HeadRows(1, pages.config.num_kv_heads, int(np.max(held)), held[None] if pages.config.per_head else held)
    index = host_kept_indices(of_one, rows, pages.runtime, operation)[0]
    merged = None if merge is None else PagedMerge.of(operation, pages, layer, state, index, held, merge)
    if isinstance(pages.sequences, HeadSequences):
        _compact_heads(operation, pages, pages.sequences, layer, state, index, rope, merged)
    else:
        _compact_alike(operation, pages, layer, state, _same_for_all(index, operation), rope, merged)


def _compact_heads(
    operation: str,
    pages: Pages[LayerPools],
    sequences: HeadSequences,
    layer: int,
    state: SequenceState,
    index: Host,
    rope: Rope | None,
    merged: PagedMerge | None,
) -> None:
    """Keep different tokens for each head, if a block holds tokens of one head only."""
    rotated, index = rope is not None, np.broadcast_to(index, (sequences.heads, index.shape[-1]))
    by_head = [row[:n] for row, n in zip(index, counts_of(index).tolist(), strict=True)]
    moves = sequences.moves(layer, state, by_head, rotated)
    move(operation, pages, layer, moves, rope)
    if merged is not None:
        merged.write(operation, [head.blocks for head in sequences.of_heads(layer, state)])
    sequences.compact_heads(layer, state, by_head, rotated)


def _compact_alike(
    operation: str, pages: Pages[Any], layer: int, state: SequenceState, indices: Host, rope: Rope | None,
    merged: PagedMerge | None,
) -> None:  # fmt: skip
    """Keep the same tokens for all heads, in blocks that other sequences may share."""
    sequences, count, held = pages.sequences, len(indices), state.lengths[layer]
    new, before = np.arange(count), state.positions(layer)[indices]
    pages.check_kept(operation, layer, state, indices)
    moves = Moves(indices, new, before, before if rope is None else new)
    changed = moves.changed
    first = int(changed.argmax()) if changed.any() else count
    if merged is not None:
        first = min(first, merged.first)
    step = sequences.begin_compaction(operation, state, first, count)
    with Changing(pages, step) as change:
        change.copy_shared()
        pages.move(operation, layer, state, step.tables[0], moves, rope)
        if merged is not None:
            merged.write(operation, [step.tables[0]] * pages.config.num_kv_heads)
    next_position = held + state.shift(layer) if rope is None else count
    sequences.compact(layer, step, first, History.of_rows([moves.after], state.appended(layer), next_position))


def move(operation: str, pages: Pages[LayerPools], layer: int, moves: Moves, rope: Rope | None) -> None:
    """Move and rotate rows of a layer, and update the summaries of the pages that they are in now."""
    move_rows(pages.runtime, pages.config, pages.pools.layers[layer], moves, rope, operation)
    summaries = pages.pools.pages[layer]
    if summaries is not None:
        summaries.summarize_slots(operation, moves.dst)


def commit(operation: str, pages: Pages[LayerPools], seqs: Array, path: Array, drafted: int | None) -> None:
    """Keep a path of the newest tokens of each sequence; `PagedKVCacheStore.commit`."""
    pages.refuse_pieces(operation)
    ids, sequences = pages.ids(seqs, operation), pages.sequences
    states = sequences.distinct(ids, operation, "Pass its path once.")
    if drafted is not None:
        drafted = checks.integer(drafted, "drafted", operation)
    counts = [state.drafted(operation, drafted) for state in states]
    paths = _paths(operation, path, counts)
    for i, (state, count, one) in enumerate(zip(states, counts, paths, strict=True)):
        state.draft.check(operation, [one], count, state.length, i)
    step = sequences.begin_paths(operation, states, counts, paths)
    with Changing(pages, step) as change:
        slots = sequences.moved_slots(step)
        launches = _moves(operation, pages, slots)
        change.copy_shared()
        for moves in launches:
            moves.bound.launch()
        for summaries, (_, dst) in zip(pages.pools.pages, slots, strict=True):
            if summaries is not None:
                summaries.summarize_slots(operation, dst)
    sequences.commit_paths(step)


def _same_for_all(index: Host, operation: str) -> Host:
    """The indices that all heads keep, from (n,) or (H, n); ShapeError if heads would keep different tokens."""
    if index.ndim == 2 and (index != index[0]).any():
        raise ShapeError(
            f"{operation}: heads would keep different tokens, and blocks of this store hold all heads. Keep the "
            "same tokens of each head, or use per_head=True."
        )
    one = index[0] if index.ndim == 2 else index
    return one[one >= 0].astype(np.int64)


def _moves(operation: str, pages: Pages[LayerPools], slots: Sequence[tuple[Host, Host]]) -> list[Launch]:
    """The launches that move rows from slots to slots of each layer, in the order of their places."""
    layers, launches, config = iter(slots), list[Launch](), pages.config
    for group in pages.pools.groups:
        first = np.arange(group.layers) * config.num_blocks * config.block_size
        pairs = [(src + n, dst + n) for n, (src, dst) in zip(first, layers, strict=False)]
        launches += move_in_place(pages.runtime, operation, config, group.arrays, pairs)
    return launches


def _paths(operation: str, path: Array, drafted: Sequence[int]) -> list[Host]:
    """The path of each sequence, int64; raises unless it ascends within its draft."""
    entries = path.tolist() if hasattr(path, "tolist") else path
    entries = list(entries) if isinstance(entries, list | tuple | range) else [entries]
    if len(drafted) == 1 and not any(isinstance(one, list | tuple) or hasattr(one, "shape") for one in entries):
        entries = [entries]
    if len(entries) != len(drafted):
        raise ShapeError(
            f"{operation}: path has {len(entries)} entries for {len(drafted)} sequences. Pass one for each."
        )
    paths = []
    for i, (one, count) in enumerate(zip(entries, drafted, strict=True)):
        numbers = one.tolist() if hasattr(one, "tolist") else one
        if not isinstance(numbers, list | tuple | range) or not all(type(n) is int for n in numbers):
            raise ShapeError(f"{operation}: path[{i}] is {one}. Give a list of ascending integers for each sequence.")
        paths.append(np.array(numbers, np.int64))
        check_ascending(operation, paths[-1], count, i)
    return paths
