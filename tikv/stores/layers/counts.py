"""A layer's counts on the host and its arrays: slots, tokens, and what each head holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import launch, runtime
from tikv.arrays import ArrayView, Host, as_numpy, to_device
from tikv.errors import PositionError
from tikv.ops import checks
from tikv.ops.fixed_scales import fixed_scale, head_step
from tikv.ops.layouts import Formats, Placement, Scale, reduced_position
from tikv.ops.staging import KnownOnHost
from tikv.stores import lengths
from tikv.stores.history import History


class HeldRows(NamedTuple):
    """The tokens that a layer holds, (B, H, m) int64 each in temporal order; -1 after a head's last.

    B and H are 1 if all sequences and heads hold the same tokens.
    """

    slots: Host
    numbers: Host
    positions: Host

    @property
    def counts(self) -> Host:
        """How many tokens each head holds."""
        counts: Host = (self.slots >= 0).sum(axis=-1)
        return counts


class Layer:
    """One layer's slots and counts, and its arrays if it has memory.

    Examples:
        >>> from tikv.stores.layers.counts import Layer
        >>> layer = Layer(0, capacity=16, window=8, sinks=2)
        >>> layer.length, layer.valid_from = 11, 5  # 11 tokens, and a ring of 6 slots after the sinks
        >>> layer.held, layer.filled, layer.next_position
        (8, 8, 11)
    """

    def __init__(self, index: int, capacity: int, window: int | None, sinks: int) -> None:
        self.index = index
        self.window = window
        self.sinks = sinks if window is not None else 0
        self.slots = capacity if window is None else window
        self.ring = 0 if window is None else window - self.sinks
        self.length = 0  # tokens appended since reset, less those trimmed; after a compaction see `history`
        self.valid_from = 0  # oldest position after the sinks whose slot has not been overwritten
        self.newest = 0  # how many of those tokens the last append brought
        self.history: History | None = None  # what the last compaction left, if there was one
        self.head_lengths: HeadLengths | None = None  # if it left heads of different lengths
        self.k: ArrayView
        self.v: ArrayView
        self.k_scale: ArrayView | None = None
        self.v_scale: ArrayView | None = None
        # The least and the greatest of the keys of each page, (batch, heads, pages, width).
        self.summaries: tuple[ArrayView, ArrayView] | None = None
        self.divisors: tuple[ArrayView | None, ArrayView | None] = (None, None)  # one for all rows, or one per head
        self.formats: Formats = (None, None)  # the formats of K and V, if these are groups of codes
        self.is_copy = False  # whether a layer elsewhere has all the data too
        self.attended: dict[str, ArrayView] = {}  # K, V and `read_scales`, by the names of attention's parameters
        self.form: tuple[Any, ...] = ()  # the form of what attention reads: equal if one launch can serve two layers

    def hold(
        self,
        arrays: tuple[ArrayView, ArrayView, ArrayView | None, ArrayView | None],
        divisors: tuple[ArrayView | None, ArrayView | None],
        formats: Formats,
    ) -> None:
        """Use these arrays as the layer's memory: K, V, and the scales of rows."""
        self.k, self.v, self.k_scale, self.v_scale = arrays
        self.divisors, self.formats = divisors, formats
        scales = zip(("k_scale", "v_scale"), self.read_scales, strict=True)
        self.attended = {"k": self.k, "v": self.v} | {name: a for name, a in scales if a is not None}
        self.form = (self.ring, self.sinks, formats, *self.attended, *[a.key for a in self.attended.values()])

    @property
    def is_plain(self) -> bool:
        """Whether an append writes only rows and scales of rows: there are no summaries, and no divisors."""
        return self.summaries is None and self.divisors == (None, None)

    @property
    def held(self) -> int:
        """Tokens that can be read: the sinks and what the ring still has."""
        fixed = min(self.length, self.sinks)
        return fixed + max(0, self.length - max(self.valid_from, self.sinks))

    @property
    def end(self) -> int:
        """Tokens appended since reset, less those trimmed, whatever compactions dropped."""
        return self.length if self.history is None else self.length + self.history.dropped

    @property
    def next_position(self) -> int:
        """The position of the next token: `end`, unless keys were rotated to other positions."""
        history = self.history
        return self.length if history is None else history.next_position + self.length - history.tokens

    @property
    def filled(self) -> int:
        """Slots that have ever been written, from slot 0."""
        return min(self.length, self.slots)

    @property
    def trimmed_to(self) -> int:
        """`valid_from` if trimming made it later than the ring alone would; else 0."""
        return self.valid_from if self.ring and self.valid_from > max(0, self.length - self.ring) else 0

    @property
    def named(self) -> dict[str, ArrayView]:
        """The layer's arrays by their names in files: K, V, and the scales of int8 or groups."""
        arrays = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: a for name, a in arrays.items() if a is not None}

    @property
    def arrays(self) -> list[ArrayView]:
        """`named` without the names."""
        return list(self.named.values())

    @property
    def read_scales(self) -> tuple[ArrayView | None, ArrayView | None]:
        """What stored rows of K and of V are multiplied by: scales per row, one for all rows, or one per head."""
        k, v = self.divisors
        return self.k_scale if k is None else k, self.v_scale if v is None else v

    def scales_of_rows(self, heads: int, numbers: int) -> list[Scale | None]:
        """`read_scales` with their places: `numbers` per slot, for each of `heads` heads."""
        of_head = self.slots * numbers
        return [
            None if a is None else fixed_scale(a) if a.ndim < 3 else Scale(a, heads * of_head, numbers, of_head)
            for a in self.read_scales
        ]

    def scales_by_head(self, numbers: int, first: int = 0) -> list[Scale | None]:
        """The same with each head as its own sequence, from slot `first` on."""
        steps = [0 if a is None else head_step(a) if a.ndim < 3 else self.slots * numbers for a in self.read_scales]
        return [
            None if a is None else Scale(a, sequence=step, token=numbers if a.ndim > 2 else 0, first=first * step)
            for a, step in zip(self.read_scales, steps, strict=True)
        ]

    @property
    def lengths(self) -> Host:
        """`length` of each head, (B, H), or (1, 1) if it is the same for all."""
        history = self.history
        if history is None or history.even:
            return np.array([[self.length]])
        return history.counts + (self.length - history.tokens)

    @property
    def most_held(self) -> int:
        """Tokens of the head that holds the most."""
        return self.held if self.head_lengths is None else int(self.held_rows().counts.max())

    def held_after(self, tokens: int) -> int:
        """`most_held` after an append of so many tokens."""
        lens = self.lengths + tokens
        start = np.maximum(np.full_like(lens, self.valid_from), self.sinks)
        if self.ring:
            start = np.maximum(start, lens - self.ring)
        return int((np.minimum(lens, self.sinks) + np.maximum(0, lens - start)).max())

    def held_rows(self) -> HeldRows:
        """What the layer holds, and in which slots."""
        lens = self.lengths
        fixed = np.minimum(lens, self.sinks)
        start = np.maximum(np.full_like(lens, self.valid_from), self.sinks)
        if self.ring:
            start = np.maximum(start, lens - self.ring)
        held = fixed + np.maximum(0, lens - start)
        j = np.arange(int(held.max(initial=0)))
        fixed, start = fixed[..., None], start[..., None]
        order = np.where(j < fixed, j, start + j - fixed)  # as if only the remaining tokens had ever been appended
        gone = j >= held[..., None]
        slots, numbers, positions = self.slots_of(order), order, order
        history = self.history
        if history is not None:
            shape = (*history.counts.shape, len(j))
            every, counts = np.broadcast_to(order, shape), history.counts[..., None]
            if history.tokens:
                at = np.clip(every, 0, history.tokens - 1)
                older = np.take_along_axis(history.numbers, at, -1)
                numbers = np.where(every < counts, older, history.end + every - counts)
                moved = np.take_along_axis(history.positions, at, -1)
                positions = np.where(every < counts, moved, history.next_position + every - counts)
            else:
                numbers, positions = history.end + every, history.next_position + every
        return HeldRows(*(np.where(gone, -1, a) for a in (slots, numbers, positions)))

    def slots_of(self, positions: Host) -> Host:
        """The slots of positions."""
        if self.ring == 0:
            return positions
        return np.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.ring)

    def slot_of(self, position: int) -> int:
        """The slot of a position."""
        return reduced_position(position, self.sinks, self.ring)

    def placement(self, position: int, tokens: int = 0) -> Placement:
        """The slots of tokens from a position on; if `tokens` are written there, a ring keeps the last of them."""
        kind, keep = ("ring", max(0, tokens - self.ring)) if self.ring else ("linear", 0)
        return Placement(kind, position=self.slot_of(position), sinks=self.sinks, ring=self.ring, keep=keep)

    def refuse_trim(self, operation: str, n: int, length: int) -> None:
        """Raise PositionError if a store of `length` tokens drops `n`, and the layer lacks some of those that stay."""
        drop = self.end - (length - n)
        if drop <= 0:
            return
        if self.history is not None and self.end - drop < self.history.first_whole:
            first = self.history.first_whole
            raise PositionError(
                f"{operation}: cannot drop {n} tokens: layer {self.index} cannot go back beyond token {first - 1}, "
                f"which compact() dropped. Drop at most {length - first}, or reset()."
            )
        wrapped = self.head_lengths is not None and self.ring > 0 and self.length > self.slots
        if wrapped or self.sinks < self.length - drop < self.valid_from:
            oldest = self.end if wrapped else self.end - self.length + self.valid_from
            raise PositionError(
                f"{operation}: cannot drop {n} tokens after the window has wrapped (layer {self.index}: "
                f"length={self.end}, window={self.window}, sinks={self.sinks}): positions before {oldest} are "
                f"overwritten. Drop at most {length - oldest}, or reset()."
            )

    def refuse_align(self, operation: str, length: int) -> None:
        """Raise PositionError unless the layer without its tokens from number `length` on is as it was before them.

        Of what they overwrote in a ring, it may lack only the oldest token, which the next query does not see.
        """
        drop = self.end - length
        if drop <= 0:
            return
        keep = self.length - drop
        seen = max(self.sinks, keep + 1 - self.ring)  # the oldest after the sinks that the next query sees
        trimmed = 0 < self.trimmed_to <= keep  # then none of them overwrote anything
        wrapped = self.head_lengths is not None and self.ring > 0 and self.length > self.slots
        if self.history is not None and length < self.history.first_whole:
            why = f"compact() dropped token {self.history.first_whole - 1}"
        elif wrapped or (seen < min(keep, self.valid_from) and not trimmed):
            why = f"its window (window={self.window}, sinks={self.sinks}) has overwritten tokens that it would need"
        else:
            return
        raise cannot_align(operation, self.index, self.end, length, why)

    def require_room(self, operation: str, tokens: int) -> None:
        """Raise CapacityError or PositionError if the layer has no room for `tokens` more tokens."""
        if self.ring == 0:
            checks.fits_linear(self.length, tokens, self.slots, f"{operation} (layer {self.index})", checks.STORE_NAMES)
        checks.integer(self.length + tokens, "length", operation)

    def grow(self, tokens: int) -> None:
        """Count that many more tokens, in a layer whose heads have the same length."""
        self.length += tokens
        self.newest = tokens
        if self.ring and self.length - self.ring > self.valid_from:
            self.valid_from = self.length - self.ring


