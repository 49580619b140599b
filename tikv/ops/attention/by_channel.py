"""Attention over keys quantised by channel over groups of tokens, and values by token; the codes are read in place.

If a family of kernels serves such keys, it reads keys and values in one launch. Otherwise a separate kernel first
computes the scores of all keys: float32, 4 bytes for each key and query row. Attention then reads these scores instead
of multiplying queries with keys, and reads the values as in any other cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, new_array
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.call import plan_key
from tikv.ops.attention.families import Form, is_served, log_choice
from tikv.ops.attention.options import AttentionOptions, CacheLayout, query_shape
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import Rows, Scale
from tikv.ops.plan import Launch, Plan

SERIAL_PRODUCTS = 1 << 18  # on CPU, below this the calling thread finishes before another one wakes


class ChannelKeys(NamedTuple):
    """Keys as codes by channel: each channel of a group of tokens has one scale and one bias.

    Attributes:
        codes: (B, H, room, D, words) uint32, contiguous: for each group of tokens, the codes of each channel. With a
            table, (blocks, H, room, D, words).
        numbers: (B, H, room, D, 2), or (blocks, H, room, D, 2): their scales and biases.
        format: the format of the codes.
        table: (B, most blocks) of the blocks that hold a sequence's groups, `room` each; None without pages.
    """

    codes: ArrayView
    numbers: ArrayView
    format: GroupFormat
    table: ArrayView | None = None

    @property
    def heads(self) -> int:
        """The number of KV heads."""
        return self.codes.shape[1]

    @property
    def width(self) -> int:
        """The number of channels of a head."""
        return self.codes.shape[3]


def channel_scores(
    live: runtime.Runtime, operation: str, q: ArrayView, keys: ChannelKeys, out: ArrayView, groups: int
) -> None:
    """Compute the products of queries with the keys of the first `groups` groups of tokens, in one launch.

    Args:
        live: the runtime.
        operation: the operation's name, for messages.
        q: (B, Hq, T, D) float32, float16 or bfloat16, whose last axis is contiguous.
        keys: the codes.
        out: (B, H, T * Hq / H, tokens) float32, contiguous; for each KV head, the rows of its query heads for the
            first query, then for the next. The scores of groups that the table does not name stay as they are.
        groups: how many groups are read.

    Raises:
        CapacityError: an array is larger than 32-bit indices reach.
    """
    arrays = [q, keys.codes, keys.numbers, out] + ([] if keys.table is None else [keys.table])
    key = ("channel_scores", *[a.key for a in arrays], keys.format, groups)
    plan: Any = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, _plan(live, operation, keys.format, groups, len(arrays) > 4))
    plan.run(arrays)


def _plan(live: runtime.Runtime, operation: str, format: GroupFormat, groups: int, paged: bool) -> Plan:
    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        from tikv.kernels.attention import by_channel as kernels
        from tikv.kernels.attention.cpu import lines
        from tikv.kernels.groups import unit_of

        q, codes, numbers, out = arrays[:4]
        _, heads, room, width, _ = codes.shape
        batch, group, queries = q.shape[0], q.shape[1] // heads, q.shape[2]
        rows = group * queries
        band = 1 if live.invariant else next(n for n in (4, 2, 1) if rows % n == 0)
        count, _ = unit_of(format.name)
        per_group = 1 if live.is_cpu else (rows // band) * (format.group // count)
        items = batch * heads * groups * per_group
        checks.integer(items, "units of scores", operation, high=2**31 - 1)
        for name, a in (("q", q), ("K", codes), ("scales", numbers), ("scores", out)):
            checks.addressable(a, a.dtype.itemsize, live, name, operation)
        table = arrays[4] if paged else q  # a placeholder, since a kernel without pages does not read it
        where = (codes.shape[0], table.strides[0], table.offset // table.dtype.itemsize) if paged else (0, 0, 0)
        params = kernels.ScoreParams(
            items, groups, room, heads, queries, out.shape[3], *q.strides[:3],
            *(a.offset // a.dtype.itemsize for a in (q, codes, numbers)), *where,
        )  # fmt: skip
        bits = table.dtype.itemsize * 8 if paged else 0
        form = kernels.Scored(format.name, q.dtype.short, numbers.dtype.short, width, group, bits)
        taken = [q, codes, numbers, table, out]
        if not live.is_cpu:
            kernel = launch.kernel(live, kernels.make_channel_scores, live.kernel_style, band, form)
            return [Launch(kernel.bind(items, *taken, tuple(params)), taken)]
        workers = live.threads if items * rows * format.group * width >= SERIAL_PRODUCTS else 1
        each = lines.line_work_floats(width, format.group)
        plan.work = work = new_array((workers * each,), dtypes.float32, live)
        kernel = launch.kernel(
            live, kernels.make_channel_scores_cpu, workers, rows, 1 if live.invariant else lines.BAND, form
        )
        return [Launch(kernel.bind(workers, *taken, work, tuple(params._replace(work=each))), taken)]

    names = ("q", "K", "the scales of K", "scores", *["block tables"] * paged)
    plan = _ScorePlan(live, operation, names, (False, False, False, True, *[False] * paged), bind)
    return plan


class _ScorePlan(Plan):
    """The plan of a launch that writes a score for each key; it keeps the memory of the launch's workers."""

    work: ArrayView | None = None


