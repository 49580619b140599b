"""The fused write of a transformer layer: split, normalise, rotate and store Q, K and V in one launch.

`write_qkv` is the whole; `norm_rope` is its transform alone, by the same kernel, so that the steps one by one give the
bits of the whole.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ArrayView, as_numpy, describe, new_like, to_device, view
from tikv.dtypes import DType
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks, quantize
from tikv.ops.copy import token_and_head_axes
from tikv.ops.paged import LAYOUTS as POOL_LAYOUTS
from tikv.ops.paged import (
    PoolShape,
    check_slots,
    host_indices,
    index_array,
    pool_end,
    pool_scale,
    pool_shape,
    scale_step,
)
from tikv.ops.row_copy import (
    CopyCall,
    End,
    Placement,
    alignment,
    choose_codec,
    entry_of,
    inner_words,
    keep_plan,
    reduced_position,
    unaligned,
    words_of,
)

# mode: (how pairs lie, whether a norm comes first)
MODES = {
    "none": ("", False),
    "norm_half": ("half", True),
    "half": ("half", False),
    "interleaved": ("interleaved", False),
    "norm_interleaved": ("interleaved", True),
}
WORKER_BYTES = 1 << 17  # on CPU, of the rows of a worker: with fewer, one is done before another is awake


class _Transform(NamedTuple):
    """How pairs lie, elements rotated and the norm's epsilon: `kernels.fused.Change` without the weights."""

    pairs: str
    rope_dim: int
    eps: float | None


