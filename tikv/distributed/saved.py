"""A shared cache in files: one per rank, and an index that names them. Any number of ranks can load it, sharded anyhow.

A rank's file has the rows of its heads and tokens in order of position. The positions follow from how the tokens were
sharded and from what all ranks held. The index is written last, so that a killed save leaves the old one intact.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tikv.distributed.token_sharding import TokenSharding
from tikv.errors import CacheFileError
from tikv.stores import files
from tikv.stores.files import replacing, tensor_file
from tikv.stores.files.contiguous import layers_of
from tikv.stores.files.tensor_file import Entry
from tikv.stores.layers.counts import Layer

KIND = "ShardedKVCacheStore"
SUFFIX = ".json"
MOST_FILES = 1 << 16
Arrays = list[np.ndarray[Any, Any]]


class Share(NamedTuple):
    """A rank's share: the KV heads from `first_head` to before `end_head`, and its share of the tokens."""

    first_head: int
    end_head: int
    sharding: TokenSharding

    def positions(self, layer: Layer) -> list[int]:
        """The positions of this rank's tokens that a layer still holds, from its counts over all ranks."""
        positions = [p for p in range(min(layer.sinks, layer.length)) if self.sharding.owns(p)]
        start = max(layer.sinks, layer.valid_from) if layer.ring else 0
        for first, end in self.sharding.runs(start, layer.length):
            positions += range(first, end)
        return positions


def file_name(path: Path, number: int, count: int, save: str) -> str:
    """The name of a rank's file beside the index."""
    return f"{path.stem}-{save}-{number + 1}-of-{count}{replacing.SUFFIX}"


def write_share(
    path: Path,
    share: Share,
    form: dict[str, Any],
    of_all: Sequence[Layer],
    layers: Sequence[tuple[Layer, Arrays]],
    save: str,
) -> None:
    """Write a rank's file, or raise CacheFileError.

    Args:
        path, share, save: the file's path, this rank's share, and the identifier of this save.
        form, of_all: the store's arguments, and its counts over all ranks.
        layers: this rank's layers and host copies of their filled slots.
    """
    tensors = {}
    for counts, (layer, arrays) in zip(of_all, layers, strict=True):
        slots = [layer.slot_of(share.sharding.count(p)) for p in share.positions(counts)]
        for name, a in zip(layer.named, arrays, strict=True):
            tensors[f"layers.{counts.index}.{name}"] = a[:, :, slots]
    meta = {
        "save": save,
        "form": form,
        "counts": [[layer.length, layer.valid_from] for layer in of_all],
        "heads": [share.first_head, share.end_head],
        "deal": list(share.sharding),
    }
    files.write(path, KIND, tensors, meta, "ShardedKVCacheStore.save")


def write_index(path: Path, names: Sequence[str], save: str) -> None:
    """Write the index in one step, and remove the files that the old index named; or CacheFileError."""
    operation = "ShardedKVCacheStore.save"
    before: list[str] = []
    with contextlib.suppress(CacheFileError):
        before = read_index(path, operation)[0] if path.exists() else []
    text = json.dumps({"tikv": KIND, "version": files.VERSION, "save": save, "files": list(names)}, indent=1)
    replacing.replace(path, text.encode(), operation, SUFFIX)
    for name in {*before} - {*names}:
        with contextlib.suppress(OSError):
            os.remove(path.parent / name)


