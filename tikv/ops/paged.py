"""Page pools: slot-mapped writes, gathers, and blocks moved within and between pools.

A pool is one array a stream whose first axis counts blocks. Where a row lies in a block is a matter of axes: `LAYOUTS`
names them, and strides do the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, CacheArray, StagedNdarray, as_numpy, describe, new_array, read_host, view, view_all
from tikv.errors import DTypeError, PositionError, ShapeError
from tikv.ops import checks, quantize
from tikv.ops.row_copy import CopyCall, End, Placement, bind_copy, keep_plan

# Axes of K's and V's pool: N blocks, S slots of a block, H heads, D elements; C and X are a row's chunks of 16 bytes.
LAYOUTS = {"NHD": ("NSHD", "NSHD"), "HND": ("NHSD", "NHSD"), "VLLM": ("NHCSX", "NHDS")}
CHUNK_BYTES = 16


class PoolShape(NamedTuple):
    """What the shape of a pool says: blocks, slots of a block, heads, elements of a row."""

    blocks: int
    page: int
    heads: int
    width: int

    @property
    def slots(self) -> int:
        """Slots of all blocks."""
        return self.blocks * self.page


def pool_axes(pool: ArrayView, layout: str) -> str:
    """The axes of a pool that may be K's or V's: in vLLM's layout the number of axes tells."""
    k, v = LAYOUTS[layout]
    return k if pool.ndim == len(k) else v


def pool_shape(pool: ArrayView, axes: str, name: str, operation: str) -> PoolShape:
    """Read a pool's shape by its axes.

    Raises:
        ShapeError: it has other axes, or vLLM's chunks are not of 16 bytes.
    """
    spelled = {"C": "D/x", "X": "x", "S": "bs"}
    shape = f"({', '.join(spelled.get(a, a) for a in axes)})"
    checks.rank(pool, (len(axes),), name, shape, operation)
    extent = dict(zip(axes, pool.shape, strict=True))
    if "X" in extent and extent["X"] != CHUNK_BYTES // pool.dtype.itemsize:
        raise ShapeError(
            f"{operation}: {name} is {describe(pool)}: its last axis x is {extent['X']} where {CHUNK_BYTES} bytes are "
            f"{CHUNK_BYTES // pool.dtype.itemsize} elements. Shape it {shape}."
        )
    width = extent["D"] if "D" in extent else extent["C"] * extent["X"]
    return PoolShape(extent["N"], extent["S"], extent["H"], width)


def pool_end(pool: ArrayView, axes: str) -> End:
    """Where the rows of a pool lie."""
    stride = dict(zip(axes, pool.strides, strict=True))
    inner = (0, 0)
    if "X" in stride:
        inner = (pool.shape[axes.index("X")], stride["C"])
    elif axes[-1] != "D":
        inner = (1, stride["D"])
    return End(pool, block=stride["N"], step=stride["S"], head=stride["H"], inner=inner)


def pool_scale(scale: ArrayView, shape: PoolShape, name: str, operation: str) -> None:
    """The scales of an int8 pool are (N, bs, H), float16 or float32, and their slots follow one another.

    Raises:
        DTypeError: they have another dtype.
        ShapeError: they have another shape, or gaps between blocks.
    """
    if scale.dtype not in quantize.SCALES:
        raise DTypeError(f"{operation}: {name} is {describe(scale)}; int8 scales are float16 or float32.")
    wanted = (shape.blocks, shape.page, shape.heads)
    if scale.shape != wanted:
        raise ShapeError(
            f"{operation}: {name} is {describe(scale)} where (N, bs, H) = {wanted} is needed, one for a slot and head."
        )
    if shape.blocks > 1 and shape.page > 1 and scale.strides[0] != shape.page * scale.strides[1]:
        raise ShapeError(
            f"{operation}: {name} has gaps between its blocks (strides {scale.strides} elements). Pass it contiguous."
        )


