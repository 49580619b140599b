"""A `TikvCache` in a file: each layer's contents and counts, for a model of the same configuration.

The file has the cache's arguments, the fields of the configuration that it depends on, and each layer's form and
counts. All of these are compared with the given configuration and the file's tensors before a tensor is read.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from tikv import dtypes
from tikv.errors import CacheFileError, OptionError, TikvError
from tikv.formats import Quant
from tikv.integrations.transformers.cache import state_files
from tikv.integrations.transformers.layers.groups import GroupsLayer
from tikv.integrations.transformers.layers.host import HostLayer
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.layers.ring import RingLayer
from tikv.integrations.transformers.memory.storage import share_memory_with
from tikv.integrations.transformers.versions.configurations import field
from tikv.stores import files
from tikv.stores.files.tensor_file import Entry

KIND = "TikvCache"
# Fields of a configuration that decide what is cached.
FIELDS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
)
COUNTS = ("length", "origin", "whole_from", "settled", "oldest")


def fields_of(text: Any) -> dict[str, Any]:
    """The fields of a decoder's configuration that decide what is cached, in JSON's types."""
    fields = {name: field(text, name) for name in FIELDS}
    return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in fields.items()}


def write(path: str | os.PathLike[str], made: dict[str, Any], parts: dict[str, list[Any]], operation: str) -> None:
    """Save layers, in parts: those of a decoder, and those with its encoder's tokens.

    Raises:
        OptionError: a layer keeps keys of an indexer, which are not saved.
        CacheFileError: as `files.write`.
    """
    files.target_of(path, operation)
    metadata: dict[str, Any] = {**made, "parts": {}}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for part, layers in parts.items():
        metadata["parts"][part] = [_metadata_of(layer, i, operation) for i, layer in enumerate(layers)]
        for i, layer in enumerate(layers):
            if getattr(layer, "store", None) is not None:
                tensors |= {f"{part}.{i}.{name}": a for name, a in layer.store.to_host().items()}
            if hasattr(layer, "conv_states"):
                tensors |= {f"{part}.{i}.{name}": a for name, a in state_files.tensors_of(layer).items()}
    files.write(path, KIND, tensors, metadata, operation)


def _metadata_of(layer: Any, index: int, operation: str) -> dict[str, Any] | None:
    """A layer's metadata in a file; None for a layer that caches nothing."""
    if isinstance(layer, TikvLayer) and layer._staged:
        layer._refuse_half_set()
    if type(layer).__name__ == "DummyLayer":
        return None
    if hasattr(layer, "indexer_keys"):
        raise OptionError(
            f"{operation}: layer {index} keeps keys of an indexer, which cannot be saved. Keep the cache with "
            "copy.deepcopy(), or process the prompt again."
        )
    state = {"state": state_files.metadata_of(layer)} if hasattr(layer, "conv_states") else {}
    if not isinstance(layer, TikvLayer):
        return {"kind": _kind_of(layer), **state}
    if isinstance(layer, RingLayer):
        layer._put_in_order()
    store: Any = layer.store
    if store is None:
        return {"kind": _kind_of(layer), **state}
    sizes, more = {"num_kv_heads": layer.num_heads, "batch_size": layer.batch_size}, dict[str, Any]()
    if isinstance(layer, GroupsLayer):  # the cache's arguments give its formats
        form, more = dict(zip(("head_dim", "head_dim_v"), store.rows.widths, strict=True)), {"coded": store.quantised}
    else:
        form = store.rows.arguments()
    return {
        "kind": _kind_of(layer),
        **state,
        "form": {**form, **sizes},
        "capacity": store.capacity,
        **more,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "device": layer.device.type,
        "length": store.length,
        "origin": store.origin,
        "whole_from": store.whole_from,
        "settled": layer._settled,
        "oldest": layer.sinks,
        "starts": layer._starts,
        "written_once": getattr(layer, "_written_once", False),
        "record_past": layer.record_past,
    }


def _kind_of(layer: Any) -> str | None:
    """The name of a layer's kind in a file; None for a layer that caches nothing. Any place has the same names."""
    if not isinstance(layer, TikvLayer) and not hasattr(layer, "conv_states"):
        return None
    return "TikvLayer" if isinstance(layer, HostLayer) else type(layer).__name__


