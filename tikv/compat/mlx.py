"""mlx-lm's prompt-cache files: `save_prompt_cache` writes what mlx-lm reads, `load_prompt_cache` reads what it writes.

A layer without a window is its `KVCache`, one with a window its `RotatingKVCache`, whose `keep` are the sinks. mlx-lm
has written two forms. Both are safetensors with keys at "LAYER.0" and values at "LAYER.1"; the numbers of a layer are
arrays "LAYER.2" and on since 0.32, which the metadata lists, and were strings of the metadata before.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from tikv.errors import CacheFileError, OptionError
from tikv.ops import checks
from tikv.stores import files
from tikv.stores.contiguous import KVCacheStore

SINCE = ("0.32", "0.6")  # the mlx-lm that first read each form


class Rotation(NamedTuple):
    """The numbers of a `RotatingKVCache`."""

    keep: int
    max_size: int
    offset: int  # tokens so far
    idx: int  # the slot behind the newest


def save_prompt_cache(
    file_name: str | os.PathLike[str],
    cache: KVCacheStore,
    metadata: dict[str, str] | None = None,
    *,
    since: str = SINCE[0],
) -> None:
    """Save a store as a prompt cache of mlx-lm.

    Args:
        file_name: ends in ``.safetensors``.
        cache: a store of float32, float16 or bfloat16.
        metadata: strings kept with it.
        since: the mlx-lm that is to read it: "0.32" and newer, or "0.6" to 0.31, which read another form.

    Raises:
        OptionError: an unknown ``since``; an int8 or float64 store, which mlx-lm's plain caches cannot hold; or a ring
            that was trimmed after it wrapped, which they cannot describe.
        CacheFileError: the system refuses to write.

    Exactness: every bit.
    """
    operation = "mlx.save_prompt_cache"
    if cache.dtype.name not in ("float32", "float16", "bfloat16"):
        raise OptionError(
            f"{operation}: dtype={cache.dtype.name!r} is not offered. Use a float32, float16 or bfloat16 store."
        )
    checks.option(since, "since", operation, SINCE)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    classes: list[str] = []
    numbers: dict[str, int] = {}  # of the layers, by the names of either form
    for i, (state, arrays) in enumerate(cache.host_layers()):
        if state.ring and state.valid_from > max(0, state.length - state.ring):
            raise OptionError(
                f"{operation}: layer {i} was trimmed after its window had wrapped, which is not offered. Fill it first."
            )
        tensors[f"{i}.0"], tensors[f"{i}.1"] = arrays[0], arrays[1]
        last = state.slot_of(state.length - 1) if state.length else -1
        own: tuple[int, ...] = ()
        if state.window is not None:
            own = Rotation(state.sinks, state.window, state.length, last + 1)
        classes.append("RotatingKVCache" if own else "KVCache")
        if since == SINCE[0]:
            own = (own[2], own[0], own[1], own[3]) if own else (state.length,)
            numbers |= {f"{i}.{2 + j}": value for j, value in enumerate(own)}
        else:
            numbers |= {f"{i}.{j}": value for j, value in enumerate(own)}
    named = (metadata or {}).items()
    if since == SINCE[0]:
        tensors |= {name: np.array(value, np.int32) for name, value in numbers.items()}
        facts = {f"0.{name}": text for name, text in named} | {f"1.{i}": text for i, text in enumerate(classes)}
        facts |= {"2.0": ""} | {f"2.{n}.0": name for n, name in enumerate(numbers, 1)}
        facts |= {f"2.{n}.1": "scalar" for n in range(1, len(numbers) + 1)}
    else:
        facts = {f"0.{i}": "" for i, text in enumerate(classes) if text == "KVCache"}
        facts |= {f"0.{name}": str(value) for name, value in numbers.items()}
        facts |= {f"1.{name}": text for name, text in named} | {f"2.{i}": text for i, text in enumerate(classes)}
    files.write_tensors(file_name, tensors, facts, operation)


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False, *, capacity: int | None = None
) -> Any:
    """A store with what a prompt cache of mlx-lm holds.

    Args:
        file_name: a file that mlx-lm or `save_prompt_cache` wrote.
        return_metadata: also return its strings.
        capacity: tokens that layers without a window hold; None for twice what they have, at least 256 more.

    Raises:
        CacheFileError: the file is missing, damaged, or no prompt cache.
        OptionError: it holds a kind of cache that is not offered, by its name.

    Exactness: every bit.
    """
    operation = "mlx.load_prompt_cache"
    tensors, facts = files.read_tensors(file_name, operation)
    newer = facts.get("2.0") == ""
    listed = "1." if newer else "2."
    classes = {int(name[2:]): text for name, text in facts.items() if name.startswith(listed) and name[2:].isdigit()}
    if not classes or sorted(classes) != list(range(len(classes))):
        raise CacheFileError(
            f"{operation}: {str(file_name)!r} is no prompt cache: it names no layers. Give a file of mlx-lm's."
        )
    windows: list[int | None] = []
    counts: list[tuple[int, int]] = []
    arrays: list[list[np.ndarray[Any, Any]]] = []
    sinks = set()
    for i in range(len(classes)):
        if classes[i] not in ("KVCache", "RotatingKVCache"):
            raise OptionError(
                f"{operation}: layer {i} is a {classes[i]}, which is not offered. KVCache and RotatingKVCache are."
            )
        try:
            k, v = tensors[f"{i}.0"], tensors[f"{i}.1"]
            if k.ndim != 4 or v.ndim != 4:
                raise ValueError(f"(batch, heads, tokens, width): keys are {k.shape} and values {v.shape}")
            if newer:  # whose arrays have room for more tokens
                length = int(tensors[f"{i}.2"])
                if length < 0 or (classes[i] == "KVCache" and length > k.shape[2]):
                    raise ValueError(f"{length} tokens: keys are {k.shape}")
                k, v = k[:, :, :length], v[:, :, :length]
            if classes[i] == "KVCache":
                windows.append(None)
                counts.append((k.shape[2], 0))
                arrays.append([k, v])
                continue
            if newer:
                state = [int(tensors[f"{i}.{j}"]) for j in (3, 4, 2, 5)]
            else:
                state = [int(facts[f"0.{i}.{j}"]) for j in range(4)]
            keep, window, length, index = Rotation(*state)
            held = k.shape[2]
            if not (0 <= keep < window and 0 <= index <= held and min(length, window) <= held <= length):
                raise ValueError(
                    f"state of {held} tokens: keep={keep}, max_size={window}, offset={length}, idx={index}"
                )
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise CacheFileError(f"{operation}: {str(file_name)!r} is damaged: layer {i} has no {error}.") from error
        sinks.add(keep)
        windows.append(window)
        counts.append((length, max(0, length - (window - keep))))
        arrays.append([_in_slots(a, keep, window, length, index) for a in (k, v)])
    if len(sinks) > 1:
        raise OptionError(f"{operation}: layers keep {sorted(sinks)} first tokens; one number for all is offered.")
    k, v = arrays[0]
    longest = max(length for length, _ in counts)
    widest = max(window or 0 for window in windows)
    store = KVCacheStore(
        num_layers=len(classes),
        num_kv_heads=k.shape[1],
        head_dim=k.shape[3],
        head_dim_v=v.shape[3],
        capacity=max(2 * longest, longest + 256, widest) if capacity is None else capacity,
        batch_size=k.shape[0],
        dtype=k.dtype,
        window=windows,
        sinks=sinks.pop() if sinks else 0,
    )
    store.take_over(counts, arrays, operation)
    metadata = {name[2:]: text for name, text in facts.items() if name.startswith("0." if newer else "1.")}
    return (store, metadata) if return_metadata else store


def _in_slots(a: np.ndarray[Any, Any], keep: int, window: int, length: int, index: int) -> np.ndarray[Any, Any]:
    """The rows of a rotating cache in our slots: its own once it rotates, else in temporal order."""
    held = a.shape[2]
    first = max(keep, length - (held - min(keep, held)))  # position of the oldest row behind the kept ones
    order = list(range(min(keep, held))) + (
        list(range(index, held)) + list(range(keep, index)) if held >= window else list(range(keep, held))
    )
    temporal = a[:, :, order]
    out = np.zeros((*a.shape[:2], min(length, window), a.shape[3]), a.dtype)
    out[:, :, : min(keep, held)] = temporal[:, :, : min(keep, held)]
    for n, position in enumerate(range(first, length)):
        out[:, :, keep + (position - keep) % (window - keep)] = temporal[:, :, min(keep, held) + n]
    return out