@dataclass(frozen=True, eq=False)
class NormRope:
    """What happens to Q and K before they are stored: an RMS norm over the head width, and a rotation (RoPE).

    In float32: ``x_i * (w_i / sqrt(mean(x**2) + eps))``, then for each pair ``(a, b)`` of column ``i``, at position
    ``p``, ``(a * cos[p, i] - b * sin[p, i], b * cos[p, i] + a * sin[p, i])``. Elements from ``rope_dim`` on are
    normalised but not rotated. Each product, sum, quotient and root is rounded by itself, and squares are added in one
    order (`tikv.reference.sum_of_squares`): the same bits on every back end, by every launcher. Squares below 1e-38
    count as zero where a device flushes subnormals, which shows where ``eps`` is hardly more.

    Args:
        mode: "none"; "half" rotates pairs (i, i + rope_dim / 2), "interleaved" pairs (2i, 2i + 1); "norm_half" and
            "norm_interleaved" normalise first.
        eps: added to the mean of squares.
        q_weight, k_weight: (D,) float32 weights of the norm; None for 1.
        cos, sin: (positions, rope_dim / 2) float32 tables; a row a position.
        rope_dim: elements rotated, even, at most D; None for all D.

    The arrays are read at every use, where they lie; do not resize them. On a device that cannot see them they are
    copied once, and later changes go unseen.

    Raises:
        OptionError: an unknown mode; an array the mode does not use, or that it lacks.
        ShapeError, DTypeError: arrays of another shape or dtype; an odd ``rope_dim``.
        PositionError: a negative ``eps``.

    Source: ``qk_mode`` 0 to 3 of ``split_qkv_norm_rope_into_paged_cache``, and 3 of its partial-rotary form.

    Example:
        >>> import numpy as np, tikv
        >>> angle = np.arange(16, dtype=np.float32)[:, None] / 10.0 ** np.arange(2, dtype=np.float32)
        >>> tikv.NormRope(mode="half", cos=np.cos(angle), sin=np.sin(angle)).max_positions
        16
    """

    mode: str = "norm_half"
    eps: float = 1e-6
    q_weight: Any = None
    k_weight: Any = None
    cos: Any = None
    sin: Any = None
    rope_dim: int | None = None
    _seen: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        operation = "NormRope"
        checks.option(self.mode, "mode", operation, tuple(MODES))
        pairs, normed = MODES[self.mode]
        if normed and not 0 <= self.eps < float("inf"):
            raise PositionError(f"{operation}: eps={self.eps} is no small number. Use one such as 1e-6.")
        used = {"cos": pairs != "", "sin": pairs != "", "q_weight": normed, "k_weight": normed}
        for name, needed in used.items():
            given = getattr(self, name) is not None
            if needed and not given and not name.endswith("weight"):
                raise OptionError(
                    f"{operation}: mode {self.mode!r} needs {name}. Pass (positions, rope_dim / 2) float32."
                )
            if given and not needed:
                raise OptionError(
                    f"{operation}: mode {self.mode!r} does not use {name}. Leave it out or change the mode."
                )
        found = self._views(operation)
        for name, axes in (("cos", 2), ("sin", 2), ("q_weight", 1), ("k_weight", 1)):
            array = found.get(name)
            if array is not None:
                checks.rank(array, (axes,), name, "(positions, rope_dim / 2)" if axes == 2 else "(D,)", operation)
                checks.readable(array, name, operation)
                if array.dtype is not dtypes.float32:
                    raise DTypeError(
                        f"{operation}: {name} is {describe(array)}; it must be float32, as the arithmetic is."
                    )
        if pairs and found["cos"].shape != found["sin"].shape:
            raise ShapeError(
                f"{operation}: cos is {describe(found['cos'])} and sin {describe(found['sin'])}; make them alike."
            )
        if self.rope_dim is not None:
            rope_dim = checks.integer(self.rope_dim, "rope_dim", operation, low=2)
            if not pairs:
                raise OptionError(f"{operation}: mode {self.mode!r} does not rotate; leave rope_dim={rope_dim} out.")
            if rope_dim % 2:
                raise ShapeError(f"{operation}: rope_dim={rope_dim} is odd; a rotation needs pairs. Use an even one.")

    @property
    def max_positions(self) -> int:
        """Rows of the tables: positions that can be rotated; 0 without tables."""
        return 0 if self.cos is None else int(self._views("NormRope")["cos"].shape[0])

    def _views(self, operation: str) -> dict[str, ArrayView]:
        names = ("cos", "sin", "q_weight", "k_weight")
        return {n: view(getattr(self, n), n, operation) for n in names if getattr(self, n) is not None}

    def _tables(self, live: runtime.Runtime, operation: str) -> tuple[tuple[Any, ...], dict[str, ArrayView]]:
        """(what a launch depends on, the arrays where the device sees them), remembered for the live runtime."""
        found = self._seen.get(live.epoch)
        if found is None:
            arrays = self._views(operation)
            if not live.is_cpu:
                arrays = {
                    n: to_device(np.ascontiguousarray(as_numpy(a)), live) if a.device == "cpu" else a
                    for n, a in arrays.items()
                }
            checks.on_device(list(arrays.items()), live, operation)
            form = (self.mode, self.eps, self.rope_dim, *[(n, a.key) for n, a in arrays.items()])
            self._seen.clear()
            found = self._seen[live.epoch] = (form, arrays)
        return found

    def _transform(self, width: int, operation: str) -> _Transform:
        """What is done to rows of `width`; also checks the arrays against that width."""
        pairs, normed = MODES[self.mode]
        eps = float(self.eps) if normed else None
        arrays = self._views(operation)
        for name in ("q_weight", "k_weight"):
            if name in arrays:
                checks.extent(arrays[name].shape[0], width, f"the length of {name}", operation, f"head_dim={width}")
        if not pairs:
            return _Transform(pairs, 0, eps)
        if width % 2:
            raise ShapeError(
                f"{operation}: head_dim={width} is odd, and mode {self.mode!r} rotates pairs. "
                f"Use an even head_dim or mode 'none'."
            )
        rope_dim = width if self.rope_dim is None else int(self.rope_dim)
        if rope_dim > width:
            raise ShapeError(f"{operation}: rope_dim={rope_dim} > head_dim={width}. Rotate at most the head.")
        detail = f"rope_dim={rope_dim}, cos: {describe(arrays['cos'])}"
        checks.extent(arrays["cos"].shape[1], rope_dim // 2, "the number of columns of cos and sin", operation, detail)
        return _Transform(pairs, rope_dim, eps)


_PLAIN = NormRope(mode="none")


@functools.cache
def _fused() -> Any:
    """The kernel modules, imported with Taichi on first use."""
    return (
        importlib.import_module("tikv.kernels.fused"),
        importlib.import_module("tikv.kernels.copy"),
        importlib.import_module("tikv.kernels.codec"),
        importlib.import_module("tikv.kernels.address"),
        importlib.import_module("tikv.kernels.lanes"),
    )


def _turned_codec(operation: str, style: str, src: End, dst: End, width: int, rope_dim: int) -> tuple[int, Any]:
    """(units in a row, codec) of a stream that is rotated: units divide what is rotated, so that they move as pairs.

    On CPU a unit is one element, which is what LLVM vectorises.
    """
    codec = _fused()[2]
    s, d = src.array.dtype, dst.array.dtype
    src_align, dst_align = alignment(src, width), alignment(dst, width)
    for elements in (1,) if style == "cpu" else (4, 2, 1):
        src_word, dst_word = (min(8, elements * t.itemsize) for t in (s, d))
        whole = width % elements == 0 and rope_dim // 2 % elements == 0 and (dst.inner[0] or elements) % elements == 0
        if whole and src_align % src_word == 0 and dst_align % dst_word == 0:
            return width // elements, codec.Codec(s.short, d.short, elements, src_word * 8, dst_word * 8)
    raise unaligned(operation, src, dst)


def _bind(
    live: runtime.Runtime,
    operation: str,
    *,
    streams: Sequence[tuple[End, End]],
    heads: tuple[int, int],
    tokens: int,
    width: int,
    transform: _Transform,
    tables: dict[str, ArrayView],
    dst_place: Placement = Placement(),
    index: ArrayView | None = None,
    positions: ArrayView | None = None,
    scales: Sequence[ArrayView] = (),
    **which: int,
) -> tuple[launch.Bound, list[ArrayView]]:
    """Bind the fused write of `tokens` rows: Q, and K and V unless `heads[1]` is 0, each a source and a destination.

    Returns the bound launch and its array arguments.
    """
    fused, copy, _, address, lanes = _fused()
    style = live.kernel_style
    q_heads, kv_heads = heads
    pairs, rope_dim, _ = transform
    scale = scales[0].dtype.short if scales else ""
    found: list[Any] = []
    wheres: list[int] = []
    for i, (src, dst) in enumerate(streams):
        stream_scale = scale if i else ""
        if pairs and i < 2:
            units, codec = _turned_codec(operation, style, src, dst, width, rope_dim)
        else:
            units, codec = choose_codec(operation, style, src, dst, width, stream_scale)
        found.append(copy.Stream(units, codec))
        for end, bits in ((src, codec.src_bits), (dst, codec.dst_bits)):
            checks.addressable(end.array, bits // 8, live, "qkv"[i], operation)
            wheres.extend(words_of(end, bits // 8))
    if kv_heads == 0:
        found, wheres = found * 3, wheres * 3
    q, k, v = found
    # The vector has K and V first, as the copy's, and Q behind them.
    per_end = len(wheres) // 6
    wheres = wheres[2 * per_end :] + wheres[: 2 * per_end]
    moved = tokens * (q_heads + 2 * kv_heads) * width * streams[0][0].array.dtype.itemsize
    # A worker that only copies is done with twice the bytes in the time.
    workers = max(1, min(live.threads, moved // (WORKER_BYTES if pairs else 2 * WORKER_BYTES)))
    serial = style == "cpu" and workers == 1
    if style == "cpu":
        most = 2**31 - 1 - workers
        checks.integer(tokens * (3 if kv_heads else 1), "work items (tokens x streams)", operation, high=most)
        iterations = 1 if serial else workers * lanes.LEAST_ITERATIONS
    else:
        iterations = tokens * (q_heads + 2 * kv_heads) * fused.lanes_of(width)
        iterations = -(-iterations // lanes.BLOCK) * lanes.BLOCK
    checks.integer(iterations, "work items (tokens x heads x lanes)", operation, high=2**31 - 1)
    k_end, v_end = (streams[1][1], streams[2][1]) if kv_heads else (streams[0][1], streams[0][1])
    changes = tuple(
        fused.Change(*transform, name in tables) if pairs else fused.Change() for name in ("q_weight", "k_weight")
    )
    kernel = launch.kernel(
        live,
        fused.make_fused,
        style,
        serial,
        q_heads,
        kv_heads,
        width,
        tuple(found),
        copy.Side(
            dst_place.kind,
            dst_place.page,
            inner_words(k_end, k.codec.dst_bits),
            inner_words(v_end, v.codec.dst_bits),
        ),
        changes,
        0 if index is None else index.dtype.itemsize * 8,
        0 if positions is None else positions.dtype.itemsize * 8,
        scale,
    )
    arrays = [end.array for ends in streams for end in ends]
    arrays = arrays * 3 if kv_heads == 0 else arrays
    arrays += [tables.get(name, arrays[0]) for name in ("cos", "sin", "q_weight", "k_weight")]
    turn: dict[str, int] = {"q_units": q.units}
    if pairs:
        turn.update(limit=tables["cos"].shape[0])
        for name in ("cos", "sin"):
            turn.update({name: tables[name].offset // 4, f"{name}_step": tables[name].strides[0]})
        for name in ("q_weight", "k_weight"):
            turn[name] = tables[name].offset // 4 if name in tables else 0
    if index is not None or positions is not None or scales:
        filler = next(a for a in (index, positions, *scales) if a is not None)
        arrays += [filler if a is None else a for a in (index, positions)]
        arrays += list(scales) if scales else [filler, filler]
    if index is not None:
        which.update(dst_index=index.offset // index.dtype.itemsize, index_step=index.strides[0])
    if positions is not None:
        turn.update(first=positions.offset // positions.dtype.itemsize, step=positions.strides[0])
    for name, array in zip(("k_scale", "v_scale"), scales, strict=False):
        which[name] = array.offset // array.dtype.itemsize
    numbers = address.Which(iterations=iterations, tokens=tokens, k_units=k.units, v_units=v.units, **which)
    return kernel.bind(iterations, *arrays, tuple(wheres), tuple(fused.Turn(**turn)), tuple(numbers)), arrays


class _FusedCall(CopyCall):
    """A `CopyCall` that brings two positions, and whose array 1, Q, may be new in each run: it overlaps nothing."""

    __slots__ = ("checked", "new_q")

    def __init__(
        self,
        live: runtime.Runtime,
        names: Sequence[str],
        written: Sequence[bool],
        bind: Callable[[Sequence[ArrayView]], tuple[launch.Bound, list[ArrayView]]] | None,
        new_q: bool,
    ) -> None:
        def bind_and_choose(arrays: Sequence[ArrayView]) -> launch.Bound:
            assert bind is not None
            arrays = [a.moved(a.shape, a.strides) for a in arrays]  # one array given twice is two here
            bound, arguments = bind(arrays)
            self.chosen = [next(j for j, a in enumerate(arrays) if a is b) for b in arguments]
            return bound

        super().__init__(live, names, written, None if bind is None else bind_and_choose)
        self.new_q = new_q
        self.checked: list[int] | None = None

    def _enter(self, put: Callable[[int, int], None], entry: int, value: Any) -> None:
        put(entry, value[0])
        put(entry + 1, value[1])

    def _disjoint(self, operation: str, arrays: Sequence[ArrayView]) -> None:
        if not self.new_q:
            super()._disjoint(operation, arrays)
            return
        pointers = [a.ptr for i, a in enumerate(arrays) if i != 1]
        if pointers != self.checked or 0 in pointers:
            named = list(zip(self.names, arrays, self.written, strict=True))
            checks.disjoint([*named[:1], *named[2:]], operation)
            self.checked = pointers


class _Plan(NamedTuple):
    """A checked call: what its runs have in common."""

    call: _FusedCall
    q_shape: tuple[int, ...]
    q_dtype: DType
    tokens: int
    rope_limit: int  # rows of the tables; 0 where nothing is rotated
    capacity: int | None  # of a contiguous cache, if there is one
    window: int | None
    pool: PoolShape | None

    def again(
        self, live: runtime.Runtime, operation: str, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]
    ) -> tuple[None, tuple[int, int]]:
        """Check positions and slots, as far as the host knows them; as `ops.WritePlan.again`."""
        start = rope = 0
        position = numbers.get("position")
        if self.pool is None and position is not None:
            start = rope = checks.integer(position, "position", operation)
            if self.window is not None:
                checks.integer(position + self.tokens, "position + tokens", operation)
                start = reduced_position(start, 0, self.window)
            elif self.capacity is not None:
                checks.fits_linear(start, self.tokens, self.capacity, operation)
        elif self.pool is not None:
            check_slots(arrays["slot_mapping"], self.pool, live, operation)
        if self.rope_limit and "rope_positions" in arrays:
            rope, rows = 0, host_indices(arrays["rope_positions"], live)
            if rows is not None and rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.rope_limit:
                token = int(np.argmax((rows < 0) | (rows >= self.rope_limit)))
                raise PositionError(
                    f"{operation}: rope_positions[{token}]={int(rows[token])} is outside the tables of "
                    f"{self.rope_limit} positions. Pass longer cos and sin."
                )
        elif self.rope_limit and rope + self.tokens > self.rope_limit:
            raise PositionError(
                f"{operation}: position={rope} + {self.tokens} tokens > {self.rope_limit} positions of the tables. "
                f"Pass longer cos and sin, or rope_positions."
            )
        return None, (rope, start)


def write_qkv(
    qkv: Any,
    k_dst: Any,
    v_dst: Any,
    *,
    num_q_heads: int,
    norm_rope: NormRope | None = None,
    position: int | None = None,
    window: int | None = None,
    slot_mapping: Any = None,
    rope_positions: Any = None,
    layout: str = "head_major",
    q_layout: str = "token_major",
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
) -> Any:
    """Split the rows of a fused projection, normalise and rotate Q and K, store K and V, return Q: one launch.

    With ``position`` K and V go to contiguous caches, linear or sliding, as in `copy`; with ``slot_mapping`` to page
    pools, as in `write_slots`. Rows of many sequences may stand behind one another, each with its slot and its rope
    position. V is copied as it is.

    Args:
        qkv: (T, (Hq + 2H) * D) float32, float16 or bfloat16; a row is [Hq heads of Q | H of K | H of V]. Any row
            stride.
        k_dst, v_dst: caches (H, capacity, D) or (capacity, H, D), or pools as in `write_slots`; of the dtype of
            ``qkv``, or of one that `copy` converts it to, or int8.
        num_q_heads: Hq; H is that of the destinations.
        norm_rope: what to do to Q and K; None for nothing.
        position: absolute position of row 0 in a contiguous cache; row ``t`` goes to ``position + t``.
        window: slots of a sliding cache; None for a linear one.
        slot_mapping: (T,) int32 or int64 slots of a pool; a negative one skips K and V of its row, not its Q.
        rope_positions: (T,) int32 or int64 rows of the tables; None for ``position + arange(T)``. Needed with
            ``slot_mapping`` if the mode rotates.
        layout: "head_major" or "token_major" for caches; "NHD", "HND" or "VLLM" for pools.
        q_layout: "token_major" gives Q as (T, Hq, D), "head_major" as (Hq, T, D).
        k_scale, v_scale: float16 or float32 scales to write, (H, capacity) for caches and (N, bs, H) for pools: for
            int8 destinations and for no other.
        out: where to put Q; of that shape and the dtype of ``qkv``, with a contiguous last axis.

    Returns:
        Q, in the dtype of ``qkv``: ``out``, or a new NumPy array, torch tensor or `CacheArray`, as ``qkv`` is.

    Raises:
        ShapeError: arrays that do not agree, overlap, or are read-only; an odd head_dim where pairs are rotated.
        DTypeError: a pair of dtypes without a conversion; scales where none belong.
        CapacityError: a linear cache would overflow, or a window larger than the cache.
        PositionError: neither ``position`` nor ``slot_mapping``, or both; a rope position that the tables end before; a
            slot beyond the pool. A rope position that only the device knows and the tables lack skips its row, whose Q
            is left as it was, or zero if new; ``tikv.init(debug=True)`` reads such arrays back and raises.
        OptionError: an unknown layout.

    Exactness: arithmetic in float32, one rounding at each store; bit for bit what `tikv.norm_rope` followed by
    `copy`, `write_slots` or `quantize` gives. Without a transform bit-exact.
    Cost: ``qkv`` is read once, Q, K and V are written once; one launch.
    Source: ``split_qkv_norm_rope_into_paged_cache``, its varlen form, and ``split_qkv_norm_rope_into_cache``.

    Example:
        >>> import numpy as np, tikv
        >>> k_cache, v_cache = np.zeros((2, 1, 4, 2), np.float32)
        >>> qkv = np.arange(8, dtype=np.float32).reshape(1, 8)
        >>> tikv.write_qkv(qkv, k_cache, v_cache, num_q_heads=2, position=1).tolist()
        [[[0.0, 1.0], [2.0, 3.0]]]
        >>> k_cache[0].tolist(), v_cache[0, 1].tolist()
        ([[0.0, 0.0], [4.0, 5.0], [0.0, 0.0], [0.0, 0.0]], [6.0, 7.0])
    """
    operation = "write_qkv"
    how = _PLAIN if norm_rope is None else norm_rope
    given = {
        "qkv": qkv,
        "q": out,
        "k_dst": k_dst,
        "v_dst": v_dst,
        "slot_mapping": index_array(slot_mapping),
        "rope_positions": index_array(rope_positions),
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    num_q_heads = checks.integer(num_q_heads, "num_q_heads", operation, low=1)
    window = checks.integer_or_none(window, "window", operation)
    options = (num_q_heads, position is None, window, layout, q_layout)
    return _run(operation, how, given, options, _plan_write_qkv, position)


def norm_rope(
    x: Any,
    how: NormRope,
    *,
    weight: str = "q",
    position: int | None = None,
    rope_positions: Any = None,
    layout: str = "token_major",
    out: Any = None,
) -> Any:
    """The transform of `write_qkv` alone: normalise and rotate rows, in one launch, into float32 or into ``out``.

    Args:
        x: (T, H, D) token-major or (H, T, D) head-major, float32, float16 or bfloat16; any strides with a contiguous
            last axis.
        how: what to do.
        weight: "q" or "k": whose weight the norm takes.
        position: position of row 0 in the tables, if ``rope_positions`` is None.
        rope_positions: (T,) int32 or int64.
        layout: "token_major" or "head_major", of ``x`` and of what is returned.
        out: where to put the rows, float32, float16 or bfloat16.

    Returns:
        ``out``, or a new float32 array of the kind and shape of ``x``.

    Raises:
        As `write_qkv`.

    Exactness: as `write_qkv`, by the same kernel.
    Cost: each element is read once and written once; one launch.

    Example:
        >>> import numpy as np, tikv
        >>> quarter = tikv.NormRope(mode="half", cos=np.zeros((1, 1), np.float32), sin=np.ones((1, 1), np.float32))
        >>> tikv.norm_rope(np.array([[[3.0, 4.0]]], np.float32), quarter, position=0).tolist()
        [[[-4.0, 3.0]]]
    """
    operation = "norm_rope"
    given = {"x": x, "q": out, "rope_positions": index_array(rope_positions)}
    return _run(operation, how, given, (weight, position is None, layout), _plan_norm_rope, position)


def _run(
    operation: str,
    how: NormRope,
    given: dict[str, Any],
    options: tuple[Any, ...],
    plan_of: Callable[..., _Plan],
    position: int | None,
) -> Any:
    """Look up or make the plan of a call, check what may change from call to call, launch, return Q."""
    live = runtime.current()
    if not isinstance(how, NormRope):
        raise OptionError(f"{operation}: norm_rope is {how!r}. Pass a tikv.NormRope, or None.")
    source = next(iter(given.values()))
    named = {n: view(a, n, operation) for n, a in given.items() if a is not None}
    form, tables = how._tables(live, operation)
    key = (operation, form, options, *[(n, a.key) for n, a in named.items()])
    plan: _Plan | None = live.plans.get(key)
    if plan is None:
        plan = keep_plan(live, key, plan_of(live, operation, how, {**named, **tables}, *options))
    _, entries = plan.again(live, operation, named, {} if position is None else {"position": position})
    index = named.get("rope_positions") if plan.rope_limit else None
    unknown = index is not None and not live.is_cpu and host_indices(index, live) is None  # rows may be skipped
    result = given["q"]
    if result is None:
        result = new_like(source, plan.q_shape, plan.q_dtype, live, zeroed=unknown)
    first, *others = named.items()
    arrays = [first[1], view(result, "q", operation), *[a for n, a in others if n != "q"], *tables.values()]
    plan.call.run(operation, arrays, entry_of("src_position"), entries)
    return result


def _plan_write_qkv(
    live: runtime.Runtime,
    operation: str,
    how: NormRope,
    arrays: dict[str, ArrayView],
    q_heads: int,
    no_position: bool,
    window: int | None,
    layout: str,
    q_layout: str,
) -> _Plan:
    """Check everything but positions and slots."""
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
        place = Placement("ring" if window else "linear")
    else:
        if not no_position or window is not None:
            raise PositionError(
                f"{operation}: position and window belong to contiguous caches, slot_mapping to pools. Pass "
                f"rope_positions for the rotation, and nothing else beside slot_mapping."
            )
        checks.option(layout, "layout", operation, tuple(POOL_LAYOUTS))
        pool = pool_shape(k, POOL_LAYOUTS[layout][0], "k_dst", operation)
        other_pool = pool_shape(v, POOL_LAYOUTS[layout][1], "v_dst", operation)
        detail = f"k_dst: {describe(k)}, v_dst: {describe(v)}"
        for what, got, wanted in zip(("blocks", "block size", "heads", "head width"), other_pool, pool, strict=True):
            checks.extent(got, wanted, f"the {what} of v_dst", operation, detail)
        heads, capacity, width, other = pool.heads, 0, pool.width, k.shape
        place = Placement("slots", pool.page)
        checks.indices(slots, "slot_mapping", operation)
        checks.rank(slots, (1,), "slot_mapping", "(T,)", operation)
        checks.extent(slots.shape[0], qkv.shape[0], "the length of slot_mapping", operation, f"qkv: {describe(qkv)}")
    detail = f"qkv: {describe(qkv)}, k_dst: {describe(k)}, v_dst: {describe(v)}, num_q_heads={q_heads}"
    if pool is None and other != k.shape:
        raise ShapeError(f"{operation}: k_dst and v_dst must have one shape ({detail}).")
    checks.extent(qkv.shape[1], (q_heads + 2 * heads) * width, "the width of qkv, (Hq + 2H) * D,", operation, detail)
    _transformed(qkv, "qkv", operation)
    checks.same_dtype(k, v, "k_dst", "v_dst", operation)
    scales = _scales(arrays, k, pool, (heads, capacity), operation)
    if not scales:
        checks.convertible(qkv, k, "qkv", "k_dst", operation)
    tokens = qkv.shape[0]
    transform = how._transform(width, operation)
    rotates = transform.pairs != ""
    _rope_index(positions, tokens, rotates, slots is not None, operation)
    q_shape = (tokens, q_heads, width) if q_token == 0 else (q_heads, tokens, width)
    _out(arrays, q_shape, (qkv.dtype,), operation)
    names = [n for n in arrays if n != "q"]
    names.insert(1, "q")

    def bind(given: Sequence[ArrayView]) -> tuple[launch.Bound, list[ArrayView]]:
        found = dict(zip(names, given, strict=True))
        qkv, q, k, v = (found[n] for n in ("qkv", "q", "k_dst", "v_dst"))
        step, of_k = qkv.strides[0], q_heads * width
        source = [End(qkv, step=step, head=width, first=n) for n in (0, of_k, of_k + heads * width)]
        if pool is None:
            targets = [End(a, step=a.strides[slot], head=a.strides[head]) for a in (k, v)]
        else:
            targets = [pool_end(a, axes) for a, axes in zip((k, v), POOL_LAYOUTS[layout], strict=True)]
        which = (
            {"dst_limit": pool.slots} if pool else {"keep": max(0, tokens - (window or tokens)), "ring": window or 0}
        )
        for scale in [found[n] for n in scales][:1]:
            head_step, slot_step = scale.strides if pool is None else (scale.strides[2], scale_step(scale))
            which.update(scale_head=head_step, scale_step=slot_step)
        streams = list(zip(source, [End(q, step=q.strides[q_token], head=q.strides[q_head]), *targets], strict=True))
        return _bind(
            live,
            operation,
            streams=streams if heads else streams[:1],
            heads=(q_heads, heads),
            tokens=tokens,
            width=width,
            transform=transform,
            tables=found,
            dst_place=place,
            index=found.get("slot_mapping"),
            positions=found.get("rope_positions") if rotates else None,
            scales=[found[n] for n in scales],
            **which,
        )

    nothing = tokens == 0 or width == 0
    written = [n in ("q", "k_dst", "v_dst", *scales) for n in names]
    call = _FusedCall(live, names, written, None if nothing else bind, "q" not in arrays)
    limit = arrays["cos"].shape[0] if rotates and tokens else 0
    return _Plan(call, q_shape, qkv.dtype, tokens, limit, capacity, window, pool)


def _plan_norm_rope(
    live: runtime.Runtime,
    operation: str,
    how: NormRope,
    arrays: dict[str, ArrayView],
    weight: str,
    no_position: bool,
    layout: str,
) -> _Plan:
    """Check everything but positions."""
    x, positions = arrays["x"], arrays.get("rope_positions")
    checks.option(weight, "weight", operation, ("q", "k"))
    token, head = token_and_head_axes(layout, "layout", operation)
    checks.on_device(list(arrays.items()), live, operation)
    checks.rank(x, (3,), "x", "(T, H, D)" if token == 0 else "(H, T, D)", operation)
    checks.readable(x, "x", operation)
    _transformed(x, "x", operation)
    tokens, heads, width = x.shape[token], x.shape[head], x.shape[2]
    transform = how._transform(width, operation)
    rotates = transform.pairs != ""
    _rope_index(positions, tokens, rotates, no_position, operation)
    _out(arrays, x.shape, quantize.FROM, operation)
    names = [n for n in arrays if n != "q"]
    names.insert(1, "q")

    def bind(given: Sequence[ArrayView]) -> tuple[launch.Bound, list[ArrayView]]:
        found = dict(zip(names, given, strict=True))
        x, q = found["x"], found["q"]
        tables = dict(found)
        if weight == "k":
            tables.pop("q_weight", None)
            if "k_weight" in found:
                tables["q_weight"] = found["k_weight"]
        return _bind(
            live,
            operation,
            streams=[
                (
                    End(x, step=x.strides[token], head=x.strides[head]),
                    End(q, step=q.strides[token], head=q.strides[head]),
                )
            ],
            heads=(heads, 0),
            tokens=tokens,
            width=width,
            transform=transform,
            tables=tables,
            positions=found.get("rope_positions") if rotates else None,
        )

    nothing = tokens == 0 or heads == 0 or width == 0
    call = _FusedCall(live, names, [n == "q" for n in names], None if nothing else bind, "q" not in arrays)
    limit = arrays["cos"].shape[0] if rotates and not nothing else 0
    return _Plan(call, x.shape, dtypes.float32, tokens, limit, None, None, None)


def _transformed(array: ArrayView, name: str, operation: str) -> None:
    if array.dtype not in quantize.FROM:
        raise DTypeError(f"{operation}: {name} is {describe(array)}; it must be float32, float16 or bfloat16.")


def _rope_index(positions: ArrayView | None, tokens: int, rotates: bool, needed: bool, operation: str) -> None:
    if positions is None:
        if rotates and needed:
            raise PositionError(
                f"{operation}: nothing says at which positions to rotate. Pass rope_positions, one a row."
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
    """The names of the scale arrays, checked; none unless the destinations are int8."""
    found: list[str] = [n for n in ("k_scale", "v_scale") if n in arrays]
    if k.dtype is not dtypes.int8:
        if found:
            raise DTypeError(
                f"{operation}: k_dst is {describe(k)}; only int8 destinations have scales. Leave them out."
            )
        return []
    if len(found) != 2:
        wanted = "(H, capacity)" if pool is None else "(N, bs, H)"
        raise ShapeError(f"{operation}: int8 destinations need both k_scale and v_scale, {wanted} each. Pass both.")
    for name in found:
        scale = arrays[name]
        checks.writable(scale, name, operation)
        if pool is not None:
            pool_scale(scale, pool, name, operation)
            continue
        if scale.dtype not in quantize.SCALES:
            raise DTypeError(f"{operation}: {name} is {describe(scale)}; int8 scales are float16 or float32.")
        if scale.shape != shape:
            raise ShapeError(f"{operation}: {name} is {describe(scale)} where (H, capacity) = {shape} is needed.")
    checks.same_dtype(arrays["k_scale"], arrays["v_scale"], "k_scale", "v_scale", operation)
    if arrays["k_scale"].strides != arrays["v_scale"].strides:
        raise ShapeError(f"{operation}: k_scale and v_scale have other strides. Pass arrays of one memory layout.")
    return found
