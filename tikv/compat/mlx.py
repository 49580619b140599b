"""mlx-lm's prompt-cache files: `save_prompt_cache` writes what mlx-lm reads, `load_prompt_cache` reads what it writes.

A layer without a window becomes mlx-lm's `KVCache`, or its `QuantizedKVCache` if the store holds a `tikv.Quant`. A
layer with a window becomes a `RotatingKVCache`, whose `keep` is the number of sinks. mlx-lm has written two file
formats. In both, a safetensors file has keys at "LAYER.0" and values at "LAYER.1"; for quantised layers, ".0", ".1" and
".2" are appended for words, scales and biases. Since 0.32 a layer's numbers are arrays "LAYER.2" and up, which the
metadata lists; before, they were strings in the metadata.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from typing import Any, NamedTuple

import numpy as np

from tikv.errors import CacheFileError, CapacityError, OptionError
from tikv.formats import BITS, GROUP_FORMATS, GROUPS, GroupFormat
from tikv.ops import checks
from tikv.stores import files
from tikv.stores.files import tensor_file
from tikv.stores.layers.counts import require_uncompacted
from tikv.stores.store import KVCacheStore

SINCE = ("0.32", "0.6")  # the first mlx-lm that reads each format


PARTS = ("words", "scales", "biases")
CLASSES = ("KVCache", "RotatingKVCache", "QuantizedKVCache")


class Rotation(NamedTuple):
    """The state of a `RotatingKVCache`, in numbers."""

    keep: int
    max_size: int
    offset: int  # tokens so far
    idx: int  # the slot after the newest token


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: KVCacheStore,
    metadata: dict[str, str] | None = None,
    *,
    since: str = SINCE[0],
) -> None:
    """Save a store as an mlx-lm prompt cache.

    Args:
        file_name: a path that ends in ``.safetensors``.
        cache: a store in float32, float16, bfloat16 or a `tikv.Quant`.
        metadata: strings to save with it.
        since: the mlx-lm that will read the file: "0.32" for 0.32 and newer, "0.6" for 0.6 to 0.31, which read another
            format.

    Raises:
        OptionError: ``since`` is unknown; the store has a dtype, or two dtypes, that mlx-lm's caches cannot
            hold; it has a window and a `tikv.Quant`, which they do not support together; or its ring was trimmed after
            it wrapped, which they cannot describe.
        CacheFileError: the system refuses to write.

    Exactness: every bit is kept.
    """
    operation = "mlx.save_prompt_cache"
    checks.option(since, "since", operation, SINCE)
    format = cache.dtype if isinstance(cache.dtype, GroupFormat) and cache.dtype.rule == "affine" else None
    if cache.v_dtype != cache.dtype:
        raise OptionError(
            f"{operation}: dtype={str(cache.dtype)!r} and v_dtype={str(cache.v_dtype)!r} differ, which is not "
            "supported. Use a store of one dtype."
        )
    if format is None and cache.dtype.name not in ("float32", "float16", "bfloat16"):
        raise OptionError(
            f"{operation}: dtype={cache.dtype.name!r} is not supported. Use a float32, float16 or bfloat16 store, "
            "or a store whose dtype is a tikv.Quant."
        )
    if format is not None and any(window is not None for window in cache.windows):
        raise OptionError(
            f"{operation}: a window over {format} is not supported: mlx-lm's quantised caches have no window. Use a "
            f"store without one, or its own save()."
        )
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    classes: list[str] = []
    numbers: dict[str, int] = {}  # those of the layers, by their names in either format
    for i, (state, arrays) in enumerate(cache.host_layers()):
        require_uncompacted([state], operation, "A prompt cache has no place for positions: save() the store.")
        if state.ring and state.valid_from > max(0, state.length - state.ring):
            raise OptionError(
                f"{operation}: layer {i} was trimmed after its window had wrapped, which is not supported. Append "
                "tokens until the window is full again."
            )
        if format is None:
            tensors[f"{i}.0"], tensors[f"{i}.1"] = arrays[0], arrays[1]
        else:
            for j in range(2):
                tensors |= {f"{i}.{j}.{n}": part for n, part in enumerate(_parts(format, arrays[j], arrays[2 + j]))}
        last = state.slot_of(state.length - 1) if state.length else -1
        fields: tuple[int, ...] = ()
        if state.window is not None:
            fields = Rotation(state.sinks, state.window, state.length, last + 1)
        classes.append("QuantizedKVCache" if format else "RotatingKVCache" if fields else "KVCache")
        if format is not None:
            fields = (state.length, format.group, format.bits)
        elif since == SINCE[0]:
            fields = (fields[2], fields[0], fields[1], fields[3]) if fields else (state.length,)
        if since == SINCE[0]:
            numbers |= {f"{i}.{2 + j}": value for j, value in enumerate(fields)}
        else:
            numbers |= {f"{i}.{j}": value for j, value in enumerate(fields)}
    named = (metadata or {}).items()
    if since == SINCE[0]:
        tensors |= {name: np.array(value, np.int32) for name, value in numbers.items()}
        entries = {f"0.{name}": text for name, text in named} | {f"1.{i}": text for i, text in enumerate(classes)}
        entries |= {"2.0": ""} | {f"2.{n}.0": name for n, name in enumerate(numbers, 1)}
        entries |= {f"2.{n}.1": "scalar" for n in range(1, len(numbers) + 1)}
    else:
        entries = {f"0.{i}": "" for i, text in enumerate(classes) if text == "KVCache"}
        entries |= {f"0.{name}": str(value) for name, value in numbers.items()}
        entries |= {f"1.{name}": text for name, text in named} | {f"2.{i}": text for i, text in enumerate(classes)}
    files.write_tensors(file_name, tensors, entries, operation)


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False, *, capacity: int | None = None
) -> Any:
    """A store with the contents of an mlx-lm prompt cache.

    Args:
        file_name: a file that mlx-lm or `save_prompt_cache` wrote.
        return_metadata: also return the strings saved with it.
        capacity: tokens that layers without a window can hold; None for twice the saved tokens, at least 256 more.

    Raises:
        CacheFileError: the file is missing, damaged, or not a prompt cache; or its numbers or shapes are impossible. If
            this machine has too little memory for its windows, the error is a CapacityError too.
        CapacityError: ``capacity`` is less than the saved tokens.
        OptionError: it holds a kind of cache that is not supported, named in the message, or layers of several kinds.

    Exactness: every bit is kept; bfloat16 scales and biases become float32, which represents each of them exactly.
    """
    operation = "mlx.load_prompt_cache"
    if capacity is not None:
        capacity = checks.integer(capacity, "capacity", operation, low=1)
    with tensor_file.opened(file_name, operation) as file:
        layers = _layers(file, str(file_name), operation)
        newer = _is_newer(file)
        metadata = {name[2:]: text for name, text in file.metadata.items() if name.startswith("0." if newer else "1.")}
    sinks = {layer.keep for layer in layers if layer.window is not None}
    if len(sinks) > 1:
        raise OptionError(f"{operation}: layers keep {sorted(sinks)} first tokens; all must keep the same number.")
    longest = max(layer.length for layer in layers)
    needed = max(layer.length if layer.window is None else layer.window for layer in layers)
    if capacity is None:
        capacity = max(2 * longest, longest + 256, needed)
    elif capacity < needed:
        raise CapacityError(
            f"{operation}: capacity={capacity}, but {str(file_name)!r} needs {needed}. Use at least that."
        )
    k, v, *scales = layers[0].arrays
    format = layers[0].format
    row = sum(math.prod(a.shape[:2]) * a.shape[3] * a.dtype.itemsize for a in layers[0].arrays)
    files.require_memory(file_name, row * sum(layer.window or capacity for layer in layers), operation)
    with files.understanding(file_name, operation):
        store = KVCacheStore(
            num_layers=len(layers),
            num_kv_heads=k.shape[1],
            head_dim=format.columns(k.shape[3]) if format else k.shape[3],
            head_dim_v=format.columns(v.shape[3]) if format else v.shape[3],
            capacity=capacity,
            batch_size=k.shape[0],
            dtype=format or k.dtype,
            scale_dtype=scales[0].dtype if scales else "float16",
            window=[layer.window for layer in layers],
            sinks=sinks.pop() if sinks else 0,
        )
        counts = [
            (layer.length, max(0, layer.length - (layer.window - layer.keep)) if layer.window is not None else 0)
            for layer in layers
        ]
        store.take_over(counts, [layer.arrays for layer in layers], operation)
    return (store, metadata) if return_metadata else store


class _Loaded(NamedTuple):
    """A layer of a file: `keep` and `window` if it rotates, its tokens, and K and V in the slots of a store.

    For codes, the arrays are the words, and the scales and biases of both in a store's form.
    """

    keep: int
    window: int | None
    length: int
    arrays: list[np.ndarray[Any, Any]]
    format: GroupFormat | None = None


def _is_newer(file: tensor_file.TensorFile) -> bool:
    """Whether the file has the format of 0.32 and newer."""
    return file.metadata.get("2.0") == ""


def _layers(file: tensor_file.TensorFile, shown: str, operation: str) -> list[_Loaded]:
    """The layers of a prompt cache, each checked before its arrays are read.

    Raises:
        CacheFileError: it is not such a file, or its contents are impossible.
        OptionError: a kind of cache that is not supported.
    """
    listed = "1." if _is_newer(file) else "2."
    classes = {
        int(name[2:]): text
        for name, text in file.metadata.items()
        if name.startswith(listed) and re.fullmatch("[0-9]{1,6}", name[2:])
    }
    if not classes or sorted(classes) != list(range(len(classes))):
        raise CacheFileError(
            f"{operation}: {shown!r} is not a prompt cache: it names no layers. Pass a file that mlx-lm wrote."
        )
    for i in range(len(classes)):
        if classes[i] not in CLASSES:
            raise OptionError(
                f"{operation}: layer {i} is a {files.words(classes[i])}, which is not supported. Use a file of "
                f"{', '.join(CLASSES[:2])} or {CLASSES[2]}."
            )
    quantised = [name == "QuantizedKVCache" for name in classes.values()]
    if any(quantised) and not all(quantised):
        raise OptionError(
            f"{operation}: some layers are quantised and others are not, which a store cannot hold. Use a file of "
            f"one kind."
        )
    layers: list[_Loaded] = []
    for i in range(len(classes)):
        try:
            if quantised[i]:
                layers.append(_layer_of_codes(file, i, layers[0] if layers else None))
            else:
                layers.append(_layer(file, i, classes[i] == "RotatingKVCache"))
        except OptionError:
            raise
        except (KeyError, ValueError, IndexError, TypeError, OverflowError, MemoryError) as error:
            what = f"there is no {files.words(error)}" if isinstance(error, KeyError) else files.words(error)
            raise CacheFileError(f"{operation}: {shown!r} is damaged: in layer {i}, {what}. Save it again.") from None
    return layers


def _layer(file: tensor_file.TensorFile, i: int, rotates: bool) -> _Loaded:
    """One layer.

    Raises:
        KeyError, ValueError, TypeError: what the file says about it is impossible.
    """
    k, v, first = (file.entries[name] for name in (f"{i}.0", f"{i}.1", "0.0"))
    if (
        len(k.shape) != 4
        or len(v.shape) != 4
        or k.shape[:3] != v.shape[:3]
        or 0 in (*k.shape[:2], k.shape[3], v.shape[3])
    ):
        raise ValueError(f"keys are {k.shape} and values {v.shape}, which must be (batch, heads, tokens, width)")
    if (
        k.dtype != v.dtype
        or k.dtype != first.dtype
        or k.dtype.name not in ("float32", "float16", "bfloat16", "float64")
    ):
        raise ValueError(f"keys are {k.stored} and values {v.stored}, but the keys of layer 0 are {first.stored}")
    held, newer = k.shape[2], _is_newer(file)
    if not rotates:
        length = _number(file, f"{i}.2", newer) if newer else held
        if not 0 <= length <= held:
            raise ValueError(f"there should be {length} tokens, but keys are {k.shape}")
        return _Loaded(0, None, length, [file.read(f"{i}.{j}")[:, :, :length] for j in range(2)])
    numbers = [f"{i}.{j}" for j in (3, 4, 2, 5)] if newer else [f"0.{i}.{j}" for j in range(4)]
    keep, window, length, index = Rotation(*(_number(file, name, newer) for name in numbers))
    held = min(held, max(length, 0)) if newer else held  # the arrays may have room for more
    if not (0 <= keep < window and 0 <= index <= held and min(length, window) <= held <= length < tensor_file.NUMBERS):
        raise ValueError(
            f"keep={keep}, max_size={window}, offset={length} and idx={index} do not fit {held} stored tokens"
        )
    arrays = [file.read(f"{i}.{j}")[:, :, :held] for j in range(2)]
    return _Loaded(keep, window, length, [_in_slots(a, keep, window, length, index) for a in arrays])


def _parts(format: GroupFormat, words: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> list[Any]:
    """Words, scales and biases of rows of codes, from a store, which interleaves scales and biases."""
    groups = format.columns(words.shape[3]) // format.group
    return [words, numbers[..., 0 : 2 * groups : 2], numbers[..., 1 : 2 * groups : 2]]


def _layer_of_codes(file: tensor_file.TensorFile, i: int, first: _Loaded | None) -> _Loaded:
    """One layer of a quantised cache; `first` is layer 0, if this is another layer.

    Raises:
        KeyError, ValueError, TypeError: what the file says about it is impossible.
        OptionError: bits or groups that no format has.
    """
    newer = _is_newer(file)
    names = [f"{i}.{j}" for j in (2, 3, 4)] if newer else [f"0.{i}.{j}" for j in range(3)]
    length, group, bits = (_number(file, name, newer) for name in names)
    if bits not in BITS or group not in GROUPS:
        known, sizes = (", ".join(map(str, numbers)) for numbers in (BITS, GROUPS))
        raise OptionError(
            f"mlx.load_prompt_cache: layer {i} has {bits} bits in groups of {group}, which is not supported. Use a "
            f"file whose bits are one of {known}, in groups of one of {sizes}."
        )
    format = GROUP_FORMATS[f"quant{bits}_{group}"]
    if first is not None and first.format is not format:
        raise ValueError(f"the format is {format}, but that of layer 0 is {first.format}")
    entries = [[file.entries[f"{i}.{j}.{n}"] for n in range(len(PARTS))] for j in range(2)]
    words, scales = entries[0][0], entries[0][1]
    for name, of_stream in zip(("keys", "values"), entries, strict=True):
        for part, entry in zip(PARTS, of_stream, strict=True):
            width = of_stream[0].shape[-1] if entry.shape else 0
            columns = width if part == "words" else format.columns(width) // format.group
            if (
                len(entry.shape) != 4
                or entry.shape != (*words.shape[:3], columns)
                or 0 in (*entry.shape[:2], columns)
                or format.columns(width) % format.group
            ):
                raise ValueError(f"the {part} of {name} are {entry.shape}, which does not fit {format}")
            if part == "words" and entry.dtype != np.uint32:
                raise ValueError(f"the words of {name} are {entry.stored}, not uint32")
            if part != "words" and (entry.dtype != scales.dtype or entry.dtype.name not in _SCALES):
                raise ValueError(
                    f"the {part} of {name} are {entry.stored}, but scales and biases must all be float16, all bfloat16 "
                    "or all float32"
                )
    if not 0 <= length <= words.shape[2]:
        raise ValueError(f"there should be {length} tokens, but keys are {words.shape}")
    numbers = 2 * max(of_stream[1].shape[3] for of_stream in entries)
    arrays = [file.read(f"{i}.{j}.0")[:, :, :length] for j in range(2)]
    for j in range(2):
        parts = [file.read(f"{i}.{j}.{n}")[:, :, :length] for n in (1, 2)]
        joined = np.zeros((*parts[0].shape[:3], numbers), _SCALES[parts[0].dtype.name])
        for n, read in enumerate(parts):
            joined[..., n : 2 * read.shape[3] : 2] = read
        arrays.append(joined)
    return _Loaded(0, None, length, arrays, format)


_SCALES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.float32}  # in a file: in a store


def _number(file: tensor_file.TensorFile, name: str, newer: bool) -> int:
    """A number of a layer: an array of one integer, or a string of the metadata.

    Raises:
        KeyError, ValueError: it is not valid.
    """
    if not newer:
        text = file.metadata[name]
        if not re.fullmatch("-?[0-9]{1,20}", text):
            raise ValueError(f"number {name} is {reprlib.repr(text)}, not an integer")
        return int(text)
    entry = file.entries[name]
    if entry.dtype.kind not in "iu" or math.prod(entry.shape) != 1:
        raise ValueError(f"number {name} is {entry.stored} {entry.shape}, not one integer")
    return int(file.read(name).reshape(()))


def _in_slots(a: np.ndarray[Any, Any], keep: int, window: int, length: int, index: int) -> np.ndarray[Any, Any]:
    """The rows of a rotating cache in a store's slots: the same slots once it rotates, else in temporal order."""
    held = a.shape[2]
    first = max(keep, length - (held - min(keep, held)))  # position of the oldest row after the sinks
    sinks, rest = a[:, :, : min(keep, held)], a[:, :, keep:]
    turn = max(0, index - keep) if held >= window else 0
    temporal = np.concatenate([sinks, rest[:, :, turn:], rest[:, :, :turn]], axis=2)
    out = np.zeros((*a.shape[:2], min(length, window), a.shape[3]), a.dtype)
    fixed = min(keep, held)
    out[:, :, :fixed] = temporal[:, :, :fixed]
    newest = min(length - first, window - keep)  # a prompt longer than the window is kept whole until it rotates
    if newest > 0:
        slots = keep + (np.arange(length - newest, length) - keep) % (window - keep)
        out[:, :, slots] = temporal[:, :, temporal.shape[2] - newest :]
    return out