def index_array(values: Any) -> Any:
    """An index argument as an array: a list or tuple of integers becomes one, anything else is left as it is."""
    if isinstance(values, list | tuple | range):
        try:
            found = np.asarray(values)
        except ValueError as error:
            raise ShapeError(f"an index argument is a list that is no array: {error}. Pass equal rows.") from error
        return found.astype(np.int64) if found.size == 0 else found
    return values


def values_known(index: ArrayView, live: runtime.Runtime) -> bool:
    """Whether the values of an index array are known: on the host, or anywhere in debug mode."""
    return index.device == "cpu" or live.debug or getattr(index.owner, "on_host", None) is not None


def host_indices(index: ArrayView, live: runtime.Runtime) -> np.ndarray[Any, Any] | None:
    """The values of an index array, if they are known; None when only the device knows them."""
    if index.owner is not None and (known := getattr(index.owner, "on_host", None)) is not None:
        if isinstance(known, np.ndarray):
            return known
        index = known
    if index.device == "cpu":
        return as_numpy(index)
    return read_host(index, live) if live.debug else None


def check_slots(index: ArrayView, shape: PoolShape, live: runtime.Runtime, operation: str) -> None:
    """Of slots whose values are known none lies beyond the pool; in debug mode, no two tokens go to one slot.

    Raises:
        PositionError: one does, or two do.
    """
    name, slots = "slot_mapping", host_indices(index, live)
    if slots is None or slots.size == 0:
        return
    if int(slots.max()) >= shape.slots:
        token = int(np.argmax(slots >= shape.slots))
        raise PositionError(
            f"{operation}: {name}[{token}]={int(slots[token])} is beyond the pool of {shape.slots} slots "
            f"({shape.blocks} blocks of {shape.page}). Use a slot below that, or a negative one to skip the token."
        )
    if live.debug:
        _unique(slots[slots >= 0], name, operation)


def _unique(targets: np.ndarray[Any, Any], name: str, operation: str) -> None:
    found, counts = np.unique(targets, return_counts=True)
    if found.size != targets.size:
        twice = int(found[np.argmax(counts > 1)])
        raise PositionError(
            f"{operation}: {name} names destination {twice} more than once, and which row stays is undefined. Keep one."
        )


