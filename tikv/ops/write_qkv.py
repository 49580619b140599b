"""The fused write of a transformer layer: split, normalise, rotate and store Q, K and V in one launch.

`write_qkv` does all of it; `norm_rope` does its transform alone, with the same kernel, so that separate steps give the
same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, describe, handed_over, new_like, runtime_of, view
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import format_of
from tikv.ops import checks
from tikv.ops.indices import check_slots, host_indices, index_array
from tikv.ops.layouts import (
    LINEAR,
    POOL_LAYOUTS,
    Placement,
    PoolShape,
    Rows,
    Scale,
    pool_rows,
    pool_scale,
    pool_shape,
    reduced_position,
    scale_of_slots,
    token_and_head_axes,
)
from tikv.ops.plan import Entries, Launch, Plan
from tikv.ops.quantized_arrays import Quantized
from tikv.ops.rope import UNCHANGED, NormRope, Transform
from tikv.ops.row_copy import alignment, choose_codec, inner_words, scale_entries, strides_in_words, unaligned
from tikv.ops.write_qkv_codes import FusedTarget, write_codes

_REQUIRED = ("qkv", "k_dst", "v_dst", "x")
TABLES = ("cos", "sin", "q_weight", "k_weight")  # the arrays of a NormRope, in the kernel's order
WORKER_BYTES = 1 << 17  # on CPU, the least bytes of rows for a worker: with fewer, one finishes before another wakes


def _rotated_codec(operation: str, style: str, src: Rows, dst: Rows, width: int, rope_dim: int) -> tuple[int, Any]:
    """(units in a row, codec) of a rotated stream: units divide the rotated part, so that they move in pairs.

    On CPU a unit is one element, which LLVM vectorises.
    """
    from tikv.kernels.codec import Codec

    s, d = src.array.dtype, dst.array.dtype
    src_align, dst_align = alignment(src, width), alignment(dst, width)
    for elements in (1,) if style == "cpu" else (4, 2, 1):
        src_word, dst_word = (min(8, elements * t.itemsize) for t in (s, d))
        whole = width % elements == 0 and rope_dim // 2 % elements == 0 and (dst.inner[0] or elements) % elements == 0
        if whole and src_align % src_word == 0 and dst_align % dst_word == 0:
            return width // elements, Codec(s.short, d.short, elements, src_word * 8, dst_word * 8)
    raise unaligned(operation, src, dst)


def _bind(
    live: runtime.Runtime,
    operation: str,
    *,
    streams: Sequence[tuple[Rows, Rows]],
    heads: tuple[int, int],
    tokens: int,
    width: int,
    transform: Transform,
    tables: dict[str, ArrayView],
    dst_place: Placement = LINEAR,
    positions: ArrayView | None = None,
    **params: int,
) -> Launch:
    """Bind the fused write of `tokens` rows: Q, and K and V unless `heads[1]` is 0, each a source and a destination."""
    from tikv.kernels import address, copy
    from tikv.kernels import write_qkv as kernels

    style, (q_heads, kv_heads), index = live.kernel_style, heads, dst_place.array
    scales = [rows.scale for _, rows in streams if rows.scale is not None]
    scale = scales[0].array.dtype.short if scales else ""
    moves, strides = _moves(live, operation, streams, width, transform, scale)
    if kv_heads == 0:
        moves, strides = moves * 3, strides * 3
    q, k, v = moves
    # The vector has K and V first, as in the copy, and then Q.
    of_q = len(strides) // 3
    strides = strides[of_q:] + strides[:of_q]
    moved = tokens * (q_heads + 2 * kv_heads) * width * streams[0][0].array.dtype.itemsize
    iterations, serial = _iterations(live, operation, heads, tokens, width, moved, transform)
    k_end, v_end = (streams[1][1], streams[2][1]) if kv_heads else (streams[0][1], streams[0][1])
    of_k, of_v = inner_words(k_end, k.codec.dst_bits), inner_words(v_end, v.codec.dst_bits)
    choices = tuple(
        kernels.NormRopeChoices(*transform, name in tables) if transform.pairs else kernels.NormRopeChoices()
        for name in ("q_weight", "k_weight")
    )
    kernel = launch.kernel(
        live,
        kernels.make_write_qkv,
        style,
        serial,
        q_heads,
        kv_heads,
        width,
        tuple(moves),
        copy.EndLayout(dst_place.kind, dst_place.page, of_k, of_v),
        choices,
        0 if index is None else index.dtype.itemsize * 8,
        0 if positions is None else positions.dtype.itemsize * 8,
        scale,
    )
    arrays = [rows.array for ends in streams for rows in ends]
    arrays = arrays * 3 if kv_heads == 0 else arrays
    arrays += [tables.get(name, arrays[0]) for name in TABLES]
    rope: dict[str, int] = {"q_units": q.units}
    if transform.pairs:
        rope.update(table_rows=tables["cos"].shape[0])
        rope.update({f"{name}_stride": tables[name].strides[0] for name in ("cos", "sin")})
        rope.update({f"{name}_first": tables[name].offset // 4 for name in TABLES if name in tables})
    if index is not None or positions is not None or scales:
        numbers_of = [scale.array for scale in scales]
        unused = next(a for a in (index, positions, *numbers_of) if a is not None)
        arrays += [unused if a is None else a for a in (index, positions)]
        arrays += numbers_of or [unused, unused]
    if index is not None:
        params.update(dst_index=index.offset // index.dtype.itemsize, index_step=index.strides[0])
    if positions is not None:
        rope.update(positions_first=positions.offset // positions.dtype.itemsize, positions_stride=positions.strides[0])
    params |= scale_entries(scales)
    numbers = address.CopyParams(iterations=iterations, tokens=tokens, k_units=k.units, v_units=v.units, **params)
    return Launch(kernel.bind(iterations, *arrays, tuple(strides), kernels.RopeParams(**rope), numbers), arrays)


def _moves(
    live: runtime.Runtime,
    operation: str,
    streams: Sequence[tuple[Rows, Rows]],
    width: int,
    transform: Transform,
    scale: str,
) -> tuple[list[Any], list[int]]:
    """How each stream is moved, and the strides of its source and destination in words."""
    from tikv.kernels.copy import Stream

    style, moves = live.kernel_style, []
    strides: list[int] = []
    for i, (src, dst) in enumerate(streams):
        if transform.pairs and i < 2:
            units, codec = _rotated_codec(operation, style, src, dst, width, transform.rope_dim)
        else:
            units, codec = choose_codec(operation, style, src, dst, width, scale if i else "")
        moves.append(Stream(units, codec))
        for rows, bits in ((src, codec.src_bits), (dst, codec.dst_bits)):
            checks.addressable(rows.array, bits // 8, live, "qkv"[i], operation)
            strides.extend(strides_in_words(rows, bits // 8))
    return moves, strides


def _iterations(
    live: runtime.Runtime,
    operation: str,
    heads: tuple[int, int],
    tokens: int,
    width: int,
    moved: int,
    transform: Transform,
) -> tuple[int, bool]:
    """(iterations of the loop, whether the calling thread of a CPU does them alone)."""
    from tikv.kernels import lanes
    from tikv.kernels.write_qkv import lanes_of

    q_heads, kv_heads = heads
    # A worker that only copies finishes twice the bytes in the same time.
    workers = max(1, min(live.threads, moved // (WORKER_BYTES if transform.pairs else 2 * WORKER_BYTES)))
    serial = live.is_cpu and workers == 1
    if live.is_cpu:
        most = 2**31 - 1 - workers
        checks.integer(tokens * (3 if kv_heads else 1), "work items (tokens x streams)", operation, high=most)
        iterations = 1 if serial else workers * lanes.LEAST_ITERATIONS
    else:
        iterations = tokens * (q_heads + 2 * kv_heads) * lanes_of(width)
        iterations = -(-iterations // lanes.BLOCK) * lanes.BLOCK
    return checks.integer(iterations, "work items (tokens x heads x lanes)", operation, high=2**31 - 1), serial


class WriteQkvPlan(Plan):
    """A checked fused write, or transform alone.

    Attributes:
        q_shape, q_dtype: the shape and dtype of the result.
        q_is_new: Q, array 1, is allocated in each run and overlaps nothing.
        tokens: the number of rows.
        rope_limit: rows of the tables; 0 if nothing is rotated.
        capacity, window: those of a contiguous cache, if there is one.
        pool: the shape that slots are checked against, if there is a pool.
    """

    q_shape: tuple[int, ...]
    q_dtype: DType
    q_is_new: bool
    tokens: int
    rope_limit: int
    capacity: int | None = None
    window: int | None = None
    pool: PoolShape | None = None
    _apart: list[int] | None = None  # the addresses of the arrays except Q that were last found to share nothing

    def check_overlaps(self, arrays: Sequence[ArrayView]) -> None:
        """As `Plan.check_overlaps`, except that a new Q is not checked."""
        if not self.q_is_new:
            super().check_overlaps(arrays)
            return
        pointers = [a.ptr for i, a in enumerate(arrays) if i != 1]
        if pointers != self._apart or 0 in pointers:
            named = list(zip(self.names, arrays, self.written, strict=True))
            checks.disjoint([*named[:1], *named[2:]], self.operation)
            self._apart = pointers

    def revalidate(self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]) -> tuple[None, Entries]:
        """Check positions and slots, as far as the host knows them."""
        operation, start, rope = self.operation, 0, 0
        position = numbers.get("position")
        if self.pool is None and position is not None:
            start = rope = checks.integer(position, "position", operation)
            if self.window is not None:
                checks.integer(position + self.tokens, "position + tokens", operation)
                start = reduced_position(start, 0, self.window)
            elif self.capacity is not None:
                checks.fits_linear(start, self.tokens, self.capacity, operation)
        elif self.pool is not None:
            check_slots(arrays["slot_mapping"], self.pool, self.live, operation)
        if self.rope_limit and "rope_positions" in arrays:
            rope, rows = 0, host_indices(arrays["rope_positions"], self.live)
            if rows is not None and rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.rope_limit:
                token = int(np.argmax((rows < 0) | (rows >= self.rope_limit)))
                raise PositionError(
                    f"{operation}: rope_positions[{token}]={int(rows[token])} is outside the tables of "
                    f"{self.rope_limit} positions. Pass longer cos and sin."
                )
        elif self.rope_limit and rope + self.tokens > self.rope_limit:
            raise PositionError(
                f"{operation}: position={rope} + {self.tokens} tokens exceed the {self.rope_limit} positions of the "
                f"tables. Pass longer cos and sin, or rope_positions."
            )
        return None, {"src_position": rope, "dst_position": start}


def write_qkv(
    qkv: Array,
    k_dst: Array,
    v_dst: Array,
    *,
    num_q_heads: int,
    norm_rope: NormRope | None = None,
    position: int | None = None,
    window: int | None = None,
    slot_mapping: Array | None = None,
    rope_positions: Array | None = None,
    layout: str = "head_major",
    q_layout: str = "token_major",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    out: Array | None = None,
) -> Array:
    """Split the rows of a fused projection, normalise and rotate Q and K, store K and V, return Q: one launch.

    With ``position``, K and V go to contiguous caches, linear or sliding, as in `copy`; with ``slot_mapping``, to page
    pools, as in `write_slots`. Rows of many sequences may follow one another, each row with its own slot and rope
    position. V is copied unchanged.

    Args:
        qkv: (T, (Hq + 2H) * D) float32, float16 or bfloat16, of any row stride; a row is [Hq of Q | H of K | H of V].
        k_dst, v_dst: caches (H, capacity, D) or (capacity, H, D), or pools as in `write_slots`; of the dtype of
            ``qkv``, or of one that `copy` converts it to, or int8; or both a `Quantized`, in "NHD" if they are pools.
        num_q_heads: Hq; H is taken from the destinations.
        norm_rope: the transform of Q and K; None leaves them unchanged.
        position: absolute position of row 0 in a contiguous cache; row ``t`` goes to ``position + t``.
        window: slots of a sliding cache; None for a linear cache.
        slot_mapping: (T,) int32 or int64 slots of a pool; a negative slot skips K and V of its row, but not Q.
        rope_positions: (T,) int32 or int64 rows of the tables in ``norm_rope``; None for ``position + arange(T)``.
            Required with ``slot_mapping`` if ``norm_rope`` rotates.
        layout: "head_major" or "token_major" for caches; "NHD", "HND" or "VLLM" for pools.
        q_layout: "token_major" gives Q as (T, Hq, D), "head_major" as (Hq, T, D).
        k_scale, v_scale: float16 or float32 scales to write, (H, capacity) for caches and (N, bs, H) for pools: only
            for int8 destinations.
        out: array for Q, of the shape that ``q_layout`` gives and the dtype of ``qkv``, with a contiguous last axis.

    Returns:
        Q, in the dtype of ``qkv``: ``out``, or a new array of the same kind as ``qkv``.

    Raises:
        ShapeError: arrays that do not agree, overlap, or are read-only; an odd head_dim where pairs are rotated.
        DTypeError: a pair of dtypes without a conversion; scales for destinations that are not int8.
        CapacityError: a linear cache would overflow, or the window is larger than the cache.
        PositionError: ``position`` and ``slot_mapping`` are both given or both missing; a rope position is beyond the
            tables; a slot is beyond the pool. If rope positions are on the device, a row whose position is beyond the
            tables is skipped, and its Q is left unchanged in ``out``, and is zero in a new array; with
            ``tikv.init(debug=True)`` this raises.
        OptionError: an unknown layout.

    Exactness: arithmetic in float32, one rounding at each store; the same bits as `tikv.norm_rope` followed by `copy`,
        `write_slots` or `quantize`. Bit-exact without a transform.
    Cost: ``qkv`` is read once, Q, K and V are written once; one launch. A `Quantized` takes two launches: K and V are
        written in float32, and read again for their codes.
    Source: ``split_qkv_norm_rope_into_paged_cache``, its varlen form, and ``split_qkv_norm_rope_into_cache``.

    Examples:
        >>> import numpy as np, tikv
        >>> k_cache, v_cache = np.zeros((2, 1, 4, 2), np.float32)
        >>> qkv = np.arange(8, dtype=np.float32).reshape(1, 8)
        >>> tikv.write_qkv(qkv, k_cache, v_cache, num_q_heads=2, position=1).tolist()
        [[[0.0, 1.0], [2.0, 3.0]]]
        >>> k_cache[0].tolist(), v_cache[0, 1].tolist()
        ([[0.0, 0.0], [4.0, 5.0], [0.0, 0.0], [0.0, 0.0]], [6.0, 7.0])
    """
    operation = "write_qkv"
    target = FusedTarget(k_dst, v_dst, position, window, slot_mapping, layout, k_scale, v_scale)
    options: dict[str, Any] = {"num_q_heads": num_q_heads, "norm_rope": norm_rope, "rope_positions": rope_positions}
    options |= {"q_layout": q_layout, "out": out}
    if isinstance(k_dst, Quantized) or isinstance(v_dst, Quantized):
        return write_codes(functools.partial(write_fused, widened=True), operation, qkv, target, **options)
    return write_fused(operation, qkv, target, **options)


def write_fused(operation: str, qkv: Array, target: FusedTarget, **options: Any) -> Array:
    """`write_qkv` under the operation name that errors give; the options are those of `fused_call`."""
    return fused_call(operation, qkv, target, **options).run()


def fused_call(
    operation: str,
    qkv: Array,
    target: FusedTarget,
    *,
    num_q_heads: int,
    norm_rope: NormRope | None = None,
    rope_positions: Array | None = None,
    q_layout: str = "token_major",
    out: Array | None = None,
    widened: bool = False,
) -> FusedCall:
    """A checked call of `write_qkv` that has written nothing; `widened`: it writes float32, from any dtype."""
    k_dst, v_dst, position, window, slot_mapping, layout, k_scale, v_scale = target
    how = UNCHANGED if norm_rope is None else norm_rope
    arguments = {
        "qkv": qkv,
        "q": out,
        "k_dst": k_dst,
        "v_dst": v_dst,
        "slot_mapping": index_array(slot_mapping, "slot_mapping", operation),
        "rope_positions": index_array(rope_positions, "rope_positions", operation),
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    num_q_heads = checks.integer(num_q_heads, "num_q_heads", operation, low=1)
    window = checks.integer_or_none(window, "window", operation)
    layout = checks.name(layout, "layout", operation, checks.LAYOUTS if slot_mapping is None else tuple(POOL_LAYOUTS))
    q_layout = checks.name(q_layout, "q_layout", operation, checks.LAYOUTS)
    options = (num_q_heads, position is None, window, layout, q_layout, widened)
    return _checked(operation, how, arguments, options, check_write_qkv, position)


def norm_rope(
    x: Array,
    how: NormRope,
    *,
    weight: str = "q",
    position: int | None = None,
    rope_positions: Array | None = None,
    layout: str = "token_major",
    out: Array | None = None,
) -> Array:
    """The transform of `write_qkv` alone: normalise and rotate rows, in one launch, into float32 or into ``out``.

    Args:
        x: (T, H, D) token-major or (H, T, D) head-major, float32, float16 or bfloat16; any strides with a contiguous
            last axis.
        how: the norm and the rotation.
        weight: "q" or "k": which of its weights the norm uses.
        position: position of the first token, if ``rope_positions`` is None: token ``t`` is rotated by row
            ``position + t`` of the tables in ``how``.
        rope_positions: (T,) int32 or int64, the row of the tables for each token.
        layout: "token_major" or "head_major", for ``x`` and for the result.
        out: array for the result, float32, float16 or bfloat16.

    Returns:
        ``out``, or a new float32 array of the kind and shape of ``x``.

    Raises:
        As `write_qkv` does.

    Exactness: as in `write_qkv`, with the same kernel.
    Cost: each element is read once and written once; one launch.

    Examples:
        >>> import numpy as np, tikv
        >>> quarter = tikv.NormRope(mode="half", cos=np.zeros((1, 1), np.float32), sin=np.ones((1, 1), np.float32))
        >>> tikv.norm_rope(np.array([[[3.0, 4.0]]], np.float32), quarter, position=0).tolist()
        [[[-4.0, 3.0]]]
    """
    operation = "norm_rope"
    arguments = {"x": x, "q": out, "rope_positions": index_array(rope_positions, "rope_positions", operation)}
    weight = checks.name(weight, "weight", operation, ("q", "k"))
    layout = checks.name(layout, "layout", operation, checks.LAYOUTS)
    return _checked(operation, how, arguments, (weight, position is None, layout), check_norm_rope, position).run()


class FusedCall(NamedTuple):
    """A fused write, or transform alone, whose arguments are checked."""

    plan: WriteQkvPlan
    arrays: list[ArrayView]
    entries: Entries
    result: Any
    owners: tuple[Any, ...]  # objects that own the memory, which views do not keep alive

    def prepare(self) -> None:
        """`Plan.prepare` over these arrays."""
        self.plan.prepare(self.arrays)

    def run(self) -> Any:
        """Write, and return Q."""
        self.plan.run(self.arrays, self.entries)
        return handed_over(self.result)


def _checked(
    operation: str,
    how: NormRope,
    arguments: dict[str, Any],
    options: tuple[Any, ...],
    check: Callable[..., WriteQkvPlan],
    position: int | None,
) -> FusedCall:
    """Look up or make the plan of a call, and check the values that may change from call to call."""
    live = runtime_of(*arguments.values())
    if not isinstance(how, NormRope):
        raise OptionError(f"{operation}: norm_rope is {how!r}. Pass a tikv.NormRope, or None.")
    source = next(iter(arguments.values()))
    named = {n: view(a, n, operation) for n, a in arguments.items() if a is not None or n in _REQUIRED}
    form, tables = how.tables_in(live, operation)
    key = (operation, form, options, *[(n, a.key) for n, a in named.items()])
    plan: WriteQkvPlan | None = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check(live, operation, how, {**named, **tables}, *options))
    _, entries = plan.revalidate(named, {} if position is None else {"position": position})
    index = named.get("rope_positions") if plan.rope_limit else None
    unknown = index is not None and not live.is_cpu and host_indices(index, live) is None  # rows may be skipped
    result = arguments["q"]
    if result is None:
        result = new_like(source, plan.q_shape, plan.q_dtype, live, zeroed=unknown)
    first, *others = named.items()
    arrays = [first[1], view(result, "q", operation), *[a for n, a in others if n != "q"], *tables.values()]
    return FusedCall(plan, arrays, entries, result, tuple(arguments.values()))


def check_write_qkv(
    live: runtime.Runtime,
    operation: str,
    how: NormRope,
    arrays: dict[str, ArrayView],
    q_heads: int,
    no_position: bool,
    window: int | None,
    layout: str,
    q_layout: str,
    widened: bool,
) -> WriteQkvPlan:
    """Check everything except positions and slots."""
    qkv, k, v = arrays["qkv"], arrays["k_dst"], arrays["v_dst"]
    slots, positions = arrays.get("slot_mapping"), arrays.get("rope_positions")
    q_token, q_head = token_and_head_axes(q_layout, "q_layout", operation)
    checks.on_device(list(arrays.items()), live, operation)
    checks.rank(qkv, (2,), "qkv", "(T, (Hq + 2H) * D)", operation)
    checks.readable(qkv, "qkv", operation)
    for name, a in (("k_dst", k), ("v_dst", v)):
        checks.writable(a, name, operation)
    pool: PoolShape | None = None
    if slots is None:
        if no_position:
            raise PositionError(f"{operation}: neither position nor slot_mapping says where rows go. Pass one of them.")
        slot, head = token_and_head_axes(layout, "layout", operation)
        for name, a in (("k_dst", k), ("v_dst", v)):
            checks.rank(a, (3,), name, "(H, capacity, D)" if head == 0 else "(capacity, H, D)", operation)
        heads, capacity, width, other = k.shape[head], k.shape[slot], k.shape[2], v.shape
        window = checks.window_of(window, capacity, operation)
        placement = Placement("ring" if window else "linear")
    else:
        if not no_position or window is not None:
            raise PositionError(
                f"{operation}: position and window belong to contiguous caches, slot_mapping to pools. With "
                "slot_mapping, leave position and window out, and pass rope_positions for the rotation."
            )
        checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS))
        pool = pool_shape(k, POOL_LAYOUTS[layout][0], "k_dst", operation)
        other_pool = pool_shape(v, POOL_LAYOUTS[layout][1], "v_dst", operation)
        detail = f"k_dst: {describe(k)}, v_dst: {describe(v)}"
        for what, got, expected in zip(("blocks", "block size", "heads", "head width"), other_pool, pool, strict=True):
            checks.extent(got, expected, f"the {what} of v_dst", operation, detail)
        heads, capacity, width, other = pool.heads, 0, pool.width, k.shape
        placement = Placement("slots", pool.page)
        checks.indices(slots, "slot_mapping", operation)
        checks.rank(slots, (1,), "slot_mapping", "(T,)", operation)
        checks.extent(slots.shape[0], qkv.shape[0], "the length of slot_mapping", operation, f"qkv: {describe(qkv)}")
    detail = f"qkv: {describe(qkv)}, k_dst: {describe(k)}, v_dst: {describe(v)}, num_q_heads={q_heads}"
    if pool is None and other != k.shape:
        raise ShapeError(f"{operation}: k_dst and v_dst must have the same shape ({detail}).")
    checks.extent(qkv.shape[1], (q_heads + 2 * heads) * width, "the width of qkv, (Hq + 2H) * D,", operation, detail)
    _transformed(qkv, "qkv", operation)
    checks.same_dtype(k, v, "k_dst", "v_dst", operation)
    scales = _scales(arrays, k, pool, (heads, capacity), operation)
    if not scales and not widened:
        checks.convertible(qkv, k, "qkv", "k_dst", operation)
    tokens = qkv.shape[0]
    transform = how.transform_of(width, operation)
    rotates = transform.pairs != ""
    _rope_index(positions, tokens, rotates, slots is not None, operation)
    q_shape = (tokens, q_heads, width) if q_token == 0 else (q_heads, tokens, width)
    _out(arrays, q_shape, (qkv.dtype,), operation)
    names = [n for n in arrays if n != "q"]
    names.insert(1, "q")

    def bind(views: Sequence[ArrayView]) -> list[Launch]:
        named = dict(zip(names, views, strict=True))
        qkv, q, k, v = (named[n] for n in ("qkv", "q", "k_dst", "v_dst"))
        step, of_k = qkv.strides[0], q_heads * width
        source = [Rows(qkv, token=step, head=width, first=n) for n in (0, of_k, of_k + heads * width)]
        if pool is None:
            targets = [Rows(a, token=a.strides[slot], head=a.strides[head]) for a in (k, v)]
        else:
            targets = [pool_rows(a, axes) for a, axes in zip((k, v), POOL_LAYOUTS[layout], strict=True)]
        params = (
            {"dst_limit": pool.slots} if pool else {"keep": max(0, tokens - (window or tokens)), "ring": window or 0}
        )
        for i, scale in enumerate(named[n] for n in scales):
            where = scale_of_slots(scale) if pool else Scale(scale, head=scale.strides[0], token=scale.strides[1])
            targets[i] = targets[i]._replace(scale=where)
        streams = list(zip(source, [Rows(q, token=q.strides[q_token], head=q.strides[q_head]), *targets], strict=True))
        bound = _bind(
            live,
            operation,
            streams=streams if heads else streams[:1],
            heads=(q_heads, heads),
            tokens=tokens,
            width=width,
            transform=transform,
            tables=named,
            dst_place=placement._replace(array=named.get("slot_mapping")),
            positions=named.get("rope_positions") if rotates else None,
            **params,
        )
        return [bound]

    nothing = tokens == 0 or width == 0
    written = [n in ("q", "k_dst", "v_dst", *scales) for n in names]
    plan = WriteQkvPlan(live, operation, names, written, None if nothing else bind)
    plan.q_shape, plan.q_dtype, plan.q_is_new, plan.tokens = q_shape, qkv.dtype, "q" not in arrays, tokens
    plan.rope_limit = arrays["cos"].shape[0] if rotates and tokens else 0
    plan.capacity, plan.window, plan.pool = capacity, window, pool
    return plan


def check_norm_rope(
    live: runtime.Runtime,
    operation: str,
    how: NormRope,
    arrays: dict[str, ArrayView],
    weight: str,
    no_position: bool,
    layout: str,
) -> WriteQkvPlan:
    """Check everything except positions."""
    x, positions = arrays["x"], arrays.get("rope_positions")
    checks.option(weight, "weight", operation, ("q", "k"))
    token, head = token_and_head_axes(layout, "layout", operation)
    checks.on_device(list(arrays.items()), live, operation)
    checks.rank(x, (3,), "x", "(T, H, D)" if token == 0 else "(H, T, D)", operation)
    checks.readable(x, "x", operation)
    _transformed(x, "x", operation)
    tokens, heads, width = x.shape[token], x.shape[head], x.shape[2]
    transform = how.transform_of(width, operation)
    rotates = transform.pairs != ""
    _rope_index(positions, tokens, rotates, no_position, operation)
    _out(arrays, x.shape, dtypes.QUANTIZABLE, operation)
    names = [n for n in arrays if n != "q"]
    names.insert(1, "q")

    def bind(views: Sequence[ArrayView]) -> list[Launch]:
        named = dict(zip(names, views, strict=True))
        x, q = named["x"], named["q"]
        tables = dict(named)
        if weight == "k":
            tables.pop("q_weight", None)
            if "k_weight" in named:
                tables["q_weight"] = named["k_weight"]
        bound = _bind(
            live,
            operation,
            streams=[
                (
                    Rows(x, token=x.strides[token], head=x.strides[head]),
                    Rows(q, token=q.strides[token], head=q.strides[head]),
                )
            ],
            heads=(heads, 0),
            tokens=tokens,
            width=width,
            transform=transform,
            tables=tables,
            positions=named.get("rope_positions") if rotates else None,
        )
        return [bound]

    nothing = tokens == 0 or heads == 0 or width == 0
    plan = WriteQkvPlan(live, operation, names, [n == "q" for n in names], None if nothing else bind)
    plan.q_shape, plan.q_dtype, plan.q_is_new, plan.tokens = x.shape, dtypes.float32, "q" not in arrays, tokens
    plan.rope_limit = arrays["cos"].shape[0] if rotates and not nothing else 0
    return plan


def _transformed(array: ArrayView, name: str, operation: str) -> None:
    if array.dtype not in dtypes.QUANTIZABLE:
        raise DTypeError(f"{operation}: {name} is {describe(array)}; it must be float32, float16 or bfloat16.")


def _rope_index(positions: ArrayView | None, tokens: int, rotates: bool, needed: bool, operation: str) -> None:
    if positions is None:
        if rotates and needed:
            raise PositionError(
                f"{operation}: nothing says at which positions to rotate. Pass rope_positions, one per row."
            )
        return
    checks.indices(positions, "rope_positions", operation)
    checks.rank(positions, (1,), "rope_positions", "(T,)", operation)
    checks.extent(positions.shape[0], tokens, "the length of rope_positions", operation, f"{tokens} rows")


def _out(arrays: dict[str, ArrayView], shape: tuple[int, ...], allowed: Sequence[DType], operation: str) -> None:
    out = arrays.get("q")
    if out is None:
        return
    checks.writable(out, "out", operation)
    if out.shape != shape:
        raise ShapeError(f"{operation}: out is {describe(out)} where shape {shape} is needed.")
    if out.dtype not in allowed:
        raise DTypeError(f"{operation}: out is {describe(out)}; it must be {' or '.join(a.name for a in allowed)}.")


def _scales(
    arrays: dict[str, ArrayView], k: ArrayView, pool: PoolShape | None, shape: tuple[int, int], operation: str
) -> list[str]:
    """The names of the scale arrays, checked; empty unless the destinations are int8."""
    scale_names: list[str] = [n for n in ("k_scale", "v_scale") if n in arrays]
    row = format_of(k.dtype)
    if row is None or not row.finds_scales:
        if scale_names:
            raise DTypeError(
                f"{operation}: k_dst is {describe(k)}; only int8 destinations have scales. Leave them out."
            )
        return []
    if len(scale_names) != 2:
        axes = "(H, capacity)" if pool is None else "(N, bs, H)"
        raise ShapeError(f"{operation}: int8 destinations need both k_scale and v_scale, {axes} each. Pass both.")
    for name in scale_names:
        scale = arrays[name]
        checks.writable(scale, name, operation)
        if pool is not None:
            pool_scale(scale, pool, name, operation)
            continue
        checks.scales(scale, name, row, operation)
        if scale.shape != shape:
            raise ShapeError(f"{operation}: {name} is {describe(scale)} where (H, capacity) = {shape} is needed.")
    checks.same_dtype(arrays["k_scale"], arrays["v_scale"], "k_scale", "v_scale", operation)
    if arrays["k_scale"].strides != arrays["v_scale"].strides:
        raise ShapeError(
            f"{operation}: k_scale and v_scale have different strides. Pass two arrays with the same memory layout."
        )
    return scale_names
