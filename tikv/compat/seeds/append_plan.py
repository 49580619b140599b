"""`KVCacheAppendPlan`: the seed's plan of a ragged append, under its own names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, Views, describe, runtime_of, view_all
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks, ragged
from tikv.ops.plan import Plan
from tikv.runtime.cache import BoundedCache


@dataclass(frozen=True, kw_only=True)
class KVCacheAppendDescriptor:
    """The problem that a `KVCacheAppendPlan` is made for. Extents may be zero.

    Args:
        batch_size: number of sequences, B.
        num_heads: number of KV heads, H.
        new_len: new rows per sequence, L.
        max_cache_len: slots per sequence, M.
        d_k, d_v: widths of a row of K and of V.
        dtype: dtype of all four arrays: float32, float64, float16 or bfloat16.
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

    k_new: Array
    v_new: Array
    cache_offsets: Array
    k_cache: Array
    v_cache: Array


class PrecisionGuarantee(NamedTuple):
    """The guarantees that hold for every run of a plan."""

    bit_exact: bool = True
    deterministic: bool = True


class KVCacheAppendPlan(runtime.NotCopied):
    """`append_ragged` for one problem, checked and bound once: ``select``, then ``run`` as often as you like.

    ``run`` with the arrays of the last run costs only the launch; with other arrays of the same form it also sets their
    addresses.

    Attributes:
        descriptor: the problem that it was selected for.
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
        """The plan for a problem, on the running engine.

        Raises:
            ShapeError: an extent is negative.
            DTypeError: caches do not support the dtype, or the arch lacks it; or an extent is not an integer.
        """
        operation = "KVCacheAppendPlan.select"
        for name in ("batch_size", "num_heads", "new_len", "max_cache_len", "d_k", "d_v"):
            value = checks.integer(getattr(descriptor, name), name, operation, low=-checks.MAX_POSITION)
            if value < 0:
                raise ShapeError(f"{operation}: {name}={value} is negative. Use an extent of at least 0.")
        dtype = dtypes.parse(descriptor.dtype, operation, offered=dtypes.FLOATS)
        if dtype not in dtypes.FLOATS:
            names = ", ".join(row.name for row in dtypes.FLOATS)
            raise DTypeError(f"{operation}: dtype is {dtype}. Use one of {names}.")
        live = runtime_of()
        if dtype is dtypes.float64 and not live.has_float64:
            raise DTypeError(f"{operation}: {live.arch} does not have float64. Use float32, CPU or CUDA.")
        return cls(descriptor, live)

    def can_implement(self, args: KVCacheAppendArgs) -> bool:
        """True if the plan can run on these arrays; otherwise it raises an error with the reason.

        Raises:
            ShapeError: an array's shape differs from the descriptor, or it cannot be read or written in place.
            DTypeError: an array has the wrong dtype.
            StaleRuntimeError: the plan was selected in a runtime that no longer exists.
        """
        operation = "KVCacheAppendPlan.can_implement"
        runtime.require_alive(self.runtime, operation)
        arrays = self._views(args, operation)
        self._check(operation, arrays)
        checks.disjoint(list(zip(ragged.NAMES, arrays, ragged.WRITTEN, strict=True)), operation)
        return True

    def run(self, args: KVCacheAppendArgs) -> None:
        """Append. Checks what `can_implement` checks, unless arrays of these forms were checked before.

        Raises:
            ShapeError, DTypeError, StaleRuntimeError: as in `can_implement`; nothing was written.
        """
        operation = "KVCacheAppendPlan.run"
        runtime.require_alive(self.runtime, operation)
        arrays = self._views(args, operation)
        plan = self._plans.get(arrays.key)
        if plan is None:
            self._check(operation, arrays)
            plan = self._plans.keep(arrays.key, ragged.check_append(self.runtime, operation, arrays))
        plan.run(arrays)

    @staticmethod
    def _views(args: KVCacheAppendArgs, operation: str) -> Views:
        arrays = (args.k_new, args.k_cache, args.v_new, args.v_cache, args.cache_offsets)
        return view_all(arrays, ragged.NAMES, operation)

    def _check(self, operation: str, arrays: Sequence[ArrayView]) -> None:
        d = self.descriptor
        shapes = {
            "k_new": (d.batch_size, d.num_heads, d.new_len, d.d_k),
            "k_cache": (d.batch_size, d.num_heads, d.max_cache_len, d.d_k),
            "v_new": (d.batch_size, d.num_heads, d.new_len, d.d_v),
            "v_cache": (d.batch_size, d.num_heads, d.max_cache_len, d.d_v),
            "cache_offsets": (d.batch_size,),
        }
        for name, array in zip(ragged.NAMES, arrays, strict=True):
            if array.shape != shapes[name]:
                raise ShapeError(
                    f"{operation}: {name} is {describe(array)} where the descriptor says {shapes[name]}. "
                    f"Select a plan for such arrays."
                )
            if name != "cache_offsets" and array.dtype is not self.dtype:
                raise DTypeError(
                    f"{operation}: {name} is {describe(array)} where the descriptor says {self.dtype}. "
                    f"Select a plan for such arrays."
                )
        ragged.check_arrays(self.runtime, operation, arrays)

    def __repr__(self) -> str:
        return f"KVCacheAppendPlan({self.sku})"
