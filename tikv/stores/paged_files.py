"""Sequences of a paged store in files: each block once, as layout NHD has it, and who holds it.

A file is of no layout, so that a pool of another one can read it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from tikv.errors import DTypeError, ShapeError
from tikv.stores import files
from tikv.stores.layer_pools import LayerPools
from tikv.stores.pool_form import HostArray
from tikv.stores.sequences import Sequences, SequenceState

KIND = "PagedKVCacheStore"
Path: TypeAlias = str | os.PathLike[str]
Contents: TypeAlias = tuple[dict[str, HostArray], dict[str, Any]]  # of a file: tensors by name, and facts


def write(
    path: Path,
    sequences: Sequences,
    pools: LayerPools,
    ids: Sequence[int],
    states: Sequence[SequenceState],
    operation: str,
) -> None:
    """Save these sequences. Slots that they have not filled are saved as zeros.

    Raises:
        CacheFileError: another ending, or the system refuses.
    """
    held = list(dict.fromkeys(block for state in states for block in state.blocks))
    parts = [pools.read_blocks(held), *(state.swapped for state in states if state.swapped is not None)]
    place = {block: i for i, block in enumerate(held)}
    count, tables = len(held), []
    for state in states:
        if state.swapped is None:
            tables.append([place[block] for block in state.blocks])
        else:
            tables.append(list(range(count, count + sequences.blocks_for(state.length))))
            count += len(tables[-1])
    filled = np.zeros((sequences.num_layers, count), np.int64)  # slots of each block
    for state, table in zip(states, tables, strict=True):
        behind = np.array(state.lengths)[:, None] - sequences.block_size * np.arange(len(table))
        filled[:, table] = np.maximum(filled[:, table], behind)
    tensors = {}
    for layer, found in enumerate(zip(*map(pools.to_rows, parts), strict=True)):
        unused = np.arange(sequences.block_size) >= filled[layer, :, None]
        for name, pieces in zip(pools.form.names(), zip(*found, strict=True), strict=True):
            tensors[f"layers.{layer}.{name}"] = array = np.concatenate(pieces)
            array[unused] = 0
    saved = [
        {
            "seq": seq,
            "blocks": table,
            "lengths": state.lengths,
            "digests": [digest.hex() for digest in state.digests],
            "swapped": state.swapped is not None,
        }
        for seq, state, table in zip(ids, states, tables, strict=True)
    ]
    files.write(path, KIND, tensors, {"form": pools.facts(), "next": sequences.next, "sequences": saved}, operation)


def read(path: Path, operation: str) -> Contents:
    """The tensors and facts of a file that `write` made.

    Raises:
        CacheFileError: the file is missing, truncated, damaged, or another.
    """
    return files.read(path, KIND, operation)


def add(path: Path, contents: Contents, sequences: Sequences, pools: LayerPools, operation: str) -> list[int]:
    """Add the sequences of a file to those there are, under the next numbers; all of them or none.

    Raises:
        ShapeError, DTypeError: the file has another form than the pools.
        As `restore`.
    """
    _, facts = contents
    with files.understanding(path, operation):
        theirs, ours = facts["form"], pools.facts()
        numbers = list(range(sequences.next, sequences.next + len(facts["sequences"])))
        other = [name for name, mine in ours.items() if theirs[name] != mine]
    for name in other:
        if name not in ("num_blocks", "layout"):
            raise (DTypeError if "dtype" in name else ShapeError)(
                f"{operation}: the pool of {str(path)!r} had {name}={theirs[name]}, this one has "
                f"{ours[name]}. Use PagedKVCacheStore.load, or a pool of that form."
            )
    restore(path, contents, numbers, sequences, pools, operation)
    sequences.next += len(numbers)
    return numbers


def restore(
    path: Path, contents: Contents, numbers: list[int], sequences: Sequences, pools: LayerPools, operation: str
) -> None:
    """Make the sequences of a file under these numbers; all of them or none.

    Raises:
        CacheFileError: the file contradicts itself.
        CapacityError: too few blocks are free.
    """
    tensors, facts = contents
    with files.understanding(path, operation):
        rows = _rows_of(tensors, pools)
        saved = [_state_of(sequence, len(rows[0][0]), sequences) for sequence in facts["sequences"]]
        if len({*numbers}) != len(saved) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"the sequences have the numbers {numbers}")
    used = sorted({block for state, swapped in saved if not swapped for block in state.blocks})
    fresh = sequences.blocks.allocate(len(used), operation)
    try:
        pools.write_blocks(pools.from_rows([[a[used] for a in layer] for layer in rows]), range(len(used)), fresh)
    except BaseException:
        sequences.blocks.release(fresh)
        raise
    block_of = dict(zip(used, fresh, strict=True))
    for state, swapped in saved:
        if swapped:
            state.swapped = pools.from_rows([[a[state.blocks] for a in layer] for layer in rows])
            state.blocks = []
            state.registered = min(min(state.lengths) // sequences.block_size, len(state.digests))
        else:
            state.blocks = [block_of[block] for block in state.blocks]
    sequences.restore(dict(zip(numbers, (state for state, _ in saved), strict=True)))
    sequences.blocks.release(fresh)  # their sequences hold them now


def _rows_of(tensors: dict[str, HostArray], pools: LayerPools) -> list[list[HostArray]]:
    """The arrays of each layer in a file.

    Raises:
        KeyError, ValueError: one is missing or has another form than the pools.
    """
    names, layers = pools.form.names(), range(len(pools.layers))
    count = len(tensors["layers.0.k"])
    for layer in layers:
        for name, (shape, dtype) in names.items():
            array = tensors[f"layers.{layer}.{name}"]
            if array.shape != (count, *shape) or array.dtype != dtype.numpy:
                raise ValueError(
                    f"{name} of layer {layer} is {array.dtype.name} {array.shape} where {dtype.name} "
                    f"{(count, *shape)} is needed"
                )
    return [[tensors[f"layers.{layer}.{name}"] for name in names] for layer in layers]


def _state_of(sequence: dict[str, Any], count: int, sequences: Sequences) -> tuple[SequenceState, bool]:
    """A sequence of a file, its blocks numbered as there, and whether it was swapped out.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    found, lengths = sequence["blocks"], sequence["lengths"]
    digests = [bytes.fromhex(digest) for digest in sequence["digests"]]
    if any(type(n) is not int or n < 0 for n in [*found, *lengths]) or max(found, default=-1) >= count:
        raise ValueError(f"sequence {sequence['seq']} names blocks or lengths that are none")
    if len({*found}) != len(found) or len(lengths) != sequences.num_layers:
        raise ValueError(f"sequence {sequence['seq']} has {len(lengths)} layers, or a block twice")
    if len(found) != sequences.blocks_for(max(lengths)):
        raise ValueError(f"sequence {sequence['seq']} has {len(found)} blocks for {max(lengths)} tokens")
    return SequenceState(found, lengths, digests), bool(sequence["swapped"])
