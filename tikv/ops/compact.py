"""`compact`: keep some rows of each head and drop the others, in place or into another array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tikv import launch, runtime
from tikv.arrays import Array, ArrayView, Views, describe, runtime_of, view
from tikv.errors import DTypeError
from tikv.ops import checks
from tikv.ops.keep import HeadRows, held_lengths, kept_indices
from tikv.ops.layouts import Placement, Rows
from tikv.ops.plan import Launch, Plan
from tikv.ops.quantized_arrays import Quantized, codes_and_numbers
from tikv.ops.row_copy import SERIAL_BYTES, alignment, bind_copy, strides_in_words

_PARTS = {1: ("",), 2: ("'s codes", "'s scales")}  # the names of the arrays of rows, and of a `Quantized`


def compact(cache: Array, keep: Array, *, lengths: Array | int | None = None, out: Array | None = None) -> Array:
    """Keep some rows of each head, packed in their order, and drop the others, in one launch.

    Row ``j`` of head ``h`` of sequence ``b`` gets the content of row ``keep[b, h, j]``. If this happens in place, the
    rows after the kept ones stay unchanged.

    Args:
        cache: (B, H, S, D), any dtype; any strides with a contiguous last axis. int8 codes are moved unchanged:
            move their scales, (B, H, S, 1), with a call of their own. Or a `Quantized` of that shape, made by
            `quantize`, whose codes, scales and biases move together.
        keep: ascending indices, int32 or int64, (B, H, n), or (B, n) for all heads of a sequence; or a bool mask,
            (B, H, S) or (B, S), that may keep a different number of rows for each head. On the host or the device.
        lengths: how many rows of the cache are in use, (B,), (B, H) or one integer; None for all of them. Indices must
            be less than this.
        out: (B, H, m, D) of the cache's dtype or format, with m at least the largest number of rows that a head keeps;
            None to move rows within the cache. The other rows of ``out`` stay as they are.

    Returns:
        The array that was written: ``out``, or ``cache``.

    Raises:
        PositionError: indices do not ascend, or one is outside; or the mask keeps a row that is not in use. The host
            does not read indices on the device. There, an index that is outside is skipped; in a move in place, so is
            one that would move a row to a later place. Other errors give undefined results. With
            ``tikv.init(debug=True)``, all of these raise.
        ShapeError, DTypeError: the arrays do not agree, overlap, or are read-only.

    Exactness: bit-exact.
    Cost: each row kept is read once and written once, unless it is already in its place; one launch. The host reads a
        mask. With ``out``, there is a launch for each sequence if the heads of all sequences are not evenly spaced in
        memory, and one each for codes and scales of a `Quantized`.
    Source: the gather by head of kvpress and similar libraries, which allocate new arrays; `compact` does not.

    Examples:
        >>> import numpy as np, tikv
        >>> cache = np.arange(8, dtype=np.float32).reshape(1, 2, 4, 1)
        >>> tikv.compact(cache, [[[1, 3], [0, 2]]])[0, :, :2, 0].tolist()
        [[1.0, 3.0], [4.0, 6.0]]
    """
    operation = "compact"
    live = runtime_of(cache, out)
    rows = _arrays_of(live, operation, cache, "cache", out is None)
    batch, heads, slots, _ = rows[0].shape
    held = held_lengths(lengths, (batch, heads, slots), live, operation)
    index = kept_indices(keep, HeadRows(batch, heads, slots, held), live, operation)
    arrays = [view(index, "keep", operation), *rows]
    if out is not None:
        kinds = [a.format.name if isinstance(a, Quantized) else "plain rows" for a in (cache, out)]
        if kinds[0] != kinds[1]:
            raise DTypeError(
                f"{operation}: the cache holds {kinds[0]}, but out holds {kinds[1]}. Pass two arrays of the same "
                "format."
            )
        arrays += _arrays_of(live, operation, out, "out", True)
    views = Views(arrays)
    key = (operation, views.key, len(rows), len(arrays))
    plan = live.plans.get(key)
    if plan is None:
        plan = live.plans.keep(key, check_compact(live, operation, views, len(rows)))
    plan.run(views)
    return cache if out is None else out


def _arrays_of(live: runtime.Runtime, operation: str, rows: Array, name: str, written: bool) -> list[ArrayView]:
    """The given array of rows, or the codes and the scales and biases of a `Quantized`, as (B, H, S, .)."""
    if isinstance(rows, Quantized):
        views = list(codes_and_numbers(live, operation, rows, f"{name}'s ", written))
    else:
        views = [view(rows, name, operation)]
        checks.on_device([(name, views[0])], live, operation)
    checks.rank(views[0], (4,), name, "(B, H, S, D)", operation)
    return views


def check_compact(live: runtime.Runtime, operation: str, arrays: Sequence[ArrayView], parts: int) -> Plan:
    """Check everything except which rows are kept and where they lie.

    The arrays are the indices, the `parts` of the cache, and those of the output if there is one.
    """
    index, caches, outs = arrays[0], arrays[1 : 1 + parts], arrays[1 + parts :]
    tokens = index.shape[-1]
    of_cache, of_out = ([name + part for part in _PARTS[parts]] for name in ("cache", "out"))
    nothing = tokens == 0 or 0 in caches[0].shape
    if not outs:
        for cache, name in zip(caches, of_cache, strict=True):
            checks.writable(cache, name, operation)

        def bind(arrays: Sequence[ArrayView]) -> list[Launch]:
            index, *caches = arrays
            rows, widths = [Rows(a, *_strides(a)) for a in caches], [a.shape[3] for a in caches]
            return [bind_in_place(live, operation, rows, widths, caches[0].shape[:3], index)]

        return Plan(live, operation, ("keep", *of_cache), (False, *[True] * parts), None if nothing else bind)

    checks.on_device(list(zip(of_out, outs, strict=True)), live, operation)
    for cache, out, name, to in zip(caches, outs, of_cache, of_out, strict=True):
        _check_out(operation, cache, out, name, to, tokens)

    def bind_out(arrays: Sequence[ArrayView]) -> list[Launch]:
        index, caches, outs = arrays[0], arrays[1 : 1 + parts], arrays[1 + parts :]
        pairs = zip(caches, outs, strict=True)
        return [launch for cache, out in pairs for launch in bind_gather(live, operation, cache, index, out)]

    names, written = ("keep", *of_cache, *of_out), (False, *[False] * parts, *[True] * parts)
    return Plan(live, operation, names, written, None if nothing else bind_out)


def _check_out(operation: str, cache: ArrayView, out: ArrayView, name: str, to: str, tokens: int) -> None:
    """Check that rows of one array fit another.

    Raises:
        ShapeError, DTypeError: they do not.
    """
    checks.readable(cache, name, operation)
    checks.rank(out, (4,), to, "(B, H, m, D)", operation)
    checks.writable(out, to, operation)
    checks.same_dtype(cache, out, name, to, operation)
    detail = f"{name}: {describe(cache)}, {to}: {describe(out)}"
    for axis, what in ((0, "sequences"), (1, "heads"), (3, "elements of a row")):
        checks.extent(out.shape[axis], cache.shape[axis], f"the number of {what} of {to}", operation, detail)
    if out.shape[2] < tokens:
        checks.extent(out.shape[2], tokens, f"the number of rows of {to}", operation, f"{detail}, {tokens} kept")


def shares_rows(live: runtime.Runtime) -> bool:
    """Whether the threads of a GPU's block share the rows of a head; see `kernels.compact`."""
    return live.is_cuda


