"""Decode attention over what a cache holds, where it lies: contiguous caches, rings behind sinks, page pools.

`decode_attention` and `paged_decode_attention` describe their arrays as a `Cache`; a `Form` checks the queries against
it, chooses splits and kernel, and launches. Several splits leave parts that a second launch merges; `merge_states`
does the same for results that the caller has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import ALIGNMENT, ArrayView, CacheArray, Memory, describe, is_contiguous, new_like, view
from tikv.errors import ArchError, CapacityError, DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks
from tikv.ops.paged import LAYOUTS, host_indices, index_array, pool_end, pool_scale, pool_shape, values_known
from tikv.ops.row_copy import CopyCall, End, Staging, keep_plan

QUERIES = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
STORED = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int8)
INTEGERS = (int, np.integer)
FOLLOWED = {"seq_lens": "lens", "context_lens": "lens", "block_tables": "table"}  # by parameter; may change in a graph
IMPLEMENTATIONS = ("auto", "taichi", "torch")
MOST_ROWS = 8  # query rows that share a pass over the keys
MOST_SPLITS = 1024
MAX_PLANS_OF_FORM = 64  # of the results' alignments and the splits that lengths on the host ask for
LEAST_KEYS = 256  # of a split that nobody asked for
SERIAL_PRODUCTS = 1 << 18  # on CPU, below this one thread is done before another is awake
GPU_BLOCKS = {"cuda": 1056, "vulkan": 64, "metal": 256}  # thread blocks that fill a device
RESIDENT = (3, 4, 5, 6)  # blocks that a CUDA multiprocessor holds at once, by kernel
BUSY = 0.9  # of the multiprocessors, on average over the blocks' waves: enough


class Cache(NamedTuple):
    """What attention reads: K and V, how their slots are found, and the scales of int8."""

    k: End
    v: End
    heads: int
    width: int
    width_v: int
    place: str  # "linear", "ring" or "table"
    capacity: int  # tokens that a length may count; slots, or what the table can name
    page: int = 0
    blocks: int = 0
    sinks: int = 0
    ring: int = 0
    scales: tuple[ArrayView, ...] = ()
    scale_strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # batch, block, step, head


class Question(NamedTuple):
    """What is asked of a cache, without the arrays."""

    scale: float | None
    causal: bool
    span: int | None  # tokens behind the sinks that a query sees
    softcap: float | None
    splits: int | None
    base2: bool
    mass: bool = False


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seq_lens: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    ring: bool = False,
    sinks: int = 0,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    return_mass: bool = False,
    lse_base2: bool = False,
    first_valid: int | None = None,
    impl: str = "auto",
) -> Any:
    """Attention of the newest tokens' queries over contiguous caches or rings, read in place.

    Query ``i`` of T belongs to the token at position ``seq_lens[b] - T + i`` and sees the tokens up to itself.

    Args:
        q: (B, Hq, D) or (B, Hq, T, D), float32, float16 or bfloat16; any strides with a contiguous last axis.
        k_cache, v_cache: (B, H, capacity, D) and (B, H, capacity, D_v), H dividing Hq: float32, float16, bfloat16, or
            int8 with scales; any strides with a contiguous last axis. Query head ``h`` reads head ``h // (Hq // H)``.
        seq_lens: (B,) int32 or int64, on the host or the device: tokens of each sequence, the newest included; or one
            int for all. For a ring it counts all tokens ever written.
        scale: of q.k; None for ``1 / sqrt(D)``.
        causal: False lets every query see what the newest sees.
        window: tokens a query sees, itself and the sinks included; for a ring also the number of slots in use.
        ring: the slots behind the sinks wrap, as `copy` with ``window`` writes them; without ``window`` all do.
        sinks: first tokens that stay visible in spite of the window.
        k_scale, v_scale: (B, H, capacity) float16 or float32, of int8 caches and of no other.
        return_lse: also return the log-sum-exp of each query's scaled scores.
        out: (B, Hq, D_v) or (B, Hq, T, D_v), of q's dtype.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        num_splits: parts that the keys are read in, side by side; None chooses. The result is the same within rounding.
        return_mass: also return how much weight each slot got, float32 (B, H, capacity), summed over the query heads of
            the KV head and over the queries: what eviction methods rank tokens by. Slots that nobody sees have 0.
        lse_base2: the log-sum-exp in base 2 rather than e.
        first_valid: oldest position behind the sinks that is still there, for a ring that was trimmed.
        impl: "taichi"; "torch", its own attention over the same memory, for plain contiguous caches; or "auto". By
            torch's a NaN in a key that only the newer of several queries see reaches all of them.

    Returns:
        ``out``, or a new array of q's kind (NumPy, torch, else `CacheArray`); with ``return_lse`` also the log-sum-exp,
        float32 (B, Hq) or (B, Hq, T), and with ``return_mass`` the mass. A query that sees nothing gets 0 and -inf.

    Raises:
        PositionError: a length on the host is negative or shorter than T. One that only the device knows is bounded.
        CapacityError: a length on the host beyond the capacity, or a window that the sinks or the capacity do not fit.
        ShapeError, DTypeError, OptionError: arrays that do not agree, int8 without scales, an unknown ``impl``.

    Exactness: products and sums in float32, one rounding at the end; not bit-exact across splits or back ends. A NaN in
        a query, or in a key that it sees, need not show in the result.
    Cost: the visible keys and values are read once for all query heads of a group; one launch, two with
        splits. ``return_mass`` is one more launch, which reads K again for every query head.
    Source: ``sdpa_decode``, ``flash_attn_vec``, ``flash_attention``, ``FlashDecodingPlan``.

    Example:
        >>> import numpy as np, tikv
        >>> k, v = np.zeros((1, 1, 4, 2), np.float32), np.arange(8, dtype=np.float32).reshape(1, 1, 4, 2)
        >>> tikv.decode_attention(np.ones((1, 2, 2), np.float32), k, v, np.array([3])).tolist()
        [[[2.0, 3.0], [2.0, 3.0]]]
    """
    operation = "decode_attention"
    live = runtime.current()
    k, v = view(k_cache, "k_cache", operation), view(v_cache, "v_cache", operation)
    arrays, length = {"q": view(q, "q", operation), "k": k, "v": v}, 0
    if isinstance(seq_lens, INTEGERS):
        length = checks.integer(seq_lens, "seq_lens", operation)
    else:
        seq_lens = index_array(seq_lens)  # a view does not keep an array alive
        arrays["lens"] = view(seq_lens, "seq_lens", operation)
    if k_scale is not None or v_scale is not None:
        _add_scales(arrays, k_scale, v_scale, operation)
    scale, softcap = real(scale, "scale", operation), real(softcap, "softcap", operation)
    window = checks.integer_or_none(window, "window", operation)
    num_splits = checks.integer_or_none(num_splits, "num_splits", operation)
    sinks = checks.integer(sinks, "sinks", operation)
    options = (scale, causal, window, ring, sinks, softcap, num_splits, lse_base2, return_mass)
    key = form_key(operation, arrays, options)
    form = live.plans.get(key)
    if form is None:
        cache = _contiguous(arrays, window, ring, sinks, live, operation)
        span = None if window is None else window - cache.sinks
        question = Question(scale, causal, span, softcap, num_splits, lse_base2, return_mass)
        form = keep_plan(live, key, Form(live, operation, arrays, cache, k.shape[0], question))
    oldest = 0
    if first_valid is not None:
        oldest = checks.integer(first_valid, "first_valid", operation, high=2**31 - 1)
    checks.option(impl, "impl", operation, IMPLEMENTATIONS)
    return form.attend(q, arrays, out, return_lse, impl, length, oldest)


def _contiguous(
    arrays: dict[str, ArrayView], window: int | None, ring: bool, sinks: int, live: runtime.Runtime, operation: str
) -> Cache:
    """What contiguous caches and rings hold, checked."""
    names = {"k": "k_cache", "v": "v_cache", "lens": "seq_lens"}
    checks.on_device([(names.get(name, name), a) for name, a in arrays.items()], live, operation)
    k, v = arrays["k"], arrays["v"]
    for name, a in (("k_cache", k), ("v_cache", v)):
        checks.rank(a, (4,), name, "(B, H, capacity, D)", operation)
        checks.readable(a, name, operation)
    detail = f"k_cache: {describe(k)}, v_cache: {describe(v)}"
    for axis, what in enumerate(("batch", "number of heads", "capacity")):
        checks.extent(v.shape[axis], k.shape[axis], f"the {what} of v_cache", operation, detail)
    capacity = k.shape[2]
    window = checks.window_of(window, capacity, operation) if ring else _window(window, operation)
    slots = capacity if window is None else window
    if sinks and (window is not None or ring) and sinks >= slots:
        raise CapacityError(f"{operation}: sinks={sinks} leave nothing of the window of {slots}. Use sinks < {slots}.")
    scales = _scales(arrays, operation)
    for name, a in zip(("k_scale", "v_scale"), scales, strict=False):
        if a.shape != k.shape[:3]:
            raise ShapeError(f"{operation}: {name} is {describe(a)} where (B, H, capacity) = {k.shape[:3]} is needed.")
    ringed = ring or window is not None
    return contiguous_cache(k, v, scales, sinks=sinks if ringed else 0, ring=slots - sinks if ring else 0)


def contiguous_cache(
    k: ArrayView, v: ArrayView, scales: tuple[ArrayView, ...], *, sinks: int = 0, ring: int = 0
) -> Cache:
    """What attention reads of (B, H, capacity, D) arrays; `ring` slots go round behind the sinks, 0 for none."""
    return Cache(
        k=End(k, group=k.strides[0], head=k.strides[1], step=k.strides[2]),
        v=End(v, group=v.strides[0], head=v.strides[1], step=v.strides[2]),
        heads=k.shape[1],
        width=k.shape[3],
        width_v=v.shape[3],
        place="ring" if ring else "linear",
        capacity=k.shape[2],
        sinks=sinks,
        ring=ring,
        scales=scales,
        scale_strides=(scales[0].strides[0], 0, scales[0].strides[2], scales[0].strides[1]) if scales else (0, 0, 0, 0),
    )


def paged_decode_attention(
    q: Any,
    k_pool: Any,
    v_pool: Any,
    block_tables: Any,
    context_lens: Any,
    *,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    causal: bool = True,
    softcap: float | None = None,
    num_splits: int | None = None,
    lse_base2: bool = False,
    impl: str = "auto",
) -> Any:
    """Attention of the newest tokens' queries over page pools, read in place: `decode_attention` through a block table.

    Position ``p`` of sequence ``b`` is slot ``p % bs`` of block ``block_tables[b, p // bs]``.

    Args:
        q: (B, Hq, D) or (B, Hq, T, D).
        k_pool, v_pool: as in `write_slots`, in the same layouts; int8 with scales.
        block_tables: (B, max_blocks) int32 or int64, on the host or the device; entries behind a context may be
            negative.
        context_lens: (B,) int32 or int64: tokens of each sequence, the newest included; or one int for all.
        layout: "NHD", "HND" or "VLLM".
        window: tokens a query sees, itself included.
        k_scale, v_scale: (N, bs, H), of int8 pools and of no other.
        scale, return_lse, out, causal, softcap, num_splits, lse_base2, impl: as in `decode_attention`; torch has no
            attention over pages, so "auto" is "taichi".

    Returns:
        As `decode_attention`.

    Raises:
        PositionError: a context on the host that is negative, shorter than T or longer than its table; a block of it,
            on the host, that is not in the pool. Those that only the device knows are bounded, or seen by nobody.
        ShapeError, DTypeError, OptionError, CapacityError: as `decode_attention`.

    Exactness, cost: as `decode_attention`.
    Source: ``paged_decode_attention``, ``int8_paged_decode_attention``, ``BatchPagedDecodePlan``.

    Example:
        >>> import numpy as np, tikv
        >>> k, v = np.zeros((3, 2, 1, 1), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2, 1, 1)
        >>> q, table = np.ones((1, 1, 1), np.float32), np.array([[2, 0, -1]])
        >>> tikv.paged_decode_attention(q, k, v, table, np.array([3])).tolist()
        [[[3.0]]]
    """
    operation = "paged_decode_attention"
    live = runtime.current()
    block_tables = index_array(block_tables)  # a view does not keep an array alive
    k, v = view(k_pool, "k_pool", operation), view(v_pool, "v_pool", operation)
    table = view(block_tables, "block_tables", operation)
    arrays, length = {"q": view(q, "q", operation), "k": k, "v": v, "table": table}, 0
    if isinstance(context_lens, INTEGERS):
        length = checks.integer(context_lens, "context_lens", operation)
    else:
        context_lens = index_array(context_lens)
        arrays["lens"] = view(context_lens, "context_lens", operation)
    if k_scale is not None or v_scale is not None:
        _add_scales(arrays, k_scale, v_scale, operation)
    if checks.option(impl, "impl", operation, IMPLEMENTATIONS) == "torch":
        raise OptionError(f"{operation}: torch has no attention over pages. Use impl='taichi'.")
    scale, softcap = real(scale, "scale", operation), real(softcap, "softcap", operation)
    window = checks.integer_or_none(window, "window", operation)
    num_splits = checks.integer_or_none(num_splits, "num_splits", operation)
    options = (layout, scale, causal, window, softcap, num_splits, lse_base2)
    key = form_key(operation, arrays, options)
    form = live.plans.get(key)
    if form is None:
        cache = _pages(arrays, layout, live, operation)
        question = Question(scale, causal, _window(window, operation), softcap, num_splits, lse_base2)
        form = keep_plan(live, key, Form(live, operation, arrays, cache, table.shape[0], question))
    return form.attend(q, arrays, out, return_lse, "taichi", length)


def _pages(arrays: dict[str, ArrayView], layout: str, live: runtime.Runtime, operation: str) -> Cache:
    """What page pools hold behind a block table, checked."""
    checks.option(layout, "layout", operation, tuple(LAYOUTS))
    names = {"k": "k_pool", "v": "v_pool", "lens": "context_lens", "table": "block_tables"}
    checks.on_device([(names.get(name, name), a) for name, a in arrays.items()], live, operation)
    k, v, table = arrays["k"], arrays["v"], arrays["table"]
    shapes = []
    for stream, (name, a) in enumerate((("k_pool", k), ("v_pool", v))):
        checks.readable(a, name, operation)
        shapes.append(pool_shape(a, LAYOUTS[layout][stream], name, operation))
    detail = f"k_pool: {describe(k)}, v_pool: {describe(v)}, layout {layout}"
    for what in ("blocks", "page", "heads"):
        checks.extent(getattr(shapes[1], what), getattr(shapes[0], what), f"the {what} of v_pool", operation, detail)
    checks.indices(table, "block_tables", operation)
    checks.rank(table, (2,), "block_tables", "(B, max_blocks)", operation)
    shape = shapes[0]
    scales = _scales(arrays, operation)
    for name, a in zip(("k_scale", "v_scale"), scales, strict=False):
        checks.readable(a, name, operation)
        pool_scale(a, shape, name, operation)
    return Cache(
        k=pool_end(k, LAYOUTS[layout][0]),
        v=pool_end(v, LAYOUTS[layout][1]),
        heads=shape.heads,
        width=shape.width,
        width_v=shapes[1].width,
        place="table",
        capacity=table.shape[1] * shape.page,
        page=shape.page,
        blocks=shape.blocks,
        scales=scales,
        scale_strides=(0, scales[0].strides[0], scales[0].strides[1], scales[0].strides[2]) if scales else (0, 0, 0, 0),
    )


def _window(window: Any, operation: str) -> int | None:
    return None if window is None else checks.integer(window, "window", operation, low=1)


def real(value: Any, name: str, operation: str) -> float | None:
    """A number of the options as a float, so that equal ones have one form."""
    if value is None or type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{operation}: {name}={value!r} is no number. Use a float, or None.") from error


def _add_scales(arrays: dict[str, ArrayView], k_scale: Any, v_scale: Any, operation: str) -> None:
    if k_scale is None or v_scale is None:
        missing = "k_scale" if k_scale is None else "v_scale"
        raise ShapeError(f"{operation}: {missing} is missing. Pass both scales, or neither.")
    arrays["k_scale"] = view(k_scale, "k_scale", operation)
    arrays["v_scale"] = view(v_scale, "v_scale", operation)


def _scales(arrays: dict[str, ArrayView], operation: str) -> tuple[ArrayView, ...]:
    """The scales of K and V, where there are any; they lie alike."""
    if "k_scale" not in arrays:
        return ()
    a, b = arrays["k_scale"], arrays["v_scale"]
    if a.strides != b.strides and a.shape == b.shape:
        raise ShapeError(f"{operation}: k_scale has strides {a.strides}, v_scale {b.strides}. Lay them out alike.")
    return a, b


class Queries(NamedTuple):
    """What the shape and strides of q or of the result say."""

    batch: int
    heads: int
    queries: int
    width: int
    strides: tuple[int, int, int]  # of a sequence, a head, a query


def _queries(a: ArrayView, name: str, operation: str) -> Queries:
    checks.rank(a, (3, 4), name, "(B, Hq, D) or (B, Hq, T, D)", operation)
    checks.readable(a, name, operation)
    tokens, step = (a.shape[2], a.strides[2]) if a.ndim == 4 else (1, 0)
    return Queries(a.shape[0], a.shape[1], tokens, a.shape[-1], (a.strides[0], a.strides[1], step))


def form_key(operation: str, arrays: dict[str, ArrayView], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call's `Form` is kept by; True is no 1 among the options."""
    return (operation, *[a.key for a in arrays.values()], *options, *map(type, options))


class Form:
    """A kind of call: arrays of one form, one set of options. What follows from those is checked once, when it is made.

    Left to each call are the values of lengths and tables that lie on the host, and the result.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        operation: str,
        arrays: dict[str, ArrayView],
        cache: Cache,
        batch: int,
        question: Question,
    ) -> None:
        q = arrays["q"]
        self.live, self.operation, self.question = live, operation, question
        self.asked = _queries(q, "q", operation)
        _check(operation, arrays, self.asked, cache, batch, question)
        self.cache = cache._replace(
            k=cache.k._replace(array=cache.k.array.bare()),
            v=cache.v._replace(array=cache.v.array.bare()),
            scales=tuple(a.bare() for a in cache.scales),
        )
        self.shape = (*q.shape[:-1], cache.width_v)
        self.lse_shape = q.shape[:-1]
        self.mass_shape = (batch, cache.heads, cache.capacity)
        self.empty = 0 in self.shape
        self.device_only = "lens" in arrays and not values_known(arrays["lens"], live)
        self.not_torch = _why_not_torch(live, arrays, cache, question)
        self.plans: dict[tuple[Any, ...], Plan] = {}
        self.last_shares = (-1, (0, 0))  # the longest sequence they were found for

    def attend(
        self,
        like: Any,
        arrays: dict[str, ArrayView],
        out: Any,
        return_lse: bool,
        impl: str,
        length: int = 0,
        first_valid: int = 0,
    ) -> Any:
        """Attention over arrays of this form.

        Args:
            like: what the caller gave as q; new arrays are of its kind.
            arrays: q, k, v; lens, table, k_scale and v_scale where there are any. The results are added.
            out: array for the result, or None.
            return_lse: whether the log-sum-exp is wanted.
            impl: one of `IMPLEMENTATIONS`.
            length: of all sequences, where there is no array of lengths.
            first_valid: oldest position behind the sinks that is still there.
        """
        live, operation, question, cache = self.live, self.operation, self.question, self.cache
        if first_valid and "lens" in arrays:  # a length on the host is made to fit 32 bits together with it
            checks.integer(first_valid, "first_valid", operation, high=2**31 - 1)
        longest = cache.capacity if self.device_only else self._longest(arrays, length)
        result = new_like(like, self.shape, arrays["q"].dtype, live) if out is None else out
        arrays["out"] = to = view(result, "out", operation)
        if out is not None:
            checks.on_device([("out", to)], live, operation)
            checks.writable(to, "out", operation)
            checks.same_dtype(arrays["q"], to, "q", "out", operation)
            if to.shape != self.shape:
                raise ShapeError(f"{operation}: out is {describe(to)} where {self.shape} is needed.")
            checks.disjoint([(n, a, n == "out") for n, a in arrays.items()], operation)
        if impl != "taichi" and self._torch_serves(arrays, return_lse, impl):
            _attend_torch(arrays, self, longest, first_valid)
            return result
        wanted = [result]
        if return_lse:
            wanted.append(new_like(like, self.lse_shape, dtypes.float32, live))
            arrays["lse"] = view(wanted[-1], "lse", operation)
        if question.mass:
            wanted.append(new_like(like, self.mass_shape, dtypes.float32, live, zeroed=True))
            arrays["mass"] = view(wanted[-1], "mass", operation)
        if not self.empty:
            splits, workers = self._shares(longest)
            key = (splits, workers, return_lse, *[a.key for a in arrays.values()])
            plan = self.plans.get(key)
            if plan is None:
                plan = Plan(live, operation, arrays, self.asked, cache, question, splits, workers)
                if len(self.plans) >= MAX_PLANS_OF_FORM:
                    self.plans.clear()
                self.plans[key] = plan
            plan.run(arrays, length, first_valid)
        return tuple(wanted) if len(wanted) > 1 else result

    def _longest(self, arrays: dict[str, ArrayView], length: int) -> int:
        """Check the lengths that the host knows; the most tokens a sequence may have."""
        cache, operation = self.cache, self.operation
        needed = self.asked.queries if self.question.causal else 0
        limit = checks.MAX_POSITION if cache.place == "ring" else cache.capacity
        if "lens" not in arrays:
            _check_length(length, needed, limit, cache, "the length", operation)
            if "table" in arrays:
                lens = np.full(arrays["table"].shape[0], length)
                _check_table(operation, host_indices(arrays["table"], self.live), lens, cache)
            return length
        known = host_indices(arrays["lens"], self.live)
        if known is None:
            return cache.capacity
        if known.size == 0:
            return 0
        shortest, longest = (int(known[0]),) * 2 if known.size == 1 else (int(known.min()), int(known.max()))
        if longest > limit or shortest < needed:
            _check_length(longest, needed, limit, cache, f"length {int(known.argmax())}", operation)
            _check_length(shortest, needed, limit, cache, f"length {int(known.argmin())}", operation)
        if "table" in arrays:
            _check_table(operation, host_indices(arrays["table"], self.live), known, cache)
        return longest

    def _shares(self, longest: int) -> tuple[int, int]:
        """(splits, threads) for sequences of at most so many tokens."""
        known, shares = self.last_shares
        if known != longest:
            live, asked, cache = self.live, self.asked, self.cache
            keys = min(longest, cache.ring + cache.sinks if cache.place == "ring" else cache.capacity)
            shares = self.question.splits or _splits(live, asked, cache, keys), _workers(live, asked, cache, keys)
            self.last_shares = longest, shares
        return shares

    def again(
        self, live: runtime.Runtime, operation: str, arrays: Mapping[str, ArrayView], numbers: Mapping[str, int]
    ) -> tuple[tuple[int, int, bool], tuple[int, ...]]:
        """For a graph: check lengths and blocks that the host knows; what to choose the launches by, and entries."""
        found = {FOLLOWED[name]: a for name, a in arrays.items() if name in FOLLOWED}
        length = numbers.get("seq_lens", numbers.get("context_lens", 0))
        oldest = checks.integer(numbers.get("first_valid", 0), "first_valid", operation, high=2**31 - 1)
        on_host = "lens" not in found or oldest > 0
        entries = _reduced(self.cache, self.asked.queries, length, oldest) if on_host else ()
        return (*self._shares(self._longest(found, length)), on_host), entries

    def _torch_serves(self, arrays: dict[str, ArrayView], return_lse: bool, impl: str) -> bool:
        """Whether torch's own attention is to be used; with impl="torch" it must be."""
        if impl == "auto" and (self.live.is_cpu or "torch" not in sys.modules):
            return False
        reason = self.not_torch
        if not reason and return_lse:
            reason = "torch gives no log-sum-exp"
        if not reason and "lens" in arrays:
            known = host_indices(arrays["lens"], self.live)
            if known is None or known.size == 0 or known.min() != known.max():
                reason = "torch attends over one length, known on the host"
        if reason and impl == "torch":
            raise OptionError(f"{self.operation}: impl='torch' cannot do this: {reason}. Use impl='taichi'.")
        return not reason


def _check(
    operation: str, arrays: dict[str, ArrayView], asked: Queries, cache: Cache, batch: int, question: Question
) -> None:
    """Every precondition that is left of the form of a call."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if q.dtype not in QUERIES:
        raise DTypeError(f"{operation}: q is {describe(q)}; queries are float32, float16 or bfloat16.")
    if k.dtype not in STORED:
        raise DTypeError(f"{operation}: K is {describe(k)}; attention reads float32, float16, bfloat16 and int8.")
    checks.same_dtype(k, v, "K", "V", operation)
    if (k.dtype is dtypes.int8) != bool(cache.scales):
        rule = "int8 needs k_scale and v_scale" if k.dtype is dtypes.int8 else "only int8 has scales"
        raise DTypeError(f"{operation}: K is {describe(k)}; {rule}.")
    for scale in cache.scales:
        if scale.dtype not in (dtypes.float16, dtypes.float32):
            raise DTypeError(f"{operation}: a scale is {describe(scale)}; int8 scales are float16 or float32.")
        checks.same_dtype(cache.scales[0], scale, "k_scale", "v_scale", operation)
    checks.extent(asked.batch, batch, "the batch of q", operation, f"q: {describe(q)}, K: {describe(k)}")
    checks.extent(asked.width, cache.width, "the head width of q", operation, f"q: {describe(q)}, K: {describe(k)}")
    if cache.heads == 0 or asked.heads % cache.heads:
        raise ShapeError(
            f"{operation}: {asked.heads} query heads do not divide among {cache.heads} KV heads (q: {describe(q)}, K: "
            f"{describe(k)}). Use a multiple of {cache.heads}."
        )
    for name, a, width in (("K", k, cache.width), ("V", v, cache.width_v)):
        if width == 0:
            raise ShapeError(f"{operation}: {name} is {describe(a)}, of width 0. Use a head width of at least 1.")
    for name, value in (("scale", question.scale), ("softcap", question.softcap)):
        if value is not None and not (math.isfinite(value) and (name == "scale" or value > 0)):
            wanted = "finite" if name == "scale" else "positive"
            raise OptionError(f"{operation}: {name}={value} is no {wanted} number.")
    if question.splits is not None:
        checks.integer(question.splits, "num_splits", operation, low=1, high=MOST_SPLITS)
    if "lens" in arrays:
        checks.indices(arrays["lens"], "lengths", operation)
        checks.rank(arrays["lens"], (1,), "lengths", "(B,)", operation)
        checks.extent(arrays["lens"].shape[0], batch, "the number of lengths", operation, f"K: {describe(k)}")
    if "table" in arrays:
        checks.extent(arrays["table"].shape[0], batch, "the batch of block_tables", operation)


def _check_length(length: int, queries: int, limit: int, cache: Cache, what: str, operation: str) -> None:
    if length > limit:
        holds = f"the table names {cache.capacity} slots" if cache.place == "table" else f"capacity={cache.capacity}"
        error = PositionError if cache.place == "table" else CapacityError
        raise error(f"{operation}: {what} is {length}, and {holds}. Use lengths of at most {limit}, or ring=True.")
    if length < 0 or 0 < length < queries:
        raise PositionError(
            f"{operation}: {what} is {length} for {queries} queries, whose tokens count. Use at least {queries}, or 0."
        )


def _check_table(operation: str, table: np.ndarray[Any, Any] | None, lens: np.ndarray[Any, Any], cache: Cache) -> None:
    """Each block of each context is in the pool."""
    if table is None or table.size == 0:
        return
    used = np.arange(table.shape[1]) < -(-lens.astype(np.int64)[:, None] // cache.page)
    wrong = used & ((table < 0) | (table >= cache.blocks))
    if wrong.any():
        b, i = (int(x) for x in np.argwhere(wrong)[0])
        raise PositionError(
            f"{operation}: block_tables[{b}, {i}]={int(table[b, i])} is none of the pool's {cache.blocks} blocks, and "
            f"the context of {int(lens[b])} tokens needs it."
        )


def _splits(live: runtime.Runtime, asked: Queries, cache: Cache, keys: int) -> int:
    """Enough parts to fill the device, none with fewer than `LEAST_KEYS` keys."""
    group = asked.heads // cache.heads
    tasks = asked.batch * cache.heads * -(-asked.queries * group // rows_of_task(asked.queries * group))
    wanted = 4 * live.threads if live.is_cpu else GPU_BLOCKS[live.arch]
    most = max(1, min(keys // LEAST_KEYS, 128))
    least = min(-(-wanted // tasks) if tasks < wanted else 1, most)
    return _whole_waves(tasks, least, most, launch.multiprocessors(live)) if live.is_cuda else least


@functools.cache
def _whole_waves(tasks: int, least: int, most: int, multiprocessors: int) -> int:
    """Parts, `least` or some more, for which the last wave of blocks leaves few multiprocessors idle.

    It does so for any number of blocks that a multiprocessor may hold. 256 tasks in 5 parts keep 132 multiprocessors of
    4 blocks busy for 2.4 waves of 3, and reach 0.81 of their speed; in 12 parts for 5.8 of 6.
    """
    found, best = least, 0.0
    for splits in range(least, min(most, 4 * least) + 1):
        waves = [tasks * splits / (multiprocessors * n) for n in RESIDENT]
        busy = min(n / math.ceil(n) for n in waves)
        if busy >= BUSY:
            return splits
        if busy > best:
            found, best = splits, busy
    return found


def _heads_together(asked: Queries, cache: Cache, splits: int, workers: int) -> tuple[int, int, int]:
    """On CPU: KV heads of a task, keys of a head that it reads before the next head's, whose heads lie side by side.

    Where those of a token or of a page do, a chunk of all is loaded in the order of memory before it is computed with.
    Few sequences are cut into tasks of fewer heads, so that each worker has one.
    """
    cpu = importlib.import_module("tikv.kernels.attention_cpu")
    near, side = cpu.CHUNK, 0
    if cache.k.head < cache.k.step and cache.v.head < cache.v.step:
        side = cpu.BY_TOKENS
    elif cache.place == "table" and cache.k.head < cache.k.block:
        near, side = min(cache.page + cache.page % 2, cpu.CHUNK), cpu.BY_PAGES
    else:
        return 1, near, side
    if cache.k.inner[0] or cache.v.inner[0]:
        side = 0  # rows in pieces are not loaded ahead
    rows = rows_of_task(asked.queries * (asked.heads // cache.heads))
    most = cpu.heads_together(rows, cache.width, cache.width_v, cache.heads)
    blocks = -(-workers // (asked.batch * splits))
    return min(most, -(-cache.heads // blocks)), near, side


def rows_of_task(rows: int) -> int:
    """Query rows that one task computes, of those that share a KV head."""
    blocks = -(-rows // MOST_ROWS)
    return -(-rows // blocks)


def _workers(live: runtime.Runtime, asked: Queries, cache: Cache, keys: int) -> int:
    """Threads that attend on CPU: one for little work, else all."""
    products = asked.batch * asked.heads * asked.queries * keys * (cache.width + cache.width_v)
    return live.threads if live.is_cpu and products >= SERIAL_PRODUCTS else 1


def _reduced(cache: Cache, queries: int, length: int, first_valid: int) -> tuple[int, int]:
    """A length and a first position that fit 32 bits and leave the same tokens in the same slots."""
    if cache.place != "ring" or length < 2**30:
        return length, first_valid
    enough = cache.sinks + 2 * cache.ring + queries
    short = enough + (length - enough) % cache.ring
    return short, max(0, first_valid - (length - short))


class Plan:
    """A checked attention: its launches, bound at the first run over arrays that have addresses, later given new ones.

    Parts of splits, and log-sum-exps nobody asked for, go to memory that all plans of a runtime share.
    """

    def __init__(
        self,
        live: runtime.Runtime,
        operation: str,
        arrays: dict[str, ArrayView],
        asked: Queries,
        cache: Cache,
        question: Question,
        splits: int,
        workers: int,
    ) -> None:
        self.live, self.operation = live, operation
        self.splits, self.workers = splits, workers
        self.asked, self.question = asked, question
        self.cache = cache
        self.scale = cache.scales[0].dtype.short if cache.scales else ""
        self.common = importlib.import_module("tikv.kernels.attention")
        self.rows = asked.batch * asked.heads * asked.queries
        parts = self.rows * splits if splits > 1 else 0
        self.part_bytes = parts * cache.width_v * 4
        self.own_lse = self.part_bytes + parts * 4  # where a log-sum-exp goes that nobody asked for
        self.work = -(-(self.own_lse + (0 if "lse" in arrays else self.rows) * 4) // ALIGNMENT) * ALIGNMENT
        self.scratch_bytes = self.work
        self.together, self.near, self.side, self.work_floats = 1, 0, 0, 0
        if live.is_cpu:
            cpu = importlib.import_module("tikv.kernels.attention_cpu")
            shape = rows_of_task(asked.queries * (asked.heads // cache.heads)), cache.width, cache.width_v
            self.together, self.near, self.side = _heads_together(asked, cache, splits, workers)
            self.work_floats = cpu.work_floats(*shape, self.together)
            self.scratch_bytes += workers * self.work_floats * 4
        checks.integer(parts * cache.width_v, "elements of the parts of splits", operation, high=2**31 - 1)
        self.bounds: list[tuple[launch.Bound, list[str]]] | None = None
        self.scratch: Memory | None = None
        self.pointers: list[int] = []
        self.uses: list[list[tuple[launch.Bound, int]]] = []  # of each array, the arguments it is
        self.first_valid = 0
        self.staged = not live.is_cpu and any(a.device == "cpu" for a in arrays.values())

    def run(self, arrays: dict[str, ArrayView], length: int, first_valid: int) -> None:
        """Launch over these arrays, all sequences of this length where there is no array of lengths."""
        live, number = self.live, self.common.N
        length, first_valid = _reduced(self.cache, self.asked.queries, length, first_valid)
        with live.lock:
            scratch = _scratch(live, self.scratch_bytes)
            if self.staged:
                stage = Staging(live, list(arrays.values()), [n in ("out", "lse", "mass") for n in arrays])
                for bound, _ in self._bind(dict(zip(arrays, stage.arrays, strict=True)), scratch, length, first_valid):
                    bound.launch()
                stage.finish()
                return
            pointers = [a.ptr for a in arrays.values()]
            if self.bounds is None or scratch is not self.scratch or 0 in pointers:
                self.bounds = self._bind(arrays, scratch, length, first_valid)
                self.scratch, self.first_valid = scratch, first_valid
                self.uses = [
                    [(bound, i) for bound, names in self.bounds for i, n in enumerate(names) if n == name]
                    for name in arrays
                ]
            elif pointers != self.pointers:
                for old, new, uses, array in zip(self.pointers, pointers, self.uses, arrays.values(), strict=True):
                    if old != new:
                        for bound, i in uses:
                            bound.set_array(i, array)
            self.pointers = pointers
            # What lies on the host a CUDA graph would bake in: it is set anew each time, so that a capture refuses it.
            on_host = "lens" not in arrays or first_valid > 0 or first_valid != self.first_valid
            self.first_valid = first_valid
            for bound, names in self.bounds:
                if on_host:
                    bound.set_entry(len(names) + 1, number.length, length)
                    bound.set_entry(len(names) + 1, number.first_valid, first_valid)
                bound.launch()
            if 0 in pointers:
                self.bounds = None  # memory without an address must not be kept alive

    def _bind(
        self, arrays: dict[str, ArrayView], scratch: Memory, length: int, first_valid: int
    ) -> list[tuple[launch.Bound, list[str]]]:
        """The launches over these arrays: (bound, names of its array arguments) each."""
        live, cache, asked, question, common = self.live, self.cache, self.asked, self.question, self.common
        style, split = live.kernel_style, self.splits > 1
        k, v, q, to = (arrays[n] for n in ("k", "v", "q", "out"))
        group = asked.heads // cache.heads
        rows = group * asked.queries
        block = rows_of_task(rows)
        bits = self._word_bits(k, v, style)
        unit = bits // (k.dtype.itemsize * 8)
        for name, a in (("K", k), ("V", v)):
            checks.addressable(a, bits // 8, live, name, self.operation)
        choices = common.Choices(
            place=cache.place,
            page=cache.page,
            sinks=cache.sinks > 0,
            cache=k.dtype.short,
            bits=bits,
            scale=self.scale,
            k_inner=(cache.k.inner[0] // unit, cache.k.inner[1] // unit),
            v_inner=(cache.v.inner[0] // unit, cache.v.inner[1] // unit),
            query=q.dtype.short,
            out="f32" if split else to.dtype.short,
            width=cache.width,
            width_v=cache.width_v,
            group=group,
            rows=block,
            causal=question.causal,
            masked=question.causal and asked.queries > 1,
            softcap=question.softcap is not None,
            lens_bits=arrays["lens"].dtype.itemsize * 8 if "lens" in arrays else 0,
            table_bits=arrays["table"].dtype.itemsize * 8 if "table" in arrays else 0,
        )
        parts = scratch.array((max(1, self.part_bytes // 4),), dtypes.float32)
        part_lse = scratch.array((1,), dtypes.float32, self.part_bytes)
        full = {"lse": scratch.array((1,), dtypes.float32, self.own_lse), **arrays}
        targets = {"out": parts, "lse": part_lse} if split else {"out": full["out"], "lse": full["lse"]}

        def first(name: str, among: dict[str, ArrayView]) -> int:
            return among[name].offset // among[name].dtype.itemsize if name in among else 0

        def where(to: ArrayView, strides: tuple[int, int, int]) -> tuple[int, ...]:
            lens, table = arrays.get("lens"), arrays.get("table")
            batch, page, step, head = cache.scale_strides
            return tuple(
                common.Where(
                    *asked.strides, first("q", arrays), *strides, to.offset // to.dtype.itemsize,
                    *(n // unit for n in (cache.k.group, cache.k.block, cache.k.step, cache.k.head)),
                    k.offset * 8 // bits,
                    *(n // unit for n in (cache.v.group, cache.v.block, cache.v.step, cache.v.head)),
                    v.offset * 8 // bits,
                    batch, page, step, head, first("k_scale", arrays), first("v_scale", arrays),
                    lens.strides[0] if lens is not None else 0, first("lens", arrays),
                    *(table.strides if table is not None else (0, 0)), first("table", arrays),
                )
            )  # fmt: skip

        row_blocks = -(-rows // block)
        numbers = common.Which(
            tasks=asked.batch * -(-cache.heads // self.together) * row_blocks * self.splits,
            splits=self.splits,
            heads=cache.heads,
            queries=asked.queries,
            row_blocks=row_blocks,
            length=length,
            capacity=cache.capacity if cache.place != "table" or cache.blocks else 0,
            sinks=cache.sinks,
            span=common.FAR if question.span is None else min(question.span, common.FAR),
            ring=cache.ring,
            first_valid=first_valid,
            blocks=cache.blocks,
            lse_first=first("lse", targets),
            out_lse_first=first("lse", targets),
            part_first=first("out", targets),
            batch=asked.batch,
            heads_together=self.together,
            near=self.near,
            side=self.side,
            work_floats=self.work_floats,
        )
        scale = 1 / math.sqrt(cache.width) if question.scale is None else question.scale
        log2e = common.LOG2E
        cap = question.softcap
        factors = common.Factors(
            scale=scale * log2e if cap is None else scale / cap,
            cap=1.0 if cap is None else cap * log2e,
            lse=1.0 if question.base2 else math.log(2),
        )
        given = _queries(to, "out", self.operation).strides
        names = ["q", "k", "v", "lens", "table", "k_scale", "v_scale"]
        filled = [arrays.get(n, q) for n in names]
        factory, extra = self._factory(style, bits, block, choices.masked)
        kernel = launch.kernel(live, factory, *extra, split, choices)
        tasks = numbers.tasks * (1 if style == "cpu" else importlib.import_module("tikv.kernels.lanes").BLOCK)
        own = [scratch.array((1,), dtypes.float32, self.work)] if style == "cpu" else []
        attended = kernel.bind(
            tasks, *filled, targets["out"], targets["lse"], *own, where(to, given), tuple(numbers), tuple(factors)
        )
        found = [(attended, [*names, *(["", ""] if split else ["out", "lse"]), *([""] if own else [])])]
        if split:
            lanes = importlib.import_module("tikv.kernels.lanes")
            items = self.rows * {"cpu": 1, "cuda": lanes.BLOCK, "spirv": cache.width_v}[style]
            merged = choices._replace(out=to.dtype.short)
            merging = launch.kernel(
                live, common.make_merge, style, self.rows * self.splits * cache.width_v < SERIAL_PRODUCTS, merged
            )
            bound = merging.bind(
                items, parts, part_lse, to, full["lse"], where(to, given),
                tuple(numbers._replace(tasks=items, out_lse_first=first("lse", full))), tuple(factors),
            )  # fmt: skip
            found.append((bound, ["", "", "out", "lse"]))
        if question.mass:
            items = asked.batch * cache.heads * cache.capacity
            weighing = launch.kernel(live, common.make_mass, style, choices)
            names = ["q", "k", "lens", "table", "k_scale", "lse", "mass"]
            filled = [*(arrays.get(n, q) for n in names[:5]), full["lse"], arrays["mass"]]
            last = numbers._replace(tasks=items, out_lse_first=first("lse", full), mass_first=first("mass", arrays))
            bound = weighing.bind(items, *filled, where(to, given), tuple(last), tuple(factors))
            found.append((bound, names))
        return found

    def _word_bits(self, k: ArrayView, v: ArrayView, style: str) -> int:
        """Bits of a word of K and V: an element on CPU, elsewhere the widest at which every row starts."""
        itemsize, cache = k.dtype.itemsize, self.cache
        if style == "cpu":
            return itemsize * 8
        widest = importlib.import_module("tikv.kernels.attention_cuda").WIDEST if style == "cuda" else 0
        lanes = max(cache.width, cache.width_v) <= widest
        common = 8 if lanes and not cache.v.inner[0] else 4
        for end, a, width in ((cache.k, k, cache.width), (cache.v, v, cache.width_v)):
            jumps = (end.group, end.block, end.step, end.head, end.inner[1], end.inner[0] or width)
            common = math.gcd(common, a.ptr or 0, a.offset, *(n * itemsize for n in jumps))
        return max(itemsize, common & -common) * 8

    def _factory(self, style: str, bits: int, rows: int, masked: bool) -> tuple[Any, tuple[Any, ...]]:
        """The kernel's factory, and the choices it takes before the common ones."""
        if style == "cpu":
            return importlib.import_module("tikv.kernels.attention_cpu").make_attend_cpu, (self.workers,)
        if style == "cuda":
            cuda = importlib.import_module("tikv.kernels.attention_cuda")
            if bits == cuda.BITS:
                unit = bits // (self.cache.k.array.dtype.itemsize * 8)
                shape = cuda.shape_of(max(self.cache.width, self.cache.width_v), unit, rows, masked)
                return cuda.make_attend_lanes, (shape,)
        ways = importlib.import_module("tikv.kernels.lanes")
        way = ways.WARP if style == "cuda" else ways.SUBGROUP if launch.has_subgroups(self.live) else ways.ALONE
        return importlib.import_module("tikv.kernels.attention_gpu").make_attend_block, (style, way)


def _scratch(live: runtime.Runtime, nbytes: int) -> Memory:
    """Memory for what lies between launches; grown as needed, shared by all plans of a runtime, in launch order."""
    found = live.plans.get("attention scratch")
    if found is None or found.nbytes < nbytes:
        if found is not None:
            live.synchronize()
        found = live.plans["attention scratch"] = Memory(max(nbytes, 1 << 16), live)
    return found


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, lse_base2: bool = False, out: Any = None
) -> tuple[Any, Any]:
    """One attention state of two: what attention over both sets of keys would have given.

    For a prefix that sequences share, a prompt in chunks, or keys on several devices.

    Args:
        out_a, out_b: results over either set, (..., D_v) with two to four axes, float32, float16 or bfloat16.
        lse_a, lse_b: their log-sum-exps, float32 (...); -inf where a set was empty.
        lse_base2: both, and the new one, are in base 2 rather than e.
        out: array for the result, contiguous; None for a new one of the kind and dtype of `out_a`.

    Returns:
        (out, lse) of both sets together.

    Raises:
        ShapeError, DTypeError: arrays that do not agree.

    Exactness: float32, one rounding at the end.
    Cost: each state is read once; one launch.
    Source: ``CascadeAttentionPlan``.

    Example:
        >>> import numpy as np, tikv
        >>> one, two = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), 3, np.float32)
        >>> merged, lse = tikv.merge_states(one, np.zeros((1, 1), np.float32), two, np.zeros((1, 1), np.float32))
        >>> merged.tolist(), round(float(lse[0, 0]), 4)
        ([[[2.0, 2.0]]], 0.6931)
    """
    operation = "merge_states"
    live = runtime.current()
    names = ("out_a", "out_b", "lse_a", "lse_b")
    arrays = [view(a, n, operation) for n, a in zip(names, (out_a, out_b, lse_a, lse_b), strict=True)]
    first, second = arrays[:2]
    checks.on_device(list(zip(names, arrays, strict=True)), live, operation)
    for name, a in zip(names[:2], arrays[:2], strict=True):
        checks.rank(a, (2, 3, 4), name, "(..., D_v)", operation)
        checks.readable(a, name, operation)
        if a.dtype not in QUERIES:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; states are float32, float16 or bfloat16.")
        if a.shape[-1] == 0:
            raise ShapeError(f"{operation}: {name} is {describe(a)}, of width 0. Use a head width of at least 1.")
    if second.shape != first.shape:
        raise ShapeError(f"{operation}: out_b is {describe(second)} where {first.shape} is needed, the shape of out_a.")
    for name, a in zip(names[2:], arrays[2:], strict=True):
        if a.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; a log-sum-exp is float32.")
        if a.shape != first.shape[:-1]:
            raise ShapeError(f"{operation}: {name} is {describe(a)} where {first.shape[:-1]} is needed.")
        checks.readable(a, name, operation)
    result = new_like(out_a, first.shape, first.dtype, live) if out is None else out
    lse = new_like(out_a, first.shape[:-1], dtypes.float32, live)
    to = view(result, "out", operation)
    if out is not None:
        checks.on_device([("out", to)], live, operation)
        checks.writable(to, "out", operation)
        if to.shape != first.shape or not is_contiguous(to) or to.dtype not in QUERIES:
            raise ShapeError(f"{operation}: out is {describe(to)} where a contiguous float {first.shape} is needed.")
    arrays += [to, view(lse, "lse", operation)]
    key = (operation, *[a.key for a in arrays], lse_base2)
    call = live.plans.get(key)
    if call is None:
        call = keep_plan(live, key, _plan_merge(live, operation, first.shape, lse_base2))
    call.run(operation, arrays)
    return result, lse