class HeadLengths:
    """The length of each head on the device, int64 (B, H), for layers whose heads have different ones."""

    def __init__(self, live: runtime.Runtime, lens: Host) -> None:
        self.runtime = live
        self.host = lens.astype(np.int64)
        self.array = self.shifted(0)

    def shifted(self, tokens: int) -> ArrayView:
        """A new array of the lengths plus `tokens`."""
        array = to_device(self.host + tokens, self.runtime)
        array.owner = KnownOnHost(array.owner, self.host if tokens == 0 else self.host + tokens)
        return array

    def grow(self, tokens: int) -> None:
        """Count that many more tokens for each head, in one launch; a negative number counts fewer."""
        self.host += tokens
        if self.runtime.is_cpu:
            as_numpy(self.array)[...] = self.host
            return
        advance_counts(self.runtime, self.array.restrided((self.host.size,), (1,)), tokens)


def advance_counts(live: runtime.Runtime, counts: ArrayView, tokens: int) -> None:
    """Add `tokens` to each of these numbers on the device, in one launch."""
    from tikv.kernels.advance import make_advance

    kernel, count = launch.kernel(live, make_advance, live.kernel_style), counts.shape[0]
    kernel.bind(count, counts, (counts.offset // counts.dtype.itemsize, count, tokens)).launch()


def require_uncompacted(layers: Sequence[Layer], operation: str, remedy: str) -> None:
    """Raise PositionError if a layer was compacted, since slots then do not follow from positions."""
    for layer in layers:
        if layer.history is not None:
            raise PositionError(
                f"{operation}: layer {layer.index} was compacted, so its slots do not follow from positions. {remedy}"
            )


def cannot_align(operation: str, layer: int, end: int, length: int, why: str) -> PositionError:
    """The error for a layer that cannot go back to a length."""
    return PositionError(
        f"{operation}: layer {layer} cannot go back from {end} tokens to {length}: {why}. Call reset() and begin "
        "again, or append the missing tokens to the other layers."
    )


def ends_of(layers: Sequence[Layer]) -> list[int]:
    """The `end` of each layer; a property costs a call, and decode loops wait for this."""
    return [layer.length if layer.history is None else layer.end for layer in layers]


def refuse_uneven(operation: str, layers: Sequence[Layer]) -> None:
    """Raise PositionError before a write to the first layer if `lengths.differ`."""
    ends = ends_of(layers)
    if ends.count(ends[0]) < len(ends):
        lengths.refuse_different(operation, ends, lengths.remedy_of_store(ends))


def refuse_unfinished(operation: str, layers: Sequence[Layer], layer: int, tokens: int) -> None:
    """Raise PositionError before a layer's next tokens are written, if a step seems to have ended between layers."""
    if layer == 0:
        refuse_uneven(operation, layers)
    if layers[layer].length == 0:
        ends = ends_of(layers)
        newest = [each.newest for each in layers]
        lengths.refuse_fewer(operation, ends, newest, layer, tokens, lengths.remedy_of_store(ends))


def refuse_uneven_step(operation: str, layers: Sequence[Layer]) -> None:
    """Raise PositionError before a write to all layers if any two have different lengths."""
    ends = ends_of(layers)
    if ends.count(ends[0]) < len(ends):
        raise lengths.different(operation, ends, lengths.remedy_of_store(ends))


def refuse_missed(operation: str, layers: Sequence[Layer], number: int) -> None:
    """Raise PositionError if a layer has no tokens and others have some: an append was forgotten."""
    most = max(layers, key=lambda layer: layer.end)
    if layers[number].end == 0 < most.end:
        raise PositionError(
            f"{operation}: layer {number} holds no tokens, and layer {most.index} holds {most.end}. Append to layer "
            f"{number} first, or use extend(). If the empty result is to be merged with others, pass return_lse=True."
        )


def check_step(layers: Sequence[Layer], tokens: int, operation: str) -> list[int]:
    """What each layer was trimmed to; raises if one of these layers of one length has no room for `tokens` more."""
    length = layers[0].length
    for layer in layers:
        if layer.ring == 0:
            checks.fits_linear(length, tokens, layer.slots, f"{operation} (layer {layer.index})", checks.STORE_NAMES)
    return [layer.trimmed_to for layer in layers]


def drawn_states(layer: Layer, heads: int, mass: Host | None) -> list[tuple[str, tuple[Any, ...]]]:
    """For each head that is drawn separately: its name, and the other arguments of `picture.Slots`.

    All heads are drawn as one if they hold the same tokens and no mass colours them.
    """
    form = (layer.slots, layer.sinks, layer.ring > 0)
    if layer.history is None and mass is None:
        return [("", (*form, layer.length, layer.valid_from))]
    held, lens = layer.held_rows(), layer.lengths
    slots, positions = (np.broadcast_to(a[0], (heads, a.shape[2])) for a in (held.slots, held.positions))
    alike = mass is None and (slots == slots[0]).all() and (positions == positions[0]).all()
    states = []
    for h in range(1 if alike else heads):
        there = slots[h] >= 0
        true, weights = np.full(layer.slots, -1), np.zeros(layer.slots)
        true[slots[h][there]] = positions[h][there]
        if mass is not None:
            weights[slots[h][there]] = mass[0, h][there] / max(float(mass[0, h].max(initial=0)), 1e-30)
        length = int(np.broadcast_to(lens[0], heads)[h])
        shown = tuple(weights.tolist()) if mass is not None else ()
        name = "" if alike else f", head {h}"
        states.append((name, (*form, length, layer.valid_from, tuple(true.tolist()), shown)))
    return states
