"""A store of groups along tokens in a file: its newest tokens as rows, its codes, and counts that agree with both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np

from tikv import dtypes
from tikv.formats import Quant
from tikv.stores import files
from tikv.stores.files.tensor_file import Entry
from tikv.stores.layers.channel_codes import ARRAYS
from tikv.stores.layers.storage import StoreConfig
from tikv.stores.row_format import RowFormats

KIND = "KVCacheStore of groups along tokens"
NAMES = ("k", "v", *ARRAYS)
Layers: TypeAlias = Sequence[tuple[Sequence[int], list[np.ndarray[Any, Any]]]]


def write(path: str | os.PathLike[str], form: StoreConfig, rows: RowFormats, layers: Layers, operation: str) -> None:
    """Save the arrays of each layer with (length, oldest slot's position, tokens that are codes); as `files.write`."""
    quant: Quant = form.rows["dtype"]
    names = ("num_layers", "num_kv_heads", "capacity", "batch_size")
    arguments = {name: getattr(form, name) for name in names} | {"scale_dtype": rows.scale_dtype.name}
    arguments |= {"head_dim": rows.k.width, "head_dim_v": rows.v.width}
    tensors = {
        f"layers.{i}.{name}": a for i, (_, arrays) in enumerate(layers) for name, a in zip(NAMES, arrays, strict=True)
    }
    meta = {"form": arguments, "quant": asdict(quant), "counts": [list(counts) for counts, _ in layers]}
    files.write(path, KIND, tensors, meta, operation)


def read(path: str | os.PathLike[str], operation: str) -> tuple[dict[str, Any], Quant, Layers]:
    """The arguments of a saved store, its format, and what each layer has."""
    tensors, meta = files.read(path, KIND, operation, _check)
    form, quant = meta["form"], Quant(**meta["quant"])
    row = sum(dtype.itemsize * int(np.prod(shape[2:])) for shape, dtype in _slot_shapes(form, quant))
    rows = form["batch_size"] * form["num_kv_heads"] * form["num_layers"]
    files.require_memory(path, rows * (form["capacity"] + quant.residual + quant.group) * row, operation)
    layers = [(counts, [tensors[f"layers.{i}.{name}"] for name in NAMES]) for i, counts in enumerate(meta["counts"])]
    return form, quant, layers


def _slot_shapes(form: dict[str, Any], quant: Quant) -> list[tuple[tuple[int, ...], np.dtype[Any]]]:
    """The shapes and dtypes of a layer's arrays, for one token, or for one group of tokens where it has groups."""
    lead, row = (form["batch_size"], form["num_kv_heads"]), quant.row
    width, width_v, scale = form["head_dim"], form["head_dim_v"], dtypes.parse(form["scale_dtype"], "load").numpy
    words = np.dtype(np.uint32)
    return [
        ((*lead, width), scale),
        ((*lead, width_v), scale),
        ((*lead, width, row.words(quant.group)), words),
        ((*lead, width, row.numbers), scale),
        ((*lead, row.words(width_v)), words),
        ((*lead, width_v // quant.group * row.numbers), scale),
    ]


def _check(meta: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise KeyError, TypeError or ValueError where the metadata cannot be, or are not those of the tensors."""
    form, quant = meta["form"], Quant(**meta["quant"])
    if quant.axis != "tokens":
        raise ValueError(f"axis is {quant.axis!r}")
    count = files.integer(form["num_layers"], "num_layers", low=1, high=len(entries))
    for name in ("num_kv_heads", "head_dim", "head_dim_v", "batch_size", "capacity"):
        files.integer(form[name], name, low=1)
    shapes, slots = _slot_shapes(form, quant), quant.residual + quant.group
    for i, numbers in enumerate(files.listed(meta["counts"], "counts", count)):
        length, oldest, coded = files.integers(numbers, "counts of a layer", "a count", 3)
        if (
            coded % quant.group
            or not oldest <= max(coded, 0) <= length <= form["capacity"]
            or length - coded > slots
            or oldest < length - slots
        ):
            raise ValueError(f"layer {i} has {length} tokens, {coded} of them codes, and rows from {oldest} on")
        groups, filled = coded // quant.group, min(length, slots)
        for name, (shape, dtype), n in zip(NAMES, shapes, (filled, filled, groups, groups, coded, coded), strict=True):
            files.require_entry(entries, f"layers.{i}.{name}", (*shape[:2], n, *shape[2:]), dtype)