def _strides(array: ArrayView) -> tuple[int, int, int]:
    """Strides of sequences, tokens and heads of (B, H, S, D), in the order of `Rows`."""
    sequence, head, token = array.strides[:3]
    return sequence, token, head


def bind_in_place(
    live: runtime.Runtime,
    operation: str,
    rows: Sequence[Rows],
    widths: Sequence[int],
    shape: Sequence[int],
    index: ArrayView,
    placed: bool = False,
) -> Launch:
    """Bind the move of kept rows to the front of their heads, or to given places, for up to four arrays at once.

    Args:
        live: the runtime.
        operation: the operation's name, for messages.
        rows: where the rows of each array lie.
        widths: elements in a row of each array.
        shape: (groups, heads, rows); a group is a sequence, or a sequence of one layer.
        index: (groups, heads, n) or (groups, n); an index below 0 is ignored.
        placed: `index` is (groups, n, 2), pairs of a source row and a destination row; a row is read before it is
            written.

    Raises:
        CapacityError: an array or the launch is larger than 32-bit indices reach.
    """
    from tikv.kernels import compact as kernels
    from tikv.kernels import lanes

    groups, heads, limit = shape
    tokens = index.shape[1 if placed else -1]
    streams: list[Any] = []
    strides: list[int] = []
    units: list[int] = []
    moved = 0
    for a, width in zip(rows, widths, strict=True):
        size = a.array.dtype.itemsize
        word = math.gcd(alignment(a, width), 4 if live.is_cpu else 8)
        checks.addressable(a.array, word, live, "cache", operation)
        units.append(width * size // word)
        streams.append(kernels.Words(word * 8, 0 if live.is_cpu else units[-1]))
        strides += strides_in_words(a, word)
        moved += groups * heads * tokens * width * size
    barrier = not live.is_cpu and shares_rows(live)
    workers = max(1, min(live.threads, groups * heads)) if live.is_cpu and moved >= SERIAL_BYTES else 1
    if live.is_cpu:
        iterations = workers * lanes.LEAST_ITERATIONS if workers > 1 else 1
    else:
        iterations = groups * heads * sum(kernels.threads_of(s.units, barrier) for s in streams)
    checks.countable(iterations, operation)
    serial = live.is_cpu and workers == 1
    bits = index.dtype.itemsize * 8
    choices = live.kernel_style, serial, barrier, tuple(streams), bits, placed
    kernel = launch.kernel(live, kernels.make_compact, *choices)
    arrays = [a.array for a in rows]
    arrays += [arrays[0]] * (kernels.STREAMS - len(arrays)) + [index]
    strides += [0] * (kernels.STREAMS * 5 - len(strides))
    units += [0] * (kernels.STREAMS - len(units))
    group, head, step = index.strides if index.ndim == 3 and not placed else (index.strides[0], 0, index.strides[1])
    numbers = kernels.CompactParams(
        iterations=iterations,
        groups=groups,
        heads=heads,
        tokens=tokens,
        limit=limit,
        workers=workers,
        index_group=group,
        index_head=head,
        index_step=step,
        index_first=index.offset // index.dtype.itemsize,
    )
    return Launch(kernel.bind(iterations, *arrays, tuple(units), tuple(strides), numbers), arrays)


def bind_gather(
    live: runtime.Runtime, operation: str, cache: ArrayView, index: ArrayView, out: ArrayView
) -> list[Launch]:
    """Bind the copy of kept rows into another array: one launch if one stride leads through all heads of each array."""
    batch, heads = cache.shape[:2]
    sizes: dict[str, Any] = {"widths": [cache.shape[3]], "tokens": index.shape[-1]}
    placement = Placement("slots", array=index, limit=cache.shape[2], group=index.strides[0], step=index.strides[-1])
    if index.ndim == 2 or heads == 1:
        src, dst = (Rows(a, *_strides(a)) for a in (cache, out))
        sizes |= {"heads": heads, "groups": batch}
        return [bind_copy(live, operation, src=[src], dst=[dst], src_place=placement, **sizes)]
    even = batch == 1 or all(a.strides[0] == heads * a.strides[1] for a in (cache, index, out))
    sizes |= {"heads": 1, "groups": heads * (batch if even else 1)}
    launches = []
    for b in range(1 if even else batch):
        src, dst = (Rows(a, a.strides[1], a.strides[2], first=b * a.strides[0]) for a in (cache, out))
        of_heads = placement._replace(group=index.strides[1], first=b * index.strides[0])
        launches.append(bind_copy(live, operation, src=[src], dst=[dst], src_place=of_heads, **sizes))
    return launches