def write_slots(
    k: Any,
    v: Any,
    k_pool: Any,
    v_pool: Any,
    slot_mapping: Any,
    *,
    layout: str = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Write new keys and values into page pools, token ``t`` to slot ``slot_mapping[t]``, in place, in one launch.

    A slot is ``block * bs + offset``. A negative slot skips its token.

    Args:
        k, v: (T, H, D) and (T, H, D_v), of one dtype; any strides with a contiguous last axis.
        k_pool, v_pool: "NHD" (N, bs, H, D); "HND" (N, H, bs, D); "VLLM" K (N, H, D/x, bs, x) and V (N, H, D, bs) with x
            elements in 16 bytes. Dtypes as in `copy`; or int8 for float32, float16 and bfloat16 rows.
        slot_mapping: (T,) int32 or int64, on the host or the device.
        layout: "NHD", "HND" or "VLLM".
        k_scale, v_scale: (N, bs, H) float16 or float32, of one dtype: written, for int8 pools and for no other.

    Raises:
        PositionError: a slot on the host is beyond the pool. One that only the device knows is skipped; with
            ``tikv.init(debug=True)`` it is read back and raises. So do two tokens for one slot, in debug mode only:
            otherwise either may stay.
        ShapeError, DTypeError, OptionError: arrays that do not agree, a pool without its scales, an unknown layout.

    Exactness: bit-exact for equal dtypes; a narrowing rounds to nearest even; int8 as in `quantize`.
    Cost: each element is read once and written once; one launch.
    Source: ``int8_kv_append_paged`` and ``split_qkv_norm_rope_into_paged_cache`` without norm and rotation.

    Example:
        >>> import numpy as np, tikv
        >>> k_pool, v_pool = np.zeros((2, 3, 2, 1, 1), np.float32)
        >>> k = v = np.ones((2, 1, 1), np.float32)
        >>> tikv.write_slots(k, v, k_pool, v_pool, np.array([3, -1]))
        >>> k_pool.ravel().tolist()
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    """
    operation = "write_slots"
    live = runtime.current()
    given: tuple[Any, ...] = (k, k_pool, v, v_pool, index_array(slot_mapping))
    if k_scale is not None or v_scale is not None:
        _both_scales(k_scale, v_scale, operation)
        given = (*given, k_scale, v_scale)
    arrays = view_all(given, _SLOT_NAMES[: len(given)], operation)
    key = (operation, layout, arrays.key)
    found = live.plans.get(key)
    if found is None:
        found = keep_plan(live, key, plan_write_slots(live, operation, arrays, layout))
    check_slots(arrays[4], found.shape, live, operation)
    found.call.run(operation, arrays)


class SlotPlan(NamedTuple):
    """A checked slot-mapped write: its launch, and the pools that slots are checked against."""

    call: CopyCall
    shape: PoolShape

    def again(
        self, live: runtime.Runtime, operation: str, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]
    ) -> tuple[None, tuple[int, ...]]:
        """Check the slots, if the host knows them; as `ops.WritePlan.again`, without entries."""
        check_slots(arrays["slot_mapping"], self.shape, live, operation)
        return None, ()


_SLOT_NAMES = ("k", "k_pool", "v", "v_pool", "slot_mapping", "k_scale", "v_scale")
_SLOT_WRITTEN = (False, True, False, True, False, True, True)


def _both_scales(k_scale: Any, v_scale: Any, operation: str) -> None:
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            raise ShapeError(f"{operation}: {name} is missing. An int8 pool needs its (N, bs, H) scales; pass both.")


def plan_write_slots(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], layout: str) -> SlotPlan:
    """Check everything but the slots, which may change from call to call."""
    checks.option(layout, "layout", operation, tuple(LAYOUTS))
    names, written = _SLOT_NAMES[: len(arrays)], _SLOT_WRITTEN[: len(arrays)]
    checks.on_device(list(zip(names, arrays, strict=True)), live, operation)
    k, k_pool, v, v_pool, index = arrays[:5]
    tokens, heads = rows_shape(k, v, operation)
    shapes = []
    for stream, (rows, pool, name) in enumerate(((k, k_pool, "k"), (v, v_pool, "v"))):
        axes = LAYOUTS[layout][stream]
        checks.writable(pool, f"{name}_pool", operation)
        shape = pool_shape(pool, axes, f"{name}_pool", operation)
        detail = f"{name}: {describe(rows)}, {name}_pool: {describe(pool)}, layout {layout}"
        checks.extent(shape.heads, heads, f"the number of heads of {name}_pool", operation, detail)
        checks.extent(shape.width, rows.shape[2], f"the head width of {name}_pool", operation, detail)
        shapes.append(shape)
    checks.same_dtype(k_pool, v_pool, "k_pool", "v_pool", operation)
    detail = f"k_pool: {describe(k_pool)}, v_pool: {describe(v_pool)}"
    checks.extent(shapes[1].blocks, shapes[0].blocks, "the number of blocks of v_pool", operation, detail)
    checks.extent(shapes[1].page, shapes[0].page, "the block size of v_pool", operation, detail)
    shape, scales = shapes[0], arrays[5:]
    if k_pool.dtype is dtypes.int8:
        if k.dtype not in quantize.FROM:
            raise DTypeError(f"{operation}: cannot quantise k: {describe(k)}. Pass float32, float16 or bfloat16 rows.")
        if not scales:
            _both_scales(None, None, operation)
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            checks.writable(scale, name, operation)
            pool_scale(scale, shape, name, operation)
        checks.same_dtype(scales[0], scales[1], "k_scale", "v_scale", operation)
        if scale_step(scales[0]) != scale_step(scales[1]):
            raise ShapeError(
                f"{operation}: k_scale and v_scale have different strides ({scales[0].strides} and {scales[1].strides} "
                f"elements). Pass two contiguous arrays."
            )
    elif scales:
        raise DTypeError(f"{operation}: k_pool is {describe(k_pool)}; only int8 pools have scales. Leave them out.")
    else:
        checks.convertible(k, k_pool, "k", "k_pool", operation)
    checks.indices(index, "slot_mapping", operation)
    checks.rank(index, (1,), "slot_mapping", "(T,)", operation)
    checks.extent(
        index.shape[0],
        tokens,
        "the length of slot_mapping",
        operation,
        f"k: {describe(k)}, slot_mapping: {describe(index)}",
    )
    streams = [i for i in (0, 1) if shapes[i].width]

    def bind(arrays: Sequence[ArrayView]) -> launch.Bound:
        rows, pools, scales = arrays[0:4:2], arrays[1:4:2], arrays[5:]
        return bind_copy(
            live,
            operation,
            src=[End(rows[i], step=rows[i].strides[0], head=rows[i].strides[1]) for i in streams],
            dst=[pool_end(pools[i], LAYOUTS[layout][i]) for i in streams],
            widths=[shapes[i].width for i in streams],
            heads=heads,
            tokens=tokens,
            dst_place=Placement("slots", shape.page),
            index=arrays[4],
            index_step=arrays[4].strides[0],
            dst_limit=shape.slots,
            **scale_arguments([scales[i] for i in streams] if scales else []),
        )

    nothing = tokens == 0 or heads == 0 or shape.slots == 0 or not streams
    chosen: list[int] = []
    if not nothing:
        first, last = streams[0], streams[-1]
        chosen = [2 * first, 2 * first + 1, 2 * last, 2 * last + 1, 4]
        chosen += [5 + first, 5 + last] if scales else [4, 4]
    return SlotPlan(CopyCall(live, names, written, None if nothing else bind, chosen), shape)


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


def scale_arguments(scales: Sequence[ArrayView]) -> dict[str, Any]:
    """What `bind_copy` needs of the scales of pools: (N, bs, H) each, checked by `pool_scale`; nothing without."""
    if not scales:
        return {}
    return {
        "scales": scales,
        "scale": scales[0].dtype,
        "scale_step": scale_step(scales[0]),
        "scale_head": scales[0].strides[2],
    }


def scale_step(scale: ArrayView) -> int:
    """Elements between the scales of neighbouring slots; the stride of an axis of one says nothing."""
    return scale.strides[0] if scale.shape[1] == 1 else scale.strides[1]


def gather_paged(
    pool: Any, block_table: Any, length: int, *, layout: str = "NHD", scale: Any = None, out: Any = None
) -> Any:
    """Copy a sequence out of a page pool into consecutive rows, in one launch.

    Token ``t`` is slot ``t % bs`` of block ``block_table[t // bs]``.

    Args:
        pool: K's or V's, as in `write_slots`; in "VLLM" one with five axes holds K, with four V.
        block_table: (at least ceil(length / bs),) int32 or int64, on the host or the device; the rest is not looked at.
        length: tokens to read.
        layout: "NHD", "HND" or "VLLM".
        scale: (N, bs, H), for an int8 pool and for no other.
        out: (length, H, D), of the pool's dtype or one that `copy` converts it to; for an int8 pool float32, float16 or
            bfloat16.

    Returns:
        ``out``; or a new `CacheArray` on the device, (length, H, D) of the pool's dtype, float32 for an int8 pool.

    Raises:
        PositionError: the table is too short, or a block of it, on the host, is not in the pool. Tokens of a block that
            only the device knows to be outside are left as they are in ``out`` and are zero in a new array; with
            ``tikv.init(debug=True)`` they raise.
        ShapeError, DTypeError, OptionError: as `write_slots`.

    Exactness: as `write_slots`; int8 gives ``q * scale``, rounded once.
    Cost: each element is read once and written once; one launch.
    Source: the paged caches' tests, which compare pages with a contiguous cache.

    Example:
        >>> import numpy as np, tikv
        >>> pool = np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> tikv.gather_paged(pool, np.array([2, 0]), 3).copy_to_host().ravel().tolist()
        [4.0, 5.0, 0.0]
    """
    operation = "gather_paged"
    live = runtime.current()
    block_table = index_array(block_table)
    checks.option(layout, "layout", operation, tuple(LAYOUTS))
    length = checks.integer(length, "length", operation)
    source, table = view(pool, "pool", operation), view(block_table, "block_table", operation)
    axes = pool_axes(source, layout)
    shape = pool_shape(source, axes, "pool", operation)
    checks.readable(source, "pool", operation)
    checks.indices(table, "block_table", operation)
    checks.rank(table, (1,), "block_table", "(blocks,)", operation)
    blocks = -(-length // shape.page) if shape.page else length
    if length and (shape.page == 0 or blocks > table.shape[0]):
        raise PositionError(
            f"{operation}: length={length} is {blocks} blocks of {shape.page}, and block_table has {table.shape[0]}. "
            f"Read at most {table.shape[0] * shape.page} tokens."
        )
    named = [("pool", source, False), ("block_table", table, False)]
    quantised = source.dtype is dtypes.int8
    if quantised != (scale is not None):
        wanted = "an int8 pool needs its (N, bs, H) scale" if quantised else "only an int8 pool has a scale"
        raise DTypeError(f"{operation}: pool is {describe(source)}; {wanted}.")
    scales = []
    if quantised:
        scales = [view(scale, "scale", operation)]
        checks.readable(scales[0], "scale", operation)
        pool_scale(scales[0], shape, "scale", operation)
        named.append(("scale", scales[0], False))
    wanted_shape = (length, shape.heads, shape.width)
    given = out is not None
    if given:
        target = view(out, "out", operation)
        if target.shape != wanted_shape:
            raise ShapeError(f"{operation}: out is {describe(target)} where (length, H, D) = {wanted_shape} is needed.")
        checks.writable(target, "out", operation)
        if not quantised:
            checks.convertible(source, target, "pool", "out", operation)
        elif target.dtype not in quantize.FROM:
            raise DTypeError(f"{operation}: out is {describe(target)}; int8 is read as float32, float16 or bfloat16.")
    checks.on_device([(name, a) for name, a, _ in named] + ([("out", target)] if given else []), live, operation)
    entries = host_indices(table, live)
    if entries is not None:
        _check_blocks(entries[:blocks], shape.blocks, "block_table", operation)
    if not given:
        dtype = dtypes.float32 if quantised else source.dtype
        target = new_array(wanted_shape, dtype, live, zeroed=entries is None)  # the kernel may leave rows out
        out = CacheArray(target, live)
    named.append(("out", target, True))

    def bind(arrays: Sequence[ArrayView]) -> launch.Bound:
        source, table, target = arrays[0], arrays[1], arrays[-1]
        return bind_copy(
            live,
            operation,
            src=[pool_end(source, axes)],
            dst=[End(target, step=target.strides[0], head=target.strides[1])],
            widths=[shape.width],
            heads=shape.heads,
            tokens=length,
            src_place=Placement("table", shape.page),
            index=table,
            index_step=table.strides[0],
            src_limit=shape.blocks,
            **scale_arguments(arrays[2:-1]),
        )

    names, arrays, written = zip(*named, strict=True)
    CopyCall(live, names, written, bind if math.prod(wanted_shape) else None).run(operation, arrays)
    return out


def _check_blocks(blocks: np.ndarray[Any, Any], limit: int, name: str, operation: str) -> None:
    wrong = (blocks < 0) | (blocks >= limit)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise PositionError(
            f"{operation}: {name}[{at}]={int(blocks[at])} is not one of the pool's {limit} blocks, and the length "
            f"reaches it. Use 0..{limit - 1}."
        )


def copy_blocks(k_pool: Any, v_pool: Any, pairs: Any) -> None:
    """Copy whole blocks within K's and V's pool, in place, in one launch: what copy-on-write and beam search need.

    Args:
        k_pool, v_pool: pools of any layout and dtype with blocks on the first axis and no gaps within a block. The
            scales of int8 pools are pools like these: copy them by a second call.
        pairs: (P, 2) int32 or int64, each a block to copy from and one to copy to, on the host or the device. A pair
            with a negative block is skipped.

    Raises:
        PositionError: a block is not in the pool; one is copied to twice, or copied to and from. On the device such a
            block is skipped, and the other two are not defined; with ``tikv.init(debug=True)`` they raise.
        ShapeError: the pools have different numbers of blocks, overlap, or have gaps within a block.

    Exactness: bit-exact.
    Cost: each block named is read once and written once; one launch.
    Source: the copies behind copy-on-write, which the original left as stubs.

    Example:
        >>> import numpy as np, tikv
        >>> k_pool = np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> v_pool = k_pool.copy()
        >>> tikv.copy_blocks(k_pool, v_pool, np.array([[0, 2]]))
        >>> k_pool.ravel().tolist()
        [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
    """
    operation = "copy_blocks"
    live = runtime.current()
    pairs = index_array(pairs)
    k, v, index = view(k_pool, "k_pool", operation), view(v_pool, "v_pool", operation), _pairs(pairs, operation)
    named = [("k_pool", k, True), ("v_pool", v, True), ("pairs", index, False)]
    checks.on_device([(name, a) for name, a, _ in named], live, operation)
    widths = []
    for name, a, _ in named[:2]:
        _check_writable_pool(a, name, operation)
        widths.append(_block_elements(a, name, operation))
    detail = f"k_pool: {describe(k)}, v_pool: {describe(v)}"
    checks.extent(v.shape[0], k.shape[0], "the number of blocks of v_pool", operation, detail)
    found = host_indices(index, live)
    if found is not None:
        _check_pairs(found, k.shape[0], k.shape[0], True, operation)
    streams = [i for i in (0, 1) if widths[i]]

    def bind(arrays: Sequence[ArrayView]) -> launch.Bound:
        pools = [arrays[i] for i in streams]
        return _bind_blocks(live, operation, pools, pools, [widths[i] for i in streams], arrays[2], "both")

    names, arrays, written = zip(*named, strict=True)
    CopyCall(live, names, written, bind if streams and index.shape[0] else None).run(operation, arrays)


def swap_blocks(src_pool: Any, dst_pool: Any, pairs: Any) -> None:
    """Copy whole blocks of one pool into another; either may lie on the host and the other on the device.

    Args:
        src_pool, dst_pool: pools of one dtype whose blocks have one shape; the numbers of blocks may differ. They may
            be the same array.
        pairs: (P, 2), each a block of ``src_pool`` and one of ``dst_pool``, as in `copy_blocks`.

    Raises:
        PositionError, ShapeError: as `copy_blocks`.
        DTypeError: the pools have different dtypes.

    Exactness: bit-exact.
    Cost: each block named is read once and written once. Between host and device the blocks travel through a compact
        buffer, and only they do; the call then returns when they have arrived.
    Source: ``swap_out`` and ``swap_in``, whose copies the original left as stubs.

    Example:
        >>> import numpy as np, tikv
        >>> device, host = np.arange(4, dtype=np.float32).reshape(2, 2, 1, 1), np.zeros((1, 2, 1, 1), np.float32)
        >>> tikv.swap_blocks(device, host, [(1, 0)])
        >>> host.ravel().tolist()
        [2.0, 3.0]
    """
    operation = "swap_blocks"
    live = runtime.current()
    pairs = index_array(pairs)
    src, dst, index = (
        view(src_pool, "src_pool", operation),
        view(dst_pool, "dst_pool", operation),
        _pairs(pairs, operation),
    )
    checks.on_device([("src_pool", src), ("dst_pool", dst), ("pairs", index)], live, operation)
    checks.same_dtype(src, dst, "src_pool", "dst_pool", operation)
    _check_writable_pool(dst, "dst_pool", operation)
    width = _block_elements(src, "src_pool", operation)
    _block_elements(dst, "dst_pool", operation)
    if src.shape[1:] != dst.shape[1:] or _inner(src) != _inner(dst):
        raise ShapeError(
            f"{operation}: the blocks of src_pool ({describe(src)}, strides {src.strides}) and dst_pool "
            f"({describe(dst)}, strides {dst.strides}) differ. Pass pools whose blocks are laid out alike."
        )
    within = src.ptr == dst.ptr and src.handle is dst.handle and src.offset == dst.offset
    within = within and (src.shape, src.strides) == (dst.shape, dst.strides)
    crossing = not live.is_cpu and "cpu" in (src.device, dst.device)
    found = read_host(index, live) if crossing and index.device != "cpu" else host_indices(index, live)
    if found is not None:
        _check_pairs(found, src.shape[0], dst.shape[0], within, operation)
    if width == 0 or index.shape[0] == 0:
        return
    if not crossing:
        names: tuple[str, ...] = ("src_pool", "dst_pool", "pairs")
        arrays: tuple[ArrayView, ...] = (src, dst, index)
        if within:
            names, arrays = ("src_pool", "pairs"), (src, index)
        written = [name == names[-2] for name in names]

        def bind(arrays: Sequence[ArrayView]) -> launch.Bound:
            return _bind_blocks(live, operation, [arrays[0]], [arrays[-2]], [width], arrays[-1], "both")

        CopyCall(live, names, written, bind).run(operation, arrays)
        return
    if not within:
        checks.disjoint((("src_pool", src, False), ("dst_pool", dst, True)), operation)
    assert found is not None
    kept = found[np.all(found >= 0, axis=1)].astype(np.int64)
    if len(kept):
        _cross(live, operation, src, dst, np.ascontiguousarray(kept[:, 0]), np.ascontiguousarray(kept[:, 1]), width)


def _cross(
    live: runtime.Runtime,
    operation: str,
    src: ArrayView,
    dst: ArrayView,
    sources: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    width: int,
) -> None:
    """Move blocks between host and device: gathered, brought over in one piece, scattered."""
    count = len(sources)
    if src.device == "cpu":
        rows = _host_blocks(src, width)[sources]
    else:
        packed = new_array((count, width), src.dtype, live)
        CopyCall(
            live,
            ("src_pool", "blocks", "pairs"),
            (False, True, False),
            lambda a: _bind_blocks(live, operation, [a[0]], [a[1]], [width], a[2], "src"),
        ).run(operation, (src, packed, view(sources, "pairs", operation)))
        rows = read_host(packed, live)
    if dst.device == "cpu":
        _host_blocks(dst, width)[targets] = rows
        if isinstance(dst.owner, StagedNdarray):
            dst.owner.write_back()
        return
    CopyCall(
        live,
        ("src_pool", "dst_pool", "pairs"),
        (False, True, False),
        lambda a: _bind_blocks(live, operation, [a[0]], [a[1]], [width], a[2], "dst"),
    ).run(operation, (view(rows, "src_pool", operation), dst, view(targets, "pairs", operation)))
    live.synchronize()  # the host's rows must outlive the launch


def _host_blocks(pool: ArrayView, width: int) -> np.ndarray[Any, Any]:
    """A host pool as (N, elements of a block)."""
    return as_numpy(pool.moved((pool.shape[0], width), (pool.strides[0], 1)))


def _bind_blocks(
    live: runtime.Runtime,
    operation: str,
    src: Sequence[ArrayView],
    dst: Sequence[ArrayView],
    widths: Sequence[int],
    index: ArrayView,
    indexed: str,
) -> launch.Bound:
    """Bind the copy of blocks: a block is one row. `indexed` says which end the index array names blocks of."""
    both = indexed == "both"
    which: dict[str, Any] = {"index_step": index.strides[0]}
    if indexed in ("both", "src"):
        which["src_limit"] = src[0].shape[0]
    if indexed in ("both", "dst"):
        which["dst_limit"] = dst[0].shape[0]
    if both:
        which["dst_index"] = index.strides[1]
    slots, linear = Placement("slots"), Placement("linear")
    return bind_copy(
        live,
        operation,
        src=[End(a, step=a.strides[0]) for a in src],
        dst=[End(a, step=a.strides[0]) for a in dst],
        widths=widths,
        heads=1,
        tokens=index.shape[0],
        src_place=slots if both or indexed == "src" else linear,
        dst_place=slots if both or indexed == "dst" else linear,
        index=index,
        **which,
    )


def _pairs(pairs: Any, operation: str) -> ArrayView:
    index = view(pairs, "pairs", operation)
    if index.shape == (0,):
        index = index.moved((0, 2), (2, 1))
    checks.indices(index, "pairs", operation)
    if index.ndim != 2 or index.shape[1] != 2:
        raise ShapeError(f"{operation}: pairs is {describe(index)} where (P, 2) is needed: a block from, a block to.")
    return index


def _check_pairs(pairs: np.ndarray[Any, Any], sources: int, targets: int, within: bool, operation: str) -> None:
    """Blocks exist; none is a destination twice, or of one pair a source and of another a destination.

    Raises:
        PositionError: otherwise.
    """
    for column, limit, what in ((0, sources, "from"), (1, targets, "to")):
        wrong = pairs[:, column] >= limit
        if wrong.any():
            at = int(np.argmax(wrong))
            raise PositionError(
                f"{operation}: pairs[{at}] copies {what} block {int(pairs[at, column])}, and the pool has {limit} "
                f"blocks. Use 0..{limit - 1}, or a negative number to skip the pair."
            )
    used = pairs[np.all(pairs >= 0, axis=1)]
    _unique(used[:, 1], "pairs", operation)
    moving = used[used[:, 0] != used[:, 1]]
    both = np.intersect1d(moving[:, 0], moving[:, 1])
    if within and both.size:
        raise PositionError(
            f"{operation}: block {int(both[0])} is copied from by one pair and to by another. Make two calls."
        )


def _check_writable_pool(pool: ArrayView, name: str, operation: str) -> None:
    if not pool.writable:
        raise ShapeError(f"{operation}: the destination {name} ({describe(pool)}) is read-only. Pass a writable array.")


def _inner(pool: ArrayView) -> list[int]:
    """The strides that matter within a block."""
    return [s for s, n in zip(pool.strides[1:], pool.shape[1:], strict=True) if n > 1]


def _block_elements(pool: ArrayView, name: str, operation: str) -> int:
    """Elements of a block, which lie side by side in memory whatever the order of the axes.

    Raises:
        ShapeError: there are gaps within a block, or blocks overlap.
    """
    if pool.ndim < 2:
        raise ShapeError(
            f"{operation}: {name} is {describe(pool)}; a pool has blocks on its first axis and rows behind."
        )
    expected = 1
    for stride, extent in sorted(zip(pool.strides[1:], pool.shape[1:], strict=True)):
        if extent == 0:
            return 0
        if extent > 1:
            if stride != expected:
                raise ShapeError(
                    f"{operation}: the blocks of {name} ({describe(pool)}, strides {pool.strides} elements) have gaps. "
                    f"Pass a pool whose blocks are contiguous."
                )
            expected *= extent
    if pool.shape[0] > 1 and pool.strides[0] < expected:
        raise ShapeError(
            f"{operation}: the blocks of {name} ({describe(pool)}, strides {pool.strides} elements) overlap."
        )
    return expected
