"""How the keys and query rows of a call are shared out: splits, workers, heads that are read together."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from tikv import launch, runtime
from tikv.ops.attention.invariance import SPLIT_KEYS, fixed_splits
from tikv.ops.attention.options import MOST_ROWS, MOST_SPLITS, AttentionOptions, CacheLayout, QueryShape

LEAST_KEYS = 256  # the least keys in a split, unless the caller gave their number
WAKING_PRODUCTS = 1 << 20  # products that a CPU thread computes (about 0.07 ms) until the others wake
SERIAL_MERGE = 1 << 18  # with fewer products one thread merges; each product reads a number of its own
GPU_BLOCKS = {"cuda": 1056, "vulkan": 64, "metal": 256, "amdgpu": 256}  # thread blocks that fill a device
RESIDENT = (3, 4, 5, 6)  # blocks that a CUDA multiprocessor holds at once, by kernel
BUSY = 0.9  # a sufficient share of busy multiprocessors, on average over the waves of blocks
FILLED, FEW_IDLE = 0.95, 0.85  # sufficient shares: in a single wave of the filling blocks, in several of their places
EVEN_KEYS = 16  # `least_share` is a multiple of this, so that the splits stay the same for some tokens
MASS_KEYS = 512  # keys in a part of the mass, about: enough parts to fill a device, each of them short
MOST_BLOCKS = 16  # times `GPU_BLOCKS`, for heads of different lengths, many of whose blocks may be idle


class Lengths(NamedTuple):
    """What the host knows about the lengths of a call."""

    longest: int
    mean: int | None = None  # over KV heads, if each has its own length and the host knows them


class Shares(NamedTuple):
    """How the keys of a call are shared out."""

    splits: int
    workers: int  # threads on CPU
    least_share: int = 0  # the least keys in a split; splits beyond the end of a short head have none
    mass_splits: int = 1  # parts in which keys are weighed for their mass
    split_keys: int = 0  # positions in a split, if all splits have the same number; else 0


def choose_shares(
    live: runtime.Runtime,
    query: QueryShape,
    cache: CacheLayout,
    lengths: Lengths,
    options: AttentionOptions,
    sink: bool = False,
) -> Shares:
    """The splits and workers for lengths up to the longest; as many splits as `options` ask for, if they do.

    `sink` says whether there are sink logits.

    Heads of different lengths take the time of their sum. On CUDA a task has the same number of keys for a short and a
    long head: as many as if all heads had the mean length. On CPU each worker has its share of every head.
    """
    longest, splits = most_keys(cache, lengths), options.splits
    if live.invariant:
        fixed = fixed_splits(live, query, cache, lengths.longest, options, sink)
        return Shares(fixed, choose_workers(live, query, cache, longest), split_keys=SPLIT_KEYS[live.arch])
    if lengths.mean is None:
        return Shares(splits or choose_splits(live, query, cache, longest), choose_workers(live, query, cache, longest))
    if options.span is not None:
        longest = min(longest, cache.sinks + options.span + query.queries)
    mean = min(lengths.mean, longest)
    workers = choose_workers(live, query, cache, mean)
    if splits is None and live.is_cuda:
        share = max(LEAST_KEYS, -(-mean // choose_splits(live, query, cache, mean)), -(-longest // MOST_SPLITS))
        share = max(share, longest * tasks_of_split(query, cache) // (MOST_BLOCKS * GPU_BLOCKS[live.arch]))
        share = -(-share // EVEN_KEYS) * EVEN_KEYS
        return Shares(max(1, -(-longest // share)), workers, share)
    if splits is None:
        splits = choose_splits(live, query, cache, longest)
        if workers > 1:
            from tikv.kernels.attention.cpu_loops import CHUNK

            splits = max(-(-splits // workers) * workers if splits > 1 else 1, min(workers, mean // CHUNK))
    return Shares(splits, workers)


def most_keys(cache: CacheLayout, lengths: Lengths) -> int:
    """The most keys that a head may have."""
    return min(lengths.longest, cache.ring + cache.sinks if cache.place == "ring" else cache.capacity)


def choose_mass_splits(cache: CacheLayout, lengths: Lengths) -> int:
    """The number of parts in which the mass of keys is computed."""
    return max(1, -(-most_keys(cache, lengths) // MASS_KEYS))


def choose_splits(live: runtime.Runtime, query: QueryShape, cache: CacheLayout, keys: int) -> int:
    """Enough splits to fill the device, each with at least `LEAST_KEYS` keys."""
    tasks = tasks_of_split(query, cache)
    most = max(1, min(keys // LEAST_KEYS, 128))
    if cache.tile is not None:
        return fewest_splits(tasks, most, launch.multiprocessors(live), cache.tile.resident, cache.tile.filling)
    if live.is_cpu and choose_workers(live, query, cache, keys) == 1:
        return 1
    wanted = 4 * live.threads if live.is_cpu else GPU_BLOCKS[live.arch]
    least = min(-(-wanted // tasks) if tasks < wanted else 1, most)
    return whole_waves(tasks, least, most, launch.multiprocessors(live)) if live.is_cuda else least


def tasks_of_split(query: QueryShape, cache: CacheLayout) -> int:
    """The number of tasks in one split, over all sequences and KV heads, if a task has one head."""
    group = query.heads // cache.heads
    rows = rows_of_task(query.queries, group, cache.tile, cache.most_rows, cache.chosen, cache.fixed_rows)
    return query.batch * cache.heads * -(-query.queries * group // rows)


@functools.cache
def whole_waves(tasks: int, least: int, most: int, multiprocessors: int) -> int:
    """The number of splits, `least` or slightly more, for which the last wave of blocks leaves few processors idle.

    This holds for any number of blocks that a multiprocessor may hold. 256 tasks in 5 splits keep 132 multiprocessors
    of 4 blocks busy for 2.4 waves of 3, and reach 0.81 of their speed; in 12 splits, for 5.8 of 6.
    """
    found, best = least, 0.0
    for splits in range(least, min(most, 4 * least) + 1):
        waves = [tasks * splits / (multiprocessors * n) for n in RESIDENT]
        busy = min(n / math.ceil(n) for n in waves)
        if busy >= BUSY:
            return splits
        if busy > best:
            found, best = splits, busy
    return found


@functools.cache
def fewest_splits(tasks: int, most: int, multiprocessors: int, resident: int, filling: int) -> int:
    """The fewest splits that keep memory busy in the tensor cores' kernel, with `resident` blocks per multiprocessor.

    `filling` blocks on each multiprocessor are enough: two for float16, since they read all the time. If there are more
    blocks than fit at once, the last wave must leave few places idle. On an H200, 256 tasks of 8,192 keys take 265 us
    in 1 split, and 281 in 3.
    """
    found, best = 1, 0.0
    for splits in range(1, most + 1):
        blocks, room = tasks * splits, multiprocessors * resident
        waves = blocks / room
        busy = min(1.0, blocks / (filling * multiprocessors)) if waves <= 1 else waves / math.ceil(waves)
        if busy >= (FILLED if waves <= 1 else FEW_IDLE):
            return splits
        if busy > best:
            found, best = splits, busy
    return found


def choose_heads_per_task(query: QueryShape, cache: CacheLayout, shares: Shares, by_head: bool) -> tuple[int, int, int]:
    """On CPU: (KV heads of a task, keys of one head that it reads before the next head, what is prefetched).

    If the heads of a token, or of a page, lie side by side, a chunk of all heads is prefetched in the order of memory.
    With few sequences, tasks have fewer heads, so that each worker has one.
    """
    from tikv.kernels.attention import cpu, cpu_loops

    near, side = cpu_loops.CHUNK, 0
    if cache.chosen and not (cache.k.inner[0] or cache.v.inner[0] or cache.k.format):
        side = cpu.PREFETCH_PAGES  # chosen rows do not follow each other
    rows = rows_of_task(query.queries, query.heads // cache.heads, None, cache.most_rows, cache.chosen)
    if cache.fixed_rows:
        rows = query.queries * query.heads // cache.heads
    if rows >= cpu.NUMBER_ROWS or not cache.alike:  # the keys of each head are converted to numbers
        return 1, near, side
    if by_head or cache.k.format is not None:  # heads of a task share one list of keys; codes need unpacking
        if cache.place == "table" and not (cache.k.head or cache.k.inner[0] or cache.v.inner[0]):
            near, side = min(cache.page + cache.page % 2, near), cpu.PREFETCH_PAGES  # a page has one head
        return 1, near, side
    if cache.k.head < cache.k.token and cache.v.head < cache.v.token:
        side = cpu.PREFETCH_TOKENS
    elif cache.place == "table" and cache.k.head < cache.k.block:
        near, side = min(cache.page + cache.page % 2, cpu_loops.CHUNK), cpu.PREFETCH_PAGES
    else:
        return 1, near, side
    if cache.k.inner[0] or cache.v.inner[0]:
        side = 0  # rows in pieces are not prefetched
    most = cpu.heads_per_task(rows, cache.width, cache.width_v, cache.heads)
    blocks = -(-shares.workers // (query.batch * shares.splits))
    return min(most, -(-cache.heads // blocks)), near, side


def rows_of_task(
    queries: int, group: int, tile: Any = None, most: int = MOST_ROWS, chosen: bool = False, fixed: int = 0
) -> int:
    """Query rows that one task computes, among those that share a KV head; with tensor cores, those of a `Tile`.

    For a prompt they are 4 or the most, whatever its length: a kernel for each number would take seconds to compile. If
    warps exchange logits, which they do in prompts too, they are those of the tile.
    If each query has chosen tokens of its own, or the kernel wants it, they are rows of one query, and divide its rows
    evenly.
    """
    if chosen or (queries > 1 and tile is not None and tile.of_one_query):
        most = fixed or (most if tile is None else tile.rows)
        return next(n for n in range(min(group, most), 0, -1) if group % n == 0)
    if fixed:
        return fixed
    rows = queries * group
    exchange = getattr(tile, "shared_out", None) == "exchange"  # tiles of warpgroups share nothing out among warps
    if queries > 1 or exchange:
        return int(tile.rows) if tile is not None else 4 if rows <= 4 else most
    blocks = -(-rows // (most if tile is None else tile.rows))
    return -(-rows // blocks)


def choose_workers(live: runtime.Runtime, query: QueryShape, cache: CacheLayout, keys: int) -> int:
    """Threads that attend on CPU: all if that saves more than waking them costs, else one."""
    products = query.batch * query.heads * query.queries * keys * (cache.width + cache.width_v)
    return live.threads if live.is_cpu and products * (live.threads - 1) >= WAKING_PRODUCTS * live.threads else 1
