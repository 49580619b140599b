"""Sequences of a paged store in files: each block once, in layout NHD, and which sequences hold it.

A pool of any layout can read a file. It has the token ids of full blocks, from which the digests that find prefixes are
computed again, and the salts of its sequences.
"""

from __future__ import annotations

import itertools
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from tikv import runtime
from tikv.errors import DTypeError, ShapeError
from tikv.formats import Aging, Quant, parse_aging
from tikv.ops import checks
from tikv.ops.layouts import POOL_LAYOUTS
from tikv.stores import files
from tikv.stores.files.tensor_file import Entry
from tikv.stores.history import History
from tikv.stores.layers.token_group_form import TokenGroupForm
from tikv.stores.pools.blocks import MOST_SALT
from tikv.stores.pools.config import PoolConfig, in_full
from tikv.stores.pools.memory import LayerPools
from tikv.stores.pools.pages import Pages
from tikv.stores.pools.sequences import SequenceState
from tikv.stores.row_format import ROWS

KIND = "PagedKVCacheStore"
POSITIONS = "positions"  # the positions of the tokens that compactions left, for all sequences and layers
TOKEN_IDS = "token_ids"  # the known token ids of all sequences, one sequence after the other
MOST_BLOCKS = 2**22  # the most that a file may ask for: 67 million tokens in blocks of 16
Path: TypeAlias = str | os.PathLike[str]


