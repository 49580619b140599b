"""What every family of attention kernels has: its rows of a task, its splits, its kernels and their memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from tikv.kernels.attention.mass import make_mass
from tikv.kernels.attention.merge import make_merge, make_merge_in_order
from tikv.kernels.lanes import BLOCK
from tikv.ops.attention.families.form import Form
from tikv.ops.attention.invariance import SPLIT_KEYS, fixed_rows, fixed_splits
from tikv.ops.attention.options import MOST_QUERIES, MOST_ROWS
from tikv.ops.attention.splits import GPU_BLOCKS, LEAST_KEYS, Lengths, Shares, most_keys
from tikv.ops.attention.terms import tree_of


class HeadPass(NamedTuple):
    """What a task of a CPU reads one after another, and the memory of its worker.

    The kernel that weighs keys uses the same memory, see `kernels.attention.cpu.attend.WorkerMemory`.
    """

    heads: int = 1  # KV heads of a task
    keys: int = 0  # of a head, before those of the next head
    prefetch: int = 0  # what is prefetched meanwhile
    work_floats: int = 0  # memory of each worker


class MassKernel(NamedTuple):
    """A kernel that computes how much weight each key got, for ``return_mass``, as its factory and choices."""

    factory: Any
    choices: tuple[Any, ...]  # those before the common ones
    by_key: bool = False  # a thread has one key, instead of a part of a head's keys
    parts: int = 1  # tasks into which each of `Shares.mass_splits` is divided
    query_unit: int = 1  # elements of q in a word in which it is read
    selects: bool = True  # it can read selected tokens


class Family:
    """Kernels that attend in one way, for calls of one form; it keeps no array alive.

    A family overrides what it does in another way. The least that it has is `title`, `serves`, `why_not` and
    `attend_kernel`.

    Attributes:
        title: what the kernels are called, in messages and in the manual.
        serves: what they serve, for the manual; `why_not` decides it.
        word_bits: bits of a word of K and of V.
        rows: query rows that a task computes, among those that share a KV head.
        on_tensor_cores, in_warpgroups: whether the kernels are such.
        eight: whether their products take codes of 8 bits.
        threads, mass_threads: threads of a task that attends, and of one that weighs keys.
        most_queries: the most queries of a prompt per launch.
        mass_bits: bits of a word of K where keys are weighed; 0: as K is stored in groups, or as attention reads it.
    """

    title: str
    serves: str
    most_queries = MOST_QUERIES
    on_tensor_cores = in_warpgroups = eight = False
    threads = mass_threads = BLOCK
    mass_bits = 0

    def __init__(self, form: Form) -> None:
        self.live, self.query, self.options, self.group = form.live, form.query, form.options, form.group
        self.cache = form.cache._replace(k=form.cache.k.without_owner(), v=form.cache.v.without_owner())
        self.selects, self.masked, self.has_tree = form.selects, form.masked, bool(tree_of(form.arrays))
        self.has_sink_logits = "sink_logits" in form.arrays
        self.word_bits = self.words_of(form)
        most = self.most_rows_of(form)
        self.rows = self.rows_of_task(most, fixed_rows(self.live, self.group, most))

    @classmethod
    def why_not(cls, form: Form) -> str:
        """Why these kernels cannot attend to calls of a form; empty if they can."""
        return "keys are codes by channel" if form.cache.by_channel else ""

    @classmethod
    def needs_native(cls, form: Form) -> bool:
        """Whether the kernels for a form have instructions that only the native launcher can ask for."""
        return False

    # --- the rows of a task

    def words_of(self, form: Form) -> tuple[int, int]:
        """Bits of a word of K and of V."""
        return form.word_bits(4)

    def most_rows_of(self, form: Form) -> int:
        """The most query rows of a task."""
        return MOST_ROWS

    def rows_of_task(self, most: int, fixed: int = 0) -> int:
        """Query rows of a task: `fixed`, or at most `most`.

        For a prompt they are 4 or the most, whatever its length: a kernel for each number would take seconds to
        compile. If tokens are selected, they are rows of one query.
        """
        rows = self.query.queries * self.group
        if self.selects:
            return rows_of_one_query(self.group, fixed or most)
        if fixed:
            return fixed
        if self.query.queries > 1:
            return 4 if rows <= 4 else most
        return rows_evenly(rows, most)

    def row_blocks(self, queries: int) -> int:
        """Tasks of a KV head and a split for so many queries."""
        return -(-queries * self.group // self.rows)

    # --- how keys are split

    def shares(self, lengths: Lengths) -> Shares:
        """The splits and workers for lengths up to the longest; as many splits as the options ask for, if they do.

        Heads of different lengths take the time of their sum.
        """
        cache, splits, longest = self.cache, self.options.splits, most_keys(self.cache, lengths)
        if self.live.invariant:
            keys = SPLIT_KEYS[self.live.arch]
            splits = fixed_splits(keys, self.query, cache, lengths.longest, self.options.span, self.selects)
            return Shares(splits + self.has_sink_logits, self.workers(longest), split_keys=keys)
        if lengths.mean is None:
            return Shares(splits or self.splits_of(longest), self.workers(longest))
        if self.options.span is not None:
            longest = min(longest, cache.sinks + self.options.span + self.query.queries)
        mean = min(lengths.mean, longest)
        return self.shares_of_heads(mean, longest) if splits is None else Shares(splits, self.workers(mean))

    def shares_of_heads(self, mean: int, longest: int) -> Shares:
        """`shares` for heads of different lengths, if the caller does not choose the number of splits."""
        return Shares(self.splits_of(longest), self.workers(mean))

    def splits_of(self, keys: int) -> int:
        """Enough splits to fill the device, each with at least `LEAST_KEYS` keys."""
        return self.fewest_splits(keys, GPU_BLOCKS[self.live.arch])

    def fewest_splits(self, keys: int, blocks: int) -> int:
        """The fewest splits that make so many tasks; fewer if they would be too short."""
        tasks = self.tasks
        return min(-(-blocks // tasks) if tasks < blocks else 1, most_splits(keys))

    def workers(self, keys: int) -> int:
        """The CPU's threads that attend to so many keys."""
        return 1

    @property
    def tasks(self) -> int:
        """The tasks of a split, over all sequences and KV heads, if a task has one head."""
        return self.query.batch * self.cache.heads * self.row_blocks(self.query.queries)

    # --- kernels: factories, and the choices that they take before the common ones

    def attend_kernel(self, choices: Any, workers: int, paired: bool) -> tuple[Any, tuple[Any, ...]]:
        """The kernel that attends; `paired`: its results may be written in pairs of columns.

        After these choices, the factory gets the common ones: whether it writes the parts of splits, and `choices`.
        """
        raise NotImplementedError

    def mass_kernel(self, choices: Any, workers: int, by_slot: bool, greatest: bool) -> MassKernel:
        """The kernel that weighs keys, by slot or in the order of tokens: a sum of weights, or the greatest."""
        return MassKernel(make_mass, (self.live.kernel_style, by_slot, greatest), by_key=True)

    @property
    def merge_kernel(self) -> Any:
        """The kernel that merges the parts of splits."""
        return make_merge_in_order if self.live.invariant else make_merge

    @property
    def merge_threads(self) -> int:
        """Threads that merge a row: one for each column."""
        return self.cache.width_v

    def head_pass(self, shares: Shares, by_head: bool) -> HeadPass:
        """What a task of a CPU reads; `by_head`: heads have lengths, pages or tokens of their own."""
        return HeadPass()


def rows_of_one_query(group: int, most: int) -> int:
    """The most rows, up to `most`, that divide the rows of one query evenly."""
    return next(n for n in range(min(group, most), 0, -1) if group % n == 0)


def rows_evenly(rows: int, most: int) -> int:
    """Rows of each of the fewest tasks of at most `most` rows; 1 if there are no rows, and so no tasks."""
    rows = max(rows, 1)
    return -(-rows // -(-rows // most))


def most_splits(keys: int) -> int:
    """The most splits of so many keys, each with at least `LEAST_KEYS`."""
    return max(1, min(keys // LEAST_KEYS, 128))


def columns_of(widths: range) -> str:
    """Widths of heads, for the manual."""
    return f"{widths[0]} to {widths[-1]} columns in steps of {widths.step}"
