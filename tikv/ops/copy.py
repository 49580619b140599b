"""One-shot contiguous operations on the caller's arrays: `copy`, `copy_kv`, `linearize`.

A call looks up its plan by the shapes, strides, dtypes and options it was given; the first such call checks
everything and binds a launch, and later calls only set the pointers and the position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tikv import launch, runtime
from tikv.arrays import Array, ArrayView, Views, describe, runtime_of, view, view_all
from tikv.ops import checks
from tikv.ops.layouts import LINEAR, Formats, Placement, Rows, reduced_position, token_and_head_axes
from tikv.ops.plan import Entries, Launch, Plan
from tikv.ops.quantized_arrays import Quantized, codes_and_numbers, codes_of_pair, require_quantizable, scale_of_groups
from tikv.ops.row_copy import bind_copy


def copy(
    src: Array,
    cache: Array,
    *,
    position: int,
    window: int | None = None,
    num_tokens: int | None = None,
    src_offset: int = 0,
    src_layout: str = "token_major",
    cache_layout: str = "head_major",
) -> None:
    """Copy new rows into a cache, in place, in one launch.

    Row ``src_offset + t`` of the source lands in slot ``position + t``, or ``(position + t) % window`` when the cache
    slides. If there are more tokens than ``window``, only the newest are written, so each slot has one writer.

    Args:
        src: (T, H, D) token-major or (H, T, D) head-major; any strides with a contiguous last axis.
        cache: (H, capacity, D) head-major or (capacity, H, D) token-major, of the source's dtype or of one that it
            converts to: float32 converts to float16 and bfloat16, bfloat16 to float32, and each of these three to and
            from float8_e4m3fn and float8_e5m2. Or a `Quantized` of that shape, made by `quantize`, if the dtype of
            ``src`` is one of these three.
        position: absolute position of the first row copied, counted from 0; not a slot.
        window: slots of a sliding cache, at most the capacity; None for a linear cache.
        num_tokens: rows to copy; None for all from ``src_offset`` on.
        src_offset: first row to copy.
        src_layout, cache_layout: "token_major" or "head_major".

    Raises:
        ShapeError: the arrays do not agree, overlap, are read-only, or have no contiguous last axis.
        DTypeError: no conversion exists for this pair of dtypes.
        CapacityError: a linear cache would overflow, or the window is larger than the cache.
        PositionError: a position is negative or too large, or the source range leaves the source.
        OptionError: an unknown layout.

    Exactness: bit-exact for equal dtypes; a narrowing conversion rounds to nearest even, and overflow becomes inf, or
        in an 8-bit float the largest number. A `Quantized` gets the codes that `quantize` gives.
    Cost: each element is read once and written once; one launch.
    Source: covers ``kv_cache_copy`` and its ``batch``, ``seq``, ``f32``, ``f16`` and ``bf16`` forms.

    Examples:
        >>> import numpy as np, tikv
        >>> cache = np.zeros((2, 4, 3), np.float16)
        >>> tikv.copy(np.ones((1, 2, 3), np.float32), cache, position=5, window=4)
        >>> cache[:, :, 0].tolist()
        [[0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    scales: Sequence[Any] = ()
    formats: Formats = (None, None)
    if isinstance(cache, Quantized):
        formats = cache.format, None
        cache, numbers = codes_and_numbers(runtime_of(cache, src), "copy", cache, "cache's ", written=True)
        scales = (numbers,)
    arrays = view_all((src, cache, *scales), (*_SINGLE, *_SCALES[: len(scales)]), "copy")
    options = _new(CopyOptions, (window, num_tokens, src_offset, src_layout, cache_layout))
    write("copy", _SINGLE, arrays, position, options, formats=formats)


def copy_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    position: int,
    window: int | None = None,
    num_tokens: int | None = None,
    src_offset: int = 0,
    src_layout: str = "token_major",
    cache_layout: str = "head_major",
) -> None:
    """Copy new keys and values into their caches, in place, in one launch: `copy` for both.

    Args:
        k, v: (T, H, D) and (T, H, D_v) token-major, or (H, T, ...) head-major, of one dtype.
        k_cache, v_cache: (H, capacity, D) and (H, capacity, D_v) head-major, or (capacity, H, ...), of one dtype; or
            both a `Quantized`, with the same format and width.
        position, window, num_tokens, src_offset, src_layout, cache_layout: as in `copy`.

    Raises:
        ShapeError, DTypeError, CapacityError, PositionError, OptionError: as in `copy`; also when K and V disagree.

    Exactness: the same bits as two calls to `copy`.
    Cost: as two calls to `copy`, in one launch.
    Source: covers ``kv_cache_copy_*_dual`` and ``*_kv_dual``.

    Examples:
        >>> import numpy as np, tikv
        >>> k_cache, v_cache = np.zeros((2, 1, 8, 4), np.float32)
        >>> k, v = np.ones((3, 1, 4), np.float32), np.full((3, 1, 4), 2, np.float32)
        >>> tikv.copy_kv(k, v, k_cache, v_cache, position=0)
        >>> k_cache[0, :, 0].tolist(), v_cache[0, :, 0].tolist()
        ([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    """
    scales: Sequence[Any] = ()
    formats: Formats = (None, None)
    if isinstance(k_cache, Quantized) or isinstance(v_cache, Quantized):
        pair = {"k_cache": k_cache, "v_cache": v_cache}
        (k_cache, v_cache), scales, formats = codes_of_pair(runtime_of(k_cache, k), "copy_kv", pair, written=True)
    arrays = view_all((k, k_cache, v, v_cache, *scales), (*_PAIR, *_SCALES[: len(scales)]), "copy_kv")
    options = _new(CopyOptions, (window, num_tokens, src_offset, src_layout, cache_layout))
    write("copy_kv", _PAIR, arrays, position, options, formats=formats)


class CopyPlan(Plan):
    """A checked contiguous write, whose position comes with each run."""

    loop_entry = "dst_position"

    def __init__(
        self,
        live: runtime.Runtime,
        operation: str,
        array_names: Sequence[str],
        bind: Callable[[Sequence[ArrayView]], Sequence[Launch]] | None,
        tokens: int,
        capacity: int,
        window: int | None,
        range_names: checks.RangeNames,
        scales: int,
    ) -> None:
        names = (*array_names, *_SCALES[:scales])
        written = [False, True] * (len(array_names) // 2) + [True] * scales
        super().__init__(live, operation, names, written, bind)
        self.tokens = tokens
        self.capacity = capacity
        self.window = window
        self.range_names = range_names

    def write(self, arrays: Views, position: int) -> None:
        """`run`, starting at a position.

        A call with the arrays of the last run takes a short path, since a decode loop waits for it:
        `benches/ops/bench_copy.py`.
        """
        if self.window is None and type(position) is int and 0 <= position <= self.capacity - self.tokens:
            with self.lock:
                if arrays.pointers == self.pointers and self.launch_again is not None:
                    self.launch_again(position)
                    return
        self.run(arrays, self.entries_at(position))

    def entries_at(self, position: int) -> Entries:
        """The entries of a launch that writes from a position on; the position is checked."""
        names = self.range_names
        if type(position) is not int or position < 0:
            position = checks.integer(position, names.position, self.operation)
        if self.window is None:
            if position + self.tokens > self.capacity:
                checks.fits_linear(position, self.tokens, self.capacity, self.operation, names)
        else:
            if position + self.tokens > checks.MAX_POSITION:
                end = f"{names.position} + {names.num_tokens}"
                checks.integer(position + self.tokens, end, self.operation)
            position = reduced_position(position, 0, self.window)
        return {"dst_position": position}

    def revalidate(self, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]) -> tuple[None, Entries]:
        """Check the position."""
        return None, self.entries_at(numbers["position"])


# What callers call the source and the destination of each stream, in turn.
_SINGLE = ("src", "cache")
_PAIR = ("k", "k_cache", "v", "v_cache")
_SCALES = ("the scales of K", "the scales of V")  # of groups of codes; they follow the arrays above


class CopyOptions(NamedTuple):
    """The options of a contiguous write except the position; parameters of `copy`."""

    window: int | None = None
    num_tokens: int | None = None
    src_offset: int = 0
    src_layout: str = "token_major"
    cache_layout: str = "head_major"

    def checked(self, operation: str, names: checks.RangeNames) -> CopyOptions:
        """These options, with numbers as ints and layouts as strings: they are part of a plan's key.

        Raises:
            DTypeError, OptionError, PositionError: an option is not valid.
        """
        window, num_tokens, src_offset, src_layout, cache_layout = self
        return CopyOptions(
            checks.integer_or_none(window, "window", operation),
            checks.integer_or_none(num_tokens, names.num_tokens, operation),
            src_offset if type(src_offset) is int else checks.integer(src_offset, names.src_offset, operation),
            checks.name(src_layout, "src_layout", operation, checks.LAYOUTS),
            checks.name(cache_layout, "cache_layout", operation, checks.LAYOUTS),
        )


_new = tuple.__new__  # what calling a NamedTuple does, in a third of the time: a copy of one token waits for it


def write(
    operation: str,
    array_names: tuple[str, ...],
    arrays: Sequence[ArrayView],
    position: int,
    options: CopyOptions,
    names: checks.RangeNames = checks.RANGE_NAMES,
    formats: Formats = (None, None),
) -> None:
    """The contiguous write that `copy`, `copy_kv` and the named variants share; one or two streams.

    `array_names` and `names` are the names that `operation` gives to `arrays` and to its numbers. `formats` are those
    of caches of groups of codes, whose scales follow the named arrays.
    """
    live = runtime_of(arrays[1], arrays[0])
    if type(arrays) is not Views:
        arrays = Views(arrays)
    window, num_tokens, src_offset, src_layout, cache_layout = options
    ints = (window is None or type(window) is int) and (num_tokens is None or type(num_tokens) is int)
    if not (ints and type(src_offset) is int and type(src_layout) is type(cache_layout) is str):
        options = options.checked(operation, names)
    key = (operation, arrays.key, options, formats)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check_copy(live, operation, arrays, array_names, options, names, formats))
    plan.write(arrays, position)