def write(path: Path, pages: Pages[Any], ids: Sequence[int], states: Sequence[SequenceState], operation: str) -> None:
    """Save these sequences, or raise CacheFileError. Slots that they have not filled are saved as zeros."""
    sequences, pools = pages.sequences, pages.pools
    held = list(dict.fromkeys(block for state in states for block in state.blocks))
    parts = [pools.read_blocks(held), *(state.swapped for state in states if state.swapped is not None)]
    index_of = {block: i for i, block in enumerate(held)}
    count, tables = len(held), []
    for state in states:
        if state.swapped is None:
            tables.append([index_of[block] for block in state.blocks])
        else:
            tables.append(list(range(count, count + sequences.blocks_for(state.held))))
            count += len(tables[-1])
    filled = np.zeros((sequences.num_layers, count), np.int64)  # how many slots of each block are filled
    for state, table in zip(states, tables, strict=True):
        in_block = np.array(pages.written(state))[:, None] - sequences.block_size * np.arange(len(table))
        filled[:, table] = np.maximum(filled[:, table], in_block)
    tensors = {}
    for layer, arrays in enumerate(zip(*map(pools.to_rows, parts), strict=True)):
        for name, pieces in zip(pools.config.names(), zip(*arrays, strict=True), strict=True):
            tensors[f"layers.{layer}.{name}"] = array = np.concatenate(pieces)
            slots = np.arange(0, sequences.block_size, sequences.block_size // array.shape[1])  # of tokens or groups
            array[slots >= filled[layer, :, None]] = 0
    ids_known = np.concatenate([np.empty(0, np.int64), *(state.token_ids for state in states)])
    if len(ids_known):
        tensors[TOKEN_IDS] = ids_known
    positions = [layer.positions[0] for state in states for layer in state.histories if layer]
    if sum(map(len, positions)):
        tensors[POSITIONS] = np.concatenate(positions)
    beside, more = pages.beside(states)
    saved = [
        {
            "seq": seq,
            "blocks": table,
            "lengths": state.lengths,
            "token_ids": len(state.token_ids),
            "salt": state.salt.hex(),
            "swapped": state.swapped is not None,
            "left": [one and [one.tokens, one.dropped, state.shift(i)] for i, one in enumerate(state.histories)],
            **extra,
        }
        for seq, state, table, extra in zip(ids, states, tables, more, strict=True)
    ]
    form = {name: asdict(x) if isinstance(x, Quant) else x for name, x in pools.arguments().items()}
    meta = {"form": form, "next": sequences.next, "sequences": saved}
    files.write(path, KIND, tensors | beside, meta, operation)


class SavedSequences:
    """The sequences in a file that `write` made; or CacheFileError if its tensors and metadata disagree."""

    def __init__(self, path: Path, operation: str) -> None:
        self.path, self.operation = path, operation
        self.tensors, self.meta = files.read(path, KIND, operation, _check)
        self.meta["form"] = _form_of(self.meta)

    def arguments(self, num_blocks: int | None) -> dict[str, Any]:
        """The arguments of a store for them: as saved, or with `num_blocks` blocks; or an error if that is too few."""
        form: dict[str, Any] = self.meta["form"]
        if num_blocks is not None:
            return form | {"num_blocks": checks.integer(num_blocks, "num_blocks", self.operation, low=1)}
        if form["num_blocks"] > MOST_BLOCKS:
            raise files.CacheFileCapacityError(
                f"{self.operation}: {str(self.path)!r} describes a pool of {form['num_blocks']} blocks. Without "
                f"num_blocks, at most {MOST_BLOCKS} are made. Give num_blocks."
            )
        block, row = (
            sum(a.itemsize * math.prod(a.shape[1:]) for name, a in self.tensors.items() if name.startswith(start))
            for start in ("layers.", "new.")
        )
        quant, new = parse_aging(form["dtype"]), 0
        if quant is not None:
            new = len(self.meta["sequences"]) * (quant.sinks + quant.newest + 2 * quant.group)
        files.require_memory(self.path, form["num_blocks"] * block + new * row, self.operation)
        return form

    def add_to(self, pages: Pages[Any], share_prefixes: bool, salt: bytes) -> list[int]:
        """Add them to the existing sequences, under the next numbers; all of them or none.

        With `share_prefixes`, `add` finds their prefixes under this salt or else their own, unless it finds a block of
        the pool. ShapeError or DTypeError if the file's form differs from that of the pools.
        """
        with files.understanding(self.path, self.operation):
            theirs, ours = in_full(self.meta["form"]), in_full(pages.pools.arguments())
            other = [name for name, mine in ours.items() if name != "page_summaries" and theirs[name] != mine]
        for name in other:
            if name not in ("num_blocks", "layout"):
                raise (DTypeError if "dtype" in name else ShapeError)(
                    f"{self.operation}: the pool of {str(self.path)!r} had {name}={theirs[name]}, this one has "
                    f"{ours[name]}. Use PagedKVCacheStore.load, or a pool of that form."
                )
        return self._restore(pages, None, share_prefixes, salt)

    def fill(self, pages: Pages[Any], share_prefixes: bool) -> None:
        """Put them into a new store, under their saved numbers."""
        numbers = [saved["seq"] for saved in self.meta["sequences"]]
        self._restore(pages, numbers, share_prefixes)
        pages.sequences.next = max([self.meta["next"], *(number + 1 for number in numbers)])

    def _restore(
        self, pages: Pages[Any], numbers: list[int] | None, share_prefixes: bool, salt: bytes = b""
    ) -> list[int]:
        """Make them under these numbers; if the file contradicts itself or blocks are too few, raise and make none.

        Digests are computed from the file's token ids; any digests in the file are ignored. Without `numbers`, the pool
        has other sequences already, and prefixes that `add` finds among them are still found there.
        """
        tensors, sequences, pools = self.tensors, pages.sequences, pages.pools
        known, first = tensors.get(TOKEN_IDS, np.empty(0, np.int64)), 0
        standing = iter(tensors.get(POSITIONS, np.empty(0, np.int64)).tolist())
        saved = []
        with files.understanding(self.path, self.operation):
            for sequence in self.meta["sequences"]:
                state = SequenceState(list(sequence["blocks"]), list(sequence["lengths"]))
                state.histories = [_history(entry, standing) for entry in sequence.get("left", state.histories)]
                count = sequence.get("token_ids", 0)  # older files have none
                if share_prefixes:
                    state.salt = salt or bytes.fromhex(sequence.get("salt", ""))
                    state.token_ids, state.digests = sequences.known(known[first : first + count], state.salt)
                if numbers is None:
                    state.withheld = frozenset(d for d in state.digests if sequences.blocks.find(d) is not None)
                first += count
                saved.append((state, sequence["swapped"]))
        used = sorted({block for state, swapped in saved if not swapped for block in state.blocks})
        fresh = sequences.blocks.allocate(len(used), self.operation)
        coming = range(sequences.next, sequences.next + len(saved)) if numbers is None else numbers
        try:
            pools.write_blocks(self._blocks(pools, used), range(len(used)), fresh)
            block_of = dict(zip(used, fresh, strict=True))
            for state, swapped in saved:
                if swapped:
                    state.swapped = self._blocks(pools, state.blocks)
                    state.blocks = []
                    state.registered = min(min(state.lengths) // sequences.block_size, len(state.digests))
                else:
                    state.blocks = [block_of[block] for block in state.blocks]
            pages.bring(coming, tensors, self.meta["sequences"])
        except BaseException:
            sequences.blocks.release(fresh)
            raise
        states = [state for state, _ in saved]
        if numbers is None:
            numbers = sequences.adopt(states)
        else:
            sequences.restore(dict(zip(numbers, states, strict=True)))
        sequences.blocks.release(fresh)  # their sequences hold them now
        return numbers

    def _blocks(self, pools: LayerPools, block_ids: list[int]) -> Any:
        """These blocks of the file, in the form that `LayerPools.read_blocks` returns."""
        names, layers = pools.config.names(), range(len(pools.layers))
        return pools.from_rows([[self.tensors[f"layers.{i}.{name}"][block_ids] for name in names] for i in layers])


def _history(entry: Any, standing: Iterator[int]) -> History | None:
    """What a compaction left in a layer, from the file's numbers and the next of its positions; or ValueError."""
    if entry is None:
        return None
    count, dropped, shift = entry
    positions = np.fromiter(itertools.islice(standing, count), np.int64, count)
    if (np.diff(positions, prepend=-1, append=count + shift) <= 0).any():
        raise ValueError("the positions that a layer kept do not ascend, or go beyond its end")
    return History.of_rows([positions], count + dropped, count + shift)


def _check(meta: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError if the metadata are impossible or do not fit the tensors."""
    form = _form_of(meta)
    layers = files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    size, heads = (files.integer(form[name], name, low=1) for name in ("block_size", "num_kv_heads"))
    num_blocks = files.integer(form["num_blocks"], "num_blocks", low=1)
    if form["layout"] not in POOL_LAYOUTS:
        raise ValueError(f"layout {reprlib.repr(form['layout'])} is unknown")
    groups = _groups_of(form)
    if groups is None:
        arrays = {name: ((size, heads, *width), dtype) for name, width, dtype in files.storage(form)}
    else:
        arrays = {name: (block, dtype.numpy) for name, (block, dtype) in groups.names(size).items()}
    shape = entries[f"layers.0.{next(iter(arrays))}"].shape
    count = shape[0] if shape else 0
    for layer in range(layers):
        for name, (block, dtype) in arrays.items():
            files.require_entry(entries, f"layers.{layer}.{name}", (count, *block), dtype)
    files.integer(meta["next"], "next")
    sequences = files.listed(meta["sequences"], "sequences")
    known, standing, new = 0, 0, [0] * layers
    numbers: set[int] = set()
    alone: set[int] = set()  # blocks of swapped-out sequences
    used: set[int] = set()
    for sequence in sequences:
        number = files.integer(sequence["seq"], "the number of a sequence")
        known += files.integer(sequence.get("token_ids", 0), "token_ids of a sequence")
        blocks = _blocks(sequence, number, layers, size, count)
        standing += _positions_of(sequence, number, layers)
        if groups is not None:
            new = [n + more for n, more in zip(new, _new_of(sequence, number, layers, groups.quant), strict=True)]
        if alone & blocks or (sequence["swapped"] and used & blocks):
            raise ValueError(f"sequence {number} shares a block with a sequence that is swapped out")
        (alone if sequence["swapped"] else used).update(blocks)
        numbers.add(number)
    if len(numbers) != len(sequences):
        raise ValueError(f"{len(sequences)} sequences have only {len(numbers)} different numbers")
    if len(used) > num_blocks or len(used) + len(alone) != count:
        raise ValueError(
            f"sequences use {len(used)} and swapped-out sequences {len(alone)} of the file's {count} blocks, in a pool "
            f"of {num_blocks}"
        )
    for layer, count in enumerate(new):
        for name, row in zip(ROWS, groups.newest_rows if groups else (), strict=False):
            files.require_entry(entries, f"new.{layer}.{name}", (count, heads, row.width), row.stored.numpy)
    for name, length in ((TOKEN_IDS, known), (POSITIONS, standing)):
        if length:
            files.require_entry(entries, name, (length,), np.dtype(np.int64))


def _form_of(meta: dict[str, Any]) -> dict[str, Any]:
    """A file's form, with a `Quant` in place of the facts about groups along tokens, if there are any; or an error."""
    form: dict[str, Any] = meta["form"]
    return form | {"dtype": Quant(**form["dtype"])} if type(form["dtype"]) is dict else form


def _groups_of(form: dict[str, Any]) -> TokenGroupForm | None:
    """How a pool of groups along tokens keeps rows; None for the form of another pool; or an error."""
    if not isinstance(form["dtype"], Quant) and parse_aging(form["dtype"]) is None:
        return None
    arguments = {name: x for name, x in form.items() if name != "num_layers"}
    try:
        config = PoolConfig.checked(KIND, runtime.current(), **arguments | {"num_blocks": 1})
    except DTypeError as error:
        raise ValueError(str(error)) from None
    if config.groups is None:
        raise ValueError(f"dtype is {form['dtype']}, whose groups are not along tokens")
    return config.groups


def _new_of(sequence: dict[str, Any], number: int, layers: int, quant: Aging) -> list[int]:
    """How many of a sequence's tokens are not codes, for each layer; raises as `_check`."""
    counts = []
    coded = files.integers(sequence["coded"], "coded", "tokens that are codes", layers)
    for layer, (length, codes) in enumerate(zip(sequence["lengths"], coded, strict=True)):
        least = quant.sinks if codes else 0
        if codes % quant.group or not least <= length - codes <= quant.sinks + quant.newest + quant.group:
            raise ValueError(f"sequence {number} has {length} tokens in layer {layer}, {codes} of them codes")
        counts.append(length - codes)
    return counts


def _positions_of(sequence: dict[str, Any], number: int, layers: int) -> int:
    """How many positions a file has for a sequence's compacted layers; raises as `_check`."""
    if "left" not in sequence:  # in older files
        return 0
    total = 0
    for layer, entry in enumerate(files.listed(sequence["left"], "left", layers)):
        if entry is not None:
            count, *_ = files.integers(entry, "what a layer kept", "what a layer kept", 3)
            if count > sequence["lengths"][layer]:
                raise ValueError(f"sequence {number} has fewer tokens in layer {layer} than it kept")
            total += count
    return total


def _blocks(sequence: dict[str, Any], number: int, layers: int, size: int, count: int) -> set[int]:
    """The blocks of a sequence, whose facts are checked; raises as `_check`."""
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
