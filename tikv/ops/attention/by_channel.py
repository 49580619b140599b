"""Attention over keys quantised by channel over groups of tokens, and values by token; the codes are read in place.

The scores of all keys are computed first, by a kernel of their own: float32, 4 bytes for each key and row of queries.
Attention then reads them where it would multiply queries with keys, and the values as it reads them of any cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, new_array
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.attention.options import AttentionOptions, CacheLayout, plan_key
from tikv.ops.attention.plan import AttentionPlan
from tikv.ops.attention.request import AttentionScale
from tikv.ops.layouts import Rows
from tikv.ops.plan import Launch, Plan

SERIAL_PRODUCTS = 1 << 18  # on CPU, below this the calling thread is done before another one is awake


class ChannelKeys(NamedTuple):
    """Keys as codes by channel.

    Attributes:
        codes: (B, H, room, D, words) uint32, contiguous: of each group of tokens those of each channel. With a table
            (blocks, H, room, D, words).
        numbers: (B, H, room, D, 2), or (blocks, H, room, D, 2): their scales and biases.
        format: of the codes.
        table: (B, most blocks) of the blocks that hold a sequence's groups, `room` each; None without pages.
    """

    codes: ArrayView
    numbers: ArrayView
    format: GroupFormat
    table: ArrayView | None = None

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.codes.shape[1]

    @property
    def width(self) -> int:
        """Channels of a head."""
        return self.codes.shape[3]


def channel_scores(
    live: runtime.Runtime, operation: str, q: ArrayView, keys: ChannelKeys, out: ArrayView, groups: int
) -> None:
    """Products of queries and the keys of the first `groups` groups of tokens, in one launch.

    Args:
        live: the runtime.
        operation: for messages.
        q: (B, Hq, T, D) float32, float16 or bfloat16, whose last axis is contiguous.
        keys: the codes.
        out: (B, H, T * Hq / H, tokens) float32, contiguous; of a KV head the scores of its query heads with the first
            query, then with the next. Those of groups that a table does not have stay as they are.
        groups: how many.

    Raises:
        CapacityError: more than 32-bit indices reach.
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
        table = arrays[4] if paged else q  # of which a kernel without pages reads nothing
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
        each = kernels.channel_work_floats(width, format.group)
        plan.work = work = new_array((workers * each,), dtypes.float32, live)
        kernel = launch.kernel(
            live, kernels.make_channel_scores_cpu, workers, rows, 1 if live.invariant else kernels.BAND, form
        )
        return [Launch(kernel.bind(workers, *taken, work, tuple(params._replace(work=each))), taken)]

    names = ("q", "K", "the scales of K", "scores", *["block tables"] * paged)
    plan = _ScorePlan(live, operation, names, (False, False, False, True, *[False] * paged), bind)
    return plan


class _ScorePlan(Plan):
    """A plan that keeps the memory of its launch's workers."""

    work: ArrayView | None = None


class ScoredValues(NamedTuple):
    """Values, as `CacheLayout` has what is read: one for each key, whose scores were computed.

    Attributes:
        rows: where they lie, and their scales.
        width: numbers of a row.
        tokens: slots of a sequence, or as many as a table can name.
        ring: slots that go round; 0 for none.
        span: tokens that a query sees, itself included, where queries stand behind the keys; None: all see all.
        page, blocks: slots of a block and blocks, of values that lie in pages; 0 for none.
    """

    rows: Rows
    width: int
    tokens: int
    ring: int = 0
    span: int | None = None
    page: int = 0
    blocks: int = 0


def scored_plan(
    live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], values: ScoredValues, asked: AttentionScale
) -> AttentionPlan:
    """The plan of attention with scores that are there, for queries that see all keys; checked once for each form.

    Args:
        live, operation: as in `channel_scores`.
        arrays: q (B, Hq, T, D); k, the scores as `channel_scores` has them; v and v_scale; lens and table of pages.
        values: where V lies.
        asked: what turns products into scores.
    """
    key = plan_key(operation, arrays, ("scored", *asked, values.rows.format, *values[1:]))
    plan = live.plans.get(key)
    if plan is None:
        scores = arrays["k"]
        sequence, head, row, _ = scores.strides
        cache = CacheLayout(
            k=Rows(scores, sequence=sequence, head=head, token=1, block=row),
            v=values.rows,
            heads=scores.shape[1],
            width=arrays["q"].shape[3],
            width_v=values.width,
            place="table" if values.page else "ring" if values.ring else "linear",
            capacity=values.tokens,
            page=values.page,
            blocks=values.blocks,
            ring=values.ring,
            scored=True,
        )
        options = AttentionOptions(asked.scale, values.span is not None, values.span, asked.softcap)
        plan = live.plans.keep(key, AttentionPlan(live, operation, arrays, cache, arrays["q"].shape[0], options))
    found: AttentionPlan = plan
    return found