class Loaded:
    """A file that is being read, and the empty cache that takes its tokens."""

    def __init__(self, make: Any, config: Any, fields: dict[str, Any], path: Any, operation: str) -> None:
        self._make, self._config, self._fields = make, config, fields
        self._path, self._operation = path, operation
        self.cache: Any = None
        self.updated: dict[int, bool] = {}

    def read(self, device: Any) -> Any:
        """The cache.

        Raises:
            CacheFileError: the file is missing, damaged, of another kind, or of another configuration.
        """
        tensors, metadata = files.read(self._path, KIND, self._operation, self._check)
        with files.understanding(self._path, self._operation):
            for part, layers in parts_of(self.cache).items():
                for i, (layer, said) in enumerate(zip(layers, metadata["parts"][part], strict=True)):
                    start = f"{part}.{i}."
                    arrays = {name.removeprefix(start): a for name, a in tensors.items() if name.startswith(start)}
                    if said is not None and "form" in said:
                        _restore(layer, said, arrays, device)
                    if said is not None and "state" in said:
                        state_files.restore(layer, said["state"], arrays, device)
            for layer in self.cache.layers:
                if hasattr(layer, "seen"):
                    layer.count_all(self.cache.get_seq_length())
            if metadata["updated"] is not None:
                self.cache.is_updated = {i: bool(x) for i, x in enumerate(metadata["updated"])}
        return self.cache

    def _check(self, metadata: dict[str, Any], entries: dict[str, Entry]) -> None:
        """Raise CacheFileError, KeyError, TypeError or ValueError if the file does not fit this configuration."""
        saved = metadata["fields"]
        for name in FIELDS:
            if saved[name] != self._fields[name]:
                raise CacheFileError(
                    f"{self._operation}: {str(self._path)!r} was saved from a model with "
                    f"{name}={files.words(saved[name])}, and config says {self._fields[name]!r}. Pass the "
                    "configuration of the model that it was saved from."
                )
        try:
            made = metadata["made"]
            quant = made["dtype"]
            self.cache = self._make(self._config, **made | {"dtype": Quant(**quant) if type(quant) is dict else quant})
        except TikvError as error:
            raise ValueError(f"no cache can be made from it: {error}") from error
        parts = parts_of(self.cache)
        if set(metadata["parts"]) != set(parts):
            raise ValueError(f"it has the parts {sorted(metadata['parts'])}, not {sorted(parts)}")
        expected, nbytes = set(), 0
        for part, layers in parts.items():
            entries_of_layers = files.listed(metadata["parts"][part], "layers", len(layers))
            for i, (layer, said) in enumerate(zip(layers, entries_of_layers, strict=True)):
                kind = None if said is None else said["kind"]
                if kind != _kind_of(layer):
                    raise ValueError(f"layer {i} is {kind!r}, and this configuration makes it {type(layer).__name__}")
                if said is not None and ("state" in said) != hasattr(layer, "conv_states"):
                    raise ValueError(f"layer {i} has a state in the file or in this configuration, not in both")
                checks = {
                    "form": _check_layer,
                    "state": lambda layer, said, *at: state_files.check(layer, said["state"], *at),
                }
                for check in [check for key, check in checks.items() if said is not None and key in said]:
                    names, size = check(layer, said, f"{part}.{i}", entries)
                    expected |= names
                    nbytes += size
        if expected != set(entries):
            raise ValueError(f"its tensors are not those of its layers: {sorted(set(entries) ^ expected)}")
        if metadata["updated"] is not None:
            files.listed(metadata["updated"], "updated", len(self.cache.layers))
        files.require_memory(self._path, nbytes, self._operation)


def parts_of(cache: Any) -> dict[str, list[Any]]:
    """The layers of a cache, and for an encoder-decoder also those with the encoder's tokens."""
    cross = getattr(cache, "cross_attention_cache", None)
    return {"layers": cache.layers} if cross is None else {"layers": cache.layers, "cross": cross.layers}


