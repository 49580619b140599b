"""Whether CUDA's tensor cores attend, and how their work is shared out."""

from __future__ import annotations

from typing import Any

from tikv import launch, runtime
from tikv.arrays import ArrayView
from tikv.ops.attention.launches import row_bytes
from tikv.ops.attention.options import CacheLayout, QueryShape
from tikv.ops.attention.terms import TREES, Terms


def why_not_tensor_cores(live: runtime.Runtime, arrays: dict[str, ArrayView], cache: CacheLayout) -> str:
    """Why they cannot attend over arrays of this form; empty where they serve."""
    if reason := launch.why_no_tensor_cores(live):
        return reason
    from tikv.kernels.attention import tensor_cores

    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if k.dtype.short not in tensor_cores.CODES:
        return f"K and V are {k.dtype.name}"
    if v.dtype is not k.dtype or q.dtype is not k.dtype:
        return f"q is {q.dtype.name}, K {k.dtype.name}, V {v.dtype.name}"
    if cache.width not in tensor_cores.WIDTHS or cache.width_v not in tensor_cores.WIDTHS:
        return f"heads are {cache.width} and {cache.width_v} wide"
    if cache.k.inner[0] or cache.v.inner[0]:
        return "rows lie in pieces"
    if row_bytes(k, v, cache, tensor_cores.ROW_BYTES) != tensor_cores.ROW_BYTES:
        return f"not every row begins at a multiple of {tensor_cores.ROW_BYTES} bytes"
    if terms := [name for name in dict.fromkeys((*Terms._fields, *TREES)) if name in arrays]:
        return f"{' and '.join(terms)} are given"
    return ""


def choose_tile(live: runtime.Runtime, arrays: dict[str, ArrayView], query: QueryShape, cache: CacheLayout) -> Any:
    """How the tensor cores' work is shared out, a `Tile`; None where the other kernels serve."""
    if why_not_tensor_cores(live, arrays, cache):
        return None
    from tikv.kernels.attention import tensor_cores

    rows = query.heads // cache.heads * query.queries
    return tensor_cores.tile_of(max(cache.width, cache.width_v), rows)