def read_index(path: Path, operation: str) -> tuple[list[str], str]:
    """The file names of a save, and its identifier; or CacheFileError if the index is missing, damaged or foreign."""
    try:
        with open(path, "rb") as file:
            index = tensor_file.parsed(file.read(tensor_file.HEADER_BYTES).decode())
        if index["tikv"] != KIND or index["version"] != files.VERSION:
            raise ValueError(f"it describes a {files.words(index['tikv'])} of version {files.words(index['version'])}")
        names = files.listed(index["files"], "files")
        if not names or len(names) > MOST_FILES or any(type(n) is not str or Path(n).name != n for n in names):
            raise ValueError("it does not name its files")
        return names, str(index["save"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CacheFileError(
            f"{operation}: {str(path)!r} is not an index of a shared cache ({files.words(error)}). Pass the .json that "
            f"ShardedKVCacheStore.save wrote."
        ) from None


class Saved:
    """A saved cache: its arguments, its counts and its files; each file is read when its rows are wanted.

    Raises:
        CacheFileError: a file is missing, is damaged, belongs to another save, or contradicts itself or the others.
    """

    def __init__(self, path: Path, operation: str) -> None:
        self.operation = operation
        names, self.save = read_index(path, operation)
        self.paths = [path.parent / name for name in names]
        _, meta = self._read(self.paths[0])
        self.form: dict[str, Any] = meta["form"]
        self.counts: list[list[int]] = meta["counts"]

    def _read(self, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors, meta = files.read(path, KIND, self.operation, _check)
        if meta["save"] != self.save:
            raise CacheFileError(f"{self.operation}: {str(path)!r} belongs to another save. Save the cache again.")
        return tensors, meta

    def slots_for(self, share: Share, of_all: Sequence[Layer], layers: Sequence[Layer], batch: int) -> list[Arrays]:
        """Read the filled slots of a rank's layers from the files that have their rows; or CacheFileError.

        Args:
            share, layers: the rank's share, and its layers with their counts.
            of_all: the counts of the saved cache.
            batch: the number of sequences.
        """
        kinds = files.storage(self.form)
        heads = share.end_head - share.first_head
        filled = [[np.zeros((batch, heads, x.filled, *width), dtype) for _, width, dtype in kinds] for x in layers]
        slots_of = [{p: layers[x.index].slot_of(share.sharding.count(p)) for p in share.positions(x)} for x in of_all]
        missing = heads * sum(map(len, slots_of))
        for path in self.paths:
            tensors, meta = self._read(path)
            if (meta["form"], meta["counts"]) != (self.form, self.counts):
                raise CacheFileError(f"{self.operation}: {str(path)!r} contradicts the other files. Save again.")
            first, end = meta["heads"]
            theirs = Share(first, end, TokenSharding(*meta["deal"]))
            first, end = max(first, share.first_head), min(end, share.end_head)
            if first >= end:
                continue
            for counts, slot_of, arrays in zip(of_all, slots_of, filled, strict=True):
                rows = [(i, slot_of[p]) for i, p in enumerate(theirs.positions(counts)) if p in slot_of]
                if not rows:
                    continue
                src, dst = map(list, zip(*rows, strict=True))
                for (name, _, _), to in zip(kinds, arrays, strict=True):
                    a = tensors[f"layers.{counts.index}.{name}"]
                    to[:, first - share.first_head : end - share.first_head, dst] = a[
                        :, first - theirs.first_head : end - theirs.first_head, src
                    ]
                missing -= (end - first) * len(rows)
        if missing:
            raise CacheFileError(f"{self.operation}: the files lack {missing} rows. Save the cache again.")
        return filled


def _check(meta: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError if the metadata are impossible or do not fit the tensors."""
    form = meta["form"]
    files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    heads, batch = (files.integer(form[name], name, low=1) for name in ("num_kv_heads", "batch_size"))
    rank, world, interleave = files.integers(meta["deal"], "deal", "deal", 3)
    first, end = files.integers(meta["heads"], "heads", "a head", 2, high=heads)
    if rank >= world or interleave < 1 or first >= end:
        raise ValueError(f"rank {rank} of {world} with heads {first} to {end} holds nothing")
    share = Share(first, end, TokenSharding(rank, world, interleave))
    for layer in layers_of(form, meta["counts"]):
        for name, width, dtype in files.storage(form):
            shape = (batch, end - first, len(share.positions(layer)), *width)
            files.require_entry(entries, f"layers.{layer.index}.{name}", shape, dtype)
