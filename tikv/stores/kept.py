"""What a compaction left of a layer: which tokens its slots hold since, and how many each head has.

A layer that was compacted is, to its memory, to appends and to attention, one to which only the kept tokens were ever
appended: `Layer.length` counts so. What is kept here says which tokens they are. Where heads keep different numbers of
them, `Layer.length` is that of the head with the most, and the lengths of all lie on the device for launches to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tikv import launch, runtime
from tikv.arrays import ArrayView, Host, as_numpy, to_device
from tikv.errors import PositionError
from tikv.ops.staging import KnownOnHost

if TYPE_CHECKING:
    from tikv.stores.layer import Layer


class Kept(NamedTuple):
    """What a layer held when it was compacted last; all on the host.

    Attributes:
        counts: (B, H) int64, tokens that each head kept.
        numbers: (B, H, n) int64, the number of each of them among all tokens appended, from 0; -1 behind a head's last.
        positions: the same for their positions, which differ from the numbers where keys were rotated.
        end: tokens appended until then, less those trimmed.
        next_position: of the token that came next.
    """

    counts: Host
    numbers: Host
    positions: Host
    end: int
    next_position: int

    @property
    def tokens(self) -> int:
        """Of the head that kept the most."""
        return int(self.numbers.shape[-1])

    @property
    def even(self) -> bool:
        """Whether all heads kept as many."""
        return self.counts.size == 0 or int(self.counts.min()) == self.tokens

    @property
    def first_whole(self) -> int:
        """From which number on all tokens were kept by all heads."""
        back = np.arange(self.tokens)
        place = self.counts[..., None] - 1 - back
        found = np.take_along_axis(self.numbers, np.maximum(place, 0), axis=-1)
        follows = (place >= 0) & (found == self.end - 1 - back)
        return self.end - int(np.cumprod(follows, axis=-1).sum(axis=-1).min())

    def trimmed(self, drop: int) -> Kept:
        """Without the `drop` newest tokens, which all heads have."""
        keep = self.tokens - drop
        counts = self.counts - drop
        gone = np.arange(keep) >= counts[..., None]
        numbers, positions = (np.where(gone, -1, a[..., :keep]) for a in (self.numbers, self.positions))
        return Kept(counts, numbers, positions, self.end - drop, self.next_position - drop)

    def of_sequences(self, index: Host) -> Kept:
        """The same of these sequences."""
        counts = self.counts[index]
        most = int(counts.max(initial=0))
        return Kept(
            counts, self.numbers[index, :, :most], self.positions[index, :, :most], self.end, self.next_position
        )

    def require_sound(self) -> None:
        """The numbers of each head rise, below the end, and so do the positions; -1 stands behind the last.

        Raises:
            ValueError: otherwise.
        """
        for a, end in ((self.numbers, self.end), (self.positions, self.next_position)):
            there = np.arange(self.tokens) < self.counts[..., None]
            rises = np.diff(a, axis=-1, prepend=-1) > 0
            if not ((a == -1) | there).all() or not (rises | ~there).all() or (a >= end).any():
                raise ValueError("what a layer kept does not rise, or goes beyond its end")
        if self.tokens != int(self.counts.max(initial=0)):
            raise ValueError("what a layer kept is wider than what its heads have")


class HeldRows(NamedTuple):
    """The tokens that a layer holds, (B, H, m) int64 each in temporal order; -1 behind a head's last.

    B and H are 1 where all sequences and heads hold the same.
    """

    slots: Host
    numbers: Host
    positions: Host

    @property
    def counts(self) -> Host:
        """How many each head holds."""
        found: Host = (self.slots >= 0).sum(axis=-1)
        return found


def lengths_of(layer: Layer) -> Host:
    """`Layer.length` of each head, (B, H), or (1, 1) where it is one for all."""
    if layer.kept is None or layer.kept.even:
        return np.array([[layer.length]])
    return layer.kept.counts + (layer.length - layer.kept.tokens)


def held_rows(layer: Layer) -> HeldRows:
    """What a layer holds, and in which slots."""
    lens = lengths_of(layer)
    fixed = np.minimum(lens, layer.sinks)
    start = np.maximum(np.full_like(lens, layer.valid_from), layer.sinks)
    if layer.ring:
        start = np.maximum(start, lens - layer.ring)
    held = fixed + np.maximum(0, lens - start)
    j = np.arange(int(held.max(initial=0)))
    fixed, start = fixed[..., None], start[..., None]
    order = np.where(j < fixed, j, start + j - fixed)  # as if only what is kept had ever been appended
    gone = j >= held[..., None]
    slots = order
    if layer.ring:
        slots = np.where(order < layer.sinks, order, layer.sinks + (order - layer.sinks) % layer.ring)
    numbers = positions = order
    kept = layer.kept
    if kept is not None:
        shape = (*kept.counts.shape, len(j))
        whole, counts = np.broadcast_to(order, shape), kept.counts[..., None]
        if kept.tokens:
            at = np.clip(whole, 0, kept.tokens - 1)
            numbers = np.where(whole < counts, np.take_along_axis(kept.numbers, at, -1), kept.end + whole - counts)
            moved = np.take_along_axis(kept.positions, at, -1)
            positions = np.where(whole < counts, moved, kept.next_position + whole - counts)
        else:
            numbers, positions = kept.end + whole, kept.next_position + whole
    return HeldRows(*(np.where(gone, -1, a) for a in (slots, numbers, positions)))


def most_held(layer: Layer) -> int:
    """Tokens of the head that holds the most."""
    return layer.held if layer.head_lengths is None else int(held_rows(layer).counts.max())


class HeadLengths:
    """The length of each head on the device, int64 (B, H), for layers whose heads have different ones.

    Args:
        live: the runtime.
        lens: (B, H) lengths now.
    """

    def __init__(self, live: runtime.Runtime, lens: Host) -> None:
        self.runtime = live
        self.host = lens.astype(np.int64)
        self.array = self.shifted(0)

    def shifted(self, tokens: int) -> ArrayView:
        """A new array of the lengths, and so many tokens more."""
        found = to_device(self.host + tokens, self.runtime)
        found.owner = KnownOnHost(found.owner, self.host if tokens == 0 else self.host + tokens)
        return found

    def grow(self, tokens: int) -> None:
        """Count that many more tokens for each head, in one launch; fewer where the number is negative."""
        self.host += tokens
        if self.runtime.is_cpu:
            as_numpy(self.array)[...] = self.host
            return
        from tikv.kernels.advance import make_advance

        array, count = self.array, self.host.size
        kernel = launch.kernel(self.runtime, make_advance, self.runtime.kernel_style)
        flat = array.restrided((count,), (1,))
        kernel.bind(count, flat, (array.offset // array.dtype.itemsize, count, tokens)).launch()


def require_uncompacted(layers: Sequence[Layer], operation: str, remedy: str) -> None:
    """Slots follow from positions, as what counts them on the device takes for granted.

    Raises:
        PositionError: a layer was compacted.
    """
    for layer in layers:
        if layer.kept is not None:
            raise PositionError(
                f"{operation}: layer {layer.index} was compacted, so its slots do not follow from positions. {remedy}"
            )
