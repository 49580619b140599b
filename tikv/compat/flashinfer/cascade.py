"""FlashInfer's functions that merge attention over several parts of a context."""

from __future__ import annotations

from typing import Any

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, describe, new_like, refuse_backward, runtime_of, view
from tikv.compat.indices import library_of
from tikv.errors import DTypeError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.merge import merge_into, merge_parts
from tikv.ops.attention.options import QUERIES


def merge_state(v_a: Array, s_a: Array, v_b: Array, s_b: Array) -> tuple[Array, Array]:
    """(v, s): attention over two parts of a context, as if they were one; ``s`` is the log-sum-exp of base 2.

    Args:
        v_a, v_b: (T, H, D).
        s_a, s_b: (T, H) float32, with any strides.

    Raises:
        ShapeError, DTypeError: as `tikv.merge_states`.
    """
    return _merged("flashinfer.merge_state", v_a, s_a, v_b, s_b)


def _merged(operation: str, *states: Any) -> tuple[Any, Any]:
    merged = merge_into(operation, states, True, None, None)
    refuse_backward(merged, *states)
    return merged


def merge_state_in_place(v: Array, s: Array, v_other: Array, s_other: Array, mask: Array | None = None) -> None:
    """Merge another state into ``(v, s)`` in place, as `merge_state` does; named as in FlashInfer.

    Args:
        v, v_other: (T, H, D), NumPy or torch; the first is written.
        s, s_other: (T, H) float32; the first is written.
        mask: (T,) bool: the tokens whose states are merged; None for all.

    Raises:
        ShapeError, DTypeError: the arrays do not agree, or cannot be written. Nothing is written.

    Exactness: as `tikv.merge_states`; a state that the mask leaves out keeps its bits. Cost: the same, plus a copy of
        the result.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> v, s = np.ones((2, 1, 1), np.float32), np.zeros((2, 1), np.float32)
        >>> flashinfer.merge_state_in_place(v, s, 3 * v, s.copy(), np.array([True, False]))
        >>> v.ravel().tolist(), s.ravel().tolist()
        ([2.0, 1.0], [1.0, 0.0])
    """
    operation = "flashinfer.merge_state_in_place"
    library = library_of(v)
    for name, a in (("v", v), ("s", s)):
        checks.writable(view(a, name, operation), name, operation)
        if library_of(a) is not library or (library is np and not isinstance(a, np.ndarray)):
            raise DTypeError(
                f"{operation}: {name} is {type(a).__name__}. Pass v and s both from NumPy or both from torch."
            )
    merged = _merged(operation, v, s, v_other, s_other)
    where = None
    if mask is not None:
        if not str(getattr(mask, "dtype", type(mask))).endswith("bool") or tuple(mask.shape) != (v.shape[0],):
            shown = f"{getattr(mask, 'dtype', type(mask).__name__)} {tuple(getattr(mask, 'shape', ()))}"
            raise ShapeError(f"{operation}: mask is {shown}; it must be bool ({v.shape[0]},), one for each token.")
        where = np.asarray(mask) if library is np else library.as_tensor(mask, device=v.device)
    for to, result in ((v, merged[0]), (s, merged[1])):
        selected = None if where is None else where.reshape(-1, *[1] * (len(to.shape) - 1))
        if library is np:
            np.copyto(to, result, where=True if selected is None else selected)
        else:
            detached = to.detach()
            detached.copy_(result if selected is None else library.where(selected, result, detached))


def merge_states(v: Array, s: Array) -> tuple[Array, Array]:
    """(v, s): attention over any number of parts of a context, as if they were one; ``s`` is the log-sum-exp of base 2.

    Args:
        v: (T, parts, H, D), NumPy or torch, float32, float16 or bfloat16.
        s: (T, parts, H) float32, with any strides.

    Returns:
        (T, H, D) in v's dtype and (T, H) float32; 0 and -inf if there are no parts.

    Raises:
        ShapeError, DTypeError: the arrays do not agree.

    Exactness: computed in float32, and rounded once at the end. Cost: a copy of the parts in float32, and one launch.

    Examples:
        >>> import numpy as np
        >>> from tikv.compat import flashinfer
        >>> v, s = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1), np.zeros((1, 4, 1), np.float32)
        >>> v, s = flashinfer.merge_states(v, s)
        >>> v.ravel().round(4).tolist(), s.round(4).tolist()
        ([1.5], [[2.0]])
    """
    operation = "flashinfer.merge_states"
    parts, lse = view(v, "v", operation), view(s, "s", operation)
    checks.rank(parts, (4,), "v", "(T, parts, H, D)", operation)
    library = library_of(v)
    if library_of(s) is not library or (library is np and not isinstance(v, np.ndarray)):
        raise DTypeError(
            f"{operation}: v is {type(v).__name__} and s {type(s).__name__}. Pass both from NumPy or both from torch."
        )
    if parts.dtype not in QUERIES or lse.dtype is not dtypes.float32:
        raise DTypeError(
            f"{operation}: v is {describe(parts)} and s {describe(lse)}; v must be float32, float16 or "
            f"bfloat16, and s float32."
        )
    if lse.shape != parts.shape[:3] or lse.device != parts.device:
        raise ShapeError(
            f"{operation}: s is {describe(lse)} on {lse.device} where {parts.shape[:3]} on {parts.device} is needed."
        )
    tokens, number, heads, width = parts.shape
    live = runtime_of(v)
    out = new_like(v, (tokens, heads, width), parts.dtype, live, zeroed=True)
    out_lse = new_like(v, (tokens, heads), dtypes.float32, live)
    if number == 0 or 0 in parts.shape:
        out_lse[:] = -np.inf
        return out, out_lse
    if library is np:
        packed = np.concatenate((v.astype(np.float32), s[..., None]), -1)
        packed = np.ascontiguousarray(np.moveaxis(packed, 1, 0))
    else:
        packed = library.cat((v.detach().float(), s.detach()[..., None]), -1).movedim(1, 0).contiguous()
    seen = view(packed, "v", operation)
    seen = seen.restrided((number, tokens, heads, 1, width + 1), (*seen.strides[:3], 0, 1))
    to, to_lse = view(out, "out", operation), view(out_lse, "lse", operation)
    to = to.restrided((tokens, heads, 1, width), (*to.strides[:2], 0, 1))
    to_lse = to_lse.restrided((tokens, heads, 1), (*to_lse.strides, 0))
    merge_parts(operation, seen, to, to_lse, base2=True)
    refuse_backward((out, out_lse), s)
    return out, out_lse