def check_copy(
    live: runtime.Runtime,
    operation: str,
    views: Sequence[ArrayView],
    array_names: tuple[str, ...],
    options: CopyOptions,
    names: checks.RangeNames = checks.RANGE_NAMES,
    formats: Formats = (None, None),
) -> CopyPlan:
    """Check everything except the position and where the arrays lie."""
    window, num_tokens, src_offset, src_layout, cache_layout = options
    pairs = len(array_names)
    src, dst, src_names, dst_names = views[0:pairs:2], views[1:pairs:2], array_names[0::2], array_names[1::2]
    src_token, src_head = token_and_head_axes(src_layout, "src_layout", operation)
    dst_slot, dst_head = token_and_head_axes(cache_layout, "cache_layout", operation)
    named = [*zip(src_names, src, strict=True), *zip(dst_names, dst, strict=True)]
    checks.on_device(named, live, operation)
    for name, a in zip(src_names, src, strict=True):
        checks.rank(a, (3,), name, "(T, H, D)" if src_token == 0 else "(H, T, D)", operation)
        checks.readable(a, name, operation)
    for name, a in zip(dst_names, dst, strict=True):
        checks.rank(a, (3,), name, "(H, capacity, D)" if dst_head == 0 else "(capacity, H, D)", operation)
        checks.writable(a, name, operation)
    for a, c, a_name, c_name, format in zip(src, dst, src_names, dst_names, formats, strict=False):
        if format is None:
            checks.convertible(a, c, a_name, c_name, operation)
        else:
            require_quantizable(a, a_name, operation)
        detail = f"{a_name}: {describe(a)}, {c_name}: {describe(c)}"
        remedy = ""
        if c.shape[dst_slot] == a.shape[src_head]:
            remedy = f"In the other order of its axes, {c_name} fits."
        elif a.shape[src_token] == c.shape[dst_head]:
            remedy = f"In the other order of its axes, {a_name} fits."
        checks.extent(
            c.shape[dst_head], a.shape[src_head], f"the number of heads of {c_name}", operation, detail, remedy
        )
        width = format.columns(c.shape[2]) if format else c.shape[2]
        checks.extent(width, a.shape[2], f"the head width of {c_name}", operation, detail)
    checks.same_dtype(src[0], src[-1], src_names[0], src_names[-1], operation)
    checks.same_dtype(dst[0], dst[-1], dst_names[0], dst_names[-1], operation)
    for axis, what in ((src_token, "tokens"), (src_head, "heads")):
        detail = f"{src_names[0]}: {describe(src[0])}, {src_names[-1]}: {describe(src[-1])}"
        checks.extent(
            src[-1].shape[axis], src[0].shape[axis], f"the number of {what} of {src_names[-1]}", operation, detail
        )
    capacity, heads = dst[0].shape[dst_slot], src[0].shape[src_head]
    detail = f"{dst_names[0]}: {describe(dst[0])}, {dst_names[-1]}: {describe(dst[-1])}"
    checks.extent(dst[-1].shape[dst_slot], capacity, f"the capacity of {dst_names[-1]}", operation, detail)
    window = checks.window_of(window, capacity, operation)
    offset, tokens = checks.source_range(src_offset, num_tokens, src[0].shape[src_token], operation, names)
    widths = [a.shape[2] for a in src]
    streams = [i for i, w in enumerate(widths) if w]

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        sources, targets, scales = arrays[0:pairs:2], arrays[1:pairs:2], arrays[pairs:]
        bound = bind_copy(
            live,
            operation,
            src=[
                Rows(
                    sources[i],
                    token=sources[i].strides[src_token],
                    head=sources[i].strides[src_head],
                    first=offset * sources[i].strides[src_token],
                )
                for i in streams
            ],
            dst=[
                Rows(
                    targets[i],
                    token=targets[i].strides[dst_slot],
                    head=targets[i].strides[dst_head],
                    format=formats[i],
                    scale=scale_of_groups(scales[i], token=dst_slot, head=dst_head) if scales else None,
                )
                for i in streams
            ],
            widths=[widths[i] for i in streams],
            heads=heads,
            tokens=tokens,
            dst_place=Placement("ring", ring=window, keep=max(0, tokens - window)) if window else LINEAR,
        )
        return [bound]

    nothing = tokens == 0 or heads == 0 or not streams
    launches = None if nothing else bind
    return CopyPlan(live, operation, array_names, launches, tokens, capacity, window, names, len(views) - pairs)


