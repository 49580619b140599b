"""Merges of a compaction: rows that are dropped are added, weighted, to rows of their heads that are kept.

The rows are decoded, added in float32 in the order of the tokens, and coded again in memory of their own, before
anything is written to a cache. Once the kept rows have moved, the sums replace those that got something.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, launch, runtime
from tikv.arrays import Array, ArrayView, Host, Views, as_numpy, describe, new_array, read_host, to_device, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import blocks, checks
from tikv.ops.indices import index_array
from tikv.stores.layers.append import Appends
from tikv.stores.layers.counts import Layer
from tikv.stores.layers.memory import LayerMemory

SERIAL_NUMBERS = 1 << 14  # on CPU, below this the calling thread finishes before another one wakes


class Merge(NamedTuple):
    """Which of the held rows of each head get something: numbers in the old order, (B, H, n), -1 after a head's last.

    Attributes:
        targets: the rows that others are added to.
        places: their numbers among the kept rows.
        sources: (pairs,) for each row that is added, its sequence, head and number, in that order.
        into: (pairs,) which target of its head it is added to.
        weights: (pairs,) float32.
        only_values: whether keys stay as they are.
    """

    targets: Host
    places: Host
    sources: tuple[Host, Host, Host]
    into: Host
    weights: Host
    only_values: bool

    def changes(self, name: str) -> bool:
        """Whether rows or scales of this name, such as "k_scale", get something."""
        return not (self.only_values and name.startswith("k"))

    def sums(
        self, live: runtime.Runtime, rows: ArrayView, steps: tuple[int, int, int], token_major: bool = False
    ) -> ArrayView:
        """The rows that the targets become, float32 (B, H, n, D), or (n, H, D) of the only sequence; one launch.

        Args:
            live: the runtime.
            rows: all held rows, decoded: float32, contiguous.
            steps: how many rows lead to the next sequence, head and token of `rows`.
            token_major: whether the tokens come before the heads.
        """
        from tikv.kernels.merge_rows import MergeParams, make_merge_rows

        (batch, heads, n), width = self.targets.shape, rows.shape[-1]
        order = np.arange(batch * heads * n).reshape(batch, heads, n)
        if token_major:
            order = np.arange(heads * n).reshape(1, n, heads).transpose(0, 2, 1)
        b, h, _ = np.ogrid[:batch, :heads, :n]
        targets = np.full(order.size, -1, np.int32)
        targets[order] = np.where(self.targets < 0, -1, b * steps[0] + h * steps[1] + self.targets * steps[2])
        of_b, of_h, number = self.sources
        place = order[of_b, of_h, self.into]
        sort = np.argsort(place, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=order.size))]).astype(np.int32)
        sources = (of_b * steps[0] + of_h * steps[1] + number * steps[2])[sort].astype(np.int32)
        shape = (n, heads, width) if token_major else (batch, heads, n, width)
        out, items = new_array(shape, dtypes.float32, live), order.size * width
        checks.integer(items, "numbers of merged rows", "compact", high=2**31 - 1)
        checks.addressable(rows, 4, live, "the held rows", "compact")
        index = [to_device(a, live) for a in (targets, starts, sources, self.weights[sort].astype(np.float32))]
        serial = live.is_cpu and items < SERIAL_NUMBERS
        kernel = launch.kernel(live, make_merge_rows, live.kernel_style, serial)
        params = MergeParams(items, width, rows.offset // 4)
        kernel.bind(items, out, rows, *index, tuple(params)).launch()
        live.synchronize()  # the launch reads arrays that only this call keeps alive
        return out


def checked_merge(
    operation: str, merge: Any, keep: Host, counts: Host, live: runtime.Runtime, per_sequence: bool = False
) -> Merge | None:
    """What a caller merges, checked; None if nothing gets anything.

    Args:
        operation, merge, live: those of the call.
        keep: (B, H, n) what is kept, in the old order; -1 after a head's last.
        counts: (B, H) how many rows each head holds.
        per_sequence: whether the arrays have no axis of sequences.

    Raises:
        OptionError, ShapeError, DTypeError: it is not two arrays of that shape, or of one more axis.
        PositionError: a row is kept and added, or is added to one that is not kept or not held.
    """
    if not isinstance(merge, list | tuple) or len(merge) not in (2, 3) or not is_values(merge[2:]):
        raise OptionError(
            f"{operation}: merge must be (to, weights), two arrays with a number for each held token, or (to, weights, "
            "'values') to leave keys as they are."
        )
    batch, heads = counts.shape
    held = int(counts.max(initial=0))
    shape = (heads, held) if per_sequence else (batch, heads, held)
    to = index_array(merge[0], "to", operation)
    several = view(to, "to", operation).shape[len(shape) :][:1]  # how many tokens each may be added to, if not one
    to = _on_host(to, "to", dtypes.INDICES, (*shape, *several), operation, live)
    weights = _on_host(merge[1], "weights", (dtypes.float32,), (*shape, *several), operation, live)
    to, weights = (a.reshape(batch, heads, held, *(several or (1,))) for a in (to, weights))
    rank = np.full((batch, heads, held + 1), -1, np.int64)  # the last entry is that of index -1
    np.put_along_axis(rank, keep.astype(np.int64), np.broadcast_to(np.arange(keep.shape[-1]), keep.shape), axis=-1)
    rank[..., -1] = -1
    ends = np.where(np.arange(held) < counts[..., None], counts[..., None], 0)[..., None]
    _refuse(operation, (to < -1) | (to >= ends), to, "is not a token that its head holds. Use -1 for none")
    adds = to >= 0
    _refuse(operation, adds & (rank[..., :-1, None] >= 0), to, "is of a token that is kept. Use -1 there")
    into = np.take_along_axis(rank, np.where(adds, to, -1).reshape(batch, heads, -1), axis=-1).reshape(to.shape)
    _refuse(operation, adds & (into < 0), to, "is a token that is dropped. Add to a token that keep keeps")
    if not adds.any():
        return None
    of_b, of_h, number, _ = np.nonzero(adds)
    target = to[adds]
    gets = np.zeros((batch, heads, held), bool)
    gets[of_b, of_h, target] = True
    n = int(gets.sum(axis=-1).max())
    numbers = np.cumsum(gets, axis=-1) - 1
    targets, places = (np.full((batch, heads, n), -1, np.int64) for _ in range(2))
    where = np.nonzero(gets)
    targets[where[0], where[1], numbers[where]] = where[2]
    places[where[0], where[1], numbers[where]] = rank[where]
    into = numbers[of_b, of_h, target]
    return Merge(targets, places, (of_b, of_h, number), into, weights[adds], bool(merge[2:]))


def is_values(rest: Any) -> bool:
    """Whether what follows (to, weights) is nothing, or "values"."""
    return not rest or (isinstance(rest[0], str) and rest[0] == "values")


def _refuse(operation: str, wrong: Host, to: Host, why: str) -> None:
    """Raise PositionError if an entry of `to` is wrong."""
    if wrong.any():
        b, h, j, i = (int(number) for number in np.argwhere(wrong)[0])
        entry = int(to[b, h, j, i])
        raise PositionError(f"{operation}: to of sequence {b}, head {h}, token {j} is {entry}, which {why}.")


def _on_host(
    array: Array, name: str, allowed: Any, shape: tuple[int, ...], operation: str, live: runtime.Runtime
) -> Host:
    """An array of the caller's on the host, of one of these dtypes and of this shape."""
    a = view(array, name, operation)
    checks.on_device([(name, a)], live, operation)
    if a.dtype not in allowed:
        needed = " or ".join(dtype.name for dtype in allowed)
        raise DTypeError(f"{operation}: {name} is {describe(a)}; it must be {needed}.")
    if a.shape != shape:
        raise ShapeError(f"{operation}: {name} is {describe(a)} where {shape} is needed, one for each held token.")
    return np.array(as_numpy(a) if a.device == "cpu" else read_host(a, live))


