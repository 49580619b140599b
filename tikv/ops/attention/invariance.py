"""What attention does otherwise under ``tikv.init(invariant=True)``, all of it.

A row of a result then has the same bits whatever the batch, the other sequences, pages or contiguous memory, the chunks
in which its prompt came, and whether it is of a prompt or of one token. Sums of floats depend on their order, so what
decides on the order of a row's sums may depend on none of these:

- Keys are cut at multiples of `SPLIT_KEYS` positions, however many there are and whatever has time for them. The parts
  of the splits are merged one after another, of which those that a row sees nothing of leave each bit as it is.
- There is one kernel for prompts and for one token, whose tasks have as many rows for any number of queries. Within a
  split keys are taken in blocks from multiples of their length on, each in its place, seen or not.
- Not taken are the kernels that do not do so: on CUDA those of the tensor cores, whose tiles follow from the number of
  queries, and that of lanes, where the rows of a warp share when their maxima move; on CPU those of few rows, which
  read pages and contiguous memory by other loops; and torch's.

A store's ring, whose new tokens overwrite what a prompt's first queries see, takes a prompt one token at a time.
"""

from __future__ import annotations

from tikv import runtime
from tikv.errors import OptionError
from tikv.ops.attention.options import AttentionOptions, CacheLayout, QueryShape

SPLIT_KEYS = {"cpu": 1024, "cuda": 512, "vulkan": 512, "metal": 512, "amdgpu": 512}  # whole blocks of every kernel
MOST_PARTS = 1 << 24  # numbers of the parts of one launch; more queries have several
FEW_ROWS, MANY_ROWS = 4, 8  # query rows of a task on a GPU, by the query heads of a KV head


def refuse_splits(live: runtime.Runtime, operation: str, options: AttentionOptions) -> None:
    """No number of splits is asked for.

    Raises:
        OptionError: one is.
    """
    if live.invariant and options.splits is not None:
        raise OptionError(
            f"{operation}: num_splits={options.splits} cannot be chosen under tikv.init(invariant=True), which "
            f"splits the keys at multiples of {SPLIT_KEYS[live.arch]} tokens. Leave num_splits out."
        )


def fixed_rows(live: runtime.Runtime, query: QueryShape, cache: CacheLayout, most: int) -> int:
    """Query rows of a task for any number of queries, at most so many on a GPU; 0 where they may be chosen."""
    if not live.invariant:
        return 0
    if live.is_cpu:
        from tikv.kernels.attention import cpu

        return int(cpu.NUMBER_ROWS)
    return min(most, FEW_ROWS if query.heads // cache.heads <= FEW_ROWS else MANY_ROWS)


def fixed_splits(
    live: runtime.Runtime, query: QueryShape, cache: CacheLayout, longest: int, options: AttentionOptions, sink: bool
) -> int:
    """Splits of one length that hold all keys of the longest sequence which some query sees, and one for a sink logit.

    Of a window those between the fixed tokens and the first key behind them are left out.
    """
    keys = SPLIT_KEYS[live.arch]
    found = -(-longest // keys)
    if cache.chosen:
        pass
    elif cache.place == "ring":
        if longest >= cache.capacity:  # as far as is known: positions go on, and what is held does not grow
            found = -(-cache.ring // keys) + 1 + -(-cache.sinks // keys)
    elif options.span is not None:
        found = min(found, -(-(options.span + query.queries) // keys) + 1 + -(-cache.sinks // keys))
    return max(1, found) + int(sink)


def queries_of_launch(live: runtime.Runtime, query: QueryShape, splits: int, width_v: int, whole: bool) -> int:
    """How many queries one launch has, whose parts are kept until they are merged; all where `whole` says so."""
    if not live.invariant or whole or splits == 1:
        return query.queries
    found = max(1, MOST_PARTS // max(1, query.batch * query.heads * splits * width_v))
    return min(query.queries, found if found < 16 else found // 16 * 16)
