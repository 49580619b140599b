"""mlx-lm's prompt-cache files: `save_prompt_cache` writes what mlx-lm reads, `load_prompt_cache` reads what it writes.

A layer without a window is its `KVCache`, one with a window its `RotatingKVCache`, whose `keep` are the sinks.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from tikv import files
from tikv.errors import CacheFileError, OptionError
from tikv.store import KVCacheStore


def save_prompt_cache(
    file_name: str | os.PathLike[str], cache: KVCacheStore, metadata: dict[str, str] | None = None
) -> None:
    """Save a store as a prompt cache of mlx-lm.

    Args:
        file_name: ends in ``.safetensors``.
        cache: a store of float32, float16 or bfloat16.
        metadata: strings kept with it.

    Raises:
        OptionError: an int8 or float64 store, which mlx-lm's plain caches cannot hold; or a ring that was trimmed after
            it wrapped, which they cannot describe.
        CacheFileError: the system refuses to write.

    Exactness: every bit.
    """
    operation = "mlx.save_prompt_cache"
    if cache.dtype.name not in ("float32", "float16", "bfloat16"):
        raise OptionError(
            f"{operation}: dtype={cache.dtype.name!r} is not offered. Use a float32, float16 or bfloat16 store."
        )
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    facts: dict[str, str] = {}
    for i, (state, arrays) in enumerate(cache.export_layers()):
        if state.ring and state.valid_from > max(0, state.length - state.ring):
            raise OptionError(
                f"{operation}: layer {i} was trimmed after its window had wrapped, which is not offered. Fill it first."
            )
        tensors[f"{i}.0"], tensors[f"{i}.1"] = arrays[0], arrays[1]
        if state.window is None:
            facts[f"0.{i}"] = ""
            facts[f"2.{i}"] = "KVCache"
            continue
        last = state.slot_of(state.length - 1) if state.length else -1
        for j, value in enumerate((state.sinks, state.window, state.length, last + 1)):
            facts[f"0.{i}.{j}"] = str(value)
        facts[f"2.{i}"] = "RotatingKVCache"
    facts |= {f"1.{name}": text for name, text in (metadata or {}).items()}
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
    classes = {int(name[2:]): text for name, text in facts.items() if name.startswith("2.") and name[2:].isdigit()}
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
            if classes[i] == "KVCache":
                windows.append(None)
                counts.append((k.shape[2], 0))
                arrays.append([k, v])
                continue
            keep, window, length, index = (int(facts[f"0.{i}.{j}"]) for j in range(4))
            held = k.shape[2]
            if not (0 <= keep < window and 0 <= index <= held and min(length, window) <= held <= length):
                raise ValueError(
                    f"state of {held} tokens: keep={keep}, max_size={window}, offset={length}, idx={index}"
                )
        except (KeyError, ValueError, IndexError) as error:
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
    store.import_layers(counts, arrays, operation)
    metadata = {name[2:]: text for name, text in facts.items() if name.startswith("1.")}
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
