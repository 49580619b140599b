"""In how many parts the keys of a call are read: what the families of kernels have in common."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from tikv.ops.attention.options import CacheLayout

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
    """What the host knows about the numbers of keys in a call: that of the longest head, and perhaps the mean."""

    longest: int
    mean: int | None = None  # over KV heads, if each has its own length and the host knows them


class Shares(NamedTuple):
    """How the keys of a call are shared out: in how many parts each head's keys are read, and by how many threads."""

    splits: int
    workers: int  # threads on CPU
    least_share: int = 0  # the least keys in a split; splits beyond the end of a short head have none; see `in_turn`
    mass_splits: int = 1  # parts in which keys are weighed for their mass
    split_keys: int = 0  # positions in a split, if all splits have the same number; else 0
    in_turn: int = 1  # splits that a task computes, one after another; the kernel finds it by `least_share`, its keys

    @property
    def tasks(self) -> int:
        """The tasks that share a head's splits."""
        return -(-self.splits // self.in_turn)


def most_keys(cache: CacheLayout, lengths: Lengths) -> int:
    """The most keys that a head may have."""
    return min(lengths.longest, cache.ring + cache.sinks if cache.kind == "ring" else cache.capacity)


def choose_mass_splits(cache: CacheLayout, lengths: Lengths) -> int:
    """The number of parts in which the mass of keys is computed."""
    return max(1, -(-most_keys(cache, lengths) // MASS_KEYS))


@functools.cache
def whole_waves(tasks: int, least: int, most: int, multiprocessors: int) -> int:
    """The number of splits, `least` or slightly more, for which the last wave of blocks leaves few processors idle.

    This holds for any number of blocks that a multiprocessor may hold. 256 tasks in 5 splits keep 132 multiprocessors
    of 4 blocks busy for 2.4 waves of 3, and reach 0.81 of their speed; in 12 splits, for 5.8 of 6.
    """
    best, busiest = least, 0.0
    for splits in range(least, min(most, 4 * least) + 1):
        waves = [tasks * splits / (multiprocessors * n) for n in RESIDENT]
        busy = min(n / math.ceil(n) for n in waves)
        if busy >= BUSY:
            return splits
        if busy > busiest:
            best, busiest = splits, busy
    return best


@functools.cache
def fewest_splits(tasks: int, most: int, multiprocessors: int, resident: int, filling: int) -> int:
    """The fewest splits that keep memory busy in the tensor cores' kernel, with `resident` blocks per multiprocessor.

    `filling` blocks on each multiprocessor are enough: two for float16, since they read all the time. If there are more
    blocks than fit at once, the last wave must leave few places idle. On an H200, 256 tasks of 8,192 keys take 265 us
    in 1 split, and 281 in 3.
    """
    best, busiest = 1, 0.0
    for splits in range(1, most + 1):
        blocks, room = tasks * splits, multiprocessors * resident
        waves = blocks / room
        busy = min(1.0, blocks / (filling * multiprocessors)) if waves <= 1 else waves / math.ceil(waves)
        if busy >= (FILLED if waves <= 1 else FEW_IDLE):
            return splits
        if busy > busiest:
            best, busiest = splits, busy
    return best
