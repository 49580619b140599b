"""Sequences of a paged store in files: each block once, as layout NHD has it, and who holds it.

A file is of no layout, so that a pool of another one can read it. It carries the token ids of full blocks, from which
the digests that prefixes are found by are computed again, and the salts of its sequences.
"""

from __future__ import annotations

import itertools
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks
from tikv.ops.layouts import POOL_LAYOUTS
from tikv.stores import files
from tikv.stores.files.tensor_file import Entry
from tikv.stores.history import History
from tikv.stores.pools.blocks import MOST_SALT
from tikv.stores.pools.form import HostArray, in_full
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.sequences import Sequences, SequenceState

KIND = "PagedKVCacheStore"
POSITIONS = "positions"  # where the tokens stand that compactions left, of all sequences and layers
TOKEN_IDS = "token_ids"  # the known tokens of all sequences, one after the other
MOST_BLOCKS = 2**22  # of a pool that is made because a file says so: 67 million tokens in blocks of 16
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
    """Save these sequences, or raise CacheFileError. Slots that they have not filled are saved as zeros."""
    held = list(dict.fromkeys(block for state in states for block in state.blocks))
    parts = [pools.read_blocks(held), *(state.swapped for state in states if state.swapped is not None)]
    place = {block: i for i, block in enumerate(held)}
    count, tables = len(held), []
    for state in states:
        if state.swapped is None:
            tables.append([place[block] for block in state.blocks])
        else:
            tables.append(list(range(count, count + sequences.blocks_for(state.held))))
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
    ids_known = np.concatenate([np.empty(0, np.int64), *(state.token_ids for state in states)])
    if len(ids_known):
        tensors[TOKEN_IDS] = ids_known
    left = [layer.positions[0] for state in states for layer in state.left if layer]
    if sum(map(len, left)):
        tensors[POSITIONS] = np.concatenate(left)
    saved = [
        {
            "seq": seq,
            "blocks": table,
            "lengths": state.lengths,
            "token_ids": len(state.token_ids),
            "salt": state.salt.hex(),
            "swapped": state.swapped is not None,
            "left": [one and [one.tokens, one.dropped, state.shift(i)] for i, one in enumerate(state.left)],
        }
        for seq, state, table in zip(ids, states, tables, strict=True)
    ]
    files.write(path, KIND, tensors, {"form": pools.facts(), "next": sequences.next, "sequences": saved}, operation)


def read(path: Path, operation: str) -> Contents:
    """The tensors and facts of a file that `write` made, which agree with each other; or CacheFileError."""
    return files.read(path, KIND, operation, _check)


def arguments(path: Path, contents: Contents, num_blocks: int | None, operation: str) -> dict[str, Any]:
    """The arguments that make a store for the sequences of a file: as saved, or with so many blocks; or a refusal."""
    tensors, facts = contents
    form: dict[str, Any] = facts["form"]
    if num_blocks is not None:
        return form | {"num_blocks": checks.integer(num_blocks, "num_blocks", operation, low=1)}
    if form["num_blocks"] > MOST_BLOCKS:
        raise files.CacheFileCapacityError(
            f"{operation}: {str(path)!r} describes a pool of {form['num_blocks']} blocks; more than {MOST_BLOCKS} "
            f"are not made because a file says so. Give num_blocks."
        )
    arrays = [array for name, array in tensors.items() if name not in (TOKEN_IDS, POSITIONS)]
    block = sum(array.itemsize * math.prod(array.shape[1:]) for array in arrays)
    files.require_memory(path, form["num_blocks"] * block, operation)
    return form