def _plan_merge(live: runtime.Runtime, operation: str, shape: tuple[int, ...], base2: bool) -> CopyCall:
    def bind(arrays: Sequence[ArrayView]) -> launch.Bound:
        common = importlib.import_module("tikv.kernels.attention")
        out_a, out_b, _, _, to, lse = arrays
        codes = [a.dtype.short for a in (out_a, out_b, to)]
        kernel = launch.kernel(live, common.make_merge_states, live.kernel_style, shape[-1], *codes)
        strides: list[int] = []
        for i, a in enumerate(arrays[:4]):
            lead = a.strides[:-1] if i < 2 else a.strides
            strides += [*[0] * (3 - len(lead)), *lead, a.offset // a.dtype.itemsize]
        extents = [*[1] * (4 - len(shape)), *shape[:-1]]
        items = checks.integer(math.prod(shape), "elements of a state", operation, high=2**31 - 1)
        two = common.Two(
            items, extents[1], extents[2], out_first=to.offset // to.dtype.itemsize, lse_first=lse.offset // 4
        )
        factors = common.Factors(lse=1.0 if base2 else common.LOG2E)
        return kernel.bind(items, *arrays, tuple(strides), tuple(two), tuple(factors))

    names = ("out_a", "out_b", "lse_a", "lse_b", "out", "lse")
    return CopyCall(live, names, [False] * 4 + [True] * 2, bind if math.prod(shape) else None, range(6))


def _why_not_torch(live: runtime.Runtime, arrays: dict[str, ArrayView], cache: Cache, question: Question) -> str:
    """Why torch cannot attend over arrays of this form; empty where it can."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if live.is_spirv:
        return f"torch has no view of memory on {live.arch}"
    if cache.place != "linear" or cache.sinks or cache.scales or question.softcap or question.splits or question.mass:
        return "torch attends over plain caches only: no ring, sinks, int8, softcap, num_splits or mass"
    if q.dtype is not k.dtype:
        return f"q is {q.dtype.name} and the cache {k.dtype.name}; torch wants one dtype"
    if len({a.device for a in (q, k, v)}) > 1:
        return "q and the cache lie on different devices"
    return ""


def _attend_torch(arrays: dict[str, ArrayView], form: Form, length: int, first_valid: int) -> None:
    """The same by torch's `scaled_dot_product_attention` over the same memory."""
    question, q = form.question, arrays["q"]
    try:
        import torch
    except ImportError as error:
        raise ArchError(f"{form.operation}: torch is not installed. Install taichi-kv[torch].") from error
    queries, k, v, to = (torch.from_dlpack(CacheArray(arrays[n], form.live)) for n in ("q", "k", "v", "out"))
    queries = queries if q.ndim == 4 else queries[:, :, None]
    tokens = form.asked.queries
    span = question.span if question.span is not None else length
    low = max(0, first_valid, length - span - (tokens - 1 if question.causal else 0))
    if low >= length:
        to.zero_()
        return
    mask = None
    if tokens > 1 and question.causal:
        at = torch.arange(length - tokens, length, device=queries.device)[:, None]
        key = torch.arange(low, length, device=queries.device)[None]
        mask = (key <= at) & (key > at - span)
    found = torch.nn.functional.scaled_dot_product_attention(
        queries, k[:, :, low:length], v[:, :, low:length], attn_mask=mask, scale=question.scale, enable_gqa=True
    )
    to.copy_(found.reshape(to.shape))