def linearize(cache: Array, out: Array, *, length: int, cache_layout: str = "head_major") -> None:
    """Copy the tokens of a ring in temporal order, oldest token first, in one launch.

    Token ``i`` of ``out`` is the token at absolute position ``length - n + i``, with ``n = min(length, capacity)``.

    Args:
        cache: (H, capacity, D) head-major or (capacity, H, D) token-major; the ring has ``capacity`` slots.
        out: (H, n, D) or (n, H, D), in the cache's layout and dtype.
        length: tokens ever written, which may be more than the capacity.
        cache_layout: "head_major" or "token_major".

    Raises:
        ShapeError: ``out`` does not hold exactly ``n`` tokens, or overlaps the cache.
        DTypeError, PositionError, OptionError: as in `copy`.

    Exactness: bit-exact.
    Cost: each of the ``n`` rows is read once and written once; one launch.
    Source: ``linearize_ring_bytes``.

    Examples:
        >>> import numpy as np, tikv
        >>> ring = np.array([[[4.0], [5.0], [3.0]]], np.float32)
        >>> out = np.empty_like(ring)
        >>> tikv.linearize(ring, out, length=5)
        >>> out.ravel().tolist()
        [3.0, 4.0, 5.0]
    """
    operation = "linearize"
    live = runtime_of(cache, out)
    slot, head = token_and_head_axes(cache_layout, "cache_layout", operation)
    ring, to = view(cache, "cache", operation), view(out, "out", operation)
    named = (("cache", ring), ("out", to))
    checks.on_device(named, live, operation)
    for name, a in named:
        checks.rank(a, (3,), name, "(H, capacity, D)" if head == 0 else "(capacity, H, D)", operation)
    checks.readable(ring, "cache", operation)
    checks.writable(to, "out", operation)
    checks.same_dtype(ring, to, "cache", "out", operation)
    length = checks.integer(length, "length", operation)
    capacity, heads, width = ring.shape[slot], ring.shape[head], ring.shape[2]
    launch.refuse_during_capture(live, operation, "a length on the host", launch.OUTSIDE_CAPTURES)
    tokens = min(length, capacity)
    detail = f"length={length}, cache: {describe(ring)}, out: {describe(to)}"
    checks.extent(to.shape[slot], tokens, "the number of tokens of out", operation, detail)
    checks.extent(to.shape[head], heads, "the number of heads of out", operation, detail)
    checks.extent(to.shape[2], width, "the head width of out", operation, detail)

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        source, target = arrays
        bound = bind_copy(
            live,
            operation,
            src=[Rows(source, token=source.strides[slot], head=source.strides[head])],
            dst=[Rows(target, token=target.strides[slot], head=target.strides[head])],
            widths=[width],
            heads=heads,
            tokens=tokens,
            src_place=Placement("ring", position=reduced_position(length - tokens, 0, capacity), ring=capacity),
        )
        return [bound]

    nothing = tokens == 0 or heads == 0 or width == 0
    Plan(live, operation, ("cache", "out"), (False, True), None if nothing else bind).run((ring, to))