def add(
    path: Path,
    contents: Contents,
    sequences: Sequences,
    pools: LayerPools,
    operation: str,
    share_prefixes: bool,
    salt: bytes,
) -> list[int]:
    """Add the sequences of a file to those there are, under the next numbers; all of them or none.

    Their prefixes are found, if at all, under this salt or else their own, where no block of the pool is found.

    Raises:
        ShapeError, DTypeError: the file has another form than the pools.
        As `restore`.
    """
    _, facts = contents
    with files.understanding(path, operation):
        forms = facts["form"], pools.facts()
        theirs, ours = map(in_full, forms)
        numbers = list(range(sequences.next, sequences.next + len(facts["sequences"])))
        other = [name for name, mine in ours.items() if theirs[name] != mine]
    for name in other:
        if name not in ("num_blocks", "layout"):
            raise (DTypeError if "dtype" in name else ShapeError)(
                f"{operation}: the pool of {str(path)!r} had {name}={theirs[name]}, this one has "
                f"{ours[name]}. Use PagedKVCacheStore.load, or a pool of that form."
            )
    restore(path, contents, numbers, sequences, pools, operation, share_prefixes=share_prefixes, salt=salt, added=True)
    sequences.next += len(numbers)
    return numbers


def restore_all(
    path: Path, contents: Contents, sequences: Sequences, pools: LayerPools, operation: str, share_prefixes: bool
) -> None:
    """Let a new store have the sequences of a file, under their numbers, as `restore`."""
    _, facts = contents
    numbers = [saved["seq"] for saved in facts["sequences"]]
    restore(path, contents, numbers, sequences, pools, operation, share_prefixes=share_prefixes)
    sequences.next = max([facts["next"], *(number + 1 for number in numbers)])


