"""Everything that attention does differently under ``tikv.init(invariant=True)``.

A row of a result then has the same bits whatever the batch, the other sequences, the memory (pages or contiguous), the
chunks of its prompt, and whether it belongs to a prompt or to a single token. Sums of floats depend on their order, so
nothing that decides the order of a row's sums may depend on any of these:

- Keys are split at multiples of `SPLIT_KEYS` positions, however many keys and idle processors there are. The parts are
  merged one after another; a part in which a row sees no key leaves its bits unchanged.
- One kernel serves prompts and single tokens; its tasks have the same number of rows for any number of queries. Within
  a split, keys are processed in blocks that start at multiples of the block length, whether they are seen or not.
- Kernels that do not work so are not used: on CUDA those of warpgroups over latents, those of the tensor cores over
  keys by channel, and that of lanes, where the rows of a warp update their maxima together; on CPU those of few rows,
  which read pages and contiguous memory with different loops; and torch's.

On CUDA the tensor cores attend to float16 and bfloat16 if q, K and V have the same type, and to codes of 8 and 4 bits,
in another order than the kernel for all types. So which kernel attends to a row never depends on the number of queries
or sequences, or on lengths or pages. It depends on the types and formats, the widths of the heads, the terms (sink
logits, slopes, trees), and whether each row of K and V is in one piece and begins at a multiple of 16 bytes, and the
scales of a row where they are read together. With the tensor cores, too, the number of queries may decide how the
warps of a block divide the work, and the bits stay the same, for these reasons:

- A tile has 16 keys from a multiple of 16 positions on. A warp adds its tiles of a split one after another. A product
  of tensor cores computes each query row by itself, whichever of the 8 rows of an instruction it is.
- Over float16 and bfloat16, a row's sums have all tiles in order. If the warps divide the rows, each has all tiles of
  its own rows. With few rows, they exchange the logits of four tiles and divide the columns of V (`sm80.exchange`), so
  each column has the same products in the same order. The logits of a tile are always computed by one warp; in heads
  wider than 256, always by four, in a fixed order.
- Over codes, a row has four sums, each of every fourth tile, counted from position 0: the warps divide the keys, for
  any number of rows, and add up their sums in order. Tiles come from shared memory (`sm80.copies`) or not, with the
  same arithmetic. How values are rounded depends on their key alone: those of a key that may leave float16's range are
  2 ** -9 of what they are, and its weights 2 ** 9 times as large. The values of "mxfp8" and "mxfp4" that half precision
  does not hold together are added in windows of their scales, which are the same for all tiles.
- A row's maximum grows only if its own logits exceed it by enough; if another row of the warp grew, the row is
  multiplied by 2 ** 0, which is exactly 1.
- A tile in which the row sees no key changes no bit: the masked logits are below every maximum, so the row's maximum
  stays; their weights are 2 to a power below -126, which is exactly 0; and adding zeros leaves sums as they are. So
  it does not matter where the tiles of a task begin and end. Values that are infinite or NaN are taken out of tiles
  that some row does not see entirely; `sm80.infinities` adds them with the same result for either kind of tile.
- The kernel is compiled without fast arithmetic, so no sum is reordered or fused with a product. Only the native
  launcher keeps the two apart, so with another launcher the plain kernel attends: in that one, every row has the same
  instructions. If the native launcher refuses a kernel, attention raises, since the plain kernel's bits differ.

On compute capability 9, warpgroups serve prompts and single tokens for the same reasons: see `sm90.attend`.

A store's ring, whose new tokens overwrite keys that a prompt's first queries see, takes a prompt one token at a time.
"""

from __future__ import annotations

from tikv import runtime
from tikv.errors import OptionError
from tikv.ops.attention.options import AttentionOptions, CacheLayout, QueryShape

SPLIT_KEYS = {"cpu": 1024, "cuda": 1024, "vulkan": 512, "metal": 512, "amdgpu": 512}  # whole blocks of every kernel
MOST_PARTS = 1 << 24  # numbers in the parts of one launch; more queries take several launches
FEW_ROWS, MANY_ROWS = 4, 8  # query rows of a task on a GPU, by the query heads of a KV head


def refuse_splits(live: runtime.Runtime, operation: str, options: AttentionOptions) -> None:
    """Check that the caller did not ask for a number of splits.

    Raises:
        OptionError: one was given.
    """
    if live.invariant and options.splits is not None:
        raise OptionError(
            f"{operation}: num_splits={options.splits} cannot be chosen under tikv.init(invariant=True), which "
            f"splits the keys at multiples of {SPLIT_KEYS[live.arch]} tokens. Leave num_splits out."
        )


def fixed_rows(live: runtime.Runtime, group: int, most: int) -> int:
    """Query rows of a task without tensor cores, the same for any number of queries; 0 if they may differ.

    On a GPU they are at most `most`; `group` is the number of query heads of a KV head.
    """
    if not live.invariant:
        return 0
    if live.is_cpu:
        from tikv.kernels.attention.cpu.attend import NUMBER_ROWS

        return int(NUMBER_ROWS)
    return min(most, FEW_ROWS if group <= FEW_ROWS else MANY_ROWS)


def fixed_splits(
    keys: int, query: QueryShape, cache: CacheLayout, longest: int, span: int | None, selects: bool
) -> int:
    """Splits of so many `keys` each for all keys of the longest sequence that some query sees.

    With a window, the splits between the sinks and the first key of the window are left out, unless each query
    `selects` its tokens.
    """
    splits = -(-longest // keys)
    if selects:
        pass
    elif cache.kind == "ring":
        if longest >= cache.capacity:  # the ring is full, or may be: its slots do not grow with positions
            splits = -(-cache.ring // keys) + 1 + -(-cache.sinks // keys)
    elif span is not None:
        splits = min(splits, -(-(span + query.queries) // keys) + 1 + -(-cache.sinks // keys))
    return max(1, splits)


def queries_of_launch(live: runtime.Runtime, query: QueryShape, splits: int, width_v: int, whole: bool) -> int:
    """How many queries one launch takes, as its parts are kept until they are merged; all queries if `whole`."""
    if not live.invariant or whole or splits == 1:
        return query.queries
    most = max(1, MOST_PARTS // max(1, query.batch * query.heads * splits * width_v))
    return min(query.queries, most if most < 16 else most // 16 * 16)
