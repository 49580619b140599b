"""Attention over page pools through block tables: `paged_decode_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tikv import runtime
from tikv.arrays import Array, Arrays, ArrayView, describe, refuse_backward, runtime_of
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.call import Caches, attention_call, plan_key
from tikv.ops.attention.options import (
    AttentionOptions,
    CacheLayout,
    are_fixed,
    check_form,
    query_shape,
    table_by_head,
    window_or_none,
)
from tikv.ops.attention.plan import Results
from tikv.ops.attention.request import AttendRequest
from tikv.ops.attention.terms import check_terms
from tikv.ops.fixed_scales import fixed_scale
from tikv.ops.layouts import POOL_LAYOUTS, Formats, pool_rows, pool_scale, pool_shape, scale_of_slots
from tikv.ops.quantized_arrays import Quantized, require_slots_first


def paged_decode_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    context_lens: Array | int,
    *,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | None = None,
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    causal: bool = True,
    softcap: float | None = None,
    num_splits: int | None = None,
    lse_base2: bool = False,
    impl: str = "auto",
    sink_logits: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    parents: Array | None = None,
    head_dim_v: int | None = None,
    indices: Array | None = None,
) -> Arrays:
    """Attend with the queries of the newest tokens over page pools, in place: `decode_attention` with a block table.

    Position ``p`` of sequence ``b`` is slot ``p % bs`` of block ``block_tables[b, p // bs]``.

    Args:
        q: (B, Hq, D) or (B, Hq, T, D).
        k_pool, v_pool: as in `write_slots`, in the same layouts; int8 with scales; or each a `Quantized`.
        block_tables: (B, max_blocks) int32 or int64, on the host or the device; entries after a context may be
            negative. (B, H, max_blocks) gives each KV head pages of its own: a block then holds ``bs`` tokens of one
            head, and the pools have H = 1.
        context_lens: (B,) int32 or int64: tokens of each sequence, including the newest; or one int for all; or (B, H)
            for each KV head, as in `decode_attention`.
        layout: "NHD", "HND" or "VLLM".
        window: tokens that a query sees, including itself.
        k_scale, v_scale: (N, bs, H) for int8 pools; a number, (H,) or (B, H) each for pools of 8-bit floats; not for
            other pools.
        scale, return_lse, out, causal, softcap, num_splits, lse_base2: as in `decode_attention`.
        sink_logits, alibi_slopes, mask, parents: as in `decode_attention`.
        head_dim_v: as in `decode_attention`; not in layout "VLLM".
        indices: as in `decode_attention`, counted as ``context_lens`` counts tokens.
        impl: as in `decode_attention`; torch has no attention over pages, so "auto" is "taichi".

    Returns:
        As `decode_attention` does.

    Raises:
        PositionError: a context on the host is negative, is longer than its table, or is less than T but not 0 where
            ``causal`` is True; a table on the host names a block outside the pool; an index on the host is not a token
            of its sequence. On the device, contexts are limited to their valid range, and blocks outside the pool and
            indices that are not tokens of their sequence are ignored.
        ShapeError, DTypeError, OptionError, CapacityError: as in `decode_attention`.

    Exactness, cost: as in `decode_attention`.
    Source: ``paged_decode_attention``, ``int8_paged_decode_attention``, ``BatchPagedDecodePlan``.

    Examples:
        >>> import numpy as np, tikv
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> q, table = np.ones((1, 1, 1), np.float32), np.array([[2, 0, -1]])
        >>> tikv.paged_decode_attention(q, k, v, table, np.array([3])).tolist()
        [[[3.0]]]
    """
    operation = "paged_decode_attention"
    request = AttendRequest(
        scale=scale, softcap=softcap, window=window, impl=impl, sink_logits=sink_logits, alibi_slopes=alibi_slopes,
        mask=mask, parents=parents, causal=causal, num_splits=num_splits, lse_base2=lse_base2, indices=indices,
    )  # fmt: skip
    pages = NHD if layout == "NHD" else PagedLayout(checks.name(layout, "layout", operation, tuple(POOL_LAYOUTS)))
    pools = Caches(pages, k_pool, v_pool, context_lens, block_tables, k_scale, v_scale, head_dim_v)
    call = attention_call(operation, q, pools, request)
    result = call.attend(q, Results(out, checks.flag(return_lse, "return_lse", operation)))
    return refuse_backward(result, q, k_pool, v_pool)


# The parameters, by the array that attention reads.
NAMES = {"q": "q", "k": "k_pool", "v": "v_pool", "lens": "context_lens", "table": "block_tables"}


class PagedLayout(NamedTuple):
    """Page pools with a block table, whose axes are named as in `POOL_LAYOUTS`; an `AttendedLayout`."""

    name: str = "NHD"

    @property
    def names(self) -> Mapping[str, str]:
        """As in `AttendedLayout`."""
        return NAMES

    def check(self, operation: str, caches: Caches, request: AttendRequest) -> None:
        """As in `AttendedLayout`."""
        if caches.v is None and self.name == "VLLM":
            raise OptionError(
                f"{operation}: layout 'VLLM' stores each key in several pieces. Use 'NHD' or 'HND' for v_pool=None."
            )
        if isinstance(caches.k, Quantized) or isinstance(caches.v, Quantized):
            require_slots_first(operation, self.name)
        if request.impl == "torch":
            raise OptionError(f"{operation}: torch has no attention over pages. Use impl='taichi'.")

    def cache(
        self, live: runtime.Runtime, operation: str, arrays: dict[str, ArrayView], formats: Formats,
        options: AttentionOptions,
    ) -> tuple[CacheLayout, AttentionOptions]:  # fmt: skip
        """As in `AttendedLayout`."""
        table = arrays["table"]
        checks.indices(table, "block_tables", operation)
        checks.rank(table, (2, 3), "block_tables", "(B, max_blocks), or (B, H, max_blocks) per KV head", operation)
        heads = table.shape[1] if table_by_head(arrays) else None
        named = table.shape[0], heads, table.shape[-1]
        cache = _pool_layout(arrays, self.name, live, operation, formats, named)
        window_or_none(options.span, operation)
        return cache, options


NHD = PagedLayout()


def check_paged_queries(
    operation: str, q: ArrayView, pools: Caches, request: AttendRequest, terms: Mapping[str, ArrayView],
    table_heads: int | None,
) -> None:  # fmt: skip
    """Check that queries (B, Hq, T, D) fit these pools, whatever the block tables and lengths will be.

    Args:
        operation: the operation's name, for messages.
        q, request, terms: as in `attention_call`.
        pools: a store's pools; their block tables and lengths are not checked.
        table_heads: how many KV heads have block tables of their own; None if they share them.

    Raises:
        ShapeError, DTypeError, OptionError: they cannot.

    Cost: the work is done once for each form; nothing is allocated on the device.
    """
    live, layout = runtime_of(pools.k), pools.layout
    assert isinstance(layout, PagedLayout)
    scales = {"k_scale": pools.k_scale, "v_scale": pools.v_scale}
    arrays = {"q": q, "k": pools.k, "v": pools.v}
    arrays |= {name: a for name, a in scales.items() if a is not None} | dict(terms)
    key = ("queries", *plan_key(operation, arrays, (layout, request.choices, pools.formats, table_heads)))
    if live.plans.get(key) is None:
        request.check_choices(operation)
        asked = request.options()
        table = q.shape[0], table_heads, 0
        cache = _pool_layout(arrays, layout.name, live, operation, pools.formats or (None, None), table)
        query = query_shape(q, "q", operation)
        window_or_none(asked.span, operation)
        check_form(operation, arrays, query, cache, query.batch, asked)
        check_terms(operation, arrays, query, cache, asked, live)
        live.plans.keep(key, True)


def _pool_layout(
    arrays: dict[str, ArrayView], layout: str, live: runtime.Runtime, operation: str, formats: Formats,
    table: tuple[int, int | None, int],
) -> CacheLayout:  # fmt: skip
    """The checked `CacheLayout` of page pools for tables of so many sequences, KV heads (None: shared) and blocks."""
    batch, table_heads, table_blocks = table
    checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS))
    checks.on_device([(NAMES.get(name, name), a) for name, a in arrays.items()], live, operation)
    k, v = arrays["k"], arrays["v"]
    shapes = []
    for stream, (name, a) in enumerate((("k_pool", k), ("v_pool", v))):
        checks.readable(a, name, operation)
        shapes.append(pool_shape(a, POOL_LAYOUTS[layout][stream], name, operation, formats[stream]))
    detail = f"k_pool: {describe(k)}, v_pool: {describe(v)}, layout {layout}"
    for what in ("blocks", "page", "heads"):
        checks.extent(getattr(shapes[1], what), getattr(shapes[0], what), f"the {what} of v_pool", operation, detail)
    shape, by_head = shapes[0], table_heads is not None
    if by_head and shape.heads != 1:
        raise ShapeError(
            f"{operation}: block_tables has pages for each of {table_heads} KV heads, whose blocks hold one head, and "
            f"the pools have {shape.heads} ({detail}). Use pools of 1 head."
        )
    heads = shape.heads if table_heads is None else table_heads
    rows = [pool_rows(a, POOL_LAYOUTS[layout][stream], formats[stream]) for stream, a in enumerate((k, v))]
    if by_head:
        rows = [r._replace(head=0) for r in rows]
    fixed = are_fixed(arrays, heads, batch, operation)
    for i, name in enumerate(("k_scale", "v_scale")):
        if name in arrays and fixed:
            rows[i] = rows[i]._replace(scale=fixed_scale(arrays[name]))
        elif name in arrays:
            checks.readable(arrays[name], name, operation)
            pool_scale(arrays[name], shapes[i], name, operation, formats[i])
            scale = scale_of_slots(arrays[name])
            rows[i] = rows[i]._replace(scale=scale._replace(head=0) if by_head else scale)
    return CacheLayout(
        k=rows[0],
        v=rows[1],
        heads=heads,
        width=shape.width,
        width_v=shapes[1].width,
        kind="table",
        capacity=table_blocks * shape.page,
        page=shape.page,
        blocks=shape.blocks,
    )
