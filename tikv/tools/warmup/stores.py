"""The calls that warm up a `KVCacheStore` or a `PagedKVCacheStore`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tikv import runtime
from tikv.arrays import CacheArray, new_array
from tikv.dtypes import DType
from tikv.errors import CapacityError, OptionError
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.step import compile_step
from tikv.stores.store import KVCacheStore
from tikv.tools.warmup.asked import FEW, OPERATION, Asked, Job, lengths_held, title_of

CHUNK = 4096  # tokens per append when a store is filled to a length
MOST_HELD = 65536  # the most tokens of a pool's sequence


def _zeros(shape: Sequence[int], dtype: DType, live: runtime.Runtime) -> CacheArray:
    """Zeros in the library's own memory, on the device of its kernels."""
    return CacheArray(new_array(tuple(shape), dtype, live, zeroed=True), live)


def jobs_of_store(store: KVCacheStore, asked: Asked) -> list[Job]:
    """Calls of `extend`, `append` and `attend`, and of steps, for a layer of each window."""
    heads = asked.heads_over(store.num_kv_heads)
    layers = {window: i for i, window in reversed(list(enumerate(store.windows)))}
    grouped = not _counts_alone(store)
    if None in layers and asked.tokens[0] > store.capacity:
        raise CapacityError(
            f"{OPERATION}: tokens={asked.tokens[0]} do not fit layer {layers[None]}, whose capacity is "
            f"{store.capacity}. Use at most {store.capacity}."
        )
    jobs = []
    for dtype in asked.formats_of(store.dtype):
        for window, layer in layers.items():
            for tokens in asked.tokens:
                most = store.capacity - tokens if window is None else 2 * window
                for held in lengths_held(tokens, most, [window] if window else []):
                    run = functools.partial(_call_store, store, layer, heads, tokens, held, dtype, asked.steps, grouped)
                    jobs.append(Job(title_of(dtype, tokens, held, window), run))
    return jobs


def _call_store(
    store: KVCacheStore, layer: int, heads: int, tokens: int, held: int, dtype: DType, steps: bool, grouped: bool
) -> None:
    batch, live = store.batch_size, store.runtime

    def rows(n: int) -> list[CacheArray]:
        widths = store.head_dim, store.head_dim_v
        return [_zeros((batch, n, store.num_kv_heads, width), dtype, live) for width in widths]

    def hold() -> None:
        store.reset()
        if not grouped:
            store.advance(held)  # the memory may hold anything, and only this call reads it
            return
        for start in range(0, held, CHUNK):
            store.append(layer, *rows(min(CHUNK, held - start)))

    q, (k, v) = _zeros((batch, tokens, heads, store.head_dim), dtype, live), rows(tokens)
    hold()
    store.extend(layer, q, k, v)
    if tokens == 1:
        hold()
        store.append(layer, k, v)
        store.attend(layer, q)
    if steps and tokens <= FEW and not grouped:
        hold()
        compile_step(store, layers=layer).run(k, v, q)


def _counts_alone(store: KVCacheStore) -> bool:
    """Whether an empty store's count can be set without tokens; groups along tokens need the tokens themselves."""
    try:
        store.advance(0)
    except OptionError:
        return False
    return True


def jobs_of_pool(pool: PagedKVCacheStore, asked: Asked) -> list[Job]:
    """Calls of `extend` and `attend` for one sequence and for two, in the first layer: all layers are alike."""
    heads = asked.heads_over(pool.num_kv_heads)
    room = min(pool.num_free_blocks * pool.block_size // (pool.num_kv_heads if pool.config.per_head else 1), MOST_HELD)
    if asked.tokens[0] > room:
        raise CapacityError(
            f"{OPERATION}: tokens={asked.tokens[0]} do not fit the pool, which has room for {room}. Use at most that."
        )
    jobs = []
    for dtype in asked.formats_of(pool.dtype):
        for tokens in asked.tokens:
            for held in lengths_held(tokens, room - tokens):
                for sequences in (1, 2) if 2 * (held + tokens) + 2 * pool.block_size <= room else (1,):
                    run = functools.partial(_call_pool, pool, heads, sequences, tokens, held, dtype)
                    jobs.append(Job(title_of(dtype, tokens, held), run))
    return jobs


def _call_pool(pool: PagedKVCacheStore, heads: int, sequences: int, tokens: int, held: int, dtype: DType) -> None:
    live, seqs = pool.runtime, [pool.add() for _ in range(sequences)]

    def rows(n: int) -> list[CacheArray]:
        return [_zeros((n, pool.num_kv_heads, width), dtype, live) for width in (pool.head_dim, pool.head_dim_v)]

    def starts(n: int) -> list[int]:
        return [i * n for i in range(sequences + 1)]

    try:
        for start in range(0, held, CHUNK):
            n = min(CHUNK, held - start)
            k, v = rows(n * sequences)
            pool.append(0, k, v, seqs, starts(n))
        q, (k, v) = _zeros((tokens * sequences, heads, pool.head_dim), dtype, live), rows(tokens * sequences)
        pool.extend(0, q, k, v, seqs, starts(tokens))
        if tokens == 1:
            pool.attend(0, q, seqs)
    finally:
        for seq in seqs:
            pool.free(seq)
