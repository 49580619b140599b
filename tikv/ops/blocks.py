"""Whole blocks moved within a pool and between pools, on the device or between device and host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tikv import runtime
from tikv.arrays import (
    Array,
    ArrayView,
    StagedNdarray,
    as_numpy,
    describe,
    new_array,
    read_host,
    runtime_of,
    view,
    view_bits,
)
from tikv.errors import PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.indices import check_unique, host_indices, index_array
from tikv.ops.layouts import LINEAR, Placement, Rows
from tikv.ops.plan import Launch, Plan, PlannedCall
from tikv.ops.row_copy import bind_copy


def copy_blocks(k_pool: Array, v_pool: Array, pairs: Array) -> None:
    """Copy whole blocks within the pools of K and V, in place, in one launch: for copy-on-write and beam search.

    Args:
        k_pool, v_pool: pools of any layout and dtype, unsigned bytes too, with blocks on the first axis and no gaps
            within a block. The scales of int8 pools are such pools too: copy them with a second call.
        pairs: (P, 2) int32 or int64, on the host or the device; each pair is a source block and a destination block.
            A pair with a negative block is skipped.

    Raises:
        PositionError: a block is outside the pool; or a block is a destination twice, or both source and destination.
            If the pairs are on the device, a block outside the pool is skipped and the result of the other two errors
            is undefined; with ``tikv.init(debug=True)`` all of them raise.
        ShapeError: the pools have different numbers of blocks, overlap, or have gaps within a block.

    Exactness: bit-exact.
    Cost: each block named is read once and written once; one launch.
    Source: the copies that copy-on-write needs, which the source system left as stubs.

    Examples:
        >>> import numpy as np, tikv
        >>> k_pool = np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> v_pool = k_pool.copy()
        >>> tikv.copy_blocks(k_pool, v_pool, np.array([[0, 2]]))
        >>> k_pool.ravel().tolist()
        [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
    """
    blocks_call("copy_blocks", k_pool, v_pool, pairs).run()


def blocks_call(operation: str, k_pool: Array, v_pool: Array, pairs: Array) -> PlannedCall:
    """A checked call of `copy_blocks`, under the operation name that errors give."""
    live = runtime_of(k_pool, v_pool)
    pairs = index_array(pairs, "pairs", operation)
    k, v = (view_bits(a, name, operation) for name, a in (("k_pool", k_pool), ("v_pool", v_pool)))
    index = _pairs(pairs, operation)
    named = [("k_pool", k, True), ("v_pool", v, True), ("pairs", index, False)]
    checks.on_device([(name, a) for name, a, _ in named], live, operation)
    widths = []
    for name, a, _ in named[:2]:
        _check_writable_pool(a, name, operation)
        widths.append(_block_elements(a, name, operation))
    detail = f"k_pool: {describe(k)}, v_pool: {describe(v)}"
    checks.extent(v.shape[0], k.shape[0], "the number of blocks of v_pool", operation, detail)
    host_pairs = host_indices(index, live)
    if host_pairs is not None:
        _check_pairs(host_pairs, k.shape[0], k.shape[0], True, operation)
    streams = [i for i in (0, 1) if widths[i]]

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        pools = [arrays[i] for i in streams]
        return [_bind_blocks(live, operation, pools, pools, [widths[i] for i in streams], arrays[2], "both")]

    names, arrays, written = zip(*named, strict=True)
    plan = Plan(live, operation, names, written, bind if streams and index.shape[0] else None)
    return PlannedCall(plan, arrays, (k_pool, v_pool, pairs))


def swap_blocks(src_pool: Array, dst_pool: Array, pairs: Array) -> None:
    """Copy whole blocks from one pool to another; one of them may be on the host and the other on the device.

    Args:
        src_pool, dst_pool: pools of one dtype whose blocks have one shape; the numbers of blocks may differ. Both may
            be the same array.
        pairs: (P, 2), each a block of ``src_pool`` and one of ``dst_pool``, as in `copy_blocks`.

    Raises:
        PositionError: as in `copy_blocks`.
        ShapeError: the blocks have different shapes or gaps, or two pools that are not the same array overlap.
        DTypeError: the pools have different dtypes.

    Exactness: bit-exact.
    Cost: each block named is read once and written once. Between host and device, only these blocks are transferred,
        through a compact buffer; the call then returns once they have arrived.
    Source: ``swap_out`` and ``swap_in``, whose copies the source system left as stubs.

    Examples:
        >>> import numpy as np, tikv
        >>> device, host = np.arange(4, dtype=np.float32).reshape(2, 2, 1, 1), np.zeros((1, 2, 1, 1), np.float32)
        >>> tikv.swap_blocks(device, host, [(1, 0)])
        >>> host.ravel().tolist()
        [2.0, 3.0]
    """
    operation = "swap_blocks"
    live = runtime_of(dst_pool, src_pool)
    pairs = index_array(pairs, "pairs", operation)
    src, dst, index = (
        view_bits(src_pool, "src_pool", operation),
        view_bits(dst_pool, "dst_pool", operation),
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
            f"({describe(dst)}, strides {dst.strides}) differ. Pass pools whose blocks have the same layout."
        )
    within = src.ptr == dst.ptr and src.handle is dst.handle and src.offset == dst.offset
    within = within and (src.shape, src.strides) == (dst.shape, dst.strides)
    crossing = not live.is_cpu and "cpu" in (src.device, dst.device)
    host_pairs = read_host(index, live) if crossing and index.device != "cpu" else host_indices(index, live)
    if host_pairs is not None:
        _check_pairs(host_pairs, src.shape[0], dst.shape[0], within, operation)
    if width == 0 or index.shape[0] == 0:
        return
    if not crossing:
        names: tuple[str, ...] = ("src_pool", "dst_pool", "pairs")
        arrays: tuple[ArrayView, ...] = (src, dst, index)
        if within:
            names, arrays = ("src_pool", "pairs"), (src, index)
        written = [name == names[-2] for name in names]

        def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
            return [_bind_blocks(live, operation, [arrays[0]], [arrays[-2]], [width], arrays[-1], "both")]

        Plan(live, operation, names, written, bind).run(arrays)
        return
    if not within:
        checks.disjoint((("src_pool", src, False), ("dst_pool", dst, True)), operation)
    assert host_pairs is not None
    valid_pairs = host_pairs[np.all(host_pairs >= 0, axis=1)].astype(np.int64)
    if len(valid_pairs):
        src_blocks, dst_blocks = (np.ascontiguousarray(valid_pairs[:, i]) for i in (0, 1))
        _cross(live, operation, src, dst, src_blocks, dst_blocks, width)


def swap_chosen(src: ArrayView, dst: ArrayView, pairs: ArrayView, live: runtime.Runtime) -> None:
    """`swap_blocks` between pools of one form on the device, with pairs on the device that are known to be valid.

    It does not check that blocks exist and that none is written twice: for thousands that takes longer than the copy.
    """
    operation, width = "swap_blocks", _block_elements(src, "src_pool", "swap_blocks")

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        return [_bind_blocks(live, operation, [arrays[0]], [arrays[1]], [width], arrays[2], "both")]

    if width and pairs.shape[0]:
        Plan(live, operation, ("src_pool", "dst_pool", "pairs"), (False, True, False), bind).run((src, dst, pairs))


def _cross(
    live: runtime.Runtime,
    operation: str,
    src: ArrayView,
    dst: ArrayView,
    sources: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    width: int,
) -> None:
    """Move blocks between host and device: gather them, transfer them in one piece, scatter them."""
    count = len(sources)
    if src.device == "cpu":
        rows = _host_blocks(src, width)[sources]
    else:
        packed = new_array((count, width), src.dtype, live)
        Plan(
            live,
            operation,
            ("src_pool", "blocks", "pairs"),
            (False, True, False),
            lambda a: [_bind_blocks(live, operation, [a[0]], [a[1]], [width], a[2], "src")],
        ).run((src, packed, view(sources, "pairs", operation)))
        rows = read_host(packed, live)
    if dst.device == "cpu":
        _host_blocks(dst, width)[targets] = rows
        if isinstance(dst.owner, StagedNdarray):
            dst.owner.write_back()
        return
    Plan(
        live,
        operation,
        ("src_pool", "dst_pool", "pairs"),
        (False, True, False),
        lambda a: [_bind_blocks(live, operation, [a[0]], [a[1]], [width], a[2], "dst")],
    ).run((view(rows, "src_pool", operation), dst, view(targets, "pairs", operation)))
    live.synchronize()  # the host's rows must outlive the launch


def _host_blocks(pool: ArrayView, width: int) -> np.ndarray[Any, Any]:
    """A host pool as (N, elements of a block)."""
    return as_numpy(pool.restrided((pool.shape[0], width), (pool.strides[0], 1)))


def _bind_blocks(
    live: runtime.Runtime,
    operation: str,
    src: Sequence[ArrayView],
    dst: Sequence[ArrayView],
    widths: Sequence[int],
    index: ArrayView,
    indexed: str,
) -> Launch:
    """Bind the copy of blocks, where a block is one row. `indexed` says whose blocks the index array names."""
    slots, both = Placement("slots", array=index, step=index.strides[0]), indexed == "both"
    of_src, of_dst = (slots._replace(limit=ends[0].shape[0]) for ends in (src, dst))
    return bind_copy(
        live,
        operation,
        src=[Rows(a, token=a.strides[0]) for a in src],
        dst=[Rows(a, token=a.strides[0]) for a in dst],
        widths=widths,
        heads=1,
        tokens=index.shape[0],
        src_place=LINEAR if indexed == "dst" else of_src,
        dst_place=LINEAR if indexed == "src" else of_dst._replace(first=index.strides[1] if both else 0),
    )


def _pairs(pairs: Array, operation: str) -> ArrayView:
    index = view(pairs, "pairs", operation)
    if index.shape == (0,):
        index = index.restrided((0, 2), (2, 1))
    checks.indices(index, "pairs", operation)
    if index.ndim != 2 or index.shape[1] != 2:
        raise ShapeError(
            f"{operation}: pairs is {describe(index)} where (P, 2) is needed: a source block and a destination "
            "block in each row."
        )
    return index


def _check_pairs(pairs: np.ndarray[Any, Any], sources: int, targets: int, within: bool, operation: str) -> None:
    """Check that blocks exist, and that none is a destination twice, or both a source and a destination.

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
    check_unique(used[:, 1], "pairs", operation)
    if not within:
        return
    moving = used[used[:, 0] != used[:, 1]]
    both = np.intersect1d(moving[:, 0], moving[:, 1])
    if both.size:
        raise PositionError(
            f"{operation}: block {int(both[0])} is the source of one pair and the destination of another. Make two "
            "calls."
        )


def _check_writable_pool(pool: ArrayView, name: str, operation: str) -> None:
    if not pool.writable:
        raise ShapeError(f"{operation}: the destination {name} ({describe(pool)}) is read-only. Pass a writable array.")


def _inner(pool: ArrayView) -> list[int]:
    """The strides that matter within a block."""
    return [s for s, n in zip(pool.strides[1:], pool.shape[1:], strict=True) if n > 1]


def _block_elements(pool: ArrayView, name: str, operation: str) -> int:
    """The number of elements in a block, which are contiguous in memory whatever the order of the axes.

    Raises:
        ShapeError: there are gaps within a block, or blocks overlap.
    """
    if pool.ndim < 2:
        raise ShapeError(
            f"{operation}: {name} is {describe(pool)}; a pool has blocks on its first axis and rows after it."
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
            f"{operation}: the blocks of {name} ({describe(pool)}, strides {pool.strides} elements) overlap. Pass a "
            "pool whose blocks lie apart."
        )
    return expected