def refuse_with_rope(operation: str, rope: Any) -> None:
    """Raise OptionError if keys would be merged and rotated in one call."""
    if rope is not None:
        raise OptionError(
            f"{operation}: merge cannot be combined with rope, since keys at different positions would be added. "
            "Merge first, and call it again with rope, keeping all tokens."
        )


class MergedRows(NamedTuple):
    """The sums of a contiguous layer as its dtype stores them, in memory of their own."""

    merge: Merge
    layer: Layer  # of n tokens

    @classmethod
    def of(cls, operation: str, memory: LayerMemory, merge: Merge, held: list[ArrayView]) -> MergedRows:
        """Add up and code the rows of a layer, of which `held` are K and V decoded, float32 (B, H, held, D)."""
        _, heads, tokens = held[0].shape[:3]
        steps = heads * tokens, tokens, 1
        sums = [merge.sums(memory.runtime, a, steps) for a in held]
        layer = Layer(0, merge.targets.shape[-1], None, 0)
        Appends(memory.like([layer])).append(operation, layer, Views(sums), "head_major")
        return cls(merge, layer)

    def write(self, layer: Layer) -> None:
        """Write them to the places that the kept rows have now."""
        b, h, n = np.nonzero(self.merge.places >= 0)
        place, heads = self.merge.places[b, h, n], self.merge.places.shape[1]
        row = b * heads + h
        for name in filter(self.merge.changes, layer.named):
            src, dst = self.layer.named[name], layer.named[name]
            pairs = np.stack([row * src.shape[2] + n, row * dst.shape[2] + place], axis=1).astype(np.int32)
            blocks.swap_blocks(_as_rows(src), _as_rows(dst), pairs)


def _as_rows(a: ArrayView) -> ArrayView:
    """A contiguous (batch, heads, slots[, width]) array as rows."""
    width = a.shape[3] if a.ndim == 4 else 1
    return a.restrided((math.prod(a.shape[:3]), width), (width, 1))
