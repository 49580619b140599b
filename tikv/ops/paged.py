"""Writes to and reads from page pools: `write_slots` by a slot mapping, `gather_paged` by a block table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, CacheArray, describe, new_array, runtime_of, view, view_all
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import GroupFormat, format_of
from tikv.ops import checks
from tikv.ops.fixed_scales import check_fixed_scale, check_fixed_scales, fixed_scale, scale_given
from tikv.ops.indices import check_blocks, check_slots, host_indices, index_array
from tikv.ops.layouts import (
    POOL_LAYOUTS,
    Formats,
    Placement,
    PoolShape,
    Rows,
    Scale,
    WrittenPages,
    pool_axes,
    pool_rows,
    pool_scale,
    pool_shape,
    scale_of_slots,
    scale_step,
)
from tikv.ops.plan import NO_ENTRIES, Entries, Launch, Plan, PlannedCall
from tikv.ops.quantized_arrays import (
    Quantized,
    codes_and_numbers,
    codes_of_pair,
    require_quantizable,
    require_slots_first,
)
from tikv.ops.row_copy import bind_copy


def write_slots(
    k: Array,
    v: Array,
    k_pool: Array,
    v_pool: Array,
    slot_mapping: Array,
    *,
    layout: str = "NHD",
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> None:
    """Write new keys and values into page pools, token ``t`` into slot ``slot_mapping[t]``, in place, in one launch.

    A slot is ``block * bs + offset``, where ``bs`` is the number of slots in a block. A negative slot skips its token.

    Args:
        k, v: (T, H, D) and (T, H, D_v), of one dtype; any strides with a contiguous last axis.
        k_pool, v_pool: "NHD" (N, bs, H, D); "HND" (N, H, bs, D); "VLLM" K (N, H, D/x, bs, x) and V (N, H, D, bs), where
            x elements take 16 bytes. Dtypes as in `copy`; or int8 for float32, float16 and bfloat16 rows; or, in "NHD",
            both a `Quantized` of that shape, with the same format, made by `quantize`.
        slot_mapping: (T,) int32 or int64, on the host or the device.
        layout: "NHD", "HND" or "VLLM".
        k_scale, v_scale: for int8 pools, arrays (N, bs, H), both float16 or both float32, into which scales are
            written. For pools of 8-bit floats, a number or (H,) each: ``row / scale`` is stored; None for 1. Not for
            other pools.

    Raises:
        PositionError: a slot on the host is beyond the pool. A token whose slot on the device is beyond the pool is
            skipped; with ``tikv.init(debug=True)`` the slots are read back and this raises. In debug mode two tokens
            for one slot raise as well; otherwise either of the two may be stored.
        ShapeError, DTypeError, OptionError: arrays that do not agree, a pool without its scales, an unknown layout.

    Exactness: bit-exact for equal dtypes; a narrowing conversion rounds to nearest even; a quotient by a scale is
        rounded to float32 first. int8 pools and a `Quantized` get the codes that `quantize` gives.
    Cost: each element is read once and written once; one launch.
    Source: ``int8_kv_append_paged`` and ``split_qkv_norm_rope_into_paged_cache`` without norm and rotation.

    Examples:
        >>> import numpy as np, tikv
        >>> k_pool, v_pool = np.zeros((2, 3, 2, 1, 1), np.float32)
        >>> k = v = np.ones((2, 1, 1), np.float32)
        >>> tikv.write_slots(k, v, k_pool, v_pool, np.array([3, -1]))
        >>> k_pool.ravel().tolist()
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    """
    slots_call("write_slots", k, v, k_pool, v_pool, slot_mapping, layout=layout, k_scale=k_scale, v_scale=v_scale).run()


def slots_call(
    operation: str,
    k: Array,
    v: Array,
    k_pool: Array,
    v_pool: Array,
    slot_mapping: Array,
    *,
    layout: str = "NHD",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
) -> PlannedCall:
    """A checked call of `write_slots`, under the operation name that errors give."""
    live = runtime_of(k_pool, k)
    scales: Sequence[Any] = ()
    formats: Formats | None = None
    if isinstance(k_pool, Quantized) or isinstance(v_pool, Quantized):
        require_slots_first(operation, layout)
        pair = {"k_pool": k_pool, "v_pool": v_pool}
        (k_pool, v_pool), scales, formats = codes_of_pair(live, operation, pair, (k_scale, v_scale), written=True)
    elif k_scale is not None or v_scale is not None:
        _both_scales(k_scale, v_scale, operation)
        scales = [scale_given(s, live, name, operation) for name, s in (("k_scale", k_scale), ("v_scale", v_scale))]
    arguments = (k, k_pool, v, v_pool, index_array(slot_mapping, "slot_mapping", operation), *scales)
    arrays = view_all(arguments, _SLOT_NAMES[: len(arguments)], operation)
    key = (operation, checks.name(layout, "layout", operation, tuple(POOL_LAYOUTS)), formats, arrays.key)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check_write_slots(live, operation, arrays, layout, formats))
    check_slots(arrays[4], plan.pool, live, operation)
    return PlannedCall(plan, arrays, arguments)


class WriteSlotsPlan(Plan):
    """A checked slot-mapped write; the slots are checked against `pool` in each run."""

    pool: PoolShape

    def revalidate(self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]) -> tuple[None, Entries]:
        """Check the slots, if the host knows them."""
        check_slots(arrays["slot_mapping"], self.pool, self.live, self.operation)
        return None, NO_ENTRIES


_SLOT_NAMES = ("k", "k_pool", "v", "v_pool", "slot_mapping", "k_scale", "v_scale")


def _both_scales(k_scale: Array | float, v_scale: Array | float, operation: str) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            raise _missing(name, operation)


def _missing(name: str, operation: str) -> ShapeError:
    return ShapeError(
        f"{operation}: {name} is missing. An int8 pool needs k_scale and v_scale of shape (N, bs, H). For 8-bit floats "
        "each may be a number or (H,). Pass both."
    )


def check_write_slots(
    live: runtime.Runtime,
    operation: str,
    arrays: Sequence[ArrayView],
    layout: str,
    formats: Formats | None = None,
    scale_names: Sequence[str] = ("k_scale", "v_scale"),
    pages: WrittenPages | None = None,
) -> WriteSlotsPlan:
    """Check everything except the slots, which may change from call to call.

    `formats` are as in `check_pool_write`, `scale_names` name the arrays after the slots, `pages` are as in `Rows`.
    """
    names = (*_SLOT_NAMES[:5], *scale_names)[: len(arrays)]
    named = dict(zip(names, arrays, strict=True))
    write = check_pool_write(live, operation, names, arrays, layout, formats)._replace(pages=pages)
    k, shape, index = named["k"], write.shapes[0], named["slot_mapping"]
    for name, of, format in zip("kv", write.shapes, write.formats, strict=True):
        _check_stored(operation, named, name, of, format)
    scales = {name: named[name] for name in scale_names if name in named}
    if len(scales) == 2:
        _check_scales_alike(operation, scales, write.heads)
    # A scale of 8-bit floats is given and only read; every other scale is computed from the rows, and stored too.
    computed = [name for name in scales if named[f"{name[0]}_pool"].dtype not in dtypes.FLOATS8]
    written = [name.endswith("_pool") or name in computed for name in names]
    checks.indices(index, "slot_mapping", operation)
    checks.rank(index, (1,), "slot_mapping", "(T,)", operation)
    checks.extent(
        index.shape[0],
        write.tokens,
        "the length of slot_mapping",
        operation,
        f"k: {describe(k)}, slot_mapping: {describe(index)}",
    )

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        named = dict(zip(names, arrays, strict=True))
        index, scales = named["slot_mapping"], [named.get("k_scale"), named.get("v_scale")]
        return write.bind(live, operation, arrays, Placement("slots", array=index, step=index.strides[0]), scales)

    plan = WriteSlotsPlan(live, operation, names, written, None if write.nothing else bind)
    plan.pool = shape
    return plan


def _check_stored(
    operation: str, arrays: Mapping[str, ArrayView], name: str, shape: PoolShape, format: GroupFormat | None
) -> None:
    """Check that the rows of K, or of V, can be stored in their pool with the scales that they have.

    Raises:
        ShapeError, DTypeError: they cannot.
    """
    rows, pool, scale = arrays[name], arrays[f"{name}_pool"], arrays.get(f"{name}_scale")
    row = format or format_of(pool.dtype)
    if row is not None and row.finds_scales:
        require_quantizable(rows, name, operation)
        if scale is None:
            raise _missing(f"{name}_scale", operation)
        checks.writable(scale, f"{name}_scale", operation)
        pool_scale(scale, shape, f"{name}_scale", operation, format)
    elif scale is not None and row is not None:
        if rows.dtype not in dtypes.QUANTIZABLE:
            raise DTypeError(
                f"{operation}: {name} is {describe(rows)}; a scale divides float32, float16 and bfloat16 rows."
            )
        check_fixed_scale(scale, shape.heads, f"{name}_scale", operation)
    elif scale is not None:
        raise DTypeError(
            f"{operation}: {name}_pool is {describe(pool)}; only pools of int8 and of 8-bit floats have scales. Leave "
            f"them out."
        )
    else:
        checks.convertible(rows, pool, name, f"{name}_pool", operation)


def _check_scales_alike(operation: str, scales: Mapping[str, ArrayView], heads: int) -> None:
    """Check that the scales of K and V are found with the same strides.

    Raises:
        ShapeError, DTypeError: they are not.
    """
    k, v = scales["k_scale"], scales["v_scale"]
    if max(k.ndim, v.ndim) < 3:
        check_fixed_scales([k, v], heads, operation)
        return
    checks.same_dtype(k, v, "k_scale", "v_scale", operation)
    if scale_step(k) != scale_step(v):
        raise ShapeError(
            f"{operation}: k_scale and v_scale have different strides ({k.strides} and {v.strides} elements). Pass two "
            f"contiguous arrays."
        )


class PoolWrite(NamedTuple):
    """A write of new rows into pools whose shapes agree."""

    layout: str
    tokens: int
    heads: int
    shapes: tuple[PoolShape, PoolShape]
    formats: Formats = (None, None)  # those of pools of groups of codes
    pages: WrittenPages | None = None  # the pages of K that the launch summarises

    @property
    def streams(self) -> list[int]:
        """Which of K and V have anything to write."""
        return [i for i in (0, 1) if self.shapes[i].width]

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to write."""
        return self.tokens == 0 or self.heads == 0 or self.shapes[0].slots == 0 or not self.streams

    def bind(
        self,
        live: runtime.Runtime,
        operation: str,
        arrays: Sequence[ArrayView],
        placement: Placement,
        scales: Sequence[ArrayView | None] = (None, None),
    ) -> list[Launch]:
        """The launch over (k, k_pool, v, v_pool, ...), or one each if K and V are stored in different ways.

        Args:
            live, operation, arrays: as in `bind_copy`.
            place: where each token goes, without the numbers of slots.
            scales: the scales of K and of V, each may be None.
        """
        rows, pools, shape = arrays[0:4:2], arrays[1:4:2], self.shapes[0]
        names = [None if format is None else format.name for format in self.formats]
        alike = pools[0].dtype is pools[1].dtype and names[0] == names[1]
        launches = []
        for streams in [self.streams] if alike else [[i] for i in self.streams]:
            bound = bind_copy(
                live,
                operation,
                src=[Rows(rows[i], token=rows[i].strides[0], head=rows[i].strides[1]) for i in streams],
                dst=[
                    pool_rows(pools[i], POOL_LAYOUTS[self.layout][i], self.formats[i])._replace(
                        scale=_scale_of(scales[i]), pages=None if i else self.pages
                    )
                    for i in streams
                ],
                widths=[self.shapes[i].width for i in streams],
                heads=self.heads,
                tokens=self.tokens,
                dst_place=placement._replace(page=shape.page, limit=shape.slots),
            )
            launches.append(bound)
        return launches