def _check_layer(layer: Any, said: dict[str, Any], name: str, entries: dict[str, Entry]) -> tuple[set[str], int]:
    """The names of a layer's tensors and the bytes of its memory; raises if they, or its counts, are impossible."""
    form = said["form"]
    batch, heads = (files.integer(form[key], key, low=1) for key in ("batch_size", "num_kv_heads"))
    capacity = files.integer(said["capacity"], "capacity", low=1)
    counts = {key: files.integer(said[key], key) for key in COUNTS}
    slots = max(capacity, counts["length"]) if isinstance(layer, GroupsLayer) else capacity  # as in `make_room`
    if counts["length"] > slots or counts["settled"] > counts["origin"] + counts["length"]:
        raise ValueError(f"{name} has {counts['length']} tokens in {slots} slots, {counts}")
    if isinstance(layer, RingLayer) and not layer.sinks <= counts["oldest"] < layer.window:
        raise ValueError(f"{name} has its oldest token in slot {counts['oldest']}")
    if type(said.get("set_aside", 0)) is not int:
        raise ValueError(f"{name} has set_aside={said['set_aside']!r}")
    if said.get("starts") is not None:
        starts = [files.integer(n, "starts") for n in files.listed(said["starts"], "starts", batch)]
        if not isinstance(layer, RingLayer) or max(starts) > counts["origin"] + counts["length"]:
            raise ValueError(f"{name} has rows that begin at {starts}")
    if said["dtype"] not in ("float32", "float16", "bfloat16", "float64"):
        raise ValueError(f"{name} belongs to a model of dtype {files.words(said['dtype'])}, which is not supported")
    for key in ("written_once", "record_past"):
        if type(said[key]) is not bool:
            raise ValueError(f"{key} is {said[key]!r}")
    if isinstance(layer, GroupsLayer):
        return _check_groups(layer, said, name, entries)
    names, nbytes = set(), 0
    for part, width, dtype in files.storage(form):
        files.require_entry(entries, f"{name}.{part}", (batch, heads, counts["length"], *width), dtype)
        names.add(f"{name}.{part}")
        nbytes += batch * heads * capacity * (width[0] if width else 1) * dtype.itemsize
    for mine, key in ((layer.storage.k, "dtype"), (layer.storage.v, "v_dtype")):
        dtype_name = said["dtype"] if mine is None else str(mine)
        if form.get(key, form["dtype"]) != dtype_name:
            raise ValueError(f"{name} is stored as {files.words(form.get(key, form['dtype']))}, not {dtype_name}")
    return names, nbytes


def _check_groups(
    layer: GroupsLayer, said: dict[str, Any], name: str, entries: dict[str, Entry]
) -> tuple[set[str], int]:
    """`_check_layer` for groups along tokens."""
    widths = {key: files.integer(said["form"][key], key, low=1) for key in ("head_dim", "head_dim_v")}
    batch, heads = said["form"]["batch_size"], said["form"]["num_kv_heads"]
    form = layer.form_of("TikvCache.load", heads, said["dtype"], **widths)
    length, coded = said["length"], files.integer(said["coded"], "coded")
    most = form.slots + layer.first_tokens
    if coded % form.quant.group or not 0 <= length - coded <= most:
        raise ValueError(f"{name} has {length} tokens, {coded} of them codes")
    arrays = form.filled((batch, heads), length - coded, coded)
    for part, (shape, dtype) in arrays.items():
        files.require_entry(entries, f"{name}.{part}", shape, dtype.numpy)
    return {f"{name}.{part}" for part in arrays}, int(
        batch * heads * (max(said["capacity"], length) + most) * form.slot_bytes
    )


def _restore(layer: Any, said: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]], device: Any) -> None:
    """Put a saved layer's contents and counts into an empty layer."""
    place, layer.dtype = torch.device(said["device"] if device is None else device), dtypes.to_torch(said["dtype"])
    with share_memory_with(place):
        layer.store = layer._new_store(capacity=said["capacity"], **said["form"])
    counts = ("length", "origin", "whole_from", *(["coded"] if isinstance(layer, GroupsLayer) else []))
    layer.store.from_host(arrays, **{key: said[key] for key in counts})
    layer.is_initialized = True
    layer._attach()
    layer.device = layer._memory.device
    layer.record_past, layer._settled = said["record_past"], said["settled"]
    layer._set_aside = said.get("set_aside", 0)
    if isinstance(layer, RingLayer):
        layer.take_over(said["oldest"], said.get("starts"))
    if hasattr(layer, "_written_once"):
        layer._written_once = said["written_once"]
