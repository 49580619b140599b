"""Attention on a CPU: a task is the work of one of its threads; see `kernels.attention.cpu.attend`."""

from __future__ import annotations

from typing import Any

from tikv.kernels.attention.cpu import attend, loops
from tikv.kernels.attention.cpu.mass import make_mass_cpu
from tikv.ops.attention.families.family import Family, HeadPass, MassKernel
from tikv.ops.attention.families.form import Form
from tikv.ops.attention.splits import WAKING_PRODUCTS, Shares


class Cpu(Family):
    """Kernels that read pages and contiguous memory with loops of their own.

    If the heads of a token lie side by side, a task has several KV heads, see `head_pass`.
    """

    title = "threads of the CPU"
    serves = "all calls without `invariant=True`, except over keys by channel"

    threads = mass_threads = merge_threads = 1

    def words_of(self, form: Form) -> tuple[int, int]:
        """As in `Family`: an element."""
        k, v = (form.arrays[name].dtype.itemsize * 8 for name in "kv")
        return k, v

    def most_rows_of(self, form: Form) -> int:
        """As in `Family`: more for a prompt."""
        prompt = form.query.queries > 1 and not form.selects
        return int(attend.NUMBER_ROWS) if prompt else super().most_rows_of(form)

    def shares_of_heads(self, mean: int, longest: int) -> Shares:
        """As in `Family`: each worker has its share of every head."""
        splits, workers = self.splits_of(longest), self.workers(mean)
        if workers > 1:
            even = -(-splits // workers) * workers if splits > 1 else 1
            splits = max(even, min(workers, mean // loops.CHUNK))
        return Shares(splits, workers)

    def splits_of(self, keys: int) -> int:
        """As in `Family`, for all workers."""
        return 1 if self.workers(keys) == 1 else self.fewest_splits(keys, 4 * self.live.threads)

    def workers(self, keys: int) -> int:
        """Threads that attend: all if that saves more than waking them costs, else one."""
        query, threads = self.query, self.live.threads
        products = query.batch * query.heads * query.queries * keys * (self.cache.width + self.cache.width_v)
        return threads if products * (threads - 1) >= WAKING_PRODUCTS * threads else 1

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        return attend.make_attend_cpu, (workers,)

    def mass_kernel(self, choices: Any, workers: int, by_slot: bool, greatest: bool) -> MassKernel:
        return MassKernel(make_mass_cpu, (workers, by_slot, greatest))

    def head_pass(self, shares: Shares, by_head: bool) -> HeadPass:
        heads, keys, prefetch = self._heads_of_task(self.rows, shares, by_head)
        numbers = self.rows >= attend.NUMBER_ROWS or not self.cache.alike
        return HeadPass(heads, keys, prefetch, self._work_floats(self.rows, heads, numbers))

    def _work_floats(self, rows: int, heads: int, numbers: bool) -> int:
        """The memory of a worker; `numbers`: the keys of each head are first converted to numbers."""
        cache, widths = self.cache, (self.cache.width, self.cache.width_v)
        codes = cache.k.format is not None or cache.v.format is not None
        return int(attend.work_floats(rows, *widths, heads, codes) + (attend.number_floats(*widths) if numbers else 0))

    def _heads_of_task(self, rows: int, shares: Shares, by_head: bool) -> tuple[int, int, int]:
        """The first fields of a `HeadPass`, for tasks of so many query rows.

        If the heads of a token, or of a page, lie side by side, a chunk of all heads is prefetched in the order of
        memory. With few sequences, tasks have fewer heads, so that each worker has one.
        """
        cache = self.cache
        near, side = loops.CHUNK, 0
        in_pieces = cache.k.inner[0] or cache.v.inner[0]
        if self.selects and not (in_pieces or cache.k.format):
            side = attend.PREFETCH_PAGES  # selected rows do not follow each other
        if rows >= attend.NUMBER_ROWS or not cache.alike:
            return 1, near, side
        if by_head or cache.k.format is not None:  # heads of a task share one list of keys; codes need unpacking
            if cache.kind == "table" and not (cache.k.head or in_pieces):
                near, side = min(cache.page + cache.page % 2, near), attend.PREFETCH_PAGES  # a page has one head
            return 1, near, side
        if cache.k.head < cache.k.token and cache.v.head < cache.v.token:
            side = attend.PREFETCH_TOKENS
        elif cache.kind == "table" and cache.k.head < cache.k.block:
            near, side = min(cache.page + cache.page % 2, loops.CHUNK), attend.PREFETCH_PAGES
        else:
            return 1, near, side
        if in_pieces:
            side = 0  # rows in pieces are not prefetched
        most = attend.heads_per_task(rows, cache.width, cache.width_v, cache.heads)
        blocks = -(-shares.workers // (self.query.batch * shares.splits))
        return min(most, -(-cache.heads // blocks)), near, side


class CpuInOrder(Cpu):
    """Kernels whose tasks have the same number of rows for any number of queries, see `invariance`."""

    title = "threads of the CPU in a fixed order"
    serves = "all calls with `invariant=True`, except over keys by channel"

    @classmethod
    def why_not(cls, form: Form) -> str:
        return super().why_not(form) if form.live.invariant else "tikv.init(invariant=True) is not set"

    def head_pass(self, shares: Shares, by_head: bool) -> HeadPass:
        heads, keys, prefetch = self._heads_of_task(self.query.queries * self.group, shares, by_head)
        rows = -(-self.rows // loops.BAND) * loops.BAND
        return HeadPass(heads, keys, prefetch, self._work_floats(rows, heads, numbers=True))
