"""Ragged appends: each sequence of a batch gets new rows from its own offset on, by a function or a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, Views, describe, runtime_of, view_all
from tikv.errors import DTypeError, ShapeError
from tikv.formats import GroupFormat
from tikv.ops import checks
from tikv.ops.layouts import Placement, Rows
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantize import Quantized, codes_of_pair, group_scale_arguments, require_quantizable
from tikv.ops.row_copy import bind_copy
from tikv.runtime.cache import BoundedCache

_NAMES = ("k_new", "k_cache", "v_new", "v_cache", "cache_offsets")
_WRITTEN = (False, True, False, True, False)
_SCALES = ("k_cache's scales", "v_cache's scales")  # of groups of codes


def append_ragged(k_new: Any, v_new: Any, k_cache: Any, v_cache: Any, cache_offsets: Any) -> None:
    """Append rows to a batch of caches, each sequence from its own offset on, in place, K and V in one launch.

    Row ``l`` of sequence ``b`` lands in slot ``cache_offsets[b] + l``. Rows whose slot is below 0 or not below M are
    skipped; the offsets are only read, so the caller advances them.

    Args:
        k_new, v_new: (B, H, L, d_k) and (B, H, L, d_v), of one dtype; any strides with a contiguous last axis.
        k_cache, v_cache: (B, H, M, d_k) and (B, H, M, d_v), of one dtype; which dtypes convert is as in `copy`. Or
            each a `Quantized` of that shape, of one format, as `quantize` made it.
        cache_offsets: (B,) int32 or int64, on the host or the device, of any sign.

    Raises:
        ShapeError: arrays that do not agree, overlap, are read-only, or have no contiguous last axis.
        DTypeError: no conversion exists, or the offsets are no integers.

    Exactness: bit-exact for equal dtypes; a narrowing rounds to nearest even; groups of codes as in `quantize`.
        Deterministic.
    Cost: each row that fits is read once and written once; one launch. The split of the rows among the sequences is of
        no consequence, and nothing waits for the device, wherever the offsets lie.
    Source: ``KvCacheAppendPlan``.

    Examples:
        >>> import numpy as np, tikv
        >>> k_cache, v_cache = np.zeros((2, 2, 1, 4, 1), np.float32)
        >>> new = np.arange(1, 5, dtype=np.float32).reshape(2, 1, 2, 1)
        >>> tikv.append_ragged(new, new, k_cache, v_cache, np.array([-1, 3]))
        >>> k_cache.reshape(2, 4).tolist()
        [[2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]]
    """
    operation = "append_ragged"
    live = runtime_of(k_cache, k_new)
    scales: Sequence[Any] = ()
    format = None
    if isinstance(k_cache, Quantized) or isinstance(v_cache, Quantized):
        pair = {"k_cache": k_cache, "v_cache": v_cache}
        (k_cache, v_cache), scales, format = codes_of_pair(live, operation, pair, written=True)
    given = (k_new, k_cache, v_new, v_cache, cache_offsets, *scales)
    arrays = view_all(given, (*_NAMES, *_SCALES)[: len(given)], operation)
    key = (operation, format, arrays.key)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check_append(live, operation, arrays, format))
    plan.run(arrays)


def check_append(
    live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], format: GroupFormat | None = None
) -> Plan:
    """Check everything but where the arrays lie; `format` is of caches of groups, whose numbers come last."""
    _check_arrays(live, operation, arrays[:5], format)
    k_new, k_cache, v_new = arrays[:3]
    batch, heads, tokens, _ = k_new.shape
    capacity = k_cache.shape[2]
    widths = [k_new.shape[3], v_new.shape[3]]
    streams = [i for i in (0, 1) if widths[i]]

    def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
        new, caches, offsets, scales = arrays[0:4:2], arrays[1:4:2], arrays[4], arrays[5:]
        bound = bind_copy(
            live,
            operation,
            src=[_rows(new[i]) for i in streams],
            dst=[_rows(caches[i])._replace(format=format) for i in streams],
            widths=[widths[i] for i in streams],
            heads=heads,
            tokens=tokens,
            groups=batch,
            dst_place=Placement("ragged"),
            index=offsets,
            index_group=offsets.strides[0],
            dst_limit=capacity,
            **group_scale_arguments([scales[i] for i in streams] if scales else [], token=2, head=1, sequence=0),
        )
        return [bound]

    nothing = 0 in (batch, heads, tokens, capacity) or not streams
    names, written = (*_NAMES, *_SCALES)[: len(arrays)], (*_WRITTEN, True, True)[: len(arrays)]
    return Plan(live, operation, names, written, None if nothing else bind)


def _rows(array: ArrayView) -> Rows:
    sequence, head, token, _ = array.strides
    return Rows(array, sequence=sequence, token=token, head=head)


def _check_arrays(
    live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], format: GroupFormat | None = None
) -> None:
    named = dict(zip(_NAMES, arrays, strict=True))
    checks.on_device(list(named.items()), live, operation)
    k_new, k_cache, v_new, v_cache, offsets = arrays
    for name in ("k_new", "v_new"):
        checks.rank(named[name], (4,), name, "(B, H, L, D)", operation)
        checks.readable(named[name], name, operation)
    for name in ("k_cache", "v_cache"):
        checks.rank(named[name], (4,), name, "(B, H, M, D)", operation)
        checks.writable(named[name], name, operation)
    checks.same_dtype(k_new, v_new, "k_new", "v_new", operation)
    checks.same_dtype(k_cache, v_cache, "k_cache", "v_cache", operation)
    if format is None:
        checks.convertible(k_new, k_cache, "k_new", "k_cache", operation)
    else:
        require_quantizable(k_new, "k_new", operation)
    for one, other, one_name, other_name, axes in (
        (v_new, k_new, "v_new", "k_new", ((0, "sequences"), (1, "heads"), (2, "new tokens"))),
        (k_cache, k_new, "k_cache", "k_new", ((0, "sequences"), (1, "heads"), (3, "elements of a row"))),
        (v_cache, v_new, "v_cache", "v_new", ((0, "sequences"), (1, "heads"), (3, "elements of a row"))),
        (v_cache, k_cache, "v_cache", "k_cache", ((2, "slots"),)),
    ):
        detail = f"{other_name}: {describe(other)}, {one_name}: {describe(one)}"
        for axis, what in axes:
            got, wanted = one.shape[axis], other.shape[axis]
            if axis == 3 and format is not None:
                got = format.columns(got)
            checks.extent(got, wanted, f"the number of {what} of {one_name}", operation, detail)
    checks.indices(offsets, "cache_offsets", operation)
    checks.rank(offsets, (1,), "cache_offsets", "(B,)", operation)
    detail = f"k_new: {describe(k_new)}, cache_offsets: {describe(offsets)}"
    checks.extent(offsets.shape[0], k_new.shape[0], "the length of cache_offsets", operation, detail)


@dataclass(frozen=True, kw_only=True)
class KVCacheAppendDescriptor:
    """The problem a `KVCacheAppendPlan` is made for. Extents may be zero.

    Args:
        batch_size: sequences, B.
        num_heads: KV heads, H.
        new_len: new rows a sequence, L.
        max_cache_len: slots a sequence, M.
        d_k, d_v: widths of a row of K and of V.
        dtype: of all four arrays: float32, float64, float16 or bfloat16.
    """

    batch_size: int
    num_heads: int
    new_len: int
    max_cache_len: int
    d_k: int
    d_v: int
    dtype: Any = "float16"


@dataclass(frozen=True, kw_only=True, eq=False)
class KVCacheAppendArgs:
    """The arrays of one append; shapes as in `append_ragged`. ``k_cache`` and ``v_cache`` are written."""

    k_new: Any
    v_new: Any
    cache_offsets: Any
    k_cache: Any
    v_cache: Any


class PrecisionGuarantee(NamedTuple):
    """What holds for every run of a plan."""

    bit_exact: bool = True
    deterministic: bool = True


class KVCacheAppendPlan(runtime.NotCopied):
    """`append_ragged` for one problem, checked and bound once: ``select``, then ``run`` as often as you like.

    ``run`` with the arrays of the last run costs a bare launch; with others of the same form, new addresses.

    Attributes:
        descriptor: what it was selected for.
        workspace_size: bytes of scratch memory needed; always 0.
        sku: a readable identity of the kernel.
        precision_guarantee: bit-exact and deterministic.

    Source: ``KvCacheAppendPlan``.

    Examples:
        >>> import numpy as np, tikv
        >>> desc = tikv.KVCacheAppendDescriptor(
        ...     batch_size=1, num_heads=1, new_len=2, max_cache_len=3, d_k=1, d_v=1, dtype="float32"
        ... )
        >>> plan = tikv.KVCacheAppendPlan.select(desc)
        >>> new, cache = np.ones((1, 1, 2, 1), np.float32), np.zeros((2, 1, 1, 3, 1), np.float32)
        >>> args = tikv.KVCacheAppendArgs(
        ...     k_new=new, v_new=new, cache_offsets=np.array([1]), k_cache=cache[0], v_cache=cache[1]
        ... )
        >>> plan.can_implement(args), plan.workspace_size
        (True, 0)
        >>> plan.run(args)
        >>> cache[0].ravel().tolist()
        [0.0, 1.0, 1.0]
    """

    instead = "Call KVCacheAppendPlan.select() with its descriptor again."
    workspace_size = 0
    precision_guarantee = PrecisionGuarantee()

    def __init__(self, descriptor: KVCacheAppendDescriptor, live: runtime.Runtime) -> None:
        """Take a descriptor that `select` has checked."""
        self.descriptor = descriptor
        self.dtype = dtypes.parse(descriptor.dtype, "KVCacheAppendPlan")
        self.runtime = live
        d = descriptor
        self.sku = f"append_ragged_{self.dtype.short}_h{d.num_heads}_k{d.d_k}_v{d.d_v}_{live.arch}"
        self._plans: BoundedCache[int, Plan] = BoundedCache()  # by `Views.key`

    @classmethod
    def select(cls, descriptor: KVCacheAppendDescriptor) -> KVCacheAppendPlan:
        """The plan for a problem, on the live runtime.

        Raises:
            ShapeError: an extent is negative.
            DTypeError: the dtype is none that a cache has, or the arch lacks it; or an extent is no integer.
        """
        operation = "KVCacheAppendPlan.select"
        for name in ("batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v"):
            value = checks.integer(getattr(descriptor, name), name, operation, low=-checks.MAX_POSITION)
            if value < 0:
                raise ShapeError(f"{operation}: {name}={value} is negative. Use an extent of at least 0.")
        dtype = dtypes.parse(descriptor.dtype, operation)
        if dtype not in dtypes.FLOATS:
            names = ", ".join(row.name for row in dtypes.FLOATS)
            raise DTypeError(f"{operation}: dtype is {dtype}. Use one of {names}.")
        live = runtime_of()
        if dtype is dtypes.float64 and not live.has_float64:
            raise DTypeError(f"{operation}: {live.arch} does not have float64. Use float32, CPU or CUDA.")
        return cls(descriptor, live)

    def can_implement(self, args: KVCacheAppendArgs) -> bool:
        """True; arrays that the plan cannot run are refused with the reason.

        Raises:
            ShapeError: an array has another shape than the descriptor says, or cannot be read or written in place.
            DTypeError: an array has another dtype.
            StaleRuntimeError: the plan was selected in a Taichi runtime that is gone.
        """
        operation = "KVCacheAppendPlan.can_implement"
        runtime.require_alive(self.runtime, operation)
        arrays = self._views(args, operation)
        self._check(operation, arrays)
        checks.disjoint(list(zip(_NAMES, arrays, _WRITTEN, strict=True)), operation)
        return True

    def run(self, args: KVCacheAppendArgs) -> None:
        """Append. Checks what `can_implement` checks, unless arrays of these forms came before.

        Raises:
            ShapeError, DTypeError, StaleRuntimeError: as `can_implement`; nothing was written.
        """
        operation = "KVCacheAppendPlan.run"
        runtime.require_alive(self.runtime, operation)
        arrays = self._views(args, operation)
        plan = self._plans.get(arrays.key)
        if plan is None:
            self._check(operation, arrays)
            plan = self._plans.keep(arrays.key, check_append(self.runtime, operation, arrays))
        plan.run(arrays)

    @staticmethod
    def _views(args: KVCacheAppendArgs, operation: str) -> Views:
        given = (args.k_new, args.k_cache, args.v_new, args.v_cache, args.cache_offsets)
        return view_all(given, _NAMES, operation)

    def _check(self, operation: str, arrays: Sequence[ArrayView]) -> None:
        d = self.descriptor
        wanted = {
            "k_new": (d.batch_size, d.num_heads, d.new_len, d.d_k),
            "k_cache": (d.batch_size, d.num_heads, d.max_cache_len, d.d_k),
            "v_new": (d.batch_size, d.num_heads, d.new_len, d.d_v),
            "v_cache": (d.batch_size, d.num_heads, d.max_cache_len, d.d_v),
            "cache_offsets": (d.batch_size,),
        }
        for name, array in zip(_NAMES, arrays, strict=True):
            if array.shape != wanted[name]:
                raise ShapeError(
                    f"{operation}: {name} is {describe(array)} where the descriptor says {wanted[name]}. "
                    f"Select a plan for it."
                )
            if name != "cache_offsets" and array.dtype is not self.dtype:
                raise DTypeError(
                    f"{operation}: {name} is {describe(array)} where the descriptor says {self.dtype}. "
                    f"Select a plan for it."
                )
        _check_arrays(self.runtime, operation, arrays)

    def __repr__(self) -> str:
        return f"KVCacheAppendPlan({self.sku})"