def _scale_of(scale: ArrayView | None) -> Scale | None:
    """Checked scales of a pool: one per slot, one per head, or one for the whole pool."""
    if scale is None:
        return None
    return fixed_scale(scale) if scale.ndim < 3 else scale_of_slots(scale)


def check_pool_write(
    live: runtime.Runtime,
    operation: str,
    names: Sequence[str],
    arrays: Sequence[ArrayView],
    layout: str,
    formats: Formats | None = None,
) -> PoolWrite:
    """Check that rows and pools agree in shape; the first arrays are (k, k_pool, v, v_pool).

    `formats` are those of a store's pools, whose K and V may be stored in different ways; None for a caller's pools.

    Raises:
        ShapeError, DTypeError, OptionError, ArchError: they do not, or an array lies elsewhere.
    """
    checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS))
    checks.on_device(list(zip(names, arrays, strict=True)), live, operation)
    k, k_pool, v, v_pool = arrays[:4]
    tokens, heads = rows_shape(k, v, operation)
    shapes = []
    of_pools = formats or (None, None)
    for stream, (rows, pool, name) in enumerate(((k, k_pool, "k"), (v, v_pool, "v"))):
        axes = POOL_LAYOUTS[layout][stream]
        checks.writable(pool, f"{name}_pool", operation)
        shape = pool_shape(pool, axes, f"{name}_pool", operation, of_pools[stream])
        detail = f"{name}: {describe(rows)}, {name}_pool: {describe(pool)}, layout {layout}"
        checks.extent(shape.heads, heads, f"the number of heads of {name}_pool", operation, detail)
        checks.extent(shape.width, rows.shape[2], f"the head width of {name}_pool", operation, detail)
        shapes.append(shape)
    if formats is None:
        checks.same_dtype(k_pool, v_pool, "k_pool", "v_pool", operation)
    detail = f"k_pool: {describe(k_pool)}, v_pool: {describe(v_pool)}"
    checks.extent(shapes[1].blocks, shapes[0].blocks, "the number of blocks of v_pool", operation, detail)
    checks.extent(shapes[1].page, shapes[0].page, "the block size of v_pool", operation, detail)
    return PoolWrite(layout, tokens, heads, (shapes[0], shapes[1]), of_pools)


