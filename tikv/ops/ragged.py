"""Ragged appends: each sequence of a batch gets new rows from its own offset on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tikv import runtime
from tikv.arrays import Array, ArrayView, describe, runtime_of, view_all
from tikv.ops import checks
from tikv.ops.layouts import Formats, Placement, Rows, Scale
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantized_arrays import Quantized, codes_of_pair, require_quantizable, scale_of_groups
from tikv.ops.row_copy import bind_copy

NAMES = ("k_new", "k_cache", "v_new", "v_cache", "cache_offsets")
WRITTEN = (False, True, False, True, False)
_SCALES = ("k_cache's scales", "v_cache's scales")  # those of groups of codes


def append_ragged(k_new: Array, v_new: Array, k_cache: Array, v_cache: Array, cache_offsets: Array) -> None:
    """Append rows to a batch of caches, each sequence from its own offset on, in place, K and V in one launch.

    Row ``l`` of sequence ``b`` lands in slot ``cache_offsets[b] + l``. Rows whose slot is below 0 or not below M are
    skipped; the offsets are only read, so the caller advances them.

    Args:
        k_new, v_new: (B, H, L, d_k) and (B, H, L, d_v), of one dtype; any strides with a contiguous last axis.
        k_cache, v_cache: (B, H, M, d_k) and (B, H, M, d_v), of one dtype; dtypes convert as in `copy`. Or both a
            `Quantized` of that shape, with the same format, made by `quantize`.
        cache_offsets: (B,) int32 or int64, on the host or the device, of any sign.

    Raises:
        ShapeError: arrays that do not agree, overlap, are read-only, or have no contiguous last axis.
        DTypeError: no conversion exists, or the offsets are not integers.

    Exactness: bit-exact for equal dtypes; a narrowing conversion rounds to nearest even. A `Quantized` gets the codes
        that `quantize` gives. Deterministic.
    Cost: each row that fits is read once and written once; one launch. The lengths of the sequences do not matter, and
        nothing waits for the device, even if the offsets lie there.
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
    formats: Formats = (None, None)
    if isinstance(k_cache, Quantized) or isinstance(v_cache, Quantized):
        pair = {"k_cache": k_cache, "v_cache": v_cache}
        (k_cache, v_cache), scales, formats = codes_of_pair(live, operation, pair, written=True)
    arguments = (k_new, k_cache, v_new, v_cache, cache_offsets, *scales)
    arrays = view_all(arguments, (*NAMES, *_SCALES)[: len(arguments)], operation)
    key = (operation, formats, arrays.key)
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check_append(live, operation, arrays, formats))
    plan.run(arrays)


def check_append(
    live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], formats: Formats = (None, None)
) -> Plan:
    """Check everything except where the arrays lie; `formats` are those of caches of groups, whose scales come last."""
    check_arrays(live, operation, arrays[:5], formats)
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
            dst=[_rows(caches[i])._replace(format=formats[i], scale=_scale(scales, i)) for i in streams],
            widths=[widths[i] for i in streams],
            heads=heads,
            tokens=tokens,
            groups=batch,
            dst_place=Placement("ragged", array=offsets, group=offsets.strides[0], limit=capacity),
        )
        return [bound]

    nothing = 0 in (batch, heads, tokens, capacity) or not streams
    names, written = (*NAMES, *_SCALES)[: len(arrays)], (*WRITTEN, True, True)[: len(arrays)]
    return Plan(live, operation, names, written, None if nothing else bind)


def _rows(array: ArrayView) -> Rows:
    sequence, head, token, _ = array.strides
    return Rows(array, sequence=sequence, token=token, head=head)


def _scale(scales: Sequence[ArrayView], stream: int) -> Scale | None:
    return scale_of_groups(scales[stream], token=2, head=1, sequence=0) if scales else None


def check_arrays(
    live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], formats: Formats = (None, None)
) -> None:
    """Check that new rows, caches and offsets, in the order of `NAMES`, fit each other; K alone may be rotated.

    Raises:
        ShapeError, DTypeError, ArchError: they do not.
    """
    named = dict(zip(NAMES, arrays, strict=True))
    checks.on_device(list(named.items()), live, operation)
    k_new, k_cache, v_new, v_cache, offsets = arrays
    for name in ("k_new", "v_new"):
        checks.rank(named[name], (4,), name, "(B, H, L, D)", operation)
        checks.readable(named[name], name, operation)
    for name in ("k_cache", "v_cache"):
        checks.rank(named[name], (4,), name, "(B, H, M, D)", operation)
        checks.writable(named[name], name, operation)
    format, _ = formats
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
            got, expected = one.shape[axis], other.shape[axis]
            if axis == 3 and format is not None:
                got = format.columns(got)
            checks.extent(got, expected, f"the number of {what} of {one_name}", operation, detail)
    checks.indices(offsets, "cache_offsets", operation)
    checks.rank(offsets, (1,), "cache_offsets", "(B,)", operation)
    detail = f"k_new: {describe(k_new)}, cache_offsets: {describe(offsets)}"
    checks.extent(offsets.shape[0], k_new.shape[0], "the length of cache_offsets", operation, detail)