def restore(
    path: Path,
    contents: Contents,
    numbers: list[int],
    sequences: Sequences,
    pools: LayerPools,
    operation: str,
    *,
    share_prefixes: bool,
    salt: bytes = b"",
    added: bool = False,
) -> None:
    """Make the sequences of a file under these numbers; all of them or none.

    Digests are computed from the token ids that the file carries; what it says of digests is not looked at. With
    `added`, to a pool that has others, a prefix that is found there already goes on to be found there.

    Raises:
        CacheFileError: the file contradicts itself.
        CapacityError: too few blocks are free.
    """
    tensors, facts = contents
    known, first = tensors.get(TOKEN_IDS, np.empty(0, np.int64)), 0
    standing = iter(tensors.get(POSITIONS, np.empty(0, np.int64)).tolist())
    saved = []
    with files.understanding(path, operation):
        rows = _rows_of(tensors, pools)
        for sequence in facts["sequences"]:
            state = SequenceState(list(sequence["blocks"]), list(sequence["lengths"]))
            state.left = [_left(told, standing) for told in sequence.get("left", state.left)]
            count = sequence.get("token_ids", 0)  # none in files of before there were any
            if share_prefixes:
                state.salt = salt or bytes.fromhex(sequence.get("salt", ""))
                state.token_ids, state.digests = sequences.known(known[first : first + count], state.salt)
            if added:
                state.withheld = frozenset(d for d in state.digests if sequences.blocks.find(d) is not None)
            first += count
            saved.append((state, sequence["swapped"]))
    used = sorted({block for state, swapped in saved if not swapped for block in state.blocks})
    fresh = sequences.blocks.allocate(len(used), operation)
    try:
        pools.write_blocks(pools.from_rows([[a[used] for a in layer] for layer in rows]), range(len(used)), fresh)
        block_of = dict(zip(used, fresh, strict=True))
        for state, swapped in saved:
            if swapped:
                state.swapped = pools.from_rows([[a[state.blocks] for a in layer] for layer in rows])
                state.blocks = []
                state.registered = min(min(state.lengths) // sequences.block_size, len(state.digests))
            else:
                state.blocks = [block_of[block] for block in state.blocks]
    except BaseException:
        sequences.blocks.release(fresh)
        raise
    sequences.restore(dict(zip(numbers, (state for state, _ in saved), strict=True)))
    sequences.blocks.release(fresh)  # their sequences hold them now


def _left(told: Any, standing: Iterator[int]) -> History | None:
    """What a compaction left of a layer, by the numbers of the file and the next of the positions; or ValueError."""
    if told is None:
        return None
    count, dropped, shift = told
    positions = np.fromiter(itertools.islice(standing, count), np.int64, count)
    if (np.diff(positions, prepend=-1, append=count + shift) <= 0).any():
        raise ValueError("what a layer kept does not rise, or goes beyond its end")
    return History.of_rows([positions], count + dropped, count + shift)


def _rows_of(tensors: dict[str, HostArray], pools: LayerPools) -> list[list[HostArray]]:
    """The arrays of each layer in a file; KeyError or ValueError of one that is missing or unlike the pools."""
    names, layers = pools.form.names(), range(len(pools.layers))
    found = [[tensors[f"layers.{layer}.{name}"] for name in names] for layer in layers]
    for layer, arrays in enumerate(found):
        for array, (name, (shape, dtype)) in zip(arrays, names.items(), strict=True):
            if array.shape[1:] != shape or array.dtype != dtype.numpy:
                raise ValueError(f"{name} of layer {layer} has blocks {array.shape[1:]} where {shape} is needed")
    return found


def _check(facts: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError where the facts cannot be, or are not those of the tensors."""
    form = facts["form"]
    layers = files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    size, heads = (files.integer(form[name], name, low=1) for name in ("block_size", "num_kv_heads"))
    num_blocks = files.integer(form["num_blocks"], "num_blocks", low=1)
    if form["layout"] not in POOL_LAYOUTS:
        raise ValueError(f"layout {reprlib.repr(form['layout'])} is unknown")
    shape = entries["layers.0.k"].shape
    count = shape[0] if shape else 0
    for layer in range(layers):
        for name, width, dtype in files.storage(form):
            files.require_entry(entries, f"layers.{layer}.{name}", (count, size, heads, *width), dtype)
    files.integer(facts["next"], "next")
    sequences = files.listed(facts["sequences"], "sequences")
    known = kept = 0
    numbers: set[int] = set()
    alone: set[int] = set()  # blocks of those that are swapped out
    used: set[int] = set()
    for sequence in sequences:
        number = files.integer(sequence["seq"], "the number of a sequence")
        known += files.integer(sequence.get("token_ids", 0), "token_ids of a sequence")
        blocks = _blocks(sequence, number, layers, size, count)
        kept += _kept(sequence, number, layers)
        if alone & blocks or (sequence["swapped"] and used & blocks):
            raise ValueError(f"sequence {number} has a block of another one that is swapped out")
        (alone if sequence["swapped"] else used).update(blocks)
        numbers.add(number)
    if len(numbers) != len(sequences):
        raise ValueError(f"{len(sequences)} sequences have {len(numbers)} numbers")
    if len(used) > num_blocks or len(used) + len(alone) != count:
        raise ValueError(f"{len(used)} and {len(alone)} blocks of {count} are used, in a pool of {num_blocks}")
    for name, length in ((TOKEN_IDS, known), (POSITIONS, kept)):
        if length:
            files.require_entry(entries, name, (length,), np.dtype(np.int64))


def _kept(sequence: dict[str, Any], number: int, layers: int) -> int:
    """How many positions a file has of a sequence's layers that were compacted; raises as `_check`."""
    if "left" not in sequence:  # in files of before there was any
        return 0
    found = 0
    for layer, told in enumerate(files.listed(sequence["left"], "left", layers)):
        if told is not None:
            count, *_ = files.integers(told, "what a layer kept", "what a layer kept", 3)
            if count > sequence["lengths"][layer]:
                raise ValueError(f"sequence {number} has fewer tokens in layer {layer} than it kept")
            found += count
    return found


def _blocks(sequence: dict[str, Any], number: int, layers: int, size: int, count: int) -> set[int]:
    """The blocks of a sequence that says of itself what can be; raises as `_check`."""
    blocks = files.integers(sequence["blocks"], "blocks", "a block", high=count - 1)
    lengths = files.integers(sequence["lengths"], "lengths", "a length", layers)
    if len({*blocks}) != len(blocks):
        raise ValueError(f"sequence {number} has a block twice")
    if len(blocks) != -(-max(lengths) // size):
        raise ValueError(f"sequence {number} has {len(blocks)} blocks for {max(lengths)} tokens")
    if type(sequence["swapped"]) is not bool:
        raise ValueError(f"swapped is {reprlib.repr(sequence['swapped'])} and must be true or false")
    for text in (sequence.get("salt", ""), *files.listed(sequence.get("digests", []), "digests")):
        bytes.fromhex(text)
    if len(sequence.get("salt", "")) > 2 * MOST_SALT:
        raise ValueError(f"sequence {number} has a salt of more than {MOST_SALT} bytes")
    return {*blocks}