def rows_shape(k: ArrayView, v: ArrayView, operation: str) -> tuple[int, int]:
    """(T, H) of new rows of K and V.

    Raises:
        ShapeError, DTypeError: they disagree, or cannot be read in place.
    """
    for name, a in (("k", k), ("v", v)):
        checks.rank(a, (3,), name, "(T, H, D)", operation)
        checks.readable(a, name, operation)
    checks.same_dtype(k, v, "k", "v", operation)
    detail = f"k: {describe(k)}, v: {describe(v)}"
    checks.extent(v.shape[0], k.shape[0], "the number of tokens of v", operation, detail)
    checks.extent(v.shape[1], k.shape[1], "the number of heads of v", operation, detail)
    return k.shape[0], k.shape[1]


def gather_paged(
    pool: Array,
    block_table: Array,
    length: int,
    *,
    layout: str = "NHD",
    scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Copy a sequence out of a page pool into consecutive rows, in one launch.

    Token ``t`` is slot ``t % bs`` of block ``block_table[t // bs]``.

    Args:
        pool: a pool of K or V, as in `write_slots`; in "VLLM" a pool of five axes holds K, one of four axes V.
        block_table: (at least ceil(length / bs),) int32 or int64, on the host or the device; the rest is not read.
        length: tokens to read.
        layout: "NHD", "HND" or "VLLM".
        scale: (N, bs, H) for an int8 pool; a number or (H,) for a pool of 8-bit floats; not for other pools.
        out: (length, H, D), of the pool's dtype or one that `copy` converts it to; if there is a scale or the pool is a
            `Quantized`, float32, float16 or bfloat16.

    Returns:
        ``out``; or a new `CacheArray` on the device, (length, H, D), of the pool's dtype, or float32 if there is a
        scale or the pool is a `Quantized`.

    Raises:
        PositionError: the table is too short, or a table on the host names a block outside the pool. If the table is
            on the device, the rows of such a block's tokens are left unchanged in ``out``, and are zero in a new array;
            with ``tikv.init(debug=True)`` this raises.
        ShapeError, DTypeError, OptionError: as in `write_slots`.

    Exactness: as in `write_slots`; with a scale, ``stored * scale`` in float32, rounded once to the dtype of ``out``.
    Cost: each element is read once and written once; one launch.
    Source: the tests of the source systems' paged caches, which compare pages with a contiguous cache.

    Examples:
        >>> import numpy as np, tikv
        >>> pool = np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> tikv.gather_paged(pool, np.array([2, 0]), 3).copy_to_host().ravel().tolist()
        [4.0, 5.0, 0.0]
    """
    operation = "gather_paged"
    format = None
    if isinstance(pool, Quantized):
        require_slots_first(operation, layout)
        if scale is not None:
            raise OptionError(f"{operation}: a Quantized has its own scales. Leave scale out.")
        format = pool.format
        pool, scale = codes_and_numbers(runtime_of(pool), operation, pool, "pool's ")
    return gather(operation, pool, block_table, length, layout=layout, scale=scale, out=out, format=format)


def gather(
    operation: str,
    pool: Array,
    block_table: Array,
    length: int,
    *,
    layout: str,
    scale: Array | None = None,
    out: Array | None = None,
    format: GroupFormat | None = None,
    by_slot: bool = False,
) -> Array:
    """`gather_call`, run at once: its destination."""
    call, out = gather_call(
        operation, pool, block_table, length, layout=layout, scale=scale, out=out, format=format, by_slot=by_slot
    )
    call.run()
    return out


def gather_call(
    operation: str,
    pool: Array,
    block_table: Array,
    length: int,
    *,
    layout: str,
    scale: Array | None = None,
    out: Array | None = None,
    format: GroupFormat | None = None,
    by_slot: bool = False,
) -> tuple[PlannedCall, Any]:
    """(a checked call of `gather_paged` under the name that errors give, its destination).

    `format` is that of a pool of groups, whose scales are `scale`. With `by_slot` the table names the slot of each
    token, and a token with a negative slot stays as it is in `out`. Without a scale bits are copied, of int8 too.
    """
    live = runtime_of(pool, out, block_table)
    index_name = "slot_mapping" if by_slot else "block_table"
    block_table = index_array(block_table, index_name, operation)
    checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS))
    length = checks.integer(length, "length", operation)
    source, table = view(pool, "pool", operation), view(block_table, index_name, operation)
    axes = pool_axes(source, layout)
    shape = pool_shape(source, axes, "pool", operation, format)
    checks.readable(source, "pool", operation)
    checks.indices(table, index_name, operation)
    checks.rank(table, (1,), index_name, "(T,)" if by_slot else "(blocks,)", operation)
    blocks = -(-length // shape.page) if shape.page else length
    if by_slot:
        check_slots(table, shape, live, operation, unique=False)
    elif length and (shape.page == 0 or blocks > table.shape[0]):
        raise PositionError(
            f"{operation}: length={length} takes {blocks} blocks of {shape.page}, and block_table has "
            f"{table.shape[0]}. Read at most {table.shape[0] * shape.page} tokens."
        )
    named = [("pool", source, False), (index_name, table, False)]
    row, scaled = format or format_of(source.dtype), scale is not None
    found_scales = row is not None and row.finds_scales
    if (found_scales and not scaled and not by_slot) or (scaled and row is None):
        needed = "an int8 pool needs its (N, bs, H) scale" if found_scales else f"a pool of {source.dtype} has no scale"
        raise DTypeError(f"{operation}: pool is {describe(source)}; {needed}.")
    if scaled:
        scale = scale_given(scale, live, "scale", operation)
        scales = view(scale, "scale", operation)
        checks.readable(scales, "scale", operation)
        if not found_scales:
            check_fixed_scale(scales, shape.heads, "scale", operation)
        else:
            pool_scale(scales, shape, "scale", operation, format)
        named.append(("scale", scales, False))
    wanted_shape = (length, shape.heads, shape.width)
    has_out = out is not None
    if has_out:
        target = view(out, "out", operation)
        if target.shape != wanted_shape:
            raise ShapeError(f"{operation}: out is {describe(target)} where (length, H, D) = {wanted_shape} is needed.")
        checks.writable(target, "out", operation)
        if not scaled:
            checks.convertible(source, target, "pool", "out", operation)
        elif target.dtype not in dtypes.QUANTIZABLE:
            raise DTypeError(
                f"{operation}: out is {describe(target)}; {source.dtype} is read as float32, float16 or bfloat16."
            )
    checks.on_device([(name, a) for name, a, _ in named] + ([("out", target)] if has_out else []), live, operation)
    entries = None if by_slot else host_indices(table, live)
    if entries is not None:
        check_blocks(entries[:blocks], shape.blocks, "block_table", operation)
    if not has_out:
        dtype = dtypes.float32 if scaled else source.dtype
        target = new_array(wanted_shape, dtype, live, zeroed=entries is None)  # the kernel may leave rows out
        out = CacheArray(target, live)
    named.append(("out", target, True))

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        source, table, target = arrays[0], arrays[1], arrays[-1]
        bound = bind_copy(
            live,
            operation,
            src=[pool_rows(source, axes, format)._replace(scale=_scale_of(arrays[2] if scaled else None))],
            dst=[Rows(target, token=target.strides[0], head=target.strides[1])],
            widths=[shape.width],
            heads=shape.heads,
            tokens=length,
            src_place=Placement(
                "slots" if by_slot else "table",
                shape.page,
                table,
                step=table.strides[0],
                limit=shape.slots if by_slot else shape.blocks,
            ),
        )
        return [bound]

    names, arrays, written = zip(*named, strict=True)
    plan = Plan(live, operation, names, written, bind if math.prod(wanted_shape) else None)
    return PlannedCall(plan, arrays, (pool, block_table, scale, out)), out