class ScoredValues(NamedTuple):
    """Values that are weighted by computed scores, one value for each key; the fields are like those of `CacheLayout`.

    Attributes:
        rows: where they lie, and their scales.
        width: numbers in a row.
        tokens: slots of a sequence, or as many as a table can name.
        ring: slots of the ring; 0 without a ring.
        span: tokens that a query sees, itself included, if queries come after the keys; None: each query sees all keys.
        page, blocks: slots per block and number of blocks, if values lie in pages; else 0.
    """

    rows: Rows
    width: int
    tokens: int
    ring: int = 0
    span: int | None = None
    page: int = 0
    blocks: int = 0


def channel_plan(
    live: runtime.Runtime,
    operation: str,
    arrays: dict[str, ArrayView],
    keys: ChannelKeys,
    values: ScoredValues,
    asked: AttentionScale,
) -> AttentionPlan | None:
    """The plan of attention that reads K's codes itself, on tensor cores; None if scores are computed first.

    Args:
        live, operation: as in `channel_scores`.
        arrays: q (B, Hq, T, D); k and k_scale, the arrays of `keys`; v, and v_scale if V has scales.
        keys: the codes.
        values: where V lies.
        asked: what turns products into scores.
    """
    if keys.table is not None or values.ring or values.span is not None or asked.softcap is not None:
        return None  # with a soft cap LLVM makes two functions of the kernel
    key = plan_key(operation, arrays, ("by channel", *asked, keys.format, values.rows.format, *values[1:]))
    entry = live.plans.get(key)
    if entry is None:
        codes, numbers = keys.codes.strides, keys.numbers.strides
        scale = Scale(keys.numbers, sequence=numbers[0], head=numbers[1], token=numbers[2])
        cache = CacheLayout(
            k=Rows(keys.codes, sequence=codes[0], head=codes[1], token=codes[2], format=keys.format, scale=scale),
            v=values.rows,
            heads=keys.heads,
            width=keys.width,
            width_v=values.width,
            kind="linear",
            capacity=values.tokens,
            by_channel=True,
        )
        options = AttentionOptions(asked.scale, causal=False)
        plan, query = None, query_shape(arrays["q"], "q", operation)
        form = Form(live, arrays, query, cache, options)
        if is_served(form):
            plan = AttentionPlan(live, operation, arrays, cache, options)
        else:
            log_choice(operation, form)
        entry = live.plans.keep(key, (plan,))
    known: AttentionPlan | None = entry[0]
    return known


def scored_plan(
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], values: ScoredValues, asked: AttentionScale
) -> AttentionPlan:
    """The plan of attention with given scores, for queries that see all keys; checked once for each form.

    Args:
        live, operation: as in `channel_scores`.
        arrays: q (B, Hq, T, D); k, the scores from `channel_scores`; v and v_scale; lens, and the table of pages.
        values: where V lies.
        asked: what turns products into scores.
    """
    key = plan_key(operation, arrays, ("scored", *asked, values.rows.format, *values[1:]))
    plan: AttentionPlan | None = live.plans.get(key)
    if plan is None:
        scores = arrays["k"]
        sequence, head, row, _ = scores.strides
        cache = CacheLayout(
            k=Rows(scores, sequence=sequence, head=head, token=1, block=row),
            v=values.rows,
            heads=scores.shape[1],
            width=arrays["q"].shape[3],
            width_v=values.width,
            kind="table" if values.page else "ring" if values.ring else "linear",
            capacity=values.tokens,
            page=values.page,
            blocks=values.blocks,
            ring=values.ring,
            scored=True,
        )
        options = AttentionOptions(asked.scale, values.span is not None, values.span, asked.softcap)
        plan = live.plans.keep(key, AttentionPlan(live, operation, arrays, cache, options))
    return plan
